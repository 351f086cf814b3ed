"""Chapter 2's planning model: each formula against something that does not use it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import book
import numpy as np
import pytest
import torch
from runs import load
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

SCRIPT = book.ROOT / "02_multi_gpu/predict_scaling.py"
LATENCY, BANDWIDTH = 120e-6, 1.6e9  # of the machine from which the made-up results come
GRADIENTS = 1_000_000  # bytes: one bucket


predict = load(SCRIPT, "predict_scaling")
slow, fast = predict.Link("slow", 14e-6, 50e9), predict.Link("fast", 3.4e-6, 450e9)


def ring_by_steps(size: float, devices: int, link: predict.Link) -> tuple[float, float]:
    """All-reduce real numbers in a ring, message by message; the seconds of its two halves."""
    values = np.random.default_rng(0).random((devices, devices))  # rank, chunk
    held, clocks, halves = values.copy(), np.zeros(devices), []
    for half in range(2):
        for step in range(devices - 1):
            sent = [(rank, (rank + half - step) % devices) for rank in range(devices)]
            chunks = [held[rank, chunk] for rank, chunk in sent]
            arrival = clocks + link.latency + size / devices / link.bandwidth
            for (rank, chunk), value in zip(sent, chunks, strict=True):
                right = (rank + 1) % devices
                held[right, chunk] = value if half else held[right, chunk] + value
            clocks = np.maximum(clocks, np.roll(arrival, 1))
        halves.append(clocks.max() - sum(halves))
    np.testing.assert_allclose(held, np.tile(values.sum(axis=0), (devices, 1)))
    return tuple(halves)


# --------------------------------------------------------------------------------------- all-reduce


@pytest.mark.parametrize("devices", [2, 3, 8, 17])
def test_the_ring_takes_what_its_messages_take(devices: int) -> None:
    for size in (100, 1e6, 1e9):
        assert predict.ring(size, devices, slow) == pytest.approx(sum(ring_by_steps(size, devices, slow)))


def test_one_device_has_nothing_to_send() -> None:
    assert predict.ring(1e9, 1, slow) == predict.tree(1e9, 1, slow) == 0
    assert predict.hierarchical(1e9, 1, slow, fast, 8) == predict.hierarchical(1e9, 1, slow, fast, 1) == 0
    assert predict.exposed(1.0, [1e6, 1e6], lambda size: predict.ring(size, 1, slow)) == 0


def test_over_nodes_it_is_reduce_scatter_then_between_nodes_then_all_gather() -> None:
    scatter, gather = ring_by_steps(1e7, 8, fast)
    phases = scatter + sum(ring_by_steps(1e7 / 8, 2, slow)) + gather
    assert predict.hierarchical(1e7, 16, slow, fast, 8) == pytest.approx(phases)
    # It is never slower than that, for it may take a tree or one ring through all GPUs instead.
    for size in (1e4, 1e6, 1e8, 1e10):
        scatter, gather = ring_by_steps(size, 8, fast)
        phases = scatter + sum(ring_by_steps(size / 8, 8, slow)) + gather
        assert predict.hierarchical(size, 64, slow, fast, 8) <= phases * (1 + 1e-9)


@pytest.mark.parametrize("devices", [16, 64, 1024])
def test_no_network_is_used_beyond_its_line_rate(devices: int) -> None:
    shared, nodes = slow._replace(per_gpu=False), devices // 8
    for size in (1e3, 1e6, 1e9):
        least = 2 * (nodes - 1) / nodes * size / slow.bandwidth  # what must cross the ports of each node
        assert predict.hierarchical(size, devices, shared, fast, 8) > least
        assert predict.hierarchical(size, devices, slow, fast, 8) > least / 8
    assert predict.hierarchical(1e6, 8, slow, fast, 8) == predict.ring(1e6, 8, fast)
    alone = min(predict.ring(1e6, devices, slow), predict.tree(1e6, devices, slow))
    assert predict.hierarchical(1e6, devices, slow, fast, 1) == pytest.approx(alone)


def test_a_tree_is_faster_for_few_bytes_on_many_nodes_and_a_ring_for_many_bytes() -> None:
    assert predict.tree(1e3, 128, slow) < predict.ring(1e3, 128, slow) / 10
    assert predict.ring(1e10, 4, slow) < predict.tree(1e10, 4, slow)


# ------------------------------------------------------------------------------ stragglers and overlap


@pytest.mark.parametrize("devices", [1, 2, 8, 100])
def test_the_slowest_of_n_is_what_drawing_at_random_gives(devices: int) -> None:
    rng = np.random.default_rng(1)
    seconds = rng.gamma(4, 0.01, 50) + 0.1
    drawn = rng.choice(seconds, (20_000, devices)).max(axis=1)
    expected = predict.expected_slowest(seconds, devices)
    assert expected == pytest.approx(drawn.mean(), abs=5 * drawn.std() / np.sqrt(len(drawn)) + 1e-12)
    assert predict.expected_slowest([3.0, 1.0], devices) == pytest.approx(3 - 2 * 0.5**devices)
    assert seconds.mean() - 1e-12 <= expected <= seconds.max()


def test_the_last_bucket_is_never_hidden() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        sizes, latency, per_byte = rng.uniform(1, 100, rng.integers(1, 9)), *rng.uniform(0.01, 1, 2)
        costs = [latency + per_byte * size for size in sizes]
        left = predict.exposed(rng.uniform(0, 1e3), sizes, lambda size, a=latency, b=per_byte: a + b * size)
        assert costs[-1] - 1e-9 <= left <= sum(costs) + 1e-9
        assert predict.exposed(1e9, sizes, lambda size: 0.3) == pytest.approx(0.3)  # all but the last
        assert predict.exposed(0, sizes, lambda size: 0.3) == pytest.approx(0.3 * len(sizes))


def test_overlap_is_what_a_clock_that_ticks_shows() -> None:
    sizes, cost, compute, tick = [2.0, 5.0, 1.0], {2.0: 0.9, 5.0: 3.1, 1.0: 0.4}, 9.0, 1e-4
    backward, filled, waiting, busy, now = 6.0, 0.0, list(sizes), 0.0, 0.0
    while waiting or busy > 0:
        now += tick
        filled = min(sum(sizes), sum(sizes) * now / backward)
        busy -= tick
        if waiting and busy <= 0 and filled >= sum(sizes) - sum(waiting[1:]) - 1e-9:
            busy = cost[waiting.pop(0)]
    assert predict.exposed(compute, sizes, cost.get) == pytest.approx(now - backward, abs=0.01)


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cap", [None, 0.25])
def test_ddp_fills_such_buckets(cap: float | None, alone) -> None:
    network = nn.Sequential(*(nn.Linear(250, 250) for _ in range(7)))
    sizes = [bucket.nbytes for bucket in buckets_of(network, torch.zeros(1, 250), bucket_cap_mb=cap)]
    parameters = [parameter.nbytes for parameter in network.parameters()]
    expected = predict.buckets(sum(parameters), cap)
    assert sum(expected) == sum(sizes) == sum(parameters)
    assert len(expected) >= len(sizes) > 1  # DDP does not cut a parameter in two: its buckets are larger
    assert all(0 <= real - ideal < max(parameters) for real, ideal in zip(sizes[:-1], expected))


# --------------------------------------------------------------------------------------------- memory


def bytes_of(model: nn.Module, local=lambda tensor: tensor) -> dict[str, int]:
    """The bytes of a model's parameters, gradients and Adam's moments after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    found = {"parameters": 0, "gradients": 0, "Adam's moments": 0, "master weights": 0}
    for parameter in model.parameters():
        found["parameters"] += local(parameter).nbytes
        found["gradients"] += local(parameter.grad).nbytes
        moments = (optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
        found["Adam's moments"] += sum(local(moment).nbytes for moment in moments)
    return found


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


@pytest.mark.filterwarnings("ignore")
def test_ddp_keeps_these_bytes(alone) -> None:
    model = small_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = predict.memory(count, precision="autocast", activations=7.0)
    assert {name: expected[name] for name in bytes_of(model)} == bytes_of(model)
    for view, copies in ((False, 1), (True, 0)):
        model = small_model()
        buckets = buckets_of(model, torch.ones(2, 64), gradient_as_bucket_view=view)
        gradients = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        apart = sum(part.nbytes for part in buckets if part.untyped_storage().data_ptr() not in gradients)
        expected = predict.memory(count, precision="autocast", activations=7.0, bucket_view=view)
        assert apart == expected["buckets"] == copies * 4 * count
        assert sum(expected.values()) == sum(bytes_of(model).values()) + apart + 7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 8])
