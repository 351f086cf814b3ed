"""Chapter 4: compare.py measures readers that give what the store holds, and says of the others why it does not."""

import json
import multiprocessing
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import programs
import pytest
from test_04_data_pipeline import CHAPTER, load

SCRIPT = "04_data_pipeline/compare.py"
compare, object_store = load("compare")
PEERS = {name: each.package for name, each in compare.ALTERNATIVES.items() if each.package}
OWN = ["naive", "chapter-3", "ours", "limit", "gets"]
QUICK = ["--quick", "--latency-ms", 5]


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def needs(*names: str):
    """Skip a test unless these peers are installed."""
    missing = [name for name in names if not installed(PEERS[name])]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def importable(monkeypatch) -> None:
    """Let another process find this chapter's scripts and the functions of this file by their names."""
    for name, module in (("compare", compare), ("test_04_compare", sys.modules[__name__])):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(CHAPTER)


def case_of(name: str, **options: object):
    """A small measurement of the quick store, which is made if it is not there."""
    (compare.OUTPUTS / compare.STORES).mkdir(parents=True, exist_ok=True)
    local = compare.xr.open_zarr(compare.make_store(compare.SOURCE, quick=True), chunks=None)
    times = local[compare.NAMES].sel(time=compare.YEARS)
    shape = tuple(times.sizes[dim] for dim in ("time", "latitude", "longitude"))
    truth = np.stack([times[each].values for each in compare.NAMES])
    return compare.Case(name, compare.SOURCE, 0, batches=2, shape=shape, quick=True, **options), truth


# ---------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only", "pandas"], "--only pandas: no such name; choose from naive, xbatcher, "),
        (["--layouts", "2x2"], "--layouts 2x2: no such name; choose from 1x128x128, "),
        (["--rounds", "0"], "--rounds 0: too small; give at least 1"),
        (["--rounds", "many"], "--rounds: invalid int value: 'many'"),
        (["--samples", "31"], "--samples 31: too small; give at least 32"),
        (["--latency-ms", "-1"], "--latency-ms -1.0: too small; give at least 0"),
        (["--latency-ms", "nan"], "--latency-ms nan: too small; give at least 0"),
        (["--quick", "--save-results"], "--save-results: --quick would change the rows"),
        (["--only", "ours", "--save-results"], "--save-results: --only would change the rows"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags: list[str], message: str) -> None:
    done = programs.run(SCRIPT, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"compare.py: error: {message}"), done.err
    assert done.err.count("\n") == 1


def without(monkeypatch, *packages: str) -> list[list[str]]:
    """Let all peers be installed but these; what would have been measured goes to the list."""
    asked, true = [], compare.version

    def pretend(package: str) -> str:
        if package in packages:
            raise PackageNotFoundError(package)
        return "1" if package in PEERS.values() else true(package)

    monkeypatch.setattr(compare, "version", pretend)
    monkeypatch.setattr(compare, "compare", lambda args, names: asked.append(names) or [])
    monkeypatch.setattr(compare, "start_forkserver", lambda: None)
    monkeypatch.setattr(compare, "write_aside", lambda path, content: None)
    return asked


def test_missing_peers_are_named_and_left_out(monkeypatch, capsys) -> None:
    asked = without(monkeypatch, "litdata", "xbatcher")
    compare.main([])
    assert asked == [[name for name in compare.ALTERNATIVES if "xbatcher" not in name and name != "litdata"]]
    line = "not installed, and left out: litdata, xbatcher; with them: uv run --group peers python compare.py"
    assert line in capsys.readouterr().out.splitlines()


def test_results_are_not_saved_without_all_peers(monkeypatch) -> None:
    asked = without(monkeypatch, "tensorstore")
    with pytest.raises(
        object_store.InputError, match="--save-results: tensorstore not installed; run uv run"
    ):
        compare.main(["--save-results"])
    with pytest.raises(
        object_store.InputError, match="--only tensorstore: not installed; run uv run --group"
    ):
        compare.main(["--only", "tensorstore"])
    assert not asked


# ------------------------------------------------------------------------------------------------ what is found


