"""Chapter 6: what a folder of checkpoints goes through: full disks, lost buckets, other bytes, the best and the newest."""

import csv
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import boto3
import buckets
import programs
import pytest
import torch
from chapter_6 import AGAIN, SCRIPT, SMALL, folder, local, rooms, undisturbed  # noqa: F401
from runs import assert_same_bits, last_checkpoint, state, summary

thorough = pytest.mark.thorough


@pytest.fixture
def checkpoints(tmp_path: Path):
    """An empty folder of checkpoints, and a writer that keeps two of them."""
    from survival.checkpoints import BackgroundWriter, CheckpointFolder

    return BackgroundWriter(CheckpointFolder(str(tmp_path / "checkpoints")), keep=2)


def test_the_newest_are_kept_and_what_is_written_is_what_was_there_at_the_save(checkpoints) -> None:
    from survival.checkpoints import step_name, step_names

    save = torch.save
    state = {"weights": torch.zeros(1000)}

    def save_late(*given) -> None:
        state["weights"] += 1  # as the next step does
        save(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_late)
        for step in (10, 9, 100):
            checkpoints.save_checkpoint(state, step_name(step))
            checkpoints.finish()
    assert step_names(checkpoints.folder) == [step_name(100), step_name(10)]
    path = Path(checkpoints.folder.url, step_name(100))
    assert torch.load(path)["weights"].unique().tolist() == [2]


