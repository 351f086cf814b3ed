"""Keep a finished run for others: its weights, its record, and what it has shown.

    uv run python -m studies.keep_run outputs/final   # results/final.ckpt and results/final.json

You should see the command that repeats the run, and its RMSE.
"""

import argparse
import csv
import json
from pathlib import Path

import torch

from errors import CheckpointError, first_line, refuse
from evaluation import NETWORK, best_simple_fills
from predict.maps import load_model
from results import RESULTS, save_rows
from survival.checkpoints import step_name
from tracking.run_record import RunRecord, command_of


def keep_weights(checkpoint: Path, target: Path) -> None:
    """Write what predict needs of a checkpoint, without the optimizer's two thirds."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    kept = {part: saved[part] for part in ("hyper_parameters", "state_dict")}
    name = RunRecord.state_key
    kept["callbacks"] = {name: saved["callbacks"][name]}
    torch.save(kept, target)


def read_curve(run: Path) -> list[dict]:
    """The RMSE of each validation of all starts, by the steps that were taken before it."""
    scores: dict[int, dict] = {}
    for log in [run / "metrics.csv", *sorted(run.glob("resumed_at_*/metrics.csv"))]:
        with open(log, newline="") as file:
            for line in csv.DictReader(file):
                names = [
                    name for name in line if name.startswith("rmse") and line[name]
                ]
                if names:
                    rmse = {name: float(line[name]) for name in names}
                    scores[int(line["step"]) + 1] = rmse
    return [{"step": step, **scores[step]} for step in sorted(scores)]


def main(argv: list[str] | None = None) -> dict:
    """Keep the last checkpoint of a run and its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the output folder of a finished run")
    run = parser.parse_args(argv).run
    try:
        summary = json.loads((run / "summary.json").read_text())
        checkpoint = run / "checkpoints" / step_name(summary["steps"])
        _, record = load_model(checkpoint)
        row = {**summary, "options": record["options"], "curve": read_curve(run)}
    except (OSError, KeyError, ValueError, CheckpointError) as error:
        refuse(f"run {run}: not finished, or not whole ({first_line(error)})")
    command = command_of(record)
    save_rows("final", command, [row])
    keep_weights(checkpoint, RESULTS / "final.ckpt")
    print(command)
    for unit, name in best_simple_fills(summary["rmse"]).items():
        rmse = summary["rmse"][NETWORK][unit]
        gain = rmse / summary["rmse"][name][unit] - 1
        print(f"RMSE {rmse:.3f} {unit}, {gain:+.1%} against {name}")
    return row


if __name__ == "__main__":
    main()
