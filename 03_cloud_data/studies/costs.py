"""What a sample costs in requests, bytes, time and CPU, by layout and by way to read."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from time import perf_counter, process_time

import numpy as np
import psutil
from tqdm import tqdm

from options import VARIABLES
from results import spread
from studies.netcdf_files import ways_of_files
from studies.server import LATENCIES, Server, serve
from studies.stores import LAYOUTS, SIZE, full_or_quick, store_flags
from studies.ways import (
    Way,
    draw_boxes,
    open_patches,
    way_of_obstore,
    ways_of_asyncio,
    ways_of_zarr,
)

TILES = "128 x 128"
FAR = (100,)  # ms to the first byte of a bucket on another continent
QUIET = 0.1  # cores that other programs may take from a measurement
TRIES = 10  # to find a quiet moment
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
Case = tuple[Way, Server, float]  # and the server's milliseconds to the first byte


def patterns(repeats: int) -> list[dict]:
    """Every layout, way and latency."""
    cases: list[Case] = []
    with ExitStack() as stack:
        for latency in (*LATENCIES, *full_or_quick(FAR, ())):
            server = stack.enter_context(serve(latency))
            ways = ways_of_files(server)
            for layout in LAYOUTS:
                patches = open_patches(store_flags(layout, server))
                ways += ways_of_zarr(layout, patches.reader)
                if layout == TILES:
                    ways += ways_of_asyncio(layout, patches.reader)
            cases += [(way, server, latency) for way in ways]
        return compare(cases, draw_boxes(patches, 2 * SIZE["batch"]), repeats)


def server_alone(repeats: int) -> list[dict]:
    """What a client gets that does nothing but GETs, beside what train.py asks for."""
    cases: list[Case] = []
    with ExitStack() as stack:
        for latency in LATENCIES:
            server = stack.enter_context(serve(latency))
            for layout in LAYOUTS:
                patches = open_patches(store_flags(layout, server))
                boxes = draw_boxes(patches, 2 * SIZE["batch"])
                alone = way_of_obstore(layout, patches.reader, boxes)
                _, at_once = ways_of_zarr(layout, patches.reader)
                cases += [(alone, server, latency), (at_once, server, latency)]
        return compare(cases, boxes, repeats)


def compare(cases: list[Case], boxes: list[dict], repeats: int) -> list[dict]:
    """Measure all cases in turn, several times; a row for each."""
    runs: list[list[dict]] = [[] for _ in cases]
    for _ in range(repeats):
        for number, (way, server, _) in enumerate(tqdm(cases, "ways", disable=None)):
            runs[number].append(measure_quietly(way, server, boxes))
    rows = []
    for (way, _, latency), of_way in zip(cases, runs):
        labels = {"layout": way.layout, "way": way.name, "latency_ms": latency}
        rows.append(labels | summarise(of_way))
    return rows


def measure_quietly(way: Way, server: Server, boxes: list[dict]) -> dict:
    """Measure while other programs leave the CPU alone, or take the quietest of some tries."""

    def noise(found: dict) -> float:
        return found["others"] / found["seconds"]

    tries = []
    for _ in range(TRIES):
        tries.append(measure(way, server, boxes))
        if full_or_quick(noise(tries[-1]), 0) < QUIET:
            break
    return min(tries, key=noise)


def measure(way: Way, server: Server, boxes: list[dict]) -> dict:
    """Read the boxes again and again for some seconds; a way that is slow is cut short.

    Returns samples, seconds, the milliseconds of each GET, requests and bytes by the
    server's count, and the CPU seconds of this process, of the server and of all others.
    """
    parts = []
    for start in range(0, len(boxes), way.at_once):
        parts.append(boxes[start : start + way.at_once])
    way.read(parts[0])  # which connects
    way.log.clear()
    counts = server.counts()
    busy = busy_seconds()
    client = process_time()
    began = perf_counter()
    samples = 0
    least = full_or_quick(1.0, 0.02)
    for number, part in enumerate(cycle(parts), 1):
        way.read(part)
        samples += len(part)
        seconds = perf_counter() - began
        is_whole = number % len(parts) == 0
        if seconds > (least if is_whole else 4 * least):
            break
    client = process_time() - client
    requests, size, of_server = (server.counts() - counts).tolist()
    others = busy_seconds() - busy - client - of_server
    return {
        "samples": samples,
        "seconds": seconds,
        "get_ms": [1e3 * (get.ended - get.began) for get in way.log],
        "requests": requests,
        "bytes": size,
        "client": client,
        "server": of_server,
        "others": max(0.0, others),
    }


def busy_seconds() -> float:
    """CPU seconds that all programs have used: user, nice and system."""
    return sum(psutil.cpu_times()[:3])


def summarise(runs: list[dict]) -> dict:
    """The row of a way that was measured several times."""

    def total(name: str) -> float:
        return sum(run[name] for run in runs)

    def rate(amount: Callable[[dict], float]) -> dict[str, float]:
        return spread([amount(run) / run["seconds"] for run in runs])

    samples = total("samples")
    seconds = total("seconds")
    size = total("bytes") / samples
    used = len(VARIABLES) * SIZE["patch"] ** 2 * np.dtype("float32").itemsize
    row = {
        "samples": samples,
        "samples_per_second": rate(lambda run: run["samples"]),
        "gets_per_second": rate(lambda run: run["requests"]),
        "mb_per_second": rate(lambda run: run["bytes"] / 1e6),
        "requests_per_sample": total("requests") / samples,
        "bytes_per_sample": size,
        "bytes_per_byte_used": size / used,
    }
    for name in ("client", "server"):
        row[f"{name}_cpu_ms"] = 1e3 * total(name) / samples
        row[f"{name}_cores"] = total(name) / seconds
    row["other_cores"] = total("others") / seconds
    ours = row["client_cores"] + row["server_cores"]
    row["share_of_all_cores"] = ours / os.cpu_count()
    gets = np.concatenate([run["get_ms"] for run in runs])
    if gets.size:
        values = np.percentile(gets, list(PERCENTILES.values()))
        row["get_ms"] = dict(zip(PERCENTILES, values.tolist()))
    return row
