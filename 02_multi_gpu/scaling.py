"""Chapter 2: measure what a second device buys, and what the communication costs.

    uv run python scaling.py                          # all studies: half an hour on two cores
    uv run python scaling.py scaling allreduce        # some of them
    uv run python scaling.py scaling --quick          # tiny: that it works, not what it finds
    uv run python scaling.py --save-results           # and write results/*.json, two pictures

All alternatives are timed in turn, so that a machine which slows down for a while slows all
of them. On CPU every rank has one thread unless its row says otherwise; on GPUs every rank
has one GPU. The studies timeline, agreement and rounding are always on CPU. The batches are
made beforehand, because the loader is chapter 4's subject. You should see that two processes
are nearly twice as fast as one, that one process with two threads is nearly as fast, and that
a late rank holds up all others. The studies are in studies/.
"""

from dataclasses import replace
from functools import partial

from ending import call
from options import winds_file
from results import RESULTS, parse_studies, save_rows
from studies.agreement import agreement
from studies.all_reduce import all_reduce
from studies.compression import compression
from studies.ddp_options import compare_options
from studies.learning import learning_rates
from studies.programs import commands
from studies.rounding import rounding
from studies.settings import Settings, choose_settings, describe_devices, parse_devices
from studies.throughput import scaling
from studies.throughput_plot import plot_scaling
from studies.timeline import plot_timeline, timeline

REPEATS = 5
# Each takes the settings and returns rows.
STUDIES = {
    "scaling": scaling,
    "allreduce": all_reduce,
    "options": compare_options,
    "compression": compression,
    "timeline": timeline,
    "learning_rates": learning_rates,
    "commands": commands,
    "agreement": agreement,
    "rounding": rounding,
}
ALWAYS_ON_CPU = ("timeline", "agreement", "rounding")
PLOTS = {"scaling": plot_scaling, "timeline": plot_timeline}


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Run the studies that are asked for, print their rows, and save them if asked to."""
    devices, others = parse_devices(argv)
    summary = f"{__doc__.splitlines()[0]} {describe_devices()}"
    args = parse_studies(summary, list(STUDIES), REPEATS, others)
    settings = {}
    for study in args.studies:
        always = {"accelerator": "cpu"} if study in ALWAYS_ON_CPU else {}
        of_study = replace(devices, **always)
        settings[study] = choose_settings(of_study, args.repeats, args.quick)
    found = {}
    for study, chosen in settings.items():
        task = partial(STUDIES[study], chosen)
        found[study] = call(task, checkpoint="", store=winds_file())
        for row in found[study]:
            print(f"{study}: {describe(row)}", flush=True)
        if args.save_results:
            save(study, chosen, found[study])
    return found


def describe(row: dict) -> str:
    """A row's labels and numbers in a line, without its lists and its summary."""
    parts = []
    for name, value in row.items():
        if isinstance(value, list) or name == "summary":
            continue
        if isinstance(value, dict):
            value = "{median:.4g} ({min:.4g} to {max:.4g})".format(**value)
        elif isinstance(value, float):
            value = f"{value:.4g}"
        parts.append(f"{name} {value}")
    return ", ".join(parts)


def save(study: str, settings: Settings, rows: list[dict]) -> None:
    """Write a study's rows, and its picture if it has one."""
    command = f"uv run python scaling.py {study}"
    if settings.repeats != REPEATS:
        command += f" --repeats {settings.repeats}"
    name = f"{study}_gpu" if settings.on_gpu else study
    save_rows(name, command, rows)
    if study in PLOTS:
        PLOTS[study](rows).savefig(RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
