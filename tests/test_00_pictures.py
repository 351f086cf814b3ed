"""Maps have their coast, and the front page's map shows what was seen, filled and true."""

from pathlib import Path

import book
import numpy as np
import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="module", autouse=True)
def chapter():
    with book.rooms("01_setup"):
        yield


@pytest.mark.parametrize("west", [-180, 0, 20])
def test_the_coast_is_drawn_within_the_limits_of_a_map(west: int) -> None:
    from coast import draw_coast

    axes = Figure().subplots()
    axes.axis((west, west + 360, -60, 60))
    draw_coast(axes)
    assert axes.axis() == (west, west + 360, -60, 60)
    x, y = np.concatenate([line.get_xydata() for line in axes.lines]).T
    for longitude, latitude in ((151.3, -33.9), (-70.1, 41.9)):  # Sydney, Cape Cod
        distances = np.hypot((x - longitude) % 360, y - latitude)
        assert np.nanmin(distances) < 1  # NaN parts the lines


def test_without_its_file_no_coast_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import coast

    monkeypatch.setattr(coast, "FILE", tmp_path / "none.csv")
    axes = Figure().subplots()
    coast.draw_coast(axes)
    coast.cover_land(axes)
    assert not axes.lines and not axes.patches


def test_the_map_shows_the_truth_where_it_was_seen_and_a_fill_elsewhere() -> None:
    import draw_map
    from options import parse_options
    from task import make_data, make_datamodule, make_model

    options, data = make_data(parse_options("", []))
    figure = draw_map.draw(make_datamodule(options, data), make_model(options, data))
    meshes = [axes.collections[0].get_array() for axes in figure.axes[:3]]
    seen, filled, truth = (np.ma.filled(mesh.astype(float), np.nan) for mesh in meshes)
    looked = ~np.isnan(seen)
    assert 0 < looked.mean() < 1
    np.testing.assert_array_equal(filled[looked], truth[looked])
    assert np.abs(filled - truth)[~looked].min() > 0
    assert not np.isnan(filled).any()


def test_a_checkpoint_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    import draw_map

    with pytest.raises(SystemExit) as end:
        draw_map.main(["nowhere.ckpt"])
    assert end.value.code == 2
    assert "nowhere.ckpt: no such file; train first" in capsys.readouterr().err
