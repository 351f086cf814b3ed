"""A path or a URL, and what a client of a bucket is told."""

from dataclasses import dataclass
from datetime import timedelta

from obstore.auth.boto3 import Boto3CredentialProvider


@dataclass(frozen=True)
class Location:
    """Where data or checkpoints are, and how to reach them."""

    url: str  # or a path
    endpoint: str | None = None  # of an S3 server other than AWS's
    anonymous: bool = False
    retry_timeout: int = 120  # seconds for which a failed read is tried again
    region: str | None = None  # of an S3 bucket; if not given, that of the environment
    icechunk: str | None = None  # a branch or tag, if this is an Icechunk repository
    snapshot: str | None = None  # of it, by its id; if not given, the newest


def client_options(location: Location) -> dict:
    """What obstore needs to know of a bucket or a web server."""
    timeout = timedelta(seconds=location.retry_timeout)
    client = {"allow_http": True, "read_timeout": "10s", "timeout": timeout}
    options: dict = {"client_options": client}
    options["retry_config"] = {"max_retries": 1000, "retry_timeout": timeout}
    if location.endpoint:
        options["endpoint"] = location.endpoint
    if location.region:
        options["region"] = location.region
    if location.anonymous and not location.url.startswith("http"):
        options["skip_signature"] = True
    elif location.url.startswith("s3:"):  # obstore does not look into ~/.aws by itself
        ttl = timedelta(minutes=5)
        options["credential_provider"] = Boto3CredentialProvider(ttl=ttl)
    return options
