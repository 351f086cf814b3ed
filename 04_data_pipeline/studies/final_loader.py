"""How long a step waits for the final loader, and how much memory that takes."""

from functools import partial
from math import ceil
from time import perf_counter

import numpy as np
import psutil

from block_loader import BlockLoader
from studies.measuring import Case, fresh, take_turns
from studies.server import LATENCIES, Server, serve
from studies.stores import full_or_quick
from studies.ways import FINAL, NAIVE, Step, Way, begin, make_loader, make_step, plan


def wait(repeats: int) -> list[dict]:
    """Seconds of waiting and of work in each step of training, with the naive loader and
    with the final one.
    """
    settled = plan(FINAL).stock
    steps = full_or_quick(48, 4)
    runs = [
        ("naive", NAIVE, 2, full_or_quick(10, 4)),
        ("final", FINAL, full_or_quick(settled, 2), steps),
    ]
    in_a_worker = ("final", FINAL._replace(num_workers=1), settled, steps)
    runs += full_or_quick([in_a_worker], [])
    cases = []
    with serve(max(LATENCIES)) as server:
        step = make_step(server)
        for name, way, warm_up, measured in runs:
            labels = {"loader": name, "num_workers": way.num_workers}
            labels["warm_up"] = warm_up
            work = partial(time_waits, way, server, step, warm_up, measured)
            cases.append(Case(labels, work))
        return take_turns("wait", cases, repeats)


def time_waits(way: Way, server: Server, step: Step, warm_up: int, steps: int) -> dict:
    """Train; [waited, worked] seconds of each step, and the share of time spent waiting in
    those after the first `warm_up`.
    """
    batches = iter(make_loader(way, server))
    seconds = []
    for _ in range(warm_up + steps):
        began = perf_counter()
        batch = next(batches)
        came = perf_counter()
        step(batch)
        ended = perf_counter()
        seconds.append([round(came - began, 6), round(ended - came, 6)])
    waited, worked = np.sum(seconds[warm_up:], axis=0).tolist()
    return {"steps": seconds, "data_wait_share": waited / (waited + worked)}


def memory(repeats: int) -> list[dict]:
    """Memory of the process that reads, over 1,000 steps of the final loader, and by how
    much it may grow. It is measured once, whatever the repeats.
    """
    steps = full_or_quick(1000, 40)
    every = full_or_quick(25, 10)
    cases = []
    with serve(0) as server:
        for number in (0, 1):
            way = FINAL._replace(num_workers=number)
            work = partial(fresh, 600, follow_memory, way, server, steps, every)
            cases.append(Case({"num_workers": number}, work))
        rows = take_turns("memory", cases, repeats=1)
    points = []
    for row in rows:
        for number, megabytes in enumerate(row.pop("rss_mb", [])):
            step = every * (number + 1)
            labels = {"num_workers": row["num_workers"], "step": step}
            points.append(labels | {"rss_mb": megabytes})
    return points + rows


def follow_memory(way: Way, server: Server, steps: int, every: int) -> dict:
    """Megabytes of the process that reads, every so many steps, and the loader's bound."""
    loader = make_loader(way, server)
    bound = bound_bytes(loader.dataset)
    batches, workers = begin(loader)
    reader = workers[0] if workers else psutil.Process()
    found = []
    for number in range(1, steps + 1):
        next(batches)["target"].mean()
        if number % every == 0:
            found.append(reader.memory_info().rss / 1e6)
    return {"rss_mb": found, "bound_mb": bound / 1e6}


def bound_bytes(loader: BlockLoader) -> int:
    """The most that the samples and the running reads of a process take, with at most one
    worker: see BlockLoader.
    """
    order = loader.order
    blocks = loader.read_block.__self__
    variables = len(blocks.reader.variables)
    size = blocks.maker.space.size
    cell = np.dtype("float32").itemsize
    sample = size**2 * (variables * cell + 1)  # a byte of its swaths
    new = ceil(order.batch_size / order.patches_per_block)
    held = order.slots + loader.blocks_ahead + new
    one_map = blocks.maker.valid.size * cell
    # A thread has one variable's map at a time: as it came, decoded, and as an array.
    reading = loader.blocks_ahead * 3 * one_map
    return held * order.patches_per_block * sample + reading
