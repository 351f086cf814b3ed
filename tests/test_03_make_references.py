"""Chapter 3: files that are read in place, through references on this machine and through an S3 server."""

import asyncio
import importlib.util
import json
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import xarray as xr
from zarr.core.sync import sync

SCRIPT = "03_cloud_data/make_references.py"
SERVER = book.ROOT / "03_cloud_data/local_s3.py"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
KINDS = ("json", "icechunk")

spec = importlib.util.spec_from_file_location("make_references", book.ROOT / SCRIPT)
chapter = importlib.util.module_from_spec(spec)
with pytest.MonkeyPatch.context() as patch:  # it imports its neighbour
    patch.syspath_prepend(book.ROOT / "03_cloud_data")
    spec.loader.exec_module(chapter)
sys.modules["make_references"] = chapter  # so that what is pickled is found again


def month(
    number: int, path: Path, latitudes: int = 7, packing: dict | None = None, **encoding: object
) -> None:
    """A month of ten days: u packed, with a hole, v as it is, and a time that each month counts its way."""
    first = np.datetime64(f"2001-{number:02}-01", "ns")
    rng = np.random.default_rng(number)
    values = rng.normal(size=(2, 10, latitudes, 8)).round(2).astype("float32")
    values[0, 3, 2] = np.nan
    coords = {
        "time": first + np.arange(10) * np.timedelta64(1, "D") + (number - 1) * np.timedelta64(6, "h"),
        "latitude": np.linspace(90, -90, latitudes),
        "longitude": np.arange(8) * 45.0,
    }
    attrs = {"units": "m s**-1"}
    fields = {name: (tuple(coords), part, attrs) for name, part in zip((U, V), values)}
    chunks = {"zlib": True, "chunksizes": (1, latitudes, 8)} | encoding
    packing = packing or {"scale_factor": 0.01, "add_offset": 1.0}
    encoding = {U: {"dtype": "int16", "_FillValue": -9999} | packing | chunks, V: chunks}
    unit = "days" if number == 1 else "hours"
    encoding["time"] = {"units": f"{unit} since {first.astype('datetime64[D]')}", "dtype": "int32"}
    xr.Dataset(fields, coords).to_netcdf(path, engine="h5netcdf", encoding=encoding)


@pytest.fixture
def months(tmp_path: Path) -> Path:
    """A folder of three months, which is a bucket, too."""
    folder = tmp_path / "buckets/files"
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        month(number, folder / f"winds_{number:02}.nc")
    return folder


@pytest.fixture(autouse=True)
def no_other_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials or endpoints but those that a test gives, and no process that has used icechunk."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("SHARED_CREDENTIALS_FILE", "CONFIG_FILE"):
        monkeypatch.setenv(f"AWS_{name}", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(chapter, "icechunk_user", None)


@contextmanager
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: object) -> Iterator[None]:
    """A server of the buckets in a folder, whose address and keys are in the environment."""
    command = [sys.executable, SERVER, "--folder", folder, "--latency-ms", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.stdout.readline().strip())
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
                monkeypatch.setenv(f"AWS_{name}", "any")
            yield
        finally:
            server.terminate()


