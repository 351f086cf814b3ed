"""Chapter 5's command, as a reader types it."""

import re
from pathlib import Path

import book
import numpy as np
import programs
import psutil
import pytest
from runs import check_summary, run_readers_command, summary

CHAPTER = book.ROOT / "05_model_profiling"
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.08, marks=thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_most: float, tmp_path: Path) -> None:
    """It makes the small store if it is not there, serves it, trains, and leaves no process."""
    printed = run_readers_command(CHAPTER, steps, tmp_path)
    assert check_summary(printed) <= at_most

    requests, size = re.search(r"([\d.]+) requests and ([\d.]+) MB for a sample\n", printed).groups()
    metrics = summary(tmp_path)
    assert float(requests) == pytest.approx(metrics["requests_per_sample"], abs=0.05)
    assert float(size) == pytest.approx(metrics["bytes_per_sample"] / 1e6, abs=0.005)
    # A block is a map, whose two variables have at least one object each, and at most 8 patches are cut from it.
    assert metrics["requests_per_sample"] >= 2 / 8


@thorough
def test_the_readers_command_killed_leaves_no_process(tmp_path: Path) -> None:
    """Neither the server, nor a worker, nor the process that starts the workers."""
    before = programs.running()
    flags = ["--max-steps", 4, "--num-workers", 2, "--output-dir", tmp_path]
    assert programs.run(CHAPTER / "train.py", *flags, kill_at_step=2).code == -9
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []
