"""Chapter 6: the search for hyperparameters, and what TPE and pruning are worth."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import book
import numpy as np
import optuna
import programs
import psutil
import pytest
from chapter_6 import folder, local, rooms  # noqa: F401
from optuna.trial import TrialState

CHAPTER = book.ROOT / "06_whats_next"
# 96 samples: three steps of 4 samples in each of eight rungs.
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 24 --patches-per-block 2".split()


@pytest.fixture(scope="module", autouse=True)
def more_rooms(rooms) -> Iterator[None]:
    global search_check, tune
    import tune as tune
    from studies import search_check

    yield


@pytest.fixture
def options(local: list[str], tmp_path: Path):
    from options import parse_options

    return parse_options("", [*SMALL, *local, "--output-dir", str(tmp_path / "run"), "--eval-samples", "8"])


@pytest.fixture
def location(options):
    from command_line import make_location

    return make_location(options)


def test_a_search_goes_on_where_it_was_stopped(options, location, tmp_path: Path) -> None:
    """A kill leaves a trial running: its values are tried again, first."""
    first = tune.Search(tmp_path, "random", "none", trials=1, processes=1)
    tune.run_trials(first, options, 0, location)
    study = tune.open_study(first, seed=0)
    lost = study.ask()
    values = tune.choose(lost)
    tune.put_back(study)
    again = tune.Search(tmp_path, "random", "none", trials=2, processes=1)
    tune.run_trials(again, options, 0, location)
    trials = tune.open_study(again, seed=0).trials
    states = [trial.state for trial in trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert trials[2].params == values
    tune.run_trials(again, options, 0, location)  # there are enough
    assert len(tune.open_study(again, seed=0).trials) == 3


def test_a_search_that_goes_on_chooses_other_values(
    options, location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seed of its first start, it would choose the first values again."""

    def train_trial(options, data, trial) -> float:
        tune.choose(trial)
        trial.report(1.0, 1)
        return 1.0

    monkeypatch.setattr(tune, "train_trial", train_trial)
    for trials in (2, 4, 6):
        search = tune.Search(tmp_path, "random", "none", trials, 1)
        tune.run_trials(search, options, 0, location)
    rates = [trial.params["learning_rate"] for trial in tune.open_study(search, 0).trials]
    assert len(rates) == len(set(rates)) == 6


def test_a_search_with_other_flags_is_refused(options, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    study = tune.open_study(tune.Search(tmp_path, "random", "none", 1, 1), seed=0)
    tune.require_same(study, options)
    tune.require_same(study, replace(options, learning_rate=1.0, padding="replicate"))  # searched
    for change in ({"max_steps": 7}, {"patch_size": 32}, {"batch_size": 2}, {"store": "elsewhere"}):
        with pytest.raises(SystemExit) as end:
            tune.require_same(study, replace(options, **change))
        assert end.value.code == 2
        assert next(iter(change)).replace("_", "-") in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [4, 32])
def test_each_trial_trains_on_as_many_samples_and_is_judged_as_often(
    options, location, batch_size: int
) -> None:
    values = {"learning_rate": 1e-3, "batch_size": batch_size, "padding": "zeros"}
    trial = search_check.KeptTrial(values)
    rmse = tune.train_trial(options, tune.task.make_data(options, location), trial)
    assert len(trial.rmse) == tune.RUNGS
    assert trial.rmse[-1] == rmse
    expected = 96 if batch_size == 4 else 256  # at least a step a rung
    assert trial.user_attrs["samples"] == expected


def made_up(n: int, seconds: int, state: TrialState, value: float, samples: int) -> optuna.trial.FrozenTrial:
    trial = optuna.trial.create_trial(
        state=state, value=value, intermediate_values={0: value}, user_attrs={"samples": samples}
    )
    trial.number = n
    trial.datetime_complete = trial.datetime_start.replace(year=2000 + seconds)
    return trial


