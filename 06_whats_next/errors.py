"""The error that every room may raise, the line that says what went wrong, and the exit."""

import argparse

# Says what to mend, and exits with code 2.
refuse = argparse.ArgumentParser(usage=argparse.SUPPRESS).error


class DataError(Exception):
    """What is wrong with the data, and what to do about it, in one line."""


def first_line(error: BaseException) -> str:
    """What went wrong, without a client's account of its own settings."""
    while isinstance(error, BaseExceptionGroup):  # of several reads at once
        error = error.exceptions[0]
    return str(error).strip().split("\n")[0] or type(error).__name__
