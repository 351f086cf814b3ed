"""Whether a network improves on optimal interpolation (OI), by learning what OI leaves over.

    uv run python -m studies.residual --store STORE --batch-size 16 --max-steps 5000
    # and train.py's other flags of data; --save-results writes results/

You should see the RMSE of OI, of networks that are given its fill and add to it, and of a
network without it. A GPU takes minutes, two cores many hours.

Each recipe is trained by every seed and judged on the validation times. The one with the
lowest RMSE is also judged on the test times. All learn from the same patches, sample k of
step s of --seed, which are filled once. A patch is filled as if its year were unknown: it is
in neither covariance nor climatology. Else its fill would be better than any that the
network meets later, and the network would learn too little.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import nn
from tqdm import tqdm

from command_line import call_with_store, run
from data import Data, PatchDataset
from errors import DataError, refuse
from fields import Period
from location import Location
from model import UNet, conv_block, learning_rate_factor, masked_sums
from oi_baseline import rmse_of
from options import Options
from results import save_rows
from sampling import Patch, epoch_order
from store_interpolation import make_interpolator
from studies.torch_interpolation import TorchInterpolator
from task import make_data

APART = "apart"  # u is filled from u, and v from v
TOGETHER = "together"  # both from both
MEMORY = torch.channels_last
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What a network is given beside the seen anomalies, and how it is trained."""

    fill: str = TOGETHER  # its answer is added to this one
    is_given_fill: bool = True
    is_given_error: bool = True  # of the fill, as OI expects it
    adds_to_fill: bool = True
    in_errors: bool = False  # what it adds is counted in expected errors
    leaves_year_out: bool = True
    is_mirrored: bool = False  # half of the patches, at the equator
    rate: float = 1  # of --learning-rate
    steps: float = 1  # of --max-steps
    decay: float = 0.01  # of AdamW
    width: int = 24

    @property
    def channels(self) -> int:
        """Of its input, per variable, without the mask."""
        return 1 + self.is_given_fill + self.is_given_error


ALONE = "network alone"
WITHOUT_OI = {"is_given_fill": False, "is_given_error": False, "adds_to_fill": False}
RECIPES = {ALONE: Recipe(**WITHOUT_OI), "OI + network": Recipe()}


class Fold(NamedTuple):
    """OI without some of the training times, and how the climatology changes by that."""

    interpolator: TorchInterpolator
    change: np.ndarray  # (12, variables, latitude, longitude), over the spread


class Judge(NamedTuple):
    """The patches that every network is judged on, and their fills by OI."""

    samples: list[dict[str, np.ndarray]]
    patches: dict[str, Tensors]  # with the fills APART and TOGETHER


Answers = list[torch.Tensor]  # of each seed: the anomalies of all patches of a judge


class Entry(NamedTuple):
    """What is judged: a fill, networks, or both mixed."""

    name: str
    answer: Callable[[Judge], Answers]
    details: dict


