"""What was measured, kept with its command, its machine and its versions."""

import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "lightning", "xarray", "zarr", "obstore")


def save_rows(name: str, command: str, rows: list[dict]) -> None:
    """Write results/NAME.json."""
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in PACKAGES}
    results = {
        "command": command,
        "date": str(date.today()),
        "machine": describe_machine(),
        "versions": versions,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results) + "\n")


def describe_machine() -> dict:
    """Processor, cores, memory in GiB, and the GPU if there is one."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(": ")[1]
    memory = round(psutil.virtual_memory().total / 2**30)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": memory, "gpu": gpu}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}
