"""Chapter 4's measurements: what they count, what a stopped one keeps, and that the naive loop reads the same."""

import importlib
import json
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace

import book
import numpy as np
import programs
import pytest
import runs

CHAPTER = book.ROOT / "04_data_pipeline"
BATCH = 8  # of the quick form, whose maps have 19 x 36 cells, and whose patches 16 x 16
MODULES = ("journal", "ladder", "levelled", "measuring", "server", "stores", "ways", "final_loader")
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """benchmark.py and the modules of its studies, with small stores in a folder of their own."""
    folder = tmp_path_factory.mktemp("chapter")
    with book.rooms("04_data_pipeline"), pytest.MonkeyPatch.context() as patch:
        found = {name: importlib.import_module(f"studies.{name}") for name in MODULES}
        found = SimpleNamespace(benchmark=importlib.import_module("benchmark"), **found)
        patch.setitem(found.stores.QUICK, "days", 48)  # of which 35 are trained on, and 32 are SLOTS
        for name, value in found.stores.QUICK.items():
            patch.setitem(found.stores.SIZE, name, value)
        patch.setattr(found.server, "LATENCIES", (5,))
        patch.setattr(found.journal, "OUTPUTS", folder / "outputs")
        for module in (found.server, found.stores):
            patch.setattr(module, "BUCKETS", folder / "buckets")
        patch.setattr(found.stores, "run_make_store", partial(runs.make_store, folder))
        found.stores.make_stores(found.stores.LAYOUTS)
        patch.setattr(found.benchmark, "make_stores", lambda layouts: None)
        yield found


# ------------------------------------------------------------------------------------------- the ladder


