"""Chapter 6: what a run will cost: hours, money and energy, on more or fewer devices.

    uv run python train.py --max-steps 200               # on one device of the kind you will rent
    uv run python plan.py outputs/train --device l4 --samples 20_000_000

You should see a line for each number of devices, on demand and on spot machines, with the
interval between checkpoints that loses least. What is measured comes from the run's summary,
and what is paid from prices.toml: edit it.
"""

import argparse
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from errors import first_line, refuse
from interruptions import Interruptions, best_interval, expected_hours
from throughput import Measured, predict_rate

HERE = Path(__file__).parent
GIGA = 1e9
MONTH = 730  # hours
LONGEST_INTERVAL = 1.0  # hours between checkpoints, however rare the interruptions


@dataclass(frozen=True)
class Job:
    """What is to be done, apart from the devices that do it."""

    samples: float
    parameters: float
    store_gigabytes: float
    save_seconds: float
    restart_minutes: float
    egress: str  # none, region or internet


@dataclass(frozen=True)
class Plan:
    """What one way to do the job takes. Money in the currency of the prices."""

    market: str  # on_demand or spot
    devices: int
    rate: float  # samples a second, while it runs
    hours: float
    interval_minutes: float  # between checkpoints
    device_cost: float
    idle_cost: float  # the part of it in which the devices wait for data
    bucket_cost: float  # requests, storage and egress
    kwh: float
    kg_co2: float

    @property
    def cost(self) -> float:
        return self.device_cost + self.bucket_cost


