"""The network, its loss and its metric: no loop. Put your own in this file's place."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from shapes import CLASSES, SIZE

Batch = list[torch.Tensor]  # images (batch, 1, SIZE, SIZE) and classes (batch,)


class Classifier(LightningModule):
    """A small convolutional network with BatchNorm and dropout, as many have them.

    It has one optimizer. What it draws in training comes from torch's generators, which
    survival/ seeds for each batch.
    """

    def __init__(self, learning_rate: float, dropout: float, seed: int):
        super().__init__()
        self.save_hyperparameters()  # load_from_checkpoint needs nothing else
        torch.manual_seed(seed)  # the same weights on every rank
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * (SIZE // 4) ** 2, len(CLASSES)),
        )
        self.right = MeanMetric()  # over all ranks
        # What forward takes. With several ranks, the run looks at it before the first step.
        self.example_input_array = torch.zeros(2, 1, SIZE, SIZE)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The mean of this rank. DDP takes the mean of the ranks, whose slices are equal
        where --batch-size is a multiple of them."""
        images, classes = batch
        loss = nn.functional.cross_entropy(self(images), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, classes = batch
        answers = self(images).argmax(dim=1)
        self.right.update((answers == classes).float())

    def on_validation_epoch_end(self) -> None:
        name = "test accuracy" if self.trainer.testing else "accuracy"
        self.log(name, self.right.compute(), prog_bar=True)
        self.right.reset()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
