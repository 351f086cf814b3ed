"""Chapter 6: runs that are killed, told to stop, starved of disk and fed NaN, and end as if nothing had happened."""

import csv
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import book
import buckets
import numpy as np
import programs
import psutil
import pytest
import torch
from alone import Alone
from chapter_6 import AGAIN, SCRIPT, SMALL, codes, folder, local, rooms, run_ranks, undisturbed  # noqa: F401
from runs import assert_same_bits, state, summary, weights
from torch import distributed

CHAPTER = book.ROOT / "06_whats_next"

thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[list[str]]:
    """The flags that read the store from a bucket, of whose answers one in twenty is an error."""
    with buckets.serving(folder, latency_ms=0, error_rate=0.05) as address:
        yield ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]


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


def test_the_folder_copied_alone_trains_and_resumes(local: list[str], tmp_path: Path, undisturbed) -> None:
    alone = Alone(CHAPTER, SMALL, tmp_path)
    assert alone.start(*local, kill_at_step=8).wait().code == -9
    done = alone.start(*local).wait()
    assert done.code == 0, done.err
    assert "warning" not in done.err.lower()
    assert_same_bits(alone.output, undisturbed(1))
    assert alone.written_elsewhere() == []


@pytest.mark.parametrize("how", ["a file", pytest.param("hours", marks=thorough)])
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
    from survival.preemption import Preemption, Reason

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


def test_skipped_batches_move_the_later_ones_up() -> None:
    from block_loader import BlockOrder, Window, batch_number

    skipped = (Window(9, 10), Window(3, 5))
    assert [batch_number(step, skipped) for step in range(9)] == [0, 1, 2, 5, 6, 7, 8, 10, 11]
    plain, skipping = (BlockOrder(20, 4, 8, 2, seed=0, skipped=windows) for windows in ((), skipped))
    for step in range(9):
        assert skipping.address(step, 1) == plain.address(batch_number(step, skipped), 1)


def test_a_spike_is_bad_only_against_enough_other_losses() -> None:
    from survival.recovery import REMEMBERED, BadLoss, LossHistory

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
    from survival.preemption import has_spot_notice

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
    from survival.heartbeat import LOST, name_lost_rank

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
