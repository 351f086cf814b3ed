"""Whether a moving average of the weights pays: its RMSE beside that of the weights.

    uv run python -m studies.moving_average --store STORE   # and train.py's flags of data and steps

You should see that a short average is better than the weights where the learning rate is high,
and as good at the end of the run, where it has fallen to zero. The averages are those of
Lightning's EMAWeightAveraging. Here they only follow a run, so that several can be compared.
It takes one device, seeds 0 to 2, and keeps no checkpoint. --save-results writes results/.
"""

import argparse
import math
import shlex
import sys
from dataclasses import replace
from functools import partial
from statistics import mean

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from command_line import call_with_store
from data import PatchDataset
from ending import run
from errors import refuse
from location import Location
from options import Options
from results import save_rows
from short_run import make_short_trainer
from task import make_data, make_datamodule, make_model, measure_rmse

DECAYS = (0.9, 0.99, 0.999)
SEEDS = (0, 1, 2)
WEIGHTS = "weights"


class Averages(Callback):
    """Keeps an average for each decay, and measures all of them at each validation."""

    def __init__(self, patches: PatchDataset):
        self.patches = patches
        self.averages: dict[float, AveragedModel] = {}
        self.rows: list[dict] = []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        for decay in DECAYS:
            rule = get_ema_multi_avg_fn(decay)
            average = AveragedModel(module.model, multi_avg_fn=rule)
            self.averages[decay] = average.eval()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        for average in self.averages.values():
            average.update_parameters(module.model)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        weights = module.model
        networks = {WEIGHTS: weights}
        for decay, average in self.averages.items():
            networks[f"decay {decay:g}"] = average.module
        rmse = {}
        try:
            for name, network in networks.items():
                module.model = network
                units = measure_rmse(trainer, module, self.patches)
                rmse[name] = math.prod(
                    units.values()
                )  # as BestCheckpoint compares them
        finally:
            module.model = weights
        self.rows.append({"step": trainer.global_step, "rmse": rmse})


def train_once(options: Options, location: Location) -> list[dict]:
    """A row for each validation of one run."""
    options, data = make_data(options, location)
    module = make_datamodule(options, data)
    averages = Averages(module.validation)
    trainer = make_short_trainer(options, averages)
    trainer.fit(make_model(options, data), datamodule=module)
    return averages.rows


def average_seeds(runs: list[list[dict]]) -> list[dict]:
    """Of all runs: the mean RMSE at each step, and the final RMSE of each seed."""
    rows = []
    for same_step in zip(*runs):
        values = {}
        for name in same_step[0]["rmse"]:
            values[name] = [row["rmse"][name] for row in same_step]
        means = {name: mean(each) for name, each in values.items()}
        rows.append({"step": same_step[0]["step"], "rmse": means, "seeds": values})
    return rows


def study(command: str, save: bool, options: Options, location: Location) -> list[dict]:
    """A row for each validation."""
    if options.validate_every > options.max_steps:
        reason = "more than --max-steps, so nothing would be measured"
        refuse(f"--validate-every {options.validate_every}: {reason}; give less")
    single = replace(options, devices=1, num_nodes=1, accumulate_grad_batches=1)
    runs = []
    for seed in SEEDS:
        runs.append(train_once(replace(single, seed=seed), location))
    rows = average_seeds(runs)
    print("\nRMSE in validation, mean of", len(SEEDS), "seeds")
    print("step  ", *rows[0]["rmse"])
    for row in rows:
        columns = [f"{value:{len(name)}.4f}" for name, value in row["rmse"].items()]
        print(f"{row['step']:6}", *columns)
    if save:
        save_rows(
            "moving_average", f"uv run python -m studies.moving_average {command}", rows
        )
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare averages on the store that is named, or on a small one."""
    # train.py's parser has the help.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save-results", action="store_true")
    own, flags = parser.parse_known_args(argv)
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    task = partial(study, command, own.save_results)
    return call_with_store(task, __doc__.splitlines()[0], flags)


if __name__ == "__main__":
    run(main)
