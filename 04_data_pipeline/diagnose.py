"""Chapter 4: does a training wait for its data, why, and what would curing it buy at most?

    uv run python diagnose.py                        # train.py's training, with any flags of train.py
    uv run python diagnose.py --naive                # with a loader that reads one patch after another

Three runs tell: the real loader with the step, one cached batch with the step, the loader alone. You should
see a verdict, the shares of time, the best speed-up that work on data could give, and the sum for workers.
For a training of your own copy this file, which then needs torch and tqdm only:

    from diagnose import diagnose, report
    report(diagnose(loader, step, run_steps=10_000))
"""

import argparse
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import islice, repeat
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

STEPS = 32  # to measure
HARDLY = 0.03  # of the time: so little waiting is no concern


@dataclass
class Diagnosis:
    """What the three runs found; times are seconds, of a step or a batch unless said otherwise."""

    verdict: str  # data-bound, compute-bound or start-up-bound
    shares: dict[str, float]  # of the planned run's time: waiting, computing, start-up
    speedup: float  # of the planned run, if data cost nothing
    waiting: float
    compute: float  # beside the loader: run 1
    at_hand: float  # the same with a batch at hand: run 2
    load: float  # that one worker takes for a batch if each has a core: run 3
    startup: float  # once: what the first batch takes longer than others
    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    run_steps: int
    notes: list[str]


def take(batches: Iterable, steps: int, title: str, step: Callable | None = None) -> tuple[list, list, Any]:
    """Take up to so many batches. Returns the seconds each was waited for, those of the step, and the last."""
    waits, works, batch, asked = [], [], None, perf_counter()
    for batch in tqdm(islice(batches, steps), title, steps, leave=False, disable=None):
        given = perf_counter()
        if step:
            step(batch)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # the clock is to show when it was done, not when it was told
        waits.append(given - asked)
        asked = perf_counter()
        works.append(asked - given)
    return waits, works, batch


