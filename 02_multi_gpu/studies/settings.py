"""Where the studies measure, and how much."""

import argparse
import os
from dataclasses import dataclass, field, fields, replace

import torch

from arguments import add_options, flag_of, option
from errors import refuse

MOST_DEVICES = 8  # that are used unless a flag says otherwise
QUICK_REPEATS = 2  # at most
# Further settings under --quick. The timeline leaves out the first three steps.
QUICK = {
    "steps": 4,
    "seeds": 1,
    "training": {"patch_size": 16, "max_steps": 4, "eval_samples": 4},
    "is_quick": True,
}


@dataclass(frozen=True)
class DeviceOptions:
    """Where it is measured."""

    accelerator: str = option(
        "auto", "auto, cpu or gpu", choices=("auto", "cpu", "gpu")
    )
    devices: int | None = option(
        None, "the most that are used; if not given, up to 8 that divide the batch"
    )
    device_batch: int | None = option(
        None, "samples a device; if not given, 8 on a CPU, 256 on a GPU"
    )


@dataclass(frozen=True)
class Settings:
    """Where a study measures, and how much."""

    accelerator: str  # "cpu" or "gpu"
    devices: int  # the most that are used, a rank each
    device_batch: int  # samples
    repeats: int  # of each measurement, in turn
    steps: int = 10  # that are timed in a row
    seeds: int = 2  # of each training
    training: dict[str, int] = field(default_factory=dict)  # options of each training
    is_quick: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "gpu"

    def flags(self) -> list[str]:
        """What a script is given to train with the same options."""
        flags = ["--accelerator", self.accelerator]
        for name, value in self.training.items():
            flags += [flag_of(name), str(value)]
        return flags


def parse_devices(argv: list[str] | None) -> tuple[DeviceOptions, list[str]]:
    """The options above, and the flags that are left."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser, DeviceOptions)
    given, others = parser.parse_known_args(argv)
    return DeviceOptions(**vars(given)), others


def describe_devices() -> str:
    """The flags above, for a help text."""
    lines = []
    for declared in fields(DeviceOptions):
        meaning = declared.metadata["settings"]["help"]
        lines.append(f"{flag_of(declared.name)}: {meaning}.")
    return " ".join(lines)


def choose_settings(options: DeviceOptions, repeats: int, quick: bool) -> Settings:
    """What the options mean on this machine; exits with code 2 if it has not enough."""
    has_gpu = torch.accelerator.is_available()
    if options.accelerator == "gpu" and not has_gpu:
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    on_gpu = has_gpu and options.accelerator != "cpu"
    available = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    batch = options.device_batch or (256 if on_gpu else 8)
    devices = options.devices or choose_number(available, batch)
    if devices > available:
        kind = "GPUs" if on_gpu else "cores"
        refuse(f"--devices {devices}: give up to {available}, the {kind} there are")
    if batch % devices:
        remedy = f"give a multiple of {devices}, or other --devices"
        refuse(f"--device-batch {batch}: {devices} devices do not divide it; {remedy}")
    settings = Settings("gpu" if on_gpu else "cpu", devices, batch, repeats)
    if quick:
        return replace(settings, repeats=min(repeats, QUICK_REPEATS), **QUICK)
    return settings


def choose_number(available: int, batch: int) -> int:
    """The most devices that divide a batch."""
    for devices in range(min(available, MOST_DEVICES), 1, -1):
        if batch % devices == 0:
            return devices
    return 1
