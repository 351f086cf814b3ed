"""Chapter 3: the S3 server, as obstore, s3fs, boto3 and Zarr see it, beside moto; its faults; and how it ends."""

import asyncio
import calendar
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import book
import boto3
import icechunk
import numpy as np
import obstore
import programs
import pytest
import s3fs
import zarr
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import S3Store
from zarr.storage import FsspecStore, LocalStore, ObjectStore

SCRIPT = "03_cloud_data/local_s3.py"
FAST = ["--latency-ms", 0]
KEYS = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}


@pytest.fixture(autouse=True)
def no_other_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials, endpoints or profiles but those that a test gives."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def start(folder: Path, *flags: object, **options: object) -> subprocess.Popen:
    """The server as a reader starts it; the address is its `url`."""
    command = [sys.executable, book.ROOT / SCRIPT, "--folder", folder, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    process = subprocess.Popen([str(part) for part in command], **pipes)
    process.url = process.stdout.readline().strip()
    return process


@contextmanager
def serve(folder: Path, *flags: object) -> Iterator[str]:
    """The address of a server, which must end by SIGTERM in silence."""
    process = start(folder, *FAST, *flags)
    try:
        assert process.url, process.stderr.read()
        yield process.url
    finally:
        process.terminate()
        _, err = process.communicate(timeout=5)
    assert (process.returncode, err) == (0, "")


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bucket `winds`, of which tests only read."""
    folder = tmp_path_factory.mktemp("buckets")
    files = {"a/b/one": b"0123456789", "a/b.c": b"", "a/bc/two": b"2", "top level + é&<%2F": b"3"}
    for i in range(20):
        files[f"c/{i}/0"] = bytes([i]) * 1000
    for key, content in files.items():
        path = folder / "winds" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "secret").write_text("outside any bucket")
    return folder


@pytest.fixture(scope="module")
def url(buckets: Path) -> Iterator[str]:
    with serve(buckets) as address:
        yield address


def store_of(url: str, bucket: str = "winds", retries: int = 0, **options: object) -> S3Store:
    """obstore's view of a bucket, which does not retry unless told."""
    options = {"skip_signature": True} | options
    retry = {"max_retries": retries}
    client = {"allow_http": True, "timeout": "2s"}
    return S3Store(
        bucket, endpoint=url, region="us-east-1", client_options=client, retry_config=retry, **options
    )


def boto_of(url: str, **options: object):
    """boto3's client, which does not retry; the default session would keep one test's keys for the next."""
    once = Config(retries={"total_max_attempts": 1})
    return boto3.Session().client("s3", endpoint_url=url, config=once, **options)


def counts(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/counts") as reply:
        return json.load(reply)


def ask(url: str, target: str, method: str = "GET", body: bytes | None = None, **headers: str):
    """Status, headers and body of a request whose target is sent as it is given."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request(
        method, target, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    reply = connection.getresponse()
    found = reply.status, dict(reply.headers), reply.read()
    connection.close()
    return found


def code_of(answer: tuple[int, dict, bytes]) -> tuple[int, str]:
    """Status and S3's code of an error."""
    return answer[0], re.search(rb"<Code>(\w+)</Code>", answer[2])[1].decode()


# ------------------------------------------------------------------------------- as S3, of which moto has all


@pytest.fixture(scope="module")
def reference() -> Iterator[str]:
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    yield "http://{}:{}".format(*moto.get_host_and_port())
    moto.stop()


def outcome(call, *args: object, **kwargs: object):
    """What a call of boto3 returns, without what servers may choose, or the error that it raises."""
    try:
        found = call(*args, **kwargs)
    except ClientError as error:
        return error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
    if "Body" in found:
        found["Body"] = found["Body"].read()
    for row in found.get("Contents", []):
        row["Seen"] = sorted(row.keys() & {"LastModified", "ETag"})
    names = {"Body", "ContentLength", "ContentRange", "Contents", "CommonPrefixes", "IsTruncated", "KeyCount"}
    found["Contents"] = [(row["Key"], row["Size"], row["Seen"]) for row in found.get("Contents", [])]
    status = found["ResponseMetadata"]["HTTPStatusCode"]
    return status, {name: value for name, value in found.items() if name in names}


def conversation(url: str) -> list:
    """What a server says to everything that the folder's server claims to do."""
    s3, said = boto_of(url, **KEYS), []

    def say(what: str, **kwargs: object) -> None:
        said.append((what, kwargs, outcome(getattr(s3, what), Bucket="conversation", **kwargs)))

    say("head_bucket")
    say("list_objects_v2")
    say("create_bucket")
    say("head_bucket")
    say("list_objects_v2")
    for key in ("a/b/one", "a/b.c", "a/b", "a-/x", "é + &<>'\"%2F", "z/" * 9 + "z", "a/bc/d/e", "aa"):
        if key != "a/b":  # a file and a folder cannot have one name
            say("put_object", Key=key, Body=key.encode() * 10)
            say("get_object", Key=key)
            say("head_object", Key=key)
    for span in ("0-0", "3-", "-4", "-4000", "5-4000", "4000-", "4000-5000"):
        say("get_object", Key="a/b/one", Range=f"bytes={span}")
    for prefix in ("", "a", "a/", "a/b", "a/b/", "a/b.", "nowhere/", "é"):
        for delimiter in ({}, {"Delimiter": "/"}):
            say("list_objects_v2", Prefix=prefix, **delimiter)
            say("list_objects_v2", Prefix=prefix, MaxKeys=2, **delimiter)
            say("list_objects", Prefix=prefix, **delimiter)
    say("list_objects_v2", StartAfter="a/b/one")
    say("get_object", Key="missing")
    say("head_object", Key="missing")
    say("put_object", Key="aa", Body=b"new", IfNoneMatch="*")
    say("put_object", Key="new", Body=b"new", IfNoneMatch="*")
    say("get_object", Key="aa")
    for source in ("conversation/é + &<>'\"%2F", "conversation/missing", "missing/one"):
        say("copy_object", Key="copied", CopySource=dict(zip(("Bucket", "Key"), source.split("/", 1))))
        say("get_object", Key="copied")
    say("delete_object", Key="copied")
    say("delete_object", Key="aa")
    say("delete_object", Key="aa")
    say("delete_objects", Delete={"Objects": [{"Key": "a/b/one"}, {"Key": "missing"}]})
    say("list_objects_v2", Delimiter="/")
    say("list_objects_v2", Prefix="a/", Delimiter="/")
    upload = {
        "Key": "large",
        "UploadId": s3.create_multipart_upload(Bucket="conversation", Key="large")["UploadId"],
    }
    parts = []
    for number, content in ((2, b"two"), (1, b"1" * 5 * 1024 * 1024)):
        part = s3.upload_part(Bucket="conversation", **upload, PartNumber=number, Body=content)
        parts.insert(0, {"PartNumber": number, "ETag": part["ETag"]})
    say("head_object", Key="large")
    said.append(
        outcome(
            s3.complete_multipart_upload, Bucket="conversation", **upload, MultipartUpload={"Parts": parts}
        )
    )
    say("get_object", Key="large", Range="bytes=5242870-")
    upload = {
        "Key": "left",
        "UploadId": s3.create_multipart_upload(Bucket="conversation", Key="left")["UploadId"],
    }
    said.append(outcome(s3.abort_multipart_upload, Bucket="conversation", **upload))
    say("list_objects_v2")
    return said


def test_it_says_what_moto_says(reference: str, tmp_path: Path) -> None:
    with serve(tmp_path) as url:
        ours = conversation(url)
    for mine, its in zip(ours, conversation(reference), strict=True):
        assert mine == its
    assert not list((tmp_path / ".uploads").iterdir())


def test_a_copy_may_depend_on_what_is_copied(tmp_path: Path) -> None:
    with serve(tmp_path) as url:
        s3 = boto_of(url, **KEYS)
        s3.create_bucket(Bucket="made")
        tag = s3.put_object(Bucket="made", Key="one", Body=b"one")["ETag"]
        copy = {"Bucket": "made", "Key": "two", "CopySource": "made/one"}
        assert outcome(s3.copy_object, **copy, CopySourceIfMatch='"another"') == ("PreconditionFailed", 412)
        assert not (tmp_path / "made/two").exists()
        assert outcome(s3.copy_object, **copy, CopySourceIfMatch=tag)[0] == 200  # which moto does not look at
        assert (tmp_path / "made/two").read_bytes() == b"one"


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
def test_zarr_writes_shards_and_reads_them_without_a_list_of_contents(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((8, 1024, 1024)).astype("float32")  # a shard needs several parts
    (tmp_path / "made").mkdir()
    with serve(tmp_path) as url:
        if kind == "obstore":
            store = ObjectStore(store_of(url, "made", prefix="values.zarr"))
        else:
            fs = s3fs.S3FileSystem(anon=True, endpoint_url=url, asynchronous=True, skip_instance_cache=True)
            store = FsspecStore(fs, path="made/values.zarr")
        group = zarr.create_group(store, overwrite=True)
        shape = {"chunks": (1, 256, 256), "shards": (4, 1024, 1024)}
        group.create_array("values", data=values, compressors=None, **shape)
        again = zarr.open_group(store, mode="r", use_consolidated=False)
        assert list(again) == ["values"]
        np.testing.assert_array_equal(again["values"][5, 300:400, 200:300], values[5, 300:400, 200:300])
        on_disk = zarr.open_group(LocalStore(tmp_path / "made/values.zarr"), mode="r")
        np.testing.assert_array_equal(on_disk["values"][:], values)
        zarr.create_group(store, overwrite=True)
        assert list(zarr.open_group(store, mode="r", use_consolidated=False)) == []
    assert [path.name for path in (tmp_path / "made/values.zarr").iterdir()] == ["zarr.json"]


def test_icechunk_commits_and_one_of_two_writers_loses(tmp_path: Path) -> None:
    (tmp_path / "ice").mkdir()
    with serve(tmp_path) as url:
        where = {"bucket": "ice", "prefix": "repo", "endpoint_url": url, "region": "us-east-1"}
        keys = {"access_key_id": "any", "secret_access_key": "any"}
        storage = icechunk.s3_storage(**where, **keys, allow_http=True, force_path_style=True)
        repository = icechunk.Repository.create(storage)
        one, other = (repository.writable_session("main") for _ in range(2))
        for session, value in ((one, 1), (other, 2)):
            zarr.create_array(session.store, data=np.full(1000, value), chunks=(100,))
        one.commit("one")
        with pytest.raises(icechunk.ConflictError):
            other.commit("other")
        store = icechunk.Repository.open(storage).readonly_session("main").store
        assert (zarr.open_array(store, mode="r")[:] == 1).all()


def test_every_client_lists_the_files_of_a_folder_in_order(buckets: Path, url: str) -> None:
    home = buckets / "winds"
    keys = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    store = store_of(url)
    assert [row["path"] for page in obstore.list(store, chunk_size=3) for row in page] == keys
    assert {row["path"]: row["size"] for row in obstore.list(store).collect()} == {
        key: (home / key).stat().st_size for key in keys
    }
    found = store.list_with_delimiter("a")
    assert (found["common_prefixes"], [row["path"] for row in found["objects"]]) == (
        ["a/b", "a/bc"],
        ["a/b.c"],
    )
    pages = boto_of(url, **KEYS).get_paginator("list_objects_v2")
    pages = list(pages.paginate(Bucket="winds", PaginationConfig={"PageSize": 3}))
    assert [row["Key"] for page in pages for row in page["Contents"]] == keys
    assert len(pages) == -(-len(keys) // 3)
    fs = s3fs.S3FileSystem(anon=True, endpoint_url=url, skip_instance_cache=True)
    assert sorted(fs.find("winds")) == [f"winds/{key}" for key in keys]
    assert fs.ls("winds/a") == ["winds/a/b", "winds/a/b.c", "winds/a/bc"]


def test_more_keys_than_a_page_holds(tmp_path: Path) -> None:
    (tmp_path / "many/c").mkdir(parents=True)
    for i in range(2345):
        (tmp_path / f"many/c/{i}").touch()
    with serve(tmp_path) as url:
        found = [row["path"] for row in obstore.list(store_of(url, "many")).collect()]
    assert found == sorted(f"c/{i}" for i in range(2345))


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-4", 206, b"6789"),
        ("bytes=-40", 206, b"0123456789"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=10-", 416, None),
        ("bytes=5-4", 416, None),
    ],
)
def test_ranges(url: str, asked: str, status: int, body: bytes | None) -> None:
    answer = ask(url, "/winds/a/b/one", Range=asked)
    assert answer[0] == status
    if body is None:
        assert code_of(answer) == (416, "InvalidRange")
        return
    assert answer[2] == body
    first = b"0123456789".index(body)
    assert answer[1]["Content-Range"] == f"bytes {first}-{first + len(body) - 1}/10"
    assert ask(url, "/winds/a/b/one", "HEAD", Range=asked)[1]["Content-Length"] == str(len(body))


def test_an_etag_lasts_as_long_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "b/key"
    path.parent.mkdir()
    path.write_bytes(b"one")
    with serve(tmp_path) as url:
        tag = ask(url, "/b/key")[1]["ETag"]
        assert ask(url, "/b/key", If_None_Match=tag)[::2] == (304, b"")
        (tmp_path / "new").write_bytes(b"two")
        os.replace(tmp_path / "new", path)
        status, headers, body = ask(url, "/b/key", If_None_Match=tag)
        assert (status, body) == (200, b"two")
        assert headers["ETag"] != tag
        assert code_of(ask(url, "/b/key", "PUT", b"three", If_Match=tag)) == (412, "PreconditionFailed")
        assert path.read_bytes() == b"two"
        os.link(path, tmp_path / "linked")  # as large stores are copied
        assert ask(url, "/b/key", "PUT", b"three", If_Match=headers["ETag"])[0] == 200
        assert path.read_bytes() == b"three"
        assert (tmp_path / "linked").read_bytes() == b"two"


def test_half_a_put_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with serve(tmp_path) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"PUT /b/key HTTP/1.1\r\nHost: b\r\nContent-Length: 1000\r\n\r\n" + bytes(500))
            programs.wait_for(lambda: (tmp_path / ".uploads").exists(), 5, "the upload begins")
        programs.wait_for(lambda: not list((tmp_path / ".uploads").iterdir()), 5, "the upload is cleared")
        assert list((tmp_path / "b").iterdir()) == []
        assert ask(url, "/b/key", "PUT", bytes(10))[0] == 200
    assert (tmp_path / "b/key").read_bytes() == bytes(10)


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("GET", "/winds/missing", (404, "NoSuchKey")),
        ("GET", "/winds/a", (404, "NoSuchKey")),
        ("GET", "/winds/a/b/one/below", (404, "NoSuchKey")),
        ("GET", "/nowhere/key", (404, "NoSuchBucket")),
        ("GET", "/nowhere?list-type=2", (404, "NoSuchBucket")),
        ("GET", "/secret", (404, "NoSuchBucket")),
        ("GET", "/.uploads/x", (404, "NoSuchBucket")),
        ("GET", "/winds/a/b/one?acl", (501, "NotImplemented")),
        ("GET", "/", (501, "NotImplemented")),
        ("PUT", "/winds/a", (400, "InvalidRequest")),
        ("PUT", "/winds/a/b/one/below", (400, "InvalidRequest")),
        ("PUT", "/winds/k?partNumber=1&uploadId=..", (404, "NoSuchUpload")),
        ("PUT", "/winds/../out", (404, "NoSuchKey")),
        ("GET", "/../secret", (404, "NoSuchBucket")),
        ("GET", "/winds/../secret", (404, "NoSuchKey")),
        ("GET", "/winds/../../../../../../../../../etc/passwd", (404, "NoSuchKey")),
        ("GET", "/winds/%2e%2e/secret", (404, "NoSuchKey")),
        ("GET", "/winds/a/..%2f..%2fsecret", (404, "NoSuchKey")),
        ("GET", "/winds//etc/passwd", (404, "NoSuchKey")),
        ("GET", "/winds/%2fetc/passwd", (404, "NoSuchKey")),
        ("GET", "/winds/a%00", (404, "NoSuchKey")),
        ("GET", "/%2e%2e/etc/passwd", (404, "NoSuchBucket")),
        ("GET", "/..%2f..%2fetc/passwd", (404, "NoSuchBucket")),
        ("GET", "/winds/link", (404, "NoSuchKey")),
        ("GET", "/winds/way/secret", (404, "NoSuchKey")),
    ],
)
def test_nothing_is_found_outside_a_bucket(
    buckets: Path, url: str, method: str, target: str, code: tuple[int, str]
) -> None:
    links = {buckets / "winds/link": buckets / "secret", buckets / "winds/way": buckets}
    try:
        for link, where in links.items():
            link.symlink_to(where)
        assert code_of(ask(url, target, method)) == code
    finally:
        for link in links:
            link.unlink()
    assert sorted(path.name for path in buckets.iterdir() if path.name != ".uploads") == ["secret", "winds"]


# ------------------------------------------------------------------------------------------------- the faults


async def faults_of(store: S3Store, keys: list[str]) -> dict[str, list[str]]:
    """What befell each read, by key, when all are asked for at once and those that failed are asked again."""
    found = {key: [] for key in keys}

    async def read(key: str) -> None:
        while "none" not in found[key]:
            try:
                assert len(await (await obstore.get_async(store, key)).bytes_async()) == 1000
                found[key].append("none")
            except BaseError as error:
                text = f"{error!r}"
                kinds = {"SlowDown": "SlowDown", "reset": r"ConnectionReset|reset by peer"}
                kinds |= {"truncate": "IncompleteBody"}
                found[key].append(next(name for name, words in kinds.items() if re.search(words, text)))

    await asyncio.gather(*(read(key) for key in keys))
    return found


def test_faults_by_chance_are_the_same_again_in_any_order(buckets: Path) -> None:
    rates = ["--error-rate", 0.2, "--reset-rate", 0.2, "--truncate-rate", 0.2]
    keys, runs = [f"c/{i}/0" for i in range(20)], []
    for seed, order in ((1, keys), (1, keys[::-1]), (2, keys)):
        with serve(buckets, *rates, "--seed", seed) as url:
            runs.append(asyncio.run(faults_of(store_of(url), order)))
            seen = [name for names in runs[-1].values() for name in names]
            counted = counts(url)
        assert {name: counted[name] for name in ("SlowDown", "reset", "truncate")} == {
            name: seen.count(name) for name in ("SlowDown", "reset", "truncate")
        }
        assert counted["reads"] == counted["requests"] == len(seen)
        assert 0.4 < 1 - seen.count("none") / len(seen) < 0.8
    assert runs[0] == runs[1] != runs[2]


