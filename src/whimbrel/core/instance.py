"""An instance of a stage: applies records to the state of its keys and returns results, messages and notices.

Sits between the inbox and the outbox. No I/O, no clock, no threads: records in (`apply`), emissions out. `deltas`
returns what changed since the last batch, and `load` restores the state from such deltas. The keys are in a table
(table.py), and serving.py applies the operator to them; this module dispatches each record to its handler.

An instance may be split into parts (Spark calls one part a group): each holds the bins with `bin % parts == part` and
is independent of the others. Markers and ticks reach every part.

Reading order: `apply` → `Serving.serve` is the whole path of a record while no keys move. The code for leaving keys is
in departure.py, for arriving keys in arrival.py, for a move that switches at once in switch.py. Writing to the central
store is in increments.py, restoring from it in restoration.py.

A message from another instance may be damaged, or of another version: the part accepts or refuses it as a whole
(incoming.py), and the coordinator receives the reason for a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, ClassVar

from whimbrel.core import incoming, wire
from whimbrel.core.delta import LARGE_DELTA, packed, unpacked
from whimbrel.core.departure import Departure
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.increments import Increments
from whimbrel.core.keys import EVERY_BIN, KeyMap, bin_of
from whimbrel.core.moves import Coming, Dumped, Leaving, Moves
from whimbrel.core.operator import Operator, uses_timers
from whimbrel.core.record import Barrier, Emissions, Fetch, Kind, Message, Move, Record
from whimbrel.core.replica import Replication, Standby
from whimbrel.core.restoration import Renewal, Restoration, evict
from whimbrel.core.router import move_in
from whimbrel.core.serving import Serving
from whimbrel.core.switch import SwitchIn, SwitchOut
from whimbrel.core.table import Entry, KeyTable

_KIND = itemgetter(Record._fields.index("kind"))
"""Read for every record, so as fast as possible."""


class Instance:
    """One part of one instance."""

    serving_type: ClassVar[type[Serving]] = Serving

    def __init__(
        self,
        name: str,
        operator: Operator,
        event_type: Any = Any,
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.name, self.part, self.parts = name, part, parts
        self.table = KeyTable(operator.State, event_type)
        self.serving = self.serving_type(name, operator, self.table)
        self.moves = Moves()
        self.epochs = KeyMap(0)
        self.positions: dict[str, int] = {}
        """By router: the last applied position in its stream."""
        self._timed = uses_timers(operator)
        self._moved = False
        """Whether the batch has changed the state of a move."""
        self._written = 0
        """The change count of the epochs when they were last written to a delta."""
        self._written_moves = b""
        """The moves as they were last written to a delta."""

    # ── A batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, records: Sequence[Record]) -> Emissions:
        """Apply one batch, in order: control lane first, then data by offset."""
        out = Emissions()
        is_plain = not self.moves.are_diverting and not any(map(_KIND, records))
        if is_plain:
            serve = self.serving.serve
            for record in records:
                serve(record, out)
        else:
            for record in records:
                self._handlers[record.kind](self, record, out)
        if self.moves.departures or self.moves.switches_out or not is_plain:
            self._note_positions(records)
        for replication in self.moves.replications.values():
            replication.note(self.table.touched)
        if self.moves.increments is not None:
            self.moves.increments.note(self.table.touched)
        self._seal(out)
        for sending in self.moves.sending():
            sending.ship(self, out)
        for switch in self.moves.switches_in.values():
            switch.ask(self, out)
        if self.table.is_dirty:  # shipped keys are dropped in this batch
            self._seal(out)
        return out

    @property
    def is_urgent(self) -> bool:
        """Whether keys are blocked, here or at the receiver, until a message comes through the control lane."""
        return self.moves.are_urgent

    def _note_positions(self, records: Sequence[Record]) -> None:
        """Update the position in each router's stream. Only leaving keys need it: BEGIN provides the start."""
        for record in records:
            if record.seq > self.positions.get(record.src, -1):
                self.positions[record.src] = record.seq

    # ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, record: Record, out: Emissions) -> None:
        """Fire the due timers of the keys whose records come through the tick's router.

        Only for those keys does a tick have an exact place in the stream, the same at every instance that reads it.
        A tick that a router held back or replays, together with a move's records, is for the keys of that move alone.
        """
        if not self._timed:
            return
        held_for = move_in(record.body) if record.body else None
        for keeping in self.moves.ticked():
            keeping.note_tick(record)
        later: list[tuple[int, str]] = []
        due = self.table.due
        while due and due[0][0] <= record.event_us:
            moment, key = heappop(due)
            entry = self.table.entries.get(key)
            if entry is None or not entry.timers or entry.timers[0] != moment:
                continue
            elsewhere = entry.src != record.src or (held_for is not None and key not in held_for.selection)
            if elsewhere or record.seq <= entry.seq or self._is_frozen(key, entry.src, held_for):
                later.append((moment, key))
            else:
                self.expire(entry, key, record, out, self._is_shadow(record._replace(key=key)))
        for item in later:
            heappush(due, item)

    def expire(self, entry: Entry, key: str, tick: Record, out: Emissions, silent: bool) -> None:
        """Apply a tick to one key."""
        self.table.touched.add(key)
        record = tick._replace(bin=bin_of(key), key=key, epoch=self.epoch_of(key, entry.src))
        self.serving.fire(entry, record, out, silent)

    def _is_frozen(self, key: str, src: str, held_for: Move | None) -> bool:
        """Whether the key's event time is frozen here: it has left, or is between two owners."""
        return any(role.is_frozen(src) and key in role.move.selection for role in self.moves.leaving()) or any(
            role.takes(key) and role.move != held_for and role.is_frozen(self, key, src) for role in self.moves.coming()
        )

    def _is_shadow(self, tick: Record) -> bool:
        return any(role.takes(tick.key) and role.silences(tick) for role in self.moves.coming())

    def epoch_of(self, key: str, src: str) -> int:
        """The epoch of a key at this part."""
        for role in self.moves.coming():
            if role.move and role.takes(key) and not role.is_silent(src):
                return role.move.epoch
        return self.epochs[key]

    # ── Moves: dispatch to roles ─────────────────────────────────────────────────────────────────────────────────

    def _data(self, record: Record, out: Emissions) -> None:
        moves = self.moves
        if moves.evictions and any(eviction.drops(record) for eviction in moves.evictions.values()):
            return
        if moves.undone and any(undone.drops(record) for undone in moves.undone.values()):
            return
        for role in moves.coming():
            if role.takes(record.key):
                role.follow(self, record, out)
                return
        if moves.switches_out and any(switch.takes(record.key) for switch in moves.switches_out.values()):
            self.table.buffer(record)
        else:
            self.serving.serve(record, out)

    def _mark(self, record: Record, out: Emissions) -> None:
        move, kind = move_in(record.body), Kind(record.kind)
        if self.moves.undone:
            self._moved = True
            over = [id for id, undone in self.moves.undone.items() if undone.mark(kind, move, record.src)]
            for id in over:
                del self.moves.undone[id]
        if not self.moves.has_ended(move.id):
            self._role(move, out).mark(self, kind, record, out)

    def _switch(self, record: Record, out: Emissions) -> None:
        move = move_in(record.body)
        if self.moves.has_ended(move.id):
            return
        if move.epoch > max(self.epochs.values(move.selection), default=0):  # else it is over: BEGIN came before
            self._role(move, out)

    def _role(self, move: Move, out: Emissions) -> Leaving | Coming:
        """This part's role in a move; created on the first message of the move."""
        self._moved = True
        moves = self.moves
        if move.replays:
            return moves.restorations.get(move.id) or Restoration(move=move)
        if move.source == self.name and move.switch:
            return moves.switches_out.setdefault(move.id, SwitchOut.of(move))
        if move.source == self.name:
            return moves.departures.setdefault(move.id, Departure.of(move))
        if move.switch:
            copies = moves.standbys.get(move.id)
            return moves.switches_in.setdefault(
                move.id, SwitchIn(move=move, rejected=copies.rejected if copies else "")
            )
        arrival = incoming.arrival_of(self, move.id, out)
        arrival.move = move
        return arrival

    def is_off(self, move: str) -> bool:
        """Whether this part ignores all further messages of a move."""
        return move in self.moves.aborted or self.moves.has_ended(move)

    # ── Moves: other messages ────────────────────────────────────────────────────────────────────────────────────

    def _hint(self, record: Record, out: Emissions) -> None:
        id, keys = wire.unpack(record.body, tuple[str, list[str]])
        if id in self.moves.switches_out and not self.is_off(id):  # else all keys have left, or are lost
            self.moves.switches_out[id].hint(self, keys)

    def _fetch(self, record: Record, out: Emissions) -> None:
        try:
            fetch = wire.unpack(record.body, Fetch)
        except (Corrupt, NewerFormat):
            for switch in self.moves.switches_out.values():
                switch.ask_for_all(self)
            return
        if fetch.move in self.moves.switches_out:  # else all keys have left, and SHIPPED is on its way
            self.moves.switches_out[fetch.move].ask(self, fetch)

    def _replicate(self, record: Record, out: Emissions) -> None:
        move = move_in(record.body)
        if self.is_off(move.id):
            return
        self._moved = True
        if move.source == self.name:
            keys = {key for key in self.table.entries if key in move.selection}
            self.moves.replications[move.id] = Replication.of(move, keys)
        else:
            self.moves.standbys[move.id] = Standby(move=move)

    def _cease(self, record: Record, out: Emissions) -> None:
        """Stop a standby. This part may not know it, if the coordinator failed before it could announce it."""
        move = move_in(record.body)
        if self.is_off(move.id):
            return
        self._moved = True
        if move.source == self.name:
            self.moves.replications.pop(move.id, Replication.of(move)).cease(self, out)
        else:
            self.moves.standbys.pop(move.id, Standby(move=move)).cease(self, out)

    def _forget(self, record: Record, out: Emissions) -> None:
        self._moved = True
        self.moves.aborted.discard(wire.unpack(record.body, str))

    def _renew(self, record: Record, out: Emissions) -> None:
        self._moved = True
        wire.unpack(record.body, Renewal).apply(self, out)

    def _wake_up(self, record: Record, out: Emissions) -> None:
        """A WAKE without a body comes from the host at its start. The host may run another version, so refused messages
        are retried. Here and not while loading: a batch repeated after a restart must do what it did before."""
        if not record.body and incoming.has_refused(self):
            incoming.try_again(self, out)

    def _save(self, record: Record, out: Emissions) -> None:
        save = wire.unpack(record.body, Barrier)
        self._moved = True
        if self.moves.increments is None:
            self.moves.increments = Increments.of(self)
        self.moves.increments.begin(self, record, save)

    def _discard(self, record: Record, out: Emissions) -> None:
        """A restoration takes keys away. At its destination RESTORE may have come first: then the state is new."""
        move = move_in(record.body)
        self._moved = True
        if move.id not in self.moves.evictions:
            evict(self, move)
        self.moves.evictions[move.id].mark(self, record, out)

    def _restore_keys(self, record: Record, out: Emissions) -> None:
        """Keys will be loaded from the store. A repeated RESTORE is ignored if they have been, else it restarts."""
        move = move_in(record.body)
        known = self.moves.restorations.get(move.id)
        is_over = move.epoch <= max(self.epochs.values(move.selection), default=0)
        is_off = self.moves.has_ended(move.id) or move.id in self.moves.undone
        if is_over or is_off or (known is not None and known.ready):
            return
        self._moved = True
        evict(self, move)
        self.moves.restorations[move.id] = Restoration(move=move)

    _handlers: ClassVar[dict[int, Callable[[Instance, Record, Emissions], None]]] = {
        Kind.DATA: _data,
        Kind.TICK: _tick,
        Kind.BEGIN: _mark,
        Kind.CUTOVER: _mark,
        Kind.ABORT: _mark,
        Kind.PARCEL: incoming.take,
        Kind.SHIPPED: incoming.take,
        Kind.FORGET: _forget,
        Kind.WAKE: _wake_up,
        Kind.SWITCH: _switch,
        Kind.PASSED: incoming.take,
        Kind.HINT: _hint,
        Kind.FETCH: _fetch,
        Kind.REPLICATE: _replicate,
        Kind.CEASE: _cease,
        Kind.REPLICA: incoming.take,
        Kind.REPLICATED: incoming.take,
        Kind.BARRIER: _save,
        Kind.DISCARD: _discard,
        Kind.RESTORE: _restore_keys,
        Kind.RENEW: _renew,
    }

    # ── Moves: what departures and arrivals use ──────────────────────────────────────────────────────────────────

    def keys_in(self, move: Move) -> list[str]:
        """The selected keys that this part holds, in an order that depends only on the keys."""
        return sorted(key for key in self.table.entries if key in move.selection)

    def message(self, to: str, kind: Kind, body: Any = None, bin: int = EVERY_BIN) -> Message:
        """A message to the control lane of an instance."""
        return Message(to, kind, bin, wire.canonical(body))

    # ── Deltas and snapshots ─────────────────────────────────────────────────────────────────────────────────────

    def note_move(self) -> None:
        """The batch has changed the state of a move: write it with the next delta."""
        self._moved = True

    def _seal(self, out: Emissions) -> None:
        self.table.seal(lambda key, entry: self.serving.redo(key, entry, out))

    def deltas(self, limit: int = LARGE_DELTA) -> list[bytes]:
        """What changed since the last call, for the state store. Usually one blob, never a large one."""
        delta = self.table.take_delta()
        delta.positions = self.positions
        if self._moved or self.moves.are_open:
            self.moves.epochs = self.epochs.dump() if self.epochs.changes != self._written else None
            self._written = self.epochs.changes
            moves = wire.encode(self.moves)
            # A delta without moves changes them nevertheless: its keys count as changed since the last increment.
            if moves != self._written_moves or (self.moves.increments is not None and delta.entries):
                delta.moves = self._written_moves = moves
            self._moved = False
        return packed(delta, limit)

    def snapshot(self, limit: int = LARGE_DELTA) -> list[bytes]:
        """The whole state in the form of deltas: the result of compacting a longer list of them."""
        self.moves.epochs, self._written_moves = self.epochs.dump(), b""
        whole = self.table.whole()
        whole.positions, whole.moves = self.positions, wire.encode(self.moves)
        return packed(whole, limit)

    def load(self, deltas: Iterable[bytes]) -> None:
        """Apply deltas in order, to a fresh instance or to one that has applied all earlier ones."""
        found = epochs = None
        changed: list[str] = []
        for delta in unpacked(deltas):
            self.table.add(delta)
            self.positions = delta.positions
            changed += delta.entries
            if delta.moves:  # whole, so only the last ones count, except that they may lack the epochs
                found, changed = delta.moves, []
                epochs = wire.decode(delta.moves, Dumped).epochs or epochs
        if found is not None:
            self.moves, self._written_moves = wire.decode(found, Moves), found
        if epochs is not None:
            self.epochs.restore(epochs)
            self._written = self.epochs.changes
        if self.moves.increments is not None:
            self.moves.increments.note(changed)
        self.table.index()
