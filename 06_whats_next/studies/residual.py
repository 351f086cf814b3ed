"""Whether a network improves on optimal interpolation (OI), by learning what OI leaves over.

    uv run python -m studies.residual --store STORE --variables U V --test
    # and train.py's other flags of data; --save-results writes results/

You should see the RMSE of OI, u and v filled apart or together; of networks that are given
its fill and add to it; and of a network without it. Each is also mixed with OI, in shares
that are chosen on the validation times. A GPU takes minutes, two cores many hours.

Each recipe is trained by every one of --seeds. With --test, the one with the lowest RMSE on
the validation times is judged on the test times, beside those that know nothing of OI's
fill. --checkpoint adds the network of a run of train.py; --recipes names what else was
tried, or nothing. --weights FOLDER keeps the weights of each recipe's networks there, as
results/oi_network.pt has those of "OI + network". The variables are the wind's: u, then v.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from command_line import call_with_store
from ending import run
from errors import refuse
from location import Location
from model import UNet, conv_block, learning_rate_factor, masked_sums
from oi_baseline import rmse_of
from options import Options
from predict.maps import load_model
from results import save_rows
from sampling import epoch_order
from studies.filled_patches import APART, TOGETHER, FilledPatches, Judge, Tensors
from task import make_data

Answers = list[torch.Tensor]  # of each seed: the anomalies of all patches of a judge


@dataclass(frozen=True)
class Recipe:
    """What a network is given beside the seen anomalies, and how it is trained."""

    fill: str = TOGETHER  # with which its answer is mixed
    is_given_fill: bool = True
    adds_to_fill: bool = True
    leaves_year_out: bool = True
    is_mirrored: bool = True  # half of each batch, at the equator
    steps: int = 2000
    batch_size: int = 64
    learning_rate: float = 0.006
    weight_decay: float = 0.01
    width: int = 24


ALONE = "network alone"
RECIPES = {
    "OI + network": Recipe(),
    ALONE: Recipe(is_given_fill=False, adds_to_fill=False),
    "OI + network, apart": Recipe(fill=APART),
    "OI + network, its year known": Recipe(leaves_year_out=False),
}
SMALL = {"steps": 1000, "batch_size": 16}
TRIED = {
    "1,000 steps of 16": Recipe(**SMALL),
    "3,000 steps of 16": Recipe(steps=3000, batch_size=16),
    "1,000 steps of 16, a third of the rate": Recipe(**SMALL, learning_rate=0.002),
    "1,000 steps of 64": Recipe(steps=1000),
    "network alone, 3,000 steps of 16": Recipe(
        is_given_fill=False, adds_to_fill=False, steps=3000, batch_size=16
    ),
    "1,000 steps of 16, not mirrored": Recipe(**SMALL, is_mirrored=False),
    "1,000 steps of 16, width 16": Recipe(**SMALL, width=16),
    "1,000 steps of 16, weight decay 0.3": Recipe(**SMALL, weight_decay=0.3),
    "2,000 steps of 16, not added": Recipe(batch_size=16, adds_to_fill=False),
    "1,000 steps of 16, not given": Recipe(**SMALL, is_given_fill=False),
    "400 steps of 16": Recipe(steps=400, batch_size=16),
}


class Entry(NamedTuple):
    """What is judged: a fill, or networks."""

    name: str
    answer: Callable[[Judge], Answers]
    details: dict


def train(recipe: Recipe, seed: int, filled: FilledPatches, steps: int) -> nn.Module:
    """A network of the recipe, after at most so many steps."""
    patches = filled.training(recipe.fill, recipe.leaves_year_out)
    steps = min(steps, recipe.steps)
    torch.manual_seed(seed)
    variables = patches["target"].shape[1]
    network = make_network(recipe, variables).to(filled.device)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    factor = partial(learning_rate_factor, max_steps=steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = draw_order(len(patches["target"]), seed, steps, recipe.batch_size)
    order = torch.from_numpy(order).to(filled.device)
    for chosen in tqdm(order, f"seed {seed}", disable=None):
        batch = {name: values[chosen] for name, values in patches.items()}
        if recipe.is_mirrored:
            mirror_half(batch)
        batch["unseen"] = 1 - batch["seen"]
        squares, unseen = masked_sums(predict(network, recipe, batch), batch)
        optimizer.zero_grad()
        (squares / unseen.clamp(min=1)).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def make_network(recipe: Recipe, variables: int) -> UNet:
    """The U-Net, with channels for the fill. It begins with an answer of 0."""
    network = UNet(variables, width=recipe.width)
    if recipe.is_given_fill:
        network.down1 = conv_block(2 * variables + 1, recipe.width, "zeros")
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network


def predict(network: nn.Module, recipe: Recipe, batch: Tensors) -> torch.Tensor:
    """The anomalies of a batch, over their spread."""
    inputs = [batch["target"] * batch["seen"], batch["seen"]]
    if recipe.is_given_fill:
        inputs.append(batch["fill"])
    answer = network(torch.cat(inputs, dim=1))
    if recipe.adds_to_fill:
        answer = answer + batch["fill"]
    return answer


def mirror_half(batch: Tensors) -> None:
    """Put half of the patches beyond the equator, where v has the other sign."""
    half = len(batch["target"]) // 2
    for values in batch.values():
        values[:half] = values[:half].flip(-2)
    for name in ("target", "fill"):
        batch[name][:half, 1] *= -1


def draw_order(number: int, seed: int, steps: int, batch_size: int) -> np.ndarray:
    """Which patches each step takes, (steps, batch size): all once in each epoch."""
    total = steps * batch_size
    epochs = range(math.ceil(total / number))
    order = np.concatenate([epoch_order(seed, epoch, number) for epoch in epochs])
    return order[:total].reshape(steps, batch_size)


def of_fill(fill: str, judge: Judge) -> Answers:
    """That of OI, which has no seed."""
    return [judge.patches[fill]["fill"]]


def of_networks(
    networks: list[nn.Module], recipe: Recipe, share: float, judge: Judge
) -> Answers:
    """Those of networks, mixed with the recipe's fill."""
    patches = judge.patches[recipe.fill]
    answers = []
    with torch.no_grad():
        for network in networks:
            answer = predict(network, recipe, patches)
            answers.append(patches["fill"].lerp(answer, share))
    return answers


