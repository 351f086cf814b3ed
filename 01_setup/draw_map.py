"""Chapter 1: draw one month's wind over the sea: as seen, as filled, and as it was.

    uv run python train.py --max-steps 1500 --validate-every 250 --checkpoint-every 250
    uv run python draw_map.py                    # some seconds; writes outputs/train/map.png
    uv run python draw_map.py other/last.ckpt    # of another run on the book's winds

You should see one of the patches that judge a run, which the network has not trained on.
The swaths are simulated. The network fills land as well; the land is painted over because
a wind satellite sees the sea only.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from checkpoints import OPTIONS, PARTS, load_checkpoint
from coast import cover_land, draw_coast
from datamodule import WindDataModule
from ending import call
from errors import CheckpointError
from evaluation import format_latitude, format_longitude, predict, speed
from model import FillGaps
from options import VARIABLES, parse_options, run_folder, winds_file
from task import make_data, make_datamodule

SAMPLE = 0  # of the patches that judge a run: over the Pacific
SOUTH, NORTH = -60, 60


def draw(datamodule: WindDataModule, model: FillGaps) -> Figure:
    """Three maps of the wind's speed in m/s."""
    dataset = datamodule.test
    maker = dataset.maker
    patch = dataset.patch(0, SAMPLE)
    sample = dataset[0, SAMPLE]
    mean = maker.monthly_mean(patch)
    truth = speed(mean + maker.std * sample["target"])
    prediction = predict(model.model, sample["input"])
    filled = speed(mean + maker.std * prediction)
    unseen = sample["unseen"][0] > 0
    panels = {
        "what the satellite sees": np.where(unseen, np.nan, truth),
        "filled by the network": np.where(unseen, filled, truth),
        "the wind as it was": truth,
    }
    size = maker.space.size
    latitude = maker.grid.latitude[patch.row : patch.row + size]
    west = maker.grid.longitude[patch.column]
    longitude = west + maker.grid.spacing * np.arange(size)

    figure = Figure(figsize=(11, 3.5), layout="constrained")
    all_axes = figure.subplots(1, 3, sharey=True)
    for axes, (title, field) in zip(all_axes, panels.items()):
        mesh = axes.pcolormesh(longitude, latitude, field, vmin=0, vmax=12)
        axes.set(title=title, ylim=(SOUTH, NORTH), facecolor="white")
        axes.xaxis.set_major_locator(MultipleLocator(40))
        axes.xaxis.set_major_formatter(format_longitude)
        axes.yaxis.set_major_formatter(format_latitude)
        cover_land(axes)
        draw_coast(axes)
    figure.colorbar(mesh, ax=all_axes, label="wind speed, m/s", extend="max", pad=0.01)
    month = np.datetime_as_string(maker.period.dates[patch.time], "M")
    figure.suptitle(f"{month}: monthly mean at 2.5 degrees, simulated swaths")
    return figure


def save_map(checkpoint: Path) -> Path:
    """Draw the fill of a checkpoint beside it, and return the picture's path."""
    if not checkpoint.is_file():
        raise CheckpointError("no such file; train first, or name another")
    saved = load_checkpoint(str(checkpoint), PARTS)
    if saved[OPTIONS]["variables"] != VARIABLES:
        raise CheckpointError("is of other variables; name one of the book's winds")
    options, data = make_data(parse_options("", []))
    model = FillGaps.load_from_checkpoint(checkpoint, map_location="cpu")
    figure = draw(make_datamodule(options, data), model.eval())
    picture = checkpoint.with_name("map.png")
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")
    return picture


def main(argv: list[str] | None = None) -> Path:
    """Draw the fill of a checkpoint; errors end with code 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(run_folder(), "last.ckpt")
    text = f"of train.py (default: {default})"
    parser.add_argument("checkpoint", type=Path, nargs="?", default=default, help=text)
    checkpoint = parser.parse_args(argv).checkpoint
    return call(partial(save_map, checkpoint), str(checkpoint), winds_file())


if __name__ == "__main__":
    main()
