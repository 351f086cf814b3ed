"""Which samples each step takes."""

from collections.abc import Iterator

from torch.utils.data import Sampler

Address = tuple[int, int]  # (step, k): sample k of a step


class StepSampler(Sampler):
    """The global batch of every step, a list of (step, k). To resume, give `first_step`."""

    def __init__(self, batch_size: int, max_steps: int, first_step: int = 0):
        self.batch_size = batch_size
        self.max_steps = max_steps
        self.first_step = first_step

    def __len__(self) -> int:
        # The whole run's: after a resume Lightning counts the earlier batches as fetched.
        return self.max_steps

    def __iter__(self) -> Iterator[list[Address]]:
        for step in range(self.first_step, self.max_steps):
            yield [(step, k) for k in range(self.batch_size)]
