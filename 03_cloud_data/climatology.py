"""The mean of each month of the training times, and the spread around it."""

import math
from calendar import month_name
from dataclasses import dataclass

import numpy as np
import xarray as xr

from errors import DataError, print_note
from fields import Period

ABSURD = 1e30  # no value of nature; netCDF writes 9.97e36 where nothing was written
NO_VALUE = (
    "infinity, or netCDF's mark of no value; declare it as _FillValue, or replace it"
)

# Under --missing mask. The mean of one value would leave an anomaly of exactly 0.
LEAST_VALUES = 3


@dataclass(frozen=True)
class Climatology:
    """The mean of each month and the spread around it."""

    mean: np.ndarray  # (12, variables, latitude, longitude), NaN where there is none
    std: np.ndarray  # (variables,), of the anomalies over all valid cells
    variables: list[str]
    missing: str = "refuse"  # or "mask": cells may be absent at single times
    # (variables, latitude, longitude): where a variable had one value at all times.
    constant: np.ndarray | None = None

    @property
    def valid(self) -> np.ndarray:
        """Where every variable has a value in some month, (latitude, longitude)."""
        return ~np.isnan(self.mean).all(axis=0).any(axis=0)

    @property
    def cells(self) -> np.ndarray:
        """How many cells have a mean of every variable, (12,)."""
        has_mean = ~np.isnan(self.mean).any(axis=1)
        return has_mean.sum(axis=(1, 2))

    def shares(self, months: np.ndarray) -> dict[str, float]:
        """The share of the valid cells that have a mean, for each of these months."""
        found = self.cells[months] / self.valid.sum()
        names = [month_name[month + 1] for month in months]
        return dict(zip(names, found.tolist()))


def require_months(shares: dict[str, float]) -> None:
    """DataError if a month has no climatology at all, by Climatology.shares."""
    lacking = [month for month, share in shares.items() if not share]
    if lacking:
        reason = f"they have no {', '.join(lacking)}, but another period has"
        remedy = "give periods of the same months, or --missing mask to leave them out"
        raise DataError(f"--train-times: {reason}; {remedy}")


class MonthlySums:
    """The values of each month and cell, added up in double precision."""

    def __init__(self, variables: int, height: int, width: int):
        self.blocks = 0  # that are in the sums
        self.count = np.zeros((12, 1, height, width), "int32")
        self.total = np.zeros((12, variables, height, width))
        self.squares = np.zeros_like(self.total)
        self.lowest = np.full((variables, height, width), np.inf, "float32")
        self.highest = -self.lowest

    def add(self, values: np.ndarray, months: np.ndarray) -> None:
        """Add a block, (variables, times, H, W). A cell is present if all variables are."""
        is_missing = np.isnan(values)
        present = ~is_missing.any(axis=0)
        for month in np.unique(months):
            chosen = months == month
            here = present[chosen]
            seen = np.where(here, values[:, chosen], 0).astype("float64")
            self.count[month] += here.sum(axis=0)
            self.total[month] += seen.sum(axis=1)
            self.squares[month] += (seen**2).sum(axis=1)
        values = np.where(present, values, np.nan)
        self.lowest = np.fmin(self.lowest, np.fmin.reduce(values, axis=1))
        self.highest = np.fmax(self.highest, np.fmax.reduce(values, axis=1))
        self.blocks += 1

    def average(self, least: int, constant: str) -> tuple[np.ndarray, ...]:
        """Mean, std and constant cells, as a Climatology has them.

        A mean needs `least` values of its month. If `constant` is "mask", constant cells
        have none. DataError if no cell is left.
        """
        is_constant = (self.lowest == self.highest) & (self.count.sum(axis=0) > 1)
        enough = self.count >= least
        mean = np.full(self.total.shape, np.nan)
        np.divide(self.total, self.count, out=mean, where=enough)
        if constant == "mask":
            enough = enough & ~is_constant.any(axis=0)
            mean = np.where(enough, mean, np.nan)
        require_values(enough.any(axis=0))
        spread = self.squares - self.total * mean  # sum of the squared anomalies
        number = self.count[enough].sum()
        variance = np.nansum(spread, axis=(0, 2, 3)) / number
        std = variance.clip(0) ** 0.5
        return np.float32(mean), np.float32(std), is_constant


