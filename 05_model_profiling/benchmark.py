"""Chapter 5: from the loop that everybody writes first to a fast loader and a fast step.

    uv run python benchmark.py training           # a store of 1.5 GB, made once, 10 minutes
    uv run python benchmark.py command            # the reader's command, beside chapter 4's
    uv run python benchmark.py --quick            # tiny: that it works, not what it finds
    uv run python benchmark.py --save-results     # both, and write results/*.json

You should see more samples/s from rung to rung. All rungs take turns, so that a machine that
slows down slows all of them. Loaders, store and server are those of chapter 4's studies,
whose folder must lie beside this one.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from fixes import best_fixes
from precision import has_bf16
from results import parse_studies, save_rows, spread
from step import Fixes, Step, wait_for

HERE = Path(__file__).parent
BEFORE = HERE.parent / "04_data_pipeline"
sys.path.append(str(BEFORE))  # for its studies, which import the modules of this folder

from studies import stores  # noqa: E402
from studies.journal import journal_path  # noqa: E402
from studies.measuring import Case, take_turns  # noqa: E402
from studies.server import LATENCIES, serve  # noqa: E402
from studies.ways import BATCH, FINAL, NAIVE, measure  # noqa: E402

SPREAD = {"samples_per_second"}
SECONDS = 15  # of each measurement, at least
PARTS = ("input", "target", "unseen", "weight")
COMMANDS = {
    "chapter 4": [BEFORE / "train.py"],
    "this chapter": [HERE / "train.py"],
    "in bfloat16": [HERE / "train.py", "--precision", "bf16-mixed"],
}


def compare_trainings(repeats: int) -> list[dict]:
    """Samples/s of training from the naive loop to this chapter's step, and ratios to it."""
    stores.make_stores(["whole maps"])
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    best = best_fixes(device)
    rungs = {
        "a loop over xarray, patch by patch": (NAIVE, Fixes()),
        "a batch's reads at once": (BATCH, Fixes()),
        "blocks, read ahead": (FINAL, Fixes()),
        "this chapter's step, in float32": (FINAL, replace(best, bf16=False)),
    }
    if best.bf16:
        rungs["in bfloat16"] = (FINAL, best)
    with serve(max(LATENCIES)) as server:
        cases = []
        for rung, (way, fixes) in rungs.items():
            step = TrainingStep(fixes, device)
            seconds = stores.full_or_quick(SECONDS, 0.1)
            work = partial(measure, way, server, seconds, step)
            cases.append(Case({"rung": rung}, work))
        rows = take_turns("training", cases, repeats, SPREAD)
    first = rows[0]["samples_per_second"]["median"]
    for row in rows:
        row["times_naive"] = row["samples_per_second"]["median"] / first
    return rows


class TrainingStep:
    """Trains on each batch that a loader brings, with some fixes."""

    def __init__(self, fixes: Fixes, device: torch.device):
        self.fixes = fixes
        self.device = device
        self.step: Step | None = None

    def __call__(self, batch: dict) -> None:
        parts = {name: torch.as_tensor(batch[name]) for name in PARTS}
        if self.step is None:
            self.step = Step(self.fixes, parts, self.device)
        self.step.pieces = [parts]
        self.step()
        wait_for(self.device)


def compare_commands(repeats: int) -> list[dict]:
    """Samples/s of whole runs of train.py, this chapter's and chapter 4's, and a summary."""
    flags = stores.full_or_quick([], ["--max-steps", "4"])
    runs: dict[str, list[dict]] = {name: [] for name in find_commands()}
    for _ in tqdm(range(repeats), "commands", disable=None):
        for name, summaries in runs.items():
            summaries.append(train([*COMMANDS[name], *flags]))
    before = [run["samples_per_second"] for run in runs["chapter 4"]]
    rows = []
    for name, summaries in runs.items():
        rates = [run["samples_per_second"] for run in summaries]
        ratios = [rate / other for rate, other in zip(rates, before)]
        row = {"command": name, "samples_per_second": spread(rates)}
        row["times_faster"] = spread(ratios)
        row["data_wait_share"] = median(run["data_wait_share"] for run in summaries)
        by_rate = sorted(summaries, key=lambda run: run["samples_per_second"])
        rows.append(row | {"summary": by_rate[len(by_rate) // 2]})
    return rows


def find_commands() -> list[str]:
    """The commands that this machine can run as they are."""
    names = list(COMMANDS)
    if not has_bf16(torch.accelerator.is_available()):
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
    if "rung" in row:
        return f"{row['rung']}: {rate}, {row['times_naive']:.1f} times"
    times = f"{row['times_faster']['median']:.2f} times chapter 4's"
    return f"{row['command']}: {rate}, {times}; RMSE {row['summary']['rmse']['U-Net']}"


STUDIES = {"command": compare_commands, "training": compare_trainings}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(STUDIES), 3, argv)
    if args.quick:
        stores.SIZE.update(stores.QUICK)
    found = {}
    for study in args.studies:
        found[study] = STUDIES[study](args.repeats)
        for row in found[study]:
            print(describe(row))
        if args.save_results:
            command = f"uv run python benchmark.py {study} --repeats {args.repeats}"
            save_rows(study, command, found[study])
    for study in found:  # all of them are whole
        journal_path(study).unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    main()
