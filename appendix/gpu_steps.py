"""The parts of a day on a GPU that time steps without a loader, with chapter 5's modules.

Import it in a process that has chapter 5's folder in its path and no other chapter's.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, sleep

import torch

import fixes
import roofline
from gpu_counters import Counters, describe_driver
from gpu_plan import DETERMINISTIC, DRY, Found, Plan
from ladder import spread
from results import describe_machine, list_versions
from step import Fixes, Step, make_batch, run_steps, wait_for

IDLE_SECONDS = 2.0


class GraphedStep:
    """A whole step, optimizer included, as one CUDA graph: launched at once, without Python.

    The step's batch must be on the GPU. A graph repeats what it recorded, on the same memory.
    """

    def __init__(self, step: Step):
        self.step = step
        self.device = step.device
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in step.optimizer.param_groups:
            group["capturable"] = True

    def __call__(self) -> torch.Tensor:
        if self.graph is None:
            self.record()
        self.graph.replay()
        return self.loss

    def record(self) -> None:
        """Record a step, after some steps that do what happens only once."""
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.step()
        self.graph = graph


class DeterministicStep:
    """A step whose kernels add in the same order each time."""

    def __init__(self, step: Step):
        self.step = step
        self.device = step.device

    def __call__(self) -> torch.Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return self.step()
        finally:
            torch.use_deterministic_algorithms(False)


def put_on_device(step: Step) -> Step:
    """The step with its batch on the device already, as if a loader had been fast enough."""
    pieces = []
    for piece in step.pieces:
        arrived = {name: tensor.to(step.device) for name, tensor in piece.items()}
        pieces.append(arrived)
    step.pieces = pieces
    return step


def run_machine(plan: Plan, found: Found) -> None:
    """The machine, and the two ceilings: arithmetic in each precision, and memory."""
    device = torch.device(plan.device)
    if not found.has("machine", "describe"):
        row = {"machine": describe_machine(), "versions": list_versions()}
        row["driver"] = describe_driver()
        row["cuda"] = torch.version.cuda
        row["cudnn"] = torch.backends.cudnn.version()
        row["gpus"] = torch.cuda.device_count()
        found.add("machine", "describe", row)
    for case, dtype, tf32 in (
        ("float32", torch.float32, False),
        ("TF32", torch.float32, True),
        ("bfloat16", torch.bfloat16, False),
    ):
        if found.has("machine", case):
            continue
        torch.backends.cuda.matmul.allow_tf32 = tf32
        rate = multiply(plan.matrix, dtype, device)
        found.add("machine", case, {"tflops_per_second": rate / 1e12})
    torch.backends.cuda.matmul.allow_tf32 = False
    if not found.has("machine", "memory"):
        source = torch.ones(plan.copy, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = roofline.fastest(lambda: target.copy_(source), device, 9)
        row = {"gb_per_second": 2 * plan.copy / seconds / 1e9}
        found.add("machine", "memory", row)  # read and written


def multiply(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of some matrix products."""
    left = torch.randn(n, n, device=device).to(dtype)
    right = torch.randn(n, n, device=device).to(dtype)
    seconds = roofline.fastest(lambda: left @ right, device, 9)
    return 2 * n**3 / seconds


