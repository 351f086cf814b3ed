r"""Appendix: which chunks a patch touches, what they cost, and which shape suits a store.

    uv run python chunk_size.py        # 64 x 64 cells of a byte, in chunks of 8 to 1024
    uv run python chunk_size.py --patch 1 64 64 --grid 1464 721 1440 --dtype float32 \
        --chunk 1 721 1440 --chunk 8 64 64
    uv run python chunk_size.py --patch 1 64 64 --grid 1464 721 1440 --dtype float32 \
        --best 5 --latency-ms 100

All of it is arithmetic: nothing is read. You should see that a chunk of the patch's own
size or larger is one of one to four that are touched (in two dimensions), that smaller
chunks cost requests and larger ones bytes, and where the balance lies.
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
    chunk_bytes: int  # in memory; Zarr stores a chunk on the grid's edge as a whole one
    fewest: int  # chunks touched; so are the next two
    expected: float
    most: int
    seconds: float  # expected, with nothing else under way
    patches_per_second: float  # at most, with the store always busy


def chunks_along(patch: int, chunk: int, size: int | None = None) -> dict[int, float]:
    """The probability of each number of chunks that a patch may touch along a dimension.

    Its first cell x is any of the size - patch + 1 cells where it fits, each as likely; in
    an endless grid (no size) it is any cell of a chunk. The patch touches
    floor((x + patch - 1) / chunk) - floor(x / chunk) + 1 chunks, which is
    ceil(patch / chunk) or one more. So the sum over all x gives both probabilities.
    """
    if size is None:
        corners = chunk
        steps = patch - 1
    else:
        corners = size - patch + 1
        steps = sum_of_floors(size, chunk)
        steps -= sum_of_floors(patch - 1, chunk) + sum_of_floors(corners, chunk)
    fewest = ceil(patch / chunk)
    # From so many corners one more is touched.
    with_one_more = steps - (fewest - 1) * corners
    odds = {fewest: corners - with_one_more, fewest + 1: with_one_more}
    return {number: count / corners for number, count in odds.items() if count}


def sum_of_floors(n: int, chunk: int) -> int:
    """The sum of floor(x / chunk) over x = 0, ..., n - 1."""
    whole, rest = divmod(n, chunk)
    return chunk * whole * (whole - 1) // 2 + whole * rest


def cost(
    patch: list[int],
    chunk: list[int],
    grid: list[int] | None,
    itemsize: int,
    store: Store,
) -> Cost:
    """What a patch costs in chunks of this shape, which the grid may cut."""
    sizes = grid or [None] * len(patch)
    shape = tuple(min(length, size or length) for length, size in zip(chunk, sizes))
    chunk_bytes = itemsize * prod(shape)
    transfer = chunk_bytes / store.compression / store.bytes_per_second
    along = [chunks_along(*lengths).items() for lengths in zip(patch, shape, sizes)]
    odds = []  # chunks touched, and how probable that is
    for case in product(*along):
        numbers, probabilities = zip(*case)
        odds.append((prod(numbers), prod(probabilities)))
    touched = [number for number, _ in odds]
    expected = sum(number * share for number, share in odds)
    rounds = sum(ceil(number / store.at_once) * share for number, share in odds)
    # The part of the store's time that a chunk takes, if the store is always busy.
    busy = max(store.latency / store.at_once, transfer)
    return Cost(
        chunk=shape,
        chunk_bytes=chunk_bytes,
        fewest=min(touched),
        expected=expected,
        most=max(touched),
        seconds=rounds * store.latency + expected * transfer,
        patches_per_second=1 / (expected * busy),
    )


def best(
    patch: list[int], grid: list[int], itemsize: int, store: Store, count: int
) -> list[Cost]:
    """The shapes with the most patches per second, and of equals the quickest for one.

    Along each dimension a chunk is a power of two, or all of it.
    """
    lengths = []
    for size in grid:
        powers = [2**k for k in range(size.bit_length()) if 2**k < size]
        lengths.append([*powers, size])
    costs = [cost(patch, chunk, grid, itemsize, store) for chunk in product(*lengths)]
    costs.sort(key=lambda each: (-each.patches_per_second, each.seconds))
    return costs[:count]


def show(costs: list[Cost]) -> None:
    """Print a line for each shape: chunks touched, bytes in memory, the model's times."""
    shapes = [" x ".join(map(str, each.chunk)) for each in costs]
    width = max(map(len, shapes))
    numbers = "chunks     mean  bytes read             mean bytes"
    print(f"{'chunk':{width}}  {numbers}  ms alone  patches/s")
    for shape, each in zip(shapes, costs):
        touched = f"{each.fewest} to {each.most}"
        least = each.fewest * each.chunk_bytes
        most = each.most * each.chunk_bytes
        read = f"{least:,} to {most:,}"
        mean = each.expected * each.chunk_bytes
        counted = f"{touched:9} {each.expected:5.2f}  {read:22} {mean:10,.0f}"
        timed = f"{1e3 * each.seconds:8.1f}  {each.patches_per_second:9,.0f}"
        print(f"{shape:{width}}  {counted}  {timed}")


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cells = {"type": int, "nargs": "+", "metavar": "N"}
    add = parser.add_argument
    text = "cells a dimension (default: 64 64)"
    add("--patch", **cells, default=[64, 64], help=text)
    text = "cells a dimension; may be given again"
    add("--chunk", **cells, action="append", help=text)
    add("--grid", **cells, help="cells a dimension (default: endless)")
    add("--dtype", default="uint8", help="of a cell (default: uint8, one byte)")
    text = "the best K shapes for the store instead; needs --grid"
    add("--best", type=int, metavar="K", help=text)
    text = "to a request's first byte (default: 30)"
    add("--latency-ms", type=float, default=30, help=text)
    text = "of all requests together (default: 500)"
    add("--mb-per-second", type=float, default=500, help=text)
    add("--at-once", type=int, default=24, help="requests under way (default: 24)")
    text = "bytes in memory for each stored (default: 1)"
    add("--compression", type=float, default=1, help=text)
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with code 2 and a remedy if the flags make no sense."""
    check_shapes(parser, args)
    if args.best is not None and (args.best < 1 or not args.grid):
        parser.error(f"--best {args.best}: give at least 1, and --grid")
    for name in ("latency_ms", "mb_per_second", "at_once", "compression"):
        value = getattr(args, name)
        if not value > 0:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value}: give a number above 0")


def check_shapes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with code 2 and a remedy unless all shapes have as many dimensions."""
    shapes = [("--patch", args.patch), ("--grid", args.grid or args.patch)]
    shapes += [("--chunk", chunk) for chunk in args.chunk or []]
    for flag, lengths in shapes:
        if len(lengths) != len(args.patch) or min(lengths) < 1:
            shape = " ".join(map(str, lengths))
            remedy = "give as many numbers as --patch, each at least 1"
            parser.error(f"{flag} {shape}: {remedy}")
    if args.grid and any(patch > size for patch, size in zip(args.patch, args.grid)):
        shape = " ".join(map(str, args.patch))
        parser.error(f"--patch {shape}: larger than --grid; make the patch smaller")


def find_itemsize(parser: argparse.ArgumentParser, dtype: str) -> int:
    """Bytes of a cell; exits with code 2 if there is no such type."""
    try:
        itemsize = np.dtype(dtype).itemsize
    except (TypeError, ValueError, SyntaxError):
        itemsize = 0
    if not itemsize:
        remedy = "NumPy has no such type; give one such as float32"
        parser.error(f"--dtype {dtype}: {remedy}")
    return itemsize


def main(argv: list[str] | None = None) -> list[Cost]:
    """Print the table of the flags; return its rows."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    itemsize = find_itemsize(parser, args.dtype)
    store = Store(
        latency=args.latency_ms / 1e3,
        bytes_per_second=args.mb_per_second * 1e6,
        at_once=args.at_once,
        compression=args.compression,
    )
    if args.best:
        costs = best(args.patch, args.grid, itemsize, store, args.best)
    else:
        chunks = args.chunk or [[size] * len(args.patch) for size in SQUARES]
        costs = [
            cost(args.patch, chunk, args.grid, itemsize, store) for chunk in chunks
        ]
    show(costs)
    return costs


if __name__ == "__main__":
    main()
