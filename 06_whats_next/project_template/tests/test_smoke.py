"""The command, killed, stopped and given again, ends at the bits of a run that nobody disturbed."""

import subprocess
import sys
from pathlib import Path

import torch
from small_run import make_flags

PROJECT = Path(__file__).parent.parent
FLAGS = "--accelerator cpu --max-steps 4 --validate-every 4 --checkpoint-every 1 --resume auto".split()
KEPT = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")

# Runs train.py, and kills it before its third step, when a checkpoint is there.
KILL = """
import os, runpy, signal, sys, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook

folder, *sys.argv = sys.argv[1:]
steps = iter(range(3))

def kill(*_):
    if next(steps) < 2:
        return
    while not list(Path(folder).glob("checkpoints/step_*.ckpt")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_pre_hook(kill)
runpy.run_path("train.py", run_name="__main__")
"""


def train(folder: Path, flags: list[str], *before: str) -> int:
    """Run train.py, in its own process, to whatever end; its exit code."""
    command = [sys.executable, *before, "train.py", *FLAGS, *flags, "--output-dir", str(folder)]
    return subprocess.run(command, cwd=PROJECT).returncode


def ends(folder: Path) -> dict:
    """All of a run's last checkpoint that training changes."""
    last = max(folder.glob("checkpoints/step_*.ckpt"))
    saved = torch.load(last, weights_only=True)
    return {name: saved[name] for name in KEPT}


def test_killed_and_stopped_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    flags = make_flags(tmp_path)
    whole = tmp_path / "whole"
    assert train(whole, flags) == 0
    disturbed = tmp_path / "disturbed"
    assert train(disturbed, flags, "-c", KILL, str(disturbed)) == -9
    stop = disturbed / "STOP"
    stop.touch()
    assert train(disturbed, flags) == 0
    stop.unlink()
    assert train(disturbed, flags) == 0
    assert len(list(disturbed.glob("resumed_at_*"))) == 2
    assert ends(whole)["global_step"] == 4
    torch.testing.assert_close(ends(disturbed), ends(whole), rtol=0, atol=0)
