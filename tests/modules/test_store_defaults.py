"""Periods and the size of a patch: as given, or as the book has them, or as they fit the store."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from errors import DataError
from options import STORE_DEFAULTS, Options
from store_defaults import complete, print_defaults

BOOK = tuple(" ".join(STORE_DEFAULTS[name]) for name in ("train_times", "validation_times", "test_times"))
STORES = {  # the arguments of date_range, and the periods that come of it
    "the book's years": (("1981-06", 144, "MS", "standard"), BOOK),
    "without the last of them": (
        ("1982-01", 120, "MS", "standard"),
        ("1982-01-01 1989-12-01", "1990-01-01 1990-12-01", "1991-01-01 1991-12-01"),
    ),
    "four times a day": (
        ("2001-03-01", 4 * 30 - 2, "6h", "standard"),
        ("2001-03-01 2001-03-24", "2001-03-25 2001-03-27", "2001-03-28 2001-03-30"),
    ),
    "three days": (
        ("2001-03-01", 3, "1D", "standard"),
        ("2001-03-01 2001-03-01", "2001-03-02 2001-03-02", "2001-03-03 2001-03-03"),
    ),
    "months of 30 days": (
        ("0851-01-01", 60, "15D", "360_day"),
        ("0851-01-01 0852-12-16", "0853-01-01 0853-03-16", "0853-04-01 0853-06-16"),
    ),
    "whole years of months": (
        ("2001-01", 60, "MS", "standard"),
        ("2001-01-01 2003-12-01", "2004-01-01 2004-12-01", "2005-01-01 2005-12-01"),
    ),
    "and parts of a year at both ends": (
        ("1999-06", 7 + 14 * 12 + 5, "MS", "360_day"),
        ("1999-06-01 2011-12-01", "2012-01-01 2012-12-01", "2013-01-01 2014-05-01"),
    ),
    "too few years of months": (
        ("2001-01", 48, "MS", "standard"),
        ("2001-01-01 2004-02-01", "2004-03-01 2004-07-01", "2004-08-01 2004-12-01"),
    ),
    "years of five digits": (
        ("9999-12-31", 10, "1D", "noleap"),
        ("9999-12-31 10000-01-07", "10000-01-08 10000-01-08", "10000-01-09 10000-01-09"),
    ),
}
GRIDS = {(20, 40): 20, (73, 144): 64, (64, 900): 64, (721, 31): 28, (9, 40): 64}  # and the size of a patch


def make_fields(times: tuple = ("1982", 132, "MS", "standard"), grid: tuple[int, int] = (73, 144)):
    start, periods, freq, calendar = times
    time = xr.date_range(start, periods=periods, freq=freq, calendar=calendar, use_cftime=True)
    if calendar == "standard":
        time = time.to_datetimeindex(time_unit="ns")
    return xr.Dataset(coords={"time": time, "latitude": np.arange(grid[0]), "longitude": np.arange(grid[1])})


@pytest.mark.parametrize("case", STORES)
def test_periods_are_the_books_or_80_10_and_10_percent_of_the_dates_with_a_note(case: str, capsys) -> None:
    """Each date is in one period, with all of its times."""
    times, expected = STORES[case]
    fields = make_fields(times)
    options = complete(Options(), fields)
    spans = [options.train_times, options.validation_times, options.test_times]
    assert tuple(" ".join(span) for span in spans) == expected
    if expected != BOOK:
        sizes = [fields.sel(time=slice(*span)).time.size for span in spans]
        assert sum(sizes) == fields.time.size
    print_defaults(Options(), options)
    notes = capsys.readouterr().out
    for flag, span in zip(("--train-times", "--validation-times", "--test-times"), expected):
        assert (f"note: {flag} {span}: " in notes) == (expected != BOOK)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_patch_is_64_cells_or_the_most_that_fit_with_a_note(grid: tuple[int, int], capsys) -> None:
    options = complete(Options(), make_fields(grid=grid))
    assert options.patch_size == GRIDS[grid]
    print_defaults(Options(), options)
    assert ("note: --patch-size" in capsys.readouterr().out) == (GRIDS[grid] != 64)


def test_what_is_given_stays(capsys) -> None:
    given = replace(Options(), train_times=["2001", "2002"], patch_size=32)
    options = complete(given, make_fields(("2001-01", 60, "MS", "standard")))
    assert (options.train_times, options.patch_size) == (["2001", "2002"], 32)
    assert options.test_times == ["2005-01-01", "2005-12-01"]
    assert complete(options, make_fields(grid=(20, 40))) == options
    print_defaults(given, options)
    notes = capsys.readouterr().out
    assert "--train-times" not in notes and "--patch-size" not in notes and "--test-times 2005-01" in notes


def test_too_few_dates_are_refused() -> None:
    with pytest.raises(DataError, match="--train-times: there are 2 dates; give"):
        complete(Options(), make_fields(("2001-01-01", 8, "6h", "standard")))
