"""Optimal interpolation of patches, with a covariance from the training times."""

import math

import numpy as np

from climatology import Climatology, check_finite
from data import Grid, Reader
from errors import DataError
from fields import Period, split_by_chunk
from optimal_interpolation import hybrid_covariance, interpolate, zonal_covariance

MOST_CELLS = 100 * 100  # of a patch: twice as many take six times as long
MOST_TIMES = 240  # from which the covariance is taken
LEAST_TIMES = 60  # unless the training has fewer
MOST_BYTES = 2e9  # of these times, which are in memory
MOST_READ = 10e9  # bytes of the chunks in which they are
TIMES_STREAM = 7  # of random numbers


class Interpolator:
    """Fills patches of `size` x `size` cells by optimal interpolation.

    `anomalies` are those of maps at training times, (times, variables, rows, columns),
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

        It is made for a band of rows, which other patches share, because that of all
        rows of a fine grid would not fit in memory.
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
    reader: Reader, training: Period, climatology: Climatology, size: int
) -> Interpolator:
    """An interpolator that has the covariance of a sample of the training times.

    The sample is the same in every run. DataError for large patches, and if the sample
    cannot be read or would be too small.
    """
    if size**2 > MOST_CELLS:
        raise DataError(f"patches of {size} x {size} are too large for it")
    fields = reader.open()
    grid = Grid(fields.latitude.values, fields.longitude.values)
    sample = sample_times(reader, training, climatology.mean[0].nbytes)
    anomalies = read_anomalies(reader, training, sample, climatology)
    return Interpolator(anomalies, grid.wraps, size)


def sample_times(reader: Reader, training: Period, bytes_a_time: int) -> np.ndarray:
    """Numbers of training times, equally many in each of as many chunks as may be read.

    Neighbouring times are alike, so they say less about a covariance than distant ones.
    DataError if too few fit in memory.
    """
    chunks = split_by_chunk(training.positions, reader.times_per_chunk)
    most = min(MOST_TIMES, int(MOST_BYTES / bytes_a_time))
    if most < min(LEAST_TIMES, len(training.positions)):
        reason = f"only {most} times fit in {MOST_BYTES / 1e9:g} GB of memory"
        raise DataError(f"{reason}, and a covariance needs {LEAST_TIMES}")
    bytes_a_chunk = reader.times_per_chunk * bytes_a_time
    readable = int(MOST_READ / bytes_a_chunk) or 1
    number = min(len(chunks), readable, most)
    rng = np.random.default_rng(TIMES_STREAM)
    times = []
    for chosen in rng.permutation(len(chunks))[:number]:
        chunk = chunks[chosen]
        stride = math.ceil(len(chunk) * number / most)
        times.append(chunk[::stride])
    return np.sort(np.concatenate(times))


def read_anomalies(
    reader: Reader, training: Period, sample: np.ndarray, climatology: Climatology
) -> np.ndarray:
    """Normalised anomalies of some training times, (times, variables, latitude, longitude)."""
    positions = training.positions[sample]
    shape = (len(sample), *climatology.mean[0].shape)
    anomalies = np.empty(shape, "float32")
    for number, name in enumerate(reader.variables):
        anomalies[:, number] = reader.read(name, {"time": positions})
    months = training.months[sample]
    dates = training.dates[sample]
    for anomaly, month, date in zip(anomalies, months, dates):
        check_finite(anomaly[:, None], [date], reader.variables)
        anomaly -= climatology.mean[month]
        anomaly /= climatology.std[:, None, None]
    return anomalies
