"""Chapter 5: blocks lose and double no sample, their order is a function, and their memory is bounded."""

import importlib
import json
import multiprocessing
import re
import shutil
import threading
import urllib.request
import weakref
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import groupby, islice, product
from math import ceil, gcd
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import book
import buckets
import numpy as np
import pytest
import xarray as xr
import zarr

CHAPTER = book.ROOT / "05_model_profiling"
ROOMS = "block_loader data datamodule fields options store task wind_blocks workers"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
# 5 degrees: 37 x 72 cells. In chunks of 32 x 32, a map of both variables is 12 objects. 26 times are for training.
LAYOUTS = {"v3": "", "shards": "--shard-times 4", "times": "--chunk 4 32 32"}
OBJECTS, TRAINING_TIMES, ROWS, COLUMNS, SIZE = 12, 26, 37, 72, 16
GAP = (slice(5, 25), slice(10, 50))  # rows and columns that are masked in the coded stores
# Each slot reads several blocks in these steps.
STEPS = 10
FLAGS = f"--accelerator cpu --patch-size {SIZE} --max-steps {STEPS}".split()
MIXING = "--batch-size 4 --shuffle-slots 8 --patches-per-block 4".split()
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
NAMES = ("input", "target", "unseen", "weight")
GUARD = 30  # seconds until a test that would wait forever gives up

pytestmark = [  # train.py hides the first two as well
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than there are cores
]
thorough = pytest.mark.thorough
rooms = SimpleNamespace()  # the chapter's files, as modules


@pytest.fixture(scope="module", autouse=True)
def open_rooms() -> Iterator[None]:
    """Import the chapter's files, which stay importable for the workers until the last test has ended."""
    with book.rooms(CHAPTER.name):
        for name in ROOMS.split():
            setattr(rooms, name, importlib.import_module(name))
        # The workers' server imports its packages while the stores are made.
        multiprocessing.set_forkserver_preload(rooms.workers.PRELOADED)
        forkserver.ensure_running()
        yield


def make_order(blocks=40, batch_size=4, slots=8, patches_per_block=3, seed=0):
    return rooms.block_loader.BlockOrder(blocks, batch_size, slots, patches_per_block, seed)


def make_batches(order, steps: int, start: int = 0) -> list[list[tuple[int, int]]]:
    """The global batch of each step, as (step, k)."""
    return [[(step, k) for k in range(order.batch_size)] for step in range(start, steps)]


def reads_of(order, batches: list) -> set[int]:
    """The reads that these batches need."""
    return {order.address(step, k)[0] for batch in batches for step, k in batch}


class Numbers:
    """Blocks without data. A sample is (block, the number drawn for this read, its place in the block).

    `read` counts how often each block was read with each number. No two reads draw the same number.
    """

    def __init__(self, order):
        self.order = order
        self.lock = threading.Lock()
        self.read: Counter = Counter()

    def read_block(self, block: int, rng: np.random.Generator) -> list[tuple]:
        drawn = int(rng.integers(2**62))
        with self.lock:
            self.read[block, drawn] += 1
        return [(block, drawn, n) for n in range(self.order.patches_per_block)]

    def make_batch(self, samples: list[tuple]) -> list[tuple]:
        return samples

    def loader(self, batches: list, **reading):
        return rooms.block_loader.BlockLoader(
            self.order, batches, self.read_block, self.make_batch, **reading
        )

    def key(self, read: int) -> tuple[int, int]:
        """Under which `read` counts a read."""
        return self.order.block(read), int(self.order.rng(read).integers(2**62))

    def evaluate(self, batches: list) -> list[list[tuple]]:
        """The batches as the order defines them, without a loader."""
        found = []
        for batch in batches:
            addresses = [self.order.address(step, k) for step, k in batch]
            found.append([(*self.key(read), n) for read, n in addresses])
        return found


# ------------------------------------------------------------------------------ the order, by arithmetic


def orders() -> Iterator:
    """Many small cases: fewer blocks than slots and more, patches that divide the batch and others."""
    for blocks, batch, rounds, per_block in product(
        (1, 2, 7, 12, 40), (1, 2, 3, 5, 8), (1, 2, 3, 4), (1, 2, 3, 5, 6, 8)
    ):
        yield make_order(blocks, batch, rounds * batch, per_block, seed=blocks)


