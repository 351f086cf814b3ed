"""What a machine must have for a run: devices, limits, shared memory, room on its disks."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from findings import Finding, in_bytes
from options import Options
from store import READS_AT_ONCE

GIGA = 1e9
PREFETCH = 2  # batches that each worker holds ready: DataLoader's default
TENSORS = 5  # in a batch; a worker hands over each in a file of its own
LOGS = 1e8  # bytes that a run may write beside its checkpoints
FREE = 0.9  # of a GPU's memory: below it, another process is there


def check_machine(
    options: Options, device: torch.device, checkpoint_bytes: int, batch_bytes: int
) -> Iterator[Finding]:
    """The checks of this rank's machine that need no data. Sizes are in bytes."""
    yield check_device(device)
    workers = options.num_workers
    yield judge_open_files(*count_open_files(), workers)
    shared = Path("/dev/shm")
    if workers and shared.exists():
        needed = options.devices * workers * PREFETCH * batch_bytes
        yield judge_shared_memory(shutil.disk_usage(shared).free, needed)
    room = (options.keep + 2) * checkpoint_bytes  # the best, and one that is written
    if "://" in options.checkpoint_dir:
        yield check_disk("--output-dir", options.output_dir, LOGS)
    else:
        yield check_disk("--checkpoint-dir", options.checkpoint_dir, room + LOGS)
        yield check_disk("--output-dir", options.output_dir, LOGS)


def check_device(device: torch.device) -> Finding:
    """The GPU or the cores that this rank computes on."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return judge_gpu(torch.cuda.get_device_name(device), free, total)
    has_driver = Path("/dev/nvidia0").exists()
    return judge_cpu(has_driver, torch.get_num_threads(), os.cpu_count())


def judge_gpu(name: str, free: int, total: int) -> Finding:
    """Red if another process has taken memory of the GPU."""
    text = f"{name}, {in_bytes(free)} of {in_bytes(total)} free"
    if free < FREE * total:
        return Finding("device", text, "nvidia-smi names the process that has the rest")
    return Finding("device", text)


def judge_cpu(has_driver: bool, threads: int, cores: int) -> Finding:
    """Red if the machine has a GPU that torch does not see, or was told not to use."""
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
    remedy = f"ulimit -n {2 * needed} in the shell that starts the run"
    if hard < 2 * needed:
        remedy = f"ask for a hard limit above {hard:,}; in Docker: --ulimit nofile=4096"
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
    text = f"{in_bytes(free)} free in {folder}, and a run writes {in_bytes(needed)}"
    if needed <= free:
        return Finding(name, text)
    return Finding(name, text, f"make room, or give another {flag} or a smaller --keep")


def free_memory(ranks: int) -> int:
    """Bytes that are free for each of the ranks on this machine, or in this container."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")  # of a container
    limit = group / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        used = int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):  # a cache, which gives way
                used -= int(line.split()[1])
        free = min(free, int(limit.read_text()) - used)
    return free // ranks
