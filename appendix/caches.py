"""Appendix: what a cache of chunks hits, what its limit means, and what a hit is worth.

    uv run python caches.py                  # half a minute
    uv run python caches.py --latency-ms 100
    uv run python caches.py --save-results   # and results/caches.json and results/caches.png

You should see real caches hit as often as the formulas say, a folder outgrow its limit,
and what a patch takes through each cache, from a store 30 ms away and from one at hand.
Zarr's own CacheStore keeps compressed chunks, zict's LRU decoded ones.
"""

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import xarray as xr
import zarr
from matplotlib.figure import Figure
from scipy.ndimage import zoom
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.experimental.cache_store import CacheStore
from zarr.storage import LocalStore, MemoryStore, WrapperStore
from zict import LRU

from saving import save_rows

HERE = Path(__file__).parent
WINDS = HERE.parent / "01_setup/data/navy_winds.nc"
ORDERS = ("same", "shuffled", "draws", "pinned", "blocks")
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the data's bytes that a cache may hold
# How many ranks, and the share that each may hold.
RANKS = ((1, 0.5), (2, 0.5), (8, 1 / 16), (8, 1 / 8), (8, 0.5))
BLOCK_PATCHES = 8  # of the order "blocks"
SLOTS = 16
ITEM_BYTES = 64  # any: hits are counted, not timed
MAP = (361, 720)  # cells: a map of 0.5 degrees, which is a chunk
PATCH = 64  # cells along a side
# Caches, and their budgets as shares of the decoded bytes.
CACHES = (
    ("none", 0.0),
    ("memory", 1.0),
    ("disk", 1.0),
    ("decoded", 1.0),
    ("memory", 0.5),
    ("disk", 0.5),
    ("decoded", 0.5),
    ("pinned", 0.5),
)
PROTOTYPE = default_buffer_prototype()


class Bucket(WrapperStore):
    """A store that answers `latency` seconds late and counts what it is asked for."""

    def __init__(self, store: Store, latency: float = 0):
        super().__init__(store)
        self.latency = latency
        self.requests = 0

    async def get(self, key: str, *how, **more):
        self.requests += 1
        if self.latency:
            await asyncio.sleep(self.latency)
        return await super().get(key, *how, **more)


class Pinned(WrapperStore):
    """Keeps the first objects that are read, up to `max_size` bytes, and evicts none.

    What another process has left in `cache_store` is used, and counts. Parts of objects
    (shards) are not kept.
    """

    def __init__(self, store: Store, *, cache_store: Store, max_size: int):
        super().__init__(store)
        self.cache = cache_store
        self.max_size = max_size
        self.left: int | None = None  # bytes; known once the cache has been looked at

    async def get(self, key: str, prototype, byte_range=None):
        if byte_range is not None:
            return await super().get(key, prototype, byte_range)
        if self.left is None:
            held = await self.cache.getsize_prefix("")
            if self.left is None:  # no other read was quicker
                self.left = self.max_size - held
        found = await self.cache.get(key, prototype)
        if found is not None:
            return found
        found = await super().get(key, prototype)
        if found is not None and len(found) <= self.left:
            # Before the next await, because reads under way share what is left.
            self.left -= len(found)
            await self.cache.set(key, found)
        return found


# ------------------------------------------------------------ how often is a chunk there?


def shuffled(items: int, kept: int) -> float:
    """Expected hits of an LRU cache of `kept` items, if each epoch is shuffled anew.

    As `items` grows: f + (1 - f) ln(1 - f), where f = kept / items.
    """
    inverses = [1 / n for n in range(items - kept + 1, items + 1)]
    return (kept - (items - kept) * sum(inverses)) / items


def expected(order: str, items: int, kept: int) -> float:
    """Expected hits in one of ORDERS."""
    if order == "same":
        return float(kept == items)
    if order == "shuffled":
        return shuffled(items, kept)
    if order == "blocks":
        # All but the first of a block's patches find it there, if all slots have room.
        others = BLOCK_PATCHES - 1 if kept >= SLOTS else 0
        return (shuffled(items, kept) + others) / BLOCK_PATCHES
    return kept / items


def expected_of_ranks(ranks: int, share: float) -> float:
    """Expected hits of a rank's own LRU cache of a share of the data, dealt anew each epoch."""
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
    if order == "blocks":
        # As in chapter 4: some blocks at a time, and patches of each in turn.
        blocks = shuffle.reshape(-1, 1, SLOTS)
        return np.tile(blocks, (1, BLOCK_PATCHES, 1)).ravel()
    return shuffle


