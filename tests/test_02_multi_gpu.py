"""Chapter 2: one, two and three processes give the same result, and every way in which they would not."""

import csv
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import torch
from test_01_setup import check_summary, load, weights
from torch import distributed

CHAPTER = book.ROOT / "02_multi_gpu"
README = CHAPTER / "README.md"
LIGHTNING, BY_HAND = "02_multi_gpu/train.py", "02_multi_gpu/train_ddp_by_hand.py"
SCRIPTS = [LIGHTNING, BY_HAND]
PROGRAMS = [*SCRIPTS, *(f"02_multi_gpu/{name}.py" for name in ("scaling", "predict_scaling", "wrong_ways"))]
SMALL = "--patch-size 16 --batch-size 12 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()
TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}  # of weights after 7 steps of AdamW; see the walkthrough

chapter = load(LIGHTNING, "chapter_02_train")


def train(script: str, ranks: int, folder: Path, *flags: object, **options) -> list[programs.Run]:
    """Train on some ranks; fail with what they printed unless all of them succeed."""
    done = programs.run_ranks(script, ranks, *SMALL, "--output-dir", folder, *flags, **options)
    assert [getattr(one, "code", one) for one in done] == [0] * ranks, done
    return done


def losses(folder: Path) -> list[float]:
    """The loss of each step, from the log of rank 0."""
    path = folder / "metrics.csv"
    with open(path if path.exists() else folder / "metrics_rank_0.csv", newline="") as log:
        return [float(row["loss"]) for row in csv.DictReader(log) if row["loss"]]


