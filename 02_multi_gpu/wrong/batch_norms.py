"""BatchNorm, which looks across the samples of a rank."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from wrong.gradients import WHAT, by_one_count
from wrong.setting import BATCH, RANKS, error, part, true_gradient, whole_batch


def batch_norm(rank: int) -> dict:
    """BatchNorm normalises by the samples of one rank; on one device it would see all of them."""
    each = BATCH // RANKS
    batches = [part(whole_batch(), each * rank, each * (rank + 1))]
    truth = true_gradient(norm=nn.BatchNorm2d)
    row = {"what": WHAT}
    for name, norm in {"wrong": nn.BatchNorm2d, "right": SyncBatchNorm}.items():
        row[name] = error(by_one_count(batches, norm), truth)
    row["GroupNorm"] = error(by_one_count(batches), true_gradient())
    return row


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm with means over all ranks. PyTorch's nn.SyncBatchNorm does so on GPUs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        powers = torch.stack([torch.ones_like(x), x, x**2])
        sums = powers.sum(dim=(1, 3, 4))
        count, total, squares = SumOverRanks.apply(sums)
        mean = total / count
        variance = squares / count - mean**2
        scale = self.weight / torch.sqrt(variance + self.eps)
        offset = self.bias - mean * scale
        return x * scale[:, None, None] + offset[:, None, None]


class SumOverRanks(torch.autograd.Function):
    """An all-reduce that gradients can pass: what each rank gave is in the sum on all of them."""

    @staticmethod
    def forward(context, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.forward(context, gradient)


def batch_norm_buffers(rank: int) -> dict:
    """The running mean that is saved is rank 0's: DDP copies it over the other ranks' before each step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, RANKS, 64, 1, 4, 4, generator=generator)  # step, rank, samples
    x[:, 1] += 10
    return {
        "what": "saved mean of data with means 0 and 10",
        "wrong": running_mean(x[:, rank], averaged=False),
        "right": running_mean(x[:, rank], averaged=True),
        "truth": x.mean().item(),
    }


def running_mean(steps: torch.Tensor, averaged: bool) -> float:
    """What rank 0 would save after these steps; `averaged` over the ranks after each."""
    model = nn.BatchNorm2d(1, momentum=None)  # None: a plain mean
    parallel = DistributedDataParallel(model)
    with torch.no_grad():
        for step in steps:
            parallel(step)
            if averaged:
                distributed.all_reduce(model.running_mean)
                model.running_mean /= RANKS
    return model.running_mean.item()
