"""A step of training by hand, in which each fix is a switch.

    batch = make_batch(batch_size=32, patch_size=64)
    step = Step(Fixes(channels_last=True, bf16=True), batch, torch.device("cpu"))
    loss = step()

Written without Lightning, so that nothing but the step is timed.
"""

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from model import Batch, GroupNorm, UNet, masked_sums
from sampling import swath_masks

IS_GLIBC = platform.libc_ver()[0] == "glibc"


@dataclass(frozen=True)
class Fixes:
    """What a step does differently. Without any it is chapter 4's, in float32."""

    one_scaling: bool = False  # of all gradients in one call, not one call a parameter
    fused_optimizer: bool = False  # AdamW's whole update in one kernel
    channels_last: bool = False  # a cell's channels side by side in memory
    zero_padding: bool = False  # instead of a copy of each input with its edge repeated
    bf16: bool = False  # convolutions in bfloat16, by autocast
    plain_norm: bool = False  # with bf16: GroupNorm in the plain order of memory
    memory_kept: bool = False  # CPU: freed memory stays with the process (glibc)
    compiled: bool = False  # operators fused into kernels of its own
    tf32: bool = False  # GPU: float32 products with 10 bits of mantissa
    pinned: bool = False  # GPU: batches copied while the step before still runs
    cuda_graph: bool = False  # GPU: all kernels launched at once; compiles, too
    loss_read: bool = False  # a fault: .item() in each step waits for the device
    checkpointed: bool = False  # memory: the finest level is computed again in backward
    micro_batches: int = 1  # memory: gradients accumulate over pieces of the batch


class Checkpointed(nn.Module):
    """Keeps only the input of a block; the backward pass computes the rest again."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Step:
    """A step of training by hand, with some fixes: copy, forward, backward, AdamW.

    Its weights are those of the same seed, whatever the fixes. `dtype` is the weights',
    and `width` the network's.
    """

    def __init__(
        self,
        fixes: Fixes,
        batch: Batch,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        width: int = 24,
    ):
        self.fixes = fixes
        self.device = device
        self.pieces = split_batch(batch, fixes.micro_batches, dtype)
        if fixes.pinned:
            self.pieces = [pin(piece) for piece in self.pieces]
        self.network = self.make_network(dtype, width)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=1e-3, fused=fixes.fused_optimizer or None
        )

    def make_network(self, dtype: torch.dtype, width: int) -> nn.Module:
        fixes = self.fixes
        torch.manual_seed(0)
        padding = "zeros" if fixes.zero_padding else "replicate"
        network = UNet(2, padding, width).to(self.device, dtype)
        for module in network.modules():
            if isinstance(module, GroupNorm):
                module.plain_order = fixes.plain_norm
        if fixes.channels_last:
            network.to(memory_format=torch.channels_last)
        if fixes.checkpointed:
            network.down1 = Checkpointed(network.down1)
            network.up1 = Checkpointed(network.up1)
        if fixes.cuda_graph:
            network.compile(mode="reduce-overhead")
        elif fixes.compiled:
            network.compile()
        return network

    def __call__(self) -> torch.Tensor:
        """One step; returns the loss, which is still on its way on a GPU."""
        keep_memory(self.fixes.memory_kept)
        self.optimizer.zero_grad()
        loss = self.compute_gradients()
        self.optimizer.step()
        if self.fixes.loss_read:
            loss.item()
        return loss

    def compute_gradients(self) -> torch.Tensor:
        """Forward and backward over all pieces; returns the loss."""
        torch.backends.cuda.matmul.allow_tf32 = self.fixes.tf32
        torch.backends.cudnn.allow_tf32 = self.fixes.tf32
        sums = torch.zeros(2, device=self.device)
        for piece in self.pieces:
            arrived = {}
            for name, tensor in piece.items():
                arrived[name] = tensor.to(self.device, non_blocking=self.fixes.pinned)
            with torch.autocast(self.device.type, torch.bfloat16, self.fixes.bf16):
                piece_sums = masked_sums(self.network(arrived["input"]), arrived)
            piece_sums[0].backward()
            sums = sums + piece_sums.detach()
        gradients = [parameter.grad for parameter in self.network.parameters()]
        if self.fixes.one_scaling:
            torch._foreach_mul_(gradients, 1 / sums[1])
        else:
            for gradient in gradients:
                gradient *= 1 / sums[1]
        return sums[0] / sums[1]


def keep_memory(kept: bool) -> None:
    """Whether glibc keeps the memory of all freed tensors, for the whole process.

    Otherwise it returns tensors above 32 MiB to the system at once, and others if more
    than 64 MiB are free: what a process with large tensors reaches by itself.
    """
    if not IS_GLIBC:
        return
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # their numbers in malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(mmap_threshold, 2**25)
    mallopt(mmap_max, 0 if kept else 2**16)
    mallopt(trim_threshold, 2**31 - 1 if kept else 2**26)


def split_batch(batch: Batch, pieces: int, dtype: torch.dtype) -> list[Batch]:
    """A batch in equal micro-batches."""
    parts = {name: tensor.to(dtype).chunk(pieces) for name, tensor in batch.items()}
    return [dict(zip(parts, values)) for values in zip(*parts.values())]


def pin(batch: Batch) -> Batch:
    """A batch in memory that a GPU reads by itself, while the CPU goes on."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


def make_batch(batch_size: int, patch_size: int) -> Batch:
    """Smooth anomalies under real swaths, in the shapes of the chapter's batches."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.normal(size=(batch_size, 2, 8, 8))).float()
    target = nn.functional.interpolate(
        coarse, (patch_size, patch_size), mode="bilinear"
    )
    seen = torch.from_numpy(swath_masks(rng, batch_size, patch_size))[:, None].float()
    unseen = 1 - seen
    inputs = torch.cat([target * seen, seen], dim=1)
    return {"input": inputs, "target": target, "unseen": unseen, "weight": unseen}


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was told; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def gradient_difference(fixes: Fixes, batch: Batch, device: torch.device) -> float:
    """How far the gradients of the first step are from plain float32's, over their norm.

    The network with another padding is another function, so it is compared with itself.
    """
    plain = Fixes(zero_padding=fixes.zero_padding)
    found = []
    for each in (fixes, plain):
        step = Step(each, batch, device)
        step.compute_gradients()
        gradients = [
            parameter.grad.flatten() for parameter in step.network.parameters()
        ]
        found.append(torch.cat(gradients))
    return float((found[0] - found[1]).norm() / found[1].norm())


def run_steps(step: Step, count: int) -> float:
    """Seconds for each of `count` steps."""
    wait_for(step.device)
    began = perf_counter()
    for _ in range(count):
        step()
    wait_for(step.device)
    return (perf_counter() - began) / count


def save_snapshot(step: Step, path: Path) -> None:
    """Who holds the memory of a GPU during a step: open it in pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history()
    step()
    wait_for(step.device)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
