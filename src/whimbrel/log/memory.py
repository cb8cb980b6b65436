"""A log in memory: the backend of the simulator and of fast tests.

It implements every rule of the contract except durability: it lives as long as the object does. To crash a component,
the simulator drops the component and keeps its log.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping

from whimbrel.core.errors import Refused, Trimmed
from whimbrel.log.contract import Entry, Lane, check_position, diverged, fitting


class MemoryLog:
    """A log that lives as long as this object. `close` has nothing to release: the log can be used after it."""

    def __init__(self) -> None:
        self._rulers = [_Ruler() for _ in Lane]
        self._lock = threading.Lock()

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        if count < 0:
            raise Refused(f"an entry cannot hold {count} records")
        ruler = self._rulers[lane]
        with self._lock:
            last = ruler.counters.get(writer, -1)
            if counter <= last:
                taken = ruler.taken.get((writer, counter))
                if taken is None and replays:
                    return None
                if taken is None or taken[1:] != (count, blob):
                    raise diverged(
                        "memory log", writer, counter, last, _described(taken), _described(Entry(-1, count, blob))
                    )
                return None
            position = ruler.tail
            entry = Entry(position, count, blob)
            ruler.entries.append(entry)
            ruler.totals.append(ruler.totals[-1] + count)
            if last >= 0 and ruler.taken[writer, last].position < ruler.head:
                del ruler.taken[writer, last]
            ruler.counters[writer] = counter
            ruler.taken[writer, counter] = entry
            ruler.writers.append((writer, counter))
            ruler.tail += 1
            return position

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        ruler = self._rulers[lane]
        if start >= ruler.tail:  # the usual case, without the lock: the tail never decreases
            return []
        with self._lock:
            first = ruler.index(start)
            # An end below the head must give an empty slice; a negative index would count from the list's end.
            return ruler.entries[first : None if end is None else max(end - ruler.head, 0)]

    def advance(self, start: int, records: int, lane: Lane = Lane.DATA) -> int:
        ruler = self._rulers[lane]
        with self._lock:
            first = ruler.index(start)
            if first >= len(ruler.entries):
                return start
            furthest = bisect_right(ruler.totals, ruler.totals[first] + records) - 1
            return ruler.head + max(furthest, first + 1)

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        sizes = [len(entry.blob) for entry in self.read(start, lane=lane)]
        return start + (len(sizes) if sum(sizes) <= size else fitting(sizes, size))

    def backlog(self, start: int, lane: Lane = Lane.DATA) -> int:
        ruler = self._rulers[lane]
        with self._lock:
            first = min(ruler.index(start), len(ruler.entries))
            return ruler.totals[-1] - ruler.totals[first]

    def head(self, lane: Lane = Lane.DATA) -> int:
        return self._rulers[lane].head

    def tail(self, lane: Lane = Lane.DATA) -> int:
        return self._rulers[lane].tail

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        return self._rulers[lane].counters.get(writer, -1)

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        return dict(self._rulers[lane].counters)

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        ruler = self._rulers[lane]
        if position <= ruler.head:  # without the lock: the head never decreases
            return
        with self._lock:
            gone = min(position - ruler.head, len(ruler.entries))
            if gone > 0:
                ruler.head += gone
                for writer, counter in ruler.writers[:gone]:
                    if counter != ruler.counters[writer]:  # a writer's last append is stored for ever
                        del ruler.taken[writer, counter]
                del ruler.entries[:gone], ruler.totals[:gone], ruler.writers[:gone]

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        with self._lock:
            for lane, position in positions.items():
                check_position("memory log", reader, lane, position, self._rulers[lane].tail)
            for lane, position in positions.items():
                readers = self._rulers[lane].readers
                readers[reader] = position if resets else max(position, readers.get(reader, 0))

    def committed(self, reader: str, lane: Lane = Lane.DATA) -> int | None:
        return self._rulers[lane].readers.get(reader)

    def readers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        return dict(self._rulers[lane].readers)

    def lag(self, reader: str, lane: Lane = Lane.DATA) -> int:
        ruler = self._rulers[lane]
        with self._lock:
            first = min(max(ruler.readers.get(reader, 0) - ruler.head, 0), len(ruler.entries))
            return ruler.totals[-1] - ruler.totals[first]

    def close(self) -> None:
        pass


class _Ruler:
    """One lane: its readable entries, and what the contract needs of the trimmed ones."""

    __slots__ = ("counters", "entries", "head", "readers", "tail", "taken", "totals", "writers")

    def __init__(self) -> None:
        self.head = self.tail = 0
        self.entries: list[Entry] = []
        # totals[i] is the number of records ever written before entries[i]; the one extra item is for the tail.
        self.totals = [0]
        self.counters: dict[str, int] = {}
        self.readers: dict[str, int] = {}
        # By writer and counter: each entry that is not trimmed, and each writer's last one.
        self.taken: dict[tuple[str, int], Entry] = {}
        self.writers: list[tuple[str, int]] = []

    def index(self, start: int) -> int:
        if start < self.head:
            raise Trimmed(start, self.head)
        return start - self.head


def _described(entry: Entry | None) -> str:
    return "trimmed that entry" if entry is None else f"{entry.records} records, {str(entry.blob)[:200]}"
