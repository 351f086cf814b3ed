"""Chapter 5 as programs: its folder copied alone, killed and resumed, on two ranks, and given bad input."""

import gc
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from threading import enumerate as threads
from types import SimpleNamespace
from unittest.mock import MagicMock

import book
import buckets
import programs
import psutil
import pytest
import torch
import zarr
from alone import Alone, contents
from runs import (
    assert_resumed,
    assert_same_bits,
    assert_same_but_for_rounding,
    check_summary,
    state,
    summary,
    weights,
)

CHAPTER, SCRIPT = book.ROOT / "05_model_profiling", "05_model_profiling/train.py"
U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 4".split()
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-slots 8 --patches-per-block 2".split()
SECRET = "5e4d5ec4e7"
EVAL_SAMPLES = programs.QUICK["judge_by"]  # patches that judge a run

pytestmark = [  # train.py shows none of these, either
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]
thorough = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("05_model_profiling"), programs.planted_in_all(**programs.QUICK):
        import train  # noqa: F401

        yield
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets. Its bucket `winds` has a store with statistics, and a plain one without."""
    folder = tmp_path_factory.mktemp("buckets")
    make_small_store(folder / "winds/whole")
    plain = shutil.copytree(folder / "winds/whole", folder / "winds/plain")
    shutil.rmtree(plain / "statistics")
    zarr.consolidate_metadata(plain)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with buckets.serving(folder, latency_ms=0) as address:
        yield address


def s3(address: str, name: str = "whole") -> list[str]:
    """The flags that read a store of the bucket."""
    return ["--store", f"s3://winds/{name}", "--endpoint", address, "--anonymous"]


def parse(*flags: object):
    """The options of a small run with these flags."""
    from options import parse_options

    return parse_options("a test", [*SMALL, *map(str, flags)])


def make_data(*flags: object):
    """The data of a run with these flags."""
    from store import Location
    from task import make_data, make_datamodule

    options = parse(*flags)
    location = Location(options.store, options.endpoint, options.anonymous, options.retry_timeout)
    return make_datamodule(options, make_data(options, location), 0)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(*flags: object) -> str:
        import train

        with pytest.raises(SystemExit) as ended:
            train.main([*SMALL, *map(str, flags)])
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """A loader's threads end, whatever ends the loader, once they have read what they are reading."""
    before = threads()
    yield
    for thread in threads():
        if thread not in before and "ThreadPoolExecutor" in thread.name:
            thread.join(timeout=60)
            assert not thread.is_alive()


