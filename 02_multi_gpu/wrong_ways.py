"""Chapter 2: each way in which training on two devices is quietly not training on one.

    uv run python wrong_ways.py                   # half a minute on two CPU cores
    uv run python wrong_ways.py --save-results    # and write results/wrong_ways.json

Two processes do it wrong and do it right. Where there is a truth, one of them works it out
alone. You should see a figure for each, and the cure. The ways are in wrong/.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from torch import distributed

from results import save_rows
from wrong.batch_norms import batch_norm, batch_norm_buffers
from wrong.gradients import accumulated_mean_of_means, mean_of_means
from wrong.hangs import collective_on_rank_0, unequal_batches, unused_parameters
from wrong.metrics import metric, padded_validation
from wrong.setting import LONG, RANKS
from wrong.shares import batch_per_device, iterable_copied

# Each takes the rank. Its docstring says what is wrong, and here stands the cure.
WAYS = {
    mean_of_means: "`squares * world_size / unseen`, with the unseen cells of all ranks; slices may then be unequal, too.",
    accumulated_mean_of_means: "Count the unseen cells of all micro-batches on all ranks before the first backward pass.",
    batch_norm: "GroupNorm, which sees one sample at a time; or `nn.SyncBatchNorm.convert_sync_batchnorm(model)`.",
    batch_norm_buffers: "SyncBatchNorm, whose mean and variance are the whole batch's (here: the mean of the ranks' means); GroupNorm has none.",
    metric: "All-reduce the sums of squares and of weights; then divide, then take the root.",
    padded_validation: "`range(rank, samples, world_size)`: no sample twice. Sums need no equal shares.",
    batch_per_device: "`batch_size = global_batch // world_size`.",
    iterable_copied: "Divide the samples by ranks and by workers: sample i is reader i % (ranks x workers)'s.",
    collective_on_rank_0: "All ranks reduce; then `if rank == 0: print(mean)`.",
    unequal_batches: "Slice each global batch, as `StepSampler` does: all ranks then have the same number of steps.",
    unused_parameters: "Leave the layer out; or `find_unused_parameters=True`, which searches the graph in each step.",
}


def main(argv: list[str] | None = None) -> list[dict]:
    """Do everything wrong and right; print and return what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    to = "write results/wrong_ways.json"
    parser.add_argument("--save-results", action="store_true", help=to)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        # If one rank fails, it ends the other and says why.
        torch.multiprocessing.spawn(work, (folder,), RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        print_way(row)
    if args.save_results:
        save_rows("wrong_ways", "uv run python wrong_ways.py", rows)
    return rows


def print_way(row: dict) -> None:
    """What is wrong, the figures, and the cure."""
    told = ("way", "why", "cure", "what")
    figures = [f"{name}: {value}" for name, value in row.items() if name not in told]
    print(f"\n{row['way']}: {row['why']}")
    print(f"  {row['what']}: {', '.join(figures)}")
    print(f"  Cure: {row['cure']}")


def work(rank: int, folder: str) -> None:
    """What each process does: every way in turn. Rank 0 writes what was found."""
    torch.set_num_threads(1)
    # oneDNN's long sums in float32 are 5e-6 off by themselves.
    torch.backends.mkldnn.enabled = False
    meeting = f"file://{folder}/ranks"  # on one machine, a file is a meeting point
    distributed.init_process_group("gloo", meeting, LONG, RANKS, rank)
    rows = []
    for way, cure in WAYS.items():
        row = {"way": way.__name__, "why": way.__doc__, "cure": cure}
        rows.append(row | way(rank))
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # the groups that hung have threads that would not end


if __name__ == "__main__":
    main()
