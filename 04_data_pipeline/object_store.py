"""Chapter 4: open a store wherever it lies, read it as if the network never failed, know what it costs.

    uv run python object_store.py ../03_cloud_data/outputs/buckets/winds/small.zarr    # what it holds, what a patch costs
    uv run python object_store.py s3://bucket/winds.zarr --anonymous

loader.py imports this file; copy both. A store is a folder of Zarr, or a URL (s3://, gs://, https://), or a
NetCDF file, or what make_references.py writes: a .json of references, an .icechunk repository. Between Zarr
and the bytes stands `SteadyStore`: it retries, gives up in bounded time, keeps a cache on disk, counts, and
never lets a missing object pass for data.
"""

import argparse
import asyncio
import atexit
import fcntl
import hashlib
import math
import os
import random
import re
import shutil
import sys
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from time import perf_counter

import numpy as np
import xarray as xr
import zarr
from botocore.exceptions import BotoCoreError
from obstore import head_async
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import HTTPStore, from_url
from tqdm import tqdm
from zarr.abc.codec import SupportsSyncCodec
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer, default_buffer_prototype
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.sync import loop, sync
from zarr.registry import register_pipeline
from zarr.storage import FsspecStore, LocalStore, ObjectStore, WrapperStore

METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")  # Zarr asks for all; few are there
REFUSALS = (PermissionDeniedError, UnauthenticatedError, InvalidPathError, PermissionError, IsADirectoryError)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts, at most; by chance, anything below
TELL_AFTER = 4  # attempts, that somebody who watches may know
LITTLE = 2**18  # cells that are decoded in about a millisecond
WHOLE = RangeByteRequest(0, 2**40)  # of a range obstore gives all at once; else the head, then the body
# What obstore says if a server answers a range by the whole object or by less, and if an object is empty.
NO_RANGE = "non-partial response|(?i:content.range)|Requested .* got "
EMPTY = "(?i:invalid ?range|range not satisf)"
FIRST_SHARE = 1 / 6  # of --read-deadline, that the first attempt may take; each further one twice as long

DIMS = {"time": "time", "lat": "latitude", "lon": "longitude"}  # names that stores have, and those used here
STATISTICS_TIMES = 360  # that mean, standard deviation and climatology are taken from, or all if fewer

NO_DATES = "its times are not dates of the usual calendar; mend their units or calendar"

obstore_user = None  # the process in which obstore was first used: its threads do not survive a fork


class OneLine(Exception):
    """An error that stays one line when a DataLoader's worker hands it on: torch makes it a traceback."""

    def __str__(self) -> str:
        return re.sub(r"^\w+\.\w+Error: ", "", super().__str__().rstrip().rpartition("\n")[2])


class InputError(OneLine):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


class StoreError(OneLine, OSError):
    """The store cannot be read, or does not hold what it should: one line, which names the object."""


def without_secrets(text: str) -> str:
    """A text whose URLs may be printed: without users, passwords and signatures."""
    return re.sub(r"(?<=://)[^/\s]*@|\?\S*", "", text)


def reason_of(error: Exception) -> str:
    """What went wrong in one line; of the XML that S3 answers, its code and message."""
    if told := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", str(error), re.DOTALL):
        return ": ".join(told.groups())
    text, _, _ = f"{type(error).__name__}: {error}".partition("Debug source:")  # a password by itself, too
    return without_secrets(" ".join(text.split()))[:300]


@dataclass(frozen=True)
class Access:
    """All that it takes to open a store, small enough to be sent to every worker.

    Credentials stay in the environment; those that a URL itself contains are in `url`, and not in `name`.
    """

    url: str
    client: str = "obstore"
    anonymous: bool = False
    snapshot: str | None = None  # of an Icechunk repository; None: the latest
    threads: int = 1  # that decode, for each process: all of them together should be the machine's cores
    max_requests: int = 64  # in flight, for each process
    deadline: float = 60.0  # seconds for one object, all attempts together
    cache: str | None = None  # folder
    cache_gb: float = 1.0

    version: str | None = None  # which the process that opened the store first has found

    @property
    def name(self) -> str:
        """The URL as it may be printed."""
        return without_secrets(self.url)

    @property
    def netcdf(self) -> bool:
        return self.url.endswith((".nc", ".nc4", ".cdf"))


