"""Chapter 5: run a training under Lightning's profilers, and read what they wrote.

    uv run python profiler.py                    # a few steps of train.py
    uv run python profiler.py --batch-size 32    # with any of its flags

You should see where a step's time goes, the longest operators and gaps, and whether a known
fault shows. The files stay in outputs/profiler/: open a trace in https://ui.perfetto.dev.

A profiler slows down what it looks at, so each has a training of its own:

    simple    times Lightning's hooks
    advanced  times Python's functions (cProfile)
    trace     notes when each operator of a few steps begins and ends
    stacks    the same for two steps, with the line of Python that called each operator
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
from lightning.pytorch.utilities import rank_zero_only
from torch._C._profiler import _ExperimentalConfig

from command_line import call_with_store, run
from location import Location
from options import Options
from task import make_data, make_datamodule, make_model
from traces import DATA, Report, describe, load, read_trace
from train import make_trainer

KINDS = ("simple", "advanced", "trace", "stacks")
STEPS = 10  # of each training
SCHEDULES = {
    "trace": {"wait": 3, "warmup": 1, "active": 4},
    "stacks": {"wait": 3, "warmup": 1, "active": 2},
}
SLOWED = 1.5  # times the step without a trace
WORTH_SAYING = 0.05  # a smaller share of waiting needs no explanation
HERE = Path(__file__).parent
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
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "simple":
        return SimpleProfiler(folder, kind)
    if kind == "advanced":
        return AdvancedProfiler(folder, kind, dump_stats=True)

    def write(profiler: torch.profiler.profile) -> None:
        path = folder / f"rank_{rank_zero_only.rank}.json"
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


def profile_training(
    fit: Callable[[Profiler], None], folder: Path, with_stacks: bool = True
) -> Profile:
    """Train with each profiler, and read what they wrote for this rank.

    `fit` makes module and Trainer, the latter with the profiler that it is given, and
    trains for STEPS steps. The files stay in `folder`.
    """
    if rank_zero_only.rank == 0:
        for kind in KINDS:
            shutil.rmtree(folder / kind, ignore_errors=True)  # Lightning would append
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
    report = read_rank(folder / "trace")
    if with_stacks:
        run("stacks")
        report = add_places(report, read_rank(folder / "stacks"))
    return Profile(report, loader, step_ms, seconds, cores_busy)


def read_rank(folder: Path) -> Report:
    """The report of the trace that this rank has just written."""
    try:
        return read_trace(load(folder / f"rank_{rank_zero_only.rank}.json.gz"))
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


def median_step(durations: dict[str, list[float]]) -> float:
    """Seconds of a step with its wait for data, from the simple profiler."""
    total = 0.0
    for name in ("run_training_batch", "[_TrainingEpochLoop].train_dataloader_next"):
        total += median(durations[name])
    return total


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
    if profile.report.phases.get(DATA, 0) > WORTH_SAYING:
        lines += describe_loader(profile.loader)
    lines.append(f"Under the simple profiler, a step takes {profile.step_ms:.1f} ms")
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


def profile_chapter(options: Options, location: Location) -> Profile:
    """Profile the training of train.py, without validation or accumulated gradients."""
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

    def fit(profiler: Profiler) -> None:
        model = make_model(options, data)
        trainer = make_trainer(options, [], "", profiler)
        trainer.fit(model, datamodule=datamodule)

    profile = profile_training(fit, folder)
    if rank_zero_only.rank == 0:
        print(describe_profile(profile, os.path.relpath(folder)))
    return profile


def main(argv: list[str] | None = None) -> Profile:
    """Profile a training with train.py's flags; errors end with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if not any(word.startswith("--output-dir") for word in argv):
        name = re.sub(r"[^\w.]+", "-", " ".join(argv)).strip("-")[:100] or "default"
        argv = ["--output-dir", str(HERE / "outputs/profiler" / name), *argv]
    return call_with_store(profile_chapter, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
