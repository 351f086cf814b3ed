"""What twelve steps of each chapter end at: a record to compare with after a change that moves code.

    uv run python tests/twelve_steps.py record before.json [SCRIPT ...]
    uv run python tests/twelve_steps.py compare before.json after.json

Each script trains four times: with its defaults, with a worker process, on two ranks, and killed and
resumed. A record holds checksums of weights and optimizer, and the RMSE. Both records must be of one
machine, because processors round differently; so none is committed.
"""

import argparse
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import programs
import runs
import torch

ALONE = ["01_setup/train.py", "01_setup/train_by_hand.py"]
LOCAL = [*ALONE, "02_multi_gpu/train.py", "02_multi_gpu/train_ddp_by_hand.py"]
ON_STORE = [
    "03_cloud_data/train.py",
    "04_data_pipeline/train.py",
    "05_model_profiling/train.py",
    "06_whats_next/train.py",
]
STEPS = "--accelerator cpu --max-steps 12 --validate-every 6 --checkpoint-every 4".split()
STORE = "--days 36 --resolution 5 --patch-size 16".split()


def checksum(state: object) -> str:
    """Of all tensors and numbers in nested dictionaries and lists."""
    if isinstance(state, torch.Tensor):
        content = state.contiguous().numpy().tobytes()
    elif isinstance(state, dict):
        content = repr([(key, checksum(state[key])) for key in sorted(state, key=str)]).encode()
    elif isinstance(state, (list, tuple)):
        content = repr([checksum(part) for part in state]).encode()
    else:
        content = repr(state).encode()
    return sha256(content).hexdigest()[:16]


def train(script: str, ways: str, flags: list[str], folder: Path) -> dict:
    """Train in one of the ways; return what the run ended at."""
    flags = [*STEPS, *flags, "--output-dir", str(folder)]
    if ways == "two ranks":
        ended = programs.run_ranks(script, 2, *flags)
        if [one.code for one in ended] != [0, 0]:
            raise RuntimeError(programs.printed(ended))
    else:
        if ways == "a worker":
            flags += ["--num-workers", "1"]
        if ways == "killed and resumed":
            programs.run(script, *flags, kill_at_step=7)
            flags += ["--resume"]
        programs.require_success(script, *flags)
    state = runs.state(folder)
    return {
        "weights": checksum(runs.weights(folder)),
        "optimizer": checksum(state["optimizer"]),
        "rmse": runs.rmse(folder),
    }


def record(scripts: list[str]) -> dict[str, dict]:
    """What each script ends at, in each of its ways."""
    found = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = folder / "store"
        if set(scripts) & set(ON_STORE):
            make = ["--store", str(store), *STORE]
            programs.require_success("03_cloud_data/make_store.py", *make)
        for script in scripts:
            ways = ["defaults", "a worker", "two ranks", "killed and resumed"]
            if script in ALONE:
                ways.remove("two ranks")
            flags = ["--store", str(store), "--patch-size", "16"] if script in ON_STORE else []
            for way in ways:
                name = f"{script}, {way}"
                found[name] = train(script, way, flags, folder / name.replace("/", "_"))
                print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def compare(before: dict, after: dict) -> list[str]:
    """A line for each entry that both records have and that differs."""
    both = [name for name in before if name in after]
    lines = [f"{name}: {before[name]} -> {after[name]}" for name in both if before[name] != after[name]]
    print(f"{len(both)} runs in both records, {len(lines)} differ")
    return lines


def main() -> int:
    """Record, or compare two records; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("scripts", nargs="*", default=[*LOCAL, *ON_STORE])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        lines = compare(json.loads(args.before.read_text()), json.loads(args.after.read_text()))
        print(*lines, sep="\n")
        return bool(lines)
    args.file.write_text(json.dumps(record(args.scripts), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # sums in one order
    sys.exit(main())
