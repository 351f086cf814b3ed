"""Appendix, other_data.py: how many values a climatology needs, as the page says."""

import book
import numpy as np
import pytest
import xarray as xr
from runs import load

entry = load("appendix/other_data.py", "appendix_other_data")


def test_with_one_value_the_anomalies_of_the_training_are_too_small() -> None:
    """And with more values less so, at the price of cells."""
    spread = [entry.measure(0.8, least) for least in (1, 3)]
    ratios = [row["training"] / row["test"] for row in spread]
    assert ratios[0] < 0.6 < 0.7 < ratios[1]
    assert spread[0]["left"] > 3 * spread[1]["left"]


def test_without_a_gap_the_spread_is_that_of_the_winds() -> None:
    found = entry.measure(0, 8)
    with xr.open_dataset(book.ROOT / "01_setup/data/navy_winds.nc") as winds:
        values = winds.to_dataarray().values.astype("float64")
    values = values.reshape(2, 11, 12, *values.shape[2:])  # years, months
    mean = values[:, :8].mean(axis=1, keepdims=True)
    assert found["left"] == 1
    assert found["training"] == pytest.approx(np.std(values[:, :8] - mean), rel=1e-4)
    assert found["test"] == pytest.approx(np.std(values[:, 9:] - mean), rel=1e-4)


def test_a_share_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["--absent", "1"])
    assert ended.value.code == 2
    assert "--absent 1.0: give a share" in capsys.readouterr().err
