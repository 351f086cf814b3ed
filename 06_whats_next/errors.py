"""The error that every room may raise, and the line that says what went wrong."""


class DataError(Exception):
    """What is wrong with the data, and what to do about it, in one line."""


def first_line(error: BaseException) -> str:
    """What went wrong, without a client's account of its own settings."""
    while isinstance(error, BaseExceptionGroup):  # of several reads at once
        error = error.exceptions[0]
    return str(error).strip().split("\n")[0] or type(error).__name__
