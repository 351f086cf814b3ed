"""Chapter 3: from scattered NetCDF files to a store that can be trained on from a bucket.

    uv run python make_store.py                                      # a small store, on this disk: seconds
    uv run python make_store.py --days 4018 --resolution 0.25 --store outputs/buckets/winds/large.zarr
    uv run python make_store.py --source '/data/era5/*.nc' --store s3://bucket/winds.zarr --workers 8
    uv run python make_store.py --scheduler tcp://head:8786 ...      # on a Dask cluster that you have

Without --source it first makes the NetCDF files that everyone starts with: winds at ERA5's layout, from the
monthly winds of chapter 1 interpolated in space and time, with weather added whose spectrum is stated below.
Then it opens them as one dataset, writes Zarr region by region with Dask, and verifies what it wrote. Kill it
whenever you like; the same command goes on with the regions that are missing, and ends with the same bytes.
"""

import argparse
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from time import perf_counter

import cloudpickle
import dask
import numcodecs
import numpy as np
import xarray as xr
import zarr
from botocore.exceptions import BotoCoreError
from dask.distributed import Client, Future, LocalCluster
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import from_url
from tqdm import tqdm
from zarr.codecs import BloscCodec
from zarr.storage import ObjectStore

HERE = Path(__file__).parent
MONTHLY = HERE.parent / "01_setup/data/navy_winds.nc"
NAMES = {  # ERA5's names of the wind's components, 10 m above the surface
    "eastward_wind": "10m_u_component_of_wind",
    "northward_wind": "10m_v_component_of_wind",
}
DIMS = ("time", "latitude", "longitude")
FIRST_DAY, DAYS, DAYS_PER_FILE = datetime(1982, 1, 1), 4018, 36  # 1982 to 1992, as in chapter 1

# Weather: a Gaussian random field, isotropic in degrees, whose power falls with the cube of the wavenumber
# (as the wind's does from some thousand to a few hundred km: Nastrom and Gage 1985,
# https://doi.org/10.1175/1520-0469(1985)042%3C0950:ACOAWS%3E2.0.CO;2) below 30 degrees, and none above.
WEATHER_RMS, WEATHER_DEGREES, WEATHER_SLOPE, WEATHER_STREAM = 2.0, 30.0, -3.0, 4

ASIDE = re.compile(r".+\.[0-9a-f]{32}\.partial")  # a file as Zarr writes it aside, before it is renamed
ROOT = {"zarr.json", ".zgroup", ".zattrs"}  # a group's metadata, in both formats


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


# ------------------------------------------------------------------------- the files everyone starts with


def weather(day: int, latitudes: int, longitudes: int, resolution: float) -> np.ndarray:
    """Small-scale wind of a day, (2, latitude, longitude) in m/s: the same on whichever worker makes it."""
    white = np.random.default_rng((WEATHER_STREAM, day)).standard_normal((2, latitudes, longitudes), "f4")
    rows, columns = np.fft.fftfreq(latitudes, resolution), np.fft.rfftfreq(longitudes, resolution)
    per_degree = np.hypot(rows[:, None], columns)
    with np.errstate(divide="ignore"):
        # power in a ring of wavenumbers ~ k**slope, so power in a mode ~ k**(slope - 1), its root the amplitude
        amplitude = np.where(per_degree >= 1 / WEATHER_DEGREES, per_degree ** ((WEATHER_SLOPE - 1) / 2), 0)
    field = np.fft.irfft2(np.fft.rfft2(white) * amplitude.astype("f4"), s=(latitudes, longitudes))
    return WEATHER_RMS * field / field.std()


def open_monthly() -> xr.DataArray:
    """Chapter 1's winds, (time, component, latitude, longitude); longitude 0 stands again at 360: no seam."""
    winds = xr.load_dataset(MONTHLY, engine="h5netcdf")[list(NAMES)].to_dataarray("component")
    winds = winds.transpose("time", "component", ...)
    winds = winds.assign_coords(longitude=winds.longitude % 360).sortby(["latitude", "longitude"])
    again = winds.isel(longitude=[0])
    return xr.concat([winds, again.assign_coords(longitude=again.longitude + 360)], "longitude")


