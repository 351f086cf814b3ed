"""What goes wrong at this scale, done wrong and done right: the numbers are those of troubleshooting.md.

    uv run python symptoms.py              # what one machine without a GPU shows within seconds
    uv run python symptoms.py 5 13 32      # some of them

You should see, for each, what is printed or counted when it is done wrong, and the same after the cure. Number 5
has no cure: what you see is how to find it. Most go wrong without an error: only a figure shows it.
"""

import argparse
import logging
import multiprocessing
import operator
import os
import pickle
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

# Lightning, xarray and Zarr are imported where they are used, for each worker imports this file anew.

# A fork beside threads may hang: number 2.
START = "spawn" if sys.platform == "win32" else "forkserver"


def in_workers(dataset: Dataset, workers: int = 2, **options) -> DataLoader:
    """A loader with workers, which have of this process only what is pickled."""
    modules = ["torch.nn.parallel"]  # once, for all workers
    multiprocessing.set_forkserver_preload(modules)
    options["multiprocessing_context"] = START
    return DataLoader(dataset, num_workers=workers, **options)


class Samples(Dataset):
    """`make(index)` for each index."""

    def __init__(self, make: Callable, items: int = 1):
        self.make, self.items = make, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> float:
        return self.make(index)


class Stream(IterableDataset):
    """The numbers from 0, divided among the workers."""

    def __init__(self, items: int):
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(worker.id, self.items, worker.num_workers)


# ----------------------------------------------------------------------------------------------- the data


def missing_chunk() -> tuple[str, str]:
    """The mean of a Zarr array of ones, of which a chunk's object is gone; and a count of its chunks"""
    import zarr

    with tempfile.TemporaryDirectory() as folder:
        field = zarr.create_array(folder, shape=(4, 8), chunks=(1, 8), dtype="float32")
        field[:] = 1
        Path(folder, "c/2/0").unlink()
        mean = field[:].mean()
        return (
            f"{mean}, no error",
            f"{field.nchunks_initialized} of {field.nchunks} chunks exist",
        )


def packed_integers() -> tuple[str, str]:
    """The type of a variable that is stored as int16 with a scale, as xarray reads it; and cast at once"""
    import xarray

    field = xarray.Dataset({"wind": ("x", np.ones(8, "float32"))})
    packed = {"wind": {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -1}}
    with tempfile.TemporaryDirectory() as folder:
        field.to_zarr(folder, encoding=packed, consolidated=False)
        read = xarray.open_zarr(folder, chunks=None, consolidated=False)["wind"].load()
    return str(read.dtype), str(read.astype("float32").dtype)


def array_kept() -> tuple[str, str]:
    """What xarray keeps of a variable of 4 MB after `.values.mean()`; and with `cache=False`"""
    import xarray

    def kept(**options) -> str:
        dataset = xarray.open_dataset(
            folder, engine="zarr", chunks=None, consolidated=False, **options
        )
        tracemalloc.start()
        try:
            dataset["wind"].values.mean()
            arrays = tracemalloc.DomainFilter(
                inclusive=True, domain=np.lib.tracemalloc_domain
            )
            held = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        finally:
            tracemalloc.stop()
        return f"{sum(trace.size for trace in held) / 1e6:.0f} MB"

    with tempfile.TemporaryDirectory() as folder:
        field = xarray.Dataset({"wind": ("x", np.ones(1_000_000, "float32"))})
        field.to_zarr(folder, consolidated=False)
        return kept(), kept(cache=False)


# -------------------------------------------------------------------------------------- order and workers


def dropped_by_each_worker() -> tuple[str, str]:
    """What drop_last leaves of a stream of 100 in batches of 16, with four workers; and of a map-style dataset"""

    def left(dataset: Dataset) -> str:
        loader = in_workers(dataset, 4, batch_size=16, drop_last=True)
        return (
            f"{sum(len(batch) for batch in loader)} samples, len(loader) {len(loader)}"
        )

    return left(Stream(100)), left(range(100))