def test_a_client_that_retries_reads_what_is_there_in_spite_of_faults(buckets: Path) -> None:
    with serve(buckets, "--error-rate", 0.1, "--reset-rate", 0.1) as url:
        store = store_of(url, retries=10)
        for i in range(20):
            assert bytes(store.get(f"c/{i}/0").bytes()) == bytes([i]) * 1000
        assert counts(url)["SlowDown"] + counts(url)["reset"] > 0


def test_one_read_stalls_and_the_next_does_not(buckets: Path) -> None:
    with serve(buckets, "--stall-at", 3) as url:
        store = store_of(url)  # which waits for 2 seconds
        answered = []
        for i in range(5):
            began = time.monotonic()
            try:
                store.get(f"c/{i}/0")
                answered.append(True)
            except BaseError as error:
                assert "timed out" in f"{error!r}" or "Timeout" in f"{error!r}"
                assert time.monotonic() - began >= 2
                answered.append(False)
        assert answered == [True, True, False, True, True]
        assert counts(url)["stall"] == 1


def test_planned_faults_last(buckets: Path) -> None:
    with serve(buckets, "--fail-key", "c/7/", "--deny-key", "a/b") as url:
        store = store_of(url)
        for _ in range(5):
            with pytest.raises(BaseError, match="SlowDown"):
                store.get("c/7/0")
            with pytest.raises(PermissionDeniedError, match="AccessDenied"):
                store.get("a/b/one")
        assert len(store.get("c/8/0").bytes()) == 1000
        assert [counts(url)[name] for name in ("fail", "deny", "reads")] == [5, 5, 11]


