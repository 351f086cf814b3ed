"""Samples that are taken too often, or too few steps."""

from collections.abc import Iterator

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from options import START_METHOD
from workers import worker_options
from wrong.setting import BATCH, RANKS, gather

EPOCH = range(1600)
FEW = 16


def batch_per_device(rank: int) -> dict:
    """A DataLoader's batch_size is one rank's: on two ranks, twice the batch and half the steps."""
    sampler = DistributedSampler(EPOCH, RANKS, rank)
    return {
        "what": "steps in an epoch of 1,600 at batch 8",
        "wrong": len(DataLoader(EPOCH, BATCH, sampler=sampler)),
        "right": len(DataLoader(EPOCH, BATCH // RANKS, sampler=sampler)),
        "truth": len(EPOCH) // BATCH,
    }


def iterable_copied(rank: int) -> dict:
    """An IterableDataset is copied to every worker of every rank, and each copy yields all of it."""
    return {
        "what": "samples in an epoch of 16",
        "wrong": count_samples(Stream(rank, shared=False)),
        "right": count_samples(Stream(rank, shared=True)),
        "truth": FEW,
    }


class Stream(IterableDataset):
    """A few samples; `shared` says whether ranks and workers divide them."""

    def __init__(self, rank: int, shared: bool):
        self.rank = rank
        self.shared = shared

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        reader = self.rank * worker.num_workers + worker.id
        readers = RANKS * worker.num_workers
        if self.shared:
            yield from range(reader, FEW, readers)
        else:
            yield from range(FEW)


def count_samples(stream: Stream) -> int:
    """How many samples all workers of all ranks bring."""
    # Not by fork: a copied process may wait for ever for a lock that gloo's threads hold.
    loader = DataLoader(stream, **worker_options(2, START_METHOD))
    own = sum(1 for _ in loader)
    return sum(gather(own))
