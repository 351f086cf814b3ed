"""Chapter 4: the same patches out of the same bucket, by other libraries, by our loader, and by nothing at all.

    uv run --group peers python compare.py                  # all of them, 20 minutes on two idle cores
    uv run python compare.py                                # those that need nothing more than this book does
    uv run python compare.py --only naive ours limit
    uv run python compare.py --quick                        # a coarse store, once: that it works, not what it finds
    uv run --group peers python compare.py --save-results   # and write results/compare.json

A sample is a patch of 64 x 64 cells of both components of the wind, float32; a batch has 32. Maps at 0.25
degrees lie in Zarr behind local_s3.py. Each reader works in a process of its own, all in turn, round after
round, and the server counts what it is asked for. MosaicML Streaming, LitData and WebDataset do not read Zarr:
they get copies in their own formats, cut into patches, on the same server.

`limit` is what is left when a reader does nothing else: the objects of the blocks that `ours` begins in the same
steps, in that order, each by one bare GET, as many at once as `ours` may have in flight, and each decoded, in as
many threads as there are cores. It cuts no patches. `gets` does not even decode: what the server can give.
"""

import asyncio
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, lru_cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import NamedTuple
from urllib.request import urlopen

import dask
import numpy as np
import psutil
import torch
import xarray as xr
import zarr
from numcodecs import Blosc
from obstore.store import S3Store
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from zarr.storage import ObjectStore

from loader import BlockPatches, StepSampler, WindPatches
from object_store import WHOLE, Access, InputError, Parser, Winds

HERE = Path(__file__).parent
EXAMPLE, OUTPUTS = HERE.parent / "03_cloud_data", HERE / "outputs/compare"
NAMES, YEARS = ["10m_u_component_of_wind", "10m_v_component_of_wind"], slice("1982", "1990")
PATCH, BATCH, SEED = 64, 32, 0
STORES = "stores"  # the bucket with the stores of Zarr; each run has another for the copies
IN_FLIGHT, IN_FLIGHT_BYTES = 256, 64e6  # requests at once, where that can be set: the fewer of the two
SEVERAL = 4  # times as many blocks as ours holds are begun while it is measured
OWN_BYTES = 0.75  # of a sample's bytes, the part that must come from the server while it is measured
MIB = 2**20
PEERS = "uv run --group peers python compare.py"
# The local server takes any keys; a client that finds none would ask the cloud's metadata service.
ENVIRONMENT = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
ENVIRONMENT |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
warnings.filterwarnings("ignore", message="(Consolidated metadata|Numcodecs codecs)")  # in Zarr 3


class Layout(NamedTuple):
    """How a store is cut, and what suits that."""

    chunk: tuple[int, int, int]
    lanes: int  # of ours, without workers
    block: tuple[int, int, int]  # patches along each dimension that are a batch of xbatcher's: whole chunks


LAYOUTS = {
    "1x128x128": Layout((1, 128, 128), 32, (8, 2, 2)),
    "1x256x256": Layout((1, 256, 256), 32, (2, 4, 4)),
    "1x721x1440": Layout((1, 721, 1440), 8, (1, 4, 8)),
}
SOURCE = "1x128x128"  # the layout that copies are made from
CONVERTED = "own copy"  # the layout of those who need one


class Size(NamedTuple):
    """What --quick makes smaller."""

    days: int
    degrees: float
    rounds: int
    samples: int
    layouts: list[str]
    mixed: int  # samples that a copy's reader shuffles among, where that can be set
    part: float  # of the sizes of the copies' files


SIZES = {
    False: Size(80, 0.25, 3, 8192, ["1x128x128", "1x721x1440"], 1024, 1),
    True: Size(96, 0.75, 1, 128, ["1x128x128"], 64, 1 / 16),
}


