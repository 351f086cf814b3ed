"""A store behind a path or a URL: what is read, what that costs, and what goes wrong with servers and chunks."""

import json
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import made_up_winds
import numpy as np
import pytest
import store
import torch
import xarray as xr
from block_order import BlockRead
from errors import DataError
from location import Location
from made_up_winds import COLUMNS, DIMS, MAP, ROWS, flags_for, make_datamodule, reader_of, write
from options import parse_options

CHUNKS = (8, ROWS, 20)
OBJECTS = 2 * 2  # in which a block of the two winds is kept

pytestmark = [  # of which train.py shows none, either
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return made_up_winds.make_winds()[["u", "v"]]


@pytest.fixture(scope="module")
def folder(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store."""
    return write(tmp_path_factory.mktemp("stores") / "whole", winds, CHUNKS).parent


# ------------------------------------------------------------------------------ the reader


def test_a_store_may_be_a_path_or_a_url_of_it(folder: Path, winds: xr.Dataset, monkeypatch) -> None:
    """Also a path that is relative to the current folder."""
    monkeypatch.chdir(folder)
    for place in ("whole", (folder / "whole").as_uri(), folder / "whole"):
        np.testing.assert_array_equal(reader_of(place).read("v", {"time": 2}), winds.v[2])


def test_the_times_of_a_chunk_are_found(winds: xr.Dataset, tmp_path: Path) -> None:
    """Along a dimension that is time by its attribute; of the chunk inside a shard, and of the larger chunk."""
    stored = winds.isel(time=slice(10)).transpose(*reversed(DIMS)).rename(time="instant")
    stored.instant.attrs = {"standard_name": "time"}
    encoding = {"u": {"chunks": (40, 20, 5), "shards": (40, 20, 10)}, "v": {"chunks": (40, 20, 1)}}
    stored.to_zarr(tmp_path / "store", encoding=encoding, consolidated=True)
    for names, times in ((["u", "v"], 5), (["v"], 1)):
        reader = reader_of(tmp_path / "store", *names)
        reader.open()
        assert reader.times_per_chunk == times


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list:
    """The clients that are made, from now on. Each waits for another, which should not come."""
    clients, others, connect = [], threading.Event(), store.connect

    def call(location: Location):
        clients.append(location)
        if len(clients) > 1:
            others.set()
        others.wait(0.2)
        return connect(location)

    monkeypatch.setattr(store, "connect", call)
    return clients


def test_a_run_opens_its_store_once(folder: Path, connected: list) -> None:
    """For climatology, training, validation and test together."""
    made = make_datamodule(flags_for(folder / "whole"))
    made.blocks.read_block(BlockRead(0, 0, 0, seed=0))
    for patches in (made.validation, made.test):
        patches[0, 0]
    assert len(connected) == 1


def test_a_pickled_reader_opens_the_store_anew_and_once(folder: Path, connected: list) -> None:
    """However many threads read. A client's threads and connections survive no pickle, so none may go into it."""
    reader = reader_of(folder / "whole", "v", retry_timeout=7)
    maps = reader.read("v", {"time": slice(0, 8)})
    sent = pickle.loads(pickle.dumps(reader))
    assert (sent.fields, sent.store) == (None, None)
    assert sent.location == reader.location
    assert sent.traffic.counts() == (0, 0, 0)
    np.testing.assert_array_equal(sent.read_at_once([{"time": n} for n in range(8)])[:, 0], maps)
    assert len(connected) == 2


# ------------------------------------------------------------------------------ what reading costs


def test_what_the_training_reads_is_counted_and_nothing_else(folder: Path) -> None:
    """Neither opening the store, nor the climatology, nor what validation reads meanwhile."""
    made = make_datamodule(flags_for(folder / "whole"))
    blocks = made.blocks
    assert len(made.validation.__getitems__([(0, k) for k in range(3)])) == 3
    assert blocks.reader.traffic.counts() == (0, 0, 0)

    samples = blocks.read_block(BlockRead(2, 2, 0, seed=0))
    objects = [folder / f"whole/{name}/c/2/0/{column}" for name in ("u", "v") for column in (0, 1)]
    size = sum(path.stat().st_size for path in objects)
    assert blocks.make_batch(samples)["traffic"].tolist() == [OBJECTS, size, 0, len(samples)]
    assert blocks.make_batch(samples[:3])["traffic"].tolist() == [0, 0, 0, 3]
    blocks.read_block(BlockRead(2, 2, 0, seed=0))
    assert blocks.make_batch(samples)["traffic"].tolist() == [OBJECTS, size, 0, len(samples)]
    assert blocks.reader.traffic.counts() == (2 * OBJECTS, 2 * size, 0)


def test_the_cost_of_a_sample_is_that_of_all_training_batches() -> None:
    """None without a batch: Lightning skips the loop of a run that is resumed at its end."""
    counter = store.RequestCounter()
    assert counter.per_sample() == {}
    trainer, module = SimpleNamespace(), SimpleNamespace(device=torch.device("cpu"))
    for _ in range(2):  # to begin again forgets what was before
        counter.on_train_start(trainer, module)
        assert counter.per_sample() == {}
        for traffic in ([12, 5000, 0, 4], [0, 0, 0, 4], [3, 1000, 1, 2]):
            counter.on_train_batch_end(trainer, module, None, {"traffic": torch.tensor(traffic)}, 0)
        assert counter.per_sample() == {"requests_per_sample": 1.5, "bytes_per_sample": 600}


@pytest.mark.parametrize("patches_per_block", [4, 8])
def test_times_that_an_epoch_leaves_out_are_said(patches_per_block: int, folder: Path, capsys) -> None:
    """A chunk has eight times."""
    make_datamodule(flags_for(folder / "whole", "--patches-per-block", patches_per_block))
    note = "note: a chunk has 8 times, of which an epoch uses --patches-per-block"
    assert (note in capsys.readouterr().err) == (patches_per_block == 4)


# ------------------------------------------------------------------------------ missing chunks


@pytest.mark.parametrize(
    ("encoding", "missing_chunks", "rule"),
    [
        ({"_FillValue": np.float32(np.nan)}, "refuse", None),
        ({"fill_value": np.nan}, "refuse", None),
        ({"missing_value": -99, "fill_value": -99}, "refuse", None),
        ({"_FillValue": -99, "fill_value": np.nan}, "fill", "copy"),
        ({"_FillValue": np.nan, "fill_value": 0.0}, "refuse", "if chunks"),
        ({"_FillValue": -32768, "fill_value": 0}, "fill", None),
        ({}, "refuse", "if chunks"),
        ({}, "fill", None),
    ],
)
def test_what_a_missing_chunk_means(encoding: dict, missing_chunks: str, rule: str | None) -> None:
    found = store.explain_missing(encoding, missing_chunks)
    assert found is rule is None or found.startswith(rule)


@pytest.mark.parametrize(
    "encoding",
    [
        {"_FillValue": None, "fill_value": 0.0},
        {"dtype": "int16", "scale_factor": 0.001, "_FillValue": -32768},  # xarray's own
    ],
    ids=["zeros", "packed zeros"],
)
def test_a_sparse_store_is_read_with_the_flag_and_is_refused_without(
    encoding: dict, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Days of nothing but 0, whose chunks are not written: as if they were. What is packed is unpacked."""
    dry = made_up_winds.with_land(winds)
    dry.v[1::5] = 0
    path = write(tmp_path / "sparse", dry, **encoding)
    assert not (path / "v/c/1").exists()
    said = r"v of \d+ times from 1982-01-01T00:00 on: v/c/\d+/0/0: this chunk is missing; .*give --missing-chunks"
    with pytest.raises(DataError, match=said):
        make_datamodule(flags_for(path))
    made = make_datamodule(flags_for(path, "--missing-chunks", "fill"))
    made.blocks.read_block(BlockRead(6, 6, 0, seed=0))
    traffic = made.blocks.reader.traffic
    assert traffic.counts() == (2, (path / "u/c/6/0/0").stat().st_size, 1)
    assert traffic.missing == {"v/c/6/0/0"}
    for name in ("u", "v"):
        found = made.data.reader.read(name, {"time": slice(0, 144)})
        np.testing.assert_allclose(found, dry[name], rtol=0, atol=0.00051 if "dtype" in encoding else 0)


@pytest.mark.parametrize(
    ("fill", "message"),
    [(None, "v/3.0.0: this chunk is missing"), (np.float32(np.nan), "NaN: a value or a chunk")],
)
def test_a_missing_chunk_of_zarr_format_2_is_refused(
    fill: float | None, message: str, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Where it would read as 0, because the store names no fill value, and where it reads as NaN."""
    path = tmp_path / "store"
    encoding = {name: {"chunks": MAP, "_FillValue": fill} for name in winds}
    winds.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=True)
    made = make_datamodule(flags_for(path))
    (path / "v/3.0.0").unlink()
    with pytest.raises(DataError, match=f"v o[fn] 1982-01-31T00:00: {message}"):
        made.blocks.make_batch(made.blocks.read_block(BlockRead(3, 3, 0, seed=0)))


@pytest.mark.parametrize("dim", DIMS)
def test_a_missing_chunk_of_a_coordinate_is_always_refused(
    dim: str, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Else its fill value would be a place or a date, and be sorted in among the others."""
    few = winds.isel(time=slice(11))
    few.to_zarr(tmp_path / "store", encoding={dim: {"chunks": (10,)}}, consolidated=True)
    chunk = tmp_path / f"store/{dim}/c/1"
    chunk.unlink()
    with pytest.raises(DataError, match=f"{dim}/c/1: this chunk of a coordinate is missing; copy it again"):
        reader_of(tmp_path / "store", missing_chunks="fill").open()


@pytest.mark.parametrize("lost", [None, 1, 3])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_times_that_were_appended_one_by_one_are_read(
    zarr_format: int, lost: int | None, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Zarr writes no chunk for the first one, which is 0; one that is lost is damage, here as elsewhere."""
    few = winds.isel(time=slice(6))
    few.isel(time=[0]).to_zarr(tmp_path / "store", zarr_format=zarr_format, consolidated=False)
    for number in range(1, 6):
        few.isel(time=[number]).to_zarr(tmp_path / "store", append_dim="time", consolidated=False)
    chunk = {2: "time/{}", 3: "time/c/{}"}[zarr_format]
    assert not (tmp_path / "store" / chunk.format(0)).exists()
    reader = reader_of(tmp_path / "store")
    if lost is None:
        np.testing.assert_array_equal(reader.open().time, few.time)
        return
    (tmp_path / "store" / chunk.format(lost)).unlink()
    with pytest.raises(DataError, match="this chunk of a coordinate is missing"):
        reader.open()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_missing_chunk_that_reads_as_0_is_refused_whatever_stands_for_no_value(
    zarr_format: int, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Where only an attribute says what stands for none, as xarray itself writes it."""
    few = winds.isel(time=slice(4))
    encoding = {"missing_value": -999.0, "_FillValue": None}
    few.to_zarr(tmp_path / "store", zarr_format=zarr_format, encoding={"u": encoding}, consolidated=False)
    np.testing.assert_array_equal(reader_of(tmp_path / "store").read("u", {"time": 2}), few.u[2])
    shutil.rmtree(tmp_path / "store/u/c", ignore_errors=True)
    for chunk in (tmp_path / "store/u").glob("[0-9]*"):
        chunk.unlink()
    with pytest.raises(DataError, match="this chunk is missing"):
        reader_of(tmp_path / "store").read("u", {"time": 2})


def test_a_store_that_could_not_be_opened_may_be_opened_again(
    folder: Path, winds: xr.Dataset, monkeypatch
) -> None:
    """Nothing half-made is left: what failed once is read as if it had not."""
    reader = reader_of(folder / "whole")
    with monkeypatch.context() as broken, pytest.raises(DataError, match="a moment"):
        broken.setattr(store, "find_limits", lambda stored: (_ for _ in ()).throw(DataError("a moment")))
        reader.open()
    np.testing.assert_array_equal(reader.read("v", {"time": 2}), winds.v[2])


def test_what_should_be_known_of_a_store_is_printed(winds: xr.Dataset, tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "series", winds, (144, 2, 2))
    make_datamodule(flags_for(path))
    assert "note: a map is read in 400 chunks" in capsys.readouterr().out


def test_a_month_that_was_never_trained_on_is_refused_at_once(folder: Path, capsys) -> None:
    """And not after a hundred steps, when it is validated; --missing mask leaves it out, and says so."""
    flags = flags_for(folder / "whole", "--train-times", "1982-01", "1982-06")
    with pytest.raises(DataError, match=r"they have no July, .*; give periods of the same months"):
        make_datamodule(flags)
    make_datamodule([*flags, "--missing", "mask"])
    assert "July 0.0%" in capsys.readouterr().out


def test_a_coordinate_that_is_not_used_may_lack_chunks(winds: xr.Dataset, tmp_path: Path) -> None:
    """And so may one of a single value, such as the height 0, whose chunk Zarr does not write."""
    more = winds.isel(time=slice(5)).expand_dims(height=[0]).assign(depths=("depth", np.zeros(3)))
    more = more.assign_coords(depth=[0, 0, 0])
    more.to_zarr(tmp_path / "store", consolidated=True)
    assert not (tmp_path / "store/depth/c").exists()
    assert not (tmp_path / "store/height/c").exists()
    np.testing.assert_array_equal(reader_of(tmp_path / "store").read("v", {"time": 2}), winds.v[2])


# ------------------------------------------------------------------------------ what is no store, or none any more


def change_metadata(path: Path, name: str, **changes: object) -> None:
    """Of an array of Zarr's format 2."""
    file = path / name / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut_append(path: Path) -> None:
    change_metadata(path, "v", shape=[4, ROWS, COLUMNS])


def use_codec(path: Path) -> None:
    change_metadata(path, "u", compressor={"id": "pcodec", "level": 8})


def use_format_3(path: Path, change: Callable[[dict], None]) -> None:
    """Write u anew, with metadata that another program may write."""
    stored = xr.open_zarr(path).drop_encoding().load()
    shutil.rmtree(path)
    stored.to_zarr(path, zarr_format=3, consolidated=False)
    file = path / "u/zarr.json"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))


def use_codec_3(path: Path) -> None:
    codec = {"name": "numcodecs.pcodec", "configuration": {"level": 8}}
    use_format_3(path, lambda metadata: metadata.update(codecs=[codec]))


def use_plain_fill(path: Path) -> None:
    use_format_3(path, lambda metadata: metadata["attributes"].update(_FillValue=-9999.0))


def cut_chunk(path: Path) -> None:
    chunk = path / "u/0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:50])


def put_into_group(path: Path) -> None:
    stored = xr.open_zarr(path).drop_encoding().load()
    shutil.rmtree(path)
    xr.DataTree.from_dict({"/surface": stored, "/aloft": stored}).to_zarr(path)


def of_folders(*names: str) -> Callable[[Path], None]:
    """A folder with these in it."""

    def make(path: Path) -> None:
        shutil.rmtree(path)
        for name in names:
            (path / name).mkdir(parents=True)

    return make


DAMAGE = {  # what becomes of a store, and what is said
    "an append was cut off": (cut_append, "conflicting sizes .*; an append was cut off: append the rest"),
    "a codec is not there": (use_codec, "codec not available.*; add the package"),
    "a codec is not there, format 3": (use_codec_3, "u of 1982-01-01T00:00: codec not .*; add the package"),
    "a plain fill value": (use_plain_fill, "Failed to decode fill_value.*; write the attribute _FillValue"),
    "a chunk was cut off": (cut_chunk, "u of 1982-01-01T00:00: .*; mend the store, or write it anew"),
    "groups": (put_into_group, "no variable is there; give one of its groups: aloft, surface"),
    "Icechunk": (
        of_folders("refs", "snapshots", "manifests"),
        "an Icechunk repository, not a Zarr store; give --icechunk main",
    ),
    "kerchunk": (
        of_folders(".zmetadata", "u"),
        "kerchunk's references, not a Zarr store; refer to the same files anew",
    ),
    "nothing": (
        of_folders("u"),
        "no Zarr store is there, .*credentials or --anonymous; set AWS_REQUEST_PAYER",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_cannot_be_read_is_named_with_a_remedy_of_its_own(
    case: str, winds: xr.Dataset, tmp_path: Path
) -> None:
    """Credentials are blamed only for what the client of a bucket reports."""
    change, message = DAMAGE[case]
    winds.isel(time=slice(5)).to_zarr(tmp_path / "store", zarr_format=2, consolidated=False)
    change(tmp_path / "store")
    with pytest.raises(DataError) as refused:
        reader_of(tmp_path / "store").read("u", {"time": 0})
    assert re.match(message, str(refused.value)), refused.value
    assert ("credentials" in str(refused.value)) == (case == "nothing")
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------ servers


def test_a_region_is_for_s3_only(folder: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        parse_options("", flags_for(folder / "whole", "--region", "eu-west-1"))
    assert "error: --region eu-west-1: only for --store s3" in capsys.readouterr().err