def test_fsdp_keeps_these_bytes(ranks: int) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = small_model()
        count = sum(parameter.numel() for parameter in model.parameters())
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (ranks,)))
        shards = bytes_of(model, lambda tensor: tensor.to_local())
    finally:
        distributed.destroy_process_group()
    expected = predict.memory(count, ranks, sharded=True, precision="autocast")
    assert {name: expected[name] for name in shards} == shards
    assert expected["gathered units"] == 3 * 4 * count / 32


def test_the_sums_are_those_that_zero_published() -> None:
    # Figure 1 of https://arxiv.org/abs/1910.02054: 7.5 B parameters on 64 GPUs.
    kept = predict.memory(7.5e9, precision="mixed", bucket_view=True)
    assert sum(kept.values()) == 120e9
    shards = predict.memory(7.5e9, 64, sharded=True, precision="mixed")
    assert sum(shards.values()) - shards["gathered units"] == pytest.approx(1.88e9, rel=0.01)


@pytest.mark.parametrize("how", [{}, {"devices": 8, "sharded": True}, {"precision": "mixed"}])
def test_the_largest_model_fits_to_the_byte(how: dict) -> None:
    most = predict.largest_model(72e9, 2e9, **how)
    assert sum(predict.memory(most, activations=2e9, **how).values()) == pytest.approx(72e9)
    assert predict.largest_model(1e9, 2e9, **how) == 0


