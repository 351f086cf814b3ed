"""Chapter 4: block by block, no sample is lost, doubled or changed, whoever reads it and however often it is killed."""

import asyncio
import gc
import importlib
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import book
import numpy as np
import obstore
import obstore.exceptions
import programs
import pytest
import torch
import zarr
from obstore.store import MemoryStore
from test_01_setup import weights
from test_02_multi_gpu import losses, rmse
from test_03_cloud_data import at, buckets, serve, server, winds, write  # noqa: F401  (fixtures)
from torch.utils.data import DataLoader
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.registry import register_pipeline
from zarr.storage import ObjectStore

CHAPTER = book.ROOT / "04_data_pipeline"
TRAIN = "04_data_pipeline/train.py"
SMALL = "--patch-size 16 --batch-size 12 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()
SMALL += ["--patches-per-map", "40"]
YEARS = slice("1982", "1990")
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]


def load(name: str) -> list:
    """Import a script of this chapter with its own neighbours, whose names chapter 3's have, too."""
    neighbours = ("object_store", "loader")
    others = {other: sys.modules.pop(other) for other in neighbours if other in sys.modules}
    sys.path.insert(0, str(CHAPTER))
    try:
        return [importlib.import_module(module) for module in (name, "object_store")]
    finally:
        sys.path.remove(str(CHAPTER))
        sys.modules |= others


loader, object_store = load("loader")
LAYOUTS = [
    "v3.zarr",
    "v2.zarr",
    "sharded.zarr",
    "weatherbench.zarr",
    "west_to_east.zarr",
    "winds.nc",
    "references.json",
]


def blocks_of(store: object, lanes: int = 8, per_map: float = 40, batch: int = 12, **options):
    opened = object_store.Winds(object_store.Access(str(store), anonymous=True), NAMES, YEARS)
    mean, std = np.zeros((2, 1, 1), "f4"), np.ones((2, 1, 1), "f4")
    made = loader.BlockPatches(opened, mean, std, 16, batch, 0, lanes, per_map, **options)
    return made


def read(patches, steps: range, ks: range | None = None) -> list[dict]:
    ks = ks or range(patches.batch_size)
    return [patches.__getitems__([(step, k) for k in ks]) for step in steps]


# ----------------------------------------------------------------------------------------- which patches


@pytest.mark.parametrize("lanes", [1, 5, 8, 24, 100_000])
def test_no_patch_is_lost_or_doubled_in_a_round(buckets, lanes) -> None:
    patches = blocks_of(buckets / "bucket/west_to_east.zarr", lanes, per_map=7)
    each = patches.batch_size // patches.slots
    steps = patches.turns * (2 * max(patches.totals) // each + 1)
    seen = {lane: [] for lane in range(patches.lanes)}
    for step in range(steps):
        for k in range(patches.batch_size):
            lane, number, patch = patches.locate(step, k)
            seen[lane].append((number, patch))
    blocks = []
    for lane, order in seen.items():
        share = patches.shares[lane]
        for this_round in range(2):
            drawn = order[this_round * patches.totals[lane] : (this_round + 1) * patches.totals[lane]]
            visits = [patches.visit(lane, number).block for number, _ in drawn]
            expected = Counter({(block, p): 1 for block in share for p in range(patches.patches[block])})
            assert Counter((block, p) for block, (_, p) in zip(visits, drawn)) == expected
        blocks += list(share)
    assert sorted(blocks) == sorted(patches.blocks)


@pytest.mark.parametrize(("lanes", "slots"), [(1, 1), (5, 4), (8, 6), (13, 12), (33, 12), (100_000, 12)])
def test_a_batch_mixes_as_many_blocks_as_are_asked_for(buckets, lanes, slots) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr", lanes)
    assert lanes == 100_000 or lanes - 12 < patches.lanes <= lanes
    for step in range(2 * patches.turns):
        assert len({patches.locate(step, k)[0] for k in range(12)}) == slots


@pytest.mark.parametrize("per_map", [3, 8, 100])
def test_every_part_of_the_map_is_cut_as_densely(buckets, per_map) -> None:
    """Also where a block of one time has less than one patch; and no lane comes to its blocks more often."""
    patches = blocks_of(buckets / "bucket/v3.zarr", lanes=8, per_map=per_map)
    times, rows, columns = (np.diff(span)[:, 0] for span in patches.spans)
    drawn = patches.patches.reshape(len(times), -1).sum(axis=0)
    share = np.outer(rows, columns).ravel() / (rows.sum() * columns.sum())
    assert max(share) > 2 * min(share)  # else there is nothing to show
    assert abs(drawn - per_map * times.sum() * share).max() <= 1
    assert max(patches.totals) <= 1.1 * min(patches.totals)


def test_each_time_is_used_equally_and_each_corner_is_as_likely(buckets) -> None:
    patches = blocks_of(buckets / "bucket/west_to_east.zarr", lanes=1, per_map=60)
    visits = [patches.visit(0, number) for number in range(2 * len(patches.patches))]
    times = Counter(int(time) for visit in visits for time in visit.cell[:, 0])
    assert len(times) == len(patches.times) and max(times.values()) - min(times.values()) <= len(visits) // 5
    for visit in visits:
        within = Counter(visit.cell[:, 0].tolist())
        assert max(within.values()) - min(within.values()) <= 1  # of one block, not more than a rounding
    _, rows, columns = np.concatenate([visit.cell for visit in visits]).T
    assert rows.min() == 0 and rows.max() == len(patches.latitude) - 16
    assert columns.min() == 0 and columns.max() == len(patches.longitude) - 1
    for drawn, n in (
        (rows, 73 - 15),
        (columns, 144),
    ):  # the second half as often as the first, within 3 sigma
        share, sigma = np.mean(drawn >= n / 2), 0.5 / np.sqrt(len(drawn))
        assert (
            abs(share - np.mean(np.arange(n) >= n / 2)) < 3 * sigma + 0.01
        )  # + the rounding of patches a block


def test_all_chunks_of_a_read_are_asked_for_at_once(buckets, monkeypatch) -> None:
    """Zarr by itself asks for ten at a time, of however many, and however many requests are allowed."""
    patches, under_way, most = blocks_of(buckets / "bucket/v3.zarr", lanes=1), 0, 0
    ask = object_store.SteadyStore.ask

    async def count(*arguments: object) -> object:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)  # so that those asked for meanwhile are counted
        under_way -= 1
        return await ask(*arguments)

    monkeypatch.setattr(object_store.SteadyStore, "ask", count)
    box = np.arange(4), np.arange(73), np.arange(144)
    numbers = [np.unique(chunk[cells]) for chunk, cells in zip(patches.winds.chunk_numbers(), box)]
    of_box = math.prod(map(len, numbers))
    loader.sync(patches.winds.read_box(slice(0, 4), *box[1:]))
    assert most == patches.winds.access.max_requests < 2 * of_box  # of both components


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_patch_is_what_the_store_holds_there(buckets, layout, monkeypatch) -> None:
    monkeypatch.syspath_prepend(CHAPTER)  # make_references.py is imported when it is needed
    patches = blocks_of(buckets / "bucket" / layout)
    truth = object_store.Winds(object_store.Access(str(buckets / "bucket/winds.nc")), NAMES, YEARS)
    cells, seams = np.arange(16), 0
    for step in range(12):
        batch = patches.__getitems__([(step, k) for k in range(12)])
        for k in range(12):
            time, row, column, chance = patches.sample(step, k)
            expected = truth.read([(time, row + cells, (column + cells) % 144)])[0]
            assert np.array_equal(batch["wind"][k], expected)
            assert np.array_equal(batch["chance"][k], chance)
            assert np.allclose(
                batch["cosine"][k, 0, :, 0], np.cos(np.deg2rad(truth.latitude[row + cells])).clip(0)
            )
            seams += column > 144 - 16
    assert seams > 3  # patches that cross the map's seam