def rows_of(*names: str, timeout: float) -> list[dict]:
    """The rows that a quick run finds; it leaves nothing but them and the store."""
    results, outputs = CHAPTER / "results", CHAPTER / "outputs/compare"
    before, runs = sorted(results.glob("*")), set(outputs.glob("run-*"))
    programs.require_success(SCRIPT, *QUICK, "--only", *names, timeout=timeout)
    assert sorted(results.glob("*")) == before
    assert set(outputs.glob("run-*")) <= runs, "copies are left"
    return json.loads((outputs / "rows.json").read_text())["rows"]


FIGURES = ("samples_per_second", "requests_per_sample", "bytes_per_sample", "cpu_ms_per_sample", "peak_mb")


def assert_complete(row: dict) -> None:
    for name in FIGURES:
        assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"], (row["alternative"], name)
    assert row["samples"] >= row["batch_size"] and row["latency_ms"] == 5
    assert (row["workers_peak_mb"]["min"] > 0) == (row["workers"] > 0)
    if row["alternative"] not in ("limit", "gets"):
        assert row["first_batch_seconds"]["min"] > 0 and row["setting"]
        for name in ("exact_resume", "other_world_size"):
            assert row[name] in (True, False) and row[f"{name}_because"]
    if row["layout"] == compare.CONVERTED:
        assert row["conversion_seconds"]["min"] > 0 and row["copy_bytes"] > row["store_bytes"] / 2
        assert "cut" in row["cannot"]


def test_our_own_readers_are_measured_and_the_limit_reads_as_much() -> None:
    found = {(row["alternative"], row["workers"]): row for row in rows_of(*OWN, timeout=240)}
    assert [*found] == [*((name, n) for name in OWN[:3] for n in (0, 2)), ("limit", 0), ("gets", 0)]
    for row in found.values():
        assert_complete(row)
    ours = found["ours", 0]
    assert ours["blocks"] >= 0.9 * compare.SEVERAL * ours["blocks_held"]
    asked = {
        name: round(row["requests_per_sample"]["median"] * row["samples"], 6) for name, row in found.items()
    }
    assert 0.75 < asked["ours", 0] / ours["objects"] < 1.25
    assert asked["limit", 0] == asked["gets", 0] == ours["objects"]


@needs(*PEERS)
def test_the_peers_are_measured() -> None:
    rows = rows_of(*PEERS, "dask", timeout=600)
    assert {row["alternative"] for row in rows} == {*PEERS, "dask"}
    for row in rows:
        assert "could_not" not in row, row
        assert_complete(row)


def plan(case) -> dict:
    """The objects of the blocks that ours begins from the first step on, of those in the steps that are measured,
    and of those that its lanes may read ahead by then."""
    patches = compare.open_book(compare.BlockPatches, case).blocks
    steps = compare.steps_of(patches, case)
    located = [patches.locate(step, k) for step in range(steps.stop) for k in range(compare.BATCH)]
    last = {lane: number for lane, number, _ in located}
    ahead = [patches.visit(lane, number + more).block for lane, number in last.items() for more in (1, 2)]
    blocks = {"begun": compare.blocks_begun(patches, range(steps.stop)), "ahead": ahead}
    blocks["measured"] = compare.blocks_begun(patches, steps)
    return {name: [*chain(*(compare.keys_of(patches, each) for each in blocks[name]))] for name in blocks}


def read_ours(case) -> dict:
    """Take the batches that plan() is about, and count what was asked for after the store was opened."""
    opened = compare.open_book(compare.BlockPatches, case)
    before, batches = compare.counts(case.address), iter(opened.batches)
    for _ in range(compare.steps_of(opened.blocks, case).stop):
        next(batches)
    return {"requests": compare.counts(case.address)["requests"] - before["requests"]}


