"""Checkpoints after whole steps, and whether a run may go on from one."""

from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from arguments import require_same, take_over
from errors import CheckpointError
from options import RESUME_KEYS, STORE_DEFAULTS, Options

# Under this name Lightning keeps what the data module has saved: all options of the run.
OPTIONS = "datamodule_hyper_parameters"
PARTS = {"global_step", "state_dict", "optimizer_states", "lr_schedulers"}
PARTS |= {"hyper_parameters", OPTIONS}


class StepCheckpoint(ModelCheckpoint):
    """Saves after whole steps only, and checks that data and training begin together."""

    # Lightning's holds --checkpoint-every, with which a run may go on as it likes.
    state_key = "StepCheckpoint"

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_start(trainer, module)
        step = trainer.global_step
        first = trainer.datamodule.first_step
        if first != step:  # samples would be repeated or lost, without an error
            reason = f"data begin at step {first}, and training at step {step}"
            raise CheckpointError(f"{reason}; give a whole checkpoint")
        step_of_rank_0 = trainer.strategy.broadcast(step)
        # Else ranks would train on different steps, and hang.
        if step != step_of_rank_0:
            reason = f"this rank begins at step {step}, and rank 0 at {step_of_rank_0}"
            raise CheckpointError(f"{reason}; give all nodes the same checkpoint")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        # The first micro-batch after a resume would save half a step as a whole one.
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def read_start(options: Options) -> tuple[int, Options]:
    """The step at which a run of these options begins: the checkpoint's, or 0 without one.

    What is not given, and depends on the store, is as in the checkpoint.
    CheckpointError if it cannot be read, or if it is of a run with other options.
    """
    if options.resume is None:
        return 0, options
    saved = load_checkpoint(options.resume, PARTS)
    return saved["global_step"], resume_options(options, saved[OPTIONS])


def load_checkpoint(path: str, parts: set[str]) -> dict:
    """What a checkpoint holds; CheckpointError unless it has these parts."""
    if not Path(path).is_file():
        raise CheckpointError("no such file; to start anew, give no --resume")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        missing = parts - saved.keys()
    except Exception as error:  # torch raises many kinds, depending on the bytes
        kind = type(error).__name__
        reason = f"cannot be read ({kind}); give a whole checkpoint"
        raise CheckpointError(reason) from error
    if missing:
        listed = ", ".join(sorted(missing))
        raise CheckpointError(f"has no {listed}; give one that this script wrote")
    return saved


def save_whole(saved: dict, path: Path) -> None:
    """Write a checkpoint, or leave the one before as it was."""
    part = path.with_suffix(".part")
    torch.save(saved, part)
    part.replace(path)


def resume_options(options: Options, before: dict) -> Options:
    """The options of a run that goes on from one with the options `before`."""
    now = take_over(STORE_DEFAULTS, before, asdict(options))
    require_same(RESUME_KEYS, before, now)
    return Options(**now)
