"""Appendix: in each of Dask's modes the reads are the same, the threads are those that the page counts, and settings fit."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path

import book
import dask
import numpy as np
import pytest
import xarray as xr
from dask.utils import parse_bytes
from distributed import Client, LocalCluster

sys.path.insert(0, str(book.ROOT / "appendix"))  # by its own name, under which its processes find it
import dask_modes

RESULTS = "appendix/results/dask_modes.json"
SHORT = "--repeats 1 --tasks 5 --seconds 0.01".split()


@pytest.fixture(scope="module", autouse=True)
def the_suites_forkserver() -> None:
    """Started before the script asks for other modules to be loaded in it, which it would hand to all that follows."""
    importlib.import_module("programs")
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("store") / "winds.zarr"
    dask_modes.write_store(path)
    return str(path)


@pytest.fixture
def remote(path: str) -> Iterator:
    """Make ranks in processes of their own, which end with the test."""
    made = []

    def make(mode: str, *arguments: object) -> dask_modes.Remote:
        made.append(dask_modes.Remote(mode, path, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_modes_read_the_same(path: str, monkeypatch: pytest.MonkeyPatch):
    """Batches in every mode are the winds that the file holds."""
    corners, found = np.array([[0, 0, 0], [131, 9, 80], [12, 5, 40]]), []
    monkeypatch.setattr(dask_modes.Rank, "batch", spy(dask_modes.Rank.batch, corners, found))
    modes = ("zarr", "pool", "synchronous", "threads", "inside")
    for mode in modes:
        rank = dask_modes.Rank(mode, path)
        assert rank.read(False, 0) > 0
        rank.close()
    with xr.open_dataset(dask_modes.WINDS) as winds:
        field = np.stack([winds["eastward_wind"].values, winds["northward_wind"].values])
    expected = np.stack([field[:, t, y : y + 64, x : x + 64] for t, y, x in corners])
    assert len(found) == len(modes)
    for batch in found:
        np.testing.assert_array_equal(batch, expected)


def spy(method, corners: np.ndarray, found: list):
    """The method at given corners, whose results are kept."""
    return lambda rank, fields, _: found.append(method(rank, fields, corners))


def test_no_task_is_fused(path: str, monkeypatch: pytest.MonkeyPatch):
    """Each of the calls whose overhead is timed is made, once by itself and once by Dask."""
    calls = []
    monkeypatch.setattr(dask_modes, "nothing", lambda number: calls.append(number) or number)
    rank = dask_modes.Rank("synchronous", path)
    rank.overhead(50)
    rank.close()
    assert calls[:50] == sorted(calls[50:]) == [*range(50)]


def test_layers_have_threads_of_their_own(remote):
    """Dask has as many threads as it is told; Zarr has its loop and, set in time, no more than its limit."""
    rank = remote("threads", None, 8, 2)
    rank("read", True, 0.5).result()  # many batches: a thread is made when all others are busy
    counts = rank("threads").result()
    assert 2 < counts["tasks"] <= 8  # a pool makes a thread only when all others are busy
    assert 1 < counts["zarr"] <= 1 + 2


def test_worker_in_the_process_counts_all_of_its_memory():
    """A worker in the training's process pauses for memory that is not Dask's, unless it has no limit."""
    workers = {"processes": False, "n_workers": 1, "threads_per_worker": 1} | dask_modes.QUIET
    with LocalCluster(memory_limit="50MB", **workers) as cluster:
        (worker,), deadline = cluster.workers.values(), time.monotonic() + 60
        while worker.status.name != "paused" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert worker.status.name == "paused"
    with LocalCluster(memory_limit=0, **workers) as cluster, Client(cluster) as client:
        assert client.submit(dask_modes.nothing, 7).result(timeout=60) == 7


def test_settings_fit():
    """Neither more busy threads than cores nor more than half of the memory, whatever the machine."""
    for gpus in range(1, 17):
        for cores in range(gpus, 130):
            found = dask_modes.settings(gpus, cores, 160)
            assert found["busy"] == gpus * (1 + found["num_workers"] * found["zarr_threads"]) <= cores
            if found["share"] > 1:  # a core is all that a rank has: its main thread reads, or waits for Dask
                assert found["num_workers"] > 0
                assert gpus * (1 + found["processes"] * found["threads"]) <= cores
            assert gpus * found["processes"] * found["limit_gb"] == pytest.approx(80)
            assert found["alone"] * found["alone_threads"] <= cores
            for gigabytes in (2, 16, 160):  # as they are printed: Dask takes "0GB" for no limit
                found = dask_modes.settings(gpus, cores, gigabytes)
                [limit] = re.findall(r'memory_limit="(\w+)"', dask_modes.lines(found)["private"][1])
                assert 0 < gpus * found["processes"] * parse_bytes(limit) <= gigabytes * 1e9 / 2
    one, eight = dask_modes.settings(1, 20, 160), dask_modes.settings(8, 20, 160)
    assert (one["num_workers"], one["zarr_threads"], one["busy"]) == (9, 2, 19)
    assert (eight["num_workers"], eight["zarr_threads"], eight["busy"]) == (1, 1, 16)
    for found in (one, eight):
        for line in chain(*dask_modes.lines(found).values()):
            compile(line.replace("(...,", "("), "a line to copy", "exec")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--settings 8 2 160", ("--settings", "8 GPUs, 2 cores", "a core for each")),
        ("--settings 0 20 160", ("--settings", "0 GPUs", "give a GPU")),
        ("--seconds 0", ("--seconds 0", "above 0")),
        ("--modes zarr --save-results", ("--save-results", "leave out --modes")),
        ("--dashboard 0", ("--dashboard 0", "above 0")),
        ("--modes processes", ("--modes processes", "synchronous")),
        ("--repeats 0", ("--repeats 0", "above 0")),
    ],
)
def test_bad_input(flags: str, said: tuple, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        dask_modes.main(flags.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert all(part in last for part in said), last


def test_main(capsys: pytest.CaptureFixture):
    rows = dask_modes.main(["--modes", "zarr", "threads", *SHORT])
    assert [row["mode"] for row in rows] == ["zarr", "threads"]
    assert "tasks" not in rows[0]["threads"]
    assert rows[1]["threads"]["tasks"] == dask_modes.RANKS * dask_modes.THREADS
    assert json.loads(json.dumps(rows)) == rows
    assert dask_modes.MODES["threads"] in capsys.readouterr().out


def test_results_say_what_the_page_says():
    rows = book.results(RESULTS)["rows"]
    modes = {row["mode"]: row for row in rows if "us_alone" in row and "threads_set" not in row}
    assert modes.keys() == dask_modes.MODES.keys()
    local, clusters = ("synchronous", "threads"), ("inside", "private", "shared")
    rates = {
        speed: {mode: row[speed]["median"] for mode, row in modes.items()} for speed in ("disk", "bucket")
    }
    in_clusters = {speed: max(rate[mode] for mode in clusters) for speed, rate in rates.items()}
    assert min(rates["disk"][mode] for mode in local) > in_clusters["disk"]
    assert rates["bucket"]["threads"] > in_clusters["bucket"]
    assert rates["bucket"]["pool"] > 0.9 * rates["bucket"]["threads"] > rates["bucket"]["synchronous"]
    assert max(rates["disk"][mode] for mode in ("zarr", "pool")) > max(rates["disk"][mode] for mode in local)
    slowest = max(modes[mode]["us_alone"]["median"] for mode in local)
    assert min(modes[mode]["us_alone"]["median"] for mode in clusters) > slowest
    cores = book.results(RESULTS)["machine"]["cores"]
    for mode, row in modes.items():
        in_processes = row["threads"]["processes"]
        assert row["threads"].get("tasks", 0) == (4 if mode in ("pool", "threads", *clusters) else 0)
        assert row["threads"]["zarr"] <= in_processes * (1 + min(32, cores + 4))
        assert ("distributed" in row["threads"]) == (mode in clusters)
    outcomes = [row["outcome"] for row in rows if "outcome" in row]
    assert "done" in outcomes[0] and "paused" in outcomes[1] and "KilledWorker" in outcomes[2]


@pytest.mark.thorough
def test_all_modes():
    rows = dask_modes.main(SHORT)
    shared = next(row for row in rows if row["mode"] == "shared")["threads"]
    assert shared["tasks"] == dask_modes.RANKS * dask_modes.THREADS
    assert shared["processes"] >= 2 + dask_modes.RANKS  # ranks, workers and the scheduler's


def test_memory_says_what_it_does_before_it_does_it(monkeypatch: pytest.MonkeyPatch, capsys):
    """The cases take minutes: each one's line is printed when it begins."""
    printed = {}

    def study(mode: str) -> str:
        printed[mode] = capsys.readouterr().out
        return "an outcome"

    studies = {mode: partial(study, mode) for mode in dask_modes.OUTGROW}
    monkeypatch.setattr(dask_modes, "OUTGROW", studies)
    rows = dask_modes.main(["--memory"])
    assert [row["mode"] for row in rows] == ["threads", "inside", "private"]
    for mode, lines in printed.items():
        assert lines.count("\n") == 1
        assert dask_modes.MODES[mode] in lines
    assert capsys.readouterr().out.count("an outcome") == 3


@pytest.mark.thorough
def test_memory():
    """No limit in threads; a paused worker in the process; a private cluster gives the task up."""
    outcomes = {row["mode"]: row["outcome"] for row in dask_modes.main(["--memory"])}
    assert "no limit" in outcomes["threads"]
    assert "paused" in outcomes["inside"]
    assert f"{dask.config.get('distributed.scheduler.allowed-failures') + 1} workers" in outcomes["private"]


@pytest.mark.thorough
def test_dashboard():
    script = Path(dask_modes.__file__)
    command = [sys.executable, script.name, "--dashboard", "1000"]
    with subprocess.Popen(command, cwd=script.parent, stdout=subprocess.PIPE, text=True) as running:
        try:
            with urllib.request.urlopen(running.stdout.readline().strip(), timeout=60) as page:
                assert b"Dask" in page.read()
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(timeout=120)
