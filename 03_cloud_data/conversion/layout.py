"""How a store is cut into chunks, shards, blocks and slabs, and compressed."""

import math
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numcodecs import Blosc
from zarr.codecs import BloscCodec, Crc32cCodec

BLOCKS = 8  # of a slab, at most
NAN = np.float32(np.nan)


@dataclass(frozen=True)
class Layout:
    """Times are written in blocks, of whole chunks or shards; several make a slab."""

    chunk: list[int]  # times, rows, columns
    shard_times: int  # of whole maps; 0: no shards
    zarr_format: int
    zstd_level: int
    slab_times: int  # whose checksums are recorded together

    @property
    def block_times(self) -> int:
        """The times of a block."""
        unit = self.shard_times or self.chunk[0]
        return unit * math.ceil(self.slab_times / unit / BLOCKS)

    def slabs(self, times: int) -> range:
        """The first time of each slab of so many times."""
        return range(0, times, self.slab_times)

    def first_of(self, time: int) -> int:
        """The first time of the slab that a time is in."""
        return time - time % self.slab_times

    def slab(self, first: int, times: int) -> slice:
        """The times of a slab; the last one may be shorter."""
        return slice(first, min(first + self.slab_times, times))

    def blocks(self, slab: slice) -> list[slice]:
        """The blocks of a slab, in order."""
        starts = range(slab.start, slab.stop, self.block_times)
        return [slice(n, min(n + self.block_times, slab.stop)) for n in starts]


def choose_encoding(dataset: xr.Dataset, layout: Layout) -> dict[str, dict]:
    """How each array is compressed and cut: fields into chunks, and shards of whole maps."""
    if layout.zarr_format == 2:  # without checksums: a flipped bit is another value
        compressors = Blosc("zstd", layout.zstd_level, Blosc.BITSHUFFLE)
        missing = {"_FillValue": NAN}
    else:  # of the bytes as stored, because Blosc may crash on an object that was cut
        blosc = BloscCodec(cname="zstd", clevel=layout.zstd_level, shuffle="bitshuffle")
        compressors = [blosc, Crc32cCodec()]
        missing = {"fill_value": NAN, "_FillValue": None}
    packing = {"compressors": compressors, "_FillValue": None}
    encoding = {}
    for name, coordinate in dataset.coords.items():
        encoding[name] = packing | {"chunks": coordinate.shape}
    for name, field in dataset.data_vars.items():
        times, *cells = layout.chunk
        chunks = (
            times,
            *map(min, cells, field.shape[1:]),
        )  # an append may need all times
        encoding[name] = packing | missing | {"chunks": chunks}
        if layout.shard_times:
            shard = [layout.shard_times]
            for cells, size in zip(chunks[1:], field.shape[1:]):
                shard.append(math.ceil(size / cells) * cells)
            encoding[name]["shards"] = tuple(shard)
    if "time" in encoding:
        encoding["time"]["dtype"] = "int64"  # of the longest unit that is exact
    return encoding