# ------------------------------------------------------------------------------------- from a URL to bytes


def unsigned(anonymous: bool) -> bool:
    """Whether requests go unsigned, to a public bucket: asked for here, or in the environment."""
    return anonymous or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true"


def open_bytes(access: Access) -> Store:
    """Zarr's view of a folder or a bucket, read-only, without anything of our own."""
    global obstore_user
    if access.url.endswith(".json"):
        from make_references import open_references  # heavy, and only who reads references needs it

        return open_references(access.url, access.anonymous)
    if "://" not in access.url:
        return LocalStore(access.url, read_only=True)
    if access.client == "fsspec" or obstore_user not in (None, os.getpid()):
        # In the child of a process that has used obstore, a read would wait for ever. fsspec starts anew.
        return open_fsspec(access)
    obstore_user = os.getpid()
    options = {"client_options": {"allow_http": True, "timeout": timedelta(seconds=access.deadline)}}
    options["retry_config"] = {"max_retries": 0}  # SteadyStore does that, and counts
    if access.url.startswith("http"):
        return ObjectStore(HTTPStore.from_url(access.url, **options), read_only=True)
    if unsigned(access.anonymous):
        options["skip_signature"] = True
    elif access.url.startswith("s3://"):
        # From the environment, a profile, or the machine; boto3 renews what expires, so ask it every time.
        try:
            options["credential_provider"] = Boto3CredentialProvider(ttl=timedelta(0))
        except (ValueError, BotoCoreError) as error:
            reason = "no credentials in the environment, a profile or the machine"
            raise InputError(f"--store {access.name}: {reason}; for a public bucket, --anonymous") from error
    return ObjectStore(from_url(access.url, **options), read_only=True)


def open_fsspec(access: Access) -> FsspecStore:
    options = {"anon": unsigned(access.anonymous)} if access.url.startswith("s3://") else {}
    try:
        store = FsspecStore.from_url(access.url, options | {"skip_instance_cache": True}, read_only=True)
    except ImportError as error:
        remedy = "--start-method forkserver" if access.client == "obstore" else "--client obstore"
        raise InputError(f"--store {access.name}: {error}; or give {remedy}") from error

    async def close() -> None:
        await (await store.fs.set_session()).close()

    if hasattr(store.fs, "set_session"):  # gcsfs has none
        atexit.register(lambda: sync(close()))  # else aiohttp complains when the program ends
    return store


def call_off_reads() -> None:
    """At the end of the program: reads that nobody waits for any more would each complain in many lines."""

    async def call_off() -> None:
        if reads := asyncio.all_tasks() - {asyncio.current_task()}:
            for read in reads:
                read.cancel()
            await asyncio.wait(reads, timeout=1)

    if loop[0]:  # something was read
        sync(call_off())


atexit.register(call_off_reads)


