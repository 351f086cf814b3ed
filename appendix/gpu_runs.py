"""The parts of a day on a GPU that run the chapters' train.py as readers do."""

import json
import re
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpu_plan import CHAPTER_6, CHAPTERS, DETERMINISTIC, DRY, Found, Plan
from gpu_train import RunError, Switches, read_module, summarize, train_apart
from ladder import serve_store

# Numbers of CHAPTERS: the first that takes several devices, a store, --eval-samples.
SEVERAL_DEVICES = 1
ON_STORE = 2
IN_MODULES = 3
BF16 = ["--precision", "bf16-mixed"]
UNITS = {"MB": 1e6, "GB": 1e9}


def make_flags(plan: Plan, chapter: str, store: list[str], accelerator: str) -> list:
    """The flags of a training with the chapter's defaults on one device."""
    flags = ["--accelerator", accelerator, "--max-steps", plan.steps]
    flags += ["--patch-size", plan.size.patch, "--batch-size", plan.size.batch]
    number = CHAPTERS.index(chapter)
    if number >= SEVERAL_DEVICES:
        flags += ["--devices", 1]
    if number >= ON_STORE:
        flags += store
    if number >= IN_MODULES and plan == DRY:
        flags += ["--eval-samples", 2]
    return list(map(str, flags))


def train_each(
    part: str, cases: dict[str, tuple[str, list[str]]], found: Found
) -> None:
    """Train each case, (chapter, flags), that has no row yet. A failed run has its reason."""
    for case, (chapter, flags) in cases.items():
        if found.has(part, case):
            continue
        try:
            row = summarize(chapter, flags)
        except RunError as error:
            row = {"error": str(error)}
        found.add(part, case, row)


def run_ladder(plan: Plan, found: Found) -> None:
    """Each chapter's default training on the GPU, and chapter 5's in bfloat16."""
    cases = {}
    with serve_store(plan.size) as store:
        for chapter in plan.chapters:
            flags = make_flags(plan, chapter, store, plan.accelerator)
            cases[chapter] = chapter, flags
            if chapter == "05_model_profiling":
                cases[f"{chapter}, bfloat16"] = chapter, [*flags, *BF16]
            if chapter in CHAPTERS[IN_MODULES:] and plan != DRY:
                cases[f"{chapter}, 1 worker"] = chapter, [*flags, "--num-workers", "1"]
        train_each("ladder", cases, found)


def run_cpu(plan: Plan, found: Found) -> None:
    """The same trainings on this machine's cores, the most informative first."""
    first = plan.chapters[:1]
    others = plan.chapters[1:]
    cases = {}
    with serve_store(plan.size) as store:
        for chapter in (*first, *reversed(others)):
            flags = make_flags(plan, chapter, store, "cpu")
            cases[chapter] = chapter, flags
        train_each("cpu", cases, found)


def run_large(plan: Plan, found: Found) -> None:
    """A batch that suits a GPU, with workers, in the last two chapters."""
    cases = {}
    with serve_store(plan.size) as store:
        for chapter in plan.chapters[-2:]:
            flags = make_flags(plan, chapter, store, plan.accelerator)
            flags += ["--batch-size", str(plan.large_batch), *BF16]
            flags += ["--max-steps", str(plan.large_steps)]
            flags += ["--num-workers", str(plan.workers)]
            name = f"{chapter}, batch {plan.large_batch}, {plan.workers} workers"
            cases[name] = chapter, flags
        train_each("large", cases, found)


def run_exact(plan: Plan, found: Found) -> None:
    """Whether runs of chapter 6 are equal to the bit: repeated, killed, on CPU and GPU.

    Each run writes its checkpoints to a folder of its own. Two folders are compared by the
    weights of their last steps.
    """
    with serve_store(plan.size) as store, TemporaryDirectory() as root:
        for kind in plan.kernels:
            if found.has("exact", f"killed and resumed, {kind}"):
                continue
            try:
                compare_repeats(plan, found, store, Path(root), kind)
            except RunError as error:
                found.add("exact", kind, {"error": str(error)})
        if not found.has("exact", "GPU without TF32 against CPU"):
            compare_devices(plan, found, store, Path(root))


def exact_flags(plan: Plan, store: list[str], accelerator: str, steps: int) -> list:
    """A short training of chapter 6 that validates only when it is over."""
    flags = make_flags(plan, "06_whats_next", store, accelerator)
    few = plan.size.batch
    flags += ["--max-steps", steps, "--checkpoint-every", plan.checkpoint_every]
    flags += ["--validate-every", steps, "--full-validation-patches", few]
    flags += ["--eval-samples", few, "--loggers", "CSVLogger"]
    return list(map(str, flags))


def compare_repeats(
    plan: Plan, found: Found, store: list[str], root: Path, kind: str
) -> None:
    """Train twice, and once more in two pieces; the first piece is killed."""
    flags = exact_flags(plan, store, plan.accelerator, plan.exact_steps)
    is_deterministic = kind == DETERMINISTIC
    switches = Switches(deterministic=is_deterministic)
    first, second, resumed = (root / f"{kind} {n}" for n in range(3))
    for folder in (first, second):
        train_apart("06_whats_next", flags, folder, switches)
    row = compare_apart(first, second)
    row["warnings"] = list_warnings(first / "log.txt")
    found.add("exact", f"twice, {kind}", row)
    killed = Switches(deterministic=is_deterministic, kill_after=plan.killed_after)
    train_apart("06_whats_next", flags, resumed, killed)
    going_on = [*flags, "--resume", "auto"]
    train_apart("06_whats_next", going_on, resumed, switches)
    row = compare_apart(first, resumed)
    row["killed_after"] = plan.killed_after
    row["resumed_at"] = [path.name for path in resumed.glob("resumed_at_*")]
    found.add("exact", f"killed and resumed, {kind}", row)


