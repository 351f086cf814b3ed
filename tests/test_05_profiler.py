"""Chapter 5's profiler: a trace is read right, and each slow-down that was built in is named first."""

import cProfile
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import book
import pytest
from lightning.pytorch import Trainer
from operators import Calls
from torch.utils.data import DataLoader

thorough = pytest.mark.thorough
CHAPTER = book.ROOT / "05_model_profiling"
RECORDED = CHAPTER / "results/traces"  # a turn of the loop for each of slowdowns.py, recorded by it
NAMES = ["control", "transform", "metadata", "values", "copies", "loop", "ragged"]
IN_BF16 = ["control_bf16", "norm_bf16"]


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global model, profiler, slowdowns, step, traces, train
    with book.rooms("05_model_profiling"):
        import model
        import profiler
        import slowdowns
        import step
        import traces
        import train

        yield


def entry(name: str, start: float, duration: float, **more: object) -> dict:
    """An event of a trace, in microseconds."""
    kind = "user_annotation" if name.startswith("[pl]") else "cpu_op"
    return {"name": name, "ts": start, "dur": duration, "cat": kind, "tid": 1, "args": {}} | more


def span(name: str, start: float, duration: float, **more: object) -> dict:
    return entry(f"[pl][profile]{name}", start, duration, **more)


# A turn of 1,000 microseconds, after the end of a first forward pass.
STEP = "[Strategy]SingleDeviceStrategy.training_step"
TURN = [
    span(STEP, -50, 50),
    span("[Strategy]SingleDeviceStrategy.backward", 0, 400),
    entry("aten::convolution_backward", 0, 400),
    span("[_TrainingEpochLoop].train_dataloader_next", 400, 100),
    span("[LightningModule]Model.optimizer_step", 500, 900),
    entry("aten::_foreach_add_", 500, 100),
    span(STEP, 600, 400),
    entry("aten::conv2d", 600, 300),
    entry("aten::convolution", 650, 200),
    entry("aten::copy_", 900, 100),
]


def test_shares_follow_from_the_events() -> None:
    report = traces.read_trace(TURN)
    assert (report.steps, report.step_ms) == (1, 1.0)
    shares = {phase: round(share, 6) for phase, share in report.phases.items() if share > 0}
    assert shares == {"backward": 0.4, "waiting for data": 0.1, "optimizer": 0.1, "forward": 0.4}
    own = {name: (round(share, 6), calls) for name, share, calls in report.operators}
    assert own["aten::convolution"] == (0.2, 1)
    assert own["aten::conv2d"] == (0.1, 1)  # without the convolution inside it
    assert report.findings == []


def test_the_longest_gap_is_found() -> None:
    phase, milliseconds, _ = traces.read_trace(TURN).gaps[0]
    assert (phase, milliseconds) == ("waiting for data", 0.1)


def test_what_a_turn_does_not_hold_counts_for_nothing() -> None:
    """Other threads, torch's mark of the step, and spans that lasted until the trace was written."""
    others = [
        entry("aten::mm", 0, 5000, tid=2),
        entry("ProfilerStep#5", -10, 700, cat="user_annotation"),
        span("run_training_batch", 500, 90_000),
    ]
    assert traces.read_trace([*TURN, *others]).phases == pytest.approx(traces.read_trace(TURN).phases)


@pytest.mark.parametrize("gap_first", [False, True])
def test_waiting_for_other_ranks_is_communication(gap_first: bool) -> None:
    """Sent at 0, waited for until 300: the wait has no event of its own."""
    moved = [event | {"ts": event["ts"] + 300} if event["ts"] >= 0 else event for event in TURN]
    wait = [span("[LightningModule]Model.on_before_optimizer_step", 0, 300)]
    wait += [entry("c10d::allreduce_", 250 if gap_first else 0, 50)]
    report = traces.read_trace([*moved, *wait])
    expected = 50 if gap_first else 300
    assert report.phases["communication"] == pytest.approx(expected / 1300)
    assert report.waits == [("c10d::allreduce_", "", 1)]


@pytest.mark.parametrize(("own", "counted"), [(False, 1), (True, 0)])
def test_a_value_read_is_counted_unless_it_is_the_optimizers_own(own: bool, counted: int) -> None:
    """A gradient's norm that a hook reads is counted, too."""
    around = entry("Optimizer.step#AdamW.step", 501, 50, cat="user_annotation")
    read = entry(
        "aten::item", 505, 5, args={"Call stack": "torch/x.py(1): y;model.py(7): step;train.py(2): z"}
    )
    report = traces.read_trace([*TURN, read, *[around] * own])
    assert [number for *_, number in report.waits] == [1] * counted
    assert [place for _, place, _ in report.waits] == ["model.py(7): step"] * counted


def test_the_wait_between_a_collective_and_its_value_is_communication() -> None:
    """As when Lightning broadcasts a flag and reads it."""
    sent = [entry("c10d::broadcast_", 500, 10), entry("aten::item", 590, 5)]
    moved = [event for event in TURN if event["name"] != "aten::_foreach_add_"]
    report = traces.read_trace([*moved, *sent])
    assert report.phases["communication"] == pytest.approx(0.09)
    assert report.phases["values read by Python"] == pytest.approx(0.005)


def test_python_long_before_a_read_is_not_the_reads() -> None:
    read = entry("aten::item", 590, 5)
    moved = [event for event in TURN if event["name"] != "aten::_foreach_add_"]
    report = traces.read_trace([*moved, read])
    assert report.phases["values read by Python"] == pytest.approx(0.005)


def test_a_gpus_backward_pass_has_a_thread_of_its_own() -> None:
    backward = [
        entry("autograd::engine::evaluate_function: Conv", 10, 300, tid=2),
        entry("aten::mm", 20, 200, tid=2),
    ]
    plain = [event for event in TURN if event["name"] != "aten::convolution_backward"]
    own = {name: share for name, share, _ in traces.read_trace([*plain, *backward]).operators}
    assert own["aten::mm"] == pytest.approx(0.2)


def test_a_busy_gpu_has_no_fault_of_the_cpus() -> None:
    plain = [event for event in TURN if event["name"] != "aten::convolution_backward"]
    assert traces.read_trace(plain).first == "small operators and Python"
    kernel = entry("kernel", 0, 950, cat="kernel", tid=7)
    assert traces.read_trace([*plain, kernel]).findings == []
    waits = kernel | {"name": "ncclDevKernel_AllReduce"}  # it spins until the other ranks come
    assert traces.read_trace([*plain, waits]).first == "small operators and Python"


def test_a_gpu_is_busy_while_any_kernel_runs() -> None:
    kernels = [entry("kernel", start, 200, cat="kernel", tid=7) for start in (0, 100, 900)]
    assert traces.read_trace([*TURN, *kernels]).device_busy == pytest.approx(0.4)
    assert traces.read_trace(TURN).device_busy is None


def test_events_that_overlap_by_rounding_follow_each_other() -> None:
    """Not inside each other, which would give the first event's time to the second."""
    rounded = [event | {"dur": 400.1} if event["ts"] == 0 else event for event in TURN]
    report = traces.read_trace(rounded)
    assert report.phases["waiting for data"] == pytest.approx(0.1, abs=1e-3)
    assert report.gaps[0][0] == "waiting for data"


@pytest.mark.parametrize(("length", "named"), [(40, "small operators and Python"), (80, "none")])
def test_only_short_operators_are_overhead(length: int, named: str) -> None:
    """The backward pass in pieces of so many microseconds."""
    plain = [event for event in TURN if event["name"] != "aten::convolution_backward"]
    pieces = [entry("aten::mul", start, length) for start in range(0, 400, length)]
    assert traces.read_trace([*plain, *pieces]).first == named


def test_a_long_time_without_an_operator_is_pythons_and_has_the_hooks_name() -> None:
    later = [event | {"ts": event["ts"] + 2000} if event["ts"] >= 0 else event for event in TURN]
    hook = span(
        "[LightningModule]Model.on_train_batch_end", 0, 2000, args={"Call stack": "profilers/x.py(1): start"}
    )
    finding = traces.read_trace([*later, hook]).findings[0]
    assert (finding.cause, finding.place) == ("Python without operators", hook["name"])


def test_a_callbacks_time_is_named() -> None:
    later = [event | {"ts": event["ts"] + 2000} if event["ts"] >= 0 else event for event in TURN]
    hook = span("[Callback]Writer.on_train_batch_end", 0, 2000)
    assert traces.read_trace([*later, hook]).first == "callbacks, logging, checkpoints"


@pytest.mark.parametrize(("share", "explained"), [(0.04, False), (0.5, True)])
def test_only_a_wait_for_data_that_is_worth_it_is_explained(share: float, explained: bool) -> None:
    report = replace(traces.read_trace(TURN), phases={traces.DATA: share})
    loader = profiler.LoaderProfile("acquire", "x.py:1", 0.9, opens=0)
    text = profiler.describe_profile(profiler.Profile(report, loader, 1.0, {}, 1.0), Path("here"))
    assert ("While it waits" in text) == explained


# ------------------------------------------------------------------------------------ recorded traces


def recorded(name: str) -> list[dict]:
    """One turn of the loop, as slowdowns.py --save-results keeps it."""
    return traces.load(RECORDED / f"{name}.json.gz")


@pytest.mark.parametrize("name", [*NAMES, *IN_BF16])
def test_a_recorded_slow_down_is_named_first_and_the_control_not(name: str) -> None:
    report = traces.read_trace(recorded(name))
    assert sum(report.phases.values()) == pytest.approx(1)
    wanted = slowdowns.SLOW_DOWNS[name].named
    # A trace of operators cannot say what the loader does: that is the advanced profiler's part.
    assert report.first == ("waiting for data" if name == "metadata" else wanted)


@pytest.mark.parametrize(
    ("name", "events"),
    [("copies", ("aten::to", "aten::_to_copy", "aten::copy_")), ("ragged", ("(dynamo_timed)",))],
)
def test_without_its_events_a_slow_down_is_not_named(name: str, events: tuple[str, ...]) -> None:
    raw = recorded(name)
    report = traces.read_trace([event for event in raw if not event["name"].endswith(events)])
    assert report.first != slowdowns.SLOW_DOWNS[name].named


def test_a_slow_operator_is_no_fault_but_among_the_longest() -> None:
    longest = []
    for name in ("norm_bf16", "control_bf16"):
        report = traces.read_trace(recorded(name))
        longest.append([operator for operator, *_ in report.operators])
    before, after = longest
    assert "aten::native_group_norm_backward" in before[:2]
    assert "aten::native_group_norm_backward" not in after[:2]


def test_lightnings_own_broadcast_is_found_on_two_ranks() -> None:
    """In each step it asks all ranks whether one has been told to end (a recorded trace with stacks)."""
    report = traces.read_trace(recorded("two_ranks"))
    found = {name for name, place, _ in report.waits if "training_epoch_loop.py" in place}
    assert found == {"c10d::broadcast_", "aten::item"}


# ------------------------------------------------------------------------------- a training of one's own


OWN = """
import sys
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

sys.path.insert(0, sys.argv[1])
from profiler import STEPS, describe_loader, describe_profile, profile_training

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(profiler, steps):
    loader = DataLoader(torch.ones(4 * steps, 8), 4)
    trainer = Trainer(accelerator="cpu", max_steps=steps, profiler=profiler, logger=False, enable_checkpointing=False)
    trainer.fit(Line(), loader)

folder = Path(sys.argv[2])
found = profile_training(lambda profiler: fit(profiler, STEPS), folder)
assert found.report.steps == 3
assert abs(sum(found.report.phases.values()) - 1) < 1e-6
assert {"forward", "backward", "optimizer"} <= found.report.phases.keys()
assert found.step_ms > 0
assert {path.name for path in folder.iterdir()} == {"simple", "advanced", "trace", "stacks"}
assert (folder / "simple/fit-simple.txt").read_text().startswith("FIT Profiler Report")
assert str(folder) in describe_profile(found, folder)
assert found.loader.place in describe_loader(found.loader)[0]
try:
    profile_training(lambda profiler: fit(profiler, 4), folder)
except ValueError as error:
    assert f"train for {STEPS} batches" in str(error)
    print("both as expected")
"""


