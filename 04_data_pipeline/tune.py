"""Chapter 4: try the loader's flags on this machine, and print those to train with, and why.

    uv run python tune.py                                # for train.py's training, with any flags of train.py
    uv run python tune.py --shuffle-blocks 0 --seconds 300
    uv run python tune.py --also-shuffle                 # and flags that decide which samples there are

One flag is changed at a time, in turn with the best so far, and kept if a step takes less by more than the trials
scatter. You should see a table of what was tried, and a command. Flags that change the result, --shuffle-blocks
and --patches-per-map, are left as they are unless --also-shuffle is given.
"""

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace

import torch
from diagnose import close_all, draw, free_memory, ms, peak_memory, plan_workers, repeat, size_of, wind_step

# object_store and train are imported in main(): worker processes, which import this file, start without them.

SECONDS, ROUNDS, STEPS = 120, 2, 60  # for all; trials of each value; steps of a trial, about
GAIN = 0.05  # of a step, that a value must save to be kept, or the scatter of the trials if that is more
ENOUGH, MARGIN = (
    0.03,
    1.25,
)  # a share of waiting that is no concern, if workers are faster than steps by so much
LIMIT = "the step is the limit: the loader keeps up with it, and more buys nothing"
OTHERS = "THE SAMPLES ARE OTHERS, and so will be the result"


@dataclass
class Trials:
    """What some trials of the same flags found, in seconds."""

    flags: dict
    steps: list[float] = field(default_factory=list)  # of a step, with its waiting
    waits: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)  # that the loader takes for a batch if nobody trains
    parts: int = 0  # into which the blocks fall: so many workers can share them, or a divisor of it; 0: any

    @property
    def step(self) -> float:
        return median(self.steps)

    @property
    def wait_share(self) -> float:
        return median(self.waits) / self.step

    @property
    def scatter(self) -> float:
        """Of the latest trials, with which another value's took turns."""
        latest = self.steps[-ROUNDS:]
        return (max(latest) - min(latest)) / self.step