def test_the_limit_asks_for_the_objects_that_ours_asks_for(importable, tmp_path) -> None:
    with compare.serve(compare.OUTPUTS, 1) as address:
        case, _ = case_of("ours", address=address)
        keys = compare.fresh(case, plan)
    # A store that has no other objects than these: whoever asks for another fails.
    store, part = compare.OUTPUTS / "stores" / case.zarr, tmp_path / "stores" / case.zarr
    wind = {f"{name}/c" for name in compare.NAMES}
    rest = [file.relative_to(store) for file in store.rglob("*") if file.is_file()]
    needed = {str(file) for file in rest if "/".join(file.parts[:2]) not in wind}
    for file in needed | {*keys["begun"], *keys["ahead"]}:
        (part / file).parent.mkdir(parents=True, exist_ok=True)
        os.link(store / file, part / file)
    with compare.serve(tmp_path, 1) as address:
        case = compare.replace(case, address=address)
        asked = compare.fresh(case, read_ours)["requests"]
        limit = compare.fresh(compare.replace(case, name="limit"), compare.measure_limit)
    assert len(keys["measured"]) > 200
    assert len(keys["begun"]) <= asked <= len(keys["begun"]) + len(keys["ahead"])
    assert round(limit["requests_per_sample"] * limit["samples"], 6) == len(keys["measured"])
    size = sum((store / key).stat().st_size for key in keys["measured"])
    assert limit["bytes_per_sample"] * limit["samples"] == size


# ------------------------------------------------------------------------------------------ what is not let pass


@pytest.fixture
def figures() -> tuple[dict, np.ndarray]:
    """A measurement as it should be, and what the store holds."""
    truth = np.random.default_rng(0).normal(size=(2, 3, 128, 192)).astype("float32")
    positions = np.array([[0, 0, 0], [2, 64, 128], [1, 10, 150]])
    wind = [np.roll(truth[:, t, y : y + 64], -x, axis=-1)[..., :64] for t, y, x in positions]
    figures = {"wind": np.stack(wind), "positions": positions, "bytes_per_sample": 1000, "samples": 64}
    return figures | {"requests_per_sample": 2, "blocks": 64, "blocks_held": 16, "objects": 128}, truth


def test_a_good_measurement_passes(figures) -> None:
    assert compare.check(*figures, own_bytes=1000) is None  # it raises what it finds


def one_bit(figures: dict) -> None:
    figures["wind"].view("u4")[1, 1, 63, 63] ^= 1


@pytest.mark.parametrize(
    "spoil, message",
    [
        (one_bit, "a patch of time 2, row 64, column 128 is not what the store holds"),
        (lambda figures: figures.update(wind=figures["wind"].astype("f8")), "is not what the store holds"),
        (lambda figures: figures.update(wind=figures["wind"][..., :32]), "is not what the store holds"),
        (lambda figures: figures["positions"].__setitem__((0, 0), 1), "is not what the store holds"),
        (
            lambda figures: figures.update(bytes_per_sample=700),
            "served from what it held: 700 bytes a sample",
        ),
        (lambda figures: figures.update(blocks=32), "128 of 128 objects, 32 blocks of 16 held"),
        (lambda figures: figures.update(requests_per_sample=1), "64 of 128 objects, 64 blocks of 16 held"),
        (lambda figures: figures.update(requests_per_sample=4), "read blocks twice: 256 requests for 128"),
    ],
)
def test_a_measurement_that_lies_is_refused(figures, spoil, message: str) -> None:
    measured, truth = figures
    spoil(measured)
    with pytest.raises(compare.Failure, match=re.escape(message)):
        compare.check(measured, truth, own_bytes=1000)


def measure_swapped(case) -> dict:
    """A reader that mixes up the components."""
    compare.NAMES.reverse()
    return compare.measure(case)


def measure_briefly(case) -> dict:
    """A measurement that is over before the blocks are that were held when it began."""
    compare.steps_of = lambda patches, case: range(2, 4)
    return compare.measure(case)


@pytest.mark.parametrize(
    "name, function, message",
    [
        ("naive", measure_swapped, "is not what the store holds"),
        ("ours", measure_swapped, "is not what the store holds"),
        ("ours", measure_briefly, "served from what it held"),
    ],
)
def test_a_reader_that_lies_is_found_out(name: str, function, message: str, importable) -> None:
    with compare.serve(compare.OUTPUTS, 1) as address:
        case, truth = case_of(name, address=address)
        compare.check(compare.fresh(case, compare.measure), truth, own_bytes=1000)
        with pytest.raises(compare.Failure, match=message):
            compare.check(compare.fresh(case, function), truth, own_bytes=1000)


def fail(case) -> dict:
    print("a line of its own", flush=True)
    os._exit(3)


def complain(case) -> dict:
    raise ValueError("no such\nformat")


def sleep(case) -> dict:
    import time

    time.sleep(60)


