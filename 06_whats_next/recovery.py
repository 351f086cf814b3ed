"""A loss that is not finite, or a spike: which batches to leave out, and the order without them."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from block_loader import BlockOrder

REMEMBERED = 50  # losses, of which the median is what a spike is measured against


class Window(NamedTuple):
    """Batches that a run leaves out: those from `first` on, and before `stop`."""

    first: int
    stop: int


class BadLoss(Exception):
    """The loss of a step is not finite, or a spike."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"loss {loss:.3g} at step {step}")
        self.step = step


def batch_number(step: int, skipped: tuple[Window, ...]) -> int:
    """The batch that a step trains on: later steps move up by as many as are left out."""
    number = step
    for window in sorted(skipped):
        if number >= window.first:
            number += window.stop - window.first
    return number


@dataclass(frozen=True)
class SkippingOrder(BlockOrder):
    """An order that leaves out some batches. It is still a function of (step, k)."""

    skipped: tuple[Window, ...] = ()

    def address(self, step: int, k: int) -> tuple[int, int]:
        return super().address(batch_number(step, self.skipped), k)


class LossHistory:
    """The last losses, and a rule for a bad one.

    Bad is a loss that is not finite, or above `spike_factor` times the median of the last
    REMEMBERED losses, once there are as many.
    """

    def __init__(self, spike_factor: float):
        self.spike_factor = spike_factor
        self.losses: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, step: int, loss: float) -> None:
        """Remember the loss of a step; BadLoss if it is bad."""
        if not math.isfinite(loss):
            raise BadLoss(step, loss)
        if len(self.losses) == REMEMBERED:
            limit = self.spike_factor * median(self.losses)
            if loss > limit:
                raise BadLoss(step, loss)
        self.losses.append(loss)
