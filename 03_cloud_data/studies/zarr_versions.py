"""Is Zarr 3 slower? The same reads of both formats by three releases of Zarr."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import zarr
from numcodecs import Blosc
from tqdm import tqdm
from zarr.codecs import BloscCodec, Crc32cCodec

from errors import refuse
from options import VARIABLES
from results import spread
from studies import shapes
from studies.server import BUCKETS, serve
from studies.stores import SIZE, full_or_quick, store_path

# On one Python, and each with the newest numcodecs that it accepts.
PYTHON = "3.13"
RELEASES = ("zarr==2.*", "zarr==3.1.*", "zarr>=3.4")
CLIENTS = ("s3fs", "s3fs, tuned", "obstore")
PACKAGES = ("s3fs", "obstore")
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"  # from 3.4 on, if asked for
LATENCY = 30  # ms to the first byte
WAYS = ("a patch", "a map", "patches at once")
# What tells one case from another.
LABELS = ("zarr", "numcodecs", "obstore", "s3fs", "pipeline", "client", "layout", "way")


@dataclass(frozen=True)
class Layout:
    """How an array is stored. Shards are whole maps."""

    name: str
    zarr_format: int
    side: int | None  # of a chunk, in cells; None: the map
    has_shards: bool = False
    has_checksums: bool = False

    @property
    def key(self) -> str:
        """The name of its folder."""
        return self.name.replace(" ", "_").replace(",", "")


LAYOUTS = (
    Layout("whole maps, format 2", 2, None),
    Layout("whole maps, format 3", 3, None),
    Layout("128 x 128, format 2", 2, 128),
    Layout("128 x 128, format 3", 3, 128),
    Layout("128 x 128, format 3 with checksums", 3, 128, has_checksums=True),
    Layout("128 x 128 in shards", 3, 128, has_shards=True),
    Layout("64 x 64 in shards", 3, 64, has_shards=True),
)


@dataclass(frozen=True)
class Reader:
    """A release of Zarr, in an environment that uv makes and keeps; None: the installed one."""

    release: str | None = None
    pipeline: str | None = None  # of its codecs, if not the one that it takes by itself

    def read(self, asked: dict) -> list[dict]:
        """The rows of zarr_reads.py."""
        chosen = {"ZARR_CODEC_PIPELINE__PATH": self.pipeline} if self.pipeline else {}
        done = subprocess.run(
            [*self.python(), Path(__file__).with_name("zarr_reads.py")],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | chosen,
        )
        if done.returncode:
            remedy = (
                f"see above; it needs Python {PYTHON} (`uv python install {PYTHON}`)"
            )
            refuse(f"{self.release or 'zarr'}: it cannot be had, or not run; {remedy}")
        return json.loads(done.stdout)

    def python(self) -> list[str]:
        """The beginning of a command that runs its Python."""
        if not self.release:
            return [sys.executable]
        run = ["uv", "run", "--quiet", "--no-project", "--python", PYTHON]
        for package in (self.release, *PACKAGES):
            run += ["--with", package]
        return [*run, "python"]


READERS = [Reader(release) for release in RELEASES] + [Reader(RELEASES[-1], FUSED)]


def zarr_versions(repeats: int) -> list[dict]:
    """A row for each release of Zarr, client, layout and way to read."""
    readers = full_or_quick(READERS, [Reader()])
    if readers == READERS and not shutil.which("uv"):
        refuse("zarr_versions: uv makes each release's environment; put it on the PATH")
    folder = BUCKETS / f"zarr_versions_{SIZE['resolution']:g}"  # a bucket
    write_layouts(folder)
    asked = {"folder": str(folder), "patch": SIZE["patch"]}
    asked |= {"seconds": full_or_quick(1.0, 0.05), "cases": list_cases()}
    rows = []
    with serve(full_or_quick(LATENCY, 0)) as server:
        asked["server"] = server.address
        for number in tqdm(range(repeats), "rounds", disable=None):
            of_round = []
            for reader in readers:
                of_round += reader.read(asked | {"round": number})
            check_values(of_round)
            rows += of_round
    return summarise(rows)


def check_values(rows: list[dict]) -> None:
    """RuntimeError unless all have read the same values, way by way."""
    read: dict[str, set] = {}
    for row in rows:
        read.setdefault(row["way"], set()).add(row["crc32"])
    for way, checksums in read.items():
        if len(checksums) > 1:
            raise RuntimeError(f"{way}: not all have read the same values")


def list_cases() -> list[dict]:
    """What is read. Through s3fs, which Zarr 2 needs, only what Zarr 2 can read."""
    cases = []
    clients = full_or_quick(("disk", *CLIENTS), ("disk", "obstore"))
    for layout, client, way in product(LAYOUTS, clients, WAYS):
        if layout.zarr_format > 2 and client.startswith("s3fs"):
            continue
        case = {"layout": layout.name, "key": layout.key, "client": client}
        cases.append(case | {"zarr_format": layout.zarr_format, "way": way})
    return cases


def summarise(rows: list[dict]) -> list[dict]:
    """A row for all rounds of a case."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        key = tuple(row.get(label) for label in LABELS)
        cases.setdefault(key, []).append(row)
    found = []
    for key, of_case in cases.items():
        row = dict(zip(LABELS, key))
        rates = [each["reads_per_second"] for each in of_case]
        row["reads_per_second"] = spread(rates)
        for name in ("cpu_ms", "requests", "mb"):
            row[name] = median(each[name] for each in of_case)
        found.append(row)
    return found


def write_layouts(folder: Path) -> None:
    """One variable of made-up winds, as each layout has it; what is there is kept."""
    shapes.make_one(0)
    source = store_path(shapes.name_of(0))
    winds = zarr.open_group(source, mode="r")[VARIABLES[0]][:]
    for layout in LAYOUTS:
        if not (folder / layout.key).exists():
            write(folder / layout.key, layout, winds)


def write(path: Path, layout: Layout, winds: np.ndarray) -> None:
    """An array in its layout, whole or not at all."""
    cells = winds.shape[1:]
    side = layout.side
    chunk = (1, *(min(side or size, size) for size in cells))
    if layout.zarr_format == 2:
        compressors = [Blosc("zstd", 3, Blosc.BITSHUFFLE)]
    else:
        compressors = [BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")]
    if layout.has_checksums:
        compressors.append(Crc32cCodec())
    shard = None
    if layout.has_shards:
        shard = (1, *(-(-size // of) * of for size, of in zip(cells, chunk[1:])))
    part = path.with_suffix(".part")
    array = zarr.create_array(
        part,
        shape=winds.shape,
        dtype=winds.dtype,
        chunks=chunk,
        shards=shard,
        compressors=compressors,
        zarr_format=layout.zarr_format,
        overwrite=True,
    )
    array[:] = winds
    part.rename(path)
