"""Chapter 3: an S3 server on this machine, as slow and as unreliable as you like.

    uv run python local_s3.py                                     # the buckets of outputs/buckets, first byte after 30 ms
    uv run python local_s3.py --latency-ms 100 --error-rate 0.05  # a throttled bucket far away

It prints its address, and how to point a client at it; train.py starts one by itself. FOLDER/BUCKET/KEY is a
file, whoever writes it: `Folder` makes of S3's protocol what Zarr, obstore, s3fs and boto3 need, and the tests
compare it with moto, which has all of it, in memory. `Unreliable` stands in front: it delays, limits, refuses
and breaks. Have a real MinIO or bucket? You do not need this script:

    AWS_ENDPOINT_URL=http://localhost:9000 AWS_ALLOW_HTTP=true uv run python train.py --store s3://bucket/winds.zarr
"""

import argparse
import asyncio
import math
import os
import random
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from itertools import islice
from pathlib import Path
from urllib.parse import unquote
from uuid import uuid4
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

HERE = Path(__file__).parent
STALL_SECONDS = 60  # longer than any client should wait
PIECE = 256 * 1024  # bytes that are read and sent at a time, so that bandwidth can be limited
ERRORS = {
    "AccessDenied": (403, "Access Denied"),
    "ExpiredToken": (400, "The provided token has expired."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "The request is not valid"),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (404, "The specified upload does not exist"),
    "NotImplemented": (501, "This server does not do that."),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold."),
    "SlowDown": (503, "Please reduce your request rate."),
}
REFUSALS = {"SlowDown": "SlowDown", "throttle": "SlowDown", "fail": "SlowDown", "deny": "AccessDenied"}
REFUSALS |= {"unsigned": "AccessDenied", "expired": "ExpiredToken"}
# What a URL may add without asking for another operation than its method and path do.
DETAILS = {"prefix", "delimiter", "max-keys", "start-after", "continuation-token", "marker", "fetch-owner"}
DETAILS |= {"encoding-type", "x-id"}


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


@dataclass
class Answer:
    """What is sent back: the body comes in pieces, and is left out if the request was HEAD."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Iterable[bytes] = ()


def xml(name: str, content: str, status: int = 200) -> Answer:
    """An answer in S3's XML; what `content` holds of a client's must have gone through escape()."""
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'.encode()
    return Answer(status, {"Content-Type": "application/xml", "Content-Length": str(len(text))}, [text])


class S3Error(Exception):
    """A request that is answered by one of ERRORS, as S3 tells it."""

    def answer(self) -> Answer:
        code, detail = (*self.args, "")[:2]
        status, message = ERRORS[code]
        return xml("Error", f"<Code>{code}</Code><Message>{escape(detail or message)}</Message>", status)


# --------------------------------------------------------------------------------- a folder as a set of buckets


def etag(found: os.stat_result) -> str:
    """Another one whenever the file is another: a digest of the content would mean reading all of it."""
    return f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"'


def moment(seconds: float) -> str:
    """A file's time as S3's XML has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def names(request: web.BaseRequest, condition: str, tag: str | None) -> bool:
    """Whether If-Match or If-None-Match names the object that there is; S3 lets the quotes be left out."""
    return bool(tag) and request.headers.get(condition, "").strip('"') in ("*", tag.strip('"'))


def pieces(file, span: range) -> Iterator[bytes]:
    """The bytes `span` of an open file, PIECE at a time."""
    with file:
        file.seek(span.start)
        for first in range(span.start, span.stop, PIECE):
            yield file.read(min(PIECE, span.stop - first))


def walk(folder: str, above: str, prefix: str, after: str, deep: bool) -> Iterator[tuple[str, os.DirEntry]]:
    """The keys below `folder` that start with `prefix` and come after `after`, in S3's order: that of the bytes.

    `above` is the folder's own key. Unless `deep`, a folder beyond the prefix stands for all that it holds.
    """
    entries = {}
    with suppress(FileNotFoundError):  # deleted meanwhile
        entries = {above + entry.name + "/" * entry.is_dir(): entry for entry in os.scandir(folder)}
    for key, entry in sorted(entries.items()):
        if key[-1] == "/" and (prefix.startswith(key) or (deep and key.startswith(prefix))):
            if key > after or after.startswith(key):
                yield from walk(entry.path, key, prefix, after, deep)
        elif key.startswith(prefix) and key > after:
            yield key, entry


