"""Chapter 4's blocks: nothing lost or doubled, a share of a map for a sample, bounded memory."""

import math
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import book
import numpy as np
import pytest
import torch
from made_up_winds import COLUMNS, ROWS, SIZE, flags_for, make_datamodule, make_winds, write
from numbered_blocks import AtOnce

TRAINED = 73  # times of the first two years
REQUESTS = 2  # a map has an object for u and one for v
MIXED = "--batch-size 4 --shuffle-slots 8 --patches-per-block".split()


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global block_loader, block_order, data, wind_blocks
    with book.rooms("04_data_pipeline"):
        import block_loader
        import block_order
        import data
        import wind_blocks

        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its values say where they are from: u is the number of the time, v has also row and column."""
    winds = make_winds()[["u", "v"]]
    time, row, column = np.indices(winds.u.shape)
    winds.u.values[:] = time
    winds.v.values[:] = 10_000 * time + 100 * row + column
    return write(tmp_path_factory.mktemp("stores") / "winds", winds)


@pytest.fixture
def made(store: Path) -> Callable:
    """Call it with flags: the data module of that store, which subtracts nothing from the values."""

    def call(*flags: object):
        module = make_datamodule(flags_for(store, "--accelerator", "cpu", *flags))
        maker = module.blocks.maker
        maker.mean, maker.std = np.zeros_like(maker.mean), np.ones_like(maker.std)
        return module

    return call


def addresses(module) -> list[tuple[int, int]]:
    """The read and the patch of each sample of a run, in the order of its batches."""
    order, steps = module.order, module.hparams.max_steps
    return [order.address(step, k) for step in range(steps) for k in range(order.batch_size)]


def find(target: np.ndarray) -> tuple[int, int, int]:
    """The time, row and column at which a patch begins. AssertionError unless it goes on as the map does."""
    time, place = divmod(int(target[1, 0, 0]), 10_000)
    row, column = divmod(place, 100)
    rows, columns = np.ogrid[row : row + SIZE, column : column + SIZE]
    where = 10_000 * time + 100 * rows + columns % COLUMNS
    np.testing.assert_array_equal(target, [np.full((SIZE, SIZE), time), where])
    return time, row, column


@pytest.mark.parametrize("per_block", [1, 3])
def test_an_epoch_has_every_map_once_and_every_patch_of_it_once(per_block: int, made: Callable) -> None:
    """With its own values, across the seam too. Only the first maps of the slots are begun in the middle."""
    module = made(*MIXED, per_block, "--max-steps", 40 * per_block)
    targets = [target for batch in module.train_loader() for target in batch["target"].numpy()]
    patches = [find(target) for target in targets]
    reads = addresses(module)
    assert len(patches) == len(reads) == len(set(reads))
    maps = {}
    for (read, _), (time, _, _) in zip(reads, patches):
        assert maps.setdefault(read, time) == time
    epochs = [[maps[read] for read in range(start, start + TRAINED)] for start in (0, TRAINED)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(TRAINED))
    assert epochs[0] != epochs[1]
    whole = {(read, n) for read in range(8, 2 * TRAINED) for n in range(per_block)}
    assert whole <= set(reads)
    assert len(set(patches)) > 0.95 * len(patches)  # they rarely coincide
    assert any(column > COLUMNS - SIZE for _, _, column in patches)
    assert {row for _, row, _ in patches} == set(range(ROWS - SIZE + 1))


@pytest.mark.parametrize("per_block", [1, 4])
def test_a_sample_costs_a_share_of_a_map_and_a_whole_one_as_in_chapter_3(
    per_block: int, made: Callable
) -> None:
    module = made(*MIXED, per_block, "--max-steps", 40)
    requests, _, missing, samples = sum(batch["traffic"] for batch in module.train_loader()).tolist()
    assert (missing, samples) == (0, 160)
    assert requests == REQUESTS * len({read for read, _ in addresses(module)})
    # The slots' last maps are not used up.
    assert REQUESTS / per_block <= requests / samples < 1.2 * REQUESTS / per_block

    reader = module.data.reader.counted_apart()
    dataset = data.PatchDataset(module.blocks.maker, reader, batch_size=4, seed=0)
    for step in range(5):
        dataset.__getitems__([(step, k) for k in range(4)])
    assert reader.traffic.counts()[0] >= REQUESTS * 20  # and more where a patch crosses the seam


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize(("workers", "times"), [(0, 1), (1, 1), (2, 1), (3, 3), (4, 1), (6, 3)])
def test_by_default_workers_cost_no_request_and_other_numbers_are_warned_of(
    workers: int, times: int, made: Callable, monkeypatch, capsys
) -> None:
    """With the factor that is counted. Workers come one after another here."""
    monkeypatch.setattr("multiprocessing.set_forkserver_preload", lambda names: None)
    module = made("--batch-size", 4, "--patches-per-block", 8, "--max-steps", 96, "--num-workers", workers)
    requests = 0
    for worker in range(max(1, workers)):
        place = Namespace(id=worker, num_workers=workers) if workers else None
        monkeypatch.setattr(block_loader, "get_worker_info", lambda place=place: place)
        requests += sum(batch["traffic"][0] for batch in module.train_loader().dataset)
    note = f"with --num-workers {workers} each block is read {times} times"
    assert (note in capsys.readouterr().err) == (times > 1)
    # A worker that begins or ends within a slot's map may leave out the others' share of it.
    expected = times * REQUESTS * len({read for read, _ in addresses(module)})
    assert 0.9 * expected < requests <= expected


@pytest.mark.parametrize(("slots", "per_block"), [(8, 3), (16, 2)])
def test_memory_is_bounded_by_the_slots_and_what_is_read_ahead(
    slots: int, per_block: int, made: Callable, monkeypatch
) -> None:
    """However long the run is. Of maps only the patches are there."""
    blocks, held, read_block = [], [], wind_blocks.WindBlocks.read_block

    def watched(self, read: block_order.BlockRead) -> list:
        samples = read_block(self, read)
        values = samples[0].values.base  # of all patches of the block
        assert values.shape == (per_block, 2, SIZE, SIZE)
        blocks.append(weakref.ref(values))
        return samples

    monkeypatch.setattr(wind_blocks.WindBlocks, "read_block", watched)
    monkeypatch.setattr(block_loader, "ThreadPoolExecutor", AtOnce)
    steps = 10 * per_block * slots // 4
    flags = ["--batch-size", 4, "--shuffle-slots", slots, "--patches-per-block", per_block]
    loader = made(*flags, "--max-steps", steps).train_loader().dataset
    for _ in loader:
        held.append(sum(block() is not None for block in blocks))
    new = math.ceil(4 / per_block)
    assert len(blocks) >= 10 * slots
    assert slots < max(held) <= slots + loader.blocks_ahead + new
    assert all(block() is None for block in blocks)


def test_beyond_its_edge_a_patch_goes_on() -> None:
    """So the network of a field without a feature has none at the edge. Chapter 5 pads with zeros."""
    import model

    module = model.FillGaps([1.0, 1.0], {"m/s": [0, 1]}, learning_rate=1e-3, max_steps=10, seed=0)
    field = torch.tensor([0.5, -0.2, 1.0]).double().view(1, 3, 1, 1).expand(-1, -1, 16, 16)
    found = module.double()(field)
    assert torch.allclose(found, found[..., :1, :1])
