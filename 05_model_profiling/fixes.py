"""Chapter 5: the ladder: what each fix of the step buys, by itself and on top of the others.

    uv run python fixes.py                   # all studies, 25 minutes
    uv run python fixes.py ladder            # one of ladder, batch, memory, rmse
    uv run python fixes.py ladder --quick    # tiny: that it works, not what it finds
    uv run python fixes.py --save-results    # and write results/*.json and *.png

You should see each fix's time against chapter 4's step, how far its gradients are from
those of the plain network, and whether bfloat16 pays on this machine.

A batch is made once and given to every step, so that no loader plays a part. Steps of all
kinds take turns, so that a machine that slows down slows all of them.
"""

import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ladder_plot import plot_ladder
from memory_curve import measure_memory
from model import Batch
from precision import has_bf16
from results import RESULTS, parse_studies, save_rows, spread
from step import (
    IS_GLIBC,
    Fixes,
    Step,
    gradient_difference,
    make_batch,
    run_steps,
    save_snapshot,
)

HERE = Path(__file__).parent
SIZE = {"patch": 64, "batch": 32, "batches": [8, 16, 32, 64, 128], "steps": 3}
QUICK = {"patch": 16, "batch": 4, "batches": [4, 8], "steps": 1}


NAMES = {
    "one_scaling": "gradients scaled in one call",
    "fused_optimizer": "fused optimizer",
    "channels_last": "channels_last",
    "zero_padding": "zero padding",
    "bf16": "bfloat16",
    "plain_norm": "GroupNorm in plain order",
    "memory_kept": "memory kept by the process",
    "compiled": "torch.compile",
    "tf32": "TF32",
    "pinned": "pinned memory, copied meanwhile",
    "cuda_graph": "CUDA graph",
    "loss_read": "fault: .item() in each step",
}
ON_GPU_ONLY = {"tf32", "pinned", "cuda_graph"}
STACK = (
    "one_scaling",
    "fused_optimizer",
    "channels_last",
    "zero_padding",
    "bf16",
    "plain_norm",
)


def start(steps: dict[Any, Step]) -> tuple[dict[Any, float], dict[Any, str]]:
    """Run each step for the first time: its seconds, or why it cannot run.

    A step that cannot run is taken out of `steps`.
    """
    first = {}
    errors = {}
    for name in tqdm(list(steps), "first steps", disable=None):
        try:
            first[name] = run_steps(steps[name], 1)
        except Exception as error:  # the compiler's have no base of their own
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            del steps[name]
    return first, errors


def time_in_turn(steps: dict[Any, Step], repeats: int) -> dict[Any, list[float]]:
    """Seconds a step, `repeats` of each kind; the kinds take turns."""
    seconds = {name: [] for name in steps}
    for step in steps.values():
        run_steps(step, 1)  # the second still allocates
    for _ in tqdm(range(repeats), "repeats", disable=None):
        for name, step in steps.items():
            seconds[name].append(run_steps(step, SIZE["steps"]))
    return seconds


def make_ladder(device: torch.device) -> dict[tuple[str, str], Fixes]:
    """The rungs, (group, name): each fix alone, then one more at a time."""
    rungs = {("chapter 4", "chapter 4's step"): Fixes()}
    for field, name in NAMES.items():
        rungs["alone", name] = Fixes(**{field: True})
    stacked = Fixes()
    order = [*STACK, "compiled"]
    if device.type == "cuda":
        order = ["tf32", "pinned", *order, "cuda_graph"]
    for field in order:
        stacked = replace(stacked, **{field: True})
        rungs["stacked", NAMES[field]] = stacked
    return rungs


def why_not(fixes: Fixes, device: torch.device) -> str | None:
    """Why these fixes are of no use on this device, if they are not."""
    on_gpu = device.type != "cpu"
    wanted = {name for name, value in asdict(fixes).items() if value is True}
    if wanted & ON_GPU_ONLY and not on_gpu:
        return "not run: needs a GPU"
    if fixes.bf16 and not has_bf16(on_gpu):
        return "not run: no instructions for bfloat16"
    if fixes.memory_kept and (on_gpu or not IS_GLIBC):
        return "not run: needs a CPU and glibc"
    return None


