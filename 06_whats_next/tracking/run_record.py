"""What a run was made of: options, code, data, packages and machine, in each checkpoint.

    uv run python -m tracking.run_record outputs/train                      # or a checkpoint
    uv run python -m tracking.run_record outputs/train OTHER                # how two runs differ
    uv run python -m tracking.run_record CKPT --save-options options.json   # for train.py --config

With one record, you should see what it holds, and what would differ if it was run here.
"""

import argparse
import json
import shlex
import signal
import subprocess
from dataclasses import fields
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from block_order import Window
from lightning.pytorch import Callback, LightningModule, Trainer

from checks import check_folder
from config_file import make_flags
from errors import CheckpointError, DataError, print_note, refuse
from options import RESUME_KEYS, STORE_DEFAULTS, Options
from results import describe_machine, list_versions

HERE = Path(__file__).parent.parent  # the folder of train.py
# Programs beside train.py, on which no run depends.
NOT_OF_A_RUN = (
    "new_project.py",
    "plan/",
    "predict/",
    "preflight/",
    "search_space.py",
    "studies/",
    "tests/",
    "tune.py",
)
# Options that say how a start goes on from another, which a repeated run does not, and
# where this machine keeps what it has computed.
NOT_REPEATED = ("resume", "overwrite", "climatology_dir")
# What differs here may change the last bits of the weights, or nothing.
COMPARED = ("code", "data", "versions", "machine")

Record = dict[str, dict[str, Any]]


def make_record(
    options: dict,
    data: dict[str, str],
    *,
    loss: str,
    step: int,
    skipped: tuple[Window, ...],
) -> Record:
    """All that decides a run's weights, and how it was started, as JSON has it.

    `options` are the checked ones, with the defaults filled in. `data` are checksums, of
    which "values" must be the same for a run to go on: see task.describe_data. `loss` is the
    name under which it is logged.
    """
    now = datetime.now().isoformat(" ", "seconds")
    windows = [list(window) for window in skipped]
    return {
        "start": {"at": now, "step": step, "skipped": windows, "loss": loss},
        "options": options,
        "data": data,
        **describe_here(),
    }


def describe_here() -> Record:
    """The code in this folder, the packages and this machine."""
    threads = {"threads": torch.get_num_threads()}
    return {
        "code": identify_code(),
        "versions": list_versions(),
        "machine": describe_machine() | threads,
    }


def identify_code() -> dict[str, Any]:
    """A checksum of the Python files here; if Git has it, commit and changed files."""
    files = sha256()
    paths = [*HERE.glob("*.py"), *HERE.glob("*/*.py")]
    for path in sorted(paths):
        name = path.relative_to(HERE).as_posix()
        if name.startswith(NOT_OF_A_RUN):
            continue
        files.update(name.encode())
        files.update(path.read_bytes())
    is_tracked = bool(git("ls-files", "--", "train.py"))
    commit = git("rev-parse", "HEAD") if is_tracked else None
    status = git("status", "--porcelain", "--", ".") if is_tracked else None
    changed = None if status is None else [line[3:] for line in status.splitlines()]
    return {"files": files.hexdigest(), "commit": commit, "changed": changed}


def git(*command: str) -> str | None:
    """What Git says about this folder; None if it is not there, or not its folder."""
    try:
        return subprocess.check_output(
            ["git", *command], cwd=HERE, text=True, stderr=subprocess.DEVNULL
        ).rstrip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_differences(before: Record, now: Record, parts: tuple[str, ...]) -> list[str]:
    """A line for each entry that differs, such as "versions: torch 2.14 -> 2.15"."""
    lines = []
    for part in parts:
        old = before[part]
        new = now[part]
        for key in old | new:
            if old.get(key) != new.get(key):
                change = f"{shorten(old.get(key))} -> {shorten(new.get(key))}"
                lines.append(f"{part}: {key} {change}")
    return lines


def shorten(value: object) -> str:
    """A value in a line, or the first letters of a checksum."""
    text = ", ".join(value) if isinstance(value, list) else str(value)
    is_checksum = len(text) in (40, 64) and " " not in text
    return text[:10] if is_checksum else text


