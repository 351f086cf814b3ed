"""The stores that are measured: the same winds in several layouts of chunks."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demo_store import CLOUD
from studies.server import BUCKETS, Server

# Chunks of so many times, rows and columns (0: all of the map), and times in a shard.
LAYOUTS = {
    "whole maps": (1, 0, 0, 0),
    "128 x 128": (1, 128, 128, 0),
    "8 times of 64 x 64": (8, 64, 64, 0),
    "64 x 64 in shards": (1, 64, 64, 1),
}
# Of the stores, and of what is read. --quick has a day of each month, at least.
SIZE = {"days": 200, "resolution": 0.25, "patch": 64, "batch": 32}
QUICK = {"days": 132, "resolution": 10, "patch": 16, "batch": 8}


def full_or_quick(full: Any, quick: Any) -> Any:
    """The first, or the second under --quick."""
    return quick if SIZE == QUICK else full


def make_stores(layouts: Iterable[str]) -> None:
    """Make the stores that are missing, all from the files that the first of them makes."""
    rows = round(180 / SIZE["resolution"]) + 1
    columns = 2 * rows - 2
    for layout in layouts:
        times, height, width, shard_times = LAYOUTS[layout]
        flags = ["--store", store_path(layout)]
        flags += ["--days", SIZE["days"]]
        flags += ["--resolution", SIZE["resolution"]]
        flags += ["--chunk", times, height or rows, width or columns]
        flags += ["--shard-times", shard_times]
        run_make_store(*flags)


def run_make_store(*flags: object) -> None:
    """Run chapter 3's make_store.py; it says why if it fails."""
    command = [sys.executable, CLOUD / "make_store.py", *map(str, flags)]
    if subprocess.run(command).returncode:
        sys.exit(2)


def store_path(layout: str) -> Path:
    """A layout's store on this disk."""
    return BUCKETS / store_key(layout)


def store_key(layout: str) -> str:
    """Bucket and key of a layout's store."""
    folder = f"{SIZE['days']}_days_{SIZE['resolution']:g}_degrees"
    name = layout.replace(" ", "_")
    return f"layouts/{folder}/{name}.zarr"


def store_flags(layout: str, server: Server, *more: object) -> list[str]:
    """train.py's flags that read a layout's store in batches of SIZE, and more of its flags."""
    flags = ["--anonymous", "--endpoint", server.address]
    flags += ["--store", f"s3://{store_key(layout)}"]
    flags += ["--patch-size", SIZE["patch"]]
    flags += ["--batch-size", SIZE["batch"]]
    flags += ["--max-steps", 10**6]
    return [str(flag) for flag in [*flags, *more]]
