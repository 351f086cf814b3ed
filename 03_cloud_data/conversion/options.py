"""The command line of make_store.py: every option, its default, and what it may be."""

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

from arguments import add_options, flag_of, option, take_over
from checks import check_folder
from conversion.layout import Layout
from errors import refuse
from location import Location
from store_checks import check_secrets, may_hold_secret
from weather import DAYS

CHAPTER = Path(__file__).parent.parent
TRAIN_TIMES = ["1982", "1989"]
# What decides the bytes of a store, and what is taken where neither a flag nor a store
# that has been begun says otherwise.
SETTINGS = {
    "days": 396,
    "resolution": 1.0,
    "variables": None,
    "chunk": [1, 128, 128],
    "shard_times": 0,
    "zarr_format": 3,
    "zstd_level": 1,
    "slab_times": 36,
}
TASKS = ("append", "verify", "repair")


def default_store() -> str:
    """The store of chapters 3 to 6, as seen from where the program was started."""
    return os.path.relpath(CHAPTER / "outputs/buckets/winds/small.zarr")


@dataclass(frozen=True)
class TargetOptions:
    """Where the store is."""

    store: str = option(default_store, "folder, or URL: s3://bucket/name.zarr")
    endpoint: str | None = option(
        None, "an S3 server other than AWS's, for --store", metavar="URL"
    )


@dataclass(frozen=True)
class FileOptions:
    """Which files are read."""

    source: list[str] | None = option(
        None,
        "NetCDF files: patterns in quotes, paths, or URLs of s3://, gs:// and https://",
    )
    source_endpoint: str | None = option(
        None, "an S3 server other than AWS's, for --source", metavar="URL"
    )
    source_region: str | None = option(None, "of the source's bucket on AWS")
    source_anonymous: bool = option(False, "sign no request for a source")
    variables: list[str] | None = option(
        None, "if not given, all on time, latitude and longitude alone"
    )

    def source_location(self, url: str) -> Location:
        """Where a source is."""
        is_on_s3 = url.startswith("s3:")
        return Location(
            url,
            endpoint=self.source_endpoint if is_on_s3 else None,
            region=self.source_region if is_on_s3 else None,
            anonymous=self.source_anonymous,
        )


@dataclass(frozen=True)
class SourceOptions(FileOptions):
    """What it is made of: files, or made-up winds without --source."""

    days: int | None = option(
        None,
        f"to make up, spread over the {DAYS} of 1982 to 1992; if not given, 396",
        below=DAYS + 1,
    )
    resolution: float | None = option(
        None,
        "of the made-up winds, in degrees that divide 180; if not given, 1",
        least=0,
        below=61,
    )
    train_times: list[str] | None = option(
        None,
        "dates or years whose statistics are kept with the store; if not given, "
        f"{' to '.join(TRAIN_TIMES)}, if the source has all these years",
        nargs=2,
        metavar=("FIRST", "LAST"),
    )


@dataclass(frozen=True)
class LayoutOptions:
    """How it is cut and compressed; what is not given is the store's, if it has been begun."""

    patch_size: int | None = option(
        None, "cells along a side of what will be read; if not given, 64"
    )
    chunk: list[str] | None = option(
        None,
        "times, rows and columns; if not given, 1 and twice the patch",
        nargs=3,
        metavar=("TIMES", "ROWS", "COLUMNS"),
    )
    shard_times: int | None = option(
        None, "times of the whole map in a shard; if not given, 0: no shards", least=0
    )
    zarr_format: int | None = option(
        None, "2 has no checksums; if not given, 3", choices=(2, 3)
    )
    zstd_level: int | None = option(
        None, "of compression, 9 is small and slow; if not given, 1", below=10
    )
    slab_times: int | None = option(
        None, "times whose checksums are recorded together; if not given, 36"
    )


