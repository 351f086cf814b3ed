"""Chapter 6: two minutes before the money is spent: what would stop or slow this run?

    uv run python preflight.py FLAGS        # the flags that you will give train.py
    torchrun --nproc-per-node 2 preflight.py FLAGS    # or your launcher, on all nodes

You should see a line for each check, green or red, and below each red one a remedy. The
exit code is 0 if all are green, and 2 if not, so that `preflight.py && train.py` works.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import default_collate

from checkpoints import STORE_ERRORS, open_checkpoints, print_note
from command_line import call_with_store, run
from fields import split_times
from findings import Finding, collect, share
from machine_checks import check_machine, free_memory
from memory_sum import Memory, add_up, bytes_waiting, judge_memory
from model import FillGaps
from options import Options
from prices import read_prices
from rank_checks import check_ranks
from resume import Start
from store import FieldReader, Location
from store_checks import Rate, check_store
from train import make_data, make_model
from training_checks import (
    NAME,
    OVERFIT_SAMPLES,
    Trial,
    check_values,
    judge_overfit,
    judge_pace,
    make_trial,
    measure_pace,
    overfit,
    read_checkpoint,
    write_checkpoint,
)

PRICES = Path(__file__).parent / "prices.toml"
RETRY_TIMEOUT = 10  # seconds: a store that does not answer is found out soon
# Remedies for errors that bring none.
UNEXPECTED = "train.py would end with this error, too"
OTHER_FOLDER = "check --checkpoint-dir and its credentials"
OTHER_STORE = "check --store, --endpoint and credentials, or give --anonymous"
MANY = 10**6  # steps: the loader is to have enough of them


def launch(options: Options) -> Fabric:
    """Start the ranks, as Lightning's Trainer does, and let them meet."""
    timeout = timedelta(seconds=options.process_group_timeout)
    several = options.devices * options.num_nodes > 1
    fabric = Fabric(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        strategy=DDPStrategy(timeout=timeout) if several else "auto",
    )
    fabric.launch()
    return fabric


def check_machine_and_disks(
    fabric: Fabric, options: Options, trial: Trial
) -> list[Finding]:
    """This rank's machine, and a checkpoint that rank 0 writes and all ranks restore."""
    of_a_patch = patch_bytes(options)
    batch = math.ceil(options.batch_size / fabric.world_size) * of_a_patch
    weights = sum(values.nbytes for values in trial.module.parameters())
    checks = check_machine(options, fabric.device, 3 * weights, batch)
    done = share(fabric, collect("machine", checks, UNEXPECTED))

    place = Location(options.checkpoint_dir, options.endpoint)
    checkpoints = open_checkpoints(replace(place, retry_timeout=RETRY_TIMEOUT))
    written = []
    if fabric.is_global_zero:
        written = collect(
            "checkpoint", write_checkpoint(checkpoints, trial), OTHER_FOLDER
        )
    written = share(fabric, written)
    if written[0].is_red:
        return done + written
    restored = share(
        fabric, collect("restore", read_checkpoint(checkpoints, trial), OTHER_FOLDER)
    )
    if fabric.is_global_zero:
        with suppress(*STORE_ERRORS):
            checkpoints.delete(NAME)
    return done + written + restored


def patch_bytes(options: Options) -> int:
    """Of a sample in a batch: input, target, unseen and weight, in float32."""
    return 4 * (2 * len(options.variables) + 3) * options.patch_size**2


def check_training(
    fabric: Fabric, options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """What needs the data: their values, memory, a batch, and the loader's pace."""
    data = make_data(options, location, Start())
    dataset = data.blocks.dataset
    values = check_values(dataset)
    yield values
    memory = judge_memory(*add_up_memory(fabric, options))
    yield memory
    if values.is_red or memory.is_red:
        return
    trial = make_trial(make_model(options, data), fabric)
    samples = dataset.__getitems__([(0, k) for k in range(OVERFIT_SAMPLES)])
    yield judge_overfit(overfit(trial, default_collate(samples)), options.learning_rate)

    loader = data.train_loader(fabric.global_rank, fabric.world_size)
    pace = measure_pace(trial, loader)
    read = sum(rate.bytes_read for rate in rates) / sum(rate.reads for rate in rates)
    batch = options.batch_size / fabric.world_size / options.accumulate_grad_batches
    batch_bytes = batch * read / options.patches_per_block
    bandwidth = max(rate.bandwidth for rate in rates)
    yield judge_pace(pace, batch_bytes, bandwidth, options.patches_per_block)


def add_up_memory(fabric: Fabric, options: Options) -> tuple[Memory, int, int | None]:
    """What this rank needs, what is free for it, and what is free on its GPU, if it has one."""
    size = options.patch_size
    sample = torch.zeros(1, len(options.variables) + 1, size, size)
    sample = fabric.to_device(sample.to(memory_format=torch.channels_last))
    module = fabric.to_device(make_network(options))
    pieces = fabric.world_size * options.accumulate_grad_batches
    waiting = bytes_waiting(
        options.shuffle_slots,
        options.batch_size,
        options.patches_per_block,
        4 * len(options.variables) * size**2,
        options.num_workers,
    )
    with fabric.autocast():
        samples = math.ceil(options.batch_size / pieces)
        memory = add_up(module, sample, samples, waiting)
    on_device = None
    if fabric.device.type == "cuda":
        on_device = torch.cuda.mem_get_info(fabric.device)[0]
    return memory, free_memory(options.devices), on_device


def make_network(options: Options) -> FillGaps:
    """The run's network, before there are data."""
    variables = len(options.variables)
    units = {"": list(range(variables))}
    rate = options.learning_rate
    std = [1.0] * variables
    return FillGaps(std, units, rate, options.max_steps, options.seed, options.padding)


def check(options: Options, location: Location) -> list[Finding]:
    """All findings, the same on each rank; rank 0 prints them."""
    fabric = launch(options)
    location = replace(location, retry_timeout=RETRY_TIMEOUT)
    done = share(fabric, check_ranks(fabric, options))
    options = replace(options, compile=False, max_steps=MANY)
    trial = make_trial(make_network(options), fabric)
    done += check_machine_and_disks(fabric, options, trial)
    rates: list[Rate] = []
    found = share(
        fabric, collect("store", open_and_check(options, location, rates), OTHER_STORE)
    )
    done += found
    if any(finding.is_red and finding.name == "store" for finding in found):
        return done
    training = check_training(fabric, options, location, rates)
    return done + share(fabric, collect("training", training, UNEXPECTED))


def open_and_check(
    options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """The checks of the store. An error here ends all that need it."""
    reader = FieldReader(location, options.variables, options.level)
    fields = reader.open()
    size = dict(fields[options.variables[0]].sizes)
    yield Finding("store", f"opens: {', '.join(options.variables)}, {size}")
    period = split_times(fields.time, {"--train-times": options.train_times})[0]
    prices = read_prices(PRICES)
    yield from check_store(reader, period, options.patches_per_block, prices, rates)


def main(argv: list[str] | None = None) -> list[Finding]:
    """Check a run of train.py with these flags; SystemExit with 2 if something is red."""
    done = call_with_store(check, __doc__.splitlines()[0], argv)
    red = [finding for finding in done if finding.is_red]
    if red:
        print_note(f"{len(red)} red: mend them before you start train.py")
        raise SystemExit(2)
    print_note("all green: start train.py with the same flags")
    return done


if __name__ == "__main__":
    run(main)
