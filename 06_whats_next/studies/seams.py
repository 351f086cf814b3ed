"""Whether patches leave seams in a map: jumps at their edges, with more and less overlap.

    uv run python -m studies.seams results/final.ckpt --store STORE   # or a checkpoint of your own

You should see that jumps across the edges of patches are larger than those inside without
overlap, and as large with it.
"""

import argparse

import numpy as np

from ending import run
from errors import DataError
from location import Location
from predict.maps import MapDataset, MapFiller, choose_overlap, load_model
from predict.tiles import Tiling
from results import save_rows
from studies.skill import call_study, make_draws, predict_map

OVERLAPS = (0, 4, 8, 16, 32)  # and --overlap
KINDS = ("largest", "typical")
WHERE = ("edges", "inside")


def find_jumps(field: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """Differences between neighbouring columns: across the edges of patches, and elsewhere.

    Only columns are compared, because their edges lie at all latitudes. Those of rows lie
    at a few, whose winds differ more or less from row to row than others.
    """
    width = tiling.shape[1]
    starts = np.array([column for _, column in tiling.corners])
    bounds = np.concatenate([starts, starts + tiling.size]) % width
    is_edge = np.isin(np.arange(1, width), bounds)
    jumps = np.abs(np.diff(field, axis=2))
    return jumps[..., is_edge].ravel(), jumps[..., ~is_edge].ravel()


def measure_seams(model: MapFiller, draws: list[MapDataset]) -> dict[str, float]:
    """The jumps of the network's answer in m/s: the largest, and the root mean square."""
    at_edges, inside = [], []
    for maps in draws:
        for number in range(len(maps)):
            patches = predict_map(model, maps[number])
            answer = maps.std * maps.tiling.join(patches)
            jumps = find_jumps(answer, maps.tiling)
            at_edges.append(jumps[0])
            inside.append(jumps[1])
    row = {"patches": len(draws[0].tiling.corners)}
    for name, parts in {"edges": at_edges, "inside": inside}.items():
        values = np.concatenate(parts)
        if not values.size:
            raise DataError("--store: a patch is as wide as the map; there is no seam")
        row[f"{name}_largest"] = float(values.max())
        row[f"{name}_typical"] = float(np.sqrt((values**2).mean()))
    return row


def study(args: argparse.Namespace, location: Location) -> list[dict]:
    """A row for each overlap."""
    rows = []
    print("overlap  patches  largest jump at edges, inside  typical at edges, inside")
    _, record = load_model(args.checkpoint)
    largest = record["options"]["patch_size"] // 2
    overlaps = {*OVERLAPS, choose_overlap(args.overlap, record)}
    for overlap in sorted(overlaps):
        if overlap > largest:
            break
        model, draws = make_draws(args, location, overlap)
        row = {"overlap": overlap, **measure_seams(model, draws)}
        rows.append(row)
        values = [f"{row[f'{where}_{kind}']:.2f}" for kind in KINDS for where in WHERE]
        print(f"{overlap:7}  {row['patches']:7}  {'  '.join(values)}")
    if args.save_results:
        save_rows("seams", f"uv run python -m studies.seams {args.command}", rows)
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    """Look for seams in a checkpoint's maps."""
    return call_study(study, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
