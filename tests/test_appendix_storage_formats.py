"""Appendix, storage formats: every format gives back every bit, and asks for what the page says. No clock."""

import json
import struct
from contextlib import closing
from pathlib import Path

import book
import numpy as np
import pytest
import xarray as xr
from runs import load

entry = load("appendix/storage_formats.py", "appendix_storage_formats")
RESULTS = book.ROOT / "appendix/results/storage_formats.json"
PATCH = 32


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    """Fourteen months: more than a shard, and not two whole ones."""
    with xr.open_dataset(entry.WINDS, engine="h5netcdf") as file:
        return file.isel(time=slice(14)).load().drop_encoding()


@pytest.fixture(scope="module")
def folder(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each format's files, under the name of its class."""
    folder = tmp_path_factory.mktemp("formats")
    for kind in entry.FORMATS:
        kind.write(folder / kind.__name__, winds)
    return folder


def opened(kind: type, path: Path, asked: list[int] | None = None) -> closing:
    return closing(kind(path, (2, 73, 144), asked))


@pytest.mark.parametrize("kind", entry.FORMATS, ids=lambda kind: kind.__name__)
def test_every_bit_comes_back_in_order_singly_and_as_a_patch(
    kind: type, folder: Path, winds: xr.Dataset
) -> None:
    whole = np.stack([winds[name].values for name in entry.NAMES], 1)
    path, corners = folder / kind.__name__, [(13, 0, 0), (0, 41, 112), *entry.draw(5, PATCH, winds)]
    wanted = [whole[t, :, row : row + PATCH, column : column + PATCH].tobytes() for t, row, column in corners]
    with opened(kind, path) as stored:
        assert [record.tobytes() for record in stored.maps(14)] == [record.tobytes() for record in whole]
        assert [stored.patch(*corner, PATCH).tobytes() for corner in corners] == wanted
        assert stored.map(3).tobytes() == whole[3].tobytes() and stored.map(3).dtype == np.float32
    if kind.ranges:  # counting changes nothing
        with opened(kind, path, []) as counted:
            assert [counted.patch(*corner, PATCH).tobytes() for corner in corners] == wanted


@pytest.mark.parametrize("kind", entry.FORMATS[:5], ids=lambda kind: kind.__name__)
def test_compressed_is_smaller_and_the_same(
    kind: type, folder: Path, winds: xr.Dataset, tmp_path: Path
) -> None:
    kind.write(tmp_path / "packed", winds, compress=True)
    entry.check(kind, tmp_path / "packed", winds)
    assert entry.size(tmp_path / "packed")[0] < 0.97 * entry.size(folder / kind.__name__)[0]


def test_the_check_finds_one_changed_bit(folder: Path, winds: xr.Dataset) -> None:
    other = winds.copy(deep=True)
    other[entry.NAMES[1]].values.view(np.int32)[5, 3, 7] ^= 1
    with pytest.raises(ValueError, match="does not hold what was written"):
        entry.check(entry.Parquet, folder / "Parquet", other)


def test_what_a_patch_asks_of_a_bucket(folder: Path, winds: xr.Dataset) -> None:
    corners, record = entry.draw(30, PATCH, winds), 2 * 73 * 144 * 4
    asks = {k.__name__: entry.count(k, folder / k.__name__, winds, corners, PATCH) for k in entry.FORMATS}
    requests = {name: ask["patch_requests"] for name, ask in asks.items()}
    assert requests["NetCDF"] == pytest.approx(
        2, abs=0.3
    )  # a chunk of each variable, and now and then its index
    assert (requests["Zarr"], requests["ShardedMaps"]) == (2, 4)  # a shard's index first
    assert all(requests[name] == 1 for name in ("Parquet", "TFRecord", "Tar", "Files"))
    assert requests["LMDB"] is None
    for name in set(asks) - {"LMDB", "ShardedPatches"}:
        assert record <= asks[name]["patch_bytes"] < 1.02 * record, name
    # Chunks of the patch's size: more requests, less bytes
    assert requests["ShardedPatches"] > 4
    assert asks["ShardedPatches"]["patch_bytes"] < record / 2
    # An index is made from as many headers as there are records.
    assert asks["TFRecord"]["open_requests"] >= 14 and asks["Tar"]["open_requests"] >= 14
    assert asks["Files"]["open_requests"] == 1


def test_a_patch_of_a_shard_fetches_the_whole_index(winds: xr.Dataset, folder: Path) -> None:
    asked: list[int] = []
    with opened(entry.ShardedPatches, folder / "ShardedPatches", asked) as stored:
        asked.clear()
        stored.patch(0, 0, 0, PATCH)
    index, chunk = 12 * 8 * 16 + 4, 37 * 36 * 4  # two numbers of 8 bytes a chunk, and a checksum
    assert sorted(asked) == sorted([index, chunk] * 2)


def test_tfrecords_are_what_others_write(folder: Path, winds: xr.Dataset) -> None:
    # The first bytes of every TensorBoard file: a record of 24 bytes, and the checksum of that number.
    assert struct.pack("<I", entry.masked_crc(struct.pack("<Q", 24))) == b"\xa3\x7fK\x22"
    torn = bytearray((folder / "TFRecord").read_bytes())
    torn[12 + 50] ^= 1
    (path := folder / "torn").write_bytes(torn)
    with opened(entry.TFRecord, path) as stored, pytest.raises(ValueError, match="record 0 is damaged"):
        stored.map(0)
    torn[3] ^= 1
    path.write_bytes(torn)
    with pytest.raises(ValueError, match="header at byte 0"):
        entry.TFRecord(path, (2, 73, 144))


def test_only_netcdf_and_zarr_keep_the_coordinates(folder: Path, winds: xr.Dataset) -> None:
    for kind in (entry.NetCDF, entry.Zarr, entry.ShardedMaps, entry.ShardedPatches):
        with opened(kind, folder / kind.__name__) as stored, stored.dataset() as found:
            xr.testing.assert_identical(found.load(), winds)


def test_lmdb_grows_when_it_is_written_again_at_once(winds: xr.Dataset, tmp_path: Path) -> None:
    sizes = {}
    for at_once in (True, False):
        sizes[at_once] = []
        for _ in range(4):
            entry.LMDB.write(path := tmp_path / str(at_once), winds, at_once)
            sizes[at_once].append(entry.size(path)[0])
    first, second, third, fourth = sizes[True]
    assert 1.9 < second / first < 2.1 and 2.8 < third / first < 3.1 and fourth < 1.1 * third
    assert sizes[False][3] < 1.5 * sizes[False][0]


def test_a_dictionary_costs_parquet_room(winds: xr.Dataset, folder: Path, tmp_path: Path) -> None:
    entry.Parquet.write(tmp_path / "dictionary", winds, dictionary=True)
    assert entry.size(tmp_path / "dictionary")[0] > 1.2 * entry.size(folder / "Parquet")[0]


def test_main_at_few_patches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, winds: xr.Dataset, capsys
) -> None:
    winds.isel(time=slice(3)).to_netcdf(tmp_path / "few.nc", engine="h5netcdf")
    monkeypatch.setattr(entry, "WINDS", tmp_path / "few.nc")
    monkeypatch.setattr(entry, "LARGE", {"tile": 2, "times": 2})
    monkeypatch.setattr(entry, "__file__", str(tmp_path / "storage_formats.py"))
    flags = "--patches 3 --rounds 1 --patch-size 16 --save-results".split()
    found = entry.main(flags)
    saved = json.loads((tmp_path / "results/storage_formats.json").read_text())
    assert saved["rows"] == [json.loads(json.dumps(found))]
    assert saved["command"] == " ".join(["uv run python storage_formats.py", *flags])
    assert [row["format"] for row in found["large"]] == [kind.label for kind in entry.FORMATS]
    by = {row["format"]: row for row in found["large"]}
    assert by["TFRecord"]["patch_bytes"] > 3.9 * found["winds"][6]["patch_bytes"]
    assert "LMDB written" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--patch-size 74", "--patch-size 0", "--patches 0", "--rounds 0"])
def test_bad_flags_are_refused_before_anything_is_written(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(entry, "measure", lambda *args: pytest.fail("went on"))
    with pytest.raises(SystemExit, match="2"):
        entry.main([*flags.split(), "--save-results"])
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"{flags}: " in message and "give at " in message


def test_the_committed_results_say_what_the_page_says() -> None:
    (found,) = book.results("appendix/results/storage_formats.json")["rows"]
    winds, large = ({row["format"]: row for row in found[name]} for name in ("winds", "large"))
    raw = 132 * 2 * 73 * 144 * 4
    assert all(raw < row["bytes"] < 1.03 * raw for row in winds.values())
    assert all(0.85 * raw < packed < 0.95 * raw for packed in found["compressed"].values())

    def rate(rows: dict, name: str, what: str = "patches_per_second") -> float:
        return rows[name][what]["median"]

    zarr, patches = "Zarr", "Zarr, 37 x 36 cells in shards"
    for name in ("NetCDF-4", "Parquet", "LMDB", "TFRecord", "WebDataset tar", "a .npy file a map"):
        assert rate(winds, name) > 1.5 * rate(winds, zarr), name
    assert rate(winds, "LMDB") == max(rate(winds, name) for name in winds)
    assert rate(winds, "NetCDF-4", "xarray_patches_per_second") < rate(winds, "NetCDF-4") / 10
    assert rate(winds, zarr, "maps_per_second") > 2 * rate(winds, patches, "maps_per_second")
    assert large[patches]["patch_bytes"] < large[zarr]["patch_bytes"] / 15
    assert large["LMDB"]["patch_bytes"] is None
