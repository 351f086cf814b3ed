"""Is the whole store there, and is it what was written? On the way, its sums."""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from tqdm import tqdm

from conversion.listing import Expected, count_objects, expect_chunks, find_missing
from conversion.making import Making, list_unwritten
from conversion.progress import SLABS, SMALL, load_small, slab_name, sum_bytes
from conversion.reading_back import LOST, Damage, merge, read_slab
from conversion.statistics import FieldSums, SlabSums, group_name, sums_name
from conversion.target import get, get_size, list_objects
from errors import DataError
from fields import split_times

SAVES = 20  # of the sums, in a pass over all slabs
LEAST_SLABS = 8  # between two saves, because the sums are as large as some slabs


def count_whole(making: Making) -> tuple[int, int]:
    """How many objects a store has, and their bytes. DataError if one is lost.

    They are listed, and not read. What records the progress is not counted.
    """
    objects = 0
    size = 0
    for expected, _ in expect_all(making):
        found, length = count_objects(expected, list_below(making, expected))
        if found < expected.count:
            require_none(making, find_lost(making))
        if expected.prefix != SLABS:
            objects += found
            size += length
    require_none(making, find_unlisted(making))
    for name in load_small(making.store):
        length = get_size(making.store, name)
        if not length:
            require_none(making, find_small(making))
        objects += 1
        size += length
    return objects, size


def require_none(making: Making, damaged: Iterable[Damage]) -> None:
    """DataError that names the first of what is damaged, if anything is, and the remedy."""
    found = iter(damaged)
    first = next(found, None)
    if first is not None:
        count = 1 + sum(1 for _ in found)
        reason = f"damaged: {first.describe(making.dates)}"
        remedy = "give --repair, and the same sources"
        raise DataError(f"{reason} ({count} objects in all); {remedy}")


def expect_all(making: Making) -> Iterator[tuple[Expected, int]]:
    """What is listed, chunks and records of slabs, with the times of each object."""
    for name in making.fields:
        array = making.target.field(name)
        yield expect_chunks(array), (array.shards or array.chunks)[0]
    times = making.layout.slab_times

    def encode(place: tuple[int, ...]) -> str:
        return slab_name(place[0] * times).removeprefix(f"{SLABS}/")

    yield Expected(SLABS, (len(making.slabs),), encode, times), times


def list_below(making: Making, expected: Expected):
    """The objects that are there, below a prefix."""
    return list_objects(making.store, expected.prefix)


def find_lost(making: Making) -> Iterator[Damage]:
    """The chunks and the records of slabs that are missing or empty, by a listing."""
    for expected, times in expect_all(making):
        if count_objects(expected, list_below(making, expected))[0] == expected.count:
            continue
        field = "" if expected.prefix == SLABS else expected.prefix
        listing = partial(list_below, making, expected)
        for number in find_missing(expected, listing):
            first = expected.place(number)[0] * times
            suffer = slice(first, min(first + times, making.state.times))
            yield Damage(expected.name(number), LOST, field, suffer)


def find_small(making: Making) -> Iterator[Damage]:
    """Metadata, coordinates and statistics that are not what was written."""
    yield from find_unlisted(making)
    for name, checksum in load_small(making.store).items():
        found = get(making.store, name)
        if not found:
            yield Damage(name, LOST)
        elif sum_bytes(found) != checksum:
            yield Damage(name, "not what was written")


def find_unlisted(making: Making) -> Iterator[Damage]:
    """The list of these objects, if it lacks one."""
    if not load_small(making.store).keys() >= making.skeleton.keys():
        yield Damage(SMALL, LOST)


def find_damage(making: Making, firsts: Iterable[int]) -> Iterator[Damage]:
    """What is damaged in these slabs. All of their objects are read."""
    nothing = np.full(min(making.layout.slab_times, making.state.times), -1)
    tasks = []
    for first in firsts:
        for name in making.fields:
            tasks.append((making.target, name, first, nothing))
    read = making.pool.run(read_slab, tasks)
    for _, (damaged, _) in tqdm(read, "verified", len(tasks), disable=None):
        yield from damaged


def verify(making: Making) -> list[Damage]:
    """All that is damaged in a store; everything is listed, and read.

    Of a store that is not finished, the slabs that must be whole are read.
    """
    if not making.state.whole:
        appended = making.state.starts[-1]
        unwritten = list_unwritten(making)
        written = []
        for first in making.slabs:
            end = making.layout.slab(first, making.state.times).stop
            if end <= appended or first not in unwritten:
                written.append(first)
        return merge(find_damage(making, written))
    damaged = [*find_lost(making), *find_small(making)]
    damaged += find_damage(making, making.slabs)
    return merge(damaged)


def read_back(
    making: Making, span: list[str] | None, is_verified: bool
) -> dict[str, FieldSums]:
    """The sums over the training times, from all slabs, which are verified on the way.

    Of a store that is verified already, only slabs with training times are read. A pass
    that was stopped goes on from the sums that it kept. DataError at the first damage.
    """
    months = np.full(making.state.times, -1)
    if span:
        (training,) = split_times(making.dataset.time, {"--train-times": tuple(span)})
        months[training.positions] = training.months
    sums = {}
    for name in making.fields:
        sums[name] = read_field(making, name, span, months, is_verified)
    return sums


def read_field(
    making: Making,
    name: str,
    span: list[str] | None,
    months: np.ndarray,
    is_verified: bool,
) -> FieldSums:
    """The sums of one field, see read_back."""
    kept = sums_name(group_name(making.fields, span), name)
    sizes = making.dataset.latitude.size, making.dataset.longitude.size
    sums = FieldSums.load(making.store, kept, *(sizes if span else (0, 0)))
    times = making.layout.slab_times
    whole = making.state.times // times  # slabs that no append will fill
    tasks = []
    for first in making.slabs[sums.slabs :]:
        here = months[making.layout.slab(first, making.state.times)]
        if not is_verified or (here >= 0).any():
            tasks.append((making.target, name, first, here))
    due = sums.slabs + max(LEAST_SLABS, whole // SAVES)
    last = SlabSums()  # of a slab that an append will fill
    bar = {"desc": f"verified: {name}", "total": len(making.slabs), "disable": None}
    with tqdm(**bar, initial=len(making.slabs) - len(tasks)) as progress:
        for (*_, first, _), (damaged, found) in making.pool.run(read_slab, tasks):
            require_none(making, damaged)
            progress.update()
            if first // times >= whole:
                last = found
                continue
            sums.add(found)
            sums.slabs = first // times + 1
            if sums.slabs >= due and sums.slabs < whole:
                sums.save(making.store, kept)
                due = sums.slabs + max(LEAST_SLABS, whole // SAVES)
    if tasks:
        sums.slabs = whole
        sums.save(making.store, kept)
    sums.add(last)
    return sums
