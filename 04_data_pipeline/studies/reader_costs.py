"""What a reader brings, and what it costs: time, requests, CPU and memory."""

import resource
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from time import perf_counter

import numpy as np

from command_line import make_location
from ending import silence
from options import Options, parse_options
from studies.measuring import children, cpu_seconds
from studies.readers import READERS
from studies.server import Server
from studies.tree_memory import TreeMemory
from task import make_data


def measure(
    name: str, server: Server, flags: list[str], seconds: float
) -> dict[str, float]:
    """Take a reader's batches for some seconds, and before that until it has filled up.

    Then for half as long again, while memory is looked at.
    """
    silence()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    reader = READERS[name]
    if reader.package:
        import_module(reader.package)
    options = parse_options("", flags)
    options, data = make_data(options, make_location(options))
    figures = {"memory_before_mb": peak_memory_mb()}

    began = perf_counter()
    batches = iter(reader.read(options, data))
    next(batches)
    figures["first_batch_s"] = perf_counter() - began

    per_round = batches_per_round(options)
    take_batches(batches, per_round, seconds / 5)
    figures |= time_batches(batches, server, options.batch_size, per_round, seconds)
    figures["peak_memory_mb"] = peak_memory_mb()
    with TreeMemory() as tree:
        take_batches(batches, per_round, seconds / 2)
    figures["tree_memory_mb"] = tree.peak_mb
    return figures


def batches_per_round(options: Options) -> int:
    """After so many batches all begins anew: slots and items have used up their maps."""
    maps = max(options.shuffle_slots, options.batch_size)
    return max(1, maps * options.patches_per_block // options.batch_size)


def time_batches(
    batches: Iterator, server: Server, size: int, per_round: int, seconds: float
) -> dict[str, float]:
    """Rates, and the costs of a sample, of whole rounds."""
    began = perf_counter()  # before the counts: a loader reads ahead meanwhile
    before = np.append(server.counts(), cpu_seconds())
    samples = size * take_batches(batches, per_round, seconds)
    took = perf_counter() - began
    spent = np.append(server.counts(), cpu_seconds()) - before
    requests, bytes_sent, server_cpu, client_cpu = spent.tolist()
    return {
        "samples_per_second": samples / took,
        "mb_per_second": bytes_sent / 1e6 / took,
        "requests_per_sample": requests / samples,
        "bytes_per_sample": bytes_sent / samples,
        "client_cpu_ms": 1e3 * client_cpu / samples,
        "server_cpu_ms": 1e3 * server_cpu / samples,
    }


def take_batches(batches: Iterator, per_round: int, seconds: float) -> int:
    """Take whole rounds of batches for at least so many seconds; return how many."""
    began = perf_counter()
    taken = 0
    while taken == 0 or perf_counter() - began < seconds:
        for _ in range(per_round):
            next(batches)
        taken += per_round
    return taken


def peak_memory_mb() -> float:
    """This process's peak, and what its workers hold, with what they share for each."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there
    size = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for child in children():
        size += child.memory_info().rss
    return size / 1e6
