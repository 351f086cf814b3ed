"""Chapter 3: from scattered NetCDF files to a Zarr store that can be trained on from a bucket.

    uv run python make_store.py                      # 1 degree, 396 days of made-up winds
    uv run python make_store.py --days 3650 --resolution 0.25 --store large.zarr
    uv run python make_store.py --source '/data/era5/*.nc' --store s3://bucket/winds.zarr
    uv run python make_store.py --append --source '/data/era5_2024*.nc' --store ...
    uv run python make_store.py --verify --store ...     # read it all again
    uv run python make_store.py --repair --store ...     # write anew what is damaged
    uv run python make_store.py --workers 4 ...          # or --scheduler tcp://head:8786

Without --source it first makes the NetCDF files that everyone starts with. It reads and
writes them block by block, and reads the store back once: every map must be what was
written, and the same pass sums the statistics that training needs. Kill it whenever you
like; the same command goes on with what is missing, and ends with the same bytes.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from botocore.exceptions import BotoCoreError
from dask.distributed import CancelledError, KilledWorker
from filelock import FileLock
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from conversion.blocks import Pool, open_pool
from conversion.files import SourceFile, identify, list_files
from conversion.finishing import choose_spans, describe, finish
from conversion.making import Making, compare_source, list_unwritten, write_slabs
from conversion.metadata import ROOT, make_skeleton, put_in_place
from conversion.options import (
    SETTINGS,
    Options,
    make_layout,
    make_settings,
    parse_options,
    require_same,
)
from conversion.progress import (
    LOST_RECORD,
    MAKE_ANEW,
    SLABS,
    State,
    load_objects,
    load_state,
    save_objects,
)
from conversion.sources import Source, open_source, require_same_attributes
from conversion.target import connect, discard, remove_partial
from conversion.verification import count_whole, find_damage, require_none, verify
from errors import DataError, refuse
from weather import make_files

HERE = Path(__file__).parent
# A full disk, no credentials, a bucket that refuses, a cluster whose workers have ended.
FAILURES = (OSError, RuntimeError, BaseError, BotoCoreError)
FAILURES += (KilledWorker, CancelledError)
ABSENT = "nothing is there; make it first"


def main(argv: list[str] | None = None) -> dict:
    """Make, append to, verify or repair a store.

    Returns its name, its sizes in bytes, and the number of its objects and slabs.
    """
    began = perf_counter()
    options = parse_options(__doc__.splitlines()[0], argv)
    # The specification of Zarr 3 lacks consolidated metadata, but all readers use them.
    warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
    warnings.filterwarnings("ignore", "Object at .make_store is not recognized")
    place = f"--store {options.store}"
    try:
        with ExitStack() as stack:
            stack.enter_context(lock(options))
            pool = stack.enter_context(open_pool(options.workers, options.scheduler))
            summary = run(options, connect(options.target), pool)
    except DataError as error:
        reason = str(error)
        refuse(reason if reason.startswith("--") else f"{place}: {reason}")
    except FAILURES as error:
        remedy = "mend that; then the same command goes on"
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        refuse(f"{place}: not finished: {reason}; {remedy}")
    print(f"  {perf_counter() - began:.0f} s")
    return summary


def lock(options: Options) -> AbstractContextManager:
    """Lets a second command that writes to the same folder wait."""
    if "://" in options.store:
        return nullcontext()
    path = Path(options.store).resolve()
    if not path.exists() and (options.append or options.verify or options.repair):
        raise DataError(ABSENT)
    if options.verify:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))


def run(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Do what the options ask for, and describe the store."""
    making = load_making(options, store, pool)
    if options.append:
        return append(making, options)
    if options.verify:
        return verify_store(making)
    if options.repair:
        return repair(making, options)
    return make(making, options, store, pool)


def load_making(options: Options, store: ObjectStore, pool: Pool) -> Making | None:
    """A store that has been begun; None if there is nothing, and it is to be made.

    Settings that are not given are the store's.
    """
    state = load_state(store)
    is_made = not (options.append or options.verify or options.repair)
    if state is None and is_made:
        return None
    if state is None:
        raise DataError(ABSENT)
    if state.settings.keys() != SETTINGS.keys():
        raise DataError(f"begun by another version of make_store.py; {MAKE_ANEW}")
    settings = make_settings(options, state.settings)
    require_same(settings, state.settings)
    layout = make_layout(state.settings)
    skeleton = load_objects(store, state.skeleton)
    return Making(options.target, store, pool, layout, state, skeleton)


def make(
    making: Making | None, options: Options, store: ObjectStore, pool: Pool
) -> dict:
    """Write the store, verify it, and go on from wherever an earlier command was killed.

    A store that is whole is not read again. It is listed, and every object must be there.
    """
    files = list_sources(options)
    identity = identify(files)
    settings = making.state.settings if making else make_settings(options, SETTINGS)
    source = None
    if making is None:
        source = open_sources(options, settings, files)
        layout = make_layout(settings)
        state = State(settings, [identity], [0], len(source.dates), [])
        skeleton = make_skeleton(source.fields, source.dates, layout)
        making = Making(options.target, store, pool, layout, state, skeleton)
        if options.train_times:  # are they there? Before anything is written
            choose_spans(making.dataset.time, [], options.train_times)
        save_objects(store, state.skeleton, skeleton)
        making = making.record()
    state = making.state
    if len(state.files) > 1 and not state.whole:
        raise DataError("an append was begun; give that --append again")
    if state.files != [identity]:
        require_files(making, files, making.slabs)
        source = open_sources(options, settings, files)
        compare_source(making, source, 0)
        if state.files != [identify([])]:  # one of made-up winds stays so
            making = making.record(files=[identity], starts=[0])
    if not state.whole:
        fill(making, source or open_sources(options, settings, files))
    return complete(making, options)


