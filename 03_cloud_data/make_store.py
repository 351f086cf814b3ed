"""Chapter 3: from scattered NetCDF files to a Zarr store that can be trained on from a bucket.

    uv run python make_store.py                      # outputs/buckets/winds/small.zarr, 1 degree, 396 days
    uv run python make_store.py --days 3650 --resolution 0.25 --store outputs/buckets/winds/large.zarr
    uv run python make_store.py --source '/data/era5/*.nc' --store s3://bucket/winds.zarr
    uv run python make_store.py --workers 4 ...      # or --scheduler tcp://head:8786, a Dask cluster you have

Without --source it first makes the NetCDF files that everyone starts with: winds at ERA5's layout, from the
monthly winds of chapter 1 interpolated in space and time, with weather added whose spectrum is stated below.
It opens them as one dataset, reads and writes it block by block with Dask, and reads the store back once: every
value must be what was written, and the same pass sums the statistics that training needs. Kill it whenever
you like; the same command goes on with the regions that are missing, and ends with the same bytes.
"""

import argparse
import glob
import hashlib
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import perf_counter

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from botocore.exceptions import BotoCoreError
from dask.distributed import CancelledError, Client, KilledWorker
from dask.system import CPU_COUNT
from filelock import FileLock
from numcodecs import Blosc
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url
from scipy import fft
from tqdm import tqdm
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import ObjectStore

HERE = Path(__file__).parent
MONTHLY = HERE.parent / "01_setup/data/navy_winds.nc"
NAMES = {  # ERA5's names of the wind's components, 10 m above the surface
    "eastward_wind": "10m_u_component_of_wind",
    "northward_wind": "10m_v_component_of_wind",
}
FIRST_DAY, DAYS = (
    np.datetime64("1982-01-01", "ns"),
    4018,
)  # to the end of 1992, as in chapter 1
TRAIN_TIMES = ["1982", "1989"]
DIMENSIONS = {  # a name, standard_name, axis or units by which each is known
    "time": {"time", "valid_time", "t", "T"},
    "latitude": {"latitude", "lat", "degrees_north", "degree_north"},
    "longitude": {"longitude", "lon", "degrees_east", "degree_east"},
}
# Weather: a Gaussian random field, isotropic in degrees, whose power falls with the cube of the wavenumber
# (as the wind's does from some thousand to a few hundred km: Nastrom and Gage 1985,
# https://doi.org/10.1175/1520-0469(1985)042%3C0950:ACOAWS%3E2.0.CO;2) below 30 degrees, and none above.
WEATHER_RMS, WEATHER_DEGREES, WEATHER_SLOPE, WEATHER_STREAM = 2.0, 30.0, -3.0, 4
DECISIVE = "days resolution files variables chunk shard_times zarr_format zstd_level region_times"
BLOCKS = 8  # of a region, at most: a block has whole chunks, or whole shards
MAKE_ANEW = "remove the store, and make it anew"
SAME_PLACE = 1e-4  # degrees, about 10 m: two rows or columns that are closer are taken for the same one
NAN = np.float32(np.nan)
refuse = argparse.ArgumentParser(
    usage=argparse.SUPPRESS
).error  # says what to mend, and exits with code 2


@lru_cache(maxsize=1)
def weather_amplitude(rows: int, columns: int, resolution: float) -> np.ndarray:
    """The amplitude of each mode: power in a ring of wavenumbers is k**slope, in a mode k**(slope - 1)."""
    per_degree = np.hypot(
        fft.fftfreq(rows, resolution)[:, None], fft.rfftfreq(columns, resolution)
    )
    per_degree[per_degree < 1 / WEATHER_DEGREES] = np.inf
    return (per_degree ** ((WEATHER_SLOPE - 1) / 2)).astype("float32")


def weather(day: int, latitudes: int, longitudes: int, resolution: float) -> np.ndarray:
    """Small-scale wind of a day, (2, latitude, longitude) in m/s: the same whoever makes it."""
    shape = (
        fft.next_fast_len(latitudes, real=True),
        longitudes,
    )  # 181 is prime, thus slow
    white = np.random.default_rng((WEATHER_STREAM, day)).standard_normal(
        (2, *shape), "float32"
    )
    field = fft.irfft2(
        fft.rfft2(white) * weather_amplitude(*shape, resolution), s=shape
    )
    return (WEATHER_RMS / field.std() * field)[:, :latitudes]