def test_advice_turns_where_the_memory_ends() -> None:
    def advise(parameters: float, devices: int = 8, activations: float = 2e9) -> str:
        return predict.advice(parameters, devices, 72e9, activations)

    ddp = predict.largest_model(72e9, 2e9)
    view = predict.largest_model(72e9, 2e9, bucket_view=True)
    fsdp = predict.largest_model(72e9, 2e9, devices=8, sharded=True)
    assert ddp < view < fsdp
    assert advise(0.999 * ddp).startswith("DDP: ")
    assert advise(1.001 * ddp).startswith("DDP with gradient_as_bucket_view: ")
    assert advise(1.001 * view).startswith("FSDP: ")
    assert advise(0.999 * fsdp).startswith("FSDP: ")
    least = int(re.match(r"FSDP on (\d+) GPUs or more", advise(1.2 * fsdp))[1])
    sums = [sum(predict.memory(1.2 * fsdp, n, True, activations=2e9).values()) for n in (least - 1, least)]
    assert sums[1] <= 72e9 < sums[0]
    assert advise(1e9, activations=80e9).startswith("neither")
    assert advise(1e12, 1024).startswith("neither")  # two of its 32 units do not fit


# ----------------------------------------------------------------------------------------- calibration


def write_results(folder: Path, name: str, rows: list[dict], cores: int = 4, **machine) -> None:
    results = {"rows": rows, "machine": {"cpu": "a made-up CPU", "cores": cores, "gpu": None} | machine}
    (folder / f"{name}.json").write_text(json.dumps(results))


