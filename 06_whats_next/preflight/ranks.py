"""What must be the same on all ranks: code, packages, options, data, clocks, checkpoints."""

import time
from collections.abc import Iterator
from dataclasses import asdict

from lightning.fabric import Fabric

from options import Options
from preflight.findings import Finding, gather
from tracking.run_record import describe_here, find_differences

# Options that may differ between ranks. Whether checkpoints are shared is tried out.
OWN = ("output_dir", "checkpoint_dir", "endpoint")
SECONDS = 1.0  # that clocks may differ by


def check_ranks(fabric: Fabric, options: Options) -> Iterator[Finding]:
    """Compare all ranks with rank 0. They have met, or this would not be called."""
    here = describe_here()
    mine = {
        "code": {"files": here["code"]["files"]},
        "versions": here["versions"],
        "options": {k: v for k, v in asdict(options).items() if k not in OWN},
    }
    yield compare_ranks(gather(fabric, mine))
    if fabric.world_size > 1:
        fabric.barrier()  # all read their clocks when it ends
        yield compare_clocks(gather(fabric, time.time()))


def compare_ranks(of_ranks: list[dict]) -> Finding:
    """Red if a rank has other code, packages or options than rank 0."""
    first = of_ranks[0]
    differences = []
    for rank, other in enumerate(of_ranks):
        for line in find_differences(first, other, tuple(first)):
            differences.append(f"rank {rank}: {line}")
    if not differences:
        packages = ", ".join(f"{name} {n}" for name, n in first["versions"].items())
        return Finding("versions", f"{packages}; ranks: {len(of_ranks)}")
    remedy = "uv sync --locked on each node, the same commit, the same command"
    return Finding("versions", "; ".join(differences), remedy)


def compare_clocks(clocks: list[float]) -> Finding:
    """Red if the ranks' clocks, read at the same moment, differ. In seconds."""
    apart = max(clocks) - min(clocks)
    text = f"{apart:.3f} s apart at most"
    if apart <= SECONDS:
        return Finding("clocks", text)
    slowest = clocks.index(min(clocks))
    fastest = clocks.index(max(clocks))
    who = f"rank {slowest} is behind rank {fastest}"
    remedy = "run an NTP client, such as chrony, on each node"
    return Finding("clocks", f"{text}: {who}", f"{remedy}: logs would mislead")
