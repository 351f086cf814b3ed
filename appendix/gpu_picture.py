"""The picture of a day on a GPU: samples/s of the step, by the batch."""

from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

# Kinds of steps by their name in the results: label, colour (Okabe-Ito), marker.
KINDS = {
    "the same, one CUDA graph": ("all fixes, bfloat16, one CUDA graph", "#009E73", "D"),
    "all fixes but channels_last, bfloat16": (
        "all fixes but channels_last, bfloat16",
        "#CC79A7",
        "v",
    ),
    "all fixes, bfloat16": ("all fixes, bfloat16", "#0072B2", "^"),
    "TF32": ("chapter 4's step, TF32", "#E69F00", "s"),
    "float32": ("chapter 4's step, float32", "#000000", "o"),
}


@rc_context({"font.size": 13, "axes.titlesize": 13})  # legible at half the size
def draw(results: dict[str, Any]) -> Figure:
    """A line for each kind of step. ValueError without rows of the part called step."""
    rows = results["rows"]
    plain = find_rates(rows, "float32")
    if not plain:
        raise ValueError("it has no rows of the part called step")
    batches = sorted(plain)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(results["machine"]["gpu"])
    axes.set_xlabel("samples in the batch")
    axes.set_ylabel("samples/s")
    axes.loglog()
    for case, (label, colour, marker) in KINDS.items():
        style = {"color": colour, "marker": marker, "label": label}
        draw_rates(axes, find_rates(rows, case), style)
    axes.set_ylim(*axes.get_ylim())  # the next line may leave it
    fewest = batches[0]
    seconds = fewest / plain[fewest]["median"]
    label = f"a step of {1e3 * seconds:.1f} ms, whatever the batch"
    rates = [batch / seconds for batch in batches]
    axes.plot(batches, rates, ":", color="0.5", label=label)
    axes.set_xticks(batches, batches)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_rates(axes: Axes, rates: dict[int, dict], style: dict[str, str]) -> None:
    """Medians, with the range of their repeats."""
    batches = list(rates)
    medians = [rate["median"] for rate in rates.values()]
    low = [rate["min"] for rate in rates.values()]
    high = [rate["max"] for rate in rates.values()]
    axes.plot(batches, medians, markersize=8, **style)
    axes.vlines(batches, low, high, color=style["color"])


def find_rates(rows: list[dict[str, Any]], case: str) -> dict[int, dict]:
    """Samples/s of a kind of step by the batch, where it could run."""
    found = {}
    for row in rows:
        batch, _, name = row["case"].partition(": ")
        is_kind = row["part"] == "step" and name == case
        if is_kind and "samples_per_second" in row:
            samples = int(batch.removeprefix("batch "))
            found[samples] = row["samples_per_second"]
    return found
