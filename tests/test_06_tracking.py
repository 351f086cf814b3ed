"""Chapter 6: what a run writes down about itself: its record, by which it is repeated, and the times of each rank."""

import csv
import json
import shutil
from itertools import pairwise
from pathlib import Path

import book
import buckets
import programs
import pytest
import torch
import xarray as xr
from chapter_6 import SCRIPT, SMALL, folder, local  # noqa: F401
from plan import __main__ as plan
from runs import assert_same_bits, last_checkpoint, summary, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracking import run_record

pytestmark = pytest.mark.usefixtures("quick_programs")
thorough = pytest.mark.thorough
SIX = [*SMALL, "--max-steps", 6]
LONG = [*SMALL, *"--max-steps 24 --validate-every 24 --checkpoint-every 24".split()]  # windows for a verdict


def run_two_ranks(*flags: object, **options: object) -> list[programs.Run]:
    """Run the script on two ranks, which must succeed."""
    done = programs.run_ranks(SCRIPT, 2, *flags, **options)
    assert [getattr(one, "code", None) for one in done] == [0, 0], programs.printed(done)
    return done


def verdicts(run: Path) -> list[dict]:
    """What a run has judged, one line for each window."""
    return [json.loads(line) for line in (run / "tracking.jsonl").read_text().splitlines()]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as log:
        return list(csv.DictReader(log))


# --------------------------------------------------------------------------------------- a run of four steps


@pytest.fixture(scope="module")
def finished(local: list[str], tmp_path_factory: pytest.TempPathFactory, quick_programs) -> Path:
    """The folder of a run of four steps of three micro-batches, which saves whenever it may."""
    run = tmp_path_factory.mktemp("run")
    flags = (
        "--max-steps 4 --validate-every 2 --seed 3 --learning-rate 0.004 --accumulate-grad-batches 3".split()
    )
    flags += "--checkpoint-every 100 --checkpoint-minutes 1e-9 --keep 100 --no-count-requests".split()
    flags += ["--full-validation-patches", 24, "--loggers", "CSVLogger"]  # 24 are those of every validation
    programs.require_success(SCRIPT, *SMALL, *local, *flags, "--output-dir", run, wait_for_writes=True)
    return run