def study_ladder(repeats: int, device: torch.device) -> list[dict]:
    """Each rung's seconds, its ratio to chapter 4's step, and its gradients."""
    batch = make_batch(SIZE["batch"], SIZE["patch"])
    rungs = make_ladder(device)
    errors = {}
    steps = {}
    for rung, fixes in rungs.items():
        reason = why_not(fixes, device)
        if reason:
            errors[rung] = reason
        else:
            steps[rung] = Step(fixes, batch, device)
    first, failed = start(steps)
    errors |= failed
    seconds = time_in_turn(steps, repeats)
    plain = np.array(seconds["chapter 4", "chapter 4's step"])
    rows = []
    for rung, fixes in rungs.items():
        row = {"group": rung[0], "rung": rung[1], "batch_size": SIZE["batch"]}
        if rung in errors:
            rows.append(row | {"error": errors[rung]})
            continue
        row["first_step_seconds"] = first[rung]
        row["seconds"] = spread(seconds[rung])
        row["times_faster"] = spread((plain / seconds[rung]).tolist())
        row["gradient_difference"] = gradient_difference(fixes, batch, device)
        rows.append(row)
    return rows


def best_fixes(device: torch.device) -> Fixes:
    """What train.py does with --precision bf16-mixed, where there is bfloat16."""
    fixes = Fixes(**dict.fromkeys(STACK, True))
    return fixes if why_not(fixes, device) is None else replace(fixes, bf16=False)


def milestones(batch: Batch, device: torch.device) -> dict[str, Step]:
    """Chapter 4's step, all fixes that leave float32, and all fixes; each has run once."""
    best = best_fixes(device)
    kinds = {
        "chapter 4's step": Fixes(),
        "all fixes in float32": replace(best, bf16=False),
        "all fixes": best,
    }
    steps = {name: Step(fixes, batch, device) for name, fixes in kinds.items()}
    _, errors = start(steps)
    if errors:
        raise RuntimeError(errors)
    return steps


def study_batch(repeats: int, device: torch.device) -> list[dict]:
    """Samples/s by the batch: where the curve bends is enough."""
    kept = Fixes(memory_kept=True)
    kinds = {"chapter 4": Fixes(), "kept": kept, "stacked": best_fixes(device)}
    steps = {}
    for batch_size in SIZE["batches"]:
        batch = make_batch(batch_size, SIZE["patch"])
        for name, fixes in kinds.items():
            if not why_not(fixes, device):
                steps[name, batch_size] = Step(fixes, batch, device)
    wanted = list(steps)
    _, errors = start(steps)
    seconds = time_in_turn(steps, repeats)
    rows = []
    for name, batch_size in wanted:
        row = {"step": name, "batch_size": batch_size}
        if (name, batch_size) in errors:
            rows.append(row | {"error": errors[name, batch_size]})
            continue
        rates = [batch_size / value for value in seconds[name, batch_size]]
        rows.append(row | {"samples_per_second": spread(rates)})
    return rows


def study_memory(repeats: int, device: torch.device) -> list[dict]:
    """The most memory that a step's tensors hold at once, beside its seconds."""
    batch = make_batch(SIZE["batch"], SIZE["patch"])
    best = best_fixes(device)
    kinds = {
        "chapter 4's step": Fixes(),
        "all fixes": best,
        "all fixes, finest level computed again": replace(best, checkpointed=True),
        "all fixes, four micro-batches": replace(best, micro_batches=4),
        "all fixes, both": replace(best, checkpointed=True, micro_batches=4),
    }
    steps = {name: Step(fixes, batch, device) for name, fixes in kinds.items()}
    _, errors = start(steps)
    peaks = {name: max(measure_memory(step).bytes_held) for name, step in steps.items()}
    if device.type == "cuda":
        for name, step in steps.items():
            save_snapshot(step, HERE / "outputs/memory" / f"{name}.pickle")
    rows = [{"step": name, "error": error} for name, error in errors.items()]
    for name, values in time_in_turn(steps, repeats).items():
        difference = gradient_difference(kinds[name], batch, device)
        row = {"step": name, "batch_size": SIZE["batch"], "peak_bytes": peaks[name]}
        row |= {"seconds": spread(values), "gradient_difference": difference}
        rows.append(row)
    return rows