def test_more_reads_than_the_rate_allows_are_refused(buckets: Path) -> None:
    with serve(buckets, "--max-rate", 20) as url:
        began, statuses = time.monotonic(), []
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        while (seconds := time.monotonic() - began) < 2:
            connection.request("GET", "/winds/a/b/one")
            statuses.append((reply := connection.getresponse()).status)
            reply.read()
        connection.close()
        assert counts(url)["throttle"] == statuses.count(503) > 0
    # A second's worth at first, and then as many as come in.
    assert 20 * (1 + 2) - 2 <= statuses.count(200) <= 20 * (1 + seconds) + 1


def test_latency_is_waited_for_and_requests_wait_side_by_side(buckets: Path) -> None:
    with serve(buckets, "--latency-ms", 200) as url:

        async def read(number: int) -> None:
            store = store_of(url)
            await asyncio.gather(*(obstore.get_async(store, f"c/{i % 20}/0") for i in range(number)))

        for number in (1, 100):
            began = time.monotonic()
            asyncio.run(read(number))
            assert 0.2 <= time.monotonic() - began < 2  # one after the other, 100 would take 20 seconds
        assert counts(url)["most_in_flight"] > 50


def test_bandwidth_is_shared(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/large").write_bytes(bytes(1_000_000))
    with serve(tmp_path, "--bandwidth-mb", 4) as url:

        async def read() -> None:
            store = store_of(url, "b")
            replies = await asyncio.gather(*(obstore.get_async(store, "large") for _ in range(4)))
            await asyncio.gather(*(reply.bytes_async() for reply in replies))

        began = time.monotonic()
        asyncio.run(read())
        assert time.monotonic() - began > 0.95
        assert counts(url)["bytes"] == 4_000_000


# -------------------------------------------------------------------------------------------------- the keys


def test_signed_or_not_unless_keys_are_required(buckets: Path, url: str) -> None:
    keys = {"access_key_id": "any", "secret_access_key": "any", "skip_signature": False}
    assert bytes(store_of(url).get("a/b/one").bytes()) == b"0123456789"
    assert bytes(store_of(url, **keys).get("a/b/one").bytes()) == b"0123456789"
    with serve(buckets, "--require-keys") as strict:
        with pytest.raises(PermissionDeniedError, match="AccessDenied"):
            store_of(strict).get("a/b/one")
        with pytest.raises(ClientError, match="AccessDenied"):
            anonymous = Config(signature_version=UNSIGNED)
            boto3.Session().client("s3", endpoint_url=strict, config=anonymous).list_objects_v2(
                Bucket="winds"
            )
        assert bytes(store_of(strict, **keys).get("a/b/one").bytes()) == b"0123456789"
        assert counts(strict)["unsigned"] == 2


def test_clients_that_renew_their_keys_outlive_them(
    buckets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token")
    with serve(buckets, "--require-keys", "--expire-after", 2) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        store, s3 = store_of(url, skip_signature=False), boto_of(url)
        fs = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True)
        began = time.monotonic()
        while time.monotonic() - began < 7:
            assert bytes(store.get("a/b/one").bytes()) == b"0123456789"
            assert s3.get_object(Bucket="winds", Key="a/b/one")["Body"].read() == b"0123456789"
            assert fs.cat("winds/a/b/one") == b"0123456789"
            time.sleep(0.2)
        assert not counts(url).keys() & {"expired", "unsigned"}  # none was refused, and tried again


def test_expired_keys_say_so(buckets: Path) -> None:
    with serve(buckets, "--expire-after", 1) as url:
        _, _, reply = ask(url, "/credentials")
        keys = json.loads(reply)
        expires = time.strptime(keys["Expiration"], "%Y-%m-%dT%H:%M:%SZ")
        assert 0 < calendar.timegm(expires) - time.time() <= 2
        names = {"access_key_id": "AccessKeyId", "secret_access_key": "SecretAccessKey", "token": "Token"}
        static = {name: keys[key] for name, key in names.items()}
        store = store_of(url, skip_signature=False, **static)
        assert bytes(store.get("a/b/one").bytes()) == b"0123456789"
        time.sleep(2.1)
        with pytest.raises(BaseError, match="ExpiredToken"):
            store.get("a/b/one")
        static = {f"aws_{name.replace('token', 'session_token')}": value for name, value in static.items()}
        with pytest.raises(ClientError, match="ExpiredToken"):
            boto_of(url, region_name="us-east-1", **static).put_object(Bucket="winds", Key="new", Body=b"")
        assert counts(url)["expired"] == 2
    assert not (buckets / "winds/new").exists()


# ------------------------------------------------------------------------------- how it begins, and how it ends


def test_what_it_prints_is_how_to_use_it(buckets: Path) -> None:
    process = start(buckets, "--require-keys")
    try:
        text = ""
        while "Ctrl-C" not in text:
            text += process.stdout.readline()
        address, static, renewed = (line for line in text.splitlines() if "export " in line)
        command = next(line for line in text.splitlines() if "uv run" in line).replace("BUCKET", "winds")
        program = "import s3fs, boto3; print(s3fs.S3FileSystem().ls('winds/a'))"
        program += "; print(boto3.client('s3').list_objects(Bucket='winds', Prefix='a/'))"
        bare = {name: value for name, value in os.environ.items() if "KEY" not in name}
        for keys in (static, renewed):
            for line in (
                command.replace("uv run python", sys.executable),
                f'{sys.executable} -c "{program}"',
            ):
                shell = ["bash", "-c", f"{address}\n{keys}\n{line}"]
                done = subprocess.run(shell, env=bare, capture_output=True, text=True)
                assert "'a" in done.stdout, (keys, line, done.stderr)
        curl = ["bash", "-c", re.search(r"curl \S+", text)[0]]
        seen = json.loads(subprocess.run(curl, capture_output=True).stdout)
        assert (seen["requests"], seen.get("unsigned", 0)) == (6, 0)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)
    assert (process.returncode, err) == (0, "")


