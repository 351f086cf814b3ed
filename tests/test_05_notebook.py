"""Chapter 5's notebook, from top to bottom."""

import book

PICTURES = 5  # timelines, operators before and after, waterfall, roofline, memory


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute("05_model_profiling/notebook.ipynb", {"BATCH_SIZE": 4, "PATCH_SIZE": 16})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES
