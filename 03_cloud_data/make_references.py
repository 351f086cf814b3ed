"""Chapter 3: train from NetCDF files where they lie, without copying a byte of them.

    uv run python make_references.py --source 'outputs/files/396_days_1.5_degrees/*.nc' --store outputs/w.json
    uv run python make_references.py --source 's3://bucket/era5/*.nc' --store s3://bucket/winds.icechunk

It reads the head of each file once, and notes in which file, and at which byte, each chunk lies; Zarr then
reads those bytes in place. A .json holds these references in kerchunk's format. An .icechunk repository keeps
a snapshot for each run: a training that names its snapshot reads the same data ever after. Chunks stay as
they are: if one is a whole map, a whole map is what each patch costs. make_store.py's copy is cut better.
"""

import glob
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from time import perf_counter

import boto3
import fsspec
import icechunk
import xarray as xr
from botocore.exceptions import BotoCoreError
from icechunk import Repository
from obspec_utils.readers import BlockStoreReader
from obspec_utils.registry import ObjectStoreRegistry
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError as ObstoreError
from obstore.store import LocalStore, from_url
from tqdm import tqdm
from virtualizarr import open_virtual_dataset
from virtualizarr.manifests import ManifestArray
from virtualizarr.parsers import HDFParser
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from object_store import InputError, Parser, StoreError, reason_of, unsigned

THREADS, BLOCK = 8, 64 * 1024  # bytes; of the default, 1 MiB, a few are a whole small file
PACKING = ("_FillValue", "missing_value", "scale_factor", "add_offset", "units")  # decide what a number means

icechunk_user = None  # the process that has used icechunk: its threads do not survive a fork


# ------------------------------------------------------------------------------------ reading what was noted


def open_references(path: str, anonymous: bool = False) -> FsspecStore:
    """A read-only store of the chunks that a kerchunk file refers to, on this machine or in a bucket."""
    # Zarr's own event loop reads; a client that fsspec has kept might ask where the bucket was before.
    options = {"asynchronous": True, "skip_instance_cache": True}
    options |= {"anon": True} if unsigned(anonymous) else {}
    files = fsspec.filesystem("reference", fo=str(path), asynchronous=True, remote_options=options)
    return FsspecStore(files, read_only=True)


def open_icechunk(
    store: str, snapshot: str | None = None, anonymous: bool = False
) -> tuple[icechunk.IcechunkStore, str]:
    """A read-only store of a snapshot, the last one unless it is named, and the snapshot's id.

    Raises StoreError in the child of a process that has used icechunk, where a read would wait for ever.
    """
    global icechunk_user
    if icechunk_user not in (None, os.getpid()):
        raise StoreError(f"--store {store}: icechunk does not survive a fork; start workers by forkserver")
    icechunk_user = os.getpid()
    which = {"snapshot_id": snapshot} if snapshot else {"branch": "main"}
    session = open_repository(str(store), anonymous=anonymous).readonly_session(**which)
    return session.store, session.snapshot_id


def open_repository(store: str, *folders: str, anonymous: bool = False) -> Repository:
    """Open a repository, and let it read from the folders that it refers to; make it, if `folders` are given.

    Where a bucket is, and who asks, this machine's environment says: what was saved may be another machine's.
    """
    endpoint, region = (os.environ.get(f"AWS_{name}") for name in ("ENDPOINT_URL", "REGION"))
    region = region or os.environ.get("AWS_DEFAULT_REGION")
    if not (region or unsigned(anonymous)):
        with suppress(BotoCoreError):  # no such profile, which is an error only of who needs its keys
            region = boto3.Session().region_name
    s3 = {"endpoint_url": endpoint, "region": region or "us-east-1", "anonymous": unsigned(anonymous)}
    s3 |= {"allow_http": True, "force_path_style": endpoint is not None}  # http://host/bucket
    if store.startswith("s3://"):
        bucket, _, prefix = store.removeprefix("s3://").partition("/")
        storage = icechunk.s3_storage(bucket=bucket, prefix=prefix, **s3)
    elif not folders and not Path(store).is_dir():  # else icechunk would make the folder
        raise StoreError(f"--store {store}: no such repository")
    else:
        icechunk.set_logs_filter("error")  # it warns that two programs must not commit to a folder at once
        storage = icechunk.local_filesystem_storage(store)
    saved = Repository.fetch_config(storage) if Repository.exists(storage) else None
    config = saved or icechunk.RepositoryConfig.default()
    undivided = icechunk.StorageConcurrencySettings(max_concurrent_requests_for_object=1)
    config.storage = icechunk.StorageSettings(concurrency=undivided)  # else each chunk may take five requests
    allowed = dict.fromkeys([*(config.virtual_chunk_containers or ()), *folders])
    for name in allowed:
        local = name.startswith("file://")
        place = icechunk.local_filesystem_store(name[7:]) if local else icechunk.s3_store(**s3)
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(name, place))
    repository = (Repository.open_or_create if folders else Repository.open)(storage, config, allowed)
    if folders:
        repository.save_config()
    return repository


