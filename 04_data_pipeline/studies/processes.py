"""Workers: how many, how far ahead, how they start, and what Dask does in them."""

import logging
from contextlib import ExitStack
from functools import partial
from itertools import count, product
from time import perf_counter, sleep

from dask.distributed import Client, LocalCluster

from studies.measuring import LIMIT, Case, fresh, take_turns
from studies.server import LATENCIES, Server, serve
from studies.stores import SIZE, full_or_quick
from studies.ways import BATCH, NAIVE, Step, Way, make_loader, make_step, measure

DEVICE_SECONDS = 0.25  # of a step that a GPU would take, in the study of workers


def sweep(repeats: int) -> list[dict]:
    """Samples/s of chapter 3's loader over workers and prefetch_factor, alone; and over
    workers beside training.

    The last two rows predict from the seconds that a batch takes one worker, and a step.
    """
    numbers = full_or_quick([1, 2, 4, 8], [1])
    factors = full_or_quick([1, 2, 4, 8], [2])
    seconds = full_or_quick(2, 0.05)
    cases = []
    with serve(max(LATENCIES)) as server:
        ways = [BATCH]
        for number, factor in product(numbers, factors):
            ways.append(BATCH._replace(num_workers=number, prefetch_factor=factor))
        for way in ways:
            work = partial(measure, way, server, seconds)
            cases.append(Case(label(way, with_step=False), work))
        step = make_step(server)
        for number in (0, *numbers):
            if number <= 4:
                way = BATCH._replace(num_workers=number)
                work = partial(measure, way, server, 4 * seconds, step)
                cases.append(Case(label(way, with_step=True), work))
        cases.append(Case({}, partial(time_step, step, server, seconds)))
        rows = take_turns("sweep", cases, repeats)
    return [*rows, {"load_seconds": seconds_of_load(rows)}]


def label(way: Way, with_step: bool) -> dict:
    """A row's labels in the sweep. Without workers there is no prefetch_factor."""
    factor = way.prefetch_factor if way.num_workers else None
    return {
        "num_workers": way.num_workers,
        "prefetch_factor": factor,
        "with_step": with_step,
    }


def seconds_of_load(rows: list[dict]) -> dict[str, float]:
    """How long a batch takes one worker: median, least and greatest."""
    one = label(BATCH._replace(num_workers=1), with_step=False)
    rate = next(row["samples_per_second"] for row in rows if one.items() <= row.items())
    batch = SIZE["batch"]
    return {
        "median": batch / rate["median"],
        "min": batch / rate["max"],
        "max": batch / rate["min"],
    }


def time_step(step: Step, server: Server, seconds: float) -> dict:
    """Seconds of a step when its batch is at hand."""
    batch = next(iter(make_loader(BATCH, server)))
    step(batch)
    began = perf_counter()
    for number in count(1):
        step(batch)
        took = perf_counter() - began
        if took > seconds:
            return {"step_seconds": took / number}


def workers(repeats: int) -> list[dict]:
    """Samples/s of the naive loop over workers, in batches of 8, beside a step that needs
    no core.

    The first row is of one worker without a step; the last has the seconds that it takes a
    batch, and the step.
    """
    batch = 8
    numbers = full_or_quick([0, 1, 2, 3, 4, 6], [0, 1])
    seconds = full_or_quick(3, 0.05)
    with serve(max(LATENCIES)) as server:
        alone = NAIVE._replace(num_workers=1)
        work = partial(fresh, LIMIT, measure, alone, server, seconds, batch=batch)
        cases = [Case({"num_workers": 1, "with_step": False}, work)]
        for number in numbers:
            how = (NAIVE._replace(num_workers=number), server, seconds, wait_for_device)
            work = partial(fresh, LIMIT, measure, *how, batch=batch)
            cases.append(Case({"num_workers": number, "with_step": True}, work))
        rows = take_turns("workers", cases, repeats)
    load = batch / rows[0]["samples_per_second"]["median"]
    return [*rows, {"load_seconds": load, "step_seconds": DEVICE_SECONDS}]


def wait_for_device(batch: dict) -> None:
    """Stands for the step of a GPU, during which the cores have nothing to do."""
    sleep(DEVICE_SECONDS)


def dask_modes(repeats: int) -> list[dict]:
    """Rates and threads of the naive loop by each of Dask's schedulers, in the process
    itself and in two workers.
    """
    schedulers = ["synchronous", "cluster", "threads", "processes"]
    modes = {mode: Way("Dask", scheduler=mode) for mode in schedulers}
    modes = full_or_quick(modes, dict(list(modes.items())[:2]))
    modes["without Dask"] = NAIVE
    seconds = full_or_quick(2, 0.05)
    cases = []
    with serve(max(LATENCIES)) as server:
        for number, (mode, way) in product((0, 2), modes.items()):
            labels = {"mode": mode, "num_workers": number}
            how = (way._replace(num_workers=number), server, seconds)
            # Where Dask starts processes for each sample, one takes seconds.
            work = partial(fresh, LIMIT, measure_dask, *how, batch=2)
            cases.append(Case(labels, work))
        return take_turns("dask", cases, repeats)


def measure_dask(way: Way, server: Server, seconds: float) -> dict:
    """Measure a way of which Dask's scheduler may be a cluster of two processes."""
    if way.scheduler != "cluster":
        return measure(way, server, seconds)
    with ExitStack() as stack:
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )
        stack.enter_context(cluster)
        client = Client(cluster)  # get_client finds it; a loader's worker makes its own
        stack.enter_context(client)
        way = way._replace(scheduler=cluster.scheduler_address)
        return measure(way, server, seconds)


def persistent(repeats: int) -> list[dict]:
    """Seconds to the first batch of an epoch and of the next, by how two workers start, and
    whether they stay.
    """
    methods = full_or_quick(["forkserver", "spawn"], ["forkserver"])
    cases = []
    with serve(max(LATENCIES)) as server:
        for method, stay in product(methods, (False, True)):
            labels = {"start_method": method, "persistent_workers": stay}
            way = BATCH._replace(num_workers=2, start_method=method)
            work = partial(fresh, LIMIT, time_first_batches, way, server, stay)
            cases.append(Case(labels, work))
        return take_turns("persistent", cases, repeats)


def time_first_batches(way: Way, server: Server, stay: bool) -> dict:
    """Seconds to the first batch of two epochs of four steps."""
    loader = make_loader(way, server, steps=4, persistent=stay)
    found = {}
    for name in ("first_epoch_s", "second_epoch_s"):
        began = perf_counter()
        for number, _ in enumerate(loader):
            if number == 0:
                found[name] = perf_counter() - began
    return found
