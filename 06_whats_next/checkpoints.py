"""Checkpoints that are whole, in a folder or a bucket, written while training goes on."""

import os
import re
import shutil
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import obstore
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from obstore.exceptions import BaseError
from obstore.store import from_url

from errors import DataError, first_line
from store import Location, client_options

BEST = "best.ckpt"
# Of obstore, of the system, and of torch.save on a full disk.
STORE_ERRORS = (BaseError, OSError, RuntimeError)


class CheckpointError(Exception):
    """Why a run cannot go on from a checkpoint, and what to do about it, in one line."""


def step_name(step: int) -> str:
    """The name of a step's checkpoint: the order of the names is that of the steps."""
    return f"step_{step:08}.ckpt"


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    return int(re.findall(r"\d+", name)[0])


class CheckpointFolder:
    """Whole checkpoints in a folder: written aside, read back, and then renamed.

    Renaming is one act of the file system: a kill leaves the old file or the new one.
    """

    def __init__(self, path: str):
        self.url = path
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """The checkpoints of steps, the newest first."""
        found = [path.name for path in self.path.glob("step_*.ckpt")]
        return sorted(found, reverse=True)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, checkpoint: dict) -> None:
        """Save a checkpoint; OSError or RuntimeError if it cannot be, and none is there."""
        aside = self.path / "part.ckpt"
        try:
            save_whole(checkpoint, aside)
            os.replace(aside, self.path / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def copy(self, name: str, target: str) -> None:
        aside = self.path / "part.ckpt"
        shutil.copy(self.path / name, aside)
        os.replace(aside, self.path / target)


class CheckpointBucket:
    """Whole checkpoints in a bucket, which shows an object once all of it is there."""

    def __init__(self, location: Location):
        self.url = location.url
        self.store = from_url(location.url, **client_options(location))

    def names(self) -> list[str]:
        """The checkpoints of steps, the newest first; DataError if nothing answers."""
        try:
            batches = list(obstore.list(self.store))
        except STORE_ERRORS as error:
            remedy = "check address and credentials"
            reason = f"{first_line(error)}; {remedy}"
            raise DataError(f"--checkpoint-dir {self.url}: {reason}") from error
        found = [entry["path"] for batch in batches for entry in batch]
        return sorted(
            (name for name in found if name.startswith("step_")), reverse=True
        )

    def read(self, name: str) -> bytes:
        return obstore.get(self.store, name).bytes().to_bytes()

    def write(self, name: str, checkpoint: dict) -> None:
        """Save a checkpoint: first to a file, for the client to send in parts."""
        with TemporaryDirectory() as folder:
            file = Path(folder, name)
            save_whole(checkpoint, file)
            obstore.put(self.store, name, file)
            size = obstore.head(self.store, name)["size"]
            if size != file.stat().st_size:
                raise OSError(f"{name} has {size} bytes in the bucket")

    def delete(self, name: str) -> None:
        obstore.delete(self.store, name)

    def copy(self, name: str, target: str) -> None:
        obstore.copy(self.store, name, target)


Checkpoints = CheckpointFolder | CheckpointBucket


def open_checkpoints(location: Location) -> Checkpoints:
    """The checkpoints at a path, or at a URL such as s3://bucket/run."""
    if "://" in location.url:
        return CheckpointBucket(location)
    return CheckpointFolder(location.url)


def save_whole(checkpoint: dict, path: Path) -> None:
    """Save a checkpoint and read it back; OSError if the disk has other bytes."""
    with open(path, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    damaged = find_damage(path)
    if damaged:
        raise OSError(f"{damaged} reads back as other bytes than those written")


def find_damage(file: Path | BytesIO) -> str | None:
    """The first part of a checkpoint whose bytes are not those that were saved.

    torch.save writes a zip file with a checksum of each tensor, at which torch.load does not
    look. zipfile.BadZipFile if the end is missing.
    """
    return zipfile.ZipFile(file).testzip()


class Staging:
    """A copy of a state in memory of its own, which the next copy uses again.

    New memory is slow: the system has to clear every page of it.
    """

    def __init__(self):
        self.buffers: dict[int, torch.Tensor] = {}

    def copy(self, state: dict) -> dict:
        """The state with copies of its tensors, all on the CPU."""
        numbers = count()
        on_gpu = torch.cuda.is_available()

        def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            buffer = self.buffers.get(number)
            kind = tensor.shape, tensor.dtype
            if buffer is None or (buffer.shape, buffer.dtype) != kind:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
                self.buffers[number] = buffer
            return buffer.copy_(tensor, non_blocking=True)

        copied = apply_to_collection(state, torch.Tensor, copy_tensor)
        if on_gpu:
            torch.cuda.synchronize()
        return copied


class BackgroundWriter(CheckpointIO):
    """Lightning's way to files: training waits for a copy in memory, and a thread writes it.

    At most one checkpoint is being written. `failure` says why the last one is not there.
    """

    def __init__(self, folder: Checkpoints, keep: int, resumed: dict | None = None):
        self.folder = folder
        self.keep = keep
        self.resumed = resumed
        self.staging = Staging()
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.failure: str | None = None

    def save_checkpoint(
        self, checkpoint: dict, path: str, storage_options=None
    ) -> None:
        """Copy the state and return; Lightning calls this on rank 0 alone."""
        if self.writing is not None and not self.writing.done():
            self.failure = f"{path} left out: the one before it is still being written"
            print_note(self.failure)
            return
        copied = self.staging.copy(checkpoint)
        self.writing = self.thread.submit(self.write, copied, path)

    def write(self, checkpoint: dict, name: str) -> None:
        """Write a checkpoint, then delete all but the newest. An error ends no run."""
        self.failure = None
        try:
            self.folder.write(name, checkpoint)
            for old in self.folder.names()[self.keep :]:
                self.folder.delete(old)
        except (DataError, *STORE_ERRORS) as error:
            self.failure = f"{name} not written: {first_line(error)}"
            left = f"in {self.folder.url}: {self.describe_newest()}"
            print_note(f"{self.failure}; {left}")

    def describe_newest(self) -> str:
        """What a run could go on from now."""
        try:
            names = self.folder.names()
        except DataError:
            return "no answer"
        return names[0] if names else "no checkpoint"

    def keep_as_best(self, name: str) -> None:
        """Copy a checkpoint to best.ckpt, once it is written."""
        self.thread.submit(self.copy_to_best, name)

    def copy_to_best(self, name: str) -> None:
        if self.failure:
            return  # it is not there
        try:
            self.folder.copy(name, BEST)
        except STORE_ERRORS as error:
            print_note(f"{BEST} not written: {first_line(error)}")

    def finish(self, timeout: float | None = None) -> None:
        """Wait for what is being written, so many seconds at most."""
        if self.writing is None:
            return
        if wait([self.writing], timeout).not_done:
            self.failure = f"still being written after {timeout:g} s"

    def load_checkpoint(self, path: str, map_location=None, weights_only=None) -> dict:
        """The checkpoint that find_start has read and checked."""
        return self.resumed

    def remove_checkpoint(self, path: str) -> None:
        self.folder.delete(path)


def print_note(text: str) -> None:
    """A line below the progress bar."""
    print(f"\nnote: {text}", flush=True)
