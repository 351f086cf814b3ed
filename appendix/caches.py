"""Appendix: what a cache of chunks hits, by the order of reading, by its limit, and what a hit is worth.

    uv run python caches.py                  # hit rates, ranks, limits; rates for a store 30 ms away, and at hand
    uv run python caches.py --latency-ms 100
    uv run python caches.py --save-results   # and results/caches.json and results/caches.png

You should see real caches hit as often as the formulas say, a folder outgrow its limit, and what a patch
takes through each cache. Zarr's own CacheStore keeps compressed chunks, zict's LRU decoded ones.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import psutil
import xarray as xr
import zarr
from matplotlib.figure import Figure
from scipy.ndimage import zoom
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.experimental.cache_store import CacheStore
from zarr.storage import LocalStore, MemoryStore, WrapperStore
from zict import LRU

HERE = Path(__file__).parent
WINDS = HERE.parent / "01_setup/data/navy_winds.nc"
ORDERS = "same", "shuffled", "draws", "pinned", "blocks"
SHARES = 0.1, 0.25, 0.5, 0.75, 0.9, 1.0  # of the data's bytes that a cache may hold
RANKS = (
    (1, 0.5),
    (2, 0.5),
    (8, 1 / 16),
    (8, 1 / 8),
    (8, 0.5),
)  # how many; the share each may hold
BLOCK_PATCHES, SLOTS = 8, 16  # of the order "blocks"
ITEM_BYTES = 64  # any: hits are counted, not timed
MAP, PATCH = (
    (361, 720),
    64,
)  # cells: a map of 0.5 degrees, which is a chunk, and a side of a patch
CACHES = (
    ("none", 0.0),
    ("memory", 1.0),
    ("disk", 1.0),
    ("decoded", 1.0),
)  # budget: share of the decoded bytes
CACHES += ("memory", 0.5), ("disk", 0.5), ("decoded", 0.5), ("pinned", 0.5)
PROTOTYPE = default_buffer_prototype()


class Bucket(WrapperStore):
    """A store that answers `latency` seconds late and counts what it is asked for."""

    def __init__(self, store: Store, latency: float = 0):
        super().__init__(store)
        self.latency, self.requests = latency, 0

    async def get(self, key: str, *how, **more):
        self.requests += 1
        if self.latency:
            await asyncio.sleep(self.latency)
        return await super().get(key, *how, **more)


class Pinned(WrapperStore):
    """Keeps the first objects that are read, up to `max_size` bytes, and evicts none.

    What another process has left in `cache_store` is used, and counts. Parts of objects (shards) are not kept.
    """

    def __init__(self, store: Store, *, cache_store: Store, max_size: int):
        super().__init__(store)
        self.cache, self.max_size, self.left = cache_store, max_size, None

    async def get(self, key: str, prototype, byte_range=None):
        if byte_range is not None:
            return await super().get(key, prototype, byte_range)
        if self.left is None:
            held = await self.cache.getsize_prefix("")
            self.left = (
                self.max_size - held if self.left is None else self.left
            )  # another read was quicker
        found = await self.cache.get(key, prototype)
        if found is None:
            found = await super().get(key, prototype)
            if found is not None and len(found) <= self.left:
                self.left -= len(
                    found
                )  # before the next await: reads under way share what is left
                await self.cache.set(key, found)
        return found


# --------------------------------------------------------------------------- how often is a chunk there?


def shuffled(items: int, kept: int) -> float:
    """Expected hits of an LRU cache of `kept` items that sees all items once an epoch, shuffled anew.

    As `items` grows: f + (1 - f) ln(1 - f), where f = kept / items.
    """
    sum_of_inverses = sum(1 / n for n in range(items - kept + 1, items + 1))
    return (kept - (items - kept) * sum_of_inverses) / items


def expected(order: str, items: int, kept: int) -> float:
    """Expected hits in one of ORDERS."""
    at_random, share = shuffled(items, kept), kept / items
    # Of a block's P patches all but the first find it there, if the cache has room for the blocks of all slots.
    blocks = (at_random + (BLOCK_PATCHES - 1) * (kept >= SLOTS)) / BLOCK_PATCHES
    return {"same": float(kept == items), "shuffled": at_random, "blocks": blocks}.get(
        order, share
    )


def of_ranks(ranks: int, share: float) -> float:
    """Expected hits of a rank's own LRU cache of so large a share of the data; each epoch deals items anew."""
    if share * ranks <= 1:
        return ranks * (share + (1 - share) * math.log1p(-share))
    return 1 + ranks * (1 - share) * math.log1p(-1 / ranks)


