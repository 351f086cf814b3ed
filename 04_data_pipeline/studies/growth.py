"""Memory that grows with the workers: how they start, and what the dataset holds."""

import multiprocessing
from functools import partial
from itertools import product

import numpy as np
import psutil
from torch.utils.data import DataLoader, Dataset

from studies.measuring import LIMIT, Case, children, fresh, take_turns
from studies.stores import full_or_quick
from studies.tree_memory import tree_mb
from workers import PRELOADED

WORKERS = 4
BATCH = 1000
STARTS = ("fork", "forkserver", "forkserver, preloaded", "spawn")


class Tuples(Dataset):
    """An index as most people keep it: Python's objects."""

    def __init__(self, samples: int):
        # Each number is an object of its own, as if it had been read from a file.
        self.index = [(n, n + samples, n + 2 * samples) for n in range(samples)]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> int:
        return sum(self.index[number])


class Arrays(Tuples):
    """The same index as one array, whose numbers are no objects."""

    def __init__(self, samples: int):
        numbers = np.arange(samples)[:, None]
        self.index = numbers + samples * np.arange(3)


INDEXES = {"tuples": Tuples, "an array": Arrays}


def growth(repeats: int) -> list[dict]:
    """Memory of all processes of a DataLoader with four workers, at the first batch and at
    the end of an epoch.
    """
    samples = full_or_quick(1_000_000, 10_000)
    cases = []
    for index, method in product(INDEXES, STARTS):
        work = partial(fresh, LIMIT, measure_growth, index, method, samples)
        cases.append(Case({"index": index, "start_method": method}, work))
    return take_turns("growth", cases, repeats)


def measure_growth(index: str, method: str, samples: int) -> dict[str, float]:
    """Megabytes of the process tree. No worker ends before the last look."""
    method, _, preloaded = method.partition(", ")
    if preloaded:
        multiprocessing.set_forkserver_preload([*PRELOADED, __name__])
    dataset = INDEXES[index](samples)
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=WORKERS,
        multiprocessing_context=method,
    )
    found = {"alone_mb": tree_mb()}
    batches = iter(loader)
    next(batches)
    found["first_batch_mb"] = tree_mb()
    for _ in range(len(loader) - 2):
        next(batches)
    found["end_of_epoch_mb"] = tree_mb()
    processes = [psutil.Process(), *children()]
    found["end_of_epoch_rss_mb"] = (
        sum(each.memory_info().rss for each in processes) / 1e6
    )
    return found
