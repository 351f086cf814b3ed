"""A Zarr store behind a path or a URL, read many boxes at once, every request counted."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import monotonic

import numpy as np
import torch
import xarray as xr
import zarr
from lightning.pytorch import Callback, LightningModule, Trainer
from obstore.exceptions import (
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, from_url
from zarr.abc.store import Store as ZarrStore
from zarr.storage import ObjectStore, WrapperStore

from chunking import count_times_per_chunk, explain_blocks
from coordinates import may_be_fill
from decoding import Limits, decode, explain_limits, find_limits
from errors import DataError, first_line
from fields import (
    explain_bounds,
    list_variables,
    select_present,
    select_variables,
    split_by_chunk,
)
from levels import select_level
from location import Location, client_options
from store_remedies import explain_absence, explain_missing, find_store_remedy

READS_AT_ONCE = 64  # of one process; each may ask for several chunks
# Objects of metadata, each of which may be absent.
METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
# Parts of obstore's messages, whose classes do not tell these cases apart.
BROKEN_BODY = ("body error", "error reading a body")  # of obstore, of icechunk
OTHER_REGION = "redirect without LOCATION"


@dataclass
class Traffic:
    """What was asked of a store, and the chunks that were asked for and are not there."""

    requests: int = 0
    bytes_read: int = 0
    missing: set[str] = field(default_factory=set)

    def counts(self) -> tuple[int, int, int]:
        """Requests, bytes and missing chunks."""
        return self.requests, self.bytes_read, len(self.missing)


# The traffic of the FieldReader that is reading now. Zarr reads in a thread of its own, and
# asyncio copies the caller's context there.
CURRENT_TRAFFIC: ContextVar[Traffic] = ContextVar("CURRENT_TRAFFIC")


class CountingStore(WrapperStore):
    """Counts each reader's requests, names the object that fails, and refuses missing chunks."""

    def __init__(self, store: ZarrStore, retry_timeout: float = 0):
        super().__init__(store)
        self.retry_timeout = retry_timeout
        self.snapshot: str | None = None  # of an Icechunk repository
        self.notes: list[str] = []  # what a user should know of it
        # Arrays whose chunks are counted if they are missing: why that is an error, or None.
        self.rules: dict[str, str | None] = {}
        self.absent: set[str] = set()  # chunks of other arrays

    @property
    def supports_consolidated_metadata(self) -> bool:
        """Whether xarray should look for it: not in an Icechunk repository."""
        return self._store.supports_consolidated_metadata

    async def get(self, key: str, *how, **more):
        """The bytes of an object, or None if there is none.

        DataError if the client has given up, or if a chunk must not be missing.
        """
        content = None
        try:
            content = await self.get_whole(key, *how, **more)
        except NotSupportedError as error:
            reason = "shards need range requests, which this server ignores"
            remedy = "copy the store to a disk or a bucket, or write it without shards"
            raise DataError(f"{key}: {reason}; {remedy}") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            # S3 answers 403 for an absent object, not 404, if the caller may not list.
            if not key.endswith(METADATA):
                remedy = "check credentials, or give --anonymous"
                raise DataError(f"{key}: {first_line(error)}; {remedy}") from error
        except Exception as error:  # obstore's errors share no base
            if OTHER_REGION in str(error):
                reason = "the bucket is in another region"
                raise DataError(f"{reason}; give its --region") from error
            reason = f"{key}: {first_line(error)}"
            # A part of a file to which an Icechunk refers; or nobody is logged in.
            if "virtual" in reason or "token request" in reason:
                reason += f"; {find_store_remedy(error)}"
            raise DataError(reason) from error
        traffic = CURRENT_TRAFFIC.get(None) or Traffic()  # not of a reader
        traffic.requests += 1  # all reads run in one thread, that of Zarr's event loop
        if content is not None:
            traffic.bytes_read += len(content)
        elif not key.endswith(METADATA):
            self.count_missing(key, traffic)
        return content

    async def get_whole(self, key: str, *how, **more):
        """An object, asked for again if the connection breaks within its body.

        obstore goes on from the byte that it has, but only if the server sends an ETag;
        icechunk does not.
        """
        deadline = monotonic() + self.retry_timeout
        delay = 0.1
        while True:
            try:
                return await super().get(key, *how, **more)
            except Exception as error:
                is_broken = any(words in str(error) for words in BROKEN_BODY)
                if not is_broken or monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, 5)

    def count_missing(self, key: str, traffic: Traffic) -> None:
        """Remember a chunk that is not there. DataError if that is damage."""
        array = key.split("/")[0]
        if array not in self.rules:
            self.absent.add(key)
            return
        damage = self.rules[array]
        if damage:
            raise DataError(f"{key}: this chunk is missing; {damage}")
        traffic.missing.add(key)

    if hasattr(ZarrStore, "get_ranges"):  # from zarr 3.3 on, shards are read by it
        get_ranges = ZarrStore.get_ranges  # through get(), not past it

    def list_dir(self, prefix: str):
        """The names under a prefix. A web server has none, and obstore would keep asking."""
        client = getattr(self._store, "store", None)
        if isinstance(client, HTTPStore):
            reason = "no consolidated metadata, and a web server cannot list a store"
            remedy = "run zarr.consolidate_metadata where the store can be written"
            raise DataError(f"{reason}; {remedy}")
        return super().list_dir(prefix)


