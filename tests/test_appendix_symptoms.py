"""The appendix on troubleshooting: each symptom that its script provokes shows the failure, and the cure."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import book
import lightning
import pytest
import torch
from runs import load
from torch import nn
from torch.utils.data import DataLoader

STEPS = 6
SCRIPT, PAGE = "appendix/symptoms.py", book.ROOT / "appendix" / "troubleshooting.md"

appendix = load(SCRIPT, "appendix_symptoms")

# Number: what is seen when it is done wrong, and after the cure. Figures that follow from the numbers
# in the function's docstring are given in full; a message, by what the page quotes of it.
SHOWN = {
    5: ("0.75, no error", "3 of 4 chunks exist"),
    12: ("0.01", "1.00"),
    13: ("3.6", "4.0"),
    14: ("16 of 32", "0 of 32"),
    19: ("Expected to have finished reduction", "two steps"),
    32: ("1.0", "1.8"),
    36: ("float64", "float32"),
    37: ("4 MB", "0 MB"),
    38: ("0 steps", "4 steps"),
}
WITH_WORKERS = {
    15: ("[0, 0, 0]", "[0, 1, 2]"),
    16: ("4 of 8", "8 of 8"),
    27: (("Can't pickle", "Can't get local object"), "sample 0"),
    28: (("Too many open files", "received 0 items of ancdata"), "64 batches"),
    33: ("64 samples, len(loader) 6", "96 samples, len(loader) 6"),
}


def rows_of_the_page() -> dict[int, tuple[bool, str]]:
    """For each number of the page: is it marked as provoked, and the cell that says what one sees."""
    found = re.findall(r"^\| (\**)(\d+)\1 \| (.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    numbers = [int(number) for _, number, _ in found]
    assert len(numbers) == len(set(numbers)), "a number stands twice"
    return {int(number): (bool(mark), cell) for mark, number, cell in found}


def is_as_quoted(row: dict) -> bool:
    """Was all that the page quotes of this symptom seen? Of two messages, Python or the kernel decides which."""
    literals = re.findall(r"`([^`]+)`", rows_of_the_page()[row["number"]][1])
    seen = [literal in row["symptom"] for literal in literals]
    return any(seen) and (all(seen) or row["number"] in (27, 28))


@pytest.mark.parametrize("number", SHOWN)
def test_a_symptom_and_its_cure(number: int) -> None:
    [row] = appendix.main([str(number)])
    wrong, right = SHOWN[number]
    assert row["symptom"].startswith(wrong)
    assert row["cured"] == right
    assert is_as_quoted(row)


@pytest.mark.thorough
def test_symptoms_of_workers_and_their_cures() -> None:
    # In a process of its own, for workers import the script by its name.
    numbers = [str(number) for number in WITH_WORKERS]
    code = f"import json, symptoms; print(json.dumps(symptoms.main({numbers})))"
    command = [sys.executable, "-c", code]
    folder = book.ROOT / "appendix"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["number"] for row in rows] == list(WITH_WORKERS)
    for row in rows:
        wrong, right = WITH_WORKERS[row["number"]]
        assert row["symptom"].startswith(wrong)
        assert row["cured"] == right
        assert is_as_quoted(row)


def test_a_lost_chunk_is_found_and_not_called_cured(capsys: pytest.CaptureFixture[str]) -> None:
    appendix.main(["5", "13"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:3] + lines[4:6]] == [
        "wrong",
        "found",
        "wrong",
        "cured",
    ]


class WholeRun:
    """The step of each batch from `first` on; its length is the whole run's, as StepSampler's in chapter 1."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self) -> Iterator[list[int]]:
        return iter([step] for step in range(self.first, STEPS))

    def __len__(self) -> int:
        return STEPS


class FirstStepFromTheTrainer(lightning.LightningModule):
    """Its loader begins at the trainer's step; `configure_optimizers` may read estimated_stepping_batches."""

    def __init__(self, reads: bool, checkpoint: Path):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.reads = reads
        self.checkpoint = checkpoint
        self.seen = []

    def train_dataloader(self) -> DataLoader:
        samples = torch.arange(float(STEPS))[:, None]
        return DataLoader(samples, batch_sampler=WholeRun(self.trainer.global_step))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, int(batch)))
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_: object) -> None:
        if self.trainer.global_step == STEPS // 2 and not self.checkpoint.exists():
            self.trainer.save_checkpoint(self.checkpoint)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.reads:
            assert self.trainer.estimated_stepping_batches == STEPS
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reads", [False, True])
def test_estimated_stepping_batches_makes_a_resumed_run_repeat_samples(reads: bool, tmp_path: Path) -> None:
    """Why row 12 warns of it. Once Lightning has mended this, the test fails and the page can say so."""
    checkpoint = tmp_path / "middle.ckpt"
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {"accelerator": "cpu", "max_epochs": 1, "max_steps": STEPS} | dict.fromkeys(quiet, False)
    lightning.Trainer(**options).fit(FirstStepFromTheTrainer(reads, checkpoint))
    resumed = FirstStepFromTheTrainer(reads, checkpoint)
    lightning.Trainer(**options).fit(resumed, ckpt_path=checkpoint)
    assert [step for step, _ in resumed.seen] == [3, 4, 5]
    assert [sample for _, sample in resumed.seen] == ([0, 1, 2] if reads else [3, 4, 5])


def test_every_symptom_of_the_script_is_tested() -> None:
    assert {*SHOWN, *WITH_WORKERS} == {*appendix.SYMPTOMS}


def test_the_page_has_every_number_and_marks_what_the_script_provokes() -> None:
    rows = rows_of_the_page()
    assert {*range(1, 36)} <= {*rows}
    assert {number for number, (marked, _) in rows.items() if marked} == {*appendix.SYMPTOMS}


def test_a_row_of_the_page_is_one_line_of_short_cells() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \**\d", line)]
    assert len(rows) == len(rows_of_the_page())
    for row in rows:
        number, *cells, where = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3, f"row {number}: a cell holds a bar"
        assert all(0 < len(cell.split()) <= 40 for cell in cells), f"row {number} is long"
        assert re.search(r"\]\(|Chapter [56]", where), f"row {number} leads nowhere"


@pytest.mark.parametrize("word", ["99", "5 99"])
def test_an_unknown_number_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        appendix.main(word.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert re.search(r"NUMBER 99: .*; choose from 5, 12, ", printed.err.splitlines()[-1])