def make_kinds(plan: Plan, batch_size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Steps of chapter 5, one more fix at a time, and the last one as a CUDA graph."""
    device = torch.device(plan.device)
    batch = make_batch(batch_size, plan.size.patch)
    on_gpu = plan.device == "cuda"
    best = replace(fixes.best_fixes(device), tf32=on_gpu, pinned=on_gpu)
    kinds = {
        "float32": Fixes(),
        "TF32": Fixes(tf32=on_gpu),
        "TF32, pinned": Fixes(tf32=on_gpu, pinned=on_gpu),
        "all fixes in TF32": replace(best, bf16=False),
        "all fixes but channels_last, bfloat16": replace(best, channels_last=False),
        "all fixes, bfloat16": best,
    }
    steps = {name: Step(each, batch, device) for name, each in kinds.items()}
    in_float32 = replace(best, pinned=False, bf16=False)
    resident = replace(best, pinned=False)
    for name, each in {"TF32": in_float32, "bfloat16": resident}.items():
        step = put_on_device(Step(each, batch, device))
        steps[f"all fixes, {name}, batch on the GPU"] = step
    for name, each in {"TF32": replace(best, bf16=False), "bfloat16": best}.items():
        step = Step(each, batch, device)
        steps[f"all fixes, {name}, {DETERMINISTIC}"] = DeterministicStep(step)
    if on_gpu:
        step = put_on_device(Step(resident, batch, device))
        steps["the same, one CUDA graph"] = GraphedStep(step)
    return steps


def run_step(plan: Plan, found: Found) -> None:
    """Seconds and samples/s of each kind of step by the batch; the kinds take turns."""
    fixes.SIZE["steps"] = plan.calls
    for batch_size in plan.step_batches:
        names = f"batch {batch_size}"
        if found.has("step", f"{names}: float32"):
            continue
        steps = make_kinds(plan, batch_size)
        _, errors = fixes.start(steps)
        for name, values in fixes.time_in_turn(steps, plan.repeats).items():
            rates = [batch_size / value for value in values]
            milliseconds = [1e3 * value for value in values]
            row = {"step_ms": spread(milliseconds), "samples_per_second": spread(rates)}
            found.add("step", f"{names}: {name}", row)
        for name, reason in errors.items():
            found.add("step", f"{names}: {name}", {"error": reason})
        del steps


def run_compile(plan: Plan, found: Found) -> None:
    """Chapter 5's whole ladder of fixes, including compiled ones and their CUDA graphs."""
    device = torch.device(plan.device)
    if plan == DRY:
        fixes.SIZE.update(fixes.QUICK)
        torch._dynamo.config.disable = True  # the compiler alone would take a minute
    else:
        fixes.SIZE["steps"] = plan.calls
    for row in fixes.study_ladder(plan.repeats, device):
        found.add("compile", f"{row['group']}: {row['rung']}", row)


def run_wide(plan: Plan, found: Found) -> None:
    """Wider networks, in bfloat16: the share of the ceiling that each reaches (MFU)."""
    device = torch.device(plan.device)
    kind = replace(fixes.best_fixes(device), tf32=plan.device == "cuda")
    batch = make_batch(plan.wide_batch, plan.size.patch)
    ceiling = found.row("machine", "bfloat16").get("tflops_per_second")
    fixes.SIZE["steps"] = plan.calls
    for width in plan.widths:
        if found.has("wide", f"width {width}"):
            continue
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = put_on_device(Step(kind, batch, device, width=width))
        run_steps(step, 2)
        steps = {"step": step}
        seconds = fixes.time_in_turn(steps, plan.repeats)["step"]
        counted = roofline.count(step)
        rates = [counted["flops"] / value / 1e12 for value in seconds]
        parameters = sum(weights.numel() for weights in step.network.parameters())
        row = {"parameters": parameters, "batch_size": plan.wide_batch}
        row |= counted | {"step_seconds": spread(seconds)}
        row["tflops_per_second"] = spread(rates)
        row["mfu"] = max(rates) / ceiling if ceiling else None
        if plan.device == "cuda":
            row["gpu_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        found.add("wide", f"width {width}", row)
        del step, steps


def run_roofline(plan: Plan, found: Found) -> None:
    """Chapter 5's roofline: FLOPs and bytes of its steps, against the ceilings."""
    size = {"batch": max(plan.step_batches), "patch": plan.size.patch}
    roofline.SIZE.update(size, matrix=plan.matrix, copy=plan.copy)
    fixes.SIZE["steps"] = plan.calls
    device = torch.device(plan.device)
    ceilings = roofline.measure_ceilings(device)
    rows = roofline.measure_steps(device)
    known = [row for row in rows if row["precision"] in ceilings]
    roofline.compare(known, ceilings)
    found.add("roofline", "ceilings", ceilings)
    for row in rows:
        found.add("roofline", row["step"], row | {"batch_size": size["batch"]})


def run_energy(plan: Plan, found: Found) -> None:
    """Joules of the GPU for a thousand samples, by its driver's counter."""
    counters = Counters()
    if plan.device != "cuda" or counters.joules() is None:
        found.add("energy", "GPU", {"missing": "no driver that counts joules (NVML)"})
        return
    batch = make_batch(plan.energy_batch, plan.size.patch)
    device = torch.device(plan.device)
    best = replace(fixes.best_fixes(device), tf32=True)
    kinds = {
        "float32": Fixes(),
        "TF32": Fixes(tf32=True),
        "all fixes in TF32": replace(best, bf16=False),
        "all fixes, bfloat16": best,
    }
    steps = {
        name: put_on_device(Step(each, batch, device)) for name, each in kinds.items()
    }
    fixes.start(steps)
    sleep(IDLE_SECONDS)  # a context, and nothing to do
    found.add("energy", "idle", measure_energy(lambda: sleep(0.1), counters, plan, 0))
    rows: dict[str, list[dict]] = {name: [] for name in steps}
    for _ in range(3):
        for name, step in steps.items():
            row = measure_energy(
                lambda: run_steps(step, plan.calls),  # noqa: B023
                counters,
                plan,
                plan.calls * plan.energy_batch,
            )
            rows[name].append(row)
    for name, values in rows.items():
        row = {key: spread([each[key] for each in values]) for key in values[0]}
        found.add("energy", name, {"batch_size": plan.energy_batch} | row)


def measure_energy(
    work: Callable[[], object], counters: Counters, plan: Plan, samples: int
) -> dict[str, float]:
    """Repeat some work for some seconds; return watts, and joules per 1,000 samples."""
    device = torch.device(plan.device)
    wait_for(device)
    began = perf_counter()
    joules = counters.joules()
    done = 0
    while perf_counter() - began < plan.energy_seconds:
        work()
        done += samples
    wait_for(device)
    seconds = perf_counter() - began
    joules = counters.joules() - joules
    row = {"watts": joules / seconds}
    if done:
        row["joules_per_1000_samples"] = 1e3 * joules / done
        row["samples_per_second"] = done / seconds
    return row
