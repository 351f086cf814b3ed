"""Chapter 3's S3 server: what a client reads, writes and lists, how it fails on request, how it ends."""

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import buckets
import psutil
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import S3Store

KEY = "a b/c=1/ü&+%.bin"
DATA = bytes(range(256)) * 300
DIGITS = b"0123456789"
CHANGED = 1_000_000_000  # when the object "digits" was: a Sunday
FAULTS = ("SlowDown", "reset", "truncated")
LIMIT = 60  # seconds: a guard against hangs


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]  # their names are in lower case


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    objects = {f"winds/{KEY}": DATA, "winds/digits": DIGITS, "winds/empty": b"", "outside": b"secret"}
    for name, content in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    os.utime(folder / "winds/digits", (CHANGED, CHANGED))
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with buckets.serving(folder, latency_ms=0) as address:
        yield address


def store(address: str, bucket: str = "winds", **options: object) -> S3Store:
    options = {"skip_signature": True, "region": "us-east-1"} | options
    options |= {"endpoint": address, "client_options": {"allow_http": True}}
    return S3Store(bucket, virtual_hosted_style_request=False, **options)


def connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address.removeprefix("http://"), timeout=LIMIT)


def ask(address: str, method: str, path: str, **headers: str) -> Answer:
    """A request without a client that would mend it: If_Match="x" is a header."""
    connection = connect(address)
    sent = {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, headers=sent)
    response = connection.getresponse()
    received = {name.lower(): text for name, text in response.getheaders()}
    answer = Answer(response.status, response.read(), received)
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
    assert winds.head("digits")["last_modified"].timestamp() == CHANGED
    for key in ("none", "digits/none", "a b", "n" * 300):
        for read in (winds.get, winds.head):
            with pytest.raises(FileNotFoundError):
                read(key)


def test_obstore_lists_a_folder(address):
    winds = store(address)
    listed = {entry["path"]: entry for entry in winds.list().collect()}
    sizes = {KEY: len(DATA), "digits": 10, "empty": 0}
    assert {key: entry["size"] for key, entry in listed.items()} == sizes
    assert listed["digits"]["e_tag"] == winds.head("digits")["e_tag"]
    assert [entry["path"] for entry in winds.list("a b").collect()] == [KEY]
    assert [entry["path"] for entry in winds.list(offset="digits").collect()] == ["empty"]
    assert winds.list("none").collect() == []
    level = winds.list_with_delimiter()
    assert level["common_prefixes"] == ["a b"]
    assert [entry["path"] for entry in level["objects"]] == ["digits", "empty"]
    assert winds.list_with_delimiter("a b")["common_prefixes"] == ["a b/c=1"]
    starting = ask(address, "GET", "/winds?list-type=2&prefix=em").body
    assert b"<Key>empty</Key>" in starting and b"<Key>digits</Key>" not in starting
    assert ask(address, "HEAD", "/winds").status == 200


def test_ranges_as_http_has_them(address):
    contents = {"0-0": b"0", "8-99": b"89", "4-": b"456789", "-4": b"6789", "-99": DIGITS}
    for asked, content in contents.items():
        start = DIGITS.index(content)
        for method, body in (("GET", content), ("HEAD", b"")):
            answer = ask(address, method, "/winds/digits", Range=f"bytes={asked}")
            assert answer[:2] == (206, body)
            assert answer.headers["content-range"] == f"bytes {start}-{start + len(content) - 1}/10"
            assert answer.headers["content-length"] == str(len(content))
    for key, asked in (("digits", "10-12"), ("empty", "0-"), ("empty", "-1")):  # behind the end
        assert ask(address, "GET", f"/winds/{key}", Range=f"bytes={asked}").status == 416
    for asked in ("lines=1-2", "bytes=5-4"):  # S3 does not know them
        assert ask(address, "GET", "/winds/digits", Range=asked)[:2] == (200, DIGITS)
    whole = ask(address, "HEAD", "/winds/digits")
    assert whole[:2] == (200, b"")
    assert (whole.headers["content-length"], whole.headers["accept-ranges"]) == ("10", "bytes")


def test_conditions_as_http_has_them(address):
    before, after = (formatdate(CHANGED - early, usegmt=True) for early in (1, 0))
    headers = ask(address, "GET", "/winds/digits?x-id=GetObject").headers
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
        assert ask(address, "GET", "/winds/digits", **asked).status == status, asked


def test_a_changed_object_has_another_etag(address, folder):
    changing = folder / "winds" / "changing"
    tags = set()
    for content, time in ((b"1", 1), (b"2", 2), (b"33", 2)):
        changing.write_bytes(content)
        os.utime(changing, (time, time))
        tags.add(store(address).head("changing")["e_tag"])
    changing.unlink()
    assert len(tags) == 3


