"""Run the book's scripts as programs, quickly: each in a process of its own, which is a fork of one that
has already imported the heavy packages. A script cannot tell; it only starts in 0.1 s instead of 8."""

import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import book

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = """
    lightning.pytorch torch.distributed torch.utils.data torchmetrics tqdm xarray h5netcdf scipy.interpolate
    matplotlib.figure matplotlib.backends.backend_agg dask.array dask.distributed distributed.dashboard numcodecs
    zarr.storage obstore.store obstore.auth.boto3 s3fs
"""
CONTEXT.set_forkserver_preload(HEAVY.split())
SHORT_RUN = 13.4  # seconds, see in_time()


@dataclass
class Run:
    """How a program ended: its exit code (negative: the signal that killed it) and what it printed."""

    code: int
    out: str
    err: str


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_optimizer_step(number: int) -> None:
    """Kill this process as it is about to take its optimizer step `number`, counted from 0."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    taken = iter(range(number))
    register_optimizer_step_pre_hook(lambda *_: None if next(taken, None) is not None else _kill_self())


def _kill_in_checkpoint(number: int) -> None:
    """Kill this process when checkpoint `number`, counted from 0, is half written."""
    import io

    import torch

    save, begun = torch.save, iter(range(number))

    def half(checkpoint: dict, path: Path) -> None:
        if next(begun, None) is not None:
            return save(checkpoint, path)
        whole = io.BytesIO()
        save(checkpoint, whole)
        Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
        _kill_self()

    torch.save = half


def _signal_at_optimizer_step(name: signal.Signals, number: int) -> None:
    """Send this process a signal as it is about to take its optimizer step `number`, counted from 0."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    taken = iter(range(number + 1))
    send = {number: lambda: os.kill(os.getpid(), name)}
    register_optimizer_step_pre_hook(lambda *_: send.get(next(taken, None), lambda: None)())


def _stall() -> None:
    time.sleep(1e6)


def _stall_at_optimizer_step(number: int) -> None:
    """Let this process sleep for ever as it is about to take its optimizer step `number`, counted from 0."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    taken = iter(range(number))
    register_optimizer_step_pre_hook(lambda *_: None if next(taken, None) is not None else _stall())


def _stall_at_fetch(number: int) -> None:
    """Let this process sleep for ever as it is about to read its batch `number`, counted from 0, by itself."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher

    fetch, taken = Fetcher.fetch, iter(range(number))
    Fetcher.fetch = lambda *args: fetch(*args) if next(taken, None) is not None else _stall()


def _limit_file_size(number: int) -> None:
    """Let no file grow beyond `number` bytes: what a program sees of it is what a full disk shows."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


FAULTS = {
    "kill at step": _kill_at_optimizer_step,
    "terminate at step": partial(_signal_at_optimizer_step, signal.SIGTERM),
    "interrupt at step": partial(_signal_at_optimizer_step, signal.SIGINT),
    "stall at step": _stall_at_optimizer_step,
    "stall at fetch": _stall_at_fetch,
    "kill in checkpoint": _kill_in_checkpoint,
    "file size": _limit_file_size,
}


def forget_buckets() -> None:
    """Let this process know no bucket, credentials or profile but those that a test will give."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= dict.fromkeys(["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"], os.devnull)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"


def _child(script: str, argv: list[str], output: str, faults: dict[str, int], environment: dict) -> None:
    forget_buckets()  # those of the test that started the forkserver
    os.environ |= environment
    if "OMP_NUM_THREADS" in environment:  # torch read it when it was imported, before this process was
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}/{name}", os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not this process's forkserver
    os.chdir(Path(script).parent)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [Path(script).name, *argv]
    taken_out = faults.pop("without", None)
    for name, number in faults.items():
        FAULTS[name](number)
    if taken_out is None:
        runpy.run_path(script, run_name="__main__")
    else:
        source = Path(script).read_text()
        assert source.count(taken_out) == 1
        main = sys.modules["__main__"].__dict__
        main |= {"__name__": "__main__", "__file__": script, "__doc__": "Without a part."}
        exec(compile(source.replace(taken_out, "pass"), script, "exec"), main)


class Program:
    """A script of the book that runs in its folder with these flags; wait() tells how it ended.

    `faults` are the keys of FAULTS, with _ for a blank, such as kill_at_step=3, and `without`: a statement
    of the script that is taken out, to see whether it does what the book says.
    """

    def __init__(self, script: str, *argv: object, environment: dict | None = None, **faults: object):
        flags, named = [str(flag) for flag in argv], {k.replace("_", " "): v for k, v in faults.items()}
        self.name, self.output = f"{script} {' '.join(flags)}", tempfile.TemporaryDirectory()
        arguments = (str(book.ROOT / script), flags, self.output.name, named, environment or {})
        self.process = CONTEXT.Process(target=_child, args=arguments)
        self.process.start()

    def wait(self, timeout: float = 120) -> Run:
        """How it ended, or TimeoutError, with what it printed, if it had to be killed."""
        self.process.join(max(0, timeout))
        if late := self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        out, err = (Path(self.output.name, name).read_text() for name in ("out", "err"))
        self.output.cleanup()
        if late:
            raise TimeoutError(f"{self.name} took more than {timeout:.0f} s; it printed {out}{err}")
        return Run(self.process.exitcode, out, err)


def run(script: str, *argv: object, timeout: float = 120, **options: object) -> Run:
    """Run a script to its end, see Program; TimeoutError if it does not end in time."""
    return Program(script, *argv, **options).wait(timeout)


def wait_for(condition, seconds: float, what: str):
    """The first truthy value of `condition()`; AssertionError if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds} s")


def in_time(seconds: float, limit: float) -> bool:
    """Whether `seconds` is under a limit that the book states for the machine of its figures, two cores of an
    AMD EPYC that do nothing else. A slower machine gets as much more as it needs for a short run of chapter 1."""
    if seconds < limit:
        return True
    began = time.perf_counter()
    command = [sys.executable, "train.py", "--max-steps", "20"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, "--output-dir", folder], cwd=book.ROOT / "01_setup", capture_output=True, check=True
        )
    return seconds < limit * (time.perf_counter() - began) / SHORT_RUN


def free_port() -> int:
    """A TCP port of this machine on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    script: str,
    ranks: int,
    *argv: object,
    timeout: float = 120,
    faults: dict[int, dict] | None = None,
    flags: dict[int, list] | None = None,
    shared: dict[str, str] | None = None,
) -> list[Run | TimeoutError]:
    """Run a script as `torchrun --nproc-per-node RANKS` would; `faults`, and more `flags`, are given by rank,
    `shared` is what the environment of all of them has besides.

    A rank that does not end in time is killed, and has a TimeoutError in the place of its Run.
    """
    port, programs, ended = str(free_port()), [], []
    for rank in range(ranks):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        environment |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        environment = {name: str(value) for name, value in environment.items()} | (shared or {})
        own = (flags or {}).get(rank, [])
        programs.append(Program(script, *argv, *own, environment=environment, **(faults or {}).get(rank, {})))
    deadline = time.monotonic() + timeout
    for program in programs:
        try:
            ended.append(program.wait(deadline - time.monotonic()))
        except TimeoutError as late:
            ended.append(late)
    return ended


def require_success(script: str, *argv: object, **options: float) -> Run:
    """Run a script; AssertionError with what it printed unless it succeeds."""
    done = run(script, *argv, **options)
    assert done.code == 0, done.out + done.err
    return done