def interpolate(field: np.ndarray, known: np.ndarray, wanted: np.ndarray, axis: int) -> np.ndarray:
    """Interpolate linearly along an axis, from known places to those wanted; beyond the ends, hold."""
    below = np.clip(np.searchsorted(known, wanted, "right") - 1, 0, len(known) - 2)
    share = np.clip((wanted - known[below]) / (known[below + 1] - known[below]), 0, 1).astype("f4")
    share = np.expand_dims(share, tuple(range(1, field.ndim - axis)))
    return (1 - share) * field.take(below, axis) + share * field.take(below + 1, axis)


def winds_of(days: list[int], resolution: float, monthly: xr.DataArray) -> xr.Dataset:
    """The winds of some days at ERA5's layout: float32, latitude from north to south, longitude from 0."""
    times = np.datetime64(FIRST_DAY, "ns") + np.array(days, "timedelta64[D]")
    latitude = np.linspace(90, -90, round(180 / resolution) + 1)
    longitude = np.arange(round(360 / resolution)) * resolution
    winds = np.empty((2, len(days), len(latitude), len(longitude)), "f4")
    for i, day in enumerate(days):
        smooth = interpolate(monthly.values, monthly.time.values, times[i : i + 1], axis=0)[0]
        smooth = interpolate(smooth, monthly.latitude.values, latitude, axis=1)
        smooth = interpolate(smooth, monthly.longitude.values, longitude, axis=2)
        winds[:, i] = smooth + weather(day, len(latitude), len(longitude), resolution)
    fields = {name: (DIMS, field, {"units": "m s**-1"}) for name, field in zip(NAMES.values(), winds)}
    return xr.Dataset(fields, {"time": times, "latitude": latitude, "longitude": longitude})


def make_files(days: int, resolution: float, client: Client) -> list[Path]:
    """Make the NetCDF files, in parallel, unless they are there; `days` are spread evenly over DAYS."""

    def make(path: Path, days: list[int], monthly: xr.DataArray) -> None:
        aside = path.with_name(f".part-{path.name}")  # if killed, hidden from *.nc, and never taken for whole
        try:
            winds_of(days, resolution, monthly).to_netcdf(aside, engine="h5netcdf")
            os.replace(aside, path)
        except RuntimeError as error:  # HDF5's, of a full disk
            raise OSError(f"cannot write {path}: {error}") from error
        finally:
            aside.unlink(missing_ok=True)

    folder = HERE / f"outputs/files/{days}_days_{resolution:g}_degrees"
    chosen = np.linspace(0, DAYS - 1, days).astype(int).tolist()
    parts = [chosen[first : first + DAYS_PER_FILE] for first in range(0, days, DAYS_PER_FILE)]
    files = [folder / f"winds_from_{FIRST_DAY + timedelta(part[0]):%Y-%m-%d}.nc" for part in parts]
    with locked(folder):
        folder.mkdir(exist_ok=True)
        missing = [(path, part) for path, part in zip(files, parts) if not path.exists()]
        monthly = client.scatter(open_monthly()) if missing else None
        gather([client.submit(make, *each, monthly, pure=False) for each in missing], "files made")
    return files


