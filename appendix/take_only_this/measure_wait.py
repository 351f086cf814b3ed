"""The share of a loop's time that is spent waiting for data."""

from time import perf_counter


def measure_wait(batches, seconds):
    """The same batches; adds to "wait" and "work" of seconds, which is a Counter()."""
    asked = perf_counter()
    for batch in batches:
        given = perf_counter()
        yield batch  # your step runs here; on a GPU, end it with torch.cuda.synchronize()
        done = perf_counter()
        seconds["wait"] += given - asked
        seconds["work"] += done - given
        asked = done
