"""A value of each dimension that is neither time nor of the grid, chosen by --level."""

from contextlib import suppress

import numpy as np
import pandas as pd
import xarray as xr

from coordinates import DIMENSIONS
from errors import DataError
from fields import name_dimensions

MOST_LISTED = 20  # values, in a message


def select_level(dataset: xr.Dataset, names: list[str], level: str) -> xr.Dataset:
    """The values that `level` names, with a comma between those of several dimensions.

    They are in the order of the dimensions in the store. DataError if the named variables
    have no further dimension, another number of them, or no such value.
    """
    named = name_dimensions(dataset, names)
    further: dict[str, None] = {}  # an ordered set
    for variable in named.data_vars.values():
        further |= {str(dim): None for dim in variable.dims if dim not in DIMENSIONS}
    values = [level] if len(further) == 1 else level.split(",")
    if len(values) != len(further):
        listed = ", ".join(further) or "no further dimension of several values"
        reason = f"--level {level}: the variables have {listed}"
        remedy = (
            "give a value of each, with commas between" if further else "leave it out"
        )
        raise DataError(f"{reason}; {remedy}")
    chosen = {}
    for dim, value in zip(further, values):
        chosen[dim] = find_value(named[dim], value)
    return dataset.isel(chosen, drop=True)


def find_value(coordinate: xr.DataArray, text: str) -> int:
    """The position of the value that a text names; DataError if there is none."""
    for position, value in enumerate(coordinate.values):
        if is_same(value, text):
            return position
    values = [describe_value(value) for value in coordinate.values[:MOST_LISTED]]
    if coordinate.size > MOST_LISTED:
        values.append("...")
    reason = f"--level {text}: {coordinate.name} has no such value"
    raise DataError(f"{reason}; give one of {', '.join(values)}")


def is_same(value: object, text: str) -> bool:
    """Whether a text names a value: as a duration, a date or a number if both are."""
    if str(value) == text:  # a float32 may differ from what it is printed as
        return True
    with suppress(TypeError, ValueError):
        if isinstance(value, np.timedelta64):
            return pd.Timedelta(text) == value
        if isinstance(value, np.datetime64):
            return pd.Timestamp(text) == value
        return float(value) == float(text)
    return False


def describe_value(value: object) -> str:
    """As --level takes it: 6h, not nanoseconds."""
    if isinstance(value, np.timedelta64):
        hours = value / np.timedelta64(1, "h")
        return f"{hours:g}h" if hours == int(hours) else f"{60 * hours:g}min"
    return str(value)
