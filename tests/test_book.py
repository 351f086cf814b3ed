"""The helper itself, on small made-up files: each test fails without the behaviour that it names."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import book
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

pytestmark = pytest.mark.thorough

OLD = '''"""The old script."""

import os

# Metres.
WIDTH, HEIGHT = 4, 5  # a small grid


def area(width):
    """How large it is."""
    return width * HEIGHT


def gone():
    return os


if __name__ == "__main__":
    area(WIDTH)
'''
NEW = '''"""The new script."""

import sys
from functools import lru_cache

# Metres.
WIDTH, HEIGHT = 4, 5  # a small grid
DEPTH: int = 6


@lru_cache
# Cached, for it is slow.
def area(width):
    """How large it is."""
    return width * HEIGHT  # not the depth


class Box:
    """A box."""

    size = 3

    # From the bottom.
    @property
    def volume(self):
        """Of the whole box."""

        return area(self.size) * DEPTH


sys.setrecursionlimit(999)

if __name__ == "__main__":
    area(WIDTH)
'''


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[str, str]:
    """The paths of an old and a new script."""
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW)
    return str(tmp_path / "old.py"), str(tmp_path / "new.py")


# -------------------------------------------------------------------------------------------- README


@pytest.mark.parametrize("flags", [[], ["-P"]])
def test_show_writes_once_whatever_the_flags_of_cog(tmp_path: Path, flags: list[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- [[[cog\nimport sys; sys.path.append('tests'); import book\n"
        "book.show('text')\n]]] -->\n<!-- [[[end]]] -->\n"
    )
    cog = [sys.executable, "-m", "cogapp", *flags, str(readme)]
    run = subprocess.run(cog, cwd=book.ROOT, capture_output=True, text=True, check=True)
    assert "]]] -->\n\ntext\n\n<!-- [[[end]]] -->" in run.stdout
    assert run.stdout.count("\ntext\n") == 1


@pytest.mark.parametrize("text", ["one\na: list[set[tuple[int]]]", "a [[[cog"])
def test_show_refuses_what_would_break_cog_on_its_next_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"cog takes \]\]\] for .*; rewrite this line: a"):
        book.show(text)


def test_a_fence_is_longer_than_the_fences_in_it() -> None:
    assert book.fence("a\n", "sh") == "```sh\na\n```"
    assert book.fence("```sh\na\n```", "text").startswith("````text\n```sh\n")
    assert book.fence("```sh\na\n```", "text").endswith("```\n````")


def test_help_text_ignores_the_readers_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "program.py"
    names = ["COLUMNS", "NO_COLOR", "PYTHON_COLORS", "TERM", "FORCE_COLOR"]
    script.write_text(
        "import argparse, os\n"
        f"print(os.getcwd(), *(os.environ.get(k) for k in ({', '.join(map(repr, names))})))\n"
        f"argparse.ArgumentParser(epilog={'word ' * 30!r}).parse_args()\n"
    )
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = book.help_text(str(script))
    assert text.startswith(f"```text\n{tmp_path} 100 1 0 dumb None\nusage: program.py [-h]")
    assert 90 < max(len(line) for line in text.splitlines()[3:]) <= 100
    script.unlink()
    assert book.help_text(str(script)) == text  # cached


def test_help_text_says_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(RuntimeError, match=r"broken.py --help ended with 1:\nno such luck"):
        book.help_text(str(tmp_path / "broken.py"))


# ------------------------------------------------------------------------------------------- scripts


def test_excerpt_is_the_source_as_written(scripts: tuple[str, str]) -> None:
    assert book.excerpt(scripts[1], "HEIGHT", "area", link=False) == (
        "```python\n# Metres.\nWIDTH, HEIGHT = 4, 5  # a small grid\n\n\n"
        "@lru_cache\n# Cached, for it is slow.\ndef area(width):\n"
        '    """How large it is."""\n    return width * HEIGHT  # not the depth\n```'
    )


def test_excerpt_dedents_a_method_and_can_leave_out_docstrings(scripts: tuple[str, str]) -> None:
    assert book.excerpt(scripts[1], "Box.volume", docstring=False, link=False) == (
        "```python\n# From the bottom.\n@property\ndef volume(self):\n    return area(self.size) * DEPTH\n```"
    )
    assert '"""' not in book.excerpt(scripts[1], "Box", docstring=False)


