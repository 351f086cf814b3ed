"""What tune.py searches: options of train.py, each by a method of optuna.Trial."""

from collections.abc import Callable

from optuna import Trial

SPACE: dict[str, Callable[[Trial], float | int | str]] = {
    "learning_rate": lambda t: t.suggest_float("learning_rate", 3e-4, 1e-1, log=True),
    "batch_size": lambda t: t.suggest_categorical("batch_size", [4, 8, 16, 32]),
    "shuffle_slots": lambda t: 4 * t.params["batch_size"],  # not searched: it follows
    "padding": lambda t: t.suggest_categorical("padding", ["zeros", "replicate"]),
}
