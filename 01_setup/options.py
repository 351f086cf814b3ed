"""The command line: every option, its default, and what it may be."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from arguments import add_options, names_that_decide, option
from checks import check_folder, check_local
from errors import program, refuse

# What you change for data of your own, here or by flags.
HERE = Path(__file__).parent
STORE = HERE / "data/navy_winds.nc"
VARIABLES = ["eastward_wind", "northward_wind"]
TRAIN_TIMES = ["1982", "1989"]
VALIDATION_TIMES = ["1990", "1990"]
TEST_TIMES = ["1991", "1992"]
PATCH_SIZE = 64
# Taken where no flag says otherwise, if the file has them: see store_defaults.py.
STORE_DEFAULTS = {
    "train_times": TRAIN_TIMES,
    "validation_times": VALIDATION_TIMES,
    "test_times": TEST_TIMES,
    "patch_size": PATCH_SIZE,
}
OUTPUTS = HERE / "outputs"
TIMES = {"nargs": 2, "metavar": ("FIRST", "LAST"), "decides": True}


def run_folder(name: str = "train") -> str:
    """Where a run's files go, as seen from where the program was started."""
    return os.path.relpath(OUTPUTS / name)


def winds_file() -> str:
    """The winds that come with the book, as seen from where the program was started."""
    return os.path.relpath(STORE)


@dataclass(frozen=True)
class DataOptions:
    """Which of the data are used, and how."""

    store: str = option(winds_file, "NetCDF file")
    variables: list[str] = option(VARIABLES, "any number of the file's", decides=True)
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
        f"to train on; if not given, {' '.join(TRAIN_TIMES)}, or about 80%% of the file's dates",
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


@dataclass(frozen=True)
class LoopOptions:
    """How it runs, which changes no weight beyond rounding."""

    accelerator: str = option(
        "auto", "where to compute", choices=("auto", "cpu", "gpu")
    )
    num_workers: int = option(0, "processes that prepare batches; 0: this one", least=0)
    validate_every: int = option(100, "steps between validations")
    eval_samples: int = option(96, "patches that judge a run", hidden=True)
    checkpoint_every: int = option(50, "steps between checkpoints")
    log_every: int = option(10, "steps between lines of the log")
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
    LoopOptions, TrainingOptions, DataOptions
):
    """What a run was asked for, checked. make_data completes what depends on the file."""


# What a run and the one that resumes it have in common.
RESUME_KEYS = names_that_decide(Options)


def parse_options(
    summary: str, argv: list[str] | None = None, name: str = "train"
) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong.

    Without --output-dir, the run's folder has this name.
    """
    parser = make_parser(summary)
    parser.set_defaults(output_dir=run_folder(name))
    args = parser.parse_args(argv)
    each_once = dict.fromkeys(args.variables)
    args.variables = list(each_once)
    if args.accelerator == "gpu" and not torch.accelerator.is_available():
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    check_local("--store", args.store)
    check_folder("--output-dir", args.output_dir)
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
