"""Many blocks at once, by threads of this process or by Dask, and what is done to each."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from dask.distributed import Client, Worker, WorkerPlugin
from dask.system import CPU_COUNT

from conversion.layout import BLOCKS
from conversion.progress import Checksums, Record, sum_bytes, sum_maps
from conversion.reading_back import read_maps
from conversion.sources import Part, read_parts
from conversion.target import Target, connect, put_all
from errors import DataError, first_line

CHAPTER = Path(__file__).parent.parent


@dataclass(frozen=True)
class Pool:
    """Where functions run, and for how many of them work is kept ready."""

    executor: Executor
    threads: int = 0
    client: Client | None = None  # of Dask, which knows its threads

    def count(self) -> int:
        """How many run at once. A cluster is asked each time, because it may grow."""
        if self.client is None:
            return self.threads
        return max(1, sum(self.client.nthreads().values()))

    def run(self, function: Callable, tasks: Iterable[tuple]) -> Iterator[tuple]:
        """Each task, and what the function returns when it is called with it, in order.

        Twice as many tasks as run at once are under way, so that each thread finds its next
        one. No more than these, and their results, are in memory.
        """
        pending: deque[tuple[tuple, Future]] = deque()
        try:
            for task in tasks:
                pending.append((task, self.executor.submit(function, *task)))
                if len(pending) >= 2 * self.count():
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


@contextmanager
def open_pool(workers: int, scheduler: str | None) -> Iterator[Pool]:
    """Threads of this process, or so many processes of Dask, or a cluster that is running.

    DataError if the cluster cannot be reached.
    """
    if not workers and not scheduler:
        number = min(CPU_COUNT, BLOCKS)
        with ThreadPoolExecutor(number) as threads:
            yield Pool(threads, number)
        return
    how = {"address": scheduler}
    if not scheduler:
        how = {"n_workers": workers, "threads_per_worker": 1}
        how["dashboard_address"] = "127.0.0.1:0"
    try:
        client = Client(**how)
    except (OSError, ValueError) as error:
        reason = f"{first_line(error)}; give tcp://HOST:PORT of one that runs"
        raise DataError(f"--scheduler {scheduler}: {reason}") from error
    with client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        send_modules(client)
        with client.get_executor(pure=False) as executor:
            yield Pool(executor, client=client)


def send_modules(client: Client) -> None:
    """Give the workers the modules of this chapter, unless they find them by themselves."""
    found = client.run(find_spec, "conversion").values()
    if found and all(found):  # there may be no worker yet
        return
    archive = BytesIO()
    with ZipFile(archive, "w") as file:
        for path in [*CHAPTER.glob("*.py"), *CHAPTER.glob("conversion/*.py")]:
            file.write(path, path.relative_to(CHAPTER))

    class Modules(WorkerPlugin):  # defined here, so that it travels with its code
        def setup(self, worker: Worker) -> None:
            path = Path(worker.local_directory, "make_store.zip")
            path.write_bytes(archive.getvalue())
            sys.path.insert(0, str(path))

    client.register_plugin(Modules(), name="make_store")  # also for those to come


def read_block(target: Target, times: slice, parts: list[Part]) -> Checksums:
    """Read some times of the sources; return the checksums of their maps."""
    return {name: sum_maps(read_parts(parts, name)) for name in target.arrays}


def write_block(
    target: Target, times: slice, parts: list[Part], expected: Record
) -> Record:
    """Write some times, whole chunks or shards; return their checksums.

    If `parts` have fewer times, the first ones stay as they are in the store: an append
    completes a chunk. `expected` are the checksums of what was written before. DataError,
    and the field is not written, if a map differs from these.
    """
    store = connect(target.location)
    found = Record({}, {})
    for name in target.arrays:
        values = read_parts(parts, name)
        kept = times.stop - times.start - len(values)
        if kept:
            before = slice(times.start, times.start + kept)
            known = expected.maps[name][:kept]
            read = read_maps(target, store, name, before, known)
            values = np.concatenate([read, values])
        found.maps[name] = sum_maps(values)
        known = expected.maps.get(name, [])
        for number, (one, other) in enumerate(zip(known, found.maps[name])):
            if one != other:
                which = f"map {times.start + number} of {name}, counted from 0"
                reason = "is not what the store was made of"
                raise DataError(f"--source: {which}, {reason}; give those files")
        objects = target.encode(name, times, values)
        put_all(store, objects)
        found.objects[name] = [sum_bytes(each) for each in objects.values()]
    return found
