"""The options of every run, whatever its task: where and how it runs, and survives."""

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from arguments import add_options, option
from checks import check_folder
from config_file import read_flags
from devices import set_devices
from errors import program, refuse
from precision import set_precision
from store_checks import check_secrets
from workers import check_start_method

OUTPUTS = Path(__file__).parent / "outputs"

# Lightning's loggers, and the package that each needs.
LOGGERS = {
    "CSVLogger": "lightning",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet_ml",
    "LitLogger": "litlogger",
}
START_METHOD = "spawn" if sys.platform == "win32" else "forkserver"


def run_folder() -> str:
    """Where a run's files go, as seen from where the program was started."""
    return os.path.relpath(OUTPUTS / "train")


@dataclass(frozen=True)
class DeviceOptions:
    """Where it runs."""

    accelerator: str = option(
        "auto", "where to compute", choices=("auto", "cpu", "gpu")
    )
    devices: int | None = option(
        None, "processes on each node; if not given, the launcher's, or one a GPU"
    )
    num_nodes: int | None = option(None, "if not given, the launcher's, or one")


@dataclass(frozen=True)
class LoopOptions:
    """How it runs, which changes no weight beyond rounding."""

    accumulate_grad_batches: int = option(
        1, "micro-batches in which a rank computes its slice", decides=True
    )
    compile: bool = option(
        False, "compile the network: minutes at the first step, for long runs"
    )
    deterministic: bool = option(
        False, "kernels that add in the same order each time: to the bit on a GPU, too"
    )
    process_group_timeout: int = option(300, "seconds to wait for another rank")
    num_workers: int = option(
        0, "processes that prepare batches, for each rank; 0: none", least=0
    )
    start_method: str = option(START_METHOD, "of the workers: forkserver or spawn")
    validate_every: int = option(100, "steps between validations")
    log_every: int = option(10, "steps between lines of the log")
    loggers: list[str] = option(
        ["CSVLogger", "TensorBoardLogger"],
        "classes of lightning.pytorch.loggers",
        choices=LOGGERS,
    )
    output_dir: str = option(run_folder, "folder for the run's files")


@dataclass(frozen=True)
class SurvivalOptions:
    """What a run does against its end, and how it goes on."""

    resume: str | None = option(
        None,
        "from the newest whole checkpoint, or from CKPT; auto: if there is one",
        nargs="?",
        const="last",
        metavar="CKPT",
    )
    overwrite: bool = option(
        False, "delete checkpoints of later steps than that at which this run begins"
    )
    checkpoint_dir: str | None = option(
        None,
        "a path or s3://; if not given, checkpoints in --output-dir",
        metavar="DIR",
    )
    checkpoint_every: int = option(50, "steps between checkpoints")
    checkpoint_minutes: float | None = option(None, "also after so much time", least=0)
    keep: int = option(3, "how many of the newest checkpoints to keep")
    grace: int = option(
        25, "seconds that a checkpoint may take when the run is told to stop"
    )
    max_hours: float | None = option(
        None, "stop after so long, to be started again", least=0
    )
    spot: str | None = option(
        None, "ask this cloud if it takes the machine back", choices=("aws", "google")
    )
    spike_factor: float = option(
        10, "skip a batch whose loss is so many times the median of the last 50"
    )
    skip_batches: int = option(1, "batches to leave out, from one with a bad loss on")
    max_skips: int = option(
        5, "how often a run may leave batches out before it gives up"
    )


def parse_flags(summary: str, flags: list[str], options: type) -> argparse.Namespace:
    """What flags give, and what the files of --config give where no flag does."""
    parser = make_parser(summary, options)
    files = parser.parse_args(flags).config
    in_files = []
    for path in files:
        found = read_flags(path, options)
        alone = make_parser(summary, options)
        alone.error = partial(refuse_file, path)  # not as if it had been typed
        alone.parse_args(found)
        in_files += found
    args = parser.parse_args([*in_files, *flags])  # the last one counts
    del args.config
    return args


def refuse_file(path: str, message: str) -> NoReturn:
    refuse(f"--config {path}: {message}")


def make_parser(summary: str, options: type) -> argparse.ArgumentParser:
    """Each option and its default, in a group for each base of the dataclass `options`."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog=program(),
        description=summary,
        formatter_class=show_defaults,
        allow_abbrev=False,
    )
    file = "options in JSON, such as a run's options.json; flags win"
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help=file)
    for group in reversed(options.__bases__):
        add_options(parser, group)
    return parser


def complete_run(args: argparse.Namespace) -> None:
    """Check what every run is asked for, and fill in what this machine decides."""
    check_secrets(args, "store", "endpoint", "checkpoint_dir", "resume")
    set_devices(args)
    set_precision(args)
    check_start_method(args.start_method)
    args.loggers = list(dict.fromkeys(args.loggers))
    check_loggers(args.loggers)
    check_folder("--output-dir", args.output_dir)
    if args.checkpoint_dir is None:
        args.checkpoint_dir = str(Path(args.output_dir, "checkpoints"))
    if "://" not in args.checkpoint_dir:
        check_folder("--checkpoint-dir", args.checkpoint_dir)


def check_loggers(names: list[str]) -> None:
    """Refuse a logger whose package is not installed."""
    for name in names:
        package = LOGGERS[name]
        if find_spec(package) is None:
            remedy = f"needs {package}, which is not installed; add it with: uv add"
            refuse(f"--loggers {name}: {remedy} {package.replace('_', '-')}")
