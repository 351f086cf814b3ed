"""Climatology and standard deviation of the training times, from sums of each slab."""

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import xarray as xr
from obstore.store import ObjectStore

from conversion.progress import FOLDER, load_arrays, save_arrays


class MonthSums(NamedTuple):
    """What a slab adds to a month, each (latitude, longitude)."""

    count: np.ndarray  # of values that are present
    total: np.ndarray


class SlabSums:
    """The sums of a slab of one field, a map at a time, in double precision."""

    def __init__(self) -> None:
        self.months: dict[int, MonthSums] = {}
        self.squares: np.ndarray | float = 0.0  # (latitude, longitude)

    def add(self, month: int, values: np.ndarray) -> None:
        """Add a map, (latitude, longitude)."""
        if month not in self.months:
            count = np.zeros(values.shape, "int32")
            self.months[month] = MonthSums(count, np.zeros(values.shape))
        sums = self.months[month]
        present = ~np.isnan(values)
        seen = np.where(present, values, 0).astype("float64")
        sums.count[...] += present
        sums.total[...] += seen
        self.squares = self.squares + seen**2


@dataclass
class FieldSums:
    """The sums of one field over its first slabs, always added in their order.

    They are the same bits whoever has read the slabs, and however often a command was
    killed. What is kept in the store is of whole slabs, so that an append, which fills
    the last one, goes on from there.
    """

    slabs: int  # that are in the sums, or were read and had no training times
    count: np.ndarray  # (12, latitude, longitude)
    total: np.ndarray  # (12, latitude, longitude)
    squares: np.ndarray  # (latitude, longitude)

    @classmethod
    def load(
        cls, store: ObjectStore, name: str, height: int, width: int
    ) -> "FieldSums":
        """What was kept under a name, or nothing yet."""
        arrays = load_arrays(store, name)
        if arrays is not None:
            return cls(int(arrays.pop("slabs")), **arrays)
        shape = 12, height, width
        total = np.zeros(shape)
        return cls(0, np.zeros(shape, "int32"), total, np.zeros(shape[1:]))

    def save(self, store: ObjectStore, name: str) -> None:
        """Keep the sums under a name."""
        save_arrays(store, name, vars(self))

    def add(self, slab: SlabSums) -> None:
        """Add a slab."""
        for month, sums in slab.months.items():
            self.count[month] += sums.count
            self.total[month] += sums.total
        self.squares += slab.squares


def group_name(fields: list[str], span: list[str] | None) -> str:
    """The group of a store that has the statistics of these training times."""
    name = "_".join([*fields, *(span or [])])
    if len(name) >= 200:  # a file's name may have 255 letters
        name = sha256(name.encode()).hexdigest()
    return f"statistics/{name}"


def sums_name(group: str, field: str) -> str:
    """The object that keeps a field's sums, for the statistics of a group."""
    return f"{FOLDER}/sums/{group}/{field}"


def average(
    sums: dict[str, FieldSums], coordinates: xr.Dataset, times: int
) -> xr.Dataset:
    """The climatology of each field, (month, latitude, longitude), NaN where it has none.

    In its attributes are the number of training times, and the standard deviation of the
    anomalies over valid cells: those where every field has a value at one of these times.
    """
    fields = list(sums.values())
    counts = np.stack([field.count for field in fields])
    totals = np.stack([field.total for field in fields])
    squares = np.stack([field.squares for field in fields])
    means = np.full(totals.shape, np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    spread = squares - np.nansum(totals * means, axis=1)  # sum of the squared anomalies
    valid = counts.any(axis=1).all(axis=0)
    number = counts[:, :, valid].sum(axis=(1, 2))
    variance = spread[:, valid].sum(axis=1) / number
    std = np.sqrt(variance.clip(0))  # by rounding it may be below
    grid = {dim: coordinates[dim] for dim in ("latitude", "longitude")}
    statistics = xr.Dataset(coords={"month": range(1, 13)} | grid)
    for name, mean, deviation in zip(sums, means, std):
        about = {"std": float(deviation), "times": times}
        statistics[name] = ("month", *grid), mean.astype("float32"), about
    return statistics
