"""Chapter 2's planning model: each formula against something that does not use it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import book
import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

with book.rooms("02_multi_gpu"):
    import predict_scaling
    from predicting import calibration, extrapolation, memory, models, network, picture, step

LATENCY, BANDWIDTH = 120e-6, 1.6e9  # of the machine from which the made-up results come
GRADIENTS = 1_000_000  # bytes: one bucket
SLOW, FAST = network.Link("slow", 14e-6, 50e9), network.Link("fast", 3.4e-6, 450e9)
CLUSTER = network.Cluster(8, inside=FAST, network=SLOW)
TRAINING = memory.Training(gpu_gb=80, activation_gb=2, precision="autocast", units=32)

ignore_warnings = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("devices", [1, 2, 3, 17])
def test_the_ring_takes_what_its_messages_take(devices: int) -> None:
    held = np.random.default_rng(0).random((devices, devices))  # rank, chunk
    total = np.tile(held.sum(axis=0), (devices, 1))
    seconds = 0.0
    for turn in range(2 * (devices - 1)):
        chunks = [(rank - turn) % devices for rank in range(devices)]
        for rank, value in enumerate([held[rank, chunk] for rank, chunk in enumerate(chunks)]):
            place = (rank + 1) % devices, chunks[rank]
            held[place] = value + (held[place] if turn < devices - 1 else 0)
        seconds += SLOW.latency + 1e6 / devices / SLOW.bandwidth
    np.testing.assert_allclose(held, total)
    assert network.ring_seconds(1e6, devices, SLOW) == pytest.approx(seconds)
    assert network.all_reduce_seconds(1e6, devices, replace(CLUSTER, inside=SLOW)) <= seconds * (1 + 1e-9)


def test_over_nodes_it_is_the_hierarchy_or_faster() -> None:
    def hierarchy(size: float, nodes: int) -> float:
        return network.ring_seconds(size, 8, FAST) + network.ring_seconds(size / 8, nodes, SLOW)

    assert network.all_reduce_seconds(1e7, 16, CLUSTER) == pytest.approx(hierarchy(1e7, 2))
    for size in (1e4, 1e6, 1e8, 1e10):  # a tree, or one ring through all GPUs, may be faster
        assert network.all_reduce_seconds(size, 64, CLUSTER) <= hierarchy(size, 8) * (1 + 1e-9)


@pytest.mark.parametrize("devices", [16, 1024])
def test_no_network_is_used_beyond_its_line_rate(devices: int) -> None:
    one_port = replace(CLUSTER, network=replace(SLOW, per_gpu=False))
    nodes = devices // 8
    for size in (1e3, 1e6, 1e9):
        least = 2 * (nodes - 1) / nodes * size / SLOW.bandwidth  # what must cross the ports of each node
        assert network.all_reduce_seconds(size, devices, one_port) > least
        assert network.all_reduce_seconds(size, devices, CLUSTER) > least / 8


def test_a_tree_is_faster_for_few_bytes_on_many_nodes_and_a_ring_for_many_bytes() -> None:
    assert network.tree_seconds(1e3, 128, SLOW) < network.ring_seconds(1e3, 128, SLOW) / 10
    assert network.ring_seconds(1e10, 4, SLOW) < network.tree_seconds(1e10, 4, SLOW)
    single = replace(CLUSTER, gpus_per_node=1)
    for size in (1e3, 1e10):
        faster = min(network.ring_seconds(size, 64, SLOW), network.tree_seconds(size, 64, SLOW))
        assert network.all_reduce_seconds(size, 64, single) == pytest.approx(faster)


@pytest.mark.parametrize("devices", [1, 8, 100])
def test_the_slowest_of_n_is_what_drawing_at_random_gives(devices: int) -> None:
    rng = np.random.default_rng(1)
    seconds = rng.gamma(4, 0.01, 50) + 0.1
    drawn = rng.choice(seconds, (20_000, devices)).max(axis=1)
    uncertainty = 5 * drawn.std() / np.sqrt(len(drawn))
    expected = step.expected_slowest(seconds, devices)
    assert expected == pytest.approx(drawn.mean(), abs=uncertainty)
    assert seconds.mean() - 1e-12 <= expected <= seconds.max()


def test_the_last_bucket_is_never_hidden() -> None:
    costs = [0.9, 3.1, 0.4]
    for backward in np.linspace(0, 10, 50):
        assert 0.4 - 1e-9 <= step.exposed_seconds(backward, costs, float) <= 4.4 + 1e-9
    assert step.exposed_seconds(0, costs, float) == pytest.approx(4.4)
    assert step.exposed_seconds(1e9, costs, float) == pytest.approx(0.4)


def test_overlap_is_what_a_clock_that_ticks_shows() -> None:
    sizes, cost, tick = [2.0, 5.0, 1.0], {2.0: 0.9, 5.0: 3.1, 1.0: 0.4}, 1e-4
    backward, waiting, busy, now = 6.0, list(sizes), 0.0, 0.0
    while waiting or busy > 0:
        now += tick
        busy -= tick
        filled = min(1, now / backward) * sum(sizes)
        if waiting and busy <= 0 and filled >= sum(sizes) - sum(waiting[1:]) - 1e-9:
            busy = cost[waiting.pop(0)]
    assert step.exposed_seconds(backward, sizes, cost.get) == pytest.approx(now - backward, abs=0.01)


@pytest.fixture
def alone():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def buckets_of(model: nn.Module, inputs: torch.Tensor, **options) -> list[torch.Tensor]:
    """The gradient buckets of DDP's second step, in the order in which they fill."""
    found = []

    def hook(state, bucket):
        found.append(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel = DistributedDataParallel(model, **options)
    parallel.register_comm_hook(None, hook)
    for _ in range(2):
        found.clear()
        parallel.zero_grad()
        parallel(inputs).sum().backward()
    return found


@ignore_warnings
@pytest.mark.parametrize("cap", [None, 0.25])
def test_ddp_fills_such_buckets(cap: float | None, alone) -> None:
    model = nn.Sequential(*(nn.Linear(250, 250) for _ in range(7)))
    sizes = [bucket.nbytes for bucket in buckets_of(model, torch.zeros(1, 250), bucket_cap_mb=cap)]
    parameters = [parameter.nbytes for parameter in model.parameters()]
    expected = step.bucket_sizes(sum(parameters), cap)
    assert sum(expected) == sum(sizes) == sum(parameters)
    assert len(expected) >= len(sizes) > 1  # DDP does not cut a parameter in two: its buckets are larger
    assert all(0 <= real - ideal < max(parameters) for real, ideal in zip(sizes[:-1], expected))


def small_model() -> tuple[nn.Module, int]:
    """A model and the number of its parameters."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    return model, sum(parameter.numel() for parameter in model.parameters())


def bytes_of(model: nn.Module, local=lambda tensor: tensor) -> dict[str, int]:
    """The bytes of a model's parameters, gradients and Adam's moments after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    tensors = {"parameters": list(model.parameters()), "master weights": []}
    tensors["gradients"] = [parameter.grad for parameter in model.parameters()]
    states = optimizer.state.values()
    tensors["Adam's moments"] = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return {name: sum(local(tensor).nbytes for tensor in found) for name, found in tensors.items()}


@ignore_warnings
@pytest.mark.parametrize(("view", "copies"), [(False, 1), (True, 0)])
def test_ddp_keeps_these_bytes(view: bool, copies: int, alone) -> None:
    model, count = small_model()
    buckets = buckets_of(model, torch.ones(2, 64), gradient_as_bucket_view=view)
    gradients = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    apart = sum(part.nbytes for part in buckets if part.untyped_storage().data_ptr() not in gradients)
    assert apart == copies * 4 * count
    kept = bytes_of(small_model()[0]) | {"buckets": apart, "activations": 2e9}
    assert memory.ddp_memory(count, TRAINING, bucket_view=view) == kept


@ignore_warnings
@pytest.mark.parametrize("ranks", [2, 8])
def test_fsdp_keeps_these_bytes(ranks: int) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model, count = small_model()
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (ranks,)))
        kept = bytes_of(model, lambda tensor: tensor.to_local())
    finally:
        distributed.destroy_process_group()
    kept |= {"gathered units": 3 * 4 * count / 32, "activations": 2e9}
    assert memory.fsdp_memory(count, ranks, TRAINING) == kept


