"""Chapter 3: an S3 server on this machine, as slow and as unreliable as you like.

    uv run python local_s3.py                                     # the buckets of outputs/buckets, first byte after 30 ms
    uv run python local_s3.py --latency-ms 100 --error-rate 0.05  # a throttled bucket far away

It prints the address; point any S3 client at it. train.py starts one by itself. The server is moto
(https://docs.getmoto.org), which speaks the protocol but keeps everything in memory. In front of it stand two
small layers: one answers reads of the files in a folder, as large as you like; the other injects latency,
limits bandwidth, and fails. Have a real MinIO or bucket? You do not need this script:

    AWS_ENDPOINT_URL=http://localhost:9000 AWS_ALLOW_HTTP=true uv run python train.py --store s3://bucket/winds.zarr
"""

import argparse
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Response

HERE = Path(__file__).parent
STALL_SECONDS = 60  # longer than any client should wait
PIECE = 64 * 1024  # bytes that are sent at a time, so that bandwidth can be limited
ERRORS = {
    "SlowDown": (503, "Please reduce your request rate."),
    "ExpiredToken": (400, "The provided token has expired."),
    "AccessDenied": (403, "Access Denied"),
}

Application = Callable[[dict, Callable], Iterable[bytes]]


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


def failure(code: str) -> Response:
    """An error as S3 tells it, in XML."""
    status, message = ERRORS[code]
    xml = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Response(xml, status, content_type="application/xml")


def reads_object(environ: dict) -> bool:
    """Whether this is a GET or HEAD of an object, and not of a bucket or of what S3 keeps beside objects."""
    inside = environ["PATH_INFO"].strip("/").count("/")
    return environ["REQUEST_METHOD"] in ("GET", "HEAD") and inside > 0 and not environ["QUERY_STRING"]


class Folder:
    """Answer reads of a folder's files, FOLDER/BUCKET/KEY, with ranges and ETags; leave the rest to `application`."""

    def __init__(self, application: Application, folder: Path):
        self.application, self.folder = application, folder.resolve()

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        path = (self.folder / unquote(environ["PATH_INFO"]).strip("/")).resolve()
        if reads_object(environ) and path.is_relative_to(self.folder) and path.is_file():
            response = send_file(path, environ, "application/octet-stream", conditional=True)
            return response(environ, start_response)
        return self.application(environ, start_response)


class Drop(ConnectionError):
    """Close the connection at once, without another byte: the client sees a reset."""


class Unreliable:
    """Delay, limit and break the reads of objects that `application` answers, by chance but repeatably."""

    def __init__(self, application: Application, args: argparse.Namespace):
        self.application, self.args, self.counts = application, args, Counter()
        self.lock, self.sent_until = threading.Lock(), 0.0
        rates = {"SlowDown": args.error_rate, "reset": args.reset_rate}
        self.rates = rates | {"truncate": args.truncate_rate, "stall": args.stall_rate}

    def fault(self) -> str | None:
        """What befalls this request: a pure function of the seed and of how many came before."""
        with self.lock:
            self.counts["requests"] += 1
            draw = random.Random(f"{self.args.seed} {self.counts['requests']}").random()
            for name, rate in self.rates.items():
                if (draw := draw - rate) < 0:
                    self.counts[name] += 1
                    return name
        return None

    def expired(self, environ: dict) -> bool:
        """Whether the request is signed with a key, from /credentials, that is too old."""
        _, found, rest = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=ISSUED")
        return bool(found) and time.time() - int(rest.partition("/")[0]) > self.args.expire_after

    def credentials(self) -> Response:
        """Short-lived keys, as a container of AWS gets them (AWS_CONTAINER_CREDENTIALS_FULL_URI)."""
        now = int(time.time())
        expiration = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + self.args.expire_after))
        keys = {"AccessKeyId": f"ISSUED{now}", "SecretAccessKey": "secret", "Token": "token"}
        return Response(json.dumps(keys | {"Expiration": expiration}), content_type="application/json")

    def pieces(self, body: Iterable[bytes], truncate: bool) -> Iterable[bytes]:
        """The body, in pieces, no faster than --bandwidth-mb allows all connections together."""
        try:
            whole = memoryview(b"".join(body))
            whole = whole[: len(whole) // 2] if truncate else whole
            for first in range(0, len(whole), PIECE):
                piece = whole[first : first + PIECE]
                with self.lock:
                    self.counts["bytes"] += len(piece)
                    now = time.monotonic()
                    self.sent_until = max(now, self.sent_until) + len(piece) / (self.args.bandwidth_mb * 1e6)
                    wait = self.sent_until - now
                time.sleep(wait)
                yield bytes(piece)
        finally:
            if hasattr(body, "close"):
                body.close()
        if truncate:
            raise Drop("truncated")

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/credentials":
            return self.credentials()(environ, start_response)
        if environ["PATH_INFO"] == "/counts":
            return Response(json.dumps(self.counts), content_type="application/json")(environ, start_response)
        if not reads_object(environ):
            return self.application(environ, start_response)
        fault = self.fault()
        time.sleep(self.args.latency_ms / 1e3)
        if self.expired(environ):
            return failure("ExpiredToken")(environ, start_response)
        if fault == "SlowDown":
            return failure(fault)(environ, start_response)
        if fault == "stall":
            time.sleep(STALL_SECONDS)
        if fault in ("reset", "stall"):
            raise Drop(fault)
        return self.pieces(self.application(environ, start_response), fault == "truncate")


class Handler(WSGIRequestHandler):
    """Keeps connections open between requests, and says nothing of each."""

    protocol_version = "HTTP/1.1"

    def log_request(self, *_) -> None:
        pass

    def connection_dropped(self, error: BaseException, environ: dict | None = None) -> None:
        self.close_connection = True
        if isinstance(error, Drop):  # without this, an orderly end in place of a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def moto() -> Application:
    """The S3 of moto, which makes whatever bucket and object a client asks it to."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--folder", default=os.path.relpath(HERE / "outputs/buckets"), help="each folder in it is a bucket")
    add("--port", type=int, default=0, help="to listen on, of 127.0.0.1; 0: any that is free")
    add("--latency-ms", type=float, default=30, help="milliseconds to the first byte of an object")
    add("--bandwidth-mb", type=float, default=1000, help="MB/s, of all connections together")
    add("--error-rate", type=float, default=0, help="share of reads that are answered 503 SlowDown")
    add("--reset-rate", type=float, default=0, help="share of reads whose connection is reset")
    add("--truncate-rate", type=float, default=0, help="share of reads that end half-way")
    add("--stall-rate", type=float, default=0, help=f"share of reads that hang for {STALL_SECONDS} s")
    add("--expire-after", type=int, default=3600, help="seconds for which keys from /credentials are good")
    add("--seed", type=int, default=0, help="decides which reads fail")
    add("--until-stdin-ends", action="store_true", help="stop when the program that started it has ended")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; the first line printed is the address."""
    args = parse_arguments(argv)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    application = Unreliable(Folder(moto(), Path(args.folder)), args)
    server = make_server("127.0.0.1", args.port, application, threaded=True, request_handler=Handler)
    server.shutdown_request = server.close_request  # else every reset would begin with an orderly end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.until_stdin_ends:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        pass
