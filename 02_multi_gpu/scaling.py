"""Chapter 2: measure what a second device buys, and what the communication costs.

    uv run python scaling.py                          # every study, about 25 minutes on two CPU cores
    uv run python scaling.py scaling allreduce        # some of them
    uv run python scaling.py --save-results           # and write results/*.json and two pictures

Alternatives run in turn, so that a machine which slows down for a while slows all of them. On CPU every
rank has one thread, if its row says nothing else; on GPUs, one GPU. The batches are made beforehand: the loader is chapter 4's subject.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import date, timedelta
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from tqdm import tqdm

import train_ddp_by_hand as chapter

# With several buckets, the all-reduces that PowerSGD starts from callbacks may come in another order on
# each rank, and gloo then ends the run: "Received data size doesn't match expected size".
ONE_BUCKET = {"bucket_cap_mb": 100}
BASE_BATCH = 8  # for which the default learning rate was chosen

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def on(args: argparse.Namespace) -> list[str]:
    """The flags that put a script where the bench is."""
    return ["--accelerator", "gpu" if args.gpu else "cpu"]


class Bench:
    """What every study needs on each rank: its device, its group of ranks, batches, and a clock."""

    def __init__(self, rank: int, ranks: int, args: argparse.Namespace, meeting: str):
        self.rank, self.ranks, self.args = rank, ranks, args
        self.device = torch.device("cpu")
        if args.gpu:
            self.device = torch.device(
                torch.accelerator.current_accelerator().type, rank
            )
            torch.accelerator.set_device_index(rank)
        torch.set_num_threads(1)
        backend = distributed.get_default_backend_for_device(self.device)
        distributed.init_process_group(
            backend, meeting, timedelta(minutes=30), ranks, rank
        )
        self.groups = {n: distributed.new_group(range(n)) for n in range(1, ranks + 1)}
        flags = ["--batch-size", str(args.device_batch * ranks), *on(args)]
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self.flags = chapter.parse_arguments(flags)
        self.training, *_ = chapter.make_patches(self.flags)

    def batch(self, size: int, step: int = 0) -> dict[str, torch.Tensor]:
        """The first `size` samples of this rank in a step, on its device."""
        first = self.rank * size
        samples = [self.training[step, k] for k in range(first, first + size)]
        return {
            name: part.to(self.device)
            for name, part in default_collate(samples).items()
        }

    def network(self, seed: int = 0) -> chapter.UNet:
        torch.manual_seed(seed)
        return chapter.UNet(len(self.flags.variables)).to(self.device)

    def parallel(
        self, network: chapter.UNet, ranks: int, **options
    ) -> DistributedDataParallel:
        ids = [self.rank] if self.args.gpu else None
        return DistributedDataParallel(
            network, ids, process_group=self.groups[ranks], **options
        )

    def clock(self) -> float:
        """The time, once the device has done what it was given."""
        if self.args.gpu:
            torch.accelerator.synchronize()
        return perf_counter()

    def gather(self, value) -> list:
        """What every rank found, on every rank."""
        found = [None] * self.ranks
        distributed.all_gather_object(found, value)
        return found


class Step:
    """One training step on some ranks, with and without communication, ready to be timed."""

    def __init__(
        self, bench: Bench, ranks: int, batch_size: int, threads: int = 1, **options
    ):
        self.bench, self.ranks, self.threads = bench, ranks, threads
        hook = options.pop("hook", None)
        if hook:  # in one bucket, see ONE_BUCKET
            options = ONE_BUCKET | options
        self.model = bench.parallel(bench.network(), ranks, **options)
        if hook:
            self.model.register_comm_hook(*hook(bench.groups[ranks]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = bench.batch(batch_size)

    def run(self, synchronise: bool = True) -> None:
        self.optimizer.zero_grad()
        unseen = self.data["unseen"].sum()
        if synchronise:
            distributed.all_reduce(unseen, group=self.bench.groups[self.ranks])
        with nullcontext() if synchronise else self.model.no_sync():
            squares, _ = chapter.masked_sums(self.model(self.data["input"]), self.data)
            (squares * self.ranks / unseen).backward()
        self.optimizer.step()

    def time(self, steps: int, synchronise: bool = True) -> list[float]:
        """Seconds of each step, after two that do not count, for DDP lays its buckets out anew in the second.
        The ranks start together."""
        torch.set_num_threads(self.threads)
        seconds = []
        for _ in range(steps + 2):
            distributed.barrier(self.bench.groups[self.ranks])
            began = self.bench.clock()
            self.run(synchronise)
            seconds.append(self.bench.clock() - began)
        torch.set_num_threads(1)
        return seconds[2:]


def scaling(bench: Bench) -> list[dict]:
    """Weak scaling (a fixed batch for each device) and strong scaling (a fixed global batch), 1..N devices."""
    base, cases = bench.args.device_batch, []
    for ranks in range(1, bench.ranks + 1):
        cases.append(("weak", ranks, base, 1))
        if base % ranks == 0:
            cases.append(("strong", ranks, base // ranks, 1))
    if not bench.args.gpu and bench.ranks > 1:
        cases.append(("one process, as many threads", 1, base, bench.ranks))
        cases.append(
            (
                "as many threads in each process",
                bench.ranks,
                base // bench.ranks,
                bench.ranks,
            )
        )
    steps, compute = {case: [] for case in cases}, {case: [] for case in cases}
    for _ in bench.progress(range(bench.args.repeats), "scaling"):
        for case in cases:
            _, ranks, batch, threads = case
            if bench.rank < ranks:
                step = Step(bench, ranks, batch, threads)
                steps[case].append(step.time(bench.args.steps))
                compute[case].append(step.time(bench.args.steps, synchronise=False))
            distributed.barrier()
    rows = []
    for case in cases:
        mode, ranks, batch, threads = case
        every = [list(chain(*part)) for part in bench.gather(steps[case])[:ranks]]
        alone = [list(chain(*part)) for part in bench.gather(compute[case])[:ranks]]
        together = [
            max(at_once) for at_once in zip(*every)
        ]  # a step ends when its slowest rank does
        row = {
            "mode": mode,
            "devices": ranks,
            "threads": threads,
            "global_batch": batch * ranks,
        }
        row |= {"device_batch": batch, "step_seconds": spread(together)}
        row["compute_seconds"] = spread([max(at_once) for at_once in zip(*alone)])
        stretches = [
            together[i : i + bench.args.steps]
            for i in range(0, len(together), bench.args.steps)
        ]
        row["samples_per_second"] = spread(
            [batch * ranks / median(part) for part in stretches]
        )
        network = bench.network()
        row["parameters"] = sum(part.numel() for part in network.parameters())
        row["gradient_bytes"] = sum(
            part.numel() * part.element_size() for part in network.parameters()
        )
        rows.append(
            row
            | {
                "steps": rounded(together),
                "compute_steps": [rounded(part) for part in alone],
            }
        )
    for row in rows:
        row["efficiency"] = efficiency(row, rows)
    return rows


def rounded(seconds: list[float]) -> list[float]:
    return [round(value, 6) for value in seconds]


def efficiency(row: dict, rows: list[dict]) -> float:
    """Samples/s for each core or GPU, against one device with one thread and the whole batch."""
    one = next(
        other for other in rows if other["mode"] == "weak" and other["devices"] == 1
    )
    speed_up = row["samples_per_second"]["median"] / one["samples_per_second"]["median"]
    cores = min(
        row["devices"] * row["threads"], max(other["devices"] for other in rows)
    )
    return speed_up / cores


def allreduce(bench: Bench) -> list[dict]:
    """Seconds of an all-reduce, over all ranks, against the bytes that it sums."""
    sizes = [2**exponent for exponent in range(10, 25, 2)]
    seconds = {size: [] for size in sizes}
    tensors = {size: torch.ones(size // 4, device=bench.device) for size in sizes}
    for _ in bench.progress(range(bench.args.repeats * 10), "allreduce"):
        for size, tensor in tensors.items():
            distributed.barrier()
            began = bench.clock()
            distributed.all_reduce(tensor)
            seconds[size].append(bench.clock() - began)
            tensor.fill_(1)
    return [
        {"devices": bench.ranks, "bytes": size, "seconds": spread(seconds[size][1:])}
        for size in sizes
    ]


class Traffic:
    """Counts the bytes that a communication hook hands to all_reduce."""

    def __init__(self):
        self.bytes, self.all_reduce = 0, distributed.all_reduce

    def __enter__(self):
        def counted(tensor, *args, **kwargs):
            self.bytes += tensor.numel() * tensor.element_size()
            return self.all_reduce(tensor, *args, **kwargs)

        distributed.all_reduce = counted
        return self

    def __exit__(self, *_):
        distributed.all_reduce = self.all_reduce


def power_sgd(group):
    """PowerSGD from the second step on (Vogels et al. 2019, https://arxiv.org/abs/1905.13727)."""
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=2,
    )
    return state, powerSGD_hook.powerSGD_hook