# ---------------------------------------------------------------------------------------- scanning the files


def list_files(source: str, anonymous: bool = False) -> tuple[list[str], ObjectStoreRegistry]:
    """The URLs of the files that the pattern matches, and the object store that they are read from."""
    if "://" not in source:
        place, store = "file://", LocalStore()
        keys = [str(Path(name).absolute()) for name in sorted(glob.glob(source))]
    elif source.startswith("s3://"):
        place = "/".join(source.split("/")[:3])
        options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 3}}
        try:  # boto3 renews what expires, so ask it every time
            provider = None if unsigned(anonymous) else Boto3CredentialProvider(ttl=timedelta(0))
        except (ValueError, BotoCoreError) as error:
            reason = "no credentials in the environment, a profile or the machine"
            raise InputError(f"--source {source}: {reason}; for a public bucket, --anonymous") from error
        options |= {"credential_provider": provider} if provider else {"skip_signature": True}
        store = from_url(place, **options)
        pattern = source.removeprefix(place)
        folder = pattern.partition("*")[0].rpartition("/")[0].strip("/")
        keys = sorted(f"/{item['path']}" for item in store.list(folder or None).collect())
        keys = [key for key in keys if PurePosixPath(key).match(pattern)]
    else:
        raise InputError(f"--source {source}: give files on this machine, or s3://bucket/...")
    if not keys:
        raise InputError(f"--source {source}: no such files")
    return [place + key for key in keys], ObjectStoreRegistry({place: store})


def scan(url: str, registry: ObjectStoreRegistry) -> xr.Dataset:
    """Where a file's chunks lie, as a dataset without data; only its coordinates are read."""
    parser = HDFParser(reader_factory=partial(BlockStoreReader, block_size=BLOCK))
    try:
        dataset = open_virtual_dataset(url, registry, parser)
    except Exception as error:  # of many types, for a file that is cut short or of another kind
        reason = f"not a NetCDF-4 file that can be referred to ({reason_of(error)})"
        raise InputError(f"--source {url}: {reason}") from error
    if "time" not in dataset.indexes or not dataset.time.size:
        raise InputError(f"--source {url}: has no times")
    return dataset


def layout(dataset: xr.Dataset) -> dict:
    """By variable, what files must share to become one: grid, chunks, compression, and what a number means.

    Archives often pack each file with a scale of its own; the first file's would be applied to all.
    """
    found = {name: values.values.tolist() for name, values in dataset.coords.items() if name != "time"}
    for name, variable in dataset.variables.items():
        if isinstance(variable.data, ManifestArray):
            meta, packing = variable.data.metadata, [variable.attrs.get(key) for key in PACKING]
            lengths = [length for dim, length in variable.sizes.items() if dim != "time"]
            found[name] = (variable.dims, lengths, meta.data_type, meta.chunks, meta.codecs, packing)
    return found


