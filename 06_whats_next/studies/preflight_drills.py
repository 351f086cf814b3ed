"""Whether preflight finds faults that are injected, and whether its memory is right.

    uv run python -m studies.preflight_drills                  # about four minutes
    uv run python -m studies.preflight_drills --save-results   # and results/preflight.json

You should see what is red for each fault, and the predicted memory beside the measured.
"""

import argparse
import multiprocessing
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import zarr

from clock import peak_memory_gb
from demo_store import CLOUD
from model import UNet
from options import VARIABLES
from preflight.memory import add_up
from results import save_rows

CHAPTER = Path(__file__).parent.parent
FOLDER = Path("outputs/preflight_drills")
SMALL = "--accelerator cpu --patch-size 32 --batch-size 8".split()
STORE = FOLDER / "winds/whole.zarr"
BATCHES = (32, 64, 128, 256)  # of the memory
PATCH = 64


def limit(kind: int, number: int) -> Callable[[], None]:
    """What sets a soft limit of the process that calls it."""
    hard = resource.getrlimit(kind)[1]
    return lambda: resource.setrlimit(kind, (number, hard))


def run_preflight(*flags: object, before: Callable | None = None) -> list[str]:
    """Run preflight with these flags; the lines that it prints."""
    command = [sys.executable, "-m", "preflight", *map(str, flags)]
    return run(command, before)


def run(command: list[str], before: Callable | None = None) -> list[str]:
    done = subprocess.run(
        command, cwd=CHAPTER, preexec_fn=before, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.replace(f"{CHAPTER}/", "").splitlines()


def make_small_store() -> None:
    """It has 5 degrees and 36 days, and is made by chapter 3's script."""
    flags = "--days 36 --resolution 5 --patch-size 16".split()
    script = CLOUD / "make_store.py"
    command = [sys.executable, script, *flags, "--store", CHAPTER / STORE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def inject_nothing() -> list[str]:
    return run_preflight("--store", STORE, *SMALL)


def inject_full_disk() -> list[str]:
    """No file may grow beyond a megabyte."""
    before = limit(resource.RLIMIT_FSIZE, 1_000_000)
    folder = FOLDER / "full"
    return run_preflight(
        "--store", STORE, *SMALL, "--output-dir", folder, before=before
    )


def inject_wrong_store() -> list[str]:
    return run_preflight("--store", FOLDER / "winds", *SMALL)


def inject_nan() -> list[str]:
    """In one cell of one map of the training times."""
    store = FOLDER / "winds/nan.zarr"
    if not (CHAPTER / store).exists():
        shutil.copytree(CHAPTER / STORE, CHAPTER / store)
    zarr.open_group(CHAPTER / store)[VARIABLES[1]][5, 10, 10] = np.nan
    return run_preflight("--store", store, *SMALL)


def inject_large_batch() -> list[str]:
    large = ["--batch-size", 50_000, "--patches-per-block", 1]
    return run_preflight("--store", STORE, *SMALL, *large)


def inject_open_files() -> list[str]:
    before = limit(resource.RLIMIT_NOFILE, 100)
    return run_preflight("--store", STORE, *SMALL, before=before)


def inject_slow_store() -> list[str]:
    """Each first byte comes after two seconds."""
    command = [sys.executable, CLOUD / "local_s3.py", "--until-stdin-ends"]
    server = subprocess.Popen(
        [*command, "--latency-ms", "2000", "--folder", CHAPTER / FOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        endpoint = server.stdout.readline().strip()
        place = ["--store", "s3://winds/whole.zarr", "--endpoint", endpoint]
        return run_preflight(*place, "--anonymous", *SMALL)


def inject_other_version() -> list[str]:
    """Rank 1 of two finds another version of zarr."""
    package = CHAPTER / FOLDER / "packages/zarr-3.0.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Name: zarr\nVersion: 3.0.0\n")
    for_rank_1 = f'[ $RANK = 1 ] && export PYTHONPATH="{package.parent}"'
    script = f'{for_rank_1}; exec "$0" -m preflight "$@"'
    flags = ["--store", str(STORE), *SMALL]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--no-python", "sh", "-c"]
    return run([*torchrun, script, sys.executable, *flags])


FAULTS = {
    "nothing": inject_nothing,
    "a full disk (no file may exceed 1 MB)": inject_full_disk,
    "a folder without a store": inject_wrong_store,
    "NaN in one cell at one time": inject_nan,
    "`--batch-size 50000 --patch-size 32 --patches-per-block 1`": inject_large_batch,
    "2 s to the first byte": inject_slow_store,
    "`ulimit -Sn 100`": inject_open_files,
    "another zarr on one of two ranks": inject_other_version,
}


def find_red(lines: list[str]) -> list[dict[str, str]]:
    """Of preflight's lines, those that are red, with the remedy below each."""
    red = []
    for line, below in zip(lines, [*lines[1:], ""]):
        if line.startswith("RED"):
            name, text = line[7:19].strip(), line[20:]
            remedy = below.split("-> ")[1]
            red.append({"name": name, "text": text, "remedy": remedy})
    return red


def measure_memory(batch: int) -> dict[str, float]:
    """In a process of its own: bytes predicted for a batch, and what was taken at most."""
    network = UNet(2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def step(samples: int) -> None:
        inputs = torch.randn(samples, 3, PATCH, PATCH)
        optimizer.zero_grad()
        inputs = inputs.to(memory_format=torch.channels_last)
        network(inputs).square().mean().backward()
        optimizer.step()

    sample = torch.zeros(1, 3, PATCH, PATCH).to(memory_format=torch.channels_last)
    memory = add_up(network, sample, batch, ranks=1, waiting=0)
    step(1)
    before = peak_memory_gb()
    for _ in range(3):
        step(batch)
    found = (peak_memory_gb() - before) * 2**30
    return {"batch": batch, "predicted": memory.activations, "found": found}


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    make_small_store()
    rows = []
    for fault, inject in FAULTS.items():
        lines = inject()
        rows.append({"what": "fault", "fault": fault, "red": find_red(lines)})
        print(fault)
        print(*lines, sep="\n")
    print("as a reader runs it")
    lines = [line for line in run_preflight() if line.startswith(("green", "RED"))]
    rows.append({"what": "output", "lines": lines})
    print(*lines, sep="\n")
    for batch in BATCHES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            row = process.submit(measure_memory, batch).result()
        rows.append({"what": "memory", **row})
        print(row)
    if args.save_results:
        save_rows(
            "preflight",
            "uv run python -m studies.preflight_drills --save-results",
            rows,
        )
    return rows


if __name__ == "__main__":
    main()
