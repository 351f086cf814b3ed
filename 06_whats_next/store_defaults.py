"""Defaults that depend on the store: the periods, and the size of a patch."""

from dataclasses import replace

import numpy as np
import xarray as xr

from arguments import flag_of
from errors import DataError, print_note
from fields import day_of, split_times
from options import PATCH_SIZE, STORE_DEFAULTS, Options

PERIODS = ("train_times", "validation_times", "test_times")
# Why a default is not that of STORE_DEFAULTS.
REASONS = {
    "train_times": "about the first 80% of the store's dates",
    "validation_times": "about the next 10% of the store's dates",
    "test_times": "about the last 10% of the store's dates",
    "patch_size": "the largest that fits the store's grid",
}


def complete(options: Options, fields: xr.Dataset) -> Options:
    """The options, and for each that is not given the default, or what fits the store."""
    require_dates(fields.time)
    missing = [name for name in STORE_DEFAULTS if getattr(options, name) is None]
    chosen = {name: STORE_DEFAULTS[name] for name in missing}
    periods = [name for name in PERIODS if name in missing]
    if not has_years(fields.time, [chosen[name] for name in periods]):
        split = split_dates(fields.time)
        chosen |= {name: split[name] for name in periods}
    if "patch_size" in missing:
        chosen["patch_size"] = choose_patch_size(fields)
    return replace(options, **chosen)


def require_dates(time: xr.DataArray) -> None:
    """DataError unless the times are dates."""
    split_times(time, {})


def has_years(time: xr.DataArray, spans: list[list[str]]) -> bool:
    """Whether there are times in each year of these spans."""
    years = set(time.dt.year.values.tolist())
    for first, last in spans:
        if not years.issuperset(range(int(first[:4]), int(last[:4]) + 1)):
            return False
    return True


def split_dates(time: xr.DataArray) -> dict[str, list[str]]:
    """About the first 80% of the dates, the next 10% and the last 10%.

    No date is divided. A monthly series is cut at calendar years, because each period then
    has all seasons. This needs five years: a climatology needs three to train on.
    """
    dates = np.unique(time.dt.floor("D"))
    starts = find_years(dates)
    if len(starts) < 5:
        starts = np.arange(len(dates))
    tenth = max(1, round(len(starts) / 10))
    if len(starts) < len(PERIODS):
        remedy = "give a store of at least three dates"
        raise DataError(f"--train-times: there are {len(dates)} dates; {remedy}")
    ends = [0, starts[-2 * tenth], starts[-tenth], len(dates)]
    spans = {}
    for name, start, stop in zip(PERIODS, ends, ends[1:]):
        spans[name] = [day_of(dates[start]), day_of(dates[stop - 1])]
    return spans


def find_years(dates: np.ndarray) -> np.ndarray:
    """Where whole calendar years begin; nowhere if a month has several dates.

    Those are whole that have as many dates as any other.
    """
    calendar = xr.DataArray(dates, dims="time").dt
    years = calendar.year.values
    months = 12 * years + calendar.month.values
    if len(np.unique(months)) < len(months):
        return np.arange(0)
    _, starts, counts = np.unique(years, return_index=True, return_counts=True)
    return starts[counts == counts.max()]


def choose_patch_size(fields: xr.Dataset) -> int:
    """The default, or the largest multiple of 4 that fits if it is at least 16."""
    shortest = min(fields.latitude.size, fields.longitude.size)
    fitting = min(PATCH_SIZE, shortest // 4 * 4)
    return fitting if fitting >= 16 else PATCH_SIZE  # which is refused


def print_defaults(given: Options, options: Options) -> None:
    """A note for each option that was not given and was chosen to fit the store."""
    has_period = any(getattr(given, name) is not None for name in PERIODS)
    for name, default in STORE_DEFAULTS.items():
        value = getattr(options, name)
        is_expected = value == default and not (has_period and name in PERIODS)
        if getattr(given, name) is not None or is_expected:
            continue
        words = " ".join(value) if name in PERIODS else value
        reason = "the default" if value == default else REASONS[name]
        print_note(f"{flag_of(name)} {words}: {reason}")
