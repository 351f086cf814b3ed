"""The command line of predict_scaling.py."""

import argparse
import math
import os
from functools import partial
from pathlib import Path

from errors import refuse
from predicting.memory import BYTES_PER_PARAMETER
from predicting.models import ASSUMED_SECONDS

CHAPTER = Path(__file__).parent.parent
OF_THE_PROGRAM = (
    "results",
    "output_dir",
    "save_results",
)  # and not of what it predicts


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        """Exit with code 2."""
        refuse(message.removeprefix("argument "))


def parse_options(summary: str, argv: list[str] | None) -> argparse.Namespace:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=summary, formatter_class=show_defaults)
    add = parser.add_argument
    add_number = partial(add, type=float, metavar="X")
    add_count = partial(add, type=int)
    results = os.path.relpath(CHAPTER / "results")
    outputs = os.path.relpath(CHAPTER / "outputs/predict_scaling")
    add("--results", default=results, help="folder of what scaling.py measured")
    add_number(
        "--step-seconds",
        help="compute time of a GPU's step; without it, that in scaling_gpu.json, "
        f"or else {ASSUMED_SECONDS} is assumed",
    )
    add_number(
        "--parameters", help="of your model; without it, those of this chapter's U-Net"
    )
    add_number(
        "--bytes-per-parameter",
        default=4,
        help="in the gradients that your model sends",
    )
    add_number(
        "--flops",
        default=4e14,
        help="a GPU's, for the other models; assumed: 40%% of an H100's",
    )
    add_count("--gpus-per-node", default=8, help="joined by NVLink; a power of two")
    add_number(
        "--link-share",
        default=0.8,
        help="share of the line rate that an all-reduce attains",
    )
    add_number(
        "--backward-share",
        default=2 / 3,
        help="of the compute time: twice the forward's work",
    )
    add_number(
        "--bucket-mb",
        help="DDP's bucket_cap_mb; without it, 1 for the first, 25 for the others",
    )
    add(
        "--precision",
        choices=tuple(BYTES_PER_PARAMETER),
        default="autocast",
        help="what is kept for each parameter",
    )
    add_number("--gpu-memory", default=80, help="of each GPU, in GB")
    add_number(
        "--activation-gb", default=2, help="for each sample, the same for every model"
    )
    add_count(
        "--device-batch", default=1, help="samples on each GPU, for the activations"
    )
    add_count(
        "--units",
        default=32,
        help="into which FSDP divides a model, such as its blocks",
    )
    add_count("--devices", default=8, help="GPUs that the advice is for")
    add("--output-dir", default=outputs, help="for what it writes")
    add(
        "--save-results",
        action="store_true",
        help="write to --results instead, beside what it read",
    )
    options = parser.parse_args(argv)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse values with which nothing can be predicted."""
    for name, value in vars(options).items():
        is_number = type(value) in (int, float)
        if is_number and not 0 < value < math.inf:
            refuse(f"{flag_of(name)} {value}: give a number above zero")
    for name in ("link_share", "backward_share"):
        value = getattr(options, name)
        if value > 1:
            refuse(f"{flag_of(name)} {value}: it is a share; give at most 1")
    gpus = options.gpus_per_node
    if gpus > 1024 or gpus.bit_count() != 1:
        refuse(f"--gpus-per-node {gpus}: give a power of two up to 1024")
    if options.parameters and not options.step_seconds:
        problem = f"--parameters {options.parameters:g}"
        refuse(f"{problem}: give your model's --step-seconds too")


def flag_of(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def assumptions(options: argparse.Namespace) -> dict:
    """The options that decide what is predicted."""
    values = vars(options).items()
    return {name: value for name, value in values if name not in OF_THE_PROGRAM}
