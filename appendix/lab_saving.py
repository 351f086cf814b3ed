"""Appendix, lab 4: saving and loading. What a checkpoint must hold, and what must not be in the file.

    uv run python lab_saving.py

You should see that a run resumes to the bit with weights, optimizer and step, and not without; how large the files
are; that a pickled module is bound to its code; that a view drags its storage along; and a save that leaves no torn file.
"""

import argparse
import os
import pickle
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import (
    consume_prefix_in_state_dict_if_present as remove_prefix,
)

STEPS, KILLED_AT, RATE = 6, 3, 1e-3
RAN = []  # what a file has made this process do


class Network(nn.Sequential):
    """A class of one's own: a whole module that is pickled holds its name, not its code."""

    def __init__(self):
        super().__init__(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def note(text: str) -> None:
    RAN.append(text)


class Exploit:
    """What runs when it is unpickled may be anything: here it leaves a note."""

    def __reduce__(self) -> tuple:
        return note, ("anything",)


class Unpicklable:
    """Ends a save in its middle, as a full disk or a kill would."""

    def __reduce__(self) -> tuple:
        raise OSError("no space left on device")


def samples(step: int) -> Tensor:
    """The batch of a step, (32, 64): a function of the step, so that a loader has no state to save."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def train(state: dict | None = None, steps: int = STEPS) -> dict:
    """Train from a checkpoint, or from the beginning, up to a step; return a checkpoint."""
    torch.manual_seed(0)
    model = Network()
    optimizer, start = torch.optim.Adam(model.parameters(), lr=RATE), 0
    if state:
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        start = state.get("step", 0)
    for step in range(start, steps):
        batch = samples(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": steps,
    }


def resumed(file: Path, *parts: str) -> float:
    """The largest difference of any weight from a run that nobody killed, if only these parts were saved."""
    torch.save(
        {
            part: value
            for part, value in train(steps=KILLED_AT).items()
            if part in parts
        },
        file,
    )
    steps = STEPS if "step" in parts else STEPS - KILLED_AT  # as many more
    found, truth = train(torch.load(file, weights_only=True), steps), train()
    return max(
        (found["model"][key] - truth["model"][key]).abs().max().item()
        for key in truth["model"]
    )


def save(state: dict, file: Path) -> None:
    """Save under another name, then rename: whoever reads `file` finds the old one or the new one, whole."""
    torch.save(state, partial := file.with_suffix(".partial"))
    os.replace(partial, file)


def outcome(function, *args, **kwargs) -> str:
    """The name of the error that a call ends with, or "works"."""
    try:
        function(*args, **kwargs)
    except (
        pickle.UnpicklingError,
        ImportError,
        RuntimeError,
        EOFError,
        OSError,
    ) as error:
        return type(error).__name__
    return "works"


def file_sizes(file: Path) -> dict[str, int]:
    """Bytes of the files of some things."""
    state, matrix = train(steps=1), torch.zeros(1000, 1000)
    things = {"weights": state["model"], "weights, Adam and step": state}
    things |= {
        "a row of a matrix of 4 MB": matrix[0],
        "that row's clone": matrix[0].clone(),
    }
    return {
        what: torch.save(value, file) or file.stat().st_size
        for what, value in things.items()
    }


def failed_saves(file: Path) -> dict[str, str]:
    """Whether the last checkpoint can still be loaded after the next save has failed."""
    found = {}
    for name, function in (("torch.save", torch.save), ("save()", save)):
        torch.save(train(steps=0), file)
        with suppress(OSError):
            function({"bad": Unpicklable()}, file)
        found[f"the last file, after {name} failed"] = outcome(torch.load, file)
    return found


def wrapped_names() -> dict[str, str]:
    """Whether the weights of a wrapped model load into the model. DDP's names are DataParallel's."""
    state, found = nn.DataParallel(Network()).state_dict(), {}
    found["names with DDP's 'module.'"] = outcome(Network().load_state_dict, state)
    remove_prefix(state, "module.")
    return found | {
        "the same, prefix removed": outcome(Network().load_state_dict, state)
    }


def whole_modules(file: Path) -> dict[str, str]:
    """How the loading of a pickled module ends, and what a file may do."""
    torch.save(Network(), file)
    found = {
        f"a whole module, weights_only={safe}": outcome(
            torch.load, file, weights_only=safe
        )
        for safe in (True, False)
    }
    old = types.ModuleType("old_models")  # a module that was renamed since
    sys.modules["old_models"] = old
    Network.__module__, old.Network, here = old.__name__, Network, Network.__module__
    torch.save(Network(), file)
    Network.__module__ = here
    del sys.modules["old_models"]
    found["the same, its .py file renamed"] = outcome(
        torch.load, file, weights_only=False
    )
    RAN.clear()
    torch.save(Exploit(), file)
    for safe in (True, False):
        with suppress(pickle.UnpicklingError):
            torch.load(file, weights_only=safe)
        found[f"code in the file, weights_only={safe}"] = (
            "runs" if RAN else "does not run"
        )
    return found


def main(argv: list[str] | None = None) -> dict:
    """Print what each part finds; return it."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    with tempfile.TemporaryDirectory() as folder:
        file, parts = Path(folder, "last.ckpt"), ("model", "optimizer", "step")
        differences = {
            ", ".join(kept): resumed(file, *kept)
            for kept in (parts, parts[:2], parts[::2])
        }
        sizes, ends = (
            file_sizes(file),
            whole_modules(file) | failed_saves(file) | wrapped_names(),
        )
    for kept, difference in differences.items():
        much = f"off by {'more' if difference > RATE else 'less'} than {RATE}, the learning rate"
        print(
            f"{'resumed from ' + kept:42}{much if difference else 'equal to the bit'}"
        )
    for what, size in sizes.items():
        print(f"{'file of ' + what:42}{size / 1e3:,.0f} kB")
    for what, ended in ends.items():
        print(f"{what:42}{ended}")
    return {"differences": differences, "sizes": sizes, "ends": ends}


if __name__ == "__main__":
    main()
