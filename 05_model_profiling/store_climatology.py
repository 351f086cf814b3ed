"""The climatology of a store: read from its statistics, or computed once and kept."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import BadZipFile

import numpy as np
import xarray as xr
from filelock import FileLock
from tqdm import tqdm

from climatology import (
    LEAST_VALUES,
    Climatology,
    MonthlySums,
    check_climatology,
    check_finite,
    require_times,
    require_values,
)
from coordinates import DIMENSIONS, sort_coordinates
from decoding import FILLS, SCALES
from errors import DataError, first_line
from fields import Period
from store import FieldReader

TIMES_A_MONTH = 20  # of a sample
SAMPLE_STREAM = 5  # of random numbers
TIMES_AHEAD = 16  # read at once
SAVES = 20  # of the sums, in a pass over the training times


def load_climatology(
    reader: FieldReader,
    training: Period,
    *,
    span: list[str],
    missing: str,
    constant: str,
    folder: Path,
) -> Climatology:
    """From the store's statistics of this span, if it has some, else from a sample.

    What is computed is kept in `folder`, for the next run.

    If `missing` is "mask", from what is present at all times of the span: a sample would
    take a cloudy cell for an empty one, and the store's statistics do not say how many
    values they are of. `constant` says what becomes of cells that never change: "mask",
    "keep", or "refuse". DataError if there are some then, if the statistics are of another
    grid, or if a variable has no values or no anomalies.
    """
    # A reader of its own, because the run's counts the missing chunks of the run.
    reader = reader.counted_apart()
    level = [reader.level] if reader.level else []
    name = "_".join([*sorted(reader.variables), *level, *span])
    if len(name) >= 200 or "/" in name:  # a file's name may have 255 letters
        name = sha256(name.encode()).hexdigest()
    require_times(training, span, missing)
    climatology = None
    if missing == "refuse":
        climatology = read_statistics(reader, name)
    if climatology is None or (constant == "mask" and climatology.constant.any()):
        kind = missing if constant != "mask" else f"{missing}_constant"
        path = folder / f"{name}_{kind}_{identify(reader, training)}.npz"
        climatology = compute_once(reader, training, missing, constant, path)
    check_climatology(climatology, constant, reader.open())
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
            raise DataError(f"{group}: {reason}; write them anew")
    mean = statistics.to_dataarray("variable").astype("float32")
    mean = mean.transpose("month", "variable", "latitude", "longitude").values
    std = [statistics[variable].attrs["std"] for variable in reader.variables]
    # All that monthly means tell: two that are equal to the last bit are of constants.
    same = np.fmax.reduce(mean) == np.fmin.reduce(mean)
    constant = same & ((~np.isnan(mean)).sum(axis=0) > 2)
    climatology = Climatology(
        mean, np.float32(std), reader.variables, constant=constant
    )
    require_values(climatology.valid)
    return climatology


def compute_once(
    reader: FieldReader, training: Period, missing: str, constant: str, path: Path
) -> Climatology:
    """From a file that an earlier run has kept, or computed and kept for the next run."""
    kept = read_kept(path)
    if kept is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):  # of several ranks, one computes
                kept = read_kept(path)
                kept = kept or compute(reader, training, missing, constant, path)
        except OSError as error:
            reason = f"the climatology cannot be kept: {error.strerror}"
            problem = f"--climatology-dir {path.parent}: {reason}"
            remedy = "give a folder that can be written to"
            raise DataError(f"{problem}; {remedy}") from error
    mean, std, is_constant = kept
    return Climatology(mean, std, reader.variables, missing, is_constant)


def read_kept(path: Path) -> tuple[np.ndarray, ...] | None:
    """Mean, std and constant cells; None if there is no such file, or none that is whole."""
    try:
        with np.load(path) as arrays:
            return arrays["mean"], arrays["std"], arrays["constant"]
    except (OSError, EOFError, KeyError, ValueError, BadZipFile):
        return None


def compute(
    reader: FieldReader, training: Period, missing: str, constant: str, path: Path
) -> tuple[np.ndarray, ...]:
    """Mean, std and constant cells, which are also written to the file."""
    if missing == "mask":
        times = "all training times"
        found = average_present(reader, training, constant, path)
    else:
        times = "a sample"
        found = average_sample(reader, training, constant)
    mean, std, is_constant = found
    save(path, mean=mean, std=std, constant=is_constant)
    print(f"climatology of {times}, kept in {os.path.relpath(path)}")
    return found


def save(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays to a file that is whole whenever it is there."""
    partial = path.with_suffix(".part.npz")
    np.savez(partial, **arrays)
    os.replace(partial, path)


