"""Chapter 3: read NetCDF files where they are, as one Zarr store, in an Icechunk repository.

    uv run python make_references.py --source 's3://bucket/*.nc' --store s3://mine/winds.icechunk
    uv run python make_references.py --source new.nc --store s3://mine/winds.icechunk --append
    uv run python train.py --store s3://mine/winds.icechunk --icechunk main

No value is copied: the repository says in which bytes of which file each chunk lies. Each
run adds a snapshot, and whoever trains stays on the one that it began with. The files keep
their chunks, which decide how fast patches are read: see "By reference" on this chapter's
page. They must stay as they are: a file that is written anew is refused when it is read.

You should see how many chunks of how many bytes the snapshot refers to, and its id.
"""

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import icechunk
import numpy as np
import xarray as xr
import zarr
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore, ObjectStore, from_url
from tqdm import tqdm
from virtualizarr import open_virtual_dataset
from virtualizarr.parsers import HDFParser
from zarr.abc.store import Store

from arguments import add_options, option
from checks import check_secrets
from command_line import KNOWN_WARNINGS
from conversion.files import list_files
from conversion.sources import Source, open_bytes, open_source
from coordinates import find_dimensions
from decoding import FILLS, LIMITS, SCALES
from errors import DataError, first_line, refuse
from icechunk_store import explain, make_container, make_credentials, make_storage
from location import Location, client_options

Attributes = dict[str, dict]  # of each variable
BRANCH = "main"
FORMAT = 1  # of the repository; icechunk 1 and 2 read it
# Attributes that say what the stored numbers mean: one for all files of an array.
MEANING = (*FILLS, *SCALES, *LIMITS, "_Unsigned", "units")
# In which all later times can be written, and as few objects.
TIME_ENCODING = {
    "units": "seconds since 1970-01-01",
    "dtype": "int64",
    "chunks": (10_000,),
}
CONVERT = "convert such files, with make_store.py"


@dataclass(frozen=True)
class Options:
    """Files that are referred to, and where the repository is."""

    source: list[str] | None = option(
        None, "NetCDF-4 files: patterns in quotes, paths, or URLs"
    )
    source_endpoint: str | None = option(
        None, "an S3 server other than AWS's, for --source", metavar="URL"
    )
    source_region: str | None = option(None, "of the source's bucket on AWS")
    source_anonymous: bool = option(False, "sign no request for a source")
    variables: list[str] | None = option(
        None, "if not given, all on time, latitude and longitude alone"
    )
    store: str | None = option(None, "the repository: a folder, s3:// or gs://")
    endpoint: str | None = option(
        None, "an S3 server other than AWS's, for --store", metavar="URL"
    )
    region: str | None = option(None, "of the repository's bucket on AWS")
    append: bool = option(False, "add later times to a repository that is there")
    message: str | None = option(None, "of the commit; if not given, what is added")

    @property
    def target(self) -> Location:
        """Where the repository is."""
        return Location(self.store, endpoint=self.endpoint, region=self.region)

    def source_location(self, url: str) -> Location:
        """Where a source is."""
        is_on_s3 = url.startswith("s3:")
        return Location(
            url,
            endpoint=self.source_endpoint if is_on_s3 else None,
            region=self.source_region if is_on_s3 else None,
            anonymous=self.source_anonymous,
        )


def main(argv: list[str] | None = None) -> str:
    """Refer to the files that the command line names; errors end with code 2."""
    options = parse_options(argv)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", beginning)
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
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add_options(parser, Options)
    args = parser.parse_args(argv)
    check_secrets(args, "store", "endpoint", "source_endpoint")
    for name in ("source", "store"):
        if not getattr(args, name):
            refuse(f"--{name}: not given; say what is referred to, and from where")
    return Options(**vars(args))


def refer(options: Options) -> str:
    """Add a snapshot that refers to the files; return its id."""
    exists = is_there(options.target)
    if exists != options.append:
        found = "an" if exists else "no"
        remedy = "give --append, or another" if exists else "leave --append out"
        reason = f"{found} Icechunk repository is there"
        raise DataError(f"--store {options.store}: {reason}; {remedy}")
    files = list_files([options.source_location(url) for url in options.source])
    source = open_source(files, options.variables)
    added, time = join(source)
    places = {prefix_of(file.location): file.location for file in files}
    repository = make_repository(options.target, places, exists)
    session = repository.writable_session(BRANCH)
    if exists:
        require_later(added, session.store, time)
        repository.save_config()  # which may have new places
    added.vz.to_icechunk(session.store, append_dim=time if exists else None)
    days = source.dates[[0, -1]].astype("datetime64[D]")
    message = f"{len(files)} files of {days[0]} to {days[1]}"
    snapshot = session.commit(options.message or message)
    chunks, size = count_chunks(added)
    print(f"{message}: {chunks:,} chunks of together {size / 1e6:,.1f} MB")
    print(f"snapshot {snapshot} of branch {BRANCH} in {options.store}")
    return snapshot


def is_there(target: Location) -> bool:
    """Whether there is a repository; to ask would make a folder on a disk."""
    if "://" not in target.url and not Path(target.url).exists():
        return False
    return icechunk.Repository.exists(make_storage(target))


