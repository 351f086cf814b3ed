"""plan/: what a run will cost, and whether the formulas behind it hold."""

import json
from pathlib import Path

import pytest
from plan import __main__ as plan
from plan import throughput
from plan.interruptions import Interruptions, best_interval, expected_hours, mean_of_simulations

PRICES = """
date = "2001-01"
currency = "EUR"
energy = {overhead = 1.5, grams_co2_per_kwh = 400}
interruptions = {failure_hours = 50_000, noticed = 0.9}
[bucket]
thousand_gets = 0.0004
thousand_puts = 0.005
gigabyte_month = 0.02
gigabyte_to_region = 0.03
gigabyte_to_internet = 0.1
[devices]
small = {on_demand = 0.8, spot = 0.3, watts = 100, per_machine = 1, LINKS, spot_hours = 24}
pair = {on_demand = 2, spot = 1, watts = 300, per_machine = 2, LINKS, spot_hours = 10}
""".replace("LINKS", "device_gigabytes = 100, machine_gigabytes = 10")


@pytest.fixture
def finished(tmp_path: Path) -> list[str]:
    """The folder of a run of 40 samples a second on one device, and a table of prices that no reader edits."""
    summary = {"samples_per_second": 40.0, "data_wait_share": 0.25, "parameters": 266_522}
    summary |= {"requests_per_sample": 2.0, "bytes_per_sample": 50_000.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    options = {"batch_size": 8, "devices": 1, "num_nodes": 1}
    record = {"options": options, "machine": {"cpu": "a processor", "gpu": None}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    (tmp_path / "prices.toml").write_text(PRICES)
    return [str(tmp_path), "--prices", str(tmp_path / "prices.toml")]


# ------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize(
    "case", [(2, 0.9, 0.1, 0.5), (24, 0.9, 0.083, 10), (2, 0, 0.1, 0.5), (2, 1, 0, 0.5), (1e9, 0, 0.1, 0.01)]
)
def test_it_holds_where_saves_take_as_long_as_what_they_save(case: tuple) -> None:
    """And where nothing interrupts: only saving costs."""
    run = Interruptions(*case)
    simulated = mean_of_simulations(100, 1.0, run, runs=400)
    assert expected_hours(100, 1.0, run) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("noticed", [0.0, 0.9])
def test_the_best_interval_loses_less_than_others(noticed: float) -> None:
    run = Interruptions(between=2.0, noticed=noticed, restart=0.1, save=5 / 3600)
    best = best_interval(run)
    least = expected_hours(100, best, run)
    for factor in (0.4, 2.5):
        assert least < expected_hours(100, factor * best, run)
        assert least < mean_of_simulations(100, factor * best, run, runs=1000)


# --------------------------------------------------------------------------------------- throughput


def test_a_slow_network_or_exchange_limits_the_rate() -> None:
    """Steps of 0.2 s in which 8 MB are read, and 1 MB of gradients."""
    measured = throughput.Measured(40, 0.25, 2, bytes_per_sample=1e6, batch_size=8)

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
    # The exchange of the devices that were measured is in what was measured.
    links = throughput.Links(devices_per_machine=1, between_devices=1e9, of_a_machine=1e7)
    measured = throughput.Measured(320, 0.0, 0.0, 0.0, batch_size=64, devices=8)
    assert throughput.predict_step(measured, 8, 1e6, links).seconds == pytest.approx(64 / 320)
    assert throughput.predict_step(measured, 1, 1e6, links).seconds == pytest.approx(0.2 - 0.175)


# --------------------------------------------------------------------------------------------- costs


def test_a_plan_is_added_up_from_what_was_measured_and_the_prices(finished: list[str]) -> None:
    """On demand, one device: 40 hours of work, with next to no interruption."""
    flags = "--device small --samples 5.76e6 --devices 1 --store-gb 730 --egress region".split()
    on_demand, spot = plan.main([*finished, *flags])
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


@pytest.mark.parametrize(
    ("gpu", "accelerator", "device", "said"),
    [
        (None, "auto", "small", True),
        ("a GPU", "cpu", "small", True),
        ("a GPU", "auto", "small", False),
        (None, "auto", "cpu", False),
    ],
)
def test_a_plan_for_a_gpu_from_a_run_on_a_cpu_says_so(
    gpu: str | None, accelerator: str, device: str, said: bool, finished: list[str], tmp_path: Path, capsys
) -> None:
    record = json.loads((tmp_path / "record.json").read_text())
    record["machine"]["gpu"] = gpu
    record["options"]["accelerator"] = accelerator
    (tmp_path / "record.json").write_text(json.dumps(record))
    prices = tmp_path / "prices.toml"
    prices.write_text(prices.read_text().replace("pair =", "cpu ="))
    plan.main([*finished, "--device", device, "--samples", "1e6"])
    printed = capsys.readouterr().out
    assert ("note: measured without a GPU" in printed) == said
    assert ("(a GPU)" in printed) == (gpu is not None and not said)


@pytest.mark.parametrize(("samples", "hours", "kwh"), [(576, "0.0043", "0.00064"), (5.76e6, "40.0", "6.0")])
def test_the_time_and_energy_of_a_short_run_are_not_zero(
    samples: float, hours: str, kwh: str, finished: list[str], capsys
) -> None:
    """Of 14 seconds, and one for a checkpoint: 0.0043 hours."""
    plan.main([*finished, *f"--device small --samples {samples} --devices 1".split()])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("on demand"))
    words = line.split()
    assert words[4] == hours
    assert words[-2] == kwh


