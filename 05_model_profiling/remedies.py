"""Why a store cannot be opened or read, and what to do about it."""

from pathlib import Path

import numpy as np
from botocore.exceptions import BotoCoreError
from obstore.exceptions import BaseError

# Other formats, by names that lie in their folders.
OTHER_FORMATS = {
    "an Icechunk repository": {"refs", "snapshots"},
    "references to other files, by kerchunk": {".zmetadata"},
}
# What to do about errors of Zarr, xarray and obstore, by words in them.
REMEDIES = {
    "session.get_credentials": "give credentials in the environment, or --anonymous",
    "codec": "add the package that has this codec",
    "conflicting sizes": "an append was cut off: append the rest, or cut what is longer",
    "fill_value": "write the attribute _FillValue as xarray does, in base64, or remove it",
}


def explain_absence(url: str) -> str:
    """Why there is no Zarr store, and what to do."""
    if "://" not in url:
        names = {path.name for path in Path(url).iterdir()}
        for kind, signs in OTHER_FORMATS.items():
            if signs <= names:
                return f"{kind}, not a Zarr store; copy it to one by xarray's to_zarr"
    reason = "no Zarr store is there, or none that you may read"
    remedy = "check URL and --endpoint, and credentials or --anonymous"
    payer = "set AWS_REQUEST_PAYER=requester if the bucket asks its readers to pay"
    return f"{reason}; {remedy}; {payer}"


def find_remedy(error: Exception) -> str:
    """What to do about an error of the client or of what decodes a store."""
    if isinstance(error, (BaseError, BotoCoreError)):
        return "check URL and credentials, or give --anonymous"
    for words, remedy in REMEDIES.items():
        if words in str(error):
            return remedy
    return "mend the store, or write it anew"


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
