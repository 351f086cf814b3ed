"""What a resumed run needs to end at the same bits, whatever the model has in it."""

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils._pytree import tree_leaves

from errors import DataError

STREAM = 6  # apart from the streams that data are drawn from


def seed_batch(seed: int, batch: int, rank: int) -> None:
    """Seed torch for a rank's batch, on all devices: dropout draws the same after a resume.

    A function of (seed, batch, rank), so that no generator's state has to be kept.
    """
    sequence = np.random.SeedSequence((STREAM, seed, batch, rank))
    [number] = sequence.generate_state(1, np.uint64)
    torch.manual_seed(int(number))


def settle_buckets(trainer: Trainer, module: LightningModule) -> None:
    """Let DDP place the gradients in its buckets as it does from the second step on.

    Their places decide in which order three or more ranks add them, and so the last bit. A
    resumed run would round its first step differently from the run that was not killed.
    It runs the model's example once, in evaluation mode, in which no statistics change.
    """
    if trainer.world_size == 1:
        return
    example = trainer.strategy.batch_to_device(module.example_input_array)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    with torch.compiler.set_stance("force_eager"):  # not for the sake of this shape
        output = call(trainer.strategy.model, example)
        total_of(output).backward()
    for part, training in modes.items():
        part.training = training
    require_all_gradients(module)
    module.zero_grad()


def call(model: nn.Module, example: object) -> object:
    """The model's output for an example: a tuple is for several arguments, as is a dict."""
    if isinstance(example, tuple):
        return model(*example)
    if isinstance(example, dict):
        return model(**example)
    return model(example)


def total_of(output: object) -> torch.Tensor:
    """The sum of all that can be learnt from in an output of tensors, lists and dicts."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.sum() for tensor in tensors if tensor.requires_grad)


def require_all_gradients(module: LightningModule) -> None:
    """DataError if forward leaves a weight out: DDP would wait for its gradient."""
    for name, weights in module.named_parameters():
        if weights.requires_grad and weights.grad is None:
            remedy = "use it in forward, or freeze it by requires_grad_(False)"
            raise DataError(f"task.py: the model's forward leaves out {name}; {remedy}")


def average_statistics(trainer: Trainer, module: LightningModule) -> None:
    """Give all ranks the mean of their running statistics, as BatchNorm has.

    Each rank has those of its own slices, and a checkpoint holds only those of rank 0. In
    each step, because a stop may save at any, and must change nothing.
    """
    if trainer.world_size == 1:
        return
    for part in module.modules():
        for name in ("running_mean", "running_var"):
            statistics = getattr(part, name, None)
            if isinstance(statistics, torch.Tensor):
                mean = trainer.strategy.reduce(statistics, reduce_op="mean")
                statistics.copy_(mean)