def test_obstore_needs_no_keys_if_its_environment_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (environment | {"AWS_SKIP_SIGNATURE": "true"}).items():
        monkeypatch.setenv(name, value)
    assert bytes(S3Store("winds").get("a/b/one").bytes()) == b"0123456789"


def test_it_ends_while_a_read_stalls_and_a_parent_lives(buckets: Path) -> None:
    process = start(buckets, *FAST, "--stall-at", 1, "--until-stdin-ends", stdin=subprocess.PIPE)
    with pytest.raises(BaseError):
        store_of(process.url).get("a/b/one")
    process.terminate()
    process.wait(timeout=5)  # communicate() would end its stdin, too
    assert (process.returncode, process.stderr.read()) == (0, "")
    process.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waits for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_it_ends_with_the_program_that_started_it_even_by_sigkill(buckets: Path) -> None:
    parent = f"""
import subprocess, sys, time
command = {[sys.executable, str(book.ROOT / SCRIPT), "--folder", str(buckets), "--until-stdin-ends"]!r}
server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(server.pid, server.stdout.readline(), flush=True)
time.sleep(100)
"""
    starter = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    with starter:
        pid, url = starter.stdout.readline().split()
        assert ask(url, "/winds/a/b/one")[0] == 200
        assert not gone(int(pid))
        starter.kill()
        programs.wait_for(lambda: gone(int(pid)), 2, "the server's end")