def make_winds(
    days: np.ndarray, grid: dict[str, np.ndarray], monthly: xr.DataArray
) -> np.ndarray:
    """The winds of some days after FIRST_DAY, (2, time, latitude, longitude), float32."""
    times = (FIRST_DAY + days).clip(
        *monthly.time.values[[0, -1]]
    )  # hold the first and the last month
    rows, columns = map(len, grid.values())
    added = [weather(day, rows, columns, 180 / (rows - 1)) for day in days.astype(int)]
    return (monthly.interp(time=times, **grid).values + np.stack(added, axis=1)).astype(
        "float32"
    )


def make_files(n_days: int, resolution: float) -> list[Path]:
    """Make the NetCDF files that are missing, one a year; the days are spread evenly over 1982 to 1992."""
    folder = HERE / f"outputs/files/{n_days}_days_{resolution:g}_degrees"
    folder.mkdir(parents=True, exist_ok=True)
    days = np.linspace(0, DAYS - 1, n_days).astype("timedelta64[D]")
    years = (FIRST_DAY + days).astype("datetime64[Y]")
    rows = round(180 / resolution)
    grid = {
        "latitude": np.linspace(90, -90, rows + 1),
        "longitude": np.arange(2 * rows) * resolution,
    }
    monthly = (
        xr.load_dataset(MONTHLY)[list(NAMES)]
        .to_dataarray("component")
        .transpose("component", ...)
    )
    monthly = monthly.assign_coords(longitude=monthly.longitude % 360).sortby(
        "longitude"
    )
    monthly = monthly.pad(
        longitude=(0, 1), mode="wrap"
    )  # longitude 0 again, at 360: no seam
    monthly = monthly.assign_coords(longitude=[*monthly.longitude.values[:-1], 360])
    files = {year: folder / f"winds_{year}.nc" for year in np.unique(years)}
    with FileLock(folder / ".lock"):
        for year, path in tqdm(files.items(), "files", disable=None):
            if path.exists():
                continue
            chosen, winds = days[years == year], []
            for part in np.array_split(chosen, math.ceil(len(chosen) / BLOCKS)):
                shape = (2, len(part), *map(len, grid.values()))
                winds.append(
                    da.from_delayed(
                        dask.delayed(make_winds)(part, grid, monthly), shape, "float32"
                    )
                )
            fields = zip(NAMES.values(), da.concatenate(winds, axis=1))
            file = {
                name: ([*DIMENSIONS], field, {"units": "m s**-1"})
                for name, field in fields
            }
            file = xr.Dataset(file, {"time": FIRST_DAY + chosen} | grid)
            aside = path.with_name(
                f".part-{path.name}"
            )  # what a kill leaves is not taken for whole
            file.to_netcdf(aside, engine="h5netcdf")
            os.replace(aside, path)
    return list(files.values())


def rename_dimensions(dataset: xr.Dataset) -> xr.Dataset:
    """Call the dimensions time, latitude and longitude, whatever they are called in the store.

    ValueError if two coordinates look like the same dimension.
    """
    for dimension, signs in DIMENSIONS.items():
        found = []
        for name in dataset.indexes:
            about = dataset[name].attrs
            described = [
                str(about.get(key)) for key in ("standard_name", "axis", "units")
            ]
            if signs & {name.lower(), *described}:
                found.append(name)
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(found)} both look like {dimension}; give variables of one grid"
            )
        if found:
            dataset = dataset.rename({found[0]: dimension})
    return dataset


def check_fields(fields: xr.Dataset, path: str) -> None:
    """ValueError unless these are numbers, and their rows and columns are numbers that do not repeat."""
    for dimension, size in fields.sizes.items():
        if size == 0:
            raise ValueError(f"{path}: its {dimension} has length 0")
    for name, field in fields.data_vars.items():
        if field.dtype.kind not in "biuf":
            raise ValueError(
                f"{path}: its {name} holds {field.dtype}, not numbers; give --variables"
            )
    for name in ("latitude", "longitude"):
        values = fields[name].values
        if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise ValueError(
                f"{path}: its {name} has values that are no finite numbers"
            )
        places = (
            values.astype("float64") % 360
        )  # longitudes 0 and 360 are the same place
        order = np.argsort(places)
        gaps = np.diff(places[order], append=places[order[0]] + 360)
        if gaps.min() < SAME_PLACE:
            first = gaps.argmin()
            twice = f"{values[order[first]]:g} and {values[order[(first + 1) % len(order)]]:g}"
            raise ValueError(
                f"{path}: its {name} has one place twice, {twice}; drop one of them"
            )


