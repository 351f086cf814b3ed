"""Chapter 4's command, as a reader types it."""

import re
from pathlib import Path

import book
import numpy as np
import pytest
from runs import check_summary, run_readers_command, summary

CHAPTER = book.ROOT / "04_data_pipeline"


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.08, marks=pytest.mark.thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_most: float, tmp_path: Path) -> None:
    """It makes the small store if it is not there, serves it, trains, and leaves no process."""
    printed = run_readers_command(CHAPTER, steps, tmp_path)
    assert check_summary(printed) <= at_most
    requests = float(re.search(r"([\d.]+) requests and [\d.]+ MB for a sample\n", printed)[1])
    assert requests == pytest.approx(summary(tmp_path)["requests_per_sample"], abs=0.05)
