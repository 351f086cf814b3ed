"""How many blocks are mixed, if no flag says so."""

import argparse

from devices import check_batch_size
from errors import refuse


def set_slots(args: argparse.Namespace) -> None:
    """Fill in the slots; refuse a batch that cannot be shared among ranks or slots."""
    check_batch_size(args)
    if args.shuffle_slots is None:  # whatever the workers: they decide no result
        args.shuffle_slots = 4 * args.batch_size
    if args.shuffle_slots % args.batch_size and args.batch_size % args.shuffle_slots:
        remedy = f"give a multiple or a divisor of --batch-size {args.batch_size}"
        refuse(f"--shuffle-slots {args.shuffle_slots}: {remedy}")
