"""The coast on a map; a folder that stands alone, without its file, draws none."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

FILE = Path(__file__).resolve().parent.parent / "01_setup/data/coastline.csv"
# White within black shows on light colours and on dark ones.
EDGE = withStroke(linewidth=1.6, foreground="black")
STYLE = {"color": "white", "linewidth": 0.7, "path_effects": [EDGE]}
TURNS = (-360, 0, 360)  # longitudes of the map may begin anywhere


def draw_coast(axes: Axes) -> None:
    """Draw the coast within the limits of a map whose axes are in degrees."""
    limits = axes.axis()
    for line in read_coast():
        for turn in TURNS:
            axes.plot(line[:, 0] + turn, line[:, 1], **STYLE)
    axes.axis(limits)


def cover_land(axes: Axes) -> None:
    """Paint over the land of a map that ends before the poles, if its file is there."""
    limits = axes.axis()
    for line in read_coast():
        for turn in TURNS:
            axes.fill(line[:, 0] + turn, line[:, 1], color="0.75", zorder=2)
    axes.axis(limits)


def read_coast() -> list[np.ndarray]:
    """Lines of (points, 2), longitude and latitude; none where the file is not there."""
    if not FILE.exists():
        return []
    points = np.genfromtxt(FILE, delimiter=",", skip_header=1)
    gaps = np.flatnonzero(np.isnan(points[:, 0]))
    lines = np.split(points, gaps)
    return [line[~np.isnan(line[:, 0])] for line in lines]