def select_fields(file: xr.Dataset, variables: list[str] | None) -> xr.Dataset:
    """A file's fields, on (time, latitude, longitude) alone; ValueError if it has none, or lacks one."""
    path = file.encoding["source"]
    dims = {name: field.dims for name, field in file.data_vars.items()}
    chosen = [name for name in variables or dims if name in dims]
    try:
        file = rename_dimensions(
            file[chosen]
        )  # without coordinates that only other variables have
    except ValueError as error:
        raise ValueError(f"{path}: {error} by --variables") from error
    lone = [
        name
        for name, size in file.sizes.items()
        if size == 1 and name not in DIMENSIONS
    ]
    file = file.squeeze(lone).reset_coords(drop=True)
    fields = []
    for name, field in file.data_vars.items():
        if set(field.dims) == set(DIMENSIONS) <= set(file.indexes):
            fields.append(name)
    if not fields or not set(fields).issuperset(variables or []):
        raise ValueError(
            f"{path}: no {variables or 'field'} on {', '.join(DIMENSIONS)} alone; it has {dims}"
        )
    file = file[sorted(fields)].transpose(*DIMENSIONS)
    check_fields(file, path)
    return file


def open_files(args: argparse.Namespace) -> xr.Dataset:
    """Open many files as one dataset, lazily and fast: float32 on (time, latitude, longitude)."""

    def check(file: xr.Dataset) -> xr.Dataset:
        fields = select_fields(file, args.variables)
        differ = ["variables"] * (list(fields) != list(expected))
        differ += [
            d
            for d in ("latitude", "longitude")
            if not np.array_equal(fields[d], expected[d])
        ]
        if differ:
            raise ValueError(
                f"{file.encoding['source']} has other {differ[0]} than {args.files[0]}"
            )
        return fields

    try:
        with xr.open_dataset(args.files[0]) as file:
            expected = select_fields(file, args.variables)
        source = xr.open_mfdataset(
            args.files,
            preprocess=check,
            combine="by_coords",  # in the order of their times, whatever their names
            data_vars="minimal",  # with these four, xarray neither loads nor compares what has no time,
            coords="minimal",
            compat="override",
            join="override",  # nor aligns all files with each other: `check` has compared each with the first
            chunks=dict.fromkeys(
                DIMENSIONS["time"], math.ceil(args.region_times / BLOCKS)
            ),
            parallel=bool(args.workers or args.scheduler),
        )
    except (OSError, TypeError, ValueError) as error:
        refuse(
            f"--source {args.source}: {one_line(error)}; give NetCDF files of numbers on one grid"
        )
    times = source.indexes["time"]
    if times.dtype.kind != "M" or not (
        times.is_monotonic_increasing and times.is_unique
    ):
        refuse(
            f"--source {args.source}: times repeat, or are no dates of the usual calendar; mend the files"
        )
    return source.drop_encoding().astype("float32")


