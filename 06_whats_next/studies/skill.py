"""How well a network fills whole maps that it has not seen, by basin and by season.

    uv run python -m studies.skill results/final.ckpt --store STORE   # or a checkpoint of your own

You should see its RMSE beside those of five fills without a network, after three minutes.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from arguments import add_options
from command_line import call_at, make_location
from ending import run
from errors import CheckpointError, DataError, refuse
from evaluation import NETWORK, fills
from fields import split_times
from interpolator import Interpolator, make_interpolator
from location import Location
from oi_baseline import OI
from options import StoreOptions
from predict.maps import (
    OVERLAP,
    MapDataset,
    MapFiller,
    choose_overlap,
    load_model,
    make_maps,
)
from results import RESULTS, save_rows
from store import FieldReader
from store_checks import check_icechunk, check_secrets, check_server, check_store

# Boxes: south, north, west, east. The land in them counts, too.
BASINS = {
    "North Pacific": (20, 60, 120, 240),
    "North Atlantic": (20, 60, 280, 360),
    "tropical Pacific": (-20, 20, 120, 280),
    "tropical Atlantic": (-20, 20, 310, 370),
    "tropical Indian Ocean": (-20, 20, 45, 100),
    "Southern Ocean": (-60, -40, 0, 360),
}
SEASONS = {"DJF": (11, 0, 1), "MAM": (2, 3, 4), "JJA": (5, 6, 7), "SON": (8, 9, 10)}
BASELINES = (
    "climatology",
    "nearest neighbour",
    "linear interpolation",
    "interpolated anomalies",
    OI,
)
FILLS = (*BASELINES, NETWORK)
# Nearest neighbours are not drawn.
STYLES = {
    "climatology": {"color": "0.6", "marker": "s", "linestyle": ""},
    "linear interpolation": {"color": "#E69F00", "marker": "^", "linestyle": ""},
    "interpolated anomalies": {"color": "#0072B2", "marker": "D", "linestyle": ""},
    OI: {"color": "black", "marker": "v", "linestyle": ""},
    NETWORK: {"color": "#D55E00", "marker": "o", "linestyle": ""},
}
SEASON_COLOURS = ("#56B4E9", "#009E73", "#CC79A7", "#882255")
CROSSING = 16  # columns added on both sides, so that interpolation crosses the seam


class Errors:
    """Weighted squared errors of each fill, by season and cell."""

    def __init__(self, shape: tuple[int, int]):
        self.weight = np.zeros((len(SEASONS), *shape))
        self.squares = {name: np.zeros_like(self.weight) for name in FILLS}

    def add(
        self, month: int, weight: np.ndarray, errors: dict[str, np.ndarray]
    ) -> None:
        """Add a map: the weight of each cell, and each fill's errors, (variables, H, W)."""
        season = next(n for n, each in enumerate(SEASONS.values()) if month in each)
        self.weight[season] += weight
        for name, squares in self.squares.items():
            squares[season] += weight * (errors[name] ** 2).mean(axis=0)

    def rmse(self, name: str, cells: np.ndarray, season: int | slice) -> float:
        """Of one fill in some cells, (H, W), in one season or in all."""
        squares = self.squares[name][season][..., cells].sum()
        return float(np.sqrt(squares / self.weight[season][..., cells].sum()))


def predict_map(model: MapFiller, known: dict[str, Any]) -> np.ndarray:
    """The network's answer to a map: anomalies of all patches, over the spread."""
    batch = {"patches": torch.from_numpy(known["patches"])}
    with torch.no_grad():
        return model.predict_step(batch, 0).numpy()


def interpolate_patches(
    interpolator: Interpolator, maps: MapDataset, known: dict[str, Any]
) -> np.ndarray:
    """Optimal interpolation of the patches that the network sees: as it answers."""
    answers = []
    for corner, patch in zip(maps.tiling.corners, known["patches"]):
        seen = patch[-1] > 0
        answers.append(interpolator.fill(*corner, seen, patch[:-1]))
    return np.stack(answers)


