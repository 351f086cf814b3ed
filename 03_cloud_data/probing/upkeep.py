"""What a store costs before anything is read of it: to write, to list, to keep."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
import zarr
from obstore.store import ObjectStore

from probing.wire import choose_object, find_size
from store import FieldReader

LISTED = 1000  # objects that one LIST names
SAMPLED = 64  # objects of a variable, whose sizes are asked for
PART = 5 * 2**20  # bytes; obstore writes a larger object in parts


@dataclass(frozen=True)
class Upkeep:
    """The objects of some variables, and their bytes as they are stored."""

    objects: int
    size: float

    @property
    def puts(self) -> int:
        """Requests that write them: of a large object one a part, its beginning and its end."""
        size = self.size / max(1, self.objects)
        if size <= PART:
            return self.objects
        return self.objects * (ceil(size / PART) + 2)

    def dollars(self, put_price: float, month_price: float) -> dict[str, float]:
        """Prices are those of 1,000 PUTs or LISTs, and of a GB for a month."""
        return {
            "put": self.puts / 1e3 * put_price,
            "list": ceil(self.objects / LISTED) / 1e3 * put_price,
            "month": self.size / 1e9 * month_price,
        }


def find_upkeep(client: ObjectStore, reader: FieldReader) -> Upkeep:
    """Of the variables as they are, from a sample of their objects.

    A listing of a large store takes hours.
    """
    rng = np.random.default_rng(0)
    group = zarr.open_group(reader.store, mode="r")
    objects = 0.0
    size = 0.0
    for name in reader.variables:
        array = group[name]
        named = count_boxes(array.shape, array.shards or array.chunks)
        keys = [choose_object(array, rng) for _ in range(SAMPLED)]
        with ThreadPoolExecutor(SAMPLED) as threads:
            sizes = list(threads.map(partial(find_size, client), keys))
        objects += named * np.count_nonzero(sizes) / SAMPLED
        size += named * sum(sizes) / SAMPLED
    return Upkeep(round(objects), size)


def count_objects(reader: FieldReader, chunk: tuple[int, int]) -> int:
    """How many the variables would be in chunks of one time, and of so many rows and columns."""
    sizes = reader.fields.sizes
    shape = (sizes["time"], sizes["latitude"], sizes["longitude"])
    return len(reader.variables) * count_boxes(shape, (1, *chunk))


def count_boxes(shape: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """How many boxes of these lengths cover an array."""
    count = 1
    for size, length in zip(shape, lengths):
        count *= ceil(size / length)
    return count