def one_line(error: Exception) -> str:
    """What went wrong, the beginning of it; of an error that says nothing, its name."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def open_store(args: argparse.Namespace) -> ObjectStore:
    """A local folder, or what obstore finds behind a URL, with credentials from the usual places."""
    if "://" not in args.store:
        return ObjectStore(LocalStore(args.store, mkdir=True, automatic_cleanup=True))
    options = {}
    if args.store.startswith("s3://"):
        with suppress(
            ValueError, BotoCoreError
        ):  # boto3 finds none: obstore searches by itself
            options["credential_provider"] = Boto3CredentialProvider(
                ttl=timedelta(minutes=5)
            )
    if args.endpoint:
        options |= {"endpoint": args.endpoint, "client_options": {"allow_http": True}}
        options |= {"virtual_hosted_style_request": False}  # http://endpoint/bucket/key
    return ObjectStore(from_url(args.store, **options))


def list_objects(store: ObjectStore) -> dict[str, int]:
    """The size in bytes of each object."""
    return {
        found["path"]: found["size"] for page in store.store.list() for found in page
    }


def find_root(store: ObjectStore, args: argparse.Namespace) -> zarr.Group | None:
    """The root of a store that this command has begun, None if there is nothing; any other is refused.

    Whether the files of --source have changed is not decided here: see compare_files.
    """
    remedy = "remove it, or give another"
    try:
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
        settings = root.attrs["settings"]
    except (KeyError, ValueError):
        if set(list_objects(store)) in (
            set(),
            {".zgroup"},
            {".zattrs"},
        ):  # Zarr v2's may be half there
            return None
        refuse(f"--store {args.store}: was not begun by this script; {remedy}")
    for name, value in args.settings.items():
        if name == "files" and args.files:
            continue
        begun = settings.get(name)
        if value != begun:
            refuse(
                f"--store {args.store}: was begun with other {name.replace('_', ' ')}, {begun}; {remedy}"
            )
    return root


def choose_encoding(
    dataset: xr.Dataset, chunk: list[int], args: argparse.Namespace
) -> dict[str, dict]:
    """How each array is compressed and cut: fields into chunks and, if asked for, shards of whole maps."""
    if args.zarr_format == 2:  # has no checksum: a flipped bit is read as another value
        compressors, missing = (
            Blosc("zstd", args.zstd_level, Blosc.BITSHUFFLE),
            {"_FillValue": NAN},
        )
    else:  # the checksum is of the bytes as stored: Blosc by itself may crash on an object that was cut
        blosc = BloscCodec(cname="zstd", clevel=args.zstd_level, shuffle="bitshuffle")
        compressors, missing = (
            [blosc, Crc32cCodec()],
            {"fill_value": NAN, "_FillValue": None},
        )
    packing = {"compressors": compressors, "_FillValue": None}
    encoding = {
        name: packing | {"chunks": dataset[name].shape} for name in dataset.coords
    }
    for name, field in dataset.data_vars.items():
        encoding[name] = (
            packing | missing | {"chunks": tuple(map(min, chunk, field.shape))}
        )
        if "time" in field.dims and args.shard_times:
            _, *map_chunks = zip(encoding[name]["chunks"], field.shape)
            whole = (math.ceil(size / cells) * cells for cells, size in map_chunks)
            encoding[name]["shards"] = (args.shard_times, *whole)
    if "time" in encoding:
        encoding["time"]["dtype"] = "int64"  # of the longest unit that is exact
    return encoding


def checksums(name: str, first: int, values: np.ndarray) -> list[str]:
    """SHA-256 of each map of a field, (time, latitude, longitude), from the store's number `first` on."""
    maps = enumerate(values, first)
    return [
        hashlib.sha256(f"{name} {time} ".encode() + each.tobytes()).hexdigest()
        for time, each in maps
    ]


def combine(found: list[str]) -> str:
    """One checksum of many, in whatever order they came."""
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def load(block: xr.Dataset) -> xr.Dataset:
    """Read a block. This thread does it alone, so each thread of a pool holds one block and no more."""
    return block.compute(scheduler="synchronous")


def read_block(block: xr.Dataset, first: int, args: argparse.Namespace) -> list[str]:
    """Read some times of the files, from the store's number `first` on; return their checksums."""
    found = []
    for name, field in load(block).data_vars.items():
        found += checksums(name, first, field.values)
    return found


def write_block(block: xr.Dataset, first: int, args: argparse.Namespace) -> list[str]:
    """Write some times, whole chunks or shards, from the store's number `first` on; return their checksums.

    Runs where Dask chooses, and opens the store there: no credentials are sent. ValueError for infinity.
    """
    root, found = (
        zarr.open_group(open_store(args), mode="r+", use_consolidated=False),
        [],
    )
    for name, field in load(block).data_vars.items():
        if np.isinf(field.values).any():
            last = first + len(field) - 1
            raise ValueError(
                f"{name} has infinity at one of the times {first} to {last}, counted from 0"
            )
        # Chunks of NaN are written, too, because a missing chunk is an error.
        array = root[name].with_config({"write_empty_chunks": True})
        array[first : first + len(field)] = field.values
        found += checksums(name, first, field.values)
    return found


def plan_blocks(
    regions: Iterable[int], n_times: int, args: argparse.Namespace
) -> list[tuple[int, slice]]:
    """The blocks of these regions, in order: each block's region, known by its first time, and its times."""
    blocks = []
    for region in regions:
        end = min(region + args.region_times, n_times)
        for start in range(region, end, args.block_times):
            blocks.append((region, slice(start, min(start + args.block_times, end))))
    return blocks


