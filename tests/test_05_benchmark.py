"""Chapter 5's comparisons of trainings: which they run, and what is refused."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import book
import pytest
import torch
from runs import load

CHAPTER = book.ROOT / "05_model_profiling"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with book.rooms("05_model_profiling"):
        yield load(CHAPTER / "benchmark.py", "benchmark_of_chapter_5")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nope", "nope: no such study; choose from command, training"),
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


def test_commands_take_turns_and_are_compared_in_each_turn(script: ModuleType, monkeypatch) -> None:
    """On a machine that slows down to a half after the first turn, every ratio is as before."""
    rates = iter([10.0, 20.0, 30.0, 5.0, 10.0, 15.0])
    begun = []

    def train(command: list) -> dict:
        begun.append(command)
        rmse = {"U-Net": {"m/s": 1.0}}
        return {"samples_per_second": next(rates), "data_wait_share": 0.1, "rmse": rmse}

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "has_bf16", lambda on_gpu: True)
    rows = script.compare_commands(2)
    folders = [command[0].parent.name for command in begun]
    assert folders == 2 * ["04_data_pipeline", "05_model_profiling", "05_model_profiling"]
    assert [row["times_faster"] for row in rows] == [
        dict.fromkeys(("median", "min", "max"), ratio) for ratio in (1.0, 2.0, 3.0)
    ]


def test_a_study_that_is_whole_is_measured_anew(script: ModuleType, tmp_path, monkeypatch) -> None:
    """What a stopped study has measured is kept for the next run; that of a whole one was, too."""
    monkeypatch.setattr(importlib.import_module("studies.journal"), "OUTPUTS", tmp_path)
    rates = iter([10.0, 20.0])

    def study(repeats: int) -> list[dict]:
        labels = {"rung": "naive", "times_naive": 1.0}
        case = script.Case(labels, lambda: {"samples_per_second": next(rates)})
        return script.take_turns("training", [case], repeats, script.SPREAD)

    monkeypatch.setattr(script, "STUDIES", {"training": study})
    for rate in (10.0, 20.0):
        (row,) = script.main(["--repeats", "1"])["training"]
        assert row["samples_per_second"]["median"] == rate


def test_without_instructions_for_bfloat16_it_leaves_that_command_out(
    script: ModuleType, monkeypatch
) -> None:
    monkeypatch.setattr(script, "has_bf16", lambda on_gpu: False)
    assert script.find_commands() == ["chapter 4", "this chapter"]


def test_a_training_step_trains_on_each_batch_that_it_is_given(script: ModuleType) -> None:
    """Its weights are those of the same steps on whole batches by hand."""
    make_batch = importlib.import_module("step").make_batch
    batches = [make_batch(2, 16) for _ in range(2)]
    batches[1] = {name: part.flip(0) * 2 for name, part in batches[1].items()}
    trained = script.TrainingStep(script.Fixes(), torch.device("cpu"))
    by_hand = script.Step(script.Fixes(), batches[0], torch.device("cpu"))
    for batch in batches:
        trained(batch)
        by_hand.pieces = [batch]
        by_hand()
    both = zip(trained.step.network.parameters(), by_hand.network.parameters())
    assert all(torch.equal(one, other) for one, other in both)
    assert trained.step.optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.thorough
def test_the_quick_form_of_both_studies(script: ModuleType) -> None:
    found = script.main(["--quick", "--repeats", "1"])
    assert [row["command"] for row in found["command"]][:2] == ["chapter 4", "this chapter"]
    assert all(row["summary"]["steps"] == 4 for row in found["command"])
    assert len(found["training"]) >= 4
    assert found["training"][0]["times_naive"] == 1
