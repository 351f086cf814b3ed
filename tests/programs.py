"""Run the book's scripts as programs, quickly: each in a process of its own, which is a fork of one that
has already imported the heavy packages. A script cannot tell; it only starts in 0.1 s instead of 8."""

import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import faults
import psutil

ROOT = Path(__file__).resolve().parent.parent  # not book.ROOT: each fork imports this file, and book is slow
LIMIT = 300  # seconds: a guard against hangs, tenfold above the usual time on a busy machine

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = (
    "lightning.pytorch torch.distributed torch.utils.data torchmetrics tqdm xarray h5netcdf scipy.interpolate"
    " zarr obstore.store obstore.auth.boto3 dask.array dask.distributed torch.utils.tensorboard nbclient"
)
CONTEXT.set_forkserver_preload([*HEAVY.split(), "matplotlib.figure", "matplotlib.backends.backend_agg"])


QUICK = {"judge_by": 24, "draw_nothing": True}  # no faults
PLANTED: dict[str, float] = {}  # in each program, besides its own


@contextmanager
def planted_in_all(**faults: float):
    """Plant these faults in each program that starts within the block."""
    before = dict(PLANTED)
    PLANTED.update(faults)
    try:
        yield
    finally:
        PLANTED.clear()
        PLANTED.update(before)


@dataclass
class Run:
    """How a program ended: its exit code (negative: the signal that killed it) and what it printed."""

    code: int
    out: str
    err: str


def leave_book() -> None:
    """Forget the book's folders, of which pytest has some: a script finds its own folder's modules, and no other."""
    sys.path[:] = [name for name in sys.path if Path(name).parent != ROOT or Path(name).name == "tests"]


def _child(script: str, argv: list[str], output: str, planted: dict, environment: dict) -> None:
    os.environ |= environment
    leave_book()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}/{name}", os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not this process's forkserver
    if "--num-workers" in argv:
        _start_forkserver()
    faults.run(script, argv, **planted)


def _start_forkserver() -> None:
    """Start the server that workers are forked from: a fork, too, while there are no threads."""

    def fork(path: str, arguments: list[str], kept: list[int]) -> int:
        if pid := os.fork():
            return pid
        first = 3  # behind stderr
        for number in [*sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
            os.closerange(first, number)
            first = number + 1
        try:
            exec(arguments[-1])  # main(listener, pipe, ...)
        except SystemExit:
            os._exit(0)  # no program is left that has workers
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    resource_tracker.ensure_running()
    CONTEXT.set_forkserver_preload([])
    spawn = util.spawnv_passfds
    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


class Program:
    """A script of the book that runs in its folder with these flags; wait() tells how it ended.

    `planted` are faults of faults.py, such as kill_at_step=3.
    """

    def __init__(self, script: str | Path, *argv: object, environment: dict | None = None, **planted: float):
        flags = [str(flag) for flag in argv]
        self.name, self.output = f"{script} {' '.join(flags)}", tempfile.TemporaryDirectory()
        arguments = (str(ROOT / script), flags, self.output.name, PLANTED | planted, environment or {})
        self.process = CONTEXT.Process(target=_child, args=arguments)
        self.process.start()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.process.exitcode

    def errors(self) -> str:
        """What it has written to stderr so far."""
        path = Path(self.output.name, "err")
        return path.read_text() if path.exists() else ""

    def wait(self, timeout: float = LIMIT) -> Run:
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


def run(script: str | Path, *argv: object, timeout: float = LIMIT, **options: object) -> Run:
    """Run a script to its end, see Program; TimeoutError if it does not end in time."""
    return Program(script, *argv, **options).wait(timeout)


def require_success(script: str | Path, *argv: object, **options: object) -> Run:
    """Run a script; AssertionError with what it printed unless it succeeds."""
    done = run(script, *argv, **options)
    assert done.code == 0, done.out + done.err
    return done


@contextmanager
def started_ranks(
    script: str | Path,
    ranks: int,
    *argv: object,
    planted: dict[int, dict] | None = None,
    environment: dict | None = None,
    **faults: float,
):
    """The programs that `torchrun --nproc-per-node RANKS` would start, while they run.

    `planted` are faults by rank, `faults` those of all.
    """
    with meeting_point() as everywhere:
        everywhere |= (environment or {}) | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        everywhere["TORCHELASTIC_RUN_ID"] = "test"
        everywhere |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        places = [everywhere | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        each = [faults | (planted or {}).get(rank, {}) for rank in range(ranks)]
        yield [Program(script, *argv, environment=place, **fault) for place, fault in zip(places, each)]


def run_ranks(script: str | Path, ranks: int, *argv: object, **options: object) -> list[Run | TimeoutError]:
    """Run a script on several ranks, see started_ranks; one killed for its time has a TimeoutError there."""
    ended = []
    with started_ranks(script, ranks, *argv, **options) as programs:
        for program in programs:
            try:
                ended.append(program.wait())
            except TimeoutError as late:
                ended.append(late)
    return ended


@contextmanager
def meeting_point():
    """The environment in which ranks meet at a store of this process, as torchrun's agent would host it.

    The system chooses its port, and it is held from then on: nobody can take it.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def printed(done: list[Run | TimeoutError]) -> str:
    """How several programs ended and what they printed, whole; pytest would shorten a list."""
    return "\n".join(
        str(one) if isinstance(one, TimeoutError) else f"{one.code}: {one.out}{one.err}" for one in done
    )


def running() -> list[psutil.Process]:
    """What this process and its children have started and has not ended, but for multiprocessing's servants."""
    ours = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in ours]


def wait_for(condition, job: subprocess.Popen | Program, what: str) -> None:
    """Wait until `condition()` holds; AssertionError if the job has ended before, TimeoutError after LIMIT."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert job.poll() is None, f"ended with {job.returncode} before {what}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT} s")
        time.sleep(0.1)


def free_port() -> int:
    """A TCP port of this machine on which nobody listens, yet; only where run_ranks() will not do."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
