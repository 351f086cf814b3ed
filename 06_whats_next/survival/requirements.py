"""What a run that survives asks of model, data and Trainer; refused in one line if it lacks."""

from collections.abc import Iterator
from io import BytesIO

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import distributed
from torch.serialization import load, save

from errors import DataError


def check_trainer(
    trainer: Trainer, module: LightningModule, boundary: Checkpoint
) -> None:
    """DataError if a run of these could not be resumed to the bit."""
    wrong = [
        *find_in_trainer(trainer, boundary),
        *find_in_model(trainer, module),
        *find_in_data(trainer),
    ]
    if wrong:
        raise DataError(wrong[0])


def find_in_trainer(trainer: Trainer, boundary: Checkpoint) -> Iterator[str]:
    """What train.py has put into the Trainer and must not."""
    name = type(trainer.strategy).__name__
    if type(trainer.strategy) not in (DDPStrategy, SingleDeviceStrategy):
        reason = "checkpoints here are of one rank, which must have the whole model"
        yield f"train.py: strategy {name}: {reason}; train with DDPStrategy"
    if trainer.early_stopping_callbacks:
        reason = "counts validations, of which a resumed run may have missed one"
        yield f"train.py: callback EarlyStopping {reason}; leave it out"
    for callback in trainer.checkpoint_callbacks:
        if callback is not boundary:
            name = type(callback).__name__
            reason = "would write into the folder that StepBoundary keeps"
            yield f"train.py: callback {name} {reason}; leave it out"


def find_in_model(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    """What the model lacks, or has and must not."""
    number = len(trainer.optimizers)
    if number != 1:
        reason = "Lightning counts a step for each, and data are counted by steps"
        remedy = "give it one, with a group of parameters for each part"
        yield f"task.py: the model has {number} optimizers; {reason}; {remedy}"
    for schedule in trainer.lr_scheduler_configs:
        if schedule.interval != "step" or schedule.reduce_on_plateau:
            reason = "must follow the steps, because the run has no epochs"
            remedy = 'give it "interval": "step", and no ReduceLROnPlateau'
            yield f"task.py: the learning rate's schedule {reason}; {remedy}"
    for name in ("validation_step", "test_step"):
        if not is_overridden(name, module):
            yield f"task.py: the model has no {name}; a run validates and tests"
    if is_overridden("on_train_batch_end", module):
        reason = "runs after the checkpoint of its step is saved"
        remedy = "use on_before_zero_grad, or a callback"
        yield f"task.py: the model's on_train_batch_end {reason}; {remedy}"
    if trainer.world_size > 1 and module.example_input_array is None:
        remedy = "set example_input_array to what forward takes"
        yield f"task.py: the model has no example for several ranks; {remedy}"
    saved = {
        "hyperparameters": dict(module.hparams),
        "optimizer": [one.state_dict() for one in trainer.optimizers],
        "schedule": [
            one.scheduler.state_dict() for one in trainer.lr_scheduler_configs
        ],
    }
    for part, state in saved.items():
        if not can_be_read_back(state):
            remedy = "keep Python's own numbers, text, lists and dicts in it"
            yield f"task.py: a checkpoint's {part} could not be loaded; {remedy}"


def find_in_data(trainer: Trainer) -> Iterator[str]:
    """What the data module lacks."""
    if not hasattr(trainer.train_dataloader, "last_wait"):
        remedy = "make it a TimedLoader, see clock.py"
        yield f"task.py: the training's loader does not time its batches; {remedy}"
    if not hasattr(trainer.datamodule, "first_step"):
        remedy = "keep first_step of make_datamodule as an attribute"
        yield f"task.py: the data module does not say where it begins; {remedy}"
    for name in ("val_dataloader", "test_dataloader"):
        if not is_overridden(name, trainer.datamodule):
            yield f"task.py: the data module has no {name}; a run validates and tests"
    if not can_be_read_back(dict(trainer.datamodule.hparams)):
        remedy = "keep Python's own numbers, text, lists and dicts in them"
        yield f"task.py: the data module's hyperparameters could not be loaded; {remedy}"


def can_be_read_back(values: object) -> bool:
    """Whether torch.load takes them from a checkpoint without trusting it."""
    file = BytesIO()
    save(values, file)
    file.seek(0)
    try:
        load(file, weights_only=True)
    except Exception:  # torch raises many kinds
        return False
    return True


def check_steps(trainer: Trainer, expected: int) -> None:
    """DataError unless Lightning has counted as many steps as the batches make."""
    step = trainer.global_step
    if step != expected:
        reason = (
            f"the optimizer has taken {step} steps where the data are at {expected}"
        )
        remedy = "step it once for each batch, or for each --accumulate-grad-batches"
        raise DataError(f"task.py: {reason}; {remedy}")


def check_end(trainer: Trainer) -> None:
    """DataError if the loader has ended before the run."""
    step = trainer.global_step
    if step < trainer.max_steps:
        reason = f"the training's loader ends after step {step} of {trainer.max_steps}"
        remedy = (
            "let it give --max-steps x --accumulate-grad-batches, and say so as len"
        )
        raise DataError(f"task.py: {reason}; {remedy}")


def read_loss(trainer: Trainer, name: str) -> torch.Tensor:
    """The logged loss on its device, the mean of all ranks: they must judge alike.

    DataError if training logs none of this name.
    """
    loss = trainer.callback_metrics.get(name)
    if loss is None:
        remedy = f'self.log("{name}", ..., on_step=True), or change LOSS'
        raise DataError(f"task.py: training logs no {name}; {remedy}")
    if trainer.world_size == 1:
        return loss
    total = loss.clone()
    distributed.all_reduce(total)
    return total / trainer.world_size
