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
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from dask.distributed import CancelledError, KilledWorker
from filelock import FileLock
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from blocks import Pool, open_pool
from errors import DataError, refuse
from finishing import choose_spans, describe, finish
from making import Making, compare_source, list_unwritten, write_regions
from metadata import make_skeleton, put_in_place
from progress import State, load_objects, load_state, save_objects
from sources import Source, SourceFile, identify, list_files, open_source
from store_options import (
    SETTINGS,
    Options,
    make_layout,
    make_settings,
    parse_options,
    require_same,
)
from target import connect, discard, remove_partial
from verification import count_whole, explain_lost, find_damage, find_lost, verify
from weather import make_files

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> dict:
    """Make, append to, verify or repair a store.

    Returns its name, its sizes in bytes, and the number of its objects and regions.
    """
    began = perf_counter()
    options = parse_options(__doc__.splitlines()[0], argv)
    # Of Zarr 3 they are no part yet, but all read them.
    warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
    warnings.filterwarnings("ignore", "Object at .make_store is not recognized")
    place = f"--store {options.store}"
    try:
        with ExitStack() as stack:
            pool = stack.enter_context(open_pool(options.workers, options.scheduler))
            if "://" not in options.store:
                path = Path(options.store)
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = path.with_name(f".{path.name}.lock")
                stack.enter_context(FileLock(lock))  # a second command waits
            summary = run(options, connect(options.target), pool)
    except DataError as error:
        reason = str(error)
        refuse(reason if reason.startswith("--") else f"{place}: {reason}")
    except (OSError, RuntimeError, BaseError, KilledWorker, CancelledError) as error:
        # A full disk, a bucket that refuses, a cluster whose workers have ended.
        remedy = "mend that, the same command goes on"
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        refuse(f"{place}: not finished: {reason}; {remedy}")
    print(f"  {perf_counter() - began:.0f} s")
    return summary


