"""Chapter 4: block shuffle loses and doubles nothing, its order is a function, and its memory is bounded."""

import gc
import inspect
import json
import math
import re
import shutil
import sys
import threading
import urllib.request
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from unittest.mock import Mock

import book
import buckets
import numpy as np
import programs
import psutil
import pytest
import xarray as xr
import zarr
from runs import assert_resumed, assert_same_bits, assert_same_but_for_rounding, load

CHAPTER, SCRIPT = book.ROOT / "04_data_pipeline", "04_data_pipeline/train.py"
NAME = "chapter_04_train"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
LAYOUTS = {"v3": "", "v2": "--zarr-format 2", "shards": "--shard-times 4", "times": "--chunk 4 32 32"}
OBJECTS, TRAINING_TIMES, COLUMNS = 12, 26, 72
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4".split()
# Each visit of a map is the source of two steps or more, and the four steps need several of a lane.
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-blocks 8 --patches-per-block 2".split()
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
GAP = (slice(5, 25), slice(10, 50))  # rows and columns that one test masks
NAMES = ("input", "target", "unseen", "weight")

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    # Of which train.py shows none, either.
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]
thorough = pytest.mark.thorough
chapter = load(SCRIPT, NAME)


@pytest.fixture(scope="module", autouse=True)
def found_by_workers(tmp_path_factory: pytest.TempPathFactory):
    """Workers of this process import the chapter under the name that it has here."""
    folder = tmp_path_factory.mktemp("path")
    (folder / f"{NAME}.py").symlink_to(book.ROOT / SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, NAME, chapter)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets; its bucket `winds` has a store of each layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name, flags in LAYOUTS.items():
        make_small_store(folder / "winds" / name, flags)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path):
    with buckets.serving(folder, latency_ms=0) as address:
        yield address


@pytest.fixture(scope="module")
def unreliable(folder: Path):
    with buckets.serving(folder, latency_ms=0, **FAULTS) as address:
        yield address


def s3(address: str, name: str = "v3") -> list[str]:
    """The flags that read a store of the bucket."""
    return ["--store", f"s3://winds/{name}", "--endpoint", address, "--anonymous"]


def arguments(*flags: object) -> Namespace:
    return chapter.parse_arguments([*SMALL, *map(str, flags)])


def loader(*flags: object, start=0, rank=0, world_size=1):
    """train.py's loader under these flags, in this process."""
    args = arguments(*flags)
    return chapter.make_loader(chapter.make_patches(args)[0], args, start, rank, world_size)


def mixing(batch: int, lanes: int, per_block: int) -> list[str]:
    """The flags that decide which maps a batch is from."""
    return f"--batch-size {batch} --shuffle-blocks {lanes} --patches-per-block {per_block}".split()


def assert_same(batches: list[dict], others: list[dict]) -> None:
    """The same batches, to the bit, whatever was read for them."""
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others):
        for name in NAMES:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The visits that are opened, and their blocks, from now on."""
    visits, start = {}, chapter.Blocks.start

    def call(self, visit: int, threads):
        assert visit not in visits, "opened twice"
        visits[visit] = start(self, visit, threads)
        return visits[visit]

    monkeypatch.setattr(chapter.Blocks, "start", call)
    return visits


@pytest.fixture
def refused(capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(*flags: object) -> str:
        with pytest.raises(SystemExit) as ended:
            chapter.main([*SMALL, *map(str, flags)])
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


@pytest.fixture
def no_thread_is_left():
    """Whatever a test does to a loader, its threads end, after what they are reading."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread not in before and "ThreadPoolExecutor" in thread.name:
            thread.join(timeout=60)
            assert not thread.is_alive()


def assert_nothing_left(before: list[psutil.Process]) -> None:
    """What has been started since then ends by itself."""
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []


# ------------------------------------------------------------------------------ nothing lost, nothing doubled


