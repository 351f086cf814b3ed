"""Optimal interpolation of a store: by the covariance of its training times, once, and without stopping a run."""

import re
from pathlib import Path

import evaluation
import interpolator as interpolating
import numpy as np
import oi_baseline
import optimal_interpolation
import pytest
import xarray as xr
import zarr
from errors import DataError
from made_up_winds import (
    COLUMNS,
    ROWS,
    SIZE,
    flags_for,
    make_datamodule,
    make_winds,
    with_land,
    with_moving_gaps,
    write,
)
from oi_baseline import OI

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
TRAINED = 73  # times of the first two years


def smooth_winds() -> xr.Dataset:
    """Neighbours vary together, over some 3 rows and 5 columns, also across the seam."""
    winds = make_winds()
    waves = np.hypot(np.fft.fftfreq(ROWS)[:, None] * 3, np.fft.fftfreq(COLUMNS) * 5)
    for name, values in winds.data_vars.items():
        smoothed = np.fft.ifft2(np.fft.fft2(values) * np.exp(-((4 * waves) ** 2))).real
        winds[name] = values.dims, (10 * smoothed).astype("float32"), values.attrs
    return winds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stores") / "winds", smooth_winds())


def made(store: Path, *flags: object, **how):
    """The datamodule of a run on the store that is judged by few patches."""
    return make_datamodule(flags_for(store, "--eval-samples", 8, *flags, **how))


def baselines(module, folder: Path) -> dict:
    return evaluation.baselines(module.data, module.test, folder)


def interpolator_of(module) -> interpolating.Interpolator:
    data = module.data
    return interpolating.make_interpolator(data.reader, data.training, data.climatology, SIZE)


# ---------------------------------------------------------------------------------- the covariance


LATER = [
    "--train-times",
    "1983",
    "1984",
    "--validation-times",
    "1985-01",
    "1985-06",
    "--test-times",
    "1985-07",
    "1985",
]


