"""Chapter 1: both scripts, from what a sample is to a run that is killed and resumed, on any data."""

import csv
import pickle
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import torch
import xarray as xr
from lightning.pytorch import LightningModule, Trainer
from runs import assert_resumed, assert_same_bits, check_summary, load, losses, rmse, state, summary, weights
from torch.utils.data import DataLoader

CHAPTER = book.ROOT / "01_setup"
README = CHAPTER / "README.md"
STORE = CHAPTER / "data/navy_winds.nc"
SCRIPTS = ["01_setup/train.py", "01_setup/train_by_hand.py"]
PROGRAMS = [*SCRIPTS, "01_setup/benchmark.py", "01_setup/baselines.py"]
SMALL = "--patch-size 16 --batch-size 2 --max-steps 7 --checkpoint-every 3 --validate-every 4 --log-every 1"
SMALL = SMALL.split()
GAP = (slice(20, 44), slice(30, 60))  # rows and columns of the map that some tests mask

pytestmark = pytest.mark.usefixtures("quick_programs")
thorough = pytest.mark.thorough
MODULES = {script: load(script, f"chapter_01_{Path(script).stem}") for script in SCRIPTS}
chapter = MODULES["01_setup/train.py"]


ONE_OF_BOTH = [SCRIPTS[0], pytest.param(SCRIPTS[1], marks=thorough)]  # the other is like it


@pytest.fixture(scope="module")
def winds() -> xr.DataArray:
    return chapter.open_fields(STORE, ["eastward_wind", "northward_wind"])


def load_winds() -> xr.Dataset:
    """Without the compression of their file, which takes 2 s for each copy."""
    return xr.load_dataset(STORE).drop_encoding()


def arguments(*flags: object) -> Namespace:
    return chapter.parse_arguments([str(flag) for flag in flags])


def patches(*flags: object):
    """The training, the validation and the test patches under these flags."""
    return chapter.make_patches(arguments(*flags))


def years(part) -> set[int]:
    return set(part.times.astype("datetime64[Y]").astype(int) + 1970)


# ------------------------------------------------------------------------------------------- the data


def test_the_winds_are_whole_and_small(winds: xr.DataArray) -> None:
    assert STORE.stat().st_size < 10e6
    assert winds.shape == (132, 2, 73, 144)
    assert winds.dtype == "float32"
    assert winds.notnull().all()
    assert winds.units.values.tolist() == ["m/s", "m/s"]
    assert [str(time)[:7] for time in winds.time.values[[0, -1]]] == ["1982-01", "1992-12"]


def test_make_data_rewrites_the_winds_without_loss(tmp_path: Path, winds: xr.DataArray) -> None:
    make_data = load("01_setup/data/make_data.py", "make_data")
    names = {"time": "TIME", "latitude": "FNOCY", "longitude": "FNOCX"}
    ferret = winds.drop_vars("units").to_dataset("variable")
    ferret = ferret.rename(eastward_wind="UWND", northward_wind="VWND", **names)
    ferret.to_netcdf(tmp_path / "ferret.cdf", engine="scipy")
    make_data.make_winds(tmp_path / "ferret.cdf", tmp_path / "winds.nc")
    again = chapter.open_fields(tmp_path / "winds.nc", ["eastward_wind", "northward_wind"])
    xr.testing.assert_identical(again.drop_attrs(), winds.drop_attrs())


@pytest.mark.parametrize("known_by", ["its name", "its standard_name", "its axis", "its units"])
def test_fields_are_read_whatever_their_dimensions_are_called_and_their_order(
    known_by: str, tmp_path: Path, winds: xr.DataArray
) -> None:
    names = {"time": "t", "latitude": "south_north", "longitude": "west_east"}
    signs = {
        "its name": {},
        "its standard_name": {name: {"standard_name": name} for name in names},
        "its axis": {"time": {"axis": "T"}, "latitude": {"axis": "Y"}, "longitude": {"axis": "X"}},
        "its units": {"latitude": {"units": "degrees_north"}, "longitude": {"units": "degrees_east"}},
    }[known_by]
    if known_by == "its name":
        names = {"time": "valid_time", "latitude": "Lat", "longitude": "LON"}
    if known_by == "its axis":  # X and Y may be those of a projection: only T says what it is
        names = {"time": "t", "latitude": "lat", "longitude": "lon"}
    if known_by == "its units":  # a time is decoded, and has none
        names |= {"time": "time"}
    dataset = load_winds().drop_attrs()
    for name in names:
        dataset[name].attrs = signs.get(name, {})
    for name in dataset.data_vars:
        dataset[name].attrs["units"] = "m s-1"
    dataset = dataset.isel(latitude=slice(None, None, -1)).transpose("longitude", "time", "latitude")
    others = {"time": 0} if "time" not in names.values() else {}  # as forecasts have: that of their start
    dataset.rename(names).expand_dims("height").assign_coords(others).to_netcdf(tmp_path / "other.nc")
    other = chapter.open_fields(tmp_path / "other.nc", ["eastward_wind", "northward_wind"])
    xr.testing.assert_identical(other.drop_attrs(), winds.drop_attrs())


# ---------------------------------------------------------------------------- order is a function


def test_a_sample_depends_on_nothing_but_seed_step_and_k() -> None:
    one, *_ = patches("--seed", 5)
    other, *_ = patches("--seed", 5)
    addresses = [(step, k) for step in (0, 7, 1000) for k in range(8)]
    forward = [one[address] for address in addresses]
    backward = [other[address] for address in reversed(addresses)][::-1]
    for first, second in zip(forward, backward, strict=True):
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    another, *_ = patches("--seed", 6)
    for part in (1, 2, 3):  # the corner's row and column, the swaths: not only the time
        drawn = [[patch.sample(*address)[part] for address in addresses] for patch in (one, another)]
        assert not np.array_equal(*drawn)
    assert len({one[address]["input"].tobytes() for address in addresses}) == len(addresses)


