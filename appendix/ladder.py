"""Appendix: how fast each chapter's train.py does one task, and what that costs.

    uv run python ladder.py                  # 25 minutes on two cores, and a store of 1 GB
    uv run python ladder.py --save-results   # and write results/ladder.json
    uv run python ladder.py --quick          # tiny: that it works, not what it finds
    uv run --with codecarbon python ladder.py   # where something counts joules

You should see the share of time spent waiting for data fall between chapters 3 and 4. Each
chapter's train.py is run as a program. Chapters 1 and 2 train on their own file. Chapters 3 to
6 train on one store, whose chunks are whole maps of 0.25 degrees as in the public ERA5 stores,
behind an S3 server that answers after 30 ms and runs on the same cores.

Rate and cost are differences between a long and a short run: start-up cancels. Where
processor (RAPL) or GPU (NVML) count their joules, CodeCarbon reads them, for the whole machine.
CPU seconds are those of the program and of what it starts, without the server's.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import sleep

import psutil
import torch

from saving import save_rows

BOOK = Path(__file__).resolve().parent.parent
CLOUD = BOOK / "03_cloud_data"
STORE = "era5_layout.zarr"
LATENCY_MS = 30  # of a bucket in the same region
LOOK_EVERY = 0.2  # seconds
JOULES_PER_KWH = 3.6e6
COSTS = ("cpu_seconds", "processor_joules", "gpu_joules")


@dataclass
class Size:
    """How large the store and the runs are."""

    store: str
    days: int
    resolution: float
    chunk: tuple[int, int, int]
    patch: int
    batch: int
    short: int  # steps
    long: int


FULL = Size(STORE, 132, 0.25, (1, 721, 1440), 64, 8, short=10, long=160)
QUICK = Size("quick_ladder.zarr", 132, 10, (1, 19, 36), 16, 2, short=2, long=4)


@dataclass
class Rung:
    """A chapter's train.py and the flags that its chapter recommends."""

    chapter: str
    flags: list[str]
    on_store: bool


def choose_rungs(on_gpu: bool) -> list[Rung]:
    """The rungs: beside a GPU a process reads ahead; chapter 2 takes all GPUs, or two cores."""
    every = [] if on_gpu else ["--devices", "2"]
    one = ["--devices", "1", "--num-workers", "1"] if on_gpu else []
    lower = [
        *one,
        "--precision",
        "bf16-mixed",
    ]  # float32 where the hardware has no bfloat16
    return [
        Rung("01_setup", [], on_store=False),
        Rung("02_multi_gpu", every, on_store=False),
        Rung("03_cloud_data", one, on_store=True),
        Rung("04_data_pipeline", one, on_store=True),
        Rung("05_model_profiling", lower, on_store=True),
        Rung("06_whats_next", lower, on_store=True),
    ]


class Meter:
    """CPU seconds of programs that were run, and joules where something counts them."""

    def __init__(self):
        self.tracker = None
        self.counters = find_counters()
        if self.counters and not find_spec("codecarbon"):
            names = " and ".join(self.counters)
            print(
                f"note: {names} count joules; uv run --with codecarbon python ladder.py reads them"
            )
        elif self.counters:
            from codecarbon import OfflineEmissionsTracker  # no dependency of the book

            logging.getLogger("codecarbon").disabled = True
            self.tracker = OfflineEmissionsTracker(
                country_iso_code="DEU",  # for the carbon only, which is not used
                save_to_file=False,
                allow_multiple_runs=True,
            )

    def run(self, command: list[str]) -> dict[str, float]:
        """Run a program to its end; what it took. Raises CalledProcessError if it fails."""
        if self.tracker:
            self.tracker.start_task()
        cost = {"cpu_seconds": run_and_count(command)}
        if self.tracker:
            found = self.tracker.stop_task()
            joules = {"processor": found.cpu_energy, "gpu": found.gpu_energy}
            for counter in self.counters:
                cost[f"{counter}_joules"] = JOULES_PER_KWH * joules[counter]
        return cost


def run_and_count(command: list[str]) -> float:
    """Run a program to its end: its CPU seconds, and those of all that it has started.

    They are looked at while it runs, because nobody waits for some, such as ranks and
    workers, and the system then forgets what they took.
    """
    seconds: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as printed:
        process = psutil.Popen(command, stdout=printed, stderr=printed)
        try:
            while process.poll() is None:
                for each in list_with_children(process):
                    with suppress(psutil.Error):  # it has just ended
                        times = each.cpu_times()
                        seconds[each.pid] = times.user + times.system
                sleep(LOOK_EVERY)
        finally:
            if process.poll() is None:  # this process is stopped meanwhile
                process.kill()
        if process.returncode:
            printed.seek(0)
            raise subprocess.CalledProcessError(
                process.returncode, command, printed.read()
            )
    return sum(seconds.values())


def list_with_children(process: psutil.Process) -> list[psutil.Process]:
    """A program and all that it has started; nothing if it has ended."""
    with suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def find_counters() -> list[str]:
    """What counts its joules here: processor (RAPL), GPU (NVML)."""
    counters = []
    files = Path("/sys/class/powercap").glob("*/energy_uj")
    if any(os.access(file, os.R_OK) for file in files):
        counters.append("processor")
    if torch.cuda.is_available():
        counters.append("gpu")
    return counters


def make_store(size: Size) -> None:
    """Make the store, unless it is whole."""
    path = f"outputs/buckets/winds/{size.store}"
    print(f"making {CLOUD / path}, unless it is there", flush=True)
    make = [sys.executable, "make_store.py", "--store", path]
    make += ["--days", str(size.days), "--resolution", str(size.resolution)]
    make += ["--chunk", *map(str, size.chunk), "--patch-size", str(size.patch)]
    subprocess.run(make, cwd=CLOUD, check=True, capture_output=True, text=True)


