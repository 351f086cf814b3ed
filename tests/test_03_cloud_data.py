"""Chapter 3: the same weights wherever the data are, reads that overlap, and a name for what cannot be read."""

import gc
import json
import os
import re
import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from threading import Barrier

import book
import buckets
import numpy as np
import programs
import pytest
import zarr
from made_up_winds import flags_for, make_datamodule, make_winds, reader_of, write
from runs import assert_same_bits, losses, summary

SCRIPT = "03_cloud_data/train.py"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
LAYOUTS = {"v3": "", "v2": "--zarr-format 2", "shards": "--shard-times 4"}
STEPS, BATCH = 4, 4
SMALL = f"--accelerator cpu --patch-size 16 --batch-size {BATCH} --max-steps {STEPS}".split()
SMALL += "--checkpoint-every 2 --log-every 1".split()
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
SECRET = "5e4d5ec4e7"
KEY = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": SECRET}
NO_KEY = {
    "AWS_CONFIG_FILE": "/none",
    "AWS_SHARED_CREDENTIALS_FILE": "/none",
    "AWS_EC2_METADATA_DISABLED": "true",
}

thorough = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global train, FieldReader, sampling
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("03_cloud_data"), programs.planted_in_all(**programs.QUICK):
        import sampling
        import train
        from store import FieldReader

        yield
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials but those that a test gives."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in NO_KEY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets; its bucket `winds` has a store of each layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name, flags in LAYOUTS.items():
        make_small_store(folder / "winds" / name, flags)
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of four servers of the buckets."""
    with (
        buckets.serving(folder, latency_ms=0) as plain,
        buckets.serving(folder, latency_ms=0, **FAULTS) as unreliable,
        buckets.serving(folder, latency_ms=0, access_key="reader") as guarded,
        buckets.serving(folder, latency_ms=0, error_rate=1) as broken,
    ):
        yield {"plain": plain, "unreliable": unreliable, "guarded": guarded, "broken": broken}


def s3(address: str, name: str = "v3") -> list[str]:
    """The flags that read a store of the bucket."""
    return ["--store", f"s3://winds/{name}", "--endpoint", address, "--anonymous"]


def count(address: str) -> Counter:
    """What a server was asked for so far, and how often it failed."""
    with urllib.request.urlopen(f"{address}/_counts") as reply:
        return Counter(json.load(reply))


@pytest.fixture
def refused(capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(*flags: object) -> str:
        with pytest.raises(SystemExit) as ended:
            train.main([*SMALL, *map(str, flags)])
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


# ------------------------------------------------------------------------------ the same weights from anywhere

WAYS = {  # layout, server, more flags
    "a folder": ("v3", None, ""),
    "S3 with a key, Zarr 2": ("v2", "guarded", ""),
    "S3 that fails, shards": ("shards", "unreliable", ""),
}
SLOW_WAYS = {
    "S3 that fails": ("v3", "unreliable", ""),
    "2 workers": ("v3", "plain", "--num-workers 2"),
    "2 workers by spawn": ("v3", "plain", "--num-workers 2 --start-method spawn"),
    "2 workers, S3 that fails, shards": ("shards", "unreliable", "--num-workers 2"),
}


@pytest.fixture(scope="module")
def start(folder: Path, servers: dict) -> Callable:
    """Start to train in one of these ways."""

    def call(way: tuple[str, str | None, str], output: Path) -> programs.Program:
        layout, server, more = way
        flags = s3(servers[server], layout) if server else ["--store", folder / "winds" / layout]
        environment = NO_KEY
        if server == "guarded":
            environment = NO_KEY | KEY
            flags.remove("--anonymous")
        flags = [*SMALL, *flags, *more.split(), "--output-dir", output]
        return programs.Program(SCRIPT, *flags, environment=environment)

    return call


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, programs.Run]]:
    """What each of WAYS has left, and how it ended. They run side by side."""
    folders = {way: tmp_path_factory.mktemp("run") for way in WAYS}
    started = {way: start(WAYS[way], folders[way]) for way in WAYS}
    ended = {way: (folders[way], program.wait()) for way, program in started.items()}
    for _, done in ended.values():
        assert done.code == 0, done.err
    return ended


def assert_same(one: Path, other: Path) -> None:
    """The same weights, losses and RMSE, to the bit."""
    assert_same_bits(one, other)
    assert losses(one) == losses(other)
    assert summary(one)["rmse"] == summary(other)["rmse"]


def test_the_same_weights_from_anywhere(trained: dict, servers: dict) -> None:
    """To the bit, although reads were throttled, reset and cut, and asked for again."""
    first, *others = [folder for folder, _ in trained.values()]
    for other in others:
        assert_same(other, first)
    failed = count(servers["unreliable"])
    assert min(failed[fault] for fault in ("SlowDown", "reset", "truncated")) > 0, failed


@thorough
@pytest.mark.parametrize("way", SLOW_WAYS)
def test_the_same_weights_with_workers(way: str, start, trained: dict, tmp_path: Path) -> None:
    """At the same cost: what opens the store in each worker is not counted."""
    done = start(SLOW_WAYS[way], tmp_path).wait()
    assert done.code == 0, done.err
    assert_same(tmp_path, trained["a folder"][0])
    same_objects = "S3 that fails, shards" if "shards" in way else "a folder"
    for name in ("requests_per_sample", "bytes_per_sample"):
        assert summary(tmp_path)[name] == summary(trained[same_objects][0])[name]


def test_credentials_are_used_and_kept_nowhere(trained: dict) -> None:
    folder, done = trained["S3 with a key, Zarr 2"]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.out + done.err


def test_ranks_share_the_global_batch_in_micro_batches(folder: Path) -> None:
    """Each sample is read by one of them, once."""
    flags = [*SMALL, "--store", folder / "winds/v3"]
    whole = [batch["target"] for batch in make_datamodule(flags).train_loader()]
    made = make_datamodule([*flags, "--accumulate-grad-batches", 2])
    parts = [[batch["target"] for batch in made.train_loader(rank, 2)] for rank in (0, 1)]
    for step, expected in enumerate(whole):
        pieces = [part for rank in parts for part in rank[2 * step : 2 * step + 2]]
        assert [len(piece) for piece in pieces] == [1] * BATCH
        np.testing.assert_array_equal(np.concatenate(pieces), expected)


# ------------------------------------------------------------------------------ reads, and what they cost


def test_the_first_lines_of_the_page_read_a_patch(folder: Path, servers: dict) -> None:
    """As they stand there, but for the name of the store."""
    page = (book.ROOT / "03_cloud_data/README.md").read_text()
    lines = re.search(r"```python\n(.+?)```", page, re.DOTALL)[1]
    found = {"ADDRESS": servers["plain"]}
    exec(lines.replace("winds/small.zarr", "winds/v3"), found)
    stored = zarr.open_group(folder / "winds/v3", mode="r")[U]
    np.testing.assert_array_equal(found["patch"].values, stored[0, :64, :64])


@pytest.mark.parametrize(("at_once", "number"), [(False, 2), (True, 2 * BATCH)])
def test_all_reads_of_a_batch_are_under_way_at_once(
    at_once: bool, number: int, folder: Path, monkeypatch
) -> None:
    """Here, each waits until all are. Sample by sample, only those of its two variables are."""
    made = make_datamodule([*SMALL, "--store", folder / "winds/v3"])
    expected = made.train_patches().read_batch([(0, k) for k in range(BATCH)])
    read, barrier, under_way, most = FieldReader.read, Barrier(number, timeout=60), [], []

    def read_together(self, name: str, box: dict) -> np.ndarray:
        under_way.append(name)
        most.append(len(under_way))
        barrier.wait()
        values = read(self, name, box)
        under_way.remove(name)
        return values

    monkeypatch.setattr(FieldReader, "read", read_together)
    if at_once:
        batch = next(iter(made.train_loader()))
    else:
        samples = [made.train_patches()[0, k] for k in range(BATCH)]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in expected}
    assert max(most) == number
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], values)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a folder"])
def test_the_summary_has_the_requests_and_bytes_that_the_server_counts(
    way: str, trained: dict, servers: dict
) -> None:
    """Of the training alone, without what was asked for again."""
    made = make_datamodule([*SMALL, *s3(servers["plain"], WAYS[way][0])])
    loader = made.train_loader()
    before = count(servers["plain"])
    traffic = sum(batch["traffic"] for batch in loader).tolist()
    asked = count(servers["plain"]) - before
    assert traffic == [asked["requests"], asked["bytes"], 0, STEPS * BATCH]
    metrics = summary(trained[way][0])
    assert metrics["requests_per_sample"] == asked["requests"] / (STEPS * BATCH)
    assert metrics["bytes_per_sample"] == asked["bytes"] / (STEPS * BATCH)


# ------------------------------------------------------------------------------ what is damaged is named


@pytest.fixture(scope="module")
def drawn(folder: Path) -> tuple[int, str]:
    """The time of the first sample: its number in the store, and its date."""
    patches = make_datamodule([*SMALL, "--store", folder / "winds/v3"]).train_patches()
    time, period = patches.patch(0, 0).time, patches.maker.period
    return period.positions[time], str(period.dates[time])[:10]


def each(change: Callable[[Path], object]) -> Callable:
    """Do that to each object that holds a time of u."""

    def change_all(store: Path, position: int) -> None:
        array = zarr.open_array(store / U, mode="r")
        number = position // (array.shards or array.chunks)[0]
        for path in [*store.glob(f"{U}/c/{number}/*/*"), *store.glob(f"{U}/{number}.*")]:
            change(path)

    return change_all


def lose_in_shard(store: Path, position: int) -> None:
    """Of a chunk of NaN alone, Zarr leaves nothing."""
    zarr.open_array(store / U, mode="r+").with_config({"write_empty_chunks": False})[position] = np.nan


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    """A bit in some bytes of the first half: of a shard, not in its index, and in each of its chunks."""
    data = bytearray(path.read_bytes())
    for place in range(20, len(data) // 2, 500):
        data[place] ^= 1
    path.write_bytes(data)


def lose_numbers(store: Path, position: int) -> None:
    """As other tools make stores: what is missing reads as a number, whichever it is."""
    for path in [*store.rglob(".zarray"), *store.glob(".zmetadata")]:
        path.write_text(re.sub(r'"fill_value": *"NaN"', '"fill_value": null', path.read_text()))
    each(Path.unlink)(store, position)


A_VALUE = rf"{U} on {{date}}\S*: NaN: a value or a chunk is missing"
A_CHUNK = rf"{U} of {{date}}\S*: .*checksum"
DAMAGE = {  # layout, what is done, what the last line says
    "a chunk is missing": ("v3", each(Path.unlink), A_VALUE),
    "a chunk is missing in a shard": ("shards", lose_in_shard, A_VALUE),
    "missing where a number stands for it": (
        "v2",
        lose_numbers,
        rf"{U} of {{date}}\S*: {U}/{{position}}\.\d\.\d: this chunk is missing",
    ),
    "an object is cut": ("v3", each(cut), A_CHUNK),
    "a shard is cut": ("shards", each(cut), A_CHUNK),
    "a bit is flipped": ("v3", each(flip), A_CHUNK),
    "bits are flipped in a shard": ("shards", each(flip), A_CHUNK),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_or_missing_is_named(
    case: str, folder: Path, servers: dict, drawn: tuple[int, str], tmp_path: Path, refused
) -> None:
    (layout, damage, message), (position, date) = DAMAGE[case], drawn
    name = case.replace(" ", "_")
    damage(shutil.copytree(folder / "winds" / layout, folder / "winds" / name), position)
    said = refused(*s3(servers["plain"], name), "--output-dir", tmp_path)
    assert re.match(f"--store s3://winds/{name}: " + message.format(position=position, date=date), said), said
    assert not (tmp_path / "summary.json").exists()


@thorough
def test_a_bucket_that_is_gone_ends_a_run_with_a_worker(folder: Path, tmp_path: Path) -> None:
    """When no more is retried. The last line names the object."""
    flags = [*SMALL, "--max-steps", 10_000, "--retry-timeout", 1, "--num-workers", 1]
    with buckets.serving(folder, latency_ms=0) as address:
        run = programs.Program(SCRIPT, *flags, *s3(address), "--output-dir", tmp_path, slow_steps=0.1)
        programs.wait_for((tmp_path / "last.ckpt").exists, run, "its first checkpoint")
    done = run.wait(100)  # seconds: the default of --retry-timeout is 120
    assert done.code == 2, done.err
    last, name = done.err.splitlines()[-1], "10m_[uv]_component_of_wind"
    said = rf"train.py: error: --store s3://winds/v3: {name} of \S+: {name}/c/\d+/\d/\d: "
    assert re.match(said, last), last


NOT_GIVEN = {  # the store, the server, more flags or the key that is used, and what is said
    "no such bucket": ("s3://rain/v3", "plain", "--anonymous", "no Zarr store is there"),
    "no such key": ("s3://winds/v4", "plain", "--anonymous", "no Zarr store is there"),
    "not for all": (
        "s3://winds/v3",
        "guarded",
        "--anonymous",
        "no Zarr store is there, or none that you may read; .*--anonymous",
    ),
    "no credentials": (
        "s3://winds/v3",
        "plain",
        "",
        ".*; give credentials in the environment, or --anonymous",
    ),
    "another's credentials": ("s3://winds/v3", "guarded", "stranger", ".*credentials"),
    "never answers": ("s3://winds/v3", "broken", "--anonymous --retry-timeout 1", r"\S+: .*503"),
}


@pytest.mark.parametrize("case", NOT_GIVEN)
def test_what_a_bucket_does_not_give_is_said_with_a_remedy(
    case: str, servers: dict, tmp_path: Path, refused, monkeypatch
) -> None:
    url, server, more, message = NOT_GIVEN[case]
    flags = more.split()
    if more == "stranger":
        flags = []
        for name, value in (KEY | {"AWS_ACCESS_KEY_ID": more}).items():
            monkeypatch.setenv(name, value)
    said = refused("--store", url, "--endpoint", servers[server], *flags, "--output-dir", tmp_path / "run")
    assert re.match(f"--store {url}: {message}", said), said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ stores of others


LIKE = {  # where the dimensions lie, also those of variables that are not read, and latitudes from which end
    "weatherbench2": ("time level longitude latitude", 1),
    "arco": ("time level latitude longitude", -1),
}


def test_stores_like_the_public_ones_train_by_flags_to_the_same_weights(tmp_path: Path) -> None:
    """In Zarr 2, with variables on levels and without a time, and no statistics."""
    winds = make_winds()[["u", "v"]]
    write(tmp_path / "plain", winds)
    levels = winds.u.drop_attrs().expand_dims(level=[500, 850]).assign_attrs(units="K")
    more = winds.assign(temperature=levels, land_sea_mask=winds.u[0].drop_vars("time")).chunk(time=1)
    for name, (dims, end) in LIKE.items():
        stored = more.isel(latitude=slice(None, None, end)).transpose(*dims.split())
        stored.to_zarr(tmp_path / name, zarr_format=2, consolidated=True)
    for name in ("plain", *LIKE):
        folder = tmp_path / "runs" / name
        train.main(flags_for(tmp_path / name, *SMALL, "--eval-samples", 8, "--output-dir", folder))
        assert_same(folder, tmp_path / "runs/plain")


PUBLIC = {
    "WeatherBench2": "gs://weatherbench2/datasets/era5/1959-2023_01_10-wb13-6h-64x32_equiangular_conservative.zarr",
    "WeatherBench2, 0.25 degrees": "gs://weatherbench2/datasets/era5/1959-2023_01_10-wb13-6h-1440x721_with_derived_variables.zarr",
    "ARCO": "gs://gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3",
}


@pytest.mark.online
@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_stores_are_read(name: str) -> None:
    reader = reader_of(PUBLIC[name], U, V, anonymous=True)
    fields = reader.open()
    time = fields.indexes["time"].get_loc("1990-06-01T12:00")
    columns = np.arange(-8, 8) % fields.sizes["longitude"]
    winds = reader.read_at_once([{"time": time, "latitude": slice(8, 24), "longitude": columns}])
    assert winds.shape == (1, 2, 16, 16)
    assert 1 < np.abs(winds).max() < 100
