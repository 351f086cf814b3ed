"""What goes wrong on two ranks, beside the right way, and the help of each of chapter 2's programs."""

from importlib import import_module

import book
import pytest

PROGRAMS = ["train", "train_ddp_by_hand", "scaling", "predict_scaling", "wrong_ways"]


@pytest.fixture(scope="module", autouse=True)
def chapter():
    """The chapter's modules, which the processes that they spawn find, too."""
    with book.rooms("02_multi_gpu"):
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_of_every_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = import_module(name).main
    with pytest.raises(SystemExit, match="0"):
        getattr(main, "__wrapped__", main)(["--help"])  # @record keeps an exit with code 0 to itself
    assert "Chapter 2" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- wrong ways


@pytest.fixture(scope="module")
def ways(chapter) -> dict[str, dict]:
    """What wrong_ways.py finds on this machine, by way."""
    return {row["way"]: row for row in import_module("wrong_ways").main(["--drawn-steps", "1"])}


GRADIENTS = ["mean_of_means", "accumulated_mean_of_means", "batch_norm"]
NOTES = ["", " in patches of 16 x 16", ", slices of 3 and 5"]


@pytest.mark.parametrize("way", GRADIENTS)
def test_the_gradient_of_two_ranks_is_that_of_one_only_the_right_way(way: str, ways: dict) -> None:
    row = ways[way]
    for note in NOTES if way == "mean_of_means" else [""]:
        assert 1e-3 < row[f"wrong{note}"] > 1000 * row[f"right{note}"]
    assert way != "batch_norm" or row["GroupNorm"] < row["wrong"] / 1000
    assert way != "mean_of_means" or 1e-3 < row["wrong as drawn, step 0"] < row["wrong"]


@pytest.mark.parametrize("way", ["metric", "padded_validation", "batch_norm_buffers"])
def test_a_figure_is_the_truth_only_the_right_way(way: str, ways: dict) -> None:
    row = ways[way]
    assert row["right"] == pytest.approx(row["truth"], rel=1e-6 if way == "batch_norm_buffers" else 1e-9)
    assert abs(row["wrong"] / row["truth"] - 1) > 0.005
    assert way != "metric" or abs(row["mean of the ranks'"] / row["truth"] - 1) > 0.001


COUNTS = {"batch_per_device": 100, "iterable_copied": 64}


@pytest.mark.parametrize("way", COUNTS)
def test_a_count_is_the_truth_only_the_right_way(way: str, ways: dict) -> None:
    assert (ways[way]["wrong"], ways[way]["right"]) == (COUNTS[way], ways[way]["truth"])


HANGS = {
    "collective_on_rank_0": "hangs",
    "unequal_batches": "hangs",
    "unused_parameters": "Expected to have finished reduction in the prior iteration before starting a new one",
}


@pytest.mark.parametrize("way", HANGS)
def test_a_run_ends_only_the_right_way(way: str, ways: dict) -> None:
    assert (ways[way]["wrong"], ways[way]["right"]) == (HANGS[way], "ends")


def test_every_wrong_way_is_tested(ways: dict) -> None:
    figures = {"metric", "padded_validation", "batch_norm_buffers"}
    assert set(ways) == {*GRADIENTS, *figures, *COUNTS, *HANGS}


def test_the_committed_wrong_ways_are_these(ways: dict) -> None:
    """The counts and the words are the same; errors differ from machine to machine."""
    committed = {row["way"]: row for row in book.results("02_multi_gpu/results/wrong_ways.json")["rows"]}
    assert committed.keys() == ways.keys()
    for way, row in committed.items():
        exact = {name: value for name, value in row.items() if not isinstance(value, float)}
        assert {name: ways[way][name] for name in exact} == exact
