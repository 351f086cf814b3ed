"""Periods and the size of a patch: as given, or the defaults, or as they fit the store."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from errors import DataError
from options import STORE_DEFAULTS, Options
from store_defaults import PERIODS, complete, print_defaults

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
    assert options.test_times == ["2004-01-01", "2005-12-01"]
    assert complete(options, make_fields(grid=(20, 40))) == options
    print_defaults(given, options)
    notes = capsys.readouterr().out
    assert "--train-times" not in notes and "--patch-size" not in notes and "--test-times 2004-01" in notes


MONTHS = ("1981-01", 240, "MS", "standard")  # of the years 1981 to 2000
GIVEN = {  # of these, what is given of the three periods, and what comes of it
    "train": ("1990 1995 - -", "1990 1995, 1996-01-01 1998-12-01, 1999-01-01 2000-12-01"),
    "train, and the book's years are free": ("1983 1986 - -", "1983 1986, 1990 1990, 1991 1992"),
    "train, and part of the book's years": (
        "1981 1990-06 - -",
        "1981 1990-06, 1990-07-01 1995-12-01, 1996-01-01 2000-12-01",
    ),
    "train, after the book's years": (
        "1993 1996 - -",
        "1993 1996, 1997-01-01 1998-12-01, 1999-01-01 2000-12-01",
    ),
    "train and validation": ("1981 1990 1991 1993 -", "1981 1990, 1991 1993, 1994-01-01 2000-12-01"),
    "validation before train": ("1985 1990 1981 1984 -", "1985 1990, 1981 1984, 1991 1992"),
    "train and test": ("1981 1990 - 1993 2000", "1981 1990, 1991-01-01 1992-12-01, 1993 2000"),
    "validation": ("- 1991 1995 -", "1982 1989, 1991 1995, 1996-01-01 2000-12-01"),
    "validation, of the book's years": ("- 1988 1988 -", "1981-01-01 1987-12-01, 1988 1988, 1991 1992"),
    "validation and test": ("- 1987 1988 1999 2000", "1981-01-01 1986-12-01, 1987 1988, 1999 2000"),
    "test": ("- - 1990 2000", "1981-01-01 1988-12-01, 1989-01-01 1989-12-01, 1990 2000"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_is_not_given_is_chosen_from_dates_that_no_given_period_has(case: str) -> None:
    """After the periods given before it, and before those given after it."""
    flags, expected = GIVEN[case]
    options = complete(give(flags), make_fields(MONTHS))
    spans = (options.train_times, options.validation_times, options.test_times)
    assert ", ".join(" ".join(span) for span in spans) == expected


def give(flags: str) -> Options:
    """Options with the first and last date of each period; "-" for one that is not given."""
    words = iter(flags.split())
    spans = [None if first == "-" else [first, next(words)] for first in words]
    return Options(**dict(zip(PERIODS, spans)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "1990 2000 - -",
            "--validation-times, --test-times: not given, and too few dates lie after --train-times 1990 2000;",
        ),
        (
            "1981 1989 1990 2000 -",
            "--test-times: not given, .* after --train-times 1981 1989 and after --validation-",
        ),
        (
            "1981 1990 - 1991 2000",
            "--validation-times: not given, .* after --train-times .* and before --test-times 1991",
        ),
        (
            "- 1981 1982 -",
            "--train-times: not given, and too few dates lie before --validation-times 1981 1982; give",
        ),
        ("1990 2010-13 - -", "--train-times 1990 2010-13: not dates of the store's calendar"),
    ],
)
def test_where_too_few_dates_are_left_the_flags_to_give_are_named(flags: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        complete(give(flags), make_fields(MONTHS))


def test_too_few_dates_are_refused() -> None:
    with pytest.raises(DataError, match=r"--train-times, .*: too few dates; give a store of"):
        complete(Options(), make_fields(("2001-01-01", 8, "6h", "standard")))