def check_record(before: Record, now: Record) -> None:
    """Compare a run that goes on with the one before; CheckpointError if the data changed."""
    if before["data"]["values"] != now["data"]["values"]:
        reason = "its run was trained on other values, times or another grid"
        remedy = "give the data of that run, or no --resume"
        raise CheckpointError(f"{reason}; {remedy}")
    differences = find_differences(before, now, COMPARED)
    if differences:
        listed = "\n  ".join(differences)
        reason = "differs from the run so far, so the last bits of the weights may, too"
        print_note(f"this start {reason}:\n  {listed}")


class RunRecord(Callback):
    """Puts the run's record in each checkpoint, and compares it over the ranks."""

    state_key = "RunRecord"

    def __init__(self, record: Record):
        self.record = record

    def state_dict(self) -> Record:
        return self.record

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """DataError on all ranks, if a store changed between the times at which they opened it."""
        decisive = {name: self.record["options"].get(name) for name in RESUME_KEYS}
        text = json.dumps([decisive, self.record["data"]])
        digest = int.from_bytes(sha256(text.encode()).digest()[:7])
        own = torch.tensor(digest, device=module.device)
        if (trainer.strategy.all_gather(own) != own).any():
            reason = (
                "ranks found different times or values, so it has changed meanwhile"
            )
            raise DataError(f"{reason}; start the run again")


def repeatable(record: Record) -> dict:
    """The options that repeat a run: those of train.py --config."""
    options = {}
    for name, value in record["options"].items():
        if name not in NOT_REPEATED and value is not None:
            options[name] = value
    default = str(Path(options["output_dir"], "checkpoints"))
    if options["checkpoint_dir"] == default:
        del options["checkpoint_dir"]  # another output folder has its own
    if options.get("shuffle_slots") == 4 * options["batch_size"]:
        del options["shuffle_slots"]  # so that another batch has its own
    return options


def command_of(record: Record) -> str:
    """The command line that repeats a run, without what is a default."""
    defaults = vars(Options()) | STORE_DEFAULTS
    declared = {field.name: field for field in fields(Options)}
    words = ["uv", "run", "python", "train.py"]
    for name, value in repeatable(record).items():
        if value == defaults[name]:
            continue
        words += make_flags(declared[name], value)
    return shlex.join(words)


def write_record(record: Record, folder: Path) -> None:
    """Write the record, and the options by which train.py repeats the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "record.json", record)
    write_json(folder / "options.json", repeatable(record))


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_record(path: Path) -> Record:
    """The record in a file of its own or in a checkpoint; exits with code 2 without one."""
    remedy = "give record.json, or a checkpoint of train.py"
    if path.is_dir():
        path = path / "record.json"
    try:
        if path.suffix == ".json":
            record = json.loads(path.read_text())
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            record = saved["callbacks"][RunRecord.state_key]
        return {part: dict(record[part]) for part in ("options", *COMPARED)}
    except OSError as error:
        refuse(f"{path}: {error.strerror}; {remedy}")
    except Exception as error:  # torch raises many kinds, depending on the bytes
        refuse(f"{path}: holds no record ({type(error).__name__}); {remedy}")


def print_record(record: Record) -> None:
    """Print what a record holds, an entry a line."""
    for part, entries in record.items():
        print(part)
        for key, value in entries.items():
            if value is not None:
                print(f"  {key}: {shorten(value)}")


def main(argv: list[str] | None = None) -> list[str]:
    """Print a record and return how it differs from another, or from here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("record", type=Path, help="a run's folder, its record.json, or a checkpoint")
    add("other", type=Path, nargs="?", help="to compare with; if not given, here")
    add("--save-options", type=Path, metavar="FILE", help="for train.py --config")
    args = parser.parse_args(argv)
    record = read_record(args.record)
    if args.other:
        other = read_record(args.other)
        differences = find_differences(record, other, ("options", *COMPARED))
    else:
        print_record(record)
        print(command_of(record))
        here = describe_here()
        differences = find_differences(record, here, tuple(here))
    if args.save_options:
        check_folder("--save-options", str(args.save_options.parent))
        args.save_options.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.save_options, repeatable(record))
    print("differences: " + ("none" if not differences else ""))
    for line in differences:
        print(f"  {line}")
    return differences


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # end without a word when piped into head
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