@pytest.mark.parametrize(
    "function, message",
    [
        (fail, "ended with code 3: a line of its own"),
        (complain, "ValueError: no such format"),
        (sleep, "not done after 3 s"),
    ],
)
def test_a_reader_that_fails_is_given_up(function, message: str, importable) -> None:
    case = compare.Case("naive", compare.SOURCE, 0, 2, (3, 128, 192), True)
    with pytest.raises(compare.Failure, match=message):
        compare.fresh(case, function, seconds=3 if function is sleep else 60)


def compared(monkeypatch, fresh, *names: str) -> dict:
    """The rows of a run in which `fresh` stands for the processes that measure."""
    monkeypatch.setattr(compare, "fresh", fresh)
    args = SimpleNamespace(quick=True, rounds=2, samples=64, latency_ms=1, layouts=[compare.SOURCE])
    return {(row["alternative"], row["workers"]): row for row in compare.compare(args, list(names))}


MEASURED = dict.fromkeys(FIGURES, 1e6) | {"first_batch_seconds": 0.5, "workers_peak_mb": 0.0, "samples": 64}


def test_a_peer_that_fails_has_a_row_that_says_why(monkeypatch) -> None:
    asked = []

    def fresh(case, function) -> dict:
        asked.append((case.name, case.workers, function.__name__))
        if function is compare.convert:
            if case.name == "litdata":
                raise compare.Failure("no room")
            return {"seconds": 1.0, "bytes": 3e6 if case.name == "webdataset" else 5, "samples": 1}
        if (case.name, case.workers) == ("mosaicml", 2):
            raise compare.Failure("cannot be pickled")
        if (case.name, case.workers) == ("webdataset", 2) and asked.count(asked[-1]) == 1:
            raise compare.Failure("only once")
        if (case.name, case.workers) == ("webdataset", 2):
            return MEASURED | {"bytes_per_sample": 3e6}
        low = case.name == "tensorstore"
        return MEASURED | {"bytes_per_sample": 1.0 if low else 1e6}

    rows = compared(monkeypatch, fresh, "naive", "tensorstore", "mosaicml", "litdata", "webdataset")
    why = {key: row.get("could_not") for key, row in rows.items()}
    assert why["naive", 0] is why["mosaicml", 0] is None
    assert why["litdata", 0] == why["litdata", 2] == "no room"
    assert why["mosaicml", 2] == "cannot be pickled"
    assert why["tensorstore", 0].startswith("served from what it held: 1 bytes a sample were read")
    once = rows["webdataset", 2]
    assert (once["rounds"], once["failures"], once["failed_because"]) == (1, 1, "only once")
    assert "could_not" not in once
    held = "served from what it held: 1000000 bytes a sample were read, of 3000000"  # of its copy, not of the store
    assert rows["webdataset", 0]["could_not"] == held
    assert rows["naive", 2]["rounds"] == rows["mosaicml", 0]["rounds"] == 2
    assert rows["mosaicml", 0]["conversion_seconds"] == {"median": 1, "min": 1, "max": 1}
    assert [each for each in asked if each[0] == "litdata"] == [("litdata", 0, "convert")]  # and not again
    compare.show([*rows.values()])


def test_our_own_reader_must_not_fail(monkeypatch) -> None:
    def fresh(case, function) -> dict:
        raise compare.Failure("a bug")

    with pytest.raises(compare.Failure, match="ours, 1x128x128, 0 workers: a bug"):
        compared(monkeypatch, fresh, "ours")


def test_a_store_that_cannot_be_made_is_an_error_of_one_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compare, "OUTPUTS", tmp_path)
    monkeypatch.setitem(compare.SIZES, True, compare.SIZES[True]._replace(days=0))
    with pytest.raises(object_store.InputError, match=r"no store was made: .*--days 0"):
        compare.make_store(compare.SOURCE, quick=True)
    assert not list(tmp_path.rglob("*.zarr"))


# ------------------------------------------------------------------------------- what is said of the peers' state

SAMPLES, GLOBAL_BATCH, SEEN = 256, 8, 4  # SEEN: batches, after which the state is saved


def number(index: int) -> dict[str, np.ndarray]:
    return {"index": np.array([index], "int32")}


