"""Chapter 6: what a run keeps of itself, and that this is enough to repeat it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import book
import programs
import pytest
import torch
import xarray as xr
from chapter_6 import SCRIPT, rooms  # noqa: F401
from runs import assert_same_bits, last_checkpoint, weights

FLAGS = "--accelerator cpu --patch-size 16 --batch-size 4 --max-steps 3 --shuffle-slots 8 --seed 3".split()
NAMES = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
FLAGS += "--learning-rate 0.004 --no-count-requests --validate-every 2 --full-validation-patches 24".split()


@pytest.fixture(scope="module")
def store(make_small_store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the winds at 5 degrees."""
    return make_small_store(tmp_path_factory.mktemp("stores") / "winds.zarr")


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    run = tmp_path_factory.mktemp("run")
    programs.require_success(SCRIPT, *FLAGS, "--store", store, "--output-dir", run)
    return run


@pytest.fixture
def record(finished: Path) -> dict:
    """The run's record."""
    return json.loads((finished / "record.json").read_text())


# --------------------------------------------------------------------------------------------- repeated


def test_a_run_is_repeated_from_its_record_alone_to_the_bit(finished: Path, tmp_path: Path) -> None:
    programs.require_success(
        SCRIPT, "--config", finished / "options.json", "--output-dir", tmp_path / "again"
    )
    assert_same_bits(tmp_path / "again", finished)
    assert (tmp_path / "again/checkpoints").is_dir()


def test_a_run_is_repeated_from_its_checkpoint_alone(finished: Path, tmp_path: Path) -> None:
    """The options that are read from a checkpoint are those of the run."""
    from tracking import run_record

    run_record.main([str(last_checkpoint(finished)), "--save-options", str(tmp_path / "options.json")])
    assert (tmp_path / "options.json").read_bytes() == (finished / "options.json").read_bytes()


def test_the_command_line_of_a_record_gives_its_options(record: dict) -> None:
    import shlex

    import options
    from tracking import run_record

    command = shlex.split(run_record.command_of(record))
    assert command[:4] == "uv run python train.py".split()
    again = vars(options.make_parser("").parse_args(command[4:]))
    for name, value in run_record.repeatable(record).items():
        assert again[name] == value, name
    assert "--patches-per-block" not in command  # a default


@pytest.fixture
def give(tmp_path: Path) -> Callable:
    """Call it with what a file of options holds, and flags beside it: the options that come of it."""

    def parse(content: object, *flags: str, before: tuple[str, ...] = ()):
        from options import parse_options

        file = tmp_path / "mine.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        flags = (*before, "--config", str(file), "--output-dir", str(tmp_path), *flags)
        return parse_options("", list(flags))

    return parse


def test_flags_win_over_the_file_and_what_it_lacks_has_its_default(give: Callable) -> None:
    from options import Options

    content = {"max_steps": 7, "seed": 5, "level": 850, "test_times": [1991, 1991], "anonymous": True}
    for given in (give(content, "--seed", "6"), give(content, before=("--seed", "6"))):
        assert (given.max_steps, given.seed, given.level) == (7, 6, "850")
        assert given.test_times == ["1991", "1991"]
        assert given.anonymous is True
        assert given.batch_size == Options().batch_size
    assert give(content, "--no-anonymous").anonymous is False


def test_each_kind_of_value_is_what_the_flag_would_make_of_it(give: Callable) -> None:
    from options import Options

    one = {"variables": "u", "level": "--overwrite", "max_hours": 2, "loggers": ["CSVLogger"], "seed": "3"}
    given = give(one)
    assert (given.variables, given.level, given.loggers) == (["u"], "--overwrite", ["CSVLogger"])
    assert (given.max_hours, given.seed, given.overwrite) == (2.0, 3, False)
    assert give({"variables": ["u", "v"], "count_requests": False}).count_requests is False
    nothing = give({"variables": None, "overwrite": None, "max_hours": None, "seed": None})
    assert (nothing.variables, nothing.overwrite) == (Options().variables, False)
    assert (nothing.max_hours, nothing.seed) == (None, 0)


