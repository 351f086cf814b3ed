"""The models whose scaling is predicted: the reader's own, and three transformers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predicting.measurements import Scaling, read_scaling
from predicting.memory import BYTES_PER_PARAMETER

ASSUMED_SECONDS = 0.02
# Parameters, and tokens on each GPU in a step: a smaller model leaves memory for more.
TRANSFORMERS = {"100 M": (1e8, 32768), "1 B": (1e9, 16384), "7 B": (7e9, 4096)}


@dataclass(frozen=True)
class Model:
    """A model that is trained. step_seconds: compute of one GPU, without communication."""

    name: str
    parameters: float
    gradient_bytes: float  # that each GPU sends in a step
    step_seconds: float


@dataclass(frozen=True)
class Step:
    """A step of the reader's model on one GPU, and how the times of steps vary."""

    seconds: float
    origin: str  # given, measured or assumed
    variation: np.ndarray  # measured compute times over their mean, (n,)
    machine: str | None  # on which they were measured


def find_step(folder: str, on_cpu: Scaling, seconds: float | None) -> Step:
    """The step as given, or as in scaling_gpu.json, or as assumed.

    DataError if scaling_gpu.json is there and damaged.
    """
    on_gpu = Path(folder, "scaling_gpu.json").exists()
    scaling = read_scaling(folder, "scaling_gpu") if on_gpu else on_cpu
    measured = scaling.compute_seconds
    mean = measured.mean()
    machine = scaling.machine.get("gpu" if on_gpu else "cpu")
    origin = "given"
    if seconds is None:
        seconds = float(mean) if on_gpu else ASSUMED_SECONDS
        origin = "measured" if on_gpu else "assumed"
    return Step(seconds, origin, measured / mean, machine)


def describe(step: Step) -> str:
    """How long a step of the reader's model takes, and how that is known."""
    return f"{1e3 * step.seconds:.3g} ms, {step.origin}"


def own_model(
    given: float | None, of_unet: float, bytes_per_parameter: float, step_seconds: float
) -> Model:
    """The reader's model if its number of parameters is given; this chapter's if not."""
    parameters = given or of_unet
    size = f"{parameters / 1e6:.2g} M"
    if parameters >= 1e9:
        size = f"{parameters / 1e9:.2g} B"
    name = f"{'yours' if given else 'U-Net'}, {size}"
    return Model(name, parameters, bytes_per_parameter * parameters, step_seconds)


def transformers(flops: float, precision: str) -> list[Model]:
    """Transformers on GPUs of so many operations/s.

    A token costs 6 operations a parameter (https://arxiv.org/abs/2001.08361).
    """
    sent = BYTES_PER_PARAMETER[precision]["gradients"]
    models = []
    for name, (parameters, tokens) in TRANSFORMERS.items():
        operations = 6 * parameters * tokens
        models.append(Model(name, parameters, sent * parameters, operations / flops))
    return models
