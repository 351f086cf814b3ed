"""Which block a sample is from: no block is in two slots, none is lost, and every step costs as much."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from math import ceil

import numpy as np
import pytest
from block_order import BlockOrder, BlockRead, fit_slots
from numbered_blocks import make_batches, make_order, reads_of


@cache
def orders() -> list[BlockOrder]:
    """All small cases: slots that are a multiple of the batch and divisors, as many as blocks and fewer."""
    found = []
    for blocks, batch, slots, per_block in product(
        (1, 2, 3, 5, 8, 13, 20), range(1, 7), range(1, 13), range(1, 6)
    ):
        if slots == fit_slots(slots, blocks, batch):
            found.append(make_order(blocks, batch, slots, per_block, seed=blocks))
    return found


def steps_of(order: BlockOrder, epochs: int) -> int:
    """So many steps take at least so many epochs."""
    samples = epochs * order.blocks * order.patches_per_block
    return ceil(samples / order.batch_size) + order.steps_per_round


def in_turn(order: BlockOrder, steps: int) -> Iterator[tuple[int, int, int]]:
    """(slot, read, patch) of each sample, in the order in which all slots give one after another."""
    for first in range(0, steps, order.steps_per_round):
        batches = range(first, first + order.steps_per_round)
        for part in range(order.samples_per_slot):
            for number, batch in enumerate(batches):
                for place, k in enumerate(range(part, order.batch_size, order.samples_per_slot)):
                    yield number * order.batch_size + place, *order.address(batch, k)


def test_no_block_is_in_two_slots_at_once() -> None:
    """In all small cases, over three epochs, at any sample."""
    assert len(orders()) > 500
    for order in orders():
        held: dict[int, int] = {}
        in_use: Counter = Counter()
        for slot, number, _ in in_turn(order, steps_of(order, 3)):
            block = order.read(number).block
            if slot in held and held[slot] != number:
                in_use[order.read(held[slot]).block] -= 1
            if held.get(slot) != number:
                in_use[block] += 1
                held[slot] = number
            assert in_use[block] == 1, order


def test_each_sample_of_every_block_comes_once_in_an_epoch_and_in_order() -> None:
    """Only the first block of a slot is shortened, so that slots change their blocks in different rounds."""
    for order in orders():
        given = defaultdict(list)
        for slot, number, patch in in_turn(order, steps_of(order, 3)):
            given[slot].append((number, patch))
        assert len(given) == order.slots
        for slot, samples in given.items():
            first, phase = samples[0]
            reads = range(first, first + 1 + order.slots * len(samples), order.slots)
            complete = product(reads, range(order.patches_per_block))
            assert samples == list(islice(complete, phase, phase + len(samples))), order
        for start in (0, order.blocks, 2 * order.blocks):  # of an epoch
            blocks = [order.read(number).block for number in range(start, start + order.blocks)]
            assert sorted(blocks) == list(range(order.blocks)), order


def test_every_step_needs_equally_many_new_blocks() -> None:
    """They differ by rounding only. In the first round, each slot takes its first block."""
    for order in orders():
        seen, new = set(), []
        for batch in make_batches(order, steps_of(order, 2)):
            reads = reads_of(order, [batch])
            new.append(len(reads - seen))
            seen |= reads
        later = new[order.steps_per_round :]
        average = order.batch_size / order.patches_per_block
        assert int(average) <= min(later) <= max(later) <= ceil(average), order


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("slots", "per_block"), [(32, 8), (32, 4), (32, 16), (16, 8), (8, 8)])
def test_every_round_of_a_rank_needs_equally_many_new_blocks(ranks: int, slots: int, per_block: int) -> None:
    """The batch of 8 is cut into slices, which differ by rounding only."""
    order = make_order(blocks=100, batch_size=8, slots=slots, patches_per_block=per_block)
    rounds = 2 * per_block + 1
    for rank in range(ranks):
        places = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        seen, new = set(), []
        for first in range(0, rounds * order.steps_per_round, order.steps_per_round):
            steps = range(first, first + order.steps_per_round)
            reads = {order.address(step, k)[0] for step, k in product(steps, places)}
            new.append(len(reads - seen))
            seen |= reads
        average = len(places) * order.steps_per_round / per_block
        assert int(average) <= min(new[1:]) <= max(new[1:]) <= ceil(average), (rank, new)


def test_epochs_and_seeds_have_orders_and_patches_of_their_own() -> None:
    reads = [make_order(seed=seed).read(number) for seed in (0, 1) for number in range(80)]
    blocks = [read.block for read in reads]
    assert len({tuple(blocks[start : start + 40]) for start in range(0, 160, 40)}) == 4
    assert len({read.rng.integers(2**62) for read in reads}) == 160


@pytest.mark.parametrize(
    ("slots", "reason"), [(12, "neither a multiple nor a divisor"), (48, "only 40 blocks")]
)
def test_slots_that_cannot_be_are_refused(slots: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots: {reason}"):
        make_order(blocks=40, batch_size=8, slots=slots)


def test_as_many_slots_as_blocks_and_the_batch_allow() -> None:
    for wanted, blocks, batch in product(range(1, 25), range(1, 25), range(1, 9)):
        if wanted % batch and batch % wanted:
            continue  # train.py refuses it
        allowed = [n for n in range(1, min(wanted, blocks) + 1) if not (n % batch and batch % n)]
        assert fit_slots(wanted, blocks, batch) == max(allowed), (wanted, blocks, batch)


@pytest.mark.parametrize(("samples", "number"), [(1, 3), (5, 2), (5, 5), (3, 8), (100, 8)])
def test_each_sample_of_a_block_is_dealt_once_before_any_is_dealt_again(samples: int, number: int) -> None:
    """Over epochs, each of which deals only some of them; another block and another turn in another order."""
    turns = 4
    epochs = ceil(turns * samples / number)
    dealt = {}
    for block in (0, 1):
        reads = [BlockRead(99, block, epoch, seed=0) for epoch in range(epochs)]
        dealt[block] = np.concatenate([read.deal(samples, number) for read in reads])
        for turn in np.split(dealt[block][: turns * samples], turns):
            assert sorted(turn) == list(range(samples))
    if samples == 100:
        assert not np.array_equal(dealt[0], dealt[1])
        assert not np.array_equal(dealt[0][:samples], dealt[0][samples : 2 * samples])
