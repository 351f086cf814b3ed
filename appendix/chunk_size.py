"""Appendix: which chunks a patch touches, what they cost, and which shape suits a store.

    uv run python chunk_size.py        # a patch of 64 x 64 cells of one byte, in chunks of 8 x 8 to 1024 x 1024
    uv run python chunk_size.py --patch 1 64 64 --grid 1464 721 1440 --dtype float32 --chunk 1 721 1440 --chunk 8 64 64
    uv run python chunk_size.py --patch 1 64 64 --grid 1464 721 1440 --dtype float32 --best 5 --latency-ms 100

All of it is arithmetic: nothing is read. You should see that from the patch's own size on a patch touches one to four
chunks (in two dimensions), that smaller chunks cost requests and larger ones bytes, and where the balance lies.
"""

import argparse
from itertools import product
from math import ceil, prod
from typing import NamedTuple

import numpy as np

SQUARES = [8, 16, 32, 64, 128, 256, 512, 1024]


class Store(NamedTuple):
    """A store as the model sees it."""

    latency: float  # seconds to a request's first byte
    bytes_per_second: float  # as stored, of all requests together
    at_once: int  # requests under way
    compression: float = 1.0  # bytes in memory for each that is stored


class Cost(NamedTuple):
    """What a patch costs, over every place in the grid where it fits."""

    chunk: tuple[int, ...]
    chunk_bytes: int  # in memory; a chunk on the grid's edge counts as whole, as Zarr stores it
    fewest: int  # chunks touched; so are the next two
    expected: float
    most: int
    seconds: float  # expected, with nothing else under way
    patches_per_second: float  # at most, with the store always busy


def chunks_along(patch: int, chunk: int, size: int | None = None) -> dict[int, float]:
    """How many chunks a patch touches along one dimension: {number: probability}, one number or two.

    Its first cell x is any of the size - patch + 1 cells where it fits, each as likely; in an endless grid (no size)
    any cell of a chunk. It touches floor((x + patch - 1) / chunk) - floor(x / chunk) + 1 chunks, which is
    ceil(patch / chunk) or one more. So the sum over all x, which is one of floors, gives both probabilities.
    """
    if size is None:
        corners, steps = chunk, patch - 1
    else:
        corners = size - patch + 1
        steps = sum_of_floors(size, chunk) - sum_of_floors(patch - 1, chunk) - sum_of_floors(corners, chunk)
    fewest = ceil(patch / chunk)
    more = steps - (fewest - 1) * corners  # of all corners, those with one chunk more
    return {number: of / corners for number, of in ((fewest, corners - more), (fewest + 1, more)) if of}


def sum_of_floors(n: int, chunk: int) -> int:
    """The sum of floor(x / chunk) over x = 0, ..., n - 1."""
    whole, rest = divmod(n, chunk)
    return chunk * whole * (whole - 1) // 2 + whole * rest


def cost(patch: list[int], chunk: list[int], grid: list[int] | None, itemsize: int, store: Store) -> Cost:
    """What a patch costs in chunks of this shape. A dimension's chunk is no longer than the grid."""
    sizes = grid or [None] * len(patch)
    chunk = tuple(min(length, size or length) for length, size in zip(chunk, sizes))
    chunk_bytes = itemsize * prod(chunk)
    transfer = chunk_bytes / store.compression / store.bytes_per_second
    along = [chunks_along(*lengths).items() for lengths in zip(patch, chunk, sizes)]
    cases = [(prod(numbers), prod(odds)) for numbers, odds in (zip(*case) for case in product(*along))]
    touched = [n for n, _ in cases]
    expected = sum(n * probability for n, probability in cases)
    rounds = sum(ceil(n / store.at_once) * probability for n, probability in cases)
    seconds = rounds * store.latency + expected * transfer
    busy = expected * max(store.latency / store.at_once, transfer)  # a patch's share of the store's time
    return Cost(chunk, chunk_bytes, min(touched), expected, max(touched), seconds, 1 / busy)


