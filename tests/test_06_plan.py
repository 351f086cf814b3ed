"""Chapter 6: what a run will cost, and whether the formulas behind it hold."""

import json
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
        from plan import __main__ as plan
        from plan import interruptions, throughput
        from studies import plan_check

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
    record = {"options": options, "machine": {"cpu": "a processor", "gpu": None}}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


PRICES = """
date = "2001-01"
currency = "EUR"
[devices.small]
on_demand = 0.8
spot = 0.3
watts = 100
per_machine = 1
spot_hours = 24
device_gigabytes = 100
machine_gigabytes = 10
[devices.pair]
on_demand = 2
spot = 1
watts = 300
per_machine = 2
spot_hours = 10
device_gigabytes = 100
machine_gigabytes = 10
[bucket]
thousand_gets = 0.0004
thousand_puts = 0.005
gigabyte_month = 0.02
gigabyte_to_region = 0.03
gigabyte_to_internet = 0.1
[energy]
overhead = 1.5
grams_co2_per_kwh = 400
[interruptions]
failure_hours = 50_000
noticed = 0.9
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """A table of prices that no reader edits."""
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


# ------------------------------------------------------------------------------------ interruptions


def test_the_formula_is_within_five_percent_of_the_simulation() -> None:
    for row in plan_check.compare_interruptions(runs=50):
        assert row["predicted"] == pytest.approx(row["found"], rel=0.05), row


SLOW_SAVES = [
    (2, 0.9, 0.1, 0.5),
    (0.5, 0.9, 0.25, 0.25),
    (24, 0.9, 0.083, 10),
    (2, 0, 0.1, 0.5),
    (2, 1, 0, 0.5),
]


@pytest.mark.parametrize("case", SLOW_SAVES)
def test_it_holds_where_saves_take_as_long_as_what_they_save(case: tuple) -> None:
    run = interruptions.Interruptions(*case)
    simulated = interruptions.mean_of_simulations(100, 1.0, run, runs=400)
    assert interruptions.expected_hours(100, 1.0, run) == pytest.approx(simulated, rel=0.02)


def test_the_formula_is_within_a_percent_of_the_committed_simulation() -> None:
    rows = book.results("06_whats_next/results/plan_check.json")["rows"]
    stops = [row for row in rows if row["what"] == "interruptions"]
    assert len(stops) == 96
    for row in stops:
        run = interruptions.Interruptions(row["between"], row["noticed"], row["restart"], plan_check.SAVE)
        hours = interruptions.expected_hours(plan_check.WORK, row["interval"], run)
        assert hours == pytest.approx(row["found"], rel=0.01), row


def test_without_interruptions_only_saving_costs() -> None:
    never = interruptions.Interruptions(between=1e9, noticed=0.0, restart=0.1, save=0.01)
    assert interruptions.expected_hours(100, 0.5, never) == pytest.approx(100 * (1 + 0.01 / 0.5))
    assert interruptions.mean_of_simulations(100, 0.5, never, runs=2) == pytest.approx(102)


@pytest.mark.parametrize("noticed", [0.0, 0.9])
def test_the_best_interval_loses_less_than_others(noticed: float) -> None:
    run = interruptions.Interruptions(between=2.0, noticed=noticed, restart=0.1, save=5 / 3600)
    best = interruptions.best_interval(run)
    least = interruptions.expected_hours(100, best, run)
    for factor in (0.4, 2.5):
        assert least < interruptions.expected_hours(100, factor * best, run)
        assert least < interruptions.mean_of_simulations(100, factor * best, run, runs=1000)


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
    chapters = [row["chapter"][:2] for row in rows]
    assert (chapters.count("02"), chapters.count("04")) == (2, 7)
    for row in rows:
        assert row["predicted"] == pytest.approx(row["found"], rel=0.15), row


def test_a_slow_network_or_exchange_limits_the_rate() -> None:
    """Steps of 0.2 s in which 8 MB are read, and 1 MB of gradients."""
    measured = throughput.Measured(
        samples_per_second=40, waiting=0.25, requests_per_sample=2, bytes_per_sample=1e6, batch_size=8
    )

    def predict(devices: int, **changes) -> throughput.Step:
        links = {"devices_per_machine": 4, "between_devices": 1e12, "of_a_machine": 1e12}
        return throughput.predict_step(measured, devices, 1e6, throughput.Links(**links | changes))

    assert predict(8).seconds == pytest.approx(0.2, rel=1e-4)
    assert (predict(8).compute, predict(8).wait) == (pytest.approx(0.15), pytest.approx(0.05))
    # Four devices of a machine read 32 MB together, however many machines there are.
    for devices in (4, 8):
        slow = predict(devices, of_a_machine=80e6)
        assert (slow.compute, slow.wait) == (pytest.approx(0.15), pytest.approx(0.4 - 0.15))
    # Within a machine its own links count, and the network only between machines.
    assert predict(4, between_devices=7.5e6).exchange == pytest.approx(1.5 * 1e6 / 7.5e6)
    assert predict(4, of_a_machine=1e9).exchange < 1e-5
    assert predict(8, of_a_machine=1e9).exchange == pytest.approx(1.75 * 1e6 / 1e9)


def test_the_exchange_of_the_measured_devices_is_not_counted_twice() -> None:
    links = throughput.Links(devices_per_machine=1, between_devices=1e9, of_a_machine=1e7)
    measured = throughput.Measured(320, 0.0, 0.0, 0.0, batch_size=64, devices=8)
    assert throughput.predict_step(measured, 8, 1e6, links).seconds == pytest.approx(64 / 320)
    assert throughput.predict_step(measured, 1, 1e6, links).seconds == pytest.approx(0.2 - 0.175)


# --------------------------------------------------------------------------------------------- costs


def test_a_plan_is_added_up_from_what_was_measured_and_the_prices(finished: Path, prices: Path) -> None:
    """On demand, one device: 40 hours of work, with next to no interruption."""
    flags = "--device small --samples 5.76e6 --devices 1 --store-gb 730 --egress region --prices".split()
    on_demand, spot = plan.main([str(finished), *flags, str(prices)])
    assert on_demand.hours == pytest.approx(40, rel=0.01)
    assert on_demand.device_cost == pytest.approx(0.8 * on_demand.hours)
    assert on_demand.idle_cost == pytest.approx(0.8 * 40 / 4)
    kwh = 0.1 * on_demand.hours * 1.5
    assert on_demand.kwh == pytest.approx(kwh)
    assert on_demand.kg_co2 == pytest.approx(0.4 * kwh)
    saves = 40 / (on_demand.interval_minutes / 60)
    requests = 5.76e6 * 2 / 1000 * 0.0004 + saves / 1000 * 0.005
    egress = 5.76e6 * 50_000 / 1e9 * 0.03
    storage = 0.02 * on_demand.hours
    assert on_demand.bucket_cost == pytest.approx(requests + egress + storage)
    assert on_demand.cost == on_demand.device_cost + on_demand.bucket_cost
    assert on_demand.hours < spot.hours < 1.05 * on_demand.hours
    assert spot.cost < on_demand.cost
    assert spot.interval_minutes < on_demand.interval_minutes


def test_machines_are_paid_as_a_whole_and_stop_one_by_one(finished: Path, prices: Path) -> None:
    flags = "--device pair --samples 1e8 --devices 1 3 12 --prices".split()
    plans = plan.main([str(finished), *flags, str(prices)])
    paid = {(one.market, one.devices): one.device_cost / one.hours for one in plans}
    assert paid["on_demand", 1] == pytest.approx(2 * 2)
    assert paid["spot", 3] == pytest.approx(4 * 1)
    extra = {(one.market, one.devices): one.hours * one.rate / 1e8 * 3600 for one in plans}
    assert extra["spot", 12] > 1.01 * extra["spot", 3] > 1.01 * extra["spot", 1]
    assert extra["on_demand", 12] < 1.005 * extra["on_demand", 1]


def test_the_prices_that_come_with_the_book_are_whole() -> None:
    assert plan.read_prices(CHAPTER / "prices.toml").devices


BAD_INPUT = {
    "--device tpu": "--device tpu: no price; choose from small, pair, or add one",
    "--samples 0": "--samples 0: give a number above 0",
    "--samples nan": "--samples nan: give a number above 0",
    "--devices 0": "--devices 0: give at least 1",
    "--store-gb nan": "--store-gb nan: give at least 0",
    "--prices nowhere.toml": "--prices nowhere.toml: [Errno 2] No such file or directory",
    "--restart-minutes 1e8": "--restart-minutes 1e+08, --save-seconds 1: interrupted before it goes on",
    "--save-seconds 1e300": "--save-seconds 1e+300: interrupted before it goes on",
}


def refused(capsys: pytest.CaptureFixture[str], finished: Path, *flags: object) -> str:
    """The last line that plan refuses these flags with."""
    with pytest.raises(SystemExit) as ended:
        plan.main([str(finished), *"--device small --samples 1e6".split(), *map(str, flags)])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag(
    flags: str, finished: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BAD_INPUT[flags] in refused(capsys, finished, "--prices", prices, *flags.split())


BAD_PRICES = {  # what is written instead of what, and what is said
    "no section": ("[energy]", "[power]", "'energy'"),
    "no key": ("watts = 100", "", "'watts'"),
    "an unknown key": ("watts = 100", "watts = 100\nwatt = 2", "'watt'"),
    "text": ("watts = 100", 'watts = "many"', "[devices.small] watts = many: give a number"),
    "negative": ("spot = 0.3", "spot = -0.3", "[devices.small] spot = -0.3: give a number"),
    "zero": ("spot_hours = 24", "spot_hours = 0", "[devices.small] spot_hours = 0: give more than 0"),
    "a share above 1": ("noticed = 0.9", "noticed = 1.5", "give noticed up to 1"),
    "no TOML": ("[bucket]", "[bucket", "mend the table"),
}


@pytest.mark.parametrize("case", BAD_PRICES)
def test_what_is_wrong_with_the_prices_is_named(
    case: str, finished: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, said = BAD_PRICES[case]
    prices.write_text(PRICES.replace(before, after, 1))
    line = refused(capsys, finished, "--prices", prices)
    assert f"--prices {prices}: " in line and said in line


BAD_SUMMARIES = {  # a name, its value, and what is said
    "no rate": ("samples_per_second", None, "no measurement ("),
    "a rate of nothing": ("samples_per_second", 0, "its rate is 0 samples/s"),
    "not a number": ("samples_per_second", float("nan"), "its rate is nan samples/s"),
    "more than all the time": ("data_wait_share", 1.5, "it waited for data for 150% of the time"),
}


@pytest.mark.parametrize("case", BAD_SUMMARIES)
def test_a_summary_that_no_run_can_have_is_refused(
    case: str, finished: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value, said = BAD_SUMMARIES[case]
    summary = json.loads((finished / "summary.json").read_text())
    (finished / "summary.json").write_text(json.dumps(summary | {name: value}))
    line = refused(capsys, finished, "--prices", prices)
    assert f"run {finished}: " in line and said in line


@pytest.mark.parametrize("missing", ["summary.json", "record.json", "samples_per_second", "devices"])
def test_a_run_that_has_not_ended_is_refused(
    missing: str, finished: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or has taken no step in its last start."""
    if missing.endswith(".json"):
        (finished / missing).unlink()
    else:
        for name in ("summary.json", "record.json"):
            path = finished / name
            path.write_text(path.read_text().replace(f'"{missing}"', '"other"'))
    line = refused(capsys, finished, "--prices", prices)
    assert f"run {finished}: no measurement (" in line
    assert "give the folder of a run that has ended" in line


def test_away_from_the_book_the_check_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_check, "BOOK", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        plan_check.main([])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "not found in ../02_multi_gpu/results; run this in the book" in said
