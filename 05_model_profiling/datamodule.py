"""Which samples each rank and worker gets, and the loaders that bring them."""

import gc
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from threading import Thread

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Sampler

from block_loader import BlockLoader, BlockOrder
from data import PatchDataset
from store import FieldReader
from wind_blocks import WindBlocks

# Imported once, by the server that all workers are forked from. No room may be among
# them: it would be another chapter's in a process that has seen two.
PRELOADED = [
    "lightning.pytorch",
    "matplotlib.figure",
    "obstore",
    "scipy.interpolate",
    "torchmetrics",
    "xarray",
    "zarr",
]


class StepSampler(Sampler):
    """A rank's slice of the global batch of every step, in micro-batches.

    Each is a list of (step, k). To resume, give `first_step`. Any number of ranks cuts the
    same global batch, into slices as equal as may be.
    """

    def __init__(
        self,
        batch_size: int,
        max_steps: int,
        first_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
    ):
        self.batch_size = batch_size
        self.max_steps = max_steps
        self.first_step = first_step
        self.rank = rank
        self.world_size = world_size
        self.accumulate_grad_batches = accumulate_grad_batches

    def __len__(self) -> int:
        # The whole run's: after a resume Lightning counts the earlier batches as fetched.
        return self.max_steps * self.accumulate_grad_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        pieces = self.world_size * self.accumulate_grad_batches
        first = self.rank * self.accumulate_grad_batches
        for step in range(self.first_step, self.max_steps):
            for piece in range(first, first + self.accumulate_grad_batches):
                begin = self.batch_size * piece // pieces
                end = self.batch_size * (piece + 1) // pieces
                yield [(step, k) for k in range(begin, end)]


class WindDataModule(LightningDataModule):
    """The training's block loader, and plain loaders for validation and test.

    `reader` is the one that validation and test read through.
    `options` are kept in each checkpoint, because a resumed run must share most of them.
    """

    def __init__(
        self,
        options: dict,
        order: BlockOrder,
        blocks: WindBlocks,
        validation: PatchDataset,
        test: PatchDataset,
        reader: FieldReader,
        first_step: int = 0,
        num_workers: int = 0,
        start_method: str = "forkserver",
    ):
        super().__init__()
        self.save_hyperparameters(options, logger=False)
        self.order = order
        self.blocks = blocks
        self.validation = validation
        self.test = test
        self.reader = reader
        self.first_step = first_step
        self.num_workers = num_workers
        self.start_method = start_method

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.validation)

    def test_dataloader(self) -> DataLoader:
        return self.eval_loader(self.test)

    def train_loader(self, rank: int = 0, world_size: int = 1) -> DataLoader:
        """A rank's micro-batches, from the first step on."""
        accumulate = self.hparams.accumulate_grad_batches
        batches = StepSampler(
            self.hparams.batch_size,
            self.hparams.max_steps,
            self.first_step,
            rank,
            world_size,
            accumulate,
        )
        loader = BlockLoader(
            self.order, batches, self.blocks.read_block, self.blocks.make_batch
        )
        if rank == 0:
            warn_of_rereading(self.num_workers, self.order.steps_per_round * accumulate)
        if not self.num_workers:
            return DataLoader(loader, batch_size=None)
        multiprocessing.set_forkserver_preload(PRELOADED)
        return DataLoader(
            loader,
            batch_size=None,
            num_workers=self.num_workers,
            multiprocessing_context=self.start_method,
            worker_init_fn=start_worker,
        )

    def eval_loader(self, dataset: PatchDataset) -> DataLoader:
        """This rank's share of the patches that every run is judged on."""
        rank = self.trainer.global_rank
        numbers = range(rank, dataset.batch_size, self.trainer.world_size)
        return DataLoader(dataset, sampler=[(0, k) for k in numbers], batch_size=32)


def count_readers(num_workers: int, batches_per_round: int) -> int:
    """How many workers read the same block: each of W makes every W-th batch."""
    if num_workers < 2:
        return 1
    return num_workers // math.gcd(num_workers, batches_per_round)


def warn_of_rereading(num_workers: int, batches_per_round: int) -> None:
    """Say so if several workers read the same blocks, and with how many each is read once."""
    readers = count_readers(num_workers, batches_per_round)
    if readers == 1:
        return
    fewer = num_workers
    while count_readers(fewer, batches_per_round) > 1:
        fewer -= 1
    note = f"note: with --num-workers {num_workers} each block is read {readers} times"
    print(f"{note}; with --num-workers {fewer} it is read once", file=sys.stderr)


def start_worker(worker: int) -> None:
    """Prepare a worker's process."""
    gc.freeze()  # else the collector stops all reads for 0.4 s, to look at what is imported
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its rank is killed.

    torch watches the forkserver instead, which lives as long as its workers.
    """
    multiprocessing.parent_process().join()
    os._exit(1)
