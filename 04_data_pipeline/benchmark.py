"""Chapter 4: what each setting of a loader buys, one at a time and stacked, from the naive loop to the final loader.

    uv run python benchmark.py                         # the ladder: stores of 7 GB, made once, and 40 minutes
    uv run python benchmark.py sweep workers dask persistent wait memory shuffle command  # others
    uv run python benchmark.py ladder --quick          # tiny: that it works, not what it finds
    uv run python benchmark.py ladder wait --save-results                             # and write results/*.json

All ways are timed in turn, so that a machine which slows down for a while slows all of them. A run that was
stopped goes on where it was, unless a script has changed since. Chapter 3's local_s3.py serves the stores, on the
same cores: without latency, and with the first byte after 30 ms. You should see that the naive loop waits for
nearly all of its time, and that most of the cure is to use a map that was read more than once.
"""

import argparse
import csv
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from datetime import date
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from itertools import count, product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import psutil
import torch
import xarray as xr
from dask.distributed import Client, LocalCluster, get_client
from obstore.store import from_url
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from zarr.storage import ObjectStore

import train

HERE = Path(__file__).parent
OUTPUTS, RESULTS, BUCKETS = (
    HERE / "outputs/benchmark",
    HERE / "results",
    train.CLOUD / "outputs",
)
LATENCIES = (
    0,
    30,
)  # milliseconds to the first byte; a bucket in the same region has about 30
LAYOUTS = {  # chunks of so many times, rows and columns (0: all of the map), and times in a shard
    "whole maps": (1, 0, 0, 0),
    "128 x 128": (1, 128, 128, 0),
    "8 times of 64 x 64": (8, 64, 64, 0),
    "64 x 64 in shards": (1, 64, 64, 1),
}
SIZE = {
    "days": 200,
    "resolution": 0.25,
    "patch": 64,
    "batch": 32,
}  # of the stores, and of what is read
LANES = 32  # with which the committed results were measured: train.py's default is four times the batch
DEVICE_SECONDS = 0.25  # of a step that a GPU would take, in the study of workers
QUICK = {
    "days": 132,
    "resolution": 10,
    "patch": 16,
    "batch": 8,
}  # a day of each month, at least


# ------------------------------------------------------------------------- what compare.py uses, too


class Server(NamedTuple):
    """A server that runs: its address, its milliseconds to the first byte, and its process's id."""

    address: str
    latency_ms: float
    pid: int

    def counts(self) -> np.ndarray:
        """Requests, bytes and CPU seconds so far, (3,)."""
        with urllib.request.urlopen(f"{self.address}/_counts") as reply:
            found = json.load(reply)
        return np.array(
            [
                found["requests"],
                found["bytes"],
                sum(psutil.Process(self.pid).cpu_times()[:2]),
            ]
        )


SERVERS = set()  # process ids of those that run


@contextmanager
def serve(latency_ms: float) -> Iterator[Server]:
    """Serve the buckets in chapter 3's outputs/ while the block runs."""
    command = [
        sys.executable,
        train.CLOUD / "local_s3.py",
        "--folder",
        BUCKETS,
        "--latency-ms",
        str(latency_ms),
    ]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(
        [*command, "--until-stdin-ends"], **pipes, text=True
    ) as process:
        try:
            SERVERS.add(process.pid)
            yield Server(process.stdout.readline().strip(), latency_ms, process.pid)
        finally:
            process.kill()
            SERVERS.discard(process.pid)


def store_key(layout: str) -> str:
    """Bucket and key of a layout's store."""
    return f"layouts/{SIZE['days']}_days_{SIZE['resolution']:g}_degrees/{layout.replace(' ', '_')}.zarr"


def STORE_FLAGS(layout: str, server: Server, *more: object) -> list[str]:
    """train.py's flags that read a layout's store from a server in batches of SIZE, and more of its flags."""
    flags = [
        "--store",
        f"s3://{store_key(layout)}",
        "--endpoint",
        server.address,
        "--anonymous",
    ]
    flags += [
        "--patch-size",
        SIZE["patch"],
        "--batch-size",
        SIZE["batch"],
        "--max-steps",
        10**6,
    ]
    flags += ["--shuffle-blocks", LANES]
    return [str(flag) for flag in [*flags, *more]]


def make_stores() -> None:
    """Make the stores that are missing, all from the same NetCDF files, which the first of them makes."""
    rows = round(180 / SIZE["resolution"]) + 1
    for layout, (times, height, width, shard_times) in LAYOUTS.items():
        flags = [
            "--days",
            SIZE["days"],
            "--resolution",
            SIZE["resolution"],
            "--shard-times",
            shard_times,
        ]
        flags += ["--chunk", times, height or rows, width or 2 * rows - 2]
        train.run_make_store(
            *map(str, flags), "--store", str(BUCKETS / store_key(layout))
        )


def children() -> list[psutil.Process]:
    """All processes that this one has started, and those that they have, but not the servers."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in SERVERS
    ]


def cpu_seconds() -> float:
    """CPU seconds so far of this process and all that it has started, those that ended, too, but not the servers."""
    return sum(sum(each.cpu_times()[:4]) for each in [psutil.Process(), *children()])


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def save(study: str, rows: list[dict], words: list[str]) -> None:
    """Write results/STUDY.json: the rows, the command of these words, and the machine and versions they are of."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(": ")[1] for line in lines if line.startswith("model name")),
            cpu,
        )
    memory = round(psutil.virtual_memory().total / 2**30)
    machine = {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": memory, "gpu": None}
    versions = {
        name: version(name)
        for name in ("torch", "xarray", "zarr", "obstore", "numcodecs", "dask")
    }
    results = {
        "command": " ".join(words),
        "date": str(date.today()),
        "machine": machine,
    }
    results |= {
        "versions": {"python": platform.python_version()} | versions,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{study}.json").write_text(json.dumps(results) + "\n")


# -------------------------------------------------------------------------------------- the ways to read


class Way(NamedTuple):
    """A way to make batches; the defaults are the final loader."""

    reads: str = "blocks"  # or "batch", all its reads at once: chapter 3's; "naive"; "Dask": naive with it
    layout: str = "whole maps"
    num_workers: int = 0
    patches_per_block: int = 8
    prefetch_factor: int = 2
    start_method: str = "forkserver"
    scheduler: str = (
        "threads"  # Dask's: also "synchronous", "processes" and a cluster's address
    )


class Naive(Dataset):
    """What people write: open the store by xarray, and load a sample in `__getitem__`."""

    def __init__(
        self, patches: train.Patches, dask: bool = False, scheduler: str = "threads"
    ):
        self.patches, self.chunks, self.scheduler = (
            patches,
            "auto" if dask else None,
            scheduler,
        )

    def __getstate__(self) -> dict:  # a worker opens the store for itself
        return {name: vars(self)[name] for name in ("patches", "chunks", "scheduler")}

    @cached_property
    def fields(self) -> xr.Dataset:
        args = self.patches.store.args
        client = {
            "endpoint": args.endpoint,
            "skip_signature": True,
            "client_options": {"allow_http": True},
        }
        store = ObjectStore(from_url(args.store, **client), read_only=True)
        return xr.open_zarr(store, chunks=self.chunks)[args.variables]

    @cached_property
    def options(self) -> dict:
        if self.chunks is None:
            return {}
        return {
            "scheduler": get_client(self.scheduler)
            if "://" in self.scheduler
            else self.scheduler
        }

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        drawn = self.patches.sample(*index)
        at, height = self.patches.region(*drawn[:3]), self.fields.sizes["latitude"]
        # make_store.py's rows run from north to south, those of Patches from south to north
        at["latitude"] = slice(
            height - at["latitude"].stop, height - at["latitude"].start
        )
        patch = self.fields.isel(at).load(**self.options)
        field = np.stack([patch[name].values[::-1] for name in self.fields])
        batch = self.patches.make(field[None], *(np.array([part]) for part in drawn))
        return {name: values[0] for name, values in batch.items()}


def parse(way: Way, server: Server) -> argparse.Namespace:
    """train.py's arguments for a way."""
    more = ["--num-workers", way.num_workers, "--start-method", way.start_method]
    more += ["--patches-per-block", way.patches_per_block]
    return train.parse_arguments(STORE_FLAGS(way.layout, server, *more))


@lru_cache
def open_patches(layout: str, server: Server) -> train.Patches:
    """The training patches of train.py, out of a layout's store."""
    return train.make_patches(parse(Way(layout=layout), server))[0]


def make_loader(
    way: Way, server: Server, steps: int = 2000, persistent: bool = False
) -> DataLoader:
    """The DataLoader of a way, with more batches than anybody asks for or, unless it reads blocks, so many."""
    patches, options = open_patches(way.layout, server), {}
    if way.reads == "blocks":
        return train.make_loader(patches, parse(way, server))
    if way.reads == "batch":
        patches = copy(patches)
        patches.store = train.Store(
            parse(way, server)
        )  # opened anew, as the others open theirs
    else:
        patches = Naive(patches, way.reads == "Dask", way.scheduler)
    if way.num_workers:
        multiprocessing.set_forkserver_preload(train.PRELOADED)
        options = {
            "num_workers": way.num_workers,
            "prefetch_factor": way.prefetch_factor,
        }
        options |= {
            "multiprocessing_context": way.start_method,
            "persistent_workers": persistent,
        }
        options |= {"worker_init_fn": train.end_with_parent}
    indices = [[(step, k) for k in range(SIZE["batch"])] for step in range(steps)]
    return DataLoader(patches, batch_sampler=indices, **options)


def plan(way: Way, server: Server) -> tuple[int, int]:
    """Batches that come from stock, and those after which all begins anew: a wave of workers, a visit of each lane."""
    if way.reads == "blocks":
        args = parse(way, server)
        period = max(1, args.shuffle_blocks * args.patches_per_block // args.batch_size)
        return 2 * period, period
    return max(1, 2 * way.num_workers * way.prefetch_factor), max(1, way.num_workers)


def measure(
    way: Way, server: Server, seconds: float, step: Callable[[dict], None] | None = None
) -> dict:
    """Iterate for some seconds and to the end of a period, when what comes from stock is used up.

    Returns samples/s, and what a sample costs in requests, bytes and CPU, of the server and of all else.
    """
    (stock, period), loader = plan(way, server), make_loader(way, server)
    began, samples, number = perf_counter(), 0, 1
    batches = iter(loader)
    next(batches)
    first = perf_counter() - began
    # Use up what is in stock, and as long as there is time also what is made meanwhile.
    while (
        number % period
        or number < stock / 2
        or (number < stock and perf_counter() - began - first < seconds)
    ):
        batch, number = next(batches), number + 1
        if step:
            step(batch)
    before, cpu, start = server.counts(), cpu_seconds(), perf_counter()
    for number in count(1):
        batch = next(batches)
        if step:
            step(batch)
        samples, took = samples + len(batch["target"]), perf_counter() - start
        if number % period == 0 and took > seconds:
            break
    requests, size, of_server = ((server.counts() - before) / samples).tolist()
    found = {
        "samples": samples,
        "samples_per_second": samples / took,
        "first_batch_s": first,
    }
    found |= {"requests_per_sample": requests, "bytes_per_sample": size}
    found |= {
        "client_cpu_ms": 1e3 * (cpu_seconds() - cpu) / samples,
        "server_cpu_ms": 1e3 * of_server,
    }
    workers = [
        psutil.Process(worker.pid).num_threads()
        for worker in getattr(batches, "_workers", [])
    ]
    own = psutil.Process().num_threads()
    others = sum(each.num_threads() for each in children()) - sum(
        workers
    )  # Dask's, forkservers
    return found | {"threads": own, "worker_threads": workers, "other_threads": others}


def make_step(server: Server) -> Callable[[dict], None]:
    """A step of training by hand: forward, backward, AdamW."""
    patches, args = open_patches("whole maps", server), parse(Way(), server)
    module = train.FillGaps(vars(args), patches.std.flatten().tolist(), patches.pools)
    optimizer = torch.optim.AdamW(module.parameters(), args.learning_rate)

    def step(batch: dict) -> None:
        squares, unseen = train.masked_sums(module.model(batch["input"]), batch)
        (squares / unseen).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def answer(
    connection: Connection, size: dict, function: Callable, *arguments: object
) -> None:
    """Send what a function returns, or the last line of its error, to the process that started this one."""
    SIZE.update(size)
    try:
        found = function(*arguments)
    except (
        Exception
    ) as error:  # whatever keeps it from working is what is to be reported
        found = {"error": str(error).strip().splitlines()[-1]}
    connection.send(found)


def fresh(limit: float, function: Callable, *arguments: object, **size: int) -> dict:
    """What a function returns in a process with threads and memory of its own; {"error": ...} if it fails or hangs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=answer, args=(theirs, SIZE | size, function, *arguments)
    )
    child.start()
    theirs.close()
    try:
        found = (
            ours.recv() if ours.poll(limit) else {"error": f"nothing after {limit} s"}
        )
        child.join(0 if "error" in found else limit)
    except EOFError:
        found = {"error": "its process ended without an answer"}
    if child.exitcode is None:
        for process in [*psutil.Process(child.pid).children(recursive=True), child]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    child.join()
    return found


# ---------------------------------------------------------------------------------------------- studies


def take_turns(
    study: str,
    cases: list[tuple[dict, Callable]],
    args: argparse.Namespace,
    repeats=None,
) -> list[dict]:
    """Measure each case, all of them in turn and several times; a row of its labels and figures for each.

    What was measured before the study was stopped is not measured again, unless it failed or a script has
    changed since.
    """
    path = kept_in(study, args)
    scripts = b"".join(
        Path(script).read_bytes() for script in (__file__, train.__file__)
    )
    kept = {"scripts": hashlib.sha256(scripts).hexdigest()}
    with suppress(FileNotFoundError, json.JSONDecodeError):
        found = json.loads(path.read_text())
        kept = found if found["scripts"] == kept["scripts"] else kept
    turns = range(repeats or args.repeats)
    keys = [
        [json.dumps([turn, args.seconds, labels]) for turn in turns]
        for labels, _ in cases
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    for turn in turns:
        for (_, measure_case), key in zip(
            tqdm(cases, f"{study}, turn {turn + 1}", disable=None), keys
        ):
            if key[turn] not in kept:
                kept[key[turn]] = measure_case()
                good = {
                    name: found for name, found in kept.items() if "error" not in found
                }
                path.with_suffix(".part").write_text(json.dumps(good))
                path.with_suffix(".part").replace(path)
    return [
        labels | summarise([kept[key] for key in of])
        for (labels, _), of in zip(cases, keys)
    ]


def kept_in(study: str, args: argparse.Namespace) -> Path:
    """The file of what a study has measured so far."""
    return OUTPUTS / f"{study}{'_quick' * args.quick}.json"


def summarise(runs: list[dict]) -> dict:
    """Spreads of rates and seconds, medians of other numbers; of anything else, such as an error, the last."""
    row = {name: value for run in runs for name, value in run.items()}
    for name, value in row.items():
        values = [run[name] for run in runs if name in run]
        if isinstance(value, int | float):
            row[name] = spread(values) if name in SPREAD else median(values)
    return row


SPREAD = {
    "samples_per_second",
    "step_seconds",
    "first_epoch_s",
    "second_epoch_s",
    "data_wait_share",
}
NAIVE, BATCH = Way("naive"), Way("batch")
ALONE = {"naive": NAIVE, "with Dask": Way("Dask")}
ALONE |= {f"{n} workers": NAIVE._replace(num_workers=n) for n in (2, 8)}
ALONE["2 workers, prefetch_factor 8"] = NAIVE._replace(num_workers=2, prefetch_factor=8)
ALONE["a batch's reads at once"] = BATCH
ALONE |= {layout: NAIVE._replace(layout=layout) for layout in list(LAYOUTS)[1:]}
ALONE["blocks, P = 8"] = FINAL = Way()
STACKED = {
    "naive": NAIVE,
    "a batch's reads at once": BATCH,
    "in a worker": BATCH._replace(num_workers=1),
    "blocks, P = 8, in a worker": FINAL._replace(num_workers=1),
    "blocks, P = 8": FINAL,
    "blocks, P = 32": FINAL._replace(patches_per_block=32),
    "blocks, P = 8, of 128 x 128": FINAL._replace(layout="128 x 128"),
}


def ladder(args: argparse.Namespace) -> list[dict]:
    """What each change buys over the naive loop, alone, and stacked on those before."""
    ways = dict.fromkeys([*ALONE.values(), *STACKED.values()])  # each once
    if args.quick:
        ways = [way for way in ways if not way.num_workers]
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(latency)) for latency in LATENCIES]
        cases = []
        for server, way in product(servers, ways):
            labels = {"latency_ms": server.latency_ms} | way._asdict()
            cases.append((labels, partial(measure, way, server, args.seconds)))
        rows = take_turns("ladder", cases, args)
    rates = {(row["latency_ms"], Way(*map(row.get, Way._fields))): row for row in rows}
    rows = []
    for latency in LATENCIES:
        naive = rates[latency, NAIVE]["samples_per_second"]["median"]
        for group, rungs in {"alone": ALONE, "stacked": STACKED}.items():
            for rung, way in rungs.items():
                if row := rates.get((latency, way)):
                    ratio = row["samples_per_second"]["median"] / naive
                    rows.append(
                        {"group": group, "rung": rung} | row | {"ratio_to_naive": ratio}
                    )
    return rows


def sweep(args: argparse.Namespace) -> list[dict]:
    """Samples/s of chapter 3's loader over workers and prefetch_factor, alone, and over workers beside training.

    The last two rows predict from the seconds that a batch takes one worker, and a step.
    """
    workers, prefetch = ((1,), (2,)) if args.quick else ((1, 2, 4, 8), (1, 2, 4, 8))
    alone = [
        BATCH,
        *(
            BATCH._replace(num_workers=n, prefetch_factor=p)
            for n in workers
            for p in prefetch
        ),
    ]
    beside = [BATCH._replace(num_workers=n) for n in (0, *workers) if n <= 4]
    with serve(max(LATENCIES)) as server:
        step = make_step(server)
        runs = [(way, False, (args.seconds,)) for way in alone]
        runs += [(way, True, (4 * args.seconds, step)) for way in beside]
        cases = []
        for way, with_step, how in runs:
            factor = way.prefetch_factor if way.num_workers else None
            labels = {
                "num_workers": way.num_workers,
                "prefetch_factor": factor,
                "with_step": with_step,
            }
            cases.append((labels, partial(measure, way, server, *how)))
        cases.append(({}, partial(time_step, step, server, args.seconds)))
        rows = take_turns("sweep", cases, args)
    of_one = next(
        row for row in rows if (row["num_workers"], row["prefetch_factor"]) == (1, 2)
    )
    load = {
        name: SIZE["batch"] / rate
        for name, rate in of_one["samples_per_second"].items()
    }
    return [
        *rows,
        {
            "load_seconds": {
                "median": load["median"],
                "min": load["max"],
                "max": load["min"],
            }
        },
    ]


def time_step(step: Callable[[dict], None], server: Server, seconds: float) -> dict:
    """Seconds of a step when its batch is at hand."""
    batch = next(iter(make_loader(BATCH, server)))
    step(batch)
    began = perf_counter()
    for number in count(1):
        step(batch)
        if (took := perf_counter() - began) > seconds:
            return {"step_seconds": took / number}


def workers(args: argparse.Namespace) -> list[dict]:
    """Samples/s of the naive loop over workers, in batches of 8, beside a step that needs no core.

    The first row is of one worker without a step; the last has the seconds that it takes a batch, and the step.
    """
    batch, numbers = 8, (0, 1) if args.quick else (0, 1, 2, 3, 4, 6)
    with serve(max(LATENCIES)) as server:
        cases = []
        for number, step in [
            (1, None),
            *((number, wait_for_device) for number in numbers),
        ]:
            how = NAIVE._replace(num_workers=number), server, args.seconds, step
            labels = {"num_workers": number, "with_step": step is not None}
            cases.append(
                (labels, partial(fresh, args.limit, measure, *how, batch=batch))
            )
        rows = take_turns("workers", cases, args)
    load = batch / rows[0]["samples_per_second"]["median"]
    return [*rows, {"load_seconds": load, "step_seconds": DEVICE_SECONDS}]


def wait_for_device(batch: dict) -> None:
    """Stands for the step of a GPU, during which the cores have nothing to do."""
    sleep(DEVICE_SECONDS)


def dask_modes(args: argparse.Namespace) -> list[dict]:
    """The naive loop by each of Dask's schedulers, in the process itself and in two workers: rates and threads."""
    schedulers = ("synchronous", "cluster", "threads", "processes")[
        : 2 if args.quick else 4
    ]
    modes = {mode: Way("Dask", scheduler=mode) for mode in schedulers} | {
        "without Dask": NAIVE
    }
    with serve(max(LATENCIES)) as server:
        cases = []
        for number, (mode, way) in product((0, 2), modes.items()):
            how = (way._replace(num_workers=number), server, args.seconds)
            # Two samples a batch: where Dask starts processes for each, a sample takes seconds.
            labels = {"mode": mode, "num_workers": number}
            cases.append((labels, partial(fresh, args.limit, by_dask, *how, batch=2)))
        return take_turns("dask", cases, args)


def by_dask(way: Way, server: Server, seconds: float) -> dict:
    """Measure a way of which Dask's scheduler may be a cluster of two processes."""
    with ExitStack() as stack:
        if way.scheduler == "cluster":
            options = {"dashboard_address": None, "silence_logs": logging.CRITICAL}
            options |= {"n_workers": 2, "threads_per_worker": 1}
            cluster = stack.enter_context(LocalCluster(**options))
            stack.enter_context(
                Client(cluster)
            )  # which get_client finds; a loader's worker makes its own
            way = way._replace(scheduler=cluster.scheduler_address)
        return measure(way, server, seconds)


def persistent(args: argparse.Namespace) -> list[dict]:
    """Seconds to the first batch of an epoch and of the next, by how two workers start, and whether they stay."""
    methods = ("forkserver",) if args.quick else ("forkserver", "spawn")
    with serve(max(LATENCIES)) as server:
        cases = []
        for method, stay in product(methods, (False, True)):
            way = BATCH._replace(num_workers=2, start_method=method)
            labels = {"start_method": method, "persistent_workers": stay}
            cases.append(
                (labels, partial(fresh, args.limit, first_batches, way, server, stay))
            )
        return take_turns("persistent", cases, args)


def first_batches(way: Way, server: Server, stay: bool) -> dict:
    """Seconds to the first batch of two epochs of four steps."""
    loader, found = make_loader(way, server, 4, stay), {}
    for name in ("first_epoch_s", "second_epoch_s"):
        began = perf_counter()
        for number, _ in enumerate(loader):
            if number == 0:
                found[name] = perf_counter() - began
    return found


def wait(args: argparse.Namespace) -> list[dict]:
    """Seconds of waiting and of work in each step of training, with the naive loader and with the final one."""
    final = 4 if args.quick else 48
    runs = [("naive", NAIVE, 2, 4 if args.quick else 10), ("final", FINAL, None, final)]
    runs += (
        [] if args.quick else [("final", FINAL._replace(num_workers=1), None, final)]
    )
    with serve(max(LATENCIES)) as server:
        step, cases = make_step(server), []
        for name, way, warm_up, steps in runs:
            warm_up = 2 if args.quick else warm_up or plan(way, server)[0]
            labels = {
                "loader": name,
                "num_workers": way.num_workers,
                "warm_up": warm_up,
            }
            cases.append((labels, partial(waits, way, server, step, warm_up, steps)))
        return take_turns("wait", cases, args)


def waits(
    way: Way, server: Server, step: Callable[[dict], None], warm_up: int, steps: int
) -> dict:
    """Train; [waited, worked] seconds of each step, and the share of waiting in those after the first `warm_up`."""
    batches, seconds = iter(make_loader(way, server)), []
    for _ in range(warm_up + steps):
        began = perf_counter()
        batch = next(batches)
        came = perf_counter()
        step(batch)
        seconds.append([round(came - began, 6), round(perf_counter() - came, 6)])
    waited, worked = np.sum(seconds[warm_up:], axis=0).tolist()
    return {"steps": seconds, "data_wait_share": waited / (waited + worked)}


def memory(args: argparse.Namespace) -> list[dict]:
    """Memory of the process that reads, over 1,000 steps of the final loader, and by how much it may grow."""
    steps, every = (40, 10) if args.quick else (1000, 25)
    with serve(0) as server:
        cases = []
        for number in (0, 1):
            work = partial(
                fresh,
                600,
                resident,
                FINAL._replace(num_workers=number),
                server,
                steps,
                every,
            )
            cases.append(({"num_workers": number}, work))
        rows = take_turns("memory", cases, args, repeats=1)
    points = [
        {"num_workers": row["num_workers"], "step": every * (n + 1), "rss_mb": rss}
        for row in rows
        for n, rss in enumerate(row.pop("rss_mb", []))
    ]
    return points + rows


def resident(way: Way, server: Server, steps: int, every: int) -> dict:
    """Megabytes of the process that reads, each so many steps, and the most that Blocks says it holds."""
    args, patches = parse(way, server), open_patches(way.layout, server)
    cell, variables = np.dtype("float32").itemsize, len(args.variables)
    lanes, batch = args.shuffle_blocks, args.batch_size
    visits = lanes + max(lanes, train.BLOCKS_AHEAD) + 2 * batch
    patch = args.patch_size**2 * (variables * cell + 1)  # a byte of its swath
    bound = visits * args.patches_per_block * patch
    bound += (
        3 * train.MAPS_AT_ONCE * cell * patches.valid.size
    )  # as it came, decoded, and as an array
    found, batches = [], iter(make_loader(way, server))
    reader = psutil.Process(batches._workers[0].pid if way.num_workers else None)
    for number in range(1, steps + 1):
        next(batches)["target"].mean()
        if number % every == 0:
            found.append(reader.memory_info().rss / 1e6)
    return {"rss_mb": found, "bound_mb": bound / 1e6}


def shuffle(args: argparse.Namespace) -> list[dict]:
    """RMSE at equal steps over the width of the shuffle and the patches of a block, against a full shuffle.

    The same store of 1 degree, from this disk, by chapter 3's train.py and this one's, with several seeds.
    """
    flags, store = (
        ["--max-steps", "200"],
        train.CLOUD / "outputs/buckets" / train.SMALL.removeprefix("s3://"),
    )
    grid = [
        *product((1, 8, 32), (8, 32)),
        (128, 8),
    ]  # 128 of 32 patches would not be used up in a run
    if args.quick:
        flags = ["--max-steps", "4", "--validate-every", "2", "--patch-size", "16"]
        store, grid = BUCKETS / store_key("whole maps"), [(2, 8)]
    else:
        train.run_make_store()
    flags, cases = [*flags, "--store", str(store)], []
    for seed in range(args.repeats):
        labels = {"shuffle_blocks": None, "patches_per_block": 1, "seed": seed}
        cases.append(
            (
                labels,
                partial(
                    train_once, train.CLOUD / "train.py", [*flags, "--seed", str(seed)]
                ),
            )
        )
        for width, patches in grid:
            labels = {
                "shuffle_blocks": width,
                "patches_per_block": patches,
                "seed": seed,
            }
            more = [
                "--shuffle-blocks",
                width,
                "--patches-per-block",
                patches,
                "--seed",
                seed,
            ]
            cases.append(
                (
                    labels,
                    partial(train_once, HERE / "train.py", [*flags, *map(str, more)]),
                )
            )
    return take_turns("shuffle", cases, args, repeats=1)


def train_once(script: Path, flags: list[str]) -> dict:
    """The RMSE of a whole run of a train.py: of its last validation, and of its test."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, script, "--output-dir", folder, *flags]
        done = subprocess.run(run, capture_output=True, text=True)
        if done.returncode:
            train.refuse(f"{script}: {done.stderr.splitlines()[-1]}")
        with open(Path(folder, "metrics.csv"), newline="") as log:
            *_, last = (
                row["rmse (m/s)"] for row in csv.DictReader(log) if row["rmse (m/s)"]
            )
        test = json.loads(Path(folder, "summary.json").read_text())["rmse"]["U-Net"][
            "m/s"
        ]
    return {"validation_rmse": float(last), "test_rmse": test}


def command(args: argparse.Namespace) -> list[dict]:
    """The reader's command from beginning to end, where its store is whole: seconds, and its summary."""
    flags = ["--max-steps", "4"] if args.quick else []
    rows = []
    for _ in tqdm(range(args.repeats), "command", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            run, began = (
                [sys.executable, HERE / "train.py", "--output-dir", folder, *flags],
                perf_counter(),
            )
            subprocess.run(run, check=True, capture_output=True)
            summary = json.loads(Path(folder, "summary.json").read_text())
            rows.append({"wall_seconds": perf_counter() - began, "summary": summary})
    return rows


STUDIES = {
    "ladder": ladder,
    "sweep": sweep,
    "workers": workers,
    "dask": dask_modes,
    "persistent": persistent,
}
STUDIES |= {"wait": wait, "memory": memory, "shuffle": shuffle, "command": command}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that were asked for, print their rows, and save them if asked to."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=show_defaults
    )
    add = parser.add_argument
    add(
        "studies",
        nargs="*",
        default=["ladder"],
        metavar="STUDY",
        help=f"of {', '.join(STUDIES)}",
    )
    add(
        "--quick",
        action="store_true",
        help="a short form on tiny stores: that it works, not what it finds",
    )
    add(
        "--repeats",
        type=int,
        default=3,
        help="of each measurement, in turn with others; seeds of shuffle",
    )
    add("--seconds", type=float, default=3, help="of a measurement, at least")
    add(
        "--limit",
        type=int,
        default=180,
        help="seconds for a measurement in a process of its own",
    )
    add("--save-results", action="store_true", help="write results/STUDY.json")
    args = parser.parse_args(argv)
    given = [
        word
        for word in argv or sys.argv[1:]
        if word not in {*STUDIES, "--save-results"}
    ]
    if unknown := [study for study in args.studies if study not in STUDIES]:
        train.refuse(f"{unknown[0]}: no such study; choose from {', '.join(STUDIES)}")
    for name in ("repeats", "limit"):
        if getattr(args, name) < 1:
            train.refuse(f"--{name} {getattr(args, name)}: give at least 1")
    if args.quick and args.save_results:
        train.refuse(
            "--save-results: --quick finds nothing worth keeping; leave one of them out"
        )
    if args.quick:
        SIZE.update(QUICK)
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores
    make_stores()
    rows = {}
    for study in args.studies:
        rows[study] = STUDIES[study](args)
        for row in rows[study]:
            print(study, row)
        if args.save_results:
            save(study, rows[study], ["uv run python benchmark.py", study, *given])
    for study in args.studies:  # all of them are whole
        kept_in(study, args).unlink(missing_ok=True)
    return rows


if __name__ == "__main__":
    main()