def average_values(
    values: np.ndarray,
    months: np.ndarray,
    variables: list[str],
    *,
    missing: str,
    constant: str,
) -> Climatology:
    """The climatology of values in memory, (times, variables, H, W)."""
    sums = MonthlySums(*values.shape[1:])
    sums.add(values.swapaxes(0, 1), months)
    mean, std, is_constant = sums.average(least_values(missing), constant)
    return Climatology(mean, std, variables, missing, is_constant)


def least_values(missing: str) -> int:
    """How many values of a month a climatology needs."""
    return LEAST_VALUES if missing == "mask" else 2


def describe_shares(shares: dict[str, float]) -> str:
    """The months in which some cells have no mean; "" if there are none."""
    low = []
    for month, share in shares.items():
        if share < 1:
            percent = math.floor(1000 * share) / 10  # not 100.0 if a cell has none
            low.append(f"{month} {percent}%")
    if not low:
        return ""
    return f"cells with a climatology: {', '.join(low)}"


def require_values(valid: np.ndarray) -> None:
    """DataError unless some cell has a value of every variable, (latitude, longitude)."""
    if not valid.any():
        reason = "no cell has values of all variables in the training times"
        raise DataError(f"--variables, --train-times: {reason}; give others")


def require_times(training: Period, span: list[str], missing: str) -> None:
    """DataError if no month has as many training times as a climatology needs."""
    least = least_values(missing)
    most = np.bincount(training.months).max()
    if most < least:
        reason = f"no month has {least} times there, as a climatology needs"
        remedy = "give a period of more years, or a store of more times"
        raise DataError(f"--train-times {' '.join(span)}: {reason}; {remedy}")


def check_climatology(
    climatology: Climatology, constant: str, fields: xr.Dataset
) -> None:
    """DataError if cells never change and `constant` is "refuse", or if a variable never does."""
    check_constant(climatology, constant, fields)
    changing = np.where(climatology.constant, 0, np.abs(climatology.mean))
    size = np.nanmax(changing, axis=(0, 2, 3))
    least = 1e-6 * size  # what rounding leaves of a constant
    for variable, std, smallest in zip(climatology.variables, climatology.std, least):
        if not std > smallest:
            reason = "in the training times it never differs from its month's mean"
            raise DataError(f"--variables {variable}: {reason}; leave it out")


def check_constant(climatology: Climatology, constant: str, fields: xr.Dataset) -> None:
    """DataError if cells never change and `constant` is "refuse"; a note if it is "mask".

    A variable that changes nowhere is left to others.
    """
    changes = ~climatology.constant.all(axis=(1, 2), where=climatology.valid)
    found = climatology.constant & changes[:, None, None]
    if constant == "mask" and found.any():
        number = climatology.constant.any(axis=0).sum()
        print_note(f"{number} cells that never change are left out")
    found &= climatology.valid
    if constant != "refuse" or not found.any():
        return
    number, row, column = np.argwhere(found)[0]
    value = np.nanmax(climatology.mean[:, number, row, column])
    share = found[number].sum() / climatology.valid.sum()
    place = f"latitude {fields.latitude.values[row]:g}"
    place += f", longitude {fields.longitude.values[column]:g}"
    reason = (
        f"{share:.1%} of its cells do not change at the training times that were read"
    )
    reason += f", such as {value:g} at {place}"
    remedy = (
        "give --constant-cells mask if that stands for no value, keep if it is real"
    )
    name = climatology.variables[number]
    raise DataError(f"--variables {name}: {reason}; {remedy}")


def check_finite(values: np.ndarray, dates: np.ndarray, variables: list[str]) -> None:
    """DataError if a value is infinite, (variables, times, H, W).

    NaN is allowed: the cell may be masked.
    """
    absurd = np.abs(values) >= ABSURD
    if absurd.any():
        number, time = np.argwhere(absurd)[0][:2]
        date = str(dates[time])[:16]
        raise DataError(f"{variables[number]} on {date}: {NO_VALUE}")
