"""Chapter 2: one, two and three processes give the same result, and every way in which they would not."""

import os
import re
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import book
import numpy as np
import programs
import psutil
import pytest
import torch
from runs import (
    assert_resumed,
    assert_same_bits,
    check_summary,
    load,
    losses,
    losses_after,
    state,
    summary,
    weights,
)
from torch import distributed

CHAPTER = book.ROOT / "02_multi_gpu"
README = CHAPTER / "README.md"
LIGHTNING, BY_HAND = "02_multi_gpu/train.py", "02_multi_gpu/train_ddp_by_hand.py"
SCRIPTS = [LIGHTNING, BY_HAND]
SMALL = "--patch-size 16 --batch-size 12 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()
TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}  # of weights after 7 steps of AdamW; see the walkthrough

thorough = pytest.mark.thorough
chapter = load(LIGHTNING, "chapter_02_train")


def both(*gate: tuple) -> list:
    """Parameters (script, ...) that run in the gate; the thorough suite has the same with the other script."""
    other = {LIGHTNING: BY_HAND, BY_HAND: LIGHTNING}
    return [*gate, *(pytest.param(other[script], *more, marks=thorough) for script, *more in gate)]


def train(script: str, ranks: int, folder: Path, *flags: object, **options) -> list[programs.Run]:
    """Train on some ranks; fail with what they printed unless all of them succeed."""
    done = programs.run_ranks(script, ranks, *SMALL, "--output-dir", folder, *flags, **options)
    assert [getattr(one, "code", one) for one in done] == [0] * ranks, programs.printed(done)
    return done


def rmse(folder: Path) -> float:
    return summary(folder)["rmse"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """An undisturbed run of a script on some ranks, whole(script, ranks), made when it is first asked for."""

    @cache
    def run(script: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}_{ranks}")
        train(script, ranks, folder)
        return folder

    return run


# ------------------------------------------------------------------------------ the same result


def assert_same_but_for_rounding(one: Path, other: Path) -> None:
    """The same losses, weights and RMSE, added up in another order."""
    np.testing.assert_allclose(losses(one), losses(other), rtol=1e-5)
    torch.testing.assert_close(weights(one), weights(other), **TOLERANCE)
    assert rmse(one) == pytest.approx(rmse(other), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=thorough)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_several_ranks_end_at_the_weights_of_one(script: str, ranks: int, whole) -> None:
    assert_same_but_for_rounding(whole(script, ranks), whole(script, 1))


@pytest.mark.parametrize(("script", "ranks"), both((LIGHTNING, 2), (BY_HAND, 1)))
def test_accumulation_changes_nothing(script: str, ranks: int, whole, tmp_path: Path) -> None:
    train(script, ranks, tmp_path, "--accumulate", 3)
    assert_same_but_for_rounding(tmp_path, whole(script, 1))


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=thorough)])
def test_the_two_scripts_agree(ranks: int, whole) -> None:
    assert_same_but_for_rounding(whole(LIGHTNING, ranks), whole(BY_HAND, ranks))


# ------------------------------------------------------------------------------ killed and resumed


# Chapter 1 kills its scripts at each step; here the two share them.
KILLS = [(SCRIPTS[step % 2], step) for step in range(7)]
GATE = [KILLS[4], KILLS[3]]


