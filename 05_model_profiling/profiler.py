"""Run a training under profilers, and read what they wrote.

    uv run python profiler.py                    # a few steps of chapter 5's train.py
    uv run python profiler.py --batch-size 32    # with any of its flags

You should see where a step's time goes, the longest operators and gaps, and whether a known
fault shows. The files stay in outputs/profiler/: open a trace in https://ui.perfetto.dev.

For a training of your own, copy this file, traces.py and trace_events.py beside it, and call
profile_training (Lightning) or profile_loop (plain PyTorch).

A profiler slows down what it looks at, so each has a training of its own:

    simple    times Lightning's hooks; in plain PyTorch, the steps
    advanced  times Python's functions (cProfile); Lightning only
    trace     notes when each operator of a few steps begins and ends
    stacks    the same for two steps, with the line of Python that called each operator
"""

import argparse
import gzip
import json
import os
import pstats
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

# Before torch is loaded: its tracer reports on GPUs that are not there.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import distributed
from torch._C._profiler import _ExperimentalConfig

from trace_events import DATA, Machine, load
from traces import WORTH_SAYING, Report, describe, read_trace

if TYPE_CHECKING:  # a loop in plain PyTorch needs no Lightning
    from lightning.pytorch.profilers import Profiler

    from location import Location
    from options import Options

KINDS = ("simple", "advanced", "trace", "stacks")
WRITTEN = ("rank_*.json.gz", "*{kind}*.txt", "*{kind}*.prof")  # by them
NEXT_BATCH = "[_TrainingEpochLoop].train_dataloader_next"
STEPS = 10  # of each training
FIRST_STEPS = 4  # without a trace, these do not count
SCHEDULES = {
    "trace": {"wait": 3, "warmup": 1, "active": 4},
    "stacks": {"wait": 3, "warmup": 1, "active": 2},
}
SLOWED = 1.5  # times the step without a trace
NOISY = 1.2  # times the step with one, which cannot be faster
HERE = Path(__file__).parent
CALLS = 300  # of a few operators on one number
COPIED = 2**27  # bytes: more than caches hold
WAITING = re.compile(r"'(acquire|poll|select)' of|posix.read|time.sleep|select\.")
OPENING = re.compile(r"open_(zarr|group|array|dataset|mfdataset|consolidated)$|h5open")


@dataclass(frozen=True)
class LoaderProfile:
    """What Python did while the loop waited for data, in the process that trains."""

    function: str  # that with the most time of its own
    place: str
    share: float  # of the wait
    opens: float  # files or stores opened in a step


@dataclass(frozen=True)
class Profile:
    """What all profilers say of a training."""

    report: Report
    loader: LoaderProfile | None  # None of a loop in plain PyTorch
    step_ms: float  # without a trace, the median
    seconds: dict[str, float]  # of the whole training with each profiler
    cores_busy: float  # on average, in the training with the simple one

    @property
    def verdict(self) -> str:
        """The first fault in a few words; "none" if there is none."""
        cause = self.report.first
        opens = self.loader.opens if self.loader else 0
        if cause == DATA and opens >= 1:
            return "stores opened for each batch"
        return cause


def profile_training(
    fit: Callable[["Profiler"], None], folder: Path, with_stacks: bool = True
) -> Profile:
    """Train with each of Lightning's profilers, and read what they wrote for this rank.

    `fit` makes module and Trainer, the latter with the profiler that it is given, and
    trains for STEPS steps. The files stay in `folder`.
    """
    empty(folder)
    seconds = {}

    def run(kind: str) -> "Profiler":
        profiler = make_profiler(kind, folder)
        began = perf_counter()
        fit(profiler)
        seconds[kind] = perf_counter() - began
        return profiler

    began = process_time()
    simple = run("simple")
    cores_busy = (process_time() - began) / seconds["simple"]
    step_ms = mean_step(simple.asked)
    run("advanced")
    loader = read_loader(folder / "advanced")
    run("trace")
    report = read_rank(folder / "trace")
    if with_stacks:
        run("stacks")
        report = add_places(report, read_rank(folder / "stacks"))
    return Profile(report, loader, step_ms, seconds, cores_busy)


