"""The appendix's ladder: what is run, how cost is counted, and what the committed figures show."""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import book
import pytest
from runs import load

BURN = """
import pathlib, time
while time.process_time() < 0.3: pass
pathlib.Path({burnt!r}).touch()
while not pathlib.Path({seen!r}).exists(): time.sleep(0.01)
"""


@pytest.fixture
def ladder():
    return load("appendix/ladder.py", "ladder")


def test_a_cost_is_the_difference_of_two_runs_for_a_thousand_samples(ladder, monkeypatch) -> None:
    """Start-up takes 20 s, 30 CPU seconds and 500 J, a sample 0.02, 0.04 and 1.5, in these made-up runs."""

    def run_rung(rung, size, steps, store, meter) -> dict:
        samples = size.batch * steps
        costs = {"cpu_seconds": 30 + 0.04 * samples, "gpu_joules": 500 + 1.5 * samples}
        return {"samples_per_second": 70, "data_wait_share": 0.25, "seconds": 20 + 0.02 * samples, **costs}

    monkeypatch.setattr(ladder, "run_rung", run_rung)
    found = ladder.measure_rung(ladder.choose_rungs(False)[0], ladder.FULL, [], None)
    assert found == pytest.approx(
        {"samples_per_second": 50, "data_wait_share": 0.25, "cpu_seconds": 40, "gpu_joules": 1500}
    )


def test_the_meter_counts_a_program_and_those_that_it_starts(ladder, tmp_path: Path, monkeypatch) -> None:
    """The inner one takes 0.3 CPU seconds, and ends when the meter has looked at it again."""
    burnt, seen = tmp_path / "burnt", tmp_path / "seen"
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    inner.write_text(BURN.format(burnt=str(burnt), seen=str(seen)))
    outer.write_text(f"import subprocess, sys\nsubprocess.Popen([sys.executable, {str(inner)!r}]).wait()")
    looks = []

    def sleep(seconds: float) -> None:
        time.sleep(0.01)
        if burnt.exists():
            looks.append(seconds)
        if len(looks) == 2:
            seen.touch()

    monkeypatch.setattr(ladder, "sleep", sleep)
    assert ladder.run_and_count([sys.executable, str(outer)]) > 0.29


@pytest.mark.parametrize(
    ("counters", "joules"),
    [(["gpu"], {"gpu": 7.2e6}), (["processor", "gpu"], {"processor": 3.6e6, "gpu": 7.2e6})],
)
def test_only_joules_that_something_counts_are_reported(ladder, monkeypatch, counters, joules) -> None:
    """CodeCarbon also estimates; here it says 1 kWh of the processor, 2 of the GPU, 4 of the memory."""
    energy = SimpleNamespace(cpu_energy=1, gpu_energy=2, ram_energy=4)
    tracker = SimpleNamespace(start_task=lambda: None, stop_task=lambda: energy)
    library = SimpleNamespace(OfflineEmissionsTracker=lambda **_: tracker)
    monkeypatch.setitem(sys.modules, "codecarbon", library)
    monkeypatch.setattr(ladder, "find_spec", lambda name: name)
    monkeypatch.setattr(ladder, "find_counters", lambda: counters)
    cost = ladder.Meter().run([sys.executable, "-c", ""])
    assert cost.keys() == {"cpu_seconds", *(f"{name}_joules" for name in joules)}
    assert all(cost[f"{name}_joules"] == value for name, value in joules.items())


def test_without_the_library_a_note_says_how_to_read_the_counters(ladder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ladder, "find_spec", lambda name: None)
    monkeypatch.setattr(ladder, "find_counters", lambda: ["gpu"])
    assert ladder.Meter().run([sys.executable, "-c", ""]).keys() == {"cpu_seconds"}
    assert "note: gpu count joules; uv run --with codecarbon" in capsys.readouterr().out


def test_a_rung_that_fails_ends_with_its_last_line(ladder, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "01_setup").mkdir()
    (tmp_path / "01_setup/train.py").write_text("import sys\nsys.exit('first\\n--store: no such folder')")
    monkeypatch.setattr(ladder, "BOOK", tmp_path)
    monkeypatch.setattr(ladder, "choose_rungs", lambda on_gpu: [ladder.Rung("01_setup", [], False)])
    monkeypatch.setattr(ladder, "make_store", lambda size: None)
    monkeypatch.setattr(ladder, "serve_store", lambda size: nullcontext([]))
    with pytest.raises(SystemExit) as ended:
        ladder.main(["--quick"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "01_setup/train.py" in last and "code 1" in last and "--store: no such folder" in last


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [(["--repeats", "0"], "--repeats 0: give at least 1"), (["--quick", "--save-results"], "leave one out")],
)
def test_bad_flags_are_refused(ladder, flags: list[str], remedy: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        ladder.main(flags)
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err.splitlines()[-1]


def test_the_committed_ladder_has_a_rung_a_chapter_and_the_wait_falls(ladder) -> None:
    rows = json.loads((book.ROOT / "appendix/results/ladder.json").read_text())["rows"]
    assert [row["chapter"] for row in rows] == [rung.chapter for rung in ladder.choose_rungs(False)]
    on_store = rows[2:]
    assert {row["data"] for row in on_store} == {f"s3://winds/{ladder.STORE}"}
    waits = [row["data_wait_share"]["median"] for row in on_store]
    assert max(waits[1:]) < waits[0] / 3


@pytest.mark.thorough
def test_all_rungs_run(ladder) -> None:
    rows = ladder.main(["--quick", "--repeats", "1"])
    assert len(rows) == 6
    assert all(row["samples_per_second"]["median"] > 0 for row in rows)
