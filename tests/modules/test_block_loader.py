"""Blocks lose and double no sample, their order is a function, and their memory is bounded."""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice, product
from math import ceil, gcd

import block_loader
import numpy as np
import pytest
from block_loader import BlockLoader, BlockOrder
from numbered_blocks import AtOnce, Numbers, make_batches, make_order, reads_of

GUARD = 30  # seconds until a test that would wait forever gives up

# ------------------------------------------------------------------------------ the order, by arithmetic


def orders() -> Iterator[BlockOrder]:
    """Small cases: fewer blocks than slots and more, patches that divide the batch and others."""
    for blocks, batch, rounds, per_block in product((1, 7, 40), (1, 3, 8), (1, 2, 4), (1, 2, 3, 8)):
        yield make_order(blocks, batch, rounds * batch, per_block, seed=blocks)


def test_each_sample_of_every_block_comes_once_in_an_epoch_and_in_order() -> None:
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
        for start in (0, order.blocks):  # of an epoch
            blocks = [order.block(read) for read in range(start, start + order.blocks)]
            assert sorted(blocks) == list(range(order.blocks)), order


def test_every_step_needs_equally_many_new_blocks() -> None:
    """They differ by rounding only. In the first round, each slot takes its first block."""
    for order in orders():
        seen, new = set(), []
        for batch in make_batches(order, order.steps_per_round * (2 * order.patches_per_block + 1)):
            reads = reads_of(order, [batch])
            new.append(len(reads - seen))
            seen |= reads
        first, later = new[: order.steps_per_round], new[order.steps_per_round :]
        average = order.batch_size / order.patches_per_block
        assert set(first) == {order.batch_size}
        assert int(average) <= min(later) <= max(later) <= ceil(average), order


def test_epochs_and_seeds_have_orders_and_patches_of_their_own() -> None:
    found = [Numbers(make_order(seed=seed)).key(read) for seed in (0, 1) for read in range(80)]
    blocks, drawn = zip(*found)
    assert len({blocks[start : start + 40] for start in range(0, 160, 40)}) == 4
    assert len(set(drawn)) == 160


def test_slots_that_are_no_multiple_of_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="12 slots: not a multiple of 8"):
        make_order(batch_size=8, slots=12)


# ------------------------------------------------------------------------------ the loader, for any data