def connect(location: Location) -> CountingStore:
    """A client of the store. It retries, ever more slowly, until `retry_timeout` is over."""
    if location.icechunk or location.snapshot:
        return connect_to_snapshot(location)
    url = location.url
    options = {}
    if "://" in url:
        options = client_options(location)
    else:
        url = Path(url).absolute().as_uri()
    store = ObjectStore(from_url(url, **options), read_only=True)
    return CountingStore(store, location.retry_timeout)


def connect_to_snapshot(location: Location) -> CountingStore:
    """A client of one version of an Icechunk repository."""
    from icechunk_store import open_snapshot  # imported only when asked for

    found = open_snapshot(location)
    store = CountingStore(found.store, location.retry_timeout)
    store.snapshot = found.id
    store.notes.append(found.note)
    return store


def open_store(location: Location) -> tuple[CountingStore, xr.Dataset]:
    """The store, and its variables as they are stored, none of their values read."""
    if not location.url:
        raise DataError("--store: not given; give a Zarr: a path, or a URL")
    try:
        store = connect(location)
        stored = xr.open_zarr(store, chunks=None, decode_cf=False)
    except FileNotFoundError as error:
        raise DataError(explain_absence(location)) from error
    except DataError:
        raise
    except Exception as error:  # obstore's, boto3's, Zarr's and xarray's share no base
        raise DataError(f"{first_line(error)}; {find_store_remedy(error)}") from error
    if not stored.data_vars:
        groups = sorted(zarr.open_group(store, mode="r").group_keys())
        listed = f"; give one of its groups: {', '.join(groups)}" if groups else ""
        raise DataError(f"no variable is there{listed}")
    return store, stored


def require_coordinates(store: CountingStore, dataset: xr.Dataset) -> None:
    """DataError if a chunk of a coordinate is missing, unless Zarr may have left it out."""
    for key in sorted(store.absent):
        name, *_, number = re.split("[/.]", key)
        if name not in dataset.indexes:
            continue
        coordinate = dataset[name]
        chunk = coordinate.encoding.get("preferred_chunks", {}).get(name, 0)
        if chunk == 1 and may_be_fill(coordinate, int(number)):
            continue
        reason = f"{key}: this chunk of a coordinate is missing"
        raise DataError(f"{reason}; copy it again, or write the coordinate anew")


