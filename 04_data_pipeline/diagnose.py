"""Chapter 4: does a training wait for its data, why, and how much faster could it be at most?

    uv run python diagnose.py                        # train.py's training; takes any flags of train.py
    uv run python diagnose.py --naive                # with a loader that reads one patch after another

Four short runs are compared: the loader alone, the step with one cached batch, the step with the loader, and
the cached batch again. You should see a verdict, the shares of time, the best speed-up that work on data could
give with its range in this run, and, if the training waits, how many workers it needs.

To diagnose your own training, copy this file. It needs torch, tqdm and psutil:

    from diagnose import diagnose, report
    report(diagnose(loader, step, run_steps=10_000))
"""

import argparse
import gc
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import islice, repeat
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

STEPS = 32  # to measure, by default
FIRST_STEPS = 5  # of each run are left out: the very first compiles and allocates
PARTS = 4  # of the measured steps, at most; each part gives a speed-up of its own
HARDLY = 0.03  # of the time: nobody needs to care about so little waiting
WORTHWHILE = 1.1  # times: below this speed-up, leave the loader alone
CLEARLY = 1.15  # times: smaller differences between two runs may be noise
WIDE = 1.25  # times: a range whose ends differ by more than this needs a second look


@dataclass
class Diagnosis:
    """What the four runs found. Times are seconds of a step or a batch, unless the comment says otherwise."""

    verdict: str  # data-bound, compute-bound or start-up-bound
    shares: dict[str, float]  # of the planned run's time: waiting, computing, start-up
    speedup: float  # of the planned run, if data cost nothing
    speedup_range: tuple[
        float, float
    ]  # the lowest and the highest that parts of the runs give
    waiting: float  # for a batch, in the run of loader and step
    compute: float  # of a step in the run with the loader
    at_hand: float  # of the step with a cached batch
    load: float  # of a batch in one worker, if each worker has a core; from the loader alone
    startup: float  # once: what the first batch takes longer than the others
    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    run_steps: int
    notes: list[str]

    @property
    def slowdown(self) -> float:
        """What a step takes longer beside the loader than with a cached batch."""
        return self.compute - self.at_hand


def take(
    batches: Iterator, steps: int, title: str, step: Callable | None = None
) -> tuple[list, list, Any]:
    """Take up to `steps` batches. Returns the seconds of each wait and of each step, and the last batch."""
    waits, works = [], []
    batch = None
    asked = perf_counter()
    for batch in tqdm(islice(batches, steps), title, steps, leave=False, disable=None):
        given = perf_counter()
        if step:
            step(batch)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # a step only queues its work there; time it until it is done
        waits.append(given - asked)
        asked = perf_counter()
        works.append(asked - given)
    return waits, works, batch


def take_from_start(loader: Iterable, *how: Any) -> tuple[list, list, Any]:
    """Take batches of a loader from its first one on, see `take`; then end all that still loads."""
    batches = iter(loader)
    taken = take(batches, *how)
    if (
        getattr(loader, "_iterator", None) is batches
    ):  # DataLoader keeps persistent workers here
        loader._iterator = None
    del batches  # the last reference: workers end, and generators close
    gc.collect()  # only the collector frees an iterator that refers to itself
    return taken


def take_cached(batch: Any, steps: int, title: str, step: Callable) -> float:
    """Repeat the step with one batch. Returns its seconds on average, without the first steps."""
    _, works, _ = take(repeat(batch), FIRST_STEPS + steps, title, step)
    return mean(works[FIRST_STEPS:])


def too_few(
    batches: int, needed: int, warm_up: int, wave: int, workers: int
) -> ValueError:
    """The error for a loader with too few batches, and what to change."""
    remedies = ["give a loader with more"]
    fitting = (batches - warm_up) // wave * wave
    if fitting >= 2 * wave:
        remedies.append(f"measure fewer steps (steps={fitting})")
    if workers:
        remedies.append("use fewer workers")
    reason = f"the loader has {batches} batches, and a run needs {needed}, {warm_up} of them to warm up"
    return ValueError(f"{reason}: {', or '.join(remedies)}")