def gather(futures: list[Future], what: str) -> list:
    """The results of Dask's tasks, behind a progress bar where there is a terminal to show it."""
    return [future.result() for future in tqdm(futures, what, disable=None)]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold PATH.lock: a second command waits for the first to end, and then finds its work done."""
    name, mine = path.with_name(f"{path.name}.lock"), False
    name.parent.mkdir(parents=True, exist_ok=True)
    while not mine:
        lock = open(name, "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{path}: another command is at work; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        mine = name.exists() and name.samefile(f"/dev/fd/{lock.fileno()}")  # else its last holder removed it
    try:
        yield
    finally:
        name.unlink()
        lock.close()


# ---------------------------------------------------------------------------------------- from files to Zarr


def layout(opened: xr.Dataset) -> dict[str, list]:
    """What files must share to be parts of one dataset: the variables over DIMS, and the grid."""
    names = sorted(name for name in opened.data_vars if set(opened[name].dims) == set(DIMS))
    if not names or not set(DIMS) <= opened.indexes.keys():
        raise InputError(f"--source {opened.encoding['source']}: has no variable over {', '.join(DIMS)}")
    return {"variables": names} | {dim: opened[dim].values.tolist() for dim in DIMS[1:]}


def open_files(files: list[Path], args: argparse.Namespace) -> xr.Dataset:
    """Open many files as one dataset, lazily and fast: its variables over DIMS, float32.

    The arguments promise that the files have the same variables and grid, which spares xarray comparing all
    coordinates of all files. The promise is checked as each file is opened; none of its winds is read.
    """

    def check(opened: xr.Dataset) -> xr.Dataset:
        for what, found in layout(opened).items():
            if found != expected[what]:
                raise InputError(f"--source {opened.encoding['source']}: other {what} than in {files[0]}")
        return opened[expected["variables"]].drop_vars(opened.coords.keys() - set(DIMS))

    chunks = {"time": args.region_days, "latitude": -1, "longitude": -1}  # {}: a task for each of the file's
    promise = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "override"}
    try:
        with xr.open_dataset(files[0]) as opened:
            expected = layout(opened)
        source = xr.open_mfdataset(files, parallel=True, chunks=chunks, preprocess=check, **promise)
    except (OSError, TypeError, ValueError) as error:
        reason = f"not NetCDF files that follow each other in time ({first_line(error)})"
        raise InputError(f"--source {args.source}: {reason}") from error
    times = source.indexes["time"]
    if times.dtype.kind != "M" or not (times.is_monotonic_increasing and times.is_unique):
        raise InputError(f"--source {args.source}: times overlap, or are not dates of the usual calendar")
    if args.latitude_from:
        source = source.sortby("latitude", ascending=args.latitude_from == "south")
    source = source.drop_encoding().astype("float32")
    if args.keep_bits:
        source = source.map(lambda wind: wind.copy(data=wind.data.map_blocks(round_bits, args.keep_bits)))
    return source.transpose(*args.dims)


def round_bits(values: np.ndarray, keep: int) -> np.ndarray:
    """Round float32 to `keep` bits of mantissa; the zeros in the place of the others compress to nothing."""
    codec = numcodecs.BitRound(keep)
    return codec.decode(codec.encode(values))


def first_line(error: Exception) -> str:
    """What went wrong; of an error that says nothing, as Dask's TimeoutError, its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def checksum(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def checksums(winds: xr.Dataset) -> list[str]:
    """SHA-256 of each time, of its date and its values, however they are stored.

    InputError names a variable and a time with a value that is not finite, or a variable that is unreadable.
    """
    dates = np.datetime_as_string(winds.time.values, unit="s")
    found = [hashlib.sha256(date.encode()) for date in dates]
    for name in sorted(winds.data_vars):
        try:
            values = winds[name].transpose(*DIMS).values
        except (RuntimeError, ValueError) as error:  # a codec's, of a damaged chunk
            raise InputError(f"{name} from {dates[0]} on: {first_line(error)}") from error
        for date, field, digest in zip(dates, values, found):
            if not np.isfinite(field).all():
                raise InputError(f"{name} on {date}: NaN or infinity")
            digest.update(name.encode() + field.tobytes())
    return [digest.hexdigest() for digest in found]


class Credentials(Boto3CredentialProvider):
    """From the environment, a profile or the machine; a worker is sent none, but looks for its own."""

    def __getstate__(self) -> dict:
        return vars(self) | {"credentials": None}

    def __call__(self) -> dict:
        self.credentials = self.credentials or Boto3CredentialProvider().credentials
        return super().__call__()


class Bucket(ObjectStore):
    """An object store that is sent by value: Dask's workers, elsewhere, have no class of this script."""

    def __getstate__(self) -> dict:
        return vars(self) | {"store": cloudpickle.dumps(self.store)}


def open_store(url: str) -> str | ObjectStore:
    """A folder's path, or an object store behind a URL, with credentials from the usual places."""
    if "://" not in url:
        return url
    options = {}
    if url.startswith("s3://") and os.environ.get("AWS_SKIP_SIGNATURE", "").lower() != "true":
        try:  # boto3 renews what expires, so ask it every time
            options["credential_provider"] = Credentials(ttl=timedelta(0))
        except (ValueError, BotoCoreError) as error:
            reason = "no credentials in the environment, a profile or the machine"
            raise InputError(f"--store {url}: {reason}; set AWS_PROFILE to one that has some") from error
    return Bucket(from_url(url, **options))


def find_root(args: argparse.Namespace) -> zarr.Group | None:
    """The root group of a store that this command has begun, None if there is nothing; InputError for others.

    Its attributes are the settings, the regions that are whole and, at the end, the store's identity.
    """
    store, refusal = open_store(args.store), f"--store {args.store}: {{}}; remove it, or give another"
    held = os.listdir(store) if isinstance(store, str) and Path(store).is_dir() else []
    others = {name for name in held if not ASIDE.fullmatch(name)} - ROOT  # than a kill at the start leaves
    try:
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
    except FileNotFoundError as error:
        if others:
            raise InputError(refusal.format("holds files that are not a Zarr store")) from error
        return None
    if root.metadata.zarr_format == args.zarr_format and not (others or root.attrs or any(root.keys())):
        return None  # killed in between
    if (settings := root.attrs.get("settings")) is None:
        raise InputError(refusal.format("was not begun by this script"))
    for name, begun in settings.items():
        if begun != args.settings[name]:
            raise InputError(refusal.format(f"was begun with another --{name.replace('_', '-')}, {begun}"))
    return root


def begin_root(args: argparse.Namespace) -> zarr.Group:
    """The root group of a new store, which says first of all with which settings it is made."""
    root = zarr.open_group(open_store(args.store), mode="a", zarr_format=args.zarr_format)
    root.attrs["settings"] = args.settings
    return root


def encoding_of(source: xr.Dataset, args: argparse.Namespace) -> dict:
    """How each variable is cut, compressed and, if asked for, put into shards."""
    fill = "_FillValue" if args.zarr_format == 2 else "fill_value"
    chunk = {dim: min(size, source.sizes[dim]) for dim, size in zip(DIMS, args.chunk)}
    common = {"chunks": tuple(chunk[dim] for dim in args.dims), fill: np.float32(np.nan)}
    if args.shard_days:
        shard = {dim: math.ceil(source.sizes[dim] / chunk[dim]) * chunk[dim] for dim in DIMS}
        common["shards"] = tuple((shard | {"time": args.shard_days})[dim] for dim in args.dims)
    if args.zarr_format == 2:
        compressor = numcodecs.Blosc("zstd", args.compression_level, numcodecs.Blosc.BITSHUFFLE)
    else:
        compressor = BloscCodec(cname="zstd", clevel=args.compression_level, shuffle="bitshuffle")
    return {name: common | {"compressors": compressor} for name in source.data_vars}


def write_regions(source: xr.Dataset, root: zarr.Group, args: argparse.Namespace, client: Client) -> None:
    """Write what is missing of a store, a region of times after another, each in parallel with Dask.

    A region's checksum is recorded when all of it is written. So a kill leaves regions that are written
    again, and never one that is taken for whole.
    """
    if "regions" not in root.attrs:
        for name in list(root.keys()):
            del root[name]  # a command that was killed here may have laid out some
        empty, encoding = source.assign_attrs(root.attrs), encoding_of(source, args)
        layout_only = {"mode": "a", "compute": False, "safe_chunks": False}
        empty.to_zarr(root.store, encoding=encoding, consolidated=False, **layout_only)
        root.attrs["regions"] = {}
    written, size, unit = dict(root.attrs["regions"]), args.region_days, args.shard_days or args.chunk[0]
    blocks = math.ceil(sum(client.nthreads().values()) / len(source.data_vars))  # of each variable
    chunks = {"time": unit * math.ceil(size / unit / blocks), "latitude": -1, "longitude": -1}
    for first in tqdm(range(0, source.sizes["time"], size), "regions written", disable=None):
        if str(first) not in written:
            times = slice(first, first + size)
            region = source.isel(time=times).chunk(chunks).persist()
            region.drop_vars(DIMS).to_zarr(root.store, region={"time": times}, consolidated=False)
            try:
                written[str(first)] = checksum(dask.delayed(checksums)(region).compute())
            except InputError as error:
                raise InputError(f"--source {args.source}: {error}; mend it") from error
            root.attrs["regions"] = written


