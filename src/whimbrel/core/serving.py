"""Serving: applies one record, or one timer, to the state of its key.

The operator changes the state and emits. If it raises, the key is rolled back: to its state at the end of the last
batch, and the records of this batch before the failure are replayed without emitting. After `tries` failures the record
is parked: it becomes a dead letter, and the key continues without it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappush
from typing import Any, ClassVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.operator import RECORD, TIMER, Context, Operator, takes_context
from whimbrel.core.record import Emissions, Kind, Parked, Record, Result
from whimbrel.core.table import Entry, KeyTable

PLAIN = frozenset({str, float, int, bool, bytes, type(None)})
"""Types whose values can be encoded without a check; except integers, whose range is checked."""
LARGEST = wire.ENTRY_BYTES - (2 << 20)
"""The maximum number of bytes of a result's values. A larger result fits into no log entry: its record is parked."""
LAPSED = -1
"""The kind of a record that stands for an abandoned timer; it exists in `Entry.since` only."""


class Served(IntEnum):
    """The outcome for a record."""

    APPLIED = 0
    DUPLICATE = 1
    """Its key has already applied it."""
    PARKED = 2
    """The operator failed on it in all tries."""


APPLIED, DUPLICATE, PARKED = Served


class Serving:
    """Applies the operator to the keys of one part."""

    def __init__(self, name: str, operator: Operator, table: KeyTable) -> None:
        """`name`: the name of the instance."""
        self.name, self.operator, self.table = name, operator, table
        self.duplicates = 0
        self._entries, self._touched = table.entries, table.touched
        self._careful = False
        self._context = Context()
        self._extra: tuple[Context, ...] = (self._context,) if takes_context(operator) else ()
        # The context of `emit`: the record being applied, its next result number, and the results (None: silent).
        self._record: Record = Record(0, 0, 0, "", 0, 0, "", 0, 0, None)
        self._number = 0
        self._sink: list[Result] | None = None

    def serve(self, record: Record, out: Emissions, silent: bool = False) -> Served:
        """Apply one data record to its key: in normal operation, and silently for a shadow key."""
        entry = self._entries.get(record.key)
        if entry is None:
            entry = self._entries[record.key] = Entry(self.operator.State())
        elif record.seq <= entry.seq and self.is_duplicate(entry, record):
            self.duplicates += 1
            return DUPLICATE
        self._touched.add(record.key)
        if entry.timers and entry.timers[0] <= record.event_us:
            self.fire(entry, record, out, silent)
        return APPLIED if self._attempt(entry, record, out, silent) else PARKED

    def is_duplicate(self, entry: Entry, record: Record) -> bool:
        """Whether the key has already applied this record, which is not newer than its last one. Rows that `prepare`
        made of one record share its offset and are no duplicates."""
        return not (record.seq == entry.seq and record.offset == entry.offset)

    def fire(self, entry: Entry, record: Record, out: Emissions, silent: bool) -> None:
        """Fire the timers that are due at a record's event time, one after the other, before the record itself."""
        timer = record._replace(kind=Kind.TICK)
        while entry.timers and entry.timers[0] <= record.event_us:
            if not self._attempt(entry, timer, out, silent):
                self._attempt(entry, timer._replace(kind=LAPSED), out, silent)

    def _attempt(self, entry: Entry, record: Record, out: Emissions, silent: bool) -> bool:
        """Apply the operator to a record or a timer; roll back and retry if it raises; park it after the last try.

        Returns whether it succeeded. Failures are isolated: each timer that a record fires is an attempt of its own.
        """
        same = record.seq == entry.seq and record.offset == entry.offset
        self._record, self._sink = record, None if silent else out.results
        self._number = first = self._number if same else 0
        if entry.state is None:
            assert entry.saved is not None
            entry.state = self.table.decode(entry.saved)
        due = entry.timers[0] if entry.timers else None
        mark = len(out.results)
        act = self._acts[record.kind]
        done = False
        left = max(1, self.operator.tries)
        while left:
            left -= 1
            try:
                act(self, entry, record)
                if self._careful:
                    wire.encode(entry.state)
            except Exception as error:
                del out.results[mark:]
                self._undo(entry)
                self._record, self._sink, self._number = record, None if silent else out.results, first
                if not left and not silent:
                    self._park(entry, record, error, out)
            else:
                entry.since.append((record, silent))
                done = True
                break
        entry.seq, entry.src, entry.offset = record.seq, record.src, record.offset
        if entry.timers and entry.timers[0] != due:
            heappush(self.table.due, (entry.timers[0], self._record.key))
        return done

    # ── Calls of the operator ────────────────────────────────────────────────────────────────────────────────────

    def _process(self, entry: Entry, record: Record) -> None:
        key, context = record.key, self._context
        if self._extra:
            context.key, context.now_us, context.seq, context.timers = key, record.event_us, record.seq, entry.timers
            context.chance = RECORD
        self.operator.process(key, record.body, entry.state, self._emit, *self._extra)

    def _expire(self, entry: Entry, record: Record) -> None:
        context = self._context
        context.key, context.now_us, context.seq = record.key, entry.timers.pop(0), record.seq
        context.timers, context.chance = entry.timers, TIMER
        self.operator.on_timer(record.key, entry.state, self._emit, context)

    def _lapse(self, entry: Entry, record: Record) -> None:
        """Remove a timer on which the operator always raises; otherwise it would fire again with every later record."""
        entry.timers.pop(0)

    _acts: ClassVar[dict[int, Callable[[Serving, Entry, Record], None]]] = {
        Kind.DATA: _process,
        Kind.TICK: _expire,
        LAPSED: _lapse,
    }

    def _emit(self, /, **values: Any) -> None:
        size = 0
        for value in values.values():
            kind = type(value)
            if kind is str or kind is bytes:
                size += len(value)
            elif kind not in PLAIN or (kind is int and not -(1 << 63) <= value < 1 << 64):
                # Raises here, inside the operator's call, not when the batch is written.
                size += len(wire.encode(value))
        if size > LARGEST // 4:  # a character takes up to four bytes
            self._check_size(values)
        if self._sink is not None:
            record = self._record
            self._sink.append(
                Result(record.key, record.epoch, record.seq, self._number, record.event_us, record.ingress_us, values)
            )
        self._number += 1

    def _check_size(self, values: dict[str, Any]) -> None:
        size = len(wire.encode(values))
        if size > LARGEST:
            raise ValueError(f"a result of {size} bytes is too large: emit several, of at most {LARGEST} bytes each")

    # ── Rollback when an operator raises ─────────────────────────────────────────────────────────────────────────

    def _undo(self, entry: Entry) -> None:
        """Roll a key back to before the failed record: restore the last batch's state and replay without emitting."""
        self._restore(entry)
        self._sink = None
        for past, _ in entry.since:
            self._record = past
            self._acts[past.kind](self, entry, past)

    def _restore(self, entry: Entry) -> None:
        before = Entry(self.table.decode(entry.saved) if entry.saved else self.operator.State(), entry.saved)
        entry.state, entry.timers = before.state, before.timers

    def redo(self, key: str, entry: Entry, out: Emissions) -> None:
        """A key's state cannot be encoded: repeat its batch, check after each record, and park the one that fails."""
        out.results[:] = [result for result in out.results if result.key != key]
        past, entry.since = entry.since, []
        self._restore(entry)
        entry.seq, entry.src = (entry.saved.seq, entry.saved.src) if entry.saved else (-1, "")
        entry.offset, self._careful = -1, True
        for record, silent in past:
            self._attempt(entry, record, out, silent)
        self._careful = False

    def _park(self, entry: Entry, record: Record, error: Exception, out: Emissions) -> None:
        reason = f"{type(error).__name__}: {error}"
        event = record.body if record.kind == Kind.DATA else {"timer": entry.timers[0]}
        event_json = msgspec.json.encode(event, enc_hook=repr).decode()
        out.notices.append(Parked(self.name, record.key, record.seq, record.src, reason, event_json, record.epoch))
