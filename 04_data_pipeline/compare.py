"""Chapter 4: the same batches out of the same bucket, by other libraries, by our loader, and by nothing at all.

    uv run --group peers python compare.py                        # all readers in turn: 15 minutes
    uv run python compare.py ours limit "bare GETs"               # those that need no other library
    uv run --group peers python compare.py --save-results         # and write results/compare.json

A batch is 32 patches of 64 x 64 cells of u and v with swaths, masks and weights, cut from whole maps of 0.25
degrees behind local_s3.py, which answers after 30 ms. Each reader works in a process of its own, all of them in
turn, round after round. Every peer's patches become batches by the same Patches.make of train.py as ours.

`limit` is what a reader could do at best: the same objects by bare GETs, each decoded as the store's metadata
say, in threads, and nothing cut; `bare GETs` does not even decode: what the server gives to one client and to two.
You should see `ours` near the limit, and that what others lack is not speed of reading but reading whole maps.
"""

import argparse
import json
import math
import multiprocessing
import resource
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, islice
from statistics import median
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

import dask
import google_crc32c
import numpy as np
import obstore
import psutil
import torch
import xarray as xr
from numcodecs import Blosc
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

import benchmark
import train
from benchmark import STORE_FLAGS, Server, cpu_seconds, spread

LAYOUT, LATENCY_MS = "whole maps", max(benchmark.LATENCIES)
COMMAND = "uv run --group peers python compare.py"


# ------------------------------------------------------------------- readers: (Patches, args) -> batches


class XarrayStore(train.Store):
    """Reads as most people begin: one variable of one sample after another."""

    def read(self, regions: list[dict]) -> np.ndarray:
        return np.stack(
            [
                [self.fields[name].isel(at).values for name in self.args.variables]
                for at in regions
            ]
        )


class DaskStore(train.Store):
    """Reads by Dask's arrays, a task for each chunk; all regions are one graph, computed at once."""

    @cached_property
    def lazy(self) -> xr.Dataset:
        dataset = xr.open_zarr(self.bucket, chunks={})[self.args.variables]
        return train.sort_coordinates(train.rename_dimensions(dataset))

    def read(self, regions: list[dict]) -> np.ndarray:
        parts = [
            [self.lazy[name].isel(at).data for name in self.args.variables]
            for at in regions
        ]
        return np.stack(dask.compute(*parts))