def diagnose(
    loader: Iterable,
    step: Callable,
    steps: int = STEPS,
    run_steps: int = 1000,
    period: int = 1,
) -> Diagnosis:
    """Say whether a training waits for its data, and what that costs a run of `run_steps` steps.

    `loader` gives batches, and starts again from its first batch each time it is iterated. `step` does all that
    a training does with a batch: it moves the batch to the device, computes and updates. It is called about a
    hundred times, so give it a model that may change. At least `steps` steps are measured: whole waves of
    batches, and at least two waves. A wave is one batch from each worker, or a whole `period`.

    `period` is the number of steps after which the loader's work repeats, 1 if every batch costs the same. A
    loader that reads 64 samples at once and gives them in batches of 8 waits at every eighth batch: its period
    is 8. If it mixes 32 such blocks, and starts all of them together, its period is 32 * 64 / 8 = 256 steps.
    With a period that is too short, one part of a run has the slow batches and others have none.

    ValueError if the loader has too few batches: at once if it has a length, otherwise when it ends. How many
    batches the runs take, and about how long, is written to stderr.

    The device is waited for after every step. A loop that does not may hide some waiting behind its work.
    """
    if min(steps, run_steps, period) < 1:
        raise ValueError("steps, run_steps and period must be at least 1")
    workers = getattr(loader, "num_workers", 0)
    prefetch = getattr(loader, "prefetch_factor", None) or 2
    # Batches come in waves: one from each worker, or those of a period. Only whole waves can be compared.
    wave = math.lcm(max(1, workers), period)
    waves = max(2, math.ceil(steps / wave))  # with one wave there is nothing to compare
    # Workers that started early, or a slow first batch, leave a stock of batches, and nobody waits for those.
    # A loader of blocks has a period's in use, and each of its workers may have read a further period's.
    warm_up = max(FIRST_STEPS, 2 * workers * prefetch, (1 + max(1, workers)) * period)
    batches = warm_up + waves * wave
    half = math.ceil(steps / 2)
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):  # it has none
        length = batches
    if length < batches:
        raise too_few(length, batches, warm_up, wave, workers)
    cached = f"{FIRST_STEPS + half} steps with a cached batch"
    runs = f"{batches} batches without a step, {cached}, {batches} batches with the step, {cached}"
    print(f"four runs: {runs}", file=sys.stderr)

    # The loader is first, because only its first run shows what its start costs. Then the cached batch is timed
    # before and after the loader's run with the step, so that a machine that gets slower is noticed.
    gaps, _, batch = take_from_start(loader, batches, "1: loader alone")
    if len(gaps) < batches:
        raise too_few(len(gaps), batches, warm_up, wave, workers)
    alone = mean(gaps[warm_up:])
    before = take_cached(batch, half, "2: cached batch", step)
    pace = max(alone, before) if workers else alone + before
    rest = gaps[0] - alone + batches * pace + (FIRST_STEPS + half) * before
    print(f"about {rest:.0f} s more", file=sys.stderr)
    waits, works, _ = take_from_start(loader, batches, "3: loader and step", step)
    if len(waits) < batches:
        raise ValueError(
            "the loader gives its batches once: give one that starts again from its first batch"
        )
    after = take_cached(batch, half, "4: cached batch again", step)

    waiting = mean(waits[warm_up:])
    compute = mean(works[warm_up:])
    # A step cannot be faster beside the loader than without it: a cached step that was slower met some noise.
    at_hands = [min(compute, before), min(compute, after)]
    at_hand = mean(at_hands)
    startup = max(0.0, gaps[0] - waiting)
    times = torch.tensor([waits[warm_up:], works[warm_up:]], dtype=torch.float64).sum(
        dim=0
    )
    parts = times.reshape(waves, wave).tensor_split(min(PARTS, waves))
    paces = [startup / run_steps + part.mean().item() for part in parts]
    # Means, not medians: they add up to the run's time, as the shares do, and a block loader's one slow batch in
    # each period counts. The range shows what a slow spell did to them.
    speedup = (startup / run_steps + waiting + compute) / at_hand
    low = max(1.0, min(paces) / max(at_hands))
    high = max(paces) / min(at_hands)

    losses = {
        "data-bound": run_steps * (waiting + compute - at_hand),
        "start-up-bound": startup,
    }
    verdict = max(losses, key=losses.get) if speedup >= WORTHWHILE else "compute-bound"
    spent = {
        "waiting": run_steps * waiting,
        "computing": run_steps * compute,
        "start-up": startup,
    }
    found = Diagnosis(
        verdict=verdict,
        shares={name: seconds / sum(spent.values()) for name, seconds in spent.items()},
        speedup=speedup,
        speedup_range=(low, high),
        waiting=waiting,
        compute=compute,
        at_hand=at_hand,
        load=alone * max(1, workers),
        startup=startup,
        num_workers=workers,
        prefetch_factor=prefetch,
        batch_bytes=sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(batch)),
        run_steps=run_steps,
        notes=[],
    )
    found.notes += doubts(found, alone, max(before, after))
    return found


