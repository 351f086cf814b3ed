"""Chapter 1: both scripts, from what a sample is to a run that is killed and resumed."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import torch
import xarray as xr
from lightning.pytorch import LightningModule, Trainer
from runs import assert_resumed, assert_same_bits, check_summary, load, losses, state, summary, weights
from torch.utils.data import DataLoader

CHAPTER = book.ROOT / "01_setup"
README = CHAPTER / "README.md"
STORE = CHAPTER / "data/navy_winds.nc"
SCRIPTS = ["01_setup/train.py", "01_setup/train_by_hand.py"]
PROGRAMS = [*SCRIPTS, "01_setup/benchmark.py"]
SMALL = "--patch-size 16 --batch-size 2 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()

thorough = pytest.mark.thorough
MODULES = {script: load(script, f"chapter_01_{Path(script).stem}") for script in SCRIPTS}
chapter = MODULES["01_setup/train.py"]


ONE_OF_BOTH = [SCRIPTS[0], pytest.param(SCRIPTS[1], marks=thorough)]  # the other is like it


@pytest.fixture(scope="module")
def winds() -> xr.DataArray:
    return chapter.open_winds(STORE, ["eastward_wind", "northward_wind"])


def patches(*flags: object):
    """The training and the validation patches under these flags."""
    return chapter.make_patches(chapter.parse_arguments([str(flag) for flag in flags]))


# ------------------------------------------------------------------------------------------- the data


def test_the_winds_are_whole_and_small(winds: xr.DataArray) -> None:
    assert STORE.stat().st_size < 10e6
    assert winds.shape == (132, 2, 73, 144)
    assert winds.dtype == "float32"
    assert [str(time)[:7] for time in winds.time.values[[0, -1]]] == ["1982-01", "1992-12"]


def test_make_data_rewrites_the_winds_without_loss(tmp_path: Path, winds: xr.DataArray) -> None:
    make_data = load("01_setup/data/make_data.py", "make_data")
    names = {"time": "TIME", "latitude": "FNOCY", "longitude": "FNOCX"}
    ferret = winds.to_dataset("component").rename(eastward_wind="UWND", northward_wind="VWND", **names)
    ferret.to_netcdf(tmp_path / "ferret.cdf", engine="scipy")
    make_data.make_winds(tmp_path / "ferret.cdf", tmp_path / "winds.nc")
    again = chapter.open_winds(tmp_path / "winds.nc", ["eastward_wind", "northward_wind"])
    xr.testing.assert_identical(again.drop_attrs(), winds.drop_attrs())


def test_winds_are_read_by_name_whatever_their_order(tmp_path: Path, winds: xr.DataArray) -> None:
    dataset = (
        xr.open_dataset(STORE).transpose("longitude", "time", "latitude").isel(latitude=slice(None, None, -1))
    )
    dataset.to_netcdf(tmp_path / "other.nc")
    other = chapter.open_winds(tmp_path / "other.nc", ["eastward_wind", "northward_wind"])
    xr.testing.assert_identical(other.drop_attrs(), winds.drop_attrs())


# ---------------------------------------------------------------------------- order is a function


def test_a_sample_depends_on_nothing_but_seed_step_and_k() -> None:
    one, _ = patches("--seed", 5)
    other, _ = patches("--seed", 5)
    addresses = [(step, k) for step in (0, 7, 1000) for k in range(8)]
    forward = [one[address] for address in addresses]
    backward = [other[address] for address in reversed(addresses)][::-1]
    for first, second in zip(forward, backward, strict=True):
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    another, _ = patches("--seed", 6)
    for part in (1, 2, 3):  # the corner's row and column, the swaths: not only the time
        drawn = [[patch.sample(*address)[part] for address in addresses] for patch in (one, another)]
        assert not np.array_equal(*drawn)
    assert len({one[address]["input"].tobytes() for address in addresses}) == len(addresses)


@pytest.mark.parametrize("batch_size", [8, 7])
def test_an_epoch_visits_each_month_once_and_the_next_in_another_order(batch_size: int) -> None:
    training, _ = patches("--batch-size", batch_size)
    drawn = [training.sample(*divmod(i, batch_size))[0] for i in range(3 * 108)]
    epochs = [drawn[start : start + 108] for start in (0, 108, 216)]
    assert all(sorted(epoch) == list(range(108)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_patches_cover_the_map_and_cross_its_seam(winds: xr.DataArray) -> None:
    training, _ = patches()
    corners = np.array([training.sample(step, 0)[1:3] for step in range(2000)])
    assert set(corners[:, 0]) == set(range(73 - 64 + 1))
    assert set(corners[:, 1]) == set(range(144))
    rolled = np.roll(winds.values[0], -130, axis=-1)[:, 3:67, :64]
    np.testing.assert_array_equal(training.cut(winds.values[0], 3, 130), rolled)


def test_a_regional_map_has_no_seam_to_cross(winds: xr.DataArray) -> None:
    region = chapter.WindPatches(winds.isel(longitude=slice(0, 100)), 0, 1, 64, 8, 0)
    columns = {int(region.sample(step, 0)[2]) for step in range(1000)}
    assert columns == set(range(100 - 64 + 1))


def test_swaths_are_slanted_stripes_over_about_a_third_of_the_patch() -> None:
    masks = np.stack([chapter.swath_mask(np.random.default_rng(seed), 64) for seed in range(300)])
    assert 0.33 < masks.mean() < 0.37  # 4 cells of every 10, of which one pass in 8 is lost
    assert masks.any(axis=(1, 2)).all()
    widths = [np.diff(np.flatnonzero(np.diff(np.r_[0, row, 0]))).tolist()[::2] for row in masks[0]]
    assert max(width for row in widths for width in row) <= chapter.SWATH_WIDTH + 1
    assert not np.array_equal(masks[0][0], masks[0][-1])


def test_a_sample_hides_what_was_not_seen_and_judges_only_that() -> None:
    training, _ = patches()
    sample = training[3, 2]
    seen = sample["input"][2].astype(bool)
    np.testing.assert_array_equal(sample["input"][:2, seen], sample["target"][:, seen])
    assert not sample["input"][:2, ~seen].any()
    assert not sample["weight"][0, seen].any()
    row = training.sample(3, 2)[1]
    cosine = np.cos(np.deg2rad(training.latitude[row : row + 64]))
    expected = np.broadcast_to(cosine[:, None], (64, 64))[~seen]
    np.testing.assert_allclose(sample["weight"][0, ~seen], expected.clip(0), atol=1e-6)


def test_statistics_come_from_the_training_years_only(tmp_path: Path) -> None:
    training, validation = patches()
    dataset = xr.load_dataset(STORE)
    dataset = dataset.where(dataset.time.dt.year < 1991, 100 * dataset)
    dataset.to_netcdf(tmp_path / "scaled.nc")
    changed, judged = patches("--store", tmp_path / "scaled.nc")
    np.testing.assert_array_equal(changed.mean, training.mean)
    np.testing.assert_array_equal(changed.std, training.std)
    assert not np.array_equal(judged.values, validation.values)
    assert set(training.times.astype("datetime64[Y]").astype(str)) == {
        str(year) for year in range(1982, 1991)
    }
    assert set(validation.times.astype("datetime64[Y]").astype(str)) == {"1991", "1992"}


def test_every_run_is_judged_on_the_same_patches() -> None:
    _, one = patches("--seed", 1, "--batch-size", 8)
    _, other = patches("--seed", 2, "--batch-size", 32)
    for k in range(chapter.VALIDATION_SAMPLES):
        np.testing.assert_array_equal(one[0, k]["input"], other[0, k]["input"])


# ----------------------------------------------------------------------------- loss, metric, schedule


def batch_of(unseen_shares: tuple[float, ...], errors: tuple[float, ...]) -> tuple[torch.Tensor, dict]:
    """A prediction of zeros and a batch whose samples have these shares of unseen rows and these errors."""
    seen = torch.stack([(torch.arange(10) >= 10 * share).float() for share in unseen_shares])
    seen = seen[:, None, :, None].expand(-1, 1, -1, 4)
    target = torch.tensor(errors)[:, None, None, None].expand(-1, 2, 10, 4)
    return torch.zeros_like(target), {
        "input": torch.cat([target * seen, seen], dim=1),
        "target": target,
        "weight": 1 - seen,
    }


def test_the_loss_is_one_mean_over_all_unseen_cells_not_a_mean_of_means() -> None:
    prediction, batch = batch_of((0.9, 0.1), (1.0, 3.0))
    assert chapter.masked_loss(prediction, batch).item() == pytest.approx(0.9 * 1 + 0.1 * 9)
    alone = [
        chapter.masked_loss(prediction[k : k + 1], {name: part[k : k + 1] for name, part in batch.items()})
        for k in range(2)
    ]
    assert torch.stack(alone).mean().item() == pytest.approx((1 + 9) / 2)  # what it must not be


def test_the_loss_ignores_what_was_seen() -> None:
    prediction, batch = batch_of((0.5,), (2.0,))
    prediction.requires_grad_()
    chapter.masked_loss(prediction, batch).backward()
    assert prediction.grad[:, :, :5].all()
    assert not prediction.grad[:, :, 5:].any()


def test_baselines_are_exact_where_they_should_be() -> None:
    training, validation = patches()
    month = np.arange(12, dtype="float32")
    for part in (training, validation):  # each month has one value, everywhere and in every year
        number = part.times.astype("datetime64[M]").astype(int) % 12
        part.values = np.broadcast_to(month[number, None, None, None], part.values.shape).copy()
    figures = chapter.baselines(training, validation)
    assert figures["climatology"] == pytest.approx(0, abs=1e-5)
    assert figures["nearest neighbour"] == pytest.approx(0, abs=1e-5)
    for part in (training, validation):  # a slope from south to north, the other way in validation
        slope = np.linspace(0, 10, 73, dtype="float32")[None, None, :, None] * (1 if part is training else -1)
        part.values = np.broadcast_to(slope, part.values.shape).copy()
    figures = chapter.baselines(training, validation)
    # Not exact at the rims, outside the hull of the seen cells, where it takes the nearest one.
    assert figures["linear interpolation"] < 0.05 * figures["climatology"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_rmse_and_the_climatologys_are_those_of_a_plain_sum(script: str) -> None:
    """Unseen cells only, weighted by cos(latitude): in numpy, for a network that predicts the training mean."""
    module, (training, validation) = MODULES[script], patches()
    months = [part.times.astype("datetime64[M]").astype(int) % 12 for part in (training, validation)]
    squares, total = np.zeros(2), 0.0
    for k in range(module.VALIDATION_SAMPLES):
        time, row, column, seen = validation.sample(0, k)
        truth = validation.cut(validation.values[time], row, column)
        month = training.values[months[0] == months[1][time]].mean(axis=0)
        cosine = np.cos(np.deg2rad(validation.latitude[row : row + 64, None])).clip(0)
        weight = np.where(seen, 0, cosine)
        for i, guess in enumerate((training.mean, validation.cut(month, row, column))):
            squares[i] += (weight * (guess - truth) ** 2).sum()
        total += 2 * weight.sum()
    of_mean, of_climatology = np.sqrt(squares / total)

    class Zero(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x[:, :2])

    loader = DataLoader(validation, sampler=[(0, k) for k in range(module.VALIDATION_SAMPLES)], batch_size=32)
    if script == SCRIPTS[0]:
        model = module.WindFill(
            {"seed": 0, "overfit_one_batch": False}, training.mean.tolist(), training.std.tolist()
        )
        model.model = Zero()
        for batch in loader:
            model.validation_step(batch, 0)
        found = model.mean_square.compute().sqrt().item()
    else:
        found = module.validate(Zero(), loader, torch.from_numpy(training.std))
    assert found == pytest.approx(of_mean, rel=1e-5)
    assert module.baselines(training, validation)["climatology"] == pytest.approx(of_climatology, rel=1e-5)


@pytest.mark.parametrize(
    "size", [64, *(pytest.param(n, marks=thorough) for n in range(16, 73, 4) if n != 64)]
)
def test_every_patch_size_that_is_allowed_has_something_seen_and_baselines(size: int) -> None:
    masks = [chapter.swath_mask(np.random.default_rng((size, seed)), size) for seed in range(2000)]
    assert min(mask.sum() for mask in masks) >= size
    figures = chapter.baselines(*patches("--patch-size", size))
    assert all(1.5 < figure < 2.5 for figure in figures.values())


def test_the_learning_rate_warms_up_each_step_then_falls_to_zero() -> None:
    factors = [chapter.learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1
    assert all(before > after for before, after in pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.01
    assert [chapter.learning_rate_factor(step, 1) for step in (0, 1)] == [1, 1]  # PyTorch asks once more


# --------------------------------------------------------------------------------- as a reader runs it


@pytest.mark.parametrize(
    ("steps", "at_least"),
    [(4, -np.inf), pytest.param(300, 0.20, marks=thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(steps: int, at_least: float, tmp_path: Path) -> None:
    """In full, its network is far better than the climatology; 300 steps are the default."""
    assert "uv run python train.py" in book.commands(README)
    flags = ["--output-dir", tmp_path] + (["--max-steps", str(steps)] if steps != 300 else [])
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_summary(done.stdout) >= at_least
    assert "warning" not in done.stderr.lower()
    picture = Path(CHAPTER, re.search(r"picture: (.+)", done.stdout)[1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert state(tmp_path)["step"] == steps


def test_the_walkthrough_shows_every_line_of_the_summary() -> None:
    shown = [block for block in README.read_text().split("```") if "RMSE over the unseen cells" in block]
    assert check_summary(shown[0]) > 0


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
        assert "U-Net after 4 steps" in done.out


@pytest.mark.parametrize("script", PROGRAMS)
def test_help_says_what_the_program_is_for(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        load(script, "program").main(["--help"])
    printed = capsys.readouterr().out
    assert "Chapter 1" in printed
    if script in SCRIPTS:
        flags = {"--store", "--variables", "--patch-size", "--batch-size", "--max-steps", "--learning-rate"}
        flags |= {"--accelerator", "--num-workers", "--seed", "--output-dir", "--resume"}
        assert flags <= set(re.findall(r"--[a-z-]+", printed))


def test_the_two_scripts_share_their_definitions_word_for_word() -> None:
    lightning, by_hand = (book.definitions(script) for script in SCRIPTS)
    shared = lightning.keys() & by_hand.keys()
    assert {name for name in shared if lightning[name] != by_hand[name]} == {"load_checkpoint", "main"}
    assert {"WindPatches", "UNet", "masked_loss", "baselines", "StepSampler", "write_aside"} <= shared


# --------------------------------------------------------------------------------- the same to the bit


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small run of each script that nobody interrupted."""
    folders = {script: tmp_path_factory.mktemp("whole") for script in SCRIPTS}
    for script, folder in folders.items():
        programs.require_success(script, *SMALL, "--output-dir", folder)
    return folders


