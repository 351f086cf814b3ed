"""Chapter 5's profiler: a trace is read right, and each slow-down that was built in is named first."""

import gzip
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import book
import programs
import pytest
from lightning.pytorch import Trainer
from operators import Calls
from torch.utils.data import DataLoader

thorough = pytest.mark.thorough
CHAPTER = book.ROOT / "05_model_profiling"
HOOK = "[LightningModule]Model.on_train_batch_end"


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global cpu_time, memory_curve, model, profiler, slowdowns, step, trace_events, traces, train
    with book.rooms("05_model_profiling"):
        import cpu_time
        import memory_curve
        import model
        import profiler
        import slowdowns
        import step
        import trace_events
        import traces
        import train

        yield


def entry(name: str, start: float, duration: float, **more: object) -> dict:
    """An event of a trace, in microseconds."""
    kind = "cpu_op" if "::" in name else "user_annotation"
    return {"name": name, "ts": start, "dur": duration, "cat": kind, "tid": 1, "args": {}} | more


def span(name: str, start: float, duration: float, **more: object) -> dict:
    return entry(f"[pl][profile]{name}", start, duration, **more)


# A turn of 1,000 microseconds, after the end of a first forward pass.
STEP = "[Strategy]SingleDeviceStrategy.training_step"
FIRST = span(STEP, -50, 50)
TURN = [
    FIRST,
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
NO_PART = [
    entry("aten::mm", 0, 5000, tid=2),  # of another thread
    entry("ProfilerStep#5", -10, 700),  # torch's mark of the step
    span("run_training_batch", 500, 90_000),  # until the trace was written
]


def read(events: list[dict], **machine: float) -> "traces.Report":
    """What the report says of made-up events."""
    return traces.read_trace(trace_events.Trace(events, trace_events.Machine(**machine)))


def without(name: str) -> list[dict]:
    return [event for event in TURN if event["name"] != name]


def later(microseconds: float) -> list[dict]:
    """The turn, but all after the first forward pass begins so much later."""
    return [FIRST, *(event | {"ts": event["ts"] + microseconds} for event in TURN[1:])]


@pytest.mark.parametrize("others", [[], NO_PART], ids=["alone", "among others"])
@pytest.mark.parametrize("length", [400, 400.1], ids=["exact", "rounded into the next event"])
def test_shares_and_gaps_follow_from_the_events(length: float, others: list[dict]) -> None:
    turn = [event | {"dur": length} if event["ts"] == 0 else event for event in TURN]
    report = read([*turn, *others])
    assert (report.steps, report.step_ms, report.findings) == (1, 1.0, [])
    shares = {phase: round(share, 3) for phase, share in report.phases.items() if share > 0}
    assert shares == {"backward": 0.4, "waiting for data": 0.1, "optimizer": 0.1, "forward": 0.4}
    own = {name: (round(share, 3), calls) for name, share, calls in report.operators}
    assert own["aten::convolution"] == (0.2, 1)
    assert own["aten::conv2d"] == (0.1, 1)  # without the convolution inside it
    phase, milliseconds, _ = report.gaps[0]
    assert (phase, round(milliseconds, 3)) == ("waiting for data", 0.1)


@pytest.mark.parametrize("sent", [0, 250])
def test_waiting_for_other_ranks_is_communication(sent: int) -> None:
    """Sent at 0, waited for until 300: the wait has no event of its own."""
    hook = span("[LightningModule]Model.on_before_optimizer_step", 0, 300)
    report = read([*later(300), hook, entry("c10d::allreduce_", sent, 50)])
    expected = 300 - sent
    assert report.phases["communication"] == pytest.approx(expected / 1300)
    assert report.waits == [("c10d::allreduce_", "", 1)]


@pytest.mark.parametrize("sends", [False, True])
def test_time_before_a_read_is_not_the_reads(sends: bool) -> None:
    """But communication if a collective was sent, as when Lightning broadcasts a flag and reads it."""
    sent = [entry("c10d::broadcast_", 500, 10)] * sends
    phases = read([*without("aten::_foreach_add_"), *sent, entry("aten::item", 590, 5)]).phases
    assert phases.get("communication", 0) == pytest.approx(0.09 * sends)
    assert phases["values read by Python"] == pytest.approx(0.005)


@pytest.mark.parametrize("own", [False, True])
def test_a_value_read_is_counted_unless_it_is_the_optimizers_own(own: bool) -> None:
    around = entry("Optimizer.step#AdamW.step", 501, 50)
    stack = {"Call stack": "torch/x.py(1): y;model.py(7): step;train.py(2): z"}
    report = read([*TURN, entry("aten::item", 505, 5, args=stack), *[around] * own])
    assert report.waits == ([] if own else [("aten::item", "model.py: step", 1)])


def test_an_operator_is_named_with_its_caller() -> None:
    stack = {"Call stack": "torch/x.py(1): y;model.py(7): step;train.py(2): z"}
    copies = entry("aten::copy_", 0, 400, args=stack)
    (finding,) = read([*without("aten::convolution_backward"), copies]).findings
    assert (finding.cause, finding.place) == ("copies", "aten::copy_, called by model.py: step")


@pytest.mark.parametrize("waits", [0.02, 0.1])
def test_a_wait_that_is_no_fault_is_said(waits: float) -> None:
    turn = [event | {"dur": 1000 * waits} if event["ts"] == 400 else event for event in TURN]
    last = traces.describe(read(turn)).splitlines()[-1]
    assert ("waiting for data: 10%" in last) == (waits == 0.1)


def test_a_gpu_is_busy_while_any_kernel_runs() -> None:
    kernels = [entry("kernel", start, 200, cat="kernel", tid=7) for start in (0, 100, 900)]
    assert read([*TURN, *kernels]).device_busy == pytest.approx(0.4)
    assert read(TURN).device_busy is None


def test_a_busy_gpu_has_no_fault_of_the_cpus_and_its_backward_pass_a_thread() -> None:
    plain = without("aten::convolution_backward")
    assert read(plain).first == "Python without operators"
    kernel = entry("kernel", 0, 950, cat="kernel", tid=7)
    assert read([*plain, kernel]).findings == []
    waits = kernel | {"name": "ncclDevKernel_AllReduce"}  # it spins until the other ranks come
    assert read([*plain, waits]).first == "Python without operators"
    autograd = entry("autograd::engine::evaluate_function: Conv", 10, 300, tid=2)
    found = read([*plain, autograd, entry("aten::mm", 20, 200, tid=2)]).operators
    assert [round(share, 6) for name, share, _ in found if name == "aten::mm"] == [0.2]


@pytest.mark.parametrize("length", [2, 3, 40])
def test_of_each_operator_as_much_is_overhead_as_an_empty_one_takes(length: int) -> None:
    """The backward pass in sums of so many microseconds, where an empty one takes 2."""
    pieces = [entry("aten::mul", start, length) for start in range(0, 400, length)]
    report = read([*without("aten::convolution_backward"), *pieces], empty_us=2)
    found = {finding.cause: finding.share for finding in report.findings}
    if length == 40:
        assert found == {}
    else:
        # A few microseconds are those of the other operators.
        assert found == {"small operators and Python": pytest.approx(0.4 * 2 / length, abs=0.02)}


WIDE = {"Input Dims": [[10, 1000], [1000], []], "Input type": ["float", "float", "Scalar"]}
NEEDS = 84_000  # bytes: inputs of 10,000 and 1,000 numbers, and a result of 10,000


def test_an_operators_bytes_follow_from_its_shapes() -> None:
    assert trace_events.count_bytes(WIDE) == NEEDS
    outer = {"Input Dims": [[1000, 1], [1, 1000]], "Input type": ["c10::BFloat16"] * 2}
    assert trace_events.count_bytes(outer) == 2 * (1000 + 1000 + 1000 * 1000)
    listed = {"Input Dims": [[[2, 3], [2, 3]], []], "Input type": ["TensorList", "Scalar"]}
    assert trace_events.count_bytes(listed) == trace_events.count_bytes({}) == 0


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("aten::native_group_norm_backward", True),
        ("aten::add_", True),
        ("aten::max_pool2d_with_indices", True),
        ("aten::convolution_backward", False),
        ("aten::addmm", False),
        ("aten::matmul", False),
        ("aten::cumsum", False),
    ],
)
def test_an_operator_of_one_pass_is_slow_where_a_copy_takes_far_less(name: str, slow: bool) -> None:
    """It takes 400 microseconds; a copy of its bytes takes 20, or 100."""
    turn = [*without("aten::convolution_backward"), entry(name, 0, 400, args=WIDE)]
    fast = NEEDS / 20e-6
    report = read(turn, empty_us=2, copy_rate=fast)
    expected = [("an operator far below its roof", name)] if slow else []
    assert [(each.cause, each.place) for each in report.findings] == expected
    assert read(turn, empty_us=2, copy_rate=fast / 5).findings == []
    assert read(turn, empty_us=2).findings == []  # nobody has measured the roof
    bare = [event | {"args": {}} for event in turn]
    assert read(bare, empty_us=2, copy_rate=fast).findings == []
    kernel = entry("kernel", 0, 50, cat="kernel", tid=7)
    assert read([*turn, kernel], empty_us=2, copy_rate=fast).findings == []


