"""Chapter 6: whole maps filled by a checkpoint, stopped and gone on with, without seams."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
import xarray as xr
from alone import contents
from chapter_6 import rooms  # noqa: F401
from runs import last_checkpoint

SCRIPT = "06_whats_next/predict/__main__.py"
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
TRAIN = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 2 --shuffle-slots 8".split()
TRAIN += ["--full-validation-patches", "24"]


@pytest.fixture(scope="module")
def store(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the winds at 5 degrees."""
    return make_small_store(tmp_path_factory.mktemp("stores") / "winds.zarr")


@pytest.fixture(scope="module")
def checkpoint(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps."""
    run = tmp_path_factory.mktemp("run")
    programs.require_success("06_whats_next/train.py", *TRAIN, "--store", store, "--output-dir", run)
    return last_checkpoint(run)


@pytest.fixture
def flags(checkpoint: Path, store: Path) -> list[object]:
    """What fills the test period on one device."""
    return [checkpoint, "--store", store, "--overlap", 4, "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The maps of the test period, filled by a command that nobody stopped."""
    output = tmp_path_factory.mktemp("whole") / "filled.zarr"
    flags = [checkpoint, "--store", store, "--overlap", 4, "--accelerator", "cpu", "--output", output]
    done = programs.require_success(SCRIPT, *flags)
    assert done.out.splitlines()[-1] == f"7 maps in {output}"
    return output


def same_files(one: Path, other: Path) -> bool:
    """Whether two stores have the same files, byte by byte."""
    found = [{path.relative_to(top): text for path, text in contents(top).items()} for top in (one, other)]
    return found[0] == found[1]


# ------------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(("length", "size", "overlap"), [(72, 16, 4), (37, 16, 0), (16, 16, 8), (73, 64, 16)])
def test_patches_cover_each_cell_and_neighbours_share_the_overlap(
    length: int, size: int, overlap: int, wraps: bool
) -> None:
    from predict.tiles import patch_starts

    starts = patch_starts(length, size, overlap, wraps)
    covered = np.zeros(length, int)
    for start in starts:
        cells = np.arange(start, start + size)
        assert wraps or cells[-1] < length
        np.add.at(covered, cells % length, 1)
    assert covered.min() >= 1
    following = np.append(starts[1:], starts[0] + length) if wraps else starts[1:]
    assert (starts[: len(following)] + size - following >= overlap).all()
    # One patch fewer would not do.
    room = length if wraps else length - overlap
    assert (len(starts) - 1) * (size - overlap) < room


@pytest.mark.parametrize("wraps", [True, False])
def test_a_map_that_is_cut_and_joined_is_the_map(wraps: bool) -> None:
    from predict.tiles import Tiling

    field = np.random.default_rng(0).normal(size=(2, 37, 72)).astype("float32")
    tiling = Tiling((37, 72), 16, 5, wraps)
    np.testing.assert_allclose(tiling.join(tiling.cut(field)), field, atol=1e-6)
    corners = np.array(tiling.corners)
    assert (corners[:, 1].max() + 16 > 72) == wraps


def test_jumps_at_the_edges_vanish_with_overlap(checkpoint: Path, store: Path) -> None:
    """Without overlap they are larger than those inside; with it they are not."""
    from studies import seams

    flags = [str(checkpoint), "--store", str(store), "--times", "1991-01", "1991-06", "--draws", "1"]
    rows = seams.main(flags)
    assert [row["overlap"] for row in rows] == [0, 4, 8]
    ratios = [row["edges_typical"] / row["inside_typical"] for row in rows]
    assert ratios[0] > 1.3, ratios
    assert max(ratios[1:]) < 1.1, ratios


# ---------------------------------------------------------------------------------------------- maps


def test_a_map_holds_what_was_seen_and_the_networks_answer_elsewhere(
    whole: Path, store: Path, checkpoint: Path
) -> None:
    """One patch of the middle is compared with the network's answer to the same patch, where no other counts."""
    from predict.maps import load_model

    filled = xr.open_zarr(whole).load()
    truth = xr.open_zarr(store)[NAMES].sel(time=filled.time).sortby("latitude").load()
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
    group = "_".join([*sorted(NAMES), "1982", "1989"])
    statistics = xr.open_zarr(store, group=f"statistics/{group}").sortby("latitude").load()
    month = int(filled.time.dt.month[0])
    mean = np.stack([statistics[name].sel(month=month).values for name in NAMES])
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
    np.testing.assert_allclose(got[:, hidden], expected[:, hidden], atol=1e-4)


def test_the_metadata_are_those_of_cf_and_netcdf_has_the_same_values(
    whole: Path, flags: list, tmp_path: Path
) -> None:
    from predict import __main__ as predict

    output = tmp_path / "filled.nc"
    predict.main([*map(str, flags), "--output", str(output)])
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
    predict.main([*map(str, flags), "--output", str(output)])  # finished: nothing to do
    with pytest.raises(SystemExit) as error:
        predict.main([*map(str, flags), "--seed", "1", "--output", str(output)])
    assert error.value.code == 2
    assert contents(tmp_path) == {output: before}


def test_what_the_store_lacks_is_filled(
    store: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The climatology comes from the training's store, for the one with gaps has only the test's times."""
    from predict import __main__ as predict

    fields = xr.open_zarr(store)[NAMES].sel(time=slice("1991", "1992")).sortby("latitude").load()
    gaps = np.random.default_rng(0).random(fields[NAMES[0]].shape) < 0.3
    fields[NAMES[0]] = fields[NAMES[0]].where(~gaps)
    for name in fields.variables:
        fields[name].encoding.clear()
    gappy, output = tmp_path / "gappy.zarr", tmp_path / "filled.zarr"
    fields.to_zarr(gappy, encoding={name: {"chunks": (1, 37, 72)} for name in NAMES})
    flags = [str(checkpoint), "--store", str(gappy), "--gaps", "missing", "--overlap", "8"]
    line = refusal([*flags, "--output", output], capsys)
    assert "no times of the training, 1982 to 1989" in line and "--training-store" in line
    predict.main([*flags, "--training-store", str(store), "--output", str(output)])
    filled = xr.open_zarr(output).load()
    np.testing.assert_array_equal(filled.filled.values == 1, gaps)
    for name in NAMES:
        assert np.isfinite(filled[name]).all()
        np.testing.assert_array_equal(filled[name].values[~gaps], fields[name].values[~gaps])


# ------------------------------------------------------------------------------------- stopped, and several devices


@pytest.mark.parametrize("number", [0, 3])
def test_killed_and_started_again_it_writes_the_same_bytes(
    number: int, whole: Path, flags: list, tmp_path: Path
) -> None:
    """Nor is a map filled again that was there."""
    flags = [*flags, "--output", tmp_path / "filled.zarr"]
    (tmp_path / "filled.zarr.part").mkdir()  # of a run that was killed before it had a store
    killed = programs.run(SCRIPT, *flags, kill_between_map_and_flags=number)
    assert killed.code == -9, killed.err
    (tmp_path / "filled.zarr" / NAMES[0] / "c" / "0.0123abc.partial").write_text("torn")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "filled.zarr/filled/c").rglob("*")}
    assert len([path for path in written if path.is_file()]) == number
    programs.require_success(SCRIPT, *flags)
    assert same_files(tmp_path / "filled.zarr", whole)
    assert all(path.stat().st_mtime_ns == when for path, when in written.items() if path.is_file())


def test_two_devices_write_the_bytes_of_one(whole: Path, flags: list, tmp_path: Path) -> None:
    """Each fills its own maps: those of a rank that is killed are missing, and are all that is filled then."""
    output = tmp_path / "filled.zarr"
    flags = [*flags, "--output", output]
    planted = {1: {"kill_between_map_and_flags": 2}}
    done = programs.run_ranks(SCRIPT, 2, *flags, planted=planted)
    assert [one.code for one in done] == [2, -9], programs.printed(done)
    assert sorted(path.name for path in output.glob("filled/c/*")) == ["0", "1", "2", "3", "4", "6"]
    # One map is left for two ranks.
    done = programs.run_ranks(SCRIPT, 2, *flags)
    assert [one.code for one in done] == [0, 0], programs.printed(done)
    assert same_files(output, whole)


@pytest.mark.thorough
def test_told_to_stop_it_ends_and_goes_on(whole: Path, flags: list, tmp_path: Path) -> None:
    flags = [*flags, "--output", tmp_path / "filled.zarr"]
    done = programs.run(SCRIPT, *flags, terminate_between_map_and_flags=2)
    assert done.code == -signal.SIGTERM, done.err
    programs.require_success(SCRIPT, *flags)
    assert same_files(tmp_path / "filled.zarr", whole)


# ------------------------------------------------------------------------------------------------ what is refused


def refusal(argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line with which predict ends with exit code 2."""
    from predict import __main__ as predict

    with pytest.raises(SystemExit) as error:
        predict.main([str(each) for each in argv])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_store_without_the_checkpoints_variables_is_refused(
    store: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.zarr"
    xr.open_zarr(store)[NAMES].rename({NAMES[1]: "gust"}).drop_encoding().to_zarr(other)
    output = ["--output", tmp_path / "filled.zarr"]
    line = refusal([checkpoint, "--store", other, *output], capsys)
    assert f"--variables {NAMES[1]}" in line and "gust" in line
    assert not (tmp_path / "filled.zarr").exists()


def test_other_units_and_another_grid_are_refused(
    store: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = xr.open_zarr(store)[NAMES].drop_encoding()
    output = ["--overlap", 4, "--output", tmp_path / "filled.zarr"]
    knots = fields.copy()
    knots[NAMES[0]] = fields[NAMES[0]].assign_attrs(units="knots")
    knots.to_zarr(tmp_path / "knots.zarr")
    line = refusal([checkpoint, "--store", tmp_path / "knots.zarr", *output], capsys)
    assert "knots" in line and "m/s" in line
    fields.isel(latitude=slice(2, None)).to_zarr(tmp_path / "cut.zarr")
    flags = [checkpoint, "--store", tmp_path / "cut.zarr", "--training-store", store, *output]
    assert "latitude differs" in refusal(flags, capsys)


def test_the_climatology_of_other_data_and_values_that_are_missing_are_refused(
    store: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = tmp_path / "other.zarr", ["--overlap", 4, "--output", tmp_path / "filled.zarr"]
    shutil.copytree(store, other)
    change_value(other, time=0, value=99.0)
    assert "hold other data than" in refusal([checkpoint, "--store", other, *output], capsys)
    flags = [checkpoint, "--store", store, "--training-store", other, *output]
    assert f"--training-store {other}: " in refusal(flags, capsys)

    gappy = tmp_path / "gappy.zarr"
    shutil.copytree(store, gappy)
    change_value(gappy, time=-1, value=np.nan)
    line = refusal([checkpoint, "--store", gappy, *output], capsys)
    assert "NaN on 1992-" in line and "--gaps missing" in line


def change_value(store: Path, time: int, value: float) -> None:
    """Write another value into one cell of one map."""
    fields = xr.open_zarr(store)[NAMES].isel(time=[time]).load()
    fields[NAMES[0]][0, 5, 5] = value
    fields.drop_vars(["latitude", "longitude"]).drop_attrs().to_zarr(store, region="auto")


def test_bad_flags_and_files_are_refused_and_nothing_is_overwritten(
    whole: Path, flags: list, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", tmp_path / "filled.zarr"]
    shutil.copytree(whole, tmp_path / "filled.zarr")
    before = contents(tmp_path)
    assert "not written by this command" in refusal([*flags, "--seed", 1, *output], capsys)
    assert "--overlap 9" in refusal([*flags, "--overlap", 9, *output], capsys)
    assert "--overlap -1" in refusal([*flags, "--overlap", -1, *output], capsys)
    assert "ends in .zarr or .nc" in refusal([*flags, "--output", tmp_path / "a.grib"], capsys)
    assert "--times 2001 2002" in refusal([*flags, "--times", 2001, 2002, *output], capsys)
    garbage = tmp_path / "garbage.ckpt"
    garbage.write_bytes(b"no zip")
    before |= {garbage: b"no zip"}
    flipped = tmp_path / "flipped.ckpt"
    content = bytearray(flags[0].read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    before |= {flipped: bytes(content)}
    assert "has other bytes" in refusal([flipped, "--store", store, *output], capsys)
    assert "garbage.ckpt: is no checkpoint" in refusal([garbage, "--store", store, *output], capsys)
    assert "No such file" in refusal([tmp_path / "none.ckpt", "--store", store, *output], capsys)
    assert contents(tmp_path) == before
    settings = json.loads(xr.open_zarr(whole).attrs["settings"])
    assert {"checkpoint", "values", "times", "gaps", "seed", "overlap"} == settings.keys()
