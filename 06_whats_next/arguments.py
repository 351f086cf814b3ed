"""Options that are declared once, as fields of dataclasses from which flags are made.

@dataclass(frozen=True)
class TrainingOptions:
    \"\"\"What decides the weights.\"\"\"

    batch_size: int = option(8, "samples in the global batch", decides=True)

add_options(parser, TrainingOptions)  # --batch-size, in a group with that title
"""

import argparse
import math
from collections.abc import Iterable
from copy import copy
from dataclasses import Field, field, fields
from functools import partial
from types import NoneType
from typing import Any, get_args, get_origin

from errors import CheckpointError


def option(
    default: Any,
    help: str,
    *,
    least: float = 1,
    below: float = math.inf,
    decides: bool = False,
    hidden: bool = False,
    **settings: Any,
) -> Any:
    """A field of a dataclass that is also a flag. Its type is that of the annotation.

    `default` is a value, or a function that returns one. `least` and `below` limit
    numbers. A resumed run must share the options that have `decides`. `settings`
    are further ones of argparse's add_argument, such as choices, nargs and metavar.
    """
    settings["help"] = argparse.SUPPRESS if hidden else help
    metadata = {
        "settings": settings,
        "least": least,
        "below": below,
        "decides": decides,
    }
    make = default if callable(default) else partial(copy, default)
    return field(default_factory=make, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, group: type) -> None:
    """Add a dataclass's options to a parser, titled by the first line of its docstring."""
    title = group.__doc__.splitlines()[0].rstrip(".")
    add = parser.add_argument_group(title).add_argument
    for declared in fields(group):
        add(flag_of(declared.name), **settings_of(declared))


def settings_of(declared: Field) -> dict[str, Any]:
    """The keyword arguments of argparse's add_argument for an option."""
    settings = dict(declared.metadata["settings"])
    settings["default"] = declared.default_factory()
    kind = value_type(declared)
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
        return settings
    settings["type"] = kind
    if kind in (int, float):
        least = declared.metadata["least"]
        below = declared.metadata["below"]
        settings["type"] = partial(read_number, kind, least, below)
    if takes_several(declared):
        settings.setdefault("nargs", "+")
    return settings


def value_type(declared: Field) -> type:
    """The type of an option's value: int for `int | None`, and str for `list[str]`."""
    if takes_several(declared):
        return str
    return without_none(declared.type)


def takes_several(declared: Field) -> bool:
    """Whether an option takes a list of values."""
    return get_origin(without_none(declared.type)) is list


def without_none(annotation: type) -> type:
    """int for `int | None`; anything else as it is."""
    if NoneType in get_args(annotation):
        return get_args(annotation)[0]
    return annotation


def read_number(kind: type, least: float, below: float, text: str) -> int | float:
    """A number of the command line; argparse names the flag if it is refused."""
    try:
        number = kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        reason = f"{text!r}: give {wanted}"
        raise argparse.ArgumentTypeError(reason) from error
    if kind is float and not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text}: not finite; give a number")
    if number < least:
        raise argparse.ArgumentTypeError(f"{text}: too small; give at least {least}")
    if number >= below:
        raise argparse.ArgumentTypeError(f"{text}: too large; give less than {below}")
    return number


def flag_of(name: str) -> str:
    """The flag of an option: --batch-size for batch_size."""
    return f"--{name.replace('_', '-')}"


def names_that_decide(options: type) -> list[str]:
    """The options that a resumed run must share with the run before."""
    return [one.name for one in fields(options) if one.metadata["decides"]]


def take_over(names: Iterable[str], before: dict, now: dict) -> dict:
    """The options now. Those of `names` that are not given are taken from `before`."""
    not_given = [name for name in names if now[name] is None]
    return now | {name: before.get(name) for name in not_given}


def require_same(names: list[str], before: dict, now: dict) -> None:
    """CheckpointError unless a run may go on with one that had other options `before`."""
    unknown = sorted(before.keys() - now.keys())
    if unknown:
        listed = ", ".join(map(flag_of, unknown))
        remedy = "go on in the folder that wrote it"
        raise CheckpointError(f"has {listed}, unknown here; {remedy}")
    for name in names:
        flag = flag_of(name)
        if name not in before and now[name] is not None:
            raise CheckpointError(f"does not say its {flag}; give no --resume")
        if before.get(name) != now[name]:
            reason = f"has {flag} {before[name]}, not {now[name]}"
            raise CheckpointError(f"{reason}; give that, or no --resume")
