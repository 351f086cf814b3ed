"""Chapter 1: draw the network, with the shapes that its layers give for one patch.

    uv run python draw_network.py    # a second; writes results/network.png

You should see a U: three sizes of map, and two arrows that carry the fine detail across.
"""

from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from model import UNet
from options import PATCH_SIZE, VARIABLES
from results import RESULTS

# The blocks in the order of their work, and where they stand: (across, down).
PLACES = {
    "down1": (1, 0),
    "down2": (2, 1),
    "bottom": (3, 2),
    "up2": (4, 1),
    "up1": (5, 0),
    "head": (6.2, 0),
}
BOX = {"boxstyle": "round", "facecolor": "#F0F0F0", "edgecolor": "0.4"}
TEXTS = {"head": "1x1\nconvolution"}
SHRINK = "max-pool, half the size"
GROW = "bilinear, twice the size"
ACROSS = "the same values, joined"
# Of Okabe and Ito.
COLOURS = {SHRINK: "#D55E00", GROW: "#0072B2", ACROSS: "#009E73", "": "#000000"}
ARROW = {"arrowstyle": "-|>", "linewidth": 1.8, "shrinkA": 34, "shrinkB": 34}


def find_shapes() -> dict[str, tuple[int, ...]]:
    """The shape (channels, H, W) of the input, and of what each block gives for it."""
    network = UNet(len(VARIABLES))
    shapes: dict[str, tuple[int, ...]] = {}

    def note(block: nn.Module, given: tuple, answer: torch.Tensor) -> None:
        shapes[names[block]] = tuple(answer.shape[1:])

    names = {getattr(network, name): name for name in PLACES}
    for block in names:
        block.register_forward_hook(note)
    patch = torch.zeros(1, len(VARIABLES) + 1, PATCH_SIZE, PATCH_SIZE)
    with torch.no_grad():
        network(patch)
    return {"input": tuple(patch.shape[1:]), **shapes}


def draw_block(axes: Axes, name: str, place: tuple[int, int], shape: tuple) -> None:
    """A box with the block's name and what it gives."""
    channels, height, width = shape
    text = TEXTS.get(name, "two 3x3\nconvolutions")
    if name == "input":
        text = "anomalies and\nseen-mask"
    label = f"{name}\n{channels} x {height} x {width}\n{text}"
    axes.text(*place, label, ha="center", va="center", bbox=BOX)


def draw_arrow(axes: Axes, places: dict, start: str, end: str, label: str = "") -> None:
    """From one block to another; its colour says what happens on the way."""
    arrow = ARROW | {"color": COLOURS[label]}
    axes.annotate("", places[end], places[start], arrowprops=arrow)


def draw(shapes: dict[str, tuple[int, ...]]) -> Figure:
    """The blocks by size of map from top to bottom, and the arrows between them."""
    places = {"input": (0, 0), **PLACES}
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.subplots()
    connect = partial(draw_arrow, axes, places)
    connect("input", "down1")
    connect("down1", "down2", SHRINK)
    connect("down2", "bottom", SHRINK)
    connect("bottom", "up2", GROW)
    connect("up2", "up1", GROW)
    connect("up1", "head")
    connect("down1", "up1", ACROSS)
    connect("down2", "up2", ACROSS)
    for label, colour in COLOURS.items():
        if label:
            axes.plot([], color=colour, label=label)
    for name, shape in shapes.items():
        draw_block(axes, name, places[name], shape)
    axes.set(xlim=(-0.5, 6.75), ylim=(2.4, -0.4))
    axes.axis("off")
    axes.legend(loc="lower right", frameon=False)
    return figure


def main() -> None:
    """Draw the network of the book's winds and save it."""
    figure = draw(find_shapes())
    picture = RESULTS / "network.png"
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
