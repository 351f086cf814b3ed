"""Chapter 3: each study of benchmark.py runs, and finds rows; what they say is measured, and not tested."""

import json
import os
import time

import book
import programs
import pytest

SCRIPT = "03_cloud_data/benchmark.py"
STUDIES = "command compression ways chunks clients sources cache sizes faults mfdataset fork".split()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["speed"], "speed: no such study; choose from command, compression, ways, "),
        (["fork", "--rounds", "0"], "--rounds 0: too small; give at least 1"),
        (["--quick", "--save-results"], "--save-results: --quick measures nothing worth keeping"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], message: str) -> None:
    done = programs.run(SCRIPT, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"benchmark.py: error: {message}"), done.err
    assert done.err.count("\n") == 1


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    """The rows that --quick prints, by study."""
    outputs = book.ROOT / "03_cloud_data/outputs/benchmark"
    results = book.ROOT / "03_cloud_data/results"
    before = sorted(results.glob("*")), [path.stat().st_mtime_ns for path in sorted(results.glob("*"))]
    began = time.time()
    done = programs.require_success(SCRIPT, "--quick", timeout=400)
    assert before == (
        sorted(results.glob("*")),
        [path.stat().st_mtime_ns for path in sorted(results.glob("*"))],
    )
    left = [path.name for path in outputs.iterdir() if path.is_dir()]
    mine = [name for name in left if time.time() - os.stat(outputs / name).st_mtime < time.time() - began]
    assert not mine, f"temporary stores are left: {mine}"
    found = {name: [] for name in STUDIES}
    for line in done.out.splitlines():
        name, _, row = line.partition(" ")
        if row.startswith("{"):
            found[name].append(json.loads(row))
    return found


def test_every_study_gives_rows(rows: dict) -> None:
    counts = {name: len(found) for name, found in rows.items()}
    assert counts == {
        "command": 1,
        "compression": 19,
        "ways": 8,
        "chunks": 7 * 3,
        "clients": 4,
        "sources": 11,
        "cache": 5,
        "sizes": 2,
        "faults": 6,
        "mfdataset": 6,
        "fork": 2,
    }


def test_rows_name_their_server_and_its_limit(rows: dict) -> None:
    served = [row for found in rows.values() for row in found if "local_s3.py" in row.get("server", "")]
    limited = [row for row in served if not row.keys() & {"start_method", "command", "way"}]
    assert len(limited) == 14 + 4 + 5 + 5 + 1 + 6
    for row in limited:
        assert row["server_limit_samples_per_second"]["min"] > 0, row


def test_what_does_not_depend_on_the_machine_is_right(rows: dict) -> None:
    error = {row["codec"]: row["largest_relative_error"] for row in rows["compression"]}
    for codec, found in error.items():
        bits = int(codec.split()[0]) if codec[0].isdigit() else None
        # Rounded to the nearest, a value is off by half a unit of its last bit at most.
        assert (2 ** -(bits + 2) < found <= 2 ** -(bits + 1)) if bits else found == 0, codec
    hits = [row["hit_share"]["median"] for row in rows["cache"]]
    assert hits[0] == 0 and hits == sorted(hits) and hits[-1] > 0.6
    retried = {row["faults"]: (row["retries"], row["slowest_batch_ms"]) for row in rows["faults"]}
    assert retried["none"][0] == 0 < retried["one request stalls"][0]
    assert retried["one request stalls"][1] > 2000  # a sixth of the deadline
    for row in rows["chunks"]:
        assert row["requests_per_sample"] >= 2 and row["objects_per_gb"] > 0
    assert {row["library"]: row["outcome"][:5] for row in rows["fork"]} == {
        "obstore": "hangs",
        "NetCDF, h5netcdf": "reads",
    }