@pytest.mark.parametrize(
    ("script", "step"), [*GATE, *(pytest.param(*kill, marks=thorough) for kill in KILLS if kill not in GATE)]
)
def test_killed_on_two_ranks_and_resumed_to_the_bit(script: str, step: int, tmp_path: Path, whole) -> None:
    flags, guilty = [*SMALL, "--output-dir", tmp_path], step // 2 % 2
    killed = programs.run_ranks(script, 2, *flags, planted={guilty: {"kill_at_step": step}})
    assert killed[guilty].code == -9
    assert killed[1 - guilty].code != 0
    train(script, 2, tmp_path, "--resume", "--num-workers", 1 if step in (3, 4) else 0)
    assert_same_bits(tmp_path, whole(script, 2))
    if step >= 3:
        assert_resumed(tmp_path, step // 3 * 3, whole(script, 2))


@thorough
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("script", SCRIPTS)
def test_who_survives_a_killed_rank_says_so_in_one_line(script: str, guilty: int, tmp_path: Path) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    killed = programs.run_ranks(script, 2, *flags, planted={guilty: {"kill_at_step": 2}})
    other = killed[1 - guilty]
    assert [killed[guilty].code, other.code] == [-9, 1]
    assert re.search(rf"error: rank {1 - guilty} has lost another rank: .*--resume goes on\n", other.err)
    assert "Traceback" not in other.err


@pytest.mark.parametrize(
    ("script", "before", "after", "accumulate"),
    [
        *both((LIGHTNING, 2, 1, 2), (BY_HAND, 1, 2, 1)),
        *(pytest.param(s, *n, marks=thorough) for s in SCRIPTS for n in ((3, 2, 3), (2, 3, 1))),
    ],
)
def test_killed_and_resumed_on_another_number_of_ranks(
    script: str, before: int, after: int, accumulate: int, tmp_path: Path, whole
) -> None:
    kill = {rank: {"kill_at_step": 5} for rank in range(before)}
    killed = programs.run_ranks(script, before, *SMALL, "--output-dir", tmp_path, planted=kill)
    assert [one.code for one in killed] == [-9] * before
    train(script, after, tmp_path, "--resume", "--accumulate", accumulate)
    torch.testing.assert_close(weights(tmp_path), weights(whole(script, 1)), **TOLERANCE)
    assert rmse(tmp_path) == pytest.approx(rmse(whole(script, 1)), rel=1e-6)
    assert len(losses_after(tmp_path, 3)) == 4


UNSETTLED = f"""
import sys
sys.path.insert(0, {str(CHAPTER)!r})
import train_ddp_by_hand as script
script.settle_buckets = lambda model: None
script.main()
"""


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_three_ranks_resume_to_the_bit_because_the_buckets_are_settled(
    script: str, tmp_path: Path, whole
) -> None:
    kill = {1: {"kill_at_step": 5}}
    killed = programs.run_ranks(script, 3, *SMALL, "--output-dir", tmp_path / "with", planted=kill)
    assert killed[1].code == -9
    train(script, 3, tmp_path / "with", "--resume")
    assert_same_bits(tmp_path / "with", whole(script, 3))
    if script == BY_HAND:  # and the effect without it
        unsettled = tmp_path / "unsettled.py"
        unsettled.write_text(UNSETTLED)
        train(unsettled, 3, tmp_path / "whole")
        killed = programs.run_ranks(unsettled, 3, *SMALL, "--output-dir", tmp_path / "without", planted=kill)
        assert killed[1].code == -9
        train(unsettled, 3, tmp_path / "without", "--resume")
        with pytest.raises(AssertionError, match="not equal"):
            assert_same_bits(tmp_path / "without", tmp_path / "whole")


@thorough
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("script", SCRIPTS)
def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(
    script: str, guilty: int, tmp_path: Path, whole
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    stopped = programs.run_ranks(script, 2, *flags, planted={guilty: {"terminate_at_step": 3}})
    assert [one.code for one in stopped] == [143, 143]
    said = re.findall(r"stopped by a signal after step (\d); --resume goes on", stopped[0].err)
    # It came in step 3. Lightning computes within optimizer.step, so that rank still tells the others there.
    step = 4 if script == LIGHTNING else 5
    assert said == [str(step)]
    assert "Traceback" not in stopped[0].err + stopped[1].err
    assert state(tmp_path)["step"] == step
    train(script, 2, tmp_path, "--resume")
    assert_same_bits(tmp_path, whole(script, 2))


@thorough
@pytest.mark.parametrize("fault", ["stall_at_step", "stall_at_fetch"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rank_that_stalls_is_noticed_and_found(script: str, fault: str, tmp_path: Path) -> None:
    """Rank 1 stalls: rank 0 ends in bounded time, and what both have left behind says who is guilty."""
    flags = [*SMALL, "--timeout", 10, "--output-dir", tmp_path]
    other, stalled = programs.run_ranks(script, 2, *flags, planted={1: {fault: 2}}, stalls=1)
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


def test_resume_auto_starts_anew_or_goes_on(tmp_path: Path, whole) -> None:
    planted = {0: {"kill_at_step": 5}}
    programs.run_ranks(LIGHTNING, 2, *SMALL, "--resume", "auto", "--output-dir", tmp_path, planted=planted)
    assert state(tmp_path)["step"] == 3
    train(LIGHTNING, 2, tmp_path, "--resume", "auto")
    assert (tmp_path / "resumed_at_3/metrics.csv").exists()
    assert_same_bits(tmp_path, whole(LIGHTNING, 2))


@thorough
def test_ranks_that_find_different_checkpoints_refuse_to_train(tmp_path: Path, whole) -> None:
    """As on two nodes whose --output-dir is not shared: rank 0 finds nothing, rank 1 a checkpoint."""
    folders = {rank: tmp_path / f"node_{rank}" for rank in (0, 1)}
    shutil.copytree(whole(LIGHTNING, 2), folders[1])  # finished, even
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


# ------------------------------------------------------------------------------------- as a reader runs it


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_learning_rate_follows_the_rule(rule: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    by_hand = load(BY_HAND, "chapter_02_by_hand")
    flags = ["--batch-size", "32", "--learning-rate", "1", "--learning-rate-rule", rule]
    assert by_hand.parse_arguments(flags).learning_rate == factor
    assert chapter.parse_arguments(flags).learning_rate == factor


@thorough
def test_the_readers_command_on_two_devices_in_full(tmp_path: Path) -> None:
    """With few steps, the notebook runs it in the gate."""
    command = "uv run python train.py --devices 2"
    assert command in book.commands(README)
    arguments = [sys.executable, "train.py", "--devices", "2", "--output-dir", tmp_path]
    done = subprocess.run(arguments, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_summary(done.stdout) >= 0.20
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize("script", [BY_HAND, pytest.param(LIGHTNING, marks=thorough)])
def test_torchrun_starts_two_ranks_and_leaves_nothing_behind(script: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, Path(script).name, *SMALL, "--output-dir", tmp_path]
    done = subprocess.run(command, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RMSE over the unseen cells") == 1  # from rank 0 alone
    assert not list(tmp_path.glob("part-*"))
    _, left = psutil.wait_procs(programs.running(), timeout=programs.LIMIT)
    assert left == []


@thorough
def test_under_slurms_environment_two_tasks_make_two_ranks(tmp_path: Path, whole) -> None:
    tasks = []
    with programs.meeting_point() as everywhere:
        for task in range(2):
            slurm = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "NODEID": 0, "NODELIST": "127.0.0.1"}
            slurm |= {"JOB_ID": 7, "JOB_NAME": "train", "PROCID": task, "LOCALID": task}
            environment = everywhere | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
            flags = [*SMALL, "--output-dir", tmp_path]
            tasks.append(programs.Program(LIGHTNING, *flags, environment=environment))
        done = [task.wait() for task in tasks]
    assert [one.code for one in done] == [0, 0], programs.printed(done)
    assert_same_bits(tmp_path, whole(LIGHTNING, 2))


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
    "no device": (["--devices", 0], "--devices 0: too small; give at least 1"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(case: str, tmp_path: Path) -> None:
    flags, message = BAD_INPUT[case]
    with pytest.raises(chapter.InputError, match=f"^{message}") as raised:
        chapter.main(["--output-dir", str(tmp_path / "run"), *map(str, flags)])
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["train.py", "scaling.py"])
def test_bad_input_ends_the_program_with_one_line_and_code_2(program: str) -> None:
    done = programs.run(f"02_multi_gpu/{program}", "--devices", 999, "--accelerator", "cpu")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"{program}: error: --devices 999: .*\n", done.err), done.err


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


@thorough
def test_a_rendezvous_that_nobody_joins_ends_in_bounded_time(tmp_path: Path) -> None:
    port = programs.free_port()
    done = alone(tmp_path, port, "--timeout", 3)
    assert done.code == 2
    message = f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: not all ranks came in time"
    assert re.fullmatch(rf"train.py: error: {message}; .*\n", done.err), done.err
    assert list(tmp_path.iterdir()) == []


@thorough
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


@thorough
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
    flags = [*SMALL, "--learning-rate", 1e30, "--output-dir", tmp_path]
    done = programs.run_ranks(script, 2, *flags)
    assert [one.code for one in done] == [2, 2]
    said = [re.findall(r"error: step \d: loss (?:nan|inf) in the batch of seed 0", one.err) for one in done]
    assert [len(lines) for lines in said] == [1, 0]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(
    script: str, tmp_path: Path, whole
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    programs.run_ranks(script, 2, *flags, planted={0: {"kill_at_step": 4}})
    before = (tmp_path / "last.ckpt").read_bytes()
    done = programs.run_ranks(script, 2, *flags, "--resume", planted={0: {"file_size": 1_000_000}})
    assert [one.code for one in done] == [2, 1]
    assert re.search(r"error: --output-dir \S+: cannot write last.ckpt .*make room", done[0].err)
    assert "Traceback" not in done[0].err + done[1].err
    assert (tmp_path / "last.ckpt").read_bytes() == before
    train(script, 2, tmp_path, "--resume")
    assert_same_bits(tmp_path, whole(script, 2))
