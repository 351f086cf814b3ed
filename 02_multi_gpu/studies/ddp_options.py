"""What DDP's options and communication hooks do to a step."""

from typing import Any

from results import spread
from studies.compression import HOOKS, count_bytes
from studies.ranks import Rank, on_ranks
from studies.settings import Settings
from studies.timed_step import TimedStep

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults (25 MB buckets, the first 1 MB)": {},
    "buckets of 0.1 MB": {"bucket_cap_mb": 0.1},
    "buckets of 0.01 MB": {"bucket_cap_mb": 0.01},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
for name, hook in HOOKS.items():
    OPTIONS[f"hook: {name}"] = {"hook": hook}
SETTLED = 4  # steps, after which PowerSGD compresses


def compare_options(settings: Settings) -> list[dict]:
    """A row for each option: seconds of a step and, of hooks, the bytes that are sent."""
    return on_ranks(measure_options, settings)


def measure_options(rank: Rank) -> list[dict]:
    """All options in turn, on a global batch that one device could hold."""
    settings = rank.settings
    devices = settings.devices
    batch = settings.device_batch // devices
    seconds: dict[str, list[float]] = {option: [] for option in OPTIONS}
    for _ in rank.progress(range(settings.repeats), "options"):
        for option, chosen in OPTIONS.items():
            step = TimedStep(rank, devices, batch, **chosen)
            seconds[option] += step.time(settings.steps)
    rows = []
    for option, chosen in OPTIONS.items():
        row = {"option": option, "devices": devices, "global_batch": batch * devices}
        row["step_seconds"] = spread(seconds[option])
        if "hook" in chosen:
            step = TimedStep(rank, devices, batch, **chosen)
            for _ in range(SETTLED):
                step.run()
            row["bytes_per_step"] = count_bytes(step)
        rows.append(row)
    return rows
