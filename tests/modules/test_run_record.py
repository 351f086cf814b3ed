"""A run's record: the command that repeats it, the checksum of its data, and how it differs from another."""

import json
import shlex
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import made_up_winds
import pytest
import torch
from errors import CheckpointError, DataError
from fields import split_times
from location import Location
from options import STORE_DEFAULTS, Options, parse_options
from run_options import make_parser
from store import FieldReader
from store_checksum import identify_data
from tracking import run_record
from tracking.run_record import Record, check_record

FLAGS = "--max-steps 3 --seed 3 --no-count-requests --learning-rate 0.004 --loggers CSVLogger --level 850"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Of a run with some options."""
    options = parse_options("", [*FLAGS.split(), "--output-dir", str(tmp_path)])
    data = {"metadata": "1" * 64, "values": "2" * 64}
    return run_record.make_record(asdict(options), data, loss="loss", step=0, skipped=())


def test_the_command_line_of_a_record_gives_its_options(record: Record) -> None:
    command = shlex.split(run_record.command_of(record))
    assert command[:4] == "uv run python train.py".split()
    again = vars(make_parser("", Options).parse_args(command[4:]))
    for name, value in run_record.repeatable(record).items():
        assert again[name] == value, name
    assert "--patches-per-block" not in command  # a default


def test_periods_are_kept_for_a_repetition_and_not_typed_if_they_are_the_books(record: Record) -> None:
    """Those that were chosen to fit the store are: it may have grown."""
    record["options"] |= STORE_DEFAULTS | {"test_times": ["1992-03-01", "1992-12-31"]}
    assert run_record.repeatable(record)["train_times"] == STORE_DEFAULTS["train_times"]
    command = run_record.command_of(record)
    assert "--test-times 1992-03-01 1992-12-31" in command
    assert "--train-times" not in command and "--patch-size" not in command


def test_two_records_are_compared_and_what_is_no_record_is_refused(record: Record, tmp_path: Path) -> None:
    run_record.write_record(record, tmp_path)
    record["options"]["seed"] = 4
    run_record.write_record(record, tmp_path / "other")
    assert run_record.main([str(tmp_path), str(tmp_path / "other")]) == ["options: seed 3 -> 4"]
    for name in ("options.json", "nowhere.ckpt"):
        with pytest.raises(SystemExit) as error:
            run_record.main([str(tmp_path / name)])
        assert error.value.code == 2


def test_other_data_are_refused_and_another_machine_is_noted(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    check_record(record, record)
    assert capsys.readouterr().out == ""
    now = json.loads(json.dumps(record))
    now["machine"]["threads"] += 1
    now["versions"]["torch"] = "3.0"
    now["data"]["metadata"] = "0" * 64
    check_record(record, now)
    said = capsys.readouterr().out
    threads = record["machine"]["threads"]
    assert f"machine: threads {threads} -> {threads + 1}" in said
    assert f"versions: torch {record['versions']['torch']} -> 3.0" in said
    assert "data: metadata" in said
    now["data"]["values"] = "0" * 64
    with pytest.raises(CheckpointError, match="other values"):
        check_record(record, now)


def identify(store: Path) -> dict[str, str]:
    """The checksums of the winds in a store."""
    reader = FieldReader(Location(str(store)), ["u", "v"])
    [training] = split_times(reader.open().time, {"--train-times": made_up_winds.TRAINING})
    return identify_data(reader, training)


def test_the_same_data_elsewhere_have_the_same_checksum_and_others_do_not(tmp_path: Path) -> None:
    """Other times after the training's change nothing; another value of the first training map does."""
    winds = made_up_winds.make_winds()
    whole = identify(made_up_winds.write(tmp_path / "winds.zarr", winds))
    shutil.copytree(tmp_path / "winds.zarr", tmp_path / "copy.zarr")
    assert identify(tmp_path / "copy.zarr") == whole
    shorter = identify(made_up_winds.write(tmp_path / "shorter.zarr", winds.isel(time=slice(0, -2))))
    assert shorter["values"] == whole["values"]
    assert shorter["metadata"] != whole["metadata"]
    winds.u[0, 5, 5] += 1
    other = identify(made_up_winds.write(tmp_path / "other.zarr", winds))
    assert other["values"] != whole["values"]


@pytest.mark.parametrize("part", ["options", "data", None])
def test_ranks_that_found_other_data_do_not_train(part: str | None) -> None:
    """As when a store grows while the ranks open it one after another, and a default follows it."""
    records = [{"options": {"train_times": ["1982", "1989"]}, "data": {"values": "abc"}} for _ in range(2)]
    if part:
        records[1][part] = {"train_times": ["1982", "1990"], "values": "abd"}
    found = []
    alone = SimpleNamespace(strategy=SimpleNamespace(all_gather=lambda own: found.append(own) or own))
    module = SimpleNamespace(device=torch.device("cpu"))
    for record in records:
        run_record.RunRecord(record).on_fit_start(alone, module)
    together = SimpleNamespace(strategy=SimpleNamespace(all_gather=lambda own: torch.stack(found[:2])))
    for record in records:
        with pytest.raises(DataError, match="ranks found different times") if part else nullcontext():
            run_record.RunRecord(record).on_fit_start(together, module)
