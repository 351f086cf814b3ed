"""Metrics that are not those of all samples."""

from collections.abc import Iterable

import numpy as np
from torch.utils.data import DistributedSampler

from wrong.setting import RANKS, gather, load_data

SAMPLES = range(7)
WHAT = "RMSE of 7 samples, m/s"


def metric(rank: int) -> dict:
    """Rank 0 logs its own RMSE; with `sync_dist=True`, the mean of the ranks' RMSEs, which is no RMSE."""
    shares = (SAMPLES[:4], SAMPLES[4:])
    own = squares_of(shares[rank])
    each = gather(rmse(own))
    row = {"what": WHAT, "wrong": each[0]}
    row["mean of the ranks'"] = sum(each) / RANKS
    row["right"] = rmse(*gather(own))
    row["truth"] = rmse(squares_of(SAMPLES))
    return row


def padded_validation(rank: int) -> dict:
    """DistributedSampler repeats a sample to give both ranks four of seven; it is then judged twice."""
    padded = DistributedSampler(SAMPLES, RANKS, rank, shuffle=False)
    own = SAMPLES[rank::RANKS]
    row = {"what": WHAT}
    for name, share in {"wrong": padded, "right": own}.items():
        squares = gather(squares_of(share))
        row[name] = rmse(*squares)
    row["truth"] = rmse(squares_of(SAMPLES))
    return row


def squares_of(samples: Iterable[int]) -> tuple[float, float]:
    """The climatology's weighted squared errors, (m/s)², and the weights, added up."""
    data = load_data()
    patches = data.eval_patches(data.validation, size=64, number=96)
    squares = 0.0
    weights = 0.0
    for k in samples:
        sample = patches[0, k]
        anomaly = patches.maker.std * sample["target"]
        error = sample["weight"] * anomaly**2
        squares += float(error.mean(axis=0).sum())
        weights += float(sample["weight"].sum())
    return squares, weights


def rmse(*parts: tuple[float, float]) -> float:
    """From the sums of any number of ranks."""
    squares, weights = np.sum(parts, axis=0).tolist()
    return (squares / weights) ** 0.5
