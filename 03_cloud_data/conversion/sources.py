"""NetCDF files as one dataset: on this disk, in a bucket or on a web server.

Each process opens the files that it reads: what is sent to it are their names.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import urlsplit

import numpy as np
import xarray as xr
from obstore.fsspec import FsspecStore
from tqdm import tqdm

from climatology import ABSURD, NO_VALUE
from conversion.files import SourceFile
from coordinates import DIMENSIONS, find_dimensions, sort_coordinates
from decoding import LIMITS, Limits, decode, explain_limits, find_limits
from errors import DataError, first_line, print_note
from fields import check_values, explain_bounds, is_on_grid, list_variables
from location import Location, client_options

FILES_AT_ONCE = 16  # that are opened, or kept open


@dataclass(frozen=True)
class Part:
    """Some times of a file."""

    file: SourceFile
    names: tuple[str, ...] | None  # of the fields; None: all
    times: slice


@dataclass(frozen=True)
class OpenFile:
    """A file's fields on (time, latitude, longitude); their values are not read yet."""

    fields: xr.Dataset
    limits: dict[str, Limits | None]  # outside of which a value is none
    notes: list[str]  # what a user should know


@dataclass(frozen=True)
class Source:
    """Many files as one dataset."""

    files: list[SourceFile]  # in the order of their times
    names: tuple[str, ...] | None  # of the fields; None: all
    starts: np.ndarray  # (files + 1,), the first time of each, and the number of all
    fields: xr.Dataset  # of the first file
    dates: np.ndarray  # (times,)

    def find(self, dates: np.ndarray) -> list[Part]:
        """Where these dates are. DataError if they do not follow each other here."""
        first = int(np.searchsorted(self.dates, dates[0])) if len(dates) else 0
        stop = first + len(dates)
        if not np.array_equal(self.dates[first:stop], dates):
            lacking = len(np.setdiff1d(dates, self.dates))
            span = f"{str(dates[0])[:16]} to {str(dates[-1])[:16]}"
            reason = f"the files lack {lacking} of the times {span}"
            if not lacking:
                reason = f"the files have other times within {span}"
            raise DataError(f"--source: {reason}; give all files that hold them")
        parts = []
        for file, start, end in zip(self.files, self.starts, self.starts[1:]):
            if start < stop and first < end:
                inside = slice(max(first, start) - start, min(stop, end) - start)
                parts.append(Part(file, self.names, inside))
        return parts


def open_source(files: list[SourceFile], variables: list[str] | None) -> Source:
    """Open all files, and check that they fit together.

    DataError if a file cannot be opened or has no such field, if two files differ in their
    variables or their grid, or if times repeat.
    """
    names = tuple(sorted(set(variables))) if variables else None
    first = open_file(files[0], names)
    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        found = threads.map(partial(read_dates, names, files[0]), files)
        dates = list(tqdm(found, "files opened", len(files), disable=None))
    for note in first.notes:
        print_note(note)
    order = sorted(range(len(files)), key=lambda number: dates[number][0])
    all_dates = np.concatenate([dates[number] for number in order])
    late = np.flatnonzero(all_dates[1:] <= all_dates[:-1])
    if late.size:
        when = str(all_dates[late[0] + 1])[:16]
        reason = f"two files have {when}, or times around it"
        raise DataError(f"--source: {reason}; give files whose times do not overlap")
    starts = np.cumsum([0, *(len(dates[number]) for number in order)])
    files = [files[number] for number in order]
    fields = open_file(files[0], names).fields
    return Source(files, names, starts, fields, all_dates)


def read_dates(
    names: tuple[str, ...] | None, first: SourceFile, file: SourceFile
) -> np.ndarray:
    """The dates of a file. DataError if it does not go with the first one."""
    fields = open_file(file, names).fields
    try:
        require_alike(fields, open_file(first, names).fields, first.name)
        return usable_dates(fields.time)
    except DataError as error:
        raise DataError(f"--source {file.location.url}: {error}") from error


def require_alike(fields: xr.Dataset, expected: xr.Dataset, first: str) -> None:
    """DataError if a file has other variables, units or places than the `first` one."""
    if list(fields) != list(expected):
        lists = f"{', '.join(fields)}; that has {', '.join(expected)}"
        reason = f"it has other variables than {first}: {lists}"
        raise DataError(f"{reason}; give --variables")
    for name in fields:
        require_same_attributes(str(name), fields[name], expected[name])
    for dim in ("latitude", "longitude"):
        if not np.array_equal(fields[dim], expected[dim]):
            reason = f"it has other values of {dim} than {first}"
            raise DataError(f"{reason}; give files of one grid")


def usable_dates(time: xr.DataArray) -> np.ndarray:
    """The dates of a time coordinate. DataError if they are of another calendar, or not sorted."""
    dates = time.values
    if dates.dtype.kind == "O":
        remedy = "convert them, for example by xarray's convert_calendar"
        raise DataError(f"its times are not of the usual calendar; {remedy}")
    if dates.dtype.kind != "M":
        remedy = "mend the units of time"
        raise DataError(f"its times are {dates.dtype}, no dates; {remedy}")
    if (np.diff(dates) <= np.timedelta64(0, "ns")).any():
        raise DataError("its times are not sorted; sort them in the file")
    return dates


