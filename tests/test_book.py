"""What keeps the book together: shared files stay equal, each folder sees its own, pages and notebooks are checked."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import book
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

Write = Callable[[dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the files of a made-up book, given as path and text, in the place of the real one."""
    monkeypatch.setattr(book, "ROOT", tmp_path)

    def write(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


# ---------------------------------------------------------------------------------------- shared files


def test_declared_copies_are_equal_to_the_previous_chapters_files() -> None:
    assert book.CARRIED.keys() <= set(book.CHAPTERS[1:])
    assert book.outdated_copies() == [], "uv run python tests/book.py carry"


def test_a_change_is_carried_through_two_chapters(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(book, "CHAPTERS", ["01_one", "02_two", "03_three"])
    monkeypatch.setattr(book, "CARRIED", {"03_three": ["data.py"], "02_two": ["data.py", "model.py"]})
    write({"01_one/data.py": "new", "01_one/model.py": "same", "01_one/train.py": "its own"})
    write({"02_two/data.py": "old", "02_two/model.py": "same", "03_three/train.py": "its own, too"})
    assert book.outdated_copies() == [tmp_path / "02_two/data.py", tmp_path / "03_three/data.py"]

    assert book.main(["carry"]) == 0

    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["02_two/data.py", "03_three/data.py"]
    folded = (tmp_path / ".gitattributes").read_text().splitlines()
    assert folded == [
        f"{name} linguist-generated" for name in ("02_two/data.py", "02_two/model.py", "03_three/data.py")
    ]
    assert (tmp_path / "02_two/data.py").read_text() == "new"
    assert (tmp_path / "03_three/data.py").read_text() == "new"
    assert (tmp_path / "03_three/train.py").read_text() == "its own, too"
    assert book.outdated_copies() == []
    assert book.carry() == []


# ------------------------------------------------------------------------------------------------ names


def taken(names: set[str]) -> set[str]:
    """Those of the names under which Python would find something else, depending on sys.path."""
    ours = {path.stem for path in book.TESTS.glob("*.py")}
    return names & (sys.stdlib_module_names | packages_distributions().keys() | ours)


def test_no_script_has_the_name_of_a_module_from_elsewhere() -> None:
    assert taken({"profile", "yaml", "numpy", "runs", "train"}) == {"profile", "yaml", "numpy", "runs"}
    names = book.module_names()
    assert {"train", "make_store"} <= names
    assert taken(names) == set()


# ----------------------------------------------------------------------------------------------- imports


def test_each_folder_sees_its_own_files_and_leaves_nothing(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an error. Two folders are never open together, and the modules of the tests stay."""
    for chapter, value in (("01_one", 1), ("02_two", 2)):
        alpha, beta = f"VALUE = {value}\n", "import alpha\n\nDOUBLE = 2 * alpha.VALUE\n"
        write({f"{chapter}/alpha.py": alpha, f"{chapter}/beta.py": beta, f"{chapter}/book.py": ""})
    monkeypatch.setitem(sys.modules, "alpha", ModuleType("alpha"))  # of that name, loaded before
    # Some tests add a folder to sys.path and leave it there.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "01_one"), *sys.path])
    before = list(sys.path), dict(sys.modules)

    with pytest.raises(ZeroDivisionError), book.rooms("01_one"):
        import beta as first

        with pytest.raises(RuntimeError, match=r"01_one are open.* 02_two"), book.rooms("02_two"):
            pass
        assert sys.modules["book"] is book
        first.DOUBLE / 0
    assert (sys.path, sys.modules) == before
    with book.rooms("02_two"):
        import beta as second
    assert (sys.path, sys.modules) == before
    assert (first.DOUBLE, second.DOUBLE) == (2, 4)


# ------------------------------------------------------------------------------------------------ pages

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


def test_every_changed_file_needs_a_reason(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"01_one/train.py": "a = 1\n", "02_two/train.py": "a = 2\n", "02_two/model.py": ""})
    monkeypatch.setattr(book, "files", lambda pattern: sorted(book.ROOT.rglob(pattern)))
    with pytest.raises(ValueError, match=r"no reason for train\.py \(changed\); there is no gone\.py"):
        book.files_table("01_one", "02_two", {"model.py": "a network", "gone.py": "why"})
    assert "| changed | it is two |" in book.files_table(
        "01_one", "02_two", {"model.py": "a network", "train.py": "it is two"}
    )
    assert "| changed |" not in book.files_table("02_two", "02_two", {"train.py model.py": "both"})
    with pytest.raises(ValueError, match="differ in kind"):
        book.files_table("01_one", "02_two", {"train.py model.py": "both"})


# ---------------------------------------------------------------------------------------- results, notebooks

RESULTS = {
    "command": "uv run python train.py --save-results",
    "date": "2026-11-20",
    "machine": {"cpu": "Xeon", "cores": 2, "memory_gb": 24.0, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
    "rows": [{"method": "linear", "rmse": 2.274}],
}


@pytest.mark.parametrize("key", [*RESULTS, "gpu"])
def test_results_must_say_how_they_were_measured(tmp_path: Path, key: str) -> None:
    lacking = json.loads(json.dumps(RESULTS))
    (lacking["machine"] if key == "gpu" else lacking).pop(key)
    (tmp_path / "good.json").write_text(json.dumps(RESULTS))
    (tmp_path / "bad.json").write_text(json.dumps(lacking))
    assert book.results(str(tmp_path / "good.json")) == RESULTS
    with pytest.raises(ValueError, match=rf"bad\.json lacks .*{key}"):
        book.results(str(tmp_path / "bad.json"))


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


def test_a_notebook_is_executed_with_this_interpreter_and_its_parameters(tmp_path: Path) -> None:
    """And its file stays as it is: only `save` writes one, as long as it is small."""
    cells = [new_code_cell("steps = 4"), new_code_cell("import sys; print(steps, sys.executable)")]
    cells[0].metadata.tags = ["parameters"]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": book.KERNELSPEC}), path)
    before = path.read_bytes()
    done = book.execute(path, {"steps": 9}, timeout=60)
    assert done.cells[2].outputs[0].text == f"9 {sys.executable}\n"
    with pytest.raises(ValueError, match=r"would hold 1\.5 MB; the limit is 1\.5 MB"):
        book.save(new_notebook(cells=[new_code_cell("x" * 1_500_000)]), path)
    assert path.read_bytes() == before
