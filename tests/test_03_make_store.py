"""Chapter 3: make_store.py, from scattered files to a store that is whole, or says that it is not."""

import argparse
import importlib.util
import itertools
import os
import shutil
import signal
import threading
import urllib.request
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import buckets
import h5py
import numpy as np
import programs
import pytest
import xarray as xr
import zarr
from dask.distributed import LocalCluster
from obstore.store import S3Store

SCRIPT = "03_cloud_data/make_store.py"
NAVY = programs.ROOT / "01_setup/data/navy_winds.nc"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
SMALL = ["--days", 24, "--resolution", 10, "--patch-size", 10, "--region-times", 8]
LAYOUTS = {"v3": [], "shards": ["--shard-times", 4], "v2": ["--zarr-format", 2]}
HOUR = np.timedelta64(1, "h")
GROUP = f"statistics/{U}_{V}_1982_1989"


def load(here: Path):
    """The script as a module that keeps the files it makes apart from a reader's."""
    spec = importlib.util.spec_from_file_location("make_store_under_test", programs.ROOT / SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.HERE = here
    return script


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chapter")


@pytest.fixture(scope="module")
def script(here: Path):
    forkserver.ensure_running()  # to import Lightning while the first tests run
    return load(here)


@pytest.fixture(scope="module")
def make(script) -> Callable:
    return lambda *flags: script.main([str(flag) for flag in flags])


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished stores, by layout."""
    folder = tmp_path_factory.mktemp("whole")
    for name, flags in LAYOUTS.items():
        make(*SMALL, *flags, "--store", folder / name)
    return {name: folder / name for name in LAYOUTS}


def content(store: Path) -> dict[str, bytes]:
    """All files of a store."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def refused(make, capsys, *flags: object) -> str:
    """The last line that the program refuses these flags with."""
    with pytest.raises(SystemExit) as ended:
        make(*flags)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------- what it makes


def test_a_day_is_chapter_1s_wind_and_weather_whatever_days_are_made(script, here: Path) -> None:
    files = [xr.load_dataset(file) for file in script.make_files(24, 10.0)]
    assert [file.sizes["time"] for file in files] == [3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    made = xr.concat(files, "time")
    assert made[U].dims == ("time", "latitude", "longitude") and made[U].dtype == "float32"
    assert (made.latitude[0], made.latitude[-1], made.longitude[0], made.longitude[-1]) == (90, -90, 0, 350)
    assert made[V].units == "m s**-1"
    again = xr.concat([xr.load_dataset(file) for file in script.make_files(2, 10.0)], "time")
    xr.testing.assert_identical(again, made.isel(time=[0, -1]))
    navy = (
        xr.load_dataset(NAVY).interp(time=made.time[12]).assign_coords(longitude=lambda x: x.longitude % 360)
    )
    days = (made.time[12] - np.datetime64("1982-01-01")).dt.days.item()
    expected = navy.sel(latitude=made.latitude, longitude=made.longitude).to_dataarray()
    expected = expected.values + script.weather(days, 19, 36, 10.0)
    np.testing.assert_allclose(made.isel(time=12).to_dataarray().values, expected, atol=1e-4)


def test_winds_are_continuous_across_the_seam(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "weather", lambda day, *sizes: np.zeros((2, *sizes[:2]), "f4"))
    script.make_files(1, 1.25)
    made = xr.load_dataset(script.HERE / "outputs/files/1_days_1.25_degrees/winds_1982.nc")[U][0]
    first = xr.load_dataset(NAVY).eastward_wind[0].sortby("latitude", ascending=False)
    around = first.sel(longitude=[357.5, 360]).mean("longitude")
    np.testing.assert_allclose(made.sel(longitude=358.75)[::2], around, atol=1e-5)


def test_the_weather_has_the_spectrum_that_is_stated(script) -> None:
    shape = (192, 360)  # a fast length: nothing is cut off
    fields = np.stack([script.weather(day, *shape, 1.0) for day in range(20)])
    assert fields.dtype == "float32"
    assert fields.std() == pytest.approx(2, rel=1e-3)
    power = (np.abs(np.fft.fft2(fields)) ** 2).mean((0, 1))
    wavenumber = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.fftfreq(shape[1]))
    assert power[wavenumber < 1 / 31].sum() < 1e-6 * power.sum()
    edges = np.geomspace(1 / 25, 0.45, 9)
    middles = (edges[1:] + edges[:-1]) / 2
    rings = [power[(wavenumber >= a) & (wavenumber < b)].mean() for a, b in itertools.pairwise(edges)]
    assert np.polyfit(np.log(middles), np.log(rings * middles), 1)[0] == pytest.approx(-3, abs=0.15)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_store_holds_the_files_values(layout: str, script, whole: dict[str, Path]) -> None:
    made = xr.concat([xr.load_dataset(file) for file in script.make_files(24, 10.0)], "time")
    xr.testing.assert_identical(xr.open_zarr(whole[layout]).drop_attrs(deep=False).load(), made)
    root = zarr.open_group(whole[layout], mode="r", use_consolidated=True)
    assert root.attrs["whole"] is True
    assert list(root.attrs["regions"]) == ["0", "8", "16"]
    assert set(root["statistics"].keys()) == {GROUP.split("/")[1]}
    assert root.metadata.zarr_format == (2 if layout == "v2" else 3)
    assert root[U].chunks == (1, 19, 20) and np.isnan(root[U].fill_value)
    assert root[U].shards == ((4, 19, 40) if layout == "shards" else None)
    assert root["time"].dtype == "int64" and root["time"].chunks == (24,)
    assert root["time"].attrs["units"] == "days since 1982-01-01 00:00:00"


def test_figures_count_what_is_stored(make, whole: dict[str, Path], capsys) -> None:
    for name, flags in LAYOUTS.items():
        before = content(whole[name])
        figures = make(*SMALL, *flags, "--store", whole[name])
        assert "whole already" in capsys.readouterr().out
        assert content(whole[name]) == before
        sizes = {"objects": len(before), "stored_bytes": sum(map(len, before.values()))}
        sizes |= {"store": str(whole[name]), "raw_bytes": 24 * 2 * 19 * 36 * 4, "regions": 3}
        assert figures == sizes
    chunks = [sum(path[-1].isdigit() for path in content(store)) for store in whole.values()]
    assert chunks[0] - chunks[1] == 24 * 2 * 2 - 6 * 2


# --------------------------------------------------------------------------------------- its statistics


def save_patches(folder: Path) -> None:
    """Keep what chapter 2's script computes in memory, with its own defaults, from chapter 1's winds."""
    from runs import load as load_script  # which takes seconds to import torch

    script = load_script("02_multi_gpu/train.py", "chapter_2")
    args = {name: getattr(script, name.upper()) for name in ("train_times", "validation_times", "test_times")}
    args |= {"store": folder / "masked.nc", "variables": script.VARIABLES, "patch_size": 16}
    patches = script.make_patches(argparse.Namespace(**args, batch_size=1, seed=0))[0]
    np.savez(folder / "patches.npz", climatology=patches.climatology, std=patches.std)


def test_statistics_are_those_that_chapter_2_computes_in_memory(make, tmp_path: Path) -> None:
    navy = xr.load_dataset(NAVY).isel(latitude=slice(None, None, 2), longitude=slice(None, None, 2))
    navy["eastward_wind"][:, 3:5, 7] = np.nan  # masked, by one variable
    navy.to_netcdf(tmp_path / "masked.nc")
    process = programs.CONTEXT.Process(target=save_patches, args=(tmp_path,))  # imports Lightning for many
    process.start()
    make("--source", tmp_path / "masked.nc", "--store", tmp_path / "store")
    process.join(programs.LIMIT)
    expected = np.load(tmp_path / "patches.npz")
    statistics = xr.open_zarr(tmp_path / "store", group="statistics/eastward_wind_northward_wind_1982_1989")
    for i, name in enumerate(("eastward_wind", "northward_wind")):
        assert statistics[name].dims == ("month", "latitude", "longitude")
        assert statistics[name].dtype == "float32"
        np.testing.assert_allclose(statistics[name], expected["climatology"][:, i], rtol=1e-5, atol=1e-5)
        assert statistics[name].attrs["std"] == pytest.approx(expected["std"][i].item(), rel=1e-6)
        assert statistics[name].attrs["times"] == 96
    assert np.isnan(statistics.eastward_wind[:, 3:5, 7]).all()
    np.testing.assert_array_equal(statistics.latitude, navy.latitude)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_are_missing_count_nowhere_but_are_written(layout: str, make, tmp_path: Path) -> None:
    times = np.array(["1982-01-01", "1982-01-02", "1982-02-01", "1990-03-01"], "datetime64[ns]")
    values = np.arange(4 * 4 * 4, dtype="f4").reshape(4, 4, 4) ** 2
    values[0, 0, 0] = values[:3, 1, 1] = values[:, 2:, 2:] = values[2, 2:, :2] = np.nan
    grid = {"time": times, "latitude": [3.0, 2, 1, 0], "longitude": [0.0, 1, 2, 3]}
    xr.Dataset({"a": ([*grid], values)}, grid).to_netcdf(tmp_path / "a.nc")
    store, group = tmp_path / "store", "statistics/a_1982_1989"
    make("--source", tmp_path / "a.nc", "--store", store, "--chunk", 1, 2, 2, *LAYOUTS[layout])
    for metadata in [
        path for path in store.rglob("*") if path.name in ("zarr.json", ".zarray", ".zmetadata")
    ]:
        metadata.write_text(metadata.read_text().replace('"fill_value": "NaN"', '"fill_value": -1.0'))
    np.testing.assert_array_equal(zarr.open_group(store)["a"], values)
    expected = np.full((12, 4, 4), np.nan, "f4")
    with warnings.catch_warnings(action="ignore"):  # of cells without a value
        expected[0], expected[1] = np.nanmean(values[:2].astype("f8"), axis=0), values[2]
    np.testing.assert_array_equal(zarr.open_group(store)[group]["a"], expected)
    about = zarr.open_group(store)[group]["a"].attrs
    assert about["times"] == 3
    anomalies = values[:3] - expected[[0, 0, 1]]
    assert about["std"] == pytest.approx(np.nanstd(anomalies.astype("f8")), rel=1e-6)


@pytest.mark.parametrize("layout", ["v3", "v2"])
def test_other_train_times_add_a_group_to_a_whole_store(layout, make, whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole[layout], store)
    before = content(store)
    make(*SMALL, *LAYOUTS[layout], "--store", store, "--train-times", 1983, "1984-06")
    changed = {path for path, data in content(store).items() if before.pop(path, None) != data}
    assert not before
    added = f"statistics/{U}_{V}_1983_1984-06"
    assert {path for path in changed if not path.startswith(added)} == (
        {".zmetadata"} if layout == "v2" else {"zarr.json"}
    )
    assert zarr.open_group(store, mode="r", use_consolidated=True).attrs["whole"] is True
    for name in (added, GROUP):
        expected = xr.open_zarr(store)[U].sel(time=slice(*name.split("_")[-2:]))
        statistics = xr.open_zarr(store, group=name)[U]
        assert statistics.attrs["times"] == len(expected.time)
        np.testing.assert_allclose(
            statistics.dropna("month"), expected.groupby("time.month").mean(), rtol=1e-5, atol=1e-6
        )


# --------------------------------------------------------------------------------- killed and damaged


def make_until(moment: int, here: Path, flags: list[object]) -> None:
    """Run the script, and die in place of writing object number `moment`."""
    script, count = load(here), itertools.count()
    write = script.ObjectStore.set

    async def write_or_die(*args):
        if next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        await write(*args)

    script.ObjectStore.set = write_or_die
    script.main([str(flag) for flag in flags])


def kill_at(moment: int, layout: str, here: Path, store: Path) -> int:
    """Start the command and kill it; return how many regions it has recorded."""
    flags = [*SMALL, *LAYOUTS[layout], "--store", store]
    process = programs.CONTEXT.Process(target=make_until, args=(moment, here, flags))
    process.start()
    process.join(programs.LIMIT)
    assert process.exitcode == -signal.SIGKILL, moment
    if not (content(store).keys() & {"zarr.json", ".zattrs"}):
        return 0
    attributes = zarr.open_group(store, mode="r", use_consolidated=False).attrs
    assert "whole" not in attributes
    return len(attributes.get("regions", []))


def test_killed_while_it_writes_it_goes_on_to_the_same_bytes(here, make, whole, tmp_path: Path) -> None:
    assert kill_at(65, "v3", here, tmp_path / "store") == 1  # of three regions
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / U / "c/7").rglob("*")}
    make(*SMALL, "--store", tmp_path / "store")
    assert content(tmp_path / "store") == content(whole["v3"])
    assert written == {path: path.stat().st_mtime_ns for path in written}  # by the first command


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(layout, here, make, whole, tmp_path: Path) -> None:
    n_objects = len(content(whole[layout]))
    for moment in (*range(8), n_objects // 3, *range(n_objects - 5, n_objects)):
        store = tmp_path / str(moment)
        kill_at(moment, layout, here, store)
        make(*SMALL, *LAYOUTS[layout], "--store", store)
        assert content(store) == content(whole[layout]), moment
    for moment in (5, 9, 20):  # one command after another
        kill_at(moment, layout, here, tmp_path / "store")
    make(*SMALL, *LAYOUTS[layout], "--store", tmp_path / "store")
    assert content(tmp_path / "store") == content(whole[layout])


def test_what_a_kill_left_of_an_object_is_removed(make, whole, tmp_path: Path) -> None:
    shutil.copytree(whole["v3"], tmp_path / "store")
    del zarr.open_group(tmp_path / "store", use_consolidated=True).attrs["whole"]
    (tmp_path / "store" / U / "c/0/0/0#1").write_text("half a chunk")
    make(*SMALL, "--store", tmp_path / "store")
    assert content(tmp_path / "store") == content(whole["v3"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "lost": Path.unlink,
}


@pytest.mark.parametrize("layout", ["v3", "shards"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_no_silent_value(damage: str, layout: str, make, whole, tmp_path: Path, capsys) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole[layout], store)
    DAMAGE[damage](store / U / "c" / ("9/0/0" if layout == "v3" else "2/0/0"))
    intact = xr.open_zarr(whole[layout])[U].values
    try:
        values = xr.open_zarr(store)[U].values
    except (ValueError, RuntimeError):
        assert damage != "lost"
    else:
        assert damage == "lost" and np.isnan(values).any()
        np.testing.assert_array_equal(np.where(np.isnan(values), intact, values), intact)
    flags = [*SMALL, *LAYOUTS[layout], "--store", store, "--train-times", 1982, 1983]
    line = refused(make, capsys, *flags)
    assert f"--store {store}: " in line and U in line


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_whole_store_has_lost_is_named(layout: str, script, make, whole, tmp_path, capsys) -> None:
    store = tmp_path / "store"
    flags = [*SMALL, *LAYOUTS[layout], "--store", store]
    shutil.copytree(whole[layout], store)
    last = {"v3": "c/23/0/1", "shards": "c/5/0/0", "v2": "23.0.1"}[layout]
    one = "0" if layout == "v2" else "c/0"
    metadata = ".zarray" if layout == "v2" else "zarr.json"
    for lost in (f"{V}/{last}", f"time/{one}", f"{GROUP}/latitude/{one}", f"{U}/{metadata}"):
        data = (store / lost).read_bytes()
        (store / lost).unlink()
        line = refused(make, capsys, *flags)
        assert f"--store {store}: damaged: missing or empty objects: {lost} (1 in all)" in line
        (store / lost).write_bytes(b"")
        assert refused(make, capsys, *flags) == line
        (store / lost).write_bytes(data)
    for month in range(12):
        (store / GROUP / U / (f"{month}.0.0" if layout == "v2" else f"c/{month}/0/0")).unlink()
    assert "(12 in all)" in refused(make, capsys, *flags)


def test_a_whole_store_is_listed_once_and_not_read(script, make, whole, monkeypatch) -> None:
    listed = []
    list_objects = script.list_objects
    monkeypatch.setattr(script, "list_objects", lambda store: listed.append(store) or list_objects(store))
    monkeypatch.setattr(script, "verify", lambda *_: pytest.fail("read again"))
    make(*SMALL, "--store", whole["v3"])
    assert len(listed) == 1


def test_a_chunk_missing_inside_a_shard_and_other_values_are_found(
    make, whole, tmp_path: Path, capsys
) -> None:
    for layout in ("shards", "v2"):
        store = tmp_path / layout
        shutil.copytree(whole[layout], store)
        value = np.nan if layout == "shards" else 12.0
        zarr.open_group(store, mode="r+", use_consolidated=False)[U][9, :, :20] = value
        flags = [*SMALL, *LAYOUTS[layout], "--store", store, "--train-times", 1982, 1983]
        assert "time 8 on" in refused(make, capsys, *flags)


def test_of_two_commands_at_once_one_waits(make, whole, tmp_path: Path, capsys) -> None:
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: make(*SMALL, "--store", tmp_path / "store"), range(2))
    assert first == second
    assert capsys.readouterr().out.count("whole already") == 1
    assert content(tmp_path / "store") == content(whole["v3"])


# -------------------------------------------------------------------------------------- files of others


def split_navy(folder: Path, **changes: Callable) -> str:
    """Some of chapter 1's winds in three files, each changed by a function; return their pattern."""
    folder.mkdir(parents=True)
    navy = xr.load_dataset(NAVY).isel(latitude=slice(0, 8), longitude=slice(0, 8), time=slice(0, 12))
    for name, first in zip("cab", (0, 4, 8)):  # not in the order of their names
        part = navy.isel(time=slice(first, first + 4)).drop_encoding()
        changes.get(name, lambda part: part)(part).to_netcdf(folder / f"{name}.nc")
    return str(folder / "*.nc")


def test_other_names_orders_and_packed_data(make, tmp_path: Path) -> None:
    def change(part: xr.Dataset) -> xr.Dataset:
        part["eastward_wind"].encoding = {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -32768}
        part = part.assign_coords(number=3).assign(bounds=("edge", [0.0, 1.0])).expand_dims("expver")
        part = part.rename(time="valid_time", latitude="lat", longitude="x")
        return part.transpose("x", "expver", "valid_time", "lat", ...)

    pattern = split_navy(tmp_path / "files", **dict.fromkeys("abc", change))
    make("--source", pattern, "--store", tmp_path / "all")
    make("--source", pattern, "--store", tmp_path / "one", "--variables", "northward_wind")
    store, navy = xr.open_zarr(tmp_path / "all").load(), xr.load_dataset(NAVY)
    expected = navy.isel(latitude=slice(0, 8), longitude=slice(0, 8), time=slice(0, 12))
    assert set(store.variables) == {"time", "latitude", "longitude", "eastward_wind", "northward_wind"}
    assert store.eastward_wind.dims == ("time", "latitude", "longitude")
    assert store.eastward_wind.dtype == "float32"
    np.testing.assert_allclose(store.eastward_wind, expected.eastward_wind, atol=0.0051)
    xr.testing.assert_equal(store.northward_wind, expected.northward_wind)
    assert set(xr.open_zarr(tmp_path / "one").data_vars) == {"northward_wind"}


def test_times_of_minutes_are_kept(make, tmp_path: Path) -> None:
    shift = np.timedelta64(90, "s")
    later = dict.fromkeys("abc", lambda part: part.assign_coords(time=part.time + shift))
    make("--source", split_navy(tmp_path / "files", **later), "--store", tmp_path / "store")
    np.testing.assert_array_equal(
        xr.open_zarr(tmp_path / "store").time, xr.load_dataset(NAVY).time[:12] + shift
    )
    assert zarr.open_group(tmp_path / "store")["time"].dtype == "int64"


def with_infinity(part: xr.Dataset) -> xr.Dataset:
    part["northward_wind"][2, 5, 5] = np.inf
    return part


def with_column_twice(part: xr.Dataset) -> xr.Dataset:
    first = part.isel(longitude=[0])
    return xr.concat([part, first.assign_coords(longitude=first.longitude + 360)], "longitude")


def with_two_grids(part: xr.Dataset) -> xr.Dataset:
    """Staggered: the second variable has latitudes of its own, between those of the first."""
    between = ("lat_v", part.latitude.values + 1.25, {"units": "degrees_north"})
    renamed = part.northward_wind.rename(latitude="lat_v").drop_vars("lat_v", errors="ignore")
    return part[["eastward_wind"]].assign(northward_wind=renamed).assign_coords(lat_v=between)


BAD_FILES = {
    "grid": (lambda part: part.isel(latitude=slice(1, None)), "c.nc has other latitude than"),
    "shifted": (lambda part: part.assign_coords(longitude=part.longitude + 1), "c.nc has other longitude"),
    "overlap": (lambda part: part.assign_coords(time=part.time + np.timedelta64(60, "D")), ""),
    "one time twice": (lambda part: part.isel(time=[0, 0, 1, 2]), "times repeat"),
    "no dates": (lambda part: part.assign_coords(time=range(4)), ""),
    "a variable less": (lambda part: part[["eastward_wind"]], "c.nc has other variables"),
    "none at all": (lambda part: part.mean("time"), "on time, latitude, longitude alone; it has"),
    "infinity": (with_infinity, "northward_wind has infinity"),
    "no times": (lambda part: part.isel(time=slice(0)), "c.nc: its time has length 0"),
    "no rows": (lambda part: part.isel(latitude=slice(0)), "c.nc: its latitude has length 0"),
    "strings": (lambda part: part.astype(str), "c.nc: its eastward_wind holds <U"),
    "strings as rows": (lambda part: part.assign_coords(latitude=list("abcdefgh")), "c.nc: its latitude has"),
    "a column twice": (with_column_twice, "c.nc: its longitude has one place twice, 20 and 380"),
    "a row twice": (lambda part: part.isel(latitude=[0, 1, 1]), "c.nc: its latitude has one place twice"),
    "two grids": (with_two_grids, "lat_v both look like latitude; give variables of one grid"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_are_refused(case: str, make, tmp_path: Path, capsys) -> None:
    change, message = BAD_FILES[case]
    pattern = split_navy(tmp_path / "files", c=change)
    before = content(tmp_path / "files")
    line = refused(make, capsys, "--source", pattern, "--store", tmp_path / "store")
    assert f"error: --source {pattern}: " in line and message in line
    assert content(tmp_path / "files") == before
    if case == "two grids":  # one of the two can still be converted
        make("--source", pattern, "--store", tmp_path / "one", "--variables", "eastward_wind")
    if (tmp_path / "store/zarr.json").exists():
        assert case == "infinity" and not zarr.open_group(tmp_path / "store", mode="r").attrs["regions"]


def test_other_bad_input_is_refused(make, whole, tmp_path: Path, capsys) -> None:
    pattern = split_navy(tmp_path / "files")
    os.truncate(tmp_path / "files/c.nc", 1000)
    source, store = ["--source", pattern], ["--store", tmp_path / "store"]
    assert f"--source {pattern}" in refused(make, capsys, *source, *store)
    assert "--source none*.nc: no such files" in refused(make, capsys, "--source", "none*.nc", *store)
    good = ["--source", NAVY, *store]
    assert "gust" in refused(make, capsys, *good, "--variables", "gust")
    times = ["--train-times", 2001, 2002]
    assert "1982-01-16 to 1992-12-17" in refused(make, capsys, *good, *times)
    assert not (tmp_path / "store/zarr.json").exists()
    assert "--train-times 2001 2002" in refused(make, capsys, *SMALL, "--store", whole["v3"], *times)
    (tmp_path / "file").write_text("dear")
    assert f"--store {tmp_path}/file/x" in refused(make, capsys, *SMALL, "--store", tmp_path / "file/x")
    assert f"--store {tmp_path}/file:" in refused(make, capsys, *SMALL, "--store", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "dear"


def test_a_store_of_another_command_is_refused_and_untouched(make, whole, tmp_path: Path, capsys) -> None:
    before = content(whole["v3"])
    others = {"--days": [23], "--patch-size": [4], "--zarr-format": [2], "--region-times": [6]}
    others |= {"--shard-times": [4], "--zstd-level": [5], "--source": [NAVY], "--variables": [U]}
    for flag, values in others.items():
        line = refused(make, capsys, *SMALL, "--store", whole["v3"], flag, *values)
        assert f"--store {whole['v3']}: was begun with other" in line, flag
    assert content(whole["v3"]) == before
    zarr.open_group(tmp_path / "group", mode="w").attrs["title"] = "theirs"
    zarr.create_array(tmp_path / "array", shape=3, dtype="f4")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter#1").write_text("dear")
    (tmp_path / "home/letter").write_text("dear")
    before = content(tmp_path)
    for name in ("group", "array", "home"):
        assert "not begun by this script" in refused(make, capsys, *SMALL, "--store", tmp_path / name)
    assert {path: data for path, data in content(tmp_path).items() if ".lock" not in path} == before


@pytest.mark.parametrize("layout", ["v3", pytest.param("v2", marks=pytest.mark.thorough)])
def test_touched_files_are_compared_once_and_are_the_same(
    layout: str, script, make, tmp_path: Path, monkeypatch, capsys
) -> None:
    pattern, store = split_navy(tmp_path / "files"), tmp_path / "store"
    flags = ["--source", pattern, *LAYOUTS[layout], "--region-times", 4, "--store"]
    make(*flags, store)
    shutil.copytree(store, tmp_path / "begun")
    begun = zarr.open_group(tmp_path / "begun", mode="r+", use_consolidated=False).attrs
    begun.put({"settings": begun["settings"], "regions": {"4": begun["regions"]["4"]}})  # killed
    os.utime(tmp_path / "files/a.nc", (0, 0))
    make(*flags, tmp_path / "fresh")
    for touched in (store, tmp_path / "begun"):
        make(*flags, touched)
        assert content(touched) == content(tmp_path / "fresh")
    monkeypatch.setattr(script, "open_files", lambda _: pytest.fail("read again"))
    capsys.readouterr()
    make(*flags, store)
    assert "whole already" in capsys.readouterr().out
    os.utime(tmp_path / "files/a.nc", (1, 1))
    next(path for path in sorted(store.glob("time/**/*")) if path.is_file()).unlink()
    assert "damaged: missing or empty objects: time/" in refused(make, capsys, *flags, store)


def test_files_that_were_edited_since_are_not_mixed_in(make, tmp_path: Path, capsys) -> None:
    """Each edit is made in a copy, because xarray keeps files open in this process; paths are not compared."""
    flags = ["--store", tmp_path / "store", "--region-times", 4]
    make("--source", split_navy(tmp_path / "files"), *flags)
    before = content(tmp_path / "store")
    shutil.copytree(tmp_path / "files", tmp_path / "edited")
    with h5py.File(tmp_path / "edited/a.nc", "r+") as edited:  # the second in time
        edited["northward_wind"][3, 2, 1] += 1
    sizes = [(tmp_path / folder / "a.nc").stat().st_size for folder in ("files", "edited")]
    assert sizes[0] == sizes[1]
    later = split_navy(tmp_path / "later", a=lambda part: part.assign_coords(time=part.time + HOUR))
    others = {
        tmp_path / "edited/*.nc": "values from time 4 on",
        later: "time",
        tmp_path / "files/[cb].nc": "time",
    }
    for pattern, differ in others.items():
        line = refused(make, capsys, "--source", pattern, *flags)
        assert f"was begun with other files: they have other {differ};" in line
    assert "was begun with other files" in refused(make, capsys, *flags)
    assert content(tmp_path / "store") == before


# ------------------------------------------------------------------------------- several blocks at once


def parse(script, *flags: object) -> argparse.Namespace:
    return script.parse_arguments([str(flag) for flag in flags])


def test_blocks_are_whole_shards_and_no_region_loses_a_time(script) -> None:
    for flags, step in {(): 5, ("--shard-times", 24): 24, ("--shard-times", 36): 36}.items():
        args = parse(script, *flags)
        blocks = script.plan_blocks(range(0, 396, args.region_times), 396, args)
        times = [time for _, block in blocks for time in range(block.start, block.stop)]
        assert times == list(range(396))
        for region, block in blocks:
            assert region % args.region_times == 0 and (block.start - region) % step == 0
            assert block.stop <= min(block.start + step, region + args.region_times)


def test_as_many_blocks_at_once_as_a_cluster_keeps_busy_and_a_regions_times_without(
    script, monkeypatch
) -> None:
    class Eight:
        def nthreads(self) -> dict[str, int]:
            return {"tcp://a": 4, "tcp://b": 4}

    monkeypatch.setattr(script.Client, "current", Eight)
    monkeypatch.setattr(script, "CPU_COUNT", 64)
    for flags in ([], ["--shard-times", 24], ["--shard-times", 36]):
        assert script.count_at_once(parse(script, *flags, "--workers", 8)) == 16
        assert script.count_at_once(parse(script, *flags, "--scheduler", "tcp://c")) == 16
        args = parse(script, *flags)
        assert 1 <= script.count_at_once(args) * args.block_times <= args.region_times
    monkeypatch.setattr(script, "CPU_COUNT", 2)
    assert script.count_at_once(parse(script)) == 2


TOGETHER, OTHERS_RECORDED = threading.Barrier(3), threading.Event()
PATIENCE = 60  # seconds: a guard against a hang
WRITE = []  # the script's own function: a worker in this process finds it here


def write_together(block: xr.Dataset, first: int, args: argparse.Namespace) -> list[str]:
    """Write a block when three are under way, and the first of them last."""
    TOGETHER.wait(PATIENCE)
    if first == 0:
        assert OTHERS_RECORDED.wait(PATIENCE)
    return WRITE[0](block, first, args)


def test_a_clusters_workers_write_several_regions_at_once(script, make, tmp_path, monkeypatch) -> None:
    """Three regions, each a single shard; the first is recorded last, and the bytes are the same."""
    TOGETHER.reset()
    OTHERS_RECORDED.clear()
    flags = [*SMALL, "--shard-times", 8, "--store"]
    make(*flags, tmp_path / "alone")
    combine, combined = script.combine, []

    def count_regions(found: list[str]) -> str:
        combined.append(found)
        if len(combined) == 2:
            OTHERS_RECORDED.set()
        return combine(found)

    WRITE[:] = [script.write_block]
    monkeypatch.setattr(script, "write_block", write_together)
    monkeypatch.setattr(script, "combine", count_regions)
    local = {
        "processes": False,
        "protocol": "tcp://",
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
    }
    with LocalCluster(n_workers=3, threads_per_worker=1, **local) as cluster:
        make(*flags, tmp_path / "store", "--scheduler", cluster.scheduler_address)
    assert content(tmp_path / "store") == content(tmp_path / "alone")


BAD_FLAGS = [
    ["--days", 0],
    ["--days", 4019],
    ["--resolution", 0.7],
    ["--resolution", "nan"],
    ["--patch-size", 0],
]
BAD_FLAGS += [["--chunk", 0, 8, 8], ["--chunk", 2, 8, 8, "--shard-times", 3], ["--shard-times", -1]]
BAD_FLAGS += [
    ["--shard-times", 3, "--zarr-format", 2],
    ["--region-times", 0],
    ["--zstd-level", 10],
    ["--workers", -1],
]


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=lambda flags: " ".join(map(str, flags)))
def test_bad_flags_are_named_and_nothing_is_written(flags: list, make, tmp_path: Path, capsys) -> None:
    line = refused(make, capsys, "--store", tmp_path / "store", *flags)
    assert any(str(flag) in line for flag in flags if str(flag).startswith("--"))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- other places


@pytest.mark.thorough
def test_a_bucket_gets_the_same_store(make, whole, tmp_path: Path, monkeypatch, capsys) -> None:
    for name, value in {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with buckets.serving(tmp_path, latency_ms=0) as address:
        flags = [*SMALL, "--store", "s3://winds/small.zarr", "--endpoint", address]
        assert "NoSuchBucket" in refused(make, capsys, *flags)
        urllib.request.urlopen(urllib.request.Request(f"{address}/winds", method="PUT"))
        figures = make(*flags)
        options = {"client_options": {"allow_http": True}, "virtual_hosted_style_request": False}
        bucket = S3Store("winds", prefix="small.zarr", endpoint=address, **options)
        names = [found["path"] for page in bucket.list() for found in page]
        stored = {name: bucket.get(name).bytes().to_bytes() for name in names}
        bucket.delete(f"{U}/c/7/0/1")
        assert f"missing or empty objects: {U}/c/7/0/1 (1 in all)" in refused(make, capsys, *flags)
    assert stored == content(whole["v3"])
    assert figures["stored_bytes"] == sum(map(len, stored.values()))


@pytest.mark.thorough
def test_a_cluster_that_is_there_is_used(make, whole, tmp_path: Path) -> None:
    local = {
        "processes": False,
        "protocol": "tcp://",
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
    }
    with LocalCluster(1, threads_per_worker=1, **local) as cluster:
        make(*SMALL, "--store", tmp_path / "store", "--scheduler", cluster.scheduler_address)
        assert cluster.scheduler.transition_counter > 100  # it did the work
    assert content(tmp_path / "store") == content(whole["v3"])


@pytest.mark.thorough
def test_processes_write_the_same_bytes(whole, tmp_path: Path) -> None:
    done = programs.require_success(SCRIPT, *SMALL, "--store", tmp_path / "store", "--workers", 2)
    assert "dashboard: http" in done.out
    assert content(tmp_path / "store") == content(whole["v3"])
