"""A log that fails once, at a chosen append of a whole group of logs: what a crash, or a full disk, looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whimbrel.log.contract import Entry, Lane, Log


class Died(Exception):
    """The process is no more. Not an error of Whimbrel's, so nobody may handle it."""


class Fuse:
    """Counts the appends of the logs that share it, and fails at one of them: before it has happened, or after."""

    def __init__(self, at: int | None = None, *, after: bool = False, error: Callable[[], Exception] = Died) -> None:
        self.at, self.after, self.error = at, after, error
        self.count = 0

    @property
    def is_blown(self) -> bool:
        """Whether it has failed."""
        return self.at is not None and self.count > self.at

    def burn(self) -> bool:
        """One append more: whether it is the one."""
        self.count += 1
        return self.count - 1 == self.at


class FailingLog:
    """A log behind a fuse."""

    def __init__(self, log: Log, fuse: Fuse) -> None:
        self.log, self.fuse = log, fuse

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        fails = self.fuse.burn()
        if fails and not self.fuse.after:
            raise self.fuse.error()
        position = self.log.append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        if fails:
            raise self.fuse.error()
        return position

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        return self.log.read(start, end, lane)

    def advance(self, start: int, records: int, lane: Lane = Lane.DATA) -> int:
        return self.log.advance(start, records, lane)

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        return self.log.within(start, size, lane)

    def backlog(self, start: int, lane: Lane = Lane.DATA) -> int:
        return self.log.backlog(start, lane)

    def head(self, lane: Lane = Lane.DATA) -> int:
        return self.log.head(lane)

    def tail(self, lane: Lane = Lane.DATA) -> int:
        return self.log.tail(lane)

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        return self.log.counter(writer, lane)

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        return self.log.writers(lane)

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        self.log.trim(position, lane)

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        self.log.commit(reader, positions, resets=resets)

    def committed(self, reader: str, lane: Lane = Lane.DATA) -> int | None:
        return self.log.committed(reader, lane)

    def readers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        return self.log.readers(lane)

    def lag(self, reader: str, lane: Lane = Lane.DATA) -> int:
        return self.log.lag(reader, lane)

    def close(self) -> None:
        self.log.close()
