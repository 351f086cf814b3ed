"""A folder of checkpoints: what is written is whole, and what was there at the save; and which one is the best."""

from io import BytesIO
from pathlib import Path
from threading import Event
from typing import BinaryIO

import pytest
import torch
from location import Location
from survival import checkpoints
from survival.checkpoints import BackgroundWriter, CheckpointFolder, best_names, step_name, step_names


@pytest.fixture
def writer(tmp_path: Path) -> BackgroundWriter:
    """Of an empty folder, in which it keeps two checkpoints."""
    return BackgroundWriter(CheckpointFolder(str(tmp_path / "checkpoints")), keep=2)


def test_the_newest_are_kept_and_what_is_written_is_what_was_there_at_the_save(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save
    state = {"weights": torch.zeros(1000)}

    def save_late(*given) -> None:
        state["weights"] += 1  # as the next step does
        save(*given)

    monkeypatch.setattr(torch, "save", save_late)
    for step in (10, 9, 100):
        writer.save_checkpoint(state, step_name(step))
        writer.finish()
    assert step_names(writer.folder) == [step_name(100), step_name(10)]
    path = Path(writer.folder.url, step_name(100))
    assert torch.load(path)["weights"].unique().tolist() == [2]


def test_bytes_that_read_back_wrong_are_no_checkpoint(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def save_other_bytes(state: dict, file: BinaryIO) -> None:
        whole = BytesIO()
        save(state, whole)
        content = bytearray(whole.getvalue())
        content[len(content) // 2] ^= 1  # one bit, of a tensor
        file.write(content)

    monkeypatch.setattr(torch, "save", save_other_bytes)
    writer.save_checkpoint({"weights": torch.zeros(20_000)}, step_name(1))
    writer.finish()
    assert writer.failure.startswith("step_00000001.ckpt not written: ")
    assert list(writer.folder.path.iterdir()) == []


def test_a_bucket_that_has_kept_less_than_was_sent_has_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = checkpoints.CheckpointBucket(Location("s3://runs/first", anonymous=True))
    monkeypatch.setattr(checkpoints.obstore, "put", lambda *_: None)
    monkeypatch.setattr(checkpoints.obstore, "head", lambda *_: {"size": 1})
    with pytest.raises(OSError, match=r"step_00000001.ckpt has 1 bytes in the bucket"):
        bucket.write(step_name(1), {})


def test_a_save_is_left_out_while_the_one_before_it_is_being_written(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would use the same copy in memory, and the file would be of two steps."""
    released = Event()
    save = torch.save

    def save_when_released(*given: object) -> None:
        released.wait(60)
        save(*given)

    monkeypatch.setattr(torch, "save", save_when_released)
    state = {"weights": torch.zeros(1000)}
    writer.save_checkpoint(state, step_name(1))
    state["weights"] += 1
    writer.save_checkpoint(state, step_name(2))
    released.set()
    writer.finish()
    assert step_names(writer.folder) == [step_name(1)]
    assert not torch.load(Path(writer.folder.url, step_name(1)))["weights"].any()


@pytest.mark.parametrize("higher_is_better, sign", [(False, 1), (True, -1)])
def test_a_worse_score_never_takes_the_place_of_the_best_also_in_a_later_run(
    writer: BackgroundWriter, higher_is_better: bool, sign: int
) -> None:
    """Scores that are better when higher may be negative, as a log-likelihood is."""
    for _ in range(2):
        again = BackgroundWriter(writer.folder, keep=2, higher_is_better=higher_is_better)
        for step, rmse in ((1, 3.0), (2, 2.0), (3, 2.5)):
            again.save_checkpoint({"step": step}, step_name(step))
            again.keep_if_best(step, sign * rmse)
            again.finish()
    assert best_names(writer.folder) == [f"best_{sign * 2.0:.6f}_step_00000002.ckpt"]
