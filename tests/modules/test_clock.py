"""How fast a run is, and how long it waits for data."""

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

import clock
import pytest
from torch.utils.data import IterableDataset

TIMES = {  # seconds of each wait and each work, micro-batches of a step, samples/s of 8 a step, share of waiting
    "several steps": ([9, 1, 1, 1], [20, 3, 3, 3], 1, (8 * 3 / 12, 0.25)),
    "in micro-batches": ([9, 9, 1, 1, 1, 1], [20, 9, 2, 2, 2, 2], 2, (8 * 2 / 12, 1 / 3)),
    "one step": ([1], [1], 1, None),
    "no step": ([], [], 1, None),
}


@pytest.mark.parametrize("case", TIMES)
def test_speed_is_that_of_all_steps_but_the_first(case: str, monkeypatch) -> None:
    """Without the 100 s of a validation after each batch. Before the first step is the start of the process."""
    waits, works, accumulate, speed = TIMES[case]
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    # The process began 50 s ago.
    monkeypatch.setattr(clock, "time", lambda: clock.Process().create_time() + 50 + now[0])
    monkeypatch.setattr(clock, "startup_seconds", lru_cache(clock.startup_seconds.__wrapped__))

    class Slow(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            for number, wait in enumerate(waits):
                now[0] += wait
                yield number

    loader = clock.TimedLoader(Slow(), batch_size=None)
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate, train_dataloader=loader)
    watch = clock.StepClock()
    watch.on_train_start(trainer, None)
    for work, _ in zip(works, loader):
        watch.on_train_batch_start(trainer, None, None, 0)
        now[0] += work
        watch.on_train_batch_end(trainer, None, None, None, 0)
        now[0] += 100
        watch.on_validation_end(trainer, None)
    expected = dict(zip(("samples_per_second", "data_wait_share"), speed)) if speed else {}
    if works:
        expected["startup_seconds"] = 50 + waits[0]
    assert watch.throughput(8) == pytest.approx(expected)
