"""Appendix: a slow-down that is built in, seen by Lightning's three profilers.

    uv run python reading_profilers.py                 # none, then in data, model and step
    uv run python reading_profilers.py --slow data     # one of them, and the control
    uv run python reading_profilers.py --slow data --num-workers 1

You should see that the simple profiler names the hook, the advanced one the function with
its file and line, and the trace the operator and the moment. With a worker, the last two
lose sight of the function. What the profilers wrote stays in outputs/reading_profilers/:
open a *.pt.trace.json in https://ui.perfetto.dev.
"""

import argparse
import json
import logging
import os
import pstats
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

# Before torch is imported, because the tracer is talkative.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import lightning as L
import numpy as np
import torch
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn
from torch.utils.data import DataLoader, Dataset

from saving import save_rows

HERE = Path(__file__).parent
SLOW = ["none", "data", "model", "step"]  # where a slow-down may be built in
PROFILERS = ["simple", "advanced", "trace"]
BATCH = 2
CHANNELS = 8
WAIT = 4  # steps until the trace begins
WARM_UP = 1  # steps that it takes to get ready
TRACED = 3  # steps in the trace
ROUNDS = 7  # of the overhead
TIMED = 8  # steps that are traced then
PASSES = 4  # over a patch: slower than a step, even in a worker
STEP = "training_step"
SPAN = "[pl][profile]"  # what Lightning puts before its names
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
# What is slow in each, as the trace calls it.
NAMES = {
    "data": "train_dataloader_next",
    "model": "aten::mm",
    "step": "CheckWeights.on_train_batch_end",
}
BUILT_IN = "the slow-down"
OTHERS = "loader, operators"
COLOURS = {  # of Okabe and Ito
    STEP: "#0072B2",
    "backward": "#009E73",
    "optimizer_step": "0.8",
    OTHERS: "0.5",
    BUILT_IN: "#D55E00",
}

# ------------------------------------------------------- a training, and three slow-downs


def count_bad(patch: np.ndarray) -> int:
    """Slow data: look at every cell in Python. `np.sum` is a hundred times as fast."""
    bad = 0
    for value in np.tile(patch.ravel(), PASSES):
        if not -99 < float(value) < 99:  # m/s; NaN is bad, too
            bad += 1
    return bad


class Patches(Dataset):
    """Random winds: input (3, P, P) and target (2, P, P), float32."""

    def __init__(self, size: int, slow: bool):
        self.size = size
        self.slow = slow

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        patch = rng.standard_normal((5, self.size, self.size), np.float32)
        if self.slow and count_bad(patch):
            raise ValueError(f"patch {index} has bad cells")
        return patch[:3], patch[3:]


class FirstGuess(nn.Module):
    """A slow model: adds to each cell a mean of all P * P cells.

    The matrix is dense where a small filter would do.
    """

    def __init__(self, size: int):
        super().__init__()
        along = torch.arange(float(size))
        cells = torch.cartesian_prod(along, along)
        weights = torch.exp(-torch.cdist(cells, cells))
        self.register_buffer("weights", weights / weights.sum(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.matmul(x.flatten(2), self.weights).view_as(x)


class CheckWeights(L.Callback):
    """A slow step: fetches each weight and gradient by itself. On a GPU each fetch waits."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_
    ) -> None:
        for weights in pl_module.parameters():
            for value in (*weights.detach().flatten(), *weights.grad.flatten()):
                if torch.isnan(value).item():
                    raise ValueError("a weight or gradient is NaN")


class Clock(L.Callback):
    """When each step begins, in seconds."""

    def __init__(self):
        self.begins: list[float] = []

    def on_train_batch_start(self, *_) -> None:
        self.begins.append(perf_counter())


class Module(L.LightningModule):
    """Three convolutions, and the slow model before them if asked for."""

    def __init__(self, size: int, slow: bool):
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [FirstGuess(size)] if slow else []
        for channels in (3, CHANNELS):
            layers.append(nn.Conv2d(channels, CHANNELS, 3, padding=1))
            layers.append(nn.ReLU())
        layers.append(nn.Conv2d(CHANNELS, 2, 3, padding=1))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, target = batch
        return (self.net(inputs) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(
    slow: str,
    profiler: Profiler | None,
    args: argparse.Namespace,
    *callbacks: L.Callback,
) -> None:
    """Train on the CPU under a profiler. Nothing but the profiler writes."""
    patches = Patches(args.patch_size, slow == "data")
    loader = DataLoader(patches, BATCH, num_workers=args.num_workers)
    settings: dict = dict.fromkeys(OFF, False)
    settings["callbacks"] = [*callbacks]
    if slow == "step":
        settings["callbacks"].append(CheckWeights())
    settings["max_steps"] = args.steps
    settings["default_root_dir"] = args.output_dir
    trainer = L.Trainer(accelerator="cpu", devices=1, profiler=profiler, **settings)
    trainer.fit(Module(args.patch_size, slow == "model"), loader)


def make_profiler(kind: str, folder: Path, traced: int = TRACED) -> Profiler:
    """One of the three, which will write into the folder, without its earlier files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("fit-*"):
        old.unlink()  # the simple profiler would append
    if kind == "simple":
        return SimpleProfiler(folder, kind)
    if kind == "advanced":
        return AdvancedProfiler(folder, kind, dump_stats=True)
    cycle = {"wait": WAIT, "warmup": WARM_UP, "active": traced, "repeat": 1}
    schedule = torch.profiler.schedule(**cycle)
    return PyTorchProfiler(folder, kind, schedule=schedule)


# ---------------------------------------------------------------------- reading the three


def short(name: str) -> str:
    """An action without its owner, unless a callback: [Strategy]X.backward is backward."""
    owner, _, action = name.removeprefix(SPAN).rpartition("]")
    return action if owner == "[Callback" else action.rpartition(".")[2]


def read_simple(durations: dict[str, list[float]]) -> list[dict]:
    """Actions by their share of the epoch's seconds, without the actions inside them."""
    totals: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, seconds in durations.items():
        totals[short(name)] += sum(seconds)
        calls[short(name)] += len(seconds)
    epoch = totals.pop("run_training_epoch")
    totals.pop("run_training_batch", None)  # optimizer_step, in other words
    # The optimizer's closure calls both.
    totals["optimizer_step"] -= totals[STEP] + totals["backward"]
    rows = []
    for name, seconds in totals.most_common():
        rows.append({"name": name, "calls": calls[name], "share": seconds / epoch})
    return rows


def read_advanced(stats: pstats.Stats) -> list[dict]:
    """Functions by their own time, as a share of all that was seen.

    A function in C has no line; its row has the caller's.
    """
    rows = []
    for (file, number, name), (_, calls, own, _, callers) in stats.stats.items():
        place = f"{Path(file).name}:{number}"
        if file == "~" and callers:
            file, number, by = max(callers, key=lambda caller: callers[caller][2])
            place = f"called by {by}, {Path(file).name}:{number}"
        row = {"name": name, "calls": calls, "share": own / stats.total_tt}
        rows.append(row | {"place": place})
    return sorted(rows, key=lambda row: row["share"], reverse=True)


def nest(events: list[dict]) -> list[int | None]:
    """The index of the event around each, of a thread's events as main_thread sorts them."""
    parents: list[int | None] = []
    around: list[int] = []
    for index, event in enumerate(events):
        while around and event["ts"] >= end_of(events[around[-1]]):
            around.pop()
        parents.append(around[-1] if around else None)
        around.append(index)
    return parents


def end_of(event: dict) -> float:
    return event["ts"] + event["dur"]


def is_span(event: dict) -> bool:
    """Whether it is one of Lightning's actions."""
    return event["name"].startswith(SPAN)


def main_thread(trace: dict) -> list[dict]:
    """Lightning's spans and the operators of the thread that trains; microseconds.

    They are sorted by their beginning, the longest first. All end with the last whole
    training_step: spans that are open then last, in the file, until it is written.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = [event for event in events if is_span(event)]
    steps = [event for event in spans if short(event["name"]) == STEP]
    thread = steps[0]["tid"]
    end = max(end_of(event) for event in steps)
    kept = []
    for event in events:
        ours = is_span(event) or event.get("cat") == "cpu_op"
        if ours and event["tid"] == thread and event["ts"] < end:
            seconds = min(event["dur"], end - event["ts"])
            kept.append(event | {"dur": seconds})
    return sorted(kept, key=lambda event: (event["ts"], -event["dur"]))


class Span:
    """What one of Lightning's actions took in a trace, and the operators in it."""

    def __init__(self):
        self.calls = 0
        self.own = 0.0  # microseconds, without the spans inside
        self.filled = 0.0  # of these, with an operator
        self.operator_calls: Counter[str] = Counter()
        self.operator_own: Counter[str] = Counter()  # without the operators inside

    def describe(self, name: str, whole: float) -> dict:
        """Its row: shares are of the whole trace, and for operators of the span."""
        operators = []
        for operator, spent in self.operator_own.most_common():
            calls = self.operator_calls[operator]
            row = {"name": operator, "calls": calls, "share": spent / self.own}
            operators.append(row)
        return {
            "name": name,
            "calls": self.calls,
            "share": self.own / whole,
            "filled": self.filled / self.own,
            "operator_calls": self.operator_calls.total(),
            "operators": operators,
        }


def read_trace(trace: dict) -> list[dict]:
    """Lightning's spans by their own share of the trace's time, with their operators.

    `filled` is the share of a span in which an operator runs. The rest is Python, waiting
    or sleep.
    """
    events = main_thread(trace)
    spans: defaultdict[str, Span] = defaultdict(Span)
    homes: list[str | None] = []  # the span that each event is, or is in
    for event, parent in zip(events, nest(events)):
        around = None if parent is None else homes[parent]
        if is_span(event):
            homes.append(short(event["name"]))
            spans[homes[-1]].calls += 1
            spans[homes[-1]].own += event["dur"]
            if around is not None:
                spans[around].own -= event["dur"]
            continue
        homes.append(around)
        if around is not None:
            add_operator(spans[around], event, events[parent])
    whole = max(map(end_of, events)) - events[0]["ts"]
    # A span without time of its own is nothing but other spans.
    rows = [span.describe(name, whole) for name, span in spans.items() if span.own > 0]
    return sorted(rows, key=lambda row: row["share"], reverse=True)


def add_operator(span: Span, operator: dict, parent: dict) -> None:
    """Count an operator in a span, directly or within the operator that is its parent."""
    span.operator_calls[operator["name"]] += 1
    span.operator_own[operator["name"]] += operator["dur"]
    if is_span(parent):
        span.filled += operator["dur"]
    else:
        span.operator_own[parent["name"]] -= operator["dur"]


def line(row: dict, end: str = "") -> str:
    return f"{row['name']:42}{row['calls']:7,} calls {row['share']:6.1%}{end}"


def look(slow: str, kind: str, args: argparse.Namespace) -> dict:
    """Train once under one profiler: the ranking by its output, and its first lines."""
    folder = args.output_dir / f"{slow}_{args.num_workers}_workers" / kind
    profiler = make_profiler(kind, folder)
    fit(slow, profiler, args)
    if kind == "simple":
        rows = read_simple(profiler.recorded_durations)
        excerpt = [line(row) for row in rows[:3]]
    elif kind == "advanced":
        files = map(str, folder.glob("*.prof"))
        rows = read_advanced(pstats.Stats(*files))
        excerpt = [line(row, f"  {row['place']}") for row in rows[:3]]
    else:
        rows = read_trace(load_trace(folder))
        excerpt = []
        for row in rows[:2]:
            excerpt += describe_span(row)
        for row in rows:
            row["operators"] = row["operators"][:5]
    size = sum(path.stat().st_size for path in folder.glob("fit-*"))
    return {
        "study": "looks",
        "plant": slow,
        "workers": args.num_workers,
        "profiler": kind,
        "found": rows[:8],
        "bytes": size,
        "excerpt": excerpt,
    }


def load_trace(folder: Path) -> dict:
    (path,) = folder.glob("*.pt.trace.json")
    return json.loads(path.read_text())


def describe_span(row: dict) -> list[str]:
    """Lines for a span and its two longest operators."""
    calls = f"{row['operator_calls']:,} operators"
    lines = [line(row, f", {row['filled']:.0%} of it in {calls}:")]
    for operator in row["operators"][:2]:
        indented = operator | {"name": f"    {operator['name']}"}
        lines.append(line(indented, " of the span"))
    return lines


def overhead(slow: str, args: argparse.Namespace) -> list[dict]:
    """A row for each profiler: a step's time under it, over that under none.

    The profilers take turns. Only the steps count that the trace holds whole.
    """
    first = WAIT + WARM_UP
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        times = {}
        for kind in ("no", *PROFILERS):
            profiler = None
            if kind != "no":
                profiler = make_profiler(kind, args.output_dir / "overhead", TIMED)
            clock = Clock()
            fit(slow, profiler, args, clock)
            times[kind] = clock.begins[first + TIMED - 1] - clock.begins[first]
        for kind in PROFILERS:
            ratios[kind].append(times[kind] / times["no"])
    rows = []
    for kind, values in ratios.items():
        row = {"study": "overhead", "plant": slow, "rounds": ROUNDS, "profiler": kind}
        row |= {"median": median(values), "min": min(values), "max": max(values)}
        rows.append(row)
    return rows


# --------------------------------------------------------------------- picture and command


def draw(traces: dict[str, dict], path: Path) -> None:
    """Draw the spans and the outermost operators of each trace, over milliseconds."""
    size = (9, 1.5 * len(traces))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (slow, trace) in zip(all_axes, traces.items()):
        # optimizer_step lies behind what it contains.
        for (level, kind), ranges in find_bars(slow, trace).items():
            behind = 1 if kind in ("optimizer_step", OTHERS) else 2
            look = {"color": COLOURS[kind], "zorder": behind, "linewidth": 0}
            axes.broken_barh(ranges, (level - 0.4, 0.8), **look)
        axes.set_yticks([0, 1], ["operators", "Lightning"])
        title = "no slow-down" if slow == "none" else f"slow: {slow}"
        axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("ms since the first event of the trace")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    place = {"loc": "outside upper right", "ncols": 5, "fontsize": 9}
    figure.legend(handles, COLOURS, **place, frameon=False)
    figure.savefig(path, dpi=110)


def find_bars(slow: str, trace: dict) -> dict[tuple[int, str], list]:
    """Beginnings and lengths in ms, by level (operators, Lightning) and kind of colour."""
    events = main_thread(trace)
    bars = defaultdict(list)
    for event, parent in zip(events, nest(events)):
        name = short(event["name"]) if is_span(event) else event["name"]
        outermost = parent is None or is_span(events[parent])
        is_slow = name == NAMES.get(slow)
        shown = is_span(event) or outermost or is_slow
        if name == "run_training_batch" or not shown:
            continue
        kind = name if name in COLOURS else OTHERS
        if is_slow:
            kind = BUILT_IN
        began = (event["ts"] - events[0]["ts"]) / 1e3
        bars[int(is_span(event)), kind].append((began, event["dur"] / 1e3))
    return bars


def save(rows: list[dict], args: argparse.Namespace, flags: list[str]) -> None:
    """Write results/reading_profilers.json and its picture."""
    path = HERE / "results/reading_profilers.json"
    command = ["python reading_profilers.py", *flags]
    save_rows(path, command, rows, ("torch", "lightning"))
    traces = {}
    for slow in SLOW:
        traces[slow] = load_trace(args.output_dir / f"{slow}_0_workers/trace")
    draw(traces, path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> list[dict]:
    """Look at the slow-downs with all three profilers; return a row for each look."""
    args = parse(argv)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # what else runs on the machine then matters less
    # What a process does once, such as loading libraries, is no step's.
    fit("none", None, args)
    chosen = SLOW if args.slow is None else list(dict.fromkeys(["none", args.slow]))
    looks = [(slow, args.num_workers) for slow in chosen]
    if args.save_results:
        looks.append(("data", 1))
    rows = []
    for slow, args.num_workers in looks:
        workers = f", {args.num_workers} worker" if args.num_workers else ""
        for kind in PROFILERS:
            row = look(slow, kind, args)
            print(f"slow: {slow}{workers}, profiler: {kind}")
            print("\n".join(row["excerpt"]), end="\n\n")
            rows.append(row)
    if args.save_results:
        args.num_workers = 0
        for slow in SLOW:
            for row in overhead(slow, args):
                times = f"{row['median']:.2f} times the step's time"
                print(f"slow: {slow}, {row['profiler']}: {times}")
                rows.append(row)
        save(rows, args, sys.argv[1:] if argv is None else argv)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "look at this one and at the control (default: all)"
    add("--slow", choices=SLOW, help=text)
    add("--steps", type=int, default=20, help="of each training (default: 20)")
    add("--patch-size", type=int, default=64, help="cells along a side (default: 64)")
    add("--num-workers", type=int, default=0, help="of the DataLoader (default: 0)")
    folder = HERE / "outputs/reading_profilers"
    add("--output-dir", type=Path, default=folder, help="of what they write")
    text = "all slow-downs, one in a worker, overhead, picture"
    add("--save-results", action="store_true", help=text)
    args = parser.parse_args(argv)
    traced = TIMED if args.save_results else TRACED
    least = {"steps": WAIT + WARM_UP + traced + 1, "patch_size": 4, "num_workers": 0}
    for name, number in least.items():
        value = getattr(args, name)
        if value < number:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value}: give at least {number}")
    if args.save_results and (args.slow or args.num_workers):
        reason = "--save-results: looks at all slow-downs"
        parser.error(f"{reason}; leave out --slow and --num-workers")
    if args.output_dir.is_file():
        parser.error(f"--output-dir {args.output_dir}: is a file; name a folder")
    return args


if __name__ == "__main__":
    main()
