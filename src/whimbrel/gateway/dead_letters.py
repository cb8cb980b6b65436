"""The dead letters: what could not be taken in, applied or written, with reason and position. The stream continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from whimbrel.core.errors import BadRecord
from whimbrel.core.record import Parked
from whimbrel.log.chunks import chunked
from whimbrel.log.contract import Log

SNIPPET = 1_000


class DeadLetter(msgspec.Struct, frozen=True):
    """One row, record or result that could not be taken in, applied or written."""

    reason: str
    message: str
    source: str
    position: int
    """A source's row number; for a parked record, and for a result, its `seq`."""
    record: str
    """The record or the result, or its beginning."""


class DeadLetters:
    """A log of dead letters, and their number by reason.

    Each writer numbers its letters with a counter that only grows, and repeats a letter under the same counter: a
    letter whose counter is not above the writer's last one is a repetition, and is dropped.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.counts = Counter(letter.reason for letter in self)

    def put(self, bad: BadRecord, source: str, position: int, row: Any = None, *, writer: str, counter: int) -> None:
        """Append a row that the intake refused. Counters of a writer must grow: see `DeadLetters`."""
        self._append(
            DeadLetter(bad.reason, str(bad), source, position, _described(bad, row)[:SNIPPET]), writer, counter
        )

    def park(self, parked: Parked, *, writer: str, counter: int) -> None:
        """Append a record on which an operator failed."""
        letter = DeadLetter("operator failed", parked.error, parked.src, parked.seq, parked.event[:SNIPPET])
        self._append(letter, writer, counter)

    def refuse(self, sink: str, seq: int, why: str, values: str, *, writer: str, counter: int) -> None:
        """Append a result that a sink cannot write."""
        self._append(DeadLetter("sink refused", why, sink, seq, values[:SNIPPET]), writer, counter)

    def _append(self, letter: DeadLetter, writer: str, counter: int) -> None:
        if counter > self._log.counter(writer):  # a source may render a bad row differently the second time
            self._log.append(msgspec.json.encode(letter), count=1, writer=writer, counter=counter)
            self.counts[letter.reason] += 1

    def read(self) -> list[DeadLetter]:
        """All dead letters, in the order of their appends."""
        return list(self)

    def __iter__(self) -> Iterator[DeadLetter]:
        """All dead letters, in the order of their appends, read from the log in chunks."""
        for entry in chunked(self._log, self._log.head()):
            yield msgspec.json.decode(entry.blob, type=DeadLetter)

    def positions(self, writer: str, source: str, start: int) -> set[int]:
        """The positions in a source, from `start` on, for which a writer has put letters."""
        if self._log.counter(writer) < start:
            return set()
        return {letter.position for letter in self if letter.source == source and letter.position >= start}


def _described(bad: BadRecord, row: Any) -> str:
    if row is None:
        return bad.record
    try:
        return msgspec.json.encode(row, enc_hook=repr).decode()
    except (ValueError, TypeError, RecursionError):  # a bad row may hold anything
        return repr(row)
