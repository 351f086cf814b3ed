"""The Icechunk repository that refers to files: made, opened, and what may be added to it."""

from pathlib import Path

import icechunk
import numpy as np
import xarray as xr
import zarr
from zarr.abc.store import Store

from errors import DataError
from icechunk_store import make_container, make_credentials, make_storage
from location import Location
from referring.parts import CONVERT, describe, describe_part, require_alike

FORMAT = 1  # of the repository; icechunk 1 and 2 read it


def is_there(target: Location) -> bool:
    """Whether there is a repository; to ask would make a folder on a disk."""
    if "://" not in target.url and not Path(target.url).exists():
        return False
    return icechunk.Repository.exists(make_storage(target))


def make_repository(
    target: Location, places: dict[str, Location], exists: bool
) -> icechunk.Repository:
    """The repository that exists, or a new one, which may refer to files in these places."""
    storage = make_storage(target)
    config = icechunk.RepositoryConfig.default()
    if exists:
        config = icechunk.Repository.fetch_config(storage) or config
    authorized = {}
    for prefix, location in places.items():
        config.set_virtual_chunk_container(make_container(prefix, location))
        authorized[prefix] = make_credentials(prefix, location.anonymous)
    authorized = icechunk.containers_credentials(authorized)
    if exists:
        return icechunk.Repository.open(storage, config, authorized)
    takes_format = hasattr(icechunk.Repository, "fetch_spec_version")
    newer = {"spec_version": FORMAT} if takes_format else {}
    return icechunk.Repository.create(storage, config, authorized, **newer)


def holds_fields(store: Store) -> bool:
    """Whether there has been a commit: not if the first run was killed."""
    try:
        return bool(list(zarr.open_group(store, mode="r").array_keys()))
    except FileNotFoundError:
        return False


def require_later(added: xr.Dataset, store: Store, time: str) -> None:
    """DataError unless `added` can follow what the repository has, whose last chunk is full."""
    before = xr.open_zarr(store, chunks=None)
    if set(added) != set(before) or set(added.dims) != set(before.dims):
        listed = ", ".join(map(str, before))
        reason = f"the repository has {listed} on {', '.join(map(str, before.dims))}"
        raise DataError(f"--append: {reason}; give files like its own")
    group = zarr.open_group(store, mode="r")
    for name, field in added.items():
        array = group[str(name)]
        dims = array.metadata.dimension_names
        expected = describe(dims, array.metadata, array.attrs.asdict())
        require_alike(describe_part(field), expected, f"--append: {name}")
        (along_time,) = [n for dim, n in zip(dims, array.chunks) if dim == time]
        rest = before.sizes[time] % along_time
        if rest:  # the next times would begin within a chunk of another file
            reason = f"the last chunk of {name} has {rest} of {along_time} times"
            raise DataError(f"--append: {reason}; {CONVERT}")
    for dim in added.dims:
        if dim != time and not np.array_equal(added[dim], before[dim]):
            reason = f"{dim} differs from the repository's"
            raise DataError(f"--append: {reason}; give files of the same grid")
    last = before[time].values[-1]
    if added[time].values[0] <= last:
        reason = f"the repository has times to {str(last)[:16]}"
        raise DataError(f"--append: {reason}; give only files of later times")
