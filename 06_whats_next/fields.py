"""The variables of a store and the times of each period, whatever their dimensions are called."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xarray as xr

from errors import DataError

# Each dimension is known by a name, a standard_name, an axis or units.
DIMENSIONS = {
    "time": {"time", "valid_time", "t", "T"},
    "latitude": {"latitude", "lat", "degrees_north", "degree_north"},
    "longitude": {"longitude", "lon", "degrees_east", "degree_east"},
}


def select_variables(
    dataset: xr.Dataset, names: list[str], level: str | None = None
) -> xr.Dataset:
    """The named variables on sorted dimensions; no value is read.

    `level` chooses a value of one further dimension. The order of dimensions stays that of
    the store. DataError if a variable cannot be used.
    """
    on_store = {str(name): dataset[name].dims for name in dataset.data_vars}
    present = [name for name in on_store if name in names]
    dataset = dataset[present].squeeze().reset_coords(drop=True)
    dataset = rename_dimensions(dataset)
    if level is not None:
        dataset = select_level(dataset, level)
    for name in names:
        complete = name in dataset and set(DIMENSIONS) <= set(dataset.indexes)
        if not complete or sorted(dataset[name].dims) != sorted(DIMENSIONS):
            listed = [
                f"{key} ({', '.join(map(str, on_store[key]))})" for key in on_store
            ]
            choice = "; ".join(listed) or "no variable"
            reason = f"it is not in the store on {', '.join(DIMENSIONS)} alone"
            needed = "each needs coordinates and more than one value"
            if set(DIMENSIONS) < set(dataset.dims) and len(dataset.dims) == 4:
                needed = "choose a value of the further dimension by --level"
            raise DataError(
                f"--variables {name}: {reason}; there are {choice}; {needed}"
            )
        check_values(dataset[name])
    for dim in ("latitude", "longitude"):
        if dataset[dim].dtype.kind not in "iuf":
            raise DataError(f"{dim} holds {dataset[dim].dtype}; it must be in degrees")
    for dim in DIMENSIONS:
        if not dataset.indexes[dim].is_unique:
            cause = "it was written twice, or a chunk of it is missing"
            raise DataError(f"{dim} has a value twice: {cause}; write it anew")
    return sort_coordinates(dataset)


def select_level(dataset: xr.Dataset, level: str) -> xr.Dataset:
    """The value `level` of the one dimension that is neither time nor on the map.

    DataError if there is no such dimension, or more than one, or no such value.
    """
    further = sorted(set(map(str, dataset.dims)) - set(DIMENSIONS))
    if len(further) != 1:
        listed = " and ".join(further) or "no further dimension of several values"
        reason = f"--level {level}: the variables have {listed}"
        raise DataError(f"{reason}; leave it out, or give variables that have one")
    (dim,) = further
    for number, value in enumerate(dataset[dim].values):
        if is_same(value, level):
            return dataset.isel({dim: number}, drop=True)
    choice = ", ".join(map(str, dataset[dim].values))
    raise DataError(f"--level {level}: {dim} has no such value; give one of {choice}")


def is_same(value: object, text: str) -> bool:
    """Whether a text names a value: as a number if both are numbers."""
    if str(value) == text:  # a float32 may differ from what it is printed as
        return True
    with suppress(TypeError, ValueError):
        return float(value) == float(text)
    return False


def check_values(variable: xr.DataArray) -> None:
    """DataError unless the variable holds numbers."""
    if variable.dtype.kind not in "iuf":
        reason = f"its type is {variable.dtype}; give variables of numbers"
        raise DataError(f"--variables {variable.name}: {reason}")
    if variable.size == 0:
        reason = "a dimension has length 0; give variables that have values"
        raise DataError(f"--variables {variable.name}: {reason}")


def rename_dimensions(dataset: xr.Dataset) -> xr.Dataset:
    """Call the dimensions time, latitude and longitude.

    DataError if two coordinates look like the same dimension.
    """
    for dimension, signs in DIMENSIONS.items():
        found = [
            str(name) for name in dataset.indexes if signs & describe(dataset[name])
        ]
        if len(found) > 1:
            reason = f"{' and '.join(found)} both look like {dimension}"
            raise DataError(f"{reason}; give --variables of one grid")
        if found:
            dataset = dataset.rename({found[0]: dimension})
            for variable in dataset.variables.values():
                rename_chunks(variable, found[0], dimension)
    return dataset


def describe(coordinate: xr.DataArray) -> set[str]:
    """What a coordinate says of itself: its name and its CF attributes."""
    attributes = [
        coordinate.attrs.get(key) for key in ("standard_name", "axis", "units")
    ]
    return {str(coordinate.name).lower(), *map(str, attributes)}


def rename_chunks(variable: xr.Variable, old: str, new: str) -> None:
    """Rename a dimension in the chunks, which xarray's rename leaves as they were."""
    chunks = variable.encoding.get("preferred_chunks", {})
    renamed = {new if name == old else name: size for name, size in chunks.items()}
    variable.encoding["preferred_chunks"] = renamed


