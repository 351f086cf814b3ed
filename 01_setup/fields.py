"""Variables and the times of each period, whatever their dimensions are called."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from coordinates import DIMENSIONS, find_dimensions, sort_coordinates
from errors import DataError


def select_variables(dataset: xr.Dataset, names: list[str], choice: str) -> xr.Dataset:
    """The named variables on sorted dimensions; no value is read.

    The order of dimensions stays that of the store. DataError if a variable cannot be
    used; `choice` then says which there are.
    """
    dataset = name_dimensions(dataset, names)
    for name in names:
        if name not in dataset or not is_on_grid(dataset[name]):
            reason = "it is not in the store on time, latitude and longitude alone"
            needed = explain_need(dataset)
            raise DataError(
                f"--variables {name}: {reason}; there are {choice}; {needed}"
            )
        check_values(dataset[name])
    return sort_coordinates(dataset)


def is_on_grid(variable: xr.DataArray) -> bool:
    """Whether its dimensions are time, latitude and longitude, and each has coordinates."""
    complete = set(DIMENSIONS) <= set(variable.indexes)
    return complete and sorted(variable.dims) == sorted(DIMENSIONS)


def explain_need(dataset: xr.Dataset) -> str:
    """What variables lack, in a store or in a group of it."""
    further = dataset.sizes.keys() - DIMENSIONS.keys()
    if set(DIMENSIONS) <= set(dataset.indexes) and further:
        listed = ", ".join(str(dim) for dim in dataset.sizes if dim in further)
        return f"choose a value of {listed} by --level"
    if dataset.sizes and not dataset.indexes:
        place = "in a DataTree they may lie in the group above"
        return f"no dimension has coordinates here: {place}; copy them into this one"
    lacking = [dim for dim in DIMENSIONS if dim not in dataset.indexes]
    unknown = [str(name) for name in dataset.indexes if name not in DIMENSIONS]
    if lacking and unknown:
        reason = f"no coordinate is known as {' or '.join(lacking)}"
        remedy = "to that, or write it into their attribute standard_name"
        return f"{reason}; rename {', '.join(unknown)} {remedy}"
    return "each dimension needs coordinates and more than one value"


def list_variables(dataset: xr.Dataset) -> str:
    """The variables that exist, each with its dimensions, in one line."""
    listed = []
    for name, variable in dataset.data_vars.items():
        listed.append(f"{name} ({', '.join(map(str, variable.dims))})")
    return "; ".join(listed) or "no variable"


def check_values(variable: xr.DataArray) -> None:
    """DataError unless the variable holds numbers."""
    if variable.dtype.kind not in "iuf":
        reason = f"its type is {variable.dtype}; give variables of numbers"
        raise DataError(f"--variables {variable.name}: {reason}")
    if variable.size == 0:
        reason = "a dimension has length 0; give variables that have values"
        raise DataError(f"--variables {variable.name}: {reason}")


def name_dimensions(dataset: xr.Dataset, names: list[str]) -> xr.Dataset:
    """The named variables that exist, on time, latitude and longitude."""
    dataset = select_present(dataset, names)
    return dataset.rename(find_dimensions(dataset))


def select_present(dataset: xr.Dataset, names: list[str]) -> xr.Dataset:
    """The named variables that exist, without dimensions of one value."""
    present = [name for name in dataset.data_vars if name in names]
    return dataset[present].squeeze().reset_coords(drop=True)


def explain_bounds(stored: xr.Dataset, names: list[str]) -> str | None:
    """Why months may be shifted: a mean of January that is dated the first of February."""
    dimensions = find_dimensions(select_present(stored, names))
    times = [name for name, dim in dimensions.items() if dim == "time"]
    bounds = stored[times[0]].attrs.get("bounds") if times else None
    if bounds not in stored.data_vars or stored[bounds].dims[:1] != (times[0],):
        return None
    try:
        ends = xr.decode_cf(stored[[bounds]].isel({times[0]: [0, -1]})).load()
    except Exception:  # what cannot be read or decoded; no variable needs it
        return None
    time = ends[times[0]]
    ends = ends[bounds]
    if ends.shape != (2, 2) or ends.dtype.kind not in "MO" or ends.isnull().any():
        return None
    begin, end = ends.values.T
    middle = xr.DataArray(begin + (end - begin) / 2, dims="time").dt
    dated = time.dt
    if (middle.month.values == dated.month.values).any():
        return None
    months = f"the mean of month {int(middle.month[0])} counts as month"
    return f"by the bounds of time, {months} {int(dated.month[0])}, as it is dated"


def group_by_unit(fields: xr.Dataset, names: list[str]) -> dict[str, list[int]]:
    """The numbers of the variables of each unit: u and v are judged together."""
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        unit = str(fields[name].attrs.get("units", name)).replace("**", "")
        groups.setdefault(unit.replace("m s-1", "m/s"), []).append(number)
    return groups


@dataclass(frozen=True)
class Period:
    """The times of a period, (n,) each."""

    positions: np.ndarray  # along the store's time
    dates: np.ndarray
    months: np.ndarray  # 0 to 11


def split_times(time: xr.DataArray, limits: dict[str, tuple[str, str]]) -> list[Period]:
    """The period of each flag, from one date to another, both included.

    DataError if the times or the ends of a period are not dates, if a period is empty, or
    if two share a time.
    """
    try:
        months = time.dt.month.values - 1
    except (AttributeError, TypeError) as error:
        reason = f"time holds {time.dtype}, not dates"
        raise DataError(
            f"{reason}; give it units such as 'days since 1982-01-01'"
        ) from error
    start, end = time.values[[0, -1]]
    remedy = f"give dates of {day_of(start)} to {day_of(end)}"
    if len(limits) > 1:
        remedy += " that no other period has"
    periods: list[Period] = []
    given_by: dict[int, str] = {}
    for flag, (first, last) in limits.items():
        given = f"{flag} {first} {last}"
        try:
            chosen = time.indexes["time"].slice_indexer(first, last)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"not dates of the store's calendar, {time.dt.calendar}"
            raise DataError(f"{given}: {reason}; {remedy}") from error
        positions = np.arange(time.size)[chosen]
        if not positions.size:
            raise DataError(f"{given}: no times; {remedy}")
        shared = {given_by[position] for position in positions if position in given_by}
        if shared:
            others = " and ".join(
                f"{other} {' '.join(limits[other])}" for other in shared
            )
            raise DataError(f"{given}: shares times with {others}; {remedy}")
        given_by |= dict.fromkeys(positions, flag)
        periods.append(Period(positions, time.values[positions], months[positions]))
    return periods


def split_by_chunk(positions: np.ndarray, times_per_chunk: int) -> list[np.ndarray]:
    """Positions along time, chunk by chunk, as numbers from 0 to len(positions) - 1."""
    chunks = positions // times_per_chunk
    starts = np.flatnonzero(np.diff(chunks)) + 1
    return np.split(np.arange(len(positions)), starts)


def day_of(date: object) -> str:
    """A date without its time of day. A year may have five digits, or a sign."""
    return str(date).replace("T", " ").split(" ")[0]