def made_up(folder: Path, devices=(1, 2, 4), slower=1.0, contention=1.0, together=False, n=1500) -> Path:
    """Results as scaling.py writes them, of a machine that keeps to the model, or does not.

    `slower` multiplies the steps of several devices, `contention` their compute; `together`: the ranks of a
    step are equally slow, rather than each by itself.
    """
    folder.mkdir(exist_ok=True)
    rng, rows = np.random.default_rng(3), []
    for mode, count in (("strong", 1), *(("weak", count) for count in devices), ("strong", 2)):
        batch = 8 if mode == "weak" else 8 // count
        drawn = rng.gamma(9, 0.002, (2, 1 if together else count, n)) + 0.05
        drawn = np.broadcast_to(drawn, (2, count, n)) * batch / 8
        drawn = drawn * (contention if count > 1 else 1)
        sending = 2 * (count - 1) * (LATENCY + GRADIENTS / count / BANDWIDTH)
        steps = (drawn[0].max(axis=0) + sending) * (slower if count > 1 else 1)
        row = {"mode": mode, "devices": count, "threads": 1, "device_batch": batch, "steps": steps.tolist()}
        row |= {"parameters": GRADIENTS // 4, "gradient_bytes": GRADIENTS}
        rows.append(row | {"compute_steps": drawn[1].tolist()})
    rows.append(rows[0] | {"mode": "one process, as many threads", "threads": 2})
    write_results(folder, "scaling", rows)
    sizes = [(count, 2**exponent) for count in (2, 4) for exponent in range(10, 25, 2)]
    seconds = [2 * (count - 1) * (LATENCY + size / count / BANDWIDTH) for count, size in sizes]
    rows = [
        {"devices": count, "bytes": size, "seconds": {"median": value, "min": value, "max": 9.0}}
        for (count, size), value in zip(sizes, seconds, strict=True)
    ]
    write_results(folder, "allreduce", rows)
    return folder


def plan(folder: Path, *flags: object) -> dict:
    flags = ["--results", folder, "--output-dir", folder / "run", *flags]
    return predict.main([str(flag) for flag in flags])


def test_the_latency_and_bandwidth_that_were_planted_are_found(tmp_path: Path) -> None:
    figures = plan(made_up(tmp_path))
    assert figures["latency"] == pytest.approx(LATENCY)
    assert figures["bandwidth"] == pytest.approx(BANDWIDTH)
    assert figures["fit_error"] < 1e-9
    rows = json.loads((tmp_path / "allreduce.json").read_text())["rows"]
    for number, row in enumerate(rows):
        row["seconds"]["median"] *= 1.1 if number % 2 else 0.9
    link, error = predict.fit_link(rows, "results")
    assert link.latency == pytest.approx(LATENCY, rel=0.15)
    assert link.bandwidth == pytest.approx(BANDWIDTH, rel=0.15)
    assert 0.05 < error < 0.25


def test_a_machine_that_keeps_to_the_model_is_predicted(tmp_path: Path, capsys) -> None:
    figures = plan(made_up(tmp_path))
    assert [(point["mode"], point["devices"]) for point in figures["points"]] == [
        ("weak", 1),
        ("strong", 1),
        ("weak", 2),
        ("weak", 4),
        ("strong", 2),
    ]
    assert figures["largest_error_percent"] < 1
    assert figures["from_one_largest_error_percent"] < 1
    assert "a core each: 0%; from one device 0%" in capsys.readouterr().out


def test_a_machine_that_does_not_is_reported_as_such(tmp_path: Path, capsys) -> None:
    figures = plan(made_up(tmp_path, slower=1.5))
    assert figures["largest_error_percent"] == pytest.approx(100 / 3, abs=1)
    assert "a core each: 33%" in capsys.readouterr().out
    assert {round(point["error_percent"]) for point in figures["points"][2:]} <= {-34, -33, -32}


def test_contention_for_memory_shows_in_what_one_device_predicts_alone(tmp_path: Path) -> None:
    figures = plan(made_up(tmp_path, contention=2))
    assert figures["largest_error_percent"] < 1
    assert figures["from_one_largest_error_percent"] == pytest.approx(49, abs=2)


def test_ranks_that_are_slow_together_make_the_prediction_too_slow(tmp_path: Path) -> None:
    errors = [point["error_percent"] for point in plan(made_up(tmp_path, together=True))["points"]]
    assert all(error > 2 for error in errors[2:])


def test_points_whose_processes_share_cores_are_shown_but_not_judged(tmp_path: Path, capsys) -> None:
    made_up(tmp_path)
    results = json.loads((tmp_path / "scaling.json").read_text())
    for row in results["rows"]:
        if row["devices"] == 4:
            row["steps"] = [3 * value for value in row["steps"]]
    results["machine"]["cores"] = 2
    (tmp_path / "scaling.json").write_text(json.dumps(results))
    figures = plan(tmp_path)
    assert figures["largest_error_percent"] < 1
    assert figures["points"][3]["error_percent"] < -60
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if "share cores: not covered" in line] == [["weak", "4"]]


# --------------------------------------------------------------------------------- curves and the program


def test_curves_start_at_one_and_keep_the_order_of_the_networks(tmp_path: Path) -> None:
    rows = plan(made_up(tmp_path), "--gpu-memory", 160)["curves"]  # all four models fit with DDP
    efficiency = {(row["model"], row["network"], row["devices"]): row["efficiency"] for row in rows}
    networks = [predict.IDEAL, *(link.name for link in predict.LINKS[1:])]
    models = {row["model"] for row in rows}
    assert len(rows) == len(efficiency) == 4 * 4 * 11
    for model in models:
        assert all(efficiency[model, network, 1] == pytest.approx(1) for network in networks)
        for devices in (16, 64, 1024):
            course = [efficiency[model, network, devices] for network in networks]
            assert course == sorted(course, reverse=True)
            assert 0 < course[-1] < course[0] < 1
    one_node = {efficiency["7 B", network, 8] for network in networks[1:]}
    assert len(one_node) == 1
    # Seven billion gradients of 4 bytes through 80% of 12.5 GB/s, there and back, and the latency of 1,068 buckets.
    seconds = [row["step_seconds"] for row in rows if row["model"] == "7 B" and row["devices"] == 1024]
    assert 2 * 2.8 < seconds[2] < 2 * 2.8 + 1068 * 14 * 50e-6 + 0.5


def test_a_model_that_does_not_fit_with_ddp_gets_no_curve(tmp_path: Path, monkeypatch, capsys) -> None:
    drawn = []
    draw = predict.draw
    monkeypatch.setattr(predict, "draw", lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1])
    made_up(tmp_path)
    expected = {  # the 7 B need 142 GB, or 114 with gradient_as_bucket_view; 90% of a GPU's memory is usable
        80: ["100 M", "1 B"],
        126: ["100 M", "1 B"],
        127: ["100 M", "1 B", "7 B"],
        16: ["100 M"],
        1: [],
    }
    for memory, names in expected.items():
        figures = plan(tmp_path, "--gpu-memory", memory)
        own = [] if memory == 1 else [next(iter(figures["models"]))]
        assert list(figures["with_ddp"]) == own + names
        assert {row["model"] for row in figures["curves"]} == {*own, *names}
        panels = [axes for axes in drawn.pop().axes if axes.lines]
        assert [axes.get_title().partition(" parameters")[0] for axes in panels] == own + names
        missing = [name for name in figures["models"] if name not in figures["with_ddp"]]
        assert capsys.readouterr().out.count("no prediction") == len(missing)
        assert "7 B" in {row.get("model") for row in figures["memory"]}


def test_more_of_the_step_to_hide_behind_and_fewer_bytes_help() -> None:
    def last(size: float = 4e8, seconds: float = 0.005, *flags: str) -> float:
        """Efficiency on 1,024 GPUs with InfiniBand."""
        rows = predict.curves({"": (1e8, size, seconds)}, np.ones(1), predict.parse_arguments(list(flags)))
        return next(r["efficiency"] for r in rows if "NDR" in r["network"] and r["devices"] == 1024)

    base = last()
    assert last(2e8) > base
    assert last(seconds=1) > base
    assert last(4e8, 0.005, "--backward-share", "0.01") < base
    assert last(4e8, 0.005, "--link-share", "0.4") < base
    assert last(4e8, 0.005, "--gpus-per-node", "1") < base


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    """Run the program in its folder, as a reader does."""
    command = [sys.executable, SCRIPT.name, *(str(flag) for flag in flags)]
    return subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)


