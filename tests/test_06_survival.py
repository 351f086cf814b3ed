"""Chapter 6: runs that are killed, told to stop, starved of disk and fed NaN, and end as if nothing had happened."""

import csv
import gc
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from pathlib import Path
from threading import Event, Thread
from unittest.mock import MagicMock

import book
import boto3
import buckets
import numpy as np
import programs
import psutil
import pytest
import torch
from alone import Alone
from runs import assert_same_bits, last_checkpoint, state, summary, weights
from torch import distributed

CHAPTER, SCRIPT = book.ROOT / "06_whats_next", "06_whats_next/train.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --max-steps 12 --validate-every 6".split()
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-slots 12 --patches-per-block 2".split()
SMALL += "--full-validation-patches 30 --resume auto".split()
AGAIN = 75  # exit code: run the same command again

thorough = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("06_whats_next"), programs.planted_in_all(eval_samples=24):
        import train  # noqa: F401

        yield
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets, in one of which is a store."""
    folder = tmp_path_factory.mktemp("buckets")
    make_small_store(folder / "winds/whole")
    return folder


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[list[str]]:
    """The flags that read the store from a bucket, of whose answers one in twenty is an error."""
    with buckets.serving(folder, latency_ms=0, error_rate=0.05) as address:
        yield ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]


@pytest.fixture(scope="module")
def local(folder: Path) -> list[str]:
    """The flags that read the store from the disk."""
    return ["--store", str(folder / "winds/whole")]


def run_ranks(ranks: int, *flags: object, **options: object) -> list[programs.Run]:
    """Run the script on several ranks to their ends, whatever these are."""
    done = programs.run_ranks(SCRIPT, ranks, *SMALL, *flags, **options)
    late = [one for one in done if isinstance(one, TimeoutError)]
    assert late == [], programs.printed(done)
    return done


def codes(done: list[programs.Run]) -> list[int]:
    return [one.code for one in done]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local: list[str]):
    """Call it with a number of ranks: the folder of the run that nothing has disturbed."""
    made: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in made:
            target = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
            done = run_ranks(ranks, *local, "--output-dir", target, wait_for_writes=True)
            assert codes(done) == [0] * ranks, programs.printed(done)
            made[ranks] = target
        return made[ranks]

    return run


def truncate_newest(run: Path) -> str:
    """Cut off the newest checkpoint of a run in its middle; return its name."""
    newest = max(run.glob("checkpoints/step_*.ckpt"))
    os.truncate(newest, newest.stat().st_size // 2)
    return newest.name


# ------------------------------------------------------------------------------------------ chaos


def survive(ranks: int, kills: list[int], torn: set[int], run: Path, flags: list[str]) -> None:
    """Kill one rank at each of these steps after a start, and start again; tear a checkpoint before some starts.

    Before each kill two checkpoints are there, so that one is left where the newest is torn.
    """
    rng = np.random.default_rng(6)
    for number, step in enumerate(kills):
        if number in torn:
            name = truncate_newest(run)
        victim = int(rng.integers(ranks))
        planted = {victim: {"kill_with_checkpoints": (step, run / "checkpoints", 2)}}
        first = {"wait_for_writes": True} if number == 0 else {}  # then two are there at the first kill
        done = run_ranks(ranks, *flags, "--output-dir", run, planted=planted, **first)
        assert codes(done)[victim] == -9, programs.printed(done)
        for rank, one in enumerate(done):
            if rank != victim:
                assert one.code == 1, programs.printed(done)
                gone = (
                    rf"^rank {victim} \(process \d+ on \S+\) is gone; it was at step \d+, in the forward pass"
                )
                assert re.search(gone, one.err, re.M), one.err
        if number in torn:
            assert f"{name} is cut off, or no checkpoint" in done[0].out, done[0].out
    done = run_ranks(ranks, *flags, "--output-dir", run)
    assert codes(done) == [0] * ranks, programs.printed(done)


def test_killed_and_torn_it_ends_at_the_same_bits(failing: list[str], tmp_path: Path, undisturbed) -> None:
    survive(2, [5, 3], {1}, tmp_path / "run", failing)
    assert_same_bits(tmp_path / "run", undisturbed(2))


@thorough
def test_three_ranks_killed_end_at_the_same_bits(local: list[str], tmp_path: Path, undisturbed) -> None:
    survive(3, [5], set(), tmp_path / "run", local)
    assert_same_bits(tmp_path / "run", undisturbed(3))


@thorough
def test_killed_at_ten_steps_and_torn_twice_it_ends_at_the_same_bits(
    failing: list[str], local: list[str], tmp_path: Path
) -> None:
    longer = ["--max-steps", "40"]
    done = run_ranks(2, *local, *longer, "--output-dir", tmp_path / "undisturbed")
    assert codes(done) == [0, 0], programs.printed(done)
    kills = np.random.default_rng(6).integers(3, 6, size=10)
    kills[0] += 2  # the first two checkpoints take four steps
    survive(2, kills.tolist(), {3, 6}, tmp_path / "run", [*failing, *longer])
    assert_same_bits(tmp_path / "run", tmp_path / "undisturbed")


# ------------------------------------------------------------------------------- told to stop

STOPPED = {  # how a signal hits the rank that is not 0, or the one that writes
    "in the backward pass": (1, "terminate_in_backward", 4),
    "before the first step": (1, "terminate_at_start", 0),
    "before a step": (1, "terminate_at_step", 4),
    "in a write": (0, "terminate_in_write", 1),
}


@pytest.mark.parametrize(
    "how", ["in the backward pass", *(pytest.param(how, marks=thorough) for how in list(STOPPED)[1:])]
)
def test_told_to_stop_both_ranks_save_and_end_and_go_on_at_the_same_bits(
    how: str, local: list[str], tmp_path: Path, undisturbed
) -> None:
    rank, fault, number = STOPPED[how]
    flags = [*local, "--output-dir", tmp_path]
    done = run_ranks(2, *flags, planted={rank: {fault: number}})
    assert codes(done) == [AGAIN, AGAIN], programs.printed(done)
    said = re.search(r"stopped after step (\d+): SIGTERM or SIGUSR1; the same command with", done[0].out)
    assert said, done[0].out
    assert state(tmp_path)["step"] == int(said[1]) < 12
    done = run_ranks(2, *flags)
    assert codes(done) == [0, 0], programs.printed(done)
    assert_same_bits(tmp_path, undisturbed(2))


# --------------------------------------------------------------------------------- a bad loss


def test_a_poisoned_batch_is_skipped_and_the_run_can_be_resumed_to_the_bit(
    local: list[str], tmp_path: Path
) -> None:
    """The 26th block that is read gives 1e30 m/s to one batch, whose loss is infinite."""
    flags = [*SMALL, *local, "--patches-per-block", 1, "--output-dir"]
    poison = {"poison_read": 25}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = programs.require_success(SCRIPT, *flags, whole, **poison)
    assert summary(whole)["skipped_batches"] == [[4, 5]]
    assert re.search(r"loss (inf|nan) at step 4: back to step [24], without batches \[4, 5\]", done.out), (
        done.out
    )
    assert all(tensor.isfinite().all() for tensor in weights(whole).values())

    ended = programs.run(SCRIPT, *flags, killed, **poison, kill_at_step=12)
    assert ended.code == -9, ended.err
    programs.require_success(SCRIPT, *flags, killed, **poison)
    assert_same_bits(killed, whole)
    assert summary(killed)["skipped_batches"] == [[4, 5]]


# ------------------------------------------------------------------------ what a folder of checkpoints goes through


def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(local: list[str], tmp_path: Path) -> None:
    """The fault is gone when the step is taken again, as one of a GPU would be."""
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    done = programs.require_success(SCRIPT, *flags, spoil_gradient=5)
    assert re.search(r"loss nan at step 5: back to step [24], without batches \[5, 6\]", done.out), done.out
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


@thorough
def test_two_ranks_skip_a_poisoned_batch_together(local: list[str], tmp_path: Path) -> None:
    done = run_ranks(2, *local, "--patches-per-block", 1, "--output-dir", tmp_path, poison_read=25)
    assert codes(done) == [0, 0], programs.printed(done)
    assert summary(tmp_path)["skipped_batches"] == [[4, 5]]


@pytest.fixture
def checkpoints(tmp_path: Path):
    """An empty folder of checkpoints, and a writer that keeps two of them."""
    from checkpoints import BackgroundWriter, CheckpointFolder

    return BackgroundWriter(CheckpointFolder(str(tmp_path / "checkpoints")), keep=2)


def test_the_newest_are_kept_and_what_is_written_is_what_was_there_at_the_save(checkpoints) -> None:
    from checkpoints import step_name, step_names

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


def test_the_folder_copied_alone_trains_and_resumes(local: list[str], tmp_path: Path, undisturbed) -> None:
    alone = Alone(CHAPTER, SMALL, tmp_path)
    assert alone.start(*local, kill_at_step=8).wait().code == -9
    done = alone.start(*local).wait()
    assert done.code == 0, done.err
    assert "warning" not in done.err.lower()
    assert_same_bits(alone.output, undisturbed(1))
    assert alone.written_elsewhere() == []


# ------------------------------------------------------------------ between the steps, on one rank


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_step_is_saved_once_and_never_between_its_micro_batches(
    accumulate: int, local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import train
    from checkpoints import CheckpointFolder

    saved, write = [], CheckpointFolder.write

    def note(self, name: str, checkpoint: dict) -> None:
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        saved.append((name, checkpoint["global_step"], batches))
        write(self, name, checkpoint)

    monkeypatch.setattr(CheckpointFolder, "write", note)
    flags = ["--max-steps", 4, "--checkpoint-every", 2, "--accumulate-grad-batches", accumulate]
    train.main([*SMALL, *local, *map(str, flags), "--output-dir", str(tmp_path)])
    assert saved == [(f"step_{step:08}.ckpt", step, step * accumulate) for step in (2, 4)]


@pytest.mark.parametrize("how", ["a file", "hours"])
def test_a_file_or_a_time_limit_stops_a_run_and_it_goes_on(
    how: str, local: list[str], tmp_path: Path, undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    import train

    flags = [*SMALL, *local, "--output-dir", str(tmp_path)]
    limit = ["--max-hours", "1e-9"] if how == "hours" else []
    if how == "a file":
        (tmp_path / "STOP").touch()
    code = 0
    try:
        train.main([*flags, *limit])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().out
    if how == "a file":
        assert code == 0  # no scheduler starts it again
        assert re.search(r"stopped after step \d+: the file STOP is there; remove it", said), said
        (tmp_path / "STOP").unlink()
    else:
        assert code == AGAIN
        assert "stopped after step 1: --max-hours are over; the same command with --resume" in said
    assert state(tmp_path)["step"] < 12
    programs.require_success(SCRIPT, *flags)
    assert_same_bits(tmp_path, undisturbed(1))


def test_both_signals_only_set_a_flag(tmp_path: Path) -> None:
    from preemption import Preemption, Reason

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    try:
        for number in numbers:
            preemption = Preemption(tmp_path, None, None)
            assert preemption.reason() == Reason.NONE
            os.kill(os.getpid(), number)
            assert preemption.reason() == Reason.SIGNAL
            preemption.close()
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_a_stop_waits_no_longer_than_its_grace(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of the first step is never written, as if the storage hung."""
    import train

    released, save = Event(), torch.save

    def hang(*given) -> None:
        released.wait()
        save(*given)

    monkeypatch.setattr(torch, "save", hang)
    flags = ["--max-hours", "1e-9", "--grace", "1", "--output-dir", str(tmp_path)]
    try:
        with pytest.raises(SystemExit) as ended:
            train.main([*SMALL, *local, *flags])
    finally:
        released.set()
    assert ended.value.code == 1
    stopped = r"stopped after step 1: --max-hours are over; its checkpoint is not there: still being written"
    assert re.search(stopped, capsys.readouterr().out)


