"""Chapter 5: what a faster step buys the whole training: chapter 4's command and this one's.

    uv run python benchmark.py                    # 200 steps, three times each: 8 minutes
    uv run python benchmark.py --quick            # tiny: that it works, not what it finds
    uv run python benchmark.py --save-results     # and write results/training.json

You should see more samples/s from chapter to chapter, at about the same RMSE. The programs
take turns, so that a machine that slows down slows all of them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from precision import has_bf16
from results import parse_studies, save_rows, spread

HERE = Path(__file__).parent
BEFORE = HERE.parent / "04_data_pipeline"
TRAININGS = {
    "chapter 4": [BEFORE / "train.py"],
    "this chapter": [HERE / "train.py"],
    "in bfloat16": [HERE / "train.py", "--precision", "bf16-mixed"],
}


def compare_trainings(repeats: int, flags: list[str]) -> list[dict]:
    """A row for each training: samples/s over the repeats, and what its runs ended at."""
    runs: dict[str, list[dict]] = {name: [] for name in find_trainings()}
    for _ in tqdm(range(repeats), "repeats", disable=None):
        for name, summaries in runs.items():
            summaries.append(train([*TRAININGS[name], *flags]))
    before = [run["samples_per_second"] for run in runs["chapter 4"]]
    rows = []
    for name, summaries in runs.items():
        rates = [run["samples_per_second"] for run in summaries]
        ratios = [rate / other for rate, other in zip(rates, before)]
        row = {"training": name, "samples_per_second": spread(rates)}
        row["times_faster"] = spread(ratios)
        row["data_wait_share"] = median(run["data_wait_share"] for run in summaries)
        rows.append(row | {"summary": summaries[0]})
    return rows


def find_trainings() -> list[str]:
    """The trainings that this machine can run."""
    on_gpu = torch.accelerator.is_available()
    names = list(TRAININGS)
    if not has_bf16(on_gpu):
        names.remove("in bfloat16")
    return names


def train(command: list[str | Path]) -> dict:
    """The summary of a training."""
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, *command, "--output-dir", folder]
        subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "summary.json").read_text())


def describe(row: dict) -> str:
    """A row in a line."""
    rate = f"{row['samples_per_second']['median']:.1f} samples/s"
    times = f"{row['times_faster']['median']:.2f} times chapter 4's"
    return f"{row['training']}: {rate}, {times}; RMSE {row['summary']['rmse']['U-Net']}"


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare the trainings, print a row for each, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], ["training"], 3, argv)
    flags = ["--max-steps", "4"] if args.quick else []
    rows = compare_trainings(args.repeats, flags)
    for row in rows:
        print(describe(row))
    if args.save_results:
        command = f"uv run python benchmark.py --repeats {args.repeats}"
        save_rows("training", command, rows)
    return rows


if __name__ == "__main__":
    main()
