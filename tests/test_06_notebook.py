"""Chapter 6's notebook, from top to bottom."""

import book

PICTURES = 8  # diary, maps, seams, skill, gain by place, validation, plan, search


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute("06_whats_next/notebook.ipynb", {"TIMES": ["1991-06", "1991-06"]})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES
