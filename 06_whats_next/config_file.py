"""Options from a JSON file, turned into flags, so that they are checked as flags are."""

import json
from dataclasses import Field, fields
from reprlib import repr as shorten
from typing import Any

from arguments import flag_of, takes_several, value_type
from errors import refuse

MOST_BYTES = 10**6
EXAMPLE = "give one such as a run's options.json"


def read_flags(path: str, options: type) -> list[str]:
    """The options in a file, as flags.

    `options` is the dataclass whose fields the file may name. null means: not given. An
    option that does not exist, or cannot take its value, ends the program with code 2.
    """
    declared = {field.name: field for field in fields(options)}
    flags = []
    for name, value in read_object(path).items():
        if name not in declared:
            refuse(f"--config {path}: {shorten(name)}: no such option; see --help")
        if value is None:
            continue
        try:
            flags += make_flags(declared[name], value)
        except ValueError as error:
            refuse(f"--config {path}: {name} {shorten(value)}: {error}")
    return flags


def read_object(path: str) -> dict[str, Any]:
    """What a JSON file holds. If it is not an object, the program ends with code 2."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        refuse(f"--config {path}: {error.strerror}; {EXAMPLE}")
    if len(content) > MOST_BYTES:
        refuse(f"--config {path}: larger than a megabyte; {EXAMPLE}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        refuse(f"--config {path}: no JSON; {EXAMPLE}")
    if not isinstance(found, dict):
        refuse(f"--config {path}: no object with names of options; {EXAMPLE}")
    return found


def make_flags(declared: Field, value: Any) -> list[str]:
    """A flag with its value, or values; ValueError if the option cannot take them."""
    flag = flag_of(declared.name)
    if value_type(declared) is bool:
        if not isinstance(value, bool):
            raise ValueError("give true or false")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list) and takes_several(declared):
        words = [make_word(part) for part in value]
        if any(word.startswith("-") for word in words):  # it would be a flag
            raise ValueError("give values that do not begin with a dash")
        return [flag, *words]
    return [f"{flag}={make_word(value)}"]


def make_word(value: Any) -> str:
    """A text or a number, as it stands on a command line; ValueError if it cannot."""
    if type(value) not in (str, int, float):  # true is an int, too
        raise ValueError("give a text or a number")
    word = str(value)
    if not word.isprintable():
        raise ValueError("give a text in one line")
    return word