def test_nothing_outside_the_bucket_is_read(address, folder):
    climbing = ("/winds/../outside", "/winds/%2e%2e/outside", "/winds/..%2foutside", "/%2e/outside")
    for path in (*climbing, f"/winds/{folder}/outside"):
        answer = ask(address, "GET", path)
        assert answer.status == 404 and b"<Code>NoSuch" in answer.body, path
    for prefix in ("../", "../winds/", f"{folder}/", "a b/../../"):
        query = urlencode({"list-type": 2, "prefix": prefix})
        assert b"<Key>" not in ask(address, "GET", f"/winds?{query}").body, prefix
    assert b"<Code>NoSuchKey<" in ask(address, "GET", "/winds/none").body
    assert b"<Code>NoSuchBucket<" in ask(address, "GET", "/nobody/none").body


def test_a_folder_bucket_is_read_only(address, folder):
    winds = store(address)
    for change in (lambda: winds.put("digits", b"x"), lambda: winds.delete("digits")):
        with pytest.raises(PermissionDeniedError):
            change()
    for asked in ("PUT /winds", "PUT /winds/new", "POST /winds/new?uploads", "DELETE /winds"):
        answer = ask(address, *asked.split())
        assert answer.status == 403 and b"<Code>AccessDenied<" in answer.body, asked
    assert (folder / "winds/digits").read_bytes() == DIGITS and not (folder / "winds/new").exists()


def test_other_buckets_are_written_in_memory(address, folder):
    assert ask(address, "PUT", "/made").status == 200
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
    """Compressed, in pieces, once the server has said that it may come."""
    assert ask(address, "PUT", "/packed").status == 200
    host, port = address.removeprefix("http://").split(":")
    headers = b"Host: x\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
    with socket.create_connection((host, int(port)), timeout=LIMIT) as client:
        client.sendall(b"PUT /packed/key HTTP/1.1\r\n" + headers + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert ask(address, "GET", "/packed/key")[:2] == (200, b"abcde")


def test_a_file_that_may_not_be_read_is_denied(address, folder):
    secret = folder / "winds" / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    readable = os.access(secret, os.R_OK)
    answer = ask(address, "GET", "/winds/secret")
    secret.unlink()
    if readable:
        pytest.skip("root may read everything")
    assert answer.status == 403 and b"<Code>AccessDenied<" in answer.body


def test_many_uploads_at_once_and_one_connection_for_many_requests(address):
    assert ask(address, "PUT", "/crowd").status == 200
    crowd = store(address, "crowd")
    objects = {f"{n:02}": b"%d" % n for n in range(64)}
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(crowd.put, objects, objects.values()))
    assert {key: crowd.get(key).bytes() for key in objects} == objects
    connection = connect(address)
    sockets = set()
    for path in ("/winds/digits", "/winds/none", "/crowd/01", "/winds?list-type=2"):
        connection.request("GET", path)
        connection.getresponse().read()
        sockets.add(connection.sock)
    assert len(sockets) == 1 and None not in sockets
    connection.close()


def test_the_access_key_is_asked_for(folder):
    with buckets.serving(folder, latency_ms=0, access_key="BOOK") as address:
        signing = {"secret_access_key": "any", "skip_signature": False}
        right = store(address, access_key_id="BOOK", **signing)
        assert right.get("digits").bytes() == DIGITS and len(right.list().collect()) == 3
        for refused in (store(address, access_key_id="BOOKS", **signing), store(address)):
            with pytest.raises(PermissionDeniedError):
                refused.get("digits")
        assert ask(address, "GET", "/winds?list-type=2").status == 403
        assert ask(address, "PUT", "/made").status == 403
        assert b"<Code>AccessDenied<" in ask(address, "GET", "/winds/digits").body
        signed = "AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/s3/aws4_request"
        wrong = ask(address, "GET", "/winds/digits", Authorization=signed.format("BOO"))
        assert b"<Code>InvalidAccessKeyId<" in wrong.body
        assert ask(address, "PUT", "/made", Authorization=signed.format("BOOK")).status == 200


def fetch(winds: S3Store) -> list[bytes | Exception]:
    """The object at KEY, 300 times at once, or what went wrong."""
    with ThreadPoolExecutor(300) as threads:
        reads = [threads.submit(lambda: winds.get(KEY).bytes()) for _ in range(300)]
    return [read.exception() or read.result() for read in reads]


