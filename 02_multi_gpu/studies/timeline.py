"""What each rank does in a step, and how a slow rank holds up the others."""

from time import perf_counter

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from model import masked_sums
from studies.ranks import Rank, on_ranks
from studies.settings import Settings
from studies.timed_step import TimedStep

LATE = 0.05  # seconds
STRAGGLING = 6  # steps in which the last rank is late
UNCOUNTED = 3  # steps at the beginning
BUCKET_MB = 0.25  # which makes four of them
LINE = 1.4  # between the lines of two ranks in the picture
COLOURS = {
    "late": "#D55E00",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "all-reduce, or wait for it": "#CC79A7",
    "optimizer": "#666666",
}


class BucketLog:
    """A communication hook that notes when each bucket was ready, and when its sum was there.

    On a CPU only: a GPU's hooks are called before the device has come so far.
    """

    def __init__(self):
        self.times: dict[int, tuple[float, float]] = {}  # of each bucket

    def make_hook(self, group: distributed.ProcessGroup):
        return group, self.all_reduce

    def all_reduce(
        self, group: distributed.ProcessGroup, bucket: distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        index = bucket.index()
        ready = perf_counter()

        def note(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            self.times[index] = (ready, perf_counter())
            return future.value()

        return default_hooks.allreduce_hook(group, bucket).then(note)


def timeline(settings: Settings) -> list[dict]:
    """A row for each step and rank, in seconds: first evenly, then with a straggler."""
    return on_ranks(measure_timeline, settings)


def measure_timeline(rank: Rank) -> list[dict]:
    """The steps of all ranks."""
    settings = rank.settings
    log = BucketLog()
    step = TimedStep(
        rank,
        settings.devices,
        settings.device_batch // settings.devices,
        hook=log.make_hook,
        bucket_cap_mb=BUCKET_MB,
    )
    last = settings.devices - 1
    rows = []
    for number in range(settings.steps + STRAGGLING):
        straggler = number >= settings.steps
        is_late = straggler and rank.number == last
        row = {"step": number, "straggler": straggler, "rank": rank.number}
        row |= take_step(rank, step, log, LATE if is_late else 0)
        if number >= UNCOUNTED:
            rows += rank.gather(row)
    return rows


def take_step(rank: Rank, step: TimedStep, log: BucketLog, late: float) -> dict:
    """When a step began, and when each of its parts ended, in seconds since then."""
    batch = step.batch
    log.times.clear()
    distributed.barrier()
    began = rank.clock()
    while rank.clock() < began + late:
        pass  # as if its data were slow to come
    step.optimizer.zero_grad()
    ends = {"data": rank.clock()}
    squares, unseen = masked_sums(step.model(batch["input"]), batch)
    ends["forward"] = rank.clock()
    loss = squares / unseen
    loss.backward()
    ends["backward"] = rank.clock()
    step.optimizer.step()
    ends["optimizer"] = rank.clock()
    row = {"began": began}
    for part, end in ends.items():
        row[part] = end - began
    buckets = [log.times[index] for index in sorted(log.times)]
    row["buckets"] = [[ready - began, done - began] for ready, done in buckets]
    return row


def plot_timeline(rows: list[dict]) -> Figure:
    """Above an ordinary step of each rank, below one with a straggler."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    plot_step(upper, median_step(rows, straggler=False))
    plot_step(lower, median_step(rows, straggler=True))
    last = max(row["rank"] for row in rows)
    late = f"Rank {last} is {1e3 * LATE:.0f} ms late, say, with its data"
    upper.set_title("An ordinary step", fontsize=14)
    lower.set_title(late, fontsize=14)
    lower.set_xlabel("ms since the step began", fontsize=14)
    bars, labels = upper.get_legend_handles_labels()
    place = {"loc": "outside upper center", "ncols": len(labels)}
    spacing = {"columnspacing": 1.2, "handlelength": 1.2}
    figure.legend(bars, labels, frameon=False, fontsize=14, **place, **spacing)
    return figure


def median_step(rows: list[dict], straggler: bool) -> list[dict]:
    """The rows, one a rank, of the step of median length, with or without a straggler."""
    steps: dict[int, list[dict]] = {}
    for row in rows:
        if row["straggler"] == straggler:
            steps.setdefault(row["step"], []).append(row)

    def length(ranks: list[dict]) -> float:
        return max(row["optimizer"] for row in ranks)

    ordered = sorted(steps.values(), key=length)
    return ordered[len(ordered) // 2]


def plot_step(axes: Axes, rows: list[dict]) -> None:
    """A thick bar of what each rank computes, and thin ones beneath for its all-reduces."""
    for row in rows:
        y = -LINE * row["rank"]
        begin = 0.0
        for part, end in list_parts(row).items():
            drawn = axes.barh(y, end - begin, 0.5, begin, color=COLOURS[part])
            drawn.set_label(part if row["rank"] == 0 else "")
            begin = end
        # Each below the one before, because they overlap.
        for number, (ready, done) in enumerate(row["buckets"]):
            below = y - 0.37 - 0.14 * number
            colour = COLOURS["all-reduce, or wait for it"]
            axes.barh(below, 1e3 * (done - ready), 0.11, 1e3 * ready, color=colour)
    ranks = [row["rank"] for row in rows]
    lines = [-LINE * rank for rank in ranks]
    axes.set_yticks(lines, [f"rank {rank}" for rank in ranks])
    axes.tick_params(labelsize=14)
    axes.spines[["top", "right"]].set_visible(False)


def list_parts(row: dict) -> dict[str, float]:
    """When each part of a rank's step ended, in ms."""
    ends = {
        "late": row["data"],
        "forward": row["forward"],
        # A rank computes until its last bucket is ready.
        "backward": max(ready for ready, _ in row["buckets"]),
        "all-reduce, or wait for it": row["backward"],
        "optimizer": row["optimizer"],
    }
    return {part: 1e3 * end for part, end in ends.items()}
