"""Chapter 6: runs that are killed, told to stop, starved of disk and fed NaN, and end as if nothing had happened."""

import csv
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as threads

import boto3
import buckets
import numpy as np
import programs
import psutil
import pytest
import torch
from chapter_6 import AGAIN, SCRIPT, SMALL, codes, folder, local, rooms, run_ranks, undisturbed  # noqa: F401
from runs import assert_same_bits, last_checkpoint, state, summary, weights

thorough = pytest.mark.thorough


# ------------------------------------------------------------------------------------------ chaos


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[list[str]]:
    """The flags that read the store from a bucket, of whose answers one in twenty is an error."""
    with buckets.serving(folder, latency_ms=0, error_rate=0.05) as address:
        yield ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]


TEN = [7, *np.random.default_rng(6).integers(3, 6, size=9).tolist()]  # two checkpoints take four steps
CHAOS = [  # ranks; the step after each start at which one is killed; the starts that find a torn checkpoint
    pytest.param(2, [5, 3], {1}, id="two"),
    pytest.param(3, [5], set(), id="three ranks", marks=thorough),
    pytest.param(2, TEN, {3, 6}, id="ten kills", marks=thorough),
]


@pytest.mark.parametrize(("ranks", "kills", "torn"), CHAOS)
def test_killed_and_torn_it_ends_at_the_same_bits(
    ranks: int, kills: list, torn: set, failing: list[str], local: list[str], tmp_path: Path, undisturbed
) -> None:
    """Before each kill two checkpoints are there, so that one is left where the newest is torn."""
    longer = ["--max-steps", "40"] if len(kills) > 2 else []
    rng = np.random.default_rng(6)
    flags = [*longer, "--output-dir", tmp_path]
    for number, step in enumerate(kills):
        if number in torn:
            newest = last_checkpoint(tmp_path)
            newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
        victim = int(rng.integers(ranks))
        planted = {victim: {"kill_with_checkpoints": (step, tmp_path / "checkpoints", 2)}}
        done = run_ranks(ranks, *failing, *flags, planted=planted, wait_for_writes=True)
        assert codes(done) == [-9 if rank == victim else 1 for rank in range(ranks)], programs.printed(done)
        gone = rf"^rank {victim} \(process \d+ on \S+\) is gone; it was at step \d+, in the forward pass"
        for rank in set(range(ranks)) - {victim}:
            assert re.search(gone, done[rank].err, re.M), done[rank].err
        if number in torn:
            assert f"{newest.name} is cut off, or no checkpoint" in done[0].out, done[0].out
    done = run_ranks(ranks, *local, *flags)  # the same data, elsewhere
    assert codes(done) == [0] * ranks, programs.printed(done)
    assert_same_bits(tmp_path, undisturbed(ranks, *longer))


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


# ------------------------------------------------------------------------------- told to stop

FLAG = "SIGTERM or SIGUSR1; the same command with --resume"
STOPPED = {  # the rank and its fault, the flags, each rank's exit code, and what is said
    "in the backward pass": ({1: {"terminate_in_backward": 4}}, [], AGAIN, FLAG),
    "before the first step": ({1: {"terminate_at_start": 0}}, [], AGAIN, FLAG),
    "before a step": ({1: {"terminate_at_step": 4}}, [], AGAIN, FLAG),
    "in a write": ({0: {"terminate_in_write": 1}}, [], AGAIN, FLAG),
    "by a file": ({}, [], 0, "the file STOP is there; remove it"),  # no scheduler starts it again
    "by hours": ({}, ["--max-hours", "1e-9"], AGAIN, "--max-hours are over; the same command with --resume"),
}
IN_THE_GATE = ("in the backward pass", "by a file")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in IN_THE_GATE else thorough) for how in STOPPED]
)
def test_told_to_stop_both_ranks_save_and_end_and_go_on_at_the_same_bits(
    how: str, local: list[str], tmp_path: Path, undisturbed
) -> None:
    planted, limit, code, reason = STOPPED[how]
    flags = [*local, "--output-dir", tmp_path]
    stop_file = tmp_path / "STOP"
    if how == "by a file":
        stop_file.touch()
    done = run_ranks(2, *flags, *limit, planted=planted)
    assert codes(done) == [code, code], programs.printed(done)
    said = re.search(rf"stopped after step (\d+): {reason}", done[0].out)
    assert said, done[0].out
    assert state(tmp_path)["step"] == int(said[1]) < 12
    stop_file.unlink(missing_ok=True)
    done = run_ranks(2, *flags)
    assert codes(done) == [0, 0], programs.printed(done)
    resumed = f"note: resumed at step {said[1]} from step_{int(said[1]):08}.ckpt\n"
    assert [one.out.count(resumed) for one in done] == [1, 0]
    assert_same_bits(tmp_path, undisturbed(2))


def test_an_interrupted_run_says_at_which_step_and_what_it_goes_on_from(
    local: list[str], tmp_path: Path
) -> None:
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    done = programs.run(SCRIPT, *flags, interrupt_at_step=5, wait_for_writes=True)
    assert done.code == 1, done.err
    newest = last_checkpoint(tmp_path).name
    said = f"note: stopped after step 5: Ctrl-C, which saves nothing; in {tmp_path}/checkpoints: {newest}; the same"
    assert said in done.out
    assert done.out.count("stopped after") == 1


