"""NetCDF files read where they are, beside the store that they can be converted to."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import icechunk
import numpy as np
import xarray as xr
from tqdm import tqdm

import make_references
from location import Location
from make_references import BRANCH
from options import VARIABLES
from probing.replay import draw_boxes
from results import spread
from store import FieldReader
from studies.server import BUCKETS, Server, serve
from studies.stores import SIZE, full_or_quick, run_make_store
from weather import make_year, read_monthly

LATENCIES = (5, 30, 100)  # ms to the first byte
DAYS, FILES = 48, 2
# Of the files: a map, a part of a map, and a part of a map at all times of the file.
CHUNKS = ((1, 721, 1440), (1, 181, 360), (24, 91, 180))
FEW_CHUNKS = ((1, 19, 36), (12, 10, 18))  # under --quick
CONVERTED = "converted"
COPIED = "converted, in Icechunk"
FOLDER = "layouts/references"  # bucket and key of what is made here


@dataclass(frozen=True)
class Layout:
    """A way in which the same winds are stored."""

    name: str
    chunk: tuple[int, int, int]
    key: str
    icechunk: str | None = BRANCH

    def open(self, server: Server) -> FieldReader:
        """A reader over S3."""
        place = Location(
            f"s3://{FOLDER}/{self.key}",
            endpoint=server.address,
            anonymous=True,
            icechunk=self.icechunk,
        )
        reader = FieldReader(place, VARIABLES)
        reader.open()
        return reader


def references(repeats: int) -> list[dict]:
    """A row for each latency and layout: samples/s, and what a sample and its making take."""
    folder = BUCKETS / FOLDER
    shutil.rmtree(
        folder, ignore_errors=True
    )  # references to files of before would not do
    chunks = full_or_quick(CHUNKS, FEW_CHUNKS)
    for chunk in chunks:
        write_files(folder / name_of(chunk), chunk)
    rows = []
    for latency in full_or_quick(LATENCIES, (5,)):
        with serve(latency) as server:
            layouts, making = make_layouts(folder, chunks, server)
            found = compare(layouts, server, repeats)
        for layout, row in zip(layouts, found):
            about = {
                "latency_ms": latency,
                "layout": layout.name,
                "chunk": layout.chunk,
            }
            rows.append(about | row | making.get(layout.key, {}))
    return rows


def samples_in_epoch(reader: FieldReader) -> int:
    """As many patches as have the cells of the store."""
    sizes = reader.open().sizes
    return sizes["time"] * sizes["latitude"] * sizes["longitude"] // SIZE["patch"] ** 2


def write_files(folder: Path, chunk: tuple[int, ...]) -> None:
    """NetCDF files of these chunks, shuffled and deflated, as CDS and NASA give them."""
    folder.mkdir(parents=True)
    encoding = {"chunksizes": chunk, "zlib": True, "complevel": 4, "shuffle": True}
    monthly = read_monthly()
    for number, days in enumerate(np.array_split(np.arange(DAYS), FILES)):
        winds = make_year(days.astype("timedelta64[D]"), SIZE["resolution"], monthly)
        path = folder / f"{number}.nc"
        winds.to_netcdf(path, encoding=dict.fromkeys(VARIABLES, encoding))


def make_layouts(folder: Path, chunks: tuple, server: Server) -> tuple[list, dict]:
    """References to the files over S3, and the converted store; what the making took."""
    layouts, making = [], {}
    for chunk in chunks:
        name = name_of(chunk)
        layout = Layout("by reference", chunk, f"{name}.icechunk")
        target = folder / layout.key
        shutil.rmtree(target, ignore_errors=True)
        flags = ["--source", f"s3://{FOLDER}/{name}/*.nc", "--source-anonymous"]
        flags += ["--source-endpoint", server.address, "--store", str(target)]
        began = perf_counter()
        make_references.main(flags)
        making[layout.key] = describe(target, began)
        layouts.append(layout)
    flags += ["--store", folder / "winds.zarr"]
    shutil.rmtree(folder / "winds.zarr", ignore_errors=True)
    began = perf_counter()
    run_make_store(*flags)
    making["winds.zarr"] = describe(folder / "winds.zarr", began)
    copy_to_icechunk(folder / "winds.zarr", folder / "winds.icechunk")
    chunk = (1, 128, 128)
    layouts.append(Layout(CONVERTED, chunk, "winds.zarr", None))
    layouts.append(Layout(COPIED, chunk, "winds.icechunk"))
    return layouts, making


def describe(target: Path, began: float) -> dict:
    """The seconds since then, and the bytes that were written."""
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {"making_seconds": perf_counter() - began, "written_mb": size / 1e6}


def copy_to_icechunk(store: Path, target: Path) -> None:
    """The same chunks of the same bytes, in a repository."""
    if target.exists():
        return
    storage = icechunk.local_filesystem_storage(str(target))
    session = icechunk.Repository.create(storage).writable_session(BRANCH)
    stored = xr.open_zarr(store, chunks=None, decode_cf=False)[VARIABLES]
    stored.to_zarr(session.store, consolidated=False)
    session.commit("a copy of the converted store")


def compare(layouts: list[Layout], server: Server, repeats: int) -> list[dict]:
    """Read the same patches of each layout, in turn, several times."""
    readers = [layout.open(server) for layout in layouts]
    for reader in readers:
        # For connections, and for the parts of an index that say what is where.
        read_batch(reader, server, seed=repeats)
    found: list[list[np.ndarray]] = [[] for _ in readers]
    for seed in tqdm(range(repeats), "batches", disable=None):
        for each, reader in zip(found, readers):
            each.append(read_batch(reader, server, seed))
    rows = []
    for each, reader in zip(found, readers):
        rates, requests, sizes = np.transpose(each)
        row = {"samples_per_second": spread(rates.tolist())}
        row["requests"] = float(requests.mean())
        row["mb"] = float(sizes.mean() / 1e6)
        rows.append(row | {"samples_in_epoch": samples_in_epoch(reader)})
    return rows


def read_batch(reader: FieldReader, server: Server, seed: int) -> np.ndarray:
    """Samples a second, and requests and bytes of each, (3,)."""
    batch = SIZE["batch"]
    boxes = draw_boxes(reader, SIZE["patch"], batch, seed)
    before = server.counts()
    began = perf_counter()
    reader.read_at_once(boxes)
    rate = batch / (perf_counter() - began)
    requests, size, _ = (server.counts() - before) / batch
    return np.array([rate, requests, size])


def name_of(chunk: tuple[int, ...]) -> str:
    """A folder's name for chunks of this shape."""
    return "_".join(map(str, chunk))
