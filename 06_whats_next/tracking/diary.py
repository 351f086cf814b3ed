"""The diary of a run, from what it has written: starts, kills, bad losses, stragglers, scores.

    uv run python -m tracking.diary outputs/train

You should see a line for each event, in the order in which they happened.
"""

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

from errors import refuse
from tracking.stragglers import Verdict


@dataclass(frozen=True)
class Event:
    step: int
    text: str


@dataclass(frozen=True)
class Chapter:
    """What a run has logged from one start to its end, or to the next start."""

    at: str  # date and time
    step: int
    skipped: list[list[int]]  # windows of batches, see survival/recovery.py
    rows: list[dict[str, str]]  # of metrics.csv
    loss: str = "loss"  # its name there

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a value was logged, and the values."""
        chosen = [row for row in self.rows if row.get(name)]
        steps = [int(row["step"]) for row in chosen]
        return steps, [float(row[name]) for row in chosen]

    def scores(self) -> list[Event]:
        """The metrics on all of the validation, where it was looked at."""
        events = []
        for row in self.rows:
            scores = []
            for name, value in row.items():
                if name.startswith("full ") and value:
                    scores.append(f"{name.removeprefix('full ')} {float(value):.3f}")
            if scores:
                text = f"all of the validation: {', '.join(scores)}"
                events.append(Event(int(row["step"]) + 1, text))
        return events


def read_chapters(folder: Path) -> list[Chapter]:
    """A run's starts, in the order of time."""
    chapters = []
    for path in [folder / "record.json", *folder.glob("resumed_at_*/record.json")]:
        log = path.with_name("metrics.csv")
        if not path.exists() or not log.exists():
            continue  # killed before it logged anything
        start = json.loads(path.read_text())["start"]
        with open(log, newline="") as file:
            chapters.append(Chapter(**start, rows=list(csv.DictReader(file))))
    return sorted(chapters, key=lambda chapter: chapter.at)


def read_verdicts(folder: Path) -> list[dict]:
    """What was found about ranks and loader, where it changed."""
    path = folder / "tracking.jsonl"
    if not path.exists():
        return []
    changes = []
    before = (Verdict().finding, None)
    for line in path.read_text().splitlines():
        verdict = json.loads(line)
        now = (verdict["finding"], verdict["rank"])
        if now != before:
            changes.append(verdict)
        before = now
    return changes


def describe_start(chapter: Chapter, before: Chapter | None) -> str:
    """How a start came about, as far as the logs tell."""
    if before is None:
        return f"started on {chapter.at}"
    text = f"went on from step {chapter.step} on {chapter.at}"
    steps, _ = before.column(before.loss)
    if steps:
        again = steps[-1] + 1 - chapter.step
        text += f"; {max(0, again)} steps that were logged are computed again"
    new = chapter.skipped[len(before.skipped) :]
    for first, stop in new:
        last = f" to {stop - 1}" if stop - first > 1 else ""
        text += f"; a loss was bad, and the run leaves out batch {first}{last}"
    return text


def list_events(folder: Path) -> list[Event]:
    """All that happened, in the order of time."""
    chapters = read_chapters(folder)
    found: list[list[Event]] = [[] for _ in chapters]
    for number, chapter in enumerate(chapters):
        found[number] += chapter.scores()
    for verdict in read_verdicts(folder):
        step = verdict["step"]
        # A start drops the verdicts on steps that it takes again, so the last one counts.
        before = [n for n, chapter in enumerate(chapters) if chapter.step < step]
        if before:
            found[before[-1]].append(Event(step, verdict["text"]))
    events = []
    for number, chapter in enumerate(chapters):
        previous = chapters[number - 1] if number else None
        events.append(Event(chapter.step, describe_start(chapter, previous)))
        events += sorted(found[number], key=lambda event: event.step)
    summary = folder / "summary.json"
    if summary.exists():
        events.append(describe_end(json.loads(summary.read_text())))
    return events


def describe_end(metrics: dict) -> Event:
    """The end of a run, from its summary."""
    scores = []
    for name, value in metrics["tested"].items():
        scores.append(f"{name} {value:.3f}")
    text = f"finished; {', '.join(scores)}"
    return Event(metrics["steps"], text)


def main(argv: list[str] | None = None) -> list[Event]:
    """Print the diary of a run and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the output folder of a run")
    run = parser.parse_args(argv).run
    if not (run / "record.json").exists():
        refuse(f"run {run}: holds no record.json; give a run's output folder")
    events = list_events(run)
    for event in events:
        print(f"step {event.step:6}: {event.text}")
    return events


if __name__ == "__main__":
    main()
