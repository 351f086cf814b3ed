"""A chapter's folder, copied alone, as a reader takes it for a project."""

import shutil
from pathlib import Path

import book
import programs


def copy_chapter(chapter: Path, target: Path) -> Path:
    """Copy a chapter's files, and nothing else of the book; return the copy of its script."""
    for path in book.files():
        if path.is_relative_to(chapter):
            copied = target / path.relative_to(chapter)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    return target / "train.py"


def contents(folder: Path) -> dict[Path, bytes]:
    """What is in each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Alone:
    """A copy of a chapter's folder, with a home and an output folder beside it and nothing of the book."""

    def __init__(self, chapter: Path, flags: list[str], folder: Path):
        self.flags = flags
        self.folder, self.project = folder, folder / "project"
        self.home, self.output = folder / "home", folder / "run"
        self.home.mkdir()
        self.script = copy_chapter(chapter, self.project)

    def start(self, *flags: object, **planted: float) -> programs.Program:
        """Start the copied script, which finds no file of the chapter but the copied ones."""
        places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(self.home))
        return programs.Program(
            self.script, *self.flags, *flags, "--output-dir", self.output, environment=places, **planted
        )

    def kept(self) -> list[Path]:
        """The climatologies that have been computed and kept."""
        return sorted(self.project.glob("outputs/climatology/*.npz"))

    def written_elsewhere(self) -> list[Path]:
        """The files outside the copy and the output folder."""
        inside = (self.project, self.output)
        return [path for path in contents(self.folder) if not any(map(path.is_relative_to, inside))]
