"""The small store that a run without --store makes and serves, with chapter 3's scripts."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import DataError
from location import Location

CLOUD = Path(__file__).resolve().parent.parent / "03_cloud_data"
SMALL = "s3://winds/small.zarr"


@contextmanager
def serve_demo_store() -> Iterator[Location]:
    """Make the store, unless it is whole, and serve it over S3 while the block runs."""
    for name in ("make_store.py", "local_s3.py"):
        if not (CLOUD / name).exists():
            reason = f"not given, and {CLOUD / name}, which makes one, is missing"
            raise DataError(f"--store: {reason}; give --store")
    if subprocess.run([sys.executable, CLOUD / "make_store.py"]).returncode:
        sys.exit(2)  # it has said why
    # The server ends with its stdin, and so also if this process is killed.
    server = subprocess.Popen(
        [sys.executable, CLOUD / "local_s3.py", "--until-stdin-ends"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with server:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            sys.exit(2)
        yield Location(SMALL, endpoint, anonymous=True)
