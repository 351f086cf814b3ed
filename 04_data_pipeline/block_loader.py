"""Read whole blocks ahead of the step, cut several samples from each, mix many blocks.

A block is what one read should bring: a chunk, a file, a shard. You say how a block is
read and how a batch is made:

    order = BlockOrder(blocks=288, batch_size=8, slots=32, patches_per_block=8, seed=0)
    batches = [[(step, k) for k in range(8)] for step in range(200)]
    loader = BlockLoader(order, batches, read_block, make_batch)
    DataLoader(loader, batch_size=None, num_workers=...)

The order is a function of (step, k), not a state: nothing has to be saved to resume.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

ORDER_STREAM = 1  # of random numbers: the order of the blocks, as in sampling.py
PATCH_STREAM = 2  # what is cut from a block
Planned = list[tuple[Future, int]]  # for each sample of a batch: its block, and which


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, blocks: int) -> np.ndarray:
    """The order in which an epoch reads the blocks, (blocks,): each of them once."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(blocks)


class Window(NamedTuple):
    """Batches that a run leaves out: those from `first` on, and before `stop`."""

    first: int
    stop: int


def batch_number(step: int, skipped: tuple[Window, ...]) -> int:
    """The batch that a step trains on: later steps move up by as many as are left out."""
    number = step
    for window in sorted(skipped):
        if number >= window.first:
            number += window.stop - window.first
    return number


@dataclass(frozen=True)
class BlockOrder:
    """Which block each sample is from: `slots` blocks are in use at any time.

    A slot gives the samples of its block one after another, `patches_per_block` of them,
    and then takes the next block of the epoch. `slots` is a multiple of `batch_size`:
    a step takes one sample from each of `batch_size` slots, and the batches go round.
    `skipped` batches are left out, as after a bad loss.
    """

    blocks: int
    batch_size: int
    slots: int
    patches_per_block: int
    seed: int
    skipped: tuple[Window, ...] = ()

    def __post_init__(self):
        if self.slots % self.batch_size:
            raise ValueError(f"{self.slots} slots: not a multiple of {self.batch_size}")

    @property
    def steps_per_round(self) -> int:
        """In a round of so many steps each slot gives one sample."""
        return self.slots // self.batch_size

    def address(self, step: int, k: int) -> tuple[int, int]:
        """Of sample k of a step: its read, and its place among that read's samples."""
        batch = batch_number(step, self.skipped)
        slot = batch % self.steps_per_round * self.batch_size + k
        # Each slot begins at a sample of its own. Else all would change blocks at once.
        given_before = batch // self.steps_per_round + slot % self.patches_per_block
        reads_before, patch = divmod(given_before, self.patches_per_block)
        return reads_before * self.slots + slot, patch

    def block(self, read: int) -> int:
        """The block of a read: each epoch reads every block once."""
        epoch, position = divmod(read, self.blocks)
        return int(epoch_order(self.seed, epoch, self.blocks)[position])

    def rng(self, read: int) -> np.random.Generator:
        """The random numbers of a read, for what is cut from its block."""
        return np.random.default_rng((PATCH_STREAM, self.seed, read))


class BlockLoader(IterableDataset):
    """Batches of samples cut from blocks, which threads read ahead of the step.

    `batches` has a list of (step, k) for each batch. `read_block(block, rng)` returns a
    list of `patches_per_block` samples; it runs in a thread. `make_batch(samples)` makes
    a batch of them; it runs in the thread that iterates.

    A process holds the samples of at most slots + (depth + 1) * new blocks. Here new is
    batch_size / patches_per_block, rounded up, and W / gcd(W, steps_per_round) times that in one
    of W workers. What running calls of read_block hold comes on top.
    """

    def __init__(
        self,
        order: BlockOrder,
        batches: Iterable[list[tuple[int, int]]],
        read_block: Callable[[int, np.random.Generator], list],
        make_batch: Callable[[list], Any],
        blocks_ahead: int = 16,
        threads: int = 24,
    ):
        self.order = order
        self.batches = batches
        self.read_block = read_block
        self.make_batch = make_batch
        self.threads = threads
        # So many batches are planned ahead: the reads of their blocks are started.
        depth = blocks_ahead * order.patches_per_block / order.batch_size
        self.depth = max(1, round(depth))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """This process's batches: all of them, or every n-th in one of n workers."""
        batches = iter(self.batches)
        worker = get_worker_info()
        if worker is not None:
            batches = islice(batches, worker.id, None, worker.num_workers)
        pool = ThreadPoolExecutor(self.threads)
        current: dict[int, tuple[int, Future]] = {}  # of each slot: its read, its block
        pending: deque[Planned] = deque()
        try:
            for addresses in batches:
                pending.append(self.plan(addresses, current, pool))
                if len(pending) > self.depth:
                    yield self.finish(pending.popleft())
            while pending:
                yield self.finish(pending.popleft())
        except GeneratorExit:  # nobody asks for more
            pool.shutdown(cancel_futures=True)  # waits: the server may be about to end
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def plan(
        self, addresses: list[tuple[int, int]], current: dict, pool: ThreadPoolExecutor
    ) -> Planned:
        """For each sample its block, whose read is started now unless it was before."""
        planned = []
        for step, k in addresses:
            read, patch = self.order.address(step, k)
            slot = read % self.order.slots
            if slot not in current or current[slot][0] != read:
                block = self.order.block(read)
                future = pool.submit(self.read_block, block, self.order.rng(read))
                current[slot] = read, future
            planned.append((current[slot][1], patch))
        return planned

    def finish(self, planned: Planned) -> Any:
        """The batch, once its blocks are read."""
        return self.make_batch([future.result()[patch] for future, patch in planned])
