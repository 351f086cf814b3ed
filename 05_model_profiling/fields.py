"""Variables and the times of each period, whatever their dimensions are called."""

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


def select_variables(dataset: xr.Dataset, names: list[str]) -> xr.Dataset:
    """The named variables on sorted dimensions; no value is read.

    The order of dimensions stays that of the store. DataError if a variable cannot be used.
    """
    on_store = {str(name): dataset[name].dims for name in dataset.data_vars}
    dataset = name_dimensions(dataset, names)
    for name in names:
        complete = name in dataset and set(DIMENSIONS) <= set(dataset.indexes)
        if not complete or sorted(dataset[name].dims) != sorted(DIMENSIONS):
            reason = f"it is not in the store on {', '.join(DIMENSIONS)} alone"
            choice = list_variables(on_store)
            needed = "each needs coordinates and more than one value"
            if set(DIMENSIONS) < set(dataset.dims) and len(dataset.dims) == 4:
                needed = "choose a value of the further dimension by --level"
            problem = f"--variables {name}: {reason}"
            raise DataError(f"{problem}; there are {choice}; {needed}")
        check_values(dataset[name])
    for dim in ("latitude", "longitude"):
        if dataset[dim].dtype.kind not in "iuf":
            raise DataError(f"{dim} holds {dataset[dim].dtype}; it must be in degrees")
    for dim in DIMENSIONS:
        if not dataset.indexes[dim].is_unique:
            cause = "it was written twice, or a chunk of it is missing"
            raise DataError(f"{dim} has a value twice: {cause}; write it anew")
    return sort_coordinates(dataset)


def list_variables(dims: dict[str, tuple]) -> str:
    """The variables there are, each with its dimensions, in one line."""
    listed = []
    for name, of_variable in dims.items():
        listed.append(f"{name} ({', '.join(map(str, of_variable))})")
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
    """Those of the named variables that there are, on time, latitude and longitude."""
    dataset = select_present(dataset, names)
    return dataset.rename(find_dimensions(dataset))


def select_present(dataset: xr.Dataset, names: list[str]) -> xr.Dataset:
    """Those of the named variables that there are, without dimensions of one value."""
    present = [name for name in dataset.data_vars if name in names]
    return dataset[present].squeeze().reset_coords(drop=True)


def find_dimensions(dataset: xr.Dataset) -> dict[str, str]:
    """Which coordinates are time, latitude and longitude, by what each says of itself.

    cf_xarray's guess_coord_axis would also take month, hour, lead_time or latent for one of
    them, and these are further dimensions. DataError if two look like the same.
    """
    names: dict[str, str] = {}
    for dimension, signs in DIMENSIONS.items():
        found = []
        for name in dataset.indexes:
            if signs & describe(dataset[name]):
                found.append(str(name))
        if len(found) > 1:
            reason = f"{' and '.join(found)} both look like {dimension}"
            raise DataError(f"{reason}; give --variables of one grid")
        if found:
            names[found[0]] = dimension
    return names


def describe(coordinate: xr.DataArray) -> set[str]:
    """What a coordinate says of itself: its name and its CF attributes."""
    attributes = [
        coordinate.attrs.get(key) for key in ("standard_name", "axis", "units")
    ]
    return {str(coordinate.name).lower(), *map(str, attributes)}


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
    given_by: dict[int, str] = {}
    for flag, (first, last) in spans.items():
        positions = np.arange(0)
        with suppress(KeyError, TypeError, ValueError):  # not a date
            chosen = time.indexes["time"].slice_indexer(first, last)
            positions = np.arange(time.size)[chosen]
        given = f"{flag} {first} {last}"
        if not positions.size:
            raise DataError(f"{given}: no times; {remedy}")
        shared = {given_by[position] for position in positions if position in given_by}
        if shared:
            others = " and ".join(
                f"{other} {' '.join(spans[other])}" for other in shared
            )
            raise DataError(f"{given}: shares times with {others}; {remedy}")
        given_by |= dict.fromkeys(positions, flag)
        periods.append(Period(positions, time.values[positions], months[positions]))
    return periods
