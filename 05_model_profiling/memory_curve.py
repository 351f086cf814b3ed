"""What the tensors of a step hold, over time."""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from step import Step, wait_for


class MemoryCurve(NamedTuple):
    """After each allocation and release: when it was, and what is held."""

    milliseconds: list[float]  # since the first one
    bytes_held: list[int]


def measure_memory(step: Step) -> MemoryCurve:
    """What a step's tensors hold, from the profiler, which makes the times longer.

    Without what was there before: weights, their moments, the batch.
    """
    step.optimizer.zero_grad()  # it could not see the release of older gradients
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
        wait_for(step.device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    of_gpu = int(step.device.type == "cuda")
    changes = []
    for event in events:
        is_change = event.get("name") == "[memory]"
        if is_change and event["args"]["Device Type"] == of_gpu:
            changes.append((event["ts"], event["args"]["Bytes"]))
    changes.sort(key=lambda change: change[0])
    times = []
    held = []
    total = 0
    for time, change in changes:
        total += change
        times.append((time - changes[0][0]) / 1e3)
        held.append(total)
    return MemoryCurve(times, held)
