"""Chapter 1: how far each fill comes without a network, with one, and with both together.

    uv run python baselines.py                   # both studies
    uv run python baselines.py oi_choices        # by what the constants of optimal interpolation were chosen
    uv run python baselines.py fills             # the table; with OMP_NUM_THREADS=1, its times are of one core
    uv run python baselines.py --save-results    # and write results/fills.json and results/oi_choices.json

It first trains the networks that are not in outputs/baselines, five minutes on two cores; the rest takes ten.
The longest-trained one is chapter 6's final model, which comes with the book: 5,000 steps of 16 samples. Gappy
EOFs are left out, because they did worse than linear interpolation of the anomalies.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from tqdm import tqdm

import optimal_interpolation
import train
from benchmark import run_studies
from oi_baseline import OI, fill, rmse_of, zonal_of

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs/baselines"
FINAL = HERE.parent / "06_whats_next/results/final.ckpt"
UNIT = "m/s"
STEPS = (200, 1500)  # of the networks that are trained here
OI_WEIGHT = 0.7  # in the blend; the rest is the network's
# Share of the patch's own covariance, rows and columns of the taper, noise: the chosen ones, then one changed.
CHOICES = [(0.6, 8, 16, 0.002)]
CHOICES += [(share, 8, 16, 0.002) for share in (0, 0.3, 0.8, 1)] + [(1, 8, 16, 0.01)]
CHOICES += [(0.6, *taper, 0.002) for taper in ((4, 8), (8, 8), (16, 16), (16, 32))]
CHOICES += [(0.6, 8, 16, noise) for noise in (0.0005, 0.01, 0.05)]
FEW = 48  # patches of 1990 that judge a choice
WEIGHTS = (0, 0.5, 0.6, 0.7, 0.8, 0.9, 1)  # of OI in a blend


def trained(steps: int) -> train.UNet:
    """The network after a run of so many steps, which is made unless it is there."""
    folder = OUTPUTS / str(steps)
    if not (folder / "summary.json").exists():
        every = str(min(steps, 250))
        flags = [
            "--max-steps",
            str(steps),
            "--validate-every",
            every,
            "--checkpoint-every",
            every,
        ]
        command = [sys.executable, "train.py", *flags, "--output-dir", folder]
        subprocess.run(command, cwd=HERE, check=True)
    return train.FillGaps.load_from_checkpoint(
        folder / "last.ckpt", map_location="cpu"
    ).model.eval()


def final_model() -> train.UNet:
    """Chapter 6's, whose convolutions see zeros beyond the edge of a patch."""
    saved = torch.load(FINAL, map_location="cpu", weights_only=True)["state_dict"]
    network = train.UNet(len(train.VARIABLES))
    network.load_state_dict(
        {name.removeprefix("model."): value for name, value in saved.items()}
    )
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "zeros"
    return network.eval()


def all_networks() -> dict[str, train.UNet]:
    """By name, the longest-trained one last."""
    networks = {f"U-Net, {number:,} steps": trained(number) for number in STEPS}
    if FINAL.exists():
        networks["U-Net, 5,000 steps of 16"] = final_model()
    return networks


@torch.no_grad()
def network_fill(network: train.UNet, patches: train.Patches, k: int) -> np.ndarray:
    """Sample k's anomalies as the network fills them, normalised, (variables, H, W)."""
    return network(torch.from_numpy(patches[0, k]["input"])[None])[0].numpy()


def stationary_fill(zonal: np.ndarray, patches: train.Patches, k: int) -> np.ndarray:
    """As OI with one covariance for the whole globe: the zonal covariance, averaged over the rows."""
    sample = patches[0, k]
    seen = sample["input"][-1] > 0
    filled = np.zeros_like(sample["target"])
    distances = range(1 - patches.size, patches.size)  # in rows
    for variable, table in enumerate(zonal):
        kernel = np.stack(
            [table.diagonal(rows).sum(axis=-1) / len(table) for rows in distances]
        )
        covariance = sliding_window_view(kernel, seen.shape)[::-1, ::-1][seen].reshape(
            -1, seen.size
        )
        values = sample["target"][variable, seen]
        filled[variable, ~seen] = optimal_interpolation.interpolate(
            covariance, seen, values, 0.01
        )
    return filled