class Folder:
    """Answer as S3 would, with files: read, list, write, in parts too, and delete; no versions, no metadata."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.aside = self.folder / ".uploads"  # on the same disk, so that a file can be renamed

    def path(self, bucket: str, key: str) -> Path:
        """The file of an object. S3Error for a key, or a link, that leads out of the bucket."""
        with suppress(ValueError):  # a zero byte
            home = os.path.realpath(self.folder / bucket)
            path = os.path.realpath(f"{home}/{key}")
            if path.startswith(f"{home}/") and key[-1] != "/":
                return Path(path)
        raise S3Error("NoSuchKey")

    def read(self, path: Path, request: web.BaseRequest) -> Answer:
        """GET and HEAD, whole or a range: a-b, a- or, as a shard's index is read, the last -n."""
        try:
            file = open(path, "rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise S3Error("NoSuchKey") from None
        found = os.fstat(file.fileno())
        headers = {"ETag": etag(found), "Last-Modified": formatdate(found.st_mtime, usegmt=True)}
        if names(request, "If-None-Match", headers["ETag"]):
            return Answer(304, headers)
        status, span = 200, range(found.st_size)
        if "Range" in request.headers:
            status = 206
            try:
                span = span[request.http_range]
                headers["Content-Range"] = f"bytes {span[0]}-{span[-1]}/{found.st_size}"
            except (ValueError, IndexError):
                raise S3Error("InvalidRange") from None
        headers |= {"Content-Length": str(len(span)), "Content-Type": "application/octet-stream"}
        return Answer(status, headers | {"Accept-Ranges": "bytes"}, pieces(file, span))

    async def write(self, path: Path, request: web.BaseRequest) -> Answer:
        """PUT: the file appears when all of it has come, or not at all."""
        if request.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
            raise S3Error("NotImplemented")  # a body in chunks, each with a signature
        aside = self.aside / uuid4().hex
        self.aside.mkdir(exist_ok=True)
        try:
            with open(aside, "wb") as file:
                async for piece in request.content.iter_chunked(PIECE):
                    file.write(piece)
            return self.put_in_place(aside, path, request)
        finally:
            aside.unlink(missing_ok=True)

    async def copy(self, path: Path, request: web.BaseRequest) -> Answer:
        """PUT of what another object holds, as Icechunk 2 keeps what it overwrites."""
        named = unquote(request.headers["x-amz-copy-source"].partition("?")[0])
        bucket, _, key = named.removeprefix("/").partition("/")
        if not key or bucket[:1] in ("", "."):
            raise S3Error("InvalidRequest")
        if not (self.folder / bucket).is_dir():
            raise S3Error("NoSuchBucket")
        source, aside = self.path(bucket, key), self.aside / uuid4().hex
        if not source.is_file():
            raise S3Error("NoSuchKey")
        condition = "x-amz-copy-source-if-match"
        if condition in request.headers and not names(request, condition, etag(source.stat())):
            raise S3Error("PreconditionFailed")
        self.aside.mkdir(exist_ok=True)
        try:
            await asyncio.to_thread(shutil.copyfile, source, aside)
            tag = self.put_in_place(aside, path, request).headers["ETag"]
        finally:
            aside.unlink(missing_ok=True)
        when = moment(path.stat().st_mtime)
        return xml("CopyObjectResult", f"<LastModified>{when}</LastModified><ETag>{escape(tag)}</ETag>")

    def put_in_place(self, aside: Path, path: Path, request: web.BaseRequest) -> Answer:
        """Rename, if what the request says of the object that it replaces holds."""
        now = etag(path.stat()) if path.is_file() else None
        lost = "If-Match" in request.headers and not names(request, "If-Match", now)
        if lost or names(request, "If-None-Match", now):
            raise S3Error("PreconditionFailed")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside, path)
        return Answer(200, {"ETag": etag(path.stat())})

    def delete(self, bucket: str, key: str) -> None:
        """Remove a file, and the folders that it leaves empty: S3 has none. No such file is no error."""
        path, home = self.path(bucket, key), Path(os.path.realpath(self.folder / bucket))
        if path.is_file():
            path.unlink()
            with suppress(OSError):  # not empty
                while (path := path.parent) != home:
                    path.rmdir()

    async def delete_all(self, bucket: str, request: web.BaseRequest) -> Answer:
        """Remove the keys that the body names."""
        body = ElementTree.fromstring(await request.content.read())
        keys = [key.text for key in body.iterfind(".//{*}Key")]
        for key in keys:
            self.delete(bucket, key)
        return xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def list(self, bucket: str, query: dict[str, str]) -> Answer:
        """Up to 1000 keys, in order, and where to go on (ListObjectsV2, and the first version)."""
        if query.get("delimiter", "") not in ("", "/"):
            raise S3Error("NotImplemented")
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        most, deep = int(query.get("max-keys", 1000)), not query.get("delimiter")
        found = walk(str(self.folder / bucket), "", query.get("prefix", ""), after, deep)
        *page, beyond = [*islice(found, most), next(found, None)]
        rows = [f"<Name>{escape(bucket)}</Name><KeyCount>{len(page)}</KeyCount><MaxKeys>{most}</MaxKeys>"]
        for key, entry in page:
            if key[-1] == "/":
                rows.append(f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>")
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat()
                when = moment(status.st_mtime)
                row = f"<Key>{escape(key)}</Key><Size>{status.st_size}</Size><LastModified>{when}</LastModified>"
                rows.append(f"<Contents>{row}<ETag>{escape(etag(status))}</ETag></Contents>")
        rows.append(f"<IsTruncated>{str(beyond is not None).lower()}</IsTruncated>")
        if page and beyond:
            last = escape(page[-1][0])
            rows += [f"<{name}>{last}</{name}>" for name in ("NextContinuationToken", "NextMarker")]
        return xml("ListBucketResult", "".join(rows))

    def upload(self, request: web.BaseRequest) -> Path:
        """The folder in which the parts of an upload gather."""
        name = request.query["uploadId"]
        if not (name.isalnum() and (self.aside / name).is_dir()):
            raise S3Error("NoSuchUpload")
        return self.aside / name

    async def complete_upload(self, path: Path, request: web.BaseRequest) -> Answer:
        """Join the parts that the body names, in its order."""
        upload, body = self.upload(request), ElementTree.fromstring(await request.content.read())
        with open(upload / "whole", "wb") as whole:
            for number in body.iterfind(".//{*}PartNumber"):
                with open(upload / str(int(number.text)), "rb") as part:
                    await asyncio.to_thread(shutil.copyfileobj, part, whole, PIECE)
        tag = self.put_in_place(upload / "whole", path, request).headers["ETag"]
        shutil.rmtree(upload)
        return xml("CompleteMultipartUploadResult", f"<ETag>{escape(tag)}</ETag>")

    async def answer(self, request: web.BaseRequest) -> Answer:
        """Do what method, path and query ask for."""
        bucket, _, key = request.path.removeprefix("/").partition("/")
        home, query = self.folder / bucket, request.query
        asked = sorted(name for name in query if name not in DETAILS and not name.startswith("X-Amz-"))
        if not bucket:
            raise S3Error("NotImplemented")
        if bucket[0] == ".":
            raise S3Error("NoSuchBucket")
        if (request.method, key, asked) == ("PUT", "", []):
            home.mkdir(exist_ok=True)
            return Answer()
        if not home.is_dir():
            raise S3Error("NoSuchBucket")
        path = self.path(bucket, key) if key else home
        match request.method, "object" if key else "bucket", asked:
            case "HEAD", "bucket", []:
                return Answer()
            case "GET", "bucket", [] | ["list-type"]:
                return await asyncio.to_thread(self.list, bucket, query)
            case "POST", "bucket", ["delete"]:
                return await self.delete_all(bucket, request)
            case "GET" | "HEAD", "object", []:
                return self.read(path, request)
            case "PUT", "object", [] if "x-amz-copy-source" in request.headers:
                return await self.copy(path, request)
            case "PUT", "object", []:
                return await self.write(path, request)
            case "DELETE", "object", []:
                self.delete(bucket, key)
                return Answer(204)
            case "POST", "object", ["uploads"]:
                (self.aside / (name := uuid4().hex)).mkdir(parents=True)
                return xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
            case "PUT", "object", ["partNumber", "uploadId"]:
                return await self.write(self.upload(request) / str(int(query["partNumber"])), request)
            case "POST", "object", ["uploadId"]:
                return await self.complete_upload(path, request)
            case "DELETE", "object", ["uploadId"]:
                shutil.rmtree(self.upload(request))
                return Answer(204)
        raise S3Error("NotImplemented")


# ----------------------------------------------------------------------------------------- delays and faults


class Unreliable:
    """Answer late, at a limited rate, and with faults: by chance, though the same in every run, or as planned."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Folder(Path(args.folder))
        self.counts, self.asked, self.sent_until = Counter(), Counter(), 0.0
        self.tokens, self.filled = max(args.max_rate, 1), time.monotonic()

    def fault(self, request: web.BaseRequest) -> str | None:
        """Say what befalls a request. By chance: a function of the seed, of what is read and of how often it
        was read before, so that a run meets the same faults again in whatever order its reads arrive."""
        args, counts, path = self.args, self.counts, request.path
        _, signed, key = request.headers.get("Authorization", "").partition("Credential=")
        if args.require_keys and not signed:
            return "unsigned"
        if key.startswith("ISSUED") and time.time() - int(key[6:].partition("/")[0]) > args.expire_after:
            return "expired"
        if request.method not in ("GET", "HEAD") or not path.removeprefix("/").partition("/")[2]:
            return None  # does not read an object
        counts["reads"] += 1
        if args.deny_key and args.deny_key in path:
            return "deny"
        if args.fail_key and args.fail_key in path:
            return "fail"
        if args.stall_at == counts["reads"]:
            return "stall"
        if args.max_rate and not self.take_token():
            return "throttle"
        what = f"{path} {request.headers.get('Range')}"
        self.asked[what] += 1
        draw = random.Random(f"{args.seed} {what} {self.asked[what]}").random()
        rates = {"SlowDown": args.error_rate, "reset": args.reset_rate}
        for name, rate in (rates | {"truncate": args.truncate_rate, "stall": args.stall_rate}).items():
            if (draw := draw - rate) < 0:
                return name
        return None

    def take_token(self) -> bool:
        """Whether --max-rate allows a read: a bucket of tokens, at most a second's, that fills at that rate."""
        now, rate = time.monotonic(), self.args.max_rate
        self.tokens, self.filled = min(max(rate, 1), self.tokens + (now - self.filled) * rate), now
        if allowed := self.tokens >= 1:
            self.tokens -= 1
        return allowed

    def credentials(self) -> web.Response:
        """Short-lived keys, as a container of AWS gets them (AWS_CONTAINER_CREDENTIALS_FULL_URI)."""
        now = math.ceil(time.time())  # so that they are good for as long as it says, and up to a second more
        expiration = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + self.args.expire_after))
        keys = {"AccessKeyId": f"ISSUED{now}", "SecretAccessKey": "secret", "Token": "token"}
        return web.json_response(keys | {"Expiration": expiration})

    async def send(self, request: web.BaseRequest, answer: Answer, truncate: bool) -> web.StreamResponse:
        """Send an answer, no faster than --bandwidth-mb allows all connections together; or half of it."""
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        left = int(answer.headers.get("Content-Length", 0)) // (2 if truncate else 1)
        for piece in answer.body if request.method != "HEAD" else ():
            if not (piece := piece[:left]):
                break
            left -= len(piece)
            self.counts["bytes"] += len(piece)
            now = time.monotonic()
            self.sent_until = max(now, self.sent_until) + len(piece) / (self.args.bandwidth_mb * 1e6)
            if self.sent_until - now > 1e-3:  # a shorter sleep costs more than it delays
                await asyncio.sleep(self.sent_until - now)
            await response.write(piece)
        if truncate:
            request.transport.close()  # an orderly end, before the end
        return response

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, late and perhaps with a fault."""
        await asyncio.sleep(self.args.latency_ms / 1e3)
        if fault := self.fault(request):
            self.counts[fault] += 1
        if fault == "stall":
            await asyncio.sleep(STALL_SECONDS)
        if fault in ("reset", "stall"):
            reset(request.transport)
            return web.Response()
        if request.headers.get("Expect") == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            if fault in REFUSALS:
                raise S3Error(REFUSALS[fault])
            answer = await self.folder.answer(request)
        except S3Error as error:
            answer = error.answer()
        except (OSError, ValueError, ElementTree.ParseError) as error:  # such as a full disk
            answer = S3Error("InvalidRequest", str(error)).answer()
        return await self.send(request, answer, fault == "truncate")

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Count, and answer."""
        counts = self.counts
        if request.path == "/counts":
            return web.json_response(counts)
        if request.path == "/credentials":
            return self.credentials()
        counts["requests"] += 1
        counts["in_flight"] += 1
        counts["most_in_flight"] = max(counts["most_in_flight"], counts["in_flight"])
        try:
            return await self.respond(request)
        except ConnectionError:  # the client has gone
            return web.Response()
        finally:
            counts["in_flight"] -= 1


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once: the client sees a reset (RST), and not an orderly end."""
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--folder", default=os.path.relpath(HERE / "outputs/buckets"), help="each folder in it is a bucket")
    add("--port", type=int, default=0, help="to listen on, of 127.0.0.1; 0: any that is free")
    add("--latency-ms", type=float, default=30, help="milliseconds before a request is answered")
    add("--bandwidth-mb", type=float, default=1000, help="MB/s, of all connections together")
    add("--max-rate", type=float, default=0, help="reads a second, above which: 503 SlowDown; 0: no limit")
    add("--error-rate", type=float, default=0, help="share of reads that are answered 503 SlowDown")
    add("--reset-rate", type=float, default=0, help="share of reads whose connection is reset")
    add("--truncate-rate", type=float, default=0, help="share of reads that end half-way")
    add("--stall-rate", type=float, default=0, help=f"share of reads that hang for {STALL_SECONDS} s")
    add("--stall-at", type=int, default=0, help="the one read that hangs, counted from 1; 0: none")
    add("--fail-key", help="part of a key: all reads of such keys are answered 503 SlowDown")
    add("--deny-key", help="part of a key: all reads of such keys are answered 403 AccessDenied")
    add("--require-keys", action="store_true", help="answer what is not signed by 403 AccessDenied")
    add("--expire-after", type=int, default=3600, help="seconds for which keys from /credentials are good")
    add("--seed", type=int, default=0, help="decides which reads fail")
    add("--until-stdin-ends", action="store_true", help="stop when the program that started it has ended")
    args = parser.parse_args(argv)
    limits = {"port": (0, 65535), "latency_ms": (0, 1e6), "bandwidth_mb": (1e-3, 1e6), "max_rate": (0, 1e6)}
    limits |= {"stall_at": (0, 1e9), "expire_after": (1, 1e6)}
    limits |= {f"{name}_rate": (0, 1) for name in ("error", "reset", "truncate", "stall")}
    for name, (least, most) in limits.items():
        value = getattr(args, name)
        if not least <= value <= most:
            raise InputError(
                f"--{name.replace('_', '-')} {value:g}: give a number from {least:g} to {most:g}"
            )
    if (total := args.error_rate + args.reset_rate + args.truncate_rate + args.stall_rate) > 1:
        raise InputError(f"--error-rate and the other rates: together {total:g}; give at most 1")
    try:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--folder {args.folder}: {error.strerror}; give a folder, or a new name") from error
    return args


USAGE = """
To point obstore, s3fs, boto3 or the AWS CLI at it, set in another terminal:
  export AWS_ENDPOINT_URL={url} AWS_ALLOW_HTTP=true AWS_DEFAULT_REGION=us-east-1
  export AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any  # or, for obstore only, AWS_SKIP_SIGNATURE=true
In place of these two, keys that are good for {expire_after} s:
  export AWS_CONTAINER_CREDENTIALS_FULL_URI={url}/credentials AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=/dev/null
Then, to see what is in a bucket (each folder in {folder} is one), and what has happened so far:
  uv run python -c "from obstore.store import S3Store; print(S3Store('BUCKET').list_with_delimiter())"
  curl {url}/counts
Ctrl-C ends it.
"""


async def serve(args: argparse.Namespace) -> None:
    """Answer until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    runner = web.ServerRunner(web.Server(Unreliable(args), access_log=None, auto_decompress=False))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", args.port, backlog=1024).start()
    except OSError as error:
        raise InputError(f"--port {args.port}: {os.strerror(error.errno)}; give another, or 0") from error
    url = "http://{}:{}".format(*runner.addresses[0])
    print(url, flush=True)
    if not args.until_stdin_ends:
        print(USAGE.format(url=url, **vars(args)), flush=True)
    await ended.wait()


def exit_after_stdin() -> None:
    """Exit when stdin ends, as it does when the program at its other end is killed, however suddenly."""
    while os.read(0, 4096):  # sys.stdin has a lock, for which an exit by SIGTERM would have to wait
        pass
    os._exit(0)


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM, Ctrl-C or, if asked to, the end of stdin; the first line printed is the address."""
    args = parse_arguments(argv)
    if args.until_stdin_ends:
        if os.getpid() != os.getpgrp():  # a signal to the group of who started it must not take it from them
            os.setpgrp()
        threading.Thread(target=exit_after_stdin, daemon=True).start()
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(args))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
