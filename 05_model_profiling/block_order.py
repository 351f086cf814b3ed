"""Which block each sample is from, and which of its samples: functions of (seed, step, k).

There is no state to save or lose, whatever the number of ranks, workers and restarts.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

ORDER_VERSION = 2  # one more whenever the order changes; 1 was before 26 November 2026
# Numbers of the random streams: each use has its own. The first two are those of sampling.py.
ORDER_STREAM = 1  # the order of the blocks
PATCH_STREAM = 2  # what is cut from a block
DEAL_STREAM = 3  # which of its samples a block gives next


def shuffle(seed: int, epoch: int, blocks: int) -> np.ndarray:
    """The blocks in random order, (blocks,)."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(blocks)


@lru_cache(maxsize=2)
def read_order(seed: int, epoch: int, blocks: int, slots: int) -> np.ndarray:
    """The order in which an epoch reads the blocks, (blocks,): each of them once.

    Any `slots` reads in a row are of different blocks, also from one epoch to the next:
    what the epoch before read last is not read again until its slot is free.
    """
    if blocks < 2 * slots:  # most are in use at any time: in the same order each epoch
        return shuffle(seed, 0, blocks)
    order = shuffle(seed, epoch, blocks)
    if epoch == 0:
        return order
    held = shuffle(seed, epoch - 1, blocks)[-slots:]
    front, back = np.split(order, [blocks - slots])  # the next epoch relies on the back
    is_free = ~np.isin(front, held)
    is_waiting = np.isin(held, front)
    return np.concatenate([front[is_free], held[is_waiting], back])


def fit_slots(wanted: int, blocks: int, batch_size: int) -> int:
    """The most slots, up to those wanted, that BlockOrder takes for so many blocks."""
    slots = min(wanted, blocks)
    if slots > batch_size:
        return slots // batch_size * batch_size
    while batch_size % slots:
        slots -= 1
    return slots


@dataclass(frozen=True)
class BlockRead:
    """One reading of a block: what `read_block` is told of it."""

    number: int  # among all reads of a run
    block: int
    epoch: int  # how often this block was read before
    seed: int

    @cached_property
    def rng(self) -> np.random.Generator:
        """The random numbers of this read, for what is cut from its block."""
        return np.random.default_rng((PATCH_STREAM, self.seed, self.number))

    def deal(self, samples: int, number: int) -> np.ndarray:
        """Which `number` of a block's `samples` to take, (number,).

        Each comes once before any comes again, over as many epochs as that takes.
        """
        if samples == 1:
            return np.zeros(number, int)
        dealt_before = self.epoch * number
        turns, places = np.divmod(dealt_before + np.arange(number), samples)
        dealt = np.empty(number, int)
        for turn in np.unique(turns):
            rng = np.random.default_rng((DEAL_STREAM, self.seed, self.block, turn))
            is_now = turns == turn
            dealt[is_now] = rng.permutation(samples)[places[is_now]]
        return dealt


class Window(NamedTuple):
    """Batches that a run leaves out: those from `first` on, and before `stop`."""

    first: int
    stop: int


def batch_number(step: int, skipped: tuple[Window, ...]) -> int:
    """The batch that a step trains on: later steps move up by as many as are left out."""
    number = step
    for window in sorted(skipped):
        if number >= window.first:
            number += window.stop - window.first
    return number


@dataclass(frozen=True)
class BlockOrder:
    """Which block each sample is from: `slots` blocks are in use, no two of them the same.

    A slot gives the samples of its block one after another, `patches_per_block` of them,
    and then takes the next block of the epoch. `slots` is a multiple of `batch_size`, and
    the batches go round; or a divisor, and each slot gives several samples of a batch.
    There are at most as many slots as blocks: see `fit_slots`. `skipped` batches are left
    out, as after a bad loss.
    """

    blocks: int
    batch_size: int
    slots: int
    patches_per_block: int
    seed: int
    skipped: tuple[Window, ...] = ()

    def __post_init__(self):
        if min(self.blocks, self.batch_size, self.slots, self.patches_per_block) < 1:
            raise ValueError(f"{self}: give at least 1 of each")
        if self.slots % self.batch_size and self.batch_size % self.slots:
            reason = "neither a multiple nor a divisor of the batch"
            raise ValueError(f"{self.slots} slots: {reason} of {self.batch_size}")
        if self.slots > self.blocks:
            reason = f"only {self.blocks} blocks"
            raise ValueError(f"{self.slots} slots: {reason}; see fit_slots")

    @property
    def steps_per_round(self) -> int:
        """In a round of so many steps each slot is used once."""
        return max(1, self.slots // self.batch_size)

    @property
    def samples_per_slot(self) -> int:
        """How many samples a slot gives to a batch that uses it."""
        return max(1, self.batch_size // self.slots)

    @cached_property
    def phases(self) -> np.ndarray:
        """The sample of its first block with which each slot begins, (slots,).

        Else all would change blocks at once. So each step needs equally many new blocks,
        and of each rank, which has some of the places in a batch, each round does.
        """
        batches, places = np.divmod(np.arange(self.slots), self.batch_size)
        first_samples = places * self.samples_per_slot
        shifts = batches * self.patches_per_block // self.steps_per_round
        return (first_samples + shifts) % self.patches_per_block

    @cached_property
    def turns(self) -> list[int]:
        """The place of each slot among those that change blocks one after another."""
        by_turn = np.argsort(-self.phases, kind="stable")
        return np.argsort(by_turn).tolist()

    def address(self, step: int, k: int) -> tuple[int, int]:
        """Of sample k of a step: its read, and its place among that read's samples."""
        batch = batch_number(step, self.skipped)
        per_slot = self.samples_per_slot
        slot = batch % self.steps_per_round * self.batch_size + k // per_slot
        given = batch // self.steps_per_round * per_slot + k % per_slot
        given += int(self.phases[slot])
        blocks_before, patch = divmod(given, self.patches_per_block)
        return blocks_before * self.slots + self.turns[slot], patch

    def read(self, number: int) -> BlockRead:
        """A read by its number: each epoch reads every block once."""
        epoch, position = divmod(number, self.blocks)
        order = read_order(self.seed, epoch, self.blocks, self.slots)
        return BlockRead(number, int(order[position]), epoch, self.seed)
