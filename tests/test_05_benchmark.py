"""Chapter 5's comparison of whole trainings: which it runs, and what it refuses."""

from collections.abc import Iterator
from types import ModuleType

import book
import pytest
from runs import load

CHAPTER = book.ROOT / "05_model_profiling"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with book.rooms("05_model_profiling"):
        yield load(CHAPTER / "benchmark.py", "benchmark_of_chapter_5")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nope", "nope: no such study; choose from training"),
        ("--repeats 0", "--repeats 0: give at least 1"),
        ("--quick --save-results", "--save-results: --quick finds nothing worth keeping"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    flags: str, message: str, script: ModuleType, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(script, "train", None)  # calling it would fail
    with pytest.raises(SystemExit, match="2"):
        script.main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_trainings_take_turns_and_are_compared_in_each_turn(script: ModuleType, monkeypatch) -> None:
    """On a machine that slows down to a half after the first turn, every ratio is as before."""
    rates = iter([10.0, 20.0, 30.0, 5.0, 10.0, 15.0])
    begun = []

    def train(command: list) -> dict:
        begun.append(command)
        rmse = {"U-Net": {"m/s": 1.0}}
        return {"samples_per_second": next(rates), "data_wait_share": 0.1, "rmse": rmse}

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "has_bf16", lambda on_gpu: True)
    rows = script.compare_trainings(2, ["--max-steps", "4"])
    folders = [command[0].parent.name for command in begun]
    assert folders == 2 * ["04_data_pipeline", "05_model_profiling", "05_model_profiling"]
    assert all(command[-2:] == ["--max-steps", "4"] for command in begun)
    assert [row["times_faster"] for row in rows] == [
        dict.fromkeys(("median", "min", "max"), ratio) for ratio in (1.0, 2.0, 3.0)
    ]


def test_without_instructions_for_bfloat16_it_leaves_that_training_out(
    script: ModuleType, monkeypatch
) -> None:
    monkeypatch.setattr(script, "has_bf16", lambda on_gpu: False)
    assert script.find_trainings() == ["chapter 4", "this chapter"]


@pytest.mark.thorough
def test_the_quick_form_runs_both_chapters(script: ModuleType) -> None:
    rows = script.main(["--quick", "--repeats", "1"])
    assert [row["training"] for row in rows][:2] == ["chapter 4", "this chapter"]
    assert all(row["summary"]["steps"] == 4 for row in rows)