def test_excerpt_links_to_the_line_as_seen_from_the_readme(
    scripts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = NEW.splitlines().index("@lru_cache") + 1
    assert book.excerpt(scripts[1], "area").endswith(f"\n\n[new.py, line {line}](new.py#L{line})")
    cog = type("Cog", (), {"inFile": str(tmp_path / "other" / "README.md")})
    monkeypatch.setitem(sys.modules, "cog", cog)
    assert book.excerpt(scripts[1], "area").endswith(f"(../new.py#L{line})")


def test_excerpt_names_the_script_and_what_it_lacks(scripts: tuple[str, str]) -> None:
    with pytest.raises(LookupError, match=r"new\.py defines no `Box\.weight`"):
        book.excerpt(scripts[1], "Box.weight")
    with pytest.raises(LookupError, match=r"old\.py defines no `Box`"):
        book.excerpt(scripts[0], "Box")


def test_definitions_are_all_but_imports_and_the_docstring(scripts: tuple[str, str]) -> None:
    found = book.definitions(scripts[1])
    names = ["WIDTH, HEIGHT", "DEPTH", "area", "Box", "sys.setrecursionlimit(999)", "__main__"]
    assert list(found) == names
    assert found["DEPTH"] == "DEPTH: int = 6"
    assert found["__main__"] == 'if __name__ == "__main__":\n    area(WIDTH)'


def test_a_name_defined_twice_keeps_both_definitions(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("a = 1\nb = 2\na = 3\n")
    assert book.definitions(str(tmp_path / "twice.py")) == {"a": "a = 1\n\n\na = 3", "b": "b = 2"}


def test_changes_come_in_the_order_of_the_new_script(scripts: tuple[str, str]) -> None:
    assert book.changes(*scripts) == [
        ("DEPTH", "added"),
        ("area", "changed"),
        ("Box", "added"),
        ("sys.setrecursionlimit(999)", "added"),
        ("gone", "dropped"),
    ]


def test_every_change_needs_a_reason_and_every_reason_a_change(scripts: tuple[str, str]) -> None:
    reasons = {name: f"because {name}" for name, _ in book.changes(*scripts)}
    rows = book.what_changes_table(*scripts, reasons).splitlines()
    assert rows[:2] == ["| Definition | What | Why |", "| --- | --- | --- |"]
    assert rows[2] == "| `DEPTH` | added | because DEPTH |"
    assert rows[-1] == "| `gone` | dropped | because gone |"
    wrong = {name: why for name, why in reasons.items() if name != "area"} | {"__main__": "why"}
    with pytest.raises(ValueError, match=r"no reason for area \(changed\); __main__ did not change"):
        book.what_changes_table(*scripts, wrong)


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up book of two folders, which share a file and have changed one."""
    monkeypatch.setattr(book, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("outputs/\n")
    texts = {"old/data.py": "a = 1\n", "old/gone.py": "", "old/train.py": "b = 2\n"}
    texts |= {"new/data.py": "a = 1\n", "new/model.py": "", "new/train.py": "b = 3\n"}
    texts |= {"new/README.md": "", "new/outputs/mine.py": "", "new/deeper/file.py": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_table_of_files_lists_the_named_ones_first(
    two_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"train.py": "it is assembled here", "model.py": "a network"}
    assert book.files_table("old", "new", reasons).splitlines() == [
        "| File | What | Why |",
        "| --- | --- | --- |",
        "| [`train.py`](train.py) | changed | it is assembled here |",
        "| [`model.py`](model.py) | new | a network |",
        "| [`data.py`](data.py) | carried |  |",
    ]
    cog = type("Cog", (), {"inFile": "other/README.md"})
    monkeypatch.setitem(sys.modules, "cog", cog)
    rows = book.files_table("old", "new", {"data.py": "the winds"} | reasons).splitlines()
    assert rows[2] == "| [`data.py`](../new/data.py) | carried | the winds |"


def test_every_new_or_changed_file_needs_a_reason(two_folders: Path) -> None:
    with pytest.raises(
        ValueError, match=r"old -> new: no reason for train\.py \(changed\); there is no gone\.py"
    ):
        book.files_table("old", "new", {"model.py": "a network", "gone.py": "why"})
    reasons = dict.fromkeys(["data.py", "model.py", "train.py"], "all is new")
    with pytest.raises(ValueError, match=r"none -> new: no reason for data\.py \(new\)$"):
        book.files_table("none", "new", {name: why for name, why in reasons.items() if name != "data.py"})
    assert book.files_table("none", "new", reasons).count("| new |") == 3


def test_the_table_of_packages_has_a_row_for_each_and_no_other(two_folders: Path) -> None:
    for name in ("new/__init__.py", "new/deeper/__init__.py", "old/__init__.py"):
        (two_folders / name).touch()
    assert book.packages_table("new", ["For"], {"deeper": ["depth"]}).splitlines() == [
        "| Package | For |",
        "| --- | --- |",
        "| [`deeper/`](deeper) | depth |",
    ]
    with pytest.raises(ValueError, match=r"^new: no row for deeper; there is no higher$"):
        book.packages_table("new", ["For"], {"higher": ["height"]})


def test_diff_counts_the_lines_it_shows(tmp_path: Path) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("".join(f"{n} = {n}\n\n" for n in "abcdefgh"))
    new.write_text(old.read_text().replace("h = h", "h = 1\n--i\n++j"))
    assert book.diff(str(old), str(new)).splitlines() == [
        "3 lines added, 1 removed",
        "",
        "```diff",
        f"--- {old}",
        f"+++ {new}",
        "@@ -12,5 +12,7 @@",
        "",
        " g = g",
        "",
        "-h = h",
        "+h = 1",
        "+--i",
        "+++j",
        "```",
    ]
    assert book.changed_lines(str(old), str(new)) == 4
    assert book.changed_lines(str(old), str(old)) == 0


# ------------------------------------------------------------------------------------------- results

RESULTS = {
    "command": "uv run python train.py --save-results",
    "date": "2026-11-20",
    "machine": {"cpu": "Xeon", "cores": 2, "memory_gb": 24.0, "gpu": None},
    "versions": {"python": "3.11.7", "ipython": "9.0", "torch": "2.15.0"},
    "rows": [{"method": "linear", "rmse": 2.274}, {"method": "U-Net|\n64", "rmse": 1.309}],
}


@pytest.mark.parametrize(
    ("section", "key"), [(None, key) for key in RESULTS] + [("machine", key) for key in RESULTS["machine"]]
)
def test_results_must_say_how_they_were_measured(tmp_path: Path, section: str | None, key: str) -> None:
    lacking = json.loads(json.dumps(RESULTS))
    del (lacking[section] if section else lacking)[key]
    (tmp_path / "good.json").write_text(json.dumps(RESULTS))
    (tmp_path / "bad.json").write_text(json.dumps(lacking))
    assert book.results(str(tmp_path / "good.json")) == RESULTS
    with pytest.raises(ValueError, match=rf"bad\.json lacks .*{key}"):
        book.results(str(tmp_path / "bad.json"))


def test_results_must_hold_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(json.dumps(RESULTS | {"rows": []}))
    with pytest.raises(ValueError, match=r"empty\.json lacks rows"):
        book.results(str(tmp_path / "empty.json"))


def test_table_aligns_numbers_to_the_right() -> None:
    rows = [*RESULTS["rows"], {"method": "nearest", "rmse": 2.5, "seconds": None}]
    columns = {
        "Method": "method",
        "RMSE": "{rmse:.2f}",
        "Range": lambda row: f"{row['rmse']:.1f}x (1.2–3.4)",
        "Seconds": lambda row: row.get("seconds"),
        "On": lambda row: "2 GPUs",
    }
    assert book.table(rows, columns).splitlines() == [
        "| Method | RMSE | Range | Seconds | On |",
        "| --- | --: | --: | --- | --- |",
        "| linear | 2.27 | 2.3x (1.2–3.4) |  | 2 GPUs |",
        r"| U-Net\| 64 | 1.31 | 1.3x (1.2–3.4) |  | 2 GPUs |",
        "| nearest | 2.50 | 2.5x (1.2–3.4) |  | 2 GPUs |",
    ]


def test_measured_names_command_machine_versions_and_date() -> None:
    assert book.measured(RESULTS) == (
        "Measured with `uv run python train.py --save-results` on 2 cores of Xeon, 24 GB, no GPU; "
        "Python 3.11.7, ipython 9.0, torch 2.15.0; 2026-11-20."
    )
    machine = {"cpu": "Grace", "cores": 1, "memory_gb": 7.5, "gpu": "H200"}
    assert "on 1 core of Grace, 7.5 GB, H200; " in book.measured(RESULTS | {"machine": machine})


# ----------------------------------------------------------------------------------------- notebooks


def test_execute_runs_here_with_this_interpreter_and_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python3", book.KERNELSPEC["name"]):  # stale kernels, which must not decide
        kernel = tmp_path / "jupyter" / "kernels" / name
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(
            json.dumps({"argv": ["/no/such/python"], "display_name": "x", "language": "python"})
        )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    cells = [new_code_cell("steps, name = 4, 'a'"), new_code_cell("print(steps, flush=True)\nprint(name)")]
    cells[0].metadata.tags = ["parameters"]
    cells.append(new_code_cell("import os, sys\nprint(sys.executable, os.getcwd())"))
    cells.append(new_code_cell("print(os.getpid())"))
    cells.append(new_code_cell("import shutil; print(shutil.which('python'))"))
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": book.KERNELSPEC}), path)
    before = path.read_bytes()
    done = book.execute(path, {"steps": 9, "name": "b"}, timeout=60)
    assert [cell.execution_count for cell in done.cells] == [1, 2, 3, 4, 5, 6]
    assert done.cells[1].source == "steps = 9\nname = 'b'"
    texts = [cell.outputs[0].text for cell in done.cells[2:]]
    assert texts[:2] == ["9\nb\n", f"{sys.executable} {tmp_path}\n"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(texts[2]), 0)  # the kernel is gone
    assert Path(texts[3].strip()).parent == Path(sys.executable).parent
    assert path.read_bytes() == before


def test_execute_needs_a_cell_for_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), path)
    with pytest.raises(ValueError, match=r"notebook\.ipynb: no cell is tagged `parameters`"):
        book.execute(path, {"steps": 9})


def test_clean_keeps_what_a_reader_sees_and_drops_the_rest() -> None:
    output = new_output("stream", name="stdout", text="1.31\n")
    cell = new_code_cell("x", id="f00d", outputs=[output], execution_count=1)
    cell.metadata.update(tags=["parameters"], execution={"iopub.status.busy": "12:00"})
    metadata = {
        "kernelspec": {"name": "mine", "display_name": "x"},
        "language_info": {"name": "x", "version": "3"},
        "widgets": {},
    }
    dirty = new_notebook(cells=[cell], metadata=metadata)
    dirty.nbformat_minor = 4
    cleaned = book.clean(dirty)
    assert cleaned.metadata == {
        "kernelspec": {
            "display_name": "Training at Larger Scale",
            "language": "python",
            "name": "training-at-larger-scale",
        },
        "language_info": {"name": "python"},
    }
    assert cleaned.cells[0].id == "cell-0"
    assert cleaned.cells[0].metadata == {"tags": ["parameters"]}
    assert (cleaned.cells[0].outputs, cleaned.cells[0].execution_count) == ([output], 1)
    assert cleaned.nbformat_minor == 5
    assert dirty.cells[0].id == "f00d"
    nbformat.validate(cleaned)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (new_output("stream", name="stderr", text="UserWarning"), "a warning or a progress bar"),
        (
            new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}}),
            "a warning or a progress bar",
        ),
        (new_output("stream", name="stdout", text=f"in {book.ROOT}/a"), "a path of this machine"),
        (new_output("execute_result", {"text/html": f"{Path.home()}/a"}), "a path of this machine"),
    ],
)
def test_clean_refuses_what_a_reader_should_not_see(output: nbformat.NotebookNode, problem: str) -> None:
    cells = [new_code_cell("a"), new_code_cell("b", outputs=[output])]
    with pytest.raises(ValueError, match=f"cell-1 shows {problem}"):
        book.clean(new_notebook(cells=cells))


def test_clean_does_not_look_for_paths_in_pictures() -> None:
    picture = new_output("display_data", {"image/png": f"abc{Path.home()}abc"})
    notebook = new_notebook(cells=[new_code_cell("a", outputs=[picture])])
    assert book.clean(notebook).cells[0].outputs == [picture]


def test_a_home_at_the_root_forbids_no_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    output = new_output("stream", name="stdout", text="samples/s")
    notebook = new_notebook(cells=[new_code_cell("a", outputs=[output])])
    assert book.clean(notebook).cells[0].outputs == [output]


def test_save_ends_with_a_newline_and_refuses_large_notebooks(tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    book.save(new_notebook(cells=[new_code_cell("1")]), path)
    small = path.read_text()
    assert small.endswith("}\n")
    with pytest.raises(ValueError, match=r"would hold 1\.5 MB; the limit is 1\.5 MB"):
        book.save(new_notebook(cells=[new_code_cell("x" * 1_500_000)]), path)
    assert path.read_text() == small


# ------------------------------------------------------------------------------------------ Markdown


def test_files_are_what_git_has_or_would_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("outputs/\n")
    for name in ("a.md", "one/a.md", "one/outputs/a.md", "one/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert book.files("*.md") == [tmp_path / "a.md", tmp_path / "one" / "a.md"]
    copied = book.clone(tmp_path / "outputs")
    assert sorted(path.name for path in copied.rglob("*") if path.is_file()) == [
        ".gitignore",
        "a.md",
        "a.md",
        "b.txt",
    ]


LINKS = """# The wind: `u` & v_10!
## Twice
## Twice
<a id="here"></a>
[good](#the-wind-u--v_10) [good](#twice-1) [good](#here) [good](b%20c.txt) [good](two.md#two-2) [good](a.py#L2)
[good](sub/) ![good](<a.py> "a title") [good](https://example.org/none) [good](a.py#L1-L2)
[`code`](missing-1.md) ![picture](missing-2.png) <img src="missing-3.png"> [![x](missing-4)](a.py)
[no](#twice-2) [no](two.md#two-3) [no](a.py#L3) [no](a.py#L1-L3) [no](a.py#top) [no](sub#top)
[no](../outside.md) [no](outputs/b.txt) [no](#not-a-heading)
[reference]: missing-5.md
`[in code](missing-6.md)` <!-- [in a comment](missing-7.md)
-->
```sh
# Not a heading
[in a fence](missing-8.md)
```
"""


def test_broken_links_finds_each_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "outputs").mkdir()
    for path in (tmp_path / "outside.md", root / "outputs" / "b.txt", root / "b c.txt"):
        path.touch()
    (root / "a.py").write_text("# Top\nb = 2\n")
    (root / "two.md").write_text("# Two\n# Two\n# [Two](a.py) #\n")
    (root / "README.md").write_text(LINKS)
    file, heading, end = "no such file", "no such heading", "beyond the end of the file"
    outside = "not in the repository"
    assert sorted(book.broken_links(Path("README.md"), root)) == [
        f"#not-a-heading: {heading}",
        f"#twice-2: {heading}",
        f"../outside.md: {outside}",
        f"a.py#L1-L3: {end}",
        f"a.py#L3: {end}",
        f"a.py#top: {heading}",
        f"missing-1.md: {file}",
        f"missing-2.png: {file}",
        f"missing-3.png: {file}",
        f"missing-4: {file}",
        f"missing-5.md: {file}",
        f"outputs/b.txt: {outside}",
        f"sub#top: {heading}",
        f"two.md#two-3: {heading}",
    ]


def test_commands_are_the_lines_of_the_shell_blocks(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(
        "Text\n````text\n```sh\nnor this\n```\n````\n```sh\n# a comment\n\ncd one  # go there\nuv run a.py \\\n    --steps 4\n```\n"
        "```text\nnot this\n```\n- item\n\n  ~~~sh\n  echo a#b\n  ```\n  ~~~\n```bash\nls\n```\n"
    )
    first = ["cd one", "uv run a.py --steps 4"]
    assert book.command_blocks(path) == [first, ["echo a#b", "```"]]
    assert book.commands(path) == [*first, "echo a#b", "```"]
    assert book.commands(path, "bash") == ["ls"]


# -------------------------------------------------------------------------------------- command line


def test_the_command_line_executes_and_saves_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1")]), path)
    assert book.main(["notebooks", str(path)]) == 0
    saved = nbformat.read(io.StringIO(path.read_text()), as_version=4)
    assert saved.cells[0].outputs[0].data["text/plain"] == "2"
    assert saved.metadata.kernelspec == book.KERNELSPEC
    assert capsys.readouterr().out == f"{path}: executed, 1 kB\n"


def test_the_command_line_fills_every_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "one").mkdir()
    readmes = [tmp_path / "README.md", tmp_path / "one" / "README.md"]
    for readme in readmes:
        readme.write_text("<!-- [[[cog cog.outl('filled') ]]] -->\n<!-- [[[end]]] -->\n")
    assert book.main(["readme"]) == 0
    assert all("\nfilled\n" in readme.read_text() for readme in readmes)
