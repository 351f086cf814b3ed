"""Chapter 3's server for as long as a study runs, and what it has answered."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import psutil

from demo_store import CLOUD

BUCKETS = CLOUD / "outputs"
LATENCIES = (0, 30)  # ms to the first byte; a bucket in the same region has about 30
SERVERS: set[int] = set()  # process ids of those that run


class Server(NamedTuple):
    """A server that runs: its address and its process."""

    address: str
    pid: int

    def answered(self) -> dict[str, int]:
        """Requests, bytes, and faults of each kind so far."""
        with urllib.request.urlopen(f"{self.address}/_counts") as reply:
            return json.load(reply)

    def counts(self) -> np.ndarray:
        """Requests, bytes and CPU seconds so far, (3,)."""
        answered = self.answered()
        times = psutil.Process(self.pid).cpu_times()
        return np.array(
            [answered["requests"], answered["bytes"], times.user + times.system]
        )


@contextmanager
def serve(latency_ms: float, *faults: object) -> Iterator[Server]:
    """Serve the buckets in chapter 3's outputs/ while the block runs, with these flags."""
    command = [sys.executable, CLOUD / "local_s3.py", "--until-stdin-ends"]
    command += ["--folder", BUCKETS, "--latency-ms", *map(str, (latency_ms, *faults))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        SERVERS.add(process.pid)
        try:
            address = process.stdout.readline().strip()
            yield Server(address, process.pid)
        finally:
            process.kill()
            SERVERS.discard(process.pid)
