"""Where each rank is, and which of them is missing."""

import json
import os
import socket
from pathlib import Path

import pytest
from command_line import is_of_group
from survival.heartbeat import LOST, name_lost_rank
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


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("Application timeout caused pair closure", True),
        ("The size of tensor a (2) must match the size of tensor b (3)", False),
    ],
)
def test_an_error_between_ranks_is_told_from_another(text: str, lost: bool) -> None:
    assert is_of_group(RuntimeError(text)) is lost
