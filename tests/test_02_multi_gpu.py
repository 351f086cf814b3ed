"""Chapter 2: one, two and three processes give the same result, and every way in which they would not."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import book
import programs
import psutil
import pytest
import torch
from runs import (
    TOLERANCE,
    assert_resumed,
    assert_same_bits,
    assert_same_but_for_rounding,
    check_summary,
    losses_after,
    rmse,
    state,
    weights,
)

with book.rooms("02_multi_gpu"):
    import train as by_lightning
    import train_ddp_by_hand
    from datamodule import eval_loader
    from options import RESUME_KEYS
    from steps import StepSampler

CHAPTER = book.ROOT / "02_multi_gpu"
README = CHAPTER / "README.md"
LIGHTNING, BY_HAND = "02_multi_gpu/train.py", "02_multi_gpu/train_ddp_by_hand.py"
SCRIPTS = [LIGHTNING, BY_HAND]
MAINS = {LIGHTNING: by_lightning.main, BY_HAND: train_ddp_by_hand.main}
# Three ranks have slices of 2, 3 and 3 samples; and so have three micro-batches of one rank.
SMALL = "--patch-size 16 --batch-size 8 --max-steps 7".split()
SMALL += "--checkpoint-every 3 --validate-every 4 --log-every 1".split()
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}

pytestmark = pytest.mark.usefixtures("quick_programs")
thorough = pytest.mark.thorough


def train(script: str | Path, ranks: int, folder: Path, *flags: object, double: bool = True) -> None:
    """Train on some ranks, in double precision or as it is; fail with what they printed unless all succeed."""
    flags = [*SMALL, "--output-dir", folder, *flags]
    done = programs.run_ranks(script, ranks, *flags, double_precision=double)
    assert [getattr(one, "code", one) for one in done] == [0] * ranks, programs.printed(done)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """An undisturbed run of a script on some ranks, whole(script, ranks), made when it is first asked for."""

    @cache
    def run(script: str, ranks: int, double: bool) -> Path:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}_{ranks}")
        train(script, ranks, folder, double=double)
        return folder

    return lambda script, ranks, double=True: run(script, ranks, double)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory):
    """What killed(script, ranks, step) has left, whose last rank was killed at that step: do not change it."""

    @cache
    def run(script: str, ranks: int, step: int, double: bool) -> Path:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}_{ranks}_killed_at_{step}")
        flags = [*SMALL, "--resume", "auto", "--output-dir", folder]
        kill = {ranks - 1: {"kill_at_step": step}}
        *others, guilty = programs.run_ranks(script, ranks, *flags, planted=kill, double_precision=double)
        assert guilty.code == -9
        assert all(other.code != 0 for other in others), programs.printed(others)  # and none waits for ever
        return folder

    return lambda script, ranks, step, double=True: run(script, ranks, step, double)


# ------------------------------------------------------------------------------ the same result


@pytest.mark.parametrize(
    ("script", "ranks"),
    [(BY_HAND, 2), (LIGHTNING, 2), (BY_HAND, 3), pytest.param(LIGHTNING, 3, marks=thorough)],
)
def test_several_ranks_end_at_the_weights_of_one(script: str, ranks: int, whole) -> None:
    assert_same_but_for_rounding(whole(script, ranks), whole(script, 1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", [BY_HAND, pytest.param(LIGHTNING, marks=thorough)])
def test_accumulation_changes_nothing(script: str, ranks: int, whole, tmp_path: Path) -> None:
    train(script, ranks, tmp_path, "--accumulate-grad-batches", 3)
    assert_same_but_for_rounding(tmp_path, whole(script, 1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_two_scripts_agree(ranks: int, whole) -> None:
    assert_same_but_for_rounding(whole(LIGHTNING, ranks), whole(BY_HAND, ranks))


def test_the_pieces_of_all_ranks_are_the_batch() -> None:
    for ranks, accumulate, batch_size in product(range(1, 6), range(1, 5), range(1, 33)):
        if batch_size < ranks * accumulate:
            continue
        samplers = [StepSampler(batch_size, 5, 3, rank, ranks, accumulate) for rank in range(ranks)]
        pieces = [list(sampler) for sampler in samplers]  # of steps 3 and 4
        for number, step in enumerate((3, 4)):
            mine = slice(number * accumulate, (number + 1) * accumulate)
            batch = [piece for of_rank in pieces for piece in of_rank[mine]]
            assert list(chain(*batch)) == [(step, k) for k in range(batch_size)]
            sizes = {len(piece) for piece in batch}
            assert min(sizes) > 0
            assert max(sizes) - min(sizes) <= 1
        assert {len(of_rank) for of_rank in pieces} == {2 * accumulate}


def test_each_evaluation_patch_is_on_one_rank_and_what_decides_is_compared() -> None:
    dataset = range(0, 7)
    shares = [eval_loader(SimpleNamespace(batch_size=7), rank, 2).sampler for rank in (0, 1)]
    assert sorted(chain(*shares)) == [(0, k) for k in dataset]
    assert {"missing", "accumulate_grad_batches"} <= set(RESUME_KEYS)


# In train_step, a rank's own count in the place of all ranks': the average of their own quotients.
MEAN_OF_MEANS = f"""
import sys
from unittest.mock import patch
sys.path.insert(0, {str(CHAPTER)!r})
import train_ddp_by_hand as script