def make_repository(
    target: Location, places: dict[str, Location], exists: bool
) -> icechunk.Repository:
    """The repository that exists, or a new one, which may refer to files in these places."""
    storage = make_storage(target)
    config = icechunk.RepositoryConfig.default()
    if exists:
        config = icechunk.Repository.fetch_config(storage) or config
    authorized = {}
    for prefix, location in places.items():
        config.set_virtual_chunk_container(make_container(prefix, location))
        authorized[prefix] = make_credentials(prefix, location.anonymous)
    authorized = icechunk.containers_credentials(authorized)
    if exists:
        return icechunk.Repository.open(storage, config, authorized)
    newer = {"spec_version": FORMAT} if icechunk.__version__ >= "2" else {}
    return icechunk.Repository.create(storage, config, authorized, **newer)


def join(source: Source) -> tuple[xr.Dataset, str]:
    """All files' fields as references, and the dimension of their times, as the files have it.

    DataError if a file cannot be referred to, or cannot be joined to those before it.
    """
    names = list(source.fields)
    with xr.open_dataset(
        open_bytes(source.files[0].location), decode_cf=False
    ) as first:
        dimensions = find_dimensions(first[names])
        unused = set(first.variables) - {*names, *first[names].dims}
    (time,) = [name for name, dim in dimensions.items() if dim == "time"]
    parts: list[xr.Dataset] = []
    for file in tqdm(source.files, "files referred to", disable=None):
        part = open_part(file.location, names, unused)
        if parts:
            before = attributes(parts[0])
            require_same_meaning(
                attributes(part), before, f"--source {file.location.url}"
            )
        parts.append(part)
    try:
        joined = xr.concat(
            parts, time, coords="minimal", compat="override", combine_attrs="override"
        )
    except (NotImplementedError, ValueError) as error:  # VirtualiZarr's
        reason = f"the files differ in chunks or codecs: {first_line(error)}"
        raise DataError(f"--source: {reason}; {CONVERT}") from error
    joined[time].encoding = TIME_ENCODING
    return joined, time


def open_part(location: Location, names: list[str], unused: set[str]) -> xr.Dataset:
    """A file's fields, as references, on its dimensions. DataError if it has no such chunks."""
    url = url_of(location)
    registry = ObjectStoreRegistry({server_of(url): connect(location)})
    parser = HDFParser(drop_variables=unused)
    try:
        opened = open_virtual_dataset(url, registry, parser)
    except Exception as error:  # h5py's, obstore's and VirtualiZarr's share no base
        reason = f"cannot be referred to ({first_line(error)})"
        raise DataError(f"--source {url}: {reason}; {CONVERT}") from error
    for name in names:
        opened[name].attrs.pop("coordinates", None)  # which are not kept
    return opened[names]


def require_same_meaning(here: Attributes, before: Attributes, place: str) -> None:
    """DataError if numbers are packed in another way: an array has one way for all of them."""
    for name in here:
        for key in MEANING:
            found = here[name].get(key)
            expected = before[name].get(key)
            if not np.array_equal(found, expected):
                reason = f"{name} has {key} {found}, and before it had {expected}"
                raise DataError(f"{place}: {reason}; {CONVERT}")


def require_later(added: xr.Dataset, store: Store, time: str) -> None:
    """DataError unless `added` can follow what the repository has."""
    before = xr.open_zarr(store, chunks=None)
    if set(added) != set(before) or set(added.dims) != set(before.dims):
        listed = ", ".join(map(str, before))
        reason = f"the repository has {listed} on {', '.join(map(str, before.dims))}"
        raise DataError(f"--append: {reason}; give the same variables")
    group = zarr.open_group(store, mode="r")
    # As they are stored: VirtualiZarr writes a _FillValue as it is encoded.
    stored = {str(name): group[str(name)].attrs.asdict() for name in added}
    require_same_meaning(attributes(added), stored, "--append")
    for dim in added.dims:
        if dim != time and not np.array_equal(added[dim], before[dim]):
            reason = f"{dim} differs from the repository's"
            raise DataError(f"--append: {reason}; give files of the same grid")
    last = before[time].values[-1]
    if added[time].values[0] <= last:
        reason = f"the repository has times to {str(last)[:16]}"
        raise DataError(f"--append: {reason}; give later ones")


def attributes(fields: xr.Dataset) -> Attributes:
    """Those of each field."""
    return {str(name): field.attrs for name, field in fields.items()}


def url_of(location: Location) -> str:
    """A file's URL, also of one on this disk."""
    if "://" in location.url:
        return location.url
    return Path(location.url).as_uri()


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
    url = url_of(location)
    if "://" not in location.url:
        return LocalStore()
    return from_url(server_of(url), **client_options(location))


def count_chunks(fields: xr.Dataset) -> tuple[int, int]:
    """How many chunks are referred to, and how many bytes they have."""
    lengths = []
    for field in fields.values():
        lengths += [entry["length"] for entry in field.data.manifest.dict().values()]
    return len(lengths), sum(lengths)


if __name__ == "__main__":
    main()