def compare(
    training: train.Patches, patches: train.Patches, networks: dict[str, train.UNet]
) -> list[dict]:
    """The RMSE of each fill of these patches, and the seconds of CPU time that a patch takes."""
    zonal = zonal_of(training)
    simple = train.baselines(patches)
    rows = [
        {"fill": name, "rmse": simple[name][UNIT]}
        for name in ("linear interpolation", train.RIVAL)
    ]
    ways: dict[str, Callable] = {
        "OI, one covariance": lambda k: stationary_fill(zonal, patches, k),
        "OI, zonal": lambda k: fill(training, zonal, patches, k, local_share=0),
        "OI, tapered": lambda k: fill(training, zonal, patches, k, 0.01, local_share=1),
        OI: lambda k: fill(training, zonal, patches, k),
    }
    for name, network in networks.items():
        ways[name] = lambda k, network=network: network_fill(network, patches, k)
    for name, way in ways.items():
        began = process_time()
        filled = [way(k) for k in tqdm(range(patches.batch_size), name)]
        seconds = (process_time() - began) / patches.batch_size
        rows.append(
            {"fill": name, "rmse": rmse_of(filled, patches)[UNIT], "seconds": seconds}
        )
        if name == OI:
            by_oi = filled
    both = [
        OI_WEIGHT * one + (1 - OI_WEIGHT) * other for one, other in zip(by_oi, filled)
    ]
    rows.append(
        {"fill": "both", "rmse": rmse_of(both, patches)[UNIT], "oi_weight": OI_WEIGHT}
    )
    return [*rows, agreement(by_oi, filled, patches)]


def agreement(
    by_oi: list[np.ndarray], by_network: list[np.ndarray], patches: train.Patches
) -> dict:
    """In how many patches OI is ahead of the last network, and how their errors correlate."""
    ahead, products = 0, np.zeros((2, 2))
    for k in range(patches.batch_size):
        sample = patches[0, k]
        errors = [
            patches.std * (one[k] - sample["target"]) for one in (by_oi, by_network)
        ]
        weighted = np.sqrt(sample["weight"]) * np.stack(errors)
        of_patch = np.einsum("avij,bvij->ab", weighted, weighted)
        ahead += int(of_patch[0, 0] < of_patch[1, 1])
        products += of_patch
    correlation = products[0, 1] / np.sqrt(products[0, 0] * products[1, 1])
    return {
        "fill": "OI and network",
        "oi_ahead": ahead,
        "error_correlation": float(correlation),
    }


def fills() -> list[dict]:
    """Every fill, on 1990, by which choices are made, and on the test years, by which none is."""
    training, *judging = train.make_patches(train.parse_arguments([]))
    networks = all_networks()
    on_1990, on_test = (compare(training, patches, networks) for patches in judging)
    for before, row in zip(on_1990, on_test):
        if "rmse" in row:
            row["validation_rmse"] = before["rmse"]
    return on_test


def oi_choices() -> list[dict]:
    """The RMSE on patches of 1990 of OI with other constants, and of blends with the longest-trained network."""
    training, patches, _ = train.make_patches(train.parse_arguments([]))
    patches.batch_size = (
        FEW  # the first ones: step 0 has them in this order, however many it has
    )
    zonal, rows, filled = zonal_of(training), [], {}
    for choice in tqdm(CHOICES, "choices"):
        share, height, width, noise = choice
        optimal_interpolation.TAPER_ROWS, optimal_interpolation.TAPER_COLUMNS = (
            height,
            width,
        )
        filled[choice] = [
            fill(training, zonal, patches, k, noise, local_share=share)
            for k in range(FEW)
        ]
        row = {
            "local_share": share,
            "taper_rows": height,
            "taper_columns": width,
            "noise": noise,
        }
        rows.append(row | {"validation_rmse": rmse_of(filled[choice], patches)[UNIT]})
    *_, longest = all_networks().values()
    by_network = [network_fill(longest, patches, k) for k in range(FEW)]
    for weight in WEIGHTS:
        both = [
            weight * one + (1 - weight) * other
            for one, other in zip(filled[CHOICES[0]], by_network)
        ]
        rows.append(
            {"oi_weight": weight, "validation_rmse": rmse_of(both, patches)[UNIT]}
        )
    return rows


STUDIES = {study.__name__: study for study in (fills, oi_choices)}


def main(argv: list[str] | None = None) -> None:
    """Run the studies that were asked for; print their rows, and save them if asked to."""
    run_studies(STUDIES, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    main()
