"""Chapter 3: make_store.py, from scattered files to a store that is whole, or says that it is not."""

import glob
import importlib.util
import json
import os
import pickle
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import book
import boto3
import cloudpickle
import numpy as np
import programs
import pytest
import xarray as xr
import zarr
from dask.distributed import LocalCluster

NAVY = book.ROOT / "01_setup/data/navy_winds.nc"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
SMALL = ["--days", 30, "--resolution", 5, "--region-days", 12]
FEW = ["--days", 4, "--resolution", 10, "--region-days", 2]

# Run make_store.py, but die before a file is renamed to what it shall be, or as a chunk is read back.
KILLER = """
import itertools, os, pathlib, runpy, sys
what, number = sys.argv.pop(1).split(":")
count, replace, read_bytes = itertools.count(), os.replace, pathlib.Path.read_bytes
def die():
    if next(count) == int(number):
        os.kill(os.getpid(), 9)
def killed_replace(*paths, **options):
    die()
    return replace(*paths, **options)
def killed_read(path):
    if path.name[-1].isdigit():  # a chunk, and not metadata
        die()
    return read_bytes(path)
if what == "rename":
    os.replace = killed_replace
else:
    pathlib.Path.read_bytes = killed_read
sys.argv[0] = "make_store.py"
runpy.run_path(os.path.abspath("make_store.py"), run_name="__main__")
"""


@pytest.fixture(scope="module")
def chapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the script, so that what it makes is kept apart from a reader's."""
    folder = tmp_path_factory.mktemp("book") / "03_cloud_data"
    folder.mkdir()
    shutil.copy(book.ROOT / "03_cloud_data/make_store.py", folder)
    (folder / "killer.py").write_text(KILLER)
    (folder.parent / "01_setup").symlink_to(book.ROOT / "01_setup")
    return folder