def measure(answer: torch.Tensor, filled: FilledPatches, judge: Judge) -> float:
    """The RMSE of one answer."""
    rmse = rmse_of(answer.cpu().numpy(), judge.samples, filled.data)
    [value] = rmse.values()
    return value


def choose_share(
    networks: list[nn.Module], recipe: Recipe, filled: FilledPatches, judge: Judge
) -> float:
    """How much of the answers to take, in tenths: that of the lowest mean RMSE."""
    rmse = {}
    for tenths in range(11):
        answers = of_networks(networks, recipe, tenths / 10, judge)
        rmse[tenths / 10] = mean(measure(each, filled, judge) for each in answers)
    return min(rmse, key=rmse.get)


def measure_entry(entry: Entry, filled: FilledPatches, judge: Judge) -> dict:
    """The RMSE of each seed, and that of the mean of their answers."""
    answers = entry.answer(judge)
    average = torch.stack(answers).mean(dim=0)
    each = [measure(answer, filled, judge) for answer in answers]
    return {"seeds": each, "mean_answer": measure(average, filled, judge)}


class Contest:
    """All that is judged, and a row for each."""

    def __init__(
        self, filled: FilledPatches, judge: Judge, keep: Callable, weights: Path | None
    ):
        self.filled = filled
        self.judge = judge
        self.keep = keep
        self.weights = weights
        self.entries: list[Entry] = []
        self.rows: list[dict] = []

    def add(self, entry: Entry) -> None:
        """Judge it by the validation times, and keep its row: the next may take long."""
        self.entries.append(entry)
        row = {"what": entry.name, **entry.details}
        row["validation"] = measure_entry(entry, self.filled, self.judge)
        self.rows.append(row)
        print_row(row, "validation")
        self.keep(self.rows)

    def add_networks(self, name: str, seeds: list[int], steps: int) -> None:
        """Train those of a recipe, and add their answers, and these mixed with OI."""
        recipe = (RECIPES | TRIED)[name]
        began = perf_counter()
        networks = [train(recipe, seed, self.filled, steps) for seed in seeds]
        if self.weights:
            save_weights(networks, self.weights / f"{slug(name)}.pt")
        details = {"recipe": asdict(recipe), "seconds": perf_counter() - began}
        self.add_trained(name, networks, recipe, details)

    def add_trained(
        self, name: str, networks: list[nn.Module], recipe: Recipe, details: dict
    ) -> None:
        self.add(Entry(name, partial(of_networks, networks, recipe, 1), details))
        share = choose_share(networks, recipe, self.filled, self.judge)
        answer = partial(of_networks, networks, recipe, share)
        self.add(Entry(f"{name}, mixed", answer, {"share": share}))

    def test(self, judge: Judge) -> None:
        """Judge the chosen one by the test times, and what it is compared with."""
        mixed = [row for row in self.rows if "share" in row]
        chosen = min(mixed, key=lambda row: mean(row["validation"]["seeds"]))
        chosen["is_chosen"] = True
        for entry, row in zip(self.entries, self.rows):
            is_compared = entry.name.startswith(("OI, ", ALONE))
            if row is chosen or is_compared:
                row["test"] = measure_entry(entry, self.filled, judge)
                print_row(row, "test")
        self.keep(self.rows)


