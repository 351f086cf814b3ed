"""Chapter 5's profiler: a trace is read right, and each slow-down that was built in is named first."""

import gzip
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
    entry("ProfilerStep#5", -10, 700, cat="user_annotation"),  # torch's mark of the step
    span("run_training_batch", 500, 90_000),  # until the trace was written
]


def without(name: str) -> list[dict]:
    return [event for event in TURN if event["name"] != name]


def later(microseconds: float) -> list[dict]:
    """The turn, but all after the first forward pass begins so much later."""
    return [FIRST, *(event | {"ts": event["ts"] + microseconds} for event in TURN[1:])]


@pytest.mark.parametrize("others", [[], NO_PART], ids=["alone", "among others"])
@pytest.mark.parametrize("length", [400, 400.1], ids=["exact", "rounded into the next event"])
def test_shares_and_gaps_follow_from_the_events(length: float, others: list[dict]) -> None:
    turn = [event | {"dur": length} if event["ts"] == 0 else event for event in TURN]
    report = traces.read_trace([*turn, *others])
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
    report = traces.read_trace([*later(300), hook, entry("c10d::allreduce_", sent, 50)])
    expected = 300 - sent
    assert report.phases["communication"] == pytest.approx(expected / 1300)
    assert report.waits == [("c10d::allreduce_", "", 1)]


@pytest.mark.parametrize("sends", [False, True])
def test_time_before_a_read_is_not_the_reads(sends: bool) -> None:
    """But communication if a collective was sent, as when Lightning broadcasts a flag and reads it."""
    sent = [entry("c10d::broadcast_", 500, 10)] * sends
    phases = traces.read_trace([*without("aten::_foreach_add_"), *sent, entry("aten::item", 590, 5)]).phases
    assert phases.get("communication", 0) == pytest.approx(0.09 * sends)
    assert phases["values read by Python"] == pytest.approx(0.005)


@pytest.mark.parametrize("own", [False, True])
def test_a_value_read_is_counted_unless_it_is_the_optimizers_own(own: bool) -> None:
    around = entry("Optimizer.step#AdamW.step", 501, 50, cat="user_annotation")
    stack = {"Call stack": "torch/x.py(1): y;model.py(7): step;train.py(2): z"}
    report = traces.read_trace([*TURN, entry("aten::item", 505, 5, args=stack), *[around] * own])
    assert report.waits == ([] if own else [("aten::item", "model.py(7): step", 1)])


def test_a_gpu_is_busy_while_any_kernel_runs() -> None:
    kernels = [entry("kernel", start, 200, cat="kernel", tid=7) for start in (0, 100, 900)]
    assert traces.read_trace([*TURN, *kernels]).device_busy == pytest.approx(0.4)
    assert traces.read_trace(TURN).device_busy is None


def test_a_busy_gpu_has_no_fault_of_the_cpus_and_its_backward_pass_a_thread() -> None:
    plain = without("aten::convolution_backward")
    assert traces.read_trace(plain).first == "small operators and Python"
    kernel = entry("kernel", 0, 950, cat="kernel", tid=7)
    assert traces.read_trace([*plain, kernel]).findings == []
    waits = kernel | {"name": "ncclDevKernel_AllReduce"}  # it spins until the other ranks come
    assert traces.read_trace([*plain, waits]).first == "small operators and Python"
    autograd = entry("autograd::engine::evaluate_function: Conv", 10, 300, tid=2)
    found = traces.read_trace([*plain, autograd, entry("aten::mm", 20, 200, tid=2)]).operators
    assert [round(share, 6) for name, share, _ in found if name == "aten::mm"] == [0.2]


@pytest.mark.parametrize(("length", "named"), [(40, "small operators and Python"), (80, "none")])
def test_only_short_operators_are_overhead(length: int, named: str) -> None:
    """The backward pass in pieces of so many microseconds."""
    pieces = [entry("aten::mul", start, length) for start in range(0, 400, length)]
    assert traces.read_trace([*without("aten::convolution_backward"), *pieces]).first == named


@pytest.mark.parametrize(
    ("name", "cause"),
    [(HOOK, "Python without operators"), ("[Callback]Writer.save", "callbacks, logging, checkpoints")],
)
def test_a_long_hook_is_named(name: str, cause: str) -> None:
    """Not by its stack, whose lines are Lightning's."""
    hook = span(name, 0, 2000, args={"Call stack": "profilers/x.py(1): start"})
    finding = traces.read_trace([*later(2000), hook]).findings[0]
    assert (finding.cause, finding.place) == (cause, hook["name"])


# ------------------------------------------------------------------------------------ recorded traces


def recorded(name: str) -> list[dict]:
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
    report = traces.read_trace([each for each in recorded(name) if not each["name"].endswith(events)])
    assert report.first != slowdowns.SLOW_DOWNS[name].named


@pytest.mark.parametrize(("name", "slow"), [("norm_bf16", True), ("control_bf16", False)])
def test_a_slow_operator_is_no_fault_but_among_the_longest(name: str, slow: bool) -> None:
    longest = [operator for operator, *_ in traces.read_trace(recorded(name)).operators[:2]]
    assert ("aten::native_group_norm_backward" in longest) == slow


def test_lightnings_own_broadcast_is_found_on_two_ranks() -> None:
    """In each step it asks all ranks whether one has been told to end (a recorded trace with stacks)."""
    report = traces.read_trace(recorded("two_ranks"))
    found = {name for name, place, _ in report.waits if "training_epoch_loop.py" in place}
    assert found == {"c10d::broadcast_", "aten::item"}


# ------------------------------------------------------------------------------- a training of one's own


OWN = """
import sys
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

sys.path.insert(0, sys.argv[1])
from profiler import STEPS, profile_training

def fit(profiler, steps):
    settings = {"limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
    Trainer(accelerator="cpu", max_steps=steps, profiler=profiler, **settings).fit(BoringModel())

folder = Path(sys.argv[2])
found = profile_training(lambda profiler: fit(profiler, STEPS), folder)
assert (found.report.steps, found.step_ms > 0) == (3, True)
assert {"forward", "backward", "optimizer"} <= found.report.phases.keys()
assert {path.name for path in folder.iterdir()} == {"simple", "advanced", "trace", "stacks"}
profile_training(lambda profiler: fit(profiler, 4), folder)
"""


@thorough
def test_a_training_of_ones_own_is_profiled_and_too_few_steps_are_an_error(tmp_path: Path) -> None:
    """In a process of its own, as a reader's: torch's tracer keeps state from run to run."""
    command = [sys.executable, "-c", OWN, CHAPTER, tmp_path / "profiles"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert "train for 10 batches" in done.stderr.splitlines()[-1], done.stderr


def test_a_step_lasts_from_the_wait_for_its_data_to_its_end() -> None:
    waits = {"[_TrainingEpochLoop].train_dataloader_next": [1.0, 1.0, 7.0]}
    assert profiler.median_step({"run_training_batch": [9.0, 3.0, 4.0], **waits}) == 5


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
