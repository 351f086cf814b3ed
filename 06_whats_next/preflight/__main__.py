"""Chapter 6: two minutes before the money is spent: what would stop or slow this run?

    uv run python -m preflight FLAGS        # the flags that you will give train.py
    torchrun --nproc-per-node 2 -m preflight FLAGS    # or your launcher, on all nodes

You should see a line for each check, green or red, and below each red one a remedy. The
exit code is 0 if all are green, and 2 if not, so that this starts only what is green:

    python -m preflight FLAGS && python train.py FLAGS
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import default_collate

from block_loader import BlockLoader, BlockOrder
from command_line import call_with_store, run
from data import Grid, PatchDataset
from datamodule import count_readers
from errors import print_note
from fields import split_times
from model import FillGaps
from options import Options
from preflight.checkpoints import (
    check_start,
    delete_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from preflight.findings import Finding, collect
from preflight.machine import check_machine, free_memory
from preflight.memory import Memory, add_up, blocks_waiting, judge_memory
from preflight.ranks import check_ranks
from preflight.store import Rate, block_bytes, check_store
from preflight.training import (
    OVERFIT_SAMPLES,
    Trial,
    check_values,
    judge_overfit,
    judge_pace,
    make_trial,
    measure_pace,
    overfit,
)
from prices import read_prices
from store import FieldReader, Location
from task import make_data, make_datamodule, make_model

PRICES = Path(__file__).parent.parent / "prices.toml"
RETRY_TIMEOUT = 10  # seconds: a store that does not answer is found out soon
NEEDED = ("store", "memory")  # without these, nothing can be trained
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


def check(options: Options, location: Location) -> list[Finding]:
    """All findings, the same on each rank; rank 0 prints them."""
    fabric = launch(options)
    done = collect(fabric, "ranks", check_ranks(fabric, options), UNEXPECTED)
    options = replace(options, compile=False)
    module = make_network(options)
    weights = sum(values.nbytes for values in module.parameters())
    batch = samples_at_once(options, fabric) * patch_bytes(options)
    machine = check_machine(options, fabric.device, 3 * weights, batch)
    done += collect(fabric, "machine", machine, UNEXPECTED)
    done += check_checkpoints(fabric, options, make_trial(module, fabric))

    rates: list[Rate] = []
    store = open_and_check(fabric, options, location, rates)
    done += collect(fabric, "store", store, OTHER_STORE)
    if any(finding.is_red and finding.name in NEEDED for finding in done):
        print_note("left out: values, one batch, loader; mend what is red first")
        return done
    options = replace(options, max_steps=MANY)
    training = check_training(fabric, options, location, rates)
    return done + collect(fabric, "training", training, UNEXPECTED)


def samples_at_once(options: Options, fabric: Fabric) -> int:
    """How many samples a rank has in a micro-batch, at most."""
    pieces = fabric.world_size * options.accumulate_grad_batches
    return math.ceil(options.batch_size / pieces)


def patch_bytes(options: Options) -> int:
    """A sample in a batch: input, target, unseen and weight, in float32."""
    return 4 * (2 * len(options.variables) + 3) * options.patch_size**2


def check_checkpoints(fabric: Fabric, options: Options, trial: Trial) -> list[Finding]:
    """Where the run would begin; then rank 0 writes a checkpoint, and all restore it."""
    place = Location(options.checkpoint_dir, options.endpoint)
    place = replace(place, retry_timeout=RETRY_TIMEOUT)
    done = collect(fabric, "start", check_start(place, options), OTHER_FOLDER)
    aside = replace(place, url=f"{place.url}/preflight")  # a run may be writing there
    writing = write_checkpoint(aside, trial) if fabric.is_global_zero else []
    written = collect(fabric, "checkpoint", writing, OTHER_FOLDER)
    done += written
    if not written[0].is_red:
        done += collect(fabric, "restore", read_checkpoint(aside, trial), OTHER_FOLDER)
    if fabric.is_global_zero:
        delete_checkpoint(aside)
    return done


def open_and_check(
    fabric: Fabric, options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """The store, the memory that its patches and maps take, and how fast it is.

    A store that does not answer is given up soon. Rates are put into `rates`.
    """
    soon = replace(location, retry_timeout=RETRY_TIMEOUT)
    fields = FieldReader(soon, options.variables, options.level).open()
    sizes = ", ".join(f"{dim} {size}" for dim, size in fields.sizes.items())
    yield Finding("store", f"opens; {sizes}")
    Grid(fields.latitude.values, fields.longitude.values).patch_space(
        options.patch_size
    )
    period = split_times(fields.time, {"--train-times": options.train_times})[0]
    reader = FieldReader(location, options.variables, options.level)
    blocks = reader.split_by_chunk(period.positions)
    size = block_bytes(reader, blocks)

    free = free_memory(options.devices)
    on_device = None
    if fabric.device.type == "cuda":
        on_device = torch.cuda.mem_get_info(fabric.device)[0]
    yield judge_memory(add_up_memory(fabric, options, size), free, on_device)
    prices = read_prices(PRICES)
    per_block = options.patches_per_block
    yield from check_store(reader, period, per_block, prices, free // 4, rates)


def add_up_memory(fabric: Fabric, options: Options, block: int) -> Memory:
    """What this rank will hold. A block, of one variable, has so many bytes."""
    size = options.patch_size
    batch_size = options.batch_size
    per_block = options.patches_per_block
    order = BlockOrder(
        blocks=1,
        batch_size=batch_size,
        slots=options.shuffle_slots,
        patches_per_block=per_block,
        seed=options.seed,
    )
    loader = BlockLoader(order, [], read_block=None, make_batch=None)
    workers = options.num_workers
    batches = order.steps_per_round * options.accumulate_grad_batches
    samples = samples_at_once(options, fabric)
    waiting = blocks_waiting(
        slots=math.ceil(options.shuffle_slots / fabric.world_size),
        batch=samples,
        patches_per_block=per_block,
        ahead=loader.depth,
        workers=workers,
        readers=count_readers(workers, batches),
    )
    patch = 4 * len(options.variables) * size**2
    waiting *= per_block * patch
    waiting += max(1, workers) * loader.threads * block  # being read

    inputs = torch.zeros(1, len(options.variables) + 1, size, size)
    inputs = fabric.to_device(inputs.to(memory_format=torch.channels_last))
    module = fabric.to_device(make_network(options))
    with fabric.autocast():
        return add_up(module, inputs, samples, fabric.world_size, waiting)


def make_network(options: Options) -> FillGaps:
    """The run's network, before there are data."""
    variables = len(options.variables)
    return FillGaps(
        std=[1.0] * variables,
        units={"": list(range(variables))},
        learning_rate=options.learning_rate,
        max_steps=options.max_steps,
        seed=options.seed,
        padding=options.padding,
    )


