"""The way to a store and back: what its GETs take, whatever is done with their bytes."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter

import numpy as np
import obstore
import zarr
from obstore.exceptions import PermissionDeniedError
from obstore.store import ObjectStore

from errors import DataError
from store import FieldReader

AT_ONCE = (1, 4, 16, 64, 128)
REPEATS = 5
LARGEST = 375_000  # bytes of a GET; of larger chunks, the first ones
SECONDS = 5  # in which first bytes are timed
NEARLY = 0.9  # of the most MB/s, for the least number at once


@dataclass(frozen=True)
class Part:
    """The first bytes of an object."""

    key: str
    length: int


@dataclass(frozen=True)
class Burst:
    """GETs that are sent together, and the seconds until the last one is there."""

    requests: int
    length: int  # bytes of each
    seconds: float

    @property
    def mb_per_second(self) -> float:
        """All their bytes in that time."""
        return self.requests * self.length / self.seconds / 1e6


@dataclass(frozen=True)
class Wire:
    """What was measured, and a line through it: start + requests and bytes times their own."""

    first_bytes: np.ndarray  # seconds
    bursts: list[Burst]  # of whole chunks, or LARGEST bytes
    start: float  # seconds
    per_request: float
    per_byte: float

    def seconds(self, requests: float, size: float) -> float:
        """What so many GETs of together `size` bytes take if all are sent at once."""
        return self.start + requests * self.per_request + size * self.per_byte

    @property
    def latency(self) -> float:
        """Seconds of waiting for a first byte: without what a GET costs client and server."""
        return max(0.0, float(np.median(self.first_bytes)) - self.per_request)

    @property
    def best_at_once(self) -> int:
        """The least number of GETs at once that reaches nearly the most MB/s."""
        most = max(burst.mb_per_second for burst in self.bursts)
        for burst in self.bursts:
            if burst.mb_per_second >= NEARLY * most:
                return burst.requests
        raise AssertionError("the most is nearly the most")


def measure_wire(client: ObjectStore, reader: FieldReader) -> Wire:
    """Time the GETs of a store's chunks. DataError if too few of them are there."""
    parts = list(find_chunks(client, reader, max(AT_ONCE)))
    first_bytes = time_first_bytes(client, parts)
    small = [time_burst(client, parts, number, 1) for number in AT_ONCE]
    whole = []
    for number in AT_ONCE:
        whole.append(time_burst(client, parts, number, LARGEST))
    return Wire(first_bytes, whole, *fit(small + whole))


def find_chunks(client: ObjectStore, reader: FieldReader, most: int) -> Iterator[Part]:
    """Chunks at random places of the variables: objects, or the first one in each shard.

    Their names are computed, because a listing of a large store takes hours.
    """
    rng = np.random.default_rng(0)
    group = zarr.open_group(reader.store, mode="r")
    arrays = [group[name] for name in reader.variables]
    found = 0
    for _ in range(4 * most):
        array = arrays[rng.integers(len(arrays))]
        key = choose_object(array, rng)
        size = find_size(client, key)
        if not size:
            continue
        chunks = prod(array.shards or array.chunks) // prod(array.chunks)
        yield Part(key, max(1, size // chunks))
        found += 1
        if found == most:
            return
    if found < most / 4:
        raise DataError(f"only {found} of {4 * most} chunks are there; nothing to time")


def choose_object(array: zarr.Array, rng: np.random.Generator) -> str:
    """The name of one of its objects, which may be missing."""
    cut = array.shards or array.chunks
    grid = [-(-size // length) for size, length in zip(array.shape, cut)]
    place = tuple(int(rng.integers(count)) for count in grid)
    return f"{array.path}/{array.metadata.encode_chunk_key(place)}"


def find_size(client: ObjectStore, key: str) -> int:
    """The bytes of an object; 0 if there is none.

    S3 forbids to look for an absent object if one may not list.
    """
    try:
        return obstore.head(client, key)["size"]
    except (FileNotFoundError, PermissionDeniedError):
        return 0


def time_first_bytes(client: ObjectStore, parts: list[Part]) -> np.ndarray:
    """Seconds to the first byte of each chunk, one after another, as many as time allows."""

    def time_one(part: Part) -> float:
        began = perf_counter()
        obstore.get_range(client, part.key, start=0, length=1)
        return perf_counter() - began

    time_one(parts[0])  # which connects
    seconds = []
    began = perf_counter()
    for part in parts:
        seconds.append(time_one(part))
        if perf_counter() - began > SECONDS:
            break
    return np.array(seconds)


def time_burst(client: ObjectStore, parts: list[Part], number: int, most: int) -> Burst:
    """So many GETs together, of at most so many bytes each; the median of some bursts."""

    async def read_all(chosen: list[Part]) -> list[int]:
        async def read(part: Part) -> int:
            length = min(part.length, most)
            content = await obstore.get_range_async(
                client, part.key, start=0, length=length
            )
            return len(content)

        return await asyncio.gather(*map(read, chosen))

    rng = np.random.default_rng(number)
    seconds = []
    sizes = []
    for _ in range(REPEATS):
        chosen = [parts[each] for each in rng.integers(len(parts), size=number)]
        began = perf_counter()
        sizes += asyncio.run(read_all(chosen))
        seconds.append(perf_counter() - began)
    return Burst(number, round(np.mean(sizes)), median(seconds))


def fit(bursts: list[Burst]) -> list[float]:
    """Seconds of the start, of a request and of a byte: least squares of relative errors."""
    terms = []
    for burst in bursts:
        terms.append([1, burst.requests, burst.requests * burst.length])
    seconds = np.array([burst.seconds for burst in bursts])
    weighted = np.array(terms) / seconds[:, None]
    scale = weighted.max(axis=0)
    found, *_ = np.linalg.lstsq(weighted / scale, np.ones(len(bursts)), rcond=None)
    return (found / scale).clip(0).tolist()
