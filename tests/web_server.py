"""A web server in this process, for tests that need a URL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread


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
