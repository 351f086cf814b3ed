"""A store in the making: what its sources hold is written, slab by slab."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xarray as xr
from obstore.store import ObjectStore
from tqdm import tqdm

from conversion.blocks import Pool, read_block, write_block
from conversion.layout import Layout
from conversion.metadata import array_metadata, list_fields, open_skeleton
from conversion.progress import (
    LOST_RECORD,
    Record,
    State,
    list_slabs,
    load_slab,
    save_slab,
    save_state,
)
from conversion.sources import Source
from conversion.target import Objects, Target
from coordinates import DIMENSIONS
from errors import DataError
from location import Location


@dataclass(frozen=True)
class Making:
    """A store that has been begun, and who works at it."""

    location: Location
    store: ObjectStore
    pool: Pool
    layout: Layout
    state: State
    skeleton: Objects  # all its objects but the fields' chunks and the statistics

    def record(self, **changes: object) -> "Making":
        """Record its state, with some changes."""
        state = save_state(self.store, self.state, **changes)
        return replace(self, state=state)

    @cached_property
    def dataset(self) -> xr.Dataset:
        """Its coordinates, and its fields without their values."""
        return open_skeleton(self.skeleton)

    @property
    def dates(self) -> np.ndarray:
        """All times that it has, or will have."""
        return self.dataset.time.values

    @property
    def fields(self) -> list[str]:
        """The names of its fields."""
        return list_fields(self.dataset)

    @property
    def slabs(self) -> range:
        """The first time of each slab."""
        return self.layout.slabs(self.state.times)

    @cached_property
    def target(self) -> Target:
        """What goes to each process."""
        arrays = {name: array_metadata(self.skeleton, name) for name in self.fields}
        return Target(self.location, arrays, self.state.times, self.layout)


def list_unwritten(making: Making) -> list[int]:
    """The first times of the slabs that are not written, or not to their end.

    Of those that are recorded, only the one that an append completes may be short.
    """
    recorded = list_slabs(making.store)
    completed = making.state.starts[-1]
    for first in making.slabs:
        slab = making.layout.slab(first, making.state.times)
        if first in recorded and slab.start <= completed < slab.stop:
            known = load_slab(making.store, first)
            lengths = {len(checksums) for checksums in known.maps.values()}
            if lengths != {slab.stop - slab.start}:
                recorded.remove(first)
    return [first for first in making.slabs if first not in recorded]


def write_slabs(making: Making, source: Source, firsts: list[int], kept: int) -> None:
    """Write slabs, several blocks at once. Times before `kept` stay as they are.

    A slab's checksums are recorded when all its blocks are written. After a kill,
    slabs without them are written again, so that none is taken for whole that is not.
    """
    target = making.target
    records: dict[int, Record] = {}  # of the slabs under way

    def plan() -> Iterator[tuple]:
        for first in firsts:
            known = load_slab(making.store, first)
            slab = making.layout.slab(first, making.state.times)
            records[first] = Record({}, {})
            for block in making.layout.blocks(slab):
                expected = known.cut(target, first, block)
                if block.stop <= kept:
                    records[first].add(expected)
                    continue
                new = slice(max(block.start, kept), block.stop)
                yield target, block, source.find(making.dates[new]), expected

    bar = tqdm(
        total=len(making.slabs),
        initial=len(making.slabs) - len(firsts),
        desc="slabs written",
        disable=None,
    )
    with bar:
        for (_, block, *_), found in making.pool.run(write_block, plan()):
            first = making.layout.first_of(block.start)
            records[first].add(found)
            if block.stop == making.layout.slab(first, making.state.times).stop:
                save_slab(making.store, first, records.pop(first))
                bar.update()


def compare_source(making: Making, source: Source, start: int) -> None:
    """DataError unless the source holds what the store was made of, from a time on.

    Called when the files' names, sizes or times of modification differ from those that are
    recorded. The slabs that have been written are read from the files again.
    """
    if making.state.whole and len(list_slabs(making.store)) < len(making.slabs):
        raise DataError(LOST_RECORD)
    other = "--source: the store was begun with other files; these have other"
    remedy = "give those files, or another --store"
    if set(source.fields) != set(making.fields):
        raise DataError(f"{other} variables; {remedy}")
    for dim in DIMENSIONS:
        before = making.dates[start:] if dim == "time" else making.dataset[dim]
        now = source.dates if dim == "time" else source.fields[dim]
        if not np.array_equal(before, now):
            raise DataError(f"{other} values of {dim}; {remedy}")
    written = sorted(set(making.slabs) & list_slabs(making.store))

    def plan() -> Iterator[tuple]:
        for first in written:
            slab = making.layout.slab(first, making.state.times)
            for block in making.layout.blocks(slab):
                if block.stop > start:
                    new = slice(max(block.start, start), block.stop)
                    yield making.target, new, source.find(making.dates[new])

    read = making.pool.run(read_block, plan())
    for (_, times, _), found in tqdm(read, "blocks compared", disable=None):
        first = making.layout.first_of(times.start)
        known = load_slab(making.store, first).maps
        inside = slice(times.start - first, times.stop - first)
        for name in making.fields:
            expected = known.get(name, [])[inside]
            is_short = len(expected) < len(found[name])
            if is_short and first >= start:  # else the slab is one that an append fills
                raise DataError(LOST_RECORD)
            if expected != found[name][: len(expected)]:
                when = f"{name} from {str(making.dates[times.start])[:16]} on"
                raise DataError(f"{other} values of {when}; {remedy}")
