"""Small stores of made-up winds: every 10 days of four years, 9 degrees. The first two years are to train on."""

from pathlib import Path

import numpy as np
import xarray as xr

ROWS, COLUMNS, SIZE = 20, 40, 16
DIMS = ("time", "latitude", "longitude")
MAP = (1, ROWS, COLUMNS)  # a chunk for every time
TRAINING = ("1982", "1983")
SPANS = "--train-times 1982 1983 --validation-times 1984 1984 --test-times 1985 1985".split()
LAND = (slice(5, 9), slice(10, 18))  # rows and columns


def make_winds() -> xr.Dataset:
    """u, v and a temperature without a gap, of shape (144, 20, 40)."""
    time = xr.date_range("1982-01-01", periods=144, freq="10D")
    latitude = np.linspace(-85.5, 85.5, ROWS)
    winds = xr.Dataset(coords={"time": time, "latitude": latitude, "longitude": 9.0 * np.arange(COLUMNS)})
    season = 5 * np.cos(2 * np.pi * time.day_of_year.values / 365)[:, None, None]
    rng = np.random.default_rng(0)
    for number, name in enumerate(("u", "v", "temperature")):
        noise = rng.normal(0, 2 + number, tuple(winds.sizes.values()))
        winds[name] = DIMS, (noise + season * np.cos(np.deg2rad(latitude))[:, None]).astype("float32")
        winds[name].attrs["units"] = "K" if name == "temperature" else "m s**-1"
    winds.latitude.attrs["units"], winds.longitude.attrs["units"] = "degrees_north", "degrees_east"
    return winds


def with_land(winds: xr.Dataset) -> xr.Dataset:
    """The same, but u has no value on LAND at any time."""
    masked = winds.copy(deep=True)
    masked.u[:, *LAND] = np.nan
    return masked


def with_moving_gaps(winds: xr.Dataset) -> xr.Dataset:
    """Land in u, and two clouds that drift to the east: together a tenth of all values of u and v, other ones in v."""
    row, column = np.mgrid[:ROWS, :COLUMNS]
    gappy = with_land(winds)
    for number, name in enumerate(("u", "v")):
        for time in range(winds.time.size):
            for cloud in (0, 1):
                middle = (3 * time + 20 * cloud + number) % COLUMNS
                east = (column - middle + COLUMNS // 2) % COLUMNS - COLUMNS // 2
                north = row - 6 - 8 * cloud
                gappy[name].values[time, east**2 + north**2 < 12] = np.nan
    return gappy


def write(path: Path, winds: xr.Dataset, chunks: tuple[int, ...] = MAP, **encoding: object) -> Path:
    """Write a store with these chunks, its metadata consolidated, and return its path."""
    each = {"chunks": chunks} | encoding
    winds.to_zarr(path, encoding={name: each for name in winds.data_vars}, consolidated=True)
    return path


def flags_for(store: Path, *flags: object, variables: tuple[str, ...] = ("u", "v")) -> list[str]:
    """The flags with which train.py reads such a store, keeping climatologies beside it, and these."""
    names = ["--store", store, "--variables", *variables, "--climatology-dir", store.parent / "kept"]
    return [str(flag) for flag in (*names, *SPANS, "--patch-size", SIZE, "--batch-size", 4, *flags)]


def reader_of(place: Path | str, *names: str, missing_chunks: str = "refuse", **how: object):
    """A FieldReader of these variables, of u and v if none is named. `how` is for its Location."""
    from location import Location
    from store import FieldReader

    location = Location(str(place), **how)
    return FieldReader(location, list(names or ("u", "v")), missing_chunks=missing_chunks)


def make_datamodule(flags: list[object]):
    """What train.py makes of these flags, by the modules that can be imported."""
    import task
    from command_line import make_location
    from options import parse_options

    options = parse_options("a test", [str(flag) for flag in flags])
    return task.make_datamodule(*task.make_data(options, make_location(options)))
