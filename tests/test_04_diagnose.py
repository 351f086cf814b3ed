"""Chapter 4: diagnose.py is right where the bottleneck is known. No clock decides: durations are made up."""

import ast
import gc
import itertools
import json
import multiprocessing
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import book
import programs
import psutil
import pytest
import torch
from runs import load
from torch.utils.data import DataLoader, TensorDataset

CHAPTER, SCRIPT = book.ROOT / "04_data_pipeline", "04_data_pipeline/diagnose.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 50".split()
SMALL += "--shuffle-blocks 4 --patches-per-block 2 --steps 2".split()

chapter = load(SCRIPT, "chapter_04_diagnose")
plan_workers = chapter.plan_workers


@pytest.fixture(scope="module", autouse=True)
def quick_collector() -> Iterator[None]:
    """Let the garbage collector, which each diagnosis calls, skip all that was imported."""
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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chapter, "perf_counter", clock)
    return clock


class Loader:
    """A DataLoader whose workers take `load` seconds for a batch, and `start` before the first.

    As in torch, batch i is worker i % w's, and is asked for at the start or as batch i - w * prefetch is given.
    """

    def __init__(self, clock: Clock, load: float, workers: int = 0, start: float = 0.0, prefetch: int = 2):
        self.clock, self.load, self.start = clock, load, start
        self.num_workers, self.prefetch_factor = workers, prefetch if workers else None

    def __iter__(self) -> Iterator[list]:
        self.clock.work(self.start)
        asked, free = (
            [self.clock.now] * self.num_workers * (self.prefetch_factor or 0),
            [0.0] * self.num_workers,
        )
        for number in itertools.count():
            if self.num_workers:
                worker = number % self.num_workers
                free[worker] = max(asked[number], free[worker]) + self.load
                self.clock.now = max(self.clock.now, free[worker])
                asked.append(self.clock.now)
            else:
                self.clock.work(self.load)
            yield [torch.zeros(1)]


# The calls of the step, by default: 21 with a cached batch, 37 with the loader (without workers), 21 cached.
CACHED, FIRST_WITH_LOADER = 5 + chapter.STEPS // 2, 5 + chapter.STEPS // 2
WITH_LOADER = 5 + chapter.STEPS


def steps_of(clock: Clock, seconds: float, more: dict[int, float] | None = None) -> Callable:
    """A step that takes so long, and `more` in these calls, of which the first is call 0."""
    calls = itertools.count()
    return lambda batch: clock.work(seconds + (more or {}).get(next(calls), 0.0))


