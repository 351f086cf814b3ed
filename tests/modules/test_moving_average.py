"""Whether a moving average of the weights pays."""

from pathlib import Path

import book
import pytest
from made_up_winds import flags_for, make_winds, write
from studies import moving_average


def test_an_average_of_decay_0_is_the_weights_and_others_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Both are measured at each validation, and training goes on with the weights themselves."""
    monkeypatch.setattr(moving_average, "DECAYS", (0, 0.9))
    monkeypatch.setattr(moving_average, "SEEDS", (0, 1))
    places = ["--output-dir", tmp_path / "run"]
    steps = ["--accelerator", "cpu", "--shuffle-slots", 8, "--eval-samples", 8, "--validate-every", 2]
    flags = flags_for(write(tmp_path / "winds.zarr", make_winds()), *steps, *places)
    rows = moving_average.main([*flags, "--max-steps", "4"])
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        mine, same, other = (row["seeds"][name] for name in ("weights", "decay 0", "decay 0.9"))
        assert mine == same
        assert mine[0] != mine[1]
        assert abs(other[0] / mine[0] - 1) > 1e-5
        assert row["rmse"]["weights"] == pytest.approx(sum(mine) / 2)
    assert rows[0]["seeds"]["weights"] != rows[1]["seeds"]["weights"]
    with pytest.raises(SystemExit, match="2"):
        moving_average.main([*flags, "--max-steps", "1"])
    assert "--validate-every 2: more than --max-steps" in capsys.readouterr().err.splitlines()[-1]


def test_the_committed_averages_are_better_on_the_way_and_not_at_the_end() -> None:
    """As the page says, and that Lightning's default of 0.999 is too slow for a run of 1,000 steps."""
    rows = book.results("06_whats_next/results/moving_average.json")["rows"]
    for row in rows[:7]:
        assert row["rmse"]["decay 0.9"] < 0.995 * row["rmse"]["weights"]
    last = rows[-1]["rmse"]
    assert abs(last["decay 0.9"] / last["weights"] - 1) < 0.001
    assert last["decay 0.999"] > 1.05 * last["weights"]
