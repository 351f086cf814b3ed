"""Read whole blocks ahead of the step, cut several samples from each, mix many blocks.

A block is what one read should bring: a chunk, a file, a shard. You say how a block is
read and how a batch is made:

    slots = fit_slots(32, blocks=288, batch_size=8)
    order = BlockOrder(blocks=288, batch_size=8, slots=slots, patches_per_block=8, seed=0)
    batches = [[(step, k) for k in range(8)] for step in range(200)]
    loader = BlockLoader(order, batches, read_block, make_batch)
    DataLoader(loader, batch_size=None, num_workers=...)

block_order.py has the order: nothing has to be saved to resume.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from block_order import BlockOrder, BlockRead

Planned = list[tuple[Future, int]]  # for each sample of a batch: its block, and which


class BlockLoader(IterableDataset):
    """Batches of samples cut from blocks, which threads read ahead of the step.

    `batches` has a list of (step, k) for each batch. `read_block(read)` returns a list of
    `patches_per_block` samples; it runs in a thread. `make_batch(samples)` makes a batch of
    them; it runs in the thread that iterates.

    So many blocks are read at once as are asked for ahead: their rate is at most
    blocks_ahead / (seconds for one), by Little's law. A process holds the samples of at most
    its slots + blocks_ahead + those that one batch begins; what running calls of read_block
    hold comes on top.
    """

    def __init__(
        self,
        order: BlockOrder,
        batches: Iterable[list[tuple[int, int]]],
        read_block: Callable[[BlockRead], list],
        make_batch: Callable[[list], Any],
        blocks_ahead: int = 24,
    ):
        self.order = order
        self.batches = batches
        self.read_block = read_block
        self.make_batch = make_batch
        self.blocks_ahead = blocks_ahead

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """This process's batches: all of them, or every n-th in one of n workers."""
        batches = iter(self.batches)
        worker = get_worker_info()
        if worker is not None:
            batches = islice(batches, worker.id, None, worker.num_workers)
        pool = ThreadPoolExecutor(self.blocks_ahead)
        current: dict[int, tuple[int, Future]] = {}  # of each slot: read, samples
        pending: deque[tuple[Planned, int]] = deque()  # and how many reads each began
        ahead = 0  # reads that the pending batches began
        try:
            for addresses in batches:
                pending.append(self.plan(addresses, current, pool))
                ahead += pending[-1][1]
                while ahead - pending[0][1] >= self.blocks_ahead:
                    planned, begun = pending.popleft()
                    ahead -= begun
                    yield self.finish(planned)
            while pending:
                yield self.finish(pending.popleft()[0])
        except GeneratorExit:  # nobody asks for more
            pool.shutdown(cancel_futures=True)  # waits: the server may be about to end
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def plan(
        self, addresses: list[tuple[int, int]], current: dict, pool: ThreadPoolExecutor
    ) -> tuple[Planned, int]:
        """For each sample its block, and how many reads begin now: those not begun before."""
        planned = []
        begun = 0
        for step, k in addresses:
            number, patch = self.order.address(step, k)
            turn = number % self.order.slots
            if turn not in current or current[turn][0] != number:
                read = self.order.read(number)
                current[turn] = number, pool.submit(self.read_samples, read)
                begun += 1
            planned.append((current[turn][1], patch))
        return planned, begun

    def read_samples(self, read: BlockRead) -> list:
        """The samples of a block. ValueError if there are too few or too many of them."""
        samples = self.read_block(read)
        wanted = self.order.patches_per_block
        if len(samples) != wanted:
            found = f"read_block gave {len(samples)} samples of block {read.block}"
            raise ValueError(f"{found}; patches_per_block is {wanted}")
        return samples

    def finish(self, planned: Planned) -> Any:
        """The batch, once its blocks are read."""
        return self.make_batch([future.result()[patch] for future, patch in planned])
