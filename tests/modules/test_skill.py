"""The final model: how it is judged by basin and season, and how a run is kept as the book's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import book
import evaluation
import interpolator as interpolating
import numpy as np
import pytest
import results
import task
import torch
import xarray as xr
from location import Location
from made_up_winds import write
from oi_baseline import OI
from options import Options
from predict.maps import load_model
from studies import keep_run, skill

FINAL = book.ROOT / "06_whats_next/results/final.ckpt"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chapter 1's winds as a Zarr store."""
    path = tmp_path_factory.mktemp("stores") / "navy.zarr"
    with xr.open_dataset(book.ROOT / "01_setup/data/navy_winds.nc") as winds:
        return write(path, winds.load().drop_encoding(), (1, 73, 144))


def test_the_final_model_is_a_quarter_below_the_interpolated_anomalies(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the patches of chapter 1's test, which have chosen nothing, in at most 5,000 steps."""
    model, record = load_model(FINAL)
    options = replace(Options(**record["options"]), climatology_dir=str(tmp_path))
    assert options.max_steps <= 5000
    _, data = task.make_data(options, Location(str(store)))
    count = Options().eval_samples
    patches = data.eval_patches(data.test, 64, count)
    monkeypatch.setattr(interpolating, "MOST_CELLS", 0)  # no optimal interpolation, which takes a minute
    baseline = evaluation.baselines(data, patches, tmp_path)["interpolated anomalies"]["m/s"]
    squares = weights = 0.0
    for sample in patches.__getitems__([(0, k) for k in range(count)]):
        prediction = evaluation.predict(model.model, sample["input"])
        error = patches.maker.std * (prediction - sample["target"])
        squares += (sample["weight"] * error**2).sum() / 2
        weights += sample["weight"].sum()
    assert np.sqrt(squares / weights) < 0.75 * baseline


def test_errors_by_basin_and_season_are_a_plain_sum() -> None:
    rng = np.random.default_rng(0)
    latitude, longitude = np.linspace(-90, 90, 19), np.arange(20, 380, 10.0)
    shape = (19, 36)
    errors, added = skill.Errors(shape), []
    for month in (0, 1, 6, 11):
        weight = rng.random(shape) * (rng.random(shape) < 0.5)
        error = {name: rng.normal(size=(2, *shape)) for name in skill.FILLS}
        errors.add(month, weight, error)
        added.append((month, weight, error))
    rows = {(row["basin"], row["season"]): row["rmse"] for row in skill.tabulate(errors, latitude, longitude)}
    basins = skill.find_basins(latitude, longitude)
    everywhere, elsewhere = basins.pop("everywhere"), basins.pop("elsewhere")
    assert everywhere.all() and elsewhere.any()
    np.testing.assert_array_equal(elsewhere, sum(basins.values()) == 0)
    assert ("everywhere", "MAM") not in rows and ("everywhere", "JJA") in rows
    # The North Atlantic: 20 to 60 degrees north, 280 to 360 east.
    cells = np.ix_((latitude >= 20) & (latitude <= 60), (longitude >= 280) & (longitude <= 360))
    for season, months in {"DJF": (0, 1, 11), "year": range(12)}.items():
        for name in skill.FILLS:
            square = total = 0.0
            for month, weight, error in added:
                if month in months:
                    square += (weight * error[name] ** 2)[:, *cells].sum() / 2
                    total += weight[cells].sum()
            assert rows["North Atlantic", season][name] == pytest.approx(np.sqrt(square / total))


def test_the_study_judges_the_final_model_and_interpolation_crosses_the_seam(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings, trained = [], []
    make = skill.make_interpolator
    monkeypatch.setattr(skill, "make_interpolator", lambda *v: trained.append(v[1]) or make(*v))
    interpolate = skill.interpolate_map
    monkeypatch.setattr(skill, "interpolate_map", lambda *v: crossings.append(v[-1]) or interpolate(*v))
    flags = ["--store", str(store), "--climatology-dir", str(tmp_path)]
    rows = skill.main([str(FINAL), *flags, "--draws", "1", "--times", "1991-07", "1991-07"])
    assert crossings == [True]
    (training,) = trained
    assert {str(date)[:4] for date in training.dates} == {str(year) for year in range(1982, 1990)}
    everywhere = {row["season"]: row["rmse"] for row in rows if row["basin"] == "everywhere"}
    assert everywhere.keys() == {"year", "JJA"}
    rmse = everywhere["year"]
    best = min(rmse[name] for name in skill.BASELINES if name != OI)
    assert rmse[skill.NETWORK] < 0.9 * best
    assert rmse[OI] < 0.8 * best


def test_a_basin_is_compared_with_the_best_of_its_baselines(capsys) -> None:
    row = {"basin": "everywhere", "season": "year", "rmse": dict.fromkeys(skill.FILLS, 2.0)}
    row["rmse"] |= {"linear interpolation": 1.0, skill.NETWORK: 1.5}
    skill.print_skill([row])
    assert capsys.readouterr().out.endswith("+50.0% against linear interpolation\n")
    panels = skill.plot_skill([row]).axes
    assert panels[1].get_xlabel() == "RMSE of the U-Net against linear interpolation, % (below 0: better)"


@pytest.mark.parametrize("wraps", [False, True])
def test_interpolation_crosses_the_seam_of_a_globe_only(wraps: bool) -> None:
    """What is seen nearby is on the other side of the seam: on a globe near, in an area far away."""
    values = np.zeros((1, 8, 40), "float32")
    values[..., -2:] = 1
    seen = np.zeros((8, 40), bool)
    seen[:, -2:] = seen[:, 15:17] = True
    known = {"values": values, "mean": np.zeros_like(values), "seen": seen}
    filled = skill.interpolate_map(known, ~seen, wraps)["nearest neighbour"]
    assert (filled[0, :, 0] == wraps).all()


def test_a_finished_run_is_kept_and_an_unfinished_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """From a made-up folder of a run, whose checkpoint is the one that comes with the book."""
    for module in (results, keep_run):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):
        keep_run.main([str(run)])
    shutil.copy(FINAL, run / "checkpoints/step_00005000.ckpt")
    rmse = {"climatology": 1.0, "interpolated anomalies": 1.2, "U-Net": 0.9}
    metrics = {"steps": 5000, "rmse": {name: {"m/s": value} for name, value in rmse.items()}}
    (run / "summary.json").write_text(json.dumps(metrics))
    (run / "metrics.csv").write_text("loss,rmse (m/s),step\n0.5,,8\n,1.25,9\n0.4,,18\n,1.5,19\n")
    (run / "resumed_at_10").mkdir()
    (run / "resumed_at_10/metrics.csv").write_text("loss,rmse (m/s),step\n,1.125,19\n")
    row = keep_run.main([str(run)])
    assert row["curve"] == [{"step": 10, "rmse (m/s)": 1.25}, {"step": 20, "rmse (m/s)": 1.125}]
    assert "-10.0% against climatology" in capsys.readouterr().out
    kept, original = (load_model(path)[0] for path in (tmp_path / "results/final.ckpt", FINAL))
    torch.testing.assert_close(kept.state_dict(), original.state_dict(), rtol=0, atol=0)
