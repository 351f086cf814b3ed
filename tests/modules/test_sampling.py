"""Which sample is which, and what a satellite sees of it."""

import numpy as np
import pytest
from sampling import SWATH_WIDTH, TRACK_SLOPE, TRACK_SPACING, PatchSpace, sample, swath_masks

SPACE = PatchSpace(rows=5, columns=40, size=16)


def test_an_epoch_has_each_time_once_and_the_next_in_another_order_anywhere_on_the_map() -> None:
    places = [divmod(i, 7) for i in range(3 * 200)]  # an epoch ends within a batch of 7
    patches = [sample(0, *place, batch_size=7, n_times=200, space=SPACE) for place in places]
    epochs = np.reshape([patch.time for patch in patches], (3, 200))
    np.testing.assert_array_equal(np.sort(epochs), [range(200)] * 3)
    assert len(np.unique(epochs, axis=0)) == 3
    assert {patch.row for patch in patches} == set(range(SPACE.rows))
    assert {patch.column for patch in patches} == set(range(SPACE.columns))


def test_swaths_are_slanted_stripes_over_about_a_third_of_the_patch() -> None:
    """Of which a small patch has one at least."""
    masks = swath_masks(np.random.default_rng(0), 300, 64)
    assert 0.33 < masks.mean() < 0.37  # 4 cells of every 10, of which one pass in 8 is lost
    assert (swath_masks(np.random.default_rng(0), 2000, 16).sum(axis=(1, 2)) >= 16).all()
    leans = set()
    for mask in masks[:30]:
        line = []
        for row in mask:
            begin, end = np.flatnonzero(np.diff(row.astype(int), prepend=0, append=0)).reshape(-1, 2).T
            assert (end - begin <= SWATH_WIDTH).all()
            first = begin[begin > 0] % TRACK_SPACING
            assert (first == first[0]).all()
            line.append(first[0])
        line = np.unwrap(line, period=TRACK_SPACING)
        np.testing.assert_allclose(np.abs(line - line[0]), TRACK_SLOPE * np.arange(64), atol=1)
        leans.add(np.sign(line[-1] - line[0]))
    assert leans == {-1, 1}


def test_a_sample_depends_on_nothing_but_seed_step_and_k() -> None:
    space = PatchSpace(rows=10, columns=144, size=64)
    addresses = [(step, k) for step in (0, 7, 1000) for k in range(8)]

    def draw(seed: int, order: list[tuple[int, int]]) -> dict:
        return {each: sample(seed, *each, batch_size=8, n_times=96, space=space) for each in order}

    forward, backward = draw(5, addresses), draw(5, addresses[::-1])
    other = draw(6, addresses)
    for address in addresses:
        one, same = forward[address], backward[address]
        assert one[:3] == same[:3]
        np.testing.assert_array_equal(one.seen, same.seen)
    for name in ("row", "column", "time"):
        drawn = [[getattr(patches[each], name) for each in addresses] for patches in (forward, other)]
        assert drawn[0] != drawn[1], name
    assert len({patch.seen.tobytes() for patch in forward.values()}) == len(addresses)


@pytest.mark.parametrize("size", range(16, 73, 4))
def test_every_patch_size_has_something_to_see(size: int) -> None:
    masks = swath_masks(np.random.default_rng(size), 2000, size)
    assert masks.sum(axis=(1, 2)).min() >= size
