"""Where files are, as VirtualiZarr and Icechunk name it."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from obstore.store import LocalStore, ObjectStore, from_url

from errors import DataError
from location import Location, client_options

# VirtualiZarr takes them as they are in a name, and Icechunk as parts of a URL.
PARTS_OF_A_URL = re.compile("[%#?]")


def url_of(location: Location) -> str:
    """A file's URL, also of one on this disk. DataError if its name cannot be referred to."""
    name = location.url.partition("://")[2] or location.url
    found = PARTS_OF_A_URL.search(name)
    if found:
        reason = f"a reference cannot hold the {found[0]} in its name"
        raise DataError(f"--source {location.url}: {reason}; rename it")
    return location.url if "://" in location.url else f"file://{Path(name).as_posix()}"


def server_of(url: str) -> str:
    """Bucket or server of a URL, as the registry of VirtualiZarr's clients has it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def prefix_of(location: Location) -> str:
    """What a repository may read: a file's bucket or server, or its folder on this disk."""
    url = url_of(location)
    if "://" in location.url:
        return f"{server_of(url)}/"
    return f"{url.rpartition('/')[0]}/"


def connect(location: Location) -> ObjectStore:
    """A client of the file's bucket or server, or of this disk."""
    if "://" not in location.url:
        return LocalStore()
    return from_url(server_of(location.url), **client_options(location))
