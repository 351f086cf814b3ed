"""Chapter 4: the diagnosis is right where the bottleneck is known. No clock decides: durations are made up."""

import gc
import itertools
import json
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import book
import programs
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

CHAPTER = book.ROOT / "04_data_pipeline"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 50".split()
SMALL += "--shuffle-slots 8 --patches-per-block 2".split()


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules; the collector, which each diagnosis calls, skips all that was imported."""
    global command, diagnosis, results, store_module, worker_plan
    with book.rooms("04_data_pipeline"):
        import diagnose as command
        import diagnosis
        import results
        import store as store_module
        import worker_plan

        gc.freeze()
        yield
        gc.unfreeze()


class Clock:
    """A clock that goes on only when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(diagnosis, "perf_counter", clock)
    return clock


class Loader:
    """A DataLoader whose workers take `load` seconds for a batch, and `start` before the first.

    As in torch, batch i is worker i % w's, and is asked for at the start or as batch i - w * prefetch is given.
    """

    def __init__(self, clock: Clock, load: float, workers: int = 0, start: float = 0.0, prefetch: int = 2):
        self.clock, self.load, self.start = clock, load, start
        self.num_workers, self.prefetch_factor = workers, prefetch if workers else None
        self.at_start = self.at_end = lambda: None

    def __iter__(self) -> Iterator[list]:
        self.at_start()
        try:
            yield from self.batches()
        finally:
            self.at_end()

    def batches(self) -> Iterator[list]:
        self.clock.work(self.start)
        return self.give()

    def give(self) -> Iterator[list]:
        asked = [self.clock.now] * self.num_workers * (self.prefetch_factor or 0)
        free = [0.0] * self.num_workers
        for number in itertools.count():
            if self.num_workers:
                worker = number % self.num_workers
                free[worker] = max(asked[number], free[worker]) + self.load
                self.clock.now = max(self.clock.now, free[worker])
                asked.append(self.clock.now)
            else:
                self.clock.work(self.load)
            yield [torch.zeros(1)]


class Eager(Loader):
    """Its workers start when it is iterated, as DataLoader's, and not at the first batch."""

    def __iter__(self) -> Iterator[list]:
        return self.batches()


# The calls of the step, by default: 21 with a cached batch, 37 with the loader (without workers), 21 cached.
CACHED = 5 + 16
WITH_LOADER = 5 + 32
BESIDE = range(CACHED, CACHED + WITH_LOADER)


def steps_of(clock: Clock, seconds: float, more: dict[int, float] | None = None) -> Callable:
    """A step that takes so long, and `more` in these calls, of which the first is call 0."""
    calls = itertools.count()
    return lambda batch: clock.work(seconds + (more or {}).get(next(calls), 0.0))


def diagnose(clock: Clock, load: float, step: float, slow: dict | None = None, **loader: float):
    """The diagnosis of a made-up loader with a made-up step."""
    return diagnosis.diagnose(Loader(clock, load, **loader), steps_of(clock, step, slow))


