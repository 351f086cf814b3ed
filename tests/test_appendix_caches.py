"""Appendix, caches.py: real caches hit as often as the formulas say, and a limit holds where the page says so."""

import asyncio
import importlib.util
import itertools
import math
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import book
import numpy as np
import pytest
from block_order import BlockOrder
from zarr.storage import LocalStore, MemoryStore

spec = importlib.util.spec_from_file_location("appendix_caches", book.ROOT / "appendix/caches.py")
entry = importlib.util.module_from_spec(spec)
spec.loader.exec_module(entry)
ITEMS, EPOCHS = 48, 16


def hits(kind, kept: int, epochs: list, items: int) -> list[float]:
    return entry.hit_rates(*entry.make_cache(kind, items, kept), epochs)


@pytest.mark.parametrize("kept", range(1, 6))
def test_shuffled_epochs_hit_exactly_as_often_as_expected(kept: int) -> None:
    """All orders of a second epoch, each once: the mean is the expectation, with no error left."""
    items = 5
    orders = list(itertools.permutations(range(items)))
    found = sum(
        Fraction(round(items * hits(entry.CacheStore, kept, [range(items), o], items)[1]), items)
        for o in orders
    )
    assert entry.shuffled(items, kept) == pytest.approx(float(found / len(orders)), abs=1e-12)


def test_the_expectation_tends_to_the_pages_formula() -> None:
    for share in (0.1, 0.5, 0.9):
        limit = share + (1 - share) * math.log(1 - share)
        assert entry.shuffled(100_000, round(100_000 * share)) == pytest.approx(limit, abs=1e-4)


def test_each_order_hits_as_often_as_expected() -> None:
    rows = entry.by_order(ITEMS, EPOCHS, seed=1)
    assert len(rows) == len(entry.ORDERS) * len(entry.SHARES)
    for row in rows:
        assert abs(row["hits"] - row["expected"]) <= 4 * row["standard_error"] + 1e-9, row
    assert max(row["standard_error"] for row in rows) < 0.02


def test_blocks_need_room_for_all_slots() -> None:
    rng = np.random.default_rng(0)
    epochs = [entry.epoch("blocks", ITEMS, rng) for _ in range(3)]
    assert max(hits(entry.CacheStore, entry.SLOTS - 1, epochs, ITEMS)) < 1 / entry.BLOCK_PATCHES
    assert min(hits(entry.CacheStore, entry.SLOTS, epochs, ITEMS)) >= 1 - 1 / entry.BLOCK_PATCHES


@pytest.mark.parametrize("order", ["same", "shuffled", "blocks"])
def test_pinning_hits_its_share_in_every_order(order: str) -> None:
    rng = np.random.default_rng(0)
    epochs = [entry.epoch(order, ITEMS, rng) for _ in range(4)]
    assert hits(entry.Pinned, ITEMS // 4, epochs, ITEMS)[1:] == pytest.approx([1 / 4] * 3)


def test_ranks_share_no_cache_unless_each_has_its_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "RANKS", ((2, 0.5), (4, 0.125), (4, 0.25)))
    for row in entry.by_rank(96, 12, seed=1):
        assert row["anew"] == pytest.approx(row["expected_anew"], abs=0.04), row
        assert row["fixed"] == pytest.approx(row["expected_fixed"], abs=0.04), row


def test_a_limit_on_disk_holds_for_one_process_only() -> None:
    """If this fails with a newer Zarr, which counts what it finds, the page may say so."""
    found = {}
    for row in entry.limits(12, 3):
        found.setdefault(row["cache"], []).append(row["in_folder"])
    assert found["CacheStore"] == [3, 6, 9, 12]
    assert found["cleared"] == found["pinned"] == [3, 3, 3, 3]
    assert found["oversized"] == [12] * 4


def test_pinning_shares_its_room_among_reads_under_way(tmp_path: Path) -> None:
    bucket, cache = entry.make_cache(entry.Pinned, 12, 5, tmp_path)

    async def read_all() -> list:
        return await asyncio.gather(*(cache.get(f"c/{item}", entry.PROTOTYPE) for item in range(12)))

    assert [len(found) for found in asyncio.run(read_all())] == [entry.ITEM_BYTES] * 12
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 5
    assert bucket.requests == 12


