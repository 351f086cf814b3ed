"""What the program writes: its rows and its picture."""

import json
import platform
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure

from errors import refuse


def save(flag: str, folder: str, results: dict, figure: Figure) -> Path:
    """Write predict_scaling.png and .json; return the picture's path.

    Exits with code 2 if the folder, which `flag` has named, cannot be written to.
    """
    picture = Path(folder, "predict_scaling.png")
    text = json.dumps(results) + "\n"
    write_whole(flag, picture, lambda path: figure.savefig(path, dpi=90))
    write_whole(flag, picture.with_suffix(".json"), lambda path: path.write_text(text))
    return picture


def write_whole(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside it, then rename that: never half a file."""
    part = path.with_name(f"part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(path)
    except OSError as error:
        reason = f"cannot write {path.name} ({error})"
        remedy = "make room or choose another folder"
        refuse(f"{flag} {path.parent}: {reason}; {remedy}")


def make_results(command: str, machine: dict, rows: list[dict]) -> dict:
    """The contents of predict_scaling.json. machine: on which scaling.py measured."""
    versions = {"python": platform.python_version(), "numpy": version("numpy")}
    return {
        "command": command,
        "date": str(date.today()),
        "machine": machine,
        "versions": versions,
        "rows": rows,
    }
