"""The store that is written: its objects, and what the fields' chunks and shards hold."""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import obstore
import zarr
from obstore.store import LocalStore, ObjectStore, from_url
from zarr import storage
from zarr.core.buffer import default_buffer_prototype

from conversion.layout import Layout
from errors import DataError, first_line
from location import Location, client_options

PAGE = 1000  # objects of a listing that are in memory at once
REQUESTS_AT_ONCE = 16  # for the objects of one block
Objects = dict[str, bytes]  # by name


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

    def field(self, name: str, objects: dict | None = None) -> zarr.Array:
        """A field, (time, latitude, longitude), whose chunks are in memory."""
        place = storage.StorePath(storage.MemoryStore(objects), name)
        # Chunks of NaN are written, too, because a missing chunk is an error.
        config = {"write_empty_chunks": True}
        return zarr.Array(zarr.AsyncArray(self.arrays[name], place, config))

    def object_names(self, name: str, times: slice) -> list[str]:
        """The objects that hold a field at these times, which are whole chunks or shards."""
        field = self.field(name)
        length, *cut = field.shards or field.chunks
        grid = [-(-size // cells) for size, cells in zip(field.shape[1:], cut)]
        names = []
        for unit in range(times.start // length, -(-times.stop // length)):
            for place in np.ndindex(*grid):
                key = field.metadata.encode_chunk_key((unit, *place))
                names.append(f"{name}/{key}")
        return names

    def object_times(self, name: str, object_name: str) -> slice:
        """The times that an object of a field holds."""
        field = self.field(name)
        length = (field.shards or field.chunks)[0]
        first = length * int(re.findall(r"\d+", object_name)[-3])
        return slice(first, min(first + length, self.times))

    def encode(self, name: str, times: slice, values: np.ndarray) -> Objects:
        """The objects of a field at these times, in the order of object_names."""
        objects: dict = {}
        self.field(name, objects)[times] = values
        names = self.object_names(name, times)
        return {each: objects[each].to_bytes() for each in names}

    def decode(self, name: str, times: slice, objects: Objects) -> np.ndarray:
        """What the objects of a field hold at these times."""
        return self.field(name, to_buffers(objects))[times]


def to_buffers(objects: Objects) -> dict:
    """Objects as Zarr's store in memory takes them."""
    buffer = default_buffer_prototype().buffer
    return {name: buffer.from_bytes(content) for name, content in objects.items()}


def connect(location: Location) -> ObjectStore:
    """A local folder, or what is behind a URL, with credentials from the usual places."""
    if "://" in location.url:
        try:
            return from_url(location.url, **client_options(location))
        except ValueError as error:  # boto3's, without credentials, and obstore's
            raise DataError(explain_client(error)) from error
    return LocalStore(location.url, mkdir=True, automatic_cleanup=True)


def explain_client(error: ValueError) -> str:
    """Why there is no client, and what to do."""
    remedy = "check the URL, and the credentials in the environment or ~/.aws"
    return f"{first_line(error)}; {remedy}"


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


def discard(store: ObjectStore, name: str) -> None:
    """Remove an object, if it is there."""
    with suppress(FileNotFoundError):
        obstore.delete(store, name)


def get_all(store: ObjectStore, names: list[str]) -> list[bytes | None]:
    """The contents of several objects, asked for at once."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        return list(threads.map(partial(get, store), names))


def put_all(store: ObjectStore, objects: Objects) -> None:
    """Write several objects at once."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        list(threads.map(partial(put, store), objects, objects.values()))


def list_objects(store: ObjectStore, prefix: str) -> Iterable[tuple[str, int]]:
    """The name and the size of each object below a prefix, a page at a time."""
    for page in obstore.list(store, prefix, chunk_size=PAGE):
        for found in page:
            yield found["path"], found["size"]


def remove_partial(location: Location) -> None:
    """Remove what a killed command has left of objects in a local folder."""
    if "://" not in location.url:
        for path in Path(location.url).rglob("*#[0-9]*"):
            path.unlink()
