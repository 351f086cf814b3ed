"""Whether a worker's first batch comes, by how the worker is started."""

import multiprocessing
import pickle
from time import perf_counter

from torch.utils.data import DataLoader
from tqdm import tqdm

from data import PatchDataset
from studies.costs import TILES
from studies.server import LATENCIES, serve
from studies.stores import store_flags
from studies.ways import open_patches
from workers import PRELOADED

LIMIT = 20  # seconds to wait for the first batch
SAMPLES = 8


def start_methods(repeats: int) -> list[dict]:
    """A row for each way to start a worker after its parent has read from a bucket."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with serve(max(LATENCIES)) as server:
        flags = store_flags(TILES, server, "--batch-size", SAMPLES)
        patches = open_patches(flags)
        patches.read_batch([(0, 0)])  # obstore's threads are there from now on
        unopened = pickle.loads(pickle.dumps(patches))
        starts = {
            "fork": ("fork", patches),
            "fork, a store of its own": ("fork", unopened),
            "forkserver": ("forkserver", patches),
            "spawn": ("spawn", patches),
        }
        tries: dict[str, list] = {name: [] for name in starts}
        for _ in range(repeats):
            for name, start in tqdm(starts.items(), "start methods", disable=None):
                tries[name].append(first_batch(*start))
    rows = []
    for name, of_start in tries.items():
        seconds, errors = zip(*of_start)
        row = {
            "start": name,
            "tries": len(errors),
            "arrived": errors.count(None),
            "seconds": seconds,
            "error": next(filter(None, errors), None),
        }
        rows.append(row)
    return rows


def first_batch(method: str, patches: PatchDataset) -> tuple[float, str | None]:
    """Seconds to the first batch of a worker, and the error if it has not come in time."""
    began = perf_counter()
    batches = DataLoader(
        patches,
        batch_sampler=[[(0, k) for k in range(SAMPLES)]],
        num_workers=1,
        multiprocessing_context=method,
        timeout=LIMIT,
    )
    error = None
    try:
        next(iter(batches))
    except RuntimeError as late:
        error = str(late).splitlines()[0]
    return perf_counter() - began, error
