"""Appendix: Dask's modes: what a task costs, how fast they read, how many threads there are, and what to set.

    uv run python dask_modes.py                         # two ranks, each mode in turn: half a minute
    uv run python dask_modes.py --repeats 5             # and again, for medians
    uv run python dask_modes.py --memory                # a task that outgrows its worker's memory_limit: minutes
    uv run python dask_modes.py --settings 8 20 160     # the lines for 8 GPUs, 20 cores and 160 GB
    uv run python dask_modes.py --dashboard 60          # a cluster at work for so many seconds, to look at

You should see that a task costs some tenths of a millisecond, and several times that in a cluster, that from a local
disk no mode reads faster than Zarr by itself, and that each layer brings threads of its own.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import date
from importlib.metadata import version
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

HERE = Path(__file__).parent
WINDS = HERE.parent / "01_setup/data/navy_winds.nc"
CHUNKS, PATCH, BATCH = (
    (12, 73, 144),
    64,
    8,
)  # a year of whole maps, 0.5 MB; cells; patches
RANKS, THREADS = 2, 2  # Dask's, of each rank
COUNTS = 1, 4, 16  # Dask's threads and Zarr's, in the study of too many
LATENCY = 0.01  # seconds, of each chunk
MODES = {  # what it says in the table
    "zarr": "no Dask",
    "pool": "no Dask, a ThreadPoolExecutor",
    "synchronous": "synchronous",
    "threads": "threads",
    "inside": "distributed in the process",
    "private": "a private cluster each",
    "shared": "a cluster that they share",
}
LIMIT_MB, TASK_MB = 400, 600  # of the worker, and what the task takes
LIMITED = {"memory_limit": f"{LIMIT_MB}MB", "n_workers": 1, "threads_per_worker": 1}
QUIET = {
    "dashboard_address": ":0",
    "silence_logs": logging.CRITICAL,
}  # any free port; None would take 8787


class Bucket(WrapperStore):
    """A store on disk whose chunks come late, as if from a bucket."""

    async def get(self, key: str, *args, **kwargs):
        await asyncio.sleep(LATENCY * ("/c/" in key))
        return await self._store.get(key, *args, **kwargs)


def write_store(path: Path) -> None:
    """The winds, u and v, as Zarr writes by default: Zstandard, and here a year in each chunk."""
    with xr.open_dataset(WINDS) as winds:
        encoding = {name: {"chunks": CHUNKS} for name in winds.data_vars}
        winds.to_zarr(path, encoding=encoding, consolidated=False)


# ------------------------------------------------------------------------------------------- in a rank


class Rank:
    """One of the processes that train: it makes tasks, and reads batches of patches, in one of the modes."""

    def __init__(
        self,
        mode: str,
        path: str,
        address: str | None = None,
        threads=THREADS,
        zarrs=None,
    ):
        self.mode, self.closing, self.client = mode, ExitStack(), None
        limit_of_zarr = zarr.config.set({"threading.max_workers": zarrs})
        self.closing.enter_context(
            limit_of_zarr
        )  # in time: Zarr makes its pool as it first reads
        self.generator = np.random.default_rng(0)
        if mode in (
            "inside",
            "private",
            "host",
        ):  # the host has the workers of all ranks
            workers = {
                "n_workers": RANKS if mode == "host" else 1,
                "threads_per_worker": threads,
            }
            limit = (
                {"memory_limit": 0} if mode == "inside" else {}
            )  # it would count all that the rank holds
            cluster = LocalCluster(
                processes=mode != "inside", **workers, **limit, **QUIET
            )
            address = self.closing.enter_context(cluster).scheduler_address
        if address:
            self.client = self.closing.enter_context(Client(address))
        self.options = {"scheduler": self.client or mode, "num_workers": threads}
        self.pool = self.closing.enter_context(ThreadPoolExecutor(threads))
        self.stores = LocalStore(path), Bucket(LocalStore(path))

    def overhead(self, tasks: int) -> float:
        """Microseconds that Dask adds to each of so many calls. Each is a result by itself: none can be fused."""
        began = time.perf_counter()
        plain = [nothing(number) for number in range(tasks)]
        ended = time.perf_counter()
        if self.mode in ("zarr", "pool"):
            found = (
                list(self.pool.map(nothing, range(tasks)))
                if self.mode == "pool"
                else plain
            )
        else:  # keys of their own for each call, so that a cluster computes them anew
            found = dask.compute(
                *(dask.delayed(nothing)(n) for n in range(tasks)), **self.options
            )
        both = time.perf_counter() - ended
        assert list(found) == plain
        return 1e6 * (both - (ended - began)) / tasks if self.mode != "zarr" else 0.0

    def read(self, slow: bool, seconds: float) -> float:
        """Patches a second, in batches, each read as a whole."""
        group = zarr.open_group(self.stores[slow], mode="r")
        fields = [group["eastward_wind"], group["northward_wind"]]
        if self.mode not in ("zarr", "pool"):
            fields = [da.from_zarr(field) for field in fields]
        batches, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds or not batches:
            years = self.generator.permutation(fields[0].shape[0] // 12)[
                :BATCH
            ]  # no two in one chunk
            rooms = 12, *np.subtract(fields[0].shape[1:], PATCH - 1)
            corners = self.generator.integers(rooms, size=(BATCH, 3))
            self.batch(fields, corners + np.outer(years, [12, 0, 0]))
            batches += 1
        return batches * BATCH / (time.perf_counter() - began)

    def batch(self, fields: list, corners: np.ndarray) -> np.ndarray:
        """Patches of all fields at these times, rows and columns: (patch, field, row, column)."""

        def cut(corner: np.ndarray) -> list:
            t, y, x = map(int, corner)
            return [field[t, y : y + PATCH, x : x + PATCH] for field in fields]

        if self.mode in ("zarr", "pool"):
            return np.stack(
                list((map if self.mode == "zarr" else self.pool.map)(cut, corners))
            )
        return np.stack(
            dask.compute([cut(corner) for corner in corners], **self.options)[0]
        )

    def threads(self) -> dict:
        """Processes and threads of this rank and of all that it started, the latter by what they are for."""
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
    """The threads of this process by what they are for; those that Python does not know are the libraries'."""
    kinds = {
        "MainThread": "main",
        "asyncio": "zarr",
        "zarr": "zarr",
        "ThreadPool": "tasks",
    }
    kinds["Dask-Default"] = "tasks"
    names = [thread.name for thread in threading.enumerate()]
    found = Counter(
        next((kinds[k] for k in kinds if k in name), "distributed") for name in names
    )
    return found + Counter(native=psutil.Process().num_threads() - len(names))


