"""The task: what a run's data, loaders and model are. Change these for a task of your own."""

from dataclasses import asdict

from climatology import (
    average_values,
    check_climatology,
    describe_shares,
    require_months,
    require_times,
)
from data import Data, Grid
from datamodule import WindDataModule
from errors import print_note
from fields import group_by_unit, split_times
from local_file import FileReader
from model import FillGaps
from options import Options
from store_defaults import complete, print_defaults


def make_data(options: Options) -> tuple[Options, Data]:
    """Read the file: its grid, the times of each period, and the climatology.

    Options that are not given and depend on the file are completed.
    """
    reader = FileReader(options.store, options.variables, options.level)
    fields = reader.open()
    for note in reader.notes:
        print_note(note)
    given = options
    options = complete(given, fields)
    print_defaults(given, options)
    limits = {
        "--train-times": options.train_times,
        "--validation-times": options.validation_times,
        "--test-times": options.test_times,
    }
    training, validation, test = split_times(fields.time, limits)
    for period in (training, validation, test):
        reader.require_finite(period)
    require_times(training, options.train_times, options.missing)
    climatology = average_values(
        reader.values[training.positions],
        training.months,
        options.variables,
        missing=options.missing,
        constant=options.constant_cells,
    )
    check_climatology(climatology, options.constant_cells, fields)
    data = Data(
        reader=reader,
        grid=Grid(fields.latitude.values, fields.longitude.values),
        training=training,
        validation=validation,
        test=test,
        climatology=climatology,
        units=group_by_unit(fields, options.variables),
    )
    shares = data.climatology_shares()
    if options.missing == "refuse":
        require_months(shares)
        for period in (training, validation, test):
            reader.require_present(period, climatology.valid)
    note = describe_shares(shares)
    if note:
        print_note(note)
    return options, data


def make_datamodule(
    options: Options, data: Data, first_step: int = 0
) -> WindDataModule:
    """The loaders of a run that begins at a step."""
    return WindDataModule(data, options=asdict(options), first_step=first_step)


def make_model(options: Options, data: Data) -> FillGaps:
    """The network for these data, with its loss and its learning rate."""
    return FillGaps(
        std=data.climatology.std.tolist(),
        units=data.units,
        learning_rate=options.learning_rate,
        max_steps=options.max_steps,
        seed=options.seed,
    )
