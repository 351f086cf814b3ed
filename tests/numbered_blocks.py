"""Blocks without data, to test the block loader with: a sample says which it is."""

from collections.abc import Callable
from concurrent.futures import Future

from block_loader import BlockLoader
from block_order import BlockOrder, BlockRead


def make_order(blocks=40, batch_size=4, slots=8, patches_per_block=3, seed=0) -> BlockOrder:
    return BlockOrder(blocks, batch_size, slots, patches_per_block, seed)


def make_batches(order: BlockOrder, steps: int) -> list[list[tuple[int, int]]]:
    """The global batch of each step, as (step, k)."""
    return [[(step, k) for k in range(order.batch_size)] for step in range(steps)]


def reads_of(order: BlockOrder, batches: list) -> set[int]:
    """The reads that these batches need."""
    return {order.address(step, k)[0] for batch in batches for step, k in batch}


class Numbers:
    """A sample is (block, the number drawn for this read, its place in the block).

    `read` lists the blocks that were read, and with which number. No two reads draw the same.
    """

    def __init__(self, order: BlockOrder):
        self.order = order
        self.read: list[tuple[int, int]] = []

    def read_block(self, read: BlockRead) -> list[tuple]:
        drawn = int(read.rng.integers(2**62))
        self.read.append((read.block, drawn))
        return [(read.block, drawn, n) for n in range(self.order.patches_per_block)]

    def make_batch(self, samples: list[tuple]) -> list[tuple]:
        return samples

    def loader(self, batches: list, **reading: int) -> BlockLoader:
        return BlockLoader(self.order, batches, self.read_block, self.make_batch, **reading)

    def key(self, number: int) -> tuple[int, int]:
        """What `read` lists of a read."""
        read = self.order.read(number)
        return read.block, int(read.rng.integers(2**62))

    def evaluate(self, batches: list) -> list[list[tuple]]:
        """The batches as the order defines them, without a loader."""
        addresses = [[self.order.address(step, k) for step, k in batch] for batch in batches]
        return [[(*self.key(read), n) for read, n in batch] for batch in addresses]


class AtOnce:
    """In the place of threads: a block is read when its read is submitted."""

    def __init__(self, threads: int):
        pass

    def submit(self, read_block: Callable, *given) -> Future:
        future = Future()
        future.set_result(read_block(*given))
        return future

    def shutdown(self, **how: bool) -> None:
        pass
