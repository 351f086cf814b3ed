"""The command line: every option, its default, and what it may be."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from arguments import add_options, names_that_decide, option
from block_order import ORDER_VERSION
from checks import check_folder, check_local
from devices import set_devices
from errors import program
from precision import set_precision
from slots import set_slots
from store_checks import check_icechunk, check_secrets, check_server, check_store
from workers import check_start_method

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
    "snapshot": None,
}
OUTPUTS = Path(__file__).parent / "outputs"

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
    icechunk: str | None = option(
        None, "branch or tag, if the store is an Icechunk repository", metavar="NAME"
    )
    snapshot: str | None = option(
        None,
        "of the repository, by its id; if not given, the newest of the branch",
        metavar="ID",
        decides=True,
    )
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
        f"to train on; if not given, {' '.join(TRAIN_TIMES)}, or about 80%% of the store's dates",
        **TIMES,
    )
    validation_times: list[str] | None = option(
        None,
        f"to choose by; if not given, {' '.join(VALIDATION_TIMES)}, or about the next 10%%",
        **TIMES,
    )
    test_times: list[str] | None = option(
        None,
        f"to report; if not given, {' '.join(TEST_TIMES)}, or about the last 10%%",
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
    # A run cannot go on in another order than it began with.
    block_order: int = option(
        ORDER_VERSION, "", choices=(ORDER_VERSION,), hidden=True, decides=True
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
    process_group_timeout: int = option(300, "seconds to wait for another rank")
    num_workers: int = option(
        0, "processes that prepare batches, for each rank; 0: none", least=0
    )
    start_method: str = option(START_METHOD, "of the workers: forkserver or spawn")
    validate_every: int = option(100, "steps between validations")
    eval_samples: int = option(96, "patches that judge a run", hidden=True)
    checkpoint_every: int = option(50, "steps between checkpoints")
    log_every: int = option(10, "steps between lines of the log")
    count_requests: bool = option(True, "report requests and bytes")
    output_dir: str = option(run_folder, "folder for the run's files")
    resume: str | None = option(
        None,
        "from last.ckpt or CKPT; auto: from last.ckpt if there is one",
        nargs="?",
        const="last",
        metavar="CKPT",
    )


@dataclass(frozen=True)
class Options(  # the fields of the last one come first
    LoopOptions, DeviceOptions, TrainingOptions, DataOptions, StoreOptions
):
    """What a run was asked for, checked. make_data completes what depends on the store."""


# What a run and the one that resumes it have in common.
RESUME_KEYS = names_that_decide(Options)


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = make_parser(summary).parse_args(argv)
    each_once = dict.fromkeys(args.variables)
    args.variables = list(each_once)
    check_secrets(args, "store", "endpoint", "resume")
    check_store("--store", args.store)
    check_server(args)
    check_icechunk(args)
    set_devices(args)
    set_precision(args)
    set_slots(args)
    check_start_method(args.start_method)
    check_folder("--output-dir", args.output_dir)
    check_local("--climatology-dir", args.climatology_dir)
    args.resume = find_checkpoint(args.resume, args.output_dir)
    return Options(**vars(args))


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Each option and its default."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog=program(),
        description=summary,
        formatter_class=show_defaults,
        allow_abbrev=False,
    )
    for group in reversed(Options.__bases__):
        add_options(parser, group)
    return parser


def find_checkpoint(resume: str | None, folder: str) -> str | None:
    """The path that --resume means; None to begin at step 0."""
    if resume not in ("last", "auto"):
        return resume
    last = Path(folder, "last.ckpt")
    if resume == "auto" and not last.exists():
        return None
    return str(last)
