"""Filled maps on this machine: a Zarr store with CF metadata, or a NetCDF file."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import dask.array
import numpy as np
import xarray as xr

from errors import DataError
from predict.maps import MapDataset

DIMS = ("time", "latitude", "longitude")
# What is written about each cell, as CF has status flags.
FLAGS = "filled"
OBSERVED, FILLED, NO_VALUE = 0, 1, 2
NOT_DONE = 127  # what Zarr reads where no map has been written
# Attributes that name other variables of the store, which are not copied.
REFERENCES = ("grid_mapping", "coordinates", "cell_measures")
FLAG_ATTRIBUTES = {
    "standard_name": "status_flag",
    "flag_values": np.array([OBSERVED, FILLED, NO_VALUE], "int8"),
    "flag_meanings": "observed filled no_value",
}


class MapStore:
    """The maps that are filled, in a Zarr store on this machine, a chunk for each."""

    def __init__(self, path: Path):
        self.path = path

    def prepare(self, maps: MapDataset, settings: str) -> None:
        """Make the store, or take the one that these settings have begun.

        DataError if there is something else. A store that is there is whole but for maps.
        """
        if self.path.exists():
            require(self.path, settings)
            # What Zarr was writing when a run was killed.
            for unfinished in self.path.rglob("*.partial"):
                unfinished.unlink()
            return
        aside = part_of(self.path)
        shutil.rmtree(aside, ignore_errors=True)
        template = self.make_template(maps, settings)
        encoding = {FLAGS: {"fill_value": NOT_DONE}}
        template.to_zarr(aside, compute=False, encoding=encoding, zarr_format=3)
        aside.rename(self.path)

    def make_template(self, maps: MapDataset, settings: str) -> xr.Dataset:
        """The maps' variables and metadata by the CF conventions, without a value."""
        fields = maps.reader.open()
        dates = fields.time[maps.period.positions]
        shape = (len(maps), *maps.tiling.shape)
        blank = dask.array.zeros(shape, dtype="float32", chunks=(1, *shape[1:]))
        variables = {}
        for name in maps.reader.variables:
            attributes = fields[name].attrs | {"ancillary_variables": FLAGS}
            for reference in REFERENCES:
                attributes.pop(reference, None)
            variables[name] = (DIMS, blank, attributes)
        variables[FLAGS] = (DIMS, blank.astype("int8"), FLAG_ATTRIBUTES)
        coordinates = {
            "time": ("time", dates.values, {"standard_name": "time", "axis": "T"}),
            "latitude": ("latitude", fields.latitude.values, axis("north", "Y")),
            "longitude": ("longitude", fields.longitude.values, axis("east", "X")),
        }
        if maps.reader.level is not None:
            coordinates["level"] = maps.reader.level
        attributes = {
            "Conventions": "CF-1.11",
            "title": "Maps whose gaps were filled by a network",
            "source": "python -m predict",
            "settings": settings,
        }
        return xr.Dataset(variables, coordinates, attributes)

    def missing(self) -> list[int]:
        """The numbers of the maps that are not there yet."""
        with xr.open_zarr(self.path, chunks=None) as dataset:
            corners = dataset[FLAGS][:, 0, 0].values
        return np.flatnonzero(corners == NOT_DONE).tolist()

    def write(self, number: int, names: list[str], values: np.ndarray, flags) -> None:
        """Write a map, (variables, H, W), and then its flags, by which it counts as done."""
        box = {"time": slice(number, number + 1)}
        maps = {name: (DIMS, values[n][None]) for n, name in enumerate(names)}
        xr.Dataset(maps).to_zarr(self.path, region=box)
        xr.Dataset({FLAGS: (DIMS, flags[None])}).to_zarr(self.path, region=box)


def axis(direction: str, letter: str) -> dict[str, str]:
    """The attributes of a coordinate in degrees."""
    name = "latitude" if letter == "Y" else "longitude"
    return {"standard_name": name, "units": f"degrees_{direction}", "axis": letter}


def part_of(path: Path) -> Path:
    """The name of what is not whole yet, or not any more."""
    return path.with_name(path.name + ".part")


def require(path: Path, settings: str) -> None:
    """DataError unless a file or store was written by these settings."""
    written_by = None
    with suppress(OSError, ValueError, KeyError):  # no store, no NetCDF
        engine = "zarr" if path.is_dir() else "h5netcdf"
        with xr.open_dataset(path, engine=engine) as dataset:
            written_by = dataset.attrs.get("settings")
    if written_by != settings:
        reason = "is there, and was not written by this command"
        raise DataError(f"--output {path}: {reason}; delete it, or give another")


def write_netcdf(store: Path, target: Path) -> None:
    """Make a NetCDF file of a whole Zarr store, and delete the store."""
    aside = part_of(target)
    with xr.open_zarr(store) as dataset:
        # JSON, in which Zarr keeps attributes, knows no int8.
        dataset[FLAGS].attrs = FLAG_ATTRIBUTES
        dataset.to_netcdf(aside, engine="h5netcdf")
    os.replace(aside, target)
    # A store that has lost some chunks must not be taken for one to go on with.
    store.rename(part_of(store))
    shutil.rmtree(part_of(store))
