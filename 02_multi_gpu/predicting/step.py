"""A step of DDP: the slowest device's compute, and the all-reduce that is not hidden."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MIB = 2**20


@dataclass(frozen=True)
class Overlap:
    """How DDP overlaps its all-reduces with the backward pass.

    backward_share: of the compute time; the backward pass has twice the forward's work.
    bucket_mb: MiB in a bucket, DDP's bucket_cap_mb; without it, DDP's defaults.
    """

    backward_share: float
    bucket_mb: float | None


def predict_step(
    compute: float,
    gradient_bytes: float,
    all_reduce: Callable[[float], float],
    overlap: Overlap,
) -> tuple[float, float]:
    """Seconds of a step, and how many of them its all-reduces are not hidden.

    compute: seconds of the slowest device. `all_reduce(bytes)` gives seconds.
    """
    sizes = bucket_sizes(gradient_bytes, overlap.bucket_mb)
    backward = overlap.backward_share * compute
    exposed = exposed_seconds(backward, sizes, all_reduce)
    return compute + exposed, exposed


def expected_slowest(seconds: np.ndarray, devices: int) -> float:
    """The expected time of the slowest of N devices, which draw from `seconds`, (n,).

    Each device draws independently. Exact, from the order statistics of the sample: the
    largest of N draws is at most the i-th smallest of n with probability (i/n)**N. The
    result can never exceed the slowest step that was measured.
    """
    ordered = np.sort(seconds)
    ranks = np.arange(len(ordered) + 1)
    at_most = (ranks / len(ordered)) ** devices
    return float(ordered @ np.diff(at_most))


def bucket_sizes(size: float, cap_mb: float | None = None) -> list[float]:
    """Bytes of DDP's gradient buckets, in the order in which they fill.

    By default the first bucket holds 1 MiB, so that communication starts early, and every
    other 25 MiB.
    """
    first = MIB * (1 if cap_mb is None else cap_mb)
    other = MIB * (25 if cap_mb is None else cap_mb)
    sizes = [min(size, first)]
    rest = size - sizes[0]
    sizes += [other] * int(rest // other)
    if rest % other:
        sizes.append(rest % other)
    return sizes


def exposed_seconds(
    backward: float, sizes: list[float], all_reduce: Callable[[float], float]
) -> float:
    """Seconds for which the all-reduces of buckets go on after the backward pass.

    backward: its seconds; sizes: bytes of the buckets. `all_reduce(bytes)` gives seconds.
    The model: gradients become ready evenly over the backward pass, in bytes. A bucket is
    summed when it is full and the bucket before it has been summed. The last is full only
    at the end of the backward pass, so its all-reduce is never hidden (Li et al. 2020,
    https://arxiv.org/abs/2006.15704).
    """
    full = backward * np.cumsum(sizes) / sum(sizes)
    done = 0.0
    for size, filled in zip(sizes, full):
        done = max(done, filled) + all_reduce(size)
    return float(done - full[-1])
