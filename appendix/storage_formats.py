"""Appendix: the same winds in nine storage formats: size, speed, and what a random patch asks of a bucket.

    uv run python storage_formats.py
    uv run python storage_formats.py --patch-size 16 --rounds 5

The 132 maps of chapter 1, u and v, are written in each format, and read back bit for bit. You should see that the sizes
are within a few per cent of each other, that from a local disk the plain formats are the fastest by far, and that only
some can fetch one patch out of a bucket without fetching much else.
"""

import argparse
import io
import json
import os
import platform
import shutil
import struct
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import google_crc32c
import h5py
import lmdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds
import xarray as xr
import zarr
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, WrapperStore

WINDS = Path(__file__).parents[1] / "01_setup/data/navy_winds.nc"
NAMES = ["eastward_wind", "northward_wind"]
SHARD = 12  # maps
LARGE = {
    "tile": 8,
    "times": 2,
}  # the second table: maps 64 times larger, nearly as those at 0.25 degrees
REWRITES = 4
LONG_ENOUGH = 0.1  # seconds of a measurement, at least

# ------------------------------------------------------------------------------------ counting requests


class CountedFile(io.FileIO):
    """A file that notes the bytes of each read: what a reader without a cache would ask a bucket for."""

    def __init__(self, path: Path, asked: list[int]):
        super().__init__(path)
        self.asked = asked

    def readinto(self, buffer: memoryview) -> int:
        self.asked.append(super().readinto(buffer))
        return self.asked[-1]

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        self.asked.append(len(data))
        return data


class CountedStore(WrapperStore):
    """A Zarr store that notes the bytes of each object, or range of one, that is fetched; 0 if there is none."""

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
    """A way to store records: a record is one time's map of all variables, of this shape, in float32.

    With a list `asked`, the bytes of each read are noted there. Each class has its own `write(path, winds)`.
    """

    label = ""
    ranges = True  # can be read from a bucket by range

    def __init__(
        self, path: Path, shape: tuple[int, int, int], asked: list[int] | None = None
    ):
        self.path, self.shape, self.asked = path, shape, asked
        self.open()

    def source(self) -> io.FileIO:
        return CountedFile(self.path, [] if self.asked is None else self.asked)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def map(self, time: int) -> np.ndarray:
        """One record."""
        raise NotImplementedError

    def maps(self, times: int) -> Iterator[np.ndarray]:
        """All records, in order."""
        return (self.map(time) for time in range(times))

    def patch(self, time: int, row: int, column: int, size: int) -> np.ndarray:
        """(variables, size, size), a copy of its own. A record is read whole, and cut."""
        return self.map(time)[:, row : row + size, column : column + size].copy()


class Arrays(Format):
    """What NetCDF and Zarr share: an array for each variable, cut by the library."""

    def map(self, time: int) -> np.ndarray:
        return np.stack([array[time] for array in self.arrays])

    def patch(self, time: int, row: int, column: int, size: int) -> np.ndarray:
        return np.stack(
            [a[time, row : row + size, column : column + size] for a in self.arrays]
        )