def verify(root: zarr.Group, args: argparse.Namespace, client: Client) -> str:
    """Read everything back: every value is there and finite, and every region has its checksum.

    Returns the identity, a checksum of coordinates and values. It does not depend on the format, the order
    of dimensions, chunks or regions. InputError names the first region that is damaged.
    """
    url, size = args.store, args.region_days

    def read(first: int, expected: str) -> list[str]:
        with xr.open_zarr(open_store(url), consolidated=False, chunks=None) as opened:
            try:
                found = checksums(opened.isel(time=slice(first, first + size)))
                if checksum(found) != expected:
                    raise InputError("not the values that were written")
            except InputError as error:
                where = f"the region from time {first} on is damaged"
                raise InputError(f"--store {url}: {where} ({error}); remove the store") from error
        return found

    regions = root.attrs["regions"].items()
    found = gather([client.submit(read, int(first), sha, pure=False) for first, sha in regions], "verified")
    with xr.open_zarr(root.store, consolidated=False, chunks=None) as opened:
        coordinates = [sorted(opened.data_vars), *(opened[dim].values.tolist() for dim in DIMS[1:])]
    identity = checksum([coordinates, [sha for region in found for sha in region]])[:16]
    if root.attrs.get("identity", identity) != identity:
        raise InputError(f"--store {url}: its coordinates are damaged; remove the store")
    return identity


def finish(root: zarr.Group, identity: str) -> None:
    """Write the consolidated metadata, with the identity, last: whoever finds it there can trust the rest."""
    zarr.consolidate_metadata(root.store)
    zarr.open_group(root.store, mode="r+", use_consolidated=True).attrs["identity"] = identity


def describe(root: zarr.Group, args: argparse.Namespace) -> dict:
    """Print what a reader wants to know of a store, in one block, and return it."""
    arrays = [array for name, array in root.arrays() if name not in DIMS]
    shape, chunk, stored = arrays[0].shape, arrays[0].chunks, arrays[0].shards or arrays[0].chunks
    raw, size = (sum(each) for each in zip(*((array.nbytes, array.nbytes_stored()) for array in arrays)))
    cuts = [[math.ceil(n / m) for n, m in zip(shape, cut)] for cut in (chunk, stored)]
    chunks, objects = (len(arrays) * math.prod(cut) for cut in cuts)
    x, each = " x ".join, size / chunks / 1e3
    print(f"\n{args.store}: {len(arrays)} variables, {x(args.dims)} of {x(map(str, shape))}")
    print(f"  size      {raw / 1e6:.1f} MB, stored in {size / 1e6:.1f}: {raw / size:.2f} to 1")
    print(f"  chunks    {chunks} of {x(map(str, chunk))}, {each:.1f} kB each, in {objects} objects")
    print(f"  identity  {root.attrs['identity']}: every value was read back")
    figures = {"raw_bytes": raw, "bytes": size, "chunks": chunks, "objects": objects}
    return {"identity": root.attrs["identity"]} | figures


