"""What the launcher and the machine offer: devices and nodes."""

import argparse
import os

import torch

from errors import refuse


def set_devices(args: argparse.Namespace) -> None:
    """Fill in the devices and nodes that there are; refuse more."""
    has_gpu = torch.accelerator.is_available()
    if args.accelerator == "gpu" and not has_gpu:
        refuse("--accelerator gpu: this machine has none; give auto or cpu")
    on_gpu = has_gpu and args.accelerator != "cpu"
    available = torch.accelerator.device_count() if on_gpu else os.cpu_count()
    kind = "GPUs" if on_gpu else "cores"
    launched = read_environment("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
    if launched and args.devices not in (None, launched):
        reason = f"the launcher has {launched} on each node; leave --devices out"
        refuse(f"--devices {args.devices}: {reason}")
    if args.devices and args.devices > available:
        refuse(
            f"--devices {args.devices}: give up to {available}, the {kind} there are"
        )
    if on_gpu and launched > available:
        refuse(
            f"the launcher has {launched} processes here; there are {available} GPUs"
        )
    args.devices = args.devices or launched or (available if on_gpu else 1)
    nodes = read_environment("GROUP_WORLD_SIZE", "SLURM_NNODES")
    if nodes and args.num_nodes not in (None, nodes):
        reason = f"the launcher has {nodes}; leave --num-nodes out"
        refuse(f"--num-nodes {args.num_nodes}: {reason}")
    args.num_nodes = args.num_nodes or nodes or 1


def check_batch_size(args: argparse.Namespace) -> None:
    """Refuse a batch that cannot be shared among ranks and micro-batches."""
    smallest = args.devices * args.num_nodes * args.accumulate_grad_batches
    if args.batch_size < smallest:
        ranks = f"{args.devices} devices x {args.num_nodes} nodes"
        reason = f"{ranks} x {args.accumulate_grad_batches} micro-batches"
        refuse(f"--batch-size {args.batch_size}: {reason} need at least {smallest}")


def read_environment(*names: str) -> int:
    """The first of these variables that a launcher has set; 0 if there is none."""
    for name in names:
        value = os.environ.get(name)
        if value and not value.isdecimal():
            refuse(f"{name}={value}: not a number; give each node as many tasks")
        if value:
            return int(value)
    return 0
