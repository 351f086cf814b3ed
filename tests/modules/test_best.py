"""The checkpoint that is the best on all patches of the validation."""

from unittest.mock import MagicMock

import pytest
import torch
from errors import DataError
from survival.best import BestCheckpoint
from task import score


def test_all_patches_are_looked_at_only_where_the_few_are_as_good_as_ever() -> None:
    """And a state that is saved and loaded goes on from there."""
    writer, trainer, looked = MagicMock(), MagicMock(is_global_zero=True, loggers=[]), []
    trainer.strategy.broadcast = lambda score: score

    def look_closer(*_) -> dict[str, float]:
        looked.append(trainer.global_step)
        return {"rmse (m/s)": 7.0}

    def validate(best: BestCheckpoint, step: int, few: float) -> None:
        trainer.global_step = step
        trainer.callback_metrics = {"rmse (m/s)": torch.tensor(few), "loss": torch.tensor(0.0)}
        best.on_validation_end(trainer, MagicMock())

    best, again = (BestCheckpoint(writer, score, False, look_closer) for _ in range(2))
    for step, few in enumerate([3.0, 2.0, 2.5]):
        validate(best, step, few)
    again.load_state_dict(best.state_dict())
    for step, few in ((3, 2.1), (4, 1.9)):
        validate(again, step, few)
    assert looked == [0, 1, 4]
    assert [call.args for call in writer.keep_if_best.call_args_list] == [(0, 7.0), (1, 7.0), (4, 7.0)]
    with pytest.raises(DataError, match="--validation-times: no value is present"):
        validate(again, 5, float("nan"))
