"""Appendix, lab 5: gradient synchronisation. What two processes send in a step, and why.

    uv run python lab_synchronisation.py                     # two processes, on a CPU
    uv run python lab_synchronisation.py --micro-batches 6

You should see that DDP gives the gradient of the whole batch if one count divides both
ranks' sums; that a step sends as many bytes as the weights have, in buckets, however many
micro-batches it has; and that nothing else keeps the ranks alike.
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
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
BATCH = 16
CUT = 6  # rank 0 takes samples 0 to 5, rank 1 the others
ROUNDING = 1e-12  # a relative difference of gradients in float64
BUCKETS_MB = [0.25, 0.01]  # DDP's default is 25


def network() -> nn.Module:
    """Four convolutions in float64, which no rounding can hide; always the same weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers.append(nn.Conv2d(64, 64, 3, padding=1))
        layers.append(nn.GroupNorm(8, 64))
        layers.append(nn.ReLU())
    layers.append(nn.Conv2d(64, 2, 1))
    return nn.Sequential(*layers).double()


def batch() -> list[Tensor]:
    """Input (16, 3, 8, 8), target (16, 2, 8, 8), and the cells that count (16, 1, 8, 8)."""
    random = torch.Generator().manual_seed(1)
    share = torch.linspace(0.05, 0.95, BATCH, dtype=torch.float64)
    share = share[:, None, None, None]

    def draw(channels: int) -> Tensor:
        return torch.rand(BATCH, channels, 8, 8, generator=random, dtype=share.dtype)

    inputs = draw(3) * share
    target = draw(2) + share
    counted = draw(1) < share
    return [inputs, target, counted.double()]


def slice_of(rank: int) -> list[Tensor]:
    """A rank's samples."""
    samples = slice(None, CUT) if rank == 0 else slice(CUT, None)
    return [tensor[samples] for tensor in batch()]


def sum_squares(model: nn.Module, part: list[Tensor]) -> Tensor:
    inputs, target, counted = part
    return (counted * (model(inputs) - target) ** 2).sum()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def true_gradient() -> Tensor:
    """The gradient of the whole batch in one process."""
    model = network()
    whole = batch()
    loss = sum_squares(model, whole) / whole[2].sum()
    loss.backward()
    return gradient(model)


def error(found: Tensor, truth: Tensor) -> float:
    """The largest difference of two gradients, over the truth's largest component."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def synchronise(
    rank: int,
    parts: int = 1,
    *,
    wait: bool = True,
    one_count: bool = True,
    bucket_mb: float = 25,
) -> dict:
    """A step of DDP on this rank's slice, in so many micro-batches.

    With `wait`, all but the last micro-batch are under no_sync(). `one_count=False` is the
    mean of the ranks' means. Returns the gradient, and the all-reduces and their bytes.
    """
    model = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb)
    sent: list[int] = []

    def count_bytes(group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    model.register_comm_hook(None, count_bytes)
    mine = slice_of(rank)
    slices = [tensor.tensor_split(parts) for tensor in mine]
    micro_batches = list(zip(*slices))
    # DDP makes its buckets anew after the first pass, in the order of the gradients.
    for _ in range(2):
        model.zero_grad()
        sent.clear()
        scale = scale_of(mine[2].sum(), one_count)
        for number, part in enumerate(micro_batches, start=1):
            is_held = wait and number < parts
            with model.no_sync() if is_held else nullcontext():
                loss = sum_squares(model, part) * scale
                loss.backward()
    return {"gradient": gradient(model), "all_reduces": len(sent), "bytes": sum(sent)}


def scale_of(count: Tensor, one_count: bool) -> Tensor:
    """What a sum of squares is multiplied by, so that DDP's mean of it is right, or wrong."""
    if not one_count:
        return 1 / count
    distributed.all_reduce(count)
    return RANKS / count  # DDP divides by RANKS


def drift(rank: int, ddp: bool) -> float:
    """How far the ranks' weights are apart after one step of SGD on their own slices."""
    model = DistributedDataParallel(network()) if ddp else network()
    sum_squares(model, slice_of(rank)).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(RANKS)]
    distributed.all_gather(others, weights)
    return (others[0] - others[1]).abs().max().item()


def measure(rank: int, parts: int) -> list[dict]:
    """A row for each way to take a step."""
    truth = true_gradient()
    cases = {
        "one count": {},
        "own counts: a mean of means": {"one_count": False},
        f"{parts} micro-batches": {"parts": parts, "wait": False},
        f"{parts} micro-batches, no_sync()": {"parts": parts},
    }
    for size in BUCKETS_MB:
        cases[f"buckets of {size} MB"] = {"bucket_mb": size}
    rows = []
    for what, settings in cases.items():
        found = synchronise(rank, **settings)
        off = error(found.pop("gradient"), truth)
        rows.append({"what": what, "error": off} | found)
    return rows


def work(rank: int, folder: str, parts: int) -> None:
    """What each process does. Rank 0 writes what was found."""
    torch.set_num_threads(1)
    meeting = (
        f"file://{folder}/ranks"  # on one machine, a file does for address and port
    )
    limit = timedelta(minutes=5)
    distributed.init_process_group("gloo", meeting, limit, RANKS, rank)
    figures = {
        "weights": sum(weight.nbytes for weight in network().parameters()),
        "rows": measure(rank, parts),
        "drift": {"DDP": drift(rank, ddp=True), "no DDP": drift(rank, ddp=False)},
    }
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    distributed.destroy_process_group()
    # gloo's threads may outlive its group, and would crash Python while it shuts down.
    os._exit(0)


def print_figures(figures: dict) -> None:
    print(f"weights: {figures['weights']:,} bytes")
    print("step of DDP                       error   all-reduces       bytes")
    for row in figures["rows"]:
        wrong = f"{row['error']:.0%}" if row["error"] > ROUNDING else "< 1e-12"
        print(f"{row['what']:30}{wrong:>9}{row['all_reduces']:14}{row['bytes']:12,}")
    ends = []
    for name, apart in figures["drift"].items():
        ends.append(f"{'differ' if apart else 'are equal to the bit'} with {name}")
    print(f"after a step, the ranks' weights {', '.join(ends)}")


def main(argv: list[str] | None = None) -> dict:
    """Start two processes, print what they found, and return it."""
    parts = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        # If one of them fails, the other is ended.
        torch.multiprocessing.spawn(work, (folder, parts), RANKS)
        figures = json.loads(Path(folder, "figures.json").read_text())
    print_figures(figures)
    return figures


def parse(argv: list[str] | None) -> int:
    """The number of micro-batches; exits with code 2 and a remedy if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "of each rank (default: 4)"
    parser.add_argument("--micro-batches", type=int, default=4, metavar="K", help=text)
    parts = parser.parse_args(argv).micro_batches
    if not 2 <= parts <= CUT:
        remedy = f"a rank has {CUT} samples or more; give 2 to {CUT}"
        parser.error(f"--micro-batches {parts}: {remedy}")
    return parts


if __name__ == "__main__":
    main()