class FieldReader:
    """Reads boxes of cells of some variables, and counts what it asks for.

    Each process opens the store for itself, at its first read: a client's threads and
    connections survive neither a fork nor a pickle.
    """

    def __init__(
        self,
        location: Location,
        variables: list[str],
        level: str | None = None,
        missing_chunks: str = "refuse",  # or "fill": they hold the array's fill value
    ):
        self.location = location
        self.variables = variables
        self.level = level
        self.missing_chunks = missing_chunks
        self.opening = Lock()
        self.store: CountingStore | None = None
        self.fields: xr.Dataset | None = None
        self.limits: dict[str, Limits | None] = {}
        self.times_per_chunk = 1
        self.notes: list[str] = []  # what a user should know of the store
        self.traffic = Traffic()

    def __getstate__(self) -> dict:
        names = ("location", "variables", "level", "missing_chunks")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def open(self) -> xr.Dataset:
        """The variables. The reads that open the store are not counted."""
        with self.opening:  # many threads may come at once
            if self.fields is None:
                self.store, stored = open_store(self.location)
                # So that what is sent to workers opens the same version.
                self.location = replace(self.location, snapshot=self.store.snapshot)
                self.prepare(self.store, stored)
        return self.fields

    def prepare(self, store: CountingStore, stored: xr.Dataset) -> None:
        """Find the variables, and what their values and their missing chunks mean."""
        names = self.variables
        choice = list_variables(stored)
        dataset = decode(stored, names)
        require_coordinates(store, select_present(dataset, names))
        self.times_per_chunk = count_times_per_chunk(dataset, names)
        notes = [*store.notes, explain_blocks(dataset, names, self.times_per_chunk)]
        if self.level is not None:
            dataset = select_level(dataset, names, self.level)
        fields = select_variables(dataset, names, choice)
        for name in names:
            self.limits[name] = find_limits(stored.variables[name])
            notes.append(explain_limits(name, stored.variables[name]))
            encoding = fields[name].encoding
            if "fill_value" not in encoding:  # of Zarr 2, where xarray may not say it
                array = zarr.open_group(store, mode="r")[name]
                encoding = encoding | {"fill_value": array.fill_value}
            rule = explain_missing(encoding, self.missing_chunks)
            store.rules[name] = rule
        notes.append(explain_bounds(stored, names))
        self.notes = [note for note in notes if note]
        self.fields = fields  # last: it says that the rest is there

    def counted_apart(self) -> "FieldReader":
        """A reader of the same open store that counts only what is read through it."""
        self.open()
        asked_for = (self.location, self.variables, self.level, self.missing_chunks)
        other = FieldReader(*asked_for)
        other.store = self.store
        other.fields = self.fields
        other.limits = self.limits
        other.times_per_chunk = self.times_per_chunk
        return other

    def read(self, name: str, box: dict) -> np.ndarray:
        """A variable in a box, (latitude, longitude), or (time, latitude, longitude).

        float32, also where packed values would give more, so that a store and its copy
        that is not packed train to the same weights.

        DataError says where reading or decoding failed.
        """
        fields = self.open()
        before = CURRENT_TRAFFIC.set(self.traffic)
        try:
            values = fields.variables[name].isel(box).load()
        except Exception as error:
            dates = np.atleast_1d(fields.time.values[box["time"]])
            when = str(dates[0])[:16]
            if len(dates) > 1:
                when = f"{len(dates)} times from {when} on"
            reason = f"{name} of {when}: {first_line(error)}"
            if not isinstance(error, DataError):
                reason += f"; {find_store_remedy(error)}"
            raise DataError(reason) from error
        finally:
            CURRENT_TRAFFIC.reset(before)
        dims = ("time", "latitude", "longitude")
        values = values.transpose(*dims, missing_dims="ignore").values
        limits = self.limits[name]
        values = limits.mask(values) if limits else values
        return values.astype("float32", copy=False)

    def read_at_once(self, boxes: list[dict]) -> np.ndarray:
        """All variables in each box, (boxes, variables, H, W), a thread for each read."""
        names = self.variables * len(boxes)
        repeated = [box for box in boxes for _ in self.variables]
        with ThreadPoolExecutor(READS_AT_ONCE) as threads:
            parts = list(threads.map(self.read, names, repeated))
        values = np.stack(parts)
        return values.reshape(len(boxes), len(self.variables), *values.shape[1:])

    def split_by_chunk(self, positions: np.ndarray) -> list[np.ndarray]:
        """Positions along time, chunk by chunk, as numbers from 0 to len(positions) - 1."""
        self.open()
        return split_by_chunk(positions, self.times_per_chunk)


class OneSnapshot(Callback):
    """Checks that all ranks have opened the same version of the store."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        snapshot = trainer.datamodule.hparams.snapshot
        if trainer.strategy.broadcast(snapshot) != snapshot:
            reason = "--icechunk: there was a commit while the ranks opened the store"
            raise DataError(f"{reason}; start again, or give --snapshot")


class RequestCounter(Callback):
    """Adds up what the training's batches cost, which each has in batch["traffic"]."""

    def __init__(self):
        self.total = torch.zeros(4, dtype=torch.int64)
        self.missing_chunks = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Where the batches are: to fetch each step's numbers would wait for the device.
        self.total = torch.zeros_like(self.total, device=module.device)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.total += batch["traffic"]

    def on_test_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Add up the missing chunks of training, validation and test, over all ranks."""
        missing = self.total[2] + len(trainer.datamodule.data.reader.traffic.missing)
        missing = missing.to(module.device)
        self.missing_chunks = int(trainer.strategy.reduce(missing, reduce_op="sum"))

    def per_sample(self) -> dict[str, float]:
        """Requests and bytes for each sample of this rank; nothing if it had none."""
        requests, size, _, samples = self.total.tolist()
        if not samples:
            return {}
        return {
            "requests_per_sample": requests / samples,
            "bytes_per_sample": size / samples,
        }
