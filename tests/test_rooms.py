"""Chapters that consist of several files: shared files stay equal, names collide with nothing, imports stay apart."""

import pickle
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import book
import density
import pytest

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


def test_an_edited_and_a_missing_copy_are_found(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "CHAPTERS", ["01_one", "02_two"])
    monkeypatch.setattr(book, "CARRIED", {"02_two": ["data.py", "model.py", "store.py"]})
    write({"01_one/data.py": "a = 1\n", "01_one/model.py": "b = 2\n", "01_one/store.py": "c = 3\n"})
    write({"02_two/data.py": "a = 1\n", "02_two/model.py": "b = 2 \n"})
    assert book.outdated_copies() == [tmp_path / "02_two/model.py", tmp_path / "02_two/store.py"]


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

ALPHA = """
VALUE = {value}


class Sample:
    pass
"""
BETA = """
import alpha

DOUBLE = 2 * alpha.VALUE
"""


@pytest.fixture
def two_chapters(write: Write) -> None:
    """Two made-up chapters whose files have the same names: beta imports alpha, whose values differ."""
    for chapter, value in (("01_one", 1), ("02_two", 2)):
        write({f"{chapter}/alpha.py": ALPHA.format(value=value), f"{chapter}/beta.py": BETA})


@pytest.fixture
def loaded_alpha(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of one of the names that was loaded before."""
    module = ModuleType("alpha")
    monkeypatch.setitem(sys.modules, "alpha", module)
    return module


@pytest.mark.usefixtures("two_chapters")
def test_each_folder_sees_its_own_files_and_leaves_nothing(
    loaded_alpha: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some tests add a folder to sys.path and leave it there.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "01_one"), *sys.path])
    path, modules = list(sys.path), dict(sys.modules)

    with book.rooms("01_one"):
        import beta as first
    assert (sys.path, sys.modules) == (path, modules)
    with book.rooms("02_two"):
        import beta as second
    assert (sys.path, sys.modules) == (path, modules)

    assert (first.DOUBLE, second.DOUBLE) == (2, 4)
    assert sys.modules["alpha"] is loaded_alpha


@pytest.mark.usefixtures("two_chapters")
def test_an_error_in_the_block_leaves_nothing(loaded_alpha: ModuleType) -> None:
    path, modules = list(sys.path), dict(sys.modules)
    with pytest.raises(ZeroDivisionError), book.rooms("01_one"):
        import beta

        beta.DOUBLE /= 0
    assert (sys.path, sys.modules) == (path, modules)
    with book.rooms("02_two"):
        import alpha
    assert alpha.VALUE == 2


@pytest.mark.usefixtures("two_chapters")
def test_an_object_of_a_folder_that_was_left_cannot_be_pickled() -> None:
    with book.rooms("01_one"):
        from alpha import Sample

        sample = Sample()
        assert isinstance(pickle.loads(pickle.dumps(sample)), Sample)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(sample)
    with book.rooms("02_two"), pytest.raises(pickle.PicklingError):
        pickle.dumps(sample)  # and is not taken for the other folder's class of that name


@pytest.mark.usefixtures("two_chapters")
def test_two_folders_are_never_open_together() -> None:
    with book.rooms("01_one"):
        with pytest.raises(RuntimeError, match=r"01_one are open.* 02_two"), book.rooms("02_two"):
            pass
        import alpha
    assert alpha.VALUE == 1


def test_the_modules_of_the_tests_stay(write: Write) -> None:
    write({"01_one/book.py": "", "01_one/density.py": ""})
    with book.rooms("01_one"):
        assert sys.modules["book"] is book
        assert sys.modules["density"] is density


# ----------------------------------------------------------------------------------------------- density

SOURCE = '''"""A module's docstring,
of two lines."""

import os  # a comment


class Box:
    """A docstring."""

    def short(self): return 1

    def long(self):
        """A docstring."""
        if self:
            return [
                "a string",
                2,
            ]


x = 3
'''


def test_density_counts_statements_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    found = density.measure(path)
    assert (found.lines, found.longest) == (21, "long 7")
    assert found.statements == 8  # import, class, two functions, two returns, if, assignment
    assert found.tokens == 2 + 3 + (6 + 2) + 6 + 3 + (1 + 6) + 3
    assert found.tokens_per_statement == found.tokens / 8
    assert found.mark == ""

    path.write_text("x = 1, 2, 3, 4, 5\n")
    assert density.measure(path).mark == ""
    path.write_text("x = 1, 2, 3, 4, 5, 6\n")
    assert density.measure(path).mark == "!"
    assert density.report([path]).splitlines()[1].split()[:5] == ["!", "1", "1", "13", "13.0"]
    path.write_text("x = 1\n" * 800)  # three tokens each, but many statements
    assert density.measure(path).mark == "!"