def make_plan(
    market: str, devices: int, measured: Measured, job: Job, kind: str, prices: dict
) -> Plan:
    """Predict the rate and the interruptions, and add up what they cost."""
    device = prices["devices"][kind]
    machines = -(-devices // device["per_machine"])
    rate = predict_rate(
        measured,
        devices,
        gradient_bytes=4 * job.parameters,
        device_bandwidth=GIGA * device["exchange_gigabytes"],
        store_bandwidth=GIGA * device["network_gigabytes"] * machines,
    )
    work = job.samples / rate / 3600
    run = describe_interruptions(market, devices, machines, job, device, prices)
    interval = min(best_interval(run), LONGEST_INTERVAL, work)
    hours = expected_hours(work, interval, run)
    device_cost = devices * hours * device[market]
    kwh = devices * hours * device["watts"] / 1000 * prices["energy"]["overhead"]
    return Plan(
        market=market,
        devices=devices,
        rate=rate,
        hours=hours,
        interval_minutes=60 * interval,
        device_cost=device_cost,
        idle_cost=device_cost * measured.waiting,
        bucket_cost=add_up_bucket(measured, job, hours, work / interval, prices),
        kwh=kwh,
        kg_co2=kwh * prices["energy"]["grams_co2_per_kwh"] / 1000,
    )


def describe_interruptions(
    market: str, devices: int, machines: int, job: Job, device: dict, prices: dict
) -> Interruptions:
    """One machine that stops, stops the run. Hardware fails on both markets, unannounced."""
    failures = devices / prices["failures"]["device_hours"]  # an hour
    preemptions = machines / device["spot_hours"] if market == "spot" else 0.0
    rate = failures + preemptions
    return Interruptions(
        between=1 / rate,
        noticed=prices["failures"]["noticed"] * preemptions / rate,
        restart=job.restart_minutes / 60,
        save=job.save_seconds / 3600,
    )


def add_up_bucket(
    measured: Measured, job: Job, hours: float, saves: float, prices: dict
) -> float:
    """Requests and bytes of each sample once, a write a checkpoint, storage meanwhile."""
    bucket = prices["bucket"]
    gets = job.samples * measured.requests_per_sample
    gigabytes = job.samples * measured.bytes_per_sample / GIGA
    cost = gets / 1000 * bucket["per_1000_gets"]
    cost += saves / 1000 * bucket["per_1000_puts"]
    cost += job.store_gigabytes * bucket["gigabyte_month"] * hours / MONTH
    if job.egress != "none":
        cost += gigabytes * bucket[f"gigabyte_to_{job.egress}"]
    return cost


def read_measured(path: Path) -> Measured:
    """What a run's folder, or the results that keep_run.py has kept, say about it."""
    if path.is_dir():
        summary = json.loads((path / "summary.json").read_text())
        options = json.loads((path / "options.json").read_text())
    else:
        summary = json.loads(path.read_text())["rows"][0]
        options = summary["options"]
    return Measured(
        samples_per_second=summary["samples_per_second"],
        waiting=summary["data_wait_share"],
        requests_per_sample=summary.get("requests_per_sample", 0.0),
        bytes_per_sample=summary.get("bytes_per_sample", 0.0),
        batch_size=options["batch_size"],
        devices=options["devices"] * options["num_nodes"],
    )


def read_prices(path: Path) -> dict:
    with open(path, "rb") as file:
        return tomllib.load(file)


def print_plans(plans: list[Plan], currency: str) -> None:
    header = f"{'':10} {'devices':>7} {'samples/s':>9} {'hours':>7} {'save every':>10}"
    print(f"{header} {currency:>8} {'idle':>7} {'bucket':>7} {'kWh':>7} {'kg CO2':>7}")
    for plan in plans:
        market = plan.market.replace("_", " ")
        print(
            f"{market:10} {plan.devices:7} {plan.rate:9,.0f} {plan.hours:7.1f}", end=""
        )
        print(f" {plan.interval_minutes:6.1f} min {plan.cost:8,.2f}", end="")
        print(f" {plan.idle_cost:7,.2f} {plan.bucket_cost:7,.2f}", end="")
        print(f" {plan.kwh:7.1f} {plan.kg_co2:7.2f}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run", type=Path, help="the folder of a finished run, or results/final.json")
    add("--device", required=True, help="the kind that the run was measured on")
    add("--samples", type=float, required=True, help="that training shall see")
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="how many")
    add("--parameters", type=float, default=266_522, help="of the network")
    add("--store-gb", type=float, default=0.0, help="what the bucket stores for it")
    egress = ("none", "region", "internet")
    add("--egress", choices=egress, default="none", help="where the data have to go")
    add("--save-seconds", type=float, default=1.0, help="what a checkpoint costs")
    add("--restart-minutes", type=float, default=5.0, help="until it trains again")
    add("--prices", type=Path, default=HERE / "prices.toml", help="a table of prices")
    args = parser.parse_args(argv)
    for name in ("samples", "parameters", "save_seconds", "restart_minutes"):
        value = getattr(args, name)
        if not 0 < value < float("inf"):
            refuse(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if args.store_gb < 0:
        refuse(f"--store-gb {args.store_gb:g}: give at least 0")
    for devices in args.devices:
        if devices < 1:
            refuse(f"--devices {devices}: give at least 1")
    return args


def main(argv: list[str] | None = None) -> list[Plan]:
    """Print the plans of a command line, and return them."""
    args = parse_arguments(argv)
    try:
        measured = read_measured(args.run)
    except (OSError, KeyError, ValueError) as error:
        refuse(f"run {args.run}: no summary of a finished run ({first_line(error)})")
    try:
        prices = read_prices(args.prices)
    except (OSError, ValueError) as error:
        refuse(f"--prices {args.prices}: cannot be read ({first_line(error)})")
    if args.device not in prices["devices"]:
        kinds = ", ".join(prices["devices"])
        refuse(f"--device {args.device}: no price; choose from {kinds}, or add one")
    job = Job(
        samples=args.samples,
        parameters=args.parameters,
        store_gigabytes=args.store_gb,
        save_seconds=args.save_seconds,
        restart_minutes=args.restart_minutes,
        egress=args.egress,
    )
    plans = []
    for market in ("on_demand", "spot"):
        for devices in args.devices:
            plan = make_plan(market, devices, measured, job, args.device, prices)
            plans.append(plan)
    rate = f"{measured.samples_per_second:.1f} samples/s"
    waiting = f"{measured.waiting:.1%} of the time waiting for data"
    print(f"measured on {measured.devices} of these devices: {rate}, {waiting}")
    print(f"{job.samples:,.0f} samples, at the prices of {prices['date']}:")
    print_plans(plans, prices["currency"])
    return plans


if __name__ == "__main__":
    main()
