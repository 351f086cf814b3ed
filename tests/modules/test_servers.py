"""Stores behind a web server or S3: what is asked of them, and what they do not give."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import store_climatology
import xarray as xr
from errors import DataError
from made_up_winds import COLUMNS, ROWS, make_winds, reader_of, write
from web_server import serving_files

CHUNKS = (8, ROWS, 20)


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return make_winds()[["u", "v"]]


@pytest.fixture(scope="module")
def folder(winds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores."""
    folder = tmp_path_factory.mktemp("stores")
    write(folder / "whole", winds, CHUNKS)
    write(folder / "shards", winds, CHUNKS, shards=(16, ROWS, COLUMNS))
    winds.isel(time=slice(4)).to_zarr(folder / "not_consolidated", consolidated=False)
    return folder


class Handler(SimpleHTTPRequestHandler):
    """A plain web server, and a proxy that goes nowhere: it has no ETags unless asked, no ranges, and no lists.

    The first word of a path says what goes wrong; the rest is a path in the folder.
    """

    def __init__(self, server: SimpleNamespace, *args: object, **how: object):
        self.owner = server
        super().__init__(*args, **how)

    def log_message(self, *about: object) -> None:
        pass

    def do_CONNECT(self) -> None:
        self.owner.asked.append((self.command, self.path))
        super().send_error(405)

    do_PROPFIND = do_CONNECT

    def do_GET(self) -> None:
        _, self.way, self.path = self.path.split("/", 2)
        self.owner.asked.append((self.command, self.path))
        self.owner.signed.append("Authorization" in self.headers)
        self.owner.payers.append(self.headers["x-amz-request-payer"])
        chunk_fails = {"busy": 503, "guarded": 403}.get(self.way) if "/v/c/" in self.path else None
        if self.way == "elsewhere":
            self.send_response(301)  # as S3 does for a bucket of another region
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif chunk_fails:
            self.send_error(chunk_fails)
        elif self.command == "HEAD":
            super().do_HEAD()
        elif self.owner.cuts[self.path] > 0:
            self.owner.cuts[self.path] -= 1
            self.send_half()
        else:
            super().do_GET()

    do_HEAD = do_GET

    def end_headers(self) -> None:
        if self.way == "tagged":  # as Google and Azure do, and their clients expect
            self.send_header("ETag", '"1"')
        super().end_headers()

    def send_half(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def send_error(self, code: int, *about: object) -> None:
        """Who may not list a bucket is told that what is absent is forbidden."""
        super().send_error(403 if code == 404 and self.way == "denied" else code, *about)


@pytest.fixture
def server(folder: Path) -> Iterator[SimpleNamespace]:
    """Its address, what it was asked for, whether that was signed, who is to pay, and how often each path breaks off."""
    server = SimpleNamespace(asked=[], signed=[], payers=[], cuts=Counter())
    with serving_files(partial(Handler, server, directory=folder)) as server.address:
        yield server


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds none of a cloud's, wherever they may be."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("way", ["open", "denied"])
def test_a_web_server_serves_a_store(way: str, server, winds: xr.Dataset) -> None:
    """Also one that says of what is absent, such as statistics, that it may not be read."""
    reader = reader_of(f"{server.address}/{way}/whole")
    box = {"time": 5, "latitude": slice(2, 9), "longitude": np.array([38, 39, 0, 1])}
    values = reader.read_at_once([box])
    for number, name in enumerate(("u", "v")):
        np.testing.assert_array_equal(values[0, number], winds[name][box])
    assert store_climatology.read_statistics(reader, "u_v_1982_1983") is None


def test_a_web_server_is_not_asked_to_list_a_store(server) -> None:
    """obstore would ask it again and again until the retries end."""
    with pytest.raises(DataError, match=r"cannot list a store; run zarr.consolidate_metadata"):
        reader_of(f"{server.address}/open/not_consolidated").open()
    assert "PROPFIND" not in [command for command, _ in server.asked]


def test_a_server_without_ranges_cannot_serve_shards(server) -> None:
    reader = reader_of(f"{server.address}/open/shards")
    with pytest.raises(DataError, match=r"v of 1982-\S+: v/c/0/0/0: shards need range .*; copy the"):
        reader.read("v", {"time": 0})


def test_a_body_that_breaks_off_is_asked_for_again(server, winds: xr.Dataset) -> None:
    """Of a chunk, and of the metadata while the store is opened."""
    server.cuts |= Counter({"whole/zarr.json": 1, "whole/v/c/0/0/0": 2})
    reader = reader_of(f"{server.address}/open/whole")
    np.testing.assert_array_equal(reader.read("v", {"time": 3}), winds.v[3])
    assert server.asked.count(("GET", "whole/zarr.json")) == 2
    assert server.asked.count(("GET", "whole/v/c/0/0/0")) == 3


@pytest.mark.parametrize(("way", "reason"), [("guarded", "403"), ("busy", "503"), ("open", "body error")])
def test_what_a_server_does_not_give_is_named_when_the_retries_end(way: str, reason: str, server) -> None:
    """A forbidden chunk is not taken for an absent one, and a busy server is not asked for ever."""
    server.cuts["whole/v/c/0/0/0"] = 10**6
    reader = reader_of(f"{server.address}/{way}/whole", retry_timeout=2)
    read = ThreadPoolExecutor(1).submit(reader.read, "v", {"time": 3, "longitude": slice(0, 5)})
    error = read.exception(timeout=60)  # seconds: the default of --retry-timeout is 120
    assert isinstance(error, DataError)
    assert re.match(rf"v of 1982-01-31T00:00: v/c/0/0/0: .*{reason}", str(error)), error
    assert "\n" not in str(error)


@pytest.mark.parametrize("anonymous", [True, False])
def test_requests_to_a_bucket_are_signed_unless_they_are_anonymous(
    anonymous: bool, server, winds: xr.Dataset, no_credentials: None, tmp_path: Path, monkeypatch
) -> None:
    """At the endpoint that is given, with the credentials of a profile."""
    keys = "aws_access_key_id = reader\naws_secret_access_key = secret"
    (tmp_path / "keys").write_text(f"[climate]\n{keys}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "climate")
    reader = reader_of("s3://bucket/whole", endpoint=server.address, anonymous=anonymous)
    np.testing.assert_array_equal(reader.read("v", {"time": 7}), winds.v[7])
    assert server.signed.count(not anonymous) > 0
    assert any(server.signed) is not anonymous


@pytest.mark.parametrize("anonymous", [True, False])
@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("gs://tagged/whole", {"GOOGLE_BASE_URL": "ADDRESS", "GOOGLE_BEARER_TOKEN": "token"}),
        (
            "az://tagged/whole",
            {
                "AZURE_STORAGE_ENDPOINT": "ADDRESS",
                "AZURE_STORAGE_ACCOUNT_NAME": "sea",
                "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
            },
        ),
    ],
)
def test_google_and_azure_are_read_with_what_the_environment_has(
    url: str, environment: dict, anonymous: bool, server, winds: xr.Dataset, no_credentials: None, monkeypatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("ADDRESS", server.address))
    reader = reader_of(url, anonymous=anonymous)
    np.testing.assert_array_equal(reader.read("v", {"time": 7}), winds.v[7])
    assert set(server.signed) == {not anonymous}


