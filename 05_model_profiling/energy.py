"""Chapter 5: the energy of a thousand samples, before and after the fixes.

    uv run --with codecarbon python energy.py                  # two minutes
    uv run --with codecarbon python energy.py --save-results   # and write results/energy.json

You should see joules for each kind of step, and whether they were measured. CodeCarbon reads
the counters of GPUs (NVML) and of processors (RAPL) where the system lets it. Elsewhere it
multiplies the time by watts from a table: then the joules are only the time in another unit.
"""

import importlib.util
import logging
import os
from pathlib import Path

import torch

from errors import refuse
from fixes import milestones
from results import parse_studies, save_rows, spread
from step import Step, make_batch, run_steps

SIZE = {"batch": 32, "patch": 64, "seconds": 8.0}
QUICK = {"batch": 4, "patch": 16, "seconds": 1.0}
JOULES_PER_KWH = 3.6e6


class Meter:
    """CodeCarbon's offline tracker: joules of the whole machine."""

    def __init__(self):
        from codecarbon import OfflineEmissionsTracker  # no dependency of the book

        logging.getLogger("codecarbon").disabled = True
        self.tracker = OfflineEmissionsTracker(
            country_iso_code="DEU",  # for the carbon only, which is not used
            save_to_file=False,
            allow_multiple_runs=True,
        )

    def measure(self, step: Step, count: int) -> dict[str, float]:
        """Joules of `count` steps: of processor, memory and GPU."""
        self.tracker.start_task()
        run_steps(step, count)
        found = self.tracker.stop_task()
        parts = {
            "cpu": found.cpu_energy,
            "memory": found.ram_energy,
            "gpu": found.gpu_energy,
        }
        return {part: energy * JOULES_PER_KWH for part, energy in parts.items()}


def find_sources(device: torch.device) -> dict[str, str]:
    """How CodeCarbon knows the energy of each part here."""
    counters = Path("/sys/class/powercap").glob("*/energy_uj")
    readable = any(os.access(counter, os.R_OK) for counter in counters)
    return {
        "cpu": "measured, RAPL" if readable else "estimated",
        "memory": "estimated",
        "gpu": "measured, NVML" if device.type == "cuda" else "none",
    }


def study_energy(repeats: int, device: torch.device) -> list[dict]:
    """Joules for a thousand samples: the kinds of step take turns."""
    batch = make_batch(SIZE["batch"], SIZE["patch"])
    steps = milestones(batch, device)
    counts = {}
    for name, step in steps.items():
        counts[name] = max(1, round(SIZE["seconds"] / run_steps(step, 1)))
    meter = Meter()
    joules: dict[str, list[dict]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            samples = counts[name] * SIZE["batch"]
            found = meter.measure(step, counts[name])
            joules[name].append(
                {part: 1e3 * value / samples for part, value in found.items()}
            )
    rows = []
    for name, values in joules.items():
        row = {"step": name, "sources": find_sources(device)}
        for part in ("cpu", "memory", "gpu"):
            row[part] = spread([each[part] for each in values])
        row["total"] = spread([sum(each.values()) for each in values])
        rows.append(row)
    return rows


def describe(row: dict) -> str:
    """A row in a line."""
    parts = []
    for part, source in row["sources"].items():
        parts.append(f"{part} {row[part]['median']:.0f} ({source})")
    total = f"{row['total']['median']:.0f} J for 1,000 samples"
    return f"{row['step']}: {total}; {', '.join(parts)}"


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure, print, and save if asked to."""
    args = parse_studies(__doc__.splitlines()[0], ["energy"], 5, argv)
    if importlib.util.find_spec("codecarbon") is None:
        refuse("codecarbon is not installed: uv run --with codecarbon python energy.py")
    if args.quick:
        SIZE.update(QUICK)
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    rows = study_energy(args.repeats, device)
    for row in rows:
        print(describe(row))
    if args.save_results:
        command = f"uv run --with codecarbon python energy.py --repeats {args.repeats}"
        save_rows("energy", command, rows)
    return rows


if __name__ == "__main__":
    main()
