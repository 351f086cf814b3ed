"""Libraries that bring whole maps, or patches of a grid, and batches of what they bring."""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import dask
import numpy as np
import xarray as xr
from torch.utils.data import DataLoader, Dataset

from command_line import make_location
from data import Data, PatchMaker, Sample
from location import client_options
from options import Options
from sampling import PATCH_STREAM, Patch, draw_patches, swath_masks
from studies.field_readers import DaskReader
from studies.limit import THREADS


class Maps(NamedTuple):
    """Whole maps, (n, latitude, longitude) of each variable, and their times in the period."""

    variables: list[np.ndarray]
    times: np.ndarray


def read_xbatcher_maps(options: Options, data: Data) -> Iterator[dict]:
    """xbatcher at its best: an item is whole maps, of times in random order."""
    dask.config.set(scheduler="threads", num_workers=THREADS)
    return make_batches(options, data, xbatcher_maps(options, data))


def read_insitubatch(options: Options, data: Data) -> Iterator[dict]:
    """insitubatch: a batch is whole maps, of as many chunks as we have slots."""
    return make_batches(options, data, insitubatch_maps(options, data))


def make_batches(
    options: Options, data: Data, items: Iterator[Maps]
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of patches, `patches_per_block` of each map; those of an item are mixed."""
    maker = data.maker(data.training, options.patch_size)
    rng = np.random.default_rng((PATCH_STREAM, options.seed))
    size = options.batch_size
    for maps in items:
        samples = cut_patches(maker, maps, options.patches_per_block, rng)
        rng.shuffle(samples)
        whole = len(samples) // size * size
        for first in range(0, whole, size):
            yield maker.make_batch(samples[first : first + size])


def cut_patches(
    maker: PatchMaker, maps: Maps, per_map: int, rng: np.random.Generator
) -> list[Sample]:
    """So many patches of each map."""
    every = np.arange(len(maps.times))
    numbers = np.repeat(every, per_map)
    patches = draw_patches(rng, maps.times[numbers], maker.space)
    samples = []
    for number, patch in zip(numbers, patches):
        values = [maker.cut(variable[number], patch) for variable in maps.variables]
        samples.append(Sample(patch, np.stack(values)))
    return samples


def xbatcher_maps(options: Options, data: Data) -> Iterator[Maps]:
    """Items of xbatcher's: a batch's number of maps. All chunks of an item are read at once."""
    from xbatcher import BatchGenerator

    rng = np.random.default_rng(options.seed)
    times = rng.permutation(len(data.training.positions))
    winds = open_lazily(options, data).isel(time=times)
    size = options.batch_size
    shape = {**winds.sizes, "time": size}
    generator = BatchGenerator(winds, shape)
    while True:
        for number in rng.permutation(len(generator)):
            item = generator[int(number)]
            variables = [item[name].values for name in options.variables]
            first = number * size
            yield Maps(variables, times[first : first + size])


def insitubatch_maps(options: Options, data: Data) -> Iterator[Maps]:
    """Batches of insitubatch's, each epoch in an order of its own."""
    dataset = make_insitu_dataset(options, data)
    first = data.training.positions[0]
    for epoch in count():
        dataset.set_epoch(epoch)
        for batch in dataset.train:
            variables = []
            for name in options.variables:
                southwards = batch.arrays[name]
                variables.append(southwards[:, ::-1])
            yield Maps(variables, batch.sample_indices - first)


def make_insitu_dataset(options: Options, data: Data) -> Any:
    """The training's maps. The pool holds two windows of chunks, and so not all data."""
    import insitubatch

    location = make_location(options)
    client = client_options(location)
    store = insitubatch.obstore_store(location.url, **client)
    names = options.variables
    geometries = insitubatch.open_geometries(store, variables=names)
    geometry = geometries[names[0]]
    first, last = data.training.positions[[0, -1]].tolist()
    span = (first, last + 1)
    training = insitubatch.split_by_chunk(
        geometry, fractions=(1, 0, 0), sample_range=span
    )
    chunks = options.batch_size // geometry.sample_chunk_size
    return insitubatch.InSituDataset(
        store,
        training,
        geometries=geometries,
        batch_size=options.batch_size,
        block_chunks=max(1, chunks),
        max_inflight=THREADS,
        seed=options.seed,
    )


def read_xbatcher_samples(options: Options, data: Data) -> Iterator[dict]:
    """xbatcher as its documentation has it: an item is a patch, and a DataLoader shuffles."""
    items = GridPatches(options, data)
    loader = DataLoader(
        items,
        options.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=items.maker.make_batch,
    )
    while True:
        yield from loader


class GridPatches(Dataset):
    """The patches of a fixed grid over all maps, as xbatcher cuts them.

    xbatcher's own MapDataset gives tensors that do not say where they lie.
    """

    def __init__(self, options: Options, data: Data):
        from xbatcher import BatchGenerator

        self.seed = options.seed
        self.maker = data.maker(data.training, options.patch_size)
        size = options.patch_size
        shape = {"time": 1, "latitude": size, "longitude": size}
        self.generator = BatchGenerator(open_lazily(options, data), shape)

    def __len__(self) -> int:
        return len(self.generator)

    def __getitem__(self, number: int) -> Sample:
        item = self.generator[number]
        values = [item[name].values[0] for name in self.maker.variables]
        rng = np.random.default_rng((PATCH_STREAM, self.seed, number))
        seen = swath_masks(rng, 1, self.maker.space.size)
        patch = Patch(*self.find(item), seen[0])
        return Sample(patch, np.stack(values))

    def find(self, item: xr.Dataset) -> tuple[int, int, int]:
        """Time, row and column of an item's first cell."""
        grid = self.maker.grid
        time = np.searchsorted(self.maker.period.dates, item.time.values[0])
        row = np.searchsorted(grid.latitude, item.latitude.values[0])
        column = np.searchsorted(grid.longitude, item.longitude.values[0])
        return int(time), int(row), int(column)


def open_lazily(options: Options, data: Data) -> xr.Dataset:
    """The training's maps as Dask's arrays."""
    reader = DaskReader(make_location(options), options.variables)
    return reader.lazy.isel(time=data.training.positions)