def test_without_an_account_azures_variable_is_named(no_credentials: None) -> None:
    with pytest.raises(DataError, match="must be specified; set AZURE_STORAGE_ACCOUNT_NAME"):
        reader_of("az://container/whole", anonymous=True).open()


@pytest.mark.parametrize("payer", [None, "requester"])
def test_who_asks_for_it_pays(
    payer: str | None, server, winds: xr.Dataset, no_credentials: None, monkeypatch
) -> None:
    """At a bucket whose owner does not: by a word in the environment, and with one's own keys."""
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in (keys | ({"AWS_REQUEST_PAYER": payer} if payer else {})).items():
        monkeypatch.setenv(name, value)
    reader = reader_of("s3://bucket/whole", endpoint=server.address)
    np.testing.assert_array_equal(reader.read("v", {"time": 7}), winds.v[7])
    assert set(server.payers) == {payer} and all(server.signed)


@pytest.mark.parametrize(
    ("url", "environment", "region", "host"),
    [
        ("s3://bucket/x", {}, "eu-west-1", "s3.eu-west-1.amazonaws.com:443"),
        ("s3://bucket/x", {"AWS_REGION": "ap-south-1"}, None, "s3.ap-south-1.amazonaws.com:443"),
        ("s3://bucket/x", {"AWS_REGION": "ap-south-1"}, "eu-west-1", "s3.eu-west-1.amazonaws.com:443"),
        ("gs://bucket/x", {}, None, "storage.googleapis.com:443"),
        ("az://box/x", {"AZURE_STORAGE_ACCOUNT_NAME": "sea"}, None, "sea.blob.core.windows.net:443"),
    ],
)
def test_a_bucket_is_looked_for_in_its_region(
    url: str, environment: dict, region: str | None, host: str, server, no_credentials: None, monkeypatch
) -> None:
    """Read anonymously: the region decides which host the proxy is to connect to."""
    for name, value in (environment | {"HTTPS_PROXY": server.address}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError):
        reader_of(url, anonymous=True, retry_timeout=1, region=region).open()
    assert set(server.asked) == {("CONNECT", host)}


def test_a_bucket_of_another_region_is_refused_with_the_flag(server) -> None:
    with pytest.raises(DataError, match="the bucket is in another region; give its --region"):
        reader_of("s3://elsewhere/x", endpoint=server.address, anonymous=True).open()


@pytest.mark.online
def test_a_public_bucket_of_another_region_is_read() -> None:
    """Sea surface temperatures (MUR) in Oregon: named from elsewhere only with the region."""
    public = {"anonymous": True, "region": "us-west-2"}
    reader = reader_of("s3://mur-sst/zarr-v1", "analysed_sst", **public)
    box = {"time": 0, "latitude": slice(9000, 9010), "longitude": slice(0, 10)}
    assert np.isfinite(reader.read("analysed_sst", box)).any()
    with pytest.raises(DataError, match="--region"):
        reader_of("s3://mur-sst/zarr-v1", "analysed_sst", **(public | {"region": "eu-west-1"})).open()


@pytest.mark.parametrize(
    "url", ["s3://winds/whole", "ftb://winds/whole", "https://", "az://container/whole", "empty"]
)
def test_a_store_that_cannot_be_opened_is_a_data_error(
    url: str, no_credentials: None, tmp_path: Path
) -> None:
    """Without credentials, of an unknown kind, without a host, without an account, without a store."""
    place = url if "://" in url else tmp_path
    with pytest.raises(DataError) as refused:
        reader_of(place, retry_timeout=1).open()
    assert "\n" not in str(refused.value)
