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
        """The anomalies of the patch that begins there, (variables, H, W); 0 where seen.

        `values` are its anomalies, of which those `seen` count, (H, W).
        """
        columns = np.arange(column, column + self.size)
        rows = self.anomalies[:, :, row : row + self.size]
        sample = rows.take(columns, axis=-1, mode="wrap")
        filled = np.zeros_like(values)
        for number, zonal in enumerate(self.zonal(row)):
            covariance = hybrid_covariance(sample[:, number], zonal, seen)
            known = values[number, seen]
            filled[number, ~seen] = interpolate(covariance, seen, known)
        return filled

    def zonal(self, row: int) -> np.ndarray:
        """The zonal covariance of a patch's rows, (variables, H, H, 2 * W - 1).

        It is made for a band of rows, in which other patches lie, too: that of all rows of
        a fine grid would not fit in memory.
        """
        first = row // self.size * self.size
        if first not in self.bands:
            band = self.anomalies[:, :, first : first + 2 * self.size]
            self.bands[first] = zonal_covariance(band, self.wraps, self.size)
        rows = slice(row - first, row - first + self.size)
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
    order = np.random.default_rng(SAMPLE_STREAM).permutation(len(chunks))
    chosen = np.concatenate([chunks[number] for number in order])
    return np.sort(chosen[:most])
