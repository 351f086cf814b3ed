"""A region read again: is every map what was written, and what are its sums?"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import zarr
from obstore.store import ObjectStore

from blocks import checksums
from listing import expect_chunks
from progress import load_region, region_name
from statistics_of_store import MonthSums, RegionSums
from target import Target, connect, get_size

LOST = "missing or empty"


@dataclass(frozen=True)
class Damage:
    """An object that is missing or damaged."""

    object: str
    reason: str
    field: str = ""  # whose values suffer
    times: slice | None = None  # of the store

    def describe(self, dates: np.ndarray) -> str:
        """In one line."""
        if self.times is None:
            return f"{self.object}: {self.reason}"
        first, last = (str(date)[:16] for date in dates[self.times][[0, -1]])
        when = first if first == last else f"{first} to {last}"
        return f"{self.object}: {self.reason}; {self.field or 'all'} at {when}"


def read_region(
    target: Target, name: str, first: int, months: np.ndarray
) -> tuple[list[Damage], list[MonthSums]]:
    """Read a region of a field again, and add up its training times by month.

    `months` are those of its times, 0 to 11, or -1 for times that are not trained on.
    Every map must have its checksum.
    """
    store = connect(target.location)
    field = target.open_field(name)
    region = target.layout.region(first, target.times)
    known = load_region(store, first).get(name, [])
    if len(known) != region.stop - region.start:
        return [Damage(region_name(first), "cannot be read", times=region)], []
    sums = RegionSums()
    damaged: list[Damage] = []
    for block in target.layout.blocks(region):
        expected = known[block.start - first : block.stop - first]
        try:
            values = field[block]
            found = checksums(values)
        except (RuntimeError, ValueError):  # a codec's
            found = []
        if found != expected:
            for time, checksum in enumerate(expected, block.start):
                damaged += check_map(store, field, time, checksum)
            continue
        for month, each in zip(months[block.start - first :], values):
            if month >= 0:
                sums.add(int(month), each)
    return damaged, sums.in_order()


def check_map(
    store: ObjectStore, field: zarr.Array, time: int, checksum: str
) -> Iterator[Damage]:
    """The objects to blame if a map is not what was written.

    Those that are missing, or that cannot be decoded. If there are none, which happens
    without checksums of the format, it is one of the map's objects, and all are named.
    """
    here = slice(time, time + 1)
    if is_readable(field, (here,), checksum):
        return
    chunks = expect_chunks(field)
    cut = field.shards or field.chunks
    reasons = {}
    for row, column in np.ndindex(*chunks.shape[1:]):
        key = chunks.encode((time // cut[0], row, column))
        name = f"{chunks.prefix}/{key}"
        places = zip((row, column), cut[1:])
        cells = [slice(n * size, (n + 1) * size) for n, size in places]
        reasons[name] = "not the values written, or another object of the map is not"
        if not get_size(store, name):
            reasons[name] = LOST
        elif not is_readable(field, (here, *cells)):
            reasons[name] = "cannot be decoded"
    clear = [name for name in reasons if not reasons[name].startswith("not ")]
    for name in clear or reasons:
        yield Damage(name, reasons[name], field.basename, here)


def is_readable(
    field: zarr.Array, cells: tuple[slice, ...], checksum: str | None = None
) -> bool:
    """Whether some cells of a map can be decoded, to what has the checksum, if one is given."""
    try:
        found = checksums(field[cells])
    except (RuntimeError, ValueError):  # a codec's
        return False
    return checksum in (None, *found)


def merge(damaged: Iterable[Damage]) -> list[Damage]:
    """One for each object, with all times that suffer."""
    merged: dict[str, Damage] = {}
    for one in damaged:
        before = merged.get(one.object, one)
        times = one.times
        if times is not None:
            start = min(times.start, before.times.start)
            times = slice(start, max(times.stop, before.times.stop))
        merged[one.object] = replace(before, times=times)
    return list(merged.values())