def test_it_has_the_anomalies_of_training_times(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the store's first."""
    monkeypatch.setattr(interpolating, "MOST_TIMES", 60)
    module = made(store, *LATER)
    data = module.data
    interpolator = interpolator_of(module)
    winds = xr.open_zarr(store)[["u", "v"]].sel(time=slice("1983", "1984")).load()
    chosen = interpolating.sample_times(data.reader, data.training, MAP_BYTES)
    assert len(chosen) == 60 < winds.time.size
    winds = winds.isel(time=chosen).to_dataarray()
    mean = data.climatology.mean[winds.time.dt.month.values - 1]
    expected = (winds.values.swapaxes(0, 1) - mean) / data.climatology.std[:, None, None]
    np.testing.assert_allclose(interpolator.anomalies, expected, atol=1e-6)
    assert interpolator.anomalies.dtype == "float32"
    assert interpolator.wraps


MAP_BYTES = 2 * ROWS * COLUMNS * 4
LIMITS = [
    (1, {}, TRAINED, TRAINED),
    (1, {"MOST_TIMES": 30}, 30, 30),
    (8, {"MOST_TIMES": 30}, 30, 10),
    (40, {"MOST_TIMES": 20}, 20, 2),
    (8, {"MOST_READ": 3 * 8 * MAP_BYTES}, 24, 3),
    (8, {"MOST_READ": 1}, 8, 1),
    (8, {"MOST_BYTES": 60 * MAP_BYTES}, 60, 10),
]


@pytest.mark.parametrize(("chunk", "limits", "most", "chunks"), LIMITS)
def test_its_sample_is_spread_over_as_many_chunks_as_may_be_read(
    chunk: int, limits: dict, most: int, chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the first times, which are of one season; the same in every run."""
    for name, value in ({"LEAST_TIMES": 0} | limits).items():
        monkeypatch.setattr(interpolating, name, value)
    data = made(write(tmp_path / "winds", make_winds(), (chunk, ROWS, COLUMNS))).data
    times, again = (interpolating.sample_times(data.reader, data.training, MAP_BYTES) for _ in range(2))
    np.testing.assert_array_equal(times, again)
    assert (np.diff(times) > 0).all()
    assert 0.6 * most <= len(times) <= most
    assert len(np.unique(times // chunk)) == chunks
    if "MOST_READ" not in limits:
        assert times[-1] - times[0] > 0.8 * TRAINED


def test_a_sample_that_memory_makes_too_small_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one of all training times, however few."""
    data = made(store).data
    monkeypatch.setattr(interpolating, "MOST_BYTES", 20 * MAP_BYTES)
    with pytest.raises(DataError, match=r"only 20 times fit in .* of memory, and a covariance needs 60"):
        interpolating.sample_times(data.reader, data.training, MAP_BYTES)
    months = ["--train-times", "1982-01", "1982-06", "--validation-times", "1983-01", "1983-06"]
    few = made(store, *months, "--test-times", "1984-01", "1984-06").data
    assert len(few.training.dates) < 20
    assert len(interpolating.sample_times(few.reader, few.training, MAP_BYTES)) == len(few.training.dates)


def test_a_patch_is_filled_by_the_covariance_of_its_own_rows(store: Path) -> None:
    """Wherever it begins, also across the seam: bands of rows are those of a table of all rows."""
    interpolator = interpolator_of(made(store))
    table = optimal_interpolation.zonal_covariance(interpolator.anomalies, True, SIZE)
    seen = np.random.default_rng(0).random((SIZE, SIZE)) < 0.4
    for row, column in ((0, 0), (3, COLUMNS - 5), (ROWS - SIZE, 12)):
        columns = np.arange(column, column + SIZE) % COLUMNS
        patch = interpolator.anomalies[:, :, row : row + SIZE][..., columns]
        found = interpolator.fill(row, column, seen, patch[7])
        for number, values in enumerate(patch[7]):
            rows = slice(row, row + SIZE)
            zonal = table[number, rows, rows]
            covariance = optimal_interpolation.hybrid_covariance(patch[:, number], zonal, seen)
            expected = optimal_interpolation.interpolate(covariance, seen, values[seen])
            np.testing.assert_allclose(found[number, ~seen], expected, atol=1e-4)
        assert not found[:, seen].any()


def test_a_band_holds_the_rows_of_every_patch_that_begins_in_it() -> None:
    """On a map that is much higher than a patch: the table of all rows, cut."""
    anomalies = np.random.default_rng(0).normal(size=(6, 1, 30, 12)).astype("float32")
    interpolator = interpolating.Interpolator(anomalies, True, 4)
    table = optimal_interpolation.zonal_covariance(anomalies, True, 4)
    for row in range(27):
        rows = slice(row, row + 4)
        np.testing.assert_allclose(interpolator.zonal(row), table[:, rows, rows], atol=1e-6)


def test_an_area_does_not_wrap(tmp_path: Path) -> None:
    area = smooth_winds().isel(longitude=slice(30))
    assert not interpolator_of(made(write(tmp_path / "winds", area))).wraps


# ------------------------------------------------------------------------------------------ the row


def test_where_neighbours_vary_together_it_is_ahead_of_every_simple_fill(store: Path, tmp_path: Path) -> None:
    rmse = baselines(made(store), tmp_path)
    best = min(row["m/s"] for name, row in rmse.items() if name != OI)
    assert rmse[OI]["m/s"] < 0.8 * best


def test_the_second_run_reads_what_the_first_has_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    first = baselines(made(store), tmp_path)
    printed = capsys.readouterr().out
    assert "s for 8 patches, this once" in printed and "kept in " in printed
    monkeypatch.setattr(oi_baseline, "make_interpolator", None)  # which it would call
    assert baselines(made(store, "--seed", 5, "--max-steps", 7), tmp_path) == first
    assert capsys.readouterr().out == ""


OTHERS = {
    "another split": ["--train-times", "1982", "1982"],
    "other test times": ["--test-times", "1985-07", "1985"],
    "fewer patches": ["--eval-samples", 7],
    "another patch size": ["--patch-size", 20],
}


@pytest.mark.parametrize("change", [*OTHERS, "other variables", "another method", "other values"])
def test_what_it_depends_on_is_in_the_name_of_its_file(
    change: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        oi_baseline, "fill", lambda data, size, samples, corners: (0 * s["target"] for s in samples)
    )
    kept = tmp_path / "rows"
    baselines(made(store), kept)
    baselines(made(store), kept)
    assert len(list(kept.iterdir())) == 1
    variables = ("v", "u") if change == "other variables" else ("u", "v")
    if change == "another method":
        other = tmp_path / "optimal_interpolation.py"
        other.write_text(Path(optimal_interpolation.__file__).read_text() + "\n")
        monkeypatch.setattr(optimal_interpolation, "__file__", str(other))
    if change == "other values":
        winds = smooth_winds()
        winds.u[-36:] += 1e-3  # the test year's
        store = write(tmp_path / "winds", winds)
    flags = OTHERS.get(change, [])
    if change == "another split":
        flags = [*flags, "--validation-times", "1983", "1983"]
    baselines(made(store, *flags, variables=variables), kept)
    assert len(list(kept.iterdir())) == 2


def test_land_and_clouds_are_in_no_covariance(tmp_path: Path) -> None:
    """What is absent is neither seen nor filled, and changes nothing elsewhere."""
    winds = with_moving_gaps(smooth_winds())
    module = made(write(tmp_path / "winds", winds), "--missing", "mask")
    interpolator = interpolator_of(module)
    absent = np.isnan(interpolator.anomalies)
    assert 0.05 < absent.mean() < 0.3
    rmse = baselines(module, tmp_path)
    best = min(row["m/s"] for name, row in rmse.items() if name != OI)
    assert rmse[OI]["m/s"] < 0.9 * best


def test_land_has_the_row_that_the_sea_alone_has(tmp_path: Path) -> None:
    """Under --missing refuse, too."""
    module = made(write(tmp_path / "winds", with_land(smooth_winds())))
    rmse = baselines(module, tmp_path)
    assert 0 < rmse[OI]["m/s"] < rmse["interpolated anomalies"]["m/s"]


def test_large_patches_have_none(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(interpolating, "MOST_CELLS", 15 * 15)
    assert OI not in baselines(made(store), tmp_path)
    assert (
        "note: optimal interpolation is left out: patches of 16 x 16 are too large for it"
        in capsys.readouterr().out
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "infinite", "too large for a product"])
def test_a_chunk_that_only_it_would_read_does_not_end_a_run(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Training may not have met it; what was trained is judged by the other rows."""
    path = write(tmp_path / "winds", smooth_winds(), fill_value=0.0)
    module = made(path)
    if damage == "missing":
        (path / "u/c/20/0/0").unlink()
    else:
        zarr.open_group(path)["u"][20, 3, 4] = np.inf if damage == "infinite" else 1e25
    rmse = baselines(module, tmp_path / "rows")
    assert OI not in rmse and len(rmse) == 4
    reason = "array must not contain infs" if "product" in damage else "u o[fn] "
    assert re.search(f"note: optimal interpolation is left out: {reason}", capsys.readouterr().out)


@pytest.mark.parametrize(
    "error", [np.linalg.LinAlgError("not positive definite"), ValueError("NaN"), MemoryError()]
)
def test_what_fails_in_it_does_not_end_a_run(
    error: Exception,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(interpolating, "interpolate", fail)
    assert OI not in baselines(made(store), tmp_path)
    reason = str(error) or "MemoryError"
    assert f"note: optimal interpolation is left out: {reason}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