def test_the_sums_are_those_that_zero_published() -> None:
    # Figure 1 of https://arxiv.org/abs/1910.02054: 7.5 B parameters on 64 GPUs.
    mixed = replace(TRAINING, activation_gb=0, precision="mixed")
    assert sum(memory.ddp_memory(7.5e9, mixed, bucket_view=True).values()) == 120e9
    shards = memory.fsdp_memory(7.5e9, 64, mixed)
    assert sum(shards.values()) - shards["gathered units"] == pytest.approx(1.88e9, rel=0.01)


def test_advice_turns_where_the_memory_ends() -> None:
    most = memory.largest_models(TRAINING)
    for strategy, parameters in most.items():
        parts = memory.memory_by_strategy(parameters, TRAINING)[strategy]
        assert sum(parts.values()) == pytest.approx(72e9)  # 90% of 80 GB
    view = 70e9 / 16  # 4 bytes of parameters, 4 of gradients, 8 of Adam's moments
    advise = partial(memory.advise, devices=8, training=TRAINING)
    assert advise(0.999 * most["DDP"]).startswith("DDP: ")
    assert advise(1.001 * most["DDP"]).startswith("DDP with gradient_as_bucket_view: ")
    assert advise(1.001 * view).startswith("FSDP: ")
    assert advise(0.999 * most["FSDP on 8"]).startswith("FSDP: ")
    large = 1.2 * most["FSDP on 8"]
    least = int(re.match(r"FSDP on (\d+) GPUs or more", advise(large))[1])
    sums = [sum(memory.fsdp_memory(large, devices, TRAINING).values()) for devices in (least - 1, least)]
    assert sums[1] <= 72e9 < sums[0]
    assert advise(1e12).startswith("neither")  # two of its 32 units do not fit
    assert set(memory.largest_models(replace(TRAINING, activation_gb=73)).values()) == {0}


