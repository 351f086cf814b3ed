"""The last steps of a store: statistics, and what its readers see."""

import xarray as xr

from conversion.making import Making
from conversion.metadata import (
    ROOT,
    consolidate,
    put_in_place,
    statistics_layout,
    to_objects,
)
from conversion.options import TRAIN_TIMES
from conversion.progress import save_small
from conversion.statistics import average, group_name
from conversion.target import Objects
from conversion.verification import count_whole, read_back
from errors import print_note
from fields import split_times


def choose_spans(
    time: xr.DataArray, before: list[list[str]], given: list[str] | None
) -> list[list[str]]:
    """The training times whose statistics the store has or is to have.

    Those of TRAIN_TIMES if none are given and it has all these years. DataError if it has
    no such times as are given.
    """
    if given:
        split_times(time, {"--train-times": tuple(given)})
        return before if given in before else [*before, given]
    if before:
        return before
    first, last = map(int, TRAIN_TIMES)
    lacking = set(range(first, last + 1)) - set(time.dt.year.values)
    if not lacking:
        return [TRAIN_TIMES]
    default = f"the default --train-times {first} {last}"
    reason = f"the store has no times of {min(lacking)}, of {default}: no statistics"
    print_note(f"{reason}; give --train-times, or train.py samples at its start")
    return []


def finish(making: Making, spans: list[list[str]], new: list[list[str]]) -> Making:
    """Read the store back, keep the statistics of the new spans, and show readers all of it.

    Of a store that is whole, only slabs with training times are read.
    """
    is_whole = making.state.whole
    objects: Objects = {}
    for number, span in enumerate(new or [None]):
        sums = read_back(making, span, is_verified=is_whole or number > 0)
        if span is not None:
            objects |= make_statistics(making, span, sums)
    # In place, month by month: a reader finds those before, or after, and never none.
    put_in_place(making.store, objects)
    root = consolidate(making.store, making.skeleton)
    save_small(making.store, making.skeleton | objects | root)
    return making.record(spans=spans, whole=True)


def make_statistics(making: Making, span: list[str], sums: dict) -> Objects:
    """The group of a span, as objects."""
    (training,) = split_times(making.dataset.time, {"--train-times": tuple(span)})
    statistics = average(sums, making.dataset, training.positions.size)
    group = group_name(making.fields, span)
    objects = to_objects(statistics, statistics_layout(making.layout), group)
    return {name: content for name, content in objects.items() if name not in ROOT}


def describe(making: Making) -> dict:
    """Print what a reader wants to know of a store, in one block, and return it.

    DataError if an object is missing.
    """
    objects, stored = count_whole(making)
    field = making.target.field(making.fields[0])
    raw = field.nbytes * len(making.fields)
    url = making.location.url
    print(f"{url}: {len(making.fields)} variables of {field.shape}, {objects} objects")
    shards = f" in shards of {field.shards}" if field.shards else ""
    print(f"  chunks of {field.chunks}{shards}")
    print(
        f"  {raw / 1e6:.1f} MB, stored in {stored / 1e6:.1f}: {raw / stored:.2f} to 1"
    )
    return {
        "store": url,
        "raw_bytes": raw,
        "stored_bytes": stored,
        "objects": objects,
        "slabs": len(making.slabs),
    }
