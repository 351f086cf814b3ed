"""Chapter 1: how far each fill comes without a network, with one, and with both together.

    uv run python baselines.py fills          # the table, ten minutes
    uv run python baselines.py oi_choices     # what decided optimal interpolation's constants
    uv run python baselines.py --save-results     # both, and write results/

With OMP_NUM_THREADS=1, times are those of one core. It first trains the networks that are
not in outputs/baselines, which takes five minutes. The longest-trained network is chapter
6's final model, which comes with the book: 5,000 steps of 16 samples. Gappy EOFs are left
out, because they did worse than linear interpolation of the anomalies.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from tqdm import tqdm

import evaluation
import optimal_interpolation
from benchmark import COMMON_FLAGS, UNIT, run_studies
from data import Data, PatchDataset
from interpolator import Interpolator, make_interpolator
from model import FillGaps, UNet
from oi_baseline import OI, rmse_of
from optimal_interpolation import hybrid_covariance, interpolate
from options import PATCH_SIZE, VARIABLES, parse_options
from task import make_data

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs/baselines"
FINAL = HERE.parent / "06_whats_next/results/final.ckpt"
STEPS = (200, 1500)  # of the networks that are trained here
OI_WEIGHT = 0.7  # in the mix; the rest is the network's
# Share of the patch's own covariance, taper in rows and columns, noise: the chosen ones
# first, then with one changed.
CHOSEN = (0.6, 8, 16, 0.002)
CHOICES = [CHOSEN]
CHOICES += [(share, 8, 16, 0.002) for share in (0, 0.3, 0.8, 1)]
CHOICES += [(1, 8, 16, 0.01)]
CHOICES += [(0.6, rows, 8, 0.002) for rows in (4, 8)]
CHOICES += [(0.6, 16, columns, 0.002) for columns in (16, 32)]
CHOICES += [(0.6, 8, 16, noise) for noise in (0.0005, 0.01, 0.05)]
EVAL_SAMPLES = 96
FEW = 48  # patches of 1990 that judge a choice
VERY_FEW = 2  # with --quick
WEIGHTS = (0, 0.5, 0.6, 0.7, 0.8, 0.9, 1)  # of OI in a mix
Fill = Callable[[int], np.ndarray]  # of sample k, over the spread, (variables, H, W)


def fills(repeats: int) -> list[dict]:
    """The RMSE of every fill, on 1990 and on the test years. Only 1990 decides choices."""
    data = load_data()
    networks = all_networks()
    rows = compare(data, "test", networks)
    for row, before in zip(rows, compare(data, "validation", networks)):
        if "rmse" in row:
            row["validation_rmse"] = before["rmse"]
    return rows


def oi_choices(repeats: int) -> list[dict]:
    """The RMSE on patches of 1990 of OI with other constants, and of mixes with a network."""
    data = load_data()
    judged = Judged(data, "validation", FEW)
    rows = []
    filled = {}
    for choice in tqdm(CHOICES, "choices"):
        share, height, width, noise = choice
        optimal_interpolation.TAPER_ROWS = height
        optimal_interpolation.TAPER_COLUMNS = width
        fill = partial(judged.by_oi, local_share=share, noise=noise)
        filled[choice] = [fill(k) for k in judged.numbers]
        row = {"local_share": share, "taper_rows": height, "taper_columns": width}
        row["noise"] = noise
        row["validation_rmse"] = judged.rmse(filled[choice])
        rows.append(row)
    *_, longest = all_networks().values()
    by_network = [judged.by_network(k, longest) for k in judged.numbers]
    for weight in WEIGHTS:
        mixed = mix(weight, filled[CHOSEN], by_network)
        rmse = judged.rmse(mixed)
        rows.append({"oi_weight": weight, "validation_rmse": rmse})
    return rows


STUDIES = {study.__name__: study for study in (fills, oi_choices)}


class Judged:
    """Patches of a period that judge fills, and ways to fill them."""

    def __init__(self, data: Data, period: str, number: int):
        self.data = data
        self.patches: PatchDataset = data.eval_patches(
            getattr(data, period), PATCH_SIZE, EVAL_SAMPLES
        )
        number = min(number, VERY_FEW) if COMMON_FLAGS else number
        self.numbers = range(number)
        self.samples = self.patches.__getitems__([(0, k) for k in self.numbers])
        parts = (data.reader, data.training, data.climatology, PATCH_SIZE)
        self.interpolator: Interpolator = make_interpolator(*parts)

    def rmse(self, filled: list[np.ndarray]) -> float:
        """The RMSE of a fill of each sample, m/s."""
        return rmse_of(filled, self.samples, self.data)[UNIT]

    def by_oi(self, k: int, local_share: float, noise: float) -> np.ndarray:
        """Optimal interpolation with these constants."""
        patch = self.patches.patch(0, k)
        anomalies = self.interpolator.cut(patch.row, patch.column)
        zonal = self.interpolator.zonal(patch.row)
        seen, target = self.seen_and_target(k)
        filled = np.zeros_like(target)
        for number, values in enumerate(target):
            parts = (anomalies[:, number], zonal[number], seen)
            covariance = hybrid_covariance(*parts, local_share=local_share)
            filled[number, ~seen] = interpolate(covariance, seen, values[seen], noise)
        return filled

    def by_one_covariance(self, k: int) -> np.ndarray:
        """OI with one covariance for the globe: the zonal one, averaged over the rows."""
        seen, target = self.seen_and_target(k)
        filled = np.zeros_like(target)
        distances = range(1 - PATCH_SIZE, PATCH_SIZE)  # in rows
        for number, table in enumerate(self.whole_zonal()):
            kernel = [table.diagonal(rows).sum(axis=-1) for rows in distances]
            kernel = np.stack(kernel) / len(table)
            windows = sliding_window_view(kernel, seen.shape)[::-1, ::-1]
            covariance = windows[seen].reshape(-1, seen.size)
            known = target[number, seen]
            filled[number, ~seen] = interpolate(covariance, seen, known, 0.01)
        return filled

    def whole_zonal(self) -> np.ndarray:
        """The zonal covariance of all rows, made once."""
        if not hasattr(self, "all_rows"):
            parts = (self.interpolator.anomalies, self.interpolator.wraps, PATCH_SIZE)
            self.all_rows = optimal_interpolation.zonal_covariance(*parts)
        return self.all_rows

    def by_network(self, k: int, network: nn.Module) -> np.ndarray:
        """A network's answer."""
        return evaluation.predict(network, self.samples[k]["input"])

    def seen_and_target(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Where sample k is seen, (H, W), and its anomalies, (variables, H, W)."""
        sample = self.samples[k]
        return sample["input"][-1] > 0, sample["target"]


def compare(data: Data, period: str, networks: dict[str, nn.Module]) -> list[dict]:
    """The RMSE of each fill of a period's patches, and the CPU seconds that a patch takes."""
    judged = Judged(data, period, EVAL_SAMPLES)
    simple = evaluation.baselines(data, judged.patches, OUTPUTS)
    rows = []
    for name in ("linear interpolation", "interpolated anomalies"):
        rows.append({"fill": name, "rmse": simple[name][UNIT]})
    share, *_, noise = CHOSEN
    ways: dict[str, Fill] = {
        "OI, one covariance": judged.by_one_covariance,
        "OI, zonal": partial(judged.by_oi, local_share=0, noise=noise),
        "OI, tapered": partial(judged.by_oi, local_share=1, noise=0.01),
        OI: partial(judged.by_oi, local_share=share, noise=noise),
    }
    for name, network in networks.items():
        ways[name] = partial(judged.by_network, network=network)
    filled = {}
    for name, way in ways.items():
        began = process_time()
        filled[name] = [way(k) for k in tqdm(judged.numbers, name)]
        seconds = (process_time() - began) / len(judged.numbers)
        rmse = judged.rmse(filled[name])
        rows.append({"fill": name, "rmse": rmse, "seconds": seconds})
    longest = filled[name]
    mixed = mix(OI_WEIGHT, filled[OI], longest)
    rmse = judged.rmse(mixed)
    rows.append({"fill": "both", "rmse": rmse, "oi_weight": OI_WEIGHT})
    return [*rows, agreement(filled[OI], longest, judged)]


def mix(
    weight: float, ones: list[np.ndarray], others: list[np.ndarray]
) -> list[np.ndarray]:
    """Weighted sums of two fills; the weight is the first one's."""
    return [weight * one + (1 - weight) * other for one, other in zip(ones, others)]


def agreement(
    by_oi: list[np.ndarray], by_network: list[np.ndarray], judged: Judged
) -> dict:
    """In how many patches OI is ahead of the network, and how their errors correlate."""
    ahead = 0
    products = np.zeros((2, 2))
    std = judged.data.climatology.std[:, None, None]
    for sample, *both in zip(judged.samples, by_oi, by_network):
        errors = [std * (one - sample["target"]) for one in both]
        errors = np.stack(errors)
        weighted = np.sqrt(sample["weight"]) * errors
        of_patch = np.einsum("avij,bvij->ab", weighted, weighted)
        ahead += int(of_patch[0, 0] < of_patch[1, 1])
        products += of_patch
    correlation = products[0, 1] / np.sqrt(products[0, 0] * products[1, 1])
    return {
        "fill": "OI and network",
        "oi_ahead": ahead,
        "error_correlation": float(correlation),
    }


def load_data() -> Data:
    """The winds that come with the book."""
    _, data = make_data(parse_options("", []))
    return data


def all_networks() -> dict[str, nn.Module]:
    """The networks by name, the longest-trained one last."""
    networks = {f"U-Net, {number:,} steps": trained(number) for number in STEPS}
    if FINAL.exists():
        networks["U-Net, 5,000 steps of 16"] = final_model()
    return networks


def trained(steps: int) -> nn.Module:
    """The network after a run of so many steps, which is made unless it is there."""
    folder = OUTPUTS / ("quick" if COMMON_FLAGS else str(steps))
    if not (folder / "summary.json").exists():
        every = str(min(steps, 250))
        flags = ["--max-steps", str(steps), "--output-dir", str(folder)]
        flags += ["--validate-every", every, "--checkpoint-every", every, *COMMON_FLAGS]
        subprocess.run([sys.executable, "train.py", *flags], cwd=HERE, check=True)
    model = FillGaps.load_from_checkpoint(folder / "last.ckpt", map_location="cpu")
    return model.model.eval()


def final_model() -> nn.Module:
    """Chapter 6's final network, whose convolutions see zeros beyond the edge of a patch."""
    saved = torch.load(FINAL, map_location="cpu", weights_only=True)
    network = UNet(len(VARIABLES))
    weights = {}
    for name, value in saved["state_dict"].items():
        weights[name.removeprefix("model.")] = value
    network.load_state_dict(weights)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "zeros"
    return network.eval()


def main(argv: list[str] | None = None) -> None:
    """Run this script's studies."""
    run_studies(STUDIES, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    main()