def test_a_slot_gives_each_sample_of_its_blocks_once_and_in_order() -> None:
    """A slot gives one sample in each round.

    Only its first block is shortened, so that slots change their blocks in different rounds.
    """
    for order in orders():
        rounds = 3 * order.patches_per_block
        given = defaultdict(list)
        for batch in make_batches(order, rounds * order.steps_per_round):
            for step, k in batch:
                read, patch = order.address(step, k)
                given[read % order.slots].append((read, patch))
        assert len(given) == order.slots
        for slot, samples in given.items():
            reads = [slot + n * order.slots for n in range(4)]
            complete = list(product(reads, range(order.patches_per_block)))
            skipped = slot % order.patches_per_block
            assert samples == complete[skipped : skipped + rounds], order


def test_an_epoch_reads_every_block_once() -> None:
    """Every block of two epochs is used up to its last sample, which comes once."""
    for order in orders():
        rounds = order.patches_per_block * ceil(2 * order.blocks / order.slots)
        ended = Counter()
        for batch in make_batches(order, rounds * order.steps_per_round):
            for step, k in batch:
                read, patch = order.address(step, k)
                ended[read] += patch == order.patches_per_block - 1
        for epoch in range(2):
            blocks = Counter()
            for read in range(epoch * order.blocks, (epoch + 1) * order.blocks):
                blocks[order.block(read)] += ended[read]
            assert blocks == dict.fromkeys(range(order.blocks), 1), order


def test_every_step_needs_equally_many_new_blocks() -> None:
    """They differ by rounding only. In the first round, each slot takes its first block."""
    for order in orders():
        steps = order.steps_per_round * (2 * order.patches_per_block + 1)
        seen, new = set(), []
        for batch in make_batches(order, steps):
            reads = reads_of(order, [batch])
            new.append(len(reads - seen))
            seen |= reads
        assert set(new[: order.steps_per_round]) == {order.batch_size}
        average = order.batch_size / order.patches_per_block
        assert (
            int(average)
            <= min(new[order.steps_per_round :])
            <= max(new[order.steps_per_round :])
            <= ceil(average)
        ), order


