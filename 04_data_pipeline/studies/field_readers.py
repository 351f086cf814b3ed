"""Readers of a store's fields in place of our own: plain xarray's, Dask's, tensorstore's."""

from functools import cached_property
from urllib.parse import urlsplit

import dask
import numpy as np
import xarray as xr

from fields import select_variables
from store import READS_AT_ONCE, CountingStore, FieldReader


class XarrayReader(FieldReader):
    """Reads as most people begin: one variable of one sample after another."""

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        values = []
        for box in boxes:
            values.append([self.read(name, box) for name in self.variables])
        return np.stack(values)


class DaskReader(FieldReader):
    """Reads by Dask's arrays, a task for each chunk. All boxes are one graph."""

    @cached_property
    def lazy(self) -> xr.Dataset:
        """The variables as Dask's arrays."""
        self.open()
        dataset = xr.open_zarr(self.store, chunks={})
        return select_variables(dataset, self.variables, choice="")

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        lazy = []
        for box in boxes:
            patch = self.lazy.isel(box)
            lazy.append([patch[name].data for name in self.variables])
        return np.stack(dask.compute(*lazy))


class TensorStoreReader(FieldReader):
    """Reads by tensorstore, from a store on an S3 server whose latitudes run southwards."""

    arrays: dict  # of each variable: tensorstore's array

    def prepare(self, store: CountingStore, stored: xr.Dataset) -> None:
        import tensorstore

        at_once = {"limit": READS_AT_ONCE}
        context = tensorstore.Context({"s3_request_concurrency": at_once})
        self.arrays = {}
        for name in self.variables:
            spec = {"driver": "zarr3", "kvstore": self.locate(name)}
            self.arrays[name] = tensorstore.open(spec, context=context).result()
        super().prepare(store, stored)

    def locate(self, name: str) -> dict:
        """Where a variable is, in tensorstore's words."""
        url = urlsplit(self.location.url)
        return {
            "driver": "s3",
            "bucket": url.netloc,
            "path": f"{url.path[1:]}/{name}/",
            "endpoint": self.location.endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "anonymous"},
        }

    def counted_apart(self) -> "TensorStoreReader":
        """This reader: what tensorstore asks for is not counted."""
        return self

    def read(self, name: str, box: dict) -> np.ndarray:
        height = self.open().sizes["latitude"]
        rows = box.get("latitude", slice(None))
        first, stop, _ = rows.indices(height)
        southwards = slice(height - stop, height - first)
        columns = box.get("longitude", slice(None))
        stored = self.arrays[name].oindex[box["time"], southwards, columns]
        return stored.read().result()[..., ::-1, :]
