"""Chapter 4: fill the wind between a satellite's swaths, and never wait for data.

    uv run python train.py                           # a small store, made and served on this machine
    uv run python train.py --patches-per-block 32 --shuffle-blocks 64         # fewer bytes, more mixed
    uv run python train.py --store s3://bucket/winds.zarr --num-workers 1     # beside a GPU

You should see what chapter 3 shows, with fewer requests and bytes for a sample, and hardly any waiting.
Threads read whole maps ahead of the step, and several patches are cut from each.
"""

import argparse
import atexit
import faulthandler
import gc
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
import xarray as xr
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import HTTPStore, from_url
from scipy.interpolate import griddata
from scipy.spatial import QhullError
from torch import distributed, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchmetrics import MeanMetric
from zarr.abc.store import Store as ZarrStore
from zarr.storage import ObjectStore, WrapperStore

# What you change for data of your own, here or by flags.
HERE = Path(__file__).parent
SMALL = "s3://winds/small.zarr"
CLOUD, OUTPUTS = HERE.parent / "03_cloud_data", HERE / "outputs" / Path(__file__).stem
VARIABLES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
TRAIN_TIMES, VALIDATION_TIMES, TEST_TIMES = ["1982", "1989"], ["1990", "1990"], ["1991", "1992"]
DIMENSIONS = {  # a name, standard_name, axis or units by which each is known
    "time": {"time", "valid_time", "t", "T"},
    "latitude": {"latitude", "lat", "degrees_north", "degree_north"},
    "longitude": {"longitude", "lon", "degrees_east", "degree_east"},
}
# In cells, as in chapter 1. There, 10 cells were the 25 degrees of longitude between successive tracks of a
# polar orbiter, and 4 a swath of 1,100 km; on a finer grid they stand for more and narrower instruments.
TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH, LOST_PASSES = 10, 0.22, 4, 1 / 8
DECISIVE = "variables train_times validation_times test_times patch_size batch_size accumulate"
DECISIVE += " max_steps learning_rate seed"  # what a run and the one that resumes it share
DECISIVE += " patches_per_block shuffle_blocks"
RIVAL = "interpolated anomalies"  # linear interpolation of them, the best of these four
JUDGED_SAMPLES, JUDGE_SEED = 96, 1991  # not --seed: every run is judged on the same patches
ORDER_STREAM, PATCH_STREAM = 1, 2  # each use of randomness has its own: adding one never shifts another
READS_AT_ONCE = 64  # of one process; each may ask for several chunks
MAPS_AT_ONCE = 24  # of the block loader
BLOCKS_AHEAD = 16  # that no batch has touched yet, at least
METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")  # which may be absent
PRELOADED = "lightning.pytorch matplotlib.figure obstore scipy.interpolate torchmetrics xarray zarr".split()
refuse = argparse.ArgumentParser(usage=argparse.SUPPRESS).error  # says what to mend, and exits with code 2


class StoreError(OSError):
    """What is wrong with the store, in one line."""


def first_line(error: Exception) -> str:
    """What went wrong, without the client's account of its own settings."""
    while isinstance(error, BaseExceptionGroup):  # of several reads at once
        error = error.exceptions[0]
    return str(error).strip().split("\n")[0] or type(error).__name__


class Bucket(WrapperStore):
    """A Zarr store that logs each read, names the object that fails, and takes no missing object for a number."""

    def __init__(self, store: ObjectStore):
        super().__init__(store)
        self.log, self.numbers = [], set()  # arrays whose fill value is a number, not NaN

    async def get(self, key: str, *how, **more):
        """The bytes of an object, or None if there is none; StoreError when obstore has given up."""
        began, found = perf_counter(), None
        try:
            found = await super().get(key, *how, **more)
        except NotSupportedError as error:
            remedy = "copy the store to a disk or a bucket, or write it without shards"
            raise StoreError(
                f"{key}: shards need range requests, which this server ignores; {remedy}"
            ) from error
        except Exception as error:
            # Without leave to list a bucket, clouds say of metadata that are not there that they may not be read.
            denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
            if not (denied and key.endswith(METADATA)):
                raise StoreError(f"{key}: {first_line(error)}") from error
        self.log.append((key, began, perf_counter(), len(found) if found else 0))
        if found is None and key.split("/")[0] in self.numbers and not key.endswith(METADATA):
            raise StoreError(f"{key}: this chunk is missing")
        return found

    if hasattr(ZarrStore, "get_ranges"):  # for shards, from zarr 3.3 on: through get(), and not past it
        get_ranges = ZarrStore.get_ranges

    def list_dir(self, prefix: str):
        """The names under a prefix. A web server cannot tell them, and obstore would ask until the deadline."""
        if isinstance(self._store.store, HTTPStore):
            remedy = "run zarr.consolidate_metadata on the store, where it can be written"
            raise StoreError(
                f"it has no consolidated metadata, and a web server cannot list a store; {remedy}"
            )
        return super().list_dir(prefix)


