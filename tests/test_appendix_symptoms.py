"""The appendix on troubleshooting: each symptom that its script provokes shows the failure, and the cure."""

import json
import re
import subprocess
import sys

import book
import pytest
from runs import load

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
