"""Make the two files in this folder from their public sources; nobody needs to run it to read the book.

    uv run python make_data.py monthly_navy_winds.cdf land-110m.json

- `navy_winds.nc`: the FNOC monthly winds, the same float32 values, as compressed CF NetCDF-4.
- `coastline.csv`: longitude,latitude of the world's coast, lines separated by `nan,nan`; for maps only.

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


def make_winds(source: Path, target: Path) -> None:
    """Rewrite Ferret's NetCDF-3 file as CF NetCDF-4, and check that no value has changed.

    The grid is kept as it is: latitude from -90 to 90, longitude from 20 to 377.5 degrees east.
    """
    original = xr.load_dataset(source)
    winds = (
        original[list(COMPONENTS)]
        .rename(COMPONENTS)
        .rename(TIME="time", FNOCY="latitude", FNOCX="longitude")
    )
    for name in winds.data_vars:
        winds[name].attrs = {
            "standard_name": name,
            "units": "m s-1",
            "cell_methods": "time: mean",
        }
    winds.time.attrs = {"standard_name": "time", "axis": "T"}
    winds.latitude.attrs = {
        "standard_name": "latitude",
        "units": "degrees_north",
        "axis": "Y",
    }
    winds.longitude.attrs = {
        "standard_name": "longitude",
        "units": "degrees_east",
        "axis": "X",
    }
    winds = winds.drop_encoding()
    winds.attrs = {
        "Conventions": "CF-1.11",
        "title": "FNOC monthly mean surface winds, January 1982 to December 1992, 2.5 degrees",
        "institution": "U.S. Navy Fleet Numerical Oceanography Center; distributed by NOAA/PMEL",
        "source": f"{source.name}, sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}",
        "license": "public domain (work of the United States Government)",
    }
    packing = {
        "zlib": True,
        "complevel": 9,
        "shuffle": True,
        "chunksizes": winds["eastward_wind"].shape,
    }
    encoding = {
        name: packing | {"_FillValue": np.float32("nan")} for name in winds.data_vars
    }
    encoding["time"] = {"units": "hours since 1980-01-14 14:00:00", "dtype": "float64"}
    winds.to_netcdf(target, engine="h5netcdf", encoding=encoding)

    written = xr.load_dataset(target)
    for old, new in COMPONENTS.items():
        np.testing.assert_array_equal(written[new].values, original[old].values)
    np.testing.assert_array_equal(written.time.values, original.TIME.values)


def make_coastline(source: Path, target: Path) -> None:
    """Decode the arcs of a TopoJSON file (quantised and delta-coded) to a table of points, to 0.01 degrees."""
    topology = json.loads(source.read_text())
    scale, translate = (
        np.array(topology["transform"][key]) for key in ("scale", "translate")
    )
    lines = [np.cumsum(arc, axis=0) * scale + translate for arc in topology["arcs"]]
    points = np.concatenate([np.vstack([line, [np.nan, np.nan]]) for line in lines])
    jumps = np.flatnonzero(
        np.abs(np.diff(points[:, 0])) > 180
    )  # from one edge of the map to the other
    points = np.insert(points, jumps + 1, np.nan, axis=0)
    np.savetxt(
        target,
        points,
        fmt="%.2f",
        delimiter=",",
        header="longitude,latitude",
        comments="",
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_data.py monthly_navy_winds.cdf land-110m.json")
    make_winds(Path(sys.argv[1]), HERE / "navy_winds.nc")
    make_coastline(Path(sys.argv[2]), HERE / "coastline.csv")