def count_at_once(args: argparse.Namespace) -> int:
    """How many blocks may be under way at once.

    A cluster gets two for each of its threads: while a thread is busy with one, the next one waits, not yet
    read. The cluster is asked each time, because it may grow. Without a cluster, the threads of this process
    together hold no more times than one region has.
    """
    if args.workers or args.scheduler:
        return max(1, 2 * sum(Client.current().nthreads().values()))
    return min(CPU_COUNT, args.region_times // args.block_times)


def run_blocks(
    function: Callable,
    source: xr.Dataset,
    blocks: list[tuple[int, slice]],
    args: argparse.Namespace,
) -> Iterator[tuple[int, list[str]]]:
    """Call `function`, which is read_block or write_block, on each block; blocks of several regions run at once.

    Yields a block's region and checksums as soon as the block is done, so in any order.
    """
    if args.workers or args.scheduler:
        pool = Client.current().get_executor(pure=False)
    else:
        pool = ThreadPoolExecutor(count_at_once(args))
    running = {}
    with pool:
        for region, times in blocks:
            while len(running) >= count_at_once(args):
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
            (block,) = dask.optimize(
                source.isel(time=times)
            )  # keeps only the reads of these times
            running[pool.submit(function, block, times.start, args)] = region
        for future in as_completed(running):
            yield running[future], future.result()


def compute_regions(
    function: Callable, source: xr.Dataset, regions: list[int], args: argparse.Namespace
) -> Iterator[tuple[int, str]]:
    """Call `function`, which is read_block or write_block, on all blocks of these regions.

    Yields a region's first time and checksum as soon as all of its blocks are done. Refuses damaged files.
    """
    blocks = plan_blocks(regions, len(source.time), args)
    missing = Counter(region for region, _ in blocks)
    found = defaultdict(list)
    try:
        for region, part in run_blocks(function, source, blocks, args):
            found[region] += part
            missing[region] -= 1
            if not missing[region]:
                yield region, combine(found.pop(region))
    except (RuntimeError, ValueError) as error:  # infinity, or a file that is damaged
        refuse(f"--source {args.source}: {one_line(error)}; mend the files")


def compare_files(
    source: xr.Dataset, root: zarr.Group, args: argparse.Namespace
) -> None:
    """Refuse files whose content is not what this store was written from. Accept files that were only touched.

    Called when the files' names, sizes or modification times differ from those recorded. It compares the variables,
    the coordinates, and the checksum of every region that has been written, so it reads these regions from the
    files again. If all are equal, the new names, sizes and modification times are recorded.
    """
    regions = root.attrs.get("regions", {})
    differ = []
    if "regions" in root.attrs:  # else there are no arrays yet
        store = xr.open_zarr(root.store, consolidated=False, chunks=None)
        differ += ["variables"] * (set(store.data_vars) != set(source.data_vars))
        differ += [
            name for name in DIMENSIONS if not np.array_equal(store[name], source[name])
        ]
    if not differ:
        with closing(
            compute_regions(read_block, source, [int(first) for first in regions], args)
        ) as read:
            for first, checksum in tqdm(
                read, "regions compared", len(regions), disable=None
            ):
                if checksum != regions[str(first)]:
                    differ.append(f"values from time {first} on")
                    break
    if differ:
        remedy = "remove it, or give another"
        refuse(
            f"--store {args.store}: was begun with other files: they have other {differ[0]}; {remedy}"
        )
    if root.attrs["settings"]["files"] != hash_files(
        []
    ):  # a store that was begun without --source stays so
        current = zarr.open_group(
            root.store, mode="r+"
        )  # keeps the consolidated metadata, if there are any
        current.attrs["settings"] = args.settings


def write_store(source: xr.Dataset, root: zarr.Group, args: argparse.Namespace) -> None:
    """Write the regions of times that a store lacks, several blocks at once.

    A region's checksum is recorded when all of its blocks are written. After a kill, regions without a checksum
    are written again, so no region is taken for whole that is not.
    """
    if "regions" not in root.attrs:  # not all arrays are there
        for name in list(root.keys()):
            del root[name]
        options = {"consolidated": False, "safe_chunks": False}
        options["encoding"] = choose_encoding(source, args.chunk, args)
        source.assign_attrs(root.attrs).to_zarr(
            root.store, mode="a", compute=False, **options
        )
        root.attrs["regions"] = {}
    regions = dict(root.attrs["regions"])
    firsts = range(0, len(source.time), args.region_times)
    missing = [first for first in firsts if str(first) not in regions]
    progress = {
        "desc": "regions written",
        "total": len(firsts),
        "initial": len(regions),
        "disable": None,
    }
    with closing(compute_regions(write_block, source, missing, args)) as written:
        for first, checksum in tqdm(written, **progress):
            regions[str(first)] = checksum
            root.attrs["regions"] = dict(
                sorted(regions.items(), key=lambda region: int(region[0]))
            )


def select_times(time: xr.DataArray, args: argparse.Namespace) -> np.ndarray:
    """True for the times to train on; refuse if there are none."""
    first, last = args.train_times
    with suppress(TypeError, ValueError):  # not dates
        chosen = np.isin(time, time.sel(time=slice(first, last)))
        if chosen.any():
            return chosen
    span = " to ".join(np.datetime_as_string(time[[0, -1]], unit="D"))
    refuse(f"--train-times {first} {last}: no such times; give dates of {span}")


def name_objects(members: dict[str, zarr.Array | zarr.Group]) -> Iterator[str]:
    """The names of all objects of some arrays and groups: their metadata, and every chunk or shard."""
    for path, member in members.items():
        is_array = isinstance(member, zarr.Array)
        if member.metadata.zarr_format == 3:
            yield f"{path}/zarr.json"
        else:
            yield f"{path}/.zattrs"
            yield f"{path}/.zarray" if is_array else f"{path}/.zgroup"
        if is_array:
            counts = map(
                math.ceil, np.divide(member.shape, member.shards or member.chunks)
            )
            for place in np.ndindex(*counts):
                yield f"{path}/{member.metadata.encode_chunk_key(place)}"


def check_objects(
    objects: dict[str, int], members: dict, args: argparse.Namespace
) -> None:
    """Refuse a store in whose listing objects of these arrays and groups are missing or empty, and name them."""
    missing = [name for name in name_objects(members) if not objects.get(name)]
    if missing:
        some = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        refuse(
            f"--store {args.store}: damaged: missing or empty objects: {some} ({len(missing)} in all); {MAKE_ANEW}"
        )


def verify(
    root: zarr.Group, args: argparse.Namespace
) -> Iterator[tuple[str, slice, np.ndarray]]:
    """Read everything back: every region must have its checksum. Refuse a damaged store.

    Yields each field's name, times and values, (times, latitude, longitude), region by region.
    """
    arrays = dict(sorted(root.arrays()))
    for first, expected in tqdm(
        root.attrs["regions"].items(), "regions verified", disable=None
    ):
        times, found = slice(int(first), int(first) + args.region_times), []
        for name in arrays.keys() - DIMENSIONS.keys():
            try:
                values = arrays[name][times]
            except (RuntimeError, ValueError) as error:  # a codec's
                where = f"{name} is damaged from time {first} on"
                refuse(
                    f"--store {args.store}: {where} ({one_line(error)}); {MAKE_ANEW}"
                )
            found += checksums(name, times.start, values)
            yield name, times, values
        if combine(found) != expected:
            refuse(
                f"--store {args.store}: from time {first} on, not the values written; {MAKE_ANEW}"
            )


def compute_statistics(root: zarr.Group, args: argparse.Namespace) -> xr.Dataset:
    """Climatology and standard deviation of the training times, from the pass that verifies the store.

    A field becomes its climatology, (month, latitude, longitude), NaN where there is none. In its attributes
    are the number of these times, and the standard deviation of the anomalies over valid cells: those where
    every field has a value at one of these times at least.
    """
    opened = xr.open_zarr(root.store, consolidated=False, chunks=None)
    training, months = select_times(opened.time, args), opened.time.dt.month.values
    names, dims = sorted(opened.data_vars), ("month", "latitude", "longitude")
    shape = len(names), 12, opened.sizes["latitude"], opened.sizes["longitude"]
    counts, sums, squares = (
        np.zeros(shape, "int32"),
        np.zeros(shape),
        np.zeros((shape[0], *shape[2:])),
    )
    for name, times, values in verify(root, args):
        i = names.index(name)
        for month in np.unique(months[times][training[times]]):
            part = values[training[times] & (months[times] == month)].astype("float64")
            counts[i, month - 1] += np.isfinite(part).sum(axis=0)
            sums[i, month - 1] += np.nansum(part, axis=0)
            squares[i] += np.nansum(part**2, axis=0)
    means = np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0)
    about_means, valid = (
        squares - np.nansum(sums * means, axis=1),
        counts.any(axis=1).all(axis=0),
    )
    std = np.sqrt(
        about_means[:, valid].sum(axis=1) / counts[:, :, valid].sum(axis=(1, 2))
    )
    statistics = xr.Dataset(
        coords={"month": range(1, 13)} | {dim: opened[dim] for dim in dims[1:]}
    )
    for i, name in enumerate(names):
        about = {"std": float(std[i]), "times": int(training.sum())}
        statistics[name] = (dims, means[i].astype("float32"), about)
    return statistics.drop_encoding()


