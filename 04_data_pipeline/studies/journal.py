"""What a study has measured so far, so that a stopped one goes on where it was."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from studies.stores import full_or_quick

FOLDER = Path(__file__).resolve().parent.parent
OUTPUTS = FOLDER / "outputs/benchmark"


class Journal:
    """The measurements of a study by their labels; empty if a script has changed since.

    What failed is not written: it is measured again.
    """

    def __init__(self, study: str):
        self.path = journal_path(study)
        self.scripts = hash_scripts()
        self.measured: dict[str, dict] = {}
        with suppress(FileNotFoundError, json.JSONDecodeError):
            written = json.loads(self.path.read_text())
            if written["scripts"] == self.scripts:
                self.measured = written["measured"]

    def add(self, key: str, found: dict) -> None:
        """Keep what was found, and write all of it unless it is an error."""
        self.measured[key] = found
        good = {key: run for key, run in self.measured.items() if "error" not in run}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"scripts": self.scripts, "measured": good}))
        part.replace(self.path)


def journal_path(study: str) -> Path:
    """Where the measurements of a study are until it is whole."""
    return OUTPUTS / full_or_quick(f"{study}.json", f"{study}_quick.json")


def hash_scripts() -> str:
    """A hash of the scripts of all chapters: a later one measures its step, too."""
    scripts = sorted([*FOLDER.parent.glob("0*/*.py"), *FOLDER.glob("studies/*.py")])
    digest = hashlib.sha256()
    for script in scripts:
        digest.update(script.read_bytes())
    return digest.hexdigest()
