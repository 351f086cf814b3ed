"""The row "optimal interpolation" of the baselines, computed once and kept.

It depends on the data, the patches and the method, and on no training run. So it is kept
beside the climatology, in a file whose name holds a checksum of all three.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import numpy as np
from tqdm import tqdm

import interpolator
import optimal_interpolation
from data import Data, PatchDataset
from errors import DataError, first_line, print_note
from interpolator import make_interpolator
from kept_rmse import keep, read

OI = "optimal interpolation"


def oi_baseline(
    data: Data, patches: PatchDataset, samples: list[dict], folder: Path
) -> dict[str, dict[str, float]]:
    """The row: the RMSE in each unit, from a file in the folder if there is one.

    `samples` are those of step 0. {}, with a note, if it cannot be made: the network has
    been trained, and its own RMSE is what the run was for.
    """
    corners = [patches.patch(0, k)[1:3] for k in range(len(samples))]
    path = folder / f"oi_{checksum(data, samples, corners)}.json"
    rmse = read(path, list(data.units))
    if rmse is None:
        began = perf_counter()
        try:
            fills = fill(data, patches.maker.space.size, samples, corners)
            rmse = rmse_of(fills, samples, data)
        # ValueError, and so LinAlgError: of values that overflow in the products.
        except (DataError, ValueError, MemoryError) as error:
            print_note(f"{OI} is left out: {first_line(error)}")
            return {}
        seconds = perf_counter() - began
        print(f"{OI}: {seconds:.0f} s for {len(samples)} patches, this once")
        keep(path, rmse)
    return {OI: rmse}


def fill(
    data: Data, size: int, samples: list[dict], corners: list[tuple[int, int]]
) -> Iterator[np.ndarray]:
    """The anomalies of each sample as OI fills them, over their spread."""
    with tqdm(total=len(samples), desc=OI, unit="patch", disable=None) as bar:
        parts = (data.reader, data.training, data.climatology)
        by_oi = make_interpolator(*parts, size)
        for sample, corner in zip(samples, corners):
            seen = sample["input"][-1] > 0
            yield by_oi.fill(*corner, seen, sample["target"])
            bar.update()


def rmse_of(
    fills: Iterable[np.ndarray], samples: list[dict], data: Data
) -> dict[str, float]:
    """The RMSE, in each unit, of a fill of each sample, (variables, H, W).

    DataError if it is not finite.
    """
    squares, weights = 0, 0
    for filled, sample in zip(fills, samples):
        error = (filled - sample["target"]).astype("float64")
        squares += (sample["weight"] * error**2).sum(axis=(1, 2))
        weights += sample["weight"].sum(dtype="float64")
    std = data.climatology.std.astype("float64")
    mean_squares = std**2 * squares / weights
    if not np.isfinite(mean_squares).all():
        raise DataError("its errors are not finite")
    return data.rmse(mean_squares)


def checksum(data: Data, samples: list[dict], corners: list[tuple[int, int]]) -> str:
    """A digest of what the RMSE depends on: the method, the training times, every sample.

    The climatology stands for the values at the training times.
    """
    digest = sha256()
    for module in (optimal_interpolation, interpolator):
        digest.update(Path(module.__file__).read_bytes())
    climatology = data.climatology
    named = (data.units, corners, data.grid.wraps, data.reader.times_per_chunk)
    digest.update(repr(named).encode())
    parts = [data.training.positions, climatology.mean, climatology.std]
    for sample in samples:
        parts += sample.values()
    for part in parts:
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()[:16]
