"""The command line: every option, its default, and what it may be."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jsonargparse

from checks import (
    LOGGERS,
    check_folder,
    check_loggers,
    check_numbers,
    check_start_method,
    check_store,
    set_devices,
    set_precision,
    set_slots,
)

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
    full_validation_patches: int
    checkpoint_every: int
    log_every: int
    loggers: list[str]
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
    overwrite: bool
    checkpoint_dir: str
    checkpoint_minutes: float | None
    keep: int
    grace: int
    max_hours: float | None
    spot: str | None
    spike_factor: float
    skip_batches: int
    max_skips: int
    precision: str
    padding: str
    compile: bool


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = make_parser(summary).parse_args(argv)
    del args.config  # its options are among the others now
    set_texts(args)
    check_numbers(vars(args))
    check_store(args.store, args.checkpoint_dir, args.endpoint, args.region)
    set_devices(args)
    set_precision(args)
    set_slots(args)
    check_start_method(args.start_method)
    args.loggers = list(dict.fromkeys(args.loggers))
    check_loggers(args.loggers)
    check_folder("--output-dir", args.output_dir)
    if args.checkpoint_dir is None:
        args.checkpoint_dir = str(Path(args.output_dir, "checkpoints"))
    if "://" not in args.checkpoint_dir:
        check_folder("--checkpoint-dir", args.checkpoint_dir)
    return Options(**vars(args))


def set_texts(args: argparse.Namespace) -> None:
    """Make texts of what a file may give as numbers, and take each variable once."""
    for name in ("variables", "train_times", "validation_times", "test_times"):
        setattr(args, name, [str(value) for value in getattr(args, name)])
    args.variables = list(dict.fromkeys(args.variables))
    if args.level is not None:
        args.level = str(args.level)


class Parser(jsonargparse.ArgumentParser):
    """argparse's, which also takes options from a file; an error is one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(" ".join(message.split()), ex)


def make_parser(summary: str) -> Parser:
    """Each option and its default."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=summary, formatter_class=show_defaults)
    file = "options in YAML or JSON, such as options.json of a run; flags after it win"
    parser.add_argument("--config", action="config", metavar="FILE", help=file)
    add_store_options(parser.add_argument)
    add_data_options(parser.add_argument)
    add_training_options(parser.add_argument)
    add_device_options(parser.add_argument)
    add_machine_options(parser.add_argument)
    add_survival_options(parser.add_argument)
    return parser


def add_store_options(add: Callable) -> None:
    """Where the data are, and how they are read."""
    demo = "if not given, a small one is made and served"
    add("--store", help=f"Zarr: a path, s3://, gs://, https://; {demo}")
    add("--endpoint", metavar="URL", help="an S3 server other than AWS's")
    add("--region", help="of the store's bucket on AWS; if not given, AWS_REGION")
    add("--anonymous", action="store_true", help="sign no request: for public buckets")
    add("--retry-timeout", type=int, default=120, help="seconds to retry a failed read")
    sparse = (
        "what to do if a chunk is missing that would read as a number; fill: read it so"
    )
    add("--missing-chunks", choices=("refuse", "fill"), default="refuse", help=sparse)


def add_data_options(add: Callable) -> None:
    """Which of the data are used."""
    times = {"nargs": 2, "metavar": ("FIRST", "LAST")}
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


def add_device_options(add: Callable) -> None:
    """Where it runs."""
    kinds = ("auto", "cpu", "gpu")
    add("--accelerator", choices=kinds, default="auto", help="where to compute")
    devices = "processes on each node; if not given, the launcher's, or one a GPU"
    add("--devices", type=int, help=devices)
    add("--num-nodes", type=int, help="if not given, the launcher's, or one")


def add_machine_options(add: Callable) -> None:
    """How it runs, which changes no weight beyond rounding."""
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
    full = "of the validation, for a checkpoint that may be the best"
    add("--full-validation-patches", type=int, default=384, help=full)
    add("--log-every", type=int, default=10, help="steps between lines of the log")
    where = "classes of lightning.pytorch.loggers"
    both = ["CSVLogger", "TensorBoardLogger"]
    add("--loggers", nargs="+", default=both, choices=LOGGERS, help=where)
    add(
        "--output-dir",
        default=os.path.relpath(OUTPUTS),
        help="folder for the run's files",
    )


def add_survival_options(add: Callable) -> None:
    """What a run does against its end, and how it goes on."""
    resume = "from the newest whole checkpoint, or from CKPT; auto: if there is one"
    add("--resume", nargs="?", const="last", metavar="CKPT", help=resume)
    later = "delete checkpoints of later steps than that at which this run begins"
    add("--overwrite", action="store_true", help=later)
    place = "a path or s3://; if not given, checkpoints in --output-dir"
    add("--checkpoint-dir", metavar="DIR", help=place)
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--checkpoint-minutes", type=float, help="also after so much time")
    add(
        "--keep", type=int, default=3, help="how many of the newest checkpoints to keep"
    )
    seconds = "seconds that a checkpoint may take when the run is told to stop"
    add("--grace", type=int, default=25, help=seconds)
    add("--max-hours", type=float, help="stop after so long, to be started again")
    clouds = ("aws", "google")
    add("--spot", choices=clouds, help="ask this cloud if it takes the machine back")
    spike = "skip a batch whose loss is so many times the median of the last 50"
    add("--spike-factor", type=float, default=10, help=spike)
    left_out = "batches to leave out, from one with a bad loss on"
    add("--skip-batches", type=int, default=1, help=left_out)
    often = "how often a run may leave batches out before it gives up"
    add("--max-skips", type=int, default=5, help=often)
