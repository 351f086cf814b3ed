"""Refuse options that cannot work, with a remedy, and fill in devices, precision and slots."""

import argparse
import math
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import torch

from errors import refuse

# Lightning's loggers, and the package that each needs.
LOGGERS = {
    "CSVLogger": "lightning",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet_ml",
    "LitLogger": "litlogger",
}


def check_numbers(values: dict) -> None:
    """Refuse a number below its least value, and seeds that torch does not take."""
    for name, value in values.items():
        if type(value) is float and not math.isfinite(value):
            flag = f"--{name.replace('_', '-')}"
            refuse(f"{flag} {value}: not finite; give a number")
    minimums = {"patch_size": 16, "num_workers": 0, "seed": 0, "learning_rate": 0}
    minimums |= {"max_hours": 0, "checkpoint_minutes": 0}
    for name, value in values.items():
        minimum = minimums.get(name, 1)
        if type(value) in (int, float) and value < minimum:
            flag = f"--{name.replace('_', '-')}"
            refuse(f"{flag} {value}: too small; give at least {minimum}")
    if values["seed"] >= 2**64:
        refuse(f"--seed {values['seed']}: too large; give less than 2**64")


def check_store(
    store: str | None, folder: str | None, endpoint: str | None, region: str | None
) -> None:
    """Refuse a store that is not there, and URLs that hold credentials."""
    if region and not (store or "").startswith(("s3://", "s3a://")):
        refuse(f"--region {region}: only for --store s3://...; leave it out")
    if store and "://" not in store and not Path(store).is_dir():
        refuse(f"--store {store}: no such folder; give a Zarr store, or a URL")
    for text in (store, folder, endpoint):
        url = urlsplit(text or "")
        if "@" in url.netloc or (url.scheme and url.query):
            reason = "credentials in a URL would be saved with the run"
            remedy = "give them in the environment, or --anonymous"
            refuse(f"--store, --checkpoint-dir, --endpoint: {reason}; {remedy}")
    if endpoint and not re.match("https?://", endpoint):
        refuse(f"--endpoint {endpoint}: give http://... or https://...")
    places = [text for text in (store, folder) if text]
    if endpoint and not any(place.startswith(("s3://", "s3a://")) for place in places):
        remedy = "only for a --store or --checkpoint-dir on s3://; leave it out"
        refuse(f"--endpoint {endpoint}: {remedy}")


def set_devices(args: argparse.Namespace) -> None:
    """Fill in the devices and nodes that there are; refuse more."""
    has_gpu = torch.accelerator.is_available()
    if args.accelerator == "gpu" and not has_gpu:
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    on_gpu = has_gpu and args.accelerator != "cpu"
    available = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    kind = "GPUs" if on_gpu else "cores"
    if args.devices and args.devices > available:
        refuse(
            f"--devices {args.devices}: give up to {available}, the {kind} there are"
        )
    launched = read_environment("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
    if launched and args.devices not in (None, launched):
        reason = f"the launcher has {launched} on each node; leave --devices out"
        refuse(f"--devices {args.devices}: {reason}")
    args.devices = args.devices or launched or (available if on_gpu else 1)
    nodes = read_environment("GROUP_WORLD_SIZE", "SLURM_NNODES")
    args.num_nodes = args.num_nodes or nodes or 1


def set_precision(args: argparse.Namespace) -> None:
    """Fall back to float32 where there are no instructions for bfloat16, and say so."""
    on_gpu = torch.accelerator.is_available() and args.accelerator != "cpu"
    if args.precision == "bf16-mixed" and not has_bf16(on_gpu):
        kind = "GPUs" if on_gpu else "cores"
        reason = f"these {kind} have no instructions for bfloat16"
        print(f"note: {reason}; training in float32", file=sys.stderr)
        args.precision = "32-true"


def has_bf16(on_gpu: bool) -> bool:
    """Whether there are instructions for bfloat16. Without, torch would emulate them."""
    if on_gpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    flags = torch.cpu.get_capabilities()
    return any(flags[name] for name in flags if name.endswith("bf16"))


def read_environment(*names: str) -> int:
    """The first of these variables that a launcher has set; 0 if there is none."""
    values = [os.environ[name] for name in names if os.environ.get(name)]
    return int(values[0]) if values else 0


def set_slots(args: argparse.Namespace) -> None:
    """Fill in the slots; refuse a batch that cannot be shared among ranks or slots."""
    smallest = args.devices * args.num_nodes * args.accumulate_grad_batches
    if args.batch_size < smallest:
        ranks = f"{args.devices} devices x {args.num_nodes} nodes"
        reason = f"{ranks} x {args.accumulate_grad_batches} micro-batches"
        refuse(f"--batch-size {args.batch_size}: {reason} need at least {smallest}")
    if args.shuffle_slots is None:  # whatever the workers: they decide no result
        args.shuffle_slots = 4 * args.batch_size
    if args.shuffle_slots % args.batch_size:
        remedy = f"give a multiple of --batch-size {args.batch_size}"
        refuse(f"--shuffle-slots {args.shuffle_slots}: {remedy}")


def check_start_method(method: str) -> None:
    """Refuse fork, which copies the locks that threads of the store's client hold."""
    if method not in ("forkserver", "spawn"):
        reason = "fork copies no threads of the store's client, so workers would hang"
        refuse(f"--start-method {method}: {reason}; give forkserver or spawn")


def check_loggers(names: list[str]) -> None:
    """Refuse a logger whose package is not installed."""
    for name in names:
        package = LOGGERS[name]
        if find_spec(package) is None:
            remedy = f"needs {package}, which is not installed; add it with: uv add"
            refuse(f"--loggers {name}: {remedy} {package.replace('_', '-')}")


def check_folder(flag: str, folder: str) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made."""
    path = Path(folder).absolute()
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"{error.strerror}; give a folder that can be written to"
        refuse(f"{flag} {folder}: {reason}")
