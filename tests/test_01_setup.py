"""Chapter 1: its data, both scripts, and a run that is killed and resumed, on any file."""

import csv
import pickle
import re
import shutil
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
from made_up_winds import SPANS, make_winds, with_moving_gaps
from runs import (
    assert_resumed,
    assert_same_bits,
    check_summary,
    load,
    losses,
    rmse,
    run_readers_command,
    summary,
    weights,
)
from torch.utils.data import DataLoader

with book.rooms("01_setup"):
    import checkpoints
    import train
    import train_by_hand
    from local_file import FileReader
    from model import FillGaps, UNet, learning_rate_factor, masked_loss
    from options import RESUME_KEYS, VARIABLES, Options, parse_options
    from sampling import epoch_order
    from steps import StepSampler
    from task import make_data

CHAPTER = book.ROOT / "01_setup"
README = CHAPTER / "README.md"
STORE = CHAPTER / "data/navy_winds.nc"
MAINS = {"01_setup/train.py": train.main, "01_setup/train_by_hand.py": train_by_hand.main}
SCRIPTS = list(MAINS)
PROGRAMS = [*SCRIPTS, "01_setup/benchmark.py", "01_setup/baselines.py"]
SMALL = "--patch-size 16 --batch-size 2 --max-steps 7 --checkpoint-every 3 --validate-every 4 --log-every 1"
SMALL = SMALL.split()
LINEAR, OPTIMAL = "interpolated anomalies", "optimal interpolation"
GAP = (slice(20, 44), slice(30, 60))  # rows and columns of the map that some tests mask

pytestmark = pytest.mark.usefixtures("quick_programs")
thorough = pytest.mark.thorough
ONE_OF_BOTH = [SCRIPTS[0], pytest.param(SCRIPTS[1], marks=thorough)]  # the other is like it


def read(path: Path, *names: str) -> FileReader:
    return FileReader(str(path), list(names or VARIABLES))


def load_winds() -> xr.Dataset:
    """Without the compression of their file, which takes 2 s for each copy."""
    return xr.load_dataset(STORE).drop_encoding()


def options_of(*flags: object) -> Options:
    return parse_options("a test", [str(flag) for flag in flags])


# ------------------------------------------------------------------------------------------- the data


def test_the_winds_are_whole_and_small() -> None:
    winds = read(STORE)
    assert STORE.stat().st_size < 10e6
    assert winds.values.shape == (132, 2, 73, 144)
    assert winds.values.dtype == "float32"
    assert np.isfinite(winds.values).all()
    assert winds.notes == []
    assert [str(time)[:7] for time in winds.fields.time.values[[0, -1]]] == ["1982-01", "1992-12"]


def test_make_data_rewrites_the_winds_without_loss(tmp_path: Path) -> None:
    make_data = load("01_setup/data/make_data.py", "make_data")
    names = {"time": "TIME", "latitude": "FNOCY", "longitude": "FNOCX"}
    ferret = load_winds().rename(eastward_wind="UWND", northward_wind="VWND", **names)
    ferret.to_netcdf(tmp_path / "ferret.cdf", engine="scipy")
    make_data.make_winds(tmp_path / "ferret.cdf", tmp_path / "winds.nc")
    np.testing.assert_array_equal(read(tmp_path / "winds.nc").values, read(STORE).values)


def test_a_file_of_another_layout_is_the_same_map(tmp_path: Path) -> None:
    """Packed, from north to south, with other names, and a range beyond which values do not count."""
    dataset = load_winds().isel(latitude=slice(None, None, -1)).transpose("longitude", "time", "latitude")
    dataset = dataset.rename(time="valid_time", latitude="lat", longitude="lon")
    dataset.eastward_wind.values[0, 0, 0] = 31.0  # the row furthest north
    packing = {"dtype": "int16", "scale_factor": 1e-3, "_FillValue": -32768}
    dataset.eastward_wind.attrs["valid_max"] = np.int16(30_000)  # in packed units
    dataset.to_netcdf(tmp_path / "other.nc", encoding={"eastward_wind": packing})
    other, winds = read(tmp_path / "other.nc").values, read(STORE).values
    assert np.argwhere(np.isnan(other)).tolist() == [[0, 0, 72, 0]]
    other[0, 0, 72, 0] = winds[0, 0, 72, 0]
    np.testing.assert_allclose(other[:, 0], winds[:, 0], atol=6e-4)
    np.testing.assert_array_equal(other[:, 1], winds[:, 1])