def write_statistics(
    statistics: xr.Dataset, root: zarr.Group, group: str, args: argparse.Namespace
) -> None:
    """Keep the statistics in a group of the store, a chunk a month, and all metadata in one object."""
    options = {
        "zarr_format": args.zarr_format,
        "consolidated": False,
        "write_empty_chunks": True,
    }
    options["encoding"] = choose_encoding(statistics, [1, 2**30, 2**30], args)
    statistics.to_zarr(root.store, group=group, mode="w", **options)
    zarr.consolidate_metadata(root.store).attrs["whole"] = True  # last of all


def describe(
    root: zarr.Group, objects: dict[str, int], args: argparse.Namespace
) -> dict:
    """Print what a reader wants to know of a store, in one block, and return it."""
    fields = [array for name, array in root.arrays() if name not in DIMENSIONS]
    shards = fields[0].shards
    sizes = {
        "raw_bytes": sum(field.nbytes for field in fields),
        "stored_bytes": sum(objects.values()),
    }
    sizes |= {"objects": len(objects), "regions": len(root.attrs["regions"])}
    print(
        f"{args.store}: {len(fields)} variables of {fields[0].shape}, {len(objects)} objects"
    )
    print(f"  chunks of {fields[0].chunks}" + f" in shards of {shards}" * bool(shards))
    raw, stored = sizes["raw_bytes"], sizes["stored_bytes"]
    print(
        f"  {raw / 1e6:.1f} MB, stored in {stored / 1e6:.1f}: {raw / stored:.2f} to 1"
    )
    return {"store": args.store} | sizes