def sort_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """Sort the dimensions, with longitudes that do not jump at 0 or 180 degrees."""
    longitude = dataset.longitude + 0.0  # np.unwrap takes no integers
    dataset = dataset.assign_coords(longitude=longitude)
    steps = np.diff(np.unwrap(longitude, period=360))
    if steps.min() < 0 < steps.max():  # np.unwrap expects no jump beyond 180 degrees
        dataset = dataset.sortby("longitude")
    unwrapped = np.unwrap(dataset.longitude, period=360)
    dataset = dataset.assign_coords(longitude=unwrapped)
    for dim in DIMENSIONS.keys() & dataset.indexes.keys():
        index = dataset.indexes[dim]
        # A slice costs nothing, and a sort picks each row.
        if index.is_monotonic_decreasing:
            dataset = dataset.isel({dim: slice(None, None, -1)})
        elif not index.is_monotonic_increasing:
            dataset = dataset.sortby(dim)
    width = dataset.longitude[-1] - dataset.longitude[0]
    if np.isclose(width, 360, atol=1e-4):  # 0 and 360 are the same column
        dataset = dataset.isel(longitude=slice(0, -1))
    return dataset


def times_per_chunk(fields: xr.Dataset) -> int:
    """How many times a chunk holds; in a sharded store, the chunk inside the shard."""
    sizes = [1]
    for name in fields.data_vars:
        chunks = fields[name].encoding.get("preferred_chunks", {})
        sizes.append(chunks.get("time", 1))
    return max(sizes)


def split_by_chunk(fields: xr.Dataset, positions: np.ndarray) -> list[np.ndarray]:
    """The positions along time of each chunk, as numbers from 0 to len(positions) - 1."""
    chunks = positions // times_per_chunk(fields)
    starts = np.flatnonzero(np.diff(chunks)) + 1
    return np.split(np.arange(len(positions)), starts)


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


def split_times(time: xr.DataArray, spans: dict[str, tuple[str, str]]) -> list[Period]:
    """The period of each flag, from one date to another, both included.

    DataError if the times are not dates, if a period is empty, or if two share a time.
    """
    try:
        months = time.dt.month.values - 1
    except (AttributeError, TypeError) as error:
        reason = f"time holds {time.dtype}, not dates"
        raise DataError(
            f"{reason}; give it units such as 'days since 1982-01-01'"
        ) from error
    start, end = (str(date)[:10] for date in time.values[[0, -1]])
    remedy = f"give dates of {start} to {end} that no other period has"
    periods: list[Period] = []
    flag_of: dict[int, str] = {}
    for flag, (first, last) in spans.items():
        positions = np.arange(0)
        with suppress(KeyError, TypeError, ValueError):  # not a date
            chosen = time.indexes["time"].slice_indexer(first, last)
            positions = np.arange(time.size)[chosen]
        given = f"{flag} {first} {last}"
        if not positions.size:
            raise DataError(f"{given}: no times; {remedy}")
        shared = {flag_of[position] for position in positions if position in flag_of}
        if shared:
            others = " and ".join(
                f"{other} {' '.join(spans[other])}" for other in shared
            )
            raise DataError(f"{given}: shares times with {others}; {remedy}")
        flag_of |= dict.fromkeys(positions, flag)
        periods.append(Period(positions, time.values[positions], months[positions]))
    return periods
