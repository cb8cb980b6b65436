"""Reading a log of any length in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from whimbrel.log.contract import Entry, Lane, Log

SIZE = 1 << 20
"""Bytes per read, unless a single entry is larger."""


def chunk(log: Log, start: int, lane: Lane = Lane.DATA, size: int | None = None) -> list[Entry]:
    """The next entries from `start` on that fit into `size` bytes; at least one if there is one."""
    if start >= log.tail(lane):
        return []
    return log.read(start, log.within(start, SIZE if size is None else size, lane), lane)


def chunked(log: Log, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> Iterator[Entry]:
    """The entries with start <= position < end, or up to the tail, with at most one chunk in memory."""
    while end is None or start < end:
        entries = chunk(log, start, lane)
        yield from (entry for entry in entries if end is None or entry.position < end)
        if not entries:
            return
        start = entries[-1].position + 1


def reach(log: Log, start: int, lane: Lane = Lane.DATA) -> int:
    """The end position of the chunk that begins at `start`."""
    return log.within(start, SIZE, lane)
