"""The picture of the ladder."""

from matplotlib.figure import Figure

COLOURS = {"chapter 4": "#D55E00", "alone": "#0072B2", "stacked": "#009E73"}


def plot_ladder(rows: list[dict]) -> Figure:
    """How many times as fast as chapter 4's step, by rung, with the range."""
    shown = [row for row in rows if "error" not in row]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(shown)):
        times = row["times_faster"]
        colour = COLOURS[row["group"]]
        span = [times["min"], times["max"]]
        axes.plot(span, [place, place], color=colour)
        axes.plot(times["median"], place, "o", color=colour)
        label = row["rung"]
        if row["group"] == "stacked":
            label = f"+ {label}"
        beside = axes.get_yaxis_transform()
        aligned = {"ha": "right", "va": "center", "transform": beside}
        axes.text(-0.01, place, label, color=colour, **aligned)
    axes.axvline(1, color="0.6", linewidth=1)
    axes.set(yticks=[], xlabel="times as fast as chapter 4's step (1: as fast)")
    batch = f"Batch {shown[0]['batch_size']}"
    axes.set_title(f"Blue: one fix alone. Green: one more at a time. {batch}")
    return figure