def run(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Do what the options ask for, and describe the store."""
    if options.append:
        return append(options, store, pool)
    if options.verify:
        return verify_store(options, store, pool)
    if options.repair:
        return repair(options, store, pool)
    return make(options, store, pool)


def make(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Write the store, verify it, and go on from wherever an earlier command was killed.

    A store that is whole is not read again. It is listed, and every object must be there.
    """
    settings = make_settings(options, SETTINGS)
    files = list_sources(options)
    identity = identify(files)
    state = load_state(store)
    source = None
    if state is None:
        source = open_sources(options, settings, files, options.variables)
        state = State(settings, [identity], [0], len(source.dates), [])
        layout = make_layout(settings)
        skeleton = make_skeleton(source.fields, source.dates, layout)
        making = Making(options.target, store, pool, layout, state, skeleton)
        choose_spans(making.dataset.time, [], options.train_times)  # before all else
        begin(making)
    require_same(settings, state.settings)
    making = load_making(options, store, pool)
    if making.state.whole:
        count_whole(making)  # before its files are compared
    elif len(making.state.files) > 1:
        raise DataError("an append was begun; give that --append again")
    if making.state.files != [identity]:
        source = open_sources(options, making.state.settings, files, making.fields)
        compare_source(making, source, 0)
        if making.state.files != [identify([])]:  # one of made-up winds stays so
            making = making.record(files=[identity], starts=[0])
    if not making.state.whole:
        fill(
            making,
            source
            or open_sources(options, making.state.settings, files, making.fields),
        )
    return complete(making, options)


def append(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Add the times of other files to a store, whose own files are not needed.

    Readers see the old extent until the last step. It ends with the values, the chunks and
    the statistics of a store that is made of all files at once.
    """
    making = load_making(options, store, pool)
    files = list_files([options.source_location(url) for url in options.source])
    identity = identify(files)
    state = making.state
    if state.whole and identity in state.files:
        return complete(making, options)
    source = open_source(files, making.fields)
    if state.whole:
        making = extend(making, source, identity)
    elif len(state.files) == 1:
        raise DataError("not finished yet; give the command without --append first")
    elif identity != state.files[-1]:
        compare_source(making, source, state.starts[-1])
        making = making.record(files=[*state.files[:-1], identity])
    fill(making, source)
    return complete(making, options)


def extend(making: Making, source: Source, identity: str) -> Making:
    """Record that the source's times come after those of the store. Readers see nothing.

    DataError if the source has another grid, or times that are not later.
    """
    for dim in ("latitude", "longitude"):
        if not np.array_equal(making.dataset[dim], source.fields[dim]):
            reason = f"--source: it has other values of {dim} than the store"
            raise DataError(f"{reason}; give files of the same grid")
    last = making.dates[-1]
    if source.dates[0] <= last:
        reason = f"--source: its first time, {str(source.dates[0])[:16]}"
        reason += f", is not after the store's last, {str(last)[:16]}"
        raise DataError(f"{reason}; give files of later times")
    state = making.state
    dates = np.concatenate([making.dates, source.dates])
    skeleton = make_skeleton(making.dataset, dates, making.layout)
    longer = replace(
        state,
        files=[*state.files, identity],
        starts=[*state.starts, state.times],
        times=len(dates),
        whole=False,
    )
    making = replace(making, state=longer, skeleton=skeleton)
    save_objects(making.store, longer.skeleton, skeleton)
    return making.record()


def verify_store(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Read a whole store again; exit with code 2 if an object is damaged, and name it."""
    making = require_whole(load_making(options, store, pool), "--verify")
    damaged = verify(making)
    for one in damaged:
        print(one.describe(making.dates))
    if damaged:
        reason = f"damaged: {len(damaged)} objects, such as {damaged[0].object}"
        raise DataError(f"{reason}; give --repair, and the same sources")
    return describe(making)


def repair(options: Options, store: ObjectStore, pool: Pool) -> dict:
    """Write anew what is damaged or missing: regions from the sources, all else without."""
    making = require_whole(load_making(options, store, pool), "--repair")
    damaged = verify(making)
    firsts = set()
    for one in damaged:
        print(f"damaged: {one.describe(making.dates)}")
        if one.times is None:
            discard(store, one.object)
        else:
            firsts.add(making.layout.first_of(one.times.start))
    if firsts:
        write_regions(
            making, open_for_repair(making, options, firsts), sorted(firsts), 0
        )
    if damaged:
        making = finish(making, making.state.spans, making.state.spans)
        print(f"repaired: {len(damaged)} objects")
    left = list(find_damage(making, sorted(firsts)))
    if left:
        reason = f"still damaged: {left[0].describe(making.dates)}"
        raise DataError(f"{reason}; check the disk or the bucket")
    return describe(making)


def open_for_repair(making: Making, options: Options, firsts: set[int]) -> Source:
    """The sources of these regions. DataError if the store was not made of made-up winds."""
    files = list_sources(options)
    if not files and making.state.files != [identify([])]:
        end = making.layout.region(max(firsts), making.state.times).stop
        dates = [str(making.dates[n])[:10] for n in (min(firsts), end - 1)]
        reason = f"--repair: regions of {' to '.join(dates)} are damaged"
        raise DataError(f"{reason}; give --source, the files with these times")
    return open_sources(options, making.state.settings, files, making.fields)


def list_sources(options: Options) -> list[SourceFile]:
    """The files of --source; none if it is not given."""
    urls = options.source or []
    return list_files([options.source_location(url) for url in urls])


def open_sources(
    options: Options, settings: dict, files: list[SourceFile], names: list[str] | None
) -> Source:
    """The files of --source, or those of made-up winds, which are made if need be."""
    if not files:
        folder = HERE / "outputs/files"
        paths = make_files(folder, settings["days"], settings["resolution"])
        files = list_files([options.source_location(str(path)) for path in paths])
    return open_source(files, names)


def begin(making: Making) -> None:
    """Record that a store is begun, and make its arrays."""
    save_objects(making.store, making.state.skeleton, making.skeleton)
    put_in_place(making.store, making.skeleton)
    making.record()


def load_making(options: Options, store: ObjectStore, pool: Pool) -> Making:
    """A store that has been begun, with the settings that are given.

    DataError if nothing is there.
    """
    state = load_state(store)
    if state is None:
        raise DataError("nothing is there; make it first")
    require_same(make_settings(options, state.settings), state.settings)
    layout = make_layout(state.settings)
    skeleton = load_objects(store, state.skeleton)
    return Making(options.target, store, pool, layout, state, skeleton)


def require_whole(making: Making, flag: str) -> Making:
    """DataError unless a store is whole."""
    if not making.state.whole:
        reason = f"{flag}: the store is not finished"
        raise DataError(f"{reason}; give the command that makes it again")
    return making


def fill(making: Making, source: Source) -> None:
    """Write the regions that the store lacks, and require that all chunks are there."""
    remove_partial(making.location)
    kept = making.state.starts[-1]
    write_regions(making, source, list_unwritten(making), kept)
    lost = list(find_lost(making))
    if lost:
        raise DataError(explain_lost(lost))


def complete(making: Making, options: Options) -> dict:
    """Finish a store, unless it is whole and has the statistics; then describe it."""
    state = making.state
    spans = choose_spans(making.dataset.time, state.spans, options.train_times)
    new = [span for span in spans if not state.whole or span not in state.spans]
    if state.whole and not new:
        print("whole already:")
    else:
        making = finish(making, spans, new)
    return describe(making)


if __name__ == "__main__":
    main()