class TensorStore(train.Store):
    """Reads by tensorstore: the reads of all regions are begun before the first is waited for."""

    @cached_property
    def arrays(self) -> dict:
        import tensorstore

        url = urlsplit(self.args.store)
        place = {"driver": "s3", "bucket": url.netloc, "endpoint": self.args.endpoint}
        place |= {"aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
        kept = {
            name: place | {"path": f"{url.path[1:]}/{name}/"}
            for name in self.args.variables
        }
        context = tensorstore.Context(
            {"s3_request_concurrency": {"limit": train.READS_AT_ONCE}}
        )
        specs = {
            name: {"driver": "zarr3", "kvstore": kvstore}
            for name, kvstore in kept.items()
        }
        return {
            name: tensorstore.open(spec, context=context).result()
            for name, spec in specs.items()
        }

    @cached_property
    def fields(self) -> xr.Dataset:
        self.arrays  # noqa: B018 - opened once, before many threads ask for them
        return super().fields

    def begin(self, name: str, region: dict):
        """A promise of a variable in a region. The store has its latitudes from north to south."""
        at = {"latitude": slice(None), "longitude": slice(None)} | region
        height = self.fields.sizes["latitude"]
        start, stop, _ = at["latitude"].indices(height)
        return (
            self.arrays[name]
            .oindex[at["time"], height - stop : height - start, at["longitude"]]
            .read()
        )

    def load(self, job: tuple[str, xr.Variable, dict]) -> np.ndarray:
        return self.begin(job[0], job[2]).result()[..., ::-1, :]

    def read(self, regions: list[dict]) -> np.ndarray:
        begun = [
            [self.begin(name, at) for name in self.args.variables] for at in regions
        ]
        return np.stack([[part.result()[::-1] for part in parts] for parts in begun])


class OneByOne(Dataset):
    """The same samples without __getitems__: a DataLoader asks for one after another."""

    def __init__(self, patches: train.Patches):
        self.patches = patches

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return self.patches[index]


def workers(args: argparse.Namespace) -> dict[str, object]:
    """A DataLoader's options: its workers start as train.py's do."""
    multiprocessing.set_forkserver_preload(train.PRELOADED)
    more = {"multiprocessing_context": args.start_method} if args.num_workers else {}
    return {"num_workers": args.num_workers} | more


def read_samples(
    patches: train.Patches, args: argparse.Namespace, store: type, at_once=False
) -> DataLoader:
    """Chapter 3's samples in chapter 3's order, read one by one, or a batch's at once."""
    patches.store, sampler = (
        store(args),
        train.StepSampler(args, start=0, rank=0, world_size=1),
    )
    return DataLoader(
        patches if at_once else OneByOne(patches),
        batch_sampler=sampler,
        **workers(args),
    )


def read_dask_batches(patches: train.Patches, args: argparse.Namespace) -> DataLoader:
    """With as many threads as our reads: Dask's own number is that of the cores, which only wait."""
    dask.config.set(scheduler="threads", num_workers=train.READS_AT_ONCE)
    return read_samples(patches, args, DaskStore, True)


def read_tensorstore_maps(
    patches: train.Patches, args: argparse.Namespace
) -> DataLoader:
    """This chapter's loader, whose threads read by tensorstore."""
    patches.store = TensorStore(args)
    return train.make_loader(patches, args)


class Xbatcher(Dataset):
    """The items of a BatchGenerator over `winds`, as batches: `per_map` patches of each of an item's maps.

    xbatcher's own MapDataset returns bare tensors, which say no more where they lie: no climatology, no masks.
    """

    def __init__(
        self, patches: train.Patches, winds: xr.Dataset, per_map: int, **shape: int
    ):
        from xbatcher import BatchGenerator

        self.patches, self.per_map, self.generator = (
            patches,
            per_map,
            BatchGenerator(winds, shape),
        )

    def __len__(self) -> int:
        return len(self.generator)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """The samples of an item, (maps * per_map, ...). Of an item that is a patch there is only one to cut."""
        patches, item = (
            self.patches,
            self.generator[number],
        )  # all of its chunks are read at once
        rng = np.random.default_rng((train.PATCH_STREAM, patches.seed, number))
        maps = np.stack(
            [field.values for field in item.values()], axis=1
        )  # (maps, variables, H, W)
        of = np.repeat(np.arange(len(maps)), self.per_map)
        down, across = (
            rng.integers(n - patches.size + 1, size=len(of)) for n in maps.shape[2:]
        )
        fields = np.stack(
            [patches.cut(maps[n], *corner) for n, *corner in zip(of, down, across)]
        )
        times = np.searchsorted(patches.times, item.time)[of]
        rows = np.searchsorted(patches.latitude, item.latitude[0]) + down
        columns = np.searchsorted(patches.longitude, item.longitude[0]) + across
        return patches.make(
            fields, times, rows, columns, train.swath_masks(rng, len(of), patches.size)
        )


def concatenate(items: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.concatenate([item[name] for item in items]))
        for name in items[0]
    }