def doubts(found: Diagnosis, alone: float, slowest: float) -> list[str]:
    """What a reader should know before relying on a diagnosis.

    `alone` is the seconds of a batch of the loader alone, `slowest` those of a step in the slower of the two
    runs with a cached batch.
    """
    notes = []
    low, high = found.speedup_range
    span = f"{low:.2f} to {high:.2f}"
    if high > WIDE * low:
        cause = "the machine was slower for a while, or the loader's period is longer than stated"
        notes.append(
            f"the speed-up varies, from {span}: {cause}; repeat the diagnosis, with more steps"
        )
    if low < WORTHWHILE <= high:
        notes.append(
            f"the range of {span} lies on both sides of {WORTHWHILE}: the verdict is not certain"
        )
    if slowest > CLEARLY * found.compute:
        pair = f"{ms(slowest)} with a cached batch, and {ms(found.compute)} beside the loader"
        notes.append(
            f"a step took {pair}: other programs used the cores; repeat the diagnosis"
        )
    elif found.compute > CLEARLY * found.at_hand and found.waiting >= found.slowdown:
        pair = f"{ms(found.compute)} beside the loader, and {ms(found.at_hand)} with a cached batch"
        notes.append(f"the loader also takes cores from the step, which takes {pair}")
    pace = found.waiting + found.compute
    if alone > CLEARLY * pace:
        pair = f"a batch every {ms(alone)} without the step, and every {ms(pace)} with it, later"
        cause = "the later run used a stock, or found in memory what the first had read"
        notes.append(
            f"the loader gave {pair}: {cause}; the training may wait longer, so measure more steps"
        )
    return notes


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def explain(found: Diagnosis) -> str:
    """The reason for a verdict, in words."""
    if found.verdict == "start-up-bound":
        return f"the first batch takes {found.startup:.2f} s longer than the others"
    if found.verdict == "compute-bound":
        pace = ms(found.waiting + found.compute)
        return f"a step takes {ms(found.at_hand)} with a cached batch, and {pace} with the loader"
    if found.waiting >= found.slowdown:
        return f"a step waits {ms(found.waiting)} for its batch, and then computes for {ms(found.compute)}"
    pair = f"{ms(found.compute)} beside the loader, and {ms(found.at_hand)} with a cached batch"
    return f"the loader takes cores from the step, which takes {pair}"


