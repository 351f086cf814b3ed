"""What a bucket that throttles and breaks off costs: GETs that are repeated, and time."""

import json
import urllib.request
from time import perf_counter

from tqdm import tqdm

from results import spread
from studies.costs import TILES
from studies.server import LATENCIES, Server, serve
from studies.stores import SIZE, full_or_quick, store_flags
from studies.ways import draw_boxes, open_patches

# Shares of GETs that are answered 503, are reset, and end half-way.
FAULTS = (
    (0, 0, 0),
    (0.01, 0, 0),
    (0.05, 0, 0),
    (0.2, 0, 0),
    (0, 0.01, 0),
    (0, 0, 0.01),
)
FLAGS = ("--error-rate", "--reset-rate", "--truncate-rate")


def retries(repeats: int) -> list[dict]:
    """A row for each kind and share of faults. A GET that is answered 503 is not billed."""
    found: dict[tuple, list[dict]] = {rates: [] for rates in FAULTS}
    for repeat in tqdm(range(repeats), "faults", disable=None):
        for rates in FAULTS:
            flags = [each for pair in zip(FLAGS, rates) for each in pair]
            with serve(max(LATENCIES), *flags, "--seed", repeat) as server:
                found[rates].append(read_with_faults(server))
    rows = []
    for rates, runs in found.items():
        samples = sum(run["samples"] for run in runs)
        row = dict(zip(("error_rate", "reset_rate", "truncate_rate"), rates))
        for name in ("requests", "SlowDown", "bytes"):
            row[f"{name}_per_sample"] = sum(run[name] for run in runs) / samples
        rates_found = [run["samples"] / run["seconds"] for run in runs]
        rows.append(row | {"samples_per_second": spread(rates_found)})
    return rows


def read_with_faults(server: Server) -> dict:
    """Read batches for some seconds: samples, seconds, and what the server counted."""
    patches = open_patches(store_flags(TILES, server))
    boxes = draw_boxes(patches, SIZE["batch"])
    patches.reader.read_at_once(boxes)  # which connects
    before = count(server)
    began = perf_counter()
    batches = 0
    while perf_counter() - began < full_or_quick(4, 0.05):
        patches.reader.read_at_once(boxes)
        batches += 1
    seconds = perf_counter() - began
    after = count(server)
    run = {name: after[name] - before[name] for name in after}
    return run | {"samples": batches * SIZE["batch"], "seconds": seconds}


def count(server: Server) -> dict[str, int]:
    """Requests, bytes, and faults of each kind so far."""
    with urllib.request.urlopen(f"{server.address}/_counts") as reply:
        return json.load(reply)
