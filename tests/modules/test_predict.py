"""predict/: a map that is cut into patches, and joined again, is the map."""

import numpy as np
import pytest
from predict.maps import choose_overlap
from predict.tiles import Tiling


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(("height", "size", "overlap"), [(37, 16, 5), (37, 16, 0), (16, 16, 8), (64, 64, 8)])
def test_a_map_that_is_cut_and_joined_is_the_map(height: int, size: int, overlap: int, wraps: bool) -> None:
    """And neighbours share the overlap, also across the seam."""
    field = np.random.default_rng(0).normal(size=(2, height, 72)).astype("float32")
    tiling = Tiling((height, 72), size, overlap, wraps)
    np.testing.assert_allclose(tiling.join(tiling.cut(field)), field, atol=1e-6)
    columns = np.unique(np.array(tiling.corners)[:, 1])
    if wraps:
        columns = np.append(columns, 72)
    assert (columns[-1] + size > 72) == wraps
    assert (np.diff(columns) <= size - overlap).all()


@pytest.mark.parametrize(
    ("given", "size", "overlap"), [(None, 64, 16), (None, 20, 10), (0, 20, 0), (11, 20, 11)]
)
def test_patches_share_16_cells_or_half_a_patch_or_what_is_given(
    given: int | None, size: int, overlap: int, capsys
) -> None:
    """11 of 20 are refused later, by name."""
    assert choose_overlap(given, {"options": {"patch_size": size}}) == overlap
    assert ("note: --overlap 10" in capsys.readouterr().out) == (given is None and size == 20)
