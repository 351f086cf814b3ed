"""What the ways have in common: two ranks, a network, a global batch, its true gradient."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.utils.data import default_collate

from data import Data, PatchDataset
from model import Batch, UNet, masked_sums
from options import parse_options
from task import make_data

RANKS = 2
BATCH = 8  # samples in the global batch
SHORT = timedelta(seconds=2)  # how long a rank waits for one that never comes
LONG = timedelta(minutes=5)  # and for one that does, however busy the machine
Value = TypeVar("Value")
Norm = Callable[[int], nn.Module]  # of so many channels


@cache
def load_data() -> Data:
    """The winds, as train.py reads them."""
    _, data = make_data(parse_options("", ["--accelerator", "cpu"]))
    return data


def make_network(norm: Norm | None = None) -> UNet:
    """The same weights on every rank; `norm` takes the place of GroupNorm."""
    torch.manual_seed(0)
    model = UNet(2)
    for block in model.modules():
        if norm and isinstance(block, nn.Sequential):
            for number, layer in enumerate(block):
                if isinstance(layer, nn.GroupNorm):
                    block[number] = norm(layer.num_channels)
    return model


@cache
def whole_batch(size: int = 64) -> Batch:
    """A global batch of patches of `size` x `size` cells.

    Those with most unseen cells come first, so that rank 0 has more of them.
    """
    samples = draw_samples(0, size)
    samples.sort(key=lambda sample: -sample["unseen"].sum())
    return default_collate(samples)


def draw_samples(step: int, size: int = 64) -> list[dict]:
    """The samples of a step, in the order in which train.py draws them."""
    data = load_data()
    patches = PatchDataset(data.maker(data.training, size), data.reader, BATCH, seed=0)
    return [patches[step, k] for k in range(BATCH)]


def part(batch: Batch, first: int, last: int) -> Batch:
    """Some of a batch's samples."""
    return {name: value[first:last] for name, value in batch.items()}


def own_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that one device would use: the mean over the unseen cells that it holds."""
    squares, unseen = masked_sums(model(batch["input"]), batch)
    return squares / unseen


def gradient(model: nn.Module) -> torch.Tensor:
    """The gradient of all parameters, one after the other."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@cache
def true_gradient(size: int = 64, norm: Norm | None = None) -> torch.Tensor:
    """The gradient of the whole batch on one device."""
    return gradient_of(whole_batch(size), norm)


def gradient_of(batch: Batch, norm: Norm | None = None) -> torch.Tensor:
    """The gradient of a batch on one device."""
    model = make_network(norm)
    own_mean(model, batch).backward()
    return gradient(model)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """A gradient's largest difference from the truth, over the truth's largest component."""
    difference = (found - truth).abs().max()
    return (difference / truth.abs().max()).item()


def gather(value: Value) -> list[Value]:
    """What each rank has given."""
    found = [value] * RANKS
    distributed.all_gather_object(found, value)
    return found