def epochs(items: Xbatcher, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """A shuffled epoch after another; `size` items are joined to a batch."""
    while True:
        yield from DataLoader(
            items, size, shuffle=True, drop_last=True, collate_fn=concatenate
        )


def read_xbatcher(
    patches: train.Patches, args: argparse.Namespace
) -> Iterator[dict[str, torch.Tensor]]:
    """As its documentation has it: an item is a patch, and a DataLoader shuffles items."""
    winds, size = DaskStore(args).lazy.sel(time=patches.times), patches.size
    return epochs(
        Xbatcher(patches, winds, 1, time=1, latitude=size, longitude=size),
        args.batch_size,
    )


def read_xbatcher_maps(
    patches: train.Patches, args: argparse.Namespace
) -> Iterator[dict[str, torch.Tensor]]:
    """An item is as many whole maps as we read at once, of times in random order; its patches are mixed."""
    dask.config.set(scheduler="threads", num_workers=train.MAPS_AT_ONCE)
    rng = np.random.default_rng(patches.seed)
    winds = DaskStore(args).lazy.sel(time=rng.permutation(patches.times))
    shape = {**winds.sizes, "time": min(train.MAPS_AT_ONCE, len(patches.times))}
    for item in epochs(Xbatcher(patches, winds, args.patches_per_block, **shape), 1):
        for batch in torch.from_numpy(rng.permutation(len(item["target"]))).split(
            args.batch_size
        ):
            yield {name: values[batch] for name, values in item.items()}


# --------------------------------------------------------------------------------------------- the limit


def decode(chunk: bytes, out: np.ndarray) -> None:
    """A chunk of make_store.py's, as its `codecs` say: crc32c, last 4 bytes, of what Blosc has compressed."""
    content, checksum = np.split(np.frombuffer(chunk, "uint8"), [-4])
    if google_crc32c.value(content) != checksum.view("<u4")[0]:
        raise OSError("a chunk's checksum is wrong")
    Blosc().decode(content, out)


class Objects(IterableDataset):
    """The maps' objects in an epoch's order, each by a bare GET, decoded or not. An item stands for a batch.

    Each worker reads all of them: another client of the server.
    """

    def __init__(self, patches: train.Patches, args: argparse.Namespace, decoded: bool):
        self.patches, self.decoded, self.variables = patches, decoded, args.variables
        self.per_batch = len(args.variables) * args.batch_size // args.patches_per_block

    def keys(self) -> Iterator[str]:
        for epoch in count():
            for time in train.epoch_order(
                self.patches.seed, epoch, len(self.patches.times)
            ):
                yield from (
                    f"{name}/c/{self.patches.places[time]}/0/0"
                    for name in self.variables
                )

    def __iter__(self) -> Iterator[int]:
        client, mine, keys = (
            self.patches.store.bucket._store.store,
            threading.local(),
            self.keys(),
        )

        def make_room() -> (
            None
        ):  # once for each thread: new memory costs as much as decoding
            mine.out = np.empty(self.patches.valid.shape, "float32")

        def read(key: str) -> int:
            found = obstore.get(client, key).bytes()
            if self.decoded:
                decode(found, mine.out)
            return len(found)

        threads = ThreadPoolExecutor(train.MAPS_AT_ONCE, initializer=make_room)
        try:
            begun = deque(
                threads.submit(read, key)
                for key in islice(keys, 2 * train.MAPS_AT_ONCE)
            )
            while True:
                size = 0
                for key in islice(keys, self.per_batch):
                    size += begun.popleft().result()
                    begun.append(threads.submit(read, key))
                yield size
        finally:
            threads.shutdown(cancel_futures=True)


def read_objects(
    patches: train.Patches, args: argparse.Namespace, decoded: bool
) -> DataLoader:
    return DataLoader(Objects(patches, args, decoded), None, **workers(args))


# ------------------------------------------------------------------------------------------- measurements


class Reader(NamedTuple):
    """A way to get batches, and what its rows say of it."""

    role: str
    read: Callable[[train.Patches, argparse.Namespace], Iterable]
    settings: list[tuple[int, int]]  # patches cut from a map that is read, and workers
    exact_resume: bool | None = None
    resume: str = "gives no batches"
    package: str | None = None  # of the group peers
    what: str = "batches"


USERS, BEST, ONE, BLOCKS = (
    "as users call it",
    "at its best",
    [(1, 0)],
    [(8, 0), (32, 0)],
)
SAMPLER = (
    "by chapter 3's sampler, which asks for samples by number; no order of its own"
)
GRID = "DataLoader's shuffle is not seeded by step; it knows only the patches of a fixed grid"
MAPS = "no seeded order and no place in it; the times that fill no item are left out"
LENT = "by our loader, for which it reads the maps; no order of its own"
READERS = {
    "naive xarray": Reader(
        USERS, partial(read_samples, store=XarrayStore), ONE, True, SAMPLER
    ),
    "xarray, workers": Reader(
        BEST, partial(read_samples, store=XarrayStore), [(1, 4)], True, SAMPLER
    ),
    "Dask, a sample": Reader(
        USERS, partial(read_samples, store=DaskStore), ONE, True, SAMPLER
    ),
    "Dask, a batch": Reader(BEST, read_dask_batches, ONE, True, SAMPLER),
    "xbatcher, a sample": Reader(USERS, read_xbatcher, ONE, False, GRID, "xbatcher"),
    "xbatcher, whole maps": Reader(
        BEST, read_xbatcher_maps, BLOCKS, False, MAPS, "xbatcher"
    ),
    "tensorstore, a sample": Reader(
        USERS,
        partial(read_samples, store=TensorStore),
        ONE,
        True,
        SAMPLER,
        "tensorstore",
    ),
    "tensorstore, whole maps": Reader(
        BEST, read_tensorstore_maps, BLOCKS, True, LENT, "tensorstore"
    ),
    "ours": Reader(
        "ours",
        train.make_loader,
        [*BLOCKS, (8, 1), (32, 1)],
        True,
        "order is a function of (seed, step)",
    ),
    "limit": Reader(
        "limit", partial(read_objects, decoded=True), BLOCKS, what="bytes decoded"
    ),
    "bare GETs": Reader(
        "server", partial(read_objects, decoded=False), [(8, 0), (8, 2)], what="bytes"
    ),
}


def peak_memory_mb() -> float:
    """Of this process, the peak; of its workers, what they hold, with what they share counted for each."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return (
        peak
        + sum(
            each.memory_info().rss for each in psutil.Process().children(recursive=True)
        )
    ) / 1e6


def measure(
    reader: Reader, server: Server, args: argparse.Namespace, seconds: float
) -> dict[str, float]:
    """Take batches for some seconds, after the first group, in which a loader fills what it reads ahead."""
    patches = train.make_patches(args)[0]
    # After so many batches all begins anew: our lanes change maps, an item of whole maps is used up.
    lanes, item = (
        maps * args.patches_per_block
        for maps in (args.shuffle_blocks, train.MAPS_AT_ONCE)
    )
    group = math.lcm(lanes, item, args.batch_size) // args.batch_size
    imported, began = peak_memory_mb(), perf_counter()
    batches = iter(reader.read(patches, args))
    next(batches)
    found = {"first_batch_s": perf_counter() - began}
    for _ in range(group - 1):
        next(batches)
    began, steps = (
        perf_counter(),
        0,
    )  # before the counts: while they are asked for, a loader reads ahead
    before = np.append(server.counts(), cpu_seconds())
    while not steps or steps % group or perf_counter() - began < seconds:
        next(batches)
        steps += 1
    samples, took = steps * args.batch_size, perf_counter() - began
    requests, size, server_cpu, client_cpu = (
        np.append(server.counts(), cpu_seconds()) - before
    ).tolist()
    found |= {"samples_per_second": samples / took, "mb_per_second": size / 1e6 / took}
    found |= {
        "requests_per_sample": requests / samples,
        "bytes_per_sample": size / samples,
    }
    found |= {
        "client_cpu_ms": 1e3 * client_cpu / samples,
        "server_cpu_ms": 1e3 * server_cpu / samples,
    }
    return found | {"peak_memory_mb": peak_memory_mb(), "memory_before_mb": imported}


def measure_apart(
    name: str, server: Server, per_block: int, workers: int, seconds: float
) -> dict[str, float]:
    """The same, by this script in a process of its own, which prints it; SystemExit if it fails."""
    flags = STORE_FLAGS(
        LAYOUT, server, "--patches-per-block", per_block, "--num-workers", workers
    )
    command = [
        sys.executable,
        __file__,
        "--measure",
        json.dumps([name, server, flags, seconds]),
    ]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{name}: could not be measured; its error is above")
    return json.loads(run.stdout.splitlines()[-1])


def compare(names: list[str], repeats: int, seconds: float) -> list[dict]:
    """A row for each reader and setting, all measured in turn and several times."""
    cases = [(name, *setting) for name in names for setting in READERS[name].settings]
    runs = {case: [] for case in cases}
    with benchmark.serve(LATENCY_MS) as server:
        for name, *setting in tqdm(repeats * cases, "readers", disable=None):
            runs[name, *setting].append(measure_apart(name, server, *setting, seconds))
    rows = []
    for (name, per_block, number), found in runs.items():
        reader, limit = READERS[name], runs.get(("limit", per_block, 0))
        row = {
            "reader": name,
            "as": reader.role,
            "what": reader.what,
            "latency_ms": LATENCY_MS,
        }
        row |= {"patches_per_block": per_block, "num_workers": number}
        row["samples_per_second"] = spread([run["samples_per_second"] for run in found])
        if limit:  # of the same round: the machine is not as fast in all of them
            shares = [
                run["samples_per_second"] / of["samples_per_second"]
                for run, of in zip(found, limit)
            ]
            row["share_of_limit"] = median(shares)
        row |= {
            figure: median(run[figure] for run in found)
            for figure in found[0]
            if figure not in row
        }
        row |= {"exact_resume": reader.exact_resume, "resume": reader.resume}
        rows.append(
            row | ({"version": version(reader.package)} if reader.package else {})
        )
    return rows


def show(rows: list[dict]) -> None:
    print(
        f"{'':24} P workers  samples/s  of limit  first batch, s  requests       MB  CPU, ms  memory, MB"
    )
    for row in rows:
        share = f"{row['share_of_limit']:.2f}" if "share_of_limit" in row else ""
        print(
            f"{row['reader']:24}{row['patches_per_block']:2}{row['num_workers']:8}"
            f"{row['samples_per_second']['median']:11.0f}{share:>10}{row['first_batch_s']:16.2f}"
            f"{row['requests_per_sample']:10.2f}{row['bytes_per_sample'] / 1e6:9.2f}"
            f"{row['client_cpu_ms']:9.2f}{row['peak_memory_mb']:12.0f}"
        )


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare the readers asked for, print their rows, and save them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "readers",
        nargs="*",
        default=list(READERS),
        metavar="READER",
        help=f"of {', '.join(READERS)}",
    )
    add(
        "--repeats",
        type=int,
        default=3,
        help="of each measurement, in turn with the others (default: 3)",
    )
    add(
        "--seconds",
        type=float,
        default=5,
        help="that each goes on, at least (default: 5)",
    )
    add(
        "--quick",
        action="store_true",
        help="a tiny store, once: that it works, not what it finds",
    )
    add("--save-results", action="store_true", help="write results/compare.json")
    add(
        "--measure", type=json.loads, help=argparse.SUPPRESS
    )  # one reader, in this process
    args = parser.parse_args(argv)
    if args.measure:
        name, server, flags, seconds = args.measure
        found = measure(
            READERS[name], Server(*server), train.parse_arguments(flags), seconds
        )
        print(json.dumps(found))
        return []
    if args.repeats < 1:
        train.refuse(f"--repeats {args.repeats}: give at least 1")
    if args.quick and args.save_results:
        train.refuse(
            "--save-results: the figures of --quick say nothing; leave one of them out"
        )
    for name in args.readers:
        if name not in READERS:
            train.refuse(f"{name}: no such reader; choose from {', '.join(READERS)}")
        if (package := READERS[name].package) and not find_spec(package):
            train.refuse(f"{name}: {package} is not installed; run `{COMMAND}`")
    if args.quick:
        benchmark.SIZE.update(benchmark.QUICK)
        args.repeats, args.seconds = 1, 0.1
    benchmark.make_stores()
    rows = compare(args.readers, args.repeats, args.seconds)
    show(rows)
    if args.save_results:
        benchmark.save(
            "compare", rows, [COMMAND, *(sys.argv[1:] if argv is None else argv)]
        )
    return rows


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="zarr")
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores, which wait
    main()
