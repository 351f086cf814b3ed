"""The loaders that bring each rank its batches."""

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from clock import TimedLoader
from data import Data, PatchDataset
from steps import StepSampler
from workers import worker_options


class CountedBatches(Dataset):
    """Whole batches, each addressed by its list of (step, k), with what they cost.

    Beside what PatchMaker.make_batch says, a batch has traffic (4,): requests, bytes,
    missing chunks, and the samples of this batch. `patches` has a reader of its own: all
    that it reads is counted.
    """

    def __init__(self, patches: PatchDataset):
        self.patches = patches

    def __getitem__(self, indices: list[tuple[int, int]]) -> dict[str, np.ndarray]:
        traffic = self.patches.reader.traffic
        before = np.array(traffic.counts())
        batch = self.patches.read_batch(indices)
        cost = traffic.counts() - before
        batch["traffic"] = np.array([*cost, len(indices)])
        return batch


class WindDataModule(LightningDataModule):
    """Loaders for training, validation and test.

    `options` are kept in each checkpoint: a resumed run is compared with them.
    """

    def __init__(self, data: Data, *, options: dict, first_step: int):
        super().__init__()
        self.save_hyperparameters(options, logger=False)
        self.data = data
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

    def train_patches(self) -> PatchDataset:
        """The training's patches, whose reads are counted apart from all others."""
        options = self.hparams
        maker = self.data.maker(self.data.training, options.patch_size)
        reader = self.data.reader.counted_apart()
        return PatchDataset(maker, reader, options.batch_size, options.seed)

    def train_loader(self, rank: int = 0, world_size: int = 1) -> DataLoader:
        """A rank's micro-batches, from the first step on."""
        options = self.hparams
        batches = CountedBatches(self.train_patches())
        sampler = StepSampler(
            options.batch_size,
            options.max_steps,
            first_step=self.first_step,
            rank=rank,
            world_size=world_size,
            accumulate_grad_batches=options.accumulate_grad_batches,
        )
        workers = worker_options(options.num_workers, options.start_method)
        # batch_size=None: what the sampler yields is the address of a whole batch.
        return TimedLoader(batches, batch_size=None, sampler=sampler, **workers)

    def eval_loader(self, dataset: PatchDataset) -> DataLoader:
        """This rank's share of the patches that every run is judged on."""
        rank = self.trainer.global_rank
        numbers = range(rank, dataset.batch_size, self.trainer.world_size)
        return DataLoader(dataset, sampler=[(0, k) for k in numbers], batch_size=32)
