"""Gradients that are compressed on their way: how many bytes go, and what is learnt."""

from dataclasses import replace
from unittest import mock

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from studies.learning import learn
from studies.ranks import Rank, on_ranks
from studies.settings import Settings
from studies.timed_step import Hook, TimedStep


def uncompressed(group: distributed.ProcessGroup | None):
    """What DDP does without a hook."""
    return group, default_hooks.allreduce_hook


def half_precision(group: distributed.ProcessGroup | None):
    """Gradients are sent in bfloat16."""
    return group, default_hooks.bf16_compress_hook


def power_sgd(group: distributed.ProcessGroup | None):
    """PowerSGD from the second step on (Vogels et al. 2019, https://arxiv.org/abs/1905.13727)."""
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=2,
    )
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, Hook] = {
    "no compression": uncompressed,
    "bf16": half_precision,
    "PowerSGD, rank 2": power_sgd,
}


def count_bytes(step: TimedStep) -> int:
    """The bytes that a rank hands to all_reduce in a step."""
    all_reduce = distributed.all_reduce
    sizes = []

    def counted(tensor: torch.Tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(distributed, "all_reduce", counted):
        step.run()
    return sum(sizes)


def compression(settings: Settings) -> list[dict]:
    """A row for each hook and seed: what the default run reaches, on the same batches."""
    return on_ranks(train_with_hooks, settings)


def train_with_hooks(rank: Rank) -> list[dict]:
    """The RMSE on 1990, in m/s."""
    rows = []
    for name, hook in HOOKS.items():
        for seed in range(rank.settings.seeds):
            rmse, losses = learn(rank, replace(rank.options, seed=seed), hook)
            row = {"hook": name, "steps": len(losses), "seed": seed}
            rows.append(row | {"rmse": rmse})
    return rows
