"""Chapter 6: runs that are killed, told to stop, starved of disk and fed NaN, and end as if nothing had happened."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import book
import boto3
import buckets
import numpy as np
import programs
import pytest
import torch
from alone import Alone
from runs import assert_same_bits, last_checkpoint, load, state, summary, weights

CHAPTER, SCRIPT = book.ROOT / "06_whats_next", "06_whats_next/train.py"
# Of 5 degrees, 37 x 72 cells, in chunks of one time. The training times have every month, two or three times.
STORE = "--days 36 --resolution 5 --patch-size 16".split()
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --max-steps 12 --validate-every 6".split()
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-slots 12 --patches-per-block 2 --resume auto".split()
AGAIN = 75  # exit code: run the same command again

thorough = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("06_whats_next"):
        import train  # noqa: F401

        yield
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets, in one of which is a store."""
    script = load("03_cloud_data/make_store.py", "make_store_for_survival")
    script.HERE = tmp_path_factory.mktemp("chapter")  # files that stay apart from a reader's
    folder = tmp_path_factory.mktemp("buckets")
    script.main([*STORE, "--store", str(folder / "winds/whole")])
    return folder


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[list[str]]:
    """The flags that read the store from a bucket, of whose answers one in twenty is an error."""
    with buckets.serving(folder, latency_ms=0, error_rate=0.05) as address:
        yield ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]


@pytest.fixture(scope="module")
def local(folder: Path) -> list[str]:
    """The flags that read the store from the disk."""
    return ["--store", str(folder / "winds/whole")]


def run_ranks(ranks: int, *flags: object, **options: object) -> list[programs.Run]:
    """Run the script on several ranks to their ends, whatever these are."""
    done = programs.run_ranks(SCRIPT, ranks, *SMALL, *flags, **options)
    late = [one for one in done if isinstance(one, TimeoutError)]
    assert late == [], programs.printed(done)
    return done


def codes(done: list[programs.Run]) -> list[int]:
    return [one.code for one in done]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local: list[str]):
    """Call it with a number of ranks: the folder of the run that nothing has disturbed."""
    made: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in made:
            target = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
            done = run_ranks(ranks, *local, "--output-dir", target)
            assert codes(done) == [0] * ranks, programs.printed(done)
            made[ranks] = target
        return made[ranks]

    return run


