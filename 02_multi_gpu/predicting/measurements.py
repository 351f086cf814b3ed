"""What scaling.py has measured: results/*.json, checked as they are read."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import DataError

# Fields that each row must have, with the number of dimensions of each.
SCALING = {
    "devices": 0,
    "threads": 0,
    "device_batch": 0,
    "parameters": 0,
    "gradient_bytes": 0,
    "steps": 1,
    "compute_steps": 2,  # device, step
}
ALL_REDUCE = {"devices": 0, "bytes": 0, "seconds": 0}


@dataclass(frozen=True)
class Scaling:
    """Rows of weak and strong scaling, first that of one device, and their machine."""

    rows: list[dict]
    machine: dict

    @property
    def compute_seconds(self) -> np.ndarray:
        """Seconds of each step of one device, without communication, (n,)."""
        return np.ravel(self.rows[0]["compute_steps"])


def read_scaling(folder: str, name: str = "scaling") -> Scaling:
    """The weak and strong scaling in NAME.json. DataError if there is no single device."""
    measured, machine = read_results(folder, name, SCALING)
    rows = [row for row in measured if row.get("mode") in ("weak", "strong")]
    rows.sort(key=lambda row: (row["devices"] > 1, row["mode"] != "weak"))
    if not rows or (rows[0]["mode"], rows[0]["devices"]) != ("weak", 1):
        raise DataError(f"{name}.json has no weak row of 1 device; measure it anew")
    return Scaling(rows, machine)


def read_all_reduces(folder: str) -> list[dict]:
    """Rows of timed all-reduces, on several devices that had a core each."""
    rows, machine = read_results(folder, "allreduce", ALL_REDUCE)
    return [row for row in rows if 2 <= row["devices"] <= machine["cores"]]


def read_results(
    folder: str, name: str, fields: dict[str, int]
) -> tuple[list[dict], dict]:
    """The rows of NAME.json, and the machine on which they were measured.

    DataError if the file is missing or damaged, or if a row lacks one of the `fields`,
    which are names with their numbers of dimensions.
    """
    study = name.removesuffix("_gpu")
    remedy = f"measure with: uv run python scaling.py {study} --save-results"
    results = None
    try:
        results = json.loads(Path(folder, f"{name}.json").read_text())
    except FileNotFoundError as error:
        raise DataError(f"{name}.json is missing; {remedy}") from error
    except (OSError, ValueError):
        pass  # as a file of something else
    if not is_whole(results):
        raise DataError(f"{name}.json is no whole file of results; {remedy}")
    for number, row in enumerate(results["rows"], 1):
        for field, dims in fields.items():
            if not is_usable(row, field, dims):
                problem = f"row {number}: no usable {field}"
                raise DataError(f"{name}.json, {problem}; {remedy}")
    return results["rows"], results["machine"]


def is_whole(results: object) -> bool:
    """Whether there are rows, and a machine of which the cores are known."""
    try:
        has_rows = isinstance(results["rows"], list) and len(results["rows"]) > 0
        return has_rows and results["machine"]["cores"] > 0
    except (KeyError, TypeError):
        return False


def is_usable(row: object, field: str, dims: int) -> bool:
    """Whether a field holds an array of positive numbers; of `seconds`, the median."""
    try:
        value = row[field]["median"] if field == "seconds" else row[field]
        array = np.asarray(value)
    except (KeyError, TypeError, ValueError):  # ValueError: lists of unequal lengths
        return False
    if array.ndim != dims or array.size == 0 or array.dtype.kind not in "if":
        return False
    if dims == 2 and len(array) != row.get("devices"):
        return False
    positive = (array > 0) & (array < math.inf)
    return bool(positive.all())
