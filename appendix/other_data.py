"""Appendix: how many values a month's climatology needs, if values are missing now and then.

    uv run python other_data.py

Takes values out of chapter 1's winds at random, and computes the climatology of the training years from
what is left. You should see that cells with one value make the training's anomalies too small.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

WINDS = Path(__file__).parent.parent / "01_setup/data/navy_winds.nc"
LEAST = (1, 2, 3, 4)


def read_anomaly_spread(absent: float, least: int, seed: int = 0) -> dict[str, float]:
    """Cells of a month that are left, and the anomalies' standard deviation in training and test, m/s.

    `absent` is the share of the values taken out; `least`, how many of a month's eight a cell must keep.
    """
    rng = np.random.default_rng(seed)
    with xr.open_dataset(WINDS) as dataset:
        winds = dataset.to_dataarray().transpose("time", "variable", ...).load()
    present = rng.random((winds.sizes["time"], *winds.shape[2:])) >= absent
    winds = winds.where(present[:, None])
    training = winds.sel(time=slice("1982", "1989")).groupby("time.month")
    test = winds.sel(time=slice("1991", "1992")).groupby("time.month")
    count = training.count()
    mean = training.mean().where(count >= least)
    return {
        "absent": absent,
        "least": least,
        "left": float(mean.notnull().mean()),
        "training": float((training - mean).std()),
        "test": float((test - mean).std()),
    }


def study(absent: list[float]) -> Iterator[dict[str, float]]:
    """A row for each share of absent values and each least number of values."""
    for share in absent:
        for least in LEAST:
            yield read_anomaly_spread(share, least)


def main(argv: list[str] | None = None) -> list[dict]:
    """Print a row for each case and return them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--absent", type=float, nargs="+", default=[0.1, 0.5, 0.8], help="shares")
    args = parser.parse_args(argv)
    for share in args.absent:
        if not 0 <= share < 1:
            parser.error(f"--absent {share}: give a share from 0 to below 1")
    rows = list(study(args.absent))
    print("absent  values needed  cells left  anomalies in training, in test, m/s")
    for row in rows:
        print("{absent:6.0%} {least:14} {left:11.1%} {training:22.2f} {test:8.2f}".format(**row))
    return rows


if __name__ == "__main__":
    main()
