"""Chapter 4's notebook, from top to bottom: which map a sample is from, the waiting in each step, the studies."""

import book

PICTURES = 6  # mixing, two of waiting, the ladder, workers, widths of shuffle


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute("04_data_pipeline/notebook.ipynb", {"LATENCY_MS": 0, "STEPS": 3})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES
