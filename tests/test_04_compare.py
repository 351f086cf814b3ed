"""Chapter 4's comparison: every reader gives the patches that it should, and the limit reads what they read."""

import sys
from contextlib import nullcontext
from pathlib import Path

import book
import numpy as np
import pytest
import runs
import zarr

CHAPTER = book.ROOT / "04_data_pipeline"
NAMES = "input", "target", "unseen", "weight"
OBJECTS = 2  # of a map: u and v
SIZE = {"days": 24, "resolution": 10, "patch": 16, "batch": 8}
pytestmark = pytest.mark.filterwarnings(
    "ignore:(Failed to open Zarr store|Consolidated metadata|This DataLoader)"
)
thorough = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """Conftest's would end the module's server; every other process is ended by the block that started it."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory):
    """compare.py, for a store of 19 x 36 cells in a folder of its own."""
    folder = tmp_path_factory.mktemp("chapter")
    make_store = runs.load("03_cloud_data/make_store.py", "make_store_of_compare")
    make_store.HERE = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))
        for name in ("train", "benchmark"):
            patch.delitem(sys.modules, name, raising=False)
        script = runs.load("04_data_pipeline/compare.py", "compare_under_test")
        for name in ("train", "benchmark"):
            patch.setitem(sys.modules, name, getattr(script, name))
        patch.setattr(script, "LATENCY_MS", 0)
        patch.setattr(script.benchmark, "BUCKETS", folder / "outputs")
        patch.setattr(script.benchmark, "RESULTS", folder / "results")
        patch.setattr(script.benchmark, "SIZE", dict(SIZE))
        patch.setattr(script.benchmark, "QUICK", SIZE)
        patch.setattr(script.benchmark, "make_stores", lambda: None)
        make_store.main([*"--days 24 --resolution 10 --chunk 1 19 36 --store".split(), str(store(script))])
        yield script


def store(script) -> Path:
    """The only store's folder."""
    return script.benchmark.BUCKETS / script.benchmark.store_key(script.LAYOUT)


@pytest.fixture(scope="module")
def server(script):
    with script.benchmark.serve(0) as server:
        yield server


def opened(script, server, per_block: int = 1) -> tuple:
    """The training patches, and train.py's arguments."""
    flags = script.STORE_FLAGS(script.LAYOUT, server, "--patches-per-block", per_block)
    args = script.train.parse_arguments(flags)
    return script.train.make_patches(args)[0], args


def take(batches, number: int) -> list[dict[str, np.ndarray]]:
    """So many batches; then their reader is done with."""
    batches = iter(batches)
    return [next(batches) for _ in range(number)]


def assert_same(batches: list[dict], others: list[dict]) -> None:
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others):
        for name in NAMES:
            np.testing.assert_array_equal(one[name], other[name])


# ------------------------------------------------------------------------------------------- the limit


def test_a_decoded_chunk_has_the_values_that_zarr_reads(script) -> None:
    array, out = (
        zarr.open_array(store(script) / script.train.VARIABLES[1], mode="r"),
        np.empty((19, 36), "f4"),
    )
    for time in range(24):
        chunk = (store(script) / script.train.VARIABLES[1] / f"c/{time}/0/0").read_bytes()
        script.decode(chunk, out)
        np.testing.assert_array_equal(out, array[time])
    with pytest.raises(OSError, match="checksum"):
        script.decode(chunk[:-9] + bytes([chunk[-9] ^ 1]) + chunk[-8:], out)