def still_running(before: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that have been started since then and do not end by themselves."""
    started = [process for process in programs.running() if process not in before]
    _, left = psutil.wait_procs(started, timeout=60)
    return left


# ------------------------------------------------------------------------------ what several tests look at


@dataclass
class Trained:
    """How some programs have ended, and where they have written."""

    ended: dict[str, programs.Run]
    whole: Path
    killed: Path
    alone: Alone
    plain: Alone
    left: list[psutil.Process]
    store_changed: bool


@pytest.fixture(scope="module")
def trained(folder: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run, one that is killed with its workers, and two of copied folders, side by side.

    Both of the former are in double precision. The one that is killed begins first, because its workers
    import for five seconds.
    """
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    alone, plain = (Alone(CHAPTER, SMALL, tmp_path_factory.mktemp(name)) for name in ("alone", "plain"))
    before, stores = programs.running(), contents(folder)
    started = {
        "killed": programs.Program(
            SCRIPT,
            *[*SMALL, *s3(address), "--num-workers", 2, "--output-dir", killed],
            double_precision=True,
            kill_at_step=3,
        ),
        "whole": programs.Program(
            SCRIPT, *[*SMALL, "--store", folder / "winds/whole", "--output-dir", whole], double_precision=True
        ),
        "alone": alone.start("--store", folder / "winds/whole"),
        "plain": plain.start("--store", folder / "winds/plain"),
    }
    ended = {name: program.wait() for name, program in started.items()}
    left = still_running(before)
    for process in left:  # else the tests would wait for them at their end
        process.kill()
    return Trained(ended, whole, killed, alone, plain, left, contents(folder) != stores)


@pytest.fixture(scope="module")
def whole(trained: Trained) -> Path:
    """A run that nobody interrupted, in double precision."""
    assert trained.ended["whole"].code == 0, trained.ended["whole"].err
    return trained.whole


# ------------------------------------------------------------------------------ the folder copied alone


def test_the_folder_copied_alone_trains_on_a_store_with_statistics(trained: Trained) -> None:
    done = trained.ended["alone"]
    assert done.code == 0, done.err
    check_summary(done.out)
    assert "warning" not in done.err.lower()
    assert state(trained.alone.output)["step"] == 4
    assert (trained.alone.output / "fill.png").read_bytes().startswith(b"\x89PNG")
    assert trained.alone.kept() == []  # no climatology had to be computed
    assert trained.alone.written_elsewhere() == []
    assert not trained.store_changed


def test_without_statistics_it_computes_a_climatology_once_and_keeps_it(
    trained: Trained, folder: Path
) -> None:
    done, plain = trained.ended["plain"], trained.plain
    assert done.code == 0, done.err
    (kept,) = plain.kept()
    announced = f"climatology of a sample, kept in {kept.relative_to(plain.project)}"
    assert announced in done.out.splitlines()
    # The sample is all of these few times, so that the climatology is that of the statistics.
    for name, row in summary(trained.alone.output)["rmse"].items():
        assert summary(plain.output)["rmse"][name] == pytest.approx(row, rel=1e-3), name

    written, first = kept.stat().st_mtime_ns, summary(plain.output)["rmse"]
    again = plain.start("--store", folder / "winds/plain").wait()
    assert again.code == 0, again.err
    assert plain.kept() == [kept]
    assert kept.stat().st_mtime_ns == written
    assert "climatology of" not in again.out
    assert summary(plain.output)["rmse"] == first
    assert plain.written_elsewhere() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_computation_of_a_climatology_shows_a_progress_bar(folder: Path, monkeypatch) -> None:
    """In a terminal. It may read for minutes."""
    from fields import split_times
    from store import FieldReader, Location
    from store_climatology import average_sample

    options = parse("--store", folder / "winds/plain")
    reader = FieldReader(Location(options.store), options.variables)
    (training,) = split_times(reader.open().time, {"--train-times": options.train_times})
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        average_sample(reader, training)
        assert ("months sampled: 100%" in stream.getvalue()) is shown


def test_copied_alone_and_without_a_store_it_says_what_is_missing(tmp_path: Path) -> None:
    alone = Alone(CHAPTER, SMALL, tmp_path)
    done = alone.start().wait()
    assert done.code == 2, done.err
    missing = tmp_path / "03_cloud_data/make_store.py"
    last = f"train.py: error: --store: not given, and {missing}, which makes one, is missing; give --store"
    assert done.err.splitlines()[-1] == last
    assert "Traceback" not in done.err
    assert not alone.output.exists()
    assert alone.written_elsewhere() == []


# ------------------------------------------------------------------------------ killed and resumed


def test_killed_with_workers_nothing_is_left_and_it_resumes_to_the_bit_without(
    address: str, tmp_path: Path, trained: Trained, whole: Path
) -> None:
    """The workers have read blocks of the steps after the kill."""
    assert trained.ended["killed"].code == -9, trained.ended["killed"].err
    assert trained.left == []
    run = shutil.copytree(trained.killed, tmp_path / "run")
    assert state(run)["step"] == 2
    flags = [*SMALL, *s3(address), "--output-dir", run, "--resume", "auto"]
    programs.require_success(SCRIPT, *flags, double_precision=True)
    assert_same_bits(run, whole)
    assert_resumed(run, 2, whole)


@thorough
@pytest.mark.parametrize("step", [1, 2])
def test_killed_at_another_step_it_resumes_to_the_bit(
    step: int, address: str, tmp_path: Path, whole: Path
) -> None:
    before = programs.running()
    flags = [*SMALL, *s3(address), "--output-dir", tmp_path, "--resume", "auto"]
    killed = programs.run(SCRIPT, *flags, "--num-workers", 2, kill_at_step=step, double_precision=True)
    assert killed.code == -9, killed.err
    assert still_running(before) == []
    programs.require_success(SCRIPT, *flags, double_precision=True)
    assert_same_bits(tmp_path, whole)
    if step == 2:
        assert_resumed(tmp_path, 2, whole)


def test_a_run_that_has_ended_ends_the_same_when_it_is_resumed(
    folder: Path, tmp_path: Path, trained: Trained
) -> None:
    """A scheduler may start a job again after its last step."""
    import train

    run = shutil.copytree(trained.alone.output, tmp_path / "run")
    (run / "summary.json").unlink()
    flags = [*SMALL, "--store", folder / "winds/whole", "--output-dir", run, "--resume", "auto"]
    train.main([*map(str, flags), "--eval-samples", str(EVAL_SAMPLES)])
    assert_same_bits(run, trained.alone.output)


def test_data_and_training_that_begin_at_different_steps_are_an_error(
    folder: Path, tmp_path: Path, trained: Trained, monkeypatch
) -> None:
    import train

    monkeypatch.setattr(train, "read_first_step", lambda path, options: 0)
    flags = [*SMALL, "--store", folder / "winds/whole", "--output-dir", tmp_path]
    flags += ["--resume", trained.killed / "last.ckpt"]
    with pytest.raises(RuntimeError, match="data begin at step 0, and training at step 2"):
        train.main([*map(str, flags)])


def test_ranks_that_begin_at_different_steps_are_an_error() -> None:
    """As on a node that does not see the folder of --resume auto: it would train from step 0, until a hang."""
    from checkpoints import StepCheckpoint
    from errors import CheckpointError

    callback = StepCheckpoint()
    strategy = SimpleNamespace(broadcast=lambda step: 50)  # what rank 0 has
    trainer = MagicMock(global_step=0, strategy=strategy, datamodule=SimpleNamespace(first_step=0))
    with pytest.raises(CheckpointError, match="this rank begins at step 0, and rank 0 at 50; give all nodes"):
        callback.on_train_start(trainer, None)


# ------------------------------------------------------------------------------ two ranks


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=thorough)])
def test_two_ranks_end_at_the_weights_of_one(
    accumulate: int, address: str, tmp_path: Path, whole: Path
) -> None:
    flags = [*SMALL, *s3(address), "--accumulate-grad-batches", accumulate, "--output-dir", tmp_path]
    done = programs.run_ranks(SCRIPT, 2, *flags, double_precision=True)
    assert [getattr(one, "code", one) for one in done] == [0, 0], programs.printed(done)
    assert_same_but_for_rounding(tmp_path, whole)


