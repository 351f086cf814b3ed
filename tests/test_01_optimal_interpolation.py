"""Optimal interpolation: right where the answer is known, nearly as good where it estimates, computed once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import book
import numpy as np
import pytest
import xarray as xr
from scipy.interpolate import griddata

with book.rooms("01_setup"):
    import oi_baseline
    import optimal_interpolation as oi
    import train

ROWS, COLUMNS, SIZE, TIMES = 20, 40, 16, 160
SMALL = ["--patch-size", "16"]
UNIT = "m/s"


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


# ------------------------------------------------------------------------------ computed once, and kept


def patches(*flags: str) -> tuple[train.Patches, train.Patches]:
    """Those to take the covariance from, and those of the test, of the winds."""
    training, _, test = train.make_patches(train.parse_arguments([*SMALL, *flags]))
    return training, test


@pytest.fixture(scope="module")
def winds() -> tuple[train.Patches, train.Patches]:
    return patches()


def test_on_the_winds_it_is_ahead_of_linear_interpolation(winds, tmp_path: Path) -> None:
    (rmse,) = oi_baseline.oi_baseline(*winds, tmp_path).values()
    assert rmse[UNIT] < 0.9 * train.baselines(winds[1])[train.RIVAL][UNIT]


def test_the_second_run_reads_what_the_first_has_kept(
    winds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    first = oi_baseline.oi_baseline(*winds, tmp_path)
    assert "s for 96 patches, this once" in capsys.readouterr().out
    monkeypatch.setattr(oi_baseline, "fill", None)  # which it would call
    assert oi_baseline.oi_baseline(*patches(), tmp_path) == first
    assert capsys.readouterr().out == ""


OTHERS = {
    "another split": ["--train-times", "1982", "1988"],
    "other test times": ["--test-times", "1991", "1991"],
    "other variables": ["--variables", "northward_wind", "eastward_wind"],
    "another patch size": ["--patch-size", "20"],
}


@pytest.mark.parametrize("change", [*OTHERS, "other values", "fewer patches", "another method"])
def test_another_split_or_store_or_method_is_computed_anew(
    change: str, winds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = oi_baseline.checksum(*winds)
    training, test = patches(*OTHERS.get(change, []))
    if change == "other values":
        training.anomalies[0, 0, 0, 0] += 1e-3
    elif change == "fewer patches":
        test.batch_size -= 1
    elif change == "another method":
        other = tmp_path / "optimal_interpolation.py"
        other.write_text(Path(oi_baseline.optimal_interpolation.__file__).read_text() + "\n")
        monkeypatch.setattr(oi_baseline.optimal_interpolation, "__file__", str(other))
    assert oi_baseline.checksum(training, test) != before


BROKEN = ['{"m/s": 0}', '{"m/s": -3}', '{"m/s": 1' + 400 * "0" + "}", 100_000 * "["]


@pytest.mark.parametrize("text", ["", '{"m/s": 0.9', '{"K": 0.9}', '{"m/s": NaN}', "[0.9]", "\x00", *BROKEN])
def test_a_corrupt_file_is_computed_anew_with_a_note(
    text: str, winds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    training, test = winds
    monkeypatch.setattr(test, "batch_size", 4)
    whole = oi_baseline.oi_baseline(training, test, tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    path.write_text(text)
    capsys.readouterr()
    assert oi_baseline.oi_baseline(training, test, tmp_path) == whole
    assert f"{path.name} cannot be used" in capsys.readouterr().out
    assert path.read_bytes() == good


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def die(path: Path, text: str) -> None:
        write(path, text[:4])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", die)
        oi_baseline.keep(tmp_path / "kept.json", {UNIT: 0.9})
    assert not (tmp_path / "kept.json").exists()


def test_two_processes_at_once_write_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write = f"import oi_baseline, pathlib; path = pathlib.Path({str(path)!r})\n"
    write += "for turn in range(500): oi_baseline.keep(path, dict.fromkeys(map(str, range(300)), {number}))"
    command = [sys.executable, "-c"]
    quiet = {"cwd": book.ROOT / "01_setup", "stdout": subprocess.DEVNULL}
    processes = [subprocess.Popen([*command, write.replace("{number}", number)], **quiet) for number in "12"]
    found = set()
    while any(process.poll() is None for process in processes):
        if path.exists():
            rmse = json.loads(path.read_text())
            assert len(rmse) == 300
            found.add(rmse["0"])
    assert [process.returncode for process in processes] == [0, 0]
    assert found == {1, 2}
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_place_to_keep_it_the_run_goes_on(
    winds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    training, test = winds
    monkeypatch.setattr(test, "batch_size", 4)
    (tmp_path / "file").touch()
    assert oi_baseline.oi_baseline(training, test, tmp_path / "file/folder")
    assert "; the next run computes it again" in capsys.readouterr().out


def test_masked_cells_change_nothing(tmp_path: Path) -> None:
    """They are never seen, and in no covariance of cells that are."""
    dataset = xr.load_dataset(train.STORE).drop_encoding()
    dataset.eastward_wind[:, 20:44, 30:60] = np.nan
    dataset.to_netcdf(tmp_path / "masked.nc")
    training, test = patches("--store", str(tmp_path / "masked.nc"))
    assert not training.valid.all()
    rmse = oi_baseline.oi_baseline(training, test, tmp_path / "one")
    for part in (training, test):
        part.anomalies[:, :, ~training.valid] = 1e3
    assert oi_baseline.oi_baseline(training, test, tmp_path / "other") == rmse


def test_large_patches_have_no_optimal_interpolation(
    winds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(oi_baseline, "MOST_CELLS", 15 * 15)
    assert oi_baseline.oi_baseline(*winds, tmp_path) == {}
    assert "left out" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
