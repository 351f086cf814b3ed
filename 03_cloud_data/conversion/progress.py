"""What is known of a store while it is made: small objects beside its arrays.

The root's metadata grow by none of them. Zarr's readers do not look into their folder.
"""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from io import BytesIO

import numpy as np
import obstore
from obstore.store import ObjectStore

from conversion.target import Objects, Target, get, list_objects, put
from errors import DataError

FOLDER = ".make_store"
STATE = f"{FOLDER}/state.json"
SLABS = f"{FOLDER}/slabs"
SMALL = f"{FOLDER}/small.json"
SKELETON = f"{FOLDER}/skeleton_"
MAKE_ANEW = "remove the store and make it anew, or give another --store"
LOST_RECORD = (
    f"a file in {SLABS} is lost, so nobody knows other files' values; "
    "give the very files that were converted, and --repair"
)
CHECKSUM = 16  # hexadecimal digits

Checksums = dict[str, list[str]]  # by field


@dataclass(frozen=True)
class Record:
    """The checksums of some times of a store, in order."""

    maps: Checksums
    objects: Checksums  # as stored: whole chunks or shards

    def add(self, other: "Record") -> None:
        """Append the checksums of the times that follow."""
        for mine, theirs in ((self.maps, other.maps), (self.objects, other.objects)):
            for name, checksums in theirs.items():
                mine.setdefault(name, []).extend(checksums)

    def cut(self, target: Target, first: int, times: slice) -> "Record":
        """Those of a block, of a record that begins with the time `first`."""
        maps = {}
        objects = {}
        for name in self.maps:
            maps[name] = self.maps[name][times.start - first : times.stop - first]
            before = len(target.object_names(name, slice(first, times.start)))
            number = len(target.object_names(name, times))
            objects[name] = self.objects[name][before : before + number]
        return Record(maps, objects)


def sum_maps(values: np.ndarray) -> list[str]:
    """A checksum of each map of a field, (times, latitude, longitude)."""
    return [sum_bytes(np.ascontiguousarray(each)) for each in values]


def sum_bytes(content: bytes | np.ndarray) -> str:
    """A checksum."""
    return sha256(content).hexdigest()[:CHECKSUM]


@dataclass(frozen=True)
class State:
    """How far a store is. `times` are those it will have when it is whole."""

    settings: dict  # that decide its bytes
    files: list[str]  # a hash of the sources: those it was made of, then those appended
    starts: list[int]  # the number of the first time from each of them
    times: int
    spans: list[list[str]]  # of the statistics that it has or is to have
    whole: bool = False

    @property
    def skeleton(self) -> str:
        """The object that keeps all metadata and coordinates of so many times."""
        return f"{SKELETON}{self.times}"


def load_state(store: ObjectStore) -> State | None:
    """The state of a store; None if there is nothing.

    DataError if the store was not begun by this program.
    """
    found = get(store, STATE)
    if found is not None:
        try:
            return State(**json.loads(found))
        except (TypeError, ValueError) as error:
            raise DataError(f"{STATE} is damaged; {MAKE_ANEW}") from error
    for page in obstore.list(store, chunk_size=1000):
        for one in page:
            is_first = one["path"].startswith(SKELETON)  # written before the state
            if not is_first:
                reason = "not begun by this version of make_store.py"
                raise DataError(f"{reason}, no checksums; give another --store")
    return None


def save_state(store: ObjectStore, state: State, **changes: object) -> State:
    """Record a state, with some changes, and return it."""
    state = replace(state, **changes)
    put(store, STATE, json.dumps(asdict(state)).encode())
    return state


def slab_name(first: int) -> str:
    """The object that records a slab, by its first time."""
    return f"{SLABS}/{first:08d}.json"


def save_slab(store: ObjectStore, first: int, record: Record) -> None:
    """Record that a slab is written."""
    put(store, slab_name(first), json.dumps(asdict(record)).encode())


def load_slab(store: ObjectStore, first: int) -> Record:
    """The record of a slab. It is empty if there is none, or if it cannot be read."""
    found = get(store, slab_name(first))
    try:
        record = Record(**json.loads(found or b""))
        if record.maps.keys() == record.objects.keys():
            return record
    except (AttributeError, TypeError, ValueError):
        pass
    return Record({}, {})


def save_small(store: ObjectStore, objects: Objects) -> None:
    """Record the checksums of objects that are no chunks of fields, with those before."""
    found = {name: sum_bytes(content) for name, content in objects.items()}
    content = json.dumps(load_small(store) | found, sort_keys=True)
    put(store, SMALL, content.encode())


def load_small(store: ObjectStore) -> dict[str, str]:
    """The checksums of metadata, coordinates and statistics, by name; none if damaged."""
    try:
        return dict(json.loads(get(store, SMALL) or b"{}"))
    except (TypeError, ValueError):
        return {}


def list_slabs(store: ObjectStore) -> set[int]:
    """The first times of the slabs that are recorded."""
    found = set()
    for name, _ in list_objects(store, SLABS):
        number = name.removeprefix(f"{SLABS}/").removesuffix(".json")
        if number.isdecimal():
            found.add(int(number))
    return found


def save_objects(store: ObjectStore, name: str, objects: Objects) -> None:
    """Keep several small objects in one."""
    arrays = {key: np.frombuffer(value, "uint8") for key, value in objects.items()}
    save_arrays(store, name, arrays)


def load_objects(store: ObjectStore, name: str) -> Objects:
    """What save_objects has kept. DataError if it is not there, or damaged."""
    arrays = load_arrays(store, name)
    if arrays is None:
        raise DataError(f"{name} is damaged or missing; {MAKE_ANEW}")
    return {key: value.tobytes() for key, value in arrays.items()}


def save_arrays(store: ObjectStore, name: str, arrays: dict[str, np.ndarray]) -> None:
    """Keep several arrays in one object, behind its own checksum."""
    file = BytesIO()
    np.savez(file, **arrays)
    content = file.getvalue()
    put(store, name, sum_bytes(content).encode() + content)


def load_arrays(store: ObjectStore, name: str) -> dict[str, np.ndarray] | None:
    """What save_arrays has kept; None if it is not there, or damaged."""
    found = get(store, name) or b""
    content = found[CHECKSUM:]
    if not content or sum_bytes(content).encode() != found[:CHECKSUM]:
        return None
    with np.load(BytesIO(content)) as arrays:
        return dict(arrays)
