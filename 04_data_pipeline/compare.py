"""Chapter 4: the same batches from the same bucket, by other libraries and by our loader.

    uv run python compare.py ours limit "bare GETs"     # what needs no other library
    uv run --python 3.12 --group peers python compare.py                  # all: half an hour
    uv run --python 3.12 --group peers python compare.py --save-results   # and results/

A library that is not installed is left out: on Python 3.11 that is insitubatch.

A batch is 32 patches of 64 x 64 cells of u and v, cut from whole maps of 0.25 degrees
behind local_s3.py, which answers after 30 ms. Each reader works in a process of its own, in
turn with the others. All batches are made by the same PatchMaker.make_batch.

`limit` is what a reader could do at best: the same objects by bare GETs, decoded in threads,
and nothing cut. `bare GETs` does not decode: it is what the server gives to one client, and
to two. You should see `ours` near the limit, and those that read a map for each sample far
behind: how many patches are cut from a map counts for more than how it is read.
"""

import sys
from importlib.metadata import version
from statistics import median
from typing import NamedTuple

from tqdm import tqdm

from errors import refuse
from results import parse_studies, save_rows, spread
from studies.measuring import fresh
from studies.reader_costs import measure
from studies.readers import READERS
from studies.server import LATENCIES, serve
from studies.stores import QUICK, SIZE, make_stores, store_flags
from studies.tree_memory import KIND
from studies.ways import SLOTS

COMMAND = "uv run --python 3.12 --group peers python compare.py"
LAYOUT = "whole maps"
LATENCY_MS = max(LATENCIES)
SECONDS = 5.0  # of each measurement; in 2 s all of the store's maps are read
TIME_LIMIT = 600  # seconds; a reader that takes longer hangs


class Case(NamedTuple):
    """A reader and its setting."""

    reader: str
    patches_per_block: int
    num_workers: int


def main(argv: list[str] | None = None) -> list[dict]:
    """Compare the readers asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(READERS), 3, argv)
    words = sys.argv[1:] if argv is None else argv
    names = find_installed(args.studies, words)
    seconds = SECONDS
    if args.quick:
        SIZE.update(QUICK)
        args.repeats = 1
        seconds = 0.1
    make_stores(["whole maps"])
    cases = list_cases(names, args.quick)
    rows = make_rows(measure_in_turn(cases, args.repeats, seconds))
    show(rows)
    if args.save_results:
        save_rows("compare", " ".join([COMMAND, *words]), rows)
    return rows


def find_installed(names: list[str], words: list[str]) -> list[str]:
    """Those whose package is installed. One that was asked for must be: exit code 2."""
    installed = []
    for name in names:
        reader = READERS[name]
        if reader.is_installed():
            installed.append(name)
            continue
        reason = f"{name}: {reader.package} is not installed; run `{reader.command}`"
        if name in words:
            refuse(reason)
        print(f"left out: {reason}", file=sys.stderr)
    return installed


def list_cases(names: list[str], quick: bool) -> list[Case]:
    """Each reader with each of its settings, or with the first and the last of them."""
    cases = []
    for name in names:
        settings = READERS[name].settings
        if quick:
            settings = dict.fromkeys([settings[0], settings[-1]])
        cases += [Case(name, *setting) for setting in settings]
    return cases


def measure_in_turn(
    cases: list[Case], repeats: int, seconds: float
) -> dict[Case, list[dict]]:
    """What each case does in each round, in a process of its own."""
    runs: dict[Case, list[dict]] = {case: [] for case in cases}
    with serve(LATENCY_MS) as server:
        for case in tqdm(repeats * cases, "readers", disable=None):
            flags = store_flags(
                LAYOUT,
                server,
                "--shuffle-slots",
                SLOTS,
                "--patches-per-block",
                case.patches_per_block,
                "--num-workers",
                case.num_workers,
            )
            found = fresh(TIME_LIMIT, measure, case.reader, server, flags, seconds)
            if "error" in found:
                sys.exit(f"{case.reader}: {found['error']}")
            runs[case].append(found)
    return runs


def make_rows(runs: dict[Case, list[dict]]) -> list[dict]:
    """A row for each case: its rates with their spread, and medians of all other figures."""
    rows = []
    for case, found in runs.items():
        reader = READERS[case.reader]
        row = {"reader": case.reader, "as": reader.role, "what": reader.what}
        row["latency_ms"] = LATENCY_MS
        row["patches_per_block"] = case.patches_per_block
        row["num_workers"] = case.num_workers
        for figure in found[0]:
            row[figure] = median(run[figure] for run in found)
        row["samples_per_second"] = spread(rates(found))
        for share, name in (
            ("share_of_limit", "limit"),
            ("share_of_bare", "bare GETs"),
        ):
            reference = runs.get(case._replace(reader=name, num_workers=0))
            if reference:
                row[share] = median_share(found, reference)
        row["tree_memory_kind"] = KIND
        row["exact_resume"] = reader.resume.exact
        row["resume"] = reader.resume.reason
        if reader.package:
            row["version"] = version(reader.package)
        rows.append(row)
    return rows


def rates(found: list[dict]) -> list[float]:
    return [run["samples_per_second"] for run in found]


def median_share(found: list[dict], reference: list[dict]) -> float:
    """Of the rate of a reference in the same round: no round is as fast as another."""
    return median(a / b for a, b in zip(rates(found), rates(reference)))


def show(rows: list[dict]) -> None:
    head = f"{'':24} P workers samples/s of limit of bare first, s requests"
    print(f"{head}      MB CPU, ms {KIND}, MB")
    for row in rows:
        limit = row.get("share_of_limit", float("nan"))
        bare = row.get("share_of_bare", float("nan"))
        line = f"{row['reader']:24}{row['patches_per_block']:2}{row['num_workers']:8}"
        line += f"{row['samples_per_second']['median']:10.0f}{limit:9.2f}{bare:8.2f}"
        line += f"{row['first_batch_s']:9.2f}{row['requests_per_sample']:9.2f}"
        line += f"{row['bytes_per_sample'] / 1e6:8.2f}{row['client_cpu_ms']:8.2f}"
        print(f"{line}{row['tree_memory_mb']:8.0f}")


if __name__ == "__main__":
    main()
