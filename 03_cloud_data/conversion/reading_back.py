"""A slab read again: is every object what was written, and what are its sums?"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from obstore.store import ObjectStore

from conversion.progress import load_slab, slab_name, sum_bytes, sum_maps
from conversion.statistics import SlabSums
from conversion.target import Target, connect, get_all
from errors import DataError, first_line

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


class DamageError(DataError):
    """Objects of a block that are damaged, by name, and why."""

    def __init__(self, reasons: dict[str, str]):
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        name, reason = next(iter(self.reasons.items()))
        return f"{name}: {reason}; give --repair, and the same sources"


def read_maps(
    target: Target,
    store: ObjectStore,
    name: str,
    times: slice,
    maps: list[str],
    objects: list[str] | None = None,
) -> np.ndarray:
    """A field at some times, whose maps, and objects if given, have these checksums.

    DamageError if one differs. Objects are compared before they are decoded, because Blosc
    may crash on one that was cut. They are not given where the last one may have been
    written again, with more times, before a kill.
    """
    names = target.object_names(name, times)
    contents = get_all(store, names)
    reasons = {}
    for number, (each, content) in enumerate(zip(names, contents)):
        if not content:
            reasons[each] = LOST
        elif objects and sum_bytes(content) != objects[number]:
            reasons[each] = "not what was written"
    if reasons:
        raise DamageError(reasons)
    try:
        values = target.decode(name, times, dict(zip(names, contents)))
    except Exception as error:  # of numcodecs and Zarr, which share no base
        raise DamageError(dict.fromkeys(names, first_line(error))) from error
    if sum_maps(values) != maps:
        raise DamageError(dict.fromkeys(names, "decoded to other values"))
    return values


def read_slab(
    target: Target, name: str, first: int, months: np.ndarray
) -> tuple[list[Damage], SlabSums]:
    """Read a slab of a field again, and add up its training times by month.

    `months` are those of its times, 0 to 11, or -1 for times that are not trained on.
    Every object and every map must have its checksum.
    """
    store = connect(target.location)
    slab = target.layout.slab(first, target.times)
    record = load_slab(store, first)
    sums = SlabSums()
    objects = target.object_names(name, slab)
    lengths = [len(kind.get(name, [])) for kind in (record.maps, record.objects)]
    if lengths != [slab.stop - slab.start, len(objects)]:
        return [Damage(slab_name(first), "cannot be read", times=slab)], sums
    damaged = []
    for block in target.layout.blocks(slab):
        known = record.cut(target, first, block)
        try:
            expected = known.maps[name], known.objects[name]
            values = read_maps(target, store, name, block, *expected)
        except DamageError as error:
            for each, reason in error.reasons.items():
                times = target.object_times(name, each)
                damaged.append(Damage(each, reason, name, times))
            continue
        for month, each in zip(months[block.start - first :], values):
            if month >= 0:
                sums.add(int(month), each)
    return damaged, sums


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