def diagnose(
    loader: Iterable, step: Callable, steps: int = STEPS, run_steps: int = 1000, period: int = 1
) -> Diagnosis:
    """Say whether a training waits for its data, and what that costs a run of `run_steps` steps.

    `loader` gives batches, anew each time it is begun. `step` does all that is done with one: moves it to the
    device, computes, updates; it is called some hundred times, so give it a model that you can spare. Give
    `period` if the loader reads blocks: after how many steps its work repeats. At least `steps` steps are
    measured. ValueError if the loader has too few batches.

    The device is waited for after every step. A loop that does not may hide some waiting behind its work.
    """
    workers, prefetch = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", None) or 2
    # The first batches come from what workers put by while the first one and the first step took their time:
    # nobody waits for those. After them, batches come in waves, of a batch from each worker, or of blocks: a
    # period's are in use, and each worker has put by another's.
    wave = math.lcm(max(1, workers), period)
    warm_up = max(5, 2 * workers * prefetch, (1 + max(1, workers)) * period)
    asked = warm_up + math.ceil(steps / wave) * wave
    waits, works, batch = take(loader, asked, "1: loader and step", step)
    if len(waits) < asked:
        raise ValueError(
            f"the loader has {len(waits)} batches: give one that has {asked}, or ask for less steps"
        )
    waiting, compute = mean(waits[warm_up:]), mean(works[warm_up:])
    _, at_hands, _ = take(repeat(batch), asked - warm_up, "2: a batch at hand", step)
    at_hand = min(compute, mean(at_hands))  # without the loader's work it cannot take longer, but for noise
    gaps, _, _ = take(loader, asked, "3: loader alone")
    if len(gaps) < asked:
        raise ValueError("the loader gives its batches once: give one that begins anew")
    alone = mean(gaps[warm_up:])

    startup, notes = max(0.0, waits[0] - waiting), []
    lost = {"waiting": run_steps * waiting, "computing": run_steps * compute, "start-up": startup}
    # What takes longest by itself is the bottleneck. Shares do not say: where workers load during the step,
    # the slower of the two sets the pace, and the other is hidden behind it.
    by_itself = {"data-bound": run_steps * alone, "compute-bound": run_steps * at_hand}
    by_itself["start-up-bound"] = startup
    if compute > 1.15 * at_hand:
        slow = f"a step computes {ms(compute)} beside the loader, and {ms(at_hand)} with a batch at hand"
        notes.append(f"{slow}: the loader, or another program, takes its cores")
    if alone > 1.15 * (waiting + compute):
        pace = f"a step came every {ms(waiting + compute)}, a batch from the loader alone every {ms(alone)}"
        notes.append(f"{pace}: there was a stock, and the waiting is still to come; measure more steps")
    return Diagnosis(
        verdict=max(by_itself, key=by_itself.get),
        shares={name: seconds / sum(lost.values()) for name, seconds in lost.items()},
        speedup=sum(lost.values()) / (run_steps * at_hand),
        waiting=waiting,
        compute=compute,
        at_hand=at_hand,
        load=alone * max(1, workers),
        startup=startup,
        num_workers=workers,
        prefetch_factor=prefetch,
        batch_bytes=sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(batch)),
        run_steps=run_steps,
        notes=notes,
    )


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def report(found: Diagnosis) -> None:
    """Print a diagnosis in words."""
    batch, step = ms(found.load / max(1, found.num_workers)), ms(found.at_hand)
    reason = f"by itself the loader gives a batch every {batch}, and the step takes {step}"
    if not found.num_workers:
        reason += "; without workers the two may add up"
    if found.verdict == "start-up-bound":
        reason = f"the first batch takes {found.startup:.2f} s longer than others"
    print(f"\n{found.verdict}: {reason}\ntime of a run of {found.run_steps:,} steps")
    each = f"{ms(found.waiting)} a step", f"{ms(found.compute)} a step", f"{found.startup:.2f} s, once"
    for (name, share), seconds in zip(found.shares.items(), each):
        print(f"  {name:10}{share:7.1%}   {seconds}")
    print(f"best speed-up that work on data could give: {found.speedup:.2f} times")
    for note in found.notes:
        print(f"note: {note}")


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
    """Print how many workers each of the machine's ranks needs, and may have; return that, and what binds.

    Seconds that one worker takes for a batch and the training for a step; the machine's cores; bytes of a
    batch, of a worker by itself, and those free in memory and in /dev/shm, through which batches are handed over.
    """
    sharers = f"{ranks} rank{'s' * (ranks > 1)}"
    ahead = f"{prefetch_factor} batches x {batch_bytes / 1e6:.2f} MB"
    sums = {"t_load / t_step": (f"{ms(t_load)} / {ms(t_step)}", math.ceil(round(t_load / t_step, 6)))}
    sums["cores"] = f"{cores} cores / {sharers}", cores // ranks
    for name, room, own in (("memory", memory, worker_bytes), ("/dev/shm", shm, 0)):
        taken = ranks * (own + prefetch_factor * batch_bytes)
        if room < math.inf and taken:
            terms = f"({own / 1e6:.0f} MB + {ahead})" if own else f"({ahead})"
            sums[name] = f"{room / 1e9:.1f} GB / ({sharers} x {terms})", int(room // taken)
    binds, (_, workers) = min(sums.items(), key=lambda item: item[1][1])
    print("workers for each rank")
    for name, (terms, number) in sums.items():
        print(f"  {name:16}{terms} = {'needs' if name.startswith('t_') else 'at most'} {number:,}")
    # Without workers the times add; with them the slower of the two decides.
    pace = max(t_load / workers, t_step) if workers else t_load + t_step
    print(f"  {workers}, by {binds}: a step every {ms(pace)}; without any, {ms(t_load + t_step)}")
    return workers, binds


# ------------------------------------------------------------------------------------ train.py's training


class OneByOne(Dataset):
    """Chapter 3's patches, each read when it is asked for, and waited for before the next."""

    def __init__(self, patches: Dataset):
        self.patches = patches

    def __getitem__(self, index: tuple[int, int]) -> dict:
        return self.patches[index]


def diagnose_training(train: Any, args: argparse.Namespace, steps: int, naive: bool) -> Diagnosis:
    """Diagnose what the first device does in train.py's training, without what Lightning does around it."""
    training, _, _ = train.make_patches(args)
    on_device = args.accelerator != "cpu" and torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_device else torch.device("cpu")
    module = train.FillGaps(vars(args), training.std.flatten().tolist(), training.pools).to(device)
    optimizer = module.configure_optimizers()["optimizer"]

    def step(batch: dict) -> None:
        batch = {name: values.to(device) for name, values in batch.items()}
        squares, unseen = train.masked_sums(module.model(batch["input"]), batch)
        optimizer.zero_grad()
        (squares / unseen).backward()
        optimizer.step()

    endless, ranks = argparse.Namespace(**vars(args) | {"max_steps": 10**6}), args.devices * args.num_nodes
    if naive:  # what most people write first; the rest is left to DataLoader's defaults
        samples, start = train.StepSampler(endless, 0, 0, ranks), {"num_workers": args.num_workers}
        start |= {"multiprocessing_context": args.start_method} if args.num_workers else {}
        loader, period = DataLoader(OneByOne(training), batch_sampler=samples, **start), 1
    else:  # lanes begin their blocks together: after so many steps all have used theirs up
        loader = train.make_loader(training, endless, world_size=ranks)
        visit = args.shuffle_blocks * args.patches_per_block
        period = args.accumulate * math.lcm(visit, args.batch_size) // args.batch_size
    return diagnose(loader, step, steps, args.max_steps * args.accumulate, period)


def plan_here(found: Diagnosis, ranks: int) -> None:
    """Print the sum for this machine; a worker's own memory is taken to be this process's."""
    import psutil  # which a copy of this file does without

    memory, shm = psutil.virtual_memory().available, Path("/dev/shm")
    sizes = {"batch_bytes": found.batch_bytes, "worker_bytes": psutil.Process().memory_info().rss}
    sizes |= {"memory": memory, "shm": shutil.disk_usage(shm).free if shm.exists() else math.inf}
    own = hasattr(os, "sched_getaffinity")  # where a job has some of a node's cores, count those
    cores = len(os.sched_getaffinity(0)) if own else os.cpu_count()
    plan_workers(found.load, found.at_hand, cores, ranks, prefetch_factor=found.prefetch_factor, **sizes)


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/diagnosis.json."""
    import psutil

    cpu, facts = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results = {"command": " ".join(["uv run python diagnose.py", *flags]), "date": str(date.today())}
    results["machine"] = {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": memory, "gpu": gpu}
    results["versions"] = {name: version(name) for name in ("torch", "xarray", "zarr", "obstore")}
    path = Path(__file__).parent / "results/diagnosis.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results | {"rows": rows}) + "\n")


def main(argv: list[str] | None = None) -> list[dict]:
    """Diagnose the training that train.py would do with these flags; return a row for each loader."""
    import train  # which a copy of this file does without

    summary, usage = __doc__.splitlines()[0], "diagnose.py [--steps N] [--naive] [any flags of train.py]"
    parser = argparse.ArgumentParser(usage=usage, description=summary, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"to measure, at least (default: {STEPS})")
    parser.add_argument("--naive", action="store_true", help="a loader that reads one patch after another")
    parser.add_argument("--save-results", action="store_true", help="of both, as results/diagnosis.json")
    own, flags = parser.parse_known_args(argv)
    if own.steps < 1:
        train.refuse(f"--steps {own.steps}: give at least 1")
    args, rows = train.parse_arguments(flags), []
    try:
        with train.served(args):
            for naive in (True, False) if own.save_results else (own.naive,):
                found = diagnose_training(train, args, own.steps, naive)
                rows.append({"loader": "naive" if naive else "final", **asdict(found)})
                print(f"\n{rows[-1]['loader']} loader, {args.num_workers} workers", end="")
                report(found)
                if found.shares["waiting"] < HARDLY:
                    print("no more workers are needed: the training hardly waits")
                else:
                    plan_here(found, args.devices)
    except train.StoreError as error:
        train.refuse(f"--store {args.store}: {str(error).split('StoreError: ')[-1].strip()}")
    if own.save_results:
        save(rows, [*flags, "--steps", str(own.steps), "--save-results"])
    return rows


if __name__ == "__main__":
    main()