@pytest.mark.parametrize("chunks", [(10, 8, 8), (7, 40, 40), (100, 200, 200)])  # of a patch of 16
def test_blocks_of_a_region_that_begins_earlier(winds, tmp_path, chunks) -> None:
    """No seam, times that are not trained on before the first, and chunks of any size beside a patch's."""
    region = winds.isel(longitude=slice(20, 91), latitude=slice(3, 60))
    region = region.assign_coords(time=region.time - np.timedelta64(600, "D"))
    patches = blocks_of(write(region, tmp_path / "region.zarr", chunks), lanes=4)
    assert 0 < len(patches.times) < region.sizes["time"]
    cells, seen = np.arange(16), set()
    for step in range(30):
        batch = patches.__getitems__([(step, k) for k in range(12)])
        for k in range(12):
            time, row, column, _ = patches.sample(step, k)
            seen.add(int(column))
            assert column <= 71 - 16
            expected = patches.winds.read([(time, row + cells, column + cells)])[0]
            assert np.array_equal(batch["wind"][k], expected)
    assert max(seen) > 40
    patches.close()


def test_a_sample_may_be_asked_for_by_itself(buckets) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr")
    batch, one = read(patches, range(1))[0], patches[0, 5]
    assert all(np.array_equal(batch[name][5], one[name]) for name in one)


def test_samples_may_be_asked_for_in_any_order(buckets) -> None:
    """A DataLoader asks step by step; a sampler of your own need not."""
    patches, chance = blocks_of(buckets / "bucket/v3.zarr", lanes=3, per_map=0.7), np.random.default_rng(0)
    wanted = [(int(step), int(k)) for step, k in chance.integers((6, 12), size=(40, 2))]
    batch = patches.__getitems__(wanted)
    patches.close()
    singly = blocks_of(buckets / "bucket/v3.zarr", lanes=3, per_map=0.7)
    for number, index in enumerate(wanted):
        assert np.array_equal(batch["wind"][number], singly[index]["wind"]), index
    singly.close()


def test_a_block_that_could_not_be_read_is_asked_for_once_more(buckets, tmp_path) -> None:
    store = tmp_path / "v3.zarr"
    shutil.copytree(buckets / "bucket/v3.zarr", store)
    patches, expected = blocks_of(store), read(blocks_of(store), range(1))[0]
    shutil.move(store / NAMES[0], tmp_path / "away")
    with pytest.raises(object_store.StoreError, match="no such object"):
        read(patches, range(1))
    while not all(block.done() for _, block in patches.held.values()):
        time.sleep(0.01)
    shutil.move(tmp_path / "away", store / NAMES[0])
    with suppress(object_store.StoreError):  # what else has failed by now is said once, and forgotten
        read(patches, range(1))
    assert np.array_equal(read(patches, range(1))[0]["wind"], expected["wind"])
    patches.close()


def test_of_a_store_of_which_next_to_nothing_is_cut_a_block_is_left(buckets) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr", lanes=4, per_map=1e-9)
    assert len(patches.blocks) == patches.lanes == 1 and len(read(patches, range(1))) == 1
    patches.close()


def test_long_chunks_make_blocks_that_are_narrower(winds, tmp_path, monkeypatch) -> None:
    """A block is about eight patches across, unless its times make it larger than BLOCK_BYTES."""
    write(winds, tmp_path / "long.zarr", (50, 8, 8))
    assert max(np.diff(blocks_of(tmp_path / "long.zarr").spans[2])) == 8 * 16
    monkeypatch.setattr(loader, "BLOCK_BYTES", 8 * 50 * 24**2)
    assert max(np.diff(blocks_of(tmp_path / "long.zarr").spans[2])) == 24


def test_chunks_of_a_read_are_decoded_in_one_turn_of_a_thread(buckets, monkeypatch) -> None:
    alone, turns = read(blocks_of(buckets / "bucket/v3.zarr"), range(4)), []
    register_pipeline(object_store.OneTurn)  # Zarr knows it by name: another test's copy may stand there
    decode = object_store.OneTurn.decode_here

    def note(pipeline, pairs: list) -> list:
        turns.append((len(pairs), asyncio._get_running_loop() is None))
        return decode(pipeline, pairs)

    monkeypatch.setattr(object_store.OneTurn, "decode_here", note)
    monkeypatch.setattr(object_store, "LITTLE", 0)
    threaded = read(blocks_of(buckets / "bucket/v3.zarr"), range(4))
    assert max(count for count, _ in turns) > 4 and all(in_a_thread for _, in_a_thread in turns)
    assert all(np.array_equal(a["wind"], b["wind"]) for a, b in zip(alone, threaded))


@pytest.mark.parametrize("place", ["s3://", "http://"])
def test_an_object_of_a_bucket_comes_in_one_answer(place, buckets, server, monkeypatch) -> None:
    """As a range, not its head and then its body. A plain web server, which may know no ranges, is asked for all."""
    for name, value in at(server).items():
        monkeypatch.setenv(name, value)
    patches = blocks_of(f"{'s3:/' if place == 's3://' else server}/bucket/v3.zarr")
    expected = read(blocks_of(buckets / "bucket/v3.zarr"), range(4))
    get, heads = obstore.get_async, []
    monkeypatch.setattr(
        obstore, "get_async", lambda *args, **options: heads.append(1) or get(*args, **options)
    )
    batches = read(patches, range(4))
    assert reads_of(patches) > 0
    patches.close()
    assert bool(heads) == (place == "http://")
    assert all(np.array_equal(a["wind"], b["wind"]) for a, b in zip(batches, expected))


def in_memory(**objects: bytes):
    memory = MemoryStore()
    for name, value in objects.items():
        memory.put(name, value)
    return object_store.SteadyStore(ObjectStore(memory), object_store.Access("s3://bucket", deadline=5))


def get(store, name: str) -> bytes:
    return sync(store.get(name, default_buffer_prototype())).to_bytes()


def test_an_object_that_is_empty_is_read_at_once() -> None:
    """A server refuses any range of it, and no second attempt would do better."""
    store = in_memory(whole=b"value", empty=b"")
    assert [get(store, name) for name in ("whole", "empty", "whole")] == [b"value", b"", b"value"]
    assert store.take_log()[:, 2].max() == 1 and store.whole  # others still come in one answer


@pytest.mark.parametrize(
    "said",
    [
        "Received non-partial response when range requested",
        "Requested 0..1012, got 0..1000",
        "Content-Range header not present in partial response",
    ],
)
def test_a_server_that_knows_no_ranges_is_asked_for_whole_objects(said: str, monkeypatch) -> None:
    store, asked = in_memory(whole=b"value"), []

    async def refuse(*args: object, **options: object) -> None:
        asked.append(args)
        raise obstore.exceptions.GenericError(said)

    monkeypatch.setattr(obstore, "get_range_async", refuse)
    assert [get(store, "whole") for _ in range(3)] == 3 * [b"value"]
    assert len(asked) == 1 and store.take_log()[:, 2].max() == 1


