"""Chapter 6: what preflight finds before a run: each planted fault is red, with its remedy."""

import math
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import book
import buckets
import numpy as np
import programs
import pytest
import torch
import zarr
from chapter_6 import folder, local, rooms  # noqa: F401

SCRIPT = "06_whats_next/preflight/__main__.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --shuffle-slots 12 --patches-per-block 2".split()
V = "10m_v_component_of_wind"


@pytest.fixture(scope="module", autouse=True)
def more_rooms(rooms) -> Iterator[None]:
    global preflight, findings, checkpoint_checks, machine_checks
    global memory_sum, patches, rank_checks, store_checks, training_checks
    from preflight import __main__ as preflight
    from preflight import checkpoints as checkpoint_checks
    from preflight import findings, patches
    from preflight import machine as machine_checks
    from preflight import memory as memory_sum
    from preflight import ranks as rank_checks
    from preflight import store as store_checks
    from preflight import training as training_checks

    yield


@pytest.fixture(scope="module")
def with_nan(folder: Path) -> Path:
    """A store in which one value of a training map is NaN, and one of the last, a test map."""
    store = folder / "winds/nan"
    shutil.copytree(folder / "winds/whole", store)
    values = zarr.open_group(store)[V]
    values[5, 10, 10] = np.nan
    values[-1, 20, 20] = np.nan
    return store


def red_of(printed: str) -> dict[str, tuple[str, str]]:
    """The red lines by name, each with its remedy."""
    lines = printed.splitlines()
    pairs = [pair for pair in pairwise(lines) if pair[0].startswith("RED")]
    red = {line[7:19].strip(): (line[20:], below.strip()) for line, below in pairs}
    assert all(remedy.startswith("-> ") for _, remedy in red.values()), printed
    return red


def names(found: list) -> list[str]:
    return [finding.name for finding in found]


# ------------------------------------------------------------------------------- a run that is well


EVERY = ["versions", "device", "open files", "disk of logs", "disk", "start", "checkpoint", "restore"]
EVERY += ["store", "memory", "first byte", "bandwidth", "epoch", "values", "one batch", "loader"]


