"""Appendix, lab 2: mixed precision. What 16 bits lose, and what autocast keeps in 32.

    uv run python lab_precision.py

You should see that autocast leaves the weights in float32 and halves most of what is kept
for the backward pass, that weights in bfloat16 do not feel small updates, and that float16
loses small gradients unless the loss is scaled. How fast each is depends on the machine:
chapter 5 measures that.
"""

import argparse
from collections import Counter

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional

TYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = 1_000
UPDATE = 1e-3  # of a weight of 1, as large as a learning rate of 1e-3 makes it


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 32, 3, padding=1)
    last = nn.Conv2d(32, 2, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, 32), nn.SiLU(), last)


def numbers() -> list[dict]:
    """What each type can hold, and what it makes of three numbers."""
    rows = []
    for dtype in TYPES:
        one = torch.ones((), dtype=dtype)
        large = torch.tensor(7e4, dtype=dtype)
        small = torch.tensor(1e-8, dtype=dtype)
        row = {
            "type": name(dtype),
            "bytes": dtype.itemsize,
            "largest": torch.finfo(dtype).max,
            "1 + 2**-9": (one + 2**-9).item(),
            "70,000": large.item(),
            "1e-8": small.item(),
        }
        rows.append(row)
    return rows


class Kept:
    """The tensors that a forward pass keeps for the backward pass, but for the weights.

    Autocast's copies of weights count. A tensor that two operators keep counts once.
    """

    def __init__(self, model: nn.Module):
        self.weights = {weight.data_ptr() for weight in model.parameters()}
        self.tensors: dict[int, Tensor] = {}  # held, so that no address comes twice

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self.weights:
            self.tensors[tensor.data_ptr()] = tensor
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor

    def bytes(self) -> dict[str, int]:
        """By type."""
        size: Counter[str] = Counter()
        for tensor in self.tensors.values():
            size[name(tensor.dtype)] += tensor.nbytes
        return dict(size)


def forward_backward(autocast: bool) -> dict:
    """One pass: the type that each operator gives, the bytes kept, and the gradients."""
    model = network()
    types: dict[str, str] = {}

    def note(layer: nn.Module, inputs: tuple, result: Tensor) -> None:
        types[type(layer).__name__] = name(result.dtype)

    for layer in model:
        layer.register_forward_hook(note)
    kept = Kept(model)
    inputs = torch.randn(8, 3, 32, 32)
    target = torch.randn(8, 2, 32, 32)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = functional.mse_loss(model(inputs), target)
    size = kept.bytes()
    loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters()]
    types["mse_loss"] = name(loss.dtype)
    types["weight"] = name(model[0].weight.dtype)
    types["gradient"] = name(gradients[0].dtype)
    return {"types": types, "bytes": size, "gradients": torch.cat(gradients)}


def updates(weights: torch.dtype) -> float:
    """A weight of 1, in this type, after 1,000 updates of 0.001."""
    weight = torch.ones((), dtype=weights)
    for _ in range(STEPS):
        weight += UPDATE
    return weight.item()


def small_gradient(scaler: GradScaler, factor: float) -> dict:
    """One step of SGD from weight 0, where the loss is factor * weight in float16."""
    weight = nn.Parameter(torch.zeros(()))  # float32, as under autocast
    optimizer = torch.optim.SGD([weight], lr=1.0)
    low = weight.half()  # the gradient passes through here in float16
    scaler.scale(low.float() * factor).backward()
    scaler.unscale_(optimizer)
    gradient = weight.grad.item()
    scaler.step(optimizer)  # not if a gradient is inf or NaN
    scaler.update()
    return {"gradient": gradient, "weight": weight.item(), "scale": scaler.get_scale()}


def print_numbers(rows: list[dict]) -> None:
    print("type      bytes     largest   1 + 2**-9   70,000     1e-8")
    for row in rows:
        held = f"{row['1 + 2**-9']:10.6g}{row['70,000']:9.6g}{row['1e-8']:9.1g}"
        print(f"{row['type']:10}{row['bytes']:5}{row['largest']:12.6g}  {held}")


def compare_autocast() -> dict:
    """Print what autocast keeps and gives, beside float32."""
    plain = forward_backward(autocast=False)
    mixed = forward_backward(autocast=True)
    kept = {"float32": plain["bytes"], "autocast": mixed["bytes"]}
    for which, sizes in kept.items():
        parts = [f"{size:,} bytes of {dtype}" for dtype, size in sizes.items()]
        print(f"{which:8}  kept:", ", ".join(parts))
    difference = mixed["gradients"] - plain["gradients"]
    relative = (difference.norm() / plain["gradients"].norm()).item()
    bound = "less than 1%" if relative < 0.01 else f"{relative:.0%}"
    types = [f"{which} {dtype}" for which, dtype in mixed["types"].items()]
    print(f"autocast  gives: {', '.join(types[:4])}")
    print(f"{'':16} {', '.join(types[4:])}, {bound} from float32's")
    return {"types": mixed["types"], "bytes": kept, "gradient_error": relative}


def compare_updates() -> dict[str, float]:
    """Print what becomes of a weight in float32 and in bfloat16."""
    grown = {name(dtype): updates(dtype) for dtype in TYPES[:2]}
    held = " and ".join(f"{value:.3f} in {dtype}" for dtype, value in grown.items())
    print(f"a weight of 1 after {STEPS:,} updates of {UPDATE}: {held}")
    return grown


def compare_scalers() -> dict[str, dict]:
    """Print what becomes of gradients in float16 with a scaled loss and without."""
    cases = {
        "1e-8, not scaled": (1e-8, GradScaler("cpu", enabled=False)),
        "1e-8, scaled by 65,536": (1e-8, GradScaler("cpu")),
        "100, scaled by 65,536": (100.0, GradScaler("cpu")),
    }
    found = {}
    for label, (factor, scaler) in cases.items():
        row = small_gradient(scaler, factor)
        step = f"weight 0 ->{row['weight']:7.2g}   next scale {row['scale']:,.0f}"
        print(f"float16 gradient {label:23} {row['gradient']:6.2g}   {step}")
        found[label] = row
    return found


def main(argv: list[str] | None = None) -> dict:
    """Print the four parts; return the figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    rows = numbers()
    print_numbers(rows)
    figures = {"numbers": rows} | compare_autocast()
    figures["weights"] = compare_updates()
    figures["scaled"] = compare_scalers()
    return figures


if __name__ == "__main__":
    main()
