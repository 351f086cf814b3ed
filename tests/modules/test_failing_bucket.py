"""A bucket that fails now and then."""

import json
import urllib.request
from pathlib import Path

import buckets
import numpy as np
from made_up_winds import COLUMNS, ROWS, flags_for, make_datamodule, make_winds, write


def test_shards_in_a_bucket_that_fails_now_and_then_have_the_same_batches(tmp_path: Path) -> None:
    """To the bit, whatever was read for them."""
    winds = make_winds()[["u", "v"]].isel(time=slice(None, None, 2))
    path = write(tmp_path / "winds/shards", winds, (1, 10, 20), shards=(4, ROWS, COLUMNS))
    few = "--max-steps 10 --shuffle-slots 8 --patches-per-block 4 --accelerator cpu".split()
    expected = list(make_datamodule(flags_for(path, *few)).train_loader())
    bucket = ["--store", "s3://winds/shards", "--anonymous"]
    faults = {"error_rate": 0.05, "reset_rate": 0.01, "truncate_rate": 0.01}
    with buckets.serving(tmp_path, latency_ms=0, **faults) as address:
        module = make_datamodule(flags_for(path, *few, *bucket, "--endpoint", address))
        found = list(module.train_loader())
        with urllib.request.urlopen(f"{address}/_counts") as reply:
            counts = json.load(reply)
    assert sum(counts[name] for name in ("SlowDown", "reset", "truncated")) > 0
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        for name in ("input", "target", "unseen", "weight"):
            np.testing.assert_array_equal(one[name], other[name])
