"""The spool of increments: what is large lies in files, which are there exactly as long as somebody may read them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Diverged, Full
from whimbrel.core.record import Checkpointed
from whimbrel.log import EmbeddedLog, Entry, MemoryLog
from whimbrel.log.large import LARGE
from whimbrel.log.spool import IncrementSpool

WRITER = "sum-1@2f/x"
BIG = b"x" * LARGE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "savings-sum-1"


@pytest.fixture
def spool(tmp_path: Path, folder: Path) -> IncrementSpool:
    return IncrementSpool(EmbeddedLog(tmp_path / "savings-sum-1.db"), folder)


def put(spool: IncrementSpool, counter: int, blob: bytes) -> int | None:
    return spool.append(packed(blob), count=1, writer=WRITER, counter=counter)


def packed(blob: bytes) -> bytes:
    return wire.pack([(1, 0, blob)])


def got(spool: IncrementSpool, position: int) -> bytes | None:
    messages = spool.messages(position)
    return None if messages is None else messages[0][2]


def files(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def test_posts_come_out_as_they_went_in_wherever_they_lie(spool: IncrementSpool, folder: Path) -> None:
    blobs = [b"small", BIG, BIG[100:], BIG + b"more"]
    assert [put(spool, number, blob) for number, blob in enumerate(blobs)] == [0, 1, 2, 3]
    assert [got(spool, position) for position in range(5)] == [*blobs, None]
    assert (files(folder), spool.under_way) == (2, sum(len(packed(blob)) for blob in blobs))


def test_without_a_folder_nothing_is_large() -> None:
    spool = IncrementSpool(MemoryLog())
    put(spool, 0, BIG)
    assert got(spool, 0) == BIG


def test_a_file_goes_with_its_entry(spool: IncrementSpool, folder: Path) -> None:
    for number in range(3):
        put(spool, number, BIG + bytes([number]))
    spool.trim(2, 0)
    assert (files(folder), got(spool, 2), spool.under_way) == (1, BIG + b"\2", len(packed(BIG + b"\2")))
    spool.trim(3, 0)
    assert files(folder) == 0


def test_a_batch_that_is_repeated_brings_nothing_back(spool: IncrementSpool, folder: Path) -> None:
    put(spool, 0, BIG)
    assert put(spool, 0, BIG) is None
    with pytest.raises(Diverged):
        put(spool, 0, BIG + b"of another try")
    assert got(spool, 0) == BIG
    spool.trim(1, 0)
    assert put(spool, 0, BIG) is None
    assert files(folder) == 0


class Fails(MemoryLog):
    fails = True

    def append(self, *args: Any, **kwargs: Any) -> int | None:
        if self.fails:
            raise OSError("dies here")
        return super().append(*args, **kwargs)


def test_a_file_that_is_still_to_be_named_stays(folder: Path) -> None:
    """Its writer died before it could name it, or is about to: the batch is repeated, with another content maybe."""
    log = Fails()
    spool = IncrementSpool(log, folder)
    with pytest.raises(OSError, match="dies here"):
        put(spool, 7, BIG)
    spool.trim(0, 0)
    assert files(folder) == 1
    log.fails = False
    put(spool, 7, BIG + b"again")
    assert (got(spool, 0), files(folder)) == (BIG + b"again", 1)
    spool.trim(1, 0)
    assert files(folder) == 0


class Late(Fails):
    """Somebody appends while another one looks."""

    deed: Callable[[], object] | None = None

    def read(self, *args: Any, **kwargs: Any) -> list[Entry]:
        found = super().read(*args, **kwargs)
        if self.deed is not None:
            deed, self.deed = self.deed, None
            deed()
        return found


def test_a_file_that_is_named_in_this_moment_stays(folder: Path) -> None:
    log = Late()
    log.fails = False
    spool = IncrementSpool(log, folder)
    put(spool, 0, BIG)
    log.fails = True
    with pytest.raises(OSError, match="dies here"):
        put(spool, 1, BIG + b"new")
    log.fails, log.deed = False, lambda: put(spool, 1, BIG + b"new")
    spool.trim(1, 0)
    assert (got(spool, 1), files(folder)) == (BIG + b"new", 1)


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_what_is_damaged_is_not_taken(spool: IncrementSpool, folder: Path, what: str) -> None:
    put(spool, 0, BIG)
    (file,) = folder.iterdir()
    file.unlink() if what == "gone" else file.write_bytes(file.read_bytes()[:-1] + b"y")
    with pytest.raises(Corrupt, match="increments that are not uploaded yet are"):
        got(spool, 0)


def test_a_full_disk_is_told_apart(spool: IncrementSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Full, match="savings-sum-1"):
        put(spool, 0, BIG)
    monkeypatch.undo()
    assert (put(spool, 0, BIG), got(spool, 0)) == (0, BIG)


def test_what_counts_is_heard_in_order_and_once(spool: IncrementSpool) -> None:
    increments = [Checkpointed("sum-1", part, 2, "r", number, number) for number in (1, 2) for part in (0, 1)]
    for saved in (*increments, increments[0]):
        spool.confirm(saved, 5)
    assert [one.saved for one in spool.confirmed(0)] == increments
    spool.trim(0, 3)
    assert [one.saved for one in spool.confirmed(3)] == increments[3:]