def epoch(order: str, items: int, rng: np.random.Generator) -> np.ndarray:
    """The items that an epoch reads, in order."""
    if order == "same":
        return np.arange(items)
    if order == "draws":  # with replacement
        return rng.integers(items, size=items)
    shuffle = rng.permutation(items)
    if (
        order == "blocks"
    ):  # as in chapter 4: so many blocks side by side, P patches of each in turn
        return np.tile(shuffle.reshape(-1, 1, SLOTS), (1, BLOCK_PATCHES, 1)).ravel()
    return shuffle


def make_cache(
    kind: Callable, items: int, kept: float, folder: Path | None = None
) -> tuple[Bucket, WrapperStore]:
    """A bucket of items that weigh ITEM_BYTES each, and a cache before it, in a folder or in memory."""
    value = PROTOTYPE.buffer.from_bytes(bytes(ITEM_BYTES))
    bucket = Bucket(MemoryStore({f"c/{item}": value for item in range(items)}))
    cache_store = LocalStore(folder) if folder else MemoryStore()
    return bucket, kind(bucket, cache_store=cache_store, max_size=kept * ITEM_BYTES)


async def read(store: WrapperStore, items: np.ndarray) -> None:
    for item in items:
        await store.get(f"c/{item}", PROTOTYPE)


def hit_rates(
    bucket: Bucket, cache: WrapperStore, epochs: list[np.ndarray]
) -> list[float]:
    """Read each epoch through the cache; the share of it for which the bucket was not asked."""
    found = []
    for items in epochs:
        before = bucket.requests
        asyncio.run(read(cache, items))
        found.append(1 - (bucket.requests - before) / len(items))
    return found


def by_order(items: int, epochs: int, seed: int) -> list[dict]:
    """Hits of real caches after an epoch that fills them: a row for each order and share, and the formula's."""
    rows = []
    for order in ORDERS:
        for share in SHARES:
            rng, kept = np.random.default_rng(seed), round(share * items)
            bucket, cache = make_cache(
                Pinned if order == "pinned" else CacheStore, items, kept
            )
            fill = (
                "shuffled" if order == "draws" else order
            )  # reads all items, so that the cache is full
            read_in = [epoch(each, items, rng) for each in (fill, *[order] * epochs)]
            _, *found = hit_rates(bucket, cache, read_in)
            error = float(np.std(found, ddof=1) / math.sqrt(epochs))
            row = {
                "study": "orders",
                "order": order,
                "share": share,
                "hits": float(np.mean(found)),
            }
            rows.append(
                row
                | {"standard_error": error, "expected": expected(order, items, kept)}
            )
    return rows


