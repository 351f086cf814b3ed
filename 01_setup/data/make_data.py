"""Make the two files in this folder from their public sources. Readers need not run it.

    uv run python make_data.py monthly_navy_winds.cdf land-110m.json

- `navy_winds.nc`: the FNOC monthly winds, the same float32 values, as compressed
  CF NetCDF-4.
- `coastline.csv`: longitude,latitude of the world's coast, lines separated by `nan,nan`;
  for maps only.

Where both sources come from stands in README.md beside this script.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import xarray as xr

HERE = Path(__file__).parent
COMPONENTS = {"UWND": "eastward_wind", "VWND": "northward_wind"}
DIMENSIONS = {"TIME": "time", "FNOCY": "latitude", "FNOCX": "longitude"}
AXES = {"time": "T", "latitude": "Y", "longitude": "X"}
TITLE = "FNOC monthly mean surface winds, January 1982 to December 1992, 2.5 degrees"
CENTRE = "U.S. Navy Fleet Numerical Oceanography Center; distributed by NOAA/PMEL"
EPOCH = "hours since 1980-01-14 14:00:00"


def make_winds(source: Path, target: Path) -> None:
    """Rewrite Ferret's NetCDF-3 file as CF NetCDF-4, and check that no value has changed.

    The grid stays: latitude from -90 to 90, longitude from 20 to 377.5 degrees east.
    """
    original = xr.load_dataset(source)
    winds = original[list(COMPONENTS)].rename(COMPONENTS | DIMENSIONS)
    winds.attrs.clear()
    describe(winds, source)
    packing = {"zlib": True, "complevel": 9, "shuffle": True}
    packing["chunksizes"] = winds["eastward_wind"].shape
    packing["_FillValue"] = np.float32("nan")
    encoding = dict.fromkeys(COMPONENTS.values(), packing)
    encoding["time"] = {"units": EPOCH, "dtype": "float64"}
    winds.drop_encoding().to_netcdf(target, engine="h5netcdf", encoding=encoding)

    written = xr.load_dataset(target)
    for old, new in (COMPONENTS | {"TIME": "time"}).items():
        np.testing.assert_array_equal(written[new].values, original[old].values)


def describe(winds: xr.Dataset, source: Path) -> None:
    """Give the variables and the file CF's attributes, and the source's checksum."""
    for name in COMPONENTS.values():
        winds[name].attrs = {"standard_name": name, "units": "m s-1"}
        winds[name].attrs["cell_methods"] = "time: mean"
    for name, axis in AXES.items():
        winds[name].attrs = {"standard_name": name, "axis": axis}
    winds.latitude.attrs["units"] = "degrees_north"
    winds.longitude.attrs["units"] = "degrees_east"
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    winds.attrs["Conventions"] = "CF-1.11"
    winds.attrs["title"] = TITLE
    winds.attrs["institution"] = CENTRE
    winds.attrs["source"] = f"{source.name}, sha256 {checksum}"
    winds.attrs["license"] = "public domain (work of the United States Government)"


def make_coastline(source: Path, target: Path) -> None:
    """Decode the arcs of a TopoJSON file to a table of points, to 0.01 degrees.

    Arcs are quantised, and each point is the difference from the one before.
    """
    topology = json.loads(source.read_text())
    scale = np.array(topology["transform"]["scale"])
    origin = np.array(topology["transform"]["translate"])
    end_of_line = [[np.nan, np.nan]]
    parts = []
    for arc in topology["arcs"]:
        parts.append(np.cumsum(arc, axis=0) * scale + origin)
        parts.append(end_of_line)
    points = np.concatenate(parts)
    # A line ends where it jumps from one edge of the map to the other.
    distances = np.abs(np.diff(points[:, 0]))
    jumps = np.flatnonzero(distances > 180)
    points = np.insert(points, jumps + 1, np.nan, axis=0)
    header = "longitude,latitude"
    np.savetxt(target, points, "%.2f", ",", header=header, comments="")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_data.py monthly_navy_winds.cdf land-110m.json")
    make_winds(Path(sys.argv[1]), HERE / "navy_winds.nc")
    make_coastline(Path(sys.argv[2]), HERE / "coastline.csv")
