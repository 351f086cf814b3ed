"""Chapter 3: an S3 server on this machine, as slow and as unreliable as you like.

    uv run python local_s3.py                                     # the buckets of outputs/buckets, first byte after 30 ms
    uv run python local_s3.py --latency-ms 100 --error-rate 0.05  # a throttled bucket far away

It prints its address; point any S3 client at it. train.py starts one by itself. Each folder in `--folder` is a
bucket that can only be read. Clients may create others: moto (https://docs.getmoto.org) keeps those in memory.
`/_counts` says what was asked for so far. Only this machine can reach it, and signatures are not verified:
`--access-key` looks at the name of the key. Have a real MinIO or bucket? You do not need this script:

    AWS_ENDPOINT_URL=http://localhost:9000 AWS_ALLOW_HTTP=true uv run python train.py --store s3://bucket/winds.zarr
"""

import argparse
import asyncio
import math
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from functools import cache
from io import BytesIO
from pathlib import Path
from time import gmtime, strftime
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

HERE = Path(__file__).parent
STATUS = {"AccessDenied": 403, "InvalidAccessKeyId": 403, "NoSuchKey": 404, "PreconditionFailed": 412}
STATUS |= {"InvalidRange": 416, "NotImplemented": 501, "SlowDown": 503}  # of S3's errors
HOP = {"connection", "date", "server", "transfer-encoding"}  # headers that concern one connection only
refuse = argparse.ArgumentParser(usage=argparse.SUPPRESS).error  # says what to mend, and exits with code 2


class S3Error(web.HTTPException):
    """An error as S3 tells it, by the code that it has for it."""

    def __init__(self, code: str):
        self.status_code = STATUS[code]
        xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        super().__init__(text=xml, content_type="application/xml")


def stays_inside(key: str) -> bool:
    """Whether a key names a place in its bucket's folder."""
    on_windows = {":", "\\"} & set(key) and os.sep != "/"  # C:/ is a place, too
    return {"", ".", ".."}.isdisjoint(key.split("/")) and not on_windows


def etag(about: os.stat_result) -> str:
    return f"{about.st_mtime_ns:x}-{about.st_size:x}"


def read_object(request: web.BaseRequest, path: Path) -> web.Response:
    """Answer GET or HEAD of a file, or of a range of it, which is first read into memory."""
    if not os.path.isfile(path):  # also of what no file can be called, unlike Path's
        raise S3Error("NoSuchKey")
    if not os.access(path, os.R_OK):
        raise S3Error("AccessDenied")
    with open(path, "rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        size, tag, modified = about.st_size, etag(about), int(about.st_mtime)
        headers = {"ETag": f'"{tag}"', "Last-Modified": formatdate(modified, usegmt=True)}
        wanted, had = ({one.value for one in has or ()} for has in (request.if_match, request.if_none_match))
        until = request.if_unmodified_since
        if not wanted & {"*", tag} if wanted else until and modified > until.timestamp():
            raise S3Error("PreconditionFailed")
        if had & {"*", tag}:
            return web.Response(status=304, headers=headers)
        headers["Accept-Ranges"], status, start, stop = "bytes", 200, 0, size
        if "Range" in request.headers:
            with suppress(ValueError):  # one that S3 does not know either: the whole object
                start, stop, _ = request.http_range.indices(size)
                status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size}"
        if status == 206 and start >= stop:
            raise S3Error("InvalidRange")
        headers["Content-Length"] = str(stop - start)
        file.seek(start)
        body = file.read(stop - start) if request.method == "GET" else None
        return web.Response(status=status, headers=headers, body=body)


def list_objects(query: dict[str, str], folder: Path) -> web.Response:
    """Answer ListObjectsV2 (and V1, whose answer has the same parts), however long, in one page."""
    prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "start-after"))
    if delimiter not in ("", "/"):
        raise S3Error("NotImplemented")
    top, paths, xml = prefix.rpartition("/")[0], (), "<IsTruncated>false</IsTruncated>"
    if (not top or stays_inside(top)) and os.path.isdir(folder / top):
        paths = (folder / top).iterdir() if delimiter else (folder / top).rglob("*")
    for key, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        if not key.startswith(prefix) or key <= after:
            continue
        if path.is_dir():
            xml += f"<CommonPrefixes><Prefix>{escape(key)}/</Prefix></CommonPrefixes>" if delimiter else ""
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            about = path.stat()
            when = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(about.st_mtime))
            entry = f"<Key>{escape(key)}</Key><LastModified>{when}</LastModified><Size>{about.st_size}</Size>"
            xml += f'<Contents>{entry}<ETag>"{etag(about)}"</ETag></Contents>'
    xml = f"<?xml version='1.0'?><ListBucketResult>{xml}</ListBucketResult>"
    return web.Response(text=xml, content_type="application/xml")


@cache
def moto():
    """A client of moto's S3, made when it is first needed."""
    from moto.server import create_backend_app
    from werkzeug.test import Client

    return Client(create_backend_app("s3"), use_cookies=False)