@pytest.mark.parametrize(("batch", "slots", "per_block"), [(1, 1, 1), (4, 12, 5), (3, 9, 2), (8, 32, 8)])
@pytest.mark.parametrize(("ahead", "threads", "start"), [(1, 1, 7), (5, 3, 0), (9999, 64, 29)])
def test_the_batches_are_those_of_the_order_and_no_block_is_read_twice(
    batch: int, slots: int, per_block: int, ahead: int, threads: int, start: int
) -> None:
    """From any step, however far ahead, by any number of threads, with fewer blocks than slots, and again."""
    for blocks in (5, 40):
        numbers = Numbers(make_order(blocks, batch, slots, per_block))
        batches = make_batches(numbers.order, start + 3 * per_block * slots // batch)[start:]
        loader = numbers.loader(batches, blocks_ahead=ahead, threads=threads)
        expected = numbers.evaluate(batches)
        assert list(loader) == expected
        assert sorted(numbers.read) == sorted(map(numbers.key, reads_of(numbers.order, batches)))
        assert list(loader) == expected


def test_as_many_blocks_are_read_at_once_as_there_are_threads() -> None:
    """Each read waits at a barrier until four have begun."""
    barrier, threads = threading.Barrier(4), set()

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        barrier.wait(GUARD)
        threads.add(threading.get_ident())
        return [block]

    order = make_order(patches_per_block=1)
    assert len(list(BlockLoader(order, make_batches(order, 6), read_block, list, threads=4))) == 6
    assert len(threads) == 4


# ------------------------------------------------------------------------------ memory, threads and errors


@pytest.fixture
def wait_for_threads() -> Iterator[Callable]:
    """Call it to wait until the threads that this test has started have ended; all have to."""
    before = threading.enumerate()

    def wait_for_all() -> None:
        for thread in threading.enumerate():
            if thread not in before:
                thread.join(GUARD)
                assert not thread.is_alive()

    yield wait_for_all
    wait_for_all()


@pytest.mark.parametrize(
    ("batch", "slots", "per_block", "ahead", "depth", "workers"),
    [
        (4, 8, 3, 4, 3, 1),
        (4, 4, 1, 1, 1, 1),
        (2, 8, 2, 16, 16, 1),
        *((8, 32, 8, 16, 16, n) for n in (1, 2, 3)),
    ],
)
def test_no_more_is_read_ahead_and_held_than_is_said(
    batch: int, slots: int, per_block: int, ahead: int, depth: int, workers: int, monkeypatch
) -> None:
    """Nothing is read until somebody asks for a batch; then, also the blocks of `depth` batches more.

    Blocks are counted when a batch is made. At the end none is left.
    """
    blocks, held = [], []  # a sample of each block, and how many of them are there

    def read_block(block: int, rng: np.random.Generator) -> list[np.ndarray]:
        samples = [np.full(10, block) for _ in range(per_block)]
        blocks.append(weakref.ref(samples[0]))
        return samples

    def make_batch(samples: list[np.ndarray]) -> np.ndarray:
        held.append(sum(block() is not None for block in blocks))
        return np.stack(samples)

    monkeypatch.setattr(block_loader, "ThreadPoolExecutor", AtOnce)
    order = make_order(1000, batch, slots, per_block)
    batches = make_batches(order, 6 * per_block * order.steps_per_round)[::workers]  # the first worker's
    found = iter(BlockLoader(order, batches, read_block, make_batch, ahead))
    assert blocks == []
    planned = reads_of(order, batches[:depth])
    for number in range(len(batches)):
        next(found)
        planned |= reads_of(order, batches[number + depth : number + depth + 1])
        assert len(blocks) == len(planned)
    assert list(found) == []
    assert all(block() is None for block in blocks)
    own_slots = slots // gcd(workers, order.steps_per_round)
    new = ceil(batch / per_block) * workers // gcd(workers, order.steps_per_round)
    assert len(blocks) > own_slots + ahead
    assert own_slots < max(held) <= own_slots + (depth + 1) * new


def test_an_error_comes_with_the_batch_that_needs_the_block_and_waits_for_no_other(wait_for_threads) -> None:
    """Others may take as long as a server that does not answer. The threads end while the error is kept.

    Reads that have not begun never do.
    """
    order = make_order(1000, patches_per_block=1)
    needed = {order.block(order.address(step, k)[0]) for step in range(8) for k in range(4)}
    bad = order.block(order.address(7, 0)[0])
    entered, released, ended = threading.Event(), threading.Event(), []

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        if block not in needed:
            entered.set()
            released.wait(GUARD)
        if block == bad:
            assert entered.wait(GUARD)
            raise OSError("gone")
        ended.append(block)
        return [block]

    found = iter(BlockLoader(order, make_batches(order, 20), read_block, list, blocks_ahead=999, threads=8))
    assert len(list(islice(found, 7))) == 7
    with pytest.raises(OSError, match="gone") as caught:
        next(found)
    assert set(ended) <= needed
    released.set()
    wait_for_threads()
    assert len(ended) < 50  # of 80: what the threads were at, and no more
    assert caught.tb is not None


def test_to_close_the_iterator_waits_for_the_reads_that_run_and_begins_no_other(wait_for_threads) -> None:
    """Else a server that ends next would still be asked, and a program would end while its threads read."""
    order = make_order(1000, slots=4, patches_per_block=1)
    early = {order.block(read) for read in range(4)}
    entered, begun, ended = threading.Event(), [], []

    def read_block(block: int, rng: np.random.Generator) -> list[int]:
        if block not in early:
            begun.append(block)
            entered.set()
            time.sleep(0.3)
            ended.append(block)
        return [block]

    found = iter(BlockLoader(order, make_batches(order, 200), read_block, list, blocks_ahead=400, threads=2))
    next(found)
    assert entered.wait(GUARD)
    found.close()
    assert sorted(ended) == sorted(begun)
    assert len(begun) < 400  # most were cancelled
