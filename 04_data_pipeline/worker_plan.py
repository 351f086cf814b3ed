"""How many workers a loader needs, and how many the machine can have."""

import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import psutil


class Bound(NamedTuple):
    """A number of workers for each rank: what is needed, or the most that fit."""

    name: str
    workers: int
    terms: str  # what it was worked out from


def plan_here(
    t_load: float, t_step: float, *, ranks: int, prefetch_factor: int, batch_bytes: int
) -> int:
    """Print how many workers each rank needs on this machine; return that number.

    See `plan_workers`. A worker is taken to need as much memory as this process has.
    """
    shm = Path("/dev/shm")
    workers, _ = plan_workers(
        t_load,
        t_step,
        cores=count_cores(),
        ranks=ranks,
        prefetch_factor=prefetch_factor,
        batch_bytes=batch_bytes,
        worker_bytes=psutil.Process().memory_info().rss,
        memory=psutil.virtual_memory().available,
        shm=shutil.disk_usage(shm).free if shm.exists() else math.inf,
    )
    return workers


def plan_workers(
    t_load: float,
    t_step: float,
    *,
    cores: int,
    ranks: int = 1,
    prefetch_factor: int = 2,
    batch_bytes: int = 0,
    worker_bytes: int = 0,
    memory: float = math.inf,
    shm: float = math.inf,
) -> tuple[int, str]:
    """Print how many workers each rank needs, and how many it can have at most.

    Returns the smallest of these numbers, and the name of what sets it. `t_load` is the
    seconds that one worker takes for a batch, `t_step` those of a step. `cores` and
    `ranks` are the machine's. `batch_bytes` and `worker_bytes` are the sizes of a batch
    and of a worker without batches. `memory` and `shm` are the free bytes in memory and
    in /dev/shm, through which workers hand over batches.
    """
    sharers = "1 rank" if ranks == 1 else f"{ranks} ranks"
    needed = math.ceil(round(t_load / t_step, 6))
    bounds = [
        Bound("t_load / t_step", needed, f"{ms(t_load)} / {ms(t_step)}"),
        Bound("cores", max(0, cores // ranks - 1), f"{cores} cores / {sharers} - 1"),
    ]
    queue = prefetch_factor * batch_bytes
    ahead = f"{prefetch_factor} batches x {batch_bytes / 1e6:.2f} MB"
    whole = f"{worker_bytes / 1e6:.0f} MB + {ahead}" if worker_bytes else ahead
    rooms = [
        ("memory", memory, worker_bytes + queue, whole),
        ("/dev/shm", shm, queue, ahead),
    ]
    for name, room, each, terms in rooms:
        if room < math.inf and each:
            terms = f"{room / 1e9:.1f} GB / ({sharers} x ({terms}))"
            bounds.append(Bound(name, int(room // (ranks * each)), terms))
    least = min(bounds, key=lambda bound: bound.workers)

    print("workers for each rank")
    for bound in bounds:
        verb = "needs" if bound.name == "t_load / t_step" else "at most"
        print(f"  {bound.name:16}{bound.terms} = {verb} {bound.workers:,}")
    # Without workers the two times add up; with workers the longer one decides.
    without = t_load + t_step
    pace = max(t_load / least.workers, t_step) if least.workers else without
    paces = f"a step every {ms(pace)}; without any, {ms(without)}"
    print(f"  {least.workers}, by {least.name}: {paces}")
    return least.workers, least.name


def count_cores() -> int:
    """The cores that this process may use: a job may have only some of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