def study_rmse(repeats: int, device: torch.device) -> list[dict]:
    """RMSE and samples/s of train.py, for both paddings and precisions, of so many seeds.

    The last validation's RMSE is for a choice; the test's only confirms it.
    """
    rows = []
    for seed in tqdm(range(repeats), "seeds", disable=None):
        for padding in ("replicate", "zeros"):
            for precision in ("32-true", "bf16-mixed"):
                flags = ["--padding", padding, "--precision", precision]
                if SIZE == QUICK:
                    flags += ["--max-steps", "2", "--validate-every", "2"]
                row = {"padding": padding, "precision": precision, "seed": seed}
                rows.append(row | run_training([*flags, "--seed", str(seed)]))
    return rows


def run_training(flags: list[str]) -> dict:
    """What train.py finds with these flags: RMSE of validation and test, samples/s."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / "train.py", "--output-dir", folder, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(folder, "summary.json").read_text())
        with open(Path(folder, "metrics.csv"), newline="") as log:
            logged = [row["rmse (m/s)"] for row in csv.DictReader(log)]
    return {
        "validation_rmse": float([rmse for rmse in logged if rmse][-1]),
        "rmse": summary["rmse"]["U-Net"],
        "samples_per_second": summary["samples_per_second"],
    }


def describe(study: str, row: dict) -> str:
    """A row in a line."""
    if study == "ladder":
        name = f"{row['group']}: {row['rung']}"
        if "error" in row:
            return f"{name}: {row['error']}"
        times = f"{row['times_faster']['median']:.2f} times chapter 4's step"
        first = f"first step {row['first_step_seconds']:.1f} s"
        gradients = ""
        if row["gradient_difference"]:
            gradients = f"gradients differ by {row['gradient_difference']:.0e}, "
        return f"{name}: {times}, {gradients}{first}"
    if "error" in row:
        return f"{row['step']}: {row['error']}"
    if study == "batch":
        rate = row["samples_per_second"]["median"]
        return f"batch {row['batch_size']}, {row['step']}: {rate:.0f} samples/s"
    if study == "memory":
        megabytes = row["peak_bytes"] / 1e6
        return f"{row['step']}: {megabytes:.0f} MB, {row['seconds']['median']:.2f} s"
    kind = f"{row['padding']}, {row['precision']}, seed {row['seed']}"
    return f"{kind}: RMSE {row['rmse']}, {row['samples_per_second']:.1f} samples/s"


def judge_bf16(rows: list[dict]) -> str:
    """Whether bfloat16 pays here, from the ladder's rows: capability is not enough."""
    stacked = {row["rung"]: row for row in rows if row["group"] == "stacked"}
    with_it = stacked[NAMES["plain_norm"]]
    if "error" in with_it:
        return f"bfloat16: {with_it['error']}; train with --precision 32-true"
    without = stacked[NAMES["zero_padding"]]
    gain = without["seconds"]["median"] / with_it["seconds"]["median"]
    flag = "bf16-mixed" if gain > 1.05 else "32-true"
    return f"bfloat16 makes the step {gain:.2f} times as fast: --precision {flag}"


STUDIES = {
    "ladder": study_ladder,
    "batch": study_batch,
    "memory": study_memory,
    "rmse": study_rmse,
}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(STUDIES), 5, argv)
    if args.quick:
        SIZE.update(QUICK)
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    found = {}
    for study in args.studies:
        rows = STUDIES[study](args.repeats, device)
        found[study] = rows
        for row in rows:
            print(describe(study, row))
        if study == "ladder" and not args.quick:
            print(judge_bf16(rows))
        if args.save_results:
            command = f"uv run python fixes.py {study} --repeats {args.repeats}"
            save_rows(f"fixes_{study}", command, rows)
            if study == "ladder":
                plot_ladder(rows).savefig(RESULTS / "fixes_ladder.png", dpi=100)
    return found


if __name__ == "__main__":
    main()
