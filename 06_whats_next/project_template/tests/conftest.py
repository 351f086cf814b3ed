"""Nothing outside the tests decides how they end."""

import os
import signal

import pytest

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def signals_end_the_tests_again():
    """A run takes SIGTERM and SIGUSR1, also where a test makes a part of one in this process."""
    taken = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in taken}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