def test_blocks_of_the_next_turn_are_read_during_this_one(buckets) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr", lanes=24)
    read(patches, range(1))
    assert {lane // patches.slots for lane, _ in patches.held} == {0, 1}
    patches.close()


def test_a_patch_does_not_depend_on_who_reads_it(buckets) -> None:
    store = buckets / "bucket/west_to_east.zarr"
    alone = read(blocks_of(store), range(30))
    for ranks in (2, 3, 4):
        parts = [
            read(blocks_of(store), range(30), range(r * 12 // ranks, (r + 1) * 12 // ranks))
            for r in range(ranks)
        ]
        for step, whole in enumerate(alone):
            assert np.array_equal(np.concatenate([part[step]["wind"] for part in parts]), whole["wind"])
            assert np.array_equal(np.concatenate([part[step]["chance"] for part in parts]), whole["chance"])
    late = read(blocks_of(store), range(17, 30))  # as a resumed run begins
    assert all(np.array_equal(a["wind"], b["wind"]) for a, b in zip(late, alone[17:]))


class Steps:
    def __init__(self, first: int, last: int):
        self.steps = range(first, last)

    def __iter__(self):
        return iter([[(step, k) for k in range(12)] for step in self.steps])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_same_batches(buckets, workers) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr")
    options = {"batch_sampler": Steps(3, 15), "collate_fn": patches.collate}
    alone = list(DataLoader(patches, **options))
    shared = list(DataLoader(patches, num_workers=workers, multiprocessing_context="fork", **options))
    assert len(alone) == len(shared) == 12
    assert all(torch.equal(a["wind"], b["wind"]) for a, b in zip(alone, shared))


# ------------------------------------------------------------------------------------- what reading costs


def reads_of(patches) -> int:
    return len(patches.winds.take_log())


def test_a_block_is_read_once_and_serves_many_patches(buckets, server, monkeypatch) -> None:
    for name, value in at(server).items():
        monkeypatch.setenv(name, value)
    patches = blocks_of("s3://bucket/v3.zarr", lanes=4, per_map=150)
    reads_of(patches)  # of coordinates
    read(patches, range(40))
    started = [patches.locate(40, 3 * lane)[1] + 2 for lane in range(4)]  # visits begun, with the next one
    blocks = [patches.visit(lane, number).block for lane in range(4) for number in range(started[lane])]
    patches.close()
    chunks = 0
    for block in blocks:
        _, row, column = patches.corners(block)
        rows = {int(patches.winds.rows[r]) // 32 for r in range(row[0], row[1] + 15)}
        columns = {int(patches.winds.columns[c % 144]) // 48 for c in range(column[0], column[1] + 15)}
        chunks += 2 * len(rows) * len(columns)
    requests = reads_of(patches)
    assert 0 < requests <= chunks
    one_by_one = loader.WindPatches(patches.winds, patches.mean, patches.std, 16, 12, 0)
    for step in range(40):
        one_by_one.__getitems__([(step, k) for k in range(12)])
    assert reads_of(patches) > 4 * requests


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_and_workers_share_the_blocks_among_them(buckets, ranks, workers, monkeypatch) -> None:
    """No block is read twice, if ranks divide the lanes of a step, and workers the turns."""
    store, begun = buckets / "bucket/v3.zarr", []
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(num_workers=workers))
    for rank in range(ranks):
        for worker in range(workers):
            patches = blocks_of(store, lanes=24)
            assert (patches.slots, patches.turns) == (12, 2)
            share = range(rank * 12 // ranks, (rank + 1) * 12 // ranks)
            mine: set = set()
            for step in range(worker, 40, workers):
                patches.__getitems__([(step, k) for k in share])
                mine |= patches.held.keys()
            begun += list(mine)
    assert len(begun) == len(set(begun))


def test_memory_is_bounded_by_the_formula(buckets) -> None:
    patches = blocks_of(buckets / "bucket/west_to_east.zarr", lanes=6, per_map=20)
    most = most_of_all = 0
    only_numpys = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
    tracemalloc.start()
    for step in range(60):
        patches.__getitems__([(step, k) for k in range(12)])
        assert len(patches.held) <= 2 * patches.lanes
        blocks = [task for _, task in patches.held.values()]
        while not all(task.done() for task in blocks):
            time.sleep(0.001)
        most = max(most, sum(array.nbytes for task in blocks for array in task.result()))
        traces = tracemalloc.take_snapshot().filter_traces(only_numpys).traces
        most_of_all = max(most_of_all, sum(trace.size for trace in traces))
    tracemalloc.stop()
    assert 0.5 * patches.memory_bytes < most <= patches.memory_bytes
    assert most <= most_of_all <= 1.05 * patches.memory_bytes  # all of NumPy's: nobody else keeps a block


def test_the_garbage_collector_spares_what_was_imported_while_blocks_are_read(buckets) -> None:
    gc.unfreeze()
    patches = blocks_of(buckets / "bucket/v3.zarr")
    assert gc.get_freeze_count() == 0
    read(patches, range(1))
    assert gc.get_freeze_count() > 100_000
    patches.close()
    assert gc.get_freeze_count() == 0
    read(patches, range(1, 2))  # a closed one may be read again
    assert gc.get_freeze_count() > 100_000
    patches.close()
    patches.close()


def test_a_read_that_fails_as_it_is_called_off_prints_nothing(buckets, monkeypatch, caplog) -> None:
    """asyncio prints the traceback of a task's error that nobody asked for: in a program, before its one line."""
    patches = blocks_of(buckets / "bucket/v3.zarr")

    async def fail(*_: object) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise object_store.StoreError("no such object")

    monkeypatch.setattr(patches.winds, "read_box", fail)
    patches.hold({0: 0, 1: 0})
    time.sleep(0.1)
    patches.close()
    gc.collect()
    assert not caplog.records, caplog.text


def test_nothing_but_its_users_keeps_a_reader_and_its_blocks(buckets) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr")
    read(patches, range(1))
    while not all(block.done() for _, block in patches.held.values()):
        time.sleep(0.01)
    still = weakref.ref(patches)
    del patches
    gc.collect()  # while all that was there before the first read is frozen, as in a reader's program
    gone = still() is None
    gc.unfreeze()
    assert gone


def test_reading_waits_for_training(buckets, server, monkeypatch) -> None:
    """Back-pressure: while no batch is asked for, no more is read than two blocks for each lane."""
    for name, value in at(server).items():
        monkeypatch.setenv(name, value)
    patches = blocks_of("s3://bucket/v3.zarr", lanes=4, per_map=36)
    read(patches, range(1))
    time.sleep(1)
    assert len(patches.held) == 8
    chunks = 2 * math.prod(len(np.unique(numbers)) for numbers in patches.winds.chunk_numbers()[1:])
    assert 0 < reads_of(patches) <= 8 * chunks
    time.sleep(1)
    assert reads_of(patches) == 0


def test_what_is_sent_to_a_worker_is_small_and_holds_nothing_open(buckets, monkeypatch) -> None:
    for name, module in (("loader", loader), ("object_store", object_store)):
        monkeypatch.setitem(sys.modules, name, module)
    patches = blocks_of(buckets / "bucket/v3.zarr")
    read(patches, range(2))
    sent = pickle.dumps(patches)
    assert len(sent) < 60_000
    assert pickle.loads(sent).held == {}


# --------------------------------------------------------------------------------- made on the device


def test_finish_makes_what_wind_patches_gives(buckets) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr")
    mean, std = np.float32([[[1.5]], [[-0.5]]]), np.float32([[[3.0]], [[4.0]]])
    tensors = {name: torch.from_numpy(array) for name, array in read(patches, range(1))[0].items()}
    made = loader.finish(tensors, torch.tensor(mean), torch.tensor(std))
    plain = loader.WindPatches(patches.winds, mean, std, 16, 12, 0)
    for k in range(12):
        seen = made["input"][k, 2].numpy() > 0
        drawn = (*patches.sample(0, k)[:3], seen)
        target = (tensors["wind"][k].numpy() - mean) / std
        expected = plain.finish((0, k), drawn, target)
        for name in ("input", "target", "weight"):
            assert np.allclose(made[name][k].numpy(), expected[name], rtol=1e-6, atol=1e-7), name
    assert made["noise"].shape == (12, loader.BOTTOM_CHANNELS, 1, 1)


def test_swaths_have_the_statistics_of_chapter_1s() -> None:
    chance = torch.rand(4000, 20, generator=torch.Generator().manual_seed(0))
    made = loader.swath_masks(chance, 64).numpy()
    known = np.stack([loader.swath_mask(np.random.default_rng(i), 64) for i in range(4000)])
    assert abs(made.mean() - known.mean()) < 0.005
    assert np.abs(made.mean(axis=0) - known.mean(axis=0)).max() < 0.06  # nowhere more often than elsewhere
    widths = [np.diff(np.flatnonzero(np.diff(np.r_[0, mask[0], 0].astype(int))))[::2] for mask in made]
    assert set(np.concatenate(widths)) <= {1, 2, 3, 4}
    assert (made.sum(axis=(1, 2)) >= 64).all()
    assert len({mask.tobytes() for mask in made}) > 3000


# ------------------------------------------------------------------------------------------- training


def train(folder: Path, *flags: object, **options) -> programs.Run:
    return programs.require_success(TRAIN, *SMALL, "--output-dir", folder, *flags, **options)


@pytest.fixture(scope="module")
def whole(buckets, tmp_path_factory):
    """An undisturbed run, from a folder."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, "--store", buckets / "bucket/v3.zarr")
    return folder


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("start", ["forkserver", "fork"])
def test_workers_train_the_same_weights(buckets, whole, tmp_path, workers, start) -> None:
    flags = ["--store", buckets / "bucket/v3.zarr", "--num-workers", workers, "--start-method", start]
    train(tmp_path, *flags)
    assert same(whole, tmp_path)


def test_faults_change_no_bit(buckets, whole, tmp_path) -> None:
    faults = ["--error-rate", 0.05, "--reset-rate", 0.02, "--truncate-rate", 0.02, "--latency-ms", 5]
    with serve(buckets, *faults) as address:
        train(tmp_path, "--store", "s3://bucket/v3.zarr", "--anonymous", environment=at(address))
    assert json.loads((tmp_path / "summary.json").read_text())["retries"] > 0
    assert same(whole, tmp_path)


@pytest.mark.parametrize("step", range(7))
def test_a_killed_run_goes_on_to_the_same_bits(buckets, whole, tmp_path, step) -> None:
    flags = ["--store", buckets / "bucket/v3.zarr", "--output-dir", tmp_path]
    killed = programs.run(TRAIN, *SMALL, *flags, kill_at_step=step)
    assert killed.code == -9
    train(tmp_path, "--store", buckets / "bucket/v3.zarr", "--resume")
    assert same(whole, tmp_path)


def test_two_ranks_with_a_worker_each_train_as_one_does(buckets, whole, tmp_path) -> None:
    """The same batches; what differs is the order in which their gradients are summed."""
    flags = [*SMALL, "--store", buckets / "bucket/v3.zarr", "--num-workers", 1, "--output-dir", tmp_path]
    ended = programs.run_ranks(TRAIN, 2, *flags)
    assert [run.code for run in ended] == [0, 0], ended
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)
    assert rmse(tmp_path) == pytest.approx(rmse(whole), rel=1e-5)


def test_a_checkpoint_is_not_resumed_on_other_blocks(buckets, whole, tmp_path) -> None:
    checkpoint = str(whole / "last.ckpt")
    flags = [
        "--store",
        buckets / "bucket/west_to_east.zarr",
        "--resume",
        checkpoint,
        "--output-dir",
        tmp_path / "x",
    ]
    done = programs.run(TRAIN, *SMALL, *flags)
    *_, last = done.err.splitlines()  # after a progress bar, that of the statistics
    assert done.code == 2 and re.match(r"train.py: error: --store crc32 \w+, blocks crc32 \w+: ", last), (
        done.err
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("lanes", "accumulate", "workers", "parts", "times"),
    [(24, 1, 2, 2, 1), (24, 1, 3, 2, 3), (12, 2, 2, 2, 1), (6, 4, 2, 1, 2)],
)
def test_workers_that_cannot_share_the_blocks_are_told(
    buckets, tmp_path, lanes, accumulate, workers, parts, times
) -> None:
    flags = ["--store", buckets / "bucket/v3.zarr", "--shuffle-blocks", lanes, "--num-workers", workers]
    flags += ["--accumulate", accumulate, "--max-steps", 1, "--output-dir", tmp_path]
    done = programs.require_success(TRAIN, *SMALL, *flags)
    told = f"note: --num-workers {workers}: blocks are read {times} times; take a divisor of {parts}"
    assert (told in done.out) == ("note: --num-workers" in done.out) == (times > 1)


@pytest.mark.parametrize(
    ("lanes", "batch", "ranks", "said"),
    [
        (24, 12, 3, ""),
        (6, 12, 4, "note: 4 ranks: some read the same blocks; let them divide the 6 of a step"),
        (10, 11, 1, "note: a step mixes only 1 of 10 blocks: --batch-size 11 has no larger divisor"),
    ],
)
def test_what_ranks_and_steps_cannot_share_is_told(buckets, capsys, lanes, batch, ranks, said) -> None:
    blocks_of(buckets / "bucket/v3.zarr", lanes, batch=batch).tell_sharing(0, ranks, 1)
    printed = capsys.readouterr().out
    assert printed.startswith(said) and bool(printed) == bool(said)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("damage", "reason"), [("gone", "no such object"), ("infinite", "NaN or infinity from 198")]
)
def test_damage_that_is_met_by_reading_ahead_ends_in_one_line(
    buckets, tmp_path, workers: int, damage: str, reason: str
) -> None:
    """The statistics were made before, so nobody has looked at the values but those who train on them."""
    store = tmp_path / "v3.zarr"
    shutil.copytree(buckets / "bucket/v3.zarr", store)
    flags = ["--store", store, "--num-workers", workers]
    train(tmp_path / "before", *flags, "--max-steps", 1)
    if damage == "gone":
        shutil.rmtree(store / NAMES[1] / "c")
    else:
        zarr.open_array(store / NAMES[1], mode="r+")[:90] = np.inf
    done = programs.run(TRAIN, *SMALL, *flags, "--output-dir", tmp_path / "run")
    assert done.code == 2 and "Traceback" not in done.err, done.err
    *_, last = done.err.strip().splitlines()
    assert last.startswith("train.py: error: ") and reason in last, done.err


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_parts_of_a_rank_have_no_block_in_common(buckets, accumulate) -> None:
    patches = blocks_of(buckets / "bucket/v3.zarr", lanes=24)
    for ranks in (1, 2):
        parts, share = patches.parts(ranks, accumulate), 12 // ranks
        assert parts == 2 * accumulate
        lanes, size = {part: set() for part in range(parts)}, share // accumulate
        for batch in range(6 * accumulate):
            step, micro = divmod(batch, accumulate)
            first = share * (ranks - 1) + micro * size  # the last rank's
            ks = range(first, first + size)
            lanes[batch % parts] |= {patches.locate(step, k)[0] for k in ks}
        assert len(set().union(*lanes.values())) == sum(map(len, lanes.values()))


def test_blocks_that_cannot_fit_in_memory_are_refused(buckets, tmp_path) -> None:
    flags = ["--store", str(buckets / "bucket/v3.zarr"), "--output-dir", str(tmp_path / "run")]
    program = (
        f"import os, runpy, sys; os.sysconf = lambda name: 1000; sys.argv = {['train.py', *SMALL, *flags]}; "
    )
    program += "runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=CHAPTER, capture_output=True, text=True)
    error = r"train.py: error: --shuffle-blocks 24: they take 0 GB of this store, and this machine has 0; give fewer"
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.match(error, done.stderr.strip().splitlines()[-1]), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "reason"), [("inf", "give below 2**32"), ("1e8", "cells; give fewer"), ("0", "give at least 1")]
)
def test_patches_of_a_map_have_bounds(buckets, tmp_path, value: str, reason: str) -> None:
    flags = [
        "--store",
        buckets / "bucket/v3.zarr",
        "--patches-per-map",
        value,
        "--output-dir",
        tmp_path / "x",
    ]
    done = programs.run(TRAIN, *flags)
    assert (
        done.code == 2 and done.err.startswith("train.py: error: --patches-per-map ") and reason in done.err
    )
    assert done.err.count("\n") == 1