@pytest.fixture(scope="module")
def script(chapter: Path):
    """The script as a module: its main() is quick to call again and again."""
    spec = importlib.util.spec_from_file_location("make_store_under_test", chapter / "make_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make(script):
    """Call main() with SMALL and these flags."""
    return lambda store, *flags: script.main([str(each) for each in (*SMALL, "--store", store, *flags)])


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Finished stores, by format."""
    folder = tmp_path_factory.mktemp("whole")
    for version in (2, 3):
        make(folder / f"v{version}.zarr", "--zarr-format", version)
    return {version: folder / f"v{version}.zarr" for version in (2, 3)}


def content(store: Path) -> dict[str, bytes]:
    """All files of a store."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def identity(store: Path) -> str | None:
    """What a reader finds in the root's metadata."""
    return zarr.open_group(store, mode="r").attrs.get("identity")


def refused(script, *flags: object) -> str:
    """The line that main() refuses these flags with."""
    with pytest.raises(script.InputError) as caught:
        script.main([str(flag) for flag in flags])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- the winds


def test_the_winds_are_chapter_1s_between_its_months_and_cross_the_seam(script) -> None:
    monthly = script.open_monthly()
    known = xr.load_dataset(NAVY)["eastward_wind"].assign_coords(longitude=lambda part: part.longitude % 360)
    field = script.interpolate(monthly.values, monthly.longitude.values, np.array([358.75, 20.0, 21.25]), 3)
    for got, longitudes in zip(field[5, 0].T, ([357.5, 0], [20, 20], [20, 22.5])):
        expected = known[5].sel(longitude=longitudes).mean("longitude").sortby("latitude")
        np.testing.assert_allclose(got, expected, atol=1e-5)
    times = monthly.time.values
    between = script.interpolate(monthly.values, times, times[:1] + (times[1] - times[0]) // 4, 0)
    np.testing.assert_allclose(between[0], 0.75 * monthly[0] + 0.25 * monthly[1], atol=1e-4)
    early = script.interpolate(monthly.values, times, times[:1] - np.timedelta64(15, "D"), 0)
    np.testing.assert_array_equal(early[0], monthly[0])


def test_the_weather_has_the_spectrum_that_is_stated(script) -> None:
    fields = np.stack([script.weather(day, 181, 360, 1.0) for day in range(20)])
    assert fields.dtype == "float32"
    assert fields.std() == pytest.approx(2, rel=1e-3)
    power = (np.abs(np.fft.fft2(fields)) ** 2).mean((0, 1))
    wavenumber = np.hypot(np.fft.fftfreq(181)[:, None], np.fft.fftfreq(360))
    assert power[wavenumber < 1 / 31].sum() < 1e-6 * power.sum()
    edges = np.geomspace(1 / 25, 0.45, 9)
    ring = [power[(wavenumber >= a) & (wavenumber < b)].mean() * (a + b) / 2 for a, b in pairwise(edges)]
    slope = np.polyfit(np.log((edges[1:] + edges[:-1]) / 2), np.log(ring), 1)[0]
    assert slope == pytest.approx(-3, abs=0.15)
    np.testing.assert_array_equal(script.weather(3, 37, 72, 5), script.weather(3, 37, 72, 5))
    assert not np.array_equal(script.weather(3, 37, 72, 5), script.weather(4, 37, 72, 5))


def test_the_store_holds_the_winds_that_were_made(script, whole: dict[int, Path]) -> None:
    store = xr.open_zarr(whole[3])
    days = np.linspace(0, script.DAYS - 1, 30).astype(int).tolist()
    made = script.winds_of(days, 5, script.open_monthly())
    for name in (U, V):
        assert store[name].dims == ("time", "latitude", "longitude")
        assert store[name].dtype == "float32"
        np.testing.assert_array_equal(store[name], made[name])
    assert (store.latitude[0], store.latitude[-1], store.longitude[0]) == (90, -90, 0)
    np.testing.assert_array_equal(store.time, made.time)


# ------------------------------------------------------------------------------- one identity, many layouts


def test_the_identity_follows_the_values_and_not_how_they_are_stored(
    make, whole: dict[int, Path], tmp_path: Path
) -> None:
    layouts = {
        "shards": ["--chunk", 2, 16, 16, "--shard-days", 6],
        "longitude first": ["--zarr-format", 2, "--dims", "time", "longitude", "latitude"],
        "regions": ["--region-days", 8, "--chunk", 4, 20, 20, "--compression-level", 1],
    }
    expected = xr.open_zarr(whole[3]).load()
    found = {identity(whole[2]), identity(whole[3])}
    for name, flags in layouts.items():
        figures = make(tmp_path / name, *flags)
        store = xr.open_zarr(tmp_path / name)
        xr.testing.assert_equal(store.transpose("time", "latitude", "longitude").load(), expected)
        assert figures["identity"] == identity(tmp_path / name)
        found.add(figures["identity"])
    assert len(found) == 1
    array = zarr.open_group(tmp_path / "shards")[U]
    assert (array.chunks, array.shards) == ((2, 16, 16), (6, 48, 80))
    assert zarr.open_group(tmp_path / "longitude first")[U].shape == (30, 72, 37)
    assert np.isnan(array.fill_value) and np.isnan(zarr.open_group(whole[2])[U].fill_value)


def test_other_values_or_another_grid_have_another_identity(make, whole, tmp_path: Path) -> None:
    others = [make(tmp_path / "a", "--keep-bits", 9), make(tmp_path / "b", "--latitude-from", "south")]
    others += [make(tmp_path / "c", "--days", 29)]
    assert len({identity(whole[3]), *(other["identity"] for other in others)}) == 4
    assert xr.open_zarr(tmp_path / "b").latitude[0] == -90
    flipped = xr.open_zarr(tmp_path / "b").sortby("latitude", ascending=False)
    xr.testing.assert_equal(flipped.load(), xr.open_zarr(whole[3]).load())


def test_the_same_command_writes_the_same_bytes(make, whole: dict[int, Path], tmp_path: Path) -> None:
    for version in (2, 3):
        make(tmp_path / f"v{version}", "--zarr-format", version)
        assert content(tmp_path / f"v{version}") == content(whole[version])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2", "v3"]  # no lock is left


def test_consolidated_metadata_has_all_there_is(whole: dict[int, Path]) -> None:
    for version, store in whole.items():
        group = zarr.open_group(store, mode="r", use_consolidated=True)
        assert group.metadata.zarr_format == version
        assert {name for name, _ in group.arrays()} == {U, V, "time", "latitude", "longitude"}
        assert re.fullmatch(r"[0-9a-f]{16}", group.attrs["identity"])
        regions = group.attrs["regions"]
        assert list(regions) == ["0", "12", "24"]
        assert all(re.fullmatch(r"[0-9a-f]{64}", checksum) for checksum in regions.values())
    assert json.loads((whole[2] / ".zattrs").read_text())["identity"] == identity(whole[2])


@pytest.mark.parametrize("bits", [1, 7, 22])
def test_bits_of_mantissa_are_rounded_as_the_help_says(script, bits: int) -> None:
    values = np.random.default_rng(0).normal(0, 8, 100_000).astype("f4")
    rounded = script.round_bits(values, bits)
    error = np.abs(rounded.astype("f8") - values) / np.abs(values)
    bound = 2.0 ** -(bits + 1)
    assert 0.99 * bound / (1 + bound) < error.max() <= bound  # half a step, of a value half a step above 1
    assert not (rounded.view("u4") & (2 ** (23 - bits) - 1)).any()


def test_rounding_shrinks_the_store_and_is_the_same_in_every_format(make, whole, tmp_path: Path) -> None:
    found = [make(tmp_path / f"{v}", "--keep-bits", 7, "--zarr-format", v) for v in (2, 3)]
    assert found[0]["identity"] == found[1]["identity"]
    plain = make(whole[3])
    assert found[1]["bytes"] < 0.6 * plain["bytes"]
    error = np.abs(xr.open_zarr(tmp_path / "3")[U] / xr.open_zarr(whole[3])[U] - 1).max()
    assert 0 < error <= 2**-8


# ----------------------------------------------------------------------------- killed, damaged, disturbed


@pytest.mark.parametrize("version", [2, 3])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    version: int, chapter: Path, whole: dict[int, Path], tmp_path: Path
) -> None:
    shutil.rmtree(chapter / "outputs/files", ignore_errors=True)
    store = tmp_path / "store"
    flags = [*SMALL, "--store", store, "--zarr-format", version]
    # The made file; the root; the arrays; the first region; a later one; reading back; the last metadata.
    moments = ["rename:1", "rename:20", "read:30", "rename:1", "rename:3"]
    if version == 3:
        moments = ["rename:0", "rename:1", "rename:4", "rename:20", "rename:40", "read:30", "rename:1"]
    for moment in moments:
        assert programs.run(chapter / "killer.py", moment, *flags).code == -signal.SIGKILL, moment
        last = moment == moments[-1] and version == 2
        if store.exists() and content(store).keys() & {"zarr.json", ".zgroup"} and not last:
            assert identity(store) is None, moment
        if moment == "rename:0" and not store.exists():
            (left,) = (chapter / "outputs/files").rglob("*.nc")
            assert left.name.startswith(".part-")
            assert not glob.glob(f"{left.parent}/*.nc")  # nobody's pattern takes it for a file
    done = programs.require_success(chapter / "make_store.py", *flags)
    assert identity(whole[version]) in done.out
    assert content(store) == content(whole[version])


def test_a_finished_store_is_verified_and_left_alone(make, whole: dict[int, Path], capsys) -> None:
    for version, store in whole.items():
        before = content(store)
        make(store, "--zarr-format", version)
        assert "already whole" in capsys.readouterr().out
        assert content(store) == before


OTHERS = {"--days": [29], "--chunk": [1, 20, 20], "--zarr-format": [2], "--keep-bits": [9]}
OTHERS |= {"--region-days": [6], "--shard-days": [4], "--compression-level": [5], "--source": [NAVY]}


@pytest.mark.parametrize("flag", OTHERS)
def test_a_store_of_other_settings_is_refused_and_untouched(flag: str, script, whole) -> None:
    before = content(whole[3])
    line = refused(script, *SMALL, "--store", whole[3], flag, *OTHERS[flag])
    assert f"{whole[3]}: was begun with another {flag}, " in line
    assert line.endswith("; remove it, or give another")
    assert content(whole[3]) == before


ASIDE = f"0.{'5e' * 16}.partial"  # what Zarr has not yet renamed


def test_other_peoples_folders_are_refused_and_untouched(script, whole, tmp_path: Path) -> None:
    for name in ("home", "array", "group", "attributes", "settings", "beside"):
        if name != "home":
            zarr.open_group(tmp_path / name, mode="w")
        (tmp_path / name / "inner").mkdir(parents=True)
        for file in ("download.partial", ASIDE, f"inner/{ASIDE}"):
            (tmp_path / name / file).write_text("dear")
    zarr.open_group(tmp_path / "array").create_array("a", shape=3, dtype="f4")
    for name in ("attributes", "beside"):
        shutil.rmtree(tmp_path / name / "inner")
    (tmp_path / "attributes/download.partial").unlink()
    zarr.open_group(tmp_path / "attributes").attrs["title"] = "theirs"
    shutil.copytree(whole[3], tmp_path / "settings", dirs_exist_ok=True)
    before = content(tmp_path)
    messages = {"home": "holds files that are not a Zarr store"}
    messages["settings"] = "was begun with another --days"
    for name in ("home", "array", "group", "attributes", "settings", "beside"):
        line = refused(script, *SMALL, "--days", 29, "--store", tmp_path / name)
        assert messages.get(name, "was not begun by this script") in line, name
    assert content(tmp_path) == before


def test_what_a_kill_left_is_removed_and_nothing_else(make, whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole[3], store)
    (store / f"{U}/c/0/0/{ASIDE}").write_text("half a chunk")
    (store / f"{U}/c/download.partial").write_text("dear")
    make(store)
    assert content(store) == content(whole[3]) | {f"{U}/c/download.partial": b"dear"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "a lost chunk": (f"{V}/c/13/0/0", Path.unlink, rf"time 12 on is damaged \({V} on 1986-.*NaN"),
    "a flipped bit": (f"{U}/c/25/0/0", flip, r"time 24 on is damaged \("),
    "a torn chunk": (f"{U}/c/0/0/0", lambda path: os.truncate(path, 900), rf"time 0 on is damaged \({U}"),
    "a coordinate": ("latitude/c/0", None, r"its coordinates are damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_by_the_same_command(case: str, script, whole, tmp_path: Path) -> None:
    path, damage, message = DAMAGE[case]
    store = tmp_path / "store"
    shutil.copytree(whole[3], store)
    if damage:
        damage(store / path)
    else:
        zarr.open_group(store, mode="r+", use_consolidated=False)["latitude"][3] = 12.0
    line = refused(script, *SMALL, "--store", store)
    assert re.search(message, line), line
    assert line.startswith(f"--store {store}: ") and line.endswith("; remove the store")


def test_two_commands_at_once_end_with_one_whole_store(chapter: Path, whole, tmp_path: Path) -> None:
    shutil.rmtree(chapter / "outputs/files", ignore_errors=True)
    flags = [*SMALL, "--store", tmp_path / "store"]
    both = [programs.Program(chapter / "make_store.py", *flags) for _ in range(2)]
    ended = [program.wait() for program in both]
    assert [run.code for run in ended] == [0, 0], ended
    assert sum("already whole" in run.out for run in ended) == 1
    assert content(tmp_path / "store") == content(whole[3])


def test_a_full_disk_ends_in_one_line_and_the_same_command_goes_on(
    chapter: Path, make, whole, tmp_path: Path
) -> None:
    files, store = chapter / "outputs/files", tmp_path / "store"
    shutil.rmtree(files, ignore_errors=True)
    for size in (300_000, 5_000):  # of a made file, then of a chunk
        done = programs.run(chapter / "make_store.py", *SMALL, "--store", store, file_size=size)
        assert done.code == 2, done.err
        assert re.fullmatch(r"make_store.py: error: --store \S+: not finished: .*goes on\n", done.err), (
            done.err
        )
        assert not list(files.rglob(".part-*"))
        assert not store.exists() or identity(store) is None
        make(tmp_path / "other")  # which leaves the made files to the next turn
    make(store)
    assert content(store) == content(whole[3])


def test_an_error_without_a_message_is_told_by_its_name(script, tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__):
        raise TimeoutError  # as Dask does

    monkeypatch.setattr(script.xr, "open_mfdataset", fail)
    assert "in time (TimeoutError)" in refused(script, "--source", NAVY, "--store", tmp_path / "store")
    monkeypatch.setattr(script, "start_dask", fail)
    line = refused(script, "--store", tmp_path / "store")
    assert line.endswith("store: not finished: TimeoutError; mend that, and the same command goes on")
    assert script.first_line(ValueError("\nfirst\nsecond")) == "first"


# -------------------------------------------------------------------------------------- the files of others


def split_navy(folder: Path, **changes) -> str:
    """Chapter 1's winds in three files, the last changed by a function; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    navy = xr.load_dataset(NAVY)
    parts = [navy.isel(time=slice(first, first + 44)) for first in (0, 44, 88)]
    for name, part in zip(("c", "a", "b"), parts):  # not in the order of their names
        changes.get(name, lambda part: part)(part).to_netcdf(folder / f"{name}.nc")
    return str(folder / "*.nc")


def test_files_of_others_are_converted_whatever_their_order(script, tmp_path: Path) -> None:
    turn = {"a": lambda part: part.transpose("longitude", "time", "latitude")}
    turn["b"] = lambda part: part.assign(bounds=("edge", [0.0, 1.0]))  # not over time and space: left out
    pattern = split_navy(tmp_path / "files", **turn)
    (tmp_path / "files/.part-d.nc").write_bytes(b"left by a kill")
    (tmp_path / "files/a.nc").rename(tmp_path / "files/part-0001.nc")  # as many programs name theirs
    script.main(["--source", pattern, "--store", str(tmp_path / "store"), "--region-days", "50"])
    store, navy = xr.open_zarr(tmp_path / "store"), xr.load_dataset(NAVY)
    assert set(store.data_vars) == {"eastward_wind", "northward_wind"}
    xr.testing.assert_equal(store.load(), navy)
    assert (store.latitude[0], store.longitude[0], store.longitude[-1]) == (-90, 20, 377.5)
    # Another file of that pattern is another source.
    shutil.copy(tmp_path / "files/c.nc", tmp_path / "files/z.nc")
    flags = ["--source", pattern, "--store", tmp_path / "store", "--region-days", 50]
    assert "was begun with another --source" in refused(script, *flags)


def test_files_that_were_rewritten_since_a_kill_are_not_mixed_in(
    chapter: Path, script, tmp_path: Path
) -> None:
    store, file = tmp_path / "store", tmp_path / "files/a.nc"
    pattern = split_navy(tmp_path / "files", a=lambda part: part.drop_encoding())  # not compressed
    flags = ["--source", pattern, "--store", store, "--region-days", 50]
    assert programs.run(chapter / "killer.py", "rename:300", *flags).code == -signal.SIGKILL
    assert len(zarr.open_group(store, mode="r").attrs["regions"]) == 1
    size, part = file.stat().st_size, xr.load_dataset(file).drop_encoding()
    part.eastward_wind[:] += 1
    part.to_netcdf(file)
    assert file.stat().st_size == size
    line = refused(script, *flags)
    assert "was begun with another --source" in line and line.endswith("; remove it, or give another")


def with_nan(part: xr.Dataset) -> xr.Dataset:
    part = part.copy(deep=True)
    part.northward_wind[3, 5, 5] = np.nan
    return part


BAD_FILES = {
    "another grid": (
        lambda part: part.isel(latitude=slice(1, None)),
        r"c.nc: other latitude than in \S+a.nc",
    ),
    "shifted": (lambda part: part.assign_coords(longitude=part.longitude + 1), "other longitude"),
    "overlap": (lambda part: part.assign_coords(time=part.time + np.timedelta64(900, "D")), "time"),
    "one time twice": (lambda part: part.isel(time=[0, *range(43)]), "times overlap, or are not dates"),
    "no dates": (lambda part: part.assign_coords(time=range(44)), "time"),
    "a variable less": (lambda part: part[["eastward_wind"]], "c.nc: other variables"),
    "none at all": (lambda part: part.mean("time"), "has no variable over time, latitude, longitude"),
    "NaN": (with_nan, "northward_wind on 1982-04-.*: NaN or infinity; mend it"),
}


def test_times_that_are_not_dates_are_refused(script, tmp_path: Path) -> None:
    xr.load_dataset(NAVY).assign_coords(time=range(132)).to_netcdf(tmp_path / "one.nc")
    line = refused(script, "--source", tmp_path / "one.nc", "--store", tmp_path / "store")
    assert "not dates of the usual calendar" in line
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_are_refused(case: str, script, tmp_path: Path) -> None:
    change, message = BAD_FILES[case]
    pattern = split_navy(tmp_path / "files", c=change)
    line = refused(script, "--source", pattern, "--store", tmp_path / "store")
    assert line.startswith("--source ")
    assert re.search(message, line), line
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["files"]
    assert not (tmp_path / "store").exists() or (case == "NaN" and identity(tmp_path / "store") is None)


def test_a_file_that_is_not_netcdf_is_refused(script, tmp_path: Path) -> None:
    pattern = split_navy(tmp_path / "files")
    os.truncate(tmp_path / "files/c.nc", 10_000)
    line = refused(script, "--source", pattern, "--store", tmp_path / "store")
    assert "not NetCDF files that follow each other in time" in line
    assert not (tmp_path / "store").exists()


# ------------------------------------------------------------------------------- elsewhere: buckets, clusters


@contextmanager
def serve(folder: Path, *flags: object) -> Iterator[dict[str, str]]:
    """The environment in which a server's buckets are found, but no keys."""
    server = programs.Program("03_cloud_data/local_s3.py", "--folder", folder, "--latency-ms", 1, *flags)
    try:
        printed = Path(server.output.name, "out")
        text = programs.wait_for(lambda: printed.exists() and printed.read_text(), 60, "the server's address")
        address = text.splitlines()[0]
        yield {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_EC2_METADATA_DISABLED": "true"}
    finally:
        server.process.terminate()
        server.process.join(10)


def profile(folder: Path, **environment: str) -> dict[str, str]:
    """The environment of somebody whose keys are in a file."""
    (folder / "credentials").write_text("[team]\naws_access_key_id = A\naws_secret_access_key = B\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"), "AWS_CONFIG_FILE": "/dev/null"}
    return environment | files | {"AWS_PROFILE": "team"}


KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "us-east-1"}


def test_a_bucket_gets_the_same_store(script, chapter: Path, whole, tmp_path: Path, monkeypatch) -> None:
    with serve(tmp_path / "empty") as place:
        for name, value in (place | KEYS).items():
            monkeypatch.setenv(name, value)
        client = boto3.Session().client("s3")  # the default one may hold an earlier test's keys
        flags = [*SMALL, "--store", "s3://winds/small.zarr", "--workers", 1]  # which opens its own store
        assert "NoSuchBucket" in refused(script, *flags[:-2])
        client.create_bucket(Bucket="winds")
        done = programs.require_success(chapter / "make_store.py", *flags, environment=place | KEYS)
        assert identity(whole[3]) in done.out
        listed = client.get_paginator("list_objects_v2").paginate(Bucket="winds", Prefix="small.zarr/")
        names = [each["Key"] for page in listed for each in page["Contents"]]
        got = {name: client.get_object(Bucket="winds", Key=name)["Body"].read() for name in names}
        assert got == {f"small.zarr/{name}": data for name, data in content(whole[3]).items()}


def test_keys_come_from_a_profile_or_the_machine(chapter: Path, tmp_path: Path) -> None:
    (tmp_path / "buckets/winds").mkdir(parents=True)
    with serve(tmp_path / "buckets", "--require-keys", "--expire-after", 1) as place:
        address = place["AWS_ENDPOINT_URL"]
        machine = place | {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{address}/credentials"}
        ways = {"profile": (profile(tmp_path, **place), 1), "machine": (machine, 0)}
        for name, (environment, workers) in ways.items():
            flags = [*FEW, "--store", f"s3://winds/{name}.zarr", "--workers", workers]
            programs.require_success(chapter / "make_store.py", *flags, environment=environment)
            assert identity(tmp_path / f"buckets/winds/{name}.zarr")
        nobody = profile(tmp_path, **place) | {"AWS_PROFILE": "nobody"}
        done = programs.run(chapter / "make_store.py", *flags, environment=nobody)
        assert not json.load(urllib.request.urlopen(f"{address}/counts")).keys() & {"unsigned", "expired"}
    line = r"make_store.py: error: --store s3://winds/machine.zarr: no credentials in .*; set AWS_PROFILE.*\n"
    assert done.code == 2 and re.fullmatch(line, done.err), done.err


def test_a_public_bucket_needs_no_keys(script, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "winds").mkdir()
    with serve(tmp_path) as place:
        for name, value in (profile(tmp_path, **place) | {"AWS_SKIP_SIGNATURE": "true"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        script.main([*map(str, FEW), "--store", "s3://winds/small.zarr"])
    assert identity(tmp_path / "winds/small.zarr")


def test_a_cluster_elsewhere_has_its_own_folder_and_keys(chapter: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "buckets/winds").mkdir(parents=True)
    script, pattern = chapter / "make_store.py", "outputs/navy/*.nc"
    split_navy(chapter / "outputs/navy")
    monkeypatch.chdir(tmp_path)
    local = {"protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": None}
    with (
        serve(tmp_path / "buckets", "--require-keys") as place,
        LocalCluster(1, threads_per_worker=2, processes=True, env=place | KEYS, **local) as cluster,
    ):
        there = ["--scheduler", cluster.scheduler_address]
        relative = ["--source", pattern, "--store", "outputs/navy.zarr", "--region-days", 66]
        programs.require_success(script, *relative, *there)
        store = xr.open_zarr(chapter / "outputs/navy.zarr")
        xr.testing.assert_equal(store.load(), xr.load_dataset(NAVY))
        bucket = [*FEW, "--store", "s3://winds/small.zarr"]
        programs.require_success(script, *bucket, *there, environment=profile(tmp_path, **place))
    assert identity(tmp_path / "buckets/winds/small.zarr")


def test_no_key_is_sent_to_a_worker(script, monkeypatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    sent = cloudpickle.dumps(script.open_store("s3://winds/small.zarr"))
    assert b"very-secret" not in sent
    assert pickle.loads(sent).store.credential_provider()["secret_access_key"] == "very-secret"


def test_a_cluster_that_is_there_is_used(script, whole, tmp_path: Path) -> None:
    local = {"processes": False, "protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": None}
    with LocalCluster(1, threads_per_worker=1, **local) as cluster:
        flags = [*SMALL, "--store", tmp_path / "store", "--scheduler", cluster.scheduler_address]
        script.main([str(flag) for flag in flags])
        assert len(cluster.scheduler.workers) == 1  # it outlives the command
    assert content(tmp_path / "store") == content(whole[3])


def test_a_wrong_scheduler_is_one_line_within_seconds(script, tmp_path: Path) -> None:
    for address in (f"tcp://127.0.0.1:{programs.free_port()}", "nowhere"):
        began = time.monotonic()
        line = refused(script, *SMALL, "--store", tmp_path / "store", "--scheduler", address)
        assert line == f"--scheduler {address}: no cluster with workers answers there"
        assert time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- the command line

BAD_FLAGS = {
    "no days": (["--days", 0], "--days 0: give 1 to 4018"),
    "too many days": (["--days", 4019], "--days 4019: give 1 to 4018"),
    "resolution": (["--resolution", 0.7], "--resolution 0.7: give degrees that divide 180, 10 at most"),
    "no resolution": (["--resolution", "nan"], "--resolution nan: give degrees"),
    "coarse": (["--resolution", 20], "--resolution 20.0: give degrees"),
    "chunk": (["--chunk", 0, 8, 8], "--chunk 0 8 8: give three numbers, at least 1"),
    "shards": (["--chunk", 2, 8, 8, "--shard-days", 3], "--shard-days 3: give a multiple of --chunk's 2"),
    "negative shards": (["--shard-days", -1], "--shard-days -1: give a multiple of --chunk's 1"),
    "shards of v2": (["--shard-days", 3, "--zarr-format", 2], "--shard-days 3: Zarr v2 has none"),
    "regions of chunks": (["--chunk", 5, 8, 8], "--region-days 36: give a multiple of 5"),
    "regions of shards": (["--shard-days", 24], "--region-days 36: give a multiple of 24"),
    "no regions": (["--region-days", 0], "--region-days 0: give a multiple of 1"),
    "bits": (["--keep-bits", 23], "--keep-bits 23: give 1 to 22"),
    "level": (["--compression-level", 10], "--compression-level 10: give 1 to 9"),
    "dims": (["--dims", "time", "time", "latitude"], "--dims time time latitude: name each dimension once"),
    "workers": (["--workers", -1], "--workers -1: give 0 or more"),
    "no such files": (["--source", "nowhere/*.nc"], r"--source nowhere/\*.nc: no such files"),
    "not a number": (["--days", "many"], "--days: invalid int value: 'many'"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_get_one_line_and_write_nothing(case: str, script, tmp_path: Path) -> None:
    flags, message = BAD_FLAGS[case]
    assert re.match(message, refused(script, "--store", tmp_path / "store", *flags))
    assert list(tmp_path.iterdir()) == []


def test_the_program_prints_the_line_and_exits_with_2(chapter: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = programs.run(chapter / "make_store.py", *SMALL, "--store", tmp_path / "file")
    assert done.code == 2
    assert re.fullmatch(r"make_store.py: error: --store \S+file: not finished: .*\n", done.err), done.err


def test_help_says_what_numbers_count() -> None:
    done = programs.require_success("03_cloud_data/make_store.py", "--help")
    for text in ("2^-(N+1)", "--region-days TIMES", "--shard-days TIMES"):  # files may be six-hourly
        assert text in done.out


def test_the_readers_command_takes_seconds(chapter: Path) -> None:
    """At a terminal, with its progress bars; every month of every year is in the store that it makes."""
    terminal, inner = pty.openpty()
    termios.tcsetwinsize(inner, (24, 100))
    shown: list[bytes] = []

    def drain() -> None:
        with suppress(OSError):  # the program has closed its side
            while True:
                shown.append(os.read(terminal, 4096))

    began = time.monotonic()
    command = [sys.executable, "make_store.py"]
    process = subprocess.Popen(command, cwd=chapter, stdout=subprocess.PIPE, stderr=inner, text=True)
    os.close(inner)
    reader = threading.Thread(target=drain)
    reader.start()
    out, _ = process.communicate(timeout=120)
    seconds = time.monotonic() - began
    reader.join()
    assert process.returncode == 0, b"".join(shown).decode()
    assert programs.in_time(seconds, 30)
    bars = b"".join(shown).decode()
    for what in ("files made", "regions written", "verified"):
        assert f"{what}: 100%" in bars, bars
    assert re.search(r"dashboard: http://127.0.0.1:\d+/status\n", out)
    block = r"\n\S+small.zarr: 2 variables, time x latitude x longitude of 396 x 121 x 240\n"
    block += r"  size +92.0 MB, stored in [\d.]+: 1.\d+ to 1\n  chunks +1584 of 1 x 121 x 128, [\d.]+ kB each, in 1584 "
    assert re.search(block + r"objects\n  identity +[0-9a-f]{16}: every value was read back\n", out), out
    store = xr.open_zarr(chapter / "outputs/buckets/winds/small.zarr")
    months = store.time.values.astype("datetime64[M]")
    assert len(np.unique(months)) == 132
    assert np.unique(months.astype("datetime64[Y]"), return_counts=True)[1].tolist() == 11 * [36]