def append(making: Making, options: Options) -> dict:
    """Add the times of other files to a store, whose own files are not needed.

    Readers see the old extent until the last step. It ends with the values, the chunks and
    the statistics of a store that is made of all files at once.
    """
    files = list_sources(options)
    identity = identify(files)
    state = making.state
    if state.whole and identity in state.files:
        return complete(making, options)
    source = open_source(files, making.fields)
    if state.whole:
        making = extend(making, source, identity)
    elif len(state.files) == 1:
        raise DataError("not finished; give the command that makes it again")
    elif identity != state.files[-1]:
        compare_source(making, source, state.starts[-1])
        making = making.record(files=[*state.files[:-1], identity])
    fill(making, source)
    return complete(making, options)


def extend(making: Making, source: Source, identity: str) -> Making:
    """Record that the source's times come after those of the store. Readers see nothing.

    DataError if the source has another grid, or times that are not later, or if what an
    append completes is damaged.
    """
    for dim in ("latitude", "longitude"):
        if not np.array_equal(making.dataset[dim], source.fields[dim]):
            reason = f"--source: it has other values of {dim} than the store"
            raise DataError(f"{reason}; give files of the same grid")
    for name in making.fields:
        before = making.dataset[name]
        require_same_attributes(f"--source: {name}", source.fields[name], before)
    last = making.dates[-1]
    if source.dates[0] <= last:
        reason = f"--source: its first time, {str(source.dates[0])[:16]}"
        reason += f", is not after the store's last, {str(last)[:16]}"
        raise DataError(f"{reason}; give files of later times")
    count_whole(making)
    require_none(making, find_damage(making, making.slabs[-1:]))
    before = making.state
    dates = np.concatenate([making.dates, source.dates])
    files = [*before.files, identity]
    starts = [*before.starts, before.times]
    state = State(before.settings, files, starts, len(dates), before.spans)
    skeleton = make_skeleton(making.dataset, dates, making.layout)
    save_objects(making.store, state.skeleton, skeleton)
    return replace(making, state=state, skeleton=skeleton).record()


def verify_store(making: Making) -> dict:
    """Read a whole store again. DataError if an object is damaged; all are printed."""
    if not making.state.whole:
        raise DataError("not finished; give the command that makes it again")
    damaged = verify(making)
    for one in damaged:
        print(one.describe(making.dates))
    require_none(making, damaged)
    figures = describe(making)
    print("  every object and every map has its checksum")
    return figures


def repair(making: Making, options: Options) -> dict:
    """Write anew what is damaged or missing: slabs from the sources, all else without.

    Of a store that is not finished, the slabs that are recorded.
    """
    damaged = verify(making)
    firsts = set()
    for one in damaged:
        print(f"damaged: {one.describe(making.dates)}")
        if one.times is not None:
            firsts.add(making.layout.first_of(one.times.start))
    completed = making.state.starts[-1]
    if not making.state.whole and completed and options.source:
        firsts.add(making.layout.first_of(completed))  # which has times of both sources
    if firsts:
        files = list_sources(options)
        require_files(making, files, sorted(firsts))
        are_records_lost = any(one.object.startswith(SLABS) for one in damaged)
        if are_records_lost and identify(files) not in making.state.files:
            raise DataError(LOST_RECORD)
        source = open_sources(options, making.state.settings, files)
        for first in firsts:
            slab = making.layout.slab(first, making.state.times)
            source.find(making.dates[slab])  # all of it, or nothing is written
        write_slabs(making, source, sorted(firsts), 0)
        require_none(making, find_damage(making, sorted(firsts)))
    for one in damaged:  # what there is of them, others do not replace
        if one.object in ROOT:
            discard(making.store, one.object)
    print(f"repaired: {len(damaged)} objects")
    if not making.state.whole:
        return {"store": options.store}
    if damaged:
        making = finish(making, making.state.spans, making.state.spans)
    return describe(making)


def require_files(making: Making, files: list[SourceFile], firsts: Sequence) -> None:
    """DataError if these slabs need files that are not given."""
    if not files and making.state.files != [identify([])]:
        end = making.layout.slab(firsts[-1], making.state.times).stop
        dates = [str(making.dates[time])[:10] for time in (firsts[0], end - 1)]
        reason = "--source: not given, but the store was made of your files"
        raise DataError(f"{reason}; give those of {' to '.join(dates)}")


def list_sources(options: Options) -> list[SourceFile]:
    """The files of --source; none if it is not given."""
    urls = options.source or []
    return list_files([options.source_location(url) for url in urls])


def open_sources(options: Options, settings: dict, files: list[SourceFile]) -> Source:
    """The files of --source, or those of made-up winds, which are made if need be."""
    if not files:
        folder = HERE / "outputs/files"
        paths = make_files(folder, settings["days"], settings["resolution"])
        files = list_files([options.source_location(str(path)) for path in paths])
    return open_source(files, settings["variables"])


def fill(making: Making, source: Source) -> None:
    """Write the slabs that the store lacks."""
    remove_partial(making.location)
    kept = making.state.starts[-1]
    if not kept:  # else readers go by what is there
        put_in_place(making.store, making.skeleton)
    write_slabs(making, source, list_unwritten(making), kept)


def complete(making: Making, options: Options) -> dict:
    """Finish a store, unless it is whole and has the statistics; then describe it."""
    state = making.state
    spans = choose_spans(making.dataset.time, state.spans, options.train_times)
    new = [span for span in spans if not state.whole or span not in state.spans]
    is_done = state.whole and not new
    if not is_done:
        making = finish(making, spans, new)
    figures = describe(making)
    if is_done:
        print("  whole already")
    return figures


if __name__ == "__main__":
    main()
