"""A chapter's train.py in a process of its own, which also says what it took of the GPU."""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from gpu_counters import Counters, joules_between
from gpu_plan import BOOK


@dataclass(frozen=True)
class Switches:
    """What train.py has no flag for."""

    deterministic: bool = False  # kernels that add in the same order each time
    # Convolutions of float32 with 11 bits of mantissa, torch's default.
    tf32: bool = True
    kill_after: int | None = None  # the process kills itself after so many steps


class RunError(Exception):
    """Why a run failed: the last line that it printed."""


def train_apart(
    chapter: str, flags: list[str], folder: Path, switches: Switches = Switches()
) -> dict:
    """Train in a fork of this process; return its summary and its use of the GPU.

    This process must not have used CUDA. It may have imported the heavy packages, which
    saves some seconds a run. RunError if the run fails; {} if it kills itself as asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fork = get_context("fork")
    process = fork.Process(target=train, args=(chapter, flags, folder, switches))
    process.start()
    process.join()
    if switches.kill_after and process.exitcode == -signal.SIGKILL:
        return {}
    if process.exitcode:
        raise RunError(f"exit code {process.exitcode}: {last_line(folder / 'log.txt')}")
    (summary,) = folder.glob("summary.json")
    gpu = json.loads((folder / "gpu.json").read_text())
    return json.loads(summary.read_text()) | gpu


def summarize(chapter: str, flags: list[str], switches: Switches = Switches()) -> dict:
    """Train in a folder that is then removed; return the run's row of a table."""
    with TemporaryDirectory() as folder:
        found = train_apart(chapter, flags, Path(folder), switches)
    row = {"rmse": next(iter(found["rmse"]["U-Net"].values()))}
    names = ("samples_per_second", "data_wait_share", "steps", "peak_memory_gb")
    for name in (*names, "gpu_peak_gb", "gpu_reserved_gb", "gpu_joules_of_run"):
        row[name] = found.get(name)
    return row


def read_module(chapter: str, module: str, flags: list[str]) -> str:
    """What `python -m MODULE` prints in a chapter's folder, run in a fork of this process."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        some = [*flags, "--output-dir", folder]
        fork = get_context("fork")
        process = fork.Process(target=call_module, args=(chapter, module, some, home))
        process.start()
        process.join()
        return (home / "log.txt").read_text()


def call_module(chapter: str, module: str, flags: list[str], folder: Path) -> None:
    """What a process does to run a module as its main program."""
    write_to(folder / "log.txt")
    enter(chapter, module, flags)
    runpy.run_module(module, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


def train(chapter: str, flags: list[str], folder: Path, switches: Switches) -> None:
    """What a training process does: print to a file, and end with train.py's exit code."""
    write_to(folder / "log.txt")
    code = 1
    try:
        call_main(chapter, [*flags, "--output-dir", str(folder)], folder, switches)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # as the chapters do: threads of gloo may outlive their group


def call_main(chapter: str, flags: list[str], folder: Path, switches: Switches) -> None:
    """Call the chapter's main as its command would, and write what it took of the GPU."""
    enter(chapter, "train.py", flags)
    if switches.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.backends.cudnn.allow_tf32 = switches.tf32
    if switches.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    script = importlib.import_module("train")
    if switches.kill_after:
        kill_after(switches.kill_after, folder)
    counters = Counters()
    began = counters.joules()
    script.main(flags)
    took = {}
    if torch.cuda.is_initialized():
        took["gpu_joules_of_run"] = joules_between(began, counters.joules())
        took["gpu_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        took["gpu_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    (folder / "gpu.json").write_text(json.dumps(took))


def write_to(path: Path) -> None:
    """Let all that this process prints from now on go to a file."""
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, closefd=False)


def enter(chapter: str, program: str, flags: list[str]) -> None:
    """Stand where the program's command would: in its folder, whose modules it imports."""
    home = BOOK / chapter
    os.chdir(home)
    sys.path.insert(0, str(home))
    sys.argv = [program, *flags]


def kill_after(step: int, folder: Path) -> None:
    """Let this process be killed after a step, as by SIGKILL from outside.

    On a busy machine it waits for a first whole checkpoint, which a thread writes.
    """
    from clock import StepClock  # the chapter's

    end_of_batch = StepClock.on_train_batch_end

    def end(self, trainer, *others) -> None:
        end_of_batch(self, trainer, *others)
        if trainer.global_step == step:
            wait_for_checkpoint(folder)
            os.kill(os.getpid(), signal.SIGKILL)

    StepClock.on_train_batch_end = end


def wait_for_checkpoint(folder: Path, seconds: float = 60) -> None:
    """Until there is a whole checkpoint, or for some seconds."""
    until = monotonic() + seconds
    while not list(folder.glob("checkpoints/step_*.ckpt")) and monotonic() < until:
        sleep(0.01)


def last_line(path: Path) -> str:
    """The last line of a log that is not blank."""
    lines = path.read_text().strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"
