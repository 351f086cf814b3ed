"""Refuse options of a store that cannot work, with a remedy."""

import argparse
import re
from pathlib import Path
from urllib.parse import urlsplit

from arguments import flag_of
from errors import refuse

# What KEY:SECRET@ leaves of the host, if there is a slash in the secret.
ODD_PORT = re.compile(r":\d*[^\d\]][^\]]*$")


def check_store(flag: str, store: str | None) -> None:
    """Refuse a folder that is not there, and a file."""
    if store and "://" not in store and not Path(store).is_dir():
        problem = "a file" if Path(store).is_file() else "no such folder"
        refuse(f"{flag} {store}: {problem}; give another folder, or a URL")


def check_server(args: argparse.Namespace, *others: str) -> None:
    """Refuse what is only for S3, if no URL is one of S3.

    `others` are options besides the store that the endpoint serves, such as a folder of
    checkpoints.
    """
    stores = (args.store, getattr(args, "training_store", None))
    if args.region and not any(map(is_on_s3, stores)):
        refuse(f"--region {args.region}: only for --store s3://...; leave it out")
    if args.endpoint and not re.match("https?://", args.endpoint):
        refuse(f"--endpoint {args.endpoint}: give http://... or https://...")
    names = ("store", *others)
    refers = getattr(args, "icechunk", None)  # perhaps to files on S3
    on_s3 = refers or any(is_on_s3(getattr(args, name)) for name in names)
    if args.endpoint and not on_s3:
        flags = " or ".join(flag_of(name) for name in names)
        remedy = f"only for {flags} on s3://; leave it out"
        refuse(f"--endpoint {args.endpoint}: {remedy}")


def check_icechunk(args: argparse.Namespace) -> None:
    """Refuse a version of a store that is not named."""
    for name in ("icechunk", "snapshot"):
        value = getattr(args, name)
        if value and not args.store:
            refuse(f"{flag_of(name)} {value}: give the repository as --store")


def is_on_s3(place: str | None) -> bool:
    """Whether this is a URL of S3, or of a server that speaks its protocol."""
    return (place or "").startswith(("s3://", "s3a://"))


def check_secrets(args: argparse.Namespace, *names: str) -> None:
    """Refuse credentials in the URLs of these options: the run's records would keep them.

    The message does not show them.
    """
    for name in names:
        if may_hold_secret(getattr(args, name) or ""):
            reason = "it may hold credentials, which would be saved with the run"
            remedy = "give them in the environment, or --anonymous"
            refuse(f"{flag_of(name)}: {reason}; {remedy}")


def may_hold_secret(text: str) -> bool:
    """Whether a text has a part of a URL that can hold credentials."""
    try:
        url = urlsplit(text)
    except ValueError:  # no URL, so nobody can tell what it holds
        return True
    if "@" in url.netloc or ODD_PORT.search(url.netloc):
        return True
    is_web = url.scheme in ("http", "https")  # in a bucket, # may be part of a name
    return bool(url.scheme and url.query) or bool(is_web and url.fragment)