def test_bytes_that_read_back_wrong_are_no_checkpoint(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints import step_name, step_names

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_checkpoint_is_that_of_the_lowest_rmse(ranks: int, undisturbed) -> None:
    """Of those on all patches of the validation, on one rank and on two."""
    run = undisturbed(ranks)
    with open(run / "metrics.csv", newline="") as log:
        rows = [row for row in csv.DictReader(log) if row["full rmse (m/s)"]]
    best = min(rows, key=lambda row: float(row["full rmse (m/s)"]))
    (path,) = run.glob("checkpoints/best_*")
    assert path.name.startswith(f"best_{float(best['full rmse (m/s)']):.6f}_step_")
    assert torch.load(path, weights_only=True)["global_step"] == int(best["step"]) + 1
    (alone,) = undisturbed(1).glob("checkpoints/best_*")
    assert float(path.name.split("_")[1]) == pytest.approx(float(alone.name.split("_")[1]), rel=1e-4)


def test_the_rmse_in_full_is_that_of_the_few_if_they_are_all(local: list[str], tmp_path: Path) -> None:
    flags = [*SMALL, *local, "--max-steps", 2, "--validate-every", 2, "--output-dir", tmp_path]
    programs.require_success(SCRIPT, *flags, "--full-validation-patches", 24)
    with open(tmp_path / "metrics.csv", newline="") as log:
        rows = list(csv.DictReader(log))
    few, full = ([row[name] for row in rows if row[name]] for name in ("rmse (m/s)", "full rmse (m/s)"))
    assert len(few) == 1
    assert [float(value) for value in full] == pytest.approx([float(few[0])], rel=1e-6)


def test_all_patches_are_looked_at_only_where_the_few_are_as_good_as_ever(
    checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a state that is saved and loaded goes on from there."""
    import validation
    from errors import DataError
    from validation import BestCheckpoint

    trainer, looked = MagicMock(is_global_zero=True, loggers=[]), []
    checkpoints.keep_if_best = MagicMock()
    look = lambda *_: looked.append(trainer.global_step) or {"m/s": 7.0}  # noqa: E731
    monkeypatch.setattr(validation, "measure_rmse", look)

    def make() -> BestCheckpoint:
        return BestCheckpoint(checkpoints, MagicMock(), 384)

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


def test_a_worse_score_never_takes_the_place_of_the_best_also_in_a_later_run(checkpoints) -> None:
    from checkpoints import BackgroundWriter, best_names, step_name

    for writer in (checkpoints, BackgroundWriter(checkpoints.folder, keep=2)):
        for step, score in ((1, 3.0), (2, 2.0), (3, 2.5)):
            writer.save_checkpoint({"step": step}, step_name(step))
            writer.keep_if_best(step, score)
            writer.finish()
    assert best_names(checkpoints.folder) == ["best_2.000000_step_00000002.ckpt"]


def test_a_checkpoint_of_other_bytes_or_another_run_is_refused(tmp_path: Path, local, undisturbed) -> None:
    from checkpoints import CheckpointError, CheckpointFolder
    from options import parse_options
    from resume import find_start

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
    with pytest.MonkeyPatch.context() as patch:  # what cannot be read now is not damaged
        patch.setattr(CheckpointFolder, "read", MagicMock(side_effect=OSError("Input/output error")))
        with pytest.raises(CheckpointError, match="cannot be read now: Input/output error; try again"):
            find_start(folder, "auto", options)
    for path in run.glob("checkpoints/step_*"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in \S+; give no --resume"):
        find_start(folder, "auto", options)


def test_skipped_batches_move_the_later_ones_up() -> None:
    from recovery import SkippingOrder, Window, batch_number

    skipped = (Window(9, 10), Window(3, 5))
    assert [batch_number(step, skipped) for step in range(9)] == [0, 1, 2, 5, 6, 7, 8, 10, 11]
    plain, skipping = (SkippingOrder(20, 4, 8, 2, seed=0, skipped=windows) for windows in ((), skipped))
    for step in range(9):
        assert skipping.address(step, 1) == plain.address(batch_number(step, skipped), 1)


def test_a_spike_is_bad_only_against_enough_other_losses() -> None:
    from recovery import REMEMBERED, BadLoss, LossHistory

    losses = LossHistory(spike_factor=10)
    losses.add(0, 100.0)
    for step in range(1, REMEMBERED):
        losses.add(step, 1.0)
    losses.add(REMEMBERED, 9.9)
    with pytest.raises(BadLoss, match=r"loss 10\.1 at step 60"):
        losses.add(60, 10.1)
    with pytest.raises(BadLoss, match="loss nan"):
        LossHistory(10).add(0, float("nan"))


# ------------------------------------------------------------------------- notices of the cloud


class Metadata(BaseHTTPRequestHandler):
    """The metadata servers of AWS and Google, with a notice or without."""

    notice = False

    def do_PUT(self) -> None:
        self.answer(200, "a token")

    def do_GET(self) -> None:
        if self.path == "/google":
            assert self.headers["Metadata-Flavor"] == "Google"
            self.answer(200, "TRUE" if self.notice else "FALSE")
        else:
            assert self.headers["X-aws-ec2-metadata-token"] == "a token"
            self.answer(200 if self.notice else 404, '{"action": "terminate"}')

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *given) -> None:
        pass


@pytest.mark.parametrize(("cloud", "path"), [("aws", "/latest"), ("google", "/google")])
def test_the_clouds_notice_is_seen(cloud: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from preemption import has_spot_notice

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}{path}"
    try:
        assert not has_spot_notice(cloud, address)
        monkeypatch.setattr(Metadata, "notice", True)
        assert has_spot_notice(cloud, address)
    finally:
        server.shutdown()
        server.server_close()
    assert not has_spot_notice(cloud, address)  # nobody answers


# ------------------------------------------------------------------------------ who is missing


def test_the_rank_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from heartbeat import LOST, name_lost_rank

    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    (tmp_path / "ranks").mkdir()
    here = {"host": socket.gethostname(), "pid": os.getpid(), "since": 0}

    def place(rank: int, step: int, doing: str, **more: object) -> None:
        text = json.dumps({"step": step, "doing": doing} | here | more)
        (tmp_path / f"ranks/rank_{rank}.json").write_text(text.ljust(400))

    place(0, 7, "in the backward pass")
    place(1, 6, "in the backward pass")
    place(2, 6, "updating")
    place(3, 5, LOST)
    assert "rank 1 (process" in name_lost_rank(tmp_path)
    assert "does not answer; it is at step 6, in the backward pass" in name_lost_rank(tmp_path)
    place(2, 9, "updating", pid=2**22 + 1)  # no such process
    assert "is gone; it was at step 9, updating" in name_lost_rank(tmp_path)
    place(1, 9, "ended by DataError")
    assert name_lost_rank(tmp_path) == "rank 1 ended by DataError at step 9"
    assert "has noted nothing" in name_lost_rank(tmp_path / "elsewhere")


@thorough
def test_a_rank_that_hangs_is_named_by_the_others_and_ends_itself(local: list[str], tmp_path: Path) -> None:
    flags = [*local, "--output-dir", tmp_path, "--process-group-timeout", 10]
    first, second = run_ranks(2, *flags, planted={1: {"stall_at_step": 3}})
    assert first.code == 1
    named = r"^rank 1 \(process \d+ on \S+\) does not answer; it is at step 3, in the forward pass, for \d+ s"
    assert re.search(named, first.err, re.M), first.err
    assert second.code == 1
    assert "Timeout (" in second.err and "in _stall" in second.err, second.err


@thorough
def test_the_ranks_of_a_killed_launcher_end(local: list[str], tmp_path: Path) -> None:
    before = programs.running()
    flags = [*SMALL, *local, "--output-dir", tmp_path, "--devices", 2, "--num-workers", 1]
    done = programs.run(SCRIPT, *flags, kill_at_step=3)
    assert done.code == -9, done.err
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []


@thorough
def test_what_a_signal_does_here_and_with_lightnings_own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases of the walkthrough's table; five minutes."""
    import drills

    rows: list[dict] = []
    monkeypatch.setattr(drills, "print_row", rows.append)
    drills.main([])
    assert all(row["same_bits"] for row in rows)
    ours = [row for row in rows if row["system"] == "this chapter"]
    assert [row["exit_code"] for row in ours] == [AGAIN, AGAIN, AGAIN, 1, 1]
    assert [row["steps"] - row["checkpoint"] for row in ours] == [0] * 5
    lightning = [row for row in rows if row["system"] == "Lightning"]
    assert len(lightning) == 5
    assert all(row["exit_code"] not in (0, AGAIN) for row in lightning)


@thorough
def test_the_measurement_of_saves_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import saving

    saving.main(["--repeats", "1"])
    assert capsys.readouterr().out.count("it costs 2%") == 2
