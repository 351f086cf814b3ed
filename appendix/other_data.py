"""Appendix: how many values a month's climatology needs, if values are missing at times.

    uv run python other_data.py

It takes values out of chapter 1's winds at random, and computes the climatology of the
training years from what is left. You should see that a climatology of one value makes the
training's anomalies too small.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

WINDS = Path(__file__).parent.parent / "01_setup/data/navy_winds.nc"
LEAST = (1, 2, 3, 4)


def read_winds() -> xr.DataArray:
    """The winds (time, variable, latitude, longitude), m/s."""
    with xr.open_dataset(WINDS) as dataset:
        return dataset.to_dataarray().transpose("time", "variable", ...).load()


def measure(absent: float, least: int, seed: int = 0) -> dict[str, float]:
    """The months' cells that are left, and the std of anomalies in training and test, m/s.

    `absent` is the share of the values taken out. A cell must keep `least` of a month's
    eight values.
    """
    winds = read_winds()
    rng = np.random.default_rng(seed)
    drawn = rng.random((winds.sizes["time"], *winds.shape[2:]))
    present = drawn >= absent
    winds = winds.where(present[:, None])
    training = winds.sel(time=slice("1982", "1989")).groupby("time.month")
    test = winds.sel(time=slice("1991", "1992")).groupby("time.month")
    mean = training.mean()
    mean = mean.where(training.count() >= least)
    left = mean.notnull().mean()
    training_std = (training - mean).std()
    test_std = (test - mean).std()
    return {
        "absent": absent,
        "least": least,
        "left": float(left),
        "training": float(training_std),
        "test": float(test_std),
    }


def study(absent: list[float]) -> Iterator[dict[str, float]]:
    """A row for each share of absent values and each least number of values."""
    for share in absent:
        for least in LEAST:
            yield measure(share, least)


def main(argv: list[str] | None = None) -> list[dict]:
    """Print a row for each case and return them."""
    shares = parse(argv)
    rows = list(study(shares))
    print("absent  values needed  cells left  anomalies in training, in test, m/s")
    for row in rows:
        given = f"{row['absent']:6.0%} {row['least']:14} {row['left']:11.1%}"
        print(f"{given} {row['training']:22.2f} {row['test']:8.2f}")
    return rows


def parse(argv: list[str] | None) -> list[float]:
    """The shares of absent values; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [0.1, 0.5, 0.8]
    parser.add_argument(
        "--absent", type=float, nargs="+", default=default, help="shares to remove"
    )
    shares = parser.parse_args(argv).absent
    for share in shares:
        if not 0 <= share < 1:
            parser.error(f"--absent {share}: give a share from 0 to below 1")
    return shares


if __name__ == "__main__":
    main()
