"""How many samples a second a run takes on more devices, from a measurement on few.

Each device keeps its batch, so that the global batch grows with the devices.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """What a run has shown: its summary, and the options that it was run with."""

    samples_per_second: float
    waiting: float  # the share of the time spent waiting for data
    requests_per_sample: float
    bytes_per_sample: float
    batch_size: int  # over all devices
    devices: int = 1

    @property
    def device_batch(self) -> float:
        return self.batch_size / self.devices

    @property
    def step_seconds(self) -> float:
        return self.batch_size / self.samples_per_second

    @property
    def compute_seconds(self) -> float:
        """A step without the wait for data."""
        return self.step_seconds * (1 - self.waiting)


def step_seconds(compute: float, load: float, workers: int = 1) -> float:
    """A step beside a loader. `load` is what one worker takes to load a batch, in seconds.

    Workers load the next batches during a step. Without any, the step comes after its batch.
    """
    if workers == 0:
        return compute + load
    return max(compute, load / workers)


def exchange_seconds(size: float, devices: int, bandwidth: float) -> float:
    """A ring's all-reduce of `size` bytes of gradients, at `bandwidth` bytes a second.

    Each device sends 2 (N - 1) / N of them. It is counted in full, as if nothing hid it.
    """
    return 2 * (devices - 1) / devices * size / bandwidth


def predict_rate(
    measured: Measured,
    devices: int,
    gradient_bytes: float,
    device_bandwidth: float,
    store_bandwidth: float,
) -> float:
    """Samples a second on `devices` devices. Bandwidths in bytes a second.

    `device_bandwidth` is for gradients, of each device; `store_bandwidth` for all that the
    devices read together. A run that waited for data waits as long on more devices.
    """
    read = devices * measured.device_batch * measured.bytes_per_sample
    step = step_seconds(measured.step_seconds, read / store_bandwidth)
    step += exchange_seconds(gradient_bytes, devices, device_bandwidth)
    return devices * measured.device_batch / step
