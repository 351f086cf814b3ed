"""Chapter 6: what a run will cost: hours, money and energy, on more or fewer devices.

    uv run python train.py --devices 1          # on a device of the kind that you will rent
    uv run python -m plan outputs/train --device l4 --samples 20_000_000

You should see a line for each number of devices, on demand and on spot machines, with the
interval between checkpoints that loses least, or an hour if that is less. What is measured
comes from the run's summary, and what is paid from prices.toml: edit it.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from errors import DataError, first_line, program, refuse
from plan.interruptions import Interruptions, best_interval, expected_hours
from plan.throughput import Links, Measured, predict_step
from prices import Bucket, Device, Prices, read_prices

PRICES = Path(__file__).parent.parent / "prices.toml"
GIGA = 1e9
MONTH = 730  # hours
NO_GPU = ", no GPU"
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
    """Time, money and energy of a job on some devices. Money in the prices' currency."""

    market: str  # on_demand or spot
    devices: int
    rate: float  # samples a second, while it runs
    hours: float  # with all saves and interruptions
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
    market: str, devices: int, measured: Measured, job: Job, kind: str, prices: Prices
) -> Plan:
    """Predict a step and the interruptions, and add up what they cost.

    OverflowError or ZeroDivisionError if the run would never end.
    """
    device = prices.devices[kind]
    links = Links(
        devices_per_machine=device.per_machine,
        between_devices=GIGA * device.device_gigabytes,
        of_a_machine=GIGA * device.machine_gigabytes,
    )
    step = predict_step(measured, devices, 4 * job.parameters, links)
    rate = devices * measured.device_batch / step.seconds
    work = job.samples / rate / 3600

    machines = links.count_machines(devices)
    stops = describe_interruptions(market, devices, machines, job, device, prices)
    interval = min(best_interval(stops), LONGEST_INTERVAL, work)
    hours = expected_hours(work, interval, stops)

    price = machines * device.per_machine * getattr(device, market)  # an hour
    kwh = devices * hours * device.watts / 1000 * prices.energy.overhead
    return Plan(
        market=market,
        devices=devices,
        rate=rate,
        hours=hours,
        interval_minutes=60 * interval,
        device_cost=price * hours,
        idle_cost=price * work * step.wait / step.seconds,
        bucket_cost=add_up_bucket(measured, job, hours, work / interval, prices.bucket),
        kwh=kwh,
        kg_co2=kwh * prices.energy.grams_co2_per_kwh / 1000,
    )


def describe_interruptions(
    market: str, devices: int, machines: int, job: Job, device: Device, prices: Prices
) -> Interruptions:
    """One machine that stops, stops the run. Hardware fails on both markets, unannounced."""
    failures = devices / prices.interruptions.failure_hours  # an hour
    taken_back = machines / device.spot_hours if market == "spot" else 0.0
    rate = failures + taken_back
    return Interruptions(
        between=1 / rate,
        noticed=prices.interruptions.noticed * taken_back / rate,
        restart=job.restart_minutes / 60,
        save=job.save_seconds / 3600,
    )


def add_up_bucket(
    measured: Measured, job: Job, hours: float, saves: float, bucket: Bucket
) -> float:
    """Requests and bytes of each sample once, a PUT for each save, storage meanwhile."""
    gets = job.samples * measured.requests_per_sample
    gigabytes = job.samples * measured.bytes_per_sample / GIGA
    cost = gets / 1000 * bucket.thousand_gets
    cost += saves / 1000 * bucket.thousand_puts
    cost += job.store_gigabytes * bucket.gigabyte_month * hours / MONTH
    if job.egress == "region":
        cost += gigabytes * bucket.gigabyte_to_region
    if job.egress == "internet":
        cost += gigabytes * bucket.gigabyte_to_internet
    return cost


def read_measured(path: Path) -> Measured:
    """What a run's folder, or the results that were kept of it, say about the run.

    DataError if it has not ended, or took no step in its last start.
    """
    try:
        if path.is_dir():
            summary = json.loads((path / "summary.json").read_text())
            record = json.loads((path / "record.json").read_text())
            options, machine = record["options"], record["machine"]
        else:
            kept = json.loads(path.read_text())
            summary, machine = kept["rows"][0], kept["machine"]
            options = summary["options"]
        measured = Measured(
            samples_per_second=summary["samples_per_second"],
            waiting=summary["data_wait_share"],
            requests_per_sample=summary.get("requests_per_sample", 0.0),
            bytes_per_sample=summary.get("bytes_per_sample", 0.0),
            batch_size=options["batch_size"],
            devices=options["devices"] * options["num_nodes"],
            machine=name_machine(machine, options),
            parameters=summary.get("parameters"),
        )
        check_measured(measured)
    except (OSError, LookupError, TypeError, ValueError, DataError) as error:
        remedy = "give the folder of a run that has ended and has summary.json"
        raise DataError(f"no measurement ({first_line(error)}); {remedy}") from error
    if "requests_per_sample" not in summary:
        print("note: the run counted no requests, so the bucket looks cheaper")
    return measured


