"""Runs train.py's main with faults injected in rank 1: for rehearsal.py.

    python -m studies.rehearsal_worker FOLDER FLAGS ...

FOLDER keeps what has happened already, so that a fault that ends a start comes once.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import model
import train

TARGET = 1  # the rank
KILLED_AT = 33
BAD_AT = 57
SLOW = range(70, 130)  # steps
DELAY = 0.25  # seconds


def happens_once(marker: Path) -> bool:
    """Whether this is the first call for a marker, in any process."""
    if marker.exists():
        return False
    marker.touch()
    return True


def inject_faults(folder: Path) -> None:
    """Let the training step kill, spoil its batch, or sleep, depending on the step."""
    step_as_it_is = model.FillGaps.training_step

    def step_with_faults(
        self: model.FillGaps, batch: model.Batch, batch_idx: int
    ) -> torch.Tensor:
        step = self.trainer.global_step
        if step == KILLED_AT and happens_once(folder / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == BAD_AT and happens_once(folder / "spoiled"):
            batch["target"] = batch["target"] * torch.inf
        if step in SLOW:
            time.sleep(DELAY)
        return step_as_it_is(self, batch, batch_idx)

    model.FillGaps.training_step = step_with_faults


if __name__ == "__main__":
    if int(os.environ.get("LOCAL_RANK", 0)) == TARGET:
        inject_faults(Path(sys.argv[1]))
    train.run(lambda: train.main(sys.argv[2:]))
