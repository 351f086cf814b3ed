"""Whether to train in bfloat16 on this machine."""

import argparse
import sys

import torch


def set_precision(args: argparse.Namespace) -> None:
    """Fall back to float32 where there are no instructions for bfloat16, and say so."""
    on_gpu = torch.accelerator.is_available() and args.accelerator != "cpu"
    if args.precision == "bf16-mixed" and not has_bf16(on_gpu):
        kind = "GPUs" if on_gpu else "cores"
        reason = f"these {kind} have no instructions for bfloat16"
        print(f"note: {reason}; training in float32", file=sys.stderr)
        args.precision = "32-true"


def has_bf16(on_gpu: bool) -> bool:
    """Whether there are instructions for bfloat16. Without, torch would emulate them."""
    if on_gpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    flags = torch.cpu.get_capabilities()
    return any(flags[name] for name in flags if name.endswith("bf16"))
