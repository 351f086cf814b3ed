"""The S3 server of chapter 3, for tests that need a bucket."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
