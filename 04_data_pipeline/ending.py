"""How a command ends: an error becomes a last line and exit code 2."""

import faulthandler
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import distributed

from errors import CheckpointError, DataError, first_line, refuse

Result = TypeVar("Result")
# Warnings that begin so ask for nothing to be done here.
KNOWN_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own use of torch
    r"torch\.distributed\.nn\.functional\.all_gather is deprecated",  # Lightning's, too
    "Your `IterableDataset` has `__len__` defined",  # the workers' shares add up to it
    "The number of training batches .* is smaller than the logging interval",
    "The '.*_dataloader' does not have many workers",  # reads are threads' work
    "Consider setting persistent_workers=True",  # each loader is used once
    "It is recommended to use .*sync_dist=True",  # torchmetrics adds up over ranks
    "You're resuming from a checkpoint that ended before the epoch",  # data follow the step
    "Experiment logs directory .* exists",
    "Checkpoint directory .* exists",
    "Total length of `DataLoader` across ranks is zero",  # all maps are filled
    "Couldn't infer the batch indices",  # predict knows its maps by number
    "The dirpath has changed",  # --resume CKPT of another folder
    "`broadcast_buffers` is deprecated",
    "GPU available but not used",  # with --accelerator cpu
    "Failed to open Zarr store with consolidated metadata",
    "Consolidated metadata is currently not part",
    "Numcodecs codecs are not in the Zarr version 3 specification",  # those of HDF5
)


def call(task: Callable[[], Result], checkpoint: str, store: str = "") -> Result:
    """Call `task`. If it raises an error of ours, end with a line that says what to mend.

    `checkpoint` and `store` are how the user named them.
    """
    silence()
    try:
        with name_store(store):
            return task()
    except DataError as error:
        print(file=sys.stderr)  # below the progress bar
        refuse(reason_of(error))
    except CheckpointError as error:
        refuse(f"{checkpoint}: {error}")
    except RuntimeError as error:
        if not is_of_group(error):
            raise
        print(f"\n{first_line(error)}", file=sys.stderr)
        reason = "its own last line, above or in that rank's log, says why"
        refuse(f"another rank failed, or does not answer; {reason}")


def silence() -> None:
    """Hide what Lightning says of itself, and warnings that are known."""
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", beginning)


@contextmanager
def name_store(store: str) -> Iterator[None]:
    """Say which store an error is about, unless it names a flag or there is none."""
    try:
        yield
    except DataError as error:
        reason = reason_of(error)
        if not store or reason.startswith(("--", "task.py", "train.py")):
            raise
        raise DataError(f"--store {store}: {reason}") from error


def reason_of(error: DataError) -> str:
    """The error's text. In a worker's error it comes after a traceback."""
    return str(error).split("DataError: ")[-1].strip()


def is_of_group(error: RuntimeError) -> bool:
    """Whether ranks cannot reach each other. With gloo, only the text tells."""
    by_gloo = any(words in str(error) for words in ("gloo", "pair closure"))
    return by_gloo or isinstance(error, distributed.DistBackendError)


def run(main: Callable[[], object]) -> None:
    """Call `main` and end this process with its exit code.

    sys.exit would draw a progress bar below the reason, and would let gloo's threads, which
    may outlive their process group, crash Python while it shuts down.
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID shows where it is
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        code = 130  # as a shell has it
    sys.stdout.flush()
    os._exit(code)
