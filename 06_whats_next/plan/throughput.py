"""How long a step takes on more devices, from a measurement on few.

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
    machine: str = ""
    parameters: int | None = None  # that are trained

    @property
    def device_batch(self) -> float:
        return self.batch_size / self.devices

    @property
    def seconds(self) -> float:
        """A step, with its wait for data."""
        return self.batch_size / self.samples_per_second

    @property
    def compute(self) -> float:
        """The seconds of a step without its wait for data."""
        return self.seconds * (1 - self.waiting)


@dataclass(frozen=True)
class Links:
    """How devices reach each other and the bucket. Bandwidths in bytes a second."""

    devices_per_machine: int
    between_devices: float  # of each device, within its machine
    of_a_machine: float  # to the bucket, and to other machines

    def count_machines(self, devices: int) -> int:
        return -(-devices // self.devices_per_machine)


@dataclass(frozen=True)
class Step:
    """The seconds of a step, by what they are spent on."""

    compute: float
    wait: float  # for data
    exchange: float  # of gradients

    @property
    def seconds(self) -> float:
        return self.compute + self.wait + self.exchange


def step_with_loader(compute: float, load: float, workers: int = 1) -> float:
    """Seconds of a step beside a loader, whose workers each take `load` for a batch.

    Workers load the next batches during a step. Without any, a step follows its batch.
    """
    if workers == 0:
        return compute + load
    return max(compute, load / workers)


def exchange_seconds(size: float, devices: int, links: Links) -> float:
    """Seconds of a ring's all-reduce of `size` bytes of gradients, as if nothing hid it.

    Each device sends 2 (N - 1) / N of them. A ring over several machines is as slow as
    their network.
    """
    bandwidth = links.between_devices
    if links.count_machines(devices) > 1:
        bandwidth = min(bandwidth, links.of_a_machine)
    return 2 * (devices - 1) / devices * size / bandwidth


def predict_step(measured: Measured, devices: int, size: float, links: Links) -> Step:
    """A step on `devices` devices, with `size` bytes of gradients.

    A run that waited for data waits as long on more devices.
    The devices of a machine share its network. The bucket itself is taken to have no limit.
    """
    readers = min(devices, links.devices_per_machine)
    bytes_read = readers * measured.device_batch * measured.bytes_per_sample
    loaded = step_with_loader(measured.seconds, bytes_read / links.of_a_machine)
    # What was measured on several devices has their exchange in it.
    exchanged = exchange_seconds(size, measured.devices, links)
    return Step(
        compute=max(0.0, measured.compute - exchanged),
        wait=loaded - measured.compute,
        exchange=exchange_seconds(size, devices, links),
    )
