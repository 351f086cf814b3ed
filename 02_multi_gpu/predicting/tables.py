"""What the program prints."""

from predicting.extrapolation import IDEAL
from predicting.memory import FSDP_DEVICES, USABLE, Training
from predicting.models import Model, Step, describe
from predicting.network import NETWORKS

STRATEGIES = ("DDP", *(f"FSDP on {devices}" for devices in FSDP_DEVICES))
COLUMNS = (8, 64, 1024)  # GPUs
POINT_HEADS = """
Mean, ms          slowest of N         step                       step, planned
         devices  measured predicted   measured predicted error   from one device error"""


def print_calibration(calibration: dict, points: list[dict]) -> None:
    """The link that was fitted, and each measured point beside its predictions."""
    latency = f"latency {1e6 * calibration['latency']:.0f} µs"
    bandwidth = f"bandwidth {calibration['bandwidth'] / 1e9:.2f} GB/s"
    error = f"{100 * calibration['fit_error']:.0f}%"
    print(f"Fitted to allreduce.json: {latency}, {bandwidth}, within {error}")
    print(POINT_HEADS)
    for point in points:
        print_point(point)
    own = f"{calibration['largest_error_percent']:.0f}%"
    from_one = f"{calibration['from_one_largest_error_percent']:.0f}%"
    where = "largest error on several devices, a core each"
    print(f"{where}: {own}; from one device {from_one}")


def print_point(point: dict) -> None:
    """One measured point; times in ms."""
    times = {}
    for name, value in point.items():
        if name.endswith("_seconds"):
            times[name.removesuffix("_seconds")] = 1e3 * value
    line = f"  {point['mode']:6} {point['devices']:7}"
    line += f"  {times['measured_slowest']:8.1f} {times['slowest']:9.1f}"
    line += f"   {times['measured']:8.1f} {times['predicted']:9.1f}"
    line += f" {point['error_percent']:+4.0f}%"
    line += f"   {times['from_one_predicted']:15.1f}"
    line += f" {point['from_one_error_percent']:+4.0f}%"
    if not point["own_cores"]:
        line += "  (processes share cores: not covered)"
    print(line)


def print_efficiency(
    rows: list[dict],
    models: list[Model],
    step: Step,
    gpus_per_node: int,
    link_share: float,
) -> None:
    """Efficiency of each model on each network, by GPUs."""
    what = f"Predicted weak-scaling efficiency of DDP, {gpus_per_node} GPUs a node"
    print(f"\n{what}. Your step is {describe(step)};")
    print(f"stragglers are those of {step.machine}.")
    note = "The networks are VENDORS' FIGURES, not measured"
    print(f"{note}, at {link_share:.0%} of the line rate.")
    heads = "".join(f"{devices:>6}" for devices in COLUMNS)
    print(f"  {'parameters':13} {'ms':>5}  {'GPUs':35}{heads}")
    efficiency = {}
    for row in rows:
        place = (row["model"], row["network"], row["devices"])
        efficiency[place] = row["efficiency"]
    for model in models:
        start = f"  {model.name:13} {1e3 * model.step_seconds:5.0f}"
        for network in (IDEAL, *(link.name for link in NETWORKS)):
            cells = ""
            for devices in COLUMNS:
                cells += f"{efficiency[model.name, network, devices]:6.0%}"
            print(f"{start}  {network:35}{cells}")


def print_too_large(memory: list[dict], with_ddp: list[Model]) -> None:
    """The models that DDP cannot hold."""
    *rows, largest = memory
    names = [model.name for model in with_ddp]
    for row in rows:
        if row["model"] not in names:
            needed = f"{row['DDP']['sum']:.0f} of {largest['available_gb']:.3g} GB"
            problem = f"DDP would need {needed}: no prediction"
            print(f"  {row['model']:13}        {problem}")


def print_memory(memory: list[dict], devices: int, training: Training) -> None:
    """GB on each GPU for each model and strategy, and the largest model that fits."""
    *rows, largest = memory
    kept = f"{training.precision}, activations {training.activation_gb:g} GB"
    usable = f"{USABLE:.0%} of {training.gpu_gb:g} GB usable"
    print(f"\nGB on each GPU, {kept}, {usable}")
    heads = "".join(f"{strategy:>12}" for strategy in STRATEGIES)
    print(f"  {'parameters':13}{heads}   on {devices} GPUs take")
    for row in rows:
        cells = "".join(f"{row[strategy]['sum']:12.1f}" for strategy in STRATEGIES)
        print(f"  {row['model']:13}{cells}   {row['advice']}")
    cells = "".join(f"{largest[strategy] / 1e9:10.1f} B" for strategy in STRATEGIES)
    print(f"  {'at most':13}{cells}")
