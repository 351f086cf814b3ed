"""What a run is judged by: baselines without a network, a picture, a summary."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.interpolate import griddata
from scipy.spatial import QhullError
from torch import nn

from climatology import describe_shares
from coast import draw_coast
from data import Data, PatchDataset
from errors import DataError
from fields import day_of
from oi_baseline import OI, oi_baseline

NETWORK = "U-Net"
DIVERGED = "--learning-rate: the network's RMSE is not finite; give a lower rate"
NOTHING_TO_JUDGE = "--test-times: no value is present in any patch; give others"


def baselines(
    data: Data, patches: PatchDataset, folder: Path
) -> dict[str, dict[str, float]]:
    """The RMSE of each fill without a network, in each unit.

    That of optimal interpolation is kept in the folder, where a later run finds it.
    """
    squares: dict[str, np.ndarray] = {}
    weights = 0.0
    maker = patches.maker
    samples = patches.__getitems__([(0, k) for k in range(patches.batch_size)])
    for k, sample in enumerate(samples):
        mean = maker.monthly_mean(patches.patch(0, k))
        anomaly = maker.std * sample["target"]
        seen = sample["input"][-1] > 0
        unseen = sample["unseen"][0] > 0
        weight = sample["weight"][0, unseen]
        weights += sample["weight"].sum()
        truth = mean[:, unseen] + anomaly[:, unseen]
        truth = truth.astype("float64")  # and so are the errors
        for name, fill in fills(mean, anomaly, seen, unseen).items():
            error = (weight * (fill - truth) ** 2).sum(axis=-1)
            squares[name] = squares.get(name, 0) + error
    if not weights:
        raise DataError(NOTHING_TO_JUDGE)
    rmse: dict[str, dict[str, float]] = {}
    for name, square in squares.items():
        rmse[name] = data.rmse(square / weights)
    return rmse | oi_baseline(data, patches, samples, folder)


def fills(
    mean: np.ndarray, anomaly: np.ndarray, seen: np.ndarray, unseen: np.ndarray
) -> dict[str, np.ndarray]:
    """Four guesses of the unseen cells, (variables, cells) each, from those seen.

    The month's climatology; the nearest seen cell; linear interpolation (Delaunay) of the
    winds, and of the anomalies. `mean` and `anomaly` are (variables, H, W).
    """
    wind = mean + anomaly
    climatology = mean[:, unseen]
    nearest = interpolate(wind, seen, unseen, "nearest")
    linear = interpolate(wind, seen, unseen, "linear")
    anomalies = interpolate(anomaly, seen, unseen, "linear")
    if not seen.any():
        nearest = linear = climatology
    return {
        "climatology": climatology,
        "nearest neighbour": nearest,
        "linear interpolation": linear,
        "interpolated anomalies": climatology + anomalies,
    }


def best_simple_fills(rmse: dict[str, dict[str, float]]) -> dict[str, str]:
    """The simple fill to beat in each unit: that of the lowest RMSE."""
    fills = [name for name in rmse if name not in (OI, NETWORK)]
    best = {}
    for unit in rmse[NETWORK]:
        best[unit] = min(fills, key=lambda name: rmse[name][unit])
    return best


def interpolate(
    field: np.ndarray, seen: np.ndarray, unseen: np.ndarray, method: str
) -> np.ndarray:
    """The unseen cells from those seen, (variables, cells); 0 if nothing is seen."""
    known = np.argwhere(seen)
    holes = np.argwhere(unseen)
    if not len(known):
        return np.zeros((len(field), len(holes)))
    values = field[:, seen].T
    nearest = griddata(known, values, holes, method="nearest").T
    if method == "nearest":
        return nearest
    with suppress(QhullError):  # too few cells for a triangle
        linear = griddata(known, values, holes, method="linear").T
        outside_hull = np.isnan(linear)
        return np.where(outside_hull, nearest, linear)
    return nearest


def plot_example(
    dataset: PatchDataset, units: dict[str, list[int]], network: nn.Module
) -> Figure:
    """Draw a sample and the network's fill: the wind's speed, or the first variable.

    Cells that are absent are left blank, in a darker grey than those that are not shown.
    """
    maker = dataset.maker
    k, sample = first_with_target(dataset)
    patch = dataset.patch(0, k)
    prediction = predict(network, sample["input"])
    unseen = sample["unseen"][0] > 0
    present = unseen | (sample["input"][-1] > 0)
    truth = maker.monthly_mean(patch) + maker.std * sample["target"]
    truth = np.where(present, truth, np.nan)
    error = maker.std * (prediction - sample["target"])
    error = np.where(unseen, error, 0)
    is_wind = units == {"m/s": [0, 1]}
    show = speed if is_wind else first_variable
    wind = show(truth)
    miss = np.abs(show(error))
    panels = {
        "truth": wind,
        "seen by the satellite": np.where(unseen, np.nan, wind),
        "filled by the network": show(truth + error),
        "error of the fill": np.where(unseen, miss, np.nan),
    }
    blank = np.where(present, np.nan, 0.4)
    size = maker.space.size
    y = maker.grid.latitude[patch.row : patch.row + size]
    west = maker.grid.longitude[patch.column]
    x = west + maker.grid.spacing * np.arange(size)
    low = np.nanmin(wind)
    high = np.nanmax(wind)

    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, (title, field) in zip(figure.subplots(2, 2).flat, panels.items()):
        colours = {"cmap": "viridis", "vmin": low, "vmax": high}
        beyond = "neither"
        if "error" in title:
            colours = {"cmap": "magma_r", "vmin": 0, "vmax": (high - low) / 3}
            beyond = "max"
        mesh = axes.pcolormesh(x, y, field, **colours)
        axes.pcolormesh(x, y, blank, cmap="gray", vmin=0, vmax=1)
        axes.set(title=title, xlabel="longitude", ylabel="latitude", facecolor="0.8")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(format_longitude)
        axes.yaxis.set_major_formatter(format_latitude)
        draw_coast(axes)
        figure.colorbar(mesh, ax=axes, extend=beyond, label=next(iter(units)))
    date = day_of(maker.period.dates[patch.time])
    title = f"{date}, kept from training"
    if not present.all():
        title += "; dark grey: no value"
    figure.suptitle(title)
    return figure


def first_with_target(dataset: PatchDataset) -> tuple[int, dict[str, np.ndarray]]:
    """The first sample that has cells to be filled, and its number k."""
    for k in range(dataset.batch_size):
        sample = dataset[0, k]
        if sample["unseen"].any():
            return k, sample
    raise DataError(NOTHING_TO_JUDGE)


def predict(network: nn.Module, inputs: np.ndarray) -> np.ndarray:
    """The network's answer to one sample, (variables, H, W)."""
    device = next(network.parameters()).device
    with torch.no_grad():
        answer = network(torch.from_numpy(inputs)[None].to(device))
    return answer[0].cpu().numpy()


