"""Chapter 3: what a store really does when patches are read: one by one and at once, near and far.

    uv run python read_patterns.py                    # the patterns: stores of 7 GB, made once, and 8 minutes
    uv run python read_patterns.py server timeline start_methods command              # the other studies
    uv run python read_patterns.py --days 24 --resolution 10 --patch-size 16          # a look in a minute
    uv run python read_patterns.py patterns server --save-results                     # and write results/*.json

The same patches, drawn by train.py, are read from several layouts of one dataset, made by make_store.py and
served by local_s3.py: without latency, and with the first byte after 30 ms. All ways are timed in turn, so that a
machine which slows down for a while slows all of them. You should see what a sample costs in requests, bytes
and time, and that waiting for many answers at once takes hardly longer than waiting for one.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import obstore
import psutil
import xarray as xr
import zarr
from fsspec.spec import AbstractBufferedFile
from matplotlib.figure import Figure
from obstore.fsspec import FsspecStore
from torch.utils.data import DataLoader
from tqdm import tqdm

import train

HERE = Path(__file__).parent
OUTPUTS, RESULTS = HERE / "outputs", HERE / "results"
LATENCIES = 0, 30  # milliseconds to the first byte; a bucket in the same region has about 30
LAYOUTS = {  # chunks of so many times, rows and columns (0: all of the map), and times in a shard
    "NetCDF files": None,
    "whole maps": (1, 0, 0, 0),
    "128 x 128": (1, 128, 128, 0),
    "8 times of 64 x 64": (8, 64, 64, 0),
    "64 x 64 in shards": (1, 64, 64, 1),
}
TILES = "128 x 128"
BLOCK = 2**20  # bytes that a reader of NetCDF files asks for at least
BATCH = 32
QUIET = 0.1  # cores that other programs may take from a measurement


class Server(NamedTuple):
    """A server that runs: its address, its milliseconds to the first byte, and its process."""

    address: str
    latency_ms: float
    process: psutil.Process

    def counts(self) -> np.ndarray:
        """Requests, bytes and CPU seconds so far, (3,)."""
        with urllib.request.urlopen(f"{self.address}/_counts") as reply:
            found = json.load(reply)
        return np.array([found["requests"], found["bytes"], sum(self.process.cpu_times()[:2])])


class Way(NamedTuple):
    """A way to read a layout: `read` takes up to `at_once` regions, and returns (regions, variables, H, W)."""

    layout: str
    name: str
    at_once: int
    read: Callable[[list[dict]], np.ndarray]
    log: list  # of the last read's GETs: (key, began, ended, bytes); empty where the client tells none


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


# ----------------------------------------------------------------------------------------------- stores


def store_key(layout: str, args: argparse.Namespace) -> str:
    """Bucket and key of a layout's store. Each folder in outputs/ is served as a bucket."""
    return f"layouts/{args.days}_days_{args.resolution:g}_degrees/{layout.replace(' ', '_')}.zarr"


def make_stores(args: argparse.Namespace) -> None:
    """Make the stores that are missing, all from the same NetCDF files, which the first of them makes."""
    rows = round(180 / args.resolution) + 1
    for layout, shape in LAYOUTS.items():
        if shape:
            times, height, width, shard_times = shape
            flags = ["--days", args.days, "--resolution", args.resolution, "--shard-times", shard_times]
            flags += ["--chunk", times, height or rows, width or 2 * rows - 2]
            flags += ["--store", OUTPUTS / store_key(layout, args)]
            subprocess.run([sys.executable, HERE / "make_store.py", *map(str, flags)], check=True)


@contextmanager
def serve(latency_ms: float) -> Iterator[Server]:
    """Serve the buckets in outputs/ while the block runs."""
    command = [sys.executable, HERE / "local_s3.py", "--folder", OUTPUTS, "--latency-ms", str(latency_ms)]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([*command, "--until-stdin-ends"], **pipes, text=True) as process:
        try:
            yield Server(process.stdout.readline().strip(), latency_ms, psutil.Process(process.pid))
        finally:
            process.kill()


def open_patches(layout: str, server: Server, args: argparse.Namespace, batch: int = BATCH) -> train.Patches:
    """The training patches of train.py, out of a layout's store."""
    flags = ["--store", f"s3://{store_key(layout, args)}", "--endpoint", server.address, "--anonymous"]
    flags += ["--patch-size", str(args.patch_size), "--batch-size", str(batch)]
    return train.make_patches(train.parse_arguments(flags))[0]


def draw_regions(patches: train.Patches, samples: int) -> list[dict]:
    """Where the first samples of a training run lie."""
    indices = (divmod(n, patches.batch_size) for n in range(samples))
    return [patches.region(*patches.sample(*index)[:3]) for index in indices]


# ----------------------------------------------------------------------------------------- ways to read


class BlockFile(AbstractBufferedFile):
    """A file in a bucket as s3fs and its like read it: in blocks, of which the last is kept."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        began = perf_counter()
        found = self.fs.cat_file(self.path, start, end)
        self.kwargs["log"].append((self.path, began, perf_counter(), len(found)))
        return found


class Files:
    """NetCDF files in a bucket, opened once, in the order of their times; from south to north, as in train.py."""

    def __init__(self, files: Iterable, variables: list[str]):
        files = [xr.open_dataset(file, engine="h5netcdf", chunks=None) for file in files]
        self.files = [file.isel(latitude=slice(None, None, -1)) for file in files]
        self.variables, self.ends = variables, np.cumsum([file.sizes["time"] for file in files])

    def load(self, region: dict) -> np.ndarray:
        """The variables in a region, (variables, H, W), in slices: two where it crosses the map's seam."""
        number = np.searchsorted(self.ends, region["time"], side="right")
        file, time = self.files[number], region["time"] - self.ends[number]  # counted from the file's end
        columns = np.arange(file.sizes["longitude"])[region["longitude"]]
        parts = np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)
        places = [region | {"time": time, "longitude": slice(part[0], part[-1] + 1)} for part in parts]
        fields = [[file[name].isel(place).values for name in self.variables] for place in places]
        return np.concatenate(fields, axis=-1)


def ways_of_files(server: Server, args: argparse.Namespace) -> list[Way]:
    """One by one, with threads, and one by one with obstore's own file, which forgets its block at each seek."""
    options = {"skip_signature": True, "region": "us-east-1", "client_options": {"allow_http": True}}
    system, log = FsspecStore("s3", endpoint=server.address, **options), []
    folder = OUTPUTS / f"files/{args.days}_days_{args.resolution:g}_degrees"
    keys = [f"files/{folder.name}/{path.name}" for path in sorted(folder.glob("*.nc"))]
    blocks = [BlockFile(system, key, block_size=BLOCK, cache_type="readahead", log=log) for key in keys]
    kept, forgot = Files(blocks, train.VARIABLES), Files(map(system.open, keys), train.VARIABLES)
    threads = ThreadPoolExecutor(BATCH)

    def read(apply: Callable, files: Files, regions: list[dict]) -> np.ndarray:
        log.clear()
        return np.stack(list(apply(files.load, regions)))

    hows = {"one by one": (1, map, kept), "threads": (BATCH, threads.map, kept)}
    hows["one by one, obstore's file"] = 1, map, forgot
    return [Way("NetCDF files", name, n, partial(read, *how), log) for name, (n, *how) in hows.items()]


def ways_of_zarr(layout: str, store: train.Store) -> list[Way]:
    """One sample after another, as xarray is used in a notebook, and the reads of a batch at once, by train.py."""
    variables, log, fields = store.args.variables, store.bucket.log, store.fields

    def one_by_one(regions: list[dict]) -> np.ndarray:
        log.clear()
        return np.stack([[fields[name].isel(at).load() for name in variables] for at in regions])

    return [Way(layout, "one by one", 1, one_by_one, log), Way(layout, "train.py", BATCH, store.read, log)]


def ways_of_asyncio(layout: str, store: train.Store) -> list[Way]:
    """The reads of a batch at once without threads, in one event loop: by xarray, and by Zarr itself."""
    variables, log, fields, runner = store.args.variables, store.bucket.log, store.fields, asyncio.Runner()
    arrays = {name: zarr.open_array(store.bucket, path=name, mode="r").async_array for name in variables}

    async def by_xarray(regions: list[dict]) -> list[np.ndarray]:
        parts = [fields.variables[name].isel(at) for at in regions for name in variables]
        return [part.values for part in await asyncio.gather(*(part.load_async() for part in parts))]

    async def by_zarr(regions: list[dict]) -> list[np.ndarray]:
        height, places = fields.sizes["latitude"], []
        for at in regions:  # the store has its latitudes from north to south
            rows = slice(height - at["latitude"].stop, height - at["latitude"].start)
            places.append((at["time"], rows, at["longitude"]))
        parts = [arrays[name].oindex.getitem(place) for place in places for name in variables]
        return [part[::-1] for part in await asyncio.gather(*parts)]

    def read(by: Callable, regions: list[dict]) -> np.ndarray:
        log.clear()
        parts = np.stack(runner.run(by(regions)))
        return parts.reshape(len(regions), len(variables), *parts.shape[1:])

    ways = {"xarray's load_async": by_xarray, "Zarr's AsyncArray": by_zarr}
    return [Way(layout, name, BATCH, partial(read, by), log) for name, by in ways.items()]


def way_of_obstore(layout: str, store: train.Store, regions: list[dict]) -> Way:
    """The GETs that the regions need, and nothing else: no chunk is decoded. It returns their sizes."""
    store.read(regions)
    asked, client = list(store.bucket.log), store.bucket._store.store

    async def read() -> np.ndarray:
        at_once = asyncio.Semaphore(train.READS_AT_ONCE)

        async def get(key: str, length: int) -> int:
            async with at_once:
                return len(await obstore.get_range_async(client, key, start=0, length=length))

        return np.array(await asyncio.gather(*(get(key, size) for key, *_, size in asked)))

    return Way(layout, "GETs alone", len(regions), lambda _: asyncio.run(read()), [])


# ---------------------------------------------------------------------------------------------- studies


def measure(way: Way, server: Server, regions: list[dict], args: argparse.Namespace) -> dict:
    """Read the regions, again and again for some seconds; a way that is slow is stopped on the way.

    Returns samples, seconds, the log, the server's requests and bytes, and CPU seconds of this process, the
    server's, and all others'.
    """
    parts = [regions[i : i + way.at_once] for i in range(0, len(regions), way.at_once)]
    way.read(parts[0])  # which connects
    log, samples, before, cpu, began = [], 0, server.counts(), process_time(), perf_counter()
    busy = sum(psutil.cpu_times()[:3])  # of all programs: user, nice and system
    for number, part in enumerate(cycle(parts), 1):
        way.read(part)
        log += way.log
        samples, seconds = samples + len(part), perf_counter() - began
        if seconds > (4 * args.seconds if number % len(parts) else args.seconds):
            break
    found = {"samples": samples, "seconds": seconds, "client": process_time() - cpu, "log": log}
    found |= dict(zip(("requests", "bytes", "server"), (server.counts() - before).tolist()))
    found["others"] = max(0, sum(psutil.cpu_times()[:3]) - busy - found["client"] - found["server"])
    return found


def measure_quietly(*what: object) -> dict:
    """Measure while other programs leave the CPU alone: as soon as they do, or the quietest of ten times."""
    tries = []
    for _ in range(10):
        tries.append(measure(*what))
        if tries[-1]["others"] < QUIET * tries[-1]["seconds"]:
            break
    return min(tries, key=lambda found: found["others"] / found["seconds"])


def compare(cases: list[tuple[Way, Server]], regions: list[dict], args: argparse.Namespace) -> list[dict]:
    """Measure each way, all of them in turn and several times; a row for each."""
    found, rows = [[] for _ in cases], []
    for _ in range(args.repeats):
        for runs, case in zip(found, tqdm(cases, "ways", disable=None)):
            runs.append(measure_quietly(*case, regions, args))
    used = len(train.VARIABLES) * args.patch_size**2 * np.dtype("float32").itemsize
    for (way, server), runs in zip(cases, found):
        whole = {name: sum(run[name] for run in runs) for name in runs[0] if name != "log"}
        samples, seconds = whole["samples"], whole["seconds"]
        row = {"layout": way.layout, "way": way.name, "latency_ms": server.latency_ms, "samples": samples}
        row["samples_per_second"] = spread([run["samples"] / run["seconds"] for run in runs])
        row["gets_per_second"] = spread([run["requests"] / run["seconds"] for run in runs])
        row["mb_per_second"] = spread([run["bytes"] / 1e6 / run["seconds"] for run in runs])
        row |= {
            "requests_per_sample": whole["requests"] / samples,
            "bytes_per_sample": whole["bytes"] / samples,
        }
        row["bytes_per_byte_used"] = row["bytes_per_sample"] / used
        for name in ("client", "server"):
            row |= {f"{name}_cpu_ms": 1e3 * whole[name] / samples, f"{name}_cores": whole[name] / seconds}
        row["other_cores"] = whole["others"] / seconds
        row["share_of_all_cores"] = (row["client_cores"] + row["server_cores"]) / os.cpu_count()
        if gets := [1e3 * (ended - began) for run in runs for _, began, ended, _ in run["log"]]:
            row["get_ms"] = dict(zip(("p50", "p95", "p99"), np.percentile(gets, (50, 95, 99)).tolist()))
        rows.append(row)
    return rows


def patterns(args: argparse.Namespace) -> list[dict]:
    """Requests, bytes, time and CPU of a sample, for every layout, way and latency."""
    cases = []
    with ExitStack() as stack:
        for server in [stack.enter_context(serve(latency)) for latency in LATENCIES]:
            for layout, shape in LAYOUTS.items():
                patches = open_patches(layout, server, args) if shape else None
                ways = ways_of_zarr(layout, patches.store) if shape else ways_of_files(server, args)
                ways += ways_of_asyncio(layout, patches.store) if layout == TILES else []
                cases += [(way, server) for way in ways]
        return compare(cases, draw_regions(patches, 2 * BATCH), args)


def server_alone(args: argparse.Namespace) -> list[dict]:
    """What the server gives a client that does nothing but GETs, beside what train.py asks of it."""
    cases = []
    with ExitStack() as stack:
        for server in [stack.enter_context(serve(latency)) for latency in LATENCIES]:
            for layout in [layout for layout, shape in LAYOUTS.items() if shape]:
                patches = open_patches(layout, server, args)
                regions = draw_regions(patches, 2 * BATCH)
                ways = [
                    way_of_obstore(layout, patches.store, regions),
                    ways_of_zarr(layout, patches.store)[1],
                ]
                cases += [(way, server) for way in ways]
        return compare(cases, regions, args)