BAD_INPUT = {
    "folder is a file": (["--folder", "{file}"], r"--folder \S+file: File exists; give a folder"),
    "folder in a file": (["--folder", "{file}/x"], r"--folder \S+file/x: Not a directory; give a folder"),
    "port in use": (["--port", "{port}"], r"--port \d+: Address already in use; give another, or 0"),
    "no such port": (["--port", 70000], r"--port 70000: give a number from 0 to 65535"),
    "rate above 1": (["--error-rate", 2], r"--error-rate 2: give a number from 0 to 1"),
    "rates above 1": (
        ["--error-rate", 0.6, "--stall-rate", 0.6],
        r"--error-rate .*: together 1.2; give at most 1",
    ),
    "latency": (["--latency-ms", -1], r"--latency-ms -1: give a number from 0"),
    "bandwidth": (["--bandwidth-mb", 0], r"--bandwidth-mb 0: give a number from 0.001"),
    "not a number": (["--max-rate", "nan"], r"--max-rate nan: give a number from 0"),
    "not even that": (["--port", "many"], r"--port: invalid int value: 'many'"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line(case: str, tmp_path: Path) -> None:
    flags, message = BAD_INPUT[case]
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        names = {"file": tmp_path / "file", "port": other.getsockname()[1]}
        flags = [str(flag).format(**names) for flag in flags]
        process = start(tmp_path / "new", *flags)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, process.url + out) == (2, "")
    assert re.fullmatch(rf"local_s3.py: error: {message}.*\n", err), err
