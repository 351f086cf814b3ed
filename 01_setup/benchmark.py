"""Chapter 1: measure what the walkthrough says of the two scripts, by running them as a reader would.

    uv run python benchmark.py                                # every study, about half an hour on two cores
    uv run python benchmark.py scripts workers                # some of them
    uv run python benchmark.py --save-results                 # and write results/*.json and results/fill.png

Alternatives run in turn, so that a machine which slows down for a while slows all of them.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tqdm import tqdm

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs/benchmark"
LONGER = ["--max-steps", "1500", "--validate-every", "250", "--checkpoint-every", "250"]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def run(script: str, *flags: str) -> dict:
    """Run a script as a program and return its summary, its log (metrics) and the seconds from start to exit.

    Its files stay in outputs/benchmark. RuntimeError, with the last line that it printed, if it fails.
    """
    began = perf_counter()
    command = [sys.executable, script, *flags, "--output-dir", OUTPUTS]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    seconds = perf_counter() - began
    if done.returncode:
        raise RuntimeError(
            f"{script} {' '.join(flags)}: {done.stderr.splitlines()[-1]}"
        )
    summary = json.loads((OUTPUTS / "summary.json").read_text())
    with open(OUTPUTS / "metrics.csv", newline="") as log:
        metrics = list(csv.DictReader(log))
    return summary | {"metrics": metrics, "wall_seconds": seconds}


def column(metrics: list[dict], name: str) -> list[float]:
    """The numbers of one column of a log, without the rows that leave it empty."""
    return [float(row[name]) for row in metrics if row[name]]


def scripts() -> list[dict]:
    """Both scripts as they come, with three seeds: what they reach, and how fast."""
    names, seeds = ("train_by_hand.py", "train.py"), (0, 1, 2)
    runs = {name: [] for name in names}
    for seed in tqdm(seeds, "scripts"):
        for name in names:
            runs[name].append(run(name, "--seed", str(seed), "--log-every", "1"))
    measured = (
        "samples_per_second",
        "data_wait_share",
        "peak_memory_gb",
        "wall_seconds",
    )
    rows = []
    for name in names:
        first = runs[name][0]
        row = {"script": name, "runs": len(seeds), "steps": first["steps"]}
        row |= {
            fill: rmse["m/s"] for fill, rmse in first["rmse"].items() if fill != "U-Net"
        }
        row["rmse"] = spread([one["rmse"]["U-Net"]["m/s"] for one in runs[name]])
        row |= {key: spread([one[key] for one in runs[name]]) for key in measured}
        rows.append(
            row
            | {
                "summary": {
                    key: value for key, value in first.items() if key != "metrics"
                }
            }
        )
    log = runs["train_by_hand.py"][0]["metrics"][
        1:
    ]  # the first step starts everything up
    rows[0]["wait_ms"] = spread([1e3 * value for value in column(log, "wait_seconds")])
    rows[0]["work_ms"] = spread([1e3 * value for value in column(log, "work_seconds")])
    return rows


def choices() -> list[dict]:
    """What decided batch size, learning rate and steps: the RMSE on 1990, the validation year, alone."""
    cases = [(4, 400), (8, 200), (16, 100)]  # as many samples
    cases = [
        (batch, steps, rate) for batch, steps in cases for rate in (3e-3, 6e-3, 12e-3)
    ]
    rows = []
    for batch, steps, rate in tqdm([*cases, (8, 300, 6e-3)], "choices"):
        flags = {
            "--batch-size": batch,
            "--max-steps": steps,
            "--learning-rate": rate,
            "--validate-every": steps,
        }
        metrics = run(
            "train.py", *(str(word) for flag in flags.items() for word in flag)
        )["metrics"]
        rmse = column(metrics, "rmse (m/s)")[-1]
        rows.append(
            {
                "batch_size": batch,
                "steps": steps,
                "learning_rate": rate,
                "validation_rmse": rmse,
            }
        )
    return rows


def workers() -> list[dict]:
    """The speed with 0, 1 and 2 worker processes."""
    counts, repeats = (0, 1, 2), 3
    runs = {count: [] for count in counts}
    for _ in tqdm(range(repeats), "workers"):
        for count in counts:
            flags = (
                "--max-steps",
                "60",
                "--validate-every",
                "60",
                "--num-workers",
                str(count),
            )
            runs[count].append(run("train.py", *flags))
    measured = ("samples_per_second", "data_wait_share")
    return [
        {
            "workers": count,
            "runs": repeats,
            "rmse": runs[count][0]["rmse"]["U-Net"]["m/s"],
        }
        | {key: spread([one[key] for one in runs[count]]) for key in measured}
        for count in counts
    ]


def longer() -> list[dict]:
    """A run of 1,500 steps: how much further the same network comes, and its learning curve on 1990."""
    summary = run("train.py", *LONGER)
    metrics = summary.pop("metrics")
    curve = [
        {"step": int(row["step"]) + 1, "rmse": float(row["rmse (m/s)"])}
        for row in metrics
        if row["rmse (m/s)"]
    ]
    return [{"command": f"train.py {' '.join(LONGER)}", **summary, "curve": curve}]


STUDIES = {study.__name__: study for study in (scripts, choices, workers, longer)}


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(": ")[1] for line in lines if line.startswith("model name")),
            cpu,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory), "gpu": gpu}


def main(argv: list[str] | None = None) -> None:
    """Run the studies that were asked for; print their rows, and save them if asked to."""
    run_studies(STUDIES, __doc__.splitlines()[0], argv)


def run_studies(
    studies: dict[str, Callable[[], list[dict]]], summary: str, argv: list[str] | None
) -> None:
    """The command line of a script with studies, such as this one."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "studies",
        nargs="*",
        metavar="STUDY",
        help=f"of {', '.join(studies)}; all if none",
    )
    parser.add_argument(
        "--save-results", action="store_true", help="write results/STUDY.json"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.studies if name not in studies]:
        parser.error(f"{unknown[0]}: no such study; choose from {', '.join(studies)}")
    script = Path(sys.argv[0]).name
    threads = os.environ.get("OMP_NUM_THREADS")  # decides CPU times
    how = f"OMP_NUM_THREADS={threads} " if threads else ""
    versions = {"python": platform.python_version()}
    versions |= {
        name: version(name).split("+")[0] for name in ("torch", "lightning", "scipy")
    }
    for name in args.studies or studies:
        rows = studies[name]()
        print(json.dumps(rows, indent=2))
        if args.save_results:
            results = {
                "command": f"{how}uv run python {script} {name}",
                "date": str(date.today()),
            }
            results |= {"machine": machine(), "versions": versions, "rows": rows}
            path = HERE / "results" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
            if name == "longer":
                shutil.copy(OUTPUTS / "fill.png", path.with_name("fill.png"))


if __name__ == "__main__":
    main()
