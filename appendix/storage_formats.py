"""Appendix: the same winds in nine storage formats: size, speed, and requests for a patch.

    uv run python storage_formats.py
    uv run python storage_formats.py --patch-size 16 --rounds 5

The 132 maps of chapter 1, u and v, are written in each format, and read back bit for bit.
You should see that the sizes are within a few per cent of each other, that from a local
disk the plain formats are the fastest by far, and that only some can fetch one patch out
of a bucket without fetching much else.
"""

import argparse
import io
import math
import os
import shutil
import struct
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter

import google_crc32c
import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds
import xarray as xr
import zarr
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, WrapperStore

from saving import save_rows

WINDS = Path(__file__).parents[1] / "01_setup/data/navy_winds.nc"
NAMES = ["eastward_wind", "northward_wind"]
SHARD = 12  # maps
# The second table: maps with 64 times the cells, 65% of those at 0.25 degrees.
LARGE = {"tile": 8, "times": 2}
REWRITES = 4
HEADS = ("MB", "packed", "files", "write s", "maps/s", "patches/s", "by xarray")
HEADS += ("to open", "a patch")
LONG_ENOUGH = 0.1  # seconds of a measurement, at least

# ------------------------------------------------------------------------------------ counting requests


class CountedFile(io.FileIO):
    """A file that notes the bytes of each read, as a bucket would send them."""

    def __init__(self, path: Path, asked: list[int]):
        super().__init__(path)
        self.asked = asked

    def readinto(self, buffer: memoryview) -> int:
        count = super().readinto(buffer)
        self.asked.append(count)
        return count

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        self.asked.append(len(data))
        return data


class CountedStore(WrapperStore):
    """A Zarr store that notes the bytes of each object or range; 0 if there is none."""

    def __init__(self, store: LocalStore, asked: list[int]):
        super().__init__(store)
        self.asked = asked

    async def get(self, key, prototype, byte_range=None):
        found = await super().get(key, prototype, byte_range)
        self.asked.append(len(found) if found else 0)
        return found

    if hasattr(Store, "get_ranges"):  # in newer Zarrs: by get(), and not past it
        get_ranges = Store.get_ranges


# ------------------------------------------------------------------------------------ the formats


class Format:
    """A way to store records. A record is one time's map of all variables in float32.

    `shape` is a record's. With a list `asked`, the bytes of each read are noted there. Each
    class has its own `write(path, winds)`.
    """

    label = ""
    ranges = True  # can be read from a bucket by range

    def __init__(
        self, path: Path, shape: tuple[int, int, int], asked: list[int] | None = None
    ):
        self.path = path
        self.shape = shape
        self.asked = asked
        self.open()

    def source(self) -> io.FileIO:
        asked = [] if self.asked is None else self.asked
        return CountedFile(self.path, asked)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def map(self, time: int) -> np.ndarray:
        """One record."""
        raise NotImplementedError

    def maps(self, times: int) -> Iterator[np.ndarray]:
        """All records, in order."""
        return (self.map(time) for time in range(times))

    def patch(self, time: int, row: int, column: int, size: int) -> np.ndarray:
        """A copy of (variables, size, size), sliced from a record read whole."""
        return self.map(time)[:, row : row + size, column : column + size].copy()


class Arrays(Format):
    """What NetCDF and Zarr share: an array for each variable, cut by the library."""

    def map(self, time: int) -> np.ndarray:
        return np.stack([array[time] for array in self.arrays])

    def patch(self, time: int, row: int, column: int, size: int) -> np.ndarray:
        rows = slice(row, row + size)
        columns = slice(column, column + size)
        return np.stack([array[time, rows, columns] for array in self.arrays])


class NetCDF(Arrays):
    label = "NetCDF-4"

    @staticmethod
    def write(path: Path, winds: xr.Dataset, compress: bool = False) -> None:
        encoding: dict = {"chunksizes": (1, *grid(winds))}
        if compress:
            # zlib, because zstd is a plug-in, which every reader would need too.
            encoding |= {"zlib": True, "complevel": 1}
        of_all = dict.fromkeys(NAMES, encoding)
        winds.to_netcdf(path, engine="h5netcdf", encoding=of_all)

    def open(self) -> None:
        self.stream = self.path if self.asked is None else self.source()
        # NetCDF-4 is HDF5. By default it keeps 8 MB of chunks, which are most of these winds
        # and nothing of terabytes. Here it keeps one. With no room it would fetch an
        # uncompressed chunk row by row.
        _, rows, columns = self.shape
        self.file = h5py.File(self.stream, "r", rdcc_nbytes=4 * rows * columns)
        self.arrays = [self.file[name] for name in NAMES]

    def close(self) -> None:
        self.file.close()
        if self.asked is not None:
            self.stream.close()

    def dataset(self) -> xr.Dataset:
        return xr.open_dataset(self.path, engine="h5netcdf")


