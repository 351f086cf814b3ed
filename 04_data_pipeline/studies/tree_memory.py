"""The memory of a process and of all that it has started."""

from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from studies.measuring import children

SECONDS = 0.2  # between two looks
# PSS divides what several processes share among them; RSS counts it for each of them.
KIND = "PSS" if Path("/proc/self/smaps_rollup").exists() else "RSS"


class TreeMemory:
    """The most that all of them held at once, in MB, while the block runs.

    A thread looks again and again, which takes time from the others: time nothing meanwhile.
    """

    def __init__(self):
        self.peak_mb = 0.0
        self.stopped = Event()
        self.thread = Thread(target=self.watch, daemon=True)

    def __enter__(self) -> "TreeMemory":
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.stopped.set()
        self.thread.join()

    def watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, tree_mb())
            if self.stopped.wait(SECONDS):
                return


def tree_mb() -> float:
    """MB that this process and all that it has started hold now."""
    size = 0
    for process in [psutil.Process(), *children()]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            size += held_by(process)
    return size / 1e6


def held_by(process: psutil.Process) -> int:
    """Bytes of one process, see KIND."""
    if KIND == "RSS":
        return process.memory_info().rss
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0
