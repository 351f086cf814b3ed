"""Chapter 1, by hand: fill the wind between a satellite's swaths with plain PyTorch, every step visible.

    uv run python train_by_hand.py             # about a minute on two CPU cores
    uv run python train_by_hand.py --resume    # after a kill: go on, and end at the same weights

You should see a progress bar, the network's RMSE below those of three baselines, and the path of a
picture. `train.py` beside this file does the same with Lightning. Read this one first.
"""

import argparse
import csv
import json
import math
import os
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from scipy.interpolate import griddata
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

HERE = Path(__file__).parent
TRAIN_YEARS = slice("1982", "1990")
VALIDATION_YEARS = slice("1991", "1992")
VALIDATION_SAMPLES = 96
VALIDATION_SEED = 1991  # not --seed: every run is judged on the same patches

# Successive tracks of a polar orbiter lie 25 degrees of longitude apart, 10 cells of this grid. They
# lean 0.22 degrees of longitude a degree of latitude, and a swath of 4 cells is 1,100 km wide.
TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH, LOST_PASSES = 10, 0.22, 4, 1 / 8

# Every use of randomness has a stream of its own, so that adding one never shifts another.
ORDER_STREAM, PATCH_STREAM, MODEL_STREAM = 1, 2, 3


class InputError(Exception):
    """Something that the user can mend. The program prints its one line and ends with exit code 2."""


# ---------------------------------------------------------------------------------------------- data


def open_winds(store: str, variables: list[str]) -> xr.DataArray:
    """Read the wind components into memory, by name, whatever the order of the file's dimensions.

    Returns (time, component, latitude, longitude), float32, m/s, latitude from south to north.
    Raises InputError for a file that is missing or cut short, lacks a variable, or holds NaN.
    """
    if not Path(store).is_file():
        raise InputError(f"--store {store}: no such file; give the path of a NetCDF file")
    try:
        dataset = xr.load_dataset(store)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--store {store}: not a whole NetCDF file ({reason}); copy it again"
        ) from error
    dims = {"time", "latitude", "longitude"}
    for name in variables:
        if name not in dataset or set(dataset[name].dims) != dims:
            usable = [name for name in dataset.data_vars if set(dataset[name].dims) == dims]
            raise InputError(f"--variables {name}: not in {store}; choose from {', '.join(usable)}")
    winds = dataset[variables].to_dataarray("component").astype("float32")
    winds = winds.transpose("time", "component", "latitude", "longitude").sortby("latitude")
    bad = winds.isnull().any(("component", "latitude", "longitude"))
    if bad.any():
        first = str(winds.time[bad].values[0])[:10]
        raise InputError(
            f"--store {store}: {int(bad.sum())} times hold NaN, first {first}; fill them"
        )
    return winds


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_times: int) -> np.ndarray:
    """The order in which an epoch visits the times, (n_times,): each of them once."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(n_times)


def swath_mask(rng: np.random.Generator, size: int) -> np.ndarray:
    """True where the satellite looks, (size, size): ascending or descending passes, some of them lost."""
    row, column = np.mgrid[:size, :size]
    across = column + rng.choice((-1, 1)) * TRACK_SLOPE * row + rng.uniform(0, TRACK_SPACING)
    orbit, offset = np.divmod(across - across.min() // TRACK_SPACING * TRACK_SPACING, TRACK_SPACING)
    lost = rng.random(int(orbit.max()) + 1) < LOST_PASSES
    return (offset < SWATH_WIDTH) & ~lost[orbit.astype(int)]


def sample(
    seed: int, step: int, k: int, batch_size: int, grid: tuple[int, int, int], patch_size: int
) -> tuple[int, int, int, np.ndarray]:
    """Say what sample k of global step `step` is. A pure function: there is no state to lose.

    `grid` counts the (times, corner rows, corner columns) to choose from. Returns the indices (time,
    row, column) of the patch's first cell and its swath mask, (patch_size, patch_size).
    """
    n_times, n_rows, n_columns = grid
    epoch, position = divmod(step * batch_size + k, n_times)
    rng = np.random.default_rng((PATCH_STREAM, seed, step, k))
    row, column = rng.integers(n_rows), rng.integers(n_columns)
    return epoch_order(seed, epoch, n_times)[position], row, column, swath_mask(rng, patch_size)


class WindPatches(Dataset):
    """Patches of the wind and their swaths, addressed by (step, k) instead of a running number."""

    def __init__(self, winds: xr.DataArray, mean, std, patch_size: int, batch_size: int, seed: int):
        """Take winds as open_winds returns them; mean and std are (component, 1, 1), in m/s."""
        self.values, self.mean, self.std = winds.values, mean, std
        self.times = winds.time.values
        self.latitude, self.longitude = winds.latitude.values, winds.longitude.values
        self.patch_size, self.batch_size, self.seed = patch_size, batch_size, seed
        n_times, _, n_rows, n_columns = winds.shape
        spacing = abs(self.longitude[1] - self.longitude[0])
        wraps = (
            abs(n_columns * spacing - 360) < spacing / 2
        )  # then a patch may cross the map's seam
        n_corners = n_columns if wraps else n_columns - patch_size + 1
        self.grid = (n_times, n_rows - patch_size + 1, n_corners)

    def sample(self, step: int, k: int) -> tuple[int, int, int, np.ndarray]:
        return sample(self.seed, step, k, self.batch_size, self.grid, self.patch_size)

    def cut(self, field: np.ndarray, row: int, column: int) -> np.ndarray:
        """Cut the patch at (row, column) out of a field (..., latitude, longitude)."""
        columns = np.arange(column, column + self.patch_size)
        return field[..., row : row + self.patch_size, :].take(columns, axis=-1, mode="wrap")

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return input (3, H, W), target (2, H, W) and weight (1, H, W), float32.

        The weight is cos(latitude) in a cell that was not seen, and zero in one that was.
        """
        time, row, column, seen = self.sample(*index)
        target = (self.cut(self.values[time], row, column) - self.mean) / self.std
        cosine = np.cos(np.deg2rad(self.latitude[row : row + self.patch_size, None])).clip(0)
        seen = seen[None].astype("float32")
        weight = (cosine * (1 - seen)).astype("float32")
        return {"input": np.concatenate([target * seen, seen]), "target": target, "weight": weight}


