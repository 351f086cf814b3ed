"""The winds for the block loader: how a block is read, and how a batch is made of it."""

import numpy as np

from data import PatchDataset, Sample
from fields import times_per_chunk
from sampling import draw_patches
from store import FieldReader


class WindBlocks:
    """Blocks of whole maps: one time, or all times of a chunk that has several.

    Give at least as many patches as a chunk has times, else an epoch leaves some out.
    `reader` should be no other's, because what it reads is counted as the training's.
    """

    def __init__(
        self, dataset: PatchDataset, reader: FieldReader, patches_per_block: int
    ):
        self.dataset = dataset
        self.reader = reader
        self.patches_per_block = patches_per_block
        positions = dataset.period.positions
        chunks = positions // times_per_chunk(reader.open())
        starts = np.flatnonzero(np.diff(chunks, prepend=-1))
        self.blocks = np.split(np.arange(len(positions)), starts[1:])  # times of each
        self.counted = np.zeros(2, "int64")

    def __len__(self) -> int:
        return len(self.blocks)

    def read_block(self, block: int, rng: np.random.Generator) -> list[Sample]:
        """The patches of a block, drawn by `rng`. The maps themselves are not kept."""
        times = self.blocks[block]
        shuffled = rng.permutation(times)
        drawn = np.resize(shuffled, self.patches_per_block)  # each time equally often
        patches = draw_patches(rng, drawn, self.dataset.space)
        names = self.reader.variables
        size = self.dataset.space.size
        values = np.empty((len(patches), len(names), size, size), "float32")
        first = self.dataset.period.positions[times[0]]
        region = {"time": slice(first, first + len(times))}
        for number, name in enumerate(names):
            maps = self.reader.read(name, region)
            for n, patch in enumerate(patches):
                field = maps[patch.time - times[0]]
                values[n, number] = self.dataset.cut(field, patch)
        return [Sample(*each) for each in zip(patches, values)]

    def make_batch(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        """See PatchDataset.make_batch; and what was read since the last batch:

        traffic (3,): requests, bytes, and the samples of this batch.
        """
        batch = self.dataset.make_batch(samples)
        now = np.array(self.reader.traffic())
        batch["traffic"] = np.array([*(now - self.counted), len(samples)])
        self.counted = now
        return batch