class Study:
    """What all recipes share: the data, and patches with their fills, made when needed."""

    def __init__(
        self, data: Data, options: Options, patches: int, device: torch.device
    ):
        self.data = data
        self.options = options
        self.patches = patches
        self.device = device
        size = options.patch_size
        parts = (data.reader, data.training, data.climatology, size)
        self.anomalies = make_interpolator(*parts).anomalies
        if len(self.anomalies) < len(data.training.dates):
            raise DataError("too many training times for a study that leaves years out")
        if np.isnan(self.anomalies).any():
            raise DataError("values are missing, which this study does not provide for")
        dates = xr.DataArray(data.training.dates, dims="time")
        self.years = dates.dt.year.values
        self.made: dict[tuple[str, bool], Tensors] = {}

    def fold(self, fill: str, is_kept: np.ndarray) -> Fold:
        """OI by the training times that are kept, (times,)."""
        months = self.data.training.months[is_kept]
        kept = self.anomalies[is_kept]
        change = np.zeros((12, *kept.shape[1:]), kept.dtype)
        for month in np.unique(months):
            change[month] = kept[months == month].mean(axis=0)
        kept -= change[months]
        numbers = range(kept.shape[1])
        groups = tuple((number,) for number in numbers)
        if fill == TOGETHER:
            groups = (tuple(numbers),)
        size = self.options.patch_size
        parts = (kept, self.data.grid.wraps, size, groups, self.device)
        return Fold(TorchInterpolator(*parts), change)

    def training(self, fill: str, leaves_year_out: bool) -> Tensors:
        """The patches that networks learn from."""
        key = (fill, leaves_year_out)
        if key not in self.made:
            folds = self.folds(fill, leaves_year_out)
            options = self.options
            maker = self.data.maker(self.data.training, options.patch_size)
            how = (options.batch_size, options.seed)
            patches = PatchDataset(maker, self.data.reader, *how)
            steps = math.ceil(self.patches / options.batch_size)
            self.made[key] = self.collect(patches, steps, folds)
        return self.made[key]

    def folds(self, fill: str, leaves_year_out: bool) -> list[Fold]:
        """One for each training time."""
        everything = np.full(len(self.years), True)
        if not leaves_year_out:
            return [self.fold(fill, everything)] * len(self.years)
        of_year = {}
        for year in np.unique(self.years):
            of_year[year] = self.fold(fill, self.years != year)
        return [of_year[year] for year in self.years]

    def judge(self, period: Period) -> Judge:
        """The patches of a period, filled by all training times."""
        number = self.options.eval_samples
        patches = self.data.eval_patches(period, self.options.patch_size, number)
        everything = np.full(len(self.years), True)
        filled = {}
        for fill in (APART, TOGETHER):
            folds = [self.fold(fill, everything)] * len(period.dates)
            filled[fill] = self.collect(patches, 1, folds)
        targets = filled[APART]["target"].cpu().numpy()
        weights = filled[APART]["weight"].cpu().numpy()
        samples = []
        for target, weight in zip(targets, weights):
            samples.append({"target": target, "weight": weight})
        return Judge(samples, filled)

    def collect(self, patches: PatchDataset, steps: int, folds: list[Fold]) -> Tensors:
        """All samples of some steps, as PatchMaker.make_batch has them, and their fills."""
        batches = []
        for step in tqdm(range(steps), "filling", disable=None):
            numbers = [(step, k) for k in range(patches.batch_size)]
            batch = patches.read_batch(numbers)
            places = [patches.patch(*each) for each in numbers]
            batches.append(self.add_fills(batch, places, patches, folds))
        joined = {}
        for name in batches[0]:
            joined[name] = torch.cat([batch[name] for batch in batches])
        return joined

    def add_fills(
        self,
        batch: dict[str, np.ndarray],
        places: list[Patch],
        patches: PatchDataset,
        folds: list[Fold],
    ) -> Tensors:
        """A batch on the device, with the fill of each patch, and its expected error."""
        maker = patches.maker
        fills, errors = [], []
        for n, patch in enumerate(places):
            fold = folds[patch.time]
            month = maker.period.months[patch.time]
            target = batch["target"][n]
            target -= maker.cut(fold.change[month], patch)
            seen = batch["input"][n, -1] > 0
            batch["input"][n, :-1] = target * seen
            corner = (patch.row, patch.column)
            fill, error = fold.interpolator.fill(*corner, seen, target)
            fills.append(fill)
            errors.append(error)
        tensors = {}
        for name, values in batch.items():
            tensors[name] = torch.from_numpy(values).to(self.device)
        tensors["fill"] = torch.stack(fills)
        tensors["error"] = torch.stack(errors)
        return tensors

    def train(self, recipe: Recipe, seed: int) -> nn.Module:
        """A network of the recipe."""
        options = self.options
        patches = self.training(recipe.fill, recipe.leaves_year_out)
        if recipe.is_mirrored:
            patches = add_mirrored(patches)
        steps = round(recipe.steps * options.max_steps)
        torch.manual_seed(seed)
        network = make_network(recipe, len(options.variables))
        network = network.to(self.device, memory_format=MEMORY)
        optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=recipe.rate * options.learning_rate,
            weight_decay=recipe.decay,
            fused=True,
        )
        factor = partial(learning_rate_factor, max_steps=steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        number = len(patches["target"])
        order = draw_order(number, seed, steps, options.batch_size)
        order = torch.from_numpy(order).to(self.device)
        inputs = make_inputs(recipe, select(patches, order[0]))
        network = quicken(network, inputs)
        for chosen in tqdm(order, f"seed {seed}", disable=None):
            batch = select(patches, chosen)
            squares, unseen = masked_sums(predict(network, recipe, batch), batch)
            optimizer.zero_grad()
            (squares / unseen.clamp(min=1)).backward()
            optimizer.step()
            schedule.step()
        return network.eval()

    def measure(self, answer: torch.Tensor, judge: Judge) -> float:
        """The RMSE of a fill of the judge's patches."""
        rmse = rmse_of(answer.cpu().numpy(), judge.samples, self.data)
        [value] = rmse.values()
        return value


def make_network(recipe: Recipe, variables: int) -> UNet:
    """The U-Net with more channels of input. It begins with an answer of 0."""
    network = UNet(variables, width=recipe.width)
    channels = recipe.channels * variables + 1
    network.down1 = conv_block(channels, recipe.width, "zeros")
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network


def quicken(network: nn.Module, inputs: torch.Tensor) -> nn.Module:
    """The network as a CUDA graph: on a GPU its kernels are shorter than their launches.

    It takes inputs of this shape while it is in training, and any other afterwards.
    """
    if not inputs.is_cuda:
        return network
    return torch.cuda.make_graphed_callables(network, (inputs,))


def make_inputs(recipe: Recipe, batch: Tensors) -> torch.Tensor:
    """What the network is given."""
    parts = [batch["input"]]
    if recipe.is_given_fill:
        parts.append(batch["fill"])
    if recipe.is_given_error:
        parts.append(batch["error"])
    return torch.cat(parts, dim=1).contiguous(memory_format=MEMORY)


def predict(network: nn.Module, recipe: Recipe, batch: Tensors) -> torch.Tensor:
    """The anomalies of a batch, over their spread."""
    answer = network(make_inputs(recipe, batch))
    if recipe.in_errors:
        answer = answer * batch["error"]
    if recipe.adds_to_fill:
        answer = answer + batch["fill"]
    return answer


def select(patches: Tensors, chosen: torch.Tensor) -> Tensors:
    return {name: values[chosen] for name, values in patches.items()}


def add_mirrored(patches: Tensors) -> Tensors:
    """The patches, and all of them as they would be beyond the equator: v changes its sign."""
    both = {}
    for name, values in patches.items():
        mirrored = values.flip(-2)
        if name in ("input", "target", "fill"):
            mirrored[:, 1] *= -1
        both[name] = torch.cat([values, mirrored])
    return both


def draw_order(number: int, seed: int, steps: int, batch_size: int) -> np.ndarray:
    """Which patches each step takes, (steps, batch size): all once in each epoch."""
    total = steps * batch_size
    epochs = range(math.ceil(total / number))
    order = np.concatenate([epoch_order(seed, epoch, number) for epoch in epochs])
    return order[:total].reshape(steps, batch_size)


def of_fill(fill: str, judge: Judge) -> Answers:
    """That of OI, which has no seed."""
    return [judge.patches[fill]["fill"]]


def of_networks(networks: list[nn.Module], recipe: Recipe, judge: Judge) -> Answers:
    patches = judge.patches[recipe.fill]
    answers = []
    with torch.no_grad():
        for network in networks:
            answers.append(predict(network, recipe, patches))
    return answers


def of_mix(
    networks: list[nn.Module], recipe: Recipe, fill: str, share: float, judge: Judge
) -> Answers:
    """The networks' answers and a fill, mixed."""
    [filled] = of_fill(fill, judge)
    answers = of_networks(networks, recipe, judge)
    return [share * answer + (1 - share) * filled for answer in answers]


def best_mix(
    networks: list[nn.Module], recipe: Recipe, fill: str, shared: Study, judge: Judge
) -> Entry:
    """That of the lowest RMSE, by tenths."""
    best = math.inf
    for tenths in range(1, 10):
        share = tenths / 10
        answer = partial(of_mix, networks, recipe, fill, share)
        rmse = mean(shared.measure(each, judge) for each in answer(judge))
        if rmse < best:
            best = rmse
            name = f"{1 - share:.1f} OI, {fill} + {share:.1f} {ALONE}"
            entry = Entry(name, answer, {})
    return entry


def measure_entry(entry: Entry, shared: Study, judge: Judge) -> dict:
    """The RMSE of each seed, and that of the mean of their answers."""
    answers = entry.answer(judge)
    average = torch.stack(answers).mean(dim=0)
    each = [shared.measure(answer, judge) for answer in answers]
    return {"seeds": each, "mean_answer": shared.measure(average, judge)}


def study(
    own: argparse.Namespace, command: str, options: Options, location: Location
) -> list[dict]:
    """A row for each fill and recipe."""
    options, data = make_data(options, location)
    if len(data.units) > 1:
        refuse("--variables: they have several units; give some of one unit")
    device = torch.device("cpu")
    if options.accelerator != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
        torch.backends.cudnn.benchmark = True  # choose the kernels by trying them
    shared = Study(data, options, own.patches, device)
    judge = shared.judge(data.validation)
    rows: list[dict] = []
    entries: dict[str, Entry] = {}

    def add(entry: Entry) -> None:
        entries[entry.name] = entry
        validation = measure_entry(entry, shared, judge)
        rows.append({"what": entry.name, **entry.details, "validation": validation})
        print_row(rows[-1], "validation")
        keep(own, command, rows)

    for fill in (APART, TOGETHER):
        add(Entry(f"OI, {fill}", partial(of_fill, fill), {}))
    for name, recipe in RECIPES.items():
        began = perf_counter()
        networks = [shared.train(recipe, seed) for seed in own.seeds]
        details = {"recipe": asdict(recipe), "seconds": perf_counter() - began}
        add(Entry(name, partial(of_networks, networks, recipe), details))
        if name == ALONE:
            for fill in (APART, TOGETHER):
                add(best_mix(networks, recipe, fill, shared, judge))

    if own.test:
        test = shared.judge(data.test)
        trained = [row for row in rows if "recipe" in row]
        chosen = min(trained, key=lambda row: mean(row["validation"]["seeds"]))
        for row in rows:
            if row is chosen or row["what"] == ALONE or "recipe" not in row:
                row["test"] = measure_entry(entries[row["what"]], shared, test)
                print_row(row, "test")
        keep(own, command, rows)
    return rows


def keep(own: argparse.Namespace, command: str, rows: list[dict]) -> None:
    """Write what has been found, if it is asked for: the next recipe may take long."""
    if own.save_results:
        save_rows("residual", f"uv run python -m studies.residual {command}", rows)


def print_row(row: dict, period: str) -> None:
    """Print the RMSE of a row, and that of the mean of its answers."""
    seeds = " ".join(f"{rmse:.4f}" for rmse in row[period]["seeds"])
    average = row[period]["mean_answer"]
    print(
        f"{period:11} {row['what']:42} {seeds}   mean answer {average:.4f}", flush=True
    )


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare recipes on the store that is named, or on a small one."""
    parser = argparse.ArgumentParser(add_help=False)  # train.py's has the help
    add_own = parser.add_argument
    add_own("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add_own("--patches", type=int, default=4000)
    add_own("--test", action="store_true")
    add_own("--save-results", action="store_true")
    own, flags = parser.parse_known_args(argv)
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    task = partial(study, own, command)
    return call_with_store(task, __doc__.splitlines()[0], flags)


if __name__ == "__main__":
    run(main)