def by_rank(items: int, epochs: int, seed: int) -> list[dict]:
    """Hits of the ranks' own caches: chunks dealt anew each epoch, or the same to each rank always."""
    rows = []
    for ranks, share in RANKS:
        row, kept = (
            {"study": "ranks", "ranks": ranks, "share": share},
            round(share * items),
        )
        for deal in ("anew", "fixed"):
            rng, warm_up = np.random.default_rng(seed), 6 * ranks
            deals = [[] for _ in range(ranks)]
            for _ in range(warm_up + epochs):
                order = rng.permutation(items)
                for rank, dealt in enumerate(deals):
                    dealt.append(
                        order[rank::ranks]
                        if deal == "anew"
                        else order[order % ranks == rank]
                    )
            found = [
                hit_rates(*make_cache(CacheStore, items, kept), dealt)[warm_up:]
                for dealt in deals
            ]
            row[deal] = float(np.mean(found))
        fixed = shuffled(items // ranks, min(kept, items // ranks))
        rows.append(
            row | {"expected_anew": of_ranks(ranks, share), "expected_fixed": fixed}
        )
    return rows


# ----------------------------------------------------------------------------- does the limit hold on disk?


def cleared(store: Store, *, cache_store: LocalStore, max_size: float) -> CacheStore:
    """A CacheStore that begins with an empty folder, so that its limit holds."""
    asyncio.run(cache_store.clear())
    return CacheStore(store, cache_store=cache_store, max_size=max_size)


def limits(items: int = 40, kept: int = 10) -> list[dict]:
    """Objects in a folder whose limit is `kept`, as one process after another reads all items once, in order.

    A process is a new cache object on the same folder: nothing else of it outlives the process before.
    """
    kinds = {
        "CacheStore": (CacheStore, kept),
        "cleared": (cleared, kept),
        "pinned": (Pinned, kept),
    }
    kinds["oversized"] = CacheStore, 0.5  # each item is larger than the limit
    rows = []
    for name, (kind, limit) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            for process in range(1, 5):
                bucket, cache = make_cache(kind, items, limit, Path(folder))
                [hits] = hit_rates(bucket, cache, [np.arange(items)])
                held = sum(path.is_file() for path in Path(folder).rglob("*"))
                row = {
                    "study": "limits",
                    "cache": name,
                    "limit": limit,
                    "process": process,
                    "items": items,
                }
                told = (
                    None
                    if name == "pinned"
                    else cache.cache_info()["current_size"] // ITEM_BYTES
                )
                rows.append(
                    row | {"hits": round(items * hits), "in_folder": held, "told": told}
                )
    return rows


# ------------------------------------------------------------------------------------- what is a hit worth?


def make_maps(folder: Path, number: int) -> int:
    """Write so many maps of the real wind, interpolated to MAP, a chunk each; return their compressed bytes."""
    with xr.open_dataset(WINDS) as winds:
        coarse = winds[next(iter(winds.data_vars))][:number].squeeze().fillna(0).values
    shape = len(coarse), *MAP
    array = zarr.create_array(
        LocalStore(folder), shape=shape, chunks=(1, *MAP), dtype="float32"
    )
    for index, values in enumerate(coarse):
        array[index] = zoom(
            values,
            np.divide(MAP, values.shape),
            order=1,
            grid_mode=True,
            mode="nearest",
        )
    return array.nbytes_stored()


class Way(NamedTuple):
    """How maps are read: by `get`, through caches that tell what they hold, from a bucket; and what it took."""

    bucket: Bucket
    get: Callable[[int], np.ndarray]
    held: Callable[[], int]  # bytes
    ms: list[float]  # for a patch, of each round
    missed: list[float]  # share of the reads, of each round


def make_way(cache: str, folder: Path, latency: float, budget: int) -> Way:
    """Open the maps in folder/maps through a cache of so many bytes."""
    bucket = store = Bucket(LocalStore(folder / "maps", read_only=True), latency)
    kept, maps = (
        MemoryStore(),
        LRU(budget, {}, weight=lambda key, values: values.nbytes),
    )
    if cache == "disk":
        kept = LocalStore(tempfile.mkdtemp(dir=folder))
    if cache in ("memory", "disk"):
        store = CacheStore(bucket, cache_store=kept, max_size=budget)
    if cache == "pinned":
        store = Pinned(bucket, cache_store=kept, max_size=budget)
    array = zarr.open_array(store, mode="r")

    def decoded(index: int) -> np.ndarray:
        if index not in maps:
            maps[index] = array[index]
        return maps[index]

    if cache == "decoded":
        return Way(bucket, decoded, lambda: maps.total_weight, [], [])
    return Way(
        bucket, array.__getitem__, lambda: asyncio.run(kept.getsize_prefix("")), [], []
    )


def rates(maps: int, latency: float, rounds: int, seed: int) -> list[dict]:
    """Milliseconds for a patch, one after another, each epoch in an order of its own; and what a cache holds.

    Budgets are shares of the DECODED bytes, the same for each cache. The ways take turns, an epoch each. The
    forecast is (1 - h) x a read without a cache + h x one from a cache that holds all.
    """
    rng, rows = np.random.default_rng(seed), []
    nbytes = maps * math.prod(MAP) * 4
    with tempfile.TemporaryDirectory() as folder:
        compressed = make_maps(Path(folder, "maps"), maps)
        for seconds in (latency, 0.0):
            ways = {}
            for cache, share in CACHES:  # with room for the array's metadata
                ways[cache, share] = make_way(
                    cache, Path(folder), seconds, int(share * nbytes) + 10_000
                )
            for turn in range(rounds + 1):
                for way in ways.values():
                    before, began = way.bucket.requests, perf_counter()
                    for index in rng.permutation(maps):
                        way.get(index)[:PATCH, :PATCH].copy()
                    if turn:  # the first fills the caches
                        way.ms.append(1e3 * (perf_counter() - began) / maps)
                        way.missed.append((way.bucket.requests - before) / maps)
            for (cache, share), way in ways.items():
                hits, miss = 1 - float(np.mean(way.missed)), median(ways["none", 0].ms)
                hit = median(
                    ways["memory" if cache == "pinned" else cache, min(1, 2 * share)].ms
                )
                row = {
                    "study": "rates",
                    "latency_ms": 1e3 * seconds,
                    "cache": cache,
                    "share": share,
                }
                row |= {"hits": hits, "held_mb": way.held() / 1e6}
                row |= {
                    "decoded_mb": nbytes / 1e6,
                    "stored_mb": compressed / 1e6,
                    "ms": median(way.ms),
                }
                row |= {"ms_min": min(way.ms), "ms_max": max(way.ms)}
                rows.append(row | {"forecast_ms": (1 - hits) * miss + hits * hit})
    return rows


# ------------------------------------------------------------------------------------------------ the command


def show(rows: list[dict]) -> None:
    """Print a line for each row, a heading for each study."""
    for before, row in zip([{}, *rows], rows):
        if before.keys() != row.keys():
            print("\n" + "  ".join(f"{name:>14}" for name in row))
        cells = (
            f"{value:.3f}" if isinstance(value, float) else str(value)
            for value in row.values()
        )
        print("  ".join(f"{cell:>14}" for cell in cells))


def draw(rows: list[dict]) -> Figure:
    """Hits against the cache's share of the data: formulas as curves, the real caches as dots."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes, share = figure.subplots(), np.linspace(0, 0.9999, 400)
    at_random = share + (1 - share) * np.log1p(-share)
    looks = {
        "blocks": (
            1 - (1 - at_random) / BLOCK_PATCHES,
            "o",
            "tab:green",
            f"LRU, blocks of {BLOCK_PATCHES} patches",
        ),
        "pinned": (share, "P", "k", "pinned, any order"),
        "draws": (share, "s", "tab:blue", "LRU, drawn with replacement"),
        "shuffled": (at_random, "o", "tab:orange", "LRU, shuffled each epoch"),
        "same": (0 * share, "D", "0.5", "LRU, same order each epoch"),
    }
    for order, (curve, marker, color, label) in looks.items():
        dots = [
            (row["share"], row["hits"]) for row in rows if row.get("order") == order
        ]
        first = dots[0][0] if order == "blocks" else 0  # which need room for all slots
        axes.plot(share[share >= first], curve[share >= first], color=color)
        size = 4 if marker == "P" else 8  # the pinned one lies upon another
        how = {
            "color": color,
            "markersize": size,
            "linestyle": "",
            "zorder": 12 - size,
            "label": label,
        }
        axes.plot(*zip(*dots), marker, **how)
    axes.set(
        xlabel="size of the cache / size of the data",
        ylabel="hit rate",
        ylim=(-0.04, 1.04),
    )
    axes.legend(loc="upper left", fontsize=8, bbox_to_anchor=(0, 0.84))
    axes.grid(alpha=0.3)
    return figure


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/caches.json and results/caches.png."""
    cpu, facts = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    results = {
        "command": " ".join(["uv run python caches.py", *flags]),
        "date": str(date.today()),
    }
    results["machine"] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "gpu": None,
    }
    versions = {name: version(name) for name in ("zarr", "zict", "numpy")}
    results["versions"] = {"python": platform.python_version()} | versions
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/caches.json").write_text(
        json.dumps(results | {"rows": rows}) + "\n"
    )
    draw(rows).savefig(HERE / "results/caches.png", dpi=110)


