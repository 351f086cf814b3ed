"""Appendix, lab 3: gradient checkpointing. The same gradient in a part of the memory, for up to one more forward pass.

    uv run python lab_checkpointing.py                          # 16 layers in 1, 2, 4, 8 and 16 segments
    uv run python lab_checkpointing.py --layers 36 --segments 6 9 12

You should see gradients that are equal to the bit, memory that falls and then rises again as segments become many, and
how often the layers are run.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from lab_accumulation import Live  # counts the bytes of the tensors that are alive

KEPT_BY_LAYER = 3  # tensors that a layer keeps: the inputs of its convolution, of GroupNorm and of SiLU


def network(layers: int) -> nn.Sequential:
    """So many layers, whose inputs and outputs are all (N, 16, H, W); the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
            )
            for _ in range(layers)
        )
    )


def step(layers: int, segments: int) -> dict:
    """One forward and backward pass: its gradient, memory in tensors of a layer's size, and calls of layers."""
    model, calls = network(layers), []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append(layer))
    inputs = torch.randn(4, 16, 32, 32, generator=torch.Generator().manual_seed(1))
    with Live() as live:
        result = checkpoint_sequential(model, segments, inputs, use_reentrant=False)
        loss = result.square().mean()
        del result
        kept = live.now
        loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    kept, peak = (round(size / inputs.nbytes, 1) for size in (kept, live.peak))
    return {
        "segments": segments,
        "kept": kept,
        "peak": peak,
        "calls": len(calls),
        "gradient": gradient,
    }


def main(argv: list[str] | None = None) -> dict:
    """Print a line for each number of segments; return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layers", type=int, default=16, metavar="N", help="(default: 16)"
    )
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="K"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.layers <= 100:
        parser.error(f"--layers {args.layers}: give 1 to 100")
    for segments in args.segments:
        if segments < 1 or args.layers % segments:
            parser.error(
                f"--segments {segments}: give numbers that divide {args.layers}, the --layers"
            )
    torch.set_num_threads(1)  # tensors as small as these only wait for a second one
    # With one segment nothing is computed twice.
    truth = step(args.layers, 1).pop("gradient")
    rows = []
    print("segments   kept   k - 1 + 3N/k    peak   calls of layers   gradient")
    for segments in args.segments:
        row = step(args.layers, segments)
        row["equal"] = torch.equal(row.pop("gradient"), truth)
        row["formula"] = segments - 1 + KEPT_BY_LAYER * args.layers // segments
        rows.append(row)
        equal = "equal to the bit" if row["equal"] else "differs"
        print(
            f"{segments:8}{row['kept']:7.1f}{row['formula']:15}{row['peak']:8.1f}{row['calls']:18}   {equal}"
        )
    best = math.sqrt(KEPT_BY_LAYER * args.layers)
    print(f"least is kept at sqrt(3N) = {best:.1f} segments")
    return {"layers": args.layers, "rows": rows}


if __name__ == "__main__":
    main()