def test_a_level_is_chosen_by_its_value(tmp_path: Path) -> None:
    dataset = load_winds().isel(time=slice(24))
    levels = xr.concat([dataset, dataset + 1], "level").assign_coords(level=[850, 500])
    levels.to_netcdf(tmp_path / "levels.nc")
    found = FileReader(str(tmp_path / "levels.nc"), VARIABLES, "500")
    np.testing.assert_array_equal(found.values, read(STORE).values[:24] + 1)


def test_boxes_are_cut_from_the_values() -> None:
    winds = read(STORE)
    columns = np.arange(140, 148) % 144
    box = {"time": 5, "latitude": slice(3, 11), "longitude": columns}
    (patch,) = winds.read_at_once([box])
    np.testing.assert_array_equal(patch, winds.values[5, :, 3:11][..., columns])
    np.testing.assert_array_equal(winds.read("northward_wind", box), patch[1])


def test_climatology_and_masked_cells_come_from_the_training_times_only(tmp_path: Path) -> None:
    dataset = load_winds()
    in_training = dataset.time.dt.year < 1990
    dataset = dataset.where(~in_training | ~dataset.latitude.isin(dataset.latitude[GAP[0]]))
    dataset.to_netcdf(tmp_path / "gap.nc")
    dataset.where(in_training, 100 * dataset).to_netcdf(tmp_path / "scaled.nc")
    one, other = (make_data(options_of("--store", tmp_path / f"{name}.nc"))[1] for name in ("gap", "scaled"))
    np.testing.assert_array_equal(one.climatology.mean, other.climatology.mean)
    np.testing.assert_array_equal(one.climatology.std, other.climatology.std)
    np.testing.assert_array_equal(one.climatology.valid.all(axis=1), ~np.isin(np.arange(73), np.r_[GAP[0]]))
    in_training = one.reader.values[one.training.positions]
    mean = in_training.reshape(8, 12, *in_training.shape[1:]).mean(axis=0, dtype="float64")
    np.testing.assert_allclose(one.climatology.mean, mean, rtol=1e-6)


# ------------------------------------------------------------------------------------------- the loss


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
    assert masked_loss(prediction, batch).item() == pytest.approx((0.9 * 1 + 0.1 * 9) / 2)
    alone = [
        masked_loss(prediction[k : k + 1], {name: part[k : k + 1] for name, part in batch.items()})
        for k in range(2)
    ]
    assert torch.stack(alone).mean().item() == pytest.approx((1 + 9) / 2 / 2)  # what it must not be


def test_the_loss_ignores_what_was_seen() -> None:
    prediction, batch = batch_of((0.5,), (2.0,))
    prediction.requires_grad_()
    masked_loss(prediction, batch).backward()
    assert prediction.grad[:, :, :5].all()
    assert not prediction.grad[:, :, 5:].any()


def test_a_batch_of_masked_cells_only_teaches_nothing() -> None:
    prediction, batch = batch_of((0.0,), (1.0,))
    prediction.requires_grad_()
    masked_loss(prediction, batch).backward()
    assert not prediction.grad.any()  # a NaN is true


