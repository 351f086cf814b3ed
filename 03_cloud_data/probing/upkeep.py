"""What a store costs before anything is read of it: to write, to list, to keep."""

from dataclasses import dataclass
from math import ceil, prod

import zarr

from store import FieldReader

LISTED = 1000  # objects that one LIST names


@dataclass(frozen=True)
class Upkeep:
    """The objects of some variables, and their bytes as they are stored."""

    objects: int
    size: float

    def dollars(self, put_price: float, month_price: float) -> dict[str, float]:
        """Prices are those of 1,000 PUTs or LISTs, and of a GB for a month."""
        return {
            "put": self.objects / 1e3 * put_price,
            "list": ceil(self.objects / LISTED) / 1e3 * put_price,
            "month": self.size / 1e9 * month_price,
        }


def find_upkeep(reader: FieldReader, chunk_bytes: float) -> Upkeep:
    """Of the variables as they are, by their metadata: a listing of a large store takes hours."""
    group = zarr.open_group(reader.store, mode="r")
    objects = chunks = 0
    for name in reader.variables:
        array = group[name]
        objects += count_boxes(array.shape, array.shards or array.chunks)
        chunks += count_boxes(array.shape, array.chunks)
    return Upkeep(objects, chunks * chunk_bytes)


def count_objects(reader: FieldReader, chunk: tuple[int, int]) -> int:
    """How many they would be in chunks of so many rows and columns of a map."""
    group = zarr.open_group(reader.store, mode="r")
    sizes = reader.fields.sizes
    shape = sizes["latitude"], sizes["longitude"]
    maps = sum(group[name].size for name in reader.variables) // prod(shape)
    return maps * count_boxes(shape, chunk)


def count_boxes(shape: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """How many boxes of these lengths cover an array."""
    return prod(ceil(size / length) for size, length in zip(shape, lengths))
