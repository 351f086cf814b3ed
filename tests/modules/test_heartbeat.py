"""Where each rank is, and which of them is missing."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from survival import heartbeat
from survival.heartbeat import LOST, Heartbeat, name_lost_rank
from torch import distributed


def test_the_rank_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A heartbeat at step 7, a clock to turn, and when it was said that this rank ends if it stays in its place."""
    made = SimpleNamespace(now=0, armed=[], trainer=SimpleNamespace(global_rank=0, global_step=7))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: 0, monotonic=lambda: made.now))
    watch = SimpleNamespace(cancel_dump_traceback_later=made.armed.clear)
    watch.dump_traceback_later = lambda seconds, **how: made.armed.append((made.now, seconds, how["exit"]))
    monkeypatch.setattr(heartbeat, "faulthandler", watch)
    made.heartbeat = Heartbeat(tmp_path, timeout=100)
    made.heartbeat.on_train_start(made.trainer, None)
    return made


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", LOST),
        ("Application timeout caused pair closure", LOST),
        ("The size of tensor a (2) must match the size of tensor b (3)", "ended by RuntimeError"),
    ],
)
def test_a_rank_notes_whether_it_ended_by_itself_or_because_of_another(
    text: str, ending: str, started: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is then ended by nothing else."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    started.heartbeat.on_exception(started.trainer, None, RuntimeError(text))
    place = json.loads((tmp_path / "ranks/rank_0.json").read_text())
    assert (place["step"], place["doing"]) == (7, ending)
    assert started.armed == []


def test_a_rank_ends_150_seconds_after_its_last_mark_or_up_to_a_tenth_earlier(
    started: SimpleNamespace,
) -> None:
    """A mark a second does not cost a thread a second."""
    for started.now in range(50):
        started.heartbeat.mark(started.trainer, "updating")
    assert started.armed == [(when, 150, True) for when in (0, 16, 32, 48)]