class Remote:
    """A rank in a process of its own; a call returns a future."""

    rank: Rank  # in that process

    def __init__(self, *arguments: object):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["dask.array", "distributed", "xarray", "zarr"]
        )  # once for all
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


# ------------------------------------------------------------------------------------------- studies


def spread(values: list[float]) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values)}


def compare(cases: list[dict], args: argparse.Namespace) -> list[dict]:
    """Both ranks in each of the cases, in turn and several times: a row for each case."""
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory()) + "/winds.zarr"
        write_store(Path(path))

        def remote(*arguments: object) -> Remote:
            found = Remote(*arguments)
            stack.callback(found.close)
            return found

        teams, found = [], [[] for _ in cases]
        for case in cases:
            host = [remote("host", path)] if case["mode"] == "shared" else []
            address = host[0]("address").result() if host else None
            own = case.get("threads_set", THREADS), case.get("zarr_threads")
            teams.append(
                (
                    [remote(case["mode"], path, address, *own) for _ in range(RANKS)],
                    host,
                )
            )

        def both(ranks: list[Remote], *call: object) -> list:
            return [answer.result() for answer in [rank(*call) for rank in ranks]]

        for number in range(
            args.repeats + 1
        ):  # the first time makes pools, fills caches, and does not count
            seconds = args.seconds if number else 0.0
            for runs, (ranks, _) in zip(found, teams):
                run = {"us_alone": ranks[0]("overhead", args.tasks).result()}
                run["us_both"] = sum(both(ranks, "overhead", args.tasks)) / RANKS
                run["disk"], run["bucket"] = (
                    sum(both(ranks, "read", slow, seconds)) for slow in (0, 1)
                )
                runs += [run] if number else []
        rows = []
        for case, runs, (ranks, host) in zip(cases, found, teams):
            counts = sum(map(Counter, both([*ranks, *host], "threads")), Counter())
            figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
            rows.append(case | figures | {"threads": dict(counts)})
    return rows


def hold(megabytes: int, seconds: float) -> int:
    """A task that takes so much memory for a while."""
    array = np.ones(megabytes * 125_000)
    time.sleep(seconds)
    return array.nbytes


def outgrow_threads() -> str:
    """What becomes of a task of TASK_MB in the mode `threads`."""
    taken = dask.delayed(hold)(TASK_MB, 1).compute(scheduler="threads")
    return f"done, {taken / 1e6:.0f} MB: there is no limit"


def outgrow_inside() -> str:
    """What a worker in this process does when the process holds TASK_MB that are not Dask's."""
    own = np.ones(TASK_MB * 125_000)
    with (
        LocalCluster(processes=False, **LIMITED, **QUIET) as cluster,
        Client(cluster) as client,
    ):
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
        print(
            f"{number} of {len(OUTGROW)}: {MODES[mode]}: {TASK_MB} MB, limit {LIMIT_MB} MB ...",
            flush=True,
        )
        rows.append({"mode": mode, "outcome": study()})
    return rows


def show_dashboard(seconds: float) -> None:
    """Keep a cluster at work, and say where to look."""
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder) / "winds.zarr")
        workers = {"n_workers": 2, "threads_per_worker": 2}
        with LocalCluster(**workers, **QUIET) as cluster, Client(cluster):
            print(cluster.dashboard_link, flush=True)
            began = time.perf_counter()
            group = zarr.open_group(
                Bucket(LocalStore(folder + "/winds.zarr")), mode="r"
            )
            while time.perf_counter() - began < seconds:
                u, v = (
                    da.from_zarr(group[name])
                    for name in ("eastward_wind", "northward_wind")
                )
                da.sqrt(u**2 + v**2).mean().compute()


def settings(gpus: int, cores: int, memory_gb: float) -> dict[str, float]:
    """What fits a machine with a rank for each GPU: busy threads = ranks x (1 + processes x threads) <= cores.

    ValueError if a rank has no core.
    """
    if gpus < 1 or cores < gpus or not memory_gb > 0:
        had = f"{gpus} GPUs, {cores} cores, {memory_gb} GB"
        raise ValueError(f"{had}: give a GPU, a core for each, and some memory")
    share = (
        cores // gpus
    )  # of a rank: a core for its main thread, the rest to make batches
    rest, found = max(1, share - 1), {"gpus": gpus, "share": share}
    # While one thread waits for its bytes or for Python's lock, the other decodes.
    found["zarr_threads"] = min(2, rest)
    found["num_workers"] = (share - 1) // found["zarr_threads"]
    found["busy"] = gpus * (1 + found["num_workers"] * found["zarr_threads"])
    found["threads"] = min(4, rest)  # of a Dask process: more wait for Python's lock
    found["processes"] = rest // found["threads"]
    half = memory_gb / 2  # ranks and the page cache have the other half
    found["limit_gb"] = half / (gpus * found["processes"])
    found["alone"], found["alone_threads"] = nprocesses_nthreads(
        cores
    )  # Dask's own choice
    found["alone_limit_gb"] = 0.8 * memory_gb / found["alone"]
    return found


def limit(gigabytes: float) -> str:
    """Rounded down, so that the sum stays within; in MB where a GB is too coarse, for "0GB" is no limit at all."""
    return f"{int(gigabytes)}GB" if gigabytes >= 10 else f"{int(1000 * gigabytes)}MB"


def lines(found: dict[str, float]) -> dict[str, list[str]]:
    """The same as lines to copy, for each way to work. The counts of threads are for data on a disk."""
    f = {
        name: limit(value) if name.endswith("_gb") else value
        for name, value in found.items()
    }
    zarrs = 'zarr.config.set({{"threading.max_workers": {}}})'.format
    cluster = (
        'LocalCluster(n_workers={}, threads_per_worker={}, memory_limit="{}"'.format
    )
    private = (
        cluster(f["processes"], f["threads"], f["limit_gb"])
        + ', dashboard_address=":0")'
    )
    shared = cluster(f["gpus"] * f["processes"], f["threads"], f["limit_gb"]) + ")"
    alone = cluster(f["alone"], f["alone_threads"], f["alone_limit_gb"]) + ")"
    environment = f"ZARR_THREADING__MAX_WORKERS={f['threads']}"
    return {
        "GPUs train": ["OMP_NUM_THREADS=1"],
        "no Dask": [
            f"ZARR_THREADING__MAX_WORKERS={f['zarr_threads']}",
            f"DataLoader(..., num_workers={f['num_workers']})",
        ],
        "synchronous": ["DASK_SCHEDULER=synchronous"],
        "threads": [
            f'dask.config.set(scheduler="threads", num_workers={f["threads"]})',
            zarrs(f["threads"]),
        ],
        "private": [environment, private],
        "shared": [environment, shared, "Client(address)  # in each rank"],
        "before training": [
            environment.replace(f"={f['threads']}", f"={f['alone_threads']}"),
            alone,
        ],
    }