def test_a_stop_waits_no_longer_than_its_grace(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of the first step is written only long after, as if the storage hung. No thread is left."""
    import train

    released, save = Event(), torch.save

    def hang(*given) -> None:
        released.wait(60)
        save(*given)

    monkeypatch.setattr(torch, "save", hang)
    flags = ["--max-hours", "1e-9", "--grace", "1", "--output-dir", str(tmp_path)]
    before = threads()
    try:
        with pytest.raises(SystemExit) as ended:
            train.main([*SMALL, *local, *flags])
    finally:
        released.set()
    assert ended.value.code == 1
    stopped = r"stopped after step 1: --max-hours are over; its checkpoint is not there: still being written"
    assert re.search(stopped, capsys.readouterr().out)
    own = re.compile(r"poll|ThreadPoolExecutor")  # and not Zarr's, which are kept
    for thread in threads():
        if thread not in before and own.search(thread.name):
            thread.join(timeout=60)
            assert not thread.is_alive(), thread


@thorough
def test_what_a_signal_does_here_and_with_lightnings_own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases of the walkthrough's table; five minutes."""
    from studies import drills

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


# --------------------------------------------------------------------------------- a bad loss


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=thorough)])
def test_a_poisoned_batch_is_skipped_and_the_run_can_be_resumed_to_the_bit(
    ranks: int, local: list[str], tmp_path: Path
) -> None:
    """The 26th block that is read gives 1e25 m/s to one batch: as no mark of no value is, and its square is infinite."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def train(folder: Path, code: int, **faults: int) -> programs.Run:
        flags = [*local, "--patches-per-block", 1, "--output-dir", folder]
        done = run_ranks(ranks, *flags, poison_read=25, **faults)
        assert codes(done) == [code] * ranks, programs.printed(done)
        return done[0]

    said = train(whole, 0).out
    assert re.search(r"loss (inf|nan) at step 4: back to step [24], without batches \[4, 5\]", said), said
    assert all(tensor.isfinite().all() for tensor in weights(whole).values())
    train(killed, -9, kill_at_step=12)
    train(killed, 0)
    assert_same_bits(killed, whole)
    assert summary(killed)["skipped_batches"] == summary(whole)["skipped_batches"] == [[4, 5]]


def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(local: list[str], tmp_path: Path) -> None:
    """The fault is gone when the step is taken again, as one of a GPU would be."""
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    done = programs.require_success(SCRIPT, *flags, spoil_gradient=5)
    assert re.search(r"loss nan at step 5: back to step [24], without batches \[5, 6\]", done.out), done.out
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


# ------------------------------------------------------------------------------ checkpoints


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


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def test_a_run_resumes_from_a_bucket_to_the_bit_and_ends_if_the_bucket_goes_away(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    """Without a bucket no run begins."""
    gone = tmp_path / "gone"
    with buckets.serving("", latency_ms=0) as address:
        keys = {name.lower(): value for name, value in KEYS.items()}
        client = boto3.client("s3", region_name="us-east-1", endpoint_url=address, **keys)
        client.create_bucket(Bucket="runs")

        def listed(run: str) -> list[str]:
            found = client.list_objects_v2(Bucket="runs", Prefix=run).get("Contents", [])
            return sorted(entry["Key"].removeprefix(f"{run}/") for entry in found)

        place = [*SMALL, *local, "--endpoint", address]
        flags = [*place, "--output-dir", tmp_path, "--checkpoint-dir", "s3://runs/first"]
        assert programs.run(SCRIPT, *flags, environment=KEYS, terminate_at_step=4).code == AGAIN
        programs.require_success(SCRIPT, *flags, environment=KEYS)
        best, *_, newest = names = listed("first")
        assert best.startswith("best_")
        assert newest == "step_00000012.ckpt"
        assert len(names) <= 4  # one is left out while the one before it is still being written
        (tmp_path / "checkpoints").mkdir()
        client.download_file("runs", f"first/{newest}", tmp_path / "checkpoints" / newest)

        flags = [*place, "--output-dir", tmp_path / "second", "--checkpoint-dir", "s3://runs/second"]
        flags += ["--retry-timeout", 1]
        program = programs.Program(SCRIPT, *flags, environment=KEYS, wait_for_file=(7, gone))
        programs.wait_for(lambda: listed("second"), program, "a checkpoint")
    assert (tmp_path / "resumed_at_5").exists() or (tmp_path / "resumed_at_6").exists()
    assert_same_bits(tmp_path, undisturbed(1))

    gone.touch()
    done = program.wait()
    assert done.code == 1, done.err
    assert summary(tmp_path / "second")["steps"] == 12
    assert re.search(r"step_00000012.ckpt not written: .*; in s3://runs/second: no answer", done.out), (
        done.out
    )
    again = programs.run(SCRIPT, *flags, environment=KEYS)
    assert again.code == 2, again.err
    assert "error: --checkpoint-dir s3://runs/second: " in again.err.splitlines()[-1]


def test_a_run_that_has_ended_ends_the_same_again_and_is_not_overwritten_unless_asked_for(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    run = shutil.copytree(undisturbed(1), tmp_path / "run")
    flags = [*SMALL[:-2], *local, "--output-dir", run]
    (run / "summary.json").unlink()
    programs.require_success(SCRIPT, *flags, "--resume")
    assert_same_bits(run, undisturbed(1))
    done = programs.run(SCRIPT, *flags, "--max-steps", 2)
    assert done.code == 2
    refused = r"error: --checkpoint-dir \S+: has step_00000012.ckpt; give --resume"
    assert re.search(refused, done.err), done.err
    assert state(run)["step"] == 12
    programs.require_success(SCRIPT, *flags, "--max-steps", 2, "--overwrite")
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