def test_an_operator_that_was_stopped_once_is_not_slow() -> None:
    pieces = [(0, 10), (10, 10), (20, 380)]
    norms = [entry("aten::native_group_norm", *piece, args=WIDE) for piece in pieces]
    turn = [*without("aten::convolution_backward"), *norms]
    assert read(turn, empty_us=2, copy_rate=NEEDS / 10e-6).findings == []


@pytest.mark.parametrize("events", [[FIRST], [FIRST, entry("ProfilerStep#4", 0, 100)], [TURN[2]]])
def test_a_trace_without_a_whole_step_is_an_error(events: list[dict]) -> None:
    with pytest.raises(ValueError, match="it has"):
        read(events)


def test_the_phases_of_a_plain_loop_have_its_own_names() -> None:
    """Innermost first; torch names the wait for its loader, and its optimizers where nobody did."""
    plain = [
        entry("ProfilerStep#4", 0, 1000),
        entry("ProfilerStep#5", 1000, 1000),
        entry("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 200),
        entry("my forward", 200, 500),
        entry("encoder", 200, 100),
        entry("aten::mm", 210, 80),
        entry("DistributedDataParallel.forward", 300, 100),
        entry("Optimizer.step#AdamW.step", 700, 300),
        entry("update", 1000, 400),
        entry("Optimizer.step#AdamW.step", 1000, 400),
    ]
    report = read(plain)
    assert (report.steps, report.step_ms) == (2, 1.0)
    shares = {phase: round(share, 4) for phase, share in report.phases.items()}
    expected = {"waiting for data": 0.1, "my forward": 0.2, "encoder": 0.05, "optimizer": 0.15}
    assert shares == expected | {"update": 0.2, "the loop around it": 0.3}
    assert "my forward" in traces.describe(report)


@pytest.mark.parametrize(
    ("name", "cause"),
    [(HOOK, "Python without operators"), ("[Callback]Writer.save", "callbacks, logging, checkpoints")],
)
def test_a_long_hook_is_named(name: str, cause: str) -> None:
    """Not by its stack, whose lines are Lightning's."""
    hook = span(name, 0, 2000, args={"Call stack": "profilers/x.py(1): start"})
    finding = read([*later(2000), hook]).findings[0]
    assert (finding.cause, finding.place) == (cause, hook["name"])


# ------------------------------------------------------------------------------------ recorded traces


def recorded(name: str) -> "traces.Trace":
    """One turn of the loop, as slowdowns.py --save-results keeps it."""
    return traces.load(CHAPTER / f"results/traces/{name}.json.gz")


def test_a_recorded_slow_down_is_named_first_and_the_control_not() -> None:
    for name, slow in slowdowns.SLOW_DOWNS.items():
        report = traces.read_trace(recorded(name))
        assert sum(report.phases.values()) == pytest.approx(1)
        # A trace of operators cannot say what the loader does: that is the advanced profiler's part.
        loader = profiler.LoaderProfile("read", "x.py:1", 0.9, opens=name == "metadata")
        assert (name, profiler.Profile(report, loader, 1.0, {}, 1.0).verdict) == (name, slow.named)


@pytest.mark.parametrize("name", ["copies", "ragged"])
def test_without_its_events_a_slow_down_is_not_named(name: str) -> None:
    events = ("aten::to", "aten::_to_copy", "aten::copy_", "(dynamo_timed)")
    report = read([each for each in recorded(name).events if not each["name"].endswith(events)])
    assert report.first != slowdowns.SLOW_DOWNS[name].named


@pytest.mark.parametrize(("name", "slow"), [("norm_bf16", True), ("control_bf16", False)])
def test_a_slow_operator_is_among_the_longest(name: str, slow: bool) -> None:
    longest = [operator for operator, *_ in traces.read_trace(recorded(name)).operators[:2]]
    assert ("aten::native_group_norm_backward" in longest) == slow


def test_groupnorm_is_found_by_its_bytes() -> None:
    trace = recorded("norm_bf16")
    (finding,) = traces.read_trace(trace).findings
    assert (finding.cause, finding.place) == (traces.SLOW, "aten::native_group_norm_backward")
    without = [event | {"args": {}} for event in trace.events]
    assert traces.read_trace(trace_events.Trace(without, trace.machine)).findings == []


def test_a_trace_with_little_python_between_operators_names_nothing() -> None:
    """Two ranks, traced with stacks, without a fault."""
    assert traces.read_trace(recorded("two_ranks")).findings == []


def test_lightnings_own_broadcast_is_found_on_two_ranks() -> None:
    """In each step it asks all ranks whether one has been told to end (a recorded trace with stacks)."""
    report = traces.read_trace(recorded("two_ranks"))
    found = {name for name, place, _ in report.waits if "training_epoch_loop.py" in place}
    assert found == {"c10d::broadcast_", "aten::item"}


# ------------------------------------------------------------------------------- a training of one's own


LIGHTNING = """
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from profiler import STEPS, describe_profile, profile_training

def fit(profiler):
    settings = {"limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
    Trainer(accelerator="cpu", max_steps=STEPS, profiler=profiler, **settings).fit(BoringModel())

folder = Path("profiles")
mine = folder / "trace/mine.csv"
mine.parent.mkdir(parents=True)
mine.write_text("not a profile")
found = profile_training(fit, folder)
files = set(folder.rglob("*.*"))
profile_training(fit, folder, with_stacks=False)
assert mine.read_text() == "not a profile"
assert set(folder.rglob("*.*")) == {path for path in files if path.parent.name != "stacks"}
assert (found.report.steps, found.step_ms > 0) == (3, True)
assert {"forward", "backward", "optimizer"} <= found.report.phases.keys()
assert {path.name for path in folder.iterdir()} == {"simple", "advanced", "trace", "stacks"}
assert describe_profile(found, folder)
"""
PLAIN = """
import sys
from pathlib import Path
import torch
from torch.profiler import record_function

for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    sys.modules[name] = None  # not installed
sys.modules["lightning"] = None
from profiler import STEPS, describe_profile, profile_loop
from trace_events import load

def train(end_step, steps=STEPS):
    network = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(8 * steps, 64), batch_size=8)
    for batch in loader:
        with record_function("encode"):
            loss = network(batch).square().mean()
        with record_function("differentiate"):
            loss.backward()
        with record_function("update"):
            optimizer.step()
        end_step()

folder = Path("profiles")
found = profile_loop(train, folder)
assert (found.report.steps, found.step_ms > 0) == (4, True)
assert {"encode", "differentiate", "update", "waiting for data"} <= found.report.phases.keys()
assert "differentiate" in describe_profile(found, folder)
trace = load(folder / "trace/rank_0.json.gz")
assert trace.machine.empty_us > 0 and trace.machine.copy_rate > 0
assert any(event.get("args", {}).get("Input Dims") for event in trace.events)
profile_loop(lambda end_step: train(end_step, 4), folder)
"""
NEEDED = ("profiler.py", "traces.py", "trace_events.py")


@pytest.mark.parametrize(
    ("program", "error"),
    [(LIGHTNING, ""), (PLAIN, "4 steps have ended: train for 10")],
    ids=["lightning", "plain"],
)
def test_a_project_in_another_folder_is_profiled_and_none_of_its_files_is_run(
    program: str, error: str, tmp_path: Path
) -> None:
    """With three of the book's files, and its own under the names of the others; too few steps are an error."""
    for path in CHAPTER.glob("*.py"):
        (tmp_path / path.name).write_text("raise SystemExit(f'{__file__} was run')")
    for name in NEEDED:
        shutil.copy(CHAPTER / name, tmp_path)
    (tmp_path / "own_training.py").write_text(program)
    done = programs.run(tmp_path / "own_training.py")
    assert done.code == bool(error), done.err
    assert error in (done.err.splitlines() or [""])[-1]


def run_there(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a script in a folder, as a reader does."""
    command = [sys.executable, script, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)


def test_alone_the_commands_say_what_to_do_and_traces_reads_a_trace(tmp_path: Path) -> None:
    for name in NEEDED:
        shutil.copy(CHAPTER / name, tmp_path)
    done = run_there("profiler.py", tmp_path)
    assert done.returncode == 2
    assert "profile_loop" in done.stderr.splitlines()[-1]
    done = run_there("traces.py", tmp_path, str(CHAPTER / "results/traces/copies.json.gz"))
    assert "1. copies" in done.stdout


def test_what_is_kept_of_a_trace_says_the_same(tmp_path: Path) -> None:
    """slowdowns.py keeps one turn, with bytes instead of shapes, and the machine."""
    first = [FIRST, *TURN[1:], entry("aten::silu", 10, 200, args=WIDE)]
    trace = trace_events.Trace(first, trace_events.Machine(2.0, 4e9))
    kept = trace_events.Trace(slowdowns.first_turn(with_process(trace)), trace.machine)
    assert traces.read_trace(kept) == traces.read_trace(trace)
    assert {"bytes": NEEDS} in [event["args"] for event in kept.events]


def with_process(trace: "traces.Trace") -> "traces.Trace":
    """The trace as torch writes it, with a kind and a process for each event."""
    return trace_events.Trace([event | {"ph": "X", "pid": 1} for event in trace.events], trace.machine)


def test_processor_time_is_told_apart_by_who_spends_it() -> None:
    """In each step 5 ms of the thread that trains, 2 of the others, and 1 of a child; the first steps cost more."""
    clock = cpu_time.ProcessorTime()
    for step_number in range(cpu_time.STEPS):
        early = 1.0 if step_number < cpu_time.SKIPPED else 2.0
        spent = early + step_number * 0.001
        clock.seconds.append((5 * spent, 7 * spent, spent))
    expected = {cpu_time.THREAD: 5, cpu_time.LOADER: 2, cpu_time.SERVER: 1}
    assert clock.per_step() == pytest.approx(expected)


def test_memory_over_time_begins_with_the_first_allocation() -> None:
    """What is held: see test_fixes_of_memory_hold_less."""
    network = step.Step(step.Fixes(), step.make_batch(2, 16), step.torch.device("cpu"))
    times, held = memory_curve.measure_memory(network)
    assert len(times) == len(held)
    assert times == sorted(times)
    assert times[0] == 0


def test_a_step_is_the_mean_from_mark_to_mark_without_the_first_ones() -> None:
    """A median would hide a wait in one of them."""
    marks = [0, 50, 60, 70, 80, 81, 82, 83, 90, 91]
    assert profiler.mean_step(marks) == pytest.approx(1e3 * 11 / 5)
    with pytest.raises(ValueError, match="9 steps have ended: train for 10"):
        profiler.mean_step(marks[1:])


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
    packed = gzip.compress(b"x" * 10_000)
    files = {"text.json": b"no trace", "list.json": b"[1]", "deep.json": b"[" * 100_000}
    files |= {"cut.json.gz": packed[:30], "bytes.json.gz": packed[:20] + b"\xff" * 9 + packed[29:]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in (*files, "none.json"):
        with pytest.raises(SystemExit, match="2"):
            traces.main([str(tmp_path / name)])
        last = capsys.readouterr().err.splitlines()[-1]
        assert name in last and "give" in last


@thorough
def test_a_slow_down_is_named_first(tmp_path: Path) -> None:
    for row in slowdowns.main(["--output-dir", str(tmp_path)]):
        assert (row["slow_down"], row["named"]) == (row["slow_down"], row["should_name"])


@thorough
def test_the_readers_command_finds_lightnings_broadcast_on_two_ranks(tmp_path: Path) -> None:
    """And leaves traces that a viewer can open: each below 20 MB."""
    flags = ["--devices", 2, "--patch-size", 32, "--output-dir", tmp_path]
    done = programs.require_success(CHAPTER / "profiler.py", *flags)
    assert "lightning/pytorch/loops/training_epoch_loop.py" in done.out
    written = list(tmp_path.glob("*/*.json.gz"))
    assert {path.name for path in written} == {"rank_0.json.gz", "rank_1.json.gz"}
    assert max(path.stat().st_size for path in written) < 20e6
