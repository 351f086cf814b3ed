"""What a resumed run needs to end at the same bits, whatever the model has in it."""

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import distributed, nn
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
    The model sees its example once, in evaluation mode, and is then as it was.
    """
    if trainer.world_size == 1:
        return
    device = trainer.strategy.root_device
    example = move_data_to_device(module.example_input_array, device)
    modes = {part: part.training for part in module.modules()}
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.eval()
    with torch.compiler.set_stance("force_eager"):  # not for the sake of this shape
        output = call(trainer.strategy.model, example)
        total_of(output).backward()
    for part, training in modes.items():
        part.training = training
    for name, values in before.items():  # by name: forward may have put others there
        module.get_buffer(name).copy_(values)
    require_all_gradients(module)
    module.zero_grad()


def call(model: nn.Module, example: object) -> object:
    """The model's output for an example, which Lightning takes apart like this, too."""
    if isinstance(example, tuple | list):
        return model(*example)
    if isinstance(example, dict):
        return model(**example)
    return model(example)


def total_of(output: object) -> torch.Tensor:
    """The sum of all that has a gradient, in an output of tensors, lists and dicts."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    learnt = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not learnt:
        remedy = "return tensors, or lists or dicts of them, in evaluation mode, too"
        raise DataError(
            f"task.py: nothing in forward's output has a gradient; {remedy}"
        )
    return sum(learnt)


def require_all_gradients(module: LightningModule) -> None:
    """DataError if forward leaves a weight out: DDP would wait for its gradient."""
    for name, weights in module.named_parameters():
        if weights.requires_grad and weights.grad is None:
            reason = f"the model's forward leaves out {name} in evaluation mode"
            remedy = "use it there, or freeze it by requires_grad_(False)"
            raise DataError(f"task.py: {reason}; {remedy}")


def names_of_buffers(module: LightningModule) -> list[str]:
    """The buffers of real numbers that are in a checkpoint, such as BatchNorm's statistics."""
    saved = module.state_dict().keys()
    buffers = dict(module.named_buffers())
    return [
        name for name in buffers if name in saved and buffers[name].is_floating_point()
    ]


def average_buffers(
    trainer: Trainer, module: LightningModule, names: list[str]
) -> None:
    """Give all ranks the mean of the buffers in which they differ.

    Each rank has seen its own slices, and a checkpoint holds only the buffers of rank 0.
    In each step, because a stop may save after any, and must change nothing.
    """
    if trainer.world_size == 1 or not names:
        return
    buffers = [module.get_buffer(name) for name in names]
    mine = torch.cat([buffer.flatten().double() for buffer in buffers])
    extremes = torch.stack([mine, -mine])
    distributed.all_reduce(extremes, distributed.ReduceOp.MAX)
    differs = extremes[0] != -extremes[1]
    total = mine.clone()
    distributed.all_reduce(total)
    mean = torch.where(differs, total / trainer.world_size, mine)
    sizes = [buffer.numel() for buffer in buffers]
    for buffer, values in zip(buffers, mean.split(sizes)):
        buffer.copy_(values.view_as(buffer))
