"""Does a training wait for its data, why, and how much faster could it be at most?

    from diagnosis import diagnose, report

    # step(batch): to the device, forward, backward, optimizer; of a model to spare
    report(diagnose(loader, step, run_steps=10_000))

To diagnose your own training, copy this file and worker_plan.py, which it imports. They
need torch, tqdm and psutil.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from worker_plan import ms, plan_here

STEPS = 32  # to measure, by default
FIRST_STEPS = 5  # of each run are left out: the very first compiles and allocates
PARTS = 4  # of the measured steps, at most; each part gives a speed-up of its own
HARDLY = 0.03  # of the time: nobody needs to care about so little waiting
WORTHWHILE = 1.1  # times: below this speed-up, leave the loader alone
CLEARLY = 1.15  # times: smaller differences between two runs may be noise
WIDE = 1.25  # times: a range whose ends differ by more than this needs a second look


@dataclass
class Diagnosis:
    """What the four runs found. Times are the mean seconds of a step or of a batch."""

    verdict: str  # data-bound, compute-bound or start-up-bound
    shares: dict[str, float]  # of the run's time: waiting, computing, start-up
    speedup: float  # of the run, if data cost nothing
    speedup_range: tuple[float, float]  # over parts of the runs
    waiting: float  # for a batch, in the run of loader and step
    compute: float  # of a step in the run of loader and step
    at_hand: float  # of a step with a cached batch
    load: float  # of a batch in one worker, if each worker has a core
    startup: float  # once: what the first batch takes longer than the others
    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    run_steps: int
    notes: list[str] = field(default_factory=list)

    @property
    def alone(self) -> float:
        """Seconds from one batch to the next of the loader alone."""
        return self.load / max(1, self.num_workers)

    @property
    def pace(self) -> float:
        """Seconds from one step to the next in the run of loader and step."""
        return self.waiting + self.compute

    @property
    def slowdown(self) -> float:
        """What a step takes longer beside the loader than with a cached batch."""
        return self.compute - self.at_hand


def diagnose(
    loader: Iterable,
    step: Callable,
    steps: int = STEPS,
    run_steps: int = 1000,
    period: int = 1,
) -> Diagnosis:
    """Say whether a training waits for its data, and what that costs `run_steps` steps.

    `loader` gives batches, and starts again from its first batch each time it is
    iterated. `step` does all that a training does with a batch: it moves the batch to the
    device, computes and updates. It is called about a hundred times, so give it a model
    that may change. At least `steps` steps are measured: whole waves of batches, and at
    least two waves. A wave is one batch from each worker, or a whole `period`.

    `period` is the number of batches after which the loader's work repeats, 1 if every
    batch costs the same. A loader that reads 64 samples at once and gives them in batches
    of 8 waits at every eighth batch: its period is 8. If it mixes 32 such blocks, its
    period is 32 * 64 / 8 = 256 batches, in which it replaces each block once. With a
    period that is too short, one part of a run has more reads than another.

    ValueError if the loader has too few batches: at once if it has a length, otherwise
    when it ends. How many batches the runs take, and about how long, goes to stderr.

    The device is waited for after every step. A loop that does not wait may hide some of
    the time for data behind the device's work.
    """
    if min(steps, run_steps, period) < 1:
        raise ValueError("steps, run_steps and period must be at least 1")
    size = plan_runs(loader, steps, period)
    size.require(length_of(loader, size.batches))
    cached = f"{FIRST_STEPS + size.cached} steps with a cached batch"
    runs = f"{size.batches} batches without a step, {cached}, "
    runs += f"{size.batches} batches with the step, {cached}"
    print(f"four runs: {runs}", file=sys.stderr)

    # The loader is first, because only its first run shows what its start costs. The
    # cached batch is timed before and after the loader's run with the step, so that a
    # machine that gets slower is noticed.
    alone = run_loader(loader, size.batches, "1: loader alone")
    size.require(len(alone.waits))
    before = run_cached(alone.batch, size.cached, "2: cached batch", step)
    rest = predict_rest(alone, before, size)
    print(f"about {rest:.0f} s more", file=sys.stderr)
    beside = run_loader(loader, size.batches, "3: loader and step", step)
    if len(beside.waits) < size.batches:
        remedy = "give one that starts again from its first batch"
        raise ValueError(f"the loader gives its batches once: {remedy}")
    after = run_cached(alone.batch, size.cached, "4: cached batch again", step)
    return evaluate(size, run_steps, alone, beside, [before, after])


@dataclass(frozen=True)
class Size:
    """How many batches the runs take, and from how many workers."""

    workers: int
    prefetch: int
    warm_up: int  # batches that are left out at the beginning
    wave: int  # batches: one from each worker, or a period. Only whole waves are compared.
    waves: int
    cached: int  # steps that are measured with a cached batch, each time

    @property
    def batches(self) -> int:
        return self.warm_up + self.waves * self.wave

    def require(self, available: int) -> None:
        """ValueError that says what to change, if a loader has fewer batches."""
        if available >= self.batches:
            return
        remedies = ["give a loader with more"]
        fitting = (available - self.warm_up) // self.wave * self.wave
        if fitting >= 2 * self.wave:
            remedies.append(f"measure fewer steps (steps={fitting})")
        if self.workers:
            remedies.append("use fewer workers")
        reason = f"the loader has {available} batches, and a run needs {self.batches}"
        remedy = ", or ".join(remedies)
        raise ValueError(f"{reason}, {self.warm_up} of them to warm up: {remedy}")


def plan_runs(loader: Iterable, steps: int, period: int) -> Size:
    """The size of runs that measure at least so many steps."""
    workers = getattr(loader, "num_workers", 0)
    prefetch = getattr(loader, "prefetch_factor", None) or 2
    wave = math.lcm(max(1, workers), period)
    # Workers that started early, or a slow first batch, leave a stock of batches, and
    # nobody waits for those. A loader of blocks has a period's batches in its blocks, and
    # each of its workers may have read a further period's.
    stocks = (2 * workers * prefetch, (1 + max(1, workers)) * period)
    return Size(
        workers=workers,
        prefetch=prefetch,
        warm_up=max(FIRST_STEPS, *stocks),
        wave=wave,
        waves=max(2, math.ceil(steps / wave)),  # one wave could be compared with none
        cached=math.ceil(steps / 2),
    )


def length_of(loader: Iterable, otherwise: int) -> int:
    """The length of a loader, if it has one."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return otherwise


