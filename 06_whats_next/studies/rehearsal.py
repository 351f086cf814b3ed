"""A run that goes wrong on purpose: a killed rank, a bad loss, a slow rank. And its diary.

    uv run python -m studies.rehearsal                  # about a minute
    uv run python -m studies.rehearsal --save-results   # and results/rehearsal

You should see that the same command, given twice, brings the run to its end, and a diary
that names all three faults.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from demo_store import CLOUD
from results import RESULTS, save_rows
from tracking import diary

CHAPTER = Path(__file__).parent.parent
FOLDER = Path("outputs/rehearsal")
STORE = "../03_cloud_data/outputs/buckets/winds/small.zarr"
FLAGS = "--accelerator cpu --devices 2 --max-steps 200 --batch-size 8 --patch-size 32"
FLAGS += " --validate-every 100 --checkpoint-every 20 --log-every 2 --resume auto"
FLAGS += " --loggers CSVLogger"
KEPT = ("metrics.csv", "record.json", "tracking.jsonl", "summary.json")


def start(folder: Path, flags: list[str]) -> int:
    """Start the run, or go on with it; return the exit code."""
    worker = ["-m", "studies.rehearsal_worker", str(folder)]
    output = ["--output-dir", str(folder), "--store", STORE]
    command = [sys.executable, *worker, *FLAGS.split(), *output, *flags]
    return subprocess.run(command, cwd=CHAPTER, stdin=subprocess.DEVNULL).returncode


def keep_logs(folder: Path) -> None:
    """Copy what the diary is read from to results/rehearsal."""
    kept = RESULTS / "rehearsal"
    shutil.rmtree(kept, ignore_errors=True)
    for name in KEPT:
        for path in sorted(folder.rglob(name)):
            target = kept / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def main(argv: list[str] | None = None) -> list[diary.Event]:
    """Rehearse, print the diary and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    subprocess.run([sys.executable, CLOUD / "make_store.py"], check=True)
    folder = CHAPTER / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codes = [start(FOLDER, []), start(FOLDER, [])]
    print(f"exit codes: {codes[0]}, and of the same command again {codes[1]}")
    events = diary.main([str(folder)])
    if args.save_results:
        rows = [{"step": event.step, "text": event.text} for event in events]
        save_rows(
            "rehearsal", "uv run python -m studies.rehearsal --save-results", rows
        )
        keep_logs(folder)
    return events


if __name__ == "__main__":
    main()
