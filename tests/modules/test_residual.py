"""Optimal interpolation on any device, and networks that learn what it leaves over."""

from pathlib import Path

import book
import numpy as np
import pytest
import torch
import xarray as xr
from interpolator import Interpolator
from made_up_winds import SIZE, flags_for, make_datamodule, make_winds, write
from studies import residual
from studies.filled_patches import APART, TOGETHER, FilledPatches
from studies.torch_interpolation import TorchInterpolator

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
CPU = torch.device("cpu")
FLAGS = ["--accelerator", "cpu", "--eval-samples", 6]
BOTH = [[0, 1]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stores") / "winds", make_winds())


@pytest.fixture(scope="module")
def filled(store: Path) -> FilledPatches:
    return FilledPatches(make_datamodule(flags_for(store, *FLAGS)).data, SIZE, 3, 0, CPU)


def made_up_anomalies() -> np.ndarray:
    """(times, variables, rows, columns), and neighbours vary together."""
    noise = np.random.default_rng(0).normal(size=(40, 2, 24, 40))
    smooth = sum(np.roll(noise, shift, axis) for shift in range(3) for axis in (2, 3))
    smooth[:, 1] += smooth[:, 0]
    return smooth.astype("float32")


def test_variables_apart_are_filled_as_the_module_fills_them_at_any_number_of_times() -> None:
    anomalies = made_up_anomalies()
    expected = Interpolator(anomalies, True, SIZE)
    found = TorchInterpolator(anomalies, True, SIZE, [[0], [1]], CPU)
    seen = np.random.default_rng(1).random((SIZE, SIZE)) < 0.4
    for row, column in ((0, 0), (24 - SIZE, 35)):
        values = expected.cut(row, column)[:3]
        fills = found.fill(row, column, seen, values)
        for fill, each in zip(fills, values):
            np.testing.assert_allclose(fill, expected.fill(row, column, seen, each), atol=1e-3)


def test_together_they_are_filled_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a covariance between them as apart. Where nothing is seen, by the climatology."""
    anomalies = made_up_anomalies()
    seen = np.random.default_rng(1).random((SIZE, SIZE)) < 0.4
    values = anomalies[:3, :, :SIZE, :SIZE]
    apart = TorchInterpolator(anomalies, True, SIZE, [[0], [1]], CPU).fill(0, 0, seen, values)
    together = TorchInterpolator(anomalies, True, SIZE, BOTH, CPU)
    assert (together.fill(0, 0, seen, values) - apart).abs().max() > 0.1
    assert not together.fill(0, 0, np.zeros_like(seen), values).any()
    monkeypatch.setattr("studies.torch_interpolation.CROSS_SHARE", 0)
    unrelated = together.fill(0, 0, seen, values)
    # The noise of both is the mean of both variances, so they are not quite equal.
    assert (unrelated - apart).abs().max() < 0.05


def test_a_patch_to_learn_from_is_filled_as_if_its_year_were_unknown(filled: FilledPatches) -> None:
    """At all times of the year; neither its anomalies nor its fill are those of a year that is known."""
    without = filled.training(TOGETHER, True)
    known = filled.training(TOGETHER, False)
    assert filled.training(TOGETHER, True) is without
    for name in ("seen", "weight"):
        assert torch.equal(without[name], known[name])
    assert len(without["target"]) == len(known["target"]) > 3 * 30
    assert (without["target"] - known["target"]).abs().max() > 0.01

    def left(patches: dict) -> float:
        return ((patches["fill"] - patches["target"]) ** 2 * patches["weight"]).sum().item()

    assert left(without) > 1.1 * left(known)


def test_a_year_that_is_left_out_is_in_no_covariance_and_no_climatology(filled: FilledPatches) -> None:
    first = filled.years == filled.years.min()
    before = filled.make_fold(APART, ~first)
    whole = filled.anomalies.copy()
    try:
        filled.anomalies[first] += 5
        after = filled.make_fold(APART, ~first)
    finally:
        filled.anomalies = whole
    assert torch.equal(before.interpolator.anomalies, after.interpolator.anomalies)
    np.testing.assert_allclose(after.anomalies[first] - before.anomalies[first], 5, atol=1e-4)


def test_half_of_a_batch_is_mirrored_at_the_equator() -> None:
    rng = np.random.default_rng(0)
    batch = {name: torch.from_numpy(rng.normal(size=(4, 2, 8, 8))) for name in ("target", "fill")}
    batch["seen"] = torch.from_numpy(rng.normal(size=(4, 1, 8, 8)))
    before = {name: values.clone() for name, values in batch.items()}
    residual.mirror_half(batch)
    for name, values in batch.items():
        assert torch.equal(values[2:], before[name][2:])
        assert torch.equal(values[:2, :1], before[name][:2, :1].flip(-2))
    assert torch.equal(batch["target"][:2, 1], -before["target"][:2, 1].flip(-2))


def test_the_study_trains_and_tests_what_it_chose(store: Path, tmp_path: Path) -> None:
    flags = [*map(str, flags_for(store, *FLAGS, "--output-dir", tmp_path / "run"))]
    small = ["--places", "2", "--steps", "2", "--seeds", "0", "1", "--test"]
    rows = residual.main([*flags, *small, "--recipes", "OI + network", residual.ALONE])
    names = [row["what"] for row in rows]
    assert names[:4] == ["OI, apart", "OI, together", "OI + network", "OI + network, mixed"]
    rmse = {row["what"]: row["validation"]["seeds"] for row in rows}
    assert len(set(rmse["OI + network"])) == 2
    for name in ("OI + network", residual.ALONE):
        assert sum(rmse[f"{name}, mixed"]) <= min(sum(rmse[name]), 2 * rmse["OI, together"][0]) + 1e-9
    [chosen] = [row for row in rows if row.get("is_chosen")]
    tested = {row["what"] for row in rows if "test" in row}
    assert chosen["what"] in tested
    assert {"OI, apart", "OI, together", residual.ALONE} <= tested


def test_the_committed_networks_improve_on_oi_where_they_are_mixed_with_it() -> None:
    """On the validation year. Longer training makes the network worse by itself, and its mix better."""
    rows = {row["what"]: row for row in book.results("06_whats_next/results/residual.json")["rows"]}
    rmse = {name: sum(each) / len(each) for name, row in rows.items() if (each := row["validation"]["seeds"])}
    for fill, name in (("OI, apart", "OI + network, apart"), ("OI, together", "OI + network")):
        assert len(rows[name]["validation"]["seeds"]) == 3
        assert rmse[f"{name}, mixed"] < 0.985 * rmse[fill]
    assert rmse["OI, together"] < 0.98 * rmse["OI, apart"]
    assert rmse["OI + network, mixed"] < 0.85 < rmse["OI + network"]
    assert rmse["OI + network, mixed"] < rmse["network alone, kept, mixed"]


@pytest.mark.thorough
def test_the_committed_weights_have_the_committed_rmse(tmp_path: Path) -> None:
    """On the validation year, here on a CPU."""
    with xr.open_dataset(book.ROOT / "01_setup/data/navy_winds.nc") as winds:
        winds.drop_encoding().chunk(time=1).to_zarr(tmp_path / "winds")
    flags = "--accelerator cpu --variables eastward_wind northward_wind".split()
    flags += ["--store", tmp_path / "winds", "--output-dir", tmp_path / "run"]
    data = make_datamodule(flags).data
    patches = FilledPatches(data, 64, 1, 0, CPU)
    judge = patches.judge(data.validation, 96)
    rows = {row["what"]: row for row in book.results("06_whats_next/results/residual.json")["rows"]}
    row, recipe = rows["OI + network, mixed"], residual.RECIPES["OI + network"]
    weights = torch.load(book.ROOT / "06_whats_next/results/oi_network.pt", map_location="cpu")
    networks = [residual.make_network(recipe, 2) for _ in weights]
    for network, state in zip(networks, weights):
        network.load_state_dict(state)
    answers = residual.of_networks(networks, recipe, row["share"], judge)
    found = [residual.measure(answer, patches, judge) for answer in answers]
    assert found == pytest.approx(row["validation"]["seeds"], rel=1e-3)