@dataclass(frozen=True)
class Run:
    """The seconds of each wait for a batch and of each step, and the last batch."""

    waits: list[float]
    works: list[float]
    batch: Any


def run_loader(
    loader: Iterable, batches: int, title: str, step: Callable | None = None
) -> Run:
    """Take batches of a loader from its first one on; then end all that still loads."""
    asked = perf_counter()
    iterator = iter(loader)  # starts the workers
    run = take(iterator, batches, title, step, asked)
    # DataLoader keeps persistent workers here.
    if getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None
    del iterator  # the last reference: workers end, and generators close
    gc.collect()  # only the collector frees an iterator that refers to itself
    return run


def run_cached(batch: Any, steps: int, title: str, step: Callable) -> float:
    """Repeat the step with one batch; its mean seconds, without the first steps."""
    run = take(repeat(batch), FIRST_STEPS + steps, title, step, perf_counter())
    return mean(run.works[FIRST_STEPS:])


def take(
    batches: Iterator, number: int, title: str, step: Callable | None, asked: float
) -> Run:
    """Take up to so many batches, and do the step with each.

    `asked` is when the first wait began.
    """
    waits = []
    works = []
    batch = None
    for batch in tqdm(
        islice(batches, number), title, number, leave=False, disable=None
    ):
        given = perf_counter()
        if step:
            step(batch)
            if torch.accelerator.is_available():
                # A step only queues its work there; time it until that is done.
                torch.accelerator.synchronize()
        waits.append(given - asked)
        asked = perf_counter()
        works.append(asked - given)
    return Run(waits, works, batch)


def predict_rest(alone: Run, cached: float, size: Size) -> float:
    """About how many seconds the last two runs will take."""
    load = mean(alone.waits[size.warm_up :])
    pace = max(load, cached) if size.workers else load + cached
    startup = alone.waits[0] - load
    return startup + size.batches * pace + (FIRST_STEPS + size.cached) * cached


def evaluate(
    size: Size, run_steps: int, alone: Run, beside: Run, cached: list[float]
) -> Diagnosis:
    """What follows from the runs. `cached` has the seconds of a step with a cached batch."""
    waits = torch.tensor(beside.waits[size.warm_up :], dtype=torch.float64)
    works = torch.tensor(beside.works[size.warm_up :], dtype=torch.float64)
    # Means, not medians: they add up to the run's time, as the shares do, and a block
    # loader's one slow batch in each period counts. The range shows what a slow spell
    # did to them.
    waiting = waits.mean().item()
    compute = works.mean().item()
    startup = max(0.0, alone.waits[0] - waiting)
    # A step cannot be faster beside the loader than without it: a cached step that was
    # slower met some noise.
    at_hands = [min(compute, seconds) for seconds in cached]
    at_hand = mean(at_hands)
    once = startup / run_steps
    paces = [once + seconds for seconds in average_parts(waits + works, size)]
    speedup = (once + waiting + compute) / at_hand
    low = max(1.0, min(paces) / max(at_hands))
    high = max(paces) / min(at_hands)

    verdict = "compute-bound"
    if speedup >= WORTHWHILE:
        losses = run_steps * (waiting + compute - at_hand)
        verdict = "data-bound" if losses >= startup else "start-up-bound"
    total = run_steps * (waiting + compute) + startup
    shares = {
        "waiting": run_steps * waiting / total,
        "computing": run_steps * compute / total,
        "start-up": startup / total,
    }
    found = Diagnosis(
        verdict=verdict,
        shares=shares,
        speedup=speedup,
        speedup_range=(low, high),
        waiting=waiting,
        compute=compute,
        at_hand=at_hand,
        load=mean(alone.waits[size.warm_up :]) * max(1, size.workers),
        startup=startup,
        num_workers=size.workers,
        prefetch_factor=size.prefetch,
        batch_bytes=sum(
            getattr(leaf, "nbytes", 0) for leaf in tree_leaves(alone.batch)
        ),
        run_steps=run_steps,
    )
    found.notes = list_doubts(found, max(cached))
    return found


