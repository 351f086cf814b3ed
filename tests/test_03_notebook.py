"""Chapter 3's notebook, from top to bottom: the bucket, the chunk grid, the time line of one batch."""

import book

PICTURES = 4  # a map, patches over the chunk grid, the time line, shapes of chunks


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute("03_cloud_data/notebook.ipynb", {"LATENCY_MS": 0, "SAMPLES": 4})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "12 GETs" in printed  # of a map: six chunks of each variable
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES
