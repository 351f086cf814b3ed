"""Defaults that depend on the store: the periods, and the size of a patch."""

from dataclasses import replace
from itertools import groupby
from typing import NoReturn

import numpy as np
import xarray as xr

from arguments import flag_of
from errors import DataError, print_note
from fields import day_of, split_times
from options import PATCH_SIZE, STORE_DEFAULTS, Options

PERIODS = ("train_times", "validation_times", "test_times")
# How many of ten dates a period gets that is not given.
PARTS = {"train_times": 8, "validation_times": 1, "test_times": 1}
# Why a default is not that of STORE_DEFAULTS.
REASONS = dict.fromkeys(PERIODS, "chosen from the store's dates")
REASONS["patch_size"] = "the largest that fits the store's grid"


def complete(options: Options, fields: xr.Dataset) -> Options:
    """The options, and for each that is not given the default, or what fits the store."""
    chosen = choose_periods(options, fields.time)
    if options.patch_size is None:
        chosen["patch_size"] = choose_patch_size(fields)
    return replace(options, **chosen)


def choose_periods(options: Options, time: xr.DataArray) -> dict[str, list[str]]:
    """Each period that is not given. It lies between those given before and after it.

    It has the years of STORE_DEFAULTS if they are free, otherwise a part of the free dates.
    DataError if there are too few.
    """
    limits = {name: getattr(options, name) for name in PERIODS}
    given = {name: pair for name, pair in limits.items() if pair is not None}
    if len(given) == len(PERIODS):
        return {}
    periods = split_times(time, {flag_of(name): given[name] for name in given})
    days = time.dt.floor("D").values
    ends = {}  # the first and the last day of each given period
    for name, period in zip(given, periods):
        ends[name] = days[period.positions[[0, -1]]]
    dates = np.unique(days)
    years = xr.DataArray(dates, dims="time").dt.year.values
    chosen = {}
    for is_given, run in groupby(PERIODS, key=given.__contains__):
        if is_given:
            continue
        names = list(run)
        is_free = find_free(dates, names[0], ends)
        if is_free.sum() < len(names):
            refuse_periods(names, given)
        defaults = {name: STORE_DEFAULTS[name] for name in names}
        free_years = set(years[is_free]) - set(years[~is_free])
        if not has_years(free_years, list(defaults.values())):
            defaults = split_dates(dates[is_free], names)
        chosen |= defaults
    return chosen


def find_free(dates: np.ndarray, name: str, ends: dict[str, np.ndarray]) -> np.ndarray:
    """A mask of the dates between the given periods before this one and those after it."""
    is_free = np.ones(len(dates), bool)
    for other, (first, last) in ends.items():
        if PERIODS.index(other) < PERIODS.index(name):
            is_free &= dates > last
        else:
            is_free &= dates < first
    return is_free


def has_years(years: set[int], limits: list[list[str]]) -> bool:
    """Whether every year within these limits is among the years."""
    for first, last in limits:
        if not years.issuperset(range(int(first[:4]), int(last[:4]) + 1)):
            return False
    return True


def refuse_periods(names: list[str], given: dict[str, list[str]]) -> NoReturn:
    """DataError that names the flags to give."""
    flags = ", ".join(flag_of(name) for name in names)
    if not given:
        raise DataError(f"{flags}: too few dates; give a store of at least three")
    places = []
    for other, pair in given.items():
        is_before = PERIODS.index(other) < PERIODS.index(names[0])
        place = "after" if is_before else "before"
        places.append(f"{place} {flag_of(other)} {' '.join(pair)}")
    reason = f"not given, and too few dates lie {' and '.join(places)}"
    raise DataError(f"{flags}: {reason}; give dates")


def split_dates(dates: np.ndarray, names: list[str]) -> dict[str, list[str]]:
    """A part of the dates for each of these periods, by PARTS.

    Dates of months or more are cut at calendar years, because each period then has all
    seasons. This needs a year for each period, and three to train on, as a climatology does.
    """
    starts = find_years(dates)
    needed = len(names) + 2 * ("train_times" in names)
    if len(starts) < needed:
        starts = np.arange(len(dates))
    parts = sum(PARTS[name] for name in names)
    part = max(1, round(len(starts) / parts))
    cuts = [starts[-number * part] for number in range(len(names) - 1, 0, -1)]
    limits = {}
    for name, start, stop in zip(names, [0, *cuts], [*cuts, len(dates)]):
        limits[name] = [day_of(dates[start]), day_of(dates[stop - 1])]
    return limits


def find_years(dates: np.ndarray) -> np.ndarray:
    """The positions at which whole calendar years begin; none if a month has several dates.

    A year is whole if it has as many dates as any other.
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
    for name, chosen in REASONS.items():
        default = STORE_DEFAULTS[name]
        value = getattr(options, name)
        is_expected = value == default and not (has_period and name in PERIODS)
        if getattr(given, name) is not None or is_expected:
            continue
        words = " ".join(value) if name in PERIODS else value
        reason = "the default" if value == default else chosen
        print_note(f"{flag_of(name)} {words}: {reason}")