def average_parts(seconds: torch.Tensor, size: Size) -> list[float]:
    """The mean of each part of a run, which is one wave or several."""
    waves = seconds.reshape(size.waves, size.wave)
    parts = waves.tensor_split(min(PARTS, size.waves))
    return [part.mean().item() for part in parts]


def list_doubts(found: Diagnosis, slowest: float) -> list[str]:
    """What to know before relying on a diagnosis.

    `slowest` is the seconds of a step in the slower run with a cached batch.
    """
    notes = []
    low, high = found.speedup_range
    span = f"{low:.2f} to {high:.2f}"
    beside = f"{ms(found.compute)} beside the loader"
    if high > WIDE * low:
        cause = "the machine was slower for a while, or the loader's period is longer than stated"
        remedy = "repeat the diagnosis, with more steps"
        notes.append(f"the speed-up varies, from {span}: {cause}; {remedy}")
    if low < WORTHWHILE <= high:
        sides = f"lies on both sides of {WORTHWHILE}"
        notes.append(f"the range of {span} {sides}: the verdict is not certain")
    if slowest > CLEARLY * found.compute:
        pair = f"{ms(slowest)} with a cached batch, and {beside}"
        cause = "other programs used the cores; repeat the diagnosis"
        notes.append(f"a step took {pair}: {cause}")
    elif found.compute > CLEARLY * found.at_hand and found.waiting >= found.slowdown:
        pair = f"{beside}, and {ms(found.at_hand)} with a cached batch"
        notes.append(f"the loader also takes cores from the step, which takes {pair}")
    if found.alone > CLEARLY * found.pace:
        pair = f"a batch every {ms(found.alone)} without the step, "
        pair += f"and every {ms(found.pace)} with it, later"
        cause = "the later run used a stock, or found in memory what the first had read"
        remedy = "the training may wait longer, so measure more steps"
        notes.append(f"the loader gave {pair}: {cause}; {remedy}")
    return notes


def report(found: Diagnosis, ranks: int = 1) -> int | None:
    """Print a diagnosis and, if the training waits, how many workers to give it here.

    `ranks` is the number of processes that train on this machine, each with workers of
    its own. Returns the number of workers for each of them, or None if more workers would
    hardly make the training faster.
    """
    cached = f"step with a cached batch: {ms(found.at_hand)}"
    print(f"\n{found.verdict}: {explain(found)}")
    print(f"loader alone: a batch every {ms(found.alone)}; {cached}")
    print(f"time of a run of {found.run_steps:,} steps")
    each = {
        "waiting": f"{ms(found.waiting)} a step",
        "computing": f"{ms(found.compute)} a step",
        "start-up": f"{found.startup:.2f} s, once",
    }
    for name, share in found.shares.items():
        print(f"  {name:10}{share:7.1%}   {each[name]}")
    low, high = found.speedup_range
    best = f"{found.speedup:.2f} times ({low:.2f} to {high:.2f} in parts of the runs)"
    print(f"best speed-up that work on data could give: {best}")
    for note in found.notes:
        print(f"note: {note}")
    if found.verdict != "data-bound" or found.shares["waiting"] < HARDLY:
        print("no more workers are needed: they would hardly make the training faster")
        return None
    return plan_here(
        found.load,
        found.at_hand,
        ranks=ranks,
        prefetch_factor=found.prefetch_factor,
        batch_bytes=found.batch_bytes,
    )


def explain(found: Diagnosis) -> str:
    """The reason for a verdict, in words."""
    cached = f"{ms(found.at_hand)} with a cached batch"
    if found.verdict == "start-up-bound":
        return f"the first batch takes {found.startup:.2f} s longer than the others"
    if found.verdict == "compute-bound":
        return f"a step takes {cached}, and {ms(found.pace)} with the loader"
    if found.waiting >= found.slowdown:
        wait = f"a step waits {ms(found.waiting)} for its batch"
        return f"{wait}, and then computes for {ms(found.compute)}"
    beside = f"{ms(found.compute)} beside the loader"
    return f"the loader takes cores from the step, which takes {beside}, and {cached}"