class StepSampler(Sampler[list[tuple[int, int]]]):
    """The global batches of steps `start` to `max_steps`, each a list of (step, k).

    To resume is to start at a later number: no epoch to set, no generator to restore.
    """

    def __init__(self, batch_size: int, start: int, max_steps: int, repeat_first: bool = False):
        self.batch_size, self.steps, self.repeat_first = (
            batch_size,
            range(start, max_steps),
            repeat_first,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            yield [(0 if self.repeat_first else step, k) for k in range(self.batch_size)]


def make_patches(args: argparse.Namespace) -> tuple[WindPatches, WindPatches]:
    """Split the store in time into training and validation patches, both normalised by training only."""
    winds = open_winds(args.store, args.variables)
    rows, columns = winds.shape[2:]
    if args.patch_size > min(rows, columns) or args.patch_size % 4:
        most = min(rows, columns) // 4 * 4
        raise InputError(
            f"--patch-size {args.patch_size}: the grid has {rows} x {columns} cells and the network "
            f"halves it twice; give a multiple of 4, at most {most}"
        )
    training, validation = winds.sel(time=TRAIN_YEARS), winds.sel(time=VALIDATION_YEARS)
    for part, years in ((training, TRAIN_YEARS), (validation, VALIDATION_YEARS)):
        if part.sizes["time"] == 0:
            raise InputError(
                f"--store {args.store}: no times in {years.start}-{years.stop}; it must"
            )
    over = ("time", "latitude", "longitude")
    mean, std = training.mean(over).values[:, None, None], training.std(over).values[:, None, None]
    size, batch_size = args.patch_size, args.batch_size
    return (
        WindPatches(training, mean, std, size, batch_size, args.seed),
        WindPatches(validation, mean, std, size, VALIDATION_SAMPLES, VALIDATION_SEED),
    )


def baselines(training: WindPatches, validation: WindPatches) -> dict[str, float]:
    """RMSE in m/s, over the validation set's unseen cells, of three fills that learn nothing or little:
    the month's mean over the training years, the nearest seen cell, linear interpolation (Delaunay).
    """
    months = training.times.astype("datetime64[M]").astype(int) % 12
    climatology = np.stack([training.values[months == m].mean(axis=0) for m in range(12)])
    squares, weights = np.zeros(3), 0.0
    for k in range(VALIDATION_SAMPLES):
        time, row, column, seen = validation.sample(0, k)
        truth = validation.cut(validation.values[time], row, column)
        month = validation.times[time].astype("datetime64[M]").astype(int) % 12
        unseen = ~seen
        points, holes, values = np.argwhere(seen), np.argwhere(unseen), truth[:, seen].T
        nearest = griddata(points, values, holes, method="nearest").T
        linear = griddata(points, values, holes, method="linear").T
        linear = np.where(np.isnan(linear), nearest, linear)  # outside the seen cells' hull
        mean = validation.cut(climatology[month], row, column)[:, unseen]
        weight = validation[0, k]["weight"][0, unseen]
        fills = np.stack([mean, nearest, linear])
        squares += (weight * (fills - truth[:, unseen]) ** 2).sum(axis=(1, 2))
        weights += 2 * weight.sum()
    names = ("climatology", "nearest neighbour", "linear interpolation")
    return dict(zip(names, np.sqrt(squares / weights).tolist(), strict=True))


# --------------------------------------------------------------------------------------------- model


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions. GroupNorm sees one sample at a time, wherever the others are computed."""
    layers = []
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, 3, padding=1, padding_mode="replicate"),
            nn.GroupNorm(8, channels_out),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A small U-Net, from (batch, 3, H, W) to (batch, 2, H, W), with H and W multiples of 4."""

    def __init__(self, width: int = 24, dropout: float = 0.1):
        super().__init__()
        self.down1 = conv_block(3, width)
        self.down2 = conv_block(width, 2 * width)
        self.bottom = nn.Sequential(conv_block(2 * width, 4 * width), nn.Dropout2d(dropout))
        self.up2 = conv_block(4 * width + 2 * width, 2 * width)
        self.up1 = conv_block(2 * width + width, width)
        self.head = nn.Conv2d(width, 2, kernel_size=1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down1(x)
        middle = self.down2(self.shrink(fine))
        coarse = self.bottom(self.shrink(middle))
        middle = self.up2(torch.cat([self.grow(coarse), middle], dim=1))
        fine = self.up1(torch.cat([self.grow(middle), fine], dim=1))
        return self.head(fine)


def masked_loss(prediction: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squared error of the unseen cells, weighted by cos(latitude), over their count in the whole batch.

    One count for the batch, not a mean of the samples' means: every unseen cell counts the same.
    """
    squares = batch["weight"] * (prediction - batch["target"]) ** 2
    unseen = 1 - batch["input"][:, 2:]
    return squares.sum() / (2 * unseen.sum())


def learning_rate_factor(step: int, max_steps: int) -> float:
    """Warm-up in a straight line over a tenth of the run, then a half cosine down to zero."""
    warmup = max(1, max_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))


def seed_model(seed: int, step: int) -> None:
    """Reseed dropout for one step, so that a resumed run draws what the uninterrupted one drew."""
    torch.manual_seed(int(np.random.SeedSequence((MODEL_STREAM, seed, step)).generate_state(1)[0]))


def check_finite(
    loss: torch.Tensor, step: int, batch: dict[str, torch.Tensor], data: WindPatches
) -> None:
    """Stop before a NaN reaches the weights, and name the step and the samples that it came from."""
    if torch.isfinite(loss):
        return
    bad = [k for k, x in enumerate(batch["target"]) if not torch.isfinite(x).all()]
    time, row, column, _ = data.sample(step, bad[0] if bad else 0)
    where = f"time {str(data.times[time])[:10]}, row {row}, column {column}"
    cause = (
        f"sample k={bad[0]} ({where}) holds values that are not finite; mend the data"
        if bad
        else f"all samples are finite (k=0 is {where}); lower --learning-rate"
    )
    raise InputError(
        f"step {step}: the loss is {loss.item()} in the batch (seed {data.seed}, step {step}): {cause}"
    )


# -------------------------------------------------------------------------------------------- output


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill another file and rename it: nobody meets half a file, a full disk loses nothing."""
    aside = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        write(aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        aside.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--output-dir {path.parent}: cannot write {path.name} ({reason}); make room or choose "
            f"another folder; what was there is untouched"
        ) from error


def open_output(output_dir: str) -> Path:
    """Make the folder for a run's files, and find out now whether it can be written."""
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output-dir {output_dir}: cannot be made ({error.strerror}); choose another folder"
        ) from error
    write_aside(folder / ".probe", lambda path: path.write_text(""))
    (folder / ".probe").unlink()
    return folder


def draw_fill(patches: WindPatches, k: int, filled: np.ndarray) -> Figure:
    """Map the truth, what was seen, what was filled in and the error; `filled` is (2, H, W) in m/s."""
    time, row, column, seen = patches.sample(0, k)
    truth = patches.cut(patches.values[time], row, column)
    filled = np.where(seen, truth, filled)
    latitude = patches.latitude[row : row + patches.patch_size]
    spacing = patches.longitude[1] - patches.longitude[0]
    longitude = patches.longitude[column] + spacing * np.arange(patches.patch_size)
    wind, error = (
        {"cmap": "viridis", "vmin": 0, "vmax": 12},
        {"cmap": "magma_r", "vmin": 0, "vmax": 6},
    )
    panels = {
        "truth": (truth, wind),
        "seen by the satellite": (np.where(seen, truth, np.nan), wind),
        "filled by the network": (filled, wind),
        "error": (np.where(seen, np.nan, filled - truth), error),
    }
    figure = Figure(figsize=(11, 9), layout="constrained")
    for axes, (title, (field, style)) in zip(
        figure.subplots(2, 2).flat, panels.items(), strict=True
    ):
        speed = axes.pcolormesh(longitude, latitude, np.hypot(*field), **style)
        if title != "error":
            each = slice(1, None, 4)
            axes.quiver(
                longitude[each], latitude[each], *field[:, each, each], color="white", scale=200
            )
        axes.set(title=title, facecolor="0.85")
        axes.xaxis.set_major_formatter(
            lambda x, _: f"{abs((x + 180) % 360 - 180):.0f}°{'EW'[(x + 180) % 360 < 180]}"
        )
        axes.yaxis.set_major_formatter(lambda y, _: f"{abs(y):.0f}°{'SN'[y > 0]}")
        figure.colorbar(
            speed,
            ax=axes,
            label="error of the wind, m/s" if title == "error" else "wind speed, m/s",
        )
    figure.suptitle(f"Monthly mean surface wind, {str(patches.times[time])[:7]}")
    return figure
