"""What happens between two steps: agree, judge the loss, save, stop. The order matters."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from block_order import Window
from errors import CheckpointError, print_note
from survival.checkpoints import BackgroundWriter, step_name
from survival.determinism import (
    average_buffers,
    names_of_buffers,
    seed_batch,
    settle_buckets,
)
from survival.preemption import EXIT_AGAIN, TEXTS, Agreement, Preemption, Reason
from survival.recovery import BadLoss, LossHistory
from survival.requirements import check_steps, check_trainer, read_loss

EXIT_LOST = 1  # a rank, or the last checkpoint: the same command again may go well


class Stopped(SystemExit):
    """A run that ends before its last step. Its code says whether to start it again."""


class StepBoundary(Checkpoint):
    """Looks after a run between its steps, on every rank alike.

    Saves every `every_steps` steps and every `every_minutes`, and where validation follows.
    """

    def __init__(
        self,
        writer: BackgroundWriter,
        preemption: Preemption,
        losses: LossHistory,
        *,
        loss: str,
        seed: int,
        skipped: tuple[Window, ...],
        every_steps: int,
        every_minutes: float | None,
        validate_every: int,
        grace: float,
        group_timeout: float,
    ):
        self.writer = writer
        self.preemption = preemption
        self.losses = losses
        self.loss = loss  # the name under which the model logs it
        self.seed = seed
        self.skipped = skipped
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.validate_every = validate_every
        self.grace = grace
        self.group_timeout = group_timeout
        self.unjudged: list[tuple[int, torch.Tensor]] = []
        self.batches = 0  # of this rank, in the whole run
        self.last_step = 0
        self.last_save = time.monotonic()

    @property
    def state_key(self) -> str:
        return "StepBoundary"

    def state_dict(self) -> dict[str, Any]:
        skipped = [list(window) for window in self.skipped]
        losses = list(self.losses.losses)
        return {"skipped": skipped, "losses": losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses.losses.extend(state["losses"])

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.agreement = Agreement(self.group_timeout)
        check_trainer(trainer, module, boundary=self)
        settle_buckets(trainer, module)
        self.buffers = names_of_buffers(module)
        step = trainer.global_step
        self.last_step = step
        self.batches = step * trainer.accumulate_grad_batches
        first = trainer.datamodule.first_step
        if first != step:  # else samples would be repeated or lost, without an error
            reason = f"data begin at step {first}, and training at step {step}"
            raise CheckpointError(f"{reason}; give a whole checkpoint")
        step_of_rank_0 = trainer.strategy.broadcast(step)
        # Otherwise ranks would train on different steps, and hang.
        if step != step_of_rank_0:
            reason = f"this rank begins at step {step}, and rank 0 at {step_of_rank_0}"
            raise CheckpointError(f"{reason}; give all nodes the same checkpoint")

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_batch(self.seed, self.batches, trainer.global_rank)

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer
    ) -> None:
        trained = [one for one in module.parameters() if one.grad is not None]
        gradients = [weights.grad for weights in trained]
        self.gradient_norm = torch.nn.utils.get_total_norm(gradients)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.batches += 1
        step = self.batches // trainer.accumulate_grad_batches
        check_steps(trainer, step)
        if step == self.last_step:  # between the micro-batches of a step
            return
        self.last_step = step
        average_buffers(trainer, module, self.buffers)
        wishes = [self.preemption.reason(), self.wants_to_save()]
        stop, save = self.agreement.exchange(wishes)
        is_last = stop or step == trainer.max_steps
        save = save or is_last or step % self.every_steps == 0
        save = save or step % self.validate_every == 0
        # A gradient that is not finite makes this NaN. The sum stays on the device.
        loss = read_loss(trainer, self.loss) + 0 * self.gradient_norm
        self.unjudged.append((step - 1, loss))
        self.judge_losses(leave=0 if save else 1)
        deadline = time.monotonic() + self.grace
        if is_last:  # finish the one before, or this one would be left out
            self.writer.finish(self.grace if stop else None)
        if save:
            self.last_save = time.monotonic()
            trainer.save_checkpoint(step_name(step))
        if stop:
            self.stop(trainer, Reason(stop), deadline)

    def wants_to_save(self) -> int:
        """Whether it is time, by this rank's clock. The ranks then save together."""
        if self.every_minutes is None:
            return 0
        if time.monotonic() - self.last_save < 60 * self.every_minutes:
            return 0
        # Once, although the answer comes a step later.
        self.last_save = time.monotonic()
        return 1

    def judge_losses(self, leave: int) -> None:
        """Judge the losses so far; BadLoss at a bad one.

        To read a loss waits for the device. So the last one is left for the next step,
        unless a checkpoint is about to be saved, which must hold no bad step.
        """
        while len(self.unjudged) > leave:
            step, loss = self.unjudged.pop(0)
            self.losses.add(step, loss.item())

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        """Let the thread write what it has; a run that was told to stop has waited."""
        if isinstance(exception, BadLoss):
            self.writer.finish()  # or ranks would find different checkpoints
        elif not isinstance(exception, Stopped):
            self.writer.finish(self.grace)
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            newest = self.writer.describe_newest()
            text = f"stopped after step {self.last_step}: Ctrl-C, which saves nothing"
            text += f"; in {self.writer.folder.url}: {newest}"
            print_note(f"{text}; the same command with --resume auto goes on")

    def stop(self, trainer: Trainer, reason: Reason, deadline: float) -> None:
        """End this rank when the checkpoint is written, or at the deadline."""
        step = trainer.global_step
        left = max(0, deadline - time.monotonic())
        self.writer.finish(left)
        # A launcher may kill the others when the first rank ends.
        self.agreement.wait_for_all(left)
        text = f"stopped after step {step}: {TEXTS[reason]}"
        code = EXIT_AGAIN
        if self.writer.failure:
            text += f"; its checkpoint is not there: {self.writer.failure}"
            code = EXIT_LOST
        if reason == Reason.FILE:
            code = 0
        else:
            text += "; the same command with --resume auto goes on"
        if trainer.is_global_zero:
            print_note(text)
        raise Stopped(code)
