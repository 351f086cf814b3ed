"""This machine's link, fitted to its all-reduces, and how far predicted steps are off."""

from functools import partial

import numpy as np

from errors import DataError
from predicting.measurements import Scaling
from predicting.network import Link, ring_seconds
from predicting.step import Overlap, expected_slowest, predict_step


def fit_link(rows: list[dict]) -> tuple[Link, float]:
    """The link with which `ring_seconds` best gives the medians, and its largest error.

    Linear least squares of the relative errors, because the sizes span four decades.
    Neither latency nor bandwidth is below zero. DataError if the rows, of timed
    all-reduces, do not tell the two apart.
    """
    if len({row["bytes"] for row in rows}) < 2:
        needed = "two sizes or more, on 2 devices or more with a core each"
        raise DataError(f"allreduce.json needs {needed}; measure on more cores")
    measured = []
    messages = []
    moved = []
    for row in rows:
        number = 2 * (row["devices"] - 1)
        size = row["bytes"] / row["devices"]
        measured.append(row["seconds"]["median"])
        messages.append(number)
        moved.append(number * size)
    factors = np.stack([messages, moved], axis=1) / np.array(measured)[:, None]
    solution, *_ = np.linalg.lstsq(factors, np.ones(len(rows)))
    latency, per_byte = solution
    if latency < 0:
        by_bytes = factors[:, 1]
        latency = 0.0
        per_byte = by_bytes.sum() / (by_bytes**2).sum()
    if per_byte * max(moved) < 0.01 * max(measured):
        problem = "more bytes take no more time"
        raise DataError(f"allreduce.json: {problem}; measure it anew")
    errors = factors @ (latency, per_byte) - 1
    link = Link("this machine's loopback", float(latency), float(1 / per_byte))
    return link, float(np.abs(errors).max())


def compare(scaling: Scaling, link: Link, overlap: Overlap) -> list[dict]:
    """Each measured point beside two predictions of its mean step, with errors in percent.

    The first takes the point's own compute times, under no_sync and on N devices at once:
    only stragglers and communication are judged. The second takes the compute times of one
    device, scaled with the batch, which is all that a plan has.
    """
    points = []
    one_batch = scaling.rows[0]["device_batch"]
    for row in scaling.rows:
        slowest = np.max(row["compute_steps"], axis=0)
        point = {"kind": "point"}
        for name in ("mode", "devices", "device_batch"):
            point[name] = row[name]
        processors = row["devices"] * row["threads"]
        point["own_cores"] = processors <= scaling.machine["cores"]
        point["measured_seconds"] = float(np.mean(row["steps"]))
        point["measured_slowest_seconds"] = float(slowest.mean())
        own = np.ravel(row["compute_steps"])
        point |= predict_point(row, own, link, overlap)
        scaled = scaling.compute_seconds * row["device_batch"] / one_batch
        from_one = predict_point(row, scaled, link, overlap)
        for name, value in from_one.items():
            point[f"from_one_{name}"] = value
        points.append(point)
    return points


def predict_point(
    row: dict, compute: np.ndarray, link: Link, overlap: Overlap
) -> dict[str, float]:
    """The mean step of a measured point, predicted from compute times in seconds, (n,)."""
    devices = row["devices"]
    slowest = expected_slowest(compute, devices)
    all_reduce = partial(ring_seconds, devices=devices, link=link)
    step, exposed = predict_step(slowest, row["gradient_bytes"], all_reduce, overlap)
    measured = float(np.mean(row["steps"]))
    return {
        "slowest_seconds": slowest,
        "exposed_seconds": exposed,
        "predicted_seconds": step,
        "error_percent": 100 * (step / measured - 1),
    }


def largest_errors(points: list[dict]) -> dict[str, float]:
    """The largest error of each prediction, over several devices with a core each.

    DataError if there is no such point.
    """
    covered = [point for point in points if point["own_cores"] and point["devices"] > 1]
    if not covered:
        problem = "scaling.json has no point of several devices with a core each"
        raise DataError(f"{problem}; measure on more cores")
    own = [abs(point["error_percent"]) for point in covered]
    from_one = [abs(point["from_one_error_percent"]) for point in covered]
    return {
        "largest_error_percent": max(own),
        "from_one_largest_error_percent": max(from_one),
    }
