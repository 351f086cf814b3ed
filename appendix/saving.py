"""results/*.json of the appendix's measurements: rows, command, machine, versions."""

import json
import os
import platform
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil


def save_rows(
    path: Path,
    command: Iterable[str],
    rows: list[dict],
    packages: Iterable[str],
    gpu: str | None = None,
) -> None:
    """Write the rows, and how they were measured. `command` is what follows `uv run`."""
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in packages}
    memory = psutil.virtual_memory().total
    machine = {"cpu": name_processor(), "cores": os.cpu_count()}
    machine["memory_gb"] = round(memory / 2**30)
    machine["gpu"] = gpu
    results: dict = {"command": " ".join(["uv run", *command])}
    results["date"] = str(date.today())
    results["machine"] = machine
    results["versions"] = versions
    results["rows"] = rows
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results) + "\n")


def name_processor() -> str:
    """The processor's name, from Linux or from Python."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ")[1]
    return platform.processor() or platform.machine()
