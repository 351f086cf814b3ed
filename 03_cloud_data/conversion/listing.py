"""Is every object there? A listing is compared with names that are computed, in any order.

Memory does not grow with the number of objects.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import zarr

WINDOW = 2**24  # objects that are marked one by one, if some are missing: 16 MB
Listed = Iterable[tuple[str, int]]  # the name and the size of each object


@dataclass(frozen=True)
class Expected:
    """The names of objects in a grid: an array's chunks or shards, or records of slabs."""

    prefix: str  # below which they are listed
    shape: tuple[int, ...]  # objects along each dimension
    encode: Callable[[tuple[int, ...]], str]  # the name at a place of the grid
    step: int = 1  # between the numbers in names

    @property
    def count(self) -> int:
        """How many there are."""
        return int(np.prod(self.shape))

    def place(self, number: int) -> tuple[int, ...]:
        """Where an object is in the grid."""
        return tuple(map(int, np.unravel_index(number, self.shape)))

    def name(self, number: int) -> str:
        """The name of an object."""
        return f"{self.prefix}/{self.encode(self.place(number))}"

    def number(self, name: str) -> int | None:
        """The number of a name; None if no object here has it."""
        digits = re.findall(r"\d+", name.removeprefix(self.prefix))
        place = tuple(int(each) // self.step for each in digits)
        if len(place) != len(self.shape):
            return None
        number = 0
        for position, size in zip(place, self.shape):
            if position >= size:
                return None
            number = number * size + position
        is_ours = name == f"{self.prefix}/{self.encode(place)}"
        return number if is_ours else None


def expect_chunks(array: zarr.Array) -> Expected:
    """The chunks of an array, or its shards."""
    cut = array.shards or array.chunks
    shape = tuple(-(-size // length) for size, length in zip(array.shape, cut))
    return Expected(array.path, shape, array.metadata.encode_chunk_key)


def count_objects(expected: Expected, listed: Listed) -> tuple[int, int]:
    """How many of the expected objects are listed and not empty, and their bytes."""
    count = 0
    size = 0
    for name, length in listed:
        if length and expected.number(name) is not None:
            count += 1
            size += length
    return count, size


def find_missing(expected: Expected, list_again: Callable[[], Listed]) -> Iterator[int]:
    """The numbers of the objects that are missing or empty.

    No more than WINDOW are marked at once; for more, the listing is read again.
    """
    for first in range(0, expected.count, WINDOW):
        seen = np.zeros(min(WINDOW, expected.count - first), bool)
        for name, length in list_again():
            number = expected.number(name)
            if length and number is not None and 0 <= number - first < len(seen):
                seen[number - first] = True
        for number in np.flatnonzero(~seen):
            yield first + int(number)
