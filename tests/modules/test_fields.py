"""Other people's stores become the same map at the same times, or a line that says what to do."""

import re
from collections.abc import Callable
from pathlib import Path

import made_up_winds
import numpy as np
import pytest
import store_checksum
import store_climatology
import xarray as xr
from chunking import explain_blocks
from errors import DataError
from fields import explain_bounds, group_by_unit, split_times
from location import Location
from made_up_winds import COLUMNS, DIMS, TRAINING
from store import FieldReader

pytestmark = [  # of which train.py shows none, either
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
    pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification"),
    pytest.mark.filterwarnings("ignore:Duplicate dimension names"),
]


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return made_up_winds.make_winds()[["u", "v"]]


def reader_of(path: Path, level: str | None = None) -> FieldReader:
    return FieldReader(Location(str(path)), ["v", "u"], level)


# ------------------------------------------------------------------------------ any layout


def around(winds: xr.Dataset) -> xr.Dataset:
    """From 180 degrees west, and not from 0."""
    return winds.assign_coords(longitude=(winds.longitude + 180) % 360 - 180).sortby("longitude")


def first_again(winds: xr.Dataset) -> xr.Dataset:
    """With longitude 0 a second time, as 360."""
    first = winds.isel(longitude=[0])
    return xr.concat([winds, first.assign_coords(longitude=first.longitude + 360)], "longitude")


def beyond_both_ends(winds: xr.Dataset) -> xr.Dataset:
    """With two columns of the other end at each end, as ocean models have them."""
    columns = np.arange(-2, COLUMNS + 2)
    return winds.isel(longitude=columns % COLUMNS).assign_coords(longitude=9.0 * columns)


def forecasts(winds: xr.Dataset) -> xr.Dataset:
    """Of two members at two lead times; the only dates are those of the start."""
    leads = xr.Variable("lead_time", np.array([0, 6], "timedelta64[h]").astype("timedelta64[ns]"))
    winds = xr.concat([winds / 2, winds], leads).rename(time="init_time")
    return xr.concat([winds / 3, winds], xr.Variable("number", [0, 1])).transpose("init_time", ...)


def lead_times(winds: xr.Dataset) -> xr.Dataset:
    minutes = xr.Variable("step", np.array([30, 90], "timedelta64[m]").astype("timedelta64[ns]"))
    return xr.concat([winds / 2, winds], minutes).transpose("time", ...)


def in_single_precision(winds: xr.Dataset) -> xr.Dataset:
    """With the first column again, at 359.998 degrees."""
    first = winds.isel(longitude=[0])
    return xr.concat([winds, first.assign_coords(longitude=[np.float32(359.998)])], "longitude")


def shrunk(winds: xr.Dataset) -> xr.Dataset:
    return winds.assign_coords(latitude=winds.latitude * 1e-5)


def two_dates(winds: xr.Dataset) -> xr.Dataset:
    """The winds as the forecast of the second of two days."""
    starts = xr.Variable("init_time", np.array(["1981-12-01", "1981-12-02"], "datetime64[ns]"))
    return xr.concat([winds / 2, winds], starts).transpose("time", ...)


def backwards(winds: xr.Dataset) -> xr.Dataset:
    """From east to west, in whole degrees, of a type in which no difference is below 0."""
    winds = winds.isel(longitude=slice(None, None, -1))
    return winds.assign_coords(longitude=winds.longitude.astype("uint16"))


def all_of_these(winds: xr.Dataset) -> xr.Dataset:
    """From 180 degrees west, from north to south, and latitude last, under other names."""
    winds = around(winds).isel(latitude=slice(None, None, -1)).transpose(..., "longitude", "latitude")
    return winds.rename(latitude="lat", longitude="lon")


def with_others(winds: xr.Dataset) -> xr.Dataset:
    """With variables on other dimensions, which look like those of the map."""
    more = winds.assign(pressure=("lev", np.arange(3.0)), sites=("lat", np.arange(5.0)))
    return more.assign_coords(lat=np.arange(5.0), lev=[1, 2, 3])