class SteadyStore(WrapperStore):
    """Reads that are retried until a deadline, limited in flight, cached, counted, and never invented."""

    def __init__(self, store: Store, access: Access, cache: "DiskCache | None" = None):
        super().__init__(store)
        self.access, self.cache = access, cache
        bucket = isinstance(store, ObjectStore) and not isinstance(store.store, HTTPStore)
        self.whole = WHOLE if bucket else None  # a web server may know no ranges
        self.slots = asyncio.Semaphore(access.max_requests)
        self.log = deque(maxlen=100_000)  # (seconds, bytes, attempts, from the cache)
        self.refusals = {}  # why metadata could not be read, by key

    @property
    def refused_array(self) -> str | None:
        """Why an array's metadata could not be read, if so: Zarr leaves the array out in silence."""
        return next((reason for key, reason in self.refusals.items() if "/" in key), None)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read an object or a part of one; None only for metadata that Zarr looks for in vain."""
        metadata = key.endswith(METADATA)
        name = f"{key} {byte_range}"
        if self.cache and not metadata:
            if (found := await asyncio.to_thread(self.cache.get, name)) is not None:
                self.log.append((0.0, len(found), 0, True))
                return prototype.buffer.from_bytes(found)
        async with self.slots:
            began = perf_counter()
            value, attempts = await self.attempt(key, lambda: self.ask(key, prototype, byte_range))
        if value is None and not metadata:
            reason = "no such object, and a missing chunk is not data; write it anew"
            raise StoreError(f"{self.access.name}/{key}: {reason}")
        if not metadata:
            self.log.append((perf_counter() - began, len(value), attempts, False))
            if self.cache:
                await asyncio.to_thread(self.cache.put, name, value.to_bytes())
        return value

    async def ask(self, key: str, prototype: BufferPrototype, part: ByteRequest | None) -> Buffer | None:
        """Read once; too few bytes are an error, which Zarr would take for an empty chunk."""
        if part is None and self.whole:
            try:
                return await self._store.get(key, prototype, self.whole)
            except Exception as error:
                if re.search(NO_RANGE, str(error)):
                    self.whole = None
                elif not re.search(EMPTY, str(error)):
                    raise
        value = await self._store.get(key, prototype, part)
        if value is not None and isinstance(part, RangeByteRequest) and len(value) != part.end - part.start:
            raise ConnectionError(f"{len(value)} bytes of {part.end - part.start}")
        return value

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def names() -> list[str]:
            return [name async for name in self._store.list_dir(prefix)]

        for name in (await self.attempt(prefix, names))[0] or []:
            yield name

    async def get_partial_values(self, prototype: BufferPrototype, key_ranges) -> list[Buffer | None]:
        """Read parts of objects, each as carefully as a whole one: the wrapped store's own would not be."""
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def attempt(self, key: str, ask: Callable[[], Awaitable]) -> tuple[object, int]:
        """Ask again after an error, at moments that no other client shares, until the deadline.

        An attempt that stalls is given up, each later than the one before: a slow line is no stall.
        """
        end, reason = perf_counter() + self.access.deadline, ""
        for attempt in count(1):
            growth = 2 ** min(attempt - 1, 10)
            try:
                share = growth * FIRST_SHARE * self.access.deadline
                async with asyncio.timeout(min(share, end - perf_counter())):
                    return await ask(), attempt
            except FileNotFoundError:  # a folder that is not there
                return None, attempt
            except Exception as error:
                if not reason or not isinstance(error, TimeoutError):
                    reason = reason_of(error)
                pause = random.uniform(0, min(LONGEST_PAUSE, 2 * growth * FIRST_PAUSE))
                expired = "ExpiredToken" in f"{error} {error.__cause__}"  # s3fs tells the code in the cause
                refused = isinstance(error, REFUSALS) and not expired
                if refused and key.endswith(METADATA):
                    # Who may not list a bucket is refused what is not there, and Zarr looks for much.
                    self.refusals[key] = f"{self.access.name}/{key}: {reason}"
                    return None, attempt
                if refused or expired or perf_counter() + pause > end:
                    tried = f"after {attempt} attempt{'s' * (attempt > 1)}"
                    raise StoreError(f"{self.access.name}/{key}: not read {tried}: {reason}") from error
            if attempt == TELL_AFTER:
                print(f"{self.access.name}/{key}: still trying: {reason}", file=sys.stderr)
            await asyncio.sleep(pause)

    def take_log(self) -> np.ndarray:
        """What was read since the last call: (requests, 4), seconds, bytes, attempts, 1 if from the cache."""
        taken = [self.log.popleft() for _ in range(len(self.log))]
        return np.array(taken, "float64").reshape(-1, 4)


# --------------------------------------------------------------------------------------------- the cache


