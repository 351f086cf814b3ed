"""Keep a finished run for others: its weights, its record, and what it has shown.

    uv run python keep_run.py outputs/final   # results/final.ckpt and results/final.json

You should see the command that repeats the run, and its RMSE.
"""

import argparse
import csv
import json
from pathlib import Path

import torch

from checkpoints import CheckpointFolder, step_names
from evaluation import BASELINE
from maps import load_model
from options import refuse
from records import RESULTS, save_rows
from run_record import RunRecord, command_of


def keep_weights(checkpoint: Path, target: Path) -> None:
    """Write what predict.py needs of a checkpoint: a third, for there is no optimizer."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    kept = {part: saved[part] for part in ("hyper_parameters", "state_dict")}
    name = RunRecord.state_key
    kept["callbacks"] = {name: saved["callbacks"][name]}
    torch.save(kept, target)


def read_curve(log: Path) -> list[dict]:
    """The RMSE of each validation, by the steps that were taken before it."""
    curve = []
    with open(log, newline="") as file:
        for line in csv.DictReader(file):
            names = [name for name in line if name.startswith("rmse") and line[name]]
            if names:
                rmse = {name: float(line[name]) for name in names}
                curve.append({"step": int(line["step"]) + 1, **rmse})
    return curve


def main(argv: list[str] | None = None) -> dict:
    """Keep the newest checkpoint of a run and its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the output folder of a finished run")
    run = parser.parse_args(argv).run
    names = step_names(CheckpointFolder(str(run / "checkpoints")))
    if not names or not (run / "summary.json").exists():
        refuse(f"run {run}: has not finished, or is no output folder; give another")
    checkpoint = run / "checkpoints" / names[0]
    _, record = load_model(checkpoint)
    command = command_of(record)
    summary = json.loads((run / "summary.json").read_text())
    row = {**summary, "curve": read_curve(run / "metrics.csv")}
    save_rows("final", command, [row])
    keep_weights(checkpoint, RESULTS / "final.ckpt")
    print(command)
    for unit, rmse in summary["rmse"]["U-Net"].items():
        baseline = summary["rmse"][BASELINE][unit]
        print(f"RMSE {rmse:.3f} {unit}, {rmse / baseline - 1:+.1%} against {BASELINE}")
    return row


if __name__ == "__main__":
    main()
