"""The picture of a day on a GPU: samples/s of the step, by the batch."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

# Of each kind of step: its name in the results, its label, its colour (Okabe-Ito), its marker.
KINDS = (
    ("the same, one CUDA graph", "all fixes, bfloat16, one CUDA graph", "#009E73", "D"),
    ("all fixes but channels_last, bfloat16", "all fixes but channels_last, bfloat16", "#CC79A7", "v"),
    ("all fixes, bfloat16", "all fixes, bfloat16", "#0072B2", "^"),
    ("TF32", "chapter 4's step, TF32", "#E69F00", "s"),
    ("float32", "chapter 4's step, float32", "#000000", "o"),
)
FONT_SIZE = 13  # legible at half the size


def draw(results: dict[str, Any]) -> Figure:
    """A line for each kind of step, with the range of its repeats.

    The dotted line is that of a step which always takes as long as the smallest batch does
    in float32. ValueError if the part called step has not found that.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", title=results["machine"]["gpu"])
    for case, label, colour, marker in KINDS:
        batches, rates = read_rates(results["rows"], case)
        medians = [rate["median"] for rate in rates]
        below = [rate["median"] - rate["min"] for rate in rates]
        above = [rate["max"] - rate["median"] for rate in rates]
        style = {"color": colour, "marker": marker, "markersize": 8, "capsize": 3}
        axes.errorbar(batches, medians, (below, above), label=label, **style)
    batches, rates = read_rates(results["rows"], "float32")
    if not batches:
        raise ValueError("it has no rows of the part called step")
    axes.set_ylim(*axes.get_ylim())  # the dotted line may leave it
    rate = rates[0]["median"] / batches[0]
    label = f"a step of {1e3 / rate:.1f} ms, whatever the batch"
    axes.plot(batches, [rate * batch for batch in batches], color="0.5", linestyle=":", label=label)
    axes.set_xticks(batches, map(str, batches))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("samples in the batch", fontsize=FONT_SIZE)
    axes.set_ylabel("samples/s", fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.legend(frameon=False, fontsize=FONT_SIZE, loc="lower right")
    return figure


def read_rates(rows: list[dict[str, Any]], case: str) -> tuple[list[int], list[dict]]:
    """The batches at which a kind of step was timed, and its samples/s at each."""
    found = {}
    for row in rows:
        batch, _, name = row["case"].partition(": ")
        if row["part"] == "step" and name == case and "samples_per_second" in row:
            found[int(batch.removeprefix("batch "))] = row["samples_per_second"]
    return list(found), list(found.values())
