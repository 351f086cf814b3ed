"""Chapter 4: from winds in a store to batches, at the rate at which the store gives them.

train.py imports this file and object_store.py; copy all three. It holds what chapter 3's train.py had of the
data, unchanged, and `BlockPatches`: a Dataset that reads whole chunks and cuts many patches from each.
"""

import argparse
import asyncio
import atexit
import gc
import math
import os
import weakref
import zlib
from asyncio import run_coroutine_threadsafe
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import lru_cache, partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info
from zarr.core.sync import sync

from object_store import InputError, StoreError, Winds

# Successive tracks of a polar orbiter lie 25 degrees of longitude apart, 10 cells of this grid. They
# lean 0.22 degrees of longitude a degree of latitude, and a swath of 4 cells is 1,100 km wide.
TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH, LOST_PASSES = 10, 0.22, 4, 1 / 8

# Every use of randomness has a stream of its own, so that adding one never shifts another.
ORDER_STREAM, PATCH_STREAM, MODEL_STREAM = 1, 2, 3
BOTTOM_CHANNELS = 96
BLOCK = 8  # patches along a side of a block, about,
BLOCK_BYTES = 32e6  # unless its times make it larger than that


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_times: int) -> np.ndarray:
    """The order in which an epoch visits the times, (n_times,): each of them once."""
    return np.random.default_rng((ORDER_STREAM, seed, epoch)).permutation(n_times)


def swath_mask(rng: np.random.Generator, size: int) -> np.ndarray:
    """True where the satellite looks, (size, size): ascending or descending passes, some of them lost."""
    row, column = np.mgrid[:size, :size]
    across = column + rng.choice((-1, 1)) * TRACK_SLOPE * row + rng.uniform(0, TRACK_SPACING)
    orbit, offset = np.divmod(across, TRACK_SPACING)
    lost = rng.random(np.ptp(orbit).astype(int) + 1) < LOST_PASSES
    inside = offset < SWATH_WIDTH
    seen = inside & ~lost[(orbit - orbit.min()).astype(int)]
    return seen if seen.sum() >= size else inside  # of a small patch, every pass may be lost


