"""Optimal interpolation: right where the answer is known, and nearly as good where it estimates."""

import numpy as np
import optimal_interpolation as oi
import pytest
from scipy.interpolate import griddata

ROWS, COLUMNS, SIZE, TIMES = 20, 40, 16, 160


def swaths(size: int = SIZE) -> np.ndarray:
    """Two slanted stripes, four cells wide, with six between them."""
    row, column = np.mgrid[:size, :size]
    return (column + row // 5) % 10 < 4


def true_covariance(wraps: bool) -> np.ndarray:
    """Of the cells of a map, (rows x columns, rows x columns): the same at each longitude."""
    row, column = (cells.ravel() for cells in np.mgrid[:ROWS, :COLUMNS])
    east = abs(np.subtract.outer(column, column))
    east = np.minimum(east, COLUMNS - east) if wraps else east
    north = abs(np.subtract.outer(row, row))
    return (1 + north / 2) * np.exp(-north / 2) * (1 + east / 3) * np.exp(-east / 3)


def draw(covariance: np.ndarray, times: int, seed: int) -> np.ndarray:
    """Maps of that covariance, (times, 1, rows, columns)."""
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(covariance)))
    maps = np.random.default_rng(seed).normal(size=(times, len(covariance))) @ root.T
    return maps.reshape(times, 1, ROWS, COLUMNS)


# ---------------------------------------------------------------------------------------- the estimate


def test_it_is_what_a_plain_solve_gives() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(12, 20))
    covariance = root @ root.T
    seen = rng.random((3, 4)) < 0.5
    cells = seen.ravel()
    values = rng.normal(size=cells.sum())
    noise = 0.1 * covariance[cells][:, cells].trace() / cells.sum() * np.eye(cells.sum())
    weights = np.linalg.solve(covariance[cells][:, cells] + noise, values)
    expected = covariance[~cells][:, cells] @ weights
    found = oi.interpolate(covariance[cells], seen, values, noise=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_its_error_is_the_least_that_theory_allows_and_another_covariances_is_larger() -> None:
    """Fields and noise are drawn from what it is given: the mean squared error is the posterior variance."""
    seen, noise, number = swaths(), 0.1, 3000
    cells = seen.ravel()
    row, column = (cells.ravel() for cells in np.mgrid[:SIZE, :SIZE])
    distance = np.hypot(np.subtract.outer(row, row), np.subtract.outer(column, column))
    true, other = np.exp(-distance / 5), np.exp(-distance / 1)
    rng = np.random.default_rng(0)
    fields = rng.normal(size=(number, SIZE**2)) @ np.linalg.cholesky(true).T
    observed = fields[:, cells] + noise**0.5 * rng.normal(size=(number, cells.sum()))

    def error(covariance: np.ndarray) -> float:
        filled = [oi.interpolate(covariance[cells], seen, values, noise) for values in observed]
        return ((np.array(filled) - fields[:, ~cells]) ** 2).mean()

    gained = true[~cells][:, cells] @ np.linalg.inv(true[cells][:, cells] + noise * np.eye(cells.sum()))
    posterior = true[~cells][:, ~cells] - gained @ true[cells][:, ~cells]
    theory = posterior.trace() / (~cells).sum()
    assert error(true) == pytest.approx(theory, rel=0.02)
    assert error(other) > 1.2 * theory


@pytest.mark.filterwarnings("error")
def test_where_nothing_is_seen_or_nothing_ever_changes_it_gives_the_mean() -> None:
    nothing, seen = np.zeros((4, 4), bool), np.eye(4, dtype=bool)
    assert oi.interpolate(np.zeros((0, 16)), nothing, np.zeros(0)).tolist() == [0] * 16
    assert oi.interpolate(np.zeros((4, 16)), seen, np.zeros(4)).tolist() == [0] * 12


# -------------------------------------------------------------------------------------- the covariance


@pytest.mark.parametrize("wraps", [True, False])
def test_the_zonal_covariance_is_that_of_a_plain_sum(wraps: bool) -> None:
    """Of all pairs with a lag, also across the seam of a map that wraps; over the root of both rows' counts."""
    anomalies = np.random.default_rng(0).normal(size=(5, 2, 3, 12))
    anomalies[2, 1, 1, 3:7] = np.nan
    anomalies[:, :, 2, :8] = np.nan
    table = oi.zonal_covariance(anomalies, wraps, 4)
    filled, present = np.nan_to_num(anomalies), np.isfinite(anomalies)
    assert table.shape == (2, 3, 3, 7)
    for v, i, j, lag in np.ndindex(table.shape):
        total = 0.0
        for column in range(12):
            other = column + lag - 3
            if wraps or 0 <= other < 12:
                total += filled[:, v, i, column] @ filled[:, v, j, other % 12]
        counts = present[:, v, i].sum() * present[:, v, j].sum()
        assert table[v, i, j, lag] == pytest.approx(total / counts**0.5, abs=1e-6)


@pytest.mark.parametrize("case", ["an area", "a mask"])
def test_the_zonal_covariance_of_an_area_or_a_mask_is_a_covariance(case: str) -> None:
    """No eigenvalue is negative. Over the number of pairs, as is unbiased, the least of both is."""
    anomalies = draw(true_covariance(True), 20, seed=1)
    if case == "a mask":
        anomalies[:, :, 5:12, 4:30] = np.nan
    table = oi.zonal_covariance(anomalies, case == "a mask", SIZE)[0, :SIZE, :SIZE]
    everything = oi.spread_zonal(table, np.ones((SIZE, SIZE), bool))
    np.testing.assert_allclose(everything, everything.T, atol=1e-6)
    assert np.linalg.eigvalsh(everything)[0] > -1e-5


def test_the_hybrid_covariance_is_that_of_a_plain_sum() -> None:
    """For each pair of a seen cell and any cell: the tapered covariance of the sample, and the zonal one."""
    rng = np.random.default_rng(0)
    anomalies, zonal, seen = rng.normal(size=(6, 4, 5)), rng.normal(size=(4, 4, 9)), rng.random((4, 5)) < 0.5
    anomalies[rng.random(anomalies.shape) < 0.2] = np.nan
    counts, present = np.isfinite(anomalies).sum(axis=0), np.nan_to_num(anomalies)
    found = oi.hybrid_covariance(anomalies, zonal, seen, local_share=0.7)
    expected = np.empty_like(found)
    for number, (i, c) in enumerate(np.argwhere(seen)):
        for j, d in np.ndindex(4, 5):
            distance = 3**0.5 * np.hypot((i - j) / oi.TAPER_ROWS, (c - d) / oi.TAPER_COLUMNS)
            sample = present[:, i, c] @ present[:, j, d] / np.sqrt(counts[i, c] * counts[j, d])
            sample *= (1 + distance) * np.exp(-distance)
            expected[number, 5 * j + d] = 0.7 * sample + 0.3 * zonal[i, j, 4 + d - c]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wraps", [True, False], ids=["a globe", "an area"])
def test_with_an_estimated_covariance_it_is_nearly_as_good_as_with_the_true_one(wraps: bool) -> None:
    """On fields of a known covariance. Linear interpolation is far behind."""
    covariance = true_covariance(wraps)
    training, test = draw(covariance, TIMES, seed=1), draw(covariance, 60, seed=2)
    zonal = oi.zonal_covariance(training, wraps, SIZE)
    seen, squares = swaths(), dict.fromkeys(("true", "zonal", "hybrid", "linear"), 0.0)
    known, holes = np.argwhere(seen), np.argwhere(~seen)
    cells = (np.arange(SIZE)[:, None] * COLUMNS + np.arange(SIZE)).ravel()
    patches = training[:, 0, :SIZE, :SIZE]
    rows = zonal[0, :SIZE, :SIZE]
    given = {
        "true": covariance[np.ix_(cells, cells)][seen.ravel()],
        "zonal": oi.hybrid_covariance(patches, rows, seen, local_share=0),
        "hybrid": oi.hybrid_covariance(patches, rows, seen),
    }
    for field in test[:, 0, :SIZE, :SIZE]:
        filled = {name: oi.interpolate(one, seen, field[seen]) for name, one in given.items()}
        linear = griddata(known, field[seen], holes)
        filled["linear"] = np.where(np.isnan(linear), griddata(known, field[seen], holes, "nearest"), linear)
        for name, fill in filled.items():
            squares[name] += ((fill - field[~seen]) ** 2).sum()
    rmse = {name: (total / squares["true"]) ** 0.5 for name, total in squares.items()}
    assert 1 <= rmse["zonal"] < (1.03 if wraps else 1.08)
    assert 1 <= rmse["hybrid"] < 1.05
    assert rmse["linear"] > 1.3
