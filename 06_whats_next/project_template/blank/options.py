"""The command line: the options of the task, beside those of every run."""

import sys
from dataclasses import dataclass

from arguments import names_that_decide, option
from devices import check_batch_size
from run_options import (
    DeviceOptions,
    LoopOptions,
    SurvivalOptions,
    complete_run,
    parse_flags,
)
from store_checks import check_server

# Options that are not given and depend on the store, and what they are then, if it has that.
STORE_DEFAULTS: dict[str, object] = {}


@dataclass(frozen=True)
class DataOptions:
    """Where data and checkpoints are: checks.py and location.py read all of these."""

    store: str | None = option(
        None, "your data: a path or a URL; the images here are drawn, and need none"
    )
    endpoint: str | None = option(None, "an S3 server other than AWS's", metavar="URL")
    region: str | None = option(
        None, "of the store's bucket on AWS; if not given, AWS_REGION"
    )
    anonymous: bool = option(False, "sign no request: for public buckets")
    retry_timeout: int = option(120, "seconds to retry what a server refuses")


@dataclass(frozen=True)
class TrainingOptions:
    """How the network is trained."""

    batch_size: int = option(32, "samples in the global batch", decides=True)
    max_steps: int = option(200, "optimizer steps in the whole run", decides=True)
    learning_rate: float = option(3e-3, "AdamW's", least=0, decides=True)
    dropout: float = option(
        0.2, "share of the features to leave out", least=0, below=1, decides=True
    )
    seed: int = option(
        0,
        "decides weights, order and images",
        least=0,
        below=2**64,  # torch takes no more
        decides=True,
    )
    precision: str = option(
        "32-true",
        "bf16-mixed needs hardware for it; without, 32-true is taken",
        choices=("32-true", "bf16-mixed"),
        decides=True,
    )
    eval_samples: int = option(512, "images that judge the network")


@dataclass(frozen=True)
class Options(  # dataclasses collect the fields from the last base to the first
    SurvivalOptions, LoopOptions, DeviceOptions, TrainingOptions, DataOptions
):
    """What a run was asked for, checked and complete."""


# What a run and the one that resumes it have in common.
RESUME_KEYS = names_that_decide(Options)


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = parse_flags(summary, sys.argv[1:] if argv is None else argv, Options)
    complete_run(args)
    check_server(args, "checkpoint_dir", "resume")
    check_batch_size(args)
    return Options(**vars(args))
