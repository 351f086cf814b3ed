"""The climatology of a store: a sample, all that is present, or the store's statistics; computed once, and kept."""

import pickle
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import store_climatology
import xarray as xr
import zarr
from climatology import Climatology
from errors import DataError
from fields import split_times
from location import Location
from made_up_winds import COLUMNS, DIMS, ROWS, TRAINING, make_winds, with_land, with_moving_gaps, write
from store import FieldReader
from web_server import serving_files

CHUNKS = (8, ROWS // 2, COLUMNS // 2)  # 10 blocks of the training times

pytestmark = [  # of which train.py shows none, either
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


def climatology_of(
    path: Path | str,
    kept: Path,
    *names: str,
    level: str | None = None,
    span=TRAINING,
    missing: str = "refuse",
    constant: str = "refuse",
) -> Climatology:
    """Of u and v if none is named, as train.py loads it."""
    reader = FieldReader(Location(str(path)), list(names or ("u", "v")), level)
    reader = pickle.loads(pickle.dumps(reader))  # as if it had gone to a worker
    (training,) = split_times(reader.open().time, {"--train-times": span})
    return store_climatology.load_climatology(
        reader, training, span=span, missing=missing, constant=constant, folder=kept
    )


def times_of(winds: xr.Dataset, span: tuple[str, str] = TRAINING) -> np.ndarray:
    """Where these times are in a store."""
    return np.arange(winds.time.size)[winds.indexes["time"].slice_indexer(*span)]


def plain_climatology(winds: xr.Dataset, times: np.ndarray, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mean by month and spread of u and v at these times, in cells with `least` values of both."""
    values = winds.isel(time=times).to_dataarray().astype("float64")
    months = values.where(values.notnull().all("variable")).groupby("time.month")
    mean = months.mean().where(months.count() >= least)
    std = (months - mean).std(DIMS)
    return mean.reindex(month=range(1, 13)).transpose("month", "variable", ...).values, std.values


def assert_climatology(found: Climatology, mean: np.ndarray, std: np.ndarray) -> None:
    """Masked cells have none, and are in no standard deviation."""
    valid = ~np.isnan(mean).all(axis=(0, 1))
    np.testing.assert_array_equal(found.valid, valid)
    np.testing.assert_allclose(found.mean[..., valid], mean[..., valid], rtol=1e-6)
    np.testing.assert_allclose(found.std, std, rtol=1e-6)


def assert_same(one: Climatology, other: Climatology) -> None:
    np.testing.assert_array_equal(one.mean, other.mean)
    np.testing.assert_array_equal(one.std, other.std)


def make_statistics(winds: xr.Dataset) -> xr.Dataset:
    """What make_store.py keeps of the training times."""
    mean, std = plain_climatology(winds, times_of(winds))
    statistics = winds[["latitude", "longitude"]].assign_coords(month=np.arange(1, 13))
    for number, name in enumerate("uv"):
        statistics[name] = ("month", *DIMS[1:]), mean[:, number].astype("float32")
        statistics[name].attrs["std"] = float(std[number])
    return statistics


def add_statistics(path: Path, statistics: xr.Dataset) -> None:
    statistics.to_zarr(path, group="statistics/u_v_1982_1983", consolidated=False)
    zarr.consolidate_metadata(path)


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return with_land(make_winds())[["u", "v"]]


@pytest.fixture(scope="module")
def original(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stores") / "winds", winds, CHUNKS)


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A store of the winds, that a test may change."""
    return shutil.copytree(original, tmp_path / "store")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder in which climatologies are kept."""
    return tmp_path / "kept"


# ------------------------------------------------------------------------------ a sample


@pytest.mark.parametrize(("number", "span"), [(2, TRAINING), (20, ("1982-01", "1982-06"))])
def test_a_sample_has_so_many_times_of_each_month_and_numpys_mean(
    number: int, span: tuple, winds: xr.Dataset, path: Path, kept: Path, monkeypatch, capsys
) -> None:
    """The same in every run; months without a training time have no climatology."""
    read, chosen = FieldReader.read, []

    def watched(reader: FieldReader, name: str, box: dict) -> np.ndarray:
        if name == "u" and np.ndim(box["time"]):
            chosen.extend(box["time"])
        return read(reader, name, box)

    monkeypatch.setattr(store_climatology, "TIMES_A_MONTH", number)
    monkeypatch.setattr(FieldReader, "read", watched)
    found = climatology_of(path, kept, span=span)
    (file,) = kept.glob("*.npz")
    assert file.name in capsys.readouterr().out
    available = times_of(winds, span)
    months, years = winds.time.dt.month.values - 1, winds.time.dt.year.values
    assert set(years[chosen]) == set(years[available])  # and not the first times of each month
    assert len(chosen) == len(set(chosen) & set(available))
    assert_climatology(found, *plain_climatology(winds, np.array(chosen)))
    expected = np.bincount(months[available], minlength=12).clip(max=number)
    np.testing.assert_array_equal(np.bincount(months[chosen], minlength=12), expected)
    assert_same(climatology_of(path, kept / "another", span=span), found)


def test_a_climatology_is_computed_once_for_each_store(path: Path, kept: Path, monkeypatch) -> None:
    """A second run takes the file, also from a folder that can only be read. A torn one is computed again."""
    first = climatology_of(path, kept)
    (file,) = kept.glob("*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(store_climatology, "FileLock", lambda _: pytest.fail("locked"))
        assert_same(climatology_of(path, kept), first)
    file.write_bytes(file.read_bytes()[:500])
    assert_same(climatology_of(path, kept), first)
    assert list(kept.glob("*.npz")) == [file]


OTHERS = {
    "grid": (lambda winds: winds.isel(latitude=slice(2, None)), CHUNKS),
    "values": (lambda winds: winds + 1, CHUNKS),
    "chunks": (lambda winds: winds, (4, *CHUNKS[1:])),  # which a pass that was stopped has counted
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_store_in_the_same_place_has_a_climatology_of_its_own(
    case: str, winds: xr.Dataset, path: Path, kept: Path
) -> None:
    climatology_of(path, kept)
    shutil.rmtree(path)
    change, chunks = OTHERS[case]
    changed = change(winds)
    found = climatology_of(write(path, changed, chunks), kept)
    assert_climatology(found, *plain_climatology(changed, times_of(changed)))
    assert len(list(kept.glob("*.npz"))) == 2


def test_each_level_has_a_climatology_of_its_own(winds: xr.Dataset, kept: Path, tmp_path: Path) -> None:
    levels = {"500": winds, "850": winds * 2}
    stored = xr.concat(levels.values(), xr.IndexVariable("level", [500, 850])).transpose("time", ...)
    path = write(tmp_path / "levels", stored, (8, 1, ROWS, COLUMNS))
    for level, of_level in levels.items():
        found = climatology_of(path, kept, level=level)
        assert_climatology(found, *plain_climatology(of_level, times_of(winds)))


def test_of_two_ranks_that_need_a_climatology_one_samples_it(path: Path, kept: Path, monkeypatch) -> None:
    """The other waits for the file."""
    compute, calls, other = store_climatology.average_sample, [], threading.Barrier(2)

    def sample(*args: object) -> tuple:
        calls.append(args)
        with suppress(threading.BrokenBarrierError):
            other.wait(timeout=0.5)  # it would be here by now, but for the lock
        return compute(*args)

    monkeypatch.setattr(store_climatology, "average_sample", sample)
    with ThreadPoolExecutor(2) as ranks:
        assert_same(*ranks.map(climatology_of, [path] * 2, [kept] * 2))
    assert len(calls) == 1


UNUSABLE = {
    "empty": (lambda v: v.where(v.time.dt.year > 1983), "--train-times: no cell has values of all variables"),
    "constant": (lambda v: xr.full_like(v, 0.1), "--variables v: in the training times it never differs"),
    "infinite": (
        lambda v: v.where(v != v[20, 3, 30], np.inf),
        "v on 1982-07-20T00:00: infinity, or netCDF's",
    ),
    "netCDF's": (lambda v: v.where(v != v[20, 3, 30], 9.96921e36), "v on 1982-07-20T00:00: infinity, or net"),
}
SOURCES = ("a sample", "all times", "statistics")
CASES = [(case, source) for case in UNUSABLE for source in SOURCES]  # the last two would need no value


def test_the_name_of_a_climatology_is_that_of_the_place_however_it_is_reached(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder, and at any port of the server that a demo starts anew; another server is another place."""
    reader = FieldReader(Location(str(path)), ["u"])
    (training,) = split_times(reader.open().time, {"--train-times": TRAINING})

    def name(folder: Path, *place: str) -> str:
        monkeypatch.chdir(folder)
        reader.location = Location(*place)
        return store_climatology.identify(reader, training)

    assert name(path.parent, path.name) == name(path, ".") == name(path, str(path)) != name(path, "store")
    bucket = name(path, "s3://winds/store", "http://127.0.0.1:1")
    assert name(path.parent, "s3://winds/store", "http://127.0.0.1:2") == bucket
    assert name(path, "s3://winds/store", "http://elsewhere:1") != bucket


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("case", "source"),
    [case for case in CASES if case[0][:3] not in ("inf", "net") or case[1] != "statistics"],
)
def test_a_variable_without_values_or_anomalies_is_refused(
    case: str, source: str, winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """Else its anomalies would be divided by a standard deviation of 0, of nothing, or infinite."""
    change, message = UNUSABLE[case]
    changed = winds.assign(v=change(winds.v))
    path = write(tmp_path / "store", changed, CHUNKS)
    if source == "statistics":
        add_statistics(path, make_statistics(changed))
    missing = "mask" if source == "all times" else "refuse"
    with pytest.raises(DataError, match=message), warnings.catch_warnings(action="error"):
        climatology_of(path, kept, missing=missing)
    assert case == "constant" or not list(kept.glob("*[0-9a-f].npz"))  # but perhaps sums of the blocks before


@pytest.mark.parametrize("source", SOURCES)
def test_cells_that_never_change_are_refused_masked_or_kept(
    source: str, winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """Land as -9999.9, which no attribute names, would count as filled without an error.

    Masked, they are as if they were NaN, in the spread, too.
    """
    changed = winds.copy(deep=True)
    changed.v[:, 2:6, 3:7] = np.float32(-9999.9)
    path = write(tmp_path / "store", changed, CHUNKS)
    if source == "statistics":
        add_statistics(path, make_statistics(changed))
    missing = "mask" if source == "all times" else "refuse"
    message = "--variables v: 2.1% of its cells do not change .*, such as -9999.9 at latitude -67.5, longitude 27; give"
    with pytest.raises(DataError, match=message):
        climatology_of(path, kept, missing=missing)
    found = climatology_of(path, kept, missing=missing, constant="keep")
    kept_cells = found.valid.sum()
    found = climatology_of(path, kept, missing=missing, constant="mask")
    assert_climatology(found, *plain_climatology(changed.where(changed > -9000), times_of(winds)))
    assert found.valid.sum() == kept_cells - 16


@pytest.mark.parametrize("land", [1e20, -9999.0])
def test_land_that_outweighs_all_else_is_named_too(
    land: float, winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """Also where it makes each anomaly seem to be rounding, and in times of a single month."""
    changed = winds.copy(deep=True)
    changed["v"] *= 1e-3
    changed.v[:, 2:6, 3:7] = np.float32(land)
    path = write(tmp_path / "store", changed, CHUNKS)
    for span in (TRAINING, ("1982-01", "1982-01")):
        with pytest.raises(DataError, match=r"variables v: .* do not change .*; give --constant-cells mask"):
            climatology_of(path, kept, span=span)
        found = climatology_of(path, kept, span=span, constant="mask")
        assert np.isnan(found.mean[0, :, 2:6, 3:7]).all()
        assert 1e-3 < found.std[1] < 1e-2
    if land == -9999:  # no more than what rounding leaves of it, and yet more than nothing
        assert climatology_of(path, kept, constant="keep").std[1] > 1e-3


def test_months_of_one_value_are_refused_by_the_flag(path: Path, kept: Path) -> None:
    """Their mean would leave no anomaly."""
    for missing, span in (("refuse", ("1982-01-01", "1982-01-01")), ("mask", ("1982-01-01", "1982-01-15"))):
        with pytest.raises(
            DataError, match=f"--train-times {span[0]} .*: no month has . times there, as a clim"
        ):
            climatology_of(path, kept, span=span, missing=missing)


def test_what_is_not_valid_is_in_no_climatology_also_of_one_that_was_kept(
    winds: xr.Dataset, kept: Path, tmp_path: Path
) -> None:
    """A range that is written later makes another climatology."""
    path = write(tmp_path / "store", winds, CHUNKS)
    climatology_of(path, kept)
    limit = float(winds.v[0].max())  # of the first time, by whose values a store is known
    root = zarr.open_group(path, mode="r+")
    root["v"].attrs["valid_max"] = limit
    zarr.consolidate_metadata(path)
    found = climatology_of(path, kept)
    valid = winds.assign(v=winds.v.where(winds.v <= limit))
    mean = valid.v.isel(time=times_of(winds)).groupby("time.month").mean().values
    np.testing.assert_allclose(found.mean[:, 1][~np.isnan(mean)], mean[~np.isnan(mean)], rtol=1e-4)


def test_a_climatology_that_cannot_be_kept_is_an_error_with_a_remedy(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"--climatology-dir \S+: .* cannot be kept: .*; give"):
        climatology_of(path, tmp_path / "file/kept")


# ------------------------------------------------------------------------------ the store's statistics


@pytest.mark.parametrize("taken", ["statistics", "a sample", "all times"])
def test_mean_and_spread_are_in_the_order_of_the_variables(
    taken: str, winds: xr.Dataset, path: Path, kept: Path
) -> None:
    """Statistics without a spread are another tool's. Under mask they would have to count their values."""
    statistics = make_statistics(winds + (taken != "statistics"))
    if taken == "a sample":
        statistics.v.attrs.clear()
    add_statistics(path, statistics)
    missing = "mask" if taken == "all times" else "refuse"
    mean, std = plain_climatology(winds, times_of(winds))
    assert_climatology(climatology_of(path, kept, "u", "v", missing=missing), mean, std)
    assert_climatology(climatology_of(path, kept, "v", "u", missing=missing), mean[:, ::-1], std[::-1])
    assert len(list(kept.glob("*.npz"))) == (0 if taken == "statistics" else 2)


@pytest.mark.parametrize("damaged", [True, False])
def test_statistics_of_another_grid_or_with_damage_are_refused(
    damaged: bool, winds: xr.Dataset, path: Path, kept: Path
) -> None:
    add_statistics(path, make_statistics(winds).isel(latitude=slice(None if damaged else 1, None)))
    if damaged:
        chunk = path / "statistics/u_v_1982_1983/v/c/0/0/0"
        chunk.write_bytes(chunk.read_bytes()[:500])
    reason = r"\S" if damaged else "its grid differs"
    with pytest.raises(DataError, match=f"statistics/u_v_1982_1983: {reason}"):
        climatology_of(path, kept)


def test_statistics_are_read_from_a_web_server(winds: xr.Dataset, path: Path, kept: Path) -> None:
    """Which lists nothing."""
    add_statistics(path, make_statistics(winds))
    with serving_files(partial(SimpleHTTPRequestHandler, directory=path.parent)) as address:
        found = climatology_of(f"{address}/store", kept)
    assert_climatology(found, *plain_climatology(winds, times_of(winds)))
    assert not kept.exists()


# ------------------------------------------------------------------------------ all that is present


@pytest.fixture(scope="module")
def sparse() -> xr.Dataset:
    """Winds with moving gaps, few values in the south, and in the north none in winter."""
    winds = with_moving_gaps(make_winds())[["u", "v"]]
    rare = np.random.default_rng(1).random((winds.time.size, 4, COLUMNS)) < 0.7
    winds.u.values[:, :4][rare] = np.nan
    winds.v.values[~winds.time.dt.month.isin(range(4, 11)), 17:] = np.nan
    return winds


@pytest.fixture(scope="module")
def sparse_store(sparse: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sparse") / "store", sparse, CHUNKS)


def test_the_climatology_is_numpys_nanmean_by_month(
    sparse: xr.Dataset, sparse_store: Path, kept: Path, monkeypatch
) -> None:
    """Of cells with three values of both winds or more, at all times, and not of a sample."""
    monkeypatch.setattr(store_climatology, "TIMES_A_MONTH", 3)
    found = climatology_of(sparse_store, kept, missing="mask")
    mean, std = plain_climatology(sparse, times_of(sparse), least=3)
    assert_climatology(found, mean, std)
    of_any, _ = plain_climatology(sparse, times_of(sparse))
    assert (np.isnan(mean) & ~np.isnan(of_any)).sum() > 100
    assert found.valid[18:].all()  # in summer


def test_a_pass_that_was_stopped_goes_on_where_it_was(
    sparse_store: Path, kept: Path, tmp_path: Path, monkeypatch
) -> None:
    """And ends at the same bits; what is in the saved sums is not read again."""
    whole = climatology_of(sparse_store, tmp_path / "whole", missing="mask")
    read, starts = FieldReader.read_at_once, []

    def watched(reader: FieldReader, boxes: list[dict]) -> np.ndarray:
        starts.append(boxes[0]["time"].start)
        if stopping and starts[-1] == 48:
            raise DataError("stopped")
        return read(reader, boxes)

    monkeypatch.setattr(FieldReader, "read_at_once", watched)
    stopping = True
    with pytest.raises(DataError, match="stopped"):
        climatology_of(sparse_store, kept, missing="mask")
    assert list(kept.glob("*.sums.npz"))
    stopping = False
    starts.clear()
    assert_same(climatology_of(sparse_store, kept, missing="mask"), whole)
    assert sorted(starts) == [48, 56, 64, 72]
    assert not list(kept.glob("*.sums.npz"))


def test_blocks_are_read_at_the_same_time_and_each_once(sparse_store: Path, kept: Path, monkeypatch) -> None:
    barrier, read, starts = threading.Barrier(2), FieldReader.read_at_once, []

    def together(reader: FieldReader, boxes: list[dict]) -> np.ndarray:
        barrier.wait(timeout=60)  # for another read; BrokenBarrierError if there is none
        starts.append(boxes[0]["time"].start)
        return read(reader, boxes)

    monkeypatch.setattr(FieldReader, "read_at_once", together)
    climatology_of(sparse_store, kept, missing="mask")
    assert sorted(starts) == list(range(0, 73, 8))
