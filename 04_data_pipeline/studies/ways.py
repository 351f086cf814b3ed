"""The ways to make batches that are compared: their loaders, rates and costs."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from time import perf_counter
from typing import NamedTuple

import numpy as np
import psutil
import torch
import xarray as xr
from dask.distributed import get_client
from obstore.store import from_url
from torch.utils.data import DataLoader, Dataset
from zarr.storage import ObjectStore

from command_line import make_location
from data import Data, PatchDataset, Sample
from location import client_options
from model import masked_sums
from options import Options, parse_options
from steps import StepSampler
from store import FieldReader
from studies.measuring import children, cpu_seconds
from studies.server import Server
from studies.stores import SIZE, store_flags
from task import make_data, make_datamodule, make_model
from workers import worker_options

SLOTS = 32  # train.py's default is four times the batch
Step = Callable[[dict], None]


class Way(NamedTuple):
    """A way to make batches; the defaults are the final loader."""

    reads: str = "blocks"  # "batch": all its reads at once; "naive"; "Dask": with it
    layout: str = "whole maps"
    num_workers: int = 0
    patches_per_block: int = 8
    prefetch_factor: int = 2
    start_method: str = "forkserver"
    scheduler: str = "threads"  # Dask's; "synchronous", "processes", or an address


NAIVE = Way("naive")
BATCH = Way("batch")  # chapter 3's
FINAL = Way()


class Naive(Dataset):
    """What people write: open the store by xarray, and load a sample in `__getitem__`.

    `dataset` says which samples, and makes them of what is read. `scheduler` is Dask's;
    None: without Dask.
    """

    def __init__(self, dataset: PatchDataset, scheduler: str | None = None):
        self.dataset = dataset
        self.scheduler = scheduler

    @cached_property  # each worker opens the store for itself
    def fields(self) -> xr.Dataset:
        reader = self.dataset.reader
        client = from_url(reader.location.url, **client_options(reader.location))
        store = ObjectStore(client, read_only=True)
        chunks = None if self.scheduler is None else "auto"
        return xr.open_zarr(store, chunks=chunks)[reader.variables]

    @cached_property
    def loading(self) -> dict:
        """What `load` is told of Dask's scheduler."""
        if self.scheduler is None:
            return {}
        if "://" in self.scheduler:
            return {"scheduler": get_client(self.scheduler)}
        return {"scheduler": self.scheduler}

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        maker = self.dataset.maker
        patch = self.dataset.patch(*index)
        box = maker.box(patch)
        # The store's rows run from north to south, those of patches from south to north.
        rows = box["latitude"]
        height = self.fields.sizes["latitude"]
        box["latitude"] = slice(height - rows.stop, height - rows.start)
        fields = self.fields.isel(box).load(**self.loading)
        values = np.stack([fields[name].values[::-1] for name in fields])
        batch = maker.make_batch([Sample(patch, values)])
        return {name: array[0] for name, array in batch.items()}


@lru_cache
def open_data(layout: str, server: Server) -> tuple[Options, Data]:
    """What train.py makes of a layout's store, with its options."""
    options = parse_options("", store_flags(layout, server, "--shuffle-slots", SLOTS))
    return make_data(options, make_location(options))


def open_dataset(layout: str, server: Server) -> PatchDataset:
    """Chapter 3's training patches. Their store is opened at the first read."""
    options, data = open_data(layout, server)
    reader = FieldReader(data.reader.location, options.variables)
    maker = data.maker(data.training, options.patch_size)
    return PatchDataset(maker, reader, SIZE["batch"], options.seed)


