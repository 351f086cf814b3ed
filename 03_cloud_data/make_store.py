"""Chapter 3: from scattered NetCDF files to a store that can be trained on from a bucket.

    uv run python make_store.py                                      # a small store, on this disk: seconds
    uv run python make_store.py --days 3650 --resolution 0.25 --store outputs/buckets/winds/large.zarr
    uv run python make_store.py --source '/data/era5/*.nc' --store s3://bucket/winds.zarr
    uv run python make_store.py --scheduler tcp://head:8786 ...      # on a Dask cluster that you have

Without --source it first makes the NetCDF files that everyone starts with: winds at ERA5's layout, from the
monthly winds of chapter 1 interpolated in space and time, with weather added whose spectrum is stated below.
Then it opens them as one dataset, writes Zarr region by region with Dask, and verifies what it wrote. Kill it
whenever you like; the same command goes on with the regions that are missing, and ends with the same bytes.
"""

import argparse
import glob
import hashlib
import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import dask
import numcodecs
import numpy as np
import xarray as xr
import zarr
from dask.distributed import Client, LocalCluster
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
TRAIN_YEARS = slice("1982", "1990")
DIMS = ("time", "latitude", "longitude")
FIRST_DAY, DAYS = datetime(1982, 1, 1), 4018  # 1982 to 1992, as in chapter 1

# Weather: a Gaussian random field, isotropic in degrees, whose power falls with the cube of the wavenumber
# (as the wind's does from some thousand to a few hundred km: Nastrom and Gage 1985,
# https://doi.org/10.1175/1520-0469(1985)042%3C0950:ACOAWS%3E2.0.CO;2) below 30 degrees, and none above.
WEATHER_RMS, WEATHER_DEGREES, WEATHER_SLOPE, WEATHER_STREAM = 2.0, 30.0, -3.0, 4


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


# ------------------------------------------------------------------------- the files everyone starts with


def weather(day: int, latitudes: int, longitudes: int, resolution: float) -> np.ndarray:
    """Small-scale wind of a day, (2, latitude, longitude) in m/s: the same on whichever worker makes it."""
    white = np.random.default_rng((WEATHER_STREAM, day)).standard_normal((2, latitudes, longitudes), "f4")
    per_degree = np.hypot(
        np.fft.fftfreq(latitudes, resolution)[:, None], np.fft.rfftfreq(longitudes, resolution)
    )
    with np.errstate(divide="ignore"):
        # power in a ring of wavenumbers ~ k**slope, so power in a mode ~ k**(slope - 1), its root the amplitude
        amplitude = np.where(per_degree >= 1 / WEATHER_DEGREES, per_degree ** ((WEATHER_SLOPE - 1) / 2), 0)
    field = np.fft.irfft2(np.fft.rfft2(white) * amplitude, s=(latitudes, longitudes))
    return (WEATHER_RMS * field / field.std()).astype("float32")


def winds_of(day: int, resolution: float, monthly: xr.Dataset) -> xr.Dataset:
    """The winds of a day at ERA5's layout: latitude from north to south, longitude from 0."""
    time = np.datetime64(FIRST_DAY + timedelta(days=day), "ns")
    latitude = np.linspace(90, -90, round(180 / resolution) + 1)
    longitude = np.arange(round(360 / resolution)) * resolution
    middle = monthly.time + np.timedelta64(15, "D")
    smooth = monthly.assign_coords(time=middle).interp(time=time, kwargs={"fill_value": "extrapolate"})
    smooth = smooth.interp(latitude=latitude, longitude=longitude, kwargs={"fill_value": "extrapolate"})
    added = weather(day, len(latitude), len(longitude), resolution)
    fields = {
        NAMES[name]: (DIMS, (smooth[name].values + part).astype("float32")[None], {"units": "m s**-1"})
        for name, part in zip(NAMES, added)
    }
    return xr.Dataset(fields, {"time": [time], "latitude": latitude, "longitude": longitude})


def open_monthly() -> xr.Dataset:
    """Chapter 1's winds, padded by a column on each side so that interpolation crosses the seam."""
    monthly = xr.load_dataset(MONTHLY)[list(NAMES)].astype("float32")
    monthly = monthly.assign_coords(longitude=monthly.longitude % 360).sortby("longitude").sortby("latitude")
    padded = monthly.pad(longitude=1, mode="wrap")
    ends = [monthly.longitude.values[-1] - 360, *monthly.longitude.values, monthly.longitude.values[0] + 360]
    return padded.assign_coords(longitude=ends)


