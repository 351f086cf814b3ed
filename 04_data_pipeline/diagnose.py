"""Chapter 4: does the training wait for its data, why, and how much could that gain?

    uv run python diagnose.py            # train.py's training; takes any flags of train.py
    uv run python diagnose.py --naive    # with a loader that reads one patch after another
    uv run python diagnose.py --save-results    # both, and write results/diagnosis.json

You should see a verdict, the shares of time, the best speed-up that work on data could
give with its range in this run, and, if the training waits, how many workers it needs.

To diagnose a training of your own, copy diagnosis.py and worker_plan.py instead.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from block_order import BlockOrder
from command_line import call_with_store
from data import Data, PatchDataset
from datamodule import warn_of_rereading
from diagnosis import STEPS, Diagnosis, diagnose, report
from ending import run
from errors import refuse
from location import Location
from model import masked_sums
from options import Options
from results import save_rows
from steps import StepSampler
from task import make_data, make_datamodule, make_model

ENDLESS = 10**6  # steps: more than a diagnosis takes


def main(argv: list[str] | None = None) -> list[dict]:
    """Diagnose the training of train.py with these flags; return a row for each loader.

    Errors end with code 2.
    """
    args, flags = parse_arguments(argv)
    names = ["naive"] if args.naive else ["final"]
    if args.save_results:
        names = ["naive", "final"]
    task = partial(diagnose_loaders, names, args.steps)
    rows = call_with_store(task, __doc__.splitlines()[0], flags)
    if args.save_results:
        words = ["uv run python diagnose.py", *flags, f"--steps {args.steps}"]
        command = " ".join([*words, "--save-results"])
        save_rows("diagnosis", command, rows)
    return rows


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this command, and the flags that are left for train.py's parser."""
    parser = argparse.ArgumentParser(
        usage="diagnose.py [--steps N] [--naive] [any flags of train.py]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    measured = "steps to measure, rounded up to whole waves of batches, at least two"
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help=f"{measured} (default: {STEPS})")
    add(
        "--naive",
        action="store_true",
        help="use a loader that reads one patch after another",
    )
    add(
        "--save-results",
        action="store_true",
        help="diagnose both loaders, and write results/diagnosis.json",
    )
    args, flags = parser.parse_known_args(argv)
    if args.steps < 1:
        refuse(f"--steps {args.steps}: give at least 1")
    return args, flags


def diagnose_loaders(
    names: list[str], steps: int, options: Options, location: Location
) -> list[dict]:
    """Diagnose the training with each loader, and print what was found."""
    if options.resume:
        refuse("--resume: a diagnosis trains anew; leave it out")
    options, data = make_data(options, location)
    gc.freeze()  # as train.py does
    rows = []
    for name in names:
        found, order = diagnose_loader(name, steps, options, data)
        rows.append({"loader": name, **asdict(found)})
        print(f"\n{name} loader, {options.num_workers} workers", end="")
        workers = report(found, options.devices)
        if workers and order:
            accumulate = options.accumulate_grad_batches
            warn_of_rereading(workers, order, accumulate)
    return rows


def diagnose_loader(
    name: str, steps: int, options: Options, data: Data
) -> tuple[Diagnosis, BlockOrder | None]:
    """Diagnose what the first device does in the training; and the loader's order.

    A naive loader has no order of blocks.
    """
    step = make_step(options, data)
    endless = replace(options, max_steps=ENDLESS)
    ranks = options.devices * options.num_nodes
    order = None
    period = 1
    if name == "naive":
        loader = make_naive_loader(endless, data, ranks)
    else:
        module = make_datamodule(endless, data)
        loader = module.train_loader(world_size=ranks)
        order = module.order
        period = find_period(order, options.accumulate_grad_batches)
    run_steps = options.max_steps * options.accumulate_grad_batches
    return diagnose(loader, step, steps, run_steps, period), order


def find_period(order: BlockOrder, accumulate_grad_batches: int) -> int:
    """The number of micro-batches after which the block loader's work repeats.

    In so many steps each slot gives `patches_per_block` samples, or several times as many.
    Within them, each batch needs about equally many new blocks; one rank's part of it, or
    a micro-batch, only over whole rounds.
    """
    steps = order.steps_per_round * order.patches_per_block
    return steps * accumulate_grad_batches


def make_step(options: Options, data: Data) -> Callable[[dict], None]:
    """All that the training does with a batch, without Lightning's own work."""
    device = torch.device("cpu")
    if options.accelerator != "cpu" and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    module = make_model(options, data).to(device)
    optimizer = module.configure_optimizers()["optimizer"]

    def step(batch: dict) -> None:
        batch = {name: values.to(device) for name, values in batch.items()}
        squares, unseen = masked_sums(module.model(batch["input"]), batch)
        loss = squares / unseen
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def make_naive_loader(options: Options, data: Data, ranks: int) -> DataLoader:
    """Most people's first loader. What is not given is DataLoader's default."""
    maker = data.maker(data.training, options.patch_size)
    patches = PatchDataset(maker, data.reader, options.batch_size, options.seed)
    batches = StepSampler(
        options.batch_size,
        options.max_steps,
        world_size=ranks,
        accumulate_grad_batches=options.accumulate_grad_batches,
    )
    return DataLoader(
        OneByOne(patches),
        batch_sampler=batches,
        num_workers=options.num_workers,
        multiprocessing_context=options.start_method if options.num_workers else None,
    )


class OneByOne(Dataset):
    """Chapter 3's patches, read one after another: each read ends before the next starts."""

    def __init__(self, patches: PatchDataset):
        self.patches = patches

    def __getitem__(self, index: tuple[int, int]) -> dict:
        return self.patches[index]


if __name__ == "__main__":
    run(main)
