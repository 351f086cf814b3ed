"""Chapter 6 with a task.py of other people's: it resumes to the bit, or refuses in one line."""

import csv
from pathlib import Path
from types import SimpleNamespace

import alone
import book
import programs
import pytest
import runs
import torch
from chapter_6 import AGAIN, codes
from lightning.pytorch.strategies import FSDPStrategy
from survival.determinism import seed_batch
from survival.requirements import find_in_trainer

FLAGS = "--accelerator cpu --batch-size 12 --max-steps 12 --checkpoint-every 4 --validate-every 6".split()
FLAGS += "--log-every 1 --loggers CSVLogger --resume auto".split()

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chapter's folder, copied, with the other task in the place of the winds'."""
    copied = alone.copy_chapter(book.ROOT / "06_whats_next", tmp_path_factory.mktemp("project"))
    copied.with_name("task.py").write_text((book.TESTS / "other_task.py").read_text())
    copied.with_name("model.py").unlink()
    return copied


def train(script: Path, kind: str, folder: Path, ranks: int = 2, **faults: object) -> list[programs.Run]:
    """Run the task's model of this kind on so many ranks, to whatever end."""
    flags = [*FLAGS, "--store", folder.parent, "--output-dir", folder]
    return programs.run_ranks(script, ranks, *flags, environment={"OTHER_TASK": kind}, **faults)


def ends(folder: Path) -> list[dict]:
    """What each rank ended at, and the checkpoint."""
    each = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank_*.pt"))]
    return [*each, runs.state(folder)]


THOROUGH = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("dict", "frozen")]


@pytest.mark.parametrize("kind", ["dropout", *THOROUGH])
def test_other_models_resume_to_the_bit(script: Path, tmp_path: Path, kind: str) -> None:
    """Two ranks, killed once and told to stop once, end at the bits of a run that was left alone.

    The stop comes at a step at which the other run saves nothing.
    """
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    done = train(script, kind, whole)
    assert codes(done) == [0, 0], programs.printed(done)
    assert "Traceback" not in programs.printed(done)
    assert train(script, kind, disturbed, planted={1: {"kill_at_step": 7}})[1].code == -9
    stopped = train(script, kind, disturbed, planted={1: {"terminate_at_step": 2}})
    assert codes(stopped) == [AGAIN, AGAIN], programs.printed(stopped)
    done = train(script, kind, disturbed)
    assert codes(done) == [0, 0], programs.printed(done)
    resumed = {path.name for path in disturbed.glob("resumed_at_*")}
    assert len(resumed - {f"resumed_at_{step}" for step in (4, 6, 8, 12)}) == 1
    torch.testing.assert_close(ends(disturbed), ends(whole), rtol=0, atol=0)
    first, second, _ = ends(whole)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["centre"].abs().min() > 0
    assert first["calls"] == 12
    assert first.get("rest.0.num_batches_tracked", 12) == 12  # in training mode
    assert runs.summary(disturbed)["tested"] == runs.summary(whole)["tested"]


def test_a_score_that_is_better_when_higher_keeps_the_highest(script: Path, tmp_path: Path) -> None:
    done = train(script, "frozen", tmp_path / "run", ranks=1)
    assert codes(done) == [0], programs.printed(done)
    [best] = (tmp_path / "run/checkpoints").glob("best_*")
    with open(tmp_path / "run/metrics.csv", newline="") as log:
        accuracies = [float(row["accuracy"]) for row in csv.DictReader(log) if row["accuracy"]]
    first, second, _ = accuracies  # the last is the test's
    assert first != second
    assert float(best.name.split("_")[1]) == pytest.approx(max(first, second), abs=1e-6)


def test_each_rank_and_each_batch_has_numbers_of_its_own() -> None:
    def draw(*given: int) -> float:
        seed_batch(*given)
        return torch.rand(()).item()

    different = {draw(seed, batch, rank) for seed in (0, 1) for batch in (0, 1) for rank in (0, 1)}
    assert len(different) == 8
    assert draw(0, 1, 0) == draw(0, 1, 0)


REFUSED = {
    "two optimizers": "2 optimizers",
    "stepped twice": "2 steps where the data are at 1",
    "no example": "example_input_array",
    "no first step": "first_step",
    "left out": "unused.weight",
    "nameless loss": "cross entropy",
    "nameless score": "logs no 'error'",
    "plain loader": "TimedLoader",
    "endless score": "the validation's score is inf",
    "ModelCheckpoint": "ModelCheckpoint",
    "EarlyStopping": "callback EarlyStopping counts validations",
    "ReduceLROnPlateau": "no ReduceLROnPlateau",
    "loader ends": "ends after step 5 of 12",
    "unreadable": "a checkpoint's hyperparameters could not be loaded",
    "unreadable optimizer": "a checkpoint's optimizer could not be loaded",
    "unreadable schedule": "a checkpoint's schedule could not be loaded",
    "unreadable data": "the data module's hyperparameters could not be loaded",
    "no gradient": "nothing in forward's output has a gradient",
    "schedule by epoch": '"interval": "step"',
    "late hook": "on_train_batch_end",
    "validation_step": "the model has no validation_step",
    "test_step": "the model has no test_step",
    "val_dataloader": "the data module has no val_dataloader",
    "test_dataloader": "the data module has no test_dataloader",
}


def test_a_strategy_that_divides_the_model_is_refused() -> None:
    trainer = SimpleNamespace(strategy=FSDPStrategy(), early_stopping_callbacks=[], checkpoint_callbacks=[])
    assert "strategy FSDPStrategy: checkpoints here are of one rank" in next(find_in_trainer(trainer, None))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_resumed_is_refused_in_one_line(script: Path, tmp_path: Path, kind: str) -> None:
    done = train(script, kind, tmp_path / "run")
    assert codes(done) == [2, 2], programs.printed(done)
    assert "Traceback" not in "".join(one.err for one in done)
    assert any(REFUSED[kind] in one.err.strip().splitlines()[-1] for one in done), programs.printed(done)