# Workers, and seconds of a batch by one of them, of a step, and to start; steps of the run; the verdict.
CASES = {
    "times add": (0, 0.030, 0.010, 0.0, 100, "data-bound"),
    "times add, and the step is slower": (0, 0.010, 0.030, 0.0, 100, "data-bound"),
    "times add, and the step is a little slower": (0, 0.045, 0.050, 0.0, 100, "data-bound"),
    "times add, and the step is much slower": (0, 0.004, 0.050, 0.0, 100, "compute-bound"),
    "one worker, slower than the step": (1, 0.030, 0.010, 0.0, 100, "data-bound"),
    "one worker, faster than the step": (1, 0.010, 0.030, 0.0, 100, "compute-bound"),
    "two workers, slower": (2, 0.030, 0.010, 0.0, 100, "data-bound"),
    "four workers, together faster than the step": (4, 0.030, 0.010, 0.0, 100, "compute-bound"),
    "three workers, whose waves are no divisor of the steps": (3, 0.045, 0.010, 0.0, 100, "data-bound"),
    "a slow start": (0, 0.0001, 0.010, 5.0, 100, "start-up-bound"),
    "the same start of a long run": (0, 0.0001, 0.010, 5.0, 10_000, "compute-bound"),
    "a slow start of workers that keep up": (2, 0.010, 0.010, 5.0, 100, "start-up-bound"),
    "a slow start, and more waiting": (2, 0.060, 0.010, 1.0, 100, "data-bound"),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict_shares_and_speed_up_are_those_of_the_run(case: str, clock: Clock) -> None:
    workers, load, step, start, steps, verdict = CASES[case]
    found = diagnosis.diagnose(Loader(clock, load, workers, start), steps_of(clock, step), run_steps=steps)
    pace = max(load / workers, step) if workers else load + step
    startup = start + load - (pace - step)  # the first batch is waited for as long as a worker takes for it
    times = {"waiting": steps * (pace - step), "computing": steps * step, "start-up": startup}
    assert found.verdict == verdict
    assert found.shares == pytest.approx({name: each / sum(times.values()) for name, each in times.items()})
    assert found.speedup == pytest.approx((startup + steps * pace) / (steps * step))
    assert found.speedup_range == pytest.approx((found.speedup, found.speedup))  # nothing varies here
    assert (found.load, found.at_hand, found.startup) == pytest.approx((load, step, startup))
    assert found.notes == []


def test_runs_begin_and_end_in_turn_and_the_start_is_that_of_the_first(clock: Clock) -> None:
    """The cached batch comes before and after the loader. The second time, files may be in memory."""
    events = []
    step = steps_of(clock, 0.01)
    loader = Loader(clock, 0.01, start=5.0)
    loader.at_start = lambda: events.append("begin")
    loader.at_end = lambda: events.append("end") or setattr(loader, "start", 0.0)
    found = diagnosis.diagnose(loader, lambda batch: (step(batch), events.append("step")))
    order = [(event, len(list(same))) for event, same in itertools.groupby(events)]
    cached, beside = ("step", CACHED), [("begin", 1), ("step", WITH_LOADER), ("end", 1)]
    assert order == [("begin", 1), ("end", 1), cached, *beside, cached]
    assert found.startup == pytest.approx(5.0)


def test_workers_that_start_before_the_first_batch_is_asked_for_are_part_of_the_start(clock: Clock) -> None:
    found = diagnosis.diagnose(Eager(clock, 0.01, workers=1, start=5.0), steps_of(clock, 0.02))
    assert found.startup == pytest.approx(5, abs=0.02)


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_lives_while_the_cached_batch_is_timed(persistent: bool) -> None:
    others, seen = set(multiprocessing.active_children()), []
    how = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": "forkserver"}
    loader = DataLoader(TensorDataset(torch.zeros(50)), **how)
    step = lambda batch: seen.append(len(set(multiprocessing.active_children()) - others))  # noqa: E731
    diagnosis.diagnose(loader, step, steps=2)
    assert [workers for workers, _ in itertools.groupby(seen)] == [0, 1, 0]


def test_first_steps_and_what_workers_put_by_during_them_are_left_out(clock: Clock) -> None:
    found = diagnose(clock, 0.04, 0.005, {0: 9.0, CACHED: 9.0}, workers=2)
    assert (found.waiting, found.compute, found.at_hand) == pytest.approx((0.015, 0.005, 0.005))
    assert found.notes == []


def test_a_loader_that_still_lives_on_its_stock_is_told(clock: Clock) -> None:
    """As one whose threads read far ahead, which nobody can see from outside."""
    hidden = Loader(clock, 0.04, 2, prefetch=30)
    loader = type("Hidden", (), {"__iter__": lambda self: iter(hidden)})()
    loader.num_workers = 2
    found = diagnosis.diagnose(loader, steps_of(clock, 0.005, {CACHED: 9.0}))
    assert len(found.notes) == 1 and "stock" in found.notes[0]


# Calls of the step that are slow because of another program.
SPELLS = {
    "before": (CACHED - 11, CACHED),
    "the loader's run begins": (CACHED - 5, CACHED + 5 + 8),
    "in the middle": (CACHED + 5 + 10, CACHED + 5 + 22),
    "the loader's run ends": (CACHED + WITH_LOADER - 8, CACHED + WITH_LOADER + 15),
    "after": (CACHED + WITH_LOADER + 7, CACHED + WITH_LOADER + 17),
}


@pytest.mark.parametrize("spell", SPELLS)
def test_the_range_has_the_true_speed_up_though_the_machine_was_slow(spell: str, clock: Clock) -> None:
    found = diagnose(clock, 0.014, 0.1, dict.fromkeys(range(*SPELLS[spell]), 0.06))
    low, high = found.speedup_range
    assert low <= found.speedup <= high
    assert low - 1e-9 <= 1.14 <= high + 1e-9
    assert any("repeat the diagnosis" in note for note in found.notes)


def test_a_range_on_both_sides_of_what_is_worthwhile_is_told(clock: Clock) -> None:
    """It is 1.09 where nothing disturbs it; the verdict is that of the mean."""
    found = diagnose(clock, 0.009, 0.1, dict.fromkeys(range(*SPELLS["in the middle"]), 0.02))
    assert found.speedup_range == pytest.approx((1.09, 1.25), abs=0.05)
    assert found.verdict == "data-bound" and found.speedup > 1.1
    assert len(found.notes) == 1 and "not certain" in found.notes[0]


def test_whole_periods_are_measured(clock: Clock) -> None:
    """Every tenth batch waits for new blocks, after ten that come slowly and ten from stock."""
    loader, taken = Loader(clock, 0.0), []
    loader.at_start = lambda: taken.append(0)

    def batches() -> Iterator[int]:
        for number in itertools.count():
            clock.work(1.0 if number < 10 or (number % 10 == 0 and number >= 20) else 0.0)
            taken[-1] += 1
            yield number

    loader.batches = batches
    for steps in (2, 12):  # two whole ones at least
        found = diagnosis.diagnose(loader, steps_of(clock, 0.05), steps=steps, period=10)
        assert found.verdict == "data-bound"
        assert (found.waiting, found.load) == pytest.approx((0.1, 0.1))
        assert found.speedup_range == pytest.approx((found.speedup, found.speedup))
        assert taken[-2:] == [40, 40]


def test_the_device_is_waited_for_before_the_clock_is_read(clock: Clock, monkeypatch) -> None:
    """A step only gives the device its work."""
    queue = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: clock.work(sum(queue)) or queue.clear())

    found = diagnosis.diagnose(Loader(clock, 0.001), lambda batch: queue.append(0.03))
    assert found.verdict == "compute-bound"
    assert (found.compute, found.at_hand, found.waiting) == pytest.approx((0.03, 0.03, 0.001))


