"""The command line: every option, its default, and what it may be."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import torch

from errors import refuse

# What you change for data of your own, here or by flags.
VARIABLES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
TRAIN_TIMES = ["1982", "1989"]
VALIDATION_TIMES = ["1990", "1990"]
TEST_TIMES = ["1991", "1992"]
OUTPUTS = Path(__file__).parent / "outputs/train"


@dataclass(frozen=True)
class Options:
    """What a run was asked for, checked and complete."""

    store: str | None
    endpoint: str | None
    region: str | None
    anonymous: bool
    retry_timeout: int
    count_requests: bool
    variables: list[str]
    level: str | None
    missing: str
    missing_chunks: str
    train_times: list[str]
    validation_times: list[str]
    test_times: list[str]
    patch_size: int
    batch_size: int
    patches_per_block: int
    shuffle_slots: int
    max_steps: int
    learning_rate: float
    validate_every: int
    checkpoint_every: int
    log_every: int
    accelerator: str
    devices: int
    num_nodes: int
    accumulate_grad_batches: int
    process_group_timeout: int
    num_workers: int
    start_method: str
    seed: int
    output_dir: str
    resume: str | None
    precision: str
    padding: str
    compile: bool


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = make_parser(summary).parse_args(argv)
    args.variables = list(dict.fromkeys(args.variables))  # each once
    check_numbers(vars(args))
    check_store(args.store, args.endpoint, args.region)
    set_devices(args)
    set_slots(args)
    if args.start_method not in ("forkserver", "spawn"):
        reason = (
            "no fork copies the threads of the store's client, so workers would hang"
        )
        remedy = "give forkserver or spawn"
        refuse(f"--start-method {args.start_method}: {reason}; {remedy}")
    check_folder(args.output_dir)
    if args.resume in ("last", "auto"):
        last = Path(args.output_dir, "last.ckpt")
        wanted = args.resume == "last" or last.exists()
        args.resume = str(last) if wanted else None
    return Options(**vars(args))


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Each option and its default."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add_data_options(parser.add_argument)
    add_training_options(parser.add_argument)
    add_machine_options(parser.add_argument)
    return parser


def add_data_options(add: Callable) -> None:
    """Where the data are, and which of them are used."""
    times = {"nargs": 2, "metavar": ("FIRST", "LAST")}
    demo = "if not given, a small one is made and served"
    add("--store", help=f"Zarr: a path, s3://, gs://, https://; {demo}")
    add("--endpoint", metavar="URL", help="an S3 server other than AWS's")
    add("--region", help="of the store's bucket on AWS; if not given, AWS_REGION")
    add("--anonymous", action="store_true", help="sign no request: for public buckets")
    add("--retry-timeout", type=int, default=120, help="seconds to retry a failed read")
    switch = argparse.BooleanOptionalAction
    add(
        "--count-requests",
        action=switch,
        default=True,
        help="report requests and bytes",
    )
    add("--variables", nargs="+", default=VARIABLES, help="any number of the store's")
    add("--level", help="value of a further dimension, such as 850 or a member's name")
    absent = (
        "what to do where a value is missing; mask: leave the cell out at that time"
    )
    add("--missing", choices=("refuse", "mask"), default="refuse", help=absent)
    sparse = (
        "what to do if a chunk is missing that would read as a number; fill: read it so"
    )
    add("--missing-chunks", choices=("refuse", "fill"), default="refuse", help=sparse)
    add(
        "--train-times", **times, default=TRAIN_TIMES, help="dates or years to train on"
    )
    add("--validation-times", **times, default=VALIDATION_TIMES, help="to choose by")
    add(
        "--test-times",
        **times,
        default=TEST_TIMES,
        help="to report, and choose nothing",
    )
    add("--patch-size", type=int, default=64, help="cells along a side of a patch")


def add_training_options(add: Callable) -> None:
    """What decides the weights."""
    add("--batch-size", type=int, default=8, help="samples in the global batch")
    add(
        "--patches-per-block", type=int, default=8, help="cut each time a block is read"
    )
    slots = "blocks that are mixed; if not given, four times the batch"
    add("--shuffle-slots", type=int, help=slots)
    add("--max-steps", type=int, default=200, help="optimizer steps in the whole run")
    peak = "AdamW's, at the end of the warm-up"
    add("--learning-rate", type=float, default=6e-3, help=peak)
    add(
        "--seed", type=int, default=0, help="decides weights, order, patches and swaths"
    )
    edges = ("zeros", "replicate")
    add("--padding", choices=edges, default="zeros", help="beyond a patch's edge")
    kinds = ("32-true", "bf16-mixed")
    lower = "bf16-mixed needs hardware for it; without, 32-true is taken"
    add("--precision", choices=kinds, default="32-true", help=lower)


def add_machine_options(add: Callable) -> None:
    """Where and how it runs, which changes no weight beyond rounding."""
    kinds = ("auto", "cpu", "gpu")
    add("--accelerator", choices=kinds, default="auto", help="where to compute")
    devices = "processes on each node; if not given, the launcher's, or one a GPU"
    add("--devices", type=int, help=devices)
    add("--num-nodes", type=int, help="if not given, the launcher's, or one")
    pieces = "micro-batches in which a rank computes its slice"
    add("--accumulate-grad-batches", type=int, default=1, help=pieces)
    fuse = "compile the network: minutes at the first step, for long runs"
    add("--compile", action="store_true", help=fuse)
    waiting = "seconds to wait for another rank"
    add("--process-group-timeout", type=int, default=300, help=waiting)
    workers = "processes that prepare batches, for each rank; 0: none"
    add("--num-workers", type=int, default=0, help=workers)
    method = "spawn" if sys.platform == "win32" else "forkserver"
    add("--start-method", default=method, help="of the workers: forkserver or spawn")
    add("--validate-every", type=int, default=100, help="steps between validations")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-every", type=int, default=10, help="steps between lines of the log")
    add(
        "--output-dir",
        default=os.path.relpath(OUTPUTS),
        help="folder for the run's files",
    )
    resume = "from last.ckpt or CKPT; auto: from last.ckpt if there is one"
    add("--resume", nargs="?", const="last", metavar="CKPT", help=resume)


def check_numbers(values: dict) -> None:
    """Refuse a number below its least value, and seeds that torch does not take."""
    if not math.isfinite(values["learning_rate"]):
        refuse(
            f"--learning-rate {values['learning_rate']}: give a number, such as 0.006"
        )
    minimums = {"patch_size": 16, "num_workers": 0, "seed": 0, "learning_rate": 0}
    for name, value in values.items():
        minimum = minimums.get(name, 1)
        if type(value) in (int, float) and value < minimum:
            flag = f"--{name.replace('_', '-')}"
            refuse(f"{flag} {value}: too small; give at least {minimum}")
    if values["seed"] >= 2**64:
        refuse(f"--seed {values['seed']}: too large; give less than 2**64")


def check_store(store: str | None, endpoint: str | None, region: str | None) -> None:
    """Refuse a folder that is not there, and URLs that hold credentials."""
    if store and "://" not in store and not Path(store).is_dir():
        refuse(f"--store {store}: no such folder; give a Zarr store, or a URL")
    for text in (store, endpoint):
        url = urlsplit(text or "")
        if "@" in url.netloc or (url.scheme and url.query):
            reason = "credentials in a URL would be saved with the run"
            remedy = "give them in the environment, or --anonymous"
            refuse(f"--store, --endpoint: {reason}; {remedy}")
    if endpoint and not re.match("https?://", endpoint):
        refuse(f"--endpoint {endpoint}: give http://... or https://...")
    if endpoint and not (store or "").startswith(("s3://", "s3a://")):
        refuse(f"--endpoint {endpoint}: only for --store s3://...; leave it out")
    if region and not (store or "").startswith(("s3://", "s3a://")):
        refuse(f"--region {region}: only for --store s3://...; leave it out")


def set_devices(args: argparse.Namespace) -> None:
    """Fill in the devices and nodes that there are; refuse more."""
    has_gpu = torch.accelerator.is_available()
    if args.accelerator == "gpu" and not has_gpu:
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    on_gpu = has_gpu and args.accelerator != "cpu"
    available = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    kind = "GPUs" if on_gpu else "cores"
    if args.precision == "bf16-mixed" and not has_bf16(on_gpu):
        reason = f"these {kind} have no instructions for bfloat16"
        print(f"note: {reason}; training in float32", file=sys.stderr)
        args.precision = "32-true"
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


def check_folder(folder: str) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made."""
    path = Path(folder).absolute()
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"{error.strerror}; give a folder that can be written to"
        refuse(f"--output-dir {folder}: {reason}")