def test_a_run_is_repeated_from_its_record_alone_to_the_bit(finished: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    programs.require_success(SCRIPT, "--config", finished / "options.json", "--output-dir", again)
    assert_same_bits(again, finished)


def test_a_run_is_repeated_from_its_checkpoint_alone(finished: Path, tmp_path: Path) -> None:
    """The options that are read from a checkpoint are those of the run."""
    saved = last_checkpoint(finished)
    run_record.main([str(saved), "--save-options", str(tmp_path / "options.json")])
    assert (tmp_path / "options.json").read_bytes() == (finished / "options.json").read_bytes()
    record = json.loads((finished / "record.json").read_text())
    assert torch.load(saved, weights_only=True)["callbacks"]["RunRecord"] == record
    assert (record["options"]["seed"], record["options"]["learning_rate"]) == (3, 0.004)


def test_minutes_may_decide_when_to_save_and_never_between_micro_batches(finished: Path) -> None:
    progress = {}
    for path in finished.glob("checkpoints/step_*"):
        saved = torch.load(path, weights_only=True)
        batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        progress[path.name] = (saved["global_step"], batches)
    assert progress == {f"step_{step:08}.ckpt": (step, 3 * step) for step in range(1, 5)}


def test_the_rmse_in_full_is_that_of_the_few_if_they_are_all(finished: Path) -> None:
    log = rows(finished / "metrics.csv")
    few, full = ([row[name] for row in log if row[name]] for name in ("rmse (m/s)", "full rmse (m/s)"))
    assert len(few) == 2
    best = few[: len(full)]
    assert [float(value) for value in full] == pytest.approx([float(value) for value in best], rel=1e-6)


def test_the_gradient_norm_is_that_of_the_gradients_that_are_applied(finished: Path) -> None:
    """AdamW's moments, from one step to the next, say what these were."""
    moments = []
    for step in range(1, 5):
        saved = torch.load(finished / f"checkpoints/step_{step:08}.ckpt", weights_only=True)
        [optimizer] = saved["optimizer_states"]
        kept = optimizer["param_groups"][0]["betas"][0]
        each = optimizer["state"].values()
        moments.append(torch.cat([weight["exp_avg"].flatten().double() for weight in each]))
    applied = [(now - kept * before).norm().item() / (1 - kept) for before, now in pairwise(moments)]
    logged = [row["gradient_norm"] for row in rows(finished / "metrics.csv") if row["loss"]]
    assert [float(norm) for norm in logged[1:]] == pytest.approx(applied, rel=1e-5)


def test_the_folder_of_a_finished_run_is_all_that_a_plan_needs(finished: Path) -> None:
    prices = ["--prices", str(book.ROOT / "06_whats_next/prices.toml")]
    plans = plan.main([str(finished), *"--device cpu --samples 1e6 --devices 1".split(), *prices])
    rate = summary(finished)["samples_per_second"]
    assert [one.rate for one in plans] == [pytest.approx(rate, rel=1e-6)] * 2


def test_a_run_does_not_go_on_with_other_data(finished: Path, local: list[str], tmp_path: Path) -> None:
    """The same options, and a store whose first training map has another value."""
    other = shutil.copytree(local[1], tmp_path / "other.zarr")
    name = "10m_u_component_of_wind"
    fields = xr.open_zarr(other)[[name]].isel(time=[0]).load()
    fields[name][0, 5, 5] += 1
    fields.drop_vars(["latitude", "longitude"]).drop_attrs().to_zarr(other, region="auto")
    before = weights(finished)
    flags = ["--config", finished / "options.json", "--store", other, "--output-dir", finished, "--resume"]
    done = programs.run(SCRIPT, *flags)
    assert done.code == 2, done.err
    assert "other values, times or another grid" in done.err.splitlines()[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(finished).items())


# --------------------------------------------------------------------------------------------- times


def test_two_ranks_log_their_times_and_a_resumed_curve_has_each_step_once(
    local: list[str], tmp_path: Path
) -> None:
    flags = [*SIX, *local, "--output-dir", tmp_path]
    planted = {0: {"kill_at_step": 5}}
    killed = programs.run_ranks(SCRIPT, 2, *flags, planted=planted, wait_for_writes=True)
    assert [one.code for one in killed] == [-9, 1], programs.printed(killed)
    with open(tmp_path / "tracking.jsonl", "a") as file:
        file.write('{"st')  # killed as it wrote
    run_two_ranks(*flags)

    log = [row for row in rows(tmp_path / "resumed_at_4/metrics.csv") if row["loss"]]
    assert [int(row["step"]) for row in log] == [4, 5]
    first, second = log  # the first step of a start is not timed
    names = ("data_wait_seconds/rank_{}", "forward_seconds/rank_{}", "step_seconds/rank_{}")
    of_all = {name.format(rank) for name in names for rank in (0, 1)}
    of_all |= {"samples_per_second", "data_wait_share", "peak_memory_gb"}
    for name in of_all | {"gradient_norm"}:
        assert not first[name]
        assert float(second[name]) > 0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert steps["loss"] == steps["lr-AdamW"] == list(range(6))
    assert all(steps[name] == [1, 2, 3, 5] for name in of_all), steps
    assert [line["step"] for line in verdicts(tmp_path)] == [2, 3, 4, 6]


@thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault, doing", [("slow_forward", "computes"), ("slow_loader", "waits for data")])
def test_a_slow_rank_is_named_with_what_is_slow(
    fault: str, doing: str, rank: int, local: list[str], tmp_path: Path
) -> None:
    planted = {rank: {fault: 0.5}}  # ten times as long as usual
    done = run_two_ranks(*LONG, *local, "--output-dir", tmp_path, planted=planted)
    last = verdicts(tmp_path)[-1]
    assert (last["finding"], last["rank"]) == ("straggler", rank), verdicts(tmp_path)
    assert done[0].out.count(f"rank {rank} {doing}") == 1, done[0].out
    assert "note:" not in done[1].out


@thorough
def test_a_slow_store_has_no_straggler(folder: Path, tmp_path: Path) -> None:
    with buckets.serving(folder, latency_ms=500) as address:
        store = ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]
        run_two_ranks(*LONG, *store, "--output-dir", tmp_path)
    findings = [line["finding"] for line in verdicts(tmp_path)]
    assert "straggler" not in findings
    assert "slow loader" in findings, verdicts(tmp_path)
