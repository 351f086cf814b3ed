"""Rows for each model: weak scaling to 1,024 GPUs, and the memory of each strategy."""

from functools import partial

import numpy as np

from predicting.memory import Training, advise, largest_models, memory_by_strategy
from predicting.models import Model
from predicting.network import Cluster, all_reduce_seconds
from predicting.step import Overlap, expected_slowest, predict_step

IDEAL = "stragglers alone, no communication"
DEVICES = [2**exponent for exponent in range(11)]


def tabulate_memory(
    models: list[Model], devices: int, training: Training
) -> list[dict]:
    """GB on each GPU and advice for each model, and last the largest models that fit."""
    rows = []
    for model in models:
        row = {"kind": "memory", "model": model.name, "parameters": model.parameters}
        strategies = memory_by_strategy(model.parameters, training)
        for strategy, parts in strategies.items():
            in_gb = {name: size / 1e9 for name, size in parts.items()}
            row[strategy] = in_gb | {"sum": sum(in_gb.values())}
        row["advice"] = advise(model.parameters, devices, training)
        rows.append(row)
    largest = {"kind": "largest model", "available_gb": training.available / 1e9}
    return [*rows, largest | largest_models(training)]


def fit_with_ddp(models: list[Model], memory: list[dict]) -> list[Model]:
    """The models that DDP can train on these GPUs, by the rows of `tabulate_memory`.

    Without the gradients' second copy, which gradient_as_bucket_view saves.
    """
    *rows, largest = memory
    fitting = []
    for model, row in zip(models, rows):
        needed = row["DDP"]["sum"] - row["DDP"]["buckets"]
        if needed <= largest["available_gb"]:
            fitting.append(model)
    return fitting


def extrapolate(
    models: list[Model],
    clusters: list[Cluster],
    variation: np.ndarray,
    overlap: Overlap,
) -> list[dict]:
    """Weak scaling with DDP, by model, network and number of GPUs.

    variation: compute times over their mean, (n,).
    """
    rows = []
    for model in models:
        rows += extrapolate_ideal(model, variation)
        for cluster in clusters:
            rows += extrapolate_cluster(model, cluster, variation, overlap)
    return rows


def extrapolate_ideal(model: Model, variation: np.ndarray) -> list[dict]:
    """A row for each number of GPUs, as if communication took no time."""
    rows = []
    for devices in DEVICES:
        seconds = model.step_seconds * expected_slowest(variation, devices)
        rows.append(make_row(model, devices, IDEAL, seconds))
    return rows


def extrapolate_cluster(
    model: Model, cluster: Cluster, variation: np.ndarray, overlap: Overlap
) -> list[dict]:
    """A row for each number of GPUs."""
    rows = []
    for devices in DEVICES:
        slowest = model.step_seconds * expected_slowest(variation, devices)
        all_reduce = partial(all_reduce_seconds, devices=devices, cluster=cluster)
        seconds, _ = predict_step(slowest, model.gradient_bytes, all_reduce, overlap)
        rows.append(make_row(model, devices, cluster.network.name, seconds))
    return rows


def make_row(model: Model, devices: int, network: str, seconds: float) -> dict:
    """What a step takes. The efficiency is one GPU's step over that of N."""
    efficiency = model.step_seconds / seconds
    return {
        "kind": "curve",
        "model": model.name,
        "parameters": model.parameters,
        "devices": devices,
        "network": network,
        "step_seconds": seconds,
        "efficiency": efficiency,
        "speed_up": devices * efficiency,
    }