def combine(datasets: dict[str, xr.Dataset]) -> xr.Dataset:
    """Put files, by URL, after each other in time; InputError names the first that does not fit."""
    urls = sorted(datasets, key=lambda url: datasets[url].time.values[0])
    first, remedy = layout(datasets[urls[0]]), "leave it out, or copy all with make_store.py"
    for before, url in pairwise(urls):
        this = layout(datasets[url])
        if differ := [name for name in first | this if first.get(name) != this.get(name)]:
            reason = f"grid, chunks, compression or packing of {differ[0]} are not those of {urls[0]}"
            raise InputError(f"--source {url}: {reason}; {remedy}")
        if datasets[url].time.values[0] <= datasets[before].time.values[-1]:
            raise InputError(f"--source {url}: begins before {before} ends; {remedy}")
    options = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "exact"}
    try:
        whole = xr.concat([datasets[url] for url in urls], "time", combine_attrs="override", **options)
    except ValueError as error:  # a file ends within a chunk of several times
        raise InputError(f"--source: {reason_of(error)} Copy them with make_store.py") from error
    whole.time.encoding.clear()  # each file counts from a date, and in a unit, of its own
    return whole


# --------------------------------------------------------------------------------------------------- writing


def check_target(store: str) -> None:
    """InputError unless the name says what to write, and nothing else is there."""
    path = Path(store)
    if path.suffix not in (".json", ".icechunk") or (path.suffix == ".json" and "://" in store):
        raise InputError(
            f"--store {store}: give a file, .json, or a repository, .icechunk or s3://....icechunk"
        )
    ours = Path(store, "snapshots").is_dir() or (path.is_file() and b'"refs"' in path.read_bytes())
    if path.exists() and not ours:
        raise InputError(f"--store {store}: is there, and something else; remove it, or give another name")


def write_references(whole: xr.Dataset, path: Path) -> None:
    """Write a kerchunk file aside, then rename it: a kill or a full disk never leaves half a file."""
    aside = path.with_name(f"part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.vz.to_kerchunk(aside, format="json")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise InputError(f"--store {path}: cannot write it ({error}); make room or choose another") from error


def write_snapshot(whole: xr.Dataset, store: str, folders: set[str]) -> str:
    """Commit the references in place of the last snapshot's, which is kept; return the new one's id."""
    session = open_repository(store, *folders).writable_session("main")
    sync(session.store.clear())
    whole.vz.to_icechunk(session.store)  # notes when, too: a file that changes later is an error
    first, last = whole.time.values[[0, -1]].astype("datetime64[D]")
    return session.commit(f"{whole.time.size} times, {first} to {last}")


def main(argv: list[str] | None = None) -> dict:
    """Scan the files, write the references; return files, times, scan seconds, and bytes or snapshot."""
    warnings.filterwarnings("ignore", message="Numcodecs codecs are not in the Zarr version 3")  # nor need be
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="pattern of NetCDF-4 files, here or s3://bucket/...")
    parser.add_argument("--store", required=True, help="a .json of references, or an .icechunk repository")
    parser.add_argument("--anonymous", action="store_true", help="read a public bucket, without credentials")
    args = parser.parse_args(argv)
    check_target(args.store)
    urls, registry = list_files(args.source, args.anonymous)  # a bucket of one's own is written with keys
    began = perf_counter()
    with ThreadPoolExecutor(THREADS) as executor:
        scans = executor.map(partial(scan, registry=registry), urls)
        whole = combine(dict(zip(urls, tqdm(scans, "scanned", len(urls), unit="file"))))
    figures = {"files": len(urls), "times": whole.time.size, "scan_seconds": perf_counter() - began}
    if args.store.endswith(".json"):
        write_references(whole, Path(args.store))
        figures["bytes"] = Path(args.store).stat().st_size
    else:
        figures["snapshot"] = write_snapshot(
            whole, args.store, {f"{url.rpartition('/')[0]}/" for url in urls}
        )
    print(f"{args.store}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError, ObstoreError, icechunk.IcechunkError) as error:
        reason = str(error).strip().rpartition("`-> ")[2] or reason_of(error)  # icechunk tells the cause last
        reason = reason.splitlines()[0]
        print(f"{Path(__file__).name}: error: {reason}", file=sys.stderr)
        sys.exit(2)