def timeline(args: argparse.Namespace) -> list[dict]:
    """When each GET of 8 samples began and ended, one by one and at once: of the median of some runs."""
    rows = []
    with serve(max(LATENCIES)) as server:
        patches = open_patches(TILES, server, args, 8)
        regions, ways = draw_regions(patches, 8), ways_of_zarr(TILES, patches.store)
        runs = [[] for _ in ways]
        for _ in range(args.repeats):
            for way, logs in zip(ways, runs):
                way.read(regions[:1])  # which connects
                way.read(regions)
                logs.append(sorted(way.log, key=lambda entry: entry[1]))
    times = [region["time"] for region in regions]  # an epoch has each of them once
    for way, logs in zip(ways, runs):
        log = sorted(logs, key=lambda log: max(ended for *_, ended, _ in log) - log[0][1])[len(logs) // 2]
        for order, (key, began, ended, size) in enumerate(log):
            row = {
                "way": way.name,
                "order": order,
                "sample": times.index(int(key.split("/")[2])),
                "bytes": size,
            }
            rows.append(row | {"began_ms": 1e3 * (began - log[0][1]), "ended_ms": 1e3 * (ended - log[0][1])})
    return rows


def draw_timeline(rows: list[dict]) -> Figure:
    """A bar for each GET, from when it was sent to when all of it was there; a panel for each way."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, way in zip(figure.subplots(len(ways), 1, sharex=True, squeeze=False).flat, ways):
        part = [row for row in rows if row["way"] == way]
        for parity, colour in enumerate(
            ("#0072B2", "#E69F00")
        ):  # so that each sample ends where the next begins
            bars = [row for row in part if row["sample"] % 2 == parity]
            lengths = [row["ended_ms"] - row["began_ms"] for row in bars]
            label = f"of samples {', '.join(str(n) for n in sorted({row['sample'] for row in bars}))}"
            began, lines = [row["began_ms"] for row in bars], [row["order"] for row in bars]
            axes.barh(lines, lengths, 0.8, began, color=colour, label=label)
        whole, samples = max(row["ended_ms"] for row in part), len({row["sample"] for row in part})
        axes.set_title(f"{way}: {len(part)} GETs for {samples} samples, {whole:.0f} ms", fontsize=14)
        axes.set_ylabel("GET", fontsize=13)
        axes.tick_params(labelsize=12)
        axes.invert_yaxis()
    axes.set_xlabel("ms since the first GET was sent", fontsize=13)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False, fontsize=13)
    return figure


def first_batch(patches: train.Patches, method: str, limit: int) -> tuple[float, str | None]:
    """Seconds to the first batch of a worker, and the error if it has not come within `limit` seconds."""
    workers, began = {"num_workers": 1, "multiprocessing_context": method, "timeout": limit}, perf_counter()
    try:
        next(iter(DataLoader(patches, batch_sampler=[[(0, k) for k in range(8)]], **workers)))
    except RuntimeError as error:
        return perf_counter() - began, str(error).splitlines()[0]
    return perf_counter() - began, None


def start_methods(args: argparse.Namespace) -> list[dict]:
    """Whether a worker's first batch comes, by how the worker starts, after its parent has read from a bucket."""
    with serve(max(LATENCIES)) as server:
        patches = open_patches(TILES, server, args, 8)
        patches.__getitems__([(0, 0)])  # obstore's threads are there from now on
        starts = {
            "fork": ("fork", patches),
            "fork, a store of its own": ("fork", pickle.loads(pickle.dumps(patches))),
        }
        starts |= {method: (method, patches) for method in ("forkserver", "spawn")}
        multiprocessing.set_forkserver_preload(train.PRELOADED)
        found = {name: [] for name in starts}
        for _ in range(args.repeats):
            for name, (method, of_worker) in tqdm(starts.items(), "start methods", disable=None):
                found[name].append(first_batch(of_worker, method, args.limit))
    rows = []
    for name, tries in found.items():
        seconds, errors = zip(*tries)
        row = {"start": name, "tries": len(tries), "arrived": errors.count(None), "seconds": seconds}
        rows.append(row | {"error": next(filter(None, errors), None)})
    return rows


def command(args: argparse.Namespace) -> list[dict]:
    """The reader's command from beginning to end, where its store is whole: seconds, and its summary."""
    rows = []
    for _ in tqdm(range(args.repeats), "command", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            run, began = [sys.executable, HERE / "train.py", "--output-dir", folder], perf_counter()
            subprocess.run(run, check=True, capture_output=True)
            row = {"wall_seconds": perf_counter() - began}
            rows.append(row | {"summary": json.loads(Path(folder, "summary.json").read_text())})
    return rows


def making(args: argparse.Namespace) -> list[dict]:
    """What make_store.py takes for its default store, whose NetCDF files are there: by level of compression."""
    rows = []
    for level in (1, 3, 9):
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, HERE / "make_store.py", "--store", f"{folder}/small.zarr"]
            before, began = os.times(), perf_counter()
            subprocess.run([*run, "--zstd-level", str(level)], check=True, capture_output=True)
            after, sizes = (
                os.times(),
                [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()],
            )
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            row = {"zstd_level": level, "seconds": perf_counter() - began, "cpu_seconds": cpu}
            rows.append(row | {"objects": len(sizes), "mb": sum(sizes) / 1e6})
    return rows


STUDIES = {"patterns": patterns, "server": server_alone, "timeline": timeline, "start_methods": start_methods}
STUDIES |= {"command": command, "making": making}


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "gpu": None,
    }


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that were asked for, print their rows, and save them if asked to."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    add = parser.add_argument
    add("studies", nargs="*", default=["patterns"], metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    add("--days", type=int, default=200, help="in the stores, spread over 1982 to 1992")
    add("--resolution", type=float, default=0.25, help="of the stores, in degrees")
    add("--patch-size", type=int, default=64, help="cells along a side of a patch")
    add("--repeats", type=int, default=3, help="of each measurement, in turn with the alternatives")
    add(
        "--seconds", type=float, default=3, help="that a measurement goes on, at least; up to four times that"
    )
    add("--limit", type=int, default=30, help="seconds to wait for the first batch of a worker")
    add("--save-results", action="store_true", help="write results/STUDY.json, and the timeline's picture")
    args = parser.parse_args(argv)
    given = [word for word in argv or sys.argv[1:] if word not in {*STUDIES, "--save-results"}]
    if unknown := [study for study in args.studies if study not in STUDIES]:
        train.refuse(f"{unknown[0]}: no such study; choose from {', '.join(STUDIES)}")
    for name in ("repeats", "limit"):
        if getattr(args, name) < 1:
            train.refuse(f"--{name} {getattr(args, name)}: give at least 1")
    if not set(args.studies) <= {"command", "making"}:
        make_stores(args)  # which checks days and resolution
    rows = {study: STUDIES[study](args) for study in args.studies}
    for study, part in rows.items():
        for row in part:
            print(study, row)
    if args.save_results:
        RESULTS.mkdir(exist_ok=True)
        versions = {name: version(name) for name in ("torch", "xarray", "zarr", "obstore", "h5netcdf")}
        versions = {"python": platform.python_version()} | versions
        for study, part in rows.items():
            words = ["uv run python read_patterns.py", study, *given]
            results = {"command": " ".join(words), "date": str(date.today())}
            results |= {"machine": machine(), "versions": versions, "rows": part}
            (RESULTS / f"{study}.json").write_text(json.dumps(results) + "\n")
        if "timeline" in rows:
            draw_timeline(rows["timeline"]).savefig(RESULTS / "timeline.png", dpi=110)
    return rows


if __name__ == "__main__":
    main()
