"""Chapter 6: the story of a run, read from its own logs."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import book
import pytest

RESULTS = book.ROOT / "06_whats_next/results"


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    with book.rooms("06_whats_next"):
        yield


def log_start(folder: Path, at: str, step: int, rows: list[dict], skipped: list | None = None) -> None:
    """Write what a start leaves: its record, and its log."""
    folder.mkdir(exist_ok=True)
    start = {"at": at, "step": step, "skipped": skipped or []}
    (folder / "record.json").write_text(json.dumps({"start": start}))
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "full rmse (m/s)"])
        writer.writeheader()
        writer.writerows(rows)


def test_a_killed_run_with_a_bad_loss_and_a_slow_rank_is_told_in_order(tmp_path: Path) -> None:
    """The run went on from an older step the second time, because a checkpoint was damaged."""
    from tracking import diary

    losses = [{"step": step, "loss": 0.5} for step in range(60)]
    best = {"step": 39, "full rmse (m/s)": 1.25}
    log_start(tmp_path, "2026-01-01 10:00:00", 0, [*losses[:48:2], best])
    log_start(tmp_path / "resumed_at_40", "2026-01-01 11:00:00", 40, losses[40:50:2])
    log_start(tmp_path / "resumed_at_20", "2026-01-01 12:00:00", 20, losses[20:60:2], [[48, 50]])
    lines = [
        {"step": 10, "finding": "nothing", "rank": None, "text": "quiet"},
        {"step": 30, "finding": "straggler", "rank": 1, "text": "rank 1 is slow"},
        {"step": 32, "finding": "straggler", "rank": 1, "text": "rank 1 is still slow"},
        {"step": 50, "finding": "nothing", "rank": None, "text": "quiet again"},
    ]
    (tmp_path / "tracking.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 60, "tested": {"test rmse (m/s)": 1.2}}))
    told = [(event.step, event.text) for event in diary.list_events(tmp_path)]
    starts = [text for _, text in told if text.startswith(("started", "went on"))]
    assert starts == [
        "started on 2026-01-01 10:00:00",
        "went on from step 40 on 2026-01-01 11:00:00; 7 steps that were logged are computed again",
        "went on from step 20 on 2026-01-01 12:00:00; 29 steps that were logged are computed again"
        "; a loss was bad, and the run leaves out batch 48 to 49",
    ]
    assert (40, "all of the validation: rmse (m/s) 1.250") in told
    slow = told.index((30, "rank 1 is slow"))
    assert told[slow - 1][1] == starts[2]
    assert told[slow + 1 :] == [(50, "quiet again"), (60, "finished; test rmse (m/s) 1.200")]


def test_a_run_that_was_killed_at_once_has_a_diary_and_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracking import diary

    log_start(tmp_path / "run", "2026-01-01 10:00:00", 0, [])
    assert [event.step for event in diary.main([str(tmp_path / "run")])] == [0]
    with pytest.raises(SystemExit) as error:
        diary.main([str(tmp_path)])
    assert error.value.code == 2
    assert "record.json" in capsys.readouterr().err


def require_three_faults(texts: list[str]) -> None:
    """A diary that names the kill, the bad loss and the slow rank, and says when it was over."""
    starts = [text for text in texts if text.startswith("went on from step")]
    assert len(starts) == 2
    assert starts[1].endswith("leaves out batch 57") and "leaves out" not in starts[0]
    slow = [number for number, text in enumerate(texts) if "rank 1 computes its forward pass" in text]
    assert len(slow) == 1
    assert any("no rank is slower" in text for text in texts[slow[0] :])
    assert texts[-1].startswith("finished")


def test_the_diary_that_comes_with_the_book_is_read_from_the_logs_beside_it() -> None:
    from tracking import diary

    told = [{"step": event.step, "text": event.text} for event in diary.list_events(RESULTS / "rehearsal")]
    assert told == book.results("06_whats_next/results/rehearsal.json")["rows"]
    require_three_faults([event["text"] for event in told])


@pytest.mark.thorough
def test_a_rehearsal_names_its_three_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from studies import rehearsal

    monkeypatch.setattr(rehearsal, "FOLDER", tmp_path / "rehearsal")
    require_three_faults([event.text for event in rehearsal.main([])])
