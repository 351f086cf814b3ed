"""Chapter 4: tune.py keeps what helps, leaves alone what does not, says what changes the result, and ends in time."""

import importlib
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import book
import programs
import pytest
import torch
from test_03_cloud_data import at, serve, winds, write  # noqa: F401  (a fixture)

CHAPTER = book.ROOT / "04_data_pipeline"
SCRIPT = "04_data_pipeline/tune.py"

sys.path.insert(0, str(CHAPTER))  # for diagnose.py, which no other chapter has
tune = importlib.import_module("tune")
sys.path.remove(str(CHAPTER))

FLAGS = {"num_workers": 0, "max_requests": 64, "shuffle_blocks": 32, "patches_per_map": 8}


# ------------------------------------------------------------------- the search, on trainings of a known speed


class Refused(Exception):
    """InputError, in its place: which chapter's is loaded when these tests run depends on those before."""


class Known(tune.Tuner):
    """A training whose step takes 10 ms, and whose loader takes what a function of its flags says."""

    def __init__(
        self,
        monkeypatch,
        load,
        seconds: float = 60,
        noise: float = 0.0,
        cores: int = 8,
        parts: int = 0,
        **flags,
    ):
        args = SimpleNamespace(**FLAGS | flags, devices=1, num_nodes=1, accelerator="cpu")
        super().__init__(args, seconds)
        self.load, self.noise, self.trials = load, noise, 0
        self.t_step, self.batch_bytes, self.blocks_bytes, self.parts = 0.010, 1000, 10**6, parts
        self.given.parts = parts
        monkeypatch.setattr(tune.os, "sched_getaffinity", lambda _: range(cores), raising=False)
        monkeypatch.setattr(tune, "free_memory", lambda: 10**9)
        monkeypatch.setitem(sys.modules, "object_store", SimpleNamespace(InputError=Refused))
        monkeypatch.setattr(tune, "peak_memory", lambda: 10**6)

    def try_once(self, trials) -> None:
        flags = vars(self.args) | trials.flags
        load, workers = self.load(SimpleNamespace(**flags)), flags["num_workers"]
        self.trials, trials.parts = self.trials + 1, self.parts
        wait = max(0, load / workers - self.t_step) if workers else load
        trials.alone.append(load / max(1, workers))
        trials.waits.append(wait)
        trials.steps.append((wait + self.t_step) * (1 + self.noise * (self.trials // 2 % 2)))


LIMIT = tune.LIMIT
SAFE, ALL = ("num_workers", "max_requests"), tuple(FLAGS)


def test_as_many_workers_as_keep_up(monkeypatch) -> None:
    best, _ = Known(monkeypatch, lambda flags: 0.035).search(SAFE)
    assert best.flags["num_workers"] == 4
    assert best.step == pytest.approx(0.010) and best.wait_share < 0.01
    _, end = (found := Known(monkeypatch, lambda flags: 0.031)).search(SAFE)
    assert end == LIMIT and len(found.tried) <= 3


def test_cores_cap_the_workers(monkeypatch) -> None:
    best, _ = Known(monkeypatch, lambda flags: 0.2, cores=2).search(SAFE)
    assert best.flags["num_workers"] == 3  # one more than its cores may help while others wait


def test_workers_are_tried_that_can_share_the_blocks(monkeypatch) -> None:
    best, _ = (found := Known(monkeypatch, lambda flags: 0.055, parts=4)).search(SAFE)  # 6 would keep up
    assert best.flags["num_workers"] == 4
    assert {trials.flags.get("num_workers", 0) for trials in found.tried} <= {0, 1, 2, 4}
    best, _ = Known(monkeypatch, lambda flags: 0.055, parts=1).search(SAFE)
    assert best.flags["num_workers"] == 1


def test_more_requests_where_they_help(monkeypatch) -> None:
    best, end = Known(monkeypatch, lambda flags: 5.0 / flags.max_requests, cores=1).search(SAFE)
    assert best.flags == {"num_workers": 2, "max_requests": 256}
    best, end = Known(monkeypatch, lambda flags: 0.2, cores=1, num_workers=2).search(SAFE)
    assert best.flags == {} and end == "nothing else gained more than the trials scatter"


def test_nothing_is_tried_where_the_step_is_the_limit(monkeypatch) -> None:
    for flags in ({}, {"num_workers": 2}):
        found = Known(monkeypatch, lambda flags: 0.0001, **flags)
        best, end = found.search(ALL)
        assert (best.flags, end, found.trials) == ({}, LIMIT, tune.ROUNDS)


def test_a_loader_that_just_keeps_up_is_not_enough(monkeypatch) -> None:
    """Nothing is waited for on average, but without a margin any hiccup is."""
    found = Known(monkeypatch, lambda flags: 0.0095, num_workers=1)
    _, end = found.search(SAFE)
    assert found.trials > tune.ROUNDS and end != LIMIT


def test_what_gains_less_than_the_trials_scatter_is_not_kept(monkeypatch) -> None:
    load = lambda flags: 0.1 if flags.max_requests == 64 else 0.08  # noqa: E731
    fixed = {"cores": 1, "num_workers": 2}
    quiet, _ = Known(monkeypatch, load, **fixed).search(SAFE)
    noisy, _ = Known(monkeypatch, load, noise=0.3, **fixed).search(SAFE)
    assert quiet.flags == {"max_requests": 128} and noisy.flags == {}


def test_a_trial_that_was_faster_and_is_not_kept_says_so(monkeypatch, capsys) -> None:
    load = lambda flags: 0.1 if flags.max_requests == 64 else 0.099  # noqa: E731
    found = Known(monkeypatch, load, cores=1, num_workers=2)
    best, end = found.search(SAFE)
    tune.report(found, best, end, "a command")
    rows = [line for line in capsys.readouterr().out.splitlines() if " ms" in line and "%" in line]
    assert [row.split()[-1] for row in rows if row.startswith("as given")] == ["best"]
    (faster,) = [row for row in rows if row.startswith("--max-requests 128")]
    assert faster.endswith("too close to call")


def test_alternatives_take_turns(monkeypatch) -> None:
    found, order = Known(monkeypatch, lambda flags: 0.2, cores=1, num_workers=2), []
    once = found.try_once
    found.try_once = lambda trials: (order.append(trials.flags), once(trials))
    found.search(("max_requests",))
    assert order == [{}, {}, {"max_requests": 128}, {}, {"max_requests": 128}, {}]


def test_flags_that_change_the_result_are_tried_if_asked_for(monkeypatch) -> None:
    load = lambda flags: 20 / flags.patches_per_map / flags.shuffle_blocks  # noqa: E731
    safe, _ = Known(monkeypatch, load, cores=1, num_workers=2).search(SAFE)
    best, _ = Known(monkeypatch, load, cores=1, num_workers=2).search(ALL)
    assert safe.flags == {} and {"shuffle_blocks", "patches_per_map"} & best.flags.keys()
    found = Known(monkeypatch, load)
    assert found.values("shuffle_blocks", found.given) == [64, 128]
    found.blocks_bytes = 2 * 10**8  # of 0.5 GB that may be taken
    assert found.values("shuffle_blocks", found.given) == [64]
    found.args.shuffle_blocks = 0
    assert found.values("shuffle_blocks", found.given) == [32]


def test_flags_that_train_would_refuse_are_passed_over(monkeypatch) -> None:
    """More patches than a map has room for, more blocks than memory: what was found before is not lost."""
    found = Known(monkeypatch, lambda flags: 20 / flags.patches_per_map, cores=1, num_workers=2)
    once = found.try_once

    def refuse(trials) -> None:
        if trials.flags.get("patches_per_map", 0) > 16:
            raise Refused("--patches-per-map: too many")
        once(trials)

    found.try_once = refuse
    best, _ = found.search(("patches_per_map", "max_requests"))
    assert best.flags == {"patches_per_map": 16}


def test_a_trial_is_of_whole_periods_however_long_they_take(monkeypatch) -> None:
    """Lanes begin together, so of blocks they come to the next at about the same step: a part of a period shows
    either too many of these steps, or none."""
    waits = iter(
        [0.0] * 40 + [0.01] * 8 + [0.0] * 1000
    )  # of 32 batches, all that is waited for comes in eight

    class Loader:
        loader = SimpleNamespace(num_workers=0)

        def __iter__(self):
            while True:
                time.sleep(next(waits))
                yield torch.zeros(1)

    data = SimpleNamespace(
        training=SimpleNamespace(period=32, close=int), args=SimpleNamespace(shuffle_blocks=0)
    )
    args = SimpleNamespace(**FLAGS, devices=1, num_nodes=1, accelerator="cpu", accumulate=1, batch_size=1)
    tuner = tune.Tuner(args, seconds=60)
    tuner.each = 0.001  # so that time is up after two or three milliseconds
    monkeypatch.setattr(tuner, "open", lambda flags: (data, Loader()))
    monkeypatch.setattr(tuner, "step", lambda batch: time.sleep(0.001))
    tuner.try_once(trials := tune.Trials({}))
    assert trials.alone[0] == pytest.approx(0.08 / 32, rel=0.5)


def test_the_search_ends_when_the_time_is_up(monkeypatch) -> None:
    found = Known(monkeypatch, lambda flags: 0.2, seconds=0.1)
    once = found.try_once
    found.try_once = lambda trials: (time.sleep(0.06), once(trials))
    best, end = found.search(ALL)
    assert found.trials <= 3 and best.flags == {} and end.startswith("the time is up")


@pytest.mark.parametrize(
    ("given", "values", "expected"),
    [
        ([], {}, ""),
        (["--seed", "1"], {"num_workers": 2}, " --seed 1 --num-workers 2"),
        (["--num-workers", "0", "--seed", "1"], {"num_workers": 2}, " --seed 1 --num-workers 2"),
        (["--max-requests=4"], {"max_requests": 128}, " --max-requests 128"),
        (
            ["--store", "my winds.zarr"],
            {"patches_per_map": 16.0},
            " --store 'my winds.zarr' --patches-per-map 16",
        ),
    ],
)
def test_the_command_that_is_printed(given: list[str], values: dict, expected: str) -> None:
    before = list(given)
    assert tune.command(given, values) == f"uv run python train.py{expected}"
    assert given == before


# -------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def buckets(winds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    write(winds, folder / "bucket/winds.zarr", (1, 73, 144))
    return folder


def command_of(printed: str) -> str:
    return re.search(r"^uv run python train\.py.*$", printed, re.MULTILINE).group()


def test_a_loader_that_waits_for_a_distant_store_gets_what_helps(buckets) -> None:
    flags = ["--store", "s3://bucket/winds.zarr", "--anonymous", "--shuffle-blocks", 0, "--patch-size", 16]
    flags += ["--batch-size", 4, "--max-requests", 2]
    with serve(buckets, "--latency-ms", 40) as address:
        done = programs.require_success(SCRIPT, *flags, "--seconds", 75, environment=at(address), timeout=150)
    found = command_of(done.out)
    assert "--num-workers" in found or "--max-requests 4" in found or "--max-requests 8" in found, done.out
    assert "--shuffle-blocks 0" in found and "THE SAMPLES" not in done.out
    assert float(re.search(r"([\d.]+) times as fast", done.out).group(1)) > 1.1, done.out
    assert "Error" not in done.err, done.err


def test_flags_are_left_alone_where_the_step_is_the_limit(buckets) -> None:
    flags = ["--store", buckets / "bucket/winds.zarr", "--patches-per-map", 64]
    began = time.monotonic()
    done = programs.require_success(SCRIPT, *flags, "--seconds", 30, "--also-shuffle")
    assert command_of(done.out) == f"uv run python train.py {' '.join(map(str, flags))}"
    assert f"{LIMIT}\n" in done.out and "no flag is changed" in done.out, done.out
    assert time.monotonic() - began < 60


def test_it_ends_in_time(buckets) -> None:
    flags = ["--store", "s3://bucket/winds.zarr", "--anonymous", "--shuffle-blocks", 0, "--batch-size", 4]
    began = time.monotonic()
    with serve(buckets, "--latency-ms", 200) as address:
        done = programs.require_success(SCRIPT, *flags, "--seconds", 5, environment=at(address))
    assert "the time is up; give more --seconds" in done.out and time.monotonic() - began < 60, done.out


def test_help_names_its_own_flags_and_those_of_train() -> None:
    done = programs.require_success(SCRIPT, "--help")
    assert done.out.startswith("usage: tune.py [-h] [--seconds S] [--also-shuffle]")
    assert "--max-requests" in done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seconds", "0"], "--seconds 0: give a number of seconds above 0"),
        (["--seconds", "nan"], "--seconds nan: give a number of seconds above 0"),
        (["--batch-size", "0"], "--batch-size 0: too small; give at least 1"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--store", "nowhere.zarr"], "--store nowhere.zarr: no Zarr store there; "),
    ],
)
def test_bad_flags_get_one_line(flags: list[str], message: str) -> None:
    done = programs.run(SCRIPT, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"tune.py: error: {message}"), done.err
    assert done.err.count("\n") == 1
