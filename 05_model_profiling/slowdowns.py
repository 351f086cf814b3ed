"""Chapter 5: slow-downs, built in on purpose: does the profiler's report name them?

    uv run python slowdowns.py           # all of them and the controls, 5 minutes
    uv run python slowdowns.py copies    # one
    uv run --with traceml-ai python slowdowns.py --traceml --save-results   # and results/

You should see for each what the report names first, and for the controls that it names none.
The network is the chapter's; its loader brings the same batch again and again.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import xarray
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler
from torch.utils.data import DataLoader, IterableDataset

from checks import check_folder
from errors import refuse
from model import Batch, FillGaps, GroupNorm, masked_sums
from precision import has_bf16
from profiler import HERE, STEPS, Profile, profile_training
from results import RESULTS, save_rows
from step import make_batch
from trace_events import (
    COMPILING,
    DATA,
    READS,
    Trace,
    count_bytes,
    find_place,
    is_forward,
    load,
)
from traces import COPIES, OVERHEAD, SLOW

BATCH_SIZE = 16
PATCH_SIZE = 32
WITH_STACKS = ("control", "loop")  # what stacks cost: few operators, and many
FULL_BATCHES = 3  # then each batch of ragged_batches is smaller than the one before


class Batches(IterableDataset):
    """The same batch for each step, after `change(batch, step)`."""

    def __init__(self, steps: int, change: Callable[[Batch, int], Batch]):
        self.steps = steps
        self.change = change
        self.batch = make_batch(BATCH_SIZE, PATCH_SIZE)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            yield self.change(self.batch, step)


def keep(batch: Batch, step: int) -> Batch:
    return batch


def check_each_cell(batch: Batch, step: int) -> Batch:
    """A transform in Python: torch.isfinite looks at all cells in one call."""
    for _ in range(30):
        for value in batch["input"].flatten().tolist():
            if not -100 < value < 100:
                raise ValueError(f"{value} is no anomaly")
    return batch


def open_store(batch: Batch, step: int) -> Batch:
    """The store is opened for each sample and variable, to look up what never changes."""
    for _ in range(len(batch["input"])):
        for variable in ("u", "v"):
            with xarray.open_zarr(make_store().name, chunks=None) as store:
                store[variable].load()
    return batch


@cache
def make_store() -> tempfile.TemporaryDirectory:
    """A store of two numbers, which is removed when Python ends."""
    folder = tempfile.TemporaryDirectory()
    xarray.Dataset({"u": 2.0, "v": 3.0}).to_zarr(folder.name)
    return folder


def drop_samples(batch: Batch, step: int) -> Batch:
    """Batches of different sizes: a compiled network compiles again for each."""
    size = BATCH_SIZE - max(0, step - FULL_BATCHES)
    return {name: tensor[: max(1, size)] for name, tensor in batch.items()}


class ReadsValues(FillGaps):
    """Each cell is compared with a limit that is a tensor: its value is read each time."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        limit = self.std[0]
        within = 0
        for value in batch["target"].flatten().tolist():
            within += -limit.item() < value < limit.item()
        return super().training_step(batch, batch_idx)


