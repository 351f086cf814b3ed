"""Whole maps for a trained network: what is known of each, and its gaps filled."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from checkpoints import CheckpointError
from climatology import Climatology, check_finite, load_climatology
from data import Grid
from errors import DataError
from fields import Period, group_by_unit, split_times
from model import FillGaps
from run_record import RunRecord
from sampling import swath_masks
from store import FieldReader
from tiles import Tiling

SWATH_STREAM = 6  # of random numbers


class MapFiller(FillGaps):
    """The trained network, which fills all patches of a map."""

    patches_at_once = 32

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        parts = batch["patches"].split(self.patches_at_once)
        return torch.cat([self.model(part) for part in parts])


def load_model(path: Path) -> tuple[MapFiller, dict]:
    """The network of a checkpoint, and its run's record; CheckpointError if it has none."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = MapFiller(**saved["hyper_parameters"])
        model.load_state_dict(saved["state_dict"])
        return model, saved["callbacks"][RunRecord.state_key]
    except OSError as error:
        raise CheckpointError(f"{error.strerror}; give a checkpoint") from error
    except Exception as error:  # torch raises many kinds, depending on the bytes
        reason = f"is no checkpoint of this chapter ({type(error).__name__})"
        raise CheckpointError(f"{reason}; give one that train.py wrote") from error


class MapDataset(Dataset):
    """What is known of each map of a period, and the network's input in patches.

    If `seed` is not None, only what lies in simulated swaths counts as known.
    """

    def __init__(
        self,
        reader: FieldReader,
        period: Period,
        climatology: Climatology,
        std: np.ndarray,
        tiling: Tiling,
        seed: int | None,
    ):
        self.reader = reader
        self.period = period
        self.mean = climatology.mean
        self.std = std
        self.tiling = tiling
        self.seed = seed

    def __len__(self) -> int:
        return len(self.period.positions)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Map `number` of the period:

        values and mean (variables, H, W): as in the store, and the month's climatology;
        seen (H, W): where all variables are known;
        patches (patches, variables + 1, size, size): the network's input.
        """
        position = self.period.positions[[number]]
        values = self.reader.read_at_once([{"time": position[0]}])[0]
        check_finite(values[:, None], position, self.reader)
        mean = self.mean[self.period.months[number]]
        anomaly = (values - mean) / self.std
        seen = ~np.isnan(anomaly).any(axis=0)
        if self.seed is not None:
            seen &= self.swaths(int(position[0]))
        known = np.where(seen, anomaly, 0)
        inputs = np.concatenate([known, seen[None]]).astype("float32")
        patches = self.tiling.cut(inputs)
        parts = {"values": values, "mean": mean, "seen": seen, "patches": patches}
        return {"number": number, **parts}

    def swaths(self, position: int) -> np.ndarray:
        """Where a satellite would look at a time of the store, (H, W)."""
        rng = np.random.default_rng((SWATH_STREAM, self.seed, position))
        height, width = self.tiling.shape
        return swath_masks(rng, 1, max(height, width))[0, :height, :width]

    def fill(self, known: dict[str, Any], prediction: np.ndarray) -> np.ndarray:
        """A whole map, (variables, H, W): what is seen, and the network's answer elsewhere.

        NaN where there is no climatology. `prediction` has the patches of map `known`.
        """
        filled = known["mean"] + self.std * self.tiling.join(prediction)
        return np.where(known["seen"], known["values"], filled)


def make_maps(
    reader: FieldReader,
    training: FieldReader,
    times: tuple[str, str],
    model: MapFiller,
    record: dict,
    overlap: int,
    seed: int | None,
) -> MapDataset:
    """The maps of a store's `times`, for a network with the climatology of its `training`.

    DataError if the store has other units, or another grid than the training's.
    """
    options = record["options"]
    fields = reader.open()
    units = group_by_unit(fields, options["variables"])
    if units != model.hparams.units:
        reason = f"its units are {list(units)}, and not {list(model.hparams.units)}"
        raise DataError(f"--store: {reason}, as in training; give one of these units")
    trained_on = training.open()
    for dim in ("latitude", "longitude"):
        if not np.array_equal(fields[dim], trained_on[dim]):
            reason = f"its {dim} differs from that of --training-store"
            raise DataError(f"--store: {reason}; give a store of the same grid")
    span = options["train_times"]
    try:
        (trained,) = split_times(trained_on.time, {"--train-times": span})
    except DataError as error:
        reason = "needed for the climatology; give --training-store"
        raise DataError(f"--store: {error}; {reason}") from error
    climatology = load_climatology(training, trained, span, options["missing"])
    (period,) = split_times(fields.time, {"--times": times})
    grid = Grid(fields.latitude.values, fields.longitude.values)
    size = options["patch_size"]
    width = len(grid.longitude)
    wraps = grid.patch_space(size).columns == width
    shape = (len(grid.latitude), width)
    if overlap > size // 2:
        raise DataError(f"--overlap {overlap}: give up to {size // 2}, half a patch")
    tiling = Tiling(shape, size, overlap, wraps)
    std = model.std.numpy().copy()
    return MapDataset(reader, period, climatology, std, tiling, seed)
