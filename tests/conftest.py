"""Nothing outside the suite decides how it ends: settings for every test, made before any imports torch."""

import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

# Their assertions, too, show what they compared.
pytest.register_assert_rewrite("programs", "runs", "chapter_6")
import forked_kernel  # noqa: E402
import programs  # noqa: E402

# What a launcher or a scheduler has set would be taken for a place among other ranks, and torchrun.sh and
# torch have settings of their own.
LAUNCHERS = ("SLURM_", "PET_", "MASTER_", "GROUP_", "OMPI_", "PMI_", "LSB_", "JSM_", "TORCH", "GIT_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TORCHRUN_SH = "HEAD NODE LOCAL_ADDR MIN_NODES MAX_NODES PROCESSES MAX_RESTARTS"
for name in list(os.environ):
    if name.startswith(LAUNCHERS) or name in (*RANKS, *TORCHRUN_SH.split()):
        del os.environ[name]

# One thread a process: two workers on two cores, and sums that are added in the same order everywhere.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]  # else gloo asks for the address of the host's name


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs unless they are what is tested, and become the parent of orphans (Linux)."""
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def pytest_unconfigure() -> None:
    """End multiprocessing's servants, and wait for them: else an init that does not reap keeps them as zombies."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """End what a test has left running, such as the workers of a rank that was killed, or all after a time-out."""
    before = programs.running()  # a module's server
    yield
    left = [process for process in programs.running() if process not in before]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


@pytest.fixture(autouse=True)
def signals_end_the_suite_again():
    """Chapter 6's main takes SIGTERM and SIGUSR1, also where a test calls it in this process."""
    taken = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in taken}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def quick_programs():
    """A module's programs judge themselves by 24 patches instead of 96, and draw nothing."""
    with programs.planted_in_all(**programs.QUICK):
        yield


@pytest.fixture
def forked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks run in kernels that start at once."""
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", forked_kernel.Kernel)


# Of 5 degrees, 37 x 72 cells, in chunks of one time. The training times have every month, two or three times.
SMALL_STORE = "--days 36 --resolution 5 --patch-size 16".split()


@pytest.fixture(scope="session")
def make_small_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call it with a folder, and flags of make_store.py: a small store of the winds is put there.

    Each kind of store is made once for all processes of the suite, and copied.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared /= "small_stores"
    shared.mkdir(exist_ok=True)

    def make(target: Path, flags: str = "") -> Path:
        kind = shared / (re.sub(r"\W+", "_", flags) or "plain")
        with FileLock(shared / "lock"):
            if not kind.exists():
                import runs  # here, because it imports torch

                begun = kind.with_suffix(".begun")
                runs.make_store(shared, *SMALL_STORE, *shlex.split(flags), "--store", begun)
                begun.rename(kind)
        return shutil.copytree(kind, target)

    return make
