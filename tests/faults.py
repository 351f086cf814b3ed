"""Run a script of the book with a fault planted in its process: how the tests kill, stall and slow programs."""

import os
import signal
import sys
import time
import types
from functools import partial
from pathlib import Path


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stall() -> None:
    print("stalled", file=sys.stderr, flush=True)
    time.sleep(1e6)


def _at_optimizer_step(action, number: int) -> None:
    """Call `action()` as this process is about to take its optimizer step `number`, counted from 0."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps = iter(range(number + 1))
    register_optimizer_step_pre_hook(lambda *_: action() if next(steps, None) == number else None)


def _slow_down(seconds: float) -> None:
    """Sleep before each optimizer step, so that what comes from outside hits the run in the middle."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: time.sleep(seconds))


def _use_double_precision(wanted: bool) -> None:
    """Let networks compute, and scripts log, in float64, in which rounding hides nothing."""
    import torch

    if wanted:
        torch.set_default_dtype(torch.float64)
        convolve = torch.nn.Conv2d.forward
        torch.nn.Conv2d.forward = lambda self, given: convolve(self, given.double())


FAULTS = {
    "double_precision": _use_double_precision,
    "kill_at_step": partial(_at_optimizer_step, _kill_self),
    "stall_at_step": partial(_at_optimizer_step, _stall),
    "slow_steps": _slow_down,
}


def run(script: str | Path, argv: list[str], **faults: float) -> None:
    """Run a script as `python SCRIPT ARGV` would in its folder, in this process, with these of FAULTS planted."""
    folder = Path(script).parent
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [Path(script).name, *argv]
    for name, value in faults.items():
        FAULTS[name](value)
    # As `__mp_main__`, too, under which loader workers import the script: what they raise is then found here.
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules |= {"__main__": main, "__mp_main__": main}
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
