"""A training step under DDP that is timed, with and without communication."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from model import UNet, masked_sums
from studies.ranks import Rank

# Takes a group of ranks; returns the state and the function of a communication hook.
Hook = Callable[[distributed.ProcessGroup | None], tuple[Any, Callable]]

# With several buckets, the all-reduces that PowerSGD starts from callbacks may come in
# a different order on each rank. gloo then ends the run: "Received data size doesn't match".
ONE_BUCKET = {"bucket_cap_mb": 100}
WARM_UP = 2  # steps; in the second, DDP lays out its buckets anew


def make_parallel(
    network: UNet,
    group: distributed.ProcessGroup | None = None,
    hook: Hook | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """The network under DDP, with some of its options; with a hook, in one bucket."""
    if hook is None:
        return DistributedDataParallel(network, process_group=group, **options)
    options = ONE_BUCKET | options
    model = DistributedDataParallel(network, process_group=group, **options)
    model.register_comm_hook(*hook(group))
    return model


class TimedStep:
    """A training step of some ranks, ready to be timed. `options` are make_parallel's."""

    def __init__(
        self,
        rank: Rank,
        devices: int,
        device_batch: int,
        threads: int = 1,
        **options: Any,
    ):
        self.rank = rank
        self.devices = devices
        self.threads = threads
        self.group = rank.groups[devices]
        self.batch = rank.make_batch(device_batch)
        self.model = make_parallel(rank.make_network(), self.group, **options)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)

    def run(self, communicate: bool = True) -> None:
        """One step, like train_step of train_ddp_by_hand.py."""
        unseen = self.batch["unseen"].sum()
        if communicate:
            distributed.all_reduce(unseen, group=self.group)
        self.optimizer.zero_grad()
        with nullcontext() if communicate else self.model.no_sync():
            squares, _ = masked_sums(self.model(self.batch["input"]), self.batch)
            loss = squares * self.devices / unseen
            loss.backward()
        self.optimizer.step()

    def time(self, steps: int, communicate: bool = True) -> list[float]:
        """Seconds of each step, after the warm-up. The ranks begin each step together."""
        torch.set_num_threads(self.threads)
        seconds = []
        for _ in range(WARM_UP + steps):
            distributed.barrier(self.group)
            began = self.rank.clock()
            self.run(communicate)
            seconds.append(self.rank.clock() - began)
        torch.set_num_threads(1)
        return seconds[WARM_UP:]