def speed(wind: np.ndarray) -> np.ndarray:
    """The speed (H, W) of a wind (u and v, H, W)."""
    return np.hypot(wind[0], wind[1])


def first_variable(fields: np.ndarray) -> np.ndarray:
    return fields[0]


def format_latitude(degrees: float, position: int | None = None) -> str:
    """As in an atlas: 60 °S, not -60 °N."""
    if degrees == 0:
        return "0°"
    hemisphere = "N" if degrees > 0 else "S"
    return f"{abs(degrees):g} °{hemisphere}"


def format_longitude(degrees: float, position: int | None = None) -> str:
    """As in an atlas: 90 °W, not 270 °E."""
    degrees = (degrees + 180) % 360 - 180
    if degrees in (0, -180):
        return f"{abs(degrees):g}°"
    hemisphere = "E" if degrees > 0 else "W"
    return f"{abs(degrees):g} °{hemisphere}"


def print_gains(rmse: dict[str, dict[str, float]]) -> None:
    """How far the network's RMSE is from that of its rivals: a line for each, and unit."""
    for unit, network in rmse[NETWORK].items():
        suffix = f"  {unit}" if len(rmse[NETWORK]) > 1 else ""
        for name in (best_simple_fills(rmse)[unit], OI):
            if name in rmse:
                gain = network / rmse[name][unit] - 1
                print(f"  {f'against {name}':30} {gain:+8.1%}{suffix}")


def print_summary(metrics: dict, test_times: list[str], picture: Path) -> None:
    """Print what a reader wants to know of a run, in one block.

    DataError, below it, if the network's RMSE is not finite.
    """
    rmse = metrics["rmse"][NETWORK]
    span = " to ".join(test_times)
    print(f"\nRMSE over the unseen cells of {span}, {', '.join(rmse)}")
    for name, row in metrics["rmse"].items():
        print(f"  {name:30}", *(f"{value:8.3f}" for value in row.values()))
    is_finite = np.isfinite(list(rmse.values())).all()
    if is_finite:
        print_gains(metrics["rmse"])
    if "samples_per_second" in metrics:
        rate = f"{metrics['samples_per_second']:.1f} samples/s"
        print(f"{rate}, {metrics['data_wait_share']:.1%} of the time waiting for data")
    if "requests_per_sample" in metrics:
        size = f"{metrics['bytes_per_sample'] / 1e6:.2f} MB"
        print(f"{metrics['requests_per_sample']:.1f} requests and {size} for a sample")
    low = describe_shares(metrics.get("climatology_shares", {}))
    if low:
        print(low)
    if metrics.get("missing_chunks"):
        print(f"missing chunks that were asked for: {metrics['missing_chunks']}")
    if "startup_seconds" in metrics:
        print(f"{metrics['startup_seconds']:.0f} s before the first step")
    memory = f"peak memory {metrics['peak_memory_gb']:.1f} GB"
    print(f"{metrics['steps']} steps in {metrics['seconds']:.0f} s, {memory}")
    print(f"picture: {picture}")
    if not is_finite:
        raise DataError(DIVERGED)