def test_the_program_writes_its_figures_and_a_picture(tmp_path: Path, capsys) -> None:
    made_up(tmp_path, n=100)
    done = run("--results", tmp_path, "--output-dir", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "VENDORS' FIGURES" in done.stdout
    picture = tmp_path / "run/predict_scaling.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 300_000
    results = json.loads((tmp_path / "run/predict_scaling.json").read_text())
    assert set(results) == {"command", "date", "machine", "versions", "rows"}
    kinds = [row["kind"] for row in results["rows"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "calibration": 1,
        "assumptions": 1,
        "point": 5,
        "link": 4,
        "curve": 3 * 4 * 11,
        "memory": 4,
        "largest model": 1,
    }
    assert all("not measured" in row["source"] for row in results["rows"] if row["kind"] == "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allreduce.json", "run", "scaling.json"]
    plan(tmp_path, "--save-results")  # the same again, elsewhere
    assert capsys.readouterr().out.splitlines()[:-1] == done.stdout.splitlines()[:-1]
    again = json.loads((tmp_path / "predict_scaling.json").read_text())
    assert again["rows"] == results["rows"]
    assert (tmp_path / "predict_scaling.png").read_bytes() == picture.read_bytes()


def test_a_measured_gpu_gives_the_step_and_the_stragglers(tmp_path: Path, capsys) -> None:
    made_up(tmp_path, n=100)
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    one = next(row for row in rows if row["mode"] == "weak" and row["devices"] == 1)
    one["compute_steps"] = [[0.030, 0.032]]
    write_results(tmp_path, "scaling_gpu", [one], gpu="a made-up GPU")
    figures = plan(tmp_path)
    assert next(iter(figures["models"].values()))[2] == pytest.approx(0.031)
    assert "step is 31 ms, measured;\nstragglers are those of a made-up GPU." in capsys.readouterr().out
    assert figures["curves"][10]["efficiency"] == pytest.approx(31 / 32)
    assert plan(tmp_path, "--step-seconds", 0.1)["step"] == "100 ms, given"


def spoil(name: str, **changes) -> dict:
    """How to spoil a results file: these fields of its second row are set, or taken out (None)."""
    return {"name": name, "changes": changes}


BAD_INPUT = {
    "no scaling.json": ("scaling", [], r"scaling.json is missing; measure with: uv run python scaling.py sc"),
    "no allreduce.json": ("allreduce", [], r"allreduce.json is missing; measure with: .* allreduce --save"),
    "torn": ({"name": "scaling", "text": '{"rows": [{"mo'}, [], r"scaling.json is no whole file of results;"),
    "not text": (
        {"name": "allreduce", "text": "\x00\ud800"},
        [],
        r"allreduce.json is no whole file of resul",
    ),
    "no machine": ({"name": "scaling", "text": '{"rows": [1]}'}, [], r"scaling.json is no whole file of res"),
    "no rows": (
        {"name": "scaling", "text": '{"rows": [], "machine": {"cores": 2}}'},
        [],
        r".* no whole file",
    ),
    "a field is missing": (
        spoil("scaling", steps=None),
        [],
        r"scaling.json, row 2: no usable steps; measure",
    ),
    "text for a number": (spoil("scaling", devices="2"), [], r"scaling.json, row 2: no usable devices;"),
    "NaN": (spoil("scaling", steps=[0.1, float("nan")]), [], r"scaling.json, row 2: no usable steps;"),
    "time below zero": (
        spoil("scaling", compute_steps=[[0.1, -1]]),
        [],
        r".* row 2: no usable compute_steps;",
    ),
    "ragged": (spoil("scaling", compute_steps=[[0.1], [1, 2]]), [], r".* row 2: no usable compute_steps;"),
    "a rank too many": (
        spoil("scaling", compute_steps=[[1], [2]]),
        [],
        r".* row 2: no usable compute_steps;",
    ),
    "no single device": (spoil("scaling", mode="else"), [], r"scaling.json has no weak row of 1 device;"),
    "no median": (spoil("allreduce", seconds={"min": 1}), [], r"allreduce.json, row 2: no usable seconds;"),
    "no time": (spoil("allreduce", seconds={"median": 0}), [], r"allreduce.json, row 2: no usable seconds;"),
    "too few sizes": ({"name": "allreduce", "keep": 1}, [], r"allreduce.json needs two sizes or more"),
    "too few cores": ({"name": "scaling", "cores": 1}, [], r"scaling.json has no point of several devices"),
    "flat": ({"name": "allreduce", "same": 0.1}, [], r"allreduce.json: more bytes take no more time"),
    "no folder": (None, ["--results", "nowhere"], r"scaling.json is missing"),
    "memory": (None, ["--gpu-memory", "0"], r"--gpu-memory 0.0: give a number above zero"),
    "nan": (None, ["--step-seconds", "nan"], r"--step-seconds nan: give a number above zero"),
    "infinite": (None, ["--flops", "inf"], r"--flops inf: give a number above zero"),
    "devices": (None, ["--devices", "-2"], r"--devices -2: give a number above zero"),
    "no step": (None, ["--parameters", "5e7"], r"--parameters 5e\+07: give your model's --step-seconds too"),
    "share": (None, ["--link-share", "80"], r"--link-share 80.0: it is a share; give at most 1"),
    "node": (None, ["--gpus-per-node", "6"], r"--gpus-per-node 6: give a power of two up to 1024"),
    "not a number": (None, ["--units", "many"], r"--units: invalid int value: 'many'"),
    "precision": (None, ["--precision", "int8"], r"--precision: invalid choice: 'int8'"),
    "no such flag": (None, ["--network", "8"], r"unrecognized arguments: --network 8"),
    "not a folder": (
        None,
        ["--output-dir", "/dev/null/x"],
        r"--output-dir /dev/null/x: cannot write predict_",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line_and_writes_nothing(case: str, tmp_path: Path, capsys) -> None:
    fault, flags, message = BAD_INPUT[case]
    folder = made_up(tmp_path / "results", n=2)
    if isinstance(fault, str):
        (folder / f"{fault}.json").unlink()
    elif fault:
        path = folder / f"{fault['name']}.json"
        results = json.loads(path.read_text())
        rows = results["rows"]
        rows[1] |= fault.get("changes", {})
        rows[1] = {name: value for name, value in rows[1].items() if value is not None}
        results["rows"] = rows[: fault.get("keep")]
        results["machine"]["cores"] = fault.get("cores", 4)
        for row in rows if "same" in fault else []:
            row["seconds"]["median"] = fault["same"] * (row["devices"] - 1)
        path.write_text(fault.get("text", json.dumps(results)), errors="replace")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    where = "" if message.startswith(("--", "unrec")) else r"--results \S+: "
    flags = ["--results", str(folder), "--output-dir", str(tmp_path / "run"), *flags]
    with pytest.raises(predict.InputError) as raised:
        predict.main(flags)
    assert re.fullmatch(f"{where}{message}.*", str(raised.value)), raised.value
    assert capsys.readouterr() == ("", "")
    if case in ("torn", "share"):  # and so does the program
        done = run(*flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"predict_scaling.py: error: {raised.value}\n"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_help_says_what_the_program_is_for() -> None:
    done = run("--help")
    assert "Chapter 2: predict on paper" in done.stdout
    flags = {"--results", "--step-seconds", "--parameters", "--bytes-per-parameter", "--gpu-memory"}
    assert flags <= set(re.findall(r"--[a-z-]+", done.stdout))


def test_every_public_function_says_what_it_does() -> None:
    source = SCRIPT.read_text()
    for name in re.findall(r"^def (\w+)", source, re.MULTILINE):
        assert getattr(predict, name).__doc__ or name == "parse_arguments"
