"""The flags of a small run, on a store of made-up winds."""

from pathlib import Path

from made_up_winds import flags_for, make_winds, write


def make_flags(folder: Path) -> list[str]:
    """Those of a run that writes into this folder only."""
    sizes = "--patches-per-block 2 --eval-samples 8 --full-validation-patches 8".split()
    store = write(folder / "winds.zarr", make_winds())
    return flags_for(store, *sizes, "--climatology-dir", folder / "climatology")
