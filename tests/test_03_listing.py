"""A listing is compared with the names that a store must have, in little memory."""

import random
import tracemalloc
from collections.abc import Iterator
from functools import partial

import book
import pytest

with book.rooms("03_cloud_data"):
    from conversion import listing


def expected(times: int) -> listing.Expected:
    """The names of a field of so many times, in chunks of four to a map."""
    encode = lambda place: "c/" + "/".join(map(str, place))  # noqa: E731
    return listing.Expected("wind", (times, 2, 2), encode)


def list_all(times: int, lost: tuple[str, ...] = (), size: int = 9) -> Iterator[tuple[str, int]]:
    """A bucket's listing, made up as it is read; and what does not belong to the field."""
    yield "wind/zarr.json", 1
    for number in range(4 * times):
        name = f"wind/c/{number // 4}/{number // 2 % 2}/{number % 2}"
        if name not in lost:
            yield name, size
    yield f"wind/c/{times}/0/0", 5  # of a longer field
    yield "wind/c/0/0", 5


@pytest.mark.parametrize(
    "lost", [pytest.param((), marks=pytest.mark.thorough), ("wind/c/7/1/0", "wind/c/99/0/1")]
)
def test_memory_does_not_grow_with_the_number_of_objects(lost: tuple, monkeypatch) -> None:
    monkeypatch.setattr(listing, "WINDOW", 1000)
    peaks = []
    for times in (250, 250, 10_000):  # the first fills caches
        found = []
        tracemalloc.start()
        names, list_again = expected(times), partial(list_all, times, lost)
        count, size = listing.count_objects(names, list_again())
        if count < names.count:
            for number in listing.find_missing(names, list_again):
                found.append(names.name(number))
                if len(found) == len(lost):
                    break
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (count, size) == (4 * times - len(lost), 9 * (4 * times - len(lost)))
        assert found == list(lost)
    assert peaks[2] < 1.2 * peaks[1] + 4096


def test_any_order_will_do_and_empty_objects_are_missing(monkeypatch) -> None:
    monkeypatch.setattr(listing, "WINDOW", 7)  # so that the listing is read several times
    names = expected(8)
    listed = [(name, 0 if name.startswith("wind/c/3/") else size) for name, size in list_all(8)]
    random.Random(0).shuffle(listed)
    assert listing.count_objects(names, listed)[0] == 28
    assert list(listing.find_missing(names, lambda: listed)) == [12, 13, 14, 15]


def test_a_step_between_the_numbers_of_names() -> None:
    names = listing.Expected("slabs", (3,), lambda place: f"{place[0] * 8:04}.json", step=8)
    assert [names.number(f"slabs/{number}.json") for number in ("0000", "0016", "0004", "0024")] == [
        0,
        2,
        None,
        None,
    ]
