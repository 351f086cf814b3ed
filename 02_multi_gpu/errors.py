"""The errors that every module may raise, the lines that say what went wrong, and the exit."""

import argparse
import os
import sys
from pathlib import Path


class DataError(Exception):
    """What is wrong with the data, and what to do about it, in one line."""


class CheckpointError(Exception):
    """Why a run cannot go on from a checkpoint, and what to do about it, in one line."""


def program() -> str:
    """What was started: train.py, or preflight for `python -m preflight`."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


CAUSES = ("  |-> ", "  `-> ")

# Says what to mend, and exits with code 2.
refuse = argparse.ArgumentParser(prog=program(), usage=argparse.SUPPRESS).error


def first_line(error: BaseException) -> str:
    """What went wrong, without a client's account of its own settings."""
    while isinstance(error, BaseExceptionGroup):  # of several reads at once
        error = error.exceptions[0]
    lines = str(error).strip().split("\n")
    # icechunk 1 puts a tree below what went wrong, and its causes at the end.
    causes = [line.partition("-> ")[2] for line in lines if line.startswith(CAUSES)]
    return ": ".join(dict.fromkeys(causes)) or lines[0] or type(error).__name__


def print_note(text: str) -> None:
    """A line below the progress bar, once on each node."""
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if place == "0":
        print(f"\nnote: {text}", flush=True)