def best(patch: list[int], grid: list[int], itemsize: int, store: Store, count: int) -> list[Cost]:
    """The shapes with the most patches per second; of equals, those that read one patch soonest.

    Along each dimension a chunk is a power of two, or all of it.
    """
    lengths = [[*(2**k for k in range(size.bit_length()) if 2**k < size), size] for size in grid]
    costs = [cost(patch, chunk, grid, itemsize, store) for chunk in product(*lengths)]
    return sorted(costs, key=lambda each: (-each.patches_per_second, each.seconds))[:count]


def show(costs: list[Cost]) -> None:
    """Print a line for each shape: chunks touched, bytes in memory that are read, and the times of the model."""
    width = max(len(" x ".join(map(str, each.chunk))) for each in costs)
    print(f"{'chunk':{width}}  chunks     mean  bytes read             mean bytes  ms alone  patches/s")
    for each in costs:
        shape, touched = " x ".join(map(str, each.chunk)), f"{each.fewest} to {each.most}"
        read = f"{each.fewest * each.chunk_bytes:,} to {each.most * each.chunk_bytes:,}"
        mean = each.expected * each.chunk_bytes
        print(
            f"{shape:{width}}  {touched:9} {each.expected:5.2f}  {read:22} {mean:10,.0f}"
            f"  {1e3 * each.seconds:8.1f}  {each.patches_per_second:9,.0f}"
        )


def main(argv: list[str] | None = None) -> list[Cost]:
    """Print the table of the flags; return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--patch",
        type=int,
        nargs="+",
        default=[64, 64],
        metavar="N",
        help="cells a dimension (default: 64 64)",
    )
    add(
        "--chunk",
        type=int,
        nargs="+",
        action="append",
        metavar="N",
        help="cells a dimension; may be given again",
    )
    add("--grid", type=int, nargs="+", metavar="N", help="cells a dimension (default: endless)")
    add("--dtype", default="uint8", help="of a cell (default: uint8, one byte)")
    add("--best", type=int, metavar="K", help="the best K shapes for the store instead; needs --grid")
    add("--latency-ms", type=float, default=30, help="to a request's first byte (default: 30)")
    add("--mb-per-second", type=float, default=500, help="of all requests together (default: 500)")
    add("--at-once", type=int, default=24, help="requests under way (default: 24)")
    add("--compression", type=float, default=1, help="bytes in memory for each stored (default: 1)")
    args = parser.parse_args(argv)
    chunks = args.chunk or [[size] * len(args.patch) for size in SQUARES]
    for flag, lengths in [
        ("--patch", args.patch),
        ("--grid", args.grid or args.patch),
        *(("--chunk", c) for c in chunks),
    ]:
        if len(lengths) != len(args.patch) or min(lengths) < 1:
            parser.error(
                f"{flag} {' '.join(map(str, lengths))}: give as many numbers as --patch, each at least 1"
            )
    if args.grid and any(patch > size for patch, size in zip(args.patch, args.grid)):
        parser.error(f"--patch {' '.join(map(str, args.patch))}: larger than --grid; make the patch smaller")
    if args.best is not None and (args.best < 1 or not args.grid):
        parser.error(f"--best {args.best}: give at least 1, and --grid")
    for name in ("latency_ms", "mb_per_second", "at_once", "compression"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above 0")
    try:
        itemsize = np.dtype(args.dtype).itemsize
        if not itemsize:
            raise TypeError("a type without a size")
    except (TypeError, ValueError, SyntaxError):
        parser.error(f"--dtype {args.dtype}: NumPy has no such type; give one such as float32")
    store = Store(args.latency_ms / 1e3, args.mb_per_second * 1e6, args.at_once, args.compression)
    if args.best:
        costs = best(args.patch, args.grid, itemsize, store, args.best)
    else:
        costs = [cost(args.patch, chunk, args.grid, itemsize, store) for chunk in chunks]
    show(costs)
    return costs


if __name__ == "__main__":
    main()
