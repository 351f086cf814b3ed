"""Chapter 3: an S3 server on this machine, as slow and as unreliable as you like.

Serve the buckets in outputs/buckets, with the first byte of an object after 30 ms:

    uv run python local_s3.py

Play a throttled bucket that is far away:

    uv run python local_s3.py --latency-ms 100 --error-rate 0.05

The server prints its address; point any S3 client at it. train.py starts one by itself.
Each folder in `--folder` is a bucket that can only be read. Clients may create other
buckets, which moto (https://docs.getmoto.org) keeps in memory. `/_counts` says what was
asked for so far. Only this machine can reach the server. It does not verify signatures:
`--access-key` compares the name of the key.

If you have a real MinIO or bucket, you do not need this script:

    uv run python train.py --store s3://bucket/winds.zarr --endpoint http://localhost:9000
"""

import argparse
import asyncio
import math
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from aiohttp import web

from errors import refuse
from s3_requests import Faults, LocalS3

BUCKETS = Path(__file__).parent / "outputs/buckets"
MAX_LATENCY_MS = 1e6


def main(argv: list[str] | None = None) -> None:
    """Serve until something ends this process."""
    args = parse_arguments(argv)
    folder = Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--folder {args.folder}: {error.strerror}; give a folder")
    rates = (args.error_rate, args.reset_rate, args.truncate_rate)
    faults = Faults(*rates, seed=args.seed)
    server = LocalS3(folder, faults, args.latency_ms / 1e3, args.access_key)
    asyncio.run(serve(server, args.port, args.until_stdin_ends))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags of the command line, within their limits."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_integer = partial(add, type=int, default=0)
    add_rate = partial(add, type=float, default=0)
    folder = os.path.relpath(BUCKETS)
    add("--folder", default=folder, help="each folder in it is a bucket")
    add_integer("--port", help="to listen on, of 127.0.0.1; 0: any that is free")
    latency = "milliseconds to the first byte of an object"
    add("--latency-ms", type=float, default=30, help=latency)
    add_rate("--error-rate", help="share of GETs that are answered 503 SlowDown")
    add_rate("--reset-rate", help="share of GETs whose connection is reset")
    add_rate("--truncate-rate", help="share of GETs that end half-way")
    access_key = "access key id that requests must name; if not given, any or none"
    add("--access-key", metavar="ID", help=access_key)
    add_integer("--seed", help="decides which GETs fail")
    until = "end with stdin, or the program that holds it"
    add("--until-stdin-ends", action="store_true", help=until)
    args = parser.parse_args(argv)
    check_limits(args)
    return args


def check_limits(args: argparse.Namespace) -> None:
    """Refuse rates that are no shares, and a latency that no clock can wait for."""
    rates = {
        "--error-rate": args.error_rate,
        "--reset-rate": args.reset_rate,
        "--truncate-rate": args.truncate_rate,
    }
    for flag, rate in rates.items():
        if not 0 <= rate <= 1:
            refuse(f"{flag} {rate}: give 0 to 1")
    if not 0 <= args.latency_ms <= MAX_LATENCY_MS:
        refuse(f"--latency-ms {args.latency_ms}: give 0 to {MAX_LATENCY_MS:g}")
    total = math.fsum(rates.values())
    if total > 1:
        refuse(f"{', '.join(rates)}: together {total:g}; give up to 1")


async def serve(server: LocalS3, port: int, until_stdin_ends: bool) -> None:
    """Print the address, and answer until SIGTERM or Ctrl-C, or until stdin ends."""
    # Without auto_decompress, an object is kept as it was sent.
    protocol = web.Server(server.handle, auto_decompress=False)
    loop = asyncio.get_running_loop()
    try:
        listening = await loop.create_server(protocol, "127.0.0.1", port, backlog=1024)
    except (OSError, OverflowError) as error:
        refuse(f"--port {port}: {error}; give another, or 0")
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if until_stdin_ends:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    host, found_port = listening.sockets[0].getsockname()
    print(f"http://{host}:{found_port}", flush=True)
    await listening.serve_forever()


def end_with_stdin() -> None:
    """Wait for the end of stdin, which comes even if the program that holds it is killed."""
    sys.stdin.buffer.read()
    end()


def end(*_: object) -> None:
    """End this process at once: there is nothing to save."""
    os._exit(0)


if __name__ == "__main__":
    main()