HOOKS = {
    "no compression": lambda group: (group, default_hooks.allreduce_hook),
    "bf16": lambda group: (group, default_hooks.bf16_compress_hook),
    "PowerSGD, rank 2": power_sgd,
}
OPTIONS = {
    "defaults (25 MB buckets, the first 1 MB)": {},
    "buckets of 0.1 MB": {"bucket_cap_mb": 0.1},
    "buckets of 0.01 MB": {"bucket_cap_mb": 0.01},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    **{f"hook: {name}": {"hook": hook} for name, hook in HOOKS.items()},
}


def options(bench: Bench) -> list[dict]:
    """What DDP's options and compression hooks do to the step and to the bytes on the wire."""
    batch = bench.args.device_batch // bench.ranks
    seconds = {name: [] for name in OPTIONS}
    for _ in bench.progress(range(bench.args.repeats), "options"):
        for name, chosen in OPTIONS.items():
            seconds[name].append(
                Step(bench, bench.ranks, batch, **chosen).time(bench.args.steps)
            )
    rows = []
    for name, chosen in OPTIONS.items():
        row = {
            "option": name,
            "devices": bench.ranks,
            "global_batch": batch * bench.ranks,
        }
        row["step_seconds"] = spread(list(chain(*seconds[name])))
        if "hook" in chosen:
            step = Step(bench, bench.ranks, batch, **chosen)
            for _ in range(4):
                step.run()
            with Traffic() as traffic:
                step.run()
            row["bytes_per_step"] = traffic.bytes
        rows.append(row)
    return rows


