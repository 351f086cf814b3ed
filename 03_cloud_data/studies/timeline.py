"""When each GET of a batch is sent and answered: one sample after another, and all at once."""

from operator import attrgetter

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.costs import TILES
from studies.server import LATENCIES, serve
from studies.ways import Get, Way, draw_regions, open_patches, ways_of_zarr

SAMPLES = 8
COLOURS = ("#0072B2", "#E69F00")  # in turn: each sample ends where the next begins


def timeline(repeats: int) -> list[dict]:
    """A row for each GET of a batch, by each way: of the median of some runs."""
    with serve(max(LATENCIES)) as server:
        patches = open_patches(TILES, server, SAMPLES)
        regions = draw_regions(patches, SAMPLES)
        ways = ways_of_zarr(TILES, patches.reader)
        runs: list[list[list[Get]]] = [[] for _ in ways]
        for _ in range(repeats):
            for way, of_way in zip(ways, runs):
                of_way.append(log_batch(way, regions))
    times = [region["time"] for region in regions]  # an epoch has each of them once
    rows = []
    for way, of_way in zip(ways, runs):
        middle = sorted(of_way, key=duration)[len(of_way) // 2]
        rows += describe(way, middle, times)
    return rows


def log_batch(way: Way, regions: list[dict]) -> list[Get]:
    """The GETs of one batch, in the order in which they were sent."""
    way.read(regions[:1])  # which connects
    way.log.clear()
    way.read(regions)
    return sorted(way.log, key=attrgetter("began"))


def duration(log: list[Get]) -> float:
    """Seconds from the first GET that was sent to the last answer."""
    return max(get.ended for get in log) - log[0].began


def describe(way: Way, log: list[Get], times: list[int]) -> list[dict]:
    """A row for each GET. A key is VARIABLE/c/TIME/ROW/COLUMN."""
    rows = []
    for order, get in enumerate(log):
        row = {
            "way": way.name,
            "order": order,
            "sample": times.index(int(get.key.split("/")[2])),
            "bytes": get.size,
            "began_ms": 1e3 * (get.began - log[0].began),
            "ended_ms": 1e3 * (get.ended - log[0].began),
        }
        rows.append(row)
    return rows


def plot_timeline(rows: list[dict]) -> Figure:
    """A bar for each GET, from when it was sent to when all of it was there."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(len(ways), 1, sharex=True, squeeze=False).flat
    for axes, way in zip(panels, ways):
        plot_way(axes, way, [row for row in rows if row["way"] == way])
    axes.set_xlabel("ms since the first GET was sent", fontsize=13)
    handles = axes.get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=2, frameon=False, fontsize=13
    )
    return figure


def plot_way(axes: Axes, way: str, rows: list[dict]) -> None:
    """The panel of a way: the GETs from top to bottom in the order in which they were sent."""
    for parity, colour in enumerate(COLOURS):
        bars = [row for row in rows if row["sample"] % 2 == parity]
        lines = [row["order"] for row in bars]
        begins = [row["began_ms"] for row in bars]
        lengths = [row["ended_ms"] - row["began_ms"] for row in bars]
        samples = sorted({row["sample"] for row in bars})
        label = f"of samples {', '.join(map(str, samples))}"
        axes.barh(lines, lengths, 0.8, begins, color=colour, label=label)
    whole = max(row["ended_ms"] for row in rows)
    samples = len({row["sample"] for row in rows})
    title = f"{way}: {len(rows)} GETs for {samples} samples, {whole:.0f} ms"
    axes.set_title(title, fontsize=14)
    axes.set_ylabel("GET", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.invert_yaxis()
