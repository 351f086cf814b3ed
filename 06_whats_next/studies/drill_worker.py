"""Runs another script's main, and sends a SIGTERM at a chosen moment: for drills.py.

    python studies/drill_worker.py FOLDER EVENT SCRIPT FLAGS ...

The signal goes to rank 1, or to torchrun itself. FOLDER then has the time of the signal,
and the steps that each rank took.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_full_backward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

TARGET = 1  # the rank that gets the signal
AT_STEP = 13
AT_SAVE = 1
AT_MODULE = 5  # of the backward pass


class Drill:
    """Counts steps and sends one signal."""

    def __init__(self, folder: Path, event: str):
        self.folder = folder
        self.event = event
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.steps = 0
        self.modules = 0
        self.saves = 0
        (folder / f"pid_{self.rank}").write_text(str(os.getpid()))

    def count_step(self, *given) -> None:
        self.steps += 1
        (self.folder / f"steps_{self.rank}").write_text(str(self.steps))

    def send(self, pid: int) -> None:
        (self.folder / "signalled").write_text(str(time.time()))
        os.kill(pid, signal.SIGTERM)

    def before_step(self, *given) -> None:
        """In the target rank, before one of its steps."""
        if self.rank != TARGET or self.steps != AT_STEP:
            return
        if self.event == "step":
            self.send(os.getpid())
        if self.event == "torchrun":
            self.send(os.getppid())

    def in_backward(self, *given) -> None:
        """In the target rank, in the middle of a backward pass."""
        if self.rank != TARGET or self.steps != AT_STEP or self.event != "backward":
            return
        self.modules += 1
        if self.modules == AT_MODULE:
            self.send(os.getpid())

    def in_save(self, save: Callable) -> Callable:
        """`save`, during whose second call the target rank gets the signal."""

        def save_and_signal(*given, **named) -> None:
            save(*given, **named)
            if self.event == "save" and self.saves == AT_SAVE:
                self.send(int((self.folder / f"pid_{TARGET}").read_text()))
                time.sleep(0.3)
            self.saves += 1

        return save_and_signal


def main() -> None:
    folder, event, script, *flags = sys.argv[1:]
    drill = Drill(Path(folder), event)
    register_optimizer_step_pre_hook(drill.before_step)
    register_optimizer_step_post_hook(drill.count_step)
    register_module_full_backward_pre_hook(drill.in_backward)
    torch.save = drill.in_save(torch.save)
    # The modules of the script, not of this file.
    sys.path[0] = str(Path(script).parent)
    train = importlib.import_module("train")
    train.run(lambda: train.main(flags))


if __name__ == "__main__":
    main()
