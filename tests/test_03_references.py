"""Chapter 3: NetCDF files read where they are, and what an Icechunk repository keeps of them."""

import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import book
import buckets
import icechunk
import numpy as np
import programs
import pytest
import xarray as xr
from made_up_winds import SPANS, make_winds, reader_of
from runs import assert_same_bits, losses, make_store, summary

TRAIN = "03_cloud_data/train.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4 --log-every 1 --variables u v".split()
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
CHUNK = (1, 10, 20)
DEFLATED = {"chunksizes": CHUNK, "zlib": True, "shuffle": True}
PACKED = DEFLATED | {"dtype": "int16", "scale_factor": 0.002, "add_offset": 0.5, "_FillValue": -32767}
YEARS = (1982, 1983, 1984, 1985)
Refer = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    with book.rooms("03_cloud_data"), programs.planted_in_all(**programs.QUICK):
        yield


@pytest.fixture(scope="module")
def refer() -> Refer:
    """Call make_references.py's main; return the snapshot's id."""
    main = importlib.import_module("make_references").main
    return lambda *flags: main([str(flag) for flag in flags])


@pytest.fixture
def refused(refer: Refer, capsys) -> Callable[..., str]:
    """The last line with which make_references.py refuses some flags."""

    def call(*flags: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            refer(*flags)
        return capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


def as_in_files() -> xr.Dataset:
    """Winds as the Climate Data Store names their dimensions, from north to south, with what nobody reads."""
    winds = make_winds()[["u", "v"]].isel(latitude=slice(None, None, -1))
    winds["expver"] = "time", np.array(["0001"] * winds.time.size, object)
    return winds.rename(time="valid_time").set_coords("expver").assign_coords(number=0)


def write_files(folder: Path, encoding: dict, years: tuple[int, ...] = YEARS) -> Path:
    """A NetCDF file a year, each with an epoch of its own; the pattern of their names."""
    folder.mkdir(parents=True)
    winds = as_in_files()
    for year in years:
        part = winds.sel(valid_time=str(year))
        times = {"units": f"hours since {year}-01-01", "dtype": "int32"}
        each = {"u": encoding, "v": encoding, "valid_time": times}
        part.to_netcdf(folder / f"{year}.nc", engine="h5netcdf", encoding=each)
    return folder / "*.nc"


@pytest.fixture(scope="module")
def folder(refer: Refer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Buckets: `raw` with packed files, `winds` with references to them, and what they are converted to."""
    folder = tmp_path_factory.mktemp("buckets")
    pattern = write_files(folder / "raw", PACKED)
    converted = folder / "winds/converted"
    make_store(folder, "--source", pattern, "--store", converted, "--chunk", 1, 20, 20)
    with buckets.serving(folder, latency_ms=0) as address:
        at = ("--source", "s3://raw/*.nc", "--source-endpoint", address, "--source-anonymous")
        refer(*at, "--store", folder / "winds/referred")
    storage = icechunk.local_filesystem_storage(str(folder / "winds/copied"))
    repository = icechunk.Repository.create(storage)
    session = repository.writable_session("main")
    copied = xr.open_zarr(converted, chunks=None, decode_cf=False)
    copied.to_zarr(session.store, consolidated=False)
    repository.create_tag("first", snapshot_id=session.commit("a copy"))
    return folder


@pytest.fixture(scope="module")
def references(refer: Refer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """References to files of two years on this disk, and the files' folder."""
    files = tmp_path_factory.mktemp("files") / "raw"
    pattern = write_files(files, DEFLATED, YEARS[:2])
    target = tmp_path_factory.mktemp("made") / "winds"
    refer("--source", pattern, "--store", target)
    return target, files


# ------------------------------------------------------------------------------ the same weights

WAYS = {
    "converted": ("converted", ""),
    "by reference": ("referred", "--icechunk main"),
    "by reference, from a bucket that fails": ("referred", "--icechunk main --num-workers 1"),
    "a tag of a copy": ("copied", "--icechunk first"),
}


def test_by_reference_and_from_icechunk_to_the_weights_of_the_converted_store(
    folder: Path, tmp_path: Path
) -> None:
    """To the bit, although the files are packed, of several epochs, and in other chunks."""
    with (
        buckets.serving(folder, latency_ms=0) as plain,
        buckets.serving(folder, latency_ms=0, **FAULTS) as bad,
    ):
        started = {}
        for way, (store, more) in WAYS.items():
            output = tmp_path / way
            flags = ["--store", f"s3://winds/{store}", "--anonymous", *SPANS, *more.split()]
            flags += ["--endpoint", bad if "fails" in way else plain]
            flags += ["--output-dir", output, "--climatology-dir", tmp_path / f"{way} kept"]
            started[way] = programs.Program(TRAIN, *SMALL, *flags)
        for way, program in started.items():
            done = program.wait()
            assert done.code == 0, done.err
            assert ("note: Icechunk snapshot" in done.out) == (way != "converted")
    for way in WAYS:
        assert_same_bits(tmp_path / way, tmp_path / "converted")
        assert losses(tmp_path / way) == losses(tmp_path / "converted")
        assert summary(tmp_path / way)["rmse"] == summary(tmp_path / "converted")["rmse"]


# ------------------------------------------------------------------------------ what is referred to


def test_times_and_values_are_those_of_the_files(references: tuple[Path, Path]) -> None:
    reader = reader_of(references[0], icechunk="main")
    expected = as_in_files().sel(valid_time=slice("1982", "1983"))
    np.testing.assert_array_equal(reader.open().time, expected.valid_time)
    found = reader.read("u", {"time": slice(0, 73)})
    np.testing.assert_array_equal(found, expected.u.values[:, ::-1])
    reader.read("v", {"time": 0, "latitude": slice(0, 10), "longitude": slice(0, 20)})
    assert reader.traffic.requests == 73 * 4 + 1  # a chunk of the file is read alone


def test_later_files_are_added_as_if_all_had_been_there(refer: Refer, tmp_path: Path) -> None:
    """Read while there are new ones, the snapshot of before is what it was."""
    write_files(tmp_path / "raw", DEFLATED)
    for target, parts in {"at once": ["*"], "one by one": YEARS}.items():
        for number, part in enumerate(parts):
            flags = ["--source", tmp_path / f"raw/{part}.nc", "--store", tmp_path / target]
            snapshot = refer(*flags, *["--append"] * (number > 0))
            if part == YEARS[1]:
                before = reader_of(tmp_path / target, snapshot=snapshot)
                before.open()
    whole = reader_of(tmp_path / "at once", icechunk="main")
    added = reader_of(tmp_path / "one by one", icechunk="main")
    xr.testing.assert_identical(whole.open().load(), added.open().load())
    assert added.open().sizes["time"] == 144
    late = reader_of(tmp_path / "one by one", snapshot=before.location.snapshot)
    assert late.open().sizes["time"] == before.open().sizes["time"] == 73


def damage(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    elif how == "written anew":
        content = path.read_bytes()
        path.write_bytes(content)
        os.utime(path, (2**32, 2**32))  # later than any clock here
    else:
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_bytes(path.read_bytes()[:5000])
        os.utime(path, ns=times)


DAMAGE = {
    "removed": r"u of 1982-01-01T00:00: u/c/0/\S+: .*; check that the file is there, and may be read$",
    "written anew": r"u of 1982-01-01T00:00: u/c/0/\S+: .* has changed .*; refer to the file anew, or bring",
    "cut": r"u of 1982-01-01T00:00: u/c/0/\S+: .*; check that the file is there, and may be read$",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_is_not_what_it_was_is_named(how: str, refer: Refer, tmp_path: Path) -> None:
    """Its bytes at the same places might be other values."""
    from errors import DataError

    pattern = write_files(tmp_path / "raw", DEFLATED, YEARS[:1])
    refer("--source", pattern, "--store", tmp_path / "winds")
    reader = reader_of(tmp_path / "winds", icechunk="main")
    reader.read("u", {"time": 0})
    damage(tmp_path / "raw/1982.nc", how)
    with pytest.raises(DataError, match=DAMAGE[how]):
        reader.read("u", {"time": 0})


def change_packing(folder: Path) -> None:
    other = PACKED | {"scale_factor": 0.003}
    write_files(folder / "other", other, YEARS[1:2])
    shutil.move(folder / "other/1983.nc", folder / "raw/1983.nc")


def change_chunks(folder: Path) -> None:
    write_files(folder / "other", PACKED | {"chunksizes": (1, 20, 40)}, YEARS[1:2])
    shutil.move(folder / "other/1983.nc", folder / "raw/1983.nc")


def cut_file(folder: Path) -> None:
    path = folder / "raw/1983.nc"
    path.write_bytes(path.read_bytes()[:100])


def write_netcdf_3(folder: Path) -> None:
    winds = as_in_files().drop_vars("expver").sel(valid_time="1983")
    winds.to_netcdf(folder / "raw/1983.nc", engine="scipy")


def repeat_times(folder: Path) -> None:
    shutil.copy(folder / "raw/1982.nc", folder / "raw/1983.nc")


REFUSED = {
    change_packing: r"--source \S+1983.nc: u has scale_factor 0.003, and before it had 0.002; convert such",
    change_chunks: "--source: the files differ in chunks or codecs: .*; convert such files, with make_store",
    cut_file: r"--source \S+1983.nc: .*; give whole NetCDF files",
    write_netcdf_3: r"--source \S+1983.nc: cannot be referred to .*; convert such files, with make_store",
    repeat_times: "--source: two files have 1982-01-01T00:00, or times around it",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_files_that_make_no_array_are_refused_and_nothing_is_made(change, refused, tmp_path: Path) -> None:
    write_files(tmp_path / "raw", PACKED, YEARS[:2])
    change(tmp_path)
    said = refused("--source", tmp_path / "raw/*.nc", "--store", tmp_path / "winds")
    assert re.match(REFUSED[change], said), said
    assert not (tmp_path / "winds").exists()


def test_what_cannot_be_added_is_refused_and_the_branch_stays(references, refused, tmp_path: Path) -> None:
    target, files = references
    newest = reader_of(target, icechunk="main")
    newest.open()
    assert "an Icechunk repository is there; give --append" in refused(
        "--source", files / "1983.nc", "--store", target
    )
    assert "no Icechunk repository is there; leave --append out" in refused(
        "--source", files / "1983.nc", "--store", tmp_path / "none", "--append"
    )
    said = refused("--source", files / "1983.nc", "--store", target, "--append")
    assert said == "--append: the repository has times to 1983-12-22T00:00; give later ones"
    write_files(tmp_path / "packed", PACKED, YEARS[2:3])
    said = refused("--source", tmp_path / "packed/*.nc", "--store", target, "--append")
    assert said.startswith("--append: u has _FillValue -32767, and before it had")
    again = reader_of(target, icechunk="main")
    again.open()
    assert again.location == newest.location