class WindPatches(Dataset):
    """Patches of the wind and their swaths, addressed by (step, k): sample k of global step `step`."""

    def __init__(self, winds: Winds, mean, std, patch_size: int, batch_size: int, seed: int):
        """mean and std are (component, 1, 1), in m/s."""
        self.winds, self.times = winds, winds.times
        self.latitude, self.longitude = winds.latitude, winds.longitude
        self.mean, self.std, self.size = mean, std, patch_size
        self.batch_size, self.seed = batch_size, seed
        spacing = self.longitude[1] - self.longitude[0]
        global_map = abs(len(self.longitude) * spacing - 360) < spacing / 2
        self.last_column = len(self.longitude) - (1 if global_map else patch_size)  # else no seam to cross

    def sample(self, step: int, k: int) -> tuple[int, int, int, np.ndarray]:
        """Say what sample k of a step is, a pure function of (seed, step, k): there is no state to lose.

        Returns (time, row, column) of the patch's first cell and the swath mask, (size, size).
        """
        epoch, position = divmod(step * self.batch_size + k, len(self.times))
        time = epoch_order(self.seed, epoch, len(self.times))[position]
        rng = np.random.default_rng((PATCH_STREAM, self.seed, step, k))
        row = rng.integers(len(self.latitude) - self.size, endpoint=True)
        column = rng.integers(self.last_column, endpoint=True)
        return time, row, column, swath_mask(rng, self.size)

    def cut(self, field: np.ndarray, row: int, column: int) -> np.ndarray:
        """Cut a patch out of a field (..., latitude, longitude), across the map's seam if need be."""
        columns = np.arange(column, column + self.size)
        return field[..., row : row + self.size, :].take(columns, axis=-1, mode="wrap")

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
        """Read the samples of a micro-batch at once, as a DataLoader asks if a dataset can: reads overlap.

        A sample is input (3, H, W), target (2, H, W), weight (1, H, W) and noise (channels, 1, 1), float32.
        The weight is cos(latitude) in a cell that was not seen, and zero in one that was. The noise
        decides which channels dropout leaves out: drawn for the sample, it is the same on any rank.
        """
        drawn = [self.sample(*index) for index in indices]
        cells, width = np.arange(self.size), len(self.longitude)
        boxes = [(time, row + cells, (column + cells) % width) for time, row, column, _ in drawn]
        targets = (self.winds.read(boxes) - self.mean) / self.std
        return [self.finish(*sample) for sample in zip(indices, drawn, targets)]

    def finish(self, index: tuple[int, int], drawn: tuple, target: np.ndarray) -> dict[str, np.ndarray]:
        _, row, _, seen = drawn
        seen = seen[None].astype("float32")
        cosine = np.cos(np.deg2rad(self.latitude[row : row + self.size, None])).clip(0)
        weight = (cosine * (1 - seen)).astype("float32")
        noise = np.random.default_rng((MODEL_STREAM, self.seed, *index)).random((BOTTOM_CHANNELS, 1, 1), "f4")
        inputs = np.concatenate([target * seen, seen])
        return {"input": inputs, "target": target, "weight": weight, "noise": noise}

    def close(self) -> None:
        """Nothing reads ahead here."""

    def collate(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        """Stack samples, and send along what was asked of the store since the last batch."""
        return default_collate(samples) | {"requests": torch.from_numpy(self.winds.take_log())}


class StepSampler(Sampler):
    """This rank's slice of the global batch of every step from `start` on, in `accumulate` micro-batches,
    each a list of (step, k): to resume, start later; on another number of ranks, slice otherwise."""

    def __init__(self, args: argparse.Namespace, start: int, rank: int, world_size: int):
        self.steps, self.repeat_first = range(start, args.max_steps), args.overfit_one_batch
        share = args.batch_size // world_size
        self.slice, self.size = range(rank * share, (rank + 1) * share), share // args.accumulate

    def __iter__(self):
        for step in self.steps:
            for first in self.slice[:: self.size]:
                yield [(0 if self.repeat_first else step, k) for k in range(first, first + self.size)]


class TimedLoader:
    """A DataLoader that notes the seconds that the loop waited for each batch, and those it then worked."""

    def __init__(self, loader: DataLoader, length: int):
        self.loader, self.length, self.waits, self.works = loader, length, [], []
        self.requests = deque(maxlen=10_000)  # of the latest batches, what they asked of the store

    def __len__(self) -> int:
        return self.length  # of the whole run: Lightning counts those before a resume as fetched

    def __iter__(self):
        asked = perf_counter()
        for batch in self.loader:
            self.waits.append(perf_counter() - asked)
            self.requests.append(batch.pop("requests").numpy())
            given = perf_counter()
            yield batch
            asked = perf_counter()
            self.works.append(asked - given)

    def by_step(self, accumulate: int) -> Iterator[np.ndarray]:
        """The seconds of waiting, and those of work, of each whole step of so many micro-batches."""
        whole = len(self.works) // accumulate * accumulate
        for seconds in (self.waits, self.works):
            yield np.reshape(seconds[:whole], (-1, accumulate)).sum(axis=1)


# ----------------------------------------------------------------------------------------- block by block


class Visit(NamedTuple):
    """What a lane draws when it visits a block: patch p of the visit is row p of each array."""

    block: int
    cell: np.ndarray  # (patches, 3): time, row and column of the first
    origin: list[int]  # time, row and column of the block's first
    chance: np.ndarray  # (patches, chances), uniform in [0, 1): swaths and dropout are made of it


def runs(numbers: np.ndarray) -> np.ndarray:
    """Where runs of equal numbers begin and end, (run, 2): [4, 4, 7] gives [[0, 2], [2, 3]]."""
    edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
    return np.stack([edges[:-1], edges[1:]], axis=1)


def failed(reading: Future | asyncio.Task) -> bool:
    return reading.done() and (reading.cancelled() or reading.exception() is not None)


def finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite: a finite sum says so at once, and needs no mask of all values."""
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


class BlockPatches(WindPatches):
    """Patches that are read by the block: as near to random as `lanes` blocks at a time allow.

    A block is all the patches whose first cell lies in one chunk, or in several if chunks are small. It is
    read once, with what those patches need of the chunks beside it, and `patches_per_map` (times the block's
    share of a map) are cut from it.
    Blocks are dealt to lanes once and for all, so that each has about equally many patches. A lane visits each
    of its blocks, in an order of its own, and then each again in another. The positions of a global batch are
    divided among the lanes, in equal parts: `lanes` is rounded down to what allows that. If there are more
    lanes than a step takes, steps take turns. So a rank, if the ranks divide the lanes of a step, and a worker, if
    the workers divide the turns, reads no other's blocks; `tell_sharing` says if not. Which patch is sample k of
    a step depends on (seed, step, k) alone.
    """

    def __init__(self, winds, mean, std, patch_size, batch_size, seed, lanes: int, patches_per_map: float):
        super().__init__(winds, mean, std, patch_size, batch_size, seed)
        time, *space = winds.chunk_numbers()
        cell = 4 * len(winds.variables)  # bytes
        # Small chunks are read several at a time: else most of what a block reads is its neighbours'.
        side = min(BLOCK * patch_size, math.sqrt(BLOCK_BYTES / cell / np.bincount(time).max()))
        row, column = (number // max(1, int(side / np.bincount(number).max())) for number in space)
        corners = (time, row[: len(row) - patch_size + 1], column[: self.last_column + 1])
        self.spans = [runs(numbers) for numbers in corners]
        times, rows, columns = (np.diff(span)[:, 0] for span in self.spans)
        share = np.multiply.outer(rows, columns) / (rows.sum() * columns.sum())
        expected = np.cumsum(patches_per_map * np.multiply.outer(times, share), axis=0)
        rng = np.random.default_rng((ORDER_STREAM, seed))
        # Rounded so that the sum over times is right: a block of half a patch is cut from every second time.
        whole = np.floor(expected + rng.random(share.shape))
        self.patches = np.diff(whole, axis=0, prepend=0).astype(int).ravel()  # of each block
        self.patches[0] += not self.patches.any()
        blocks = rng.permutation(np.flatnonzero(self.patches))
        self.blocks = blocks[np.argsort(-self.patches[blocks], kind="stable")]
        lanes = min(lanes, len(blocks))
        shared = [divisor for divisor in range(1, batch_size + 1) if batch_size % divisor == 0]
        self.slots = max(divisor for divisor in shared if divisor <= lanes)  # lanes that share a step
        self.turns = lanes // self.slots
        self.lanes = self.turns * self.slots
        lane = np.arange(len(blocks)) % (2 * self.lanes)
        lane = np.minimum(lane, 2 * self.lanes - 1 - lane)  # there and back, the largest first
        self.shares = [self.blocks[lane == number] for number in range(self.lanes)]
        self.totals = [int(self.patches[share].sum()) for share in self.shares]  # of a round of each lane
        self.cosine = np.cos(np.deg2rad(self.latitude)).clip(0).astype("float32")
        passes = math.ceil((1 + TRACK_SLOPE) * patch_size / TRACK_SPACING) + 1  # that may cross a patch
        self.chances = BOTTOM_CHANNELS + 2 + passes
        self.layout = (
            f"crc32 {zlib.crc32(b''.join(map(np.ndarray.tobytes, [*self.spans, self.patches]))):08x}"
        )
        self.rounds = {}  # of a lane: the number of its round, and that round
        self.held = {}  # of (lane, number of its visit): the visit, and the future of its block
        self.loop, self.read_by = None, None  # Zarr's event loop, in a thread of the process that reads
        self.at_exit = None

    def __getstate__(self) -> dict:  # every process reads for itself
        return self.__dict__ | {"held": {}, "loop": None, "read_by": None, "at_exit": None}

    @property
    def memory_bytes(self) -> int:
        """What all lanes hold at most: two blocks each, as large as the largest, and their patches' chances.

        A rank's lanes are its share of these, and a worker's too if the workers divide the turns.
        """
        times, rows, columns = (int(np.diff(span).max()) for span in self.spans)
        rows = min(rows + self.size - 1, len(self.latitude))
        columns = min(columns + self.size - 1, len(self.longitude))
        of_visit = int(self.patches.max()) * (4 * self.chances + 3 * 8)
        return 2 * self.lanes * (4 * len(self.winds.variables) * times * rows * columns + of_visit)

    def check_memory(self, nodes: int) -> None:
        """Raise InputError if a node's part of the blocks that are held cannot fit in this machine's memory."""
        held, memory = self.memory_bytes / nodes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if held > memory:
            reason = f"they take {held / 1e9:,.0f} GB of this store, and this machine has {memory / 1e9:,.0f}"
            raise InputError(
                f"--shuffle-blocks {self.lanes}: {reason}; give fewer, or cut the store in smaller chunks"
            )

    @property
    def period(self) -> int:
        """Samples in which each lane comes to its next block, about: a pace is that of whole periods."""
        return self.lanes * round(self.patches[self.blocks].mean())

    def parts(self, world_size: int, accumulate: int) -> int:
        """Into how many parts the blocks of a rank fall: so many workers can share them, or a divisor of it.

        Micro-batches are dealt to workers in turn: those of a step must have no lane in common.
        """
        if accumulate > 1 and self.slots % (world_size * accumulate):
            return 1
        return self.turns * accumulate

    def tell_sharing(self, workers: int, world_size: int, accumulate: int) -> None:
        """Say so if ranks or workers cannot share the blocks, but read some several times; and if few are mixed."""
        parts = self.parts(world_size, accumulate)
        if (times := workers // math.gcd(parts, workers)) > 1:
            print(f"note: --num-workers {workers}: blocks are read {times} times; take a divisor of {parts}")
        if self.slots % world_size:
            print(
                f"note: {world_size} ranks: some read the same blocks; let them divide the {self.slots} of a step"
            )
        if self.slots < min(self.lanes, self.batch_size) / 2:
            reason = f"--batch-size {self.batch_size} has no larger divisor up to --shuffle-blocks"
            print(f"note: a step mixes only {self.slots} of {self.lanes} blocks: {reason}")

    def round(self, lane: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of a lane in the order of its n-th round, and how many patches it has cut before each."""
        if self.rounds.get(lane, (None,))[0] != number:
            rng = np.random.default_rng((ORDER_STREAM, self.seed, lane, number))
            order = rng.permutation(self.shares[lane])
            self.rounds[lane] = number, (order, np.cumsum(self.patches[order]) - self.patches[order])
        return self.rounds[lane][1]

    def locate(self, step: int, k: int) -> tuple[int, int, int]:
        """Say which (lane, number of its visit, patch of that visit) is sample k of a step."""
        each = self.batch_size // self.slots  # samples of a lane in a step
        lane = step % self.turns * self.slots + k // each
        number, place = divmod(step // self.turns * each + k % each, self.totals[lane])
        order, starts = self.round(lane, number)
        visit = int(starts.searchsorted(place, side="right")) - 1
        return lane, number * len(order) + visit, int(place - starts[visit])

    def corners(self, block: int) -> list[np.ndarray]:
        """The times, rows and columns of the first cells of a block's patches, each as [first, last + 1]."""
        places = np.unravel_index(block, [len(span) for span in self.spans])
        return [span[place] for span, place in zip(self.spans, places)]

    def visit(self, lane: int, number: int) -> Visit:
        """Draw the patches of a visit: each time of the block equally often, each corner equally likely.

        One stream gives all that is random in a visit: a visit is drawn at once, never a part of it.
        """
        which, place = divmod(number, len(self.shares[lane]))
        block = self.round(lane, which)[0][place]
        (first, end), *spans = self.corners(block)
        rng, n = np.random.default_rng((PATCH_STREAM, self.seed, lane, number)), self.patches[block]
        time = rng.permutation(np.resize(first + rng.permutation(end - first), n))
        cell = np.stack([time, *(rng.integers(*span, size=n) for span in spans)], axis=1)
        chances = rng.random((n, self.chances), "float32")
        return Visit(block, cell, [first, *(span[0] for span in spans)], chances)

    async def read_block(self, block: int) -> list[np.ndarray]:
        """Of each component a block, and the cells beyond it that its patches reach, (time, row, column)."""
        asyncio.current_task().add_done_callback(failed)  # asks for its error: else asyncio prints it
        time, row, column = self.corners(block)
        rows = np.arange(row[0], row[1] + self.size - 1)
        columns = np.arange(column[0], min(column[1] + self.size - 1, column[0] + len(self.longitude)))
        values = await self.winds.read_box(slice(*time), rows, columns % len(self.longitude))
        if not all(map(finite, values)):
            reason = f"NaN or infinity from {str(self.times[time[0]])[:13]} on; mend it"
            raise StoreError(f"--store {self.winds.access.name}: {reason}")
        return values

    def hold(self, wanted: dict[int, int]) -> None:
        """Hold of each lane the visit of that number and the next one, and let go of its others.

        This bounds memory, and holds reading back when training is slower: nothing else is read ahead.
        """
        if self.read_by != os.getpid():
            self.winds.open()
            self.held, self.loop, self.read_by = {}, sync(running_loop()), os.getpid()
            self.at_exit = partial(close_if_there, weakref.ref(self))
            atexit.register(self.at_exit)
            gc.freeze()  # else each time that reads have made enough objects, Python walks all that is imported
        for key in [key for key in self.held if not 0 <= key[1] - wanted.get(key[0], key[1]) <= 1]:
            self.held.pop(key)[1].cancel()
        for key in [(lane, number + ahead) for ahead in (0, 1) for lane, number in wanted.items()]:
            if key not in self.held:
                visit = self.visit(*key)
                self.held[key] = visit, run_coroutine_threadsafe(self.read_block(visit.block), self.loop)

    def close(self) -> None:
        """Call off all reading, before the interpreter ends: answers would find no event loop."""
        if self.read_by != os.getpid():  # nothing was read here
            return

        async def settle() -> None:
            if parts := asyncio.all_tasks() - {asyncio.current_task()}:  # of reads, one for each chunk
                await asyncio.wait(parts, timeout=1)

        for _, block in self.held.values():
            block.cancel()
        self.held.clear()
        gc.unfreeze()
        sync(settle())
        atexit.unregister(self.at_exit)
        self.read_by = None

    def sample(self, step: int, k: int) -> tuple[int, int, int, np.ndarray]:
        """Say what sample k of a step is: (time, row, column) of its first cell, and its chances."""
        lane, number, patch = self.locate(step, k)
        visit = self.visit(lane, number)
        return *visit.cell[patch], visit.chance[patch]

    def __getitem__(self, index: tuple[int, int]) -> dict[str, np.ndarray]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[tuple[int, int]]) -> dict[str, np.ndarray]:
        """Cut a micro-batch: wind (batch, component, H, W) in m/s, cosine (batch, 1, H, 1), chance (batch, n)."""
        places = [self.locate(*index) for index in indices]
        self.hold({lane: number for lane, number, _ in reversed(places)})  # the first of each lane
        size, components = self.size, len(self.winds.variables)
        wind = np.empty((len(places), components, size, size), "float32")
        rows, chances = [], []
        for out, (lane, number, patch) in zip(wind, places):
            if (lane, number) not in self.held:  # asked for in another order than that of the steps
                self.hold({lane: number})
            visit, reading = self.held[lane, number]
            try:
                block = reading.result()
            except Exception:  # whoever asks once more has it read once more, and all that failed with it
                self.held = {key: held for key, held in self.held.items() if not failed(held[1])}
                raise
            time, y, x = (visit.cell[patch] - visit.origin).tolist()
            for component, field in zip(out, block):
                strip, inside = field[time, y : y + size], field.shape[-1] - x
                component[:, :inside] = strip[:, x : x + size]
                if inside < size:  # a block that spans the map has a seam
                    component[:, inside:] = strip[:, : size - inside]
            rows.append(visit.cell[patch, 1])
            chances.append(visit.chance[patch])
            if patch + 1 == len(visit.cell):
                self.hold({lane: number + 1})
        if self.turns > 1:  # else the next turn begins cold
            worker = get_worker_info()
            following = [self.locate(step + (worker.num_workers if worker else 1), k) for step, k in indices]
            self.hold({lane: number for lane, number, _ in reversed(following)})
        cosine = self.cosine[np.add.outer(rows, np.arange(size))][:, None, :, None]
        return {"wind": wind, "cosine": cosine, "chance": np.stack(chances)}

    def collate(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        batch |= {"requests": self.winds.take_log()}
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def close_if_there(patches: weakref.ref) -> None:
    """At the end of the program; until then nothing but their users keeps patches, and their blocks, alive."""
    gc.unfreeze()  # else what is left is not put away
    if still := patches():
        still.close()


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def swath_masks(chance: torch.Tensor, size: int) -> torch.Tensor:
    """swath_mask of a whole batch, (batch, size, size), where `chance`, (batch, n), lies.

    In hundredths of a cell, as whole numbers: every device draws the same swaths.
    """
    spacing, slope, width = (round(100 * length) for length in (TRACK_SPACING, TRACK_SLOPE, SWATH_WIDTH))
    cells = torch.arange(size, device=chance.device, dtype=torch.float32)
    side, start, lost = chance[:, 0, None, None], chance[:, 1, None, None], chance[:, 2:] < LOST_PASSES
    lean = torch.where(side < 0.5, -slope, slope) * cells[:, None]
    across = (100 * cells + (lean + (spacing * start).floor())).int()
    orbit = across.div(spacing, rounding_mode="floor")
    inside = across - spacing * orbit < width
    orbit = (orbit - orbit.amin(dim=(1, 2), keepdim=True)).long()
    seen = inside & ~lost.gather(1, orbit.flatten(1)).view_as(orbit)
    few = seen.sum(dim=(1, 2), keepdim=True) < size  # of a small patch, every pass may be lost
    return torch.where(few, inside, seen)


def finish(batch: dict[str, torch.Tensor], mean: torch.Tensor, std: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make of BlockPatches' batch what WindPatches gives, where it lies: vectorised, and on a GPU if there is one."""
    target = (batch["wind"] - mean) / std
    noise, swaths = batch["chance"].split(
        [BOTTOM_CHANNELS, batch["chance"].shape[1] - BOTTOM_CHANNELS], dim=1
    )
    seen = swath_masks(swaths, target.shape[-1])[:, None].float()
    inputs = torch.cat([target * seen, seen], dim=1)
    return {
        "input": inputs,
        "target": target,
        "weight": batch["cosine"] * (1 - seen),
        "noise": noise[..., None, None],
    }
