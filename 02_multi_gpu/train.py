"""Chapter 2: fill the wind between a satellite's swaths, on any number of devices, with Lightning.

    uv run python train.py                           # every GPU there is, or one process on the CPU
    uv run python train.py --devices 2               # two processes, the same result
    uv run torchrun --nproc-per-node 2 train.py      # the same, started by torchrun (or by srun)

You should see one progress bar, whatever the number of processes, and the RMSE that one device gives.
`train_ddp_by_hand.py` beside this file does the same without Lightning; read that one first.
"""

import argparse
import faulthandler
import json
import logging
import math
import os
import resource
import signal
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import xarray as xr
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from scipy.interpolate import griddata
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric

HERE = Path(__file__).parent
STORE, OUTPUTS = HERE.parent / "01_setup/data/navy_winds.nc", HERE / "outputs" / Path(__file__).stem
TRAIN_YEARS, VALIDATION_YEARS = slice("1982", "1990"), slice("1991", "1992")
VALIDATION_SAMPLES, VALIDATION_SEED = 96, 1991  # not --seed: every run is judged on the same patches

# Successive tracks of a polar orbiter lie 25 degrees of longitude apart, 10 cells of this grid. They
# lean 0.22 degrees of longitude a degree of latitude, and a swath of 4 cells is 1,100 km wide.
TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH, LOST_PASSES = 10, 0.22, 4, 1 / 8

# Every use of randomness has a stream of its own, so that adding one never shifts another.
ORDER_STREAM, PATCH_STREAM, MODEL_STREAM = 1, 2, 3

BASE_BATCH = 8  # the global batch for which the default learning rate was chosen
BOTTOM_CHANNELS = 96


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


class Stopped(Exception):
    """A signal asked for an end: every rank has finished its step, and a checkpoint is written."""