@pytest.mark.parametrize(("name", "decoded"), [("limit", True), ("bare GETs", False)])
def test_the_limit_reads_the_maps_of_an_epoch_and_decodes_each(
    name: str, decoded: bool, script, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches, args = opened(script, server, per_block=4)
    order = script.train.epoch_order(patches.seed, 0, len(patches.times))
    files = [store(script) / v / f"c/{patches.places[t]}/0/0" for t in order for v in args.variables]
    sizes, seen = [file.stat().st_size for file in files], []
    monkeypatch.setattr(script, "decode", lambda chunk, out: seen.append(bytes(chunk)))
    found = take(script.READERS[name].read(patches, args), 4)
    each = OBJECTS * args.batch_size // 4
    assert found == [sum(sizes[step * each : (step + 1) * each]) for step in range(4)]
    assert {file.read_bytes() for file in files[: 4 * each]} <= set(seen) if decoded else not seen


# --------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize("name", ["naive xarray", "Dask, a sample", "Dask, a batch"])
def test_a_reader_gives_chapter_3s_batches(name: str, script, server) -> None:
    patches, args = opened(script, server)
    expected = patches.__getitems__([divmod(n, args.batch_size) for n in range(3 * args.batch_size)])
    batches = take(script.READERS[name].read(patches, args), 3)
    assert_same([sample for batch in batches for sample in unbatched(batch)], expected)


def unbatched(batch: dict) -> list[dict]:
    return [dict(zip(NAMES, values)) for values in zip(*(batch[name] for name in NAMES))]


@thorough
def test_tensorstore_gives_chapter_3s_batches_and_as_our_loaders_reader_ours(script, server) -> None:
    pytest.importorskip("tensorstore")
    patches, args = opened(script, server)
    expected = patches.__getitems__([divmod(n, args.batch_size) for n in range(3 * args.batch_size)])
    batches = take(script.READERS["tensorstore, a sample"].read(patches, args), 3)
    assert_same([sample for batch in batches for sample in unbatched(batch)], expected)
    patches, args = opened(script, server, per_block=2)
    ours = take(script.READERS["ours"].read(patches, args), 5)
    patches.store.bucket.log.clear()
    theirs = take(script.READERS["tensorstore, whole maps"].read(patches, args), 5)
    assert_same(theirs, ours)
    assert isinstance(patches.store, script.TensorStore)
    assert [int(batch["traffic"][0]) for batch in theirs] == [0] * 5  # none of it through Zarr


@thorough
@pytest.mark.parametrize(("name", "per_block"), [("xbatcher, a sample", 1), ("xbatcher, whole maps", 4)])
def test_xbatchers_patches_are_of_the_places_that_are_said(
    name: str, per_block: int, script, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xbatcher")
    patches, args = opened(script, server, per_block)
    fields = patches.store.fields
    winds = np.stack([fields[name].values for name in args.variables], axis=1)
    places, make = [], type(patches).make

    def note(self, fields, times, rows, columns, swaths) -> dict:
        for field, time, row, column in zip(fields, times, rows, columns):
            whole = winds[self.places[time], :, row : row + self.size, column : column + self.size]
            np.testing.assert_array_equal(field, whole)
            places.append((time, row, column))
        return make(self, fields, times, rows, columns, swaths)

    monkeypatch.setattr(type(patches), "make", note)
    batches = take(script.READERS[name].read(patches, args), 6)
    assert all(len(batch[name]) == args.batch_size for batch in batches for name in NAMES)
    assert len(set(places)) > args.batch_size
    assert len({time for time, *_ in places}) > 4


# ---------------------------------------------------------------------------------------- measurements


def assert_costs_a_map(row: dict, script) -> None:
    """A sample's requests and bytes are those of a map's objects."""
    sizes = [path.stat().st_size for path in store(script).glob("10m_*/c/*/0/0")]
    assert row["requests_per_sample"] == OBJECTS
    assert OBJECTS * min(sizes) <= row["bytes_per_sample"] <= OBJECTS * max(sizes)
    assert row["peak_memory_mb"] >= row["memory_before_mb"] > 0


def test_a_measurement_counts_what_a_sample_costs(script, server) -> None:
    _, args = opened(script, server)
    assert_costs_a_map(script.measure(script.READERS["naive xarray"], server, args, seconds=0), script)


@thorough
def test_a_reader_is_measured_in_a_process_of_its_own(script, capfd: pytest.CaptureFixture) -> None:
    [row] = script.main(["--quick", "naive xarray"])
    assert_costs_a_map(row, script)
    assert "naive xarray" in capfd.readouterr().out


def test_readers_take_turns_and_are_compared_round_by_round(script, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = {"limit": [100, 400, 200], "ours": [80, 100, 180]}
    asked = []

    def measure_apart(name: str, server, per_block: int, workers: int, seconds: float) -> dict:
        asked.append((name, per_block, workers))
        number = asked.count(asked[-1]) - 1
        return {"samples_per_second": per_block * made_up[name][number], "first_batch_s": float(number)}

    monkeypatch.setattr(script, "measure_apart", measure_apart)
    monkeypatch.setattr(script.benchmark, "serve", nullcontext)
    rows = script.compare(["limit", "ours"], 3, 0)
    assert asked == 3 * asked[: len(rows)]
    for row in rows:
        share = {"limit": 1, "ours": 0.8}[row["reader"]]
        assert row["share_of_limit"] == pytest.approx(share)
        lowest, highest = (row["patches_per_block"] * of(made_up[row["reader"]]) for of in (min, max))
        assert (row["samples_per_second"]["min"], row["samples_per_second"]["max"]) == (lowest, highest)
        assert row["first_batch_s"] == 1


@pytest.mark.parametrize("flags", ["speed", "--repeats 0", "--save-results --quick", "limit --workers 2"])
def test_a_wrong_flag_is_named(flags: str, script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(flags.split())
    assert ended.value.code == 2
    assert flags.removeprefix("limit ").split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_library_that_is_not_installed_is_named_with_the_command_that_has_it(
    script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        script.main([])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "xbatcher" in last and "uv run --group peers python compare.py" in last


# ------------------------------------------------------------------------------------ the saved results


def test_the_committed_results_keep_their_promises() -> None:
    rows = book.results("04_data_pipeline/results/compare.json")["rows"]
    ours = {
        row["patches_per_block"]: row for row in rows if (row["reader"], row["num_workers"]) == ("ours", 0)
    }
    assert ours[8]["share_of_limit"] >= 0.8 and ours[32]["share_of_limit"] >= 0.75
    peers = [row["samples_per_second"]["median"] for row in rows if row["as"] == "as users call it"]
    assert len(peers) == 4
    assert all(row["samples_per_second"]["median"] > max(peers) for row in ours.values())
    limit = max(row["mb_per_second"] for row in rows if row["as"] == "limit")
    assert max(row["mb_per_second"] for row in rows if row["as"] == "server") > 1.2 * limit