class Cycle:
    """A loader whose iterator refers to itself, as one whose thread calls its methods."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def __iter__(self) -> "Cycle":
        iterator = Cycle(self.loader)
        iterator.batches, iterator.itself = iter(self.loader), iterator
        return iterator

    def __next__(self) -> list:
        return next(self.batches)


@pytest.mark.parametrize("kind", [lambda loader: loader, Cycle])
def test_a_step_that_the_loader_slows_down_is_told_apart(kind: Callable, clock: Clock, capsys) -> None:
    """Its threads take the cores: that costs time without a wait, and a cached batch does not."""
    reading = []
    loader = Loader(clock, 0.001, start=1.0)  # costs more than the waiting, and less than the slower steps
    loader.at_start, loader.at_end = lambda: reading.append(True), reading.clear
    step = lambda batch: clock.work(0.04 if reading else 0.01)  # noqa: E731
    found = diagnosis.diagnose(kind(loader), step, run_steps=100)
    assert found.verdict == "data-bound" and found.speedup == pytest.approx(5.1)
    assert found.notes == [] and diagnosis.report(found) is None
    assert "data-bound: the loader takes cores from the step, which takes 40.0 ms" in capsys.readouterr().out


def test_a_step_that_waits_and_is_slowed_down_is_told_both(clock: Clock, capsys) -> None:
    found = diagnose(clock, 0.03, 0.03, dict.fromkeys(BESIDE, 0.01))
    assert len(found.notes) == 1 and "also takes cores" in found.notes[0]
    diagnosis.report(found)
    assert "data-bound: a step waits 30.0 ms" in capsys.readouterr().out


def test_a_noisy_machine_makes_no_step_slower_by_taking_the_loader_away(clock: Clock) -> None:
    found = diagnose(clock, 0.0, 0.02, dict.fromkeys(BESIDE, -0.01))
    assert (found.at_hand, found.speedup, *found.speedup_range) == pytest.approx((0.01, 1.0, 1.0, 1.0))
    assert len(found.notes) == 1 and "other programs" in found.notes[0]


# ------------------------------------------------------------------------------- how many batches, how long


def test_a_loader_that_ends_too_early_is_refused(clock: Clock) -> None:
    unsized = type("Unsized", (), {"__iter__": lambda self: iter([1] * 20)})()
    for batches, reason in ((unsized, "has 20 batches, and a run needs 37"), (iter([1] * 60), "once")):
        with pytest.raises(ValueError, match=reason):
            diagnosis.diagnose(batches, steps_of(clock, 1))


@pytest.mark.parametrize(
    ("workers", "batches", "needed", "fewer_steps"),
    [(0, 20, "37, 5", 15), (0, 6, "37, 5", None), (4, 40, "48, 16", 24), (8, 40, "64, 32", None)],
)
def test_too_few_batches_are_refused_before_the_first_is_taken(
    workers: int, batches: int, needed: str, fewer_steps: int | None, clock: Clock
) -> None:
    class Sized(Loader):
        def __len__(self) -> int:
            return batches

    loader = Sized(clock, 0.01, workers, start=1.0)
    with pytest.raises(ValueError, match=f"has {batches} batches, .* needs {needed} of them") as refused:
        diagnosis.diagnose(loader, steps_of(clock, 0.01))
    assert clock.now == 0
    assert ("use fewer workers" in str(refused.value)) == (workers > 0)
    proposed = re.search(r"steps=(\d+)", str(refused.value))
    assert (proposed and int(proposed[1])) == fewer_steps
    if proposed:  # and that number is not too many
        diagnosis.diagnose(loader, steps_of(clock, 0.01), steps=fewer_steps)


def test_it_says_how_many_batches_it_takes_and_how_long(clock: Clock, capsys) -> None:
    told, began, step = [], [], steps_of(clock, 5.0)
    loader = Loader(clock, 4.5, start=10.0)
    loader.at_start = lambda: told.append(capsys.readouterr().err)
    diagnosis.diagnose(loader, lambda batch: (began.append(clock.now), step(batch)))
    runs = "37 batches without a step, 21 steps with a cached batch, 37 batches with the step, 21 steps"
    assert runs in told[0]
    left = clock.now - (began[CACHED - 1] + 5.0)
    assert f"about {left:.0f} s more" in told[1]


# ---------------------------------------------------------------------------------------------- workers

ROOM = {"cores": 100, "batch_bytes": 10**6, "memory": 10**9, "shm": 10**9}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (10, "t_load / t_step")),
        ({"cores": 8}, (7, "cores")),
        ({"cores": 20, "ranks": 8}, (1, "cores")),
        ({"cores": 4, "ranks": 8}, (0, "cores")),
        ({"memory": 9e6}, (4, "memory")),
        ({"memory": 9e6, "ranks": 2}, (2, "memory")),
        ({"memory": 9e6, "prefetch_factor": 4}, (2, "memory")),
        ({"memory": 9e6, "worker_bytes": 10**6}, (3, "memory")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6}, (2, "/dev/shm")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6, "ranks": 2}, (1, "/dev/shm")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6, "prefetch_factor": 1}, (4, "/dev/shm")),
        ({"shm": 9e6, "worker_bytes": 10**6}, (4, "/dev/shm")),  # a worker itself lies in memory
        ({"shm": 9e6, "cores": 3}, (2, "cores")),
    ],
)
def test_each_cap_binds_in_turn(facts: dict, expected: tuple, capsys) -> None:
    assert worker_plan.plan_workers(1.0, 0.1, **ROOM | facts) == expected
    assert re.search(rf"^  {expected[1]} .* {expected[0]}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("load", "step", "cores", "workers"),
    [(2.1, 0.3, 100, 7), (0.31, 0.3, 100, 2), (0.001, 0.3, 100, 1), (1.0, 0.1, 5, 4), (0.4, 0.1, 0, 0)],
)
def test_as_many_workers_as_keep_up_and_their_pace(
    load: float, step: float, cores: int, workers: int, clock: Clock, capsys
) -> None:
    assert worker_plan.plan_workers(load, step, cores=cores)[0] == workers
    promised = map(float, re.findall(r"([\d.]+) ms", capsys.readouterr().out.splitlines()[-1]))
    for number, milliseconds in zip((workers, 0), promised):
        assert 1e3 * diagnose(clock, load, step, workers=number).pace == pytest.approx(milliseconds)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_report_has_the_sum_for_workers_if_the_training_waits(ranks: int, clock: Clock, capsys) -> None:
    workers = diagnosis.report(diagnose(clock, 0.045, 0.050), ranks)
    told = capsys.readouterr().out
    assert "data-bound: a step waits 45.0 ms for its batch" in told
    assert "could give: 1.90 times (1.90 to 1.90 " in told
    assert re.search(r"t_load / t_step +45.0 ms / 50.0 ms = needs 1$", told, re.MULTILINE)
    assert f"cores / {ranks} rank{'s' * (ranks > 1)} - 1 = at most" in told
    assert re.search(rf"^  {workers}, by ", told, re.MULTILINE)


def test_a_report_needs_no_workers_if_the_training_hardly_waits(clock: Clock, capsys) -> None:
    assert diagnosis.report(diagnose(clock, 0.001, 0.050)) is None
    told = capsys.readouterr().out
    assert "compute-bound: a step takes 50.0 ms with a cached batch, and 51.0 ms with the loader" in told
    assert "no more workers are needed" in told and "t_load" not in told


def test_copies_of_two_files_need_torch_tqdm_and_psutil_only() -> None:
    text = "\n".join((CHAPTER / name).read_text() for name in ("diagnosis.py", "worker_plan.py"))
    names = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert names - sys.stdlib_module_names == {"worker_plan", "torch", "tqdm", "psutil"}


# --------------------------------------------------------------------------------- the training of train.py


@pytest.fixture(scope="module")
def flags(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a small training that reads a tiny store out of a folder."""
    folder = tmp_path_factory.mktemp("diagnose")
    store = make_small_store(folder / "winds")
    return [*SMALL, "--store", str(store), "--climatology-dir", str(folder / "climatology")]