def interpolate_map(
    known: dict[str, Any], unseen: np.ndarray, wraps: bool
) -> dict[str, np.ndarray]:
    """Each fill without a network, (variables, H, W), across the map's seam."""
    added = CROSSING if wraps else 0
    edges = [(0, 0), (0, 0), (added, added)]
    mean = np.pad(known["mean"], edges, mode="wrap")
    anomaly = np.pad(known["values"], edges, mode="wrap") - mean
    seen = np.pad(known["seen"], edges[1:], mode="wrap")
    holes = np.pad(unseen, edges[1:])
    maps = {}
    for name, cells in fills(mean, anomaly, seen, holes).items():
        maps[name] = known["values"].copy()
        maps[name][:, unseen] = cells
    return maps


def measure(
    model: MapFiller,
    interpolator: Interpolator,
    draws: list[MapDataset],
    latitude: np.ndarray,
) -> Errors:
    """The errors on all maps, each with the swaths of every draw."""
    errors = Errors(draws[0].tiling.shape)
    cosine = np.cos(np.deg2rad(latitude)).clip(0)[:, None]
    numbers = range(len(draws[0]))
    for number in tqdm(numbers, "maps", disable=None):
        for maps in draws:
            known = maps[number]
            present = ~np.isnan(known["values"] + known["mean"]).any(axis=0)
            unseen = present & ~known["seen"]
            guesses = interpolate_map(known, unseen, maps.tiling.wraps)
            by_patches = {
                OI: interpolate_patches(interpolator, maps, known),
                NETWORK: predict_map(model, known),
            }
            for name, patches in by_patches.items():
                guesses[name] = maps.fill(known, patches)
            error = {name: guesses[name] - known["values"] for name in FILLS}
            error = {name: np.where(unseen, each, 0) for name, each in error.items()}
            errors.add(maps.period.months[number], unseen * cosine, error)
    return errors


def box(bounds: tuple, latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """The cells of a box of BASINS, (H, W)."""
    south, north, west, east = bounds
    rows = (latitude >= south) & (latitude <= north)
    columns = (longitude - west) % 360 <= east - west
    return rows[:, None] & columns


def find_basins(latitude: np.ndarray, longitude: np.ndarray) -> dict[str, np.ndarray]:
    """The cells of each basin, (H, W), then those of none, then all."""
    basins = {name: box(bounds, latitude, longitude) for name, bounds in BASINS.items()}
    inside = np.any(list(basins.values()), axis=0)
    return basins | {"elsewhere": ~inside, "everywhere": np.ones_like(inside)}


def tabulate(
    errors: Errors, latitude: np.ndarray, longitude: np.ndarray
) -> Iterator[dict]:
    """A row for each basin and season, and for each basin over the year."""
    seasons = {"year": slice(None)} | {name: n for n, name in enumerate(SEASONS)}
    for basin, cells in find_basins(latitude, longitude).items():
        if not errors.weight[:, cells].any():
            continue  # the store is of another area
        for season, number in seasons.items():
            if errors.weight[number][..., cells].any():
                rmse = {name: errors.rmse(name, cells, number) for name in FILLS}
                yield {"basin": basin, "season": season, "rmse": rmse}


def plot_skill(rows: list[dict]) -> Figure:
    """RMSE by basin, and how far the network is from the best other fill in each season."""
    basins = list(dict.fromkeys(row["basin"] for row in rows))
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, style in STYLES.items():
        rmse = [row["rmse"][name] for row in rows if row["season"] == "year"]
        left.plot(rmse, range(len(basins)), label=name, **style)
    for number, season in enumerate(SEASONS):
        chosen = [row for row in rows if row["season"] == season]
        gains = [100 * gain_of(row) for row in chosen]
        offset = 0.12 * (number - 1.5)
        places = [basins.index(row["basin"]) + offset for row in chosen]
        colour = SEASON_COLOURS[number]
        right.plot(gains, places, "o", color=colour, label=season, markersize=7)
    left.set(yticks=range(len(basins)), yticklabels=basins, xlabel="RMSE, m/s")
    left.invert_yaxis()
    left.set_xlim(left=0)
    against = " or ".join(sorted({best_baseline(row) for row in rows}))
    right.set_xlabel(f"RMSE of the {NETWORK} against {against}, % (below 0: better)")
    right.axvline(0, color="0.5", linewidth=1)
    for axes, ncols in ((left, 3), (right, 4)):
        axes.grid(axis="x", color="0.9")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.01), ncols=ncols)
    return figure


