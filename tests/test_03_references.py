"""Chapter 3: NetCDF files read where they are, and what an Icechunk repository keeps of them."""

import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import book
import buckets
import h5py
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
    """References to files of two years on this disk, and the files' folder, of an odd name."""
    files = tmp_path_factory.mktemp("files") / "rå w"
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
    "removed": r"u of 1982-01-01T00:00: u/c/0/\S+: .*; check that the file is there, whole, and may be read$",
    "written anew": r"u of 1982-01-01T00:00: u/c/0/\S+: .* has changed .*; bring the file back as it was, or refer",
    "cut": r"u of 1982-01-01T00:00: u/c/0/\S+: .*; check that the file is there, whole, and may be read$",
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


def write_1983(folder: Path, winds: xr.Dataset, encoding: dict) -> None:
    part = winds.sel(valid_time="1983")
    each = dict.fromkeys(("u", "v"), encoding)
    part.drop_vars("expver").to_netcdf(folder / "raw/1983.nc", engine="h5netcdf", encoding=each)


def turn_around(folder: Path) -> None:
    turned = as_in_files().transpose("valid_time", "longitude", "latitude")
    write_1983(folder, turned, PACKED | {"chunksizes": (1, 20, 10)})


def name_otherwise(folder: Path) -> None:
    write_1983(folder, as_in_files().rename(latitude="lat"), PACKED)


def leave_times_over(folder: Path) -> None:
    for year in (1982, 1983):
        (folder / f"raw/{year}.nc").unlink()
    (folder / "raw").rmdir()
    write_files(folder / "raw", PACKED | {"chunksizes": (5, 10, 20)}, YEARS[:2])  # of 37 and 36 times


def mask_a_filter(folder: Path) -> None:
    with h5py.File(folder / "raw/1983.nc", "a") as file:
        file["u"].id.write_direct_chunk((0, 0, 0), bytes(400), filter_mask=1)


def keep_values_elsewhere(folder: Path) -> None:
    with h5py.File(folder / "raw/1983.nc", "a") as file:
        outside = h5py.VirtualLayout(file["u"].shape, "int16")
        outside[:] = h5py.VirtualSource(folder / "raw/1982.nc", "u", file["u"].shape)
        kept = dict(file["u"].attrs)
        del file["u"]
        file.create_virtual_dataset("u", outside).attrs.update(kept)


def name_as_a_url(folder: Path) -> None:
    (folder / "raw/1983.nc").rename(folder / "raw/#1983.nc")


