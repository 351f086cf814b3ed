"""What is said of the times of ranks, where these are made up."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tracking import step_times
from tracking.step_times import StepTimes
from tracking.stragglers import windows_to_judge

NEEDED = windows_to_judge(2)


@pytest.mark.parametrize("batch_size", [8, 7])
def test_a_verdict_is_printed_when_it_changes_and_never_of_ranks_with_unequal_slices(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Of a step of 3 s a forward pass takes 1 s, and on rank 1 first 2 s. The first step is not timed."""
    moments = count()
    monkeypatch.setattr(step_times, "read_clock", lambda device: float(next(moments)))
    times = StepTimes(tmp_path, batch_size, SimpleNamespace(last_seconds=3.0, last_wait=0.1))
    strategy = SimpleNamespace(root_device="cpu")
    trainer = SimpleNamespace(global_step=0, world_size=2, is_global_zero=True, strategy=strategy)
    trainer.log_every_n_steps = trainer.accumulate_grad_batches = 1
    module = SimpleNamespace(device=torch.device("cpu"), parameters=list, log_dict=lambda values: None)
    times.on_train_start(trainer, module)
    for longer in [1.0] * (NEEDED + 6) + [0.0] * 5:
        more = torch.tensor([0, longer, 0, 0])  # of wait, forward pass, step and memory
        strategy.all_gather = lambda mine, more=more: torch.stack([mine, mine + more])
        trainer.global_step += 1
        times.on_train_batch_start(trainer, module, None, 0)
        times.on_before_backward(trainer, module, None)
        times.on_train_batch_end(trainer, module, None, None, 0)
    notes = [line for line in capsys.readouterr().out.splitlines() if line]
    if batch_size == 7:
        assert notes == [] == list(tmp_path.iterdir())
    else:
        slow, well = notes
        assert slow.startswith(f"note: step {NEEDED + 1}: rank 1 computes its forward pass for 2 s a step")
        assert well.startswith(f"note: step {NEEDED + 7}: no rank is slower")
        assert len((tmp_path / "tracking.jsonl").read_text().splitlines()) == NEEDED + 10
