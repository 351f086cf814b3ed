"""The task: what the run asks of data, model and score. Each function here is yours to replace.

train.py, survival/ and tracking/ know nothing else of the task. survival/requirements.py says
what they ask of it, and refuses what it can see. It cannot see whether

- the order of the data depends on the step alone, and on nothing drawn on the way;
- the model draws, as dropout does, in forward or training_step, from torch's generators.
"""

from collections.abc import Callable
from dataclasses import asdict

from block_order import Window
from lightning.pytorch import Callback, LightningModule, Trainer

from errors import DataError
from location import Location
from model import Classifier
from options import Options
from shapes import CLASSES, ShapesModule

LOSS = "loss"  # what training logs, and what must be finite and no spike
HIGHER_IS_BETTER = True  # of score()

Data = tuple[str, ...]  # what make_data returns: here, the names of the classes


def make_data(options: Options, location: Location) -> tuple[Options, Data]:
    """Open what is read, at location.url, once a process; the next functions get it.

    The options are returned, too, for those that depend on the data.
    """
    if location.url:
        raise DataError(f"--store {location.url}: not read; open it in make_data")
    return options, CLASSES


def describe_data(data: Data) -> dict[str, str]:
    """Checksums for the record: a run goes on only with data of the same "values"."""
    return {"values": f"drawn: {', '.join(data)}"}


def make_datamodule(
    options: Options, data: Data, first_step: int = 0, skipped: tuple[Window, ...] = ()
) -> ShapesModule:
    """The loaders of a run that begins at a step, and leaves batches out."""
    return ShapesModule(
        data, options=asdict(options), first_step=first_step, skipped=skipped
    )


def make_model(options: Options, data: Data | None = None) -> Classifier:
    """The network, with its loss, its learning rate and its example_input_array."""
    model = Classifier(options.learning_rate, options.dropout, options.seed)
    if options.compile:
        model.network.compile()  # not the LightningModule: self.log would break the graph
    return model


def score(metrics: dict[str, float]) -> float:
    """How good a validation is, from what it logged: it decides which checkpoint is the best."""
    return metrics["accuracy"]


def closer_look(
    options: Options, data: Data
) -> Callable[[Trainer, LightningModule], dict[str, float]] | None:
    """What measures a model anew that may be the best, where the validation looks at little."""
    return None


def make_callbacks() -> list[Callback]:
    """What else follows the run."""
    return []


def report(metrics: dict, options: Options, trainer: Trainer) -> None:
    """Print the summary, and add to `metrics` what is to be kept; on rank 0."""
    accuracy = metrics["tested"]["test accuracy"]
    print(
        f"\n{accuracy:.1%} of the test's images, where guessing has {1 / len(CLASSES):.1%}"
    )
    if "samples_per_second" in metrics:
        rate = f"{metrics['samples_per_second']:.1f} samples/s"
        print(f"{rate}, {metrics['data_wait_share']:.1%} of the time waiting for data")
    print(f"{metrics['steps']} steps in {metrics['seconds']:.0f} s")