def compare_devices(plan: Plan, found: Found, store: list[str], root: Path) -> None:
    """The same first steps on the cores and on the GPU, with and without TF32."""
    steps = plan.compared_steps
    cpu = root / "cpu"
    flags = exact_flags(plan, store, "cpu", steps)
    train_apart("06_whats_next", flags, cpu)
    flags = exact_flags(plan, store, plan.accelerator, steps)
    for name in ("with", "without"):
        tf32 = name == "with"
        if plan.device == "cpu" and tf32:
            continue
        folder = root / name
        train_apart("06_whats_next", flags, folder, Switches(tf32=tf32))
        row = compare_apart(cpu, folder) | {"steps": steps}
        found.add("exact", f"GPU {name} TF32 against CPU", row)


def compare_apart(one: Path, other: Path) -> dict:
    """compare_weights in a fork: threads that torch has started here would hang later forks."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(compare_weights, (one, other))


def compare_weights(one: Path, other: Path) -> dict:
    """Whether the last checkpoints of two runs have the same bits, and how far they are apart."""
    before = load_last(one)
    after = load_last(other)
    equal = all(torch.equal(before[name], after[name]) for name in before)
    flat = torch.cat([values.double().flatten() for values in before.values()])
    others = torch.cat([values.double().flatten() for values in after.values()])
    difference = (flat - others).norm() / flat.norm()
    return {"equal_to_the_bit": equal, "difference": float(difference)}


def load_last(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last checkpoint."""
    last = max(folder.glob("checkpoints/step_*.ckpt"))
    saved = torch.load(last, map_location="cpu", weights_only=True)
    return saved["state_dict"]


def list_warnings(log: Path) -> list[str]:
    """The operators that have no deterministic kernel, as torch warns of them."""
    named = re.findall(
        r"(\S+) does not have a deterministic implementation", log.read_text()
    )
    return sorted(set(named))


def run_memory(plan: Plan, found: Found) -> None:
    """Memory that preflight predicts for chapter 6's training, and the most it then used."""
    precisions = ["32-true"] if plan == DRY else ["32-true", "bf16-mixed"]
    with serve_store(plan.size) as store:
        for precision in precisions:
            if found.has("memory", precision):
                continue
            flags = make_flags(plan, "06_whats_next", store, plan.accelerator)
            flags += ["--batch-size", str(plan.memory_batch), "--precision", precision]
            flags += ["--max-steps", "4"]
            row = predict_memory(flags)
            if "error" not in row:
                run = summarize("06_whats_next", flags)
                row["measured_gb"] = run["gpu_peak_gb"]
                row["reserved_gb"] = run["gpu_reserved_gb"]
            found.add("memory", precision, row)


def predict_memory(flags: list[str]) -> dict:
    """What preflight says that the step will hold on the device, in GiB; its red lines."""
    printed = read_module("06_whats_next", "preflight", flags)
    pattern = r"moments ([\d.,]+) (MB|GB), activations ([\d.,]+) (MB|GB)"
    sizes = re.search(pattern, printed)
    if sizes is None:
        lines = printed.strip().splitlines() or ["it said nothing"]
        return {"error": f"preflight: {lines[-1]}"}
    fixed, unit, activations, other_unit = sizes.groups()
    total = to_bytes(fixed, unit) + to_bytes(activations, other_unit)
    red = [line for line in printed.splitlines() if line.startswith("RED")]
    return {"predicted_gb": total / 2**30, "red": red}


def to_bytes(number: str, unit: str) -> float:
    """A size as preflight prints it."""
    return float(number.replace(",", "")) * UNITS[unit]


def run_scaling(plan: Plan, found: Found) -> None:
    """Chapter 5's training on more and more GPUs, each with the same slice of the batch."""
    number = torch.cuda.device_count() if plan.device == "cuda" else 0
    if number < 2:
        found.add("scaling", "NCCL", {"missing": f"needs several GPUs, has {number}"})
        return
    with serve_store(plan.size) as store:
        devices = 1
        while devices <= number:
            case = f"{devices} GPUs"
            if not found.has("scaling", case):
                found.add("scaling", case, train_on_several(plan, store, devices))
            devices *= 2


def train_on_several(plan: Plan, store: list[str], devices: int) -> dict:
    """A weak-scaling run as a command, so that Lightning can start the other ranks."""
    flags = make_flags(plan, "06_whats_next", store, plan.accelerator)
    flags += ["--devices", str(devices), "--num-workers", "2", *BF16]
    flags += ["--batch-size", str(32 * devices)]
    with TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *flags, "--output-dir", folder]
        done = subprocess.run(command, cwd=CHAPTER_6, capture_output=True, text=True)
        summary = Path(folder, "summary.json")
        if done.returncode or not summary.exists():
            return {"error": done.stderr.strip().splitlines()[-1]}
        metrics = json.loads(summary.read_text())
    names = ("samples_per_second", "data_wait_share")
    return {"devices": devices} | {name: metrics[name] for name in names}
