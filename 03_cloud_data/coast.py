"""The coast on a map; a folder that stands alone, without its file, draws none."""

from functools import cache
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
    if not FILE.exists():
        return
    limits = axes.axis()
    longitude, latitude = read_coast().T
    for turn in TURNS:
        axes.plot(longitude + turn, latitude, **STYLE)
    axes.axis(limits)


def cover_land(axes: Axes) -> None:
    """Paint over the land of a map that ends before the poles, if its file is there."""
    if not FILE.exists():
        return
    limits = axes.axis()
    points = read_coast()
    gaps = np.flatnonzero(np.isnan(points[:, 0]))
    for line in np.split(points, gaps + 1):
        for turn in TURNS:
            axes.fill(line[:-1, 0] + turn, line[:-1, 1], color="0.75", zorder=2)
    axes.axis(limits)


@cache
def read_coast() -> np.ndarray:
    """Longitude and latitude, (points, 2); a row of NaN ends each line."""
    return np.genfromtxt(FILE, delimiter=",", skip_header=1)
