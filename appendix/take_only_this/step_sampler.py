"""Batches that depend on (seed, step) alone, so a killed run resumes at its step."""

from functools import lru_cache

from numpy.random import default_rng


def step_batches(n, batch_size, steps, seed=0, rank=0, world_size=1):
    """A rank's indices in each step, out of n samples; batch_size is of all ranks."""
    begin, end = (batch_size * r // world_size for r in (rank, rank + 1))
    for step in steps:  # range(first_step, max_steps); to resume, begin later
        places = range(step * batch_size + begin, step * batch_size + end)
        yield [epoch_order(seed, place // n, n)[place % n] for place in places]


@lru_cache(maxsize=2)
def epoch_order(seed, epoch, n):
    return default_rng((seed, epoch)).permutation(n).tolist()