def name_machine(machine: dict, options: dict) -> str:
    """The device that a run was measured on."""
    if machine["gpu"] and options.get("accelerator") != "cpu":
        return machine["gpu"]
    return machine["cpu"] + NO_GPU


def check_measured(measured: Measured) -> None:
    """DataError unless these are figures that a run can have."""
    if not 0 < measured.samples_per_second < float("inf"):
        raise DataError(f"its rate is {measured.samples_per_second} samples/s")
    if not 0 <= measured.waiting <= 1:
        raise DataError(f"it waited for data for {measured.waiting:.0%} of the time")
    if measured.parameters is not None and not measured.parameters > 0:
        raise DataError(f"its network has {measured.parameters} parameters")
    if measured.batch_size < 1 or measured.devices < 1:
        sizes = f"batch size {measured.batch_size} on {measured.devices} devices"
        raise DataError(f"it had a {sizes}")


def print_plans(plans: list[Plan]) -> None:
    header = f"{'':10} {'devices':>7} {'samples/s':>9} {'hours':>7} {'save every':>10}"
    print(f"{header} {'cost':>9} {'idle':>8} {'bucket':>8} {'kWh':>8} {'kg CO2':>8}")
    for plan in plans:
        market = plan.market.replace("_", " ")
        print(f"{market:10} {plan.devices:7} {plan.rate:9,.0f}", end="")
        print(f" {show_digits(plan.hours):>7}", end="")
        print(f" {plan.interval_minutes:6.1f} min {plan.cost:9,.2f}", end="")
        print(f" {plan.idle_cost:8,.2f} {plan.bucket_cost:8,.2f}", end="")
        print(f" {show_digits(plan.kwh):>8} {plan.kg_co2:8,.2f}")


def show_digits(value: float) -> str:
    """One decimal; two digits of what is below 1, because a short run takes no 0.0 hours."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=program(),
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, help="the folder of a finished run, or its kept results")
    add(
        "--device",
        required=True,
        help="in prices.toml, of the kind that the run was measured on",
    )
    add(
        "--samples", type=float, required=True, help="to train on: steps x global batch"
    )
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="how many")
    add("--parameters", type=float, help="of the network; if not given, the run's")
    add("--store-gb", type=float, default=0.0, help="size of the data in the bucket")
    egress = ("none", "region", "internet")
    add("--egress", choices=egress, default="none", help="which border the data cross")
    add("--save-seconds", type=float, default=1.0, help="that a checkpoint takes")
    add(
        "--restart-minutes",
        type=float,
        default=5.0,
        help="from a stop to the next step",
    )
    add("--prices", type=Path, default=PRICES, help="a table like prices.toml")
    args = parser.parse_args(argv)
    for name in ("samples", "parameters", "save_seconds", "restart_minutes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            refuse(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if not 0 <= args.store_gb < float("inf"):
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
    except DataError as error:
        refuse(f"run {args.run}: {error}")
    try:
        prices = read_prices(args.prices)
    except DataError as error:
        refuse(f"--prices {args.prices}: {error}")
    if args.device not in prices.devices:
        kinds = ", ".join(prices.devices)
        refuse(f"--device {args.device}: no price; choose from {kinds}, or add one")
    parameters = args.parameters or measured.parameters
    if not parameters:
        refuse("--parameters: the run does not say how many its network has; give them")
    job = Job(
        samples=args.samples,
        parameters=parameters,
        store_gigabytes=args.store_gb,
        save_seconds=args.save_seconds,
        restart_minutes=args.restart_minutes,
        egress=args.egress,
    )
    plans = []
    try:
        for market in ("on_demand", "spot"):
            for devices in args.devices:
                plan = make_plan(market, devices, measured, job, args.device, prices)
                plans.append(plan)
    except ArithmeticError:
        given = f"--restart-minutes {args.restart_minutes:g}"
        given += f", --save-seconds {args.save_seconds:g}"
        refuse(f"{given}: interrupted before it goes on; give less, or fewer devices")
    rate = f"{measured.samples_per_second:.1f} samples/s"
    waiting = f"{measured.waiting:.1%} of the time waiting for data"
    devices = f"--devices {measured.devices}"
    print(f"measured: {rate} with {devices} ({measured.machine}), {waiting}")
    if measured.machine.endswith(NO_GPU) and not args.device.startswith("cpu"):
        print(f"note: measured without a GPU, so this is no plan for {args.device}s")
    print(
        f"{job.samples:,.0f} samples on {args.device}, in {prices.currency} of", end=" "
    )
    print(f"{prices.date}; idle and bucket are part of the cost:")
    print_plans(plans)
    return plans


if __name__ == "__main__":
    main()