@pytest.fixture(scope="module")
def coded(folder: Path) -> Callable:
    """Patches of a store whose fields say where a value is from, and that nothing is subtracted from.

    u is the number of the time in the store, v 100 times the row plus the column; in GAP, u is NaN, and masked.
    """
    for layout in ("v3", "times"):
        store = shutil.copytree(folder / "winds" / layout, folder / f"winds/coded_{layout}")
        south_first = xr.open_zarr(store).latitude.values.argsort()
        arrays = [zarr.open_array(store / name, mode="r+") for name in (U, V)]
        times, rows, columns = np.indices(arrays[0].shape, "float32")
        times[:, *GAP] = np.nan
        arrays[0][:], arrays[1][:] = times[:, south_first], (100 * rows + columns)[:, south_first]

    def call(layout: str, *flags: object):
        args = arguments("--store", folder / f"winds/coded_{layout}", *flags)
        patches = chapter.make_patches(args)[0]
        patches.climatology, patches.std = 0 * patches.climatology, np.ones_like(patches.std)
        patches.valid[GAP] = False
        return patches, args

    return call


def check_values(batch: dict, k: int, place: int, row: int, column: int, swath: np.ndarray) -> None:
    """Sample k is the patch of a coded store that begins there, across the seam if need be, under that swath."""
    rows, columns = np.ogrid[row : row + 16, column : column + 16]
    valid = np.ones((37, COLUMNS), bool)
    valid[GAP] = False
    valid = valid.take(columns[0], axis=1, mode="wrap")[rows[:, 0]]
    truth = valid * np.stack([np.full((16, 16), place), 100 * rows + columns % COLUMNS])
    np.testing.assert_array_equal(batch["target"][k], truth)
    np.testing.assert_array_equal(batch["input"][k], [*truth * swath, valid & swath])
    np.testing.assert_array_equal(batch["unseen"][k, 0], valid & ~swath)
    weight = np.cos(np.deg2rad(5 * rows - 90)) * (valid & ~swath)
    np.testing.assert_allclose(batch["weight"][k, 0], weight, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "lanes", "per_block"),
    [(4, 1, 1), (4, 2, 3), (4, 4, 1), (4, 4, 3), (4, 8, 1), (4, 12, 5), (3, 9, 2), (6, 3, 4)],
)
def test_an_epoch_has_every_map_once_and_every_patch_of_it_once(
    batch: int, lanes: int, per_block: int, coded, opened: dict
) -> None:
    """Fewer lanes than the batch, as many, and several times as many; patches that do not fit into it."""
    turns, share = max(1, lanes // batch), max(1, batch // lanes)
    rounds = next(n for n in range(1, 999) if n * lanes >= 2 * TRAINING_TIMES and n * per_block % share == 0)
    steps = turns * rounds * per_block // share  # two epochs at least, and each lane's last visit to its end
    patches, args = coded("v3", *mixing(batch, lanes, per_block), "--max-steps", steps)
    batches = chapter.make_loader(patches, args)
    drawn, crossing = Counter(), 0
    for step, values in enumerate(batches):
        for k in range(batch):
            visit, patch = batches.dataset.address(step, k)
            _, _, times, rows, columns, swaths = opened[visit]
            place = patches.places[times[patch]]
            check_values(values, k, place, rows[patch], columns[patch], swaths[patch])
            crossing += columns[patch] > COLUMNS - 16
            drawn[visit, patch] += 1
    assert drawn == {(visit, patch): 1 for visit in range(rounds * lanes) for patch in range(per_block)}
    corners = {(visit, *each) for visit, block in opened.items() for each in zip(block.rows, block.columns)}
    swaths = [{swath.tobytes() for swath in block.swaths} for block in opened.values()]
    # Patches of a map are others, but for chance: there are 22 x 72 corners, and a hundred swaths.
    assert len(corners) > 0.95 * len(drawn)
    assert per_block == 1 or sum(len(of) > 1 for of in swaths) > 0.9 * len(swaths)
    maps = [opened[visit].times[0] for visit in range(2 * TRAINING_TIMES)]
    first, second = maps[:TRAINING_TIMES], maps[TRAINING_TIMES:]
    assert sorted(first) == sorted(second) == list(range(TRAINING_TIMES))
    assert first != second
    assert crossing


def without_the_first(skipped: int, patches) -> None:
    """Take the first training times away."""
    for name in ("times", "months", "places"):
        setattr(patches, name, getattr(patches, name)[skipped:])


def test_a_block_is_all_maps_of_a_chunk(coded, opened: dict) -> None:
    """Each chunk is read once a visit, however many times it has; the first and the last have fewer to train on."""
    patches, args = coded("times", *mixing(4, 4, 8), "--max-steps", 16)
    without_the_first(3, patches)
    batches = chapter.make_loader(patches, args)
    times, requests = set(), 0
    for step, values in enumerate(batches):
        for k in range(4):
            visit, patch = batches.dataset.address(step, k)
            _, _, drawn, rows, columns, swaths = opened[visit]
            place = patches.places[drawn[patch]]
            check_values(values, k, place, rows[patch], columns[patch], swaths[patch])
            times.add(place)
        requests += values["traffic"][0]
    assert len(opened) == 8
    assert times == set(range(3, TRAINING_TIMES))
    assert requests == OBJECTS * len(opened)


@pytest.mark.parametrize("shards", [None, (8, 96, 96)], ids=["chunks", "shards"])
@pytest.mark.parametrize("known_by", ["standard_name", "axis"])
def test_a_time_known_by_an_attribute_is_cut_into_the_same_blocks(
    known_by: str, shards: tuple | None, folder: Path, tmp_path: Path
) -> None:
    """A block is a chunk, also inside a shard. If the chunks of `instant` are not found, each time is a block."""
    dataset = xr.open_zarr(folder / "winds/times", chunks=None).load().drop_encoding()
    dataset = dataset.rename(time="instant")
    dataset.instant.attrs[known_by] = {"standard_name": "time", "axis": "T"}[known_by]
    layout = {"chunks": (4, 32, 32)} | ({"shards": shards} if shards else {})
    dataset.to_zarr(tmp_path / "other", encoding=dict.fromkeys((U, V), layout), consolidated=True)
    shutil.copytree(folder / "winds/times/statistics", tmp_path / "other/statistics")
    zarr.consolidate_metadata(tmp_path / "other")
    flags = [*mixing(4, 4, 8), "--max-steps", 14]
    plain, other = (loader("--store", path, *flags) for path in (folder / "winds/times", tmp_path / "other"))
    np.testing.assert_array_equal(other.dataset.edges, plain.dataset.edges)
    assert len(other.dataset.edges) == 1 + math.ceil(TRAINING_TIMES / 4)
    assert_same(list(other), list(plain))


@pytest.mark.parametrize("per_block", [2, 6, 8])
def test_all_times_of_a_chunk_are_drawn_equally_often(per_block: int, coded) -> None:
    """A visit that draws fewer patches than there are times leaves others out than the visit before."""
    patches, args = coded("times", *mixing(4, 4, per_block))
    without_the_first(3, patches)
    blocks, times = chapter.make_loader(patches, args).dataset, Counter()
    for visit in range(100 * (len(blocks.edges) - 1)):
        times.update(patches.places[blocks.start(visit, Mock()).times])
    for first in range(0, TRAINING_TIMES, 4):
        drawn = [times[place] for place in range(max(first, 3), min(first + 4, TRAINING_TIMES))]
        assert max(drawn) - min(drawn) < 60  # of 50, 150 and 200; the first of each visit would be 100 more


@pytest.mark.parametrize("per_block", [1, 4])
def test_a_sample_costs_a_share_of_its_map(per_block: int, folder: Path) -> None:
    """Over one epoch, every object of the training times is read once, whatever is cut from it."""
    flags = [*mixing(2, TRAINING_TIMES, per_block), "--max-steps", TRAINING_TIMES // 2 * per_block]
    traffic = sum(batch["traffic"] for batch in loader("--store", folder / "winds/v3", *flags))
    store = folder / "winds/v3"
    objects = [path for name in (U, V) for path in store.glob(f"{name}/c/*/*/*")]
    size = sum(path.stat().st_size for path in objects if int(path.parts[-3]) < TRAINING_TIMES)
    samples = TRAINING_TIMES * per_block
    assert traffic.tolist() == [OBJECTS / per_block * samples, size, samples]


# ------------------------------------------------------------------------------ order is a function

STEPS = 10  # of 4 samples from 8 lanes, 3 a visit: two visits of each
ORDER = [*mixing(4, 8, 3), "--max-steps", STEPS]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict]:
    """The batches of a folder, read in this process."""
    return list(loader(*ORDER, "--store", folder / "winds/v3"))


@pytest.mark.parametrize("layout", ["v2", "shards"])
def test_another_layout_has_the_same_batches(layout: str, folder: Path, expected: list) -> None:
    assert_same(list(loader(*ORDER, "--store", folder / "winds" / layout)), expected)


@pytest.mark.parametrize(
    ("workers", "start"),
    [pytest.param(*each, marks=thorough) for each in ((2, 0), (1, 0), (1, 7), (2, 3), (3, 0))],
)
def test_workers_bring_the_same_batches(workers: int, start: int, address: str, expected: list) -> None:
    """In the same order, and from any step."""
    batches = loader(*ORDER, *s3(address), "--num-workers", workers, start=start)
    assert_same(list(batches), expected[start:])


@pytest.mark.parametrize("start", [1, 4, STEPS - 1])
def test_a_loader_may_begin_at_any_step(start: int, folder: Path, expected: list) -> None:
    batches = loader(*ORDER, "--store", folder / "winds/v3", start=start)
    assert_same(list(batches), expected[start:])
    assert_same(list(batches), expected[start:])


@pytest.mark.parametrize(("maps", "ahead"), [(1, 1), (3, 5), (64, 999)])
def test_reading_ahead_changes_no_batch(maps: int, ahead: int, folder: Path, expected, monkeypatch) -> None:
    monkeypatch.setattr(chapter, "MAPS_AT_ONCE", maps)
    monkeypatch.setattr(chapter, "BLOCKS_AHEAD", ahead)
    assert_same(list(loader(*ORDER, "--store", folder / "winds/v3")), expected)


@pytest.mark.parametrize("layout", ["v3", pytest.param("v2", marks=thorough), "shards"])
def test_a_bucket_that_fails_now_and_then_changes_no_batch(layout: str, unreliable: str, expected) -> None:
    before = faults_of(unreliable)
    assert_same(list(loader(*ORDER, *s3(unreliable, layout))), expected)
    assert faults_of(unreliable) > before


def faults_of(address: str) -> int:
    """How many GETs the server has failed."""
    with urllib.request.urlopen(f"{address}/_counts") as reply:
        counts = json.load(reply)
    return sum(counts[name] for name in ("SlowDown", "reset", "truncated"))


def test_another_seed_has_other_batches(folder: Path, expected: list) -> None:
    (other,) = loader(*ORDER, "--store", folder / "winds/v3", "--max-steps", 1, "--seed", 1)
    assert not np.array_equal(other["target"], expected[0]["target"])
    blocks = [loader(*ORDER, "--store", folder / "winds/v3", "--seed", seed).dataset for seed in (0, 1)]
    one, other = (each.start(0, Mock()) for each in blocks)
    for name in ("rows", "columns", "swaths"):
        assert not np.array_equal(getattr(one, name), getattr(other, name))


# ------------------------------------------------------------------------------ ranks and workers


@pytest.mark.parametrize(
    ("lanes", "ranks", "accumulate"),
    [
        *((4, 3, 1), (8, 2, 1), (8, 3, 2), (16, 3, 1)),
        *(pytest.param(*each, marks=thorough) for each in ((4, 2, 2), (8, 1, 2), (16, 2, 2), (16, 3, 2))),
    ],
)
def test_ranks_share_the_global_batch_and_no_map(
    lanes: int, ranks: int, accumulate: int, folder: Path, opened: dict
) -> None:
    """Unless the lanes are fewer than the batch."""
    flags = ["--store", folder / "winds/v3", *mixing(8, lanes, 2), "--max-steps", 6]
    whole, parts, visits = list(loader(*flags)), [], []
    everything = set(opened)
    for rank in range(ranks):
        opened.clear()
        own = list(loader(*flags, "--accumulate", accumulate, rank=rank, world_size=ranks))
        assert len(own) == 6 * accumulate
        parts.append([own[n : n + accumulate] for n in range(0, len(own), accumulate)])
        visits += opened
    for step, batch in enumerate(whole):
        for name in NAMES:
            pieces = [piece[name] for part in parts for piece in part[step]]
            np.testing.assert_array_equal(np.concatenate(pieces), batch[name])
    assert set(visits) == everything
    assert lanes < 8 or len(visits) == len(everything)


@pytest.mark.parametrize(("lanes", "workers"), [(8, 2), (12, 3), pytest.param(16, 2, marks=thorough)])
def test_workers_share_no_map_if_their_number_divides_the_turns(
    lanes: int, workers: int, folder: Path, opened: dict, monkeypatch
) -> None:
    """`opened` would refuse a visit that another worker has opened."""
    flags = ["--store", folder / "winds/v3", *mixing(4, lanes, 2), "--max-steps", 12]
    expected = list(loader(*flags))
    opened.clear()
    found = {}
    for worker in range(workers):
        place = Namespace(id=worker, num_workers=workers)
        monkeypatch.setattr(chapter, "get_worker_info", lambda place=place: place)
        found |= zip(range(worker, 12, workers), loader(*flags))
    assert_same([found[step] for step in range(12)], expected)


@pytest.fixture
def count_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Requests a sample of all workers together, over steps in which each lane uses up its block."""

    def call(batch: int, workers: int, *flags: object) -> float:
        steps = 4 * 8
        flags = ["--store", folder / "winds/v3", "--batch-size", batch, "--max-steps", steps, *flags]
        flags = ["--shuffle-blocks", 4 * batch, "--patches-per-block", 8, *flags]
        requests = 0
        for worker in range(workers or 1):
            place = Namespace(id=worker, num_workers=workers) if workers else None
            monkeypatch.setattr(chapter, "get_worker_info", lambda place=place: place)
            requests += sum(found["traffic"][0] for found in loader(*flags))
        return requests / (steps * batch)

    return call


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("batch", [8, pytest.param(32, marks=thorough)])
def test_workers_cost_no_request_by_default(
    batch: int, workers: int, folder: Path, count_requests, capsys
) -> None:
    """A map is 12 objects, of which 8 samples are cut; with 32 lanes of a batch of 32, 4 workers would read it 4 times."""
    assert count_requests(batch, workers) == OBJECTS / 8
    flags = ["--batch-size", batch, "--shuffle-blocks", 4 * batch, "--max-steps", 64]
    loader("--store", folder / "winds/v3", *flags, "--num-workers", workers)
    assert "each block is read" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lanes", "workers", "accumulate", "times"),
    [
        (8, 2, 1, 2),
        (8, 4, 1, 4),
        (32, 3, 1, 3),
        (16, 4, 1, 2),
        (8, 2, 2, 1),
        (8, 4, 2, 2),
        (32, 16, 1, 4),
        (2, 4, 1, 2),
    ],
)
def test_a_number_of_workers_that_reads_a_map_several_times_is_warned_of(
    lanes: int, workers: int, accumulate: int, times: int, folder: Path, count_requests, capsys
) -> None:
    """With the factor that is counted, and a number of workers with which it is 1."""
    own = ["--shuffle-blocks", lanes, "--accumulate", accumulate, "--patches-per-block", 8]
    assert count_requests(8, workers, *own) == times * OBJECTS / 8
    flags = ["--store", folder / "winds/v3", "--batch-size", 8, *own, "--max-steps", 64, "--num-workers"]
    loader(*flags, workers)
    note = capsys.readouterr().err
    if times == 1:
        assert "each block is read" not in note
        return
    assert f"each block is read {times} times" in note
    (fewer,) = re.findall(r"with --num-workers (\d+) it is read once", note)
    loader(*flags, fewer)
    assert "each block is read" not in capsys.readouterr().err


# ------------------------------------------------------------------------------ bounded memory


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """The maps that are read, from now on; those that are still there have a referent."""
    maps, load = [], chapter.Store.load

    def call(self, job: tuple) -> np.ndarray:
        values = load(self, job).copy()  # its own, and no view
        maps.append(weakref.ref(values))
        return values

    monkeypatch.setattr(chapter.Store, "load", call)
    return maps


def alive(references: list[weakref.ref]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize(("batch", "lanes", "per_block"), [(4, 8, 3), (4, 4, 2), (4, 2, 1), (2, 8, 2)])
def test_no_more_is_held_than_lanes_and_what_is_read_ahead(
    batch: int, lanes: int, per_block: int, folder: Path, monkeypatch, no_thread_is_left
) -> None:
    monkeypatch.setattr(chapter, "BLOCKS_AHEAD", 6)
    blocks, most, start = [], 0, chapter.Blocks.start

    def watched(*args):
        nonlocal most
        block = start(*args)
        blocks.append(weakref.ref(block.fields))
        most = max(most, alive(blocks))
        return block

    monkeypatch.setattr(chapter.Blocks, "start", watched)
    flags = [*mixing(batch, lanes, per_block), "--max-steps", 12 * lanes * per_block // batch]
    for _ in loader("--store", folder / "winds/v3", *flags):
        pass
    assert len(blocks) == 12 * lanes
    assert lanes < most <= lanes + max(lanes, 6) + 2 * batch
    assert alive(blocks) == 0


def test_nothing_is_read_until_somebody_asks_for_more(
    folder: Path, opened: dict, loaded: list, no_thread_is_left, monkeypatch
) -> None:
    """As many blocks are read ahead as there may be, and those that batches take are replaced."""
    monkeypatch.setattr(chapter, "BLOCKS_AHEAD", 6)
    batches = iter(loader("--store", folder / "winds/v3", *mixing(4, 4, 1), "--max-steps", 100))
    for step in range(5):
        next(batches)
        wait([reading for block in opened.values() for reading in block.readings])
        ahead = len(opened) - 4 * (step + 1)  # that no batch has touched
        assert 6 <= ahead < 6 + 4
        assert len(loaded) == 2 * len(opened)
        assert alive(loaded) == 0  # patches are copies: of a map that is cut, nothing else is held


def test_as_many_maps_are_read_at_once_as_there_may_be(folder: Path, monkeypatch) -> None:
    """And no more: each waits at a barrier until others have begun."""
    barrier, lock, now, most, load = threading.Barrier(4), threading.Lock(), 0, 0, chapter.Store.load

    def together(self, job: tuple) -> np.ndarray:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        barrier.wait(timeout=60)
        values = load(self, job)
        with lock:
            now -= 1
        return values

    monkeypatch.setattr(chapter.Store, "load", together)
    monkeypatch.setattr(chapter, "MAPS_AT_ONCE", 4)
    batches = list(loader("--store", folder / "winds/v3", *mixing(4, 8, 2), "--max-steps", 4))
    assert len(batches) == 4
    assert most == 4


# ------------------------------------------------------------------------------ programs


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a folder that nobody interrupted, in double precision."""
    output = tmp_path_factory.mktemp("run")
    flags = [*SMALL, "--store", folder / "winds/v3", "--output-dir", output]
    programs.require_success(SCRIPT, *flags, double_precision=True)
    return output


@pytest.mark.parametrize("step", [pytest.param(1, marks=thorough), pytest.param(2, marks=thorough), 3])
def test_killed_with_workers_nothing_is_left_and_it_resumes_to_the_bit_without(
    step: int, address: str, tmp_path: Path, whole: Path
) -> None:
    """The workers have read blocks of the steps after the kill."""
    before = programs.running()
    flags = [*SMALL, *s3(address), "--output-dir", tmp_path]
    killed = programs.run(SCRIPT, *flags, "--num-workers", 2, kill_at_step=step, double_precision=True)
    assert killed.code == -9, killed.err
    assert_nothing_left(before)
    programs.require_success(SCRIPT, *flags, "--resume", "auto", double_precision=True)
    assert_same_bits(tmp_path, whole)
    if step >= 2:
        assert_resumed(tmp_path, 2, whole)


def test_two_ranks_end_at_the_weights_of_one(address: str, tmp_path: Path, whole: Path) -> None:
    flags = [*SMALL, *s3(address), "--output-dir", tmp_path]
    done = programs.run_ranks(SCRIPT, 2, *flags, double_precision=True)
    assert [getattr(one, "code", one) for one in done] == [0, 0], programs.printed(done)
    assert_same_but_for_rounding(tmp_path, whole)


@thorough
@pytest.mark.parametrize("step", [1, 2, 3])
def test_two_ranks_killed_and_resumed_to_the_bit(step: int, address: str, tmp_path: Path) -> None:
    flags = [*SMALL, *s3(address), "--resume", "auto", "--num-workers", 1, "--output-dir"]
    for folder, kill in (("whole", {}), ("run", {1: {"kill_at_step": step}}), ("run", {})):
        done = programs.run_ranks(SCRIPT, 2, *flags, tmp_path / folder, planted=kill)
        codes = [getattr(one, "code", one) for one in done]
        assert codes[1] == (-9 if kill else 0), programs.printed(done)
        assert (codes[0] != 0) is bool(kill), programs.printed(done)
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


# ------------------------------------------------------------------------------ judged as in chapter 3


@pytest.fixture(scope="module")
def before():
    """Chapter 3's train.py."""
    return load("03_cloud_data/train.py", "chapter_03_before_blocks")


def test_the_patches_that_judge_are_those_of_chapter_3(folder: Path, before) -> None:
    flags = ["--patch-size", "16", "--store", str(folder / "winds/v3")]
    now, then = (script.make_patches(script.parse_arguments(flags)) for script in (chapter, before))
    for mine, theirs in zip(now, then):
        places = [(step, k) for step in (0, 5) for k in range(40)]
        assert_same(mine.__getitems__(places), theirs.__getitems__(places))
        assert any(mine.sample(*place)[2] > COLUMNS - 16 for place in places)


@pytest.mark.parametrize("size", [16, 64])
def test_a_swath_is_that_of_chapter_3(size: int, before) -> None:
    """And so is what is drawn after it."""
    for seed in range(200):
        rngs = [np.random.default_rng(seed) for _ in range(2)]
        mine, theirs = chapter.swath_masks(rngs[0], 1, size)[0], before.swath_mask(rngs[1], size)
        np.testing.assert_array_equal(mine, theirs)
        assert rngs[0].random() == rngs[1].random()


# ------------------------------------------------------------------------------ what cannot be read


@pytest.fixture(scope="module")
def drawn(folder: Path) -> tuple[int, str]:
    """The time of the first visit: its number in the store, and its date."""
    patches = loader("--store", folder / "winds/v3").dataset.patches
    time = chapter.epoch_order(0, 0, TRAINING_TIMES)[0]
    return patches.places[time], str(patches.times[time])[:10]


def test_a_hole_in_a_block_is_named_by_its_date(folder: Path, drawn: tuple, tmp_path: Path, refused) -> None:
    store = shutil.copytree(folder / "winds/v3", tmp_path / "store")
    zarr.open_array(store / V, mode="r+")[drawn[0]] = np.nan
    said = refused("--store", store, "--output-dir", tmp_path / "run")
    assert said.startswith(f"--store {store}: NaN or infinity on {drawn[1]}")


@pytest.fixture(scope="module")
def incomplete(folder: Path, drawn: tuple[int, str]) -> tuple[str, str]:
    """A store that lacks a chunk, as other tools write it: without a value for what is missing. And what is said."""
    store, (place, date) = shutil.copytree(folder / "winds/v2", folder / "winds/incomplete"), drawn
    for path in [*store.rglob(".zarray"), store / ".zmetadata"]:
        path.write_text(re.sub(r'"fill_value": *"NaN"', '"fill_value": null', path.read_text()))
    (store / f"{U}/{place}.1.2").unlink()
    return "incomplete", rf"{U} of {date}\S*: {U}/{place}.1.2: .*missing"


def test_a_missing_object_of_a_block_is_named(incomplete, address: str, tmp_path: Path, refused) -> None:
    name, message = incomplete
    said = refused(*s3(address, name), "--output-dir", tmp_path)
    assert re.match(f"--store s3://winds/{name}: {message}", said), said
    assert not (tmp_path / "summary.json").exists()


@thorough
def test_a_missing_object_is_named_by_a_worker_and_the_other_ends(incomplete, address: str) -> None:
    before, (name, message) = programs.running(), incomplete
    with pytest.raises(chapter.StoreError, match=message):
        list(loader(*s3(address, name), "--num-workers", 2))
    gc.collect()  # the loader, which an error's frames refer to
    assert_nothing_left(before)


@thorough
def test_a_worker_that_cannot_read_ends_the_program(incomplete, address: str, tmp_path: Path) -> None:
    before, (name, message) = programs.running(), incomplete
    done = programs.run(SCRIPT, *SMALL, *s3(address, name), "--num-workers", 2, "--output-dir", tmp_path)
    assert done.code == 2, done.err
    said = done.err.splitlines()[-1]
    assert re.match(f"train.py: error: --store s3://winds/{name}: {message}", said), said
    assert_nothing_left(before)


def test_a_bucket_that_is_gone_ends_the_loader_after_the_deadline(folder: Path, no_thread_is_left) -> None:
    flags = [*mixing(4, 4, 1), "--max-steps", 1000, "--deadline", 1]
    with buckets.serving(folder, latency_ms=0) as address:
        batches = iter(loader(*flags, *s3(address)))
        next(batches)
    with pytest.raises(
        chapter.StoreError, match=r"10m_[uv]\S+ of \S+: 10m_[uv]_component_of_wind/c/\d+/\d/\d: "
    ):
        list(batches)


BAD_INPUT = {
    "--shuffle-blocks 12 --batch-size 8": "--shuffle-blocks 12: .*--batch-size 8",
    "--shuffle-blocks 3 --batch-size 8": "--shuffle-blocks 3: .*--batch-size 8",
    "--shuffle-blocks 0": "--shuffle-blocks 0: .* 1",
    "--patches-per-block 0": "--patches-per-block 0: .* 1",
    f"--seed {2**64}": f"--seed {2**64}: too large; give less than",
    "--output-dir /dev/null/run": "--output-dir /dev/null/run: Not a directory; give a folder",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag(flags: str, folder: Path, tmp_path: Path, refused) -> None:
    said = refused("--store", folder / "winds/v3", "--output-dir", tmp_path / "run", *flags.split())
    assert re.match(BAD_INPUT[flags], said), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("batch", [8, 12, 32])
def test_the_width_of_the_shuffle_is_four_batches_whatever_the_workers(batch: int, workers: int) -> None:
    """Else their number would decide the order, and no run could go on with others."""
    flags = ["--batch-size", str(batch), "--num-workers", str(workers)]
    assert chapter.parse_arguments(flags).shuffle_blocks == 4 * batch


def test_stores_are_opened_as_in_chapter_3(before) -> None:
    """Where what becomes of strange stores, folders, servers and ranks is tested."""
    names = "StoreError first_line Bucket sort_coordinates load_statistics make_patches"
    names += " check_folder check_resumable main"
    theirs, own = book.definitions("03_cloud_data/train.py"), book.definitions(SCRIPT)
    for name in names.split():
        assert own[name] == theirs[name], name
    assert inspect.getsource(chapter.Store.fields.func) == inspect.getsource(before.Store.fields.func)


def test_a_sampler_that_begins_at_another_step_than_training_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    flags = [*SMALL, "--store", str(folder / "winds/v3"), "--output-dir", str(tmp_path)]
    assert programs.run(SCRIPT, *flags, kill_at_step=3).code == -9
    monkeypatch.setattr(chapter, "check_resumable", lambda checkpoint, args: 0)
    with pytest.raises(RuntimeError, match="the sampler begins at step 0, and training at step 2"):
        chapter.main([*flags, "--resume"])


@pytest.mark.parametrize("flag", ["--patches-per-block", "--shuffle-blocks"])
def test_a_run_goes_on_with_its_own_blocks_only(flag: str, folder: Path, tmp_path, whole, refused) -> None:
    """Others would be another order: samples would be lost, and doubled."""
    flags = ["--store", folder / "winds/v3", "--resume", whole / "last.ckpt", flag, 4]
    assert re.match(rf"{flag} 4: .*last.ckpt has [28];", refused(*flags, "--output-dir", tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
