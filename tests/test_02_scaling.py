"""Chapter 2's scaling.py: what each study records, and what is refused."""

import os
import statistics
from importlib import import_module
from types import ModuleType

import book
import pytest
from runs import load

SCALING = "02_multi_gpu/scaling.py"
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scaling.py, whose processes find the modules beside it, too."""
    with book.rooms("02_multi_gpu"):
        yield load(SCALING, "scaling_of_chapter_2")


@pytest.fixture(scope="module")
def measured(script: ModuleType) -> dict[str, list[dict]]:
    """What some studies find on this machine in a few steps of two ranks."""
    studies = "scaling allreduce options timeline rounding"
    return script.main(f"{studies} --quick --devices 2 --accelerator cpu".split())


@thorough
def test_weak_and_strong_scaling_are_measured_beside_a_fair_rival(measured: dict) -> None:
    rows = {(row["mode"], row["devices"]): row for row in measured["scaling"]}
    assert [rows["weak", n]["global_batch"] for n in (1, 2)] == [8, 16]
    assert [rows["strong", n]["global_batch"] for n in (1, 2)] == [8, 8]
    assert rows["one process, as many threads", 1]["threads"] == 2
    for row in rows.values():
        stretches = [row["steps"][:4], row["steps"][4:]]
        rates = sorted(row["global_batch"] / statistics.median(stretch) for stretch in stretches)
        found = [row["samples_per_second"][name] for name in ("min", "max")]
        assert found == pytest.approx(rates, rel=1e-3)


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
def test_halves_agree_with_the_whole_but_for_rounding(measured: dict) -> None:
    error = {(row["convolutions"], row["parts"]): row["error"] for row in measured["rounding"]}
    assert error["double", 2] < min(error["plain", 1], error["plain", 2]) / 1000


@thorough
def test_the_timeline_has_each_rank_with_and_without_a_straggler(measured: dict) -> None:
    rows = measured["timeline"]
    assert {(row["rank"], row["straggler"]) for row in rows} == {(0, False), (1, False), (0, True), (1, True)}
    for row in rows:
        assert 0 <= row["data"] <= row["forward"] <= row["backward"] <= row["optimizer"]
        for ready, done in row["buckets"]:
            assert row["forward"] <= ready <= done <= row["backward"]


@thorough
def test_a_straggler_holds_up_the_other_rank(measured: dict) -> None:
    """Rank 0's last all-reduce ends after rank 1 has begun to compute, by the clock that both share."""
    late = {(row["step"], row["rank"]): row for row in measured["timeline"] if row["straggler"]}
    for step in {step for step, _ in late}:
        held_up, straggler = late[step, 0], late[step, 1]
        begins = straggler["began"] + straggler["data"]
        ends = held_up["began"] + max(done for _, done in held_up["buckets"])
        assert ends > begins > straggler["began"] + 0.05


def test_the_committed_results_are_of_this_script(script: ModuleType) -> None:
    rows = book.results("02_multi_gpu/results/scaling.json")["rows"]
    weak = next(row for row in rows if (row["mode"], row["devices"]) == ("weak", 2))
    assert weak["efficiency"] == import_module("studies.throughput").efficiency(weak, rows)
    commands = book.results("02_multi_gpu/results/commands.json")["rows"]
    scripts = {(row["script"], row["devices"]) for row in commands}
    assert scripts == {(name, devices) for name in ("train.py", "train_ddp_by_hand.py") for devices in (1, 2)}
    for study, plot in script.PLOTS.items():
        assert plot(book.results(f"02_multi_gpu/results/{study}.json")["rows"]).axes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("speed", "speed: no such study; choose from scaling, allreduce, "),
        ("--devices 999 --accelerator cpu", f"--devices 999: give up to {os.cpu_count()}, the cores"),
        ("--devices 0", "--devices: 0: too small"),
        ("--devices 2 --device-batch 9", "--device-batch 9: 2 devices do not divide it"),
        ("--quick --save-results", "--save-results: --quick finds nothing worth keeping"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: str, message: str, script: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]