def write_files(days: np.ndarray, resolution: float, folder: Path) -> list[Path]:
    """Make the NetCDF files, one for each month that has days, unless they are there; in parallel, with Dask."""
    months: dict[str, list[int]] = {}
    for day in days.tolist():
        months.setdefault(f"{FIRST_DAY + timedelta(days=day):%Y-%m}", []).append(day)

    @dask.delayed
    def write(name: str, days: list[int]) -> None:
        monthly = open_monthly()
        month = xr.concat([winds_of(day, resolution, monthly) for day in days], "time", data_vars="minimal")
        encoding = {
            name: {"zlib": True, "complevel": 1, "chunksizes": (1, *month[name].shape[1:])} for name in month
        }
        write_aside(folder / name, lambda aside: month.to_netcdf(aside, engine="h5netcdf", encoding=encoding))

    folder.mkdir(parents=True, exist_ok=True)
    files = {f"winds_{month}.nc": part for month, part in months.items()}
    dask.compute(*(write(name, part) for name, part in files.items() if not (folder / name).exists()))
    return [folder / name for name in files]


def write_aside(path: Path, write) -> None:
    """Let `write` fill another file, then rename it: a kill never leaves half a file that looks whole."""
    aside = path.with_name(f"part-{path.name}")
    write(aside)
    os.replace(aside, path)


# ---------------------------------------------------------------------------------------- from files to Zarr


def open_files(files: list[Path]) -> xr.Dataset:
    """Open many files as one dataset, lazily, and fast.

    The arguments say what is known of the files: they follow each other in time, and have the same grid.
    Without them, xarray compares every coordinate of every file.
    """
    known = {"combine": "nested", "concat_dim": "time", "data_vars": "minimal", "coords": "minimal"}
    return xr.open_mfdataset(files, compat="override", join="override", parallel=True, chunks={}, **known)


def checksum(region: xr.Dataset) -> str:
    """SHA-256 of a region's values, variable by variable."""
    found = hashlib.sha256()
    for name in sorted(region.data_vars):
        found.update(np.ascontiguousarray(region[name].transpose(*DIMS).values))
    return found.hexdigest()


