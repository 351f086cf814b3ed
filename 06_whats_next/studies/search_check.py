"""Does a search beat chance? TPE and successive halving, replayed on measured trials.

    uv run python -m studies.search_check --store STORE --variables ... --patch-size 32   # 20 minutes
    uv run python -m studies.search_check ... --save-results      # and results/search.json, search.png

Every combination of a grid is trained once, with its RMSE at each rung. Each way to search
is then replayed a hundred times on this table, which costs no training. You should see the
RMSE that each way reaches for the same compute.
"""

import argparse
import itertools
import os
from functools import partial

import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.trial import FixedTrial, TrialState

from command_line import call_at, make_location
from location import Location
from options import Options, parse_options
from results import RESULTS, save_rows
from task import make_data
from tune import RUNGS, choose, make_pruner, make_sampler, start_processes, train_trial

RATES = np.geomspace(3e-4, 1e-1, 11).tolist()
BATCH_SIZES = (4, 8, 16, 32)
PADDINGS = ("zeros", "replicate")
WAYS = (("random", "none"), ("tpe", "none"), ("random", "halving"), ("tpe", "halving"))
COMPUTE = (4, 8, 16, 32)  # whole trials, at which the ways are compared
REPEATS = 100
NAMES = {"random": "random", "tpe": "TPE"}
COLOURS = {"random": "#000000", "tpe": "#0072B2"}
Table = dict[tuple[float, int, str], list[float]]


class KeptTrial(FixedTrial):
    """A trial whose values are given, and which keeps what is reported."""

    def __init__(self, params: dict):
        super().__init__(params)
        self.rmse: list[float] = []

    def report(self, value: float, step: int) -> None:
        self.rmse.append(value)


def measure(options: Options, params: dict, location: Location) -> dict:
    """The RMSE of a combination at each rung."""
    trial = KeptTrial(params)
    train_trial(*make_data(options, location), trial)
    return {"what": "trial", **params, "rmse": trial.rmse}


def measure_all(options: Options, location: Location) -> list[dict]:
    """Every combination of the grid, in as many processes as there are cores."""
    ends = []
    with start_processes(os.cpu_count()) as processes:
        for rate, size, padding in itertools.product(RATES, BATCH_SIZES, PADDINGS):
            params = {"learning_rate": rate, "batch_size": size, "padding": padding}
            task = partial(measure, options, params)
            ends.append(processes.submit(call_at, task, location, ""))
        rows = []
        for end in ends:
            rows.append(end.result())
            print(rows[-1], flush=True)
    return rows


def make_table(rows: list[dict]) -> Table:
    table = {}
    for row in rows:
        if row["what"] == "trial":
            key = row["learning_rate"], row["batch_size"], row["padding"]
            table[key] = row["rmse"]
    return table


def look_up(table: Table, params: dict) -> list[float]:
    """The trial of the table whose learning rate is nearest."""
    rates = np.array(sorted({rate for rate, _, _ in table}))
    nearest = np.abs(np.log(rates / params["learning_rate"])).argmin()
    return table[float(rates[nearest]), params["batch_size"], params["padding"]]


def replay(table: Table, sampler: str, pruner: str, seed: int) -> list[float]:
    """The lowest RMSE of a whole trial after each amount of COMPUTE."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=make_sampler(sampler, seed), pruner=make_pruner(pruner)
    )
    best = float("inf")
    rungs = 0  # that all trials have taken
    reached = []
    for compute in COMPUTE:
        while rungs < compute * RUNGS:
            trial = study.ask()
            state = TrialState.COMPLETE
            for rung, rmse in enumerate(look_up(table, choose(trial)), start=1):
                trial.report(rmse, rung)
                rungs += 1
                if trial.should_prune():
                    state = TrialState.PRUNED
                    break
            if state == TrialState.COMPLETE:
                best = min(best, rmse)
                study.tell(trial, rmse)
            else:
                study.tell(trial, state=state)
        reached.append(best)
    return reached


def replay_all(table: Table, repeats: int) -> list[dict]:
    """Each way many times: how far above the table's best it ends, as a share."""
    lowest = min(rmse[-1] for rmse in table.values())
    rows = []
    for sampler, pruner in WAYS:
        reached = [replay(table, sampler, pruner, seed) for seed in range(repeats)]
        above = np.array(reached) / lowest - 1
        for n, compute in enumerate(COMPUTE):
            low, middle, high = np.quantile(above[:, n], [0.25, 0.5, 0.75]).tolist()
            row = {"what": "replay", "sampler": sampler, "pruner": pruner}
            row |= {
                "compute": compute,
                "repeats": repeats,
                "mean": float(above[:, n].mean()),
            }
            rows.append({**row, "median": middle, "low": low, "high": high})
    return rows


def plot_on(axes: Axes, rows: list[dict]) -> None:
    """How far above the best each way is, against the compute."""
    for n, (sampler, pruner) in enumerate(WAYS):
        way = rows_of(rows, sampler, pruner)
        middle = np.array([row["median"] for row in way])
        low = middle - [row["low"] for row in way]
        high = [row["high"] for row in way] - middle
        halves = pruner == "halving"
        axes.errorbar(
            [row["compute"] * 1.03 ** (n - 1.5) for row in way],  # side by side
            100 * middle,
            [100 * low, 100 * high],
            linestyle="--" if halves else "-",
            color=COLOURS[sampler],
            marker="o",
            markerfacecolor="white" if halves else None,
            capsize=3,
            label=NAMES[sampler] + ", successive halving" * halves,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(COMPUTE, [str(compute) for compute in COMPUTE])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("compute, in whole trials")
    axes.set_ylabel("RMSE above the best combination's, %")
    axes.legend(frameon=False)


def rows_of(rows: list[dict], sampler: str, pruner: str) -> list[dict]:
    """The replays of one way to search."""
    replays = [row for row in rows if row["what"] == "replay"]
    return [
        row for row in replays if (row["sampler"], row["pruner"]) == (sampler, pruner)
    ]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        usage="python -m studies.search_check [--save-results] [any flags of train.py]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args, flags = parser.parse_known_args(argv)
    options = parse_options(__doc__.splitlines()[0], flags)
    location = make_location(options)
    rows = call_at(partial(measure_all, options), location, "")
    rows += replay_all(make_table(rows), REPEATS)
    for row in rows:
        if row["what"] == "replay":
            print(row)
    if args.save_results:
        command = ["uv run python -m studies.search_check", *flags, "--save-results"]
        save_rows("search", " ".join(command), rows)
        figure = Figure(figsize=(7, 4), layout="constrained")
        plot_on(figure.subplots(), rows)
        figure.savefig(RESULTS / "search.png", dpi=120)
    return rows


if __name__ == "__main__":
    main()
