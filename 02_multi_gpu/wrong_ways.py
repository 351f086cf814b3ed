"""Chapter 2: each way in which training on two devices is quietly not training on one, beside the right way.

    uv run python wrong_ways.py                   # all of them, about half a minute on two CPU cores
    uv run python wrong_ways.py --save-results    # and write results/wrong_ways.json

Two processes (gloo) do it wrong and do it right; where there is a truth, one of them works it out alone.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from datetime import date, timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    default_collate,
    get_worker_info,
)

import train_ddp_by_hand as chapter
from scaling import machine

PRELOADED = [
    "torch.nn.parallel",
    "xarray",
    "scipy.interpolate",
    "matplotlib.figure",
]  # once for all workers
RANKS = 2
SHORT = timedelta(seconds=2)  # how long a rank waits for one that never comes
LONG = timedelta(minutes=5)  # and for one that does, however busy the machine


@cache
def patches(size: int = 64) -> tuple[chapter.Patches, chapter.Patches]:
    """Training and validation patches, as train_ddp_by_hand.py has them unless told otherwise."""
    return chapter.make_patches(
        chapter.parse_arguments(f"--accelerator cpu --patch-size {size}".split())
    )[:2]


def network(norm=None) -> nn.Module:
    """The same weights on every rank; `norm(channels)` takes the place of GroupNorm."""
    torch.manual_seed(0)
    model = chapter.UNet(2)
    if norm:
        for block in (
            module for module in model.modules() if isinstance(module, nn.Sequential)
        ):
            for number, layer in enumerate(block):
                if isinstance(layer, nn.GroupNorm):
                    block[number] = norm(layer.num_channels)
    return model


@cache
def whole_batch(size: int = 64) -> dict[str, torch.Tensor]:
    """A global batch of 8, the samples with most unseen cells first: rank 0 then has more of them."""
    training, _ = patches(size)
    samples = [training[0, k] for k in range(8)]
    return default_collate(sorted(samples, key=lambda sample: -sample["unseen"].sum()))


def part(batch: dict, first: int, last: int) -> dict[str, torch.Tensor]:
    return {name: value[first:last] for name, value in batch.items()}


def own_mean(model: nn.Module, batch: dict) -> torch.Tensor:
    """The loss that one device would use: the mean over the unseen cells of what it holds."""
    squares, unseen = chapter.masked_sums(model(batch["input"]), batch)
    return squares / unseen


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@cache
def the_truth(size: int = 64, norm=None) -> torch.Tensor:
    """The gradient of the whole batch on one device."""
    model = network(norm)
    own_mean(model, whole_batch(size)).backward()
    return gradient(model)


def mean_of(micro_batches: list[dict]) -> torch.Tensor:
    """The gradient of the mean of the micro-batches' own means; DDP averages it over the ranks."""
    model = DistributedDataParallel(network())
    for number, batch in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = number == len(
            micro_batches
        )  # what no_sync sets
        (own_mean(model, batch) / len(micro_batches)).backward()
    return gradient(model.module)


def ratio_of_sums(micro_batches: list[dict], norm=None) -> torch.Tensor:
    """The gradient that the chapter's own step computes: sums, over the count of the whole batch."""
    model = DistributedDataParallel(network(norm))
    optimizer = torch.optim.SGD(model.parameters())  # its step comes after the gradient
    chapter.train_step(
        model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), micro_batches
    )
    return gradient(model.module)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The error of a gradient: its largest difference from the truth, over the truth's largest component."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def gathered(value) -> list:
    found = [None] * RANKS
    distributed.all_gather_object(found, value)
    return found


def mean_of_means(rank: int) -> dict:
    """Each rank divides by its own unseen cells, and DDP averages the two: a mean of means."""
    figures = {"what": "error of the gradient"}
    cases = {
        "": (64, 4),
        " in patches of 16 x 16": (16, 4),
        ", slices of 3 and 5": (64, 3),
    }
    for note, (size, cut) in cases.items():
        mine, truth = (
            [part(whole_batch(size), *((0, cut), (cut, 8))[rank])],
            the_truth(size),
        )
        figures[f"wrong{note}"] = error(mean_of(mine), truth)
        figures[f"right{note}"] = error(ratio_of_sums(mine), truth)
    return figures


def accumulated_mean_of_means(rank: int) -> dict:
    """The same with four micro-batches, of one sample each, on each rank."""
    mine, truth = (
        [part(whole_batch(), k, k + 1) for k in range(4 * rank, 4 * rank + 4)],
        the_truth(),
    )
    wrong, right = mean_of(mine), ratio_of_sums(mine)
    return {
        "what": "error of the gradient",
        "wrong": error(wrong, truth),
        "right": error(right, truth),
    }