def encoding_of(source: xr.Dataset, args: argparse.Namespace) -> dict:
    """How each variable is cut, compressed and, if asked for, put into shards."""
    shape = tuple(source.sizes[dim] for dim in DIMS)
    chunks = tuple(min(size, length) for size, length in zip(args.chunk, shape))
    common = {"chunks": chunks, "fill_value": np.float32(np.nan)}
    if args.zarr_format == 2:
        compressor = numcodecs.Blosc("zstd", args.compression_level, numcodecs.Blosc.BITSHUFFLE)
        return {name: common | {"compressors": compressor} for name in source.data_vars}
    codec = BloscCodec(cname="zstd", clevel=args.compression_level, shuffle="bitshuffle")
    if args.shard_days:
        whole = (-(-length // chunk) * chunk for length, chunk in zip(shape[1:], chunks[1:]))
        common["shards"] = (args.shard_days, *whole)
    return {name: common | {"compressors": codec} for name in source.data_vars}


def write_store(source: xr.Dataset, url: str, args: argparse.Namespace) -> None:
    """Write what is missing of a store, a region of times after another, each in parallel with Dask.

    The root's attributes say which regions are whole, with the checksum of each. They are written last, so a
    kill leaves a region that is written again and never one that is taken for whole.
    """
    store = open_zarr_store(url, args)
    try:
        root = zarr.open_group(store, mode="r+")
        done = dict(root.attrs["regions"])
    except (FileNotFoundError, KeyError):
        encoding = encoding_of(source, args)
        source.to_zarr(
            store,
            mode="w",
            compute=False,
            encoding=encoding,
            zarr_format=args.zarr_format,
            consolidated=False,
        )
        root, done = zarr.open_group(store, mode="r+"), {}
        root.attrs["regions"] = {}
    size = args.region_days
    for first in tqdm(range(0, source.sizes["time"], size), "regions", unit="region"):
        if str(first) in done:
            continue
        region = source.isel(time=slice(first, first + size)).drop_vars(("latitude", "longitude"))
        region = region.chunk({"time": size, "latitude": -1, "longitude": -1}).persist()
        region.to_zarr(
            store, region={"time": slice(first, first + size)}, safe_chunks=True, consolidated=False
        )
        done[str(first)] = checksum(region)
        root.attrs["regions"] = done


def open_zarr_store(url: str, args: argparse.Namespace) -> str | ObjectStore:
    """A folder's path, or an object store behind a URL, with credentials from the usual places."""
    if "://" not in url:
        return url
    return ObjectStore(from_url(url, client_options={"allow_http": True}))


def write_statistics(store: str | ObjectStore, zarr_format: int) -> None:
    """Keep with the store what training needs of the training years: mean, standard deviation, climatology."""
    winds = xr.open_zarr(store, consolidated=False).to_dataarray("component").sel(time=TRAIN_YEARS)
    found = {
        "mean": winds.mean(DIMS),
        "std": winds.std(DIMS),
        "climatology": winds.groupby("time.month").mean("time"),
    }
    statistics = xr.Dataset(found).compute().astype("float32")
    statistics.to_zarr(store, group="statistics", mode="w", zarr_format=zarr_format, consolidated=False)


def verify(store: str | ObjectStore, args: argparse.Namespace) -> str:
    """Read everything back: every chunk is there, no value is missing, every region has its checksum.

    Returns the store's identity, a checksum of the checksums. InputError names the first region that differs.
    """
    dataset, root = xr.open_zarr(store, consolidated=False), zarr.open_group(store, mode="r")
    for name in dataset.data_vars:
        array = root[name]
        if array.nchunks_initialized != (whole := array._nshards if array.shards else array.nchunks):
            raise InputError(
                f"--store {args.store}: {name} has {array.nchunks_initialized} of {whole} chunks"
            )
    regions = root.attrs["regions"]
    for first, expected in tqdm(regions.items(), "verified", unit="region"):
        region = dataset.isel(time=slice(int(first), int(first) + args.region_days)).compute()
        if not all(np.isfinite(region[name]).all() for name in region) or checksum(region) != expected:
            raise InputError(f"--store {args.store}: the region of time {first} is damaged; remove the store")
    return hashlib.sha256(json.dumps(regions, sort_keys=True).encode()).hexdigest()[:16]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--store", default=os.path.relpath(HERE / "outputs/buckets/winds/small.zarr"), help="where to write")
    add("--source", help="pattern of NetCDF files; without it, files are made")
    add("--days", type=int, default=396, help=f"spread evenly over {DAYS} days from 1982 on")
    add("--resolution", type=float, default=1.0, help="degrees")
    add("--chunk", type=int, nargs=3, default=(1, 128, 128), help="times, latitudes, longitudes")
    add("--shard-days", type=int, default=0, help="times in a shard, which spans the map; 0: no shards")
    add("--zarr-format", type=int, choices=(2, 3), default=3, help="version of the format")
    add("--compression-level", type=int, default=3, help="of zstd")
    add("--region-days", type=int, default=36, help="times that are written, and checked, at once")
    add("--scheduler", help="address of a Dask cluster; without it, one is started here")
    add("--workers", type=int, default=os.cpu_count(), help="processes of that cluster")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    """Make the files, write the store, verify it; return its identity and size."""
    args = parse_arguments(argv)
    cluster = args.scheduler or LocalCluster(args.workers, threads_per_worker=1, dashboard_address=":0")
    with Client(cluster) as client:
        print(f"dashboard: {client.dashboard_link}")
        if args.source:
            files = sorted(map(Path, glob.glob(args.source)))
        else:
            days = np.unique(np.linspace(0, DAYS - 1, args.days).astype(int))
            folder = HERE / f"outputs/files/{args.days}_days_{args.resolution:g}_degrees"
            files = write_files(days, args.resolution, folder)
        if not files:
            raise InputError(f"--source {args.source}: no such files")
        write_store(open_files(files), args.store, args)
        store = open_zarr_store(args.store, args)
        identity = verify(store, args)
        write_statistics(store, args.zarr_format)
        root = zarr.open_group(store, mode="r+")
        root.attrs["identity"] = identity
        zarr.consolidate_metadata(store)
    if not args.scheduler:
        cluster.close()
    print(f"{args.store}: whole, identity {identity}")
    return {"identity": identity}


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
