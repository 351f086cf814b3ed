"""What went wrong, in one line."""

import pytest
from errors import first_line

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
