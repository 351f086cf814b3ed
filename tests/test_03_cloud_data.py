"""Chapter 3: train.py ends at the same weights wherever it reads, and says which object it could not read."""

import inspect
import json
import os
import pickle
import re
import shutil
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import book
import buckets
import numpy as np
import programs
import psutil
import pytest
import web_server
import xarray as xr
import zarr
from runs import (
    assert_resumed,
    assert_same_bits,
    assert_same_but_for_rounding,
    check_summary,
    load,
    losses,
    run_readers_command,
    summary,
)
from torch._utils import ExceptionWrapper

CHAPTER, SCRIPT = book.ROOT / "03_cloud_data", "03_cloud_data/train.py"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
LAYOUTS = {"v3": "", "v2": "--zarr-format 2", "shards": "--shard-times 4"}
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4".split()
SMALL += "--checkpoint-every 2 --log-every 1".split()
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
GAP = (slice(5, 25), slice(10, 50))  # rows and columns of the map that some tests mask
SECRET = "5e4d5ec4e7"
BEFORE_A_DEADLINE = 100  # seconds: far more than the 1 that a test gives, less than the 120 of the default

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    # Of which train.py shows none, either.
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]
thorough = pytest.mark.thorough
chapter = load(SCRIPT, "chapter_03_train")
sys.modules["chapter_03_train"] = chapter  # where pickle looks for its classes


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory):
    """No credentials but those that a test gives: an environment for programs, and for this process."""
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), nowhere)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        environment = files | {"AWS_EC2_METADATA_DISABLED": "true"}
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """make_store.py, whose files stay apart from a reader's."""
    script = load("03_cloud_data/make_store.py", "make_store_for_training")
    script.HERE = tmp_path_factory.mktemp("chapter")
    return lambda *flags: script.main([str(flag) for flag in flags])


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets; its bucket `winds` has a store of each layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name, flags in LAYOUTS.items():
        make_small_store(folder / "winds" / name, flags)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path, aws: dict):
    with buckets.serving(folder, latency_ms=0) as address:
        yield address


@pytest.fixture(scope="module")
def unreliable(folder: Path):
    with buckets.serving(folder, latency_ms=0, **FAULTS) as address:
        yield address


@pytest.fixture(scope="module")
def guarded(folder: Path):
    with buckets.serving(folder, latency_ms=0, access_key="reader") as address:
        yield address


@pytest.fixture(scope="module")
def broken(folder: Path):
    with buckets.serving(folder, latency_ms=0, error_rate=1) as address:
        yield address


def s3(address: str, name: str = "v3") -> list[str]:
    """The flags that read a store of the bucket."""
    return ["--store", f"s3://winds/{name}", "--endpoint", address, "--anonymous"]


def arguments(*flags: object) -> Namespace:
    return chapter.parse_arguments([*SMALL, *map(str, flags)])


def training(*flags: object):
    """The training patches under these flags, in this process."""
    return chapter.make_patches(arguments(*flags))[0]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(*flags: object) -> str:
        with pytest.raises(SystemExit) as ended:
            chapter.main([*SMALL, *map(str, flags)])
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


# ------------------------------------------------------------------------------ as a reader runs it


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.10, marks=thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_most: float, tmp_path: Path) -> None:
    """It makes the small store if it is not there, serves it, trains, and leaves no process."""
    printed = run_readers_command(CHAPTER, steps, tmp_path)
    assert check_summary(printed) <= at_most
    requests, size = re.search(r"([\d.]+) requests and ([\d.]+) MB for a sample\n", printed).groups()
    figures = summary(tmp_path)
    assert float(requests) == pytest.approx(figures["requests_per_sample"], abs=0.05)
    assert float(size) == pytest.approx(figures["bytes_per_sample"] / 1e6, abs=0.005)
    assert figures["requests_per_sample"] >= 2  # an object a variable, at least
    assert figures["bytes_per_sample"] > 64 * 64


@thorough
def test_the_readers_command_killed_leaves_no_process(tmp_path: Path) -> None:
    """Neither the server, nor a worker, nor what starts the workers."""
    before = programs.running()
    flags = ["--max-steps", 4, "--num-workers", 2, "--output-dir", tmp_path]
    assert programs.run(SCRIPT, *flags, kill_at_step=2).code == -9
    assert_nothing_left(before)


def assert_nothing_left(before: list[psutil.Process]) -> None:
    """What has been started since then ends by itself."""
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []


# ------------------------------------------------------------------------------ the same result

