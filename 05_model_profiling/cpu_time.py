"""Chapter 5: what costs processor time in a step of train.py, beside the step itself?

    uv run python cpu_time.py                   # a minute
    uv run python cpu_time.py --save-results    # and write results/cpu_time.json

You should see milliseconds of a core for each step of 8: of the step alone, and in a
training of the thread that trains, of the loader's threads, and of the store's server.

torch has one thread here, so that the loader's can be told from its own. Processor time
grows little when others use the machine, which time by the clock does.
"""

import argparse
from dataclasses import replace
from statistics import median
from time import process_time, thread_time

import psutil
import torch
from lightning.pytorch import Callback

from command_line import call_with_store
from ending import run
from fixes import best_fixes
from location import Location
from options import Options
from precision import has_bf16
from profiler import HERE
from results import save_rows, spread
from step import Step, make_batch
from task import make_data, make_datamodule, make_model
from train import make_trainer

STEPS = 60
SKIPPED = 20  # while the first blocks are read
ROUNDS = 3
THREAD = "the thread that trains"
LOADER = "the loader's threads"
SERVER = "the store's server"


class ProcessorTime(Callback):
    """Seconds of the thread that trains, of all threads, and of child processes."""

    def __init__(self):
        self.seconds = []

    def on_train_batch_end(self, *_: object) -> None:
        children = 0.0
        for child in psutil.Process().children(recursive=True):
            times = child.cpu_times()
            children += times.user + times.system
        self.seconds.append((thread_time(), process_time(), children))

    def per_step(self) -> dict[str, float]:
        """Milliseconds a step, without the first steps."""
        kept = self.seconds[SKIPPED:]
        spent = []
        for first, last in zip(kept[0], kept[-1]):
            spent.append(1e3 * (last - first) / (len(kept) - 1))
        thread, process, children = spent
        return {THREAD: thread, LOADER: process - thread, SERVER: children}


def measure_alone(options: Options) -> float:
    """Milliseconds of the step by hand, with all fixes."""
    device = torch.device("cpu")
    batch = make_batch(options.batch_size, options.patch_size)
    step = Step(best_fixes(device), batch, device)
    for _ in range(SKIPPED):
        step()
    began = thread_time()
    for _ in range(STEPS - SKIPPED):
        step()
    return 1e3 * (thread_time() - began) / (STEPS - SKIPPED)


def measure(options: Options, location: Location) -> dict[str, list[float]]:
    """Milliseconds a step of each part, for each round; step and training in turn."""
    torch.set_num_threads(1)
    options = replace(options, max_steps=STEPS, validate_every=STEPS + 1)
    options, data = make_data(options, location)
    found: dict[str, list[float]] = {"the step alone": []}
    for _ in range(ROUNDS):
        found["the step alone"].append(measure_alone(options))
        clock = ProcessorTime()
        trainer = make_trainer(options, [clock], "", profiler=None)
        datamodule = make_datamodule(options, data, first_step=0)
        trainer.fit(make_model(options, data), datamodule=datamodule)
        for part, milliseconds in clock.per_step().items():
            found.setdefault(part, []).append(milliseconds)
    return found


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure, print and, if asked to, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-results", action="store_true", help="write results/")
    args = parser.parse_args(argv)
    precision = "bf16-mixed" if has_bf16(on_gpu=False) else "32-true"
    flags = ["--accelerator", "cpu", "--precision", precision]
    flags += ["--output-dir", str(HERE / "outputs/cpu_time")]
    found = call_with_store(measure, __doc__.splitlines()[0], flags)
    rows = []
    for part, milliseconds in found.items():
        rows.append({"part": part, "milliseconds": spread(milliseconds)})
        print(f"{part}: {median(milliseconds):.0f} ms of a core for each step")
    if args.save_results:
        save_rows("cpu_time", "uv run python cpu_time.py", rows)
    return rows


if __name__ == "__main__":
    run(main)
