"""A store in an Icechunk repository: which snapshot is read, and what is said if there is none."""

import pickle
from pathlib import Path

import icechunk
import icechunk_store
import numpy as np
import pytest
import store_climatology
import xarray as xr
from errors import DataError
from fields import split_times
from location import Location
from made_up_winds import make_winds, reader_of
from options import parse_options

pytestmark = [  # of which train.py shows none, either
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
]


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return make_winds()[["u", "v"]]


@pytest.fixture
def repository(winds: xr.Dataset, tmp_path: Path) -> icechunk.Repository:
    """A repository in the folder `winds` with a tag, and a branch on which all u are one higher."""
    storage = icechunk.local_filesystem_storage(str(tmp_path / "winds"))
    repository = icechunk.Repository.create(storage)
    repository.create_tag("v1", commit(repository, "main", winds))
    repository.create_branch("draft", repository.lookup_tag("v1"))
    commit(repository, "draft", winds[["u"]] + 1, mode="r+")
    return repository


def commit(repository: icechunk.Repository, branch: str, winds: xr.Dataset, **how: object) -> str:
    """Write the winds to a branch; the id of its new snapshot."""
    session = repository.writable_session(branch)
    winds.to_zarr(session.store, consolidated=False, **how)
    return session.commit("made up")


def test_a_snapshot_is_named_by_branch_tag_or_id(repository, winds: xr.Dataset, tmp_path: Path) -> None:
    """The id counts if both are given."""
    first = repository.lookup_tag("v1")
    for more, named in (({"icechunk": "main"}, 0), ({"icechunk": "v1"}, 0), ({"icechunk": "draft"}, 1)):
        reader = reader_of(tmp_path / "winds", **more)
        np.testing.assert_array_equal(reader.read("u", {"time": 3}), winds.u[3] + named)
    for more in ({}, {"icechunk": "draft"}):
        reader = reader_of(tmp_path / "winds", snapshot=first, **more)
        np.testing.assert_array_equal(reader.read("u", {"time": 3}), winds.u[3])
        assert reader.notes[0].startswith(f"Icechunk snapshot {first}, of 20")
    assert reader.notes[0].endswith(
        f"; draft is at {repository.lookup_branch('draft')} now, which is not read"
    )


def test_whoever_opens_the_store_later_reads_the_same_snapshot(repository, winds, tmp_path: Path) -> None:
    """A worker of a run during which there was a commit."""
    reader = reader_of(tmp_path / "winds", icechunk="main")
    reader.open()
    commit(repository, "main", winds[["u"]] + 1, mode="r+")
    later = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(later.read("u", {"time": 3}), winds.u[3])
    assert later.location == reader.location
    anew = reader_of(tmp_path / "winds", icechunk="main")
    np.testing.assert_array_equal(anew.read("u", {"time": 3}), winds.u[3] + 1)


def test_a_chunk_that_is_not_there_is_refused_as_in_any_store(tmp_path: Path, winds: xr.Dataset) -> None:
    """Icechunk, too, leaves out what holds nothing but a fill value that may be a number."""
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "winds")))
    calm = winds.copy(deep=True)
    calm.u[3] = 0
    encoding = {"u": {"fill_value": 0, "chunks": (1, 20, 40)}}
    commit(repository, "main", calm, encoding=encoding)
    with pytest.raises(DataError, match=r"u/c/3/0/0: this chunk is missing; .* give --missing-chunks fill"):
        reader_of(tmp_path / "winds", icechunk="main").read("u", {"time": 3})
    reader = reader_of(tmp_path / "winds", icechunk="main", missing_chunks="fill")
    assert (reader.read("u", {"time": 3}) == 0).all()
    assert reader.traffic.counts()[2] == 1


REFUSED = {
    "no such branch": (
        {"icechunk": "mian"},
        "--icechunk mian: no such branch or tag; it has draft, main, v1; give an id as --snapshot$",
    ),
    "no such snapshot": (
        {"snapshot": "0" * 20},
        "--snapshot 0+: not in this repository; it may have been deleted$",
    ),
    "no id": (
        {"snapshot": "main"},
        "invalid snapshot id.*; check URL, --endpoint, --region, --snapshot and credentials$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_in_the_repository_is_said(case: str, repository, tmp_path: Path) -> None:
    how, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as refused:
        reader_of(tmp_path / "winds", **how).open()
    assert "\n" not in str(refused.value)


def test_a_place_without_a_repository_is_said(winds: xr.Dataset, tmp_path: Path) -> None:
    winds.to_zarr(tmp_path / "zarr", consolidated=True)
    with pytest.raises(
        DataError, match=r"^no Icechunk repository is there; leave --icechunk out if it is a plain Zarr"
    ):
        reader_of(tmp_path / "zarr", icechunk="main").open()
    with pytest.raises(DataError, match=r"icechunk \S+ cannot read ftp://; give a path, s3"):
        reader_of("ftp://a/b", icechunk="main").open()


def test_a_repository_of_a_later_format_asks_for_a_later_python() -> None:
    said = "  x this repository uses Icechunk v2 format, please upgrade the icechunk library\n  | \n"
    remedy = "use Python 3.12 or newer, which icechunk 2 needs"
    assert icechunk_store.explain(icechunk.IcechunkError(said)).endswith(f"library; {remedy}")


def reach(made_with: str | None, **how: object) -> Location:
    """Where a reader of a repository on s3:// looks for files of a container, of a server or of AWS."""
    store = icechunk.s3_store(region="eu-west-1", endpoint_url=made_with, s3_compatible=bool(made_with))
    container = icechunk.VirtualChunkContainer("s3://raw/", store)
    return icechunk_store.find_place(container, Location("s3://winds/a", **how))


def test_keys_go_to_aws_and_to_the_server_that_is_named_and_to_no_other() -> None:
    """A repository may have been made by anybody."""
    on_aws = reach(None, endpoint="http://127.0.0.1:9")
    assert (on_aws.endpoint, on_aws.anonymous, on_aws.region) == (None, False, "eu-west-1")
    moved = reach("http://127.0.0.1:1", endpoint="http://127.0.0.1:9")
    assert (moved.endpoint, moved.anonymous) == ("http://127.0.0.1:9", False)
    strange = reach("http://127.0.0.1:1")
    assert (strange.endpoint, strange.anonymous) == ("http://127.0.0.1:1", True)
    assert reach(None, anonymous=True).anonymous


def test_an_s3_server_is_told_what_a_bucket_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    near = icechunk_store.describe_server(Location("s3://a/b", endpoint="http://127.0.0.1:9"))
    assert near["force_path_style"] and near["region"] == "us-east-1"
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    far = icechunk_store.describe_server(Location("s3://a/b", region="eu-west-1"))
    assert far == {"region": "eu-west-1", "requester_pays": True}


def test_a_climatology_is_of_one_snapshot(repository, tmp_path: Path) -> None:
    """Else that of a branch's past would be taken for that of today."""
    names = set()
    for branch in ("main", "draft"):
        reader = reader_of(tmp_path / "winds", "v", icechunk=branch)
        reader.open()
        (period,) = split_times(reader.open().time, {"--train-times": ["1982", "1983"]})
        names.add(store_climatology.identify(reader, period))
    assert len(names) == 2  # although v is the same on both


def test_a_version_needs_a_store(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options("", ["--icechunk", "main"])
    assert "--icechunk main: give the repository as --store" in capsys.readouterr().err