@contextmanager
def serve_store(size: Size) -> Iterator[list[str]]:
    """Serve the store while the block runs; the flags that name it."""
    # The server ends with its stdin, and so also if this process is killed.
    serve = [sys.executable, "local_s3.py", "--latency-ms", str(LATENCY_MS)]
    server = subprocess.Popen(
        [*serve, "--until-stdin-ends"],
        cwd=CLOUD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            raise subprocess.CalledProcessError(
                server.wait(), serve, "it did not start"
            )
        yield [
            "--store",
            f"s3://winds/{size.store}",
            "--endpoint",
            endpoint,
            "--anonymous",
        ]


def run_rung(
    rung: Rung, size: Size, steps: int, store: list[str], meter: Meter
) -> dict:
    """Train for some steps: the run's summary and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(BOOK / rung.chapter / "train.py"), *rung.flags]
        command += ["--max-steps", str(steps), "--output-dir", folder]
        command += ["--batch-size", str(size.batch), "--patch-size", str(size.patch)]
        command += ["--validate-every", str(size.long + 1)]  # training alone
        if rung.on_store:
            command += store
        cost = meter.run(command)
        (summary,) = Path(folder).rglob("summary.json")
        return json.loads(summary.read_text()) | cost


def measure_rung(
    rung: Rung, size: Size, store: list[str], meter: Meter
) -> dict[str, float]:
    """Rate, wait and cost of a rung: the costs are those of a thousand samples."""
    short = run_rung(rung, size, size.short, store, meter)
    long = run_rung(rung, size, size.long, store, meter)
    metrics = {name: long[name] for name in ("samples_per_second", "data_wait_share")}
    if size == QUICK:
        return metrics  # too few steps to tell their cost from start-up's
    samples = size.batch * (size.long - size.short)
    # By the clock on the wall: chapters 1 to 4 leave what callbacks take out of their own rate.
    metrics["samples_per_second"] = samples / (long["seconds"] - short["seconds"])
    thousands = samples / 1000
    for name in COSTS:
        if name in long:
            metrics[name] = (long[name] - short[name]) / thousands
    return metrics


def climb(rungs: list[Rung], size: Size, repeats: int, meter: Meter) -> list[dict]:
    """Measure all rungs, in turn: the rows of the table."""
    found: list[list[dict]] = [[] for _ in rungs]
    make_store(size)
    with serve_store(size) as store:
        print("warming up: one short run of each chapter", flush=True)
        for (
            rung
        ) in rungs:  # chapters 5 and 6 keep the climatology that they compute first
            run_rung(rung, size, size.short, store, meter)
        for repeat in range(repeats):
            for number, rung in enumerate(rungs):
                metrics = measure_rung(rung, size, store, meter)
                found[number].append(metrics)
                done = f"{repeat + 1}/{repeats} {rung.chapter}"
                print(f"{done}: {describe(metrics)}", flush=True)
    rows = []
    for rung, values in zip(rungs, found):
        row = {"chapter": rung.chapter, "flags": " ".join(rung.flags)}
        row["data"] = f"s3://winds/{size.store}" if rung.on_store else "navy_winds.nc"
        for name in values[0]:
            row[name] = spread([each[name] for each in values])
        rows.append(row)
    return rows


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def describe(metrics: dict[str, float]) -> str:
    """A measurement in a line."""
    rate = f"{metrics['samples_per_second']:.1f} samples/s"
    wait = f"{metrics['data_wait_share']:.0%} of the time waiting for data"
    costs = []
    for name in COSTS:
        if name in metrics:
            costs.append(f"{metrics[name]:.0f} {name.replace('_', ' ')}")
    if not costs:
        return f"{rate}, {wait}"
    return f"{rate}, {wait}; for 1,000 samples {', '.join(costs)}"


def save(rows: list[dict], repeats: int, with_library: bool) -> None:
    """Write results/ladder.json, or results/ladder_gpu.json where there is a GPU."""
    gpu = name_gpu()
    library = "--with codecarbon " if with_library else ""
    command = f"{library}python ladder.py --repeats {repeats} --save-results"
    packages = ("torch", "lightning", "xarray", "zarr", "obstore")
    name = "ladder_gpu.json" if gpu else "ladder.json"
    path = Path(__file__).parent / "results" / name
    save_rows(path, [command], rows, packages, gpu)


def name_gpu() -> str | None:
    """Its name, or its kind; None if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = torch.accelerator.current_accelerator(check_available=True)
    return str(found) if found else None


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--repeats",
        type=int,
        default=3,
        help="of each measurement, in turn (default: 3)",
    )
    add("--quick", action="store_true", help="tiny: that it works, not what it finds")
    add("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: give at least 1")
    if args.quick and args.save_results:
        parser.error(
            "--save-results: --quick finds nothing worth keeping; leave one out"
        )
    on_gpu = torch.accelerator.is_available()
    if not on_gpu and os.cpu_count() < 2:
        parser.error(
            "this machine has one core, and chapter 2 needs two: run this on another"
        )
    rungs = choose_rungs(on_gpu)
    for rung in rungs:
        script = BOOK / rung.chapter / "train.py"
        if not script.exists():
            parser.error(f"{script} is missing: run this in a clone of the whole book")
    meter = Meter()
    try:
        rows = climb(rungs, QUICK if args.quick else FULL, args.repeats, meter)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip() or "it said nothing"
        reason = said.splitlines()[-1]
        parser.error(
            f"{' '.join(error.cmd[1:3])} ended with code {error.returncode}: {reason}"
        )
    if args.save_results:
        save(rows, args.repeats, with_library=meter.tracker is not None)
    return rows


if __name__ == "__main__":
    main()
