"""The processes that prepare batches: how they start and end."""

import gc
import multiprocessing
import os
from threading import Thread


def start_worker(worker: int) -> None:
    """Prepare a worker's process."""
    gc.freeze()  # else the collector stops all reads for 0.4 s, to look at what is imported
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its rank is killed.

    torch watches the forkserver instead, which lives as long as its workers.
    """
    multiprocessing.parent_process().join()
    os._exit(1)
