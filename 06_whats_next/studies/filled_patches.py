"""Patches to learn from and to be judged by, each with its fill by optimal interpolation (OI).

A patch to learn from is filled as if its year were unknown: that year is in neither
covariance nor climatology. Else its fill would be better than any that a network meets
later, and the network would learn to leave it as it is.
"""

from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from tqdm import tqdm

from data import Data, PatchDataset
from errors import DataError
from fields import Period
from interpolator import make_interpolator
from sampling import Patch
from studies.torch_interpolation import TorchInterpolator

APART = "apart"  # u is filled from u, and v from v
TOGETHER = "together"  # both from both
PLACES_A_STEP = 16  # places are samples k of steps s
Tensors = dict[str, torch.Tensor]


class Fold(NamedTuple):
    """OI by some of the training times, and all anomalies from their climatology."""

    interpolator: TorchInterpolator
    anomalies: np.ndarray  # (times, variables, latitude, longitude), over the spread


class Judge(NamedTuple):
    """The patches that every network is judged on, with the fills APART and TOGETHER."""

    samples: list[dict[str, np.ndarray]]
    patches: dict[str, Tensors]


class FilledPatches:
    """Patches of `size` x `size` cells on a device, of `places` drawn by a seed.

    Each holds the anomalies over their spread, `target` and `fill` (n, variables, H, W);
    and `seen` and the `weight` of unseen cells, (n, 1, H, W).
    """

    def __init__(
        self, data: Data, size: int, places: int, seed: int, device: torch.device
    ):
        self.data = data
        self.size = size
        self.places = places
        self.seed = seed
        self.device = device
        parts = (data.reader, data.training, data.climatology, size)
        self.anomalies = make_interpolator(*parts).anomalies
        if len(self.anomalies) < len(data.training.dates):
            raise DataError("too many training times for a study that leaves years out")
        if np.isnan(self.anomalies).any():
            raise DataError("values are missing, which this study does not provide for")
        dates = xr.DataArray(data.training.dates, dims="time")
        self.years = dates.dt.year.values
        self.made: dict[tuple[str, bool], Tensors] = {}

    def training(self, fill: str, leaves_year_out: bool) -> Tensors:
        """Patches to learn from: each place at all times of its year. Made once."""
        key = (fill, leaves_year_out)
        if key not in self.made:
            self.made[key] = self.make_training(fill, leaves_year_out)
        return self.made[key]

    def make_training(self, fill: str, leaves_year_out: bool) -> Tensors:
        folds = {}
        for year in np.unique(self.years):
            is_kept = self.years == self.years
            if leaves_year_out:
                is_kept = self.years != year
            folds[year] = self.make_fold(fill, is_kept)
        maker = self.data.maker(self.data.training, self.size)
        dataset = PatchDataset(maker, self.data.reader, PLACES_A_STEP, self.seed)
        parts = []
        for number in tqdm(range(self.places), "filling", disable=None):
            step, k = divmod(number, PLACES_A_STEP)
            patch = dataset.patch(step, k)
            year = self.years[patch.time]
            target = maker.cut(folds[year].anomalies[self.years == year], patch)
            weight = ~patch.seen * maker.cell_weights([patch])[0]
            parts.append(self.add_fill(folds[year], patch, target, weight))
        return join(parts)

    def judge(self, period: Period, number: int) -> Judge:
        """The patches that judge every run, filled by all training times."""
        dataset = self.data.eval_patches(period, self.size, number)
        samples = dataset.__getitems__([(0, k) for k in range(number)])
        patches = {}
        for fill in (APART, TOGETHER):
            fold = self.make_fold(fill, self.years == self.years)
            parts = []
            for k, sample in enumerate(samples):
                patch = dataset.patch(0, k)
                target = sample["target"][None]
                parts.append(self.add_fill(fold, patch, target, sample["weight"]))
            patches[fill] = join(parts)
        return Judge(samples, patches)

    def make_fold(self, fill: str, is_kept: np.ndarray) -> Fold:
        """By the training times that are kept, (times,)."""
        months = self.data.training.months
        change = np.zeros((12, *self.anomalies.shape[1:]), "float32")
        for month in np.unique(months):
            chosen = is_kept & (months == month)
            change[month] = self.anomalies[chosen].mean(axis=0)
        anomalies = self.anomalies - change[months]
        numbers = list(range(anomalies.shape[1]))
        groups = [numbers]
        if fill == APART:
            groups = [[number] for number in numbers]
        interpolator = TorchInterpolator(
            anomalies[is_kept], self.data.grid.wraps, self.size, groups, self.device
        )
        return Fold(interpolator, anomalies)

    def add_fill(
        self, fold: Fold, patch: Patch, target: np.ndarray, weight: np.ndarray
    ) -> Tensors:
        """A patch at some times. `target` is (times, variables, H, W), `weight` (1, H, W)."""
        fill = fold.interpolator.fill(patch.row, patch.column, patch.seen, target)
        seen = torch.from_numpy(patch.seen[None].astype("float32"))
        each_time = (len(target), -1, -1, -1)
        return {
            "target": torch.from_numpy(target).to(self.device),
            "fill": fill,
            "seen": seen.to(self.device).expand(each_time),
            "weight": torch.from_numpy(weight).to(self.device).expand(each_time),
        }


def join(parts: list[Tensors]) -> Tensors:
    """Patches one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
