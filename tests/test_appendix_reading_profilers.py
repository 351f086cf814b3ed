"""Appendix: each profiler names the slow-down that was built in, by counts; how time is read is shown on made-up durations."""

import inspect
import json
import logging
import os
import pstats
import sys
from pathlib import Path
from unittest.mock import patch

import book
import pytest

sys.path.insert(0, str(book.ROOT / "appendix"))  # a worker that is not forked imports the module by its name
with patch.dict(os.environ):  # which it quietens torch by
    import reading_profilers as entry

RESULTS = "appendix/results/reading_profilers.json"
entry.CHANNELS = 2  # fewer weights to fetch, and shorter traces
STEPS, WEIGHTS = 9, sum(weights.numel() for weights in entry.Module(8, False).parameters())
WATCH = "CheckWeights.on_train_batch_end"


@pytest.fixture(autouse=True, scope="module")
def lightning_speaks_again():
    """The script quietens Lightning's loggers; other tests read them."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the profilers wrote of small runs with each slow-down."""
    folder = tmp_path_factory.mktemp("profilers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small = ["--steps", str(STEPS), "--patch-size", "8", "--output-dir", str(folder / "runs")]
        rows = entry.main(small)
    assert [(row["plant"], row["profiler"]) for row in rows] == [
        (slow, kind) for slow in entry.SLOW for kind in entry.PROFILERS
    ]
    assert all(row["excerpt"] and row["bytes"] for row in rows)
    assert [path.name for path in folder.iterdir()] == ["runs"], "something was written elsewhere"
    return folder / "runs"


def actions(folder: Path, run: str) -> dict[str, int]:
    """Calls by action in the simple profiler's file."""
    lines = (folder / run / "simple/fit-simple.txt").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.count("|") == 6]
    return {cell[0]: int(cell[2]) for cell in cells if cell[2].isdigit()}


def functions(folder: Path, run: str) -> dict[str, dict]:
    """The advanced profiler's functions by name."""
    paths = (folder / run / "advanced").glob("*.prof")
    return {row["name"]: row for row in entry.read_advanced(pstats.Stats(*map(str, paths)))}


def operators(folder: Path, run: str, span: str) -> dict[str, int] | None:
    """Calls by operator in one of Lightning's spans in the trace; None if there is no such span."""
    (path,) = (folder / run / "trace").glob("*.pt.trace.json")
    rows = {row["name"]: row for row in entry.read_trace(json.loads(path.read_text()))}
    return {op["name"]: op["calls"] for op in rows[span]["operators"]} if span in rows else None


def line_of(code: object) -> str:
    return f"reading_profilers.py:{inspect.getsourcelines(code)[1]}"


def test_the_simple_profiler_counts_hooks(folder):
    watch = f"[Callback]{WATCH}"
    assert actions(folder, "step_0_workers")[watch] == STEPS
    for slow in ("none", "data", "model"):
        calls = actions(folder, f"{slow}_0_workers")
        assert watch not in calls
        assert calls["[_TrainingEpochLoop].train_dataloader_next"] == STEPS
        assert calls["[Strategy]SingleDeviceStrategy.training_step"] == STEPS


@pytest.mark.parametrize(
    ("slow", "name", "calls", "place"),
    [
        ("data", "count_bad", STEPS * entry.BATCH, line_of(entry.count_bad)),
        ("model", "<built-in method torch.matmul>", STEPS, line_of(entry.FirstGuess.forward)),
        (
            "step",
            "<built-in method torch.isnan>",
            STEPS * 2 * WEIGHTS,
            line_of(entry.CheckWeights.on_train_batch_end),
        ),
    ],
)
def test_the_advanced_profiler_names_function_file_and_line(folder, slow, name, calls, place):
    found = functions(folder, f"{slow}_0_workers")[name]
    assert found["calls"] == calls and found["place"].endswith(place)
    assert all(name not in functions(folder, f"{other}_0_workers") for other in entry.SLOW if other != slow)