def compression(bench: Bench) -> list[dict]:
    """The RMSE on 1990 that the default run reaches with each compression hook, on the same batches."""
    rows, flags = [], bench.flags
    for name, hook in HOOKS.items():
        for seed in range(bench.args.seeds):
            rmse, _ = learn(
                bench, BASE_BATCH, flags.max_steps, flags.learning_rate, seed, hook
            )
            rows.append(
                {"hook": name, "steps": flags.max_steps, "seed": seed, "rmse": rmse}
            )
    return rows


def learn(
    bench: Bench, batch_size: int, steps: int, rate: float, seed: int, hook=None
) -> tuple:
    """Train as train_ddp_by_hand.py does. Returns the RMSE on 1990, in m/s, and the loss of each step."""
    flags = [
        "--batch-size",
        batch_size,
        "--max-steps",
        steps,
        "--learning-rate",
        rate,
        "--seed",
        seed,
    ]
    args = chapter.parse_arguments([*map(str, flags), *on(bench.args)])
    training, validation, _ = chapter.make_patches(args)
    network = bench.network(seed)
    model = bench.parallel(network, bench.ranks, **(ONE_BUCKET if hook else {}))
    if hook:
        model.register_comm_hook(*hook(None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    factor = chapter.partial(chapter.learning_rate_factor, max_steps=steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    sampler = chapter.StepSampler(args, 0, bench.rank, bench.ranks)
    loader = chapter.DataLoader(training, batch_sampler=sampler)
    losses = []
    for batch in bench.progress(loader, f"batch {batch_size}, rate {rate:.2g}", steps):
        batch = {name: part.to(bench.device) for name, part in batch.items()}
        loss = chapter.train_step(model, optimizer, schedule, [batch])
        distributed.all_reduce(loss)
        losses.append(loss.item() / bench.ranks)
    return chapter.validate(network, validation, bench.device)["m/s"], losses


def learning_rates(bench: Bench) -> list[dict]:
    """Four times the global batch: learning-rate rules at equal samples and at equal steps, judged on 1990."""
    base, large, steps = BASE_BATCH, 4 * BASE_BATCH, bench.flags.max_steps
    rules = {"none": 1, "sqrt": 2, "linear": 4}
    cases = [("base", base, steps, 1)]
    cases += [
        (rule, large, n, factor)
        for n in (steps // 4, steps)
        for rule, factor in rules.items()
    ]
    rows = []
    for rule, batch, steps, factor in cases:
        rate = factor * bench.flags.learning_rate
        for seed in range(bench.args.seeds):
            rmse, losses = learn(bench, batch, steps, rate, seed)
            row = {
                "rule": rule,
                "global_batch": batch,
                "steps": steps,
                "samples": batch * steps,
            }
            row |= {"learning_rate": rate, "seed": seed, "rmse": rmse}
            rows.append(row | {"losses": [round(loss, 4) for loss in losses]})
    return rows


def timeline(bench: Bench) -> list[dict]:
    """What each rank does in a step, in seconds since the step began: evenly, and with one rank held up.

    On CPU only: on a GPU, the moment at which a hook is called is not the moment at which a bucket is ready.
    """
    rows, batch = [], bench.args.device_batch // bench.ranks
    buckets = {}

    def record(group, bucket):
        """All-reduce a bucket, and note when it was ready and when its sum had come."""
        ready = perf_counter()
        work = default_hooks.allreduce_hook(group, bucket)
        return work.then(lambda future: note(bucket.index(), ready, future))

    def note(index: int, ready: float, future) -> torch.Tensor:
        buckets[index] = (ready, perf_counter())
        return future.value()[0] if isinstance(future.value(), list) else future.value()

    step = Step(
        bench,
        bench.ranks,
        batch,
        bucket_cap_mb=0.25,
        hook=lambda group: (group, record),
    )
    for number in range(bench.args.steps + 6):
        late = number >= bench.args.steps
        buckets.clear()
        distributed.barrier()
        began = bench.clock()
        if late and bench.rank == bench.ranks - 1:
            while (
                bench.clock() < began + 0.05
            ):  # a straggler: 50 ms late, say, in reading its data
                pass
        step.optimizer.zero_grad()
        data = step.data
        given = bench.clock()
        squares, unseen = chapter.masked_sums(step.model(data["input"]), data)
        forward = bench.clock()
        (squares / unseen).backward()
        backward = bench.clock()
        step.optimizer.step()
        ended = bench.clock()
        times = {
            "data": given,
            "forward": forward,
            "backward": backward,
            "optimizer": ended,
        }
        row = {"step": number, "straggler": late, "rank": bench.rank, "began": began}
        row |= {name: value - began for name, value in times.items()}
        row["buckets"] = [
            [a - began, b - began] for _, (a, b) in sorted(buckets.items())
        ]
        rows += bench.gather(row) if number >= 3 else []
    return rows


def run(command: list[str], ranks: int = 1) -> dict:
    """Run one of the scripts as a program; return its summary, its weights, and its seconds from start to exit.

    RuntimeError, with the last line that it printed, if it fails.
    """
    folder, began = HERE / "outputs/scaling", perf_counter()
    done = subprocess.run(
        [*command, "--output-dir", folder],
        cwd=HERE,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks))},
    )
    seconds = perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.splitlines()[-1]}")
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True, map_location="cpu")
    weights = checkpoint.get("model") or checkpoint["state_dict"]
    summary = json.loads((folder / "summary.json").read_text())
    return summary | {"weights": weights, "wall_seconds": seconds}


def torchrun(ranks: int, *flags: str) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    return [*start, "train_ddp_by_hand.py", *flags]


def commands(args: argparse.Namespace) -> list[dict]:
    """Both scripts as a reader starts them, on one device and on all: what they reach, and how fast."""
    devices = sorted({1, args.devices})
    cases = [("train.py", n) for n in devices] + [
        ("train_ddp_by_hand.py", n) for n in devices
    ]
    runs = {case: [] for case in cases}
    for seed in tqdm(range(args.seeds), "commands"):
        for script, n in cases:
            flags = ["--seed", str(seed), "--accelerator", args.accelerator]
            by_lightning = [sys.executable, script, "--devices", str(n), *flags]
            runs[script, n].append(
                run(by_lightning if script == "train.py" else torchrun(n, *flags), n)
            )
    measured = ("samples_per_second", "data_wait_share", "wall_seconds")
    rows = []
    for (script, n), found in runs.items():
        row = {"script": script, "devices": n, "runs": len(found)}
        row["rival"] = found[0]["rmse"][chapter.RIVAL]["m/s"]
        row["rmse"] = spread([one["rmse"]["U-Net"]["m/s"] for one in found])
        row |= {key: spread([one[key] for one in found]) for key in measured}
        summary = {key: value for key, value in found[0].items() if key != "weights"}
        rows.append(row | {"summary": summary})
    return rows


def agreement(args: argparse.Namespace) -> list[dict]:
    """How far the weights and the RMSE of other runs are from those of one process, as a run goes on."""
    others = {
        "one process, 3 micro-batches": (1, 3),
        "two processes": (2, 1),
        "three processes": (3, 1),
    }
    rows = []
    for steps in tqdm(
        (10, 200), "agreement"
    ):  # three processes have 2, 3 and 3 samples
        flags = ("--max-steps", str(steps), "--accelerator", "cpu")
        one = run(torchrun(1, *flags))
        largest = max(part.abs().max().item() for part in one["weights"].values())
        for name, (ranks, accumulate) in others.items():
            other = run(torchrun(ranks, *flags, "--accumulate", str(accumulate)), ranks)
            pairs = zip(one["weights"].values(), other["weights"].values())
            difference = max((a - b).abs().max().item() for a, b in pairs)
            row = {
                "run": name,
                "steps": steps,
                "weights": difference,
                "largest_weight": largest,
            }
            rmse, rmse_of_one = (run["rmse"]["U-Net"]["m/s"] for run in (other, one))
            rows.append(row | {"rmse": rmse, "rmse_of_one": rmse_of_one})
    return rows


def rounding(args: argparse.Namespace) -> list[dict]:
    """The error of a batch's gradient, whole and as the sum of two halves, against double precision.

    It is the largest difference over the largest component, as in wrong_ways.py. Two processes do the same
    as two halves: the error says how far apart they may be without anything being wrong.
    """
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    training, *_ = chapter.make_patches(chapter.parse_arguments([]))
    batch = default_collate([training[0, k] for k in range(BASE_BATCH)])

    unseen = batch["unseen"].sum()

    def gradient(parts: int, dtype: torch.dtype, onednn: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = chapter.UNet(batch["target"].shape[1]).to(dtype)
        cut = {name: value.to(dtype).chunk(parts) for name, value in batch.items()}
        with torch.backends.mkldnn.flags(enabled=onednn):
            for number in range(parts):
                part = {name: pieces[number] for name, pieces in cut.items()}
                squares, _ = chapter.masked_sums(model(part["input"]), part)
                (squares / unseen).backward()
        return torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters()]
        ).double()

    truth = gradient(1, torch.float64, False)
    kinds = {
        "oneDNN": (torch.float32, True),
        "plain": (torch.float32, False),
        "double": (torch.float64, False),
    }
    rows = []
    for name, (dtype, onednn) in kinds.items():
        for parts in (1, 2):
            error = (
                gradient(parts, dtype, onednn) - truth
            ).abs().max() / truth.abs().max()
            rows.append({"convolutions": name, "parts": parts, "error": error.item()})
    return rows


# The first kind runs in this process, and may start programs; the second in each of N ranks.
PROGRAMS = {study.__name__: study for study in (commands, agreement, rounding)}
STUDIES = {
    study.__name__: study
    for study in (scaling, allreduce, options, compression, timeline, learning_rates)
}


