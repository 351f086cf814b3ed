"""Appendix: one planted slow-down, seen by Lightning's three profilers.

    uv run python reading_profilers.py                  # no plant, then one in the data, in the model, in the step
    uv run python reading_profilers.py --plant data     # one of them, and the control
    uv run python reading_profilers.py --plant data --num-workers 1

You should see that the simple profiler names the hook, the advanced one the function with its file and line, the
trace the operator and the moment; and, with a worker, that the last two lose sight of the function.
What the profilers wrote stays in outputs/reading_profilers/: open a *.pt.trace.json in https://ui.perfetto.dev.
"""

import argparse
import json
import logging
import os
import platform
import pstats
import sys
import warnings
from collections import Counter, defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # before torch is imported: the tracer is talkative
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
from torch import nn
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
PLANTS = ["none", "data", "model", "step"]
PROFILERS = ["simple", "advanced", "trace"]
BATCH, CHANNELS = 2, 8
WAIT, WARM_UP, TRACED = (
    4,
    1,
    3,
)  # steps until the trace begins, that it takes to get ready, and in the trace
ROUNDS, TIMED = 7, 8  # of the overhead, and how many steps are traced then
PASSES = 4  # over a patch, by the plant in the data: it is to be slower than a step even in a worker
STEP, SPAN = "training_step", "[pl][profile]"  # what Lightning puts before its names

# ------------------------------------------------------------------------- a training, and three plants


def count_bad(patch: np.ndarray) -> int:
    """The plant in the data: look at every cell in Python. `np.sum` does it a hundred times as fast."""
    bad = 0
    for value in np.tile(patch.ravel(), PASSES):
        if not -99 < float(value) < 99:  # m/s; NaN is bad, too
            bad += 1
    return bad


class Patches(Dataset):
    """Random winds: input (3, P, P) and target (2, P, P), float32."""

    def __init__(self, size: int, planted: bool):
        self.size, self.planted = size, planted

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        patch = np.random.default_rng(index).standard_normal(
            (5, self.size, self.size), np.float32
        )
        if self.planted and count_bad(patch):
            raise ValueError(f"patch {index} has bad cells")
        return patch[:3], patch[3:]


