"""Appendix, lab 2: mixed precision. What bfloat16 and float16 lose, and what autocast keeps in float32.

    uv run python lab_precision.py

You should see that autocast leaves the weights in float32 and halves most of what is kept for the backward pass; that
weights in bfloat16 do not feel small updates; and that float16 loses small gradients unless the loss is scaled.
How fast it is depends on the machine: chapter 5 measures that.
"""

import argparse
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional

TYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS, UPDATE = 1_000, 1e-3  # of a weight of 1, as large as a learning rate of 1e-3 makes them


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def network() -> nn.Module:
    torch.manual_seed(0)
    convolution, last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 2, 3, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(4, 32), nn.SiLU(), last)


def numbers() -> list[dict]:
    """What each type can hold, and what it makes of three numbers."""
    rows = []
    for dtype in TYPES:
        limits, one = torch.finfo(dtype), torch.ones((), dtype=dtype)
        row = {"type": name(dtype), "bytes": dtype.itemsize, "largest": limits.max}
        row |= {"1 + 2**-9": (one + 2**-9).item(), "70,000": torch.tensor(7e4, dtype=dtype).item()}
        rows.append(row | {"1e-8": torch.tensor(1e-8, dtype=dtype).item()})
    return rows


def forward(autocast: bool) -> dict:
    """One forward pass: the type each operator gives, and the bytes kept for the backward pass, by type.

    Weights are not counted, but autocast's copies of them are. A tensor that two operators keep is counted once.
    """
    model, kept, types = network(), {}, {}
    weights = {weight.data_ptr() for weight in model.parameters()}
    for layer in model:
        layer.register_forward_hook(
            lambda layer, _, result: types.update({type(layer).__name__: name(result.dtype)})
        )

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor  # held, so that no other tensor gets its address
        return tensor

    inputs, target = torch.randn(8, 3, 32, 32), torch.randn(8, 2, 32, 32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = functional.mse_loss(model(inputs), target)
    size = Counter()
    for tensor in kept.values():
        size[name(tensor.dtype)] += tensor.nbytes
    loss.backward()
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    types |= {
        "mse_loss": name(loss.dtype),
        "weight": name(model[0].weight.dtype),
        "gradient": name(gradients.dtype),
    }
    return {"types": types, "bytes": dict(size), "gradients": gradients}


def updates(weights: torch.dtype) -> float:
    """A weight of 1, in this type, after 1,000 updates of 0.001."""
    weight = torch.ones((), dtype=weights)
    for _ in range(STEPS):
        weight += UPDATE
    return weight.item()


def small_gradient(scaler: torch.amp.GradScaler, factor: float) -> dict:
    """One step of SGD from weight 0, with loss = factor * weight in float16: the gradient, and where the weight goes."""
    weight = nn.Parameter(torch.zeros(()))  # float32, as under autocast
    optimizer = torch.optim.SGD([weight], lr=1.0)
    low = weight.half()  # the gradient passes through here in float16
    scaler.scale(low.float() * factor).backward()
    scaler.unscale_(optimizer)
    gradient = weight.grad.item()
    scaler.step(optimizer)  # not if a gradient is inf or NaN
    scaler.update()
    return {"gradient": gradient, "weight": weight.item(), "scale": scaler.get_scale()}


def main(argv: list[str] | None = None) -> dict:
    """Print the four parts; return the figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    rows = numbers()
    print("type      bytes     largest   1 + 2**-9   70,000     1e-8")
    for row in rows:
        held = f"{row['1 + 2**-9']:10.6g}{row['70,000']:9.6g}{row['1e-8']:9.1g}"
        print(f"{row['type']:10}{row['bytes']:5}{row['largest']:12.6g}  {held}")
    plain, mixed = forward(autocast=False), forward(autocast=True)
    for which, found in (("float32", plain), ("autocast", mixed)):
        print(
            f"{which:8}  kept:", ", ".join(f"{size:,} bytes of {of}" for of, size in found["bytes"].items())
        )
    difference = (mixed["gradients"] - plain["gradients"]).norm() / plain["gradients"].norm()
    bound = "less than 1%" if difference < 0.01 else f"{difference:.0%}"
    types = [f"{which} {of}" for which, of in mixed["types"].items()]
    print(f"autocast  gives: {', '.join(types[:4])}\n{'':16} {', '.join(types[4:])}, {bound} from float32's")
    grown = {name(dtype): updates(dtype) for dtype in TYPES[:2]}
    held = " and ".join(f"{value:.3f} in {of}" for of, value in grown.items())
    print(f"a weight of 1 after {STEPS:,} updates of {UPDATE}: {held}")
    scaled = {}
    for label, factor, scaler in (
        ("1e-8, not scaled", 1e-8, torch.amp.GradScaler("cpu", enabled=False)),
        ("1e-8, scaled by 65,536", 1e-8, torch.amp.GradScaler("cpu")),
        ("100, scaled by 65,536", 100.0, torch.amp.GradScaler("cpu")),
    ):
        scaled[label] = found = small_gradient(scaler, factor)
        step = f"weight 0 ->{found['weight']:7.2g}   next scale {found['scale']:,.0f}"
        print(f"float16 gradient {label:23} {found['gradient']:6.2g}   {step}")
    bytes_kept = {which: found["bytes"] for which, found in (("float32", plain), ("autocast", mixed))}
    figures = {"numbers": rows, "types": mixed["types"], "bytes": bytes_kept, "weights": grown}
    return figures | {"scaled": scaled, "gradient_error": difference.item()}


if __name__ == "__main__":
    main()