@pytest.fixture
def bucket(months: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the bucket of months, on a server."""
    with serve(months.parent, monkeypatch):
        yield "s3://files"


def counted(what: str) -> int:
    """How many requests of a kind the server has counted."""
    return json.load(urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/counts")).get(what, 0)


def write(source: object, store: object, *flags: str) -> dict:
    return chapter.main(["--source", str(source), "--store", str(store), *flags])


def open_store(store: object):
    """A store of either kind."""
    return chapter.open_references(store) if str(store).endswith("json") else chapter.open_icechunk(store)[0]


def read(store, names: tuple[str, ...] = (U, V)) -> xr.Dataset:
    """Every day of some variables, all at once, in Zarr's event loop as training reads them."""
    dataset = xr.open_zarr(store, consolidated=False, chunks=None)[list(names)]

    async def days() -> list[xr.Dataset]:
        parts = (dataset.isel(time=[day]) for day in range(dataset.time.size))
        return await asyncio.gather(*(part.load_async() for part in parts))

    return xr.concat(sync(days()), "time", data_vars="minimal")


def truth(folder: Path, pattern: str = "*.nc") -> xr.Dataset:
    """What xarray reads from the files themselves."""
    parts = [xr.load_dataset(path) for path in sorted(folder.glob(pattern))]
    return xr.concat(parts, "time", data_vars="minimal")


def message(error: BaseException) -> str:
    """An error, and those that it came from."""
    return f"{error} {message(error.__cause__)}" if error.__cause__ else str(error)


# ------------------------------------------------------------------------------------------- the same values


def assert_same(found: xr.Dataset, expected: xr.Dataset) -> None:
    """To the bit, in names, dimensions, types, times, attributes and values."""
    xr.testing.assert_identical(found, expected)
    for name in expected.variables:
        assert found[name].dtype == expected[name].dtype
        assert found[name].values.tobytes() == expected[name].values.tobytes()


@pytest.mark.filterwarnings("error:Times can't be serialized")
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_in_place_to_the_bit(kind: str, months: Path, tmp_path: Path) -> None:
    expected = truth(months)
    assert expected[U].isnull().sum() == 3 * 8 and expected[U].dtype != "int16"
    store = tmp_path / f"new/winds.{kind}"
    figures = write(months / "*.nc", store)
    assert (figures["files"], figures["times"]) == (3, 30)
    assert_same(read(open_store(store)), expected)
    assert open_store(store).read_only
    copied = sum(path.stat().st_size for path in tmp_path.rglob("new/**/*") if path.is_file())
    assert copied < sum(path.stat().st_size for path in months.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_files_in_a_bucket_are_read_in_place_a_request_a_chunk(
    kind: str, months: Path, bucket: str, tmp_path: Path
) -> None:
    for number in (1, 2, 3):  # chunks large enough for icechunk to think of parts
        month(number, months / f"winds_{number:02}.nc", latitudes=361)
    (months / "deeper").mkdir()
    month(4, months / "deeper/winds_04.nc", latitudes=361)
    assert write(f"{bucket}/winds_*.nc", tmp_path / f"winds.{kind}")["files"] == 3
    store = open_store(tmp_path / f"winds.{kind}")
    before = counted("reads")
    assert_same(read(store), truth(months))
    assert counted("reads") - before == 2 * 30


def test_a_repository_may_lie_in_a_bucket(bucket: str, months: Path) -> None:
    (months.parent / "repositories").mkdir()
    store = "s3://repositories/deep/winds.icechunk"
    first, second = (write(f"{bucket}/{pattern}", store)["snapshot"] for pattern in ("*_01.nc", "*.nc"))
    assert_same(read(open_store(store)), truth(months))
    assert [chapter.open_icechunk(store, name)[1] for name in (first, None)] == [first, second]


def test_where_the_bucket_is_and_who_asks_may_change(
    months: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [tmp_path / f"winds.{kind}" for kind in KINDS]
    with serve(months.parent, monkeypatch):
        for store in stores:
            write("s3://files/*.nc", store)
            assert_same(read(open_store(store)), truth(months))
    with serve(months.parent, monkeypatch):
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{name}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        for store in stores:
            assert_same(read(open_store(store)), truth(months))


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")


def test_keys_come_from_a_profile(months: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (months.parent / "repositories").mkdir()
    (tmp_path / "keys").write_text("[team]\naws_access_key_id = A\naws_secret_access_key = B\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    with serve(months.parent, monkeypatch, "--require-keys"):
        without_keys(monkeypatch)
        monkeypatch.setenv("AWS_PROFILE", "team")
        for store in (tmp_path / "winds.json", "s3://repositories/winds.icechunk"):
            write("s3://files/*.nc", store)
            assert_same(read(open_store(store)), truth(months))
        assert counted("reads") and not counted("unsigned")
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        with pytest.raises(
            chapter.InputError, match=r"^--source s3://files/\*.nc: no credentials in .*profile"
        ):
            write("s3://files/*.nc", tmp_path / "no.json")
        write(months / "*.nc", tmp_path / "here.icechunk")  # which needs nobody's keys


def test_a_public_bucket_is_read_without_keys(
    bucket: str, months: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_keys(monkeypatch)
    with pytest.raises(chapter.InputError, match=r"^--source .*; for a public bucket, --anonymous$"):
        write(f"{bucket}/*.nc", tmp_path / "winds.json")
    write(f"{bucket}/*.nc", tmp_path / "winds.json", "--anonymous")
    assert_same(read(chapter.open_references(tmp_path / "winds.json", anonymous=True)), truth(months))


REGIONS = {
    "none": ({}, "us-east-1"),
    "one": ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
    "the other": ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
    "both": ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-1"),
    "the profile's": ({"AWS_PROFILE": "team"}, "eu-west-3"),
    "unsigned": ({"AWS_DEFAULT_REGION": "eu-west-2", "AWS_SKIP_SIGNATURE": "true"}, "eu-west-2"),
    "not for strangers": ({"AWS_PROFILE": "team", "AWS_SKIP_SIGNATURE": "true"}, "us-east-1"),
}


@pytest.mark.parametrize("case", REGIONS)
def test_the_region_comes_from_wherever_clients_look_for_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def ask(**options: object) -> None:
        raise Asked(options["region"])

    environment, region = REGIONS[case]
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(chapter.icechunk, "s3_storage", ask)
    with pytest.raises(Asked, match=f"^{region}$"):
        chapter.open_icechunk("s3://repositories/winds.icechunk")


# ---------------------------------------------------------------------------------------------- snapshots


def test_an_old_snapshot_still_reads_the_old_data(months: Path, tmp_path: Path) -> None:
    store = tmp_path / "winds.icechunk"
    later, expected = months / "winds_03.nc", truth(months)
    later.rename(tmp_path / "winds_03.nc")
    old = write(months / "*.nc", store)["snapshot"]
    (tmp_path / "winds_03.nc").rename(later)
    new = write(months / "*.nc", store)["snapshot"]
    assert old != new
    assert [chapter.open_icechunk(store, name)[1] for name in (None, new, old)] == [new, new, old]
    assert_same(read(chapter.open_icechunk(store)[0]), expected)
    assert_same(read(chapter.open_icechunk(store, old)[0]), expected.isel(time=slice(20)))
    history = [snapshot.message for snapshot in chapter.open_repository(str(store)).ancestry(branch="main")]
    assert history[:2] == ["30 times, 2001-01-01 to 2001-03-10", "20 times, 2001-01-01 to 2001-02-10"]


# ------------------------------------------------------------------------------------ what is lost or changed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["here", "in a bucket"])
def test_a_file_that_is_gone_is_an_error_and_not_a_nan(
    kind: str, place: str, months: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = months if place == "here" else request.getfixturevalue("bucket")
    write(f"{source}/*.nc", tmp_path / f"winds.{kind}")
    (months / "winds_02.nc").unlink()
    store = open_store(tmp_path / f"winds.{kind}")
    dataset = xr.open_zarr(store, consolidated=False, chunks=None)
    assert np.isfinite(dataset[V][[9, 20]]).all()
    with pytest.raises(Exception) as error:
        dataset[V][10].load()
    by_chunk = (kind, place) == ("icechunk", "in a bucket")  # icechunk names the chunk, and no file
    named = ("/c/10/0/0", "NoSuchKey") if by_chunk else ("winds_02.nc",)
    assert all(name in message(error.value) for name in named)


def test_icechunk_notices_a_file_that_has_changed(months: Path, tmp_path: Path) -> None:
    write(months / "*.nc", tmp_path / "winds.icechunk")
    path = months / "winds_02.nc"
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime + 60))
    with pytest.raises(Exception, match=r"modified|changed"):
        read(open_store(tmp_path / "winds.icechunk"))


# ------------------------------------------------------------------------------------------ other processes


def read_in_child(path: Path, pickled: bytes | None, environment: dict[str, str]) -> None:
    """End with 0 if the store can be read here, with 3 if icechunk is refused; a read that hangs is ended."""
    signal.alarm(20)
    os.environ |= environment  # the forkserver's own is that of the moment when it was started
    try:
        assert read(open_store(path), (V,)).time.size == 30
        assert pickled is None or read(pickle.loads(pickled), (V,)).time.size == 30
    except Exception as error:
        os._exit(3 if "does not survive a fork" in str(error) else 4)
    os._exit(0)


def ends(method: str, path: Path, pickled: bytes | None = None) -> int:
    """How a child ends that reads."""
    child = multiprocessing.get_context(method).Process(
        target=read_in_child, args=(path, pickled, dict(os.environ))
    )
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_workers_can_do_with_a_store(kind: str, bucket: str, tmp_path: Path) -> None:
    path = tmp_path / f"winds.{kind}"
    write(f"{bucket}/*.nc", path)
    assert read(store := open_store(path)).time.size == 30
    assert ends("forkserver", path, pickle.dumps(store)) == 0
    assert ends("fork", path) == (0 if kind == "json" else 3)  # 3: an error, in place of a hang


# ------------------------------------------------------------------------------------------------ bad input


def other_grid(folder: Path) -> None:
    month(2, folder / "winds_02.nc", latitudes=9)


def other_packing(folder: Path) -> None:
    month(2, folder / "winds_02.nc", packing={"scale_factor": 0.02, "add_offset": 1.0})


def other_chunks(folder: Path) -> None:
    month(2, folder / "winds_02.nc", chunksizes=(1, 7, 4))


def long_chunks(folder: Path) -> None:
    for number in (1, 2, 3):
        month(number, folder / f"winds_{number:02}.nc", chunksizes=(4, 7, 8))


def overlap(folder: Path) -> None:
    shutil.copy(folder / "winds_02.nc", folder / "winds_02_again.nc")


def cut_short(folder: Path) -> None:
    path = folder / "winds_02.nc"
    path.write_bytes(path.read_bytes()[:5000])


def no_time(folder: Path) -> None:
    xr.load_dataset(folder / "winds_02.nc").isel(time=0, drop=True).to_netcdf(folder / "winds_02.nc")


BAD_FILES = {
    other_grid: rf"\S+winds_02.nc: .* of (latitude|{U}) are not those of \S+winds_01.nc; leave it out, or",
    other_packing: rf"\S+winds_02.nc: grid, chunks, compression or packing of {U} are not those of",
    other_chunks: rf"\S+winds_02.nc: grid, chunks, compression or packing of {U} are not those of",
    long_chunks: r" ValueError: Cannot concatenate arrays with partial chunks .* Copy them with make_store.py",
    overlap: r"\S+winds_02_again.nc: begins before \S+winds_02.nc ends; leave it out",
    cut_short: r"\S+winds_02.nc: not a NetCDF-4 file that can be referred to \(.*truncated",
    no_time: r"\S+winds_02.nc: has no times",
}


@pytest.mark.parametrize("spoil", BAD_FILES, ids=lambda spoil: spoil.__name__)
def test_files_that_do_not_fit_are_named_and_nothing_is_written(spoil, months: Path, tmp_path: Path) -> None:
    spoil(months)
    with pytest.raises(chapter.InputError) as error:
        write(months / "*.nc", tmp_path / "winds.icechunk")
    assert re.match(rf"--source:? ?{BAD_FILES[spoil].lstrip()}", str(error.value)), error.value
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["buckets"]


BAD_INPUT = {
    "no files": ("{files}/none_*.nc", "{new}.json", r"--source \S+none_\*.nc: no such files"),
    "no folder": ("nowhere/*.nc", "{new}.icechunk", r"--source nowhere/\*.nc: no such files"),
    "no such cloud": (
        "gs://b/*.nc",
        "{new}.json",
        r"--source gs://b/\*.nc: give files on this machine, or s3",
    ),
    "no kind": ("{files}/*.nc", "{new}.zarr", r"--store \S+.zarr: give a file, .json, or a repository"),
    "json in a bucket": ("{files}/*.nc", "s3://b/w.json", r"--store s3://b/w.json: give a file"),
    "other json": ("{files}/*.nc", "{other}.json", r"--store \S+other.json: is there, and something else"),
    "other folder": (
        "{files}/*.nc",
        "{other}.icechunk",
        r"--store \S+other.icechunk: is there, and something",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_nothing_is_written(case: str, months: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "other.icechunk").mkdir()
    (tmp_path / "other.icechunk/mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    source, store, expected = BAD_INPUT[case]
    names = {"files": months, "new": tmp_path / "new", "other": tmp_path / "other"}
    with pytest.raises(chapter.InputError, match=f"^{expected}"):
        write(source.format(**names), store.format(**names))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_program_ends_with_one_line(months: Path, tmp_path: Path) -> None:
    nobody = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"} | dict.fromkeys(
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any"
    )
    store = ["--store", tmp_path / "winds.json"]
    done = programs.run(SCRIPT, *store, "--source", "s3://files/*.nc", environment=nobody)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"make_references.py: error: .+\n", done.err), done.err
    with pytest.raises(chapter.InputError, match=r"--source"):
        chapter.main([str(part) for part in store])
    done = programs.require_success(SCRIPT, *store, "--source", months / "*.nc")
    assert re.match(r"\S+winds.json: files 3, times 30, scan_seconds \S+, bytes \d+\n", done.out)


def test_an_error_without_a_message_is_told_by_its_name(
    months: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_, **__) -> None:
        raise kind

    kind, line = ValueError, ["--source", str(months / "*.nc"), "--store", str(tmp_path / "winds.json")]
    with monkeypatch.context() as patch:
        patch.setattr(chapter.xr, "concat", fail)
        with pytest.raises(chapter.InputError, match=r"^--source: ValueError: .*make_store.py$"):
            chapter.main(line)
    kind = TimeoutError
    with monkeypatch.context() as patch:
        patch.setattr(chapter, "open_virtual_dataset", fail)
        with pytest.raises(chapter.InputError, match=r"^--source \S+winds_01.nc: .*\(TimeoutError:\)$"):
            chapter.main(line)
    monkeypatch.setattr("glob.glob", fail)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *line])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(book.ROOT / SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("make_references.py: error: TimeoutError:\n")


def test_a_full_disk_keeps_the_references_of_before(months: Path, tmp_path: Path) -> None:
    path = tmp_path / "winds.json"
    write(months / "winds_01.nc", path)
    before = path.read_bytes()
    done = programs.run(SCRIPT, "--source", months / "*.nc", "--store", path, file_size=len(before) + 100)
    assert done.code == 2
    assert re.search(r"error: --store \S+winds.json: cannot write it .*; make room", done.err), done.err
    assert path.read_bytes() == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["buckets", "winds.json"]


def test_no_repository_is_an_error_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(chapter.StoreError, match=r"^--store \S+none.icechunk: no such repository"):
        chapter.open_icechunk(tmp_path / "none.icechunk")
    assert not list(tmp_path.iterdir())
