"""The ways to read patches out of a Zarr store, and what each GET of a way took."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import obstore
import zarr
from obstore.store import from_url
from zarr.storage import WrapperStore

from command_line import make_location
from data import PatchDataset
from location import client_options
from options import parse_options
from store import READS_AT_ONCE, FieldReader
from studies.stores import SIZE
from task import make_data, make_datamodule


class Get(NamedTuple):
    """A GET: its object, when it was sent and when all of it was there, in seconds, its bytes."""

    key: str
    began: float
    ended: float
    size: int


class Way(NamedTuple):
    """A way to read a layout.

    `read` takes up to `at_once` boxes and returns (boxes, variables, H, W).
    """

    layout: str
    name: str
    at_once: int
    read: Callable[[list[dict]], np.ndarray]
    log: list[Get]  # since it was last cleared; empty where the client tells of none


class LoggedStore(WrapperStore):
    """Notes each GET."""

    def __init__(self, store):
        super().__init__(store)
        self.log: list[Get] = []

    async def get(self, key: str, *how, **more):
        began = perf_counter()
        content = await super().get(key, *how, **more)
        size = len(content) if content is not None else 0
        self.log.append(Get(key, began, perf_counter(), size))
        return content


def open_patches(flags: list[str]) -> PatchDataset:
    """The training patches of train.py with these flags. The store's GETs are logged."""
    options = parse_options("", flags)
    options, data = make_data(options, make_location(options))
    patches = make_datamodule(options, data).train_patches()
    store = patches.reader.store
    store._store = LoggedStore(store._store)  # between what counts and the client
    gc.freeze()  # as train.py does
    return patches


def log_of(reader: FieldReader) -> list[Get]:
    """The GETs of the reader of `open_patches`."""
    return reader.store._store.log


def draw_boxes(patches: PatchDataset, samples: int) -> list[dict]:
    """Where the first samples of a training run lie."""
    boxes = []
    for number in range(samples):
        step, k = divmod(number, patches.batch_size)
        boxes.append(patches.maker.box(patches.patch(step, k)))
    return boxes


def ways_of_zarr(layout: str, reader: FieldReader) -> list[Way]:
    """One sample after another, as in a notebook, and a batch at once, as train.py does."""
    fields = reader.open()

    def one_by_one(boxes: list[dict]) -> np.ndarray:
        values = []
        for box in boxes:
            patch = fields.isel(box)
            values.append([patch[name].values for name in reader.variables])
        return np.stack(values)

    log = log_of(reader)
    return [
        Way(layout, "one by one", 1, one_by_one, log),
        Way(layout, "train.py", SIZE["batch"], reader.read_at_once, log),
    ]


def ways_of_asyncio(layout: str, reader: FieldReader) -> list[Way]:
    """The reads of a batch at once without threads, in one event loop: by xarray, by Zarr."""
    runner = asyncio.Runner()
    names = reader.variables

    def read(start: Callable[[dict, str], Awaitable], boxes: list[dict]) -> np.ndarray:
        async def read_all() -> list[np.ndarray]:
            reads = [start(box, name) for box in boxes for name in names]
            return await asyncio.gather(*reads)

        values = np.stack(runner.run(read_all()))
        return values.reshape(len(boxes), len(names), *values.shape[1:])

    starts = {
        "xarray's load_async": partial(load_by_xarray, reader),
        "Zarr's AsyncArray": partial(load_by_zarr, reader, open_arrays(reader)),
    }
    log = log_of(reader)
    batch = SIZE["batch"]
    return [
        Way(layout, name, batch, partial(read, by), log) for name, by in starts.items()
    ]


def open_arrays(reader: FieldReader) -> dict[str, zarr.AsyncArray]:
    """Zarr's own array of each variable."""
    group = zarr.open_group(reader.store, mode="r")
    return {name: group[name].async_array for name in reader.variables}


async def load_by_xarray(reader: FieldReader, box: dict, name: str) -> np.ndarray:
    """A variable in a box, (H, W)."""
    loaded = await reader.fields.variables[name].isel(box).load_async()
    return loaded.values


async def load_by_zarr(
    reader: FieldReader, arrays: dict, box: dict, name: str
) -> np.ndarray:
    """A variable in a box, (H, W). The store's rows run from north to south."""
    height = reader.fields.sizes["latitude"]
    rows = box["latitude"]
    southwards = slice(height - rows.stop, height - rows.start)
    place = (box["time"], southwards, box["longitude"])
    values = await arrays[name].oindex.getitem(place)
    return values[::-1]


def way_of_obstore(layout: str, reader: FieldReader, boxes: list[dict]) -> Way:
    """The GETs that the boxes need, and nothing else: no chunk is decoded.

    Its `read` returns their sizes.
    """
    log = log_of(reader)
    log.clear()
    reader.read_at_once(boxes)
    asked = list(log)
    client = from_url(reader.location.url, **client_options(reader.location))

    async def read_all() -> list[int]:
        at_once = asyncio.Semaphore(READS_AT_ONCE)

        async def read(get: Get) -> int:
            async with at_once:
                content = await obstore.get_range_async(
                    client, get.key, start=0, length=get.size
                )
                return len(content)

        return await asyncio.gather(*map(read, asked))

    def read(_: list[dict]) -> np.ndarray:
        return np.array(asyncio.run(read_all()))

    return Way(layout, "GETs alone", len(boxes), read, [])
