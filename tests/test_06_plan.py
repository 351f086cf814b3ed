"""Chapter 6: what a run will cost, and whether the formulas behind it hold."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import book
import pytest

CHAPTER = book.ROOT / "06_whats_next"


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    global interruptions, plan, plan_check, throughput
    with book.rooms("06_whats_next"):
        import interruptions
        import plan
        import plan_check
        import throughput

        yield


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of 40 samples a second on one device."""
    folder = tmp_path / "run"
    folder.mkdir()
    summary = {"samples_per_second": 40.0, "data_wait_share": 0.25}
    summary |= {"requests_per_sample": 2.0, "bytes_per_sample": 50_000.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    options = {"batch_size": 8, "devices": 1, "num_nodes": 1}
    (folder / "options.json").write_text(json.dumps(options))
    return folder


# ------------------------------------------------------------------------------------ interruptions


def test_the_formula_is_within_five_percent_of_the_simulation() -> None:
    for row in plan_check.compare_interruptions(runs=200):
        assert row["predicted"] == pytest.approx(row["found"], rel=0.05), row


def test_without_interruptions_only_saving_costs() -> None:
    never = interruptions.Interruptions(between=1e9, noticed=0.0, restart=0.1, save=0.01)
    assert interruptions.expected_hours(100, 0.5, never) == pytest.approx(100 * (1 + 0.01 / 0.5))
    assert interruptions.mean_of_simulations(100, 0.5, never, runs=2) == pytest.approx(102)


@pytest.mark.parametrize("noticed", [0.0, 0.9])
def test_the_best_interval_loses_less_than_others(noticed: float) -> None:
    run = interruptions.Interruptions(between=2.0, noticed=noticed, restart=0.1, save=5 / 3600)
    best = interruptions.best_interval(run)
    least = interruptions.expected_hours(100, best, run)
    for factor in (0.5, 0.7, 1.5, 2):
        assert least < interruptions.expected_hours(100, factor * best, run)
        assert least < interruptions.mean_of_simulations(100, factor * best, run, runs=4000)


def test_a_notice_saves_what_would_be_lost() -> None:
    hours = []
    for noticed in (0.0, 0.5, 1.0):
        run = interruptions.Interruptions(between=2.0, noticed=noticed, restart=0.1, save=5 / 3600)
        hours.append(interruptions.expected_hours(100, 0.5, run))
    assert hours == sorted(hours, reverse=True)
    # The restarts are left, and the saves.
    assert hours[-1] == pytest.approx(100 * (1 + 0.1 / 2), rel=0.01)


# --------------------------------------------------------------------------------------- throughput


def test_the_rate_is_within_15_percent_of_chapters_2_and_4() -> None:
    rows = plan_check.compare_devices() + plan_check.compare_loaders()
    assert [row["chapter"][:2] for row in rows].count("02") == 2
    for row in rows:
        assert row["predicted"] == pytest.approx(row["found"], rel=0.15), row


def test_a_slow_network_or_exchange_limits_the_rate() -> None:
    measured = throughput.Measured(
        samples_per_second=40, waiting=0.0, requests_per_sample=2, bytes_per_sample=1e6, batch_size=8
    )
    free = throughput.predict_rate(measured, 4, 1e6, 1e12, 1e12)
    assert free == pytest.approx(160, rel=1e-4)
    # 80 MB a second for all are 80 samples a second.
    assert throughput.predict_rate(measured, 4, 1e6, 1e12, 80e6) == pytest.approx(80, rel=1e-4)
    # A step of 0.2 s, and then 1.5 times 1 MB at 7.5 MB a second.
    assert throughput.predict_rate(measured, 4, 1e6, 7.5e6, 1e12) == pytest.approx(80)


# --------------------------------------------------------------------------------------------- costs


def test_a_plan_is_added_up_from_what_was_measured_and_the_prices(finished: Path) -> None:
    """On demand, one device: 40 hours of work, with next to no interruption."""
    flags = "--device l4 --samples 5.76e6 --devices 1 --store-gb 730 --egress region".split()
    on_demand, spot = plan.main([str(finished), *flags])
    assert on_demand.hours == pytest.approx(40, rel=0.01)
    assert on_demand.device_cost == pytest.approx(0.80 * on_demand.hours)
    assert on_demand.idle_cost == pytest.approx(on_demand.device_cost / 4)
    kwh = 0.072 * on_demand.hours * 1.3
    assert on_demand.kwh == pytest.approx(kwh)
    assert on_demand.kg_co2 == pytest.approx(0.47 * kwh)
    saves = 40 / (on_demand.interval_minutes / 60)
    bucket = 5.76e6 * 2 / 1000 * 0.0004 + saves / 1000 * 0.005 + 5.76e6 * 50_000 / 1e9 * 0.02
    bucket += 730 * 0.023 * on_demand.hours / 730
    assert on_demand.bucket_cost == pytest.approx(bucket, rel=1e-4)
    assert on_demand.hours < spot.hours < 1.05 * on_demand.hours
    assert spot.cost < on_demand.cost
    assert spot.interval_minutes < on_demand.interval_minutes


def test_more_machines_are_interrupted_more_often(finished: Path) -> None:
    plans = plan.main([str(finished), *"--device l4 --samples 1e8 --devices 1 8".split()])
    overheads = {(one.market, one.devices): one.hours * one.rate for one in plans}
    assert overheads["spot", 8] > 1.01 * overheads["spot", 1]
    assert overheads["on_demand", 8] < 1.005 * overheads["on_demand", 1]


BAD_INPUT = {
    "--device tpu": "--device tpu: no price; choose from h100, l4, cpu, or add one",
    "--samples 0": "--samples 0: give a number above 0",
    "--samples nan": "--samples nan: give a number above 0",
    "--devices 0": "--devices 0: give at least 1",
    "--store-gb -1": "--store-gb -1: give at least 0",
    "--prices nowhere.toml": "--prices nowhere.toml: cannot be read (",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag(
    flags: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([str(finished), *"--device l4 --samples 1e6".split(), *flags.split()])
    assert ended.value.code == 2
    assert BAD_INPUT[flags] in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_has_not_ended_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "summary.json").unlink()
    with pytest.raises(SystemExit) as ended:
        plan.main([str(finished), *"--device l4 --samples 1e6".split()])
    assert ended.value.code == 2
    assert f"run {finished}: no summary of a finished run" in capsys.readouterr().err


def test_the_folder_alone_says_where_the_measurements_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(CHAPTER / "plan_check.py", tmp_path)
    monkeypatch.setattr(plan_check, "BOOK", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        plan_check.main([])
    assert "not found in ../02_multi_gpu/results; run this in the book" in capsys.readouterr().err
