"""How a store answers: the first byte, bandwidth, and what an epoch of it costs."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

from errors import DataError
from fields import Period
from location import Location
from preflight.findings import Finding
from prices import Prices
from store import CountingStore, FieldReader, connect

REQUESTS = 100  # of one byte
RETRY_TIMEOUT = 10  # seconds: a store that does not answer is found out soon
BUDGET = 10.0  # seconds for each kind of measurement
AT_ONCE = (64, 16, 4, 1)  # reads; the most first, in case that the time is over
LEAST_BLOCKS = 4  # to measure a rate
READ_TIMEOUT = 10.0  # seconds without a byte, after which store.py's client asks again
MEGA = 1e6
GIGA = 1e9


@dataclass(frozen=True)
class Rate:
    """How long it took to read some blocks, so many reads at once."""

    at_once: int
    blocks: int
    seconds: float
    requests: int
    bytes_read: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second, with the time to decode them."""
        return self.bytes_read / self.seconds


def measure_first_byte(location: Location, variable: str) -> list[float]:
    """The seconds of requests for one byte of random chunks, one after another."""
    store = connect(location)
    array = zarr.open_group(store, mode="r")[variable]
    size_of_object = array.shards or array.chunks
    grid = [math.ceil(n / size) for n, size in zip(array.shape, size_of_object)]
    places = np.random.default_rng(0).integers(grid, size=(REQUESTS, len(grid)))
    keys = [array.metadata.encode_chunk_key(tuple(place)) for place in places.tolist()]
    return asyncio.run(time_first_bytes(store, [f"{variable}/{key}" for key in keys]))


async def time_first_bytes(store: CountingStore, keys: list[str]) -> list[float]:
    """The seconds of requests for one byte of each, as far as BUDGET allows."""
    one_byte = RangeByteRequest(0, 1)
    prototype = default_buffer_prototype()
    seconds = []
    end = monotonic() + BUDGET
    for key in keys:
        began = perf_counter()
        try:
            await store.get(key, prototype, one_byte)  # None, too, is an answer
        except DataError as error:
            raise DataError(f"{error}; check the store") from error
        seconds.append(perf_counter() - began)
        if monotonic() > end:
            break
    return seconds


def judge_first_byte(seconds: list[float]) -> Finding:
    """Red if one answer in a hundred takes so long that requests will be repeated."""
    p50, p99 = np.quantile(seconds, [0.5, 0.99], method="higher")
    text = f"after {1e3 * p50:.1f} ms (median), {1e3 * p99:.1f} ms (99 in 100)"
    if p99 < READ_TIMEOUT / 2:
        return Finding("first byte", text)
    remedy = f"the client asks again after {READ_TIMEOUT:.0f} s: use a nearer bucket"
    return Finding("first byte", text, f"{remedy}, or fewer ranks at once")


def measure_rates(reader: FieldReader, period: Period, room: int) -> list[Rate]:
    """Read whole blocks, as the training does, by 64, 16, 4 and 1 threads in turn.

    The blocks are random, and none is read twice if there are enough. `room` is the
    memory, in bytes, for what is being read.
    """
    blocks = reader.split_by_chunk(period.positions)
    fitting = room // block_bytes(reader, blocks)
    order = np.random.default_rng(0).permutation(len(blocks))
    rates: list[Rate] = []
    read = 0
    end = monotonic() + BUDGET
    for at_once in AT_ONCE:
        if at_once > max(1, fitting):
            continue
        count = max(LEAST_BLOCKS, at_once)
        chosen = np.take(order, range(read, read + count), mode="wrap")
        read += count
        rates.append(measure_rate(reader, period, [blocks[n] for n in chosen], at_once))
        if monotonic() > end:
            break
    return sorted(rates, key=lambda rate: rate.at_once)


def block_bytes(reader: FieldReader, blocks: list[np.ndarray]) -> int:
    """The most that a variable takes in a block, decoded."""
    fields = reader.open()
    cells = fields.latitude.size * fields.longitude.size
    sizes = [fields[name].dtype.itemsize for name in reader.variables]
    return max(map(len, blocks)) * cells * max(sizes)


def measure_rate(
    reader: FieldReader, period: Period, blocks: list[np.ndarray], at_once: int
) -> Rate:
    """Read all variables of some blocks, with so many reads at once."""
    names, boxes = [], []
    for block in blocks:
        first = period.positions[block[0]]
        names += reader.variables
        times = slice(first, first + len(block))
        boxes += [{"time": times}] * len(reader.variables)
    before = reader.traffic.counts()
    began = perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        for values in threads.map(reader.read, names, boxes):
            del values
    seconds = perf_counter() - began
    requests, size, _ = np.subtract(reader.traffic.counts(), before)
    return Rate(at_once, len(blocks), seconds, int(requests), int(size))


def describe_rates(rates: list[Rate]) -> Finding:
    """The bandwidths, and the fewest reads at once that come near the best."""
    best = max(rate.bandwidth for rate in rates)
    enough = next(rate for rate in rates if rate.bandwidth > 0.9 * best)
    numbers = ", ".join(str(rate.at_once) for rate in rates)
    found = ", ".join(f"{rate.bandwidth / MEGA:.1f}" for rate in rates)
    text = f"{found} MB/s with {numbers} reads at once"
    return Finding("bandwidth", f"{text}: {enough.at_once} for 90% of the best")


def describe_epoch(
    rates: list[Rate], blocks: int, patches_per_block: int, prices: Prices
) -> Finding:
    """Requests, bytes and money of an epoch, in which each block is read once."""
    read = sum(rate.blocks for rate in rates)
    requests = blocks * sum(rate.requests for rate in rates) / read
    gigabytes = blocks * sum(rate.bytes_read for rate in rates) / read / GIGA
    gets = requests / 1000 * prices.bucket.thousand_gets
    egress = gigabytes * prices.bucket.gigabyte_to_internet
    text = f"{blocks * patches_per_block:,} patches by {requests:,.0f} requests of"
    text += f" {gigabytes:,.3g} GB: {prices.currency} {gets:.2g} for requests"
    return Finding("epoch", f"{text}, and {egress:.2g} more if they leave the cloud")


def check_store(
    reader: FieldReader,
    period: Period,
    patches_per_block: int,
    prices: Prices,
    room: int,
    rates: list[Rate],
) -> Iterator[Finding]:
    """The checks of a store that opens. What is measured is put into `rates`.

    `room` is as in measure_rates.
    """
    yield judge_first_byte(measure_first_byte(reader.location, reader.variables[0]))
    rates += measure_rates(reader, period, room)
    yield describe_rates(rates)
    blocks = len(reader.split_by_chunk(period.positions))
    yield describe_epoch(rates, blocks, patches_per_block, prices)
