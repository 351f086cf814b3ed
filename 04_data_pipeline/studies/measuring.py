"""How measurements are made: in turn, in processes of their own, with all their CPU time."""

import gc
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil
from tqdm import tqdm

from results import spread
from studies.journal import Journal
from studies.server import SERVERS
from studies.stores import SIZE

LIMIT = 180  # seconds for a measurement in a process of its own
# Numbers of which a row has median, least and greatest; of others it has the median.
SPREAD = {
    "samples_per_second",
    "step_seconds",
    "first_epoch_s",
    "second_epoch_s",
    "data_wait_share",
}


class Case(NamedTuple):
    """What is measured: the labels of its row, and a function that returns its figures."""

    labels: dict
    measure: Callable[[], dict]


def take_turns(
    study: str, cases: list[Case], repeats: int, spreads: set[str] = SPREAD
) -> list[dict]:
    """Measure all cases in turn, several times; a row of labels and figures for each.

    What was measured before the study was stopped is not measured again, unless it failed
    or a script has changed since.
    """
    journal = Journal(study)
    runs: list[list[dict]] = [[] for _ in cases]
    for turn in range(repeats):
        named = tqdm(cases, f"{study}, turn {turn + 1}", disable=None)
        for number, case in enumerate(named):
            key = json.dumps([turn, case.labels])
            if key not in journal.measured:
                journal.add(key, case.measure())
            runs[number].append(journal.measured[key])
    rows = []
    for case, of_case in zip(cases, runs):
        rows.append(case.labels | summarise(of_case, spreads))
    return rows


def summarise(runs: list[dict], spreads: set[str] = SPREAD) -> dict:
    """Spreads or medians of numbers; of anything else, such as an error, the first."""
    row = {}
    for run in reversed(runs):
        row |= run
    for name, value in row.items():
        if isinstance(value, int | float):
            values = spread([run[name] for run in runs if name in run])
            row[name] = values if name in spreads else values["median"]
    return row


def children() -> list[psutil.Process]:
    """All processes that this one has started, and those that they have; not the servers."""
    started = psutil.Process().children(recursive=True)
    return [child for child in started if child.pid not in SERVERS]


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of all that it has started, ended ones, too."""
    seconds = 0.0
    for process in [psutil.Process(), *children()]:
        seconds += sum(process.cpu_times()[:4])  # its own and its ended children's
    return seconds


def fresh(limit: float, function: Callable, *arguments: object, **size: int) -> dict:
    """What a function returns in a process with threads and memory of its own.

    {"error": ...} if it fails, or does not answer in `limit` seconds. `size` changes SIZE.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    work = (theirs, SIZE | size, function, *arguments)
    child = context.Process(target=answer, args=work)
    child.start()
    theirs.close()
    try:
        found = {"error": f"nothing after {limit} s"}
        if ours.poll(limit):
            found = ours.recv()
        child.join(0 if "error" in found else limit)
    except EOFError:
        found = {"error": "its process ended without an answer"}
    if child.exitcode is None:
        kill_all(psutil.Process(child.pid))
    child.join()
    return found


def answer(
    connection: Connection, size: dict, function: Callable, *arguments: object
) -> None:
    """Send what a function returns, or the last line of its error, to the other end."""
    SIZE.update(size)
    try:
        with frozen():
            found = function(*arguments)
    except Exception as error:  # whatever it is, it is what the study reports
        found = {"error": str(error).strip().splitlines()[-1]}
    connection.send(found)


@contextmanager
def frozen() -> Iterator[None]:
    """Keep what is imported out of the collector's way, as train.py does."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # else nanobind complains at the end of Python


def kill_all(parent: psutil.Process) -> None:
    """Kill a process, and first all that it has started."""
    for process in [*parent.children(recursive=True), parent]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
