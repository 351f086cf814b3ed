"""The search for hyperparameters, and how it is replayed on measured trials."""

import math
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import optuna
import pytest
import tune
from command_line import make_location
from made_up_winds import flags_for, make_winds, write
from options import Options, parse_options
from optuna.trial import TrialState


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of 96 samples: three steps of 4 samples in each of eight rungs."""
    store = write(tmp_path / "winds.zarr", make_winds())
    places = ["--output-dir", tmp_path / "run"]
    sizes = ["--accelerator", "cpu", "--max-steps", 24, "--patches-per-block", 2, "--eval-samples", 8]
    return flags_for(store, *sizes, *places)


@pytest.fixture
def options(flags: list[str]) -> Options:
    return parse_options("", flags)


def test_a_search_goes_on_where_it_was_stopped_with_other_values(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves a trial running: its values are tried again, first."""

    def train_trial(options, data, trial) -> float:
        tune.choose(trial)
        trial.report(1.0, 1)
        return 1.0

    monkeypatch.setattr(tune, "train_trial", train_trial)

    def search(trials: int) -> optuna.Study:
        asked = tune.Search(tmp_path, "random", "none", trials, processes=1)
        tune.run_trials(asked, options, 0, make_location(options))
        return tune.open_study(asked, seed=0)

    study = search(2)
    asked = study.ask()
    tune.choose(asked)
    lost = asked.params
    tune.put_back(study)
    search(4)
    trials = search(6).trials
    states = [TrialState.COMPLETE] * 2 + [TrialState.FAIL] + [TrialState.COMPLETE] * 4
    assert [trial.state for trial in trials] == states
    assert trials[3].params == lost
    rates = [trial.params["learning_rate"] for trial in trials]
    assert len(set(rates)) == 6
    assert len(search(6).trials) == 7  # there are enough


def test_a_search_with_other_flags_is_refused(options: Options, tmp_path: Path, capsys) -> None:
    study = tune.open_study(tune.Search(tmp_path, "random", "none", 1, 1), seed=0)
    tune.require_same(study, options)
    tune.require_same(study, replace(options, learning_rate=1.0, padding="replicate"))  # searched
    for change in ({"max_steps": 7}, {"patch_size": 32}, {"batch_size": 2}, {"store": "elsewhere"}):
        with pytest.raises(SystemExit, match="2"):
            tune.require_same(study, replace(options, **change))
        assert next(iter(change)).replace("_", "-") in capsys.readouterr().err
    older = study.user_attrs["options"]
    del older["block_order"]  # of a time when there was another order
    study.set_user_attr("options", older)
    with pytest.raises(SystemExit, match="2"):
        tune.require_same(study, options)
    assert "--block-order None, not 2" in capsys.readouterr().err


def test_a_search_goes_on_with_the_periods_that_it_began_with_when_the_store_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winds = make_winds()[["u", "v"]]
    store = write(tmp_path / "grows.zarr", winds.isel(time=slice(120)))
    flags = ["--store", store, "--variables", "u", "v", "--output-dir", tmp_path / "run"]
    flags += ["--climatology-dir", tmp_path / "kept"]
    options = parse_options("", list(map(str, flags)))
    started = []

    class Here:
        """A process that only notes with which options it was started."""

        __enter__, __exit__ = lambda self: self, lambda self, *_: None

        def submit(self, call, trials, *_) -> Future:
            started.append(trials.args[1])
            done = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr(tune, "start_processes", lambda number: Here())
    for times in (slice(0), slice(120, None)):
        winds.isel(time=times).to_zarr(store, append_dim="time", consolidated=True)
        tune.tune(tune.Search(tmp_path, "random", "none", 1, 1), options, make_location(options))
    assert started[0] == started[1]
    assert (started[0].test_times, started[0].patch_size) == (["1984-12-16", "1985-04-05"], 20)


@pytest.mark.parametrize(("batch_size", "samples"), [(4, 96), (32, 256)])  # at least a step a rung
def test_each_trial_trains_on_as_many_samples_and_is_judged_as_often(
    options: Options, batch_size: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"learning_rate": 1e-3, "batch_size": batch_size, "padding": "zeros"}
    trial = optuna.trial.FixedTrial(params)
    options = replace(options, shuffle_slots=12)  # not those of a trial, which follow its batch
    reported = []
    monkeypatch.setattr(trial, "report", lambda score, rung: reported.append(score))
    rmse = tune.train_trial(*tune.task.make_data(options, make_location(options)), trial)
    assert len(reported) == tune.RUNGS
    assert reported[-1] == rmse
    assert trial.user_attrs["samples"] == samples


@pytest.mark.parametrize(("max_steps", "steps"), [(10, 8), (4, 8), (24, 24)])
def test_a_search_says_if_its_trials_have_other_steps_than_were_asked_for(
    options: Options, max_steps: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Once, before the first trial."""

    def end(study: optuna.Study) -> None:
        raise SystemExit

    monkeypatch.setattr(tune, "put_back", end)
    options = replace(options, max_steps=max_steps)
    with pytest.raises(SystemExit):
        tune.tune(tune.Search(tmp_path, "random", "none", 1, 1), options, make_location(options))
    said = f"note: --max-steps {max_steps}: a trial is judged 8 times, at equal numbers of steps; of 4 samples it has {steps}\n"
    assert (said in capsys.readouterr().out) == (steps != max_steps)


def test_the_best_so_far_is_that_of_whole_trials_in_the_order_in_which_they_end() -> None:
    trials = []
    whole, pruned = TrialState.COMPLETE, TrialState.PRUNED
    ended = [(2003, whole, 1.0), (2001, pruned, 0.5), (2002, whole, 1.5), (2004, whole, 2.0)]
    for year, state, value in ended:
        trial = optuna.trial.create_trial(state=state, value=value, user_attrs={"samples": year})
        trial.datetime_complete = datetime(year, 1, 1)
        trials.append(trial)
    spent, best = tune.best_so_far(trials)
    assert spent == [0, 2001, 4003, 6006, 8010]
    assert np.array_equal(best, [math.nan, math.nan, 1.5, 1.0, 1.0], equal_nan=True)
