"""Chapter 5: run a training under Lightning's profilers, and read what they wrote.

    uv run python profiler.py                    # a few steps of train.py
    uv run python profiler.py --batch-size 32    # with any of its flags

You should see where a step's time goes, the longest operators and gaps, and whether a known
fault shows. The files stay in outputs/profiler/: open a trace in https://ui.perfetto.dev.

A profiler slows down what it looks at, so each has a training of its own:

    simple    times Lightning's hooks
    advanced  times Python's functions (cProfile)
    trace     notes when each operator of a few steps begins and ends
    stacks    the same for one step, with the line of Python that called each operator
"""

import gzip
import os
import pstats
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

# Before torch is loaded: its tracer reports on GPUs that are not there.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from torch import distributed
from torch._C._profiler import _ExperimentalConfig

import train
from command_line import call_with_store, run
from options import Options
from store import Location
from traces import COMPILING, DATA, Report, describe, load, read_trace

STEPS = 10  # of each training
SCHEDULES = {
    "trace": {"wait": 3, "warmup": 1, "active": 4},
    "stacks": {"wait": 3, "warmup": 1, "active": 2},
}
HERE = Path(__file__).parent
WAITING = re.compile("acquire|poll|read|select|sleep")
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
    loader: LoaderProfile
    step_ms: float  # under the simple profiler, the median
    seconds: dict[str, float]  # of the whole training with each profiler
    cores_busy: float  # on average, in the training with the simple one

    @property
    def verdict(self) -> str:
        """The first fault in a few words; "none" if there is none."""
        cause = self.report.first
        if cause == DATA and self.loader.opens >= 1:
            return "stores opened for each batch"
        return cause


def make_profiler(kind: str, folder: Path) -> Profiler:
    """One of the four, which writes into an empty folder of its own."""
    folder = folder / kind
    shutil.rmtree(folder, ignore_errors=True)  # Lightning would append
    folder.mkdir(parents=True)
    if kind == "simple":
        return SimpleProfiler(folder, kind)
    if kind == "advanced":
        return AdvancedProfiler(folder, kind, dump_stats=True)

    def write(profiler: torch.profiler.profile) -> None:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        path = folder / f"rank_{rank}.json"
        profiler.export_chrome_trace(str(path))
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)  # torch's own .gz takes ten times as long
        path.unlink()

    schedule = torch.profiler.schedule(**SCHEDULES[kind], repeat=1)
    settings = {"schedule": schedule, "on_trace_ready": write}
    if kind == "stacks":
        settings["with_stack"] = True  # and into each event, for find_place:
        settings["experimental_config"] = _ExperimentalConfig(verbose=True)
    # Its marks of modules would break the graphs of torch.compile.
    return PyTorchProfiler(folder, kind, record_module_names=False, **settings)


def profile_training(fit: Callable[[Profiler], None], folder: Path) -> Profile:
    """Train with each profiler, and read what they wrote.

    `fit` makes a Trainer with the profiler that it is given and trains for STEPS steps. The
    files stay in `folder`.
    """
    seconds = {}

    def run(kind: str) -> Profiler:
        profiler = make_profiler(kind, folder)
        began = perf_counter()
        fit(profiler)
        seconds[kind] = perf_counter() - began
        return profiler

    began = process_time()
    simple = run("simple")
    cores_busy = (process_time() - began) / seconds["simple"]
    step_ms = 1e3 * median_step(simple.recorded_durations)
    run("advanced")
    loader = read_loader(folder / "advanced")
    run("trace")
    report = read_rank_0(folder / "trace")
    if report.first not in (DATA, COMPILING):  # no line of the step would explain them
        run("stacks")
        report = add_places(report, read_rank_0(folder / "stacks"))
    return Profile(report, loader, step_ms, seconds, cores_busy)


def read_rank_0(folder: Path) -> Report:
    """The report of a trace that the training has just written."""
    path = folder / "rank_0.json.gz"
    if not path.exists():
        raise ValueError(f"no trace in {folder}; train for {STEPS} steps")
    return read_trace(load(path))


def add_places(report: Report, stacks: Report) -> Report:
    """The report of the undisturbed steps, with the lines of Python from the other trace."""
    places = {finding.cause: finding.place for finding in stacks.findings}
    findings = []
    for finding in report.findings:
        place = places.get(finding.cause, finding.place)
        findings.append(replace(finding, place=place))
    return replace(report, findings=findings, waits=stacks.waits)


def median_step(durations: dict[str, list[float]]) -> float:
    """Seconds of a step with its wait for data, from the simple profiler."""
    total = 0.0
    for name in ("run_training_batch", "[_TrainingEpochLoop].train_dataloader_next"):
        total += median(durations[name])
    return total


def read_loader(folder: Path) -> LoaderProfile:
    """What cProfile saw of the wait for data."""
    (path,) = folder.glob("*train_dataloader_next.prof")
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
    loader = profile.loader
    traced = profile.report.step_ms / profile.step_ms
    where = f"{loader.share:.0%} in {loader.function}, {loader.place}"
    lines = [describe(profile.report), f"While it waits for data: {where}"]
    if WAITING.search(loader.function):
        lines.append(
            "  a thread or worker is waited for: no profiler here looks inside"
        )
    if loader.opens >= 1:
        lines.append(
            f"  {loader.opens:.0f} stores or files are opened a step; open once"
        )
    lines.append(
        f"A step takes {profile.step_ms:.1f} ms, and {traced:.2f} times as long"
    )
    lines.append(f"in the trace. The files are in {folder}")
    return "\n".join(lines)


def profile_chapter(options: Options, location: Location) -> Profile:
    """Profile the training of train.py."""
    options = replace(options, max_steps=STEPS, resume=None)
    folder = Path(options.output_dir)
    data = train.make_data(options, location, first_step=0)

    def fit(profiler: Profiler) -> None:
        model = train.make_model(options, data)
        train.make_trainer(options, [], "", profiler).fit(model, datamodule=data)

    profile = profile_training(fit, folder)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(describe_profile(profile, os.path.relpath(folder)))
    return profile


def main(argv: list[str] | None = None) -> Profile:
    """Profile a training with train.py's flags; errors end as its do."""
    argv = sys.argv[1:] if argv is None else argv
    if "--output-dir" not in argv:
        name = re.sub(r"[^\w.]+", "-", " ".join(argv)).strip("-") or "default"
        argv = [*argv, "--output-dir", str(HERE / "outputs/profiler" / name)]
    return call_with_store(profile_chapter, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
