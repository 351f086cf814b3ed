"""The processes that prepare batches: how they start and end."""

import gc
import multiprocessing
import os
from threading import Thread

from errors import refuse

# Imported once, by the server that all workers are forked from. No module of this folder may
# be among them: in a process that has seen another folder's it would be that.
PRELOADED = [
    "lightning.pytorch",
    "matplotlib.figure",
    "obstore",
    "scipy.interpolate",
    "torchmetrics",
    "xarray",
    "zarr",
]


def worker_options(num_workers: int, start_method: str) -> dict:
    """How a DataLoader is told to start its workers; nothing if it has none."""
    if not num_workers:
        return {}
    multiprocessing.set_forkserver_preload(PRELOADED)
    return {
        "num_workers": num_workers,
        "multiprocessing_context": start_method,
        "worker_init_fn": start_worker,
    }


def check_start_method(method: str) -> None:
    """Refuse fork, which copies the locks that threads of other libraries hold."""
    if method not in ("forkserver", "spawn"):
        reason = "fork copies no threads, such as those of gloo, so workers would hang"
        refuse(f"--start-method {method}: {reason}; give forkserver or spawn")


def start_worker(worker: int) -> None:
    """Prepare a worker's process."""
    gc.freeze()  # or the collector stops all reads for 0.4 s, to look at what is imported
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its rank is killed.

    torch watches the forkserver instead, which lives as long as its workers.
    """
    multiprocessing.parent_process().join()
    os._exit(1)
