"""Patches of the winds: cut from maps, made into anomalies, covered by swaths."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xarray as xr
from torch.utils.data import Dataset

from climatology import ABSURD, NO_VALUE, Climatology
from errors import DataError
from fields import Period
from sampling import Patch, PatchSpace, sample

EVAL_SEED = 1991  # not --seed: every run is judged on the same patches


class Sample(NamedTuple):
    """A patch, and what was read there: (variables, H, W), in the variables' units."""

    patch: Patch
    values: np.ndarray


@dataclass(frozen=True)
class Grid:
    """The map's coordinates in degrees, ascending."""

    latitude: np.ndarray
    longitude: np.ndarray

    @property
    def spacing(self) -> float:
        """Degrees of longitude between two columns."""
        return self.longitude[1] - self.longitude[0]

    @property
    def wraps(self) -> bool:
        """Whether the grid is global: its last column meets the first."""
        gap = self.longitude[0] + 360 - self.longitude[-1]
        return bool(abs(gap - self.spacing) < self.spacing / 2)

    def patch_space(self, size: int) -> PatchSpace:
        """Where patches may begin; on a global grid they may cross the map's seam.

        DataError if they do not fit, or if the network cannot halve them twice.
        """
        height = len(self.latitude)
        width = len(self.longitude)
        largest = min(height, width) // 4 * 4
        if size % 4 or size > largest:
            grid = f"the grid is {height} x {width}"
            if largest < 16:
                raise DataError(f"{grid}; give a store of at least 16 x 16")
            remedy = f"give a multiple of 4 from 16 to {largest}"
            raise DataError(f"--patch-size {size}: {grid}; {remedy}")
        rows = height - size + 1
        columns = width if self.wraps else width - size + 1
        return PatchSpace(rows, columns, size)


class Reader(Protocol):
    """What a store and a file in memory have in common."""

    variables: list[str]
    times_per_chunk: int  # that are read together

    def open(self) -> xr.Dataset:
        """The variables on their coordinates; no value need be read."""

    def read(self, name: str, box: dict) -> np.ndarray:
        """A variable in a box, float32, (latitude, longitude), or (time, ...)."""

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        """All variables in each box of cells, (boxes, variables, H, W)."""


