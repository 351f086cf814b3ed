"""Chapter 6 in layers: which files may import which, and that each optional part can be deleted."""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import book
import pytest
from alone import Alone, copy_chapter
from chapter_6 import SMALL

CHAPTER = book.ROOT / "06_whats_next"
MODULES = "modules"  # all files beside train.py but it and tune.py
NEEDED = {MODULES, "survival", "tracking"}
# What each layer may import besides itself.
LAYERS = {
    MODULES: set(),
    "survival": {MODULES},
    "tracking": {MODULES},
    "train": NEEDED,
    "predict": NEEDED,
    "preflight": NEEDED,
    "plan": NEEDED,
    "tune": NEEDED,
}
LAYERS["studies"] = set(LAYERS)
OPTIONAL = ("studies", "predict", "preflight", "plan", "tune.py")

# ----------------------------------------------------------------------------------------------- imports


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
    packages = {path.parent.name for path in places if path.parent != CHAPTER}
    assert packages <= LAYERS.keys(), "a package without a rule"
    wrong = []
    for path, place in places.items():
        layer = layer_of(place)
        for name in imports(path) & set(places.values()):
            if layer_of(name) not in {layer} | LAYERS[layer]:
                wrong.append(f"{path.relative_to(CHAPTER)} imports {name}")
    assert wrong == []


# ---------------------------------------------------------------------------------------- copied, deleted

IMPORT_ALL = """
from importlib import import_module
from pathlib import Path

for path in [*Path().glob("*.py"), *Path().glob("*/[!_]*.py"), *Path().glob("*/__main__.py")]:
    if path != Path(__file__).relative_to(Path.cwd()):
        import_module(".".join(path.with_suffix("").parts))
        print(path)
"""


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Alone]:
    """Call it with the parts to delete: a copy of the chapter's folder without them."""

    def copy(*deleted: str) -> Alone:
        alone = Alone(CHAPTER, SMALL, tmp_path)
        for name in deleted:
            path = alone.project / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return alone

    return copy


def run_instead(alone: Alone, source: str) -> str:
    """Run this source in the place of the copy's train.py, and return what it printed."""
    alone.script = alone.project / "instead.py"
    alone.script.write_text(source)
    done = alone.start().wait()
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("part", OPTIONAL)
def test_without_an_optional_part_all_others_can_be_imported(part: str, copied: Callable[..., Alone]) -> None:
    """The studies measure the other parts, so they are deleted with each."""
    alone = copied(*{"studies", part})
    imported = run_instead(alone, IMPORT_ALL).split()
    assert {"train.py", "survival/boundary.py", "tracking/diary.py"} <= set(imported)
    for other in OPTIONAL:
        is_there = any(name.split("/")[0] == other for name in imported)
        assert is_there == (other not in ("studies", part)), other


@pytest.mark.usefixtures("quick_programs")
def test_without_all_optional_parts_it_trains(
    copied: Callable[..., Alone], make_small_store: Callable, tmp_path: Path
) -> None:
    alone = copied(*OPTIONAL)
    store = make_small_store(tmp_path / "winds.zarr")
    done = alone.start("--store", store).wait()
    assert done.code == 0, done.err
    assert (alone.output / "summary.json").is_file()


def test_a_module_beside_a_folder_of_its_name_is_the_one_that_is_imported(
    copied: Callable[..., Alone],
) -> None:
    """`results.py` beside `results/`, and `data.py` beside a reader's `data/`."""
    alone = copied()
    (alone.project / "data").mkdir()
    assert (alone.project / "results").is_dir()
    run_instead(alone, "import data, results\ndata.PatchMaker, results.save_rows\n")


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
    with book.rooms(CHAPTER.name):
        from tracking import run_record

        monkeypatch.setattr(run_record, "HERE", folder)
        before = run_record.identify_code()
        with open(folder / name, "a") as file:
            file.write("# changed\n")
        now = run_record.identify_code()
    assert (now["files"] != before["files"]) == decides
