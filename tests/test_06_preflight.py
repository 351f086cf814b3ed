"""Chapter 6: what preflight finds before a run: each planted fault is red, with its remedy."""

import shutil
import socket
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import book
import buckets
import numpy as np
import programs
import pytest
import zarr
from chapter_6 import folder, local  # noqa: F401
from made_up_winds import make_winds, write
from options import parse_options
from preflight import __main__ as preflight
from preflight import patches
from preflight.training import Pace
from survival.checkpoints import CheckpointFolder, step_name

pytestmark = pytest.mark.usefixtures("quick_programs")
SCRIPT = "06_whats_next/preflight/__main__.py"
SMALL = "--accelerator cpu --patch-size 16 --batch-size 6 --shuffle-slots 12 --patches-per-block 2".split()
V = "10m_v_component_of_wind"
EVERY = ["versions", "device", "open files", "disk of logs", "disk", "start", "checkpoint", "restore"]
EVERY += [
    "store",
    "memory",
    "first byte",
    "bandwidth",
    "epoch",
    "climatology",
    "values",
    "one batch",
    "loader",
]


@pytest.fixture
def at_a_good_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a batch takes here is made up."""
    monkeypatch.setattr(preflight, "measure_pace", lambda *_: Pace(9, 0.001, 0.1))


def red_of(printed: str) -> dict[str, tuple[str, str]]:
    """The red lines by name, each with its remedy."""
    pairs = [pair for pair in pairwise(printed.splitlines()) if pair[0].startswith("RED")]
    red = {line[7:19].strip(): (line[20:], below.strip()) for line, below in pairs}
    assert all(remedy.startswith("-> ") for _, remedy in red.values()), printed
    return red


def refused(capsys, *flags: object) -> str:
    """What it prints before it ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        preflight.main([*SMALL, *map(str, flags)])
    assert end.value.code == 2
    return capsys.readouterr().out


def test_a_run_that_is_well_is_green_and_nothing_is_left_behind(
    local: list[str], tmp_path: Path, at_a_good_pace: None, capsys
) -> None:
    checkpoint = tmp_path / "checkpoints/step_00000004.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("of a run")
    found = preflight.main([*SMALL, *local, "--output-dir", str(tmp_path), "--overwrite"])
    assert [finding.name for finding in found] == EVERY
    assert [finding for finding in found if finding.is_red] == []
    printed = capsys.readouterr().out
    assert "all green" in printed
    # 26 training maps, of which 2 patches each; 2 variables in 6 chunks each.
    assert "52 patches by 312 requests" in printed
    assert list(tmp_path.rglob("*")) == [checkpoint.parent, checkpoint]


def test_a_run_that_goes_on_is_checked_with_its_own_periods_when_the_store_has_grown(
    tmp_path: Path, at_a_good_pace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that no flag gives are the checkpoint's."""
    monkeypatch.setattr(preflight, "overfit", lambda *_: [1.0, 0.1])
    store = write(tmp_path / "winds", make_winds()[["u", "v"]])  # of 144 times; the run began with 120
    flags = ["--store", store, "--variables", "u", "v", "--output-dir", tmp_path, "--accelerator", "cpu"]
    flags += ["--climatology-dir", tmp_path, "--resume"]
    options = asdict(parse_options("", list(map(str, flags)))) | {"patch_size": 16}
    options |= {"train_times": ["1982-01-01", "1984-08-08"], "validation_times": ["1984-08-18", "1984-12-06"]}
    options |= {"test_times": ["1984-12-16", "1985-04-05"]}
    callbacks = {"StepBoundary": {"skipped": []}, "RunRecord": {"options": options}}
    state = {"global_step": 2, "state_dict": {}, "optimizer_states": [], "callbacks": callbacks}
    CheckpointFolder(str(tmp_path / "checkpoints")).write(step_name(2), state)
    found = {finding.name: finding for finding in preflight.main(list(map(str, flags)))}
    assert found["start"].text.startswith("at step 2, ")
    assert found["values"].text == "no bad one in 48 of 96 training, 12 of 12 validation, 12 of 12 test maps"
    assert found["epoch"].text.startswith(f"{96 * 8} patches ")


def test_a_full_disk_and_nan_are_red_with_their_remedies_and_exit_code_2(
    folder: Path, tmp_path: Path
) -> None:
    store = shutil.copytree(folder / "winds/whole", tmp_path / "winds")
    zarr.open_group(store)[V][5, 10, 10] = np.nan
    flags = [*SMALL, "--store", store, "--output-dir", tmp_path / "run"]
    done = programs.run(SCRIPT, *flags, limit_files=1_000_000)
    assert done.code == 2, done.err
    red = red_of(done.out)
    assert list(red) == ["checkpoint", "values"], done.out
    assert "File too large" in red["checkpoint"][0]
    assert "--checkpoint-dir" in red["checkpoint"][1]
    assert red["values"][0].startswith(f"{V} on 1983-")
    assert "in 1 cells" in red["values"][0]
    assert "--missing mask" in red["values"][1]
    assert list(tmp_path.rglob("*.ckpt")) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["a folder without a store", "a bucket that does not answer"])
