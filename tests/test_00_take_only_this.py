"""The front page's three snippets do what it says of them, as files of their own."""

import importlib
import itertools
from collections import Counter
from types import ModuleType

import programs
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

FOLDER = programs.ROOT / "appendix/take_only_this"
CELLS = torch.arange(24.0, dtype=torch.float64).reshape(8, 3)
MASK = CELLS % 5 > 1  # rows with unequal numbers of cells


@pytest.fixture
def snippet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_batches_do_not_depend_on_workers_ranks_or_a_resume(snippet) -> None:
    batches = snippet("step_sampler").step_batches
    whole = list(batches(10, 4, range(5)))
    assert sorted(itertools.chain(*whole)) == sorted([*range(10)] * 2)  # two epochs, each sample once in each
    assert sorted(whole[0] + whole[1] + whole[2][:2]) == list(range(10))
    in_order = list(itertools.chain(*whole))
    assert in_order[:10] != in_order[10:]
    assert list(batches(10, 4, range(3, 5))) == whole[3:]
    ranks = [list(batches(10, 4, range(5), rank=rank, world_size=3)) for rank in range(3)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks)] == whole
    assert list(batches(10, 4, range(5), seed=1)) != whole
    for workers in (0, 2):
        loader = DataLoader(range(10), batch_sampler=batches(10, 4, range(5)), num_workers=workers)
        assert [batch.tolist() for batch in loader] == whole


def _gradient(rank: int, file: str, folder: str, queue) -> None:
    """What DDP has on this rank after one backward pass over its rows: 3 and 5 of the eight."""
    module = _load(folder)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    rows = slice(0, 3) if rank == 0 else slice(3, 8)
    _backward(module, model, rows)
    if rank == 0:
        queue.put(model.module.weight.grad.item())
    distributed.destroy_process_group()


def _load(folder: str) -> ModuleType:
    import sys

    sys.path.insert(0, folder)
    return importlib.import_module("global_mean")


def _backward(module: ModuleType, model: nn.Module, rows: slice) -> None:
    weight = model.module.weight if isinstance(model, DistributedDataParallel) else model.weight
    nn.init.constant_(weight, 0.5)
    prediction = model(CELLS[rows, :, None])[..., 0]
    module.global_mean((prediction - 1) ** 2, MASK[rows]).backward()


def test_two_unequal_ranks_have_the_gradient_of_one(snippet, tmp_path) -> None:
    alone = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    _backward(snippet("global_mean"), alone, slice(0, 8))
    queue = programs.CONTEXT.SimpleQueue()
    given = (str(tmp_path / "meet"), str(FOLDER), queue)
    torch.multiprocessing.start_processes(_gradient, given, 2, start_method="forkserver")
    expected = (2 * CELLS * (0.5 * CELLS - 1) * MASK).sum() / MASK.sum()
    assert alone.weight.grad.item() == pytest.approx(expected.item(), rel=1e-12)
    assert queue.get() == pytest.approx(expected.item(), rel=1e-12)


def test_a_mask_of_any_type_counts_exactly_and_an_empty_one_teaches_nothing(snippet) -> None:
    global_mean = snippet("global_mean").global_mean
    losses = torch.full((70_000,), 2.0)
    for dtype in (torch.bool, torch.int64, torch.float16, torch.float32):
        assert global_mean(losses, torch.ones(70_000, dtype=dtype)).item() == 2
    assert global_mean(losses, torch.zeros(70_000, dtype=torch.bool)).item() == 0


def test_wait_and_work_are_told_apart(snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    module = snippet("measure_wait")
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def load():
        for number in range(3):
            now[0] += 2
            yield number

    seconds = Counter()
    for _ in module.measure_wait(load(), seconds):
        now[0] += 6
    assert seconds == {"wait": 6, "work": 18}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_is_short(path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 14
