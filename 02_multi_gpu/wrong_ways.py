"""Chapter 2: each way in which training on two devices is quietly not training on one, beside the right way.

    uv run python wrong_ways.py                   # all of them, about half a minute on two CPU cores
    uv run python wrong_ways.py --save-results    # and write results/wrong_ways.json

Two processes (gloo) do it wrong and do it right; where there is a truth, one of them works it out alone.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import warnings
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import train_ddp_by_hand as chapter
from lightning.pytorch import LightningModule, Trainer
from scaling import machine
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate, get_worker_info

RANKS = 2
SHORT = timedelta(seconds=2)  # how long a rank waits for one that never comes
LONG = timedelta(minutes=5)  # and for one that does, however busy the machine


def patches(size: int = 64) -> tuple[chapter.WindPatches, chapter.WindPatches]:
    """Training and validation patches, as train.py has them unless told otherwise."""
    return chapter.make_patches(chapter.parse_arguments(["--patch-size", str(size)]))


def network(norm=None) -> nn.Module:
    """The same weights on every rank; `norm(channels)` takes the place of GroupNorm."""
    torch.manual_seed(0)
    model = chapter.UNet()
    if norm:
        for block in (module for module in model.modules() if isinstance(module, nn.Sequential)):
            for number, layer in enumerate(block):
                if isinstance(layer, nn.GroupNorm):
                    block[number] = norm(layer.num_channels)
    return model


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The error of a gradient: its largest difference from the truth, over the truth's largest component."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def mean_over_own(prediction: torch.Tensor, batch: dict) -> torch.Tensor:
    """The loss that one device would use: over the unseen cells of what it holds."""
    loss, unseen = chapter.masked_loss(prediction, batch)
    return loss / unseen


def the_truth(batch: dict, norm=None) -> torch.Tensor:
    """The gradient of the whole batch on one device."""
    model = network(norm)
    mean_over_own(model(batch["input"], batch["noise"]), batch).backward()
    return gradient(model)


def whole_batch(training: chapter.WindPatches, size: int = 8) -> dict[str, torch.Tensor]:
    """A global batch, the samples with most unseen cells first: rank 0 then has more of them."""
    samples = [training[0, k] for k in range(size)]
    samples.sort(key=lambda sample: sample["input"][2].sum())
    return default_collate(samples)


def part(batch: dict, number: int, parts: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(parts)[number] for name, value in batch.items()}


def averaged(micro_batches: list[dict], loss_of, norm=None) -> torch.Tensor:
    """The gradient that DDP arrives at from each rank's micro-batches."""
    model = DistributedDataParallel(network(norm))
    for number, batch in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = number == len(micro_batches)  # what no_sync sets
        loss = loss_of(model(batch["input"], batch["noise"]), batch)
        (loss / len(micro_batches)).backward()
    return gradient(model.module)


def divided_last(micro_batches: list[dict], norm=None) -> torch.Tensor:
    """The same as train.py: means over all cells, averaged, then divided by the global share of unseen ones."""
    found = averaged(micro_batches, lambda *arguments: chapter.masked_loss(*arguments)[0], norm)
    unseen = torch.stack([1 - batch["input"][:, 2].mean() for batch in micro_batches]).mean()
    distributed.all_reduce(unseen)
    return found / (unseen / RANKS)


def mean_of_means(rank: int) -> dict:
    """Each rank divides by its own unseen cells; DDP averages the two."""
    figures = {"what": "error of the gradient"}
    for size, note in ((64, ""), (16, " in patches of 16 x 16")):
        batch = whole_batch(patches(size)[0])
        mine, truth = [part(batch, rank, RANKS)], the_truth(batch)
        wrong, right = averaged(mine, mean_over_own), divided_last(mine)
        figures |= {f"wrong{note}": error(wrong, truth), f"right{note}": error(right, truth)}
    return figures


