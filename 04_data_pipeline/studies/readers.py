"""The readers that compare.py compares: other libraries, ours, and bare GETs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import dask
from torch.utils.data import DataLoader, Dataset

from command_line import make_location
from data import Data, PatchDataset
from diagnose import OneByOne
from options import Options
from steps import StepSampler
from store import READS_AT_ONCE, FieldReader
from studies.field_readers import DaskReader, TensorStoreReader, XarrayReader
from studies.limit import Objects
from studies.map_readers import (
    read_insitubatch,
    read_xbatcher_maps,
    read_xbatcher_samples,
)
from task import make_datamodule
from workers import worker_options


class Setting(NamedTuple):
    """How a reader is set: patches cut from a map that is read, and workers."""

    patches_per_block: int
    num_workers: int = 0


class Resume(NamedTuple):
    """Whether a run can go on to the bit, and by what, or why not."""

    exact: bool | None
    reason: str


@dataclass(frozen=True)
class Reader:
    """A way to get batches, and what its rows say of it."""

    role: str
    read: Callable[[Options, Data], Iterable]
    settings: list[Setting]
    resume: Resume
    package: str | None = None  # whose version is written down
    command: str = "uv run --group peers python compare.py"  # that has the package
    what: str = "batches"

    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def read_samples(
    field_reader: type[FieldReader], options: Options, data: Data
) -> DataLoader:
    """Chapter 3's samples in chapter 3's order, read one after another."""
    samples = OneByOne(make_dataset(field_reader, options, data))
    return load_samples(samples, options)


def read_dask_batches(options: Options, data: Data) -> DataLoader:
    """A batch's samples are one graph, with as many threads as chapter 3's reads.

    Dask's own number is that of the cores, which only wait.
    """
    dask.config.set(scheduler="threads", num_workers=READS_AT_ONCE)
    return load_samples(make_dataset(DaskReader, options, data), options)


def read_blocks(
    field_reader: type[FieldReader], options: Options, data: Data
) -> DataLoader:
    """This chapter's loader, whose threads read whole maps by a reader of fields."""
    reader = field_reader(make_location(options), options.variables)
    module = make_datamodule(options, replace(data, reader=reader))
    return module.train_loader()


def read_objects(decoded: bool, options: Options, data: Data) -> DataLoader:
    """The objects of whole maps, of which no batch is made."""
    objects = Objects(options, data, decoded)
    workers = worker_options(options.num_workers, options.start_method)
    return DataLoader(objects, batch_size=None, **workers)


def make_dataset(
    field_reader: type[FieldReader], options: Options, data: Data
) -> PatchDataset:
    """Chapter 3's dataset with another reader of fields, which opens the store anew."""
    maker = data.maker(data.training, options.patch_size)
    reader = field_reader(make_location(options), options.variables)
    return PatchDataset(maker, reader, options.batch_size, options.seed)


def load_samples(samples: Dataset, options: Options) -> DataLoader:
    batches = StepSampler(options.batch_size, options.max_steps)
    workers = worker_options(options.num_workers, options.start_method)
    return DataLoader(samples, batch_sampler=batches, **workers)


NAIVE = "as users call it"
BEST = "at its best"
ONE = [Setting(1)]
BLOCKS = [Setting(1), Setting(8), Setting(32)]
ONE_WITH_WORKERS = [Setting(1, num_workers=4)]
BLOCKS_WITH_WORKER = [*BLOCKS, Setting(8, num_workers=1), Setting(32, num_workers=1)]
BLOCKS_OF_TWO = [*BLOCKS, Setting(8, num_workers=2)]

read_by_xarray = partial(read_samples, XarrayReader)
read_by_dask = partial(read_samples, DaskReader)
read_by_tensorstore = partial(read_samples, TensorStoreReader)
read_blocks_by_tensorstore = partial(read_blocks, TensorStoreReader)
read_our_blocks = partial(read_blocks, FieldReader)
read_and_decode = partial(read_objects, True)
read_bytes = partial(read_objects, False)

SAMPLER = (
    "by chapter 3's sampler, which asks for samples by number; no order of its own"
)
BY_SAMPLER = Resume(True, SAMPLER)
LOADER = "by our loader, for which it reads the maps; no order of its own"
BY_LOADER = Resume(True, LOADER)
BY_ORDER = Resume(True, "order is a function of (seed, step)")
GRID = "DataLoader's shuffle is not seeded by step; it knows only the patches of a fixed grid"
NO_STEP = Resume(False, GRID)
ITEMS = "no seeded order and no place in it; the times that fill no item are left out"
NO_ORDER = Resume(False, ITEMS)
NO_PLACE = Resume(False, "order is a function of (seed, epoch); no place in an epoch")
NO_BATCHES = Resume(None, "gives no batches")

TENSORSTORE = "tensorstore"
XBATCHER = "xbatcher"
INSITUBATCH = "insitubatch"
WITH_PYTHON_3_12 = "uv run --python 3.12 --group peers python compare.py"
READERS = {
    "naive xarray": Reader(NAIVE, read_by_xarray, ONE, BY_SAMPLER),
    "xarray, workers": Reader(BEST, read_by_xarray, ONE_WITH_WORKERS, BY_SAMPLER),
    "Dask, a sample": Reader(NAIVE, read_by_dask, ONE, BY_SAMPLER, "dask"),
    "Dask, a batch": Reader(BEST, read_dask_batches, ONE, BY_SAMPLER, "dask"),
    "xbatcher, a sample": Reader(NAIVE, read_xbatcher_samples, ONE, NO_STEP, XBATCHER),
    "xbatcher, whole maps": Reader(
        BEST, read_xbatcher_maps, BLOCKS, NO_ORDER, XBATCHER
    ),
    "insitubatch": Reader(
        BEST, read_insitubatch, BLOCKS, NO_PLACE, INSITUBATCH, WITH_PYTHON_3_12
    ),
    "tensorstore, a sample": Reader(
        NAIVE, read_by_tensorstore, ONE, BY_SAMPLER, TENSORSTORE
    ),
    "tensorstore, whole maps": Reader(
        BEST, read_blocks_by_tensorstore, BLOCKS, BY_LOADER, TENSORSTORE
    ),
    "ours": Reader("ours", read_our_blocks, BLOCKS_WITH_WORKER, BY_ORDER),
    "limit": Reader("limit", read_and_decode, BLOCKS, NO_BATCHES, what="bytes decoded"),
    "bare GETs": Reader("server", read_bytes, BLOCKS_OF_TWO, NO_BATCHES, what="bytes"),
}