@pytest.mark.parametrize("batch_size", [8, 7])
def test_an_epoch_visits_each_month_once_and_the_next_in_another_order(batch_size: int) -> None:
    training, *_ = patches("--batch-size", batch_size)
    drawn = [training.sample(*divmod(i, batch_size))[0] for i in range(3 * 96)]
    epochs = [drawn[start : start + 96] for start in (0, 96, 192)]
    assert all(sorted(epoch) == list(range(96)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_patches_cover_the_map_and_cross_its_seam(winds: xr.DataArray) -> None:
    training, *_ = patches()
    corners = np.array([training.sample(step, 0)[1:3] for step in range(2000)])
    assert set(corners[:, 0]) == set(range(73 - 64 + 1))
    assert set(corners[:, 1]) == set(range(144))
    rolled = np.roll(winds.values[0], -130, axis=-1)[:, 3:67, :64]
    np.testing.assert_array_equal(training.cut(winds.values[0], 3, 130), rolled)


def test_a_map_of_an_area_has_no_seam_to_cross(winds: xr.DataArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapter, "open_fields", lambda *_: winds.isel(longitude=slice(0, 100)))
    cut, *_ = patches()
    columns = {int(cut.sample(step, 0)[2]) for step in range(1000)}
    assert columns == set(range(100 - 64 + 1))


def test_an_area_across_a_meridian_where_the_longitudes_jump_is_whole(tmp_path: Path) -> None:
    dataset = load_winds().isel(longitude=slice(120, 144))  # 320 to 377.5 degrees
    dataset.to_netcdf(tmp_path / "even.nc")
    dataset.assign_coords(longitude=dataset.longitude % 360).to_netcdf(tmp_path / "jump.nc")
    even, jump = (
        chapter.open_fields(tmp_path / f"{name}.nc", chapter.VARIABLES) for name in ("even", "jump")
    )
    np.testing.assert_array_equal(jump.values, even.values)
    assert set(np.diff(jump.longitude)) == {2.5}


@pytest.mark.parametrize(
    "columns", ["in no order", "from east to west, as integers", "the first again, 360 degrees on"]
)
def test_other_orders_of_longitude_are_the_same_map(
    columns: str, tmp_path: Path, winds: xr.DataArray
) -> None:
    """np.unwrap would take each jump of over 180 degrees for a step across the seam."""
    dataset = load_winds()
    if columns == "in no order":
        dataset = dataset.isel(longitude=np.random.default_rng(0).permutation(144))
    elif columns == "from east to west, as integers":
        dataset, winds = (one.isel(longitude=slice(0, None, 2)) for one in (dataset, winds))
        dataset = dataset.isel(longitude=slice(None, None, -1))
        dataset["longitude"] = dataset.longitude.astype("uint16")
    else:
        first = dataset.isel(longitude=[0])
        dataset = xr.concat([dataset, first.assign_coords(longitude=first.longitude + 360)], "longitude")
    dataset.to_netcdf(tmp_path / "other.nc")
    xr.testing.assert_equal(chapter.open_fields(tmp_path / "other.nc", chapter.VARIABLES), winds)


def test_units_may_be_a_number(tmp_path: Path) -> None:
    dataset = load_winds()
    dataset.eastward_wind.attrs["units"] = 1
    dataset.to_netcdf(tmp_path / "numbers.nc")
    training, *_ = patches("--store", tmp_path / "numbers.nc")
    assert training.pools == {"1": [0], "m/s": [1]}


def test_swaths_are_slanted_stripes_over_about_a_third_of_the_patch() -> None:
    masks = np.stack([chapter.swath_mask(np.random.default_rng(seed), 64) for seed in range(300)])
    assert 0.33 < masks.mean() < 0.37  # 4 cells of every 10, of which one pass in 8 is lost
    assert masks.any(axis=(1, 2)).all()
    widths = [np.diff(np.flatnonzero(np.diff(np.r_[0, row, 0]))).tolist()[::2] for row in masks[0]]
    assert max(width for row in widths for width in row) <= chapter.SWATH_WIDTH + 1
    assert not np.array_equal(masks[0][0], masks[0][-1])


def test_a_sample_hides_what_was_not_seen_and_judges_only_that() -> None:
    training, *_ = patches()
    sample = training[3, 2]
    seen = sample["input"][2].astype(bool)
    np.testing.assert_array_equal(sample["input"][:2, seen], sample["target"][:, seen])
    assert not sample["input"][:2, ~seen].any()
    np.testing.assert_array_equal(sample["unseen"][0], ~seen)
    assert not sample["weight"][0, seen].any()
    row = training.sample(3, 2)[1]
    cosine = np.cos(np.deg2rad(training.latitude[row : row + 64]))
    expected = np.broadcast_to(cosine[:, None], (64, 64))[~seen]
    np.testing.assert_allclose(sample["weight"][0, ~seen], expected.clip(0), atol=1e-6)


def test_climatology_std_and_masked_cells_come_from_the_training_times_only(tmp_path: Path) -> None:
    dataset = load_winds()
    in_training = dataset.time.dt.year < 1990
    dataset = dataset.where(~in_training | ~dataset.latitude.isin(dataset.latitude[GAP[0]]))
    dataset.to_netcdf(tmp_path / "gap.nc")
    dataset.where(in_training, 100 * dataset).to_netcdf(tmp_path / "scaled.nc")
    one, other = (patches("--store", tmp_path / f"{name}.nc") for name in ("gap", "scaled"))
    for part, same in zip(one, other, strict=True):
        for name in ("climatology", "std", "valid"):
            np.testing.assert_array_equal(getattr(part, name), getattr(same, name))
        np.testing.assert_array_equal(part.valid.all(axis=1), ~np.isin(np.arange(73), np.r_[GAP[0]]))
    assert [np.array_equal(one[i].anomalies, other[i].anomalies) for i in range(3)] == [True, False, False]
    training, validation, test = patches()
    assert [years(part) for part in (training, validation, test)] == [
        {*range(1982, 1990)},
        {1990},
        {1991, 1992},
    ]


def test_every_run_is_judged_on_the_same_patches() -> None:
    one, other = patches("--seed", 1, "--batch-size", 8), patches("--seed", 2, "--batch-size", 32)
    for first, second in zip(one[1:], other[1:]):  # validation and test
        for k in range(chapter.JUDGED_SAMPLES):
            np.testing.assert_array_equal(first[0, k]["input"], second[0, k]["input"])


# ----------------------------------------------------------------------------- loss, metric, schedule


def batch_of(unseen_shares: tuple[float, ...], errors: tuple[float, ...]) -> tuple[torch.Tensor, dict]:
    """A prediction of zeros and a batch whose samples have these shares of unseen rows and these errors.

    All of them lie at 60 degrees of latitude, where the weight is a half.
    """
    seen = torch.stack([(torch.arange(10) >= 10 * share).float() for share in unseen_shares])
    seen = seen[:, None, :, None].expand(-1, 1, -1, 4)
    target = torch.tensor(errors)[:, None, None, None].expand(-1, 2, 10, 4)
    return torch.zeros_like(target), {
        "input": torch.cat([target * seen, seen], dim=1),
        "target": target,
        "unseen": 1 - seen,
        "weight": (1 - seen) / 2,
    }


def test_the_loss_is_one_mean_over_all_unseen_cells_not_a_mean_of_means() -> None:
    prediction, batch = batch_of((0.9, 0.1), (1.0, 3.0))
    assert chapter.masked_loss(prediction, batch).item() == pytest.approx((0.9 * 1 + 0.1 * 9) / 2)
    alone = [
        chapter.masked_loss(prediction[k : k + 1], {name: part[k : k + 1] for name, part in batch.items()})
        for k in range(2)
    ]
    assert torch.stack(alone).mean().item() == pytest.approx((1 + 9) / 2 / 2)  # what it must not be


def test_the_loss_ignores_what_was_seen() -> None:
    prediction, batch = batch_of((0.5,), (2.0,))
    prediction.requires_grad_()
    chapter.masked_loss(prediction, batch).backward()
    assert prediction.grad[:, :, :5].all()
    assert not prediction.grad[:, :, 5:].any()


def test_baselines_are_exact_where_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four has fields that it fills without error, and others do not."""
    frame = np.pad(np.zeros((14, 14), bool), 1, constant_values=True)  # inside its hull lies every hole
    monkeypatch.setattr(chapter, "swath_mask", lambda rng, size: frame)
    _, _, test = patches("--patch-size", 16)
    shape, rng = test.anomalies.shape, np.random.default_rng(0)
    rough, slope = rng.normal(size=test.climatology.shape), np.linspace(0, 10, 73)[:, None]
    each_time = rng.normal(size=(len(test.times), 1, 1, 1))

    def exact(climatology: np.ndarray, anomalies: np.ndarray) -> set[str]:
        test.climatology = np.broadcast_to(climatology, rough.shape)
        test.anomalies = np.broadcast_to(anomalies, shape)
        return {name for name, row in chapter.baselines(test).items() if row["m/s"] < 1e-9}

    linear, of_anomalies = "linear interpolation", "interpolated anomalies"
    assert exact(rough, np.zeros(1)) == {"climatology", of_anomalies}
    assert exact(rough, each_time) == {of_anomalies}
    assert exact(rough, each_time * slope) == {of_anomalies}
    assert exact(slope, each_time * slope) == {linear, of_anomalies}
    assert exact(np.zeros(1), each_time) == {"nearest neighbour", linear, of_anomalies}
    assert exact(each_time[:12] - slope, rough[:1] + 0 * each_time) == set()


def plain_rmse(args: Namespace, times: list[str], predict: Callable) -> dict[str, float]:
    """The RMSE, for each unit, of a network's predictions over these times: a plain sum in numpy.

    Of the script it uses the fields of the file, and which patch and swaths each sample has. `predict` takes
    a network's input (variables + 1, H, W) and returns its normalised anomalies.
    """
    fields = chapter.open_fields(args.store, args.variables).astype("float64")
    judging = chapter.make_patches(args)[2]
    training, judged = (fields.sel(time=slice(*part)) for part in (args.train_times, times))
    month, judged_month = (part.time.dt.month.values for part in (training, judged))
    masked = np.isnan(training.values).all(axis=0).any(axis=0)
    mean = np.stack([training.values[month == number].mean(axis=0) for number in range(1, 13)])
    std = (training.values - mean[month - 1])[..., ~masked].std(axis=(0, 2))[:, None, None]
    judging.times = judged.time.values  # of which sample k takes one
    squares, total = np.zeros(len(std)), 0.0
    for k in range(chapter.JUDGED_SAMPLES):
        time, row, column, swath = judging.sample(0, k)
        rows = np.arange(row, row + args.patch_size)
        cells = np.ix_(rows, np.arange(column, column + args.patch_size) % fields.sizes["longitude"])
        anomaly = (judged.values[time] - mean[judged_month[time] - 1])[:, *cells]
        seen, unseen = (part & ~masked[cells] for part in (swath, ~swath))
        x = np.concatenate([np.where(seen, anomaly / std, 0), seen[None]]).astype("float32")
        weight = np.where(unseen, np.cos(np.deg2rad(fields.latitude.values[rows, None])).clip(0), 0)
        error = np.where(unseen, std * predict(x) - anomaly, 0)
        squares += (weight * error**2).sum(axis=(1, 2))
        total += weight.sum()
    units = fields.units.values
    return {unit: np.sqrt(squares[units == unit].mean() / total) for unit in units.tolist()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_rmse_and_the_climatologys_are_those_of_a_plain_sum(script: str) -> None:
    """Unseen cells only, weighted by cos(latitude), for a network that predicts a third of the std."""
    module, args = MODULES[script], arguments("--patch-size", 16)
    training, _, test = module.make_patches(args)

    class Constant(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x[:, :-1], 1 / 3)

    if script == SCRIPTS[0]:
        model = module.FillGaps(vars(args), training.std.flatten().tolist(), training.pools)
        model.model = Constant()
        samples = [(0, k) for k in range(module.JUDGED_SAMPLES)]
        for batch in DataLoader(test, sampler=samples, batch_size=32):
            model.validation_step(batch, 0)
        found = {"m/s": model.mean_squares[0].compute().sqrt().item()}
    else:
        found = module.validate(Constant(), test, torch.device("cpu"))
    expected = plain_rmse(args, args.test_times, lambda x: np.full_like(x[:-1], 1 / 3))
    assert found == pytest.approx(expected, rel=1e-5)
    climatology = plain_rmse(args, args.test_times, lambda x: np.zeros_like(x[:-1]))
    assert module.baselines(test)["climatology"] == pytest.approx(climatology, rel=1e-5)


@pytest.mark.parametrize(
    "size", [64, *(pytest.param(n, marks=thorough) for n in range(16, 73, 4) if n != 64)]
)
def test_every_patch_size_that_is_allowed_has_something_seen_and_baselines(size: int) -> None:
    masks = [chapter.swath_mask(np.random.default_rng((size, seed)), size) for seed in range(2000)]
    assert min(mask.sum() for mask in masks) >= size
    figures = chapter.baselines(patches("--patch-size", size)[2])
    assert min(figures, key=lambda name: figures[name]["m/s"]) == chapter.RIVAL
    assert all(1.2 < figure["m/s"] < 2.5 for figure in figures.values())


def test_the_learning_rate_warms_up_each_step_then_falls_to_zero() -> None:
    factors = [chapter.learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1
    assert all(before > after for before, after in pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.01
    assert [chapter.learning_rate_factor(step, 1) for step in (0, 1)] == [1, 1]  # PyTorch asks once more


# --------------------------------------------------------------------------------- as a reader runs it


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.10, marks=thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_most: float, tmp_path: Path) -> None:
    """In full, its network is far better than the simple baselines; 200 steps are the default.

    The smoke test is judged by 8 patches, because optimal interpolation of 96 takes half a minute.
    """
    assert "uv run python train.py" in book.commands(README)
    folder, flags = CHAPTER, []
    if steps != 200:
        folder, flags = book.clone(tmp_path / "book") / "01_setup", ["--max-steps", str(steps)]
        book.judge_by_few(folder / "train.py", number=8)
    command = [sys.executable, "train.py", "--output-dir", tmp_path / "run", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_summary(done.stdout) <= at_most
    assert "warning" not in done.stderr.lower()
    picture = Path(folder, re.search(r"picture: (.+)", done.stdout)[1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert state(tmp_path / "run")["step"] == steps
    assert_optimal_interpolation_is_ahead(done.stdout)


def assert_optimal_interpolation_is_ahead(printed: str) -> None:
    """Of the network and of linear interpolation, and the summary says so."""
    names = ("optimal interpolation", "U-Net", chapter.RIVAL)
    optimal, network, rival = (float(re.search(rf"{name} +([\d.]+)\n", printed)[1]) for name in names)
    assert optimal < min(network, rival)
    gain = float(re.search(r"against optimal interpolation +([+-][\d.]+)%", printed)[1])
    assert gain == pytest.approx(100 * (network / optimal - 1), abs=0.2)


def test_the_walkthrough_shows_every_line_of_the_summary() -> None:
    shown = [block for block in README.read_text().split("```") if "RMSE over the unseen cells" in block]
    assert check_summary(shown[0]) < 0
    assert_optimal_interpolation_is_ahead(shown[0])


def test_the_committed_results_keep_their_promises() -> None:
    """10% below linear interpolation with each seed, and further after a longer run; not below optimal
    interpolation, and both together beat each."""
    rows = {name: book.results(f"01_setup/results/{name}.json")["rows"] for name in ("scripts", "longer")}
    assert [row["runs"] for row in rows["scripts"]] == [3, 3]
    for row in rows["scripts"]:
        assert row["rmse"]["max"] < 0.9 * row[chapter.RIVAL]
    (longer,) = rows["longer"]
    assert longer["rmse"]["U-Net"]["m/s"] < 0.9 * rows["scripts"][1]["rmse"]["min"]
    fills = {row["fill"]: row for row in book.results("01_setup/results/fills.json")["rows"]}
    for years in ("rmse", "validation_rmse"):
        rmse = {name: row[years] for name, row in fills.items() if years in row}
        optimal, both = rmse["optimal interpolation"], rmse["both"]
        networks = [value for name, value in rmse.items() if "U-Net" in name]
        assert both < optimal < min(networks) < max(networks) < rmse[chapter.RIVAL]
    choices = book.results("01_setup/results/oi_choices.json")["rows"]
    chosen = [row for row in choices if "noise" in row]
    assert chosen[0]["validation_rmse"] < 1.01 * min(row["validation_rmse"] for row in chosen)


def commands_with(script: str) -> list[list[str]]:
    """The flags of each command of the walkthrough that runs a script; [] for the script alone."""
    pattern = rf"uv run python {script.rpartition('/')[2]}(.*)"
    return [match[1].split() for line in book.commands(README) if (match := re.fullmatch(pattern, line))]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_has_every_flag_of_the_walkthroughs_commands(script: str) -> None:
    commands = commands_with(script)
    assert commands
    for flags in commands:
        assert vars(MODULES[script].parse_arguments(flags))


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_of_the_walkthrough_runs(script: str, tmp_path: Path) -> None:
    few = ["--max-steps", 4, "--output-dir", tmp_path]
    for flags in commands_with(script):
        if "--resume" in flags:  # as in the text, after a run
            programs.require_success(script, *few)
        done = programs.require_success(script, *flags, *few)
        assert "\n4 steps in " in done.out


@pytest.mark.parametrize("script", PROGRAMS)
def test_help_says_what_the_program_is_for(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with book.rooms("01_setup"), pytest.raises(SystemExit, match="0"):
        load(script, "program").main(["--help"])
    printed = capsys.readouterr().out
    assert "Chapter 1" in printed
    if script in SCRIPTS:
        flags = {f"--{name.replace('_', '-')}" for name in vars(arguments())}
        assert flags <= set(re.findall(r"--[a-z-]+", printed))


def test_the_two_scripts_share_their_definitions_word_for_word() -> None:
    lightning, by_hand = (book.definitions(script) for script in SCRIPTS)
    shared = lightning.keys() & by_hand.keys()
    assert {name for name in shared if lightning[name] != by_hand[name]} == {"main"}
    assert lightning.keys() - shared == {"FillGaps", "check_resumable"}
    assert by_hand.keys() - shared == {"validate", "train_step", "load_checkpoint"}


# --------------------------------------------------------------------------------- the same to the bit


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small run of each script that nobody interrupted."""
    folders = {script: tmp_path_factory.mktemp("whole") for script in SCRIPTS}
    for script, folder in folders.items():
        programs.require_success(script, *SMALL, "--output-dir", folder)
    return folders


def logged(folder: Path, name: str) -> list[float]:
    """The numbers of one column of a run's log."""
    with open(folder / "metrics.csv", newline="") as log:
        return [float(row[name]) for row in csv.DictReader(log) if row[name]]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_seed_gives_the_same_weights(script: str, tmp_path: Path, whole: dict) -> None:
    """With 2 workers or none."""
    programs.require_success(script, *SMALL, "--num-workers", 2, "--output-dir", tmp_path)
    assert_same_bits(tmp_path, whole[script])
    assert losses(tmp_path) == losses(whole[script])


@pytest.mark.parametrize("script", ONE_OF_BOTH)
def test_another_seed_gives_other_weights(script: str, tmp_path: Path, whole: dict) -> None:
    programs.require_success(script, *SMALL, "--seed", 1, "--output-dir", tmp_path)
    assert not set(losses(tmp_path)) & set(losses(whole[script]))


def test_the_two_scripts_agree_step_by_step(whole: dict[str, Path]) -> None:
    lightning, by_hand = (whole[script] for script in SCRIPTS)
    assert len(losses(lightning)) == 7
    np.testing.assert_allclose(losses(lightning), losses(by_hand), rtol=1e-5)
    rates = [6e-3 * chapter.learning_rate_factor(step, 7) for step in range(7)]
    assert logged(lightning, "lr-AdamW") == logged(by_hand, "learning_rate") == rates
    torch.testing.assert_close(weights(lightning), weights(by_hand), rtol=1e-4, atol=1e-6)
    assert rmse(lightning) == pytest.approx(rmse(by_hand), rel=1e-4)
    figures = [{**summary(folder)["rmse"], "U-Net": None} for folder in (lightning, by_hand)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=thorough) for step in (3, 5, 6))])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_killed_at_any_step_resumes_to_the_bit(
    script: str, step: int, tmp_path: Path, whole: dict
) -> None:
    """It may go on elsewhere: with other workers, and where the data lies under another name."""
    flags = [*SMALL, "--output-dir", tmp_path]
    assert programs.run(script, *flags, "--num-workers", 2 if step == 4 else 0, kill_at_step=step).code == -9
    assert not (tmp_path / "summary.json").exists()
    shutil.copy(STORE, tmp_path / "moved.nc")
    programs.require_success(script, *flags, "--resume", "--store", tmp_path / "moved.nc")
    assert_same_bits(tmp_path, whole[script])
    assert_resumed(tmp_path, step // 3 * 3, whole[script])


@thorough
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_killed_before_its_first_checkpoint_has_none_to_resume(
    script: str, step: int, tmp_path: Path
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    assert programs.run(script, *flags, kill_at_step=step).code == -9
    done = programs.run(script, *flags, "--resume")
    assert done.code == 2
    assert "error: --resume " in done.err.splitlines()[-1]


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_resumes_with_no_step_left(script: str, tmp_path: Path, whole: dict) -> None:
    ckpt = whole[script] / "last.ckpt"
    done = programs.require_success(script, *SMALL, "--resume", ckpt, "--output-dir", tmp_path)
    assert "samples/s" not in done.out
    assert_same_bits(tmp_path, whole[script])


def test_a_sampler_that_begins_at_another_step_than_training_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed at step 3 would train the samples of steps 0 to 2 again, and nobody would see it."""
    flags = [*SMALL, "--output-dir", str(tmp_path)]
    assert programs.run(SCRIPTS[0], *flags, kill_at_step=4).code == -9
    monkeypatch.setattr(chapter, "check_resumable", lambda checkpoint, args: 0)
    with pytest.raises(RuntimeError, match="the sampler begins at step 0, and training at step 3"):
        chapter.main([*flags, "--resume"])


# ------------------------------------------------------------------------------------------ any data


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Stores as a reader may have them, and the flags that say what is in each."""
    folder = tmp_path_factory.mktemp("own")
    dataset = load_winds()
    wind = dataset.eastward_wind.drop_attrs().copy()
    wind[:, *GAP] = np.nan
    wind = wind.assign_coords(time=wind.indexes["time"] + np.timedelta64(7305, "D"))  # 20 years on
    wind = wind.assign_coords(longitude=(wind.longitude + 180) % 360 - 180)
    wind = wind.sortby(["latitude", "longitude"], ascending=False).transpose("longitude", "time", "latitude")
    names = {"time": "valid_time", "latitude": "lat", "longitude": "lon"}
    wind.rename("wind").rename(names).to_netcdf(folder / "one.nc")
    dataset["temperature"] = 280 + 5 * (dataset.eastward_wind - dataset.northward_wind)
    dataset.temperature.attrs["units"] = "K"
    dataset.to_netcdf(folder / "three.nc")
    times = "--train-times 2002 2008 --validation-times 2009 2009 --test-times 2010 2011".split()
    return {
        "one": ["--store", folder / "one.nc", "--variables", "wind", *times],
        "three": [
            "--store",
            folder / "three.nc",
            "--variables",
            *"eastward_wind temperature northward_wind".split(),
        ],
    }


def test_other_names_order_and_longitudes_are_the_same_fields(own_data: dict, winds: xr.DataArray) -> None:
    args = arguments(*own_data["one"], "--patch-size", 16)
    own, whole = chapter.open_fields(args.store, args.variables), winds.sel(variable=["eastward_wind"])
    gap = np.zeros((73, 144), bool)
    gap[GAP] = True
    gap = np.roll(gap, -64, axis=1)  # the map begins at 180°W now, and not at 20°E
    np.testing.assert_array_equal(own.longitude.values, np.arange(-180, 180, 2.5))
    np.testing.assert_array_equal(own.values, np.where(gap, np.nan, np.roll(whole.values, -64, axis=-1)))

    own, *_ = patches(*own_data["one"], "--patch-size", 16)
    plain, *_ = patches("--variables", "eastward_wind", "--train-times", 1982, 1988)
    np.testing.assert_array_equal(own.valid, ~gap)
    expected = np.where(gap, 0, np.roll(plain.std * plain.anomalies, -64, axis=-1))
    np.testing.assert_allclose(own.std * own.anomalies, expected, atol=1e-5)


def test_masked_cells_are_never_seen_and_in_no_count(own_data: dict) -> None:
    training, *_ = patches(*own_data["one"], "--patch-size", 32)
    masked_cells = 0
    for k in range(50):
        sample, (_, row, column, swath) = training[0, k], training.sample(0, k)
        masked = ~training.cut(training.valid, row, column)
        for name in ("input", "target", "unseen", "weight"):
            assert not sample[name][:, masked].any()
        np.testing.assert_array_equal(sample["input"][-1] + sample["unseen"][0], ~masked)
        np.testing.assert_array_equal(sample["input"][-1], swath & ~masked)
        masked_cells += masked.sum()
    assert masked_cells


def test_a_batch_of_masked_cells_only_teaches_nothing() -> None:
    prediction, batch = batch_of((0.0,), (1.0,))
    prediction.requires_grad_()
    chapter.masked_loss(prediction, batch).backward()
    assert not prediction.grad.any()  # a NaN is true


@pytest.mark.parametrize("data", ["one", "three"])
@pytest.mark.parametrize("script", ONE_OF_BOTH)
def test_any_data_trains_by_flags_alone(
    script: str, data: str, own_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its RMSE, apart for each unit and pooled within it, is that of a plain sum."""
    monkeypatch.setattr(chapter, "JUDGED_SAMPLES", programs.QUICK["judge_by"])
    flags = [*own_data[data], *"--patch-size 16 --batch-size 2 --max-steps 2 --validate-every 2".split()]
    done = programs.require_success(script, *flags, "--output-dir", tmp_path, draw_nothing=False)
    args = arguments(*flags)
    network = chapter.UNet(len(args.variables))
    network.load_state_dict(weights(tmp_path))

    def predict(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(x)[None])[0].numpy()

    units = {"one": ["wind"], "three": ["m/s", "K"]}[data]
    assert f", {', '.join(units)}\n" in done.out
    expected = plain_rmse(args, args.test_times, predict)
    assert list(expected) == list(rmse(tmp_path)) == units
    assert rmse(tmp_path) == pytest.approx(expected, rel=1e-5)
    climatology = plain_rmse(args, args.test_times, lambda x: np.zeros_like(x[:-1]))
    assert summary(tmp_path)["rmse"]["climatology"] == pytest.approx(climatology, rel=1e-5)
    name = f"rmse ({units[0]})" if script == SCRIPTS[0] else "rmse"
    validation = plain_rmse(args, args.validation_times, predict)[units[0]]
    assert logged(tmp_path, name) == [pytest.approx(validation, rel=1e-5)]
    assert (tmp_path / "fill.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------ what goes wrong without it (failure modes 12, 15)


class Recorder(LightningModule):
    """One weight, and a note of which samples it was given; its schedule steps once an epoch or a step."""

    def __init__(self, interval: str = "step", stop_after: int | None = None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.interval, self.stop_after, self.given, self.rates = interval, stop_after, [], []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.stop_after:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "last.ckpt"))
            raise RuntimeError("killed")
        self.given += batch.flatten().int().tolist()
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": self.interval}}


def fit(module: Recorder, loader, folder: Path, **options) -> Recorder:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder, **quiet, enable_checkpointing=False
    )
    try:
        trainer.fit(module, loader, **options)
    except RuntimeError as error:
        assert str(error) == "killed"
    return module


@pytest.mark.filterwarnings("ignore")
def test_a_shuffling_loader_resumes_to_other_samples_and_a_step_sampler_to_the_same(tmp_path: Path) -> None:
    class Numbers(torch.utils.data.Dataset):
        def __getitem__(self, address: tuple[int, int]) -> torch.Tensor:
            step, k = address
            return torch.tensor(float(chapter.epoch_order(0, 0, 32)[4 * step + k]))

    def loader(start: int, plain: bool):
        if plain:
            return DataLoader(torch.arange(32.0), batch_size=4, shuffle=True)
        sampler = chapter.StepSampler(Namespace(batch_size=4, max_steps=8), start)
        return DataLoader(Numbers(), batch_sampler=sampler)

    for plain in (True, False):
        torch.manual_seed(0)
        before = fit(Recorder(stop_after=3), loader(0, plain), tmp_path).given
        torch.manual_seed(0)  # it does not help: the order was drawn from the state before the kill
        resumed = Recorder()
        after = fit(resumed, loader(3, plain), tmp_path, ckpt_path=tmp_path / "last.ckpt").given
        trained_once = sorted(before + after) == list(range(32))
        assert trained_once is not plain


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_that_steps_per_epoch_never_ends_its_warm_up(tmp_path: Path) -> None:
    dataset = DataLoader(torch.ones(12, 1))
    assert fit(Recorder("epoch"), dataset, tmp_path).rates[10] == 0.1
    assert fit(Recorder("step"), dataset, tmp_path).rates[10] == 1.0
    model = chapter.FillGaps(vars(arguments()), [1.0], {"1": [0]})
    assert model.configure_optimizers()["lr_scheduler"]["interval"] == "step"


# ----------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores and checkpoints with which something is wrong, by name."""
    folder = tmp_path_factory.mktemp("bad")
    whole_file = STORE.read_bytes()
    (folder / "truncated.nc").write_bytes(whole_file[: len(whole_file) // 2])
    (folder / "empty.nc").write_bytes(b"")
    dataset = load_winds()
    dataset.isel(time=0, drop=True).to_netcdf(folder / "timeless.nc")
    dataset.drop_vars("latitude").to_netcdf(folder / "unplaced.nc")
    dataset.where(dataset.time.dt.year > 1989).to_netcdf(folder / "untrained.nc")
    dataset.expand_dims(hour=[0, 12]).to_netcdf(folder / "hourly.nc")
    small = dataset[["eastward_wind", "northward_wind"]].isel(latitude=slice(20))
    small.isel(time=slice(0)).to_netcdf(folder / "timeless_file.nc")
    small.eastward_wind.astype(str).to_dataset().to_netcdf(folder / "strings.nc")
    rows = small.northward_wind.rename(latitude="lat").assign_coords(lat=small.latitude.values + 1)
    small.drop_vars("northward_wind").assign(northward_wind=rows).to_netcdf(folder / "staggered.nc")
    xr.concat([dataset, dataset.isel(time=[3])], "time").to_netcdf(folder / "repeated.nc")
    twice = ("time", "time", "latitude", "longitude"), np.zeros((16, 16, 16, 16), "float32")
    few = {name: small[name].values[:16] for name in ("time", "latitude", "longitude")}
    xr.Dataset({"eastward_wind": twice}, few).to_netcdf(folder / "twice.nc")
    dataset.eastward_wind[50, 10, 10] = np.nan
    dataset.to_netcdf(folder / "hole.nc")
    dataset.eastward_wind[50, 10, 10] = np.inf
    dataset.to_netcdf(folder / "infinite.nc")
    torch.save({"global_step": 3, "hyper_parameters": {}, "state_dict": {}}, folder / "weights_only.ckpt")
    torch.save([1, 2, 3], folder / "list.ckpt")
    whole_checkpoint = (folder / "weights_only.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(whole_checkpoint[: len(whole_checkpoint) // 2])
    (folder / "nothing.ckpt").write_bytes(b"")
    (folder / "text.ckpt").write_text("step 3\n")
    (folder / "foreign.ckpt").write_bytes(pickle.dumps(Path))
    nameless = dict.fromkeys(("global_step", "optimizer_states", "step", "model", "optimizer", "schedule"), 3)
    torch.save(nameless | {"hyper_parameters": None, "options": None}, folder / "nameless.ckpt")
    (folder / "dangling").symlink_to(folder / "nowhere/run")
    return {path.stem: path for path in folder.iterdir()}


BAD_INPUT = {  # flags, and what is said of them
    "--store nowhere.nc": r"--store nowhere.nc: cannot be read \(FileNotFoundError\); give a whole",
    "--store .": r"--store \.: cannot be read \(\w+\); give a whole NetCDF file",
    "--store {truncated}": r"--store \S+truncated.nc: cannot be read \(\w+\); give a whole",
    "--store {empty}": r"--store \S+empty.nc: cannot be read \(\w+\); give a whole NetCDF file",
    "--store {hole}": r"--store \S+: NaN or infinity at 1986-03-18; fill it",
    "--store {untrained}": r"--train-times 1982 1989: a variable has no value",
    "--store {hourly}": r"--variables eastward_wind: not in .*; it has eastward_wind \(hour, time",
    "--variables u v": r"--variables u: not in .*; it has eastward_wind \(time, latitude, longitude\); ",
    "--store {timeless}": r"--variables eastward_wind: not in .*; it has eastward_wind \(",
    "--train-times 2001 2002": r"--train-times 2001 2002: give dates of 1982-01-16 to 1992-12-",
    "--test-times 1989 1991": r"--test-times 1989 1991: give dates of .* that no other set has",
    "--test-times 1990 1992": r"--test-times 1990 1992: give dates of .* that no other set has",
    "--store {unplaced}": r"--variables eastward_wind: not in .* on time, latitude, longitude",
    "--test-times 1993 1993": r"--test-times 1993 1993: give dates of 1982-01-16 to 1992-12-",
    "--validation-times then now": r"--validation-times then now: give dates of 1982-01-16 to ",
    "--train-times 1982-01 1982-11": r"--store \S+: NaN or infinity at 1982-01-16.*--train-times",
    "--patch-size 80": r"--patch-size 80: .*\(73, 144\); give a multiple of 4 up to 72",
    "--patch-size 8": r"--patch-size 8: too small; give at least 16",
    "--patch-size 30": r"--patch-size 30: .* multiple of 4",
    "--batch-size 0": r"--batch-size 0: too small; give at least 1",
    "--max-steps 0": r"--max-steps 0: too small",
    "--max-steps many": r"argument --max-steps: invalid int value: 'many'",
    "--learning-rate nan": r"--learning-rate nan: too small",
    "--learning-rat3 1": r"unrecognized arguments: --learning-rat3 1",
    "--resume": r"--resume \S+last.ckpt: no such file",
    "--resume {cut}": r"--resume \S+cut.ckpt: cannot be read \(\w+\); give a whole",
    "--resume {nothing}": r"--resume \S+nothing.ckpt: cannot be read",
    "--resume {text}": r"--resume \S+text.ckpt: cannot be read",
    "--resume {foreign}": r"--resume \S+foreign.ckpt: cannot be read",
    "--resume {list}": r"--resume \S+list.ckpt: cannot be read",
    "--resume {nameless}": r"--resume \S+nameless.ckpt: cannot be read",
    "--resume {weights_only}": r"--resume \S+weights_only.ckpt: has no .*optimizer",
    "--output-dir {empty}": r"--output-dir \S+empty.nc: Not a directory; give a folder",
    "--output-dir {empty}/run": r"--output-dir \S+: Not a directory; give a folder",
    "--output-dir {dangling}": r"--output-dir \S+: No such file or directory; give",
    "--store {repeated}": r"--store \S+: a coordinate has the same value twice",
    "--output-dir /proc/run": r"--output-dir /proc/run: .*; give a folder",
    f"--seed {2**64}": rf"--seed {2**64}: too large; give less than 2\*\*64",
    "--store {infinite}": r"--store \S+: NaN or infinity at 1986-03-18; fill it",
    "--store {timeless_file}": r"--variables eastward_wind: a dimension has length 0",
    "--store {strings} --variables eastward_wind": r"--variables eastward_wind: its type is \S+; give variables of numbers",
    "--store {staggered}": r"--variables \S+ \S+: lat\S* and lat\S* both look like latitude; give",
    "--store {twice} --variables eastward_wind": r"--variables eastward_wind: not in .*; it has eastward_wind \(time, time, ",
}
if not torch.accelerator.is_available():
    BAD_INPUT["--accelerator gpu"] = "--accelerator gpu: this machine has none"


@pytest.mark.filterwarnings("ignore:Duplicate dimension names", "ignore:Detected pickle protocol")
@pytest.mark.parametrize("flags", BAD_INPUT)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(
    script: str,
    flags: str,
    bad_files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(CHAPTER)
    with pytest.raises(SystemExit) as ended:
        MODULES[script].main(["--output-dir", str(tmp_path / "run"), *flags.format(**bad_files).split()])
    assert ended.value.code == 2
    assert re.match(rf"\S+: error: {BAD_INPUT[flags]}", capsys.readouterr().err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_ends_the_program_with_one_line_and_code_2(script: str, tmp_path: Path) -> None:
    done = programs.run(script, "--output-dir", tmp_path / "run", "--patch-size", 80)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"{Path(script).name}: error: --patch-size 80: .*\n", done.err), done.err


OTHER_OPTIONS = ["--batch-size 4", "--max-steps 9", "--seed 3", "--patch-size 24", "--learning-rate 0.001"]
OTHER_OPTIONS += ["--variables eastward_wind", "--train-times 1982 1988", "--validation-times 1989 1990"]
OTHER_OPTIONS += ["--test-times 1992 1992"]


@pytest.mark.parametrize("option", OTHER_OPTIONS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_of_other_options_is_refused(
    script: str, option: str, whole: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another store and other devices are not: see test_a_run_killed_at_any_step_resumes_to_the_bit."""
    ckpt = str(whole[script] / "last.ckpt")
    flags = [*SMALL, "--resume", ckpt, "--output-dir", str(tmp_path / "run"), *option.split()]
    with pytest.raises(SystemExit, match="2"):
        MODULES[script].main(flags)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"\S+: error: {option.split()[0]} .*: {re.escape(ckpt)} has ", last)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- benchmark


def test_benchmark_refuses_an_unknown_study() -> None:
    done = programs.run("01_setup/benchmark.py", "speed")
    assert done.code == 2
    assert "speed: no such study; choose from scripts, " in done.err
