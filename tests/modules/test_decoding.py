"""What attributes say of stored numbers is read as numpy reads it; what they cannot mean is refused."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from errors import DataError
from location import Location
from made_up_winds import COLUMNS, DIMS, ROWS, make_winds
from store import FieldReader

pytestmark = [
    pytest.mark.filterwarnings("ignore:variable .* has multiple fill values"),
    pytest.mark.filterwarnings("ignore:Unable to decode time axis"),
]

MARKS = slice(3, 6), slice(7, 11)  # rows and columns of the map where no value is
RAMP = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)  # 0 to 799
SINGLE = float(np.float32(239.7))  # a little below the packed 799
STORED = {  # type, what stands there for no value, attributes, and those that xarray writes itself
    "valid_range, packed": ("int16", 32001, {"scale_factor": 0.3, "valid_range": [0, 799]}, -32767),
    "valid_range, unpacked": ("int16", 900, {"scale_factor": 0.3, "valid_range": [0.0, SINGLE]}, -32767),
    "valid_min, unpacked, and a scale below 0": (
        "int16",
        900,
        {"scale_factor": -0.3, "valid_min": -239.7},
        None,
    ),
    "valid_range in texts": ("float32", 900, {"valid_range": ["0", "799"]}, None),
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
    "missing_value of unsigned numbers": ("int16", -1, {"_Unsigned": "true", "missing_value": -1}, None),
    "missing_value as a text": ("float32", -9999.9, {"missing_value": "-9999.9"}, None),
    "a whole scale": ("int16", -9, {"scale_factor": 2}, -9),
    "two missing values": ("float32", 1e20, {"missing_value": 1e20}, -9.0),
    "netCDF's own fill": ("int16", -32767, {"scale_factor": 0.1}, None),
    "netCDF's own fill, and a range": ("int16", -32767, {"scale_factor": 0.5, "valid_max": 1e3}, None),
    "netCDF's own fill, and a scale below 0": ("int16", -32767, {"scale_factor": -0.5}, None),
    "netCDF's own fill, and a missing value": ("int16", -32767, {"missing_value": -9}, None),
    "netCDF's own fill of unsigned numbers": ("uint16", 65535, {"scale_factor": 0.5}, None),
    "another fill than netCDF's": ("int16", None, {}, -1),
    "a range left over from packed values": ("float32", None, {"valid_range": [0, 250]}, None),
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
        mark = -327
        expected[MARKS] = mark
    else:
        expected[MARKS] = np.nan
    stored[MARKS] = mark
    path = write(tmp_path / "store", stored, attributes, fill)
    found = FieldReader(Location(str(path)), ["u"]).read_at_once([{"time": 1}])
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-6)


UNUSABLE = {
    "text": (
        {"scale_factor": "thousandths"},
        "u: its attribute scale_factor is 'thousandths'; write a number",
    ),
    "null": ({"valid_min": None}, "u: its attribute valid_min is None; write a number"),
    "one end": ({"valid_range": [3]}, r"u: its attribute valid_range is \[3\]; write two numbers"),
    "texts": ({"valid_range": ["a", "b"]}, "u: its attribute valid_range is .*; write two numbers"),
    "two scales": ({"add_offset": [1, 2]}, r"u: its attribute add_offset is \[1, 2\]; write a number"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_attribute_that_must_be_a_number_is_refused_by_name(case: str, tmp_path: Path) -> None:
    """xarray makes texts of all values, or scales nothing."""
    attributes, message = UNUSABLE[case]
    path = write(tmp_path / "store", RAMP.astype("int16"), attributes, None)
    with pytest.raises(DataError, match=message):
        FieldReader(Location(str(path)), ["u"]).open()


def test_attributes_of_other_variables_do_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "store", RAMP.astype("float32"), {}, None)
    others = xr.Dataset({"flag": ("time", np.arange(3.0), {"valid_min": "low"})})
    others["since"] = "time", np.arange(3), {"units": "months since 1982-01-01"}
    others.to_zarr(path, mode="a", zarr_format=2, consolidated=True)
    found = FieldReader(Location(str(path)), ["u"]).read_at_once([{"time": 1}])
    np.testing.assert_array_equal(found[0, 0], RAMP)


def test_a_range_that_is_not_used_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "store", RAMP.astype("float32"), {"valid_range": [0, 250]}, None)
    reader = FieldReader(Location(str(path)), ["u"])
    reader.open()
    assert reader.notes == ["u: its valid range is of whole numbers, as packed values have, and is not used"]


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
