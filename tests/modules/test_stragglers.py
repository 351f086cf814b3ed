"""Whether a slow rank is told from a slow loader, on made-up times."""

import numpy as np
import pytest
from tracking.stragglers import FORWARD, STEP, WAIT, judge

NOTHING = ("nothing", None)
SLOW_LOADER = ("slow loader", None)

several_ranks = pytest.mark.parametrize("ranks", [2, 9])


def make_windows(ranks: int, wait: float = 0.01, forward: float = 1.0, noise: float = 0.0, count: int = 20):
    """Windows of ranks that are alike; `noise` is the relative scatter of their times."""
    rng = np.random.default_rng(0)
    usual = np.array([wait, forward])
    times = usual * (1 + noise * rng.standard_normal((count, ranks, 2)))
    step = times.sum(axis=2).max(axis=1) + 1.0  # the backward pass, in which all wait for the slowest
    step = np.repeat(step[:, None, None], ranks, axis=1)
    return np.concatenate([times, step], axis=2)


def finding(windows: np.ndarray) -> tuple[str, int | None]:
    verdict = judge(list(windows))
    return verdict.finding, verdict.rank


@several_ranks
@pytest.mark.parametrize("column, reason", [(WAIT, "waits for data"), (FORWARD, "forward pass")])
def test_a_rank_that_is_always_the_slowest_is_named(ranks: int, column: int, reason: str) -> None:
    windows = make_windows(ranks, noise=0.1)
    slow = ranks - 1
    windows[:, slow, column] = 0.5 if column == WAIT else 1.8 * windows[:, slow, column]
    assert finding(windows) == ("straggler", slow)
    text = judge(list(windows)).text
    assert f"rank {slow}" in text and reason in text


@several_ranks
def test_a_slow_store_makes_no_straggler(ranks: int) -> None:
    windows = make_windows(ranks)
    windows[::3, :, [WAIT, STEP]] += 5.0  # reads come in bursts
    assert finding(windows) == SLOW_LOADER
    windows = make_windows(ranks)
    for number, window in enumerate(windows):  # each rank waits in turn
        window[number % ranks, WAIT] = 2.0
    assert finding(windows) == SLOW_LOADER
    windows = make_windows(ranks, wait=2.0, noise=0.1)  # all wait alike
    assert finding(windows) == SLOW_LOADER
    windows[:, 0, WAIT] *= 1.5  # always the longest, but the others wait, too
    assert finding(windows) == SLOW_LOADER
    assert finding(make_windows(1, wait=2.0)) == SLOW_LOADER


@several_ranks
def test_nothing_is_said_of_noise_or_of_ranks_that_are_all_slow(ranks: int) -> None:
    windows = make_windows(ranks, noise=0.1, count=300)
    for end in range(len(windows)):
        assert finding(windows[: end + 1]) == NOTHING
    assert finding(make_windows(ranks, forward=100.0, noise=0.1)) == NOTHING


def test_one_window_or_a_tiny_difference_names_nobody() -> None:
    windows = make_windows(4)
    windows[-1, 2, FORWARD] *= 50
    assert finding(windows) == NOTHING
    windows = make_windows(4)
    windows[-1, :, [WAIT, STEP]] += 60.0  # one read that had to be repeated
    assert finding(windows) == NOTHING
    windows = make_windows(4, wait=0.001)
    windows[:, 2, WAIT] *= 20  # of a step that takes 2 s
    assert finding(windows) == NOTHING