def edit(folder: Path, name: str, change: Callable[[dict], object]) -> None:
    """Let `change` alter what a results file holds."""
    path = folder / f"{name}.json"
    results = json.loads(path.read_text())
    change(results)
    path.write_text(json.dumps(results))


def made_up(folder: Path, slower=1.0, contention=1.0, together=False, cores=4, n=1500) -> Path:
    """Results as scaling.py writes them, of a machine that keeps to the model, or does not.

    `slower` multiplies the steps of several devices, `contention` their compute; `together`: the ranks of a
    step are equally slow, rather than each by itself. With more devices than cores, a step takes 3 times as long.
    """
    rng, rows = np.random.default_rng(3), []
    for mode, count in (("strong", 1), ("weak", 1), ("weak", 2), ("weak", 4), ("strong", 2)):
        batch = 8 if mode == "weak" else 8 // count
        drawn = rng.gamma(9, 0.002, (2, 1 if together else count, n)) + 0.05
        drawn = np.broadcast_to(drawn, (2, count, n)) * batch / 8 * (contention if count > 1 else 1)
        sending = 2 * (count - 1) * (LATENCY + GRADIENTS / count / BANDWIDTH)
        steps = (drawn[0].max(axis=0) + sending) * (slower if count > 1 else 1) * (3 if count > cores else 1)
        row = {"mode": mode, "devices": count, "threads": 1, "device_batch": batch, "steps": steps.tolist()}
        row |= {"parameters": GRADIENTS // 4, "gradient_bytes": GRADIENTS}
        rows.append(row | {"compute_steps": drawn[1].tolist()})
    rows.append(rows[0] | {"mode": "one process, as many threads", "threads": 2})
    sums = []
    for count, size in ((count, 2**exponent) for count in (2, 4) for exponent in range(10, 25, 2)):
        seconds = 2 * (count - 1) * (LATENCY + size / count / BANDWIDTH)
        sums.append({"devices": count, "bytes": size, "seconds": {"median": seconds}})
    for name, written in (("scaling", rows), ("allreduce", sums)):
        machine = {"cpu": "a made-up CPU", "cores": cores, "gpu": "a made-up GPU"}
        (folder / f"{name}.json").write_text(json.dumps({"rows": written, "machine": machine}))
    return folder


@pytest.fixture
def plan(capsys):
    """Call it with a folder of results and flags: the rows that the program writes, by kind, and its text."""

    def call(folder: Path, *flags: object) -> SimpleNamespace:
        flags = ["--results", folder, "--output-dir", folder / "run", *flags]
        largest = predict_scaling.main([str(flag) for flag in flags])
        rows = json.loads((folder / "run/predict_scaling.json").read_text())["rows"]
        kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("point", "curve", "memory")}
        assert rows[0] == {"kind": "calibration"} | largest
        return SimpleNamespace(**rows[0], assumed=rows[1], text=capsys.readouterr().out, **kinds)

    return call


def test_the_latency_and_bandwidth_that_were_planted_are_found(tmp_path: Path) -> None:
    rows = json.loads((made_up(tmp_path) / "allreduce.json").read_text())["rows"]
    link, error = calibration.fit_link(rows)
    assert (link.latency, link.bandwidth) == pytest.approx((LATENCY, BANDWIDTH))
    assert error < 1e-9
    for number, row in enumerate(rows):
        row["seconds"]["median"] *= 1.1 if number % 2 else 0.9
    link, error = calibration.fit_link(rows)
    assert (link.latency, link.bandwidth) == pytest.approx((LATENCY, BANDWIDTH), rel=0.15)
    assert 0.05 < error < 0.25


def test_a_machine_that_keeps_to_the_model_is_predicted(tmp_path: Path, plan) -> None:
    found = plan(made_up(tmp_path))
    points = [(point["mode"], point["devices"]) for point in found.point]
    assert points == [("weak", 1), ("strong", 1), ("weak", 2), ("weak", 4), ("strong", 2)]
    assert max(found.largest_error_percent, found.from_one_largest_error_percent) < 1
    assert "a core each: 0%; from one device 0%" in found.text


def test_a_machine_that_does_not_is_reported_as_such(tmp_path: Path, plan) -> None:
    found = plan(made_up(tmp_path, slower=1.5))
    assert found.largest_error_percent == pytest.approx(100 / 3, abs=1)
    assert "a core each: 33%" in found.text
    found = plan(made_up(tmp_path, contention=2))  # for memory: only a plan from one device misses it
    assert found.largest_error_percent < 1
    assert found.from_one_largest_error_percent == pytest.approx(49, abs=2)
    found = plan(made_up(tmp_path, together=True))  # the prediction is too slow
    assert all(point["error_percent"] > 2 for point in found.point[2:])


def test_points_whose_processes_share_cores_are_shown_but_not_judged(tmp_path: Path, plan) -> None:
    found = plan(made_up(tmp_path, cores=2))
    assert found.largest_error_percent < 1
    assert found.point[3]["error_percent"] < -60
    lines = [line for line in found.text.splitlines() if "share cores: not covered" in line]
    assert [line.split()[:2] for line in lines] == [["weak", "4"]]