def gain_of(row: dict) -> float:
    """The network's RMSE over that of the best of the other fills, less 1."""
    return row["rmse"][NETWORK] / row["rmse"][best_baseline(row)] - 1


def best_baseline(row: dict) -> str:
    return min(BASELINES, key=row["rmse"].get)


def print_skill(rows: list[dict]) -> None:
    """Print the RMSE of the year in each basin, a line a basin."""
    print("  ".join(["RMSE, m/s".ljust(22), *FILLS]))
    for row in rows:
        if row["season"] == "year":
            columns = [f"{row['rmse'][name]:{len(name)}.3f}" for name in FILLS]
            gain = f"{gain_of(row):+.1%} against {best_baseline(row)}"
            print("  ".join([row["basin"].ljust(22), *columns, gain]))


def parse_study(summary: str, argv: list[str] | None) -> argparse.Namespace:
    """The options of a study of a checkpoint; exits with code 2 if one is wrong."""
    parser = argparse.ArgumentParser(description=summary)
    add = parser.add_argument
    add("checkpoint", type=Path, help="one that train.py wrote")
    add_options(parser, StoreOptions)
    times = "dates or years; if not given, those of the run's test"
    add("--times", nargs=2, metavar=("FIRST", "LAST"), help=times)
    add("--overlap", type=int, help=OVERLAP)
    add("--draws", type=int, default=4, help="how often swaths are drawn for a map")
    add("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    check_secrets(args, "store", "endpoint")
    check_store("--store", args.store)
    check_server(args)
    check_icechunk(args)
    for name, least in {"draws": 1, "overlap": 0}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            refuse(f"--{name} {value}: give at least {least}")
    args.command = shlex.join(sys.argv[1:] if argv is None else argv)
    return args


def make_draws(
    args: argparse.Namespace, location: Location, overlap: int | None
) -> tuple[MapFiller, list[MapDataset]]:
    """The network, and the maps of its test with several draws of swaths."""
    model, record = load_model(args.checkpoint)
    options = record["options"]
    overlap = choose_overlap(overlap, record)
    asked_for = (options["variables"], options["level"], args.missing_chunks)
    reader = FieldReader(location, *asked_for)
    times = args.times or options["test_times"]
    draws = []
    for seed in range(args.draws):
        maps = make_maps(
            reader,
            reader,
            times=times,
            model=model,
            record=record,
            overlap=overlap,
            seed=seed,
            folder=Path(args.climatology_dir),
        )
        draws.append(maps)
    return model, draws


def interpolator_of(maps: MapDataset, checkpoint: Path) -> Interpolator:
    """Optimal interpolation, by the times that the network was trained on."""
    _, record = load_model(checkpoint)
    span = {"--train-times": record["options"]["train_times"]}
    (training,) = split_times(maps.reader.open().time, span)
    parts = (maps.reader, training, maps.climatology, maps.tiling.size)
    try:
        return make_interpolator(*parts)
    except DataError as error:
        raise DataError(f"{OI}: {error}") from error


def study(args: argparse.Namespace, location: Location) -> list[dict]:
    """A row for each basin and season."""
    model, draws = make_draws(args, location, args.overlap)
    if len(model.hparams.units) > 1:
        reason = f"variables in {' and '.join(model.hparams.units)} have no common RMSE"
        raise CheckpointError(f"{reason}; give one of variables in one unit")
    fields = draws[0].reader.open()
    latitude = fields.latitude.values
    interpolator = interpolator_of(draws[0], args.checkpoint)
    errors = measure(model, interpolator, draws, latitude)
    rows = list(tabulate(errors, latitude, fields.longitude.values))
    print_skill(rows)
    if args.save_results:
        save_rows("skill", f"uv run python -m studies.skill {args.command}", rows)
        plot_skill(rows).savefig(RESULTS / "skill.png", dpi=80)
    return rows


def call_study(
    task: Callable[[argparse.Namespace, Location], list[dict]],
    summary: str,
    argv: list[str] | None,
) -> list[dict]:
    """Call a study of a checkpoint on the store that is named, or on a small one."""
    args = parse_study(summary, argv)
    name = f"checkpoint {args.checkpoint}"
    return call_at(partial(task, args), make_location(args), name)


def main(argv: list[str] | None = None) -> list[dict]:
    """Judge a checkpoint by basin and season."""
    return call_study(study, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
