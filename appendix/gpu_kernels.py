"""The part of a day on a GPU that asks which operators take a step's time.

Import it in a process that has chapter 5's folder in its path and no other chapter's.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fixes
from gpu_plan import Found, Plan
from gpu_steps import put_on_device
from step import Step, make_batch, run_steps

TOP = 10  # operators that are kept
IN_ORDER = "upsampling in channels_last"


class GrowInOrder(nn.Module):
    """Upsampling that first puts a cell's channels side by side, for its fast kernel."""

    def __init__(self, grow: nn.Module):
        super().__init__()
        self.grow = grow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grow(x.contiguous(memory_format=torch.channels_last))


def run_kernels(plan: Plan, found: Found) -> None:
    """All fixes in bfloat16, with and without channels_last, and the widest network; each
    also with GrowInOrder.
    """
    device = torch.device(plan.device)
    best = replace(fixes.best_fixes(device), tf32=plan.device == "cuda")
    plain = replace(best, channels_last=False)
    narrow = plan.widths[0]
    wide = plan.widths[-1]
    large = max(plan.step_batches)
    cases = {
        f"width {narrow}, batch {large}": (best, narrow, large),
        f"width {narrow}, batch {large}, without channels_last": (plain, narrow, large),
        f"width {wide}, batch {plan.wide_batch}": (best, wide, plan.wide_batch),
    }
    for case, (kind, width, batch_size) in cases.items():
        if found.has("kernels", f"{case}, {IN_ORDER}"):
            continue
        batch = make_batch(batch_size, plan.size.patch)
        step = put_on_device(Step(kind, batch, device, width=width))
        found.add("kernels", case, trace(step, plan.calls))
        step.network.grow = GrowInOrder(step.network.grow)
        found.add("kernels", f"{case}, {IN_ORDER}", trace(step, plan.calls))
        del step


def trace(step: Step, calls: int) -> dict:
    """Milliseconds of a step by the clock, without and with a trace, and of its operators.

    An operator's time is that of the kernels that it launched itself; on a CPU, its own.
    """
    run_steps(step, 3)
    untraced = run_steps(step, calls)
    activities = [ProfilerActivity.CPU]
    on_gpu = step.device.type == "cuda"
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        traced = run_steps(step, calls)
    operators = {}
    kernels = {}
    number = 0
    for event in profiler.key_averages():
        on_cpu = event.device_type == DeviceType.CPU
        if on_cpu and not event.key.startswith("aten::"):
            continue  # the profiler's own events hold the time of others'
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        spent = operators if on_cpu else kernels
        spent[event.key] = total / 1e3 / calls
        if not on_cpu:
            number += event.count
    return {
        "step_ms": 1e3 * untraced,
        "traced_step_ms": 1e3 * traced,
        "all_operators_ms": sum(operators.values()),
        "kernels": number / calls,
        "operators_ms": keep_largest(operators),
        "kernels_ms": keep_largest(kernels),
    }


def keep_largest(spent: dict[str, float]) -> dict[str, float]:
    """The names that took the most time, in order."""
    largest = sorted(spent, key=spent.get, reverse=True)[:TOP]
    return {name: spent[name] for name in largest}
