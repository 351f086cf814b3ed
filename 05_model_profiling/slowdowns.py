"""Chapter 5: six slow-downs, built in on purpose: does the profiler's report name them?

    uv run python slowdowns.py                  # all of them and a control, 3 minutes
    uv run python slowdowns.py copies           # one
    uv run python slowdowns.py --save-results   # and write results/slowdowns.json

You should see for each what the report names first, and for the control that it names none.
The network is the chapter's; its loader brings the same batch again and again.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xarray
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler
from torch.utils.data import DataLoader, IterableDataset

from model import Batch, FillGaps, masked_sums
from options import refuse
from profiler import HERE, STEPS, Profile, profile_training
from records import save_rows
from step import make_batch
from traces import COMPILING, COPIES, DATA, OVERHEAD, READS

BATCH_SIZE = 16
PATCH_SIZE = 32
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


def open_store(folder: str, batch: Batch, step: int) -> Batch:
    """The store is opened for each sample and variable, to look up what never changes."""
    for _ in range(len(batch["input"])):
        for variable in ("u", "v"):
            with xarray.open_zarr(folder, chunks=None) as store:
                store[variable].load()
    return batch


def drop_samples(batch: Batch, step: int) -> Batch:
    """Batches of different sizes: a compiled network compiles again for each."""
    size = BATCH_SIZE - max(0, step - FULL_BATCHES)
    return {name: tensor[: max(1, size)] for name, tensor in batch.items()}


class ReadsValues(FillGaps):
    """The largest anomaly is looked for in Python: abs().max() has one value to read."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        largest = 0.0
        for value in batch["target"].flatten():
            largest = max(largest, abs(value.item()))
        return super().training_step(batch, batch_idx)


class Copies(FillGaps):
    """The last block's input goes to float64 and back, over and over."""

    def on_fit_start(self) -> None:
        self.model.up1.register_forward_pre_hook(self.copy)

    @staticmethod
    def copy(block: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        x = inputs[0]
        for _ in range(30):
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
    change: Callable[..., Batch] = keep


SLOW_DOWNS = {
    "control": SlowDown("none"),
    "transform": SlowDown(DATA, change=check_each_cell),
    "metadata": SlowDown("stores opened for each batch", change=open_store),
    "values": SlowDown(READS, ReadsValues),
    "copies": SlowDown(COPIES, Copies),
    "loop": SlowDown(OVERHEAD, SmallOperators),
    "ragged": SlowDown(COMPILING, Compiled, drop_samples),
}


def fit(name: str, store: str, steps: int, profiler: Profiler | None) -> None:
    """Train with one of the slow-downs."""
    slow = SLOW_DOWNS[name]
    change = (
        functools.partial(slow.change, store) if name == "metadata" else slow.change
    )
    loader = DataLoader(Batches(steps, change), batch_size=None)
    module = slow.module([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, steps, seed=0)
    trainer = Trainer(
        accelerator="cpu",
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
    with tempfile.TemporaryDirectory() as store:
        xarray.Dataset({"u": 2.0, "v": 3.0}).to_zarr(store)
        return profile_training(
            lambda profiler: fit(name, store, STEPS, profiler), folder / name
        )


def main(argv: list[str] | None = None) -> list[dict]:
    """Profile the slow-downs that are asked for; a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    listed = ", ".join(SLOW_DOWNS)
    add("names", nargs="*", metavar="NAME", help=f"of {listed}; if not given, all")
    add("--output-dir", type=Path, default=HERE / "outputs/slowdowns", help="a folder")
    add("--save-results", action="store_true", help="write results/slowdowns.json")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in SLOW_DOWNS:
            refuse(f"{name}: no such slow-down; choose from {listed}")
    rows = []
    for name in args.names or SLOW_DOWNS:
        found = profile(name, args.output_dir)
        shares = {each.cause: each.share for each in found.report.findings}
        row = {"slow_down": name, "should_name": SLOW_DOWNS[name].named}
        row |= {"named": found.verdict, "step_ms": found.step_ms, "shares": shares}
        rows.append(row)
        print(f"{name}: {found.verdict}, {found.step_ms:.0f} ms a step, {shares}")
    if args.save_results:
        save_rows("slowdowns", "uv run python slowdowns.py", rows)
    return rows


if __name__ == "__main__":
    main()