def make_cache(
    kind: Callable, items: int, kept: float, folder: Path | None = None
) -> tuple[Bucket, WrapperStore]:
    """A bucket of items of ITEM_BYTES, and a cache before it, in a folder or in memory."""
    value = PROTOTYPE.buffer.from_bytes(bytes(ITEM_BYTES))
    objects = {f"c/{item}": value for item in range(items)}
    bucket = Bucket(MemoryStore(objects))
    cache_store = LocalStore(folder) if folder else MemoryStore()
    return bucket, kind(bucket, cache_store=cache_store, max_size=kept * ITEM_BYTES)


async def read(store: WrapperStore, items: np.ndarray) -> None:
    for item in items:
        await store.get(f"c/{item}", PROTOTYPE)


def hit_rates(
    bucket: Bucket, cache: WrapperStore, epochs: list[np.ndarray]
) -> list[float]:
    """The share of each epoch's reads for which the bucket was not asked."""
    found = []
    for items in epochs:
        before = bucket.requests
        asyncio.run(read(cache, items))
        misses = bucket.requests - before
        found.append(1 - misses / len(items))
    return found


def by_order(items: int, epochs: int, seed: int) -> list[dict]:
    """A row for each order and share: hits of real caches once they are full, and expected."""
    rows = []
    for order in ORDERS:
        for share in SHARES:
            kept = round(share * items)
            rng = np.random.default_rng(seed)
            kind = Pinned if order == "pinned" else CacheStore
            # The first epoch reads all items, so that the cache is full.
            fill = "shuffled" if order == "draws" else order
            orders = [fill] + [order] * epochs
            read_in = [epoch(each, items, rng) for each in orders]
            _, *found = hit_rates(*make_cache(kind, items, kept), read_in)
            row = {
                "study": "orders",
                "order": order,
                "share": share,
                "hits": float(np.mean(found)),
                "standard_error": float(np.std(found, ddof=1) / math.sqrt(epochs)),
                "expected": expected(order, items, kept),
            }
            rows.append(row)
    return rows


def by_rank(items: int, epochs: int, seed: int) -> list[dict]:
    """A row for each number of ranks and share: hits of the ranks' own caches."""
    rows = []
    for ranks, share in RANKS:
        kept = round(share * items)
        own = items // ranks
        row = {"study": "ranks", "ranks": ranks, "share": share}
        for deal in ("anew", "fixed"):
            row[deal] = hits_of_ranks(deal, ranks, items, kept, epochs, seed)
        row["expected_anew"] = expected_of_ranks(ranks, share)
        row["expected_fixed"] = shuffled(own, min(kept, own))
        rows.append(row)
    return rows


def hits_of_ranks(
    deal: str, ranks: int, items: int, kept: int, epochs: int, seed: int
) -> float:
    """Mean hits if chunks are dealt "anew" in each epoch, or are "fixed" to a rank."""
    rng = np.random.default_rng(seed)
    warm_up = 6 * ranks
    dealt: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for _ in range(warm_up + epochs):
        order = rng.permutation(items)
        for rank in range(ranks):
            mine = (
                order[rank::ranks] if deal == "anew" else order[order % ranks == rank]
            )
            dealt[rank].append(mine)
    found = []
    for read_in in dealt:
        hits = hit_rates(*make_cache(CacheStore, items, kept), read_in)
        found.append(hits[warm_up:])
    return float(np.mean(found))


# ------------------------------------------------------------ does the limit hold on disk?


def cleared(store: Store, *, cache_store: LocalStore, max_size: float) -> CacheStore:
    """A CacheStore that begins with an empty folder, so that its limit holds."""
    asyncio.run(cache_store.clear())
    return CacheStore(store, cache_store=cache_store, max_size=max_size)


def limits(items: int = 40, kept: int = 10) -> list[dict]:
    """A row for each cache and process, of four that read all items, one after another.

    A process is a new cache object on the same folder, whose limit is `kept` items.
    """
    kinds = {
        "CacheStore": (CacheStore, kept),
        "cleared": (cleared, kept),
        "pinned": (Pinned, kept),
        "oversized": (CacheStore, 0.5),  # each item is larger than the limit
    }
    rows = []
    for name, (kind, limit) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            for process in range(1, 5):
                bucket, cache = make_cache(kind, items, limit, Path(folder))
                [hits] = hit_rates(bucket, cache, [np.arange(items)])
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                told = None
                if name != "pinned":
                    told = cache.cache_info()["current_size"] // ITEM_BYTES
                row = {
                    "study": "limits",
                    "cache": name,
                    "limit": limit,
                    "process": process,
                    "items": items,
                    "hits": round(items * hits),
                    "in_folder": len(files),
                    "told": told,
                }
                rows.append(row)
    return rows