class Tuner:
    """The training that train.py would do with some flags, and trials of it with others."""

    def __init__(self, args: argparse.Namespace, seconds: float):
        self.args, self.end, self.each = args, perf_counter() + seconds, seconds / 100
        self.ranks = args.devices * args.num_nodes
        on_device = args.accelerator != "cpu" and torch.accelerator.is_available()
        self.device = torch.accelerator.current_accelerator() if on_device else None
        self.model, self.given = None, Trials({})
        self.tried = [self.given]

    def open(self, flags: dict) -> tuple:
        """The data of train.py with some flags changed, and its loader, which here has no end."""
        from train import WindData, WindFill

        args = copy(self.args)
        vars(args).update(flags)
        data = WindData(args)
        data.trainer = SimpleNamespace(global_step=0, global_rank=0, world_size=self.ranks)
        args.max_steps = 10**9  # where the sampler ends
        if not self.model:
            scale = [each.tolist() for each in (data.training.mean, data.training.std)]
            self.model = WindFill(data.configuration, *scale).to(self.device or "cpu")
            self.work = wind_step(self.model, args.accumulate)
        return data, data.train_dataloader()

    def step(self, batch: dict) -> None:
        self.work(self.model.transfer_batch_to_device(batch, self.device, 0) if self.device else batch)

    def parts_of(self, data: object) -> int:
        blocks = data.args.shuffle_blocks
        return data.training.parts(self.ranks, self.args.accumulate) if blocks else 0

    def measure_step(self) -> None:
        """What a step takes with a batch at hand, and how large a batch, and what is held of blocks, are."""
        data, loader = self.open({})
        _, _, batches = draw(loader, 1, math.inf, "a first batch", keep=1)
        self.t_step = median(repeat(self.step, batches, STEPS, 4 * self.each, "the step alone"))
        self.batch_bytes, self.blocks_bytes = size_of(batches), getattr(data.training, "memory_bytes", 0)
        self.given.parts = self.parts_of(data)
        self.args.patches_per_map = data.args.patches_per_map  # by the grid, if it was not given
        close_all(data, None)

    def try_once(self, trials: Trials) -> None:
        """Take batches as fast as they come, then train; what the loader had put by before is left out."""
        title = flags_of(trials.flags) or "as given"
        data, loader = self.open(trials.flags)
        batches, workers = iter(loader), max(1, loader.loader.num_workers)
        samples = getattr(data.training, "period", 1)  # of blocks: until each lane reads another
        period = math.ceil(samples * self.args.accumulate / self.args.batch_size)
        most = math.ceil(math.ceil(STEPS / period) * period / workers) * workers  # whole periods, whole waves

        def measure(seconds: float, work: Callable | None = None) -> list[list[float]]:
            """Draw up to `most`, or for so long; but at least a period, unless all the time is up."""
            waits, works, _ = draw(batches, most, seconds, title, work)
            if len(waits) < period:
                left = max(0, self.end - perf_counter())
                more = draw(batches, period - len(waits), left, title, work)
                waits, works = waits + more[0], works + more[1]
            whole = len(waits) // period * period or len(waits)
            return [waits[:whole], works[:whole]]

        draw(batches, max(2 * workers, period), 2 * self.each, title)
        waits, _ = measure(2 * self.each)
        trials.alone.append(mean(waits))
        draw(batches, 2 * workers, 2 * self.each, title, self.step)
        waits, works = measure(4 * self.each, self.step)
        trials.parts = self.parts_of(data)
        trials.waits.append(mean(waits))
        trials.steps.append(mean(waits) + mean(works))
        batches = None  # its workers end
        close_all(data, None)

    def compare(self, best: Trials, flags: dict) -> Trials:
        """Try other flags in turn with the best so far, and give the better one; the best, if time is up.

        Flags that train.py would refuse, as more patches than a map has room for, are not better either.
        """
        from object_store import InputError

        other = Trials(best.flags | flags)
        for trials in (other, best) * ROUNDS:
            try:
                self.try_once(trials)
            except InputError:
                return best
            if perf_counter() > self.end:
                return best
        self.tried.append(other)
        return other if other.step < (1 - max(GAIN, other.scatter, best.scatter)) * best.step else best

    def enough(self, best: Trials) -> bool:
        """Whether the step is the limit: then nothing that the loader does better buys anything."""
        workers = best.flags.get("num_workers", self.args.num_workers)
        ahead = not workers or MARGIN * median(best.alone) < self.t_step
        return best.wait_share < ENOUGH and ahead

    def plan(self) -> tuple[float, int, int]:
        """diagnose.py's arithmetic: t_load, the workers it asks for, and how many may be tried: one for each
        rank more than its cores, within memory and /dev/shm."""
        cores = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))
        shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None
        limits = {
            "ranks": self.args.devices,
            "batch_bytes": self.batch_bytes,
            "worker_bytes": peak_memory(),
            "memory": free_memory(),
            "shm": shm,
        }
        load = median(self.given.alone) * max(1, self.args.num_workers)
        plan = plan_workers(load, self.t_step, cores=cores + self.args.devices, **limits)
        return load, plan.needed, min(cap.workers for cap in plan.caps if cap.workers is not None)

    def values(self, name: str, best: Trials) -> list[float]:
        """What to try of a flag, the nearest first: a value that gains nothing ends the list."""
        now = getattr(self.args, name)
        if name == "num_workers":  # fewer than keep up may gain nothing: what they save is not waited for
            _, needed, most = self.plan()
            asked = {min(needed, most), min(2 * needed, most), most}
            fit = [value for value in range(now + 1, most + 1) if best.parts % value == 0]
            return sorted({max((value for value in fit if value <= each), default=0) for each in asked} - {0})
        values = [2 * now, 4 * now] if now else [32]
        if name == "shuffle_blocks" and now:
            room = (free_memory() or math.inf) / 2 / self.args.devices
            values = [value for value in values if value / now * self.blocks_bytes < room]
        return values

    def search(self, names: tuple[str, ...]) -> tuple[Trials, str]:
        """The best flags found, and why the search ended."""
        best = self.given
        for _ in range(ROUNDS):
            self.try_once(best)
        for name in names:
            for value in self.values(name, best):
                if self.enough(best):
                    return best, LIMIT
                better = self.compare(best, {name: value})
                if perf_counter() > self.end:
                    return better, "the time is up; give more --seconds to try more"
                if better is best:
                    break
                best = better
        return best, LIMIT if self.enough(best) else "nothing else gained more than the trials scatter"


