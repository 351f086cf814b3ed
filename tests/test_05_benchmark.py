"""Chapter 5's measurements: what they count, what they refuse, and that both studies run."""

import json
from collections.abc import Iterator
from types import ModuleType

import book
import numpy as np
import pytest
from runs import load

CHAPTER = book.ROOT / "05_model_profiling"
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with book.rooms("05_model_profiling"):
        yield load(CHAPTER / "benchmark.py", "benchmark_of_chapter_5")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nope", "nope: no such study; choose from command, loaders"),
        ("--repeats 0", "--repeats 0: give at least 1"),
        ("--quick --save-results", "--save-results: --quick finds nothing worth keeping"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    flags: str, message: str, script: ModuleType, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(script, "STUDIES", dict.fromkeys(script.STUDIES))  # calling one would fail
    with pytest.raises(SystemExit, match="2"):
        script.main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_picture_counts_the_blocks_that_the_loader_reads(script: ModuleType) -> None:
    """New blocks of each step, by the rule of either chapter: equally many in all."""
    steps = np.arange(32, 96)
    row = {"batch_size": 16, "slots": 64}
    even = script.count_new_blocks(row | {"loader": "chapter 5"}, steps)
    at_once = script.count_new_blocks(row | {"loader": "chapter 4"}, steps)
    assert even == [2] * 64
    assert at_once == ([16] * 4 + [0] * 28) * 2


def test_the_spread_is_over_the_repeats_and_the_percentiles_within_one(script: ModuleType) -> None:
    rates = {"samples_per_second": 1.0, "cpu_ms_per_sample": 2.0, "requests_per_sample": 0.25}
    steps = np.arange(101) / 1e3
    times = {"waits": steps, "makings": steps, "steps": steps}
    slower = {name: 3 * value for name, value in times.items()}
    row = script.summarise([rates | times, rates | slower])
    assert row["steps_p95_ms"] == pytest.approx({"median": 190, "min": 95, "max": 285})
    assert row["waits_median_ms"] == pytest.approx({"median": 100, "min": 50, "max": 150})


@thorough
def test_the_quick_form_of_both_studies(script: ModuleType, capsys) -> None:
    """A store is made, both chapters' loaders read from it, alone and beside training; the command runs."""
    found = script.main(["--quick", "--repeats", "1"])
    rows = {(row["loader"], row["batch_size"], row["training"]): row for row in found["loaders"]}
    assert len(rows) == len(found["loaders"]) == 8
    for row in found["loaders"]:
        assert row["steps_slowest_ms"]["median"] >= row["steps_median_ms"]["median"] > 0
        json.dumps(row)
    assert found["command"][0]["summary"]["steps"] == 4
    assert isinstance(script.plot_loaders(found["loaders"]), script.Figure)
