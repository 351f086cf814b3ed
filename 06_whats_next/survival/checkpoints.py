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
from typing import BinaryIO

import obstore
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from obstore.exceptions import BaseError
from obstore.store import from_url

from errors import CheckpointError, DataError, first_line, print_note
from location import Location, client_options

ASIDE = "part.ckpt"  # what is being written
# Of obstore, of the system, and of torch.save on a full disk.
STORE_ERRORS = (BaseError, OSError, RuntimeError)


class DamagedError(CheckpointError):
    """Its bytes are not those that were written. The checkpoint before it may serve."""


def step_name(step: int) -> str:
    """The name of a step's checkpoint: the order of the names is that of the steps."""
    return f"step_{step:08}.ckpt"


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    return int(re.search(r"step_(\d+)", name)[1])


def best_name(step: int, score: float) -> str:
    """The name of the best checkpoint: it says how good it is, for runs to come."""
    return f"best_{score:.6f}_{step_name(step)}"


def score_of(name: str) -> float:
    return float(name.split("_")[1])


class CheckpointFolder:
    """Whole checkpoints in a folder: written aside, read back, and then renamed.

    Renaming is one act of the file system: a kill leaves the old file or the new one.
    """

    def __init__(self, path: str):
        self.url = path
        self.path = Path(path)

    def all_names(self) -> list[str]:
        """The files of the folder, if there is one."""
        return [path.name for path in self.path.glob("*.ckpt")]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, checkpoint: dict) -> None:
        """Save a checkpoint; OSError or RuntimeError if it cannot be, and none is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / ASIDE
        try:
            save_whole(checkpoint, aside)
            os.replace(aside, self.path / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def copy(self, name: str, target: str) -> None:
        aside = self.path / ASIDE
        shutil.copy(self.path / name, aside)
        os.replace(aside, self.path / target)


class CheckpointBucket:
    """Whole checkpoints in a bucket, which shows an object once all of it is there."""

    def __init__(self, location: Location):
        self.url = location.url
        self.store = from_url(location.url, **client_options(location))

    def all_names(self) -> list[str]:
        """The objects of the run; DataError if nothing answers."""
        try:
            batches = list(obstore.list(self.store))
        except STORE_ERRORS as error:
            remedy = "check address and credentials"
            reason = f"{first_line(error)}; {remedy}"
            raise DataError(f"--checkpoint-dir {self.url}: {reason}") from error
        return [entry["path"] for batch in batches for entry in batch]

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


def step_names(checkpoints: Checkpoints) -> list[str]:
    """The checkpoints of steps, the newest first."""
    pattern = re.compile(r"step_\d{8,}\.ckpt")
    names = [name for name in checkpoints.all_names() if pattern.fullmatch(name)]
    return sorted(names, reverse=True)


def best_names(checkpoints: Checkpoints) -> list[str]:
    """The checkpoint that did best in validation: one, or none yet."""
    pattern = re.compile(r"best_-?[\d.]+_step_\d{8,}\.ckpt")
    return [name for name in checkpoints.all_names() if pattern.fullmatch(name)]


def save_whole(checkpoint: dict, path: Path) -> None:
    """Save a checkpoint and read it back; OSError if the disk has other bytes."""
    with open(path, "wb") as file:
        write_zip(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    damaged = find_damage(path)
    if damaged:
        raise OSError(f"{damaged} reads back as other bytes than those written")


def write_zip(checkpoint: dict, file: BinaryIO) -> None:
    """torch.save, whose error on a full disk is the system's."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # It closes the zip file even after a write has failed, and complains of that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


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

        def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            on_gpu = tensor.is_cuda
            buffer = self.buffers.get(number)
            kind = tensor.shape, tensor.dtype
            if buffer is None or (buffer.shape, buffer.dtype) != kind:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
                self.buffers[number] = buffer
            return buffer.copy_(tensor, non_blocking=on_gpu)

        copied = apply_to_collection(state, torch.Tensor, copy_tensor)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied


class BackgroundWriter(CheckpointIO):
    """Lightning's way to files: training waits for a copy in memory, and a thread writes it.

    At most one checkpoint is being written. `failure` says why the last one is not there.
    """

    def __init__(
        self,
        folder: Checkpoints,
        keep: int,
        resumed: dict | None = None,
        higher_is_better: bool = False,
    ):
        self.folder = folder
        self.keep = keep
        self.sign = -1 if higher_is_better else 1
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
        """Write a checkpoint, then delete all but the newest. No error ends the run."""
        self.failure = None
        try:
            self.folder.write(name, checkpoint)
        except Exception as error:
            self.failure = f"{name} not written: {first_line(error)}"
            left = f"in {self.folder.url}: {self.describe_newest()}"
            print_note(f"{self.failure}; {left}")
            return
        try:
            for old in step_names(self.folder)[self.keep :]:
                self.folder.delete(old)
        except Exception as error:
            print_note(f"older checkpoints not deleted: {first_line(error)}")

    def describe_newest(self) -> str:
        """What a run could go on from now."""
        try:
            names = step_names(self.folder)
        except DataError:
            return "no answer"
        return names[0] if names else "no checkpoint"

    def keep_if_best(self, step: int, score: float) -> None:
        """Copy the step's checkpoint, once it is written, if no other is as good."""
        self.thread.submit(self.copy_if_best, step, score)

    def copy_if_best(self, step: int, score: float) -> None:
        if self.failure:
            return  # it is not there
        try:
            before = best_names(self.folder)
            scores = [self.sign * score_of(name) for name in before]
            if scores and min(scores) <= self.sign * score:
                return
            best = best_name(step, score)
            self.folder.copy(step_name(step), best)
            for name in before:
                if name != best:
                    self.folder.delete(name)
        except Exception as error:
            print_note(f"best checkpoint not written: {first_line(error)}")

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all that the thread has to do, so many seconds at most."""
        last = self.thread.submit(int)  # does nothing, after all else
        if wait([last], timeout).not_done:
            self.failure = f"still being written after {timeout:g} s"

    def close(self) -> None:
        """Let the thread end when it has done what it has to; nobody waits for it."""
        self.thread.shutdown(wait=False)

    def load_checkpoint(self, path: str, map_location=None, weights_only=None) -> dict:
        """The checkpoint that find_start has read and checked; it is not kept."""
        resumed = self.resumed
        self.resumed = None
        return resumed

    def remove_checkpoint(self, path: str) -> None:
        self.folder.delete(path)
