"""Chapter 6: the final model, and how it is judged by basin and season."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import book
import numpy as np
import pytest
import torch
import xarray as xr

CHAPTER = book.ROOT / "06_whats_next"
WINDS = book.ROOT / "01_setup/data/navy_winds.nc"


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    with book.rooms("06_whats_next"):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chapter 1's winds as a Zarr store."""
    path = tmp_path_factory.mktemp("stores") / "navy.zarr"
    with xr.open_dataset(WINDS) as winds:
        winds.drop_encoding().chunk(time=1).to_zarr(path)
    return path


def test_the_final_model_is_a_quarter_below_the_interpolated_anomalies(store: Path, tmp_path: Path) -> None:
    """On the patches of chapter 1's test, which have chosen nothing, in at most 5,000 steps."""
    import evaluation
    from data import EVAL_SEED, Grid, PatchDataset, PatchMaker
    from fields import split_times
    from options import Options
    from predict.maps import load_model
    from store import FieldReader, Location
    from store_climatology import load_climatology

    model, record = load_model(CHAPTER / "results/final.ckpt")
    options = record["options"]
    assert options["max_steps"] <= 5000
    reader = FieldReader(Location(str(store)), options["variables"])
    fields = reader.open()
    spans = {f"--{name}": options[name] for name in ("train_times", "test_times")}
    training, test = split_times(fields.time, spans)
    span = options["train_times"]
    means = load_climatology(reader, training, span=span, missing="refuse", folder=tmp_path)
    grid = Grid(fields.latitude.values, fields.longitude.values)
    count = Options().eval_samples
    patches = PatchDataset(PatchMaker(grid, test, means, 64), reader, count, EVAL_SEED)
    baseline = evaluation.baselines(patches, model.hparams.units)[evaluation.BASELINE]["m/s"]

    squares = weights = 0.0
    for sample in patches.__getitems__([(0, k) for k in range(count)]):
        prediction = evaluation.predict(model.model, sample["input"])
        error = patches.maker.std * (prediction - sample["target"])
        squares += (sample["weight"] * error**2).sum() / 2
        weights += sample["weight"].sum()
    assert np.sqrt(squares / weights) < 0.75 * baseline


def test_errors_by_basin_and_season_are_a_plain_sum() -> None:
    from studies.skill import FILLS, Errors, tabulate

    rng = np.random.default_rng(0)
    latitude, longitude = np.linspace(-90, 90, 19), np.arange(20, 380, 10.0)
    shape = (19, 36)
    errors, added = Errors(shape), []
    for month in (0, 1, 6, 11):
        weight = rng.random(shape) * (rng.random(shape) < 0.5)
        error = {name: rng.normal(size=(2, *shape)) for name in FILLS}
        errors.add(month, weight, error)
        added.append((month, weight, error))
    rows = {(row["basin"], row["season"]): row["rmse"] for row in tabulate(errors, latitude, longitude)}
    assert ("everywhere", "MAM") not in rows and ("everywhere", "JJA") in rows
    # The North Atlantic: 20 to 60 degrees north, 280 to 360 east.
    cells = np.ix_(latitude >= 20, (longitude % 360 >= 280) | (longitude % 360 == 0))
    north = latitude[latitude >= 20] <= 60
    for season, months in {"DJF": (0, 1, 11), "year": range(12)}.items():
        for name in FILLS:
            square = total = 0.0
            for month, weight, error in added:
                if month in months:
                    square += (weight * error[name] ** 2)[(slice(None), *cells)][:, north].sum() / 2
                    total += weight[cells][north].sum()
            assert rows["North Atlantic", season][name] == pytest.approx(np.sqrt(square / total))


def test_the_study_judges_the_final_model_and_interpolation_crosses_the_seam(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies import skill

    crossings = []
    interpolate_map = skill.interpolate_map
    monkeypatch.setattr(
        skill, "interpolate_map", lambda *given: crossings.append(given[-1]) or interpolate_map(*given)
    )
    flags = [str(CHAPTER / "results/final.ckpt"), "--store", str(store), "--climatology-dir", str(tmp_path)]
    rows = skill.main([*flags, "--draws", "1", "--times", "1991-07", "1991-07"])
    assert crossings == [True]
    everywhere = {row["season"]: row["rmse"] for row in rows if row["basin"] == "everywhere"}
    assert everywhere.keys() == {"year", "JJA"}
    assert everywhere["year"][skill.NETWORK] < 0.9 * everywhere["year"][skill.BASELINE]


def test_interpolation_without_a_seam_to_cross_uses_the_maps_own_cells() -> None:
    """The only seen cells are on the other side of the seam: near ones on a globe, far ones in a region."""
    from studies.skill import interpolate_map

    values = np.zeros((1, 8, 40), "float32")
    values[..., -2:] = 1
    seen = np.zeros((8, 40), bool)
    seen[:, -2:] = seen[:, 15:17] = True
    unseen = ~seen
    known = {"values": values, "mean": np.zeros_like(values), "seen": seen}
    globe = interpolate_map(known, unseen, wraps=True)["nearest neighbour"]
    region = interpolate_map(known, unseen, wraps=False)["nearest neighbour"]
    assert (globe[0, :, 0] == 1).all()
    assert (region[0, :, 0] == 0).all()


def test_a_finished_run_is_kept_and_an_unfinished_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a made-up folder of a run, whose checkpoint is the one that comes with the book."""
    import results
    from predict.maps import load_model
    from studies import keep_run

    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(keep_run, "RESULTS", tmp_path / "results")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit) as error:
        keep_run.main([str(run)])
    assert error.value.code == 2
    shutil.copy(CHAPTER / "results/final.ckpt", run / "checkpoints/step_00005000.ckpt")
    metrics = {"steps": 5000, "rmse": {"U-Net": {"m/s": 0.9}, "interpolated anomalies": {"m/s": 1.2}}}
    (run / "summary.json").write_text(json.dumps(metrics))
    (run / "metrics.csv").write_text("loss,rmse (m/s),step\n0.5,,8\n,1.25,9\n0.4,,18\n,1.5,19\n")
    (run / "resumed_at_10").mkdir()
    (run / "resumed_at_10/metrics.csv").write_text("loss,rmse (m/s),step\n,1.125,19\n")
    row = keep_run.main([str(run)])
    assert row["curve"] == [{"step": 10, "rmse (m/s)": 1.25}, {"step": 20, "rmse (m/s)": 1.125}]
    assert "-25.0% against" in capsys.readouterr().out
    kept, _ = load_model(tmp_path / "results/final.ckpt")
    original, _ = load_model(CHAPTER / "results/final.ckpt")
    for name, tensor in original.state_dict().items():
        assert torch.equal(kept.state_dict()[name], tensor)
