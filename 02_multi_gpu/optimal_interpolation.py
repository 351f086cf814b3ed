"""Optimal interpolation: the best linear estimate of the unseen cells from the seen ones.

It is the field's standard method: Gandin, "Objective analysis of meteorological fields"
(1963); Bretherton, Davis and Fandry, Deep-Sea Research 23 (1976); Daley, "Atmospheric data
analysis" (1991). Geostatistics calls it simple kriging, and machine learning calls it
regression by a Gaussian process with a given covariance. Here that is the covariance of
the anomalies at the training times.

Best means: no linear estimate has a smaller expected squared error, if the covariance is
the true one. Everything here is an anomaly, so its expected value is 0. A patch is (H, W);
its cells, and the seen ones among them, are counted row by row.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.linalg import cho_factor, cho_solve

# Chosen on a validation year of monthly winds at 2.5 degrees; other data may ask for others.
LOCAL_SHARE = 0.6  # of the covariance sampled in the patch; the rest is the zonal one
TAPER_ROWS, TAPER_COLUMNS = 8, 16  # cells over which trust in that sample falls
NOISE = 0.002  # of the observations, as a share of the variance


def interpolate(covariance, seen, values, noise: float = NOISE) -> np.ndarray:
    """The expected values of the unseen cells, from the `values` of the seen ones.

    `covariance` is that of each seen cell with every cell, (seen cells, cells). `noise` is
    a share of the seen cells' mean variance. LinAlgError if it is no covariance.
    """
    if not seen.any():
        return np.zeros(seen.size, covariance.dtype)
    cells = seen.ravel()
    among_seen = covariance[:, cells]
    variance = among_seen.diagonal()
    scale = variance.mean() or 1  # 0 if nothing ever changes here
    np.fill_diagonal(among_seen, variance + noise * scale)
    factor = cho_factor(among_seen, overwrite_a=True)
    coefficients = cho_solve(factor, values)
    expected = coefficients @ covariance
    return expected[~cells]


def hybrid_covariance(anomalies, zonal, seen, local_share: float = LOCAL_SHARE):
    """The covariance of each seen cell with every cell of a patch, (seen cells, cells).

    A sample of a hundred times gives distant cells a covariance by chance, so the sample
    is tapered (Houtekamer and Mitchell, Monthly Weather Review 129, 2001). Where that
    leaves little, the zonal covariance stands in (a hybrid: Hamill and Snyder, Monthly
    Weather Review 128, 2000). Products and weighted sums of covariances are covariances.

    Of one variable: `anomalies` are the patch's at the training times, (times, H, W), NaN
    where absent, and `zonal` is the table of zonal_covariance for its rows,
    (H, H, 2 * W - 1). Sums are over the geometric mean of both cells' counts, as they are
    there: where gaps do not coincide, the covariance is too small.
    """
    cells = anomalies.reshape(len(anomalies), -1)
    present = np.isfinite(cells)
    counts = present.sum(axis=0, dtype=cells.dtype).clip(1)
    cells = np.where(present, cells, 0) / np.sqrt(counts)  # products add up to a mean
    covariance = cells[:, seen.ravel()].T @ cells
    covariance *= taper(seen)
    covariance *= local_share
    covariance += spread_zonal((1 - local_share) * zonal, seen)
    return covariance


def taper(seen: np.ndarray) -> np.ndarray:
    """A factor that falls from 1 as two cells lie further apart, (seen cells, cells).

    It is the Matérn covariance of smoothness 3/2, with distances in cells.
    """
    height, width = seen.shape
    rows = np.arange(1 - height, height, dtype="float32")
    columns = np.arange(1 - width, width, dtype="float32")
    rows /= TAPER_ROWS
    columns /= TAPER_COLUMNS
    distance = np.sqrt(3) * np.hypot(rows[:, None], columns)
    factor = (1 + distance) * np.exp(-distance)
    windows = sliding_window_view(factor, seen.shape)
    of_pairs = windows[::-1, ::-1]  # from each cell to every cell
    return of_pairs[seen].reshape(-1, seen.size)


def spread_zonal(zonal: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The zonal covariance of each seen cell with every cell, (seen cells, cells)."""
    windows = sliding_window_view(zonal, seen.shape[1], axis=-1)
    by_columns = windows[:, :, ::-1]  # rows, rows, columns, columns
    of_pairs = by_columns.swapaxes(1, 2)
    return of_pairs[seen].reshape(-1, seen.size)


def zonal_covariance(anomalies: np.ndarray, wraps: bool, size: int) -> np.ndarray:
    """The covariance of each two rows by their lag along longitude, a mean over the globe.

    `anomalies` are (times, variables, rows, columns), NaN where absent. Returns a table,
    (variables, rows, rows, 2 * size - 1): at [v, i, j, size - 1 + lag] is the covariance
    of row i with row j, `lag` columns further on.

    It is a sum of products over the geometric mean of both rows' counts. Over the number
    of pairs it would be unbiased, but no covariance: with a mask, or on a map that does
    not wrap, no Cholesky factor of it exists.
    """
    present = np.isfinite(anomalies)
    length = anomalies.shape[-1]
    if not wraps:
        length += size  # zeros, so that the last columns do not meet the first
    values = np.where(present, anomalies, 0)
    spectrum = np.fft.rfft(values, length)
    spectrum = spectrum.transpose(1, 3, 2, 0)  # variables, wave numbers, rows, times
    products = spectrum.conj() @ spectrum.swapaxes(2, 3)
    by_lag = np.fft.irfft(products, length, axis=1)
    lags = np.arange(1 - size, size)
    by_lag = by_lag.take(lags, axis=1, mode="wrap")
    sums = by_lag.transpose(0, 2, 3, 1)
    counts = present.sum(axis=(0, 3))
    root = np.sqrt(counts.clip(1))
    mean_count = root[:, :, None] * root[:, None]
    covariance = sums / mean_count[..., None]
    return covariance.astype("float32")
