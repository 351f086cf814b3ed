"""Which chunks probe.py advises, beside what stores of such chunks give."""

import socket
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from urllib.parse import quote, urlsplit

from tqdm import tqdm

import probe
from location import Location
from options import VARIABLES
from probing.replay import replay
from probing.wire import Part, find_chunks, measure_wire
from results import spread
from store import FieldReader
from studies.server import Server, serve
from studies.stores import SIZE, full_or_quick, run_make_store, store_key, store_path

LATENCIES = (5, 30, 100)  # ms to the first byte
PATCHES = (64, 256)
SIDES = (
    32,
    64,
    128,
    256,
    512,
    0,
)  # of chunks, none below a quarter of the patch; 0: the map
PROBED = 128  # whose store is probed
DAYS = 24
GETS = 128  # of a socket


def shapes(repeats: int) -> list[dict]:
    """A row for each latency, patch and chunk: samples/s as predicted, and as measured."""
    sides = full_or_quick(SIDES, (8, 0))
    for side in sides:
        make_one(side)
    rows = []
    for latency in full_or_quick(LATENCIES, (5,)):
        with serve(latency) as server:
            for patch in full_or_quick(PATCHES, (SIZE["patch"],)):
                fitting = [side for side in sides if not 0 < side < patch / 4]
                found = compare(server, patch, fitting, repeats)
                rows += [{"latency_ms": latency, "patch": patch} | row for row in found]
    return rows


def latency(repeats: int) -> list[dict]:
    """A row for each latency of the server: as probe.py finds it, and as a socket sees it."""
    side = full_or_quick(PROBED, 8)
    make_one(side)
    rows = []
    for set_to in full_or_quick(LATENCIES, (5,)):
        with serve(set_to) as server:
            reader = open_reader(server, side)
            client = probe.connect(reader.location)
            found = []
            plain = []
            for _ in range(repeats):
                wire = measure_wire(client, reader)
                found.append(1e3 * wire.latency)
                parts = find_chunks(client, reader, GETS)
                plain.append(1e3 * median(time_plain_gets(server, side, parts)))
        row = {"set_to_ms": set_to, "socket_ms": spread(plain)}
        rows.append(row | {"probe_ms": spread(found)})
    return rows


def time_plain_gets(server: Server, side: int, parts: Iterable[Part]) -> list[float]:
    """Seconds to the first byte of each chunk, by HTTP written into a socket."""
    url = urlsplit(server.address)
    seconds = []
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = connection.makefile("rb")
        for part in parts:
            path = quote(f"/{store_key(name_of(side))}/{part.key}")
            request = f"GET {path} HTTP/1.1\r\nHost: any\r\nRange: bytes=0-0\r\n\r\n"
            began = perf_counter()
            connection.sendall(request.encode())
            answer.peek(1)
            seconds.append(perf_counter() - began)
            while answer.readline().strip():  # the headers, up to an empty line
                pass
            answer.read(1)
    return seconds


def make_one(side: int) -> None:
    """Make the store with chunks of this side, of a few days."""
    rows = round(180 / SIZE["resolution"]) + 1
    flags = ["--days", DAYS, "--resolution", SIZE["resolution"]]
    flags += ["--chunk", 1, side or rows, side or 2 * rows - 2]
    run_make_store(*flags, "--store", store_path(name_of(side)))


def name_of(side: int) -> str:
    """The name of a layout."""
    return f"{DAYS} days, chunks of {side or 'a map'}".replace(",", "")


def compare(server: Server, patch: int, sides: tuple, repeats: int) -> list[dict]:
    """Probe one store and read all, in turn, several times."""
    batch = str(SIZE["batch"])
    options = probe.parse_options(["--patch-size", str(patch), "--batch-size", batch])
    readers = {side: open_reader(server, side) for side in sides}
    probed = full_or_quick(PROBED, sides[0])
    measured: dict[int, list] = {side: [] for side in sides}
    advice = []
    for _ in tqdm(range(repeats), f"patches of {patch}", disable=None):
        wire = measure_wire(probe.connect(readers[probed].location), readers[probed])
        tried = list(replay(readers[probed], patch, options.batch_size))
        shapes = [probe.predict(each, wire, options.batch_size) for each in tried]
        advice.append((wire, shapes))
        for side, reader in readers.items():
            measured[side].append(probe.read_as_it_is(reader, options))
    rows = []
    for readings in measured.values():
        chunk = readings[0].chunk[1:]
        row = {"chunk": list(chunk), "requests": readings[0].requests}
        row["mb"] = readings[0].size / 1e6
        row["measured"] = spread([one.samples_per_second for one in readings])
        predicted = [
            each for _, shapes in advice for each in shapes if each.chunk == chunk
        ]
        row["predicted"] = spread([each.samples_per_second for each in predicted])
        row["advised"] = sum(
            probe.fastest(shapes).chunk == chunk for _, shapes in advice
        )
        row["first_byte_ms"] = spread([1e3 * wire.latency for wire, _ in advice])
        rows.append(row)
    return rows


def open_reader(server: Server, side: int) -> FieldReader:
    """A reader of the store with chunks of this side."""
    url = f"s3://{store_key(name_of(side))}"
    location = Location(url, endpoint=server.address, anonymous=True)
    reader = FieldReader(location, VARIABLES)
    reader.open()
    return reader
