"""The command line: the options of the task, beside those of every run."""

import os
import sys
from dataclasses import dataclass

from arguments import names_that_decide, option
from block_order import ORDER_VERSION
from checks import check_local
from run_options import (
    OUTPUTS,
    DeviceOptions,
    LoopOptions,
    SurvivalOptions,
    complete_run,
    parse_flags,
)
from slots import set_slots
from store_checks import check_icechunk, check_server, check_store

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
TIMES = {"nargs": 2, "metavar": ("FIRST", "LAST"), "decides": True}


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
class EvaluationOptions:
    """How the run is judged, and what is reported."""

    full_validation_patches: int = option(
        384, "of the validation, for a checkpoint that may be the best"
    )
    eval_samples: int = option(96, "patches that judge a run", hidden=True)
    count_requests: bool = option(True, "report requests and bytes")


@dataclass(frozen=True)
class Options(  # dataclasses collect the fields from the last base to the first
    SurvivalOptions,
    LoopOptions,
    DeviceOptions,
    EvaluationOptions,
    TrainingOptions,
    DataOptions,
    StoreOptions,
):
    """What a run was asked for, checked. make_data completes what depends on the store."""


# What a run and the one that resumes it have in common.
RESUME_KEYS = names_that_decide(Options)


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = parse_flags(summary, sys.argv[1:] if argv is None else argv, Options)
    each_once = dict.fromkeys(args.variables)
    args.variables = list(each_once)
    complete_run(args)
    check_store("--store", args.store)
    check_server(args, "checkpoint_dir", "resume")
    check_icechunk(args)
    set_slots(args)
    check_local("--climatology-dir", args.climatology_dir)
    return Options(**vars(args))
