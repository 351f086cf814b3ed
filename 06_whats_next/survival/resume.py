"""Where a run begins: at step 0, or at the newest checkpoint that is whole and its own."""

from dataclasses import asdict, dataclass, replace
from io import BytesIO

import torch
from block_order import Window, batch_number
from torch import distributed

from arguments import require_same, take_over
from errors import CheckpointError, DataError, first_line, print_note
from location import Location
from options import RESUME_KEYS, STORE_DEFAULTS, Options
from survival.checkpoints import (
    STORE_ERRORS,
    Checkpoints,
    DamagedError,
    best_names,
    find_damage,
    open_checkpoints,
    step_names,
    step_of,
)
from survival.recovery import BadLoss

PARTS = {"global_step", "optimizer_states", "callbacks"}


@dataclass
class Start:
    """Where a run begins: at step 0, or where a checkpoint was saved."""

    step: int = 0
    name: str | None = None
    checkpoint: dict | None = None
    skipped: tuple[Window, ...] = ()  # batches that the run has left out so far
    record: dict | None = None  # see tracking/run_record.py

    @property
    def log(self) -> str:
        """Its folder of logs, below the output folder."""
        return f"resumed_at_{self.step}" if self.name else ""

    def take_over(self, options: Options) -> Options:
        """The options; what is not given, and depends on the store, as in the run so far.

        The store may have grown since then.
        """
        if not self.record:
            return options
        before = self.record["options"]
        return Options(**take_over(STORE_DEFAULTS, before, asdict(options)))


def find_start(folder: Checkpoints, resume: str | None, options: dict) -> Start:
    """Where a run of these options begins.

    `resume`: None, from step 0; "last", from the newest checkpoint that is whole; "auto",
    the same, or from step 0 if there is no checkpoint at all; else the path of one.
    CheckpointError if there is none, or if it is of a run with other options.
    """
    if resume is None:
        return Start()
    if resume not in ("last", "auto"):
        parent, slash, name = resume.rpartition("/")
        endpoint = options["endpoint"] if "://" in resume else None
        place = Location(parent or slash or ".", endpoint)
        given = open_checkpoints(replace(place, retry_timeout=options["retry_timeout"]))
        return make_start(name, load_whole(given, name), options)
    names = step_names(folder)
    if not names and resume == "auto":
        return Start()
    for name in names:
        try:
            checkpoint = load_whole(folder, name)
        except DamagedError as error:
            print_note(f"{name} {error}; trying the one before it")
            continue
        return make_start(name, checkpoint, options)
    raise CheckpointError(f"no whole checkpoint in {folder.url}; give no --resume")


def load_whole(folder: Checkpoints, name: str) -> dict:
    """A checkpoint; DamagedError unless all of its bytes are as they were written.

    CheckpointError if it cannot be read now, or is of something else.
    """
    try:
        file = BytesIO(folder.read(name))
    except FileNotFoundError as error:
        remedy = "to start anew, give no --resume"
        raise CheckpointError(f"no such file; {remedy}") from error
    except STORE_ERRORS as error:
        reason = f"{name} cannot be read now: {first_line(error)}"
        raise CheckpointError(f"{reason}; try again") from error
    try:
        damaged = find_damage(file)
    except Exception as error:  # zipfile raises many kinds, depending on the bytes
        reason = "is cut off, or no checkpoint"
        raise DamagedError(f"{reason}; give a whole one") from error
    if damaged:
        reason = f"has other bytes than those written, in {damaged}"
        raise DamagedError(f"{reason}; give a whole one")
    file.seek(0)
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        missing = PARTS - saved.keys()
    except Exception as error:  # torch raises many kinds, depending on the bytes
        reason = f"is no checkpoint ({type(error).__name__})"
        raise CheckpointError(f"{reason}; give one that this chapter wrote") from error
    if missing:
        listed = ", ".join(sorted(missing))
        raise CheckpointError(f"has no {listed}; give one that this chapter wrote")
    return saved


def make_start(name: str, saved: dict, options: dict) -> Start:
    """Go on from a checkpoint; CheckpointError if its run had other options."""
    states = saved["callbacks"]
    for callback in ("StepBoundary", "RunRecord"):
        if callback not in states:
            remedy = "give one that this chapter wrote"
            raise CheckpointError(f"has no state of {callback}; {remedy}")
    record = states["RunRecord"]
    now = take_over(STORE_DEFAULTS, record["options"], options)
    require_same(RESUME_KEYS, record["options"], now)
    skipped = tuple(Window(*window) for window in states["StepBoundary"]["skipped"])
    return Start(
        step=saved["global_step"],
        name=name,
        checkpoint=saved,
        skipped=skipped,
        record=record,
    )


def skip_batches(
    bad: BadLoss, start: Start, checkpoints: Checkpoints, options: dict
) -> Start:
    """The newest checkpoint, which is older than the bad loss, and the batches to skip."""
    first = batch_number(bad.step, start.skipped)
    window = Window(first, first + options["skip_batches"])
    skipped = (*start.skipped, window)
    if len(skipped) > options["max_skips"]:
        remedy = "lower --learning-rate, or look at these batches"
        raise DataError(f"--max-skips {options['max_skips']}: {bad} again; {remedy}")
    if distributed.is_initialized():
        distributed.barrier()  # rank 0 has written what it was writing
    found = find_start(checkpoints, "auto", options)
    if found.step < start.step:  # --resume names one in another folder
        found = find_start(checkpoints, options["resume"], options)
    print_note(f"{bad}: back to step {found.step}, without batches {list(window)}")
    return replace(found, skipped=skipped)


def later_names(checkpoints: Checkpoints, step: int) -> list[str]:
    """The checkpoints of later steps than this one, and of a later best one."""
    names = step_names(checkpoints) + best_names(checkpoints)
    return [name for name in names if step_of(name) > step]


def refuse_later(checkpoints: Checkpoints, step: int) -> None:
    """DataError if there are checkpoints of a run that has come further."""
    for name in later_names(checkpoints, step):
        remedy = "give --resume auto to go on from it, --overwrite, or another folder"
        raise DataError(f"--checkpoint-dir {checkpoints.url}: has {name}; {remedy}")


def delete_later(checkpoints: Checkpoints, step: int) -> None:
    """Delete checkpoints that are damaged, or given up: they would count as the newest."""
    try:
        for name in later_names(checkpoints, step):
            checkpoints.delete(name)
    except STORE_ERRORS as error:
        reason = f"--checkpoint-dir {checkpoints.url}: {first_line(error)}"
        raise DataError(f"{reason}; delete {name} by hand") from error
