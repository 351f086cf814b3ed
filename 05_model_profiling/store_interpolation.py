"""Optimal interpolation of a store's patches, with a covariance from its training times."""

import numpy as np

from climatology import Climatology
from data import Grid
from fields import Period
from optimal_interpolation import hybrid_covariance, interpolate, zonal_covariance
from store import FieldReader
from store_climatology import SAMPLE_STREAM, TIMES_A_MONTH, check_finite

MOST_BYTES = 1e9  # of the sample, all of which is in memory


class Interpolator:
    """Fills patches of `size` x `size` cells by optimal interpolation.

    `anomalies` are those of the map at training times, (times, variables, rows, columns),
    NaN where absent; `wraps` says whether its last column meets the first.
    """

    def __init__(self, anomalies: np.ndarray, wraps: bool, size: int):
        self.anomalies = anomalies
        self.wraps = wraps
        self.size = size
        self.bands: dict[int, np.ndarray] = {}  # zonal covariances, by their first row

    def fill(
        self, row: int, column: int, seen: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """The unseen anomalies of the patch that begins there, elsewhere 0.

        `values` are its anomalies, (variables, H, W), and `seen` is (H, W).
        """
        sample = self.cut(row, column)
        zonal = self.zonal(row)
        filled = np.zeros_like(values)
        for number in range(len(values)):
            covariance = hybrid_covariance(sample[:, number], zonal[number], seen)
            known = values[number, seen]
            filled[number, ~seen] = interpolate(covariance, seen, known)
        return filled

    def cut(self, row: int, column: int) -> np.ndarray:
        """The patch at all times, across the map's seam if need be."""
        bottom = row + self.size
        columns = np.arange(column, column + self.size)
        rows = self.anomalies[:, :, row:bottom]
        return rows.take(columns, axis=-1, mode="wrap")

    def zonal(self, row: int) -> np.ndarray:
        """The zonal covariance of a patch's rows, (variables, H, H, 2 * W - 1).

        It is made for a band of rows, in which other patches lie, too: that of all rows of
        a fine grid would not fit in memory.
        """
        offset = row % self.size
        first = row - offset
        if first not in self.bands:
            beyond = first + 2 * self.size
            band = self.anomalies[:, :, first:beyond]
            self.bands[first] = zonal_covariance(band, self.wraps, self.size)
        rows = slice(offset, offset + self.size)
        return self.bands[first][:, rows, rows]


def make_interpolator(
    reader: FieldReader, training: Period, climatology: Climatology, size: int
) -> Interpolator:
    """With the covariance of a sample of the training times: the same in every run."""
    reader = reader.counted_apart()
    fields = reader.open()
    grid = Grid(fields.latitude.values, fields.longitude.values)
    wraps = grid.patch_space(size).columns == len(grid.longitude)
    anomalies = read_anomalies(reader, training, climatology)
    return Interpolator(anomalies, wraps, size)


def read_anomalies(
    reader: FieldReader, training: Period, climatology: Climatology
) -> np.ndarray:
    """Of a sample of times, over their spread, (times, variables, latitude, longitude)."""
    sample = sample_times(reader, training, climatology.mean[0].nbytes)
    positions = training.positions[sample]
    maps = [reader.read(name, {"time": positions}) for name in reader.variables]
    anomalies = np.stack(maps, axis=1).astype("float32", copy=False)
    months = training.months[sample]
    for anomaly, month, position in zip(anomalies, months, positions):
        check_finite(anomaly[:, None], [position], reader)
        anomaly -= climatology.mean[month]
        anomaly /= climatology.std[:, None, None]
    return anomalies


def sample_times(
    reader: FieldReader, training: Period, bytes_a_time: int
) -> np.ndarray:
    """Numbers of training times: as many as a climatology is made of, chunk by chunk.

    A chunk that is read for one of its times is read for all.
    """
    most = min(12 * TIMES_A_MONTH, int(MOST_BYTES / bytes_a_time) or 1)
    chunks = reader.split_by_chunk(training.positions)
    rng = np.random.default_rng(SAMPLE_STREAM)
    order = rng.permutation(len(chunks))
    chosen = np.concatenate([chunks[number] for number in order])
    return np.sort(chosen[:most])