class SumOverRanks(torch.autograd.Function):
    """An all-reduce that gradients can pass: what each rank gave went into the sum on all of them."""

    @staticmethod
    def forward(context, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.forward(context, gradient)


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm with means over all ranks. PyTorch's own nn.SyncBatchNorm does this, but on GPUs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.stack(
            [part.sum(dim=(0, 2, 3)) for part in (torch.ones_like(x), x, x**2)]
        )
        count, total, squares = SumOverRanks.apply(sums)
        mean = total / count
        scale = self.weight / torch.sqrt(squares / count - mean**2 + self.eps)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def batch_norm(rank: int) -> dict:
    """BatchNorm normalises by the samples of one rank; on one device it would see all of them."""
    mine, truth = (
        [part(whole_batch(), 4 * rank, 4 * rank + 4)],
        the_truth(norm=nn.BatchNorm2d),
    )
    figures = {"wrong": error(ratio_of_sums(mine, nn.BatchNorm2d), truth)}
    figures["right"] = error(ratio_of_sums(mine, SyncBatchNorm), truth)
    figures["GroupNorm"] = error(ratio_of_sums(mine), the_truth())
    return {"what": "error of the gradient", **figures}


def batch_norm_buffers(rank: int) -> dict:
    """The running mean that is saved is rank 0's: DDP copies it over the other ranks' before each step."""
    x = torch.randn(
        3, RANKS, 64, 1, 4, 4, generator=torch.Generator().manual_seed(0)
    )  # step, rank, samples
    x[:, 1] += 10
    saved = []
    for averaged in (False, True):
        model = nn.BatchNorm2d(1, momentum=None)  # momentum None: a plain mean
        parallel = DistributedDataParallel(model)
        with torch.no_grad():
            for step in x:
                parallel(step[rank])
                if averaged:
                    distributed.all_reduce(model.running_mean)
                    model.running_mean /= RANKS
        saved.append(model.running_mean.item())  # rank 0 writes
    figures = {"wrong": saved[0], "right": saved[1], "truth": x.mean().item()}
    return {"what": "saved mean of data with means 0 and 10", **figures}


def squares_of(samples: list[int]) -> tuple[float, float]:
    """The climatology's weighted sum of squared errors, and the sum of weights: a metric's two parts."""
    validation, squares, weights = patches()[1], 0, 0
    for k in samples:
        weight, (_, anomaly) = validation[0, k]["weight"], validation.fields(0, k)
        squares += float((weight * anomaly**2).mean(axis=0).sum())
        weights += float(weight.sum())
    return squares, weights


def rmse(*parts: tuple[float, float]) -> float:
    squares, weights = np.sum(parts, axis=0).tolist()
    return (squares / weights) ** 0.5


def metric(rank: int) -> dict:
    """Rank 0 logs its own RMSE; with `sync_dist=True`, the mean of the ranks' RMSEs, which is no RMSE."""
    own = squares_of(range(4) if rank == 0 else range(4, 7))
    each = gathered(rmse(own))
    figures = {
        "wrong": each[0],
        "mean of the ranks'": sum(each) / RANKS,
        "right": rmse(*gathered(own)),
    }
    return {
        "what": "RMSE of 7 samples, m/s",
        **figures,
        "truth": rmse(squares_of(range(7))),
    }


def padded_validation(rank: int) -> dict:
    """DistributedSampler repeats a sample to give both ranks four of seven; it is then judged twice."""
    padded, own = (
        DistributedSampler(range(7), RANKS, rank, shuffle=False),
        range(rank, 7, RANKS),
    )
    figures = {
        "wrong": rmse(*gathered(squares_of(padded))),
        "right": rmse(*gathered(squares_of(own))),
    }
    return {
        "what": "RMSE of 7 samples, m/s",
        **figures,
        "truth": rmse(squares_of(range(7))),
    }


