"""Patches of the winds: where they may be, and what is in their batches."""

import numpy as np
import pytest
import xarray as xr
from climatology import Climatology
from data import Grid, PatchDataset, PatchMaker
from errors import DataError
from fields import split_times
from made_up_winds import COLUMNS, LAND, ROWS, SIZE, TRAINING, make_winds, with_land

LATITUDE, LONGITUDE = np.linspace(-85.5, 85.5, ROWS), 9.0 * np.arange(COLUMNS)
STD = np.float32([2, 3])

GRIDS = {  # longitudes, and in how many columns a patch may begin
    "global from 180 degrees west": (LONGITUDE - 180, COLUMNS),
    "global in single precision": ((0.1 * np.arange(3600)).astype("float32"), 3600),
    "a column short": (LONGITUDE[:-1], COLUMNS - SIZE),
    "across Greenwich": (np.arange(-90.0, 90.0, 9), 20 - SIZE + 1),
}


@pytest.mark.parametrize("case", GRIDS)
def test_patches_may_begin_wherever_they_fit(case: str) -> None:
    """On a global map also where they cross the seam."""
    longitude, columns = GRIDS[case]
    assert Grid(LATITUDE, longitude).patch_space(SIZE) == (ROWS - SIZE + 1, columns, SIZE)


@pytest.mark.parametrize(
    ("size", "rows", "said"),
    [
        (24, 23, "--patch-size 24: {grid}; give a multiple of 4 from 16 to 20"),
        (18, 23, "--patch-size 18: {grid}; give a multiple of 4 from 16 to 20"),
        (16, 12, "{grid}; give a store of at least 16 x 16"),
    ],
)
def test_a_patch_fits_the_grid_and_can_be_halved_twice(size: int, rows: int, said: str) -> None:
    grid = Grid(np.arange(float(rows)), LONGITUDE)
    with pytest.raises(DataError, match=f"^{said.format(grid=f'the grid is {rows} x {COLUMNS}')}"):
        grid.patch_space(size)


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return with_land(make_winds())[["u", "v"]]


class Memory:
    """Reads winds in memory."""

    def __init__(self, winds: xr.Dataset):
        self.values = winds.to_dataarray().transpose("time", "variable", ...).values

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        return np.stack([self.values[at["time"]][:, at["latitude"]][..., at["longitude"]] for at in boxes])


@pytest.fixture
def dataset(winds: xr.Dataset) -> PatchDataset:
    """Patches to train on, four in a batch, and a climatology of chance where there is no land."""
    mean = np.random.default_rng(1).normal(size=(12, 2, ROWS, COLUMNS)).astype("float32")
    mean[:, 0, *LAND] = np.nan
    (period,) = split_times(winds.time, {"--train-times": TRAINING})
    maker = PatchMaker(Grid(LATITUDE, LONGITUDE), period, Climatology(mean, STD, ["u", "v"]), SIZE)
    return PatchDataset(maker, Memory(winds), batch_size=4, seed=0)


def test_a_batch_is_that_of_a_plain_sum(dataset: PatchDataset, winds: xr.Dataset) -> None:
    """Anomalies in units of their spread, seen under the swaths, nothing in masked cells, weights cos(latitude)."""
    places = [(3, k) for k in range(60)]
    crossing = masked = 0
    for place, sample in zip(places, dataset.__getitems__(places)):
        time, row, column, swath = dataset.patch(*place)
        rows, columns = np.arange(row, row + SIZE), np.arange(column, column + SIZE) % COLUMNS
        now = winds.sel(time=dataset.maker.period.dates[time])
        anomaly = now.to_dataarray().values - dataset.maker.mean[now.time.dt.month.item() - 1]
        anomaly = anomaly[:, rows][..., columns] / STD[:, None, None]
        valid = ~np.isnan(anomaly[0])
        unseen = valid & ~swath
        cosine = np.cos(np.deg2rad(LATITUDE[rows]))[:, None]
        assert {array.dtype.name for array in sample.values()} == {"float32"}
        np.testing.assert_allclose(sample["target"], np.where(valid, anomaly, 0), atol=1e-5)
        np.testing.assert_array_equal(sample["input"], [*(sample["target"] * swath), valid & swath])
        np.testing.assert_array_equal(sample["unseen"], [unseen])
        np.testing.assert_allclose(sample["weight"], [cosine * unseen], atol=1e-6)
        crossing += column > COLUMNS - SIZE
        masked += not valid.all()
    assert min(crossing, masked) > 10


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "NaN: a value or a chunk is missing; if the data have gaps, give --missing mask"),
        (-np.inf, "infinity, or netCDF's mark of no value; declare it"),
        (9.96921e36, "infinity, or netCDF's mark of no value; declare it"),
        (None, "NaN, because its month has no climatology; give --train-times"),
    ],
)
def test_a_value_that_is_not_finite_is_named_by_variable_and_date(
    value: float | None, reason: str, dataset: PatchDataset
) -> None:
    """Among samples that are whole; where the cell is masked, it is in order."""
    if value is None:
        dataset.maker.mean[1, 1] = np.nan
    else:
        dataset.reader.values[40, 1] = value
        dataset.reader.values[44, 0, *LAND] = value
    n = len(dataset.maker.period.dates)
    places = {dataset.patch(*divmod(i, 4)).time: divmod(i, 4) for i in range(n)}
    with pytest.raises(DataError, match=f"v on 1983-02-05T00:00: {reason}"):
        dataset.__getitems__([places[39], places[44], places[40]])
    assert len(dataset.__getitems__([places[39], places[44]])) == 2


def test_netcdfs_mark_is_found_also_where_values_vary_by_billions(
    dataset: PatchDataset, winds: xr.Dataset
) -> None:
    """As the heat of an ocean does: over its standard deviation the mark is no longer absurd."""
    dataset.maker.std = np.full_like(dataset.maker.std, 1e9)
    dataset.reader.values[40, 1] = 9.96921e36
    places = {dataset.patch(*divmod(i, 4)).time: divmod(i, 4) for i in range(len(dataset.maker.period.dates))}
    with pytest.raises(DataError, match="v on 1983-02-05T00:00: infinity, or netCDF's mark"):
        dataset[places[40]]
