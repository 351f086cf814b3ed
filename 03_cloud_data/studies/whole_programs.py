"""Whole programs: the reader's command, and the making of its store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tqdm import tqdm

from conversion.progress import FOLDER
from demo_store import CLOUD
from studies.stores import full_or_quick


def command(repeats: int) -> list[dict]:
    """The reader's command from beginning to end, where its store is whole."""
    steps = full_or_quick([], ["--max-steps", "4"])
    rows = []
    for _ in tqdm(range(repeats), "command", disable=None):
        with TemporaryDirectory() as folder:
            run = [sys.executable, CLOUD / "train.py", "--output-dir", folder, *steps]
            began = perf_counter()
            subprocess.run(run, check=True, capture_output=True)
            seconds = perf_counter() - began
            summary = json.loads(Path(folder, "summary.json").read_text())
        rows.append({"wall_seconds": seconds, "summary": summary})
    return rows


def making(repeats: int) -> list[dict]:
    """make_store.py with its defaults, whose NetCDF files are there: by level of compression."""
    small = full_or_quick([], ["--days", "24", "--resolution", "10"])
    return [make_once(level, small) for level in (1, 3, 9)]


def make_once(level: int, flags: list[str]) -> dict:
    """What it took to make a store, and what there is of it."""
    with TemporaryDirectory() as folder:
        store = Path(folder, "small.zarr")
        run = [sys.executable, CLOUD / "make_store.py", "--store", store, *flags]
        before = os.times()
        began = perf_counter()
        subprocess.run(
            [*run, "--zstd-level", str(level)], check=True, capture_output=True
        )
        seconds = perf_counter() - began
        after = os.times()
        files = [path for path in store.rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in files if FOLDER not in path.parts]
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return {
        "zstd_level": level,
        "seconds": seconds,
        "cpu_seconds": user + system,
        "objects": len(sizes),
        "mb": sum(sizes) / 1e6,
    }
