"""What asks a run to stop: signals, which only set a flag, and the notices of clouds."""

import os
import signal
from io import BytesIO
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request

import pytest
from survival import preemption
from survival.preemption import Preemption, Reason, has_spot_notice


def test_both_signals_only_set_a_flag(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        wishes = Preemption(tmp_path, None, None)
        assert wishes.reason() == Reason.NONE
        os.kill(os.getpid(), number)
        assert wishes.reason() == Reason.SIGNAL
        wishes.close()


def answer(request: Request, notice: bool) -> bytes:
    """What the metadata servers of AWS and Google answer, with a notice or without."""
    if request.full_url == preemption.GOOGLE:
        assert request.get_header("Metadata-flavor") == "Google"
        return b"TRUE\n" if notice else b"FALSE\n"
    page = request.full_url.removeprefix("http://169.254.169.254/latest/")
    if request.get_method() == "PUT":
        assert page == "api/token" and request.has_header("X-aws-ec2-metadata-token-ttl-seconds")
        return b"a token"
    assert page == "meta-data/spot/instance-action"
    assert request.get_header("X-aws-ec2-metadata-token") == "a token"
    if not notice:
        raise HTTPError(request.full_url, 404, "Not Found", None, None)
    return b'{"action": "terminate"}'


@pytest.mark.parametrize("cloud", ["aws", "google"])
def test_the_clouds_notice_is_seen(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for notice in (False, True):
        given = lambda request, timeout, notice=notice: BytesIO(answer(request, notice))  # noqa: E731
        monkeypatch.setattr(preemption, "urlopen", given)
        assert has_spot_notice(cloud) == notice

    def refuse(request: Request, timeout: float) -> None:
        raise URLError("nobody answers")

    monkeypatch.setattr(preemption, "urlopen", refuse)
    assert not has_spot_notice(cloud)
