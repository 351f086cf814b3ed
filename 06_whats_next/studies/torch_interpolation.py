"""Optimal interpolation on any device, of variables apart or together, at several times.

Apart, it is optimal_interpolation.py, which fills u from u alone. Together, each variable is
also filled from the others, by their covariance with it: the same estimate, of a patch whose
cells are those of all variables. That covariance is made as the others are, of a tapered
sample and a zonal part, and then damped, because it is small and its sample uncertain.

What takes long depends on the place and the swaths alone. So a place is filled at many times
in the time of one.
"""

import numpy as np
import torch

from optimal_interpolation import (
    LOCAL_SHARE,
    NOISE,
    TAPER_COLUMNS,
    TAPER_ROWS,
    zonal_covariance,
)

CROSS_SHARE = 0.8  # of the covariance between variables, chosen on the validation year


class TorchInterpolator:
    """Fills patches of `size` x `size` cells, on the device that is given.

    `anomalies` are those of maps, (times, variables, rows, columns), without gaps. `groups`
    are the numbers of the variables that are filled together: [[0], [1]] or [[0, 1]].
    """

    def __init__(
        self,
        anomalies: np.ndarray,
        wraps: bool,
        size: int,
        groups: list[list[int]],
        device: torch.device,
    ):
        times, variables, rows, columns = anomalies.shape
        self.anomalies = torch.from_numpy(anomalies).to(device)
        self.size = size
        self.groups = [torch.tensor(group, device=device) for group in groups]
        # The rows of all variables, one below the other, so that each two of them meet.
        stacked = anomalies.reshape(times, 1, -1, columns)
        zonal = zonal_covariance(stacked, wraps, size)
        zonal = torch.from_numpy(zonal)
        zonal = zonal.reshape(variables, rows, variables, rows, -1)
        self.zonal = zonal.to(device)
        cells = torch.arange(size, device=device)
        self.rows = cells.repeat_interleave(size)  # of each cell of a patch
        self.columns = cells.repeat(size)

    def fill(
        self, row: int, column: int, seen: np.ndarray, values: np.ndarray
    ) -> torch.Tensor:
        """The unseen anomalies of the patch that begins there, elsewhere 0.

        `values` are its anomalies at some times, (times, variables, H, W), and `seen` is
        (H, W).
        """
        device = self.anomalies.device
        known = torch.from_numpy(seen.ravel()).to(device)
        cells = torch.from_numpy(values).to(device)
        cells = cells.flatten(2)
        filled = torch.zeros_like(cells)
        if not seen.any():
            return filled.reshape(values.shape)
        for numbers in self.groups:
            covariance = self.covariance(row, column, known, numbers)
            of_all = known.repeat(len(numbers))
            among_seen = covariance[:, of_all]
            chosen = cells[:, numbers]
            observed = chosen[..., known].flatten(1)
            expected = interpolate(among_seen, covariance, observed)
            filled[:, numbers] = expected.reshape(chosen.shape)
        filled *= ~known
        return filled.reshape(values.shape)

    def covariance(
        self, row: int, column: int, known: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Of each seen cell with every cell, of all these variables."""
        sample = self.cut(row, column)
        sample = sample[:, numbers].flatten(2)
        times, variables, cells = sample.shape
        sample = sample / times**0.5  # products add up to a mean
        observed = sample[..., known].flatten(1)
        covariance = observed.T @ sample.flatten(1)
        covariance = covariance.reshape(variables, -1, variables, cells)
        first = self.rows[known][:, None]
        rows_apart = self.rows - first
        columns_apart = self.columns - self.columns[known][:, None]
        trust = taper(rows_apart, columns_apart)
        covariance *= LOCAL_SHARE * trust[:, None]

        bottom = row + self.size
        zonal = self.zonal[:, row:bottom, :, row:bottom]
        zonal = (1 - LOCAL_SHARE) * zonal
        lag = columns_apart + self.size - 1
        for n, one in enumerate(numbers):
            for m, other in enumerate(numbers):
                part = covariance[n, :, m]
                part += zonal[one, first, other, self.rows, lag]
                if n != m:
                    part *= CROSS_SHARE
        return covariance.reshape(-1, variables * cells)

    def cut(self, row: int, column: int) -> torch.Tensor:
        """The patch at all times, across the map's seam if need be."""
        width = self.anomalies.shape[-1]
        bottom = row + self.size
        columns = column + self.columns[: self.size]
        return self.anomalies[:, :, row:bottom, columns % width]


def taper(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The trust in a sample, by how far two cells lie apart: optimal_interpolation.taper."""
    rows = rows / TAPER_ROWS
    columns = columns / TAPER_COLUMNS
    distance = 3**0.5 * torch.hypot(rows, columns)
    return (1 + distance) * torch.exp(-distance)


def interpolate(
    among_seen: torch.Tensor, covariance: torch.Tensor, observed: torch.Tensor
) -> torch.Tensor:
    """The expected value of every cell at each time, (times, cells)."""
    own = among_seen.diagonal()
    own += NOISE * own.mean()
    factor = torch.linalg.cholesky(among_seen)
    coefficients = torch.cholesky_solve(observed.T, factor)
    return coefficients.T @ covariance
