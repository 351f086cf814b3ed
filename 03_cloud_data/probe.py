"""Chapter 3: what a store gives a reader of patches from here, and which chunks would suit it.

    uv run python probe.py                                   # the small store of train.py
    uv run python probe.py --store s3://bucket/winds.zarr    # or gs://, https://
    uv run python probe.py --store ... --egress-price 0.09   # it is read from elsewhere

It times GETs of one byte and of whole chunks, alone and many at once, cuts two maps
into chunks of other shapes, in memory, and reads batches out of them. You should see the
latency, how many reads at once are worth it, what the store and an epoch of it cost in
dollars, and which chunks would be the fastest and the cheapest. It reads less than 500 MB.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from botocore.exceptions import BotoCoreError
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from arguments import add_options, option
from command_line import call_at, make_location
from ending import run
from errors import DataError, first_line, print_note, program, refuse
from location import Location, client_options
from options import PATCH_SIZE, VARIABLES, StoreOptions
from probing.replay import Replay, draw_boxes, replay
from probing.upkeep import Upkeep, count_objects, find_upkeep
from probing.wire import Wire, measure_wire
from store import FieldReader
from store_checks import check_secrets, check_server, check_store
from store_remedies import find_store_remedy

BATCHES = 3  # that are read out of the store as it is
NEARLY = 0.9  # of the most samples/s
MILLION = 1_000_000
UNEVEN = 3  # p99 of first bytes, over their median


@dataclass(frozen=True)
class ReadingOptions:
    """What is read."""

    variables: list[str] = option(VARIABLES, "any number of the store's")
    level: str | None = option(None, "value of a further dimension: 850, 6h")
    patch_size: int = option(PATCH_SIZE, "cells along its side", least=16)
    batch_size: int = option(32, "samples that are read at once")


@dataclass(frozen=True)
class PriceOptions:
    """What it costs, in dollars."""

    get_price: float = option(0.0004, "of 1,000 GETs", least=0)
    put_price: float = option(0.005, "of 1,000 PUTs or LISTs", least=0)
    month_price: float = option(0.023, "of a GB that is kept for a month", least=0)
    egress_price: float = option(0.0, "of a GB that leaves the region", least=0)
    hour_price: float = option(3.0, "of an hour of the machine that waits", least=0)


@dataclass(frozen=True)
class Options(PriceOptions, ReadingOptions, StoreOptions):
    """What the program was asked for, checked."""


@dataclass(frozen=True)
class Reading:
    """What it takes to read samples, in batches, with nothing else under way."""

    chunk: tuple[int, ...]
    requests: float  # of a sample
    size: float  # bytes of a sample
    samples_per_second: float

    def dollars(self, options: Options) -> dict[str, float]:
        """Of a million samples."""
        return {
            "requests": self.requests * MILLION / 1e3 * options.get_price,
            "egress": self.size * MILLION / 1e9 * options.egress_price,
            "time": MILLION / self.samples_per_second / 3600 * options.hour_price,
        }

    def all_dollars(self, options: Options) -> float:
        """Of a million samples, together."""
        return sum(self.dollars(options).values())


def main(argv: list[str] | None = None) -> dict:
    """Probe the store that is named, or the small one; errors end with code 2."""
    options = parse_options(argv)
    return call_at(partial(probe, options), make_location(options), "")


def parse_options(argv: list[str] | None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    summary = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(
        prog=program(),
        description=summary,
        formatter_class=show_defaults,
        allow_abbrev=False,
    )
    for group in reversed(Options.__bases__):
        add_options(parser, group)
    args = parser.parse_args(argv)
    check_secrets(args, "store", "endpoint")
    check_store("--store", args.store)
    check_server(args)
    if args.icechunk or args.snapshot:
        refuse("--icechunk, --snapshot: give a plain Zarr, whose GETs can be timed")
    return Options(**vars(args))


def probe(options: Options, location: Location) -> dict:
    """Measure, print and return what was found."""
    reader = FieldReader(location, options.variables, options.level)
    reader.open()
    for note in reader.notes:
        print_note(note)
    draw_boxes(reader, options.patch_size, 1, seed=0)  # do they fit?
    client = connect(location)
    try:
        wire = measure_wire(client, reader)
        upkeep = find_upkeep(client, reader)
    except (BaseError, BotoCoreError) as error:
        raise DataError(f"{first_line(error)}; {find_store_remedy(error)}") from error
    print_wire(wire)
    now = read_as_it_is(reader, options)
    print_now(now, reader, options)
    print_upkeep(upkeep, options)
    shapes = []
    for tried in replay(reader, options.patch_size, options.batch_size):
        shapes.append(predict(tried, wire, options.batch_size))
    print_shapes(shapes, reader, options)
    return {
        "latency_ms": 1e3 * wire.latency,
        "p99_ms": 1e3 * float(np.percentile(wire.first_bytes, 99)),
        "best_at_once": wire.best_at_once,
        "start_ms": 1e3 * wire.start,
        "request_ms": 1e3 * wire.per_request,
        "mb_ms": 1e9 * wire.per_byte,
        "now": asdict(now),
        "upkeep": asdict(upkeep),
        "shapes": [asdict(shape) | shape.dollars(options) for shape in shapes],
        "fastest": fastest(shapes).chunk,
        "cheapest": cheapest(shapes, options).chunk,
    }


def connect(location: Location) -> ObjectStore:
    """A client of the store that does nothing but GETs."""
    if "://" not in location.url:
        return from_url(Path(location.url).absolute().as_uri())
    return from_url(location.url, **client_options(location))


def read_as_it_is(reader: FieldReader, options: Options) -> Reading:
    """Read some batches."""
    apart = reader.counted_apart()
    seconds = []
    for batch in range(BATCHES):
        boxes = draw_boxes(reader, options.patch_size, options.batch_size, batch)
        began = perf_counter()
        apart.read_at_once(boxes)
        seconds.append(perf_counter() - began)
    requests, size, _ = apart.traffic.counts()
    samples = BATCHES * options.batch_size
    encoding = reader.fields[options.variables[0]].encoding
    rate = options.batch_size / median(seconds)
    return Reading(encoding["chunks"], requests / samples, size / samples, rate)


def predict(tried: Replay, wire: Wire, batch: int) -> Reading:
    """What a store of such chunks would give: what the wire takes, and what this process does."""
    on_wire = wire.seconds(batch * tried.requests, batch * tried.size)
    rate = batch / (on_wire + tried.seconds)
    return Reading(tried.chunk, tried.requests, tried.size, rate)


def fastest(shapes: list[Reading]) -> Reading:
    """The one with the most samples/s."""
    return max(shapes, key=lambda shape: shape.samples_per_second)


def cheapest(shapes: list[Reading], options: Options) -> Reading:
    """The one whose samples cost least, all told."""
    return min(shapes, key=lambda shape: shape.all_dollars(options))


def print_wire(wire: Wire) -> None:
    """What GETs take."""
    p50, p99 = 1e3 * np.percentile(wire.first_bytes, [50, 99])
    count = len(wire.first_bytes)
    if p99 > UNEVEN * p50:
        print_note(
            "GETs are uneven: throttled, or others use the way; probe again later"
        )
    print(f"latency: {1e3 * wire.latency:.1f} ms, without the CPU time of a GET")
    print(f"first byte: {p50:.1f} ms in the median, p99 {p99:.1f} ms ({count} GETs)")
    print(f"\n{'GETs at once':>12} {'GETs/s':>8} {'kB each':>8} {'MB/s':>8}")
    for burst in wire.bursts:
        rate = burst.requests / burst.seconds
        size = burst.length / 1e3
        print(
            f"{burst.requests:12} {rate:8,.0f} {size:8,.0f} {burst.mb_per_second:8,.0f}"
        )
    print(f"{wire.best_at_once} at once are enough for nearly the most MB/s")
    start = f"{1e3 * wire.start:.1f} ms"
    request = f"{1e3 * wire.per_request:.2f} ms"
    size = f"{1e9 * wire.per_byte:.2f} ms"
    print(f"n GETs of m MB in all, sent at once: {start} + {request} x n + {size} x m")


def print_now(now: Reading, reader: FieldReader, options: Options) -> None:
    """What the store gives as it is, and what an epoch of it costs."""
    chunk = " x ".join(map(str, now.chunk))
    shards = reader.fields[options.variables[0]].encoding.get("shards")
    if shards:
        chunk += f" in shards of {' x '.join(map(str, shards))}"
    print(f"\nmeasured as it is, with chunks of {chunk}: {describe(now)}")
    sizes = reader.fields.sizes
    cells = sizes["time"] * sizes["latitude"] * sizes["longitude"]
    epoch = cells // options.patch_size**2
    dollars = now.dollars(options)
    cost = {name: f"${each * epoch / MILLION:,.2f}" for name, each in dollars.items()}
    minutes = epoch / now.samples_per_second / 60
    print(f"an epoch, as many cells as the store has: {epoch:,} samples")
    print(f"  {epoch * now.requests:,.0f} GETs ({cost['requests']})")
    print(f"  {epoch * now.size / 1e9:,.1f} GB ({cost['egress']} for egress)")
    print(f"  {minutes:,.1f} minutes ({cost['time']} for the machine)")


def describe(reading: Reading) -> str:
    """What a sample takes, and samples/s."""
    size = reading.size / 1e6
    rate = reading.samples_per_second
    return (
        f"{reading.requests:.1f} GETs and {size:.3f} MB a sample, {rate:,.0f} samples/s"
    )


def print_upkeep(upkeep: Upkeep, options: Options) -> None:
    """What the store costs, whoever reads it."""
    cost = upkeep.dollars(options.put_price, options.month_price)
    size = f"{upkeep.size / 1e9:,.2f} GB"
    print(f"the variables: {upkeep.objects:,} objects, about {size}")
    print(f"  ${cost['put']:,.2f} to write them, ${cost['list']:,.2f} to list them")
    print(f"  ${cost['month']:,.2f} a month to keep them")


def print_shapes(shapes: list[Reading], reader: FieldReader, options: Options) -> None:
    """What other chunks would give."""
    print("\npredicted for chunks of one time, without shards; $ of a million samples;")
    print(f"objects of the variables, each ${options.put_price / 1e3:.6f} to write:")
    heads = f"{'chunk':12} {'samples/s':>9} {'GETs':>6} {'MB':>7}"
    print(
        f"{heads} {'$ GETs':>8} {'egress':>8} {'machine':>8} {'all':>8} {'objects':>11}"
    )
    best = fastest(shapes)
    for shape in shapes:
        marks = []
        if shape == best:
            marks.append("fastest")
        elif shape.samples_per_second >= NEARLY * best.samples_per_second:
            marks.append("nearly as fast")
        if shape == cheapest(shapes, options):
            marks.append("cheapest")
        name = " x ".join(map(str, shape.chunk))
        rate = f"{shape.samples_per_second:9,.0f}"
        line = f"{name:12} {rate} {shape.requests:6.1f} {shape.size / 1e6:7.3f}"
        for each in shape.dollars(options).values():
            line += f" {each:8,.2f}"
        line += f" {shape.all_dollars(options):8,.2f}"
        line += f" {count_objects(reader, shape.chunk):11,}"
        print(f"{line}  {', '.join(marks)}".rstrip())


if __name__ == "__main__":
    run(main)
