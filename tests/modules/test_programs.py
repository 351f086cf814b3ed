"""Modules within whole programs, and in the examples of a page."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import book
import numpy as np
import programs
import psutil
import pytest
import tune
import xarray as xr
from made_up_winds import COLUMNS, ROWS, flags_for, make_datamodule, make_winds, with_moving_gaps, write
from optuna.trial import TrialState


def test_missing_chunks_are_counted_and_printed(tmp_path: Path) -> None:
    """In a run on a store that is strange in every way. Each is counted once: an epoch reads all training times."""
    gappy = with_moving_gaps(make_winds()[["u", "v"]])
    time = xr.date_range("1982-01-01", periods=144, freq="10D", calendar="360_day", use_cftime=True)
    levels = xr.concat([gappy, gappy], xr.Variable("level", [500, 850])).transpose("time", ...)
    packing = {"dtype": "int16", "scale_factor": 0.001, "_FillValue": -32768, "fill_value": -32768}
    path = tmp_path / "store"
    write(path, levels.assign_coords(time=time), (1, 1, ROWS, COLUMNS), **packing)
    flags = flags_for(path, "--level", 850, "--missing", "mask")
    made = make_datamodule(flags)
    judged = [each.maker.period.positions[each.patch(0, 0).time] for each in (made.validation, made.test)]
    shutil.rmtree(tmp_path / "kept")  # the climatology of the store when it was whole
    for lost in (0, 40, 70, *judged):  # the first three are to train on
        shutil.rmtree(path / f"u/c/{lost}/1")
    flags += "--max-steps 18 --validate-every 18 --patches-per-block 1 --accelerator cpu".split()
    done = programs.require_success(
        "06_whats_next/train.py", *flags, "--output-dir", tmp_path / "run", **programs.QUICK
    )
    assert "missing chunks in the training times: 3\n" in done.out
    assert "missing chunks that were asked for: 5\n" in done.out


@pytest.mark.thorough
def test_a_search_in_two_processes_that_is_killed_goes_on(tmp_path: Path) -> None:
    few = "--accelerator cpu --max-steps 24 --patches-per-block 2 --eval-samples 8 --output-dir".split()
    flags = flags_for(write(tmp_path / "winds.zarr", make_winds()), *few, tmp_path / "run")
    command = [sys.executable, *"tune.py --processes 2 --trials 4 --search-dir".split(), tmp_path, *flags]
    journal = tmp_path / "journal.log"
    with subprocess.Popen(command, cwd=book.ROOT / "06_whats_next") as search:
        programs.wait_for(
            lambda: journal.exists() and journal.read_text().count('"samples"') > 3, search, "a trial"
        )
        family = [*psutil.Process(search.pid).children(recursive=True), psutil.Process(search.pid)]
        for process in family:
            process.kill()
        psutil.wait_procs(family)
    subprocess.run(command, cwd=book.ROOT / "06_whats_next", check=True)
    trials = tune.open_study(tune.Search(tmp_path, "tpe", "halving", 4, 2), 0).trials
    assert not [trial for trial in trials if trial.state == TrialState.RUNNING]
    tried = [trial.params for trial in trials if trial.state in tune.ENDED]
    assert len(tried) >= 4
    failed = [trial.params for trial in trials if trial.state == TrialState.FAIL]
    assert failed
    assert all(params in tried for params in failed if len(params) == 3)
    assert (tmp_path / "tpe_halving.png").exists()


def test_the_readmes_loader_of_other_data_brings_pairs_of_successive_states() -> None:
    """The pairs are the same each time. The example is the README's Python block below a comment."""
    text = (book.ROOT / "04_data_pipeline/README.md").read_text()
    example = re.search(r"<!-- other data -->\s*```python\n(.*?)\n```", text, re.DOTALL)
    names = {"__name__": "other_data"}
    exec(example[1], names)
    series, loader, batches = (names[name] for name in ("series", "loader", "batches"))
    times = {state.tobytes(): number for number, state in enumerate(series)}  # each is known by its values
    found = set()
    for batch, again in zip(batches, loader, strict=True):
        assert batch.shape == (loader.dataset.order.batch_size, 2, series.shape[1])
        np.testing.assert_array_equal(batch, again)
        for first, second in batch.numpy():
            number = times[first.tobytes()]
            np.testing.assert_array_equal(second, series[number + 1])
            found.add(number)
    assert len(found) > 100  # many different pairs
