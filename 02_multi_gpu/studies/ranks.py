"""The processes that measure together: how they start, and what each of them has."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from time import perf_counter
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from tqdm import tqdm

from data import PatchDataset
from ending import silence
from errors import DataError, refuse
from model import Batch, UNet
from options import START_METHOD, Options
from studies.settings import Settings
from task import make_data
from train_ddp_by_hand import choose_device, move
from workers import PRELOADED

LIMIT = timedelta(minutes=30)  # rank 0 may be busy for long


class Rank:
    """One of the processes: its device, the winds, and a clock. It computes in one thread.

    `groups[n]` holds the first n ranks.
    """

    def __init__(self, number: int, device: torch.device, settings: Settings):
        self.number = number
        self.device = device
        self.settings = settings
        self.options, self.data = make_data(Options(**settings.training))
        self.groups = {}
        for devices in range(1, settings.devices + 1):
            self.groups[devices] = distributed.new_group(range(devices))

    def make_batch(self, size: int) -> Batch:
        """This rank's samples of a batch in which each rank has `size` samples."""
        maker = self.data.maker(self.data.training, self.options.patch_size)
        whole = size * self.settings.devices
        patches = PatchDataset(maker, self.data.reader, whole, self.options.seed)
        first = self.number * size
        arrays = patches.read_batch([(0, k) for k in range(first, first + size)])
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return move(batch, self.device)

    def make_network(self, seed: int = 0) -> UNet:
        """The same weights on every rank."""
        torch.manual_seed(seed)
        return UNet(len(self.options.variables)).to(self.device)

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.settings.on_gpu:
            torch.accelerator.synchronize()
        return perf_counter()

    def gather(self, value: Any) -> list:
        """What every rank has found, on every rank."""
        found = [None] * self.settings.devices
        distributed.all_gather_object(found, value)
        return found

    def progress(self, things: Iterable, name: str) -> tqdm:
        """A progress bar, which only rank 0 draws."""
        return tqdm(things, name, disable=True if self.number else None)


def on_ranks(measure: Callable[[Rank], list[dict]], settings: Settings) -> list[dict]:
    """The rows that rank 0 returns, when all ranks call the same function.

    If one of them fails, the others are ended, and this process exits with code 2.
    DataError if the data are why.
    """
    set_forkserver_preload(PRELOADED)
    with TemporaryDirectory() as folder:
        work = (measure, settings, folder)
        start = {"start_method": START_METHOD, "daemon": True}
        try:
            start_processes(run_rank, work, settings.devices, **start)
        except (ProcessExitedException, ProcessRaisedException) as error:
            if "DataError: " in str(error):
                raise DataError(str(error)) from error
            *trace, reason = str(error).strip().splitlines()
            print(*trace, sep="\n", file=sys.stderr)
            refuse(f"rank {error.error_index}: {reason}")
        return json.loads(Path(folder, "rows.json").read_text())


def run_rank(
    number: int, measure: Callable[[Rank], list[dict]], settings: Settings, folder: str
) -> None:
    """What each process does. Rank 0 writes rows.json into the folder."""
    silence()
    tqdm.set_lock(RLock())  # its own is between processes, and this one ends abruptly
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(number)  # choose_device reads it
    device, backend = choose_device(settings.accelerator)
    meeting = f"file://{folder}/ranks"  # on one machine, a file is a meeting point
    distributed.init_process_group(backend, meeting, LIMIT, settings.devices, number)
    rows = measure(Rank(number, device, settings))
    if number == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    distributed.barrier()  # nobody leaves while another rank still needs it
    # To destroy the groups may abort: gloo's threads cannot end themselves.
    os._exit(0)
