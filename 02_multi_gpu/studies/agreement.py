"""How far runs on several processes end from a run on one."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from tqdm import tqdm

from evaluation import NETWORK
from studies.programs import BY_HAND, UNIT, run_script
from studies.settings import Settings

STEPS = (10, 200)
QUICK_STEPS = (2,)
# Processes, and micro-batches. Of 8 samples, three processes have 2, 3 and 3.
OTHERS = {
    "one process, 3 micro-batches": (1, 3),
    "two processes": (2, 1),
    "three processes": (3, 1),
}


class Training(NamedTuple):
    """What a run ended with."""

    weights: torch.Tensor  # all of them, (parameters,)
    rmse: float  # of the test, m/s


def agreement(settings: Settings) -> list[dict]:
    """A row for each other run and number of steps: the largest difference of a weight."""
    rows = []
    all_steps = QUICK_STEPS if settings.is_quick else STEPS
    for steps in tqdm(all_steps, "agreement", disable=None):
        flags = [*settings.flags(), "--max-steps", str(steps)]
        one = train(1, 1, flags)
        for name, (processes, micro_batches) in OTHERS.items():
            other = train(processes, micro_batches, flags)
            row = {"run": name, "steps": steps}
            row["weights"] = largest(other.weights - one.weights)
            row["largest_weight"] = largest(one.weights)
            row["rmse"] = other.rmse
            row["rmse_of_one"] = one.rmse
            rows.append(row)
    return rows


def train(processes: int, micro_batches: int, flags: list[str]) -> Training:
    """Run train_ddp_by_hand.py."""
    flags = [*flags, "--accumulate-grad-batches", str(micro_batches)]
    with TemporaryDirectory() as folder:
        summary = run_script(BY_HAND, processes, flags, folder)
        saved = torch.load(Path(folder, "last.ckpt"), weights_only=True)
    weights = [value.flatten() for value in saved["model"].values()]
    return Training(torch.cat(weights), summary["rmse"][NETWORK][UNIT])


def largest(values: torch.Tensor) -> float:
    """The largest absolute value."""
    return values.abs().max().item()