OTHER_RANK = "train.py: error: another rank failed, or does not answer; its own"


@thorough
@pytest.mark.parametrize("step", [1, 2, 3])
def test_two_ranks_killed_and_resumed_to_the_bit(step: int, address: str, tmp_path: Path) -> None:
    flags = [*SMALL, *s3(address), "--resume", "auto", "--num-workers", 1, "--output-dir"]
    for folder, kill in (("whole", {}), ("run", {1: {"kill_at_step": step}}), ("run", {})):
        first, second = programs.run_ranks(SCRIPT, 2, *flags, tmp_path / folder, planted=kill)
        assert second.code == (-9 if kill else 0), programs.printed([first, second])
        assert first.code == (2 if kill else 0), programs.printed([first, second])
        assert (OTHER_RANK in first.err) is bool(kill), first.err
    assert_same_bits(tmp_path / "run", tmp_path / "whole")
    if step >= 2:
        assert_resumed(tmp_path / "run", 2, tmp_path / "whole")


@thorough
def test_a_rank_that_does_not_answer_ends_the_other(folder: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--store", folder / "winds/whole", "--output-dir", tmp_path]
    flags += ["--process-group-timeout", 5]
    with programs.started_ranks(SCRIPT, 2, *flags, planted={1: {"stall_at_step": 2}}) as (other, stalled):
        done = other.wait()
        assert done.code == 2, done.err
        assert done.err.splitlines()[-1].startswith(OTHER_RANK), done.err
        assert "Traceback" not in done.err
        assert stalled.poll() is None
        stalled.process.kill()
        stalled.wait()


@thorough
def test_of_two_ranks_the_one_that_finds_no_fault_says_that_the_other_did(
    folder: Path, first_read: tuple[int, str], tmp_path: Path
) -> None:
    """Rank 0's first sample has a hole."""
    store, (position, date) = shutil.copytree(folder / "winds/whole", tmp_path / "store"), first_read
    zarr.open_array(store / V, mode="r+")[position] = float("nan")
    flags = [*SMALL, "--store", store, "--output-dir", tmp_path / "run"]
    first, second = programs.run_ranks(SCRIPT, 2, *flags)
    assert (first.code, second.code) == (2, 2), programs.printed([first, second])
    last = first.err.splitlines()[-1]
    assert last.startswith(f"train.py: error: --store {store}: {V} on {date}"), first.err
    assert "--missing mask" in last
    assert second.err.splitlines()[-1].startswith(OTHER_RANK), second.err
    assert "Traceback" not in second.err


# ------------------------------------------------------------------------------ checkpoints

ANOTHER = {  # value of each flag that a resumed run must share
    "--level": "850",
    "--missing": "mask",
    "--missing-chunks": "fill",
    "--learning-rate": "0.1",
    "--max-steps": "5",
    "--seed": "1",
    "--variables": U,
    "--train-times": "1982 1988",
    "--validation-times": "1990-02 1990",
    "--test-times": "1991 1991",
    "--patch-size": "20",
    "--batch-size": "8",
    "--accumulate-grad-batches": "2",
    "--patches-per-block": "4",
    "--shuffle-slots": "4",
    "--padding": "replicate",
    "--precision": "bf16-mixed",
}


def test_a_checkpoint_keeps_what_a_resumed_run_must_share(whole: Path) -> None:
    from options import RESUME_KEYS

    saved, options = torch.load(whole / "last.ckpt", weights_only=True), asdict(parse())
    assert sorted(f"--{name.replace('_', '-')}" for name in RESUME_KEYS) == sorted(ANOTHER)
    for name in RESUME_KEYS:
        assert saved["datamodule_hyper_parameters"][name] == options[name]
    for name in ("learning_rate", "max_steps", "seed", "padding"):  # and what made the model
        assert saved["hyper_parameters"][name] == options[name]


@pytest.mark.parametrize("flag", ANOTHER)
def test_a_run_is_not_resumed_with_another_value(
    flag: str, folder: Path, whole: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    """It would end at weights that no undisturbed run has."""
    monkeypatch.setattr("devices.has_bf16", lambda on_gpu: True)
    checkpoint, changed = whole / "last.ckpt", [flag, *ANOTHER[flag].split()]
    name = flag[2:].replace("-", "_")
    before, now = getattr(parse(), name), getattr(parse(*changed), name)
    said = refused(
        "--store", folder / "winds/whole", "--resume", checkpoint, *changed, "--output-dir", tmp_path / "run"
    )
    assert said.startswith(f"--resume {checkpoint}: has {flag} {before}, not {now}; give {flag} that"), said
    assert list(tmp_path.iterdir()) == []


def test_a_refused_checkpoint_ends_the_program_with_one_line_and_code_2(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    flags = ["--store", folder / "winds/whole", "--resume", whole / "last.ckpt", "--seed", 1]
    done = programs.run(SCRIPT, *SMALL, *flags, "--output-dir", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"train.py: error: --resume \S+: has --seed 0, not 1; give .*\n", done.err.lstrip()
    ), done.err
    assert list(tmp_path.iterdir()) == []


def cut(saved: Path, path: Path) -> None:
    path.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])


def without(part: str) -> Callable:
    """Leave one part out of a checkpoint."""

    def write(saved: Path, path: Path) -> None:
        loaded = torch.load(saved, weights_only=True)
        del loaded[part]
        torch.save(loaded, path)

    return write


def without_level(saved: Path, path: Path) -> None:
    """As of a time when there was no such option; its value here, None, is not a missing one."""
    loaded = torch.load(saved, weights_only=True)
    del loaded["datamodule_hyper_parameters"]["level"]
    torch.save(loaded, path)


def like_chapter_4(saved: Path, path: Path) -> None:
    """With all options in the model's part, and no part of the data's."""
    loaded = torch.load(saved, weights_only=True)
    loaded["hyper_parameters"] = {"options": loaded.pop("datamodule_hyper_parameters")}
    torch.save(loaded, path)


UNREADABLE = r"cannot be read \(\w+\); give a whole checkpoint"
DAMAGED = {  # what is written from a whole checkpoint, and what is said of it
    "missing": (lambda saved, path: None, "no such file; to start anew, give no --resume"),
    "empty": (lambda saved, path: path.touch(), UNREADABLE),
    "cut": (cut, UNREADABLE),
    "a text": (lambda saved, path: path.write_text("weights"), UNREADABLE),
    "a tensor": (lambda saved, path: torch.save(torch.zeros(3), path), UNREADABLE),
    "without its step": (without("global_step"), "has no global_step; give one that this chapter wrote"),
    "without an optimizer": (without("optimizer_states"), "has no optimizer_states; give one that"),
    "without an option": (without_level, "does not say its --level; give no --resume"),
    "of chapter 4": (like_chapter_4, "has no datamodule_hyper_parameters; give one that this chapter wrote"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_no_checkpoint_of_this_chapter_is_refused(
    case: str, folder: Path, whole: Path, tmp_path: Path, refused
) -> None:
    (damage, message), path = DAMAGED[case], tmp_path / "given.ckpt"
    damage(whole / "last.ckpt", path)
    before = contents(tmp_path)
    flags = ["--store", folder / "winds/whole", "--resume", path, "--output-dir", tmp_path / "run"]
    said = refused(*flags)
    assert re.match(f"--resume {path}: {message}", said), said
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


@thorough
def test_a_checkpoint_that_chapter_4_wrote_is_refused(folder: Path, tmp_path: Path, refused) -> None:
    flags = ["--store", folder / "winds/whole", "--output-dir", tmp_path]
    small = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 2".split()
    programs.require_success("04_data_pipeline/train.py", *small, *flags)
    said = refused(*flags, "--max-steps", 2, "--resume")
    assert said.startswith(f"--resume {tmp_path / 'last.ckpt'}: has no datamodule_hyper_parameters; "), said


def test_a_model_is_loaded_from_a_checkpoint_alone(trained: Trained) -> None:
    """Outside the program, say in a notebook, and with nothing but the file."""
    from model import FillGaps

    output = trained.alone.output
    loaded = FillGaps.load_from_checkpoint(output / "last.ckpt", map_location="cpu")
    torch.testing.assert_close(dict(loaded.model.state_dict()), weights(output), rtol=0, atol=0)
    assert loaded.hparams.units == {"m/s": [0, 1]}
    assert len(loaded.hparams.std) == 2


# ------------------------------------------------------------------------------ bad input

BAD_INPUT = {
    "--shuffle-slots 12 --batch-size 8": "--shuffle-slots 12: give a multiple of --batch-size 8",
    "--shuffle-slots 0": "argument --shuffle-slots: 0: too small; give at least 1",
    "--patches-per-block 0": "argument --patches-per-block: 0: too small; give at least 1",
    "--max-steps 0": "argument --max-steps: 0: too small; give at least 1",
    "--max-steps many": "argument --max-steps: 'many': give a whole number",
    f"--eval-samples -{'9' * 400}": "argument --eval-samples: -9+: too small; give at least 1",
    "--retry-timeout 0": "argument --retry-timeout: 0: too small; give at least 1",
    "--learning-rate nan": "argument --learning-rate: nan: not finite; give a number",
    "--learning-rate inf": "argument --learning-rate: inf: not finite; give a number",
    "--learning-rate -1": "argument --learning-rate: -1: too small; give at least 0",
    "--seed -1": "argument --seed: -1: too small; give at least 0",
    f"--seed {2**64}": f"argument --seed: {2**64}: too large; give less than {2**64}",
    "--output-dir /dev/null/run": "--output-dir /dev/null/run: Not a directory; give a folder",
    "--devices 9999": f"--devices 9999: give up to {os.cpu_count()}, the cores there are",
    "--batch-size 1 --devices 2 --shuffle-slots 8": "--batch-size 1: 2 devices .* need at least 2",
    "--batch-size 2 --accumulate-grad-batches 3": "--batch-size 2: .* 3 micro-batches need at least 3",
    "--accelerator gpu": "--accelerator gpu: this machine has none; give auto or cpu",
    "--store nowhere": "--store nowhere: no such folder; give a Zarr store, or a URL",
    "--endpoint http://x": "--endpoint http://x: only for --store on s3://; leave it out",
    "--endpoint ftp://x": "--endpoint ftp://x: give http://... or https://...",
    f"--store s3://me:{SECRET}@winds/v3": "--store: it may hold credentials.* give them in the environment",
    f"--store s3://me:{SECRET}/and/more@winds/v3": "--store: it may hold credentials.* give them in the environment",
    f"--store https://winds/v3?X-Amz-Signature={SECRET}": "--store: it may hold credentials.* give them in the env",
    f"--store https://winds/v3#token={SECRET}": "--store: it may hold credentials.* give them in the environment",
    f"--store https://[{SECRET}@winds/v3": "--store: it may hold credentials.* give them in the environment",
    f"--resume s3://me:{SECRET}@winds/last.ckpt": "--resume: it may hold credentials.* give them in the environment",
    f"--endpoint https://me:{SECRET}@localhost": "--endpoint: it may hold credentials.* give them in the environment",
    "--start-method fork": "--start-method fork: .*; give forkserver or spawn",
    "--variables nope": rf"--variables nope: .* not in the store .*; there are {U} \(time, latitude, long",
    "--train-times 2001 2002": "--train-times 2001 2002: no times; give dates of 1982-01-01 to 1992-12-31",
    "--train-times 1982 1990": "--validation-times 1990 1990: shares times with --train-times 1982 1990; give dates of ",
    "--patch-size 12": "argument --patch-size: 12: too small; give at least 16",
    "--patch-size 18": "--patch-size 18: the grid is 37 x 72; give a multiple of 4 from 16 to 36",
    "--patch-size 40": "--patch-size 40: the grid is 37 x 72; give a multiple of 4 from 16 to 36",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_named_with_its_flag_and_writes_nothing(
    flags: str, folder: Path, tmp_path: Path, refused, monkeypatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    given = ["--store", folder / "winds/whole", "--output-dir", tmp_path / "run", *flags.split()]
    said = refused(*given)
    assert re.match(BAD_INPUT[flags], said), said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("batch", [8, 12, 32])
def test_four_batches_are_mixed_whatever_the_workers(batch: int, workers: int) -> None:
    """Else their number would decide the order, and no run could go on with others."""
    from options import parse_options

    flags = ["--accelerator", "cpu", "--batch-size", str(batch), "--num-workers", str(workers)]
    assert parse_options("a test", flags).shuffle_slots == 4 * batch


# ------------------------------------------------------------------------------ what cannot be read


@pytest.fixture(scope="module")
def first_read(folder: Path) -> tuple[int, str]:
    """The time of the first block that is read: its position in the store, and its date."""
    data = make_data("--store", folder / "winds/whole")
    (time,) = data.blocks.blocks[data.order.block(0)]
    period = data.blocks.maker.period
    return period.positions[time], str(period.dates[time])[:10]


def put_hole(store: Path, position: int) -> None:
    """Write NaN into a map of v."""
    zarr.open_array(store / V, mode="r+")[position] = float("nan")


def lose_chunk(store: Path, position: int) -> None:
    """Delete a chunk of u, in a store where a missing chunk would be read as 0."""
    for path in store.rglob("zarr.json"):
        path.write_text(re.sub(r'"fill_value": *"NaN"', '"fill_value": 0.0', path.read_text()))
    (store / U / f"c/{position}/1/2").unlink()


DAMAGE = {  # to a store, and what is said of it
    "a hole": (put_hole, r"\S+ on {date}\S*: NaN: a value or a chunk is missing; give --missing mask"),
    "a missing chunk": (lose_chunk, rf"{U} of {{date}}\S*: {U}/c/{{position}}/1/2: this chunk is missing"),
}


@pytest.fixture
def damaged(request, folder: Path, first_read: tuple[int, str], tmp_path: Path) -> tuple[Path, str]:
    """A store whose first block is damaged, and what the last line says of it."""
    store = shutil.copytree(folder / "winds/whole", tmp_path / "store")
    (damage, message), (position, date) = DAMAGE[request.param], first_read
    damage(store, position)
    return store, f"--store {store}: " + message.format(position=position, date=date)


@pytest.mark.parametrize("damaged", DAMAGE, indirect=True)
def test_a_block_that_cannot_be_used_is_named(
    damaged: tuple[Path, str], tmp_path: Path, refused, no_thread_is_left
) -> None:
    store, message = damaged
    said = refused("--store", store, "--output-dir", tmp_path / "run")
    assert re.match(message, said), said
    assert not (tmp_path / "run/summary.json").exists()


@thorough
@pytest.mark.parametrize("damaged", DAMAGE, indirect=True)
def test_a_worker_that_cannot_use_a_block_ends_the_program(damaged: tuple[Path, str], tmp_path: Path) -> None:
    """And the other worker."""
    before, (store, message) = programs.running(), damaged
    flags = [*SMALL, "--store", store, "--num-workers", 2, "--output-dir", tmp_path / "run"]
    done = programs.run(SCRIPT, *flags)
    assert done.code == 2, done.err
    assert re.match(f"train.py: error: {message}", done.err.splitlines()[-1]), done.err
    assert still_running(before) == []


@pytest.mark.timeout(100)  # the default of --retry-timeout is 120
def test_a_bucket_that_is_gone_ends_the_loader_when_no_more_is_retried(
    folder: Path, no_thread_is_left
) -> None:
    from errors import DataError

    flags = ["--patches-per-block", 1, "--max-steps", 1000, "--retry-timeout", 1]
    with buckets.serving(folder, latency_ms=0) as address:
        batches = iter(make_data(*flags, *s3(address)).train_loader())
        next(batches)
    with pytest.raises(DataError, match=r"10m_[uv]\S+ of \S+: 10m_[uv]_component_of_wind/c/\d+/\d/\d: "):
        list(batches)