def identify(reader: FieldReader, training: Period) -> str:
    """A name for a store, its grid, its first values and these variables in their order."""
    location = reader.location
    url = location.url
    if "://" not in url:
        url = os.path.abspath(url)
    server = urlsplit(location.endpoint or "")
    parts = [url, server.hostname, *reader.variables]  # a server's port may change
    if location.snapshot:
        parts.append(location.snapshot)
    fields = reader.open()
    # As text: dates of other calendars are objects, and their bytes are addresses.
    parts += [fields[dim].values.astype(str).tobytes() for dim in DIMENSIONS]
    first = {"time": training.positions[0]}
    parts += [reader.read(variable, first).tobytes() for variable in reader.variables]
    # The chunks, too: a pass that was stopped has counted those that are in its sums.
    parts += [reader.level, reader.times_per_chunk, TIMES_A_MONTH, LEAST_VALUES]
    # What the stored numbers mean.
    parts += [reader.limits[variable] for variable in reader.variables]
    for variable in reader.variables:
        encoding = fields[variable].encoding
        parts += [str(encoding.get(key)) for key in (*FILLS, *SCALES)]
    return sha256(repr(parts).encode()).hexdigest()[:12]


def average_sample(
    reader: FieldReader, training: Period, constant: str
) -> tuple[np.ndarray, ...]:
    """Mean, std and constant cells, as a Climatology has them, from TIMES_A_MONTH times of each month.

    The times are the same in every run.
    """
    rng = np.random.default_rng(SAMPLE_STREAM)
    means, squares, counts = [], [], []
    lowest, highest = [], []
    for month in tqdm(range(12), "months sampled", disable=None):
        of_month = training.positions[training.months == month]
        times = np.sort(rng.permutation(of_month)[:TIMES_A_MONTH])
        values = read_times(reader, times)
        count = np.isfinite(values).sum(axis=1)
        total = np.nansum(values, axis=1)
        mean = np.divide(
            total, count, out=np.full(total.shape, np.nan), where=count > 0
        )
        means.append(mean)
        squares.append(np.nansum((values - mean[:, None]) ** 2, axis=1))
        counts.append(count)
        if times.size:
            lowest.append(np.fmin.reduce(values, axis=1))
            highest.append(np.fmax.reduce(values, axis=1))
    counted = np.sum(counts, axis=0)
    valid = (counted > 0).all(axis=0)
    mean = np.float32(means)
    same = np.fmin.reduce(lowest) == np.fmax.reduce(highest)
    is_constant = same & (counted > 1)
    if constant == "mask":
        valid &= ~is_constant.any(axis=0)
        mean[:, :, ~valid] = np.nan
    require_values(valid)
    variance = np.sum(squares, axis=0)[:, valid].sum(axis=1)
    variance /= counted[:, valid].sum(axis=1)
    return mean, np.float32(variance**0.5), is_constant


def read_times(reader: FieldReader, times: np.ndarray) -> np.ndarray:
    """All variables at these times, (variables, times, H, W), in double precision."""
    maps = [reader.read(name, {"time": times}) for name in reader.variables]
    values = np.stack(maps).astype("float64")
    check_finite(values, reader.open().time.values[times], reader.variables)
    return values


def average_present(
    reader: FieldReader, training: Period, constant: str, path: Path
) -> tuple[np.ndarray, ...]:
    """Mean, std and constant cells of what is present at all training times, each chunk read once.

    A few threads read ahead; the blocks are added in order, so that the sums are the same
    in every pass. They are saved now and then, and a pass that was stopped goes on from there.
    """
    fields = reader.open()
    blocks = reader.split_by_chunk(training.positions)
    sums = MonthlySums(
        len(reader.variables), fields.latitude.size, fields.longitude.size
    )
    saved = path.with_suffix(".sums.npz")
    with suppress(OSError, EOFError, ValueError, BadZipFile), np.load(saved) as arrays:
        vars(sums).update(dict(arrays))

    def read(block: np.ndarray) -> np.ndarray:
        times = training.positions[block]
        values = reader.read_at_once([{"time": slice(times[0], times[-1] + 1)}])[0]
        check_finite(values, reader.open().time.values[times], reader.variables)
        return values

    rest = blocks[int(sums.blocks) :]
    bar = tqdm(
        total=len(blocks),
        initial=len(blocks) - len(rest),
        desc="climatology",
        disable=None,
    )
    ahead = max(1, TIMES_AHEAD // reader.times_per_chunk)
    for block, values in zip(rest, read_ahead(read, rest, ahead)):
        sums.add(values, training.months[block])
        bar.update()
        if sums.blocks % max(1, len(blocks) // SAVES) == 0:
            save(saved, **vars(sums))
    bar.close()
    missing = len(reader.traffic.missing)
    if missing:
        print(f"missing chunks in the training times: {missing}")
    absent = 1 - sums.count.sum() / (len(training.dates) * sums.count[0].size)
    print(f"absent in the training times: {absent:.1%} of the values")
    saved.unlink(missing_ok=True)
    return sums.average(LEAST_VALUES, constant)


def read_ahead(
    read: Callable[[np.ndarray], np.ndarray], blocks: list[np.ndarray], ahead: int
) -> Iterator[np.ndarray]:
    """What `read` returns for each block, in order, read by as many threads ahead."""
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(ahead) as threads:
        for block in blocks:
            pending.append(threads.submit(read, block))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
