"""Optimal interpolation on any device, with its expected error, of variables apart or together.

Apart, it is optimal_interpolation.py, which fills u from u alone. Together, each variable is
also filled from the others, by their covariance with it: the same estimate, of a patch whose
cells are those of all variables. That covariance is made as the others are, of a tapered
sample and a zonal part, and then damped, because it is small and its sample uncertain.
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
Filled = tuple[torch.Tensor, torch.Tensor]


class TorchInterpolator:
    """Fills patches of `size` x `size` cells, on the device that is given.

    `anomalies` are those of maps, (times, variables, rows, columns), without gaps. `groups`
    are the numbers of the variables that are filled together: ((0,), (1,)) or ((0, 1),).
    """

    def __init__(
        self,
        anomalies: np.ndarray,
        wraps: bool,
        size: int,
        groups: tuple[tuple[int, ...], ...],
        device: torch.device,
    ):
        times, variables, rows, columns = anomalies.shape
        self.anomalies = torch.from_numpy(anomalies).to(device)
        self.size = size
        self.groups = groups
        # The rows of all variables, one below the other: so each two of them are met.
        stacked = anomalies.reshape(times, 1, variables * rows, columns)
        zonal = zonal_covariance(stacked, wraps, size)
        shape = (variables, rows, variables, rows, 2 * size - 1)
        self.zonal = torch.from_numpy(zonal).reshape(shape).to(device)
        cells = torch.arange(size, device=device)
        self.rows = cells.repeat_interleave(size)  # of each cell of a patch
        self.columns = cells.repeat(size)

    def fill(
        self, row: int, column: int, seen: np.ndarray, values: np.ndarray
    ) -> Filled:
        """The unseen anomalies of the patch that begins there, and their expected error.

        `values` are its anomalies, (variables, H, W), and `seen` is (H, W). The error is a
        standard deviation. Both are (variables, H, W), and 0 in the cells that are seen.
        """
        device = self.anomalies.device
        shape = values.shape
        known = torch.from_numpy(seen.ravel()).to(device)
        cells = torch.from_numpy(values).to(device).flatten(1)
        filled = torch.zeros_like(cells)
        error = torch.zeros_like(cells)
        for group in self.groups:
            numbers = torch.tensor(group, device=device)
            covariance, variance = self.covariances(row, column, known, numbers)
            observed = cells[numbers][:, known].flatten()
            among_seen = covariance[:, known.repeat(len(group))]
            expected, left = interpolate(among_seen, covariance, observed, variance)
            filled[numbers] = expected.reshape(len(group), -1)
            error[numbers] = left.sqrt().reshape(len(group), -1)
        unseen = ~known
        filled *= unseen
        error *= unseen
        return filled.reshape(shape), error.reshape(shape)

    def covariances(
        self, row: int, column: int, known: torch.Tensor, numbers: torch.Tensor
    ) -> Filled:
        """Of each seen cell with every cell, of all variables; and the variance of these."""
        sample = self.cut(row, column)[:, numbers].flatten(2)
        times, variables, cells = sample.shape
        sample = sample / times**0.5  # products add up to a mean
        observed = sample[..., known].flatten(1)
        number = known.sum()
        shape = (variables, number, variables, cells)
        covariance = (observed.T @ sample.flatten(1)).reshape(shape)
        rows_apart = self.rows - self.rows[known][:, None]
        columns_apart = self.columns - self.columns[known][:, None]
        trust = LOCAL_SHARE * taper(rows_apart, columns_apart)
        covariance *= trust[:, None]

        bottom = row + self.size
        zonal = self.zonal[numbers, row:bottom][:, :, numbers, row:bottom]
        first = self.rows[known][:, None]
        lag = columns_apart + self.size - 1
        spread = zonal[:, first, :, self.rows, lag]  # seen, cells, variables, variables
        covariance += (1 - LOCAL_SHARE) * spread.permute(2, 0, 3, 1)
        damping = torch.full((variables, variables), CROSS_SHARE, device=known.device)
        damping.fill_diagonal_(1)
        covariance *= damping[:, None, :, None]

        variance = LOCAL_SHARE * (sample**2).sum(dim=0)
        own = torch.arange(variables, device=known.device)[:, None]
        no_lag = zonal[own, self.rows, own, self.rows, self.size - 1]
        variance += (1 - LOCAL_SHARE) * no_lag
        return covariance.reshape(variables * number, -1), variance.flatten()

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
    among_seen: torch.Tensor,
    covariance: torch.Tensor,
    observed: torch.Tensor,
    variance: torch.Tensor,
) -> Filled:
    """The expected value of every cell, and the variance that is left of it."""
    if not len(observed):
        return torch.zeros_like(variance), variance
    own = among_seen.diagonal()
    own += NOISE * own.mean()
    factor = torch.linalg.cholesky(among_seen)
    sides = torch.cat([covariance, observed[:, None]], dim=1)
    whitened = torch.linalg.solve_triangular(factor, sides, upper=False)
    explained = whitened[:, :-1]
    expected = whitened[:, -1] @ explained
    left = variance - (explained**2).sum(dim=0)
    return expected, left.clamp(min=0)
