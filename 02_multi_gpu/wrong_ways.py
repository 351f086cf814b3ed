"""Chapter 2: each way in which training on two devices is quietly not training on one.

    uv run python wrong_ways.py                      # half a minute on two CPU cores
    uv run python wrong_ways.py --drawn-steps 12     # and on the batches of 12 steps
    uv run python wrong_ways.py --drawn-steps 12 --save-results   # and write results/

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
from wrong.gradients import accumulated_mean_of_means, errors_as_drawn, mean_of_means
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
    add = parser.add_argument
    text = "also measure the first mistake on the batches of so many steps"
    add("--drawn-steps", type=int, default=0, metavar="N", help=text)
    add("--save-results", action="store_true", help="write results/wrong_ways.json")
    args = parser.parse_args(argv)
    if args.drawn_steps < 0:
        parser.error(f"--drawn-steps {args.drawn_steps}: give 0 or more")
    with tempfile.TemporaryDirectory() as folder:
        # If one rank fails, it ends the other and says why.
        torch.multiprocessing.spawn(work, (folder, args.drawn_steps), RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        print_way(row)
    if args.save_results:
        command = f"uv run python wrong_ways.py --drawn-steps {args.drawn_steps}"
        save_rows("wrong_ways", command, rows)
    return rows


def print_way(row: dict) -> None:
    """What is wrong, the figures, and the cure."""
    told = ("way", "why", "cure", "what")
    figures = [f"{name}: {value}" for name, value in row.items() if name not in told]
    print(f"\n{row['way']}: {row['why']}")
    print(f"  {row['what']}: {', '.join(figures)}")
    print(f"  Cure: {row['cure']}")


def work(rank: int, folder: str, drawn_steps: int) -> None:
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
    if drawn_steps:
        rows[0] |= errors_as_drawn(rank, drawn_steps)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # the groups that hung have threads that would not end


if __name__ == "__main__":
    main()
