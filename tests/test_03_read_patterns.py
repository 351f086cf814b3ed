"""Chapter 3's measurements: what each way to read asks a server for, when, and that all of them read the same."""

import importlib
from collections.abc import Iterator
from itertools import cycle, islice, product
from types import SimpleNamespace

import book
import numpy as np
import programs
import pytest
import xarray as xr
import zarr
from matplotlib.backends.backend_agg import FigureCanvasAgg

LAYOUTS = {  # of a map of 19 x 36, for patches of 16 x 16
    "whole maps": (1, 0, 0, 0),
    "128 x 128": (1, 16, 16, 0),
    "8 times of 64 x 64": (8, 8, 8, 0),
    "64 x 64 in shards": (1, 4, 4, 1),
}
PLACES = {  # rows count from the south, chunks from the north: the northernmost 16 rows are of one chunk of 16
    "in one chunk": {"time": 5, "latitude": slice(3, 19), "longitude": slice(0, 16)},
    "across four": {"time": 23, "latitude": slice(0, 16), "longitude": slice(8, 24)},
    "across the seam": {"time": 0, "latitude": slice(1, 17), "longitude": np.arange(30, 46) % 36},
}
INDEX = 5 * 9 * 16 + 4  # bytes at the end of a shard: offset and size of 5 x 9 chunks, and a checksum
MODULES = (
    "costs",
    "netcdf_files",
    "references",
    "retries",
    "server",
    "shapes",
    "stores",
    "timeline",
    "ways",
    "zarr_versions",
)

thorough = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """Conftest's would end the module's server; here every server is ended by the block that started it."""


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """read_patterns.py and the modules of its studies, with small stores in a folder of their own."""
    folder = tmp_path_factory.mktemp("chapter")
    with book.rooms("03_cloud_data"), pytest.MonkeyPatch.context() as patch:
        make_store = importlib.import_module("make_store")
        patch.setattr(make_store, "HERE", folder)
        found = {name: importlib.import_module(f"studies.{name}") for name in MODULES}
        found = SimpleNamespace(read_patterns=importlib.import_module("read_patterns"), **found)
        for name, value in (found.stores.QUICK | {"days": 36, "batch": 4}).items():
            patch.setitem(found.stores.SIZE, name, value)
        for name, layout in LAYOUTS.items():
            patch.setitem(found.stores.LAYOUTS, name, layout)
        patch.setattr(found.stores, "QUICK", dict(found.stores.SIZE))  # so that they are quick
        for module in (found.costs, found.retries, found.timeline):
            patch.setattr(module, "LATENCIES", (5,))
        in_buckets = (found.server, found.stores, found.netcdf_files, found.references, found.zarr_versions)
        for module in in_buckets:
            patch.setattr(module, "BUCKETS", folder / "outputs")
        patch.setattr(found.netcdf_files, "BLOCK_BYTES", 4096)
        for module in (found.stores, found.references, found.shapes):
            patch.setattr(module, "run_make_store", lambda *flags: make_store.main(list(map(str, flags))))
        found.stores.make_stores(LAYOUTS)
        patch.setattr(found.read_patterns, "make_stores", lambda layouts: None)
        for name in ("read_patterns", "results"):
            patch.setattr(importlib.import_module(name), "RESULTS", folder / "results")
        yield found


@pytest.fixture(scope="module")
def server(studies):
    with studies.server.serve(0) as server:
        yield server


@pytest.fixture(scope="module")
def ways(studies, server) -> dict[tuple[str, str], tuple]:
    """Every way to read, by layout and name."""
    ways = studies.netcdf_files.ways_of_files(server)
    for layout in LAYOUTS:
        reader = studies.ways.open_patches(studies.stores.store_flags(layout, server)).reader
        ways += studies.ways.ways_of_zarr(layout, reader) + studies.ways.ways_of_asyncio(layout, reader)
    return {(way.layout, way.name): way for way in ways}


def cells(box: dict) -> tuple[np.ndarray, np.ndarray]:
    """Rows, counted from the north, and columns of a box."""
    return 18 - np.arange(19)[box["latitude"]], np.arange(36)[box["longitude"]]