@lru_cache(maxsize=FILES_AT_ONCE)
def open_file(file: SourceFile, names: tuple[str, ...] | None) -> OpenFile:
    """Open a file and find its fields: those named, or all. DataError names the file."""
    try:
        content = open_bytes(file.location)
        stored = xr.open_dataset(content, decode_cf=False, cache=False)
        return find_fields(stored, names)
    except Exception as error:  # of xarray, h5py, scipy or obstore
        reason = first_line(error)
        if "did not find a match in any" in reason:  # of xarray's engines
            reason = "this is no NetCDF file"
        if not isinstance(error, DataError):
            reason += "; give whole NetCDF files of numbers"
        raise DataError(f"--source {file.location.url}: {reason}") from error


def open_bytes(location: Location):
    """What xarray opens: a path, or a file-like object that reads ranges of an object."""
    if "://" not in location.url:
        return location.url
    scheme = urlsplit(location.url).scheme
    # One for each file: fsspec would keep it, and its credentials, for good.
    options = client_options(location) | {"skip_instance_cache": True}
    return FsspecStore(scheme, **options).open(location.url)


def find_fields(stored: xr.Dataset, names: tuple[str, ...] | None) -> OpenFile:
    """The fields of an open file, on time, latitude and longitude as they are sorted there.

    DataError if there are none, if one that is named is not there, or if a coordinate has
    places twice, missing values, or units that are not degrees. Columns that repeat others,
    360 degrees away, are left out.
    """
    wanted = list(names or [str(name) for name in stored.data_vars])
    dataset = decode(stored, wanted)
    dataset = dataset[[name for name in wanted if name in dataset.data_vars]]
    dataset = dataset.rename(find_dimensions(dataset))
    lone = [dim for dim, size in dataset.sizes.items() if size == 1]
    dataset = dataset.squeeze([dim for dim in lone if dim not in DIMENSIONS])
    selected = describe_selection(dataset)
    dataset = dataset.reset_coords(drop=True)
    found = sorted(str(name) for name, field in dataset.items() if is_on_grid(field))
    if not found or not set(found).issuperset(names or []):
        listed = ", ".join(names or ["variable"])
        reason = f"no {listed} on time, latitude and longitude alone"
        remedy = "select one value of each other dimension, and a group, beforehand"
        raise DataError(f"{reason}; it has {list_variables(stored)}; {remedy}")
    for name in found:
        check_values(dataset[name])
    fields = dataset[found]
    notes = [explain_bounds(stored, found)]
    notes += [explain_limits(name, stored.variables[name]) for name in found]
    columns = find_columns(fields)
    left_out = fields.longitude.size - len(columns)
    if left_out:
        reason = "repeat others, 360 degrees away, and are left out"
        notes.append(f"{left_out} columns {reason}")
        fields = fields.isel(longitude=columns)
    for field in fields.values():
        for key in LIMITS:  # of packed values, perhaps
            field.attrs.pop(key, None)
        if selected:
            field.attrs["selected"] = selected
    limits = {name: find_limits(stored.variables[name]) for name in found}
    return OpenFile(fields, limits, [note for note in notes if note])


def describe_selection(dataset: xr.Dataset) -> str:
    """The level, member or lead time that all values have, of those that are numbers."""
    values = []
    for name, coordinate in dataset.coords.items():
        if coordinate.ndim == 0 and coordinate.dtype.kind in "iufm":
            values.append(f"{name} {coordinate.values}")
    return ", ".join(sorted(values))


def require_same_attributes(
    name: str, field: xr.DataArray, other: xr.DataArray
) -> None:
    """DataError if a field's numbers mean something else than another's."""
    for key in ("units", "selected"):
        here = field.attrs.get(key)
        there = other.attrs.get(key)
        if here != there:
            reason = f"{name} has {key} {here!r}, before it had {there!r}"
            raise DataError(f"{reason}; give files that are alike, or convert them")


def find_columns(fields: xr.Dataset) -> np.ndarray:
    """The columns that lie once around the globe. DataError if a coordinate is not usable."""
    numbered = fields.drop_vars(list(fields)).assign_coords(
        column=("longitude", np.arange(fields.longitude.size))
    )
    for dim in ("latitude", "longitude"):
        if fields.sizes[dim] < 2:
            size = fields.sizes[dim]
            raise DataError(f"its {dim} has {size} values; at least 2 are needed")
    return np.sort(sort_coordinates(numbered).column.values)


def read_parts(parts: list[Part], name: str) -> np.ndarray:
    """A field at these times, (times, latitude, longitude), float32, NaN where it has no value.

    DataError if a file is damaged, or if a value is infinite or netCDF's mark of none.
    """
    return np.concatenate([read_part(part, name) for part in parts])


def read_part(part: Part, name: str) -> np.ndarray:
    """A field at some times of one file, as read_parts returns it."""
    url = part.file.location.url
    opened = open_file(part.file, part.names)
    field = opened.fields[name].isel(time=part.times)
    try:
        values = field.load().transpose(*DIMENSIONS).values
    except Exception as error:  # of h5py, scipy or obstore
        reason = f"{name}: {first_line(error)}; mend it"
        raise DataError(f"--source {url}: {reason}") from error
    limits = opened.limits[name]
    values = limits.mask(values) if limits else values
    values = values.astype("float32")
    absurd = np.abs(values) >= ABSURD
    if absurd.any():
        time = np.flatnonzero(absurd.any(axis=(1, 2)))[0]
        when = str(field.time.values[time])[:16]
        raise DataError(f"--source {url}: {name} on {when}: {NO_VALUE}")
    return values
