"""Chapter 2: predict on paper what N devices will give, from what one or two have given.

    uv run python predict_scaling.py                                     # seconds; nothing is trained
    uv run python predict_scaling.py --step-seconds 0.12 --parameters 50e6      # your model, on your GPU
    uv run python predict_scaling.py --save-results                      # and write results/predict_scaling.*

It reads results/scaling.json and results/allreduce.json, which scaling.py writes, fits the latency and
bandwidth of this machine, and prints how far its predictions are from the steps that were measured. Then it
extrapolates, to 1,024 GPUs on networks of which it knows only their vendors' figures. You should see the
error, a table of efficiencies, one of memory with DDP and with FSDP, and what to choose. A model that does not
fit on a GPU with DDP is in the table of memory alone.

    step on N devices = compute of the slowest of N + the all-reduce that the backward pass does not hide

What it leaves out: data loading, the network's other users, communication that takes time from the computing
(as on CPUs, where the same cores do both), processes that share cores: for these it is too fast. And ranks
that are slow at the same time, as they are when something else slows the machine: for these it is too slow.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent
DDP_BUCKETS = (
    2**20,
    25 * 2**20,
)  # bytes of the first, small to start early, and of every other
USABLE = 0.9  # of a GPU's memory; a rule of thumb: the rest is CUDA's, NCCL's and lost between blocks


class InputError(Exception):
    """Something that the user can mend: the program prints this one line and exits with code 2."""


class Link(NamedTuple):
    """What connects two devices: seconds before a message moves, then bytes/s, in each direction.

    `per_gpu`: every GPU has such a port of its own; otherwise the GPUs of a node share one.
    """

    name: str
    latency: float
    bandwidth: float
    per_gpu: bool = True


# VENDORS' FIGURES, NOT MEASURED HERE. Bandwidth: NVLink 4 has 900 GB/s, the sum of both directions
# (https://www.nvidia.com/en-us/data-center/h100/); a DGX H100 has a 400 Gbit/s port for each of its 8 GPUs
# (https://docs.nvidia.com/dgx/dgxh100-user-guide/). Latency: the constants with which NCCL chooses its
# algorithms (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, protocol Simple); for Ethernet
# with TCP, kernel to kernel (https://www.wwt.com/article/the-basics-of-high-performance-networking).
# Of such a line rate a copy gets about 84% (380 of 450 GB/s: https://github.com/NVIDIA/nccl/issues/1264).
LINKS = (
    Link("NVLink 4, in a node", 3.4e-6, 450e9),
    Link("InfiniBand NDR, 400 Gbit/s a GPU", 14e-6, 50e9),
    Link("Ethernet, 100 Gbit/s a node", 50e-6, 12.5e9, per_gpu=False),
    Link("Ethernet, 25 Gbit/s a node", 50e-6, 3.125e9, per_gpu=False),
)
IDEAL = "stragglers alone, no communication"

# Transformers beside the reader's own model: parameters, and tokens on each GPU in a step, for a smaller one
# leaves memory for more. A token costs 6 operations a parameter (https://arxiv.org/abs/2001.08361).
SIZES = {"100 M": (1e8, 32768), "1 B": (1e9, 16384), "7 B": (7e9, 4096)}

# Bytes for each parameter. PyTorch's autocast keeps float32 parameters and gradients, as does float32 itself.
# "mixed", 16-bit ones beside a float32 master copy, is the sum of ZeRO's section 3.1
# (https://arxiv.org/abs/1910.02054): also 16 in all, but half as much to send.
STATE = {
    "autocast": {
        "parameters": 4,
        "gradients": 4,
        "Adam's moments": 8,
        "master weights": 0,
    },
    "mixed": {
        "parameters": 2,
        "gradients": 2,
        "Adam's moments": 8,
        "master weights": 4,
    },
}
WAYS = {
    "DDP": {},
    "FSDP on 8": {"devices": 8, "sharded": True},
    "FSDP on 64": {"devices": 64, "sharded": True},
}


# ------------------------------------------------------------------------------------------- the step


def expected_slowest(seconds, devices: int) -> float:
    """The mean time of the slowest of N devices, if each draws its own independently from `seconds`, (n,).

    Exact, from the order statistics of the sample: the largest of N draws is at most the i-th smallest of n
    with probability (i/n)**N. It can never exceed the slowest step that was measured.
    """
    ordered = np.sort(np.asarray(seconds, float))
    at_most = (np.arange(len(ordered) + 1) / len(ordered)) ** devices
    return float(ordered @ np.diff(at_most))


def ring(size: float, devices: int, link: Link) -> float:
    """Seconds to all-reduce `size` bytes in a ring: 2(N-1) messages of size/N, one after another.

    Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002: no algorithm moves fewer bytes.
    """
    return 2 * (devices - 1) * (link.latency + size / devices / link.bandwidth)


def tree(size: float, devices: int, link: Link) -> float:
    """Seconds to all-reduce up and down a pipelined tree: fewer messages in a row than a ring, more bytes.

    NCCL's own estimate, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
    """
    return 2 * (
        math.ceil(math.log2(devices)) * link.latency
        + (devices > 1) * size / link.bandwidth
    )


def hierarchical(
    size: float, devices: int, network: Link, inside: Link, gpus_per_node: int
) -> float:
    """Seconds to all-reduce over nodes of several GPUs: sum inside each node, between nodes, and hand out.

    The two halves of a ring inside the node frame a ring or a tree between nodes, the faster of them, in
    which each GPU has its share of the bytes (Jia et al. 2018, https://arxiv.org/abs/1807.11205).
    One ring through all GPUs is taken where that is faster, as NCCL would. All nodes are full.
    """
    if devices <= gpus_per_node:
        return ring(size, devices, inside)
    nodes, ports = devices // gpus_per_node, gpus_per_node if network.per_gpu else 1
    between = min(
        ring(size / ports, nodes, network), tree(size / ports, nodes, network)
    )
    flat = min(
        ports * network.bandwidth, inside.bandwidth if gpus_per_node > 1 else math.inf
    )
    hops = (devices - nodes) * inside.latency + (
        nodes - 1
    ) * network.latency  # once round the ring
    through_all = 2 * hops + 2 * (devices - 1) / devices * size / flat
    return min(ring(size, gpus_per_node, inside) + between, through_all)


def buckets(size: float, cap_mb: float | None = None) -> list[float]:
    """Bytes of DDP's gradient buckets, in the order in which they fill: DDP_BUCKETS, or `cap_mb` MiB each."""
    first, other = DDP_BUCKETS if cap_mb is None else (cap_mb * 2**20,) * 2
    sizes = [min(size, first)]
    if rest := size - sizes[0]:
        sizes += [other] * int(rest // other) + [
            part for part in [rest % other] if part
        ]
    return sizes


def exposed(
    compute: float, sizes: list[float], all_reduce, backward_share: float = 2 / 3
) -> float:
    """Seconds that the all-reduces of the buckets go on after the backward pass has ended.

    The model: gradients become ready evenly over the backward pass, in bytes; a bucket is summed once it is
    full and the one before it is done. The last is full only at the end, so that its all-reduce, at least,
    is never hidden (Li et al. 2020, https://arxiv.org/abs/2006.15704). `all_reduce(bytes)` gives seconds.
    """
    ready = backward_share * compute * np.cumsum(sizes) / sum(sizes)
    done = 0.0
    for size, full in zip(sizes, ready):
        done = max(done, full) + all_reduce(size)
    return float(done - ready[-1])


# ------------------------------------------------------------------------------------------ calibration


SCALING = {
    "devices": 0,
    "threads": 0,
    "device_batch": 0,
    "parameters": 0,
    "gradient_bytes": 0,
}
SCALING |= {"steps": 1, "compute_steps": 2}
ALLREDUCE = {"devices": 0, "bytes": 0, "seconds": 0}


def usable(row: dict, field: str, dims: int) -> bool:
    """Whether a row's field holds numbers above zero in an array of so many dimensions (of `seconds`, the median)."""
    try:
        array = np.asarray(row[field]["median"] if field == "seconds" else row[field])
    except (KeyError, TypeError, ValueError):  # ValueError: lists of unequal lengths
        return False
    if array.ndim != dims or array.size == 0 or array.dtype.kind not in "if":
        return False
    one_per_rank = dims < 2 or len(array) == row.get("devices")
    return one_per_rank and bool(((array > 0) & (array < math.inf)).all())


def read_results(
    folder: str, name: str, fields: dict[str, int]
) -> tuple[list[dict], dict]:
    """Read the rows of a results file, and the machine that they were measured on.

    Raises InputError if the file is missing, is no JSON, or has a row without usable `fields` {name: dimensions}.
    """
    remedy = f"measure with: uv run python scaling.py {name.removesuffix('_gpu')} --save-results"
    try:
        results = json.loads(Path(folder, f"{name}.json").read_text())
        rows, machine, whole = (
            results["rows"],
            results["machine"],
            results["machine"]["cores"] > 0,
        )
    except FileNotFoundError as error:
        raise InputError(
            f"--results {folder}: {name}.json is missing; {remedy}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError):
        rows, machine, whole = [], {}, False
    if not (whole and isinstance(rows, list) and rows):
        raise InputError(
            f"--results {folder}: {name}.json is no whole file of results; {remedy}"
        )
    for number, row in enumerate(rows, 1):
        if bad := [
            field for field, dims in fields.items() if not usable(row, field, dims)
        ]:
            raise InputError(
                f"--results {folder}: {name}.json, row {number}: no usable {bad[0]}; {remedy}"
            )
    return rows, machine


def read_scaling(folder: str, name: str) -> tuple[list[dict], np.ndarray, dict]:
    """Rows of weak and strong scaling, first that of one device; its steps' compute seconds, (n,); the machine."""
    rows, machine = read_results(folder, name, SCALING)
    rows = [row for row in rows if row.get("mode") in ("weak", "strong")]
    rows.sort(key=lambda row: (row["devices"] > 1, row["mode"] != "weak"))
    if not rows or (rows[0]["mode"], rows[0]["devices"]) != ("weak", 1):
        raise InputError(
            f"--results {folder}: {name}.json has no weak row of 1 device; measure it anew"
        )
    return rows, np.ravel(rows[0]["compute_steps"]), machine


def fit_link(rows: list[dict], folder: str) -> tuple[Link, float]:
    """The latency and bandwidth, neither below zero, with which `ring` best gives the median seconds.

    Least squares of the relative errors, for the sizes span four decades. Returns the largest of them too.
    Raises InputError, which names the `folder`, if the rows do not tell the two apart.
    """
    if len({row["bytes"] for row in rows}) < 2:
        reason = "allreduce.json needs two sizes or more, on 2 devices or more with a core each"
        raise InputError(f"--results {folder}: {reason}; measure on more cores")
    measured = np.array([row["seconds"]["median"] for row in rows])
    steps = np.array([2 * (row["devices"] - 1) for row in rows])
    moved = np.array([row["bytes"] / row["devices"] for row in rows]) * steps
    factors = np.stack([steps, moved], axis=1) / measured[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(factors, np.ones(len(rows)))
    if latency < 0:
        latency, per_byte = 0.0, factors[:, 1].sum() / (factors[:, 1] ** 2).sum()
    if per_byte * moved.max() < 0.01 * measured.max():
        raise InputError(
            f"--results {folder}: allreduce.json: more bytes take no more time; measure it anew"
        )
    errors = factors @ (latency, per_byte) - 1
    return Link("this machine's loopback", float(latency), float(1 / per_byte)), float(
        np.abs(errors).max()
    )


def compare(
    rows: list[dict], one: np.ndarray, machine: dict, link: Link, args
) -> list[dict]:
    """Predict the mean step of each measured point, in two ways, and say by how much it errs, in percent.

    From the point's own compute times (under no_sync, on N devices at once), so that what is judged is
    stragglers and communication; and from one device's, scaled with the batch: what a plan has to go by.
    """
    points = []
    for row in rows:
        devices, measured = row["devices"], float(np.mean(row["steps"]))
        sizes = buckets(row["gradient_bytes"], args.bucket_mb)
        point = {"kind": "point"} | {
            name: row[name] for name in ("mode", "devices", "device_batch")
        }
        point["own_cores"] = devices * row["threads"] <= machine["cores"]
        point["measured_seconds"] = measured
        point["measured_slowest_seconds"] = float(
            np.max(row["compute_steps"], axis=0).mean()
        )
        scaled = one * row["device_batch"] / rows[0]["device_batch"]
        for name, compute in (
            ("", np.ravel(row["compute_steps"])),
            ("from_one_", scaled),
        ):
            slowest = expected_slowest(compute, devices)
            left = exposed(
                slowest,
                sizes,
                partial(ring, devices=devices, link=link),
                args.backward_share,
            )
            point |= {f"{name}slowest_seconds": slowest, f"{name}exposed_seconds": left}
            point |= {f"{name}predicted_seconds": slowest + left}
            point |= {f"{name}error_percent": 100 * ((slowest + left) / measured - 1)}
        points.append(point)
    return points


# ----------------------------------------------------------------------------------------------- curves


def curves(
    models: dict[str, tuple], stragglers: np.ndarray, args: argparse.Namespace
) -> list[dict]:
    """Weak scaling with DDP, 1 to 1,024 GPUs, of models {name: (parameters, gradient bytes, compute seconds)}.

    `stragglers` are compute times over their mean, (n,). Efficiency is one GPU's step over N's.
    """
    inside, *networks = (
        link._replace(bandwidth=args.link_share * link.bandwidth) for link in LINKS
    )
    rows = []
    for name, (parameters, size, seconds) in models.items():
        sizes = buckets(size, args.bucket_mb)
        for network in (None, *networks):
            for devices in (2**exponent for exponent in range(11)):
                how = {"devices": devices, "network": network, "inside": inside}
                all_reduce = partial(
                    hierarchical, **how, gpus_per_node=args.gpus_per_node
                )
                slowest = seconds * expected_slowest(stragglers, devices)
                left = (
                    exposed(slowest, sizes, all_reduce, args.backward_share)
                    if network
                    else 0.0
                )
                row = {
                    "kind": "curve",
                    "model": name,
                    "parameters": parameters,
                    "devices": devices,
                }
                row |= {
                    "network": network.name if network else IDEAL,
                    "step_seconds": slowest + left,
                }
                efficiency = seconds / row["step_seconds"]
                rows.append(
                    row | {"efficiency": efficiency, "speed_up": devices * efficiency}
                )
    return rows


# ----------------------------------------------------------------------------------------------- memory


def memory(
    parameters: float,
    devices: int = 1,
    sharded: bool = False,
    precision: str = "autocast",
    activations: float = 0.0,
    units: int = 32,
    bucket_view: bool = False,
) -> dict[str, float]:
    """Bytes on each device, by what they hold: with DDP, or sharded by FSDP over N `devices`.

    DDP keeps all of STATE and, without gradient_as_bucket_view, every gradient once more in a bucket. FSDP
    keeps 1/N of STATE, and gathers the units (blocks of equal size) one at a time: the parameters of one in
    use and of the next under way, the gradients of one (https://arxiv.org/abs/2304.11277).
    Left out: Adam's step counters (4 bytes a tensor), buffers, and the padding of sizes that N does not divide.
    """
    parts = {name: each * parameters for name, each in STATE[precision].items()}
    if sharded:
        gathered = (2 * parts["parameters"] + parts["gradients"]) / units
        parts = {name: size / devices for name, size in parts.items()} | {
            "gathered units": gathered
        }
    else:
        parts["buckets"] = 0.0 if bucket_view else parts["gradients"]
    return parts | {"activations": activations}


def largest_model(available: float, activations: float, **how) -> float:
    """The most parameters that fit into so many bytes, of which the activations take a part that is given."""
    return max(0.0, available - activations) / sum(memory(1.0, **how).values())


def advice(
    parameters: float, devices: int, available: float, activations: float, **how
) -> str:
    """Say in words whether to take DDP or FSDP for a model on so many devices, `available` bytes on each.

    DDP where it fits: an all-reduce moves 2 bytes for each byte of gradients; FSDP gathers the parameters
    twice and scatters the gradients, which makes 3 (ZeRO, section 7.2).
    """
    how["activations"] = activations
    whole = sum(memory(parameters, **how).values())
    parts = memory(parameters, sharded=True, **how)
    fixed = parts["gathered units"] + activations  # on any number of devices
    shared = sum(parts.values()) - fixed
    sharded, room = fixed + shared / devices, f"of {available / 1e9:.3g} GB"
    if whole <= available:
        return f"DDP: {whole / 1e9:.3g} {room}; FSDP would send half as much again"
    if whole - parts["gradients"] <= available:
        return f"DDP with gradient_as_bucket_view: {(whole - parts['gradients']) / 1e9:.3g} {room}"
    if sharded <= available:
        return f"FSDP: {sharded / 1e9:.3g} {room}; DDP would take {whole / 1e9:.3g}"
    if fixed < available:
        least = math.ceil(shared / (available - fixed))
        return f"FSDP on {least} GPUs or more; on {devices} it would take {sharded / 1e9:.3g} {room}"
    return f"neither: activations and gathered units alone take {fixed / 1e9:.3g} {room}; lessen those"


def memory_table(models: dict[str, tuple], args: argparse.Namespace) -> list[dict]:
    """GB on each GPU for models x WAYS, advice for each, and last the largest model that each way fits."""
    available, activations = (
        USABLE * args.gpu_memory * 1e9,
        args.activation_gb * args.device_batch * 1e9,
    )
    how = {"activations": activations, "precision": args.precision, "units": args.units}
    rows = []
    for name, (parameters, *_) in models.items():
        row = {"kind": "memory", "model": name, "parameters": parameters}
        for way, options in WAYS.items():
            parts = {
                part: size / 1e9
                for part, size in memory(parameters, **how, **options).items()
            }
            row[way] = parts | {"sum": sum(parts.values())}
        rows.append(
            row | {"advice": advice(parameters, args.devices, available, **how)}
        )
    most = {
        way: largest_model(available, **how, **options) for way, options in WAYS.items()
    }
    return [*rows, {"kind": "largest model", "available_gb": available / 1e9} | most]


def fit_with_ddp(models: dict[str, tuple], table: list[dict]) -> dict[str, tuple]:
    """Those of the models that DDP can train on these GPUs, by the sums of `memory_table`.

    The gradients' second copy in the buckets may be left out: gradient_as_bucket_view does so.
    """
    *rows, largest = table
    found = {}
    for row in rows:
        needed = row["DDP"]["sum"] - row["DDP"]["buckets"]
        if needed <= largest["available_gb"]:
            found[row["model"]] = models[row["model"]]
    return found


# ----------------------------------------------------------------------------------------------- output


def draw(rows: list[dict], models: dict[str, tuple], gpus_per_node: int) -> Figure:
    """Efficiency against GPUs: a panel for each model (four at most), a line for each network."""
    styles = {IDEAL: ("0.35", ":", None, 1)}  # the colours are Okabe and Ito's
    for link, colour, marker in zip(
        LINKS, ("black", "#0072B2", "#E69F00", "#D55E00"), "Dos^"
    ):
        styles[link.name] = (colour, "-", marker, gpus_per_node)
    figure = Figure(figsize=(11, 9.5), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flatten()
    for axes, (name, (_, _, seconds)) in zip(panels, models.items()):
        for network, (colour, line, marker, first) in styles.items():
            alike = (
                network == LINKS[0].name
            )  # inside a node, where every network has the same points
            part = [row for row in rows if row["model"] == name]
            part = [
                row
                for row in part
                if row["network"] == (LINKS[1].name if alike else network)
            ]
            part = [
                row
                for row in part
                if (row["devices"] <= first if alike else row["devices"] >= first)
            ]
            x, y = (
                [row["devices"] for row in part],
                [100 * row["efficiency"] for row in part],
            )
            axes.plot(
                x,
                y,
                line,
                marker=marker,
                color=colour,
                lw=2.5,
                ms=8,
                label=network,
                zorder=2 + (not marker),
            )
        axes.set_title(f"{name} parameters, {1e3 * seconds:.0f} ms a step", fontsize=17)
        axes.set_xscale("log", base=2)
        axes.set(xlim=(0.8, 1300), ylim=(0, 105))
        axes.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axes.set_xlabel("GPUs", fontsize=15)
        axes.tick_params(labelsize=15)
        axes.grid(alpha=0.3)
    figure.supylabel("weak-scaling efficiency, %", fontsize=17)
    title = "Predicted for DDP; the networks by vendors' figures, not measured"
    figure.suptitle(
        title if models else "No model fits on such a GPU with DDP", fontsize=18
    )
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    if len(models) < len(panels):
        panels[-1].legend(handles, labels, loc="center", fontsize=15, frameon=False)
    else:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=2,
            fontsize=15,
            frameon=False,
        )
    return figure


def report(figures: dict, args: argparse.Namespace) -> None:
    """Print what was fitted, how far it errs, and the tables."""
    fit = f"latency {1e6 * figures['latency']:.0f} µs, bandwidth {figures['bandwidth'] / 1e9:.2f} GB/s"
    print(f"Fitted to allreduce.json: {fit}, within {100 * figures['fit_error']:.0f}%")
    print(
        "\nMean, ms          slowest of N         step                       step, planned"
    )
    print(
        "         devices  measured predicted   measured predicted error   from one device error"
    )
    keys = (
        "measured_slowest",
        "slowest",
        "measured",
        "predicted",
        "from_one_predicted",
    )
    for point in figures["points"]:
        a, b, c, d, e = (1e3 * point[f"{key}_seconds"] for key in keys)
        line = f"  {point['mode']:6} {point['devices']:7}  {a:8.1f} {b:9.1f}   {c:8.1f} {d:9.1f}"
        line += f" {point['error_percent']:+4.0f}%   {e:15.1f} {point['from_one_error_percent']:+4.0f}%"
        print(
            line
            + ("" if point["own_cores"] else "  (processes share cores: not covered)")
        )
    worst = [
        f"{figures[name]:.0f}%"
        for name in ("largest_error_percent", "from_one_largest_error_percent")
    ]
    print(
        f"largest error on several devices, a core each: {worst[0]}; from one device {worst[1]}"
    )

    print(
        f"\nPredicted weak-scaling efficiency of DDP, {args.gpus_per_node} GPUs a node. Your step is {figures['step']};"
    )
    print(f"stragglers are those of {figures['stragglers']}.")
    print(
        f"The networks are VENDORS' FIGURES, not measured, at {args.link_share:.0%} of the line rate."
    )
    columns = (8, 64, 1024)
    print(
        f"  {'parameters':13} {'ms':>5}  {'GPUs':35}"
        + "".join(f"{n:>6}" for n in columns)
    )
    for name, (_, _, seconds) in figures["with_ddp"].items():
        for network in (IDEAL, *(link.name for link in LINKS[1:])):
            part = [
                row
                for row in figures["curves"]
                if (row["model"], row["network"]) == (name, network)
            ]
            shares = [
                f"{row['efficiency']:6.0%}" for row in part if row["devices"] in columns
            ]
            print(f"  {name:13} {1e3 * seconds:5.0f}  {network:35}" + "".join(shares))
    *table, most = figures["memory"]
    for row in table:
        if row["model"] not in figures["with_ddp"]:
            needed = f"{row['DDP']['sum']:.0f} of {most['available_gb']:.3g} GB"
            print(f"  {row['model']:13}        DDP would need {needed}: no prediction")

    activations = f"activations {args.activation_gb * args.device_batch:g} GB"
    print(
        f"\nGB on each GPU, {args.precision}, {activations}, {USABLE:.0%} of {args.gpu_memory:g} GB usable"
    )
    print(
        f"  {'parameters':13}"
        + "".join(f"{way:>12}" for way in WAYS)
        + f"   on {args.devices} GPUs take"
    )
    for row in table:
        sums = "".join(f"{row[way]['sum']:12.1f}" for way in WAYS)
        print(f"  {row['model']:13}{sums}   {row['advice']}")
    print(f"  {'at most':13}" + "".join(f"{most[way] / 1e9:10.1f} B" for way in WAYS))


def write_aside(flag: str, path: Path, write) -> None:
    """Let `write` fill another file, then rename it: a full disk never leaves half a file."""
    aside = path.with_name(f"part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        reason = (
            f"cannot write {path.name} ({error}); make room or choose another folder"
        )
        raise InputError(f"{flag} {path.parent}: {reason}") from error


# --------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """Without the usage that argparse prints before an error: one line is enough."""

    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, number = parser.add_argument, {"type": float, "metavar": "X"}
    add(
        "--results",
        default=os.path.relpath(HERE / "results"),
        help="folder of what scaling.py measured",
    )
    step = "compute time of a GPU's step; without it, that in scaling_gpu.json, or else 0.02 is assumed"
    add("--step-seconds", help=step, **number)
    add(
        "--parameters",
        help="of your model; without it, those of this chapter's U-Net",
        **number,
    )
    add(
        "--bytes-per-parameter",
        default=4,
        help="in the gradients that your model sends",
        **number,
    )
    add(
        "--flops",
        default=4e14,
        help="a GPU's, for the other models; assumed: 40%% of an H100's",
        **number,
    )
    add("--gpus-per-node", type=int, default=8, help="joined by NVLink; a power of two")
    add(
        "--link-share",
        default=0.8,
        help="share of the line rate that an all-reduce attains",
        **number,
    )
    add(
        "--backward-share",
        default=2 / 3,
        help="of the compute time: twice the forward's work",
        **number,
    )
    add(
        "--bucket-mb",
        help="DDP's bucket_cap_mb; without it, 1 for the first, 25 for the others",
        **number,
    )
    add(
        "--precision",
        choices=tuple(STATE),
        default="autocast",
        help="what is kept for each parameter",
    )
    add("--gpu-memory", default=80, help="of each GPU, in GB", **number)
    add(
        "--activation-gb",
        default=2,
        help="for each sample, the same for every model",
        **number,
    )
    add(
        "--device-batch",
        type=int,
        default=1,
        help="samples on each GPU, for the activations",
    )
    add(
        "--units",
        type=int,
        default=32,
        help="into which FSDP divides a model, such as its blocks",
    )
    add("--devices", type=int, default=8, help="GPUs that the advice is for")
    add(
        "--output-dir",
        default=os.path.relpath(HERE / "outputs/predict_scaling"),
        help="for what it writes",
    )
    add(
        "--save-results",
        action="store_true",
        help="write to --results instead, beside what it read",
    )
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if (
            isinstance(value, int | float)
            and name != "save_results"
            and not 0 < value < math.inf
        ):
            raise InputError(f"{flag}: give a number above zero")
        if name in ("link_share", "backward_share") and value > 1:
            raise InputError(f"{flag}: it is a share; give at most 1")
    if args.gpus_per_node > 1024 or args.gpus_per_node & (args.gpus_per_node - 1):
        raise InputError(
            f"--gpus-per-node {args.gpus_per_node}: give a power of two up to 1024"
        )
    if args.parameters and not args.step_seconds:
        raise InputError(
            f"--parameters {args.parameters:g}: give your model's --step-seconds too"
        )
    return args


def main(argv: list[str] | None = None) -> dict:
    """Calibrate, compare, extrapolate, print, draw; return all the figures."""
    args = parse_arguments(argv)
    rows, one, machine = read_scaling(args.results, "scaling")
    sums, where = read_results(args.results, "allreduce", ALLREDUCE)
    sums = [row for row in sums if 2 <= row["devices"] <= where["cores"]]
    link, fit_error = fit_link(sums, args.results)
    points = compare(rows, one, machine, link, args)
    covered = [point for point in points if point["own_cores"] and point["devices"] > 1]
    if not covered:
        reason = "scaling.json has no point of several devices with a core each"
        raise InputError(f"--results {args.results}: {reason}; measure on more cores")
    figures = {
        "latency": link.latency,
        "bandwidth": link.bandwidth,
        "fit_error": fit_error,
    }
    for name in ("", "from_one_"):
        errors = [abs(point[f"{name}error_percent"]) for point in covered]
        figures[f"{name}largest_error_percent"] = max(errors)
    fitted = {"kind": "calibration"} | figures
    figures["points"] = points

    on_gpu = Path(args.results, "scaling_gpu.json").exists()
    _, stragglers, their_machine = read_scaling(
        args.results, "scaling_gpu" if on_gpu else "scaling"
    )
    seconds, origin = args.step_seconds, "given"
    if seconds is None:
        seconds, origin = (
            (float(stragglers.mean()), "measured") if on_gpu else (0.02, "assumed")
        )
    figures["step"] = f"{1e3 * seconds:.3g} ms, {origin}"
    figures["stragglers"] = their_machine.get("gpu" if on_gpu else "cpu")
    parameters = args.parameters or rows[0]["parameters"]
    own = (
        f"{parameters / 1e6:.2g} M" if parameters < 1e9 else f"{parameters / 1e9:.2g} B"
    )
    own = f"{'yours' if args.parameters else 'U-Net'}, {own}"
    figures["models"] = {
        own: (parameters, args.bytes_per_parameter * parameters, seconds)
    }
    for name, (count, tokens) in SIZES.items():
        sent, operations = (
            STATE[args.precision]["gradients"] * count,
            6 * count * tokens,
        )
        figures["models"][name] = (count, sent, operations / args.flops)
    figures["memory"] = memory_table(figures["models"], args)
    figures["with_ddp"] = fit_with_ddp(figures["models"], figures["memory"])
    figures["curves"] = curves(
        figures["with_ddp"], stragglers / stragglers.mean(), args
    )

    folder = Path(args.results if args.save_results else args.output_dir)
    links = [
        {"kind": "link", "source": "vendor's figure, not measured"} | x._asdict()
        for x in LINKS
    ]
    command = f"uv run python predict_scaling.py {shlex.join(sys.argv[1:] if argv is None else argv)}"
    results = {"command": command, "date": str(date.today()), "machine": machine}
    results["versions"] = {
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }
    assumed = {
        "kind": "assumptions",
        "step": figures["step"],
        "stragglers": figures["stragglers"],
    }
    assumed |= {
        k: v
        for k, v in vars(args).items()
        if k not in ("results", "output_dir", "save_results")
    }
    results["rows"] = [
        fitted,
        assumed,
        *points,
        *links,
        *figures["curves"],
        *figures["memory"],
    ]
    picture = draw(figures["curves"], figures["with_ddp"], args.gpus_per_node)
    flag = "--results" if args.save_results else "--output-dir"
    write_aside(
        flag, folder / "predict_scaling.png", lambda path: picture.savefig(path, dpi=90)
    )
    text = json.dumps(results) + "\n"
    write_aside(
        flag, folder / "predict_scaling.json", lambda path: path.write_text(text)
    )
    report(figures, args)
    print(f"picture: {folder / 'predict_scaling.png'}")
    return figures


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
