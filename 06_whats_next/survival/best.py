"""Validation at scale: few patches often, and many before a checkpoint is called the best."""

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data import PatchDataset
from errors import DataError
from survival.checkpoints import BackgroundWriter


class BestCheckpoint(Callback):
    """Keeps the checkpoint with the lowest RMSE on `patches`, a large set of the validation times.

    Lightning validates on the first of them. Only where this is as good as ever before, all
    of them are looked at. In several units, the product of the RMSEs decides.
    """

    state_key = "BestCheckpoint"

    def __init__(self, writer: BackgroundWriter, patches: PatchDataset):
        self.writer = writer
        self.patches = patches
        self.best_of_few = math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"best_of_few": self.best_of_few}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_of_few = state["best_of_few"]

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        named = [metrics[name].item() for name in metrics if name.startswith("rmse")]
        few = math.prod(named)
        if math.isnan(few):
            reason = "no value is present in any patch"
            raise DataError(f"--validation-times: {reason}; give others")
        # The same on all ranks, because Lightning has reduced the metrics.
        if few > self.best_of_few:
            return
        self.best_of_few = few
        rmse = measure_rmse(trainer, module, self.patches)
        logged = {f"full rmse ({unit})": value for unit, value in rmse.items()}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step - 1)
        if trainer.is_global_zero:
            score = math.prod(rmse.values())
            self.writer.keep_if_best(trainer.global_step, score)


def measure_rmse(
    trainer: Trainer, module: LightningModule, patches: PatchDataset
) -> dict[str, float]:
    """The RMSE on all patches, in each unit. Each rank takes its share of them."""
    for batch in trainer.datamodule.eval_loader(patches):
        batch = trainer.strategy.batch_to_device(batch)
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            module.validation_step(batch, 0)
    rmse = {}
    for mean_square, unit in zip(module.mean_squares, module.hparams.units):
        rmse[unit] = mean_square.compute().sqrt().item()
        mean_square.reset()
    return rmse