right = script.train_step
def wrong(*args):
    with patch.object(script.distributed, "all_reduce", lambda count: count.mul_(2)):
        return right(*args)
script.train_step = wrong
script.run(script.main)
"""


def test_a_mean_of_the_ranks_means_ends_at_other_weights(tmp_path: Path, whole) -> None:
    """The tests above would notice."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(MEAN_OF_MEANS)
    train(wrong, 2, tmp_path / "run")
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(weights(tmp_path / "run"), weights(whole(BY_HAND, 1)), **TOLERANCE)


# ------------------------------------------------------------------------------ killed and resumed


GATE = [(script, 2, 4, True) for script in SCRIPTS]  # what other tests have killed, too
KILLS = product(SCRIPTS, (1, 2), (2, 4, 6), (False,))


@pytest.mark.parametrize(
    ("script", "ranks", "step", "double"), [*GATE, *(pytest.param(*kill, marks=thorough) for kill in KILLS)]
)
def test_killed_and_resumed_to_the_bit(
    script: str, ranks: int, step: int, double: bool, tmp_path: Path, whole, killed
) -> None:
    """With --resume auto, which started the killed run, too."""
    folder = shutil.copytree(killed(script, ranks, step, double), tmp_path / "run")
    workers = 1 if step == 6 else 0
    train(script, ranks, folder, "--resume", "auto", "--num-workers", workers, double=double)
    assert_same_bits(folder, whole(script, ranks, double))
    if step >= 3:  # before that, there is no checkpoint, and it started anew
        assert_resumed(folder, step // 3 * 3, whole(script, ranks, double))


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*ranks, marks=thorough) for ranks in ((3, 2), (3, 3)))]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_on_another_number_of_ranks(
    script: str, before: int, after: int, tmp_path: Path, whole, killed
) -> None:
    """And three on three: they, too, resume but for rounding."""
    folder = shutil.copytree(killed(script, before, 4), tmp_path / "run")
    train(script, after, folder, "--resume")
    torch.testing.assert_close(weights(folder), weights(whole(script, 1)), **TOLERANCE)
    assert rmse(folder) == pytest.approx(rmse(whole(script, 1)), rel=1e-6)
    assert [step for step, _ in losses_after(folder, 3)] == [3, 4, 5, 6]


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_twice_between_micro_batches_and_resumed_to_the_bit(script: str, tmp_path: Path) -> None:
    """No checkpoint is of half a step, as the first micro-batch after a resume could leave one."""
    train(script, 2, tmp_path / "whole", "--accumulate-grad-batches", 3)
    flags = [*SMALL, "--accumulate-grad-batches", 3, "--resume", "auto", "--output-dir", tmp_path / "run"]
    for step in (4, 1):  # of that process: both times, after the checkpoint of step 3
        killed = programs.run_ranks(
            script, 2, *flags, planted={1: {"kill_at_step": step}}, double_precision=True
        )
        assert killed[1].code == -9
        assert state(tmp_path / "run")["step"] == 3
    train(script, 2, tmp_path / "run", "--accumulate-grad-batches", 3, "--resume")
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_kill_usr2_shows_where_a_rank_is_and_ends_none(script: str, tmp_path: Path) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    with programs.started_ranks(script, 2, *flags, planted={1: {"stall_at_step": 2}}) as (other, stalled):
        programs.wait_for(lambda: "stalled" in stalled.errors(), stalled, "it stalled")

        def shows(rank: programs.Program, place: str) -> bool:
            os.kill(rank.process.pid, signal.SIGUSR2)
            return re.search(place, rank.errors()) is not None

        programs.wait_for(lambda: shows(stalled, r"in _stall\n"), stalled, "it showed its stack")
        waits = r"in (all_reduce|_engine_run_backward)\n"
        programs.wait_for(lambda: shows(other, waits), other, "it showed its stack")
        assert "in _stall" not in other.errors()
        stalled.process.kill()
        assert stalled.wait().code == -signal.SIGKILL
        assert other.wait().code not in (0, -signal.SIGUSR2)


# ------------------------------------------------------------------------------ as a reader runs it


