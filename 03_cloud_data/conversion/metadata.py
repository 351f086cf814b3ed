"""The metadata and the coordinates of a store: made in memory, kept whole, put in place."""

import json
from dataclasses import replace

import dask.array as da
import numpy as np
import xarray as xr
import zarr
from obstore.store import ObjectStore
from zarr import storage

from conversion.layout import Layout, choose_encoding
from conversion.target import Objects, get, put, to_buffers
from coordinates import DIMENSIONS
from errors import DataError, first_line

# Of the root. Those of Zarr 3 also hold the consolidated metadata.
ROOT = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")
METADATA = (*ROOT, ".zarray")
RESERVED = (*METADATA, "statistics")  # no names of variables


def make_skeleton(fields: xr.Dataset, dates: np.ndarray, layout: Layout) -> Objects:
    """All objects of a store with these fields at these dates, but for the fields' chunks.

    DataError for a name or an attribute that a store cannot have.
    """
    for name in fields:
        if name in RESERVED:
            raise DataError(f"--variables {name}: the store needs this name; rename it")
    time = xr.Variable("time", dates, fields.time.attrs)
    dataset = fields.drop_vars([*fields, "time"]).assign_coords(time=time)
    sizes = [dataset.sizes[dim] for dim in DIMENSIONS]
    for name, field in fields.items():
        nothing = da.zeros(sizes, dtype="float32", chunks=sizes)  # is never computed
        dataset[name] = tuple(DIMENSIONS), nothing, field.attrs
    try:
        return to_objects(dataset, layout)
    except TypeError as error:  # of an attribute that JSON cannot hold
        raise DataError(f"--source: {first_line(error)}; remove it there") from error


def to_objects(
    dataset: xr.Dataset, layout: Layout, group: str | None = None
) -> Objects:
    """A dataset as Zarr's objects, without chunks of what is not in memory."""
    objects: dict = {}
    dataset = dataset.drop_encoding()
    dataset.to_zarr(
        storage.MemoryStore(objects),
        group=group,
        mode="w",
        compute=False,
        consolidated=False,
        safe_chunks=False,
        write_empty_chunks=True,
        zarr_format=layout.zarr_format,
        encoding=choose_encoding(dataset, layout),
    )
    return {name: objects[name].to_bytes() for name in sorted(objects)}


def open_skeleton(objects: Objects) -> xr.Dataset:
    """The coordinates, and fields whose values must not be read."""
    memory = storage.MemoryStore(to_buffers(objects))
    return xr.open_zarr(memory, consolidated=False, chunks=None)


def array_metadata(objects: Objects, name: str) -> dict:
    """The metadata of an array, as Zarr has them in JSON."""
    found = objects.get(f"{name}/zarr.json") or objects[f"{name}/.zarray"]
    return json.loads(found)


def list_fields(dataset: xr.Dataset) -> list[str]:
    """The names of a dataset's fields, sorted."""
    return sorted(str(name) for name in dataset.data_vars)


def put_in_place(store: ObjectStore, skeleton: Objects) -> None:
    """Write what is not there yet, or differs; of the root, what is not there."""
    for name, content in sorted(skeleton.items()):
        found = get(store, name)
        if found is None or (found != content and name not in ROOT):
            put(store, name, content)


def consolidate(store: ObjectStore, skeleton: Objects) -> Objects:
    """Show readers all that is there: the last step of making and appending.

    Readers go by the consolidated metadata. Until these are replaced, a reader sees the old
    extent, and then the new one. The dates are one chunk whose size is in the metadata, so
    they are replaced just after: a reader that opens the store between the two requests
    gets an error, and no wrong value; it tries again.

    Returns the root's metadata.
    """
    dates = {}
    rest = {}
    for name, content in skeleton.items():
        is_chunk = name.split("/")[-1] not in METADATA
        if name.startswith("time/") and is_chunk:
            dates[name] = content
        else:
            rest[name] = content
    put_in_place(store, rest)
    zarr.consolidate_metadata(storage.ObjectStore(store))
    put_in_place(store, dates)
    root = {}
    for name in ROOT:
        content = get(store, name)
        if content is not None:
            root[name] = content
    return root


def statistics_layout(layout: Layout) -> Layout:
    """How statistics are cut: a chunk a month."""
    return replace(layout, chunk=[1, 2**30, 2**30], shard_times=0)