def rmse(folder: Path) -> float:
    return json.loads((folder / "summary.json").read_text())["rmse"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Undisturbed runs of each script on 1, 2 and 3 ranks."""
    folders = {}
    for script in SCRIPTS:
        for ranks in (1, 2, 3):
            folders[script, ranks] = tmp_path_factory.mktemp(f"{Path(script).stem}_{ranks}")
            train(script, ranks, folders[script, ranks])
    return folders


# ------------------------------------------------------------------------------ the same result


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_several_ranks_end_at_the_weights_of_one(script: str, ranks: int, whole: dict) -> None:
    one, several = whole[script, 1], whole[script, ranks]
    np.testing.assert_allclose(losses(several), losses(one), rtol=1e-5)
    torch.testing.assert_close(weights(several), weights(one), **TOLERANCE)
    assert rmse(several) == pytest.approx(rmse(one), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_accumulation_changes_nothing(script: str, ranks: int, whole: dict, tmp_path: Path) -> None:
    train(script, ranks, tmp_path, "--accumulate", 3)
    one = whole[script, 1]
    np.testing.assert_allclose(losses(tmp_path), losses(one), rtol=1e-5)
    torch.testing.assert_close(weights(tmp_path), weights(one), **TOLERANCE)
    assert rmse(tmp_path) == pytest.approx(rmse(one), rel=1e-6)


def test_the_two_scripts_agree(whole: dict) -> None:
    for ranks in (1, 2, 3):
        one, other = whole[LIGHTNING, ranks], whole[BY_HAND, ranks]
        np.testing.assert_allclose(losses(one), losses(other), rtol=1e-5)
        torch.testing.assert_close(weights(one), weights(other), **TOLERANCE)
        assert rmse(one) == pytest.approx(rmse(other), rel=1e-6)


# ------------------------------------------------------------------------------ killed and resumed


def assert_same_bits(one: Path, other: Path) -> None:
    """The last checkpoints of two runs agree to the bit, optimizer and schedule included."""
    first, second = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (one, other))
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)
    for name in ("optimizer", "schedule", "optimizer_states", "lr_schedulers"):
        assert repr(first.get(name)) == repr(second.get(name))
    assert rmse(one) == rmse(other)


# Chapter 1 kills its scripts at each step; here the two share them.
KILLS = [(SCRIPTS[step % 2], step) for step in range(7)]


@pytest.mark.parametrize(("script", "step"), KILLS)
def test_killed_on_two_ranks_and_resumed_to_the_bit(
    script: str, step: int, tmp_path: Path, whole: dict
) -> None:
    flags, guilty = [*SMALL, "--output-dir", tmp_path], step // 2 % 2
    killed = programs.run_ranks(script, 2, *flags, faults={guilty: {"kill_at_step": step}})
    assert killed[guilty].code == -9
    other = killed[1 - guilty]
    assert other.code == 1
    assert re.search(rf"error: rank {1 - guilty} has lost another rank: .*--resume goes on\n", other.err)
    assert "Traceback" not in other.err
    train(script, 2, tmp_path, "--resume", "--num-workers", 1 if step == 3 else 0)
    assert_same_bits(tmp_path, whole[script, 2])


@pytest.mark.parametrize(("before", "after", "accumulate"), [(2, 1, 2), (1, 2, 1), (3, 2, 3), (2, 3, 1)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_on_another_number_of_ranks(
    script: str, before: int, after: int, accumulate: int, tmp_path: Path, whole: dict
) -> None:
    faults = {rank: {"kill_at_step": 5} for rank in range(before)}
    killed = programs.run_ranks(script, before, *SMALL, "--output-dir", tmp_path, faults=faults)
    assert [one.code for one in killed] == [-9] * before
    train(script, after, tmp_path, "--resume", "--accumulate", accumulate)
    torch.testing.assert_close(weights(tmp_path), weights(whole[script, 1]), **TOLERANCE)
    assert rmse(tmp_path) == pytest.approx(rmse(whole[script, 1]), rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_ranks_resume_to_the_bit_because_the_buckets_are_settled(
    script: str, tmp_path: Path, whole: dict
) -> None:
    settle = "settle_buckets(self.trainer.strategy.model)" if script == LIGHTNING else "settle_buckets(model)"
    kill = {1: {"kill_at_step": 5}}
    programs.run_ranks(script, 3, *SMALL, "--output-dir", tmp_path / "with", faults=kill)
    train(script, 3, tmp_path / "with", "--resume")
    assert_same_bits(tmp_path / "with", whole[script, 3])
    if script == BY_HAND:  # and the effect without it
        without = {rank: {"without": settle} for rank in range(3)}
        train(script, 3, tmp_path / "whole", faults=without)
        kill = {rank: fault | ({"kill_at_step": 5} if rank == 1 else {}) for rank, fault in without.items()}
        programs.run_ranks(script, 3, *SMALL, "--output-dir", tmp_path / "without", faults=kill)
        train(script, 3, tmp_path / "without", "--resume", faults=without)
        with pytest.raises(AssertionError, match="not equal"):
            assert_same_bits(tmp_path / "without", tmp_path / "whole")


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("script", SCRIPTS)
def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(
    script: str, guilty: int, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    stopped = programs.run_ranks(script, 2, *flags, faults={guilty: {"terminate_at_step": 3}})
    assert [one.code for one in stopped] == [143, 143]
    said = re.findall(r"stopped by a signal after step (\d); --resume goes on", stopped[0].err)
    # It came in step 3. Lightning computes within optimizer.step, so that rank still tells the others there.
    step = 4 if script == LIGHTNING else 5
    assert said == [str(step)]
    assert "Traceback" not in stopped[0].err + stopped[1].err
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved.get("step", saved.get("global_step")) == step
    train(script, 2, tmp_path, "--resume")
    assert_same_bits(tmp_path, whole[script, 2])


@pytest.mark.parametrize("fault", ["stall_at_step", "stall_at_fetch"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rank_that_stalls_is_noticed_and_found(script: str, fault: str, tmp_path: Path) -> None:
    """Rank 1 stalls: rank 0 ends in bounded time, and what both have left behind says who is guilty."""
    flags = [*SMALL, "--timeout", 4, "--output-dir", tmp_path]
    other, stalled = programs.run_ranks(script, 2, *flags, faults={1: {fault: 2}}, timeout=16)
    assert other.code == 1
    assert "error: rank 0 has lost another rank" in other.err
    assert isinstance(stalled, TimeoutError)  # it sleeps until it is killed
    innocent, guilty = ((tmp_path / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1))
    assert re.search(r"in (all_reduce|_engine_run_backward|backward)\n", innocent)
    assert "in _stall" in guilty
    assert "in _stall" not in innocent
    if script == BY_HAND:
        lines = [(tmp_path / f"metrics_rank_{rank}.csv").read_text().splitlines()[-1] for rank in (0, 1)]
        steps = ["3", "2"] if fault == "stall_at_step" else ["2", "1"]
        assert [line.partition(",")[0] for line in lines] == steps  # the guilty one is behind
        begun = [line.count(",") == 2 for line in lines]
        assert begun == [True, fault == "stall_at_step"]  # an incomplete line: in the step


def test_resume_auto_starts_anew_or_goes_on(tmp_path: Path, whole: dict) -> None:
    faults = {0: {"kill_at_step": 5}}
    programs.run_ranks(LIGHTNING, 2, *SMALL, "--resume", "auto", "--output-dir", tmp_path, faults=faults)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    train(LIGHTNING, 2, tmp_path, "--resume", "auto")
    assert (tmp_path / "resumed_at_3/metrics.csv").exists()
    assert_same_bits(tmp_path, whole[LIGHTNING, 2])


def test_ranks_that_find_different_checkpoints_refuse_to_train(tmp_path: Path, whole: dict) -> None:
    """As on two nodes whose --output-dir is not shared: rank 0 finds nothing, rank 1 a checkpoint."""
    folders = {rank: tmp_path / f"node_{rank}" for rank in (0, 1)}
    shutil.copytree(whole[LIGHTNING, 2], folders[1])  # finished, even
    before = (folders[1] / "last.ckpt").read_bytes()
    flags = {rank: ["--output-dir", folder] for rank, folder in folders.items()}
    done = programs.run_ranks(LIGHTNING, 2, *SMALL, "--resume", "auto", flags=flags)
    assert [one.code for one in done] == [2, 2]
    assert "error: --resume: the ranks found steps [0, 7]; put --output-dir on a shared disk" in done[0].err
    assert not (folders[0] / "configuration.json").exists()
    assert (folders[1] / "last.ckpt").read_bytes() == before


def test_the_noise_of_the_samples_reaches_the_network(tmp_path: Path) -> None:
    """Without it, ranks would agree all the same: dropout would be off, or drawn by each rank for itself."""
    args = chapter.parse_arguments(SMALL)
    data = chapter.WindData(args)
    model = chapter.WindFill(chapter.describe(args, data.training), [], [1.0])
    batch = {name: torch.from_numpy(part)[None] for name, part in data.training[0, 0].items()}
    with_noise, again = (model.training_step(batch, 0).item() for _ in range(2))
    assert with_noise == again  # nothing random is left
    assert model.training_step(batch | {"noise": torch.ones_like(batch["noise"])}, 0).item() != with_noise
    by_hand = load(BY_HAND, "chapter_02_by_hand")
    losses = []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for noise in (batch["noise"], torch.ones_like(batch["noise"])):
            torch.manual_seed(0)
            network = torch.nn.parallel.DistributedDataParallel(by_hand.UNet())
            optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
            batches = [batch | {"noise": noise}]
            losses.append(by_hand.train_step(network, optimizer, schedule, batches, 0, 0, False)[0])
    finally:
        distributed.destroy_process_group()
    assert losses[0] != losses[1]


# --------------------------------------------------------------------------------------- wrong ways


@pytest.fixture(scope="module")
def ways() -> dict[str, dict]:
    """What wrong_ways.py finds on this machine, by way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))
        wrong_ways = importlib.import_module("wrong_ways")
        return {row["way"]: row for row in wrong_ways.main([])}


GRADIENTS = {"mean_of_means": 0.005, "accumulated_mean_of_means": 0.005, "batch_norm": 0.02}


@pytest.mark.parametrize("way", GRADIENTS)
def test_the_gradient_of_two_ranks_is_that_of_one_only_the_right_way(way: str, ways: dict) -> None:
    assert ways[way]["right"] < 1e-6
    assert ways[way]["wrong"] > GRADIENTS[way]
    assert ways[way].get("wrong in patches of 16 x 16", 1) > 0.05


@pytest.mark.parametrize("way", ["metric", "padded_validation", "batch_norm_buffers"])
def test_a_figure_is_the_truth_only_the_right_way(way: str, ways: dict) -> None:
    row = ways[way]
    assert row["right"] == pytest.approx(row["truth"], rel=1e-2 if way == "batch_norm_buffers" else 1e-9)
    assert abs(row["wrong"] / row["truth"] - 1) > 0.005
    assert way != "metric" or abs(row["mean of the ranks'"] / row["truth"] - 1) > 0.001


COUNTS = {
    "dropout": 4,
    "batch_per_device": 100,
    "forgotten_set_epoch": 1,
    "frozen_generator": 4,
    "iterable_copied": 64,
    "drop_last": 64,
    "schedule_per_epoch": 0.1,
}


