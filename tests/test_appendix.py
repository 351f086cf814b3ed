"""The appendix as a whole: the index has every page, every script runs as the reader types it, and so does the notebook."""

import re
import subprocess
import sys

import book
import pytest

FOLDER = book.ROOT / "appendix"
PICTURES = 7


def test_the_index_has_every_page_and_every_page_leads_back() -> None:
    pages = {path.name for path in book.files("appendix/*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (FOLDER / "README.md").read_text())) == pages
    assert [page for page in pages if "[The shelf](README.md)" not in (FOLDER / page).read_text()] == []


def test_every_script_stands_on_a_page_as_a_command() -> None:
    commands = {command for page in book.files("appendix/*.md") for command in book.commands(page)}
    scripts = {path.name for path in book.files("appendix/*.py")}
    assert {name for name in scripts if f"uv run python {name}" not in commands} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("script", [path.name for path in book.files("appendix/*.py")])
def test_every_script_runs_as_the_reader_types_it(script: str) -> None:
    command = [sys.executable, script]
    done = subprocess.run(
        command, cwd=FOLDER, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_notebook_runs() -> None:
    notebook = book.execute("appendix/notebook.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES
