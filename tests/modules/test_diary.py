"""The story of a run, read from its own logs."""

import csv
import json
from pathlib import Path

from tracking import diary

AGAIN = "steps that were logged are computed again"
BAD = "a loss was bad, and the run leaves out batch"


def log_start(folder: Path, hour: int, step: int, rows: list[dict], skipped: list | None = None) -> None:
    """Write what a start leaves: its record, and its log."""
    folder.mkdir(exist_ok=True)
    start = {"at": f"2026-01-01 {hour}:00:00", "step": step, "skipped": skipped or []}
    (folder / "record.json").write_text(json.dumps({"start": start}))
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "full rmse (m/s)"])
        writer.writeheader()
        writer.writerows(rows)


def test_a_run_that_goes_back_further_the_second_time_is_told_in_the_order_of_time(tmp_path: Path) -> None:
    """Because a checkpoint was damaged; and then a third time, after another bad loss."""
    losses = [{"step": step, "loss": 0.5} for step in range(60)]
    best = {"step": 39, "full rmse (m/s)": 1.25}
    log_start(tmp_path, 10, 0, [*losses[:48:2], best])
    log_start(tmp_path / "resumed_at_40", 11, 40, losses[40:50:2])
    log_start(tmp_path / "resumed_at_20", 12, 20, losses[20:60:2], [[48, 50]])
    log_start(tmp_path / "resumed_at_58", 13, 58, losses[58:], [[48, 50], [9, 10]])
    slow = {"step": 30, "finding": "straggler", "rank": 1, "text": "rank 1 is slow"}
    (tmp_path / "tracking.jsonl").write_text(json.dumps(slow))
    assert [(event.step, event.text) for event in diary.list_events(tmp_path)] == [
        (0, "started on 2026-01-01 10:00:00"),
        (40, "all of the validation: rmse (m/s) 1.250"),
        (40, f"went on from step 40 on 2026-01-01 11:00:00; 7 {AGAIN}"),
        (20, f"went on from step 20 on 2026-01-01 12:00:00; 29 {AGAIN}; {BAD} 48 to 49"),
        (30, "rank 1 is slow"),
        (58, f"went on from step 58 on 2026-01-01 13:00:00; 1 {AGAIN}; {BAD} 9"),
    ]
