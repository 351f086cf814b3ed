"""The task: what the run asks of data, model and score. Write your own in this file's place.

train.py, survival/ and tracking/ know nothing else of the winds. preflight/ also needs
compute_loss, and its patches.py. survival/requirements.py says what they ask of a task, and
refuses what it can see. It cannot see whether

- the order of the data depends on the step alone, and on nothing drawn on the way;
- the model draws, as dropout does, in forward or training_step, from torch's generators.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import isnan, prod
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

import evaluation
from block_order import BlockOrder, Window, fit_slots
from climatology import describe_shares, require_months
from data import Data, Grid, PatchDataset
from datamodule import WindDataModule
from errors import DataError, print_note
from fields import group_by_unit, split_times
from location import Location
from model import Batch, FillGaps, masked_sums
from options import Options
from store import FieldReader, RequestCounter
from store_checksum import identify_data
from store_climatology import load_climatology
from store_defaults import complete, print_defaults
from wind_blocks import WindBlocks

LOSS = "loss"  # what training logs, and what must be finite and no spike
HIGHER_IS_BETTER = False  # of score()


def make_data(options: Options, location: Location) -> tuple[Options, Data]:
    """Open the store: its grid, the times of each period, and the climatology.

    Options that are not given and depend on the store are completed.
    """
    reader = FieldReader(
        replace(location, snapshot=options.snapshot),  # a resumed run has that before
        options.variables,
        options.level,
        missing_chunks=options.missing_chunks,
    )
    fields = reader.open()
    for note in reader.notes:
        print_note(note)
    given = options
    options = complete(given, fields)
    options = replace(options, snapshot=reader.location.snapshot)
    print_defaults(given, options)
    limits = {
        "--train-times": options.train_times,
        "--validation-times": options.validation_times,
        "--test-times": options.test_times,
    }
    training, validation, test = split_times(fields.time, limits)
    climatology = load_climatology(
        reader,
        training,
        span=options.train_times,
        missing=options.missing,
        constant=options.constant_cells,
        folder=Path(options.climatology_dir),
    )
    latitude = fields.latitude.values
    longitude = fields.longitude.values
    units = group_by_unit(fields, options.variables)
    data = Data(
        reader=reader,
        grid=Grid(latitude, longitude),
        training=training,
        validation=validation,
        test=test,
        climatology=climatology,
        units=units,
    )
    shares = data.climatology_shares()
    if options.missing == "refuse":
        require_months(shares)
    note = describe_shares(shares)
    if note:
        print_note(note)
    return options, data


def describe_data(data: Data) -> dict[str, str]:
    """Checksums for the record. A run goes on only with data of the same "values"."""
    return identify_data(data.reader, data.training)


def make_datamodule(
    options: Options, data: Data, first_step: int = 0, skipped: tuple[Window, ...] = ()
) -> WindDataModule:
    """The loaders of a run that begins at a step, and leaves batches out."""
    per_block = options.patches_per_block
    maker = data.maker(data.training, options.patch_size)
    reader = data.reader.counted_apart()  # the training's requests are its own
    blocks = WindBlocks(maker, reader, per_block)
    slots = fit_slots(options.shuffle_slots, len(blocks), options.batch_size)
    order = BlockOrder(
        blocks=len(blocks),
        batch_size=options.batch_size,
        slots=slots,
        patches_per_block=per_block,
        seed=options.seed,
        skipped=skipped,
    )
    return WindDataModule(
        data, options=asdict(options), order=order, blocks=blocks, first_step=first_step
    )


def make_model(options: Options, data: Data | None = None) -> FillGaps:
    """The network, with its loss and its learning rate; without data, one of its size."""
    std = [1.0] * len(options.variables)
    units = {"": list(range(len(std)))}
    if data:
        std = data.climatology.std.tolist()
        units = data.units
    model = FillGaps(
        std=std,
        units=units,
        learning_rate=options.learning_rate,
        max_steps=options.max_steps,
        seed=options.seed,
        padding=options.padding,
    )
    model.example_input_array = example_input(options)
    if options.compile:
        model.model.compile()  # not the LightningModule: self.log would break the graph
    return model


def example_input(options: Options) -> torch.Tensor:
    """A sample of zeros, as forward takes it, (1, variables + 1, size, size)."""
    size = options.patch_size
    return torch.zeros(1, len(options.variables) + 1, size, size)


def compute_loss(module: FillGaps, batch: Batch) -> torch.Tensor:
    """The loss of a batch on one device, outside of a Trainer: for preflight."""
    squares, unseen = masked_sums(module(batch["input"]), batch)
    return squares / unseen.clamp(min=1)


def score(metrics: dict[str, float]) -> float:
    """How good a validation is, from what it logged: over all units, the product of the RMSEs."""
    rmse = [value for name, value in metrics.items() if name.startswith("rmse")]
    if not rmse:
        raise LookupError("rmse")
    if any(map(isnan, rmse)):
        reason = "no value is present in any patch"
        raise DataError(f"--validation-times: {reason}; give others")
    return prod(rmse)


def closer_look(
    options: Options, data: Data
) -> Callable[[Trainer, FillGaps], dict[str, float]]:
    """What measures a model anew that may be the best: the same metrics on more patches.

    None, in a task whose validation looks at all that there is.
    """
    number = options.full_validation_patches
    patches = data.eval_patches(data.validation, options.patch_size, number)
    return partial(measure_rmse, patches=patches)


def measure_rmse(
    trainer: Trainer, module: FillGaps, patches: PatchDataset
) -> dict[str, float]:
    """The RMSE on all patches, in each unit. Each rank takes its share of them."""
    for batch in trainer.datamodule.eval_loader(patches):
        batch = trainer.strategy.batch_to_device(batch)
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            module.validation_step(batch, 0)
    rmse = {}
    for mean_square, unit in zip(module.mean_squares, module.hparams.units):
        rmse[f"rmse ({unit})"] = mean_square.compute().sqrt().item()
        mean_square.reset()
    return rmse


def make_callbacks() -> list[Callback]:
    """What else follows the run: here, the requests that its data cost."""
    return [RequestCounter()]


def report(metrics: dict, options: Options, trainer: Trainer) -> None:
    """Add the task's metrics, draw an example, and print the summary; on rank 0."""
    module = trainer.lightning_module
    data = trainer.datamodule.data
    patches = trainer.datamodule.test
    units = module.hparams.units
    [counter] = (one for one in trainer.callbacks if isinstance(one, RequestCounter))
    metrics["missing_chunks"] = counter.missing_chunks
    metrics["climatology_shares"] = data.climatology_shares()
    if options.count_requests:
        metrics |= counter.per_sample()
    folder = Path(options.climatology_dir)
    metrics["rmse"] = evaluation.baselines(data, patches, folder)
    tested = metrics["tested"]
    metrics["rmse"][evaluation.NETWORK] = {
        unit: tested[f"test rmse ({unit})"] for unit in units
    }
    picture = Path(options.output_dir, "fill.png")
    evaluation.plot_example(patches, units, module.model).savefig(picture)
    evaluation.print_summary(metrics, options.test_times, picture)