def draw(rows: list[dict]) -> Figure:
    """Samples/s against devices, and where the time of a step goes."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in rows if row["mode"] in ("weak", "strong")]
    for mode, colour, marker in (("weak", "#009E73", "o"), ("strong", "#E69F00", "s")):
        part = [row for row in rows if row["mode"] == mode]
        devices, rates = (
            [row["devices"] for row in part],
            [row["samples_per_second"] for row in part],
        )
        middle = [rate["median"] for rate in rates]
        spreads = [
            [abs(rate[end] - rate["median"]) for rate in rates]
            for end in ("min", "max")
        ]
        left.errorbar(
            devices,
            middle,
            spreads,
            marker=marker,
            color=colour,
            capsize=4,
            label=f"{mode} scaling",
        )
        if mode == "weak":
            left.plot(
                devices,
                [middle[0] * n for n in devices],
                ":",
                color="0.4",
                label="ideal",
            )
    left.set(
        xlabel="devices",
        ylabel="samples/s",
        ylim=(0, None),
        xticks=sorted({row["devices"] for row in rows}),
    )
    left.legend(frameon=False)
    labels = [
        f"{row['mode']}, {row['devices']} x {row['device_batch']} samples"
        for row in rows
    ]
    compute = [1e3 * row["compute_seconds"]["median"] for row in rows]
    exposed = [
        max(0, 1e3 * row["step_seconds"]["median"] - alone)
        for row, alone in zip(rows, compute)
    ]
    right.barh(labels, compute, color="#0072B2", label="compute")
    right.barh(
        labels, exposed, left=compute, color="#CC79A7", label="more than under no_sync"
    )
    right.set(xlabel="ms a step (median)")
    right.invert_yaxis()
    figure.legend(
        *right.get_legend_handles_labels(),
        loc="outside lower right",
        ncols=2,
        frameon=False,
    )
    for axes in (left, right):
        for item in (
            axes.xaxis.label,
            axes.yaxis.label,
            *axes.get_xticklabels(),
            *axes.get_yticklabels(),
        ):
            item.set_fontsize(12)
    return figure


def draw_timeline(rows: list[dict]) -> Figure:
    """What each rank does in a step: above in an ordinary one, below in one with a straggler."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw_step(upper, median_step(rows, straggler=False))
    draw_step(lower, median_step(rows, straggler=True))
    upper.set_title("An ordinary step", fontsize=12)
    lower.set_title(
        f"Rank {max(row['rank'] for row in rows)} is 50 ms late, say, with its data",
        fontsize=12,
    )
    lower.set_xlabel("ms since the step began", fontsize=12)
    handles = upper.get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=5, frameon=False, fontsize=12
    )
    return figure