def truncate_newest(run: Path) -> str:
    """Cut off the newest checkpoint of a run in its middle; return its name."""
    newest = max(run.glob("checkpoints/step_*.ckpt"))
    os.truncate(newest, newest.stat().st_size // 2)
    return newest.name


# ------------------------------------------------------------------------------------------ chaos


def survive(ranks: int, kills: list[int], torn: set[int], run: Path, flags: list[str]) -> None:
    """Kill one rank at each of these steps after a start, and start again; tear a checkpoint before some starts.

    Before each kill two checkpoints are there, so that one is left where the newest is torn.
    """
    rng = np.random.default_rng(6)
    for number, step in enumerate(kills):
        if number in torn:
            name = truncate_newest(run)
        victim = int(rng.integers(ranks))
        planted = {victim: {"kill_with_checkpoints": (step, run / "checkpoints", 2)}}
        done = run_ranks(ranks, *flags, "--output-dir", run, planted=planted)
        assert codes(done)[victim] == -9, programs.printed(done)
        for rank, one in enumerate(done):
            if rank != victim:
                assert one.code == 1, programs.printed(done)
                gone = (
                    rf"^rank {victim} \(process \d+ on \S+\) is gone; it was at step \d+, in the forward pass"
                )
                assert re.search(gone, one.err, re.M), one.err
        if number in torn:
            assert f"{name} cannot be read" in done[0].out, done[0].out
    done = run_ranks(ranks, *flags, "--output-dir", run)
    assert codes(done) == [0] * ranks, programs.printed(done)


def test_killed_and_torn_it_ends_at_the_same_bits(failing: list[str], tmp_path: Path, undisturbed) -> None:
    survive(2, [5, 3], {1}, tmp_path / "run", failing)
    assert_same_bits(tmp_path / "run", undisturbed(2))


@thorough
def test_three_ranks_killed_end_at_the_same_bits(local: list[str], tmp_path: Path, undisturbed) -> None:
    survive(3, [5], set(), tmp_path / "run", local)
    assert_same_bits(tmp_path / "run", undisturbed(3))


@thorough
def test_killed_at_ten_steps_and_torn_twice_it_ends_at_the_same_bits(
    failing: list[str], local: list[str], tmp_path: Path
) -> None:
    longer = ["--max-steps", "40"]
    done = run_ranks(2, *local, *longer, "--output-dir", tmp_path / "undisturbed")
    assert codes(done) == [0, 0], programs.printed(done)
    kills = np.random.default_rng(6).integers(3, 6, size=10)
    kills[0] += 2  # the first two checkpoints take four steps
    survive(2, kills.tolist(), {3, 6}, tmp_path / "run", [*failing, *longer])
    assert_same_bits(tmp_path / "run", tmp_path / "undisturbed")


# ------------------------------------------------------------------------------- told to stop

STOPPED = {  # how a signal hits the rank that is not 0, or the one that writes
    "in the backward pass": (1, "terminate_in_backward", 4),
    "before a step": (1, "terminate_at_step", 4),
    "in a write": (0, "terminate_in_write", 1),
}


@pytest.mark.parametrize(
    "how", ["in the backward pass", *(pytest.param(how, marks=thorough) for how in list(STOPPED)[1:])]
)
def test_told_to_stop_both_ranks_save_and_end_and_go_on_at_the_same_bits(
    how: str, local: list[str], tmp_path: Path, undisturbed
) -> None:
    rank, fault, number = STOPPED[how]
    flags = [*local, "--output-dir", tmp_path]
    done = run_ranks(2, *flags, planted={rank: {fault: number}})
    assert codes(done) == [AGAIN, AGAIN], programs.printed(done)
    said = re.search(r"stopped after step (\d+): SIGTERM or SIGUSR1; the same command with", done[0].out)
    assert said, done[0].out
    assert state(tmp_path)["step"] == int(said[1]) < 12
    done = run_ranks(2, *flags)
    assert codes(done) == [0, 0], programs.printed(done)
    assert_same_bits(tmp_path, undisturbed(2))


# --------------------------------------------------------------------------------- a bad loss


def test_a_poisoned_batch_is_skipped_and_the_run_can_be_resumed_to_the_bit(
    local: list[str], tmp_path: Path
) -> None:
    """The 26th block that is read gives 1e30 m/s to one batch, whose loss is infinite."""
    flags = [*SMALL, *local, "--patches-per-block", 1, "--output-dir"]
    poison = {"poison_read": 25}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = programs.require_success(SCRIPT, *flags, whole, **poison)
    assert summary(whole)["skipped_batches"] == [[4, 5]]
    assert re.search(r"loss (inf|nan) at step 4: back to step [24], without batches \[4, 5\]", done.out), (
        done.out
    )
    assert all(tensor.isfinite().all() for tensor in weights(whole).values())

    ended = programs.run(SCRIPT, *flags, killed, **poison, kill_at_step=12)
    assert ended.code == -9, ended.err
    programs.require_success(SCRIPT, *flags, killed, **poison)
    assert_same_bits(killed, whole)
    assert summary(killed)["skipped_batches"] == [[4, 5]]


# ------------------------------------------------------------------------ what a folder of checkpoints goes through


@pytest.fixture
def checkpoints(tmp_path: Path):
    """An empty folder of checkpoints, and a writer that keeps two of them."""
    from checkpoints import BackgroundWriter, CheckpointFolder
    from store import Location

    return BackgroundWriter(CheckpointFolder(Location(str(tmp_path / "checkpoints"))), keep=2)


def save(writer, step: int, value: float = 0) -> str:
    """Save a small state as a step's, and wait for the writer."""
    from checkpoints import step_name

    writer.save_checkpoint({"weights": torch.full((1000,), value), "global_step": step}, step_name(step))
    writer.finish()
    return step_name(step)


def test_the_newest_are_kept_and_what_is_written_is_what_was_there_at_the_save(checkpoints) -> None:
    import obstore
    from checkpoints import step_name

    put = obstore.put
    state = {"weights": torch.zeros(1000)}

    def put_late(*given) -> None:
        state["weights"] += 1  # as the next step does
        put(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "put", put_late)
        for step in (10, 9, 100):
            checkpoints.save_checkpoint(state, step_name(step))
            checkpoints.finish()
    assert checkpoints.folder.names() == [step_name(100), step_name(10)]
    path = Path(checkpoints.folder.url, step_name(100))
    assert torch.load(path)["weights"].unique().tolist() == [2]


def test_a_full_disk_ends_no_run_and_the_last_good_checkpoint_is_named(
    local: list[str], tmp_path: Path, undisturbed
) -> None:
    flags = [*SMALL, *local, "--output-dir", tmp_path]
    assert programs.run(SCRIPT, *flags, terminate_at_step=4).code == AGAIN
    good = last_checkpoint(tmp_path)
    done = programs.run(SCRIPT, *flags, limit_files=1_000_000)
    assert done.code == 1, done.err
    unwritten = rf"note: step_00000012.ckpt not written: .*File too large.*; in \S+: {good.name}\n"
    assert re.search(unwritten, done.out), done.out
    assert "the last checkpoint is not there" in done.out.splitlines()[-1]
    assert last_checkpoint(tmp_path) == good
    programs.require_success(SCRIPT, *flags)
    assert_same_bits(tmp_path, undisturbed(1))


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def serve_bucket(monkeypatch: pytest.MonkeyPatch):
    """Serve an empty bucket within a block: yields the flags that let a run save there, and a client."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def serve() -> Iterator[tuple]:
        with buckets.serving("", latency_ms=0) as address:
            client = boto3.client("s3", endpoint_url=address)
            client.create_bucket(Bucket="runs")
            place = ["--checkpoint-dir", "s3://runs/first", "--endpoint", address]
            yield [*place, "--retry-timeout", 1], client

    return serve


def test_a_run_resumes_from_a_bucket_to_the_bit(
    serve_bucket, local: list[str], tmp_path: Path, undisturbed
) -> None:
    with serve_bucket() as (place, client):
        flags = [*SMALL, *local, *place, "--output-dir", tmp_path]
        assert programs.run(SCRIPT, *flags, environment=KEYS, terminate_at_step=4).code == AGAIN
        programs.require_success(SCRIPT, *flags, environment=KEYS)
        listed = client.list_objects_v2(Bucket="runs")["Contents"]
        names = sorted(entry["Key"].removeprefix("first/") for entry in listed)
        assert names == ["best.ckpt", *(f"step_{step:08}.ckpt" for step in (8, 10, 12))]
        (tmp_path / "checkpoints").mkdir()
        client.download_file("runs", "first/step_00000012.ckpt", tmp_path / "checkpoints/step_00000012.ckpt")
    assert (tmp_path / "resumed_at_5").exists() or (tmp_path / "resumed_at_6").exists()
    assert_same_bits(tmp_path, undisturbed(1))


def test_a_bucket_that_goes_away_ends_no_run_and_must_be_there_at_its_start(
    serve_bucket, local: list[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    with serve_bucket() as (place, client):
        flags = [*SMALL, *local, *place, "--output-dir", tmp_path]
        program = programs.Program(SCRIPT, *flags, environment=KEYS, wait_for_file=(7, gone))
        listed = partial(client.list_objects_v2, Bucket="runs")
        programs.wait_for(lambda: listed()["KeyCount"] >= 3, program, "three checkpoints")
    gone.touch()
    done = program.wait()
    assert done.code == 1, done.err
    assert summary(tmp_path)["steps"] == 12
    assert re.search(r"step_00000012.ckpt not written: .*; in s3://runs/first: no answer", done.out), done.out

    again = programs.run(SCRIPT, *flags, environment=KEYS)
    assert again.code == 2, again.err
    assert "error: --checkpoint-dir s3://runs/first: " in again.err.splitlines()[-1]


def test_the_folder_copied_alone_trains_and_resumes(local: list[str], tmp_path: Path, undisturbed) -> None:
    alone = Alone(CHAPTER, SMALL, tmp_path)
    assert alone.start(*local, kill_at_step=8).wait().code == -9
    done = alone.start(*local).wait()
    assert done.code == 0, done.err
    assert "warning" not in done.err.lower()
    assert_same_bits(alone.output, undisturbed(1))
    assert alone.written_elsewhere() == []