def batch_per_device(rank: int) -> dict:
    """A DataLoader's batch_size is one rank's: on two ranks, twice the batch and half the steps."""
    sampler = DistributedSampler(range(1600), RANKS, rank)
    steps = {"wrong": len(DataLoader(range(1600), 8, sampler=sampler))}
    steps["right"] = len(DataLoader(range(1600), 8 // RANKS, sampler=sampler))
    return {"what": "steps in an epoch of 1,600 at batch 8", **steps, "truth": 200}


class Stream(IterableDataset):
    """Sixteen samples; `shared` says whether ranks and workers divide them."""

    def __init__(self, rank: int, shared: bool):
        self.rank, self.shared = rank, shared

    def __iter__(self):
        worker = get_worker_info()
        reader, readers = (
            self.rank * worker.num_workers + worker.id,
            RANKS * worker.num_workers,
        )
        yield from range(reader, 16, readers) if self.shared else range(16)


def iterable_copied(rank: int) -> dict:
    """An IterableDataset is copied to every worker of every rank, and each copy yields all of it."""
    # Not by fork: gloo's threads run, and a copied process may wait for ever for a lock that one of them held.
    seen, method = {}, "spawn" if sys.platform == "win32" else "forkserver"
    multiprocessing.set_forkserver_preload(PRELOADED)
    for name, shared in (("wrong", False), ("right", True)):
        loader = DataLoader(
            Stream(rank, shared), num_workers=2, multiprocessing_context=method
        )
        seen[name] = sum(gathered(sum(1 for _ in loader)))
    return {"what": "samples in an epoch of 16", **seen, "truth": 16}


def outcome(function, timeout: timedelta = LONG) -> str:
    """Run something that may wait for a rank that never comes, and say how that ended on either rank."""
    group = distributed.new_group(timeout=LONG)
    distributed.barrier(
        group
    )  # on a busy machine, to make a group may take longer than SHORT
    distributed.set_timeout(timeout, group)
    try:
        function(group)
        mine = "ends"
    except RuntimeError as failure:
        waited = "Timed out" in str(failure) or "closed by peer" in str(failure)
        mine = "hangs" if waited else str(failure).partition(". ")[0]
    found = gathered(mine)  # on the default group, which still works
    return next((one for one in found if one != "ends"), "ends")


def reduce_each(group, losses) -> None:
    """What a training loop does: an all-reduce for each loss, and at its end a barrier."""
    for _ in losses:
        distributed.all_reduce(torch.ones(1), group=group)
    distributed.barrier(group)


def collective_on_rank_0(rank: int) -> dict:
    """Logging the mean loss `if rank == 0`: the mean needs both ranks, and one of them never comes."""
    wrong = outcome(
        lambda group: reduce_each(group, ["loss"] if rank == 0 else []), SHORT
    )
    right = outcome(lambda group: reduce_each(group, ["loss"]))
    return {"what": "a log line", "wrong": wrong, "right": right}


def unequal_batches(rank: int) -> dict:
    """Five batches for two ranks, with nothing to make them equal: rank 0 waits in its third step."""
    args = argparse.Namespace(batch_size=8, accumulate=1, max_steps=5)
    wrong = outcome(lambda group: reduce_each(group, range(rank, 5, RANKS)), SHORT)
    right = outcome(
        lambda group: reduce_each(group, chapter.StepSampler(args, 0, rank, RANKS))
    )
    return {"what": "an epoch of 5 batches", "wrong": wrong, "right": right}


def unused_parameters(rank: int) -> dict:
    """A layer that the loss does not use: DDP waits for its gradient, and the second step fails."""

    def steps(group, search: bool) -> None:
        model = nn.Linear(2, 1)
        model.unused = nn.Linear(2, 1)
        model = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=search
        )
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    wrong, right = (
        outcome(lambda group, search=search: steps(group, search))
        for search in (False, True)
    )
    return {"what": "two steps", "wrong": wrong, "right": right}


WAYS = {  # and how to cure each
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


def work(rank: int, folder: str) -> None:
    """What each of the two processes does: every way in turn. Rank 0 writes what was found."""
    ranks = {
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ |= {
        name: str(value) for name, value in ranks.items()
    }  # as torchrun would
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = (
        False  # oneDNN's long float32 sums are 5e-6 off by themselves
    )
    meeting = f"file://{folder}/ranks"  # on one machine, a file does for MASTER_ADDR and MASTER_PORT
    distributed.init_process_group("gloo", meeting, LONG, RANKS, rank)
    rows = [
        {"way": way.__name__, "why": way.__doc__, "cure": cure} | way(rank)
        for way, cure in WAYS.items()
    ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # the groups that hung have threads that would not end


def main(argv: list[str] | None = None) -> list[dict]:
    """Do everything wrong and right; print and return what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--save-results", action="store_true", help="write results/wrong_ways.json"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            work, (folder,), RANKS
        )  # if one fails, ends the other and says why
        rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        figures = {
            name: value
            for name, value in row.items()
            if name not in ("way", "why", "cure", "what")
        }
        found = ", ".join(f"{name}: {value}" for name, value in figures.items())
        print(
            f"\n{row['way']}: {row['why']}\n  {row['what']}: {found}\n  Cure: {row['cure']}"
        )
    if args.save_results:
        versions = {
            "python": platform.python_version(),
            "torch": version("torch").split("+")[0],
        }
        results = {"command": "uv run python wrong_ways.py", "date": str(date.today())}
        results |= {"machine": machine(), "versions": versions, "rows": rows}
        saved = Path(__file__).with_name("results") / "wrong_ways.json"
        saved.parent.mkdir(exist_ok=True)
        saved.write_text(json.dumps(results, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
