"""The chapter's scripts, as a reader starts them: what they reach, and how fast."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tqdm import tqdm

from errors import refuse
from evaluation import NETWORK, best_simple_fills
from options import HERE
from results import spread
from studies.settings import Settings

UNIT = "m/s"
BY_HAND = "train_ddp_by_hand.py"
MEASURED = ("samples_per_second", "data_wait_share", "wall_seconds")


def commands(settings: Settings) -> list[dict]:
    """A row for each script, on one device and on all, over all seeds."""
    cases = []
    for script in ("train.py", BY_HAND):
        cases.append((script, 1))
        if settings.devices > 1:
            cases.append((script, settings.devices))
    runs: dict[tuple[str, int], list[dict]] = {case: [] for case in cases}
    for seed in range(settings.seeds):
        for script, devices in tqdm(cases, f"commands, seed {seed}", disable=None):
            flags = [*settings.flags(), "--seed", str(seed)]
            with TemporaryDirectory() as folder:
                found = run_script(script, devices, flags, folder)
            runs[script, devices].append(found)
    rows = []
    for (script, devices), found in runs.items():
        labels = {"script": script, "devices": devices, "runs": len(found)}
        rows.append(labels | summarise(found))
    return rows


def summarise(runs: list[dict]) -> dict:
    """What some runs have reached, and the summary of the first."""
    first = runs[0]["rmse"]
    rival = best_simple_fills(first)[UNIT]
    row = {
        "rival": first[rival][UNIT],
        "rmse": spread([run["rmse"][NETWORK][UNIT] for run in runs]),
    }
    for name in MEASURED:
        row[name] = spread([run[name] for run in runs])
    return row | {"summary": runs[0]}


def run_script(script: str, devices: int, flags: list[str], folder: str) -> dict:
    """Run a script: its summary, and its seconds from start to exit.

    Its files go to the folder. Exits with code 2 and its last line if it fails.
    """
    start = [sys.executable]
    if script == BY_HAND:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(devices)]
    else:
        flags = ["--devices", str(devices), *flags]
    threads = max(1, os.cpu_count() // devices)
    began = perf_counter()
    done = subprocess.run(
        [*start, script, *flags, "--output-dir", folder],
        cwd=HERE,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )
    seconds = perf_counter() - began
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        refuse(f"{script} {' '.join(flags)}: {lines[-1]}")
    summary = json.loads(Path(folder, "summary.json").read_text())
    return summary | {"wall_seconds": seconds}
