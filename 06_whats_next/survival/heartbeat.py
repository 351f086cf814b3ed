"""Where each rank is, so that the others can say which one is missing, and where it was."""

import faulthandler
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from ending import is_of_group

LINE_BYTES = 400
# What a rank does within a step, in this order.
DOING = (
    "validating",
    "waiting for data",
    "in the forward pass",
    "in the backward pass",
    "updating",
)

LOST = "ended because it had lost another rank"


class Heartbeat(Callback):
    """Writes where this rank is to ranks/rank_N.json, a few times a step.

    A rank that stays in one place for about one and a half times `timeout` seconds prints
    its stack and ends, whatever it hangs in: a thread of the interpreter's sees to it.
    """

    def __init__(self, folder: Path, timeout: float):
        self.folder = folder / "ranks"
        self.patience = 1.5 * timeout
        self.file: int | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{trainer.global_rank}.json"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.last_armed = -math.inf
        self.mark(trainer, "waiting for data")

    def mark(self, trainer: Trainer, doing: str) -> None:
        """Note the step and what this rank does now. One system call, no rename."""
        place = {"step": trainer.global_step, "doing": doing, "since": time.time()}
        place |= {"host": socket.gethostname(), "pid": os.getpid()}
        line = json.dumps(place)[:LINE_BYTES].ljust(LINE_BYTES)
        os.pwrite(self.file, line.encode(), 0)
        now = time.monotonic()
        if now - self.last_armed > self.patience / 10:  # each time starts a thread anew
            self.last_armed = now
            stderr = sys.__stderr__  # a notebook's has no file
            faulthandler.dump_traceback_later(self.patience, exit=True, file=stderr)

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.mark(trainer, "in the forward pass")

    def on_before_backward(
        self, trainer: Trainer, module: LightningModule, loss
    ) -> None:
        self.mark(trainer, "in the backward pass")

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer
    ) -> None:
        self.mark(trainer, "updating")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.mark(trainer, "waiting for data")

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.mark(trainer, "validating")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.mark(trainer, "waiting for data")

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        if self.file is not None:
            lost = isinstance(exception, RuntimeError) and is_lost_rank(exception)
            ending = LOST if lost else f"ended by {type(exception).__name__}"
            self.mark(trainer, ending)
        faulthandler.cancel_dump_traceback_later()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        faulthandler.cancel_dump_traceback_later()


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a process group has failed, and so another rank."""
    return is_of_group(error) and distributed.is_initialized()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_lost_rank(folder: Path) -> str:
    """Which of the other ranks is missing, and where it was, in one line.

    One that noted its own end; else one whose process is gone; else the one furthest behind.
    Not one that has itself ended because of another.
    """
    others = set(range(distributed.get_world_size())) - {distributed.get_rank()}
    places = {}
    for other in others:
        path = folder / "ranks" / f"rank_{other}.json"
        if not path.exists():
            continue
        place = json.loads(path.read_text())
        if place["doing"] != LOST:
            places[other] = place
    if not places:
        return "another rank is missing, and has noted nothing"

    def badness(other: int) -> tuple:
        place = places[other]
        doing = place["doing"]
        ended = doing.startswith("ended")
        here = place["host"] == socket.gethostname()
        gone = here and not is_alive(place["pid"])
        order = DOING.index(doing) if doing in DOING else -1
        return ended, gone, -place["step"], -order

    worst = max(places, key=badness)
    place = places[worst]
    ended, gone, *_ = badness(worst)
    if ended:
        return f"rank {worst} {place['doing']} at step {place['step']}"
    seconds = time.time() - place["since"]
    where = f"at step {place['step']}, {place['doing']}, for {seconds:.0f} s"
    state = "is gone; it was" if gone else "does not answer; it is"
    return f"rank {worst} (process {place['pid']} on {place['host']}) {state} {where}"
