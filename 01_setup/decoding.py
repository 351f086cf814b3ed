"""From what a store holds to values in units, as CF's and netCDF's attributes say."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from errors import DataError, first_line
from remedies import find_remedy

# What netCDF fills integers with until they are written; bytes have none.
DEFAULT_FILLS = {
    "i2": -32767,
    "i4": -2147483647,
    "i8": -9223372036854775806,
    "u2": 2**16 - 1,
    "u4": 2**32 - 1,
    "u8": 2**64 - 2,
}
FILLS = ("_FillValue", "missing_value")
LIMITS = ("valid_range", "valid_min", "valid_max")
SCALES = ("scale_factor", "add_offset")


def decode(stored: xr.Dataset, names: list[str]) -> xr.Dataset:
    """The named variables and all coordinates in their units; no value of a variable is read.

    A valid range is left to find_limits. DataError names the attribute
    that cannot be used.
    """
    decodable = stored.copy()
    for name, variable in decodable.variables.items():
        if name in names and variable.dtype.kind in "iuf":
            variable.attrs |= read_numbers(str(name), variable.attrs)
            match_type(variable)
    others = set(stored.data_vars) - set(names)
    try:
        return xr.decode_cf(decodable, drop_variables=others)
    except DataError:
        raise
    except Exception as error:  # cftime's and pandas' share no base
        remedy = find_remedy(error)
        if "decode time" in str(error):
            error = error.__cause__ or error
            remedy = "mend its attributes, such as the units of time"
        if "reference year" in str(error):
            remedy = "give time the calendar proleptic_gregorian, which has a year 0"
        raise DataError(f"{first_line(error)}; {remedy}") from error


def read_numbers(name: str, attributes: dict) -> dict[str, np.ndarray]:
    """The attributes that must be numbers, also if they are written as texts.

    DataError if they are none: xarray would scale nothing, and not say so.
    """
    numbers = {}
    for key in (*FILLS, *LIMITS, *SCALES):
        if key not in attributes:
            continue
        value = np.asarray(attributes[key])
        if value.dtype.kind == "U":
            try:
                value = value.astype("float64")
            except ValueError:
                pass  # no number, as is said below
        size = 2 if key == "valid_range" else 1
        if value.dtype.kind not in "iuf" or (key not in FILLS and value.size != size):
            reason = f"its attribute {key} is {attributes[key]!r}"
            wanted = "two numbers" if size == 2 else "a number"
            raise DataError(f"{name}: {reason}; write {wanted}")
        numbers[key] = value.squeeze()[()]
        if key in SCALES:  # xarray scales by an integer in integers, which have no NaN
            numbers[key] = float(numbers[key])
    return numbers


def match_type(variable: xr.Variable) -> None:
    """Give what stands for no value the variable's type.

    JSON has no single precision: a float32 never equals its missing_value of -9999.9.
    """
    for key in FILLS:
        if key not in variable.attrs:
            continue
        fill = np.asarray(variable.attrs[key])
        if variable.dtype.kind == "f":
            variable.attrs[key] = fill.astype(variable.dtype)[()]
        elif key == "missing_value" and is_unsigned(variable):
            # xarray makes the values unsigned, and this one only as _FillValue.
            unsigned = fill.astype(variable.dtype).astype(f"u{variable.dtype.itemsize}")
            variable.attrs[key] = unsigned[()]


@dataclass(frozen=True)
class Limits:
    """The values between which a variable is valid, in its units."""

    low: float
    high: float

    def mask(self, values: np.ndarray) -> np.ndarray:
        """The values, with NaN in the place of those that are not valid."""
        invalid = (values < self.low) | (values > self.high)
        return np.where(invalid, np.nan, values) if invalid.any() else values


def find_limits(stored: xr.Variable) -> Limits | None:
    """The limits within which a variable is valid, or None, by the NetCDF Users Guide.

    Integers without a _FillValue may hold netCDF's own.
    A range that is_left_over is not used.
    """
    numbers = read_numbers("", stored.attrs)
    scale = numbers.get("scale_factor", 1.0)
    offset = numbers.get("add_offset", 0.0)
    low, high = numbers.get("valid_range", (-np.inf, np.inf))
    low = numbers.get("valid_min", low)
    high = numbers.get("valid_max", high)
    is_integer = stored.dtype.kind in "iu"
    if is_left_over(stored):
        low, high = -np.inf, np.inf
    if is_unsigned(stored):
        low, high = (to_unsigned(limit, stored) for limit in (low, high))
    if not is_integer or not has_parts(low, high):  # packed as the values are
        low, high = sorted([low * scale + offset, high * scale + offset])
    beyond_fill = sorted(limit * scale + offset for limit in limits_of_fill(stored))
    low = max(low, beyond_fill[0])
    high = min(high, beyond_fill[1])
    if (low, high) == (-np.inf, np.inf):
        return None
    # An end may have been written in single precision.
    margin = abs(scale) / 2 if is_integer else 0.0
    return Limits(float(low) - margin, float(high) + margin)


def limits_of_fill(stored: xr.Variable) -> tuple[float, float]:
    """The packed values short of netCDF's own fill, if the variable may hold that fill."""
    fill = DEFAULT_FILLS.get(stored.dtype.str[1:])
    if fill is None or "_FillValue" in stored.attrs or is_unsigned(stored):
        return -np.inf, np.inf
    if fill < 0:
        return fill + 1, np.inf
    return -np.inf, fill - 1


def is_left_over(stored: xr.Variable) -> bool:
    """Whether the range is that of packed integers, from which floats have been made."""
    given = [stored.attrs[key] for key in LIMITS if key in stored.attrs]
    are_whole = [np.asarray(limit).dtype.kind in "iu" for limit in given]
    return stored.dtype.kind == "f" and any(are_whole)


def explain_limits(name: str, stored: xr.Variable) -> str | None:
    """That a range is not used, if that is so."""
    if not is_left_over(stored):
        return None
    reason = "its valid range is of whole numbers, as packed values have"
    return f"{name}: {reason}, and is not used"


def has_parts(*limits: float) -> bool:
    """Whether one of the limits was given as no whole number: those of integers are whole."""
    given = [limit for limit in limits if np.isfinite(limit)]
    return any(np.asarray(limit).dtype.kind == "f" for limit in given)


def to_unsigned(limit: float, stored: xr.Variable) -> float:
    """A limit as the unsigned number of the same bits; infinity as it is."""
    if not np.isfinite(limit):
        return limit
    return int(limit) % 2 ** (8 * stored.dtype.itemsize)


def is_unsigned(stored: xr.Variable) -> bool:
    """Whether signed integers stand for unsigned ones, as netCDF 3 has no others."""
    return str(stored.attrs.get("_Unsigned")).lower() == "true"
