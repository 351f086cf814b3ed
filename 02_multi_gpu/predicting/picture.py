"""The picture of the predicted efficiencies."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from predicting.extrapolation import IDEAL
from predicting.models import Model
from predicting.network import NETWORKS, NVLINK

FONTS = {
    "font.size": 15,
    "axes.titlesize": 17,
    "figure.labelsize": 17,
    "figure.titlesize": 18,
    "legend.frameon": False,
}
INFINIBAND, ETHERNET_100, ETHERNET_25 = NETWORKS
# The colours are those of Okabe and Ito.
STYLES = {
    NVLINK.name: ("black", "D-"),
    INFINIBAND.name: ("#0072B2", "o-"),
    ETHERNET_100.name: ("#E69F00", "s-"),
    ETHERNET_25.name: ("#D55E00", "^-"),
    IDEAL: ("#CC79A7", ":"),
}


@rc_context(FONTS)
def plot_efficiency(
    rows: list[dict], models: list[Model], gpus_per_node: int
) -> Figure:
    """Efficiency against GPUs: a panel for each model, four at most."""
    figure = Figure(figsize=(11, 9.5), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flatten()
    for axes, model in zip(panels, models):
        of_model = [row for row in rows if row["model"] == model.name]
        plot_model(axes, of_model, gpus_per_node)
        milliseconds = f"{1e3 * model.step_seconds:.0f} ms a step"
        axes.set_title(f"{model.name} parameters, {milliseconds}")
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    title = "No model fits on such a GPU with DDP"
    if models:
        title = "Predicted for DDP; the networks by vendors' figures, not measured"
    figure.suptitle(title)
    figure.supylabel("weak-scaling efficiency, %")
    lines, labels = panels[0].get_legend_handles_labels()
    if len(models) < len(panels):  # the last panel is free
        panels[-1].legend(lines, labels, loc="center")
    else:
        figure.legend(lines, labels, loc="outside lower center", ncols=2)
    return figure


def plot_model(axes: Axes, rows: list[dict], gpus_per_node: int) -> None:
    """A line for each network, over the GPUs for which it is used."""
    for network, (colour, line) in STYLES.items():
        course = select(rows, network, gpus_per_node)
        devices = [row["devices"] for row in course]
        percent = [100 * row["efficiency"] for row in course]
        (drawn,) = axes.plot(devices, percent, line, color=colour, label=network)
        drawn.set_linewidth(2.5)
        drawn.set_markersize(8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.8, 1300)
    axes.set_ylim(0, 105)
    ticks = [1, 8, 64, 512]
    axes.set_xticks(ticks, ticks)
    axes.set_xlabel("GPUs")
    axes.grid(alpha=0.3)


def select(rows: list[dict], network: str, gpus_per_node: int) -> list[dict]:
    """A network's rows. NVLink's are of one node, where all networks have the same."""
    if network == NVLINK.name:
        of_any = [row for row in rows if row["network"] == INFINIBAND.name]
        return [row for row in of_any if row["devices"] <= gpus_per_node]
    of_network = [row for row in rows if row["network"] == network]
    if network == IDEAL:
        return of_network
    return [row for row in of_network if row["devices"] >= gpus_per_node]
