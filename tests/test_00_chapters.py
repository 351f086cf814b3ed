"""What chapters share as programs: copied alone, killed and resumed, on two ranks, given bad input and damaged data.

One of the first files, because it is among the longest.
"""

import gc
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from threading import enumerate as threads

import book
import buckets
import icechunk
import numpy as np
import programs
import psutil
import pytest
import runs
import torch
import xarray as xr
import zarr
from alone import Alone, contents
from made_up_winds import make_datamodule, make_winds, write

CHAPTERS = ["03_cloud_data", "04_data_pipeline", "05_model_profiling", "06_whats_next"]
ANOTHER_FAILED = (2, "train.py: error: another rank failed, or does not answer; its own")
LAST_TO_LIVE = {  # the exit code of rank 0, and what it says, when it has lost rank 1
    "03_cloud_data": ANOTHER_FAILED,
    "04_data_pipeline": ANOTHER_FAILED,
    "05_model_profiling": ANOTHER_FAILED,
    "06_whats_next": (1, r"rank 1 \(process \d+ on \S+\) (is gone|does not answer)"),
}
WAITS = {"06_whats_next": {"wait_for_writes": True}}  # else a kill may come before a checkpoint is there
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4".split()
SMALL += "--checkpoint-every 2 --log-every 1".split()
# Slots give several samples, and take new blocks before the checkpoint and after it. Chapter 3 has none.
BLOCKS = "--shuffle-slots 8 --patches-per-block 2".split()
WITH_BLOCKS = CHAPTERS[1:]
thorough = pytest.mark.thorough


def in_gate(*chapters: str) -> pytest.MarkDecorator:
    """The gate runs a test in these chapters only: in the others, the same bytes are tested again."""
    each = [name if name in chapters else pytest.param(name, marks=thorough) for name in CHAPTERS]
    return pytest.mark.parametrize("chapter", each, indirect=True)


def of(chapters: list[str]) -> pytest.MarkDecorator:
    """A test is about something that only these chapters have."""
    return pytest.mark.parametrize("chapter", chapters, indirect=True)


