"""Chapter 6: what preflight.py finds before a run: each planted fault is red, with its remedy."""

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

SCRIPT = "06_whats_next/preflight.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --shuffle-slots 12 --patches-per-block 2".split()
V = "10m_v_component_of_wind"


@pytest.fixture(scope="module", autouse=True)
def more_rooms(rooms) -> Iterator[None]:
    global findings, machine_checks, memory_sum, preflight, rank_checks, store_checks, training_checks
    import findings
    import machine_checks
    import memory_sum
    import preflight
    import rank_checks
    import store_checks
    import training_checks

    yield


@pytest.fixture(scope="module")
def with_nan(folder: Path) -> Path:
    """A store in which one value of one training map is NaN."""
    store = folder / "winds/nan"
    shutil.copytree(folder / "winds/whole", store)
    zarr.open_group(store)[V][5, 10, 10] = np.nan
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


EVERY = ["versions", "device", "open files", "disk", "disk of logs", "checkpoint", "restore", "store"]
EVERY += ["first byte", "bandwidth", "epoch", "values", "memory", "one batch", "loader"]


def test_a_run_that_is_well_is_green_and_nothing_is_left_behind(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """But for the time that a batch takes here, which is made up."""
    monkeypatch.setattr(preflight, "measure_pace", lambda *_: training_checks.Pace(9, 0.001, 0.1))
    checkpoint = tmp_path / "checkpoints/step_00000004.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("of a run")
    found = preflight.main([*SMALL, *local, "--output-dir", str(tmp_path)])
    assert names(found) == EVERY
    assert [finding for finding in found if finding.is_red] == []
    assert "all green" in capsys.readouterr().out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [checkpoint]


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


def test_with_missing_mask_a_map_may_have_nan(with_nan: Path) -> None:
    dataset = SimpleNamespace(missing="mask", valid=np.ones((1, 4, 4), bool))
    maps = np.zeros((2, 2, 4, 4))
    maps[1, 0, 2, 2] = np.nan
    assert not training_checks.find_bad(maps, dataset).any()
    dataset.missing = "refuse"
    assert np.argwhere(training_checks.find_bad(maps, dataset)).tolist() == [[1, 0, 2, 2]]
    dataset.valid[0, 2, 2] = False  # masked at all times
    assert not training_checks.find_bad(maps, dataset).any()
    maps[0, 0, 0, 0] = np.inf
    dataset.missing = "mask"
    assert np.argwhere(training_checks.find_bad(maps, dataset)).tolist() == [[0, 0, 0, 0]]


def test_a_wrong_store_is_red_and_ends_what_needs_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        preflight.main([*SMALL, "--store", str(folder), "--output-dir", str(tmp_path)])
    assert end.value.code == 2
    red = red_of(capsys.readouterr().out)
    assert list(red) == ["store"]
    assert "--endpoint" in red["store"][1]


def test_a_bucket_that_does_not_answer_is_found_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error has no remedy of its own."""
    from store import FieldReader, Location

    address = f"http://127.0.0.1:{programs.free_port()}"
    place = Location("s3://winds/whole", address, anonymous=True, retry_timeout=1)

    def check() -> Iterator[object]:
        yield FieldReader(place, [V]).open()

    found = findings.collect("store", check(), preflight.OTHER_STORE)
    assert names(found) == ["store"]
    assert found[0].remedy == preflight.OTHER_STORE
    assert preflight.RETRY_TIMEOUT <= 10


def test_too_large_a_batch_is_red_before_it_is_read(
    local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With the micro-batches of its remedy, it is green."""
    monkeypatch.setattr(preflight, "free_memory", lambda ranks: 20_000_000)
    monkeypatch.setattr(preflight, "check_machine_and_disks", lambda *_: [])
    flags = [*SMALL, *local, "--output-dir", str(tmp_path), "--batch-size", "60", "--shuffle-slots", "60"]
    with pytest.raises(SystemExit):
        preflight.main(flags)
    printed = capsys.readouterr().out
    red = red_of(printed)
    assert list(red) == ["memory"], printed
    assert "one batch" not in printed
    times = red["memory"][1].split()[1]
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
    assert "hard limit" in machine_checks.judge_open_files(now, 10, 10, 0).remedy
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
    assert "green  clocks" in done[0].out
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
    assert store_checks.judge_first_byte([0.03] * 95 + [8.0] * 5).is_red


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
    from checkpoints import CheckpointFolder
    from lightning.fabric import Fabric
    from options import parse_options

    options = parse_options("", [*SMALL, *local, "--output-dir", str(tmp_path)])
    fabric = Fabric(accelerator="cpu", devices=1)
    trial = training_checks.make_trial(preflight.make_network(options), fabric)
    here = CheckpointFolder(str(tmp_path / "here"))
    written = list(training_checks.write_checkpoint(here, trial))
    assert not written[0].is_red
    assert not next(training_checks.read_checkpoint(here, trial)).is_red
    elsewhere = CheckpointFolder(str(tmp_path / "elsewhere"))
    assert "share" in next(training_checks.read_checkpoint(elsewhere, trial)).remedy
    file = here.path / training_checks.NAME
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "other bytes" in next(training_checks.read_checkpoint(here, trial)).text


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


def test_the_remedy_for_memory_fits() -> None:
    memory = memory_sum.Memory(parameters=10, samples=100, of_a_sample=1000, waiting=500)
    assert not memory_sum.judge_memory(memory, 112_000, None).is_red
    red = memory_sum.judge_memory(memory, 20_000, None)
    times = int(red.remedy.split()[0])
    smaller = replace(memory, samples=math.ceil(memory.samples / times))
    assert not memory_sum.judge_memory(smaller, 20_000, None).is_red
    assert "--shuffle-slots" in memory_sum.judge_memory(memory, 400, None).remedy
    assert "--patch-size" in memory_sum.judge_memory(memory, 1000, None).remedy
    on_gpu = memory_sum.judge_memory(memory, 10**9, 50_000)
    assert on_gpu.remedy.startswith("3 times")


def test_an_epoch_costs_what_its_blocks_cost() -> None:
    """Two measurements of six blocks together; 100 blocks of an epoch."""
    rates = [store_checks.Rate(1, 2, 1.0, 4, 4_000_000), store_checks.Rate(4, 4, 1.0, 8, 8_000_000)]
    bucket = SimpleNamespace(thousand_gets=0.5, gigabyte_to_internet=2.0)
    prices = SimpleNamespace(bucket=bucket, currency="EUR")
    finding = store_checks.describe_epoch(rates, 100, 8, prices)
    assert finding.text == ("800 patches by 200 requests of 0.2 GB: EUR 0.1, and 0.4 if they leave the cloud")
    assert store_checks.describe_rates(rates).text.endswith("4 are enough")


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
    command = f"{mount} && cd {book.ROOT / '06_whats_next'} && python preflight.py {flags}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 2, done.stderr
    red = red_of(done.stdout)
    assert {"disk", "disk of logs", "checkpoint"} <= set(red)
    assert "No space left on device" in red["checkpoint"][0]
