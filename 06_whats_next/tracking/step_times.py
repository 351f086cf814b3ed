"""The times of each rank's steps, logged and judged."""

import json
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from clock import StepClock, peak_memory_gb
from errors import print_note
from tracking.stragglers import COLUMNS, Verdict, judge, windows_to_judge


def read_clock(device: torch.device) -> "float | torch.cuda.Event":
    """A moment of this device. A GPU notes it when it gets there, and nothing waits."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(
    began: "float | torch.cuda.Event", ended: "float | torch.cuda.Event"
) -> float:
    """From one read_clock to another; waits until a GPU has come so far."""
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1000  # it counts milliseconds


def device_memory_gb(device: torch.device) -> float:
    """The most that this rank has held: on a GPU, or else in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_memory_gb()


class StepTimes(Callback):
    """Logs what each rank's steps consist of, and says which rank or loader is slow.

    The step takes equally long on all ranks, because in the backward pass the fast ones
    wait for the slow one. So ranks differ only before it: in their wait for data and in
    their forward pass. Several micro-batches of a step are added up.

    A GPU's forward pass is timed by events in its queue: the CPU's clock would only see
    how long it takes to launch the kernels. The device is waited for in logged steps only.
    """

    def __init__(self, folder: Path, batch_size: int, clock: StepClock):
        self.path = folder / "tracking.jsonl"
        self.batch_size = batch_size
        self.clock = clock  # comes before this callback, and times waits and steps
        self.forwards: list[tuple] = []
        self.batches = 0  # since the last window
        self.seconds = 0.0  # of these
        self.waits = 0.0
        self.told = Verdict()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.windows = deque(maxlen=windows_to_judge(trainer.world_size))
        self.first_step = trainer.global_step
        self.last_step = self.first_step
        if trainer.is_global_zero:
            delete_lines_after(self.path, self.first_step)

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.began = read_clock(module.device)

    def on_before_backward(
        self, trainer: Trainer, module: LightningModule, loss
    ) -> None:
        ended = read_clock(module.device)
        self.forwards.append((self.began, ended))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.batches += 1
        self.seconds += self.clock.last_seconds
        self.waits += self.clock.last_wait
        step = trainer.global_step
        if step == self.last_step:  # between the micro-batches of a step
            return
        self.last_step = step
        if step == self.first_step + 1:  # it starts everything up
            self.begin_window()
        elif step % trainer.log_every_n_steps == 0:
            self.end_window(trainer, module)

    def begin_window(self) -> None:
        self.forwards.clear()
        self.batches = 0
        self.seconds = 0.0
        self.waits = 0.0

    def end_window(self, trainer: Trainer, module: LightningModule) -> None:
        """Gather the means of all ranks since the last time, log them and judge them."""
        means = self.mean_seconds(trainer.accumulate_grad_batches)
        memory = device_memory_gb(module.device)
        ranks = self.gather(trainer, [*means, memory])
        window = ranks[:, : len(COLUMNS)]
        self.windows.append(window)
        values = name_columns(window) | self.totals(window)
        values["peak_memory_gb"] = ranks[:, -1].max()
        # Those that were applied; StepBoundary's norm is taken before they are divided.
        trained = [one for one in module.parameters() if one.grad is not None]
        gradients = [weights.grad for weights in trained]
        values["gradient_norm"] = torch.nn.utils.get_total_norm(gradients)
        module.log_dict(values)
        # Ranks whose slices of the batch differ in size differ in time, too.
        is_fair = self.batch_size % trainer.world_size == 0
        if trainer.is_global_zero and is_fair:
            self.tell(judge(list(self.windows)), trainer.global_step)

    def mean_seconds(self, accumulate_grad_batches: int) -> list[float]:
        """COLUMNS of this rank, on average over the steps since the last time."""
        steps = self.batches / accumulate_grad_batches
        forward = sum(seconds_between(*pair) for pair in self.forwards)
        means = [self.waits / steps, forward / steps, self.seconds / steps]
        self.begin_window()
        return means

    def gather(self, trainer: Trainer, values: list[float]) -> np.ndarray:
        """The values of all ranks, (ranks, values)."""
        mine = torch.tensor(values, device=trainer.strategy.root_device)
        ranks = trainer.strategy.all_gather(mine)
        return ranks.view(trainer.world_size, -1).cpu().numpy()

    def totals(self, window: np.ndarray) -> dict[str, float]:
        """Speed of the whole run, and the share of its time that waits for data."""
        wait, _, step = window.mean(axis=0)
        return {
            "samples_per_second": self.batch_size / step,
            "data_wait_share": wait / step,
        }

    def tell(self, verdict: Verdict, step: int) -> None:
        """Write a verdict to the file, and print it if it is another than before."""
        line = {"step": step} | asdict(verdict)
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)
        before = (self.told.finding, self.told.rank)
        self.told = verdict
        if (verdict.finding, verdict.rank) != before:
            print_note(f"step {step}: {verdict.text}")


def name_columns(window: np.ndarray) -> dict[str, float]:
    """A window's values under names that TensorBoard groups by what stands before the /."""
    names: dict[str, float] = {}
    for rank, row in enumerate(window):
        for column, value in zip(COLUMNS, row):
            names[f"{column}/rank_{rank}"] = value
    return names


def delete_lines_after(path: Path, step: int) -> None:
    """Drop the lines of steps that this run takes again, and one that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    path.write_text("".join(kept))
