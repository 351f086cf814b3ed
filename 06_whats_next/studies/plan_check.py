"""Whether the formulas of plan hold: beside a simulation, and beside chapters 2 and 4.

    uv run python -m studies.plan_check                  # half a minute
    uv run python -m studies.plan_check --save-results   # and results/plan_check.json

You should see how far each prediction is from what was simulated, or measured.
"""

import argparse
import itertools
import json
from pathlib import Path

from errors import refuse
from plan.interruptions import (
    Interruptions,
    best_interval,
    expected_hours,
    mean_of_simulations,
)
from plan.throughput import Links, Measured, predict_step, step_with_loader
from results import save_rows

BOOK = Path(__file__).parent.parent.parent
WORK = 100.0  # hours of training
BETWEEN = (0.5, 2.0, 8.0, 24.0)  # hours
NOTICED = (0.0, 0.5, 0.9)
RESTART = (1 / 60, 0.25)  # hours
SAVE = 5 / 3600  # hours
FACTORS = (0.25, 1.0, 4.0, 16.0)  # intervals between checkpoints, of the best


def compare_interruptions(runs: int) -> list[dict]:
    """The formula beside a simulation of `runs` runs, case by case."""
    rows = []
    for between, noticed, restart in itertools.product(BETWEEN, NOTICED, RESTART):
        run = Interruptions(between, noticed, restart, SAVE)
        for factor in FACTORS:
            interval = factor * best_interval(run)
            formula = expected_hours(WORK, interval, run)
            simulated = mean_of_simulations(WORK, interval, run, runs)
            row = {"between": between, "noticed": noticed, "restart": restart}
            row |= {"interval": interval, "factor": factor}
            row |= {"predicted": formula, "found": simulated}
            rows.append({"what": "interruptions", **row})
    return rows


def read_rows(chapter: str, name: str) -> list[dict]:
    path = BOOK / chapter / "results" / f"{name}.json"
    if not path.exists():
        refuse(f"{path.name}: not found in ../{chapter}/results; run this in the book")
    return json.loads(path.read_text())["rows"]


def compare_devices() -> list[dict]:
    """Chapter 2: two devices, predicted from one and from the time of an all-reduce."""
    scaling = read_rows("02_multi_gpu", "scaling")
    size = scaling[0]["gradient_bytes"]
    exchanges = read_rows("02_multi_gpu", "allreduce")
    nearest = min(exchanges, key=lambda row: abs(row["bytes"] - size))
    bandwidth = nearest["bytes"] / nearest["seconds"]["median"]
    links = Links(2, between_devices=bandwidth, of_a_machine=float("inf"))
    rows = []
    for mode in ("weak", "strong"):
        single, double = (row for row in scaling if row["mode"] == mode)
        # In a smaller batch, each sample is taken to need as long.
        batch = double["device_batch"]
        rate = single["samples_per_second"]["median"]
        measured = Measured(rate, 0.0, 0.0, 0.0, batch_size=batch)
        step = predict_step(measured, 2, size, links)
        found = double["samples_per_second"]["median"]
        case = f"two devices, {mode} scaling"
        rows.append(describe("02_multi_gpu", case, 2 * batch / step.seconds, found))
    return rows


def compare_loaders() -> list[dict]:
    """Chapter 4: a loader's workers beside a step, and a run whose wait is taken away."""
    workers = read_rows("04_data_pipeline", "workers")
    times = next(row for row in workers if "load_seconds" in row)
    diagnosis = {
        row["loader"]: row for row in read_rows("04_data_pipeline", "diagnosis")
    }
    naive, final = diagnosis["naive"], diagnosis["final"]
    batch = 8
    rows = []
    for row in workers:
        if row.get("with_step"):
            number = row["num_workers"]
            load = times["load_seconds"]
            step = step_with_loader(times["step_seconds"], load, number)
            found = row["samples_per_second"]["median"]
            case = f"workers beside a step: {number}"
            rows.append(describe("04_data_pipeline", case, batch / step, found))
    waiting = naive["waiting"] / (naive["waiting"] + naive["compute"])
    rate = batch / (naive["waiting"] + naive["compute"])
    measured = Measured(rate, waiting, 0.0, 0.0, batch)
    found = batch / (final["waiting"] + final["compute"])
    predicted = batch / measured.compute
    case = "the naive run without its wait, beside the final one"
    rows.append(describe("04_data_pipeline", case, predicted, found))
    return rows


def describe(chapter: str, case: str, predicted: float, found: float) -> dict:
    row = {"chapter": chapter, "case": case, "predicted": predicted, "found": found}
    return {"what": "throughput", **row}


def error_of(row: dict) -> float:
    """How far a prediction is off, as a share of what was found."""
    return row["predicted"] / row["found"] - 1


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400, help="simulated, of each case")
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    rows = compare_devices() + compare_loaders()
    for row in rows:
        rates = f"{row['predicted']:6.1f} predicted, {row['found']:6.1f} measured"
        print(f"{row['case']:52} {rates}: {error_of(row):+.1%}")
    simulated = compare_interruptions(args.runs)
    worst = max(simulated, key=lambda row: abs(error_of(row)))
    print(f"{len(simulated)} cases of interruptions, {args.runs} runs each:", end=" ")
    print(f"at most {error_of(worst):+.1%} off, where {worst}")
    rows += simulated
    if args.save_results:
        save_rows(
            "plan_check", "uv run python -m studies.plan_check --save-results", rows
        )
    return rows


if __name__ == "__main__":
    main()
