"""Blocks of the winds: what they hold, what is cut from them, and what they cost."""

import weakref
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from block_order import BlockRead
from made_up_winds import COLUMNS, LAND, ROWS, SIZE, flags_for, make_datamodule, make_winds, with_land, write
from store import FieldReader

LAYOUTS = {
    "single": {"chunks": (1, 10, 20)},
    "shards": {"chunks": (1, 10, 20), "shards": (4, ROWS, COLUMNS)},
    "times": {"chunks": (4, 10, 20)},
}
OBJECTS = 8  # of a block, for both variables
LATER = ("--train-times", "1982-01-25", "1983")  # positions 3 to 72

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets. In its bucket `winds`, each layout has a store whose values say where they are from.

    u is the number of the time, and is missing on land; v also has row and column.
    """
    winds = make_winds()[["u", "v"]]
    time, row, column = np.indices(winds.u.shape)
    winds.u.values[:] = time
    winds.v.values[:] = 10_000 * time + 100 * row + column
    folder = tmp_path_factory.mktemp("buckets")
    for name, layout in LAYOUTS.items():
        write(folder / "winds" / name, with_land(winds), **layout)
    return folder


@pytest.fixture(scope="module")
def make_data(folder: Path) -> Callable:
    """Call it with a layout and flags: the data module of that store. Each slot reads several blocks."""

    def call(layout: str, *flags: object):
        few = ["--max-steps", 10, "--shuffle-slots", 8, "--patches-per-block", 4, "--accelerator", "cpu"]
        return make_datamodule(flags_for(folder / "winds" / layout, *few, *flags))

    return call


@pytest.mark.parametrize(("layout", "times"), [("single", 1), ("shards", 1), ("times", 4)])
def test_a_block_is_all_training_times_of_a_chunk(layout: str, times: int, make_data) -> None:
    """In a sharded store, of the chunk inside the shard. The first and the last have fewer training times."""
    blocks = make_data(layout, *LATER).blocks
    found = [blocks.maker.period.positions[block].tolist() for block in blocks.blocks]
    chunks = groupby(range(3, 73), lambda position: position // times)
    assert found == [list(chunk) for _, chunk in chunks]


def check_values(batch: dict, k: int, position: int, row: int, column: int, swath: np.ndarray) -> None:
    """Sample k is the patch that begins there, across the seam if need be, under that swath."""
    rows, columns = np.ogrid[row : row + SIZE, column : column + SIZE]
    columns = columns % COLUMNS
    valid = np.ones((ROWS, COLUMNS), bool)
    valid[LAND] = False
    valid = valid[rows, columns]
    where = 10_000 * position + 100 * rows + columns
    truth = valid * np.stack([np.full((SIZE, SIZE), position), where])
    np.testing.assert_array_equal(batch["target"][k], truth)
    np.testing.assert_array_equal(batch["input"][k], [*truth * swath, valid & swath])
    np.testing.assert_array_equal(batch["unseen"][k, 0], valid & ~swath)
    weight = np.cos(np.deg2rad(9 * rows - 85.5)) * (valid & ~swath)
    np.testing.assert_allclose(batch["weight"][k, 0], weight, atol=1e-6)


@pytest.mark.parametrize("layout", ["single", "times"])
def test_a_sample_is_the_patch_of_its_block_which_costs_its_objects_once(
    layout: str, make_data, folder: Path
) -> None:
    """It is of one of the block's times, may cross the seam, and leaves out the cells without a climatology."""
    blocks = make_data(layout, *LATER).blocks
    blocks.maker.mean = np.zeros_like(blocks.maker.mean)
    blocks.maker.std = np.ones_like(blocks.maker.std)
    positions = blocks.maker.period.positions
    drawn, corners, crossing, masked = set(), set(), 0, 0
    for block, times in enumerate(blocks.blocks):
        samples = blocks.read_block(BlockRead(block, block, 0, seed=0))
        batch = blocks.make_batch(samples)
        assert len(samples) == 4
        for k, (patch, _) in enumerate(samples):
            check_values(batch, k, positions[patch.time], patch.row, patch.column, patch.seen)
            assert patch.time in times
            drawn.add(patch.time)
            corners.add((patch.time, patch.row, patch.column))
            crossing += patch.column > COLUMNS - SIZE
        masked += (batch["target"] == 0).all(axis=1).sum()
        chunk = positions[times[0]] // LAYOUTS[layout]["chunks"][0]
        sizes = [path.stat().st_size for path in (folder / "winds" / layout).glob(f"[uv]/c/{chunk}/*/*")]
        assert batch["traffic"].tolist() == [OBJECTS, sum(sizes), 0, 4]
    assert drawn == set(range(len(positions)))
    assert len(corners) > 0.9 * len(blocks) * 4  # they rarely coincide
    assert crossing
    assert masked


@pytest.mark.parametrize("per_block", [2, 3, 6])
def test_every_time_of_a_chunk_is_drawn_before_one_is_drawn_again(
    per_block: int, make_data, monkeypatch
) -> None:
    """Over epochs: with fewer patches than times, an epoch has some of them, and the next one the next."""
    blocks = make_data("times", "--patches-per-block", per_block).blocks
    monkeypatch.setattr(FieldReader, "read", lambda *_: np.zeros((4, ROWS, COLUMNS)))
    drawn = []
    for epoch in range(12):
        samples = blocks.read_block(BlockRead(99 * epoch, 0, epoch, seed=0))
        drawn += [sample.patch.time for sample in samples]
    rounds = np.array(drawn[: len(drawn) // 4 * 4]).reshape(-1, 4)
    assert (np.sort(rounds) == np.sort(rounds[0])).all()
    assert len({tuple(one) for one in rounds.tolist()}) > 3  # in another order each time


def test_no_map_is_kept(make_data, monkeypatch) -> None:
    """Patches are copies, so that nothing else of a map is held."""
    maps, read = [], FieldReader.read

    def watched(self, *args) -> np.ndarray:
        values = read(self, *args).copy()  # a view would not be known by its own references
        maps.append(weakref.ref(values))
        return values

    blocks = make_data("times").blocks
    monkeypatch.setattr(FieldReader, "read", watched)
    samples = blocks.read_block(BlockRead(0, 0, 0, seed=0))
    assert len(samples) == 4
    assert len(maps) == 2
    assert all(reference() is None for reference in maps)