def mosaicml(data: Path, own: Path, batch: int):
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    if not data.exists():
        with MDSWriter(out=str(data), columns={"index": "ndarray:int32:1"}, size_limit=1000) as writer:
            for index in range(SAMPLES):
                writer.write(number(index))
    dataset = StreamingDataset(remote=str(data), local=str(own), shuffle=True, batch_size=batch)
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=2, multiprocessing_context="fork")


def litdata(data: Path, own: Path, batch: int):
    import litdata
    from litdata import StreamingDataLoader, StreamingDataset

    if not data.exists():
        rest = {"chunk_size": 16, "num_workers": 1, "verbose": False}
        litdata.optimize(number, list(range(SAMPLES)), str(data), **rest)
    dataset = StreamingDataset(str(data), shuffle=True, drop_last=True, cache_dir=str(own))
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=2, multiprocessing_context="fork")


def webdataset(data: Path, own: Path, batch: int):
    import webdataset

    if not data.exists():
        data.mkdir()
        with webdataset.ShardWriter(f"{data}/%06d.tar", maxcount=16, verbose=0) as writer:
            for index in range(SAMPLES):
                writer.write({"__key__": f"{index:06d}", "index.npy": number(index)["index"]})
    dataset = webdataset.WebDataset(sorted(map(str, data.glob("*.tar"))), shardshuffle=16, seed=0)
    dataset = dataset.shuffle(32).decode().map(lambda sample: {"index": sample["index.npy"]})
    return webdataset.WebLoader(dataset, batch_size=batch)


def read_rank(folder: Path, open_loader, rank: int, world: int, resume: bool, port: int, reply) -> None:
    """Send a rank's batches; if it does not resume, save the state when it has seen some of them."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in (ranks | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TMPDIR": str(folder)}
    if world > 1:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    own = folder / f"own-{world}-{resume}{'' if open_loader is mosaicml else f'-{rank}'}"  # ranks share one
    loader, state, found = open_loader(folder / "data", own, GLOBAL_BATCH // world), folder / "state", []
    if resume:
        loader.load_state_dict(json.loads(state.read_text()))
    for batch in loader:
        found.append(np.asarray(batch["index"]).ravel().tolist())
        if len(found) == SEEN and not resume and hasattr(loader, "state_dict"):
            state.write_text(json.dumps(loader.state_dict()))
    reply.send(found)
    os._exit(0)


def read(folder: Path, open_loader, world: int = 1, resume: bool = False) -> list[list[int]]:
    """The global batches that so many ranks read together, each in order of its numbers unless one rank reads."""
    context, port = multiprocessing.get_context("spawn"), programs.free_port()
    pipes, started = [], []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (folder, open_loader, rank, world, resume, port, theirs)
        started.append(context.Process(target=read_rank, args=arguments))
        started[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        assert all(pipe.poll(120) for pipe in pipes)
        parts = [pipe.recv() for pipe in pipes]
    finally:
        for process in started:
            process.kill()
            process.join()
    whole = [[*chain(*batches)] for batches in zip(*parts, strict=True)]
    return whole if world == 1 else [sorted(batch) for batch in whole]


@needs("mosaicml", "litdata")
@pytest.mark.parametrize("open_loader", [mosaicml, litdata])
def test_a_peer_that_is_said_to_resume_does(open_loader, tmp_path, importable) -> None:
    alternative = compare.ALTERNATIVES[open_loader.__name__]
    assert alternative.resume[0] and alternative.world[0]
    whole = read(tmp_path, open_loader)
    assert sorted(chain(*whole)) == list(range(SAMPLES))
    assert read(tmp_path, open_loader, resume=True) == whole[SEEN:]
    # On two ranks, no sample is lost or doubled, and global batches are those that one rank would have had.
    assert read(tmp_path, open_loader, world=2, resume=True) == [sorted(batch) for batch in whole[SEEN:]]
    # Only of MosaicML Streaming that is true from the start.
    same = read(tmp_path, open_loader, world=2) == [sorted(batch) for batch in whole]
    assert same == (open_loader is mosaicml)


@needs("webdataset")
def test_a_peer_that_is_said_not_to_resume_cannot(tmp_path, importable) -> None:
    assert not compare.ALTERNATIVES["webdataset"].resume[0]
    first, second = read(tmp_path, webdataset), read(tmp_path, webdataset)
    assert not (tmp_path / "state").exists()
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(SAMPLES))
    assert first[:SEEN] != second[:SEEN]
