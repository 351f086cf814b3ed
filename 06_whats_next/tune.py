"""Chapter 6: search for hyperparameters, in several processes, and go on after a kill.

    uv run python tune.py --processes 2           # about ten minutes
    uv run python tune.py --trials 100 FLAGS      # of train.py

Each trial trains with its own values on the same number of samples, and is judged on the
validation times. You should see the best trials, and the best score against the samples that
all trials have used. Give the same command again to go on. Change search_space.py for your own search.
"""

import argparse
import multiprocessing
import os
import shlex
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import optuna
import torch
from filelock import FileLock, Timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState

import task
from arguments import flag_of, take_over
from checks import check_folder
from command_line import call_at, make_location
from ending import run
from errors import print_note, refuse
from location import Location
from options import RESUME_KEYS, STORE_DEFAULTS, Options, parse_options
from search_space import SPACE
from short_run import make_short_trainer

OUTPUTS = Path("outputs/tune")
RUNGS = 8  # how often a trial is judged, at equal numbers of samples
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
BLUE = "#0072B2"
ORANGE = "#E69F00"


@dataclass(frozen=True)
class Search:
    """What the command line asks of a search."""

    folder: Path
    sampler: str
    pruner: str
    trials: int
    processes: int


def choose(trial: Trial) -> dict:
    """The values of a trial, by the names of train.py's options."""
    return {name: suggest(trial) for name, suggest in SPACE.items()}


def make_sampler(name: str, seed: int) -> BaseSampler:
    """How the next values are chosen: at random, or where good trials were (TPE)."""
    if name == "random":
        return RandomSampler(seed)
    return TPESampler(seed=seed)


def make_pruner(name: str) -> BasePruner:
    """Which trials end early: none, or three of four at each rung of 1, 4 (and 16)."""
    if name == "none":
        return NopPruner()
    return SuccessiveHalvingPruner(min_resource=1, reduction_factor=4)


