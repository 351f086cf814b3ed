"""Which loss is bad: one that is not finite, or a spike."""

import math
from collections import deque
from statistics import median

REMEMBERED = 50  # losses, of which the median is what a spike is measured against


class BadLoss(Exception):
    """The loss of a step is not finite, or a spike."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"loss {loss:.3g} at step {step}")
        self.step = step


class LossHistory:
    """The last losses, and a rule for a bad one.

    Bad is a loss that is not finite, or above `spike_factor` times the median of the last
    REMEMBERED losses, once there are as many and the median is above 0.
    """

    def __init__(self, spike_factor: float):
        self.spike_factor = spike_factor
        self.losses: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, step: int, loss: float) -> None:
        """Remember the loss of a step; BadLoss if it is bad."""
        if not math.isfinite(loss):
            raise BadLoss(step, loss)
        if len(self.losses) == REMEMBERED:
            usual = median(self.losses)
            # A loss that may be negative, such as a log-likelihood, has no spikes.
            if 0 < usual * self.spike_factor < loss:
                raise BadLoss(step, loss)
        self.losses.append(loss)