def accumulated_mean_of_means(rank: int) -> dict:
    """The same with four micro-batches, of one sample each, on each rank."""
    batch = whole_batch(patches()[0])
    mine = [part(part(batch, rank, RANKS), number, 4) for number in range(4)]
    wrong, right, truth = averaged(mine, mean_over_own), divided_last(mine), the_truth(batch)
    return {"what": "error of the gradient", "wrong": error(wrong, truth), "right": error(right, truth)}


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
        count = RANKS * x.numel() / x.shape[1]
        sums = torch.stack([x.sum(dim=(0, 2, 3)), (x**2).sum(dim=(0, 2, 3))])
        mean, square = SumOverRanks.apply(sums) / count
        scale = self.weight / torch.sqrt(square - mean**2 + self.eps)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def batch_norm(rank: int) -> dict:
    """BatchNorm normalises by the samples of one rank; on one device it would see all of them."""
    batch = whole_batch(patches()[0])
    mine, truth = [part(batch, rank, RANKS)], the_truth(batch, nn.BatchNorm2d)
    wrong, right = divided_last(mine, nn.BatchNorm2d), divided_last(mine, SyncBatchNorm)
    group_norm = error(divided_last(mine), the_truth(batch))
    figures = {"wrong": error(wrong, truth), "right": error(right, truth), "GroupNorm": group_norm}
    return {"what": "error of the gradient", **figures}


def batch_norm_buffers(rank: int) -> dict:
    """The running mean that is saved is rank 0's: data with means 0 and 10 on the ranks have the mean 5."""
    x = 10.0 * rank + torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(rank))
    model = DistributedDataParallel(nn.BatchNorm2d(1, momentum=None))  # momentum None: a plain mean
    model(x)
    saved = [None] * RANKS
    distributed.all_gather_object(saved, model.module.running_mean.item())
    return {"what": "saved mean", "wrong": saved[0], "right": sum(saved) / RANKS, "truth": 5.0}


def dropout(rank: int) -> dict:
    """The same seed on both ranks: they drop the same channels, where one device draws for each sample."""
    torch.manual_seed(0)
    mask = nn.functional.dropout2d(torch.ones(4, 96, 1, 1), 0.1)
    masks = [None] * RANKS
    distributed.all_gather_object(masks, mask.flatten(1).tolist())
    noise = patches()[0]
    own = [[tuple(noise[0, 4 * r + k]["noise"].flatten() >= 0.1) for k in range(4)] for r in range(RANKS)]
    return {
        "what": "different masks in a batch of 8",
        "wrong": len({tuple(one) for part in masks for one in part}),
        "right": len({one for part in own for one in part}),
        "truth": 8,
    }


def squares_of(patches: chapter.WindPatches, samples: list[int]) -> tuple[float, float]:
    """Sum of squared errors of the training mean, and the sum of weights: a metric's two parts."""
    chosen = [patches[0, k] for k in samples]
    squares = sum(float((sample["weight"] * sample["target"] ** 2).sum()) for sample in chosen)
    return squares, sum(float(2 * sample["weight"].sum()) for sample in chosen)


def gathered(value) -> list:
    found = [None] * RANKS
    distributed.all_gather_object(found, value)
    return found


def metric(rank: int) -> dict:
    """Each rank's own RMSE, their mean (sync_dist=True), and the RMSE of summed squares and weights."""
    validation = patches()[1]
    squares, weights = squares_of(validation, list(range(rank * 5, min(9, rank * 5 + 5))))
    own = gathered((squares / weights) ** 0.5)
    total = np.array(gathered((squares, weights))).sum(axis=0)
    truth = np.divide(*squares_of(validation, range(9))) ** 0.5
    figures = {"wrong": own[0], "mean of the ranks'": sum(own) / RANKS, "right": (total[0] / total[1]) ** 0.5}
    return {"what": "RMSE of 9 samples", **figures, "truth": truth}


def padded_validation(rank: int) -> dict:
    """DistributedSampler repeats a sample to give both ranks five of nine; it is then judged twice."""
    validation, rmse = patches()[1], []
    padded = list(DistributedSampler(range(9), RANKS, rank, shuffle=False))
    for mine in (padded, list(range(rank, 9, RANKS))):
        total = np.array(gathered(squares_of(validation, mine))).sum(axis=0)
        rmse.append((total[0] / total[1]) ** 0.5)
    truth = np.divide(*squares_of(validation, range(9))) ** 0.5
    return {"what": "RMSE of 9 samples", "wrong": rmse[0], "right": rmse[1], "truth": truth}