def test_curves_start_at_one_and_keep_the_order_of_the_networks(tmp_path: Path, plan) -> None:
    rows = plan(made_up(tmp_path), "--gpu-memory", 160).curve  # all four models fit with DDP
    efficiency = {(row["model"], row["network"], row["devices"]): row["efficiency"] for row in rows}
    networks = [extrapolation.IDEAL, *(link.name for link in network.NETWORKS)]
    assert len(rows) == len(efficiency) == 4 * 4 * 11
    for model in {row["model"] for row in rows}:
        assert [efficiency[model, name, 1] for name in networks] == pytest.approx([1] * 4)
        assert len({efficiency[model, name, 8] for name in networks[1:]}) == 1  # in a node
        for devices in (16, 64, 1024):
            course = [efficiency[model, name, devices] for name in networks]
            assert course == sorted(course, reverse=True)
            assert 0 < course[-1] < course[0] < 1
    # Seven billion gradients of 4 bytes through 80% of 12.5 GB/s, there and back, and the latency of 1,068 buckets.
    seconds = [row["step_seconds"] for row in rows if row["model"] == "7 B" and row["devices"] == 1024]
    assert 2 * 2.8 < seconds[2] < 2 * 2.8 + 1068 * 14 * 50e-6 + 0.5


# The 7 B need 142 GB, or 114 with gradient_as_bucket_view; 90% of a GPU's memory can be used.
@pytest.mark.parametrize(("gpu_memory", "number"), [(127, 4), (126, 3), (16, 2), (1, 0)])
def test_a_model_that_does_not_fit_with_ddp_gets_no_curve(
    gpu_memory: int, number: int, tmp_path: Path, plan
) -> None:
    found = plan(made_up(tmp_path, n=100), "--gpu-memory", gpu_memory)
    names = [row["model"] for row in found.memory]
    assert names[1:] == ["100 M", "1 B", "7 B"]
    assert list(dict.fromkeys(row["model"] for row in found.curve)) == names[:number]
    assert found.text.count("no prediction") == 4 - number
    drawn = [models.Model(name, 1e8, 4e8, step_seconds=0.1) for name in names[:number]]
    panels = [axes for axes in picture.plot_efficiency(found.curve, drawn, 8).axes if axes.lines]
    assert [axes.get_title().partition(" parameters")[0] for axes in panels] == names[:number]


def test_more_of_the_step_to_hide_behind_and_fewer_bytes_help() -> None:
    def last(size=4e8, seconds=0.005, backward_share=2 / 3, link_share=0.8, gpus_per_node=8) -> float:
        """Efficiency on 1,024 GPUs with InfiniBand."""
        clusters = network.make_clusters(gpus_per_node, link_share)[:1]
        overlap = step.Overlap(backward_share, bucket_mb=None)
        model = models.Model("", 1e8, size, seconds)
        return extrapolation.extrapolate([model], clusters, np.ones(1), overlap)[-1]["efficiency"]

    worse = [last(backward_share=0.01), last(link_share=0.4), last(gpus_per_node=1)]
    assert max(worse) < last() < min(last(size=2e8), last(seconds=1))


