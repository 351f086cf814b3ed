"""Levelled work: each step needs a few new blocks, instead of all in some steps and none in
the others.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from time import perf_counter

import numpy as np
from matplotlib.figure import Figure

from block_loader import BlockOrder, batch_number
from datamodule import WindDataModule
from studies.measuring import Case, cpu_seconds, take_turns
from studies.server import LATENCIES, Server, serve
from studies.stores import full_or_quick
from studies.ways import Step, make_step, no_step, open_data
from task import make_datamodule

BATCHES = (8, 32)
SLOTS_PER_SAMPLE = 4  # train.py's default
PATCHES_PER_BLOCK = 8
FILLED = (
    SLOTS_PER_SAMPLE * PATCHES_PER_BLOCK
)  # steps, after which each slot has changed
SETTLED = FILLED + 8  # the steps between train already, so that reads are as far ahead


class AtOnceOrder(BlockOrder):
    """Every slot begins with its block's first sample: all change blocks at once."""

    def address(self, step: int, k: int) -> tuple[int, int]:
        batch = batch_number(step, self.skipped)
        slot = batch % self.steps_per_round * self.batch_size + k
        given_before = batch // self.steps_per_round
        reads_before, patch = divmod(given_before, self.patches_per_block)
        return reads_before * self.slots + slot, patch


ORDERS = {"all slots at once": AtOnceOrder, "levelled": BlockOrder}
COLOURS = {"all slots at once": "#D55E00", "levelled": "#0072B2"}  # Okabe and Ito's
# What a step is timed for: to wait for its batch, to make it, and all that it does.
TIMES = ("waits", "makings", "steps")
SPREAD = {"samples_per_second", "cpu_ms_per_sample", "requests_per_sample"}
SPREAD |= {
    f"{name}_{part}_ms" for name in TIMES for part in ("median", "p95", "slowest")
}


def levelled(repeats: int) -> list[dict]:
    """The same loader under both orders, alone and beside training."""
    alone = full_or_quick(4096, 96)  # samples: a step lasts milliseconds
    training = full_or_quick(64, 3)  # steps
    cases = []
    with serve(max(LATENCIES)) as server:
        for batch_size, with_step in product(BATCHES, (False, True)):
            step = make_step(server) if with_step else no_step
            steps = training if with_step else alone // batch_size
            for name in ORDERS:
                loader = OrderedLoader(name, batch_size, server)
                labels = {"order": name, "batch_size": batch_size}
                labels |= {"slots": loader.order.slots, "training": with_step}
                work = partial(time_steps, loader, server, step, steps)
                cases.append(Case(labels, work))
        return take_turns("levelled", cases, repeats, SPREAD)


class OrderedLoader:
    """The block loader under an order, and the seconds that it has spent making batches."""

    def __init__(self, name: str, batch_size: int, server: Server):
        options, data = open_data("whole maps", server)
        options = replace(
            options,
            batch_size=batch_size,
            shuffle_slots=SLOTS_PER_SAMPLE * batch_size,
            patches_per_block=PATCHES_PER_BLOCK,
        )
        usual = make_datamodule(options, data)
        self.order = ORDERS[name](**vars(usual.order))
        module = WindDataModule(
            data,
            options=asdict(options),
            order=self.order,
            blocks=usual.blocks,
            first_step=0,
        )
        self.making = 0.0
        maker = usual.blocks.maker
        maker.make_batch = self.timed(maker.make_batch)
        self.loader = module.train_loader()

    def timed(self, make: Callable) -> Callable:
        """The same function, whose seconds are added up."""

        def call(samples: list) -> dict:
            began = perf_counter()
            batch = make(samples)
            self.making += perf_counter() - began
            return batch

        return call


def time_steps(loader: OrderedLoader, server: Server, step: Step, steps: int) -> dict:
    """Rate, cost and milliseconds of some steps, after those in which the slots fill."""
    batches = iter(loader.loader)
    for number in range(SETTLED):
        batch = next(batches)
        if number >= FILLED:
            step(batch)
    seconds: dict[str, list[float]] = {name: [] for name in TIMES}
    requests = server.counts()[0]
    cpu = cpu_seconds()
    for _ in range(steps):
        made = loader.making
        began = perf_counter()
        batch = next(batches)
        seconds["waits"].append(perf_counter() - began)
        seconds["makings"].append(loader.making - made)
        step(batch)
        seconds["steps"].append(perf_counter() - began)
    samples = steps * loader.order.batch_size
    cpu = cpu_seconds() - cpu
    requests = server.counts()[0] - requests
    return {
        "samples_per_second": samples / sum(seconds["steps"]),
        "cpu_ms_per_sample": 1e3 * cpu / samples,
        "requests_per_sample": requests / samples,
    } | percentiles(seconds)


def percentiles(seconds: dict[str, list[float]]) -> dict:
    """Milliseconds of a run's steps: median, 95th percentile, slowest; and of each step."""
    found = {}
    for name in TIMES:
        milliseconds = 1e3 * np.array(seconds[name])
        found[f"{name}_median_ms"] = float(np.median(milliseconds))
        found[f"{name}_p95_ms"] = float(np.percentile(milliseconds, 95))
        found[f"{name}_slowest_ms"] = float(milliseconds.max())
    found["first_run_step_ms"] = [round(1e3 * value, 1) for value in seconds["steps"]]
    return found


def plot_levelled(rows: list[dict]) -> Figure:
    """New blocks of each step by the order, and the seconds of each step beside training."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    largest = BATCHES[-1]
    for row in rows:
        if not row["training"] or row["batch_size"] != largest:
            continue
        name = row["order"]
        style = {"color": COLOURS[name], "label": name, "linewidth": 1.5}
        seconds = np.array(row["first_run_step_ms"]) / 1e3
        steps = range(SETTLED, SETTLED + len(seconds))
        order = ORDERS[name](200, largest, row["slots"], PATCHES_PER_BLOCK, seed=0)
        above.step(steps, count_new_blocks(order, steps), where="mid", **style)
        below.plot(steps, seconds, marker=".", **style)
    above.set(ylabel="new blocks in the step", ylim=(0, None))
    below.set(ylabel="seconds for the step", xlabel="step", ylim=(0, None))
    below.xaxis.get_major_locator().set_params(integer=True)
    above.legend(frameon=False)
    figure.suptitle(f"Batches of {largest}, training on {os.cpu_count()} cores")
    return figure


def count_new_blocks(order: BlockOrder, steps: range) -> list[int]:
    """How many blocks each step is the first to use, once the slots are filled."""
    counts = []
    for step in steps:
        patches = [order.address(step, k)[1] for k in range(order.batch_size)]
        counts.append(patches.count(0))
    return counts


def describe_levelled(row: dict) -> str:
    """A row in a line."""
    where = "beside training" if row["training"] else "alone"
    rate = row["samples_per_second"]["median"]
    names = ("steps_median_ms", "steps_p95_ms", "steps_slowest_ms")
    middle, high, slowest = (row[name]["median"] for name in names)
    step = f"a step {middle:.0f} ms, 95th percentile {high:.0f}, slowest {slowest:.0f}"
    order = f"{row['order']}, batch {row['batch_size']}, {where}"
    return f"{order}: {rate:.0f} samples/s; {step}"
