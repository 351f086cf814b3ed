"""A NetCDF file in memory, behind the call that a store in a bucket answers later."""

import numpy as np
import xarray as xr

from climatology import check_finite
from decoding import decode, explain_limits, find_limits
from errors import DataError, first_line
from fields import Period, explain_bounds, list_variables, select_variables
from levels import select_level

DIMS = ("time", "latitude", "longitude")
ALL = slice(None)
NAN = "NaN; if the data have gaps, give --missing mask; else write it anew"


class FileReader:
    """Reads boxes of cells of some variables, which are all in memory.

    DataError if the file or a variable cannot be used.
    """

    times_per_chunk = 1  # each time can be read alone

    def __init__(self, path: str, variables: list[str], level: str | None = None):
        self.variables = variables
        self.notes: list[str] = []  # what a user should know of the file
        try:
            with xr.open_dataset(path, decode_cf=False) as stored:
                self.fields, self.values = self.load(stored, level)
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"cannot be read ({type(error).__name__}: {first_line(error)})"
            raise DataError(f"{reason}; give a whole NetCDF file") from error

    def load(
        self, stored: xr.Dataset, level: str | None
    ) -> tuple[xr.Dataset, np.ndarray]:
        """The variables, and their values, (time, variables, latitude, longitude)."""
        names = self.variables
        dataset = decode(stored, names)
        if level is not None:
            dataset = select_level(dataset, names, level)
        fields = select_variables(dataset, names, list_variables(stored))
        notes = [explain_bounds(stored, names)]
        maps = []
        for name in names:
            values = fields[name].transpose(*DIMS).values.astype("float32")
            limits = find_limits(stored.variables[name])
            maps.append(limits.mask(values) if limits else values)
            notes.append(explain_limits(name, stored.variables[name]))
        self.notes = [note for note in notes if note]
        return fields, np.stack(maps, axis=1)

    def open(self) -> xr.Dataset:
        """The variables on their coordinates."""
        return self.fields

    def read(self, name: str, box: dict) -> np.ndarray:
        """A variable in a box, (latitude, longitude), or (time, latitude, longitude)."""
        values = self.values[box["time"], self.variables.index(name)]
        rows = values[..., box.get("latitude", ALL), :]
        return rows[..., box.get("longitude", ALL)]

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        """All variables in each box, (boxes, variables, H, W)."""
        patches = []
        for box in boxes:
            rows = self.values[box["time"], :, box["latitude"]]
            patches.append(rows[..., box["longitude"]])
        return np.stack(patches)

    def require_finite(self, period: Period) -> None:
        """DataError that names the first value that is infinite."""
        values = self.values[period.positions]
        check_finite(values.swapaxes(0, 1), period.dates, self.variables)

    def require_present(self, period: Period, valid: np.ndarray) -> None:
        """DataError that names the first value that is missing in a valid cell, (H, W)."""
        values = self.values[period.positions]
        missing = np.argwhere(np.isnan(values) & valid)
        if missing.size:
            time, number, *_ = missing[0]
            date = str(period.dates[time])[:10]
            raise DataError(f"{self.variables[number]} on {date}: {NAN}")