def make_loader(
    way: Way, server: Server, steps: int = 2000, persistent: bool = False
) -> DataLoader:
    """The DataLoader of a way. `steps` and `persistent` are not for blocks."""
    if way.reads == "blocks":
        options, data = open_data(way.layout, server)
        options = replace(
            options,
            num_workers=way.num_workers,
            start_method=way.start_method,
            patches_per_block=way.patches_per_block,
        )
        return make_datamodule(options, data).train_loader()
    dataset: Dataset = open_dataset(way.layout, server)
    if way.reads != "batch":
        scheduler = way.scheduler if way.reads == "Dask" else None
        dataset = Naive(dataset, scheduler)
    batches = StepSampler(SIZE["batch"], steps)
    if not way.num_workers:
        return DataLoader(dataset, batch_sampler=batches)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        prefetch_factor=way.prefetch_factor,
        persistent_workers=persistent,
        **worker_options(way.num_workers, way.start_method),
    )


def begin(loader: DataLoader) -> tuple[Iterator[dict], list[psutil.Process]]:
    """A loader's batches, and the workers that were started for them."""
    before = multiprocessing.active_children()
    batches = iter(loader)
    started = [
        child for child in multiprocessing.active_children() if child not in before
    ]
    return batches, [psutil.Process(child.pid) for child in started]


class Plan(NamedTuple):
    """How many batches come from stock, and after how many all begins anew."""

    stock: int
    period: int  # a wave of workers, or a read of each slot


def plan(way: Way) -> Plan:
    """When a way's rate and cost can be measured."""
    if way.reads == "blocks":
        period = max(1, SLOTS * way.patches_per_block // SIZE["batch"])
        return Plan(2 * period, period)
    stock = max(1, 2 * way.num_workers * way.prefetch_factor)
    return Plan(stock, max(1, way.num_workers))


def no_step(batch: dict) -> None:
    """Nothing is done with the batch."""


def measure(way: Way, server: Server, seconds: float, step: Step = no_step) -> dict:
    """Iterate for some seconds and to the end of a period, when the stock is used up.

    Returns samples/s, the seconds to the first batch, threads, and what a sample costs in
    requests, bytes and CPU, of the server and of all else.
    """
    loader = make_loader(way, server)
    period = plan(way).period
    began = perf_counter()
    batches, workers = begin(loader)
    next(batches)
    first = perf_counter() - began
    use_stock(batches, plan(way), seconds, step)
    before = server.counts()
    cpu_before = cpu_seconds()
    start = perf_counter()
    samples = 0
    for number in count(1):
        batch = next(batches)
        step(batch)
        samples += len(batch["target"])
        took = perf_counter() - start
        if number % period == 0 and took > seconds:
            break
    requests, size, server_cpu = (server.counts() - before).tolist()
    client_cpu = cpu_seconds() - cpu_before
    return {
        "samples": samples,
        "samples_per_second": samples / took,
        "first_batch_s": first,
        "requests_per_sample": requests / samples,
        "bytes_per_sample": size / samples,
        "client_cpu_ms": 1e3 * client_cpu / samples,
        "server_cpu_ms": 1e3 * server_cpu / samples,
    } | count_threads(workers)


def use_stock(batches: Iterator[dict], plan: Plan, seconds: float, step: Step) -> None:
    """Use up the stock, and while there is time also what is made meanwhile.

    One batch came before, and a whole number of periods has come after.
    """
    began = perf_counter()
    for number in count(1):
        in_time = perf_counter() - began < seconds
        enough = plan.stock if in_time else plan.stock / 2
        if number % plan.period == 0 and number >= enough:
            return
        step(next(batches))


def count_threads(workers: list[psutil.Process]) -> dict:
    """Threads of this process, of each worker, and of all others, such as Dask's."""
    of_workers = [worker.num_threads() for worker in workers]
    of_all = sum(child.num_threads() for child in children())
    return {
        "threads": psutil.Process().num_threads(),
        "worker_threads": of_workers,
        "other_threads": of_all - sum(of_workers),
    }


def make_step(server: Server) -> Step:
    """A step of training by hand: forward, backward, AdamW."""
    options, data = open_data("whole maps", server)
    module = make_model(options, data)
    optimizer = torch.optim.AdamW(module.parameters(), options.learning_rate)

    def step(batch: dict[str, torch.Tensor]) -> None:
        squares, unseen = masked_sums(module.model(batch["input"]), batch)
        (squares / unseen).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
