"""The loaders that bring each rank its batches."""

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from clock import TimedLoader
from data import Data, PatchDataset
from steps import StepSampler
from workers import worker_options


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

    def train_loader(self, rank: int = 0, world_size: int = 1) -> DataLoader:
        """A rank's micro-batches, from the first step on."""
        options = self.hparams
        maker = self.data.maker(self.data.training, options.patch_size)
        patches = PatchDataset(
            maker, self.data.reader, options.batch_size, options.seed
        )
        sampler = StepSampler(
            options.batch_size,
            options.max_steps,
            first_step=self.first_step,
            rank=rank,
            world_size=world_size,
            accumulate_grad_batches=options.accumulate_grad_batches,
        )
        workers = worker_options(options.num_workers, options.start_method)
        return TimedLoader(patches, batch_sampler=sampler, **workers)

    def eval_loader(self, dataset: PatchDataset) -> DataLoader:
        """This rank's share of the patches that every run is judged on."""
        return eval_loader(dataset, self.trainer.global_rank, self.trainer.world_size)


def eval_loader(dataset: PatchDataset, rank: int, world_size: int) -> DataLoader:
    """A rank's share of a dataset's patches: each patch is on exactly one rank."""
    numbers = range(rank, dataset.batch_size, world_size)
    return DataLoader(dataset, sampler=[(0, k) for k in numbers], batch_size=32)
