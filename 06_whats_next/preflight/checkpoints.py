"""Whether a run would start, and can write and restore its checkpoints."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from time import perf_counter
from zipfile import BadZipFile

import torch

from errors import first_line
from location import Location
from options import Options
from preflight.findings import Finding
from preflight.training import Trial
from survival.checkpoints import find_damage, open_checkpoints
from survival.resume import Start, find_start, refuse_later

NAME = "preflight.ckpt"  # no run takes it for a checkpoint
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_start(
    place: Location, options: Options, starts: list[Start]
) -> Iterator[Finding]:
    """Whether train.py would begin: from the checkpoint that is asked for, or from none.

    Its start is put into `starts`.
    """
    checkpoints = open_checkpoints(place)
    start = find_start(checkpoints, options.resume, asdict(options))
    if options.resume not in ("last", "auto") and not options.overwrite:
        refuse_later(checkpoints, start.step)
    starts.append(start)
    yield Finding("start", f"at step {start.step}, of {place.url}")


def write_checkpoint(place: Location, trial: Trial) -> Iterator[Finding]:
    """Write a state as a run would. It stays there, for read_checkpoint."""
    checkpoints = open_checkpoints(place)
    began = perf_counter()
    try:
        checkpoints.write(NAME, trial.state())
    except OSError as error:
        if error.errno not in FULL:
            raise
        remedy = "make room, or give another --checkpoint-dir"
        yield Finding("checkpoint", f"{place.url}: {first_line(error)}", remedy)
        return
    seconds = perf_counter() - began
    size = len(checkpoints.read(NAME))
    yield Finding("checkpoint", f"{size / 1e6:.1f} MB written in {seconds:.2f} s")


def read_checkpoint(place: Location, trial: Trial) -> Iterator[Finding]:
    """Restore what rank 0 has written, as each rank does when a run goes on."""
    began = perf_counter()
    try:
        content = open_checkpoints(place).read(NAME)
    except FileNotFoundError:
        remedy = "give a --checkpoint-dir that all nodes share, or a bucket"
        yield Finding("restore", f"not in this rank's {place.url}", remedy)
        return
    other_bytes = "reads back as other bytes than those written"
    remedy = "give a --checkpoint-dir on another disk"
    try:
        bad = find_damage(BytesIO(content))
    except BadZipFile:
        bad = "the end"
    if bad:
        yield Finding("restore", f"{bad} {other_bytes}", remedy)
        return
    saved = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    trial.module.load_state_dict(saved["state_dict"])
    trial.optimizer.load_state_dict(saved["optimizer_states"][0])
    yield Finding("restore", f"the same bytes, in {perf_counter() - began:.2f} s")


def delete_checkpoint(place: Location) -> None:
    """Delete what write_checkpoint may have left."""
    with suppress(Exception):  # that it is not there has been said, or does not matter
        open_checkpoints(place).delete(NAME)
    with suppress(OSError):  # a bucket has no folder
        Path(place.url).rmdir()
