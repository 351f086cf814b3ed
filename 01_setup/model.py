"""The network, its loss, its learning rate and its metric: the task, and no loop."""

import math
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

Batch = dict[str, torch.Tensor]


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions. GroupNorm sees one sample at a time, whatever the batch."""
    layers: list[nn.Module] = []
    same_size = {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"}
    for channels in (channels_in, channels_out):
        layers.append(nn.Conv2d(channels, channels_out, **same_size))
        layers.append(nn.GroupNorm(8, channels_out))
        layers.append(nn.SiLU())
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A small U-Net, (batch, variables + 1, H, W) to (batch, variables, H, W).

    H and W are multiples of 4. Beyond its edge a patch goes on with the edge's values.
    """

    def __init__(self, variables: int, width: int = 24):
        super().__init__()
        self.down1 = conv_block(variables + 1, width)
        self.down2 = conv_block(width, 2 * width)
        self.bottom = conv_block(2 * width, 4 * width)
        self.up2 = conv_block(6 * width, 2 * width)  # coarse and middle
        self.up1 = conv_block(3 * width, width)  # middle and fine
        self.head = nn.Conv2d(width, variables, kernel_size=1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down1(x)
        middle = self.down2(self.shrink(fine))
        coarse = self.bottom(self.shrink(middle))
        grown = self.grow(coarse)
        middle = torch.cat([grown, middle], dim=1)
        middle = self.up2(middle)
        grown = self.grow(middle)
        fine = torch.cat([grown, fine], dim=1)
        fine = self.up1(fine)
        return self.head(fine)


def masked_loss(prediction: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Squared error of the unseen cells, weighted by cos(latitude), over their count.

    One count for the whole batch, not a mean of the samples' means: each unseen cell
    counts the same. The metric divides by the sum of the weights instead, because it is a
    mean over area. In the loss, that would give a batch near the poles as much say as one
    at the equator.
    """
    error = prediction - batch["target"]
    squares = batch["weight"] * error**2
    unseen = batch["unseen"].sum().clamp(min=1)
    return squares.sum() / (prediction.shape[1] * unseen)


def learning_rate_factor(step: int, max_steps: int) -> float:
    """Linear warm-up over a tenth of the run, then half a cosine down to zero."""
    warmup = max(1, max_steps // 10)
    decay = max(1, max_steps - warmup)
    rise = min(1, (step + 1) / warmup)
    phase = math.pi * max(0, step - warmup) / decay
    fall = 0.5 * (1 + math.cos(phase))
    return rise * fall


class FillGaps(LightningModule):
    """A U-Net that predicts the wind where the satellite did not look.

    `std` (variables,) is the anomalies' spread. `units` has the numbers of the variables
    of each unit, whose RMSE is one number.
    """

    def __init__(
        self,
        std: list[float],
        units: dict[str, list[int]],
        learning_rate: float,
        max_steps: int,
        seed: int,
    ):
        super().__init__()
        self.save_hyperparameters()  # load_from_checkpoint needs nothing else
        torch.manual_seed(seed)
        self.model = UNet(len(std))
        spread = torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("std", spread, persistent=False)
        self.mean_squares = nn.ModuleList(MeanMetric() for _ in units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = masked_loss(self.model(batch["input"]), batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        prediction = self.model(batch["input"])
        error = self.std * (prediction - batch["target"])
        squares = error**2
        weight = batch["weight"]
        for mean_square, numbers in zip(self.mean_squares, self.hparams.units.values()):
            mean_square.update(squares[:, numbers], weight)

    def on_validation_epoch_end(self) -> None:
        prefix = "test " if self.trainer.testing else ""
        for mean_square, unit in zip(self.mean_squares, self.hparams.units):
            rmse = mean_square.compute().sqrt()
            self.log(f"{prefix}rmse ({unit})", rmse, prog_bar=True)
            mean_square.reset()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> dict:
        rate = self.hparams.learning_rate
        factor = partial(learning_rate_factor, max_steps=self.hparams.max_steps)
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        each_step = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": each_step}
