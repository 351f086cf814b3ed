"""Chapter 4: does a training wait for its data, why, and what would curing it buy at most?

    uv run python diagnose.py                            # train.py's training, with any flags of train.py
    uv run python diagnose.py --num-workers 2 --steps 100

Three runs tell: the real loader with the step, one cached batch with the step, the loader alone. You should
see a verdict, the shares of time, the best speed-up that work on data could give, and how many workers it takes.
For a training of your own, copy this file, which needs torch and tqdm only:

    from diagnose import diagnose, report
    report(diagnose(loader, step, transfer=lambda batch: batch.to("cuda")))
"""

import argparse
import math
import os
import resource
import shutil
import sys
from collections import UserDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import count, cycle, islice
from pathlib import Path
from statistics import mean
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

# object_store and train are imported in main(): whoever has copied this file for a loader of their own, and
# every worker process of such a loader, does without them.

STEPS, SECONDS = 40, 15  # to measure, unless told otherwise: so many steps, and each run so long at most
KEPT, KEPT_BYTES = 8, 2**26  # batches of run 1, or one, that run 2 takes in turn: they may differ in length
HARDLY = 0.03  # of a step: so little waiting is no concern
END = object()
AHEAD = "it had put batches by, and will be waited for: measure more steps, or give a larger warm_up"
VERDICTS = {"waiting for data": "data-bound", "transfer": "transfer-bound"}
VERDICTS |= {"compute": "compute-bound", "start-up": "start-up-bound"}


@dataclass
class Diagnosis:
    """What the three runs found; all times in seconds."""

    verdict: str  # one of VERDICTS
    shares: dict[str, float]  # of the planned run's time, by the keys of VERDICTS
    run_steps: int  # of the planned run
    skipped: int  # batches before the steady state
    steps: int  # measured in the steady state
    startup: float  # to the first batch
    waiting: float  # mean of a step
    transfer: float  # as those below, without hiccups: see typical()
    compute: float  # of a step beside the loader
    at_hand: float  # of a step with a batch at hand, on the device: run 2
    load: float  # that one worker takes for a batch: run 3
    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    notes: list[str]  # what a reader should know of how this was measured

    @property
    def now(self) -> float:
        """Seconds of a step of the real training."""
        return self.waiting + self.transfer + self.compute

    @property
    def speedup(self) -> float:
        """How many times faster a step can become, at most, by work on data alone (Amdahl's law)."""
        return self.now / self.at_hand

    @property
    def run_speedup(self) -> float:
        """The same of the whole run, with its start-up."""
        return (self.startup + self.run_steps * self.now) / (self.run_steps * self.at_hand)


class Cap(NamedTuple):
    """What bounds the number of workers: to how many, None if that is not known, and the sum that says so."""

    name: str
    workers: int | None
    sum: str


class Plan(NamedTuple):
    needed: int  # workers that keep up with the step
    workers: int  # of those, what the caps leave
    caps: list[Cap]
    binds: str  # the name of the cap that binds, or "t_load / t_step"
    step_seconds: float  # of a step with so many workers


# -------------------------------------------------------------------------------------------- the three runs