@pytest.mark.parametrize(("script", "workers"), [(SCRIPTS[0], 0), (SCRIPTS[0], 2), (SCRIPTS[1], 2)])
def test_the_same_seed_gives_the_same_weights(script: str, workers: int, tmp_path: Path, whole: dict) -> None:
    programs.require_success(script, *SMALL, "--num-workers", workers, "--output-dir", tmp_path)
    assert_same_bits(tmp_path, whole[script])
    assert losses(tmp_path) == losses(whole[script])


@pytest.mark.parametrize("script", ONE_OF_BOTH)
def test_another_seed_gives_other_weights(script: str, tmp_path: Path, whole: dict) -> None:
    programs.require_success(script, *SMALL, "--seed", 1, "--output-dir", tmp_path)
    assert losses(tmp_path) != losses(whole[script])


def test_the_two_scripts_agree_step_by_step(whole: dict[str, Path]) -> None:
    lightning, by_hand = (whole[script] for script in SCRIPTS)
    assert len(losses(lightning)) == 7
    np.testing.assert_allclose(losses(lightning), losses(by_hand), rtol=1e-5)
    torch.testing.assert_close(weights(lightning), weights(by_hand), rtol=1e-4, atol=1e-6)
    figures = [summary(folder) for folder in (lightning, by_hand)]
    assert figures[0]["rmse"] == pytest.approx(figures[1]["rmse"], rel=1e-4)
    assert figures[0]["climatology"] == figures[1]["climatology"]


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=thorough) for step in (0, 1, 2, 3, 5, 6))])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_killed_at_any_step_resumes_to_the_bit(
    script: str, step: int, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path, "--num-workers", 2 if step == 4 else 0]
    assert programs.run(script, *flags, kill_at_step=step).code == -9
    assert not (tmp_path / "summary.json").exists()
    programs.require_success(script, *flags, "--resume")
    assert_same_bits(tmp_path, whole[script])
    if step >= 3:  # the first checkpoint but for that of step 0
        assert_resumed(tmp_path, step // 3 * 3, whole[script])


@thorough
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_killed_while_it_writes_a_checkpoint_still_has_the_one_before(
    script: str, number: int, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    assert programs.run(script, *flags, kill_in_checkpoint=number).code == -9
    assert state(tmp_path)["step"] == 3 * (number - 1)
    programs.require_success(script, *flags, "--resume")
    assert_same_bits(tmp_path, whole[script])


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_resumes_with_no_step_left(script: str, tmp_path: Path, whole: dict) -> None:
    ckpt = whole[script] / "last.ckpt"
    done = programs.require_success(script, *SMALL, "--resume", ckpt, "--output-dir", tmp_path)
    assert "samples/s" not in done.out
    assert_same_bits(tmp_path, whole[script])


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_who_forgets_resume_keeps_the_old_checkpoint(script: str, tmp_path: Path) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    programs.require_success(script, *flags)
    before = (tmp_path / "last.ckpt").read_bytes()
    assert programs.run(script, *flags, kill_at_step=1).code == -9
    assert (tmp_path / "previous.ckpt").read_bytes() == before
    assert not (tmp_path / "summary.json").exists()


# ------------------------------------------------- what goes wrong without it (failure modes 12, 14, 15)


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
        sampler = chapter.StepSampler(4, start, 8)
        return chapter.TimedLoader(DataLoader(Numbers(), batch_sampler=sampler), 8)

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
    options = chapter.WindFill(
        {"seed": 0, "overfit_one_batch": False, "learning_rate": 1, "max_steps": 9}, [], [1.0]
    )
    assert options.configure_optimizers()["lr_scheduler"]["interval"] == "step"


# ----------------------------------------------------------------------------------------- sanity


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_one_batch_is_learnt_by_heart(script: str, tmp_path: Path) -> None:
    flags = ["--overfit-one-batch", "--batch-size", 4]
    assert ["--overfit-one-batch", "--batch-size", "4"] in commands_with("train.py")
    done = programs.require_success(script, *flags, "--output-dir", tmp_path)
    course = losses(tmp_path)
    assert course[-1] < 0.02 < 20 * course[-1] < course[0]
    assert "learnt by heart" in done.out


@thorough
def test_too_short_an_overfit_says_so(tmp_path: Path) -> None:
    done = programs.require_success(SCRIPTS[0], *SMALL, "--overfit-one-batch", "--output-dir", tmp_path)
    assert "NOT learnt" in done.out


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_nan_stops_the_run_and_names_the_step(script: str, tmp_path: Path) -> None:
    flags = [*SMALL, "--learning-rate", 1e30, "--output-dir", tmp_path]
    done = programs.run(script, *flags)
    assert done.code == 2
    assert re.search(
        r"error: step \d: loss (nan|inf) in the batch of seed 0; lower --learning-rate", done.err
    )
    assert "Traceback" not in done.err
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    assert not (tmp_path / "summary.json").exists()


def test_a_nan_in_a_sample_is_named() -> None:
    prediction, batch = batch_of((0.5, 0.5, 0.5), (1.0, float("nan"), 1.0))
    loss = chapter.masked_loss(prediction, batch)
    with pytest.raises(chapter.InputError, match=r"step 7: loss nan .* sample k=1 is not finite"):
        chapter.check_finite(loss, 7, batch, 0)


# ----------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores and checkpoints with which something is wrong, by name."""
    folder = tmp_path_factory.mktemp("bad")
    whole_file = STORE.read_bytes()
    (folder / "truncated.nc").write_bytes(whole_file[: len(whole_file) // 2])
    (folder / "empty.nc").write_bytes(b"")
    dataset = xr.load_dataset(STORE)
    dataset.isel(time=slice(0, 60)).to_netcdf(folder / "short.nc")
    holes = dataset.copy(deep=True)
    holes.eastward_wind[50, 10, 10] = np.nan
    holes.to_netcdf(folder / "nan.nc")
    (folder / "torn.ckpt").write_bytes(b"PK\x03\x04 not a whole checkpoint")
    return {path.stem: path for path in folder.iterdir()}


BAD_INPUT = {
    "no such store": (["--store", "nowhere.nc"], r"--store nowhere.nc: no such file"),
    "a folder as store": (["--store", "."], r"--store \.: no such file"),
    "truncated": (["--store", "{truncated}"], r"--store \S+truncated.nc: not a whole NetCDF file"),
    "empty": (["--store", "{empty}"], r"--store \S+empty.nc: not a whole NetCDF file"),
    "too few years": (["--store", "{short}"], r"--store \S+short.nc: must hold 1982-1990"),
    "NaN": (["--store", "{nan}"], r"--store \S+nan.nc: NaN or infinity at 1 times, first 1986-03"),
    "no such variable": (["--variables", "u", "v"], r"--variables u: not in .*; choose from eastward_wind, "),
    "patch too large": (
        ["--patch-size", "80"],
        r"--patch-size 80: .* 73 x 144; give a multiple of 4 up to 72",
    ),
    "patch too small": (["--patch-size", "8"], r"--patch-size 8: too small; give at least 16"),
    "patch not halved": (["--patch-size", "30"], r"--patch-size 30: .* multiple of 4"),
    "batch size 0": (["--batch-size", "0"], r"--batch-size 0: too small; give at least 1"),
    "no steps": (["--max-steps", "0"], r"--max-steps 0: too small"),
    "not a number": (["--max-steps", "many"], r"--max-steps: invalid int value: 'many'"),
    "learning rate": (["--learning-rate", "nan"], r"--learning-rate nan: too small"),
    "no such flag": (["--learning-rat3", "1"], r"unrecognized arguments: --learning-rat3 1"),
    "no checkpoint": (["--resume"], r"--resume \S+last.ckpt: no such file"),
    "torn checkpoint": (["--resume", "{torn}"], r"--resume \S+torn.ckpt: not a whole checkpoint"),
    "folder is a file": (
        ["--output-dir", "{torn}"],
        r"--output-dir \S+torn.ckpt: cannot write configuration.json",
    ),
}
if not torch.accelerator.is_available():
    BAD_INPUT["no GPU"] = (["--accelerator", "gpu"], r"--accelerator gpu: this machine has none")


@pytest.mark.parametrize("case", BAD_INPUT)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(
    script: str, case: str, bad_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHAPTER)
    flags, message = BAD_INPUT[case]
    flags = [flag.format(**bad_files) for flag in flags]
    with pytest.raises(MODULES[script].InputError, match=f"^{message}") as raised:
        MODULES[script].main(["--output-dir", str(tmp_path / "run"), *flags])
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_ends_the_program_with_one_line_and_code_2(script: str, tmp_path: Path) -> None:
    done = programs.run(script, "--output-dir", tmp_path / "run", "--patch-size", 80)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"{Path(script).name}: error: --patch-size 80: .*\n", done.err), done.err


OTHER_CONFIGURATION = {
    "--batch-size": "4",
    "--max-steps": "9",
    "--seed": "3",
    "--patch-size": "24",
    "--learning-rate": "0.001",
}


@pytest.mark.parametrize("flag", OTHER_CONFIGURATION)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_of_another_configuration_is_refused(
    script: str, flag: str, whole: dict, tmp_path: Path
) -> None:
    ckpt, value = str(whole[script] / "last.ckpt"), OTHER_CONFIGURATION[flag]
    flags = [*SMALL, "--resume", ckpt, "--output-dir", str(tmp_path / "run"), flag, value]
    with pytest.raises(MODULES[script].InputError, match=f"^{flag} {value}: {re.escape(ckpt)} has "):
        MODULES[script].main(flags)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, whole: dict) -> None:
    dataset = xr.load_dataset(STORE)
    (dataset + np.float32(1)).to_netcdf(tmp_path / "other.nc")
    flags = ["--store", tmp_path / "other.nc", "--resume", whole[SCRIPTS[0]] / "last.ckpt"]
    with pytest.raises(chapter.InputError, match="--store crc32"):
        chapter.main([*SMALL, *map(str, flags), "--output-dir", str(tmp_path / "run")])


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_leaves_nothing_that_looks_finished(script: str, tmp_path: Path) -> None:
    done = programs.run(script, *SMALL, "--output-dir", tmp_path, file_size=1_000_000)
    assert done.code == 2, done.err
    assert re.search(r"error: --output-dir \S+: cannot write last.ckpt .*make room", done.err), done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.glob("*.ckpt"))
    assert not list(tmp_path.glob("part-*"))


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_disk_that_fills_up_keeps_the_last_checkpoint(script: str, tmp_path: Path, whole: dict) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    assert programs.run(script, *flags, kill_at_step=4).code == -9
    before = (tmp_path / "last.ckpt").read_bytes()
    assert programs.run(script, *flags, "--resume", file_size=1_000_000).code == 2
    assert (tmp_path / "last.ckpt").read_bytes() == before
    programs.require_success(script, *flags, "--resume")
    assert_same_bits(tmp_path, whole[script])


# ------------------------------------------------------------------------------------------- benchmark


def test_the_committed_results_keep_their_promises() -> None:
    scripts = book.results("01_setup/results/scripts.json")["rows"]
    assert [row["script"] for row in scripts] == ["train_by_hand.py", "train.py"]
    for row in scripts:
        assert row["rmse"]["max"] <= 0.8 * row["climatology"]
    longer = book.results("01_setup/results/longer.json")["rows"][0]
    assert longer["rmse"] <= 0.62 * longer["climatology"]


def test_benchmark_refuses_an_unknown_study() -> None:
    done = programs.run("01_setup/benchmark.py", "speed")
    assert done.code == 2
    assert "speed: no such study; choose from scripts, workers" in done.err