def outcome(function, timeout: timedelta = LONG) -> str:
    """Run something that may wait for a rank that never comes, and say how that ended on either rank."""
    group = distributed.new_group(timeout=LONG)
    distributed.barrier(group)  # on a busy machine, to make a group may take longer than SHORT
    distributed.set_timeout(timeout, group)
    try:
        function(group)
        mine = "ends"
    except RuntimeError as failure:
        waited = "Timed out" in str(failure) or "closed by peer" in str(failure)
        mine = "hangs" if waited else str(failure).partition(". ")[0]
    found = gathered(mine)  # on the default group, which still works
    return next((one for one in found if one != "ends"), "ends")


def collective_on_rank_0(rank: int) -> dict:
    """Logging the mean loss `if rank == 0`: the mean needs both ranks, and one of them never comes."""

    def log_mean(group, everyone: bool) -> None:
        if everyone or rank == 0:
            distributed.all_reduce(torch.ones(1), group=group)
        distributed.barrier(group)

    wrong = outcome(lambda group: log_mean(group, everyone=False), SHORT)
    return {"what": "a log line", "wrong": wrong, "right": outcome(lambda group: log_mean(group, True))}


def unequal_batches(rank: int) -> dict:
    """Five batches for two ranks, with nothing to make them equal: rank 0 waits in its third step."""

    def train(group, batches) -> None:
        for _ in batches:
            distributed.all_reduce(torch.ones(1), group=group)
        distributed.barrier(group)

    args = argparse.Namespace(batch_size=8, accumulate=1, max_steps=5, overfit_one_batch=False)
    wrong = outcome(lambda group: train(group, range(rank, 5, RANKS)), SHORT)
    right = outcome(lambda group: train(group, chapter.StepSampler(args, 0, rank, RANKS)))
    return {"what": "an epoch of 5 batches", "wrong": wrong, "right": right}


def unused_parameters(rank: int) -> dict:
    """A layer that the loss does not use: the reducer waits for its gradient, and the second step fails."""

    class Net(nn.Module):
        def __init__(self, unused: bool):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1) if unused else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def steps(group, unused: bool) -> None:
        model = DistributedDataParallel(Net(unused), process_group=group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    wrong = outcome(lambda group: steps(group, unused=True))
    return {"what": "two steps", "wrong": wrong, "right": outcome(lambda group: steps(group, False))}


class Stream(IterableDataset):
    """Sixteen samples; `shared` says whether ranks and workers divide them."""

    def __init__(self, rank: int, shared: bool, length: int = 16):
        self.rank, self.shared, self.length = rank, shared, length

    def __iter__(self):
        worker = get_worker_info()
        reader, readers = self.rank * worker.num_workers + worker.id, RANKS * worker.num_workers
        yield from range(reader, self.length, readers) if self.shared else range(self.length)


def iterable_copied(rank: int) -> dict:
    """An IterableDataset is copied to every worker of every rank, and each copy yields all of it."""
    seen = {}
    for name, shared in (("wrong", False), ("right", True)):
        loader = DataLoader(Stream(rank, shared), num_workers=2, multiprocessing_context="fork")
        seen[name] = sum(gathered(sum(1 for _ in loader)))
    return {"what": "samples in an epoch of 16", **seen, "truth": 16}


def drop_last(rank: int) -> dict:
    """Each of four workers drops its own incomplete batch: 25 samples each, in batches of 16."""

    class Own(Stream):
        def __iter__(self):
            worker = get_worker_info()
            yield from range(worker.id if worker else 0, 100, worker.num_workers if worker else 1)

    kept = {}
    for name, workers in (("wrong", 4), ("right", 0)):
        options = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(Own(rank, True), 16, num_workers=workers, drop_last=True, **options)
        kept[name] = sum(len(batch) for batch in loader)
    return {"what": "samples kept of 100", **kept, "truth": 96}


def forgotten_set_epoch(rank: int) -> dict:
    """DistributedSampler shuffles by its epoch, which somebody has to set."""
    orders = {"wrong": [], "right": []}
    sampler = DistributedSampler(range(108), RANKS, rank, shuffle=True)
    for epoch in range(3):
        orders["wrong"].append(tuple(sampler))
        orders["right"].append(tuple(chapter.epoch_order(0, epoch, 108)[rank::RANKS]))
    return {"what": "different orders in 3 epochs", **{k: len(set(v)) for k, v in orders.items()}, "truth": 3}


def frozen_generator(rank: int) -> dict:
    """A generator stored in a dataset is copied with it: every worker of every rank draws the same."""

    class Augmented(Stream):
        def __init__(self, rank: int, stored: bool):
            self.rank, self.stored, self.generator = rank, stored, np.random.default_rng(0)

        def __iter__(self):
            reader = 2 * self.rank + get_worker_info().id
            for k in range(4):
                own = np.random.default_rng((0, 4 * reader + k))
                yield (self.generator if self.stored else own).random()

    drawn = {}
    for name, stored in (("wrong", True), ("right", False)):
        loader = DataLoader(Augmented(rank, stored), num_workers=2, multiprocessing_context="fork")
        drawn[name] = len(set(itertools.chain(*gathered([one.item() for one in loader]))))
    return {"what": "different draws for 16 samples", **drawn, "truth": 16}


def batch_per_device(rank: int) -> dict:
    """A DataLoader's batch_size is one rank's: on two ranks, twice the batch and half the steps."""
    sampler = DistributedSampler(range(1600), RANKS, rank)
    steps = {"wrong": len(DataLoader(range(1600), 8, sampler=sampler))}
    steps["right"] = len(DataLoader(range(1600), 8 // RANKS, sampler=sampler))
    return {"what": "steps in an epoch of 1,600 at batch 8", **steps, "truth": 200}


class Schedule(LightningModule):
    """A warm-up of 10 steps; `interval` is what Lightning is told about it, if anything."""

    def __init__(self, interval: dict):
        super().__init__()
        self.weight, self.interval = nn.Parameter(torch.zeros(1)), interval

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, **self.interval}}


def schedule_per_epoch(rank: int) -> dict:
    """A warm-up of 10 steps, which Lightning steps once an epoch unless told otherwise: the rate at step 10."""
    rates = {}
    for name, interval in (("wrong", {}), ("right", {"interval": "step"})):
        model = Schedule(interval)
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=10, barebones=True)
        trainer.fit(model, DataLoader(torch.ones(20, 1)))
        rates[name] = model.schedule.get_last_lr()[0]
    return {"what": "learning rate at step 10", **rates, "truth": 1.0}


