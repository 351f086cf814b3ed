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


def _draw_nothing(wanted: bool) -> None:
    """Save each picture empty: no fault, but quicker, because to draw one takes a second."""
    if wanted:
        from matplotlib.figure import Figure

        save = Figure.savefig
        Figure.savefig = lambda self, *given, **named: save(Figure(), *given, **named)


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


def _slow_forward(seconds: float) -> None:
    """Sleep in each forward pass of chapter 6's training, as on a machine that computes slowly."""
    import model

    compute = model.FillGaps.training_step

    def sleep_and_compute(self, *given):
        time.sleep(seconds)
        return compute(self, *given)

    model.FillGaps.training_step = sleep_and_compute


def _slow_loader(seconds: float) -> None:
    """Sleep before each batch that a loader without workers makes in this process."""
    from torch.utils.data import dataloader

    make = dataloader._SingleProcessDataLoaderIter._next_data

    def sleep_and_make(self):
        time.sleep(seconds)
        return make(self)

    dataloader._SingleProcessDataLoaderIter._next_data = sleep_and_make


def _in_backward(action, number: int) -> None:
    """Call `action()` in the middle of the backward pass before optimizer step `number`, counted from 0."""
    from torch.nn.modules.module import register_module_full_backward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken, calls = [], []
    register_optimizer_step_post_hook(lambda *_: taken.append(1))

    def count(module, gradient) -> None:
        if len(taken) == number:
            calls.append(module)
            if len(calls) == 5:  # modules into it
                action()

    register_module_full_backward_pre_hook(count)


def _in_write(action, number: int) -> None:
    """Call `action()` when half of checkpoint `number`, counted from 0, is in its file."""
    import io

    import torch

    save, calls = torch.save, []

    def save_in_halves(state: dict, file) -> None:
        whole = io.BytesIO()
        save(state, whole)
        content = whole.getvalue()
        half = len(content) // 2
        file.write(content[:half])
        file.flush()
        if len(calls) == number:
            action()
        calls.append(half)
        file.write(content[half:])

    torch.save = save_in_halves


def _kill_with_checkpoints(place: tuple[int, Path, int]) -> None:
    """Kill this process at its first step from a number on at which a folder has so many checkpoints."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    number, folder, count = place
    taken: list[int] = []

    def kill_if_there(*_) -> None:
        if len(taken) >= number and len(list(folder.glob("step_*.ckpt"))) >= count:
            _kill_self()
        taken.append(1)

    register_optimizer_step_pre_hook(kill_if_there)


def _wait_for_writes(wanted: bool) -> None:
    """Let chapter 6 write each checkpoint before it goes on: then none is left out, however slow the disk."""
    from survival import checkpoints

    save = checkpoints.BackgroundWriter.save_checkpoint

    def save_and_wait(self, *given, **named) -> None:
        save(self, *given, **named)
        self.finish()

    checkpoints.BackgroundWriter.save_checkpoint = save_and_wait


def _wait_for_file(place: tuple[int, Path]) -> None:
    """Wait at this step until there is such a file: (step, path)."""
    number, path = place

    def wait() -> None:
        while not path.exists():
            time.sleep(0.01)

    _at_optimizer_step(wait, number)


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt_self() -> None:
    """As Ctrl-C in a terminal does. Where the suite runs in the background, the shell has let it ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def _poison_read(number: int) -> None:
    """Let chapter 6 find 1e25 m/s in what it cuts from the block that is read under this number."""
    import wind_blocks

    cut = wind_blocks.WindBlocks.read_block

    def read_block(self, read):
        samples = cut(self, read)
        if read.number == number:
            for sample in samples:
                sample.values[:] = 1e25
        return samples

    wind_blocks.WindBlocks.read_block = read_block


def _spoil_gradient(number: int) -> None:
    """Make one gradient of this step infinite, and leave its loss as it is."""
    from torch.nn.modules.module import register_module_full_backward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken = []
    register_optimizer_step_post_hook(lambda *_: taken.append(1))

    def spoil(module, gradient_in, gradient_out):
        if len(taken) == number and gradient_in[0] is not None:
            return tuple(None if one is None else one * float("inf") for one in gradient_in)

    register_module_full_backward_hook(spoil)


