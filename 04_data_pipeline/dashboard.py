"""Chapter 4: watch Dask while it reads patches, in the dashboard that it serves.

    uv run python dashboard.py                    # prints the address of the page, and reads until Ctrl-C
    uv run python dashboard.py --capture FILE     # takes a picture of it, if Chromium is installed

The patches are like those of benchmark.py's study of Dask, 32 at a time: each task of reading waits 30 ms for its chunk.
"""

import argparse
import asyncio
import base64
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmark import LITTLE, OUTPUTS, Bench, Reading, loading
from distributed import LocalCluster
from tornado.websocket import websocket_connect

from object_store import InputError, Parser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = 1500, 860  # pixels


async def picture(browser: str, url: str, seconds: float) -> bytes:
    """What a page shows after so many seconds, as PNG: a browser without a window, told by its DevTools."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        flags += [f"--user-data-dir={profile}", "--window-size={},{}".format(*SIZE), url]
        with subprocess.Popen([browser, *flags], stderr=subprocess.PIPE, text=True) as process:
            try:
                line = next(line for line in process.stderr if "DevTools listening on " in line)
                address = line.split("DevTools listening on ")[1].strip()
                threading.Thread(
                    target=process.stderr.read, daemon=True
                ).start()  # else it fills up and waits
                await asyncio.sleep(seconds)
                connection = await websocket_connect(address, max_message_size=2**27)
                numbers = count(1)

                async def ask(method: str, session: dict, **parameters: object) -> dict:
                    number = next(numbers)
                    message = {"id": number, "method": method, "params": parameters} | session
                    await connection.write_message(json.dumps(message))
                    while (answer := json.loads(await connection.read_message())).get("id") != number:
                        pass
                    return answer["result"]

                pages = (await ask("Target.getTargets", {}))["targetInfos"]
                page = next(each["targetId"] for each in pages if each["type"] == "page")
                attached = await ask("Target.attachToTarget", {}, targetId=page, flatten=True)
                found = await ask(
                    "Page.captureScreenshot", {"sessionId": attached["sessionId"]}, format="png"
                )
                return base64.b64decode(found["data"])
            finally:
                process.kill()


def main(argv: list[str] | None = None) -> None:
    """Read patches with Dask on a cluster of two processes, whose dashboard the reader or a browser looks at."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capture", type=Path, metavar="FILE", help="write a picture of the page, as PNG, and end"
    )
    parser.add_argument("--seconds", type=float, default=20, help="of reading before the picture")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if args.capture and not browser:
        raise InputError(
            f"--capture {args.capture}: no Chromium here; leave the flag out, and open the page yourself"
        )
    if args.capture and not args.capture.parent.is_dir():
        raise InputError(f"--capture {args.capture}: no such folder")
    if not 0 < args.seconds < math.inf:
        raise InputError(f"--seconds {args.seconds}: give more than 0")
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(2, threads_per_worker=1, dashboard_address="127.0.0.1:0"))
        address, ended = cluster.scheduler_address, threading.Event()
        bench = Bench("dashboard", args.quick, 1, stack)
        reading = Reading("dask", batch_size=4 * LITTLE, scheduler=address)
        print(f"dashboard: {cluster.dashboard_link}", flush=True)
        _, loader = stack.enter_context(loading(bench, reading))

        def read() -> None:
            for _ in loader:
                if ended.is_set():
                    break

        reader = stack.enter_context(ThreadPoolExecutor(1)).submit(read)
        stack.callback(ended.set)
        if args.capture:
            shot = asyncio.run(picture(browser, cluster.dashboard_link, args.seconds))
            ended.set()
        reader.result()  # raises what reading raised
    if args.capture:
        args.capture.write_bytes(shot)
        print(f"picture: {args.capture}")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped")
