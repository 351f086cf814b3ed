"""Other chunks, tried in memory: what a batch asks for, and what this process does with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import xarray as xr
import zarr
from zarr.storage import MemoryStore

from coordinates import find_dimensions
from data import Grid
from sampling import draw_patches
from store import CountingStore, FieldReader, open_store

SQUARES = (32, 64, 128, 256, 512)
REPEATS = 5


@dataclass(frozen=True)
class Replay:
    """A batch of patches out of chunks of this shape, without a network."""

    chunk: tuple[int, int]  # rows, columns
    requests: float  # of a sample
    size: float  # bytes of a sample, as stored
    seconds: float  # of this process, for a batch


def draw_boxes(reader: FieldReader, size: int, count: int, seed: int) -> list[dict]:
    """Boxes of patches at random times and places, across the map's seam if it has none."""
    fields = reader.open()
    grid = Grid(fields.latitude.values, fields.longitude.values)
    rng = np.random.default_rng(seed)
    times = rng.integers(fields.sizes["time"], size=count)
    width = fields.sizes["longitude"]
    boxes = []
    for patch in draw_patches(rng, times, grid.patch_space(size)):
        rows = slice(patch.row, patch.row + size)
        columns: slice | np.ndarray = slice(patch.column, patch.column + size)
        if columns.stop > width:
            columns = np.arange(columns.start, columns.stop) % width
        boxes.append({"time": patch.time, "latitude": rows, "longitude": columns})
    return boxes


def replay(reader: FieldReader, size: int, batch: int) -> Iterator[Replay]:
    """Read batches out of two maps of the store that are cut into chunks of several shapes."""
    stored = read_maps(reader)
    dims = {dim: name for name, dim in find_dimensions(stored).items()}
    height = stored.sizes[dims["latitude"]]
    width = stored.sizes[dims["longitude"]]
    own = stored[reader.variables[0]].encoding["preferred_chunks"]
    shapes = {(own[dims["latitude"]], own[dims["longitude"]]), (height, width)}
    shapes |= {(side, side) for side in SQUARES if side < min(height, width)}
    for rows, columns in sorted(shapes):
        lengths = {dims["latitude"]: rows, dims["longitude"]: columns}
        cut = cut_in_memory(reader, stored, lengths)
        seconds = []
        for repeat in range(REPEATS):
            boxes = draw_boxes(cut, size, batch, seed=repeat)
            began = perf_counter()
            cut.read_at_once(boxes)
            seconds.append(perf_counter() - began)
        requests, length, _ = cut.traffic.counts()
        samples = REPEATS * batch
        shape = rows, columns
        yield Replay(shape, requests / samples, length / samples, median(seconds))


def read_maps(reader: FieldReader) -> xr.Dataset:
    """Two times of the variables as they are stored, packed if they are packed.

    Of a further dimension, the first value is taken.
    """
    _, stored = open_store(reader.location)
    chosen = stored[reader.variables]
    dimensions = find_dimensions(chosen)
    (time,) = [name for name, dim in dimensions.items() if dim == "time"]
    further = {name: 0 for name in chosen.dims if name not in dimensions}
    middle = chosen.sizes[time] // 2
    return (
        chosen.isel(further | {time: slice(middle - 1, middle + 1)})
        .reset_coords(drop=True)
        .load()
    )


def cut_in_memory(
    reader: FieldReader, stored: xr.Dataset, lengths: dict[str, int]
) -> FieldReader:
    """A reader of the same values in memory, in chunks of these lengths, compressed as before."""
    memory = MemoryStore()
    encoding = {}
    for name in reader.variables:
        field = stored[name]
        chunks = tuple(lengths.get(str(dim), 1) for dim in field.dims)
        before = field.encoding
        kept = {key: before[key] for key in ("compressors", "filters") if key in before}
        encoding[name] = kept | {"chunks": chunks}
    version = zarr.open_group(reader.store, mode="r").metadata.zarr_format
    plain = stored.drop_encoding()
    plain.to_zarr(memory, encoding=encoding, zarr_format=version, consolidated=True)
    cut = FieldReader(reader.location, reader.variables)
    store = CountingStore(memory)
    cut.store = store
    cut.prepare(store, xr.open_zarr(store, chunks=None, decode_cf=False))
    return cut