@thorough
def test_the_readers_command_on_two_devices_in_full(tmp_path: Path) -> None:
    """With few steps, the notebook runs it in the gate."""
    command = "uv run python train.py --devices 2"
    assert command in book.commands(README)
    arguments = [sys.executable, "train.py", "--devices", "2", "--output-dir", tmp_path]
    done = subprocess.run(arguments, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_summary(done.stdout) <= -0.10
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize("script", [BY_HAND, pytest.param(LIGHTNING, marks=thorough)])
def test_torchrun_starts_two_ranks_and_leaves_nothing_behind(script: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, Path(script).name, *SMALL, "--output-dir", tmp_path]
    done = subprocess.run(command, cwd=CHAPTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RMSE over the unseen cells") == 1  # from rank 0 alone
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
    assert_same_bits(tmp_path, whole(LIGHTNING, 2, double=False))


# ----------------------------------------------------------------------------------------- bad input

CORES = os.cpu_count()
BAD_INPUT = {  # script, flags, ranks that torchrun has started, what the last line says
    "more devices than there are": (
        LIGHTNING,
        f"--devices {CORES + 1}",
        None,
        f"--devices {CORES + 1}: give up to {CORES}, the cores there are",
    ),
    "other devices than the launcher's": (
        LIGHTNING,
        "--devices 1",
        2,
        "--devices 1: the launcher has 2 on each node; leave --devices out",
    ),
    "no device": (LIGHTNING, "--devices 0", None, "argument --devices: 0: too small; give at least 1"),
    "a batch too small": (
        LIGHTNING,
        "--batch-size 2 --devices 2 --accumulate-grad-batches 2",
        None,
        "--batch-size 2: 2 devices x 1 nodes x 2 micro-batches need at least 4",
    ),
    "a batch too small for these ranks": (
        BY_HAND,
        "--batch-size 5 --accumulate-grad-batches 2",
        3,
        "--batch-size 5: 3 devices x 1 nodes x 2 micro-batches need at least 6",
    ),
    "other nodes than the launcher's": (
        LIGHTNING,
        "--num-nodes 2",
        2,
        "--num-nodes 2: the launcher has 1; leave --num-nodes out",
    ),
    "fork": (LIGHTNING, "--start-method fork", None, "--start-method fork: fork copies no threads"),
    "no micro-batch": (
        LIGHTNING,
        "--accumulate-grad-batches 0",
        None,
        "argument --accumulate-grad-batches: 0: too small",
    ),
    "no checkpoint": (LIGHTNING, "--resume missing.ckpt", None, "--resume missing.ckpt: no such file"),
    "no folder": (BY_HAND, "--output-dir /dev/null/run", 1, "--output-dir /dev/null/run: Not a directory"),
    "a seed of 65 bits": (LIGHTNING, f"--seed {2**64}", None, f"argument --seed: {2**64}: too large"),
    "a text as checkpoint": (LIGHTNING, f"--resume {__file__}", None, f"--resume {__file__}: cannot be read"),
    "a text, by hand": (BY_HAND, f"--resume {__file__}", 1, f"--resume {__file__}: cannot be read"),
    "by hand, without torchrun": (BY_HAND, "", None, "start it by torchrun --nproc-per-node N"),
}


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Call main of a script, with flags and as torchrun would on some ranks; what it says last of bad input."""

    def call(script: str, ranks: int | None, *flags: object) -> str:
        here = ALONE | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1"}
        for name, value in (here if ranks else {}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            MAINS[script]([*map(str, flags)])
        assert ended.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        return err.splitlines()[-1].partition(": error: ")[2]

    return call


def test_nodes_with_unequal_tasks_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last_line
) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2(x3)")
    message = last_line(LIGHTNING, None, "--output-dir", tmp_path / "new")
    assert message == "SLURM_NTASKS_PER_NODE=2(x3): not a number; give each node as many tasks"


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(case: str, tmp_path: Path, last_line) -> None:
    script, flags, ranks, message = BAD_INPUT[case]
    said = last_line(script, ranks, "--accelerator", "cpu", "--output-dir", tmp_path / "run", *flags.split())
    assert said.startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_must_accumulate_as_before(script: str, tmp_path: Path, whole, last_line) -> None:
    checkpoint = whole(script, 1) / "last.ckpt"
    flags = [*SMALL, "--accumulate-grad-batches", 2, "--resume", checkpoint, "--output-dir", tmp_path / "run"]
    said = last_line(script, 1, *flags)
    assert said.startswith(f"--resume {checkpoint}: has --accumulate-grad-batches 1, not 2; give")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_the_program_with_one_line_and_code_2(tmp_path: Path) -> None:
    flags = ["--accelerator", "cpu", "--devices", CORES + 1, "--output-dir", tmp_path / "run"]
    done = programs.run(LIGHTNING, *flags)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"train.py: error: --devices {CORES + 1}: .*\n", done.err), done.err
