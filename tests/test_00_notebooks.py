"""The notebooks, from top to bottom with reduced settings. In one file that comes early: it is among the longest."""

import re
from pathlib import Path

import book
import numpy as np
import pytest
from runs import losses

pytestmark = pytest.mark.usefixtures("forked_kernels")


def look(notebook: book.NotebookNode) -> tuple[int, str]:
    """How many pictures an executed notebook has, and what it has printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return pictures, "".join(output.get("text", "") for output in outputs)


def test_chapter_1_trains_by_hand_and_with_lightning(tmp_path: Path) -> None:
    chapter = book.clone(tmp_path) / "01_setup"
    settings = {"MAX_STEPS": 4, "EVAL_SAMPLES": 8}
    pictures, printed = look(book.execute(chapter / "notebook.ipynb", settings))
    assert pictures == 8
    assert printed.count("4 steps in ") == 2


def test_chapter_2_has_three_runs_of_which_one_averages_wrongly(tmp_path: Path) -> None:
    chapter = book.clone(tmp_path) / "02_multi_gpu"
    settings = {"MAX_STEPS": 4, "PATCH_SIZE": 16, "EVAL_SAMPLES": 8}
    pictures, printed = look(book.execute(chapter / "notebook.ipynb", settings))
    assert pictures == 6
    runs = ["one process", "two processes", "wrong"]
    assert re.findall(r"(.+)\nRMSE over the unseen cells", printed) == runs
    folders = [chapter / "outputs/notebook" / name.replace(" ", "_") for name in runs]
    one, two, wrong = (np.array(losses(folder)) for folder in folders)
    assert len(one) == len(two) == len(wrong) == 4
    assert abs(wrong / one - 1).max() > 1e-3 > 100 * abs(two / one - 1).max()


NOTEBOOKS = {  # reduced settings, pictures, and something that is printed
    "03_cloud_data": ({"LATENCY_MS": 0, "SAMPLES": 4}, 4, "12 GETs"),  # of a map: six chunks of each variable
    "04_data_pipeline": ({"LATENCY_MS": 0, "STEPS": 3}, 6, ""),
    "05_model_profiling": ({"BATCH_SIZE": 4, "PATCH_SIZE": 16}, 5, ""),
    "06_whats_next": ({"TIMES": ["1991-06", "1991-06"]}, 8, ""),
}


@pytest.mark.parametrize("chapter", NOTEBOOKS)
def test_the_notebook_runs_with_reduced_settings(chapter: str) -> None:
    settings, expected, text = NOTEBOOKS[chapter]
    pictures, printed = look(book.execute(f"{chapter}/notebook.ipynb", settings))
    assert pictures == expected
    assert text in printed
