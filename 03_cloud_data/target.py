"""The store that is written: its fields, at their full extent, and its small objects."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import obstore
import zarr
from obstore.store import LocalStore, ObjectStore, from_url
from zarr import storage

from layout import Layout
from location import Location, client_options

PAGE = 1000  # objects of a listing that are in memory at once


@dataclass(frozen=True)
class Target:
    """The fields of a store, as each process that writes or reads them must know them.

    `arrays` are their metadata, which the store may not have yet: until an append is
    finished, its readers see the old extent. No credentials travel with a target.
    """

    location: Location
    arrays: dict[str, dict]  # as in zarr.json or .zarray, by the field's name
    times: int
    layout: Layout

    def open_field(self, name: str) -> zarr.Array:
        """A field, (time, latitude, longitude). No request is made."""
        place = storage.StorePath(storage.ObjectStore(connect(self.location)), name)
        # Chunks of NaN are written, too, because a missing chunk is an error.
        config = {"write_empty_chunks": True}
        return zarr.Array(zarr.AsyncArray(self.arrays[name], place, config))


def connect(location: Location) -> ObjectStore:
    """A local folder, or what is behind a URL, with credentials from the usual places."""
    if "://" in location.url:
        return from_url(location.url, **client_options(location))
    return LocalStore(location.url, mkdir=True, automatic_cleanup=True)


def get(store: ObjectStore, name: str) -> bytes | None:
    """An object's content; None if there is no such object."""
    try:
        return obstore.get(store, name).bytes().to_bytes()
    except FileNotFoundError:
        return None


def get_size(store: ObjectStore, name: str) -> int:
    """The bytes of an object; 0 if there is no such object."""
    try:
        return obstore.head(store, name)["size"]
    except FileNotFoundError:
        return 0


def put(store: ObjectStore, name: str, content: bytes) -> None:
    """Write an object, which is whole whenever it is there."""
    obstore.put(store, name, content)


def list_objects(store: ObjectStore, prefix: str) -> Iterable[tuple[str, int]]:
    """The name and the size of each object below a prefix, a page at a time."""
    for page in obstore.list(store, prefix, chunk_size=PAGE):
        for found in page:
            yield found["path"], found["size"]


def remove_partial(location: Location) -> None:
    """Remove what a killed command has left of objects in a local folder."""
    if "://" not in location.url:
        for path in Path(location.url).rglob("*#*"):
            path.unlink()
