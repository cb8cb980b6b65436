"""What a worker loads before a batch: nothing, a little, or everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from whimbrel.core.errors import Refused
from whimbrel.spark import stored
from whimbrel.spark.nearby import LARGE, Nearby
from whimbrel.spark.stored import StoredPart


class Blobs(dict[Any, Any]):
    """A map state in memory."""

    getValue = dict.get
    updateValue = dict.__setitem__


class Handle:
    """Hands out the state of one group, and lets one look how often it was asked."""

    def __init__(self) -> None:
        self.blobs = Blobs()

    def getMapState(self, name: str, key: Any, value: Any) -> Blobs:
        return self.blobs


@pytest.fixture
def part() -> StoredPart:
    return StoredPart(Handle(), Nearby())  # type: ignore[arg-type]


def append(part: StoredPart, *deltas: bytes) -> list[int]:
    return [part.append(part.open(2), [delta]) for delta in deltas]


def test_a_worker_that_wrote_the_last_delta_lacks_nothing(part: StoredPart) -> None:
    *_, last = append(part, b"one", b"two")
    assert part.missing(part.open(2), last) == ([], True)


def test_a_worker_that_was_away_lacks_what_others_wrote(part: StoredPart) -> None:
    first, *_ = append(part, b"one", b"two", b"three")
    assert part.missing(part.open(2), first) == ([b"two", b"three"], True)


@pytest.mark.parametrize("nonce", [0, 12345])
def test_a_worker_with_nothing_or_with_what_was_never_committed_loads_everything(part: StoredPart, nonce: int) -> None:
    append(part, b"one", b"two")
    assert part.missing(part.open(2), nonce) == ([b"one", b"two"], False)


def test_what_another_query_left_in_a_worker_is_not_taken_for_an_empty_store(part: StoredPart) -> None:
    assert part.missing(part.open(2), 12345) == ([], False)


def test_a_base_is_not_loaded_on_top_of_anything(part: StoredPart) -> None:
    first, last = append(part, b"one", b"two")
    base = part.compact(part.open(2), [b"base"])
    (after,) = append(part, b"three")
    assert part.missing(part.open(2), last) == part.missing(part.open(2), first) == ([b"base", b"three"], False)
    assert part.missing(part.open(2), base) == ([b"three"], True)
    assert part.missing(part.open(2), after) == ([], True)


def test_a_worker_that_was_away_too_long_loads_everything(part: StoredPart) -> None:
    first, *_ = append(part, *[b"delta"] * (stored.REMEMBERED + 1))
    assert len(part.missing(part.open(2), first).deltas) == stored.REMEMBERED + 1


def test_deltas_outgrow_their_base_by_size_or_by_number(part: StoredPart) -> None:
    small, large = b"x", b"x" * (stored.GROWTH * stored.FLOOR)
    little = partial(int, 1)
    append(part, small)
    assert not part.outgrown(part.open(2), len(small), little)
    assert part.outgrown(part.open(2), len(large), little)
    append(part, *[small] * (stored.MOST - 1))
    assert part.outgrown(part.open(2), len(small), little)
    part.compact(part.open(2), [large])
    assert not part.outgrown(part.open(2), len(large), little)


def test_deltas_of_keys_that_come_are_not_too_much(part: StoredPart) -> None:
    size = stored.GROWTH * stored.FLOOR + 1
    assert part.outgrown(part.open(2), size, lambda: size // stored.GROWTH - 1)
    assert not part.outgrown(part.open(2), size, lambda: size)


def test_large_blobs_are_found_nearby_and_otherwise_in_the_store(tmp_path: Path) -> None:
    handle = Handle()
    part = StoredPart(handle, Nearby(str(tmp_path)))  # type: ignore[arg-type]
    large = [bytes([number]) * LARGE for number in range(3)]
    first, *_ = append(part, *large, b"small")
    assert len(list(tmp_path.iterdir())) == 3
    for number in (1, 2):
        handle.blobs[(number,)] = (b"not looked at",)
    assert part.missing(part.open(2), first) == ([*large[1:], b"small"], True)
    for number, blob in enumerate(large):
        handle.blobs[(number,)] = (blob,)
    for file in tmp_path.iterdir():
        file.unlink()
    assert part.missing(part.open(2), first) == ([*large[1:], b"small"], True)


def test_files_go_with_what_they_hold(tmp_path: Path) -> None:
    part = StoredPart(Handle(), Nearby(str(tmp_path)))  # type: ignore[arg-type]
    large = b"x" * LARGE
    append(part, large, *[b"small"] * (stored.REMEMBERED - 1))
    assert len(list(tmp_path.iterdir())) == 1
    append(part, large)
    assert len(list(tmp_path.iterdir())) == 1, "the first is so old that nobody knows it by its nonce"
    part.compact(part.open(2), [large, large])
    assert len(list(tmp_path.iterdir())) == 2, "of the base alone"
    assert part.missing(part.open(2), 0) == ([large, large], False)


def test_a_folder_that_goes_away_is_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    part = StoredPart(Handle(), Nearby(str(folder)))  # type: ignore[arg-type]
    folder.rmdir()
    append(part, b"x" * LARGE)
    assert part.missing(part.open(2), 0) == ([b"x" * LARGE], False)


def test_the_number_of_groups_is_fixed(part: StoredPart) -> None:
    append(part, b"one")
    with pytest.raises(Refused, match="made with 2 groups, not 3"):
        part.open(3)