def test_the_program_writes_its_figures_and_a_picture(tmp_path: Path, plan) -> None:
    command = [sys.executable, "predict_scaling.py", "--results", str(tmp_path), "--save-results"]
    run = partial(subprocess.run, command, cwd=book.ROOT / "02_multi_gpu", capture_output=True, text=True)
    done = run()  # as a reader does, with nothing measured yet
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"predict_scaling.py: error: --results {tmp_path}: scaling.json is missing")
    made_up(tmp_path, n=100)
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "VENDORS' FIGURES" in done.stdout
    image = (tmp_path / "predict_scaling.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 300_000
    results = json.loads((tmp_path / "predict_scaling.json").read_text())
    assert set(results) == {"command", "date", "machine", "versions", "rows"}
    kinds = ["point"] * 5 + ["link"] * 4 + ["curve"] * 3 * 4 * 11 + ["memory"] * 4
    kinds = ["calibration", "assumptions", *kinds, "largest model"]
    assert [row["kind"] for row in results["rows"]] == kinds
    assert plan(tmp_path).text.splitlines()[:-1] == done.stdout.splitlines()[:-1]  # the same again, elsewhere
    again = json.loads((tmp_path / "run/predict_scaling.json").read_text())
    assert again["rows"] == results["rows"]
    assert (tmp_path / "run/predict_scaling.png").read_bytes() == image


def test_a_measured_gpu_gives_the_step_and_the_stragglers(tmp_path: Path, plan) -> None:
    scaling = (made_up(tmp_path, n=100) / "scaling.json").read_text()
    (tmp_path / "scaling_gpu.json").write_text(scaling)
    edit(tmp_path, "scaling_gpu", lambda results: results["rows"][1].update(compute_steps=[[0.030, 0.032]]))
    found = plan(tmp_path)
    assert "step is 31 ms, measured;\nstragglers are those of a made-up GPU." in found.text
    assert found.curve[10]["efficiency"] == pytest.approx(31 / 32)
    assert plan(tmp_path, "--step-seconds", 0.1).assumed["step"] == "100 ms, given"


def make_flat(results: dict) -> None:
    for row in results["rows"]:
        row["seconds"]["median"] = 0.1 * (row["devices"] - 1)


BAD_RESULTS = {  # what its second row holds or what else is changed, by file and what the error says
    ("scaling", "no usable steps"): {"steps": [0.1, float("nan")]},
    ("scaling", "no usable devices"): {"devices": "2"},
    ("scaling", "no usable compute_steps"): {"compute_steps": [[1], [2]]},  # of one device
    ("scaling", "no weak row of 1 device"): {"mode": "else"},
    ("allreduce", "no usable seconds"): {"seconds": {"min": 1}},
    ("allreduce", "no whole file of results"): lambda results: results.pop("machine"),
    ("scaling", "no point of several devices"): lambda results: results["machine"].update(cores=1),
    ("allreduce", "needs two sizes or more"): lambda results: results.update(rows=results["rows"][:1]),
    ("allreduce", "more bytes take no more time"): make_flat,
}
BAD_FLAGS = {
    "--gpu-memory 0": "--gpu-memory 0.0: give a number above zero",
    "--step-seconds nan": "--step-seconds nan: give a number above zero",
    "--flops inf": "--flops inf: give a number above zero",
    "--parameters 5e7": "--parameters 5e+07: give your model's --step-seconds too",
    "--link-share 80": "--link-share 80.0: it is a share; give at most 1",
    "--gpus-per-node 6": "--gpus-per-node 6: give a power of two up to 1024",
    "--units many": "--units: invalid int value: 'many'",
    "--output-dir /dev/null/x": "--output-dir /dev/null/x: cannot write predict_scaling.png",
}


@pytest.fixture
def refused(tmp_path: Path, capsys):
    """Call it with flags: the one line with which the program refuses them, or the results, and writes nothing."""

    def call(*flags: str) -> str:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(SystemExit, match="2"):
            predict_scaling.main(["--results", str(tmp_path), "--output-dir", str(tmp_path / "run"), *flags])
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        printed, errors = capsys.readouterr()
        assert (printed, errors.count("\n")) == ("", 1)
        return errors.partition(": error: ")[2]

    return call


@pytest.mark.parametrize(("name", "problem"), BAD_RESULTS)
def test_bad_results_get_one_line(name: str, problem: str, tmp_path: Path, refused) -> None:
    change = BAD_RESULTS[name, problem]
    if isinstance(change, dict):
        edit(made_up(tmp_path, n=2), name, lambda results: results["rows"][1].update(change))
    else:
        edit(made_up(tmp_path, n=2), name, change)
    assert re.match(rf"--results {tmp_path}: {name}.json.* {problem}.*; .*measure", refused())


def test_a_torn_file_gets_one_line(tmp_path: Path, refused) -> None:
    path = made_up(tmp_path, n=2) / "scaling.json"
    path.write_bytes(path.read_bytes()[:1000])
    assert "scaling.json is no whole file of results; measure with: uv run python scaling.py" in refused()


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags_get_one_line(flags: str, tmp_path: Path, refused) -> None:
    made_up(tmp_path, n=2)
    assert refused(*flags.split()).startswith(BAD_FLAGS[flags])
