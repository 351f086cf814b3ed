"""The command line: every option, its default, and what it may be."""

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from arguments import add_options, names_that_decide, option
from checks import (
    check_folder,
    check_local,
    check_secrets,
    check_server,
    check_start_method,
    check_store,
    set_slots,
)
from config_file import read_flags
from devices import set_devices, set_precision
from errors import program, refuse

# What you change for data of your own, here or by flags.
VARIABLES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
TRAIN_TIMES = ["1982", "1989"]
VALIDATION_TIMES = ["1990", "1990"]
TEST_TIMES = ["1991", "1992"]
PATCH_SIZE = 64
# Taken where no flag says otherwise, if the store has them: see store_defaults.py.
STORE_DEFAULTS = {
    "train_times": TRAIN_TIMES,
    "validation_times": VALIDATION_TIMES,
    "test_times": TEST_TIMES,
    "patch_size": PATCH_SIZE,
}
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
TIMES = {"nargs": 2, "metavar": ("FIRST", "LAST"), "decides": True}


def run_folder() -> str:
    """Where a run's files go, as seen from where the program was started."""
    return os.path.relpath(OUTPUTS / "train")


def climatology_folder() -> str:
    """Where climatologies are kept from one run to the next."""
    return os.path.relpath(OUTPUTS / "climatology")


@dataclass(frozen=True)
class StoreOptions:
    """Where the data are, and how they are read."""

    store: str | None = option(
        None,
        "a Zarr: path, s3://, gs:// or https://; without, a small one is made and served",
    )
    endpoint: str | None = option(None, "an S3 server other than AWS's", metavar="URL")
    region: str | None = option(
        None, "of the store's bucket on AWS; if not given, AWS_REGION"
    )
    anonymous: bool = option(False, "sign no request: for public buckets")
    retry_timeout: int = option(120, "seconds to retry a failed read")
    missing_chunks: str = option(
        "refuse",
        "what to do if a chunk is missing that would read as a number; fill: read it so",
        choices=("refuse", "fill"),
        decides=True,
    )
    climatology_dir: str = option(
        climatology_folder, "keeps the climatology of a store that has none"
    )


@dataclass(frozen=True)
class DataOptions:
    """Which of the data are used."""

    variables: list[str] = option(VARIABLES, "any number of the store's", decides=True)
    level: str | None = option(
        None,
        "value of a further dimension: 850, 6h, r1i1p1f1; of several: 850,6h",
        decides=True,
    )
    missing: str = option(
        "refuse",
        "what to do where a value is missing; mask: leave the cell out at that time",
        choices=("refuse", "mask"),
        decides=True,
    )
    constant_cells: str = option(
        "refuse",
        "what to do with cells that never change; mask: leave them out; keep: use them",
        choices=("refuse", "mask", "keep"),
        decides=True,
    )
    train_times: list[str] | None = option(
        None,
        f"to train on; if not given, {' '.join(TRAIN_TIMES)}, or 80%% of the store's dates",
        **TIMES,
    )
    validation_times: list[str] | None = option(
        None,
        f"to choose by; if not given, {' '.join(VALIDATION_TIMES)}, or the next 10%%",
        **TIMES,
    )
    test_times: list[str] | None = option(
        None,
        f"to report; if not given, {' '.join(TEST_TIMES)}, or the last 10%%",
        **TIMES,
    )
    patch_size: int | None = option(
        None,
        f"cells along its side; if not given, {PATCH_SIZE}, or the most that fit",
        least=16,
        decides=True,
    )


@dataclass(frozen=True)
class TrainingOptions:
    """How the network is trained."""

    batch_size: int = option(8, "samples in the global batch", decides=True)
    patches_per_block: int = option(8, "cut each time a block is read", decides=True)
    shuffle_slots: int | None = option(
        None, "blocks that are mixed; if not given, four times the batch", decides=True
    )
    max_steps: int = option(200, "optimizer steps in the whole run", decides=True)
    learning_rate: float = option(
        6e-3, "AdamW's, at the end of the warm-up", least=0, decides=True
    )
    seed: int = option(
        0,
        "decides weights, order, patches and swaths",
        least=0,
        below=2**64,  # torch takes no more
        decides=True,
    )
    padding: str = option(
        "zeros", "beyond a patch's edge", choices=("zeros", "replicate"), decides=True
    )
    precision: str = option(
        "32-true",
        "bf16-mixed needs hardware for it; without, 32-true is taken",
        choices=("32-true", "bf16-mixed"),
        decides=True,
    )


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
    full_validation_patches: int = option(
        384, "of the validation, for a checkpoint that may be the best"
    )
    eval_samples: int = option(96, "patches that judge a run", hidden=True)
    log_every: int = option(10, "steps between lines of the log")
    count_requests: bool = option(True, "report requests and bytes")
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


@dataclass(frozen=True)
class Options(  # dataclasses collect the fields from the last base to the first
    SurvivalOptions,
    LoopOptions,
    DeviceOptions,
    TrainingOptions,
    DataOptions,
    StoreOptions,
):
    """What a run was asked for, checked. make_data completes what depends on the store."""


# What a run and the one that resumes it have in common.
RESUME_KEYS = names_that_decide(Options)


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = parse_flags(summary, sys.argv[1:] if argv is None else argv)
    each_once = dict.fromkeys(args.variables)
    args.variables = list(each_once)
    check_secrets(args, "store", "endpoint", "checkpoint_dir", "resume")
    check_store("--store", args.store)
    check_server(args, "checkpoint_dir", "resume")
    set_devices(args)
    set_precision(args)
    set_slots(args)
    check_start_method(args.start_method)
    args.loggers = list(dict.fromkeys(args.loggers))
    check_loggers(args.loggers)
    check_folder("--output-dir", args.output_dir)
    check_local("--climatology-dir", args.climatology_dir)
    if args.checkpoint_dir is None:
        args.checkpoint_dir = str(Path(args.output_dir, "checkpoints"))
    if "://" not in args.checkpoint_dir:
        check_folder("--checkpoint-dir", args.checkpoint_dir)
    return Options(**vars(args))


def parse_flags(summary: str, flags: list[str]) -> argparse.Namespace:
    """What flags give, and what the files of --config give where no flag does."""
    parser = make_parser(summary)
    files = parser.parse_args(flags).config
    in_files = []
    for path in files:
        found = read_flags(path, Options)
        alone = make_parser(summary)
        alone.error = partial(refuse_file, path)  # not as if it had been typed
        alone.parse_args(found)
        in_files += found
    args = parser.parse_args([*in_files, *flags])  # the last one counts
    del args.config
    return args


def refuse_file(path: str, message: str) -> NoReturn:
    refuse(f"--config {path}: {message}")


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Each option and its default."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog=program(), description=summary, formatter_class=show_defaults
    )
    file = "options in JSON, such as a run's options.json; flags win"
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help=file)
    for group in reversed(Options.__bases__):
        add_options(parser, group)
    return parser


def check_loggers(names: list[str]) -> None:
    """Refuse a logger whose package is not installed."""
    for name in names:
        package = LOGGERS[name]
        if find_spec(package) is None:
            remedy = f"needs {package}, which is not installed; add it with: uv add"
            refuse(f"--loggers {name}: {remedy} {package.replace('_', '-')}")
