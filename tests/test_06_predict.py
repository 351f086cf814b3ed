"""Chapter 6: whole maps filled by a checkpoint, stopped and gone on with, without seams."""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
import xarray as xr
from alone import contents
from climatology import Climatology
from made_up_winds import write
from predict import __main__ as predict
from predict import maps
from predict.maps import load_model
from runs import last_checkpoint
from studies import seams

SCRIPT = "06_whats_next/predict/__main__.py"
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
TRAIN = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 2 --shuffle-slots 8".split()
TRAIN += ["--full-validation-patches", "24"]
TEST = slice("1991", "1992")


@pytest.fixture(scope="module")
def store(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the winds at 5 degrees: in made-up noise no seam would be seen."""
    return make_small_store(tmp_path_factory.mktemp("stores") / "winds.zarr")


@pytest.fixture(scope="module")
def winds(store: Path) -> xr.Dataset:
    """What is in the store, to be changed."""
    return xr.open_zarr(store)[NAMES].drop_encoding().sortby("latitude").load()


@pytest.fixture(scope="module")
def checkpoint(store: Path, quick_programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps."""
    run = tmp_path_factory.mktemp("run")
    programs.require_success("06_whats_next/train.py", *TRAIN, "--store", store, "--output-dir", run)
    return last_checkpoint(run)


@pytest.fixture(scope="module")
def flags(checkpoint: Path, store: Path) -> list[str]:
    """What fills the test period. Of two stores that are named, the last one counts."""
    return [str(checkpoint), "--store", str(store), "--overlap", "4", "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The maps, filled by a command that nobody stopped."""
    output = tmp_path_factory.mktemp("whole") / "filled.zarr"
    done = programs.require_success(SCRIPT, *flags, "--output", output)
    assert done.out.splitlines()[-1] == f"7 maps in {output}"
    return output


def same_files(one: Path, other: Path) -> bool:
    """Whether two stores have the same files, byte by byte."""
    found = [{path.relative_to(top): text for path, text in contents(top).items()} for top in (one, other)]
    return found[0] == found[1]


def refusal(argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line with which predict ends with exit code 2."""
    with pytest.raises(SystemExit) as error:
        predict.main([str(each) for each in argv])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- maps


def test_jumps_at_the_edges_vanish_with_overlap(checkpoint: Path, store: Path) -> None:
    """Without overlap they are larger than those inside; with it they are not."""
    flags = [str(checkpoint), "--store", str(store), "--times", "1991", "1991-06", "--draws", "1"]
    rows = seams.main(flags)  # 8 is half a patch
    assert [row["overlap"] for row in rows] == [0, 4, 8]
    ratios = [row["edges_typical"] / row["inside_typical"] for row in rows]
    assert ratios[0] > 1.3, ratios
    assert max(ratios[1:]) < 1.1, ratios


def test_a_map_holds_what_was_seen_and_the_networks_answer_elsewhere(
    whole: Path, winds: xr.Dataset, checkpoint: Path
) -> None:
    """One patch of the middle is compared with the network's answer to the same patch, where no other counts."""
    filled = xr.open_zarr(whole).load()
    truth = winds.sel(time=filled.time)
    observed = filled.filled == 0
    assert set(np.unique(filled.filled)) == {0, 1}
    assert 0.2 < float(observed.mean()) < 0.5
    for name in NAMES:
        values = filled[name].values
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values[observed], truth[name].values[observed])
        assert (values[~observed.values] != truth[name].values[~observed.values]).mean() > 0.99

    model, record = load_model(checkpoint)
    assert record["options"]["patch_size"] == 16
    month = filled.time.dt.month[0]
    trained_on = winds.sel(time=slice("1982", "1989"))
    means = trained_on.sel(time=trained_on.time.dt.month == month).mean("time")
    mean = np.stack([means[name].values for name in NAMES])
    known = np.stack([truth[name].values[0] for name in NAMES])
    seen = observed.values[0]
    std = model.std.numpy()
    inputs = np.concatenate([np.where(seen, (known - mean) / std, 0), seen[None]]).astype("float32")
    # Rows 0 to 16 and columns 0 to 16: the corner belongs to this patch alone, across the map's seam to one more.
    with torch.no_grad():
        answer = model.model(torch.from_numpy(inputs[None, :, :16, :16]))[0].numpy()
    expected = mean[:, :8, 6:8] + std * answer[:, :8, 6:8]
    got = np.stack([filled[name].values[0, :8, 6:8] for name in NAMES])
    hidden = ~seen[:8, 6:8]
    assert hidden.any()
    np.testing.assert_allclose(got[:, hidden], expected[:, hidden], atol=1e-4)


def test_cells_without_a_climatology_are_announced_and_have_no_value(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    load = maps.load_training_climatology
    lacking = (slice(0, 3), slice(0, 5))

    def load_some(*given) -> Climatology:
        climatology = load(*given)
        climatology.mean[5, :, *lacking] = np.nan
        return climatology

    monkeypatch.setattr(maps, "load_training_climatology", load_some)
    output = tmp_path / "filled.zarr"
    flags = [flag for flag in flags if flag not in ("--overlap", "4")]
    predict.main([*flags, "--times", "1991-01", "1991-08", "--output", str(output)])
    june = xr.open_zarr(output).filled.load()
    june = june.sel(time=june.time.dt.month == 6)
    assert june.time.size == 1
    assert (june == 2).sum() == (june[0, *lacking] == 2).sum() == 15
    printed = capsys.readouterr().out
    assert f"of {june[0].size:,}: June 15\n" in printed
    assert "note: --overlap 8: half a patch" in printed


def test_the_metadata_are_those_of_cf_and_netcdf_has_the_same_values(
    whole: Path, flags: list[str], tmp_path: Path, capsys
) -> None:
    output = tmp_path / "filled.nc"
    predict.main([*flags, "--output", str(output)])
    assert [path.name for path in tmp_path.iterdir()] == ["filled.nc"]
    zarr = xr.open_zarr(whole).load()
    with xr.open_dataset(output) as netcdf:
        xr.testing.assert_equal(netcdf.load(), zarr)
        assert netcdf.filled.attrs["flag_values"].dtype == netcdf.filled.dtype == np.int8
        for dataset in (netcdf, zarr):
            assert dataset.attrs["Conventions"].startswith("CF-1.")
            assert dataset.latitude.attrs["units"] == "degrees_north"
            assert dataset.longitude.attrs["standard_name"] == "longitude"
            assert dataset.filled.attrs["flag_meanings"].split() == ["observed", "filled", "no_value"]
            for name in NAMES:
                assert dataset[name].dtype == np.float32
                assert dataset[name].attrs["units"] == "m s**-1"
                assert dataset[name].attrs["ancillary_variables"] == "filled"
    before = output.read_bytes()
    predict.main([*flags, "--output", str(output)])  # finished: nothing to do
    assert "not written by this command" in refusal([*flags, "--seed", 1, "--output", output], capsys)
    assert contents(tmp_path) == {output: before}


def test_what_the_store_lacks_is_filled(
    winds: xr.Dataset, flags: list[str], store: Path, tmp_path: Path
) -> None:
    """The climatology comes from the training's store, for the one with gaps has only the test's times."""
    fields = winds.sel(time=TEST)
    gaps = np.random.default_rng(0).random(fields[NAMES[0]].shape) < 0.3
    fields[NAMES[0]] = fields[NAMES[0]].where(~gaps)
    gappy, output = write(tmp_path / "gappy.zarr", fields), tmp_path / "filled.zarr"
    stores = ["--store", str(gappy), "--training-store", str(store)]
    predict.main([*flags, *stores, "--gaps", "missing", "--output", str(output)])
    filled = xr.open_zarr(output).load()
    np.testing.assert_array_equal(filled.filled.values == 1, gaps)
    for name in NAMES:
        assert np.isfinite(filled[name]).all()
        np.testing.assert_array_equal(filled[name].values[~gaps], fields[name].values[~gaps])


# ------------------------------------------------------------------------------------- stopped, and several devices


TOLD = pytest.param("terminate", 2, signal.SIGTERM, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("how", "number", "code"), [("kill", 0, 9), ("kill", 3, 9), TOLD])
def test_killed_and_started_again_it_writes_the_same_bytes(
    how: str, number: int, code: int, whole: Path, flags: list[str], tmp_path: Path
) -> None:
    """Nor is a map filled again that was there."""
    output = tmp_path / "filled.zarr"
    (tmp_path / "filled.zarr.part").mkdir()  # of a run that was killed before it had a store
    stopped = programs.run(SCRIPT, *flags, "--output", output, **{f"{how}_between_map_and_flags": number})
    assert stopped.code == -code, stopped.err
    (output / NAMES[0] / "c/0.0123abc.partial").write_text("torn")
    written = {path: path.stat().st_mtime_ns for path in (output / "filled/c").rglob("*") if path.is_file()}
    assert len(written) == number
    programs.require_success(SCRIPT, *flags, "--output", output)
    assert same_files(output, whole)
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())


def test_where_all_maps_are_there_it_says_where_and_warns_of_nothing(whole: Path, flags: list[str]) -> None:
    done = programs.require_success(SCRIPT, *flags, "--output", whole)
    assert done.out.splitlines()[-1] == f"7 maps in {whole}"
    assert "warn" not in done.err.lower() and "site-packages" not in done.err


def test_two_devices_write_the_bytes_of_one(whole: Path, flags: list[str], tmp_path: Path) -> None:
    """Each fills its own maps: those of a rank that is killed are missing, and are all that is filled then."""
    output = tmp_path / "filled.zarr"
    planted = {1: {"kill_between_map_and_flags": 2}}
    done = programs.run_ranks(SCRIPT, 2, *flags, "--output", output, planted=planted)
    assert [one.code for one in done] == [2, -9], programs.printed(done)
    assert sorted(path.name for path in output.glob("filled/c/*")) == ["0", "1", "2", "3", "4", "6"]
    # One map is left for two ranks.
    done = programs.run_ranks(SCRIPT, 2, *flags, "--output", output)
    assert [one.code for one in done] == [0, 0], programs.printed(done)
    assert same_files(output, whole)


# ------------------------------------------------------------------------------------------------ what is refused


def with_value(winds: xr.Dataset, time: int, value: float) -> xr.Dataset:
    """Another value in one cell of one map."""
    changed = winds.copy(deep=True)
    changed[NAMES[0]][time, 5, 5] = value
    return changed


def in_knots(winds: xr.Dataset) -> xr.Dataset:
    return winds.assign({NAMES[0]: winds[NAMES[0]].assign_attrs(units="knots")})


THERE = "--store OTHER"
BESIDE = "--store WHOLE --training-store OTHER"
OTHERS = {  # what differs: how another store is made, where it is given, and what is said
    "variables": (lambda winds: winds.rename({NAMES[1]: "gust"}), THERE, f"--variables {NAMES[1]}.*gust"),
    "units": (in_knots, THERE, "knots.*m/s"),
    "grid": (lambda winds: winds.isel(latitude=slice(2, None)), BESIDE, "latitude differs"),
    "times": (lambda winds: winds.sel(time=TEST), THERE, "training, 1982 to 1989.*--training-store"),
    "values": (lambda winds: with_value(winds, 0, 99), THERE, "hold other data than"),
    "training": (lambda winds: with_value(winds, 0, 99), BESIDE, "--training-store .*/other.zarr: its"),
    "no value": (lambda winds: with_value(winds, -1, np.nan), THERE, "NaN on 1992-.*--gaps missing"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_store_other_than_the_trainings_is_refused(
    case: str, winds: xr.Dataset, flags: list[str], store: Path, tmp_path: Path, capsys
) -> None:
    make, stores, said = OTHERS[case]
    other, output = tmp_path / "other.zarr", tmp_path / "filled.zarr"
    write(other, make(winds))
    named = stores.replace("OTHER", str(other)).replace("WHOLE", str(store)).split()
    line = refusal([*flags, *named, "--output", output], capsys)
    assert re.search(said, line), line
    assert not output.exists() or case == "no value"  # which is found on the way


BAD_FLAGS = {
    "--seed 1": "not written by this command",
    "--overlap 2": "not written by this command",
    "--times 1991 1991": "not written by this command",
    "--overlap 9": "--overlap 9",
    "--overlap -1": "--overlap -1",
    "--times 2001 2002": "--times 2001 2002",
    "--output a.grib": "ends in .zarr or .nc",
}


def test_bad_flags_and_files_are_refused_and_nothing_is_overwritten(
    whole: Path, flags: list[str], tmp_path: Path, capsys
) -> None:
    output = ["--output", tmp_path / "filled.zarr"]
    shutil.copytree(whole, tmp_path / "filled.zarr")
    garbage, flipped = tmp_path / "garbage.ckpt", tmp_path / "flipped.ckpt"
    garbage.write_bytes(b"no zip")
    content = bytearray(Path(flags[0]).read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    before = contents(tmp_path)
    for bad, said in BAD_FLAGS.items():
        assert said in refusal([*flags, *output, *bad.split()], capsys)
    assert "has other bytes" in refusal([flipped, *flags[1:], *output], capsys)
    assert "garbage.ckpt: is no checkpoint" in refusal([garbage, *flags[1:], *output], capsys)
    assert "No such file" in refusal([tmp_path / "none.ckpt", *flags[1:], *output], capsys)
    assert contents(tmp_path) == before
