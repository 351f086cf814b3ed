"""Trainings that are judged on 1990, and the learning rate of a larger batch."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import distributed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from model import learning_rate_factor
from options import Options
from studies.ranks import Rank, on_ranks
from studies.settings import Settings
from studies.timed_step import Hook, make_parallel
from train_ddp_by_hand import evaluate, move, train_loader, train_step

UNIT = "m/s"
GROWTH = 4  # of the global batch
RULES = {"none": 1, "sqrt": 2, "linear": 4}  # by what they multiply the learning rate


class Case(NamedTuple):
    """What is trained: a global batch, steps, and a learning rate by some rule."""

    rule: str
    batch_size: int
    max_steps: int
    learning_rate: float


def learning_rates(settings: Settings) -> list[dict]:
    """A row for each rule and seed, at equal samples and at equal steps."""
    return on_ranks(train_by_rules, settings)


def train_by_rules(rank: Rank) -> list[dict]:
    """The default run, and runs with four times its global batch."""
    rows = []
    for case in list_cases(rank.options):
        for seed in range(rank.settings.seeds):
            options = replace(
                rank.options,
                batch_size=case.batch_size,
                max_steps=case.max_steps,
                learning_rate=case.learning_rate,
                seed=seed,
            )
            rmse, losses = learn(rank, options)
            row = {
                "rule": case.rule,
                "global_batch": case.batch_size,
                "steps": case.max_steps,
                "samples": case.batch_size * case.max_steps,
                "learning_rate": case.learning_rate,
                "seed": seed,
                "rmse": rmse,
                "losses": losses,
            }
            rows.append(row)
    return rows


def list_cases(options: Options) -> list[Case]:
    """The default run; then each rule at equal samples, and at equal steps."""
    batch = options.batch_size
    steps = options.max_steps
    rate = options.learning_rate
    cases = [Case("base", batch, steps, rate)]
    for taken in (steps // GROWTH, steps):
        for rule, factor in RULES.items():
            cases.append(Case(rule, GROWTH * batch, taken, factor * rate))
    return cases


def learn(
    rank: Rank, options: Options, hook: Hook | None = None
) -> tuple[float, list[float]]:
    """Train as train_ddp_by_hand.py does: the RMSE on 1990 in m/s, and each step's loss."""
    network = rank.make_network(options.seed)
    model = make_parallel(network, hook=hook)
    optimizer = AdamW(model.parameters(), lr=options.learning_rate)
    factor = partial(learning_rate_factor, max_steps=options.max_steps)
    schedule = LambdaLR(optimizer, factor)
    name = f"batch {options.batch_size}, rate {options.learning_rate:.2g}"
    loader = train_loader(0, options, rank.data)
    losses = []
    for batch in rank.progress(loader, name):
        loss = train_step(model, optimizer, schedule, [move(batch, rank.device)])
        distributed.all_reduce(loss)
        mean = loss.item() / rank.settings.devices
        losses.append(round(mean, 4))
    data = rank.data
    size = options.patch_size
    patches = data.eval_patches(data.validation, size, options.eval_samples)
    rmse = evaluate(network, data, patches, rank.device)
    return rmse[UNIT], losses