def check_training(
    fabric: Fabric, options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """The data's values, a batch that is learnt, and whether the loader keeps up."""
    data = make_data(options, location)
    module = make_datamodule(options, data)
    training = module.blocks.maker
    makers = {
        "training": training,
        "validation": module.validation.maker,
        "test": module.test.maker,
    }
    values = check_values(data.reader, makers)
    yield values
    if values.is_red:
        return
    trial = make_trial(make_model(options, data), fabric)
    count = min(OVERFIT_SAMPLES, samples_at_once(options, fabric))
    dataset = PatchDataset(training, data.reader, options.batch_size, options.seed)
    samples = dataset.__getitems__([(0, k) for k in range(count)])
    yield judge_overfit(overfit(trial, default_collate(samples)), options.learning_rate)

    loader = module.train_loader(fabric.global_rank, fabric.world_size)
    pace = measure_pace(trial, loader)
    read = sum(rate.bytes_read for rate in rates) / sum(rate.blocks for rate in rates)
    batch = options.batch_size / fabric.world_size / options.accumulate_grad_batches
    batch_bytes = batch * read / options.patches_per_block
    bandwidth = max(rate.bandwidth for rate in rates)
    yield judge_pace(pace, batch_bytes, bandwidth, options.patches_per_block)


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
