"""A log read again, however long it is: a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator

from whimbrel.core.record import Record
from whimbrel.log import codec
from whimbrel.log.contract import Entry, Log

CHUNK = 1 << 20
"""Bytes of entries in memory at once; one entry at least."""


def entries(log: Log, start: int, end: int | None = None) -> Iterator[Entry]:
    """The entries with start <= position < end, up to the tail of the moment when it is reached."""
    while end is None or start < end:
        stop = piece(log, start)
        stop = stop if end is None else min(stop, end)
        if stop <= start:
            return
        yield from log.read(start, stop)
        start = stop


def piece(log: Log, start: int) -> int:
    """Up to where a log is read at once from a position on."""
    return log.within(start, CHUNK)


def numbered(entry: Entry) -> list[Record]:
    """The records of an ingress entry. Inside it an offset is what `seq` was made of."""
    return [record._replace(seq=record.offset, offset=0) for record in codec.records(entry)]
