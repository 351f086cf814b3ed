"""Read arrays with whatever Zarr this Python has, from its release 2 on; zarr_versions.py runs it.

The cases come as JSON on stdin, the rows go as JSON to stdout. Nothing of the chapter is
imported, because an old Zarr's environment has nothing but Zarr and its clients.
"""

import json
import sys
import urllib.request
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time

import numcodecs.blosc
import numpy as np
import zarr

BATCH = 32
LEAST = 8  # reads of a case
PACKAGES = ("zarr", "numcodecs", "obstore", "s3fs")
# s3fs by default asks for a size before each object, and keeps ten connections.
TUNED = {"max_concurrency": 1, "config_kwargs": {"max_pool_connections": 64}}
RELEASE = int(zarr.__version__.split(".")[0])
Place = tuple[int, slice, slice]


def main() -> None:
    """Time the cases that the Zarr here can read."""
    asked = json.load(sys.stdin)
    numcodecs.blosc.use_threads = False  # as Zarr 3 has it; Zarr 2 would use all cores
    versions = list_versions()
    rows = []
    with ThreadPoolExecutor(BATCH) as threads:
        for case in asked["cases"]:
            if case["client"] == "obstore" and RELEASE < 3:
                continue
            if case["zarr_format"] > RELEASE:
                continue
            array = open_array(case, asked["folder"], asked["server"])
            found = measure(array, case["way"], asked, threads)
            rows.append(case | versions | found)
    json.dump(rows, sys.stdout)


def list_versions() -> dict[str, str]:
    """Of the packages that are here, and the pipeline if Zarr has several."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if RELEASE > 2:
        path = zarr.config.get("codec_pipeline.path")
        versions["pipeline"] = path.rpartition(".")[2]
    return versions


def open_array(case: dict, folder: str, server: str):
    """The array of a case, by its client. `server` is the address of an S3 server."""
    name = case["key"]
    if case["client"] == "disk":
        return zarr.open_array(str(Path(folder, name)), mode="r")
    url = f"s3://{Path(folder).name}/{name}"
    if case["client"].startswith("s3fs"):
        options = {"anon": True, "endpoint_url": server}
        if case["client"] == "s3fs, tuned":
            options |= TUNED
        return zarr.open_array(url, mode="r", storage_options=options)
    from obstore.store import from_url
    from zarr.storage import ObjectStore

    http = {"allow_http": True}
    store = from_url(url, endpoint=server, skip_signature=True, client_options=http)
    return zarr.open_array(ObjectStore(store, read_only=True), mode="r")


def measure(array, way: str, asked: dict, threads: ThreadPoolExecutor) -> dict:
    """Read for some seconds; what a read took, and what it asked of the server."""
    read, at_once = ways_of(array, threads)[way]
    places = draw_places(array.shape, asked["patch"], asked["round"])
    checksum = zlib.crc32(np.stack([read(places[:at_once])]))  # this connects, too
    before = count(asked["server"])
    busy = process_time()
    began = perf_counter()
    done = 0
    while perf_counter() - began < asked["seconds"] or done < LEAST:
        first = done % len(places)
        read(places[first : first + at_once])
        done += at_once
    took = perf_counter() - began
    busy = process_time() - busy
    requests, size = count(asked["server"]) - before
    return {
        "crc32": checksum,
        "reads_per_second": done / took,
        "cpu_ms": 1e3 * busy / done,
        "requests": requests / done,
        "mb": size / done / 1e6,
    }


def ways_of(
    array, threads: ThreadPoolExecutor
) -> dict[str, tuple[Callable[[list[Place]], object], int]]:
    """How to read places, and how many of them at once."""
    return {
        "a patch": (lambda places: array[places[0]], 1),
        "a map": (lambda places: array[places[0][0]], 1),
        "patches at once": (
            lambda places: list(threads.map(array.__getitem__, places)),
            BATCH,
        ),
    }


def draw_places(shape: tuple[int, ...], patch: int, seed: int) -> list[Place]:
    """Of some batches, the same for every Zarr."""
    random = np.random.default_rng(seed)
    times, height, width = shape
    places = []
    for _ in range(8 * BATCH):
        time = int(random.integers(times))
        row = int(random.integers(height - patch + 1))
        column = int(random.integers(width - patch + 1))
        rows = slice(row, row + patch)
        places.append((time, rows, slice(column, column + patch)))
    return places


def count(server: str) -> np.ndarray:
    """Requests and bytes of the server so far, (2,)."""
    with urllib.request.urlopen(f"{server}/_counts") as reply:
        answered = json.load(reply)
    return np.array([answered["requests"], answered["bytes"]])


if __name__ == "__main__":
    main()
