"""The share of cells with a climatology, by month: in the note of a run, its summary, preflight and predict."""

from dataclasses import replace
from pathlib import Path

import evaluation
import numpy as np
import options
import pytest
import task
from climatology import describe_shares
from data import Data
from location import Location
from made_up_winds import COLUMNS, ROWS, flags_for, make_winds, with_land, write
from predict.maps import MapDataset
from preflight.patches import check_climatology

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
PERIODS = ("training", "validation", "test")
CELLS = ROWS * COLUMNS - 4 * 8  # without land
SAID = f"cells with a climatology: January 0.0%, April {1000 * (CELLS - 1) // CELLS / 10}%"


@pytest.fixture
def data(tmp_path: Path, capsys) -> Data:
    """Training has no January, and in a cell two values of each April."""
    winds = with_land(make_winds())
    training = winds.time.dt.year < 1984
    winds.u[training & (winds.time.dt.month == 1)] = np.nan
    april = np.flatnonzero(training & (winds.time.dt.month == 4))
    winds.v[april[2:], 0, 0] = np.nan
    store = write(tmp_path / "winds", winds)
    kept = ["--climatology-dir", tmp_path / "kept", "--missing", "mask"]
    parsed = options.parse_options("", flags_for(store, *kept))
    made = task.make_data(parsed, Location(str(store)))[1]
    assert f"note: {SAID}\n" in capsys.readouterr().out
    return made


def test_months_that_have_fewer_cells_are_in_the_summary(data: Data, capsys) -> None:
    """Land, which has none in any month, does not count; nor do months of no period."""
    shares = data.climatology_shares()
    assert (shares["January"], shares["April"]) == (0, pytest.approx(1 - 1 / CELLS))
    assert sorted(shares.values())[2:] == [1] * 10
    metrics = {"rmse": {"climatology": {"K": 1.0}, "U-Net": {"K": 1.0}}}
    metrics |= {"steps": 4, "seconds": 1, "peak_memory_gb": 1, "climatology_shares": shares}
    evaluation.print_summary(metrics, ["1991", "1992"], Path("fill.png"))
    assert f"\n{SAID}\n" in capsys.readouterr().out
    assert describe_shares({"May": 1.0}) == ""
    may = replace(data.test, months=np.array([4, 4]))
    assert replace(data, training=may, validation=may, test=may).climatology_shares() == {"May": 1}


def test_a_month_without_any_is_red_before_a_run(data: Data) -> None:
    red = check_climatology(data)
    assert red.is_red
    assert "in January, the worst month, 0.0% of the cells" in red.text
    assert "several years of January, or" in red.remedy
    later = data.test.months > 0
    parts = {name: replace(getattr(data, name), months=data.test.months[later]) for name in PERIODS}
    assert not check_climatology(replace(data, **parts)).is_red


def test_cells_that_will_not_be_filled_are_counted_by_month(data: Data) -> None:
    def described(months: list[int]) -> str:
        period = replace(data.test, months=np.array(months))
        maps = MapDataset(
            None, period, climatology=data.climatology, std=None, tiling=None, seed=0, missing="mask"
        )
        return maps.describe_gaps()

    assert described([4, 3, 3, 0]).endswith(f"of {CELLS}: January {CELLS}, April 1")
    assert described([4, 5]) == ""
