"""Studies on a command line, and their results with the machine and its versions."""

import argparse
import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import torch

from checks import check_folder
from errors import refuse

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "lightning", "scipy", "xarray", "zarr", "obstore")


def parse_studies(
    summary: str, studies: list[str], repeats: int, argv: list[str] | None
) -> argparse.Namespace:
    """Which studies to run, and how; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=summary)
    add = parser.add_argument
    names = ", ".join(studies)
    add("studies", nargs="*", metavar="STUDY", help=f"of {names}; if not given, all")
    add("--quick", action="store_true", help="tiny: that it works, not what it finds")
    add("--repeats", type=int, default=repeats, help="of each measurement, in turn")
    add("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    for study in args.studies:
        if study not in studies:
            refuse(f"{study}: no such study; choose from {names}")
    if args.repeats < 1:
        refuse(f"--repeats {args.repeats}: give at least 1")
    if args.quick and args.save_results:
        refuse("--save-results: --quick finds nothing worth keeping; leave one out")
    if args.save_results:
        check_folder("--save-results", str(RESULTS))
    args.studies = args.studies or studies
    return args


def save_rows(name: str, command: str, rows: list[dict]) -> None:
    """Write results/NAME.json."""
    results = {
        "command": command,
        "date": str(date.today()),
        "machine": describe_machine(),
        "versions": list_versions(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results) + "\n")
    part.replace(path)  # whole, or as it was


def list_versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what is computed."""
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in PACKAGES}
    return versions


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
