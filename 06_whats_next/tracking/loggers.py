"""Where a run's curves go: Lightning's loggers, and the loss in the progress bar."""

import inspect

from lightning.pytorch import LightningModule, Trainer, loggers
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger


class LossBar(TQDMProgressBar):
    """Shows the last loss. With prog_bar=True, Lightning would read it in every step."""

    def __init__(self, loss: str, refresh_rate: int):
        super().__init__(refresh_rate)
        self.loss = loss

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict:
        metrics = super().get_metrics(trainer, module)
        metrics.pop("v_num", None)  # a logger's
        if self.loss in trainer.callback_metrics:
            metrics[self.loss] = trainer.callback_metrics[self.loss].item()
        return metrics


def make_loggers(
    names: list[str], folder: str, version: str, step: int, flush_every: int
) -> list[Logger]:
    """Loggers by the names of their classes, for a run that begins at this step.

    The CSV file of a resumed run is a new one. TensorBoard goes on in the same folder, and
    hides what an earlier run has written from this step on.
    """
    csv = {"version": version, "name": "", "flush_logs_every_n_steps": flush_every}
    tensorboard = {"version": "tensorboard", "name": ""}
    tensorboard |= {"purge_step": step, "default_hp_metric": False}
    arguments = {"CSVLogger": csv, "TensorBoardLogger": tensorboard}
    made = []
    for name in sorted(names, key="CSVLogger".__ne__):  # trainer.log_dir is the first's
        kind = getattr(loggers, name)
        given = arguments.get(name, {})
        places = {"save_dir", "root_dir"} & set(inspect.signature(kind).parameters)
        given |= dict.fromkeys(places, folder)
        made.append(kind(**given))
    return made