# ------------------------------------------------------------------------------------------ the command line


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags, with two more: `files`, those of --source, and `settings`, all that decides the bytes."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--store", default=os.path.relpath(HERE / "outputs/buckets/winds/small.zarr"), help="folder, or URL")
    add("--source", help="pattern of NetCDF files; without it, files are made")
    add("--days", type=int, default=396, help=f"to make, spread evenly over {DAYS} days from 1982 on")
    add("--resolution", type=float, default=1.5, help="degrees, of the files that are made")
    add("--chunk", type=int, nargs=3, default=[1, 128, 128], help="times, latitudes, longitudes")
    add("--shard-days", type=int, default=0, metavar="TIMES", help="in a shard of whole maps; 0: no shards")
    add("--zarr-format", type=int, choices=(2, 3), default=3, help="version of the format")
    add("--compression-level", type=int, default=3, help="of zstd, 1 to 9")
    bits = "bits of mantissa to keep, 1 to 22: a value changes by 2^-(N+1) of itself at most; default: all"
    add("--keep-bits", type=int, metavar="N", help=bits)
    add("--dims", nargs=3, choices=DIMS, default=DIMS, help="their order in the store")
    add("--latitude-from", choices=("south", "north"), help="where rows begin; default: as in the files")
    add("--region-days", type=int, default=36, metavar="TIMES", help="that are written, and checked, at once")
    add("--scheduler", help="address of a Dask cluster; default: one is started here")
    add("--workers", type=int, default=0, help="processes of that cluster; 0: threads of this one")
    args = parser.parse_args(argv)
    args.files = sorted(map(Path, glob.glob(args.source or "")))
    if args.scheduler and "://" not in args.store:  # as xarray does with the files: its workers are elsewhere
        args.store = os.path.abspath(args.store)
    rows = 180 / args.resolution if args.resolution > 0 else 0
    times, shard, region = args.chunk[0] or 1, args.shard_days, args.region_days
    whole = shard or times
    limits = {
        "source": (args.source is None or args.files, "no such files"),
        "days": (1 <= args.days <= DAYS, f"give 1 to {DAYS}"),
        "resolution": (18 <= rows < 1e6 and rows % 1 in (0, 1), "give degrees that divide 180, 10 at most"),
        "chunk": (min(args.chunk) >= 1, "give three numbers, at least 1"),
        "shard_days": (shard >= 0 and shard % times == 0, f"give a multiple of --chunk's {times}"),
        "region_days": (region >= 1 and region % whole == 0, f"give a multiple of {whole}"),
        "compression_level": (1 <= args.compression_level <= 9, "give 1 to 9"),
        "keep_bits": (args.keep_bits is None or 1 <= args.keep_bits <= 22, "give 1 to 22"),
        "dims": (len(set(args.dims)) == 3, "name each dimension once"),
        "workers": (args.workers >= 0, "give 0 or more"),
    }
    for name, (good, remedy) in limits.items():
        if not good:
            value = getattr(args, name)
            value = " ".join(map(str, value)) if isinstance(value, list) else value
            raise InputError(f"--{name.replace('_', '-')} {value}: {remedy}")
    if args.shard_days and args.zarr_format == 2:
        raise InputError(f"--shard-days {args.shard_days}: Zarr v2 has none; give --zarr-format 3")
    where = ("store", "scheduler", "workers", "files")
    settings = {name: value for name, value in vars(args).items() if name not in where}
    if args.source:
        # Not the content: to read all of it twice would take long.
        stamps = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in args.files]
        settings["source"] = checksum(stamps)[:16]
    args.settings = json.loads(json.dumps(settings))  # as they will be read back: no tuples
    return args


@contextmanager
def start_dask(args: argparse.Namespace) -> Iterator[Client]:
    """A client of the cluster at --scheduler or, without it, of one on this machine, for as long as needed."""
    if not args.scheduler:
        size = {"n_workers": args.workers or 1, "threads_per_worker": 1 if args.workers else os.cpu_count()}
        local = {"protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        quiet = {"processes": args.workers > 0, "silence_logs": logging.CRITICAL}
        with LocalCluster(**size, **local, **quiet) as cluster, Client(cluster) as client:
            yield client
        return
    try:
        client = Client(args.scheduler, timeout=5)
        client.wait_for_workers(1, timeout=5)
    except (OSError, ValueError) as error:
        raise InputError(f"--scheduler {args.scheduler}: no cluster with workers answers there") from error
    with client:
        yield client


def make_store(args: argparse.Namespace) -> dict:
    """Make the files, write the store, verify it; go on from wherever an earlier command was killed."""
    with start_dask(args) as client, nullcontext() if "://" in args.store else locked(Path(args.store)):
        print(f"dashboard: {client.dashboard_link}", flush=True)
        root = find_root(args)
        for path in [] if "://" in args.store else Path(args.store).rglob("*.partial"):
            if ASIDE.fullmatch(path.name):  # a kill left it in this store, which is known to be ours
                path.unlink()
        if root and "identity" in root.attrs:
            print(f"{args.store}: already whole; verifying it", flush=True)
        else:
            source = open_files(args.files or make_files(args.days, args.resolution, client), args)
            root = root or begin_root(args)
            write_regions(source, root, args, client)
        finish(root, verify(root, args, client))
        return describe(zarr.open_group(root.store, mode="r"), args)


def main(argv: list[str] | None = None) -> dict:
    """Make a store; return its identity, its sizes, and the seconds it took."""
    began = perf_counter()
    args = parse_arguments(argv)
    warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")  # of Zarr 3
    warnings.filterwarnings("ignore", "The specified chunks separate")  # regions cut across the files' chunks
    try:
        return make_store(args) | {"seconds": perf_counter() - began}
    except (OSError, BaseError) as error:  # a full disk, a bucket that refuses
        reason = f"not finished: {first_line(error)}; mend that, and the same command goes on"
        raise InputError(f"--store {args.store}: {reason}") from error


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from here")
