"""What a machine must have for a run: devices, limits, shared memory, room on its disks."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from options import Options
from preflight.findings import Finding, in_bytes
from store import READS_AT_ONCE

GIGA = 1e9
PREFETCH = 2  # batches that each worker holds ready: DataLoader's default
TENSORS = 5  # in a batch; a worker hands over each in a file of its own
LOGS = 1e8  # bytes that a run may write beside its checkpoints
FREE = 0.8  # of a GPU's memory: this process needs some itself, and has it already


def check_machine(
    options: Options, device: torch.device, checkpoint_bytes: int, batch_bytes: int
) -> Iterator[Finding]:
    """The checks of this rank's machine that need no data.

    Sizes are in bytes, that of a batch of one rank and one micro-batch.
    """
    yield check_device(options.accelerator, device)
    workers = options.num_workers
    yield judge_open_files(*count_open_files(), workers)
    shared = Path("/dev/shm")
    if workers and shared.exists():
        needed = options.devices * workers * PREFETCH * batch_bytes
        yield judge_shared_memory(shutil.disk_usage(shared).free, needed)
    yield check_disk("--output-dir", options.output_dir, LOGS)
    if "://" not in options.checkpoint_dir:
        room = (options.keep + 2) * checkpoint_bytes  # the best, and one being written
        yield check_disk("--checkpoint-dir", options.checkpoint_dir, room)


def check_device(accelerator: str, device: torch.device) -> Finding:
    """The GPU or the cores that this rank computes on."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return judge_gpu(torch.cuda.get_device_name(device), free, total)
    has_driver = accelerator != "cpu" and Path("/dev/nvidia0").exists()
    return judge_cpu(has_driver, torch.get_num_threads(), os.cpu_count())


def judge_gpu(name: str, free: int, total: int) -> Finding:
    """Red if another process has taken memory of the GPU."""
    text = f"{name}, {in_bytes(free)} of {in_bytes(total)} free"
    if free < FREE * total:
        return Finding("device", text, "nvidia-smi names the process that has the rest")
    return Finding("device", text)


def judge_cpu(has_driver: bool, threads: int, cores: int) -> Finding:
    """Red if the machine has a GPU's driver, and torch sees no GPU."""
    text = f"no GPU; threads: {threads}, cores: {cores}"
    if has_driver and torch.version.cuda:
        remedy = f"its driver is too old for CUDA {torch.version.cuda}, or hidden"
        return Finding("device", text, f"there is /dev/nvidia0: {remedy}")
    return Finding("device", text)


def count_open_files() -> tuple[int, int, int]:
    """How many files this process has open, and its soft and hard limits."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return psutil.Process().num_fds(), soft, hard


def judge_open_files(now: int, soft: int, hard: int, workers: int) -> Finding:
    """Red if connections to the store and what workers hand over may pass the limit.

    Training and validation each read through a client of their own.
    """
    needed = now + 2 * READS_AT_ONCE + workers * PREFETCH * TENSORS
    text = f"the limit is {soft:,}, and a rank may need {needed:,}"
    if soft >= needed:
        return Finding("open files", text)
    remedy = f"ulimit -n {min(hard, 2 * needed)} in the shell that starts the run"
    if hard < needed:
        remedy = f"ask for a hard limit of {2 * needed}"
        remedy += f"; in Docker: --ulimit nofile={2 * needed}"
    return Finding("open files", text, remedy)


def judge_shared_memory(free: int, needed: int) -> Finding:
    """Red if the workers' batches do not fit into /dev/shm: they would die of SIGBUS."""
    text = f"{in_bytes(free)} free, and the workers hold {in_bytes(needed)}"
    if needed <= free:
        return Finding("/dev/shm", text)
    size = f"{2 * needed / GIGA:.1f}g"
    remedy = f"docker run --shm-size {size} (Kubernetes: an emptyDir of medium Memory)"
    return Finding("/dev/shm", text, f"{remedy}, or a smaller --num-workers")


def check_disk(flag: str, folder: str, needed: float) -> Finding:
    """The room where a folder is, or will be."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return judge_disk(flag, folder, shutil.disk_usage(path).free, needed)


def judge_disk(flag: str, folder: str, free: int, needed: float) -> Finding:
    """Red if a run's files do not fit."""
    name = "disk" if flag == "--checkpoint-dir" else "disk of logs"
    remedy = f"make room, or give another {flag}"
    if flag == "--checkpoint-dir":
        remedy += " or a smaller --keep"
    text = f"{in_bytes(free)} free in {folder}, and a run writes {in_bytes(needed)}"
    if needed <= free:
        return Finding(name, text)
    return Finding(name, text, remedy)


def free_memory(ranks: int) -> int:
    """Bytes that are free for each of the ranks on this machine, or in this container."""
    free = psutil.virtual_memory().available
    groups = Path("/proc/self/cgroup")
    if groups.exists():
        for line in groups.read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # version 2
                free = min(free, free_in_group(Path("/sys/fs/cgroup"), path))
    return free // ranks


def free_in_group(root: Path, path: str) -> float:
    """Bytes that a container or a job may still take: the least of its group's parents."""
    free = math.inf
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if not limit.exists() or limit.read_text().strip() == "max":
            continue
        used = int((folder / "memory.current").read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):  # a cache, which gives way
                used -= int(line.split()[1])
        free = min(free, int(limit.read_text()) - used)
    return free
