"""Why a store cannot be opened or read, and what to do about it."""

from pathlib import Path

import numpy as np
import obstore
from botocore.exceptions import BotoCoreError
from obstore.exceptions import BaseError
from obstore.store import from_url

from location import Location, client_options
from remedies import REMEDIES, find_remedy

# Other formats, by names that lie in their folders, and what to do.
OTHER_FORMATS = {
    "an Icechunk repository": (
        {"snapshots", "manifests"},
        "give --icechunk main, or another branch or tag",
    ),
    "kerchunk's references": (
        {".zmetadata"},
        "refer to the same files anew, by VirtualiZarr, in an Icechunk repository",
    ),
}
# What to do about errors of obstore, by words in them.
LOG_IN = {
    "Account must be specified": "set AZURE_STORAGE_ACCOUNT_NAME",
    "token request": "log in to the cloud, or give --anonymous",
}

# What to do about errors of icechunk.
REFERENCES = {
    "session.get_credentials": "give credentials in the environment, or --anonymous",
    "virtual chunk has changed": "bring the file back as it was, or refer anew in a new repository",
    "virtual": "check that the file is there, whole, and may be read",
}


def explain_absence(location: Location) -> str:
    """Why there is no Zarr store, and what to do."""
    names = list_names(location)
    for kind, (signs, remedy) in OTHER_FORMATS.items():
        if signs <= names:
            return f"{kind}, not a Zarr store; {remedy}"
    reason = "no Zarr store is there, or none that you may read"
    remedy = "check URL and --endpoint, and credentials or --anonymous"
    payer = "set AWS_REQUEST_PAYER=requester if the bucket asks its readers to pay"
    return f"{reason}; {remedy}; {payer}"


def list_names(location: Location) -> set[str]:
    """What lies in the folder; nothing if that cannot be listed, as on a web server."""
    url = location.url
    if "://" not in url:
        return {path.name for path in Path(url).iterdir()}
    if url.startswith("http"):
        return set()
    try:
        client = from_url(url, **client_options(location))
        found = obstore.list_with_delimiter(client)
    except (BaseError, BotoCoreError):
        return set()
    folders = {path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]}
    return folders | {one["path"].rpartition("/")[2] for one in found["objects"]}


def find_store_remedy(error: Exception) -> str:
    """What to do about an error of the client or of what decodes a store."""
    if isinstance(error, (BaseError, BotoCoreError)):
        otherwise = "check URL and credentials, or give --anonymous"
        return find_remedy(error, LOG_IN, otherwise)
    return find_remedy(error, REFERENCES | REMEDIES)


def explain_missing(encoding: dict, missing_chunks: str) -> str | None:
    """What to do if a chunk of such an array is missing; None if that is no error.

    Zarr and xarray write no chunk that holds nothing but Zarr's fill value.
    """
    masked = encoding.get("_FillValue", encoding.get("missing_value"))
    fill = encoding.get("fill_value", masked)
    copy = "copy it again, or choose other times"
    if fill is None:  # as Zarr v2 may have it: read as 0, and left out if it is 0
        fill = 0
    if masked is None and np.isnan(fill):
        return None
    if masked is not None and np.array_equal(fill, masked, equal_nan=True):
        return None
    if np.isnan(fill):
        return copy  # missing values are written as another number, so it was written
    if missing_chunks == "fill":
        return None
    sparse = f"if chunks of nothing but the fill value {fill} were left out"
    return f"{sparse}, give --missing-chunks fill, else {copy}"
