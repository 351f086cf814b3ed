"""From a command line to a store and back: errors become a last line and exit code 2."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

from torch import distributed

from errors import CheckpointError, DataError, first_line, refuse
from location import Location
from options import Options, parse_options

# How warnings begin that ask for nothing to be done here.
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
Result = TypeVar("Result")
Task = Callable[[Options, Location], Result]


def call_with_store(task: Task, summary: str, argv: list[str] | None) -> Result:
    """Call `task` with the options of a command line, and the location that they name."""
    options = parse_options(summary, argv)
    checkpoint = f"--resume {options.resume}"
    return call_at(partial(task, options), make_location(options), checkpoint)


def make_location(options: Options) -> Location:
    """The store that the options name. Its URL is empty if they name none."""
    return Location(
        options.store or "",
        endpoint=options.endpoint,
        anonymous=options.anonymous,
        retry_timeout=options.retry_timeout,
        region=options.region,
        icechunk=options.icechunk,
        snapshot=options.snapshot,
    )


def call_at(
    task: Callable[[Location], Result], named: Location, checkpoint: str
) -> Result:
    """Call `task` with the location that is named. If none is, see `serve`.

    An error becomes a last line and exit code 2. `checkpoint` is how the user named one.
    """
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", beginning)
    location = named
    try:
        with serve(named) as location:
            return task(location)
    except DataError as error:
        print(file=sys.stderr)  # below the progress bar
        reason = str(error).split("DataError: ")[-1].strip()  # a worker's has its stack
        if location.url and not reason.startswith(("--", "task.py", "train.py")):
            reason = f"--store {location.url}: {reason}"
        refuse(reason)
    except CheckpointError as error:
        refuse(f"{checkpoint}: {error}")
    except RuntimeError as error:
        if not is_of_group(error):
            raise
        print(f"\n{first_line(error)}", file=sys.stderr)
        reason = "its own last line, above or in that rank's log, says why"
        refuse(f"another rank failed, or does not answer; {reason}")


def serve(named: Location) -> AbstractContextManager[Location]:
    """The location that is named. If none is, what demo_store.py serves, if it is here."""
    if named.url or not find_spec("demo_store"):
        return nullcontext(named)
    from demo_store import serve_demo_store

    return serve_demo_store()


def is_of_group(error: RuntimeError) -> bool:
    """Whether ranks cannot reach each other. Of gloo's errors only the text says so."""
    by_gloo = any(words in str(error) for words in ("gloo", "pair closure"))
    return by_gloo or isinstance(error, distributed.DistBackendError)


def run(main: Callable[[], object]) -> None:
    """Call `main` and end this process with its exit code.

    Not by sys.exit: it would draw a progress bar below the reason, and threads of gloo that
    outlive their group would abort the end of Python.
    """
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    os._exit(code)
