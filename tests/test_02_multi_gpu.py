"""Chapter 2: one, two and three processes give the same result, and every way in which they would not."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import torch
from test_01_setup import checkpoint, load, weights

CHAPTER = book.ROOT / "02_multi_gpu"
README = CHAPTER / "README.md"
LIGHTNING, BY_HAND = "02_multi_gpu/train.py", "02_multi_gpu/train_ddp_by_hand.py"
SCRIPTS = [LIGHTNING, BY_HAND]
SMALL = "--patch-size 16 --batch-size 12 --max-steps 7 --checkpoint-every 3 --validate-every 4".split()
TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}  # of weights after 7 steps of AdamW; see the walkthrough

chapter = load(LIGHTNING, "chapter_02_train")


def train(script: str, ranks: int, folder: Path, *flags: object, **options) -> list[programs.Run]:
    """Train on some ranks; fail with what they printed unless all of them succeed."""
    done = programs.run_ranks(script, ranks, *SMALL, "--output-dir", folder, *flags, **options)
    assert [one.code for one in done] == [0] * ranks, [one.out + one.err for one in done]
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


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_on_two_ranks_and_resumed_to_the_bit(
    script: str, step: int, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    guilty = step % 2
    killed = programs.run_ranks(script, 2, *flags, faults={guilty: {"kill_at_step": step}})
    assert killed[guilty].code == -9
    other = killed[1 - guilty]
    assert other.code == 1
    assert re.search(rf"error: rank {1 - guilty} has lost another rank: .*--resume goes on\n", other.err)
    assert "Traceback" not in other.err
    train(script, 2, tmp_path, "--resume")
    torch.testing.assert_close(weights(tmp_path), weights(whole[script, 2]), rtol=0, atol=0)
    assert rmse(tmp_path) == rmse(whole[script, 2])


@pytest.mark.parametrize(("before", "after", "accumulate"), [(2, 1, 2), (1, 2, 1), (3, 2, 3), (2, 3, 1)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_on_another_number_of_ranks(
    script: str, before: int, after: int, accumulate: int, tmp_path: Path, whole: dict
) -> None:
    flags = [*SMALL, "--output-dir", tmp_path]
    faults = {rank: {"kill_at_step": 5} for rank in range(before)}
    assert [one.code for one in programs.run_ranks(script, before, *flags, faults=faults)] == [-9] * before
    train(script, after, tmp_path, "--resume", "--accumulate", accumulate)
    torch.testing.assert_close(weights(tmp_path), weights(whole[script, 1]), **TOLERANCE)
    assert rmse(tmp_path) == pytest.approx(rmse(whole[script, 1]), rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_ranks_resume_to_the_bit(script: str, tmp_path: Path, whole: dict) -> None:
    faults = {1: {"kill_at_step": 5}}
    programs.run_ranks(script, 3, *SMALL, "--output-dir", tmp_path, faults=faults)
    train(script, 3, tmp_path, "--resume")
    torch.testing.assert_close(weights(tmp_path), weights(whole[script, 3]), rtol=0, atol=0)
