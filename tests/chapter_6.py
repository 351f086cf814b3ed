"""A small run of chapter 6: its flags, the store it reads, and what it ends as if nothing disturbs it."""

import gc
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import book
import programs
import pytest

SCRIPT = "06_whats_next/train.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --max-steps 12 --validate-every 6".split()
SMALL += "--checkpoint-every 2 --log-every 1 --shuffle-slots 12 --patches-per-block 2".split()
SMALL += "--full-validation-patches 30 --resume auto".split()
AGAIN = 75  # exit code: run the same command again


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("06_whats_next"), programs.planted_in_all(**programs.QUICK):
        import train  # noqa: F401

        yield
    gc.unfreeze()  # train.py has frozen all objects of this process


@pytest.fixture(scope="module")
def folder(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets, in one of which is a store."""
    folder = tmp_path_factory.mktemp("buckets")
    make_small_store(folder / "winds/whole")
    return folder


@pytest.fixture(scope="module")
def local(folder: Path) -> list[str]:
    """The flags that read the store from the disk."""
    return ["--store", str(folder / "winds/whole")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local: list[str]) -> Callable[..., Path]:
    """Call it with a number of ranks, and flags: the folder of the run that nothing has disturbed."""
    made: dict[tuple, Path] = {}

    def run(ranks: int, *flags: str) -> Path:
        if (ranks, *flags) not in made:
            target = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
            done = run_ranks(ranks, *local, *flags, "--output-dir", target, wait_for_writes=True)
            assert codes(done) == [0] * ranks, programs.printed(done)
            # Lightning's warnings begin with the path of a file.
            assert "site-packages" not in programs.printed(done)
            made[ranks, *flags] = target
        return made[ranks, *flags]

    return run


def run_ranks(ranks: int, *flags: object, **options: object) -> list[programs.Run]:
    """Run the script on several ranks to their ends, whatever these are."""
    done = programs.run_ranks(SCRIPT, ranks, *SMALL, *flags, **options)
    late = [one for one in done if isinstance(one, TimeoutError)]
    assert late == [], programs.printed(done)
    return done


def codes(done: list[programs.Run]) -> list[int]:
    return [one.code for one in done]
