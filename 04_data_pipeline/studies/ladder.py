"""What each change buys over the naive loop, alone, and stacked on those before it."""

from contextlib import ExitStack
from functools import partial
from itertools import product

from studies import server
from studies.measuring import Case, take_turns
from studies.stores import full_or_quick
from studies.ways import BATCH, FINAL, NAIVE, Way, measure

ALONE = {"naive": NAIVE, "with Dask": Way("Dask")}
ALONE["2 workers"] = NAIVE._replace(num_workers=2)
ALONE["8 workers"] = NAIVE._replace(num_workers=8)
ALONE["2 workers, prefetch_factor 8"] = NAIVE._replace(num_workers=2, prefetch_factor=8)
ALONE["a batch's reads at once"] = BATCH
for layout in ("128 x 128", "8 times of 64 x 64", "64 x 64 in shards"):
    ALONE[layout] = NAIVE._replace(layout=layout)
ALONE["blocks, P = 8"] = FINAL

STACKED = {"naive": NAIVE, "a batch's reads at once": BATCH}
STACKED["in a worker"] = BATCH._replace(num_workers=1)
STACKED["blocks, P = 8, in a worker"] = FINAL._replace(num_workers=1)
STACKED["blocks, P = 8"] = FINAL
STACKED["blocks, P = 32"] = FINAL._replace(patches_per_block=32)
STACKED["blocks, P = 8, of 128 x 128"] = FINAL._replace(layout="128 x 128")


def ladder(repeats: int) -> list[dict]:
    """Rates and costs of all ways at each latency, and their ratio to the naive loop."""
    ways = list(dict.fromkeys([*ALONE.values(), *STACKED.values()]))  # each once
    without_workers = [way for way in ways if not way.num_workers]
    chosen = full_or_quick(ways, without_workers)
    seconds = full_or_quick(1, 0.05)
    cases = []
    with ExitStack() as stack:
        for latency in server.LATENCIES:
            running = stack.enter_context(server.serve(latency))
            for way in chosen:
                labels = {"latency_ms": latency} | way._asdict()
                cases.append(Case(labels, partial(measure, way, running, seconds)))
        rows = take_turns("ladder", cases, repeats)
    measured = {(row["latency_ms"], way_of(row)): row for row in rows}
    return arrange(measured)


def way_of(row: dict) -> Way:
    """The way that a row is of."""
    return Way(**{name: row[name] for name in Way._fields})


def arrange(measured: dict[tuple[float, Way], dict]) -> list[dict]:
    """A row for each rung of either group, at each latency. A way may be of several."""
    groups = {"alone": ALONE, "stacked": STACKED}
    rows = []
    for latency, (group, rungs) in product(server.LATENCIES, groups.items()):
        naive = measured[latency, NAIVE]["samples_per_second"]["median"]
        for rung, way in rungs.items():
            row = measured.get((latency, way))
            if row is not None:
                ratio = row["samples_per_second"]["median"] / naive
                labels = {"group": group, "rung": rung}
                rows.append(labels | row | {"ratio_to_naive": ratio})
    return rows