@pytest.fixture(scope="module")
def ladder(studies: SimpleNamespace) -> dict[tuple, dict]:
    """The rows of the ladder's quick form, by group and rung."""
    rows = studies.benchmark.main("ladder --quick --repeats 1".split())["ladder"]
    found = {(row["group"], row["rung"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_ladder_has_a_row_for_each_rung(studies: SimpleNamespace, ladder: dict) -> None:
    rungs = [("alone", *item) for item in studies.ladder.ALONE.items()]
    rungs += [("stacked", *item) for item in studies.ladder.STACKED.items()]
    quick = {(group, rung) for group, rung, way in rungs if way.num_workers == 0}
    assert len(quick) == 7 + 5 < len(rungs)
    assert set(ladder) == quick
    naive = ladder["alone", "naive"]["samples_per_second"]["median"]
    for row in ladder.values():
        assert row["ratio_to_naive"] == pytest.approx(row["samples_per_second"]["median"] / naive)
        assert row["first_batch_s"] > 0


@pytest.mark.parametrize("rung", ["naive", "with Dask", "a batch's reads at once"])
def test_every_sample_that_is_read_is_counted_and_no_other(
    rung: str, studies: SimpleNamespace, ladder: dict
) -> None:
    folder = studies.stores.store_path("whole maps")
    with studies.server.serve(0) as server:
        dataset = studies.ways.open_dataset("whole maps", server)
    row = ladder["alone", rung]
    steps, rest = divmod(row["samples"], BATCH)
    assert steps > 0 == rest
    size = 0
    for step in range(1, steps + 1):  # the batch of step 0 came before the clock began
        for k in range(BATCH):
            time = dataset.maker.period.positions[dataset.patch(step, k).time]
            for name in dataset.reader.variables:
                size += (folder / f"{name}/c/{time}/0/0").stat().st_size
    assert row["requests_per_sample"] == pytest.approx(2)
    assert row["bytes_per_sample"] * row["samples"] == pytest.approx(size)


def test_blocks_cost_fewer_requests_and_bytes_and_are_measured_in_whole_reads(
    studies: SimpleNamespace, ladder: dict
) -> None:
    naive = ladder["stacked", "naive"]
    for rung in ("blocks, P = 8", "blocks, P = 32"):
        row = ladder["stacked", rung]
        for name in ("requests_per_sample", "bytes_per_sample"):
            assert row[name] < naive[name] / 2, (rung, name)
        assert row["samples"] % (studies.ways.SLOTS * row["patches_per_block"]) == 0


@pytest.mark.parametrize("scheduler", [None, "threads"])
def test_the_naive_loop_gives_what_chapter_3_gives(scheduler: str | None, studies: SimpleNamespace) -> None:
    with studies.server.serve(0) as server:
        dataset = studies.ways.open_dataset("128 x 128", server)
        naive = studies.ways.Naive(dataset, scheduler)
        indices = [(3, k) for k in range(BATCH)]
        columns = [dataset.patch(*index).column for index in indices]
        assert {column > 36 - 16 for column in columns} == {True, False}  # some lie across the map's seam
        for index, truth in zip(indices, dataset.__getitems__(indices)):
            found = naive[index]
            assert found.keys() == {"input", "target", "unseen", "weight"}
            for name, values in found.items():
                np.testing.assert_array_equal(values, truth[name], name)
                assert values.dtype == truth[name].dtype


# ------------------------------------------------------------------------------ what a stopped one keeps


class Stopped(Exception):
    """As Ctrl-C would be."""


def test_a_stopped_study_goes_on_with_what_is_missing(
    studies: SimpleNamespace, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(studies.journal, "OUTPUTS", tmp_path)
    done = []
    stops = iter([False, False, False, True])

    def measured(name: str) -> dict:
        if next(stops, False):
            raise Stopped
        done.append(name)
        return {"samples_per_second": len(done), "order": len(done)}

    cases = [studies.measuring.Case({"way": name}, partial(measured, name)) for name in "abc"]
    with pytest.raises(Stopped):
        studies.measuring.take_turns("some", cases, repeats=2)
    rows = studies.measuring.take_turns("some", cases, repeats=2)
    assert done == ["a", "b", "c", "a", "b", "c"]  # in turn, and none again
    assert rows[0] == {"way": "a", "samples_per_second": {"median": 2.5, "min": 1, "max": 4}, "order": 2.5}
    studies.measuring.take_turns("some", cases, repeats=2)
    studies.measuring.take_turns("others", cases, repeats=1)
    assert len(done) == 6 + 3
    changed = tmp_path / "chapter/studies/ways.py"
    changed.parent.mkdir(parents=True)
    changed.write_text("another")
    monkeypatch.setattr(studies.journal, "FOLDER", tmp_path / "chapter")
    studies.measuring.take_turns("some", cases, repeats=1)
    assert len(done) == 6 + 3 + 3


def test_a_whole_run_is_saved_with_its_command_and_keeps_nothing_back(
    studies: SimpleNamespace, tmp_path: Path, monkeypatch
) -> None:
    def study(repeats: int) -> list[dict]:
        cases = [studies.measuring.Case({"way": "a"}, lambda: {"samples": 3})]
        return studies.measuring.take_turns("made_up", cases, repeats)

    monkeypatch.setattr(studies.benchmark, "STUDIES", {"made_up": study})
    monkeypatch.setattr(importlib.import_module("results"), "RESULTS", tmp_path / "results")
    monkeypatch.setattr(studies.journal, "OUTPUTS", tmp_path / "outputs")
    rows = studies.benchmark.main("made_up --repeats 2 --save-results".split())["made_up"]
    saved = json.loads((tmp_path / "results/made_up.json").read_text())
    assert saved["rows"] == rows == [{"way": "a", "samples": 3}]
    assert saved["command"] == "uv run python benchmark.py made_up --repeats 2"
    assert not list((tmp_path / "outputs").iterdir())


def test_an_error_in_one_of_several_turns_is_in_the_row(studies: SimpleNamespace) -> None:
    row = studies.measuring.summarise([{"samples_per_second": 4.0, "threads": 2}, {"error": "lost"}])
    assert row == {"error": "lost", "samples_per_second": {"median": 4, "min": 4, "max": 4}, "threads": 2}


def test_the_share_of_waiting_leaves_out_the_warm_up(studies: SimpleNamespace, monkeypatch) -> None:
    now = [0.0]

    def loader(*way: object) -> Iterator[dict]:
        for seconds in (50, 20, 1, 1, 1, 1):
            now[0] += seconds
            yield {}

    def step(batch: dict) -> None:
        now[0] += 3

    monkeypatch.setattr(studies.final_loader, "perf_counter", lambda: now[0])
    monkeypatch.setattr(studies.final_loader, "make_loader", loader)
    found = studies.final_loader.time_waits(studies.ways.FINAL, None, step, 2, 4)
    assert found["steps"] == [[50, 3], [20, 3]] + 4 * [[1, 3]]
    assert found["data_wait_share"] == 1 / 4


@pytest.mark.parametrize("flags", ["speed", "--repeats 0", "--save-results --quick"])
def test_a_wrong_flag_is_named_before_anything_runs(
    flags: str, studies: SimpleNamespace, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(studies.benchmark, "STUDIES", {"ladder": None})  # calling it would fail
    with pytest.raises(SystemExit, match="2"):
        studies.benchmark.main(flags.split())
    assert f"error: {flags.split()[0]}" in capsys.readouterr().err.splitlines()[-1]


# -------------------------------------------------------------------------------------- levelled work


def test_levelled_work_needs_as_many_blocks_in_every_step(studies: SimpleNamespace) -> None:
    steps = range(32, 96)
    shape = {"blocks": 80, "batch_size": 16, "slots": 64, "patches_per_block": 8, "seed": 0}
    orders = {name: order(**shape) for name, order in studies.levelled.ORDERS.items()}
    counts = {name: studies.levelled.count_new_blocks(order, steps) for name, order in orders.items()}
    assert counts == {"levelled": [2] * 64, "all slots at once": ([16] * 4 + [0] * 28) * 2}


def test_percentiles_are_of_a_repeat_and_the_spread_is_over_the_repeats(studies: SimpleNamespace) -> None:
    seconds = np.arange(101) / 1e3
    runs_of_two = []
    for slower in (1, 3):
        times = dict.fromkeys(studies.levelled.TIMES, slower * seconds)
        runs_of_two.append(studies.levelled.percentiles(times))
    row = studies.measuring.summarise(runs_of_two, studies.levelled.SPREAD)
    assert row["steps_p95_ms"] == pytest.approx({"median": 190, "min": 95, "max": 285})
    assert row["waits_median_ms"] == pytest.approx({"median": 100, "min": 50, "max": 150})
    assert row["first_run_step_ms"][-1] == 100


# --------------------------------------------------------------------------------------------- thorough


@thorough
def test_a_process_of_its_own_that_fails_or_hangs_is_reported_and_ended(studies: SimpleNamespace) -> None:
    fresh = studies.measuring.fresh
    assert fresh(100, dict, [("a", 7)]) == {"a": 7}
    assert "invalid literal" in fresh(100, int, "seven")["error"]
    assert "nothing after 1 s" in fresh(1, time.sleep, 600)["error"]
    assert "without an answer" in fresh(100, os._exit, 1)["error"]
    assert not programs.running()


@thorough
def test_every_study_has_a_quick_form(studies: SimpleNamespace) -> None:
    names = "sweep workers dask persistent wait memory growth shuffle levelled command".split()
    rows = quick_rows(studies.benchmark, names)
    seconds = {name for row in rows["sweep"] for name in row if name.endswith("_seconds")}
    assert seconds == {"step_seconds", "load_seconds"}
    cases = {(row["num_workers"], row["with_step"]) for row in rows["sweep"][:-2]}
    assert cases == {(workers, step) for workers in (0, 1) for step in (False, True)}
    cases = [(row["num_workers"], row["with_step"]) for row in rows["workers"][:-1]]
    assert cases == [(1, False), (0, True), (1, True)]
    for row in rows["workers"][:-1] + rows["dask"]:
        assert row["samples_per_second"]["median"] > 0 and "error" not in row, row
        assert len(row["worker_threads"]) == row["num_workers"]
    assert [row["persistent_workers"] for row in rows["persistent"]] == [False, True]
    assert [row["loader"] for row in rows["wait"]] == ["naive", "final"]
    assert all(len(row["steps"]) == 2 + 4 for row in rows["wait"])
    assert [row["step"] for row in rows["memory"] if "step" in row] == 2 * [10, 20, 30, 40]
    cases = {(row["index"], row["start_method"]) for row in rows["growth"]}
    assert len(cases) == len(rows["growth"]) == 8
    assert all(row["end_of_epoch_mb"] >= row["alone_mb"] > 0 for row in rows["growth"])
    assert [row["shuffle_blocks"] for row in rows["shuffle"]] == [None, 8]
    assert all(math.isfinite(row["validation_rmse"]) for row in rows["shuffle"])
    cases = {(row["order"], row["batch_size"], row["training"]) for row in rows["levelled"]}
    assert len(cases) == len(rows["levelled"]) == 8
    for row in rows["levelled"]:
        assert row["steps_slowest_ms"]["median"] >= row["steps_median_ms"]["median"] > 0
    assert studies.levelled.plot_levelled(rows["levelled"]).axes
    assert rows["command"][0]["summary"]["steps"] == 4


def quick_rows(benchmark: ModuleType, names: list[str]) -> dict[str, list[dict]]:
    """The rows of these studies' quick forms, each of which JSON can hold."""
    rows = benchmark.main([*names, "--quick", "--repeats", "1"])
    json.dumps(rows)
    return rows


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


def test_the_committed_memory_of_workers_grows_with_forked_objects_only() -> None:
    grown = {}
    for row in saved("growth"):
        grown[row["index"], row["start_method"]] = row["end_of_epoch_mb"] - row["first_batch_mb"]
    assert len(grown) == 8
    most = max(grown.values())
    assert grown.pop(("tuples", "fork")) == most
    assert max(grown.values()) < most / 10, grown
