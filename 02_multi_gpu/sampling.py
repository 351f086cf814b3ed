"""Which sample is which: pure functions of (seed, step, k), and a satellite's swaths.

There is no state to save or lose. Whoever asks for sample k of a step gets the same time,
the same corner and the same swaths: any rank, any worker, any resumed run.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Numbers of the random streams: each use has its own, so that a new one shifts none.
ORDER_STREAM = 1
PATCH_STREAM = 2

# In cells. At 2.5 degrees, 10 cells are the 25 degrees of longitude between successive
# tracks of a polar orbiter, and 4 cells a swath of 1,100 km. On a finer grid they stand for
# more and narrower instruments.
TRACK_SPACING = 10
TRACK_SLOPE = 0.22
SWATH_WIDTH = 4
LOST_PASSES = 1 / 8


class PatchSpace(NamedTuple):
    """Where patches may begin, in `rows` x `columns` corners, and their `size` in cells."""

    rows: int
    columns: int
    size: int


class Patch(NamedTuple):
    """One patch: its time among those of a period, its first cell, and its swaths."""

    time: int
    row: int
    column: int
    seen: np.ndarray  # (size, size), True where the satellite looks


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_times: int) -> np.ndarray:
    """The order in which an epoch visits the times, (n_times,): each of them once."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(n_times)


def sample(
    seed: int, step: int, k: int, *, batch_size: int, n_times: int, space: PatchSpace
) -> Patch:
    """Sample k of a step."""
    epoch, position = divmod(step * batch_size + k, n_times)
    time = epoch_order(seed, epoch, n_times)[position]
    rng = np.random.default_rng((PATCH_STREAM, seed, step, k))
    patches = draw_patches(rng, np.array([time]), space)
    return patches[0]


def draw_patches(
    rng: np.random.Generator, times: np.ndarray, space: PatchSpace
) -> list[Patch]:
    """A patch of each of these times."""
    n = len(times)
    rows = rng.integers(space.rows, size=n)
    columns = rng.integers(space.columns, size=n)
    seen = swath_masks(rng, n, space.size)
    return [Patch(*each) for each in zip(times, rows, columns, seen)]


def swath_masks(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """True where the satellite looks, (n, size, size), some of its passes lost.

    Every row of a mask sees the same line of passes, shifted by as many cells as the
    track leans there.
    """
    slope = rng.choice((-TRACK_SLOPE, TRACK_SLOPE), (n, 1))
    start = rng.uniform(0, TRACK_SPACING, (n, 1))
    track = slope * np.arange(size) + start
    first = np.floor(track).astype(int)  # of each row
    leftmost = first.min(axis=1, keepdims=True)
    first -= leftmost // TRACK_SPACING * TRACK_SPACING

    cells = np.arange(first.max() + size)
    orbit, offset = np.divmod(cells, TRACK_SPACING)
    inside = offset < SWATH_WIDTH
    lost = rng.random((n, orbit[-1] + 1)) < LOST_PASSES
    line = inside & ~lost[:, orbit]
    lines = sliding_window_view(line, size, axis=1)
    seen = lines[np.arange(n)[:, None], first]

    few = seen.sum(axis=(1, 2)) < size  # a small patch may have lost every pass
    seen[few] = sliding_window_view(inside, size)[first[few]]
    return seen