def synchronise() -> None:
    """Wait until the accelerator, if there is one, has done all it was given: only then may a clock be read."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def size_of(batch: Any, seen: set | None = None) -> int:
    """The bytes of all tensors and arrays in a batch, which may be a dict, a tuple, a list or a dataclass."""
    seen = set() if seen is None else seen
    if id(batch) in seen or isinstance(batch, type):
        return 0
    seen.add(id(batch))
    with suppress(AttributeError, RuntimeError):  # a sparse tensor does not say
        return int(batch.nbytes)
    if isinstance(batch, bytes | bytearray):
        return len(batch)
    if isinstance(batch, tuple | list):
        return sum(size_of(each, seen) for each in batch)
    parts = batch if isinstance(batch, dict) else getattr(batch, "__dict__", {})
    if is_dataclass(batch):  # its parts may lie in slots
        parts = {part.name: getattr(batch, part.name, None) for part in fields(batch)}
    return sum(size_of(each, seen) for each in parts.values())


def shallow(batch: Any) -> Any:
    """The same tensors in containers of their own: a step may pop what it has used."""
    if isinstance(batch, dict | UserDict):
        mine = copy(batch)
        for name, value in batch.items():
            mine[name] = shallow(value)
        return mine
    if isinstance(batch, list):
        mine = copy(batch)
        mine[:] = map(shallow, batch)
        return mine
    if hasattr(batch, "_make"):  # a namedtuple
        return batch._make(map(shallow, batch))
    return tuple(map(shallow, batch)) if type(batch) is tuple else batch


def typical(seconds: list[float]) -> float:
    """The mean, without hiccups: the longest, a tenth at most, or one, that take three times as long as any other.

    What is slow more often than every tenth time, as where gradients are accumulated, counts in full; a median
    would miss it.
    """
    order = sorted(seconds)
    for usual in range(len(order) - max(1, len(order) // 10), len(order)):
        if 1 < usual and order[usual] > 3 * order[usual - 1]:
            return mean(order[:usual])
    return mean(order)


def draw(
    loader: Iterable, most: int, seconds: float, title: str, work: Callable | None = None, keep: int = 0
) -> tuple[list, list, list]:
    """Take up to `most` batches and work on each, or until so many seconds after the first have gone by.

    Returns the seconds for which each batch was waited for, those of work, and the first batches, `keep` of
    them at most. The first wait is the time to the first batch: it includes the start of the workers, who have
    ended when this returns.
    """
    waits, works, cached = [], [], []
    bar = tqdm(total=most, desc=title, leave=False, disable=None)
    asked, end = perf_counter(), math.inf
    batches = iter(loader)
    while len(waits) < most and asked < end and (batch := next(batches, END)) is not END:
        given = perf_counter()
        waits.append(given - asked)
        if len(cached) < keep and (not cached or size_of([*cached, batch]) <= KEPT_BYTES):
            cached.append(shallow(batch))
        if work:
            work(batch)
            synchronise()
            works.append(perf_counter() - given)
        del batch  # unless it is kept, before the next is asked for
        bar.update()
        asked = perf_counter()
        end = min(end, asked + seconds)
    bar.close()
    return waits, works, cached


def repeat(
    action: Callable, batches: list, times: int, seconds: float, title: str, prepare: Callable | None = None
) -> list[float]:
    """What an action takes on batches, one after another, so many times or until the seconds are over.

    The clock does not run while `prepare` brings a batch to the device.
    """
    took = []
    for batch in tqdm(islice(cycle(batches), times), title, times, leave=False, disable=None):
        mine = shallow(batch)
        mine = prepare(mine) if prepare else mine
        synchronise()
        began = perf_counter()
        action(mine)
        synchronise()
        took.append(perf_counter() - began)
        if sum(took) > seconds:
            break
    return took


def steady(received: int, stock: int, workers: int) -> slice:
    """Which of the batches received show the steady state.

    While the first batch and step take their time, workers put up to `stock` batches by: those are not
    waited for, and say nothing of the rate. Batches of w workers come in waves of w: count whole waves.
    """
    skipped = min(stock, received // 2)
    left = received - skipped
    return slice(skipped, received - (left % workers if left > workers > 0 else 0))


def diagnose(
    loader: Iterable,
    step: Callable[[Any], Any],
    *,
    transfer: Callable[[Any], Any] | None = None,
    steps: int = STEPS,
    seconds: float = SECONDS,
    run_steps: int | None = None,
    warm_up: int = 1,
) -> Diagnosis:
    """Say whether a training waits for its data, and what that costs.

    `loader` is any iterable of batches. `step` trains on a batch that `transfer`, if there is one, has brought
    to the device: both are called some hundred times, so give a model that you can spare. Each of the runs
    measures so many `steps`, or what it can in so many `seconds`. `run_steps` is the length of the run that you
    plan; without it, the loader's, or else the steps measured. `warm_up` is how many batches the loader takes
    to come to its pace, if it reads ahead; what its workers have put by is left out anyway. A loader that pauses
    seldom, after a shard, shows it only if `steps` are more than it gives between two pauses. ValueError if there
    are less than two batches.

    The device is waited for after every step, as a loop does that prints its loss. A loop that does not may
    hide a part of the waiting behind the device's work: then the speed-up found is more than can be had.
    """
    if steps < 1 or (run_steps is not None and run_steps < 1):
        raise ValueError(f"{steps} steps of a run of {run_steps}: give at least 1")
    inner = loader if hasattr(loader, "num_workers") else getattr(loader, "loader", loader)  # in a wrapper
    workers, prefetch = (getattr(inner, name, None) for name in ("num_workers", "prefetch_factor"))
    workers, prefetch = max(0, workers or 0), prefetch or 2
    stock, notes = max(1, warm_up, workers * prefetch), []

    def train(batch: Any) -> None:
        step(transfer(batch) if transfer else batch)

    waits, works, cached = draw(loader, stock + steps, seconds, "1: loader and step", train, KEPT)
    if len(waits) < 2:
        raise ValueError(f"the loader gave {len(waits) or 'no'} batch: it takes 2 at least, better {steps}")
    window = steady(len(waits), stock, workers)
    measured = window.stop - window.start
    if len(waits) < stock + steps:
        limit = f" in {seconds:g} s" if sum(waits[1:] + works[1:]) >= seconds else ""
        told = f"no more than {len(waits)} batches came{limit}"
        notes.append(f"{told}: {measured} steps are measured, not {steps}")

    moving = typical(repeat(transfer, cached, measured, seconds, "2: transfer")) if transfer else 0.0
    at_hand = typical(repeat(step, cached, measured, seconds, "2: step", transfer))

    alone = "no batch was left for the run of the loader alone"
    try:
        gaps, _, _ = draw(loader, stock + steps, seconds, "3: loader alone")
    except Exception as error:  # it gives its batches once, or the network has gone: what is measured stands
        said = str(error).strip().splitlines()[-1:]  # a worker's error comes with its traceback
        alone = f"the run of the loader alone has failed ({': '.join([type(error).__name__, *said])})"
        gaps = []
    if len(gaps) < 2:  # then run 1 is all that tells; workers may have been faster than it took
        notes.append(f"{alone}: its time is that {'between two steps' if workers else 'of the waiting'}")
        gaps = [wait + work * (workers > 0) for wait, work in zip(waits, works)]
    batch_seconds = mean(gaps[steady(len(gaps), stock, workers)])

    # Batches come in waves or blocks, and most are not waited for at all: the median of the waiting would be
    # zero. What a step takes is its work, and hiccups are the machine's.
    waiting, working, average = mean(waits[window]), typical(works[window]), mean(works[window])
    # Both are parts of what run 1 took: whatever the clock says, they cannot be more.
    moving, at_hand = min(moving, max(0.0, working - at_hand)), min(at_hand, working)
    if working - moving > 1.15 * at_hand:
        slow = f"beside the loader a step computes {ms(working - moving)}, with a batch at hand {ms(at_hand)}"
        notes.append(f"{slow}: the loader, or another program, takes its cores")
    if batch_seconds > 1.3 * (waiting + average):
        ahead = f"steps came every {ms(waiting + average)}, and alone the loader gives a batch every {ms(batch_seconds)}"
        notes.append(f"{ahead}: {AHEAD}")
    if run_steps is None:
        try:
            run_steps = max(1, len(loader))
        except Exception:  # it has no length, or says so in its own way
            run_steps = measured
    # Shares are of totals, for the time that hiccups take is lost, too. The verdict is of typical steps: one
    # hiccup among a few steps must not decide what is to be cured.
    lost = {"waiting for data": run_steps * waiting, "transfer": run_steps * moving}
    total = lost | {"compute": run_steps * max(0.0, average - moving), "start-up": waits[0]}
    expected = total | {"compute": run_steps * (working - moving)}
    return Diagnosis(
        verdict=VERDICTS[max(expected, key=expected.get)],
        shares={name: seconds / sum(total.values()) for name, seconds in total.items()},
        run_steps=run_steps,
        skipped=window.start,
        steps=measured,
        startup=waits[0],
        waiting=waiting,
        transfer=moving,
        compute=working - moving,
        at_hand=at_hand,
        load=max(1, workers) * batch_seconds,
        num_workers=workers,
        prefetch_factor=prefetch,
        batch_bytes=max(map(size_of, cached)),
        notes=notes,
    )


# -------------------------------------------------------------------------------- the arithmetic for workers


def plan_workers(
    t_load: float,
    t_step: float,
    *,
    cores: int,
    ranks: int = 1,
    batch_bytes: int = 0,
    prefetch_factor: int = 2,
    worker_bytes: int = 0,
    memory: int | None = None,
    shm: int | None = None,
    bytes_read: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Say how many workers each rank needs, and may have: workers >= t_load / t_step, below every cap.

    `t_load` and `t_step` are the seconds that one worker takes for a batch, and the training for a step.
    Cores, bytes of memory and /dev/shm that are free, and bandwidth (bytes/s) are those of the machine,
    `bytes_read` is what a batch takes from the store. None: not known, and no cap. A worker takes `worker_bytes`
    of memory for itself.
    """
    needed = math.ceil(t_load / t_step - 1e-9)  # else 0.9 / 0.3 is 4
    sharers = f"{ranks} rank{'s' * (ranks > 1)}"
    caps = [Cap("cores", cores // ranks, f"{cores} cores / {sharers}")]
    ready = f"{prefetch_factor} batches ahead x {mb(batch_bytes)}"
    for name, room, own in (("memory", memory, worker_bytes), ("/dev/shm", shm, 0)):
        each = own + prefetch_factor * batch_bytes  # of a worker, with what it has ready
        if room is None or not each:
            caps.append(Cap(name, None, "not known here"))
        else:
            taken = f"({mb(own)} of its own + {ready})" if own else ready
            caps.append(Cap(name, room // (ranks * each), f"{mb(room)} free / ({sharers} x {taken})"))
    if bandwidth and bytes_read:
        # More workers than this ask for more than comes.
        rate = f"{mb(bandwidth)}/s x {ms(t_load)} / ({sharers} x {mb(bytes_read)})"
        caps.append(Cap("bandwidth", math.ceil(bandwidth * t_load / (ranks * bytes_read) - 1e-9), rate))
    else:
        caps.append(Cap("bandwidth", None, "not known here"))
    lowest = min((cap for cap in caps if cap.workers is not None), key=lambda cap: cap.workers)
    workers, binds = min((needed, "t_load / t_step"), (lowest.workers, lowest.name), key=lambda pair: pair[0])
    arrival = ranks * bytes_read / bandwidth if bandwidth and bytes_read else 0.0
    pace = max(t_step, t_load / workers, arrival) if workers else t_load + t_step
    return Plan(needed, workers, caps, binds, pace)


def free_memory() -> int | None:
    """Bytes that new processes may take, in a container no more than its limit; None if the system does not say."""
    facts, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not facts.exists():
        return None
    free = 1024 * int(facts.read_text().partition("MemAvailable:")[2].split()[0])
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        used = int((group / "memory.current").read_text())
        files = int((group / "memory.stat").read_text().partition("inactive_file ")[2].split()[0])
        free = min(free, max(0, int(limit) - used + files))  # cached files make room
    return free


def peak_memory() -> int:
    """Bytes of memory that this process has had at most."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plan_here(
    found: Diagnosis, ranks: int = 1, bytes_read: float | None = None, bandwidth: float | None = None
) -> Plan:
    """Plan the workers of each of so many ranks on this machine, which has a loader and a step as diagnosed."""
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)  # not on macOS
    return plan_workers(
        found.load,
        found.transfer + found.at_hand,
        cores=len(allowed),
        ranks=ranks,
        batch_bytes=found.batch_bytes,
        prefetch_factor=found.prefetch_factor,
        worker_bytes=peak_memory(),  # it is a process like this one
        memory=free_memory(),
        shm=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None,
        bytes_read=bytes_read,
        bandwidth=bandwidth,
    )


# ------------------------------------------------------------------------------------------------- the report


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def mb(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def reason(found: Diagnosis) -> str:
    """Why the verdict is what it is."""
    batch_seconds = found.load / max(1, found.num_workers)
    if found.verdict == "start-up-bound":
        steps = f"{found.startup / found.now:.0f} steps"
        return f"the first batch takes {found.startup:.2f} s, as long as {steps}"
    if found.verdict == "transfer-bound":
        return f"a batch of {mb(found.batch_bytes)} takes {ms(found.transfer)} to the device"
    if found.verdict == "compute-bound":
        return f"the step takes most of the time; a batch keeps it waiting for {ms(found.waiting)} on average"
    covered = batch_seconds - found.waiting  # a loader that reads ahead in a thread does so during a step
    if not found.num_workers and covered < found.at_hand / 2 and found.at_hand > batch_seconds / 10:
        return f"without workers nobody loads during a step, and a batch takes {ms(batch_seconds)}"
    if batch_seconds > found.at_hand:
        rate = f"alone, the loader gives a batch every {ms(batch_seconds)}"
        return f"{rate}, and the step takes {ms(found.at_hand)}"
    return f"alone, the loader would keep up ({ms(batch_seconds)} a batch); beside the step, it does not"


def report(found: Diagnosis, plan: Plan | None = None) -> None:
    """Print what a reader wants to know of a training, in words; without a plan, make one for this machine."""
    plan = plan or plan_here(found)
    print(f"\n{found.verdict}: {reason(found)}")
    print(f"time of a run of {found.run_steps:,} steps ({found.steps} measured)")
    of_a_step = {"waiting for data": found.waiting, "transfer": found.transfer, "compute": found.compute}
    for name, share in found.shares.items():
        each = f"{ms(of_a_step[name])} a step" if name in of_a_step else f"{found.startup:.2f} s, once"
        print(f"  {name:18}{share:6.1%}   {each}")
    steps = f"{ms(found.now)} a step now, {ms(found.at_hand)} with a batch at hand"
    print(f"best speed-up that work on data could give: {found.speedup:.2f} times ({steps})")
    print(f"  of the whole run, with its start-up: {found.run_speedup:.2f} times")
    t_step = found.transfer + found.at_hand
    ratio = f"{ms(found.load)} / {ms(t_step)} = {found.load / t_step:.2f}"
    print(f"workers for each rank, now {found.num_workers}: t_load / t_step = {ratio}, so {plan.needed}")
    for cap in plan.caps:
        print(f"  {cap.name:10} {cap.sum}" + ("" if cap.workers is None else f" = at most {cap.workers:,}"))
    paces = f"{ms(plan.step_seconds)} a step, {found.now / plan.step_seconds:.2f} times as fast as now"
    if any(AHEAD in note for note in found.notes):
        print("  how many are needed is not known: see the note")
    elif found.waiting < HARDLY * found.now:
        print(f"  {'no more are' if found.num_workers else 'none is'} needed: the training hardly waits")
    else:
        print(f"  what binds: {plan.binds}. With {plan.workers}, if they scale: {paces}")
    for note in found.notes:
        print(f"note: {note}")


# ------------------------------------------------------------------------------------------- the command line


def wind_step(model: torch.nn.Module, accumulate: int) -> Callable[[dict], None]:
    """What train.py does with a micro-batch on its device, and with the optimizer when it has enough of them.

    What Lightning's Trainer does around it, some milliseconds a step, is left out.
    """
    optimizer, calls = model.configure_optimizers()["optimizer"], count(1)

    def step(batch: dict) -> None:
        loss = model.training_step(model.on_after_batch_transfer(batch, 0), 0)
        _, unseen = model.means.pop()
        (loss / unseen).backward()
        if next(calls) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def parse_own(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's own flags, and the others, which are train.py's; InputError for a value that is bad."""
    from object_store import InputError, Parser

    usage = "diagnose.py [-h] [--steps N] [--bandwidth MB/S] [any flags of train.py]"
    parser = Parser(usage=usage, description=__doc__.splitlines()[0], add_help=False, allow_abbrev=False)
    about = f"to measure (default: {STEPS}, and no longer than {SECONDS} s a run)"
    parser.add_argument("--steps", type=int, metavar="N", default=STEPS, help=about)
    about = "megabytes/s that this machine's network or disk gives; without it, no cap on workers"
    parser.add_argument("--bandwidth", type=float, metavar="MB/S", help=about)
    own, others = parser.parse_known_args(argv)
    for name, value in vars(own).items():
        if value is not None and not value > 0:
            raise InputError(f"--{name} {value}: too small; give more than 0")
        if value == math.inf:
            raise InputError(f"--{name} {value}: too large; without the flag there is no cap")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError("torchrun: this program measures one rank; start it without, and give --devices N")
    if {"-h", "--help"} & {*others}:
        parser.print_help()
        print("\nThe flags of train.py:\n")
    return own, others


def main(argv: list[str] | None = None) -> dict:
    """Diagnose the training that train.py would do with these flags; return the figures (times in seconds)."""
    own, others = parse_own(sys.argv[1:] if argv is None else argv)
    from train import STORE, WindData, WindFill, parse_arguments, serve_example

    args = parse_arguments(others)
    ranks, server, data = args.devices * args.num_nodes, None, None
    try:
        if args.store == STORE:
            server = serve_example()
            args.anonymous |= "EXAMPLE_SERVER" in os.environ
        data = WindData(args)
        on_device = args.accelerator != "cpu" and torch.accelerator.is_available()
        device = torch.accelerator.current_accelerator() if on_device else None
        model = WindFill(data.configuration, data.training.mean.tolist(), data.training.std.tolist())
        model.to(device or "cpu")
        data.trainer = SimpleNamespace(global_step=data.start, global_rank=0, world_size=ranks)
        run_steps = (args.max_steps - data.start) * args.accumulate
        args.max_steps = 10**9  # where the sampler ends: there shall be batches enough to measure
        loader = data.train_dataloader()

        def transfer(batch: dict) -> dict:
            return model.transfer_batch_to_device(batch, device, 0)  # as Lightning's Trainer does it

        samples = getattr(data.training, "period", 0)  # of blocks: until each lane reads another
        period = math.ceil(samples / args.batch_size) * args.accumulate
        found = diagnose(
            loader,
            wind_step(model, args.accumulate),
            transfer=transfer if device else None,
            steps=own.steps,
            run_steps=max(1, run_steps),
            warm_up=min(period, own.steps),
        )
    finally:
        close_all(data, server)
    if period > found.steps:
        found.notes.append(f"all blocks are new after {period} batches: to see that, give --steps {period}")
    if args.cache_dir:
        found.notes.append(
            "run 3 found in --cache-dir what run 1 had read: a batch may take longer than it says"
        )
    if ranks > 1:
        found.notes.append(f"one of {ranks} ranks was measured, alone; together they share what there is")
    logs = list(loader.requests)[found.skipped : found.skipped + found.steps]  # of run 1
    read = sum(log[log[:, 3] == 0, 1].sum() for log in logs) / found.steps  # what is cached is not read
    bandwidth = own.bandwidth and 1e6 * own.bandwidth
    plan = plan_here(found, args.devices, float(read), bandwidth)
    parts = data.training.parts(ranks, args.accumulate) if args.shuffle_blocks else 0
    if plan.workers and parts % plan.workers:
        found.notes.append(f"workers that share the blocks: {parts}, or a divisor of it")
    report(found, plan)
    figures = {"now": found.now, "speedup": found.speedup, "run_speedup": found.run_speedup}
    figures |= {"bytes_read": float(read), "plan": plan._asdict()}
    return asdict(found) | figures


def close_all(data: Any, server: Any) -> None:
    """Stop what reads ahead, then the server that it reads from; a later call of main() starts another."""
    if hasattr(data, "training"):
        data.training.close()
    if server:
        with server:  # it ends when its input does
            server.stdin.close()
        for name in ("EXAMPLE_SERVER", "AWS_ENDPOINT_URL"):
            os.environ.pop(name, None)


if __name__ == "__main__":
    try:
        from object_store import InputError
    except ModuleNotFoundError as error:
        if error.name != "object_store":
            raise
        reason = "alone, it is no program; in yours, from diagnose import diagnose, report"
        print(f"{Path(__file__).name}: error: {reason}", file=sys.stderr)
        sys.exit(2)
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        sys.exit(f"{Path(__file__).name}: error: {str(error).splitlines()[0]}")
    except KeyboardInterrupt:
        sys.exit("\nstopped")
