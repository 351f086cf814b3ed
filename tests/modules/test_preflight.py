"""preflight/: what each check calls red, and the sums behind it."""

import errno
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import block_loader
import numpy as np
import pytest
import torch
from block_loader import BlockLoader
from block_order import BlockOrder, BlockRead
from datamodule import count_readers
from fields import split_times
from location import Location
from made_up_winds import make_winds, write
from numbered_blocks import AtOnce
from preflight import checkpoints, findings, machine, memory, patches, ranks, store, training
from preflight.findings import Finding
from steps import StepSampler
from store import FieldReader

FULL = ("--checkpoint-dir", "x", 199, 200)
JUDGES = {  # what is judged, a case that is well, one that is not, and what is said then
    "disk": (machine.judge_disk, ("", "x", 200, 200), FULL, "give another --checkpoint-dir"),
    "GPU": (machine.judge_gpu, ("", 79e9, 80e9), ("", 40e9, 80e9), "nvidia-smi"),
    "shared memory": (machine.judge_shared_memory, (64e6, 64e6), (64e6, 500e6), "--shm-size 1.0g"),
    "clocks": (ranks.compare_clocks, ([9.0, 9.2],), ([9.0, 9.2, 6.0],), "rank 2 is behind rank 1"),
    "first byte": (store.judge_first_byte, ([0.3] * 100,), ([0.03] * 99 + [8.0],), "nearer bucket"),
    "loss": (training.judge_overfit, ([1, 0.7, 0.49], 6e-3), ([1, 0.9, 0.51], 6e-3), "learning-rate 0.006"),
    "NaN": (training.judge_overfit, ([1, 0.7, 0.49], 1), ([1, 30, math.nan], 1), "step 2 on; give less than"),
}


@pytest.mark.parametrize("case", JUDGES)
def test_what_would_stop_a_run_is_red_and_what_would_not_is_green(case: str) -> None:
    judge, well, bad, said = JUDGES[case]
    assert not judge(*well).is_red
    found = judge(*bad)
    assert found.is_red
    assert said in f"{found.text}; {found.remedy}"