class Zarr(Arrays):
    label = "Zarr"
    chunk: tuple[int, int] | None = None  # cells, or a whole map
    sharded = False

    @classmethod
    def write(cls, path: Path, winds: xr.Dataset, compress: bool = False) -> None:
        chunk = cls.chunk or grid(winds)
        encoding: dict = {"chunks": (1, *chunk)}
        encoding["compressors"] = [ZstdCodec(level=1)] if compress else None
        if cls.sharded:  # as many whole chunks as cover the map
            covered = []
            for cells, side in zip(grid(winds), chunk):
                covered.append(math.ceil(cells / side) * side)
            encoding["shards"] = (SHARD, *covered)
        of_all = dict.fromkeys(NAMES, encoding)
        winds.to_zarr(path, zarr_format=3, consolidated=False, encoding=of_all)

    def open(self) -> None:
        store: Store = LocalStore(self.path, read_only=True)
        if self.asked is not None:
            store = CountedStore(store, self.asked)
        group = zarr.open_group(store, mode="r")
        self.arrays = [group[name] for name in NAMES]

    def dataset(self) -> xr.Dataset:
        return xr.open_zarr(self.path, chunks=None, consolidated=False)


class ShardedMaps(Zarr):
    label = f"Zarr, {SHARD} maps a shard"
    sharded = True


class ShardedPatches(Zarr):
    label = "Zarr, 37 x 36 cells in shards"
    chunk = (37, 36)  # nearly the patch, and two by four of them cover a map
    sharded = True


