"""Chapter 4's measurements: what they count, what a stopped one keeps, and that the naive loop reads the same."""

import importlib
import json
import math
import os
import sys
import time
from ast import literal_eval
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import book
import numpy as np
import programs
import pytest
import runs

CHAPTER = book.ROOT / "04_data_pipeline"
SIZE = {"days": 24, "resolution": 10, "patch": 16, "batch": 8}  # a map of 19 x 36

thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory):
    """benchmark.py with small stores, in a folder of their own."""
    folder = tmp_path_factory.mktemp("chapter")
    make_store = runs.load("03_cloud_data/make_store.py", "make_store_of_benchmark")
    make_store.HERE = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))
        for name in ("train", "benchmark"):
            patch.delitem(sys.modules, name, raising=False)
        script = importlib.import_module("benchmark")  # its own name, by which other processes import it
        patch.setattr(script.train, "run_make_store", lambda *flags: make_store.main(list(flags)))
        for name, value in {"SIZE": dict(SIZE), "QUICK": SIZE, "LATENCIES": (5,)}.items():
            patch.setattr(script, name, value)
        for name in ("BUCKETS", "OUTPUTS", "RESULTS"):
            patch.setattr(script, name, folder / name.lower())
        script.make_stores()
        patch.setattr(script, "make_stores", lambda: None)
        yield script
        for name in ("train", "benchmark"):
            del sys.modules[name]


def arguments(**other: object) -> SimpleNamespace:
    return SimpleNamespace(**{"quick": True, "repeats": 1, "seconds": 0.05, "limit": 60} | other)


# ------------------------------------------------------------------------------------------- the ladder