def test_machines_are_paid_as_a_whole_and_stop_one_by_one(finished: list[str]) -> None:
    plans = plan.main([*finished, *"--device pair --samples 1e8 --devices 1 3 12".split()])
    paid = {(one.market, one.devices): one.device_cost / one.hours for one in plans}
    assert paid["on_demand", 1] == pytest.approx(2 * 2)
    assert paid["spot", 3] == pytest.approx(4 * 1)
    extra = {(one.market, one.devices): one.hours * one.rate / 1e8 * 3600 for one in plans}
    assert extra["spot", 12] > 1.01 * extra["spot", 3] > 1.01 * extra["spot", 1]
    assert extra["on_demand", 12] < 1.005 * extra["on_demand", 1]


def test_the_network_is_the_runs_unless_another_is_given(finished: list[str], tmp_path: Path, capsys) -> None:
    """Gradients of a larger one take longer to exchange."""
    flags = [*finished, *"--device small --samples 1e6 --devices 8".split()]

    def rate(*more: str) -> float:
        return plan.main([*flags, *more])[0].rate

    summary = json.loads((tmp_path / "summary.json").read_text())
    for parameters in (10**6, 10**9):
        (tmp_path / "summary.json").write_text(json.dumps(summary | {"parameters": parameters}))
        assert rate() == rate("--parameters", str(parameters))
    assert rate() < 0.9 * rate("--parameters", "1e6")
    del summary["parameters"]  # as in runs of before
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(SystemExit):
        rate()
    assert "--parameters: the run does not say how many" in capsys.readouterr().err


BAD_FLAGS = {
    "--device tpu": "--device tpu: no price; choose from small, pair",
    "--samples nan": "--samples nan: give a number above 0",
    "--devices 0": "--devices 0: give at least 1",
    "--store-gb nan": "--store-gb nan: give at least 0",
    "--prices nowhere.toml": "--prices nowhere.toml: [Errno 2]",
    "--restart-minutes 1e8": "--restart-minutes 1e+08, --save-seconds 1: interrupted before",
    "--save-seconds 1e300": "--save-seconds 1e+300: interrupted before",
}
BAD_FILES = {  # what is written in the place of what, and what is said
    ("energy =", "power ="): "prices.toml: 'energy'",
    ("watts = 100, ", ""): "'watts'",
    ("watts = 100", "watts = 100, watt = 2"): "'watt'",
    ("watts = 100", 'watts = "many"'): "[devices.small] watts = many: give a number",
    ("spot = 0.3", "spot = -0.3"): "[devices.small] spot = -0.3: give a number",
    ("spot_hours = 24", "spot_hours = 0"): "spot_hours = 0: give more than 0",
    ("noticed = 0.9", "noticed = 1.5"): "give noticed up to 1",
    ("[devices]", "[devices"): "mend the table",
    ("40.0", "null"): "no measurement (",
    ("40.0", "NaN"): "its rate is nan samples/s",
    ("266522", "-1"): "its network has -1 parameters",
    ("0.25", "1.5"): "it waited for data for 150% of the time",
    ("samples_per_second", "other"): "give the folder of a run that has ended",
    ('"devices"', '"other"'): "no measurement (",
    ('{"options"', ""): "no measurement (",
}


@pytest.mark.parametrize("bad", [*BAD_FLAGS, *BAD_FILES])
def test_what_is_wrong_with_flags_prices_or_the_run_is_named(
    bad: str | tuple, finished: list[str], tmp_path: Path, capsys
) -> None:
    flags = [*finished, *"--device small --samples 1e6".split()]
    if bad in BAD_FLAGS:
        flags += bad.split()
    else:
        for path in tmp_path.iterdir():
            path.write_text(path.read_text().replace(*bad, 1))
    with pytest.raises(SystemExit) as ended:
        plan.main(flags)
    assert ended.value.code == 2
    assert (BAD_FLAGS | BAD_FILES)[bad] in capsys.readouterr().err.splitlines()[-1]
