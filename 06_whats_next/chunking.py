"""How a store is cut into chunks, and what it costs to read a map."""

from math import ceil, prod

import xarray as xr

from coordinates import find_dimensions
from fields import select_present

# From these on, a block is worth a note.
MANY_CHUNKS = 256
MANY_BYTES = 1e9


def count_times_per_chunk(dataset: xr.Dataset, names: list[str]) -> int:
    """How many times a chunk holds; in a sharded store, the chunk inside the shard."""
    named = select_present(dataset, names)
    sizes = [1]
    for coordinate, dimension in find_dimensions(named).items():
        if dimension == "time":
            for variable in named.data_vars.values():
                chunks = variable.encoding.get("preferred_chunks", {})
                sizes.append(chunks.get(coordinate, 1))
    return max(sizes)


def explain_blocks(dataset: xr.Dataset, names: list[str], times: int) -> str | None:
    """What it takes to read whole maps of so many `times`, if that is a lot.

    Chunks that are long in time and small on the grid suit time series, and no maps.
    Of a further dimension, all values in a chunk are read with the chosen one.
    """
    named = select_present(dataset, names)
    dimensions = find_dimensions(named)
    on_grid = [name for name, dim in dimensions.items() if dim != "time"]
    chunks = 0
    size = 0
    for variable in named.data_vars.values():
        along = variable.encoding.get("preferred_chunks", {})
        cells = [variable.sizes[dim] for dim in on_grid]
        chunks += prod(ceil(n / along.get(dim, n)) for dim, n in zip(on_grid, cells))
        beside = [along.get(d, 1) for d in variable.dims if d not in dimensions]
        size += times * prod(cells) * prod(beside) * variable.dtype.itemsize
    if chunks < MANY_CHUNKS and size < MANY_BYTES:
        return None
    remedy = "to read whole maps quickly, write the store anew, with a map in a chunk"
    cost = f"{chunks:,} chunks, {size / 1e6:,.4g} MB with all their times"
    return f"a map is read in {cost}; {remedy}"
