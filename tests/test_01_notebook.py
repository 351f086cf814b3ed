"""Chapter 1's notebook, from top to bottom with few steps."""

from pathlib import Path

import book


def test_the_notebook_runs_with_reduced_settings(tmp_path: Path) -> None:
    chapter = book.clone(tmp_path) / "01_setup"
    book.judge_by_few(chapter / "train.py", chapter / "train_by_hand.py")
    notebook = book.execute(chapter / "notebook.ipynb", {"MAX_STEPS": 4})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 8
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("4 steps in ") == 2  # by hand, and with Lightning
