"""An RMSE that later runs need not compute: kept in a file, and read from it."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

# What reading a damaged or foreign file may raise.
BROKEN = (OSError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def read(path: Path, units: list[str]) -> dict[str, float] | None:
    """The RMSE in each unit; None if there is no file, or, with a note, if it is broken."""
    try:
        kept = json.loads(path.read_text())
        rmse = {unit: float(kept[unit]) for unit in units}
        if not all(0 < value < math.inf for value in rmse.values()):
            raise ValueError("no RMSE")
    except FileNotFoundError:
        return None
    except BROKEN as error:
        reason = f"cannot be used ({type(error).__name__})"
        print(f"{os.path.relpath(path)} {reason}; it is computed anew")
        return None
    return rmse


def keep(path: Path, rmse: dict[str, float]) -> None:
    """Write the file whole or not at all; a note if it cannot be written."""
    # A file of its own, because two runs may compute it at once.
    begun = path.with_suffix(f".{os.getpid()}.begun")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun.write_text(json.dumps(rmse))
        begun.replace(path)
    except OSError as error:
        with suppress(OSError):
            begun.unlink()
        reason = f"cannot be written ({error.strerror})"
        print(f"{os.path.relpath(path)} {reason}; the next run computes it again")
        return
    print(f"kept in {os.path.relpath(path)}, where later runs read it")