WAYS = [
    mean_of_means,
    accumulated_mean_of_means,
    batch_norm,
    batch_norm_buffers,
    dropout,
    metric,
    padded_validation,
    batch_per_device,
    forgotten_set_epoch,
    frozen_generator,
    iterable_copied,
    drop_last,
    schedule_per_epoch,
    collective_on_rank_0,
    unequal_batches,
    unused_parameters,
]


def work(rank: int, folder: str, output: str) -> None:
    """What each of the two processes does: every way in turn. Rank 0 writes what was found."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN's long float32 sums are 5e-6 off by themselves
    warnings.filterwarnings("ignore", "This DataLoader will create 4 worker")
    meeting = f"file://{folder}/ranks"  # on one machine, a file does for MASTER_ADDR and MASTER_PORT
    distributed.init_process_group("gloo", meeting, LONG, RANKS, rank)
    rows = [{"way": way.__name__, "why": way.__doc__.strip(), **way(rank)} for way in WAYS]
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
        os.sync()
    os._exit(0)  # the groups that hung have threads that would not end


def main(argv: list[str] | None = None) -> list[dict]:
    """Do everything wrong and right; print and return what came of it."""
    parser = chapter.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-results", action="store_true", help="write results/wrong_ways.json")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "rows.json"))
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=work, args=(rank, folder, output)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        rows = json.loads(Path(output).read_text())
    for row in rows:
        print(", ".join(f"{name}: {value}" for name, value in row.items() if name != "why"))
    if args.save_results:
        versions = {"python": platform.python_version(), "torch": version("torch").split("+")[0]}
        results = {"command": "uv run python wrong_ways.py", "date": str(date.today())}
        results |= {"machine": machine(), "versions": versions, "rows": rows}
        Path(__file__).with_name("results").mkdir(exist_ok=True)
        Path(__file__).with_name("results").joinpath("wrong_ways.json").write_text(
            json.dumps(results, indent=1) + "\n"
        )
    return rows


if __name__ == "__main__":
    try:
        main()
    except chapter.InputError as problem:
        print(f"{Path(__file__).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
