"""The appendix's day on a GPU: its dry run, how it goes on after a kill, and how it refuses wrong flags."""

import json
import subprocess
import sys
from pathlib import Path

import book
import pytest

APPENDIX, LIMIT = book.ROOT / "appendix", 600  # seconds: a guard against hangs
sys.path.insert(0, str(APPENDIX))  # its modules import each other by name
import gpu_counters  # noqa: E402
import gpu_plan  # noqa: E402
import gpu_tables  # noqa: E402

PARTS = "machine ladder step exact loader wide energy roofline large memory compile cpu scaling".split()


def run(*flags: str) -> subprocess.CompletedProcess:
    """The script as its reader runs it, to its end."""
    command = [sys.executable, "gpu_day.py", *flags]
    return subprocess.run(
        command, cwd=APPENDIX, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> tuple[list[dict], str]:
    """The rows of a dry run of all parts, and what it printed."""
    folder = tmp_path_factory.mktemp("day")
    done = run("--dry-run", "--minutes", "8", "--output-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "dry_run.json").read_text())["rows"], done.stdout


def test_a_dry_run_measures_something_in_each_part(dry) -> None:
    rows, printed = dry
    assert list(dict.fromkeys(row["part"] for row in rows)) == PARTS
    errors = [row for row in rows if "error" in row and "needs a GPU" not in row["error"]]
    assert [row for row in errors if "bfloat16" not in row["error"]] == []
    assert [part for part in PARTS if f"\n### {part}\n" in printed] == PARTS


def test_runs_are_equal_to_the_bit_on_a_cpu_also_if_killed(dry) -> None:
    rows = {row["case"]: row for row in dry[0] if row["part"] == "exact"}
    for case in ("twice", "killed and resumed"):
        assert rows[f"{case}, deterministic kernels"]["equal_to_the_bit"]
    assert rows["killed and resumed, deterministic kernels"]["resumed_at"] == ["resumed_at_2"]


def test_what_a_cpu_has_no_counter_for_is_missing_and_not_0(dry) -> None:
    rows = {row["part"]: row for row in dry[0]}
    assert "missing" in rows["energy"]
    assert "missing" in rows["scaling"]
    assert rows["ladder"]["gpu_peak_gb"] is None
    assert rows["memory"]["predicted_gb"] > 0
    assert rows["memory"]["measured_gb"] is None


def test_a_part_that_is_killed_is_named_and_gone_on_with(tmp_path: Path) -> None:
    flags = ["--dry-run", "--output-dir", str(tmp_path), "--parts", "machine", "wide"]
    killed = run(*flags, "--minutes", "1e-6")
    assert killed.returncode == 1
    assert "not finished: machine, wide; the same command goes on" in killed.stdout
    assert run(*flags, "--minutes", "8").returncode == 0
    path = tmp_path / "dry_run.json"
    saved = json.loads(path.read_text())
    assert saved["finished"] == ["machine", "wide"]
    saved["finished"].remove("wide")  # as if it had been killed after its only row
    saved["rows"][-1]["parameters"] = -1
    path.write_text(json.dumps(saved))
    gone_on = run(*flags)
    assert "machine: finished before; --again repeats it" in gone_on.stdout
    assert json.loads(path.read_text())["rows"][-1]["parameters"] == -1  # not measured again
    run(*flags, "--again")
    assert json.loads(path.read_text())["rows"][-1]["parameters"] > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dry-run --parts nope", "--parts nope: no such part; choose from machine, "),
        ("--dry-run --minutes 0", "--minutes 0: give more than 0"),
        ("--dry-run --save-results", "--save-results: --dry-run finds nothing; leave one out"),
        ("--dry-run --output-dir gpu_day.py", "--output-dir gpu_day.py: "),
        ("--minutes x", "argument --minutes: invalid float value"),
    ],
)
def test_a_wrong_flag_ends_with_one_line_and_code_2(flags: str, says: str) -> None:
    done = run(*flags.split())
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert says in line


def test_a_counter_that_is_not_there_is_none() -> None:
    assert gpu_counters.joules_between(None, 3.0) is None
    assert gpu_counters.joules_between(1.0, 3.0) == 2


def test_a_table_shows_what_a_row_lacks_as_an_empty_cell() -> None:
    spread = {"median": 1234.5, "min": 0.00001, "max": 2}
    rows = [{"part": "p", "case": "a", "x": spread}, {"part": "p", "case": "b", "y": True, "z": None}]
    lines = gpu_tables.show(rows).splitlines()
    assert lines[2] == "| case | x | y | z |"
    assert lines[4:] == ["| a | 1,234 (1.0e-05–2) |  |  |", "| b |  | yes |  |"]


def test_a_file_of_rows_is_whole_at_any_time(tmp_path: Path) -> None:
    found = gpu_plan.Found(tmp_path / "day.json")
    found.add("step", "batch 8", {"ms": 1.0})
    found.finish("step")
    again = gpu_plan.Found(tmp_path / "day.json")
    assert again.has("step", "batch 8")
    assert again.finished == ["step"]
    again.forget(["step"])
    assert not gpu_plan.Found(tmp_path / "day.json").has("step", "batch 8")
