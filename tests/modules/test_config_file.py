"""Options from a file, or from flags, which win: what is wrong is refused in a line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import run_options
from lightning.pytorch import loggers
from options import Options, parse_options

SECRET = "5e4d5ec4e7"


@pytest.fixture
def give(tmp_path: Path) -> Callable[..., Options]:
    """Call it with what a file of options holds, and flags beside it: the options that come of it."""

    def parse(content: object, *flags: str, before: tuple[str, ...] = ()) -> Options:
        file = tmp_path / "mine.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return parse_options("", [*before, "--config", str(file), "--output-dir", str(tmp_path), *flags])

    return parse


def last_line_of_refusal(parse: Callable, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said last when options are refused, in which there is no secret."""
    with pytest.raises(SystemExit) as error:
        parse()
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert SECRET not in said
    return said.splitlines()[-1]


def test_flags_win_over_the_file_and_a_later_file_over_an_earlier_one(
    give: Callable[..., Options], tmp_path: Path
) -> None:
    """And each value is what its flag would make of it."""
    content = {"max_steps": "7", "seed": 5, "level": "--overwrite", "variables": "u", "anonymous": True}
    content |= {"test_times": [1991, 1991], "max_hours": None}
    for given in (give(content, "--seed", "6"), give(content, before=("--seed", "6"))):
        assert (given.max_steps, given.seed, given.max_hours) == (7, 6, None)
        assert (given.level, given.overwrite, given.anonymous) == ("--overwrite", False, True)
        assert (given.variables, given.test_times) == (["u"], ["1991", "1991"])
        assert given.batch_size == Options().batch_size
    assert give(content, "--no-anonymous").anonymous is False
    (tmp_path / "first.json").write_text('{"seed": 1, "keep": 9}')
    given = give({"seed": 2}, before=("--config", str(tmp_path / "first.json")))
    assert (given.seed, given.keep) == (2, 9)


NO_FILE = {  # what a file of options holds, and what the last line names
    '{"max_steps": 4.0}': ("--max-steps", "4.0"),
    '{"learning_rate": NaN}': ("--learning-rate", "nan"),
    '{"variables": []}': ("--variables",),
    '{"max_stepz": 4}': ("mine.json", "max_stepz"),
    '{"overwrite": "no"}': ("mine.json", "overwrite", "'no'", "true or false"),
    '{"seed": true}': ("mine.json", "seed", "True"),
    '{"variables": ["u", "--overwrite"]}': ("mine.json", "variables", "dash"),
    '{"store": "a\\nb"}': ("mine.json", "store", "one line"),
    f'{{"checkpoint_dir": "s3://KEY:{SECRET}@bucket/run"}}': ("--checkpoint-dir", "credentials"),
    '{"variables": ["u", null]}': ("mine.json", "variables"),
    "[1, 2]": ("mine.json", "no object"),
    "max_steps: 4": ("mine.json", "no JSON"),
    "[" * 100_000: ("mine.json", "no JSON"),
    '{"seed": 1}' + " " * 10**6: ("mine.json", "megabyte"),
}


@pytest.mark.parametrize("text", NO_FILE, ids=lambda text: text[:40])
def test_a_bad_file_is_refused_in_a_line(
    text: str, give: Callable[..., Options], capsys: pytest.CaptureFixture[str]
) -> None:
    last = last_line_of_refusal(lambda: give(text), capsys)
    for word in NO_FILE[text]:
        assert word in last, last


def test_a_file_or_a_loggers_package_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = last_line_of_refusal(lambda: parse_options("", ["--config", "nowhere.json"]), capsys)
    assert "--config nowhere.json: " in last
    assert run_options.LOGGERS.keys() <= set(loggers.__all__)
    monkeypatch.setattr(run_options, "find_spec", lambda package: package != "wandb" or None)
    last = last_line_of_refusal(lambda: parse_options("", ["--loggers", "CSVLogger", "WandbLogger"]), capsys)
    assert "--loggers WandbLogger" in last and "uv add wandb" in last