class Store:
    """The fields behind a path or URL. Each process opens them for itself, when it first reads: a client's
    threads and connections survive neither a fork nor a pickle."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def __getstate__(self) -> dict:
        return {"args": self.args}

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READS_AT_ONCE)

    @cached_property
    def bucket(self) -> Bucket:
        """What obstore finds there. It tries again, ever more slowly, until `deadline` seconds have gone."""
        url, args = self.args.store, self.args
        if "://" not in url:
            return Bucket(ObjectStore(from_url(Path(url).absolute().as_uri()), read_only=True))
        retries = {"max_retries": 1000, "retry_timeout": timedelta(seconds=args.deadline)}
        client = {"allow_http": True, "read_timeout": "10s", "timeout": retries["retry_timeout"]}
        options = {"retry_config": retries, "client_options": client}
        options |= {"endpoint": args.endpoint} if args.endpoint else {}
        if args.anonymous and not url.startswith("http"):
            options["skip_signature"] = True
        elif url.startswith("s3:"):  # obstore does not look into ~/.aws by itself
            options["credential_provider"] = Boto3CredentialProvider(ttl=timedelta(minutes=5))
        return Bucket(ObjectStore(from_url(url, **options), read_only=True))

    @cached_property
    def fields(self) -> xr.Dataset:
        """The variables, none of their values read, whatever their dimensions' names, order and direction."""
        store, variables = self.args.store, self.args.variables
        try:
            dataset = xr.open_zarr(self.bucket, chunks=None)
        except FileNotFoundError as error:
            remedy = "check the bucket, the key and --endpoint, and credentials or --anonymous"
            raise StoreError(f"no Zarr store is there, or none that you may read; {remedy}") from error
        except StoreError:
            raise
        except Exception as error:  # obstore's, boto3's, Zarr's and xarray's have no base in common
            raise StoreError(f"{first_line(error)}; check credentials, or give --anonymous") from error
        dims = {name: ", ".join(map(str, dataset[name].dims)) for name in dataset.data_vars}
        dataset = dataset[[name for name in dims if name in variables]]
        try:
            dataset = rename_dimensions(dataset.squeeze().reset_coords(drop=True))
        except ValueError as error:
            refuse(f"--variables {' '.join(variables)}: {error}")
        for name in variables:
            on_these = name in dims and sorted(dataset[name].dims) == sorted(DIMENSIONS)
            if not on_these or not set(DIMENSIONS) <= set(dataset.indexes):
                found = "; ".join(f"{name} ({over})" for name, over in dims.items()) or "no variable"
                refuse(f"--variables {name}: not in {store} on {', '.join(DIMENSIONS)} alone; it has {found}")
            if dataset[name].dtype.kind not in "iuf":
                refuse(f"--variables {name}: its type is {dataset[name].dtype}; give variables of numbers")
            if dataset[name].size == 0:
                refuse(f"--variables {name}: a dimension has length 0; give variables that have values")
            about = dataset[name].encoding
            masked, fill = about.get("_FillValue"), about.get("fill_value", about.get("_FillValue"))
            if fill is None or not (np.isnan(fill) or fill == masked):
                self.bucket.numbers.add(name)
        if not all(dataset.indexes[dim].is_unique for dim in DIMENSIONS):
            raise StoreError("a coordinate repeats: it was written twice, or a chunk of it is missing")
        gc.freeze()  # else the collector stops all reads for 0.4 s at a time, to look at what was imported
        atexit.register(gc.unfreeze)
        return sort_coordinates(dataset)

    def read(self, regions: list[dict]) -> np.ndarray:
        """The variables in each region, (regions, variables, H, W), all read at once: a thread for each."""
        jobs = [(name, self.fields.variables[name], at) for at in regions for name in self.args.variables]
        self.bucket.log.clear()  # of what was read to open the store
        parts = np.stack(list(self.threads.map(self.load, jobs))).astype("float32", copy=False)
        return parts.reshape(len(regions), -1, *parts.shape[1:])

    def load(self, job: tuple[str, xr.Variable, dict]) -> np.ndarray:
        """A variable in a region, (H, W), or (times, H, W). StoreError says where reading or decoding failed."""
        name, variable, region = job
        try:
            found = variable.isel(region).load()
            return found.transpose("time", "latitude", "longitude", missing_dims="ignore").values
        except Exception as error:
            date = str(np.ravel(self.fields.time.values[region["time"]])[0])[:16]
            raise StoreError(f"{name} of {date}: {first_line(error)}") from error


def rename_dimensions(dataset: xr.Dataset) -> xr.Dataset:
    """Call the dimensions time, latitude and longitude, whatever they are called in the store.

    ValueError if two coordinates look like the same dimension.
    """
    for dimension, signs in DIMENSIONS.items():
        found = []
        for name in dataset.indexes:
            about = dataset[name].attrs
            described = [str(about.get(key)) for key in ("standard_name", "axis", "units")]
            if signs & {name.lower(), *described}:
                found.append(name)
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} both look like {dimension}; give variables of one grid")
        if found:
            dataset = dataset.rename({found[0]: dimension})
            for field in dataset.variables.values():  # xarray renames no dimension in the encoding
                chunk = field.encoding.get("preferred_chunks", {})
                renamed = {dimension if name == found[0] else name: size for name, size in chunk.items()}
                field.encoding["preferred_chunks"] = renamed
    return dataset


def sort_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """Sort the dimensions, with longitudes that do not jump where a region crosses 0 or 180 degrees."""
    dataset = dataset.assign_coords(longitude=dataset.longitude + 0.0)  # np.unwrap wants no integers
    steps = np.diff(np.unwrap(dataset.longitude, period=360))
    if steps.min() < 0 < steps.max():  # np.unwrap takes a jump of over 180 degrees for a step across the seam
        dataset = dataset.sortby("longitude")
    dataset = dataset.assign_coords(longitude=np.unwrap(dataset.longitude, period=360))
    for dim in DIMENSIONS.keys() & dataset.indexes.keys():
        if dataset.indexes[dim].is_monotonic_decreasing:  # a slice costs nothing; a sort picks row by row
            dataset = dataset.isel({dim: slice(None, None, -1)})
        elif not dataset.indexes[dim].is_monotonic_increasing:
            dataset = dataset.sortby(dim)
    is_repeated = np.isclose(dataset.longitude[-1] - dataset.longitude[0], 360, atol=1e-4)  # as 0 and 360 are
    return dataset.isel(longitude=slice(0, -1)) if is_repeated else dataset


