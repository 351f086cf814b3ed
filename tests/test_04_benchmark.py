"""Chapter 4: each study of benchmark.py runs, goes on when stopped, and counts what the loaders really ask for."""

import importlib
import json
import os
import random
import sys
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import book
import numpy as np
import programs
import pytest
from zarr.core.sync import sync

CHAPTER = book.ROOT / "04_data_pipeline"
SCRIPT = "04_data_pipeline/benchmark.py"
KEPT = CHAPTER / "outputs/benchmark"


def load(name: str):
    """Import a script of this chapter with its own neighbours, whose names chapter 3's have, too."""
    neighbours = ("benchmark", "loader", "object_store")
    others = {other: sys.modules.pop(other) for other in neighbours if other in sys.modules}
    sys.path.insert(0, str(CHAPTER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(CHAPTER))
        for neighbour in neighbours:
            sys.modules.pop(neighbour, None)
        sys.modules |= others


benchmark = load("benchmark")
STUDIES = list(benchmark.STUDIES)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["speed"], "speed: no such study; choose from ladder, demand, places, optimum, "),
        (["ladder", "--rounds", "0"], "--rounds 0: too small; give at least 1"),
        (["--quick", "--save-results"], "--save-results: --quick measures nothing worth keeping"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], message: str) -> None:
    done = programs.run(SCRIPT, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"benchmark.py: error: {message}"), done.err
    assert done.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------- --quick


