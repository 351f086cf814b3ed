"""The flags of a small run."""

from pathlib import Path


def make_flags(folder: Path) -> list[str]:
    """Those of a run that writes into this folder only."""
    return "--batch-size 8 --eval-samples 32".split()