def median_step(rows: list[dict], straggler: bool) -> list[dict]:
    """The rows, one a rank, of the step whose length is the median of all with, or without, a straggler."""
    steps = {}
    for row in rows:
        if row["straggler"] == straggler:
            steps.setdefault(row["step"], []).append(row)
    ordered = sorted(
        steps.values(), key=lambda ranks: max(row["optimizer"] for row in ranks)
    )
    return ordered[len(ordered) // 2]


def draw_step(axes: Axes, rows: list[dict]) -> None:
    """One step: a thick bar of what each rank computes, and thin ones beneath of its all-reduces."""
    for row in rows:
        y = -1.4 * row["rank"]
        ms = {
            name: 1e3 * row[name]
            for name in ("data", "forward", "backward", "optimizer")
        }
        buckets = [(1e3 * ready, 1e3 * done) for ready, done in row["buckets"]]
        last = max(ready for ready, _ in buckets)
        bars = {  # what, from, to, colour
            "late": (0, ms["data"], "#D55E00"),
            "forward": (ms["data"], ms["forward"], "#56B4E9"),
            "backward": (ms["forward"], last, "#0072B2"),
            "all-reduce, or wait for it": (last, ms["backward"], "#CC79A7"),
            "optimizer": (ms["backward"], ms["optimizer"], "0.4"),
        }
        for name, (begin, end, colour) in bars.items():
            axes.barh(
                y,
                end - begin,
                0.5,
                begin,
                color=colour,
                label=None if row["rank"] else name,
            )
        for number, (ready, done) in enumerate(
            buckets
        ):  # each below the one before: they overlap
            axes.barh(
                y - 0.36 - 0.13 * number, done - ready, 0.1, ready, color="#CC79A7"
            )
    ranks = [row["rank"] for row in rows]
    axes.set_yticks([-1.4 * rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.tick_params(labelsize=12)


def work(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    """What each process does: every study in turn. Rank 0 writes what was found."""
    bench = Bench(
        rank, ranks, args, f"file://{folder}/ranks"
    )  # on one machine, a file does for a port
    bench.progress = lambda things, name, total=None: tqdm(
        things, name, total, disable=rank > 0
    )
    found = {name: STUDIES[name](bench) for name in args.studies}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(": ")[1] for line in lines if line.startswith("model name")),
            cpu,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory), "gpu": gpu}


def launch(ranks: int, args: argparse.Namespace) -> dict[str, list[dict]]:
    """Run the studies on this many processes, and return what rank 0 wrote; RuntimeError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=work, args=(rank, ranks, args, folder), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            if failed := [
                rank for rank, process in enumerate(processes) if process.exitcode
            ]:
                raise RuntimeError(
                    f"rank {failed[0]} failed"
                )  # the others, as daemons, end with this one
            processes[0].join(0.2)
        return json.loads(Path(folder, "found.json").read_text())


def main(argv: list[str] | None = None) -> dict:
    """Run the studies that were asked for, print their rows, and save them if asked to."""
    names = [*STUDIES, *PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "studies",
        nargs="*",
        metavar="STUDY",
        help=f"of {', '.join(names)}; all if none",
    )
    add(
        "--devices",
        type=int,
        help="most devices to use; if not given, up to 8, which divide the batch",
    )
    add(
        "--device-batch",
        type=int,
        help="samples for each device; if not given, 8 on CPU, 256 on a GPU",
    )
    add(
        "--steps",
        type=int,
        default=10,
        help="steps that are timed at a stretch (default: 10)",
    )
    add(
        "--repeats",
        type=int,
        default=7,
        help="such stretches, in turn with the alternatives (default: 7)",
    )
    add("--seeds", type=int, default=2, help="seeds of each training run (default: 2)")
    add(
        "--accelerator",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to compute",
    )
    add(
        "--save-results",
        action="store_true",
        help="write results/STUDY.json and the pictures beside them",
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.studies if name not in names]:
        parser.error(f"{unknown[0]}: no such study; choose from {', '.join(names)}")
    args.gpu = args.accelerator != "cpu" and torch.accelerator.is_available()
    if args.accelerator == "gpu" and not args.gpu:
        parser.error("--accelerator gpu: this machine has none; give auto or cpu")
    found = torch.accelerator.device_count() if args.gpu else os.cpu_count()
    if args.gpu and "timeline" in args.studies:
        parser.error(
            "timeline: give --accelerator cpu, for a GPU's hooks do not tell its times"
        )
    chosen = args.studies or [
        name for name in names if not (args.gpu and name == "timeline")
    ]
    args.device_batch = args.device_batch or (256 if args.gpu else 8)
    dividing = [
        n for n in range(1, min(found, BASE_BATCH) + 1) if args.device_batch % n == 0
    ]
    ranks = args.devices or max(dividing)
    args.devices, args.studies = ranks, [name for name in chosen if name in STUDIES]
    if not 1 <= ranks <= found:
        parser.error(
            f"--devices {ranks}: there are {found} {'GPUs' if args.gpu else 'cores'}"
        )
    if args.device_batch % ranks:
        parser.error(
            f"--device-batch {args.device_batch}: {ranks} devices do not divide it"
        )

    rows = launch(ranks, args) if args.studies else {}
    rows |= {name: PROGRAMS[name](args) for name in chosen if name in PROGRAMS}
    short = ("steps", "compute_steps", "losses", "buckets")
    for name, part in rows.items():
        for row in part:
            print(name, {key: value for key, value in row.items() if key not in short})
    if args.save_results:
        RESULTS.mkdir(exist_ok=True)
        versions = {
            name: version(name).split("+")[0] for name in ("torch", "lightning")
        }
        versions = {"python": platform.python_version()} | versions
        suffix = "_gpu" if args.gpu else ""
        for name, part in rows.items():
            results = {
                "command": f"uv run python scaling.py {name}",
                "date": str(date.today()),
            }
            results |= {"machine": machine(), "versions": versions, "rows": part}
            (RESULTS / f"{name}{suffix}.json").write_text(json.dumps(results) + "\n")
        if "scaling" in rows:
            draw(rows["scaling"]).savefig(RESULTS / f"scaling{suffix}.png", dpi=110)
        if "timeline" in rows:
            draw_timeline(rows["timeline"]).savefig(RESULTS / "timeline.png", dpi=110)
    return rows


if __name__ == "__main__":
    main()
