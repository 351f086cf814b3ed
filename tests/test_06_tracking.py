"""Chapter 6: what a run writes down about itself, and whether a slow rank is told from a slow loader."""

import csv
import json
from pathlib import Path

import buckets
import numpy as np
import programs
import pytest
from chapter_6 import SCRIPT, folder, local, rooms  # noqa: F401
from runs import losses
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --max-steps 6 --validate-every 6".split()
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-slots 12 --patches-per-block 2".split()
SMALL += "--full-validation-patches 24 --resume auto".split()
LONG = ["--max-steps", 24, "--validate-every", 24, "--checkpoint-every", 24]  # enough windows for a verdict

thorough = pytest.mark.thorough


def run_two_ranks(*flags: object, **options: object) -> list[programs.Run]:
    """Run the script on two ranks, which must succeed."""
    done = programs.run_ranks(SCRIPT, 2, *SMALL, *flags, **options)
    assert [getattr(one, "code", None) for one in done] == [0, 0], programs.printed(done)
    return done


def verdicts(run: Path) -> list[dict]:
    """What a run has judged, one line for each window."""
    return [json.loads(line) for line in (run / "tracking.jsonl").read_text().splitlines()]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as log:
        return list(csv.DictReader(log))


def curve(run: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a curve as TensorBoard shows it."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# ------------------------------------------------------------------------- made-up durations


def make_windows(ranks: int, wait: float = 0.01, forward: float = 1.0, noise: float = 0.0, count: int = 20):
    """Windows of ranks that are alike; `noise` is the relative scatter of their times."""
    rng = np.random.default_rng(0)
    usual = np.array([wait, forward])
    times = usual * (1 + noise * rng.standard_normal((count, ranks, 2)))
    step = times.sum(axis=2).max(axis=1) + 1.0  # the backward pass, in which all wait for the slowest
    step = np.repeat(step[:, None, None], ranks, axis=1)
    return np.concatenate([times, step], axis=2)


def finding(windows: np.ndarray) -> tuple[str, int | None]:
    from tracking.stragglers import judge

    verdict = judge(list(windows))
    return verdict.finding, verdict.rank


@pytest.mark.parametrize("ranks", [2, 4, 9])
@pytest.mark.parametrize("column", ["wait", "forward"])
def test_a_rank_that_is_always_the_slowest_is_named(ranks: int, column: str) -> None:
    from tracking.stragglers import FORWARD, WAIT, judge

    windows = make_windows(ranks, noise=0.1)
    slow = ranks - 1
    if column == "wait":
        windows[:, slow, WAIT] = 0.5
    else:
        windows[:, slow, FORWARD] *= 1.8
    assert finding(windows) == ("straggler", slow)
    reason = {"wait": "waits for data", "forward": "forward pass"}[column]
    assert f"rank {slow}" in judge(list(windows)).text and reason in judge(list(windows)).text


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_reads_that_come_in_bursts_make_a_slow_loader(ranks: int) -> None:
    from tracking.stragglers import STEP, WAIT

    windows = make_windows(ranks)
    for column in (WAIT, STEP):
        windows[::3, :, column] += 5.0
    assert finding(windows) == ("slow loader", None)


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_a_slow_store_makes_no_straggler(ranks: int) -> None:
    from tracking.stragglers import WAIT

    windows = make_windows(ranks)
    for number, window in enumerate(windows):
        window[number % ranks, WAIT] = 2.0
    assert finding(windows) == ("slow loader", None)
    windows = make_windows(ranks, wait=2.0, noise=0.1)  # and so does one that is slow for all alike
    assert finding(windows) == ("slow loader", None)
    windows[:, 0, WAIT] *= 1.5  # always the longest, but the others wait, too
    assert finding(windows) == ("slow loader", None)


@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_nothing_is_said_of_noise_or_of_ranks_that_are_all_slow(ranks: int) -> None:
    windows = make_windows(ranks, noise=0.1, count=300)
    for end in range(len(windows)):
        assert finding(windows[: end + 1]) == ("nothing", None)
    assert finding(make_windows(ranks, forward=100.0, noise=0.1)) == ("nothing", None)


def test_one_rank_may_wait_for_its_loader() -> None:
    assert finding(make_windows(1, wait=2.0)) == ("slow loader", None)


def test_one_window_or_a_tiny_difference_names_nobody() -> None:
    from tracking.stragglers import FORWARD, STEP, WAIT

    windows = make_windows(4)
    windows[-1, 2, FORWARD] *= 50
    assert finding(windows) == ("nothing", None)
    windows = make_windows(4)
    windows[-1, :, [WAIT, STEP]] += 60.0  # one read that had to be repeated
    assert finding(windows) == ("nothing", None)
    windows = make_windows(4, wait=0.001)
    windows[:, 2, WAIT] *= 20  # of a step that takes 2 s
    assert finding(windows) == ("nothing", None)


def test_a_verdict_is_printed_when_it_changes_and_written_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracking.step_times import StepTimes
    from tracking.stragglers import Verdict

    times = StepTimes(tmp_path, 6, None)
    slow = [Verdict("straggler", 1, f"rank 1 is slow, {number}") for number in range(2)]
    for step, verdict in enumerate([Verdict(), *slow, Verdict()]):
        times.tell(verdict, step)
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert printed == [f"note: step 1: {slow[0].text}", f"note: step 3: {Verdict().text}"]
    assert [line["rank"] for line in verdicts(tmp_path)] == [None, 1, 1, None]


def test_verdicts_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    from tracking.step_times import delete_lines_after

    path = tmp_path / "tracking.jsonl"
    delete_lines_after(path, 0)  # there is none yet
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')  # killed as it wrote
    delete_lines_after(path, 2)
    assert [line["step"] for line in verdicts(tmp_path)] == [1, 2]


# --------------------------------------------------------------------------------- real runs


def test_two_ranks_log_their_times_and_a_resumed_curve_has_each_step_once(
    local: list[str], tmp_path: Path
) -> None:
    flags = [*local, "--output-dir", tmp_path]
    planted = {0: {"kill_at_step": 5}}
    killed = programs.run_ranks(SCRIPT, 2, *SMALL, *flags, planted=planted, wait_for_writes=True)
    assert [one.code for one in killed] == [-9, 1], programs.printed(killed)
    run_two_ranks(*flags)

    log = [row for row in rows(tmp_path / "resumed_at_4/metrics.csv") if row["loss"]]
    assert [int(row["step"]) for row in log] == [4, 5]
    first, second = log  # the first step of a start is not timed
    names = ("data_wait_seconds/rank_{}", "forward_seconds/rank_{}", "step_seconds/rank_{}")
    per_rank = {name.format(rank) for name in names for rank in (0, 1)}
    of_run = {"samples_per_second", "data_wait_share", "peak_memory_gb", "gradient_norm"}
    for name in per_rank | of_run:
        assert not first[name]
        assert float(second[name]) > 0
    assert [step for step, _ in curve(tmp_path, "loss")] == list(range(6))
    for name in (per_rank | of_run) - {"gradient_norm"}:
        assert [step for step, _ in curve(tmp_path, name)] == [1, 2, 3, 5], name
    assert [step for step, _ in curve(tmp_path, "lr-AdamW")] == list(range(6))


def test_the_gradient_norm_is_that_of_the_gradients_that_are_applied(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import train

    applied, step = [], torch.optim.AdamW.step

    def note_norm(self, closure=None):
        def compute():
            loss = closure()
            weights = [weight for group in self.param_groups for weight in group["params"]]
            applied.append(torch.nn.utils.get_total_norm([weight.grad for weight in weights]).item())
            return loss

        return step(self, compute)

    monkeypatch.setattr(torch.optim.AdamW, "step", note_norm)
    flags = ["--max-steps", "3", "--loggers", "CSVLogger", "--accumulate-grad-batches", "2"]
    train.main([*SMALL, *local, *flags, "--output-dir", str(tmp_path)])
    logged = [row["gradient_norm"] for row in rows(tmp_path / "metrics.csv") if row["loss"]]
    assert [float(norm) for norm in logged[1:]] == pytest.approx(applied[1:], rel=1e-5)
    assert not (tmp_path / "tensorboard").exists()
    assert len(losses(tmp_path)) == 3


@pytest.mark.parametrize("name, reason", [("NoLogger", "CSVLogger"), ("WandbLogger", "uv add wandb")])
def test_a_logger_that_is_not_there_is_refused(
    name: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import options
    import train

    monkeypatch.setattr(options, "find_spec", lambda package: package != "wandb" or None)
    with pytest.raises(SystemExit) as ended:
        train.main(["--loggers", "CSVLogger", name, "--output-dir", str(tmp_path)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--loggers" in last and name in last and reason in last, last


def test_every_logger_of_lightning_may_be_given() -> None:
    from lightning.pytorch import loggers
    from options import LOGGERS

    assert LOGGERS.keys() == set(loggers.__all__) - {"Logger"}


@thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault, doing", [("slow_forward", "computes"), ("slow_loader", "waits for data")])
def test_a_slow_rank_is_named_with_what_is_slow(
    fault: str, doing: str, rank: int, local: list[str], tmp_path: Path
) -> None:
    planted = {rank: {fault: 0.5}}  # ten times as long as usual
    done = run_two_ranks(*local, *LONG, "--output-dir", tmp_path, planted=planted)
    last = verdicts(tmp_path)[-1]
    assert (last["finding"], last["rank"]) == ("straggler", rank), verdicts(tmp_path)
    assert done[0].out.count(f"rank {rank} {doing}") == 1, done[0].out
    assert "note:" not in done[1].out


@thorough
def test_a_slow_store_has_no_straggler(folder: Path, tmp_path: Path) -> None:
    with buckets.serving(folder, latency_ms=500) as address:
        store = ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]
        run_two_ranks(*store, *LONG, "--output-dir", tmp_path)
    findings = [line["finding"] for line in verdicts(tmp_path)]
    assert "straggler" not in findings
    assert "slow loader" in findings, verdicts(tmp_path)