def test_retries_survive_the_faults(folder, capfd):
    rates = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
    with buckets.serving(folder, latency_ms=1, **rates) as address:
        assert fetch(store(address)) == [DATA] * 300
        counted = json.loads(ask(address, "GET", "/_counts").body)
        never = {"max_retries": 0, "retry_timeout": timedelta(seconds=LIMIT)}
        fetched = fetch(store(address, retry_config=never))
    failed = [one for one in fetched if one != DATA]
    assert failed and all(isinstance(one, Exception) for one in failed)
    faults = [counted[fault] for fault in FAULTS]
    assert min(faults) > 0
    assert counted["requests"] >= 300 + sum(faults)
    assert 300 * len(DATA) <= counted["bytes"] < 310 * len(DATA)
    assert capfd.readouterr().err == ""  # nothing is logged


def outcome(address: str) -> str:
    """What becomes of one GET: one of FAULTS, or "whole"."""
    half = DATA[: len(DATA) // 2]
    try:
        answer = ask(address, "GET", f"/winds/{quote(KEY)}")
    except http.client.RemoteDisconnected:
        return "closed"  # in order, not by a reset
    except ConnectionResetError:
        return "reset"
    except http.client.IncompleteRead as error:
        assert (error.partial, error.expected) == (half, len(DATA) - len(half))
        return "truncated"
    if answer.status == 503:
        assert b"<Code>SlowDown<" in answer.body
        return "SlowDown"
    assert answer[:2] == (200, DATA)
    return "whole"


def test_each_fault_is_what_it_is_called_and_the_seed_decides(folder):
    rates = {"error_rate": 0.3, "reset_rate": 0.3, "truncate_rate": 0.3}
    runs = []
    for seed in (1, 1, 2):
        with buckets.serving(folder, latency_ms=0, seed=seed, **rates) as address:
            outcomes = [outcome(address) for _ in range(30)]
            counted = json.loads(ask(address, "GET", "/_counts").body)
            assert [counted[fault] for fault in FAULTS] == [outcomes.count(fault) for fault in FAULTS]
            for asked in ("HEAD /winds/digits", "GET /winds"):  # no GET of an object
                assert ask(address, *asked.split()).status == 200
        runs.append(outcomes)
    assert runs[0] == runs[1] != runs[2]
    assert set(runs[0]) == {"whole", *FAULTS}


def test_only_reads_of_objects_are_late(folder):
    with buckets.serving(folder, latency_ms=600_000) as address:
        assert ask(address, "PUT", "/made").status == 200
        assert store(address, "made").put("key", b"x")
        waiting = []
        for asked in ("GET /winds/digits", "HEAD /winds/digits", "GET /made/key"):
            waiting.append(connect(address))
            waiting[-1].request(*asked.split())
        for bucket in ("winds", "made"):
            assert store(address, bucket).list().collect()  # in good time
        assert select.select([connection.sock for connection in waiting], [], [], 0)[0] == []
        for connection in waiting:
            connection.close()


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(buckets.SERVER), f"--folder={folder}", *flags]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, "stdin"])
def test_it_ends_in_order(end, folder):
    """By a signal, or with its stdin."""
    flags = ["--until-stdin-ends"] if end == "stdin" else []
    with subprocess.Popen(command(folder, *flags), stdin=-1, stdout=-1, stderr=-1, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            assert ask(address, "HEAD", "/winds/digits").status == 200
            if end != "stdin":
                server.send_signal(end)
                server.wait(LIMIT)  # while its stdin is open
            assert server.communicate("", timeout=LIMIT) == ("", "")
        finally:
            server.kill()
    assert server.returncode == 0


PARENT = """
import subprocess, sys, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(server.pid, server.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


def test_it_ends_when_its_parent_is_killed(folder):
    program = [sys.executable, "-c", PARENT, *command(folder, "--until-stdin-ends")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        pid, address = parent.stdout.readline().split()
        assert ask(address, "HEAD", "/winds/digits").status == 200
        server = psutil.Process(int(pid))
        parent.kill()
    gone, left = psutil.wait_procs([server], timeout=LIMIT)
    for orphan in left:
        orphan.kill()
    assert gone == [server]


BAD = ["--port TAKEN", "--port 70000", "--error-rate 1.1", "--reset-rate -0.1", "--truncate-rate nan"]
BAD += ["--error-rate 0.6 --truncate-rate 0.6", "--latency-ms -1", "--folder FILE"]


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_refused(line, tmp_path):
    """The last line names the flags, and the value where one is bad by itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"TAKEN": str(taken.getsockname()[1]), "FILE": __file__}
        flags = [known.get(word, word) for word in line.split()]
        ended = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout) == (2, "")
    named = flags if len(flags) == 2 else flags[::2]
    last = ended.stderr.splitlines()[-1]
    assert all(word in last for word in named)