class Judge(Callback):
    """Tells Optuna the score after each validation, and ends a trial that is pruned."""

    def __init__(self, trial: Trial, batch_size: int):
        self.trial = trial
        self.batch_size = batch_size
        self.score = float("nan")
        self.rung = 0

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        logged = trainer.callback_metrics
        metrics = {name: value.item() for name, value in logged.items()}
        self.score = task.score(metrics)
        self.rung += 1
        self.trial.report(self.score, self.rung)
        self.trial.set_user_attr("samples", trainer.global_step * self.batch_size)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def train_trial(options: Options, data: task.Data, trial: Trial) -> float:
    """Train with a trial's values; the score of the validation at its end."""
    samples = options.max_steps * options.batch_size
    options = replace(options, **choose(trial))
    batch_size = options.batch_size
    steps = count_steps(samples, batch_size)
    options = replace(options, max_steps=steps, validate_every=steps // RUNGS)
    trial.set_user_attr("max_steps", options.max_steps)
    module = task.make_datamodule(options, data)
    model = task.make_model(options, data)
    judge = Judge(trial, batch_size)
    trainer = make_short_trainer(options, judge, show_progress=False)
    trainer.fit(model, datamodule=module)
    return judge.score


def count_steps(samples: int, batch_size: int) -> int:
    """The steps of a trial of about so many samples: whole ones, and as many in each rung."""
    return RUNGS * max(1, samples // (RUNGS * batch_size))


def describe_steps(options: Options) -> str:
    """Why a trial has other steps than --max-steps; "" if it has not."""
    batch_size = options.batch_size
    steps = count_steps(options.max_steps * batch_size, batch_size)
    if steps == options.max_steps:
        return ""
    reason = f"a trial is judged {RUNGS} times, at equal numbers of steps"
    trained = f"of {batch_size} samples it has {steps}"
    return f"--max-steps {options.max_steps}: {reason}; {trained}"


def open_study(search: Search, seed: int) -> optuna.Study:
    """The study of a folder, new or as it was left. Its journal serves several processes."""
    journal = JournalFileBackend(str(search.folder / "journal.log"))
    return optuna.create_study(
        storage=JournalStorage(journal),
        study_name=f"{search.sampler}, {search.pruner}",
        sampler=make_sampler(search.sampler, seed),
        pruner=make_pruner(search.pruner),
        load_if_exists=True,
        direction="maximize" if task.HIGHER_IS_BETTER else "minimize",
    )


def require_same(study: optuna.Study, options: Options) -> None:
    """Keep what all trials have in common, or refuse other values than those kept."""
    keys = ["store", *RESUME_KEYS]
    now = {key: getattr(options, key) for key in keys if key not in SPACE}
    # The global batch decides how many samples a trial has, even if it is searched.
    now["batch_size"] = options.batch_size
    before = study.user_attrs.get("options", now)
    for key in before | now:
        if before.get(key) != now.get(key):
            change = f"{before.get(key)}, not {now.get(key)}"
            reason = f"its trials have {flag_of(key)} {change}"
            refuse(f"--search-dir: {reason}; give that, or another folder")
    study.set_user_attr("options", now)


def put_back(study: optuna.Study) -> None:
    """Queue the trials that a kill has left running, to be begun again."""
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)


def run_trials(
    search: Search, options: Options, number: int, location: Location
) -> None:
    """One process of the search: trials until all processes together have enough."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials = len(open_study(search, 0).trials)
    # Another seed after each start: the same one would choose the same values again.
    seed = np.random.SeedSequence((options.seed, number, trials)).generate_state(1)
    study = open_study(search, int(seed[0]))
    if len(study.get_trials(states=ENDED)) >= search.trials:
        return
    enough = MaxTrialsCallback(search.trials, states=ENDED)
    options, data = task.make_data(options, location)
    objective = partial(train_trial, options, data)
    study.optimize(objective, callbacks=[enough, print_trial])


def print_trial(study: optuna.Study, trial: FrozenTrial) -> None:
    values = ", ".join(f"{name} {shorten(v)}" for name, v in trial.params.items())
    how = trial.state.name.lower()
    score = f"{last_score(trial):.3f}"
    print(f"trial {trial.number:3} {how:8} {score}: {values}", flush=True)


def shorten(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def last_score(trial: FrozenTrial) -> float:
    return trial.intermediate_values[trial.last_step]


def best_so_far(trials: list[FrozenTrial]) -> tuple[list[int], list[float]]:
    """The samples that all trials have used, and the best score of a whole one until then.

    NaN before the first whole one.
    """
    spent, best = [0], [float("nan")]
    for trial in sorted(trials, key=lambda trial: trial.datetime_complete):
        spent.append(spent[-1] + trial.user_attrs["samples"])
        score = best[-1]
        if trial.state == TrialState.COMPLETE and not is_as_good(score, trial.value):
            score = trial.value
        best.append(score)
    return spent, best


def is_as_good(score: float, other: float) -> bool:
    """Whether a score is at least as good as another; NaN is not."""
    return score >= other if task.HIGHER_IS_BETTER else score <= other


def plot(trials: list[FrozenTrial], title: str) -> Figure:
    """Each trial's last score, and the best so far, against the samples of all trials."""
    trials = sorted(trials, key=lambda trial: trial.datetime_complete)
    spent, best = best_so_far(trials)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(spent, best, color=BLUE, where="post", label="best so far")
    for state, colour, label in (
        (TrialState.COMPLETE, BLUE, "whole trial"),
        (TrialState.PRUNED, ORANGE, "pruned"),
    ):
        at = [n for n, trial in enumerate(trials) if trial.state == state]
        x = [spent[n + 1] for n in at]
        axes.plot(
            x, [last_score(trials[n]) for n in at], "o", color=colour, label=label
        )
    axes.set(title=title, xlabel="samples, of all trials", ylabel="score in validation")
    axes.legend()
    return figure


def command_of(best: FrozenTrial) -> str:
    """The command that trains with the best trial's values."""
    values = {**best.params, "max_steps": best.user_attrs["max_steps"]}
    words = ["uv", "run", "python", "train.py"]
    for name, value in values.items():
        words += [flag_of(name), shorten(value)]
    return shlex.join(words)


def start_processes(number: int) -> ProcessPoolExecutor:
    """Processes that share the cores."""
    threads = max(1, os.cpu_count() // number)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, spawn, torch.set_num_threads, (threads,))


def tune(search: Search, options: Options, location: Location) -> optuna.Study:
    """Search, in several processes; the study."""
    search.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(search.folder / "lock", timeout=0):
            study = open_study(search, 0)
            before = study.user_attrs.get("options", {})
            options = Options(**take_over(STORE_DEFAULTS, before, asdict(options)))
            options, _ = task.make_data(options, location)
            require_same(study, options)
            note = describe_steps(options)
            if note:
                print_note(note)
            put_back(study)
            with start_processes(search.processes) as processes:
                ends = []
                for number in range(search.processes):
                    trials = partial(run_trials, search, options, number)
                    ends.append(processes.submit(call_at, trials, location, ""))
                for end in ends:
                    end.result()  # SystemExit, if it has refused something
    except Timeout:
        refuse(f"--search-dir {search.folder}: another search is running there")
    return open_study(search, 0)


def report(study: optuna.Study, search: Search) -> None:
    trials = study.get_trials(states=ENDED)
    samples = sum(trial.user_attrs["samples"] for trial in trials)
    print(f"{len(trials)} trials, {samples:,} samples; the best:")
    print_trial(study, study.best_trial)
    print(f"with other flags as given: {command_of(study.best_trial)}")
    picture = search.folder / f"{search.sampler}_{search.pruner}.png"
    plot(trials, study.study_name).savefig(picture, dpi=120)
    print(f"picture: {os.path.relpath(picture)}")


def parse_arguments(argv: list[str] | None) -> tuple[Search, Options]:
    """The search's own flags, and those of train.py, checked."""
    parser = argparse.ArgumentParser(
        usage="tune.py [flags below] [any flags of train.py]",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trials", type=int, default=24, help="in all, with those of earlier starts")
    add("--processes", type=int, default=1, help="that train at the same time")
    add("--sampler", choices=("random", "tpe"), default="tpe", help="chooses values")
    pruner = "ends trials early: successive halving, or none"
    add("--pruner", choices=("halving", "none"), default="halving", help=pruner)
    add("--search-dir", type=Path, default=OUTPUTS, help="of journal and picture")
    own, flags = parser.parse_known_args(argv)
    for name in ("trials", "processes"):
        if getattr(own, name) < 1:
            refuse(f"--{name} {getattr(own, name)}: give at least 1")
    check_folder("--search-dir", str(own.search_dir))
    options = parse_options(__doc__.splitlines()[0], flags)
    return Search(
        own.search_dir, own.sampler, own.pruner, own.trials, own.processes
    ), options


def main(argv: list[str] | None = None) -> optuna.Study:
    """Search, and print what was found; the study."""
    search, options = parse_arguments(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = call_at(partial(tune, search, options), make_location(options), "")
    report(study, search)
    return study


if __name__ == "__main__":
    run(main)
