"""Chapter 3's S3 server: what a client reads, writes and lists, how it fails on request, and how it ends."""

import asyncio
import http.client
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

import buckets
import psutil
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import S3Store

KEY, DATA = "a b/c=1/ü&+%.bin", bytes(range(256)) * 300
FAULTS = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
LIMIT = 60  # seconds: a guard against hangs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "winds" / KEY).parent.mkdir(parents=True)
    (folder / "winds" / KEY).write_bytes(DATA)
    for name, content in {"winds/digits": b"0123456789", "winds/empty": b"", "outside": b"secret"}.items():
        (folder / name).write_bytes(content)
    os.utime(folder / "winds/digits", (1_000_000_000, 1_000_000_000))  # a Sunday
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with buckets.serving(folder, latency_ms=0) as address:
        yield address


def store(address: str, bucket: str = "winds", **options: object) -> S3Store:
    options = {
        "skip_signature": True,
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    } | options
    return S3Store(bucket, endpoint=address, virtual_hosted_style_request=False, **options)


def connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address.removeprefix("http://"), timeout=LIMIT)


def ask(address: str, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers (in lower case) of the response."""
    connection = connect(address)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    answer = response.status, response.read(), {name.lower(): text for name, text in response.getheaders()}
    connection.close()
    return answer


def test_obstore_reads_objects_and_ranges(address):
    winds = store(address)
    assert winds.get(KEY).bytes() == DATA
    assert winds.get_range(KEY, start=1000, end=1003) == DATA[1000:1003]
    assert winds.get_ranges(KEY, starts=[7, 70000], ends=[9, 70002]) == [DATA[7:9], DATA[70000:70002]]
    assert winds.get("digits", options={"range": {"suffix": 3}}).bytes() == b"789"
    assert winds.get("digits", options={"range": {"offset": 8}}).bytes() == b"89"
    assert winds.get("empty").bytes() == b""
    assert winds.head(KEY)["size"] == len(DATA)
    assert winds.head("digits")["last_modified"].timestamp() == 1_000_000_000
    for key in ("none", "digits/none", "a b", "n" * 300):
        for read in (winds.get, winds.head):
            with pytest.raises(FileNotFoundError):
                read(key)


def test_obstore_lists_a_folder(address):
    winds = store(address)
    listed = {entry["path"]: entry["size"] for entry in winds.list().collect()}
    assert listed == {KEY: len(DATA), "digits": 10, "empty": 0}
    assert [entry["path"] for entry in winds.list("a b").collect()] == [KEY]
    assert [entry["path"] for entry in winds.list(offset="digits").collect()] == ["empty"]
    level = winds.list_with_delimiter()
    assert level["common_prefixes"] == ["a b"]
    assert [entry["path"] for entry in level["objects"]] == ["digits", "empty"]
    assert winds.list_with_delimiter("a b")["common_prefixes"] == ["a b/c=1"]
    assert winds.list("none").collect() == []
    assert winds.list().collect()[1]["e_tag"] == winds.head("digits")["e_tag"]
    starting = ask(address, "GET", "/winds?list-type=2&prefix=em")[1]
    assert b"<Key>empty</Key>" in starting and b"<Key>digits</Key>" not in starting
    assert ask(address, "HEAD", "/winds")[0] == 200


def test_ranges_as_http_has_them(address):
    wanted = {
        "bytes=0-0": b"0",
        "bytes=8-99": b"89",
        "bytes=4-": b"456789",
        "bytes=-4": b"6789",
        "bytes=-99": b"0123456789",
    }
    for header, content in wanted.items():
        status, body, headers = ask(address, "GET", "/winds/digits", Range=header)
        start = b"0123456789".index(content)
        assert (status, body) == (206, content)
        assert headers["content-range"] == f"bytes {start}-{start + len(content) - 1}/10"
    assert ask(address, "GET", "/winds/digits", Range="bytes=10-12")[0] == 416
    assert ask(address, "GET", "/winds/digits", Range="lines=1-2")[:2] == (200, b"0123456789")
    status, body, headers = ask(address, "HEAD", "/winds/digits")
    assert (status, body, headers["content-length"], headers["accept-ranges"]) == (200, b"", "10", "bytes")


def test_conditions_as_http_has_them(address):
    path, before, after = "/winds/digits", formatdate(10**9 - 1, usegmt=True), formatdate(10**9, usegmt=True)
    headers = ask(address, "GET", f"{path}?x-id=GetObject")[2]
    tag = headers["etag"]
    assert headers["last-modified"] == "Sun, 09 Sep 2001 01:46:40 GMT"
    for asked, status in (
        ({"If_Match": tag}, 200),
        ({"If_Match": '"other"'}, 412),
        ({"If_None_Match": tag}, 304),
        ({"If_None_Match": '"other"'}, 200),
        ({"If_Unmodified_Since": after}, 200),
        ({"If_Unmodified_Since": before}, 412),
        ({"If_Unmodified_Since": before, "If_Match": tag}, 200),
    ):
        assert ask(address, "GET", path, **asked)[0] == status, asked


def test_a_changed_object_has_another_etag(address, folder):
    changing, tags = folder / "winds" / "changing", set()
    for content, time in ((b"1", 1), (b"2", 2), (b"33", 2)):
        changing.write_bytes(content)
        os.utime(changing, (time, time))
        tags.add(store(address).head("changing")["e_tag"])
    changing.unlink()
    assert len(tags) == 3


def test_nothing_outside_the_bucket_is_read(address, folder):
    outside = folder / "outside"
    for path in (
        "/winds/../outside",
        "/winds/%2e%2e/outside",
        "/winds/..%2foutside",
        "/%2e/outside",
        f"/winds/{outside}",
    ):
        status, body, _ = ask(address, "GET", path)
        assert status == 404 and b"<Code>NoSuch" in body, path
    for prefix in ("../", "../winds/", f"{folder}/", "a b/../../"):
        assert (
            b"<Key>" not in ask(address, "GET", f"/winds?list-type=2&prefix={prefix.replace(' ', '%20')}")[1]
        ), prefix
    assert b"<Code>NoSuchKey<" in ask(address, "GET", "/winds/none")[1]
    assert b"<Code>NoSuchBucket<" in ask(address, "GET", "/nobody/none")[1]


def test_a_folder_bucket_is_read_only(address, folder):
    winds = store(address)
    for change in (lambda: winds.put("digits", b"x"), lambda: winds.delete("digits")):
        with pytest.raises(PermissionDeniedError):
            change()
    for method, path in (
        ("PUT", "/winds"),
        ("PUT", "/winds/new"),
        ("POST", "/winds/new?uploads"),
        ("DELETE", "/winds"),
    ):
        status, body, _ = ask(address, method, path)
        assert status == 403 and b"<Code>AccessDenied<" in body
    assert (folder / "winds/digits").read_bytes() == b"0123456789" and not (folder / "winds/new").exists()


def test_other_buckets_are_written_in_memory(address, folder):
    assert ask(address, "PUT", "/made")[0] == 200
    made, large = store(address, "made"), DATA * 164  # 12 MB
    made.put(KEY, DATA)
    made.put("large", large, use_multipart=True)
    assert made.get(KEY).bytes() == DATA and made.get("large").bytes() == large
    assert made.get_range("large", start=10**7, end=10**7 + 5) == large[10**7 : 10**7 + 5]
    assert [entry["path"] for entry in made.list().collect()] == [KEY, "large"]
    assert made.list_with_delimiter()["common_prefixes"] == ["a b"]
    made.delete("large")
    with pytest.raises(FileNotFoundError):
        made.head("large")
    assert not (folder / "made").exists()


def test_an_upload_is_kept_as_it_was_sent(address):
    assert ask(address, "PUT", "/packed")[0] == 200
    host, port = address.removeprefix("http://").split(":")
    head = b"PUT /packed/key HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection((host, int(port)), timeout=LIMIT) as client:
        client.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert ask(address, "GET", "/packed/key")[:2] == (200, b"abcde")


def test_a_file_that_may_not_be_read_is_denied(address, folder):
    secret = folder / "winds" / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    readable = os.access(secret, os.R_OK)
    status, body, _ = ask(address, "GET", "/winds/secret")
    secret.unlink()
    if readable:
        pytest.skip("root may read everything")
    assert status == 403 and b"<Code>AccessDenied<" in body


def test_many_uploads_at_once_and_one_connection_for_many_requests(address):
    assert ask(address, "PUT", "/crowd")[0] == 200
    crowd = store(address, "crowd")
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda n: crowd.put(f"{n:02}", b"%d" % n), range(64)))
    assert [crowd.get(f"{n:02}").bytes() for n in range(64)] == [b"%d" % n for n in range(64)]
    connection, sockets = connect(address), set()
    for path in ("/winds/digits", "/winds/none", "/crowd/01", "/winds?list-type=2"):
        connection.request("GET", path)
        connection.getresponse().read()
        sockets.add(connection.sock)
    assert len(sockets) == 1 and None not in sockets
    connection.close()


async def fetch(winds: S3Store, times: int) -> list[bytes | Exception]:
    """The object at KEY, so many times at once, or what went wrong."""

    async def one() -> bytes:
        return bytes(await (await winds.get_async(KEY)).bytes_async())

    return await asyncio.gather(*(one() for _ in range(times)), return_exceptions=True)


def test_retries_survive_the_faults(folder, capfd):
    with buckets.serving(folder, latency_ms=1, **FAULTS) as address:
        assert asyncio.run(fetch(store(address), 300)) == [DATA] * 300
        counts = json.loads(ask(address, "GET", "/_counts")[1])
        never = {"max_retries": 0, "retry_timeout": timedelta(seconds=LIMIT)}
        fetched = asyncio.run(fetch(store(address, retry_config=never), 300))
    failed = [one for one in fetched if one != DATA]
    assert failed and all(isinstance(one, Exception) for one in failed)
    assert min(counts[fault] for fault in ("SlowDown", "reset", "truncated")) > 0
    assert counts["requests"] >= 300 + counts["SlowDown"] + counts["reset"] + counts["truncated"]
    assert 300 * len(DATA) <= counts["bytes"] < 310 * len(DATA)
    assert capfd.readouterr().err == ""  # nothing is logged


def lot(address: str) -> str:
    """What becomes of one GET."""
    try:
        status, body, _ = ask(address, "GET", f"/winds/{quote(KEY)}")
    except http.client.RemoteDisconnected:
        return "closed"  # in order, not by a reset
    except ConnectionResetError:
        return "reset"
    except http.client.IncompleteRead as error:
        assert error.partial == DATA[: len(DATA) // 2] and error.expected == len(DATA) - len(DATA) // 2
        return "truncated"
    if status == 503:
        assert b"<Code>SlowDown<" in body
        return "SlowDown"
    assert (status, body) == (200, DATA)
    return "whole"


def test_each_fault_is_what_it_is_called_and_the_seed_decides(folder):
    lots = []
    for seed in (1, 1, 2):
        with buckets.serving(
            folder, latency_ms=0, error_rate=0.3, reset_rate=0.3, truncate_rate=0.3, seed=seed
        ) as address:
            lots.append([lot(address) for _ in range(30)])
            counts = json.loads(ask(address, "GET", "/_counts")[1])
            assert {
                fault: lots[-1].count(fault) for fault in ("SlowDown", "reset", "truncated")
            }.items() <= counts.items()
            assert ask(address, "HEAD", "/winds/digits")[0] == ask(address, "GET", "/winds")[0] == 200
    assert lots[0] == lots[1] != lots[2]
    assert set(lots[0]) == {"whole", "SlowDown", "reset", "truncated"}


def test_only_reads_of_objects_are_late(folder):
    with buckets.serving(folder, latency_ms=600_000) as address:
        assert ask(address, "PUT", "/made")[0] == 200 and store(address, "made").put("key", b"x")
        waiting = [connect(address) for _ in range(3)]
        for connection, (method, path) in zip(
            waiting, (("GET", "/winds/digits"), ("HEAD", "/winds/digits"), ("GET", "/made/key"))
        ):
            connection.request(method, path)
        assert store(address).list().collect() and store(address, "made").list().collect()  # in good time
        assert select.select([connection.sock for connection in waiting], [], [], 0)[0] == []
        for connection in waiting:
            connection.close()


def test_the_access_key_is_asked_for(folder):
    with buckets.serving(folder, latency_ms=0, access_key="BOOK") as address:
        keys = {"secret_access_key": "any", "skip_signature": False}
        right, wrong = (store(address, access_key_id=name, **keys) for name in ("BOOK", "BOOKS"))
        assert right.get("digits").bytes() == b"0123456789" and len(right.list().collect()) == 3
        for refused in (wrong, store(address)):
            with pytest.raises(PermissionDeniedError):
                refused.get("digits")
        assert ask(address, "GET", "/winds?list-type=2")[0] == 403
        signed = "AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/s3/aws4_request"
        assert b"<Code>AccessDenied<" in ask(address, "GET", "/winds/digits")[1]
        assert (
            b"<Code>InvalidAccessKeyId<"
            in ask(address, "GET", "/winds/digits", Authorization=signed.format("BOO"))[1]
        )
        assert ask(address, "PUT", "/made")[0] == 403
        assert ask(address, "PUT", "/made", Authorization=signed.format("BOOK"))[0] == 200


@contextmanager
def started(folder: Path, *flags: str, stdin: int = subprocess.DEVNULL):
    """The server as a program, and its address, once it has answered a request."""
    command = [sys.executable, str(buckets.SERVER), f"--folder={folder}", *flags]
    with subprocess.Popen(command, stdin=stdin, stdout=-1, stderr=-1, text=True) as server:
        try:
            assert ask(server.stdout.readline().strip(), "HEAD", "/winds/digits")[0] == 200
            yield server
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(folder, number):
    with started(folder) as server:
        server.send_signal(number)
        assert server.communicate(timeout=LIMIT) == ("", "") and server.returncode == 0


def test_it_ends_with_its_stdin(folder):
    with started(folder, "--until-stdin-ends", stdin=subprocess.PIPE) as server:
        assert server.communicate("", timeout=LIMIT) == ("", "") and server.returncode == 0


PARENT = """
import subprocess, sys, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(server.pid, server.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


def test_it_ends_when_its_parent_is_killed(folder):
    server = [sys.executable, str(buckets.SERVER), f"--folder={folder}", "--until-stdin-ends"]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *server], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid, address = parent.stdout.readline().split()
        assert ask(address, "HEAD", "/winds/digits")[0] == 200
        process = psutil.Process(int(pid))
        parent.kill()
    gone, left = psutil.wait_procs([process], timeout=LIMIT)
    for orphan in left:
        orphan.kill()
    assert gone == [process]


@pytest.mark.parametrize(
    "flag, value, others",
    [
        ("--port", "taken", ()),
        ("--port", "70000", ()),
        ("--error-rate", "1.1", ()),
        ("--reset-rate", "-0.1", ()),
        ("--truncate-rate", "nan", ()),
        ("--error-rate", "0.6", ("--truncate-rate", "0.6")),
        ("--latency-ms", "-1", ()),
        ("--folder", __file__, ()),
    ],
)
def test_bad_input_is_refused(flag, value, others, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("local_s3", buckets.SERVER)
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as refused:
        value = str(taken.getsockname()[1]) if value == "taken" else value
        server.main(["--folder", str(tmp_path), flag, value, *others])
    assert refused.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert flag in last and (others or value in last)