@pytest.mark.parametrize("more", ["", pytest.param("--naive --num-workers 1", marks=pytest.mark.thorough)])
def test_the_readers_command(more: str, flags: list[str]) -> None:
    before = programs.running()
    done = programs.require_success(CHAPTER / "diagnose.py", *flags, "--steps", 2, *more.split())
    # What starts workers ends as soon as it sees that the program has.
    started = [process for process in programs.running() if process not in before]
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert re.search(r"^(data|compute|start-up)-bound: ", done.out, re.MULTILINE), done.out
    shares = [float(share) for share in re.findall(r"^  [a-z-]+ +([\d.]+)%", done.out, re.MULTILINE)]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.2)
    assert re.search(r"^four runs: .*\nabout \d+ s more$", done.err, re.MULTILINE), done.err
    assert ("naive" if more else "final") + " loader" in done.out
    assert re.search(r"t_load / t_step .* = needs \d+\n|no more workers are needed", done.out)


def test_an_error_of_the_data_is_named(flags: list[str]) -> None:
    done = programs.run(CHAPTER / "diagnose.py", *flags, "--patch-size", 18)
    assert done.code == 2 and "--patch-size 18" in done.err.splitlines()[-1] and "Traceback" not in done.err


@pytest.mark.parametrize("wrong", ["--steps 0", "--batch-size 0", "--store nowhere"])
def test_bad_input_is_refused_before_anything_runs(wrong: str, flags: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([*flags, *wrong.split()])
    flag, value = wrong.split()
    assert re.search(f"{flag}:? {value}", capsys.readouterr().err.splitlines()[-1])


def test_results_have_a_row_for_each_loader(flags: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    command.main([*flags, "--steps", "2", "--save-results"])
    saved = json.loads((tmp_path / "diagnosis.json").read_text())
    assert {"command", "date", "machine", "versions", "rows"} == saved.keys()
    assert saved["command"].endswith("--steps 2 --save-results")
    assert [row["loader"] for row in saved["rows"]] == ["naive", "final"]
    names = "verdict shares speedup speedup_range waiting compute at_hand load startup num_workers"
    names += " prefetch_factor batch_bytes run_steps notes"
    for row in saved["rows"]:
        assert row.keys() == {"loader", *names.split()}
        assert sum(row["shares"].values()) == pytest.approx(1)
        low, high = row["speedup_range"]
        assert 1 <= low <= row["speedup"] <= high
    assert re.findall(r"^(\w+ loader, \d workers)$", capsys.readouterr().out, re.MULTILINE) == [
        "naive loader, 0 workers",
        "final loader, 0 workers",
    ]


@pytest.fixture
def asked(flags: list[str], clock: Clock, monkeypatch) -> Callable[..., tuple]:
    """What the diagnosis of a loader is asked for: the loader, step, numbers of steps, and period.

    Its answer is that the training waits.
    """
    answer = diagnose(clock, 0.045, 0.050)

    def ask(*more: str) -> tuple:
        found = []
        monkeypatch.setattr(command, "diagnose", lambda *given: found.append(given) or answer)
        command.main([*flags, *more])
        return found[0]

    return ask


def test_the_naive_loader_gives_the_samples_of_chapter_3_one_after_another(asked, monkeypatch) -> None:
    """The same in the same order as all at once."""
    reader = store_module.FieldReader
    read, sizes = reader.read_at_once, []
    loader, _, _, _, period = asked("--naive")
    patches = loader.dataset.patches
    expected = patches.__getitems__([(0, k) for k in range(4)])
    monkeypatch.setattr(
        reader, "read_at_once", lambda self, boxes: sizes.append(len(boxes)) or read(self, boxes)
    )
    batch = next(iter(loader))
    assert sizes == [1] * 4
    assert period == 1
    for name in ("input", "target", "weight"):
        assert torch.equal(batch[name], torch.stack([torch.from_numpy(each[name]) for each in expected]))


@pytest.mark.parametrize(("more", "slots"), [("", 8), ("--devices 2", 4), ("--accumulate-grad-batches 2", 8)])
def test_in_each_period_of_the_block_loader_its_slots_change_their_blocks_once(
    more: str, slots: int, asked
) -> None:
    """So parts of a run differ by no read, wherever they begin."""
    loader, _, _, run_steps, period = asked("--patches-per-block", "3", *more.split())
    order, batches = loader.dataset.order, loader.dataset.batches
    assert run_steps == 50 * batches.accumulate_grad_batches
    assert len(batches) > 1000 * period
    new, seen = [], set()
    for addresses in itertools.islice(batches, 4 * period):
        reads = {order.address(step, k)[0] for step, k in addresses}
        new.append(len(reads - seen))
        seen |= reads
    assert {sum(new[first : first + period]) for first in range(period, 3 * period)} == {slots}


def test_a_number_of_workers_that_reads_blocks_again_is_told(asked, monkeypatch, capsys) -> None:
    """With two slots for each sample of the batch, three workers would read each block of two samples twice."""
    for number, told in ((3, True), (2, False)):
        monkeypatch.setattr(command, "report", lambda *_, number=number: number)
        asked()
        assert ("each block is read 2 times" in capsys.readouterr().err) == told


def test_the_step_trains_the_model(asked, monkeypatch) -> None:
    make, made = command.make_model, []
    monkeypatch.setattr(command, "make_model", lambda *given: made.append(make(*given)) or made[0])
    loader, step, *_ = asked()
    before = [parameter.detach().clone() for parameter in made[0].parameters()]
    step(next(iter(loader)))
    assert not any(map(torch.equal, before, made[0].parameters()))
