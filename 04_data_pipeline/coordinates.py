"""Which coordinates are time, latitude and longitude; each is checked and sorted."""

import numpy as np
import xarray as xr

from errors import DataError

# Each dimension is known by a name, a standard_name, an axis or units.
DIMENSIONS = {
    "time": {"time", "valid_time", "t", "T"},
    "latitude": {"latitude", "lat", "degrees_north", "degree_north"},
    "longitude": {"longitude", "lon", "degrees_east", "degree_east"},
}
SAME_PLACE = 0.01  # of the spacing: rows or columns that are nearer are the same
ONCE_AROUND = 360 - 4e-3  # degrees: single precision may round by so much
LARGEST = {"latitude": 90.001, "longitude": 720}  # degrees, with rounding
# Units that begin so are not degrees. Others, such as "1", say nothing.
OTHER_UNITS = ("m", "km", "kilom", "rad")


def find_dimensions(dataset: xr.Dataset) -> dict[str, str]:
    """Which coordinates are time, latitude and longitude, by what each says of itself.

    The only coordinate of dates is time, whatever its name. cf_xarray's guess_coord_axis
    would also take month, hour, lead_time or latent for one of them, and these are further
    dimensions. DataError if two look like the same.
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
    if "time" not in names.values():
        dated = [name for name in dataset.indexes if holds_dates(dataset[name])]
        if len(dated) == 1:
            names[str(dated[0])] = "time"
    return names


def describe(coordinate: xr.DataArray) -> set[str]:
    """What a coordinate says of itself: its name and its CF attributes."""
    attributes = [
        coordinate.attrs.get(key) for key in ("standard_name", "axis", "units")
    ]
    return {str(coordinate.name).lower(), *map(str, attributes)}


def holds_dates(coordinate: xr.DataArray) -> bool:
    """Whether the values are dates, of any calendar."""
    values = coordinate.values
    is_date = hasattr(values.flat[0], "calendar") if values.size else False
    return values.dtype.kind == "M" or is_date


def sort_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """Sort the dimensions. Longitudes ascend without a jump, at most once round the globe.

    What lies beyond 360 degrees of the first column repeats it and is left out. DataError
    if a coordinate is not finite, not in degrees, or has a place or a time twice.
    """
    for dim in DIMENSIONS.keys() & dataset.indexes.keys():
        check_coordinate(dataset[dim])
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
        check_unique(dataset[dim])
    around = dataset.longitude - dataset.longitude[0]
    columns = int((around < ONCE_AROUND).sum())
    return dataset.isel(longitude=slice(0, columns))


def check_coordinate(coordinate: xr.DataArray) -> None:
    """DataError that names the first value that is missing or cannot be in degrees."""
    name = str(coordinate.name)
    missing = np.flatnonzero(coordinate.isnull())
    if missing.size:
        reason = f"{name} has no value at position {missing[0]} of {coordinate.size}"
        fill = coordinate.encoding.get("_FillValue")
        if fill is not None and fill == fill:
            reason += f", where {fill:g} is stored, which its fill value makes missing"
        raise DataError(f"{reason}; mend the coordinate")
    if name == "time":
        return
    if coordinate.dtype.kind not in "iuf":
        raise DataError(f"{name} holds {coordinate.dtype}; it must be in degrees")
    units = str(coordinate.attrs.get("units", ""))
    if units.lower().startswith(OTHER_UNITS):
        raise DataError(f"{name} is in {units}; it must be in degrees")
    beyond = np.flatnonzero(~(np.abs(coordinate) <= LARGEST[name]))
    if beyond.size:
        reason = f"{name} has the value {coordinate.values[beyond[0]]:g}"
        raise DataError(f"{reason} at position {beyond[0]}; it must be in degrees")


def check_unique(coordinate: xr.DataArray) -> None:
    """DataError if a time is there twice, or a place, within rounding. Values ascend."""
    name = str(coordinate.name)
    values = coordinate.values
    same = values[1:] == values[:-1]
    if name != "time":
        spacing = (values[-1] - values[0]) / (len(values) - 1)
        same = np.diff(values) < SAME_PLACE * spacing
    twice = np.flatnonzero(same)
    if twice.size:
        both = f"{values[twice[0]]} and {values[twice[0] + 1]}"
        cause = "it was written twice, or a chunk of it is missing"
        reason = f"{name} has a value twice, {both}"
        raise DataError(f"{reason}: {cause}; write it anew")


def may_be_fill(coordinate: xr.DataArray, position: int) -> bool:
    """Whether the value at a position may be right, though its chunk is not there.

    Zarr writes no chunk of nothing but its fill value, such as a first time of 0 that was
    appended alone. It is right if the steps on both sides equal the other steps.
    """
    values = coordinate.values
    if coordinate.isnull().any() or values.dtype.kind not in "iufM":
        return False
    steps = np.diff(values.astype("float64"))
    beside = steps[max(0, position - 1) : position + 1]
    rest = np.delete(steps, range(max(0, position - 1), min(position + 1, len(steps))))
    if not rest.size:
        return False
    tolerance = 1e-3 * np.abs(rest).max()
    low = rest.min() - tolerance
    high = rest.max() + tolerance
    return bool(((beside >= low) & (beside <= high)).all() and low * high > 0)