@dataclass(frozen=True)
class RunOptions:
    """What is done, and by how many."""

    append: bool = option(False, "add the times of --source to a finished store")
    verify: bool = option(False, "read a finished store again; name what is damaged")
    repair: bool = option(False, "write what is damaged anew, from the sources")
    workers: int = option(
        0, "processes of Dask on this machine; 0: threads of this one", least=0
    )
    scheduler: str | None = option(
        None, "of a Dask cluster that is running", metavar="ADDRESS"
    )


@dataclass(frozen=True)
class Options(RunOptions, LayoutOptions, SourceOptions, TargetOptions):
    """What the program was asked for, checked."""

    @property
    def target(self) -> Location:
        """Where the store is."""
        return Location(self.store, endpoint=self.endpoint)


def parse_options(summary: str, argv: list[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=summary, formatter_class=show_defaults, allow_abbrev=False
    )
    for group in reversed(Options.__bases__):
        add_options(parser, group)
    args = parser.parse_args(argv)
    check_places(args, writes=not args.verify)
    if args.chunk:
        args.chunk = read_chunk(args.chunk)
    elif args.patch_size:
        args.chunk = [1, 2 * args.patch_size, 2 * args.patch_size]
    if args.resolution is not None and (
        not args.resolution or 180 / args.resolution % 1
    ):
        refuse(f"--resolution {args.resolution:g}: give degrees that divide 180")
    tasks = [flag_of(task) for task in TASKS if getattr(args, task)]
    if len(tasks) > 1:
        refuse(f"{' '.join(tasks)}: give one of them")
    if args.append and not args.source:
        refuse("--append: needs --source; give the files whose times are added")
    if args.workers and args.scheduler:
        refuse("--workers, --scheduler: give one of them")
    if args.variables:
        args.variables = sorted(set(args.variables))
    options = Options(**vars(args))
    if not tasks:
        make_settings(options, SETTINGS)  # which refuses what cannot be
    return options


def check_places(args: argparse.Namespace, writes: bool = True) -> None:
    """Refuse places that cannot be, or that hold a secret."""
    check_secrets(args, "store", "endpoint", "source_endpoint")
    for url in args.source or []:
        is_pattern = url.startswith(("s3://", "gs://", "az://")) and "@" not in url
        if may_hold_secret(url) and not is_pattern:
            remedy = "give credentials in the environment, or copy the file first"
            refuse(
                f"--source: it may hold credentials, which errors would show; {remedy}"
            )
    if not args.store:
        refuse("--store: is empty; give a folder or a URL")
    if writes and "://" not in args.store:
        check_folder("--store", os.path.dirname(os.path.abspath(args.store)))


def read_chunk(words: list[str]) -> list[int]:
    """Three numbers of at least 1."""
    try:
        chunk = [int(word) for word in words]
    except ValueError:
        chunk = [0]
    if min(chunk) < 1:
        refuse(f"--chunk {' '.join(words)}: give three whole numbers, at least 1 each")
    return chunk


def make_settings(options: Options, before: dict) -> dict:
    """All that decides the bytes: as given, and else as it was `before`."""
    settings = take_over(SETTINGS, before, vars(options))
    settings = {name: settings[name] for name in SETTINGS}
    times = settings["chunk"][0]
    shard = settings["shard_times"]
    if shard % times or (shard and settings["zarr_format"] == 2):
        remedy = f"give a multiple of {times}, and --zarr-format 3"
        refuse(f"--shard-times {shard}: {remedy}")
    unit = shard or times
    settings["slab_times"] = unit * math.ceil(settings["slab_times"] / unit)
    return settings


def make_layout(settings: dict) -> Layout:
    """How a store with these settings is cut and compressed."""
    names = ("chunk", "shard_times", "zarr_format", "zstd_level", "slab_times")
    return Layout(**{name: settings[name] for name in names})


def require_same(settings: dict, before: dict) -> None:
    """Exit with a remedy unless a store that was begun with `before` may go on so."""
    for name, value in settings.items():
        if value != before[name]:
            reason = f"the store was begun with {in_words(before[name])}"
            remedy = "give that, or another --store"
            refuse(f"{flag_of(name)} {in_words(value)}: {reason}; {remedy}")


def in_words(value: object) -> str:
    """A setting as it is given on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
