"""Appendix: Dask's modes: what a task costs, how fast they read, and what to set.

    uv run python dask_modes.py                         # two ranks, each mode: half a minute
    uv run python dask_modes.py --repeats 5             # and again, for medians
    uv run python dask_modes.py --memory                # tasks that exceed a memory limit
    uv run python dask_modes.py --settings 8 20 160     # for 8 GPUs, 20 cores and 160 GB
    uv run python dask_modes.py --dashboard 60          # a cluster at work, and its dashboard

You should see that a task costs some tenths of a millisecond, and several times that in a
cluster. From a local disk, no mode should read faster than Zarr by itself. Each layer has
threads of its own.
"""

import argparse
import asyncio
import logging
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import dask
import dask.array as da
import numpy as np
import psutil
import xarray as xr
import zarr
from distributed import Client, KilledWorker, LocalCluster
from distributed.deploy.utils import nprocesses_nthreads
from zarr.storage import LocalStore, WrapperStore

from saving import save_rows

HERE = Path(__file__).parent
WINDS = HERE.parent / "01_setup/data/navy_winds.nc"
CHUNKS = (12, 73, 144)  # a year of whole maps, 0.5 MB
PATCH = 64  # cells along a side
BATCH = 8  # patches
RANKS = 2
THREADS = 2  # Dask's, of each rank
COUNTS = (1, 4, 16)  # of Dask's threads and of Zarr's, to see when they are too many
LATENCY = 0.01  # seconds, of each chunk
MODES = {  # what the table calls them
    "zarr": "no Dask",
    "pool": "no Dask, a ThreadPoolExecutor",
    "synchronous": "synchronous",
    "threads": "threads",
    "inside": "distributed in the process",
    "private": "a private cluster each",
    "shared": "a cluster that they share",
}
WITHOUT_DASK = ("zarr", "pool")
LIMIT_MB = 400  # of the worker
TASK_MB = 600  # what the task takes
LIMITED = {"memory_limit": f"{LIMIT_MB}MB", "n_workers": 1, "threads_per_worker": 1}
# Port 0 is any that is free; None would take 8787.
QUIET = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
# What threads are for, by a part of their names.
KINDS = {
    "MainThread": "main",
    "asyncio": "zarr",
    "zarr": "zarr",
    "ThreadPool": "tasks",
    "Dask-Default": "tasks",
}


class Bucket(WrapperStore):
    """A store on disk whose chunks are delayed, as if they came from a bucket."""

    async def get(self, key: str, *args, **kwargs):
        if "/c/" in key:
            await asyncio.sleep(LATENCY)
        return await self._store.get(key, *args, **kwargs)


def write_store(path: Path) -> None:
    """Write the winds, u and v, with Zarr's default compression and a year in each chunk."""
    with xr.open_dataset(WINDS) as winds:
        encoding = {name: {"chunks": CHUNKS} for name in winds.data_vars}
        winds.to_zarr(path, encoding=encoding, consolidated=False)


# ------------------------------------------------------------------------------ in a rank


class Rank:
    """One of the processes that train: makes tasks and reads batches in one of the modes.

    In the mode "host", the process has the workers of all ranks.
    """

    def __init__(
        self,
        mode: str,
        path: str,
        address: str | None = None,
        threads: int = THREADS,
        zarr_threads: int | None = None,
    ):
        self.mode = mode
        self.closing = ExitStack()
        self.client: Client | None = None
        # In time, because Zarr makes its pool when it first reads.
        limit = zarr.config.set({"threading.max_workers": zarr_threads})
        self.closing.enter_context(limit)
        self.generator = np.random.default_rng(0)
        if mode in ("inside", "private", "host"):
            address = self.start_cluster(threads)
        if address:
            self.client = self.closing.enter_context(Client(address))
        self.options = {"scheduler": self.client or mode, "num_workers": threads}
        self.pool = self.closing.enter_context(ThreadPoolExecutor(threads))
        self.stores = (LocalStore(path), Bucket(LocalStore(path)))

    def start_cluster(self, threads: int) -> str:
        """Start this rank's workers, or all ranks'; return the scheduler's address."""
        workers = RANKS if self.mode == "host" else 1
        options: dict = {"n_workers": workers, "threads_per_worker": threads}
        options["processes"] = self.mode != "inside"
        if self.mode == "inside":
            options["memory_limit"] = 0  # it would count all that the rank holds
        cluster = LocalCluster(**options, **QUIET)
        return self.closing.enter_context(cluster).scheduler_address

    def overhead(self, tasks: int) -> float:
        """Microseconds that Dask adds to each of `tasks` calls.

        The result of each call is requested, so that Dask can fuse none.
        """
        began = time.perf_counter()
        plain = [nothing(number) for number in range(tasks)]
        ended = time.perf_counter()
        found = self.call_nothing(tasks)
        both = time.perf_counter() - ended
        assert list(found) == plain
        if self.mode == "zarr":
            return 0.0
        return 1e6 * (both - (ended - began)) / tasks

    def call_nothing(self, tasks: int) -> list[int]:
        """The results of `tasks` calls, made in this rank's mode."""
        if self.mode == "zarr":
            return list(range(tasks))
        if self.mode == "pool":
            return list(self.pool.map(nothing, range(tasks)))
        # Each call has a key of its own, so that a cluster computes it anew.
        calls = [dask.delayed(nothing)(number) for number in range(tasks)]
        return list(dask.compute(*calls, **self.options))

    def read(self, slow: bool, seconds: float) -> float:
        """Patches per second; each batch is read as a whole."""
        group = zarr.open_group(self.stores[slow], mode="r")
        fields = [group["eastward_wind"], group["northward_wind"]]
        if self.mode not in WITHOUT_DASK:
            fields = [da.from_zarr(field) for field in fields]
        batches = 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or not batches:
            self.batch(fields, self.draw_corners(fields[0].shape))
            batches += 1
        return batches * BATCH / (time.perf_counter() - began)

    def draw_corners(self, shape: tuple[int, ...]) -> np.ndarray:
        """Times, rows and columns of a batch, (patch, 3); no two lie in one chunk."""
        years = self.generator.permutation(shape[0] // 12)[:BATCH]
        rows_and_columns = np.subtract(shape[1:], PATCH - 1)
        limits = (12, *rows_and_columns)
        corners = self.generator.integers(limits, size=(BATCH, 3))
        return corners + np.outer(years, [12, 0, 0])

    def batch(self, fields: list, corners: np.ndarray) -> np.ndarray:
        """Patches of all fields at these corners: (patch, field, row, column)."""

        def cut(corner: np.ndarray) -> list:
            t, y, x = map(int, corner)
            return [field[t, y : y + PATCH, x : x + PATCH] for field in fields]

        if self.mode == "zarr":
            patches = list(map(cut, corners))
        elif self.mode == "pool":
            patches = list(self.pool.map(cut, corners))
        else:
            lazy = [cut(corner) for corner in corners]
            [patches] = dask.compute(lazy, **self.options)
        return np.stack(patches)

    def threads(self) -> dict:
        """Processes and threads of this rank and of all that it started, by their use."""
        found = threads_here()
        if self.mode in ("private", "host"):
            found += sum(self.client.run(threads_here).values(), Counter())
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        helpers = sum(each.num_threads() for each in tree) - found.total()
        return {"processes": len(tree)} | found | {"helpers": helpers}

    def address(self) -> str:
        return self.client.scheduler.address

    def close(self) -> None:
        self.closing.close()


def nothing(number: int) -> int:
    return number


def threads_here() -> Counter:
    """The threads of this process by their use; "native" are those of libraries."""
    found: Counter[str] = Counter()
    threads = threading.enumerate()
    for thread in threads:
        kinds = [kind for part, kind in KINDS.items() if part in thread.name]
        found[kinds[0] if kinds else "distributed"] += 1
    found["native"] = psutil.Process().num_threads() - len(threads)
    return +found


class Remote:
    """A rank in a process of its own; a call returns a future."""

    rank: Rank  # in that process

    def __init__(self, *arguments: object):
        context = multiprocessing.get_context("forkserver")
        modules = ["dask.array", "distributed", "xarray", "zarr"]  # once for all
        context.set_forkserver_preload(modules)
        self.process = ProcessPoolExecutor(1, context, Remote.start, arguments)

    @staticmethod
    def start(*arguments: object) -> None:
        Remote.rank = Rank(*arguments)

    @staticmethod
    def answer(method: str, *arguments: object) -> object:
        return getattr(Remote.rank, method)(*arguments)

    def __call__(self, method: str, *arguments: object) -> Future:
        return self.process.submit(Remote.answer, method, *arguments)

    def close(self) -> None:
        with suppress(Exception):
            self("close").result()
        self.process.shutdown()


# -------------------------------------------------------------------------------- studies


def spread(values: list[float]) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values)}


class Team:
    """All ranks of a case, and the process that has their workers if they share them."""

    def __init__(self, case: dict, path: str, stack: ExitStack):
        self.case = case
        self.stack = stack
        self.host: list[Remote] = []
        address = None
        if case["mode"] == "shared":
            self.host = [self.start("host", path)]
            address = self.host[0]("address").result()
        threads = case.get("threads_set", THREADS)
        options = (case["mode"], path, address, threads, case.get("zarr_threads"))
        self.ranks = [self.start(*options) for _ in range(RANKS)]
        self.runs: list[dict] = []

    def start(self, *arguments: object) -> Remote:
        remote = Remote(*arguments)
        self.stack.callback(remote.close)
        return remote

    def measure(self, tasks: int, seconds: float) -> dict:
        """Microseconds per task, and patches per second of all ranks together."""
        run = {"us_alone": self.ranks[0]("overhead", tasks).result()}
        run["us_both"] = sum(call_all(self.ranks, "overhead", tasks)) / RANKS
        run["disk"] = sum(call_all(self.ranks, "read", False, seconds))
        run["bucket"] = sum(call_all(self.ranks, "read", True, seconds))
        return run

    def row(self) -> dict:
        """The figures of all runs, and the threads that exist after them."""
        counts = call_all([*self.ranks, *self.host], "threads")
        threads = sum(map(Counter, counts), Counter())
        figures = {}
        for name in self.runs[0]:
            figures[name] = spread([run[name] for run in self.runs])
        return self.case | figures | {"threads": dict(threads)}


def call_all(ranks: list[Remote], *call: object) -> list:
    """The answers of ranks that are called at the same time."""
    futures = [rank(*call) for rank in ranks]
    return [future.result() for future in futures]


def compare(cases: list[dict], args: argparse.Namespace) -> list[dict]:
    """A row for each case: both ranks, all cases in turn, several times."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = f"{folder}/winds.zarr"
        write_store(Path(path))
        teams = [Team(case, path, stack) for case in cases]
        for team in teams:  # makes pools and fills caches, and does not count
            team.measure(args.tasks, 0.0)
        for _ in range(args.repeats):
            for team in teams:
                team.runs.append(team.measure(args.tasks, args.seconds))
        return [team.row() for team in teams]


def hold(megabytes: int, seconds: float) -> int:
    """A task that holds so many megabytes for so many seconds."""
    array = np.ones(megabytes * 125_000)
    time.sleep(seconds)
    return array.nbytes


def outgrow_threads() -> str:
    """What becomes of a task of TASK_MB in the mode `threads`."""
    taken = dask.delayed(hold)(TASK_MB, 1).compute(scheduler="threads")
    return f"done, {taken / 1e6:.0f} MB: there is no limit"


def outgrow_inside() -> str:
    """What a worker in this process does when the process holds TASK_MB of its own."""
    own = np.ones(TASK_MB * 125_000)
    with ExitStack() as stack:
        cluster = LocalCluster(processes=False, **LIMITED, **QUIET)
        stack.enter_context(cluster)
        client = stack.enter_context(Client(cluster))
        (worker,) = cluster.workers.values()
        deadline = time.monotonic() + 60
        while worker.status.name != "paused" and time.monotonic() < deadline:
            time.sleep(0.1)
        future = client.submit(nothing, 1)
        try:
            outcome = f"done: {future.result(timeout=2)}"
        except TimeoutError:
            whose = f"{own.nbytes / 1e6:.0f} MB that are not Dask's"
            outcome = f"worker {worker.status.name} by {whose}: no task begins"
        future.cancel()
    return outcome


def outgrow_private() -> str:
    """What becomes of a task of TASK_MB in a worker process."""
    with LocalCluster(**LIMITED, **QUIET) as cluster, Client(cluster) as client:
        try:
            return f"done: {client.submit(hold, TASK_MB, 60).result()}"
        except KilledWorker:
            tries = dask.config.get("distributed.scheduler.allowed-failures") + 1
            return f"KilledWorker: {tries} workers, one after another, ended for it"


OUTGROW = {
    "threads": outgrow_threads,
    "inside": outgrow_inside,
    "private": outgrow_private,
}


def outgrow() -> list[dict]:
    """What becomes of TASK_MB where LIMIT_MB are allowed, in each of OUTGROW's modes."""
    rows = []
    for number, (mode, study) in enumerate(OUTGROW.items(), 1):
        what = f"{MODES[mode]}: {TASK_MB} MB, limit {LIMIT_MB} MB"
        print(f"{number} of {len(OUTGROW)}: {what} ...", flush=True)
        rows.append({"mode": mode, "outcome": study()})
    return rows


def show_dashboard(seconds: float) -> None:
    """Keep a cluster at work, and say where to look."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "winds.zarr"
        write_store(path)
        workers = {"n_workers": 2, "threads_per_worker": 2}
        with LocalCluster(**workers, **QUIET) as cluster, Client(cluster):
            print(cluster.dashboard_link, flush=True)
            group = zarr.open_group(Bucket(LocalStore(path)), mode="r")
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                u = da.from_zarr(group["eastward_wind"])
                v = da.from_zarr(group["northward_wind"])
                da.sqrt(u**2 + v**2).mean().compute()


# ------------------------------------------------------------------------- what to set


def settings(gpus: int, cores: int, memory_gb: float) -> dict[str, float]:
    """What fits a machine with a rank for each GPU.

    Busy threads = ranks x (1 + processes x threads) <= cores. ValueError if a rank has no
    core.
    """
    if gpus < 1 or cores < gpus or not memory_gb > 0:
        had = f"{gpus} GPUs, {cores} cores, {memory_gb} GB"
        raise ValueError(f"{had}: give a GPU, a core for each, and some memory")
    share = cores // gpus  # of a rank: a core for its main thread, the rest for batches
    rest = max(1, share - 1)
    found: dict[str, float] = {"gpus": gpus, "share": share}
    # While one thread waits for its bytes or for Python's lock, the other decodes.
    found["zarr_threads"] = min(2, rest)
    found["num_workers"] = (share - 1) // found["zarr_threads"]
    found["busy"] = gpus * (1 + found["num_workers"] * found["zarr_threads"])
    found["threads"] = min(4, rest)  # of a Dask process: more wait for Python's lock
    found["processes"] = rest // found["threads"]
    half = memory_gb / 2  # ranks and the page cache have the other half
    found["limit_gb"] = half / (gpus * found["processes"])
    processes, threads = nprocesses_nthreads(cores)  # Dask's own choice
    found["alone"] = processes
    found["alone_threads"] = threads
    found["alone_limit_gb"] = 0.8 * memory_gb / processes
    return found


def limit(gigabytes: float) -> str:
    """Rounded down, so that the sum fits; in MB if small, because "0GB" is no limit."""
    if gigabytes >= 10:
        return f"{int(gigabytes)}GB"
    return f"{int(1000 * gigabytes)}MB"


def cluster(workers: float, threads: float, gigabytes: float, more: str = "") -> str:
    """The call that makes a cluster."""
    sizes = f"n_workers={workers}, threads_per_worker={threads}"
    return f'LocalCluster({sizes}, memory_limit="{limit(gigabytes)}"{more})'


def lines(found: dict[str, float]) -> dict[str, list[str]]:
    """These settings as lines to copy, for each mode; threads are for data on a disk."""
    threads = found["threads"]
    processes = found["processes"]
    pool = "ZARR_THREADING__MAX_WORKERS"
    any_port = ', dashboard_address=":0"'
    private = cluster(processes, threads, found["limit_gb"], any_port)
    shared = cluster(found["gpus"] * processes, threads, found["limit_gb"])
    own = (found["alone"], found["alone_threads"], found["alone_limit_gb"])
    loader = f"DataLoader(..., num_workers={found['num_workers']})"
    scheduler = f'dask.config.set(scheduler="threads", num_workers={threads})'
    of_zarr = f'zarr.config.set({{"threading.max_workers": {threads}}})'
    return {
        "GPUs train": ["OMP_NUM_THREADS=1"],
        "no Dask": [f"{pool}={found['zarr_threads']}", loader],
        "synchronous": ["DASK_SCHEDULER=synchronous"],
        "threads": [scheduler, of_zarr],
        "private": [f"{pool}={threads}", private],
        "shared": [f"{pool}={threads}", shared, "Client(address)  # in each rank"],
        "before training": [f"{pool}={found['alone_threads']}", cluster(*own)],
    }


def print_lines(found: dict[str, float]) -> None:
    for name, each in lines(found).items():
        for number, line in enumerate(each):
            print(f"{'' if number else name:17}{line}")


# ---------------------------------------------------------------------------- the command


def title(row: dict) -> str:
    name = MODES[row["mode"]]
    return f"{name}, {row['threads_set']} of each" if "threads_set" in row else name


def show(rows: list[dict]) -> None:
    """Print a line for each mode: medians, and threads by their use."""
    print(f"{'':31}us a task, alone / both  patches/s, disk, 10 ms  processes  threads")
    for row in rows:
        keys = ("us_alone", "us_both", "disk", "bucket")
        alone, both, disk, late = (row[key]["median"] for key in keys)
        counts = Counter(row["threads"])
        processes = counts.pop("processes")
        figures = f"{alone:12,.0f} {both:10,.0f} {disk:12,.0f} {late:10,.0f}"
        threads = f"{counts.total():9}: {dict(counts)}"
        print(f"{title(row):31}{figures}{processes:11}{threads}")


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/dask_modes.json."""
    command = ["python dask_modes.py", *flags]
    packages = ("dask", "distributed", "zarr", "numpy")
    save_rows(HERE / "results/dask_modes.json", command, rows, packages)


def main(argv: list[str] | None = None) -> list[dict] | dict:
    """Do what the flags ask for; return the rows."""
    args = parse(argv)
    if args.settings:
        print_lines(args.settings)
        return args.settings
    if args.dashboard:
        show_dashboard(args.dashboard)
        return []
    rows = []
    if args.save_results or not args.memory:
        cases = [{"mode": mode} for mode in args.modes]
        if args.modes == list(MODES):
            for count in COUNTS:
                more = {"threads_set": count, "zarr_threads": count}
                cases.append({"mode": "threads"} | more)
        rows += compare(cases, args)
        show(rows)
    if args.save_results or args.memory:
        outgrown = outgrow()
        for row in outgrown:
            print(f"{MODES[row['mode']]:30}{row['outcome']}")
        rows += outgrown
    if args.save_results:
        save(rows, sys.argv[1:] if argv is None else argv)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags, `settings` worked out; exits with code 2 and a remedy if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    known = ", ".join(MODES)
    text = f"some of {known} (default: all)"
    add("--modes", nargs="+", default=list(MODES), metavar="MODE", help=text)
    add("--repeats", type=int, default=1, help="rounds, all modes in turn (default: 1)")
    add("--tasks", type=int, default=100, help="to time the overhead (default: 100)")
    add("--seconds", type=float, default=0.3, help="of each read test (default: 0.3)")
    text = "instead, run tasks that exceed a memory limit; takes minutes"
    add("--memory", action="store_true", help=text)
    names = ("GPUS", "CORES", "GB")
    text = "instead, print the settings for a machine"
    add("--settings", type=int, nargs=3, metavar=names, help=text)
    text = "instead, run a cluster to see its dashboard"
    add("--dashboard", type=float, metavar="SECONDS", help=text)
    text = "measure everything; write results/dask_modes.json"
    add("--save-results", action="store_true", help=text)
    args = parser.parse_args(argv)
    for mode in args.modes:
        if mode not in MODES:
            parser.error(f"--modes {mode}: give some of {known}")
    for name in ("repeats", "tasks", "seconds", "dashboard"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} {value}: give a number above 0")
    if args.save_results and args.modes != list(MODES):
        parser.error("--save-results: measures all modes; leave out --modes")
    if args.settings:
        try:
            args.settings = settings(*args.settings)
        except ValueError as error:
            parser.error(f"--settings {error}")
    elif not WINDS.exists():
        reason = f"../01_setup/data/{WINDS.name} is missing"
        parser.error(f"{reason}: run this in a copy of the whole book")
    return args


if __name__ == "__main__":
    import dask_modes  # by its name, under which other processes find what is in it

    dask_modes.main()
