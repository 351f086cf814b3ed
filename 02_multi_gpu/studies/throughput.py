"""Weak and strong scaling, and the rival that is fair: one process with as many threads."""

from statistics import median
from typing import NamedTuple

from torch import distributed, nn

from results import spread
from studies.ranks import Rank, on_ranks
from studies.settings import Settings
from studies.timed_step import TimedStep


class Case(NamedTuple):
    """What is timed: so many devices, samples on each, and threads of each."""

    mode: str
    devices: int
    device_batch: int
    threads: int = 1


def scaling(settings: Settings) -> list[dict]:
    """A row for each case: a fixed batch a device (weak), and a fixed global batch (strong)."""
    return on_ranks(measure_scaling, settings)


def measure_scaling(rank: Rank) -> list[dict]:
    """All cases in turn, each with and without communication."""
    settings = rank.settings
    cases = list_cases(settings)
    steps: dict[Case, list[float]] = {case: [] for case in cases}
    compute: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in rank.progress(range(settings.repeats), "scaling"):
        for case in cases:
            if rank.number < case.devices:
                step = TimedStep(rank, case.devices, case.device_batch, case.threads)
                steps[case] += step.time(settings.steps)
                compute[case] += step.time(settings.steps, communicate=False)
            distributed.barrier()
    size = describe_size(rank.make_network())
    rows = []
    for case in cases:
        own_steps = rank.gather(steps[case])[: case.devices]
        own_compute = rank.gather(compute[case])[: case.devices]
        row = summarise(case, own_steps, own_compute, settings.steps)
        rows.append(row | size)
    for row in rows:
        row["efficiency"] = efficiency(row, rows)
    return rows


def describe_size(network: nn.Module) -> dict[str, int]:
    """How many parameters a network has, and how many bytes their gradients."""
    number = 0
    size = 0
    for parameter in network.parameters():
        number += parameter.numel()
        size += parameter.nbytes
    return {"parameters": number, "gradient_bytes": size}


def list_cases(settings: Settings) -> list[Case]:
    """From one device to all. On GPUs there is no rival."""
    batch = settings.device_batch
    most = settings.devices
    cases = []
    for devices in range(1, most + 1):
        cases.append(Case("weak", devices, batch))
        if batch % devices == 0:
            cases.append(Case("strong", devices, batch // devices))
    if most > 1 and not settings.on_gpu:
        share = batch // most
        cases.append(Case("one process, as many threads", 1, batch, most))
        if not settings.is_quick:  # minutes, where other programs take the cores
            cases.append(Case("as many threads in each process", most, share, most))
    return cases


def summarise(
    case: Case, steps: list[list[float]], compute: list[list[float]], in_a_row: int
) -> dict:
    """The row of a case, from the seconds of each rank's steps, `in_a_row` at a time."""
    whole_steps = slowest(steps)
    samples = case.devices * case.device_batch
    rates = []
    for start in range(0, len(whole_steps), in_a_row):
        stretch = whole_steps[start : start + in_a_row]
        rates.append(samples / median(stretch))
    return {
        "mode": case.mode,
        "devices": case.devices,
        "threads": case.threads,
        "global_batch": samples,
        "device_batch": case.device_batch,
        "step_seconds": spread(whole_steps),
        "compute_seconds": spread(slowest(compute)),
        "samples_per_second": spread(rates),
        "steps": round_all(whole_steps),
        "compute_steps": [round_all(of_rank) for of_rank in compute],
    }


def slowest(steps: list[list[float]]) -> list[float]:
    """A step ends when its slowest rank does."""
    return [max(of_step) for of_step in zip(*steps)]


def round_all(seconds: list[float]) -> list[float]:
    """To a microsecond."""
    return [round(value, 6) for value in seconds]


def efficiency(row: dict, rows: list[dict]) -> float:
    """Samples/s a core or GPU, over those of one device with one thread and a whole batch."""
    rates = {}
    for other in rows:
        rate = other["samples_per_second"]["median"]
        rates[other["mode"], other["devices"]] = rate
    speed_up = row["samples_per_second"]["median"] / rates["weak", 1]
    available = max(other["devices"] for other in rows)
    cores = min(row["devices"] * row["threads"], available)
    return speed_up / cores