# -------------------------------------------------------------------- what is a hit worth?


def make_maps(folder: Path, number: int) -> int:
    """Write maps of the real wind, interpolated to MAP, a chunk each; their stored bytes."""
    with xr.open_dataset(WINDS) as winds:
        first = next(iter(winds.data_vars))
        coarse = winds[first][:number].squeeze().fillna(0).values
    shape = (len(coarse), *MAP)
    layout = {"shape": shape, "chunks": (1, *MAP), "dtype": "float32"}
    array = zarr.create_array(LocalStore(folder), **layout)
    for index, values in enumerate(coarse):
        factors = np.divide(MAP, values.shape)
        array[index] = zoom(values, factors, order=1, grid_mode=True, mode="nearest")
    return array.nbytes_stored()


class Way(NamedTuple):
    """A way to read maps, and what it took."""

    bucket: Bucket
    get: Callable[[int], np.ndarray]  # through a cache
    held: Callable[[], int]  # bytes in the cache
    ms: list[float]  # for a patch, of each round
    missed: list[float]  # share of the reads, of each round


def make_way(cache: str, folder: Path, latency: float, budget: int) -> Way:
    """Open the maps in folder/maps through a cache of so many bytes."""
    bucket = Bucket(LocalStore(folder / "maps", read_only=True), latency)
    if cache == "decoded":
        return keep_decoded(bucket, budget)
    kept = MemoryStore()
    if cache == "disk":
        kept = LocalStore(tempfile.mkdtemp(dir=folder))
    store: Store = bucket
    if cache in ("memory", "disk"):
        store = CacheStore(bucket, cache_store=kept, max_size=budget)
    elif cache == "pinned":
        store = Pinned(bucket, cache_store=kept, max_size=budget)
    array = zarr.open_array(store, mode="r")

    def held() -> int:
        return asyncio.run(kept.getsize_prefix(""))

    return Way(bucket, array.__getitem__, held, [], [])


def keep_decoded(bucket: Bucket, budget: int) -> Way:
    """An LRU of decoded maps."""
    maps = LRU(budget, {}, weight=lambda key, values: values.nbytes)
    array = zarr.open_array(bucket, mode="r")

    def get(index: int) -> np.ndarray:
        if index not in maps:
            maps[index] = array[index]
        return maps[index]

    return Way(bucket, get, lambda: maps.total_weight, [], [])


def rates(maps: int, latency: float, rounds: int, seed: int) -> list[dict]:
    """A row for each latency and cache: ms for a patch, one after another, and hits.

    Budgets are shares of the DECODED bytes, the same for each cache. The ways take turns,
    an epoch each, and each epoch has an order of its own.
    """
    rng = np.random.default_rng(seed)
    nbytes = maps * math.prod(MAP) * 4
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stored = make_maps(Path(folder, "maps"), maps)
        sizes = {"decoded_mb": nbytes / 1e6, "stored_mb": stored / 1e6}
        for seconds in (latency, 0.0):
            ways = {}
            for cache, share in CACHES:
                budget = int(share * nbytes) + 10_000  # room for the array's metadata
                ways[cache, share] = make_way(cache, Path(folder), seconds, budget)
            time_ways(list(ways.values()), maps, rounds, rng)
            for cache, share in ways:
                row = {"study": "rates", "latency_ms": 1e3 * seconds}
                rows.append(row | summarize(cache, share, ways, sizes))
    return rows


def time_ways(
    ways: list[Way], maps: int, rounds: int, rng: np.random.Generator
) -> None:
    """Read all maps by each way in turn; the first round fills the caches."""
    for number in range(rounds + 1):
        for way in ways:
            before = way.bucket.requests
            began = perf_counter()
            for index in rng.permutation(maps):
                way.get(index)[:PATCH, :PATCH].copy()
            if number:
                way.ms.append(1e3 * (perf_counter() - began) / maps)
                way.missed.append((way.bucket.requests - before) / maps)


def summarize(
    cache: str, share: float, ways: dict[tuple[str, float], Way], sizes: dict
) -> dict:
    """A way's figures. The forecast weighs a read without a cache and one that always hits."""
    way = ways[cache, share]
    hits = 1 - float(np.mean(way.missed))
    miss = median(ways["none", 0].ms)
    whole = ("memory" if cache == "pinned" else cache, min(1, 2 * share))
    hit = median(ways[whole].ms)
    found = {"cache": cache, "share": share, "hits": hits, "held_mb": way.held() / 1e6}
    found |= sizes
    found["ms"] = median(way.ms)
    found["ms_min"] = min(way.ms)
    found["ms_max"] = max(way.ms)
    found["forecast_ms"] = (1 - hits) * miss + hits * hit
    return found