def columns(*numbers: int) -> Callable:
    """A box, or the whole map in another order."""
    return lambda winds: winds.isel(longitude=list(numbers))


def named(*names: str, **attributes: tuple[str, ...]) -> Callable:
    """Time, latitude and longitude under other names, and known by attributes, given from longitude on."""

    def change(winds: xr.Dataset) -> xr.Dataset:
        winds = winds.drop_attrs()
        for key, values in attributes.items():
            for dim, value in zip(reversed(DIMS), values):
                winds[dim].attrs[key] = value
        return winds.rename(dict(zip(DIMS, names)))

    return change


def of_a_forecast(winds: xr.Dataset) -> xr.Dataset:
    """Known by their names, and beside the time that it is for there is that of its start."""
    return named("valid_time", "Lat", "LON")(winds).assign_coords(time=0)


def levels(values: list, name: str = "level") -> Callable:
    """The winds at the last of two values of a further dimension; half of them at the other."""
    dim = xr.Variable(name, values)
    return lambda winds: xr.concat([winds / 2, winds], dim).transpose("time", ...)


IN_ORDER = tuple(range(COLUMNS))
FROM_THE_WEST = IN_ORDER[COLUMNS // 2 :] + IN_ORDER[: COLUMNS // 2]
FROM_38 = (COLUMNS - 2, COLUMNS - 1, *IN_ORDER[:-2])
IN_NO_ORDER = tuple(np.random.default_rng(0).permutation(COLUMNS).tolist())
LAYOUTS = {  # what becomes of the dataset, --level, and the columns of the map that is found
    "time last": (lambda winds: winds.transpose("latitude", "longitude", ...), None, IN_ORDER),
    "from 180 degrees west": (around, None, FROM_THE_WEST),
    "longitudes in no order": (columns(*IN_NO_ORDER), None, IN_ORDER),
    "times in no order": (lambda winds: winds.isel(time=[4, 0, 5, 3, 1, 2]), None, IN_ORDER),
    "the first column again": (first_again, None, IN_ORDER),
    "columns beyond both ends": (beyond_both_ends, None, FROM_38),
    "forecasts": (forecasts, "1,6h", IN_ORDER),
    "forecasts of a day": (two_dates, "1981-12-02", IN_ORDER),
    "from east to west": (backwards, None, IN_ORDER),
    "in double precision": (lambda winds: winds.astype("float64"), None, IN_ORDER),
    "all of these": (all_of_these, None, FROM_THE_WEST),
    "other variables": (with_others, None, IN_ORDER),
    "a level of length one": (lambda winds: winds.expand_dims(height=[10.0], axis=1), None, IN_ORDER),
    "a chosen level": (levels([500, 850]), "850", IN_ORDER),
    "a level as a whole number": (levels([500.0, 850.0]), "850", IN_ORDER),
    "lead times of minutes": (lead_times, "90min", IN_ORDER),
    "around in single precision": (in_single_precision, None, IN_ORDER),
    "a spacing of 10 m": (shrunk, None, IN_ORDER),
    "a level in single precision": (levels(np.float32([0.5, 0.494025])), "0.494025", IN_ORDER),
    "a chosen member": (levels(["r1", "r2"], "member"), "r2", IN_ORDER),
    "across Greenwich": (columns(38, 39, 0, 1), None, (38, 39, 0, 1)),
    "across Greenwich, from east to west": (columns(1, 0, 39, 38), None, (38, 39, 0, 1)),
    "a box in no order": (columns(3, 6, 5, 4), None, (3, 4, 5, 6)),
    "names": (of_a_forecast, None, IN_ORDER),
    "standard names": (named("instant", "y", "x", standard_name=DIMS[::-1]), None, IN_ORDER),
    "axes": (named("instant", "lat", "lon", axis=("X", "Y", "T")), None, IN_ORDER),
    "units": (named("t", "y", "x", units=("degrees_east", "degree_north")), None, IN_ORDER),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_the_same_map(layout: str, winds: xr.Dataset, tmp_path: Path) -> None:
    """Each value has the date and the place on Earth that it had, on sorted coordinates without a jump.

    Boxes are read as (time, latitude, longitude), whatever the order in the store.
    """
    transform, level, found_columns = LAYOUTS[layout]
    few = winds.isel(time=slice(6))
    transform(few).to_zarr(tmp_path / "store", consolidated=True)
    reader = reader_of(tmp_path / "store", level)
    found = reader.open()
    expected = few.isel(longitude=list(found_columns))
    assert set(found.variables) == {"u", "v", *DIMS}
    np.testing.assert_allclose(np.diff(found.longitude), 9)
    np.testing.assert_allclose(found.longitude % 360, expected.longitude)
    np.testing.assert_array_equal(found.time, expected.time)
    if transform is not shrunk:
        np.testing.assert_array_equal(found.latitude, expected.latitude)
    place = {"latitude": slice(2, 9), "longitude": np.array([2, 3, 0, 1])}
    boxes = [place | {"time": time} for time in (4, 0)]
    values = reader.read_at_once(boxes)
    assert (values.dtype, values.shape) == (np.float32, (2, 2, 7, 4))
    for number, name in enumerate(("v", "u")):
        np.testing.assert_array_equal(reader.read(name, {"time": slice(0, 6)}), expected[name])
        np.testing.assert_array_equal(reader.read(name, {"time": np.array([4, 1])}), expected[name][[4, 1]])
        for n, box in enumerate(boxes):
            np.testing.assert_array_equal(values[n, number], expected[name][box])


def test_statistics_of_another_layout_are_the_same(winds: xr.Dataset, tmp_path: Path) -> None:
    """In Zarr's format 2, on the sorted map."""
    statistics = winds.sel(time=slice(*TRAINING)).groupby("time.month").mean()
    for name in ("u", "v"):
        statistics[name].attrs["std"] = 2.0
    how = {"zarr_format": 2, "consolidated": False}
    all_of_these(winds).to_zarr(tmp_path / "store", **how)
    stored = all_of_these(statistics).rename(lat="latitude", lon="longitude")
    stored.to_zarr(tmp_path / "store", group="statistics/mine", **how)
    found = store_climatology.read_statistics(reader_of(tmp_path / "store"), "mine")
    expected = statistics[["v", "u"]].to_dataarray().transpose("month", "variable", ...).values
    np.testing.assert_array_equal(found.mean, np.roll(expected, -COLUMNS // 2, axis=-1))
    assert found.std.tolist() == [2, 2]


def test_units_are_the_groups_of_variables() -> None:
    """u and v are judged together, however the unit is spelt; a variable without one by itself."""
    units = {"u": "m s**-1", "t": "K", "v": "m s-1", "n": 1, "gust": "m/s", "q": None, "skin": "K"}
    dataset = xr.Dataset({name: ("time", [0.0], {"units": unit}) for name, unit in units.items()})
    del dataset.q.attrs["units"]
    groups = group_by_unit(dataset, list(units))
    assert groups == {"m/s": [0, 2, 4], "K": [1, 6], "1": [3], "q": [5]}
    assert group_by_unit(dataset, ["v", "u"]) == {"m/s": [0, 1]}


# ------------------------------------------------------------------------------ what cannot be used


def twice_on_time(winds: xr.Dataset) -> xr.Dataset:
    return winds.assign(v=(("time", *DIMS), np.zeros((5, *winds.u.shape))))


def in_months(winds: xr.Dataset) -> xr.Dataset:
    """Times that only another calendar has."""
    winds = winds.assign_coords(time=np.arange(winds.time.size))
    winds.time.attrs["units"] = "months since 1982-01-01"
    return winds


def in_a_data_tree(winds: xr.Dataset) -> xr.Dataset:
    """Whose coordinates are in the group above."""
    return winds.drop_vars(["time", "latitude", "longitude"])


def at(dim: str, *values: float, **attributes: str) -> Callable:
    """Other coordinates, from the first one on."""

    def change(winds: xr.Dataset) -> xr.Dataset:
        changed = winds[dim].values.copy()
        changed[: len(values)] = values
        return winds.assign_coords({dim: (dim, changed, winds[dim].attrs | attributes)})

    return change


TEXTS = [f"{number:g}E" for number in range(COLUMNS)]
ON_GRID = "it is not in the store on time, latitude and longitude alone; there are"


def with_v(change: Callable) -> Callable:
    return lambda winds: winds.assign(v=change(winds.v))


def with_longitude(change: Callable) -> Callable:
    return lambda winds: winds.assign_coords(longitude=change(winds.longitude))


REFUSED = {  # what becomes of the dataset, what is said, and --level
    "two latitudes": (with_v(lambda v: v.rename(latitude="lat")), "lat and latitude both .* of one grid"),
    "texts": (with_v(lambda v: v.astype("<U4")), r"--variables v: its type is \S+; give variables of num"),
    "a time twice": (
        lambda winds: winds.isel(time=[0, 1, 1]),
        r"time has a value twice, 1982-01-11T\S+ and 1982-01-11T\S+: .* missing; write it",
    ),
    "a chunk lost": (
        with_longitude(lambda x: x.where(x < 180)),
        "longitude has no value at position 20 of 40",
    ),
    "a longitude of texts": (with_longitude(lambda _: TEXTS), r"longitude holds \S+; it must"),
    "a latitude twice, but for rounding": (at("latitude", -76.5001), "latitude has a value twice, -76.5"),
    "a longitude twice": (at("longitude", 9.0), "longitude has a value twice, 9.0 and 9.0"),
    "kilometres": (at("latitude", units="km"), "latitude is in km; it must be in degrees"),
    "metres, unsaid": (at("latitude", 5e6), r"latitude has the value 5e\+06 at position 0; it must be in"),
    "no date": (at("time", np.datetime64("NaT")), "time has no value at position 0 of 5"),
    "months": (in_months, ".*mend its attributes, such as the units of time"),
    "a group of a DataTree": (in_a_data_tree, f"--variables v: {ON_GRID} .*in the group above; copy them"),
    "no times": (lambda winds: winds.isel(time=[]), "--variables v: a dimension has length 0"),
    "no such variable": (lambda winds: winds[["u"]], rf"--variables v: {ON_GRID} u \(time, lat"),
    "one time": (lambda winds: winds.isel(time=[0]), f"--variables v: {ON_GRID} u"),
    "a dimension twice": (twice_on_time, rf"--variables v: {ON_GRID} .* v \(time, time, latitude, lon"),
    "levels": (levels([500, 850]), rf"--variables v: {ON_GRID} .* v \(time, level, .*of level by --level"),
    "no such level": (levels([500, 850]), ".*level has no such value; give one of 500, 850", "700"),
    "no level": (lambda winds: winds, ".*the variables have no further dimension", "700"),
    "forecasts": (forecasts, rf"--variables v: {ON_GRID} .*a value of number, lead_time by --level"),
    "no such lead time": (forecasts, "--level 3h: lead_time has no such value; give one of 0h, 6h", "1,3h"),
    "no lead time": (forecasts, "--level 1: .* number, lead_time; give a value of each, with commas", "1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_a_remedy(case: str, winds: xr.Dataset, tmp_path: Path) -> None:
    change, message, *level = REFUSED[case]
    change(winds.isel(time=slice(5))).to_zarr(tmp_path / "store", consolidated=True)
    with pytest.raises(DataError) as refused:
        reader_of(tmp_path / "store", *level).open()
    assert re.match(message, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------ what should be known


@pytest.mark.parametrize("use_cftime", [False, True])
@pytest.mark.parametrize("dated", ["start", "middle", "end"])
def test_months_that_are_dated_at_their_end_are_said(dated: str, use_cftime: bool) -> None:
    """By the bounds of time. The mean of January would count as one of February."""
    edges = xr.date_range("1982-01-01", periods=13, freq="MS", use_cftime=use_cftime).values
    bounds = np.stack([edges[:-1], edges[1:]], axis=1)
    dates = {"start": edges[:-1], "middle": edges[:-1] + (edges[1:] - edges[:-1]) / 2, "end": edges[1:]}
    dataset = xr.Dataset({"u": ("time", np.zeros(12)), "time_bnds": (("time", "nbnd"), bounds)})
    dataset = dataset.assign_coords(time=("time", dates[dated], {"bounds": "time_bnds"}))
    note = explain_bounds(dataset, ["u"])
    assert (note is not None) == (dated == "end")
    assert note is None or "the mean of month 1 counts as month 2" in note


@pytest.mark.parametrize(
    ("chunks", "cost"),
    [
        ((1, 20, 40), None),
        ((144, 20, 40), None),
        ((144, 2, 2), "in 400 chunks, 0.9216 MB with all their times"),
    ],
)
def test_maps_of_many_chunks_are_said_before_the_first_read(
    chunks: tuple[int, ...], cost: str | None, winds: xr.Dataset, tmp_path: Path
) -> None:
    reader = reader_of(made_up_winds.write(tmp_path / "store", winds, chunks))
    reader.open()
    assert bool(reader.notes) == bool(cost)
    assert not cost or re.search(cost, reader.notes[0])
    assert reader.traffic.counts() == (0, 0, 0)


def test_maps_of_many_bytes_are_said_too_with_the_levels_beside_them() -> None:
    """Of which no value is read: 50 times of ten levels on a fine grid."""
    shape = (50, 10, 721, 1440)
    lazy = xr.Variable(("time", "level", "latitude", "longitude"), np.broadcast_to(np.float32(0), shape))
    lazy.encoding["preferred_chunks"] = {"time": 50, "level": 10}
    dataset = xr.Dataset({"u": lazy}).assign_coords({dim: np.arange(n) for dim, n in zip(lazy.dims, shape)})
    assert "in 1 chunks, 2,076 MB with all their times" in explain_blocks(dataset, ["u"], 50)
    assert explain_blocks(dataset, ["u"], 1) is None


@pytest.mark.parametrize("bounds", ["of three", "of another dimension", "without values", "of numbers"])
def test_bounds_that_say_nothing_are_passed_over(bounds: str) -> None:
    edges = xr.date_range("1982-01-01", periods=13, freq="MS").values
    found = {
        "of three": (("time", "nbnd"), np.stack([edges[1:]] * 3, axis=1)),
        "of another dimension": (("other", "nbnd"), np.stack([edges[:-1], edges[1:]], axis=1)),
        "without values": (("time", "nbnd"), np.full((12, 2), np.datetime64("NaT", "ns"))),
        "of numbers": (("time", "nbnd"), np.zeros((12, 2))),
    }
    dataset = xr.Dataset({"u": ("time", np.zeros(12)), "time_bnds": found[bounds]})
    dataset = dataset.assign_coords(time=("time", edges[1:], {"bounds": "time_bnds"}))
    assert explain_bounds(dataset, ["u"]) is None


def test_bounds_that_cannot_be_read_stop_nothing(winds: xr.Dataset, tmp_path: Path) -> None:
    few = winds.isel(time=slice(5))
    few.time.attrs["bounds"] = "time_bnds"
    few["time_bnds"] = ("time", "nbnd"), np.stack([few.time, few.time], axis=1)
    few.to_zarr(tmp_path / "store", encoding={"time_bnds": {"chunks": (1, 2)}}, consolidated=True)
    (tmp_path / "store/time_bnds/c/4/0").write_bytes(b"broken")
    np.testing.assert_array_equal(reader_of(tmp_path / "store").read("u", {"time": 2}), few.u[2])


# ------------------------------------------------------------------------------ times and calendars


def in_calendar(name: str, winds: xr.Dataset) -> xr.Dataset:
    """The same fields on dates of another calendar."""
    time = xr.date_range("1982-01-01", periods=winds.time.size, freq="10D", calendar=name)
    return winds.assign_coords(time=time)


@pytest.mark.parametrize(
    ("calendar", "number", "first", "last"),
    [
        ("standard", 73, "1985-01-05", "1985-02-24"),
        ("noleap", 73, "1985-01-06", "1985-02-25"),
        ("360_day", 72, "1985-02-01", "1985-03-01"),
    ],
)
def test_periods_are_the_times_between_two_dates_both_included(
    calendar: str, number: int, first: str, last: str, winds: xr.Dataset
) -> None:
    time = in_calendar(calendar, winds).time
    training, test = split_times(time, {"--train-times": TRAINING, "--test-times": (first, last)})
    for period in (training, test):
        np.testing.assert_array_equal(time[period.positions], period.dates)
        assert [int(str(date)[5:7]) - 1 for date in period.dates] == period.months.tolist()
    assert [str(date)[:10] for date in test.dates[[0, -1]]] == [first, last]
    assert [str(date)[:4] for date in training.dates[[0, -1]]] == list(TRAINING)
    assert len(training.dates) == number


def test_the_data_of_another_calendar_are_known_again(winds: xr.Dataset, tmp_path: Path) -> None:
    """Dates are objects there: what identifies the data is what they say, not where they are in memory."""
    in_calendar("noleap", winds).to_zarr(tmp_path / "store", consolidated=True)
    found = []
    readers = [reader_of(tmp_path / "store") for _ in range(2)]  # both live: no address is used again
    for reader in readers:
        (training,) = split_times(reader.open().time, {"--train-times": TRAINING})
        checksums = store_checksum.identify_data(reader, training)
        found.append((checksums, store_climatology.identify(reader, training)))
    assert found[0] == found[1]


DATES = np.arange("1982-01-01", "1983-01-01", dtype="datetime64[D]").astype("datetime64[ns]")
DAYS_OF_360 = xr.date_range("1982-01-01", periods=360, freq="D", calendar="360_day", use_cftime=True)
LATE = xr.date_range("12000-01-01", periods=360, freq="D", calendar="noleap", use_cftime=True)
JUNE = "1982-01 1982-06"
OUTSIDE = {  # times, those to train on and to test on, and what is said
    "no date": (DATES, "then now", "1982 1982", "--train-times then now: not dates of the store's calendar"),
    "no date in its calendar": (
        DAYS_OF_360,
        JUNE,
        "1982-07 1982-07-31",
        "--test-times 1982-07 1982-07-31: not dates of the store's calendar, 360_day; give dates of 1982-01-01 to",
    ),
    "not a time": (DATES, JUNE, "NaT 1982-12", "--test-times NaT 1982-12: not dates of the store's calendar"),
    "empty": (DATES, JUNE, "1982-12 1982-11", "--test-times 1982-12 1982-11: no times; give dates of"),
    "five digits": (
        LATE,
        "1982 1982",
        "1983 1983",
        "no times; give dates of 12000-01-01 to 12000-12-26 that",
    ),
    "overlap": (DATES, JUNE, "1982-06-30 1982-09", f"--test-times .*: shares times with .* {JUNE};"),
    "integers": (np.arange(365), "0 100", "200 300", "time holds int64, not dates; give it units such as"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_times_that_cannot_be_used_are_refused_with_their_flag(case: str) -> None:
    axis, training, test, message = OUTSIDE[case]
    time = xr.DataArray(axis, dims="time", coords={"time": axis})
    spans = {"--train-times": tuple(training.split()), "--test-times": tuple(test.split())}
    with pytest.raises(DataError, match=message):
        split_times(time, spans)


def test_a_period_that_is_alone_is_compared_with_no_other() -> None:
    """As in predict."""
    time = xr.DataArray(DATES, dims="time", coords={"time": DATES})
    with pytest.raises(
        DataError, match=r"--times 1990 1991: no times; give dates of 1982-01-01 to 1982-12-31$"
    ):
        split_times(time, {"--times": ("1990", "1991")})