KEY = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": SECRET}
WAYS = {  # layout, server, more flags
    "a folder": ("v3", None, ""),
    "S3 with a key, Zarr v2": ("v2", "guarded", ""),
    "S3 that fails, shards": ("shards", "unreliable", ""),
}
SLOW_WAYS = {
    "S3": ("v3", "address", ""),
    "S3 that fails": ("v3", "unreliable", ""),
    "2 workers": ("v3", "address", "--num-workers 2"),
    "2 workers by spawn": ("v3", "address", "--num-workers 2 --start-method spawn"),
    "2 workers, S3 that fails, shards": ("shards", "unreliable", "--num-workers 2"),
}


@pytest.fixture(scope="module")
def start(folder: Path, address, guarded, unreliable, aws: dict) -> Callable:
    """Start to train one of these ways, in double precision, as runs on several ranks are compared in it."""
    servers = {"address": address, "guarded": guarded, "unreliable": unreliable}

    def call(way: tuple[str, str | None, str], output: Path) -> programs.Program:
        layout, server, flags = way
        store = s3(servers[server], layout) if server else ["--store", folder / "winds" / layout]
        environment = aws | (KEY if server == "guarded" else {})
        store = store[:4] if server == "guarded" else store  # not anonymous
        flags = [*SMALL, *store, *flags.split(), "--output-dir", output]
        return programs.Program(SCRIPT, *flags, environment=environment, double_precision=True)

    return call


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, programs.Run]]:
    """What each of WAYS has left, and how it ended. They run side by side."""
    folders = {way: tmp_path_factory.mktemp("run") for way in WAYS}
    runs = {way: start(WAYS[way], folders[way]) for way in WAYS}
    return {way: (folders[way], run.wait()) for way, run in runs.items()}


@pytest.fixture(scope="module")
def whole(trained: dict) -> Path:
    """A run from a folder that nobody interrupted."""
    folder, done = trained["a folder"]
    assert done.code == 0, done.err
    return folder