def title(row: dict) -> str:
    return MODES[row["mode"]] + (
        f", {row['threads_set']} of each" if "threads_set" in row else ""
    )


def show(rows: list[dict]) -> None:
    """Print a line for each mode: medians, and threads by what they are for."""
    print(f"{'':31}us a task, alone / both  patches/s, disk / late  processes  threads")
    for row in rows:
        alone, both, disk, late = (
            row[key]["median"] for key in ("us_alone", "us_both", "disk", "bucket")
        )
        counts = Counter(row["threads"])
        print(
            f"{title(row):31}{alone:12,.0f} {both:10,.0f} {disk:12,.0f} {late:10,.0f}",
            end="",
        )
        print(f"{counts.pop('processes'):11}{counts.total():9}: {dict(counts)}")


def save(rows: list[dict], flags: list[str]) -> None:
    """Write results/dask_modes.json."""
    cpu, facts = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if facts.exists():
        cpu = facts.read_text().partition("model name\t: ")[2].split("\n")[0] or cpu
    memory = round(psutil.virtual_memory().total / 2**30)
    results = {
        "command": " ".join(["uv run python dask_modes.py", *flags]),
        "date": str(date.today()),
    }
    results["machine"] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "gpu": None,
    }
    names = ("dask", "distributed", "zarr", "numpy")
    results["versions"] = {"python": platform.python_version()} | {
        name: version(name) for name in names
    }
    path = HERE / "results/dask_modes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results | {"rows": rows}) + "\n")


def main(argv: list[str] | None = None) -> list[dict] | dict:
    """Do what the flags ask for; return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--modes",
        nargs="+",
        default=list(MODES),
        metavar="MODE",
        help=f"of {', '.join(MODES)} (default: all)",
    )
    add("--repeats", type=int, default=1, help="rounds, all modes in turn (default: 1)")
    add("--tasks", type=int, default=100, help="whose overhead is timed (default: 100)")
    add("--seconds", type=float, default=0.3, help="of each reading (default: 0.3)")
    add(
        "--memory",
        action="store_true",
        help="a task that outgrows its worker instead; takes minutes",
    )
    add(
        "--settings",
        type=int,
        nargs=3,
        metavar=("GPUS", "CORES", "GB"),
        help="the lines for a machine instead",
    )
    add(
        "--dashboard",
        type=float,
        metavar="SECONDS",
        help="keep a cluster at work instead",
    )
    add(
        "--save-results",
        action="store_true",
        help="all measurements, as results/dask_modes.json",
    )
    args = parser.parse_args(argv)
    for mode in args.modes:
        if mode not in MODES:
            parser.error(f"--modes {mode}: give some of {', '.join(MODES)}")
    for name in ("repeats", "tasks", "seconds", "dashboard"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name} {getattr(args, name)}: give a number above 0")
    if args.save_results and args.modes != list(MODES):
        parser.error("--save-results: measures all modes; leave out --modes")
    if args.settings:
        try:
            found = settings(*args.settings)
        except ValueError as error:
            parser.error(f"--settings {error}")
        for name, each in lines(found).items():
            print(
                *(f"{title:17}{line}" for title, line in zip([name, "", ""], each)),
                sep="\n",
            )
        return found
    if not WINDS.exists():
        parser.error(
            f"../01_setup/data/{WINDS.name} is missing: run this in a copy of the whole book"
        )
    if args.dashboard:
        show_dashboard(args.dashboard)
        return []
    rows = []
    if not args.memory or args.save_results:
        cases = [{"mode": mode} for mode in args.modes]
        if args.modes == list(MODES):
            cases += [
                {"mode": "threads", "threads_set": n, "zarr_threads": n} for n in COUNTS
            ]
        rows += compare(cases, args)
        show(rows)
    if args.memory or args.save_results:
        rows += (outgrown := outgrow())
        for row in outgrown:
            print(f"{MODES[row['mode']]:30}{row['outcome']}")
    if args.save_results:
        save(rows, sys.argv[1:] if argv is None else argv)
    return rows


if __name__ == "__main__":
    import dask_modes  # by its name, under which other processes find what is in it

    dask_modes.main()
