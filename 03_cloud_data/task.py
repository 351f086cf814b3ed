"""The task: what a run's data, loaders and model are. Change these for a task of your own."""

from dataclasses import asdict, replace
from pathlib import Path

from climatology import describe_shares, require_months
from data import Data, Grid
from datamodule import WindDataModule
from errors import print_note
from fields import group_by_unit, split_times
from location import Location
from model import FillGaps
from options import Options
from store import FieldReader
from store_climatology import load_climatology
from store_defaults import complete, print_defaults


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
