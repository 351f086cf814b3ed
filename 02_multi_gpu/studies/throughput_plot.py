"""The picture of weak and strong scaling."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"weak": "#009E73", "strong": "#E69F00"}
MARKERS = {"weak": "o", "strong": "s"}
# A little beside each other, so that no range hides another.
SHIFT = {"weak": -0.02, "strong": 0.02}


def plot_scaling(rows: list[dict]) -> Figure:
    """Samples/s by the number of devices, and where the time of a step goes."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    plotted = [row for row in rows if row["mode"] in COLOURS]
    plot_rates(left, plotted)
    plot_steps(right, plotted)
    for axes in (left, right):
        axes.tick_params(labelsize=14)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_rates(axes: Axes, rows: list[dict]) -> None:
    """Median samples/s with their range, beside what each device would ideally add."""
    for mode in COLOURS:
        plot_mode(axes, mode, rows)
    first = rows[0]["samples_per_second"]["median"]
    devices = sorted({row["devices"] for row in rows})
    ideal = [first * number for number in devices]
    axes.plot(devices, ideal, ":", color="0.3", label="ideal")
    axes.set_xlabel("devices", fontsize=14)
    axes.set_ylabel("samples/s", fontsize=14)
    axes.set_ylim(bottom=0)
    axes.set_xticks(devices)
    axes.legend(frameon=False, fontsize=14, loc="lower right")


def plot_mode(axes: Axes, mode: str, rows: list[dict]) -> None:
    """A line of weak or of strong scaling."""
    devices = []
    medians = []
    below = []
    above = []
    for row in rows:
        if row["mode"] == mode:
            rate = row["samples_per_second"]
            devices.append(row["devices"] + SHIFT[mode])
            medians.append(rate["median"])
            below.append(rate["median"] - rate["min"])
            above.append(rate["max"] - rate["median"])
    line = {"color": COLOURS[mode], "linewidth": 2, "capsize": 5}
    marker = {"marker": MARKERS[mode], "markersize": 9}
    drawn = axes.errorbar(devices, medians, [below, above], **line, **marker)
    drawn.set_label(f"{mode} scaling")


def plot_steps(axes: Axes, rows: list[dict]) -> None:
    """A bar for each case: a step without communication, and how much longer it is with it."""
    labels = []
    compute = []
    longer = []
    for row in rows:
        labels.append(f"{row['mode']}\n{row['devices']} x {row['device_batch']}")
        alone_ms = 1e3 * row["compute_seconds"]["median"]
        step_ms = 1e3 * row["step_seconds"]["median"]
        compute.append(alone_ms)
        longer.append(max(0, step_ms - alone_ms))
    axes.barh(labels, compute, color="#0072B2", label="without communication")
    axes.barh(labels, longer, left=compute, color="#CC79A7", label="more with it")
    axes.set_xlabel("ms a step (median)", fontsize=14)
    axes.set_ylabel("devices x samples of each", fontsize=14)
    axes.invert_yaxis()
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 2}
    spacing = {"columnspacing": 1, "handlelength": 1}
    axes.legend(frameon=False, fontsize=14, **place, **spacing)