def test_a_run_that_is_well_is_green_and_nothing_is_left_behind(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """But for the time that a batch takes here, which is made up."""
    monkeypatch.setattr(preflight, "measure_pace", lambda *_: training_checks.Pace(9, 0.001, 0.1))
    checkpoint = tmp_path / "checkpoints/step_00000004.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("of a run")
    found = preflight.main([*SMALL, *local, "--output-dir", str(tmp_path), "--overwrite"])
    assert names(found) == EVERY
    assert [finding for finding in found if finding.is_red] == []
    printed = capsys.readouterr().out
    assert "all green" in printed
    # 26 training maps, of which 2 patches each; 2 variables in 6 chunks each.
    assert "52 patches by 312 requests" in printed
    assert list(tmp_path.rglob("*")) == [checkpoint.parent, checkpoint]


# ------------------------------------------------------------------------------- planted faults


def test_a_full_disk_and_nan_are_red_with_their_remedies_and_exit_code_2(
    with_nan: Path, tmp_path: Path
) -> None:
    flags = [*SMALL, "--store", with_nan, "--output-dir", tmp_path]
    done = programs.run(SCRIPT, *flags, limit_files=1_000_000)
    assert done.code == 2, done.err
    red = red_of(done.out)
    assert list(red) == ["checkpoint", "values"], done.out
    assert "File too large" in red["checkpoint"][0]
    assert "--checkpoint-dir" in red["checkpoint"][1]
    assert red["values"][0].startswith(f"{V} on 1983-")
    assert "in 1 cells" in red["values"][0]
    assert "--missing mask" in red["values"][1]
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_a_disk_is_full_before_anything_is_written() -> None:
    flag = "--checkpoint-dir"
    assert not machine_checks.judge_disk(flag, "x", free=200, needed=200).is_red
    full = machine_checks.judge_disk(flag, "x", free=199, needed=200)
    assert flag in full.remedy


def test_with_missing_mask_a_map_may_have_nan() -> None:
    dataset = SimpleNamespace(missing="mask", valid=np.ones((1, 4, 4), bool))
    maps = np.zeros((2, 2, 4, 4))
    maps[1, 0, 2, 2] = np.nan
    assert not patches.find_bad(maps, dataset).any()
    dataset.missing = "refuse"
    assert np.argwhere(patches.find_bad(maps, dataset)).tolist() == [[1, 0, 2, 2]]
    dataset.valid[0, 2, 2] = False  # masked at all times
    assert not patches.find_bad(maps, dataset).any()
    maps[0, 0, 0, 0] = np.inf
    dataset.missing = "mask"
    assert np.argwhere(patches.find_bad(maps, dataset)).tolist() == [[0, 0, 0, 0]]


def test_maps_of_the_test_are_searched_too(with_nan: Path) -> None:
    from fields import split_times
    from store import FieldReader, Location

    reader = FieldReader(Location(str(with_nan)), [V])
    period = split_times(reader.open().time, {"--test-times": ["1991", "1992"]})[0]
    maker = SimpleNamespace(missing="refuse", valid=np.array(True), period=period, variables=[V])
    here = SimpleNamespace(maker=maker)
    blank = SimpleNamespace(
        maker=SimpleNamespace(missing="mask", valid=maker.valid, period=period, variables=[V])
    )
    module = SimpleNamespace(blocks=blank, validation=blank, test=here, data=SimpleNamespace(reader=reader))
    finding = patches.check_values(module)
    assert finding.text.startswith(f"{V} on {str(period.dates[-1])[:10]}")


def test_a_wrong_store_is_red_and_ends_what_needs_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        preflight.main([*SMALL, "--store", str(folder), "--output-dir", str(tmp_path)])
    assert end.value.code == 2
    red = red_of(capsys.readouterr().out)
    assert list(red) == ["store"]
    assert "--endpoint" in red["store"][1]


def test_a_bucket_that_does_not_answer_is_found_out_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Long before --retry-timeout is over. Its error has no remedy of its own."""
    monkeypatch.setattr(preflight, "RETRY_TIMEOUT", 1)
    monkeypatch.setattr(patches, "RETRY_TIMEOUT", 1)
    address = f"http://127.0.0.1:{programs.free_port()}"
    place = ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]
    with pytest.raises(SystemExit):
        preflight.main([*SMALL, *place, "--retry-timeout", "50", "--output-dir", str(tmp_path)])
    red = red_of(capsys.readouterr().out)
    assert list(red) == ["store"]
    assert "retry_timeout: 1s" in red["store"][0]
    assert red["store"][1] == f"-> {preflight.OTHER_STORE}"


def test_too_large_a_batch_is_red_before_it_is_read(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With the micro-batches of its remedy, it is green."""
    monkeypatch.setattr(patches, "free_memory", lambda ranks: 20_000_000)
    flags = [*SMALL, *local, "--output-dir", str(tmp_path), "--batch-size", "60", "--shuffle-slots", "60"]
    with pytest.raises(SystemExit):
        preflight.main(flags)
    printed = capsys.readouterr().out
    red = red_of(printed)
    assert list(red) == ["memory"], printed
    assert "left out: values, one batch, loader" in printed
    assert "green  values" not in printed
    times = red["memory"][1].split(":")[0].split()[-1]
    monkeypatch.setattr(preflight, "overfit", lambda *_: [1.0, 0.1])
    monkeypatch.setattr(preflight, "measure_pace", lambda *_: training_checks.Pace(9, 0.001, 0.1))
    found = preflight.main([*flags, "--accumulate-grad-batches", times])
    assert "memory" in names(found)


def test_a_limit_on_open_files_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = machine_checks.count_open_files()[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 100, hard))
    try:
        finding = machine_checks.judge_open_files(*machine_checks.count_open_files(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.is_red
    assert finding.remedy.startswith("ulimit -n ")
    enough = int(finding.remedy.split()[2])
    assert not machine_checks.judge_open_files(now, enough, enough, 0).is_red
    low = machine_checks.judge_open_files(now, 10, enough // 2 + 1, 0)
    assert low.remedy.startswith(f"ulimit -n {enough // 2 + 1} ")  # all that may be had is enough
    assert f"--ulimit nofile={enough}" in machine_checks.judge_open_files(now, 10, 10, 0).remedy
    more = machine_checks.judge_open_files(now, enough, enough, workers=100)
    assert more.is_red


def test_two_ranks_with_different_versions_are_red_on_both(local: list[str], tmp_path: Path) -> None:
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    planted = {1: {"other_version": "zarr 0.0"}}
    done = programs.run_ranks(SCRIPT, 2, *flags, planted=planted)
    assert [one.code for one in done] == [2, 2], programs.printed(done)
    red = red_of(done[0].out)
    text, remedy = red["versions"]
    assert text == f"rank 1: versions: zarr {zarr.__version__} -> 0.0"
    assert "uv sync" in remedy
    assert "green  restore" in done[0].out
    assert "RED" not in done[1].out


def test_a_store_that_is_too_slow_is_red_and_the_remedy_is_enough() -> None:
    """A step of 0.1 s takes 8 samples of 1 MB; the store gives 20 MB/s."""
    pace = training_checks.Pace(32, waiting=0.3, working=0.1)
    slow = training_checks.judge_pace(pace, 8e6, bandwidth=20e6, patches_per_block=8)
    assert "80.0 MB/s, and the store gives 20.0" in slow.text
    assert "nearer store" in slow.remedy
    assert "--patches-per-block 32" in slow.remedy  # a quarter of the bytes
    fast = training_checks.judge_pace(pace, 8e6, bandwidth=200e6, patches_per_block=8)
    assert "--num-workers" in fast.remedy
    few = training_checks.Pace(5, waiting=0.3, working=0.1)
    assert not training_checks.judge_pace(few, 8e6, 20e6, 8).is_red
    hidden = training_checks.Pace(32, waiting=0.005, working=0.1)
    assert not training_checks.judge_pace(hidden, 8e6, 20e6, 8).is_red


def test_the_pace_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up clock: a batch comes after 3 s, and a step takes 1 s. The start is left out."""
    now = [0.0]
    monkeypatch.setattr(training_checks, "perf_counter", lambda: now[0])
    monkeypatch.setattr(training_checks, "BUDGET", math.inf)

    def load() -> Iterator[int]:
        for number in range(1000):
            now[0] += 3 if number >= training_checks.FIRST_STEPS else 50
            yield number

    def step(batch: int) -> None:
        now[0] += 1

    pace = training_checks.measure_pace(SimpleNamespace(step=step), load())
    assert pace == training_checks.Pace(training_checks.STEPS, 3.0, 1.0)


# ------------------------------------------------------------------------------- what else may be red


def test_a_first_byte_that_comes_late_is_red() -> None:
    usual = [0.03] * 95 + [0.3] * 5
    assert not store_checks.judge_first_byte(usual).is_red
    assert store_checks.judge_first_byte([0.03] * 99 + [8.0]).is_red


def test_losses_that_do_not_fall_are_red() -> None:
    judge = training_checks.judge_overfit
    assert not judge([1.0, 0.7, 0.49], 6e-3).is_red
    assert "--learning-rate 0.006" in judge([1.0, 0.9, 0.51], 6e-3).remedy
    diverged = judge([1.0, 30.0, math.nan], 6e-3)
    assert "from step 2 on" in diverged.text
    assert "less than" in diverged.remedy


def test_a_gpu_that_others_use_or_that_torch_does_not_see_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine_checks.judge_gpu("a GPU", 79_000_000_000, 80_000_000_000).is_red
    assert "nvidia-smi" in machine_checks.judge_gpu("a GPU", 40_000_000_000, 80_000_000_000).remedy
    assert not machine_checks.judge_cpu(False, 1, 2).is_red
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA 13.0" in machine_checks.judge_cpu(True, 1, 2).remedy


def test_shared_memory_that_is_too_small_is_red() -> None:
    assert not machine_checks.judge_shared_memory(free=64_000_000, needed=64_000_000).is_red
    small = machine_checks.judge_shared_memory(free=64_000_000, needed=500_000_000)
    assert "--shm-size 1.0g" in small.remedy


def test_a_clock_that_is_wrong_is_red() -> None:
    assert not rank_checks.compare_clocks([100.0, 100.2]).is_red
    wrong = rank_checks.compare_clocks([100.0, 100.2, 97.0])
    assert "rank 2 is behind rank 1" in wrong.text


def test_a_checkpoint_that_another_node_cannot_read_is_red(local: list[str], tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from options import parse_options
    from store import Location

    options = parse_options("", [*SMALL, *local, "--output-dir", str(tmp_path)])
    fabric = Fabric(accelerator="cpu", devices=1)
    trial = training_checks.make_trial(preflight.make_model(options), fabric, 0.01)
    here = Location(str(tmp_path / "here"))
    elsewhere = Location(str(tmp_path / "elsewhere"))
    assert not next(checkpoint_checks.write_checkpoint(here, trial)).is_red
    assert not next(checkpoint_checks.read_checkpoint(here, trial)).is_red
    assert "share" in next(checkpoint_checks.read_checkpoint(elsewhere, trial)).remedy
    file = Path(here.url, checkpoint_checks.NAME)
    content = file.read_bytes()
    half = len(content) // 2
    flipped = bytes([content[half] ^ 1])
    for damaged in (content[:half] + flipped + content[half + 1 :], content[:half]):
        file.write_bytes(damaged)
        assert "other bytes" in next(checkpoint_checks.read_checkpoint(here, trial)).text
    checkpoint_checks.delete_checkpoint(here)
    checkpoint_checks.delete_checkpoint(elsewhere)  # where there is none
    assert not file.exists()


def test_a_run_that_would_not_start_is_red(tmp_path: Path) -> None:
    """train.py refuses to begin before a checkpoint that is there."""
    from errors import CheckpointError, DataError
    from options import parse_options
    from store import Location

    flags = [*SMALL, "--store", str(tmp_path), "--output-dir", str(tmp_path)]
    place = Location(str(tmp_path))
    (tmp_path / "step_00000004.ckpt").write_text("cut off")
    start = checkpoint_checks.check_start
    with pytest.raises(DataError, match=r"step_00000004.ckpt; give --resume auto"):
        next(start(place, parse_options("", flags)))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        next(start(place, parse_options("", [*flags, "--resume", "auto"])))
    assert not next(start(place, parse_options("", [*flags, "--overwrite"]))).is_red


def test_a_checkpoint_that_cannot_be_written_is_told_from_a_full_disk(tmp_path: Path) -> None:
    from store import Location

    file = tmp_path / "file"
    file.write_text("no folder")
    trial = SimpleNamespace(state=dict)
    with pytest.raises(OSError, match=r"exists|directory"):
        next(checkpoint_checks.write_checkpoint(Location(str(file)), trial))


def test_any_error_is_a_finding_so_that_no_rank_waits_for_another() -> None:
    def check() -> Iterator[object]:
        yield findings.Finding("first", "well")
        raise KeyError("unforeseen")

    fabric = SimpleNamespace(is_global_zero=True, world_size=1)
    found = findings.collect(fabric, "second", check(), "do this")
    assert names(found) == ["first", "second"]
    assert found[1] == findings.Finding("second", "'unforeseen'", "do this")


def test_a_finding_names_the_ranks_that_have_it() -> None:
    green = findings.Finding("disk", "71 GB free")
    full = findings.Finding("disk", "0 GB free", "make room")
    fuller = replace(full, text="1 GB free")
    assert findings.merge([[green], [green]]) == [green]
    assert findings.merge([[green], [full], [fuller]]) == [replace(full, text="ranks 1, 2: 0 GB free")]
    assert findings.merge([[full], [full]]) == [full]
    assert findings.merge([[green], []]) == [green]  # what rank 0 alone does


# ------------------------------------------------------------------------------- the sums


def test_activations_are_what_the_backward_pass_needs_counted_once() -> None:
    """Linear keeps its input (4 numbers), tanh its output (8); its gradient has 8, too."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    assert memory_sum.count_activations(network, torch.zeros(1, 4)) == 4 * (4 + 8 + 8)
    twice = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    assert memory_sum.count_activations(twice, torch.zeros(1, 4)) == 4 * (4 + 8 + 8)


def test_what_does_not_grow_with_the_batch_is_counted_once() -> None:
    """As under bfloat16, where the weights are cast, once for all samples."""

    class Casting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.weights = torch.nn.Parameter(torch.ones(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(self.factor * x, self.weights.double()).tanh()

    sample = torch.zeros(1, 4, dtype=torch.float64)
    memory = memory_sum.add_up(Casting(), sample, samples=100, ranks=1, waiting=0)
    weights = 8 + 4 * 32
    # The cast weights are the largest tensor, and count twice; each sample keeps 4, 4 and 8 numbers.
    assert memory.fixed == 4 * weights + 2 * 8 * 32
    assert memory.of_a_sample == 8 * (4 + 4 + 8) + sample.nbytes
    several = memory_sum.add_up(Casting(), sample, samples=100, ranks=2, waiting=0)
    assert several.fixed == memory.fixed + weights


def test_the_remedy_for_memory_fits() -> None:
    memory = memory_sum.Memory(fixed=40, samples=100, of_a_sample=1000, waiting=500)
    assert not memory_sum.judge_memory(memory, 112_000, None).is_red
    red = memory_sum.judge_memory(memory, 20_000, None)
    times = int(red.remedy.split(":")[0].split()[-1])
    smaller = replace(memory, samples=math.ceil(memory.samples / times))
    assert not memory_sum.judge_memory(smaller, 20_000, None).is_red
    assert "--shuffle-slots" in memory_sum.judge_memory(memory, 400, None).remedy
    assert "--patch-size" in memory_sum.judge_memory(memory, 1000, None).remedy
    on_gpu = memory_sum.judge_memory(memory, 10**9, 50_000)
    assert "by 3:" in on_gpu.remedy


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("per_block", [1, 8])
def test_the_loader_holds_no_more_blocks_than_are_counted(ranks: int, per_block: int) -> None:
    """Blocks that are alive while a rank goes through the whole of two rounds and more."""
    import weakref

    from block_loader import BlockLoader, BlockOrder
    from steps import StepSampler

    class Block:
        """The samples of a block. Unlike a list, it can be referred to weakly."""

        def __getitem__(self, n: int) -> int:
            return n

    alive: weakref.WeakSet = weakref.WeakSet()
    most = [0]

    def read_block(block: int, rng: np.random.Generator) -> Block:
        samples = Block()
        alive.add(samples)
        return samples

    def make_batch(samples: list) -> int:
        most[0] = max(most[0], len(alive))
        return len(samples)

    batch, slots = 64, 256
    order = BlockOrder(10_000, batch, slots, per_block, seed=0)
    loader = BlockLoader(order, StepSampler(batch, 120, world_size=ranks), read_block, make_batch)
    assert sum(loader) == 120 * batch // ranks
    counted = memory_sum.blocks_waiting(slots // ranks, batch // ranks, per_block, loader.depth, 0, 1)
    assert counted / 2 <= most[0] <= counted


def test_the_limit_of_a_container_or_a_job_counts(tmp_path: Path) -> None:
    """A job within a container: the group's parents count, too, and a cache gives way."""

    def make(folder: Path, limit: str, used: int, cache: int) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")

    make(tmp_path / "container", "1000", used=700, cache=100)
    make(tmp_path / "container/job", "max", used=100, cache=0)
    assert machine_checks.free_in_group(tmp_path, "/container/job") == 400
    make(tmp_path / "container/job", "300", used=100, cache=0)
    assert machine_checks.free_in_group(tmp_path, "/container/job") == 200
    assert machine_checks.free_in_group(tmp_path, "/elsewhere") == math.inf


def test_rates_count_what_is_read(local: list[str]) -> None:
    from fields import split_times
    from store import FieldReader, Location

    reader = FieldReader(Location(local[1]), [V])
    period = split_times(reader.open().time, {"--train-times": ["1982", "1989"]})[0]
    rates = store_checks.measure_rates(reader, period, room=10**9)
    assert [rate.at_once for rate in rates] == [1, 4, 16, 64]
    assert [rate.blocks for rate in rates] == [4, 4, 16, 64]
    assert [rate.requests for rate in rates] == [24, 24, 96, 384]
    few = store_checks.measure_rates(reader, period, room=20 * 37 * 72 * 4)
    assert [rate.at_once for rate in few] == [1, 4, 16]  # more would not fit


def test_an_epoch_costs_what_its_blocks_cost() -> None:
    """Two measurements of six blocks together; 100 blocks of an epoch."""
    rates = [store_checks.Rate(1, 2, 1.0, 4, 4_000_000), store_checks.Rate(4, 4, 1.0, 8, 8_000_000)]
    bucket = SimpleNamespace(thousand_gets=0.5, gigabyte_to_internet=2.0)
    prices = SimpleNamespace(bucket=bucket, currency="EUR")
    finding = store_checks.describe_epoch(rates, 100, 8, prices)
    assert finding.text == (
        "800 patches by 200 requests of 0.2 GB: EUR 0.1 for requests, and 0.4 more if they leave the cloud"
    )
    assert store_checks.describe_rates(rates).text.endswith(": 4 for 90% of the best")


def test_the_memory_was_predicted_within_a_sixth() -> None:
    """In results/, where nothing was red without a fault."""
    rows = book.results("06_whats_next/results/preflight.json")["rows"]
    assert [row["red"] for row in rows if row.get("fault") == "nothing"] == [[]]
    memory = [row for row in rows if row["what"] == "memory"]
    assert len(memory) == 4
    for row in memory:
        assert row["predicted"] == pytest.approx(row["found"], rel=1 / 6)


# ------------------------------------------------------------------------------- thorough


@pytest.mark.thorough
def test_a_bucket_with_a_second_to_the_first_byte_is_measured_so(folder: Path, tmp_path: Path) -> None:
    with buckets.serving(folder, latency_ms=1000) as address:
        place = ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]
        done = programs.run(SCRIPT, *SMALL, *place, "--output-dir", tmp_path)
    assert done.code == 2
    red = red_of(done.out)
    assert list(red) == ["loader"], done.out
    assert "the store gives" in red["loader"][0]
    assert "first byte   after 10" in done.out


@pytest.mark.thorough
def test_a_file_system_that_is_full_is_red(local: list[str], tmp_path: Path) -> None:
    """A file system of 1 MB in a name space of its own, where the system lets users have one."""
    flags = " ".join([*SMALL, *local, "--output-dir", str(tmp_path / "full/run")])
    (tmp_path / "full").mkdir()
    mount = f"mount -t tmpfs -o size=1m none {tmp_path / 'full'}"
    command = f"{mount} && cd {book.ROOT / '06_whats_next'} && python -m preflight {flags}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 2, done.stderr
    red = red_of(done.stdout)
    assert {"disk", "disk of logs", "checkpoint"} <= set(red)
    assert "No space left on device" in red["checkpoint"][0]