class NetCDF(Arrays):
    label = "NetCDF-4"

    @staticmethod
    def write(path: Path, winds: xr.Dataset, compress: bool = False) -> None:
        # zlib, since zstd is a plug-in, which every reader would need too.
        encoding = {"chunksizes": (1, *grid(winds))} | (
            {"zlib": True, "complevel": 1} if compress else {}
        )
        winds.to_netcdf(
            path, engine="h5netcdf", encoding=dict.fromkeys(NAMES, encoding)
        )

    def open(self) -> None:
        self.stream = self.path if self.asked is None else self.source()
        # NetCDF-4 is HDF5. By default it keeps 8 MB of chunks, most of these winds, but nothing of terabytes:
        # here one chunk. (With no room it would fetch an uncompressed chunk row by row.)
        self.file = h5py.File(
            self.stream, "r", rdcc_nbytes=4 * self.shape[1] * self.shape[2]
        )
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
        encoding = {
            "chunks": (1, *chunk),
            "compressors": [ZstdCodec(level=1)] if compress else None,
        }
        if cls.sharded:  # as many whole chunks as cover the map
            covered = (
                -(-cells // side) * side for cells, side in zip(grid(winds), chunk)
            )
            encoding["shards"] = (SHARD, *covered)
        winds.to_zarr(
            path,
            zarr_format=3,
            consolidated=False,
            encoding=dict.fromkeys(NAMES, encoding),
        )

    def open(self) -> None:
        store = LocalStore(self.path, read_only=True)
        group = zarr.open_group(
            store if self.asked is None else CountedStore(store, self.asked), mode="r"
        )
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
    """A row for each map, a tensor column for each variable, and a group of one row: what is read at once."""

    label = "Parquet"

    @staticmethod
    def write(
        path: Path, winds: xr.Dataset, compress: bool = False, dictionary: bool = False
    ) -> None:
        tensors = {
            name: pa.FixedShapeTensorArray.from_numpy_ndarray(winds[name].values)
            for name in NAMES
        }
        table = pa.table({"time": winds.time.values} | tensors)
        codec = (
            {"compression": "zstd", "compression_level": 1}
            if compress
            else {"compression": "none"}
        )
        # The default is a dictionary of values, which for measurements saves nothing and takes room.
        pq.write_table(
            table, path, row_group_size=1, use_dictionary=dictionary, **codec
        )

    def open(self) -> None:
        self.file = pq.ParquetFile(
            self.path if self.asked is None else self.source(), pre_buffer=True
        )

    def close(self) -> None:
        self.file.close(force=True)

    def map(self, time: int) -> np.ndarray:
        row = self.file.read_row_group(time, columns=NAMES)
        return np.concatenate([row[name].chunk(0).to_numpy_ndarray() for name in NAMES])


class LMDB(Format):
    """A memory-mapped tree of keys and bytes: a patch costs the pages it lies on, and nothing is copied before."""

    label = "LMDB"
    ranges = False

    @staticmethod
    def write(path: Path, winds: xr.Dataset, at_once: bool = True) -> None:
        keys = [struct.pack(">I", time) for time in range(winds.sizes["time"])]
        items = list(zip(keys, map(np.ndarray.tobytes, records(winds))))
        # Only a limit, under Linux: no room is taken before it is used. One transaction, or one for each record.
        with lmdb.open(str(path), subdir=False, map_size=2**30, sync=at_once) as env:
            for part in [items] if at_once else zip(items):
                with env.begin(write=True) as transaction:
                    transaction.cursor().putmulti(part)

    def open(self) -> None:
        self.env = lmdb.open(
            str(self.path), subdir=False, readonly=True, lock=False, readahead=False
        )
        self.transaction = self.env.begin(buffers=True)

    def close(self) -> None:
        self.transaction.abort()
        self.env.close()

    def map(self, time: int) -> np.ndarray:
        """A view of the file: of no use once it is closed."""
        return np.frombuffer(
            self.transaction.get(struct.pack(">I", time)), np.float32
        ).reshape(self.shape)


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted as TFRecord wants it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecord(Format):
    """Length, its CRC, bytes, their CRC; no index. https://www.tensorflow.org/tutorials/load_data/tfrecord"""

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
        self.file, self.index, end = self.source(), [], self.path.stat().st_size
        while (start := self.file.tell()) < end:
            length, crc = struct.unpack("<QI", header := self.file.read(12))
            if crc != masked_crc(header[:8]):
                raise ValueError(
                    f"{self.path}: the header at byte {start} is torn; write the file again"
                )
            self.index.append((start + 12, length))
            self.file.seek(length + 4, os.SEEK_CUR)

    def close(self) -> None:
        self.file.close()

    def map(self, time: int) -> np.ndarray:
        start, length = self.index[time]
        self.file.seek(start)
        record = self.file.read(length + 4)
        if struct.unpack("<I", record[length:])[0] != masked_crc(record[:length]):
            where = f"{self.path}: record {time}"
            raise ValueError(f"{where} is damaged; write the file again")
        return np.frombuffer(record, np.float32, length // 4).reshape(self.shape)


class Tar(Format):
    """WebDataset's shard: a tar of samples, here of an .npy each. Its reader streams; the index is tarfile's."""

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
        return (
            npy
            for (npy,) in wds.WebDataset(str(self.path), shardshuffle=False)
            .decode()
            .to_tuple("npy")
        )

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
        with CountedFile(
            path, self.asked
        ) as file:  # an object of a bucket: fetched whole
            return np.load(io.BytesIO(file.read()))


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
    return (
        np.stack([winds[name].values[time] for name in NAMES])
        for time in range(winds.sizes["time"])
    )


# ------------------------------------------------------------------------------------ what is measured


def size(path: Path) -> tuple[int, int]:
    """Bytes and number of files."""
    files = (
        [part for part in path.rglob("*") if part.is_file()]
        if path.is_dir()
        else [path]
    )
    return sum(file.stat().st_size for file in files), len(files)


def check(kind: type[Format], path: Path, winds: xr.Dataset) -> None:
    """Read all records in order, and the last by itself; ValueError unless every bit is as it was."""
    wanted = list(records(winds))
    with closing(kind(path, wanted[0].shape)) as stored:
        found = [
            *map(np.copy, stored.maps(len(wanted))),
            np.copy(stored.map(len(wanted) - 1)),
        ]
    content = [
        [(record.shape, record.dtype, record.tobytes()) for record in side]
        for side in (wanted, found)
    ]
    if content[1] != [*content[0], content[0][-1]]:
        raise ValueError(f"{path} does not hold what was written")


def draw(number: int, patch: int, winds: xr.Dataset) -> list[tuple[int, int, int]]:
    """Times and corners of patches, the same in each run; never one time twice running, for a reader may keep it."""
    rng, times = np.random.default_rng(0), winds.sizes["time"]
    drawn = [rng.integers(1, times, number).cumsum() % times]
    drawn += [rng.integers(cells - patch + 1, size=number) for cells in grid(winds)]
    return list(zip(*(values.tolist() for values in drawn)))


def count(
    kind: type[Format], path: Path, winds: xr.Dataset, corners: list[tuple], patch: int
) -> dict:
    """Requests and bytes: to open it and have the first patch, which fetches any index; then of a patch."""
    if not kind.ranges:
        return dict.fromkeys(
            ["open_requests", "open_bytes", "patch_requests", "patch_bytes"]
        )
    asked: list[int] = []
    with closing(kind(path, (len(NAMES), *grid(winds)), asked)) as stored:
        stored.patch(*corners[0], patch)
        opened = asked.copy()
        for corner in corners[1:]:
            stored.patch(*corner, patch)
    later, number = asked[len(opened) :], len(corners) - 1
    found = {"open_requests": len(opened), "open_bytes": sum(opened)}
    return found | {
        "patch_requests": len(later) / number,
        "patch_bytes": sum(later) / number,
    }


def rate(run: Callable[[], object], items: int) -> float:
    """Items a second, of a function that does so many; again for some time, for some take microseconds."""
    done, start = 0, perf_counter()
    while (seconds := perf_counter() - start) < LONG_ENOUGH:
        run()
        done += items
    return done / seconds


def clock(
    kind: type[Format], path: Path, winds: xr.Dataset, corners: list[tuple], patch: int
) -> dict:
    """Write, read in order, read patches: seconds, records and patches a second."""
    times, start = winds.sizes["time"], perf_counter()
    kind.write(path, winds)
    found = {"write_s": perf_counter() - start}

    def in_order() -> None:
        for record in stored.maps(times):
            record.copy()  # else what is only mapped would not be read

    def patches() -> None:
        for corner in corners:
            stored.patch(*corner, patch)

    def by_xarray() -> None:
        for time, row, column in corners:
            at = {
                "latitude": slice(row, row + patch),
                "longitude": slice(column, column + patch),
            }
            fields[NAMES].isel(time=time, **at).load()

    with closing(kind(path, (len(NAMES), *grid(winds)))) as stored:
        found["maps_per_second"] = rate(in_order, times)
        found["patches_per_second"] = rate(patches, len(corners))
        if isinstance(stored, Arrays):
            with stored.dataset() as fields:
                found["xarray_patches_per_second"] = rate(by_xarray, len(corners))
    return found


def measure(winds: xr.Dataset, folder: Path, args: argparse.Namespace) -> list[dict]:
    """A row for each format: checked and counted first, then timed in turn, `--rounds` times."""
    corners, rows, times = draw(args.patches + 1, args.patch_size, winds), [], []
    for kind in FORMATS:
        kind.write(path := folder / kind.__name__, winds)
        check(kind, path, winds)
        row = dict(zip(("format", "bytes", "files"), (kind.label, *size(path))))
        rows.append(row | count(kind, path, winds, corners, args.patch_size))
        times.append([])
    for _ in range(args.rounds):
        for kind, timed in zip(FORMATS, times):
            path = folder / kind.__name__
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            timed.append(clock(kind, path, winds, corners, args.patch_size))
    for row, timed in zip(rows, times):
        for name in timed[0]:
            values = [found[name] for found in timed]
            row[name] = {
                "median": median(values),
                "min": min(values),
                "max": max(values),
            }
    return rows


def sizes(winds: xr.Dataset, folder: Path) -> dict:
    """Bytes that a choice decides: with the library's own codec, Parquet's dictionary, LMDB written again."""
    found: dict = {"compressed": {}}
    for kind in (NetCDF, Zarr, ShardedMaps, ShardedPatches, Parquet):
        kind.write(path := folder / f"{kind.__name__} compressed", winds, compress=True)
        check(kind, path, winds)
        found["compressed"][kind.label] = size(path)[0]
    Parquet.write(path := folder / "with a dictionary", winds, dictionary=True)
    found["parquet_dictionary"] = size(path)[0]
    for each in ("at_once", "one_by_one"):
        path, found[f"lmdb_{each}"] = folder / f"rewritten {each}", []
        for _ in range(REWRITES):
            LMDB.write(path, winds, at_once=each == "at_once")
            found[f"lmdb_{each}"].append(size(path)[0])
    return found


def show(rows: list[dict], compressed: dict[str, int]) -> None:
    """Print sizes, speeds, and what a patch asks of a bucket."""
    heads = "MB, packed, files, write s, maps/s, patches/s, by xarray, to open, a patch".split(
        ", "
    )
    print(" " * 29, *(f"{head:>{max(9, len(head))}}" for head in heads))
    for row in rows:
        speed = {
            name: f"{row[name]['median']:,.0f}"
            for name in row
            if name.endswith("per_second")
        }
        packed = compressed.get(row["format"])
        cells = [
            f"{row['bytes'] / 1e6:.2f}",
            f"{packed / 1e6:.2f}" if packed else "",
            row["files"],
        ]
        cells += [
            f"{row['write_s']['median']:.3f}",
            speed["maps_per_second"],
            speed["patches_per_second"],
        ]
        cells += [speed.get("xarray_patches_per_second", "")]
        if row["patch_bytes"]:
            parts = (
                (row[f"{part}_requests"], row[f"{part}_bytes"] / 1e3)
                for part in ("open", "patch")
            )
            cells += [f"{requests:.3g}, {kb:,.0f} kB" for requests, kb in parts]
        print(f"{row['format']:29}", *(f"{cell:>9}" for cell in cells))


def save(found: dict, argv: list[str]) -> None:
    """Write results/storage_formats.json."""
    cpu, facts = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    packages = ("zarr", "h5py", "h5netcdf", "xarray", "pyarrow", "lmdb", "webdataset")
    results = {
        "command": " ".join(["uv run python storage_formats.py", *argv]),
        "date": str(date.today()),
    }
    results["machine"] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "gpu": None,
    }
    results["versions"] = {"python": platform.python_version()} | {
        name: version(name) for name in packages
    }
    path = Path(__file__).parent / "results/storage_formats.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results | {"rows": [found]}) + "\n")


def main(argv: list[str] | None = None) -> dict:
    """Print a table of the winds as they are and one of larger maps; return both and the sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--patch-size", type=int, default=32, help="cells along a side (default: 32)")
    add(
        "--patches",
        type=int,
        default=100,
        help="random ones in each measurement (default: 100)",
    )
    add("--rounds", type=int, default=1, help="of all formats in turn (default: 1)")
    add("--save-results", action="store_true", help="as results/storage_formats.json")
    args = parser.parse_args(argv)
    for name in ("patch_size", "patches", "rounds"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1"
            )
    if not WINDS.exists():
        parser.error(
            f"../01_setup/data/{WINDS.name} is missing: run this in a copy of the whole book"
        )
    with xr.open_dataset(WINDS, engine="h5netcdf") as file:
        winds = file.load().drop_encoding()
    if args.patch_size > min(grid(winds)):
        parser.error(
            f"--patch-size {args.patch_size}: larger than the map; give at most {min(grid(winds))}"
        )
    tiles = [
        winds.isel(time=slice(LARGE["times"])).drop_vars(["latitude", "longitude"])
    ] * LARGE["tile"]
    large = xr.concat([xr.concat(tiles, "latitude")] * LARGE["tile"], "longitude")
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
    ):
        found = {
            "winds": measure(winds, Path(first), args),
            "large": measure(large, Path(second), args),
        }
        found |= sizes(winds, Path(first))
    for name, fields in (("winds", winds), ("large", large)):
        map_size, patch = (
            " x ".join(map(str, grid(fields))),
            f"{args.patch_size} x {args.patch_size}",
        )
        print(f"\n{fields.sizes['time']} maps of {map_size} cells, patches of {patch}")
        show(found[name], found["compressed"] if name == "winds" else {})
    for each in ("at_once", "one_by_one"):
        written = ", ".join(f"{number / 1e6:.1f}" for number in found[f"lmdb_{each}"])
        print(f"LMDB written {REWRITES} times, {each.replace('_', ' ')}, MB: {written}")
    if args.save_results:
        save(found, list(sys.argv[1:] if argv is None else argv))
    return found


if __name__ == "__main__":
    main()