def _terminate_when_data_are_set_up(rank: int) -> None:
    """Send this process a SIGTERM after Lightning has set its handlers, and before the first step."""
    import datamodule

    make = datamodule.WindDataModule.train_dataloader

    def terminate_and_make(self):
        _terminate_self()
        return make(self)

    datamodule.WindDataModule.train_dataloader = terminate_and_make


def _limit_files(size: int) -> None:
    """Let no file grow beyond so many bytes, as on a disk that is full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _other_version(package: str) -> None:
    """Let this process find a version of a package that is not there, such as "zarr 0.0"."""
    import tempfile

    name, version = package.split()
    folder = Path(tempfile.mkdtemp(), f"{name}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    sys.path.insert(0, str(folder.parent))


def _short_preflight(wanted: bool) -> None:
    """Let preflight take fewer steps on one batch, and make up the time that a batch takes."""
    from preflight import training

    if wanted:
        training.OVERFIT_STEPS = 40
        training.measure_pace = lambda *_: training.Pace(9, 0.001, 0.1)


def _between_map_and_flags(action, number: int) -> None:
    """Call `action()` when map `number`, counted from 0, is written and does not count as done yet."""
    import xarray as xr

    write, calls = xr.Dataset.to_zarr, []

    def write_and_count(self, *given, **named):
        if list(self.data_vars) == ["filled"]:
            if len(calls) == number:
                action()
            calls.append(1)
        return write(self, *given, **named)

    xr.Dataset.to_zarr = write_and_count


def _use_double_precision(wanted: bool) -> None:
    """Let networks compute, and scripts log, in float64, in which rounding hides nothing."""
    import torch

    if wanted:
        torch.set_default_dtype(torch.float64)
        convolve = torch.nn.Conv2d.forward
        torch.nn.Conv2d.forward = lambda self, given: convolve(self, given.double())


FAULTS = {
    "draw_nothing": _draw_nothing,
    "double_precision": _use_double_precision,
    "kill_with_checkpoints": _kill_with_checkpoints,
    "kill_between_map_and_flags": partial(_between_map_and_flags, _kill_self),
    "terminate_between_map_and_flags": partial(_between_map_and_flags, _terminate_self),
    "limit_files": _limit_files,
    "other_version": _other_version,
    "short_preflight": _short_preflight,
    "spoil_gradient": _spoil_gradient,
    "terminate_at_start": _terminate_when_data_are_set_up,
    "poison_read": _poison_read,
    "interrupt_at_step": partial(_at_optimizer_step, _interrupt_self),
    "terminate_at_step": partial(_at_optimizer_step, _terminate_self),
    "terminate_in_backward": partial(_in_backward, _terminate_self),
    "terminate_in_write": partial(_in_write, _terminate_self),
    "wait_for_writes": _wait_for_writes,
    "wait_for_file": _wait_for_file,
    "kill_at_step": partial(_at_optimizer_step, _kill_self),
    "stall_at_step": partial(_at_optimizer_step, _stall),
    "slow_forward": _slow_forward,
    "slow_loader": _slow_loader,
    "slow_steps": _slow_down,
}


# Programs that take the options of train.py.
TAKE_OPTIONS = "train.py train_by_hand.py train_ddp_by_hand.py profiler.py preflight/__main__.py tune.py studies/search_check.py studies/moving_average.py".split()


def run(script: str | Path, argv: list[str], **faults: float) -> None:
    """Run a script as `python SCRIPT ARGV` would in its folder, in this process, with these of FAULTS planted."""
    folder = Path(script).parent
    if (folder / "__init__.py").exists():  # `python -m PACKAGE` in the folder above
        folder = folder.parent
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    source = Path(script).read_text()
    # Judge a run by so many patches instead of 96: no fault, but quicker.
    if number := faults.pop("judge_by", None):
        if Path(script).relative_to(folder).as_posix() in TAKE_OPTIONS:
            argv = ["--eval-samples", str(number), *argv]
    sys.argv = [str(script), *argv]
    for name, value in faults.items():
        FAULTS[name](value)
    # As `__mp_main__`, too, under which loader workers import the script: what they raise is then found here.
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules |= {"__main__": main, "__mp_main__": main}
    exec(compile(source, script, "exec"), vars(main))