def open_winds(store: str, variables: list[str]) -> xr.DataArray:
    """Read the wind components into memory, by name, whatever the file's order of dimensions.

    Returns (time, component, latitude, longitude), float32, m/s, latitude from south to north.
    Raises InputError for a file that is missing or cut short, lacks a variable, or is not finite.
    """
    if not Path(store).is_file():
        raise InputError(f"--store {store}: no such file; give the path of a NetCDF file")
    try:
        dataset = xr.load_dataset(store)
    except (OSError, ValueError) as error:  # xarray's message runs over several lines
        raise InputError(f"--store {store}: not a whole NetCDF file; copy it anew") from error
    dims = ("time", "latitude", "longitude")
    usable = [name for name in dataset.data_vars if set(dataset[name].dims) == set(dims)]
    if unusable := [name for name in variables if name not in usable]:
        names = ", ".join(usable) or f"none: it has no variable over {dims}"
        raise InputError(f"--variables {unusable[0]}: not in {store}; choose from {names}")
    winds = dataset[variables].to_dataarray("component").astype("float32")
    winds = winds.transpose("time", "component", "latitude", "longitude").sortby("latitude")
    bad = ~np.isfinite(winds).all(("component", "latitude", "longitude"))
    if bad.any():
        first = str(winds.time[bad].values[0])[:10]
        raise InputError(
            f"--store {store}: NaN or infinity at {int(bad.sum())} times, first {first}; mend it"
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
    orbit, offset = np.divmod(across, TRACK_SPACING)
    lost = rng.random(np.ptp(orbit).astype(int) + 1) < LOST_PASSES
    inside = offset < SWATH_WIDTH
    seen = inside & ~lost[(orbit - orbit.min()).astype(int)]
    return seen if seen.sum() >= size else inside  # of a small patch, every pass may be lost


class WindPatches(Dataset):
    """Patches of the wind and their swaths, addressed by (step, k): sample k of global step `step`."""

    def __init__(self, winds: xr.DataArray, mean, std, patch_size: int, batch_size: int, seed: int):
        """Take winds as open_winds returns them; mean and std are (component, 1, 1), in m/s."""
        self.values, self.times = winds.values, winds.time.values
        self.latitude, self.longitude = winds.latitude.values, winds.longitude.values
        self.mean, self.std, self.size = mean, std, patch_size
        self.batch_size, self.seed = batch_size, seed
        spacing = self.longitude[1] - self.longitude[0]
        global_map = abs(len(self.longitude) * spacing - 360) < spacing / 2
        self.last_column = len(self.longitude) - (1 if global_map else patch_size)  # else no seam to cross

    def sample(self, step: int, k: int) -> tuple[int, int, int, np.ndarray]:
        """Say what sample k of a step is, a pure function of (seed, step, k): there is no state to lose.

        Returns (time, row, column) of the patch's first cell and the swath mask, (size, size).
        """
        epoch, position = divmod(step * self.batch_size + k, len(self.times))
        time = epoch_order(self.seed, epoch, len(self.times))[position]
        rng = np.random.default_rng((PATCH_STREAM, self.seed, step, k))
        row = rng.integers(len(self.latitude) - self.size, endpoint=True)
        column = rng.integers(self.last_column, endpoint=True)
        return time, row, column, swath_mask(rng, self.size)

    def cut(self, field: np.ndarray, row: int, column: int) -> np.ndarray:
        """Cut a patch out of a field (..., latitude, longitude), across the map's seam if need be."""
        columns = np.arange(column, column + self.size)
        return field[..., row : row + self.size, :].take(columns, axis=-1, mode="wrap")

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return input (3, H, W), target (2, H, W), weight (1, H, W) and noise (channels, 1, 1), float32.

        The weight is cos(latitude) in a cell that was not seen, and zero in one that was. The noise
        decides which channels dropout leaves out: drawn for the sample, it is the same on any rank.
        """
        time, row, column, seen = self.sample(*index)
        target = (self.cut(self.values[time], row, column) - self.mean) / self.std
        seen = seen[None].astype("float32")
        cosine = np.cos(np.deg2rad(self.latitude[row : row + self.size, None])).clip(0)
        weight = (cosine * (1 - seen)).astype("float32")
        noise = np.random.default_rng((MODEL_STREAM, self.seed, *index)).random((BOTTOM_CHANNELS, 1, 1), "f4")
        inputs = np.concatenate([target * seen, seen])
        return {"input": inputs, "target": target, "weight": weight, "noise": noise}


class StepSampler(Sampler):
    """This rank's slice of the global batch of every step from `start` on, in `accumulate` micro-batches,
    each a list of (step, k): to resume, start later; on another number of ranks, slice otherwise."""

    def __init__(self, args: argparse.Namespace, start: int, rank: int, world_size: int):
        self.steps, self.repeat_first = range(start, args.max_steps), args.overfit_one_batch
        share = args.batch_size // world_size
        self.slice, self.size = range(rank * share, (rank + 1) * share), share // args.accumulate

    def __iter__(self):
        for step in self.steps:
            for first in self.slice[:: self.size]:
                yield [(0 if self.repeat_first else step, k) for k in range(first, first + self.size)]


def make_patches(args: argparse.Namespace) -> tuple[WindPatches, WindPatches]:
    """Split the store in time, to train and to validate; statistics come from the training years only."""
    winds, size = open_winds(args.store, args.variables), args.patch_size
    most = min(winds.shape[2:]) // 4 * 4
    if size % 4 or size > most:
        reason = f"the network halves it twice and the grid is {winds.shape[2]} x {winds.shape[3]}"
        raise InputError(f"--patch-size {size}: {reason}; give a multiple of 4 up to {most}")
    training, validation = winds.sel(time=TRAIN_YEARS), winds.sel(time=VALIDATION_YEARS)
    if 0 in (training.sizes["time"], validation.sizes["time"]):
        raise InputError(f"--store {args.store}: must hold 1982-1990, to train, and 1991-1992")
    over = ("time", "latitude", "longitude")
    mean, std = (f(over).values[:, None, None] for f in (training.mean, training.std))
    return (
        WindPatches(training, mean, std, size, args.batch_size, args.seed),
        WindPatches(validation, mean, std, size, VALIDATION_SAMPLES, VALIDATION_SEED),
    )


class TimedLoader:
    """A DataLoader that notes the seconds that the loop waited for each batch, and those it then worked."""

    def __init__(self, loader: DataLoader, length: int):
        self.loader, self.length, self.waits, self.works = loader, length, [], []

    def __len__(self) -> int:
        return self.length  # of the whole run: Lightning counts those before a resume as fetched

    def __iter__(self):
        asked = perf_counter()
        for batch in self.loader:
            self.waits.append(perf_counter() - asked)
            given = perf_counter()
            yield batch
            asked = perf_counter()
            self.works.append(asked - given)

    def by_step(self, accumulate: int) -> Iterator[np.ndarray]:
        """The seconds of waiting, and those of work, of each whole step of so many micro-batches."""
        whole = len(self.works) // accumulate * accumulate
        for seconds in (self.waits, self.works):
            yield np.reshape(seconds[:whole], (-1, accumulate)).sum(axis=1)


class WindData(LightningDataModule):
    """Say which patches to train and to validate on; Lightning decides when, and on which device."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.args = args
        self.training, self.validation = make_patches(args)
        self.configuration = describe(args, self.training)
        self.start = load_checkpoint(args.resume, self.configuration)["global_step"] if args.resume else 0

    def setup(self, stage: str) -> None:
        """All ranks have met: only now, and only if they start at the same step, is anything written."""
        starts = [self.start] * self.trainer.world_size
        if self.trainer.world_size > 1:
            distributed.all_gather_object(starts, self.start)
        if len(set(starts)) > 1:
            raise InputError(f"--resume: the ranks found steps {starts}; put --output-dir on a shared disk")
        if stage == "fit" and self.trainer.is_global_zero:
            prepare_folder(Path(self.args.output_dir), self.configuration, bool(self.args.resume))

    def train_dataloader(self) -> TimedLoader:
        args, trainer = self.args, self.trainer
        start = trainer.global_step  # 0, or the step of the checkpoint that is resumed
        sampler = StepSampler(args, start, trainer.global_rank, trainer.world_size)
        loader = DataLoader(self.training, batch_sampler=sampler, num_workers=args.num_workers)
        self.timed = TimedLoader(loader, args.max_steps * args.accumulate)
        return self.timed

    def val_dataloader(self) -> DataLoader:
        trainer = self.trainer  # no sample twice, as a DistributedSampler would have it to make ranks equal
        samples = [(0, k) for k in range(trainer.global_rank, VALIDATION_SAMPLES, trainer.world_size)]
        return DataLoader(self.validation, sampler=samples, batch_size=32)


def baselines(training: WindPatches, validation: WindPatches) -> dict[str, float]:
    """RMSE in m/s over the unseen cells of the validation set, of three fills without a network:
    the month's mean over the training years, the nearest seen cell, linear interpolation (Delaunay).
    """
    months, kept_months = (
        part.times.astype("datetime64[M]").astype(int) % 12 for part in (training, validation)
    )
    climatology = np.stack([training.values[months == month].mean(axis=0) for month in range(12)])
    squares, weights = np.zeros(3), 0.0
    for k in range(VALIDATION_SAMPLES):
        time, row, column, seen = validation.sample(0, k)
        truth = validation.cut(validation.values[time], row, column)
        mean = validation.cut(climatology[kept_months[time]], row, column)
        points, holes, values = np.argwhere(seen), np.argwhere(~seen), truth[:, seen].T
        nearest = griddata(points, values, holes, method="nearest").T
        linear = griddata(points, values, holes, method="linear").T
        linear = np.where(np.isnan(linear), nearest, linear)  # outside the hull of the seen cells
        weight = validation[0, k]["weight"][0, ~seen]
        errors = np.stack([mean[:, ~seen], nearest, linear]) - truth[:, ~seen]
        squares += (weight * errors**2).sum(axis=(1, 2))
        weights += 2 * weight.sum()
    names = ("climatology", "nearest neighbour", "linear interpolation")
    return dict(zip(names, np.sqrt(squares / weights).tolist(), strict=True))


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

    def __init__(self, width: int = BOTTOM_CHANNELS // 4, dropout: float = 0.1):
        super().__init__()
        self.dropout = dropout
        self.down1 = conv_block(3, width)
        self.down2 = conv_block(width, 2 * width)
        self.bottom = conv_block(2 * width, 4 * width)
        self.up2 = conv_block(4 * width + 2 * width, 2 * width)
        self.up1 = conv_block(2 * width + width, width)
        self.head = nn.Conv2d(width, 2, kernel_size=1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """With noise (batch, channels, 1, 1), uniform in [0, 1), leave out channels where it is low."""
        fine = self.down1(x)
        middle = self.down2(self.shrink(fine))
        coarse = self.bottom(self.shrink(middle))
        if noise is not None:
            coarse = coarse * (noise >= self.dropout) / (1 - self.dropout)
        middle = self.up2(torch.cat([self.grow(coarse), middle], dim=1))
        fine = self.up1(torch.cat([self.grow(middle), fine], dim=1))
        return self.head(fine)


def masked_loss(prediction: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error of the unseen cells, weighted by cos(latitude), and their share, both over ALL cells.

    Ranks have equally many cells, so means over them may be averaged. The loss is the first mean over
    the second, and that division comes last: their own unseen cells would give a mean of means.
    """
    squares = batch["weight"] * (prediction - batch["target"]) ** 2
    return squares.mean(), 1 - batch["input"][:, 2].mean()


def check_finite(loss: float, step: int, seed: int) -> None:
    """Stop before a NaN reaches the weights, and name the step that it came from."""
    if not math.isfinite(loss):
        raise InputError(f"step {step}: loss {loss} in the batch of seed {seed}; lower --learning-rate")


def learning_rate_factor(step: int, max_steps: int) -> float:
    """Warm-up in a straight line over a tenth of the run, then a half cosine down to zero."""
    warmup = max(1, max_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, max_steps - warmup)))


def settle_buckets(model: nn.Module) -> None:
    """Have DDP lay out its gradient buckets anew, as it does after its first backward pass, before step 0:
    where a gradient lies decides the order in which three or more ranks add it up, and so the last bit."""
    model(torch.zeros(1, 3, 16, 16, device=next(model.parameters()).device)).sum().backward()
    model.zero_grad()


class WindFill(LightningModule):
    """The U-Net, its loss, its optimizer and its metric: what is specific to the task, and no loop."""

    def __init__(self, configuration: dict, mean: list, std: list):
        super().__init__()
        self.save_hyperparameters()  # into each checkpoint: load_from_checkpoint needs nothing else
        self.configuration = configuration
        torch.manual_seed(configuration["seed"])  # the same weights on every rank
        self.model = UNet(dropout=0.0 if configuration["overfit_one_batch"] else 0.1)
        self.register_buffer("std", torch.tensor(std))
        self.mean_square = MeanMetric()  # sums squares and weights over the batches, then over the ranks
        self.means, self.signalled, self.stopping = [], False, False

    def on_train_start(self) -> None:
        args = self.trainer.datamodule.args
        folder, self.patience = Path(args.output_dir), args.timeout / 2
        folder.mkdir(parents=True, exist_ok=True)  # on every node
        self.stacks = open(folder / f"stacks_rank_{self.global_rank}.txt", "w")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note_signal)
        settle_buckets(self.trainer.strategy.model)
        self.last = folder / "last.ckpt"
        if self.global_step == 0:  # a kill before the first checkpoint then resumes from here
            self.trainer.save_checkpoint(self.last)

    def note_signal(self, number: int, frame) -> None:
        self.signalled = True  # a rank that stopped here, alone, would leave the others waiting for it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def on_train_batch_start(self, batch, batch_idx: int) -> None:
        faulthandler.dump_traceback_later(self.patience, file=self.stacks)  # if the step takes so long

    def on_train_end(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss, unseen = masked_loss(self.model(batch["input"], batch["noise"]), batch)
        self.means.append(torch.stack([loss.detach(), unseen]))
        return loss

    def on_before_optimizer_step(self, optimizer) -> None:
        """By now Lightning has averaged the gradients over micro-batches, and DDP over ranks."""
        signalled = torch.tensor([float(self.signalled)], device=self.device)
        means = torch.cat([torch.stack(self.means).mean(dim=0), signalled])
        if self.trainer.world_size > 1:
            distributed.all_reduce(means)
        loss, unseen, signalled = (means / self.trainer.world_size).tolist()
        for parameter in self.parameters():
            parameter.grad /= unseen
        check_finite(loss / unseen, self.global_step, self.configuration["seed"])
        self.log("loss", loss / unseen, prog_bar=True)
        self.means, self.stopping = [], signalled > 0

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        if self.stopping:
            self.trainer.save_checkpoint(self.last)
            raise Stopped(f"stopped by a signal after step {self.global_step}; --resume goes on from there")

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Count micro-batches anew: a run that resumes on fewer devices may take more of them a step."""
        if self._trainer is None:  # loaded to be used, not to be trained on
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        trained = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        for counts in (progress["total"], progress["current"]):
            counts |= {name: count + trained - counts["ready"] for name, count in counts.items()}

    def validation_step(self, batch, batch_idx: int) -> None:
        error = self.std * (self.model(batch["input"]) - batch["target"])
        self.mean_square.update(error**2, batch["weight"])

    def on_validation_epoch_end(self) -> None:
        self.log("rmse", self.mean_square.compute().sqrt(), prog_bar=True)
        self.mean_square.reset()

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.configuration["learning_rate"])
        factor = partial(learning_rate_factor, max_steps=self.configuration["max_steps"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def write_aside(path: Path, write) -> None:
    """Let `write` fill another file, then rename it: a kill or a full disk never leaves half a file."""
    aside = path.with_name(f"part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        with suppress(OSError):
            aside.unlink()
        reason = f"cannot write {path.name} ({error}); make room or choose another folder"
        raise InputError(f"--output-dir {path.parent}: {reason}") from error


class CheckpointIO(TorchCheckpointIO):
    """Lightning writes a checkpoint in the system's temporary folder and moves it, which is a copy, and
    not atomic, when that is another disk. This one writes beside its target."""

    def save_checkpoint(self, checkpoint: dict, path: str, storage_options=None) -> None:
        write_aside(Path(path), lambda aside: torch.save(checkpoint, aside))


def draw_fill(patches: WindPatches, k: int, filled: np.ndarray) -> Figure:
    """Map the truth, what was seen, what was filled in, and the error; `filled` is (2, H, W) in m/s."""
    time, row, column, seen = patches.sample(0, k)
    truth = patches.cut(patches.values[time], row, column)
    panels = {
        "truth": truth,
        "seen by the satellite": np.where(seen, truth, np.nan),
        "filled by the network": np.where(seen, truth, filled),
        "error of the filled wind": np.where(seen, np.nan, filled - truth),
    }
    y = patches.latitude[row : row + patches.size]
    x = patches.longitude[column] + (y - y[0])  # square cells
    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, (title, wind) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        colours = {"cmap": "magma_r", "vmax": 6} if "error" in title else {"cmap": "viridis", "vmax": 12}
        mesh = axes.pcolormesh(x, y, np.hypot(*wind), vmin=0, **colours)
        outline = {"edgecolor": "black", "linewidth": 0.5}  # else they vanish on the brightest cells
        axes.quiver(x[::4], y[::4], *wind[:, ::4, ::4], color="white", scale=120, width=0.006, **outline)
        axes.set_title(title, fontsize=15)
        axes.set(xlabel="longitude, °E", ylabel="latitude, °N", facecolor="0.8")
        figure.colorbar(mesh, ax=axes, label="m/s", extend="max", shrink=0.9)
    month = str(patches.times[time])[:7]
    figure.suptitle(f"Mean wind of {month}, a month kept from training", fontsize=17)
    return figure


def measure(waits: list[float], works: list[float], batch_size: int) -> dict:
    """Samples/s of the median step, the share of the time spent waiting for data, and peak memory.

    The first step starts everything up and does not count; where there is no other, None.
    """
    waits, works = np.array(waits[1 : len(works)]), np.array(works[1:])
    seconds = waits + works
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
    return {
        "samples_per_second": batch_size / float(np.median(seconds)) if len(seconds) else None,
        "data_wait_share": float(waits.sum() / seconds.sum()) if len(seconds) else None,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
    }


def report(figures: dict, picture: Path, overfit: bool) -> None:
    """Print what a reader wants to know of a run, in one block."""
    print("\nRMSE over the unseen cells of 1991-92, m/s")
    for name in ("climatology", "nearest neighbour", "linear interpolation"):
        print(f"  {name:24} {figures[name]:.3f}")
    network, gain = f"U-Net after {figures['steps']} steps", 1 - figures["rmse"] / figures["climatology"]
    side = "below" if gain > 0 else "above"
    print(f"  {network:24} {figures['rmse']:.3f}   {abs(gain):.0%} {side} climatology")
    if figures["samples_per_second"]:  # not where a resumed run had no step left
        share = f"{figures['data_wait_share']:.1%} of the time waiting for data"
        print(f"{figures['samples_per_second']:.1f} samples/s, {share}")
    print(f"peak memory {figures['peak_memory_gb']:.1f} GB, {figures['seconds']:.0f} s")
    if overfit and figures["loss"]:
        learnt = "learnt by heart" if figures["loss"] < 0.02 else "NOT learnt: take more steps, or seek a bug"
        print(f"one batch, last loss {figures['loss']:.4f} (1 is the wind's variance): {learnt}")
    print(f"picture: {picture}")


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--store", default=os.path.relpath(STORE), help="NetCDF file of the wind")
    add("--variables", nargs=2, default=["eastward_wind", "northward_wind"], help="u and v in the store")
    add("--patch-size", type=int, default=64, help="cells along a side of a patch")
    add("--batch-size", type=int, default=8, help="samples in the global batch")
    add("--max-steps", type=int, default=300, help="optimizer steps in the whole run")
    add("--learning-rate", type=float, default=3e-3, help="AdamW's, at the end of the warm-up")
    add("--validate-every", type=int, default=100, help="steps between validations")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="where to compute")
    add("--devices", type=int, help="processes on each node; without it, one a GPU, or one on the CPU")
    add("--num-nodes", type=int, help="nodes; without it, what the launcher started, or one")
    add("--accumulate", type=int, default=1, help="micro-batches in which a rank computes its slice")
    add("--learning-rate-rule", choices=("none", "sqrt", "linear"), default="none", help="for batches over 8")
    add("--timeout", type=int, default=300, help="seconds to wait for another rank before giving up")
    add("--num-workers", type=int, default=0, help="processes that prepare batches, for each rank; 0: none")
    add("--seed", type=int, default=0, help="decides weights, order, patches, swaths and dropout")
    add("--output-dir", default=os.path.relpath(OUTPUTS), help="folder for the files of the run")
    add("--resume", nargs="?", const="last", metavar="CKPT", help="from last.ckpt or CKPT; auto: if any")
    add("--overfit-one-batch", action="store_true", help="train on step 0's batch only: a sanity check")
    args = parser.parse_args(argv)
    least = {"batch_size": 1, "max_steps": 1, "validate_every": 1, "checkpoint_every": 1, "patch_size": 16}
    least |= {"accumulate": 1, "timeout": 1, "devices": 1, "num_nodes": 1}
    for name, value in (least | {"learning_rate": 0, "num_workers": 0, "seed": 0}).items():
        if getattr(args, name) is not None and not getattr(args, name) >= value:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} {getattr(args, name)}: too small; give at least {value}")
    if args.accelerator == "gpu" and not torch.accelerator.is_available():
        raise InputError("--accelerator gpu: this machine has none; give auto or cpu")
    args.devices, args.num_nodes = plan_devices(args)
    ranks = args.devices * args.num_nodes
    if ranks > VALIDATION_SAMPLES:
        raise InputError(f"{ranks} ranks: give at most {VALIDATION_SAMPLES}, one a validation sample")
    if args.batch_size % (ranks * args.accumulate):
        reason = f"{ranks} ranks x {args.accumulate} micro-batches do not divide it; give a multiple"
        raise InputError(f"--batch-size {args.batch_size}: {reason}")
    ratio = args.batch_size / BASE_BATCH
    args.learning_rate *= {"none": 1, "sqrt": math.sqrt(ratio), "linear": ratio}[args.learning_rate_rule]
    last = Path(args.output_dir, "last.ckpt")
    if args.resume in ("last", "auto"):
        args.resume = None if args.resume == "auto" and not last.exists() else str(last)
    return args


def plan_devices(args: argparse.Namespace) -> tuple[int, int]:
    """Say how many devices a node has and how many nodes there are: the launcher knows, if there is one."""
    given = {"--devices": args.devices, "--num-nodes": args.num_nodes}
    on_gpu = args.accelerator != "cpu" and torch.accelerator.is_available()
    found = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    if distributed.is_torchelastic_launched():
        launcher, names = "torchrun", ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    elif SLURMEnvironment.detect():
        launcher, names = "srun", ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
        if names[0] not in os.environ and os.environ["SLURM_NTASKS"] != "1":  # set only if asked for
            raise InputError("--ntasks-per-node: give it to sbatch or srun, one task for each device")
    else:
        if (args.devices or 1) > found:
            raise InputError(f"--devices {args.devices}: there are {found} {'GPUs' if on_gpu else 'cores'}")
        if (args.num_nodes or 1) > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
            raise InputError(f"--num-nodes {args.num_nodes}: set MASTER_ADDR, MASTER_PORT and NODE_RANK")
        return args.devices or (found if on_gpu else 1), args.num_nodes or 1
    started = [int(os.environ.get(name, 1)) for name in names]
    for (flag, value), number in zip(given.items(), started, strict=True):
        if value not in (None, number):
            raise InputError(f"{flag} {value}: {launcher} has started {number}; leave {flag} out")
    if on_gpu and started[0] > found:
        raise InputError(f"{launcher} has started {started[0]} processes on a node; it has {found} GPUs")
    return tuple(started)


def describe(args: argparse.Namespace, training: WindPatches) -> dict:
    """All that decides a run's result, and so all that a checkpoint must share with the run it resumes."""
    names = ("variables", "patch_size", "batch_size", "max_steps", "learning_rate", "seed")
    configuration = {name: getattr(args, name) for name in (*names, "overfit_one_batch")}
    return configuration | {"store": f"crc32 {zlib.crc32(training.values.tobytes()):08x}"}


def prepare_folder(folder: Path, configuration: dict, resume: bool) -> None:
    """Record the configuration, and clear away what an earlier run earned and this one has yet to."""
    record = json.dumps(configuration, indent=2)
    write_aside(folder / "configuration.json", lambda path: path.write_text(record))
    for name in ("summary.json", "fill.png"):
        (folder / name).unlink(missing_ok=True)
    if not resume and (folder / "last.ckpt").exists():  # for whoever forgot --resume
        os.replace(folder / "last.ckpt", folder / "previous.ckpt")


def load_checkpoint(path: str, configuration: dict) -> dict:
    """Read a checkpoint; raise InputError if there is none, it is torn, or of another configuration."""
    if not Path(path).is_file():
        raise InputError(f"--resume {path}: no such file; to start anew, leave --resume out")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        saved, _ = checkpoint["hyper_parameters"]["configuration"], checkpoint["global_step"]
    except Exception as error:  # a torn file raises one of many types
        reason = f"not a whole checkpoint of this script ({type(error).__name__})"
        raise InputError(f"--resume {path}: {reason}; to start anew, leave --resume out") from error
    for name, value in configuration.items():
        if saved.get(name) != value:
            flag = f"--{name.replace('_', '-')} {value}"
            raise InputError(f"{flag}: {path} has {saved.get(name)}; give that, or leave --resume out")
    return checkpoint


def main(argv: list[str] | None = None) -> dict:
    """Train, judge and draw; return the headline figures (RMSE in m/s)."""
    began = perf_counter()
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")  # folders that exist, few workers
    args = parse_arguments(argv)
    data = WindData(args)
    folder, version = Path(args.output_dir), f"resumed_at_{data.start}" if args.resume else ""

    model = WindFill(data.configuration, data.training.mean.tolist(), data.training.std.tolist())
    several = args.devices * args.num_nodes > 1
    # The only buffer never changes; without False, each step begins with a broadcast of it.
    ddp = DDPStrategy(timeout=timedelta(seconds=args.timeout), broadcast_buffers=False)
    plugins = [CheckpointIO()]
    if SLURMEnvironment.detect() and not distributed.is_torchelastic_launched():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # launch/slurm.sbatch decides that
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=ddp if several else "auto",
        max_epochs=1,  # StepSampler's only epoch is the whole run
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=args.validate_every * args.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        logger=CSVLogger(folder, "", version, flush_logs_every_n_steps=args.checkpoint_every),
        callbacks=[
            ModelCheckpoint(
                folder, "last", every_n_train_steps=args.checkpoint_every, enable_version_counter=False
            ),
            LearningRateMonitor(),
        ],
        plugins=plugins,
    )
    try:
        trainer.fit(model, data, ckpt_path=args.resume)
        loss = trainer.callback_metrics["loss"].item() if data.timed.waits else None
        trainer.save_checkpoint(folder / "last.ckpt")
        rmse = trainer.validate(model, data, verbose=False)[0]["rmse"]
    except BaseException:
        if launcher := trainer.strategy.launcher:
            launcher.kill(signal.SIGKILL)  # the ranks that it started would wait for this one
        raise
    figures = {"steps": args.max_steps, "loss": loss, "rmse": rmse}
    if not trainer.is_global_zero:
        return figures

    with torch.no_grad():
        prediction = model.model(torch.from_numpy(data.validation[0, 0]["input"])[None].to(model.device))
    filled = data.validation.mean + data.validation.std * prediction[0].cpu().numpy()
    write_aside(folder / "fill.png", draw_fill(data.validation, 0, filled).savefig)
    figures |= baselines(data.training, data.validation)
    figures |= measure(*data.timed.by_step(args.accumulate), args.batch_size)
    figures["seconds"] = perf_counter() - began
    write_aside(folder / "summary.json", lambda path: path.write_text(json.dumps(figures, indent=2)))
    report(figures, folder / "fill.png", args.overfit_one_batch)
    return figures


def explain(error: RuntimeError) -> str:
    """Say in one line what an error of torch.distributed means to a user; of any other, say all."""
    gloo = any(words in str(error) for words in ("gloo", "Application timeout"))
    if not (isinstance(error, distributed.DistError) or gloo):
        return traceback.format_exc()
    if distributed.is_initialized():
        rank = distributed.get_rank()
        return f"rank {rank} has lost another rank: see what that one printed; --resume goes on"
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error):
        return f"MASTER_PORT {port}: another program listens there; set it to a free port"
    return f"MASTER_ADDR {host}, MASTER_PORT {port}: not all ranks came in time; start all, or mend these"


if __name__ == "__main__":
    first_on_node = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    try:
        main()
    except (InputError, OSError) as error:  # OSError: a log that no longer fits on the disk
        if first_on_node or isinstance(error, OSError):  # all ranks of a node meet an InputError: say it once
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        if first_on_node:
            print(f"\n{stop}", file=sys.stderr)
        sys.exit(143)  # as a program that SIGTERM ended: not finished
    except RuntimeError as error:
        print(f"{Path(__file__).name}: error: {explain(error)}", file=sys.stderr, flush=True)
        os._exit(1 if distributed.is_initialized() else 2)  # at once: the group's threads may never end
    except KeyboardInterrupt:
        sys.exit("\nstopped; --resume goes on from the last checkpoint")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # at once: gloo's threads may hold tensors still, and to free them while Python ends would abort
