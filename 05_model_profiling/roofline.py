"""Chapter 5: the roofline: what this machine can do, and how far from it the step is.

    uv run python roofline.py                 # a minute
    uv run python roofline.py --save-results  # and write results/roofline.json and .png

You should see the machine's ceilings (arithmetic in each precision, memory), the share of
its ceiling that each step reaches (MFU), the seconds below which its FLOPs cannot fall, and
the seconds that its traffic takes at most.

FLOPs are torch's count: convolutions and matrix products, forward and backward. Bytes are
what the operators read and write. The memory moves at most that many: a cache holds some
from one operator to the next.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from errors import refuse
from fixes import milestones, time_in_turn
from precision import has_bf16
from results import RESULTS, save_rows, spread
from step import make_batch, wait_for

SIZE = {"batch": 32, "patch": 64, "matrix": 2048, "copy": 2**28, "repeats": 7}
QUICK = {"batch": 4, "patch": 16, "matrix": 128, "copy": 2**20, "repeats": 2}
COLOURS = {"float32": "#D55E00", "bfloat16": "#009E73"}


class TrafficCounter(TorchDispatchMode):
    """Adds up the bytes that operators read and write; views move none."""

    def __init__(self):
        super().__init__()
        self.bytes_moved = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            for value in tree_leaves((args, kwargs, result)):
                if isinstance(value, torch.Tensor):
                    self.bytes_moved += value.nbytes
        return result


def count(step: Callable[[], object]) -> dict[str, int]:
    """FLOPs and bytes of one step."""
    with FlopCounterMode(display=False) as flops:
        step()
    with TrafficCounter() as traffic:
        step()
    return {"flops": flops.get_total_flops(), "bytes": traffic.bytes_moved}


def fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of some calls, after two that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        wait_for(device)
        began = perf_counter()
        work()
        wait_for(device)
        seconds.append(perf_counter() - began)
    return min(seconds[2:])


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of a matrix product in each precision, and bytes/s of a copy in memory."""
    n = SIZE["matrix"]
    ceilings = {}
    kinds = {"float32": torch.float32}
    if has_bf16(device.type != "cpu"):
        kinds["bfloat16"] = torch.bfloat16
    for name, dtype in kinds.items():
        left = torch.randn(n, n, device=device).to(dtype)
        right = torch.randn(n, n, device=device).to(dtype)
        seconds = fastest(lambda: left @ right, device, SIZE["repeats"])  # noqa: B023
        ceilings[name] = 2 * n**3 / seconds
    source = torch.ones(SIZE["copy"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = fastest(lambda: target.copy_(source), device, SIZE["repeats"])
    ceilings["memory"] = 2 * source.nbytes / seconds  # read and written
    return ceilings


def measure_steps(device: torch.device) -> list[dict]:
    """Chapter 4's step, the fixes in float32, and all fixes: seconds, FLOPs, bytes."""
    batch = make_batch(SIZE["batch"], SIZE["patch"])
    steps = milestones(batch, device)
    rows = []
    for name, seconds in time_in_turn(steps, SIZE["repeats"]).items():
        precision = "bfloat16" if steps[name].fixes.bf16 else "float32"
        row = {"step": name, "precision": precision, "seconds": spread(seconds)}
        rows.append(row | count(steps[name]))
    return rows


def compare(rows: list[dict], ceilings: dict[str, float]) -> None:
    """Add to the rows how near the fastest of each kind of step came to the ceilings."""
    for row in rows:
        rate = row["flops"] / row["seconds"]["min"]  # the ceiling is the best, too
        row["flops_per_second"] = rate
        row["mfu"] = rate / ceilings[row["precision"]]
        row["flops_per_byte"] = row["flops"] / row["bytes"]
        row["floor_of_flops"] = row["flops"] / ceilings[row["precision"]]
        row["floor_of_bytes"] = row["bytes"] / ceilings["memory"]  # no floor: at most


def plot_roofline(ceilings: dict[str, float], rows: list[dict]) -> Figure:
    """FLOP/s over FLOP/byte: a roof for each precision, a dot for each step."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    intensity = np.geomspace(1, 1000, 200)
    for name, colour in COLOURS.items():
        if name in ceilings:
            roof = np.minimum(ceilings[name], intensity * ceilings["memory"])
            axes.loglog(intensity, roof / 1e9, color=colour, label=f"roof of {name}")
    for row, marker in zip(rows, "os^"):
        place = row["flops_per_byte"], row["flops_per_second"] / 1e9
        colour = COLOURS[row["precision"]]
        label = f"{row['step']}: {row['mfu']:.0%} of its roof"
        axes.loglog(*place, marker, color=colour, markersize=9, label=label)
    axes.set(xlabel="FLOP for each byte, if no cache helps", ylabel="GFLOP/s")
    axes.legend(frameon=False)
    return figure


def describe(row: dict) -> str:
    """A step in a line."""
    rate = (
        f"{row['flops_per_second'] / 1e9:.0f} GFLOP/s, {row['mfu']:.0%} of the ceiling"
    )
    floor = f"FLOPs take at least {row['floor_of_flops']:.3f} s"
    traffic = f"traffic at most {row['floor_of_bytes']:.3f} s"
    return (
        f"{row['step']}: {row['seconds']['min']:.3f} s at best, {rate};"
        f" {floor}, {traffic}"
    )


def main(argv: list[str] | None = None) -> dict:
    """Measure the ceilings and the steps, print them, and save them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny: that it works")
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    if args.quick and args.save_results:
        refuse("--save-results: --quick finds nothing worth keeping; leave one out")
    if args.quick:
        SIZE.update(QUICK)
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    ceilings = measure_ceilings(device)
    rows = measure_steps(device)
    for name, value in measure_ceilings(device).items():  # again: it may have been busy
        ceilings[name] = max(value, ceilings[name])
    compare(rows, ceilings)
    for name, value in ceilings.items():
        unit = "GB/s" if name == "memory" else "GFLOP/s"
        print(f"{name}: {value / 1e9:.0f} {unit}")
    for row in rows:
        print(describe(row))
    if args.save_results:
        command = "uv run python roofline.py"
        save_rows("roofline", command, [{"ceilings": ceilings}, *rows])
        plot_roofline(ceilings, rows).savefig(RESULTS / "roofline.png", dpi=100)
    return {"ceilings": ceilings, "steps": rows}


if __name__ == "__main__":
    main()