# ---------------------------------------------------------------------------- the command


def show(rows: list[dict]) -> None:
    """Print a line for each row, a heading for each study."""
    before: dict = {}
    for row in rows:
        if before.keys() != row.keys():
            print()
            print("  ".join(f"{name:>14}" for name in row))
        cells = []
        for value in row.values():
            cells.append(f"{value:.3f}" if isinstance(value, float) else str(value))
        print("  ".join(f"{cell:>14}" for cell in cells))
        before = row


def draw(rows: list[dict]) -> Figure:
    """Hits by the cache's share of the data: formulas as curves, real caches as dots."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    share = np.linspace(0, 0.9999, 400)
    at_random = share + (1 - share) * np.log1p(-share)
    of_blocks = 1 - (1 - at_random) / BLOCK_PATCHES
    blocks = f"LRU, blocks of {BLOCK_PATCHES} patches"
    looks = {
        "blocks": (of_blocks, "o", "#009E73", blocks),
        "pinned": (share, "P", "black", "pinned, any order"),
        "draws": (share, "s", "#0072B2", "LRU, drawn with replacement"),
        "shuffled": (at_random, "o", "#E69F00", "LRU, shuffled each epoch"),
        "same": (0 * share, "D", "0.5", "LRU, same order each epoch"),
    }
    for order, (curve, marker, colour, label) in looks.items():
        found = [row for row in rows if row.get("order") == order]
        shares = [row["share"] for row in found]
        hits = [row["hits"] for row in found]
        # Blocks need room for all slots.
        shown = share >= (shares[0] if order == "blocks" else 0)
        axes.plot(share[shown], curve[shown], color=colour)
        size = 4 if marker == "P" else 8  # the pinned one lies upon another
        dots = {"color": colour, "markersize": size, "label": label}
        axes.plot(shares, hits, marker, **dots, zorder=12 - size)
    axes.set(xlabel="size of the cache / size of the data", ylabel="hit rate")
    axes.set_ylim(-0.04, 1.04)
    axes.legend(loc="upper left", fontsize=8, bbox_to_anchor=(0, 0.84))
    axes.grid(alpha=0.3)
    return figure


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/caches.json and results/caches.png."""
    command = ["python caches.py", *flags]
    save_rows(HERE / "results/caches.json", command, rows, ("zarr", "zict", "numpy"))
    draw(rows).savefig(HERE / "results/caches.png", dpi=110)


def main(argv: list[str] | None = None) -> list[dict]:
    """Run the four studies, print their rows and return them."""
    args = parse(argv)
    order = (args.items, args.epochs, args.seed)
    rows = [*by_order(*order), *by_rank(*order), *limits()]
    rows += rates(args.maps, args.latency_ms / 1e3, args.rounds, args.seed)
    show(rows)
    if args.save_results:
        save(rows, sys.argv[1:] if argv is None else argv)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "chunks of the first two studies (default: 240)"
    add("--items", type=int, default=240, help=text)
    add("--epochs", type=int, default=20, help="of the first two studies (default: 20)")
    text = "of the last study, at most 132 (default: 32)"
    add("--maps", type=int, default=32, help=text)
    text = "of the last study's store (default: 30)"
    add("--latency-ms", type=float, default=30, help=text)
    text = "of the last study, an epoch each (default: 3)"
    add("--rounds", type=int, default=3, help=text)
    add("--seed", type=int, default=0, help="of the orders (default: 0)")
    text = "write results/caches.json and its picture"
    add("--save-results", action="store_true", help=text)
    args = parser.parse_args(argv)
    if args.items < 48 or args.items % 48:
        remedy = f"give a multiple of 48, which {SLOTS} slots and 8 ranks divide"
        parser.error(f"--items {args.items}: {remedy}")
    limited = {
        "seed": (0, 2**32),
        "epochs": (2, 10_000),
        "maps": (2, 132),
        "rounds": (1, 1000),
        "latency_ms": (0, 10_000),
    }
    for name, (least, most) in limited.items():
        value = getattr(args, name)
        if not least <= value <= most:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value}: give a number from {least} to {most}")
    if not WINDS.exists():
        reason = f"../01_setup/data/{WINDS.name} is missing"
        parser.error(f"{reason}: run this in a copy of the whole book")
    return args


if __name__ == "__main__":
    main()
