"""Chapter 3: read NetCDF files where they are, as one Zarr store, in an Icechunk repository.

    uv run python make_references.py --source 's3://bucket/*.nc' --store s3://mine/winds.icechunk
    uv run python make_references.py --source new.nc --store s3://mine/winds.icechunk --append
    uv run python train.py --store s3://mine/winds.icechunk --icechunk main

No value is copied: the repository says in which bytes of which file each chunk lies. Each
run adds a snapshot, and whoever trains stays on the one that it began with. The files keep
their chunks, which decide how fast patches are read: see appendix/by_reference.md. They
must stay as they are: one that is written later is refused when it is read.

You should see how many chunks of how many bytes the snapshot refers to, and its id.
"""

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import icechunk
import xarray as xr

from arguments import add_options, option
from conversion.files import SourceFile, identify, list_files
from conversion.options import FileOptions, check_places
from conversion.sources import open_source
from ending import silence
from errors import DataError, refuse
from icechunk_store import explain
from location import Location
from referring.parts import join
from referring.places import prefix_of
from referring.repository import holds_fields, is_there, make_repository, require_later

BRANCH = "main"


@dataclass(frozen=True)
class RepositoryOptions:
    """Where the repository is, and what is done to it."""

    store: str | None = option(None, "a folder, s3:// or gs://")
    endpoint: str | None = option(
        None, "an S3 server other than AWS's, for --store", metavar="URL"
    )
    region: str | None = option(None, "of the repository's bucket on AWS")
    append: bool = option(False, "add later times to a repository that is there")
    message: str | None = option(None, "of the commit; if not given, what is added")


@dataclass(frozen=True)
class Options(RepositoryOptions, FileOptions):
    """What the program was asked for, checked."""

    @property
    def target(self) -> Location:
        """Where the repository is."""
        return Location(self.store, endpoint=self.endpoint, region=self.region)


def main(argv: list[str] | None = None) -> str:
    """Refer to the files that the command line names; errors end with code 2."""
    options = parse_options(argv)
    silence()
    icechunk.set_logs_filter("error")
    try:
        return refer(options)
    except DataError as error:
        refuse(str(error))
    except icechunk.IcechunkError as error:
        refuse(f"--store {options.store}: {explain(error)}")


def parse_options(argv: list[str] | None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    summary = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(
        description=summary, formatter_class=show_defaults, allow_abbrev=False
    )
    for group in reversed(Options.__bases__):
        add_options(parser, group)
    args = parser.parse_args(argv)
    for name in ("source", "store"):
        if not getattr(args, name):
            refuse(f"--{name}: not given; say what is referred to, and from where")
    if Path(args.store).is_file():
        refuse(f"--store {args.store}: a file; give a folder, or a URL")
    check_places(args)
    return Options(**vars(args))


def refer(options: Options) -> str:
    """Add a snapshot that refers to the files; return its id."""
    began = datetime.now(UTC)
    exists = is_there(options.target)
    places = [options.source_location(url) for url in options.source]
    files = list_files(places)
    check_target(options, exists, files)
    source = open_source(files, options.variables)
    added, time = join(source)
    if identify(list_files(places)) != identify(files):
        raise DataError("--source: files have changed meanwhile; run this again")
    prefixes = {prefix_of(file.location): file.location for file in files}
    repository = make_repository(options.target, prefixes, exists)
    session = repository.writable_session(BRANCH)
    follows = holds_fields(session.store)
    if follows:
        require_later(added, session.store, time)
    added.vz.to_icechunk(
        session.store,
        append_dim=time if follows else None,
        last_updated_at=began + timedelta(seconds=1),  # of which whole seconds are kept
    )
    if exists:
        repository.save_config()  # which may have new places
    days = source.dates[[0, -1]].astype("datetime64[D]")
    number = "a file" if len(files) == 1 else f"{len(files)} files"
    message = f"{number} of {days[0]} to {days[1]}"
    snapshot = commit(session, options.message or message)
    print_chunks(message, added)
    print(f"snapshot {snapshot} of branch {BRANCH} in {options.store}")
    return snapshot


def check_target(options: Options, exists: bool, files: list[SourceFile]) -> None:
    """DataError if nothing can be put there, or if it may not refer to these files."""
    if exists != options.append:
        found = "an" if exists else "no"
        remedy = "give --append, or another" if exists else "leave --append out"
        reason = f"{found} Icechunk repository is there"
        raise DataError(f"--store {options.store}: {reason}; {remedy}")
    are_here = ["://" not in file.location.url for file in files]
    if any(are_here) and "://" in options.store:
        reason = "only a repository on a disk refers to files on it"
        raise DataError(f"--store {options.store}: {reason}; give a folder")


def commit(session: icechunk.Session, message: str) -> str:
    """The new snapshot's id. DataError if another one came first."""
    try:
        return session.commit(message)
    except icechunk.ConflictError as error:
        reason = f"another commit to {BRANCH} came first"
        raise DataError(f"--append: {reason}; run this again") from error


def print_chunks(message: str, added: xr.Dataset) -> None:
    """What is referred to: how many chunks of how many bytes, and of which shape."""
    lengths = []
    shapes = []
    for name, field in added.items():
        lengths += [entry["length"] for entry in field.data.manifest.dict().values()]
        shapes.append(
            f"  {name} in chunks of {' x '.join(map(str, field.data.chunks))}"
        )
    size = sum(lengths) / 1e6
    print(
        f"{message}: {len(lengths):,} chunks of together {size:,.1f} MB",
        *shapes,
        sep="\n",
    )


if __name__ == "__main__":
    main()