def ask_moto(request: web.BaseRequest, body: bytes) -> web.Response:
    """Answer a request from the buckets that are kept in memory."""
    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in HOP}
    headers.setdefault("authorization", "AWS4 Credential=anyone/1/us-east-1/s3/")  # else objects are private
    asked = {"method": request.method, "headers": headers, "input_stream": BytesIO(body)}
    reply = moto().open(request.raw_path, f"http://{request.host}", **asked)
    kept = [(name, value) for name, value in reply.headers if name.lower() not in HOP]
    return web.Response(status=reply.status_code, headers=kept, body=reply.data)


class LocalS3:
    """Answers requests, and keeps the counts and the chance that decides which reads fail."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder, self.random = args, Path(args.folder), random.Random(args.seed)
        rates = {"SlowDown": args.error_rate, "reset": args.reset_rate, "truncated": args.truncate_rate}
        self.lots = [*rates, "none"], [*rates.values(), 1 - math.fsum(rates.values())]
        self.counts = dict.fromkeys(["requests", "bytes", *rates], 0)
        self.moto_thread = ThreadPoolExecutor(1)  # moto does not promise to be safe in several

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer any request, and count it."""
        if request.path == "/_counts":
            return web.json_response(self.counts)
        self.counts["requests"] += 1
        response = await self.answer(request)
        self.counts["bytes"] += len(response.body or b"")
        return response

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a request to S3; a read of an object comes late, and fails if that is its lot."""
        signed = re.search("Credential=([^/]+)/", request.headers.get("Authorization", ""))
        if self.args.access_key and (not signed or signed[1] != self.args.access_key):
            raise S3Error("InvalidAccessKeyId" if signed else "AccessDenied")
        bucket, _, key = unquote(request.raw_path.partition("?")[0])[1:].partition("/")
        lot = self.random.choices(*self.lots)[0] if key and request.method == "GET" else "none"
        if key and request.method in ("GET", "HEAD"):
            await asyncio.sleep(self.args.latency_ms / 1e3)
        if lot == "SlowDown":
            self.counts[lot] += 1
            raise S3Error(lot)
        if lot == "reset" and request.transport:
            self.counts[lot] += 1
            linger = struct.pack("ii", 1, 0)  # without it, the connection would come to an orderly end
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.transport.abort()
            return web.Response()  # which goes nowhere
        response = await self.find(request, bucket, key)
        if lot == "truncated" and response.body:
            self.counts[lot] += 1
            response.headers["Content-Length"] = str(len(response.body))
            response.body = response.body[: len(response.body) // 2]
            response.force_close()
        return response

    async def find(self, request: web.BaseRequest, bucket: str, key: str) -> web.Response:
        """Answer from the bucket's folder, or from moto if there is none."""
        folder, loop = self.folder / bucket, asyncio.get_running_loop()
        if not stays_inside(bucket) or not os.path.isdir(folder):
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await request.content.read()
            return await loop.run_in_executor(self.moto_thread, ask_moto, request, body)
        if request.method not in ("GET", "HEAD"):
            raise S3Error("AccessDenied")
        if key and not stays_inside(key):
            raise S3Error("NoSuchKey")
        if key:
            return read_object(request, folder / key)
        if request.method == "HEAD":
            return web.Response()
        return await asyncio.to_thread(list_objects, dict(request.query), folder)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    summary, show_defaults = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=summary, formatter_class=show_defaults)
    add = parser.add_argument
    add("--folder", default=os.path.relpath(HERE / "outputs/buckets"), help="each folder in it is a bucket")
    add("--port", type=int, default=0, help="to listen on, of 127.0.0.1; 0: any that is free")
    add("--latency-ms", type=float, default=30, help="milliseconds to the first byte of an object")
    add("--error-rate", type=float, default=0, help="share of GETs that are answered 503 SlowDown")
    add("--reset-rate", type=float, default=0, help="share of GETs whose connection is reset")
    add("--truncate-rate", type=float, default=0, help="share of GETs that end half-way")
    add("--access-key", metavar="ID", help="access key id that requests must name; if not given, any or none")
    add("--seed", type=int, default=0, help="decides which GETs fail")
    add("--until-stdin-ends", action="store_true", help="end with stdin, or the program that holds it")
    args = parser.parse_args(argv)
    rates = {name: value for name, value in vars(args).items() if name.endswith("_rate")}
    for name, value in (rates | {"latency_ms": args.latency_ms}).items():
        if not 0 <= value <= (1 if name in rates else 1e6):
            refuse(f"--{name.replace('_', '-')} {value}: give 0 to {1 if name in rates else 1e6:g}")
    if (total := math.fsum(rates.values())) > 1:
        refuse(f"--error-rate, --reset-rate, --truncate-rate: together {total:g}; give up to 1")
    return args


async def serve(args: argparse.Namespace) -> None:
    """Print the address, and answer until SIGTERM or Ctrl-C, or stdin ends."""
    server, loop = web.Server(LocalS3(args).handle, auto_decompress=False), asyncio.get_running_loop()
    try:
        listening = await loop.create_server(server, "127.0.0.1", args.port, backlog=1024)
    except (OSError, OverflowError) as error:
        refuse(f"--port {args.port}: {error}; give another, or 0")
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if args.until_stdin_ends:
        threading.Thread(target=lambda: end(sys.stdin.buffer.read()), daemon=True).start()
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


def end(*_: object) -> None:
    os._exit(0)  # at once: there is nothing to save


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--folder {args.folder}: {error.strerror}; give a folder")
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