def hash_files(files: list[str]) -> str:
    """A hash of the files' names, sizes and modification times. Only if it differs, compare_files reads them."""
    about = [
        (os.path.basename(file), os.path.getsize(file), os.path.getmtime(file))
        for file in files
    ]
    return hashlib.sha256(repr(about).encode()).hexdigest()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags, and what follows from them: the `files` of --source, the `unit` of times that are written as a
    whole, the `block_times` of a block, which are whole units, and `settings`, all that decides the bytes."""
    summary, show_defaults = (
        __doc__.splitlines()[0],
        argparse.ArgumentDefaultsHelpFormatter,
    )
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add = parser.add_argument
    add(
        "--store",
        default=os.path.relpath(HERE / "outputs/buckets/winds/small.zarr"),
        help="folder, or URL",
    )
    add("--endpoint", metavar="URL", help="of an S3 server other than AWS's")
    add(
        "--source",
        help="pattern of NetCDF files, in quotes; if not given, files are made",
    )
    add(
        "--variables",
        nargs="+",
        help="of the files; if not given, all on time, latitude and longitude alone",
    )
    add(
        "--days",
        type=int,
        default=396,
        help=f"to make, spread evenly over the {DAYS} of 1982 to 1992",
    )
    add(
        "--resolution", type=float, default=1.0, help="of the files to make, in degrees"
    )
    add(
        "--patch-size",
        type=int,
        default=64,
        help="cells along a side of the patches that will be read",
    )
    add(
        "--chunk",
        type=int,
        nargs=3,
        help="times, rows and columns; if not given, 1 and twice the patch",
    )
    add(
        "--shard-times",
        type=int,
        default=0,
        help="times of the whole map in a shard; 0: no shards",
    )
    add("--zarr-format", type=int, choices=(2, 3), default=3, help="2 has no checksums")
    add(
        "--zstd-level",
        type=int,
        choices=range(1, 10),
        default=1,
        help="of compression: 9 is small and slow",
    )
    add(
        "--region-times",
        type=int,
        default=36,
        help="times that share a checksum, recorded when all are written",
    )
    train_times = {"nargs": 2, "metavar": ("FIRST", "LAST"), "default": TRAIN_TIMES}
    add(
        "--train-times",
        **train_times,
        help="dates, or years, whose statistics are kept in the store",
    )
    add(
        "--workers",
        type=int,
        default=0,
        help="processes of Dask on this machine; 0: threads of this one",
    )
    add(
        "--scheduler",
        metavar="ADDRESS",
        help="of a Dask cluster that is there; if not given, none is needed",
    )
    args = parser.parse_args(argv)
    args.chunk = args.chunk or [1, 2 * args.patch_size, 2 * args.patch_size]
    args.files = sorted(glob.glob(args.source or ""))
    limits = {
        "source": (
            args.files or not args.source,
            "no such files; give a pattern, in quotes",
        ),
        "days": (1 <= args.days <= DAYS, f"give 1 to {DAYS}"),
        "resolution": (
            0 < args.resolution <= 60 and not 180 / args.resolution % 1,
            "give degrees that divide 180",
        ),
        "patch_size": (args.patch_size >= 1, "give at least 1"),
        "chunk": (min(args.chunk) >= 1, "give at least 1 each"),
        "shard_times": (args.shard_times >= 0, "give 0 or more"),
        "region_times": (args.region_times >= 1, "give at least 1"),
        "workers": (args.workers >= 0, "give 0 or more"),
    }
    for name, (good, remedy) in limits.items():
        if not good:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: {remedy}")
    if args.shard_times % args.chunk[0] or (args.shard_times and args.zarr_format == 2):
        refuse(
            f"--shard-times {args.shard_times}: give a multiple of {args.chunk[0]}, and --zarr-format 3"
        )
    args.unit = args.shard_times or args.chunk[0]
    args.region_times = args.unit * math.ceil(args.region_times / args.unit)
    args.block_times = args.unit * math.ceil(args.region_times / args.unit / BLOCKS)
    args.settings = {name: getattr(args, name) for name in DECISIVE.split()}
    args.settings["files"] = hash_files(args.files)
    return args


def make_store(args: argparse.Namespace) -> dict:
    """Make the files, write the store, verify it; go on from wherever an earlier command was killed.

    A store that is whole is not read again. It is listed, and every object must be there.
    """
    store = open_store(args)
    root = find_root(store, args)
    whole = root is not None and bool(root.attrs.get("whole"))
    same_files = (
        root is None or root.attrs["settings"]["files"] == args.settings["files"]
    )
    if whole:  # before its files are compared: of a damaged store, they would seem to be others
        objects = list_objects(store)
        current = zarr.open_group(store, mode="r")  # with its consolidated metadata
        check_objects(objects, dict(current.members(max_depth=None)), args)
    if not (whole and same_files):
        args.files = args.files or make_files(args.days, args.resolution)
        source = open_files(args)
        select_times(source.time, args)  # refused before anything is written
    if root is None:
        about = {
            "zarr_format": args.zarr_format,
            "attributes": {"settings": args.settings},
        }
        root = zarr.create_group(store, overwrite=True, **about)
    if not same_files:
        compare_files(source, root, args)
        root = find_root(store, args)
    if not whole:
        for left in [] if "://" in args.store else Path(args.store).rglob("*#*"):
            left.unlink()  # part of an object, which a kill has left
        write_store(source, root, args)
        check_objects(list_objects(store), dict(root.arrays()), args)
    fields = sorted(name for name, _ in root.arrays() if name not in DIMENSIONS)
    name = "_".join([*fields, *args.train_times])
    group = f"statistics/{name if len(name) < 200 else hashlib.sha256(name.encode()).hexdigest()}"
    if whole and group in current and current.metadata.consolidated_metadata:
        print("whole already:")
    else:
        write_statistics(compute_statistics(root, args), root, group, args)
        objects = list_objects(store)
    return describe(root, objects, args)


def main(argv: list[str] | None = None) -> dict:
    """Make a store; return its name, its sizes in bytes, and the number of its objects and regions."""
    began, args = perf_counter(), parse_arguments(argv)
    warnings.filterwarnings(
        "ignore", "Consolidated metadata is currently not part"
    )  # of Zarr 3, but all read it
    warnings.filterwarnings(
        "ignore", "The specified chunks separate"
    )  # for a file that was cut otherwise
    try:
        with ExitStack() as stack:
            if args.workers or args.scheduler:
                local = {
                    "n_workers": args.workers,
                    "threads_per_worker": 1,
                    "dashboard_address": "127.0.0.1:0",
                }
                cluster = {"address": args.scheduler} if args.scheduler else local
                print(
                    f"dashboard: {stack.enter_context(Client(**cluster)).dashboard_link}",
                    flush=True,
                )
            if "://" not in args.store:
                path = Path(args.store)
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(
                    FileLock(path.with_name(f".{path.name}.lock"))
                )  # a second command waits
            figures = make_store(args)
    except (OSError, RuntimeError, BaseError, KilledWorker, CancelledError) as error:
        # A full disk, a bucket that refuses, a cluster whose workers have ended.
        refuse(
            f"--store {args.store}: not finished: {one_line(error)}; mend that, the same command goes on"
        )
    print(f"  {perf_counter() - began:.0f} s")
    return figures


if __name__ == "__main__":
    main()