def test_the_best_so_far_is_that_of_whole_trials_in_the_order_in_which_they_end() -> None:
    trials = [
        made_up(0, 3, TrialState.COMPLETE, 1.0, 80),
        made_up(1, 1, TrialState.PRUNED, 0.5, 10),
        made_up(2, 2, TrialState.COMPLETE, 1.5, 80),
        made_up(3, 4, TrialState.COMPLETE, 2.0, 80),
    ]
    spent, best = tune.best_so_far(trials)
    assert spent == [0, 10, 90, 170, 250]
    assert np.array_equal(best, [math.nan, math.nan, 1.5, 1.0, 1.0], equal_nan=True)


@pytest.fixture(scope="module")
def table() -> dict:
    """A made-up table, in which one learning rate is the best and none is told from another early."""
    rates = search_check.RATES
    combinations = itertools.product(rates, search_check.BATCH_SIZES, search_check.PADDINGS)
    table = {}
    for rate, size, padding in combinations:
        final = 1 + abs(math.log10(rate) + 2.5) + 0.1 * (padding == "zeros") + size / 100
        table[float(rate), size, padding] = [final + 0.1 * (8 - rung) for rung in range(1, 9)]
    return table


def test_a_replay_spends_the_compute_that_it_says(table: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rungs are a whole trial; a trial that is pruned at the first costs an eighth."""
    reports = []
    report = optuna.trial.Trial.report
    monkeypatch.setattr(optuna.trial.Trial, "report", lambda self, *v: (reports.append(v), report(self, *v)))
    for sampler, pruner in search_check.WAYS:
        reports.clear()
        reached = search_check.replay(table, sampler, pruner, seed=1)
        assert len(reports) in range(32 * 8, 33 * 8)
        assert reached == sorted(reached, reverse=True)
        if pruner == "none":
            assert [rung for _, rung in reports] == list(range(1, 9)) * 32
        else:
            assert sum(rung == 1 for _, rung in reports) > 60


def test_halving_finds_more_in_the_same_compute_where_early_rungs_tell(table: dict) -> None:
    """In the made-up table they do, so that the mean over ten replays must be lower."""
    few = [search_check.replay(table, "random", "none", seed)[0] for seed in range(10)]
    halved = [search_check.replay(table, "random", "halving", seed)[0] for seed in range(10)]
    assert np.mean(halved) < np.mean(few)


def test_the_committed_search_was_replayed_on_the_committed_table() -> None:
    """The rows of results/ follow from its table; two seeds of each way are replayed here."""
    rows = book.results("06_whats_next/results/search.json")["rows"]
    kept = search_check.make_table(rows)
    assert len(kept) == 88
    lowest = min(rmse[-1] for rmse in kept.values())
    for row in rows:
        if row["what"] == "replay":
            assert row["low"] <= row["median"] <= row["high"]
            assert row["low"] >= 0
            assert row["mean"] < max(rmse[-1] for rmse in kept.values()) / lowest


@pytest.mark.thorough
def test_a_search_in_two_processes_that_is_killed_goes_on(local: list[str], tmp_path: Path) -> None:
    flags = [*SMALL, *local, "--output-dir", str(tmp_path / "run"), "--search-dir", str(tmp_path)]
    command = [sys.executable, "tune.py", "--processes", "2", "--trials", "4", *flags]
    journal = tmp_path / "journal.log"
    with subprocess.Popen(command, cwd=CHAPTER) as search:
        programs.wait_for(
            lambda: journal.exists() and journal.read_text().count('"samples"') > 3, search, "a trial"
        )
        family = [*psutil.Process(search.pid).children(recursive=True), psutil.Process(search.pid)]
        for process in family:
            process.kill()
        psutil.wait_procs(family)
    time.sleep(0.1)
    done = subprocess.run(command, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    search = tune.Search(tmp_path, "tpe", "halving", 4, 2)
    trials = tune.open_study(search, 0).trials
    assert not [trial for trial in trials if trial.state == TrialState.RUNNING]
    assert len([trial for trial in trials if trial.state in tune.ENDED]) >= 4
    failed = [trial.params for trial in trials if trial.state == TrialState.FAIL]
    assert failed
    tried = [trial.params for trial in trials if trial.state in tune.ENDED]
    assert all(params in tried for params in failed if len(params) == 3)
    assert (tmp_path / "tpe_halving.png").exists()
