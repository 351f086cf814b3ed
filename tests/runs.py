"""What a training run has left in its folder, and when two runs have ended at the same."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import book
import numpy as np
import programs
import pytest
import torch

# What must be alike for two runs to go on alike, by the names that either kind of script saves it under.
BY_HAND = ("step", "model", "optimizer", "schedule")
LIGHTNING = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
# Of runs in double precision. In single, AdamW divides gradients as small as their rounding by themselves, and
# one weight in 100,000 goes another way by a tenth of the learning rate; in double, its eps is above rounding.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def load(script: str | Path, name: str) -> ModuleType:
    """Import a script of the book under a name of its own; it finds the modules beside it, and leaves none.

    Where rooms are open already, it must need no module beside it, or be of their folder.
    """
    path = programs.ROOT / script
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    folder = path.parent.relative_to(programs.ROOT).as_posix()
    with nullcontext() if book.rooms_are_open() else book.rooms(folder):
        spec.loader.exec_module(module)
    return module


def make_store(here: Path, *flags: object) -> None:
    """Run chapter 3's make_store.py in a process of its own, with its made-up files below `here`."""
    process = programs.CONTEXT.Process(target=_make_store, args=(here, [str(flag) for flag in flags]))
    process.start()
    process.join(programs.LIMIT)
    assert process.exitcode == 0, flags


def _make_store(here: Path, flags: list[str]) -> None:
    with book.rooms("03_cloud_data"):
        import make_store

        make_store.HERE = here
        make_store.main(flags)


def last_checkpoint(folder: Path) -> Path:
    """last.ckpt of a run, or chapter 6's checkpoint of its latest step."""
    last = folder / "last.ckpt"
    return last if last.exists() else max(folder.glob("checkpoints/step_*.ckpt"))


def state(folder: Path) -> dict:
    """All of a run's last checkpoint that training changes; KeyError if it lacks a part."""
    saved = torch.load(last_checkpoint(folder), weights_only=True)
    names = BY_HAND if "model" in saved else LIGHTNING
    return dict(zip(BY_HAND, (saved[name] for name in names)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The network's weights in a run's last checkpoint, under the same names for all scripts."""
    saved = torch.load(last_checkpoint(folder), weights_only=True)
    if "model" in saved:
        return saved["model"]
    named = saved["state_dict"].items()
    return {name.removeprefix("model."): value for name, value in named if name.startswith("model.")}


def losses(folder: Path) -> list[float]:
    """The loss of each step, from a run's log: that of rank 0, if there are several."""
    path = folder / "metrics.csv"
    with open(path if path.exists() else folder / "metrics_rank_0.csv", newline="") as log:
        return [float(row["loss"]) for row in csv.DictReader(log) if row["loss"]]


def losses_after(folder: Path, start: int) -> list[tuple[int, float]]:
    """(step, loss) of each step that a run took after it had been resumed at `start`, from the log of that."""
    logs = [folder / f"resumed_at_{start}" / "metrics.csv", *folder.glob(f"resumed_at_{start}*.csv")]
    with open(next(path for path in logs if path.exists()), newline="") as log:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(log) if row["loss"]]


def assert_resumed(folder: Path, start: int, whole: Path) -> None:
    """A killed run went on at step `start`, and no earlier, with the losses of the run that nobody killed."""
    after = losses_after(folder, start)
    assert [step for step, _ in after] == list(range(start, state(whole)["step"]))
    assert [loss for _, loss in after] == losses(whole)[start:]


def summary(folder: Path) -> dict:
    """The headline figures of a run that has ended."""
    return json.loads((folder / "summary.json").read_text())


def rmse(folder: Path) -> dict[str, float]:
    """The network's RMSE on the test times in a run that has ended, for each unit."""
    return summary(folder)["rmse"]["U-Net"]


def run_readers_command(chapter: Path, steps: int, folder: Path, *flags: object) -> str:
    """Type `python train.py` in a chapter's folder, writing to another; return what it printed.

    AssertionError unless it succeeds, warns of nothing, draws, and leaves no process.
    """
    before = programs.running()
    command = [sys.executable, "train.py", "--output-dir", folder, *map(str, flags)]
    command += ["--max-steps", str(steps)] if steps != 200 else []  # 200 is the default
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:  # a pipe would wait for all
        ended = subprocess.run(command, cwd=chapter, stdout=out, stderr=err)
    said = (folder / "err").read_text()
    assert [process for process in programs.running() if process not in before] == []
    assert ended.returncode == 0, said
    assert "warning" not in said.lower()
    assert "site-packages" not in said  # Lightning's warnings begin with the path of a file
    assert (folder / "fill.png").read_bytes().startswith(b"\x89PNG")
    assert state(folder)["step"] == steps
    return (folder / "out").read_text()


def check_summary(printed: str) -> float:
    """Every line that the walkthrough promises is there; return the RMSE over that of the rival, less 1."""
    for pattern in (
        r"RMSE over the unseen cells of \S+ to \S+, m/s\n",
        r"climatology +[\d.]+\n",
        r"nearest neighbour +[\d.]+\n",
        r"linear interpolation +[\d.]+\n",
        r"[\d.]+ samples/s, [\d.]+% of the time waiting for data\n",
        r"\d+ steps in \d+ s, peak memory [\d.]+ GB\n",
        r"picture: \S+fill\.png\n",
    ):
        assert re.search(pattern, printed), f"{pattern} is not in\n{printed}"
    rival, network = (
        float(re.search(rf"{name} +([\d.]+)\n", printed)[1]) for name in ("interpolated anomalies", "U-Net")
    )
    gain = float(re.search(r"against interpolated anomalies +([+-][\d.]+)%", printed)[1])
    assert abs(100 * (network / rival - 1) - gain) < 0.2
    return network / rival - 1


def assert_same_bits(one: Path, other: Path) -> None:
    """Two runs ended at the same bits: step, weights, optimizer, schedule and RMSE."""
    first, second = state(one), state(other)
    assert first["step"] == second["step"] > 0
    moments = first["optimizer"][0] if isinstance(first["optimizer"], list) else first["optimizer"]
    assert moments["state"].keys() == set(range(len(weights(one)))), "no moments for some weights"
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert rmse(one) == rmse(other)


def assert_same_but_for_rounding(one: Path, other: Path) -> None:
    """The same losses, weights and RMSE, added up in another order."""
    np.testing.assert_allclose(losses(one), losses(other), **TOLERANCE)
    torch.testing.assert_close(weights(one), weights(other), **TOLERANCE)
    assert rmse(one) == pytest.approx(rmse(other), rel=1e-6)  # the samples' weights stay in single precision
