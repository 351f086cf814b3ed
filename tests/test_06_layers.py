"""Chapter 6 in layers: which files may import which, and that each optional part can be deleted."""

import ast
import shutil
from pathlib import Path

import book
import pytest
from alone import Alone, copy_chapter
from chapter_6 import SMALL
from made_up_winds import flags_for, make_winds, write
from tracking import run_record

CHAPTER = book.ROOT / "06_whats_next"
MODULES = "modules"  # all files beside train.py but it, tune.py and new_project.py
NEEDED = {MODULES, "survival", "tracking"}
OPTIONAL = ("studies", "predict", "preflight", "plan", "tune.py", "new_project.py")
# What each layer may import besides itself.
LAYERS = {MODULES: set(), "survival": {MODULES}, "tracking": {MODULES}}
LAYERS |= dict.fromkeys(("train", "predict", "preflight", "plan", "tune"), NEEDED)
LAYERS["studies"] = set(LAYERS)
LAYERS["new_project"] = {MODULES}
TEMPLATES = "project_template"  # of new_project.py: the chapter's programs import none of them


def layer_of(name: str) -> str:
    """The layer of a file beside train.py, or of a package."""
    return name if name in LAYERS else MODULES


def imports(script: Path) -> set[str]:
    """The first part of each name that a script imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(script.parent.name if node.level else node.module)
    return {name.partition(".")[0] for name in found}


def test_imports_lead_from_the_programs_down_to_the_modules() -> None:
    scripts = [path for path in book.files("*.py") if path.is_relative_to(CHAPTER)]
    places = {path: path.relative_to(CHAPTER).with_suffix("").parts[0] for path in scripts}
    places = {path: place for path, place in places.items() if place != TEMPLATES}
    packages = {path.parent.name for path in places if path.parent != CHAPTER}
    assert packages <= LAYERS.keys(), "a package without a rule"
    wrong = []
    for path, place in places.items():
        layer = layer_of(place)
        for name in imports(path) & set(places.values()):
            if layer_of(name) not in {layer} | LAYERS[layer]:
                wrong.append(f"{path.relative_to(CHAPTER)} imports {name}")
    assert wrong == []


def copy_without(parts: set[str], folder: Path) -> Alone:
    """A copy of the chapter's folder without these parts, and with a reader's data in data/."""
    alone = Alone(CHAPTER, SMALL, folder)
    (alone.project / "data").mkdir()
    for name in parts:
        path = alone.project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return alone


IMPORT_ALL = """
from importlib import import_module
from pathlib import Path

import data, results

data.PatchMaker, results.save_rows  # not the folders of their names
for path in [*Path().glob("*.py"), *Path().glob("*/[!_]*.py"), *Path().glob("*/__main__.py")]:
    if path.name != "import_all.py":
        import_module(".".join(path.with_suffix("").parts))
        print(path)
"""


@pytest.mark.parametrize("part", OPTIONAL)
def test_without_an_optional_part_all_others_can_be_imported(part: str, tmp_path: Path) -> None:
    """The studies measure the other parts, so they are deleted with each."""
    alone = copy_without({"studies", part}, tmp_path)
    alone.script = alone.project / "import_all.py"
    alone.script.write_text(IMPORT_ALL)
    done = alone.start().wait()
    assert done.code == 0, done.err
    imported = done.out.split()
    assert {"train.py", "survival/boundary.py", "tracking/diary.py"} <= set(imported)
    left = {name.split("/")[0] for name in imported} & set(OPTIONAL)
    assert left == set(OPTIONAL) - {"studies", part}


@pytest.mark.usefixtures("quick_programs")
def test_without_all_optional_parts_it_trains(tmp_path: Path) -> None:
    alone = copy_without(set(OPTIONAL), tmp_path)
    done = alone.start(*flags_for(write(tmp_path / "winds.zarr", make_winds()))).wait()
    assert done.code == 0, done.err
    assert (alone.output / "summary.json").is_file()


def test_uv_takes_the_folder_for_no_project_of_its_own() -> None:
    """In a folder with a pyproject.toml, `uv run` makes an environment without the book's packages."""
    assert not (CHAPTER / "pyproject.toml").exists()


@pytest.mark.parametrize(
    ("name", "decides"), [("data.py", True), ("survival/resume.py", True), ("studies/drills.py", False)]
)
def test_the_checksum_of_the_code_is_of_all_that_a_run_may_depend_on(
    name: str, decides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_chapter(CHAPTER, tmp_path).parent
    monkeypatch.setattr(run_record, "HERE", folder)
    before = run_record.identify_code()
    with open(folder / name, "a") as file:
        file.write("# changed\n")
    assert (run_record.identify_code()["files"] != before["files"]) == decides
