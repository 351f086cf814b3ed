"""The S3 server of chapter 3, and web servers, for tests that need a bucket or a URL."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import programs

SERVER = programs.ROOT / "03_cloud_data/local_s3.py"


@contextmanager
def serving(folder: str | Path, **flags: object) -> Iterator[str]:
    """Run local_s3.py, say with latency_ms=0; yields its address. It ends with the block, or with this process."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, str(SERVER), f"--folder={folder}", "--until-stdin-ends", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextmanager
def serving_files(handler: Callable) -> Iterator[str]:
    """A web server of this process whose requests this handler answers; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
