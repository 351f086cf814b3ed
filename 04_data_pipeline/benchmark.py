"""Chapter 4: measure what each setting of a loader buys, alone and together.

    uv run python benchmark.py                          # every study, more than two hours on two idle cores
    uv run python benchmark.py ladder places            # some of them
    uv run python benchmark.py --quick                  # tiny sizes: that it works, not what it finds
    uv run python benchmark.py --save-results           # and write results/STUDY.json

Alternatives run in turn, so that a machine which slows down for a while slows all of them. A stopped study goes
on where it was, as long as the code is the same. Stores of 36 days at 0.25 degrees are made first, in outputs/.
A rate is that of the loader alone, without a network. `memory` is the page cache, and of `disk` the page cache
is emptied first. The S3 server takes CPU from the same cores: the last two rows of `ladder` show what it could
give. CPU is that of this process and its workers, not the server's. Workers come from a fork server that has
imported the packages already; `start` shows what that saves.
"""

import asyncio
import gc
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import NamedTuple

import dask
import numcodecs
import numpy as np
import psutil
import torch
import xarray as xr
import zarr
from dask.callbacks import Callback
from diagnose import diagnose, plan_workers, wind_step
from obstore.store import from_url
from torch.utils.data import DataLoader
from tqdm import tqdm
from zarr.abc.store import Store
from zarr.codecs import BloscCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ObjectStore

import object_store
from loader import BlockPatches, WindPatches, finish
from object_store import WHOLE, Access, InputError, Parser, SteadyStore, Winds