def test_a_wrong_store_is_red_and_ends_what_needs_it(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Hours before --retry-timeout is over. So is a checkpoint that train.py would not write over."""
    monkeypatch.setattr(preflight, "RETRY_TIMEOUT", 1)
    monkeypatch.setattr(patches, "RETRY_TIMEOUT", 1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_00000004.ckpt").write_text("cut off")
    place = ["--store", folder, "--retry-timeout", 10_000, "--output-dir", tmp_path]
    with socket.socket() as silent:  # its port is held, and nobody listens
        silent.bind(("127.0.0.1", 0))
        if kind == "a bucket that does not answer":
            place += ["--store", "s3://winds/whole", "--anonymous"]
            place += ["--endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        printed = refused(capsys, *place)
    red = red_of(printed)
    assert list(red) == ["start", "store"]
    assert "--resume auto" in red["start"][1]
    assert "--endpoint" in red["store"][1]
    assert "left out: values, one batch, loader" in printed


def test_too_large_a_batch_is_red_before_it_is_read(
    local: list[str], tmp_path: Path, at_a_good_pace: None, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """With the micro-batches of its remedy, it is green."""
    monkeypatch.setattr(patches, "free_memory", lambda ranks: 20_000_000)
    flags = [*local, "--output-dir", str(tmp_path), "--batch-size", "60", "--shuffle-slots", "60"]
    printed = refused(capsys, *flags)
    red = red_of(printed)
    assert list(red) == ["memory"], printed
    assert "left out: values, one batch, loader" in printed
    assert "green  values" not in printed
    times = red["memory"][1].split(":")[0].split()[-1]
    monkeypatch.setattr(preflight, "overfit", lambda *_: [1.0, 0.1])
    found = preflight.main([*SMALL, *flags, "--accumulate-grad-batches", times])
    assert "memory" in [finding.name for finding in found]


def test_two_ranks_with_different_versions_are_red_on_both(local: list[str], tmp_path: Path) -> None:
    planted = {1: {"other_version": "zarr 0.0"}}
    done = programs.run_ranks(
        SCRIPT, 2, *SMALL, *local, "--output-dir", tmp_path, planted=planted, short_preflight=True
    )
    assert [one.code for one in done] == [2, 2], programs.printed(done)
    [(text, remedy)] = red_of(done[0].out).values()
    assert text == f"rank 1: versions: zarr {zarr.__version__} -> 0.0"
    assert "uv sync" in remedy
    assert "green  restore" in done[0].out
    assert "RED" not in done[1].out


def test_the_memory_was_predicted_within_a_sixth() -> None:
    """In results/, where nothing was red without a fault."""
    rows = book.results("06_whats_next/results/preflight.json")["rows"]
    assert [row["red"] for row in rows if row.get("fault") == "nothing"] == [[]]
    memory = [row for row in rows if row["what"] == "memory"]
    assert len(memory) == 4
    for row in memory:
        assert row["predicted"] == pytest.approx(row["found"], rel=1 / 6)


@pytest.mark.thorough
def test_a_bucket_with_a_second_to_the_first_byte_is_measured_so(folder: Path, tmp_path: Path) -> None:
    with buckets.serving(folder, latency_ms=1000) as address:
        place = ["--store", "s3://winds/whole", "--endpoint", address, "--anonymous"]
        done = programs.run(SCRIPT, *SMALL, *place, "--output-dir", tmp_path)
    assert done.code == 2
    red = red_of(done.out)
    assert list(red) == ["loader"], done.out
    assert "the store gives" in red["loader"][0]
    assert "first byte   after 10" in done.out
