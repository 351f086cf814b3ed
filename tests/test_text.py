"""The whole repository's text: walkthroughs, commands, links, notebooks, style and budgets."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import book
import nbformat
import programs
import pytest
from cogapp import Cog
from density import code_lines
from packaging.requirements import Requirement

MAX_CODE_LINES = 200  # of a train*.py: most of the code is in the files beside it
MAX_PAGE_LINES, MAX_PAGE_WORDS = 600, 6_000  # of a walkthrough, without what renders to nothing
MAX_ENTRY_LINES = 150  # of a page of the appendix

HERE = Path(__file__).parent
PAGES = book.pages()
MARKDOWN = book.files("*.md")
NOTEBOOKS = book.files("*.ipynb")
SCRIPTS = [path for path in book.files("train*.py") if path.parent.name in book.CHAPTERS]
TEXTS = [path for kind in ("md", "py", "toml", "ipynb") for path in book.files(f"*.{kind}")]


def relative(path: Path) -> str:
    """A path as the reader names it; pytest shows it as the test's id."""
    return path.relative_to(book.ROOT).as_posix()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program from the repository's root and return how it went."""
    return subprocess.run(command, cwd=book.ROOT, capture_output=True, text=True)


def complaint(*command: str) -> str:
    """What a program printed, and its exit code, if it failed; else nothing."""
    done = run(*command)
    return f"{done.stdout}{done.stderr}exit code {done.returncode}" if done.returncode else ""


# Without this, a test below with nothing to check would be skipped in silence.
def test_there_is_something_to_check() -> None:
    assert book.ROOT / "README.md" in PAGES
    assert book.ROOT / "01_setup" / "README.md" in PAGES
    assert book.ROOT / "appendix" / "chunk_size.md" in PAGES
    assert book.ROOT / "01_setup" / "train.py" in SCRIPTS
    assert book.ROOT / "01_setup" / "notebook.ipynb" in NOTEBOOKS
    assert any(book.commands(page) for page in PAGES)


# ---------------------------------------------------------------------------------------- walkthroughs


def run_cog(names: list[str], printed: Path) -> None:
    """What `cog --check` does; it exits with 5 if a page is not what its blocks write."""
    programs.leave_book()
    with printed.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(Cog().main(["cog", "--check", *names]))


def test_what_cog_wrote_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork, because its blocks import what the book's programs import."""
    monkeypatch.chdir(book.ROOT)
    names = [relative(page) for page in PAGES]
    process = programs.CONTEXT.Process(target=run_cog, args=(names, tmp_path / "printed"))
    process.start()
    process.join(programs.LIMIT)
    assert process.exitcode == 0, (tmp_path / "printed").read_text()


