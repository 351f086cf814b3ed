"""Chapter 3: training from a store behind a URL gives what training from a file gives, whatever the network does."""

import asyncio
import contextlib
import http.server
import importlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import book
import numpy as np
import programs
import psutil
import pytest
import torch
import xarray as xr
import zarr
from test_01_setup import weights
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore, WrapperStore

CHAPTER = book.ROOT / "03_cloud_data"
README = CHAPTER / "README.md"
TRAIN, LOOK = "03_cloud_data/train.py", "03_cloud_data/object_store.py"
NAMES = {"eastward_wind": "10m_u_component_of_wind", "northward_wind": "10m_v_component_of_wind"}
SMALL = "--patch-size 16 --batch-size 12 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()


def load(name: str):
    """Import a script of the chapter, which may import its neighbours."""
    sys.path.insert(0, str(CHAPTER))
    try:
        spec = importlib.util.spec_from_file_location(f"chapter_03_{name}", CHAPTER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where pickle looks for its classes
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(CHAPTER))


chapter = load("train")
object_store = sys.modules["object_store"]
Access, StoreError = object_store.Access, object_store.StoreError


@contextlib.contextmanager
def serve(folder: Path, *flags: object) -> Iterator[str]:
    """The address of an S3 server of a folder's buckets, without latency unless the flags say so."""
    command = [sys.executable, CHAPTER / "local_s3.py", "--folder", folder, "--until-stdin-ends"]
    command += ["--latency-ms", "0", *map(str, flags)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()


def counts(address: str) -> Counter:
    return Counter(json.load(urllib.request.urlopen(f"{address}/counts")))


def at(address: str) -> dict[str, str]:
    """The environment of a program that is to read from a server."""
    return {"AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": address}


def train(folder: Path, *flags: object, **options) -> programs.Run:
    return programs.require_success(TRAIN, *SMALL, "--output-dir", folder, *flags, **options)


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    """Chapter 1's winds under ERA5's names, and at its layout: from north to south."""
    dataset = xr.load_dataset(book.ROOT / "01_setup/data/navy_winds.nc").rename(NAMES).sortby("latitude")
    dataset = dataset.isel(latitude=slice(None, None, -1)).transpose("time", "latitude", "longitude")
    return dataset.drop_encoding()


def write(dataset: xr.Dataset, path: Path, chunks: tuple, version: int = 3, **encoding) -> Path:
    encoding = {"chunks": chunks, "_FillValue": np.float32(np.nan), **encoding}
    if "shards" in encoding and version == 3:  # what Zarr itself fills with; xarray's is for its own masking
        encoding["fill_value"] = encoding.pop("_FillValue")
    encoding = dict.fromkeys(dataset.data_vars, encoding)
    dataset.to_zarr(path, encoding=encoding, zarr_format=version, consolidated=True)
    return path


@pytest.fixture(scope="module")
def buckets(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one bucket, which holds the same winds in every format and layout."""
    folder = tmp_path_factory.mktemp("buckets")
    bucket = folder / "bucket"
    bucket.mkdir()
    winds.to_netcdf(
        bucket / "winds.nc", encoding={name: {"zlib": True, "chunksizes": (1, 73, 144)} for name in winds}
    )
    write(winds, bucket / "v2.zarr", (1, 32, 48), version=2)
    write(winds, bucket / "v3.zarr", (1, 32, 48))
    write(winds, bucket / "sharded.zarr", (1, 32, 48), shards=(12, 96, 144))
    weatherbench = winds.transpose("time", "longitude", "latitude").sortby("latitude")
    weatherbench = weatherbench.assign_coords(longitude=winds.longitude % 360).sortby("longitude")
    write(weatherbench, bucket / "weatherbench.zarr", (100, 144, 73), version=2)
    west = (winds.longitude + 180) % 360 - 180
    short = winds.assign_coords(longitude=west).sortby("longitude").rename(latitude="lat", longitude="lon")
    write(short, bucket / "west_to_east.zarr", (5, 20, 30))
    for name in REFERENCES:
        refer = ["--source", bucket / "winds.nc", "--store", bucket / name]
        programs.require_success("03_cloud_data/make_references.py", *refer)
    return folder


@pytest.fixture(scope="module")
def server(buckets: Path) -> Iterator[str]:
    with serve(buckets) as address:
        yield address


@pytest.fixture(scope="module")
def whole(buckets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small undisturbed run from a local NetCDF file."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, "--store", buckets / "bucket/winds.nc")
    return folder


def assert_same_end(folder: Path, other: Path) -> None:
    """Two runs ended with the same weights and were judged the same, to the last bit."""
    first, second = weights(folder), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    one, two = (json.loads((path / "summary.json").read_text()) for path in (folder, other))
    assert one["rmse"] == two["rmse"] and one["climatology"] == two["climatology"]


# ---------------------------------------------------------------------- the same from anywhere, to the bit

LOCAL = ["v2.zarr", "v3.zarr", "sharded.zarr", "weatherbench.zarr", "west_to_east.zarr"]
REFERENCES = ["references.json", "versions.icechunk"]


@pytest.mark.parametrize("name", LOCAL + REFERENCES)
def test_every_format_and_layout_trains_the_same_weights(name: str, buckets, tmp_path, whole) -> None:
    train(tmp_path, "--store", buckets / "bucket" / name)
    assert_same_end(tmp_path, whole)


@pytest.mark.parametrize("flags", [[], ["--client", "fsspec"]], ids=["obstore", "fsspec"])
@pytest.mark.parametrize("name", ["v2.zarr", "sharded.zarr"])
def test_a_bucket_trains_the_same_weights(name: str, flags, server, tmp_path, whole) -> None:
    flags = ["--store", f"s3://bucket/{name}", "--anonymous", *flags]
    done = train(tmp_path, *flags, environment=at(server))
    assert_same_end(tmp_path, whole)
    assert not re.search("unclosed|warning|error|still trying", done.err, re.IGNORECASE), done.err


@pytest.mark.parametrize("name", REFERENCES)
def test_netcdf_in_a_bucket_is_read_in_place(name: str, server, tmp_path, whole) -> None:
    refer = ["--source", "s3://bucket/winds.nc", "--store", tmp_path / name]
    unsigned = at(server) | {"AWS_SKIP_SIGNATURE": "true"}
    programs.require_success("03_cloud_data/make_references.py", *refer, environment=unsigned)
    flags = ["--store", tmp_path / name, "--anonymous"]
    before = counts(server)["bytes"]
    train(tmp_path, *flags, environment=at(server))
    assert counts(server)["bytes"] > before
    assert_same_end(tmp_path, whole)


def test_a_run_goes_on_from_a_repository_of_the_same_data(buckets, whole, tmp_path) -> None:
    copied = ["--store", buckets / "bucket/v3.zarr", "--output-dir", tmp_path]
    assert programs.run(TRAIN, *SMALL, *copied, kill_at_step=5).code == -9
    train(tmp_path, "--store", buckets / "bucket/versions.icechunk", "--resume")
    torch.testing.assert_close(weights(tmp_path), weights(whole), rtol=0, atol=0)


def test_a_checkpoint_says_which_snapshot_it_was_trained_on(buckets, tmp_path) -> None:
    store = tmp_path / "versions.icechunk"
    refer = ["--source", buckets / "bucket/winds.nc", "--store", store]
    flags = [*SMALL, "--store", store, "--output-dir", tmp_path / "run"]
    programs.require_success("03_cloud_data/make_references.py", *refer)
    assert programs.run(TRAIN, *flags, kill_at_step=4).code == -9
    trained_on = json.loads((tmp_path / "run/configuration.json").read_text())["snapshot"]
    programs.require_success("03_cloud_data/make_references.py", *refer)  # another version
    done = programs.run(TRAIN, *flags, "--resume")
    assert re.search(rf"--snapshot \w+: \S+last.ckpt has {trained_on}; give that", one_line(done))
    programs.require_success(TRAIN, *flags, "--resume", "--snapshot", trained_on)


def test_a_plain_web_server_trains_the_same_weights(server, tmp_path, whole) -> None:
    train(tmp_path, "--store", f"{server}/bucket/v3.zarr")
    assert_same_end(tmp_path, whole)


@pytest.mark.parametrize(
    "method, scheme", [("fork", "s3"), ("fork", "http"), ("forkserver", "s3"), ("spawn", "s3")]
)
def test_workers_read_after_their_parent_has(method: str, scheme: str, server, tmp_path, whole) -> None:
    store = {"s3": "s3://bucket/v3.zarr", "http": f"{server}/bucket/v3.zarr"}[scheme]
    flags = ["--store", store, "--anonymous", "--num-workers", 2, "--start-method", method]
    train(tmp_path, *flags, environment=at(server))  # which opens the store, and so reads, in the parent
    assert_same_end(tmp_path, whole)


def test_two_ranks_train_the_same_weights(server, tmp_path) -> None:
    flags = [*SMALL, "--store", "s3://bucket/v3.zarr", "--anonymous", "--output-dir"]
    for ranks in (1, 2):  # each of one thread: another number of those rounds otherwise, too
        done = programs.run_ranks(TRAIN, ranks, *flags, tmp_path / str(ranks), shared=at(server))
        assert [getattr(one, "code", one) for one in done] == [0] * ranks, done
    first, second = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(torch.allclose(first[name], second[name], rtol=1e-3, atol=5e-5) for name in first)


def test_a_run_begun_on_a_file_resumes_from_a_bucket(buckets, server, tmp_path, whole) -> None:
    flags = [*SMALL, "--output-dir", tmp_path, "--store"]
    assert programs.run(TRAIN, *flags, buckets / "bucket/winds.nc", kill_at_step=4).code == -9
    flags += ["s3://bucket/sharded.zarr", "--anonymous", "--resume"]
    programs.require_success(TRAIN, *flags, environment=at(server))
    assert_same_end(tmp_path, whole)


# --------------------------------------------------------------------------------- an unreliable network

FAULTS = "--error-rate 0.05 --reset-rate 0.01 --truncate-rate 0.01 --stall-at 60".split()


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_faults_change_nothing_but_the_time(client: str, buckets, tmp_path, whole) -> None:
    with serve(buckets, *FAULTS) as address:
        flags = ["--store", "s3://bucket/v3.zarr", "--anonymous", "--client", client, "--read-deadline", 12]
        train(tmp_path, *flags, environment=at(address))
        met = counts(address)
    assert all(met.get(fault) for fault in ("SlowDown", "reset", "truncate", "stall")), met
    assert_same_end(tmp_path, whole)


def one_line(done: programs.Run) -> str:
    """What a failed program said, which must be one line, but for progress bars and notices of retries."""
    lines = [line for line in re.split(r"[\r\n]+", done.err) if re.match(r"\w+\.py: error: ", line)]
    assert done.code == 2 and len(lines) == 1 and "Traceback" not in done.err, done.err
    return lines[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_permanent_failure_ends_in_bounded_time_and_loses_nothing(
    workers: int, buckets, server, tmp_path, whole
) -> None:
    store = ["--store", "s3://bucket/v3.zarr", "--anonymous"]
    flags = [*SMALL, *store, "--output-dir", tmp_path, "--num-workers", workers]
    train(tmp_path / "statistics", *store, environment=at(server))
    assert programs.run(TRAIN, *flags, kill_at_step=4, environment=at(server)).code == -9
    before = (tmp_path / "last.ckpt").read_bytes()
    with serve(buckets, "--fail-key", "u_component_of_wind/c/") as address:
        began = time.monotonic()
        done = programs.run(TRAIN, *flags, "--resume", "--read-deadline", 3, environment=at(address))
        assert time.monotonic() - began < 40
    key = r"s3://bucket/v3.zarr/10m_u_component_of_wind/c/\d+/\d/\d"
    assert re.search(rf"{key}: not read after \d+ attempts: .*(503|SlowDown)", one_line(done))
    assert (tmp_path / "last.ckpt").read_bytes() == before
    programs.require_success(TRAIN, *flags, "--resume", environment=at(server))
    assert_same_end(tmp_path, whole)


DYING = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from object_store import Access, StoreError, Winds
winds = Winds(Access("s3://bucket/v3.zarr", anonymous=True, deadline=3), sys.argv[2:], slice("1982", "1990"))
print("open", flush=True)
sys.stdin.readline()
every = np.arange(len(winds.latitude)), np.arange(len(winds.longitude))
try:
    winds.read([(time, *every) for time in range(40)])
except StoreError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.parametrize("folder", ["03_cloud_data", "04_data_pipeline"])
def test_a_store_that_dies_leaves_one_error_and_no_complaints_of_what_was_being_read(folder, buckets) -> None:
    command = [sys.executable, "-c", DYING, book.ROOT / folder, *NAMES.values()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with serve(buckets) as address:
        reader = subprocess.Popen(command, env=os.environ | at(address), text=True, **pipes)
        assert reader.stdout.readline() == "open\n", reader.stderr.read()
    _, said = reader.communicate("read\n", timeout=60)
    lines = [line for line in said.splitlines() if ": still trying: " not in line]
    assert reader.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: s3://bucket/"), said


class Flaky(WrapperStore):
    """A store whose first reads of every object fail, or never end, and that notes when it was asked."""

    def __init__(self, store, failures: int = 0, stall: bool = False, seconds: float = 0.0):
        super().__init__(store)
        self.failures, self.stall, self.seconds = failures, stall, seconds
        self.asked, self.in_flight, self.most = [], 0, 0

    async def get(self, key, prototype, byte_range=None):
        self.asked.append(time.monotonic())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if len(self.asked) <= self.failures:
                if self.stall:
                    await asyncio.sleep(1000)
                raise ConnectionResetError("reset")
            await asyncio.sleep(self.seconds)
            return await self._store.get(key, prototype, byte_range)
        finally:
            self.in_flight -= 1


def steady(flaky: Flaky, **options) -> object_store.SteadyStore:
    return object_store.SteadyStore(flaky, Access("s3://bucket/x.zarr", **options))


def memory(**objects: bytes) -> MemoryStore:
    buffer = default_buffer_prototype().buffer
    return MemoryStore({name: buffer.from_bytes(value) for name, value in objects.items()})


def get(store, key: str) -> bytes | None:
    found = sync(store.get(key, default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def test_a_read_is_tried_again_at_moments_that_differ() -> None:
    pauses = []
    for _ in range(3):
        flaky = Flaky(memory(a=b"value"), failures=4)
        store = steady(flaky)
        assert get(store, "a") == b"value"
        assert store.take_log()[:, 1:].tolist() == [[5, 5, 0]]  # bytes, attempts, not from the cache
        pauses.append(tuple(np.diff(flaky.asked).round(3)))
    assert len(set(pauses)) == 3
    assert all(
        pause < object_store.FIRST_PAUSE * 2**n + 0.2 for each in pauses for n, pause in enumerate(each, 1)
    )


def test_without_a_second_attempt_one_reset_ends_a_read(monkeypatch) -> None:
    monkeypatch.setattr(object_store.random, "uniform", lambda *_: 1e9)  # longer than any deadline
    with pytest.raises(StoreError, match=r"x.zarr/a: not read after 1 attempt: ConnectionResetError: reset"):
        get(steady(Flaky(memory(a=b"value"), failures=1)), "a")


def test_a_read_that_stalls_is_asked_again_and_one_that_never_answers_is_given_up() -> None:
    flaky = Flaky(memory(a=b"value"), failures=1, stall=True)
    began = time.monotonic()
    assert get(steady(flaky, deadline=3), "a") == b"value"
    assert 0.4 < time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"^s3://bucket/x.zarr/a: not read after \d+ attempts: TimeoutError"):
        get(steady(Flaky(memory(a=b"value"), failures=1000, stall=True), deadline=3), "a")
    assert time.monotonic() - began < 4


def test_a_part_of_an_object_that_comes_short_is_asked_for_again() -> None:
    """Zarr would take what has come for the chunk."""

    class Short(Flaky):
        async def get(self, *asked):
            value = await super().get(*asked)
            return value[:3] if len(self.asked) == 1 else value

    store = steady(Short(memory(a=b"a longer value")))
    found = sync(store.get("a", default_buffer_prototype(), RangeByteRequest(2, 10)))
    assert found.to_bytes() == b"longer v"
    assert store.take_log()[:, 2].tolist() == [2]


def test_a_refusal_is_final() -> None:
    class Refusing(Flaky):
        async def get(self, *_):
            self.asked.append(0)
            raise PermissionError("Access Denied")

    refusing = Refusing(memory())
    with pytest.raises(
        StoreError, match=r"x.zarr/a: not read after 1 attempt: PermissionError: Access Denied"
    ):
        get(steady(refusing), "a")
    assert len(refusing.asked) == 1


def test_expired_credentials_are_no_refusal_of_metadata() -> None:
    """Zarr would go on without what it may not read: a store without arrays, or no store at all."""

    class Expired(Flaky):
        async def get(self, *_):
            raise error

    error = OSError("<Code>ExpiredToken</Code><Message>The provided token has expired.</Message>")  # obstore
    with pytest.raises(StoreError, match=r"x.zarr/v/zarr.json: not read after 1 attempt: ExpiredToken: The"):
        get(steady(Expired(memory())), "v/zarr.json")
    error, cause = PermissionError("The provided token has expired."), error  # s3fs
    error.__cause__ = cause
    with pytest.raises(StoreError, match=r"x.zarr/v/zarr.json: not read after 1 attempt: .* has expired"):
        get(steady(Expired(memory())), "v/zarr.json")


class Failing(torch.utils.data.Dataset):
    """A dataset whose only sample is an error."""

    def __init__(self, error: type[Exception]):
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int):
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            raise self.error("--store x.zarr: mend it") from cause


@pytest.mark.parametrize("error", [object_store.InputError, StoreError])
def test_an_error_of_a_worker_is_one_line(error: type[Exception]) -> None:
    loader = torch.utils.data.DataLoader(Failing(error), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(error) as raised:
        next(iter(loader))
    assert str(raised.value) == "--store x.zarr: mend it"
    assert "Traceback" in raised.value.args[0]  # as torch hands it on


@pytest.mark.parametrize("url, closed", [("memory://winds.zarr", 0), ("s3://bucket/winds.zarr", 1)])
def test_sessions_are_closed_where_there_are_some(url: str, closed: int, monkeypatch) -> None:
    at_exit = []
    monkeypatch.setattr(object_store.atexit, "register", at_exit.append)
    object_store.open_fsspec(Access(url, "fsspec", anonymous=True))
    for close in at_exit:
        close()
    assert len(at_exit) == closed


def test_no_more_requests_are_in_flight_than_asked_for() -> None:
    flaky = Flaky(memory(**{f"k{n}": b"v" for n in range(40)}), seconds=0.02)
    store = steady(flaky, max_requests=7)

    async def all_of_them():
        return await asyncio.gather(*(store.get(f"k{n}", default_buffer_prototype()) for n in range(40)))

    sync(all_of_them())
    assert flaky.most == 7


def test_a_missing_chunk_is_an_error_and_missing_metadata_is_not() -> None:
    store = steady(Flaky(memory(a=b"value")))
    with pytest.raises(StoreError, match=r"^s3://bucket/x.zarr/winds/c/0: no such object"):
        get(store, "winds/c/0")
    assert get(store, "winds/.zattrs") is None
    # Zarr alone, as everybody uses it, returns the fill value.
    array = zarr.create_array(MemoryStore(), shape=4, chunks=2, dtype="f4", fill_value=0)
    assert array[:].tolist() == [0, 0, 0, 0]


# -------------------------------------------------------------------------------- reading, and its costs


def open_winds(access: Access, years: slice = chapter.TRAIN_YEARS) -> "chapter.Winds":
    return chapter.Winds(access, list(NAMES.values()), years)


def patches_of(winds, size: int = 16, batch_size: int = 8) -> "chapter.WindPatches":
    mean = std = np.ones((2, 1, 1), "float32")
    return chapter.WindPatches(winds, mean, std, size, batch_size, seed=0)


@pytest.mark.parametrize("name", ["winds.nc", *LOCAL])
def test_patches_are_the_winds_across_seam_and_direction(name: str, winds: xr.Dataset, buckets) -> None:
    opened = open_winds(Access(str(buckets / "bucket" / name)))
    truth = winds.assign_coords(longitude=winds.longitude % 360).sortby("longitude").sortby("latitude")
    truth = (
        truth.sel(time=chapter.TRAIN_YEARS)
        .to_dataarray("component")
        .transpose("time", "component", ...)
        .values
    )
    assert np.array_equal(opened.longitude, np.arange(144) * 2.5)
    assert np.all(np.diff(opened.latitude) > 0)
    cells, boxes = np.arange(16), [(3, 0, 140), (50, 57, 0), (107, 20, 60), (7, 30, 133)]
    boxes = [(time, row + cells, (column + cells) % 144) for time, row, column in boxes]
    for box, (month, rows, columns) in zip(opened.read(boxes), boxes, strict=True):
        assert np.array_equal(box, truth[month][:, rows][:, :, columns])


def test_threads_that_decode_are_set_in_every_process(buckets) -> None:
    opened = open_winds(Access(str(buckets / "bucket/v3.zarr"), threads=3))
    assert zarr.config.get("threading.max_workers") == 3
    zarr.config.set({"threading.max_workers": None})
    pickle.loads(pickle.dumps(opened)).open()  # as a worker does
    assert zarr.config.get("threading.max_workers") == 3


@pytest.mark.parametrize("west", [-30, 350, 100])
def test_a_region_has_no_seam_wherever_it_lies(west: int, winds: xr.Dataset, tmp_path: Path) -> None:
    there = (winds.longitude - west) % 360 < 60
    region = winds.isel(longitude=np.flatnonzero(there)).sortby("longitude")
    opened = open_winds(Access(str(write(region, tmp_path / "region.zarr", (12, 73, 24)))))
    assert np.array_equal(np.diff(opened.longitude), np.full(23, 2.5))
    patches = patches_of(opened)
    assert patches.last_column == 24 - 16
    cells = np.arange(16)
    box = opened.read([(5, 10 + cells, 4 + cells)])[0, 0]
    truth = winds["10m_u_component_of_wind"].assign_coords(longitude=winds.longitude % 360)
    wanted = truth.isel(time=5).sel(latitude=opened.latitude[10:26], longitude=opened.longitude[4:20] % 360)
    assert np.array_equal(box, wanted.values)


def test_a_store_that_is_written_anew_is_another_version(buckets, tmp_path) -> None:
    path = tmp_path / "own.zarr"
    shutil.copytree(buckets / "bucket/v3.zarr", path)
    opened = open_winds(Access(str(path)))
    os.utime(path / "zarr.json", (0, 1_000_000_000))
    assert open_winds(Access(str(path))).version != opened.version
    with pytest.raises(StoreError, match=r"own.zarr: it has changed since this run began"):
        pickle.loads(pickle.dumps(opened)).open()  # as a worker does


def test_opening_reads_metadata_and_coordinates_only(buckets) -> None:
    access = Access(str(buckets / "bucket/v3.zarr"))
    _, _, store = object_store.open_dataset(access)
    assert 3 <= len(store.take_log()) <= 5  # latitude, longitude, and time, which xarray asks for thrice
    opened = open_winds(access)
    assert len(pickle.dumps(patches_of(opened))) < 20_000  # what a worker is sent
    assert opened.dataset.nbytes > 5_000_000


def test_a_batch_is_read_at_once(buckets) -> None:
    """36 times one latency if a read waits for the one before; two or three if they overlap."""
    with serve(buckets, "--latency-ms", 100) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in at(address).items():
            patch.setenv(name, value)
        access = Access("s3://bucket/v3.zarr", anonymous=True)
        samples = patches_of(open_winds(access))
        samples.__getitems__([(0, 0)])
        samples.winds.take_log()
        began = time.monotonic()
        samples.__getitems__([(1, k) for k in range(8)])
        together, requests = time.monotonic() - began, len(samples.winds.take_log())
        began = time.monotonic()
        for k in range(8):
            samples.__getitems__([(1, k)])
        one_by_one = time.monotonic() - began
    assert requests >= 16
    assert together < 0.35 < 0.8 < one_by_one


def test_a_batch_counts_what_the_server_sent_for_it_and_nothing_else(server, tmp_path, monkeypatch) -> None:
    for name, value in at(server).items():
        monkeypatch.setenv(name, value)
    opened = open_winds(Access("s3://bucket/v3.zarr", anonymous=True))
    object_store.statistics(opened, tmp_path)
    for samples in (patches_of(opened), pickle.loads(pickle.dumps(patches_of(opened)))):  # as a worker's
        samples.winds.open()
        before = counts(server)
        samples.__getitems__([(0, k) for k in range(8)])
        log, sent = samples.winds.take_log(), counts(server) - before
        assert (len(log), log[:, 1].sum()) == (sent["reads"], sent["bytes"])
        assert len(log) >= 16


def test_the_store_is_measured_by_what_its_batches_asked() -> None:
    """Two batches of 4 samples of 100 bytes: 5 requests, one of them repeated twice, one from the cache."""
    first = np.array([[0.010, 500, 1, 0], [0.020, 500, 3, 0], [0.0, 600, 0, 1]])
    second = np.array([[0.030, 500, 1, 0], [0.040, 300, 1, 0]])
    figures = chapter.measure_store([first, second], 4, 100)
    assert figures["requests_per_sample"] == 5 / 8
    assert figures["read_amplification"] == 2400 / 800
    assert figures["request_ms"] == 25 and 39 < figures["request_ms_99"] < 40
    assert figures["retries"] == 2
    assert figures["cache_hit_share"] == 1 / 5


def test_the_summary_tells_what_the_store_was_asked(server, tmp_path) -> None:
    done = train(tmp_path, "--store", "s3://bucket/v3.zarr", "--anonymous", environment=at(server))
    figures = json.loads((tmp_path / "summary.json").read_text())
    # A patch of 16 out of chunks of 32 x 48 touches (15/32 + 1) x (15/48 + 1) chunks of each of two variables
    # on average, a bit fewer at the map's edges.
    assert 2.5 < figures["requests_per_sample"] < 4.5
    assert figures["retries"] == 0 and figures["cache_hit_share"] == 0
    assert 0 < figures["request_ms"] <= figures["request_ms_99"]
    assert "requests a sample" in done.out and "bytes read for each used" in done.out


def test_statistics_are_computed_once_for_a_version_of_a_store(buckets, tmp_path) -> None:
    path = tmp_path / "own.zarr"
    shutil.copytree(buckets / "bucket/v3.zarr", path)
    opened = open_winds(Access(str(path)))
    first = object_store.statistics(opened, tmp_path)
    again = open_winds(Access(str(path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chapter.Winds, "read", None)
        second = object_store.statistics(again, tmp_path)
    assert all(np.array_equal(first[name], second[name]) for name in ("mean", "std", "climatology"))
    values = opened.read([(time, np.arange(73), np.arange(144)) for time in range(108)])
    assert np.allclose(first["mean"].ravel(), values.mean((0, 2, 3)), atol=1e-4)
    assert np.allclose(first["std"].ravel(), values.std((0, 2, 3), dtype="float64"), atol=1e-4)
    assert np.allclose(first["climatology"][2], values[2::12].mean(0), atol=1e-4)
    assert again.version != open_winds(Access(str(buckets / "bucket/v2.zarr"))).version


# --------------------------------------------------------------------------------------------- the cache


def test_a_second_run_reads_from_the_cache_alone(server, tmp_path, whole) -> None:
    flags = ["--store", "s3://bucket/v3.zarr", "--anonymous", "--cache-dir", tmp_path / "cache"]
    for run in ("first", "second"):
        train(tmp_path / run, *flags, "--num-workers", 2, environment=at(server))
    figures = json.loads((tmp_path / "second/summary.json").read_text())
    assert figures["cache_hit_share"] == 1 and figures["request_ms"] is None
    assert_same_end(tmp_path / "second", whole)


def cache_of(folder: Path, gb: float, version: str = "one") -> "object_store.DiskCache":
    return object_store.DiskCache(Access("s3://b/x.zarr", cache=str(folder), cache_gb=gb), version)


def kept(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "bytes")


def fill_cache(folder: Path, first: int) -> None:
    cache = cache_of(folder, 1e-4)
    for number in range(first, first + 100):
        cache.put(f"object {number}", bytes([number % 256]) * 1000)


def test_a_cache_shared_by_processes_keeps_to_its_size_and_to_the_truth(tmp_path: Path) -> None:
    workers = [programs.CONTEXT.Process(target=fill_cache, args=(tmp_path, 50 * n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert 90_000 <= kept(tmp_path) <= 100_000
    cache = cache_of(tmp_path, 1e-4)
    found = {number: cache.get(f"object {number}") for number in range(250)}
    assert sum(value is not None for value in found.values()) >= 90
    assert all(value in (None, bytes([number % 256]) * 1000) for number, value in found.items())


def test_a_full_cache_still_hits_what_it_holds_where_the_least_recent_would_not(tmp_path: Path) -> None:
    cache, hits = cache_of(tmp_path, 5e-5), []
    for _ in range(2):  # an epoch in order, 100 objects, half of which fit
        for number in range(100):
            hits.append(cache.get(str(number)) is not None)
            cache.put(str(number), bytes(1000))
    assert sum(hits) == 50


def test_a_full_cache_is_not_locked_for_what_no_longer_goes_in(tmp_path: Path, monkeypatch) -> None:
    cache = cache_of(tmp_path, 1e-6)
    for name in ("a", "b"):
        cache.put(name, bytes(600))
    monkeypatch.setattr(object_store, "locked", None)
    cache.put("c", bytes(600))
    assert cache.get("a") == bytes(600) and cache.get("b") is None


def put_on_a_full_disk(folder: Path) -> None:
    cache = cache_of(folder, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    cache.put("a", bytes(1000))
    cache.put("b", b"small")


def test_what_a_full_disk_refused_is_neither_kept_nor_counted(tmp_path: Path) -> None:
    worker = programs.CONTEXT.Process(target=put_on_a_full_disk, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert kept(tmp_path) == 5  # nor is a part left
    (total,) = tmp_path.rglob("bytes")
    assert total.read_text() == "5"


def test_another_version_of_a_store_empties_its_cache(tmp_path: Path) -> None:
    cache_of(tmp_path, 1).put("a", b"old")
    cache_of(tmp_path, 1, "two").put("a", b"new")
    assert kept(tmp_path) == 3
    assert cache_of(tmp_path, 1, "two").get("a") == b"new"
    assert cache_of(tmp_path, 1, "one").get("a") is None


def put_and_die(folder: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    cache_of(folder, 1).put("a", b"value")


def test_a_kill_leaves_no_torn_object_in_the_cache(tmp_path: Path) -> None:
    worker = programs.CONTEXT.Process(target=put_and_die, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    cache = cache_of(tmp_path, 1)
    assert cache.get("a") is None
    cache.put("a", b"value")
    assert cache.get("a") == b"value"


# ------------------------------------------------------------------------------------------- credentials


def test_credentials_are_in_no_file_of_a_run(buckets, tmp_path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIDSECRETNAME", "AWS_SECRET_ACCESS_KEY": "very-secret-value"}
    with serve(buckets, "--require-keys") as address:
        done = train(tmp_path, "--store", "s3://bucket/v3.zarr", environment=at(address) | keys)
        flags = [*SMALL, "--store", "s3://bucket/v3.zarr", "--anonymous", "--output-dir", tmp_path / "no"]
        refused = programs.run(TRAIN, *flags, environment=at(address))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for text in (done.out.encode(), done.err.encode(), written):
        assert not any(value.encode() in text for value in keys.values())
    assert "s3://bucket/v3.zarr" in one_line(refused) and "AccessDenied" in refused.err


def test_secrets_in_a_url_are_not_printed(server, tmp_path) -> None:
    host, nobody = server.removeprefix("http://"), f"127.0.0.1:{programs.free_port()}"
    absent, unreachable = (
        f"http://u:secret@{host}/bucket/x.zarr",
        f"http://u:secret@{nobody}/x.zarr?sig=secret",
    )
    wrong = [(absent, "obstore"), (absent, "fsspec"), (unreachable, "obstore"), (unreachable, "fsspec")]
    for url, client in [
        *wrong,
        ("ftp://u:secret@b/x.zarr", "obstore"),
        ("s3://u:secret@b/x.zarr", "obstore"),
    ]:
        deadline = 4 if "?sig" in url else 1  # long enough for the notice "still trying"
        flags = ["--store", url, "--client", client, "--read-deadline", deadline]
        done = programs.run(TRAIN, *flags, "--output-dir", tmp_path / "run")
        assert "secret" not in done.out + done.err, done.err
        assert url.partition("//")[0] in one_line(done)
        assert ("still trying" in done.err) == ("?sig" in url), done.err
    there = f"http://u:secret@{host}/bucket/v3.zarr"
    looked = programs.require_success(LOOK, there)
    refused = programs.run(LOOK, absent)
    assert f"{server}/bucket/v3.zarr: version" in looked.out
    assert f"--store {server}/bucket/x.zarr: no Zarr store there" in one_line(refused)
    assert not any("secret" in text for done in (looked, refused) for text in (done.out, done.err))


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_requests_go_unsigned_if_the_environment_says_so(client: str, server, tmp_path, whole) -> None:
    unsigned = at(server) | {"AWS_SKIP_SIGNATURE": "true"}  # there are no keys to sign with
    train(tmp_path, "--store", "s3://bucket/v3.zarr", "--client", client, environment=unsigned)
    assert_same_end(tmp_path, whole)


def test_credentials_come_from_a_profile(buckets, tmp_path, whole) -> None:
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = A\naws_secret_access_key = B\n")
    profile = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_PROFILE": "team"}
    with serve(buckets, "--require-keys") as address:
        train(tmp_path / "run", "--store", "s3://bucket/v3.zarr", environment=at(address) | profile)
        other = at(address) | profile | {"AWS_PROFILE": "nobody"}
        flags = [*SMALL, "--store", "s3://bucket/v3.zarr", "--output-dir", tmp_path / "no"]
        refused = programs.run(TRAIN, *flags, environment=other)
        assert "unsigned" not in counts(address)  # each read was signed, with the profile's keys
    assert_same_end(tmp_path / "run", whole)
    assert "--store s3://bucket/v3.zarr: no credentials in the environment, a profile" in one_line(refused)


@contextlib.contextmanager
def hand_out(address: str, given: list[float]) -> Iterator[str]:
    """The URL of a server that hands out another's credentials, and notes when."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given.append(time.monotonic())
            self.send_response(200)
            self.end_headers()
            self.wfile.write(urllib.request.urlopen(f"{address}/credentials").read())

        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def test_credentials_that_expire_are_renewed(buckets, tmp_path, whole) -> None:
    given = []
    with (
        serve(buckets, "--expire-after", 1, "--require-keys", "--latency-ms", 30) as address,
        hand_out(address, given) as credentials,
    ):
        container = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": credentials}
        train(tmp_path, "--store", "s3://bucket/v3.zarr", environment=at(address) | container)
        assert "expired" not in counts(address)
    assert len(given) >= 3 and given[-1] - given[0] > 2  # several lives of a key
    assert_same_end(tmp_path, whole)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def broken(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores with something wrong in each."""
    folder = tmp_path_factory.mktemp("broken")
    few = winds.isel(time=slice(0, 132, 6))
    stores = {
        "years": few.sel(time=slice("1982", "1985")),
        "variables": few.rename({"10m_u_component_of_wind": "u"}),
    }
    stores["nan"] = few.copy(deep=True)
    stores["nan"]["10m_u_component_of_wind"][5, :, 7] = np.nan
    stores["empty"] = winds.isel(time=slice(0, 0))
    stores["order"] = few.isel(time=slice(None, None, -1))
    stores["bare"] = few.drop_vars("latitude")
    numbers, units = np.arange(few.time.size), {"units": "days since 1982-01-01", "calendar": "360_day"}
    stores["calendar"] = few.assign_coords(time=("time", numbers, units))
    stores["numbers"] = few.assign_coords(time=numbers)
    for name, dataset in stores.items():
        write(dataset, folder / f"{name}.zarr", (1, 73, 144))
    for name in ("chunk", "inner"):
        shards = {"shards": (2, 74, 144)} if name == "inner" else {}
        write(few, folder / f"{name}.zarr", (1, 37, 144), **shards)
    next((folder / "chunk.zarr/10m_v_component_of_wind/c/3").rglob("1")).joinpath("0").unlink()
    group = zarr.open_group(folder / "inner.zarr")
    group["10m_v_component_of_wind"][3, :37] = np.nan  # which is not written: the shard's index lacks it
    write(few, folder / "filled.zarr", (1, 37, 144), shards=(2, 74, 144), _FillValue=np.float32(0))
    zarr.create_group(folder / "no_variables.zarr")
    (folder / "other.json").write_text("{}")
    (folder / "torn.nc").write_bytes(b"CDF")
    few.assign_coords(time=("time", numbers, units)).to_netcdf(folder / "days.nc")
    return {path.stem: path for path in folder.iterdir()}


NO_DATES = r"its times are not dates of the usual calendar; mend their units or calendar"
NEITHER = r"give a Zarr store, NetCDF, or what make_references.py writes"
BAD_INPUT = {
    "no such folder": (
        ["--store", "nowhere.zarr"],
        r"--store nowhere.zarr: no Zarr store there; \. holds README.md, .*, \.\.\.",
    ),
    "no such file": (["--store", "nowhere.nc"], r"--store nowhere.nc: no such file"),
    "torn file": (["--store", "{torn}"], r"--store \S+torn.nc: not a whole NetCDF file; copy it anew"),
    "bucket": (
        ["--store", "s3://nobucket/v3.zarr", "--anonymous"],
        r"--store s3://nobucket/v3.zarr: no Zarr store there; nor can s3://nobucket/v3.zarr be listed: "
        r"NoSuchBucket: The specified bucket does not exist",
    ),
    "key": (
        ["--store", "s3://bucket/v4.zarr", "--anonymous"],
        r"--store s3://bucket/v4.zarr: no Zarr store there; s3://bucket holds .*v3.zarr, .*winds.nc",
    ),
    "no keys": (
        ["--store", "s3://bucket/v3.zarr"],
        r"--store s3://bucket/v3.zarr: no credentials .* --anonymous",
    ),
    "no client": (
        ["--store", "gs://bucket/v3.zarr", "--client", "fsspec"],
        r"--store gs://bucket/v3.zarr: .*gcsfs.*--client obstore",
    ),
    "scheme": (
        ["--store", "ftp://bucket/v3.zarr"],
        rf"--store ftp://bucket/v3.zarr: cannot be opened: .*Unable to recognise URL \S+; {NEITHER}",
    ),
    "NetCDF in a bucket": (
        ["--store", "s3://bucket/winds.nc", "--anonymous"],
        r"--store s3://bucket/winds.nc: .*; refer to it with make_references.py, or copy it",
    ),
    "cache": (
        ["--store", "{nan}", "--cache-dir", "{torn}"],
        r"--cache-dir \S+torn.nc: cannot be written to \(.+\); make room or give another folder",
    ),
    "variables": (
        ["--store", "{variables}"],
        r"--variables 10m_u\S+: not in \S+; choose from 10m_v_component_of_wind, u",
    ),
    "no variables": (
        ["--store", "{no_variables}"],
        r"--variables 10m_u\S+: not in \S+; choose from none: .*",
    ),
    "years": (
        ["--store", "{years}"],
        r"--store \S+: must hold times of 1991 to 1992; it holds 1982-01-\d\d to 1985-\d\d-\d\d",
    ),
    "empty": (["--store", "{empty}"], r"--store \S+: must hold times of 1982 to 1990; it holds no time"),
    "NaN": (["--store", "{nan}"], r"--store \S+: NaN or infinity at 1984-07\S*; mend it"),
    "missing chunk": (
        ["--store", "{chunk}"],
        r"\S+chunk.zarr/10m_v_component_of_wind/c/3/1/0: no such object, .*; write it anew",
    ),
    "missing in a shard": (["--store", "{inner}"], r"--store \S+: NaN or infinity at 1983-07\S*; mend it"),
    "fill value": (
        ["--store", "{filled}"],
        r"--store \S+: a chunk that is missing from a shard of 10m_u\S+ would be 0.0, and pass for data; .*NaN",
    ),
    "order of times": (
        ["--store", "{order}"],
        r"--store \S+: its times are not in order, or one stands twice; sort them, each once",
    ),
    "no coordinates": (["--store", "{bare}"], r"--store \S+: latitude has no coordinates; add them"),
    "numbers for times": (["--store", "{numbers}"], rf"--store \S+numbers.zarr: {NO_DATES}"),
    "another calendar": (["--store", "{calendar}"], rf"--store \S+calendar.zarr: {NO_DATES}"),
    "another calendar, NetCDF": (["--store", "{days}"], rf"--store \S+days.nc: {NO_DATES}"),
    "not references": (
        ["--store", "{other}"],
        rf"--store \S+other.json: cannot be opened: GroupNotFoundError: .*; {NEITHER}",
    ),
    "snapshot": (["--snapshot", "X"], r"--snapshot X: only an .icechunk repository has some; leave it out"),
    "fork": (
        ["--store", "gs://b/x.zarr", "--num-workers", "1", "--start-method", "fork"],
        r"--start-method fork: this store's client does not survive one; give forkserver",
    ),
    "patch": (
        ["--patch-size", "80", "--store", "{nan}"],
        r"--patch-size 80: .* 73 x 144; give a multiple of 4 up to 72",
    ),
    "deadline": (["--read-deadline", "0"], r"--read-deadline 0.0: too small; give at least 1"),
    "no deadline": (["--read-deadline", "inf"], r"--read-deadline inf: too large; give below 2\*\*32"),
    "client": (["--client", "boto"], r"--client: invalid choice: 'boto' \(choose from .*obstore.*\)"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line_and_writes_nothing(case: str, broken, server, tmp_path) -> None:
    flags, message = BAD_INPUT[case]
    flags = [flag.format(**broken) for flag in flags]
    began = time.monotonic()
    done = programs.run(TRAIN, "--output-dir", tmp_path / "run", *flags, environment=at(server))
    assert time.monotonic() - began < 40
    assert done.code == 2, done.err
    assert done.out == ""
    last = re.split(r"[\r\n]+", done.err.rstrip())[-1]
    assert re.fullmatch(rf"train.py: error: {message}", last.strip()), done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_is_refused_is_taken_as_absent_if_there_is_other(buckets) -> None:
    with serve(buckets, "--deny-key", "zarr.json") as address, pytest.MonkeyPatch.context() as patch:
        for name, value in at(address).items():  # as S3 answers whoever may read but not list
            patch.setenv(name, value)
        assert open_winds(Access("s3://bucket/v2.zarr", anonymous=True)).times.size == 108
        with pytest.raises(StoreError, match=r"^s3://bucket/v3.zarr/zarr.json: AccessDenied: "):
            open_winds(Access("s3://bucket/v3.zarr", anonymous=True))


@pytest.mark.parametrize("array", ["10m_v_component_of_wind", "latitude"])
def test_an_array_that_is_refused_is_not_said_to_be_missing(array: str, winds, tmp_path, monkeypatch) -> None:
    """Without consolidated metadata Zarr asks for each array's, and leaves out what it may not read in silence."""
    winds.to_zarr(tmp_path / "bucket/bare.zarr", zarr_format=3, consolidated=False)
    with serve(tmp_path, "--deny-key", f"{array}/zarr.json") as address:
        for name, value in at(address).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(object_store.InputError) as refused:
            open_winds(Access("s3://bucket/bare.zarr", anonymous=True))
    assert str(refused.value).endswith(
        f"; s3://bucket/bare.zarr/{array}/zarr.json: AccessDenied: Access Denied"
    )


def test_no_permission_names_the_object(buckets, tmp_path) -> None:
    with serve(buckets, "--deny-key", "v_component_of_wind/c/1") as address:
        flags = [*SMALL, "--store", "s3://bucket/v3.zarr", "--anonymous", "--output-dir", tmp_path / "run"]
        done = programs.run(TRAIN, *flags, environment=at(address))
    assert re.search(
        r"s3://bucket/v3.zarr/10m_v_component_of_wind/c/1\S* not read after 1 attempt: .*AccessDenied",
        one_line(done),
    )


# ------------------------------------------------------------------------------------- the reader's command


def processes(of: str) -> list[int]:
    """The processes of this machine whose command line has a text in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if of in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def test_the_readers_command_trains_from_s3_in_90_seconds_and_leaves_no_process() -> None:
    assert "uv run python train.py" in book.commands(README)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "train.py"], cwd=CHAPTER, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    pattern = r"linear interpolation +([\d.]+)\s+U-Net after 150 steps +([\d.]+) +\d+% below climatology"
    linear, network = map(float, re.search(pattern, done.stdout).groups())
    assert network < linear
    assert re.search(r"3.\d requests a sample, 5.\d bytes read for each used", done.stdout)
    # What the walkthrough shows is what this printed, but for the speed and the last digits of the RMSE.
    shown = re.search(pattern, README.read_text())
    assert [float(value) for value in shown.groups()] == pytest.approx([linear, network], abs=0.03)
    assert programs.in_time(seconds, 90)
    assert "warning" not in done.stderr.lower()
    programs.wait_for(lambda: not processes(f"local_s3.py --folder {CHAPTER}/outputs"), 5, "the server's end")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The chapter as in a fresh clone, with nothing made yet."""
    folder = tmp_path / CHAPTER.name
    folder.mkdir()
    (tmp_path / "01_setup").symlink_to(book.ROOT / "01_setup")
    for script in CHAPTER.glob("*.py"):
        (folder / script.name).symlink_to(script)
    return folder


def test_a_first_run_killed_while_it_makes_the_store_is_made_good(clone: Path) -> None:
    flags = ["--max-steps", "2", "--patch-size", "32"]
    store = clone / "outputs/buckets/winds/small.zarr"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen([sys.executable, clone / "train.py", *flags], **quiet, start_new_session=True)
    programs.wait_for((store / "10m_u_component_of_wind").exists, 60, "the store's beginning")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert '"identity"' not in (store / "zarr.json").read_text()
    done = programs.require_success(str(clone / "train.py"), *flags)
    assert "U-Net after 2 steps" in done.out
    assert '"identity"' in (store / "zarr.json").read_text()


def test_a_store_that_is_not_finished_says_so(buckets, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(buckets / "bucket/v3.zarr", store)
    zarr.open_group(store, mode="r+", use_consolidated=False).attrs["settings"] = {}  # make_store.py's first
    refused = programs.run(TRAIN, "--store", store, "--output-dir", tmp_path / "run")
    assert (refused.code, list(tmp_path.iterdir())) == (2, [store])
    assert "not finished; run the make_store.py command that began it once more" in one_line(refused)


def test_a_server_that_does_not_start_is_an_error(clone: Path) -> None:
    store = clone / "outputs/buckets/winds/small.zarr"
    store.mkdir(parents=True)
    (store / "zarr.json").write_text('{"identity": ""}')  # it need not be made
    (clone / "local_s3.py").unlink()
    (clone / "local_s3.py").write_text("raise SystemExit('no port is free')")
    done = programs.run(str(clone / "train.py"))
    assert done.code == 2
    assert "no port is free" in done.err
    assert "error: --store s3://winds/small.zarr: local_s3.py, which serves it, has failed" in done.err


def test_a_server_of_the_readers_own_is_used(buckets, clone: Path, tmp_path: Path) -> None:
    (buckets / "winds").mkdir(exist_ok=True)
    shutil.copytree(buckets / "bucket/v3.zarr", buckets / "winds/small.zarr", dirs_exist_ok=True)
    with serve(buckets, "--error-rate", 0.1) as address:
        train(tmp_path / "run", "--anonymous", environment=at(address))
        met = counts(address)
    assert met["SlowDown"] > 5
    assert json.loads((tmp_path / "run/summary.json").read_text())["retries"] > 0


@pytest.mark.parametrize("script", [TRAIN, "04_data_pipeline/train.py"])
def test_ctrl_c_is_answered_with_one_line(script: str, buckets, tmp_path) -> None:
    flags = [*SMALL, "--store", buckets / "bucket/v3.zarr", "--output-dir", tmp_path]
    stopped = programs.run(script, *flags, interrupt_at_step=4)
    assert stopped.code == 1 and "Traceback" not in stopped.err
    assert stopped.err.rstrip().endswith("\nstopped; --resume goes on from the last checkpoint")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "--output-dir", str(tmp_path), "--num-workers", "1"]
    run = subprocess.Popen(command, cwd=CHAPTER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "last.ckpt"
    programs.wait_for(log.exists, 90, "training")
    time.sleep(3)
    assert processes(f"local_s3.py --folder {CHAPTER}/outputs")
    run.send_signal(number)
    assert run.wait(timeout=30) != 0
    programs.wait_for(
        lambda: not processes(str(tmp_path)) and not processes(f"local_s3.py --folder {CHAPTER}/outputs"),
        20,
        "their end",
    )


def test_a_signal_to_the_whole_group_leaves_the_store_to_a_run_that_stops(tmp_path: Path) -> None:
    """As `timeout` and many schedulers send it: a validation that is under way still has to read."""
    flags = ["--validate-every", "1", "--read-deadline", "3", "--output-dir", str(tmp_path)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "train.py", *flags]
    with subprocess.Popen(command, cwd=CHAPTER, start_new_session=True, **pipes) as run:
        try:
            programs.wait_for((tmp_path / "last.ckpt").exists, 90, "training")
            (server,) = [
                child for child in psutil.Process(run.pid).children() if "local_s3.py" in str(child.cmdline())
            ]
            assert os.getpgid(server.pid) != run.pid
            time.sleep(4)  # most of it validates
            os.killpg(run.pid, signal.SIGTERM)
            _, said = run.communicate(timeout=90)
        finally:
            run.kill()
    assert run.returncode == 143 and "stopped by a signal after step" in said, said


# ------------------------------------------------------------------------------------------ public stores

ERA5 = "weatherbench2/datasets/era5/1959-2023_01_10"
PUBLIC = {  # bucket and key: rows and columns
    f"{ERA5}-wb13-6h-1440x721_with_derived_variables.zarr": (721, 1440),
    f"{ERA5}-6h-240x121_equiangular_with_poles_conservative.zarr": (121, 240),
    f"{ERA5}-6h-64x32_equiangular_conservative.zarr": (32, 64),
    "gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3": (721, 1440),
}


@pytest.mark.online
@pytest.mark.parametrize("place", PUBLIC)
def test_the_public_stores_are_as_the_book_says(place: str) -> None:
    try:
        urllib.request.urlopen("https://storage.googleapis.com", timeout=5)
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError as error:
        pytest.skip(f"this machine is offline: {error}")
    opened = open_winds(Access(f"gs://{place}", anonymous=True))
    assert (len(opened.latitude), len(opened.longitude)) == PUBLIC[place]
    assert len(opened.times) >= 9 * 365 * 4
    box = opened.read([(0, np.arange(16), np.arange(-8, 8) % len(opened.longitude))])
    assert np.abs(box).max() < 60


# -------------------------------------------------------------------------------------------------- look


@pytest.mark.parametrize("size, used", [(16, 16 * 16), (100, 73 * 100)])
def test_look_tells_what_a_patch_costs(size: int, used: int, winds: xr.Dataset, tmp_path: Path) -> None:
    path = write(winds, tmp_path / "maps.zarr", (1, 73, 144), compressors=None)
    done = programs.require_success(LOOK, path, "--patch-size", size)
    assert re.search(
        r"10m_u_component_of_wind \(time, .*\) \(132, 73, 144\) float32: chunks \(1, 73, 144\)", done.out
    )
    for way in ("one after another", "all at once"):
        pattern = (
            rf"8 patches of 10m_u\S+, {way}: \d+ ms, 8 requests of \d+ ms, ([\d.]+) bytes read for each used"
        )
        assert re.search(pattern, done.out).group(1) == f"{73 * 144 / used:.1f}", done.out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["nowhere.icechunk"], "--store nowhere.icechunk: no such repository"),
        (["nowhere.nc"], "--store nowhere.nc: no such file"),
        (["x.zarr", "--patch-size", "0"], "--patch-size 0: too small; give at least 1"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_look_refuses_bad_input_in_one_line(flags: list[str], message: str) -> None:
    done = programs.run(LOOK, *flags)
    assert (done.code, done.err) == (2, f"object_store.py: error: {message}\n")


# ------------------------------------------------------------------------ walkthrough, notebook and results


def test_every_command_of_the_walkthrough_runs(tmp_path: Path) -> None:
    commands = [line.removeprefix("uv run python ").split() for line in book.commands(README)]
    assert {command[0] for command in commands} >= {"train.py", "object_store.py", "make_store.py"}
    for script, *flags in commands:
        flags = [flag.strip("'") for flag in flags]
        few = ["--max-steps", 4, "--output-dir", tmp_path] if script == "train.py" else []
        done = programs.require_success(f"03_cloud_data/{script}", *flags, *few)
        assert script != "train.py" or "U-Net after 4 steps" in done.out


SCRIPTS = ["train", "object_store", "make_store", "make_references", "local_s3", "benchmark"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_program_is_for(script: str) -> None:
    done = programs.require_success(f"03_cloud_data/{script}.py", "--help")
    assert "Chapter 3" in done.out


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_flag_is_one_line(script: str) -> None:
    refused = programs.run(f"03_cloud_data/{script}.py", "--no-such-flag")
    assert refused.code == 2
    assert refused.err.startswith(f"{script}.py: error: ") and refused.err.count("\n") == 1, refused.err


def test_the_notebook_runs_with_reduced_settings() -> None:
    few = {"MAX_STEPS": 4, "PATCHES": 8, "REQUESTS": 64, "BATCHES": 8}
    notebook = book.execute(CHAPTER / "notebook.ipynb", few, timeout=600)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7


def test_the_committed_results_keep_their_promises() -> None:
    def rows(name: str) -> list[dict]:
        return book.results(f"03_cloud_data/results/{name}.json")["rows"]

    (command,) = rows("command")
    assert command["first_wall_seconds"]["max"] < 90
    assert command["summary"]["rmse"] < command["summary"]["linear interpolation"]
    far = {row["way"]: row["ms_per_sample"]["median"] for row in rows("ways") if "30 ms" in row["server"]}
    assert far["Winds.read, all at once"] < far["isel().load(), patch by patch"] / 4
    stores = [row for row in rows("sizes") if "statistics_kept" not in row]
    assert [row["gb"] for row in stores] == [1, 10, 30]
    assert all(row["peak_mb"]["max"] < 2000 for row in stores)
    first = [row["first_batch_seconds"]["median"] for row in stores]
    assert max(first) < 1.5 * min(first)  # flat
    assert all(row["peak_mb"] < 2000 for row in rows("sizes") if "statistics_kept" in row)
