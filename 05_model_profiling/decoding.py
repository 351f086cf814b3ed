"""From what a store holds to values in units, as CF's and netCDF's attributes say."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from errors import DataError

# What netCDF fills integers of so many bytes with until they are written; bytes have none.
DEFAULT_FILLS = {2: -32767, 4: -2147483647, 8: -9223372036854775806}
FILLS = ("_FillValue", "missing_value")
OTHERS = ("valid_range", "valid_min", "valid_max", "scale_factor", "add_offset")


def decode(stored: xr.Dataset) -> xr.Dataset:
    """Variables and coordinates in their units; no value of a variable is read.

    What is outside of a valid range is left to find_limits. DataError names the attribute
    that cannot be used.
    """
    decodable = stored.copy()
    for name, variable in decodable.variables.items():
        if variable.dtype.kind in "iuf":
            require_numbers(str(name), variable.attrs)
            match_type(variable)
    try:
        return xr.decode_cf(decodable)
    except Exception as error:  # cftime's and pandas' share no base
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        remedy = "mend its attributes, such as the units of time"
        if "reference year" in reason:
            remedy = "give time the calendar proleptic_gregorian, which has a year 0"
        raise DataError(f"{reason}; {remedy}") from error


def require_numbers(name: str, attributes: dict) -> None:
    """DataError if an attribute is a text, which xarray would pass over, or a wrong list."""
    for key in (*FILLS, *OTHERS):
        value = attributes.get(key, 0)
        if isinstance(value, str):
            reason = f"its attribute {key} is the text {value!r}"
            raise DataError(f"{name}: {reason}; write it as a number")
        numbers = 2 if key == "valid_range" else 1
        if key in attributes and key not in FILLS and np.size(value) != numbers:
            reason = f"its attribute {key} has {np.size(value)} numbers"
            raise DataError(f"{name}: {reason}, not {numbers}; mend it")


def match_type(variable: xr.Variable) -> None:
    """Give what stands for no value the variable's type.

    JSON has no single precision: a float32 never equals its missing_value of -9999.9.
    """
    for key in FILLS:
        if key in variable.attrs and variable.dtype.kind == "f":
            fill = np.asarray(variable.attrs[key])
            variable.attrs[key] = fill.astype(variable.dtype)[()]


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
    """Between which values a variable is valid; None if all are.

    As the NetCDF Users Guide has it. Integers without a fill value may hold netCDF's own.
    """
    low, high = stored.attrs.get("valid_range", (-np.inf, np.inf))
    low = attribute(stored, "valid_min", low)
    high = attribute(stored, "valid_max", high)
    has_fill = any(key in stored.attrs for key in FILLS)
    if stored.dtype.kind == "i" and not has_fill and not is_unsigned(stored):
        low = max(low, 1 + DEFAULT_FILLS.get(stored.dtype.itemsize, -np.inf))
    if (low, high) == (-np.inf, np.inf):
        return None
    return Limits(*sorted([unpack(low, stored), unpack(high, stored)]))


def attribute(stored: xr.Variable, name: str, default: float) -> int | float:
    """A number, also if it is written as an array of one."""
    return np.asarray(stored.attrs.get(name, default)).item()


def unpack(limit: int | float, stored: xr.Variable) -> float:
    """An end of the valid range in the variable's units, by xarray's own operations.

    It is packed as the values are, unless they are integers and it is not.
    """
    is_given = np.isfinite(limit)
    if is_given and stored.dtype.kind in "iu" and isinstance(limit, float):
        return limit
    if is_given and is_unsigned(stored):
        limit %= 2 ** (8 * stored.dtype.itemsize)
    scale = attribute(stored, "scale_factor", 1)
    return limit * scale + attribute(stored, "add_offset", 0)


def is_unsigned(stored: xr.Variable) -> bool:
    """Whether signed integers stand for unsigned ones, as netCDF 3 has no others."""
    return str(stored.attrs.get("_Unsigned")).lower() == "true"
