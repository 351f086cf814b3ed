"""The loaders that bring the network its batches."""

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from clock import TimedLoader
from data import Data, PatchDataset
from steps import StepSampler


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
        """The batches from the first step on."""
        options = self.hparams
        maker = self.data.maker(self.data.training, options.patch_size)
        patches = PatchDataset(
            maker, self.data.reader, options.batch_size, options.seed
        )
        sampler = StepSampler(options.batch_size, options.max_steps, self.first_step)
        return TimedLoader(
            patches, batch_sampler=sampler, num_workers=options.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return eval_loader(self.validation)

    def test_dataloader(self) -> DataLoader:
        return eval_loader(self.test)


def eval_loader(dataset: PatchDataset) -> DataLoader:
    """The patches that every run is judged on."""
    numbers = range(dataset.batch_size)
    return DataLoader(dataset, sampler=[(0, k) for k in numbers], batch_size=32)