def draw(generator: np.random.Generator | None, index: int) -> float:
    return (generator or np.random.default_rng([0, index])).random()


def generator_copied() -> tuple[str, str]:
    """Different random numbers in 8 samples of two workers, the generator stored; and made for each sample"""

    def different(generator: np.random.Generator | None) -> str:
        loader = in_workers(Samples(partial(draw, generator), 8))
        numbers = {number.item() for number in loader}
        return f"{len(numbers)} of 8"

    return different(np.random.default_rng(0)), different(None)


def attribute_frozen() -> tuple[str, str]:
    """The epoch that persistent workers see, set as an attribute of the dataset; and carried by the index"""

    def seen(by_attribute: bool) -> str:
        dataset, indices, found = Samples(abs), [0], []
        loader = in_workers(
            dataset, 1, batch_size=None, sampler=indices, persistent_workers=True
        )
        for epoch in range(3):
            if by_attribute:
                # The workers have a copy since epoch 0.
                dataset.make = partial(operator.add, epoch)
            else:
                indices[0] = epoch
            found += list(loader)
        return str(found)

    return seen(by_attribute=True), seen(by_attribute=False)


def resumed_in_an_epoch() -> tuple[str, str]:
    """Of 32 samples, stopped after 16 and started again: those never seen; and with a sampler that goes on"""

    def never_seen(first: dict, second: dict) -> str:
        seen = set()
        for options in (first, second):
            loader = DataLoader(range(32), batch_size=None, **options)
            seen |= set(islice(loader, 16))
        return f"{32 - len(seen)} of 32"

    def shuffled() -> dict:
        generator = torch.Generator().manual_seed(0)
        return {"shuffle": True, "generator": generator}

    order = torch.randperm(32).tolist()
    goes_on = never_seen({"sampler": order}, {"sampler": order[16:]})
    return never_seen(shuffled(), shuffled()), goes_on