@dataclass(frozen=True)
class Case:
    """One measurement, small enough to be sent to the process that takes it."""

    name: str
    layout: str
    workers: int
    batches: int  # that are measured, at least
    shape: tuple[int, int, int]  # of the training years: times, rows, columns
    quick: bool
    copies: str = ""  # the bucket of the copies, a folder in OUTPUTS
    address: str = ""  # of the server
    kept: str = ""  # a folder, empty, for what a reader keeps on this disk

    def __str__(self) -> str:
        return f"{self.name}, {self.layout}, {self.workers} workers"

    @property
    def size(self) -> Size:
        return SIZES[self.quick]

    @property
    def warmup(self) -> int:
        """Batches before those that are measured."""
        return max(1, min(16, self.batches // 4))

    @property
    def drawn(self) -> int:
        """Batches that a reader is given to read: more than are taken, so that workers never run out."""
        return self.warmup + self.batches + 8

    @property
    def chunk(self) -> tuple[int, ...]:
        return tuple(map(min, LAYOUTS[self.layout].chunk, self.shape))

    @property
    def in_flight(self) -> int:
        return min(IN_FLIGHT, int(IN_FLIGHT_BYTES / (4 * math.prod(self.chunk))))

    @property
    def forks(self) -> dict[str, object]:
        """Workers as the readers of copies expect them: forks of the process that has opened the dataset."""
        return {"num_workers": self.workers} | ({"multiprocessing_context": "fork"} if self.workers else {})

    @property
    def zarr(self) -> str:
        return store_name(self.layout if self.layout in LAYOUTS else SOURCE, self.quick)

    def bucket(self, bucket: str, prefix: str = "") -> S3Store:
        place = {"endpoint": self.address, "skip_signature": True, "client_options": {"allow_http": True}}
        return S3Store(bucket, prefix=prefix, region="us-east-1", **place)

    def dataset(self, **options: object) -> xr.Dataset:
        """The store as xarray opens it, the training years, which are its first times."""
        zarr.config.set({"async.concurrency": self.in_flight if self.layout in LAYOUTS else IN_FLIGHT})
        store = ObjectStore(self.bucket(STORES, self.zarr), read_only=True)
        return xr.open_zarr(store, **options)[NAMES].isel(time=slice(self.shape[0]))

    def winds(self) -> Winds:
        """The store as this book opens it."""
        threads = max(1, os.cpu_count() // max(1, self.workers))
        access = {"anonymous": True, "threads": threads, "max_requests": self.in_flight}
        return Winds(Access(f"s3://{STORES}/{self.zarr}", **access), NAMES, YEARS)

    def loader(self, dataset: Dataset, **options: object) -> DataLoader:
        """A DataLoader as chapter 3 found it to be safe."""
        many_threads(self.in_flight)
        if self.workers:
            options |= {"num_workers": self.workers, "multiprocessing_context": "forkserver"}
            options |= {"worker_init_fn": partial(many_threads, self.in_flight)}
        return DataLoader(dataset, **options)


def many_threads(in_flight: int, worker: int = 0) -> None:
    """Let Dask read as many chunks at once as others may; by default it has a thread for each core."""
    dask.config.set(scheduler="threads", num_workers=in_flight)


def store_name(layout: str, quick: bool) -> str:
    return f"{SIZES[quick].days}_days_{SIZES[quick].degrees:g}_degrees_{layout}.zarr"


class Opened(NamedTuple):
    """A reader at work. `look` takes a batch and its number, from 0, and gives its wind, (batch, 2, H, W), as the
    store has its rows, and where in the store its patches begin, (batch, 3): time, row, column."""

    batches: Iterable
    look: Callable
    blocks: BlockPatches | None = None


def look(batch: dict, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a batch that says itself where its patches lie."""
    return np.asarray(batch["wind"]), np.asarray(batch["position"])


# ---------------------------------------------------------------------------------------- readers of the store


class Naive(Dataset):
    """What one writes first: xarray in __getitem__. Patches lie at random times and corners."""

    chunks = None

    def __init__(self, case: Case):
        self.case = case

    @cached_property
    def winds(self) -> xr.Dataset:
        """Opened by whoever reads: no process hands an open store on to another."""
        return self.case.dataset(chunks=self.chunks)

    def position(self, index: int) -> np.ndarray:
        """Time, row and column of a sample's first cell: the same for every reader that reads where it likes."""
        times, rows, columns = self.case.shape
        return np.random.default_rng((SEED, index)).integers((times, rows - PATCH + 1, columns - PATCH + 1))

    def patch(self, index: int) -> xr.Dataset:
        time, row, column = self.position(index).tolist()
        across = slice(column, column + PATCH)
        return self.winds.isel(time=time, latitude=slice(row, row + PATCH), longitude=across)

    def sample(self, index: int, patch: xr.Dataset) -> dict[str, np.ndarray]:
        return {"wind": np.stack([patch[name].values for name in NAMES]), "position": self.position(index)}

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.sample(index, self.patch(index).load())


class LazyDask(Naive):
    """Arrays of Dask, one block for each chunk of the store; a batch is one graph, computed at once."""

    chunks = {}  # noqa: RUF012

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        return [self.sample(*each) for each in zip(indices, dask.compute(*map(self.patch, indices)))]


class TensorStore(Naive):
    """A batch's reads are all begun before the first is waited for."""

    @cached_property
    def arrays(self) -> list:
        import tensorstore

        context = tensorstore.Context({"s3_request_concurrency": {"limit": self.case.in_flight}})
        place = {"driver": "s3", "bucket": STORES, "endpoint": self.case.address, "aws_region": "us-east-1"}
        place["aws_credentials"] = {"type": "anonymous"}
        stores = [place | {"path": f"{self.case.zarr}/{name}/"} for name in NAMES]
        specs = [{"driver": "zarr3", "kvstore": store} for store in stores]
        return [tensorstore.open(spec, context=context, open=True).result() for spec in specs]

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        positions, begun = [self.position(index) for index in indices], []
        for time, row, column in positions:
            box = (time, slice(row, row + PATCH), slice(column, column + PATCH))
            begun.append([array[box].read() for array in self.arrays])
        winds = [np.stack([read.result() for read in reads]) for reads in begun]
        return [{"wind": wind, "position": position} for wind, position in zip(winds, positions)]


def open_random(dataset: type[Naive], case: Case) -> Opened:
    batches = [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(case.drawn)]
    return Opened(case.loader(dataset(case), batch_sampler=batches), look)


def wind_of(patches: xr.Dataset) -> torch.Tensor:
    """A patch, or as many as an item has, each of one time, as (..., component, row, column)."""
    return torch.from_numpy(np.stack([patches[name].values.squeeze(axis=-3) for name in NAMES], axis=-3))


def open_xbatcher(blocks: bool, case: Case) -> Opened:
    """An item of xbatcher's is a patch; or it is 32 neighbours, read together."""
    from xbatcher import BatchGenerator
    from xbatcher.loaders.torch import MapDataset

    winds = case.dataset(chunks={})
    options, size = {}, {"time": 1, "latitude": PATCH, "longitude": PATCH}
    if blocks:
        times, rows, columns = (BATCH // 2, 1, 2) if case.quick else LAYOUTS[case.layout].block
        block = {"time": times, "latitude": rows * PATCH, "longitude": columns * PATCH}
        options = {"batch_dims": block, "concat_input_dims": True}
    generator = BatchGenerator(winds, size, preload_batch=False, **options)
    items = 1 if blocks else BATCH  # in a batch
    order = np.random.default_rng(SEED).permutation(len(generator))
    order = np.resize(order, case.drawn * items).tolist()

    def look_up(batch: torch.Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        found, firsts = [generator[index] for index in order[number * items : (number + 1) * items]], []
        for dim in ("time", "latitude", "longitude"):
            values = [np.atleast_1d(patch[dim].values[..., 0]) for patch in found]
            firsts.append(winds.indexes[dim].get_indexer(np.concatenate(values)))
        return batch.numpy(), np.stack(np.broadcast_arrays(*firsts), axis=1)

    batched = {"batch_size": None if blocks else BATCH, "sampler": order}
    return Opened(case.loader(MapDataset(generator, transform=wind_of), **batched), look_up)


def open_book(kind: type[WindPatches], case: Case, share: float = 1) -> Opened:
    """Chapter 3's reader, a batch at once, and this chapter's, block by block.

    From a map as many patches are cut as cover it, or a share of them: so each cell is used about once, as it is
    by those who read a copy.
    """
    winds, scale = case.winds(), (np.zeros((2, 1, 1), "f4"), np.ones((2, 1, 1), "f4"))
    make = partial(kind, winds, *scale, PATCH, BATCH, SEED)
    if blocks := kind is BlockPatches:
        lanes = BATCH * case.workers or LAYOUTS[case.layout].lanes
        patches = make(lanes, share * math.prod(case.shape[1:]) / PATCH**2)
        assert patches.turns % max(1, case.workers) == 0  # else every worker reads all blocks
    else:
        patches = make()

    def look_up(batch: dict, number: int) -> tuple[np.ndarray, np.ndarray]:
        wind, cells, positions = batch["wind" if blocks else "target"].numpy(), np.arange(PATCH), []
        for time, row, column, _ in (patches.sample(number, k) for k in range(BATCH)):
            rows = winds.rows[row + cells]
            positions.append((time, rows.min(), winds.columns[column]))
        order = slice(None, None, int(np.sign(rows[1] - rows[0])))  # of the store's rows
        return wind[..., order, :], np.array(positions)

    steps = SimpleNamespace(max_steps=10**6, batch_size=BATCH, accumulate=1, overfit_one_batch=False)
    sampler = StepSampler(steps, start=0, rank=0, world_size=1)
    loader = case.loader(patches, batch_sampler=sampler, collate_fn=patches.collate)
    return Opened(loader, look_up, patches if blocks else None)


def keys_of(patches: BlockPatches, block: int) -> list[str]:
    """The objects that are read for a block."""
    (time, row, column), (times, rows, columns) = patches.corners(block), patches.winds.chunk_numbers()
    along = np.arange(column[0], column[1] + PATCH - 1) % len(columns)
    numbers = [times[slice(*time)], rows[row[0] : row[1] + PATCH - 1], columns[along]]
    return [f"{name}/c/{t}/{y}/{x}" for name, t, y, x in product(NAMES, *map(np.unique, numbers))]


def steps_of(patches: BlockPatches, case: Case) -> range:
    """The steps that are measured. A reader that is served from blocks already held would look too fast: while
    it is measured, several times as many are begun as its lanes hold and its workers have made batches of."""
    ahead = 2 * patches.lanes * patches.patches[patches.blocks].mean() / BATCH + 2 * case.workers
    return range(case.warmup, case.warmup + max(case.batches, math.ceil(SEVERAL * ahead)))


def blocks_begun(patches: BlockPatches, steps: range) -> list[int]:
    """The blocks whose first patch is in these steps."""
    located = [patches.locate(step, k) for step in steps for k in range(BATCH)]
    return [patches.visit(lane, number).block for lane, number, patch in located if patch == 0]


# ------------------------------------------------------------------------------------------- readers of copies


@lru_cache(maxsize=1)
def whole(case: Case) -> xr.Dataset:
    return case.dataset(chunks=None)


def tiles(case: Case, time: int) -> Iterator[dict[str, np.ndarray]]:
    """A map, read through the server and cut into patches side by side: every cell stands in a copy once."""
    winds = whole(case).isel(time=time)
    values = np.stack([winds[name].values for name in NAMES])
    corners = [range(0, size - PATCH + 1, PATCH) for size in case.shape[1:]]
    for row, column in product(*corners):
        tile = values[:, row : row + PATCH, column : column + PATCH]
        yield {"wind": np.ascontiguousarray(tile), "position": np.array([time, row, column], "int32")}


def convert_mosaicml(case: Case, target: Path) -> None:
    from streaming import MDSWriter

    columns = {"wind": f"ndarray:float32:2,{PATCH},{PATCH}", "position": "ndarray:int32:3"}
    limit = int(16 * MIB * case.size.part)
    with MDSWriter(out=str(target), columns=columns, size_limit=limit) as writer:
        for time in range(case.shape[0]):
            for tile in tiles(case, time):
                writer.write(tile)


def open_mosaicml(case: Case) -> Opened:
    from streaming import StreamingDataLoader, StreamingDataset

    place = {"remote": f"s3://{case.copies}/mosaicml", "local": case.kept, "batch_size": BATCH}
    mixed = {"shuffle": True, "shuffle_block_size": case.size.mixed, "predownload": case.size.mixed}
    dataset = StreamingDataset(**place, **mixed)
    # Else workers, which are forks, share the connection of its S3 client, and get each other's answers.
    for stream in dataset.streams:
        stream._downloader.clean_up()
    return Opened(StreamingDataLoader(dataset, batch_size=BATCH, **case.forks), look)


def convert_litdata(case: Case, target: Path) -> None:
    import litdata

    cut = {"chunk_bytes": MIB // 4 if case.quick else 4 * MIB, "verbose": False}
    times = {"fn": partial(tiles, case), "inputs": list(range(case.shape[0]))}
    litdata.optimize(**times, output_dir=str(target), start_method="fork", **cut)


def open_litdata(case: Case) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it refuses a server without TLS
    place = {"cache_dir": case.kept, "storage_options": {"endpoint_url": case.address}}
    dataset = StreamingDataset(f"s3://{case.copies}/litdata", shuffle=True, drop_last=True, **place)
    return Opened(StreamingDataLoader(dataset, batch_size=BATCH, **case.forks), look)


def convert_webdataset(case: Case, target: Path) -> None:
    import webdataset

    target.mkdir(parents=True)
    limit = 64 * MIB * case.size.part
    with webdataset.ShardWriter(f"{target}/%06d.tar", maxsize=limit, verbose=0) as writer:
        for time in range(case.shape[0]):
            for number, tile in enumerate(tiles(case, time)):
                named = {f"{name}.npy": value for name, value in tile.items()}
                writer.write({"__key__": f"{time:06d}_{number:06d}", **named})


def open_webdataset(case: Case) -> Opened:
    import webdataset

    shards = sorted(each.name for each in Path(OUTPUTS, case.copies, "webdataset").glob("*.tar"))
    urls = [f"{case.address}/{case.copies}/webdataset/{shard}" for shard in shards]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=SEED).repeat()
    dataset = dataset.shuffle(case.size.mixed).decode().to_tuple("wind.npy", "position.npy").batched(BATCH)
    loader = webdataset.WebLoader(dataset, batch_size=None, **case.forks)
    return Opened(loader, lambda batch, number: (np.asarray(batch[0]), np.asarray(batch[1])))


# ------------------------------------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class Alternative:
    """A reader: how it is opened and set, and what cannot be measured of it, each with the reason."""

    open: Callable[[Case], Opened] | None
    setting: str = ""  # what is not its default, as its own documentation advises where that says anything
    resume: tuple[bool, str] = (None, None)  # exactly, in the middle of an epoch
    world: tuple[bool, str] = (None, None)  # to resume on another number of ranks, no sample lost or doubled
    cannot: str | None = None
    package: str | None = None
    modules: tuple[str, ...] = ()  # imported before the clock runs
    convert: Callable[[Case, Path], None] | None = None
    fewer: int = 1  # it is slow: measured on so many times fewer samples
    workers: tuple[int, ...] = (0, 2)


STATELESS = {"resume": (False, "a DataLoader keeps no state; with chapter 1's StepSampler, yes")}
STATELESS |= {"world": (False, "a DistributedSampler deals anew; with chapter 1's StepSampler, yes")}
FUNCTION = dict.fromkeys(["resume", "world"], (True, "which sample it is depends on the step alone"))
XBATCHER = {"package": "xbatcher", "modules": ("xbatcher.loaders.torch",), **STATELESS}
THREADS = "as many threads of Dask as ours may have requests"
LAZY = f"loaded by Dask, as its MapDataset does; {THREADS}"
GRID = "place patches anywhere: they lie on a grid; "
CUT = "read Zarr; cut patches elsewhere or of another size: the copy is cut; "
BLOCKS = {"cannot": "mix all of the store at any time: only as many blocks as there are lanes", **FUNCTION}
ALTERNATIVES = {
    "naive": Alternative(
        partial(open_random, Naive), "none", **STATELESS, cannot="overlap the reads of a process", fewer=64
    ),
    "xbatcher": Alternative(
        partial(open_xbatcher, False), LAZY, **XBATCHER, cannot=f"{GRID}overlap a batch's reads", fewer=64
    ),
    "xbatcher-blocks": Alternative(
        partial(open_xbatcher, True),
        f"batch_dims of whole chunks, without preload_batch, which would read them twice; {LAZY}",
        **XBATCHER,
        cannot=f"{GRID}mix places: a batch is one block",
        fewer=16,
    ),
    "dask": Alternative(
        partial(open_random, LazyDask), f"one dask.compute for a batch; {THREADS}", **STATELESS, fewer=32
    ),
    "tensorstore": Alternative(
        partial(open_random, TensorStore),
        "all reads of a batch begun before one is waited for; s3_request_concurrency as ours",
        **STATELESS,
        package="tensorstore",
        modules=("tensorstore",),
        fewer=16,
    ),
    "mosaicml": Alternative(
        open_mosaicml,
        "batch_size given to the dataset, too; predownload raised to shuffle_block_size; shards "
        "of 16 MiB; its S3 client dropped before workers are forked: they would share its connection, and fail",
        resume=(True, "state_dict of its loader"),
        world=(True, "global batches are the same on any number of ranks"),
        cannot=f"{CUT}mix more than shuffle_block_size samples",
        package="mosaicml-streaming",
        modules=("streaming",),
        convert=convert_mosaicml,
    ),
    "litdata": Alternative(
        open_litdata,
        "chunks of 4 MiB, of which it fetches up to 32 ahead by itself, so that an epoch has several times as many",
        resume=(True, "state_dict of its loader"),
        world=(True, "what is left is dealt anew in the same order, if drop_last is the same on both"),
        cannot=f"{CUT}mix more than a chunk; give the same global batches on other ranks from the start",
        package="litdata",
        modules=("litdata",),
        convert=convert_litdata,
    ),
    "webdataset": Alternative(
        open_webdataset,
        "shards and samples shuffled, batches made in the workers, curl as it is; shards of 64 MiB",
        resume=(False, "keeps no state, and no run repeats another's order"),
        world=(False, "keeps no state, and deals whole shards to ranks"),
        cannot=f"{CUT}begin in the middle of a shard; mix more than its buffer",
        package="webdataset",
        modules=("webdataset",),
        convert=convert_webdataset,
    ),
    "chapter-3": Alternative(
        partial(open_book, WindPatches), "its patches, decoded as in this chapter", **FUNCTION, fewer=16
    ),
    "ours": Alternative(partial(open_book, BlockPatches), "as many patches as cover a map", **BLOCKS),
    "ours-quarter": Alternative(
        partial(open_book, BlockPatches, share=0.25), "a quarter as many", **BLOCKS, workers=(0,)
    ),
    "limit": Alternative(None, workers=(0,)),
    "gets": Alternative(None, workers=(0,)),
}


# ------------------------------------------------------------------------------------------- one measurement


def processes() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """What this process, those that it has started, and those that these have waited for have taken so far."""
    taken = 0.0
    for process in processes():
        with suppress(psutil.NoSuchProcess):
            taken += sum(process.cpu_times()[:4])
    return taken


def peak_mb(process: psutil.Process) -> float:
    """A process's peak memory; getrusage would count its parent's too, from before the exec."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        status = Path(f"/proc/{process.pid}/status")
        peak = status.read_text().partition("VmHWM:")[2].split() if status.parent.parent.exists() else None
        return int(peak[0]) / 1024 if peak else process.memory_info().rss / MIB
    return 0.0


def counts(address: str) -> dict[str, int]:
    with urlopen(f"{address}/counts") as answer:
        return {"requests": 0, "bytes": 0} | json.load(answer)


@contextmanager
def metered(case: Case, samples: int, figures: dict) -> Iterator[None]:
    """Note what is done here, for each sample."""
    before, cpu, began = counts(case.address), cpu_seconds(), perf_counter()
    yield
    seconds, cpu, after = perf_counter() - began, cpu_seconds() - cpu, counts(case.address)
    figures |= {"samples": samples, "samples_per_second": samples / seconds}
    figures |= {
        f"{name}_per_sample": (after[name] - before[name]) / samples for name in ("requests", "bytes")
    }
    figures["cpu_ms_per_sample"] = 1e3 * cpu / samples


def start_forkserver(modules: tuple[str, ...] = ()) -> None:
    """Let the processes that this one starts be forks of one that has imported what they need, and done no more:
    else the time to the first batch would be mostly that of imports."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loader", "dask.array", "psutil", "tqdm", *modules])
    first = context.Process(target=int)
    first.start()
    first.join()


def measure(case: Case) -> dict:
    """Open, take the first batch, warm up, and then count: all in this process, which does nothing else."""
    alternative, me = ALTERNATIVES[case.name], psutil.Process()
    for module in alternative.modules:
        import_module(module)
    if case.workers and case.layout != CONVERTED:
        start_forkserver(alternative.modules)
    figures = {"imports_mb": peak_mb(me)}
    began = perf_counter()
    opened = alternative.open(case)
    batches = iter(opened.batches)
    first = next(batches)
    figures["first_batch_seconds"] = perf_counter() - began
    steps = range(case.warmup, case.warmup + case.batches)
    if opened.blocks:
        steps = steps_of(opened.blocks, case)
        begun, keys = blocks_begun(opened.blocks, steps), partial(keys_of, opened.blocks)
        figures |= {"blocks": len(begun), "objects": sum(map(len, map(keys, begun)))}
        figures |= {"blocks_held": 2 * opened.blocks.lanes}
        figures |= {"patches_per_block": opened.blocks.patches[opened.blocks.blocks].mean().item()}
    elif case.layout == CONVERTED:
        # Most of an epoch: what its reader has fetched ahead is little of that, and nothing is read twice. The
        # last batches may not be full.
        times, rows, columns = case.shape
        steps = range(case.warmup, int(0.9 * times * (rows // PATCH) * (columns // PATCH) / BATCH))
    for _ in range(case.warmup - 1):
        next(batches)
    with metered(case, len(steps) * BATCH, figures):
        for _ in steps:
            last = next(batches)
    figures |= {"peak_mb": peak_mb(me), "workers_peak_mb": 0.0}
    if case.workers:
        figures["workers_peak_mb"] = sum(map(peak_mb, processes()[1:]))
    looked = [opened.look(*each) for each in ((first, 0), (last, steps[-1]))]
    figures["wind"], figures["positions"] = map(np.concatenate, zip(*looked))
    return figures


def measure_limit(case: Case) -> dict:
    """Ask for the objects of the blocks that ours begins, and decode them, in as many threads as cores."""
    codec, threads, size = Blosc(), ThreadPoolExecutor(os.cpu_count()), 4 * math.prod(case.chunk)
    together = max(1, 2 * MIB // size)  # to hand an object to a thread costs more than to decode a small one
    patches, bucket = open_book(BlockPatches, case).blocks, case.bucket(STORES, case.zarr)
    steps, figures = steps_of(patches, case), {"imports_mb": peak_mb(psutil.Process())}

    def decode(some: list[bytes]) -> None:
        if any(len(codec.decode(stored)) != size for stored in some):
            raise RuntimeError("an object is not a whole chunk")

    async def get_all(keys: Iterator[str]) -> None:
        async def get_some() -> None:
            for key in keys:
                waiting.append(await bucket.get_range_async(key, start=WHOLE.start, end=WHOLE.end))
                if len(waiting) == together:
                    if case.name == "limit":
                        decoding.append(threads.submit(decode, waiting[:]))
                    waiting.clear()

        waiting, decoding = [], []
        await asyncio.gather(*(get_some() for _ in range(case.in_flight)))
        for each in decoding:
            each.result()
        if case.name == "limit":
            decode(waiting)

    def read(steps: range) -> None:
        asyncio.run(get_all(key for block in blocks_begun(patches, steps) for key in keys_of(patches, block)))

    read(range(steps.start))
    with metered(case, len(steps) * BATCH, figures):
        read(steps)
    return figures | {"peak_mb": peak_mb(psutil.Process()), "workers_peak_mb": 0.0}


def convert(case: Case) -> dict:
    """Make the copy that a reader needs, anew."""
    target = OUTPUTS / case.copies / case.name
    shutil.rmtree(target, ignore_errors=True)
    for module in ALTERNATIVES[case.name].modules:
        import_module(module)
    began = perf_counter()
    ALTERNATIVES[case.name].convert(case, target)
    times, rows, columns = case.shape
    samples = times * (rows // PATCH) * (columns // PATCH)
    return {"seconds": perf_counter() - began, "bytes": size_of(target), "samples": samples}


class Failure(Exception):
    """A reader did not do its work: why, in one line."""


def answer(reply, case: Case, scratch: str, function: Callable[[Case], dict]) -> None:
    """In a process of its own: say what a function returns, or why it does not. What it prints goes to a file."""
    os.setpgrp()  # to be killed with all that it starts; a session of its own would get another share of the cores
    log = os.open(f"{scratch}/log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    os.environ |= ENVIRONMENT | {"AWS_ENDPOINT_URL": case.address, "S3_ENDPOINT_URL": case.address}
    try:
        reply.send(function(case))
    except Exception as error:
        lines = [f"{type(error).__name__}:", *str(error).strip().splitlines()]
        said = lines[-1:] if "Traceback" in str(error) else lines  # a worker's ends with the error itself
        reply.send(Failure(" ".join(said)[:300]))


def give_time(process: multiprocessing.Process, seconds: float = 10) -> None:
    """Wait, but not for ever, until a process and all that it has started have put away what they used."""
    process.join(seconds)
    with suppress(ProcessLookupError, PermissionError):
        for _ in range(round(10 * seconds)):
            os.killpg(process.pid, 0)
            sleep(0.1)


def fresh(case: Case, function: Callable[[Case], dict], seconds: float = 600) -> dict:
    """What a function returns in a new process, which ends with all that it has started. Failure if it fails."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    # Short names: a socket of multiprocessing lies there.
    with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as scratch:
        process = context.Process(target=answer, args=(theirs, case, scratch, function))
        process.start()
        theirs.close()
        try:
            found = Failure(f"not done after {seconds:.0f} s")
            if mine.poll(seconds):
                found = mine.recv()
                give_time(process)
        except EOFError:
            process.join(10)
            said = Path(scratch, "log").read_text(errors="replace").split("\n")
            found = Failure(f"ended with code {process.exitcode}: {' '.join(said[-3:])[:300]}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if isinstance(found, Failure):
        raise found
    return found


def check(figures: dict, truth: np.ndarray, own_bytes: float) -> None:
    """Samples must be what the store holds, and must have come from the server while they were measured.

    `truth` is (component, time, row, column); Failure otherwise: then no figure is worth anything.
    """
    read = figures["bytes_per_sample"]
    if read < OWN_BYTES * own_bytes:
        raise Failure(f"served from what it held: {read:.0f} bytes a sample were read, of {own_bytes:.0f}")
    if "blocks" in figures:
        asked, begun = figures["requests_per_sample"] * figures["samples"], figures["blocks"]
        if begun < 0.9 * SEVERAL * figures["blocks_held"] or asked < OWN_BYTES * figures["objects"]:
            few = f"{asked:.0f} of {figures['objects']} objects, {begun} blocks of {figures['blocks_held']} held"
            raise Failure(f"served from what it held: {few}")
        if asked > figures["objects"] / OWN_BYTES:
            raise Failure(f"read blocks twice: {asked:.0f} requests for {figures['objects']} objects")
    wind, positions = figures.pop("wind", ()), figures.pop("positions", ())
    for sample, (time, row, column) in zip(wind, positions, strict=True):
        across = np.arange(column, column + PATCH) % truth.shape[-1]
        expected = truth[:, time, row : row + PATCH][..., across]
        if sample.dtype != expected.dtype or not np.array_equal(sample, expected):
            raise Failure(f"a patch of time {time}, row {row}, column {column} is not what the store holds")


# --------------------------------------------------------------------------------------------- all in turn


@contextmanager
def serve(folder: Path, latency_ms: float) -> Iterator[str]:
    """Start an S3 server of a folder of buckets, and give its address; stop it in the end."""
    command = [sys.executable, EXAMPLE / "local_s3.py", "--folder", folder, "--latency-ms", latency_ms]
    command = [*map(str, command), "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not (address := process.stdout.readline().strip()):
                raise InputError("local_s3.py, which serves the stores, has failed; see above")
            yield address
        finally:
            process.kill()


def make_store(layout: str, quick: bool) -> Path:
    """Make a store, unless it is there; one that make_store.py was stopped in it finishes."""
    path, size = OUTPUTS / STORES / store_name(layout, quick), SIZES[quick]
    if not path.exists() or "identity" not in (path / "zarr.json").read_text():
        cut = ["--chunk", *LAYOUTS[layout].chunk, "--days", size.days, "--resolution", size.degrees]
        command = [sys.executable, EXAMPLE / "make_store.py", "--store", path, *cut]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"make_store.py ended with code {done.returncode}"]
            raise InputError(f"no store was made: {said[-1]}")
    return path


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def spread(rounds: list[dict], name: str) -> dict[str, float]:
    """Median, least and greatest of a figure of some rounds."""
    values = [each[name] for each in rounds]
    return {"median": median(values), "min": min(values), "max": max(values)}


def row_of(case: Case, rounds: list[dict]) -> dict:
    """What is known of an alternative, in one layout and with so many workers."""
    alternative = ALTERNATIVES[case.name]
    row = {"alternative": case.name, "layout": case.layout, "workers": case.workers, "batch_size": BATCH}
    row |= {"rounds": len(rounds), "setting": alternative.setting, "cannot": alternative.cannot}
    row["exact_resume"], row["exact_resume_because"] = alternative.resume
    row["other_world_size"], row["other_world_size_because"] = alternative.world
    for name, value in rounds[0].items() if rounds else ():
        row[name] = spread(rounds, name) if isinstance(value, float) else value
    return row


def compare(args: SimpleNamespace, names: list[str]) -> list[dict]:
    """Make the stores and the copies, measure in turn, check each measurement, and give the rows."""
    stores = {layout: make_store(layout, args.quick) for layout in dict.fromkeys([SOURCE, *args.layouts])}
    local = xr.open_zarr(stores[SOURCE], chunks=None)[NAMES]
    truth = np.stack([local[name].sel(time=YEARS).values for name in NAMES])
    # The store is compressed, so a sample's own bytes are fewer than its values take.
    of_stores = min(map(size_of, stores.values())) / (math.prod(local.sizes.values()) / PATCH**2)
    with (
        tempfile.TemporaryDirectory(prefix="run-", dir=OUTPUTS) as run,
        serve(OUTPUTS, args.latency_ms) as address,
    ):
        cases, jobs, found, failed = [], [], {}, defaultdict(list)
        for name in names:
            alternative = ALTERNATIVES[name]
            batches = max(4, args.samples // BATCH // alternative.fewer)
            common = {"batches": batches, "shape": truth.shape[1:], "quick": args.quick}
            common |= {"copies": Path(run).name, "address": address}
            places = [CONVERTED] if alternative.convert else args.layouts
            cases += [Case(name, *place, **common) for place in product(places, alternative.workers)]
        jobs += [(case, convert) for case in cases if case.layout == CONVERTED and not case.workers]
        jobs += [(case, measure if ALTERNATIVES[case.name].open else measure_limit) for case in cases]
        for case, function in (bar := tqdm(args.rounds * jobs, "compare")):
            bar.set_postfix_str(str(case))
            if len(failed[case]) > 1:
                continue
            try:
                with tempfile.TemporaryDirectory(prefix="kept-", dir=run) as kept:
                    figures = fresh(replace(case, kept=kept), function)
                if function is not convert:
                    made = found.get((replace(case, workers=0), True))  # of a copy, which may be larger
                    check(figures, truth, made[-1]["bytes"] / made[-1]["samples"] if made else of_stores)
                found.setdefault((case, function is convert), []).append(figures)
            except Failure as error:  # a peer that fails twice is left out from then on; its rows say why
                if not ALTERNATIVES[case.name].package:
                    raise Failure(f"{case}: {error}") from error
                without = [case] if function is not convert else [c for c in cases if c.name == case.name]
                for each in without:
                    failed[each] += [str(error)] * (1 if function is not convert else 2)
    rows = [row_of(case, found.get((case, False), [])) | {"latency_ms": args.latency_ms} for case in cases]
    for case, row in zip(cases, rows):
        if failed[case] and not row["rounds"]:
            row["could_not"] = failed[case][0]
            continue
        if failed[case]:
            row |= {"failures": len(failed[case]), "failed_because": failed[case][0]}
        if case.layout == CONVERTED:
            made = found[replace(case, workers=0), True]
            row |= {"conversion_seconds": spread(made, "seconds"), "copy_bytes": made[0]["bytes"]}
            row["store_bytes"] = size_of(stores[SOURCE])
    return rows


COLUMNS = {  # the head of a column: which figure, which of its rounds, scale, digits
    "samples/s": ("samples_per_second", "median", 1, 0),
    "least": ("samples_per_second", "min", 1, 0),
    "most": ("samples_per_second", "max", 1, 0),
    "first, s": ("first_batch_seconds", "median", 1, 2),
    "requests": ("requests_per_sample", "median", 1, 2),
    "kB": ("bytes_per_sample", "median", 1e-3, 0),
    "CPU, ms": ("cpu_ms_per_sample", "median", 1, 2),
    "MB": ("peak_mb", "median", 1, 0),
    "+ workers": ("workers_peak_mb", "median", 1, 0),
    "convert, s": ("conversion_seconds", "median", 1, 1),
}


def show(rows: list[dict]) -> None:
    """Print a table; the rows have more."""
    heads, yes_no = [*COLUMNS, "resume", "world"], {True: "yes", False: "no", None: ""}
    print(f"{'':16}{'chunks':11}{'workers':>8}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        figures = []
        for name, which, scale, digits in COLUMNS.values():
            figures.append(f"{row[name][which] * scale:.{digits}f}" if name in row else "")
        figures += [yes_no[row[name]] for name in ("exact_resume", "other_world_size")]
        line = "".join(f"{figure:>11}" for figure in figures)
        line = f"  could not: {row['could_not']}" if "could_not" in row else line
        print(f"{row['alternative']:16}{row['layout']:11}{row['workers']:8}{line}")


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory), "gpu": None}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write_aside(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"part-{os.getpid()}-{path.name}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(aside, path)


def parse(argv: list[str] | None) -> SimpleNamespace:
    """What was asked for; InputError if that cannot be."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help=f"of {', '.join(ALTERNATIVES)}; default: all")
    add(
        "--layouts",
        nargs="+",
        metavar="CHUNK",
        help=f"of {', '.join(LAYOUTS)}; default: the first and the last",
    )
    add("--rounds", type=int, help="rounds in which they take turns (default: 3; quick: 1)")
    add("--samples", type=int, help="measured of each, of slow ones fewer (default: 8192; quick: 128)")
    add("--latency-ms", type=float, help="milliseconds before the server answers (default: 30)")
    add("--quick", action="store_true", help="a coarse store and one round: see that it works")
    add("--save-results", action="store_true", help="write results/compare.json")
    args = parser.parse_args(argv)
    for flag, known in (("only", ALTERNATIVES), ("layouts", LAYOUTS)):
        if unknown := [name for name in getattr(args, flag) or () if name not in known]:
            raise InputError(f"--{flag} {unknown[0]}: no such name; choose from {', '.join(known)}")
    for flag, least in (("rounds", 1), ("samples", BATCH), ("latency_ms", 0)):
        value = getattr(args, flag)
        if value is not None and not value >= least:
            raise InputError(f"--{flag.replace('_', '-')} {value}: too small; give at least {least}")
    for flag in ("quick", "only", "layouts", "rounds", "samples", "latency_ms"):
        if args.save_results and getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            raise InputError(f"--save-results: {name} would change the rows; leave one of them out")
    if args.latency_ms is None:
        args.latency_ms = 30
    for flag in ("rounds", "samples", "layouts"):
        if getattr(args, flag) is None:
            setattr(args, flag, getattr(SIZES[args.quick], flag))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what was asked for and is installed; print a table, and save the rows if asked to."""
    args = parse(argv)
    names = [name for name in ALTERNATIVES if name in (args.only or ALTERNATIVES)]
    packages = [ALTERNATIVES[name].package for name in names if ALTERNATIVES[name].package]
    missing = sorted(set(packages) - versions(packages).keys())
    names = [name for name in names if ALTERNATIVES[name].package not in missing]
    if missing and args.save_results:
        raise InputError(f"--save-results: {', '.join(missing)} not installed; run {PEERS} --save-results")
    if not names:
        raise InputError(f"--only {' '.join(args.only)}: not installed; run {PEERS}")
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}; with them: {PEERS}", flush=True)
    (OUTPUTS / STORES).mkdir(parents=True, exist_ok=True)
    start_forkserver()
    rows = compare(args, names)
    show(rows)
    results = {"command": f"{PEERS} --save-results", "date": str(date.today()), "machine": machine()}
    results["versions"] = versions(["torch", "xarray", "zarr", "numcodecs", "obstore", "dask", *packages])
    write_aside(OUTPUTS / "rows.json", results | {"rows": rows})
    print(f"all figures: {os.path.relpath(OUTPUTS / 'rows.json')}")
    if args.save_results:
        write_aside(HERE / "results/compare.json", results | {"rows": rows})
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and put away what is being measured
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Failure as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped")
