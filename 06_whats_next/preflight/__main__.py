"""Chapter 6: two minutes before the money is spent: what would stop or slow this run?

    uv run python -m preflight FLAGS        # the flags that you will give train.py
    torchrun --nproc-per-node 2 -m preflight FLAGS    # or your launcher, on all nodes

You should see a line for each check, green or red, and below each red one a remedy. The
exit code is 0 if all are green, and 2 if not, so that this starts only what is green:

    python -m preflight FLAGS && python train.py FLAGS
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from command_line import call_with_store
from ending import run
from errors import print_note
from location import Location
from options import PATCH_SIZE, Options
from preflight.checkpoints import (
    check_start,
    delete_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from preflight.findings import Finding, collect
from preflight.machine import check_machine
from preflight.patches import (
    check_climatology,
    check_values,
    open_and_check,
    patch_bytes,
    samples_at_once,
    take_batch,
)
from preflight.ranks import check_ranks
from preflight.store import RETRY_TIMEOUT, Rate
from preflight.training import (
    OVERFIT_SAMPLES,
    Trial,
    judge_overfit,
    judge_pace,
    make_trial,
    measure_pace,
    overfit,
)
from survival.resume import Start
from task import make_data, make_datamodule, make_model

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
    given = replace(options, compile=False)
    # The store is not open yet, and the network is as large with any other patch.
    options = replace(given, patch_size=given.patch_size or PATCH_SIZE)
    module = make_model(options)
    weights = sum(values.nbytes for values in module.parameters())
    batch = samples_at_once(options, fabric) * patch_bytes(options)
    machine = check_machine(options, fabric.device, 3 * weights, batch)
    done += collect(fabric, "machine", machine, UNEXPECTED)
    trial = make_trial(module, fabric, options.learning_rate)
    starts: list[Start] = []
    done += check_checkpoints(fabric, given, trial, starts)

    options = starts[0].take_over(given) if starts else given
    rates: list[Rate] = []
    store = open_and_check(fabric, options, location, rates)
    done += collect(fabric, "store", store, OTHER_STORE)
    if any(finding.is_red and finding.name in NEEDED for finding in done):
        print_note("left out: values, one batch, loader; mend what is red first")
        return done
    options = replace(options, max_steps=MANY)
    training = check_training(fabric, options, location, rates)
    return done + collect(fabric, "training", training, UNEXPECTED)


def check_checkpoints(
    fabric: Fabric, options: Options, trial: Trial, starts: list[Start]
) -> list[Finding]:
    """Where the run would begin; then rank 0 writes a checkpoint, and all restore it.

    The start is put into `starts`.
    """
    place = Location(options.checkpoint_dir, options.endpoint)
    place = replace(place, retry_timeout=RETRY_TIMEOUT)
    done = collect(fabric, "start", check_start(place, options, starts), OTHER_FOLDER)
    aside = replace(place, url=f"{place.url}/preflight")  # a run may be writing there
    writing = write_checkpoint(aside, trial) if fabric.is_global_zero else []
    written = collect(fabric, "checkpoint", writing, OTHER_FOLDER)
    done += written
    if not written[0].is_red:
        done += collect(fabric, "restore", read_checkpoint(aside, trial), OTHER_FOLDER)
    if fabric.is_global_zero:
        delete_checkpoint(aside)
    return done


def check_training(
    fabric: Fabric, options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """The data's values, a batch that is learnt, and whether the loader keeps up."""
    options, data = make_data(options, location)
    module = make_datamodule(options, data)
    yield check_climatology(data)
    values = check_values(module)
    yield values
    if values.is_red:
        return
    rate = options.learning_rate
    trial = make_trial(make_model(options, data), fabric, rate)
    count = min(OVERFIT_SAMPLES, samples_at_once(options, fabric))
    yield judge_overfit(overfit(trial, take_batch(module, count)), rate)

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
