"""What a run that survives asks of model, data and Trainer; refused in one line if it lacks."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from errors import DataError


def check_trainer(
    trainer: Trainer, module: LightningModule, boundary: Checkpoint
) -> None:
    """DataError if a run of these could not be resumed to the bit."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        reason = "divides the weights among ranks, and checkpoints here are of one rank"
        name = type(strategy).__name__
        raise DataError(f"task.py: strategy {name} {reason}; train with DDPStrategy")
    for callback in trainer.checkpoint_callbacks:
        if callback is boundary:
            continue
        reason = "would write into the folder that StepBoundary keeps"
        name = type(callback).__name__
        raise DataError(f"task.py: callback {name} {reason}; leave it out")
    if len(trainer.optimizers) != 1:
        number = len(trainer.optimizers)
        reason = "Lightning counts a step for each, and data are counted by steps"
        remedy = "give it one, with a group of parameters for each part"
        raise DataError(
            f"task.py: the model has {number} optimizers; {reason}; {remedy}"
        )
    if trainer.world_size > 1 and module.example_input_array is None:
        remedy = "set example_input_array to what forward takes, see task.py"
        raise DataError(
            f"task.py: the model has no example for several ranks; {remedy}"
        )
    if not hasattr(trainer.train_dataloader, "last_wait"):
        remedy = "make it a TimedLoader, see clock.py"
        raise DataError(
            f"task.py: the training's loader does not time its batches; {remedy}"
        )
    if not hasattr(trainer.datamodule, "first_step"):
        remedy = "keep first_step of task.make_datamodule as an attribute"
        raise DataError(
            f"task.py: the data module does not say where it begins; {remedy}"
        )


def check_steps(trainer: Trainer, expected: int) -> None:
    """DataError unless Lightning has counted as many steps as the batches make."""
    step = trainer.global_step
    if step != expected:
        reason = (
            f"the optimizer has taken {step} steps where the data are at {expected}"
        )
        remedy = "step it once for each batch, or for each --accumulate-grad-batches"
        raise DataError(f"task.py: {reason}; {remedy}")


def read_loss(trainer: Trainer, name: str) -> torch.Tensor:
    """The logged loss, on its device; DataError if training logs none of this name."""
    loss = trainer.callback_metrics.get(name)
    if loss is None:
        remedy = f'self.log("{name}", ..., sync_dist=True), or change LOSS of task.py'
        raise DataError(f"task.py: training logs no {name}; {remedy}")
    return loss