@contextmanager
def locked(path: Path) -> Iterator:
    """Hold a file alone among all processes of this machine; the system lets go when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class DiskCache:
    """Objects of one version of one store in a folder that any number of processes may share.

    What is in stays in, and when it is full nothing more goes in. To evict the oldest would be worse here: an
    epoch visits everything once, so a cache smaller than the epoch would throw out each object before its
    turn comes again. Another version of the store empties the folder.
    """

    def __init__(self, access: Access, version: str):
        name = f"{access.url} {access.snapshot}"
        folder = Path(access.cache, hashlib.sha256(name.encode()).hexdigest()[:16])
        self.folder, self.limit, self.total = folder / version, access.cache_gb * 1e9, folder / "bytes"
        self.full = False
        with locked(self.total) as total:
            for old in set(folder.iterdir()) - {self.folder, self.total}:
                shutil.rmtree(old, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            # A kill may have left part of a file, or one that is not counted.
            for part in self.folder.glob("*.part"):
                part.unlink()
            self.write_total(total, sum(entry.stat().st_size for entry in os.scandir(self.folder)))

    def path(self, name: str) -> Path:
        return self.folder / hashlib.sha256(name.encode()).hexdigest()

    def get(self, name: str) -> bytes | None:
        with suppress(OSError):
            return self.path(name).read_bytes()
        return None

    def put(self, name: str, value: bytes) -> None:
        """Keep the object if there is room; a cache that cannot be written to is no reason to stop."""
        if self.full:  # what no longer goes in need not wait for the lock
            return
        with suppress(OSError), locked(self.total) as total:
            total.seek(0)
            taken = int(total.read() or 0) + len(value)
            self.full = taken > self.limit
            if self.full or self.path(name).exists():
                return
            aside = self.path(name).with_suffix(".part")
            try:
                aside.write_bytes(value)
                os.replace(aside, self.path(name))  # whole, or not there
            except OSError:  # such as a full disk
                aside.unlink(missing_ok=True)
                raise
            self.write_total(total, taken)

    @staticmethod
    def write_total(total, taken: int) -> None:
        total.truncate(0)
        total.write(str(taken))
        total.flush()


# ---------------------------------------------------------------------------------- from bytes to a dataset


class OneTurn(BatchedCodecPipeline):
    """Zarr's way from bytes to arrays, with one thread's turn for all chunks of a read and all their codecs.

    Zarr's own gives every codec of every chunk a task, and each chunk a thread's turn: of small chunks, that
    takes more time than decoding them does. A little is decoded at once, where it is.
    """

    async def decode_batch(self, chunk_bytes_and_specs: Iterable[tuple]) -> Iterable[NDBuffer | None]:
        pairs = list(chunk_bytes_and_specs)
        if not all(isinstance(codec, SupportsSyncCodec) for codec in self):
            return await super().decode_batch(pairs)
        if sum(math.prod(spec.shape) for _, spec in pairs) <= LITTLE:
            return self.decode_here(pairs)
        return await asyncio.to_thread(self.decode_here, pairs)

    def decode_here(self, pairs: list[tuple[Buffer | None, ArraySpec]]) -> list[NDBuffer | None]:
        chunks, specs = zip(*pairs)
        from_arrays, to_bytes, from_bytes = self._codecs_with_resolved_metadata_batched(specs)
        for codec, specs in [*from_bytes[::-1], to_bytes, *from_arrays[::-1]]:
            pairs = zip(chunks, specs)
            chunks = [None if chunk is None else codec._decode_sync(chunk, spec) for chunk, spec in pairs]
        return chunks


register_pipeline(OneTurn)
DECODING = {"codec_pipeline.path": f"{__name__}.OneTurn", "codec_pipeline.batch_size": 64}  # chunks at most
DECODING |= {"async.concurrency": 1024}  # not Zarr's ten of a read's chunks: SteadyStore limits requests


def open_dataset(access: Access) -> tuple[xr.Dataset, str, SteadyStore | None]:
    """Open a store lazily: only metadata and coordinates are read.

    Returns the dataset, its version (a checksum of its metadata, which for a store of make_store.py holds a
    checksum of every value), and the store that counts; None for NetCDF, which is read through HDF5.
    Raises InputError, with the remedy, if there is no such store.
    """
    zarr.config.set(
        {"threading.max_workers": access.threads} | DECODING
    )  # else as many as cores, in each process
    if access.netcdf:
        if "://" in access.url:
            reason = "NetCDF is read from a disk only; refer to it with make_references.py, or copy it"
            raise InputError(f"--store {access.name}: {reason}")
        if not Path(access.url).is_file():
            raise InputError(f"--store {access.url}: no such file")
        try:
            status = os.stat(access.url)
            version = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
            return open_lazily(access.url, access), version, None
        except InputError:
            raise
        except Exception as error:  # of any kind, and over several lines
            raise InputError(f"--store {access.url}: not a whole NetCDF file; copy it anew") from error
    try:
        if access.url.endswith(".icechunk"):
            from make_references import open_icechunk

            opened, version = open_icechunk(access.url, access.version or access.snapshot, access.anonymous)
            store = SteadyStore(opened, access)
        else:
            store = SteadyStore(open_bytes(access), access)
            version = version_of(store)
        if access.version not in (None, version):
            raise StoreError(f"--store {access.name}: it has changed since this run began; start again")
        if access.cache:
            try:
                store.cache = DiskCache(access, version)
            except OSError as error:
                reason = f"cannot be written to ({error.strerror}); make room or give another folder"
                raise InputError(f"--cache-dir {access.cache}: {reason}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that metadata is not consolidated
            return open_lazily(store, access, engine="zarr"), version, store
    except (InputError, StoreError):
        raise
    except Exception as error:  # of a dozen kinds, by client and format
        reason = f"cannot be opened: {reason_of(error)}"
        remedy = "give a Zarr store, NetCDF, or what make_references.py writes"
        raise InputError(f"--store {access.name}: {reason}; {remedy}") from error


def open_lazily(source: str | Store, access: Access, **options) -> xr.Dataset:
    """Let xarray open a dataset; InputError if it cannot read the calendar or the unit of the times."""
    try:
        return xr.open_dataset(source, chunks=None, cache=False, **options)
    except ValueError as error:
        if "decode time" not in str(error):
            raise
        raise InputError(f"--store {access.name}: {NO_DATES}") from error


def version_of(store: SteadyStore) -> str:
    """A checksum of the root's metadata and of when it was written; InputError if there is none.

    Of a file of references, a checksum of the file.
    """
    if store.access.url.endswith(".json"):
        return hashlib.sha256(Path(store.access.url).read_bytes()).hexdigest()[:16]
    found, prototype = hashlib.sha256(), default_buffer_prototype()
    for name in ("zarr.json", ".zmetadata", ".zattrs", ".zgroup"):
        if (part := sync(store.get(name, prototype))) is not None:
            written, _ = sync(store.attempt(name, lambda name=name: time_written(store._store, name)))
            found.update(part.to_bytes() + str(written).encode())
            return found.hexdigest()[:16]
    if store.refusals:
        raise StoreError(next(iter(store.refusals.values())))
    raise InputError(f"--store {store.access.name}: no Zarr store there; {neighbours(store.access)}")


async def time_written(store: Store, key: str) -> int:
    """When an object was written, in whole seconds since 1970, whichever client tells."""
    if isinstance(store, LocalStore):
        return int((store.root / key).stat().st_mtime)
    if isinstance(store, ObjectStore):
        return int((await head_async(store.store, key))["last_modified"].timestamp())
    told = await store.fs._info(f"{store.path}/{key}")
    if "Last-Modified" in told:  # a web server's header, as text
        return int(parsedate_to_datetime(told["Last-Modified"]).timestamp())
    return int(told["LastModified"].timestamp()) if "LastModified" in told else 0


def neighbours(access: Access) -> str:
    """What lies where a store is not, or beside it, as far as that can be listed."""
    parent = str(Path(access.url).parent)
    if "://" in access.url:
        parent = access.url.rstrip("/").rpartition("/")[0]
    for place in (replace(access, url=url) for url in (access.url, parent)):
        try:
            names = sync(list_names(place))
        except Exception as error:
            return f"nor can {place.name} be listed: {reason_of(error)}"
        if names:
            return f"{place.name} holds {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    return f"nor is anything in {place.name}"


async def list_names(access: Access) -> list[str]:
    if "://" not in access.url:
        return sorted(os.listdir(access.url)) if Path(access.url).is_dir() else []
    async with asyncio.timeout(FIRST_SHARE * access.deadline):
        return sorted([name async for name in open_bytes(access).list_dir("")])


# ------------------------------------------------------------------------------- from a dataset to the winds


class Winds:
    """A store's wind in some years, as (time, component, latitude, longitude), float32, m/s, read as needed.

    Latitude runs from south to north and longitude from 0 to 360, whatever the store's order, direction and
    names of dimensions. Handles, threads and event loops survive neither a fork nor a pickle, so every
    process that reads opens the store for itself.
    """

    def __init__(self, access: Access, variables: list[str], years: slice):
        """Raise InputError if the store lacks a variable or the years, StoreError if it cannot be read."""
        self.access, self.variables, self.years, self.opened_by = access, variables, years, None
        self.open()
        latitude, longitude, self.times = (
            self.dataset.indexes[name].to_numpy() for name in ("latitude", "longitude", "time")
        )
        # Where the store has them.
        self.rows, self.columns = np.argsort(latitude), np.argsort(longitude % 360)
        self.latitude, self.longitude = latitude[self.rows], longitude[self.columns] % 360
        gaps = np.diff(self.longitude, append=self.longitude[0] + 360)
        if min(gaps.min(), np.diff(self.latitude).min()) <= 0:
            raise InputError(f"--store {access.name}: a latitude or a longitude stands twice; keep one")
        if gaps.max() > 1.5 * np.median(gaps):  # a region: its columns begin after the widest gap
            first = int(gaps.argmax()) + 1
            self.columns, self.longitude = np.roll(self.columns, -first), np.roll(self.longitude, -first)
            self.longitude[len(gaps) - first :] += 360

    def open(self) -> None:
        """Open the store, unless this process has: only metadata and coordinates are read."""
        if self.opened_by == os.getpid():
            return
        dataset, self.version, self.store = open_dataset(self.access)
        dataset = dataset.rename({short: DIMS[short] for short in DIMS if short in dataset.dims})
        check_dataset(dataset, self.access, self.variables, self.store and self.store.refused_array)
        self.access = replace(self.access, version=self.version)  # no other process may open another
        self.dataset, self.opened_by = dataset[self.variables].sel(time=self.years), os.getpid()
        self.first_time = (
            dataset.indexes["time"].slice_indexer(self.years.start).start
        )  # of them, in the store
        if not self.dataset.sizes["time"]:
            ends = (0, -1) if dataset.sizes["time"] else ()
            held = [str(dataset.indexes["time"][end])[:10] for end in ends]
            needed = f"must hold times of {self.years.start} to {self.years.stop}"
            found = " to ".join(held) or "no time"
            raise InputError(f"--store {self.access.name}: {needed}; it holds {found}")
        self.take_log()  # no batch has asked for that

    def __getstate__(self) -> dict:
        return self.__dict__ | {"opened_by": None, "dataset": None, "store": None}

    def take_log(self) -> np.ndarray:
        """What was asked of the store since the last call, see SteadyStore.take_log; nothing of NetCDF."""
        return self.store.take_log() if self.store else np.zeros((0, 4))

    def read(self, boxes: list[tuple]) -> np.ndarray:
        """Read boxes (time, rows, columns) of equal shape, all at once: (box, component, row, column)."""
        self.open()

        async def read_all() -> list[np.ndarray]:
            reads = [asyncio.ensure_future(self.read_box(*box)) for box in boxes]
            try:
                return await asyncio.gather(*reads)
            finally:  # if one has failed, the others need not go on
                for read in reads:
                    read.cancel()

        values = np.stack(sync(read_all()))  # in Zarr's own event loop
        if bad := [time for (time, *_), box in zip(boxes, values) if not np.isfinite(box).all()]:
            when = str(self.times[bad[0]])[:13]
            raise StoreError(f"--store {self.access.name}: NaN or infinity at {when}; mend it")
        return values

    def chunk_numbers(self) -> list[np.ndarray]:
        """In which chunk of the store, counted along each dimension, a time, a row and a column lie.

        A variable that is not cut, as in some NetCDF files, counts as cut into maps.
        """
        variable = self.dataset[self.variables[0]]
        sizes = variable.encoding.get("chunks") or variable.encoding.get("chunksizes")
        size = dict(zip(variable.dims, sizes or variable.shape)) | ({} if sizes else {"time": 1})
        time = self.first_time + np.arange(len(self.times))
        return [time // size["time"], self.rows // size["latitude"], self.columns // size["longitude"]]

    async def read_box(self, time: int | slice, rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
        """Read one box, in pieces that are whole in the store: two, if it crosses the store's seam.

        Of each component (row, column) of one time, or (time, row, column) of several; if it is one piece, as
        Zarr made it, without another copy.
        """
        rows, columns = self.rows[rows], self.columns[columns]
        runs = np.split(columns, np.flatnonzero(np.abs(np.diff(columns)) != 1) + 1)
        pieces = await asyncio.gather(*(self.read_piece(time, rows, run) for run in runs))
        return [np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0] for parts in zip(*pieces)]

    async def read_piece(self, time: int | slice, rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
        first_row, first_column = rows.min(), columns.min()
        box = {"time": time, "latitude": slice(first_row, rows.max() + 1)}
        box["longitude"] = slice(first_column, columns.max() + 1)
        # Without coordinates, which nobody needs here and which take longer to cut than all the rest.
        pieces = [self.dataset[name].variable.isel(box) for name in self.variables]
        try:
            if self.store:
                await asyncio.gather(*(piece.load_async() for piece in pieces))
            else:
                [piece.load() for piece in pieces]  # HDF5 reads one thing at a time
        except (RuntimeError, ValueError) as error:  # of a codec
            reason = f"damaged at {str(np.ravel(self.times[time])[0])[:13]}: {reason_of(error)}"
            raise StoreError(f"--store {self.access.name}: {reason}") from error
        y, x = in_order(rows - first_row), in_order(columns - first_column)
        values = [piece.transpose(..., "latitude", "longitude").values for piece in pieces]
        return [value[..., y, :][..., x].astype("float32", copy=False) for value in values]


def in_order(index: np.ndarray) -> slice | np.ndarray:
    """The same elements as a slice, which copies nothing, if they are a whole axis in either direction."""
    for whole in (slice(None), slice(None, None, -1)):
        if np.array_equal(np.arange(len(index))[whole], index):
            return whole
    return index


def check_dataset(dataset: xr.Dataset, access: Access, variables: list[str], refused: str | None) -> None:
    """Raise InputError unless the variables can be read by name, in order, and without invented values.

    `refused` says why an array's metadata could not be read: what is missing may be there.
    """
    store, dims = f"--store {access.name}", set(DIMS.values())
    if "settings" in dataset.attrs and "identity" not in dataset.attrs:  # make_store.py was stopped
        raise InputError(f"{store}: not finished; run the make_store.py command that began it once more")
    usable = [name for name in dataset.data_vars if set(dataset[name].dims) == dims]
    if unusable := [name for name in variables if name not in usable]:
        names = ", ".join(usable) or f"none: it has no variable over {', '.join(sorted(dims))}"
        remedy = refused or f"choose from {names}"
        raise InputError(f"--variables {unusable[0]}: not in {access.name}; {remedy}")
    if missing := sorted(dims - dataset.indexes.keys()):
        raise InputError(f"{store}: {missing[0]} has no coordinates; {refused or 'add them'}")
    times = dataset.indexes["time"]
    if times.dtype.kind != "M":
        raise InputError(f"{store}: {NO_DATES}")
    if not (times.is_monotonic_increasing and times.is_unique):
        raise InputError(f"{store}: its times are not in order, or one stands twice; sort them, each once")
    for name in variables:
        encoding = dataset[name].encoding
        if encoding.get("shards") and np.isfinite(fill := encoding.get("fill_value", np.nan)):
            reason = f"a chunk that is missing from a shard of {name} would be {fill}, and pass for data"
            raise InputError(f"{store}: {reason}; write it with the fill value NaN")


def statistics(winds: Winds, folder: Path) -> dict[str, np.ndarray]:
    """Mean and standard deviation (component, 1, 1) and climatology (month, component, latitude, longitude).

    In m/s, from STATISTICS_TIMES times, evenly spread; computed once for each version of a store, and kept in
    `folder`.
    """
    parts = (winds.access.name, winds.version, winds.variables, winds.years, STATISTICS_TIMES)
    name = hashlib.sha256(repr(parts).encode() + winds.longitude.tobytes() + winds.latitude.tobytes())
    path = folder / f"{name.hexdigest()[:16]}.npz"
    with locked(path.with_suffix(".lock")):  # other ranks wait for the first
        if not path.exists():
            found = compute_statistics(winds)
            aside = path.with_name(f"part-{path.name}")
            np.savez(aside, **found)
            os.replace(aside, path)
    winds.take_log()  # no batch has asked for that
    with np.load(path) as found:
        return dict(found)


def compute_statistics(winds: Winds) -> dict[str, np.ndarray]:
    every = [np.arange(len(winds.latitude)), np.arange(len(winds.longitude))]
    times = np.unique(np.linspace(0, len(winds.times) - 1, STATISTICS_TIMES).astype(int))
    months = winds.times.astype("datetime64[M]").astype(int) % 12
    components = len(winds.variables)
    sums, squares = np.zeros((12, components, *map(len, every))), np.zeros(components)
    counts = np.zeros(12)
    eights = np.array_split(times, -(-len(times) // 8))
    for some in tqdm(eights, "statistics of the training years", leave=False):
        for time, field in zip(some, winds.read([(time, *every) for time in some])):
            sums[months[time]] += field
            counts[months[time]] += 1
            squares += np.square(field, dtype="float64").mean(axis=(1, 2))
    mean = (sums.sum(axis=0) / len(times)).mean(axis=(1, 2))
    std = np.sqrt(squares / len(times) - mean**2)
    found = {"mean": mean[:, None, None], "std": std[:, None, None]}
    counts = counts[:, None, None, None]
    found["climatology"] = np.where(counts, sums / np.maximum(counts, 1), sums.sum(axis=0) / len(times))
    return {name: value.astype("float32") for name, value in found.items()}


# ------------------------------------------------------------------------------------------------- look


def look(access: Access, patch_size: int) -> None:
    """Print what a store holds and how it is cut, then read patches from it and print what that took."""
    began = perf_counter()
    dataset, version, store = open_dataset(access)
    print(f"{access.name}: version {version}, opened in {perf_counter() - began:.2f} s")
    for name, variable in dataset.variables.items():
        cut = {key: variable.encoding.get(key) for key in ("chunks", "shards", "compressors")}
        cut["chunks"] = cut["chunks"] or variable.encoding.get("chunksizes")
        told = ", ".join(f"{key} {value}" for key, value in cut.items() if value)
        print(f"  {name} ({', '.join(map(str, variable.dims))}) {variable.shape} {variable.dtype}: {told}")
    maps = [name for name in dataset.data_vars if dataset[name].ndim == 3]
    if not maps or store is None:
        return
    chance, array = random.Random(0), dataset[maps[0]]

    async def read(patches: list[xr.DataArray]) -> None:
        await asyncio.gather(*(patch.load_async() for patch in patches))

    def patch() -> xr.DataArray:
        first = {dim: chance.randrange(max(1, size - patch_size + 1)) for dim, size in array.sizes.items()}
        cells = dict.fromkeys(first, patch_size) | {"time": 1}
        return array.isel({dim: slice(start, start + cells[dim]) for dim, start in first.items()})

    for title, batches in {
        "one after another": [[patch()] for _ in range(8)],
        "all at once": [[patch() for _ in range(8)]],
    }.items():
        store.take_log()
        began = perf_counter()
        for batch in batches:
            sync(read(batch))
        seconds, log = perf_counter() - began, store.take_log()
        requests = f"{len(log)} requests of {1e3 * np.median(log[:, 0]):.0f} ms"
        used = sum(one.nbytes for batch in batches for one in batch)  # a map may be smaller than a patch
        amplification = f"{log[:, 1].sum() / used:.1f} bytes read for each used"
        print(f"8 patches of {maps[0]}, {title}: {1e3 * seconds:.0f} ms, {requests}, {amplification}")


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("store", nargs="+", help="URL or path")
    parser.add_argument("--client", choices=("obstore", "fsspec"), default="obstore")
    parser.add_argument("--anonymous", action="store_true", help="read a public bucket, without credentials")
    parser.add_argument("--patch-size", type=int, default=64, help="cells along a side of a patch")
    args = parser.parse_args(argv)
    if args.patch_size < 1:
        raise InputError(f"--patch-size {args.patch_size}: too small; give at least 1")
    for url in args.store:
        look(Access(url, args.client, args.anonymous), args.patch_size)


if __name__ == "__main__":
    import object_store  # as make_references.py does: an error of its classes is none of this file's own

    try:
        object_store.main()
    except (object_store.InputError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
