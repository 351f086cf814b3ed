"""The loaders share a global batch among ranks and workers, and say what workers cost."""

from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import block_loader
import pytest
from block_order import fit_slots
from datamodule import WindDataModule, count_readers
from numbered_blocks import Numbers, make_order

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.fixture(autouse=True)
def programs_import_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else later programs of the suite would be forked from what loaders import ahead."""
    monkeypatch.setattr("multiprocessing.set_forkserver_preload", lambda names: None)


def make_loader(
    numbers: Numbers,
    steps: int,
    accumulate: int = 1,
    workers: int = 0,
    place: tuple = (0, 1),
    slots: int | None = None,
):
    """The DataLoader of a rank, whose samples are numbers. Its block loader, .dataset, needs no worker."""
    options = {"batch_size": numbers.order.batch_size, "max_steps": steps, "num_workers": workers}
    options |= {"shuffle_slots": slots or numbers.order.slots}
    options |= {"accumulate_grad_batches": accumulate, "start_method": "forkserver"}
    options |= {"patch_size": 16, "eval_samples": 4}
    nothing = SimpleNamespace(validation=None, test=None, eval_patches=lambda *_: None)
    module = WindDataModule(nothing, options=options, order=numbers.order, blocks=numbers, first_step=0)
    return module.train_loader(*place)


@pytest.mark.parametrize(
    ("slots", "ranks", "accumulate"), [(8, 2, 1), (16, 3, 1), (24, 8, 1), (8, 1, 2), (16, 3, 2), (24, 4, 2)]
)
def test_ranks_share_the_global_batch_and_no_block(slots: int, ranks: int, accumulate: int, capsys) -> None:
    """Their slices may be unequal, and come in micro-batches. One of them prints what workers cost."""
    whole = Numbers(make_order(batch_size=8, slots=slots))
    expected = list(make_loader(whole, 20).dataset)
    pieces = [[] for _ in range(20)]
    sizes, read = set(), []
    for rank in range(ranks):
        own = Numbers(whole.order)
        loader = make_loader(own, 20, accumulate, workers=5, place=(rank, ranks)).dataset
        batches = list(loader)
        assert len(batches) == len(loader) == 20 * accumulate
        for number, batch in enumerate(batches):
            pieces[number // accumulate] += batch
            sizes.add(len(batch))
        read += own.read
    assert pieces == expected
    assert sorted(read) == sorted(whole.read)
    assert max(sizes) - min(sizes) <= 1
    assert capsys.readouterr().err.count("each block is read 3 times") == 1


# By default, the slots are four batches: up to four workers cost no read, but for three.
@pytest.mark.parametrize(
    ("slots", "workers", "accumulate", "readers", "fewer"),
    [
        (32, 1, 1, 1, 1),
        (32, 2, 1, 1, 2),
        (32, 4, 1, 1, 4),
        (32, 3, 1, 3, 2),
        (32, 6, 1, 3, 4),
        (24, 2, 1, 2, 1),
        (8, 4, 1, 4, 1),
        (8, 2, 2, 1, 2),
        (24, 4, 2, 2, 3),
    ],
)
def test_workers_change_no_batch_and_read_blocks_as_often_as_the_note_says(
    slots: int, workers: int, accumulate: int, readers: int, fewer: int, monkeypatch, capsys
) -> None:
    """`fewer` workers would read each block once. Here, workers come one after another."""
    numbers = Numbers(make_order(batch_size=8, slots=slots, patches_per_block=8))
    whole = Numbers(numbers.order)
    expected = list(make_loader(whole, 4 * slots, accumulate).dataset)
    assert len(whole.read) == len(set(whole.read))
    assert capsys.readouterr().err == ""

    started = make_loader(numbers, 4 * slots, accumulate, workers)
    assert started.num_workers == workers
    assert started.multiprocessing_context.get_start_method() == "forkserver"
    loader = started.dataset
    found = {}
    for worker in range(workers):
        place = Namespace(id=worker, num_workers=workers)
        monkeypatch.setattr(block_loader, "get_worker_info", lambda place=place: place)
        found |= zip(range(worker, len(loader), workers), loader)
    assert [found[number] for number in range(len(loader))] == expected
    complete = {numbers.key(read) for read in range(slots, 4 * slots)}  # the first and last blocks are not
    times = Counter(block for block in numbers.read if block in complete)
    assert times == dict.fromkeys(complete, readers)
    assert (len(numbers.read) == len(whole.read)) == (readers == 1)

    note = capsys.readouterr().err
    assert (note != "") == (readers > 1)
    if note:
        assert f"with --num-workers {workers} each block is read {readers} times" in note
        assert f"with --num-workers {fewer} it is read once" in note
    assert count_readers(fewer, numbers.order, accumulate) == 1


@pytest.mark.parametrize(("blocks", "used"), [(31, 24), (5, 4), (32, 32)])
def test_fewer_slots_than_asked_for_are_said_with_the_samples_of_an_epoch(
    blocks: int, used: int, capsys
) -> None:
    """Once, not by each rank."""
    order = make_order(blocks, 8, fit_slots(32, blocks, 8), patches_per_block=3)
    for rank in (0, 1):
        make_loader(Numbers(order), 4, place=(rank, 2), slots=32)
    note = capsys.readouterr().err
    assert note.count("\n") == (used < 32)
    if note:
        assert f"{blocks} blocks for --shuffle-slots 32: {used} are used" in note
        assert f"an epoch has {3 * blocks} samples; give more --patches-per-block" in note
