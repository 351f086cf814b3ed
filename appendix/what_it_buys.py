"""Appendix: draw what the book does to one training, from what chapters 4 and 5 measured.

    uv run python what_it_buys.py    # a second; writes results/what_it_buys.png

Nothing is measured here. The share of time spent waiting for data is that of
04_data_pipeline/results/wait.json, samples/s are those of
05_model_profiling/results/training.json.
"""

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
BOOK = HERE.parent
PICTURE = HERE / "results/what_it_buys.png"
WAIT, WORK, RATE = "#D55E00", "#0072B2", "#009E73"  # of Okabe and Ito
LOADERS = {"naive": "a loop over\nxarray", "final": "chapter 4's\nblocks"}
STEPS = [
    "a loop over xarray, patch by patch",
    "chapter 3: the reads of a batch at once",
    "chapter 4: blocks, read ahead",
    "chapter 5: a faster step, in float32",
    "chapter 5: in bfloat16",
]


def main() -> Figure:
    """Draw both panels and save them."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    draw_wait(left, read_rows("04_data_pipeline/results/wait.json"))
    draw_rates(right, read_rows("05_model_profiling/results/training.json"))
    figure.savefig(PICTURE, dpi=110)
    return figure


def read_rows(path: str) -> list[dict]:
    return json.loads((BOOK / path).read_text())["rows"]


def draw_wait(axes: Axes, rows: list[dict]) -> None:
    """A step's time, divided into waiting and computing, for the first and the last loader."""
    names = []
    waits = []
    for row in rows:
        if row["num_workers"] == 0:
            names.append(LOADERS[row["loader"]])
            waits.append(100 * row["data_wait_share"]["median"])
    works = [100 - wait for wait in waits]
    axes.barh(names, waits, color=WAIT, label="waiting for data", height=0.5)
    axes.barh(names, works, left=waits, color=WORK, label="computing", height=0.5)
    for place, wait in enumerate(waits):
        text = f"{wait:.0f}% waiting"
        axes.text(max(3, wait / 3), place, text, va="center", color="white")
    axes.invert_yaxis()
    axes.set(title="Where the time goes", xlabel="% of the time", xlim=(0, 100))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25)}
    axes.legend(**below, ncols=2, frameon=False)


def draw_rates(axes: Axes, rows: list[dict]) -> None:
    """Samples/s of each rung: the median, and the least and greatest."""
    for place, row in enumerate(rows):
        rate = row["samples_per_second"]
        axes.hlines(place, rate["min"], rate["max"], color=RATE, linewidth=2)
        axes.plot(rate["median"], place, "o", color=RATE, markersize=8)
        if place:
            times = f"{row['times_naive']:.0f} times"
            axes.text(rate["max"] + 2, place, times, va="center")
    axes.set_yticks(range(len(rows)), STEPS)
    axes.invert_yaxis()
    axes.set(title="How fast it trains", xlabel="samples/s", xlim=(0, 118))
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    main()
