"""Chapter 6: a run stays on the snapshot that it began with, whoever commits meanwhile."""

import json
from pathlib import Path

import icechunk
import pytest
import xarray as xr
from chapter_6 import codes, folder, rooms, run_ranks  # noqa: F401
from programs import printed
from runs import assert_same_bits

U = "10m_u_component_of_wind"


@pytest.fixture(scope="module")
def repository(folder: Path) -> Path:
    """A repository with the winds of the store."""
    path = folder / "winds/versions"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    commit(path, xr.open_zarr(folder / "winds/whole", chunks=None, decode_cf=False))
    return path


def commit(repository: Path, winds: xr.Dataset, **how: str) -> str:
    """Write the winds; return the new snapshot of the branch."""
    opened = icechunk.Repository.open(icechunk.local_filesystem_storage(str(repository)))
    session = opened.writable_session("main")
    winds.to_zarr(session.store, consolidated=False, **how)
    return session.commit("other winds")


def read_options(output: Path) -> dict:
    return json.loads((output / "record.json").read_text())["options"]


def test_a_killed_run_goes_on_with_the_snapshot_that_it_began_with(repository: Path, tmp_path: Path) -> None:
    """It ends at the bits of a run that nothing disturbed, says so, and is repeated by its record."""
    kept = ["--climatology-dir", tmp_path / "kept"]
    at = ["--store", repository, *kept, "--max-steps", 8]
    whole, killed, later, again = (tmp_path / name for name in ("whole", "killed", "later", "again"))
    done = run_ranks(1, *at, "--icechunk", "main", "--output-dir", whole, wait_for_writes=True)
    assert codes(done) == [0], printed(done)
    first = read_options(whole)["snapshot"]
    flags = [*at, "--icechunk", "main", "--output-dir", killed]
    done = run_ranks(1, *flags, planted={0: {"kill_at_step": 7}}, wait_for_writes=True)
    assert codes(done) == [-9], printed(done)
    assert f"note: Icechunk snapshot {first}, of " in done[0].out

    stored = xr.open_zarr(repository.parent / "whole", chunks=None, decode_cf=False)
    second = commit(repository, stored[[U]] + 1, mode="r+")
    done = run_ranks(1, *flags, wait_for_writes=True)
    assert codes(done) == [0], printed(done)
    assert f"note: Icechunk snapshot {first}, of " in done[0].out
    assert f"; main is at {second} now, which is not read\n" in done[0].out
    assert read_options(killed)["snapshot"] == first
    assert_same_bits(killed, whole)

    done = run_ranks(1, *flags, "--snapshot", second)
    assert codes(done) == [2]
    assert (
        done[0]
        .err.splitlines()[-1]
        .endswith(f"has --snapshot {first}, not {second}; give that, or no --resume")
    )
    repeated = [*at, "--config", whole / "options.json", "--output-dir", again]
    done = run_ranks(1, *repeated, wait_for_writes=True)
    assert codes(done) == [0], printed(done)
    assert_same_bits(again, whole)
    done = run_ranks(1, *at, "--icechunk", "main", "--output-dir", later)
    assert codes(done) == [0], printed(done)
    assert read_options(later)["snapshot"] == second
    with pytest.raises(AssertionError):
        assert_same_bits(later, whole)
