"""Chapter 1, by hand: fill the wind between a satellite's swaths, on one device, in plain PyTorch.

    uv run python train_by_hand.py              # about a minute on two CPU cores
    uv run python train_by_hand.py --resume     # after a kill: go on, and end at the same weights

You should see a progress bar, the RMSE of the network, of four simple baselines (it beats them) and of
optimal interpolation (it does not), and the path of a picture. `train.py` beside this file does the same
with Lightning. Read this one first.
"""

import argparse
import json
import math
import os
import sys
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from scipy.interpolate import griddata
from scipy.spatial import QhullError
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from oi_baseline import OI, oi_baseline

# What you change for data of your own, here or by flags.
HERE = Path(__file__).parent
STORE, OUTPUTS = HERE / "data/navy_winds.nc", HERE / "outputs" / Path(__file__).stem
VARIABLES = ["eastward_wind", "northward_wind"]
TRAIN_TIMES, VALIDATION_TIMES, TEST_TIMES = ["1982", "1989"], ["1990", "1990"], ["1991", "1992"]
DIMENSIONS = {  # a name, standard_name, axis or units by which each is known
    "time": {"time", "valid_time", "t", "T"},
    "latitude": {"latitude", "lat", "degrees_north", "degree_north"},
    "longitude": {"longitude", "lon", "degrees_east", "degree_east"},
}
# Successive tracks of a polar orbiter lie 25 degrees of longitude apart, 10 cells of this grid. They
# lean 0.22 degrees of longitude a degree of latitude, and a swath of 4 cells is 1,100 km wide.
TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH, LOST_PASSES = 10, 0.22, 4, 1 / 8
DECISIVE = "variables train_times validation_times test_times patch_size batch_size"
DECISIVE += " max_steps learning_rate seed"  # what a run and the one that resumes it share
RIVAL = "interpolated anomalies"  # linear interpolation of them, the best of these four
JUDGED_SAMPLES, JUDGE_SEED = 96, 1991  # not --seed: every run is judged on the same patches
ORDER_STREAM, PATCH_STREAM = 1, 2  # each use of randomness has its own: adding one never shifts another
refuse = argparse.ArgumentParser(usage=argparse.SUPPRESS).error  # says what to mend, and exits with code 2


def open_fields(store: str, variables: list[str]) -> xr.DataArray:
    """Read variables into memory, whatever the names, order and direction of their dimensions.

    Returns (time, variable, latitude, longitude), float32, ascending; the coordinate `units` has theirs.
    """
    try:
        with xr.open_dataset(store) as file:
            dims = {name: ", ".join(map(str, file[name].dims)) for name in file.data_vars}
            dataset = file[[name for name in dims if name in variables]].load()
    except (OSError, ValueError) as error:
        refuse(f"--store {store}: cannot be read ({type(error).__name__}); give a whole NetCDF file")
    dataset = dataset.squeeze().reset_coords(drop=True)  # a lone level, the start of a forecast
    try:
        dataset = rename_dimensions(dataset)
    except ValueError as error:
        refuse(f"--variables {' '.join(variables)}: {error}")
    for name in variables:
        on_these = name in dims and sorted(dataset[name].dims) == sorted(DIMENSIONS)
        if not on_these or not set(DIMENSIONS) <= set(dataset.indexes):
            found = "; ".join(f"{name} ({over})" for name, over in dims.items())
            refuse(f"--variables {name}: not in {store} on {', '.join(DIMENSIONS)} alone; it has {found}")
        if dataset[name].dtype.kind not in "iuf":
            refuse(f"--variables {name}: its type is {dataset[name].dtype}; give variables of numbers")
        if dataset[name].size == 0:
            refuse(f"--variables {name}: a dimension has length 0; give variables that have values")
    if not all(dataset.indexes[dim].is_unique for dim in DIMENSIONS):
        refuse(f"--store {store}: a coordinate has the same value twice; give each time and place once")
    dataset = sort_coordinates(dataset)
    fields = dataset[variables].to_dataarray("variable").astype("float32")
    fields = fields.where(np.isfinite(fields))  # infinity is no value either
    units = [str(dataset[name].attrs.get("units", name)).replace("**", "") for name in variables]
    fields["units"] = ("variable", [unit.replace("m s-1", "m/s") for unit in units])
    return fields.transpose("time", "variable", "latitude", "longitude")


