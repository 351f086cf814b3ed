"""Chapter 3: make_store.py, from scattered files to a store that is whole, or says that it is not."""

import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import book
import buckets
import h5py
import numpy as np
import programs
import pytest
import xarray as xr
import zarr
from dask.distributed import Client, LocalCluster
from obstore.store import S3Store

SCRIPT = "03_cloud_data/make_store.py"
NAVY = programs.ROOT / "01_setup/data/navy_winds.nc"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
SMALL = ["--days", 24, "--resolution", 10, "--patch-size", 10, "--slab-times", 8]
LAYOUTS = {"v3": [], "shards": ["--shard-times", 4], "v2": ["--zarr-format", 2]}
CUTS = LAYOUTS | {"chunks of 5": ["--chunk", 5, 19, 20]}  # 11 of 24 times: within chunk, shard and slab
GROUP = f"statistics/{U}_{V}_1982_1989"
HOUR = np.timedelta64(1, "h")
OURS = ".make_store/"  # the folder of what is known of a store
MODULES = "make_store weather climatology"
OF_CONVERSION = "making blocks target verification options"
LOCAL = {"protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the NetCDF files that are made, apart from a reader's."""
    return tmp_path_factory.mktemp("chapter")


@pytest.fixture(scope="module")
def modules(here: Path) -> Iterator[SimpleNamespace]:
    """The chapter's modules, by name."""
    with book.rooms("03_cloud_data"):
        found = {name: importlib.import_module(name) for name in MODULES.split()}
        for name in OF_CONVERSION.split():
            found[name] = importlib.import_module(f"conversion.{name}")
        found["make_store"].HERE = here
        yield SimpleNamespace(**found)


@pytest.fixture(scope="module")
def make(modules: SimpleNamespace) -> Callable:
    return lambda *flags: modules.make_store.main([str(flag) for flag in flags])


@pytest.fixture
def refused(make, capsys) -> Callable[..., str]:
    """The last line that the program refuses some flags with."""

    def run(*flags: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            make(*flags)
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.fixture
def slabs_read(modules, monkeypatch) -> list[tuple[str, int]]:
    """The field and the first time of each slab that is read back."""
    read, slabs = modules.verification.read_slab, []
    monkeypatch.setattr(modules.verification, "read_slab", lambda *a: slabs.append(a[1:3]) or read(*a))
    return slabs


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished stores, by layout."""
    folder = tmp_path_factory.mktemp("whole")
    for name, flags in CUTS.items():
        make(*SMALL, *flags, "--store", folder / name)
    return {name: folder / name for name in CUTS}


@pytest.fixture(scope="module")
def files(modules: SimpleNamespace, here: Path) -> Path:
    """The folder of the NetCDF files that the small stores are made of, one a year."""
    return modules.weather.make_files(here / "outputs/files", 24, 10.0)[0].parent


def content(store: Path, ours: bool = False) -> dict[str, bytes]:
    """All objects of a store, but for those that only record how it was made."""
    paths = {path.relative_to(store).as_posix(): path for path in store.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if ours or not name.startswith(OURS)}


# ---------------------------------------------------------------------------------------- what it makes


def test_a_day_is_chapter_1s_wind_and_weather_whatever_days_are_made(modules, files, tmp_path: Path) -> None:
    made = [xr.load_dataset(file) for file in sorted(files.glob("*.nc"))]
    assert [file.sizes["time"] for file in made] == [3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    made = xr.concat(made, "time")
    assert made[U].dims == ("time", "latitude", "longitude") and made[U].dtype == "float32"
    assert (made.latitude[0], made.latitude[-1], made.longitude[0], made.longitude[-1]) == (90, -90, 0, 350)
    assert made[V].units == "m s**-1"
    again = [xr.load_dataset(file) for file in modules.weather.make_files(tmp_path, 2, 10.0)]
    xr.testing.assert_identical(xr.concat(again, "time"), made.isel(time=[0, -1]))
    navy = xr.load_dataset(NAVY).interp(time=made.time[12])
    navy = navy.assign_coords(longitude=navy.longitude % 360)
    day = (made.time[12] - np.datetime64("1982-01-01")).dt.days.item()
    expected = navy.sel(latitude=made.latitude, longitude=made.longitude).to_dataarray()
    expected = expected.values + modules.weather.make_weather(day, 19, 36, 10.0)
    np.testing.assert_allclose(made.isel(time=12).to_dataarray().values, expected, atol=1e-4)


def test_winds_are_continuous_across_the_seam(modules, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(modules.weather, "make_weather", lambda day, *n: np.zeros((2, *n[:2]), "f4"))
    (path,) = modules.weather.make_files(tmp_path, 1, 1.25)
    made = xr.load_dataset(path)[U][0]
    first = xr.load_dataset(NAVY).eastward_wind[0].sortby("latitude", ascending=False)
    around = first.sel(longitude=[357.5, 360]).mean("longitude")
    np.testing.assert_allclose(made.sel(longitude=358.75)[::2], around, atol=1e-5)


def test_the_weather_has_the_spectrum_that_is_stated(modules) -> None:
    shape = (192, 360)  # a fast length: nothing is cut off
    fields = np.stack([modules.weather.make_weather(day, *shape, 1.0) for day in range(20)])
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
def test_the_store_holds_the_files_values_and_disturbs_no_reader(layout: str, files, whole) -> None:
    made = xr.concat([xr.load_dataset(file) for file in sorted(files.glob("*.nc"))], "time")
    with warnings.catch_warnings(action="error"):
        found = xr.open_zarr(whole[layout]).load()
        root = zarr.open_group(whole[layout], mode="r")
        assert set(root.keys()) == {U, V, "time", "latitude", "longitude", "statistics"}
    xr.testing.assert_identical(found.drop_attrs(deep=False), made)
    assert set(root["statistics"].keys()) == {GROUP.split("/")[1]}
    assert root.metadata.zarr_format == (2 if layout == "v2" else 3)
    assert root[U].chunks == (1, 19, 20) and np.isnan(root[U].fill_value)
    assert root[U].shards == ((4, 19, 40) if layout == "shards" else None)
    assert root["time"].dtype == "int64" and root["time"].chunks == (24,)
    assert root["time"].attrs["units"] == "days since 1982-01-01 00:00:00"
    assert dict(root.attrs) == {}  # what grows with the store lies elsewhere
    slabs = sorted(path.name for path in (whole[layout] / OURS / "slabs").iterdir())
    assert slabs == ["00000000.json", "00000008.json", "00000016.json"]


def test_figures_count_what_is_stored_and_a_whole_store_is_not_read(make, whole, slabs_read, capsys) -> None:
    for name, flags in LAYOUTS.items():
        before = content(whole[name], ours=True)
        figures = make(*SMALL, *flags, "--store", whole[name])
        assert "whole already" in capsys.readouterr().out
        assert content(whole[name], ours=True) == before
        stored = content(whole[name])
        sizes = {"objects": len(stored), "stored_bytes": sum(map(len, stored.values()))}
        assert figures == sizes | {"store": str(whole[name]), "raw_bytes": 24 * 2 * 19 * 36 * 4, "slabs": 3}
    assert not slabs_read


# --------------------------------------------------------------------------------------- its statistics


def test_statistics_are_those_that_training_computes_in_memory(make, modules, tmp_path: Path) -> None:
    navy = xr.load_dataset(NAVY).isel(latitude=slice(None, None, 2), longitude=slice(None, None, 2))
    navy["eastward_wind"][:, 3:5, 7] = np.nan  # masked, by one variable
    navy["northward_wind"] += 5000  # in single precision its squares would tell nothing of its spread
    navy.to_netcdf(tmp_path / "masked.nc")
    make("--source", tmp_path / "masked.nc", "--store", tmp_path / "store")
    training = navy.sel(time=slice("1982", "1989"))
    sums = modules.climatology.MonthlySums(2, navy.latitude.size, navy.longitude.size)
    sums.add(training.to_dataarray().values, training.time.dt.month.values - 1)
    mean, std, _ = sums.average(1, "keep")
    statistics = xr.open_zarr(tmp_path / "store", group="statistics/eastward_wind_northward_wind_1982_1989")
    np.testing.assert_array_equal(statistics.latitude, navy.latitude)
    for i, name in enumerate(("eastward_wind", "northward_wind")):
        assert statistics[name].dims == ("month", "latitude", "longitude")
        valid = ~np.isnan(mean[:, i])
        np.testing.assert_allclose(statistics[name].values[valid], mean[:, i][valid], rtol=1e-5, atol=1e-5)
        assert statistics[name].attrs["std"] == pytest.approx(std[i].item(), rel=1e-6)
        assert statistics[name].attrs["times"] == 96
    assert np.isnan(statistics.eastward_wind[:, 3:5, 7]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_are_missing_count_nowhere_but_are_written(layout, make, tmp_path, capsys) -> None:
    times = np.array(["1982-01-01", "1982-01-02", "1982-02-01", "1990-03-01"], "datetime64[ns]")
    values = np.arange(4 * 4 * 4, dtype="f4").reshape(4, 4, 4) ** 2
    values[0, 0, 0] = values[:3, 1, 1] = values[:, 2:, 2:] = values[2, 2:, :2] = np.nan
    grid = {"time": times, "latitude": [3.0, 2, 1, 0], "longitude": [0.0, 1, 2, 3]}
    xr.Dataset({"a": ([*grid], values)}, grid).to_netcdf(tmp_path / "a.nc")
    store, group = tmp_path / "store", "statistics/a_1982_1989"
    flags = ["--source", tmp_path / "a.nc", "--store", store, "--chunk", 1, 2, 2, *LAYOUTS[layout]]
    make(*flags)  # which lacks the years 1983 to 1989
    assert "note: the store has no times of 1983" in capsys.readouterr().out
    assert not (store / "statistics").exists()
    make(*flags, "--train-times", 1982, 1989)
    for metadata in store.rglob("*"):
        if metadata.name in ("zarr.json", ".zarray", ".zmetadata"):
            metadata.write_text(metadata.read_text().replace('"fill_value": "NaN"', '"fill_value": -1.0'))
    np.testing.assert_array_equal(zarr.open_group(store)["a"], values)
    expected = np.full((12, 4, 4), np.nan, "f4")
    with warnings.catch_warnings(action="ignore"):  # of cells without a value
        expected[0], expected[1] = np.nanmean(values[:2].astype("f8"), axis=0), values[2]
    np.testing.assert_array_equal(zarr.open_group(store)[group]["a"], expected)
    about = zarr.open_group(store)[group]["a"].attrs
    anomalies = values[:3] - expected[[0, 0, 1]]
    assert about["times"] == 3
    assert about["std"] == pytest.approx(np.nanstd(anomalies.astype("f8")), rel=1e-6)


@pytest.mark.parametrize("layout", ["v3", "v2"])
def test_other_train_times_add_a_group_and_read_only_their_slabs(
    layout: str, make, whole, slabs_read, tmp_path: Path
) -> None:
    store = shutil.copytree(whole[layout], tmp_path / "store")
    before = content(store)
    make(*SMALL, *LAYOUTS[layout], "--store", store, "--train-times", 1983, "1984-06")
    assert slabs_read == [(U, 0), (V, 0)]  # of three
    changed = {path for path, data in content(store).items() if before.pop(path, None) != data}
    assert not before
    added = f"statistics/{U}_{V}_1983_1984-06"
    rest = {path for path in changed if not path.startswith(added)}
    assert rest == {".zmetadata" if layout == "v2" else "zarr.json"}
    for name in (added, GROUP):
        expected = xr.open_zarr(store)[U].sel(time=slice(*name.split("_")[-2:]))
        statistics = xr.open_zarr(store, group=name)[U]
        assert statistics.attrs["times"] == len(expected.time)
        mean = expected.groupby("time.month").mean()
        np.testing.assert_allclose(statistics.dropna("month"), mean, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------- killed


def make_until(name: str, moment: int, here: Path, flags: list[object]) -> None:
    """Run the script, and die in place of writing object number `moment` with `name` in its name."""
    with book.rooms("03_cloud_data"):
        import make_store
        from conversion import verification

        make_store.HERE, verification.LEAST_SLABS, count = here, 1, itertools.count()

        def write_or_die(write: Callable, *args, **more):
            if name in args[1] and next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args, **more)

        import obstore

        for function in ("put", "put_async"):  # ours, and Zarr's
            setattr(obstore, function, partial(write_or_die, getattr(obstore, function)))
        make_store.main([str(flag) for flag in flags])


def kill_at(name: str, moment: int, here: Path, *flags: object) -> None:
    process = programs.CONTEXT.Process(target=make_until, args=(name, moment, here, flags))
    process.start()
    process.join(programs.LIMIT)
    assert process.exitcode == -signal.SIGKILL, (name, moment)


def test_killed_while_it_writes_it_goes_on_to_the_same_bytes(here, make, whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    kill_at("", 85, here, *SMALL, "--store", store)
    assert (store / OURS / "slabs/00000000.json").exists()
    assert not (store / OURS / "slabs/00000016.json").exists()
    (store / U / "c/0/0/0#1").write_text("half a chunk")  # as a kill leaves it
    written = {path: path.stat().st_mtime_ns for path in (store / U / "c/7").rglob("*")}
    make(*SMALL, "--store", store)
    assert content(store, ours=True) == content(whole["v3"], ours=True)
    assert written == {path: path.stat().st_mtime_ns for path in written}  # by the first command


def test_killed_while_it_verifies_it_goes_on_with_what_is_left(
    here, make, whole, slabs_read, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    kill_at("sums/", 4, here, *SMALL, "--store", store)  # the sums of u, and of v's first slab, are kept
    make(*SMALL, "--store", store)
    assert slabs_read == [(V, 8), (V, 16)]
    assert content(store, ours=True) == content(whole["v3"], ours=True)


def test_a_map_that_is_not_what_was_written_ends_the_making(
    here, modules, refused, tmp_path, monkeypatch
) -> None:
    """Also at times that are not trained on; and also if it was encoded wrongly, so that its object is whole."""
    flags = [*SMALL, "--train-times", 1982, 1983, "--store", tmp_path / "store"]
    kill_at("sums/", 0, here, *flags)
    flip(tmp_path / "store" / U / "c/20/0/0")
    assert f"damaged: {U}/c/20/0/0: not what was written" in refused(*flags)
    encode = modules.target.Target.encode
    monkeypatch.setattr(modules.target.Target, "encode", lambda self, *a: encode(self, *a[:2], a[2].round(3)))
    assert "decoded to other values" in refused(*flags[:-1], tmp_path / "rounded")


@thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(layout, here, make, whole, tmp_path: Path) -> None:
    expected = content(whole[layout], ours=True)
    flags = [*SMALL, *LAYOUTS[layout], "--store"]
    for moment in (*range(8), len(expected) // 3, *range(len(expected) - 12, len(expected) + 2)):
        kill_at("", moment, here, *flags, tmp_path / str(moment))
        make(*flags, tmp_path / str(moment))
        assert content(tmp_path / str(moment), ours=True) == expected, moment
    for moment in (5, 9, 20):  # one command after another
        kill_at("", moment, here, *flags, tmp_path / "store")
    make(*flags, tmp_path / "store")
    assert content(tmp_path / "store", ours=True) == expected


def test_of_two_commands_at_once_one_waits(make, whole, tmp_path: Path, capsys) -> None:
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: make(*SMALL, "--store", tmp_path / "store"), range(2))
    assert first == second
    assert capsys.readouterr().out.count("whole already") == 1
    assert content(tmp_path / "store") == content(whole["v3"])


# ------------------------------------------------------------------------------------------ appended


def years(files: Path, *ends: str) -> list[Path]:
    """The files of years that end so."""
    return [files / f"winds_19{end}.nc" for end in ends]


FIRST, SECOND = ("82", "83", "84", "85", "86"), ("87", "88", "89", "90", "91", "92")


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_appended_is_what_is_made_at_once(cut: str, make, files, whole, tmp_path: Path) -> None:
    flags = ["--patch-size", 10, "--slab-times", 8, *CUTS[cut]]
    store, before = ["--store", tmp_path / "store"], ["--train-times", 1982, 1989]
    make(*flags, "--source", *years(files, *FIRST), *before, *store)
    make("--append", "--source", *years(files, *SECOND[:2]), *store)
    make("--append", "--source", *years(files, *SECOND[2:]), *store)
    assert content(tmp_path / "store") == content(whole[cut])
    make(*flags, "--source", files / "*.nc", *store)  # as if it had been made of all


@pytest.mark.parametrize(
    "moments",
    [
        "slabs/:0",
        "slabs/:1 statistics/:1",
        pytest.param(f"{U}/:1 sums/:1 {V}/c:1 zarr.json:1", marks=thorough),
    ],
)
def test_killed_in_an_append_it_goes_on_and_readers_see_the_old_extent(
    moments: str, here, make, files, refused, whole, tmp_path: Path
) -> None:
    flags = ["--patch-size", 10, "--slab-times", 8, *CUTS["chunks of 5"]]
    store, at_once = tmp_path / "store", xr.open_zarr(whole["chunks of 5"]).load()
    make(*flags, "--source", *years(files, *FIRST), "--store", store, "--train-times", 1982, 1989)
    more = ["--append", "--source", *years(files, *SECOND), "--store", store]
    for place in moments.split():
        name, moment = place.split(":")
        kill_at(name, int(moment), here, *more)
        seen = xr.open_zarr(store).load()
        xr.testing.assert_identical(seen, at_once.isel(time=slice(0, 11)))
        if place == "slabs/:0":  # the chunk that is completed is written, and nobody has recorded that
            flip(store / U / "c/2/0/0")
            assert f"{U}/c/2/0/0: " in refused(*more)
            make("--repair", "--source", files / "*.nc", "--store", store)
    (later := xr.load_dataset(files / "winds_1987.nc"))[U][0] += 1
    later.to_netcdf(tmp_path / "edited.nc")
    edited = [tmp_path / "edited.nc", *years(files, *SECOND[1:])]
    assert "these have other values" in refused("--append", "--source", *edited, "--store", store)
    kill_at("time/c/0", 0, here, *more)
    with pytest.raises(ValueError):  # between two requests: an error, and no wrong value
        xr.open_zarr(store)
    assert "an append was begun" in refused(*flags, "--source", *years(files, *FIRST), "--store", store)
    make(*more)
    assert content(store) == content(whole["chunks of 5"])


def test_what_cannot_be_appended_is_refused(make, files, whole, tmp_path: Path, refused) -> None:
    store = shutil.copytree(whole["v3"], tmp_path / "store")
    before = content(store, ours=True)
    append = partial(refused, "--append", "--store", store)
    assert "1992-01-16T00:00, is not after the store's last" in append("--source", *years(files, "92"))
    later = xr.load_dataset(files / "winds_1992.nc").assign_coords(time=np.arange(3).astype("M8[D]") + 9999)
    later.isel(latitude=slice(1, None)).to_netcdf(tmp_path / "grid.nc")
    later[[U]].to_netcdf(tmp_path / "one.nc")
    assert "other values of latitude" in append("--source", tmp_path / "grid.nc")
    assert f"no {U}, {V} on" in append("--source", tmp_path / "one.nc")
    assert "--chunk 1 4 4: the store was begun with" in append("--source", NAVY, "--chunk", 1, 4, 4)
    assert "needs --source" in append()
    assert content(store, ours=True) == before
    later.to_netcdf(tmp_path / "good.nc")
    for chunk in ("c/2/0/0", "c/23/0/0"):  # lost, or damaged in the slab that is completed
        flip(store / U / chunk) if "23" in chunk else (store / U / chunk).unlink()
        assert f"damaged: {U}/{chunk}" in append("--source", tmp_path / "good.nc")
        (store / U / chunk).write_bytes(before[f"{U}/{chunk}"])
    assert content(store, ours=True) == before
    other = refused("--append", "--source", NAVY, "--store", tmp_path / "none")
    assert f"--store {tmp_path}/none: nothing is there; make it first" in other


# ----------------------------------------------------------------------------- damaged, and repaired


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGE = {"flipped bit": flip, "cut": lambda path: os.truncate(path, path.stat().st_size // 2)}
DAMAGE |= {"emptied": lambda path: path.write_bytes(b""), "lost": Path.unlink}
CHUNKS = {"v3": "c/9/0/0", "shards": "c/2/0/0", "v2": "9.0.0"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_repaired(
    damage: str, layout: str, make, refused, whole, tmp_path, capsys
) -> None:
    store = shutil.copytree(whole[layout], tmp_path / "store")
    before = content(store, ours=True)
    chunk = f"{U}/{CHUNKS[layout]}"
    DAMAGE[damage](store / chunk)
    line = refused("--verify", "--store", store)
    assert f"--store {store}: damaged: {chunk}: " in line and "(1 objects in all)" in line
    make("--repair", *SMALL, *LAYOUTS[layout], "--store", store)
    times = "1985-10-29T00:00 to 1987-0" if layout == "shards" else "1986-04-21T00:00"
    assert f"damaged: {chunk}: " in (printed := capsys.readouterr().out) and f"{U} at {times}" in printed
    assert content(store, ours=True) == before
    make("--verify", "--store", store)


def test_a_value_in_a_store_without_checksums_of_its_own_is_found(make, whole, tmp_path, refused) -> None:
    """Zarr 2: the chunk can be decoded, to another value. And in a shard a chunk is missing."""
    for layout, value in {"v2": 12.0, "shards": np.nan}.items():
        store = shutil.copytree(whole[layout], tmp_path / layout)
        zarr.open_group(store, mode="r+")[U][9, :, :20] = value
        assert "damaged" in refused("--verify", "--store", store)
        make("--repair", "--store", store)
        assert content(store) == content(whole[layout])


@pytest.mark.parametrize("layout", ["v3", "v2", pytest.param("shards", marks=thorough)])
def test_what_a_whole_store_has_lost_is_named_without_reading(layout, make, whole, tmp_path, refused) -> None:
    store = shutil.copytree(whole[layout], tmp_path / "store")
    before = content(store, ours=True)
    flags = [*SMALL, *LAYOUTS[layout], "--store", store]
    last = {"v3": "c/23/0/1", "shards": "c/5/0/0", "v2": "23.0.1"}[layout]
    one, metadata = ("0", ".zarray") if layout == "v2" else ("c/0", "zarr.json")
    names = [f"{V}/{last}", f"time/{one}", f"{GROUP}/latitude/{one}", f"{U}/{metadata}"]
    names += [f"{OURS}slabs/00000008.json", ".zmetadata" if layout == "v2" else "zarr.json"]
    names += [f"{OURS}small.json"]
    for lost in names:
        (store / lost).unlink()
        line = refused(*flags)
        assert f"--store {store}: damaged: {lost}: missing or empty" in line and "(1 objects in all)" in line
        (store / lost).write_bytes(b"")
        assert refused(*flags) == line
        assert f"damaged: {lost}: " in refused("--verify", "--store", store)
        make("--repair", *flags)
        assert content(store, ours=True) == before


def test_without_its_sources_a_slab_is_not_repaired_but_all_else_is(
    make, files, tmp_path: Path, refused
) -> None:
    store = tmp_path / "store"
    shutil.copytree(files, tmp_path / "files")
    make("--source", tmp_path / "files/*.nc", "--patch-size", 10, "--slab-times", 8, "--store", store)
    before = content(store, ours=True)
    flip(store / "latitude/c/0")
    flip(store / GROUP / V / "c/3/0/0")
    make("--repair", "--store", store)
    assert content(store, ours=True) == before
    (store / V / "c/9/0/0").unlink()
    line = refused("--repair", "--store", store)
    assert "--source: not given" in line and "give those of 1985-10-29 to" in line
    line = refused("--repair", "--source", *years(files, "85"), "--store", store)
    assert "the files lack 7 of the times 1985-10-29T00:00 to" in line
    shutil.copytree(files, tmp_path / "edited")  # because xarray keeps the others open in this process
    with h5py.File(tmp_path / "edited/winds_1986.nc", "r+") as edited:
        edited[V][0, 2, 1] += 1
    other = ["--repair", "--source", tmp_path / "edited/*.nc", "--store", store]
    assert f"map 9 of {V}, counted from 0, is not what the store" in refused(*other)
    make("--repair", "--source", *years(files, "85", "86", "87", "88", "89"), "--store", store)
    assert content(store, ours=True) == before


# -------------------------------------------------------------------------------------- files of others


def split_navy(folder: Path, **changes: Callable) -> str:
    """Some of chapter 1's winds in three files, each changed by a function; return their pattern."""
    folder.mkdir(parents=True)
    navy = xr.load_dataset(NAVY).isel(latitude=slice(0, 8), longitude=slice(0, 8), time=slice(0, 12))
    for name, first in zip("cab", (0, 4, 8)):  # not in the order of their names
        part = navy.isel(time=slice(first, first + 4)).drop_encoding()
        changes.get(name, lambda part: part)(part).to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    return str(folder / "*.nc")


def with_other_names(part: xr.Dataset) -> xr.Dataset:
    """And packed in 0.01 m/s: 32001 is a flag, by the valid range, and -32767 is no value."""
    packed = (part.eastward_wind / 0.01).round().astype("int16")
    packed[1, 2, 3], packed[2, 2, 3] = 32001, -32767
    about = {"units": "m/s", "scale_factor": "0.01", "valid_range": np.int16([-32000, 32000])}
    part["eastward_wind"] = packed.assign_attrs(about | {"_FillValue": np.int16(-32767)})
    part = part.assign_coords(number=3, time=part.time + np.timedelta64(90, "s"))
    part = part.assign_coords(bounds=("edge", [0.0, 1.0])).expand_dims("expver")
    part = part.rename(time="valid_time", latitude="lat", longitude="x")
    return part.transpose("x", "expver", "valid_time", "lat", ...)


def test_other_names_orders_and_packed_data(make, tmp_path: Path) -> None:
    pattern = split_navy(tmp_path / "files", **dict.fromkeys("abc", with_other_names))
    make("--source", pattern, "--store", tmp_path / "all")
    make("--source", pattern, "--store", tmp_path / "one", "--variables", "northward_wind")
    store, navy = xr.open_zarr(tmp_path / "all").load(), xr.load_dataset(NAVY)
    expected = navy.isel(latitude=slice(0, 8), longitude=slice(0, 8), time=slice(0, 12))
    expected = expected.assign_coords(time=expected.time + np.timedelta64(90, "s"))
    assert set(store.variables) == {"time", "latitude", "longitude", "eastward_wind", "northward_wind"}
    xr.testing.assert_equal(store.northward_wind, expected.northward_wind)
    wind = store.eastward_wind
    assert wind.dims == ("time", "latitude", "longitude") and wind.dtype == "float32"
    assert "valid_range" not in wind.attrs  # which was of packed values
    assert np.argwhere(wind.isnull().values).tolist() == [[i, 2, 3] for i in (1, 2, 5, 6, 9, 10)]
    np.testing.assert_allclose(wind, expected.eastward_wind.where(wind.notnull()), atol=0.0051)
    assert zarr.open_group(tmp_path / "all")["time"].dtype == "int64"
    assert set(xr.open_zarr(tmp_path / "one").data_vars) == {"northward_wind"}


def test_columns_beyond_once_around_are_left_out(make, tmp_path: Path, capsys) -> None:
    navy = xr.load_dataset(NAVY).isel(time=slice(0, 4)).drop_encoding()
    halo = navy.isel(longitude=[-1, *range(144), 0])
    around = np.concatenate([[navy.longitude[0] - 2.5], navy.longitude, [navy.longitude[0] + 360]])
    halo.assign_coords(longitude=("longitude", around)).to_netcdf(tmp_path / "halo.nc")
    make("--source", tmp_path / "halo.nc", "--store", tmp_path / "store")
    assert "note: 2 columns repeat others" in capsys.readouterr().out
    found = xr.open_zarr(tmp_path / "store")
    assert found.longitude.values.tolist() == around[:-2].tolist()
    np.testing.assert_array_equal(found.eastward_wind, halo.eastward_wind[..., :-2])


def with_value(part: xr.Dataset, value: float) -> xr.Dataset:
    part["northward_wind"][2, 5, 5] = value
    part["northward_wind"].encoding["_FillValue"] = None
    return part


def with_column_twice(part: xr.Dataset) -> xr.Dataset:
    first = part.isel(longitude=[0])
    return xr.concat([part, first.assign_coords(longitude=first.longitude + 360)], "longitude")


def with_two_grids(part: xr.Dataset) -> xr.Dataset:
    """Staggered: the second variable has latitudes of its own, between those of the first."""
    between = ("lat_v", part.latitude.values + 1.25, {"units": "degrees_north"})
    renamed = part.northward_wind.rename(latitude="lat_v").drop_vars("lat_v", errors="ignore")
    return part[["eastward_wind"]].assign(northward_wind=renamed).assign_coords(lat_v=between)


def with_rows(values: object, **attributes: str) -> Callable:
    return lambda part: part.assign_coords(latitude=("latitude", values, attributes))


def without_first_time(part: xr.Dataset) -> xr.Dataset:
    return part.assign_coords(time=[np.datetime64("NaT", "ns"), *part.time.values[1:]])


def in_km_per_hour(part: xr.Dataset) -> xr.Dataset:
    part["northward_wind"].attrs["units"] = "km h-1"
    return part


IN_METRES = {"units": "m", "standard_name": "latitude"}
BAD_FILES = {
    "grid": (lambda part: part.isel(latitude=slice(1, None)), "c.nc: it has other values of latitude than"),
    "shifted": (lambda part: part.assign_coords(longitude=part.longitude + 1), "other values of longitude"),
    "overlap": (
        lambda part: part.assign_coords(time=part.time + np.timedelta64(60, "D")),
        "two files have 1982-05-",
    ),
    "one time twice": (lambda part: part.isel(time=[0, 0, 1, 2]), "c.nc: time has a value twice"),
    "no time": (without_first_time, "c.nc: time has no value at position 0 of 4"),
    "no dates": (lambda part: part.assign_coords(time=range(4)), "c.nc: its times are int64, no dates"),
    "calendar": (
        lambda part: part.convert_calendar("noleap"),
        "c.nc: its times are not of the usual calendar",
    ),
    "units": (in_km_per_hour, "units 'km h-1', before it had"),
    "level": (lambda part: part.expand_dims(level=[850]), "c.nc: eastward_wind has selected 'level 850'"),
    "backwards": (lambda part: part.isel(time=slice(None, None, -1)), "c.nc: its times are not sorted"),
    "a variable less": (lambda part: part[["eastward_wind"]], "c.nc: it has other variables"),
    "none at all": (lambda part: part.mean("time"), "no variable on time, latitude and longitude alone"),
    "infinity": (
        partial(with_value, value=np.inf),
        "northward_wind on 1982-03-18T17:00: infinity, or netCDF's mark",
    ),
    "default fill": (partial(with_value, value=np.float32(9.969209968386869e36)), "infinity, or netCDF's"),
    "no times": (lambda part: part.isel(time=slice(0)), "c.nc: "),
    "no rows": (lambda part: part.isel(latitude=slice(0)), "c.nc: "),
    "strings": (lambda part: part.astype(str), "c.nc: "),
    "strings as rows": (with_rows(list("abcdefgh")), "c.nc: latitude holds"),
    "metres": (with_rows(np.arange(8.0), **IN_METRES), "c.nc: latitude is in m; it must be in degrees"),
    "a column twice": (with_column_twice, "c.nc: longitude has a value twice"),
    "a row twice": (with_rows([1.0, 2, 3, 3 + 1e-9, 4, 5, 6, 7]), "c.nc: latitude has a value twice"),
    "two grids": (with_two_grids, "lat_v both look like latitude; give --variables of one grid"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_are_refused(case: str, make, tmp_path: Path, refused) -> None:
    change, message = BAD_FILES[case]
    pattern = split_navy(tmp_path / "files", c=change)
    before = content(tmp_path / "files")
    line = refused("--source", pattern, "--store", tmp_path / "store")
    assert "error: --source" in line and message in line
    assert content(tmp_path / "files") == before
    if case == "two grids":  # one of the two can still be converted
        make("--source", pattern, "--store", tmp_path / "one", "--variables", "eastward_wind")
    if (tmp_path / "store/zarr.json").exists():
        assert case in ("infinity", "default fill") and not (tmp_path / "store" / OURS / "slabs").exists()


def test_other_bad_input_is_refused(make, whole, tmp_path: Path, refused) -> None:
    pattern = split_navy(tmp_path / "files")
    os.truncate(tmp_path / "files/c.nc", 1000)
    store = ["--store", tmp_path / "store"]
    assert f"--source {tmp_path}/files/c.nc: " in refused("--source", pattern, *store)
    assert "--source none*.nc: no such files" in refused("--source", "none*.nc", *store)
    good = ["--source", NAVY, *store]
    assert "gust" in refused(*good, "--variables", "gust")
    times = ["--train-times", 2001, 2002]
    assert "1982-01-16 to 1992-12-17" in refused(*good, *times)
    assert not (tmp_path / "store").exists() or not content(tmp_path / "store", ours=True)
    assert "--train-times 2001 2002" in refused(*SMALL, "--store", whole["v3"], *times)
    (tmp_path / "file").write_text("dear")
    assert f"--store {tmp_path}/file: Not a dir" in refused(*SMALL, "--store", tmp_path / "file/x")
    assert f"--store {tmp_path}/file:" in refused(*SMALL, "--store", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "dear"
    secret = "https://me:password@host/a.nc"
    for flags in (
        ["--source", secret],
        ["--store", secret],
        ["--source", f"{secret[:8]}host/a.nc?key=password"],
    ):
        assert "credentials" in (line := refused(*flags)) and "password" not in line
    assert "a folder; give the files in it" in refused("--source", tmp_path / "files", *store)
    assert "--store: is empty" in refused("--store", "")
    xr.load_dataset(NAVY)[["eastward_wind"]].rename(eastward_wind="statistics").to_netcdf(
        tmp_path / "name.nc"
    )
    assert "--variables statistics: the store needs this name" in refused(
        "--source", tmp_path / "name.nc", *store
    )


def test_a_store_of_another_command_is_refused_and_untouched(make, whole, tmp_path: Path, refused) -> None:
    before = content(whole["v3"], ours=True)
    others = {"--days": [23], "--patch-size": [4], "--zarr-format": [2], "--slab-times": [6]}
    others |= {"--shard-times": [4], "--zstd-level": [5], "--source": [NAVY], "--variables": [U]}
    for flag, values in others.items():
        line = refused(*SMALL, "--store", whole["v3"], flag, *values)
        assert "the store was begun with" in line or "no 10m_u" in line, flag
    assert content(whole["v3"], ours=True) == before
    old = zarr.open_group(tmp_path / "old", mode="w")
    old.attrs.put({"settings": {"days": 24}, "whole": True})
    zarr.create_array(tmp_path / "array", shape=3, dtype="f4")
    (shutil.copytree(whole["v3"], tmp_path / "lost") / OURS / "state.json").unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter#1").write_text("dear")
    (tmp_path / "home/letter").write_text("dear")
    state = shutil.copytree(whole["v3"], tmp_path / "older") / OURS / "state.json"
    state.write_text(state.read_text().replace("slab_times", "another"))
    before = content(tmp_path)
    for task in ([], ["--verify"]):
        line = refused(*SMALL, "--store", tmp_path / "older", *task)
        assert "begun by another version of make_store.py; remove the store and make it anew" in line
    for name in ("old", "array", "home", "lost"):
        line = refused(*SMALL, "--store", tmp_path / name)
        assert "not begun by this version of make_store.py, no checksums; give another --store" in line
    assert {path: data for path, data in content(tmp_path).items() if ".lock" not in path} == before


@pytest.mark.parametrize("layout", ["v3", pytest.param("v2", marks=thorough)])
def test_touched_files_are_compared_once_and_are_the_same(
    layout: str, modules, make, here, tmp_path: Path, monkeypatch
) -> None:
    pattern, store = split_navy(tmp_path / "files"), tmp_path / "store"
    flags = ["--source", pattern, *LAYOUTS[layout], "--slab-times", 4, "--store"]
    make(*flags, store)
    kill_at("slabs/", 2, here, *flags, tmp_path / "begun")
    os.utime(tmp_path / "files/a.nc", (0, 0))
    make(*flags, tmp_path / "fresh")
    for touched in (store, tmp_path / "begun"):
        make(*flags, touched)
        assert content(touched, ours=True) == content(tmp_path / "fresh", ours=True)
    monkeypatch.setattr(modules.make_store, "open_source", lambda *_: pytest.fail("read again"))
    make(*flags, store)


def test_files_that_were_edited_since_are_not_mixed_in(make, tmp_path: Path, refused) -> None:
    """Each edit is made in a copy, because xarray keeps files open in this process; paths are not compared."""
    flags = ["--store", tmp_path / "store", "--slab-times", 4]
    make("--source", split_navy(tmp_path / "files"), *flags)
    before = content(tmp_path / "store", ours=True)
    shutil.copytree(tmp_path / "files", tmp_path / "edited")
    with h5py.File(tmp_path / "edited/a.nc", "r+") as edited:  # the second in time
        edited["northward_wind"][3, 2, 1] += 1
    later = split_navy(tmp_path / "later", a=lambda part: part.assign_coords(time=part.time + HOUR))
    others = {tmp_path / "edited/*.nc": "northward_wind from 1982-0", later: "time"}
    others[tmp_path / "files/[cb].nc"] = "time"
    for pattern, differ in others.items():
        line = refused("--source", pattern, *flags)
        assert f"the store was begun with other files; these have other values of {differ}" in line
    assert "not given, but the store was made of your files" in refused(*flags)
    assert content(tmp_path / "store", ours=True) == before
    for record in (tmp_path / "store" / OURS / "slabs").iterdir():  # also where nobody knows what was written
        for damaged in (b"", record.read_bytes()[:9]):
            record.write_bytes(damaged) if damaged else record.unlink()
            assert refused("--source", tmp_path / "edited/*.nc", *flags)
            record.write_bytes(before[record.relative_to(tmp_path / "store").as_posix()])
    assert content(tmp_path / "store", ours=True) == before


# ------------------------------------------------------------------------------- several blocks at once


def test_blocks_are_whole_shards_and_no_slab_loses_a_time(modules) -> None:
    options = modules.options
    for flags, step in {(): 5, ("--shard-times", "24"): 24, ("--shard-times", "36"): 36}.items():
        given = options.parse_options("", list(flags))
        layout = options.make_layout(options.make_settings(given, options.SETTINGS))
        times = []
        for first in layout.slabs(396):
            for block in layout.blocks(layout.slab(first, 396)):
                assert (block.start - first) % step == 0 and block.stop - block.start <= step
                times += range(block.start, block.stop)
        assert times == list(range(396))


TOGETHER = threading.Barrier(4)
CALLED = {}  # the modules' own functions: a worker in this process finds them here


def meet_in_write_block(target, times: slice, *rest):
    """Write a block when four are under way, of the first eight."""
    if times.start < 8:
        TOGETHER.wait(60)  # seconds: a guard against a hang
    return CALLED["write_block"](target, times, *rest)


def meet_in_read_slab(target, name: str, first: int, months):
    if first < 16:
        TOGETHER.wait(60)
    return CALLED["read_slab"](target, name, first, months)


def test_four_workers_have_four_tasks_at_once(make, modules, tmp_path: Path, monkeypatch) -> None:
    """While they write and while they verify: all wait for each other, and the bytes are the same."""
    TOGETHER.reset()
    flags = [*SMALL[:-1], 4]  # six slabs, of four blocks each
    make(*flags, "--store", tmp_path / "threads")
    monkeypatch.setattr(modules.blocks, "Client", partial(Client, processes=False, **LOCAL))
    CALLED.update(write_block=modules.making.write_block, read_slab=modules.verification.read_slab)
    monkeypatch.setattr(modules.making, "write_block", meet_in_write_block)
    monkeypatch.setattr(modules.verification, "read_slab", meet_in_read_slab)
    make(*flags, "--store", tmp_path / "store", "--workers", 4)
    assert not TOGETHER.broken
    assert content(tmp_path / "store") == content(tmp_path / "threads")


def test_no_more_tasks_are_under_way_than_twice_the_threads(modules) -> None:
    """So that memory holds no more results than these, however many tasks there are."""
    taken = itertools.count()
    tasks = ((next(taken),) for _ in range(100))
    with ThreadPoolExecutor(3) as threads:
        done = modules.blocks.Pool(threads, 3).run(lambda number: -number, tasks)
        for position, ((number,), result) in enumerate(done):
            assert result == -number and next(taken) <= 2 * position + 8
    assert position == 99


BAD_FLAGS = [["--days", 0], ["--days", 4019], ["--resolution", 0.7], ["--resolution", "nan"]]
BAD_FLAGS += [["--patch-size", 0], ["--chunk", 0, 8, 8], ["--chunk", 2, 8, 8, "--shard-times", 3]]
BAD_FLAGS += [["--shard-times", -1], ["--shard-times", 3, "--zarr-format", 2], ["--slab-times", 0]]
BAD_FLAGS += [["--zstd-level", 10], ["--workers", -1], ["--append", "--verify"]]


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=lambda flags: " ".join(map(str, flags)))
def test_bad_flags_are_named_and_nothing_is_written(flags: list, make, tmp_path: Path, refused) -> None:
    line = refused("--store", tmp_path / "store", *flags)
    assert any(str(flag) in line for flag in flags if str(flag).startswith("--"))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- other places


@pytest.fixture
def address(here: Path, monkeypatch) -> Iterator[str]:
    """An S3 server, whose bucket `files` has the NetCDF files."""
    for name, value in {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with buckets.serving(here / "outputs", latency_ms=0) as address:
        yield address


def test_buckets_and_a_web_server_are_like_a_disk(
    make, files, address, refused, whole, tmp_path: Path
) -> None:
    flags = ["--patch-size", 10, "--slab-times", 8]
    urls = [f"{address}/files/{files.name}/{path.name}" for path in sorted(files.glob("*.nc"))]
    make(*flags, "--source", *urls, "--store", tmp_path / "web")
    assert content(tmp_path / "web") == content(whole["v3"])
    place = ["--store", "s3://winds/small.zarr", "--endpoint", address]
    flags += ["--source", f"s3://files/{files.name}/winds_*.nc", "--source-endpoint", address, *place]
    assert "NoSuchBucket" in refused(*flags)
    urllib.request.urlopen(urllib.request.Request(f"{address}/winds", method="PUT"))
    figures = make(*flags)
    bucket = S3Store("winds", prefix="small.zarr", endpoint=address, client_options={"allow_http": True})
    names = [found["path"] for page in bucket.list() for found in page if not found["path"].startswith(OURS)]
    stored = {name: bucket.get(name).bytes().to_bytes() for name in names}
    assert stored == content(whole["v3"])
    assert figures["stored_bytes"] == sum(map(len, stored.values()))
    bucket.delete(f"{U}/c/7/0/1")
    for command in (flags, ["--verify", *place]):
        assert f"damaged: {U}/c/7/0/1: missing or empty" in refused(*command)
    make("--repair", *flags)
    make("--verify", *place)
    nowhere = ["--store", tmp_path / "nowhere"]
    assert "give the URL of each" in refused("--source", f"{address}/files/*.nc", *nowhere)
    assert "no such files" in refused(*flags, "--source", "s3://files/none/*.nc")


@thorough
def test_a_cluster_on_other_machines_gets_the_modules(make, whole, tmp_path: Path) -> None:
    """Its workers are started elsewhere, and find nothing of this folder by themselves."""
    with LocalCluster(n_workers=0, processes=False, **LOCAL) as cluster:
        elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address]
        command += ["--nthreads", "1", "--no-dashboard"]
        worker = subprocess.Popen(command, cwd=tmp_path, env=elsewhere)
        with Client(cluster.scheduler_address) as client:
            client.wait_for_workers(1, timeout=120)
        make(*SMALL, "--store", tmp_path / "store", "--scheduler", cluster.scheduler_address)
        worker.terminate()
        worker.wait()
    assert content(tmp_path / "store") == content(whole["v3"])


@thorough
def test_processes_write_the_same_bytes(whole, tmp_path: Path) -> None:
    done = programs.require_success(SCRIPT, *SMALL, "--store", tmp_path / "store", "--workers", 2)
    assert "dashboard: http" in done.out
    assert content(tmp_path / "store") == content(whole["v3"])
