"""Appendix, lab 5: gradient synchronisation. What two processes send each other in a step, and what becomes of it.

    uv run python lab_synchronisation.py                     # two processes on this machine's CPU
    uv run python lab_synchronisation.py --micro-batches 6

You should see that DDP gives the gradient of the whole batch, if one count divides both ranks' sums; that as many bytes
as the weights have are sent a step, in buckets; that micro-batches send them once; and that nothing else keeps ranks alike.
"""

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

RANKS, BATCH, CUT = 2, 16, 6  # rank 0 takes samples 0 to 5, rank 1 the others
ROUNDING = 1e-12  # a relative difference of gradients in float64
BUCKETS_MB = [25, 0.25, 0.01]  # 25 is DDP's default


def network() -> nn.Module:
    """Four convolutions in float64, in which rounding cannot be mistaken; the same weights in each call."""
    torch.manual_seed(0)
    wide = [
        layer for _ in range(2) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *wide, nn.Conv2d(64, 2, 1)).double()


def batch() -> list[Tensor]:
    """Input (16, 3, 8, 8), target (16, 2, 8, 8) and the cells that count (16, 1, 8, 8): few to nearly all."""
    random = torch.Generator().manual_seed(1)
    share = torch.linspace(0.05, 0.95, BATCH, dtype=torch.float64)[:, None, None, None]
    inputs, target, chance = (
        torch.rand(BATCH, n, 8, 8, generator=random, dtype=share.dtype) for n in (3, 2, 1)
    )
    return [inputs * share, target + share, (chance < share).double()]


def squares(model: nn.Module, part: list[Tensor]) -> Tensor:
    inputs, target, counted = part
    return (counted * (model(inputs) - target) ** 2).sum()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def the_truth() -> Tensor:
    """The gradient of the whole batch in one process."""
    model, whole = network(), batch()
    (squares(model, whole) / whole[2].sum()).backward()
    return gradient(model)


def error(found: Tensor, truth: Tensor) -> float:
    """The largest difference of two gradients, over the largest component of the true one."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def synchronised(
    rank: int, parts: int = 1, wait: bool = True, one_count: bool = True, bucket_mb: float = 25
) -> dict:
    """A step of DDP on this rank's slice, in so many micro-batches: the gradient, all-reduces and their bytes.

    `wait` leaves all but the last micro-batch to no_sync(). `one_count=False` is the mean of the ranks' means.
    """
    model, sent = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb), []

    def counting(group, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)  # what DDP does without a hook: the mean over the ranks

    model.register_comm_hook(None, counting)
    mine = [tensor[:CUT] if rank == 0 else tensor[CUT:] for tensor in batch()]
    for _ in range(2):  # DDP makes its buckets anew after the first pass, in the order that gradients came in
        model.zero_grad()
        sent.clear()
        count = mine[2].sum()
        if one_count:
            distributed.all_reduce(count)
        scale = RANKS / count if one_count else 1 / count  # DDP divides by RANKS
        micro_batches = list(zip(*(tensor.tensor_split(parts) for tensor in mine)))
        for number, part in enumerate(micro_batches, 1):
            with model.no_sync() if wait and number < parts else nullcontext():
                (squares(model, part) * scale).backward()
    return {"gradient": gradient(model), "all_reduces": len(sent), "bytes": sum(sent)}


def drift(rank: int, ddp: bool) -> float:
    """How far the ranks' weights are apart after one step of SGD, each on its own slice."""
    model = DistributedDataParallel(network()) if ddp else network()
    mine = [tensor[:CUT] if rank == 0 else tensor[CUT:] for tensor in batch()]
    squares(model, mine).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(RANKS)]
    distributed.all_gather(others, weights)
    return (others[0] - others[1]).abs().max().item()


def work(rank: int, folder: str, parts: int) -> None:
    """What each process does. Rank 0 writes what was found."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/ranks"  # on one machine, a file does for address and port
    distributed.init_process_group("gloo", meeting, timedelta(minutes=5), RANKS, rank)
    weights, truth = sum(weight.nbytes for weight in network().parameters()), the_truth()
    rows = []
    for what, count, how in (
        ("one count", 1, {}),
        ("own counts: a mean of means", 1, {"one_count": False}),
        (f"{parts} micro-batches", parts, {"wait": False}),
        (f"{parts} micro-batches, no_sync()", parts, {}),
        *((f"buckets of {size} MB", 1, {"bucket_mb": size}) for size in BUCKETS_MB[1:]),
    ):
        found = synchronised(rank, count, **how)
        rows.append({"what": what, "error": error(found.pop("gradient"), truth)} | found)
    figures = {
        "weights": weights,
        "rows": rows,
        "drift": {name: drift(rank, name == "DDP") for name in ("DDP", "no DDP")},
    }
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    distributed.destroy_process_group()
    os._exit(0)  # at once: threads of gloo may outlive its group, and abort a Python that ends in order


def main(argv: list[str] | None = None) -> dict:
    """Start two processes, print what they found, and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=4, metavar="K", help="of each rank (default: 4)")
    args = parser.parse_args(argv)
    if not 2 <= args.micro_batches <= CUT:
        parser.error(
            f"--micro-batches {args.micro_batches}: a rank has {CUT} samples or more; give 2 to {CUT}"
        )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, args.micro_batches), RANKS)  # if one fails, ends the other
        figures = json.loads(Path(folder, "figures.json").read_text())
    print(
        f"weights: {figures['weights']:,} bytes\nstep of DDP                       error   all-reduces       bytes"
    )
    for row in figures["rows"]:
        wrong = f"{row['error']:.0%}" if row["error"] > ROUNDING else "< 1e-12"
        print(f"{row['what']:30}{wrong:>9}{row['all_reduces']:14}{row['bytes']:12,}")
    drifted = [
        f"{'differ' if apart else 'are equal to the bit'} with {name}"
        for name, apart in figures["drift"].items()
    ]
    print(f"after a step, the ranks' weights {', '.join(drifted)}")
    return figures


if __name__ == "__main__":
    main()
