"""Appendix, chunk size: the exact table, and the closed form against counting every corner."""

from itertools import product
from math import prod

import pytest
from runs import load

chunk_size = load("appendix/chunk_size.py", "appendix_chunk_size")

ONE_BYTE_64 = {  # chunk: (fewest and most chunks, fewest and most bytes)
    8: (64, 81, 4_096, 5_184),
    16: (16, 25, 4_096, 6_400),
    32: (4, 9, 4_096, 9_216),
    64: (1, 4, 4_096, 16_384),
    128: (1, 4, 16_384, 65_536),
    256: (1, 4, 65_536, 262_144),
    512: (1, 4, 262_144, 1_048_576),
    1024: (1, 4, 1_048_576, 4_194_304),
}


def counted(patch: tuple, chunk: tuple, grid: tuple | None) -> list[int]:
    """The chunks that a patch touches, cell by cell, at every corner: of one chunk in an endless grid."""
    places = [
        range(size - cells + 1) if grid else range(length)
        for cells, length, size in zip(patch, chunk, grid or patch)
    ]
    return [
        prod(len({(x + i) // length for i in range(cells)}) for x, cells, length in zip(corner, patch, chunk))
        for corner in product(*places)
    ]


def test_the_table_of_a_patch_of_64_x_64_bytes() -> None:
    costs = chunk_size.main([])
    found = {
        each.chunk[0]: (each.fewest, each.most, each.fewest * each.chunk_bytes, each.most * each.chunk_bytes)
        for each in costs
    }
    assert found == ONE_BYTE_64


@pytest.mark.parametrize(
    ("patch", "chunk", "grid"),
    [
        ((5,), (3,), None),
        ((5,), (7,), (24,)),
        ((9,), (4,), (9,)),  # a single place
        ((1,), (4,), (10,)),
        ((6, 4), (4, 5), None),
        ((6, 4), (4, 5), (17, 12)),
        ((1, 6, 4), (1, 30, 3), (5, 30, 20)),
        ((2, 6, 4), (8, 5, 6), (9, 13, 20)),
        ((1, 2, 3, 4), (2, 3, 4, 5), (3, 7, 8, 9)),
    ],
)
def test_the_closed_form_is_the_mean_over_every_corner(patch: tuple, chunk: tuple, grid: tuple) -> None:
    touched = counted(patch, chunk, grid)
    cost = chunk_size.cost(patch, chunk, grid, itemsize=4, store=chunk_size.Store(0.03, 5e8, 24))
    assert (cost.fewest, cost.most) == (min(touched), max(touched))
    assert cost.expected == pytest.approx(sum(touched) / len(touched), rel=1e-12)
    assert cost.chunk_bytes == 4 * prod(chunk)


def test_the_model_adds_rounds_of_requests_to_the_transfer() -> None:
    store = chunk_size.Store(latency=0.1, bytes_per_second=1_000, at_once=3, compression=2)
    cost = chunk_size.cost([10], [2], [10], itemsize=4, store=store)  # five chunks of eight bytes: two rounds
    assert cost.seconds == pytest.approx(2 * 0.1 + 5 * 8 / 2 / 1_000)
    assert cost.patches_per_second == pytest.approx(1 / (5 * 0.1 / 3))  # the latency is what limits


def test_a_chunk_is_no_longer_than_the_grid_and_equals_are_ranked_by_the_time_of_one_patch() -> None:
    store = chunk_size.Store(latency=1, bytes_per_second=1e3, at_once=1)  # requests count, bytes hardly
    assert chunk_size.cost([4], [64], [10], 4, store).chunk == (10,)
    first, second = chunk_size.best([1, 1], [1, 8], 4, store, count=2)
    assert (first.patches_per_second, second.patches_per_second) == (1, 1)
    assert (first.chunk, second.chunk) == ((1, 1), (1, 2))


def test_longer_latency_wants_larger_chunks() -> None:
    near, far = (
        chunk_size.best([1, 64, 64], [1464, 721, 1440], 4, chunk_size.Store(latency, 5e8, 24), count=1)[0]
        for latency in (0.001, 0.1)
    )
    assert near.chunk == (1, 64, 64)
    assert far.chunk_bytes > 10 * near.chunk_bytes


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--patch 64 --chunk 8 8", "--chunk 8 8: give as many numbers as --patch"),
        ("--patch 64 0", "--patch 64 0: give as many numbers as --patch, each at least 1"),
        ("--patch 64 64 --grid 50 100", "--patch 64 64: larger than --grid; make the patch smaller"),
        ("--best 3", "--best 3: give at least 1, and --grid"),
        ("--latency-ms 0", "--latency-ms 0.0: give a number above 0"),
        ("--mb-per-second 0", "--mb-per-second 0.0: give a number above 0"),
        ("--at-once 0", "--at-once 0: give a number above 0"),
        ("--compression -1", "--compression -1.0: give a number above 0"),
        ("--dtype flaot32", "--dtype flaot32: NumPy has no such type"),
    ],
)
def test_bad_input_is_named(words: str, complaint: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        chunk_size.main(words.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
