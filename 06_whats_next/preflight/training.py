"""Whether a batch can be learnt, and the loader keeps up."""

from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from preflight.findings import Finding
from task import compute_loss

OVERFIT_STEPS = 100
OVERFIT_SAMPLES = 8
FIRST_STEPS = 8  # of the loader, that are left out: it starts up
STEPS = 32
BUDGET = 30.0  # seconds
WORTHWHILE = 1.1  # times faster without any wait: below it, leave the loader alone


@dataclass(frozen=True)
class Trial:
    """A network that this rank trains for some steps by itself, to be thrown away."""

    module: LightningModule
    optimizer: torch.optim.Optimizer
    fabric: Fabric

    def step(self, batch: Any) -> float:
        """One step; the loss before it. It waits for the device."""
        batch = self.fabric.to_device(batch)
        with self.fabric.autocast():
            loss = compute_loss(self.module, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict:
        """What a run's checkpoint has, apart from Lightning's own entries."""
        moments = self.optimizer.state_dict()
        return {"state_dict": self.module.state_dict(), "optimizer_states": [moments]}


def make_trial(module: LightningModule, fabric: Fabric, rate: float) -> Trial:
    """The network on its device, with AdamW at this learning rate."""
    module.to(fabric.device)
    trained = [weights for weights in module.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    for weights in trained:
        weights.grad = torch.zeros_like(weights)
    optimizer.step()  # from now on it has its moments, as in a run's checkpoint
    return Trial(module, optimizer, fabric)


def overfit(trial: Trial, batch: Any) -> list[float]:
    """The losses of a run of a few steps, with its warm-up, all with the same batch."""
    warmup = OVERFIT_STEPS // 10
    schedule = torch.optim.lr_scheduler.LinearLR(
        trial.optimizer, start_factor=1 / warmup, total_iters=warmup
    )
    losses = []
    for _ in range(OVERFIT_STEPS):
        losses.append(trial.step(batch))
        schedule.step()
    return losses


def judge_overfit(losses: list[float], learning_rate: float) -> Finding:
    """Red if a network cannot learn even a few samples by heart."""
    text = f"the loss on one batch goes from {losses[0]:.3f} to {losses[-1]:.3f}"
    text += f" in {len(losses)} steps"
    flag = f"--learning-rate {learning_rate:g}"
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        text += f"; it is not finite from step {bad[0]} on"
        remedy = f"give less than {flag}, or --precision 32-true"
        return Finding("one batch", text, remedy)
    if losses[-1] < 0.5 * losses[0]:
        return Finding("one batch", text)
    text += ", and should halve"
    remedy = f"try a tenth of {flag}, then ten times that; else look at the batch"
    return Finding("one batch", text, remedy)


@dataclass(frozen=True)
class Pace:
    """Seconds of a step on average: its wait for a batch, and its work."""

    steps: int
    waiting: float
    working: float


def measure_pace(trial: Trial, loader: DataLoader) -> Pace:
    """Train for some steps with the real loader."""
    waits, works = [], []
    end = perf_counter() + BUDGET
    asked = perf_counter()
    for batch in islice(loader, FIRST_STEPS + STEPS):
        given = perf_counter()
        trial.step(batch)
        waits.append(given - asked)
        asked = perf_counter()
        works.append(asked - given)
        if asked > end:
            break
    start = min(FIRST_STEPS, len(waits) - 1)
    waits = waits[start:]
    works = works[start:]
    return Pace(len(waits), float(np.mean(waits)), float(np.mean(works)))


def judge_pace(
    pace: Pace, batch_bytes: float, bandwidth: float, patches_per_block: int
) -> Finding:
    """Red if the training waits for data; the remedy depends on what is slow.

    `batch_bytes` are read for a batch of this rank, at `bandwidth` bytes a second at best.
    """
    speedup = (pace.waiting + pace.working) / pace.working
    share = 1 - 1 / speedup
    text = (
        f"a step waits {1e3 * pace.waiting:.1f} ms and works {1e3 * pace.working:.1f}"
    )
    text += f" ms: {share:.0%} of the time is waiting ({pace.steps} steps)"
    if pace.steps < STEPS / 2:
        return Finding("loader", f"{text}, too few to judge: others use this machine?")
    if speedup < WORTHWHILE:
        return Finding("loader", text)
    needed = batch_bytes / pace.working
    if needed < bandwidth:
        remedy = "the store is not the limit: compare two or three --num-workers"
        return Finding("loader", text, remedy)
    text += f"; the step could use {needed / 1e6:.1f} MB/s"
    text += f", and the store gives {bandwidth / 1e6:.1f}"
    enough = int(np.ceil(patches_per_block * needed / bandwidth))
    remedy = (
        f"a nearer store; or --patches-per-block {enough}, which reads and mixes less"
    )
    return Finding("loader", text, remedy)
