"""How fast a run is, how long it waits for data, and how much memory it takes."""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from time import perf_counter, time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from psutil import Process
from torch.utils.data import DataLoader


class TimedLoader(DataLoader):
    """A DataLoader that notes how many seconds the loop waited for the last batch."""

    last_wait = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self.time_each(super().__iter__())  # starts the workers now

    def time_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each timed."""
        while True:
            began = perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.last_wait = perf_counter() - began
            yield batch


@lru_cache(maxsize=1)
def startup_seconds() -> float:
    """Seconds from the start of this process to the first call of this function."""
    return time() - Process().create_time()


class StepClock(Callback):
    """Times the loop by the wall clock, without its first step, which starts everything up.

    Seconds of a batch go from the end of the batch before to its own end, so that they
    include the wait for data, the copy to the device, the step and what is logged.
    """

    def __init__(self):
        self.last_seconds = 0.0  # of the last batch
        self.last_wait = 0.0
        self.seconds = 0.0  # of all batches after those of the first step
        self.waits = 0.0
        self.batches = 0
        self.batches_per_step = 1
        self.mark = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.batches_per_step = trainer.accumulate_grad_batches
        self.mark = perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch, batch_idx: int
    ) -> None:
        startup_seconds()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        now = perf_counter()
        self.last_seconds = now - self.mark
        self.last_wait = trainer.train_dataloader.last_wait
        self.mark = now
        self.batches += 1
        if self.batches > self.batches_per_step:
            self.seconds += self.last_seconds
            self.waits += self.last_wait

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.mark = perf_counter()

    def throughput(self, batch_size: int) -> dict[str, float]:
        """Seconds before the first step, samples/s, and the share of time spent waiting.

        After one step only the first is known, and after none {}.
        """
        if not self.batches:
            return {}
        steps = self.batches / self.batches_per_step - 1
        found = rates(batch_size * steps, self.seconds, self.waits)
        return {"startup_seconds": startup_seconds()} | found


def rates(samples: float, seconds: float, waits: float) -> dict[str, float]:
    """Samples/s, and the share of the time spent waiting; {} without a sample."""
    if samples <= 0:
        return {}
    return {"samples_per_second": samples / seconds, "data_wait_share": waits / seconds}


def peak_memory_gb() -> float:
    """The most that this process has held; NaN on Windows."""
    with suppress(ImportError):
        import resource

        unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return math.nan
