"""Buckets that are folders: reading an object, or a range of it, and listing keys."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from time import gmtime, strftime
from xml.sax.saxutils import escape

from aiohttp import web

# The errors of S3 that are needed here.
STATUS = {
    "AccessDenied": 403,
    "InvalidAccessKeyId": 403,
    "NoSuchKey": 404,
    "PreconditionFailed": 412,
    "InvalidRange": 416,
    "NotImplemented": 501,
    "SlowDown": 503,
}
XML = "<?xml version='1.0'?>"


class S3Error(web.HTTPException):
    """An error as S3 describes it. aiohttp answers with it when it is raised."""

    def __init__(self, code: str):
        self.status_code = STATUS[code]
        about = f"<Code>{code}</Code><Message>{code}</Message>"
        text = f"{XML}<Error>{about}</Error>"
        super().__init__(text=text, content_type="application/xml")


async def answer_from_folder(
    request: web.BaseRequest, folder: Path, key: str
) -> web.Response:
    """Answer a request to a bucket, or to an object in it if the key is not empty."""
    if request.method not in ("GET", "HEAD"):
        raise S3Error("AccessDenied")
    if key:
        if not stays_inside(key):
            raise S3Error("NoSuchKey")
        return read_object(request, folder / key)
    if request.method == "HEAD":
        return web.Response()
    return await asyncio.to_thread(list_objects, dict(request.query), folder)


def stays_inside(key: str) -> bool:
    """Whether a key names a place in its bucket's folder."""
    if os.sep != "/" and {":", "\\"} & set(key):  # on Windows, C:/ is a place, too
        return False
    return {"", ".", ".."}.isdisjoint(key.split("/"))


def read_object(request: web.BaseRequest, path: Path) -> web.Response:
    """Answer GET or HEAD of a file, or of a range of it, which is first read into memory."""
    if not os.path.isfile(path):  # Path.is_file fails for names that no file can have
        raise S3Error("NoSuchKey")
    if not os.access(path, os.R_OK):
        raise S3Error("AccessDenied")
    with open(path, "rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        tag = etag(about)
        modified = int(about.st_mtime)
        headers = {
            "ETag": f'"{tag}"',
            "Last-Modified": formatdate(modified, usegmt=True),
        }
        check_preconditions(request, tag, modified)
        if names_etag(request.if_none_match, tag):
            return web.Response(status=304, headers=headers)
        headers["Accept-Ranges"] = "bytes"
        status, start, stop = find_range(request, about.st_size)
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{about.st_size}"
        headers["Content-Length"] = str(stop - start)
        body = None
        if request.method == "GET":
            file.seek(start)
            body = file.read(stop - start)
        return web.Response(status=status, headers=headers, body=body)


def etag(about: os.stat_result) -> str:
    """What changes when a file changes."""
    return f"{about.st_mtime_ns:x}-{about.st_size:x}"


def check_preconditions(request: web.BaseRequest, tag: str, modified: int) -> None:
    """S3Error if the client wants only another state of the object. ETags go before dates."""
    latest = request.if_unmodified_since
    if request.if_match:
        failed = not names_etag(request.if_match, tag)
    else:
        failed = latest is not None and modified > latest.timestamp()
    if failed:
        raise S3Error("PreconditionFailed")


def names_etag(named: tuple | None, tag: str) -> bool:
    """Whether a header names this ETag, or any."""
    return any(one.value in ("*", tag) for one in named or ())


def find_range(request: web.BaseRequest, size: int) -> tuple[int, int, int]:
    """The status of the answer, and the first byte to send and the one after the last.

    A range that S3 does not understand means the whole object.
    """
    if "Range" not in request.headers:
        return 200, 0, size
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:
        return 200, 0, size
    if start >= stop:
        raise S3Error("InvalidRange")
    return 206, start, stop


def list_objects(query: dict[str, str], folder: Path) -> web.Response:
    """Answer ListObjectsV2, however long, in one page. The answer to V1 has the same parts."""
    prefix = query.get("prefix", "")
    delimiter = query.get("delimiter", "")
    after = query.get("start-after", "")
    if delimiter not in ("", "/"):
        raise S3Error("NotImplemented")
    top = prefix.rpartition("/")[0]
    found = []
    for path in paths_below(folder, top, one_level=delimiter == "/"):
        key = path.relative_to(folder).as_posix()
        if key.startswith(prefix) and key > after:
            found.append((key, path))
    entries = []
    for key, path in sorted(found):
        if not path.is_dir():
            with suppress(FileNotFoundError):  # removed meanwhile
                entries.append(describe_object(key, path.stat()))
        elif delimiter:
            common = f"<Prefix>{escape(key)}/</Prefix>"
            entries.append(f"<CommonPrefixes>{common}</CommonPrefixes>")
    listed = f"<IsTruncated>false</IsTruncated>{''.join(entries)}"
    text = f"{XML}<ListBucketResult>{listed}</ListBucketResult>"
    return web.Response(text=text, content_type="application/xml")


def paths_below(folder: Path, top: str, one_level: bool) -> Iterable[Path]:
    """Files and folders in the folder `top` of a bucket: one level, or all of them."""
    if top and not stays_inside(top):
        return ()
    if not os.path.isdir(folder / top):
        return ()
    if one_level:
        return (folder / top).iterdir()
    return (folder / top).rglob("*")


def describe_object(key: str, about: os.stat_result) -> str:
    """An object in a listing."""
    when = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(about.st_mtime))
    entry = f"<Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
    entry += f'<Size>{about.st_size}</Size><ETag>"{etag(about)}"</ETag>'
    return f"<Contents>{entry}</Contents>"
