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
        stacked = anomalies.reshape(times, 1, variables * rows, columns)
        zonal = zonal_covariance(stacked, wraps, size)
        shape = (variables, rows, variables, rows, 2 * size - 1)
        self.zonal = torch.from_numpy(zonal).reshape(shape).to(device)
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
        cells = torch.from_numpy(values).to(device).flatten(2)
        filled = torch.zeros_like(cells)
        if not seen.any():
            return filled.reshape(values.shape)
        for numbers in self.groups:
            covariance = self.covariance(row, column, known, numbers)
            observed = cells[:, numbers][..., known].flatten(1)
            among_seen = covariance[:, known.repeat(len(numbers))]
            expected = interpolate(among_seen, covariance, observed)
            filled[:, numbers] = expected.reshape(len(values), len(numbers), -1)
        filled *= ~known
        return filled.reshape(values.shape)

    def covariance(
        self, row: int, column: int, known: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Of each seen cell with every cell, of all these variables."""
        sample = self.cut(row, column)[:, numbers].flatten(2)
        times, variables, cells = sample.shape
        sample = sample / times**0.5  # products add up to a mean
        observed = sample[..., known].flatten(1)
        shape = (variables, -1, variables, cells)
        covariance = (observed.T @ sample.flatten(1)).reshape(shape)
        first = self.rows[known][:, None]
        columns_apart = self.columns - self.columns[known][:, None]
        covariance *= LOCAL_SHARE * taper(self.rows - first, columns_apart)[:, None]

        bottom = row + self.size
        lag = columns_apart + self.size - 1
        zonal = (1 - LOCAL_SHARE) * self.zonal[:, row:bottom, :, row:bottom]
        for n, one in enumerate(numbers):
            for m, other in enumerate(numbers):
                covariance[n, :, m] += zonal[one, first, other, self.rows, lag]
                if n != m:
                    covariance[n, :, m] *= CROSS_SHARE
        return covariance.reshape(-1, variables * cells)

    def cut(self, row: int, column: int) -> torch.Tensor:
        """The patch at all times, across the map's seam if need be."""
        width = self.anomalies.shape[-1]
        columns = (self.columns[: self.size] + column) % width
        return self.anomalies[:, :, row : row + self.size, columns]


def taper(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The trust in a sample, by how far two cells lie apart: optimal_interpolation.taper."""
    distance = 3**0.5 * torch.hypot(rows / TAPER_ROWS, columns / TAPER_COLUMNS)
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
