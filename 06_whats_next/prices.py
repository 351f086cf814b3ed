"""What devices, buckets and energy cost, as prices.toml has it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from errors import DataError, first_line


@dataclass(frozen=True)
class Device:
    """A kind of device, as prices.toml has it."""

    on_demand: float
    spot: float
    watts: float
    per_machine: int
    spot_hours: float
    device_gigabytes: float
    machine_gigabytes: float


@dataclass(frozen=True)
class Bucket:
    """What a bucket costs."""

    thousand_gets: float
    thousand_puts: float
    gigabyte_month: float
    gigabyte_to_region: float
    gigabyte_to_internet: float


@dataclass(frozen=True)
class Energy:
    overhead: float
    grams_co2_per_kwh: float


@dataclass(frozen=True)
class Stops:
    """How often devices fail, and whether a cloud gives notice."""

    failure_hours: float
    noticed: float


@dataclass(frozen=True)
class Prices:
    """All of prices.toml."""

    date: str
    currency: str
    devices: dict[str, Device]
    bucket: Bucket
    energy: Energy
    interruptions: Stops


def read_prices(path: Path) -> Prices:
    """DataError names what is missing from the table, or is no price."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
        kinds = table["devices"].items()
        prices = Prices(
            date=table["date"],
            currency=table["currency"],
            devices={kind: Device(**entries) for kind, entries in kinds},
            bucket=Bucket(**table["bucket"]),
            energy=Energy(**table["energy"]),
            interruptions=Stops(**table["interruptions"]),
        )
    except (OSError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{first_line(error)}; mend the table") from error
    for name in ("bucket", "energy", "interruptions"):
        check_numbers(name, table[name])
    for kind, entries in table["devices"].items():
        check_numbers(f"devices.{kind}", entries)
        for name, value in entries.items():
            if value == 0:
                raise DataError(f"[devices.{kind}] {name} = 0: give more than 0")
    if prices.interruptions.noticed > 1 or prices.interruptions.failure_hours == 0:
        raise DataError("[interruptions]: give noticed up to 1, failure_hours above 0")
    return prices


def check_numbers(section: str, entries: dict) -> None:
    """DataError unless all entries are numbers of at least 0."""
    for name, value in entries.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise DataError(
                f"[{section}] {name} = {value}: give a number of at least 0"
            )