def test_a_part_of_an_object_is_read_as_it_is() -> None:
    part = entry.zarr.abc.store.RangeByteRequest(2, 5)
    source = entry.Bucket(MemoryStore({"c/0": entry.PROTOTYPE.buffer.from_bytes(b"0123456789")}))
    cache = entry.Pinned(source, cache_store=MemoryStore(), max_size=100)
    for _ in range(2):
        assert asyncio.run(cache.get("c/0", entry.PROTOTYPE, part)).to_bytes() == b"234"
    assert asyncio.run(cache.get("c/0", entry.PROTOTYPE)).to_bytes() == b"0123456789"


@pytest.mark.parametrize("cache", ["none", "memory", "disk", "decoded", "pinned"])
def test_every_cache_gives_what_the_bucket_holds(cache: str, tmp_path: Path) -> None:
    entry.make_maps(tmp_path / "maps", 3)
    maps = entry.zarr.open_array(LocalStore(tmp_path / "maps"), mode="r")
    way = entry.make_way(cache, tmp_path, 0, 10**8)
    before = way.bucket.requests
    for index in (0, 1, 2, 0, 1, 2):
        np.testing.assert_array_equal(way.get(index), maps[index])
    assert way.bucket.requests - before == (6 if cache == "none" else 3)
    assert (way.held() > 0) == (cache != "none")


def test_main_counts_as_it_says_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "HERE", tmp_path)
    monkeypatch.setattr(entry, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(entry, "RANKS", ((2, 0.5),))
    flags = "--items 48 --epochs 2 --maps 3 --rounds 1 --latency-ms 0 --save-results".split()
    rows = entry.main(flags)
    assert {row["study"] for row in rows} == {"orders", "ranks", "limits", "rates"}
    full = [row for row in rows if row["study"] == "rates" and row["share"] == 1]
    assert len(full) == 6 and all(row["hits"] == 1 for row in full)
    assert book.results(tmp_path / "results/caches.json")["rows"] == rows
    assert (tmp_path / "results/caches.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flag, value", [("items", "50"), ("epochs", "1"), ("maps", "133"), ("latency-ms", "-1")]
)
def test_bad_input_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(entry, "HERE", tmp_path)
    with pytest.raises(SystemExit) as refused:
        entry.main([f"--{flag}={value}", "--save-results"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert refused.value.code == 2 and f"--{flag} {value}" in last and "give a" in last
    assert not list(tmp_path.iterdir())


def test_the_committed_results_keep_what_the_page_says() -> None:
    rows = book.results("appendix/results/caches.json")["rows"]
    assert [row for row in rows if row["study"] == "limits"] == entry.limits()
    for row in (row for row in rows if row["study"] == "orders"):
        assert row["expected"] == pytest.approx(entry.expected(row["order"], 240, round(240 * row["share"])))
        assert abs(row["hits"] - row["expected"]) <= 4 * row["standard_error"] + 1e-9, row
    rates = {(row["latency_ms"], row["cache"], row["share"]): row for row in rows if row["study"] == "rates"}
    none, memory, decoded = (
        rates[30, cache, share]["ms"] for cache, share in entry.CACHES[:4] if cache != "disk"
    )
    assert none > 3 * memory and memory > 10 * decoded
    assert rates[30, "pinned", 0.5]["ms"] < 0.8 * rates[30, "memory", 0.5]["ms"]
    assert rates[0, "none", 0]["ms"] < 5 * rates[0, "memory", 1]["ms"]
    assert rates[30, "memory", 1]["held_mb"] < rates[30, "decoded", 1]["held_mb"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_chapter_4_deals_chunks_to_ranks_anew(ranks: int) -> None:
    """A block has one rank in an epoch, and the same in the next one by chance only."""
    order = BlockOrder(blocks=240, batch_size=8, slots=32, patches_per_block=8, seed=0)
    owners = [defaultdict(set), defaultdict(set)]
    for step, k in itertools.product(range(2 * 240), range(8)):
        read = order.read(order.address(step, k)[0])
        if read.epoch < 2:  # slots begin with a part of a block, and so reach the third
            owners[read.epoch][read.block].add(k * ranks // 8)
    assert {len(of_block) for of_epoch in owners for of_block in of_epoch.values()} == {1}
    same = np.mean([owners[0][block] == owners[1][block] for block in range(240)])
    assert abs(same - 1 / ranks) < 4 * math.sqrt((1 - 1 / ranks) / ranks / 240)
