"""Collectives that a rank enters alone, and a gradient that never comes."""

from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from steps import StepSampler
from wrong.setting import BATCH, LONG, RANKS, SHORT, gather

BATCHES = 5


def collective_on_rank_0(rank: int) -> dict:
    """Rank 0 logs the mean loss `if rank == 0`. The mean needs both ranks, and one never comes."""
    own = ["loss"] if rank == 0 else []
    wrong = how_it_ends(lambda group: reduce_each(group, own), SHORT)
    right = how_it_ends(lambda group: reduce_each(group, ["loss"]))
    return {"what": "a log line", "wrong": wrong, "right": right}


def unequal_batches(rank: int) -> dict:
    """Two ranks share five batches, and nothing makes their numbers equal: rank 0 waits in its third step."""
    own = range(rank, BATCHES, RANKS)
    wrong = how_it_ends(lambda group: reduce_each(group, own), SHORT)
    steps = StepSampler(BATCH, BATCHES, rank=rank, world_size=RANKS)
    right = how_it_ends(lambda group: reduce_each(group, steps))
    return {"what": "an epoch of 5 batches", "wrong": wrong, "right": right}


def unused_parameters(rank: int) -> dict:
    """The loss does not use one layer. DDP waits for its gradient, and the second step fails."""
    wrong = how_it_ends(lambda group: take_two_steps(group, search=False))
    right = how_it_ends(lambda group: take_two_steps(group, search=True))
    return {"what": "two steps", "wrong": wrong, "right": right}


def take_two_steps(group, search: bool) -> None:
    """With a layer that nothing uses; `search` looks for such layers in each step."""
    model = nn.Linear(2, 1)
    model.unused = nn.Linear(2, 1)
    model = DistributedDataParallel(
        model, process_group=group, find_unused_parameters=search
    )
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def reduce_each(group, losses: Iterable) -> None:
    """What a loop does: an all-reduce for each loss, and at its end a barrier."""
    for _ in losses:
        distributed.all_reduce(torch.ones(1), group=group)
    distributed.barrier(group)


def how_it_ends(task: Callable, timeout: timedelta = LONG) -> str:
    """Call a task that may wait for a rank that never comes: how that ended, on either rank."""
    group = distributed.new_group(timeout=LONG)
    # On a busy machine, to make a group may take longer than SHORT.
    distributed.barrier(group)
    distributed.set_timeout(timeout, group)
    try:
        task(group)
        own = "ends"
    except RuntimeError as failure:
        own = str(failure).partition(". ")[0]
        if "Timed out" in str(failure) or "closed by peer" in str(failure):
            own = "hangs"
    for end in gather(own):  # in the default group, which still works
        if end != "ends":
            return end
    return "ends"
