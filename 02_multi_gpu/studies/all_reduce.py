"""What an all-reduce takes, by the bytes that it adds up."""

import torch
from torch import distributed

from results import spread
from studies.ranks import Rank, on_ranks
from studies.settings import Settings

SIZES = [2**exponent for exponent in range(10, 25, 2)]  # bytes
FLOAT_BYTES = 4
TIMES = 10  # as often as other measurements are repeated


def all_reduce(settings: Settings) -> list[dict]:
    """A row for each size, over all ranks."""
    return on_ranks(measure_all_reduces, settings)


def measure_all_reduces(rank: Rank) -> list[dict]:
    """All sizes in turn; the first time, which sets up connections, does not count."""
    tensors = {}
    seconds: dict[int, list[float]] = {}
    for size in SIZES:
        tensors[size] = torch.ones(size // FLOAT_BYTES, device=rank.device)
        seconds[size] = []
    for _ in rank.progress(range(TIMES * rank.settings.repeats), "allreduce"):
        for size, tensor in tensors.items():
            distributed.barrier()
            began = rank.clock()
            distributed.all_reduce(tensor)
            seconds[size].append(rank.clock() - began)
            tensor.fill_(1)
    rows = []
    for size, of_size in seconds.items():
        row = {"devices": rank.settings.devices, "bytes": size}
        rows.append(row | {"seconds": spread(of_size[1:])})
    return rows