@thorough
def test_a_training_of_ones_own_is_profiled_and_too_few_steps_are_an_error(tmp_path: Path) -> None:
    """In a process of its own, as a reader's: torch's tracer keeps state from run to run."""
    script = tmp_path / "own.py"
    script.write_text(OWN)
    command = [sys.executable, script, CHAPTER, tmp_path / "profiles"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["both as expected"], done.stdout + done.stderr


@pytest.mark.parametrize("opens", [0, 1])
def test_stores_that_are_opened_while_the_loop_waits_are_counted(opens: int, tmp_path: Path) -> None:
    def open_zarr() -> None:
        pass

    def slow() -> None:
        sum(range(3_000_000))
        for _ in range(opens * profiler.STEPS):
            open_zarr()

    profile = cProfile.Profile()
    profile.runcall(slow)
    profile.dump_stats(tmp_path / "fit-advanced-[_TrainingEpochLoop].train_dataloader_next.prof")
    found = profiler.read_loader(tmp_path)
    assert found.opens == opens
    assert "sum" in found.function
    assert "called by slow, test_05_profiler.py" in found.place


def test_opened_stores_are_told_from_another_wait() -> None:
    report = traces.read_trace(recorded("metadata"))
    loader = profiler.LoaderProfile("read", "x.py:1", 0.9, opens=1)
    assert profiler.Profile(report, loader, 1.0, {}, 1.0).verdict == slowdowns.SLOW_DOWNS["metadata"].named
    assert profiler.Profile(report, replace(loader, opens=0), 1.0, {}, 1.0).verdict == "waiting for data"


def test_a_step_lasts_from_the_wait_for_its_data_to_its_end() -> None:
    durations = {
        "run_training_batch": [9.0, 3.0, 4.0],
        "[_TrainingEpochLoop].train_dataloader_next": [1.0, 1.0, 7.0],
    }
    assert profiler.median_step(durations) == 5


def test_lightnings_loop_reads_no_value_between_two_refreshes_of_the_bar(monkeypatch) -> None:
    """A loss logged with prog_bar=True is read in every step; ours when the bar is drawn."""
    assert reads_of_a_run(12) - reads_of_a_run(6) == 2
    plain = model.FillGaps.log
    monkeypatch.setattr(model.FillGaps, "log", lambda *words, **_: plain(*words, prog_bar=True))
    assert reads_of_a_run(12) - reads_of_a_run(6) >= 6


def reads_of_a_run(steps: int) -> int:
    """Values that are read, a few of them before the first step; the bar is drawn in every third."""
    batch = step.make_batch(2, 16)
    module = model.FillGaps([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, steps, seed=0)
    settings = {"accelerator": "cpu", "max_steps": steps, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(**settings, callbacks=[train.LossBar(refresh_rate=3)], enable_model_summary=False)
    with Calls() as calls:
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    return calls.reads


# -------------------------------------------------------------------------------------------- commands


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text.json").write_text("no trace")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": [entry("aten::mm", 0, 1, ph="X")]}))
    with gzip.open(tmp_path / "cut.json.gz", "wb") as file:
        file.write(b"x" * 10_000)
    whole = (tmp_path / "cut.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[:30])
    (tmp_path / "bytes.json.gz").write_bytes(whole[:20] + b"\xff" * 9 + whole[29:])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    same = [span(STEP, 0, 50, ph="X")] * 2
    (tmp_path / "moment.json").write_text(json.dumps({"traceEvents": same}))
    bad = (
        "text.json",
        "list.json",
        "other.json",
        "cut.json.gz",
        "none.json",
        "bytes.json.gz",
        "deep.json",
        "moment.json",
    )
    for name in bad:
        with pytest.raises(SystemExit, match="2"):
            traces.main([str(tmp_path / name)])
        last = capsys.readouterr().err.splitlines()[-1]
        assert name in last and "give" in last


def test_an_unknown_slow_down_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        slowdowns.main(["nope"])
    assert "nope: no such slow-down; choose from control" in capsys.readouterr().err


def test_every_slow_down_has_a_recorded_trace() -> None:
    assert list(slowdowns.SLOW_DOWNS) == [*NAMES, *IN_BF16]


@thorough
@pytest.mark.parametrize("name", [*NAMES, *IN_BF16])
def test_a_slow_down_is_named_first(name: str, tmp_path: Path) -> None:
    if name in IN_BF16 and not slowdowns.has_bf16(on_gpu=False):
        pytest.skip("no instructions for bfloat16")
    (row,) = slowdowns.main([name, "--output-dir", str(tmp_path)])
    assert row["named"] == row["should_name"]


@thorough
def test_the_readers_command_finds_lightnings_broadcast_on_two_ranks(tmp_path: Path) -> None:
    """And leaves traces that a viewer can open: each below 20 MB."""
    import programs

    flags = ["--devices", 2, "--patch-size", 32, "--output-dir", tmp_path]
    done = programs.run(CHAPTER / "profiler.py", *flags)
    assert done.code == 0
    assert "lightning/pytorch/loops/training_epoch_loop.py" in done.out
    written = list(tmp_path.glob("*/*.json.gz"))
    assert {path.name for path in written} == {"rank_0.json.gz", "rank_1.json.gz"}
    assert max(path.stat().st_size for path in written) < 20e6
