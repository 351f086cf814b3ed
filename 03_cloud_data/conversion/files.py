"""The files that paths, patterns and URLs name."""

import glob
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from botocore.exceptions import BotoCoreError
from obstore.exceptions import BaseError
from obstore.store import from_url

from errors import DataError, first_line
from location import Location, client_options

WILD = set("*?[")


@dataclass(frozen=True)
class SourceFile:
    """A file, and what tells whether it has changed."""

    location: Location
    size: int  # bytes
    modified: str

    @property
    def name(self) -> str:
        """The name of the file, without its folder."""
        return self.location.url.rpartition("/")[2]


def identify(files: list[SourceFile]) -> str:
    """A hash of the names, sizes and times of modification, whatever their order."""
    about = sorted((file.name, file.size, file.modified) for file in files)
    return sha256(repr(about).encode()).hexdigest()


def list_files(locations: list[Location]) -> list[SourceFile]:
    """The files that paths, patterns and URLs name, each once. DataError if one names none."""
    files = {}
    for location in locations:
        try:
            is_remote = "://" in location.url
            found = list_remote(location) if is_remote else list_local(location)
        except (OSError, ValueError, BaseError, BotoCoreError) as error:
            raise DataError(f"--source {location.url}: {first_line(error)}") from error
        if not found:
            reason = "no such files; give paths, URLs, or a pattern in quotes"
            raise DataError(f"--source {location.url}: {reason}")
        files |= {file.location.url: file for file in found}
    return list(files.values())


def list_local(location: Location) -> list[SourceFile]:
    """The files on this disk that a path or a pattern names."""
    files = []
    for path in sorted(glob.glob(location.url)):
        if Path(path).is_dir():
            reason = "a folder; give the files in it, as 'FOLDER/*.nc'"
            raise DataError(f"--source {path}: {reason}")
        about = Path(path).stat()
        here = replace(location, url=str(Path(path).absolute()))
        files.append(SourceFile(here, about.st_size, str(about.st_mtime)))
    return files


def list_remote(location: Location) -> list[SourceFile]:
    """The objects that a URL or a pattern names. DataError for a pattern on a web server."""
    server, path = split_url(location.url)
    store = from_url(server, **client_options(location))
    if not WILD & set(path):
        found = [obstore.head(store, path) | {"path": path}]
    elif server.startswith("http"):
        reason = "a web server cannot list its files; give the URL of each"
        raise DataError(f"--source {location.url}: {reason}")
    else:
        folders = path.split("/")[:-1]
        plain = takewhile(lambda folder: not WILD & set(folder), folders)
        found = []
        for page in obstore.list(store, "/".join(plain)):
            found += [one for one in page if is_like(one["path"], path)]
    files = []
    for one in sorted(found, key=lambda one: one["path"]):
        there = replace(location, url=f"{server}/{one['path']}")
        files.append(SourceFile(there, one["size"], str(one["last_modified"])))
    return files


def is_like(path: str, pattern: str) -> bool:
    """Whether a path matches a pattern whose wildcards stay within a folder, as in a shell."""
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def split_url(url: str) -> tuple[str, str]:
    """The bucket or server, and the path in it."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.query:  # a wildcard: check_places refuses it elsewhere
        path += f"?{parts.query}"
    return f"{parts.scheme}://{parts.netloc}", path.lstrip("/")