def test_a_limit_on_open_files_is_red() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = machine.count_open_files()[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 100, hard))
    try:
        finding = machine.judge_open_files(*machine.count_open_files(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.remedy.startswith("ulimit -n ")
    enough = int(finding.remedy.split()[2])
    assert not machine.judge_open_files(now, enough, enough, 0).is_red
    assert machine.judge_open_files(now, enough, enough, workers=100).is_red
    assert f"--ulimit nofile={enough}" in machine.judge_open_files(now, 10, 10, 0).remedy


def test_the_room_is_that_of_the_disk_where_a_folder_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path: 199}
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert not machine.check_disk("--output-dir", str(tmp_path / "a/b"), 199).is_red
    assert machine.check_disk("--output-dir", str(tmp_path / "a/b"), 200).is_red


def test_the_limit_of_a_container_or_a_job_counts(tmp_path: Path) -> None:
    """A job within a container: the group's parents count, too, and a cache gives way."""
    (tmp_path / "container/job").mkdir(parents=True)
    for group, used, cache in (("container", 700, 100), ("container/job", 100, 0)):
        (tmp_path / group / "memory.current").write_text(f"{used}\n")
        (tmp_path / group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    (tmp_path / "container/memory.max").write_text("1000\n")
    for limit, free in (("max", 400), ("300", 200)):
        (tmp_path / "container/job/memory.max").write_text(f"{limit}\n")
        assert machine.free_in_group(tmp_path, "/container/job") == free
    assert machine.free_in_group(tmp_path, "/elsewhere") == math.inf


# ------------------------------------------------------------------------------------------ findings


GREEN = Finding("disk", "71 GB free")


def test_any_error_is_a_finding_so_that_no_rank_waits_for_another() -> None:
    def check() -> Iterator[Finding]:
        yield GREEN
        raise KeyError("unforeseen")

    fabric = SimpleNamespace(is_global_zero=True, world_size=1)
    found = findings.collect(fabric, "second", check(), "do this")
    assert found == [GREEN, Finding("second", "'unforeseen'", "do this")]


def test_a_finding_names_the_ranks_that_have_it() -> None:
    full = Finding("disk", "0 GB free", "make room")
    fuller = replace(full, text="1 GB free")
    assert findings.merge([[GREEN], [GREEN]]) == [GREEN]
    assert findings.merge([[GREEN], [full], [fuller]]) == [replace(full, text="ranks 1, 2: 0 GB free")]
    assert findings.merge([[full], [full]]) == [full]
    assert findings.merge([[GREEN], []]) == [GREEN]  # what rank 0 alone does


# --------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_that_is_not_written_or_read_back_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = training.make_trial(torch.nn.Linear(100, 100), SimpleNamespace(device="cpu"), 0.01)
    here, elsewhere = (Location(str(tmp_path / name)) for name in ("here", "elsewhere"))
    assert not next(checkpoints.write_checkpoint(here, trial)).is_red
    assert not next(checkpoints.read_checkpoint(here, trial)).is_red
    assert "share" in next(checkpoints.read_checkpoint(elsewhere, trial)).remedy
    file = Path(here.url, checkpoints.NAME)
    content = bytearray(file.read_bytes())
    half = len(content) // 2
    content[half] ^= 1
    for damaged in (content, content[:half]):
        file.write_bytes(damaged)
        assert "other bytes" in next(checkpoints.read_checkpoint(here, trial)).text
    checkpoints.delete_checkpoint(here)
    checkpoints.delete_checkpoint(elsewhere)  # where there is none
    assert not file.exists()

    def write(*_) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checkpoints, "open_checkpoints", lambda place: SimpleNamespace(write=write))
    assert "make room" in next(checkpoints.write_checkpoint(here, trial)).remedy


# ---------------------------------------------------------------------------------- data, and the pace


def test_with_missing_mask_a_map_may_have_nan_and_never_infinity() -> None:
    maps = np.zeros((2, 2, 4, 4))
    maps[1, 0, 2, 2] = np.nan
    valid = np.ones((1, 4, 4), bool)

    def bad(missing: str) -> list:
        return np.argwhere(patches.find_bad(maps, SimpleNamespace(missing=missing, valid=valid))).tolist()

    assert (bad("mask"), bad("refuse")) == ([], [[1, 0, 2, 2]])
    valid[0, 2, 2] = False  # masked at all times
    maps[0, 0, 0, 0] = np.inf
    assert bad("mask") == bad("refuse") == [[0, 0, 0, 0]]


def test_maps_of_the_test_are_searched_too(tmp_path: Path) -> None:
    winds = make_winds()[["u"]]
    winds.u[-1, 3, 4] = np.nan
    reader = FieldReader(Location(str(write(tmp_path / "winds.zarr", winds))), ["u"])
    makers = {}
    for name, year in {"blocks": "1983", "validation": "1984", "test": "1985"}.items():
        period = split_times(reader.open().time, {"": [year, year]})[0]
        maker = SimpleNamespace(missing="refuse", valid=np.array(True), period=period, variables=["u"])
        makers[name] = SimpleNamespace(maker=maker)
    finding = patches.check_values(SimpleNamespace(data=SimpleNamespace(reader=reader), **makers))
    assert finding.text.startswith(f"u on {str(winds.time.values[-1])[:10]}")


def test_rates_count_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """26 maps to train on, in 6 chunks each."""
    monkeypatch.setattr(store, "BUDGET", math.inf)
    winds = make_winds()[["v"]].isel(time=slice(26))
    path = write(tmp_path / "winds.zarr", winds, chunks=(1, 10, 14))
    reader = FieldReader(Location(str(path)), ["v"])
    period = split_times(reader.open().time, {"": ["1982", "1982"]})[0]
    rates = store.measure_rates(reader, period, room=10**9)
    found = [(rate.at_once, rate.blocks, rate.requests) for rate in rates]
    assert found == [(1, 4, 24), (4, 4, 24), (16, 16, 96), (64, 64, 384)]
    few = store.measure_rates(reader, period, room=20 * winds.v[0].nbytes)
    assert [rate.at_once for rate in few] == [1, 4, 16]  # more would not fit


def test_an_epoch_costs_what_its_blocks_cost() -> None:
    """Two measurements of six blocks together; 100 blocks of an epoch."""
    rates = [store.Rate(1, 2, 1.0, 4, 4_000_000), store.Rate(4, 4, 1.0, 8, 8_000_000)]
    bucket = SimpleNamespace(thousand_gets=0.5, gigabyte_to_internet=2.0)
    finding = store.describe_epoch(rates, 100, 8, SimpleNamespace(bucket=bucket, currency="EUR"))
    assert finding.text == (
        "800 patches by 200 requests of 0.2 GB: EUR 0.1 for requests, and 0.4 more if they leave the cloud"
    )
    assert store.describe_rates(rates).text.endswith(": 4 for 90% of the best")


def test_a_store_that_is_too_slow_is_red_and_the_remedy_is_enough() -> None:
    """A step of 0.1 s takes 8 samples of 1 MB; the store gives 20 MB/s."""
    pace = training.Pace(32, waiting=0.3, working=0.1)
    slow = training.judge_pace(pace, 8e6, bandwidth=20e6, patches_per_block=8)
    assert "80.0 MB/s, and the store gives 20.0" in slow.text
    assert "nearer store" in slow.remedy
    assert "--patches-per-block 32" in slow.remedy  # a quarter of the bytes
    fast = training.judge_pace(pace, 8e6, bandwidth=200e6, patches_per_block=8)
    assert "--num-workers" in fast.remedy
    for green in (replace(pace, steps=5), replace(pace, waiting=0.005)):
        assert not training.judge_pace(green, 8e6, 20e6, 8).is_red


def test_the_pace_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up clock: a batch comes after 3 s, and a step takes 1 s. The start is left out."""
    now = [0.0]
    monkeypatch.setattr(training, "perf_counter", lambda: sum(now))
    monkeypatch.setattr(training, "BUDGET", math.inf)

    def load() -> Iterator[int]:
        for number in range(1000):
            now.append(3 if number >= training.FIRST_STEPS else 50)
            yield number

    pace = training.measure_pace(SimpleNamespace(step=lambda batch: now.append(1)), load())
    assert pace == training.Pace(training.STEPS, 3.0, 1.0)


# -------------------------------------------------------------------------------------------- memory


class Casting(torch.nn.Module):
    """Casts its weights, as under bfloat16, and uses its answer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.weights = torch.nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = torch.nn.functional.linear(self.factor * x, self.weights.double()).tanh()
        return answer * answer


def test_what_the_backward_pass_needs_is_counted_once_and_what_does_not_grow_with_the_batch() -> None:
    sample = torch.zeros(1, 4, dtype=torch.float64)
    one = memory.add_up(Casting(), sample, samples=100, ranks=1, waiting=0)
    weights = 8 + 4 * 32
    # The cast weights are the largest tensor, and count twice; each sample keeps 4, 4 and 8 numbers.
    assert one.fixed == 4 * weights + 2 * 8 * 32
    assert one.of_a_sample == 8 * (4 + 4 + 8) + sample.nbytes
    several = memory.add_up(Casting(), sample, samples=100, ranks=2, waiting=0)
    assert several.fixed == one.fixed + weights


def test_the_remedy_for_memory_fits() -> None:
    needed = memory.Memory(fixed=40, samples=100, of_a_sample=1000, waiting=500)
    assert not memory.judge_memory(needed, 112_000, None).is_red
    red = memory.judge_memory(needed, 20_000, None)
    times = int(red.remedy.split(":")[0].split()[-1])
    smaller = replace(needed, samples=math.ceil(needed.samples / times))
    assert not memory.judge_memory(smaller, 20_000, None).is_red
    assert "--shuffle-slots" in memory.judge_memory(needed, 400, None).remedy
    assert "--patch-size" in memory.judge_memory(needed, 1000, None).remedy
    assert "by 3:" in memory.judge_memory(needed, 10**9, 50_000).remedy  # on a GPU


class Block:
    """The samples of a block. Unlike a list, it can be referred to weakly."""

    def __init__(self, number: int):
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, n: int) -> int:
        return n