def flags_of(values: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in values.items())


def command(others: list[str], values: dict) -> str:
    """train.py's command line with some flags set, whether they were given or not."""
    for flag in (f"--{name.replace('_', '-')}" for name in values):
        others = [word for word in others if not word.startswith(f"{flag}=")]
        with suppress(ValueError):
            del others[others.index(flag) : others.index(flag) + 2]
    return " ".join(["uv run python train.py", *map(shlex.quote, others), *flags_of(values).split()])


def report(tuner: Tuner, best: Trials, end: str, line: str) -> None:
    """Print what was tried, the command to train with, and why."""
    print(f"\nwith a batch at hand, a step takes {ms(tuner.t_step)}")
    print(f"{'what was tried':44}{'a step':>11}{'waiting':>9}{'a batch alone':>15}")
    for trials in tuner.tried:
        row = f"{flags_of(trials.flags) or 'as given':44}{ms(trials.step):>11}{trials.wait_share:9.0%}"
        told = "   the best" if trials is best else "   too close to call" * (trials.step < best.step)
        print(f"{row}{ms(median(trials.alone)):>15}{told}")
    print(f"{end}\n\n{line}")
    load, needed, most = tuner.plan()
    why = {
        "num_workers": f"a batch takes one process {ms(load)}, so {needed} keep up; up to {most} may be tried"
    }
    why |= {"max_requests": "more latencies overlap", "shuffle_blocks": f"more is read ahead. {OTHERS}"}
    why |= {"patches_per_map": f"less is read for a sample. {OTHERS}"}
    for name, value in best.flags.items():
        print(f"  {flags_of({name: value})}: {why[name]}")
    times = f"a step takes {ms(best.step)}, not {ms(tuner.given.step)}: {tuner.given.step / best.step:.2f} times as fast"
    print(f"  {times if best.flags else 'no flag is changed'}")


def parse_own(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's own flags, and the others, which are train.py's; InputError for a value that is bad."""
    from object_store import InputError, Parser

    usage = "tune.py [-h] [--seconds S] [--also-shuffle] [any flags of train.py]"
    parser = Parser(usage=usage, description=__doc__.splitlines()[0], add_help=False, allow_abbrev=False)
    about = f"to search for, about (default: {SECONDS})"
    parser.add_argument("--seconds", type=float, metavar="S", default=SECONDS, help=about)
    about = "try --shuffle-blocks and --patches-per-map, too: they change the result"
    parser.add_argument("--also-shuffle", action="store_true", help=about)
    own, others = parser.parse_known_args(argv)
    if not 0 < own.seconds < math.inf:
        raise InputError(f"--seconds {own.seconds:g}: give a number of seconds above 0")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError("torchrun: this program tries one rank; start it without, and give --devices N")
    if {"-h", "--help"} & {*others}:
        parser.print_help()
        print("\nThe flags of train.py:\n")
    return own, others


def main(argv: list[str] | None = None) -> dict:
    """Tune the training that train.py would do with these flags; return what was tried and the command."""
    own, others = parse_own(sys.argv[1:] if argv is None else argv)
    from train import STORE, parse_arguments, serve_example

    args, server = parse_arguments(others), None
    args.resume = None  # the speed is the same at any step
    names = ("num_workers", "max_requests")
    if own.also_shuffle:  # first, for blocks decide how many workers can share them
        names = ("shuffle_blocks", "patches_per_map", *names)
    try:
        if args.store == STORE:
            server = serve_example()
            args.anonymous |= "EXAMPLE_SERVER" in os.environ
        tuner = Tuner(args, own.seconds)
        tuner.measure_step()
        best, end = tuner.search(names)
    finally:
        close_all(None, server)
    line = command(others, best.flags)
    report(tuner, best, end, line)
    tried = [trials.flags | {"step": trials.step, "wait_share": trials.wait_share} for trials in tuner.tried]
    return {"t_step": tuner.t_step, "tried": tried, "flags": best.flags, "end": end, "command": line}


if __name__ == "__main__":
    from object_store import InputError

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