def test_the_trace_names_the_operator_and_its_span(folder):
    assert operators(folder, "model_0_workers", "training_step")["aten::mm"] == entry.TRACED
    calls = operators(folder, "step_0_workers", WATCH)
    assert calls["aten::_local_scalar_dense"] == entry.TRACED * 2 * WEIGHTS
    control = operators(folder, "none_0_workers", "training_step")
    assert control["aten::conv2d"] == 3 * entry.TRACED and "aten::mm" not in control
    assert operators(folder, "none_0_workers", WATCH) is None
    # Python in the loader leaves no operator of its own
    loader = [operators(folder, f"{slow}_0_workers", "train_dataloader_next") for slow in ("data", "none")]
    assert loader[0] == loader[1]


def test_the_advanced_profiler_misses_what_follows_a_nested_action(folder):
    assert actions(folder, "none_0_workers")["[Strategy]SingleDeviceStrategy.backward"] == STEPS
    names = functions(folder, "none_0_workers")
    assert "<built-in method torch.conv2d>" in names
    assert not [name for name in names if "run_backward" in name or "_single_tensor_adamw" in name]


def test_a_worker_hides_the_function(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    args = ["--slow", "data", "--num-workers", "1", "--steps", str(STEPS), "--patch-size", "8"]
    entry.main([*args, "--output-dir", str(tmp_path)])
    assert "count_bad" in functions(folder, "data_0_workers")
    assert "count_bad" not in functions(tmp_path, "data_1_workers")
    assert actions(tmp_path, "data_1_workers")["[_TrainingEpochLoop].train_dataloader_next"] == STEPS


@pytest.mark.parametrize(
    ("slow", "first"),
    [
        ({}, "backward"),
        ({"[_TrainingEpochLoop].train_dataloader_next": 50}, "train_dataloader_next"),
        ({"[Strategy]X.training_step": 50, "[LightningModule]M.optimizer_step": 90}, "training_step"),
        ({f"[Callback]{WATCH}": 50}, WATCH),
    ],
)
def test_simple_on_made_up_durations(slow, first):
    seconds = {"run_training_epoch": 40, "run_training_batch": 35, "[LightningModule]M.optimizer_step": 34}
    seconds |= {"[Strategy]X.training_step": 10, "[Strategy]X.backward": 20}
    seconds |= {"[_TrainingEpochLoop].train_dataloader_next": 5, f"[Callback]{WATCH}": 0}
    rows = entry.read_simple({name: [time / 2] * 2 for name, time in (seconds | slow).items()})
    assert (rows[0]["name"], rows[0]["calls"]) == (first, 2)
    found = {row["name"]: row["share"] for row in rows}
    assert found["optimizer_step"] == pytest.approx(
        (34 - 10 - 20) / 40 if not slow else found["optimizer_step"]
    )
    assert not {"run_training_epoch", "run_training_batch"} & found.keys()


def test_advanced_on_made_up_statistics():
    mine, library, c = ("/a/mine.py", 7, "forward"), ("/lib/theirs.py", 3, "step"), ("~", 0, "<wait>")
    stats = pstats.Stats()
    stats.total_tt = 10.0
    stats.stats = {
        library: (4, 4, 1.0, 9.0, {}),
        mine: (2, 2, 2.0, 8.0, {library: (2, 2, 2.0, 8.0)}),
        c: (9, 9, 7.0, 7.0, {library: (8, 8, 1.0, 1.0), mine: (1, 1, 6.0, 6.0)}),
    }
    rows = entry.read_advanced(stats)
    assert [row["name"] for row in rows] == ["<wait>", "forward", "step"]
    assert rows[0] == {"name": "<wait>", "calls": 9, "share": 0.7, "place": "called by forward, mine.py:7"}
    assert (rows[1]["share"], rows[1]["place"]) == (0.2, "mine.py:7")


def event(name: str, ts: float, dur: float, tid: int = 1, cat: str | None = None) -> dict:
    cat = cat or ("user_annotation" if "[pl]" in name else "cpu_op")
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat}


