"""What the winds' patches, blocks and values need. Another task needs another such file."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch.utils.data import default_collate

from block_loader import BlockLoader
from block_order import BlockOrder
from data import Data, Grid, PatchDataset, PatchMaker, Reader
from datamodule import WindDataModule, count_readers
from fields import split_times
from location import Location
from model import Batch
from options import Options
from preflight.findings import Finding
from preflight.machine import free_memory
from preflight.memory import Memory, add_up, blocks_waiting, judge_memory
from preflight.store import RETRY_TIMEOUT, Rate, block_bytes, check_store
from prices import read_prices
from store import FieldReader
from store_defaults import complete
from task import example_input, make_model

PRICES = Path(__file__).parent.parent / "prices.toml"
MAPS = 48  # that are searched for bad values
MAPS_AT_ONCE = 16


def open_and_check(
    fabric: Fabric, options: Options, location: Location, rates: list[Rate]
) -> Iterator[Finding]:
    """The store, the memory that its patches and maps take, and how fast it is.

    A store that does not answer is given up soon. Rates are put into `rates`.
    """
    location = replace(location, snapshot=options.snapshot)
    soon = replace(location, retry_timeout=RETRY_TIMEOUT)
    asked_for = (options.variables, options.level, options.missing_chunks)
    fields = FieldReader(soon, *asked_for).open()
    options = complete(options, fields)
    sizes = ", ".join(f"{dim} {size}" for dim, size in fields.sizes.items())
    yield Finding("store", f"opens; {sizes}")
    Grid(fields.latitude.values, fields.longitude.values).patch_space(
        options.patch_size
    )
    period = split_times(fields.time, {"--train-times": options.train_times})[0]
    reader = FieldReader(location, *asked_for)
    blocks = reader.split_by_chunk(period.positions)
    size = block_bytes(reader, blocks)

    free = free_memory(options.devices)
    on_device = None
    if fabric.device.type == "cuda":
        on_device = torch.cuda.mem_get_info(fabric.device)[0]
    yield judge_memory(add_up_memory(fabric, options, size), free, on_device)
    prices = read_prices(PRICES)
    per_block = options.patches_per_block
    yield from check_store(reader, period, per_block, prices, free // 4, rates)


def add_up_memory(fabric: Fabric, options: Options, block: int) -> Memory:
    """What this rank will hold. A block, of one variable, has so many bytes."""
    size = options.patch_size
    batch_size = options.batch_size
    per_block = options.patches_per_block
    order = BlockOrder(
        blocks=options.shuffle_slots,  # at least: then most is held
        batch_size=batch_size,
        slots=options.shuffle_slots,
        patches_per_block=per_block,
        seed=options.seed,
    )
    loader = BlockLoader(order, [], read_block=None, make_batch=None)
    workers = options.num_workers
    samples = samples_at_once(options, fabric)
    waiting = blocks_waiting(
        slots=math.ceil(options.shuffle_slots / fabric.world_size),
        batch=samples,
        patches_per_block=per_block,
        ahead=loader.blocks_ahead,
        workers=workers,
        readers=count_readers(workers, order, options.accumulate_grad_batches),
    )
    patch = 4 * len(options.variables) * size**2
    waiting *= per_block * patch
    waiting += max(1, workers) * loader.blocks_ahead * block  # being read

    inputs = example_input(options).to(memory_format=torch.channels_last)
    inputs = fabric.to_device(inputs)
    module = fabric.to_device(make_model(options))
    with fabric.autocast():
        return add_up(module, inputs, samples, fabric.world_size, waiting)


def samples_at_once(options: Options, fabric: Fabric) -> int:
    """How many samples a rank has in a micro-batch, at most."""
    pieces = fabric.world_size * options.accumulate_grad_batches
    return math.ceil(options.batch_size / pieces)


def patch_bytes(options: Options) -> int:
    """A sample in a batch: input, target, unseen and weight, in float32."""
    return 4 * (2 * len(options.variables) + 3) * options.patch_size**2


def check_climatology(data: Data) -> Finding:
    """Red if a month of any period has no climatology at all: all its cells are left out."""
    shares = data.climatology_shares()
    worst = min(shares, key=shares.get)
    text = f"in {worst}, the worst month, {shares[worst]:.1%} of the cells have one"
    if shares[worst]:
        return Finding("climatology", text)
    none = ", ".join(month for month, share in shares.items() if not share)
    remedy = f"give --train-times that have several years of {none}, or other periods"
    return Finding("climatology", text, remedy)


def check_values(module: WindDataModule) -> Finding:
    """Look at whole maps of each period for values that would end a run."""
    makers = {
        "training": module.blocks.maker,
        "validation": module.validation.maker,
        "test": module.test.maker,
    }
    reader = module.data.reader
    searched = []
    for name, maker in makers.items():
        number = len(maker.period.dates)
        times = choose_times(number)
        searched.append(f"{len(times)} of {number:,} {name}")
        for some in np.array_split(times, math.ceil(len(times) / MAPS_AT_ONCE)):
            finding = search_maps(reader, maker, some)
            if finding:
                return finding
    return Finding("values", f"no bad one in {', '.join(searched)} maps")


def choose_times(number: int) -> np.ndarray:
    """Some random times of so many, or all if there are few."""
    rng = np.random.default_rng(0)
    return np.sort(rng.permutation(number)[:MAPS])


def search_maps(reader: Reader, maker: PatchMaker, times: np.ndarray) -> Finding | None:
    """A finding that names the first bad value, or None."""
    period = maker.period
    boxes = [{"time": period.positions[time]} for time in times]
    maps = reader.read_at_once(boxes)
    bad = find_bad(maps, maker)
    if not bad.any():
        return None
    n, number = np.argwhere(bad.any(axis=(2, 3)))[0]
    date = str(period.dates[times[n]])[:16]
    text = f"{maker.variables[number]} on {date}: NaN or infinity"
    text += f" in {bad[n, number].sum():,} cells"
    remedy = "replace infinities; --missing mask leaves cells with NaN out"
    return Finding("values", text, remedy)


def find_bad(maps: np.ndarray, maker: PatchMaker) -> np.ndarray:
    """Where a value must not be what it is, in maps (times, variables, H, W).

    A cell may be NaN at all times, and under --missing mask at any time.
    """
    bad = np.isinf(maps)
    if maker.missing == "refuse":
        bad |= np.isnan(maps) & maker.valid
    return bad


def take_batch(module: WindDataModule, count: int) -> Batch:
    """So many samples of the training."""
    size = module.hparams.batch_size
    seed = module.hparams.seed
    dataset = PatchDataset(module.blocks.maker, module.data.reader, size, seed)
    return default_collate(dataset.__getitems__([(0, k) for k in range(count)]))
