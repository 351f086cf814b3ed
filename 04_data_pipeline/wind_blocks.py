"""The winds for the block loader: how a block is read, and how a batch is made of it."""

import sys

import numpy as np

from block_order import BlockRead
from data import PatchMaker, Sample
from sampling import draw_patches
from store import FieldReader


class WindBlocks:
    """Blocks of whole maps: one time, or all times of a chunk that has several.

    A block gives `patches_per_block` patches, of its times in turn. With fewer patches than
    times, an epoch has some of the times and the next epoch the next ones; the constructor
    prints a note. Share `reader` with nothing else: all that it reads is counted as the
    training's.
    """

    def __init__(self, maker: PatchMaker, reader: FieldReader, patches_per_block: int):
        self.maker = maker
        self.reader = reader
        self.patches_per_block = patches_per_block
        self.blocks = reader.split_by_chunk(maker.period.positions)
        self.counted = np.zeros(3, "int64")
        longest = max(map(len, self.blocks))
        if longest > patches_per_block:
            note = f"note: a chunk has {longest} times, of which an epoch uses"
            print(f"{note} --patches-per-block {patches_per_block}", file=sys.stderr)

    def __len__(self) -> int:
        return len(self.blocks)

    def read_block(self, read: BlockRead) -> list[Sample]:
        """The patches of a block. The maps themselves are not kept."""
        times = self.blocks[read.block]
        drawn = times[read.deal(len(times), self.patches_per_block)]
        patches = draw_patches(read.rng, drawn, self.maker.space)
        names = self.reader.variables
        size = self.maker.space.size
        values = np.empty((len(patches), len(names), size, size), "float32")
        first = self.maker.period.positions[times[0]]
        box = {"time": slice(first, first + len(times))}
        for number, name in enumerate(names):
            maps = self.reader.read(name, box)
            for n, patch in enumerate(patches):
                field = maps[patch.time - times[0]]
                values[n, number] = self.maker.cut(field, patch)
        return [Sample(*each) for each in zip(patches, values)]

    def make_batch(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        """See PatchMaker.make_batch; and what was read since the last batch:

        traffic (4,): requests, bytes, missing chunks, and the samples of this batch.
        """
        batch = self.maker.make_batch(samples)
        now = np.array(self.reader.traffic.counts())
        batch["traffic"] = np.array([*(now - self.counted), len(samples)])
        self.counted = now
        return batch