def rendered(page: Path) -> str:
    """A page's text without its comments, which hold the cog blocks."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name in book.CHAPTERS], ids=relative)
def test_a_page_is_read_in_half_an_hour(page: Path) -> None:
    assert len(rendered(page).splitlines()) <= MAX_PAGE_LINES
    assert len(rendered(page).split()) <= MAX_PAGE_WORDS


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name == "appendix"], ids=relative)
def test_an_entry_of_the_appendix_is_short(page: Path) -> None:
    shown = re.sub(r"\n{3,}", "\n\n", rendered(page))  # a run of blank lines renders as one
    assert len(shown.splitlines()) <= MAX_ENTRY_LINES


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_no_link_is_broken(markdown: Path) -> None:
    assert book.broken_links(markdown) == []


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command in a line of shell, split at `&&`, `;` and `|` outside quotes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def missing_paths(block: list[str], start: Path) -> list[str]:
    """The folders and scripts that the commands of one block name and that do not exist.

    A reader begins in `start`. The folder that `git clone` makes is the repository.
    """
    folder, clone, missing = start, None, []
    for words in (words for line in block for words in simple_commands(line)):
        if words[:2] == ["git", "clone"]:
            clone = words[-1].rpartition("/")[2].removesuffix(".git")
        elif words[:1] == ["cd"]:
            folder = book.ROOT if words[1] == clone else (folder / words[1]).resolve()
            missing += [] if folder.is_dir() else [" ".join(words)]
        else:
            scripts = [word for word in words if word.endswith((".py", ".sh"))]
            missing += [name for name in scripts if not (folder / name).is_file()]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_folder_and_script_in_a_command_exists(page: Path) -> None:
    blocks = book.command_blocks(page)
    assert [path for block in blocks for path in missing_paths(block, page.parent)] == []


@pytest.mark.thorough
def test_missing_paths_follows_cd_within_a_block() -> None:
    root = book.ROOT
    assert missing_paths(["cd tests && python test_text.py", "cd ..", "cd tests"], root) == []
    assert missing_paths(["git clone https://x.org/a/b.git", "cd b", "cd tests"], root.parent) == []
    block = ["cd tests", "A=1 uv run python nowhere.py --steps 4 | tee 'a; b.py c'", "cd tests"]
    assert missing_paths(block, root) == ["nowhere.py", "cd tests"]


def test_the_table_of_effects_names_tests_that_exist() -> None:
    text = (HERE / "promises.md").read_text()
    named = re.findall(r"`((?:modules/)?test_\w+\.py)::(test_\w+)`", text)
    assert named
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text()]
    assert missing == []


def test_the_map_of_the_tests_names_files_that_exist() -> None:
    named = re.findall(r"`((?:modules/)?test_[a-z0-9_*]+\.py)`", (HERE / "README.md").read_text())
    assert named
    assert [name for name in named if not list(HERE.glob(name))] == []


# ---------------------------------------------------------------------------------------- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_is_committed_executed_and_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec == book.KERNELSPEC
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    texts = [cell.source for cell in cells] + [book.output_text(output) for output in outputs]
    machine = re.compile(rf"{re.escape(str(book.ROOT))}|/(home|root|Users|tmp)/\w|[A-Z]:\\\\?Users")
    assert [text[:300] for text in texts if machine.search(text)] == []
    assert path.stat().st_size <= book.MAX_NOTEBOOK_BYTES
    assert book.clean(notebook) == notebook


def test_the_readmes_kernel_command_registers_the_kernel_that_notebooks_name(tmp_path: Path) -> None:
    command = next(line for line in book.commands(book.ROOT / "README.md") if "ipykernel install" in line)
    words = shlex.split(command.replace("--user", f"--prefix {shlex.quote(str(tmp_path))}"))
    assert complaint(sys.executable, *words[words.index("python") + 1 :]) == ""
    registered = tmp_path / "share/jupyter/kernels" / book.KERNELSPEC["name"] / "kernel.json"
    assert json.loads(registered.read_text())["display_name"] == book.KERNELSPEC["display_name"]


# ------------------------------------------------------------------------------------------- scripts


@pytest.mark.thorough
def test_code_lines_counts_code_alone() -> None:
    source = (
        '"""Doc\nstring."""\n\n# why\ndef f():\n    """Doc."""\n    return """not\na docstring"""  # end\n'
    )
    assert code_lines(source) == 3


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_a_script_is_short_enough_to_read(script: Path) -> None:
    assert code_lines(script.read_text()) <= MAX_CODE_LINES


@pytest.mark.parametrize(("before", "chapter"), [("", book.CHAPTERS[0]), *pairwise(book.CHAPTERS)])
def test_a_chapter_says_what_it_changes(before: str, chapter: str) -> None:
    """That the table is complete is what it checks itself, whenever cog runs."""
    page = (book.ROOT / chapter / "README.md").read_text()
    assert re.search(rf'files_table\(\s*"{before}",\s*"{chapter}"', page)
    if list((book.ROOT / chapter).glob("*/__init__.py")):
        assert f'packages_table("{chapter}"' in page


# ---------------------------------------------------------------------------------------- repository


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(command: list[str]) -> None:
    assert complaint(sys.executable, "-m", "ruff", *command, ".") == ""


def test_nothing_is_left_to_do() -> None:
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) < 1000 and marker.search(line)  # longer lines are pictures
    ]
    assert found == []


# To bring requirements.txt up to date:
#   uv export -q --offline --frozen --no-hashes --no-dev --no-emit-project \
#       --format requirements-txt > requirements.txt
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_requirements_txt_is_what_uv_locked() -> None:
    switches = "-q --offline --frozen --no-hashes --no-dev --no-emit-project"
    exported = run("uv", "export", *switches.split(), "--format", "requirements-txt")
    assert exported.returncode == 0, exported.stderr
    written = (book.ROOT / "requirements.txt").read_text()
    # By meaning, for versions of uv write the same condition behind a pin in different words.
    environments = [
        {"sys_platform": system, "platform_machine": machine, "python_version": f"3.{minor}"}
        | {"python_full_version": f"3.{minor}.0", "os_name": "nt" if system == "win32" else "posix"}
        | {
            "platform_system": name,
            "platform_python_implementation": python,
            "implementation_name": python.lower(),
        }
        for system, name in (("linux", "Linux"), ("darwin", "Darwin"), ("win32", "Windows"))
        for machine in ("x86_64", "aarch64", "arm64", "AMD64")
        for minor in (11, 12, 13, 14)
        for python in ("CPython", "PyPy")
    ]

    def pins(text: str) -> set[tuple]:
        lines = [line for line in text.splitlines() if re.match(r"\S+==", line)]
        found = [Requirement(line) for line in lines]
        where = [tuple(not pin.marker or pin.marker.evaluate(one) for one in environments) for pin in found]
        return {(pin.name, str(pin.specifier), places) for pin, places in zip(found, where, strict=True)}

    assert pins(written) == pins(exported.stdout) != set()


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(line for line in book.commands(book.ROOT / "README.md") if line.endswith("pytest"))
    assert (book.ROOT / ".ci/run").read_text().splitlines()[-1] == command
