"""A Zarr store in an Icechunk repository, which keeps every version of it: a snapshot.

Only a run that is given --icechunk or --snapshot imports this. The package is icechunk 1.1
on Python 3.11 and 2.3 or newer above: see https://icechunk.io.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import icechunk
from zarr.abc.store import Store

from errors import DataError, first_line
from location import Location

FIRST_DELAY_MS = 100  # before a read is tried again; doubled each time
LONGEST_DELAY_MS = 5000
# Parts of icechunk's messages, which have no classes of their own in 1.1.
NO_SUCH = "ref not found"
NOT_THERE = ("not found", "NoSuchKey", "doesn't exist", "no longer exists")
NO_REPOSITORY = "repository doesn't exist"
BROKEN_BODY = "error reading a body"
OTHER_FORMAT = "please upgrade the icechunk library"


@dataclass(frozen=True)
class Snapshot:
    """A version of a store."""

    id: str
    store: Store
    note: str  # what a user should know of it


def open_snapshot(location: Location) -> Snapshot:
    """The snapshot that `location` names, or else the newest of its branch or tag.

    DataError if there is no such repository, or no such snapshot in it.
    """
    icechunk.set_logs_filter("error")
    deadline = monotonic() + location.retry_timeout
    while True:
        try:
            return find_snapshot(location)
        except icechunk.IcechunkError as error:
            # What is refused is asked for again by icechunk, and not what breaks off.
            if BROKEN_BODY not in str(error) or monotonic() > deadline:
                raise DataError(explain(error)) from error
        sleep(0.1)


def find_snapshot(location: Location) -> Snapshot:
    """As open_snapshot; IcechunkError if the repository or the snapshot cannot be read."""
    repository = open_repository(location)
    newest = None
    if location.icechunk:
        newest = find_newest(repository, location.icechunk)
    snapshot = location.snapshot or newest
    try:
        about = repository.lookup_snapshot(snapshot)  # a session looks when it reads
    except icechunk.IcechunkError as error:
        if not any(words in str(error) for words in NOT_THERE):
            raise
        reason = f"--snapshot {snapshot}: not in this repository"
        raise DataError(f"{reason}; it may have been deleted") from error
    session = repository.readonly_session(snapshot_id=snapshot)
    when = about.written_at.strftime("%Y-%m-%d %H:%M")
    note = f"Icechunk snapshot {snapshot}, of {when} UTC (last commit: {about.message})"
    containers = (repository.config.virtual_chunk_containers or {}).values()
    places = [describe_place(container, location) for container in containers]
    if places:
        note += f"; refers to files in {', '.join(sorted(places))}"
    if newest and newest != snapshot:
        note += f"; {location.icechunk} is at {newest} now, which is not read"
    return Snapshot(snapshot, session.store, note)


def explain(error: Exception) -> str:
    """The reason in one line, and a remedy."""
    reason = first_line(error)
    remedy = "check URL, --endpoint, --region, --snapshot and credentials"
    if OTHER_FORMAT in reason:
        remedy = "use Python 3.12 or newer, which icechunk 2 needs"
    if NO_REPOSITORY in reason:
        remedy = (
            "leave --icechunk out if it is a plain Zarr, else check URL and --endpoint"
        )
        reason = "no Icechunk repository is there"
    return f"{reason}; {remedy}"


def open_repository(location: Location) -> icechunk.Repository:
    """The repository, which may read the files that it refers to."""
    storage = make_storage(location)
    config = icechunk.Repository.fetch_config(storage)
    if config is None:
        config = icechunk.RepositoryConfig.default()
    config.storage = icechunk.StorageSettings(retries=make_retries(location))
    authorized = {}
    for container in list((config.virtual_chunk_containers or {}).values()):
        prefix = container.url_prefix
        if prefix.startswith("file:") and "://" in location.url:
            continue  # a repository from elsewhere has no say on this disk
        place = find_place(container, location)
        if prefix.startswith("s3:"):
            config.set_virtual_chunk_container(make_container(prefix, place))
        authorized[prefix] = make_credentials(prefix, place.anonymous)
    authorized = icechunk.containers_credentials(authorized)
    return icechunk.Repository.open(storage, config, authorized)


def find_place(
    container: icechunk.VirtualChunkContainer, location: Location
) -> Location:
    """Where files that are referred to lie, and how they are asked for.

    Keys go to AWS and to the server of --endpoint, which may have moved. Another server,
    which the repository names, is asked without.
    """
    place = replace(location, url=container.url_prefix, endpoint=None)
    if not place.url.startswith("s3:"):
        return place
    stored = container.store._0
    place = replace(place, region=stored.region or location.region)
    if not stored.endpoint_url:
        return place
    if location.endpoint:
        return replace(place, endpoint=location.endpoint)
    return replace(place, endpoint=stored.endpoint_url, anonymous=True)


def describe_place(
    container: icechunk.VirtualChunkContainer, location: Location
) -> str:
    """A place of files that are referred to, its server, and whether keys are sent there."""
    place = find_place(container, location)
    server = f" on {place.endpoint}" if place.endpoint else ""
    without = " without keys" if place.anonymous > location.anonymous else ""
    return f"{container.url_prefix}{server}{without}"


def make_storage(location: Location):
    """Where the repository is. DataError if icechunk has no client for it."""
    if "://" not in location.url:
        return icechunk.local_filesystem_storage(str(Path(location.url).absolute()))
    url = urlsplit(location.url)
    place = {"prefix": url.path.strip("/")}
    access = {"anonymous": location.anonymous, "from_env": not location.anonymous}
    if url.scheme in ("s3", "s3a"):
        server = describe_server(location)
        return icechunk.s3_storage(bucket=url.netloc, **place, **access, **server)
    if url.scheme in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=url.netloc, **place, **access)
    if url.scheme in ("az", "azure"):
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return icechunk.azure_storage(
            account=account, container=url.netloc, **place, from_env=True
        )
    if url.scheme in ("http", "https") and hasattr(icechunk, "http_storage"):
        return icechunk.http_storage(location.url)
    reason = f"icechunk {icechunk.__version__} cannot read {url.scheme}://"
    raise DataError(f"{reason}; give a path, s3://, gs:// or az://")


def describe_server(location: Location) -> dict:
    """What icechunk needs to know of an S3 server."""
    server = {
        "region": location.region,
        "requester_pays": os.environ.get("AWS_REQUEST_PAYER") == "requester",
    }
    if location.endpoint:
        server |= {
            "endpoint_url": location.endpoint,
            "allow_http": True,
            "force_path_style": True,
            "region": location.region or "us-east-1",  # which such servers ignore
        }
    return server


def make_retries(location: Location):
    """How often a read is tried, so that it takes about the location's retry_timeout."""
    longest = LONGEST_DELAY_MS / 1000
    return icechunk.StorageRetriesSettings(
        max_tries=7 + round(location.retry_timeout / longest),
        initial_backoff_ms=FIRST_DELAY_MS,
        max_backoff_ms=LONGEST_DELAY_MS,
    )


def make_container(prefix: str, location: Location):
    """A place of files that chunks may lie in, reached as `location` is."""
    url = urlsplit(prefix)
    if url.scheme == "file":
        store = icechunk.local_filesystem_store(url.path)
    elif url.scheme in ("gs", "gcs"):
        store = icechunk.gcs_store()
    elif url.scheme in ("http", "https"):
        store = icechunk.http_store()
    elif url.scheme == "s3":
        server = describe_server(location)
        server["anonymous"] = location.anonymous
        server["s3_compatible"] = bool(location.endpoint)
        store = icechunk.s3_store(**server)
    else:
        reason = f"an Icechunk repository cannot refer to {prefix}"
        raise DataError(f"{reason}; give files on s3://, gs://, https:// or a disk")
    return icechunk.VirtualChunkContainer(prefix, store)


def make_credentials(prefix: str, anonymous: bool):
    """How the files below a prefix are asked for."""
    access = {"anonymous": anonymous, "from_env": not anonymous}
    scheme = urlsplit(prefix).scheme
    if scheme == "s3":
        return icechunk.s3_credentials(**access)
    if scheme in ("gs", "gcs"):
        return icechunk.gcs_credentials(**access)
    access = "LocalFileSystemAccess" if scheme == "file" else "HttpAccess"
    return getattr(icechunk.credentials, access, None)  # of which icechunk 1 has none


def find_newest(repository, name: str) -> str:
    """The newest snapshot of a branch, or that of a tag. DataError if there is none."""
    for lookup in (repository.lookup_branch, repository.lookup_tag):
        try:
            return lookup(name)
        except icechunk.IcechunkError as error:
            if NO_SUCH not in str(error):
                raise
    names = sorted([*repository.list_branches(), *repository.list_tags()])
    reason = f"--icechunk {name}: no such branch or tag"
    known = ", ".join(names)
    raise DataError(f"{reason}; it has {known}; give an id as --snapshot")