REFUSED = {
    change_packing: r"--source \S+1983.nc: u has scale_factor 0.003, and before it had 0.002; convert such",
    change_chunks: r"--source \S+1983.nc: u has chunks \(1, 20, 40\), and before it had .*; convert such",
    turn_around: r"--source \S+1983.nc: u has dimensions .*longitude', 'latitude.*; convert such files",
    name_otherwise: r"--source \S+1983.nc: u has dimensions .*'lat', .*; convert such files",
    leave_times_over: "--source: the files make no array: .*partial chunks.*; convert such files",
    mask_a_filter: r"--source \S+1983.nc: .*some chunks of u lack a filter that others have.*; convert such",
    keep_values_elsewhere: r"--source \S+1983.nc: .*the values of u are not in chunks of the file.*; convert",
    name_as_a_url: r"--source \S+#1983.nc: a reference cannot hold the # in its name; rename it",
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


def test_what_cannot_be_added_is_refused_and_the_branch_stays(
    references, refer: Refer, refused, tmp_path: Path
) -> None:
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
    assert said == "--append: the repository has times to 1983-12-22T00:00; give only files of later times"
    write_files(tmp_path / "packed", PACKED, YEARS[2:3])
    said = refused("--source", tmp_path / "packed/*.nc", "--store", target, "--append")
    assert said.startswith("--append: u has type <i2, and before it had <f4; convert such files")
    late = as_in_files().sel(valid_time="1984").assign_coords(height=10.0)
    (tmp_path / "high").mkdir()
    each = dict.fromkeys(("u", "v"), DEFLATED)
    late.to_netcdf(tmp_path / "high/1984.nc", engine="h5netcdf", encoding=each)
    said = refused("--source", tmp_path / "high/*.nc", "--store", target, "--append")
    assert "u has selected " in said and "height 10.0" in said
    year = late.drop_vars("height")
    for change, words in {
        "v": (year.drop_vars("v"), "the repository has .*; give files like its own"),
        "grid": (year.assign_coords(latitude=year.latitude + 1), "latitude differs from the repository's"),
        "range": (year.assign(u=year.u.assign_attrs(valid_max=50.0)), "u has valid_max 50.0, and before"),
    }.items():
        each = {name: DEFLATED for name in words[0].data_vars}
        words[0].to_netcdf(tmp_path / f"{change}.nc", engine="h5netcdf", encoding=each)
        said = refused("--source", tmp_path / f"{change}.nc", "--store", target, "--append")
        assert re.match(f"--append: {words[1]}", said), said
    write_files(tmp_path / "raw", DEFLATED | {"chunksizes": (5, 10, 20)}, YEARS[:2])
    refer("--source", tmp_path / "raw/1982.nc", "--store", tmp_path / "ragged")
    said = refused("--source", tmp_path / "raw/1983.nc", "--store", tmp_path / "ragged", "--append")
    assert said == "--append: the last chunk of u has 2 of 5 times; convert such files, with make_store.py"
    again = reader_of(target, icechunk="main")
    again.open()
    assert again.location == newest.location


def test_files_may_be_added_from_another_folder(refer: Refer, tmp_path: Path, capsys) -> None:
    """Which the repository may read from then on; a note names both, and what was said of the commit."""
    for number, year in enumerate(YEARS[:2]):
        write_files(tmp_path / str(year), DEFLATED, (year,))
        more = ["--append", "--message", "one more"] if number else []
        refer("--source", tmp_path / f"{year}/*.nc", "--store", tmp_path / "winds", *more)
    assert "a file of 1983-01-06 to 1983-12-22: 288 chunks of together 0.2 MB" in capsys.readouterr().out
    reader = reader_of(tmp_path / "winds", icechunk="main")
    reader.read("u", {"time": slice(0, 73)})
    places = ", ".join(f"file://{tmp_path}/{year}/" for year in YEARS[:2])
    assert reader.notes[0].endswith(f"UTC (last commit: one more); refers to files in {places}")


def test_what_changes_while_it_is_referred_to_makes_no_snapshot(refused, tmp_path: Path, monkeypatch) -> None:
    parts = importlib.import_module("referring.parts")
    pattern = write_files(tmp_path / "raw", DEFLATED, YEARS[:1])
    concatenate = parts.concatenate
    touch = lambda *a: os.utime(tmp_path / "raw/1982.nc", (2**32, 2**32)) or concatenate(*a)  # noqa: E731
    monkeypatch.setattr(parts, "concatenate", touch)
    said = refused("--source", pattern, "--store", tmp_path / "winds")
    assert said == "--source: files have changed meanwhile; run this again"
    assert not (tmp_path / "winds").exists()


def test_what_was_killed_before_its_commit_is_begun_again(refer: Refer, tmp_path: Path) -> None:
    """With --append, because a repository is there."""
    pattern = write_files(tmp_path / "raw", DEFLATED, YEARS[:1])
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "winds")))
    refer("--source", pattern, "--store", tmp_path / "winds", "--append")
    assert reader_of(tmp_path / "winds", icechunk="main").open().sizes["time"] == 37


def test_a_commit_that_comes_first_is_said(references, refused, tmp_path: Path, monkeypatch) -> None:
    make_references = importlib.import_module("make_references")
    shutil.copytree(references[0], tmp_path / "winds")
    write_files(tmp_path / "raw", DEFLATED, YEARS[2:3])
    holds_fields = make_references.holds_fields

    def commit_first(store):
        opened = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "winds")))
        session = opened.writable_session("main")
        xr.Dataset({"other": 1}).to_zarr(session.store, consolidated=False, mode="a")
        session.commit("first")
        return holds_fields(store)

    monkeypatch.setattr(make_references, "holds_fields", commit_first)
    said = refused("--source", tmp_path / "raw/*.nc", "--store", tmp_path / "winds", "--append")
    assert said == "--append: another commit to main came first; run this again"


def test_what_is_not_given_or_is_no_place_is_refused(refused, tmp_path: Path) -> None:
    assert refused("--store", tmp_path / "a").startswith("--source: not given")
    assert refused("--source", "a.nc").startswith("--store: not given")
    (tmp_path / "file").touch()
    assert "a file; give a folder" in refused("--source", "a.nc", "--store", tmp_path / "file")
    assert "credentials" in refused("--source", "a.nc", "--store", "s3://key:secret@host/a")
    assert "credentials" in refused("--source", "https://key:secret@host/a.nc", "--store", tmp_path / "a")


def test_a_repository_in_a_bucket_refers_to_no_file_on_a_disk(tmp_path: Path) -> None:
    """Nobody else could read it, and no reader opens such a file for it."""
    make_references = importlib.import_module("make_references")
    write_files(tmp_path / "raw", DEFLATED, YEARS[:1])
    options = make_references.Options(store="s3://a/b", source=[str(tmp_path / "raw/1982.nc")])
    files = make_references.list_files([options.source_location(url) for url in options.source])
    with pytest.raises(importlib.import_module("errors").DataError, match="only a repository on a disk"):
        make_references.check_target(options, False, files)


def test_a_bucket_with_a_repository_says_how_to_open_it(folder: Path) -> None:
    errors = importlib.import_module("errors")
    with buckets.serving(folder, latency_ms=0) as address:
        reader = reader_of("s3://winds/copied", endpoint=address, anonymous=True)
        with pytest.raises(errors.DataError, match=r"^an Icechunk repository, .*; give --icechunk main"):
            reader.open()