def load_statistics(store: Store, args: argparse.Namespace) -> xr.Dataset:
    """The month's climatology of the training times, (month, latitude, longitude), its std in `attrs`.

    Those kept with the store; else of a sample of times, which make_store.py draws once, kept in outputs/.
    """
    name = "_".join([*sorted(args.variables), *args.train_times])
    name = name if len(name) < 200 else sha256(name.encode()).hexdigest()  # a file's may have 255
    try:
        return sort_coordinates(xr.open_zarr(store.bucket, group=f"statistics/{name}", chunks=None).load())
    except (FileNotFoundError, KeyError):  # made by another tool, or for other times
        pass
    except (RuntimeError, ValueError) as error:  # a codec's
        raise StoreError(f"statistics/{name}: {first_line(error)}") from error
    url = args.store if "://" in args.store else os.path.abspath(args.store)
    grid = [store.fields[dim].values.tobytes() for dim in DIMENSIONS]  # a store made anew has others
    where = repr([url, urlsplit(args.endpoint or "").hostname, *grid]).encode()
    kept = CLOUD / f"outputs/statistics/{name}_{sha256(where).hexdigest()[:12]}.nc"
    if not kept.exists():
        flags = ["--variables", *args.variables, "--train-times", *args.train_times, "--store", args.store]
        flags += ["--endpoint", args.endpoint] * bool(args.endpoint) + ["--anonymous"] * args.anonymous
        flags += ["--deadline", str(args.deadline)]
        run_make_store("--statistics-to", str(kept), *flags)
    return sort_coordinates(xr.load_dataset(kept))


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_times: int) -> np.ndarray:
    """The order in which an epoch visits the times, (n_times,): each of them once."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(n_times)


def swath_masks(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """True where the satellite looks, (n, size, size): ascending or descending passes, some of them lost.

    Every row sees the same line of passes, moved by as many cells as the track leans there.
    """
    lean = rng.choice((-TRACK_SLOPE, TRACK_SLOPE), (n, 1))
    first = np.floor(lean * np.arange(size) + rng.uniform(0, TRACK_SPACING, (n, 1))).astype(int)
    first -= first.min(axis=1, keepdims=True) // TRACK_SPACING * TRACK_SPACING  # of each row, in the line
    orbit, offset = np.divmod(np.arange(first.max() + size), TRACK_SPACING)
    lost, inside = rng.random((n, orbit[-1] + 1)) < LOST_PASSES, offset < SWATH_WIDTH
    lines = sliding_window_view(inside & ~lost[:, orbit], size, axis=1)
    seen = lines[np.arange(n)[:, None], first]
    few = seen.sum(axis=(1, 2)) < size  # of a small patch, every pass may be lost
    seen[few] = sliding_window_view(inside, size)[first[few]]
    return seen


class Patches(Dataset):
    """Patches of the anomalies and their swaths, addressed by (step, k): sample k of global step `step`."""

    def __init__(self, store: Store, data: xr.Dataset, patch_size: int, batch_size: int, seed: int):
        """Take climatology, std and valid cells, and a store of the fields; refuse a patch larger than the grid."""
        self.store, self.places = store, data.places.values  # of each time in the store
        self.times, self.months = data.time.values, data.time.dt.month.values - 1
        self.latitude, self.longitude = data.latitude.values, data.longitude.values
        self.climatology = data.climatology.values
        self.valid, self.std = data.valid.values, data["std"].values[:, None, None]
        self.size, self.batch_size, self.seed = patch_size, batch_size, seed
        units = data.units.values.tolist()
        self.pools = {unit: [i for i, other in enumerate(units) if other == unit] for unit in units}
        if patch_size % 4 or patch_size > min(self.valid.shape):
            remedy = f"give a multiple of 4 up to {min(self.valid.shape) // 4 * 4}"
            refuse(f"--patch-size {patch_size}: the grid is {self.valid.shape}; {remedy}")
        self.spacing = self.longitude[1] - self.longitude[0]
        is_global = abs(self.longitude[-1] - self.longitude[0] + self.spacing - 360) < self.spacing / 2
        self.last_column = len(self.longitude) - (1 if is_global else patch_size)  # else no seam to cross

    def sample(self, step: int, k: int) -> tuple[int, int, int, np.ndarray]:
        """Say what sample k of a step is, a pure function of (seed, step, k): there is no state to lose.

        Returns (time, row, column) of the patch's first cell and the swath mask, (size, size).
        """
        epoch, position = divmod(step * self.batch_size + k, len(self.times))
        time = epoch_order(self.seed, epoch, len(self.times))[position]
        rng = np.random.default_rng((PATCH_STREAM, self.seed, step, k))
        row = rng.integers(len(self.latitude) - self.size, endpoint=True)
        column = rng.integers(self.last_column, endpoint=True)
        return time, row, column, swath_masks(rng, 1, self.size)[0]

    def cut(self, field: np.ndarray, row: int, column: int) -> np.ndarray:
        """Cut a patch out of a field (..., latitude, longitude), across the map's seam if need be."""
        rows = field[..., row : row + self.size, :]
        patch, left = rows[..., column : column + self.size], column + self.size - rows.shape[-1]
        return patch if left <= 0 else np.concatenate([patch, rows[..., :left]], axis=-1)

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
        """The samples of a batch, whose patches are read all at once. Each has, float32,

        input (variables + 1, H, W), target (variables, H, W), unseen and weight (1, H, W). Unseen is 1 in the
        cells to be filled, and the weight is cos(latitude) there; elsewhere both are 0.
        """
        drawn = [self.sample(*index) for index in indices]
        fields = self.store.read([self.region(*place[:3]) for place in drawn])
        batch = self.make(fields, *map(np.array, zip(*drawn)))
        return [{name: values[n] for name, values in batch.items()} for n in range(len(indices))]

    def region(self, time: int, row: int, column: int) -> dict[str, int | slice | np.ndarray]:
        """Where a patch lies in the store, across the map's seam if need be."""
        columns, width = slice(column, column + self.size), len(self.longitude)
        if columns.stop > width:
            columns = np.arange(column, columns.stop) % width
        return {"time": self.places[time], "latitude": slice(row, row + self.size), "longitude": columns}

    def make(self, fields, times, rows, columns, swaths) -> dict[str, np.ndarray]:
        """The samples of n patches at once, from their fields (n, variables, H, W), places (n,) and swaths.

        StoreError where a value is missing.
        """
        corners = list(zip(self.months[times], rows, columns))
        means = np.stack([self.cut(self.climatology[month], row, column) for month, row, column in corners])
        valid = np.stack([self.cut(self.valid[None], row, column) for _, row, column in corners])
        target = np.subtract(fields, means, out=means)  # in place: new memory costs as much as the sum
        target /= self.std
        if not valid.all():
            np.copyto(target, 0, where=~valid)
        if not np.isfinite(target.sum()) and not np.isfinite(target).all():  # the sum is quick
            date = str(self.times[times[np.argwhere(~np.isfinite(target))[0, 0]]])[:16]
            hole = f"NaN or infinity on {date}: a value or a chunk is missing"
            raise StoreError(f"{hole}; fill it, or give --train-times that month in several years")
        seen, unseen = ((valid & cells[:, None]).astype("float32") for cells in (swaths, ~swaths))
        latitude = np.deg2rad(self.latitude[rows[:, None] + np.arange(self.size)])[:, None, :, None]
        weight = unseen * np.cos(latitude).clip(0).astype("float32")
        inputs = np.empty((len(times), len(self.std) + 1, self.size, self.size), "float32")
        np.multiply(target, seen, out=inputs[:, :-1])
        inputs[:, -1:] = seen
        return {"input": inputs, "target": target, "unseen": unseen, "weight": weight}

    def fields(self, step: int, k: int, sample: dict) -> tuple[np.ndarray, np.ndarray]:
        """The climatology and the anomaly of sample k, (variables, H, W) each, in the variables' units."""
        time, row, column, _ = self.sample(step, k)
        return self.cut(self.climatology[self.months[time]], row, column), self.std * sample["target"]