class PatchMaker:
    """Cuts patches of `size` x `size` cells from maps of a period, and makes batches of them."""

    def __init__(self, grid: Grid, period: Period, climatology: Climatology, size: int):
        self.grid = grid
        self.period = period
        self.variables = climatology.variables
        self.missing = climatology.missing
        self.mean = climatology.mean
        self.std = climatology.std[:, None, None]
        self.valid = climatology.valid[None]
        self.space = grid.patch_space(size)

    def box(self, patch: Patch) -> dict[str, int | slice | np.ndarray]:
        """The box of a patch in the store, across the map's seam if need be."""
        size = self.space.size
        width = len(self.grid.longitude)
        time = self.period.positions[patch.time]
        rows = slice(patch.row, patch.row + size)
        columns: slice | np.ndarray = slice(patch.column, patch.column + size)
        if columns.stop > width:
            columns = np.arange(columns.start, columns.stop) % width
        return {"time": time, "latitude": rows, "longitude": columns}

    def cut(self, field: np.ndarray, patch: Patch) -> np.ndarray:
        """A patch of a map (..., latitude, longitude), across the seam if need be."""
        size = self.space.size
        bottom = patch.row + size
        right = patch.column + size
        rows = field[..., patch.row : bottom, :]
        values = rows[..., patch.column : right]
        beyond = right - field.shape[-1]
        if beyond > 0:
            values = np.concatenate([values, rows[..., :beyond]], axis=-1)
        return values

    def monthly_mean(self, patch: Patch) -> np.ndarray:
        """The climatology of a patch, (variables, H, W)."""
        month = self.period.months[patch.time]
        return self.cut(self.mean[month], patch)

    def make_batch(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        """A batch of n samples, float32, zero in cells that are absent:

        input (n, variables + 1, H, W): the anomalies that are seen, and where that is;
        target (n, variables, H, W): all anomalies, over their standard deviation;
        unseen (n, 1, H, W): 1 in the cells to be filled;
        weight (n, 1, H, W): cos(latitude) in the cells to be filled, else 0.
        A cell is absent if it has no climatology. Under --missing mask it is also absent
        at a time at which a variable is missing there; else that is a DataError.
        """
        patches = [each.patch for each in samples]
        mean = np.stack([self.monthly_mean(patch) for patch in patches])
        target = np.stack([each.values for each in samples])
        # Reuses the mean's memory: to allocate takes as long as to subtract.
        target = np.subtract(target, mean, out=mean)
        target /= self.std
        if self.missing == "mask":
            present = ~np.isnan(target).any(axis=1, keepdims=True)
        else:
            present = np.stack([self.cut(self.valid, patch) for patch in patches])
        if not present.all():
            np.copyto(target, 0, where=~present)
        self.check_finite(target, patches)

        swaths = np.stack([patch.seen for patch in patches])
        seen = present & swaths[:, None]
        unseen = present & ~seen
        unseen = unseen.astype("float32")
        size = self.space.size
        inputs = np.empty((len(samples), len(self.std) + 1, size, size), "float32")
        np.multiply(target, seen, out=inputs[:, :-1])
        inputs[:, -1:] = seen
        weight = unseen * self.cell_weights(patches)
        return {"input": inputs, "target": target, "unseen": unseen, "weight": weight}

    def cell_weights(self, patches: list[Patch]) -> np.ndarray:
        """cos(latitude), the area of a cell, (n, 1, H, 1)."""
        size = self.space.size
        rows = [self.grid.latitude[patch.row : patch.row + size] for patch in patches]
        radians = np.deg2rad(np.stack(rows))
        cosine = np.cos(radians).clip(0)  # not below 0 by rounding at the poles
        return cosine.astype("float32")[:, None, :, None]

    def check_finite(self, target: np.ndarray, patches: list[Patch]) -> None:
        """DataError that names variable and date of a value that is not finite."""
        # Quick: each value is looked at only if the sum is NaN or too large.
        # `target` is over the standard deviation.
        absurd = ABSURD / max(1, self.std.max())
        with np.errstate(over="ignore"):
            if abs(target.sum()) < absurd:
                return
        bad = ~(np.abs(target) < absurd).all(axis=(2, 3))
        if bad.any():
            n, number = np.argwhere(bad)[0]
            reason = self.explain(target[n, number], patches[n], number)
            date = str(self.period.dates[patches[n].time])[:16]
            raise DataError(f"{self.variables[number]} on {date}: {reason}")

    def explain(self, target: np.ndarray, patch: Patch, number: int) -> str:
        """Why a variable's anomalies are not finite, and what to do about it."""
        if not np.isnan(target).any():
            return NO_VALUE
        mean = self.monthly_mean(patch)[number]
        valid = self.cut(self.valid[0], patch)
        if np.isnan(mean[valid]).any():
            remedy = "give --train-times that have the month in several years"
            return f"NaN, because its month has no climatology; {remedy}"
        remedy = "if the data have gaps, give --missing mask; else write it anew"
        return f"NaN: a value or a chunk is missing; {remedy}"


class PatchDataset(Dataset):
    """Patches that are addressed by (step, k), and read when they are asked for."""

    def __init__(self, maker: PatchMaker, reader: Reader, batch_size: int, seed: int):
        self.maker = maker
        self.reader = reader
        self.batch_size = batch_size
        self.seed = seed

    def patch(self, step: int, k: int) -> Patch:
        """Sample k of a step, a pure function of (seed, step, k)."""
        return sample(
            self.seed,
            step,
            k,
            batch_size=self.batch_size,
            n_times=len(self.maker.period.dates),
            space=self.maker.space,
        )

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[tuple[int, int]]) -> list[dict]:
        """The samples of a batch, read at once. What each holds: see PatchMaker.make_batch."""
        batch = self.read_batch(indices)
        separate = []
        for n in range(len(indices)):
            separate.append({name: array[n] for name, array in batch.items()})
        return separate

    def read_batch(self, indices: list[tuple[int, int]]) -> dict[str, np.ndarray]:
        """The batch of these samples, read at once: see PatchMaker.make_batch."""
        patches = [self.patch(step, k) for step, k in indices]
        boxes = [self.maker.box(patch) for patch in patches]
        values = self.reader.read_at_once(boxes)
        samples = [Sample(*each) for each in zip(patches, values)]
        return self.maker.make_batch(samples)


@dataclass(frozen=True)
class Data:
    """What all patches of a run are made of. The store is open, and no patch is read yet."""

    reader: Reader
    grid: Grid
    training: Period
    validation: Period
    test: Period
    climatology: Climatology
    units: dict[str, list[int]]  # the numbers of the variables of each unit

    def rmse(self, mean_squares: np.ndarray) -> dict[str, float]:
        """The RMSE in each unit, from the mean squared error of each variable, (variables,)."""
        pooled = {}
        for unit, numbers in self.units.items():
            pooled[unit] = float(np.sqrt(mean_squares[numbers].mean()))
        return pooled

    def climatology_shares(self) -> dict[str, float]:
        """The share of the valid cells that have a climatology, for each month of any period."""
        periods = (self.training, self.validation, self.test)
        months = np.concatenate([period.months for period in periods])
        return self.climatology.shares(np.unique(months))

    def maker(self, period: Period, size: int) -> PatchMaker:
        return PatchMaker(self.grid, period, self.climatology, size)

    def eval_patches(self, period: Period, size: int, number: int) -> PatchDataset:
        """The patches of a period that every run is judged on, whatever its seed."""
        return PatchDataset(self.maker(period, size), self.reader, number, EVAL_SEED)
