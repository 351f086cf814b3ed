"""Which rank is slow, or whether the loader is: judged from each rank's times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The columns of a window: seconds a step of each rank, on average.
WAIT, FORWARD, STEP = range(3)
COLUMNS = ("data_wait_seconds", "forward_seconds", "step_seconds")

SLOWER = 1.3  # a straggler takes so many times as long as the median of the others,
STRAGGLER_SHARE = 0.05  # and so much longer, as a share of the step
LOADER_SHARE = 0.2  # of the step that may be spent waiting for data
CHANCE = 1e-4  # that one of several equal ranks is the slowest in all windows
MIN_WINDOWS = 5


@dataclass(frozen=True)
class Verdict:
    """What the last windows show: "straggler", "slow loader", or "nothing"."""

    finding: str = "nothing"
    rank: int | None = None
    text: str = "no rank is slower than the others, and the loader keeps up"


def windows_to_judge(ranks: int) -> int:
    """How many windows in a row must agree before a rank is called a straggler.

    Of equal ranks each is the slowest equally often, however much their times scatter: the
    same one in all of k windows with a probability of ranks ** (1 - k). This is for windows
    that do not depend on each other: what slows a rank for minutes is a straggler, too.
    """
    if ranks == 1:
        return MIN_WINDOWS
    agreeing = math.log(1 / CHANCE) / math.log(ranks)
    return max(MIN_WINDOWS, 1 + math.ceil(agreeing))


def judge(windows: Sequence[np.ndarray]) -> Verdict:
    """Tell a slow rank from a slow loader. Each window is (ranks, 3), see COLUMNS.

    A straggler is the slowest rank in every one of the last windows: its machine is slow.
    If the other ranks wait for data, too, the loader is.
    """
    needed = windows_to_judge(len(windows[0]))
    if len(windows) < needed:
        return Verdict()
    last = np.stack(windows[-needed:])
    step = last[:, :, STEP].mean(axis=1)
    for column, verb in (
        (FORWARD, "computes its forward pass"),
        (WAIT, "waits for data"),
    ):
        rank = find_straggler(last[:, :, column], step)
        if rank is None:
            continue
        mine, others = compare(last[:, :, column], rank)
        if column == WAIT and others > LOADER_SHARE * np.median(step):
            continue  # the others wait, too: the loader is slow
        times = f"{mine:.3g} s a step, and the others {others:.3g} s"
        text = f"rank {rank} {verb} for {times}, in {needed} of {needed} windows"
        return Verdict("straggler", rank, text)
    waits = last[:, :, WAIT]
    longest = waits.max(axis=1)
    usual = longest.argsort()[:-1]  # reads come in bursts, but one stall says nothing
    share = longest[usual].sum() / step[usual].sum()
    if share < LOADER_SHARE:
        return Verdict()
    text = f"the loader is too slow: {share:.0%} of a step is spent waiting for data"
    if len(windows[0]) > 1:
        slowest = ", ".join(map(str, waits.argmax(axis=1)))
        text += f"; the rank that waits longest, window by window: {slowest}"
    return Verdict("slow loader", None, text)


def find_straggler(seconds: np.ndarray, step: np.ndarray) -> int | None:
    """The rank that is the slowest in all windows, and by enough to matter.

    `seconds` is (windows, ranks), and `step` the seconds of a step in each window.
    """
    if seconds.shape[1] == 1:
        return None
    slowest = seconds.argmax(axis=1)
    rank = int(slowest[0])
    mine, others = compare(seconds, rank)
    always = (slowest == rank).all()
    matters = mine - others > STRAGGLER_SHARE * np.median(step)
    return rank if always and matters and mine > SLOWER * others else None


def compare(seconds: np.ndarray, rank: int) -> tuple[float, float]:
    """The seconds of a rank, and those of the median of the others, in a usual window."""
    others = np.delete(seconds, rank, axis=1)
    of_others = np.median(others, axis=1)
    return float(np.median(seconds[:, rank])), float(np.median(of_others))
