"""What a run is judged by: the same patches, baselines without a network, a picture."""

from pathlib import Path

import evaluation
import numpy as np
import pytest
import torch
import xarray as xr
from interpolator import make_interpolator
from made_up_winds import SIZE, flags_for, make_datamodule, make_winds, with_land, write
from oi_baseline import OI
from options import Options

ANOMALIES = "interpolated anomalies"
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return with_land(make_winds())


@pytest.fixture(scope="module")
def store(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stores") / "winds", winds, (8, 10, 20))


VALIDATED, TESTED = [11, 17, 19], [28, 15, 4]  # positions of the first times that judge, in their years


def test_every_run_is_judged_on_the_same_patches(store: Path) -> None:
    """Each period on its own, and where the committed results lie on a map of this size."""
    places = [(0, k) for k in range(20)]
    judged = []
    for flags in ([], ["--seed", 5, "--batch-size", 8]):
        made = make_datamodule(flags_for(store, *flags))
        assert made.validation.batch_size == made.test.batch_size == Options().eval_samples
        for dataset, year, times in ((made.validation, "1984", VALIDATED), (made.test, "1985", TESTED)):
            patches = [dataset.patch(*place) for place in places]
            assert {str(dataset.maker.period.dates[patch.time])[:4] for patch in patches} == {year}
            corners = [(patch.row, patch.column, patch.seen.sum()) for patch in patches[:3]]
            assert corners == [(0, 7, 124), (1, 15, 102), (0, 18, 96)]
            assert [patch.time for patch in patches[:3]] == times
            judged.append(dataset.__getitems__(places))
    for one, other in zip(judged[0] + judged[1], judged[2] + judged[3]):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_baselines_are_those_of_a_plain_sum(store: Path, tmp_path: Path) -> None:
    """In the unit of two of three variables, and by the weights of cells."""
    names = ("temperature", "v", "u")
    made = make_datamodule(flags_for(store, "--eval-samples", 12, variables=names))
    dataset, fills = made.test, {}
    weights = 0
    interpolator = make_interpolator(made.data.reader, made.data.training, made.data.climatology, SIZE)
    for k in range(12):
        sample, patch = dataset[0, k], dataset.patch(0, k)
        mean, anomaly = dataset.maker.monthly_mean(patch), dataset.maker.std * sample["target"]
        seen, unseen = sample["input"][-1] > 0, sample["unseen"][0] > 0
        weight = sample["weight"][0][unseen]
        weights += weight.sum()
        by_oi = dataset.maker.std * interpolator.fill(patch.row, patch.column, seen, sample["target"])
        filled = evaluation.fills(mean, anomaly, seen, unseen) | {OI: (mean + by_oi)[:, unseen]}
        for name, fill in filled.items():
            error = fill - (mean + anomaly)[:, unseen].astype("float64")
            fills[name] = fills.get(name, 0) + (weight * error[1:] ** 2).sum()
    found = evaluation.baselines(made.data, dataset, tmp_path)
    expected = {name: np.sqrt(square / 2 / weights) for name, square in fills.items()}
    assert list(found) == ["climatology", "nearest neighbour", "linear interpolation", ANOMALIES, OI]
    assert {name: rmse["m/s"] for name, rmse in found.items()} == pytest.approx(expected, rel=1e-5)
    assert all(list(rmse) == ["K", "m/s"] for rmse in found.values())


@pytest.mark.parametrize("cells", [[], [(2, 3)], [(2, 3), (6, 5)], [(1, 1), (3, 3), (5, 5)]])
def test_a_patch_of_which_too_few_cells_are_seen_is_filled_from_the_nearest(cells: list) -> None:
    """One or two cells, or a line of them, span no triangle; if nothing is seen, there is the climatology."""
    seen = np.zeros((8, 8), bool)
    for cell in cells:
        seen[cell] = True
    mean, anomaly = np.random.default_rng(0).normal(size=(2, 2, 8, 8))
    found = evaluation.fills(mean, anomaly, seen, ~seen)
    np.testing.assert_array_equal(found["climatology"], mean[:, ~seen])
    np.testing.assert_array_equal(found["linear interpolation"], found["nearest neighbour"])
    of_anomalies = evaluation.fills(0 * mean, anomaly, seen, ~seen)["nearest neighbour"]
    np.testing.assert_allclose(found[ANOMALIES], mean[:, ~seen] + of_anomalies)
    if not cells:
        np.testing.assert_array_equal(found["nearest neighbour"], mean[:, ~seen])
        return
    distances = np.linalg.norm(np.argwhere(~seen)[:, None] - cells, axis=2)
    closest = np.isclose(distances, distances.min(axis=1, keepdims=True))
    taken = found["nearest neighbour"][:, :, None] == (mean + anomaly)[:, None, seen]
    assert (taken & closest).any(axis=2).all()


def test_each_baseline_is_exact_where_it_should_be() -> None:
    """Each of the four has fields that it fills without error, and others do not."""
    seen = np.pad(np.zeros((14, 14), bool), 1, constant_values=True)  # inside its hull lies every hole
    rough = np.random.default_rng(0).normal(size=(2, 16, 16))
    slope, flat = np.linspace(0, 10, 16)[:, None] + 0 * rough, np.ones_like(rough)
    linear, nearest = "linear interpolation", "nearest neighbour"
    for mean, anomaly, expected in (
        (rough, 0 * rough, {"climatology", ANOMALIES}),
        (rough, flat, {ANOMALIES}),
        (rough, slope, {ANOMALIES}),
        (slope, 2 * slope, {linear, ANOMALIES}),
        (3 * flat, flat, {nearest, linear, ANOMALIES}),
        (flat, rough, set()),
    ):
        truth = (mean + anomaly)[:, ~seen]
        found = evaluation.fills(mean, anomaly, seen, ~seen)
        assert {name for name in found if np.abs(found[name] - truth).max() < 1e-9} == expected


def test_degrees_are_those_of_a_map() -> None:
    """And go round, as those of a patch across the seam do; the date line is neither east nor west."""
    north = [evaluation.format_latitude(degrees) for degrees in (-0.0, -60, 2.5)]
    assert north == ["0°", "60 °S", "2.5 °N"]
    east = [evaluation.format_longitude(degrees) for degrees in (-60, 2.5, 270, 360, 365, 540, -180)]
    assert east == ["60 °W", "2.5 °E", "90 °W", "0°", "5 °E", "180°", "180°"]


@pytest.mark.parametrize(("names", "unit"), [(("u", "v"), "m/s"), (("temperature",), "K")])
def test_the_example_shows_truth_swaths_fill_and_error(names: tuple, unit: str, store: Path) -> None:
    """Of the wind its speed, and else the first variable."""
    dataset = make_datamodule(flags_for(store, variables=names)).test
    maker, patch, sample = dataset.maker, dataset.patch(0, 0), dataset[0, 0]
    network = torch.nn.Conv2d(len(names) + 1, len(names), 1)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.constant_(network.bias, 0.5)
    figure = evaluation.plot_example(dataset, {unit: list(range(len(names)))}, network)

    unseen = sample["unseen"][0] > 0
    error = np.where(unseen, maker.std * (0.5 - sample["target"]), 0)
    truth = maker.monthly_mean(patch) + maker.std * sample["target"]
    show = np.linalg.norm if len(names) == 2 else lambda maps, axis: maps[0]
    truth, filled, error = (show(maps, axis=0) for maps in (truth, truth + error, error))
    expected = {
        "truth": truth,
        "seen by the satellite": np.where(unseen, np.nan, truth),
        "filled by the network": filled,
        "error of the fill": np.where(unseen, np.abs(error), np.nan),
    }
    assert str(maker.period.dates[patch.time])[:10] in figure.get_suptitle()
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert list(panels) == list(expected)
    for title, axes in panels.items():
        shown = np.ma.masked_invalid(axes.collections[0].get_array()).filled(np.nan)
        np.testing.assert_allclose(shown, expected[title], rtol=1e-5, atol=1e-5)
        assert axes.xaxis.get_major_formatter()(270, 0) == "90 °W"
        assert axes.yaxis.get_major_formatter()(-30, 0) == "30 °S"
    assert [axes.get_ylabel() for axes in figure.axes if not axes.get_title()] == [unit] * 4


@pytest.mark.parametrize("units", [("m/s",), ("m/s", "K")])
def test_the_network_is_compared_with_the_best_simple_fill_and_oi(units: tuple[str, ...], capsys) -> None:
    """By name, in each unit."""
    rows = {
        "climatology": (2.0, 0.8),
        "linear interpolation": (1.9, 0.5),
        ANOMALIES: (1.6, 1.0),
        OI: (1.0, 0.4),
        "U-Net": (1.2, 0.75),
    }
    rmse = {name: dict(zip(units, row)) for name, row in rows.items()}
    metrics = {"rmse": rmse, "steps": 4, "seconds": 1, "peak_memory_gb": 1}
    evaluation.print_summary(metrics, ["1991", "1992"], Path("fill.png"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "against" in line]
    expected = [
        "against interpolated anomalies -25.0% m/s",
        "against optimal interpolation +20.0% m/s",
        "against linear interpolation +50.0% K",
        "against optimal interpolation +87.5% K",
    ]
    if len(units) == 1:
        expected = ["against interpolated anomalies -25.0%", "against optimal interpolation +20.0%"]
    assert [" ".join(line) for line in lines] == expected
    del rmse[OI]  # which large patches have not
    evaluation.print_summary(metrics, ["1991", "1992"], Path("fill.png"))
    left = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if "against" in line]
    assert left == expected[::2]


def test_a_run_that_diverged_ends_with_an_error_after_its_summary(capsys) -> None:
    rmse = {"climatology": {"m/s": 2.0}, "U-Net": {"m/s": float("nan")}}
    metrics = {"rmse": rmse, "steps": 4, "seconds": 1, "peak_memory_gb": 1}
    with pytest.raises(evaluation.DataError, match=r"--learning-rate: .* not finite"):
        evaluation.print_summary(metrics, ["1991", "1992"], Path("fill.png"))
    assert "picture: fill.png" in capsys.readouterr().out
