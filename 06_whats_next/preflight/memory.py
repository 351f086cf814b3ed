"""The memory that a rank needs, added up from one sample, before a batch is made."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from preflight.findings import Finding, in_bytes

FILL = 0.9  # of what is free may be planned for


@dataclass(frozen=True)
class Memory:
    """What a rank holds while it trains, in bytes."""

    fixed: int  # whatever the batch: parameters, gradients, moments, DDP's buckets
    samples: int  # of a micro-batch
    of_a_sample: int  # what a sample's forward pass keeps, and the sample
    waiting: int  # in the loader, on the CPU

    @property
    def activations(self) -> int:
        return self.samples * self.of_a_sample

    @property
    def computing(self) -> int:
        return self.fixed + self.activations


def add_up(
    network: nn.Module, sample: torch.Tensor, samples: int, ranks: int, waiting: int
) -> Memory:
    """The memory with a micro-batch of so many samples, from one sample (1, C, H, W)."""
    parameters = sum(weights.nbytes for weights in network.parameters())
    fixed = 4 * parameters  # themselves, gradients, and the two moments of Adam
    if ranks > 1:
        fixed += parameters  # DDP's buckets
    of_one = count_activations(network, sample)
    of_two = count_activations(network, torch.cat([sample, sample]))
    fixed += 2 * of_one - of_two  # such as weights in bfloat16
    of_a_sample = of_two - of_one + sample.nbytes
    return Memory(fixed, samples, of_a_sample, waiting)


def count_activations(network: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, and the largest gradient."""
    own = {weights.untyped_storage().data_ptr() for weights in network.parameters()}
    kept = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        answer = network(inputs)
    del answer  # it has kept all of them until now, so that no address was used twice
    return sum(kept.values()) + max(kept.values())


def blocks_waiting(
    slots: int,
    batch: int,
    patches_per_block: int,
    ahead: int,
    workers: int,
    readers: int,
) -> int:
    """The most blocks whose samples a rank's loader holds: see BlockLoader.

    `slots` and `batch` are the rank's, `ahead` the blocks that a process reads ahead,
    `readers` how many of its workers read the same block.
    """
    new = math.ceil(batch / patches_per_block) * readers
    return slots * readers + max(1, workers) * (ahead + new)


def judge_memory(memory: Memory, free: int, free_on_device: int | None) -> Finding:
    """Red if a rank needs more than its share of what is free, with what would fit.

    `free_on_device` is None if the network computes in the same memory as the loader.
    """
    text = describe(memory)
    room = FILL * free - memory.waiting
    if room < 0:
        text += f"; {in_bytes(free)} are free for this rank's loader"
        remedy = "a smaller --shuffle-slots, --patches-per-block or --batch-size"
        return Finding("memory", text, remedy)
    if free_on_device is not None:
        free = free_on_device
        room = FILL * free
    text += f"; {in_bytes(free)} are free for this rank"
    if memory.computing <= room:
        return Finding("memory", text)
    return Finding("memory", text, find_remedy(memory, room))


def describe(memory: Memory) -> str:
    parts = {
        "parameters, gradients and moments": memory.fixed,
        "activations": memory.activations,
        "loader": memory.waiting,
    }
    return ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())


def find_remedy(memory: Memory, room: float) -> str:
    """The fewest micro-batches with which it fits, if there are any."""
    if memory.fixed + memory.of_a_sample > room:
        return "a smaller --patch-size or network: not even one sample fits"
    fitting = int((room - memory.fixed) // memory.of_a_sample)  # samples at a time
    pieces = math.ceil(memory.samples / fitting)
    return f"multiply --accumulate-grad-batches by {pieces}: equal within rounding"
