"""Chapter 6: whether a moving average of the weights pays."""

import json
from collections.abc import Iterator
from pathlib import Path

import book
import pytest

FLAGS = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4 --shuffle-slots 8 --validate-every 2"


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    with book.rooms("06_whats_next"):
        yield


def test_an_average_of_decay_0_is_the_weights_and_others_differ(
    make_small_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are measured at each validation, and training goes on with the weights themselves."""
    from studies import moving_average

    monkeypatch.setattr(moving_average, "DECAYS", (0, 0.9))
    monkeypatch.setattr(moving_average, "SEEDS", (0, 1))
    store = make_small_store(tmp_path / "winds.zarr")
    flags = [*FLAGS.split(), "--store", str(store), "--eval-samples", "8"]
    flags += ["--output-dir", str(tmp_path / "run"), "--climatology-dir", str(tmp_path / "kept")]
    rows = moving_average.main(flags)
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        mine, same, other = (row["seeds"][name] for name in ("weights", "decay 0", "decay 0.9"))
        assert mine == same
        assert mine[0] != mine[1]
        assert abs(other[0] / mine[0] - 1) > 1e-5
        assert row["rmse"]["weights"] == pytest.approx(sum(mine) / 2)
    assert rows[0]["seeds"]["weights"] != rows[1]["seeds"]["weights"]


def test_a_run_without_a_validation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from studies import moving_average

    flags = [*FLAGS.split(), "--store", str(tmp_path), "--output-dir", str(tmp_path), "--max-steps", "1"]
    with pytest.raises(SystemExit) as ended:
        moving_average.main(flags)
    assert ended.value.code == 2
    assert "--validate-every 2: more than --max-steps" in capsys.readouterr().err.splitlines()[-1]


def test_the_committed_averages_are_better_on_the_way_and_not_at_the_end() -> None:
    """As the page says, and that Lightning's default of 0.999 is too slow for a run of 1,000 steps."""
    results = book.ROOT / "06_whats_next/results/moving_average.json"
    rows = json.loads(results.read_text())["rows"]
    for row in rows[:7]:
        assert row["rmse"]["decay 0.9"] < 0.995 * row["rmse"]["weights"]
    last = rows[-1]["rmse"]
    assert abs(last["decay 0.9"] / last["weights"] - 1) < 0.001
    assert last["decay 0.999"] > 1.05 * last["weights"]
