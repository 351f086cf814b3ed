"""Chapter 4's command, as a reader types it."""

import re
import subprocess
import sys
from pathlib import Path

import book
import numpy as np
import programs
import pytest
from runs import check_summary, state, summary

CHAPTER = book.ROOT / "04_data_pipeline"


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.08, marks=pytest.mark.thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_most: float, tmp_path: Path) -> None:
    """It makes the small store if it is not there, serves it, trains, and leaves no process."""
    before = programs.running()
    command = [sys.executable, "train.py", "--output-dir", tmp_path]
    command += ["--max-steps", str(steps)] if steps != 200 else []
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:  # a pipe would wait for all
        ended = subprocess.run(command, cwd=CHAPTER, stdout=out, stderr=err)
    printed, said = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert [process for process in programs.running() if process not in before] == []
    assert ended.returncode == 0, said
    assert check_summary(printed) <= at_most
    assert "warning" not in said.lower()
    assert (tmp_path / "fill.png").read_bytes().startswith(b"\x89PNG")
    assert state(tmp_path)["step"] == steps
    requests = float(re.search(r"([\d.]+) requests and [\d.]+ MB for a sample\n", printed)[1])
    assert requests == pytest.approx(summary(tmp_path)["requests_per_sample"], abs=0.05)
