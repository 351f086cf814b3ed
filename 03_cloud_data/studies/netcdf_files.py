"""The ways to read patches out of NetCDF files in a bucket."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter

import numpy as np
import xarray as xr
from fsspec.spec import AbstractBufferedFile
from obstore.fsspec import FsspecStore

from options import VARIABLES
from studies.server import BUCKETS, Server
from studies.stores import SIZE
from studies.ways import Get, Way

LAYOUT = "NetCDF files"
BLOCK_BYTES = 2**20  # which a reader of NetCDF files asks for at least


class BlockFile(AbstractBufferedFile):
    """A file in a bucket as s3fs and its like read it: in blocks, of which the last is kept."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        began = perf_counter()
        content = self.fs.cat_file(self.path, start, end)
        get = Get(self.path, began, perf_counter(), len(content))
        self.kwargs["log"].append(get)
        return content


class NetCDFFiles:
    """NetCDF files in a bucket, opened once, in the order of their times, from south to north."""

    def __init__(self, files: Iterable, variables: list[str]):
        self.variables = variables
        self.files = []
        for file in files:
            opened = xr.open_dataset(file, engine="h5netcdf", chunks=None)
            self.files.append(opened.isel(latitude=slice(None, None, -1)))
        self.ends = np.cumsum([file.sizes["time"] for file in self.files])

    def read(self, box: dict) -> np.ndarray:
        """The variables in a box, (variables, H, W).

        By slices: two of them where the box crosses the map's seam.
        """
        number = np.searchsorted(self.ends, box["time"], side="right")
        file = self.files[number]
        time = box["time"] - self.ends[number]  # counted from the file's end
        columns = np.arange(file.sizes["longitude"])[box["longitude"]]
        seams = np.flatnonzero(np.diff(columns) != 1) + 1
        parts = []
        for part in np.split(columns, seams):
            place = slice(part[0], part[-1] + 1)
            patch = file.isel(box | {"time": time, "longitude": place})
            parts.append([patch[name].values for name in self.variables])
        return np.concatenate(parts, axis=-1)


def ways_of_files(server: Server) -> list[Way]:
    """One by one, with threads, and one by one with obstore's own file object."""
    system = FsspecStore(
        "s3",
        endpoint=server.address,
        skip_signature=True,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    log: list[Get] = []
    keys = list_keys()
    blocks = []
    for key in keys:
        file = BlockFile(
            system, key, block_size=BLOCK_BYTES, cache_type="readahead", log=log
        )
        blocks.append(file)
    by_blocks = NetCDFFiles(blocks, VARIABLES)
    forgetful = NetCDFFiles(map(system.open, keys), VARIABLES)
    batch = SIZE["batch"]
    threads = ThreadPoolExecutor(batch)

    def read(apply: Callable, files: NetCDFFiles, boxes: list[dict]) -> np.ndarray:
        return np.stack(list(apply(files.read, boxes)))

    at_once = partial(read, threads.map, by_blocks)
    forgetting = partial(read, map, forgetful)
    return [
        Way(LAYOUT, "one by one", 1, partial(read, map, by_blocks), log),
        Way(LAYOUT, "threads", batch, at_once, log),
        Way(LAYOUT, "one by one, obstore's file", 1, forgetting, []),
    ]


def list_keys() -> list[str]:
    """Bucket and key of each file that the stores were made from, in the order of time."""
    folder = BUCKETS / f"files/{SIZE['days']}_days_{SIZE['resolution']:g}_degrees"
    paths = sorted(folder.glob("*.nc"))
    return [path.relative_to(BUCKETS).as_posix() for path in paths]