class Copies(FillGaps):
    """The last block's input goes to float64 and back, over and over."""

    def on_fit_start(self) -> None:
        self.model.up1.register_forward_pre_hook(self.copy)

    @staticmethod
    def copy(block: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        x = inputs[0]
        for _ in range(150):
            x = x.double().float()
        return x


class SmallOperators(FillGaps):
    """The loss is added up row by row in Python. masked_sums needs a few operators."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        prediction = self.model(batch["input"])
        sums = torch.zeros(2)
        for sample in range(len(prediction)):
            for row in range(prediction.shape[2]):
                part = {name: each[sample, :, row] for name, each in batch.items()}
                sums = sums + masked_sums(prediction[sample, :, row], part)
        self.sums = self.sums + sums.detach()
        return sums[0]


class SlowNorm(FillGaps):
    """In bfloat16, without the model's own fix: GroupNorm in the order of the convolutions."""

    def on_fit_start(self) -> None:
        for module in self.modules():
            if isinstance(module, GroupNorm):
                module.plain_order = False


class Compiled(FillGaps):
    """Compiled for the shapes that it meets, with the compiler that needs no C++."""

    def on_fit_start(self) -> None:
        torch.compiler.reset()
        self.model.compile(backend="aot_eager", dynamic=False)


@dataclass(frozen=True)
class SlowDown:
    """A fault, and what the report should name first."""

    named: str
    module: type[FillGaps] = FillGaps
    change: Callable[[Batch, int], Batch] = keep
    precision: str = "32-true"


SLOW_DOWNS = {
    "control": SlowDown("none"),
    "transform": SlowDown(DATA, change=check_each_cell),
    "metadata": SlowDown("stores opened for each batch", change=open_store),
    "values": SlowDown(READS, ReadsValues),
    "copies": SlowDown(COPIES, Copies),
    "loop": SlowDown(OVERHEAD, SmallOperators),
    "ragged": SlowDown(COMPILING, Compiled, drop_samples),
    "control_bf16": SlowDown("none", precision="bf16-mixed"),
    "norm_bf16": SlowDown(SLOW, SlowNorm, precision="bf16-mixed"),
}


def fit(name: str, steps: int, profiler: Profiler | None) -> None:
    """Train with one of the slow-downs."""
    slow = SLOW_DOWNS[name]
    loader = DataLoader(Batches(steps, slow.change), batch_size=None)
    module = slow.module([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, steps, seed=0)
    trainer = Trainer(
        accelerator="cpu",
        precision=slow.precision,
        max_steps=steps,
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def profile(name: str, folder: Path) -> Profile:
    """Profile a training with one of the slow-downs."""
    return profile_training(
        lambda profiler: fit(name, STEPS, profiler), folder / name, name in WITH_STACKS
    )


def summarise(name: str, found: Profile) -> dict:
    """A profile as a row."""
    shares = {finding.cause: finding.share for finding in found.report.findings}
    return {
        "slow_down": name,
        "should_name": SLOW_DOWNS[name].named,
        "named": found.verdict,
        "shares": shares,
        "step_ms": found.step_ms,
        "cores_busy": found.cores_busy,
        "seconds": found.seconds,
    }


def first_turn(trace: Trace) -> list[dict]:
    """The events of one turn of the loop, with no more than read_trace needs of each."""
    forward = [event for event in trace.events if is_forward(event)]
    ends = sorted(event["ts"] + event["dur"] for event in forward)
    kept = []
    for event in trace.events:
        of_kind = event.get("cat") in ("cpu_op", "user_annotation", "kernel")
        if of_kind and event["ts"] < ends[1] and event["ts"] + event["dur"] >= ends[0]:
            small = {key: event[key] for key in ("name", "cat", "ph", "pid", "tid")}
            small["ts"] = round(event["ts"] - ends[0], 1)
            small["dur"] = round(event["dur"], 1)
            small["args"] = keep_args(event["args"])
            kept.append(small)
    return kept


def keep_args(args: dict) -> dict:
    """Of an event, the innermost line and the bytes, if it has them."""
    kept = {}
    if place := find_place(args.get("Call stack", "")):
        kept["Call stack"] = place
    if moved := count_bytes(args):
        kept["bytes"] = moved
    return kept


def save_trace(name: str, folder: Path) -> None:
    """Keep one turn of the loop in results/traces/."""
    trace = load(folder / name / "trace/rank_0.json.gz")
    content = {"machine": asdict(trace.machine), "traceEvents": first_turn(trace)}
    traces = RESULTS / "traces"
    traces.mkdir(exist_ok=True)
    text = json.dumps(content, separators=(",", ":"))
    (traces / f"{name}.json.gz").write_bytes(gzip.compress(text.encode()))


def ask_traceml(name: str) -> str:
    """What the package traceml-ai calls the same training, from its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["traceml", "run", __file__, "--logs-dir", folder, "--run-name", name]
        command += ["--args", "--train", name]
        subprocess.run(command, check=True, capture_output=True)
        (path,) = Path(folder).rglob("final_summary.json")
        return json.loads(path.read_text())["primary_diagnosis"]["status"]


def main(argv: list[str] | None = None) -> list[dict]:
    """Profile the slow-downs that are asked for; a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    listed = ", ".join(SLOW_DOWNS)
    add("names", nargs="*", metavar="NAME", help=f"of {listed}; if not given, all")
    add("--output-dir", type=Path, default=HERE / "outputs/slowdowns", help="a folder")
    add("--traceml", action="store_true", help="ask the package traceml-ai, too")
    add("--train", choices=SLOW_DOWNS, help="only train, without a profiler")
    add("--save-results", action="store_true", help="write results/slowdowns.json")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in SLOW_DOWNS:
            refuse(f"{name}: no such slow-down; choose from {listed}")
    if args.save_results and (args.names or not args.traceml):
        refuse("--save-results: give --traceml and no name; the table has both")
    if args.traceml and not shutil.which("traceml"):
        refuse("--traceml: not installed; uv run --with traceml-ai python slowdowns.py")
    check_folder("--output-dir", str(args.output_dir))
    if args.train:
        fit(args.train, 40, None)
        return []
    rows = []
    for name in args.names or SLOW_DOWNS:
        if SLOW_DOWNS[name].precision != "32-true" and not has_bf16(on_gpu=False):
            print(f"{name}: not run: no instructions for bfloat16")
            continue
        row = summarise(name, profile(name, args.output_dir))
        if args.traceml:
            row["traceml"] = ask_traceml(name)
        rows.append(row)
        print(
            f"{name}: {row['named']}, {row['step_ms']:.0f} ms a step, {row['shares']}"
        )
    if args.save_results:
        command = "uv run --with traceml-ai python slowdowns.py --traceml"
        save_rows("slowdowns", command, rows)
        for row in rows:
            save_trace(row["slow_down"], args.output_dir)
    return rows


if __name__ == "__main__":
    main()