def report(found: Diagnosis, ranks: int = 1) -> int | None:
    """Print a diagnosis in words, and, if the training waits, how many workers to give it on this machine.

    `ranks` is the number of processes that train on this machine, each with workers of its own. Returns the
    number of workers for each of them, or None if more workers would hardly make the training faster.
    """
    print(f"\n{found.verdict}: {explain(found)}")
    alone = ms(found.load / max(1, found.num_workers))
    print(
        f"loader alone: a batch every {alone}; step with a cached batch: {ms(found.at_hand)}"
    )
    print(f"time of a run of {found.run_steps:,} steps")
    each = (
        f"{ms(found.waiting)} a step",
        f"{ms(found.compute)} a step",
        f"{found.startup:.2f} s, once",
    )
    for (name, share), seconds in zip(found.shares.items(), each):
        print(f"  {name:10}{share:7.1%}   {seconds}")
    low, high = found.speedup_range
    span = f"{low:.2f} to {high:.2f} in parts of the runs"
    print(
        f"best speed-up that work on data could give: {found.speedup:.2f} times ({span})"
    )
    for note in found.notes:
        print(f"note: {note}")
    if found.verdict != "data-bound" or found.shares["waiting"] < HARDLY:
        print("no more workers are needed: they would hardly make the training faster")
        return None
    return plan_here(found, ranks)


def plan_here(found: Diagnosis, ranks: int) -> int:
    """Print how many workers each rank needs on this machine, see `plan_workers`; return that number.

    A worker is assumed to need as much memory as this process has.
    """
    shm = Path("/dev/shm")
    room = {"memory": psutil.virtual_memory().available}
    room["shm"] = shutil.disk_usage(shm).free if shm.exists() else math.inf
    sizes = {
        "batch_bytes": found.batch_bytes,
        "worker_bytes": psutil.Process().memory_info().rss,
    }
    # A job may have only some of the machine's cores.
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    times = found.load, found.at_hand
    workers, _ = plan_workers(
        *times, cores, ranks, prefetch_factor=found.prefetch_factor, **sizes, **room
    )
    return workers