@pytest.mark.parametrize("case", [(64, 1, 1, 0), (256, 2, 8, 0), (256, 1, 8, 4), (256, 1, 8, 3)])
def test_the_loader_holds_no_more_blocks_than_are_counted(case: tuple, monkeypatch) -> None:
    """Blocks that are alive while a rank goes through the whole of two rounds and more, in all of its workers."""
    slots, ranks, per_block, workers = case
    monkeypatch.setattr(block_loader, "ThreadPoolExecutor", AtOnce)
    order = BlockOrder(10_000, 64, slots=slots, patches_per_block=per_block, seed=0)
    most = 0
    for worker in range(max(1, workers)):
        place = SimpleNamespace(id=worker, num_workers=workers) if workers else None
        monkeypatch.setattr(block_loader, "get_worker_info", lambda place=place: place)
        alive: weakref.WeakSet = weakref.WeakSet()

        def read_block(read: BlockRead, alive=alive, number=per_block) -> Block:
            samples = Block(number)
            alive.add(samples)
            return samples

        batches = StepSampler(64, 120, world_size=ranks)
        loader = BlockLoader(order, batches, read_block, lambda samples, alive=alive: len(alive))
        most += max(loader)
    readers = count_readers(workers, order, 1)
    counted = memory.blocks_waiting(
        slots // ranks, 64 // ranks, per_block, loader.blocks_ahead, workers, readers
    )
    assert 0.6 * counted <= most <= counted