def main(argv: list[str] | None = None) -> list[dict]:
    """Run the four studies, print their rows and return them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--items",
        type=int,
        default=240,
        help="chunks of the first two studies (default: 240)",
    )
    add("--epochs", type=int, default=20, help="of the first two studies (default: 20)")
    add(
        "--maps",
        type=int,
        default=32,
        help="of the last study, at most 132 (default: 32)",
    )
    add(
        "--latency-ms",
        type=float,
        default=30,
        help="of the last study's store (default: 30)",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        help="of the last study, an epoch each (default: 3)",
    )
    add("--seed", type=int, default=0, help="of the orders (default: 0)")
    add(
        "--save-results",
        action="store_true",
        help="write results/caches.json and its picture",
    )
    args = parser.parse_args(argv)
    if args.items < 48 or args.items % 48:
        parser.error(
            f"--items {args.items}: give a multiple of 48, which {SLOTS} slots and 8 ranks divide"
        )
    limited = {
        "seed": (0, 2**32),
        "epochs": (2, 10_000),
        "maps": (2, 132),
        "rounds": (1, 1000),
        "latency_ms": (0, 10_000),
    }
    for name, (least, most) in limited.items():
        if not least <= getattr(args, name) <= most:
            given = f"--{name.replace('_', '-')} {getattr(args, name)}"
            parser.error(f"{given}: give a number from {least} to {most}")
    if not WINDS.exists():
        parser.error(
            f"../01_setup/data/{WINDS.name} is missing: run this in a copy of the whole book"
        )
    order = args.items, args.epochs, args.seed
    rows = [*by_order(*order), *by_rank(*order), *limits()]
    rows += rates(args.maps, args.latency_ms / 1e3, args.rounds, args.seed)
    show(rows)
    if args.save_results:
        save(rows, sys.argv[1:] if argv is None else argv)
    return rows


if __name__ == "__main__":
    main()
