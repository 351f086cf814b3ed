"""The row "optimal interpolation" of the baselines: its RMSE on the patches that judge a run, computed once.

It depends on the data, the patches and the method, and on no training run. So it is kept in a file whose name
holds a checksum of all three, and later runs read it.
"""

import math
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import numpy as np
from tqdm import tqdm

import optimal_interpolation
from kept_rmse import keep, read
from optimal_interpolation import hybrid_covariance, interpolate, zonal_covariance

OI = "optimal interpolation"
KEPT = Path(__file__).parent / "outputs"
MOST_CELLS = 100 * 100  # of a patch: twice as many take six times as long


def oi_baseline(training, patches, folder: Path = KEPT) -> dict[str, dict[str, float]]:
    """The row, with the RMSE for each unit, from a file in the folder if there is one; {} for large patches.

    `training` and `patches` are train.py's `Patches`: those to take the covariance from, and those to fill.
    """
    if patches.size**2 > MOST_CELLS:
        size = f"{patches.size} x {patches.size}"
        print(f"{OI}: left out, because it would take too long for patches of {size}")
        return {}
    path = folder / f"optimal_interpolation_{checksum(training, patches)}.json"
    rmse = read(path, list(patches.pools))
    if rmse is None:
        began = perf_counter()
        zonal = zonal_of(training)
        fills = (fill(training, zonal, patches, k) for k in range(patches.batch_size))
        rmse = rmse_of(tqdm(fills, OI, patches.batch_size, unit="patch"), patches)
        print(f"{OI}: {perf_counter() - began:.0f} s for {patches.batch_size} patches, this once")
        keep(path, rmse)
    return {OI: rmse}


def zonal_of(training) -> np.ndarray:
    """The zonal covariance of the training times, without the cells that are masked."""
    wraps = training.last_column == len(training.longitude) - 1
    return zonal_covariance(np.where(training.valid, training.anomalies, np.nan), wraps, training.size)


def fill(
    training, zonal: np.ndarray, patches, k: int, noise: float = optimal_interpolation.NOISE, **how
) -> np.ndarray:
    """Sample k's anomalies as OI fills them, normalised, (variables, H, W); 0 where they were seen."""
    _, row, column, _ = patches.sample(0, k)
    rows = slice(row, row + patches.size)
    anomalies = training.cut(training.anomalies, row, column)
    sample = patches[0, k]
    seen = sample["input"][-1] > 0
    filled = np.zeros_like(sample["target"])
    for variable, target in enumerate(sample["target"]):
        covariance = hybrid_covariance(anomalies[:, variable], zonal[variable, rows, rows], seen, **how)
        filled[variable, ~seen] = interpolate(covariance, seen, target[seen], noise)
    return filled


def rmse_of(fills, patches) -> dict[str, float]:
    """The RMSE, for each unit, of a fill of each sample, (variables, H, W)."""
    squares, weights = 0, 0
    for k, filled in enumerate(fills):
        sample = patches[0, k]
        error = patches.std * (filled - sample["target"])
        squares += (sample["weight"] * error**2).sum(axis=(1, 2), dtype="float64")
        weights += sample["weight"].sum(dtype="float64")
    return {unit: math.sqrt(squares[pool].mean() / weights) for unit, pool in patches.pools.items()}


def checksum(training, patches) -> str:
    """Of all that the RMSE depends on: the method's code, the training times and every sample."""
    digest = sha256(Path(optimal_interpolation.__file__).read_bytes())
    digest.update(repr((training.last_column, patches.pools, patches.std.tolist())).encode())
    parts = [training.anomalies, training.valid]
    for k in range(patches.batch_size):
        digest.update(repr(patches.sample(0, k)[1:3]).encode())
        parts += patches[0, k].values()
    for part in parts:
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()[:16]