def profile_loop(
    train: Callable[[Callable[[], None]], None], folder: Path, with_stacks: bool = True
) -> Profile:
    """Profile a loop in plain PyTorch; the files stay in `folder`.

    `train` makes model and optimizer, and trains for STEPS steps. It calls what it is given
    at the end of each, and names its phases: `with record_function("forward"): ...`. Where
    they lie inside each other, the innermost counts.
    """
    empty(folder)
    seconds = {}
    ends = []
    began = perf_counter()
    computing = process_time()
    train(lambda: ends.append(perf_counter()))
    seconds["simple"] = perf_counter() - began
    cores_busy = (process_time() - computing) / seconds["simple"]
    step_ms = mean_step(ends)

    def run(kind: str) -> Report:
        settings = trace_settings(kind, folder)
        began = perf_counter()
        with torch.profiler.profile(**settings) as tracer:
            train(tracer.step)
        seconds[kind] = perf_counter() - began
        return read_rank(folder / kind)

    report = run("trace")
    if with_stacks:
        report = add_places(report, run("stacks"))
    return Profile(report, None, step_ms, seconds, cores_busy)


def empty(folder: Path) -> None:
    """Remove what earlier profiles wrote there, and nothing else: Lightning would append."""
    if find_rank() != 0:
        return
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for pattern in WRITTEN:
            for path in (folder / kind).glob(pattern.format(kind=kind)):
                path.unlink()


def find_rank() -> int:
    """This process's rank, of a group or as a launcher says."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def make_profiler(kind: str, folder: Path) -> "Profiler":
    """One of Lightning's, which writes into an empty folder of its own."""
    from lightning.pytorch import profilers

    place = folder / kind
    place.mkdir(parents=True, exist_ok=True)
    if kind == "simple":
        return make_step_timer(place, kind)
    if kind == "advanced":
        return profilers.AdvancedProfiler(place, kind, dump_stats=True)
    settings = trace_settings(kind, folder)
    # Its marks of modules would break the graphs of torch.compile.
    return profilers.PyTorchProfiler(place, kind, record_module_names=False, **settings)


def make_step_timer(place: Path, name: str) -> "Profiler":
    """Lightning's simple profiler, which also notes when each batch was asked for."""
    from lightning.pytorch.profilers import SimpleProfiler

    class StepTimer(SimpleProfiler):
        def start(self, action_name: str) -> None:
            if action_name == NEXT_BATCH:
                self.asked.append(perf_counter())
            super().start(action_name)

    timer = StepTimer(place, name)
    timer.asked = []
    return timer


def trace_settings(kind: str, folder: Path) -> dict:
    """The arguments of torch's profiler for one of SCHEDULES."""
    settings = {"record_shapes": True}
    if kind == "stacks":
        settings["with_stack"] = True  # and into each event, for find_place:
        settings["experimental_config"] = _ExperimentalConfig(verbose=True)
    machine = measure_machine(settings)

    def write(tracer: torch.profiler.profile) -> None:
        save_trace(tracer, machine, folder / kind / f"rank_{find_rank()}.json.gz")

    settings["schedule"] = torch.profiler.schedule(**SCHEDULES[kind], repeat=1)
    settings["on_trace_ready"] = write
    return settings


def measure_machine(settings: dict) -> Machine:
    """What the least work costs now, with such a tracer and with the threads of this one."""
    one = torch.ones(1, requires_grad=True)
    with torch.profiler.profile(**settings) as tracer:
        for _ in range(CALLS):
            (2 * one - 1).square().sum().backward()
    events = [event for event in tracer.events() if event.name.startswith("aten::")]
    begin = min(event.time_range.start for event in events)
    end = max(event.time_range.end for event in events)
    empty_us = (end - begin) / len(events)  # with the Python between them
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = source.clone()
    seconds = []
    for _ in range(5):
        began = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - began)
    return Machine(empty_us, 2 * COPIED / median(seconds))