class Parquet(Format):
    """A row for each map, in a group of its own, and a tensor column for each variable."""

    label = "Parquet"

    @staticmethod
    def write(
        path: Path, winds: xr.Dataset, compress: bool = False, dictionary: bool = False
    ) -> None:
        columns: dict = {"time": winds.time.values}
        for name in NAMES:
            values = winds[name].values
            columns[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
        options: dict = {"compression": "none", "row_group_size": 1}
        if compress:
            options |= {"compression": "zstd", "compression_level": 1}
        # The default is a dictionary of values. It saves nothing for measurements.
        options["use_dictionary"] = dictionary
        pq.write_table(pa.table(columns), path, **options)

    def open(self) -> None:
        source = self.path if self.asked is None else self.source()
        self.file = pq.ParquetFile(source, pre_buffer=True)

    def close(self) -> None:
        self.file.close(force=True)

    def map(self, time: int) -> np.ndarray:
        row = self.file.read_row_group(time, columns=NAMES)
        columns = [row[name].chunk(0) for name in NAMES]
        return np.concatenate([column.to_numpy_ndarray() for column in columns])


class LMDB(Format):
    """A memory-mapped tree of keys and bytes: a patch reads only its pages."""

    label = "LMDB"
    ranges = False

    @staticmethod
    def write(path: Path, winds: xr.Dataset, at_once: bool = True) -> None:
        items = []
        for time, record in enumerate(records(winds)):
            items.append((struct.pack(">I", time), record.tobytes()))
        # In one transaction, or in one for each record.
        parts = [items] if at_once else [[item] for item in items]
        # Under Linux the size is only a limit: no room is taken before it is used.
        with lmdb.open(str(path), subdir=False, map_size=2**30, sync=at_once) as env:
            for part in parts:
                with env.begin(write=True) as transaction:
                    transaction.cursor().putmulti(part)

    def open(self) -> None:
        options = {"subdir": False, "readonly": True, "lock": False, "readahead": False}
        self.env = lmdb.open(str(self.path), **options)
        self.transaction = self.env.begin(buffers=True)

    def close(self) -> None:
        self.transaction.abort()
        self.env.close()

    def map(self, time: int) -> np.ndarray:
        """A view of the file, which is invalid once the file is closed."""
        data = self.transaction.get(struct.pack(">I", time))
        return np.frombuffer(data, np.float32).reshape(self.shape)


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord requires."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecord(Format):
    """Each record is its length, a CRC, its bytes and their CRC. There is no index.

    See https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """

    label = "TFRecord"

    @staticmethod
    def write(path: Path, winds: xr.Dataset) -> None:
        with open(path, "wb") as file:
            for record in map(np.ndarray.tobytes, records(winds)):
                length = struct.pack("<Q", len(record))
                file.write(length + struct.pack("<I", masked_crc(length)))
                file.write(record + struct.pack("<I", masked_crc(record)))

    def open(self) -> None:
        """Find where each record begins, in one pass from header to header."""
        self.file = self.source()
        self.index: list[tuple[int, int]] = []
        end = self.path.stat().st_size
        start = 0
        while start < end:
            header = self.file.read(12)
            length, crc = struct.unpack("<QI", header)
            if crc != masked_crc(header[:8]):
                where = f"{self.path}: the header at byte {start}"
                raise ValueError(f"{where} is torn; write the file again")
            self.index.append((start + 12, length))
            start = self.file.seek(length + 4, os.SEEK_CUR)

    def close(self) -> None:
        self.file.close()

    def map(self, time: int) -> np.ndarray:
        start, length = self.index[time]
        self.file.seek(start)
        record = self.file.read(length + 4)
        [crc] = struct.unpack("<I", record[length:])
        if crc != masked_crc(record[:length]):
            where = f"{self.path}: record {time}"
            raise ValueError(f"{where} is damaged; write the file again")
        return np.frombuffer(record, np.float32, length // 4).reshape(self.shape)


class Tar(Format):
    """WebDataset's shard, a tar of samples. Its reader streams; the index is tarfile's."""

    label = "WebDataset tar"

    @staticmethod
    def write(path: Path, winds: xr.Dataset) -> None:
        with wds.TarWriter(str(path)) as file:
            for time, record in enumerate(records(winds)):
                file.write({"__key__": f"{time:06}", "npy": record})

    def open(self) -> None:
        self.file = self.source()
        with tarfile.open(fileobj=self.file, mode="r:") as tar:
            self.index = [(member.offset_data, member.size) for member in tar]

    def close(self) -> None:
        self.file.close()

    def maps(self, times: int) -> Iterator[np.ndarray]:
        samples = wds.WebDataset(str(self.path), shardshuffle=False)
        for (npy,) in samples.decode().to_tuple("npy"):
            yield npy

    def map(self, time: int) -> np.ndarray:
        start, length = self.index[time]
        self.file.seek(start)
        return np.load(io.BytesIO(self.file.read(length)))


class Files(Format):
    label = "a .npy file a map"

    @staticmethod
    def write(path: Path, winds: xr.Dataset) -> None:
        path.mkdir()
        for time, record in enumerate(records(winds)):
            np.save(path / f"{time:06}.npy", record)

    def map(self, time: int) -> np.ndarray:
        path = self.path / f"{time:06}.npy"
        if self.asked is None:
            return np.load(path)
        with CountedFile(path, self.asked) as file:
            return np.load(io.BytesIO(file.read()))  # an object is fetched whole


FORMATS = [
    NetCDF,
    Zarr,
    ShardedMaps,
    ShardedPatches,
    Parquet,
    LMDB,
    TFRecord,
    Tar,
    Files,
]


def grid(winds: xr.Dataset) -> tuple[int, int]:
    """Rows and columns of a map."""
    return winds.sizes["latitude"], winds.sizes["longitude"]


def records(winds: xr.Dataset) -> Iterator[np.ndarray]:
    """Both variables of one time after another."""
    for time in range(winds.sizes["time"]):
        yield np.stack([winds[name].values[time] for name in NAMES])


# ------------------------------------------------------------------------------------ what is measured


def size(path: Path) -> tuple[int, int]:
    """Bytes and number of files."""
    files = [path]
    if path.is_dir():
        files = [part for part in path.rglob("*") if part.is_file()]
    return sum(file.stat().st_size for file in files), len(files)


def check(kind: type[Format], path: Path, winds: xr.Dataset) -> None:
    """ValueError unless all records in order, and the last alone, are as written."""
    wanted = list(records(winds))
    with closing(kind(path, wanted[0].shape)) as stored:
        found = [np.copy(record) for record in stored.maps(len(wanted))]
        found.append(np.copy(stored.map(len(wanted) - 1)))
    wanted.append(wanted[-1])
    if list(map(content, found)) != list(map(content, wanted)):
        raise ValueError(f"{path} does not hold what was written")


def content(record: np.ndarray) -> tuple:
    """All that makes two records equal, bit for bit."""
    return record.shape, record.dtype, record.tobytes()


def draw(number: int, patch: int, winds: xr.Dataset) -> list[tuple[int, int, int]]:
    """Times and corners of patches, the same in each run.

    No time comes twice running, because a reader may keep it.
    """
    rng = np.random.default_rng(0)
    times = winds.sizes["time"]
    steps = rng.integers(1, times, number)
    drawn = [steps.cumsum() % times]
    for cells in grid(winds):
        drawn.append(rng.integers(cells - patch + 1, size=number))
    return list(zip(*(values.tolist() for values in drawn)))


def count(
    kind: type[Format], path: Path, winds: xr.Dataset, corners: list[tuple], patch: int
) -> dict:
    """Requests and bytes to open a format and read the first patch; then per patch.

    The first patch fetches any index.
    """
    names = ["open_requests", "open_bytes", "patch_requests", "patch_bytes"]
    if not kind.ranges:
        return dict.fromkeys(names)
    asked: list[int] = []
    first, *others = corners
    with closing(kind(path, (len(NAMES), *grid(winds)), asked)) as stored:
        stored.patch(*first, patch)
        opened = asked.copy()
        for corner in others:
            stored.patch(*corner, patch)
    later = asked[len(opened) :]
    requests = len(later) / len(others)
    size_of_patch = sum(later) / len(others)
    return dict(zip(names, (len(opened), sum(opened), requests, size_of_patch)))


def rate(run: Callable[[], object], items: int) -> float:
    """Items per second of a function, repeated because some take only microseconds."""
    done = 0
    seconds = 0.0
    start = perf_counter()
    while seconds < LONG_ENOUGH:
        run()
        done += items
        seconds = perf_counter() - start
    return done / seconds


def clock(
    kind: type[Format], path: Path, winds: xr.Dataset, corners: list[tuple], patch: int
) -> dict:
    """Write, read in order, read patches: seconds, records and patches a second."""
    times = winds.sizes["time"]
    start = perf_counter()
    kind.write(path, winds)
    found = {"write_s": perf_counter() - start}

    def in_order() -> None:
        for record in stored.maps(times):
            record.copy()  # or what is only mapped would not be read

    def patches() -> None:
        for corner in corners:
            stored.patch(*corner, patch)

    def by_xarray() -> None:
        for time, row, column in corners:
            rows = slice(row, row + patch)
            columns = slice(column, column + patch)
            at = {"time": time, "latitude": rows, "longitude": columns}
            fields[NAMES].isel(at).load()

    with closing(kind(path, (len(NAMES), *grid(winds)))) as stored:
        found["maps_per_second"] = rate(in_order, times)
        found["patches_per_second"] = rate(patches, len(corners))
        if isinstance(stored, Arrays):
            with stored.dataset() as fields:
                found["xarray_patches_per_second"] = rate(by_xarray, len(corners))
    return found


def measure(winds: xr.Dataset, folder: Path, args: argparse.Namespace) -> list[dict]:
    """A row for each format: checked and counted, then timed in turn, `--rounds` times."""
    patch = args.patch_size
    corners = draw(args.patches + 1, patch, winds)
    rows = []
    for kind in FORMATS:
        path = folder / kind.__name__
        kind.write(path, winds)
        check(kind, path, winds)
        stored, files = size(path)
        row = {"format": kind.label, "bytes": stored, "files": files}
        rows.append(row | count(kind, path, winds, corners, patch))
    timed: list[list[dict]] = [[] for _ in FORMATS]
    for _ in range(args.rounds):
        for kind, found in zip(FORMATS, timed):
            path = folder / kind.__name__
            remove(path)
            found.append(clock(kind, path, winds, corners, patch))
    for row, found in zip(rows, timed):
        for name in found[0]:
            values = [each[name] for each in found]
            row[name] = {"median": median(values)}
            row[name] |= {"min": min(values), "max": max(values)}
    return rows


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def sizes(winds: xr.Dataset, folder: Path) -> dict:
    """Bytes by choice of codec, Parquet's dictionary, and transactions of LMDB."""
    found: dict = {"compressed": {}}
    for kind in (NetCDF, Zarr, ShardedMaps, ShardedPatches, Parquet):
        path = folder / f"{kind.__name__} compressed"
        kind.write(path, winds, compress=True)
        check(kind, path, winds)
        found["compressed"][kind.label], _ = size(path)
    path = folder / "with a dictionary"
    Parquet.write(path, winds, dictionary=True)
    found["parquet_dictionary"], _ = size(path)
    for each in ("at_once", "one_by_one"):
        path = folder / f"rewritten {each}"
        grown = []
        for _ in range(REWRITES):
            LMDB.write(path, winds, at_once=each == "at_once")
            grown.append(size(path)[0])
        found[f"lmdb_{each}"] = grown
    return found


def show(rows: list[dict], compressed: dict[str, int]) -> None:
    """Print sizes, speeds, and what a patch asks of a bucket."""
    print(" " * 29, *(f"{head:>{max(9, len(head))}}" for head in HEADS))
    for row in rows:
        packed = compressed.get(row["format"])
        cells = [f"{row['bytes'] / 1e6:.2f}"]
        cells.append(f"{packed / 1e6:.2f}" if packed else "")
        cells.append(row["files"])
        cells.append(f"{row['write_s']['median']:.3f}")
        for name in ("maps", "patches", "xarray_patches"):
            speed = row.get(f"{name}_per_second")
            cells.append(f"{speed['median']:,.0f}" if speed else "")
        if row["patch_bytes"]:
            for part in ("open", "patch"):
                requests = row[f"{part}_requests"]
                kb = row[f"{part}_bytes"] / 1e3
                cells.append(f"{requests:.3g}, {kb:,.0f} kB")
        print(f"{row['format']:29}", *(f"{cell:>9}" for cell in cells))


def save(found: dict, argv: list[str]) -> None:
    """Write results/storage_formats.json."""
    command = ["python storage_formats.py", *argv]
    packages = ("zarr", "h5py", "h5netcdf", "xarray", "pyarrow", "lmdb", "webdataset")
    path = Path(__file__).parent / "results/storage_formats.json"
    save_rows(path, command, [found], packages)


def main(argv: list[str] | None = None) -> dict:
    """Print a table of the winds and one of larger maps; return both and the sizes."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_flags(parser, args)
    with xr.open_dataset(WINDS, engine="h5netcdf") as file:
        winds = file.load().drop_encoding()
    widest = min(grid(winds))
    if args.patch_size > widest:
        reason = f"--patch-size {args.patch_size}: larger than the map"
        parser.error(f"{reason}; give at most {widest}")
    large = tile(winds)
    found: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        found["winds"] = measure(winds, Path(folder), args)
        found |= sizes(winds, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        found["large"] = measure(large, Path(folder), args)
    patch = f"{args.patch_size} x {args.patch_size}"
    for name, fields in {"winds": winds, "large": large}.items():
        cells = " x ".join(map(str, grid(fields)))
        print(f"\n{fields.sizes['time']} maps of {cells} cells, patches of {patch}")
        show(found[name], found["compressed"] if name == "winds" else {})
    for each in ("at_once", "one_by_one"):
        grown = [f"{number / 1e6:.1f}" for number in found[f"lmdb_{each}"]]
        how = f"{REWRITES} times, {each.replace('_', ' ')}"
        print(f"LMDB written {how}, MB: {', '.join(grown)}")
    if args.save_results:
        save(found, list(sys.argv[1:] if argv is None else argv))
    return found


def tile(winds: xr.Dataset) -> xr.Dataset:
    """A few of the maps, repeated to the north and to the east."""
    few = winds.isel(time=slice(LARGE["times"]))
    few = few.drop_vars(["latitude", "longitude"])
    column = xr.concat([few] * LARGE["tile"], "latitude")
    return xr.concat([column] * LARGE["tile"], "longitude")


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--patch-size", type=int, default=32, help="cells along a side (default: 32)")
    text = "random patches in each measurement (default: 100)"
    add("--patches", type=int, default=100, help=text)
    add("--rounds", type=int, default=1, help="times each format is timed (default: 1)")
    add("--save-results", action="store_true", help="write results/*.json")
    return parser


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with code 2 and a remedy if a flag makes no sense, or the winds are missing."""
    for name in ("patch_size", "patches", "rounds"):
        value = getattr(args, name)
        if value < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value}: give at least 1")
    if not WINDS.exists():
        reason = f"../01_setup/data/{WINDS.name} is missing"
        parser.error(f"{reason}: run this in a copy of the whole book")


if __name__ == "__main__":
    main()
