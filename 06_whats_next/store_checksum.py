"""Checksums of a store, by which a run that goes on finds out that its data have changed."""

import json
from hashlib import sha256

import zarr

from coordinates import DIMENSIONS
from fields import Period
from store import FieldReader


def identify_data(reader: FieldReader, training: Period) -> dict[str, str]:
    """Checksums of the store, wherever it is: the same data elsewhere have the same.

    metadata: of the variables' arrays: shape, chunks, codecs and attributes;
    values: of the grid, the training times, and the first and the last training map.
    """
    # A reader of its own, because the run's counts the missing chunks of the run.
    reader = reader.counted_apart()
    root = zarr.open_group(reader.store, mode="r")
    arrays = {name: root[name].metadata.to_dict() for name in reader.variables}
    metadata = json.dumps(arrays, sort_keys=True, default=str)
    return {
        "metadata": sha256(metadata.encode()).hexdigest(),
        "values": sha256_of_values(reader, training),
    }


def sha256_of_values(reader: FieldReader, training: Period) -> str:
    """Of the grid, the training times, and the first and the last training map."""
    fields = reader.open()
    values = sha256()
    for dim in DIMENSIONS:
        coordinate = training.dates if dim == "time" else fields[dim].values
        # As text: dates of other calendars are objects, and their bytes are addresses.
        values.update(coordinate.astype(str).tobytes())
    for name in reader.variables:
        for time in training.positions[[0, -1]]:
            values.update(reader.read(name, {"time": time}).tobytes())
    return values.hexdigest()