def marked(mark: str) -> list[str]:
    """The programs, by their command lines, that have this in the environment that they were started with."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_text(errors="replace"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is somebody else's
            pass
    return found


def rows_of(printed: str) -> dict[str, list[dict]]:
    found = {name: [] for name in STUDIES}
    for line in printed.splitlines():
        name, _, row = line.partition(" ")
        if row.startswith("{"):
            found[name].append(json.loads(row))
    return found


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    """The rows that --quick prints, by study."""
    results, mark = CHAPTER / "results", uuid.uuid4().hex
    before = {path: path.stat().st_mtime_ns for path in results.glob("*")}
    done = programs.require_success(SCRIPT, "--quick", timeout=500, environment={"TEST_MARK": mark})
    assert before == {path: path.stat().st_mtime_ns for path in results.glob("*")}
    assert not list(KEPT.glob("*-quick.jsonl")) and not list(KEPT.glob("tmp*"))
    programs.wait_for(lambda: not marked(mark), 20, "the end of all processes")
    if "gpu: left out: there is no CUDA device here" not in done.out:
        assert rows_of(done.out)["gpu"]
    return rows_of(done.out)


RATE = {"samples_per_second", "first_batch_seconds", "cpu_ms_per_sample", "threads"}
ASKED = {"requests_per_sample", "bytes_per_sample", "bytes_per_byte_used"}
SHARES = {"steps_per_second", "wait_share", "wait_ms", "step_ms"}
EXPECTED = {  # rows, and what most of them must tell
    "ladder": (16, {"step", "kind", "samples_per_second", "cpu_ms_per_sample"} | ASKED),
    "demand": (3, {"kind", "num_workers", "wanted"} | SHARES),
    "places": (12, {"kind", "place", "num_workers"} | RATE | ASKED),
    "optimum": (4, {"place", "sleep_ms"}),
    "settings": (14, {"kind", "place", "at_once", "setting", "value"} | RATE | ASKED),
    "prefetch": (8, {"kind", "num_workers", "prefetch_factor", "steps"} | SHARES),
    "start": (
        2,
        {"start_method", "persistent_workers", "imported"} | {f"epoch_{n}_seconds" for n in range(3)},
    ),
    "overlap": (12, {"kind", "num_workers", "thread", "step"} | SHARES),
    "cut": (9, {"cut", "shuffle_blocks", "kind", "samples_per_second", "cpu_ms_per_sample"} | ASKED),
    "bandwidth": (4, {"cut", "place"} | RATE | ASKED),
    "dask": (4, {"mode", "n", "num_workers"} | RATE),
    "pools": (4, {"n", "num_workers"} | RATE),
    "cpu": (21, {"part"}),
    "cache": (43, {"order", "policy", "cache_share", "hit_share"}),
    "command": (2, {"run", "wall_seconds", "printed"}),
    "diagnosis": (2, {"kind", "place"}),
    "tuning": (1, {"run", "wall_seconds", "printed"}),
    "shuffle": (1, {"shuffle_blocks", "patches_per_map", "steps", "seeds", "rmse"}),
    "steady": (
        1,
        {"kind", "place", "num_workers", "steps", "memory_mb", "memory_mb_per_1000_steps"} | SHARES,
    ),
}


@pytest.mark.parametrize("study", EXPECTED)
def test_a_study_gives_its_rows(rows: dict, study: str) -> None:
    number, names = EXPECTED[study]
    zarrs = study == "cpu" and importlib.util.find_spec("zarrs") is not None  # has a row more
    assert len(rows[study]) == number + zarrs - (study == "cpu")
    for row in rows[study]:
        assert names <= row.keys(), row
        for figure in row.values():
            if isinstance(figure, dict) and "median" in figure:
                assert np.isfinite(figure["median"]) and figure["min"] <= figure["median"] <= figure["max"]


def test_every_study_is_expected() -> None:
    assert [*EXPECTED, "gpu"] == STUDIES


def median(row: dict, figure: str) -> float:
    return row[figure]["median"]


def test_what_does_not_depend_on_the_machine_is_right(rows: dict) -> None:
    asked = {row["step"]: median(row, "requests_per_sample") for row in rows["ladder"]}
    naive, patches = asked["naive: isel().load(), a sample after another"], asked["chapter 3's, two workers"]
    # A patch of 16 touches 1 + 15/32 chunks of 32 along each axis, of two variables, seldom fewer at an edge.
    assert naive == pytest.approx(2 * (1 + 15 / 32) ** 2, rel=0.3) == pytest.approx(patches, rel=0.3)
    blocks = asked["blocks, chunks of a read decoded together"]
    assert blocks < naive / 4
    assert asked["bare GETs of what blocks ask for, decoded"] == pytest.approx(blocks, rel=0.3)
    cuts = {row["cut"]: row for row in rows["cut"] if row["kind"] == "blocks"}
    plain, bare = cuts["128 x 128"], cuts["128 x 128, not compressed"]
    sizes = [median(row, "bytes_per_sample") / median(row, "requests_per_sample") for row in (plain, bare)]
    assert sizes[0] < 0.95 * sizes[1]
    assert sizes[1] == pytest.approx(4 * 32 * 32, rel=0.15)  # Zarr pads those at the edges
    *_, predicted = rows["optimum"]
    assert {"needed", "predicted", "best", "binds", "load_ms"} <= predicted.keys()
    assert predicted["predicted"] <= max(predicted["needed"], os.cpu_count())
    slow, fast = rows["diagnosis"]
    bought = median(fast, "steps_per_second") * median(slow, "now_ms") / 1e3
    assert slow["measured_speedup"] == pytest.approx(bought)
    trained, judged = (row["printed"] for row in rows["command"])
    assert "RMSE over the unseen cells" in trained and "best speed-up that work on data could give" in judged


def test_each_library_makes_a_small_read_dearer(rows: dict) -> None:
    """Mode 21: for a few cells, all that is not reading is what it costs."""
    head = "64 x 64 cells of a chunk in memory: "
    parts = {row["part"]: median(row, "cpu_microseconds") for row in rows["cpu"] if "cpu_microseconds" in row}
    numpy, zarr, xarray, dask = (
        parts[head + name] for name in ("NumPy", "Zarr", "xarray", "xarray with Dask")
    )
    assert 10 * numpy < zarr < xarray < dask / 1.5


def test_the_threads_of_everything_are_counted(rows: dict) -> None:
    for row in rows["dask"]:
        threads = row["threads"]
        assert threads["this"] > 0 and (threads["workers"] > 0) == (row["num_workers"] > 0)
        assert (threads["dask"] > 0) == (row["mode"] == "distributed")
        if row["mode"] != "no Dask":
            assert median(row, "task_threads") == row["n"], row


def test_a_cache_hits_as_often_as_it_is_large_if_it_pins(rows: dict) -> None:
    hits = {(row["order"], row["policy"], row["cache_share"]): row["hit_share"] for row in rows["cache"]}
    for (order, policy, share), found in hits.items():
        assert policy == "DiskCache" or 0 <= found <= 1
        if share in (0, 1):
            assert policy == "DiskCache" or found == share
        elif policy == "pin":
            assert found == pytest.approx(share, abs=0.15), order
    assert hits["blocks", "DiskCache", 0.5]["median"] == pytest.approx(hits["blocks", "pin", 0.5], abs=0.05)
    free = [row for row in rows["cache"] if row["policy"] != "DiskCache" and row["cache_share"] == 0]
    for row in free:  # a dollar buys 2.5 million GETs
        assert row["usd_per_million_samples"] == pytest.approx(row["gets_per_sample"] / 2.5)


# ------------------------------------------------------------------------------------------- it goes on


def test_a_stopped_study_goes_on() -> None:
    path = KEPT / "places-quick.jsonl"
    path.unlink(missing_ok=True)
    stopped = programs.Program(SCRIPT, "--quick", "places")
    complete = lambda: path.read_text().count("\n") if path.exists() else 0  # noqa: E731
    programs.wait_for(lambda: complete() >= 2, 100, "two measurements")
    stopped.process.kill()
    assert stopped.wait().code == -9
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        path.read_text() + json.dumps(["other code", *kept[1][1:3], {"samples_per_second": -1}]) + "\n"
    )
    done = programs.require_success(SCRIPT, "--quick", "places")
    found = rows_of(done.out)["places"]
    assert len(found) == 12 and not path.exists()
    for (_, _, labels, figures), row in zip(kept, found):
        assert json.loads(labels).items() <= row.items()
        assert median(row, "samples_per_second") == figures["samples_per_second"]
    assert all(median(row, "samples_per_second") > 0 for row in found)


# ------------------------------------------------------------------------------------ what is asked for


@pytest.fixture(scope="module")
def bench():
    with ExitStack() as stack:
        yield benchmark.Bench("test", True, 1, stack)


def recorded(patches) -> list[str]:
    """The keys of chunks that patches ask their store for from now on, as they do."""
    asked, get = [], patches.winds.store.get

    async def noted(key, *arguments, **options):
        if not key.endswith(benchmark.object_store.METADATA):
            asked.append(key)
        return await get(key, *arguments, **options)

    patches.winds.store.get = noted
    return asked


def opened(bench, **settings):
    reading = benchmark.Reading(place="memory", shuffle_blocks=8, **settings)
    return benchmark.open_patches(reading, bench.store(reading.cut), bench.patch)


@pytest.mark.parametrize("cut", ["128 x 128", "256 x 256", "map"])
def test_the_simulation_asks_for_what_blocks_ask_for(bench, cut: str) -> None:
    patches = opened(bench, cut=cut)
    asked, steps = recorded(patches), sum(patches.totals) * 3 // benchmark.BATCH // 2

    def ends_a_visit(step: int) -> bool:
        places = [patches.locate(step, k) for k in range(benchmark.BATCH)]
        return any(patch + 1 == patches.patches[patches.visit(*where).block] for *where, patch in places)

    steps = next(step for step in range(steps, 10**6) if ends_a_visit(step)) + 1  # when it reads ahead
    samples = steps * benchmark.BATCH
    for step in range(steps):
        patches.__getitems__([(step, k) for k in range(benchmark.BATCH)])
    expected = Counter(benchmark.asked_by_blocks(patches, samples))
    programs.wait_for(lambda: len(asked) >= expected.total(), 10, "the end of what is read ahead")
    time.sleep(0.2)  # were more asked for, it would come now
    patches.close()
    assert Counter(asked) == expected


def test_the_simulation_asks_for_what_patches_ask_for(bench) -> None:
    patches = opened(bench, kind="patches")
    asked = recorded(patches)
    patches.__getitems__([(3, k) for k in range(benchmark.BATCH)])
    boxes = benchmark.boxes_of(patches, [patches.sample(3, k) for k in range(benchmark.BATCH)])
    assert Counter(asked) == Counter(benchmark.asked_by(patches, boxes))


def test_what_is_compared_with_one_answer_reads_heads_and_bodies(bench, monkeypatch) -> None:
    for name in ("AWS_ENDPOINT_URL", *benchmark.ENVIRONMENT):
        monkeypatch.setenv(name, "")  # loading() sets them, and leaves them
    whole = {}
    for one_answer in (False, True):
        reading = benchmark.Reading(place="0 ms", shuffle_blocks=8, one_answer=one_answer)
        with benchmark.loading(bench, reading, steps=1) as (patches, loader):
            assert len(list(loader)) == 1
            whole[one_answer] = patches.winds.store.whole
        assert benchmark.object_store.WHOLE == benchmark.WHOLE
    assert whole == {False: None, True: benchmark.WHOLE}


def test_the_limit_reads_the_objects_that_blocks_read(bench, monkeypatch) -> None:
    """Each as often, of the visits that every lane begins with."""
    reading = benchmark.Reading(place="memory", shuffle_blocks=8)
    path, got = bench.store(reading.cut), []

    async def get_range_async(key: str, *, start: int, end: int) -> bytes:
        got.append(key)
        return (path / key).read_bytes()[start:end]

    bare = SimpleNamespace(store=SimpleNamespace(get_range_async=get_range_async))
    monkeypatch.setattr(benchmark, "bare_store", lambda url: bare)
    found = benchmark.limit(bench, reading, decode=True)
    patches = opened(bench)
    asked = recorded(patches)
    blocks = [patches.visit(lane, number).block for number in range(3) for lane in range(8)]
    for block in blocks[:8]:  # before the clock starts
        sync(patches.read_block(block))
    before = len(asked)
    for block in blocks[8:]:
        sync(patches.read_block(block))
    assert Counter(got) == Counter(asked)
    asked = asked[before:]
    samples = patches.patches[blocks[8:]].sum()
    assert found["requests_per_sample"] == pytest.approx(len(asked) / samples)
    used = 2 * 4 * bench.patch**2 * samples
    assert found["bytes_per_byte_used"] == pytest.approx(
        sum((path / key).stat().st_size for key in asked) / used
    )


def brute_force_lru(asked: list[str], sizes: dict[str, int], capacity: float, first: int) -> float:
    held, hits = [], 0  # the one used last comes last
    for number, key in enumerate(asked):
        hits += number >= first and key in held
        held = [other for other in held if other != key] + [key]
        while sum(sizes[other] for other in held) > capacity:
            held.pop(0)
    return hits / (len(asked) - first)


@pytest.mark.parametrize("seed", range(20))
def test_lru_is_what_brute_force_says(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {key: rng.randint(1, 9) for key in "abcdefgh"}
    asked = rng.choices("abcdefgh", k=60)
    for capacity in (0, 1, 7, 15, 30, sum(sizes.values())):
        expected = brute_force_lru(asked, sizes, capacity, 25)
        assert benchmark.lru(asked, sizes, capacity, 25) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_pin_is_what_the_cache_on_disk_does(seed: int, tmp_path) -> None:
    rng = random.Random(seed)
    sizes = {key: rng.randint(1, 9) for key in "abcdefgh"}
    asked, capacity, hits = rng.choices("abcdefgh", k=60), 20, 0
    access = benchmark.Access("s3://bucket/store.zarr", cache=str(tmp_path), cache_gb=capacity / 1e9)
    cache = benchmark.object_store.DiskCache(access, "version")
    for number, key in enumerate(asked):
        found = cache.get(key)
        hits += number >= 25 and found is not None
        if found is None:
            cache.put(key, bytes(sizes[key]))
    assert 0 < hits / 35 < 1
    assert benchmark.pin(asked, sizes, capacity, 25) == pytest.approx(hits / 35)


def test_a_thread_keeps_batches_ready_in_order_and_hands_on_errors() -> None:
    given = []

    def loader():
        for number in range(100):
            given.append(number)
            yield number
        raise ValueError("no more")

    batches = iter(benchmark.Prefetcher(loader(), ready=2))
    assert next(batches) == 0
    programs.wait_for(lambda: len(given) == 3, 5, "two batches that are ready")
    time.sleep(0.05)
    assert len(given) == 3  # and no more, while nobody asks
    assert [next(batches) for _ in range(99)] == list(range(1, 100))
    with pytest.raises(ValueError, match="no more"):
        next(batches)
