"""The mean of each month of the training times, and the spread around it."""

import math
from calendar import month_name
from dataclasses import dataclass

import numpy as np

from errors import DataError

ABSURD = 1e30  # no value of nature; netCDF writes 9.97e36 where nothing was written
NO_VALUE = (
    "infinity, or netCDF's mark of no value; declare it as _FillValue, or replace it"
)


@dataclass(frozen=True)
class Climatology:
    """The mean of each month and the spread around it."""

    mean: np.ndarray  # (12, variables, latitude, longitude), NaN where there is none
    std: np.ndarray  # (variables,), of the anomalies over all valid cells
    variables: list[str]
    missing: str = "refuse"  # or "mask": cells may be absent at single times

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
        """Of the valid cells, the share that has a mean, in each of these months."""
        found = self.cells[months] / self.valid.sum()
        names = [month_name[month + 1] for month in months]
        return dict(zip(names, found.tolist()))


def find_constant(mean: np.ndarray) -> np.ndarray:
    """Where a variable has the same mean in every month, (variables, latitude, longitude).

    To the last bit: it has one value at all times, as land may have, or an unnamed fill value.
    """
    months = (~np.isnan(mean)).sum(axis=0)
    # fmax and fmin pass over months without a mean.
    same = np.fmax.reduce(mean) == np.fmin.reduce(mean)
    return same & (months > 1)


class MonthlySums:
    """The values of each month and cell, added up in double precision."""

    def __init__(self, variables: int, height: int, width: int):
        self.blocks = 0  # that are in the sums
        self.count = np.zeros((12, 1, height, width), "int32")
        self.total = np.zeros((12, variables, height, width))
        self.squares = np.zeros_like(self.total)

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
        self.blocks += 1

    def average(self, least: int, constant: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std, as a Climatology has them, of cells with `least` values in a month.

        If `constant` is "mask", without the cells of find_constant. DataError if no cell
        is left.
        """
        enough = self.count >= least
        mean = np.full(self.total.shape, np.nan)
        np.divide(self.total, self.count, out=mean, where=enough)
        if constant == "mask":
            enough = enough & ~find_constant(np.float32(mean)).any(axis=0)
            mean = np.where(enough, mean, np.nan)
        require_values(enough.any(axis=0))
        spread = self.squares - self.total * mean  # sum of the squared anomalies
        number = self.count[enough].sum()
        variance = np.nansum(spread, axis=(0, 2, 3)) / number
        std = variance.clip(0) ** 0.5
        return np.float32(mean), np.float32(std)


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