# Of a run of 100 steps: workers, and seconds of a batch by one of them, of a step, and to start; the verdict.
CASES = {
    "times add": (0, 0.030, 0.010, 0.0, "data-bound"),
    "times add, and the step is slower": (0, 0.010, 0.030, 0.0, "data-bound"),
    "times add, and the step is a little slower": (0, 0.045, 0.050, 0.0, "data-bound"),
    "times add, and the step is much slower": (0, 0.004, 0.050, 0.0, "compute-bound"),
    "one worker, slower than the step": (1, 0.030, 0.010, 0.0, "data-bound"),
    "one worker, faster than the step": (1, 0.010, 0.030, 0.0, "compute-bound"),
    "two workers, slower, though most of the time is the step's": (2, 0.030, 0.010, 0.0, "data-bound"),
    "four workers, together faster than the step": (4, 0.030, 0.010, 0.0, "compute-bound"),
    "three workers, whose waves are no divisor of the steps": (3, 0.045, 0.010, 0.0, "data-bound"),
    "a slow start": (0, 0.001, 0.010, 5.0, "start-up-bound"),
    "a slow start of workers that keep up": (2, 0.010, 0.010, 5.0, "start-up-bound"),
    "a start that is slow, and shorter than the waiting": (2, 0.060, 0.010, 1.0, "data-bound"),
    "a start that is slow, of a run that is much longer": (2, 0.010, 0.010, 0.05, "compute-bound"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_the_shares_and_the_speed_up_are_those_of_the_run(case: str, clock: Clock) -> None:
    workers, load, step, start, verdict = CASES[case]
    found = chapter.diagnose(Loader(clock, load, workers, start), steps_of(clock, step), run_steps=100)
    pace = max(load / workers, step) if workers else load + step
    startup = start + load - (pace - step)  # the first batch is waited for as long as a worker takes for it
    times = {"waiting": 100 * (pace - step), "computing": 100 * step, "start-up": startup}
    assert found.verdict == verdict
    assert found.shares == pytest.approx({name: each / sum(times.values()) for name, each in times.items()})
    assert found.speedup == pytest.approx((startup + 100 * pace) / (100 * step))
    assert found.speedup_range == pytest.approx((found.speedup, found.speedup))  # nothing varies here
    assert (found.load, found.at_hand, found.startup) == pytest.approx((load, step, startup))
    assert found.notes == []


def test_a_start_weighs_as_much_as_the_run_is_short(clock: Clock) -> None:
    loader = Loader(clock, 0.0001, start=5.0)
    short, long = (chapter.diagnose(loader, steps_of(clock, 0.01), run_steps=n) for n in (100, 10_000))
    assert (short.verdict, long.verdict) == ("start-up-bound", "compute-bound")
    assert (short.startup, short.waiting) == pytest.approx((5.0, 0.0001)) == (long.startup, long.waiting)


def test_the_start_is_that_of_the_first_run(clock: Clock) -> None:
    """The second time, files may be in memory and connections open."""
    loader = Loader(clock, 0.01, start=5.0)
    step = steps_of(clock, 0.01)
    found = chapter.diagnose(loader, lambda batch: (step(batch), setattr(loader, "start", 0.0)))
    assert found.startup == pytest.approx(5.0)


def test_the_cached_batch_is_timed_before_and_after_the_run_with_the_loader(clock: Clock) -> None:
    events = []

    class Recorded(Loader):
        def __iter__(self) -> Iterator[list]:
            events.append("begin")
            try:
                yield from super().__iter__()
            finally:
                events.append("end")

    step = steps_of(clock, 0.01)
    chapter.diagnose(Recorded(clock, 0.01), lambda batch: (step(batch), events.append("step")))
    order = [(event, len(list(same))) for event, same in itertools.groupby(events)]
    cached, loader = ("step", CACHED), [("begin", 1), ("step", WITH_LOADER), ("end", 1)]
    assert order == [("begin", 1), ("end", 1), cached, *loader, cached]


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_lives_while_the_cached_batch_is_timed(persistent: bool) -> None:
    others, seen = set(multiprocessing.active_children()), []
    loader = DataLoader(
        TensorDataset(torch.zeros(50)),
        num_workers=1,
        persistent_workers=persistent,
        multiprocessing_context="forkserver",
    )
    step = lambda batch: seen.append(len(set(multiprocessing.active_children()) - others))  # noqa: E731
    chapter.diagnose(loader, step, steps=2)
    assert [workers for workers, _ in itertools.groupby(seen)] == [0, 1, 0]


def test_first_steps_and_what_workers_put_by_during_them_are_left_out(clock: Clock) -> None:
    step = steps_of(clock, 0.005, {0: 9.0, FIRST_WITH_LOADER: 9.0})
    found = chapter.diagnose(Loader(clock, 0.04, 2), step)
    assert (found.waiting, found.compute, found.at_hand) == pytest.approx((0.015, 0.005, 0.005))
    assert found.notes == []


def test_a_loader_that_still_lives_on_its_stock_is_told(clock: Clock) -> None:
    """As one whose threads read far ahead, which nobody can see from outside."""
    hidden = Loader(clock, 0.04, 2, prefetch=30)
    loader = type("Hidden", (), {"__iter__": lambda self: iter(hidden)})()
    loader.num_workers = 2
    found = chapter.diagnose(loader, steps_of(clock, 0.005, {FIRST_WITH_LOADER: 9.0}))
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
def test_the_range_has_the_true_speed_up_though_the_machine_was_slow_for_a_while(
    spell: str, clock: Clock
) -> None:
    step = steps_of(clock, 0.1, dict.fromkeys(range(*SPELLS[spell]), 0.06))
    found = chapter.diagnose(Loader(clock, 0.014), step)
    low, high = found.speedup_range
    assert low <= found.speedup <= high
    assert low - 1e-9 <= 1.14 <= high + 1e-9
    assert any("repeat the diagnosis" in note for note in found.notes)


def test_a_range_on_both_sides_of_what_is_worthwhile_is_told(clock: Clock) -> None:
    """It is 1.09 where nothing disturbs it; the verdict is that of the mean."""
    step = steps_of(clock, 0.1, dict.fromkeys(range(*SPELLS["in the middle"]), 0.02))
    found = chapter.diagnose(Loader(clock, 0.009), step)
    assert found.speedup_range == pytest.approx((1.09, 1.25), abs=0.05)
    assert found.verdict == "data-bound" and found.speedup > 1.1
    assert len(found.notes) == 1 and "not certain" in found.notes[0]


def test_of_blocks_whole_ones_are_counted(clock: Clock) -> None:
    """Every tenth batch waits for new blocks, after ten that come slowly and ten from stock."""
    taken = []

    class Blocks:
        def __iter__(self) -> Iterator[int]:
            taken.append(0)
            for number in itertools.count():
                clock.work(1.0 if number < 10 or (number % 10 == 0 and number >= 20) else 0.0)
                taken[-1] += 1
                yield number

    for steps in (2, 12):  # two whole ones at least
        found = chapter.diagnose(Blocks(), steps_of(clock, 0.05), steps=steps, period=10)
        assert found.verdict == "data-bound"
        assert (found.waiting, found.load) == pytest.approx((0.1, 0.1))
        assert found.speedup_range == pytest.approx((found.speedup, found.speedup))
        assert taken[-2:] == [40, 40]


def test_the_device_is_waited_for_before_the_clock_is_read(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step only gives the device its work."""
    queue = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: clock.work(sum(queue)) or queue.clear())

    class Busy(Loader):  # a batch is moved to the device, behind all that it was given
        def __iter__(self) -> Iterator[list]:
            for batch in super().__iter__():
                torch.accelerator.synchronize()
                yield batch

    found = chapter.diagnose(Busy(clock, 0.001), lambda batch: queue.append(0.03))
    assert found.verdict == "compute-bound"
    assert (found.compute, found.at_hand, found.waiting) == pytest.approx((0.03, 0.03, 0.001))


class Cycle:
    """An iterator that refers to itself, as one whose thread calls its methods."""

    def __init__(self, batches: Iterator):
        self.batches, self.itself = batches, self

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        return next(self.batches)


@pytest.mark.parametrize("kind", [iter, Cycle])
def test_a_step_that_the_loader_slows_down_is_told_apart(
    kind: Callable, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    """Its threads take the cores: that costs time without a wait, and a cached batch does not."""
    reading = []

    class Greedy(Loader):
        def __iter__(self) -> Iterator[list]:
            return kind(self.read())

        def read(self) -> Iterator[list]:
            reading.append(True)
            try:
                yield from super().__iter__()
            finally:
                reading.clear()

    loader = Greedy(clock, 0.001, start=1.0)  # costs more than the waiting, and less than the slower steps
    step = lambda batch: clock.work(0.04 if reading else 0.01)  # noqa: E731
    found = chapter.diagnose(loader, step, run_steps=100)
    assert found.verdict == "data-bound" and found.speedup == pytest.approx(5.1)
    assert found.notes == [] and chapter.report(found) is None
    assert "data-bound: the loader takes cores from the step, which takes 40.0 ms" in capsys.readouterr().out


def test_a_step_that_waits_and_is_slowed_down_is_told_both(
    clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    more = dict.fromkeys(range(CACHED, CACHED + WITH_LOADER), 0.01)
    found = chapter.diagnose(Loader(clock, 0.03), steps_of(clock, 0.03, more))
    assert len(found.notes) == 1 and "also takes cores" in found.notes[0]
    chapter.report(found)
    assert "data-bound: a step waits 30.0 ms" in capsys.readouterr().out


def test_a_noisy_machine_makes_no_step_slower_by_taking_the_loader_away(clock: Clock) -> None:
    quick = dict.fromkeys(range(CACHED, CACHED + WITH_LOADER), -0.01)
    found = chapter.diagnose(Loader(clock, 0.0), steps_of(clock, 0.02, quick))
    assert (found.at_hand, found.speedup, *found.speedup_range) == pytest.approx((0.01, 1.0, 1.0, 1.0))
    assert len(found.notes) == 1 and "other programs" in found.notes[0]


# ------------------------------------------------------------------------------- how many batches, how long


class Unsized:
    """A loader without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter([1] * 20)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [(Unsized(), "has 20 batches, and a run needs 37"), (iter([1] * 60), "once")],
    ids=["too short", "given once"],
)
def test_a_loader_without_enough_batches_is_refused(batches: object, reason: str, clock: Clock) -> None:
    with pytest.raises(ValueError, match=reason):
        chapter.diagnose(batches, steps_of(clock, 1))


@pytest.mark.parametrize(
    ("workers", "batches", "reason"),
    [
        (
            0,
            20,
            r"has 20 batches, .* needs 37, 5 of them to warm up: give a loader with more, or .*\(steps=15\)$",
        ),
        (0, 6, r"has 6 batches, .* needs 37, 5 of them to warm up: give a loader with more$"),
        (4, 40, r"has 40 batches, .* needs 48, .*\(steps=24\), or use fewer workers$"),
        (
            8,
            40,
            r"has 40 batches, .* needs 64, 32 of them to warm up: give a loader with more, or use fewer workers$",
        ),
    ],
)
def test_too_few_batches_are_refused_before_the_first_is_taken(
    workers: int, batches: int, reason: str, clock: Clock
) -> None:
    class Sized(Loader):
        def __len__(self) -> int:
            return batches

    class Untouched(Sized):
        def __iter__(self) -> Iterator[list]:
            pytest.fail("the loader was iterated")

    with pytest.raises(ValueError, match=reason):
        chapter.diagnose(Untouched(clock, 0.01, workers), steps_of(clock, 0.01))
    if proposed := re.search(r"steps=(\d+)", reason.replace("\\", "")):  # that number is not too many
        chapter.diagnose(Sized(clock, 0.01, workers), steps_of(clock, 0.01), steps=int(proposed[1]))


def test_it_says_how_many_batches_it_takes_and_how_long(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    told = []

    class Listening(Loader):
        def __iter__(self) -> Iterator[list]:
            told.append(capsys.readouterr().err)
            return super().__iter__()

    began, step = [], steps_of(clock, 5.0)
    loader = Listening(clock, 4.5, start=10.0)
    chapter.diagnose(loader, lambda batch: (began.append(clock.now), step(batch)))
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
        ({"cores": 8}, (8, "cores")),
        ({"cores": 20, "ranks": 8}, (2, "cores")),
        ({"cores": 4, "ranks": 8}, (0, "cores")),
        ({"memory": 9e6}, (4, "memory")),
        ({"memory": 9e6, "ranks": 2}, (2, "memory")),
        ({"memory": 9e6, "prefetch_factor": 4}, (2, "memory")),
        ({"memory": 9e6, "worker_bytes": 10**6}, (3, "memory")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6}, (2, "/dev/shm")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6, "ranks": 2}, (1, "/dev/shm")),
        ({"shm": 64e6, "batch_bytes": 15 * 10**6, "prefetch_factor": 1}, (4, "/dev/shm")),
        ({"shm": 9e6, "worker_bytes": 10**6}, (4, "/dev/shm")),  # a worker itself lies in memory
        ({"shm": 9e6, "cores": 3}, (3, "cores")),
    ],
)
def test_each_cap_binds_in_turn(facts: dict, expected: tuple, capsys: pytest.CaptureFixture) -> None:
    assert plan_workers(1.0, 0.1, **ROOM | facts) == expected
    assert re.search(rf"^  {expected[1]} .* {expected[0]}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("load", "step", "workers"), [(2.1, 0.3, 7), (0.31, 0.3, 2), (0.001, 0.3, 1)])
def test_as_many_workers_as_keep_up(load: float, step: float, workers: int) -> None:
    assert plan_workers(load, step, cores=100)[0] == workers


@pytest.mark.parametrize(("load", "step", "cores"), [(1.0, 0.1, 4), (1.0, 0.1, 10), (0.4, 0.1, 0)])
def test_the_promised_pace_is_that_of_so_many_workers(
    load: float, step: float, cores: int, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    workers, _ = plan_workers(load, step, cores=cores)
    promised, without = map(float, re.findall(r"([\d.]+) ms", capsys.readouterr().out.splitlines()[-1]))
    for number, told in ((workers, promised), (0, without)):
        found = chapter.diagnose(Loader(clock, load, number), steps_of(clock, step))
        assert 1e3 * (found.waiting + found.compute) == pytest.approx(told)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_report_has_the_sum_for_workers_if_the_training_waits(
    ranks: int, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    found = chapter.diagnose(Loader(clock, 0.045), steps_of(clock, 0.050))
    workers = chapter.report(found, ranks)
    told = capsys.readouterr().out
    assert "data-bound: a step waits 45.0 ms for its batch" in told
    assert "could give: 1.90 times (1.90 to 1.90 " in told
    assert re.search(r"t_load / t_step +45.0 ms / 50.0 ms = needs 1$", told, re.MULTILINE)
    assert f"cores / {ranks} rank{'s' * (ranks > 1)} = at most" in told
    assert re.search(rf"^  {workers}, by ", told, re.MULTILINE)


def test_a_report_needs_no_workers_if_the_training_hardly_waits(
    clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    found = chapter.diagnose(Loader(clock, 0.001), steps_of(clock, 0.050))
    assert chapter.report(found) is None
    told = capsys.readouterr().out
    assert "compute-bound: a step takes 50.0 ms with a cached batch, and 51.0 ms with the loader" in told
    assert "no more workers are needed" in told and "t_load" not in told


# ------------------------------------------------------------------------------ as a reader runs it


@pytest.fixture(scope="module")
def store(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that read a tiny store out of a folder."""
    return ["--store", str(make_small_store(tmp_path_factory.mktemp("stores") / "winds"))]


@pytest.mark.parametrize("more", ["", "--naive", pytest.param("--num-workers 1", marks=pytest.mark.thorough)])
def test_the_readers_command(more: str, store: list[str]) -> None:
    before = programs.running()
    done = programs.require_success(SCRIPT, *SMALL, *store, *more.split())
    # What starts workers, and the server, end as soon as they see that the program has.
    started = [process for process in programs.running() if process not in before]
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert re.search(r"^(data|compute|start-up)-bound: ", done.out, re.MULTILINE), done.out
    shares = [float(share) for share in re.findall(r"^  [a-z-]+ +([\d.]+)%", done.out, re.MULTILINE)]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.2)
    speedups = re.search(r"could give: ([\d.]+) times \(([\d.]+) to ([\d.]+) ", done.out).groups()
    speedup, low, high = map(float, speedups)
    assert 1 <= low <= speedup <= high
    assert re.search(r"^four runs: .*\nabout \d+ s more$", done.err, re.MULTILINE), done.err
    assert ("naive loader" in done.out) == ("naive" in more)
    assert re.search(r"t_load / t_step .* = needs \d+\n|no more workers are needed", done.out)


def test_results_have_a_row_for_each_loader(store: list[str], tmp_path: Path) -> None:
    for name in ("diagnose.py", "train.py"):
        shutil.copy(CHAPTER / name, tmp_path)
    programs.require_success(tmp_path / "diagnose.py", *SMALL, *store, "--save-results")
    results = json.loads((tmp_path / "results/diagnosis.json").read_text())
    assert {"command", "date", "machine", "versions", "rows"} == results.keys()
    assert [row["loader"] for row in results["rows"]] == ["naive", "final"]
    fields = {
        "verdict",
        "shares",
        "speedup",
        "speedup_range",
        "waiting",
        "compute",
        "at_hand",
        "load",
        "startup",
        "num_workers",
    }
    assert all(
        fields < row.keys() and sum(row["shares"].values()) == pytest.approx(1) for row in results["rows"]
    )


def test_the_naive_loader_gives_the_samples_of_chapter_3(
    store: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in the same order as all at once, though it asks for one after another."""
    train, found = load("04_data_pipeline/train.py", "train_to_diagnose"), []
    monkeypatch.setitem(sys.modules, "train_to_diagnose", train)
    monkeypatch.setattr(chapter, "diagnose", lambda loader, *_: found.append(next(iter(loader))))
    args = train.parse_arguments([flag for flag in SMALL[:-2]] + store)
    asked, read = [], train.Store.read
    monkeypatch.setattr(train.Store, "read", lambda self, at: asked.append(len(at)) or read(self, at))
    chapter.diagnose_training(train, args, 1, naive=True)
    assert asked == [1] * args.batch_size
    samples = train.make_patches(args)[0].__getitems__([(0, k) for k in range(args.batch_size)])
    for name in ("input", "target", "weight"):
        assert torch.equal(found[0][name], torch.stack([torch.from_numpy(each[name]) for each in samples]))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--steps 0", "--steps 0"),
        ("--batch-size 0", "--batch-size 0"),
        ("--store nowhere", "--store nowhere"),
    ],
)
def test_bad_input_is_named(flags: str, named: str, store: list[str]) -> None:
    done = programs.run(SCRIPT, *SMALL, *store, *flags.split())
    assert done.code == 2 and named in done.err.splitlines()[-1] and "Traceback" not in done.err


def test_a_copy_of_the_file_needs_torch_tqdm_and_psutil_only() -> None:
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.parse((CHAPTER / "diagnose.py").read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names - sys.stdlib_module_names == {"torch", "tqdm", "psutil"}
