"""Made-up winds at ERA5's layout: chapter 1's monthly winds, and weather added to them."""

import math
import os
from functools import lru_cache
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import xarray as xr
from filelock import FileLock
from scipy import fft
from tqdm import tqdm

MONTHLY = Path(__file__).parent.parent / "01_setup/data/navy_winds.nc"
NAMES = {  # ERA5's names of the wind's components, 10 m above the surface
    "eastward_wind": "10m_u_component_of_wind",
    "northward_wind": "10m_v_component_of_wind",
}
FIRST_DAY = np.datetime64("1982-01-01", "ns")
DAYS = 4018  # to the end of 1992, as in chapter 1
DAYS_AT_ONCE = 8  # that are made in one piece
# Weather is a Gaussian random field, isotropic in degrees. Below 30 degrees its power falls
# with the cube of the wavenumber, as the wind's does from some thousand to a few hundred km
# (Nastrom and Gage 1985,
# https://doi.org/10.1175/1520-0469(1985)042%3C0950:ACOAWS%3E2.0.CO;2). Above, it has none.
RMS = 2.0  # m/s
LARGEST = 30.0  # degrees
SLOPE = -3.0
STREAM = 4  # of random numbers


def make_files(folder: Path, n_days: int, resolution: float) -> list[Path]:
    """Make the NetCDF files that are missing, one a year.

    The days are spread evenly over 1982 to 1992. `resolution` is in degrees.
    """
    folder = folder / f"{n_days}_days_{resolution:g}_degrees"
    folder.mkdir(parents=True, exist_ok=True)
    days = np.linspace(0, DAYS - 1, n_days).astype("timedelta64[D]")
    years = (FIRST_DAY + days).astype("datetime64[Y]")
    files = {year: folder / f"winds_{year}.nc" for year in np.unique(years)}
    with FileLock(folder / ".lock"):
        missing = {year: path for year, path in files.items() if not path.exists()}
        monthly = read_monthly() if missing else None
        for year, path in tqdm(missing.items(), "files", disable=None):
            partial = path.with_name(f".part-{path.name}")
            winds = make_year(days[years == year], resolution, monthly)
            winds.to_netcdf(partial, engine="h5netcdf")
            os.replace(partial, path)  # whole whenever it is there
    return list(files.values())


def read_monthly() -> xr.DataArray:
    """Chapter 1's winds, (component, time, latitude, longitude), without a seam."""
    monthly = xr.load_dataset(MONTHLY)[list(NAMES)]
    monthly = monthly.to_dataarray("component").transpose("component", ...)
    monthly = monthly.assign_coords(longitude=monthly.longitude % 360)
    monthly = monthly.sortby("longitude")
    around = [*monthly.longitude.values, 360]  # longitude 0 again
    monthly = monthly.pad(longitude=(0, 1), mode="wrap")
    return monthly.assign_coords(longitude=around)


def make_year(days: np.ndarray, resolution: float, monthly: xr.DataArray) -> xr.Dataset:
    """The winds of these days after FIRST_DAY, computed when they are written."""
    rows = round(180 / resolution)
    latitude = np.linspace(90, -90, rows + 1)
    longitude = np.arange(2 * rows) * resolution
    grid = {"latitude": latitude, "longitude": longitude}
    make = dask.delayed(make_winds)
    parts = []
    pieces = math.ceil(len(days) / DAYS_AT_ONCE)
    for part in np.array_split(days, pieces):
        shape = (2, len(part), rows + 1, 2 * rows)
        winds = make(part, grid, monthly)
        parts.append(da.from_delayed(winds, shape, "float32"))
    winds = da.concatenate(parts, axis=1)
    year = xr.Dataset(coords={"time": FIRST_DAY + days} | grid)
    for name, wind in zip(NAMES.values(), winds):
        year[name] = ("time", *grid), wind, {"units": "m s**-1"}
    return year


def make_winds(
    days: np.ndarray, grid: dict[str, np.ndarray], monthly: xr.DataArray
) -> np.ndarray:
    """Monthly winds and weather, (2, time, latitude, longitude), float32."""
    # Before the first month and after the last one, they are held.
    first, last = monthly.time.values[[0, -1]]
    times = (FIRST_DAY + days).clip(first, last)
    rows, columns = (len(values) for values in grid.values())
    resolution = 180 / (rows - 1)
    added = []
    for day in days.astype(int):
        added.append(make_weather(day, rows, columns, resolution))
    winds = monthly.interp(time=times, **grid).values
    winds += np.stack(added, axis=1)
    return winds.astype("float32")


def make_weather(
    day: int, latitudes: int, longitudes: int, resolution: float
) -> np.ndarray:
    """Small-scale wind of a day, (2, latitude, longitude) in m/s: the same in every run."""
    rows = fft.next_fast_len(latitudes, real=True)  # 181 is prime, thus slow
    shape = rows, longitudes
    rng = np.random.default_rng((STREAM, day))
    white = rng.standard_normal((2, *shape), "float32")
    modes = fft.rfft2(white) * find_amplitude(*shape, resolution)
    field = fft.irfft2(modes, s=shape)
    return (RMS / field.std() * field)[:, :latitudes]


@lru_cache(maxsize=1)
def find_amplitude(rows: int, columns: int, resolution: float) -> np.ndarray:
    """The amplitude of each mode, (rows, columns // 2 + 1).

    The power in a ring of wavenumbers k is k**SLOPE, and in a mode k**(SLOPE - 1).
    """
    along_rows = fft.fftfreq(rows, resolution)
    per_degree = np.hypot(along_rows[:, None], fft.rfftfreq(columns, resolution))
    per_degree[per_degree < 1 / LARGEST] = np.inf
    return (per_degree ** ((SLOPE - 1) / 2)).astype("float32")
