"""A task.py of other people's: chapter 6 runs it in the place of its own, see test_06_other_tasks.py.

Points in a square are to be classified. KIND, from the environment, chooses among models that the winds'
network is not: with dropout and BatchNorm, with two optimizers, with a forward that returns a dict, with a
frozen layer and a score that is better when higher, and some that a run cannot survive with.
"""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from clock import TimedLoader
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from steps import StepSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND = os.environ["OTHER_TASK"]
LOSS = "cross entropy"
HIGHER_IS_BETTER = KIND == "frozen"


class Points(Dataset):
    """Sample (step, k) has eight coordinates, and whether they lie in a ball."""

    def __getitem__(self, at: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * at[0] + at[1])
        point = torch.randn(8, generator=generator)
        return point, (point.square().sum() > 7).long()


class PointsModule(LightningDataModule):
    def __init__(self, options: dict, first_step: int):
        super().__init__()
        unreadable = {"folder": Path("data")} if KIND == "unreadable data" else {}
        self.save_hyperparameters(options | unreadable, logger=False)
        if KIND != "no first step":
            self.first_step = first_step
        self.begin = first_step
        self.end = 5 if KIND == "loader ends" else self.hparams.max_steps

    def train_dataloader(self) -> DataLoader:
        place = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        accumulated = self.hparams.accumulate_grad_batches
        size = self.hparams.batch_size
        batches = StepSampler(
            size, self.end, first_step=self.begin, accumulate_grad_batches=accumulated, **place
        )
        kind = DataLoader if KIND == "plain loader" else TimedLoader
        return kind(Points(), batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(), sampler=[(10**6, k) for k in range(200)], batch_size=50)

    test_dataloader = val_dataloader


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 32)
        layers = [nn.BatchNorm1d(32), nn.Dropout(0.2)] if KIND == "dropout" else []
        self.rest = nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 2))
        if KIND == "frozen":
            self.first.requires_grad_(False)
        if KIND == "left out":
            self.unused = nn.Linear(2, 2)
        if KIND == "unreadable":
            self.save_hyperparameters({"folder": Path("data")})
        # As a normaliser or a codebook has it: each rank sees other points.
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))  # of forward, in training
        self.automatic_optimization = KIND not in ("two optimizers", "stepped twice")
        if KIND != "no example":
            self.example_input_array = torch.zeros(2, 8)

    def forward(self, points: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        if self.trainer.training:
            self.calls = self.calls + 1
        scores = self.rest(self.first(points - self.centre))
        if KIND == "no gradient" and not self.training:
            return scores.detach()
        return {"scores": scores} if KIND == "dict" else scores

    def look(self, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        points, classes = batch
        scores = self(points)
        scores = scores["scores"] if KIND == "dict" else scores
        right = (scores.argmax(dim=1) == classes).float().mean()
        return nn.functional.cross_entropy(scores, classes), right

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss, _ = self.look(batch)
        self.centre = 0.9 * self.centre + 0.1 * batch[0].mean(dim=0)
        if KIND != "nameless loss":
            self.log(LOSS, loss, sync_dist=True)
        if KIND == "stepped twice":
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().step()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        _, right = self.look(batch)
        self.log("accuracy", right, sync_dist=True)
        if KIND != "nameless score":
            error = right / 0 if KIND == "endless score" else 1 - right
            self.log("error", error, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer | list | tuple:
        if KIND == "two optimizers":
            return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.first, self.rest)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        if KIND == "schedule by epoch":
            return [optimizer], [schedule]
        if KIND == "ReduceLROnPlateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        elif KIND == "unreadable schedule":
            schedule.folder = Path("data")
        elif KIND == "unreadable optimizer":
            optimizer.param_groups[0]["folder"] = Path("data")
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": LOSS}]

    def on_train_end(self) -> None:
        folder = self.trainer.datamodule.hparams.output_dir
        torch.save(self.state_dict(), Path(folder, f"rank_{self.global_rank}.pt"))


def make_data(options, location) -> tuple:
    return options, None


def describe_data(data) -> dict[str, str]:
    return {"values": "drawn from their numbers"}


def make_datamodule(options, data, first_step: int = 0, skipped: tuple = ()) -> PointsModule:
    if KIND in ("val_dataloader", "test_dataloader"):
        delattr(PointsModule, KIND)
    return PointsModule(asdict(options), first_step)


def make_model(options, data) -> Classifier:
    if KIND == "late hook":
        Classifier.on_train_batch_end = lambda self, outputs, batch, batch_idx: None
    if KIND in ("validation_step", "test_step"):
        delattr(Classifier, KIND)
    return Classifier()


def score(metrics: dict[str, float]) -> float:
    return metrics["accuracy" if HIGHER_IS_BETTER else "error"]


def closer_look(options, data) -> None:
    return None


def make_callbacks() -> list:
    found = {"ModelCheckpoint": ModelCheckpoint, "EarlyStopping": partial(EarlyStopping, "error")}
    return [found[KIND]()] if KIND in found else []


def report(metrics: dict, options, trainer) -> None:
    print(metrics["tested"])