def test_a_later_file_wins_over_an_earlier_one(give: Callable, tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    first.write_text('{"seed": 1, "keep": 9}')
    given = give({"seed": 2}, before=("--config", str(first)))
    assert (given.seed, given.keep) == (2, 9)


NO_FILE = {  # what a file of options holds, and what the last line names
    '{"max_steps": "many"}': ("--max-steps", "many"),
    '{"max_steps": 0}': ("--max-steps", "0", "at least 1"),
    '{"max_steps": 4.0}': ("--max-steps", "4.0"),
    '{"learning_rate": NaN}': ("--learning-rate", "nan"),
    '{"learning_rate": 1e999}': ("--learning-rate", "inf"),
    '{"padding": "round"}': ("--padding", "round"),
    '{"loggers": "NoLogger"}': ("--loggers", "NoLogger"),
    '{"test_times": 1991}': ("--test-times", "2"),
    '{"variables": []}': ("--variables",),
    '{"store": 5}': ("--store", "5", "no such folder"),
    '{"max_stepz": 4}': ("mine.json", "max_stepz"),
    '{"config": "mine.json"}': ("mine.json", "config"),
    '{"overwrite": "no"}': ("mine.json", "overwrite", "'no'", "true or false"),
    '{"overwrite": 1}': ("mine.json", "overwrite", "1", "true or false"),
    '{"overwrite": [true]}': ("mine.json", "overwrite", "true or false"),
    '{"seed": true}': ("mine.json", "seed", "True"),
    '{"seed": [1]}': ("mine.json", "seed", "[1]"),
    '{"variables": {"u": 1}}': ("mine.json", "variables", "{'u': 1}"),
    '{"variables": [["u"]]}': ("mine.json", "variables", "[['u']]"),
    '{"variables": ["u", null]}': ("mine.json", "variables", "None"),
    '{"variables": ["u", "--overwrite"]}': ("mine.json", "variables", "dash"),
    '{"store": "a\\nb"}': ("mine.json", "store", "one line"),
    '{"data": {"store": "a"}}': ("mine.json", "data"),
    "max_steps: 4": ("mine.json", "no JSON"),
    "[1, 2": ("mine.json", "no JSON"),
    "[1, 2]": ("mine.json", "no object"),
    "": ("mine.json", "no JSON"),
    "[" * 100_000: ("mine.json", "no JSON"),
    '{"seed": 1}' + " " * 10**6: ("mine.json", "megabyte"),
}


@pytest.mark.parametrize("text", NO_FILE, ids=lambda text: text[:40])
def test_a_bad_file_is_refused_in_a_line(
    text: str, give: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        give(text)
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    for word in NO_FILE[text]:
        assert word in last, last


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_file_that_cannot_be_read_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from options import parse_options

    with pytest.raises(SystemExit) as error:
        parse_options("", ["--config", str(tmp_path / name)])
    assert error.value.code == 2
    assert f"--config {tmp_path / name}: " in capsys.readouterr().err.splitlines()[-1]


def test_a_switch_that_is_no_switch_deletes_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "overwrite": "no" once counted as true."""
    import train

    run = shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "mine.json").write_text('{"overwrite": "no"}')
    before = sorted((run / "checkpoints").iterdir())
    with pytest.raises(SystemExit) as error:
        train.main(["--config", str(tmp_path / "mine.json"), "--output-dir", str(run)])
    assert error.value.code == 2
    assert sorted((run / "checkpoints").iterdir()) == before != []


SECRET = "5e4d5ec4e7"


URLS = [
    ("resume", f"s3://KEY:{SECRET}@bucket/step_00000002.ckpt"),
    ("resume", f"https://bucket/step_00000002.ckpt?sig={SECRET}"),
    ("checkpoint_dir", f"s3://KEY:{SECRET}@bucket/run"),
    ("store", f"https://bucket/winds#token={SECRET}"),
    ("store", f"s3://KEY:{SECRET}/+x@bucket/winds"),
]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("name", "url"), URLS)
def test_credentials_in_a_url_are_refused(
    name: str, url: str, in_file: bool, give: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the run would have them, and so would each checkpoint."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit) as error:
        give({name: url}) if in_file else give({}, flag, url)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert SECRET not in said
    assert flag in said.splitlines()[-1]
    assert "environment" in said.splitlines()[-1]


# --------------------------------------------------------------------------------------------- what it holds


def test_each_checkpoint_has_the_record_and_the_record_what_decides_a_run(
    finished: Path, record: dict
) -> None:
    saved = torch.load(last_checkpoint(finished), weights_only=True)
    assert saved["callbacks"]["RunRecord"] == record
    assert record["options"]["seed"] == 3
    assert record["options"]["learning_rate"] == 0.004
    assert record["versions"]["torch"] == torch.__version__.split("+")[0]
    assert record["machine"]["threads"] >= 1
    assert len(record["code"]["files"]) == 64


def test_the_same_data_elsewhere_have_the_same_checksum_and_others_do_not(
    store: Path, record: dict, tmp_path: Path
) -> None:
    """Other times after the training's change nothing; another value of the first training map does."""
    from fields import split_times
    from store import FieldReader, Location
    from store_checksum import identify_data

    names = record["options"]["variables"]

    def identify(path: Path) -> dict:
        reader = FieldReader(Location(str(path)), names)
        (training,) = split_times(reader.open().time, {"--train-times": ("1982", "1989")})
        return identify_data(reader, training)

    shutil.copytree(store, tmp_path / "copy.zarr")
    assert identify(tmp_path / "copy.zarr") == record["data"]
    fields = xr.open_zarr(store).load()
    fields.isel(time=slice(0, -2)).to_zarr(tmp_path / "shorter.zarr")
    shorter = identify(tmp_path / "shorter.zarr")
    assert shorter["values"] == record["data"]["values"]
    assert shorter["metadata"] != record["data"]["metadata"]
    fields[names[0]][0, 5, 5] += 1
    fields.to_zarr(tmp_path / "other.zarr")
    other = identify(tmp_path / "other.zarr")
    assert other["values"] != record["data"]["values"]


def test_a_change_of_the_code_changes_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that Git does not know has no commit."""
    from tracking import run_record

    monkeypatch.setattr(run_record, "HERE", tmp_path)
    (tmp_path / "model.py").write_text("width = 24")
    before = run_record.identify_code()
    assert before["commit"] is None and before["changed"] is None
    (tmp_path / "model.py").write_text("width = 25")
    assert run_record.identify_code()["files"] != before["files"]


# --------------------------------------------------------------------------------------------- compared


def test_other_data_are_refused_and_another_machine_is_noted(
    record: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    from errors import CheckpointError
    from tracking.run_record import check_record

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


def test_the_folder_of_a_finished_run_is_all_that_a_plan_needs(finished: Path) -> None:
    from plan import __main__ as plan

    prices = ["--prices", str(book.ROOT / "06_whats_next/prices.toml")]
    plans = plan.main([str(finished), *"--device cpu --samples 1e6 --devices 1".split(), *prices])
    rate = json.loads((finished / "summary.json").read_text())["samples_per_second"]
    assert [one.rate for one in plans] == [pytest.approx(rate, rel=1e-6)] * 2


def test_a_run_does_not_go_on_with_other_data(finished: Path, store: Path, tmp_path: Path) -> None:
    """The same flags, and a store whose first training map has another value."""
    other = tmp_path / "other.zarr"
    shutil.copytree(store, other)
    fields = xr.open_zarr(store)[NAMES].isel(time=[0]).load()
    fields[NAMES[0]][0, 5, 5] += 1
    fields.drop_vars(["latitude", "longitude"]).drop_attrs().to_zarr(other, region="auto")
    before = weights(finished)
    done = programs.run(SCRIPT, *FLAGS, "--store", other, "--output-dir", finished, "--resume")
    assert done.code == 2, done.err
    assert "other values, times or another grid" in done.err.splitlines()[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(finished).items())


def test_two_records_are_compared_and_what_is_no_record_is_refused(
    finished: Path, record: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracking import run_record

    first = str(finished / "record.json")
    assert run_record.main([first, str(last_checkpoint(finished))]) == []
    record["options"]["seed"] = 4
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert run_record.main([first, str(tmp_path / "record.json")]) == ["options: seed 3 -> 4"]
    assert run_record.main([first]) == []  # here
    assert "uv run python train.py --store" in capsys.readouterr().out
    (tmp_path / "none.json").write_text("{}")
    for name in ("none.json", "nowhere.ckpt"):
        with pytest.raises(SystemExit) as error:
            run_record.main([str(tmp_path / name)])
        assert error.value.code == 2
        assert "give record.json, or a checkpoint" in capsys.readouterr().err
