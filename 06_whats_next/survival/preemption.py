"""The end of a run that somebody else decides: signals, spot notices, a file, a time limit.

Nothing here stops a step. A signal only sets a flag, and all ranks read each other's flags
between two steps.
"""

import signal
import time
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from urllib.request import Request, urlopen

import torch
from torch import distributed

POLL_SECONDS = 5  # between two looks at the stop file and at the cloud's notices
EXIT_AGAIN = (
    75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again
)

AWS = "http://169.254.169.254/latest"
GOOGLE = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"


class Reason(IntEnum):
    """Why a run stops before its last step. If several hold, the largest is named."""

    NONE = 0
    HOURS = 1
    SIGNAL = 2
    SPOT = 3
    FILE = 4


TEXTS = {
    Reason.HOURS: "--max-hours are over",
    Reason.SIGNAL: "SIGTERM or SIGUSR1",
    Reason.SPOT: "the cloud takes this machine back",
    Reason.FILE: "the file STOP is there; remove it to go on",
}


class Preemption:
    """What has asked this rank to stop.

    SIGTERM and SIGUSR1; after `max_hours`; a file named STOP in `folder`; with `spot` "aws"
    or "google", that cloud's notice.
    """

    def __init__(self, folder: Path, max_hours: float | None, spot: str | None):
        self.stop_file = folder / "STOP"
        self.spot = spot
        self.deadline = time.monotonic() + 3600 * max_hours if max_hours else None
        self.seen = Reason.NONE
        self.closed = Event()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note_signal)
        self.look()
        Thread(target=self.poll, daemon=True).start()

    def note_signal(self, number: int, frame) -> None:
        self.want(Reason.SIGNAL)

    def want(self, reason: Reason) -> None:
        self.seen = max(self.seen, reason)

    def poll(self) -> None:
        """Look for what comes by no signal, from a thread of its own."""
        while not self.closed.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        if self.stop_file.exists():
            self.want(Reason.FILE)
        if self.spot and has_spot_notice(self.spot):
            self.want(Reason.SPOT)

    def reason(self) -> Reason:
        """Why this rank wants to stop now, if it does."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.want(Reason.HOURS)
        return self.seen

    def close(self) -> None:
        """Let the thread end."""
        self.closed.set()


def has_spot_notice(cloud: str, address: str | None = None) -> bool:
    """Whether the cloud has announced that it takes this machine back.

    AWS says so two minutes before, and Google 30 seconds. False if nothing answers.
    """
    try:
        if cloud == "aws":
            base = address or AWS
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = fetch(Request(f"{base}/api/token", headers=ttl, method="PUT"))
            headers = {"X-aws-ec2-metadata-token": token}
            fetch(Request(f"{base}/meta-data/spot/instance-action", headers=headers))
            return True  # without a notice there is no such page
        headers = {"Metadata-Flavor": "Google"}
        return fetch(Request(address or GOOGLE, headers=headers)) == "TRUE"
    except (OSError, HTTPException):
        return False


def fetch(request: Request) -> str:
    with urlopen(request, timeout=2) as answer:
        return answer.read().decode().strip()


class Agreement:
    """What any rank wants, known to all ranks one step later.

    The ranks exchange their wishes while they compute the next step, so nobody waits. A
    group of its own, on the CPU, keeps this from the gradients and from a GPU's queue.
    """

    def __init__(self, timeout: float):
        self.group = None
        if distributed.is_initialized():
            limit = timedelta(seconds=timeout)
            self.group = distributed.new_group(backend="gloo", timeout=limit)
        self.sent: tuple[torch.Tensor, distributed.Work] | None = None

    def exchange(self, wishes: list[int]) -> list[int]:
        """Send this rank's wishes; return the largest of all ranks', of the step before."""
        if self.group is None:
            return wishes
        agreed = [0] * len(wishes)
        if self.sent is not None:
            largest, work = self.sent
            work.wait()
            agreed = largest.tolist()
        largest = torch.tensor(wishes)
        op = distributed.ReduceOp.MAX
        work = distributed.all_reduce(largest, op, self.group, async_op=True)
        self.sent = largest, work
        return agreed

    def wait_for_all(self, seconds: float) -> None:
        """Return when every rank is here, or after so long, and five seconds."""
        if self.group is not None:
            with suppress(RuntimeError):
                distributed.barrier(self.group, async_op=True).wait(
                    timedelta(seconds=seconds + 5)
                )
