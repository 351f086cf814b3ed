"""Patches that cover a map with overlap, and how their predictions become one map."""

import math

import numpy as np


def patch_starts(length: int, size: int, overlap: int, wraps: bool) -> np.ndarray:
    """The first cells of patches that cover a dimension, as far apart as they may be.

    Neighbours share at least `overlap` cells. Where the dimension wraps around, the last
    patch and the first one do, too.
    """
    stride = size - overlap
    if wraps:
        count = math.ceil(length / stride)
        return np.arange(count) * length // count
    count = math.ceil(max(0, length - size) / stride) + 1
    return np.linspace(0, length - size, count).astype(int)


def patch_weights(size: int, overlap: int) -> np.ndarray:
    """What a patch's cells count for, (size, size): less towards its edges.

    The weight rises linearly over the overlap, so that one patch fades into the next.
    """
    from_start = np.arange(size) + 0.5
    from_edge = np.minimum(from_start, from_start[::-1])
    ramp = np.minimum(from_edge / max(overlap, 0.5), 1)
    return np.outer(ramp, ramp)


class Tiling:
    """A map cut into patches, and put together again."""

    def __init__(self, shape: tuple[int, int], size: int, overlap: int, wraps: bool):
        self.shape = shape
        self.size = size
        self.wraps = wraps
        height, width = shape
        rows = patch_starts(height, size, overlap, wraps=False)
        columns = patch_starts(width, size, overlap, wraps)
        self.corners = [(row, column) for row in rows for column in columns]
        self.weights = patch_weights(size, overlap)

    def indices(self, corner: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns of a patch, across the map's seam if need be."""
        row, column = corner
        rows = np.arange(row, row + self.size)
        columns = np.arange(column, column + self.size) % self.shape[1]
        return np.ix_(rows, columns)

    def cut(self, field: np.ndarray) -> np.ndarray:
        """All patches of a map (channels, H, W): (patches, channels, size, size)."""
        patches = [field[:, *self.indices(corner)] for corner in self.corners]
        return np.stack(patches)

    def join(self, patches: np.ndarray) -> np.ndarray:
        """The weighted mean of the patches in each cell: a map, (channels, H, W)."""
        total = np.zeros((patches.shape[1], *self.shape))
        weight = np.zeros(self.shape)
        for corner, patch in zip(self.corners, patches):
            where = self.indices(corner)
            total[:, *where] += self.weights * patch
            weight[where] += self.weights
        return (total / weight).astype("float32")
