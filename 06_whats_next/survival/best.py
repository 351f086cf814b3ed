"""Validation at scale: few samples often, and many before a checkpoint is called the best."""

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from errors import DataError
from survival.checkpoints import BackgroundWriter


class BestCheckpoint(Callback):
    """Keeps the checkpoint with the best score.

    `score` makes one number of what Lightning's validation logs. Where that is as good as
    ever before, `look_closer` measures the model on more samples, and that decides. Without
    it, the validation decides alone.
    """

    state_key = "BestCheckpoint"

    def __init__(
        self,
        writer: BackgroundWriter,
        score: Callable[[dict[str, float]], float],
        higher_is_better: bool,
        look_closer: Callable[[Trainer, LightningModule], dict[str, float]] | None,
    ):
        self.writer = writer
        self.score = score
        self.sign = -1 if higher_is_better else 1
        self.look_closer = look_closer
        self.best_of_few = math.inf  # times the sign: lower is better

    def state_dict(self) -> dict[str, Any]:
        return {"best_of_few": self.best_of_few}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_of_few = state["best_of_few"]

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        logged = trainer.callback_metrics
        metrics = {name: value.item() for name, value in logged.items()}
        score = self.read_score(trainer, metrics)
        if self.sign * score > self.best_of_few:
            return
        self.best_of_few = self.sign * score
        if self.look_closer:
            closer = self.look_closer(trainer, module)
            named = {f"full {name}": value for name, value in closer.items()}
            for logger in trainer.loggers:
                logger.log_metrics(named, step=trainer.global_step - 1)
            score = self.read_score(trainer, closer)
        if trainer.is_global_zero:
            self.writer.keep_if_best(trainer.global_step, score)

    def read_score(self, trainer: Trainer, metrics: dict[str, float]) -> float:
        """The score of rank 0, on all ranks: they must go on alike.

        DataError if the metrics have none, or one that would never be the best.
        """
        try:
            score = self.score(metrics)
        except LookupError as error:
            remedy = "log it, or change score()"
            raise DataError(f"task.py: validation logs no {error}; {remedy}") from error
        score = trainer.strategy.broadcast(score)
        if not math.isfinite(score):
            remedy = "look at validation_step, and at score()"
            raise DataError(f"task.py: the validation's score is {score}; {remedy}")
        return score
