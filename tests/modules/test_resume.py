"""Where a run begins, and again after a bad loss: at the newest checkpoint that is whole and its own."""

from dataclasses import asdict
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from block_order import BlockOrder, Window, batch_number
from errors import CheckpointError, DataError
from options import Options
from survival.checkpoints import CheckpointFolder, step_name, step_names
from survival.recovery import REMEMBERED, BadLoss, LossHistory
from survival.resume import Start, delete_later, find_start, load_whole, skip_batches

OPTIONS = asdict(Options())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Of a run's checkpoints at steps 10 and 12."""
    folder = CheckpointFolder(str(tmp_path / "checkpoints"))
    callbacks = {"StepBoundary": {"skipped": []}, "RunRecord": {"options": OPTIONS}}
    for step in (10, 12):
        state = {"global_step": step, "state_dict": {"weights": torch.ones(20_000)}, "optimizer_states": []}
        folder.write(step_name(step), state | {"callbacks": callbacks})
    return folder


def test_a_checkpoint_of_other_bytes_is_refused_and_the_one_before_it_taken(folder: CheckpointFolder) -> None:
    assert find_start(folder, "last", OPTIONS).step == 12
    newest = folder.path / step_name(12)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, of a tensor
    newest.write_bytes(content)
    torch.load(newest, weights_only=True)  # says nothing
    assert find_start(folder, "last", OPTIONS).step == 10
    with pytest.raises(CheckpointError, match=r"has other bytes than those written, in .*; give a whole"):
        find_start(folder, str(newest), OPTIONS)
    with pytest.MonkeyPatch.context() as patch:  # what cannot be read now is not damaged
        patch.setattr(CheckpointFolder, "read", MagicMock(side_effect=OSError("Input/output error")))
        with pytest.raises(CheckpointError, match="cannot be read now: Input/output error; try again"):
            find_start(folder, "auto", OPTIONS)
    for path in folder.path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in \S+; give no --resume"):
        find_start(folder, "auto", OPTIONS)


@pytest.mark.parametrize("name", ["StepBoundary", "RunRecord"])
def test_a_checkpoint_without_a_state_that_a_run_needs_is_refused(
    name: str, folder: CheckpointFolder
) -> None:
    """As one of a plain Trainer, which has all of Lightning's own parts."""
    saved = load_whole(folder, step_name(12))
    del saved["callbacks"][name]
    folder.write(step_name(14), saved)
    with pytest.raises(CheckpointError, match=f"has no state of {name}; give one that this chapter wrote"):
        find_start(folder, "auto", OPTIONS)


def test_later_checkpoints_that_cannot_be_deleted_end_the_run(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count as the newest."""
    delete_later(folder, 11)
    assert step_names(folder) == [step_name(10)]
    monkeypatch.setattr(CheckpointFolder, "delete", MagicMock(side_effect=OSError("Read-only file system")))
    said = f"--checkpoint-dir {folder.url}: Read-only file system; delete {step_name(10)} by hand"
    with pytest.raises(DataError, match=said):
        delete_later(folder, 9)


def test_a_run_from_another_folders_checkpoint_goes_back_no_further_than_that(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    """After a bad loss, while its own folder has no checkpoint yet."""
    named = str(folder.path / step_name(12))
    options = OPTIONS | {"resume": named}
    empty = CheckpointFolder(str(tmp_path))
    start = find_start(empty, named, options)
    again = skip_batches(BadLoss(13, float("inf")), start, empty, options)
    assert (again.step, again.skipped) == (start.step, ((13, 14),)) == (12, ((13, 14),))


def test_skipped_batches_move_the_later_ones_up() -> None:
    skipped = (Window(9, 10), Window(3, 5))
    assert [batch_number(step, skipped) for step in range(9)] == [0, 1, 2, 5, 6, 7, 8, 10, 11]
    plain, skipping = (BlockOrder(20, 4, 8, 2, seed=0, skipped=windows) for windows in ((), skipped))
    for step in range(9):
        assert skipping.address(step, 1) == plain.address(batch_number(step, skipped), 1)


def test_a_spike_is_bad_only_against_enough_other_losses() -> None:
    losses = LossHistory(spike_factor=10)
    losses.add(0, 100.0)
    for step in range(1, REMEMBERED):
        losses.add(step, 1.0)
    losses.add(REMEMBERED, 9.9)
    with pytest.raises(BadLoss, match=r"loss 10\.1 at step 60"):
        losses.add(60, 10.1)
    with pytest.raises(BadLoss, match="loss nan"):
        LossHistory(10).add(0, float("nan"))


def test_more_bad_losses_than_may_be_skipped_end_the_run() -> None:
    options = {"skip_batches": 1, "max_skips": 1}
    start = Start(skipped=(Window(3, 4),))
    with pytest.raises(DataError, match=r"--max-skips 1: loss nan at step 5 again"):
        skip_batches(BadLoss(5, float("nan")), start, None, options)
