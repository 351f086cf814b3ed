"""What a bucket that throttles and breaks off costs: GETs that are repeated, and time."""

from time import perf_counter

from tqdm import tqdm

from results import spread
from studies.costs import TILES
from studies.server import LATENCIES, Server, serve
from studies.stores import SIZE, full_or_quick, store_flags
from studies.ways import draw_boxes, open_patches

# Shares of GETs that are answered 503, are reset, and end half-way.
FAULTS = {
    "error_rate": (0, 0.01, 0.05, 0.2),
    "reset_rate": (0.01,),
    "truncate_rate": (0.01,),
}


def retries(repeats: int) -> list[dict]:
    """A row for each kind and share of faults. A GET that is answered 503 is not billed."""
    cases = [(kind, share) for kind, shares in FAULTS.items() for share in shares]
    found: dict[tuple, list[dict]] = {case: [] for case in cases}
    for repeat in tqdm(range(repeats), "faults", disable=None):
        for kind, share in cases:
            flag = "--" + kind.replace("_", "-")
            with serve(max(LATENCIES), flag, share, "--seed", repeat) as server:
                found[kind, share].append(read_with_faults(server))
    return [summarise(*case, runs) for case, runs in found.items()]


def summarise(kind: str, share: float, runs: list[dict]) -> dict:
    """The row of a kind and share of faults."""
    row = dict.fromkeys(FAULTS, 0) | {kind: share}
    samples = sum(run["samples"] for run in runs)
    for name in ("requests", "SlowDown", "bytes"):
        counted = sum(run[name] for run in runs)
        row[f"{name}_per_sample"] = counted / samples
    speeds = [run["samples"] / run["seconds"] for run in runs]
    row["samples_per_second"] = spread(speeds)
    return row


def read_with_faults(server: Server) -> dict:
    """Read batches for some seconds: samples, seconds, and what the server counted."""
    patches = open_patches(store_flags(TILES, server))
    boxes = draw_boxes(patches, SIZE["batch"])
    patches.reader.read_at_once(boxes)  # which connects
    before = server.answered()
    began = perf_counter()
    batches = 0
    least = full_or_quick(4, 0.05)
    while perf_counter() - began < least:
        patches.reader.read_at_once(boxes)
        batches += 1
    seconds = perf_counter() - began
    after = server.answered()
    run = {"samples": batches * SIZE["batch"], "seconds": seconds}
    for name in after:
        run[name] = after[name] - before[name]
    return run
