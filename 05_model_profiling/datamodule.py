"""The loaders that bring each rank its batches."""

import math
import sys

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from block_loader import BlockLoader
from block_order import BlockOrder
from clock import TimedLoader
from data import Data, PatchDataset
from errors import CheckpointError
from steps import StepSampler
from wind_blocks import WindBlocks
from workers import worker_options


class WindDataModule(LightningDataModule):
    """The training's block loader, and plain loaders for validation and test.

    `options` are kept in each checkpoint: a resumed run is compared with them.
    """

    def __init__(
        self,
        data: Data,
        *,
        options: dict,
        order: BlockOrder,
        blocks: WindBlocks,
        first_step: int,
    ):
        super().__init__()
        self.save_hyperparameters(options, logger=False)
        self.data = data
        self.order = order
        self.blocks = blocks
        self.first_step = first_step
        size = options["patch_size"]
        number = options["eval_samples"]
        self.validation = data.eval_patches(data.validation, size, number)
        self.test = data.eval_patches(data.test, size, number)

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.validation)

    def test_dataloader(self) -> DataLoader:
        return self.eval_loader(self.test)

    def train_loader(self, rank: int = 0, world_size: int = 1) -> DataLoader:
        """A rank's micro-batches, from the first step on."""
        options = self.hparams
        accumulate = options.accumulate_grad_batches
        batches = StepSampler(
            options.batch_size,
            options.max_steps,
            first_step=self.first_step,
            rank=rank,
            world_size=world_size,
            accumulate_grad_batches=accumulate,
        )
        loader = BlockLoader(
            self.order,
            batches,
            read_block=self.blocks.read_block,
            make_batch=self.blocks.make_batch,
        )
        if rank == 0:
            warn_of_rereading(options.num_workers, self.order, accumulate)
            warn_of_few_blocks(self.order, options.shuffle_slots)
        workers = worker_options(options.num_workers, options.start_method)
        return TimedLoader(loader, batch_size=None, **workers)

    def state_dict(self) -> dict[str, int]:
        """What else decides which samples come, beside the options."""
        return {"blocks": self.order.blocks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        blocks = self.order.blocks
        if state["blocks"] != blocks:
            reason = f"has {state['blocks']} blocks, and the store {blocks}"
            remedy = "give the store with the chunks and times that it had"
            raise CheckpointError(f"{reason}; {remedy}, or no --resume")

    def eval_loader(self, dataset: PatchDataset) -> DataLoader:
        """This rank's share of the patches that every run is judged on."""
        rank = self.trainer.global_rank
        numbers = range(rank, dataset.batch_size, self.trainer.world_size)
        return DataLoader(dataset, sampler=[(0, k) for k in numbers], batch_size=32)


def count_readers(num_workers: int, order: BlockOrder, accumulate: int) -> int:
    """How many workers read the same block: each of W makes every W-th batch."""
    if num_workers < 2:
        return 1
    batches_per_round = order.steps_per_round * accumulate
    taking_turns = num_workers // math.gcd(num_workers, batches_per_round)
    rounds = math.ceil(order.patches_per_block / order.samples_per_slot)
    return min(taking_turns, rounds)


def warn_of_rereading(num_workers: int, order: BlockOrder, accumulate: int) -> None:
    """Say so if several workers read the same blocks, and with how many each is read once."""
    readers = count_readers(num_workers, order, accumulate)
    if readers == 1:
        return
    fewer = num_workers
    while count_readers(fewer, order, accumulate) > 1:
        fewer -= 1
    note = f"note: with --num-workers {num_workers} each block is read {readers} times"
    print(f"{note}; with --num-workers {fewer} it is read once", file=sys.stderr)


def warn_of_few_blocks(order: BlockOrder, wanted: int) -> None:
    """Say so if there are fewer blocks than slots are wanted."""
    if order.slots == wanted:
        return
    blocks = "1 block" if order.blocks == 1 else f"{order.blocks} blocks"
    note = f"note: {blocks} for --shuffle-slots {wanted}: {order.slots} are used"
    samples = order.blocks * order.patches_per_block
    remedy = "give more --patches-per-block, or a store of smaller chunks"
    print(f"{note}; an epoch has {samples} samples; {remedy}", file=sys.stderr)