def plan_workers(
    t_load: float,
    t_step: float,
    cores: int,
    ranks: int = 1,
    batch_bytes: int = 0,
    prefetch_factor: int = 2,
    worker_bytes: int = 0,
    memory: float = math.inf,
    shm: float = math.inf,
) -> tuple[int, str]:
    """Print how many workers each rank needs and how many it can have; return the smaller number and its cause.

    `t_load` is the seconds that one worker takes for a batch, `t_step` those of a step. `cores` and `ranks` are
    the machine's. `batch_bytes` and `worker_bytes` are the sizes of a batch and of a worker without batches.
    `memory` and `shm` are the free bytes in memory and in /dev/shm, through which workers hand over batches.
    """
    sharers = f"{ranks} rank{'s' * (ranks > 1)}"
    ahead = f"{prefetch_factor} batches x {batch_bytes / 1e6:.2f} MB"
    sums = {
        "t_load / t_step": (
            f"{ms(t_load)} / {ms(t_step)}",
            math.ceil(round(t_load / t_step, 6)),
        )
    }
    sums["cores"] = f"{cores} cores / {sharers}", cores // ranks
    for name, room, own in (("memory", memory, worker_bytes), ("/dev/shm", shm, 0)):
        taken = ranks * (own + prefetch_factor * batch_bytes)
        if room < math.inf and taken:
            terms = f"({own / 1e6:.0f} MB + {ahead})" if own else f"({ahead})"
            sums[name] = (
                f"{room / 1e9:.1f} GB / ({sharers} x {terms})",
                int(room // taken),
            )
    binds, (_, workers) = min(sums.items(), key=lambda item: item[1][1])
    print("workers for each rank")
    for name, (terms, number) in sums.items():
        print(
            f"  {name:16}{terms} = {'needs' if name.startswith('t_') else 'at most'} {number:,}"
        )
    # Without workers the two times add up; with workers the longer one decides.
    pace = max(t_load / workers, t_step) if workers else t_load + t_step
    print(
        f"  {workers}, by {binds}: a step every {ms(pace)}; without any, {ms(t_load + t_step)}"
    )
    return workers, binds


# ------------------------------------------------------------------------------------ train.py's training


class OneByOne(Dataset):
    """Chapter 3's patches, read one after another: each read ends before the next one starts."""

    def __init__(self, patches: Dataset):
        self.patches = patches

    def __getitem__(self, index: tuple[int, int]) -> dict:
        return self.patches[index]


def diagnose_training(
    train: Any, args: argparse.Namespace, steps: int, naive: bool
) -> tuple[Diagnosis, DataLoader]:
    """Diagnose what the first device does in train.py's training, without Lightning's own work.

    Returns the diagnosis and the loader.
    """
    training, _, _ = train.make_patches(args)
    on_device = args.accelerator != "cpu" and torch.accelerator.is_available()
    device = (
        torch.accelerator.current_accelerator() if on_device else torch.device("cpu")
    )
    module = train.FillGaps(
        vars(args), training.std.flatten().tolist(), training.pools
    ).to(device)
    optimizer = module.configure_optimizers()["optimizer"]

    def step(batch: dict) -> None:
        batch = {name: values.to(device) for name, values in batch.items()}
        squares, unseen = train.masked_sums(module.model(batch["input"]), batch)
        optimizer.zero_grad()
        (squares / unseen).backward()
        optimizer.step()

    endless = argparse.Namespace(**vars(args) | {"max_steps": 10**6})
    ranks = args.devices * args.num_nodes
    if naive:  # most people's first loader; everything else is DataLoader's default
        samples = train.StepSampler(endless, 0, 0, ranks)
        method = args.start_method if args.num_workers else None
        options = {"num_workers": args.num_workers, "multiprocessing_context": method}
        loader = DataLoader(OneByOne(training), batch_sampler=samples, **options)
        period = 1
    else:  # all blocks that are mixed start together, and are used up together
        loader = train.make_loader(training, endless, world_size=ranks)
        visit = args.shuffle_blocks * args.patches_per_block
        period = args.accumulate * math.lcm(visit, args.batch_size) // args.batch_size
    return diagnose(
        loader, step, steps, args.max_steps * args.accumulate, period
    ), loader


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/diagnosis.json."""
    cpu = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results = {
        "command": " ".join(["uv run python diagnose.py", *flags]),
        "date": str(date.today()),
    }
    results["machine"] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "gpu": gpu,
    }
    results["versions"] = {
        name: version(name) for name in ("torch", "xarray", "zarr", "obstore")
    }
    path = Path(__file__).parent / "results/diagnosis.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results | {"rows": rows}) + "\n")


def main(argv: list[str] | None = None) -> list[dict]:
    """Diagnose the training that train.py would do with these flags; return a row for each loader."""
    import train  # not above: a copy of this file works without it

    summary = __doc__.splitlines()[0]
    usage = "diagnose.py [--steps N] [--naive] [any flags of train.py]"
    parser = argparse.ArgumentParser(
        usage=usage, description=summary, allow_abbrev=False
    )
    measured = "steps to measure, rounded up to whole waves of batches, at least two"
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"{measured} (default: {STEPS})"
    )
    parser.add_argument(
        "--naive",
        action="store_true",
        help="use a loader that reads one patch after another",
    )
    parser.add_argument(
        "--save-results",
        action="store_true",
        help="diagnose both loaders, and write results/diagnosis.json",
    )
    own, flags = parser.parse_known_args(argv)
    if own.steps < 1:
        train.refuse(f"--steps {own.steps}: give at least 1")
    args = train.parse_arguments(flags)
    loaders = (True, False) if own.save_results else (own.naive,)
    rows = []
    try:
        with train.served(args):
            for naive in loaders:
                found, loader = diagnose_training(train, args, own.steps, naive)
                rows.append({"loader": "naive" if naive else "final", **asdict(found)})
                print(
                    f"\n{rows[-1]['loader']} loader, {args.num_workers} workers", end=""
                )
                workers = report(found, args.devices)
                if (
                    workers
                    and not naive
                    and (note := train.note_on_workers(loader.dataset, workers))
                ):
                    print(note)
    except train.StoreError as error:
        train.refuse(
            f"--store {args.store}: {str(error).split('StoreError: ')[-1].strip()}"
        )
    if own.save_results:
        save(rows, [*flags, "--steps", str(own.steps), "--save-results"])
    return rows


if __name__ == "__main__":
    main()
