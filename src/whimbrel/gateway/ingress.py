"""The ingress log as its one writer sees it: where the next entry goes, and so which `seq` its records have.

A record's `seq` is its entry's position times `ROWS`, plus its row. It is written into the entry, once, because the
same bytes go on to the inboxes, where they lie at other positions; and it is never derived again, only compared. The
writer remembers where the log ends, so that an append is one transaction: it decides the position, and a position other
than the one expected means that somebody else writes to the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from whimbrel.core.errors import Bug, Corrupt
from whimbrel.core.record import Record
from whimbrel.log import codec
from whimbrel.log.contract import Log


class IngressWriter:
    """Appends to one ingress log. Not safe to use from several threads."""

    def __init__(self, name: str, log: Log) -> None:
        self._name, self._log = name, log
        self.look()

    def look(self) -> None:
        """Ask the log where it ends: at the beginning, and when an append may have happened though it failed."""
        self._end = self._log.tail()
        self._counters: dict[str, int] = {}

    @property
    def seq(self) -> int:
        """The `seq` of the first record of the next entry."""
        return self._end * codec.ROWS

    def counter(self, writer: str) -> int:
        """The last number of somebody who appends often; remembered."""
        if writer not in self._counters:
            self._counters[writer] = self._log.counter(writer)
        return self._counters[writer]

    def append(self, blob: bytes, count: int, writer: str, counter: int) -> int:
        """Append records whose first has `seq`; return the position."""
        position = self._log.append(blob, count=count, writer=writer, counter=counter)
        if position != self._end:
            raise Bug(f"{self._name} expected position {self._end} of its ingress log and got {position}")
        self._end += 1
        if writer in self._counters:
            self._counters[writer] = counter
        return position


def stored(position: int, records: Iterable[Record]) -> list[Record]:
    """The records of an ingress entry. Raises `Corrupt` if their `seq` belongs to another position."""
    found = [record._replace(offset=0) for record in records]
    if found[0].seq != position * codec.ROWS:
        raise Corrupt(f"the ingress entry at position {position} begins with seq {found[0].seq}")
    return found