def expected(studies, layout: str, box: dict) -> list[int]:
    """Bytes of each GET that a box needs of a Zarr store, from the files that the store consists of."""
    times, height, width, shard_times = LAYOUTS[layout]
    rows, columns = cells(box)
    chunk_rows = {row // height if height else 0 for row in rows}
    chunk_columns = {column // width if width else 0 for column in columns}
    names = studies.netcdf_files.VARIABLES
    sizes = []
    for y, x, name in product(chunk_rows, chunk_columns, names):
        array = studies.stores.store_path(layout) / name / "c" / str(box["time"] // times)
        if shard_times:
            index = np.frombuffer((array / "0/0").read_bytes()[-INDEX:-4], "<u8").reshape(5, 9, 2)
            sizes.append(int(index[y, x, 1]))
        else:
            sizes.append((array / f"{y}/{x}").stat().st_size)
    return sizes + [INDEX] * len(names) * bool(shard_times)


# ------------------------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_patch_costs_the_chunks_that_it_touches_whichever_way_it_is_read(
    layout: str, place: str, studies, server, ways
) -> None:
    box = PLACES[place]
    sizes = expected(studies, layout, box)
    if layout == studies.costs.TILES:  # two variables
        assert len(sizes) == {"in one chunk": 2, "across four": 8, "across the seam": 12}[place]
    if layout == "64 x 64 in shards":
        assert len(sizes) == 2 * (1 + {"in one chunk": 16, "across four": 20, "across the seam": 25}[place])
    for way in [way for (of, _), way in ways.items() if of == layout]:
        way.log.clear()
        before = server.counts()
        way.read([box])
        requests, size, _ = server.counts() - before
        assert (requests, size) == (len(sizes), sum(sizes))
        assert sorted(get.size for get in way.log) == sorted(sizes)


def test_a_netcdf_file_costs_one_request_a_variable_or_with_obstores_file_one_a_row(server, ways) -> None:
    found = {}
    for name in ("one by one", "one by one, obstore's file"):
        way = ways["NetCDF files", name]
        way.read([PLACES["across four"]])
        before = server.counts()
        way.read([PLACES["in one chunk"]])  # of another file
        found[name] = int((server.counts() - before)[0])
    assert found == {"one by one": 2, "one by one, obstore's file": 2 * 16}


def test_every_way_reads_what_the_files_hold(studies, ways) -> None:
    folder = studies.server.BUCKETS / "files/36_days_10_degrees"
    with xr.open_mfdataset(str(folder / "*.nc"), data_vars="minimal") as files:
        winds = np.stack([files[name].values for name in studies.netcdf_files.VARIABLES], axis=1)
    boxes = list(PLACES.values())
    truth = [winds[box["time"]][:, *np.ix_(*cells(box))] for box in boxes]
    for way in ways.values():
        np.testing.assert_array_equal(way.read(boxes), truth, str(way))


# ---------------------------------------------------------------------------------------------- studies


@thorough
def test_patterns_counts_what_every_way_asks_for(studies) -> None:
    rows = studies.costs.patterns(1)
    with studies.server.serve(0) as server:
        flags = studies.stores.store_flags(studies.costs.TILES, server)
        boxes = studies.ways.draw_boxes(studies.ways.open_patches(flags), 8)
    assert len(rows) == 3 + 4 * 2 + 2
    for row in rows:
        if row["layout"] in LAYOUTS:
            read = islice(cycle(boxes), row["samples"])
            sizes = [expected(studies, row["layout"], box) for box in read]
            assert row["requests_per_sample"] * row["samples"] == pytest.approx(sum(map(len, sizes)))
            size = sum(map(sum, sizes)) / row["samples"]
            assert row["bytes_per_sample"] == pytest.approx(size)
            assert row["bytes_per_byte_used"] == pytest.approx(size / (2 * 16 * 16 * 4))
        assert ("get_ms" in row) == (row["way"] != "one by one, obstore's file")


def test_one_by_one_no_two_samples_are_waited_for_at_once_but_by_train_py(studies) -> None:
    studies.read_patterns.main("timeline server --repeats 1 --save-results".split())
    results = studies.read_patterns.RESULTS
    rows = book.results(results / "timeline.json")["rows"]
    overlaps = {}
    for name in ("one by one", "train.py"):
        of = [row for row in rows if row["way"] == name]
        assert {row["sample"] for row in of} == set(range(8))
        overlaps[name] = sum(
            one["sample"] != other["sample"]
            and max(one["began_ms"], other["began_ms"]) < min(one["ended_ms"], other["ended_ms"])
            for one, other in product(of, of)
        )
    assert overlaps["one by one"] == 0 < overlaps["train.py"]
    figure = studies.timeline.plot_timeline(rows)
    FigureCanvasAgg(figure).draw()
    bars = [len(axes.patches) for axes in figure.axes]
    assert bars == [len([row for row in rows if row["way"] == name]) for name in overlaps]
    assert (results / "timeline.png").stat().st_size > 1000
    found = {}
    for row in book.results(results / "server.json")["rows"]:
        found.setdefault(row["layout"], {})[row["way"]] = row["requests_per_sample"]
    assert len(found) == 4
    assert all(row["GETs alone"] == pytest.approx(row["train.py"], rel=0.7) for row in found.values())


@pytest.mark.parametrize("flags", ["speed", "timeline --repeats 0"])
def test_a_wrong_flag_is_named(flags: str, studies, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        studies.read_patterns.main(flags.split())
    assert ended.value.code == 2
    assert f"error: {flags.partition(' ')[2] or flags}: " in capsys.readouterr().err.splitlines()[-1]


def test_a_sample_by_reference_costs_the_chunks_of_the_files_that_it_touches(studies) -> None:
    """And reads the values of the converted store."""
    rows = studies.references.references(1)
    assert [row["layout"] for row in rows] == [
        "by reference",
        "by reference",
        "converted",
        "converted, in Icechunk",
    ]
    maps, _, converted, copied = rows
    assert maps["requests"] == converted["requests"] == copied["requests"] == 2  # whole maps of two variables
    folder = studies.references.BUCKETS / studies.references.FOLDER
    with studies.server.serve(0) as server:
        found = {}
        for key, branch in {
            "1_19_36.icechunk": "main",
            "12_10_18.icechunk": "main",
            "winds.zarr": None,
        }.items():
            reader = studies.references.Layout("", (), key, branch).open(server)
            found[key] = reader.read_at_once([{"time": slice(0, 48)}])
    assert (folder / "12_10_18/1.nc").exists()
    for values in found.values():
        np.testing.assert_array_equal(values, found["winds.zarr"])


def test_every_format_gives_the_same_values_for_the_requests_of_its_chunks(
    studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Zarr that is installed; a release that reads something else ends the study."""
    read, reads = studies.zarr_versions.Reader.read, []
    read_and_keep = lambda *how: reads.append(read(*how)) or reads[-1]  # noqa: E731
    monkeypatch.setattr(studies.zarr_versions.Reader, "read", read_and_keep)
    rows = studies.zarr_versions.zarr_versions(1)
    found = {(row["layout"], row["client"], row["way"]): row["requests"] for row in rows}
    layouts = [layout.name for layout in studies.zarr_versions.LAYOUTS]
    assert found.keys() == set(product(layouts, ("disk", "obstore"), ("a patch", "a map", "patches at once")))
    for layout in layouts:
        asked = {way: found[layout, "obstore", way] for way in ("a patch", "a map", "patches at once")}
        assert found[layout, "disk", "a patch"] == 0
        if "shards" not in layout:  # a map of 19 x 36 is smaller than a chunk
            assert set(asked.values()) == {1}
    assert {row["pipeline"] for row in rows} == {"BatchedCodecPipeline"}
    for layout in studies.zarr_versions.LAYOUTS:
        path = studies.zarr_versions.BUCKETS / "zarr_versions_10" / layout.key
        array = zarr.open_array(path, mode="r")
        assert array.metadata.zarr_format == layout.zarr_format
        assert bool(array.shards) == layout.has_shards
        assert ("crc32c" in str(array.compressors).lower()) == layout.has_checksums
    others = [row | {"crc32": number} for number, row in enumerate(reads[0])]
    monkeypatch.setattr(studies.zarr_versions.Reader, "read", lambda *how: others)
    with pytest.raises(RuntimeError, match="a patch: not all have read the same"):
        studies.zarr_versions.zarr_versions(1)


def test_what_is_asked_for_again_is_what_failed(studies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies.retries, "FAULTS", {"error_rate": (0, 0.2), "truncate_rate": (0.2,)})
    healthy, throttled, broken = studies.retries.retries(1)
    assert healthy["requests_per_sample"] > 2  # of two variables
    assert healthy["samples_per_second"]["median"] < 4 / 0.005  # a batch of 4 waits for 5 ms at least
    assert healthy["SlowDown_per_sample"] == 0 < throttled["SlowDown_per_sample"]
    answered = throttled["requests_per_sample"] - throttled["SlowDown_per_sample"]
    assert answered == pytest.approx(healthy["requests_per_sample"])
    assert throttled["bytes_per_sample"] < 1.5 * healthy["bytes_per_sample"]
    assert broken["requests_per_sample"] > healthy["requests_per_sample"]


@thorough
def test_a_worker_waits_for_ever_after_a_fork_and_reads_after_forkserver_and_spawn() -> None:
    done = programs.run("03_cloud_data/read_patterns.py", *"start_methods --quick --repeats 1".split())
    rows = {}
    for line in done.out.splitlines():
        if "'start': " in line:
            rows[line.split("'")[3]] = "'arrived': 1" in line
    assert rows == {"fork": False, "fork, a store of its own": False, "forkserver": True, "spawn": True}


# ------------------------------------------------------------------------------------ the saved results


def saved(study: str) -> list[dict]:
    """The rows of a study that is committed."""
    return book.results(f"03_cloud_data/results/{study}.json")["rows"]


def test_the_committed_results_keep_their_promises() -> None:
    rates = {
        (row["layout"], row["way"], row["latency_ms"]): row["samples_per_second"] for row in saved("patterns")
    }
    slow, fast = (rates["128 x 128", way, 30]["median"] for way in ("one by one", "train.py"))
    assert fast >= 12 * slow
    serial, threads = (rates["NetCDF files", way, 30]["median"] for way in ("one by one", "threads"))
    assert threads < 1.5 * serial
    for layout in {row["layout"] for row in saved("server")}:
        alone, asked = (
            row["gets_per_second"]["median"]
            for way in ("GETs alone", "train.py")
            for row in saved("server")
            if (row["layout"], row["way"], row["latency_ms"]) == (layout, way, 30)
        )
        assert alone > asked, layout
    tries = saved("start_methods")
    assert all(row["arrived"] == row["tries"] * (row["start"] in ("forkserver", "spawn")) for row in tries)
    assert {row["start"] for row in tries if row["arrived"]} == {"forkserver", "spawn"}
    for row in saved("command"):
        rmse = {name: of["m/s"] for name, of in row["summary"]["rmse"].items()}
        assert rmse["U-Net"] < 0.9 * rmse["interpolated anomalies"]
