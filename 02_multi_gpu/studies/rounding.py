"""How large the rounding of a gradient is, whole and in two halves."""

from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

from data import PatchDataset
from model import Batch, UNet, masked_sums
from options import Options
from studies.settings import Settings
from task import make_data


class Arithmetic(NamedTuple):
    """How a gradient is computed."""

    dtype: torch.dtype
    has_onednn: bool  # the fast convolutions of a CPU


EXACT = Arithmetic(torch.float64, False)
KINDS = {
    "oneDNN": Arithmetic(torch.float32, True),
    "plain": Arithmetic(torch.float32, False),
    "double": EXACT,
}


def rounding(settings: Settings) -> list[dict]:
    """A row for each kind of arithmetic: the error of gradients against double precision.

    It is the largest difference over the largest component, as in wrong_ways.py. Two
    processes compute two halves, so they may be so far from one without any mistake. The
    median is that of several batches. In some, two cells that a maximum is taken of are
    equal but for rounding; the largest error is then a thousand times the median.
    """
    options, data = make_data(Options(**settings.training))
    maker = data.maker(data.training, options.patch_size)
    patches = PatchDataset(maker, data.reader, options.batch_size, options.seed)
    errors: dict[tuple[str, int], list[float]] = {}
    for step in tqdm(range(settings.repeats), "rounding", disable=None):
        arrays = patches.read_batch([(step, k) for k in range(options.batch_size)])
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        truth = compute_gradient(batch, 1, EXACT)
        largest = truth.abs().max()
        for name, parts in product(KINDS, (1, 2)):
            gradient = compute_gradient(batch, parts, KINDS[name])
            difference = (gradient - truth).abs().max()
            error = (difference / largest).item()
            errors.setdefault((name, parts), []).append(error)
    rows = []
    for (name, parts), of_kind in errors.items():
        row = {"convolutions": name, "parts": parts}
        row["error"] = median(of_kind)
        row["largest_error"] = max(of_kind)
        rows.append(row)
    return rows


def compute_gradient(batch: Batch, parts: int, arithmetic: Arithmetic) -> torch.Tensor:
    """The gradient of the batch's loss, (parameters,), added up over parts of the batch."""
    torch.manual_seed(0)
    variables = batch["target"].shape[1]
    network = UNet(variables).to(arithmetic.dtype)
    whole = {name: value.to(arithmetic.dtype) for name, value in batch.items()}
    unseen = whole["unseen"].sum()
    size = len(whole["unseen"]) // parts
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = arithmetic.has_onednn
    for number in range(parts):
        own = slice(number * size, (number + 1) * size)
        part = {name: value[own] for name, value in whole.items()}
        squares, _ = masked_sums(network(part["input"]), part)
        loss = squares / unseen
        loss.backward()
    torch.backends.mkldnn.enabled = before
    gradients = [parameter.grad.flatten() for parameter in network.parameters()]
    return torch.cat(gradients).double()
