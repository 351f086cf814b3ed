"""Chapter 3: probe.py, which finds what a store gives from here, and which chunks would suit it."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import book
import buckets
import numpy as np
import obstore
import pytest

LAYOUTS = {"plain": "", "shards": "--shard-times 4", "v2": "--zarr-format 2", "tiles": "--chunk 1 8 20"}
SIZE, BATCH = 16, 8
U = "10m_u_component_of_wind"


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    """probe.py and what it is made of."""
    names = {"probe": "probe", "store": "store"}
    names |= {name: f"probing.{name}" for name in ("wire", "replay", "upkeep")}
    with book.rooms("03_cloud_data"):
        found = {name: importlib.import_module(module) for name, module in names.items()}
        yield SimpleNamespace(**found, location=importlib.import_module("location"))


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket with a store of each layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name, flags in LAYOUTS.items():
        make_small_store(folder / "winds" / name, flags)
    return folder


@pytest.fixture
def open_reader(modules, folder: Path):
    """A reader of a layout on this disk."""

    def run(layout: str):
        place = modules.location.Location(str(folder / "winds" / layout))
        reader = modules.store.FieldReader(place, [U])
        reader.open()
        return reader

    return run


def test_the_line_through_bursts_is_that_of_which_they_were_made(modules) -> None:
    """And what cannot be is 0: a byte that takes less than no time."""
    wire = modules.wire
    start, request, byte = 0.03, 0.0005, 2e-9
    bursts = []
    for number in wire.AT_ONCE:
        for length in (1, wire.LARGEST // number):
            seconds = start + number * request + number * length * byte
            bursts.append(wire.Burst(number, length, seconds))
    assert wire.fit(bursts) == pytest.approx([start, request, byte])
    faster = [wire.Burst(b.requests, b.length, b.seconds - 3e-9 * b.requests * b.length) for b in bursts[:4]]
    assert min(wire.fit(faster)) == 0


def test_a_gets_own_work_is_no_latency_and_few_reads_are_enough_if_more_bring_nothing(modules) -> None:
    wire = modules.wire
    bursts = [wire.Burst(n, 1000, n / min(n, 20)) for n in wire.AT_ONCE]
    found = wire.Wire(np.array([5.0, 6, 9]), bursts, start=5, per_request=0.5, per_byte=0)
    assert found.latency == 5.5 and found.best_at_once == 64
    assert found.seconds(10, 100) == 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_are_found_by_their_names_and_lost_ones_are_passed_over(layout, modules, open_reader) -> None:
    reader = open_reader(layout)
    client = modules.probe.connect(modules.location.Location(Path(reader.location.url).as_uri()))
    parts = list(modules.wire.find_chunks(client, reader, 20))
    objects = {found["path"]: found["size"] for page in obstore.list(client, U) for found in page}
    assert len(parts) == 20 and len({part.key for part in parts}) > 5
    per_shard = 4 * 6 if layout == "shards" else 1
    assert all(part.length == objects[part.key] // per_shard for part in parts)
    (Path(reader.location.url) / parts[0].key).rename(Path(reader.location.url) / "aside")
    again = list(modules.wire.find_chunks(client, reader, 20))
    (Path(reader.location.url) / "aside").rename(Path(reader.location.url) / parts[0].key)
    assert len(again) == 20 and parts[0].key not in {part.key for part in again}


@pytest.mark.parametrize("layout", ["plain", "v2", "tiles"])
def test_a_replay_reads_the_values_with_the_requests_and_bytes_of_the_store(
    layout: str, modules, open_reader, monkeypatch
) -> None:
    reader, replayed = open_reader(layout), []
    cut_in_memory = modules.replay.cut_in_memory
    monkeypatch.setattr(
        modules.replay, "cut_in_memory", lambda *a: replayed.append(cut_in_memory(*a)) or replayed[-1]
    )
    shapes = list(modules.replay.replay(reader, SIZE, BATCH))
    own = reader.fields[U].encoding["chunks"][1:]
    assert [shape.chunk for shape in shapes] == sorted({own, (32, 32), (37, 72)})
    for shape, cut in zip(shapes, replayed):
        boxes = modules.replay.draw_boxes(cut, SIZE, BATCH, seed=9)
        assert {box["time"] for box in boxes} == {0, 1}
        there = [box | {"time": box["time"] + 17} for box in boxes]  # of 36 times
        apart, of_memory = reader.counted_apart(), cut.counted_apart()
        np.testing.assert_array_equal(of_memory.read_at_once(boxes), apart.read_at_once(there))
        if shape.chunk == own:
            assert of_memory.traffic.requests == apart.traffic.requests
            assert of_memory.traffic.bytes_read == pytest.approx(apart.traffic.bytes_read, rel=0.02)
    assert shapes[0].requests > shapes[-1].requests and shapes[0].size < shapes[-1].size


def test_what_is_dear_decides_which_chunks_are_cheapest(modules) -> None:
    small = modules.probe.Reading((64, 64), requests=8, size=100_000, samples_per_second=100)
    large = modules.probe.Reading((256, 256), requests=2, size=900_000, samples_per_second=200)
    options = modules.probe.parse_options([])
    assert large.dollars(options) == pytest.approx({"requests": 0.8, "egress": 0, "time": 3 / 3600 * 5000})
    assert modules.probe.cheapest([small, large], options) is large
    abroad = modules.probe.parse_options(["--egress-price", "0.09"])
    assert small.dollars(abroad)["egress"] == pytest.approx(9)
    assert modules.probe.cheapest([small, large], abroad) is small
    assert modules.probe.fastest([small, large]) is large


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_is_counted_without_a_listing(layout: str, modules, open_reader) -> None:
    reader = open_reader(layout)
    chunks = [path for path in list_chunks(reader) if path.stat().st_size]
    upkeep = modules.upkeep.find_upkeep(client_of(modules, reader), reader)
    own = reader.fields[U].encoding["chunks"]
    in_all = 36 * -(-37 // own[1]) * -(-72 // own[2])
    assert upkeep.objects == len(chunks) == (9 if layout == "shards" else in_all)
    assert upkeep.size == pytest.approx(sum(path.stat().st_size for path in chunks), rel=0.15)
    assert modules.upkeep.count_objects(reader, own[1:]) == in_all
    assert modules.upkeep.count_objects(reader, (37, 72)) == 36


def test_what_is_missing_is_neither_an_object_nor_bytes(modules, make_small_store, tmp_path: Path) -> None:
    make_small_store(tmp_path / "store", "")
    reader = modules.store.FieldReader(modules.location.Location(str(tmp_path / "store")), [U])
    reader.open()
    chunks = list_chunks(reader)
    for path in chunks[::2]:
        path.unlink()
    upkeep = modules.upkeep.find_upkeep(client_of(modules, reader), reader)
    assert upkeep.objects == pytest.approx(len(chunks) / 2, rel=0.4)  # of a sample


def list_chunks(reader) -> list[Path]:
    """The files of a variable's chunks or shards."""
    files = [path for path in (Path(reader.location.url) / U).rglob("*") if path.is_file()]
    return sorted(path for path in files if path.suffix != ".json" and not path.name.startswith(".z"))


