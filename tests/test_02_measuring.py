"""Chapter 2's measurements: what goes wrong on two ranks beside the right way, and what the studies record."""

import importlib
import os

import book
import numpy as np
import pytest
from runs import load

CHAPTER = book.ROOT / "02_multi_gpu"
PROGRAMS = ["train", "train_ddp_by_hand", "scaling", "predict_scaling", "wrong_ways"]

thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def module():
    """module(name) imports one of the chapter's scripts, which the processes that it spawns find, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))
        yield importlib.import_module


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_of_every_program(name: str, module, capsys: pytest.CaptureFixture[str]) -> None:
    main = load(f"02_multi_gpu/{name}.py", f"chapter_02_{name}").main
    with pytest.raises(SystemExit, match="0"):
        getattr(main, "__wrapped__", main)(["--help"])  # @record keeps an exit with code 0 to itself
    assert "Chapter 2" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- wrong ways


@pytest.fixture(scope="module")
def ways(module) -> dict[str, dict]:
    """What wrong_ways.py finds on this machine, by way."""
    return {row["way"]: row for row in module("wrong_ways").main([])}


GRADIENTS = ["mean_of_means", "accumulated_mean_of_means", "batch_norm"]
NOTES = ["", " in patches of 16 x 16", ", slices of 3 and 5"]


@pytest.mark.parametrize("way", GRADIENTS)
def test_the_gradient_of_two_ranks_is_that_of_one_only_the_right_way(way: str, ways: dict) -> None:
    row = ways[way]
    for note in NOTES if way == "mean_of_means" else [""]:
        assert 1e-3 < row[f"wrong{note}"] > 1000 * row[f"right{note}"]
    assert way != "batch_norm" or row["GroupNorm"] < row["wrong"] / 1000


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


# ------------------------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def measured(module) -> dict[str, list[dict]]:
    """What scaling.py's quick studies find on this machine in a few steps."""
    studies = ["scaling", "allreduce", "options", "timeline"]
    flags = "--devices 2 --device-batch 2 --steps 5 --repeats 2 --accelerator cpu".split()
    return module("scaling").main([*studies, *flags])


@thorough
def test_scaling_measures_weak_and_strong_and_a_fair_rival(measured: dict) -> None:
    rows = {(row["mode"], row["devices"]): row for row in measured["scaling"]}
    assert [rows["weak", n]["global_batch"] for n in (1, 2)] == [2, 4]
    assert [rows["strong", n]["global_batch"] for n in (1, 2)] == [2, 2]
    assert rows["one process, as many threads", 1]["threads"] == 2
    for row in rows.values():
        stretches = [row["steps"][:5], row["steps"][5:]]
        rates = sorted(row["global_batch"] / np.median(stretch) for stretch in stretches)
        found = [row["samples_per_second"][name] for name in ("min", "max")]
        assert found == pytest.approx(rates, rel=1e-4)


@thorough
def test_all_reduces_of_every_size_are_timed(measured: dict) -> None:
    rows = measured["allreduce"]
    assert len({row["bytes"] for row in rows}) == len(rows) > 5
    assert all(0 < row["seconds"]["min"] <= row["seconds"]["median"] for row in rows)


@thorough
def test_compression_sends_fewer_bytes(measured: dict) -> None:
    sent = {row["option"]: row.get("bytes_per_step") for row in measured["options"]}
    whole = measured["scaling"][0]["gradient_bytes"]
    count = 4  # bytes of the number of unseen cells, which no hook compresses
    assert (sent["hook: no compression"], sent["hook: bf16"]) == (whole + count, whole // 2 + count)
    assert sent["hook: PowerSGD, rank 2"] < whole / 10


@thorough
@pytest.mark.filterwarnings("ignore:TF32")
def test_halves_agree_with_the_whole_but_for_rounding(module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "0")
        error = {
            (row["convolutions"], row["parts"]): row["error"] for row in module("scaling").rounding(None)
        }
    assert error["double", 2] < min(error["plain", 1], error["plain", 2]) / 1000


@thorough
def test_the_timeline_tells_what_each_rank_does_with_and_without_a_straggler(measured: dict) -> None:
    rows = measured["timeline"]
    assert {(row["rank"], row["straggler"]) for row in rows} == {
        (r, late) for r in (0, 1) for late in (False, True)
    }
    for row in rows:
        assert 0 <= row["data"] <= row["forward"] <= row["backward"] <= row["optimizer"]
        assert all(row["forward"] <= ready <= done <= row["backward"] for ready, done in row["buckets"])


@thorough
def test_a_straggler_holds_up_the_other_rank(measured: dict) -> None:
    """Rank 0's last all-reduce ends after rank 1 has begun to compute, by the clock that both share."""
    late = {(row["step"], row["rank"]): row for row in measured["timeline"] if row["straggler"]}
    for step in {step for step, _ in late}:
        held_up, straggler = late[step, 0], late[step, 1]
        begins = straggler["began"] + straggler["data"]
        assert (
            held_up["began"] + max(end for _, end in held_up["buckets"]) > begins > straggler["began"] + 0.05
        )


def test_the_committed_scaling_is_of_this_script(module) -> None:
    rows = book.results("02_multi_gpu/results/scaling.json")["rows"]
    weak = next(row for row in rows if (row["mode"], row["devices"], row["threads"]) == ("weak", 2, 1))
    assert weak["efficiency"] == module("scaling").efficiency(weak, rows)
    commands = book.results("02_multi_gpu/results/commands.json")["rows"]
    assert {(row["script"], row["devices"]) for row in commands} == {
        (script, devices) for script in ("train.py", "train_ddp_by_hand.py") for devices in (1, 2)
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["speed"], "speed: no such study; choose from scaling, allreduce, "),
        (["--devices", 999, "--accelerator", "cpu"], f"--devices 999: there are {os.cpu_count()} cores"),
        (["--devices", 2, "--device-batch", 9], "--device-batch 9: 2 devices do not divide it"),
    ],
)
def test_scaling_refuses_what_it_cannot_measure(
    flags: list, message: str, module, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        module("scaling").main([str(flag) for flag in flags])
    assert message in capsys.readouterr().err.splitlines()[-1]
