"""Chapter 2: predict on paper what N devices will give, from what one or two have given.

    uv run python predict_scaling.py                  # seconds; nothing is trained
    uv run python predict_scaling.py --step-seconds 0.12 --parameters 50e6   # your model
    uv run python predict_scaling.py --save-results   # and write results/predict_scaling.*

It reads results/scaling.json and results/allreduce.json, which scaling.py writes, fits the
latency and bandwidth of this machine, and prints how far its predictions are from the steps
that were measured. Then it extrapolates to 1,024 GPUs, on networks of which it knows only
the vendors' figures. You should see the error, a table of efficiencies, a table of memory
with DDP and with FSDP, and advice on which to choose. A model that does not fit on a GPU
with DDP is only in the table of memory.

    step on N devices = compute of the slowest + the all-reduce that backward does not hide

The prediction is too fast where something is left out: data loading, other users of the
network, communication that takes time from computing (as on CPUs, where the same cores do
both), and processes that share cores. It is too slow where ranks are slow at the same time,
because something else slows the whole machine.
"""

import argparse
import shlex
import sys
from dataclasses import asdict

from errors import DataError, refuse
from predicting.calibration import compare, fit_link, largest_errors
from predicting.extrapolation import extrapolate, fit_with_ddp, tabulate_memory
from predicting.measurements import read_all_reduces, read_scaling
from predicting.memory import Training
from predicting.models import describe, find_step, own_model, transformers
from predicting.network import NETWORKS, NVLINK, make_clusters
from predicting.options import assumptions, parse_options
from predicting.picture import plot_efficiency
from predicting.saving import make_results, save
from predicting.step import Overlap
from predicting.tables import (
    print_calibration,
    print_efficiency,
    print_memory,
    print_too_large,
)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Predict, save and print; return the link that was fitted, and the largest errors."""
    options = parse_options(__doc__.splitlines()[0], argv)
    arguments = shlex.join(sys.argv[1:] if argv is None else argv)
    command = f"uv run python predict_scaling.py {arguments}"
    try:
        return predict(options, command)
    except DataError as error:
        refuse(f"--results {options.results}: {error}")


def predict(options: argparse.Namespace, command: str) -> dict[str, float]:
    """Calibrate with what was measured here, extrapolate, save and print.

    DataError if the results of scaling.py are missing, or do not suffice.
    """
    overlap = Overlap(options.backward_share, options.bucket_mb)
    scaling = read_scaling(options.results)
    link, fit_error = fit_link(read_all_reduces(options.results))
    points = compare(scaling, link, overlap)
    calibration = {"latency": link.latency, "bandwidth": link.bandwidth}
    calibration["fit_error"] = fit_error
    calibration |= largest_errors(points)

    step = find_step(options.results, scaling, options.step_seconds)
    own = own_model(
        options.parameters,
        of_unet=scaling.rows[0]["parameters"],
        bytes_per_parameter=options.bytes_per_parameter,
        step_seconds=step.seconds,
    )
    models = [own, *transformers(options.flops, options.precision)]
    training = Training(
        gpu_gb=options.gpu_memory,
        activation_gb=options.activation_gb * options.device_batch,
        precision=options.precision,
        units=options.units,
    )
    memory = tabulate_memory(models, options.devices, training)
    with_ddp = fit_with_ddp(models, memory)
    clusters = make_clusters(options.gpus_per_node, options.link_share)
    curves = extrapolate(with_ddp, clusters, step.variation, overlap)

    assumed = {"kind": "assumptions", "step": describe(step)}
    assumed |= {"stragglers": step.machine} | assumptions(options)
    rows = [{"kind": "calibration"} | calibration, assumed, *points]
    for vendors in (NVLINK, *NETWORKS):
        source = {"kind": "link", "source": "vendor's figure, not measured"}
        rows.append(source | asdict(vendors))
    rows += [*curves, *memory]
    results = make_results(command, scaling.machine, rows)
    flag = "--results" if options.save_results else "--output-dir"
    folder = options.results if options.save_results else options.output_dir
    figure = plot_efficiency(curves, with_ddp, options.gpus_per_node)
    picture = save(flag, folder, results, figure)

    print_calibration(calibration, points)
    print_efficiency(
        curves,
        with_ddp,
        step=step,
        gpus_per_node=options.gpus_per_node,
        link_share=options.link_share,
    )
    print_too_large(memory, with_ddp)
    print_memory(memory, options.devices, training)
    print(f"picture: {picture}")
    return calibration


if __name__ == "__main__":
    main()
