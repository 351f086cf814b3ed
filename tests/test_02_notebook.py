"""Chapter 2's notebook, from top to bottom with few steps, which starts train.py on one device and on two."""

import re
from pathlib import Path

import book


def test_the_notebook_runs_with_reduced_settings(tmp_path: Path) -> None:
    notebook = book.execute(book.clone(tmp_path) / "02_multi_gpu/notebook.ipynb", {"MAX_STEPS": 4})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert re.findall(r"(\d process\w*)\nRMSE over the unseen cells", printed) == ["1 process", "2 processes"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7
