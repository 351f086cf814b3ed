"""What a run shows of itself while it goes on."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class LossBar(TQDMProgressBar):
    """Shows the last loss. With prog_bar=True, Lightning would read it in every step."""

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict:
        metrics = super().get_metrics(trainer, module)
        if "loss" in trainer.callback_metrics:
            metrics["loss"] = trainer.callback_metrics["loss"].item()
        return metrics