def test_the_learning_rate_warms_up_each_step_then_falls_to_zero() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1
    assert all(before > after for before, after in pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.01


def test_the_network_is_that_of_chapter_2() -> None:
    """Whose copies are tested in chapter 6."""
    one, two = (book.definitions(f"{name}/model.py") for name in ("01_setup", "02_multi_gpu"))
    for name in ("UNet", "learning_rate_factor"):
        assert one[name] == two[name]
    assert one["conv_block"].partition('"""')[2].partition('"""')[2] == two["conv_block"].split('"""')[2]


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
    few = ["--eval-samples", 8] if steps == 4 else []
    printed = run_readers_command(CHAPTER, steps, tmp_path, *few)
    assert check_summary(printed) <= at_most
    assert_optimal_interpolation_is_ahead(printed)


def assert_optimal_interpolation_is_ahead(printed: str) -> None:
    """Of the network and of linear interpolation, and the summary says so."""
    names = (OPTIMAL, "U-Net", LINEAR)
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
        assert row["rmse"]["max"] < 0.9 * row[LINEAR]
    (longer,) = rows["longer"]
    assert longer["rmse"]["U-Net"]["m/s"] < 0.9 * rows["scripts"][1]["rmse"]["min"]
    fills = {row["fill"]: row for row in book.results("01_setup/results/fills.json")["rows"]}
    for years in ("rmse", "validation_rmse"):
        rmse = {name: row[years] for name, row in fills.items() if years in row}
        optimal, both = rmse["optimal interpolation"], rmse["both"]
        networks = [value for name, value in rmse.items() if "U-Net" in name]
        assert both < optimal < min(networks) < max(networks) < rmse[LINEAR]
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
        assert options_of(*flags)


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
        flags = {f"--{name.replace('_', '-')}" for name in vars(options_of())}
        assert flags - {"--eval-samples"} <= set(re.findall(r"--[a-z-]+", printed))  # which is hidden


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
    assert logged(lightning, "rmse (m/s)") == pytest.approx(logged(by_hand, "rmse (m/s)"), rel=1e-4)
    rates = [6e-3 * learning_rate_factor(step, 7) for step in range(7)]
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
    flags = [*SMALL, "--resume", "auto", "--output-dir", tmp_path]
    assert programs.run(script, *flags, "--num-workers", 2 if step == 4 else 0, kill_at_step=step).code == -9
    assert not (tmp_path / "summary.json").exists()
    shutil.copy(STORE, tmp_path / "moved.nc")
    programs.require_success(script, *flags, "--store", tmp_path / "moved.nc")
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_leaves_the_checkpoint_before(script: str, whole: dict, tmp_path: Path) -> None:
    before = Path(shutil.copy(whole[script] / "last.ckpt", tmp_path)).read_bytes()
    flags = [*SMALL, "--output-dir", tmp_path]
    assert programs.run(script, *flags, limit_files=len(before) // 2).code != 0
    assert (tmp_path / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_says_so(script: str, tmp_path: Path) -> None:
    done = programs.run(script, *SMALL, "--output-dir", tmp_path, interrupt_at_step=4)
    assert done.code != 0
    assert "Traceback" not in done.err


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_resumes_with_no_step_left(script: str, tmp_path: Path, whole: dict) -> None:
    ckpt = whole[script] / "last.ckpt"
    done = programs.require_success(script, *SMALL, "--resume", ckpt, "--output-dir", tmp_path)
    assert "samples/s" not in done.out
    assert_same_bits(tmp_path, whole[script])


def test_data_that_begin_at_another_step_than_training_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed at step 3 would train the samples of steps 0 to 2 again, and nobody would see it."""
    flags = [*SMALL, "--output-dir", str(tmp_path)]
    assert programs.run(SCRIPTS[0], *flags, kill_at_step=4).code == -9
    monkeypatch.setattr(train, "read_start", lambda options: (0, checkpoints.read_start(options)[1]))
    with pytest.raises(SystemExit, match="2"):
        train.main([*flags, "--resume"])
    assert "data begin at step 0, and training at step 3" in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------------------ any data


def plain_rmse(options: Options, times: list[str], predict: Callable) -> dict[str, float]:
    """The RMSE, in each unit, of a network's predictions over these times: a plain sum in numpy.

    Of the chapter it uses the values of the file, and which patch and swaths each sample has. `predict` takes
    a network's input (variables + 1, H, W) and returns its anomalies over their spread.
    """
    options, data = make_data(options)
    period = {tuple(options.validation_times): data.validation, tuple(options.test_times): data.test}[*times,]
    patches = data.eval_patches(period, options.patch_size, options.eval_samples)
    latitude = data.grid.latitude
    values = data.reader.values.astype("float64")
    training, judged = values[data.training.positions], values[period.positions]
    masked = np.isnan(training).all(axis=0).any(axis=0)
    months = data.training.months
    mean = np.stack([training[months == month].mean(axis=0) for month in range(12)])
    std = (training - mean[months])[..., ~masked].std(axis=(0, 2))[:, None, None]
    squares, total = np.zeros(len(std)), 0.0
    for k in range(options.eval_samples):
        time, row, column, swath = patches.patch(0, k)
        rows = np.arange(row, row + options.patch_size)
        cells = np.ix_(rows, np.arange(column, column + options.patch_size) % values.shape[-1])
        anomaly = (judged[time] - mean[period.months[time]])[:, *cells]
        seen, unseen = (part & ~masked[cells] for part in (swath, ~swath))
        x = np.concatenate([np.where(seen, anomaly / std, 0), seen[None]]).astype("float32")
        weight = np.where(unseen, np.cos(np.deg2rad(latitude[rows, None])).clip(0), 0)
        error = np.where(unseen, std * predict(x) - anomaly, 0)
        squares += (weight * error**2).sum(axis=(1, 2))
        total += weight.sum()
    return {unit: np.sqrt(squares[numbers].mean() / total) for unit, numbers in data.units.items()}


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Files as a reader may have them, and the flags that say what is in each."""
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
    three = "eastward_wind temperature northward_wind".split()
    return {
        "one": ["--store", folder / "one.nc", "--variables", "wind"],
        "three": ["--store", folder / "three.nc", "--variables", *three],
    }


@pytest.mark.parametrize("data", ["one", "three"])
@pytest.mark.parametrize("script", ONE_OF_BOTH)
def test_any_data_trains_by_flags_alone(script: str, data: str, own_data: dict, tmp_path: Path) -> None:
    """And its RMSE, apart for each unit and pooled within it, is that of a plain sum."""
    flags = [*own_data[data], *"--patch-size 16 --batch-size 2 --max-steps 2 --validate-every 2".split()]
    done = programs.require_success(script, *flags, "--output-dir", tmp_path, draw_nothing=False)
    options = options_of(*flags, "--eval-samples", programs.QUICK["judge_by"])
    options, _ = make_data(options)
    network = UNet(len(options.variables))
    network.load_state_dict(weights(tmp_path))

    def predict(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(x)[None])[0].numpy()

    units = {"one": ["wind"], "three": ["m/s", "K"]}[data]
    assert f", {', '.join(units)}\n" in done.out
    expected = plain_rmse(options, options.test_times, predict)
    assert list(expected) == list(rmse(tmp_path)) == units
    assert rmse(tmp_path) == pytest.approx(expected, rel=1e-5)
    climatology = plain_rmse(options, options.test_times, lambda x: np.zeros_like(x[:-1]))
    assert summary(tmp_path)["rmse"]["climatology"] == pytest.approx(climatology, rel=1e-5)
    validation = plain_rmse(options, options.validation_times, predict)
    for unit in units:
        assert logged(tmp_path, f"rmse ({unit})") == [pytest.approx(validation[unit], rel=1e-5)]
    assert (tmp_path / "fill.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_with_gaps_that_move_trains_if_it_is_asked_to(script: str, tmp_path: Path) -> None:
    """Without --missing mask, the first value that is missing is named, before anything is written."""
    with_moving_gaps(make_winds()).to_netcdf(tmp_path / "gaps.nc")
    flags = ["--store", tmp_path / "gaps.nc", "--variables", "u", "v", *SPANS, *SMALL]
    refused = programs.run(script, *flags, "--output-dir", tmp_path / "refused")
    assert refused.code == 2
    pattern = r"--store \S+: [uv] on 1982-01-01: NaN; if the data have gaps, give --missing mask; else"
    assert re.search(pattern, refused.err.splitlines()[-1]), refused.err
    assert not (tmp_path / "refused").exists()
    programs.require_success(script, *flags, "--missing", "mask", "--output-dir", tmp_path / "masked")
    for row in summary(tmp_path / "masked")["rmse"].values():
        assert 0 < row["m/s"] < 10


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
            return torch.tensor(float(epoch_order(0, 0, 32)[4 * step + k]))

    def loader(start: int, plain: bool):
        if plain:
            return DataLoader(torch.arange(32.0), batch_size=4, shuffle=True)
        sampler = StepSampler(batch_size=4, max_steps=8, first_step=start)
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
    model = FillGaps([1.0], {"1": [0]}, learning_rate=1e-3, max_steps=10, seed=0)
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
    for name, value in {"hole": np.nan, "infinite": np.inf, "unfilled": 9.97e36}.items():
        dataset.eastward_wind[50, 10, 10] = value
        dataset.to_netcdf(folder / f"{name}.nc")
    late = load_winds()
    late.eastward_wind[105, 10, 10] = np.nan  # in the validation year
    late.to_netcdf(folder / "late.nc")
    unnamed = load_winds().rename(latitude="y", longitude="x")
    for name in ("x", "y"):
        unnamed[name].attrs = {}
    unnamed.to_netcdf(folder / "unnamed.nc")
    sentinel = load_winds()
    sentinel.eastward_wind[:, 10:20, 10:30] = -9999
    sentinel.to_netcdf(folder / "sentinel.nc")
    torch.save({"global_step": 3, "hyper_parameters": {}, "state_dict": {}}, folder / "weights_only.ckpt")
    torch.save([1, 2, 3], folder / "list.ckpt")
    whole_checkpoint = (folder / "weights_only.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(whole_checkpoint[: len(whole_checkpoint) // 2])
    (folder / "foreign.ckpt").write_bytes(pickle.dumps(Path))
    (folder / "dangling").symlink_to(folder / "nowhere/run")
    return {path.stem: path for path in folder.iterdir()}


BAD_INPUT = {  # flags, and what is said of them
    "--store nowhere.nc": r"--store nowhere.nc: cannot be read \(FileNotFoundError: .*\); give a whole",
    "--store .": r"--store \.: cannot be read \(\w+: .*\); give a whole NetCDF file",
    "--store {truncated}": r"--store \S+truncated.nc: cannot be read \(\w+: .*\); give a whole",
    "--store {empty}": r"--store \S+empty.nc: cannot be read \(\w+: .*\); give a whole NetCDF file",
    "--store {hole}": r"--store \S+: eastward_wind on 1986-03-18: NaN; if the data have gaps, give --missing",
    "--store {late}": r"--store \S+: eastward_wind on 1990-10-\d+: NaN",
    "--store s3://bucket/winds.nc": r"--store s3://bucket/winds.nc: a URL; give a path",
    "--store {infinite}": r"--store \S+: eastward_wind on 1986-03-18.*: infinity, or netCDF's mark of no value",
    "--store {unfilled}": r"--store \S+: eastward_wind on 1986-03-18.*: infinity, or netCDF's mark of no value",
    "--store {untrained}": r"--variables, --train-times: no cell has values of all variables",
    "--store {sentinel}": r"--variables eastward_wind: 1.9% of its cells do not change .* such as -9999",
    "--store {repeated}": r"--store \S+: time has a value twice",
    "--store {hourly}": r"--variables eastward_wind: .*eastward_wind \(hour, time.*; choose a value of hour by --level",
    "--variables u v": r"--variables u: .* there are eastward_wind \(time, latitude, longitude\); ",
    "--store {unnamed}": r"--variables eastward_wind: .*; no coordinate is known as latitude or longitude; rename x, y to that",
    "--store {timeless}": r"--variables eastward_wind: .* there are eastward_wind \(",
    "--train-times 2001 2002": r"--train-times 2001 2002: no times; give dates of 1982-01-16 to 1992-12-",
    "--test-times 1990 1992 --validation-times 1990 1990": r"--test-times 1990 1992: shares times with --validation",
    "--validation-times then now": r"--validation-times then now: not dates",
    "--train-times 1982-01 1982-11": r"--train-times 1982-01 1982-11: no month has 2 times there",
    "--train-times 1982-01 1983-01": r"--train-times: they have no February, .*, December, but another",
    "--patch-size 80": r"--patch-size 80: .*73 x 144; give a multiple of 4 from 16 to 72",
    "--patch-size 8": r"argument --patch-size: 8: too small; give at least 16",
    "--max-steps many": r"argument --max-steps: 'many': give a whole number",
    "--learning-rate nan": r"argument --learning-rate: nan: not finite",
    "--max-step 1": r"unrecognized arguments: --max-step 1",
    "--resume": r"--resume \S+last.ckpt: no such file",
    "--resume {cut}": r"--resume \S+cut.ckpt: cannot be read \(\w+\); give a whole",
    "--resume {foreign}": r"--resume \S+foreign.ckpt: cannot be read",
    "--resume {list}": r"--resume \S+list.ckpt: cannot be read",
    "--resume {weights_only}": r"--resume \S+weights_only.ckpt: has no .*optimizer",
    "--output-dir {empty}/run": r"--output-dir \S+: Not a directory; give a folder",
    "--output-dir {dangling}": r"--output-dir \S+: No such file or directory; give",
    f"--seed {2**64}": rf"argument --seed: {2**64}: too large; give less than",
    "--store {timeless_file}": r"--variables eastward_wind: a dimension has length 0",
    "--store {strings} --variables eastward_wind": r"--variables eastward_wind: its type is \S+; give variables of numbers",
    "--store {staggered}": r"--store \S+: lat\S* and lat\S* both look like latitude; give",
    "--store {twice} --variables eastward_wind": r"--variables eastward_wind: .* there are eastward_wind \(time, time, ",
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
        MAINS[script](["--output-dir", str(tmp_path / "run"), *flags.format(**bad_files).split()])
    assert ended.value.code == 2
    assert re.match(rf"\S+: error: {BAD_INPUT[flags]}", capsys.readouterr().err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_ends_the_program_with_one_line_and_code_2(script: str, tmp_path: Path) -> None:
    done = programs.run(script, "--output-dir", tmp_path / "run", "--patch-size", 80)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"\n?{Path(script).name}: error: --patch-size 80: .*\n", done.err), done.err


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
        MAINS[script](flags)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        rf"\S+: error: --resume {re.escape(ckpt)}: has {option.split()[0]} .*, not .*; give", last
    )
    assert list(tmp_path.iterdir()) == []


def test_all_that_decides_the_weights_must_be_shared_and_no_variable_is_taken_twice() -> None:
    data = "variables level missing constant_cells train_times validation_times test_times patch_size"
    assert set(RESUME_KEYS) == {*data.split(), "batch_size", "max_steps", "learning_rate", "seed"}
    assert options_of("--variables", "u", "v", "u").variables == ["u", "v"]


# ------------------------------------------------------------------------------------------- benchmark


def test_benchmark_refuses_an_unknown_study() -> None:
    done = programs.run("01_setup/benchmark.py", "speed")
    assert done.code == 2
    assert "speed: no such study; choose from scripts, " in done.err