def assert_same(one: Path, other: Path) -> None:
    """The same weights, losses and figures, to the bit."""
    assert_same_bits(one, other)
    assert losses(one) == losses(other)
    assert summary(one)["rmse"] == summary(other)["rmse"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a folder"])
def test_the_same_weights_from_anywhere(way: str, trained: dict, whole: Path) -> None:
    folder, done = trained[way]
    assert done.code == 0, done.err
    assert_same(folder, whole)


@thorough
@pytest.mark.parametrize("way", SLOW_WAYS)
def test_the_same_weights_with_workers(way: str, start, whole: Path, tmp_path: Path) -> None:
    done = start(SLOW_WAYS[way], tmp_path).wait()
    assert done.code == 0, done.err
    assert_same(tmp_path, whole)
    if "shards" not in way:  # those are other objects
        for name in ("requests_per_sample", "bytes_per_sample"):
            assert summary(tmp_path)[name] == summary(whole)[name]


def test_the_server_that_fails_has_failed(trained: dict, unreliable: str) -> None:
    with urllib.request.urlopen(f"{unreliable}/_counts") as reply:
        counts = json.load(reply)
    assert min(counts["SlowDown"], counts["reset"], counts["truncated"]) > 0, counts


@thorough  # in the gate in chapters 4 and 5
def test_killed_with_workers_nothing_is_left_and_it_resumes_to_the_bit_without(
    address: str, tmp_path: Path, whole: Path
) -> None:
    """The workers start after their parent has read, and prepare the steps before the kill."""
    before = programs.running()
    flags = [*SMALL, *s3(address), "--output-dir", tmp_path]
    killed = programs.run(SCRIPT, *flags, "--num-workers", 2, kill_at_step=3, double_precision=True)
    assert killed.code == -9, killed.err
    assert_nothing_left(before)
    programs.require_success(SCRIPT, *flags, "--resume", double_precision=True)
    assert_same_bits(tmp_path, whole)
    assert_resumed(tmp_path, 2, whole)


def test_patches_go_to_a_worker_after_their_parent_has_read(address: str) -> None:
    patches = training(*s3(address))
    sample = patches[0, 0]
    sent = pickle.loads(pickle.dumps(patches))[0, 0]
    assert all(np.array_equal(sent[name], sample[name]) for name in sample)


def test_two_ranks_end_at_the_weights_of_one(address: str, tmp_path: Path, whole: Path) -> None:
    flags = [*SMALL, *s3(address), "--output-dir", tmp_path]
    done = programs.run_ranks(SCRIPT, 2, *flags, double_precision=True)
    assert [getattr(one, "code", one) for one in done] == [0, 0], programs.printed(done)
    assert_same_but_for_rounding(tmp_path, whole)


@thorough
@pytest.mark.parametrize("step", [1, 2, 3])
def test_two_ranks_killed_and_resumed_to_the_bit(step: int, address: str, tmp_path: Path) -> None:
    flags = [*SMALL, *s3(address), "--resume", "auto", "--num-workers", 1, "--output-dir"]
    for folder, kill in (("whole", {}), ("run", {1: {"kill_at_step": step}}), ("run", {})):
        done = programs.run_ranks(SCRIPT, 2, *flags, tmp_path / folder, planted=kill)
        codes = [getattr(one, "code", one) for one in done]
        assert codes[1] == (-9 if kill else 0), programs.printed(done)
        assert (codes[0] != 0) is bool(kill), programs.printed(done)
    assert_same_bits(tmp_path / "run", tmp_path / "whole")
    if step >= 2:
        assert_resumed(tmp_path / "run", 2, tmp_path / "whole")


def test_of_two_ranks_the_one_that_finds_no_fault_says_that_the_other_did(
    folder: Path, drawn: tuple[int, str], tmp_path: Path
) -> None:
    """Rank 0's first sample has a hole. Gloo's stack would be the last that a reader sees."""
    store = shutil.copytree(folder / "winds/v3", tmp_path / "store")
    put(np.nan)(store, drawn[0])
    first, second = programs.run_ranks(SCRIPT, 2, *SMALL, "--store", store, "--output-dir", tmp_path / "run")
    assert (first.code, second.code) == (2, 2), programs.printed([first, second])
    assert first.err.splitlines()[-1].startswith(
        f"train.py: error: --store {store}: {A_DATE}".format(date=drawn[1])
    )
    assert second.err.splitlines()[-1].startswith(
        "train.py: error: another rank failed, or does not answer; its own"
    )
    assert "Traceback" not in second.err


# ------------------------------------------------------------------------------ any layout


def around(dataset: xr.Dataset) -> xr.Dataset:
    """From 180 degrees west, and not from 0."""
    return dataset.assign_coords(longitude=(dataset.longitude + 180) % 360 - 180).sortby("longitude")


def flipped(dim: str) -> Callable:
    return lambda data: data.isel({dim: slice(None, None, -1)})


def in_no_order(dataset: xr.Dataset) -> xr.Dataset:
    return dataset.isel(longitude=np.random.default_rng(0).permutation(dataset.sizes["longitude"]))


def first_again(dataset: xr.Dataset) -> xr.Dataset:
    """With longitude 0 a second time, as 360."""
    first = dataset.isel(longitude=[0])
    return xr.concat([dataset, first.assign_coords(longitude=first.longitude + 360)], "longitude")


OTHER_LAYOUTS = {  # what becomes of the dataset, and the columns by which its map begins later
    "time last": (lambda data: data.transpose("latitude", "longitude", ...), 0),
    "longitude first": (lambda data: data.transpose("longitude", ...), 0),
    "from south to north": (flipped("latitude"), 0),
    "from east to west": (flipped("longitude"), 0),
    "from 180 degrees west": (around, 36),
    "longitudes in no order": (in_no_order, 0),
    "the first column again": (first_again, 0),
    "short names": (lambda data: data.rename(latitude="lat", longitude="lon"), 0),
    "known by units": (lambda data: data.rename(latitude="y", longitude="x"), 0),
    "all of these": (
        lambda data: (
            flipped("latitude")(around(data)).transpose(..., "longitude", "latitude").rename(latitude="lat")
        ),
        36,
    ),
}
OLD_NAMES = {"lat": "latitude", "lon": "longitude", "y": "latitude", "x": "longitude"}


@pytest.fixture(scope="module")
def fields(folder: Path) -> tuple[xr.Dataset, xr.Dataset]:
    """The fields and their statistics, loaded."""
    store = folder / "winds/v3"
    opened = [xr.open_zarr(store), xr.open_zarr(store, group=f"statistics/{U}_{V}_1982_1989")]
    fields, statistics = (one.load().drop_encoding() for one in opened)
    fields.attrs = {}
    for one in (fields, statistics):
        one.latitude.attrs, one.longitude.attrs = {"units": "degrees_north"}, {"units": "degrees_east"}
    return fields, statistics


@pytest.mark.parametrize(
    ("layout", "zarr_format"), [*((layout, 3) for layout in OTHER_LAYOUTS), ("all of these", 2)]
)
def test_other_layouts_have_the_same_samples(
    layout: str, zarr_format: int, fields: tuple, folder: Path, tmp_path: Path
) -> None:
    transform, shift = OTHER_LAYOUTS[layout]
    options = {"zarr_format": zarr_format, "consolidated": True}
    transform(fields[0]).to_zarr(tmp_path / "other", **options)
    group = f"statistics/{U}_{V}_1982_1989"
    statistics = transform(fields[1])
    statistics = statistics.rename({new: old for new, old in OLD_NAMES.items() if new in statistics.dims})
    statistics.to_zarr(tmp_path / "other", group=group, **options)
    zarr.consolidate_metadata(tmp_path / "other")
    other, plain = training("--store", tmp_path / "other"), training("--store", folder / "winds/v3")
    crossing = 0
    for address in [(step, k) for step in range(5) for k in range(4)]:
        time, row, column, swath = plain.sample(*address)
        here = time, row, (column + shift) % 72
        expected = plain.make(plain.store.read([plain.region(*here)])[0], (*here, swath))
        sample = other[address]
        for name in expected:
            np.testing.assert_array_equal(sample[name], expected[name])
        crossing += column + 16 > 72
    assert crossing  # the seam


# ------------------------------------------------------------------------------ no silence for a number


@pytest.fixture(scope="module")
def drawn(folder: Path) -> tuple[int, str]:
    """The time of the first sample: its number in the store, and its date."""
    patches = training("--store", folder / "winds/v3")
    time, *_ = patches.sample(0, 0)
    return patches.places[time], str(patches.times[time])[:10]


def objects(store: Path, place: int) -> list[Path]:
    """Those of u that hold a time of the store."""
    array = zarr.open_array(store / U, mode="r")
    time = place // (array.shards or array.chunks)[0]
    return [*store.glob(f"{U}/c/{time}/*/*"), *store.glob(f"{U}/{time}.*")]


def each(change: Callable[[Path], object]) -> Callable:
    """Do that to each of these objects."""
    return lambda store, place: [change(path) for path in objects(store, place)]


def lose(key: str) -> Callable:
    return lambda store, place: (store / key).unlink()


def put(value: float) -> Callable:
    """Write a value into all of u at a time. Of a chunk of NaN alone, Zarr leaves nothing, nor in a shard."""

    def change(store: Path, place: int) -> None:
        zarr.open_array(store / U, mode="r+").with_config({"write_empty_chunks": False})[place] = value

    return change


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    """A bit in some bytes of the first half: of a shard, not in its index, and in each of its chunks."""
    data = bytearray(path.read_bytes())
    for place in range(20, len(data) // 2, 500):
        data[place] ^= 1
    path.write_bytes(data)


def fill_with(number: str) -> Callable:
    """As other tools make stores, what is missing is a number. And at a time, u is."""

    def change(store: Path, place: int) -> None:
        for path in [*store.rglob("zarr.json"), *store.rglob(".zarray"), *store.glob(".zmetadata")]:
            path.write_text(re.sub(r'"fill_value": *"NaN"', f'"fill_value": {number}', path.read_text()))
        each(Path.unlink)(store, place)

    return change


STATISTICS = f"statistics/{U}_{V}_1982_1989"
A_DATE = "NaN or infinity on {date}"
A_CHUNK = U + r" of {date}\S*: .*checksum"
DAMAGE = {  # layout, what is done, what the last line says
    "NaN": ("v3", put(np.nan), A_DATE),
    "infinity": ("v3", put(np.inf), A_DATE),
    "a chunk missing": ("v3", each(Path.unlink), A_DATE),
    "a chunk missing, v2": ("v2", each(Path.unlink), A_DATE),
    "a chunk missing in a shard": ("shards", put(np.nan), A_DATE),
    "a shard missing": ("shards", each(Path.unlink), A_DATE),
    "missing where 0 is filled in": ("v3", fill_with("0.0"), rf".*{U}/c/{{place}}/\d/\d: .* missing"),
    "missing where anything is": ("v2", fill_with("null"), rf".*{U}/{{place}}\.\d\.\d: .* missing"),
    "an object cut": ("v3", each(cut), A_CHUNK),
    "a shard cut": ("shards", each(cut), A_CHUNK),
    "a flipped bit": ("v3", each(flip), A_CHUNK),
    "flipped bits in a shard": ("shards", each(flip), A_CHUNK),
    "latitude missing": ("v3", lose("latitude/c/0"), "a coordinate repeats: .* missing"),
    "longitude missing, v2": ("v2", lose("longitude/0"), "a coordinate repeats: .* missing"),
    "time missing": ("v3", lose("time/c/0"), "a coordinate repeats: .* missing"),
    "latitude of statistics missing": ("v3", lose(f"{STATISTICS}/latitude/c/0"), ".*another grid"),
    "flipped bits in statistics": (
        "v3",
        lambda store, place: flip(store / STATISTICS / U / "c/3/0/0"),
        ".*checksum",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_or_missing_is_named(
    case: str, folder: Path, address: str, drawn: tuple[int, str], tmp_path: Path, refused
) -> None:
    (layout, damage, message), (place, date) = DAMAGE[case], drawn
    name = re.sub(r"\W+", "_", case)
    store = shutil.copytree(folder / "winds" / layout, folder / "winds" / name)
    damage(store, place)
    said = refused(*s3(address, name), "--output-dir", tmp_path)
    assert re.match(f"--store s3://winds/{name}: " + message.format(place=place, date=date), said), said
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("part", ["validation_times", pytest.param("test_times", marks=thorough)])
def test_a_missing_chunk_is_found_where_it_is_judged(
    part: str, folder: Path, tmp_path: Path, refused
) -> None:
    store = shutil.copytree(folder / "winds/v3", tmp_path / "store")
    time = xr.open_zarr(store).time
    judged = time.sel(time=slice(*getattr(arguments("--store", store), part))).values
    for place in np.flatnonzero(np.isin(time, judged)):
        each(Path.unlink)(store, place)
    said = refused("--store", store, "--validate-every", 1, "--output-dir", tmp_path / "run")
    assert any(said.startswith(f"--store {store}: NaN or infinity on {str(date)[:10]}") for date in judged), (
        said
    )


def test_masked_cells_train_and_are_in_no_count(make, fields: tuple, tmp_path: Path) -> None:
    """Those in which one of the variables has no value at any training time."""
    gap = np.zeros((37, 72), bool)
    gap[GAP] = True
    dataset = fields[0].copy()
    dataset[U] = dataset[U].where(~gap)
    dataset.to_netcdf(tmp_path / "masked.nc")
    make("--source", tmp_path / "masked.nc", "--patch-size", 16, "--store", tmp_path / "masked")
    flags = ["--store", tmp_path / "masked", "--patch-size", 16]
    patches, masked_cells = training(*flags), 0
    np.testing.assert_array_equal(patches.valid, ~gap[::-1])  # from south to north
    for k, sample in enumerate(patches.__getitems__([(0, k) for k in range(20)])):
        _, row, column, swath = patches.sample(0, k)
        masked = ~patches.cut(patches.valid, row, column)
        np.testing.assert_array_equal(sample["input"][-1], swath & ~masked)
        np.testing.assert_array_equal(sample["unseen"][0], ~swath & ~masked)
        assert not sample["target"][:, masked].any()
        masked_cells += masked.sum()
    assert masked_cells
    figures = chapter.main([*SMALL, *map(str, flags), "--output-dir", str(tmp_path / "run")])
    assert all(0 < row["m/s"] < 10 for row in figures["rmse"].values())


def test_a_sample_is_the_anomaly_of_its_date(folder: Path, fields: tuple) -> None:
    """From the month's mean over the training times, in units of the standard deviation."""
    dataset = fields[0].isel(latitude=slice(None, None, -1)).astype("float64")
    months = dataset.sel(time=slice("1982", "1989")).groupby("time.month")
    mean, std = months.mean(), (months - months.mean()).std()
    patches = training("--store", folder / "winds/v3")
    for k in range(8):
        time, row, column, swath = patches.sample(3, k)
        there = {"latitude": slice(row, row + 16), "longitude": np.arange(column, column + 16) % 72}
        field = dataset.sel(time=patches.times[time])
        anomaly = ((field - mean.sel(month=field.time.dt.month)) / std).isel(there)[[U, V]].to_dataarray()
        sample = patches[3, k]
        np.testing.assert_allclose(sample["target"], anomaly, atol=1e-5)
        np.testing.assert_array_equal(sample["input"], [*sample["target"] * swath, swath])
        weight = np.cos(np.deg2rad(anomaly.latitude.values[:, None])) * ~swath
        np.testing.assert_allclose(sample["weight"][0], weight, atol=1e-6)


# ------------------------------------------------------------------------------ a bucket that fails for good


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=thorough)])
def test_a_bucket_that_is_gone_ends_the_run_after_the_deadline(
    workers: int, folder: Path, aws: dict, tmp_path: Path
) -> None:
    """And the last line names the object."""
    flags = [*SMALL, "--max-steps", 10_000, "--deadline", 1, "--num-workers", workers]
    with buckets.serving(folder, latency_ms=0) as address:
        run = programs.Program(SCRIPT, *flags, *s3(address), "--output-dir", tmp_path, slow_steps=0.1)
        programs.wait_for((tmp_path / "last.ckpt").exists, run, "its first checkpoint")
    done = run.wait(BEFORE_A_DEADLINE)
    assert done.code == 2, done.err
    last, name = done.err.splitlines()[-1], "10m_[uv]_component_of_wind"
    assert re.match(rf"train.py: error: --store s3://winds/v3: {name} of \S+: {name}/c/\d+/\d/\d: ", last), (
        last
    )


def test_what_a_worker_could_not_read_is_said_in_one_line(tmp_path: Path, monkeypatch, refused) -> None:
    """DataLoader passes it on as the text of a traceback."""

    def train(args: Namespace) -> None:
        try:
            raise chapter.StoreError("the/key: gone")
        except chapter.StoreError:
            failed = ExceptionWrapper(where="in a worker")
        failed.reraise()

    monkeypatch.setattr(chapter, "train", train)
    assert refused("--store", tmp_path) == f"--store {tmp_path}: the/key: gone"


GONE = f"""
import sys
sys.path.insert(0, {str(CHAPTER)!r})
import train as script

make_patches = script.make_patches
def and_the_bucket_goes(args):
    patches = make_patches(args)
    args.endpoint = args.endpoint.replace("127.0.0.1", "127.0.0.2")
    return patches
script.make_patches = and_the_bucket_goes
if __name__ == "__main__":
    script.main()
"""


@thorough
def test_a_bucket_that_is_gone_before_a_worker_opens_it(address: str, tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text(GONE)
    flags = [*SMALL, *s3(address), "--deadline", 1, "--num-workers", 1, "--output-dir", tmp_path / "run"]
    done = programs.run(tmp_path / "gone.py", *flags)
    assert done.code == 2, done.err
    assert "error: --store s3://winds/v3: " in done.err.splitlines()[-1]


# ------------------------------------------------------------------------------ a web server


@pytest.fixture(scope="module")
def web(folder: Path, fields: tuple):
    """The bucket behind a plain web server, which neither lists nor knows ranges, and what it is asked for."""
    fields[0].isel(time=slice(4)).to_zarr(folder / "winds/not_consolidated", consolidated=False)
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *about: object) -> None:
            asked.append(self.requestline)

    handler = partial(Handler, directory=folder / "winds")
    with web_server.serving_files(handler) as address:
        yield address, asked


def test_a_web_server_serves_a_store(web: tuple, folder: Path) -> None:
    own = training("--store", folder / "winds/v3")
    served = training("--store", f"{web[0]}/v3")
    np.testing.assert_array_equal(served[0, 0]["target"], own[0, 0]["target"])


def test_a_web_server_is_not_asked_to_list_a_store(web: tuple, tmp_path: Path, refused) -> None:
    """obstore would ask it again and again until the deadline."""
    store = f"{web[0]}/not_consolidated"
    said = refused("--store", store, "--output-dir", tmp_path / "run")
    assert re.match(f"--store {store}: .* cannot list a store; run zarr.consolidate_metadata", said), said
    assert not [line for line in web[1] if line.startswith("PROPFIND")]


def test_a_server_without_ranges_cannot_serve_shards(web: tuple, tmp_path: Path, refused) -> None:
    said = refused("--store", f"{web[0]}/shards", "--output-dir", tmp_path)
    assert re.match(r"--store \S+: .*shards need range requests, .*; copy the store to", said), said


# ------------------------------------------------------------------------------ credentials


def test_credentials_are_used_and_kept_nowhere(trained: dict) -> None:
    folder, done = trained["S3 with a key, Zarr v2"]
    assert done.code == 0, done.err
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.out + done.err


def test_the_credentials_of_a_profile_are_used(guarded: str, aws: dict, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "keys").write_text(
        f"[climate]\naws_access_key_id = reader\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "climate")
    assert len(training("--store", "s3://winds/v3", "--endpoint", guarded).__getitems__([(0, 0)])) == 1


def test_the_credentials_of_another_are_refused(
    guarded: str, aws: dict, tmp_path: Path, refused, monkeypatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    said = refused("--store", "s3://winds/v3", "--endpoint", guarded, "--output-dir", tmp_path / "run")
    assert re.match("--store s3://winds/v3: .*credentials", said), said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ bad input

V3 = "--store s3://winds/v3 --endpoint {address} --anonymous"
BAD_INPUT = {  # flags, and what is said of them
    V3.replace("winds", "rain"): "--store s3://rain/v3: ",
    V3.replace("v3", "v4"): "--store s3://winds/v4: ",
    "--store nowhere": "--store nowhere: ",
    "--store {file}": r"--store \S+test_03_cloud_data.py: ",
    "--store {folder}": r"--store \S+: .* Zarr store",
    "--store ftb://winds/v3": "--store ftb://winds/v3: ",
    V3.replace("address", "guarded"): "--store s3://winds/v3: .*--anonymous",
    V3[:-11]: "--store s3://winds/v3: .*--anonymous",
    V3.replace("address", "broken") + " --deadline 1": r"--store s3://winds/v3: \S+: .*503",
    V3.replace("{address}", "localhost:9000"): "--endpoint localhost:9000: ",
    f"--store s3://me:{SECRET}@winds/v3": "--store.* credentials",
    f"--store https://winds/v3?X-Amz-Signature={SECRET}": "--store.* credentials",
    f"--store s3://winds/v3 --endpoint https://me:{SECRET}@localhost": ".*--endpoint.* credentials",
    f"{V3} --variables wind": rf"--variables wind: not in s3://winds/v3 .*; it has {U} \(time, .*\); {V} \(",
    V3.replace("v3", "empty"): f"--variables {U}: not in s3://winds/empty .* no variable",
    V3.replace("v3", "levels")
    + " --variables temperature": r"--variables temperature: not in \S+ .* alone; it has temperature \(time, level, latitude, longitude\)",
    f"{V3} --patch-size 40": r"--patch-size 40: the grid is \(37, 72\); give .* up to 36",
    f"{V3} --train-times 2001 2002": "--train-times 2001 2002: give dates of 1982-01-01 to 1992-12-31",
    f"{V3} --test-times 1989 1991": "--test-times 1989 1991: give .* no other set has",
    f"{V3} --num-workers 1 --start-method fork": "--start-method fork: .* give forkserver or spawn",
    f"{V3} --deadline 0": "--deadline 0: too small",
    f"{V3} --resume missing.ckpt": "--resume missing.ckpt: no such file",
    f"{V3} --resume {{file}}": r"--resume \S+: cannot be read \(\w+\); give a whole",
    f"{V3} --output-dir /dev/null/run": "--output-dir /dev/null/run: Not a directory; give",
    f"{V3} --seed {2**64}": f"--seed {2**64}: too large; give less than",
    V3.replace("v3", "timeless"): f"--variables {U}: a dimension has length 0; give",
    V3.replace("v3", "strings"): f"--variables {U}: its type is <U2; give variables of numbers",
    V3.replace("v3", "staggered"): f"--variables {U} {V}: .* both look like latitude; give",
    V3.replace("v3", "twice"): rf"--variables {U}: not in .*; it has .*{U} \(time, time, lat",
}


@pytest.fixture(scope="module")
def bad_stores(folder: Path, fields: tuple) -> None:
    zarr.create_group(folder / "winds/empty")
    temperature = xr.DataArray(np.ones((2, *fields[0][U].shape), "f4"), dims=("level", *fields[0][U].dims))
    levels = fields[0].coords.to_dataset().assign(temperature=temperature.transpose("time", "level", ...))
    levels.to_zarr(folder / "winds/levels", consolidated=False)
    u, v = (fields[0][name].drop_encoding() for name in (U, V))
    few = {"time": slice(4)}
    stores = {
        "timeless": xr.Dataset({U: u, V: v}).isel(time=slice(0)),
        "strings": xr.Dataset({U: xr.full_like(u, "ab", "<U2"), V: v}).isel(few),
        "staggered": xr.Dataset({U: u, V: v.rename(latitude="lat")}).isel(few),
    }
    for name, store in stores.items():
        store.to_zarr(folder / "winds" / name, consolidated=False)
    twice = zarr.create_group(folder / "winds/twice")
    for name in ("time", "latitude", "longitude"):
        twice.create_array(name, data=np.arange(16.0), dimension_names=[name])
    for name in (U, V):
        dims = ["time", "time", "latitude", "longitude"]
        twice.create_array(name, data=np.zeros((16, 16, 16, 16), "float32"), dimension_names=dims)


@pytest.mark.filterwarnings("ignore:Duplicate dimension names")
@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(
    flags: str, folder: Path, address, guarded, broken, bad_stores, tmp_path: Path, capfd, refused
) -> None:
    places = {"address": address, "guarded": guarded, "broken": broken, "folder": folder, "file": __file__}
    said = refused("--output-dir", tmp_path / "run", *flags.format(**places).split())
    assert re.match(BAD_INPUT[flags], said), said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_the_program_with_one_line_and_code_2(
    address: str, bad_stores, tmp_path: Path
) -> None:
    done = programs.run(SCRIPT, *SMALL, *s3(address, "empty"), "--output-dir", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"train.py: error: --variables {U}: .*\n", done.err), done.err


# ------------------------------------------------------------------------------ stores of others


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of CLOUD, so that its outputs stay apart from a reader's."""
    (tmp_path / "cloud").mkdir()
    (tmp_path / "cloud/make_store.py").symlink_to(CHAPTER / "make_store.py")
    monkeypatch.setattr(chapter, "CLOUD", tmp_path / "cloud")
    return tmp_path / "cloud"


@pytest.mark.parametrize(
    ("zarr_format", "consolidated"),
    [(2, True), *(pytest.param(*each, marks=thorough) for each in ((2, False), (3, True), (3, False)))],
)
def test_statistics_that_a_store_lacks_are_drawn_once_and_kept(
    zarr_format: int, consolidated: bool, make, folder: Path, fields, address, cloud, monkeypatch, capfd
) -> None:
    """By make_store.py, which is quicker in this process."""
    monkeypatch.setattr(chapter, "run_make_store", make)
    monkeypatch.setitem(sys.modules, "train", chapter)
    store = folder / f"winds/plain_{zarr_format}_{consolidated}"
    fields[0].to_zarr(store, zarr_format=zarr_format, consolidated=consolidated)
    plain, whole = training(*s3(address, store.name)), training(*s3(address))
    (kept,) = (cloud / "outputs/statistics").glob("*.nc")
    times = int(xr.load_dataset(kept)[U].attrs["times"])
    assert f" {times} of {len(whole.times)} training times" in capfd.readouterr().out
    np.testing.assert_allclose(
        plain.climatology, whole.climatology, atol=1e-4
    )  # so few are all in the sample
    np.testing.assert_allclose(plain.std, whole.std, rtol=1e-5)
    monkeypatch.setattr(chapter, "run_make_store", lambda *flags: pytest.fail("made twice"))
    np.testing.assert_array_equal(training(*s3(address, store.name)).climatology, plain.climatology)


def test_infinity_is_found_where_statistics_are_drawn(
    make, fields: tuple, cloud: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Else the standard deviation would be infinite, every anomaly 0, and the RMSE NaN, with exit code 0."""
    monkeypatch.setattr(chapter, "run_make_store", make)
    monkeypatch.setitem(sys.modules, "train", chapter)
    infinite = fields[0].copy(deep=True)
    infinite[U][3, 10, 10] = np.inf
    infinite.to_zarr(tmp_path / "infinite", consolidated=True)
    with pytest.raises(SystemExit, match="2"):
        training("--store", tmp_path / "infinite")
    date = str(infinite.time.values[3])[:16]
    assert f"infinity on {date}; replace it" in capfd.readouterr().err.splitlines()[-1]
    assert not list((cloud / "outputs/statistics").glob("*.nc"))


def weatherbench2(dataset: xr.Dataset) -> xr.Dataset:
    """With the dimensions in the order of those stores, and variables on levels and without a time."""
    levels = dataset[U].drop_attrs().expand_dims(level=[500, 850]).assign_attrs(units="K")
    dataset = dataset.assign(temperature=levels, land_sea_mask=dataset[U][0].drop_vars("time"))
    return dataset.isel(latitude=slice(None, None, -1)).transpose("time", "level", "longitude", "latitude")


def arco(dataset: xr.Dataset) -> xr.Dataset:
    levels = dataset[U].drop_attrs().expand_dims(level=[500, 850]).assign_attrs(units="K")
    return dataset.assign(temperature=levels).transpose("time", "level", "latitude", "longitude")


@thorough
@pytest.mark.parametrize("layout", [weatherbench2, arco])
def test_stores_like_the_public_ones_train_by_flags(
    layout: Callable, fields: tuple, folder: Path, address: str, cloud: Path, tmp_path: Path
) -> None:
    dataset = layout(fields[0])
    dataset.chunk(time=1).to_zarr(folder / "winds" / layout.__name__, zarr_format=2, consolidated=True)
    figures = chapter.main([*SMALL, *s3(address, layout.__name__), "--output-dir", str(tmp_path / "run")])
    assert 0 < figures["rmse"]["U-Net"]["m/s"] < 10


PUBLIC = {
    "WeatherBench2": "gs://weatherbench2/datasets/era5/1959-2023_01_10-wb13-6h-64x32_equiangular_conservative.zarr",
    "WeatherBench2, 0.25 degrees": "gs://weatherbench2/datasets/era5/1959-2023_01_10-wb13-6h-1440x721_with_derived_variables.zarr",
    "ARCO": "gs://gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3",
}


@pytest.mark.online
@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_stores_are_read(name: str) -> None:
    store = chapter.Store(arguments("--store", PUBLIC[name], "--anonymous"))
    time = store.fields.indexes["time"].get_loc("1990-06-01T12:00")
    where = {
        "time": time,
        "latitude": slice(8, 24),
        "longitude": np.arange(-8, 8) % store.fields.sizes["longitude"],
    }
    winds = store.read([where])
    assert winds.shape == (1, 2, 16, 16)
    assert 1 < np.abs(winds).max() < 100


def test_a_resumed_run_is_checked_as_in_chapter_1() -> None:
    first = load("01_setup/train.py", "chapter_01_train_again")
    check = inspect.getsource(chapter.FillGaps.on_train_start)
    assert check == inspect.getsource(first.FillGaps.on_train_start)


def test_both_scripts_know_dimensions_by_the_same_signs() -> None:
    made, trained = (book.definitions(f"03_cloud_data/{name}.py") for name in ("make_store", "train"))
    for name in ("DIMENSIONS", "rename_dimensions"):
        assert made[name] == trained[name]
