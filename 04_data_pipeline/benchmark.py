"""Chapter 4: what each setting of a loader buys, one at a time and stacked.

    uv run python benchmark.py ladder                  # from the naive loop to the final one
    uv run python benchmark.py sweep workers dask      # the studies are in studies/
    uv run python benchmark.py                         # all of them: several hours
    uv run python benchmark.py ladder --quick          # tiny: that it works, not what it finds
    uv run python benchmark.py ladder --save-results   # and write results/ladder.json

The ladder takes 40 minutes, and its stores 7 GB, made once. All ways are timed in turn, so
that a machine which slows down for a while slows all of them. A run that was stopped goes on
where it was, unless a script has changed since. Chapter 3's local_s3.py serves the stores on
the same cores, without latency, and with the first byte after 30 ms. You should see that the
naive loop waits for nearly all of its time, and that most of the cure is to use a map that
was read more than once.
"""

import warnings

from ending import silence
from results import RESULTS, parse_studies, save_rows
from studies.final_loader import memory, wait
from studies.growth import growth
from studies.journal import journal_path
from studies.ladder import ladder
from studies.levelled import describe_levelled, levelled, plot_levelled
from studies.measuring import frozen
from studies.processes import dask_modes, persistent, sweep, workers
from studies.stores import LAYOUTS, QUICK, SIZE, make_stores
from studies.whole_runs import command, describe_command, shuffle

MORE_WORKERS_THAN_CORES = "This DataLoader will create"
# Each takes the number of repeats and returns rows. The command comes first, because a
# program's peak memory counts that of the process that starts it.
STUDIES = {
    "command": command,
    "ladder": ladder,
    "sweep": sweep,
    "workers": workers,
    "dask": dask_modes,
    "persistent": persistent,
    "wait": wait,
    "memory": memory,
    "growth": growth,
    "shuffle": shuffle,
    "levelled": levelled,
}
# The layouts that a study reads, if not whole maps alone.
STORES = {"command": [], "growth": [], "ladder": list(LAYOUTS)}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(STUDIES), 3, argv)
    if args.quick:
        SIZE.update(QUICK)
    silence()
    warnings.filterwarnings("ignore", MORE_WORKERS_THAN_CORES)
    found = {}
    for study in STUDIES:
        if study not in args.studies:
            continue
        make_stores(STORES.get(study, ["whole maps"]))
        with frozen():
            found[study] = STUDIES[study](args.repeats)
        for row in found[study]:
            line = DESCRIBE.get(study, describe)(row)
            print(f"{study}: {line}", flush=True)
        if args.save_results:
            save(study, args.repeats, found[study])
    for study in found:  # all of them are whole
        journal_path(study).unlink(missing_ok=True)
    return found


def save(study: str, repeats: int, rows: list[dict]) -> None:
    """Write a study's rows, and its picture if it has one."""
    save_rows(study, f"uv run python benchmark.py {study} --repeats {repeats}", rows)
    if study == "levelled":
        plot_levelled(rows).savefig(RESULTS / "levelled.png", dpi=100)


def describe(row: dict) -> str:
    """A row's labels and numbers in a line, without its lists."""
    parts = []
    for name, value in row.items():
        if isinstance(value, dict):
            value = "{median:.4g} ({min:.4g} to {max:.4g})".format(**value)
        elif isinstance(value, float):
            value = f"{value:.4g}"
        if not isinstance(value, list):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


DESCRIBE = {"command": describe_command, "levelled": describe_levelled}


if __name__ == "__main__":
    main()
