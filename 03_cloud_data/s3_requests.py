"""The server behind local_s3.py: who may ask, which reads are late or fail, who answers."""

import asyncio
import math
import os
import random
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from s3_objects import S3Error, answer_from_folder, stays_inside

# What may happen to a read of an object, by the names that /_counts has.
SLOW_DOWN = "SlowDown"
RESET = "reset"
TRUNCATED = "truncated"
NO_FAULT = "none"

# Headers that concern one connection, and so do not go to or from moto.
PER_CONNECTION = {"connection", "date", "server", "transfer-encoding"}
# moto keeps objects private from requests that are not signed.
SIGNED_BY_ANYONE = "AWS4 Credential=anyone/1/us-east-1/s3/"


class Faults:
    """Decides which reads of objects fail, and how. The same seed decides the same."""

    def __init__(
        self, error_rate: float, reset_rate: float, truncate_rate: float, seed: int
    ):
        rates = (error_rate, reset_rate, truncate_rate)
        self.names = (SLOW_DOWN, RESET, TRUNCATED, NO_FAULT)
        self.weights = (*rates, 1 - math.fsum(rates))
        self.random = random.Random(seed)

    def draw(self) -> str:
        """What becomes of the next read."""
        return self.random.choices(self.names, self.weights)[0]


class LocalS3:
    """Answers requests, and counts them.

    The folders in `folder` are buckets that can only be read. What clients create is kept
    in memory.
    """

    def __init__(
        self,
        folder: Path,
        faults: Faults,
        latency_seconds: float,
        access_key: str | None = None,
    ):
        self.folder = folder
        self.faults = faults
        self.latency_seconds = latency_seconds
        self.access_key = access_key
        names = ("requests", "bytes", SLOW_DOWN, RESET, TRUNCATED)
        self.counts = dict.fromkeys(names, 0)
        self.moto_thread = ThreadPoolExecutor(1)  # moto may not be safe in several

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer any request, and count it."""
        if request.path == "/_counts":
            return web.json_response(self.counts)
        self.counts["requests"] += 1
        response = await self.answer(request)
        self.counts["bytes"] += len(response.body or b"")
        return response

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a request to S3. A read of an object comes late, and may fail."""
        self.check_access_key(request)
        path = unquote(request.raw_path.partition("?")[0])
        bucket, _, key = path[1:].partition("/")
        if not key or request.method not in ("GET", "HEAD"):
            return await self.find(request, bucket, key)
        fault = self.faults.draw() if request.method == "GET" else NO_FAULT
        await asyncio.sleep(self.latency_seconds)
        if fault == SLOW_DOWN:
            self.counts[fault] += 1
            raise S3Error(SLOW_DOWN)
        if fault == RESET and request.transport:
            self.counts[fault] += 1
            reset(request.transport)
            return web.Response()  # nobody receives it
        response = await self.find(request, bucket, key)
        if fault == TRUNCATED and response.body:
            self.counts[fault] += 1
            truncate(response)
        return response

    def check_access_key(self, request: web.BaseRequest) -> None:
        """S3Error unless the request names the access key, if there is one."""
        if not self.access_key:
            return
        signature = request.headers.get("Authorization", "")
        signed = re.search("Credential=([^/]+)/", signature)
        if not signed:
            raise S3Error("AccessDenied")
        if signed[1] != self.access_key:
            raise S3Error("InvalidAccessKeyId")

    async def find(
        self, request: web.BaseRequest, bucket: str, key: str
    ) -> web.Response:
        """Answer from the bucket's folder, or from moto if there is none."""
        folder = self.folder / bucket
        if stays_inside(bucket) and os.path.isdir(folder):
            return await answer_from_folder(request, folder, key)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.moto_thread, ask_moto, request, body)


def reset(transport: asyncio.Transport) -> None:
    """End a connection as a failing network does."""
    linger = struct.pack("ii", 1, 0)  # without it, the end would be an orderly one
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def truncate(response: web.Response) -> None:
    """Announce the whole body, send half of it, and close the connection."""
    body = response.body
    response.headers["Content-Length"] = str(len(body))
    response.body = body[: len(body) // 2]
    response.force_close()


def ask_moto(request: web.BaseRequest, body: bytes) -> web.Response:
    """Answer a request from the buckets that are kept in memory."""
    headers = {}
    for name, value in request.headers.items():
        if name.lower() not in PER_CONNECTION:
            headers[name.lower()] = value
    headers.setdefault("authorization", SIGNED_BY_ANYONE)
    reply = moto().open(
        request.raw_path,
        f"http://{request.host}",
        method=request.method,
        headers=headers,
        input_stream=BytesIO(body),
    )
    kept = []
    for name, value in reply.headers:
        if name.lower() not in PER_CONNECTION:
            kept.append((name, value))
    return web.Response(status=reply.status_code, headers=kept, body=reply.data)


@cache
def moto():
    """A client of moto's S3. Importing moto takes long, so only who writes waits for it."""
    from moto.server import create_backend_app
    from werkzeug.test import Client

    return Client(create_backend_app("s3"), use_cookies=False)
