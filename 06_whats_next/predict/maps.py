"""Whole maps for a trained network: what is known of each, and its gaps filled."""

from calendar import month_name
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch.utils.data import Dataset

from climatology import Climatology
from data import Grid
from errors import CheckpointError, DataError, print_note
from fields import Period, group_by_unit, split_times
from model import FillGaps
from predict.tiles import Tiling
from sampling import swath_masks
from store import FieldReader
from store_checksum import sha256_of_values
from store_climatology import check_finite, load_climatology
from survival.checkpoints import find_damage
from tracking.run_record import Record, RunRecord

SWATH_STREAM = 6  # of random numbers
OVERLAP = "cells that neighbouring patches share; if not given, 16, or half a patch"


class MapFiller(FillGaps):
    """The trained network, which fills all patches of a map."""

    patches_at_once = 32

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        parts = batch["patches"].split(self.patches_at_once)
        return torch.cat([self.model(part) for part in parts])


def load_model(path: Path) -> tuple[MapFiller, dict]:
    """The network of a checkpoint, and its run's record; CheckpointError if it has none."""
    try:
        damaged = find_damage(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = MapFiller(**saved["hyper_parameters"])
        model.load_state_dict(saved["state_dict"])
        record = saved["callbacks"][RunRecord.state_key]
    except OSError as error:
        raise CheckpointError(f"{error.strerror}; give a checkpoint") from error
    except Exception as error:  # torch raises many kinds, depending on the bytes
        reason = f"is no checkpoint of this chapter ({type(error).__name__})"
        raise CheckpointError(f"{reason}; give one that train.py wrote") from error
    if damaged:
        reason = f"has other bytes than those written, in {damaged}"
        raise CheckpointError(f"{reason}; give a whole one")
    return model, record


class MapDataset(Dataset):
    """What is known of each map of a period, and the network's input in patches.

    If `seed` is not None, only what lies in simulated swaths counts as known. `missing` is
    "refuse" if a NaN where there is a climatology is an error, or else "mask".
    """

    def __init__(
        self,
        reader: FieldReader,
        period: Period,
        *,
        climatology: Climatology,
        std: np.ndarray,
        tiling: Tiling,
        seed: int | None,
        missing: str,
    ):
        self.reader = reader
        self.period = period
        self.climatology = climatology
        self.std = std
        self.tiling = tiling
        self.seed = seed
        self.missing = missing

    def __len__(self) -> int:
        return len(self.period.positions)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Map `number` of the period:

        values and mean (variables, H, W): as in the store, and the month's climatology;
        seen (H, W): where all variables are known, elsewhere all are filled;
        patches (patches, variables + 1, size, size): the network's input.
        """
        position = self.period.positions[[number]]
        values = self.reader.read_at_once([{"time": position[0]}])[0]
        check_finite(values[:, None], position, self.reader)
        mean = self.climatology.mean[self.period.months[number]]
        anomaly = (values - mean) / self.std
        seen = ~np.isnan(anomaly).any(axis=0)
        has_mean = ~np.isnan(mean).any(axis=0)
        if self.missing == "refuse" and not seen[has_mean].all():
            date = str(self.period.dates[number])[:16]
            remedy = "give --gaps missing to fill what the store lacks"
            raise DataError(f"NaN on {date}: a value or a chunk is missing; {remedy}")
        if self.seed is not None:
            seen &= self.swaths(int(position[0]))
        known = np.where(seen, anomaly, 0)
        inputs = np.concatenate([known, seen[None]]).astype("float32")
        patches = self.tiling.cut(inputs)
        parts = {"values": values, "mean": mean, "seen": seen, "patches": patches}
        return {"number": number, **parts}

    def describe_gaps(self) -> str:
        """How many cells of each map lack a climatology, by month; "" if none does."""
        valid = self.climatology.valid.sum()
        lacking = valid - self.climatology.cells
        low = []
        for month in np.unique(self.period.months):
            if lacking[month]:
                low.append(f"{month_name[month + 1]} {lacking[month]:,}")
        if not low:
            return ""
        reason = f"cells without a climatology, and so without a value, of {valid:,}"
        return f"{reason}: {', '.join(low)}"

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


def choose_overlap(given: int | None, record: Record) -> int:
    """The overlap that is given, or else 16, but at most half a patch of the run."""
    if given is not None:
        return given
    half = record["options"]["patch_size"] // 2
    if half < 16:
        print_note(f"--overlap {half}: half a patch")
    return min(16, half)


def load_training_climatology(
    training: FieldReader, fields: xr.Dataset, record: Record, folder: Path
) -> Climatology:
    """The climatology that the network was trained with; `fields` are those to be filled.

    If it is computed, it is kept in `folder`.

    DataError if they are on another grid, or if `training` has not the run's data.
    """
    options = record["options"]
    span = options["train_times"]
    trained_on = training.open()
    for dim in ("latitude", "longitude"):
        if not np.array_equal(fields[dim], trained_on[dim]):
            reason = f"its {dim} differs from that of the training"
            raise DataError(f"--store: {reason}; give a store of the same grid")
    remedy = "give the run's store as --training-store, for the climatology"
    try:
        (times,) = split_times(trained_on.time, {"--train-times": span})
    except DataError as error:
        reason = f"has no times of the training, {span[0]} to {span[1]}"
        raise DataError(f"{reason}; {remedy}") from error
    if sha256_of_values(training, times) != record["data"]["values"]:
        reason = "its training times hold other data than the network was trained on"
        raise DataError(f"{reason}; {remedy}")
    return load_climatology(
        training,
        times,
        span=span,
        missing=options["missing"],
        constant=options.get("constant_cells", "keep"),  # which older runs do not say
        folder=folder,
    )


def make_maps(
    reader: FieldReader,
    training: FieldReader,
    *,
    times: list[str],
    model: MapFiller,
    record: Record,
    overlap: int,
    seed: int | None,
    folder: Path,
) -> MapDataset:
    """The maps of a store's `times`, for a network that was trained on `training`.

    A climatology that is computed is kept in `folder`.

    If `seed` is None, what the store lacks is to be filled; else what the simulated swaths
    of this seed leave out. DataError if the store has other units or another grid.
    """
    options = record["options"]
    try:
        fields = reader.open()
    except DataError as error:
        if not str(error).startswith("--variables"):
            raise
        needed = ", ".join(options["variables"])
        raise DataError(f"--store: the checkpoint needs {needed}; {error}") from error
    units = group_by_unit(fields, options["variables"])
    if units != model.hparams.units:
        reason = f"its units are {list(units)}, and not {list(model.hparams.units)}"
        raise DataError(f"--store: {reason}, as in training; give one of these units")
    size = options["patch_size"]
    if overlap > size // 2:
        raise DataError(f"--overlap {overlap}: give up to {size // 2}, half a patch")
    (period,) = split_times(fields.time, {"--times": times})
    try:
        climatology = load_training_climatology(training, fields, record, folder)
    except DataError as error:
        if training is reader or str(error).startswith("--"):
            raise
        flag = f"--training-store {training.location.url}"
        raise DataError(f"{flag}: {error}") from error
    grid = Grid(fields.latitude.values, fields.longitude.values)
    grid.patch_space(size)  # DataError if no patch fits
    shape = (len(grid.latitude), len(grid.longitude))
    tiling = Tiling(shape, size, overlap, grid.wraps)
    missing = "mask" if seed is None else options["missing"]
    std = model.std.numpy().copy()
    return MapDataset(
        reader,
        period,
        climatology=climatology,
        std=std,
        tiling=tiling,
        seed=seed,
        missing=missing,
    )