def slug(name: str) -> str:
    """A name of letters and digits, for a file."""
    return re.sub("[^a-z0-9]+", "_", name.lower())


def save_weights(networks: list[nn.Module], path: Path) -> None:
    """Keep the weights of a recipe's networks: a list, by seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([network.state_dict() for network in networks], path)


def study(
    own: argparse.Namespace, command: str, options: Options, location: Location
) -> list[dict]:
    """A row for each fill, for the networks of each recipe, and for their mix with OI."""
    options, data = make_data(options, location)
    if len(data.units) > 1:
        refuse("--variables: they have several units; give some of one unit")
    device = torch.device("cpu")
    if options.accelerator != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
        torch.backends.cudnn.benchmark = True  # choose the kernels by trying them
    size = options.patch_size
    filled = FilledPatches(data, size, own.places, options.seed, device)
    judge = filled.judge(data.validation, options.eval_samples)
    keeper = partial(keep, own.save_results, command)
    contest = Contest(filled, judge, keeper, own.weights)
    for fill in (APART, TOGETHER):
        contest.add(Entry(f"OI, {fill}", partial(of_fill, fill), {}))
    if own.checkpoint:
        model, _ = load_model(own.checkpoint)
        network = model.model.to(device)
        contest.add_trained(f"{ALONE}, kept", [network], RECIPES[ALONE], {})
    for name in own.recipes:
        contest.add_networks(name, own.seeds, own.steps)
    if own.test:
        contest.test(filled.judge(data.test, options.eval_samples))
    return contest.rows


def keep(is_wanted: bool, command: str, rows: list[dict]) -> None:
    if is_wanted:
        save_rows("residual", f"uv run python -m studies.residual {command}", rows)


def print_row(row: dict, period: str) -> None:
    """Print the RMSE of each seed, and that of the mean of their answers."""
    seeds = " ".join(f"{rmse:.4f}" for rmse in row[period]["seeds"])
    average = row[period]["mean_answer"]
    name = f"{row['what']} {row.get('share', '')}"
    print(f"{period:11} {name:44} {seeds}   mean answer {average:.4f}", flush=True)


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare recipes on the store that is named, or on a small one."""
    # train.py's parser has the help.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    names = [*RECIPES, *TRIED]
    add("--checkpoint", type=Path)
    add("--recipes", nargs="*", choices=names, default=list(RECIPES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--places", type=int, default=3000)  # where patches to learn from lie
    add("--steps", type=int, default=sys.maxsize)  # at most
    add("--weights", type=Path)
    add("--test", action="store_true")
    add("--save-results", action="store_true")
    own, flags = parser.parse_known_args(argv)
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    task = partial(study, own, command)
    return call_with_store(task, __doc__.splitlines()[0], flags)


if __name__ == "__main__":
    run(main)