def descriptors_kept() -> tuple[str, str]:
    """64 batches of a worker kept in a list, where 60 more files may be opened; and copies of them"""
    import resource  # Unix only

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def keep(copy: Callable) -> str:
        kept, batches = [], iter(in_workers(torch.zeros(64, 1), 1))
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, limits[1])
        )
        try:
            kept += map(copy, batches)
        except (RuntimeError, OSError) as error:
            return str(error).partition(". ")[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return f"{len(kept)} batches"

    return keep(lambda batch: batch), keep(torch.clone)


def lambda_pickled() -> tuple[str, str]:
    """The first sample of a worker, of a dataset that holds a lambda; and one that holds a module's function"""

    def first(make: Callable) -> str:
        try:
            return f"sample {next(iter(in_workers(Samples(make), 1, batch_size=None)))}"
        except (AttributeError, pickle.PicklingError) as error:
            return str(error)

    return first(lambda index: index), first(abs)


# ---------------------------------------------------------------------------------- ranks, losses and steps


def padded_metric() -> tuple[str, str]:
    """The mean of 0 to 8 (it is 4) over two ranks: mean of the ranks' means, padded; and from sums, unpadded"""
    means = []
    total = 0
    count = 0
    for rank in range(2):
        padded = list(DistributedSampler(range(9), 2, rank, shuffle=False))
        means.append(np.mean(padded))
        own = range(rank, 9, 2)
        total += sum(own)
        count += len(own)
    return f"{np.mean(means):.1f}", f"{total / count:.1f}"


def mean_of_means() -> tuple[str, str]:
    """A gradient (it is 1.8) from micro-batches of 1 and 9 valid cells: each divided by its own; and by all"""
    cells, valid = (
        torch.tensor([[0.0], [1.0]]),
        torch.arange(10) < torch.tensor([[1], [9]]),
    )

    def gradient(counts: list[int]) -> str:
        weight = torch.zeros(1, requires_grad=True)
        for cell, seen, count in zip(cells, valid, counts):
            (((cell - weight) ** 2 * seen).sum() / count).backward()
        return f"{-weight.grad.item():.1f}"

    return gradient([2 * 1, 2 * 9]), gradient([1 + 9] * 2)


def unused_parameters() -> tuple[str, str]:
    """Two steps of DDP with a layer that the loss does not use; and without it"""

    def steps(model: nn.Module) -> str:
        try:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            return str(error).partition(". ")[0]
        return "two steps"

    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrong, right = nn.Linear(2, 1), nn.Linear(2, 1)
        wrong.unused = nn.Linear(2, 1)
        return steps(DistributedDataParallel(wrong)), steps(
            DistributedDataParallel(right)
        )
    finally:
        distributed.destroy_process_group()


def fit(max_steps: int, scheduler: dict, checkpoint: str | None = None):
    """Train one weight with Lightning, the learning rate rising for 10 steps or epochs. Returns the Trainer."""
    import lightning

    class OneWeight(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": warm_up} | scheduler,
            }

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(
        [
            "logger",
            "enable_progress_bar",
            "enable_model_summary",
            "enable_checkpointing",
        ],
        False,
    )
    trainer = lightning.Trainer(accelerator="cpu", max_steps=max_steps, **quiet)
    trainer.fit(OneWeight(), DataLoader(torch.ones(20, 1)), ckpt_path=checkpoint)
    return trainer


def warm_up_per_epoch() -> tuple[str, str]:
    """The learning rate after 10 steps of a warm-up to 1 over 10; and with `"interval": "step"`"""
    trainers = fit(10, {}), fit(10, {"interval": "step"})
    return tuple(
        f"{trainer.optimizers[0].param_groups[0]['lr']:.2f}" for trainer in trainers
    )


def resumed_after_the_end() -> tuple[str, str]:
    """Steps that a run of max_steps=4 takes when it is resumed at its end; and with max_steps=8"""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/last.ckpt"
        fit(4, {}).save_checkpoint(checkpoint)
        return tuple(
            f"{fit(steps, {}, checkpoint).global_step - 4} steps" for steps in (4, 8)
        )


SYMPTOMS: dict[int, Callable[[], tuple[str, str]]] = {
    5: missing_chunk,
    12: warm_up_per_epoch,
    13: padded_metric,
    14: resumed_in_an_epoch,
    15: attribute_frozen,
    16: generator_copied,
    19: unused_parameters,
    27: lambda_pickled,
    28: descriptors_kept,
    32: mean_of_means,
    33: dropped_by_each_worker,
    36: packed_integers,
    37: array_kept,
    38: resumed_after_the_end,
}


FOUND_ONLY = {5}  # the second way shows the damage and does not mend it


def main(argv: list[str] | None = None) -> list[dict]:
    """Provoke and cure the symptoms that were asked for; print and return what each showed."""
    rows = []
    for number in parse(argv):
        provoke = SYMPTOMS[number]
        what = provoke.__doc__
        # Most warnings are about runs as small as these.
        with warnings.catch_warnings(action="ignore"):
            symptom, cured = provoke()
        row = {"number": number, "what": what, "symptom": symptom, "cured": cured}
        rows.append(row)
        label = "found" if number in FOUND_ONLY else "cured"
        print(f"{number:>2}  {what}")
        print(f"    wrong: {symptom}")
        print(f"    {label}: {cured}", flush=True)
    return rows


def parse(argv: list[str] | None) -> list[int]:
    """The numbers to provoke; exits with code 2 and a remedy if there is no such one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(map(str, SYMPTOMS))
    text = f"of {known}; all if none"
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help=text)
    numbers = parser.parse_args(argv).numbers
    for number in numbers:
        if number not in SYMPTOMS:
            remedy = f"not one that this script provokes; choose from {known}"
            parser.error(f"NUMBER {number}: {remedy}")
    return numbers or list(SYMPTOMS)


if __name__ == "__main__":
    main()
