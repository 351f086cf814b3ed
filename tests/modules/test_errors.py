"""What went wrong, in one line."""

import pytest
from command_line import call_at
from errors import DataError, first_line
from location import Location
from torch._utils import ExceptionWrapper

GROUP = ExceptionGroup("a", [ExceptionGroup("b", [KeyError()]), ValueError("late")])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("\n  403 Forbidden\n\nDebug source:\nGeneric {"), "403 Forbidden"),
        (TimeoutError(" \n "), "TimeoutError"),
        (BaseExceptionGroup("c", [GROUP, KeyboardInterrupt()]), "KeyError"),
    ],
)
def test_what_went_wrong_is_said_in_one_line(error: BaseException, line: str) -> None:
    """Of several reads at once, that of the first."""
    assert first_line(error) == line


def test_what_a_worker_could_not_read_is_said_in_one_line(capsys) -> None:
    """DataLoader passes it on as the text of a traceback."""

    def fail(location: Location) -> None:
        try:
            raise DataError("the/key: gone")
        except DataError:
            failed = ExceptionWrapper(where="in a worker")
        failed.reraise()

    with pytest.raises(SystemExit):
        call_at(fail, Location("winds"), "")
    assert capsys.readouterr().err.splitlines()[-1].endswith(" error: --store winds: the/key: gone")
