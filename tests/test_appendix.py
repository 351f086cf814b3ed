"""The appendix as a whole: the index has every page, every script runs as the reader types it, and so does the notebook."""

import ast
import re
import subprocess
import sys

import book
import nbformat
import pytest

FOLDER = book.ROOT / "appendix"
PICTURES = 6
# What gpu_day.py imports: no commands. And what takes long, or needs a GPU: tests of their own run these.
MODULES = [path.name for path in book.files("appendix/gpu_*.py") if path.name != "gpu_day.py"]
MODULES.append("saving.py")
LONG = ["gpu_day.py", "ladder.py"]


def test_the_index_has_every_page_and_every_page_leads_back() -> None:
    pages = {path.name for path in book.files("appendix/*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (FOLDER / "README.md").read_text())) == pages
    assert [page for page in pages if "[The shelf](README.md)" not in (FOLDER / page).read_text()] == []


def test_every_script_stands_on_a_page_as_a_command() -> None:
    commands = {command for page in book.files("appendix/*.md") for command in book.commands(page)}
    scripts = {path.name for path in book.files("appendix/*.py")} - set(MODULES)
    assert {name for name in scripts if f"uv run python {name}" not in commands} == set()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script", [path.name for path in book.files("appendix/*.py") if path.name not in (*LONG, *MODULES)]
)
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


def drawing_code() -> dict[str, str]:
    """The source of each cell of every notebook, and of each function of every script."""
    found = {}
    for path in book.files("*.ipynb"):
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                found[f"{path.parent.name}/{path.name}, cell {number}"] = cell.source
    for path in book.files("*.py"):
        if path.parent != book.ROOT / "tests":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found[f"{path.parent.name}/{path.name}, {node.name}"] = ast.unparse(node)
    return found


def test_no_bar_stands_on_a_logarithmic_axis() -> None:
    # A bar's length says nothing there, because the axis has no zero: dots with their ranges do.
    logarithmic = re.compile(r"""scale(=|\()["']log|log=True""")
    sources = drawing_code()
    assert any(logarithmic.search(source) for source in sources.values())
    bars = [name for name, source in sources.items() if re.search(r"\.barh?\(", source)]
    assert bars
    assert [name for name in bars if logarithmic.search(sources[name])] == []
