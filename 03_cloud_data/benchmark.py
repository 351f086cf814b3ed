"""Chapter 3: measure what the walkthrough says of chunks, codecs, formats, clients, caches and faults.

    uv run python benchmark.py                          # every study, about 12 minutes on two idle cores
    uv run python benchmark.py chunks sources           # some of them
    uv run python benchmark.py --quick                  # tiny sizes: that it works, not what it finds
    uv run python benchmark.py --save-results           # and write results/STUDY.json

Alternatives run in turn, so that a machine which slows down for a while slows all of them. What is read has
just been written, so that it comes from the page cache, on the local disk and in the server alike: what is
compared is the number of requests, their size and the work per byte. `server_limit_samples_per_second` is
what the server gives when the same objects are asked for by bare GETs, many at once: a row far below it
shows what the reader costs, and one near it what this server does.
"""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from urllib.request import urlopen

import numcodecs
import numpy as np
import xarray as xr
from numcodecs import Blosc
from obstore.store import from_url
from tqdm import tqdm
from zarr.abc.store import RangeByteRequest
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

from object_store import METADATA, Access, InputError, Parser, Winds

# make_store is imported where it is used: it takes seconds, and the processes of `fork`, which import this
# file, do without.

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs/benchmark"
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
BATCH, PATCH, CHUNK, FAR = 8, 64, (1, 128, 128), 30  # FAR: milliseconds to the first byte
USED = len(NAMES) * PATCH**2 * 4  # bytes of a sample
IN_FLIGHT = 256  # bare GETs at once: with fewer, the latency would limit them and not the server
BUCKET, YEARS = "bench", slice("1982", "1990")  # the years that train.py trains on
# The local server takes any keys; a client that finds none would ask the cloud's metadata service.
ENVIRONMENT = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
ENVIRONMENT |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
warnings.filterwarnings("ignore", message="(Consolidated metadata|Numcodecs codecs)")  # in Zarr 3
logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # that s3fs leaves sessions to the end of the program


# ---------------------------------------------------------------------------------- what every study needs


@dataclass
class Bench:
    """The sizes of a run, its data, and its temporary folder, in which `bench` is the bucket."""

    quick: bool
    rounds: int
    folder: Path
    days: int = 12

    @property
    def resolution(self) -> float:
        return 1.5 if self.quick else 0.25

    @property
    def bucket(self) -> Path:
        return self.folder / BUCKET

    @cached_property
    def file(self) -> Path:
        """Some days in a row as a NetCDF file such as archives hand out: compressed, a map in each chunk."""
        import make_store

        path = OUTPUTS / f"{self.days}_days_{self.resolution:g}_degrees.nc"
        if not path.exists():
            winds = make_store.winds_of(list(range(self.days)), self.resolution, make_store.open_monthly())
            cut = {"zlib": True, "complevel": 1, "chunksizes": (1, *winds[NAMES[0]].shape[1:])}
            aside = path.with_name(f"part-{os.getpid()}-{path.name}")
            winds.to_netcdf(aside, engine="h5netcdf", encoding=dict.fromkeys(NAMES, cut))
            os.replace(aside, path)
        return path

    @cached_property
    def winds(self) -> xr.Dataset:
        return xr.load_dataset(self.file).drop_encoding()

    def write(self, name: str, chunk: tuple = CHUNK, shard_days: int = 0, zarr_format: int = 3) -> Path:
        """Write the days to NAME.zarr in the bucket, cut and compressed as make_store.py does it."""
        encoding, path = encoding_of(self.winds, chunk, shard_days, zarr_format), self.bucket / f"{name}.zarr"
        self.winds.to_zarr(path, encoding=encoding, zarr_format=zarr_format, consolidated=True)
        return path


def encoding_of(winds: xr.Dataset, chunk: tuple, shard_days: int = 0, zarr_format: int = 3) -> dict:
    import make_store

    flags = ["--chunk", *chunk, "--shard-days", shard_days, "--zarr-format", zarr_format]
    return make_store.encoding_of(winds, make_store.parse_arguments([*map(str, flags)]))


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def in_turn(title: str, rounds: int, alternatives: dict) -> dict:
    """Call each alternative with the number of the round, round after round; return their lists of results."""
    found = {key: [] for key in alternatives}
    with tqdm(total=rounds * len(alternatives), desc=title) as bar:
        for number in range(rounds):
            for key, measure in alternatives.items():
                found[key].append(measure(number))
                bar.update()
    return found


@dataclass
class Server:
    address: str
    name: str

    def counts(self) -> dict:
        with urlopen(f"{self.address}/counts") as answer:
            return {"requests": 0, "bytes": 0} | json.load(answer)


@contextmanager
def serve(folder: Path, latency_ms: int = FAR, *flags: object) -> Iterator[Server]:
    """Start an S3 server of a folder of buckets; stop it in the end."""
    command = [sys.executable, HERE / "local_s3.py", "--folder", folder, "--latency-ms", latency_ms, *flags]
    command = [*map(str, command), "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process.stdout.readline().strip(), f"local_s3.py, {latency_ms} ms")
        finally:
            process.kill()


def open_winds(store: object, server: Server | None = None, **options: object) -> Winds:
    """What train.py reads: the winds of a path or, through a server, of a store in the bucket."""
    if server:
        os.environ["AWS_ENDPOINT_URL"] = server.address  # a client looks there once, as it opens
        store = f"s3://{BUCKET}/{Path(store).name}" if not str(store).endswith(".json") else store
    return Winds(Access(str(store), anonymous=True, threads=os.cpu_count(), **options), NAMES, YEARS)


def boxes_of(winds: Winds, step: int) -> list[tuple]:
    """The patches of a batch, at random times and corners as in training: the same for every alternative."""
    rng, cells, (rows, columns) = (
        np.random.default_rng(step),
        np.arange(PATCH),
        (len(winds.latitude), len(winds.longitude)),
    )
    corners = zip(*(rng.integers(most, size=BATCH) for most in (len(winds.times), rows - PATCH + 1, columns)))
    return [(time, row + cells, (column + cells) % columns) for time, row, column in corners]


def read(winds, batches: list[list[tuple]], at_once: bool = True) -> dict:
    """Read batches of boxes, and say what each batch took, the CPU seconds of all, and the store's log."""
    winds.take_log()
    seconds, cpu = [], process_time()
    for boxes in batches:
        began = perf_counter()
        for part in [boxes] if at_once else [[box] for box in boxes]:
            winds.read(part)
        seconds.append(perf_counter() - began)
    samples = sum(map(len, batches))
    figures = {"rate": samples / sum(seconds), "cpu_ms": 1e3 * (process_time() - cpu) / samples}
    return figures | {"samples": samples, "seconds": seconds, "log": winds.take_log()}


def read_round(winds, per_round: int, at_once: bool, number: int) -> dict:
    """Read the batches of a round: others than in the rounds before, and the same for every alternative."""
    steps = range(1 + number * per_round, 1 + (number + 1) * per_round)
    return read(winds, [boxes_of(winds, step) for step in steps], at_once)


def record(winds, batches: list[list[tuple]]) -> list[list]:
    """Read batches, and note what is asked of the store: [key, byte range, bytes], in order."""
    asked, get = [], winds.store.get

    async def noted(key, prototype, byte_range=None):
        entry = [key, byte_range, 0]
        if not key.endswith(METADATA):
            asked.append(entry)
        value = await get(key, prototype, byte_range)
        entry[2] = len(value) if value else 0
        return value

    winds.store.get = noted
    read(winds, batches)
    del winds.store.get
    return asked


def bare_gets(server: Server, prefix: str, asked: list[list], samples: int) -> Callable[[int], float]:
    """A function that asks the server for the same objects without Zarr or codecs; it gives samples/s."""
    place = {"endpoint": server.address, "skip_signature": True, "client_options": {"allow_http": True}}
    store = from_url(f"s3://{BUCKET}/{prefix}", **place)

    async def get_all() -> None:
        free = iter(asked)

        async def get_some() -> None:
            for key, span, _ in free:
                span = asdict(span) if span else None  # of Zarr: start and end, offset, or suffix
                span = tuple(span.values()) if span and len(span) == 2 else span
                answer = await store.get_async(key, options={"range": span} if span else None)
                await answer.bytes_async()

        await asyncio.gather(*(get_some() for _ in range(IN_FLIGHT)))

    def measure(_: int) -> float:
        began = perf_counter()
        sync(get_all())
        return samples / (perf_counter() - began)

    return measure


def what_was_asked(rounds: list[dict]) -> dict:
    """Per sample, what the logs of some rounds of one alternative tell."""
    log, samples = np.concatenate([each["log"] for each in rounds]), sum(each["samples"] for each in rounds)
    milliseconds = 1e3 * log[:, 0]
    return {
        "requests_per_sample": len(log) / samples,
        "bytes_fetched_per_byte_used": log[:, 1].sum() / (samples * USED),
        "request_ms": float(np.median(milliseconds)),
        "request_ms_99": float(np.percentile(milliseconds, 99)),
    }


def rates(rounds: list[dict]) -> dict[str, float]:
    return spread([each["rate"] for each in rounds])


def peak_mb() -> float:
    """Peak memory of this process; getrusage would count its parent's too, from before the exec."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024


def fresh(function: Callable, *arguments: object):
    """What a function returns in a new process, which ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


# -------------------------------------------------------------------------------------------------- studies


def compression(bench: Bench) -> list[dict]:
    """Codecs on real chunks, in one thread: how small, how fast, and how far from the truth."""
    numcodecs.blosc.use_threads = False
    fields = bench.winds.isel(time=slice(0, None, bench.days // 2)).to_dataarray().values
    side = min(CHUNK[1], *fields.shape[2:])
    corners = product(*(range(0, size - side + 1, side) for size in fields.shape[2:]))
    parts = [fields[..., y : y + side, x : x + side].reshape(-1, side, side) for y, x in corners]
    pieces = [piece.copy() for piece in np.concatenate(parts)]
    size = sum(piece.nbytes for piece in pieces)
    codecs = {"none": [], "blosc lz4, shuffle": [Blosc("lz4", 5, Blosc.SHUFFLE)]}
    for kind, level in product(("shuffle", "bitshuffle"), (1, 3, 5, 9)):
        codecs[f"blosc zstd {level}, {kind}"] = [Blosc("zstd", level, getattr(Blosc, kind.upper()))]
    codecs["zstd 3"] = [numcodecs.Zstd(3)]
    for bits, kind in product((7, 9, 11, 13), ("shuffle", "bitshuffle")):
        packed = [numcodecs.BitRound(bits), Blosc("zstd", 3, getattr(Blosc, kind.upper()))]
        codecs[f"{bits} bits, blosc zstd 3, {kind}"] = packed

    def decoded(codec: list, stored: bytes) -> np.ndarray:
        for stage in reversed(codec):
            stored = stage.decode(stored)
        return np.frombuffer(stored, "f4").reshape(side, side).copy()

    def measure(codec: list, _: int) -> dict:
        began, stored = perf_counter(), []
        for piece in pieces:
            for stage in codec:
                piece = stage.encode(piece)
            stored.append(bytes(piece))
        middle = perf_counter()
        for each in stored:
            decoded(codec, each)
        seconds = (middle - began, perf_counter() - middle)
        return {"bytes": sum(map(len, stored)), "rates": [size / 1e6 / part for part in seconds]} | errors(
            pieces, [decoded(codec, each) for each in stored]
        )

    found = in_turn("compression", bench.rounds, {name: partial(measure, codecs[name]) for name in codecs})
    return [
        {"codec": name, "chunk": [1, side, side], "chunks": len(pieces), "ratio": size / rounds[0]["bytes"]}
        | {"encode_mb_per_second": spread([each["rates"][0] for each in rounds])}
        | {"decode_mb_per_second": spread([each["rates"][1] for each in rounds])}
        | {name: rounds[0][name] for name in ("largest_error", "largest_relative_error")}
        for name, rounds in found.items()
    ]


def errors(true: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    """The largest difference in m/s, and relative to the value."""
    true, found = (np.stack(each).astype("f8") for each in (true, found))
    error, size = np.abs(found - true), np.abs(true)
    relative = error[size > 0] / size[size > 0]
    return {"largest_error": float(error.max()), "largest_relative_error": float(relative.max())}


def chunks(bench: Bench) -> list[dict]:
    """How a store is cut decides how many requests a patch takes, and how many bytes."""
    grid = bench.winds[NAMES[0]].shape[1:]
    layouts = [((1, 64, 64), 0), (CHUNK, 0), ((1, 256, 256), 0), ((1, *grid), 0), ((6, *CHUNK[1:]), 0)]
    layouts += [((1, 64, 64), 6), (CHUNK, 6)]
    per_round, cases, rows = 1 if bench.quick else 2, {}, []
    with serve(bench.folder, 0) as near, serve(bench.folder, FAR) as far:
        for chunk, shard_days in layouts:
            path = bench.write(f"{'x'.join(map(str, chunk))}_{shard_days}", chunk, shard_days)
            objects = sum(file.is_file() for name in NAMES for file in path.glob(f"{name}/c/**/*"))
            share = [1 if cut >= size else 1 + (PATCH - 1) / cut for cut, size in zip(chunk[1:], grid)]
            row = {"chunk": chunk, "shard_days": shard_days, "expected_chunks": 2 * math.prod(share)}
            row["objects_per_gb"] = objects / (bench.winds[NAMES].nbytes / 1e9)
            for server in (None, near, far):
                where = server.name if server else "local disk"
                winds = open_winds(path, server)
                for at_once in (True, False):
                    cases[path.name, where, at_once] = partial(read_round, winds, per_round, at_once)
                batches = [boxes_of(winds, step) for step in range(per_round)]
                asked = record(winds, batches)  # and starts everything up
                if server:
                    cases[path.name, where] = bare_gets(server, path.name, asked, len(batches) * BATCH)
                rows.append((path.name, where, row | {"server": where}))
        found = in_turn("chunks", bench.rounds, cases)
    for name, where, row in rows:
        both = {"at_once": found[name, where, True], "one_by_one": found[name, where, False]}
        row |= {f"samples_per_second_{how}": rates(rounds) for how, rounds in both.items()}
        row |= what_was_asked(both["at_once"])
        limit = found.get((name, where))
        row["server_limit_samples_per_second"] = limit and spread(limit)
    return [row for *_, row in rows]


def clients(bench: Bench) -> list[dict]:
    """The two libraries that speak S3, for the same chunks."""
    path, cases = bench.write("winds"), {}
    with serve(bench.folder, 0) as near, serve(bench.folder, FAR) as far:
        for server in (near, far):
            for client in ("obstore", "fsspec"):
                winds = open_winds(path, server, client=client)
                batches = [boxes_of(winds, step) for step in range(4)]
                asked = record(winds, batches)
                cases[client, server.name] = partial(read_round, winds, 1 if bench.quick else 4, True)
            cases[server.name] = bare_gets(server, path.name, asked, 4 * BATCH)
        found = in_turn("clients", bench.rounds, cases)
    return [
        {"client": case[0], "server": case[1], "chunk": CHUNK, "samples_per_second": rates(found[case])}
        | {"cpu_ms_per_sample": spread([each["cpu_ms"] for each in found[case]])}
        | what_was_asked(found[case])
        | {"server_limit_samples_per_second": spread(found[case[1]])}
        for case in cases
        if isinstance(case, tuple)
    ]


def ways(bench: Bench) -> list[dict]:
    """Four ways to read the same batch of patches: what waiting costs through S3, and overhead on a disk."""
    path, found, rows = bench.write("winds"), {}, []

    def patches(dataset: xr.Dataset, boxes: list[tuple]) -> list[xr.Dataset]:
        spans = [
            (time, slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
            for time, rows, columns in boxes
        ]
        return [dataset.isel(time=time, latitude=rows, longitude=columns) for time, rows, columns in spans]

    with serve(bench.folder, FAR) as far:
        for server in (None, far):
            winds = open_winds(path, server)
            whole = [
                [box for box in boxes_of(winds, step) if np.ptp(box[2]) == PATCH - 1] for step in range(2)
            ]
            lazy = winds.dataset.chunk(latitude=CHUNK[1], longitude=CHUNK[2], time=1)
            alternatives = {
                "Dask, patch by patch": lambda boxes, lazy=lazy: [
                    patch.compute(scheduler="threads") for patch in patches(lazy, boxes)
                ],
                "isel().load(), patch by patch": lambda boxes, winds=winds: [
                    patch.load() for patch in patches(winds.dataset, boxes)
                ],
                "Winds.read, sample by sample": lambda boxes, winds=winds: [
                    winds.read([box]) for box in boxes
                ],
                "Winds.read, all at once": lambda boxes, winds=winds: winds.read(boxes),
            }

            def timed(read: Callable, number: int, whole=whole) -> float:
                boxes, began = whole[number % 2], perf_counter()
                read(boxes)
                return 1e3 * (perf_counter() - began) / len(boxes)

            for read in alternatives.values():
                timed(read, 0)
            found = in_turn(
                "ways", bench.rounds, {way: partial(timed, read) for way, read in alternatives.items()}
            )
            where = server.name if server else "local disk"
            rows += [
                {"way": way, "server": where, "ms_per_sample": spread(found[way])} for way in alternatives
            ]
    return rows


def command(bench: Bench) -> list[dict]:
    """The reader's command, from the command to the prompt: in a clone, where the first run makes the store."""
    steps, seconds, summary = ["--max-steps", "2"] if bench.quick else [], [], {}
    (bench.folder / "01_setup").symlink_to(HERE.parent / "01_setup")
    clone = bench.folder / HERE.name
    clone.mkdir()
    for script in HERE.glob("*.py"):
        (clone / script.name).symlink_to(script)
    reader = {name: value for name, value in os.environ.items() if name != "AWS_ENDPOINT_URL"}  # ways sets it
    for _ in tqdm(range(2 if bench.quick else 3), "command"):
        began = perf_counter()
        train = [sys.executable, clone / "train.py", *steps]
        subprocess.run(train, cwd=clone, env=reader, check=True, stdout=subprocess.DEVNULL)
        seconds.append(perf_counter() - began)
        summary = json.loads((clone / "outputs/train/summary.json").read_text())
    row = {"script": "train.py", "runs": len(seconds) - 1, "wall_seconds": spread(seconds[1:])}
    return [row | {"first_wall_seconds": spread(seconds[:1]), "summary": summary}]


def sources(bench: Bench) -> list[dict]:
    """The same batches out of NetCDF, copies of it in Zarr, and references to it."""
    import make_references

    bench.bucket.mkdir(exist_ok=True)
    file = bench.bucket / "winds.nc"
    os.link(bench.file, file)
    bench.write("v2", zarr_format=2), bench.write("v3"), bench.write("sharded", shard_days=6)
    per_round, cases, limits = 1 if bench.quick else 2, {}, {}
    with serve(bench.folder, FAR) as far:
        os.environ["AWS_ENDPOINT_URL"] = far.address
        with redirect_stdout(open(os.devnull, "w")), redirect_stderr(open(os.devnull, "w")):
            for target in ("local.json", f"{BUCKET}/local.icechunk"):
                make_references.main(["--source", str(file), "--store", str(bench.folder / target)])
            for target in (str(bench.folder / "s3.json"), f"s3://{BUCKET}/s3.icechunk"):
                make_references.main(["--source", f"s3://{BUCKET}/*.nc", "--store", target])

        def measure(store: object, server: Server | None, number: int) -> dict:
            began = perf_counter()
            winds = open_winds(store, server)
            opened = perf_counter() - began
            read(winds, [boxes_of(winds, 0)])  # starts everything up
            before = far.counts()
            figures = read_round(winds, per_round, True, number)
            asked = {"requests": len(figures["log"]), "bytes": figures["log"][:, 1].sum()}
            if server:
                asked = {name: far.counts()[name] - before[name] for name in asked}
            return figures | asked | {"open": opened}

        cases["NetCDF, xarray", "local disk"] = partial(measure, file, None)
        for name, local, remote in (
            ("Zarr v2", bench.bucket / "v2.zarr", "v2.zarr"),
            ("Zarr v3", bench.bucket / "v3.zarr", "v3.zarr"),
            ("Zarr v3, shards of 6 days", bench.bucket / "sharded.zarr", "sharded.zarr"),
            ("kerchunk references to NetCDF", bench.folder / "local.json", bench.folder / "s3.json"),
            ("Icechunk references to NetCDF", bench.bucket / "local.icechunk", "s3.icechunk"),
        ):
            cases[name, "local disk"] = partial(measure, local, None)
            cases[name, far.name] = partial(measure, remote, far)
            winds = open_winds(remote, far)
            asked = record(winds, [boxes_of(winds, step) for step in range(2)])
            prefix = remote
            if "references" in name:  # as many bytes of the file that they refer to
                asked, prefix = [["winds.nc", RangeByteRequest(0, size), size] for *_, size in asked], ""
            limits[name] = bare_gets(far, prefix, asked, 2 * BATCH)
        found = in_turn("sources", bench.rounds, cases | limits)
    return [
        {"source": case[0], "server": case[1], "batch_size": BATCH}
        | {"batch_ms": spread([1e3 * median(each["seconds"]) for each in found[case]])}
        | {"requests_per_batch": sum(each["requests"] for each in found[case]) / per_round / bench.rounds}
        | {"mb_per_batch": sum(each["bytes"] for each in found[case]) / 1e6 / per_round / bench.rounds}
        | {"open_seconds": spread([each["open"] for each in found[case]])}
        | {"server_limit_samples_per_second": spread(found[case[0]]) if case[1] == far.name else None}
        for case in cases
    ]


def cache(bench: Bench) -> list[dict]:
    """A cache smaller than an epoch: keeping what came first, against keeping what came last."""
    path, n_batches = bench.write("winds"), 2 if bench.quick else 8
    orders = {"same order": 0, "shuffled": 1}
    with serve(bench.folder, FAR) as far:
        winds = open_winds(path, far)
        boxes = [box for step in range(n_batches) for box in boxes_of(winds, step)]

        def epoch(shuffled: int) -> list[list[tuple]]:
            order = np.random.default_rng(shuffled).permutation(len(boxes)) if shuffled else range(len(boxes))
            return [[boxes[i] for i in order[first : first + BATCH]] for first in range(0, len(boxes), BATCH)]

        first = record(winds, epoch(0))
        seconds = {name: record(winds, epoch(shuffled)) for name, shuffled in orders.items()}
        distinct = sum({key: size for key, _, size in first}.values())

        def measure(share: float, _: int) -> dict:
            with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
                # The last byte would not go in if the size were rounded down.
                kept = {"cache": folder, "cache_gb": (share * distinct + 1) / 1e9} if share else {}
                cached = open_winds(path, far, **kept)
                read(cached, epoch(0))
                return read(cached, epoch(1))

        shares = (0, 0.25, 0.5, 0.75, 1)
        cases = {share: partial(measure, share) for share in shares}
        limit = {"limit": bare_gets(far, path.name, first, len(boxes))}
        found = in_turn("cache", bench.rounds, cases | limit)
    return [
        {"cache_share_of_epoch": share, "server": far.name, "patches": len(boxes), "epoch_mb": distinct / 1e6}
        | {"hit_share": spread([float(each["log"][:, 3].mean()) for each in found[share]])}
        | {"samples_per_second": rates(found[share])}
        | {
            f"lru_hit_share_{name.replace(' ', '_')}": lru(first, seconds[name], share * distinct)
            for name in orders
        }
        | {"server_limit_samples_per_second": spread(found["limit"])}
        for share in shares
    ]


def lru(first: list[list], second: list[list], capacity: float) -> float:
    """The share of the second epoch's requests that a cache finds which discards what was longest unused."""
    held, total, hits = OrderedDict(), 0, 0
    for number, (key, _, size) in enumerate([*first, *second]):
        if key in held:
            held.move_to_end(key)
            hits += number >= len(first)
            continue
        held[key] = size
        total += size
        while total > capacity:
            total -= held.popitem(last=False)[1]
    return hits / len(second)


def lay_out(bench: Bench, gigabytes: float, donor: Path) -> tuple[Path, dict]:
    """A store of so many GB whose days are all links to the few in `donor`; its times span 1982 to 1992."""
    import dask.array

    donors, shape = bench.winds.sizes["time"], bench.winds[NAMES[0]].shape[1:]
    days = max(donors, round(gigabytes * 1e9 / (len(NAMES) * math.prod(shape) * 4)))
    times = np.datetime64("1982-01-01", "ns") + np.linspace(0, 4017, days).astype("timedelta64[D]")
    cut = (1, *(math.ceil(size / 2) for size in shape))
    zeros = dask.array.zeros((days, *shape), dtype="f4", chunks=(days, *shape))  # never computed
    winds = {name: (("time", "latitude", "longitude"), zeros) for name in NAMES}
    winds = xr.Dataset(winds, dict(bench.winds.coords) | {"time": times})
    path = bench.bucket / f"{gigabytes:g}gb.zarr"
    winds.to_zarr(path, encoding=encoding_of(winds, cut), compute=False, consolidated=True)
    files = 0
    for name, day in product(NAMES, range(days)):
        for row in os.listdir(source := donor / name / f"c/{day % donors}"):
            os.makedirs(target := path / name / f"c/{day}/{row}")
            for column in os.listdir(source / row):
                os.link(source / row / column, target / column)
                files += 1
    return path, {"days": days, "files": files, "chunk": cut}


def first_batches(name: str, address: str, batches: int) -> dict:
    """In a process of its own: open, read a first batch and the others, and what memory that took."""
    before, began = peak_mb(), perf_counter()
    winds = open_winds(name, Server(address, ""))
    opened = perf_counter()
    read(winds, [boxes_of(winds, 0)])
    first = perf_counter()
    read(winds, [boxes_of(winds, step) for step in range(1, batches)])
    figures = {"open_seconds": opened - began, "first_batch_seconds": first - began}
    return figures | {"imports_mb": before, "peak_mb": peak_mb()}


def train_in(folder: str, flags: list[str], address: str, started: float) -> dict:
    """In a process of its own: train.py, its statistics kept in `folder`; seconds since it was started."""
    import train
    from torch.optim.optimizer import register_optimizer_step_post_hook

    os.environ["AWS_ENDPOINT_URL"], found = address, {"imports_seconds": time.time() - started}
    statistics = train.statistics

    def timed(*arguments: object) -> dict:
        began = perf_counter()
        result = statistics(*arguments)
        found["statistics_seconds"] = perf_counter() - began
        return result

    def note(*_: object) -> None:
        found.setdefault("first_step_seconds", time.time() - started)

    register_optimizer_step_post_hook(note)
    train.OUTPUTS, train.statistics = Path(folder, "train"), timed
    with redirect_stdout(open(os.devnull, "w")), redirect_stderr(open(os.devnull, "w")):
        train.main([*flags, "--output-dir", str(train.OUTPUTS)])
    return found | {"peak_mb": peak_mb()}


def sizes(bench: Bench) -> list[dict]:
    """Stores from 1 to 30 GB: opening, first batch and memory must not grow with them."""
    shape = bench.winds[NAMES[0]].shape[1:]
    donor = bench.write("donor", (1, *(math.ceil(size / 2) for size in shape)))
    apparent, batches = ((0.02,), 2) if bench.quick else ((1, 10, 30), 20)
    stores = {gigabytes: lay_out(bench, gigabytes, donor) for gigabytes in apparent}
    with serve(bench.folder, FAR) as far:
        cases, limits = {}, {}
        for gigabytes, (path, _) in stores.items():
            winds = open_winds(path, far)
            asked = record(winds, [boxes_of(winds, step) for step in range(batches)])
            cases[gigabytes] = lambda _, path=path: fresh(first_batches, path.name, far.address, batches)
            limits[str(gigabytes)] = bare_gets(far, path.name, asked, batches * BATCH)
        found = in_turn("sizes", min(bench.rounds, 3), cases | limits)
        rows = [
            {"gb": gigabytes, "server": far.name, **stores[gigabytes][1], "batches": batches}
            | {name: spread([each[name] for each in found[gigabytes]]) for name in found[gigabytes][0]}
            | {"server_limit_samples_per_second": spread(found[str(gigabytes)])}
            for gigabytes in cases
        ]
        path, facts = stores[apparent[-1]]
        short = "--max-steps 2 --patch-size 16" if bench.quick else "--max-steps 20"
        flags = f"--store s3://{BUCKET}/{path.name} --anonymous {short}".split()
        for kept in (False,) if bench.quick else (False, True):
            figures = fresh(train_in, str(bench.folder), flags, far.address, time.time())
            row = {"gb": apparent[-1], "server": far.name, **facts, "command": f"train.py {' '.join(flags)}"}
            rows.append(row | {"statistics_kept": kept} | figures)
    return rows


def faults(bench: Bench) -> list[dict]:
    """What failing requests cost: each is asked for again, and training goes on."""
    path, per_round = bench.write("winds"), 2 if bench.quick else 10
    plans = {
        "none": [],
        "1% 503 SlowDown": ["--error-rate", 0.01],
        "5% 503 SlowDown": ["--error-rate", 0.05],
        "1% resets": ["--reset-rate", 0.01],
        "1% cut short": ["--truncate-rate", 0.01],
        "one request stalls": ["--stall-at", 50],  # in each round; the deadline gives an attempt 12 / 6 s
    }

    def measure(plan: str, number: int) -> dict:
        with serve(bench.folder, FAR, "--seed", number, *plans[plan]) as server:  # other faults in each round
            winds = open_winds(path, server, deadline=12 if "stalls" in plan else 60)
            return read_round(winds, per_round, True, number)

    with serve(bench.folder, FAR) as far:
        winds = open_winds(path, far)
        asked = record(winds, [boxes_of(winds, step) for step in range(2)])
        limit = {"limit": bare_gets(far, path.name, asked, 2 * BATCH)}
        found = in_turn("faults", bench.rounds, {plan: partial(measure, plan) for plan in plans} | limit)
    rows = []
    for plan in plans:
        seconds = np.concatenate([each["seconds"] for each in found[plan]])
        retries = [int((each["log"][:, 2] - 1).sum()) for each in found[plan]]
        row = {"faults": plan, "server": far.name, "read_deadline": 12 if "stalls" in plan else 60}
        row |= {"batches": len(seconds), "requests": sum(len(each["log"]) for each in found[plan])}
        row |= {"samples_per_second": rates(found[plan]), "retries": sum(retries)}
        row |= {"batch_ms": 1e3 * median(seconds), "batch_ms_99": 1e3 * float(np.percentile(seconds, 99))}
        row |= {"slowest_batch_ms": 1e3 * max(seconds)}
        rows.append(row | {"server_limit_samples_per_second": spread(found["limit"])})
    return rows


def mfdataset(bench: Bench) -> list[dict]:
    """Opening many files as one: xarray's defaults, promises that spare the comparing, promises checked."""
    import make_store

    counts = (3, 6) if bench.quick else (12, 48, 132)
    monthly, days, files = make_store.open_monthly(), 3, []
    for number in tqdm(range(counts[-1]), "files made"):
        files.append(bench.folder / f"{number:03}.nc")
        first = number * days
        make_store.winds_of([*range(first, first + days)], 1.5, monthly).to_netcdf(
            files[-1], engine="h5netcdf"
        )
    args = make_store.parse_arguments([])

    def measure(open_them: Callable, count: int, _: int) -> float:
        began = perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of xarray's, that its defaults will change
            opened = open_them(files[:count])
        seconds = perf_counter() - began
        if opened.sizes["time"] != count * days:
            raise RuntimeError(f"{opened.sizes['time']} times in {count} files of {days}")
        opened.close()
        return seconds

    promise = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "override"}
    ways = {"xr.open_mfdataset": xr.open_mfdataset}
    ways["xr.open_mfdataset, promises"] = partial(xr.open_mfdataset, **promise)
    ways["make_store.open_files"] = lambda some: make_store.open_files(some, args)
    for way in ways.values():
        measure(way, counts[0], 0)  # imports what it needs
    cases = {(way, count): partial(measure, ways[way], count) for count in counts for way in ways}
    found = in_turn("mfdataset", bench.rounds, cases)
    facts = {"days_per_file": days, "degrees": 1.5}
    return [
        {"files": count, "how": way, "seconds": spread(found[way, count]), **facts} for way, count in cases
    ]


# ------------------------------------------------------------------------- fork: does a forked child read?


def one_value(store: object, **chunks: object) -> float:
    with xr.open_zarr(store, consolidated=False, **(chunks or {"chunks": None})) as opened:
        return float(opened[NAMES[0]].isel(time=0).mean())


def read_obstore(folder: str) -> float:
    place = {"skip_signature": True, "client_options": {"allow_http": True}}
    return one_value(ObjectStore(from_url(f"s3://{BUCKET}/winds.zarr", **place), read_only=True))


def read_s3fs(folder: str) -> float:
    options = {"anon": True, "skip_instance_cache": True}
    return one_value(FsspecStore.from_url(f"s3://{BUCKET}/winds.zarr", options, read_only=True))


def read_netcdf(folder: str) -> float:
    with xr.open_dataset(f"{folder}/winds.nc", engine="h5netcdf") as opened:
        return float(opened[NAMES[0]].isel(time=0).mean())


def read_icechunk(folder: str) -> float:
    from make_references import open_repository

    return one_value(open_repository(f"{folder}/winds.icechunk").readonly_session("main").store)


def read_dask(folder: str) -> float:
    return one_value(f"{folder}/winds.zarr", chunks={"time": 1, "latitude": 64})


READERS = {
    "obstore": read_obstore,
    "s3fs, a new instance": read_s3fs,
    "NetCDF, h5netcdf": read_netcdf,
    "icechunk": read_icechunk,
    "xarray with dask, local Zarr": read_dask,
}


def read_again(reader: str, folder: str, answer) -> None:
    sys.stderr = open(os.devnull, "w")  # a failure is told by the end of the pipe
    answer.send("started")
    READERS[reader](folder)
    answer.send("read")


def read_and_start(reader: str, method: str, folder: str, seconds: str) -> None:
    """In a program of its own: read, start a child that reads, and print how that went."""
    READERS[reader](folder)
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=read_again, args=(reader, folder, theirs))
    child.start()
    theirs.close()
    try:
        mine.recv()  # imports take as long as they take
        late = not mine.poll(float(seconds))
        print(f"hangs (killed after {seconds} s)" if late else f"{mine.recv()}s", flush=True)
    except EOFError:
        print("fails", flush=True)
    child.kill()
    os._exit(0)  # a library's threads might keep it


def fork(bench: Bench) -> list[dict]:
    """After a process has read, does its child? By library, and by how the child is started."""
    import make_references

    bench.write("winds", (1, 64, 64))
    os.link(bench.file, bench.bucket / "winds.nc")
    with redirect_stdout(open(os.devnull, "w")), redirect_stderr(open(os.devnull, "w")):
        target = str(bench.bucket / "winds.icechunk")
        make_references.main(["--source", str(bench.bucket / "winds.nc"), "--store", target])
    seconds, readers, methods = 3 if bench.quick else 10, [*READERS], ("fork", "forkserver", "spawn")
    cases = (
        [("obstore", "fork"), ("NetCDF, h5netcdf", "fork")] if bench.quick else [*product(readers, methods)]
    )
    program = "import sys, benchmark; benchmark.read_and_start(*sys.argv[1:])"

    def run(case: tuple[str, str]) -> str:
        command = [sys.executable, "-c", program, *case, str(bench.bucket), str(seconds)]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(command, cwd=HERE, text=True, **quiet) as parent:
            try:
                return parent.communicate(timeout=90)[0].strip() or "the parent fails"
            except subprocess.TimeoutExpired:
                return "the parent hangs (killed)"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(parent.pid, signal.SIGKILL)  # and all that it has started

    with serve(bench.folder, 0) as near, ThreadPoolExecutor(2) as several:
        os.environ["AWS_ENDPOINT_URL"] = near.address
        outcomes = [*tqdm(several.map(run, cases), "fork", len(cases))]
    remote = ("obstore", "s3fs, a new instance")
    return [
        {"library": library, "start_method": method, "outcome": outcome}
        | {"server": near.name if library in remote else "local disk"}
        for (library, method), outcome in zip(cases, outcomes)
    ]


# --------------------------------------------------------------------------------------------- command line

STUDIES = (command, compression, ways, chunks, clients, sources, cache, sizes, faults, mfdataset, fork)
STUDIES = {study.__name__: study for study in STUDIES}


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory), "gpu": None}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that were asked for; print their rows, and save them if asked to."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all if none")
    add("--quick", action="store_true", help="tiny sizes and one round: see that it works")
    add("--rounds", type=int, help="rounds in which the alternatives take turns (default: 5; quick: 1)")
    add("--save-results", action="store_true", help="write results/STUDY.json")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.studies if name not in STUDIES]:
        raise InputError(f"{unknown[0]}: no such study; choose from {', '.join(STUDIES)}")
    if args.rounds is not None and args.rounds < 1:
        raise InputError(f"--rounds {args.rounds}: too small; give at least 1")
    if args.quick and args.save_results:
        raise InputError("--save-results: --quick measures nothing worth keeping; leave one of them out")
    os.environ |= ENVIRONMENT
    packages = ("zarr", "xarray", "obstore", "s3fs", "icechunk", "numcodecs", "h5netcdf")
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    found = {}
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    for name in args.studies or STUDIES:
        began = perf_counter()
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=OUTPUTS) as folder:
            bench = Bench(args.quick, args.rounds or (1 if args.quick else 5), Path(folder))
            found[name] = STUDIES[name](bench)
        for row in found[name]:
            print(name, json.dumps(row))
        print(f"{name}: {perf_counter() - began:.0f} s", flush=True)
        if args.save_results:
            results = {"command": f"uv run python benchmark.py {name}", "date": str(date.today())}
            results |= {"machine": machine(), "versions": versions, "rows": found[name]}
            path = HERE / "results" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(aside, path)
    return found


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped")
