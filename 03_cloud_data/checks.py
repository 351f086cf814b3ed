"""Refuse folders that cannot be used, with a remedy."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from errors import refuse


def check_local(flag: str, folder: str) -> None:
    """Refuse a URL, which would be taken for a path."""
    if "://" in folder:
        refuse(f"{flag} {folder}: a URL; give a path of this machine")


def check_folder(flag: str, folder: str) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made."""
    check_local(flag, folder)
    path = Path(folder).absolute()
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"{error.strerror}; give a folder that can be written to"
        refuse(f"{flag} {folder}: {reason}")