class FirstGuess(nn.Module):
    """The plant in the model: to each cell, a mean of all P * P cells; a dense matrix where a small filter would do."""

    def __init__(self, size: int):
        super().__init__()
        cells = torch.cartesian_prod(
            torch.arange(float(size)), torch.arange(float(size))
        )
        weights = torch.exp(-torch.cdist(cells, cells))
        self.register_buffer("weights", weights / weights.sum(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.matmul(x.flatten(2), self.weights).view_as(x)


class CheckWeights(L.Callback):
    """The plant in the step: fetch every weight and gradient by itself. On a GPU, each `.item()` waits for it."""

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
    """Three convolutions, and maybe the plant."""

    def __init__(self, size: int, planted: bool):
        super().__init__()
        torch.manual_seed(0)
        widths = [(3, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 2)]
        layers = [
            layer
            for pair in widths
            for layer in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU())
        ]
        self.net = nn.Sequential(*[FirstGuess(size)] * planted, *layers[:-1])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(
    plant: str,
    profiler: Profiler | None,
    args: argparse.Namespace,
    *callbacks: L.Callback,
) -> None:
    """Train for args.steps on the CPU with a plant and a profiler. Nothing but the profiler writes."""
    loader = DataLoader(
        Patches(args.patch_size, plant == "data"), BATCH, num_workers=args.num_workers
    )
    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    settings = dict.fromkeys(off, False) | {
        "max_steps": args.steps,
        "default_root_dir": args.output_dir,
    }
    settings["callbacks"] = [*callbacks, *[CheckWeights()] * (plant == "step")]
    trainer = L.Trainer(accelerator="cpu", devices=1, profiler=profiler, **settings)
    trainer.fit(Module(args.patch_size, plant == "model"), loader)


def make_profiler(kind: str, folder: Path, traced: int = TRACED) -> Profiler:
    """One of Lightning's three, which will write into the folder; its files of an earlier run are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("fit-*"):
        old.unlink()  # the simple profiler would append
    if kind == "simple":
        return SimpleProfiler(folder, kind)
    if kind == "advanced":
        return AdvancedProfiler(folder, kind, dump_stats=True)
    schedule = torch.profiler.schedule(
        wait=WAIT, warmup=WARM_UP, active=traced, repeat=1
    )
    return PyTorchProfiler(folder, kind, schedule=schedule)


# ------------------------------------------------------------------------------------ reading the three


def short(name: str) -> str:
    """An action without what it belongs to, unless that is a callback: [Strategy]X.backward is backward."""
    owner, _, action = name.removeprefix(SPAN).rpartition("]")
    return action if owner == "[Callback" else action.rpartition(".")[2]


def read_simple(durations: dict[str, list[float]]) -> list[dict]:
    """Actions by their share of the epoch's seconds. Those that contain others are counted without them."""
    totals, calls = Counter(), Counter()
    for name, seconds in durations.items():
        totals[short(name)] += sum(seconds)
        calls[short(name)] += len(seconds)
    epoch = totals.pop("run_training_epoch")
    totals.pop("run_training_batch", None)  # optimizer_step, in other words
    totals["optimizer_step"] -= (
        totals[STEP] + totals["backward"]
    )  # which it calls in a closure
    ranked = totals.most_common()
    return [
        {"name": name, "calls": calls[name], "share": seconds / epoch}
        for name, seconds in ranked
    ]


def read_advanced(stats: pstats.Stats) -> list[dict]:
    """Functions by their own time, as a share of all that was seen; for one in C, which has no line, its caller's."""
    rows = []
    for (file, number, name), (_, calls, own, _, callers) in stats.stats.items():
        if file == "~" and callers:
            file, number, by = max(callers, key=lambda caller: callers[caller][2])
            place = f"called by {by}, {Path(file).name}:{number}"
        else:
            place = f"{Path(file).name}:{number}"
        rows.append(
            {
                "name": name,
                "calls": calls,
                "share": own / stats.total_tt,
                "place": place,
            }
        )
    return sorted(rows, key=lambda row: row["share"], reverse=True)


def nest(events: list[dict]) -> list[int | None]:
    """For each of a thread's events, sorted by ("ts", longest first), the index of the one around it."""
    parents, around = [], []
    for index, event in enumerate(events):
        while (
            around
            and event["ts"] >= events[around[-1]]["ts"] + events[around[-1]]["dur"]
        ):
            around.pop()
        parents.append(around[-1] if around else None)
        around.append(index)
    return parents


def main_thread(trace: dict) -> list[dict]:
    """Lightning's spans and the operators of the thread that trains, sorted for nest(); microseconds.

    All ends with the last whole training_step: spans that are open then last, in the file, until it is written.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        event
        for event in events
        if event["name"].startswith(SPAN) and short(event["name"]) == STEP
    ]
    end, kept = max(event["ts"] + event["dur"] for event in steps), []
    for event in events:
        ours = event["name"].startswith(SPAN) or event.get("cat") == "cpu_op"
        if ours and event["tid"] == steps[0]["tid"] and event["ts"] < end:
            kept.append(event | {"dur": min(event["dur"], end - event["ts"])})
    return sorted(kept, key=lambda event: (event["ts"], -event["dur"]))


def read_trace(trace: dict) -> list[dict]:
    """Lightning's spans by their own share of the trace's time, each with the operators that fill it.

    `filled` is the share of a span in which an operator runs: the rest is Python, waiting or sleep. An operator's
    share is that of its own time, without the operators it calls, in the span's.
    """
    events, home = main_thread(trace), []  # home: the span that an event is, or is in
    calls, own, filled = Counter(), Counter(), Counter()
    operators = (
        defaultdict(Counter),
        defaultdict(Counter),
    )  # calls and own time, by span
    for event, parent in zip(events, nest(events)):
        name, around = event["name"], None if parent is None else home[parent]
        home.append(short(name) if name.startswith(SPAN) else around)
        if name.startswith(SPAN):
            calls[home[-1]] += 1
            own[home[-1]] += event["dur"]
            own[around] -= event["dur"]
        elif around is not None:
            operators[0][around][name] += 1
            operators[1][around][name] += event["dur"]
            if events[parent]["name"].startswith(SPAN):
                filled[around] += event["dur"]
            else:
                operators[1][around][events[parent]["name"]] -= event["dur"]
    del own[None]
    whole = max(event["ts"] + event["dur"] for event in events) - events[0]["ts"]
    rows = []
    for name, time in own.most_common():
        if time <= 0:  # all of it is other spans
            break
        row = {
            "name": name,
            "calls": calls[name],
            "share": time / whole,
            "filled": filled[name] / time,
        }
        inside = [
            (op, operators[0][name][op], spent / time)
            for op, spent in operators[1][name].most_common()
        ]
        row["operator_calls"] = operators[0][name].total()
        rows.append(
            row
            | {
                "operators": [
                    dict(zip(("name", "calls", "share"), op)) for op in inside
                ]
            }
        )
    return rows


def line(row: dict, end: str = "") -> str:
    return f"{row['name']:42}{row['calls']:7,} calls {row['share']:6.1%}{end}"


def look(plant: str, kind: str, args: argparse.Namespace) -> dict:
    """Train once under one profiler. Returns the ranking that its output gives, and the first lines of it."""
    folder = args.output_dir / f"{plant}_{args.num_workers}_workers" / kind
    profiler = make_profiler(kind, folder)
    fit(plant, profiler, args)
    if kind == "simple":
        rows = read_simple(profiler.recorded_durations)
        excerpt = [line(row) for row in rows[:3]]
    elif kind == "advanced":
        rows = read_advanced(pstats.Stats(*map(str, folder.glob("*.prof"))))
        excerpt = [line(row, f"  {row['place']}") for row in rows[:3]]
    else:
        (path,) = folder.glob("*.pt.trace.json")
        rows, excerpt = read_trace(json.loads(path.read_text())), []
        for row in rows[:2]:
            excerpt.append(
                line(
                    row,
                    f", {row['filled']:.0%} of it in {row['operator_calls']:,} operators:",
                )
            )
            excerpt += [
                line(op | {"name": f"    {op['name']}"}, " of the span")
                for op in row["operators"][:2]
            ]
        for row in rows:
            row["operators"] = row["operators"][:5]
    row = {
        "study": "looks",
        "plant": plant,
        "workers": args.num_workers,
        "profiler": kind,
        "found": rows[:8],
    }
    return row | {
        "bytes": sum(path.stat().st_size for path in folder.glob("fit-*")),
        "excerpt": excerpt,
    }


def overhead(plant: str, args: argparse.Namespace) -> list[dict]:
    """A step's time under each profiler over that under none, in turn, in the steps that the trace holds whole."""
    ratios, first = defaultdict(list), WAIT + WARM_UP
    for _ in range(ROUNDS):
        times = {}
        for kind in ("no", *PROFILERS):
            clock = Clock()
            profiler = (
                None
                if kind == "no"
                else make_profiler(kind, args.output_dir / "overhead", TIMED)
            )
            fit(plant, profiler, args, clock)
            times[kind] = clock.begins[first + TIMED - 1] - clock.begins[first]
        for kind in PROFILERS:
            ratios[kind].append(times[kind] / times["no"])
    row = {"study": "overhead", "plant": plant, "rounds": ROUNDS}
    spread = {"median": median, "min": min, "max": max}
    return [
        row | {"profiler": kind} | {k: f(ratios[kind]) for k, f in spread.items()}
        for kind in PROFILERS
    ]


# ------------------------------------------------------------------------------------ picture and command


def draw(traces: dict[str, dict], path: Path) -> None:
    """Draw the spans and the outermost operators of each trace, over milliseconds; what was planted in orange."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {
        STEP: "tab:blue",
        "backward": "tab:green",
        "optimizer_step": "0.8",
        "loader, operators": "0.5",
    }
    colours["planted"] = "tab:orange"
    planted = {
        "data": "train_dataloader_next",
        "model": "aten::mm",
        "step": "CheckWeights.on_train_batch_end",
    }
    figure, axes = plt.subplots(
        len(traces),
        1,
        figsize=(9, 1.5 * len(traces)),
        sharex=True,
        layout="constrained",
    )
    for axis, (plant, trace) in zip(np.atleast_1d(axes), traces.items()):
        events, bars = main_thread(trace), defaultdict(list)
        for event, parent in zip(events, nest(events)):
            is_span, name = event["name"].startswith(SPAN), event["name"]
            name = short(name) if is_span else name
            outermost = parent is None or events[parent]["name"].startswith(SPAN)
            if name == "run_training_batch" or not (
                is_span or outermost or name == planted.get(plant)
            ):
                continue
            kind = (
                "planted"
                if name == planted.get(plant)
                else name
                if name in colours
                else "loader, operators"
            )
            bars[int(is_span), kind].append(
                ((event["ts"] - events[0]["ts"]) / 1e3, event["dur"] / 1e3)
            )
        for (
            row,
            kind,
        ), ranges in bars.items():  # optimizer_step lies behind what it contains
            behind = 1 if kind in ("optimizer_step", "loader, operators") else 2
            axis.broken_barh(
                ranges,
                (row - 0.4, 0.8),
                color=colours[kind],
                zorder=behind,
                linewidth=0,
            )
        axis.set_yticks([0, 1], ["operators", "Lightning"])
        axis.set_title(f"plant: {plant}", loc="left", fontsize=10)
    axis.set_xlabel("ms since the first event of the trace")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(
        handles, colours, loc="outside upper right", ncols=5, fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save(rows: list[dict], args: argparse.Namespace, command: str) -> None:
    """Write results/reading_profilers.json and its picture."""
    import psutil

    cpu, facts = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    results = {"command": command, "date": str(date.today())}
    results["machine"] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "gpu": None,
    }
    versions = {name: version(name) for name in ("torch", "lightning")}
    results["versions"] = {"python": platform.python_version()} | versions
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/reading_profilers.json").write_text(
        json.dumps(results | {"rows": rows}) + "\n"
    )
    traces = {}
    for plant in PLANTS:
        (path,) = (args.output_dir / f"{plant}_0_workers/trace").glob("*.pt.trace.json")
        traces[plant] = json.loads(path.read_text())
    draw(traces, HERE / "results/reading_profilers.png")


def main(argv: list[str] | None = None) -> list[dict]:
    """Look at the plants with all three profilers; return a row for each look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--plant",
        choices=PLANTS,
        help="look at this one and at the control (default: all)",
    )
    add("--steps", type=int, default=20, help="of each training (default: 20)")
    add("--patch-size", type=int, default=64, help="cells along a side (default: 64)")
    add("--num-workers", type=int, default=0, help="of the DataLoader (default: 0)")
    add(
        "--output-dir",
        type=Path,
        default=HERE / "outputs/reading_profilers",
        help="of what they write",
    )
    add(
        "--save-results",
        action="store_true",
        help="all plants, one in a worker, overhead, picture",
    )
    args = parser.parse_args(argv)
    traced = TIMED if args.save_results else TRACED
    least = {"steps": WAIT + WARM_UP + traced + 1, "patch_size": 4, "num_workers": 0}
    for name, number in least.items():
        if getattr(args, name) < number:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)}: give at least {number}"
            )
    if args.save_results and (args.plant or args.num_workers):
        parser.error(
            "--save-results: looks at all plants; leave out --plant and --num-workers"
        )
    if args.output_dir.is_file():
        parser.error(f"--output-dir {args.output_dir}: is a file; name a folder")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # what else runs on the machine then matters less
    fit(
        "none", None, args
    )  # what a process does once, such as loading libraries, is no step's
    plants = PLANTS if args.plant is None else dict.fromkeys(["none", args.plant])
    looks, rows = [(plant, args.num_workers) for plant in plants], []
    if args.save_results:
        looks.append(("data", 1))
    for plant, args.num_workers in looks:
        for kind in PROFILERS:
            rows.append(look(plant, kind, args))
            workers = f", {args.num_workers} worker" if args.num_workers else ""
            print(
                "\n".join(
                    [
                        f"plant: {plant}{workers}, profiler: {kind}",
                        *rows[-1]["excerpt"],
                        "",
                    ]
                )
            )
    if args.save_results:
        args.num_workers = 0
        rows += [row for plant in PLANTS for row in overhead(plant, args)]
        for row in rows[-len(PLANTS) * len(PROFILERS) :]:
            print(
                f"plant: {row['plant']}, {row['profiler']}: {row['median']:.2f} times the step's time"
            )
        flags = sys.argv[1:] if argv is None else argv
        save(rows, args, " ".join(["uv run python reading_profilers.py", *flags]))
    return rows


if __name__ == "__main__":
    main()
