"""The part of a day on a GPU that looks at the loader: is it as fast as the GPU?

Import it in a process that has chapter 5's folder in its path and no other chapter's. The
store is read from this machine's disk, so that no network and no server is measured.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch.utils.data import DataLoader

import fixes
from gpu_plan import Found, Plan
from ladder import CLOUD
from options import Options, parse_options
from step import Step, wait_for
from store import Location
from task import make_data, make_datamodule

FIRST_STEPS = 16  # that start everything up, and fill the slots' first blocks
PARTS = ("input", "target", "unseen", "weight")


def run_loader(plan: Plan, found: Found) -> None:
    """Samples/s of training by number of workers, with and without pinned memory, and
    with more patches per map.
    """
    for workers in plan.loader_workers:
        flags = ["--num-workers", workers]
        measure_loader(f"{workers} workers, pageable memory", flags, False, plan, found)
        if plan.device == "cuda" and workers in plan.pinned_workers:
            measure_loader(
                f"{workers} workers, pinned memory", flags, True, plan, found
            )
    workers = plan.pinned_workers[-1]
    for patches in plan.loader_patches:
        flags = ["--num-workers", workers, "--patches-per-block", patches]
        case = f"{workers} workers, pinned memory, {patches} patches of a map"
        measure_loader(case, flags, True, plan, found)


def measure_loader(
    case: str, flags: list, pinned: bool, plan: Plan, found: Found
) -> None:
    """Measure one case, unless it has a row."""
    if found.has("loader", case):
        return
    with TemporaryDirectory() as folder:
        loader = make_loader(make_options(plan, [*flags, "--output-dir", folder]))
        loader.pin_memory = pinned
        try:
            row = train_from(loader, plan)
        except RuntimeError as error:  # a worker that was killed
            row = {"error": str(error).splitlines()[0]}
    found.add("loader", case, row)


def make_options(plan: Plan, flags: list) -> Options:
    """Chapter 5's options for a batch that suits a GPU, with further flags."""
    store = CLOUD / "outputs/buckets/winds" / plan.size.store
    flags = ["--store", store, *flags]
    flags += ["--batch-size", plan.loader_batch, "--patch-size", plan.size.patch]
    flags += ["--max-steps", 10**6, "--devices", 1, "--accelerator", plan.accelerator]
    return parse_options("", list(map(str, flags)))


def make_loader(options: Options) -> DataLoader:
    """The training's loader, as chapter 5's train.py makes it."""
    made = make_data(options, Location(options.store))
    return make_datamodule(*made).train_loader()


def train_from(loader: DataLoader, plan: Plan) -> dict:
    """Train with chapter 5's fastest step: samples/s, and the share of time spent waiting."""
    batches = iter(loader)
    device = torch.device(plan.device)
    step = None
    for batch in islice(batches, FIRST_STEPS):
        if step is None:
            step = make_step(batch, device)
        take_step(step, batch)
    wait_for(device)
    row = time_steps(step, batches, plan)
    del batches  # ends its workers and threads
    return row


def make_step(batch: dict[str, torch.Tensor], device: torch.device) -> Step:
    """All fixes; its batch is replaced before each step."""
    kind = replace(fixes.best_fixes(device), tf32=device.type == "cuda")
    return Step(kind, keep_parts(batch), device)


def keep_parts(batch: dict) -> dict[str, torch.Tensor]:
    """What the step needs of a loader's batch."""
    return {name: torch.as_tensor(batch[name]) for name in PARTS}


def take_step(step: Step, batch: dict) -> None:
    """Copy a batch to the device, without waiting if its memory is pinned, and train."""
    arrived = {}
    for name, tensor in keep_parts(batch).items():
        arrived[name] = tensor.to(step.device, non_blocking=True)
    step.pieces = [arrived]
    step()


def time_steps(step: Step, batches: Iterator, plan: Plan) -> dict:
    """Some steps by the wall clock; the step alone, with the last batch, as a comparison."""
    waits = 0.0
    began = perf_counter()
    for _ in range(plan.loader_steps):
        asked = perf_counter()
        batch = next(batches)
        waits += perf_counter() - asked
        take_step(step, batch)
    wait_for(step.device)
    seconds = perf_counter() - began
    alone = time_alone(step, plan)
    return {
        "batch_size": plan.loader_batch,
        "samples_per_second": plan.loader_batch * plan.loader_steps / seconds,
        "data_wait_share": waits / seconds,
        "step_alone_samples_per_second": plan.loader_batch / alone,
    }


def time_alone(step: Step, plan: Plan) -> float:
    """Seconds of a step whose batch is on the device already."""
    wait_for(step.device)
    began = perf_counter()
    for _ in range(plan.calls):
        step()
    wait_for(step.device)
    return (perf_counter() - began) / plan.calls
