"""A masked mean that is the same on any number of ranks."""

import torch
from torch import distributed


def global_mean(losses, mask):
    """The loss to call backward() on; losses and mask (0 or 1) have one shape."""
    count = mask.sum(dtype=torch.float32)
    world_size = 1
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(count)  # of all ranks, not of this one
        world_size = distributed.get_world_size()
    return (losses * mask).sum() * world_size / count.clamp(min=1)  # DDP divides again
