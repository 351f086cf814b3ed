"""Appendix, lab 1: gradient accumulation. A large batch's gradient, in a small batch's memory, if one count divides all.

    uv run python lab_accumulation.py                        # a batch of 16 in 1, 2, 4, 8 and 16 micro-batches
    uv run python lab_accumulation.py --micro-batches 3 5    # slices need not be equal

You should see the same gradient to rounding from any number of micro-batches when their sums of squares are divided
by the count of the whole batch, another one when each is divided by its own, and memory that falls with their number.
"""

import argparse
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, ROUNDING = 16, 1e-12  # samples; a relative difference of gradients in float64


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators give back inside the block: those alive `now`, and the `peak`.

    The same on any machine: what an operator takes for itself meanwhile, and what an allocator sets aside, is not in it.
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if storage._cdata not in self.known:  # views share a storage
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def free(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def network(norm: str = "group") -> nn.Module:
    """Three convolutions in float64, in which rounding cannot be mistaken; the same weights in each call."""
    torch.manual_seed(0)
    norms = [nn.GroupNorm(4, 16) if norm == "group" else nn.BatchNorm2d(16) for _ in range(2)]
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 2, 1)]
    layers = [convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.ReLU(), convolutions[2]]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Input (16, 3, 16, 16), target (16, 2, 16, 16) and the cells that count (16, 1, 16, 16): few to nearly all."""
    random = torch.Generator().manual_seed(1)
    share = torch.linspace(0.05, 0.95, BATCH, dtype=torch.float64)[:, None, None, None]
    inputs, target, chance = (
        torch.rand(BATCH, n, 16, 16, generator=random, dtype=share.dtype) for n in (3, 2, 1)
    )
    return inputs * share, target + share, (chance < share).double()


def accumulate(model: nn.Module, parts: list) -> None:
    """Add up the gradients of the micro-batches."""
    total = sum(counted.sum() for _, _, counted in parts)  # of the whole batch, before the first pass
    for inputs, target, counted in parts:
        squares = (counted * (model(inputs) - target) ** 2).sum()
        (squares / total).backward()  # frees what the forward pass has kept


def own_counts(model: nn.Module, parts: list) -> None:
    """The wrong mean: of the micro-batches' own means."""
    for inputs, target, counted in parts:
        squares = (counted * (model(inputs) - target) ** 2).sum()
        (squares / counted.sum() / len(parts)).backward()


def at_the_end(model: nn.Module, parts: list) -> None:
    """The right mean, but all micro-batches are kept until the one backward pass."""
    squares = [(counted * (model(inputs) - target) ** 2).sum() for inputs, target, counted in parts]
    (sum(squares) / sum(counted.sum() for _, _, counted in parts)).backward()


def gradient(count: int, way: Callable = accumulate, norm: str = "group") -> tuple[Tensor, int]:
    """The gradient of all weights from so many micro-batches, and the most bytes alive meanwhile."""
    model = network(norm)
    parts = list(zip(*(tensor.tensor_split(count) for tensor in batch())))
    with Live() as live:
        way(model, parts)
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]), live.peak


def error(found: Tensor, truth: Tensor) -> float:
    """The largest difference of two gradients, over the largest component of the true one."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def main(argv: list[str] | None = None) -> dict:
    """Print a line for each number of micro-batches; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="K")
    args = parser.parse_args(argv)
    for count in args.micro_batches:
        if not 1 <= count <= BATCH:
            parser.error(f"--micro-batches {count}: the batch has {BATCH} samples; give 1 to {BATCH}")
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    truth, whole = gradient(1)
    rows = []
    print("micro-batches   error: one count   own counts   peak memory        backward at the end")
    for count in args.micro_batches:
        (one, peak), (own, _), (_, late) = (
            gradient(count, way) for way in (accumulate, own_counts, at_the_end)
        )
        row = {"micro_batches": count, "one_count": error(one, truth), "own_counts": error(own, truth)}
        rows.append(row | {"peak": peak, "peak_at_the_end": late})
        errors = [f"{e:.0%}" if e > ROUNDING else "< 1e-12" for e in (row["one_count"], row["own_counts"])]
        memory = [f"{size / 1e6:5.2f} MB, {size / whole:4.0%}" for size in (peak, late)]
        print(f"{count:13}{errors[0]:>19}{errors[1]:>13}   {memory[0]:16}   {memory[1]}")
    norm = error(gradient(4, norm="batch")[0], gradient(1, norm="batch")[0])
    print(f"with BatchNorm and 4 micro-batches, one count: {norm:.0%}")
    return {"rows": rows, "batch_norm": norm}


if __name__ == "__main__":
    main()
