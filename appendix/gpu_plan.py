"""What a day on a GPU measures, and the results so far."""

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ladder import Size

BOOK = Path(__file__).resolve().parent.parent
CHAPTER_5 = BOOK / "05_model_profiling"
CHAPTER_6 = BOOK / "06_whats_next"
CHAPTERS = (
    "01_setup",
    "02_multi_gpu",
    "03_cloud_data",
    "04_data_pipeline",
    "05_model_profiling",
    "06_whats_next",
)
DETERMINISTIC = "deterministic kernels"
DEFAULTS = "torch's defaults"


@dataclass(frozen=True)
class Plan:
    """The sizes of all parts. `size` is the store that chapters 3 to 6 make by default."""

    device: str
    size: Size
    chapters: tuple[str, ...] = CHAPTERS
    steps: int = 200  # of a training, the chapters' default
    large_batch: int = 256
    large_steps: int = 40
    workers: int = 8  # beside a large batch
    loader_workers: tuple[int, ...] = (0, 1, 2, 4)
    pinned_workers: tuple[int, ...] = (0, 4)  # also with pinned memory
    loader_patches: tuple[int, ...] = (32,)  # of a map, with the last of pinned_workers
    loader_batch: int = 64  # the store has blocks for four of its batches at a time
    loader_steps: int = 32
    step_batches: tuple[int, ...] = (8, 32, 128, 512)
    widths: tuple[int, ...] = (24, 96, 192, 384)
    wide_batch: int = 64
    repeats: int = 5
    calls: int = 10  # steps that are timed together
    matrix: int = 8192
    copy: int = 2**30  # bytes
    kernels: tuple[str, ...] = (DETERMINISTIC, DEFAULTS)
    exact_steps: int = 40
    killed_after: int = 35  # of these
    checkpoint_every: int = 10
    compared_steps: int = 12  # on CPU and GPU
    energy_batch: int = 256
    energy_seconds: float = 3.0
    memory_batch: int = 256

    @property
    def accelerator(self) -> str:
        """What train.py calls the device."""
        return "gpu" if self.device == "cuda" else "cpu"


FULL = Plan("cuda", Size("small.zarr", 396, 1.0, (1, 128, 128), 64, 8, short=0, long=0))
DRY = Plan(
    "cpu",
    Size("quick_ladder.zarr", 132, 10, (1, 19, 36), 16, 2, short=0, long=0),
    chapters=("06_whats_next",),
    steps=2,
    large_batch=4,
    large_steps=2,
    workers=0,
    loader_workers=(0, 1),
    loader_patches=(),
    loader_batch=4,
    loader_steps=2,
    step_batches=(2,),
    widths=(8,),
    wide_batch=2,
    repeats=1,
    calls=1,
    matrix=64,
    copy=2**16,
    kernels=(DETERMINISTIC,),
    exact_steps=4,
    killed_after=3,
    checkpoint_every=2,
    compared_steps=2,
    energy_batch=2,
    energy_seconds=0.1,
    memory_batch=2,
)


class Found:
    """The rows so far. Their file is complete at any time, so a killed part can go on."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.finished: list[str] = []
        if path.exists():
            saved = json.loads(path.read_text())
            self.rows = saved["rows"]
            self.finished = saved["finished"]

    def has(self, part: str, case: str) -> bool:
        """Whether there is a row of this case; one that is missing for a reason counts."""
        return any(row["part"] == part and row["case"] == case for row in self.rows)

    def row(self, part: str, case: str) -> dict[str, Any]:
        """The row of a case; an empty one if there is none."""
        for row in self.rows:
            if row["part"] == part and row["case"] == case:
                return row
        return {}

    def add(self, part: str, case: str, values: dict[str, Any]) -> None:
        """Keep a row, in place of an older one of its case, and print it."""
        row = {"part": part, "case": case, "date": str(date.today())} | values
        if self.has(part, case):
            self.rows.remove(self.row(part, case))
        self.rows.append(row)
        self.write()
        print(f"  {json.dumps(row)}", flush=True)

    def finish(self, part: str) -> None:
        """Note that no case of this part is left to do."""
        self.finished.append(part)
        self.write()

    def forget(self, parts: list[str]) -> None:
        """Drop the rows of some parts."""
        self.rows = [row for row in self.rows if row["part"] not in parts]
        self.finished = [part for part in self.finished if part not in parts]
        self.write()

    def write(self) -> None:
        """Replace the file in one go, so that no kill leaves a part of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"rows": self.rows, "finished": self.finished}))
        new.replace(self.path)
