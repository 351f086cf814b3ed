"""Chapter 4: what goes wrong in data pipelines, each shown failing, and not failing with the cure."""

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
FORK = {"num_workers": 1, "multiprocessing_context": "fork"}


def look_at(entries, pipe) -> None:
    before = psutil.Process().memory_full_info().uss
    for entry in entries:
        assert entry is not None
    pipe.send((psutil.Process().memory_full_info().uss - before) / 1e6)


def growth(entries) -> float:
    """MB that a forked process has to itself, and shared before, when it has looked at every entry."""
    gc.collect()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=look_at, args=(entries, theirs))
    process.start()
    theirs.close()  # so that the end of the process ends the waiting
    grown = ours.recv()
    process.join()
    return grown


def test_a_list_of_objects_is_copied_by_being_read_and_an_array_is_not() -> None:
    """Mode 8: to look at a Python object writes its count of references, on a page that was shared."""
    names = [f"2020-01-01T{number}" for number in range(500_000)]
    assert growth(names) > 20 > 4 * growth(np.array(names))


def test_tensors_that_are_kept_keep_files_open_and_copies_do_not() -> None:
    """Mode 28: on Linux each tensor that a worker sends is a file; a list of batches runs out of them."""

    def keep(copy: bool) -> int:
        loader, kept = DataLoader(torch.arange(400), batch_size=1, **FORK), []
        for batch in loader:
            kept.append(batch.clone() if copy else batch)
        return len(kept)

    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        pytest.skip("this system shares tensors otherwise")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 100, hard))
    try:
        with pytest.raises((RuntimeError, OSError), match=r"(?i)ancdata|too many open files"):
            keep(copy=False)
        gc.collect()
        assert keep(copy=True) == 400
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Numbers(IterableDataset):
    """The numbers 0 to 99, of which each worker gives its share."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 100, worker.num_workers))

    def __len__(self) -> int:
        return 100


def test_drop_last_drops_in_every_worker_and_a_sampler_of_steps_nothing() -> None:
    """Mode 33: four workers have 25 each, and of 25 a batch size of 16 keeps 16; len still says 6 batches."""
    loader = DataLoader(
        Numbers(), batch_size=16, drop_last=True, num_workers=4, multiprocessing_context="fork"
    )
    assert (len(loader), sum(map(len, loader))) == (6, 64)
    steps = [range(first, first + 16) for first in range(0, 96, 16)]
    options = {"num_workers": 4, "multiprocessing_context": "fork"}
    found = [batch.tolist() for batch in DataLoader(torch.arange(100), batch_sampler=steps, **options)]
    assert found == [[*step] for step in steps]


class Processes(Dataset):
    """Items that say which process made them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_end_with_an_epoch_unless_they_are_told_to_stay() -> None:
    """Mode 26; train.py's loader has no epochs: one iterator lasts for the whole run."""

    def pids(**options) -> list[set[int]]:
        loader = DataLoader(Processes(), **FORK, **options)
        return [{int(pid) for pid in loader} for _ in range(2)]

    first, second = pids()
    assert first != second
    first, second = pids(persistent_workers=True)
    assert first == second


class Named(Processes):
    def __getitem__(self, index: int) -> int:
        with record_function("the work of a sample"):
            return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_trace_shows_the_loader_only_if_it_works_in_the_same_process(workers: int) -> None:
    """Mode 35: torch's profiler sees the waiting for a worker, not what the worker does; py-spy does."""
    loader = DataLoader(Named(), **(FORK if workers else {}))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert len(list(loader)) == 4
    names = {event.key for event in trace.key_averages()}
    assert any("DataLoader" in name for name in names)
    assert ("the work of a sample" in names) == (workers == 0)


def count_threads(pipe) -> None:
    pipe.send(torch.get_num_threads())


class Threads(Processes):
    """Items that say with how many threads torch computes where they are made."""

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_a_worker_computes_with_one_thread_and_a_process_of_your_own_with_all(monkeypatch) -> None:
    """Mode 20: a DataLoader tells torch so in its workers; who starts processes has to do it.

    How many threads "all" are is told here, since torch takes one for each core that it finds: on a
    machine with one core there would be nothing to see. Both variables, because Dask writes them:
    a process that has started a LocalCluster hands "1" to every process that it starts later.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert next(iter(DataLoader(Threads(), **spawned))).tolist() == [1]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=count_threads, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == 3
    process.join()


def test_dask_leaves_one_thread_to_the_processes_that_are_started_after_it() -> None:
    """Mode 20: LocalCluster writes it into the environment of the process that starts it, for good."""
    program = """if __name__ == "__main__":
    import os
    from distributed import LocalCluster
    os.environ.pop("OMP_NUM_THREADS", None)
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None):
        pass
    print(os.environ["OMP_NUM_THREADS"])
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(program)
        script.flush()
        done = subprocess.run([sys.executable, script.name], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n", done.stderr
