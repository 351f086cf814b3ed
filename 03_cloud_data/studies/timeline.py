"""When each GET of a batch is sent and answered: one sample after another, and all at once."""

from operator import attrgetter

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.costs import TILES
from studies.server import LATENCIES, serve
from studies.stores import store_flags
from studies.ways import Get, Way, draw_boxes, open_patches, ways_of_zarr

SAMPLES = 8
COLOURS = ("#0072B2", "#E69F00")  # in turn: each sample ends where the next begins


def timeline(repeats: int) -> list[dict]:
    """A row for each GET of a batch, by each way: of the median of some runs."""
    with serve(max(LATENCIES)) as server:
        flags = store_flags(TILES, server, "--batch-size", SAMPLES)
        patches = open_patches(flags)
        boxes = draw_boxes(patches, SAMPLES)
        ways = ways_of_zarr(TILES, patches.reader)
        runs: list[list[list[Get]]] = [[] for _ in ways]
        for _ in range(repeats):
            for way, of_way in zip(ways, runs):
                of_way.append(log_batch(way, boxes))
    times = [box["time"] for box in boxes]  # an epoch has each of them once
    rows = []
    for way, of_way in zip(ways, runs):
        middle = sorted(of_way, key=duration)[len(of_way) // 2]
        rows += describe(way, middle, times)
    return rows


def log_batch(way: Way, boxes: list[dict]) -> list[Get]:
    """The GETs of one batch, in the order in which they were sent."""
    way.read(boxes[:1])  # which connects
    way.log.clear()
    way.read(boxes)
    return sorted(way.log, key=attrgetter("began"))


def duration(log: list[Get]) -> float:
    """Seconds from the first GET that was sent to the last answer."""
    return max(get.ended for get in log) - log[0].began


def describe(way: Way, log: list[Get], times: list[int]) -> list[dict]:
    """A row for each GET. A key is VARIABLE/c/TIME/ROW/COLUMN."""
    rows = []
    first = log[0].began
    for order, get in enumerate(log):
        _, _, time, *_ = get.key.split("/")
        row = {"way": way.name, "order": order}
        row["sample"] = times.index(int(time))
        row["bytes"] = get.size
        row["began_ms"] = 1e3 * (get.began - first)
        row["ended_ms"] = 1e3 * (get.ended - first)
        rows.append(row)
    return rows


def plot_timeline(rows: list[dict]) -> Figure:
    """A bar for each GET, from when it was sent to when all of it was there."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(len(ways), 1, sharex=True, squeeze=False).flat
    for axes, way in zip(panels, ways):
        of_way = [row for row in rows if row["way"] == way]
        plot_gets(axes, of_way)
        whole = max(row["ended_ms"] for row in of_way)
        samples = len({row["sample"] for row in of_way})
        title = f"{way}: {len(of_way)} GETs for {samples} samples, {whole:.0f} ms"
        axes.set_title(title, fontsize=14)
    axes.set_xlabel("ms since the first GET was sent", fontsize=13)
    bars, labels = axes.get_legend_handles_labels()
    place = {"loc": "outside upper center", "ncols": 2}
    figure.legend(bars, labels, frameon=False, fontsize=13, **place)
    return figure


def plot_gets(axes: Axes, rows: list[dict]) -> None:
    """The GETs from top to bottom, in the order in which they were sent."""
    for parity, colour in enumerate(COLOURS):
        bars = [row for row in rows if row["sample"] % 2 == parity]
        lines = [row["order"] for row in bars]
        begins = [row["began_ms"] for row in bars]
        lengths = [row["ended_ms"] - row["began_ms"] for row in bars]
        samples = sorted({row["sample"] for row in bars})
        names = ", ".join(map(str, samples))
        drawn = axes.barh(lines, lengths, 0.8, begins, color=colour)
        drawn.set_label(f"of samples {names}")
    axes.set_ylabel("GET", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.invert_yaxis()
