"""Chapter 6: what a signal does to a run on two ranks, with Lightning's own means and here.

    uv run python -m studies.drills                  # about six minutes
    uv run python -m studies.drills --save-results   # and results/drills.json

Lightning's own means are chapter 5's train.py: ModelCheckpoint and Lightning's handlers.
You should see a table: how each run ended, and where the same command took it from there.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from demo_store import CLOUD
from results import save_rows

HERE = Path(__file__).parent
CHAPTER = HERE.parent
STORE = CLOUD / "outputs/buckets/winds/small.zarr"
SCRIPTS = {
    "Lightning": CHAPTER.parent / "05_model_profiling/train.py",
    "this chapter": CHAPTER / "train.py",
}
TIME_LIMIT = 20  # --process-group-timeout
PATIENCE = 90  # seconds after which a run that has not ended is killed
STEPS = 24
FLAGS = f"--max-steps {STEPS} --batch-size 4 --patch-size 32 --checkpoint-every 8"
FLAGS += f" --accelerator cpu --process-group-timeout {TIME_LIMIT} --resume auto"


@dataclass(frozen=True)
class Case:
    """When the signal comes, to whom, and what started the ranks."""

    event: str
    by_torchrun: bool = False


CASES = {
    "to rank 1, between two steps": Case("step"),
    "to rank 1, in its backward pass": Case("backward"),
    "to rank 1, while rank 0 saves": Case("save"),
    "to rank 1 of torchrun, in its backward pass": Case("backward", by_torchrun=True),
    "to torchrun": Case("torchrun", by_torchrun=True),
}


def run_ranks(script: Path, case: Case, event: str, folder: Path) -> int | None:
    """Run two ranks; return the command's exit code, or None if it had to be killed."""
    worker = [str(HERE / "drill_worker.py"), str(folder), event, str(script)]
    flags = [*FLAGS.split(), "--store", str(STORE), "--output-dir", str(folder / "run")]
    command = [sys.executable, *worker, *flags, "--devices", "2"]
    if case.by_torchrun:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [sys.executable, *torchrun, *worker, *flags]
    with open(folder / "log", "a") as log:
        process = subprocess.Popen(
            command, cwd=script.parent, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            process.wait()
            return None


def kill_group(pid: int) -> None:
    """Kill a command with all that it has started."""
    subprocess.run(["kill", "-KILL", "--", f"-{pid}"], check=False)


def newest(folder: Path) -> Path | None:
    """The checkpoint from which the run would go on."""
    found = [*folder.glob("run/last.ckpt"), *folder.glob("run/checkpoints/step_*")]
    return max(found, default=None)


def load_state(folder: Path) -> list[torch.Tensor]:
    """All tensors that training changes, as the newest checkpoint has them."""
    saved = torch.load(newest(folder), weights_only=True)
    tensors = list(saved["state_dict"].values())
    for moments in saved["optimizer_states"][0]["state"].values():
        tensors += moments.values()
    return tensors


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(first, second) for first, second in zip(one, other, strict=True)
    )


def drill(script: Path, case: Case, folder: Path, whole: list[torch.Tensor]) -> dict:
    """Send the signal, see how the run ends, and give the same command again."""
    code = run_ranks(script, case, case.event, folder)
    seconds = time.time() - float((folder / "signalled").read_text())
    steps = max(int(path.read_text()) for path in folder.glob("steps_*"))
    checkpoint = newest(folder)
    step = 0
    if checkpoint is not None:
        step = torch.load(checkpoint, weights_only=True)["global_step"]
    again = run_ranks(script, case, "none", folder)
    same = again == 0 and is_equal(load_state(folder), whole)
    return {
        "exit_code": code,
        "seconds": seconds,
        "steps": steps,
        "checkpoint": step,
        "exit_code_again": again,
        "same_bits": same,
    }


def print_row(row: dict) -> None:
    code = "killed" if row["exit_code"] is None else f"code {row['exit_code']}"
    again = "to the bit" if row["same_bits"] else "NOT to the bit"
    repeated = row["steps"] - row["checkpoint"]
    print(
        f"{row['system']:13} {row['case']:44} {code:8} after {row['seconds']:5.1f} s",
        end="",
    )
    print(f"  {repeated:2} steps again, {again}", flush=True)


def run_all(report: Callable[[dict], None]) -> list[dict]:
    """Every case for both scripts."""
    rows = []
    for system, script in SCRIPTS.items():
        with tempfile.TemporaryDirectory() as place:
            undisturbed = Path(place)
            if run_ranks(script, Case("none"), "none", undisturbed):
                sys.exit((undisturbed / "log").read_text())
            whole = load_state(undisturbed)
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as place:
                row = drill(script, case, Path(place), whole)
            row = {"system": system, "case": name, "time_limit": TIME_LIMIT, **row}
            report(row)
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    subprocess.run([sys.executable, CLOUD / "make_store.py"], check=True)
    rows = run_all(print_row)
    if args.save_results:
        save_rows("drills", "uv run python -m studies.drills --save-results", rows)
    return {"drills": len(rows)}


if __name__ == "__main__":
    main()
