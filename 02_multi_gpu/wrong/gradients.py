"""Means of means."""

from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import default_collate

from model import Batch
from train_ddp_by_hand import train_step
from wrong.setting import (
    BATCH,
    RANKS,
    Norm,
    draw_samples,
    error,
    gradient,
    gradient_of,
    make_network,
    own_mean,
    part,
    true_gradient,
    whole_batch,
)

WHAT = "error of the gradient"


def mean_of_means(rank: int) -> dict:
    """Each rank divides by its own unseen cells, and DDP averages the two: a mean of means."""
    cases = {
        "": (64, 4),
        " in patches of 16 x 16": (16, 4),
        ", slices of 3 and 5": (64, 3),
    }
    row = {"what": WHAT}
    for note, (size, cut) in cases.items():
        slices = [(0, cut), (cut, BATCH)]
        batches = [part(whole_batch(size), *slices[rank])]
        truth = true_gradient(size)
        row[f"wrong{note}"] = error(by_own_means(batches), truth)
        row[f"right{note}"] = error(by_one_count(batches), truth)
    return row


def errors_as_drawn(rank: int, steps: int) -> dict:
    """The error of own counts for batches that nobody has sorted."""
    errors = [error_as_drawn(rank, step) for step in range(steps)]
    of_all = f"wrong as drawn, median of {steps} steps"
    return {"wrong as drawn, step 0": errors[0], of_all: median(errors)}


def error_as_drawn(rank: int, step: int) -> float:
    """The error of own counts in a step."""
    batch = default_collate(draw_samples(step))
    each = BATCH // RANKS
    own = part(batch, each * rank, each * (rank + 1))
    return error(by_own_means([own]), gradient_of(batch))


def accumulated_mean_of_means(rank: int) -> dict:
    """Each of four micro-batches, of one sample, is divided by its own count on each rank."""
    each = BATCH // RANKS
    first = each * rank
    batches = [part(whole_batch(), k, k + 1) for k in range(first, first + each)]
    wrong = error(by_own_means(batches), true_gradient())
    right = error(by_one_count(batches), true_gradient())
    return {"what": WHAT, "wrong": wrong, "right": right}


def by_own_means(batches: list[Batch]) -> torch.Tensor:
    """The gradient of the mean of the micro-batches' own means, averaged over the ranks."""
    model = DistributedDataParallel(make_network())
    for number, batch in enumerate(batches, 1):
        model.require_backward_grad_sync = number == len(batches)  # as no_sync does
        loss = own_mean(model, batch) / len(batches)
        loss.backward()
    return gradient(model.module)


def by_one_count(batches: list[Batch], norm: Norm | None = None) -> torch.Tensor:
    """The gradient of this chapter's step: sums, over the count of the whole batch."""
    model = DistributedDataParallel(make_network(norm))
    optimizer = SGD(model.parameters())  # its step comes after the gradient
    train_step(model, optimizer, ConstantLR(optimizer), batches)
    return gradient(model.module)
