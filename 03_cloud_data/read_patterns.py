"""Chapter 3: what a store really does when patches are read: one by one and at once.

    uv run python read_patterns.py patterns        # 10 minutes, and stores of 7 GB, made once
    uv run python read_patterns.py server timeline start_methods      # the other studies
    uv run python read_patterns.py patterns --quick    # tiny: that it works, not what it finds
    uv run python read_patterns.py patterns --save-results      # and write results/*.json

The same patches, drawn as train.py draws them, are read from several layouts of one
dataset, made by make_store.py and served by local_s3.py: without latency, and with the first
byte after 30 ms. All ways are timed in turn, so that a machine which slows down for a while
slows all of them. You should see what a sample costs in requests, bytes and time, and that
waiting for many answers at once takes hardly longer than waiting for one. The studies are in
studies/.
"""

import gc

from ending import silence
from results import RESULTS, parse_studies, save_rows
from studies.costs import patterns, server_alone
from studies.references import references
from studies.retries import retries
from studies.shapes import latency, shapes
from studies.starts import start_methods
from studies.stores import LAYOUTS, QUICK, SIZE, make_stores
from studies.timeline import plot_timeline, timeline
from studies.whole_programs import command, making
from studies.zarr_versions import zarr_versions

# Each takes the number of repeats and returns rows.
STUDIES = {
    "command": command,
    "making": making,
    "start_methods": start_methods,
    "timeline": timeline,
    "server": server_alone,
    "patterns": patterns,
    "retries": retries,
    "latency": latency,
    "shapes": shapes,
    "references": references,
    "zarr_versions": zarr_versions,
}
OF_THEIR_OWN = (
    "command",
    "making",
    "latency",
    "shapes",
    "references",
    "zarr_versions",
)  # which need none of LAYOUTS


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    args = parse_studies(__doc__.splitlines()[0], list(STUDIES), 3, argv)
    if args.quick:
        SIZE.update(QUICK)
    silence()
    found = {}
    for study in STUDIES:
        if study not in args.studies:
            continue
        if study not in OF_THEIR_OWN:
            make_stores(LAYOUTS)
        found[study] = STUDIES[study](args.repeats)
        for row in found[study]:
            print(study, row, flush=True)
        if args.save_results:
            save(study, args.repeats, found[study])
    gc.unfreeze()  # else nanobind complains at the end of Python
    return found


def save(study: str, repeats: int, rows: list[dict]) -> None:
    """Write a study's rows, and its picture if it has one."""
    save_rows(
        study, f"uv run python read_patterns.py {study} --repeats {repeats}", rows
    )
    if study == "timeline":
        plot_timeline(rows).savefig(RESULTS / "timeline.png", dpi=110)


if __name__ == "__main__":
    main()
