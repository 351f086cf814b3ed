"""The climatology of the training times: read from the store, or sampled once and kept."""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import xarray as xr
from filelock import FileLock
from tqdm import tqdm

from errors import DataError, first_line
from fields import DIMENSIONS, Period, sort_coordinates
from store import FieldReader

KEPT = Path(__file__).parent / "outputs/climatology"
TIMES_A_MONTH = 20  # of a sample
SAMPLE_STREAM = 5  # of random numbers


@dataclass(frozen=True)
class Climatology:
    """The mean of each month and the spread around it."""

    mean: np.ndarray  # (12, variables, latitude, longitude), NaN where there is none
    std: np.ndarray  # (variables,), of the anomalies over all valid cells

    @property
    def valid(self) -> np.ndarray:
        """Where every variable has a value in some month, (latitude, longitude)."""
        return ~np.isnan(self.mean).all(axis=0).any(axis=0)


def load_climatology(
    reader: FieldReader, training: Period, span: tuple[str, str]
) -> Climatology:
    """From the store's statistics of this span, if it has some, else from a sample.

    DataError if they are of another grid, or if a variable has no values or no anomalies.
    """
    name = "_".join([*sorted(reader.variables), *span])
    if len(name) >= 200:  # a file's name may have 255 letters
        name = sha256(name.encode()).hexdigest()
    climatology = read_statistics(reader, name)
    if climatology is None:
        climatology = keep_sample(reader, training, name)
    for variable, std in zip(reader.variables, climatology.std):
        if not std > 0:
            reason = "in the training times it never differs from its month's mean"
            raise DataError(f"--variables {variable}: {reason}; leave it out")
    return climatology


def read_statistics(reader: FieldReader, name: str) -> Climatology | None:
    """From the store's group; None if another tool made it, or for other times."""
    fields = reader.open()
    group = f"statistics/{name}"
    try:
        statistics = xr.open_zarr(reader.store, group=group, chunks=None).load()
    except (FileNotFoundError, KeyError):
        return None
    except (RuntimeError, ValueError) as error:  # a codec's
        raise DataError(f"{group}: {first_line(error)}") from error
    for variable in reader.variables:
        if variable not in statistics or "std" not in statistics[variable].attrs:
            return None
    statistics = sort_coordinates(statistics)[reader.variables]
    for dim in ("latitude", "longitude"):
        if not np.array_equal(statistics[dim], fields[dim]):
            reason = "its grid differs from the store's"
            raise DataError(f"{group}: {reason}; run make_store.py again")
    mean = statistics.to_dataarray("variable").astype("float32")
    mean = mean.transpose("month", "variable", "latitude", "longitude").values
    std = [statistics[variable].attrs["std"] for variable in reader.variables]
    climatology = Climatology(mean, np.float32(std))
    require_values(climatology.valid)
    return climatology


def require_values(valid: np.ndarray) -> None:
    """DataError unless some cell has a value of every variable, (latitude, longitude)."""
    if not valid.any():
        reason = "no cell has values of all variables in the training times"
        raise DataError(f"--variables, --train-times: {reason}; give others")


def keep_sample(reader: FieldReader, training: Period, name: str) -> Climatology:
    """From a sample of the training times, kept in a file for the next run."""
    path = KEPT / f"{name}_{identify(reader, training)}.npz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # of several ranks, one computes
            if not path.exists():
                climatology = compute_sample(reader, training)
                partial = path.with_suffix(".part.npz")
                np.savez(partial, mean=climatology.mean, std=climatology.std)
                os.replace(partial, path)
                print(f"climatology of a sample, kept in {os.path.relpath(path)}")
    except OSError as error:
        reason = f"the climatology cannot be kept: {error.strerror}"
        raise DataError(f"{KEPT}: {reason}; make the folder writable") from error
    with np.load(path) as kept:
        return Climatology(kept["mean"], kept["std"])


def identify(reader: FieldReader, training: Period) -> str:
    """A name for a store, its grid, its first values and these variables in their order."""
    location = reader.location
    url = location.url
    if "://" not in url:
        url = os.path.abspath(url)
    server = urlsplit(location.endpoint or "")
    parts = [url, server.hostname, *reader.variables]  # a server's port may change
    fields = reader.open()
    parts += [fields[dim].values.tobytes() for dim in DIMENSIONS]
    first = {"time": training.positions[0]}
    parts += [reader.read(variable, first).tobytes() for variable in reader.variables]
    parts += [TIMES_A_MONTH]
    return sha256(repr(parts).encode()).hexdigest()[:12]


def compute_sample(reader: FieldReader, training: Period) -> Climatology:
    """From TIMES_A_MONTH times of each month, the same times in every run."""
    rng = np.random.default_rng(SAMPLE_STREAM)
    means, squares, counts = [], [], []
    for month in tqdm(range(12), "months sampled", disable=None):
        of_month = training.positions[training.months == month]
        times = np.sort(rng.permutation(of_month)[:TIMES_A_MONTH])
        sample = [reader.read(name, {"time": times}) for name in reader.variables]
        values = np.stack(sample).astype("float64")  # (variables, times, H, W)
        check_finite(values, times, reader)
        count = np.isfinite(values).sum(axis=1)
        total = np.nansum(values, axis=1)
        mean = np.divide(
            total, count, out=np.full(total.shape, np.nan), where=count > 0
        )
        means.append(mean)
        squares.append(np.nansum((values - mean[:, None]) ** 2, axis=1))
        counts.append(count)
    counted = np.sum(counts, axis=0)
    valid = (counted > 0).all(axis=0)
    require_values(valid)
    variance = np.sum(squares, axis=0)[:, valid].sum(axis=1)
    variance /= counted[:, valid].sum(axis=1)
    return Climatology(np.float32(means), np.float32(variance**0.5))


def check_finite(values: np.ndarray, times: np.ndarray, reader: FieldReader) -> None:
    """DataError if a value is infinite. NaN is allowed: the cell may be masked."""
    infinite = np.isinf(values).any(axis=(0, 2, 3))
    if infinite.any():
        date = reader.open().time.values[times[infinite][0]]
        raise DataError(f"infinity on {str(date)[:16]}; replace it by a value")