@pytest.fixture(scope="module", params=CHAPTERS, autouse=True)
def chapter(request) -> Iterator[Path]:
    """The folder of each chapter in turn, whose files can be imported in each test."""
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms(request.param), programs.planted_in_all(**programs.QUICK):
        import train  # noqa: F401

        yield book.ROOT / request.param
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(scope="module")
def store(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with statistics, in a bucket of a folder of buckets."""
    return make_small_store(tmp_path_factory.mktemp("buckets") / "winds/whole")


def from_bucket(address: str) -> list[str]:
    """The flags that read it from its bucket."""
    return ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]


@pytest.fixture(scope="module")
def small(chapter: Path) -> list[str]:
    """The flags of a small run."""
    return [*SMALL, *BLOCKS] if chapter.name in WITH_BLOCKS else SMALL


@pytest.fixture(scope="module")
def alone(chapter: Path, small: list[str], store: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The folder copied alone, in which a run in double precision has come to its end."""
    alone = Alone(chapter, small, tmp_path_factory.mktemp("alone"))
    done = alone.start("--store", store, double_precision=True).wait()
    assert done.code == 0, done.err
    assert "warning" not in done.err.lower()
    return alone


@pytest.fixture
def refused(small: list[str], capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(*flags: object) -> str:
        import train

        with pytest.raises(SystemExit) as ended:
            train.main([*small, *map(str, flags)])
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


@pytest.fixture
def parse(small: list[str]) -> Callable:
    """Call it with flags: the options of a small run with these."""
    from options import parse_options

    return lambda *flags: parse_options("a test", [*small, *map(str, flags)])


def still_running(before: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that have been started since then and do not end by themselves."""
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    return left


# ------------------------------------------------------------------ as a reader types it, and copied alone


@pytest.mark.parametrize(
    ("steps", "at_most"),
    [(4, np.inf), pytest.param(200, -0.08, marks=thorough)],
    ids=["smoke test", "in full"],
)
def test_the_readers_command(chapter: Path, steps: int, at_most: float, tmp_path: Path) -> None:
    """It makes the small store if it is not there, serves it, trains, and leaves no process."""
    # Optimal interpolation is computed once for all chapters.
    kept = book.ROOT / CHAPTERS[0] / "outputs/climatology"
    few = ["--eval-samples", 24] if steps == 4 else []  # else it takes most of a minute
    printed = runs.run_readers_command(chapter, steps, tmp_path, "--climatology-dir", kept, *few)
    assert runs.check_summary(printed) <= at_most
    metrics = runs.summary(tmp_path)
    requests, size = re.search(r"([\d.]+) requests and ([\d.]+) MB for a sample\n", printed).groups()
    assert float(requests) == pytest.approx(metrics["requests_per_sample"], abs=0.05)
    assert float(size) == pytest.approx(metrics["bytes_per_sample"] / 1e6, abs=0.005)
    # The two variables of a patch have at least one object each; up to 8 patches are cut from a block, a map.
    assert metrics["requests_per_sample"] >= (2 / 8 if chapter.name in WITH_BLOCKS else 2)
    startup = metrics["startup_seconds"]
    assert startup > 0
    assert set(metrics["climatology_shares"].values()) == {1}
    assert f"\n{startup:.0f} s before the first step\n" in printed


def test_the_folder_copied_alone_trains_on_a_store_with_statistics(alone: Alone) -> None:
    """It computes no climatology, and writes nothing but its output."""
    assert runs.state(alone.output)["step"] == 4
    assert alone.kept() == []
    assert alone.written_elsewhere() == []


@in_gate("04_data_pipeline", "06_whats_next")
def test_without_statistics_it_computes_a_climatology_once_and_keeps_it(
    chapter: Path, small: list[str], store: Path, alone: Alone, tmp_path: Path
) -> None:
    """Nor again when a scheduler starts the run once more after its end, which then ends the same."""
    bare = shutil.copytree(store, tmp_path / "store")
    shutil.rmtree(bare / "statistics")
    zarr.consolidate_metadata(bare)
    (tmp_path / "alone").mkdir()
    plain, before = Alone(chapter, small, tmp_path / "alone"), contents(bare)
    done = plain.start("--store", bare, double_precision=True).wait()
    assert done.code == 0, done.err
    (kept,) = plain.kept()
    announced = f"climatology of a sample, kept in {kept.relative_to(plain.project)}"
    assert announced in done.out.splitlines()
    # The sample is all of these few times, so that the climatology is that of the statistics.
    for name, row in runs.summary(alone.output)["rmse"].items():
        assert runs.summary(plain.output)["rmse"][name] == pytest.approx(row, rel=1e-3), name

    written, first = kept.stat().st_mtime_ns, shutil.copytree(plain.output, tmp_path / "first")
    (plain.output / "summary.json").unlink()
    again = plain.start("--store", bare, "--resume", "auto", double_precision=True).wait()
    assert again.code == 0, again.err
    assert "climatology of" not in again.out
    assert plain.kept() == [kept]
    assert kept.stat().st_mtime_ns == written
    runs.assert_same_bits(plain.output, first)
    assert plain.written_elsewhere() == []
    assert contents(bare) == before


def test_copied_alone_and_without_a_store_it_says_what_is_missing(
    chapter: Path, small: list[str], tmp_path: Path
) -> None:
    """In the only line, and with exit code 2."""
    alone = Alone(chapter, small, tmp_path)
    done = alone.start().wait()
    missing = tmp_path / "03_cloud_data/make_store.py"
    line = f"train.py: error: --store: not given, and {missing}, which makes one, is missing; give --store"
    assert (done.code, done.out, done.err.strip()) == (2, "", line)
    assert not alone.output.exists()
    assert alone.written_elsewhere() == []


# ------------------------------------------------------------------------- killed and resumed, on two ranks


def test_killed_with_workers_nothing_is_left_and_it_resumes_to_the_bit_without(
    chapter: Path, small: list[str], store: Path, tmp_path: Path, alone: Alone
) -> None:
    """The workers have read for the steps after the kill."""
    faults = {"double_precision": True} | WAITS.get(chapter.name, {})
    with buckets.serving(store.parents[1], latency_ms=0) as address:
        flags = [*small, *from_bucket(address), "--output-dir", tmp_path, "--resume", "auto"]
        before = programs.running()
        killed = programs.run(chapter / "train.py", *flags, "--num-workers", 2, kill_at_step=3, **faults)
        assert killed.code == -9, killed.err
        assert still_running(before) == []
        programs.require_success(chapter / "train.py", *flags, **faults)
    runs.assert_same_bits(tmp_path, alone.output)
    runs.assert_resumed(tmp_path, 2, alone.output)


@in_gate("03_cloud_data")
def test_from_icechunk_killed_and_resumed_after_a_commit_to_the_bits_of_the_plain_store(
    chapter: Path, small: list[str], store: Path, tmp_path: Path, alone: Alone
) -> None:
    """The commit changes all values. Workers read, too."""
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "winds")))
    session = repository.writable_session("main")
    [statistics] = (store / "statistics").glob("*_*")
    for group in (None, f"statistics/{statistics.name}"):
        stored = xr.open_zarr(store, group=group, chunks=None, decode_cf=False, consolidated=False)
        stored.to_zarr(session.store, group=group, consolidated=False)
    first = session.commit("a copy")
    faults = {"double_precision": True} | WAITS.get(chapter.name, {})
    flags = [*small, "--store", tmp_path / "winds", "--icechunk", "main", "--resume", "auto"]
    flags += ["--output-dir", tmp_path / "run", "--num-workers", 1]
    assert programs.run(chapter / "train.py", *flags, kill_at_step=3, **faults).code == -9

    session = repository.writable_session("main")
    (xr.open_zarr(store, chunks=None, decode_cf=False)[[U, V]] + 1).to_zarr(session.store, mode="r+")
    second = session.commit("other values")
    done = programs.require_success(chapter / "train.py", *flags, **faults)
    assert f"note: Icechunk snapshot {first}, of " in done.out
    assert f"; main is at {second} now, which is not read\n" in done.out
    runs.assert_same_bits(tmp_path / "run", alone.output)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=thorough)])
def test_two_ranks_end_at_the_weights_of_one(
    accumulate: int, chapter: Path, small: list[str], store: Path, tmp_path: Path, alone: Alone
) -> None:
    flags = [*small, "--store", store, "--accumulate-grad-batches", accumulate, "--output-dir", tmp_path]
    done = programs.run_ranks(chapter / "train.py", 2, *flags, double_precision=True)
    assert [getattr(one, "code", one) for one in done] == [0, 0], programs.printed(done)
    runs.assert_same_but_for_rounding(tmp_path, alone.output)


@thorough
@pytest.mark.parametrize("fault", ["kill_at_step", "stall_at_step"])
def test_when_a_rank_is_lost_the_other_says_so_and_both_resume_to_the_bit(
    fault: str, chapter: Path, small: list[str], store: Path, tmp_path: Path
) -> None:
    """Without a time limit it would wait for ever for one that does not answer."""
    script, (code, says) = chapter / "train.py", LAST_TO_LIVE[chapter.name]
    flags = [*small, "--store", store, "--resume", "auto", "--process-group-timeout", 10, "--output-dir"]
    waits, planted = WAITS.get(chapter.name, {}), {1: {fault: 3}}
    with programs.started_ranks(script, 2, *flags, tmp_path / "run", planted=planted, **waits) as ranks:
        done = ranks[0].wait()
        ranks[1].process.kill()
        ranks[1].wait()
    assert done.code == code, done.err
    assert re.search(says, done.err), done.err
    for name in ("run", "whole"):
        both = programs.run_ranks(script, 2, *flags, tmp_path / name)
        assert [getattr(one, "code", one) for one in both] == [0, 0], programs.printed(both)
    runs.assert_same_bits(tmp_path / "run", tmp_path / "whole")
    runs.assert_resumed(tmp_path / "run", 2, tmp_path / "whole")


def test_data_and_training_that_begin_at_different_steps_are_an_error(
    store: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    """Samples would be repeated or lost."""
    from datamodule import WindDataModule

    one = property(lambda self: 1, lambda self, step: None)
    monkeypatch.setattr(WindDataModule, "first_step", one, raising=False)
    said = refused("--store", store, "--output-dir", tmp_path)
    assert "data begin at step 1, and training at step 0" in said


def test_ranks_that_begin_at_different_steps_are_an_error(
    store: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    """As on a node that does not see the folder of --resume auto: it would train from step 0, until a hang."""
    from lightning.pytorch.strategies import SingleDeviceStrategy

    def broadcast(self, value: object, src: int = 0) -> object:
        return value + 50 if type(value) is int else value  # rank 0 has a checkpoint of step 50

    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", broadcast)
    said = refused("--store", store, "--output-dir", tmp_path)
    assert "this rank begins at step 0, and rank 0 at 50; give all nodes the same checkpoint" in said


@of(CHAPTERS[:3])  # chapter 6 compares its records
def test_ranks_that_open_different_snapshots_are_an_error(
    store: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    """As those of a branch to which there was a commit meanwhile: each would train on values of its own."""
    from lightning.pytorch.strategies import SingleDeviceStrategy

    def broadcast(self, value: object, src: int = 0) -> object:
        return "7X" if value is None else value

    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", broadcast)
    said = refused("--store", store, "--output-dir", tmp_path)
    assert "--icechunk: there was a commit while the ranks opened the store; start again, or give" in said


@in_gate()
def test_the_readers_command_killed_leaves_no_process(chapter: Path, tmp_path: Path) -> None:
    """Neither the server, nor a worker, nor what starts the workers."""
    before = programs.running()
    flags = ["--max-steps", 4, "--num-workers", 2, "--output-dir", tmp_path]
    assert programs.run(chapter / "train.py", *flags, kill_at_step=2).code == -9
    assert still_running(before) == []


# --------------------------------------------------------------------------------------------- checkpoints

DECIDES = "snapshot variables level missing missing_chunks constant_cells train_times validation_times test_times patch_size".split()
DECIDES += "batch_size accumulate_grad_batches max_steps learning_rate seed".split()
BLOCKS_DECIDE = "patches_per_block shuffle_slots block_order".split()
NETWORK_DECIDES = ["padding", "precision"]
ALL_DECIDE = {  # in each chapter
    "03_cloud_data": DECIDES,
    "04_data_pipeline": DECIDES + BLOCKS_DECIDE,
    "05_model_profiling": DECIDES + BLOCKS_DECIDE + NETWORK_DECIDES,
    "06_whats_next": DECIDES + BLOCKS_DECIDE + NETWORK_DECIDES,
}


def test_a_run_is_not_resumed_with_another_value_of_what_decides_its_end(
    chapter: Path, store: Path, alone: Alone, tmp_path: Path, parse
) -> None:
    """It would end at weights that no undisturbed run has."""
    import train
    from errors import CheckpointError
    from options import RESUME_KEYS, STORE_DEFAULTS

    decides = ALL_DECIDE[chapter.name]
    assert sorted(RESUME_KEYS) == sorted(decides)
    checkpoint = runs.last_checkpoint(alone.output)
    options = parse("--store", store, "--resume", checkpoint, "--output-dir", tmp_path / "run")
    for name in decides:
        flag, before = f"--{name.replace('_', '-')}", getattr(options, name)
        if before is None:
            before = STORE_DEFAULTS.get(name)
        said = re.escape(f"has {flag} {before}, not another; give that, or no --resume")
        with pytest.raises(CheckpointError, match=said):
            train.train(replace(options, **{name: "another"}), None)
    assert list(tmp_path.iterdir()) == []


@of(WITH_BLOCKS)
def test_a_checkpoint_that_does_not_say_its_order_of_blocks_is_refused(
    store: Path, alone: Alone, tmp_path: Path, parse
) -> None:
    """It is of a time when there was another order, and its other options may be the same."""
    import train
    from errors import CheckpointError

    older = torch.load(runs.last_checkpoint(alone.output), weights_only=True)
    del older["datamodule_hyper_parameters"]["block_order"]
    if "RunRecord" in older["callbacks"]:
        del older["callbacks"]["RunRecord"]["options"]["block_order"]
    torch.save(older, tmp_path / "older.ckpt")
    options = parse("--store", store, "--resume", tmp_path / "older.ckpt", "--output-dir", tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not say its --block-order; give no --resume"):
        train.train(options, None)


@of(WITH_BLOCKS)
def test_a_checkpoint_of_other_blocks_is_refused(store: Path, alone: Alone, tmp_path: Path, refused) -> None:
    """As of a store that has been written anew with other chunks: its order would be another."""
    other = torch.load(runs.last_checkpoint(alone.output), weights_only=True)
    other["WindDataModule"]["blocks"] += 1
    torch.save(other, tmp_path / "other.ckpt")
    said = refused("--store", store, "--resume", tmp_path / "other.ckpt", "--output-dir", tmp_path / "run")
    assert "blocks, and the store" in said


def test_a_checkpoint_with_an_option_that_is_unknown_here_is_refused(
    store: Path, alone: Alone, tmp_path: Path, refused
) -> None:
    """As another chapter's, whose network may be another with weights of the same names."""
    other = torch.load(runs.last_checkpoint(alone.output), weights_only=True)
    other["datamodule_hyper_parameters"]["invented"] = 1
    if "RunRecord" in other["callbacks"]:
        other["callbacks"]["RunRecord"]["options"]["invented"] = 1
    torch.save(other, tmp_path / "other.ckpt")
    said = refused("--store", store, "--resume", tmp_path / "other.ckpt", "--output-dir", tmp_path / "run")
    assert "has --invented, unknown here; go on in the folder that wrote it" in said


@in_gate("04_data_pipeline", "06_whats_next")
def test_a_store_that_has_grown_moves_no_period_of_a_run_that_goes_on(chapter: Path, tmp_path: Path) -> None:
    """The periods and the size of a patch are those that the store had when the run began."""
    winds = make_winds()[["u", "v"]]
    store = write(tmp_path / "winds", winds.isel(time=slice(120)))
    flags = ["--store", store, "--variables", "u", "v", "--accelerator", "cpu", "--max-steps", 4]
    flags += ["--batch-size", 4, "--checkpoint-every", 2, "--log-every", 1]
    flags += ["--climatology-dir", tmp_path / "kept", "--output-dir"]
    whole = programs.require_success(chapter / "train.py", *flags, tmp_path / "whole")
    assert "note: --test-times 1984-12-16 1985-04-05: " in whole.out
    assert "note: --patch-size 20: " in whole.out
    faults = {"kill_at_step": 3} | WAITS.get(chapter.name, {})
    assert programs.run(chapter / "train.py", *flags, tmp_path / "run", **faults).code == -9
    winds.isel(time=slice(120, None)).to_zarr(store, append_dim="time", consolidated=True)
    resumed = programs.require_success(chapter / "train.py", *flags, tmp_path / "run", "--resume")
    assert "note: --" not in resumed.out
    runs.assert_same_bits(tmp_path / "run", tmp_path / "whole")
    runs.assert_resumed(tmp_path / "run", 2, tmp_path / "whole")


DAMAGED = {  # what is put in a checkpoint's place, and what is said of it
    "no file": (lambda saved, path: None, "no such file; to start anew, give no --resume"),
    "its beginning": (lambda saved, path: path.write_bytes(saved.read_bytes()[:99999]), ".*; give a whole"),
    "weights": (
        lambda saved, path: torch.save({"state_dict": {}}, path),
        "has no .*this (chapter|script) wrote",
    ),
    "a tensor": (lambda saved, path: torch.save(torch.ones(3), path), ".*; give "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_no_checkpoint_of_this_chapter_is_refused(
    case: str, store: Path, alone: Alone, tmp_path: Path, refused
) -> None:
    (damage, message), path = DAMAGED[case], tmp_path / "given.ckpt"
    damage(runs.last_checkpoint(alone.output), path)
    before = contents(tmp_path)
    said = refused("--store", store, "--resume", path, "--output-dir", tmp_path / "run")
    assert re.match(f"--resume {path}: {message}", said), said
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_model_is_loaded_from_a_checkpoint_alone(alone: Alone) -> None:
    """Outside the program, say in a notebook, and with nothing but the file."""
    from model import FillGaps

    loaded = FillGaps.load_from_checkpoint(runs.last_checkpoint(alone.output), map_location="cpu")
    saved = {name: value.float() for name, value in runs.weights(alone.output).items()}
    torch.testing.assert_close(dict(loaded.model.state_dict()), saved, rtol=0, atol=0)
    assert loaded.hparams.units == {"m/s": [0, 1]}
    assert len(loaded.hparams.std) == 2


# ----------------------------------------------------------------------------------- bad input, damaged data

SECRET = "5e4d5ec4e7"
IN_ENVIRONMENT = "it may hold credentials.* give them in the environment"
BAD_INPUT = {
    "--max-steps 0": "argument --max-steps: 0: too small; give at least 1",
    "--max-step 9": "unrecognized arguments: --max-step 9",
    "--max-steps many": "argument --max-steps: 'many': give a whole number",
    "--learning-rate nan": "argument --learning-rate: nan: not finite; give a number",
    f"--seed {2**64}": f"argument --seed: {2**64}: too large; give less than {2**64}",
    "--output-dir /dev/null/run": "--output-dir /dev/null/run: Not a directory; give a folder",
    "--devices 9999": f"--devices 9999: give up to {os.cpu_count()}, the cores there are",
    "--batch-size 1 --devices 2": "--batch-size 1: 2 devices .* need at least 2",
    "--batch-size 2 --accumulate-grad-batches 3": "--batch-size 2: .* 3 micro-batches need at least 3",
    "--accelerator gpu": "--accelerator gpu: this machine has none; give auto or cpu",
    "--store nowhere": "--store nowhere: no such folder; give another folder, or a URL",
    "--endpoint http://x": "--endpoint http://x: only for --store .*on s3://; leave it out",
    "--endpoint ftp://x": "--endpoint ftp://x: give http://... or https://...",
    f"--store s3://me:{SECRET}/and/more@winds/v3": f"--store: {IN_ENVIRONMENT}",
    f"--store https://winds/v3?X-Amz-Signature={SECRET}": f"--store: {IN_ENVIRONMENT}",
    f"--store https://winds/v3#token={SECRET}": f"--store: {IN_ENVIRONMENT}",
    f"--store https://[{SECRET}@winds/v3": f"--store: {IN_ENVIRONMENT}",
    f"--resume s3://me:{SECRET}@winds/last.ckpt": f"--resume: {IN_ENVIRONMENT}",
    f"--endpoint https://me:{SECRET}@localhost": f"--endpoint: {IN_ENVIRONMENT}",
    "--start-method fork": "--start-method fork: .*; give forkserver or spawn",
    "--variables nope": rf"--variables nope: .* not in the store .*; there are {U} \(time, latitude, long",
    "--train-times 1982 1990 --validation-times 1990 1990": "--validation-times 1990 1990: shares times with --train-times 1982 1990; give",
    "--patch-size 18": "--patch-size 18: the grid is 37 x 72; give a multiple of 4 from 16 to 36",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(
    flags: str, store: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # of a Mac
    said = refused("--store", store, "--output-dir", tmp_path / "run", *flags.split())
    assert re.match(BAD_INPUT[flags], said), said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


BOUNDS = "--retry-timeout --batch-size --eval-samples --num-workers --seed".split()


def test_each_number_has_its_least_value(chapter: Path, parse, capsys) -> None:
    """Each option declares its own."""
    for flag in [*BOUNDS, *(BLOCKS[::2] if chapter.name in WITH_BLOCKS else [])]:
        with pytest.raises(SystemExit):
            parse(flag, -1)
        assert f"argument {flag}: -1: too small; give at least" in capsys.readouterr().err


@of(WITH_BLOCKS)
def test_slots_that_do_not_fit_the_batch_are_refused(store: Path, tmp_path: Path, refused) -> None:
    flags = "--shuffle-slots 12 --batch-size 8".split()
    said = refused("--store", store, "--output-dir", tmp_path, *flags)
    assert said.startswith("--shuffle-slots 12: give a multiple or a divisor of --batch-size 8")


@of(WITH_BLOCKS)
def test_four_batches_are_mixed_whatever_the_workers() -> None:
    from options import parse_options

    flags = ["--batch-size", "4", "--num-workers"]
    assert [parse_options("", [*flags, workers]).shuffle_slots for workers in "03"] == [16, 16]


def put_hole(store: Path, position: int) -> None:
    """Write NaN into a map of v."""
    zarr.open_array(store / V, mode="r+")[position] = float("nan")


def lose_chunks(store: Path, position: int) -> None:
    """Delete a map of u, in a store where a missing chunk would be read as 0."""
    for path in store.rglob("zarr.json"):
        path.write_text(re.sub(r'"fill_value": *"NaN"', '"fill_value": 0.0', path.read_text()))
    shutil.rmtree(store / U / f"c/{position}")


def find_first_map(flags: list[object]) -> tuple[int, str]:
    """The first that a run reads: its number in the store, and its date."""
    made = make_datamodule(flags)
    if hasattr(made, "blocks"):
        (time,) = made.blocks.blocks[made.order.read(0).block]
    else:
        time = made.train_patches().patch(0, 0).time
    period = made.data.training
    return period.positions[time], str(period.dates[time])[:10]


DAMAGE = {  # to a store, and what is said of it
    "a hole": (
        put_hole,
        r"\S+ on {date}\S*: NaN: a value or a chunk is missing; if the data have gaps, give --missing mask",
    ),
    "missing chunks": (lose_chunks, rf"{U} of {{date}}\S*: {U}/c/{{position}}/\d/\d: this chunk is missing"),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=thorough)])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_map_that_cannot_be_used_is_named_and_ends_the_run(
    what: str, workers: int, chapter: Path, small: list[str], store: Path, tmp_path: Path
) -> None:
    """And all of its workers. It is the first that is read."""
    position, date = find_first_map([*small, "--store", store])
    damaged = shutil.copytree(store, tmp_path / "store")
    damage, message = DAMAGE[what]
    damage(damaged, position)

    flags = [*small, "--store", damaged, "--num-workers", workers, "--output-dir", tmp_path / "run"]
    before = programs.running()
    done = programs.run(chapter / "train.py", *flags)
    assert done.code == 2, done.err
    said = f"train.py: error: --store {damaged}: {message.format(position=position, date=date)}"
    assert re.match(said, done.err.splitlines()[-1]), done.err
    assert still_running(before) == []
    assert not (tmp_path / "run/summary.json").exists()


@in_gate("03_cloud_data")
def test_of_two_ranks_the_one_that_finds_no_fault_says_that_the_other_did(
    chapter: Path, small: list[str], store: Path, tmp_path: Path
) -> None:
    """Rank 0's first sample has a hole. Gloo's stack would be the last that a reader sees."""
    position, date = find_first_map([*small, "--store", store])
    damaged = shutil.copytree(store, tmp_path / "store")
    put_hole(damaged, position)
    flags = [*small, "--store", damaged, "--output-dir", tmp_path / "run"]
    first, second = programs.run_ranks(chapter / "train.py", 2, *flags)
    assert (first.code, second.code) == (2, 2), programs.printed([first, second])
    assert f"{V} on {date}" in first.err.splitlines()[-1]
    assert second.err.splitlines()[-1].startswith(ANOTHER_FAILED[1])
    assert "Traceback" not in second.err


@in_gate("03_cloud_data", "06_whats_next")
@pytest.mark.timeout(100)  # the default of --retry-timeout is 120
def test_a_bucket_that_is_gone_ends_the_loader_and_its_threads_when_no_more_is_retried(
    small: list[str], store: Path
) -> None:
    from errors import DataError

    flags = [*small, "--max-steps", 1000, "--retry-timeout", 1]
    before = threads()
    with buckets.serving(store.parents[1], latency_ms=0) as address:
        batches = iter(make_datamodule([*flags, *from_bucket(address)]).train_loader())
        next(batches)
    with pytest.raises(DataError, match=r"10m_[uv]\S+ of \S+: 10m_[uv]_component_of_wind/c/\d+/\d/\d: "):
        list(batches)
    for thread in threads():
        if thread not in before and "ThreadPoolExecutor" in thread.name:
            thread.join(timeout=60)
            assert not thread.is_alive()
