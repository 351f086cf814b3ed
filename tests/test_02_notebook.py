"""Chapter 2's notebook, from top to bottom with few steps: three runs, one of which averages wrongly, and its pictures."""

import re
from pathlib import Path

import book
import numpy as np
from runs import losses

RUNS = ["one process", "two processes", "wrong"]


def test_the_notebook_runs_with_reduced_settings(tmp_path: Path) -> None:
    chapter = book.clone(tmp_path) / "02_multi_gpu"
    book.judge_by_few(chapter / "train.py", chapter / "train_ddp_by_hand.py")
    notebook = book.execute(chapter / "notebook.ipynb", {"MAX_STEPS": 4, "PATCH_SIZE": 16})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert re.findall(r"(.+)\nRMSE over the unseen cells", printed) == RUNS
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6

    folder = chapter / "outputs/notebook"
    one, two, wrong = (np.array(losses(folder / name)) for name in ("one_process", "two_processes", "wrong"))
    assert len(one) == len(two) == len(wrong) == 4
    assert abs(wrong / one - 1).max() > 1e-3 > 100 * abs(two / one - 1).max()