def client_of(modules, reader):
    return modules.probe.connect(reader.location)


def test_a_million_objects_cost_five_dollars_to_write_and_half_a_cent_to_list(modules) -> None:
    upkeep = modules.upkeep.Upkeep(objects=1_000_001, size=2e12)
    dollars = upkeep.dollars(put_price=0.005, month_price=0.023)
    assert dollars == pytest.approx({"put": 5.000005, "list": 1001 / 1000 * 0.005, "month": 46})
    large = modules.upkeep.Upkeep(objects=1000, size=1000 * 12 * 2**20)  # three parts, begun and ended
    assert large.puts == 5000 and large.dollars(put_price=1, month_price=0)["put"] == 5


@pytest.mark.parametrize("share", [0, 0.02])
def test_uneven_gets_are_noted(share: float, modules, capsys: pytest.CaptureFixture[str]) -> None:
    wire = modules.wire
    seconds = np.full(100, 0.03)
    seconds[: int(100 * share)] = 0.2
    bursts = [wire.Burst(n, 1000, 1) for n in wire.AT_ONCE]
    modules.probe.print_wire(wire.Wire(seconds, bursts, start=1, per_request=0, per_byte=0))
    assert ("note: GETs are uneven" in capsys.readouterr().out) == (share > 0)


def test_it_prints_what_it_returns(modules, folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(modules.wire, "AT_ONCE", (1, 4))
    monkeypatch.setattr(modules.wire, "SECONDS", 0.1)
    with buckets.serving(folder, latency_ms=0) as address:
        flags = ["--store", "s3://winds/plain", "--endpoint", address, "--anonymous"]
        prices = ["--put-price", "1000", "--month-price", "1e9"]
        found = modules.probe.main([*flags, *prices, "--patch-size", "16", "--variables", U])
    printed = capsys.readouterr().out
    for chunk in ("fastest", "cheapest"):
        lines = [line for line in printed.splitlines() if chunk in line]
        assert len(lines) == 1 and lines[0].startswith(" x ".join(map(str, found[chunk])))
    epoch = 36 * 37 * 72 // 16**2
    assert f"{epoch:,} samples\n  {epoch * found['now']['requests']:,.0f} GETs" in printed
    upkeep = found["upkeep"]
    assert f"  ${upkeep['objects']:,.2f} to write them, $1.00 to list them" in printed
    assert f"  ${upkeep['size']:,.2f} a month to keep them" in printed
    assert f"the variables: {found['upkeep']['objects']:,} objects" in printed
    assert found["best_at_once"] in (1, 4) and found["p99_ms"] >= found["latency_ms"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--patch-size", "40"], "--patch-size 40: the grid is 37 x 72; give a multiple of 4 from 16 to 36"),
        (["--variables", "gust"], "--variables gust: "),
        (["--batch-size", "0"], "--batch-size"),
        (["--egress-price", "-1"], "--egress-price"),
        (["--store", "none"], "--store none: no such folder"),
    ],
)
def test_bad_input_is_named(flags: list[str], message: str, modules, folder: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        modules.probe.main(["--store", str(folder / "winds/plain"), *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]
