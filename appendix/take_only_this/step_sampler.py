"""Batches that depend on (seed, step) alone, so a killed run resumes at its step."""

from functools import lru_cache

from numpy.random import default_rng


def step_batches(n, batch_size, steps, seed=0, rank=0, world_size=1):
    """A rank's indices in each step, out of n samples; batch_size is of all ranks."""
    begin = batch_size * rank // world_size
    end = batch_size * (rank + 1) // world_size
    for step in steps:  # range(first_step, max_steps); to resume, begin later
        start = step * batch_size
        places = range(start + begin, start + end)
        yield [epoch_order(seed, place // n, n)[place % n] for place in places]


@lru_cache(maxsize=2)
def epoch_order(seed, epoch, n):
    return default_rng((seed, epoch)).permutation(n)