def save_trace(tracer: torch.profiler.profile, machine: Machine, path: Path) -> None:
    """Write a trace, packed, with what was measured of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("")
    tracer.export_chrome_trace(str(plain))
    with plain.open("rb") as file, gzip.open(path, "wb") as packed:
        begin = file.readline()  # a brace
        packed.write(begin + f'"machine": {json.dumps(asdict(machine))},'.encode())
        shutil.copyfileobj(file, packed)  # torch's own .gz takes ten times as long
    plain.unlink()


def read_rank(folder: Path) -> Report:
    """The report of the trace that this rank has just written."""
    try:
        return read_trace(load(folder / f"rank_{find_rank()}.json.gz"))
    except (FileNotFoundError, ValueError) as error:
        reason = f"no trace of whole steps in {folder}"
        remedy = f"train for {STEPS} batches, with one optimizer and no validation"
        raise ValueError(f"{reason}; {remedy}") from error


def add_places(report: Report, stacks: Report) -> Report:
    """The report of the undisturbed steps, with the lines of Python from the other trace."""
    places = {finding.cause: finding.place for finding in stacks.findings}
    findings = []
    for finding in report.findings:
        place = places.get(finding.cause, finding.place)
        findings.append(replace(finding, place=place))
    return replace(report, findings=findings, waits=stacks.waits)


def mean_step(marks: list[float]) -> float:
    """Milliseconds from one step's mark to the next. The first still compile and allocate.

    The mean, as in a trace: a wait in every eighth step counts.
    """
    if len(marks) < STEPS:
        raise ValueError(f"{len(marks)} steps have ended: train for {STEPS}")
    counted = marks[FIRST_STEPS:]
    return 1e3 * (counted[-1] - counted[0]) / (len(counted) - 1)


def read_loader(folder: Path) -> LoaderProfile:
    """What cProfile saw of the wait for data."""
    path = min(folder.glob("*train_dataloader_next.prof"))  # that of the first rank
    stats = pstats.Stats(str(path))
    longest = ("", "", 0.0)
    opens = 0
    for (file, line, name), (_, calls, own, _, callers) in stats.stats.items():
        place = f"{Path(file).name}:{line}"
        if file == "~" and callers:  # written in C: say who called it
            file, line, caller = max(callers, key=lambda each: callers[each][2])
            place = f"called by {caller}, {Path(file).name}:{line}"
        if own > longest[2]:
            longest = (name, place, own)
        if OPENING.search(name):
            opens = max(opens, calls)  # one may call the other
    function, place, own = longest
    return LoaderProfile(function, place, own / stats.total_tt, opens / STEPS)


def describe_profile(profile: Profile, folder: Path) -> str:
    """A profile as text."""
    lines = [describe(profile.report)]
    waits = profile.report.phases.get(DATA, 0)
    if profile.loader and waits > WORTH_SAYING:
        lines += describe_loader(profile.loader)
    lines.append(f"Without a trace, a step takes {profile.step_ms:.1f} ms")
    if profile.step_ms > NOISY * profile.report.step_ms:
        traced = f"with a trace {profile.report.step_ms:.1f} ms"
        lines.append(f"and {traced}: other programs used the cores; profile again")
    if profile.report.step_ms > SLOWED * profile.step_ms:
        lines.append(
            f"The trace took {profile.report.step_ms:.1f} ms: it slows small operators"
            " most, so that their shares above are too large"
        )
    lines.append(f"The files are in {folder}")
    return "\n".join(lines)


def describe_loader(loader: LoaderProfile) -> list[str]:
    """What the wait for data was spent on, in lines of text."""
    where = f"{loader.share:.0%} in {loader.function}, {loader.place}"
    lines = [f"While it waits for data: {where}"]
    if WAITING.search(loader.function):
        lines.append("  it waits for a thread or worker: no profiler here looks inside")
    if loader.opens >= 1:
        lines.append(f"  it opens {loader.opens:.0f} stores or files a step: open once")
    return lines


def profile_chapter(options: "Options", location: "Location") -> Profile:
    """Profile the training of train.py, without validation or accumulated gradients."""
    from task import make_data, make_datamodule, make_model
    from train import make_trainer

    options = replace(
        options,
        max_steps=STEPS,
        validate_every=STEPS + 1,
        accumulate_grad_batches=1,
        resume=None,
    )
    folder = Path(options.output_dir)
    options, data = make_data(options, location)
    datamodule = make_datamodule(options, data, first_step=0)

    def fit(profiler: "Profiler") -> None:
        model = make_model(options, data)
        trainer = make_trainer(options, [], "", profiler)
        trainer.fit(model, datamodule=datamodule)

    profile = profile_training(fit, folder)
    if find_rank() == 0:
        print(describe_profile(profile, os.path.relpath(folder)))
    return profile


def main(argv: list[str] | None = None) -> Profile:
    """Profile a training with train.py's flags; errors end with code 2."""
    from command_line import call_with_store

    argv = sys.argv[1:] if argv is None else argv
    if not any(word.startswith("--output-dir") for word in argv):
        name = re.sub(r"[^\w.]+", "-", " ".join(argv)).strip("-")[:100] or "default"
        argv = ["--output-dir", str(HERE / "outputs/profiler" / name), *argv]
    return call_with_store(profile_chapter, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    if not (HERE / "command_line.py").exists():
        argparse.ArgumentParser(usage=argparse.SUPPRESS).error(
            "this profiles chapter 5's train.py; for a training of your own, import"
            " profile_training or profile_loop into a script"
        )
    from ending import run

    run(main)
