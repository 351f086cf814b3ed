"""Chapter 5: the rooms that read a store and make samples: as chapter 4's script, whatever the store looks like."""

import os
import pickle
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import book
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from runs import load

# A made-up store: every 10 days of four years, 9 degrees. The first two years are to train on.
ROWS, COLUMNS, SIZE = 20, 40, 16
SPANS = "--train-times 1982 1983 --validation-times 1984 1984 --test-times 1985 1985".split()
TRAINING = ("1982", "1983")
GAP = (slice(5, 9), slice(10, 18))  # rows and columns in which u has no value at any time
CHUNKS = {"time": 8, "latitude": ROWS, "longitude": 20}
OBJECTS = 2 * 2  # in which a block of the two winds is kept
PARTS = ("input", "target", "unseen", "weight")

thorough = pytest.mark.thorough
pytestmark = [  # of which train.py shows none, either
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global climatology, clock, data, errors, evaluation, fields, model, options, sampling, store
    global store_climatology, task
    with book.rooms("05_model_profiling"):
        import climatology
        import clock
        import data
        import errors
        import evaluation
        import fields
        import model
        import options
        import sampling
        import store
        import store_climatology
        import task

        yield


@pytest.fixture(scope="module")
def chapter_4() -> ModuleType:
    """Chapter 4's train.py."""
    return load("04_data_pipeline/train.py", "chapter_04_before_rooms")


@pytest.fixture(scope="module", autouse=True)
def apart(rooms: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sampled climatologies stay apart from a reader's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "OUTPUTS", tmp_path_factory.mktemp("outputs"))
        yield


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which sampled climatologies are kept during a test."""
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "kept")
    return tmp_path / "kept/climatology"


# ------------------------------------------------------------------------------ a made-up store


def make_winds() -> xr.Dataset:
    """The fields u and v, and a temperature, in memory."""
    time = xr.date_range("1982-01-01", "1985-12-31", freq="10D")
    latitude = np.linspace(-85.5, 85.5, ROWS)
    longitude = 9.0 * np.arange(COLUMNS)
    rng = np.random.default_rng(0)
    dims = ("time", "latitude", "longitude")
    winds = xr.Dataset(coords={"time": time, "latitude": latitude, "longitude": longitude})
    season = np.cos(2 * np.pi * winds.time.dt.dayofyear.values / 365)[:, None, None]
    for number, name in enumerate(("u", "v", "temperature")):
        noise = rng.normal(0, 2 + number, tuple(winds.sizes.values()))
        winds[name] = dims, (noise + 5 * season * np.cos(np.deg2rad(latitude))[:, None]).astype("float32")
    winds.temperature.attrs["units"] = "K"
    winds.u.attrs["units"] = winds.v.attrs["units"] = "m s**-1"
    winds.latitude.attrs["units"], winds.longitude.attrs["units"] = "degrees_north", "degrees_east"
    winds.u[:, *GAP] = np.nan
    return winds


def make_statistics(winds: xr.Dataset) -> xr.Dataset:
    """What make_store.py keeps of the training times of u and v, by plain sums."""
    months = winds[["u", "v"]].sel(time=slice(*TRAINING)).astype("float64").groupby("time.month")
    mean = months.mean()
    anomalies = months - mean
    valid = mean.notnull().any("month").to_dataarray().all("variable")
    for name in ("u", "v"):
        mean[name].attrs = {"std": float(anomalies[name].where(valid).std())}
    return mean.astype("float32")


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return make_winds()


@pytest.fixture(scope="module")
def statistics(winds: xr.Dataset) -> xr.Dataset:
    return make_statistics(winds)


def write(path: Path, winds: xr.Dataset, statistics: xr.Dataset | None = None, **how: object) -> Path:
    """Write a store, with the statistics of u and v if there are any, its metadata consolidated."""
    winds.to_zarr(path, **({"consolidated": True} | how))
    if statistics is not None:
        zarr_format = how.get("zarr_format", 3)
        group = f"statistics/u_v_{'_'.join(TRAINING)}"
        statistics.to_zarr(path, group=group, zarr_format=zarr_format, consolidated=False)
        zarr.consolidate_metadata(path)
    return path


@pytest.fixture(scope="module")
def folder(winds: xr.Dataset, statistics: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores: `whole` has statistics, `bare` has none, `shards` has chunks in shards."""
    folder = tmp_path_factory.mktemp("stores")
    chunks = {name: {"chunks": tuple(CHUNKS.values())} for name in winds.data_vars}
    write(folder / "whole", winds, statistics, encoding=chunks)
    write(folder / "bare", winds, encoding=chunks)
    shards = {name: each | {"shards": (16, ROWS, COLUMNS)} for name, each in chunks.items()}
    write(folder / "shards", winds[["u", "v"]], encoding={name: shards[name] for name in ("u", "v")})
    return folder


def reader_of(place: Path | str, *names: str, **how: object):
    """A reader of these variables; of u and v if none is named."""
    return store.FieldReader(store.Location(str(place), **how), list(names or ("u", "v")))


def opened(place: Path | str, *names: str) -> xr.Dataset:
    return reader_of(place, *names).open()


def flags_for(path: Path, names: tuple[str, ...] = ("u", "v")) -> list[str]:
    sizes = ["--patch-size", str(SIZE), "--batch-size", "4"]
    return ["--store", str(path), "--variables", *names, *SPANS, *sizes]


def make_data(path: Path, names: tuple[str, ...] = ("u", "v"), *flags: str):
    """The data module that train.py makes of a store."""
    parsed = options.parse_options("", [*flags_for(path, names), *flags])
    made = task.make_data(parsed, store.Location(str(path)))
    return task.make_datamodule(parsed, made, first_step=0)


def patches_of_chapter_4(chapter_4: ModuleType, path: Path, names: tuple[str, ...] = ("u", "v")) -> tuple:
    """Chapter 4's patches to train on, to validate on and to test on."""
    return chapter_4.make_patches(chapter_4.parse_arguments(flags_for(path, names)))


def assert_same(one: dict, other: dict) -> None:
    """The same arrays, to the bit and of the same type."""
    for name in PARTS:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


# ------------------------------------------------------------------------------ judged as in chapter 4


@pytest.fixture
def sampled_by_chapter_4(chapter_4: ModuleType, kept: Path, tmp_path: Path, monkeypatch) -> None:
    """make_store.py runs in this process, and both take samples of three times a month."""
    make_store = load("03_cloud_data/make_store.py", "make_store_for_rooms")
    monkeypatch.setattr(chapter_4, "run_make_store", lambda *flags: make_store.main(list(flags)))
    monkeypatch.setattr(chapter_4, "CLOUD", tmp_path / "cloud")
    monkeypatch.setitem(sys.modules, "train", chapter_4)
    for script in (make_store, store_climatology):
        monkeypatch.setattr(script, "TIMES_A_MONTH", 3)


def test_the_patches_that_judge_are_those_of_chapter_4(chapter_4, folder: Path) -> None:
    """Validation's and the test's: dates, corners, swaths and values, to the bit."""
    now = make_data(folder / "whole")
    _, *then = patches_of_chapter_4(chapter_4, folder / "whole")
    places = [(0, k) for k in (*range(30), options.Options().eval_samples - 1)]
    crossing = masked = 0
    for mine, theirs in zip((now.validation, now.test), then, strict=True):
        for place, one, other in zip(places, mine.__getitems__(places), theirs.__getitems__(places)):
            assert_same(one, other)
            patch = mine.patch(*place)
            assert mine.maker.period.dates[patch.time] == theirs.times[theirs.sample(*place)[0]]
            crossing += patch.column > COLUMNS - SIZE
            masked += (one["input"][-1] + one["unseen"][0] == 0).any()
        assert mine.maker.std.dtype == theirs.std.dtype
    assert min(crossing, masked) > 10


@pytest.mark.parametrize(
    ("names", "samples"),
    [
        (("temperature", "v", "u"), 12),
        pytest.param(("v",), 96, marks=thorough),
        pytest.param(("u", "v"), 96, marks=thorough),
    ],
)
def test_baselines_are_those_of_chapter_4(
    names: tuple, samples: int, chapter_4, folder: Path, sampled_by_chapter_4: None, monkeypatch
) -> None:
    """In each unit, to the bit."""
    monkeypatch.setattr(chapter_4, "JUDGED_SAMPLES", samples)
    dataset = make_data(folder / "bare", names, "--eval-samples", str(samples)).test
    *_, then = patches_of_chapter_4(chapter_4, folder / "bare", names)
    units = fields.group_by_unit(opened(folder / "bare", *names), list(names))
    assert units == then.pools
    assert evaluation.baselines(dataset, units) == chapter_4.baselines(then)


def test_a_swath_is_that_of_chapter_4(chapter_4) -> None:
    """And so is what is drawn after it; several at once are several."""
    for size in (16, 64):
        for n in (1, 3):
            mine, theirs = (np.random.default_rng(size) for _ in range(2))
            for _ in range(50):
                masks = sampling.swath_masks(mine, n, size), chapter_4.swath_masks(theirs, n, size)
                np.testing.assert_array_equal(*masks)
            assert mine.random() == theirs.random()


def test_the_climatology_of_a_stores_statistics_is_that_of_chapter_4(chapter_4, folder: Path) -> None:
    now = make_data(folder / "whole").test.maker
    then, *_ = patches_of_chapter_4(chapter_4, folder / "whole")
    np.testing.assert_array_equal(now.mean, then.climatology)
    np.testing.assert_array_equal(now.std, then.std)
    np.testing.assert_array_equal(now.valid[0], then.valid)


# ------------------------------------------------------------------------------ climatology


def climatology_of(path: Path, *names: str):
    """The climatology of the training times, as train.py loads it."""
    reader = reader_of(path, *names)
    (training,) = fields.split_times(reader.open().time, {"--train-times": TRAINING})
    return load_climatology(reader, training, TRAINING)


def load_climatology(reader, training, span: tuple[str, str]):
    folder = options.OUTPUTS / "climatology"
    return store_climatology.load_climatology(reader, training, span=span, missing="refuse", folder=folder)


def assert_same_climatology(one, other) -> None:
    np.testing.assert_array_equal(one.mean, other.mean)
    np.testing.assert_array_equal(one.std, other.std)


def test_the_climatology_of_a_store_without_statistics_is_that_of_chapter_4(
    chapter_4, folder: Path, kept: Path, sampled_by_chapter_4: None, capsys
) -> None:
    """Of the same sample of the training times; it is kept in a file."""
    now = climatology_of(folder / "bare")
    (path,) = kept.glob("*.npz")
    assert path.name in capsys.readouterr().out
    then, *_ = patches_of_chapter_4(chapter_4, folder / "bare")
    np.testing.assert_allclose(now.mean, then.climatology, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(now.std, then.std.ravel(), rtol=1e-6)
    np.testing.assert_array_equal(now.valid, then.valid)
    of_all_times = climatology_of(folder / "whole")
    assert np.nanmax(np.abs(now.mean - of_all_times.mean)) > 0.1


def test_a_sample_of_all_times_is_the_climatology_of_all_times(folder: Path, kept: Path) -> None:
    """Masked cells have none, and are in no standard deviation."""
    sampled, whole = climatology_of(folder / "bare"), climatology_of(folder / "whole")
    np.testing.assert_allclose(sampled.mean, whole.mean, atol=1e-5)
    np.testing.assert_allclose(sampled.std, whole.std, rtol=1e-5)
    expected = np.ones((ROWS, COLUMNS), bool)
    expected[GAP] = False
    np.testing.assert_array_equal(sampled.valid, expected)
    np.testing.assert_array_equal(whole.valid, expected)


def test_a_climatology_is_sampled_once_for_each_store(
    folder: Path, winds: xr.Dataset, kept: Path, tmp_path: Path, monkeypatch
) -> None:
    """A second run takes the file. A store made anew in the same place, of another grid or values, has another."""
    path = shutil.copytree(folder / "bare", tmp_path / "store")
    first = climatology_of(path)
    compute = store_climatology.average_sample
    monkeypatch.setattr(store_climatology, "average_sample", lambda *_: pytest.fail("sampled again"))
    assert_same_climatology(climatology_of(path), first)

    shutil.rmtree(path)
    write(path, winds.isel(latitude=slice(2, None)))
    monkeypatch.setattr(store_climatology, "average_sample", compute)
    assert climatology_of(path).mean.shape == (12, 2, ROWS - 2, COLUMNS)
    assert len(list(kept.glob("*.npz"))) == 2

    shutil.rmtree(path)
    write(path, winds[["u", "v"]] + 1)
    np.testing.assert_allclose(climatology_of(path).mean, first.mean + 1, atol=1e-5)
    assert len(list(kept.glob("*.npz"))) == 3


def test_a_kept_climatology_fits_the_order_of_the_variables(folder: Path, kept: Path) -> None:
    """Else each wind would be told from the other's mean, and no error would say so."""
    first, second = climatology_of(folder / "bare", "u", "v"), climatology_of(folder / "bare", "v", "u")
    np.testing.assert_array_equal(second.mean, first.mean[:, ::-1])
    np.testing.assert_array_equal(second.std, first.std[::-1])


def test_statistics_fit_the_order_of_the_variables(folder: Path) -> None:
    first, second = climatology_of(folder / "whole", "u", "v"), climatology_of(folder / "whole", "v", "u")
    np.testing.assert_array_equal(second.mean, first.mean[:, ::-1])
    np.testing.assert_array_equal(second.std, first.std[::-1])


def test_of_two_ranks_that_need_a_climatology_one_samples_it(folder: Path, kept: Path, monkeypatch) -> None:
    """The other begins meanwhile, and waits for the file."""
    started, results, compute = [], [], store_climatology.average_sample

    def sample(*args):
        if not started:
            other = threading.Thread(target=lambda: results.append(climatology_of(folder / "bare")))
            started.append(other)
            other.start()
            other.join(timeout=0.2)  # it would sample by now, but for the lock
        else:
            started.append("again")
        return compute(*args)

    monkeypatch.setattr(store_climatology, "average_sample", sample)
    first = climatology_of(folder / "bare")
    started[0].join(timeout=60)
    assert len(started) == 1
    assert_same_climatology(results[0], first)
    assert len(list(kept.glob("*.npz"))) == 1


def test_months_without_a_training_time_have_no_climatology(folder: Path) -> None:
    """What is judged in such a month ends the run, with a remedy."""
    reader = reader_of(folder / "bare")
    span = ("1982-01", "1982-06")
    training, test = fields.split_times(
        reader.open().time, {"--train-times": span, "--test-times": ("1985", "1985")}
    )
    found = load_climatology(reader, training, span)
    assert np.isnan(found.mean[6:]).all()
    assert not np.isnan(found.mean[:6, :, found.valid]).any()
    grid = data.Grid(reader.open().latitude.values, reader.open().longitude.values)
    dataset = data.PatchDataset(data.PatchMaker(grid, test, found, SIZE), reader, 4, seed=0)
    with pytest.raises(errors.DataError, match=r"on 1985-(0[7-9]|1\d).*give --train-times"):
        dataset.__getitems__([(0, k) for k in range(30)])


def test_infinity_is_found_where_a_climatology_is_sampled(
    winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """Else the standard deviation would be infinite, and every anomaly 0."""
    infinite = winds[["u", "v"]].copy(deep=True)
    infinite.v[20, 3, 30] = np.inf
    write(tmp_path / "infinite", infinite)
    with pytest.raises(errors.DataError, match=f"infinity on {str(winds.time.values[20])[:16]}; replace it"):
        climatology_of(tmp_path / "infinite")
    assert not list(kept.glob("*.npz"))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("with_statistics", [True, False])
def test_a_variable_without_a_value_in_the_training_times_is_refused(
    with_statistics: bool, winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    empty = winds[["u", "v"]].copy()
    empty["v"] = empty.v.where(empty.time.dt.year > 1983)
    write(tmp_path / "empty", empty, make_statistics(empty) if with_statistics else None)
    with pytest.raises(errors.DataError, match="--train-times: no cell has values of all variables"):
        with warnings.catch_warnings(action="error"):
            climatology_of(tmp_path / "empty")
    assert not list(kept.glob("*.npz"))


@pytest.mark.parametrize("with_statistics", [True, False])
def test_a_variable_that_never_changes_is_refused(
    with_statistics: bool, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Else its anomalies would be divided by a standard deviation of 0."""
    constant = winds[["u", "v"]].copy()
    constant["v"] = xr.ones_like(constant.v)
    write(tmp_path / "constant", constant, make_statistics(constant) if with_statistics else None)
    with pytest.raises(errors.DataError, match="--variables v: in the training times it never differs"):
        climatology_of(tmp_path / "constant")


def test_statistics_of_another_tool_are_not_taken(
    winds: xr.Dataset, statistics: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """A group of the same name without standard deviations."""
    other = statistics.copy()
    other.v.attrs = {}
    write(tmp_path / "other", winds[["u", "v"]], other)
    climatology_of(tmp_path / "other")
    assert len(list(kept.glob("*.npz"))) == 1


def test_a_climatology_that_cannot_be_kept_is_an_error_with_a_remedy(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "file")
    with pytest.raises(errors.DataError, match=r"--climatology-dir \S+: .* cannot be kept: .*; give"):
        climatology_of(folder / "bare")


def test_a_climatology_that_is_kept_needs_no_writing_and_a_torn_one_is_computed_again(
    folder: Path, kept: Path, monkeypatch
) -> None:
    first = climatology_of(folder / "bare")
    (path,) = kept.glob("*.npz")
    with monkeypatch.context() as patch:  # as in a folder that can only be read
        patch.setattr(store_climatology, "FileLock", lambda _: pytest.fail("locked"))
        assert_same_climatology(climatology_of(folder / "bare"), first)
    path.write_bytes(path.read_bytes()[:500])
    assert_same_climatology(climatology_of(folder / "bare"), first)


def test_statistics_of_another_grid_are_refused(
    winds: xr.Dataset, statistics: xr.Dataset, tmp_path: Path
) -> None:
    few = winds[["u", "v"]].isel(time=slice(0, None, 8))
    write(tmp_path / "other", few, statistics.isel(latitude=slice(1, None)))
    with pytest.raises(errors.DataError, match="statistics/u_v_1982_1983: its grid differs"):
        climatology_of(tmp_path / "other")


def test_damaged_statistics_are_named(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder / "whole", tmp_path / "store")
    chunk = path / "statistics/u_v_1982_1983/v/c/0/0/0"
    chunk.write_bytes(chunk.read_bytes()[:500])
    with pytest.raises(errors.DataError, match=r"statistics/u_v_1982_1983: \S"):
        climatology_of(path)


# ------------------------------------------------------------------------------ any layout


def flipped(dim: str) -> Callable:
    return lambda winds: winds.isel({dim: slice(None, None, -1)})


def around(winds: xr.Dataset) -> xr.Dataset:
    """From 180 degrees west, and not from 0."""
    return winds.assign_coords(longitude=(winds.longitude + 180) % 360 - 180).sortby("longitude")


def in_no_order(winds: xr.Dataset) -> xr.Dataset:
    return winds.isel(longitude=np.random.default_rng(0).permutation(COLUMNS))


def first_again(winds: xr.Dataset) -> xr.Dataset:
    """With longitude 0 a second time, as 360."""
    first = winds.isel(longitude=[0])
    return xr.concat([winds, first.assign_coords(longitude=first.longitude + 360)], "longitude")


def whole_degrees(winds: xr.Dataset) -> xr.Dataset:
    """Of a type in which no difference is below 0."""
    return flipped("longitude")(winds.assign_coords(longitude=winds.longitude.astype("uint16")))


def all_of_these(winds: xr.Dataset) -> xr.Dataset:
    winds = flipped("latitude")(around(winds)).transpose(..., "longitude", "latitude")
    return winds.rename(latitude="lat", longitude="lon")


LAYOUTS = {  # what becomes of the dataset, and the columns by which its map begins later
    "time last": (lambda winds: winds.transpose("latitude", "longitude", ...), 0),
    "longitude before latitude": (lambda winds: winds.transpose(..., "longitude", "latitude"), 0),
    "from north to south": (flipped("latitude"), 0),
    "from east to west": (flipped("longitude"), 0),
    "from 180 degrees west": (around, COLUMNS // 2),
    "longitudes in no order": (in_no_order, 0),
    "the first column again": (first_again, 0),
    "whole degrees from east to west": (whole_degrees, 0),
    "in double precision": (lambda winds: winds.astype("float64"), 0),
    "known by units": (lambda winds: winds.rename(latitude="y", longitude="x"), 0),
    "a level of length one": (lambda winds: winds.expand_dims(height=[10.0], axis=1), 0),
    "all of these": (all_of_these, COLUMNS // 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_the_same_map(layout: str, winds: xr.Dataset) -> None:
    """Each value has the date and the place on Earth that it had, on sorted coordinates without a jump."""
    transform, shift = LAYOUTS[layout]
    expected = winds[["u", "v"]].isel(time=slice(3))
    found = fields.select_variables(transform(expected), ["u", "v"]).transpose(
        "time", "latitude", "longitude"
    )
    expected = expected.roll(longitude=-shift, roll_coords=True)
    longitude = found.longitude.values
    np.testing.assert_allclose(np.diff(longitude), 9)
    np.testing.assert_allclose(longitude % 360, expected.longitude % 360)
    for name in ("time", "latitude"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("u", "v"):
        np.testing.assert_array_equal(found[name], expected[name])


FEW = slice(None, None, 4)  # of the times: each read brings all of them
IN_THE_GATE = ("time last", "longitudes in no order", "in double precision")


@pytest.fixture(scope="module")
def plain(winds: xr.Dataset, statistics: xr.Dataset, tmp_path_factory: pytest.TempPathFactory):
    """The test's patches of few times, which lie in the store as in memory."""
    path = tmp_path_factory.mktemp("plain") / "store"
    return make_data(write(path, winds[["u", "v"]].isel(time=FEW), statistics)).test


@pytest.mark.parametrize(
    ("layout", "zarr_format"),
    [
        *((layout, 3) for layout in IN_THE_GATE),
        ("all of these", 2),
        *(pytest.param(layout, 3, marks=thorough) for layout in LAYOUTS if layout not in IN_THE_GATE),
    ],
)
def test_other_layouts_have_the_same_samples(
    layout: str, zarr_format: int, plain, winds: xr.Dataset, statistics: xr.Dataset, tmp_path: Path
) -> None:
    """Which samples there are is decided on the sorted map; their values, wherever they lie in the store."""
    transform, shift = LAYOUTS[layout]
    statistics = transform(statistics).squeeze()
    old = {"lat": "latitude", "lon": "longitude", "y": "latitude", "x": "longitude"}
    statistics = statistics.rename({name: old[name] for name in old if name in statistics.dims})
    stored = transform(winds[["u", "v"]].isel(time=FEW))
    write(tmp_path / "other", stored, statistics, zarr_format=zarr_format)
    other = make_data(tmp_path / "other").test
    places = [(0, k) for k in range(12)]
    patches = [other.patch(*place) for place in places]
    moved = [patch._replace(column=(patch.column + shift) % COLUMNS) for patch in patches]
    values = plain.reader.read_at_once([plain.maker.region(patch) for patch in moved])
    expected = plain.maker.make_batch([data.Sample(*each) for each in zip(moved, values)])
    for k, sample in enumerate(other.__getitems__(places)):
        assert_same(sample, {name: expected[name][k] for name in PARTS})
    crossing = [patch.column > COLUMNS - SIZE for patch in patches]
    assert 0 < sum(crossing) < len(crossing)


KNOWN_BY = {  # new names, and the attributes that say what they are
    "names": ({"time": "valid_time", "latitude": "Lat", "longitude": "LON"}, {}),
    "standard_name": (
        {"time": "instant", "latitude": "y", "longitude": "x"},
        {name: {"standard_name": name} for name in ("time", "latitude", "longitude")},
    ),
    "axis": (
        {"time": "instant", "latitude": "lat", "longitude": "lon"},
        {"time": {"axis": "T"}, "latitude": {"axis": "Y"}, "longitude": {"axis": "X"}},
    ),
    "units": (
        {"time": "t", "latitude": "y", "longitude": "x"},
        {"latitude": {"units": "degree_north"}, "longitude": {"units": "degrees_east"}},
    ),
}


@pytest.mark.parametrize("known_by", KNOWN_BY)
def test_dimensions_are_known_by_name_or_attribute(known_by: str, winds: xr.Dataset) -> None:
    names, attributes = KNOWN_BY[known_by]
    strange = winds.drop_attrs()
    for name, attrs in attributes.items():
        strange[name].attrs = attrs
    strange = strange.rename(names)
    if known_by == "names":  # as forecasts have: that of their start
        strange = strange.assign_coords(time=0)
    found = fields.select_variables(strange, ["u", "v"])
    xr.testing.assert_equal(found, winds[["u", "v"]])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([350, 355, 0, 5], [350, 355, 360, 365]),
        ([5, 0, 355, 350], [-10, -5, 0, 5]),
        ([-180, 170, -170, 175, 180 - 0.5], None),
        ([10.5, 30, 20], [10.5, 20, 30]),
    ],
    ids=["across Greenwich", "from east to west", "in no order across the date line", "in no order"],
)
def test_a_regions_longitudes_do_not_jump(given: list, expected: list | None) -> None:
    """The columns keep their values, and each its place on Earth."""
    shape = (2, 3, len(given))
    values = np.broadcast_to(np.array(given) % 360, shape)
    coords = {"time": [0, 1], "latitude": [3, 2, 1], "longitude": given}
    region = xr.Dataset({"u": (tuple(coords), values)}, coords)
    found = fields.select_variables(region, ["u"])
    longitude = found.longitude.values
    np.testing.assert_allclose(found.u[0, 0] - longitude % 360, 0)
    assert 0 < np.diff(longitude).min() <= np.diff(longitude).max() < 30
    assert found.latitude.values.tolist() == [1, 2, 3]
    if expected:
        np.testing.assert_allclose((longitude - expected) % 360, 0, atol=1e-9)


def twice(winds: xr.Dataset) -> xr.Dataset:
    """With a time that is there two times."""
    return xr.concat([winds, winds.isel(time=[3])], "time")


def staggered(winds: xr.Dataset) -> xr.Dataset:
    """Whose v lies on rows of its own."""
    v = winds.v.rename(latitude="lat").assign_coords(lat=winds.latitude.values + 1)
    return winds.drop_vars("v").assign(v=v)


def chunk_of_longitude_lost(winds: xr.Dataset) -> xr.Dataset:
    longitude = winds.longitude.values.copy()
    longitude[20:] = np.nan
    return winds.assign_coords(longitude=longitude)


def texts(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, "calm")


ON_GRID = "it is not in the store on time, latitude, longitude alone; there are"
REFUSED = {  # what becomes of the dataset, and what is said
    "two latitudes": (staggered, "latitude and lat both look like latitude; give --variables of one grid"),
    "texts": (
        lambda winds: winds.assign(v=winds.v.copy(data=texts(winds.v.shape))),
        r"--variables v: its type is <U4; give variables of numbers",
    ),
    "truth values": (lambda winds: winds.assign(v=winds.v > 0), "--variables v: its type is bool; give var"),
    "dates": (
        lambda winds: winds.assign(v=winds.v.astype("datetime64[s]")),
        r"--variables v: its type is datetime64\S*; give variables of numbers",
    ),
    "no time at all": (
        lambda winds: winds.isel(time=slice(0)),
        "--variables u: a dimension has length 0; give variables that have values",
    ),
    "a time twice": (
        twice,
        "time has a value twice: it was written twice, or a chunk .* missing; write it anew",
    ),
    "a chunk of longitude lost": (
        chunk_of_longitude_lost,
        "longitude has a value twice: .* chunk of it is missing",
    ),
    "no such variable": (lambda winds: winds.drop_vars("v"), rf"--variables v: {ON_GRID} u \(time, lat"),
    "no variable": (lambda winds: winds.drop_vars(["u", "v"]), f"--variables u: {ON_GRID} no variable"),
    "no latitude's values": (lambda winds: winds.drop_vars("latitude"), f"--variables u: {ON_GRID} u"),
    "one time": (lambda winds: winds.isel(time=[0]), f"--variables u: {ON_GRID} u"),
    "levels": (
        lambda winds: winds.assign(v=winds.v.expand_dims(level=[500, 850], axis=1)),
        rf"--variables v: {ON_GRID} u \(.*\); v \(time, level, latitude, longitude\)",
    ),
    "a map without time": (
        lambda winds: winds.assign(v=winds.v[0].drop_vars("time")),
        rf"--variables v: {ON_GRID} u \(.*\); v \(latitude, longitude\)",
    ),
    "a longitude of texts": (
        lambda winds: winds.assign_coords(longitude=[f"{degrees:g}E" for degrees in winds.longitude]),
        ".*longitude",
    ),
    "a latitude of texts": (
        lambda winds: winds.assign_coords(latitude=[f"{degrees:g}N" for degrees in winds.latitude]),
        ".*latitude",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_a_remedy(case: str, winds: xr.Dataset) -> None:
    change, message = REFUSED[case]
    dataset = change(winds[["u", "v"]].isel(time=slice(5)))
    with pytest.raises(errors.DataError) as refused:
        fields.select_variables(dataset, ["u", "v"])
    assert re.match(message, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Duplicate dimension names")
def test_a_variable_on_a_dimension_twice_is_refused(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "twice")
    for name in ("time", "latitude", "longitude"):
        group.create_array(name, data=np.arange(4.0), dimension_names=[name])
    dims = ["time", "time", "latitude", "longitude"]
    group.create_array("u", data=np.zeros((4, 4, 4, 4), "float32"), dimension_names=dims)
    with pytest.raises(errors.DataError, match=rf"--variables u: {ON_GRID} u \(time, time, latitude"):
        opened(tmp_path / "twice", "u")


def test_variables_on_other_dimensions_do_no_harm(winds: xr.Dataset) -> None:
    """Nor do coordinates of theirs that look like a dimension."""
    more = winds.assign(pressure=("lev", np.arange(3.0)), sites=("lat", np.arange(5.0)))
    more = more.assign_coords(lat=np.arange(5.0), lev=[1, 2, 3])
    found = fields.select_variables(more, ["v", "u"])
    assert set(found.variables) == {"u", "v", "time", "latitude", "longitude"}
    xr.testing.assert_equal(found.u, winds.u)


# ------------------------------------------------------------------------------ chunks and units


def test_units_are_the_groups_of_variables() -> None:
    """u and v are judged together, however the unit is spelt; a variable without one by itself."""
    units = {"u": "m s**-1", "t": "K", "v": "m s-1", "n": 1, "gust": "m/s", "q": None, "skin": "K"}
    dataset = xr.Dataset({name: ("time", [0.0], {"units": unit}) for name, unit in units.items()})
    del dataset.q.attrs["units"]
    groups = fields.group_by_unit(dataset, list(units))
    assert groups == {"m/s": [0, 2, 4], "K": [1, 6], "1": [3], "q": [5]}
    assert fields.group_by_unit(dataset, ["v", "u"]) == {"m/s": [0, 1]}


CHUNKED = {  # order of the dimensions, chunk, shard, name of time, its attributes
    "plain": ("time latitude longitude", (8, 20, 20), None, "time", {}),
    "shards": ("time latitude longitude", (4, 20, 20), (16, 20, 40), "time", {}),
    "longitude before latitude": ("time longitude latitude", (6, 40, 20), None, "time", {}),
    "time last": ("latitude longitude time", (20, 40, 3), None, "time", {}),
    "time known by its axis": ("time latitude longitude", (8, 20, 20), None, "instant", {"axis": "T"}),
    "time last in shards, known by its standard_name": (
        "longitude latitude time",
        (40, 20, 5),
        (40, 20, 10),
        "instant",
        {"standard_name": "time"},
    ),
}


@pytest.mark.parametrize("case", CHUNKED)
def test_the_times_of_a_chunk_are_found(case: str, winds: xr.Dataset, tmp_path: Path) -> None:
    """Of the larger chunk, if variables have different ones; of the chunk inside a shard."""
    order, chunks, shards, name, attrs = CHUNKED[case]
    stored = winds.isel(time=slice(10)).transpose(*order.split())
    stored.time.attrs = attrs
    of_one_time = tuple(size if size >= 20 else 1 for size in chunks)
    encoding = {name: {"chunks": of_one_time} for name in ("u", "v", "temperature")}
    encoding["u"] = {"chunks": chunks} | ({"shards": shards} if shards else {})
    write(tmp_path / "store", stored.rename(time=name), encoding=encoding)
    expected = chunks[order.split().index("time")]
    for names, times in ((["u", "v", "temperature"], expected), (["v", "temperature"], 1)):
        reader = reader_of(tmp_path / "store", *names)
        reader.open()
        assert reader.times_per_chunk == times


def test_fields_that_are_in_no_store_have_one_time_a_chunk(winds: xr.Dataset) -> None:
    assert store.count_times_per_chunk(winds, ["u", "v"]) == 1


# ------------------------------------------------------------------------------ periods


def test_periods_are_the_times_between_two_dates_both_included(winds: xr.Dataset) -> None:
    spans = {"--train-times": ("1982", "1983"), "--test-times": ("1985-01-04", "1985-03-05")}
    training, test = fields.split_times(winds.time, spans)
    for period, (first, last) in zip((training, test), spans.values()):
        expected = winds.time.sel(time=slice(first, last))
        np.testing.assert_array_equal(period.dates, expected)
        np.testing.assert_array_equal(winds.time[period.positions], expected)
        np.testing.assert_array_equal(period.months, expected.dt.month - 1)
    assert [str(date)[:10] for date in test.dates[[0, -1]]] == ["1985-01-05", "1985-02-24"]
    assert str(winds.time.values[training.positions[-1]])[:4] == "1983"


DATES = np.arange("1982-01-01", "1983-01-01", dtype="datetime64[D]").astype("datetime64[ns]")
AXES = {
    "dates": DATES,
    "integers": np.arange(365),
    "numbers": np.arange(365) / 2,
    "texts": np.datetime_as_string(DATES, unit="D"),
    "spans of time": np.arange(365).astype("timedelta64[D]"),
}
OUTSIDE = {  # axis, training times, test times, what is said
    "not there": (
        "dates",
        "2001 2002",
        "1982 1982",
        "--train-times 2001 2002: no times; give dates of 1982-01-01 to",
    ),
    "no date": (
        "dates",
        "then now",
        "1982 1982",
        "--train-times then now: no times; give dates of 1982-01-01 to 1982-12",
    ),
    "empty": (
        "dates",
        "1982-01 1982-06",
        "1982-12 1982-11",
        "--test-times 1982-12 1982-11: no times; give dates of",
    ),
    "overlap": (
        "dates",
        "1982-01 1982-06",
        "1982-06 1982-09",
        "--test-times .*: shares times with --train-times 1982-01 1982-06; .* no other",
    ),
    "a day of overlap": (
        "dates",
        "1982-01 1982-06",
        "1982-06-30 1982-09",
        "--test-times .*: shares times with --train-times 1982-01 1982-06;",
    ),
    "integers": ("integers", "1982 1982", "1983 1983", "time holds int64, not dates; give it units"),
    "integers that are there": ("integers", "0 100", "200 300", "time holds int64, not dates; give it units"),
    "numbers": ("numbers", "0 100", "200 300", "time holds float64, not dates; give it units"),
    "texts": ("texts", "1982-01 1982-06", "1982-07 1982-09", "time holds .*, not dates; give it units"),
    "spans of time": ("spans of time", "0D 9D", "10D 19D", "time holds timedelta64.*, not dates; give it"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_times_that_cannot_be_used_are_refused_with_their_flag(case: str) -> None:
    axis, training, test, message = OUTSIDE[case]
    time = xr.DataArray(AXES[axis], dims="time", coords={"time": AXES[axis]})
    spans = {"--train-times": tuple(training.split()), "--test-times": tuple(test.split())}
    with pytest.raises(errors.DataError, match=message):
        fields.split_times(time, spans)


@pytest.mark.parametrize(("units", "first"), [("1", 0), ("a", 1982), ("months since 1982-01-01", 0)])
def test_an_integer_time_axis_is_refused(units: str, first: int, winds: xr.Dataset, tmp_path: Path) -> None:
    """A number of a step, a year, or what only another calendar has."""
    stored = winds.isel(time=slice(20)).assign_coords(time=first + np.arange(20))
    stored.time.attrs["units"] = units
    write(tmp_path / "store", stored)
    with pytest.raises(errors.DataError):
        make_data(tmp_path / "store")


@pytest.mark.parametrize("patches_per_block", [4, 8])
def test_times_that_an_epoch_leaves_out_are_said(patches_per_block: int, folder: Path, capsys) -> None:
    """A chunk has eight times."""
    flags = [*flags_for(folder / "whole"), "--patches-per-block", str(patches_per_block)]
    make_data(folder / "whole", ("u", "v"), *flags)
    note = "note: a chunk has 8 times, of which an epoch uses --patches-per-block 4"
    assert (note in capsys.readouterr().err) == (patches_per_block == 4)


# ------------------------------------------------------------------------------ objects that are missing


def write_with(fill: str, winds: xr.Dataset, path: Path) -> Path:
    """Write a store in which a missing chunk reads as this, and lose a chunk of v: that of times 8 to 15."""
    stored = winds[["u", "v"]].isel(time=slice(24)).fillna(0)
    chunks = {"chunks": tuple(CHUNKS.values())}
    kinds = {
        "NaN": {"_FillValue": np.nan},
        "NaN, v2": {"_FillValue": np.nan},
        "a CF missing value": {"_FillValue": None, "fill_value": np.nan},
        "packed": {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -9999, "fill_value": -9999},
        "packed, v2": {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -9999},
        "0": {"_FillValue": None, "fill_value": 0.0},
        "0, masked by another": {"_FillValue": -9999.0, "fill_value": 0.0},
        "packed 0": {"dtype": "int16", "scale_factor": 0.01, "fill_value": 0},
        "nothing, v2": {"_FillValue": None},
    }
    zarr_format = 2 if fill.endswith("v2") else 3
    write(path, stored, encoding=dict.fromkeys(("u", "v"), chunks | kinds[fill]), zarr_format=zarr_format)
    (path / ("v/1.0.1" if zarr_format == 2 else "v/c/1/0/1")).unlink()
    return path


@pytest.mark.parametrize("fill", ["NaN", "NaN, v2", "a CF missing value", "packed", "packed, v2"])
def test_a_chunk_that_is_not_there_may_be_missing_values(
    fill: str, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Zarr writes no chunk in which nothing is."""
    reader = reader_of(write_with(fill, winds, tmp_path / "store"))
    values = reader.read("v", {"time": slice(8, 16)})
    np.testing.assert_array_equal(np.isnan(values[0]).all(axis=0), np.arange(COLUMNS) >= 20)


@pytest.mark.filterwarnings("ignore:saving variable None with floating point data as an integer")
@pytest.mark.parametrize("fill", ["0", "0, masked by another", "packed 0", "nothing, v2"])
def test_a_missing_chunk_that_would_be_a_number_is_named(
    fill: str, winds: xr.Dataset, tmp_path: Path
) -> None:
    """With its key, its variable, and the first date of what was read."""
    reader = reader_of(write_with(fill, winds, tmp_path / "store"))
    date = str(winds.time.values[9])[:16]
    with pytest.raises(
        errors.DataError,
        match=rf"v of 3 times from {date} on: v/(c/1/0/1|1\.0\.1): this chunk is missing; .*copy it again",
    ):
        reader.read("v", {"time": slice(9, 12), "latitude": slice(2, 4)})
    west = {"time": 9, "latitude": slice(2, 4), "longitude": slice(0, 20)}
    np.testing.assert_allclose(reader.read("v", west), winds.v[west], atol=0.005)


def test_a_cut_chunk_is_named_by_variable_and_date(folder: Path, winds: xr.Dataset, tmp_path: Path) -> None:
    path = shutil.copytree(folder / "whole", tmp_path / "store")
    chunk = path / "u/c/3/0/1"
    chunk.write_bytes(chunk.read_bytes()[:1000])
    dataset = make_data(path).test
    dataset.maker.period = SimpleNamespace(positions=np.array([30]))
    region = dataset.maker.region(sampling.Patch(0, 0, 30, None))
    with pytest.raises(errors.DataError, match=f"u of {str(winds.time.values[30])[:16]}: \\S"):
        dataset.reader.read_at_once([region])


# ------------------------------------------------------------------------------ servers


class Server:
    """A plain web server of a folder: it neither lists nor knows ranges. The first word of a path says more."""

    def __init__(self, folder: Path):
        self.address = ""
        self.asked: list[str] = []
        self.signed: list[bool] = []
        self.handler = partial(Handler, self, directory=folder)

    def location(self, way: str, name: str, **how: object):
        return store.Location(f"{self.address}/{way}/{name}", **how)


class Handler(SimpleHTTPRequestHandler):
    def __init__(self, server: Server, *args: object, **how: object):
        self.owner = server
        super().__init__(*args, **how)

    def log_message(self, *about: object) -> None:
        pass

    def do_GET(self) -> None:
        self.owner.asked.append(f"{self.command} {self.path}")
        self.owner.signed.append("Authorization" in self.headers)
        _, self.way, *rest = self.path.split("/")
        self.path = "/" + "/".join(rest)
        is_chunk = "/c/0/0/" in self.path
        if self.way == "busy" or (self.way == "busy_later" and is_chunk):
            self.send_error(503)
        elif self.way == "guarded" and is_chunk:
            self.send_error(403)
        elif self.command == "HEAD":
            super().do_HEAD()
        else:
            super().do_GET()

    do_HEAD = do_GET

    def do_PROPFIND(self) -> None:
        self.owner.asked.append("PROPFIND")
        self.send_error(405)

    def send_error(self, code: int, *about: object) -> None:
        """Who may not list a bucket is told that what is absent is forbidden."""
        super().send_error(403 if code == 404 and self.way == "denied" else code, *about)


@pytest.fixture(scope="module")
def server(folder: Path, winds: xr.Dataset) -> Iterator[Server]:
    winds[["u", "v"]].isel(time=slice(4)).to_zarr(folder / "not_consolidated", consolidated=False)
    server = Server(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), server.handler) as http:
        server.address = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        http.shutdown()
        thread.join()


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds none of AWS's, wherever they may be."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("way", ["open", "denied"])
def test_a_web_server_serves_a_store(way: str, server: Server, folder: Path) -> None:
    """Also one that says of what is absent, such as statistics, that it may not be read."""
    reader = store.FieldReader(server.location(way, "bare"), ["u", "v"])
    region = {"time": 5, "latitude": slice(2, 9), "longitude": np.array([38, 39, 0, 1])}
    expected = reader_of(folder / "bare").read_at_once([region])
    np.testing.assert_array_equal(reader.read_at_once([region]), expected)
    assert store_climatology.read_statistics(reader, "u_v_1982_1983") is None
    own = store.FieldReader(server.location(way, "whole"), ["u", "v"])
    assert store_climatology.read_statistics(own, "u_v_1982_1983").valid.any()


def test_a_web_server_is_not_asked_to_list_a_store(server: Server) -> None:
    """obstore would ask it again and again until the retries end."""
    with pytest.raises(errors.DataError, match=r"cannot list a store; run zarr.consolidate_metadata"):
        store.FieldReader(server.location("open", "not_consolidated"), ["u", "v"]).open()
    assert "PROPFIND" not in server.asked


def test_a_server_without_ranges_cannot_serve_shards(server: Server) -> None:
    reader = store.FieldReader(server.location("open", "shards"), ["u", "v"])
    with pytest.raises(errors.DataError, match=r"v of 1982-\S+: v/c/0/0/0: shards need range .*; copy the"):
        reader.read("v", {"time": 0})


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("guarded", "403"),
        ("busy_later", "503"),
        pytest.param("busy", "503", marks=thorough),
        pytest.param("gone", "error sending", marks=thorough),
    ],
)
def test_what_a_server_does_not_give_is_named_when_the_retries_end(
    way: str, status: str, server: Server
) -> None:
    """A forbidden chunk is not taken for an absent one, and a busy server is not asked for ever."""
    location = server.location(way, "bare", retry_timeout=0.3)
    if way == "gone":
        location = store.Location("http://127.0.0.1:1/bare", retry_timeout=0.3)
    reader = store.FieldReader(location, ["u", "v"])
    read = ThreadPoolExecutor(1).submit(reader.read, "v", {"time": 3, "longitude": slice(0, 5)})
    error = read.exception(timeout=60)  # seconds: the default of --retry-timeout is 120
    assert isinstance(error, errors.DataError)
    where = r"\.?z[\w.]+" if way in ("busy", "gone") else "v of 1982-01-31T00:00: v/c/0/0/0"
    assert re.match(rf"{where}: .*{status}", str(error)), error
    assert "\n" not in str(error)


@pytest.mark.parametrize("anonymous", [True, False])
def test_requests_to_a_bucket_are_signed_unless_they_are_anonymous(
    anonymous: bool, server: Server, winds: xr.Dataset, no_credentials: None, tmp_path: Path, monkeypatch
) -> None:
    """At the endpoint that is given, with the credentials of a profile."""
    keys = "aws_access_key_id = reader\naws_secret_access_key = secret"
    (tmp_path / "keys").write_text(f"[climate]\n{keys}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "climate")
    server.signed.clear()
    location = store.Location("s3://bucket/bare", endpoint=server.address, anonymous=anonymous)
    found = store.FieldReader(location, ["u", "v"]).read("v", {"time": 7})
    np.testing.assert_array_equal(found, winds.v[7])
    assert server.signed.count(not anonymous) > 0
    assert any(server.signed) is not anonymous


@pytest.mark.parametrize(
    "url", ["s3://winds/whole", "ftb://winds/whole", "https://", "az://container/whole", "empty"]
)
def test_a_store_that_cannot_be_opened_is_a_data_error(
    url: str, no_credentials: None, tmp_path: Path
) -> None:
    """Without credentials, of an unknown kind, without a host, without an account, without a store."""
    place = url if "://" in url else tmp_path
    with pytest.raises(errors.DataError) as refused:
        reader_of(place, retry_timeout=1).open()
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------ the reader


def test_a_reader_gives_time_latitude_and_longitude_in_that_order(winds: xr.Dataset, tmp_path: Path) -> None:
    """Whatever the order in the store, and for one time (latitude, longitude)."""
    write(tmp_path / "store", winds[["u", "v"]].transpose("longitude", "time", "latitude"))
    reader = reader_of(tmp_path / "store", "v", "u")
    three = {"time": slice(3, 6), "latitude": slice(1, 3), "longitude": slice(0, 7)}
    np.testing.assert_array_equal(reader.read("u", three), winds.u[3:6, 1:3, :7])
    np.testing.assert_array_equal(reader.read("u", three | {"time": 4}), winds.u[4, 1:3, :7])
    np.testing.assert_array_equal(reader.read("v", {"time": np.array([9, 2])}), winds.v[[9, 2]])
    regions = [three | {"time": time} for time in (5, 0, 7)]
    values = reader.read_at_once(regions)
    assert (values.dtype, values.shape) == (np.float32, (3, 2, 2, 7))
    for n, region in enumerate(regions):
        np.testing.assert_array_equal(values[n, 0], winds.v[region])
        np.testing.assert_array_equal(values[n, 1], winds.u[region])


def test_a_store_may_be_a_path_or_a_url_of_it(folder: Path, winds: xr.Dataset, monkeypatch) -> None:
    """Also a path that is relative to the current folder."""
    monkeypatch.chdir(folder)
    for place in ("bare", (folder / "bare").as_uri(), folder / "bare"):
        np.testing.assert_array_equal(reader_of(place).read("v", {"time": 2}), winds.v[2])


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list:
    """The clients that are made, from now on. Each waits for another, which should not come."""
    clients, others, connect = [], threading.Event(), store.connect

    def call(location):
        clients.append(location)
        if len(clients) > 1:
            others.set()
        others.wait(0.2)
        return connect(location)

    monkeypatch.setattr(store, "connect", call)
    return clients


def test_many_threads_open_a_store_once(folder: Path, connected: list) -> None:
    reader = reader_of(folder / "bare")
    barrier = threading.Barrier(8)

    def read(time: int) -> np.ndarray:
        barrier.wait(timeout=60)
        return reader.read("v", {"time": time})

    with ThreadPoolExecutor(8) as threads:
        maps = list(threads.map(read, range(8)))
    assert len(connected) == 1
    np.testing.assert_array_equal(maps, reader.read("v", {"time": slice(0, 8)}))
    assert len(connected) == 1


def test_a_run_opens_its_store_once(folder: Path, connected: list) -> None:
    """For climatology, training, validation and test together."""
    made = make_data(folder / "bare")
    made.blocks.read_block(0, np.random.default_rng(0))
    for patches in (made.validation, made.test):
        patches[0, 0]
    assert len(connected) == 1


def test_a_pickled_reader_opens_the_store_anew(folder: Path, connected: list) -> None:
    """A client's threads and connections survive no pickle, so none may go into it."""
    reader = reader_of(folder / "bare", "v")
    reader.location = store.Location(str(folder / "bare"), retry_timeout=7)
    values = reader.read("v", {"time": 3})
    sent = pickle.loads(pickle.dumps(reader))
    assert (sent.fields, sent.store) == (None, None)
    assert sent.location == reader.location
    assert sent.traffic.counts() == (0, 0, 0)
    np.testing.assert_array_equal(sent.read("v", {"time": 3}), values)
    assert len(connected) == 2
    assert sent.store is not reader.store


def test_patches_go_to_a_worker_after_their_parent_has_read(folder: Path) -> None:
    dataset = make_data(folder / "whole").test
    sample = dataset[0, 3]
    assert_same(pickle.loads(pickle.dumps(dataset))[0, 3], sample)


# ------------------------------------------------------------------------------ what reading costs


def test_what_the_training_reads_is_counted_and_nothing_else(folder: Path) -> None:
    """Neither opening the store, nor the climatology, nor what validation reads meanwhile."""
    made = make_data(folder / "whole")
    blocks = made.blocks
    assert blocks.reader.traffic.counts() == (0, 0, 0)
    assert len(made.validation.__getitems__([(0, k) for k in range(3)])) == 3
    assert blocks.reader.traffic.counts() == (0, 0, 0)

    samples = blocks.read_block(2, np.random.default_rng(0))
    objects = [folder / f"whole/{name}/c/2/0/{column}" for name in ("u", "v") for column in (0, 1)]
    size = sum(path.stat().st_size for path in objects)
    assert blocks.make_batch(samples)["traffic"].tolist() == [OBJECTS, size, 0, len(samples)]
    assert blocks.make_batch(samples[:3])["traffic"].tolist() == [0, 0, 0, 3]
    blocks.read_block(2, np.random.default_rng(0))
    assert blocks.make_batch(samples)["traffic"].tolist() == [OBJECTS, size, 0, len(samples)]
    assert blocks.reader.traffic.counts() == (2 * OBJECTS, 2 * size, 0)


def test_a_request_that_finds_nothing_is_counted(winds: xr.Dataset, tmp_path: Path) -> None:
    reader = reader_of(write_with("NaN", winds, tmp_path / "store"), "v")
    reader.read("v", {"time": 8})
    size = (tmp_path / "store/v/c/1/0/0").stat().st_size
    assert reader.traffic.counts() == (2, size, 1)


def test_the_cost_of_a_sample_is_that_of_all_training_batches() -> None:
    counter = store.RequestCounter()
    trainer, module = SimpleNamespace(), SimpleNamespace(device=torch.device("cpu"))
    counter.on_train_start(trainer, module)
    assert counter.per_sample() == {}
    for traffic in ([12, 5000, 0, 4], [0, 0, 0, 4], [3, 1000, 1, 2]):
        counter.on_train_batch_end(trainer, module, None, {"traffic": torch.tensor(traffic)}, 0)
    assert counter.per_sample() == {"requests_per_sample": 1.5, "bytes_per_sample": 600}
    counter.on_train_start(trainer, module)
    assert counter.per_sample() == {}


def test_a_run_that_is_resumed_at_its_end_has_no_cost() -> None:
    """Lightning skips the loop, with all that is called in it."""
    assert store.RequestCounter().per_sample() == {}


# ------------------------------------------------------------------------------ patches


def grid_of(longitude: np.ndarray, rows: int = ROWS):
    return data.Grid(np.linspace(-85.5, 85.5, rows), longitude)


GLOBAL = 9.0 * np.arange(COLUMNS)
GRIDS = {  # longitudes, and whether patches may cross the seam
    "global": (GLOBAL, True),
    "global from 180 degrees west": (GLOBAL - 180, True),
    "global in single precision": ((0.1 * np.arange(3600)).astype("float32"), True),
    "a column short": (GLOBAL[:-1], False),
    "half": (GLOBAL[:20], False),
    "as wide as a patch": (GLOBAL[:SIZE], False),
    "across Greenwich": (np.arange(-90.0, 90.0, 9), False),
}


@pytest.mark.parametrize("case", GRIDS)
def test_patches_may_begin_wherever_they_fit(case: str) -> None:
    """On a global map also where they cross the seam."""
    longitude, is_global = GRIDS[case]
    space = grid_of(longitude).patch_space(SIZE)
    columns = len(longitude) if is_global else len(longitude) - SIZE + 1
    assert space == (ROWS - SIZE + 1, columns, SIZE)


@pytest.mark.parametrize(
    ("size", "longitude", "largest"), [(24, GLOBAL, 20), (18, GLOBAL, 20), (20, GLOBAL[:19], 16)]
)
def test_a_patch_fits_the_grid_and_can_be_halved_twice(
    size: int, longitude: np.ndarray, largest: int
) -> None:
    grid = grid_of(longitude)
    message = (
        rf"--patch-size {size}: the grid is 20 x {len(longitude)}; give a multiple of 4 from 16 to {largest}"
    )
    with pytest.raises(errors.DataError, match=message):
        grid.patch_space(size)
    assert grid.patch_space(largest).size == largest


def test_a_grid_without_room_for_the_least_patch_is_named() -> None:
    grid = data.Grid(np.arange(12.0), np.arange(20.0))
    with pytest.raises(errors.DataError, match="the grid is 12 x 20; give a store of at least 16 x 16"):
        grid.patch_space(16)


@pytest.fixture
def make_dataset(winds: xr.Dataset, statistics: xr.Dataset) -> Callable:
    """Patches of arrays in memory: of the winds, or of a copy that a test has changed."""

    def make(changed: xr.Dataset = winds, batch_size: int = 4, seed: int = 0, part: slice = slice(None)):
        changed = changed[["u", "v"]].isel(longitude=part)
        arrays = changed.to_dataarray().transpose("time", "variable", ...).values
        mean = statistics.isel(longitude=part).to_dataarray().transpose("month", "variable", ...).values
        found = climatology.Climatology(
            mean, np.float32([statistics[name].attrs["std"] for name in "uv"]), ["u", "v"]
        )
        (period,) = fields.split_times(changed.time, {"--train-times": TRAINING})
        grid = data.Grid(changed.latitude.values, changed.longitude.values)

        def read(regions: list[dict]) -> np.ndarray:
            return np.stack([arrays[at["time"]][:, at["latitude"]][..., at["longitude"]] for at in regions])

        maker = data.PatchMaker(grid, period, found, SIZE)
        return data.PatchDataset(maker, SimpleNamespace(read_at_once=read), batch_size, seed)

    return make


def test_a_sample_depends_on_nothing_but_seed_step_and_k(make_dataset) -> None:
    one, other = make_dataset(seed=5), make_dataset(seed=5)
    places = [(step, k) for step in (0, 7, 1000) for k in range(4)]
    forward = one.__getitems__(places)
    for place, sample in reversed(list(zip(places, forward))):
        assert_same(other[place], sample)
    assert len({sample["input"].tobytes() for sample in forward}) == len(places)
    another = make_dataset(seed=6)
    for part in ("time", "row", "column", "seen"):
        drawn = [[getattr(dataset.patch(*place), part) for place in places] for dataset in (one, another)]
        assert not np.array_equal(*drawn)


@pytest.mark.parametrize("batch_size", [4, 7])
def test_an_epoch_has_each_time_once_and_the_next_in_another_order(batch_size: int, make_dataset) -> None:
    dataset = make_dataset(batch_size=batch_size)
    n = len(dataset.maker.period.dates)
    drawn = [dataset.patch(*divmod(i, batch_size)).time for i in range(3 * n)]
    epochs = [drawn[start : start + n] for start in (0, n, 2 * n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(("part", "columns"), [(slice(None), COLUMNS), (slice(0, 25), 25 - SIZE + 1)])
def test_patches_begin_everywhere(part: slice, columns: int, make_dataset) -> None:
    dataset = make_dataset(part=part)
    corners = [dataset.patch(step, 0)[1:3] for step in range(500)]
    assert {row for row, _ in corners} == set(range(ROWS - SIZE + 1))
    assert {column for _, column in corners} == set(range(columns))


def test_swaths_are_slanted_stripes_over_about_a_third_of_the_patch() -> None:
    masks = sampling.swath_masks(np.random.default_rng(0), 300, 64)
    assert 0.33 < masks.mean() < 0.37  # 4 cells of every 10, of which one pass in 8 is lost
    assert (masks.sum(axis=(1, 2)) >= 64).all()
    assert (sampling.swath_masks(np.random.default_rng(0), 2000, 16).sum(axis=(1, 2)) >= 16).all()
    edges = [np.flatnonzero(np.diff(np.r_[0, row, 0])) for row in masks[0]]
    assert max(width for edge in edges for width in np.diff(edge)[::2]) <= sampling.SWATH_WIDTH + 1
    assert not np.array_equal(masks[0][0], masks[0][-1])


def test_a_batch_is_that_of_a_plain_sum(make_dataset, winds: xr.Dataset, statistics: xr.Dataset) -> None:
    """Anomalies in units of their spread, seen under the swaths, nothing in masked cells, weights cos(latitude)."""
    dataset = make_dataset()
    patches = [dataset.patch(3, k) for k in range(60)]
    regions = [dataset.maker.region(patch) for patch in patches]
    values = dataset.reader.read_at_once(regions)
    batch = dataset.maker.make_batch([data.Sample(*each) for each in zip(patches, values)])
    assert {name: batch[name].dtype.name for name in PARTS} == dict.fromkeys(PARTS, "float32")
    assert [batch[name].shape[1] for name in PARTS] == [3, 2, 1, 1]
    crossing = masked = 0
    for k, (time, row, column, swath) in enumerate(patches):
        there = {
            "latitude": np.arange(row, row + SIZE),
            "longitude": np.arange(column, column + SIZE) % COLUMNS,
        }
        map_of_time = winds[["u", "v"]].sel(time=dataset.maker.period.dates[time])
        mean = statistics.sel(month=map_of_time.time.dt.month)
        anomaly = (map_of_time - mean).isel(there).to_dataarray().values
        anomaly /= np.array([statistics[name].attrs["std"] for name in "uv"])[:, None, None]
        valid = np.ones((ROWS, COLUMNS), bool)
        valid[GAP] = False
        valid = valid[there["latitude"]][:, there["longitude"]]
        anomaly = np.where(valid, anomaly, 0)
        cosine = np.cos(np.deg2rad(winds.latitude.values[there["latitude"]]))[:, None]
        np.testing.assert_allclose(batch["target"][k], anomaly, atol=1e-5)
        np.testing.assert_array_equal(batch["input"][k, :2], batch["target"][k] * swath)
        np.testing.assert_array_equal(batch["input"][k, 2], valid & swath)
        np.testing.assert_array_equal(batch["unseen"][k, 0], valid & ~swath)
        np.testing.assert_allclose(batch["weight"][k, 0], cosine * (valid & ~swath), atol=1e-6)
        crossing += column > COLUMNS - SIZE
        masked += not valid.all()
    assert min(crossing, masked) > 10
    np.testing.assert_array_equal(dataset[3, 5]["target"], batch["target"][5])


def test_the_poles_have_no_negative_weight(winds: xr.Dataset, make_dataset) -> None:
    """Where cos(90 degrees) is below 0 by rounding."""
    dataset = make_dataset()
    dataset.maker.grid = data.Grid(np.deg2rad(1) * np.arange(ROWS) + 90, dataset.maker.grid.longitude)
    assert (dataset.maker.cell_weights([dataset.patch(0, k) for k in range(4)]) == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_variable_and_date(
    value: float, winds: xr.Dataset, make_dataset
) -> None:
    """Among samples that are whole; where the cell is masked, it is in order."""
    hole = winds.copy(deep=True)
    hole.v[40, :, :] = value
    hole.u[41, *GAP] = value
    dataset = make_dataset(hole)
    n = len(dataset.maker.period.dates)
    times = {dataset.patch(*divmod(i, 4)).time: divmod(i, 4) for i in range(n)}
    cause = "NaN: a value or a chunk is missing; give --missing mask" if np.isnan(value) else "infinity"
    with pytest.raises(errors.DataError, match=f"v on {str(winds.time.values[40])[:16]}: {cause}"):
        dataset.__getitems__([times[39], times[41], times[40], times[42]])
    assert len(dataset.__getitems__([times[39], times[41], times[42]])) == 3


# ------------------------------------------------------------------------------ fills without a network


def fill_by_hand(seen: np.ndarray) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """The four fills of fields of chance, and mean, anomaly and unseen cells."""
    rng = np.random.default_rng(0)
    mean, anomaly = rng.normal(size=(2, 2, *seen.shape)).astype("float32")
    return evaluation.fills(mean, anomaly, seen, ~seen), mean, anomaly, ~seen


def test_of_a_patch_in_which_nothing_is_seen_all_fills_are_the_climatology() -> None:
    found, mean, _, unseen = fill_by_hand(np.zeros((8, 8), bool))
    assert set(found) == {"climatology", "nearest neighbour", "linear interpolation", evaluation.BASELINE}
    for fill in found.values():
        np.testing.assert_array_equal(fill, mean[:, unseen])


@pytest.mark.parametrize("cells", [[(2, 3)], [(2, 3), (6, 5)], [(1, 1), (3, 3), (5, 5)]])
def test_a_patch_of_which_too_few_cells_are_seen_is_filled_from_the_nearest(cells: list) -> None:
    """One or two cells, or a line of them, span no triangle."""
    seen = np.zeros((8, 8), bool)
    seen[tuple(zip(*cells))] = True
    found, mean, anomaly, unseen = fill_by_hand(seen)
    distances = [np.linalg.norm(np.argwhere(unseen) - cell, axis=1) for cell in cells]
    order = np.sort(distances, axis=0)
    clear = order[0] < order[1] - 1e-9 if len(cells) > 1 else np.ones(unseen.sum(), bool)
    rows, columns = np.array(cells)[np.argmin(distances, axis=0)][clear].T
    nearest = (mean + anomaly)[:, rows, columns]
    np.testing.assert_array_equal(found["climatology"], mean[:, unseen])
    np.testing.assert_array_equal(found["nearest neighbour"][:, clear], nearest)
    np.testing.assert_array_equal(found["linear interpolation"][:, clear], nearest)
    of_anomalies = mean[:, unseen][:, clear] + anomaly[:, rows, columns]
    np.testing.assert_allclose(found[evaluation.BASELINE][:, clear], of_anomalies, rtol=1e-6)


def test_each_baseline_is_exact_where_it_should_be() -> None:
    """Each of the four has fields that it fills without error, and others do not."""
    seen = np.pad(np.zeros((14, 14), bool), 1, constant_values=True)  # inside its hull lies every hole
    rough = np.random.default_rng(0).normal(size=(2, 16, 16))
    slope, flat = np.linspace(0, 10, 16)[:, None] + 0 * rough, np.ones_like(rough)
    exact = {}
    for name, (mean, anomaly) in {
        "nothing but a climatology": (rough, 0 * rough),
        "a flat anomaly": (rough, flat),
        "a sloping anomaly": (rough, slope),
        "all slopes": (slope, 2 * slope),
        "all flat": (3 * flat, flat),
        "rough anomalies": (flat, rough),
    }.items():
        truth = (mean + anomaly)[:, ~seen]
        found = evaluation.fills(mean, anomaly, seen, ~seen)
        exact[name] = {fill for fill in found if np.abs(found[fill] - truth).max() < 1e-9}
    linear, of_anomalies = "linear interpolation", evaluation.BASELINE
    assert exact == {
        "nothing but a climatology": {"climatology", of_anomalies},
        "a flat anomaly": {of_anomalies},
        "a sloping anomaly": {of_anomalies},
        "all slopes": {linear, of_anomalies},
        "all flat": {"nearest neighbour", linear, of_anomalies},
        "rough anomalies": set(),
    }


# ------------------------------------------------------------------------------ picture and speed


@pytest.mark.parametrize(
    ("degrees", "latitude", "longitude"),
    [(0, "0°", "0°"), (-60, "60 °S", "60 °W"), (2.5, "2.5 °N", "2.5 °E"), (-0.0, "0°", "0°")],
)
def test_degrees_are_those_of_a_map(degrees: float, latitude: str, longitude: str) -> None:
    assert evaluation.format_latitude(degrees, 3) == latitude
    assert evaluation.format_longitude(degrees, 3) == longitude


@pytest.mark.parametrize(
    ("degrees", "label"),
    [(270, "90 °W"), (360, "0°"), (365, "5 °E"), (540, "180°"), (-180, "180°"), (180, "180°")],
)
def test_longitudes_go_round(degrees: float, label: str) -> None:
    """As those of a patch across the seam do; the date line is neither east nor west."""
    assert evaluation.format_longitude(degrees) == label


@pytest.mark.parametrize(("names", "unit"), [(("u", "v"), "m/s"), (("temperature",), "K")])
def test_the_example_shows_truth_swaths_fill_and_error(names: tuple, unit: str, folder: Path) -> None:
    """Of the wind its speed, and else the first variable."""
    dataset = make_data(folder / "bare", names).test
    units = fields.group_by_unit(opened(folder / "bare", *names), list(names))
    network = torch.nn.Conv2d(len(names) + 1, len(names), 1)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.constant_(network.bias, 0.5)
    figure = evaluation.plot_example(dataset, units, network)

    patch, sample = dataset.patch(0, 0), dataset[0, 0]
    mean = dataset.maker.cut(dataset.maker.mean[dataset.maker.period.months[patch.time]], patch)
    unseen = sample["unseen"][0] > 0
    error = np.where(unseen, dataset.maker.std * (0.5 - sample["target"]), 0)
    truth = mean + dataset.maker.std * sample["target"]
    show = np.linalg.norm if len(names) == 2 else lambda maps, axis: maps[0]
    truth, filled, error = (show(maps, axis=0) for maps in (truth, truth + error, error))
    assert unseen.any()
    assert str(dataset.maker.period.dates[patch.time])[:10] in figure.get_suptitle()
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    shown = {title: np.ma.masked_invalid(axes.collections[0].get_array()) for title, axes in panels.items()}
    expected = {
        "truth": truth,
        "seen by the satellite": np.where(unseen, np.nan, truth),
        "filled by the network": filled,
        "error of the fill": np.where(unseen, np.abs(error), np.nan),
    }
    assert list(shown) == list(expected)
    for title, values in expected.items():
        np.testing.assert_allclose(shown[title].filled(np.nan), values, rtol=1e-5, atol=1e-5)
    for axes in panels.values():
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("longitude", "latitude")
        assert axes.xaxis.get_major_formatter()(270, 0) == "90 °W"
        assert axes.yaxis.get_major_formatter()(-30, 0) == "30 °S"
        low, high = axes.get_ylim()
        rows = dataset.maker.grid.latitude[[patch.row, patch.row + SIZE - 1]]
        assert low <= rows[0] < rows[1] <= high
    assert [axes.get_ylabel() for axes in figure.axes if not axes.get_title()] == [unit] * 4


TIMES = {  # seconds of each wait and each work, micro-batches of a step, samples/s of 8 a step, share of waiting
    "several steps": ([9, 1, 1, 1], [20, 3, 3, 3], 1, 8 * 3 / 12, 0.25),
    "in micro-batches": ([9, 9, 1, 1, 1, 1], [20, 9, 2, 2, 2, 2], 2, 8 * 2 / 12, 1 / 3),
    "no waiting": ([9, 0, 0], [20, 4, 4], 1, 2.0, 0),
}


def clock_of(waits: list, works: list, accumulate: int, monkeypatch: pytest.MonkeyPatch):
    """A clock that saw these seconds pass, and a validation of 100 s after each batch."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            for number, wait in enumerate(waits):
                now[0] += wait
                yield number

    loader = clock.TimedLoader(Slow(), batch_size=None)
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate, train_dataloader=loader)
    made = clock.StepClock()
    made.on_train_start(trainer, None)
    for work, _ in zip(works, loader):
        now[0] += work
        made.on_train_batch_end(trainer, None, None, None, 0)
        now[0] += 100
        made.on_validation_end(trainer, None)
    return made


@pytest.mark.parametrize("case", TIMES)
def test_speed_is_that_of_all_steps_but_the_first(case: str, monkeypatch) -> None:
    waits, works, accumulate, rate, share = TIMES[case]
    found = clock_of(waits, works, accumulate, monkeypatch).throughput(8)
    assert found == {"samples_per_second": pytest.approx(rate), "data_wait_share": pytest.approx(share)}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_one_step_has_no_speed(steps: int, monkeypatch) -> None:
    assert clock_of([1.0] * steps, [1.0] * steps, 1, monkeypatch).throughput(8) == {}


# ------------------------------------------------------------------------------ loss, schedule, metric


def batch_of(shares: tuple[float, ...], values: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """A batch whose samples have these shares of unseen rows and these targets, where the weight is a half."""
    seen = torch.stack([(torch.arange(12) >= 12 * share).float() for share in shares])
    seen = seen[:, None, :, None].expand(-1, 1, -1, 4)
    target = torch.tensor(values)[:, None, None, None].expand(-1, 2, 12, 4)
    return {
        "input": torch.cat([target * seen, seen], dim=1),
        "target": target,
        "unseen": 1 - seen,
        "weight": (1 - seen) / 2,
    }


def piece_of(batch: dict, begin: int, end: int) -> dict[str, torch.Tensor]:
    return {name: part[begin:end] for name, part in batch.items()}


def test_the_loss_is_one_mean_over_all_unseen_cells_not_a_mean_of_means() -> None:
    batch = batch_of((0.75, 0.25), (1.0, 3.0))
    prediction = torch.zeros(2, 2, 12, 4)
    squares, unseen = model.masked_sums(prediction, batch)
    assert unseen == 48
    assert (squares / unseen).item() == pytest.approx((0.75 * 1 + 0.25 * 9) / 2)
    pieces = [model.masked_sums(prediction[:1], piece_of(batch, k, k + 1)) for k in range(2)]
    assert torch.stack(pieces).sum(dim=0).tolist() == pytest.approx([squares.item(), unseen.item()])


def test_the_loss_ignores_what_was_seen_and_what_is_masked() -> None:
    prediction = torch.zeros(1, 2, 12, 4, requires_grad=True)
    batch = batch_of((0.5,), (2.0,))
    batch["weight"][..., 0] = batch["unseen"][..., 0] = 0  # a masked column
    model.masked_sums(prediction, batch)[0].backward()
    assert prediction.grad[:, :, :6, 1:].all()
    assert not prediction.grad[:, :, 6:].any()
    assert not prediction.grad[..., 0].any()


def make_module(**more: object):
    """A LightningModule of two winds, that no Trainer holds."""
    settings = {
        "std": [2.0, 3.0],
        "units": {"m/s": [0, 1]},
        "learning_rate": 1e-3,
        "max_steps": 10,
        "seed": 0,
    }
    return model.FillGaps(**(settings | more))


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """One step of a module on these micro-batches, as Lightning calls it; returns the gradients and the loss."""

    def call(module, pieces: list[dict]) -> tuple[list[torch.Tensor], float]:
        logged = {}
        module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=len(pieces))
        monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value.item()}))
        module.zero_grad()
        for number, piece in enumerate(pieces):
            (module.training_step(piece, number) / len(pieces)).backward()
        module.on_before_optimizer_step(None)
        return [parameter.grad.clone() for parameter in module.parameters()], logged["loss"]

    return call


def test_micro_batches_have_the_gradient_of_one_mean(step: Callable) -> None:
    """However unequally many cells are unseen in them; and each step begins at nothing."""
    batch = batch_of((0.9, 0.1, 0.5, 0.3), (1.0, 3.0, -2.0, 5.0))
    batch = {name: part.double() for name, part in batch.items()}  # in which rounding hides nothing
    module = make_module().double()
    module.on_train_start()
    whole = step(module, [batch])
    for parts in ([(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 4)]):
        gradients, loss = step(module, [piece_of(batch, *part) for part in parts])
        assert loss == pytest.approx(whole[1])
        for found, expected in zip(gradients, whole[0]):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_batch_without_an_unseen_cell_teaches_nothing(step: Callable) -> None:
    module = make_module()
    module.on_train_start()
    gradients, loss = step(module, [batch_of((0.0,), (1.0,))])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)  # a NaN is true


@pytest.mark.parametrize("max_steps", [1, 5, 100, 205])
def test_the_learning_rate_rises_for_a_tenth_of_the_run_and_ends_at_zero(max_steps: int) -> None:
    factors = [model.learning_rate_factor(step, max_steps) for step in range(max_steps)]
    warmup = max(1, max_steps // 10)
    np.testing.assert_allclose(factors[:warmup], (1 + np.arange(warmup)) / warmup)
    assert all(before > after for before, after in pairwise(factors[warmup:]))
    assert 0 <= factors[-1] <= 1
    if max_steps > 1:  # PyTorch asks once more, after the last step
        assert model.learning_rate_factor(max_steps, max_steps) == pytest.approx(0, abs=1e-9)


def test_the_sums_of_a_step_are_in_no_checkpoint_and_are_not_broadcast() -> None:
    """DDP would copy rank 0's to all ranks before each forward pass, if they were a buffer."""
    module = make_module()
    module.on_train_start()
    module.training_step(batch_of((0.5,), (1.0,)), 0)
    assert module.sums.tolist() != [0, 0]
    assert all(name.startswith("model.") for name in module.state_dict())
    assert dict(module.named_buffers()).keys() == {"std"}  # the same on every rank
    assert len(module.state_dict()) == len(list(module.parameters()))


def test_a_module_is_decided_by_its_seed_and_rebuilt_from_what_it_was_made_of() -> None:
    one, same, other = make_module(), make_module(), make_module(seed=1)
    torch.manual_seed(5)
    again = model.FillGaps(**one.hparams)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(one.model.head.weight, other.model.head.weight)


def test_the_rmse_of_each_unit_is_that_of_a_plain_sum(monkeypatch) -> None:
    """Over unseen cells, by their weights, of a network that predicts a third of the spread; each time anew."""
    units = {"K": [1], "m/s": [0, 2]}
    module = make_module(std=[2.0, 3.0, 5.0], units=units)
    module.model = torch.nn.Conv2d(4, 3, 1)
    torch.nn.init.zeros_(module.model.weight)
    torch.nn.init.constant_(module.model.bias, 1 / 3)
    rng = np.random.default_rng(0)
    batches = []
    for n in (3, 1):
        unseen = rng.random((n, 1, 8, 8)) < 0.6
        weight = unseen * rng.random((n, 1, 8, 1))
        target = rng.normal(size=(n, 3, 8, 8))
        batch = {"input": np.zeros((n, 4, 8, 8)), "target": target, "unseen": unseen, "weight": weight}
        batches.append({name: torch.tensor(part, dtype=torch.float32) for name, part in batch.items()})
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value.item()}))

    def plain_rmse(batches: list[dict], numbers: list[int]) -> float:
        squares = total = 0.0
        for batch in batches:
            for number in numbers:
                error = module.hparams.std[number] * (1 / 3 - batch["target"][:, [number]].double())
                squares += (batch["weight"] * error**2).sum().item()
                total += batch["weight"].sum().item()
        return pytest.approx(np.sqrt(squares / total), rel=1e-5)

    module._trainer = SimpleNamespace(testing=True)
    for number, batch in enumerate(batches):
        module.test_step(batch, number)
    module.on_test_epoch_end()
    assert logged == {f"test rmse ({unit})": plain_rmse(batches, units[unit]) for unit in units}

    logged.clear()
    module._trainer = SimpleNamespace(testing=False)
    module.validation_step(batches[1], 0)
    module.on_validation_epoch_end()
    assert logged == {f"rmse ({unit})": plain_rmse(batches[1:], units[unit]) for unit in units}


# ------------------------------------------------------------------------------ what went wrong, in one line

FAILURES = {
    "one line": (ValueError("no such key"), "no such key"),
    "a client's settings": (OSError("403 Forbidden\n\nDebug source:\nGeneric {"), "403 Forbidden"),
    "a line that is empty at first": (OSError("\n  gone\nand more"), "gone"),
    "nothing": (TimeoutError(), "TimeoutError"),
    "blanks": (ValueError(" \n "), "ValueError"),
    "a group": (ExceptionGroup("unhandled", [ValueError("first"), ValueError("second")]), "first"),
    "groups in a group": (
        ExceptionGroup("a", [ExceptionGroup("b", [ExceptionGroup("c", [KeyError()])]), ValueError("late")]),
        "KeyError",
    ),
    "a group of interrupts": (BaseExceptionGroup("a", [KeyboardInterrupt()]), "KeyboardInterrupt"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_went_wrong_is_said_in_one_line(case: str) -> None:
    error, line = FAILURES[case]
    assert errors.first_line(error) == line