def rename_dimensions(dataset: xr.Dataset) -> xr.Dataset:
    """Call the dimensions time, latitude and longitude, whatever they are called in the store.

    ValueError if two coordinates look like the same dimension.
    """
    for dimension, signs in DIMENSIONS.items():
        found = []
        for name in dataset.indexes:
            about = dataset[name].attrs
            described = [str(about.get(key)) for key in ("standard_name", "axis", "units")]
            if signs & {name.lower(), *described}:
                found.append(name)
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} both look like {dimension}; give variables of one grid")
        if found:
            dataset = dataset.rename({found[0]: dimension})
    return dataset


def sort_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """Sort the dimensions, with longitudes that do not jump where an area crosses 0 or 180 degrees."""
    dataset = dataset.assign_coords(longitude=dataset.longitude + 0.0)  # np.unwrap wants no integers
    steps = np.diff(np.unwrap(dataset.longitude, period=360))
    if steps.min() < 0 < steps.max():  # np.unwrap takes a jump of over 180 degrees for a step across the seam
        dataset = dataset.sortby("longitude")
    dataset = dataset.assign_coords(longitude=np.unwrap(dataset.longitude, period=360))
    dataset = dataset.sortby([*DIMENSIONS])
    is_repeated = np.isclose(dataset.longitude[-1] - dataset.longitude[0], 360, atol=1e-4)  # as 0 and 360 are
    return dataset.isel(longitude=slice(0, -1)) if is_repeated else dataset


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