def test_a_full_disk_ends_no_run_and_the_last_good_checkpoint_is_named(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    assert programs.run(SCRIPT, *flags, terminate_at_step=4).code == AGAIN
    good = last_checkpoint(tmp_path)
    done = programs.run(SCRIPT, *flags, limit_files=1_000_000)
    assert done.code == 1, done.err
    unwritten = rf"note: step_00000012.ckpt not written: .*File too large.*; in \S+: {good.name}\n"
    assert re.search(unwritten, done.out), done.out
    assert "the last checkpoint is not there" in done.out.splitlines()[-1]
    assert last_checkpoint(tmp_path) == good
    programs.require_success(SCRIPT, *flags)
    assert_same_bits(tmp_path, undisturbed(1))


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def serve_bucket(monkeypatch: pytest.MonkeyPatch):
    """Serve an empty bucket within a block: yields the flags that let a run save there, and a client."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def serve() -> Iterator[tuple]:
        with buckets.serving("", latency_ms=0) as address:
            client = boto3.client("s3", endpoint_url=address)
            client.create_bucket(Bucket="runs")
            place = ["--checkpoint-dir", "s3://runs/first", "--endpoint", address]
            yield [*place, "--retry-timeout", 1], client

    return serve


def test_a_run_resumes_from_a_bucket_to_the_bit(
    serve_bucket, local: list[str], tmp_path: Path, undisturbed
) -> None:
    with serve_bucket() as (place, client):
        flags = [*SMALL, *local, *place, "--output-dir", tmp_path]
        assert programs.run(SCRIPT, *flags, environment=KEYS, terminate_at_step=4).code == AGAIN
        programs.require_success(SCRIPT, *flags, environment=KEYS)
        listed = client.list_objects_v2(Bucket="runs")["Contents"]
        names = sorted(entry["Key"].removeprefix("first/") for entry in listed)
        assert names[0].startswith("best_")
        assert names[-1] == "step_00000012.ckpt"
        assert len(names) <= 4  # one is left out while the one before it is still being written
        (tmp_path / "checkpoints").mkdir()
        client.download_file("runs", "first/step_00000012.ckpt", tmp_path / "checkpoints/step_00000012.ckpt")
    assert (tmp_path / "resumed_at_5").exists() or (tmp_path / "resumed_at_6").exists()
    assert_same_bits(tmp_path, undisturbed(1))


def test_a_bucket_that_goes_away_ends_no_run_and_must_be_there_at_its_start(
    serve_bucket, local: list[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    with serve_bucket() as (place, client):
        flags = [*SMALL, *local, *place, "--output-dir", tmp_path]
        program = programs.Program(SCRIPT, *flags, environment=KEYS, wait_for_file=(7, gone))
        listed = partial(client.list_objects_v2, Bucket="runs")
        programs.wait_for(lambda: listed()["KeyCount"] >= 1, program, "a checkpoint")
    gone.touch()
    done = program.wait()
    assert done.code == 1, done.err
    assert summary(tmp_path)["steps"] == 12
    assert re.search(r"step_00000012.ckpt not written: .*; in s3://runs/first: no answer", done.out), done.out

    again = programs.run(SCRIPT, *flags, environment=KEYS)
    assert again.code == 2, again.err
    assert "error: --checkpoint-dir s3://runs/first: " in again.err.splitlines()[-1]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=thorough), 3])
def test_each_step_is_saved_once_and_never_between_its_micro_batches(
    accumulate: int, local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import train
    from survival.checkpoints import CheckpointFolder

    saved, write = [], CheckpointFolder.write

    def note(self, name: str, checkpoint: dict) -> None:
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        saved.append((name, checkpoint["global_step"], batches))
        write(self, name, checkpoint)

    monkeypatch.setattr(CheckpointFolder, "write", note)
    flags = ["--max-steps", 4, "--checkpoint-every", 2, "--accumulate-grad-batches", accumulate]
    train.main([*SMALL, *local, *map(str, flags), "--output-dir", str(tmp_path)])
    assert saved == [(f"step_{step:08}.ckpt", step, step * accumulate) for step in (2, 4)]


def test_bytes_that_read_back_wrong_are_no_checkpoint(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    from survival.checkpoints import step_name, step_names

    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: save(state, file) or file.truncate(200))
    checkpoints.save_checkpoint({"weights": torch.zeros(100)}, step_name(1))
    checkpoints.finish()
    assert checkpoints.failure.startswith("step_00000001.ckpt not written: ")
    assert list(checkpoints.folder.path.iterdir()) == []
    assert step_names(checkpoints.folder) == []


def test_minutes_may_decide_when_to_save(local: list[str], tmp_path: Path) -> None:
    import train

    flags = ["--checkpoint-every", "100", "--checkpoint-minutes", "1e-9", "--keep", "100", "--max-steps", "3"]
    train.main([*SMALL, *local, *flags, "--output-dir", str(tmp_path)])
    names = sorted(path.name for path in tmp_path.glob("checkpoints/step_*"))
    # One is left out while the one before it is still being written.
    assert {"step_00000001.ckpt", "step_00000003.ckpt"} <= set(names)


def test_a_run_that_has_ended_ends_the_same_when_it_is_started_again(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    run = shutil.copytree(undisturbed(1), tmp_path / "run")
    (run / "summary.json").unlink()
    programs.require_success(SCRIPT, *SMALL, *local, "--output-dir", run)
    assert_same_bits(run, undisturbed(1))


def test_checkpoints_of_another_run_are_not_overwritten_unless_asked_for(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    run = shutil.copytree(undisturbed(1), tmp_path / "run")
    flags = [*SMALL[:-2], *local, "--max-steps", 2, "--output-dir", run]
    done = programs.run(SCRIPT, *flags)
    assert done.code == 2
    assert re.search(r"error: --checkpoint-dir \S+: has step_00000012.ckpt; give --resume", done.err), (
        done.err
    )
    assert state(run)["step"] == 12
    programs.require_success(SCRIPT, *flags, "--overwrite")
    assert state(run)["step"] == 2


def test_the_rmse_in_full_is_that_of_the_few_if_they_are_all(local: list[str], tmp_path: Path) -> None:
    flags = [*SMALL, *local, "--max-steps", 2, "--validate-every", 2, "--output-dir", tmp_path]
    programs.require_success(SCRIPT, *flags, "--full-validation-patches", 24)
    with open(tmp_path / "metrics.csv", newline="") as log:
        rows = list(csv.DictReader(log))
    few, full = ([row[name] for row in rows if row[name]] for name in ("rmse (m/s)", "full rmse (m/s)"))
    assert len(few) == 1
    assert [float(value) for value in full] == pytest.approx([float(few[0])], rel=1e-6)


def test_all_patches_are_looked_at_only_where_the_few_are_as_good_as_ever(checkpoints) -> None:
    """And a state that is saved and loaded goes on from there."""
    from errors import DataError
    from survival.best import BestCheckpoint
    from task import score

    trainer, looked = MagicMock(is_global_zero=True, loggers=[]), []
    trainer.strategy.broadcast = lambda score: score
    checkpoints.keep_if_best = MagicMock()
    look = lambda *_: looked.append(trainer.global_step) or {"rmse (m/s)": 7.0}  # noqa: E731

    def make() -> BestCheckpoint:
        return BestCheckpoint(checkpoints, score, higher_is_better=False, look_closer=look)

    def validate(best: BestCheckpoint, step: int, few: float) -> None:
        trainer.global_step = step
        trainer.callback_metrics = {"rmse (m/s)": torch.tensor(few), "loss": torch.tensor(0.0)}
        best.on_validation_end(trainer, MagicMock())

    best = make()
    for step, few in enumerate([3.0, 2.0, 2.5]):
        validate(best, step, few)
    again = make()
    again.load_state_dict(best.state_dict())
    for step, few in ((3, 2.1), (4, 1.9)):
        validate(again, step, few)
    assert looked == [0, 1, 4]
    assert [call.args for call in checkpoints.keep_if_best.call_args_list] == [(0, 7.0), (1, 7.0), (4, 7.0)]
    with pytest.raises(DataError, match="--validation-times: no value is present"):
        validate(again, 5, float("nan"))


@pytest.mark.parametrize("higher_is_better, sign", [(False, 1), (True, -1)])
def test_a_worse_score_never_takes_the_place_of_the_best_also_in_a_later_run(
    checkpoints, higher_is_better: bool, sign: int
) -> None:
    """Scores that are better when higher may be negative, as a log-likelihood is."""
    from survival.checkpoints import BackgroundWriter, best_names, step_name

    for _ in range(2):
        writer = BackgroundWriter(checkpoints.folder, keep=2, higher_is_better=higher_is_better)
        for step, score in ((1, 3.0), (2, 2.0), (3, 2.5)):
            writer.save_checkpoint({"step": step}, step_name(step))
            writer.keep_if_best(step, sign * score)
            writer.finish()
    assert best_names(checkpoints.folder) == [f"best_{sign * 2.0:.6f}_step_00000002.ckpt"]


def test_a_checkpoint_of_other_bytes_or_another_run_is_refused(tmp_path: Path, local, undisturbed) -> None:
    from errors import CheckpointError
    from options import parse_options
    from survival.checkpoints import CheckpointFolder
    from survival.resume import find_start, load_whole, make_start

    run = shutil.copytree(undisturbed(1), tmp_path / "run")
    folder = CheckpointFolder(str(run / "checkpoints"))
    options = asdict(parse_options("a test", [*SMALL, *local]))
    assert find_start(folder, "last", options).step == 12
    newest = last_checkpoint(run)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, of a tensor
    newest.write_bytes(content)
    torch.load(newest, weights_only=True)  # says nothing
    assert find_start(folder, "last", options).step == 10
    with pytest.raises(CheckpointError, match=r"has other bytes than those written, in .*; give a whole"):
        find_start(folder, str(newest), options)
    with pytest.raises(CheckpointError, match="has --seed 0, not 1; give --seed that, or no --resume"):
        find_start(folder, "last", options | {"seed": 1})
    of_old = load_whole(folder, "step_00000010.ckpt")
    assert make_start("old", of_old, options).step == 10
    del of_old["callbacks"]["RunRecord"]["options"]["level"]  # None here, which is not the same as unknown
    with pytest.raises(CheckpointError, match="does not say its --level; give no --resume"):
        make_start("old", of_old, options)
    with pytest.MonkeyPatch.context() as patch:  # what cannot be read now is not damaged
        patch.setattr(CheckpointFolder, "read", MagicMock(side_effect=OSError("Input/output error")))
        with pytest.raises(CheckpointError, match="cannot be read now: Input/output error; try again"):
            find_start(folder, "auto", options)
    for path in run.glob("checkpoints/step_*"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in \S+; give no --resume"):
        find_start(folder, "auto", options)


def test_a_run_from_another_folders_checkpoint_goes_back_no_further_than_that(
    tmp_path: Path, local, undisturbed
) -> None:
    """After a bad loss, while its own folder has no checkpoint yet."""
    from options import parse_options
    from survival.checkpoints import CheckpointFolder
    from survival.recovery import BadLoss
    from survival.resume import find_start, skip_batches

    named = str(last_checkpoint(undisturbed(1)))
    options = asdict(parse_options("", [*SMALL, *local, "--resume", named]))
    empty = CheckpointFolder(str(tmp_path))
    start = find_start(empty, named, options)
    again = skip_batches(BadLoss(13, float("inf")), start, empty, options)
    assert (again.step, again.skipped) == (start.step, ((13, 14),)) == (12, ((13, 14),))


@thorough
def test_the_measurement_of_saves_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from studies import saving

    saving.main(["--repeats", "1"])
    assert capsys.readouterr().out.count("it costs 2%") == 2