@pytest.fixture(scope="module")
def ladder(script) -> dict[tuple, dict]:
    """The rows of the ladder's quick form, by latency, group and rung."""
    rows = script.main("ladder --quick --repeats 1 --seconds 0.05".split())["ladder"]
    found = {(row["latency_ms"], row["group"], row["rung"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_ladder_has_a_row_for_each_rung(script, ladder) -> None:
    rungs = [("alone", *item) for item in script.ALONE.items()]
    rungs += [("stacked", *item) for item in script.STACKED.items()]
    quick = [(group, rung) for group, rung, way in rungs if way.num_workers == 0]
    assert len(quick) == 7 + 5 < len(rungs)
    assert set(ladder) == {(latency, *rung) for latency in script.LATENCIES for rung in quick}
    for (latency, *_), row in ladder.items():
        rate, naive = (
            each["samples_per_second"]["median"] for each in (row, ladder[latency, "alone", "naive"])
        )
        assert row["ratio_to_naive"] == pytest.approx(rate / naive)
        assert row["first_batch_s"] > 0


@pytest.mark.parametrize("rung", ["naive", "with Dask", "a batch's reads at once"])
def test_every_sample_that_is_read_is_counted_and_no_other(rung: str, script, ladder) -> None:
    folder = script.BUCKETS / script.store_key("whole maps")
    with script.serve(0) as server:
        patches = script.open_patches("whole maps", server)
        for latency in script.LATENCIES:
            row = ladder[latency, "alone", rung]
            steps, rest = divmod(row["samples"], SIZE["batch"])
            assert steps > 0 == rest
            # The batch of step 0 came before the clock began.
            drawn = [patches.sample(step, k)[0] for step in range(1, steps + 1) for k in range(SIZE["batch"])]
            names = [
                f"{name}/c/{patches.places[time]}/0/0" for time in drawn for name in script.train.VARIABLES
            ]
            size = sum((folder / name).stat().st_size for name in names)
            assert row["requests_per_sample"] * row["samples"] == pytest.approx(len(names))
            assert row["bytes_per_sample"] * row["samples"] == pytest.approx(size)


def test_blocks_cost_fewer_requests_and_bytes_and_are_measured_in_whole_visits(script, ladder) -> None:
    lanes = script.parse(script.FINAL, SimpleNamespace(address="http://127.0.0.1:1")).shuffle_blocks
    for latency in script.LATENCIES:
        naive = ladder[latency, "stacked", "naive"]
        for rung in ("blocks, P = 8", "blocks, P = 32"):
            row = ladder[latency, "stacked", rung]
            for name in ("requests_per_sample", "bytes_per_sample"):
                assert row[name] < naive[name] / 2, (rung, name)
            assert row["samples"] % (lanes * row["patches_per_block"]) == 0


@pytest.mark.parametrize("dask", [True, False])
def test_the_naive_loop_gives_what_chapter_3_gives(dask: bool, script) -> None:
    with script.serve(0) as server:
        patches = script.open_patches("128 x 128", server)
        naive = script.Naive(patches, dask)
        indices = [(3, k) for k in range(SIZE["batch"])]
        columns = [patches.sample(*index)[2] for index in indices]
        assert {column > 36 - 16 for column in columns} == {True, False}  # some lie across the map's seam
        for index, truth in zip(indices, patches.__getitems__(indices)):
            found = naive[index]
            assert {"input", "target", "unseen", "weight"} <= found.keys()
            for name, values in found.items():
                np.testing.assert_array_equal(values, truth[name], name)
                assert values.dtype == truth[name].dtype


# ------------------------------------------------------------------------------ what a stopped one keeps


class Stopped(Exception):
    """As Ctrl-C would be."""


def test_a_stopped_study_goes_on_with_what_is_missing(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(script, "OUTPUTS", tmp_path)
    done, stops = [], iter([False, False, False, True])

    def measured(name: str) -> dict:
        if next(stops, False):
            raise Stopped
        done.append(name)
        return {"samples_per_second": len(done), "order": len(done)}

    cases = [({"way": name}, partial(measured, name)) for name in "abc"]
    with pytest.raises(Stopped):
        script.take_turns("some", cases, arguments(repeats=2))
    rows = script.take_turns("some", cases, arguments(repeats=2))
    assert done == ["a", "b", "c", "a", "b", "c"]  # in turn, and none again
    assert rows[0] == {"way": "a", "samples_per_second": {"median": 2.5, "min": 1, "max": 4}, "order": 2.5}
    script.take_turns("some", cases, arguments(repeats=2))
    script.take_turns("others", cases, arguments(repeats=1))
    assert len(done) == 6 + 3
    script.take_turns("some", cases, arguments(repeats=1, seconds=7))  # are other measurements
    assert len(done) == 6 + 3 + 3
    changed = tmp_path / "train.py"
    changed.write_text("another")
    monkeypatch.setattr(script.train, "__file__", str(changed))
    script.take_turns("some", cases, arguments(repeats=1))
    assert len(done) == 6 + 3 + 3 + 3


def test_a_whole_run_is_saved_with_its_command_and_keeps_nothing_back(
    script, tmp_path: Path, monkeypatch
) -> None:
    def study(args) -> list[dict]:
        return script.take_turns("made_up", [({"way": "a"}, lambda: {"samples": 3})], args)

    monkeypatch.setattr(script, "STUDIES", {"made_up": study})
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(script, "OUTPUTS", tmp_path / "outputs")
    rows = script.main("made_up --repeats 2 --save-results".split())["made_up"]
    saved = json.loads((tmp_path / "results/made_up.json").read_text())
    assert saved["rows"] == rows == [{"way": "a", "samples": 3}]
    assert saved["command"] == "uv run python benchmark.py made_up --repeats 2"
    assert {"cpu", "cores", "memory_gb", "gpu"} <= saved["machine"].keys()
    assert not list((tmp_path / "outputs").iterdir())


def test_an_error_in_one_of_several_turns_is_told(script) -> None:
    row = script.summarise([{"error": "lost"}, {"samples_per_second": 4.0, "threads": 2}])
    assert row == {"error": "lost", "samples_per_second": {"median": 4, "min": 4, "max": 4}, "threads": 2}


def test_the_share_of_waiting_leaves_out_the_warm_up(script, monkeypatch) -> None:
    now = [0.0]

    def loader(*way: object):
        for seconds in (50, 20, 1, 1, 1, 1):
            now[0] += seconds
            yield {}

    def step(batch: dict) -> None:
        now[0] += 3

    monkeypatch.setattr(script, "perf_counter", lambda: now[0])
    monkeypatch.setattr(script, "make_loader", loader)
    found = script.waits(script.FINAL, None, step, 2, 4)
    assert found["steps"] == [[50, 3], [20, 3]] + 4 * [[1, 3]]
    assert found["data_wait_share"] == 1 / 4


@pytest.mark.parametrize(
    "flags", ["speed", "ladder --repeats 0", "dask --limit 0", "ladder --save-results --quick"]
)
def test_a_wrong_flag_is_named(flags: str, script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(flags.split())
    assert ended.value.code == 2
    named = flags.split()[1] if " " in flags else flags
    assert f"error: {named}" in capsys.readouterr().err.splitlines()[-1]


# --------------------------------------------------------------------------------------------- thorough


@thorough
def test_a_process_of_its_own_that_fails_or_hangs_is_reported_and_ended(script) -> None:
    assert script.fresh(100, dict, [("a", 7)]) == {"a": 7}
    assert "invalid literal" in script.fresh(100, int, "seven")["error"]
    assert "nothing after 1 s" in script.fresh(1, time.sleep, 600)["error"]
    assert "without an answer" in script.fresh(100, os._exit, 1)["error"]
    assert not programs.running()


@thorough
def test_every_study_has_a_quick_form() -> None:
    studies = "sweep workers dask persistent wait memory shuffle"
    flags = "--quick --repeats 1 --seconds 0.1".split()
    done = programs.require_success("04_data_pipeline/benchmark.py", *studies.split(), *flags, timeout=900)
    rows = {study: [] for study in studies.split()}
    for line in done.out.splitlines():
        study, _, row = line.partition(" ")
        if study in rows:
            rows[study].append(literal_eval(row))
    assert {name for row in rows["sweep"] for name in row if name.endswith("_seconds")} == {
        "step_seconds",
        "load_seconds",
    }
    assert {(row.get("num_workers"), row.get("with_step")) for row in rows["sweep"][:-2]} == {
        (workers, step) for workers in (0, 1) for step in (False, True)
    }
    assert [(row.get("num_workers"), row.get("with_step")) for row in rows["workers"]] == [
        (1, False),
        (0, True),
        (1, True),
        (None, None),
    ]
    assert all(row["samples_per_second"]["median"] > 0 for row in rows["workers"][:-1])
    for row in rows["dask"]:
        assert row["samples_per_second"]["median"] > 0 and "error" not in row, row
        assert len(row["worker_threads"]) == row["num_workers"]
    assert [row["persistent_workers"] for row in rows["persistent"]] == [False, True]
    assert [row["loader"] for row in rows["wait"]] == ["naive", "final"]
    assert all(len(row["steps"]) == 2 + 4 for row in rows["wait"])
    assert [row["step"] for row in rows["memory"] if "step" in row] == 2 * [10, 20, 30, 40]
    assert [row["shuffle_blocks"] for row in rows["shuffle"]] == [None, 2]
    assert all(math.isfinite(row["validation_rmse"]) for row in rows["shuffle"])


# ------------------------------------------------------------------------------------ the saved results


def saved(study: str) -> list[dict]:
    """The rows of a study that is committed."""
    return book.results(CHAPTER / f"results/{study}.json")["rows"]


def test_the_committed_ladder_keeps_its_promise() -> None:
    rows = {(row["latency_ms"], row["group"], row["rung"]): row for row in saved("ladder")}
    assert rows[30, "stacked", "blocks, P = 8"]["ratio_to_naive"] >= 30


def test_the_committed_shares_of_waiting_keep_their_promise() -> None:
    shares = [(row["loader"], row["data_wait_share"]["median"]) for row in saved("wait")]
    assert {loader for loader, _ in shares} == {"naive", "final"}
    assert all(share > 0.8 if loader == "naive" else share < 0.03 for loader, share in shares), shares


def test_the_committed_memory_is_flat() -> None:
    rows = saved("memory")
    for number in (0, 1):
        found = [row["rss_mb"] for row in rows if row["num_workers"] == number and "step" in row]
        (bound,) = (row["bound_mb"] for row in rows if row["num_workers"] == number and "bound_mb" in row)
        assert len(found) == 40
        assert max(found) - min(found) < bound
        third, fourth = median(found[20:30]), median(found[30:])  # maps that are being read come and go
        assert fourth < 1.03 * third, number