class Patches(Dataset):
    """Patches of the anomalies and their swaths, addressed by (step, k): sample k of global step `step`."""

    def __init__(self, data: xr.Dataset, patch_size: int, batch_size: int, seed: int):
        """Take anomalies, climatology, std and valid cells; refuse a patch larger than the grid."""
        self.times, self.months = data.time.values, data.time.dt.month.values - 1
        self.latitude, self.longitude = data.latitude.values, data.longitude.values
        self.anomalies, self.climatology = data.anomalies.values, data.climatology.values
        self.valid, self.std = data.valid.values, data["std"].values[:, None, None]
        self.size, self.batch_size, self.seed = patch_size, batch_size, seed
        units = data.units.values.tolist()
        self.pools = {unit: [i for i, other in enumerate(units) if other == unit] for unit in units}
        if patch_size % 4 or patch_size > min(self.valid.shape):
            remedy = f"give a multiple of 4 up to {min(self.valid.shape) // 4 * 4}"
            refuse(f"--patch-size {patch_size}: the grid is {self.valid.shape}; {remedy}")
        self.spacing = self.longitude[1] - self.longitude[0]
        is_global = abs(self.longitude[-1] - self.longitude[0] + self.spacing - 360) < self.spacing / 2
        self.last_column = len(self.longitude) - (1 if is_global else patch_size)  # else no seam to cross

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
        """Return input (variables + 1, H, W), target (variables, H, W), unseen and weight (1, H, W), float32.

        Unseen is 1 in the cells to be filled, and the weight is cos(latitude) there; elsewhere both are 0.
        """
        time, row, column, swath = self.sample(*index)
        target, valid = (self.cut(field, row, column) for field in (self.anomalies[time], self.valid))
        seen, unseen = (cells[None].astype("float32") for cells in (valid & swath, valid & ~swath))
        cosine = np.cos(np.deg2rad(self.latitude[row : row + self.size, None])).clip(0).astype("float32")
        sample = {"input": np.concatenate([target * seen, seen]), "target": target}
        return sample | {"unseen": unseen, "weight": unseen * cosine}

    def fields(self, step: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The climatology and the anomaly of sample k, (variables, H, W) each, in the variables' units."""
        time, row, column, _ = self.sample(step, k)
        mean, anomaly = self.climatology[self.months[time]], self.anomalies[time]
        return self.cut(mean, row, column), self.std * self.cut(anomaly, row, column)


class StepSampler(Sampler):
    """The global batch of every step from `start` on, a list of (step, k): to resume, start later."""

    def __init__(self, args: argparse.Namespace, start: int):
        self.args, self.start = args, start

    def __len__(self) -> int:
        return self.args.max_steps  # of the whole run: Lightning counts those before a resume as fetched

    def __iter__(self):
        for step in range(self.start, self.args.max_steps):
            yield [(step, k) for k in range(self.args.batch_size)]


def make_patches(args: argparse.Namespace) -> tuple[Patches, Patches, Patches]:
    """Patches to train on, to validate on and to test on.

    Climatology, standard deviation and masked cells, where a variable has no value, are the training times'.
    """
    fields, taken, sets = open_fields(args.store, args.variables), [], []
    for name in ("train_times", "validation_times", "test_times"):
        (first, last), times = getattr(args, name), []
        with suppress(TypeError, ValueError):  # not dates
            times = fields.time.sel(time=slice(first, last)).values
        if not len(times) or np.isin(times, taken).any():
            span = " to ".join(str(time)[:10] for time in fields.time.values[[0, -1]])
            refuse(f"--{name.replace('_', '-')} {first} {last}: give dates of {span} that no other set has")
        taken, sets = [*taken, *times], [*sets, times]
    training = fields.sel(time=sets[0])
    valid = training.notnull().any("time").all("variable")
    climatology = training.groupby("time.month").mean().reindex(month=range(1, 13))
    anomalies = fields.groupby("time.month") - climatology
    std = anomalies.sel(time=sets[0]).where(valid).std(("time", "latitude", "longitude"))
    anomalies = (anomalies / std).where(valid, 0).sel(time=taken).transpose(*fields.dims)
    if not valid.any():
        refuse(f"--train-times {' '.join(args.train_times)}: a variable has no value in them; give others")
    finite = np.isfinite(anomalies).all(fields.dims[1:])
    if not finite.all():
        hole = f"NaN or infinity at {str(anomalies.time[~finite].values[0])[:10]}"
        refuse(f"--store {args.store}: {hole}; fill it, or give --train-times that month in several years")
    data = xr.Dataset({"anomalies": anomalies, "climatology": climatology, "std": std, "valid": valid})
    judging = [Patches(data.sel(time=s), args.patch_size, JUDGED_SAMPLES, JUDGE_SEED) for s in sets[1:]]
    return Patches(data.sel(time=sets[0]), args.patch_size, args.batch_size, args.seed), *judging


def baselines(patches: Patches) -> dict[str, dict[str, float]]:
    """The RMSE, for each unit, of four fills without a network: the month's climatology, the nearest seen
    cell, and linear interpolation (Delaunay) of the fields, and of the anomalies."""
    names = ("climatology", "nearest neighbour", "linear interpolation", RIVAL)
    squares, weights = 0, 0
    for k in range(JUDGED_SAMPLES):
        sample, (mean, anomaly) = patches[0, k], patches.fields(0, k)
        seen, unseen = sample["input"][-1] > 0, sample["unseen"][0] > 0
        known, holes, values = np.argwhere(seen), np.argwhere(unseen), np.stack([mean + anomaly, anomaly])
        mean, truth = mean[:, unseen], values[0][:, unseen]
        nearest = linear = np.stack([mean, 0 * mean])  # of a patch in which nothing is seen
        if len(known):
            nearest = linear = griddata(known, values[..., seen].T, holes, method="nearest").T
            with suppress(QhullError):  # too few for a triangle
                linear = griddata(known, values[..., seen].T, holes, method="linear").T
            linear = np.where(np.isnan(linear), nearest, linear)  # outside the hull of the seen cells
        errors = np.stack([mean, nearest[0], linear[0], mean + linear[1]]) - truth
        squares += (sample["weight"][0, unseen] * errors**2).sum(axis=-1)
        weights += sample["weight"].sum()
    of_unit = {unit: np.sqrt(squares[:, pool].mean(axis=1) / weights) for unit, pool in patches.pools.items()}
    return {name: {unit: float(of_unit[unit][i]) for unit in of_unit} for i, name in enumerate(names)}


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions. GroupNorm sees one sample at a time, wherever the others are computed."""
    layers = []
    for channels in (channels_in, channels_out):
        convolution = nn.Conv2d(channels, channels_out, 3, padding=1, padding_mode="replicate")
        layers += [convolution, nn.GroupNorm(8, channels_out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A small U-Net, from (batch, variables + 1, H, W) to (batch, variables, H, W); 4 divides H and W."""

    def __init__(self, variables: int, width: int = 24):
        super().__init__()
        self.down1 = conv_block(variables + 1, width)
        self.down2 = conv_block(width, 2 * width)
        self.bottom = conv_block(2 * width, 4 * width)
        self.up2 = conv_block(4 * width + 2 * width, 2 * width)
        self.up1 = conv_block(2 * width + width, width)
        self.head = nn.Conv2d(width, variables, kernel_size=1)
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
    return squares.sum() / (prediction.shape[1] * batch["unseen"].sum().clamp(min=1))


def learning_rate_factor(step: int, max_steps: int) -> float:
    """Warm-up in a straight line over a tenth of the run, then a half cosine down to zero."""
    warmup = max(1, max_steps // 10)
    phase = math.pi * max(0, step - warmup) / max(1, max_steps - warmup)
    return min(1, (step + 1) / warmup) * 0.5 * (1 + math.cos(phase))


@torch.no_grad()
def validate(model: nn.Module, patches: Patches, device: torch.device) -> dict[str, float]:
    """RMSE, for each unit, over the unseen cells: from summed squares and weights, so batches may differ."""
    squares, weights = 0, 0
    samples = [(0, k) for k in range(JUDGED_SAMPLES)]
    model.eval()
    for batch in DataLoader(patches, sampler=samples, batch_size=32):
        batch = {name: value.to(device) for name, value in batch.items()}
        error = model(batch["input"]) - batch["target"]
        squares += (batch["weight"] * error**2).sum(dim=(0, 2, 3)).cpu().double()
        weights += batch["weight"].sum().cpu().double()
    model.train()
    squares = patches.std.flatten() ** 2 * squares.numpy()
    return {unit: math.sqrt(squares[pool].mean() / weights.item()) for unit, pool in patches.pools.items()}


def train_step(model: nn.Module, optimizer, schedule, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward, loss, backward, update: one optimizer step. Returns the loss."""
    loss = masked_loss(model(batch["input"]), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()  # not loss.item(), for which the program would wait until a GPU is done


def draw_fill(patches: Patches, prediction: np.ndarray) -> Figure:
    """Map sample 0, its wind's speed or else its first variable; prediction (variables, H, W) is scaled."""
    (mean, anomaly), unseen = patches.fields(0, 0), patches[0, 0]["unseen"][0] > 0
    error = np.where(unseen, patches.std * prediction - anomaly, 0)
    is_wind, fields = patches.pools == {"m/s": [0, 1]}, (mean + anomaly, mean + anomaly + error, error)
    truth, filled, error = (np.hypot(*field) if is_wind else field[0] for field in fields)
    panels = {"truth": truth, "seen by the satellite": np.where(unseen, np.nan, truth)}
    panels |= {"filled by the network": filled, "error of the fill": np.where(unseen, abs(error), np.nan)}
    time, row, column, _ = patches.sample(0, 0)
    y = patches.latitude[row : row + patches.size]
    x = patches.longitude[column] + patches.spacing * np.arange(patches.size)
    least, most = np.nanmin(truth), np.nanmax(truth)
    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, (title, field) in zip(figure.subplots(2, 2).flat, panels.items()):
        hue, low, high = ("magma_r", 0, (most - least) / 3) if "error" in title else ("viridis", least, most)
        mesh = axes.pcolormesh(x, y, field, cmap=hue, vmin=low, vmax=high)
        axes.set(title=title, xlabel="longitude, °E", ylabel="latitude, °N", facecolor="0.8")
        figure.colorbar(mesh, ax=axes, label=next(iter(patches.pools)))
    figure.suptitle(f"{str(patches.times[time])[:7]}, kept from training")
    return figure


def measure(waits: list[float], works: list[float], batch_size: int) -> dict:
    """Samples/s of the loop, the share of its time spent waiting for data, and the process's peak memory.

    From the seconds of each batch; the first step starts everything up and does not count. On a GPU they
    end when kernels are queued, not when they are done: chapter 5 times those.
    """
    figures, wait, seconds = {}, sum(waits[1:]), sum(waits[1:] + works[1:])
    if seconds:  # else no step, or only the first
        figures["samples_per_second"] = batch_size * (len(works) - 1) / seconds
        figures["data_wait_share"] = wait / seconds
    with suppress(ImportError):  # Windows has none
        import resource

        unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
        figures["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return figures


def report(figures: dict, args: argparse.Namespace, picture: Path) -> None:
    """Print what a reader wants to know of a run, in one block."""
    rmse = figures["rmse"]["U-Net"]
    print(f"\nRMSE over the unseen cells of {' to '.join(args.test_times)}, {', '.join(rmse)}")
    for name, row in figures["rmse"].items():
        print(f"  {name:30}", *(f"{value:8.3f}" for value in row.values()))
    for name in (RIVAL, OI):
        rival = figures["rmse"].get(name)
        if rival:  # large patches have no optimal interpolation
            print(f"  against {name:22}", *(f"{rmse[unit] / rival[unit] - 1:+8.1%}" for unit in rmse))
    if "samples_per_second" in figures:
        share = f"{figures['data_wait_share']:.1%} of the time waiting for data"
        print(f"{figures['samples_per_second']:.1f} samples/s, {share}")
    memory = figures.get("peak_memory_gb", math.nan)
    print(f"{figures['steps']} steps in {figures['seconds']:.0f} s, peak memory {memory:.1f} GB")
    print(f"picture: {picture}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    summary, show_defaults = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add, times = parser.add_argument, {"nargs": 2, "metavar": ("FIRST", "LAST")}
    add("--store", default=os.path.relpath(STORE), help="NetCDF file")
    add("--variables", nargs="+", default=VARIABLES, help="any number of the store's variables")
    add("--train-times", **times, default=TRAIN_TIMES, help="dates, or years, to train on")
    add("--validation-times", **times, default=VALIDATION_TIMES, help="to make every choice on")
    add("--test-times", **times, default=TEST_TIMES, help="to report on, and to choose nothing")
    add("--patch-size", type=int, default=64, help="cells along a side of a patch")
    add("--batch-size", type=int, default=8, help="samples in the global batch")
    add("--max-steps", type=int, default=200, help="optimizer steps in the whole run")
    add("--learning-rate", type=float, default=6e-3, help="AdamW's, at the end of the warm-up")
    add("--validate-every", type=int, default=100, help="steps between validations")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-every", type=int, default=10, help="steps between lines of the log")
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="where to compute")
    add("--num-workers", type=int, default=0, help="processes that prepare batches; 0: this one")
    add("--seed", type=int, default=0, help="decides weights, order, patches and swaths")
    add("--output-dir", default=os.path.relpath(OUTPUTS), help="folder for the files of the run")
    add("--resume", nargs="?", const="last", metavar="CKPT", help="go on from OUTPUT_DIR/last.ckpt or CKPT")
    args = parser.parse_args(argv)
    args.variables = list(dict.fromkeys(args.variables))  # each once
    for name, value in vars(args).items():
        least = {"patch_size": 16, "num_workers": 0, "seed": 0, "learning_rate": 0}.get(name, 1)
        if isinstance(value, int | float) and not value >= least:
            refuse(f"--{name.replace('_', '-')} {value}: too small; give at least {least}")
    if args.accelerator == "gpu" and not torch.accelerator.is_available():
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    if args.seed >= 2**64:
        refuse(f"--seed {args.seed}: too large; give less than 2**64")
    check_folder(args.output_dir)
    if args.resume == "last":
        args.resume = str(Path(args.output_dir, "last.ckpt"))
    return args


def check_folder(folder: str) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made."""
    path = Path(folder).absolute()
    try:
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        TemporaryFile(dir=existing).close()
    except OSError as error:
        refuse(f"--output-dir {folder}: {error.strerror}; give a folder that can be written to")


def load_checkpoint(checkpoint: str, args: argparse.Namespace) -> dict:
    """A checkpoint; refuse one that is not there, or of a run that this one cannot go on with."""
    if not Path(checkpoint).is_file():
        refuse(f"--resume {checkpoint}: no such file; to start anew, give no --resume")
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        missing = {"step", "options", "model", "optimizer", "schedule"} - saved.keys()
        options = dict(saved.get("options", {}))
    except Exception as error:  # torch raises many kinds, depending on what the bytes look like
        refuse(f"--resume {checkpoint}: cannot be read ({type(error).__name__}); give a whole checkpoint")
    if missing:
        refuse(f"--resume {checkpoint}: has no {', '.join(sorted(missing))}; give a whole checkpoint")
    for name in DECISIVE.split():
        value, before = getattr(args, name), options.get(name)
        if value != before:
            flag = f"--{name.replace('_', '-')} {value}"
            refuse(f"{flag}: {checkpoint} has {before}; give that, or no --resume")
    return saved


def main(argv: list[str] | None = None) -> dict:
    """Train, judge and draw; return the headline figures."""
    began = perf_counter()
    args = parse_arguments(argv)
    checkpoint = load_checkpoint(args.resume, args) if args.resume else None
    training, validation, test = make_patches(args)
    folder, start = Path(args.output_dir), 0
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = args.accelerator != "cpu" and torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")

    torch.manual_seed(args.seed)
    model = UNet(len(args.variables)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    factor = partial(learning_rate_factor, max_steps=args.max_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        start = checkpoint["step"]

    def save_checkpoint(step: int) -> None:
        parts = {name: part.state_dict() for name, part in state.items()}
        torch.save({"step": step, "options": vars(args), **parts}, folder / "last.ckpt")

    sampler = StepSampler(args, start)
    batches = iter(DataLoader(training, batch_sampler=sampler, num_workers=args.num_workers))
    log = open(folder / (f"resumed_at_{start}.csv" if args.resume else "metrics.csv"), "w", buffering=1)
    print("step,loss,learning_rate,wait_seconds,work_seconds,rmse", file=log)
    waits, works = [], []
    bar = tqdm(range(start, args.max_steps), initial=start, total=args.max_steps, unit="step")
    for step in bar:
        rate = schedule.get_last_lr()[0]
        asked = perf_counter()
        batch = next(batches)
        waits.append(perf_counter() - asked)
        batch = {name: value.to(device) for name, value in batch.items()}
        given = perf_counter()
        loss = train_step(model, optimizer, schedule, batch)
        works.append(perf_counter() - given)

        rmse = ""
        if (step + 1) % args.validate_every == 0:
            rmse = next(iter(validate(model, validation, device).values()))
        if (step + 1) % args.log_every == 0 or rmse:
            print(step, loss.item(), rate, waits[-1], works[-1], rmse, sep=",", file=log)
            bar.set_postfix(loss=loss.item(), rmse=rmse)
        if (step + 1) % args.checkpoint_every == 0:
            save_checkpoint(step + 1)
    log.close()
    save_checkpoint(args.max_steps)

    figures = {"steps": args.max_steps} | measure(waits, works, args.batch_size)
    figures["rmse"] = baselines(test) | oi_baseline(training, test) | {"U-Net": validate(model, test, device)}
    with torch.no_grad():
        prediction = model(torch.from_numpy(test[0, 0]["input"])[None].to(device))
    draw_fill(test, prediction[0].cpu().numpy()).savefig(folder / "fill.png")
    figures["seconds"] = perf_counter() - began
    (folder / "summary.json").write_text(json.dumps(figures, indent=2))
    report(figures, args, folder / "fill.png")
    return figures


if __name__ == "__main__":
    main()
