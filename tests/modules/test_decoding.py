"""What attributes say of stored numbers is read as numpy reads it; what they cannot mean is refused."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from errors import DataError
from made_up_winds import COLUMNS, DIMS, ROWS, make_winds
from store import FieldReader, Location

pytestmark = [
    pytest.mark.filterwarnings("ignore:variable .* has multiple fill values"),
    pytest.mark.filterwarnings("ignore:Unable to decode time axis"),
]

MARKS = slice(3, 6), slice(7, 11)  # rows and columns of the map where no value is
RAMP = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)  # 0 to 799
STORED = {  # type, what stands there for no value, attributes, and those that xarray writes itself
    "valid_range, packed": ("int16", 32001, {"scale_factor": 0.3, "valid_range": [0, 799]}, -32767),
    "valid_range, unpacked": ("int16", 900, {"scale_factor": 0.1, "valid_range": [-0.01, 79.9]}, -32767),
    "valid_max": ("int32", 800, {"valid_max": 799}, None),
    "valid_min, and a scale below 0": ("int16", -1, {"scale_factor": -0.01, "valid_min": 0}, None),
    "valid_min in an array": (
        "int16",
        -5,
        {"valid_min": [0], "scale_factor": [0.5], "add_offset": [3.0]},
        None,
    ),
    "valid_range of unsigned numbers": ("int16", -3, {"_Unsigned": "true", "valid_range": [0, -4]}, None),
    "valid_max of unsigned numbers": ("int16", -3, {"_Unsigned": "true", "valid_max": -4}, None),
    "valid_range of floats": ("float32", 799.1, {"valid_range": [0.0, 799.0]}, None),
    "valid_max, rounded": ("float32", 1e5, {"valid_max": 799.7, "offset": 0.7}, None),
    "missing_value of another type": ("float32", -9999.9, {"missing_value": -9999.9}, None),
    "two missing values": ("float32", 1e20, {"missing_value": 1e20}, -9.0),
    "netCDF's own fill": ("int16", -32767, {"scale_factor": 0.1}, None),
    "netCDF's own fill, declared otherwise": ("int16", None, {}, -1),
}


def write(path: Path, values: np.ndarray, attributes: dict, fill: float | None) -> Path:
    """A store of `u` with these numbers and attributes, at three times."""
    winds = make_winds()[["u"]].isel(time=slice(3))
    winds["u"] = DIMS, np.stack([values] * 3), attributes
    encoding = {} if fill is None else {"_FillValue": values.dtype.type(fill)}
    if fill is None and values.dtype.kind == "f":
        encoding = {"_FillValue": None}
    winds.to_zarr(path, zarr_format=2, encoding={"u": encoding}, consolidated=True)
    return path


@pytest.mark.parametrize("kind", STORED)
def test_numbers_that_stand_for_no_value_are_missing(kind: str, tmp_path: Path) -> None:
    """And every other number is a value, to the ends of the range."""
    dtype, mark, attributes, fill = STORED[kind]
    attributes = dict(attributes)
    stored = (RAMP + attributes.pop("offset", 0)).astype(dtype)
    expected = stored * np.float64(attributes.get("scale_factor", 1)).item()
    expected += np.float64(attributes.get("add_offset", 0)).item()
    if mark is None:
        mark = -32767
        expected[MARKS] = mark
    else:
        expected[MARKS] = np.nan
    stored[MARKS] = mark
    path = write(tmp_path / "store", stored, attributes, fill)
    found = FieldReader(Location(str(path)), ["u"]).read_at_once([{"time": 1}])
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["scale_factor", "add_offset", "valid_min", "missing_value"])
def test_a_number_that_is_written_as_a_text_is_refused(name: str, tmp_path: Path) -> None:
    """xarray makes texts of all values, or scales nothing."""
    path = write(tmp_path / "store", RAMP.astype("int16"), {name: "0.1"}, None)
    with pytest.raises(DataError, match=f"u: its attribute {name} is the text '0.1'; write it as a number"):
        FieldReader(Location(str(path)), ["u"]).open()


def test_a_valid_range_of_one_number_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "store", RAMP.astype("int16"), {"valid_range": [3]}, None)
    with pytest.raises(DataError, match="u: its attribute valid_range has 1 numbers, not 2; mend it"):
        FieldReader(Location(str(path)), ["u"]).open()


@pytest.mark.parametrize(
    ("units", "remedy"),
    [
        ("months since 1982-01-01", "units of time"),
        ("hours since 0000-01-01", "calendar proleptic_gregorian"),
    ],
)
def test_times_that_are_no_dates_are_refused_with_what_helps(units: str, remedy: str, tmp_path: Path) -> None:
    """A year 0, as COADS has it, is in that calendar."""
    winds = make_winds()[["u"]].isel(time=slice(3)).assign_coords(time=[0, 700, 1500])
    winds.time.attrs["units"] = units
    winds.to_zarr(tmp_path / "store", zarr_format=2, consolidated=True)
    with pytest.raises(DataError, match=remedy):
        FieldReader(Location(str(tmp_path / "store")), ["u"]).open()
    if "calendar" in remedy:
        winds.time.attrs["calendar"] = remedy.split()[-1]
        assert xr.decode_cf(winds).time.dt.month.values.tolist() == [1, 1, 3]