@pytest.mark.parametrize("way", COUNTS)
def test_a_count_is_the_truth_only_the_right_way(way: str, ways: dict) -> None:
    assert (ways[way]["wrong"], ways[way]["right"]) == (COUNTS[way], ways[way]["truth"])


HANGS = {
    "collective_on_rank_0": "hangs",
    "unequal_batches": "hangs",
    "unused_parameters": "Expected to have finished reduction in the prior iteration before starting a new one",
}


@pytest.mark.parametrize("way", HANGS)
def test_a_run_ends_only_the_right_way(way: str, ways: dict) -> None:
    assert (ways[way]["wrong"], ways[way]["right"]) == (HANGS[way], "ends")


def test_every_wrong_way_is_tested(ways: dict) -> None:
    figures = {"metric", "padded_validation", "batch_norm_buffers"}
    assert set(ways) == {*GRADIENTS, *figures, *COUNTS, *HANGS}


def test_the_committed_wrong_ways_are_these(ways: dict) -> None:
    for row in book.results("02_multi_gpu/results/wrong_ways.json")["rows"]:
        found = ways[row["way"]]
        assert row["why"] == found["why"]
        for name in ("wrong", "right", "truth"):
            if isinstance(row.get(name), float) and row[name] > 1e-3:
                assert found[name] == pytest.approx(row[name], rel=1e-3)


# ------------------------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def scaling():
    """The module scaling.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))  # for the processes that it spawns, too
        yield importlib.import_module("scaling")


@pytest.fixture(scope="module")
def measured(scaling) -> dict[str, list[dict]]:
    """What scaling.py's quick studies find on this machine in a few steps."""
    studies = ["scaling", "allreduce", "options", "timeline"]
    return scaling.main(
        [
            *studies,
            "--devices",
            "2",
            "--device-batch",
            "2",
            "--steps",
            "5",
            "--repeats",
            "2",
            "--accelerator",
            "cpu",
        ]
    )


def test_scaling_measures_weak_and_strong_and_a_fair_rival(measured: dict) -> None:
    rows = {(row["mode"], row["devices"]): row for row in measured["scaling"]}
    assert [rows["weak", n]["global_batch"] for n in (1, 2)] == [2, 4]
    assert [rows["strong", n]["global_batch"] for n in (1, 2)] == [2, 2]
    assert rows["one process, as many threads", 1]["threads"] == 2
    for row in rows.values():
        stretches = [row["steps"][:5], row["steps"][5:]]
        rates = sorted(row["global_batch"] / np.median(stretch) for stretch in stretches)
        found = [row["samples_per_second"][name] for name in ("min", "max")]
        assert found == pytest.approx(rates, rel=1e-4)


def test_a_large_all_reduce_takes_longer_than_a_small_one(measured: dict) -> None:
    seconds = [row["seconds"]["median"] for row in measured["allreduce"]]
    assert seconds[-1] > 3 * seconds[0]