def test_epochs_and_seeds_have_orders_and_patches_of_their_own() -> None:
    numbers = [Numbers(make_order(seed=seed)) for seed in (0, 1)]
    epochs = [[each.order.block(read) for read in range(n, n + 40)] for each in numbers for n in (0, 40)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    drawn = {each.key(read)[1] for each in numbers for read in range(80)}
    assert len(drawn) == 160


@pytest.mark.parametrize(("batch", "slots"), [(8, 4), (8, 12), (3, 8)])
def test_slots_that_are_no_multiple_of_the_batch_are_refused(batch: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots: not a multiple of {batch}"):
        make_order(batch_size=batch, slots=slots)


# ------------------------------------------------------------------------------ the loader, for any data

MIXES = [
    (1, 1, 1),
    (4, 4, 1),
    (4, 8, 3),
    (4, 12, 5),
    (3, 9, 2),
    (6, 6, 4),
    (8, 32, 8),
]  # batch, slots, per block


@pytest.mark.parametrize(("batch", "slots", "per_block"), MIXES)
@pytest.mark.parametrize(("ahead", "threads"), [(1, 1), (5, 3), (16, 24), (9999, 64)])
def test_the_batches_are_those_of_the_order_and_no_block_is_read_twice(
    batch: int, slots: int, per_block: int, ahead: int, threads: int
) -> None:
    """It does not matter how far ahead blocks are read, by how many threads, and whether slots outnumber blocks."""
    for blocks in (5, 40):
        numbers = Numbers(make_order(blocks, batch, slots, per_block))
        batches = make_batches(numbers.order, 3 * per_block * slots // batch)
        loader = numbers.loader(batches, blocks_ahead=ahead, threads=threads)
        assert list(loader) == numbers.evaluate(batches)
        reads = reads_of(numbers.order, batches)
        assert numbers.read == {numbers.key(read): 1 for read in reads}


@pytest.mark.parametrize("start", [1, 7, 8, 29])
def test_a_loader_may_begin_at_any_step(start: int) -> None:
    numbers = Numbers(make_order())
    expected = numbers.evaluate(make_batches(numbers.order, 30))
    loader = numbers.loader(make_batches(numbers.order, 30, start))
    assert list(loader) == expected[start:]
    assert list(loader) == expected[start:]  # and again


def test_as_many_blocks_are_read_at_once_as_there_are_threads() -> None:
    """Each read waits at a barrier until four have begun. Never do more than four run."""
    barrier, lock = threading.Barrier(4), threading.Lock()
    reading, most = 0, 0

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        barrier.wait(GUARD)
        with lock:
            reading -= 1
        return [block]

    order = make_order(batch_size=4, slots=8, patches_per_block=1)
    loader = rooms.block_loader.BlockLoader(order, make_batches(order, 6), read_block, list, threads=4)
    assert len(list(loader)) == 6
    assert most == 4


def test_the_readmes_loader_of_other_data_brings_pairs_of_successive_states() -> None:
    """The pairs are the same each time. The example is the README's Python block below a comment."""
    text = (CHAPTER / "README.md").read_text()
    example = re.search(r"<!-- other data -->\s*```python\n(.*?)\n```", text, re.DOTALL)
    names = {"__name__": "other_data"}
    exec(example[1], names)
    series, loader, batches = (names[name] for name in ("series", "loader", "batches"))
    assert isinstance(loader.dataset, rooms.block_loader.BlockLoader)
    assert len(batches) == len(loader) > 0
    times = {state.tobytes(): time for time, state in enumerate(series)}
    assert len(times) == len(series)  # each state is known by its values
    found = set()
    for batch in batches:
        assert batch.shape == (loader.dataset.order.batch_size, 2, series.shape[1])
        for first, second in batch.numpy():
            time = times[first.tobytes()]
            np.testing.assert_array_equal(second, series[time + 1])
            found.add(time)
    assert len(found) > 100  # many different pairs
    for one, other in zip(loader, batches, strict=True):
        np.testing.assert_array_equal(one, other)


# ------------------------------------------------------------------------------ ranks and workers


def make_module(numbers: Numbers, steps: int, accumulate: int = 1, workers: int = 0):
    """The data module whose training samples are numbers."""
    options = {
        "batch_size": numbers.order.batch_size,
        "max_steps": steps,
        "accumulate_grad_batches": accumulate,
        "num_workers": workers,
        "start_method": "forkserver",
        "patch_size": SIZE,
        "eval_samples": 4,
    }
    nothing = SimpleNamespace(validation=None, test=None, eval_patches=lambda *_: None)
    return rooms.datamodule.WindDataModule(
        nothing, options=options, order=numbers.order, blocks=numbers, first_step=0
    )


@pytest.fixture
def run_workers(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Iterate over a loader as each of its workers would, in this process, and return all batches in order."""

    def call(loader, workers: int) -> list:
        if workers == 0:
            return list(loader)
        found = {}
        for worker in range(workers):
            place = Namespace(id=worker, num_workers=workers)
            with monkeypatch.context() as patch:
                patch.setattr(rooms.block_loader, "get_worker_info", lambda place=place: place)
                found |= zip(range(worker, len(loader), workers), loader)
        return [found[number] for number in range(len(loader))]

    return call


@pytest.mark.parametrize(
    ("slots", "ranks", "accumulate"),
    [*product((8, 16, 24), (1, 2, 3, 8), (1,)), (8, 1, 2), (16, 2, 2), (16, 3, 2), (24, 4, 2)],
)
def test_ranks_share_the_global_batch_and_no_block(slots: int, ranks: int, accumulate: int) -> None:
    """Their slices may be unequal, and come in micro-batches."""
    whole = Numbers(make_order(batch_size=8, slots=slots))
    expected = list(make_module(whole, 20).train_loader().dataset)
    pieces = [[] for _ in range(20)]
    sizes = set()
    read = Counter()
    for rank in range(ranks):
        own = Numbers(whole.order)
        loader = make_module(own, 20, accumulate).train_loader(rank, ranks).dataset
        batches = list(loader)
        assert len(batches) == len(loader) == 20 * accumulate
        for number, batch in enumerate(batches):
            pieces[number // accumulate] += batch
            sizes.add(len(batch))
        read.update(own.read)
    assert pieces == expected
    assert read == whole.read
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("batch", [8, 32])
def test_up_to_four_workers_cost_no_read_by_default(batch: int, workers: int, run_workers, capsys) -> None:
    """Over two epochs, all workers together read each block once. By default, the slots are four batches."""
    order = make_order(4 * batch, batch, 4 * batch, patches_per_block=8)
    numbers = Numbers(order)
    steps = 2 * order.steps_per_round * order.patches_per_block
    loader = make_module(numbers, steps, workers=workers).train_loader().dataset
    assert "each block is read" not in capsys.readouterr().err
    batches = make_batches(order, steps)
    assert run_workers(loader, workers) == numbers.evaluate(batches)
    reads = reads_of(order, batches)
    assert reads >= set(range(2 * order.blocks))
    assert numbers.read == {numbers.key(read): 1 for read in reads}


@pytest.mark.parametrize(
    ("slots", "workers", "accumulate", "readers"),
    [
        (32, 3, 1, 3),
        (32, 6, 1, 3),
        (32, 16, 1, 4),
        (24, 2, 1, 2),
        (24, 6, 1, 2),
        (8, 2, 1, 2),
        (8, 4, 1, 4),
        (8, 2, 2, 1),
        (8, 4, 2, 2),
        (24, 4, 2, 2),
        (24, 6, 2, 1),
    ],
)
def test_another_number_of_workers_reads_blocks_as_often_as_the_note_says(
    slots: int, workers: int, accumulate: int, readers: int, run_workers, capsys
) -> None:
    """With the number of workers that the note names, each block is read once. The batches stay the same."""
    numbers = Numbers(make_order(batch_size=8, slots=slots, patches_per_block=8))
    steps = 4 * 8 * slots // 8
    loader = make_module(numbers, steps, accumulate, workers).train_loader().dataset
    note = capsys.readouterr().err
    whole = make_module(Numbers(numbers.order), steps, accumulate).train_loader().dataset
    assert run_workers(loader, workers) == list(whole)

    complete = range(slots, 4 * slots)  # a slot's first block is shortened, the last has not ended
    counts = {numbers.read[numbers.key(read)] for read in complete}
    assert counts == {readers}
    assert rooms.datamodule.count_readers(workers, accumulate * slots // 8) == readers
    if readers == 1:
        assert note == ""
        return
    assert f"with --num-workers {workers} each block is read {readers} times" in note
    fewer = int(re.search(r"with --num-workers (\d+) it is read once", note)[1])
    numbers.read.clear()
    run_workers(make_module(numbers, steps, accumulate, fewer).train_loader().dataset, fewer)
    assert set(numbers.read.values()) == {1}


def test_of_several_ranks_one_prints_the_note(capsys) -> None:
    for rank in range(2):
        make_module(Numbers(make_order()), 4, workers=3).train_loader(rank, 2)
    assert capsys.readouterr().err.count("each block is read") == 1


# ------------------------------------------------------------------------------ memory, threads and errors


@pytest.fixture
def started() -> Callable:
    """The threads of pools that were started in this test; all have to end after it."""
    before = threading.enumerate()

    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before and "Pool" in each.name]

    yield threads
    assert_end(threads())


def assert_end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(GUARD)
        assert not thread.is_alive()


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """The reads that are submitted from now on, as futures."""
    found = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *call) -> Future:
            future = super().submit(*call)
            found.append(weakref.ref(future))
            return future

    monkeypatch.setattr(rooms.block_loader, "ThreadPoolExecutor", Pool)
    return found


def referents(references: list[weakref.ref]) -> list:
    """What is still there."""
    found = [reference() for reference in references]
    return [each for each in found if each is not None]


# batch, slots, patches of a block, blocks ahead, and the batches that are planned for so many blocks
DEPTHS = [
    (4, 8, 3, 4, 3),
    (4, 4, 2, 6, 3),
    (4, 4, 1, 1, 1),
    (2, 8, 2, 16, 16),
    (8, 32, 8, 16, 16),
    (6, 12, 4, 9, 6),
]


@pytest.mark.parametrize(
    ("batch", "slots", "per_block", "ahead", "depth", "workers"),
    [*((*case, 1) for case in DEPTHS), *((8, 32, 8, 16, 16, workers) for workers in (2, 3, 5))],
)
def test_no_more_blocks_are_held_than_slots_and_what_is_read_ahead(
    batch: int, slots: int, per_block: int, ahead: int, depth: int, workers: int, submitted, started
) -> None:
    """They are counted when a batch is made and each read that was started has ended. At the end none is left."""
    blocks = []  # a sample of each
    most = 0

    def read_block(block: int, rng: np.random.Generator) -> list[np.ndarray]:
        samples = [np.full(10, block) for _ in range(per_block)]
        blocks.append(weakref.ref(samples[0]))
        return samples

    def make_batch(samples: list[np.ndarray]) -> np.ndarray:
        nonlocal most
        wait(referents(submitted), GUARD)
        most = max(most, len(referents(blocks)))
        return np.stack(samples)

    order = make_order(1000, batch, slots, per_block)
    batches = make_batches(order, 6 * per_block * order.steps_per_round)[::workers]  # the first worker's
    new = ceil(batch / per_block) * workers // gcd(workers, order.steps_per_round)
    # A thread may hold the block that it read last for a moment longer. One thread is within the bound.
    loader = rooms.block_loader.BlockLoader(order, batches, read_block, make_batch, ahead, threads=1)
    for _ in loader:
        pass
    assert_end(started())
    held = slots // gcd(workers, order.steps_per_round)
    assert len(blocks) == len(reads_of(order, batches)) > held + ahead
    assert held < most <= held + (depth + 1) * new
    assert referents(blocks) == []


@pytest.mark.parametrize(("batch", "slots", "per_block", "ahead", "depth"), DEPTHS)
def test_nothing_is_read_until_somebody_asks_for_more(
    batch: int, slots: int, per_block: int, ahead: int, depth: int, submitted, started
) -> None:
    """The blocks of `depth` batches are read ahead, and those of one more whenever a batch is taken."""
    numbers = Numbers(make_order(1000, batch, slots, per_block))
    batches = make_batches(numbers.order, depth + 40)
    with closing(iter(numbers.loader(batches, blocks_ahead=ahead))) as found:
        assert submitted == []
        for step in range(40):
            next(found)
            planned = reads_of(numbers.order, batches[: step + 1 + depth])
            assert len(submitted) == len(planned)
        wait(referents(submitted), GUARD)
        assert numbers.read == {numbers.key(read): 1 for read in planned}
    assert len(submitted) == len(planned)


@pytest.mark.parametrize("ahead", [1, 9999])
def test_an_error_comes_with_the_batch_that_needs_the_block(ahead: int, started) -> None:
    """It does not matter how early the block was read. The threads end while the error is kept."""
    order = make_order()
    batches = make_batches(order, 20)
    needed = reads_of(order, batches[7:8]) - reads_of(order, batches[:7])
    bad = order.block(min(needed))

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        if block == bad:
            raise OSError(f"block {block} is gone")
        return [block] * order.patches_per_block

    found = iter(rooms.block_loader.BlockLoader(order, batches, read_block, list, ahead))
    assert len(list(islice(found, 7))) == 7
    threads = started()
    with pytest.raises(OSError, match=f"block {bad} is gone") as caught:
        next(found)
    assert_end(threads)
    assert caught.tb is not None


class HeldReads:
    """Blocks whose reads stay in a thread until they are released, or until `seconds` are over."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.lock = threading.Lock()
        self.first = threading.Semaphore(0)  # a read is held
        self.released = threading.Event()
        self.begun = 0
        self.running = 0

    def hold(self) -> None:
        with self.lock:
            self.begun += 1
            self.running += 1
        self.first.release()
        self.released.wait(self.seconds)
        with self.lock:
            self.running -= 1


def test_to_close_the_iterator_waits_for_the_reads_that_run_and_begins_no_other(started) -> None:
    """Otherwise, a server that ends next would still be asked, and a program would end while its threads read."""
    order = make_order(1000, batch_size=4, slots=4, patches_per_block=1)
    held = HeldReads(seconds=0.3)
    early = {order.block(read) for read in range(4)}

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        if block not in early:
            held.hold()
        return [block]

    batches = make_batches(order, 200)
    found = iter(
        rooms.block_loader.BlockLoader(order, batches, read_block, list, blocks_ahead=400, threads=2)
    )
    next(found)
    held.first.acquire(timeout=GUARD)
    found.close()
    running = held.running
    held.released.set()
    assert running == 0
    assert held.begun < 400  # most were cancelled
    assert_end(started())


def test_an_error_does_not_wait_for_other_reads(started) -> None:
    """Other reads may take as long as a server that does not answer."""
    order = make_order(1000, batch_size=4, slots=4, patches_per_block=1)
    held = HeldReads(seconds=GUARD)
    bad, slow = (order.block(order.address(step, 0)[0]) for step in (3, 4))

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        if block == slow:
            held.hold()
        if block == bad:
            held.first.acquire(timeout=GUARD)
            raise OSError("gone")
        return [block]

    found = iter(rooms.block_loader.BlockLoader(order, make_batches(order, 20), read_block, list, threads=8))
    with pytest.raises(OSError, match="gone"):
        list(found)
    running = held.running
    held.released.set()
    assert running == 1


# ------------------------------------------------------------------------------ the winds


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets; its bucket `winds` has a store of each layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name, flags in LAYOUTS.items():
        make_small_store(folder / "winds" / name, flags)
    return folder


def make_data(store: str | Path, *flags: object, endpoint: str | None = None, start: int = 0):
    """train.py's data module under these flags."""
    words = [*FLAGS, *MIXING, *map(str, flags)]
    options = rooms.options.parse_options("", words)
    location = rooms.store.Location(str(store), endpoint, anonymous=endpoint is not None)
    data = rooms.task.make_data(options, location)
    return rooms.task.make_datamodule(options, data, start)


def make_blocks(data, skipped: int = 0):
    """The blocks of the training data, without their first times."""
    maker = data.blocks.maker
    period = maker.period
    maker.period = rooms.fields.Period(
        period.positions[skipped:], period.dates[skipped:], period.months[skipped:]
    )
    return rooms.wind_blocks.WindBlocks(maker, data.blocks.reader, data.blocks.patches_per_block)


def assert_same(batches: list[dict], others: list[dict]) -> None:
    """The same batches, to the bit, whatever was read for them."""
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others):
        for name in NAMES:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(("layout", "times"), [("v3", 1), ("shards", 1), ("times", 4)])
def test_a_block_is_all_training_times_of_a_chunk(layout: str, times: int, folder: Path) -> None:
    """In a sharded store, it is the chunk inside the shard. The first and the last chunk have fewer training times."""
    blocks = make_blocks(make_data(folder / "winds" / layout), skipped=3)
    positions = blocks.maker.period.positions
    found = [positions[block].tolist() for block in blocks.blocks]
    chunks = groupby(range(3, TRAINING_TIMES), lambda position: position // times)
    assert found == [list(chunk) for _, chunk in chunks]


@pytest.mark.parametrize("known_by", ["axis", pytest.param("standard_name", marks=thorough)])
def test_a_time_known_by_an_attribute_is_cut_into_the_same_blocks(
    known_by: str, folder: Path, tmp_path: Path
) -> None:
    """The other store is also sharded. If the chunks of `instant` were not found, each time would be a block."""
    dataset = xr.open_zarr(folder / "winds/times", chunks=None).load().drop_encoding()
    dataset = dataset.rename(time="instant")
    dataset.instant.attrs[known_by] = {"standard_name": "time", "axis": "T"}[known_by]
    layout = {"chunks": (4, 32, 32), "shards": (8, 96, 96)}
    dataset.to_zarr(tmp_path / "other", encoding=dict.fromkeys((U, V), layout), consolidated=True)
    shutil.copytree(folder / "winds/times/statistics", tmp_path / "other/statistics")
    zarr.consolidate_metadata(tmp_path / "other")
    plain, other = (make_data(store) for store in (folder / "winds/times", tmp_path / "other"))
    assert len(other.blocks) == ceil(TRAINING_TIMES / 4)
    assert_same(list(other.train_loader()), list(plain.train_loader()))


@pytest.fixture(scope="module")
def coded(folder: Path) -> Callable:
    """The training data of a store whose fields say where a value is from, and from which nothing is subtracted.

    u is the number of the time in the store, v 100 times the row plus the column; in GAP, u is NaN, and masked.
    """
    for layout in ("v3", "times"):
        store = shutil.copytree(folder / "winds" / layout, folder / f"coded/{layout}")
        south_first = xr.open_zarr(store).latitude.values.argsort()
        arrays = [zarr.open_array(store / name, mode="r+") for name in (U, V)]
        times, rows, columns = np.indices(arrays[0].shape, "float32")
        times[:, *GAP] = np.nan
        arrays[0][:] = times[:, south_first]
        arrays[1][:] = (100 * rows + columns)[:, south_first]

    def call(layout: str):
        data = make_data(folder / "coded" / layout)
        maker = data.blocks.maker
        maker.mean = 0 * maker.mean
        maker.std = np.ones_like(maker.std)
        maker.valid[0][GAP] = False
        return data

    return call


def check_values(batch: dict, k: int, position: int, row: int, column: int, swath: np.ndarray) -> None:
    """Sample k is the patch of a coded store that begins there, across the seam if need be, under that swath."""
    rows, columns = np.ogrid[row : row + SIZE, column : column + SIZE]
    valid = np.ones((ROWS, COLUMNS), bool)
    valid[GAP] = False
    valid = valid.take(columns[0], axis=1, mode="wrap")[rows[:, 0]]
    truth = valid * np.stack([np.full((SIZE, SIZE), position), 100 * rows + columns % COLUMNS])
    np.testing.assert_array_equal(batch["target"][k], truth)
    np.testing.assert_array_equal(batch["input"][k], [*truth * swath, valid & swath])
    np.testing.assert_array_equal(batch["unseen"][k, 0], valid & ~swath)
    weight = np.cos(np.deg2rad(5 * rows - 90)) * (valid & ~swath)
    np.testing.assert_allclose(batch["weight"][k, 0], weight, atol=1e-6)


@pytest.mark.parametrize("layout", ["v3", "times"])
def test_a_sample_is_the_patch_of_its_block(layout: str, coded) -> None:
    """It is of one of the block's times, may cross the seam, and leaves out the cells that are masked."""
    blocks = make_blocks(coded(layout), skipped=3)
    positions = blocks.maker.period.positions
    drawn, corners, crossing, masked = set(), set(), 0, 0
    for block, times in enumerate(blocks.blocks):
        samples = blocks.read_block(block, np.random.default_rng(block))
        batch = blocks.make_batch(samples)
        assert len(samples) == blocks.patches_per_block
        for k, (patch, _) in enumerate(samples):
            check_values(batch, k, positions[patch.time], patch.row, patch.column, patch.seen)
            assert patch.time in times
            drawn.add(patch.time)
            corners.add((patch.time, patch.row, patch.column))
            crossing += patch.column > COLUMNS - SIZE
        masked += (batch["target"] == 0).all(axis=1).sum()
    assert drawn == set(range(len(positions)))
    # Patches rarely coincide, because there are 22 x 72 corners.
    assert len(corners) > 0.9 * len(blocks) * blocks.patches_per_block
    assert crossing
    assert masked


@pytest.mark.parametrize("per_block", [2, 6, 8])
def test_all_times_of_a_chunk_are_drawn_equally_often(per_block: int, folder: Path) -> None:
    """In one read, they differ by one patch at most; over many reads by chance only, even with fewer patches."""
    data = make_data(folder / "winds/times", "--patches-per-block", per_block)
    blocks = make_blocks(data, skipped=3)

    def read(name: str, region: dict) -> np.ndarray:
        times = region["time"]
        return np.zeros((times.stop - times.start, ROWS, COLUMNS))

    blocks.reader = SimpleNamespace(variables=["u"], read=read)
    for block, times in enumerate(blocks.blocks):
        total = Counter()
        for seed in range(100):
            samples = blocks.read_block(block, np.random.default_rng(seed))
            drawn = Counter(sample.patch.time for sample in samples)
            counts = [drawn[time] for time in times]
            assert max(counts) - min(counts) <= 1
            total += drawn
        counts = [total[time] for time in times]
        assert max(counts) - min(counts) < 40  # if the first were preferred, they would have up to 100 more


@pytest.mark.parametrize("layout", ["v3", "times"])
@pytest.mark.parametrize("per_block", [1, 4])
def test_a_block_costs_its_objects_once(layout: str, per_block: int, folder: Path, monkeypatch) -> None:
    """It does not matter what is cut from it. With one patch of each block, the steps are exactly an epoch."""
    store = folder / "winds" / layout
    blocks = {"v3": 26, "times": 7}[layout]
    flags = ["--batch-size", blocks, "--shuffle-slots", blocks, "--patches-per-block", per_block]
    data = make_data(store, *flags, "--max-steps", per_block)
    read, read_block = [], data.blocks.read_block

    def watched(block: int, rng: np.random.Generator) -> list:
        read.append(block)
        return read_block(block, rng)

    monkeypatch.setattr(data.blocks, "read_block", watched)
    traffic = sum(batch["traffic"] for batch in data.train_loader())
    sizes = Counter()  # of a block's objects, together
    for name in (U, V):
        for path in store.glob(f"{name}/c/*/*/*"):
            sizes[int(path.parts[-3])] += path.stat().st_size
    assert per_block > 1 or sorted(read) == list(range(blocks))
    assert set(read) == set(range(blocks))
    assert traffic.tolist() == [
        OBJECTS * len(read),
        sum(sizes[block] for block in read),
        0,
        blocks * per_block,
    ]


def test_no_map_is_kept(folder: Path, monkeypatch) -> None:
    """Patches are copies, so that nothing else of a map is held."""
    maps, read = [], rooms.store.FieldReader.read

    def watched(self, *args) -> np.ndarray:
        values = read(self, *args).copy()  # a view would not be known by its own references
        maps.append(weakref.ref(values))
        return values

    monkeypatch.setattr(rooms.store.FieldReader, "read", watched)
    blocks = make_data(folder / "winds/times").blocks
    samples = blocks.read_block(0, np.random.default_rng(0))
    assert len(maps) == 2
    assert len(samples) == 4
    assert referents(maps) == []


# ------------------------------------------------------------------------------ the same batches from anywhere


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict]]:
    """The batches of some layouts, read from a folder in this process."""
    layouts = ("v3", "times")
    return {layout: list(make_data(folder / "winds" / layout).train_loader()) for layout in layouts}


@pytest.fixture(scope="module")
def unreliable(folder: Path) -> Iterator[str]:
    with buckets.serving(folder, latency_ms=0, **FAULTS) as address:
        yield address


def test_shards_have_the_same_batches(folder: Path, expected: dict) -> None:
    assert_same(list(make_data(folder / "winds/shards").train_loader()), expected["v3"])


@pytest.mark.parametrize(
    ("layout", "same_as"), [pytest.param("v3", "v3", marks=thorough), ("shards", "v3"), ("times", "times")]
)
def test_a_bucket_that_fails_now_and_then_changes_no_batch(
    layout: str, same_as: str, unreliable: str, expected: dict
) -> None:
    before = count_faults(unreliable)
    data = make_data(f"s3://winds/{layout}", endpoint=unreliable)
    assert_same(list(data.train_loader()), expected[same_as])
    assert count_faults(unreliable) > before


def count_faults(address: str) -> int:
    """How many GETs the server has failed."""
    with urllib.request.urlopen(f"{address}/_counts") as reply:
        counts = json.load(reply)
    return sum(counts[name] for name in ("SlowDown", "reset", "truncated"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_workers_share_of_the_batches_is_the_same(
    workers: int, folder: Path, expected: dict, run_workers
) -> None:
    loader = make_data(folder / "winds/v3").train_loader().dataset
    assert_same(run_workers(loader, workers), expected["v3"])


@pytest.mark.parametrize(
    ("workers", "method", "start"),
    [
        (2, "forkserver", 3),
        *(
            pytest.param(*each, marks=thorough)
            for each in ((1, "forkserver", 0), (2, "spawn", 0), (3, "forkserver", 7))
        ),
    ],
)
def test_workers_bring_the_same_batches(
    workers: int, method: str, start: int, folder: Path, expected: dict
) -> None:
    """Each worker is a process that opens the store for itself. The loader may begin at any step."""
    flags = ["--num-workers", workers, "--start-method", method]
    loader = make_data(folder / "winds/v3", *flags, start=start).train_loader()
    assert loader.num_workers == workers
    assert_same(list(loader), expected["v3"][start:])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_share_the_batches_of_the_winds(accumulate: int, folder: Path, expected: dict) -> None:
    pieces = defaultdict(list)
    for rank in range(2):
        data = make_data(folder / "winds/v3", "--accumulate-grad-batches", accumulate)
        for number, batch in enumerate(data.train_loader(rank, 2)):
            pieces[number // accumulate].append(batch)
    together = []
    for step in range(STEPS):
        together.append({name: np.concatenate([piece[name] for piece in pieces[step]]) for name in NAMES})
    assert_same(together, expected["v3"])
