"""What a GPU's driver reports: joules, watts, its version. From NVML, by ctypes.

A counter that is not there is None, never 0. NVML needs no CUDA context, so that a process
that reads it takes no memory of the GPU.
"""

import ctypes
import subprocess

SUCCESS = 0
MILLI = 1e-3


class Counters:
    """The counters of one GPU, by its index among those that NVML sees."""

    def __init__(self, index: int = 0):
        self.library = None
        self.handle = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:  # no driver
            return
        if library.nvmlInit_v2() != SUCCESS:
            return
        find = library.nvmlDeviceGetHandleByIndex_v2
        if find(ctypes.c_uint(index), ctypes.byref(self.handle)) == SUCCESS:
            self.library = library

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        counted = self.ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return None if counted is None else MILLI * counted

    def watts(self) -> float | None:
        """Now, by the driver's own average."""
        counted = self.ask("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return None if counted is None else MILLI * counted

    def ask(self, name: str, answer: ctypes._SimpleCData) -> int | None:
        """A number of the GPU; None if its driver has no such counter."""
        if self.library is None:
            return None
        function = getattr(self.library, name)
        code = function(self.handle, ctypes.byref(answer))
        return answer.value if code == SUCCESS else None


def joules_between(began: float | None, ended: float | None) -> float | None:
    """None if either is not known."""
    if began is None or ended is None:
        return None
    return ended - began


def describe_driver() -> dict[str, str]:
    """Driver, clocks and limits, as nvidia-smi names them; {} without it."""
    names = "driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    first_gpu = done.stdout.splitlines()[0]
    values = [value.strip() for value in first_gpu.split(",")]
    return dict(zip(names.split(","), values))