def test_compression_sends_fewer_bytes(measured: dict) -> None:
    sent = {row["option"]: row.get("bytes_per_step") for row in measured["options"]}
    whole = measured["scaling"][0]["gradient_bytes"]
    assert (sent["hook: no compression"], sent["hook: bf16"]) == (whole, whole // 2)
    assert sent["hook: PowerSGD, rank 2"] < whole / 10


def test_gradients_are_rounded_within_the_promise_only_without_onednn(scaling) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.setenv(name, "0")
        error = {(row["convolutions"], row["parts"]): row["error"] for row in scaling.rounding(None)}
    assert max(error["plain", 1], error["plain", 2]) < 1e-6 < error["oneDNN", 1]
    assert error["double", 2] < 1e-13


def test_a_straggler_holds_up_the_other_rank(measured: dict) -> None:
    def length(straggler: bool) -> float:
        rows = [row for row in measured["timeline"] if (row["rank"], row["straggler"]) == (0, straggler)]
        return np.median([row["optimizer"] for row in rows])

    assert length(True) > length(False) + 0.03  # rank 1 is 0.05 s late


def test_the_committed_scaling_is_of_this_script(scaling) -> None:
    rows = book.results("02_multi_gpu/results/scaling.json")["rows"]
    weak = next(row for row in rows if (row["mode"], row["devices"], row["threads"]) == ("weak", 2, 1))
    assert weak["efficiency"] == scaling.efficiency(weak, rows)
    commands = book.results("02_multi_gpu/results/commands.json")["rows"]
    assert {(row["script"], row["devices"]) for row in commands} == {
        (Path(script).name, devices) for script in SCRIPTS for devices in (1, 2)
    }
    assert max(row["wall_seconds"]["max"] for row in commands) < 90


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["speed"], "speed: no such study; choose from scaling, allreduce, "),
        (["--devices", 999, "--accelerator", "cpu"], f"--devices 999: there are {os.cpu_count()} cores"),
        (["--devices", 2, "--device-batch", 9], "--device-batch 9: 2 devices do not divide it"),
    ],
)
def test_scaling_refuses_what_it_cannot_measure(flags: list, message: str) -> None:
    done = programs.run("02_multi_gpu/scaling.py", *flags)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"scaling.py: error: {message}.*\n", done.err), done.err


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute(CHAPTER / "notebook.ipynb", {"MAX_STEPS": 4}, timeout=600)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert re.findall(r"(\d process\w*)\nRMSE over the unseen cells", printed) == ["1 process", "2 processes"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7


# ------------------------------------------------------------------------------------- as a reader runs it


def test_the_readers_command_on_two_devices_ends_in_90_seconds(tmp_path: Path) -> None:
    command = "uv run python train.py --devices 2"
    assert command in book.commands(README)
    began = time.perf_counter()
    arguments = [sys.executable, "train.py", "--devices", "2", "--output-dir", tmp_path]
    done = subprocess.run(arguments, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert programs.in_time(time.perf_counter() - began, 90)
    check_summary(done.stdout)
    climatology = json.loads((tmp_path / "summary.json").read_text())["climatology"]
    assert rmse(tmp_path) < 0.8 * climatology
    assert "warning" not in done.stderr.lower()


def test_torchrun_starts_both_scripts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for script in SCRIPTS:
        folder = tmp_path / Path(script).stem
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, Path(script).name, *SMALL, "--output-dir", folder]
        done = subprocess.run(
            command, cwd=CHAPTER, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("RMSE over the unseen cells") == 1  # from rank 0 alone
        assert not list(folder.glob("part-*"))


def test_under_slurms_environment_two_tasks_make_two_ranks(tmp_path: Path, whole: dict) -> None:
    port, folder = str(programs.free_port()), tmp_path
    tasks = []
    for task in range(2):
        slurm = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "PROCID": task, "LOCALID": task, "NODEID": 0}
        slurm |= {"JOB_ID": 7, "JOB_NAME": "train", "NODELIST": "127.0.0.1"}
        environment = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        environment |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        tasks.append(programs.Program(LIGHTNING, *SMALL, "--output-dir", folder, environment=environment))
    done = [task.wait(120) for task in tasks]
    assert [one.code for one in done] == [0, 0], [one.err for one in done]
    assert_same_bits(folder, whole[LIGHTNING, 2])


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_of_every_program(program: str) -> None:
    assert "usage" in programs.require_success(program, "--help").out


# ----------------------------------------------------------------------------------------- bad input

CORES = os.cpu_count()
BAD_INPUT = {
    "more devices than there are": (
        ["--devices", CORES + 1],
        rf"--devices {CORES + 1}: there are {CORES} cores",
    ),
    "a batch that ranks do not divide": (
        ["--devices", 2, "--batch-size", 9],
        "--batch-size 9: 2 ranks x 1 micro-batches do not divide it; give a multiple",
    ),
    "a batch that micro-batches do not divide": (
        ["--accumulate", 5],
        "--batch-size 8: 1 ranks x 5 micro-batches do not divide it; give a multiple",
    ),
    "no micro-batch": (["--accumulate", 0], "--accumulate 0: too small; give at least 1"),
    "an unknown rule": (["--learning-rate-rule", "cubic"], "--learning-rate-rule: invalid choice: 'cubic'"),
    "no checkpoint": (["--resume"], r"--resume \S+last.ckpt: no such file"),
    "patient for ever": (["--timeout", 10**14], rf"--timeout {10**14}: too large; give below 2\*\*32"),
    "no device": (["--devices", 0], "--devices 0: too small; give at least 1"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    flags, message = BAD_INPUT[case]
    done = programs.run(LIGHTNING, "--output-dir", tmp_path / "run", *flags)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"train.py: error: {message}.*\n", done.err), done.err
    assert list(tmp_path.iterdir()) == []


def test_flags_that_contradict_the_launcher_are_refused_in_one_line(tmp_path: Path) -> None:
    done = programs.run_ranks(LIGHTNING, 2, "--devices", 1, "--output-dir", tmp_path / "run")
    assert [one.code for one in done] == [2, 2]
    message = "train.py: error: --devices 1: torchrun has started 2; leave --devices out\n"
    assert [one.err for one in done] == [message, ""]


def test_the_script_by_hand_says_how_to_start_it(tmp_path: Path) -> None:
    done = programs.run(BY_HAND, "--output-dir", tmp_path / "run")
    assert done.code == 2
    assert done.err == (
        "train_ddp_by_hand.py: error: start it with torchrun --nproc-per-node N, where N is the number of processes\n"
    )


def alone(tmp_path: Path, port: int, *flags: object) -> programs.Run:
    """The first of two nodes that never meet."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    flags = [*SMALL, "--devices", 1, "--num-nodes", 2, "--output-dir", tmp_path / "run", *flags]
    return programs.run(LIGHTNING, *flags, environment=environment)


def test_a_rendezvous_that_nobody_joins_ends_in_bounded_time(tmp_path: Path) -> None:
    port = programs.free_port()
    began = time.perf_counter()
    done = alone(tmp_path, port, "--timeout", 3)
    assert time.perf_counter() - began < 30
    assert done.code == 2
    message = f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: not all ranks came in time"
    assert re.fullmatch(rf"train.py: error: {message}; .*\n", done.err), done.err
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = alone(tmp_path, port)
    assert done.code == 2
    assert done.err == (
        f"train.py: error: MASTER_PORT {port}: another program listens there; set it to a free port\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_slurm_without_tasks_per_node_is_explained(tmp_path: Path) -> None:
    environment = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    done = programs.run(LIGHTNING, "--output-dir", tmp_path / "run", environment=environment)
    assert done.code == 2
    assert done.err.startswith(
        "train.py: error: --ntasks-per-node: give it to sbatch or srun, one task for each"
    )
    assert done.err.count("\n") == 1


def test_more_ranks_than_validation_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(chapter.InputError, match="97 ranks: give at most 96, one a validation sample"):
        chapter.parse_arguments(["--accelerator", "cpu", "--num-nodes", "97", "--batch-size", "97"])


def test_nodes_without_an_address_to_meet_at_are_refused(tmp_path: Path) -> None:
    done = programs.run(LIGHTNING, "--num-nodes", 2, "--output-dir", tmp_path / "run")
    assert done.code == 2
    assert re.fullmatch(r"train.py: error: --num-nodes 2: .*MASTER_ADDR.*\n", done.err), done.err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_nan_stops_all_ranks_with_one_line(script: str, tmp_path: Path) -> None:
    flags = [*SMALL, "--learning-rate", 1e9, "--output-dir", tmp_path]
    done = programs.run_ranks(script, 2, *flags)
    assert [one.code for one in done] == [2, 2]
    said = [re.findall(r"error: step \d: loss (?:nan|inf) in the batch of seed 0", one.err) for one in done]
    assert [len(lines) for lines in said] == [1, 0]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(
    script: str, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    programs.run_ranks(script, 2, *flags, faults={0: {"kill_at_step": 4}})
    before = (tmp_path / "last.ckpt").read_bytes()
    done = programs.run_ranks(script, 2, *flags, "--resume", faults={0: {"file_size": 1_000_000}}, timeout=40)
    assert [one.code for one in done] == [2, 1]
    assert re.search(r"error: --output-dir \S+: cannot write last.ckpt .*make room", done[0].err)
    assert "Traceback" not in done[0].err + done[1].err
    assert (tmp_path / "last.ckpt").read_bytes() == before
    train(script, 2, tmp_path, "--resume")
    assert_same_bits(tmp_path, whole[script, 2])
