"""The data: small images of a disc, a square or a cross, drawn on the spot.

Put your own in this file's place. Sample k of a batch must be a function of (seed, batch, k),
and of nothing that was drawn before: a resumed run then sees what the killed one would have.
"""

import multiprocessing

import numpy as np
import torch
from block_order import Window, batch_number
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from clock import TimedLoader
from steps import StepSampler
from workers import start_worker

SIZE = 16  # pixels along a side
CLASSES = ("disc", "square", "cross")
TRAINING, VALIDATION, TEST = range(3)  # random streams: no part sees another's images
# Imported once, by the server that all workers are forked from.
PRELOADED = ["lightning.pytorch", "torchmetrics"]


def draw(kind: int, rng: np.random.Generator) -> np.ndarray:
    """A noisy image (1, SIZE, SIZE) of a shape somewhere in it."""
    row, column = np.mgrid[:SIZE, :SIZE]
    radius = rng.uniform(3, 5)
    middle = rng.uniform(5, SIZE - 5, 2)
    down = np.abs(row - middle[0])
    across = np.abs(column - middle[1])
    far = np.maximum(down, across)
    near = np.minimum(down, across)
    shapes = (
        np.hypot(down, across) < radius,
        far < radius,
        (far < radius) & (near < 1),
    )
    noise = rng.normal(0, 0.3, (SIZE, SIZE))
    image = shapes[kind] + noise
    return image[np.newaxis].astype(np.float32)


class Shapes(Dataset):
    """Sample (step, k) is an image and the number of its class."""

    def __init__(self, seed: int, stream: int, skipped: tuple[Window, ...] = ()):
        self.seed = seed
        self.stream = stream
        self.skipped = skipped  # batches to leave out, after a bad loss

    def __getitem__(self, at: tuple[int, int]) -> tuple[torch.Tensor, int]:
        step, k = at
        batch = batch_number(step, self.skipped)
        rng = np.random.default_rng((self.stream, self.seed, batch, k))
        kind = int(rng.integers(len(CLASSES)))
        return torch.from_numpy(draw(kind, rng)), kind


class ShapesModule(LightningDataModule):
    """The loaders of a run that begins at a step, and leaves batches out.

    `data` is what make_data in task.py returns. `options` are kept in each checkpoint: a
    resumed run is compared with them.
    """

    def __init__(
        self,
        data: tuple,
        *,
        options: dict,
        first_step: int,
        skipped: tuple[Window, ...],
    ):
        super().__init__()
        # Without the rest, which Lightning would compare, and arrays cannot be.
        self.save_hyperparameters(options, ignore=["data", "skipped"], logger=False)
        self.first_step = first_step
        self.skipped = skipped

    def train_dataloader(self) -> DataLoader:
        """This rank's slices of the global batches, from the first step on."""
        options = self.hparams
        batches = StepSampler(
            options.batch_size,
            options.max_steps,
            first_step=self.first_step,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            accumulate_grad_batches=options.accumulate_grad_batches,
        )
        images = Shapes(options.seed, TRAINING, self.skipped)
        if not options.num_workers:
            return TimedLoader(images, batch_sampler=batches)
        multiprocessing.set_forkserver_preload(PRELOADED)
        return TimedLoader(
            images,
            batch_sampler=batches,
            num_workers=options.num_workers,
            multiprocessing_context=options.start_method,
            worker_init_fn=start_worker,
        )

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(VALIDATION)

    def test_dataloader(self) -> DataLoader:
        return self.eval_loader(TEST)

    def eval_loader(self, stream: int) -> DataLoader:
        """This rank's share of the images that every run is judged on."""
        rank = self.trainer.global_rank
        numbers = range(rank, self.hparams.eval_samples, self.trainer.world_size)
        places = [(0, k) for k in numbers]
        return DataLoader(Shapes(0, stream), sampler=places, batch_size=64)
