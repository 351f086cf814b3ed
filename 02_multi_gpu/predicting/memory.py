"""What a GPU has to hold with DDP and with FSDP, and which of the two to take."""

import math
from dataclasses import dataclass, replace

# PyTorch's autocast keeps parameters and gradients in float32, as does float32 itself.
# "mixed" keeps them in 16 bits beside a master copy in float32, which is 16 bytes in all,
# too, but half as much to send (section 3.1 of ZeRO, https://arxiv.org/abs/1910.02054).
BYTES_PER_PARAMETER = {
    "autocast": {
        "parameters": 4,
        "gradients": 4,
        "Adam's moments": 8,
        "master weights": 0,
    },
    "mixed": {
        "parameters": 2,
        "gradients": 2,
        "Adam's moments": 8,
        "master weights": 4,
    },
}
FSDP_DEVICES = (8, 64)
# Of a GPU's memory; a rule of thumb. CUDA and NCCL take the rest, or it is lost between
# blocks.
USABLE = 0.9


@dataclass(frozen=True)
class Training:
    """How a model is trained, and on which GPU, as far as memory is concerned.

    gpu_gb: GB of each GPU; activation_gb: GB of activations on it.
    units: parts of equal size into which FSDP divides a model, such as its blocks.
    """

    gpu_gb: float
    activation_gb: float
    precision: str
    units: int

    @property
    def available(self) -> float:
        """Bytes of a GPU that can be used."""
        return USABLE * self.gpu_gb * 1e9

    @property
    def activations(self) -> float:
        """Bytes."""
        return self.activation_gb * 1e9


def ddp_memory(
    parameters: float, training: Training, bucket_view: bool = False
) -> dict[str, float]:
    """Bytes on each GPU with DDP, by what they hold.

    DDP keeps every gradient a second time in a bucket, unless it is told
    gradient_as_bucket_view. Left out: Adam's step counters (4 bytes a tensor) and buffers.
    """
    parts = model_state(parameters, training.precision)
    parts["buckets"] = 0.0 if bucket_view else parts["gradients"]
    return parts | {"activations": training.activations}


def fsdp_memory(
    parameters: float, devices: int, training: Training
) -> dict[str, float]:
    """Bytes on each GPU with FSDP over N devices, by what they hold.

    FSDP keeps 1/N of the state, and gathers the units one at a time: parameters of the unit
    in use and of the next, and gradients of one (https://arxiv.org/abs/2304.11277).
    Left out as with DDP, and the padding of sizes that N does not divide.
    """
    state = model_state(parameters, training.precision)
    gathered = (2 * state["parameters"] + state["gradients"]) / training.units
    parts = {name: size / devices for name, size in state.items()}
    parts["gathered units"] = gathered
    return parts | {"activations": training.activations}


def model_state(parameters: float, precision: str) -> dict[str, float]:
    """Bytes of a whole model, its gradients and its optimizer."""
    each = BYTES_PER_PARAMETER[precision]
    return {name: size * parameters for name, size in each.items()}


def memory_by_strategy(
    parameters: float, training: Training
) -> dict[str, dict[str, float]]:
    """Bytes on each GPU, by strategy and what they hold."""
    found = {"DDP": ddp_memory(parameters, training)}
    for devices in FSDP_DEVICES:
        found[f"FSDP on {devices}"] = fsdp_memory(parameters, devices, training)
    return found


def largest_models(training: Training) -> dict[str, float]:
    """The most parameters that fit beside the activations, by strategy."""
    room = max(0.0, training.available - training.activations)
    of_one = memory_by_strategy(1.0, replace(training, activation_gb=0.0))
    return {strategy: room / sum(parts.values()) for strategy, parts in of_one.items()}


def advise(parameters: float, devices: int, training: Training) -> str:
    """Say in words whether to take DDP or FSDP on so many devices.

    DDP where it fits: an all-reduce moves 2 bytes for each byte of gradients, while FSDP
    gathers the parameters twice and scatters the gradients, which makes 3 (section 7.2 of
    ZeRO).
    """
    available = training.available
    ddp = ddp_memory(parameters, training)
    whole = sum(ddp.values())
    as_view = whole - ddp["buckets"]
    fsdp = fsdp_memory(parameters, 1, training)
    fixed = fsdp["gathered units"] + fsdp["activations"]  # on any number of devices
    shared = sum(fsdp.values()) - fixed
    sharded = fixed + shared / devices
    room = f"of {in_gb(available)} GB"
    if whole <= available:
        return f"DDP: {in_gb(whole)} {room}; FSDP would send half as much again"
    if as_view <= available:
        return f"DDP with gradient_as_bucket_view: {in_gb(as_view)} {room}"
    if sharded <= available:
        return f"FSDP: {in_gb(sharded)} {room}; DDP would take {in_gb(whole)}"
    if fixed < available:
        fewest = math.ceil(shared / (available - fixed))
        needed = f"on {devices} it would take {in_gb(sharded)} {room}"
        return f"FSDP on {fewest} GPUs or more; {needed}"
    reason = f"activations and gathered units alone take {in_gb(fixed)} {room}"
    return f"neither: {reason}; lessen those"


def in_gb(size: float) -> str:
    """Bytes in GB, three digits."""
    return f"{size / 1e9:.3g}"
