"""Chapter 6: how long training waits for a checkpoint, and how often to save.

    uv run python -m studies.saving                  # about two minutes
    uv run python -m studies.saving --save-results   # and results/saving.json

You should see the wait of four ways to save, for the book's network and for one of 50
million parameters, and the interval at which all of saving costs 2% of the time.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from matplotlib.figure import Figure

from model import UNet
from results import RESULTS, save_rows, spread
from survival.checkpoints import BackgroundWriter, CheckpointFolder, Staging, step_name

WIDTHS = {"this network": 24, "50 million parameters": 328}
PATCH_SIZES = {"this network": 64, "50 million parameters": 16}
BATCH_SIZES = {"this network": 8, "50 million parameters": 1}
BLUE = "#0072B2"
SHARE = 0.02  # of the time, for saving


class Training:
    """A network, and steps on random numbers."""

    def __init__(self, width: int, patch_size: int, batch_size: int):
        torch.manual_seed(0)
        self.network = UNet(2, width=width)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), fused=True)
        self.inputs = torch.randn(batch_size, 3, patch_size, patch_size)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(self.inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict:
        """What a checkpoint of it has."""
        moments = self.optimizer.state_dict()
        return {"state_dict": self.network.state_dict(), "optimizer_states": [moments]}


def time_call(call: Callable, *given) -> float:
    began = perf_counter()
    call(*given)
    return perf_counter() - began


def save_in_the_step(training: Training, folder: Path) -> tuple[float, float]:
    """Lightning's own: serialise and write, while training waits. (Wait, until written.)"""
    path = str(folder / "plain.ckpt")
    seconds = time_call(TorchCheckpointIO().save_checkpoint, training.state(), path)
    return seconds, seconds


def save_by_lightnings_thread(training: Training, folder: Path) -> tuple[float, float]:
    """Lightning's AsyncCheckpointIO: a copy in new memory, then a thread."""
    path = str(folder / "async.ckpt")
    writer = AsyncCheckpointIO(TorchCheckpointIO())
    began = perf_counter()
    writer.save_checkpoint(training.state(), path)
    wait = perf_counter() - began
    writer.teardown()  # waits for the thread
    return wait, perf_counter() - began


def save_here(
    training: Training, folder: Path, staging: Staging
) -> tuple[float, float]:
    """This chapter's: a copy, then a thread that writes and reads back."""
    writer = BackgroundWriter(CheckpointFolder(str(folder)), keep=1)
    writer.staging = staging
    began = perf_counter()
    writer.save_checkpoint(training.state(), step_name(1))
    wait = perf_counter() - began
    writer.finish()
    return wait, perf_counter() - began


def cost_of_a_save(training: Training, folder: Path, staging: Staging) -> dict:
    """Seconds that a save costs in all: its wait, and slower steps beside the thread.

    Steps without a save and steps with one, as many as it takes to write, in turn.
    """
    save = save_here(training, folder, staging)
    step = median(time_call(training.step) for _ in range(3))
    steps = max(2, round(1.5 * save[1] / step))
    writer = BackgroundWriter(CheckpointFolder(str(folder)), keep=1)
    writer.staging = staging
    began = perf_counter()
    for _ in range(steps):
        training.step()
    without = perf_counter() - began
    began = perf_counter()
    writer.save_checkpoint(training.state(), step_name(1))
    for _ in range(steps):
        training.step()
    with_save = perf_counter() - began
    writer.finish()
    return {"cost": with_save - without, "step": without / steps}


def study(name: str, repeats: int, folder: Path) -> list[dict]:
    """The rows of one network: each way to save, and the interval that costs 2%."""
    training = Training(WIDTHS[name], PATCH_SIZES[name], BATCH_SIZES[name])
    parameters = sum(weights.numel() for weights in training.network.parameters())
    kept = Staging()
    ways = {
        "in the step": lambda: save_in_the_step(training, folder),
        "Lightning's thread": lambda: save_by_lightnings_thread(training, folder),
        "here, the first save": lambda: save_here(training, folder, Staging()),
        "here, every later save": lambda: save_here(training, folder, kept),
    }
    measured = {way: [] for way in ways}
    costs = []
    for repeat in range(repeats + 1):
        for way, save in ways.items():
            gc.collect()
            seconds = save()
            if repeat:  # the first round fills caches, and the memory that is kept
                measured[way].append(seconds)
        cost = cost_of_a_save(training, folder, kept)
        if repeat:
            costs.append(cost)
    rows = []
    for way, seconds in measured.items():
        waits, totals = zip(*seconds)
        row = {"network": name, "parameters": parameters, "way": way}
        row |= {"wait_ms": spread([1000 * wait for wait in waits])}
        row |= {"written_ms": spread([1000 * total for total in totals])}
        rows.append(row)
    cost = median(each["cost"] for each in costs)
    interval = max(0, cost) / SHARE
    row = {"network": name, "parameters": parameters, "way": "interval"}
    row |= {"cost_ms": spread([1000 * each["cost"] for each in costs])}
    row |= {"step_ms": 1000 * median(each["step"] for each in costs)}
    row |= {"interval_seconds": interval}
    return [*rows, row]


def draw(rows: list[dict]) -> Figure:
    """The wait of each way to save, with its range, for both networks."""
    waits = [row for row in rows if row["way"] != "interval"]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), WIDTHS):
        shown = [row for row in waits if row["network"] == name]
        for height, row in enumerate(reversed(shown)):
            wait = row["wait_ms"]
            axes.hlines(height, wait["min"], wait["max"], color=BLUE, linewidth=2)
            axes.plot(wait["median"], height, "o", color=BLUE, markersize=8)
        ways = [row["way"] for row in reversed(shown)]
        axes.set_yticks(range(len(ways)), ways)
        axes.set_xscale("log")
        axes.set_xlim(1, 5000)
        axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        axes.minorticks_off()
        axes.set_xlabel("training waits, ms")
        axes.set_title(name)
        axes.grid(axis="x", alpha=0.3)
    return figure


def print_rows(rows: list[dict]) -> None:
    for row in rows:
        if row["way"] == "interval":
            cost = row["cost_ms"]["median"]
            seconds = row["interval_seconds"]
            text = f"a save costs {cost:.0f} ms in all"
            print(
                f"{row['network']}: {text}; every {seconds:.1f} s it costs {SHARE:.0%}"
            )
            continue
        wait = row["wait_ms"]
        spread_of_wait = f"({wait['min']:.1f} to {wait['max']:.1f})"
        written = row["written_ms"]["median"]
        print(f"{row['network']:22} {row['way']:23}", end="")
        print(
            f"{wait['median']:8.1f} ms {spread_of_wait}, written after {written:.0f} ms"
        )


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds, ways in turn")
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    rows = []
    for name in WIDTHS:
        with tempfile.TemporaryDirectory() as folder:
            found = study(name, args.repeats, Path(folder))
        print_rows(found)
        rows += found
    if args.save_results:
        save_rows("saving", "uv run python -m studies.saving --save-results", rows)
        draw(rows).savefig(RESULTS / "saving.png", dpi=120)
    return {"rows": len(rows)}


if __name__ == "__main__":
    main()
