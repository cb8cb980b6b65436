"""The single writer of an ingress log: knows the position of the next entry, and so the `seq` of its records.

A record's `seq` is its entry's position times `ROWS`, plus its row. It is written into the entry, once, because the
same bytes go to the inboxes, where they have other positions; and it is never derived again, only compared. The
writer caches the end of the log, so that an append is one transaction: the log assigns the position, and a position
other than the expected one means that another process writes to the log.

No entry, here or in an inbox, has more than `MOST_BYTES` bytes or `MOST` records, unless a single record is larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from whimbrel.core import wire
from whimbrel.core.errors import Bug, Corrupt
from whimbrel.core.keys import bin_of
from whimbrel.core.record import Kind, Record
from whimbrel.core.router import Abort, Begin, Command, Cutover, Fence, Restore
from whimbrel.log.codec import ROWS, Codec
from whimbrel.log.contract import Log

MOST = 1 << 16
"""The maximum number of records per entry."""
MOST_BYTES = wire.ENTRY_BYTES
"""The maximum number of bytes per entry."""

Event = tuple[str, Sequence[Any], int | None]
"""Key, columns, event time if it has one."""

KINDS: dict[type, Kind] = {
    Begin: Kind.BEGIN,
    Cutover: Kind.CUTOVER,
    Abort: Kind.ABORT,
    Fence: Kind.DISCARD,
    Restore: Kind.RESTORE,
}
COMMANDS = {kind: command for command, kind in KINDS.items()}


class IngressWriter:
    """Appends to one ingress log. Not safe to use from several threads."""

    def __init__(self, name: str, log: Log, encoding: Codec) -> None:
        self._name, self._log, self._codec = name, log, encoding
        self.look()

    def look(self) -> None:
        """Read the end of the log: at the start, and when a failed append may have succeeded after all."""
        self._end = self._log.tail()
        self._counters: dict[str, int] = {}

    @property
    def seq(self) -> int:
        """The `seq` of the first record of the next entry."""
        return self._end * ROWS

    def counter(self, writer: str) -> int:
        """The last counter of a writer, cached: for writers that append often."""
        if writer not in self._counters:
            self._counters[writer] = self._log.counter(writer)
        return self._counters[writer]

    def entry(
        self, events: Sequence[Event], start: int, since_us: int | Sequence[int], arrived_us: int, *, whole: bool
    ) -> tuple[list[Record], bytes]:
        """The next entry, with its records: the events from `start` on that fit. `whole`: all of them. `since_us`: when
        they entered, all together or each."""
        seq, end = self.seq, len(events)
        while True:
            entered = repeat(since_us) if isinstance(since_us, int) else islice(since_us, start, None)
            records = [
                Record(0, 0, bin_of(key), key, seq + row, 0, self._name, arrived_us if us is None else us, since, event)
                for row, ((key, event, us), since) in enumerate(zip(islice(events, start, end), entered, strict=False))
            ]
            blob = self._codec.encode(records)
            if whole or fits(len(records), blob):
                return records, blob
            end = (start + end) // 2

    def append(self, blob: bytes, count: int, writer: str, counter: int) -> int:
        """Append an entry whose first record has `self.seq`; return the position."""
        position = self._log.append(blob, count=count, writer=writer, counter=counter)
        if position != self._end:
            raise Bug(f"{self._name} expected position {self._end} of its ingress log and got {position}")
        self._end += 1
        if writer in self._counters:
            self._counters[writer] = counter
        return position


def stored(position: int, records: Iterable[Record]) -> list[Record]:
    """The records of an ingress entry. Raises `Corrupt` if their `seq` is that of another position."""
    found = [Record(0, *record[1:]) for record in records]
    if found[0].seq != position * ROWS:
        raise Corrupt(f"the ingress entry at position {position} begins with seq {found[0].seq}")
    return found


def fits(count: int, blob: bytes) -> bool:
    """Whether `count` records, encoded as `blob`, may be one entry."""
    return count == 1 or (count <= MOST and len(blob) <= MOST_BYTES)


def entries(records: list[Record], encoding: Codec) -> Iterator[tuple[list[Record], bytes]]:
    """Cut records into entries of a bounded size, in order. Deterministic: the same records give the same entries."""
    if len(records) > MOST:
        for first in range(0, len(records), MOST):
            yield from entries(records[first : first + MOST], encoding)
        return
    blob = encoding.encode(records)
    if fits(len(records), blob):
        yield records, blob
    else:
        half = len(records) // 2
        yield from entries(records[:half], encoding)
        yield from entries(records[half:], encoding)


def writer_of(command: Command) -> str:
    """The writer name of a command in the ingress log: one per command, so that each is appended once."""
    return f"coordinator/{command.move.id}/{KINDS[type(command)].name}"
