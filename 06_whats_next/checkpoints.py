"""Checkpoints that are whole, in a folder or a bucket, and the newest that a run can go on from."""

import re
import zipfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import BytesIO
from itertools import count

import obstore
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from errors import DataError, first_line
from recovery import Window
from store import Location, client_options

# What a run and the one that resumes it have in common. A checkpoint keeps what the model
# was made with and what the data were made with apart.
MODEL_KEYS = ("learning_rate", "max_steps", "seed", "padding")
DATA_KEYS = (
    "variables",
    "train_times",
    "validation_times",
    "test_times",
    "patch_size",
    "batch_size",
    "accumulate_grad_batches",
    "patches_per_block",
    "shuffle_slots",
    "precision",
)
RESUME_KEYS = {"hyper_parameters": MODEL_KEYS, "datamodule_hyper_parameters": DATA_KEYS}
PARTS = {"global_step", "optimizer_states", "callbacks", *RESUME_KEYS}
BEST = "best.ckpt"
STORE_ERRORS = (BaseError, OSError)  # of obstore, and of the system


class CheckpointError(Exception):
    """Why a run cannot go on from a checkpoint, and what to do about it, in one line."""


def step_name(step: int) -> str:
    """The name of a step's checkpoint: the order of the names is that of the steps."""
    return f"step_{step:08}.ckpt"


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    return int(re.findall(r"\d+", name)[0])


class CheckpointFolder:
    """Whole files in a local folder or in a bucket.

    A bucket shows an object once all of it is there. obstore does the same on a disk: it
    writes to another name and renames. A kill leaves the old file, or none.
    """

    def __init__(self, location: Location):
        self.url = location.url
        if "://" in location.url:
            self.store = from_url(location.url, **client_options(location))
        else:
            self.store = LocalStore(location.url, mkdir=True)

    def names(self) -> list[str]:
        """The checkpoints of steps, the newest first; DataError if the place is not there."""
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

    def write(self, name: str, content: memoryview) -> None:
        """Write a file and read it back; OSError if the bytes are not those written."""
        obstore.put(self.store, name, content)
        checksum = 0
        for part in obstore.get(self.store, name).stream():
            checksum = zlib.crc32(part, checksum)
        if checksum != zlib.crc32(content):
            raise OSError(f"{name} reads back as other bytes than those written")

    def delete(self, name: str) -> None:
        obstore.delete(self.store, name)

    def copy(self, name: str, target: str) -> None:
        obstore.copy(self.store, name, target)

    def later_names(self, step: int) -> list[str]:
        """The checkpoints of later steps than this one."""
        return [name for name in self.names() if step_of(name) > step]

    def refuse_later(self, step: int) -> None:
        """DataError if there are checkpoints of a run that has come further."""
        for name in self.later_names(step):
            remedy = "give --resume to go on from it, --overwrite, or another folder"
            raise DataError(f"--checkpoint-dir {self.url}: has {name}; {remedy}")

    def delete_later(self, step: int) -> None:
        """Delete checkpoints that are damaged, or given up: they count as the newest."""
        for name in self.later_names(step):
            self.delete(name)


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

    def __init__(
        self, folder: CheckpointFolder, keep: int, resumed: dict | None = None
    ):
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
        file = BytesIO()
        torch.save(checkpoint, file)
        self.failure = None
        try:
            self.folder.write(name, file.getbuffer())
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
            self.failure = f"still being written after {timeout:.0f} s"

    def load_checkpoint(self, path: str, map_location=None, weights_only=None) -> dict:
        """The checkpoint that find_start has read and checked."""
        return self.resumed

    def remove_checkpoint(self, path: str) -> None:
        self.folder.delete(path)


def print_note(text: str) -> None:
    """A line below the progress bar."""
    print(f"\nnote: {text}", flush=True)


@dataclass
class Start:
    """Where a run begins: at step 0, or where a checkpoint was saved."""

    step: int = 0
    name: str | None = None
    checkpoint: dict | None = None
    skipped: tuple[Window, ...] = ()  # batches that the run has left out so far


def find_start(folder: CheckpointFolder, resume: str | None, options: dict) -> Start:
    """Where a run of these options begins.

    `resume`: None, from step 0; "last", from the newest checkpoint that is whole; "auto",
    the same, or from step 0 if there is no checkpoint at all; else the path of one.
    CheckpointError if there is none, or if it is of a run with other options.
    """
    if resume is None:
        return Start()
    if resume not in ("last", "auto"):
        parent, _, name = resume.rpartition("/")
        location = Location(parent or ".")
        return make_start(name, load_whole(CheckpointFolder(location), name), options)
    names = folder.names()
    if not names and resume == "auto":
        return Start()
    for name in names:
        try:
            checkpoint = load_whole(folder, name)
        except CheckpointError as error:
            print_note(f"{name} {error}; trying the one before it")
            continue
        return make_start(name, checkpoint, options)
    raise CheckpointError(f"no whole checkpoint in {folder.url}; give no --resume")


def load_whole(folder: CheckpointFolder, name: str) -> dict:
    """A checkpoint; CheckpointError unless all of its bytes are as they were written.

    torch.save writes a zip file, with a checksum of each tensor that torch.load ignores.
    """
    try:
        file = BytesIO(folder.read(name))
        damaged = zipfile.ZipFile(file).testzip()
    except FileNotFoundError as error:
        remedy = "to start anew, give no --resume"
        raise CheckpointError(f"no such file; {remedy}") from error
    except (*STORE_ERRORS, zipfile.BadZipFile) as error:
        reason = f"cannot be read ({first_line(error)})"
        raise CheckpointError(f"{reason}; give a whole checkpoint") from error
    if damaged:
        reason = f"has other bytes than those written, in {damaged}"
        raise CheckpointError(f"{reason}; give a whole checkpoint")
    file.seek(0)
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        missing = PARTS - saved.keys()
    except Exception as error:  # torch raises many kinds, depending on the bytes
        kind = type(error).__name__
        reason = f"cannot be read ({kind}); give a whole checkpoint"
        raise CheckpointError(reason) from error
    if missing:
        listed = ", ".join(sorted(missing))
        raise CheckpointError(f"has no {listed}; give one that this chapter wrote")
    return saved


def make_start(name: str, saved: dict, options: dict) -> Start:
    """Go on from a checkpoint; CheckpointError if its run had other options."""
    for part, keys in RESUME_KEYS.items():
        for key in keys:
            before = saved[part].get(key)
            if options[key] != before:
                flag = f"--{key.replace('_', '-')}"
                reason = f"has {flag} {before}, not {options[key]}"
                raise CheckpointError(f"{reason}; give {flag} that, or no --resume")
    boundary = saved["callbacks"]["StepBoundary"]
    skipped = tuple(Window(*window) for window in boundary["skipped"])
    return Start(saved["global_step"], name, saved, skipped)
