"""Whole runs of train.py: what the shuffle costs, and what the reader's command does."""

import csv
import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tqdm import tqdm

from demo_store import CLOUD, SMALL
from errors import refuse
from evaluation import NETWORK
from studies.journal import FOLDER
from studies.measuring import Case, take_turns
from studies.server import BUCKETS
from studies.stores import QUICK, SIZE, full_or_quick, run_make_store, store_path

# Slots, and patches of a block. A run would not use up 128 blocks of 32 patches.
GRID = [*product((1, 8, 32), (8, 32)), (128, 8)]


def shuffle(repeats: int) -> list[dict]:
    """RMSE at equal steps over the slots and the patches of a block, against a full shuffle.

    The same store of 1 degree, from this disk, by chapter 3's train.py and by this one, with
    as many seeds as repeats.
    """
    if SIZE != QUICK:
        run_make_store()
    small = BUCKETS / "buckets" / SMALL.removeprefix("s3://")
    store = full_or_quick(small, store_path("whole maps"))
    steps = ["--max-steps", 4, "--validate-every", 2, "--patch-size", 16]
    steps = full_or_quick(["--max-steps", 200], steps)
    grid = full_or_quick(GRID, [(8, 8)])
    cases = []
    for seed in range(repeats):
        flags = ["--store", store, "--seed", seed, *steps]
        labels = {"shuffle_blocks": None, "patches_per_block": 1, "seed": seed}
        work = partial(train_once, CLOUD / "train.py", flags)
        cases.append(Case(labels, work))
        for slots, patches in grid:
            labels = {"shuffle_blocks": slots, "patches_per_block": patches}
            more = ["--shuffle-slots", slots, "--patches-per-block", patches]
            work = partial(train_once, FOLDER / "train.py", [*flags, *more])
            cases.append(Case(labels | {"seed": seed}, work))
    return take_turns("shuffle", cases, repeats=1)


def train_once(script: Path, flags: list) -> dict:
    """The RMSE of a whole run of a train.py: of its last validation, and of its test."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, script, "--output-dir", folder, *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            refuse(f"{script}: {done.stderr.splitlines()[-1]}")
        with open(Path(folder, "metrics.csv"), newline="") as log:
            logged = [row["rmse (m/s)"] for row in csv.DictReader(log)]
        validations = [float(rmse) for rmse in logged if rmse]
        summary = json.loads(Path(folder, "summary.json").read_text())
    test = summary["rmse"][NETWORK]["m/s"]
    return {"validation_rmse": validations[-1], "test_rmse": test}


def command(repeats: int) -> list[dict]:
    """The reader's command from beginning to end, where its store is whole: seconds, and its
    summary.
    """
    steps = full_or_quick([], ["--max-steps", "4"])
    rows = []
    for _ in tqdm(range(repeats), "command", disable=None):
        with TemporaryDirectory() as folder:
            run = [sys.executable, FOLDER / "train.py", "--output-dir", folder, *steps]
            began = perf_counter()
            subprocess.run(run, check=True, capture_output=True)
            seconds = perf_counter() - began
            summary = json.loads(Path(folder, "summary.json").read_text())
        rows.append({"wall_seconds": seconds, "summary": summary})
    return rows


def describe_command(row: dict) -> str:
    """A row in a line."""
    summary = row["summary"]
    rate = f"{summary['samples_per_second']:.1f} samples/s"
    rmse = summary["rmse"][NETWORK]
    return f"train.py: {row['wall_seconds']:.0f} s, {rate}; RMSE {rmse}"
