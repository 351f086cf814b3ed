"""Each file as references to its chunks, and all files as one array a field."""

import h5py
import numpy as np
import xarray as xr
from obspec_utils.registry import ObjectStoreRegistry
from tqdm import tqdm
from virtualizarr import open_virtual_dataset
from virtualizarr.parsers import HDFParser
from zarr.core.metadata import ArrayV3Metadata

from conversion.sources import Source, open_bytes
from coordinates import find_dimensions
from decoding import FILLS, LIMITS, SCALES
from errors import DataError, first_line
from location import Location
from referring.places import connect, server_of, url_of

# Attributes that say what the stored numbers mean, and of what level they are.
MEANING = ("units", *SCALES, *FILLS, *LIMITS, "_Unsigned", "selected")
# In which all later times can be written, and as few objects.
TIME_ENCODING = {
    "units": "microseconds since 1970-01-01",
    "dtype": "int64",
    "chunks": (10_000,),
}
PLAIN = (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS)
CONVERT = "convert such files, with make_store.py"
Description = dict[str, object]


def join(source: Source) -> tuple[xr.Dataset, str]:
    """All files' fields as references, and the dimension of their times, as the files have it.

    DataError if a file cannot be referred to, or cannot be joined to those before it.
    """
    names = list(source.fields)
    first = source.files[0].location
    with xr.open_dataset(open_bytes(first), decode_cf=False) as stored:
        dimensions = find_dimensions(stored[names])
        unused = set(stored.variables) - {*names, *stored[names].dims}
    (time,) = [name for name, dim in dimensions.items() if dim == "time"]
    parts: list[xr.Dataset] = []
    for file in tqdm(source.files, "files referred to", disable=None):
        part = open_part(file.location, names, unused)
        for name in names:
            selected = source.fields[name].attrs.get("selected")
            if selected:
                part[name].attrs["selected"] = selected
            if parts:
                before = describe_part(parts[0][name])
                place = f"--source {file.location.url}: {name}"
                require_alike(describe_part(part[name]), before, place)
        parts.append(part)
    joined = concatenate(parts, time)
    joined[time].encoding = TIME_ENCODING
    return joined, time


def open_part(location: Location, names: list[str], unused: set[str]) -> xr.Dataset:
    """A file's fields, as references, on its dimensions. DataError if that cannot be."""
    url = url_of(location)
    registry = ObjectStoreRegistry({server_of(url): connect(location)})
    parser = HDFParser(drop_variables=unused)
    try:
        require_plain_chunks(location, names)
        opened = open_virtual_dataset(url, registry, parser)
    except Exception as error:  # h5py's, obstore's and VirtualiZarr's share no base
        reason = f"cannot be referred to ({first_line(error)})"
        raise DataError(f"--source {location.url}: {reason}; {CONVERT}") from error
    for name in names:
        opened[name].attrs.pop("coordinates", None)  # which are not kept
    return opened[names]


def require_plain_chunks(location: Location, names: list[str]) -> None:
    """DataError if values lie in HDF5 as VirtualiZarr does not see, or sees wrongly."""
    with h5py.File(open_bytes(location)) as file:
        for name in names:
            dataset = file[name].id
            plan = dataset.get_create_plist()
            if plan.get_layout() not in PLAIN or plan.get_external_count():
                raise DataError(f"the values of {name} are not in chunks of the file")
            masks: set[int] = set()
            if plan.get_layout() == h5py.h5d.CHUNKED:
                dataset.chunk_iter(
                    lambda chunk, seen=masks: seen.add(chunk.filter_mask)
                )
            if masks - {0}:
                raise DataError(f"some chunks of {name} lack a filter that others have")


def concatenate(parts: list[xr.Dataset], time: str) -> xr.Dataset:
    """One dataset, whose arrays have the chunks of all. DataError if they do not fit."""
    if len(parts) == 1:
        return parts[0]
    try:
        return xr.concat(
            parts, time, coords="minimal", compat="override", combine_attrs="override"
        )
    except (NotImplementedError, ValueError) as error:  # VirtualiZarr's
        reason = f"the files make no array: {first_line(error)}"
        raise DataError(f"--source: {reason}; {CONVERT}") from error


def require_alike(here: Description, before: Description, place: str) -> None:
    """DataError if an array cannot hold both: it has one of each for all its values."""
    for key, found in here.items():
        expected = before[key]
        if found != expected:
            reason = f"has {key} {found}, and before it had {expected}"
            raise DataError(f"{place} {reason}; {CONVERT}")


def describe_part(field: xr.DataArray) -> Description:
    """What an array has once, of a file's references."""
    return describe(field.dims, field.data.metadata, field.attrs)


def describe(dims: tuple, metadata: ArrayV3Metadata, attributes: dict) -> Description:
    """What an array has once: its layout, and what its numbers mean."""
    about = metadata.to_dict()
    description: Description = {
        "dimensions": tuple(dims),
        "type": metadata.dtype.to_native_dtype().str,
        "chunks": tuple(metadata.chunks),
        "codecs": str(about["codecs"]),
        "HDF5's fill value": str(metadata.fill_value),
    }
    for key in MEANING:
        value = attributes.get(key)
        description[key] = None if value is None else np.asarray(value).tolist()
    return description
