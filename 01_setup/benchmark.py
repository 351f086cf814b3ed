"""Chapter 1: measure what the page says of the two scripts, by running them as a reader would.

    uv run python benchmark.py                     # every study, half an hour on two cores
    uv run python benchmark.py scripts workers     # some of them
    uv run python benchmark.py --quick             # tiny: that it works, not what it finds
    uv run python benchmark.py --save-results      # and write results/

Alternatives run in turn, so that a machine that slows down for a while slows all of them.
"""

import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

import draw_map
from evaluation import NETWORK
from results import RESULTS, parse_studies, save_rows, spread

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs/benchmark"
SCRIPTS = ("train_by_hand.py", "train.py")
LONGER = "--max-steps 1500 --validate-every 250 --checkpoint-every 250"
UNIT = "m/s"
QUICK = "--max-steps 4 --validate-every 4 --eval-samples 24"
COMMON_FLAGS: list[str] = []  # every run is given them


def scripts(repeats: int) -> list[dict]:
    """Both scripts as they come, with as many seeds: what they reach, and how fast."""
    runs = {script: [] for script in SCRIPTS}
    for seed in tqdm(range(repeats), "scripts"):
        for script in SCRIPTS:
            runs[script].append(run_script(script, f"--seed {seed} --log-every 1"))
    rows = [summarize(script, runs[script]) for script in SCRIPTS]
    log = runs["train_by_hand.py"][0]["log"][1:]  # the first step starts everything up
    for name in ("wait", "work"):
        milliseconds = [1e3 * value for value in column(log, f"{name}_seconds")]
        rows[0][f"{name}_ms"] = spread(milliseconds)
    return rows


def summarize(script: str, runs: list[dict]) -> dict:
    """One row for all runs of a script; the summary is that of the first."""
    first = runs[0]
    row = {"script": script, "runs": len(runs), "steps": first["steps"]}
    for fill, rmse in first["rmse"].items():
        if fill != NETWORK:
            row[fill] = rmse[UNIT]
    row["rmse"] = spread([run["rmse"][NETWORK][UNIT] for run in runs])
    for key in (
        "samples_per_second",
        "data_wait_share",
        "peak_memory_gb",
        "wall_seconds",
    ):
        row[key] = spread([run[key] for run in runs])
    row["summary"] = {key: value for key, value in first.items() if key != "log"}
    return row


def choices(repeats: int) -> list[dict]:
    """What decided batch size, learning rate and steps: the RMSE on 1990 alone, once."""
    cases = []
    for batch, steps in ((4, 400), (8, 200), (16, 100)):  # as many samples
        for rate in (3e-3, 6e-3, 12e-3):
            cases.append((batch, steps, rate))
    cases.append((8, 300, 6e-3))
    rows = []
    for batch, steps, rate in tqdm(cases, "choices"):
        flags = f"--batch-size {batch} --max-steps {steps} --learning-rate {rate}"
        log = run_script("train.py", f"{flags} --validate-every {steps}")["log"]
        row = {"batch_size": batch, "steps": steps, "learning_rate": rate}
        row["validation_rmse"] = column(log, f"rmse ({UNIT})")[-1]
        rows.append(row)
    return rows


def workers(repeats: int) -> list[dict]:
    """The speed with 0, 1 and 2 worker processes."""
    runs = {count: [] for count in (0, 1, 2)}
    for _ in tqdm(range(repeats), "workers"):
        for count, done in runs.items():
            flags = f"--max-steps 60 --validate-every 60 --num-workers {count}"
            done.append(run_script("train.py", flags))
    rows = []
    for count, done in runs.items():
        row = {
            "workers": count,
            "runs": repeats,
            "rmse": done[0]["rmse"][NETWORK][UNIT],
        }
        for key in ("samples_per_second", "data_wait_share"):
            row[key] = spread([run[key] for run in done])
        rows.append(row)
    return rows


def longer(repeats: int) -> list[dict]:
    """One run of 1,500 steps: how far the same network comes, and its curve on 1990."""
    summary = run_script("train.py", LONGER)
    log = summary.pop("log")
    name = f"rmse ({UNIT})"
    curve = []
    for row in log:
        if row[name]:
            curve.append({"step": int(row["step"]) + 1, "rmse": float(row[name])})
    return [{"command": f"train.py {LONGER}", **summary, "curve": curve}]


STUDIES = {study.__name__: study for study in (scripts, choices, workers, longer)}


def run_script(script: str, flags: str) -> dict:
    """A script's summary, with its log and the seconds from start to exit.

    Its files stay in outputs/benchmark. RuntimeError, with its last line, if it fails.
    """
    began = perf_counter()
    command = [sys.executable, script, *shlex.split(flags), *COMMON_FLAGS]
    command += ["--output-dir", str(OUTPUTS)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    seconds = perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{script} {flags}: {done.stderr.splitlines()[-1]}")
    summary = json.loads((OUTPUTS / "summary.json").read_text())
    with open(OUTPUTS / "metrics.csv", newline="") as file:
        log = list(csv.DictReader(file))
    return summary | {"log": log, "wall_seconds": seconds}


def column(log: list[dict], name: str) -> list[float]:
    """The numbers of one column of a log, without the rows that leave it empty."""
    return [float(row[name]) for row in log if row[name]]


def run_studies(
    studies: dict[str, Callable[[int], list[dict]]],
    summary: str,
    argv: list[str] | None,
) -> None:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(summary, list(studies), 3, argv)
    if args.quick:
        COMMON_FLAGS.extend(shlex.split(QUICK))
    script = Path(sys.argv[0]).name
    threads = os.environ.get("OMP_NUM_THREADS")  # decides CPU times
    environment = f"OMP_NUM_THREADS={threads} " if threads else ""
    for name in args.studies:
        rows = studies[name](args.repeats)
        print(json.dumps(rows, indent=2))
        if args.save_results:
            save_rows(name, f"{environment}uv run python {script} {name}", rows)
        if args.save_results and name == "longer":
            save_pictures()


def save_pictures() -> None:
    """Keep the pictures of the run that OUTPUTS has."""
    draw_map.main([str(OUTPUTS / "last.ckpt")])
    for picture in ("fill.png", "map.png"):
        shutil.copy(OUTPUTS / picture, RESULTS)


def main(argv: list[str] | None = None) -> None:
    """Run this script's studies."""
    run_studies(STUDIES, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    main()