def test_trace_on_made_up_events():
    events = [
        event("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 100, 60),
        event("aten::stack", 150, 10),
        event("aten::cat", 152, 6),
        event("[pl][profile]run_training_batch", 160, 900),  # open until the file was written
        event("[pl][profile][LightningModule]M.optimizer_step", 161, 899),
        event("[pl][profile][Strategy]X.training_step", 165, 35),
        event("[pl][module]torch.nn.Conv2d: net.0", 166, 30),
        event("aten::conv2d", 166, 32),
        event("aten::convolution", 168, 28),
        event("aten::mul", 500, 400),  # after the last whole step
        event("aten::mm", 100, 90, tid=2),  # another thread
        event("PyTorch Profiler (0)", 0, 2000, cat="Trace"),
    ]
    trace = {"traceEvents": [{"ph": "M", "name": "process_name"}, *reversed(events)]}
    assert all(event["ts"] < 200 for event in entry.main_thread(trace))
    rows = {row["name"]: row for row in entry.read_trace(trace)}
    assert list(rows)[:3] == ["train_dataloader_next", "training_step", "optimizer_step"]
    loader, step = rows["train_dataloader_next"], rows["training_step"]
    assert [row["operator_calls"] for row in (loader, step)] == [2, 2]
    assert loader["share"] == 0.6 and loader["filled"] == pytest.approx(1 / 6)
    assert [(op["name"], op["share"] * 60) for op in loader["operators"]] == [
        ("aten::cat", pytest.approx(6)),
        ("aten::stack", pytest.approx(4)),
    ]
    assert step["share"] == 0.35 and step["filled"] == pytest.approx(32 / 35)
    assert rows["optimizer_step"]["share"] == pytest.approx(0.04)  # less the step inside, and cut at its end
    assert all(
        op["name"] not in ("aten::mm", "aten::mul") for row in rows.values() for op in row["operators"]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--slow", "loader"], ["--slow", "loader", "data"]),
        (["--steps", "8"], ["--steps 8", "at least 9"]),
        (["--steps", "13", "--save-results"], ["--steps 13", "at least 14"]),
        (["--num-workers", "-1"], ["--num-workers -1", "at least 0"]),
        (["--save-results", "--slow", "data"], ["--save-results", "leave out --slow"]),
        (["--output-dir", __file__], ["--output-dir", "name a folder"]),
    ],
)
def test_bad_input(given, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        entry.main([*given] if "--output-dir" in given else [*given, "--output-dir", str(tmp_path / "new")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and all(words in last for words in says)
    assert not list(tmp_path.iterdir())


def test_the_committed_results_keep_what_the_page_says():
    rows = book.results(RESULTS)["rows"]
    looks = {(r["plant"], r["workers"], r["profiler"]): r for r in rows if r["study"] == "looks"}
    expected = {
        ("data", "simple"): ("train_dataloader_next", None),
        ("data", "advanced"): ("count_bad", line_of(entry.count_bad)),
        ("data", "trace"): ("train_dataloader_next", None),
        ("model", "simple"): ("training_step", None),
        ("model", "advanced"): ("<built-in method torch.matmul>", line_of(entry.FirstGuess.forward)),
        ("model", "trace"): ("training_step", None),
        ("step", "simple"): (WATCH, None),
        ("step", "advanced"): (
            "<built-in method torch.isnan>",
            line_of(entry.CheckWeights.on_train_batch_end),
        ),
        ("step", "trace"): (WATCH, None),
    }
    for (slow, kind), (name, place) in expected.items():
        top = looks[slow, 0, kind]["found"][0]
        assert top["name"] == name, (slow, kind)
        if place:  # but for the line's number, which moves with any line above
            assert top["place"].rpartition(":")[0].endswith(place.rpartition(":")[0]), (slow, kind)
        assert name != looks["none", 0, kind]["found"][0]["name"], (slow, kind)
    assert looks["data", 0, "trace"]["found"][0]["filled"] < 0.1
    mm = looks["model", 0, "trace"]["found"][0]["operators"][0]
    assert (mm["name"], mm["calls"]) == ("aten::mm", entry.TRACED)
    assert looks["step", 0, "trace"]["found"][0]["operator_calls"] > 5_000
    assert looks["step", 0, "trace"]["bytes"] > 10 * looks["none", 0, "trace"]["bytes"]
    for kind in ("simple", "trace"):
        assert looks["data", 1, kind]["found"][0]["name"] == "train_dataloader_next"
    assert all(row["name"] != "count_bad" for row in looks["data", 1, "advanced"]["found"])
