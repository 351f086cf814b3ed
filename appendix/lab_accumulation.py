"""Appendix, lab 1: gradient accumulation gives a large batch's gradient in less memory.

    uv run python lab_accumulation.py                        # 1, 2, 4, 8 and 16 micro-batches
    uv run python lab_accumulation.py --micro-batches 3 5    # slices need not be equal

You should see three things. If the sums of squares are divided by the count of the whole
batch, any number of micro-batches gives the same gradient to rounding. If each is divided
by its own count, the gradient is another one. Memory falls with the number.
"""

import argparse
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH = 16  # samples
ROUNDING = 1e-12  # a relative difference of gradients in float64
HEADER = "micro-batches   error: one count   own counts   peak memory        "
HEADER += "backward at the end"


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return inside the block.

    `now` is the bytes alive, and `peak` is the most that were. Both are the same on any
    machine: an operator's scratch memory and what an allocator sets aside do not count.
    """

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.known:  # views share a storage
            return
        self.known.add(address)
        self.now += storage.nbytes()
        weakref.finalize(storage, self.free, address, storage.nbytes())

    def free(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def network(norm: str = "group") -> nn.Module:
    """Three convolutions in float64, which no rounding can hide; always the same weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16):
        layers.append(nn.Conv2d(channels, 16, 3, padding=1))
        layers.append(nn.GroupNorm(4, 16) if norm == "group" else nn.BatchNorm2d(16))
        layers.append(nn.ReLU())
    layers.append(nn.Conv2d(16, 2, 1))
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Input (16, 3, 16, 16), target (16, 2, 16, 16), and the cells that count (16, 1, 16, 16).

    From sample to sample, few to nearly all cells count.
    """
    random = torch.Generator().manual_seed(1)
    share = torch.linspace(0.05, 0.95, BATCH, dtype=torch.float64)
    share = share[:, None, None, None]

    def draw(channels: int) -> Tensor:
        shape = (BATCH, channels, 16, 16)
        return torch.rand(shape, generator=random, dtype=share.dtype)

    inputs = draw(3) * share
    target = draw(2) + share
    counted = draw(1) < share
    return inputs, target, counted.double()


def accumulate(model: nn.Module, parts: list) -> None:
    """Add up the gradients of the micro-batches."""
    total = sum(counted.sum() for _, _, counted in parts)  # of the whole batch, first
    for part in parts:
        loss = sum_squares(model, part) / total
        loss.backward()  # frees what the forward pass has kept


def own_counts(model: nn.Module, parts: list) -> None:
    """The wrong mean: of the micro-batches' own means."""
    for part in parts:
        loss = sum_squares(model, part) / part[2].sum()
        (loss / len(parts)).backward()


def at_the_end(model: nn.Module, parts: list) -> None:
    """The right mean, but all micro-batches are kept until the one backward pass."""
    squares = [sum_squares(model, part) for part in parts]
    counts = [counted.sum() for _, _, counted in parts]
    (sum(squares) / sum(counts)).backward()


def sum_squares(model: nn.Module, part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    inputs, target, counted = part
    return (counted * (model(inputs) - target) ** 2).sum()


def gradient(
    count: int, way: Callable = accumulate, norm: str = "group"
) -> tuple[Tensor, int]:
    """The gradient from so many micro-batches, and the most bytes alive meanwhile."""
    model = network(norm)
    slices = [tensor.tensor_split(count) for tensor in batch()]
    parts = list(zip(*slices))
    with Live() as live:
        way(model, parts)
    gradients = [weight.grad.flatten() for weight in model.parameters()]
    return torch.cat(gradients), live.peak


def error(found: Tensor, truth: Tensor) -> float:
    """The largest difference of two gradients, over the truth's largest component."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def measure(count: int, truth: Tensor) -> dict:
    """The errors and peaks of all three ways, with so many micro-batches."""
    one, peak = gradient(count, accumulate)
    own, _ = gradient(count, own_counts)
    _, late = gradient(count, at_the_end)
    return {
        "micro_batches": count,
        "one_count": error(one, truth),
        "own_counts": error(own, truth),
        "peak": peak,
        "peak_at_the_end": late,
    }


def print_row(row: dict, whole: int) -> None:
    """A line of the table; `whole` is the peak of the whole batch at once."""
    errors = []
    for name in ("one_count", "own_counts"):
        errors.append(f"{row[name]:.0%}" if row[name] > ROUNDING else "< 1e-12")
    memory = []
    for name in ("peak", "peak_at_the_end"):
        memory.append(f"{row[name] / 1e6:5.2f} MB, {row[name] / whole:4.0%}")
    line = f"{row['micro_batches']:13}{errors[0]:>19}{errors[1]:>13}"
    print(f"{line}   {memory[0]:16}   {memory[1]}")


def main(argv: list[str] | None = None) -> dict:
    """Print a line for each number of micro-batches; return the figures."""
    counts = parse(argv)
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    truth, whole = gradient(1)
    print(HEADER)
    rows = []
    for count in counts:
        row = measure(count, truth)
        print_row(row, whole)
        rows.append(row)
    in_four, _ = gradient(4, norm="batch")
    in_one, _ = gradient(1, norm="batch")
    norm = error(in_four, in_one)
    print(f"with BatchNorm and 4 micro-batches, one count: {norm:.0%}")
    return {"rows": rows, "batch_norm": norm}


def parse(argv: list[str] | None) -> list[int]:
    """The numbers of micro-batches; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [1, 2, 4, 8, 16]
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=default, metavar="K"
    )
    counts = parser.parse_args(argv).micro_batches
    for count in counts:
        if not 1 <= count <= BATCH:
            remedy = f"the batch has {BATCH} samples; give 1 to {BATCH}"
            parser.error(f"--micro-batches {count}: {remedy}")
    return counts


if __name__ == "__main__":
    main()
