"""Chapter 5: what taking the script apart costs and buys: chapter 4's loader and this one.

    uv run python benchmark.py                    # a store of 1.5 GB, made once, 12 minutes
    uv run python benchmark.py loaders            # one study: loaders, or command
    uv run python benchmark.py loaders --quick    # tiny: that it works, not what it finds
    uv run python benchmark.py --save-results     # and write results/*.json and *.png

You should see about equal rates and equal requests, and no regular slow steps any more,
because slots no longer take new blocks all in the same step.

Both loaders run in this process, in turn, from chapter 3's server on the same cores, with
the first byte after 30 ms. The folders of chapters 3 and 4 must lie beside this one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import ModuleType

import numpy as np
import psutil
import torch
from block_order import BlockOrder
from matplotlib.figure import Figure
from tqdm import tqdm

from demo_store import CLOUD
from location import Location
from model import UNet, masked_sums
from options import parse_options
from results import RESULTS, parse_studies, save_rows, spread
from task import make_data, make_datamodule

HERE = Path(__file__).parent
BUCKETS = CLOUD / "outputs"
LATENCY_MS = 30
PATCHES_PER_BLOCK = 8
BATCHES = [8, 32]
FILLED = 32  # steps, after which each slot has changed its block once
SETTLED = FILLED + 8  # the steps between train already, so that reads are as far ahead
SIZE = {"days": 200, "resolution": 0.25, "patch": 64, "steps": 64, "alone": 4096}
QUICK = {"days": 132, "resolution": 10, "patch": 16, "steps": 3, "alone": 96}
COLOURS = {"chapter 4": "#D55E00", "chapter 5": "#0072B2"}  # Okabe and Ito's


@contextmanager
def serve() -> Iterator[str]:
    """Serve the buckets in chapter 3's outputs/ while the block runs; yields the address."""
    command = [sys.executable, CLOUD / "local_s3.py", "--until-stdin-ends"]
    command += ["--folder", BUCKETS, "--latency-ms", str(LATENCY_MS)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def make_store() -> str:
    """Make the store that chapter 4 measured, whole maps; returns its bucket and key."""
    days, resolution = SIZE["days"], SIZE["resolution"]
    key = f"layouts/{days}_days_{resolution:g}_degrees/whole_maps.zarr"
    rows = round(180 / resolution) + 1
    command = [sys.executable, CLOUD / "make_store.py", "--store", BUCKETS / key]
    command += ["--days", days, "--resolution", resolution]
    command += ["--chunk", 1, rows, 2 * rows - 2]
    if subprocess.run(list(map(str, command))).returncode:
        sys.exit(2)
    return key


def load_chapter_4() -> ModuleType:
    """Chapter 4's train.py, under a name that no module has."""
    path = CLOUD.parent / "04_data_pipeline/train.py"
    spec = importlib.util.spec_from_file_location("chapter_4", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loader:
    """A chapter's loader at one batch size; each iteration begins anew at step 0."""

    def __init__(self, chapter: str, batch_size: int, key: str, endpoint: str):
        flags = ["--store", f"s3://{key}", "--endpoint", endpoint, "--anonymous"]
        numbers = {
            "--batch-size": batch_size,
            "--patch-size": SIZE["patch"],
            "--patches-per-block": PATCHES_PER_BLOCK,
            "--max-steps": 10**6,
        }
        for flag, value in numbers.items():
            flags += [flag, str(value)]
        self.making = 0.0  # seconds spent on making batches, without waiting for reads
        if chapter == "chapter 4":
            script = load_chapter_4()
            options = script.parse_arguments(flags)
            patches = script.make_patches(options)[0]
            patches.make = self.timed(patches.make)
            self.loader = script.make_loader(patches, options)
            self.slots = options.shuffle_blocks
        else:
            options = parse_options("", flags)
            location = Location(options.store, endpoint, anonymous=True)
            options, data = make_data(options, location)
            module = make_datamodule(options, data, first_step=0)
            maker = module.blocks.maker
            maker.make_batch = self.timed(maker.make_batch)
            self.loader = module.train_loader()
            self.slots = module.order.slots
        self.chapter = chapter
        self.batch_size = batch_size

    def timed(self, make: Callable) -> Callable:
        """The same function, whose seconds are added up."""

        def call(*arguments):
            began = perf_counter()
            batch = make(*arguments)
            self.making += perf_counter() - began
            return batch

        return call


def count_requests(endpoint: str) -> int:
    """How many GETs the server has answered so far."""
    with urllib.request.urlopen(f"{endpoint}/_counts") as reply:
        return json.load(reply)["requests"]


def cpu_seconds() -> float:
    """Of this process so far, all its threads."""
    times = psutil.Process().cpu_times()
    return times.user + times.system


def measure(loader: Loader, endpoint: str, step: Callable | None) -> dict:
    """Iterate over some steps after those in which the slots fill, with or without training.

    Seconds of each step: waiting for its batch (of which making it), and all of it. Alone,
    a step lasts milliseconds, so that many more of them are measured.
    """
    steps = SIZE["alone"] // loader.batch_size if step is None else SIZE["steps"]
    batches = iter(loader.loader)
    for number in range(SETTLED):
        batch = next(batches)
        if step is not None and number >= FILLED:
            step(batch)
    waits, makings, totals = [], [], []
    requests = count_requests(endpoint)
    cpu = cpu_seconds()
    for _ in range(steps):
        made_before = loader.making
        began = perf_counter()
        batch = next(batches)
        waits.append(perf_counter() - began)
        makings.append(loader.making - made_before)
        if step is not None:
            step(batch)
        totals.append(perf_counter() - began)
    samples = steps * loader.batch_size
    found = {
        "samples_per_second": samples / sum(totals),
        "cpu_ms_per_sample": 1e3 * (cpu_seconds() - cpu) / samples,
        "requests_per_sample": (count_requests(endpoint) - requests) / samples,
        "waits": waits,
        "makings": makings,
        "steps": totals,
    }
    del batches  # ends its threads
    return found


def make_step() -> Callable[[dict], None]:
    """Chapter 4's step by hand: forward, backward, AdamW, without the second part's fixes."""
    network = UNet(2, padding="replicate")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def step(batch: dict[str, torch.Tensor]) -> None:
        squares, unseen = masked_sums(network(batch["input"]), batch)
        (squares / unseen).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def summarise(runs: list[dict]) -> dict:
    """Median, least and greatest over the repeats; of steps, the percentiles of each repeat."""
    values = {name: [run[name] for run in runs] for name in runs[0]}
    row = {}
    for name in ("samples_per_second", "cpu_ms_per_sample", "requests_per_sample"):
        row[name] = spread(values[name])
    for name in ("waits", "makings", "steps"):
        milliseconds = 1e3 * np.array(values[name])
        row[f"{name}_median_ms"] = spread(np.median(milliseconds, axis=1).tolist())
        p95 = np.percentile(milliseconds, 95, axis=1)
        row[f"{name}_p95_ms"] = spread(p95.tolist())
        row[f"{name}_slowest_ms"] = spread(milliseconds.max(axis=1).tolist())
    row["first_run_step_ms"] = [round(1e3 * value, 1) for value in values["steps"][0]]
    return row


def compare_loaders(repeats: int) -> list[dict]:
    """Both chapters' loaders, alone and beside training, in turn."""
    key = make_store()
    rows = []
    with serve() as endpoint:
        for batch_size in BATCHES:
            loaders = [Loader(name, batch_size, key, endpoint) for name in COLOURS]
            for training in (False, True):
                step = make_step() if training else None
                runs: dict[str, list[dict]] = {name: [] for name in COLOURS}
                for _ in tqdm(range(repeats), f"batch {batch_size}", disable=None):
                    for loader in loaders:
                        runs[loader.chapter].append(measure(loader, endpoint, step))
                for loader in loaders:
                    row = {"loader": loader.chapter, "batch_size": batch_size}
                    row |= {"slots": loader.slots, "training": training}
                    rows.append(row | summarise(runs[loader.chapter]))
    return rows


def run_command(repeats: int) -> list[dict]:
    """The reader's command from beginning to end: seconds, and its summary."""
    steps = ["--max-steps", "4"] if SIZE == QUICK else []
    rows = []
    for _ in tqdm(range(repeats), "command", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, HERE / "train.py", "--output-dir", folder]
            command += steps
            began = perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = perf_counter() - began
            summary = json.loads(Path(folder, "summary.json").read_text())
            rows.append({"wall_seconds": seconds, "summary": summary})
    return rows


def plot_loaders(rows: list[dict]) -> Figure:
    """New blocks of each step by the order, and the seconds of each step beside training."""
    chosen = [
        row for row in rows if row["training"] and row["batch_size"] == BATCHES[-1]
    ]
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for row in chosen:
        name = row["loader"]
        style = {"color": COLOURS[name], "label": name, "linewidth": 1.5}
        numbers = np.arange(SETTLED, SETTLED + len(row["first_run_step_ms"]))
        new = count_new_blocks(row, numbers)
        above.step(numbers, new, where="mid", **style)
        seconds = np.array(row["first_run_step_ms"]) / 1e3
        below.plot(numbers, seconds, marker=".", **style)
    above.set(ylabel="new blocks in the step", ylim=(0, None))
    below.set(ylabel="seconds for the step", xlabel="step", ylim=(0, None))
    above.legend(frameon=False)
    figure.suptitle(f"Batches of {BATCHES[-1]}, training on {os.cpu_count()} cores")
    return figure


def count_new_blocks(row: dict, steps: np.ndarray) -> list[int]:
    """How many blocks each step is the first to use; chapter 4's slots have no phase."""
    order = BlockOrder(200, row["batch_size"], row["slots"], PATCHES_PER_BLOCK, seed=0)
    has_phase = row["loader"] == "chapter 5"
    counts = []
    for step in steps:
        given = step // order.steps_per_round
        slots = step % order.steps_per_round * order.batch_size + np.arange(
            order.batch_size
        )
        if has_phase:
            given = given + slots % PATCHES_PER_BLOCK
        else:
            given = np.full(len(slots), given)
        counts.append(int((given % PATCHES_PER_BLOCK == 0).sum()))
    return counts


def describe_loader(row: dict) -> str:
    """A row in a line."""
    where = "beside training" if row["training"] else "alone"
    rate = row["samples_per_second"]["median"]
    names = ("steps_median_ms", "steps_p95_ms", "steps_slowest_ms")
    middle, high, slowest = (row[name]["median"] for name in names)
    step = f"a step {middle:.0f} ms, 95th percentile {high:.0f}, slowest {slowest:.0f}"
    loader = f"{row['loader']}, batch {row['batch_size']}, {where}"
    return f"{loader}: {rate:.0f} samples/s; {step}"


def describe_command(row: dict) -> str:
    """A row in a line."""
    summary = row["summary"]
    rate = f"{summary['samples_per_second']:.1f} samples/s"
    return f"train.py: {row['wall_seconds']:.0f} s, {rate}; RMSE {summary['rmse']['U-Net']}"


DESCRIBE = {"loaders": describe_loader, "command": describe_command}
# The command first: a program's peak memory counts that of the process that starts it.
STUDIES = {"command": run_command, "loaders": compare_loaders}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(STUDIES), 3, argv)
    if args.quick:
        SIZE.update(QUICK)
    warnings.filterwarnings("ignore", "Failed to open Zarr store with consolidated")
    found = {}
    for study in args.studies:
        found[study] = STUDIES[study](args.repeats)
        for row in found[study]:
            print(DESCRIBE[study](row))
        if args.save_results:
            command = f"uv run python benchmark.py {study} --repeats {args.repeats}"
            save_rows(study, command, found[study])
            if study == "loaders":
                plot_loaders(found[study]).savefig(RESULTS / "loaders.png", dpi=100)
    return found


if __name__ == "__main__":
    main()
