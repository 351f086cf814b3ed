"""Nothing outside the suite decides how it ends: settings for every test, made before any imports torch."""

import os
import socket
import sys
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest

# What a launcher or a scheduler has set would be taken for a place among other ranks.
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "OMPI_", "PMI_", "LSB_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
for name in [name for name in os.environ if name.startswith(LAUNCHERS) or name in RANKS]:
    del os.environ[name]

# One thread a process: two workers on two cores, and sums that are added in the same order everywhere.
os.environ |= {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]  # else gloo asks for the address of the host's name


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs unless they are what is tested, and become the parent of orphans (Linux)."""
    if config.getoption("markexpr") != "gpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """End what a test has left running, such as the workers of a rank that was killed, or all after a time-out."""
    yield
    ours = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in ours]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
