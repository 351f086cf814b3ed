"""From a command line to a store and back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

from ending import call, name_store
from location import Location
from options import Options, parse_options

Result = TypeVar("Result")
Task = Callable[[Options, Location], Result]


def call_with_store(task: Task, summary: str, argv: list[str] | None) -> Result:
    """Call `task` with the options of a command line, and the location that they name."""
    options = parse_options(summary, argv)
    checkpoint = f"--resume {options.resume}"
    return call_at(partial(task, options), make_location(options), checkpoint)


def make_location(options: Options) -> Location:
    """The store that the options name. Its URL is empty if they name none."""
    return Location(
        options.store or "",
        endpoint=options.endpoint,
        anonymous=options.anonymous,
        retry_timeout=options.retry_timeout,
        region=options.region,
        icechunk=options.icechunk,
        snapshot=options.snapshot,
    )


def call_at(
    task: Callable[[Location], Result], named: Location, checkpoint: str
) -> Result:
    """Call `task` with the location that is named. If none is, see `serve`.

    An error becomes a last line and exit code 2. `checkpoint` is how the user named one.
    """

    def call_served() -> Result:
        with serve(named) as location, name_store(location.url):
            return task(location)

    return call(call_served, checkpoint)


def serve(named: Location) -> AbstractContextManager[Location]:
    """The location that is named. If none is, what demo_store.py serves, if it is here."""
    if named.url or not find_spec("demo_store"):
        return nullcontext(named)
    from demo_store import serve_demo_store

    return serve_demo_store()