class StepSampler(Sampler):
    """This rank's slice of the global batch of every step from `start` on, in `accumulate` micro-batches.

    Each is a list of (step, k). To resume, start later; on another number of ranks, slice otherwise.
    """

    def __init__(self, args: argparse.Namespace, start: int, rank: int, world_size: int):
        self.args, self.start, self.first = args, start, rank * args.accumulate
        self.pieces = world_size * args.accumulate

    def __len__(self) -> int:
        # Of the whole run: Lightning counts those before a resume as fetched.
        return self.args.max_steps * self.args.accumulate

    def __iter__(self):
        for step in range(self.start, self.args.max_steps):
            for piece in range(self.first, self.first + self.args.accumulate):  # as equal as may be
                ends = (self.args.batch_size * n // self.pieces for n in (piece, piece + 1))
                yield [(step, k) for k in range(*ends)]


class Block(NamedTuple):
    """What is cut from one visit of a block, P patches; `fields` is filled in as the `readings` end."""

    readings: list[Future]
    fields: np.ndarray  # (P, variables, H, W)
    times: np.ndarray  # (P,), and so are rows and columns: of each patch's first cell
    rows: np.ndarray
    columns: np.ndarray
    swaths: np.ndarray  # (P, H, W)


class Blocks(IterableDataset):
    """Batches whose patches are cut from whole maps, several from each, which threads read ahead of the step.

    A block is a map, or all maps of a chunk if a chunk has several: then give at least as many patches, or an
    epoch misses some. An epoch visits each block once, in the order of `epoch_order`, and its visits are dealt to
    the lanes like cards: visit n is lane n % lanes's. A lane gives `per_block` patches of a visit, one after
    another, to its own places in the batch. So which patch sample k of a step is depends on (seed, step, k) alone.
    With at least as many lanes as samples in the batch, a rank, which has its own places, has its own lanes and
    blocks. Lanes that exceed the batch take turns, step by step; so workers share no block either, if their
    number divides that of the turns.

    A process holds at most lanes + max(lanes, BLOCKS_AHEAD) + 2 * batch visits, and reads MAPS_AT_ONCE blocks of a
    variable, each of them up to three times: compressed, decoded and as an array.
    """

    def __init__(self, patches: Patches, sampler: StepSampler, lanes: int, per_block: int):
        self.patches, self.sampler, self.lanes, self.per_block = patches, sampler, lanes, per_block
        self.store = copy(patches.store)  # opened anew: with a log of its own, for validation reads meanwhile
        self.turns = max(1, lanes // patches.batch_size)
        self.share = max(1, patches.batch_size // lanes)  # of a lane in the batches of its turn
        chunks = [field.encoding.get("preferred_chunks", {}) for field in patches.store.fields.values()]
        numbers = patches.places // max(chunk.get("time", 1) for chunk in chunks)
        self.edges = np.append(
            np.flatnonzero(np.diff(numbers, prepend=-1)), len(numbers)
        )  # of blocks, in times

    def __len__(self) -> int:
        return len(self.sampler)

    def address(self, step: int, k: int) -> tuple[int, int]:
        """The visit of which sample k of a step is a patch, and which of its patches it is."""
        lane = step % self.turns * self.patches.batch_size + k // self.share
        number = step // self.turns * self.share + k % self.share  # in the lane
        visit, patch = divmod(number, self.per_block)
        return visit * self.lanes + lane, patch

    def count_readers(self, workers: int) -> int:
        """How many workers read the same block, at most: each of W workers makes every W-th batch."""
        # In so many steps each lane uses up two blocks.
        steps = self.turns * math.ceil(2 * self.per_block / self.share)
        batches = islice(self.sampler, steps * self.sampler.args.accumulate)
        readers = defaultdict(set)
        for number, indices in enumerate(batches if workers > 1 else []):
            for index in indices:
                visit, _ = self.address(*index)
                readers[visit].add(number % workers)
        return max(map(len, readers.values()), default=1)

    def start(self, visit: int, threads: ThreadPoolExecutor) -> Block:
        """Draw the patches of a visit, a pure function of (seed, visit), and begin to read its block."""
        patches, n = self.patches, self.per_block
        epoch, position = divmod(visit, len(self.edges) - 1)
        block = epoch_order(patches.seed, epoch, len(self.edges) - 1)[position]
        times = np.arange(*self.edges[block : block + 2])
        rng = np.random.default_rng((PATCH_STREAM, patches.seed, visit))
        drawn = np.resize(rng.permutation(times), n)
        rows = rng.integers(len(patches.latitude) - patches.size, size=n, endpoint=True)
        columns = rng.integers(patches.last_column, size=n, endpoint=True)
        swaths = swath_masks(rng, n, patches.size)
        variables = self.store.args.variables
        fields = np.empty((n, len(variables), patches.size, patches.size), "float32")
        block, first = Block([], fields, drawn, rows, columns, swaths), patches.places[times[0]]
        region = {"time": slice(first, first + len(times))}
        for number, name in enumerate(variables):
            job = (name, self.store.fields.variables[name], region)
            block.readings.append(threads.submit(self.cut, block, number, job, drawn - times[0]))
        return block

    def cut(self, block: Block, number: int, job: tuple, times: np.ndarray) -> None:
        """Read a variable's maps, and keep no more of them than the patches."""
        maps = self.store.load(job)
        for patch, (time, row, column) in enumerate(zip(times, block.rows, block.columns)):
            block.fields[patch, number] = self.patches.cut(maps[time], row, column)

    def batch(self, samples: list[tuple[Block, int]]) -> dict[str, np.ndarray]:
        """A batch of these patches, as Patches.make has it, and what was read since the last one."""
        for block, _ in samples:
            for reading in block.readings:
                reading.result()
        parts = ([getattr(block, name)[patch] for block, patch in samples] for name in Block._fields[1:])
        batch = self.patches.make(*map(np.stack, parts))
        log = self.store.bucket.log
        requests = len(log)
        traffic = np.array([requests, sum(size for *_, size in log[:requests]), len(samples)])
        del log[:requests]  # threads go on to write more
        return batch | {"traffic": traffic}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """This process's batches, in order, while threads read those to come."""
        info, batches = get_worker_info(), iter(self.sampler)
        batches = islice(batches, info.id, None, info.num_workers) if info else batches
        threads = ThreadPoolExecutor(MAPS_AT_ONCE)
        self.store.fields, self.store.bucket.log.clear()  # of what was read to open it
        held, planned, ahead, taken = {}, deque(), 0, None
        most = max(self.lanes, BLOCKS_AHEAD)
        try:
            while True:
                while ahead < most and (indices := next(batches, None)):
                    samples = [self.address(*index) for index in indices]
                    new = dict.fromkeys(visit for visit, _ in samples if visit not in held)
                    held |= {visit: self.start(visit, threads) for visit in new}
                    planned.append((samples, len(new)))
                    ahead += len(new)
                if taken:  # what comes after it is on its way: the threads need not wait for us
                    yield self.batch(taken)
                if not planned:
                    return
                samples, new = planned.popleft()
                ahead -= new
                taken = [(held[visit], patch) for visit, patch in samples]
                current = {visit % self.lanes: visit for visit, _ in samples}  # a lane drops what it has left
                held = {n: block for n, block in held.items() if n >= current.get(n % self.lanes, n)}
        except GeneratorExit:  # nobody asks any more: leave no read behind, for a server that may end
            threads.shutdown(cancel_futures=True)
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def note_on_workers(blocks: Blocks, workers: int) -> str | None:
    """What to say if several workers read the same blocks; None if each block is read by one worker."""
    times = blocks.count_readers(workers)
    if times == 1:
        return None
    fewer = max(number for number in range(1, workers) if blocks.count_readers(number) == 1)
    remedy = f"with --num-workers {fewer} it is read once"
    return f"note: with --num-workers {workers} each block is read {times} times; {remedy}"


def make_loader(patches: Patches, args: argparse.Namespace, start=0, rank=0, world_size=1) -> DataLoader:
    """An ordinary DataLoader of a rank's batches, from step `start` on."""
    sampler = StepSampler(args, start, rank, world_size)
    blocks = Blocks(patches, sampler, args.shuffle_blocks, args.patches_per_block)
    if rank == 0 and (note := note_on_workers(blocks, max(1, args.num_workers))):
        print(note, file=sys.stderr)
    multiprocessing.set_forkserver_preload(PRELOADED)  # imports once for all workers
    workers = {"multiprocessing_context": args.start_method, "worker_init_fn": end_with_parent}
    workers["num_workers"] = args.num_workers
    return DataLoader(blocks, batch_size=None, **(workers if args.num_workers else {}))


def make_patches(args: argparse.Namespace) -> tuple[Patches, Patches, Patches]:
    """Patches to train on, to validate on and to test on; none is read yet.

    Climatology, standard deviation and masked cells, where a variable has no value, are the training times'.
    """
    store = Store(args)
    fields, taken, sets = store.fields, [], []
    for name in ("train_times", "validation_times", "test_times"):
        (first, last), times = getattr(args, name), []
        with suppress(TypeError, ValueError):  # not dates
            times = fields.time.sel(time=slice(first, last)).values
        if not len(times) or np.isin(times, taken).any():
            span = " to ".join(str(time)[:10] for time in fields.time.values[[0, -1]])
            refuse(f"--{name.replace('_', '-')} {first} {last}: give dates of {span} that no other set has")
        taken, sets = [*taken, *times], [*sets, times]
    statistics = load_statistics(store, args)[args.variables]
    if not all(np.array_equal(statistics[dim], fields[dim]) for dim in ("latitude", "longitude")):
        raise StoreError("its statistics are of another grid; make them anew")
    climatology = statistics.to_dataarray("variable").transpose("month", "variable", "latitude", "longitude")
    valid = climatology.notnull().any("month").all("variable")
    if not valid.any():
        refuse(f"--train-times {' '.join(args.train_times)}: a variable has no value in them; give others")
    units = [str(fields[name].attrs.get("units", name)).replace("**", "") for name in args.variables]
    data = xr.Dataset({"climatology": climatology.astype("float32"), "valid": valid}, {"time": fields.time})
    data["std"] = "variable", np.float32([statistics[name].attrs["std"] for name in args.variables])
    data["units"] = "variable", [unit.replace("m s-1", "m/s") for unit in units]
    data["places"] = "time", np.arange(fields.sizes["time"])
    training, *others = (data.sel(time=times) for times in sets)
    judging = [Patches(store, other, args.patch_size, JUDGED_SAMPLES, JUDGE_SEED) for other in others]
    return Patches(store, training, args.patch_size, args.batch_size, args.seed), *judging


def baselines(patches: Patches) -> dict[str, dict[str, float]]:
    """The RMSE, for each unit, of four fills without a network: the month's climatology, the nearest seen
    cell, and linear interpolation (Delaunay) of the fields, and of the anomalies."""
    names = ("climatology", "nearest neighbour", "linear interpolation", RIVAL)
    squares, weights = 0, 0
    for k, sample in enumerate(patches.__getitems__([(0, k) for k in range(JUDGED_SAMPLES)])):
        mean, anomaly = patches.fields(0, k, sample)
        seen, unseen = sample["input"][-1] > 0, sample["unseen"][0] > 0
        known, holes, values = np.argwhere(seen), np.argwhere(unseen), np.stack([mean + anomaly, anomaly])
        mean, truth = mean[:, unseen], values[0][:, unseen]
        nearest = linear = np.stack([mean, 0 * mean])  # of a patch in which nothing is seen
        if len(known):
            nearest = linear = griddata(known, values[..., seen].T, holes, method="nearest").T
            with suppress(QhullError):  # too few for a triangle
                linear = griddata(known, values[..., seen].T, holes, method="linear").T
            linear = np.where(np.isnan(linear), nearest, linear)  # outside the hull of the seen cells
        errors = np.stack([mean, nearest[0], linear[0], mean + linear[1]]) - truth
        squares += (sample["weight"][0, unseen] * errors**2).sum(axis=-1)
        weights += sample["weight"].sum()
    of_unit = {unit: np.sqrt(squares[:, pool].mean(axis=1) / weights) for unit, pool in patches.pools.items()}
    return {name: {unit: float(of_unit[unit][i]) for unit in of_unit} for i, name in enumerate(names)}


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions. GroupNorm sees one sample at a time, wherever the others are computed."""
    layers = []
    for channels in (channels_in, channels_out):
        convolution = nn.Conv2d(channels, channels_out, 3, padding=1, padding_mode="replicate")
        layers += [convolution, nn.GroupNorm(8, channels_out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A small U-Net, from (batch, variables + 1, H, W) to (batch, variables, H, W); 4 divides H and W."""

    def __init__(self, variables: int, width: int = 24):
        super().__init__()
        self.down1 = conv_block(variables + 1, width)
        self.down2 = conv_block(width, 2 * width)
        self.bottom = conv_block(2 * width, 4 * width)
        self.up2 = conv_block(4 * width + 2 * width, 2 * width)
        self.up1 = conv_block(2 * width + width, width)
        self.head = nn.Conv2d(width, variables, kernel_size=1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down1(x)
        middle = self.down2(self.shrink(fine))
        coarse = self.bottom(self.shrink(middle))
        middle = self.up2(torch.cat([self.grow(coarse), middle], dim=1))
        fine = self.up1(torch.cat([self.grow(middle), fine], dim=1))
        return self.head(fine)


def masked_sums(prediction: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squared error of the unseen cells, weighted by cos(latitude), and their count: sums, (2,).

    The loss is the first over the second, both of the whole batch. Ranks have unequally many unseen cells
    and unequally many samples: their own quotients would give a mean of means.
    """
    squares = batch["weight"] * (prediction - batch["target"]) ** 2
    return torch.stack([squares.sum() / prediction.shape[1], batch["unseen"].sum()])


def learning_rate_factor(step: int, max_steps: int) -> float:
    """Warm-up in a straight line over a tenth of the run, then a half cosine down to zero."""
    warmup = max(1, max_steps // 10)
    phase = math.pi * max(0, step - warmup) / max(1, max_steps - warmup)
    return min(1, (step + 1) / warmup) * 0.5 * (1 + math.cos(phase))


class FillGaps(LightningModule):
    """The U-Net, its loss, its optimizer and its metric: what is specific to the task, and no loop."""

    def __init__(self, options: dict, std: list[float], pools: dict[str, list[int]]):
        super().__init__()
        self.save_hyperparameters()  # into each checkpoint: load_from_checkpoint needs nothing else
        torch.manual_seed(options["seed"])  # the same weights on every rank
        self.model = UNet(len(std))
        self.mean_squares = nn.ModuleList(MeanMetric() for _ in pools)  # sums over all batches
        self.sums = self.traffic = 0

    def on_train_start(self) -> None:
        first, step = self.trainer.train_dataloader.dataset.sampler.start, self.trainer.global_step
        if first != step:  # as with a sampler that was made before Lightning restored its step
            raise RuntimeError(f"the sampler begins at step {first}, and training at step {step}")

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        sums = masked_sums(self.model(batch["input"]), batch)
        self.sums, self.traffic = self.sums + sums.detach(), self.traffic + batch["traffic"]
        return sums[0]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of the sums are here, averaged over micro-batches by Lightning and over ranks by DDP."""
        if distributed.is_initialized():
            distributed.all_reduce(self.sums)
        squares, unseen = self.sums[0], self.sums[1].clamp(min=1)
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / unseen
        for parameter in self.parameters():
            parameter.grad *= scale
        self.log("loss", squares / unseen, prog_bar=True)
        self.sums = 0

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        std = torch.tensor(self.hparams.std, device=self.device)[:, None, None]
        squares = (std * (self.model(batch["input"]) - batch["target"])) ** 2
        for mean_square, pool in zip(self.mean_squares, self.hparams.pools.values()):
            mean_square.update(squares[:, pool], batch["weight"])

    def on_validation_epoch_end(self) -> None:
        for mean_square, unit in zip(self.mean_squares, self.hparams.pools):
            test = "test " if self.trainer.testing else ""
            self.log(f"{test}rmse ({unit})", mean_square.compute().sqrt(), prog_bar=True)
            mean_square.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def configure_optimizers(self) -> dict:
        options = self.hparams.options
        optimizer = torch.optim.AdamW(self.parameters(), lr=options["learning_rate"])
        factor = partial(learning_rate_factor, max_steps=options["max_steps"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepCheckpoint(ModelCheckpoint):
    """Save after whole steps only: the first micro-batch after a resume would save half a step as a whole one."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def draw_fill(patches: Patches, prediction: np.ndarray) -> Figure:
    """Map sample 0, its wind's speed or else its first variable; prediction (variables, H, W) is scaled."""
    sample = patches[0, 0]
    (mean, anomaly), unseen = patches.fields(0, 0, sample), sample["unseen"][0] > 0
    error = np.where(unseen, patches.std * prediction - anomaly, 0)
    is_wind, fields = patches.pools == {"m/s": [0, 1]}, (mean + anomaly, mean + anomaly + error, error)
    truth, filled, error = (np.hypot(*field) if is_wind else field[0] for field in fields)
    panels = {"truth": truth, "seen by the satellite": np.where(unseen, np.nan, truth)}
    panels |= {"filled by the network": filled, "error of the fill": np.where(unseen, abs(error), np.nan)}
    time, row, column, _ = patches.sample(0, 0)
    y = patches.latitude[row : row + patches.size]
    x = patches.longitude[column] + patches.spacing * np.arange(patches.size)
    least, most = np.nanmin(truth), np.nanmax(truth)
    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, (title, field) in zip(figure.subplots(2, 2).flat, panels.items()):
        hue, low, high = ("magma_r", 0, (most - least) / 3) if "error" in title else ("viridis", least, most)
        mesh = axes.pcolormesh(x, y, field, cmap=hue, vmin=low, vmax=high)
        axes.set(title=title, xlabel="longitude, °E", ylabel="latitude, °N", facecolor="0.8")
        figure.colorbar(mesh, ax=axes, label=next(iter(patches.pools)))
    figure.suptitle(f"{str(patches.times[time])[:10]}, kept from training")
    return figure


def end_with_parent(worker: int) -> None:
    """End this worker when its rank is killed. torch watches the forkserver, which lives as long as its workers."""
    Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def measure(waits: list[float], works: list[float], batch_size: int, accumulate: int) -> dict:
    """Samples/s of the loop, the share of its time spent waiting for data, and the process's peak memory.

    From the seconds of each batch; the first step starts everything up and does not count. On a GPU they
    end when kernels are queued, not when they are done: chapter 5 times those.
    """
    figures, wait, seconds = {}, sum(waits[accumulate:]), sum(waits[accumulate:] + works[accumulate:])
    if seconds:  # else no step, or only the first
        figures["samples_per_second"] = batch_size * (len(works) // accumulate - 1) / seconds
        figures["data_wait_share"] = wait / seconds
    with suppress(ImportError):  # Windows has none
        import resource

        unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
        figures["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return figures


def report(figures: dict, args: argparse.Namespace, picture: Path) -> None:
    """Print what a reader wants to know of a run, in one block."""
    rmse, rival = figures["rmse"]["U-Net"], figures["rmse"][RIVAL]
    print(f"\nRMSE over the unseen cells of {' to '.join(args.test_times)}, {', '.join(rmse)}")
    for name, row in figures["rmse"].items():
        print(f"  {name:30}", *(f"{value:8.3f}" for value in row.values()))
    print(f"  against {RIVAL}", *(f"{rmse[unit] / rival[unit] - 1:+8.1%}" for unit in rmse))
    if "samples_per_second" in figures:
        share = f"{figures['data_wait_share']:.1%} of the time waiting for data"
        print(f"{figures['samples_per_second']:.1f} samples/s, {share}")
    if "requests_per_sample" in figures:
        size = f"{figures['bytes_per_sample'] / 1e6:.2f} MB"
        print(f"{figures['requests_per_sample']:.1f} requests and {size} for a sample")
    memory = figures.get("peak_memory_gb", math.nan)
    print(f"{figures['steps']} steps in {figures['seconds']:.0f} s, peak memory {memory:.1f} GB")
    print(f"picture: {picture}")


def run_make_store(*flags: str) -> None:
    """Run chapter 3's make_store.py; if it refuses, so do we."""
    script = CLOUD / "make_store.py"
    if not script.exists():
        refuse(f"--store: needs {script}, to make a store or its statistics; run it where it is")
    if subprocess.run([sys.executable, script, *flags]).returncode:
        sys.exit(2)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[None]:
    """Without --store, make the small store, unless it is whole, and serve it over S3 while the run goes on."""
    if args.store:
        yield
        return
    run_make_store()
    command = [sys.executable, CLOUD / "local_s3.py", "--until-stdin-ends"]  # which it does if we are killed
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as server:
        args.store, args.endpoint, args.anonymous = SMALL, server.stdout.readline().strip(), True
        if not args.endpoint:  # the server has said why
            sys.exit(2)
        yield


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    summary, show_defaults = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add, times = parser.add_argument, {"nargs": 2, "metavar": ("FIRST", "LAST")}
    add("--store", help="Zarr: a path, s3://, gs://, https://; if not given, a small one is made and served")
    add("--endpoint", metavar="URL", help="an S3 server other than AWS's")
    add("--anonymous", action="store_true", help="sign no request: for public buckets")
    add("--deadline", type=int, default=120, help="seconds for which a read that fails is tried again")
    add("--count-requests", action=argparse.BooleanOptionalAction, default=True, help="report GETs and bytes")
    add("--variables", nargs="+", default=VARIABLES, help="any number of the store's variables")
    add("--train-times", **times, default=TRAIN_TIMES, help="dates, or years, to train on")
    add("--validation-times", **times, default=VALIDATION_TIMES, help="to make every choice on")
    add("--test-times", **times, default=TEST_TIMES, help="to report on, and to choose nothing")
    add("--patch-size", type=int, default=64, help="cells along a side of a patch")
    add("--batch-size", type=int, default=8, help="samples in the global batch")
    add("--patches-per-block", type=int, default=8, help="cut from a map each time that it is read")
    add("--shuffle-blocks", type=int, help="maps that are mixed; if not given, four times the batch")
    add("--max-steps", type=int, default=200, help="optimizer steps in the whole run")
    add("--learning-rate", type=float, default=6e-3, help="AdamW's, at the end of the warm-up")
    add("--validate-every", type=int, default=100, help="steps between validations")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-every", type=int, default=10, help="steps between lines of the log")
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="where to compute")
    add("--devices", type=int, help="processes on each node; if not given, the launcher's, or one a GPU")
    add("--num-nodes", type=int, help="nodes; if not given, the launcher's, or one")
    add("--accumulate", type=int, default=1, help="micro-batches in which a rank computes its slice")
    add("--timeout", type=int, default=300, help="seconds to wait for another rank before giving up")
    add("--num-workers", type=int, default=0, help="processes that prepare batches, for each rank; 0: none")
    method = "spawn" if sys.platform == "win32" else "forkserver"
    add("--start-method", default=method, help="of those processes: forkserver or spawn")
    add("--seed", type=int, default=0, help="decides weights, order, patches and swaths")
    add("--output-dir", default=os.path.relpath(OUTPUTS), help="folder for the files of the run")
    add("--resume", nargs="?", const="last", metavar="CKPT", help="from last.ckpt or CKPT; auto: if any")
    args = parser.parse_args(argv)
    args.variables = list(dict.fromkeys(args.variables))  # each once
    for name, value in vars(args).items():
        least = {"patch_size": 16, "num_workers": 0, "seed": 0, "learning_rate": 0}.get(name, 1)
        if type(value) in (int, float) and not value >= least:
            refuse(f"--{name.replace('_', '-')} {value}: too small; give at least {least}")
    if args.start_method not in ("forkserver", "spawn"):
        reason = "the store's client has threads, which no fork copies: the workers would wait for ever"
        refuse(f"--start-method {args.start_method}: {reason}; give forkserver or spawn")
    if "://" not in (args.store or "://") and not Path(args.store).is_dir():
        refuse(f"--store {args.store}: no such folder; give a Zarr store, or a URL")
    urls = [urlsplit(url) for url in (args.store, args.endpoint) if url]
    if any("@" in url.netloc or (url.scheme and url.query) for url in urls):
        remedy = "give them in the environment, or --anonymous"
        refuse(f"--store, --endpoint: credentials in a URL would be saved with the run; {remedy}")
    if not re.match("https?://", args.endpoint or "http://"):
        refuse(f"--endpoint {args.endpoint}: give http://... or https://...")
    on_gpu = args.accelerator != "cpu" and torch.accelerator.is_available()
    found = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    if args.accelerator == "gpu" and not torch.accelerator.is_available():
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    if (args.devices or 1) > found:
        refuse(f"--devices {args.devices}: give up to {found}, the {'GPUs' if on_gpu else 'cores'} there are")
    launched = int(os.getenv("LOCAL_WORLD_SIZE") or os.getenv("SLURM_NTASKS_PER_NODE") or 0)
    if launched and args.devices not in (None, launched):
        refuse(f"--devices {args.devices}: the launcher has {launched} on each node; leave --devices out")
    args.devices = args.devices or launched or (found if on_gpu else 1)
    args.num_nodes = args.num_nodes or int(os.getenv("GROUP_WORLD_SIZE") or os.getenv("SLURM_NNODES") or 1)
    least = args.devices * args.num_nodes * args.accumulate
    if args.batch_size < least:
        reason = f"{args.devices} devices x {args.num_nodes} nodes x {args.accumulate} micro-batches"
        refuse(f"--batch-size {args.batch_size}: {reason} need at least {least}")
    args.shuffle_blocks = args.shuffle_blocks or 4 * args.batch_size
    if args.shuffle_blocks % args.batch_size and args.batch_size % args.shuffle_blocks:
        remedy = f"give a multiple or a divisor of --batch-size {args.batch_size}"
        refuse(f"--shuffle-blocks {args.shuffle_blocks}: {remedy}")
    if args.seed >= 2**64:
        refuse(f"--seed {args.seed}: too large; give less than 2**64")
    check_folder(args.output_dir)
    last = Path(args.output_dir, "last.ckpt")
    if args.resume in ("last", "auto"):
        args.resume = str(last) if args.resume == "last" or last.exists() else None
    return args


def check_folder(folder: str) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made."""
    path = Path(folder).absolute()
    try:
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        TemporaryFile(dir=existing).close()
    except OSError as error:
        refuse(f"--output-dir {folder}: {error.strerror}; give a folder that can be written to")


def check_resumable(checkpoint: str, args: argparse.Namespace) -> int:
    """The step of a checkpoint; refuse one that is not there, or of a run that this one cannot go on with."""
    if not Path(checkpoint).is_file():
        refuse(f"--resume {checkpoint}: no such file; to start anew, give no --resume")
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        missing = {"global_step", "hyper_parameters", "optimizer_states"} - saved.keys()
        options = dict(saved.get("hyper_parameters", {}).get("options", {}))
    except Exception as error:  # torch raises many kinds, depending on what the bytes look like
        refuse(f"--resume {checkpoint}: cannot be read ({type(error).__name__}); give a whole checkpoint")
    if missing:
        refuse(f"--resume {checkpoint}: has no {', '.join(sorted(missing))}; give a whole checkpoint")
    for name in DECISIVE.split():
        value, before = getattr(args, name), options.get(name)
        if value != before:
            flag = f"--{name.replace('_', '-')} {value}"
            refuse(f"{flag}: {checkpoint} has {before}; give that, or no --resume")
    return saved["global_step"]


@record  # leaves the first error of all ranks where torchrun finds it
def main(argv: list[str] | None = None) -> dict:
    """Train, judge and draw; return the headline figures on rank 0."""
    args = parse_arguments(argv)
    try:
        with served(args):
            return train(args)
    except StoreError as error:
        print(file=sys.stderr)  # below the progress bar
        reason = str(error).split("StoreError: ")[-1].strip()  # a worker's has its stack
        refuse(f"--store {args.store}: {reason}")
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, distributed.DistBackendError):
            raise
        print(f"\n{first_line(error)}", file=sys.stderr)
        reason = "its own last line, above or in that rank's log, says why"
        refuse(f"another rank failed, or does not answer; {reason}")


def train(args: argparse.Namespace) -> dict:
    """What main does once it has a store."""
    began = perf_counter()
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning|zarr")  # folders that exist, few workers
    warnings.filterwarnings("ignore", "Failed to open Zarr store with consolidated")  # goes on without
    start = check_resumable(args.resume, args) if args.resume else 0
    training, validation, test = make_patches(args)
    folder, log = Path(args.output_dir), f"resumed_at_{start}" if args.resume else ""
    model = FillGaps(vars(args), training.std.flatten().tolist(), training.pools)
    several = args.devices * args.num_nodes > 1
    every = args.checkpoint_every
    checkpoints = StepCheckpoint(folder, "last", every_n_train_steps=every, enable_version_counter=False)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=DDPStrategy(timeout=timedelta(seconds=args.timeout)) if several else "auto",
        max_epochs=1,  # StepSampler's only epoch is the whole run
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=args.validate_every * args.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=args.log_every,
        use_distributed_sampler=False,
        enable_model_summary=False,
        profiler=SimpleProfiler(),
        logger=CSVLogger(folder, "", log, flush_logs_every_n_steps=every),
        callbacks=[checkpoints, LearningRateMonitor(), TQDMProgressBar(args.log_every)],
    )
    rank, world_size = trainer.global_rank, trainer.world_size
    batches = make_loader(training, args, start, rank, world_size)
    judging = partial(
        DataLoader, sampler=[(0, k) for k in range(rank, JUDGED_SAMPLES, world_size)], batch_size=32
    )
    trainer.fit(model, batches, judging(validation), ckpt_path=args.resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    judged = trainer.test(model, judging(test), verbose=False)[0]
    if not trainer.is_global_zero:
        return {}

    spans = trainer.profiler.recorded_durations
    waits, works = spans["[_TrainingEpochLoop].train_dataloader_next"], spans["run_training_batch"]
    figures = {"steps": args.max_steps} | measure(waits, works, args.batch_size, args.accumulate)
    if args.count_requests and works:
        requests, size, samples = model.traffic.tolist()
        figures |= {"requests_per_sample": requests / samples, "bytes_per_sample": size / samples}
    rmse = {unit: judged[f"test rmse ({unit})"] for unit in test.pools}
    figures["rmse"] = baselines(test) | {"U-Net": rmse}
    with torch.no_grad():
        prediction = model.model(torch.from_numpy(test[0, 0]["input"])[None].to(model.device))
    draw_fill(test, prediction[0].cpu().numpy()).savefig(folder / "fill.png")
    figures["seconds"] = perf_counter() - began
    (folder / "summary.json").write_text(json.dumps(figures, indent=2))
    report(figures, args, folder / "fill.png")
    return figures


if __name__ == "__main__":
    if hasattr(faulthandler, "register"):  # kill -USR2 to any rank shows where it is; not on Windows
        faulthandler.register(signal.SIGUSR2)
    code = 0
    try:
        main()
    except SystemExit as end:  # the reason is the last line: no progress bar is drawn again below it
        code = end.code or 0
    sys.stdout.flush()
    os._exit(code)  # at once: threads of gloo may outlive its group, and abort a Python that ends in order
