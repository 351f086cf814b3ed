"""Which samples a rank takes at each step: its slice of the global batch."""

from collections.abc import Iterator

from torch.utils.data import Sampler

Address = tuple[int, int]  # (step, k): sample k of a step


class StepSampler(Sampler):
    """A rank's slice of the global batch of every step, in micro-batches.

    Each is a list of (step, k). To resume, give `first_step`. Any number of ranks cuts the
    same global batch, into slices as equal as may be.
    """

    def __init__(
        self,
        batch_size: int,
        max_steps: int,
        first_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
    ):
        self.batch_size = batch_size
        self.max_steps = max_steps
        self.first_step = first_step
        self.rank = rank
        self.world_size = world_size
        self.accumulate_grad_batches = accumulate_grad_batches

    def __len__(self) -> int:
        # The whole run's: after a resume Lightning counts the earlier batches as fetched.
        return self.max_steps * self.accumulate_grad_batches

    def __iter__(self) -> Iterator[list[Address]]:
        pieces = self.world_size * self.accumulate_grad_batches
        first = self.rank * self.accumulate_grad_batches
        for step in range(self.first_step, self.max_steps):
            for piece in range(first, first + self.accumulate_grad_batches):
                begin = self.batch_size * piece // pieces
                end = self.batch_size * (piece + 1) // pieces
                yield [(step, k) for k in range(begin, end)]
