"""How long a run takes that is interrupted: a formula, and a simulation that checks it.

Interruptions come at random, one after `between` hours on average, whatever came before. After
each the run starts again, which takes `restart` hours and may itself be interrupted. With a
notice the run saves before it ends. Without one it loses what it did since its last save.
"""

from dataclasses import dataclass
from math import expm1, inf, sqrt

import numpy as np


@dataclass(frozen=True)
class Interruptions:
    """When a run is stopped, and what that costs. All times are in hours."""

    between: float  # the mean time from one to the next
    noticed: float  # the share that comes with a notice long enough to save
    restart: float  # from an interruption to the first new step
    save: float  # what a checkpoint costs, all in all

    @property
    def between_losses(self) -> float:
        """The mean time between two interruptions that come without a notice."""
        unnoticed = 1 - self.noticed
        return self.between / unnoticed if unnoticed else inf


def best_interval(run: Interruptions) -> float:
    """The time between checkpoints that loses least, to first order (Young, 1974)."""
    return sqrt(2 * run.save * run.between_losses)


def expected_hours(work: float, interval: float, run: Interruptions) -> float:
    """The mean time to do `work` hours of training, with a checkpoint every `interval` hours.

    The mean time from one save to the next, or to an interruption, over the work that is
    kept in it. Without notices this is Daly's formula (2006). OverflowError or
    ZeroDivisionError if such a run would never end.
    """
    length = interval + run.save
    interrupted = -expm1(-length / run.between)  # the chance that it does not end
    # A restart that is interrupted begins again.
    restart = run.between * expm1(run.restart / run.between)
    hours = run.between * interrupted
    hours += interrupted * (restart + run.noticed * run.save)
    # Without a notice, only a segment that ends is kept; with one, all that was done.
    kept = (1 - run.noticed) * interval * (1 - interrupted)
    kept -= run.noticed * run.between * expm1(-interval / run.between)
    return work * hours / kept


def simulate_hours(
    work: float, interval: float, run: Interruptions, rng: np.random.Generator
) -> float:
    """The time that one run takes, interruption after interruption."""
    hours = 0.0
    done = 0.0  # of the work, and saved
    while True:
        left = work - done
        needed = left + run.save * left / interval
        until_stop = rng.exponential(run.between)
        if until_stop >= needed:
            return hours + needed
        hours += until_stop
        saves, since_save = divmod(until_stop, interval + run.save)
        done += saves * interval
        if rng.random() < run.noticed:
            done += min(since_save, interval)
            hours += run.save
        until_stop = rng.exponential(run.between)
        while until_stop < run.restart:
            hours += until_stop
            until_stop = rng.exponential(run.between)
        hours += run.restart


def mean_of_simulations(
    work: float, interval: float, run: Interruptions, runs: int = 400, seed: int = 0
) -> float:
    """The mean time of many simulated runs, in hours."""
    rng = np.random.default_rng(seed)
    times = [simulate_hours(work, interval, run, rng) for _ in range(runs)]
    return float(np.mean(times))