HERE = Path(__file__).parent
EXAMPLE, OUTPUTS = HERE.parent / "03_cloud_data", HERE / "outputs/benchmark"
SOURCES = [HERE / f"{name}.py" for name in ("benchmark", "diagnose", "loader", "object_store", "train")]
CODE = f"{zlib.crc32(b''.join(path.read_bytes() for path in SOURCES)):08x}"  # whose figures may be kept
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
YEARS, FAR = slice("1982", "1990"), "30 ms"  # to the first byte
BATCH, LITTLE = 32, 8  # samples in a batch: for rates, and beside a training step
SAMPLES = {"naive": 16, "patches": 384, "dask": 64, "blocks": 2048}  # to measure, at least
IN_FLIGHT = 256  # bare GETs at once: with fewer, the latency would limit them and not the server
# S3 Standard, us-east-1, as of 2025. Check it before you rely on it: https://aws.amazon.com/s3/pricing
USD_PER_1000_GETS = 0.0004
ENVIRONMENT = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true"}
ZARRS_OWN = {
    "codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "codec_pipeline.batch_size": 1,
    "async.concurrency": 10,
}
PIPELINES = {"Zarr's own": ZARRS_OWN}
PIPELINES["zarrs"] = ZARRS_OWN | {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
PIPELINES["one turn"] = dict(object_store.DECODING)
PIPELINES["one turn, ten requests"] = PIPELINES["one turn"] | {"async.concurrency": 10}  # of a read at a time
HEAVY = "torch.utils.data xarray zarr.storage obstore.store obstore.auth.boto3 dask.array tqdm psutil"
# Of Zarr 3; of more workers than cores; of zarrs, where it leaves the work to Zarr.
warnings.filterwarnings("ignore", message="(Consolidated metadata|Numcodecs|This DataLoader|Array is unsup)")


class Cut(NamedTuple):
    """How a store is cut and compressed, and how many of its blocks are mixed."""

    chunk: tuple[int, int, int]
    lanes: int = 32
    shard_days: int = 0
    codec: object = "zstd"


PLAIN = "128 x 128"
CUTS = {
    PLAIN: Cut((1, 128, 128)),
    "256 x 256": Cut((1, 256, 256)),
    "map": Cut((1, 721, 1440), lanes=8),
    "128 x 128 in shards of a map": Cut((1, 128, 128), shard_days=1),
    "128 x 128, lz4": Cut((1, 128, 128), codec=BloscCodec(cname="lz4", clevel=3, shuffle="bitshuffle")),
    "128 x 128, not compressed": Cut((1, 128, 128), codec=None),
}


# ---------------------------------------------------------------------------------- what every study needs


@dataclass(frozen=True)
class Reading:
    """A way to read: the kind of loader, the place, and all that can be set."""

    kind: str = "blocks"  # or patches: chapter 3's; or naive: isel().load() in __getitem__; or dask
    place: str = FAR  # or another latency, also with a bandwidth; memory; disk
    cut: str = PLAIN
    at_once: bool = True  # a batch (__getitems__), not a sample after another
    num_workers: int = 0
    prefetch_factor: int | None = None
    start_method: str = "forkserver"
    persistent_workers: bool = False
    pin_memory: bool = False
    batch_size: int = BATCH
    shuffle_blocks: int = 32  # times the workers, if they are to share the blocks and not read all
    patches_per_map: float = 256  # each cell of a map of 0.25 degrees is used about once
    max_requests: int = 64
    pipeline: str | None = None  # of PIPELINES, that decodes; None: Zarr's own for all but blocks
    one_answer: bool = True  # of blocks: an object comes at once, not its head and then its body
    frozen: bool = True  # the garbage collector spares what was imported, as blocks ask it to
    finished: bool = True  # made ready for the network, which of blocks the device does
    scheduler: str = ""  # Dask's: synchronous, threads, or the address of a cluster
    threads: int = 1  # of Dask's

    @property
    def decoding(self) -> str:
        return self.pipeline or ("one turn" if self.kind == "blocks" else "Zarr's own")


@contextmanager
def serve(folder: Path, latency_ms: float = 30, bandwidth_mb: float = 1000) -> Iterator[str]:
    """Start an S3 server of a folder of buckets, whose address this gives; stop it in the end."""
    command = [sys.executable, EXAMPLE / "local_s3.py", "--folder", folder, "--latency-ms", latency_ms]
    command = [*map(str, [*command, "--bandwidth-mb", bandwidth_mb]), "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not (address := process.stdout.readline().strip()):
                raise InputError("local_s3.py, which serves the stores, has failed; see above")
            yield address
        finally:
            process.kill()


@dataclass
class Bench:
    """The sizes of a study's run, its stores and their servers, and the cases that it compares."""

    name: str
    quick: bool
    rounds: int
    stack: ExitStack
    servers: dict[str, str] = field(default_factory=dict)  # addresses
    cases: list[tuple[dict, Callable]] = field(default_factory=list)

    @property
    def patch(self) -> int:
        return 16 if self.quick else 64

    @property
    def buckets(self) -> Path:
        return OUTPUTS / ("quick" if self.quick else "whole")

    def __getstate__(self) -> dict:  # as a fresh process gets it
        return self.__dict__ | {"stack": None, "cases": []}

    def store(self, name: str) -> Path:
        """A store of real days, made if it is not there: the same values in each, otherwise cut."""
        cut, path = CUTS[name], self.buckets / f"bench/{name.replace(' ', '').replace(',', '_')}.zarr"
        if path.exists() and "identity" in (path / "zarr.json").read_text():
            return path
        if cut.codec != "zstd":
            return recode(self.store(PLAIN), path, cut.codec)
        chunk = [max(1, size // 4) if self.quick else size for size in cut.chunk]
        size = ["--days", 12, "--resolution", 1.5] if self.quick else ["--days", 36, "--resolution", 0.25]
        make = [sys.executable, EXAMPLE / "make_store.py", *size, "--store", path, "--chunk", *chunk]
        command = [*map(str, make), "--shard-days", str(cut.shard_days)]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"make_store.py, which makes {path.name}, has failed; see above")
        return path

    def at(self, reading: Reading) -> tuple[str, dict[str, str]]:
        """The URL or path of a store, and the environment of a process that reads it."""
        path, place = self.store(reading.cut), reading.place
        if place in ("memory", "disk"):
            return str(path), ENVIRONMENT
        if place not in self.servers:
            limits = (float(limit.split()[0]) for limit in place.split(", "))
            self.servers[place] = self.stack.enter_context(serve(self.buckets, *limits))
        return f"s3://bench/{path.name}", ENVIRONMENT | {"AWS_ENDPOINT_URL": self.servers[place]}

    def add(self, labels: dict, measure: Callable[..., dict], *arguments: object) -> None:
        """Compare one more case: what measure(bench, *arguments) finds."""
        self.cases.append((labels, partial(measure, self, *arguments)))

    def table(self) -> list[dict]:
        """Measure the cases in turn, round after round: rows of their labels and the spreads of their figures.

        What a stopped run of the same code has measured is not measured again.
        """
        path, kept, found = kept_in(self.name, self.quick), {}, [[] for _ in self.cases]
        for line in path.read_text().splitlines() if path.exists() else []:
            *key, figures = json.loads(line)
            kept[tuple(key)] = figures
        order = list(product(range(self.rounds), zip(found, self.cases)))
        with open(path, "a") as file:
            for number, (rounds, (labels, measure)) in tqdm(order, self.name):
                key = CODE, number, json.dumps(labels)
                if key not in kept:
                    kept[key] = measure()
                    print(json.dumps([*key, kept[key]]), file=file, flush=True)
                rounds.append(kept[key])
        return [labels | spread(rounds) for (labels, _), rounds in zip(self.cases, found)]


def kept_in(name: str, quick: bool) -> Path:
    return OUTPUTS / f"{name}{'-quick' * quick}.jsonl"


def spread(rounds: list[dict]) -> dict:
    """Median, least and greatest of each figure; of what is no number, the last."""
    found = {}
    for name, last in rounds[-1].items():
        values = [each[name] for each in rounds]
        found[name] = last
        if isinstance(last, int | float):
            found[name] = {"median": median(values), "min": min(values), "max": max(values)}
    return found


def fresh(bench: Bench, function: Callable, *arguments: object) -> dict:
    """What a function finds in a new process, whose threads and workers are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, bench, *arguments).result()


def recode(source: Path, path: Path, codec: BloscCodec | None) -> Path:
    """Write a store's values once more, otherwise compressed."""
    aside = path.with_name(f"part-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with xr.open_zarr(source, chunks=None) as winds:
        encoding = {"chunks": winds[NAMES[0]].encoding["chunks"], "compressors": codec and [codec]}
        encoding = dict.fromkeys(NAMES, encoding | {"fill_value": np.float32(np.nan)})
        winds.load().drop_encoding().to_zarr(aside, encoding=encoding, zarr_format=3, consolidated=True)
    os.replace(aside, path)
    return path


def page_cache(folder: Path, keep: bool) -> None:
    """Have a folder's files in the page cache, or not, where the system lets that be said."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            if keep:
                file.read()
            elif hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------ ways to read


class Naive(WindPatches):
    """What most guides stop at: with xarray, a variable after the other, a sample after the other."""

    __getitems__ = None  # a DataLoader then asks for one after another

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        self.winds.open()
        time, row, column, _ = drawn = self.sample(*index)
        north = self.winds.rows[row + np.arange(self.size)]  # make_store.py's rows run from north to south
        rows, parts = slice(north.min(), north.max() + 1), []
        for first, last in ((column, column + self.size), (0, column + self.size - len(self.longitude))):
            columns = slice(first, min(last, len(self.longitude)))  # the second is empty but at the seam
            if columns.stop > columns.start:
                patch = self.winds.dataset.isel(time=time, latitude=rows, longitude=columns).load()
                parts.append(np.stack([patch[name].values for name in NAMES])[:, ::-1])
        return self.finish(index, drawn, (np.concatenate(parts, axis=-1) - self.mean) / self.std)


class OneByOne(WindPatches):
    """Chapter 3's patches without its reading of a batch at once."""

    __getitems__ = None

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return WindPatches.__getitems__(self, [index])[0]


class DaskPatches(WindPatches):
    """A batch as Dask graphs, all computed at once by one of Dask's schedulers."""

    reading, url, client = None, "", None  # the first two are set by open_patches

    def open(self) -> None:
        """Open the store and find the scheduler in the process that reads: neither survives a pickle."""
        if "lazy" in vars(self):
            return
        self.lazy = xr.open_zarr(bare_store(self.url), chunks={})[NAMES].sel(time=YEARS)
        self.options = {"scheduler": self.reading.scheduler, "num_workers": self.reading.threads}
        if "://" in self.reading.scheduler:
            from distributed import Client

            self.client = Client(self.reading.scheduler)
            self.options = {"scheduler": self.client}

    def __getitems__(self, indices: list[tuple[int, int]]) -> list[dict]:
        self.open()
        drawn, arrays, pool = [], [], set()
        for index in indices:
            time, row, column, mask = self.sample(*index)
            column = min(column, len(self.longitude) - self.size)  # so that no patch lies across the seam
            drawn.append((time, row, column, mask))
            north = self.winds.rows[row + np.arange(self.size)]
            rows, columns = slice(north.min(), north.max() + 1), slice(column, column + self.size)
            patch = self.lazy.isel(time=time, latitude=rows, longitude=columns)
            arrays += [patch[name].data for name in NAMES]
        with Callback(posttask=lambda key, result, graph, state, thread: pool.add(thread)):
            winds = np.stack(dask.compute(*arrays, **self.options))[:, ::-1]
        winds = (winds.reshape(len(drawn), 2, self.size, self.size) - self.mean) / self.std
        used = {"task_threads": np.int64(len(pool) or self.reading.threads)}  # a cluster calls nobody back
        return [self.finish(*each) | used for each in zip(indices, drawn, winds)]


KINDS = {"naive": Naive, "patches": WindPatches, "dask": DaskPatches}


def bare_store(url: str) -> Store:
    """A store in S3, or on this disk, as Zarr opens it, without anything of this book's."""
    if "://" not in url:
        return LocalStore(url, read_only=True)
    place = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "client_options": {"allow_http": True}}
    return ObjectStore(from_url(url, skip_signature=True, **place), read_only=True)


def open_patches(reading: Reading, url: str | Path, patch: int, **cache: object) -> WindPatches:
    """The Dataset of a way to read; `cache` are arguments of Access."""
    threads = max(1, os.cpu_count() // max(1, reading.num_workers))
    access = Access(str(url), anonymous=True, max_requests=reading.max_requests, threads=threads, **cache)
    scale = np.zeros((2, 1, 1), "float32"), np.full((2, 1, 1), 5, "float32")
    arguments = (Winds(access, NAMES, YEARS), *scale, patch, reading.batch_size, 0)
    if reading.kind == "blocks":
        return BlockPatches(*arguments, reading.shuffle_blocks, reading.patches_per_map)
    patches = (KINDS[reading.kind] if reading.at_once else OneByOne)(*arguments)
    patches.reading, patches.url = reading, str(url)
    return patches


class Steps:
    """The batches of a run without an end, as lists of (step, k)."""

    def __init__(self, size: int):
        self.size = size

    def __iter__(self) -> Iterator[list]:
        step = 0
        while True:
            yield [(step, k) for k in range(self.size)]
            step += 1


def enter(environment: dict[str, str], decoding: dict, whole: object = WHOLE, worker: int = 0) -> None:
    """Let this process or a worker, which a fork server may have started long after itself, read that way."""
    os.environ |= environment
    object_store.DECODING |= decoding
    object_store.WHOLE = whole


@contextmanager
def loading(bench: Bench, reading: Reading, steps: int | None = None) -> Iterator[tuple]:
    """Open (the Dataset, its DataLoader), which has no end unless it is to have so many steps; close both."""
    url, environment = bench.at(reading)
    before, in_one = dict(object_store.DECODING), reading.one_answer and reading.kind == "blocks"
    entering = partial(enter, environment, PIPELINES[reading.decoding], WHOLE if in_one else None)
    entering()
    if bench.quick:
        reading = replace(reading, shuffle_blocks=min(8, reading.shuffle_blocks))
    patches = open_patches(reading, url, bench.patch)
    options = {"num_workers": reading.num_workers, "pin_memory": reading.pin_memory}
    if reading.num_workers:
        options |= {name: getattr(reading, name) for name in ("prefetch_factor", "persistent_workers")}
        options |= {"multiprocessing_context": reading.start_method}
        options |= {"worker_init_fn": entering}
    sampler = Steps(reading.batch_size) if steps is None else list(islice(Steps(reading.batch_size), steps))
    try:
        yield patches, DataLoader(patches, batch_sampler=sampler, collate_fn=patches.collate, **options)
    finally:
        enter(environment, before)
        if reading.kind == "blocks":
            patches.close()
        if client := getattr(patches, "client", None):
            client.close()


# ------------------------------------------------------------------------------------- how it is measured


def processes_of(stream: Iterator) -> list[psutil.Process]:
    """The worker processes of a DataLoader's iterator; torch has no other name for them."""
    return [psutil.Process(worker.pid) for worker in getattr(stream, "_workers", [])]


def cpu_seconds(groups: dict[str, list[psutil.Process]]) -> float:
    return sum(sum(each.cpu_times()[:2]) for group in groups.values() for each in group)


def rate(bench: Bench, reading: Reading, dask_pids: Iterable[int] = ()) -> dict:
    """Samples/s of the loader alone, and what a sample costs.

    Whole periods are measured, after two: blocks that were read before the clock began are balanced by those that
    are read for later. Two by two: lanes that go in step read two blocks each side by side, which come together, so
    only every second one is waited for. What the loader leaves to the device is done here, by one thread: of
    operations this small, several take longer.
    """
    url, _ = bench.at(reading)  # before the clock: it may make the store, and start the server
    if reading.place == "disk":
        page_cache(Path(url), keep=False)
    size, workers, began, logs = reading.batch_size, max(1, reading.num_workers), perf_counter(), []
    threads_of_torch = torch.get_num_threads()
    torch.set_num_threads(1)
    with loading(bench, reading) as (patches, loader):
        period, wanted = getattr(patches, "period", 1), 1 if bench.quick else SAMPLES[reading.kind]
        skipped = math.ceil(2 * period / size / workers) * workers + workers
        measured = 2 * max(2, math.ceil(wanted / period / 2)) * period / size
        measured = math.ceil(measured / workers) * workers  # they come in waves
        scale = [torch.from_numpy(array) for array in (patches.mean, patches.std)]
        stream = iter(loader)
        for number in range(skipped + measured):
            batch = next(stream)
            if "wind" in batch and reading.finished:
                finish(batch, *scale)
            if number == 0:
                first = perf_counter() - began
                if not reading.frozen:
                    gc.unfreeze()
            if number == skipped - 1:
                groups = {"this": [psutil.Process()], "workers": processes_of(stream)}
                groups["dask"] = [psutil.Process(pid) for pid in dask_pids]
                start, cpu = perf_counter(), cpu_seconds(groups)
            elif number >= skipped:
                logs.append(batch["requests"].numpy())
        seconds, cpu = perf_counter() - start, cpu_seconds(groups) - cpu
        threads = {name: sum(each.num_threads() for each in group) for name, group in groups.items()}
        del stream  # its workers end
    torch.set_num_threads(threads_of_torch)
    if reading.place == "disk":
        page_cache(Path(url), keep=True)
    figures = {"samples_per_second": measured * size / seconds, "first_batch_seconds": first}
    figures |= {"cpu_ms_per_sample": 1e3 * cpu / (measured * size), "threads": threads}
    if "task_threads" in batch:
        return figures | {"task_threads": int(batch["task_threads"].max())}
    if reading.kind == "blocks":
        figures |= {"blocks_mb": patches.memory_bytes / 1e6}
    log = np.concatenate(logs)
    figures |= {"request_ms": 1e3 * float(np.median(log[:, 0]))} if len(log) else {}
    return figures | asked_for(bench, log[:, 1], measured * size)


def asked_for(bench: Bench, sizes: Iterable[float], samples: int) -> dict:
    figures = {"requests_per_sample": len(sizes) / samples, "bytes_per_sample": float(sum(sizes)) / samples}
    used = len(NAMES) * bench.patch**2 * 4
    return figures | {"bytes_per_byte_used": figures["bytes_per_sample"] / used}


class Sleeping:
    """A step that keeps no core busy, as of a GPU; uneven: of ten, nine take 0.4 times as long and one 6.4."""

    def __init__(self, seconds: float, uneven: bool = False):
        self.lengths = cycle([0.4 * seconds] * 9 + [6.4 * seconds] if uneven else [seconds])

    def __call__(self, batch: dict) -> None:
        sleep(next(self.lengths))


class Computing:
    """A step that keeps all cores busy: as many products of matrices as take so long on an idle machine."""

    def __init__(self, seconds: float):
        self.matrix, self.products = torch.randn(256, 256), 1
        for _ in range(3):  # the first ones start torch's threads, and find the cores at rest
            count, began = 0, perf_counter()
            while (took := perf_counter() - began) < 10 * seconds:
                self(None)
                count += self.products
            self.products = max(1, round(count * seconds / took))

    def __call__(self, batch: dict | None) -> None:
        for _ in range(self.products):
            self.matrix @ self.matrix


class Prefetcher:
    """Batches of a loader without an end; a thread of this process keeps some ready, as a worker does in its own."""

    def __init__(self, loader: Iterable, ready: int = 2):
        self.loader, self.ready = loader, ready

    def __iter__(self) -> Iterator[dict]:
        batches = iter(self.loader)
        with ThreadPoolExecutor(1) as thread:
            ready = deque(thread.submit(next, batches) for _ in range(self.ready))
            while True:
                batch = ready.popleft().result()
                ready.append(thread.submit(next, batches))
                yield batch


def beside(bench: Bench, reading: Reading, step: Callable, steps: int, thread: bool = False) -> np.ndarray:
    """Train so many steps: (3, steps), seconds waited before each, seconds of its work, MB of memory then."""
    with loading(bench, reading) as (patches, loader):
        stream, log = iter(Prefetcher(loader) if thread else loader), []
        stock = max(1, reading.num_workers) * (reading.prefetch_factor or 2)
        skipped = max(stock, math.ceil(getattr(patches, "period", 1) / reading.batch_size))
        for number in range(skipped + steps):
            asked = perf_counter()
            batch = next(stream)
            given = perf_counter()
            step(batch)
            ended = perf_counter()
            if number == 0:
                processes = [psutil.Process(), *processes_of(stream)]
            memory = sum(process.memory_info().rss for process in processes) / 1e6
            log.append((given - asked, ended - given, memory))
        del stream
    return np.array(log[skipped:]).T


def shares(waits: np.ndarray, works: np.ndarray) -> dict[str, float]:
    seconds = (waits + works).sum()
    figures = {"steps_per_second": len(waits) / seconds, "wait_share": waits.sum() / seconds}
    figures |= {"wait_ms": 1e3 * waits.mean(), "step_ms": 1e3 * np.median(works)}
    return {name: float(value) for name, value in figures.items()}


def pace(bench: Bench, reading: Reading, steps: int, thread: bool, kind: type, *arguments: object) -> dict:
    """What steps of some kind wait for a loader."""
    return shares(*beside(bench, reading, kind(*arguments), steps, thread)[:2])


def keys_of(patches: WindPatches, times: Iterable, rows: np.ndarray, columns: np.ndarray) -> list[str]:
    """The objects that hold a box of cells: one for each variable and chunk."""
    of_cells = zip(patches.winds.chunk_numbers(), (times, rows, columns))
    numbers = [np.unique(chunks[cells]) for chunks, cells in of_cells]
    return [f"{name}/c/{time}/{row}/{column}" for name, time, row, column in product(NAMES, *numbers)]


def keys_of_block(patches: BlockPatches, block: int) -> list[str]:
    times, rows, columns = patches.corners(block)
    rows, columns = (np.arange(first, last + patches.size - 1) for first, last in (rows, columns))
    return keys_of(patches, np.arange(*times), rows, columns % len(patches.longitude))


def limit(bench: Bench, reading: Reading, decode: bool) -> dict:
    """What the store can give: the objects that blocks ask for, by bare GETs, many at once, and decoded.

    A first period is left out, as of a loader two are, and whole ones are measured, at least eight.
    """
    url, environment = bench.at(reading)
    os.environ |= environment
    patches = open_patches(reading, url, bench.patch)
    rounds = 2 if bench.quick else max(8, math.ceil(SAMPLES["blocks"] / getattr(patches, "period", 1)))
    order = product(range(1 + rounds), range(patches.lanes))  # as they are read
    blocks = [patches.visit(lane, number).block for number, lane in order]
    first, measured = blocks[: patches.lanes], blocks[patches.lanes :]
    store, sizes = bare_store(url).store, []
    # To hand an object to a thread costs more than to decode a small one: about 2 MiB are handed over together.
    together = max(
        1, 2**19 // math.prod(min(*sides) for sides in zip(CUTS[reading.cut].chunk, (1, 721, 1440)))
    )

    def decompress(some: list[bytes]) -> None:
        for each in some:
            numcodecs.blosc.decompress(each)

    async def get_all(keys: list[str], pool: ThreadPoolExecutor) -> None:
        free, waiting, decoded = iter(keys), [], []

        async def get_some() -> None:
            for key in free:
                waiting.append(await store.get_range_async(key, start=WHOLE.start, end=WHOLE.end))
                sizes.append(len(waiting[-1]))
                if len(waiting) == together:
                    if decode:
                        decoded.append(pool.submit(decompress, waiting[:]))
                    waiting.clear()

        await asyncio.gather(*(get_some() for _ in range(IN_FLIGHT)))
        for each in decoded:
            each.result()
        if decode:
            decompress(waiting)

    numcodecs.blosc.use_threads = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sync(get_all([key for block in first for key in keys_of_block(patches, block)], pool))
        keys = [key for block in measured for key in keys_of_block(patches, block)]
        sizes.clear()
        began, cpu = perf_counter(), process_time()
        sync(get_all(keys, pool))
        seconds, cpu = perf_counter() - began, process_time() - cpu
    samples = int(patches.patches[measured].sum())
    figures = {"samples_per_second": samples / seconds, "cpu_ms_per_sample": 1e3 * cpu / samples}
    return figures | asked_for(bench, sizes, samples)


# -------------------------------------------------------------------------------------------------- studies


def ladder(bench: Bench) -> list[dict]:
    """From naive to final, one change at a time, and what the store can give."""
    naive, patches, blocks = Reading("naive", batch_size=LITTLE), Reading("patches"), Reading()
    fast = replace(blocks, max_requests=256)
    loose = replace(blocks, frozen=False)
    steps = {
        "naive: isel().load(), a sample after another": naive,
        "naive, two workers": replace(naive, num_workers=2),
        "both variables of a sample at once": replace(patches, at_once=False),
        "the samples of a batch at once: chapter 3's": patches,
        "chapter 3's, two workers": replace(patches, num_workers=2),
        "blocks, many patches from each": replace(loose, pipeline="Zarr's own", one_answer=False),
        "blocks, chunks of a read decoded together": replace(
            loose, pipeline="one turn, ten requests", one_answer=False
        ),
        "blocks, chunks of a read asked for together": replace(loose, one_answer=False),
        "blocks, an object in one answer": loose,
        "blocks, imports spared by the garbage collector": blocks,
        "blocks, 256 requests in flight": fast,
        "the same in a worker": replace(fast, num_workers=1),
        "the same in two workers, each with half the requests and all the lanes": replace(
            fast, num_workers=2, max_requests=128, shuffle_blocks=64
        ),
        "the same in this process, not yet made ready": replace(fast, finished=False),
    }
    for title, reading in steps.items():
        labels = of(reading, "kind num_workers at_once decoding max_requests finished")
        bench.add({"step": title} | labels, rate, reading)
    bench.add({"step": "bare GETs of what blocks ask for, decoded", "kind": "limit"}, limit, blocks, True)
    bench.add({"step": "bare GETs of what blocks ask for", "kind": "gets"}, limit, blocks, False)
    return bench.table()


def of(reading: Reading, names: str) -> dict:
    """Some fields of a way to read, to label its row."""
    return {name: getattr(reading, name) for name in names.split()}


def places(bench: Bench) -> list[dict]:
    """Three loaders from memory, disk and S3 at four latencies, by worker processes."""
    where = ("memory", FAR) if bench.quick else ("memory", "disk", "0 ms", "10 ms", FAR, "100 ms")
    counts = (0, 1) if bench.quick else (0, 1, 2, 4)
    for kind, place, count in product(("naive", "patches", "blocks"), where, counts):
        size = LITTLE if kind == "naive" else BATCH  # a rate of single samples does not depend on it
        lanes = 32 * max(1, count)
        reading = Reading(kind, place, num_workers=count, batch_size=size, shuffle_blocks=lanes)
        bench.add(of(reading, "kind place num_workers shuffle_blocks"), rate, reading)
    return bench.table()


def optimum(bench: Bench) -> list[dict]:
    """The best number of workers, predicted and found, for chapter 3's loader beside a step that sleeps."""
    counts, steps = (range(2), 4) if bench.quick else (range(6), 24)
    loads = [(FAR, 40)] if bench.quick else [(FAR, 40), (FAR, 100), ("100 ms", 60), ("100 ms", 150)]
    for place, sleep_ms in loads:
        base, labels = Reading("patches", place, batch_size=LITTLE), {"place": place, "sleep_ms": sleep_ms}
        bench.add(labels | {"workers": "loader alone"}, rate, replace(base, num_workers=1))
        for count in counts:
            reading = replace(base, num_workers=count)
            bench.add(labels | {"workers": count}, pace, reading, steps, False, Sleeping, sleep_ms / 1e3)
    rows, found = bench.table(), []
    for place, sleep_ms in loads:
        alone, *tried = [row for row in rows if (row["place"], row["sleep_ms"]) == (place, sleep_ms)]
        load = LITTLE / alone["samples_per_second"]["median"]
        plan = plan_workers(load, sleep_ms / 1e3, cores=os.cpu_count())
        paces = {row["workers"]: row["steps_per_second"]["median"] for row in tried}
        best = min(count for count in counts if paces[count] >= max(paces.values()) / 1.05)
        labels = {"place": place, "sleep_ms": sleep_ms, "load_ms": 1e3 * load, "needed": plan.needed}
        found.append(labels | {"predicted": plan.workers, "binds": plan.binds, "best": best})
    return rows + found


def demand(bench: Bench) -> list[dict]:
    """Who sets the pace, and what waits: loaders beside steps that would use so many samples a second."""
    wanted = (500,) if bench.quick else (100, 250, 500, 1000, 2000)
    blocks = Reading()
    loaders = [replace(blocks, kind="patches"), blocks, replace(blocks, num_workers=1)]
    for reading, samples in product(loaders, wanted):
        labels = of(reading, "kind num_workers") | {"wanted": samples}
        steps, seconds = 2 if bench.quick else 40, reading.batch_size / samples
        bench.add(labels, pace, reading, steps, False, Sleeping, seconds)
    return bench.table()


def settings(bench: Bench) -> list[dict]:
    """One setting at a time, of chapter 3's loader and of blocks."""
    patches, blocks, quick = Reading("patches"), Reading(), bench.quick
    sizes = (1, 8) if quick else (1, 4, 16, 64)
    varied = [(base, "batch_size", sizes) for base in (patches, replace(patches, at_once=False), blocks)]
    for base, place in product((patches, blocks), (FAR,) if quick else ("0 ms", FAR, "100 ms")):
        # With fewer lanes a period is shorter: a few requests at a time take long for one.
        few = replace(base, place=place, shuffle_blocks=16)
        varied.append((few, "max_requests", (8, 64) if quick else (8, 64, 256)))
    varied.append((blocks, "shuffle_blocks", (1, 8) if quick else (1, 8, 32, 128, 512)))
    varied.append((blocks, "patches_per_map", (64, 256) if quick else (72, 256, 1024)))
    for base, setting, values in varied:
        for value in values:
            labels = of(base, "kind place at_once") | {"setting": setting, "value": value}
            bench.add(labels, rate, replace(base, **{setting: value}))
    return bench.table()


def prefetch(bench: Bench) -> list[dict]:
    """How many batches each worker keeps ready: what that buys beside steps that are alike, and uneven ones."""
    values, steps, seconds = ((1, 2), 4, 0.01) if bench.quick else ((1, 2, 4, 8), 40, 0.06)
    patches = Reading("patches", num_workers=2, batch_size=LITTLE)
    blocks = Reading(num_workers=1, batch_size=LITTLE)
    for base, value, uneven in product((patches, blocks), values, (False, True)):
        reading = replace(base, prefetch_factor=value)
        labels = of(reading, "kind num_workers prefetch_factor") | {"steps": "uneven" if uneven else "alike"}
        bench.add(labels, pace, reading, steps, False, Sleeping, seconds, uneven)
    return bench.table()


def start(bench: Bench) -> list[dict]:
    """Seconds to the first batch of three epochs, by how workers start, each in a new process."""
    ways = [("fork", False), ("spawn", False), ("forkserver", False), ("forkserver", True)]
    cases = [(2, *way, False) for way in ways] + [(2, "forkserver", False, True), (0, "", False, False)]
    for count, method, stay, imported in cases[3:5] if bench.quick else cases:
        more = {"start_method": method, "persistent_workers": stay, "batch_size": LITTLE}
        reading = Reading("patches", num_workers=count, **more)
        labels = of(reading, "num_workers start_method persistent_workers") | {"imported": imported}
        bench.at(reading)
        bench.add(labels, fresh, first_batches, reading, imported)
    return bench.table()


def first_batches(bench: Bench, reading: Reading, imported: bool) -> dict:
    """Seconds to the first batch of three epochs; `imported`: with a fork server that imports for its workers."""
    if imported:
        multiprocessing.set_forkserver_preload(HEAVY.split())
    with loading(bench, reading, steps=4) as (_, loader):
        found = {}
        for epoch in range(3):
            began = perf_counter()
            for number, _ in enumerate(loader):
                if number == 0:
                    found[f"epoch_{epoch}_seconds"] = perf_counter() - began
    return found


def overlap(bench: Bench) -> list[dict]:
    """Reading ahead in this process, by a thread or an event loop, against worker processes."""
    blocks = Reading(batch_size=LITTLE)
    ways = [("blocks", 0, False), ("blocks", 1, False), ("blocks", 2, False)]
    ways += [("patches", 0, False), ("patches", 2, False), ("patches", 0, True)]
    seconds, steps = (0.002, 4) if bench.quick else (0.05, 40)
    for (kind, count, thread), step in product(ways, (Sleeping, Computing)):
        labels = {"kind": kind, "num_workers": count, "thread": thread, "step": step.__name__.lower()}
        bench.add(labels, pace, replace(blocks, kind=kind, num_workers=count), steps, thread, step, seconds)
    return bench.table()


def cut(bench: Bench) -> list[dict]:
    """How a store is cut and compressed, for blocks; of whole objects, beside what the store can give."""
    for name, each in CUTS.items():
        reading = Reading(cut=name, shuffle_blocks=each.lanes, max_requests=256, finished=False)
        labels = of(reading, "cut shuffle_blocks")
        bench.add(labels | {"kind": "blocks"}, rate, reading)
        if each == Cut(each.chunk, each.lanes):  # compressed as usual, and without shards
            bench.add(labels | {"kind": "limit"}, limit, reading, True)
    return bench.table()


def bandwidth(bench: Bench) -> list[dict]:
    """What compression is worth where bytes are dear: all connections together get 20 MB/s."""
    for name in (PLAIN, "map", "128 x 128, lz4", "128 x 128, not compressed"):
        lanes = CUTS[name].lanes
        reading = Reading(
            place=f"{FAR}, 20 MB/s", cut=name, shuffle_blocks=lanes, max_requests=256, finished=False
        )
        bench.add(of(reading, "cut place shuffle_blocks"), rate, reading)
    return bench.table()


def with_dask(bench: Bench) -> list[dict]:
    """Dask's three ways to work, in this process and in DataLoader workers, with all threads counted."""
    modes = [("threads", 4), ("distributed", 1), ("synchronous", 1), ("threads", 1), ("threads", 64)]
    modes.append(("distributed", 2))
    ways = list(product(modes, (0, 2)))
    for (mode, n), count in ways[:3] if bench.quick else ways:
        reading = Reading("dask", num_workers=count, batch_size=LITTLE, scheduler=mode, threads=n)
        bench.at(reading)
        bench.add({"mode": mode, "n": n, "num_workers": count}, fresh, rate_of_dask, reading)
    for count in (0,) if bench.quick else (0, 2):
        reading = Reading("patches", num_workers=count, batch_size=LITTLE)
        bench.add({"mode": "no Dask", "n": 0, "num_workers": count}, fresh, rate, reading)
    return bench.table()


def rate_of_dask(bench: Bench, reading: Reading) -> dict:
    if reading.scheduler != "distributed":
        return rate(bench, reading)
    from distributed import LocalCluster

    quiet = {"dashboard_address": None, "silence_logs": 50}
    with LocalCluster(reading.threads, threads_per_worker=1, **quiet) as cluster:
        pids = [nanny.pid for nanny in cluster.workers.values()]
        return rate(bench, replace(reading, scheduler=cluster.scheduler_address), pids)


def pools(bench: Bench) -> list[dict]:
    """Dask's threads x worker processes where nothing is waited for: what is read lies in memory."""
    for n, count in product((1, 64) if bench.quick else (1, 2, 16, 64), (0, 2)):
        way = {"scheduler": "threads", "threads": n}
        reading = Reading("dask", "memory", num_workers=count, batch_size=LITTLE, **way)
        bench.at(reading)
        bench.add({"n": n, "num_workers": count}, fresh, rate, reading)
    return bench.table()


def cpu(bench: Bench) -> list[dict]:
    """What a sample costs the CPU, part by part, from bytes to a batch: microseconds of all threads."""
    path, index = bench.store(PLAIN), [(0, k) for k in range(BATCH)]
    enter({}, PIPELINES["Zarr's own"])  # as chapter 3 reads
    plain = open_patches(Reading("patches"), path, bench.patch)
    plain.winds.open()
    enter({}, PIPELINES["one turn"])
    blocks = open_patches(Reading(), path, bench.patch)
    samples, drawn = plain.__getitems__(index), [plain.sample(*each) for each in index]
    made = list(zip(index, drawn, [sample["target"] for sample in samples]))
    held = {name: torch.from_numpy(array) for name, array in blocks.__getitems__(index).items()}
    scale = [torch.from_numpy(array) for array in (plain.mean, plain.std)]
    data = [file.read_bytes() for file in islice((path / NAMES[0]).glob("c/*/*/*"), 256)]
    numcodecs.blosc.use_threads = False

    def add(part: str, count: int, work: Callable) -> None:
        bench.add({"part": part}, cost, count, work)

    add(
        "a chunk: decoded by numcodecs",
        len(data),
        lambda: [numcodecs.blosc.decompress(each) for each in data],
    )
    for pipeline, settings in PIPELINES.items():
        if pipeline != "zarrs" or find_spec("zarrs"):
            with zarr.config.set(settings):
                array = zarr.open_group(path, mode="r")[NAMES[0]]
            chunks = 8 * math.prod(array.cdata_shape[1:])
            add(f"a chunk: read from files, {pipeline}", chunks, lambda array=array: array[:8])
    lazy = xr.open_zarr(path, chunks=None)[NAMES[0]]
    add("a chunk: read from files, one turn, xarray", chunks, lambda: lazy[:8].values)
    for library, read in small_reads().items():
        add(f"64 x 64 cells of a chunk in memory: {library}", 1, read)
    add("chapter 3, a sample: drawn", BATCH, lambda: [plain.sample(*each) for each in index])
    add("chapter 3, a sample: read from files", BATCH, lambda: plain.winds.read(boxes_of(plain, drawn)))
    add("chapter 3, a sample: made", BATCH, lambda: [plain.finish(*each) for each in made])
    add("chapter 3, a sample: stacked", BATCH, lambda: plain.collate(samples))
    add("blocks, a sample: found and cut", BATCH, lambda: blocks.collate(blocks.__getitems__(index)))
    add("blocks, a sample: made, a batch at once", BATCH, lambda: finish(dict(held), *scale))
    for (kind, name), place in product({"patches": "chapter 3", "blocks": "blocks"}.items(), ("memory", FAR)):
        bench.add({"part": f"{name}, a sample: all, {place}"}, feeds, Reading(kind, place))
    rows = bench.table()
    blocks.close()
    return [*rows, {"part": "stores that zarrs reads by itself", "stores": what_zarrs_reads(bench, path)}]


def small_reads() -> dict[str, Callable]:
    """The same few cells, held in memory, asked for through more and more libraries."""
    memory, cells = MemoryStore(), np.zeros((8, 64, 64), "float32")
    wind = xr.Dataset({"wind": (("time", "latitude", "longitude"), cells)})
    wind.to_zarr(memory, encoding={"wind": {"chunks": (1, 64, 64)}}, zarr_format=3, consolidated=False)
    array = zarr.open_group(memory, mode="r")["wind"]
    lazy, graph = (xr.open_zarr(memory, chunks=chunks, consolidated=False)["wind"] for chunks in (None, {}))
    return {
        "NumPy": lambda: cells[3].copy(),
        "Zarr": lambda: array[3],
        "xarray": lambda: lazy[3].values,
        "xarray with Dask": lambda: graph[3].compute(scheduler="synchronous"),
    }


def cost(bench: Bench, count: int, work: Callable) -> dict:
    """CPU microseconds of all threads of this process, for each of so many chunks or samples."""
    work()
    began, repeats = process_time(), 0
    while repeats < 3 or process_time() - began < (0.02 if bench.quick else 0.5):
        work()
        repeats += 1
    return {"cpu_microseconds": 1e6 * (process_time() - began) / (repeats * count)}


def feeds(bench: Bench, reading: Reading) -> dict:
    """What a sample costs in all, and so how many of them a core feeds."""
    seconds = rate(bench, reading)["cpu_ms_per_sample"] / 1e3
    return {"cpu_microseconds": 1e6 * seconds, "samples_per_second_of_a_core": 1 / seconds}


def what_zarrs_reads(bench: Bench, path: Path) -> dict[str, bool] | str:
    """From which stores the codec pipeline of `zarrs` reads by itself; others it leaves to Zarr's own."""
    if not find_spec("zarrs"):
        return "not installed; uv run --group peers python benchmark.py cpu"
    url, environment = bench.at(Reading())
    os.environ |= environment
    files, found = LocalStore(path, read_only=True), {}
    stores = {
        "files": files,
        "S3, by obstore": bare_store(url),
        "SteadyStore": SteadyStore(files, Access(".")),
    }
    for name, store in stores.items():
        with zarr.config.set(PIPELINES["zarrs"]):
            pipeline = zarr.open_group(store, mode="r")[NAMES[0]]._async_array.codec_pipeline
        found[name] = getattr(pipeline, "impl", None) is not None
    return found


# ------------------------------------------------------------------------------------ the cache, simulated


def lru(asked: list[str], sizes: dict[str, int], capacity: float, first: int) -> float:
    """The share of hits from request `first` on, of a cache that throws out what was longest unused."""
    held, total, hits = OrderedDict(), 0, 0
    for number, key in enumerate(asked):
        if key in held:
            held.move_to_end(key)
            hits += number >= first
            continue
        held[key] = None
        total += sizes[key]
        while total > capacity:
            total -= sizes[held.popitem(last=False)[0]]
    return hits / (len(asked) - first)


def pin(asked: list[str], sizes: dict[str, int], capacity: float, first: int) -> float:
    """The same of a cache like DiskCache: what is in stays in, and once something did not fit, nothing goes in."""
    held, total, hits = set(), 0, 0
    for number, key in enumerate(asked):
        if key in held:
            hits += number >= first
        else:
            total += sizes[key]
            held |= {key} if total <= capacity else set()
    return hits / (len(asked) - first)


def boxes_of(patches: WindPatches, drawn: Iterable[tuple]) -> list[tuple]:
    cells, width = np.arange(patches.size), len(patches.longitude)
    return [(time, row + cells, (column + cells) % width) for time, row, column, *_ in drawn]


def asked_by(patches: WindPatches, boxes: list[tuple]) -> list[str]:
    return [key for time, *cells in boxes for key in keys_of(patches, [time], *cells)]


def asked_by_blocks(patches: BlockPatches, samples: int) -> list[str]:
    """What blocks ask for, in the order of BlockPatches.hold: of each lane a visit and the next one."""
    asked, begun, n = [], set(), patches.batch_size

    def hold(wanted: dict[int, int]) -> None:
        for visit in [(lane, number + ahead) for ahead in (0, 1) for lane, number in wanted.items()]:
            if visit not in begun:
                asked.extend(keys_of_block(patches, patches.visit(*visit).block))
                begun.add(visit)

    for step in range(samples // n):
        places = [patches.locate(step, k) for k in range(n)]
        hold({lane: number for lane, number, _ in reversed(places)})
        for lane, number, patch in places:
            if patch + 1 == len(patches.visit(lane, number).cell):
                hold({lane: number + 1})
        following = [patches.locate(step + 1, k) for k in range(n)]
        hold({lane: number for lane, number, _ in reversed(following)})
    return asked


def cache(bench: Bench) -> list[dict]:
    """Hits of the second of two epochs by the size of a cache, its policy and the order; what GETs then cost.

    An epoch is as many samples as a round of the blocks. The loaders' own orders, simulated; one point is read
    through the cache on disk.
    """
    path, size, rows = bench.store(PLAIN), bench.patch, []
    reading = Reading(shuffle_blocks=1) if bench.quick else Reading()
    blocks, plain = (open_patches(replace(reading, kind=kind), path, size) for kind in ("blocks", "patches"))
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("c/*/*/*")}
    epoch = sum(blocks.totals) // BATCH * BATCH
    drawn = [boxes_of(plain, (plain.sample(*divmod(n, BATCH)) for n in range(m * epoch))) for m in (1, 2)]
    every = (np.arange(len(axis)) for axis in (plain.times, plain.latitude, plain.longitude))
    walked = keys_of(plain, *every)  # chunk after chunk, all of what is needed cut from each
    orders = {  # requests of one epoch and of two, and the samples of one
        "sequential": (walked, 2 * walked, epoch),
        "chapter 3's shuffle": (*(asked_by(plain, boxes) for boxes in drawn), epoch),
        "blocks": (asked_by_blocks(blocks, epoch), asked_by_blocks(blocks, 2 * epoch), epoch),
    }
    for order, (once, asked, samples) in orders.items():
        data = sum(sizes[key] for key in set(asked))
        for policy, share in product((lru, pin), (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)):
            hits = policy(asked, sizes, share * data, len(once))
            gets = (len(asked) - len(once)) / samples * (1 - hits)
            row = {"order": order, "policy": policy.__name__, "cache_share": share, "hit_share": hits}
            row |= {"gets_per_sample": gets, "usd_per_1000_gets": USD_PER_1000_GETS}
            rows.append(row | {"usd_per_million_samples": 1e3 * gets * USD_PER_1000_GETS})
    in_order = replace(reading, max_requests=1)
    labels = {"order": "blocks", "policy": "DiskCache", "cache_share": 0.5}
    bench.add(labels, cached, in_order, path, data / 2, epoch)
    return rows + bench.table()


def cached(bench: Bench, reading: Reading, path: Path, capacity: float, epoch: int) -> dict:
    """The share of hits of the second epoch of blocks that are read through the cache on disk."""
    with tempfile.TemporaryDirectory(dir=OUTPUTS) as folder:
        patches, logs = open_patches(reading, path, bench.patch, cache=folder, cache_gb=capacity / 1e9), []
        for step in range(2 * epoch // BATCH):
            patches.__getitems__([(step, k) for k in range(BATCH)])
            for _, reading in patches.held.values():
                reading.result()  # so that it is known in which epoch it was read
            logs.append(patches.winds.take_log())
        patches.close()
    return {"hit_share": float(np.concatenate(logs[epoch // BATCH :])[:, 3].mean())}


# ------------------------------------------------------------------------------------------- with training


def shuffle(bench: Bench) -> list[dict]:
    """Validation RMSE of train.py at equal steps, by the width of the shuffle and how densely maps are cut."""
    widths = [(1, 8)] if bench.quick else [(0, 8), (32, 8), (1, 8), (32, 128), (8, 128), (1, 128)]
    flags = ["--max-steps", "2", "--patch-size", "16"] if bench.quick else ["--max-steps", "250"]
    bench.rounds, seeds = 1, range(1 if bench.quick else 3)  # the same seed gives the same bits
    for width, per_map in widths:
        labels = {
            "shuffle_blocks": width,
            "patches_per_map": per_map,
            "steps": int(flags[1]),
            "seeds": len(seeds),
        }
        more = ["--shuffle-blocks", str(width), "--patches-per-map", str(per_map)]
        bench.add(labels, trained, [*flags, *more], seeds)
    return bench.table()


def trained(bench: Bench, flags: list[str], seeds: range) -> dict:
    """What runs of train.py end with: spreads over the seeds."""
    names = ("rmse", "data_wait_share", "requests_per_sample", "read_amplification")
    runs = [
        run_script("train.py", [*flags, "--validate-every", "100000", "--seed", str(seed)]) for seed in seeds
    ]
    return spread([{name: summary[name] for name in names} for summary, _ in runs])


def run_script(name: str, flags: list[str]) -> tuple[dict, str]:
    """The summary of a script of this chapter, which serves its own example, and what it prints."""
    reader = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with tempfile.TemporaryDirectory(dir=OUTPUTS) as folder:
        written = ["--output-dir", folder] if name == "train.py" else []  # the others write nothing
        command, options = [sys.executable, HERE / name, *flags, *written], {"env": reader}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if done.returncode:
            raise InputError(f"{name} has failed:\n{done.stderr.strip()}")
        printed = done.stdout
        path = Path(folder, "summary.json")
        report = printed[max(0, printed.find("RMSE over the unseen")) :]  # without Lightning's progress bar
        return json.loads(path.read_text()) if path.exists() else {}, report.replace(folder, "outputs/train")


def command(bench: Bench) -> list[dict]:
    """The commands of the walkthrough: seconds from command to prompt, the summary, and what is printed."""
    small = ["--max-steps", "2", "--patch-size", "16"] if bench.quick else []
    lines = [
        "train.py",
        "train.py --num-workers 1",
        "train.py --shuffle-blocks 0",
        "diagnose.py --shuffle-blocks 0",
    ]
    for line in lines[2:] if bench.quick else [*lines, "diagnose.py"]:
        name, *flags = line.split()
        bench.add({"run": line}, timed, name, [*flags, *small])
    return bench.table()


def timed(bench: Bench, name: str, flags: list[str]) -> dict:
    began = perf_counter()
    summary, printed = run_script(name, flags)
    seconds = perf_counter() - began
    names = ("samples_per_second", "data_wait_share", "requests_per_sample", "read_amplification", "rmse")
    return (
        {"wall_seconds": seconds} | {name: summary[name] for name in names if summary} | {"printed": printed}
    )


def tuning(bench: Bench) -> list[dict]:
    """What tune.py finds for chapter 3's loader, and prints."""
    small = ["--seconds", "4", "--patch-size", "16"] if bench.quick else []
    bench.add({"run": "tune.py --shuffle-blocks 0"}, timed, "tune.py", ["--shuffle-blocks", "0", *small])
    return bench.table()


def diagnosis(bench: Bench) -> list[dict]:
    """What diagnose.py promises for slow loaders, beside train.py's network, and what blocks then bring."""
    blocks, steps = Reading(batch_size=LITTLE), 4 if bench.quick else 60
    slow = [Reading("naive"), Reading("patches"), Reading("patches", "100 ms")]
    for reading in slow[1:2] if bench.quick else slow:
        reading = replace(reading, batch_size=LITTLE)
        bench.at(reading)
        bench.add(of(reading, "kind place num_workers"), fresh, diagnosed, reading, steps)
        better = replace(blocks, place=reading.place)
        bench.add(of(better, "kind place num_workers"), fresh, train_for, better, steps)
    rows = bench.table()
    for before, after in zip(rows[::2], rows[1::2]):
        pace = after["steps_per_second"]["median"]
        before["measured_speedup"] = pace * before["now_ms"]["median"] / 1e3
    return rows


def diagnosed(bench: Bench, reading: Reading, steps: int) -> dict:
    with loading(bench, reading) as (_, loader):
        found = diagnose(loader, wind_step(network(steps), accumulate=1), steps=steps, run_steps=10_000)
    figures = {
        "now_ms": found.now,
        "waiting_ms": found.waiting,
        "at_hand_ms": found.at_hand,
        "load_ms": found.load,
    }
    figures = {name: 1e3 * seconds for name, seconds in figures.items()}
    return {
        "verdict": found.verdict,
        "wait_share": found.shares["waiting for data"],
        "speedup": found.speedup,
    } | figures


def network(steps: int) -> torch.nn.Module:
    """That of train.py."""
    import train  # and Lightning, which few studies need

    settings = {"seed": 0, "overfit_one_batch": False, "learning_rate": 3e-3, "max_steps": steps}
    return train.WindFill(settings, [[[0.0]], [[0.0]]], [[[5.0]], [[5.0]]])


def steady(bench: Bench) -> list[dict]:
    """Train train.py's network for 1,000 steps: the share of waiting, and whether memory grows."""
    blocks = Reading(batch_size=LITTLE)
    naive, far = replace(blocks, kind="naive"), {"place": "100 ms"}
    runs = [(blocks, 1000), (replace(blocks, num_workers=1), 1000), (naive, 60)]
    runs += [(replace(blocks, **far), 1000), (replace(naive, **far), 60)]
    for reading, steps in runs[1:2] if bench.quick else runs:
        labels = of(reading, "kind place num_workers") | {"steps": min(steps, 6) if bench.quick else steps}
        bench.add(labels, fresh, train_for, reading, labels["steps"])
        bench.at(reading)
    return bench.table()


def train_for(bench: Bench, reading: Reading, steps: int) -> dict:
    *seconds, memory = beside(bench, reading, wind_step(network(steps), accumulate=1), steps)
    half = memory[steps // 2 :]
    slope = np.polyfit(np.arange(len(half)), half, 1)[0]
    return shares(*seconds) | {"memory_mb": half[-1], "memory_mb_per_1000_steps": 1e3 * slope}


def gpu(bench: Bench) -> list[dict]:
    """The share of time for which a GPU idles, by its own clock, beside a network 16 times as large."""
    if not torch.cuda.is_available():
        print("gpu: left out: there is no CUDA device here")
        return []
    naive, patches, blocks = (Reading(kind, num_workers=2) for kind in ("naive", "patches", "blocks"))
    pinned = replace(blocks, pin_memory=True)
    ways = [(naive, False, False), (patches, False, False), (replace(blocks, num_workers=0), False, False)]
    ways += [(blocks, False, False), (pinned, False, False), (pinned, True, False), (blocks, False, True)]
    for reading, non_blocking, at_hand in ways:
        labels = of(reading, "kind num_workers pin_memory")
        labels |= {"non_blocking": non_blocking, "batch_at_hand": at_hand}
        bench.add(labels, idle_share, reading, non_blocking, at_hand)
    return bench.table()


def idle_share(bench: Bench, reading: Reading, non_blocking: bool, at_hand: bool) -> dict:
    """Train on a GPU whose events tell when it began and ended each step; `at_hand`: on the first batch again."""
    import train

    steps, moments, kept = 8 if bench.quick else 60, [], []
    model = train.UNet(train.BOTTOM_CHANNELS, dropout=0.0).cuda()  # four times as wide
    optimizer = torch.optim.AdamW(model.parameters())
    scale = torch.zeros(2, 1, 1, device="cuda"), torch.full((2, 1, 1), 5.0, device="cuda")

    def step(batch: dict) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not at_hand or not kept:
            kept[:] = [{name: each.to("cuda", non_blocking=non_blocking) for name, each in batch.items()}]
        began.record()  # what is copied meanwhile is no work
        batch = finish(kept[0], *scale) if "wind" in kept[0] else kept[0]
        loss, unseen = train.masked_loss(model(batch["input"]), batch)
        (loss / unseen).backward()
        optimizer.step()
        optimizer.zero_grad()
        ended.record()
        moments.append((began, ended))

    beside(bench, reading, step, steps)
    torch.cuda.synchronize()
    total = moments[-steps][0].elapsed_time(moments[-1][1])
    busy = sum(began.elapsed_time(ended) for began, ended in moments[-steps:])
    samples_per_second = 1e3 * steps * reading.batch_size / total
    # Not the shares of waiting: steps are only launched here, and nobody waits for their end.
    return {"samples_per_second": samples_per_second, "gpu_idle_share": 1 - busy / total}


# --------------------------------------------------------------------------------------------- command line

ROUNDS = {ladder: 5, demand: 3, places: 2, optimum: 3, settings: 2, prefetch: 3, start: 3, overlap: 3}
ROUNDS |= {cut: 5, bandwidth: 3, with_dask: 3, pools: 3, cpu: 5, cache: 1, command: 3, diagnosis: 3}
ROUNDS |= {tuning: 1, shuffle: 1, steady: 1, gpu: 3}
STUDIES = {study.__name__.removeprefix("with_"): study for study in ROUNDS}


def machine() -> dict:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = round(psutil.virtual_memory().total / 2**30)
    return {"cpu": name, "cores": os.cpu_count(), "memory_gb": memory, "gpu": gpu}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that were asked for; print their rows, and save them if asked to."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all if none")
    add("--quick", action="store_true", help="tiny sizes and one round: see that it works")
    add(
        "--rounds",
        type=int,
        help="in which the alternatives take turns (default: 1 to 5, by study; quick: 1)",
    )
    add("--save-results", action="store_true", help="write results/STUDY.json")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.studies if name not in STUDIES]:
        raise InputError(f"{unknown[0]}: no such study; choose from {', '.join(STUDIES)}")
    if args.rounds is not None and args.rounds < 1:
        raise InputError(f"--rounds {args.rounds}: too small; give at least 1")
    if args.quick and args.save_results:
        raise InputError("--save-results: --quick measures nothing worth keeping; leave one of them out")
    os.environ |= ENVIRONMENT
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    multiprocessing.set_forkserver_preload(HEAVY.split())
    packages = ("torch", "zarr", "xarray", "obstore", "numcodecs", "dask")
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    found = {}
    for name in args.studies or STUDIES:
        began, rounds = perf_counter(), args.rounds or (1 if args.quick else ROUNDS[STUDIES[name]])
        with ExitStack() as stack:
            bench = Bench(name, args.quick, rounds, stack)
            found[name] = STUDIES[name](bench)
        for row in found[name]:
            print(name, json.dumps(row))
        print(f"{name}: {perf_counter() - began:.0f} s", flush=True)
        if args.save_results and found[name]:
            group = "--group peers " * (name == "cpu" and bool(find_spec("zarrs")))
            times = f" --rounds {args.rounds}" if args.rounds else ""
            typed = f"uv run {group}python benchmark.py {name}{times}"
            results = {"command": typed, "date": str(date.today())}
            results |= {
                "rounds": bench.rounds,
                "machine": machine(),
                "versions": versions,
                "rows": found[name],
            }
            path = HERE / "results" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(aside, path)
        kept_in(name, args.quick).unlink(missing_ok=True)  # the study is whole
    return found


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:  # StoreError is an OSError
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from here")
