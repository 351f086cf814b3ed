"""Batches are those of the order, whoever reads ahead; memory is bounded, and threads end."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate, islice

import block_loader
import numpy as np
import pytest
from block_loader import BlockLoader
from block_order import BlockRead
from numbered_blocks import AtOnce, Numbers, make_batches, make_order, reads_of

GUARD = 30  # seconds until a test that would wait forever gives up

# ------------------------------------------------------------------------------ the loader, for any data


@pytest.mark.parametrize(
    ("batch", "slots", "per_block"), [(1, 1, 1), (4, 12, 5), (3, 9, 2), (8, 32, 8), (6, 2, 4)]
)
@pytest.mark.parametrize(("ahead", "start"), [(1, 7), (5, 0), (64, 0), (9999, 29)])
def test_the_batches_are_those_of_the_order_and_no_block_is_read_twice(
    batch: int, slots: int, per_block: int, ahead: int, start: int
) -> None:
    """From any step, however far ahead, with as many blocks as slots and more."""
    for blocks in (slots, 40):
        numbers = Numbers(make_order(blocks, batch, slots, per_block))
        batches = make_batches(numbers.order, start + 3 * per_block * slots // batch)[start:]
        loader = numbers.loader(batches, blocks_ahead=ahead)
        expected = numbers.evaluate(batches)
        assert list(loader) == expected
        assert sorted(numbers.read) == sorted(map(numbers.key, reads_of(numbers.order, batches)))
        assert list(loader) == expected


@pytest.mark.parametrize("number", [0, 2, 4])
def test_too_few_samples_of_a_block_and_too_many_are_refused_with_both_numbers(number: int) -> None:
    order = make_order(patches_per_block=3)
    loader = BlockLoader(order, make_batches(order, 6), lambda read: [read.block] * number, list)
    with pytest.raises(ValueError, match=rf"gave {number} samples of block \d+; patches_per_block is 3"):
        list(loader)


def test_as_many_blocks_are_read_at_once_as_are_asked_for_ahead() -> None:
    """Each read waits at a barrier until four have begun."""
    barrier, threads = threading.Barrier(4), set()

    def read_block(read: BlockRead) -> list[int]:
        barrier.wait(GUARD)
        threads.add(threading.get_ident())
        return [read.block]

    order = make_order(patches_per_block=1)
    assert len(list(BlockLoader(order, make_batches(order, 6), read_block, list, 4))) == 6
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
    ("batch", "slots", "per_block", "ahead", "pieces", "workers"),
    [
        (4, 8, 3, 4, 1, 1),
        (4, 4, 1, 1, 1, 1),
        (2, 8, 2, 16, 1, 1),
        *((8, 32, 8, 16, 1, n) for n in (1, 2, 3)),
        (64, 256, 8, 24, 8, 1),
        *(pytest.param(64, 256, 8, 24, n, 1, marks=pytest.mark.thorough) for n in (1, 64)),
        (8, 32, 8, 16, 4, 2),
    ],
)
def test_so_many_blocks_are_read_ahead_and_no_more_are_held_than_is_said(
    batch: int, slots: int, per_block: int, ahead: int, pieces: int, workers: int, monkeypatch
) -> None:
    """Also by a rank or a micro-batch, which has one of so many pieces of each batch, and by a worker.

    Nothing is read until somebody asks for a batch. Blocks are counted when a batch is made. At the end
    none is left.
    """
    blocks, held = [], []  # a sample of each block, and how many of them are there

    def read_block(read: BlockRead) -> list[np.ndarray]:
        samples = [np.full(10, read.block) for _ in range(per_block)]
        blocks.append(weakref.ref(samples[0]))
        return samples

    def make_batch(samples: list[np.ndarray]) -> np.ndarray:
        held.append(sum(block() is not None for block in blocks))
        return np.stack(samples)

    monkeypatch.setattr(block_loader, "ThreadPoolExecutor", AtOnce)
    order = make_order(1000, batch, slots, per_block)
    batches = make_batches(order, (6 + ahead) * per_block * order.steps_per_round)
    batches = [piece[: batch // pieces] for piece in batches][::workers]  # the first rank's and worker's
    found = iter(BlockLoader(order, batches, read_block, make_batch, ahead))
    assert blocks == []
    needed = accumulate(batches, lambda reads, batch: reads | reads_of(order, [batch]), initial=set())
    begun = [len(reads) for reads in needed]
    new = max(np.diff(begun[slots // batch + 1 :]))  # of a batch; the first ones fill the slots
    for number in range(1, len(batches) + 1):
        next(found)
        read_ahead = len(blocks) - begun[number]
        assert read_ahead < ahead + max(np.diff(begun))
        assert read_ahead >= ahead or len(blocks) == begun[-1]
    assert list(found) == []
    assert all(block() is None for block in blocks)
    own_slots = len({order.address(step, k)[0] % slots for piece in batches for step, k in piece})
    assert len(blocks) > own_slots + ahead
    assert own_slots <= max(held) < own_slots + ahead + new


def test_an_error_comes_with_the_batch_that_needs_the_block_and_waits_for_no_other(wait_for_threads) -> None:
    """Others may take as long as a server that does not answer. The threads end while the error is kept.

    Reads that have not begun never do.
    """
    order = make_order(1000, patches_per_block=1)
    needed = {order.read(order.address(step, k)[0]).block for step in range(8) for k in range(4)}
    bad = order.read(order.address(7, 0)[0]).block
    entered, released, ended = threading.Event(), threading.Event(), []

    def read_block(read: BlockRead) -> list[int]:
        if read.block not in needed:
            entered.set()
            released.wait(GUARD)
        if read.block == bad:
            assert entered.wait(GUARD)
            raise OSError("gone")
        ended.append(read.block)
        return [read.block]

    found = iter(BlockLoader(order, make_batches(order, 20), read_block, list, blocks_ahead=8))
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
    early = {order.read(number).block for number in range(4)}
    entered, begun, ended = threading.Event(), [], []

    def read_block(read: BlockRead) -> list[int]:
        if read.block not in early:
            begun.append(read.block)
            entered.set()
            time.sleep(0.3)
            ended.append(read.block)
        return [read.block]

    found = iter(BlockLoader(order, make_batches(order, 200), read_block, list, blocks_ahead=2))
    next(found)
    assert entered.wait(GUARD)
    found.close()
    assert sorted(ended) == sorted(begun)
    assert len(begun) < 400  # most were cancelled
