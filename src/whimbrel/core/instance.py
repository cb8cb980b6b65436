"""An instance of a stage: applies records to the state of its keys and says what follows from them.

Stands between the inbox and the outbox. No I/O, no clock, no threads: records in (`apply`), emissions out; what
changed since the last batch (`delta`), and a way to become what such deltas describe (`load`).

An instance may be cut into parts (Spark calls one part a group): each holds the bins with `bin % parts == part` and
knows nothing of the others. Markers and ticks reach every part.

Reading order: `apply` → `_serve` is the whole life of a record while nothing moves. What a part does while keys leave
is in departure.py, while keys come in arrival.py; a move that switches at once is in switch.py. What goes to the
central store is in saving.py, what comes out of it in restoration.py.

What comes from another instance may be damaged, or of another version: it is taken as a whole or refused as a whole
(`_arrive`), and the coordinator hears why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Any, ClassVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.arrival import Arrival, Receiver
from whimbrel.core.delta import LARGE_DELTA, Delta, Gathered, Moves, packed, unpacked
from whimbrel.core.departure import Departure
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.keys import EVERY_BIN, KeyMap, bin_of
from whimbrel.core.operator import RECORD, TIMER, Context, Operator, shape_of, takes_context, uses_timers
from whimbrel.core.record import (
    Buffered,
    Emissions,
    Fetch,
    Kind,
    Luggage,
    Move,
    Parcel,
    Parked,
    Passed,
    Post,
    Record,
    Rejected,
    Result,
    Save,
    Shipped,
)
from whimbrel.core.replica import Replication, Standby
from whimbrel.core.restoration import Restoration, evict
from whimbrel.core.saving import Saving
from whimbrel.core.switch import SwitchIn, SwitchOut

PLAIN = frozenset({str, float, int, bool, bytes, type(None)})
"""Types of values that can be written without a look at them; integers of any size excepted."""
LAPSED = -1
"""The kind of a record that stands for a timer given up; it exists in `Entry.since` only."""


_KIND = itemgetter(Record._fields.index("kind"))
"""Asked of every record: as fast as it goes."""

REFUSED = " "
"""Where messages are gathered that were refused and cannot be had again; no move and no key has this name."""

LARGE = 1 << 20
"""A larger state is kept in its stored form only between batches, not decoded as well."""


@lru_cache(maxsize=16)
def _move(body: bytes) -> Move:
    """The move that a marker tells of: every part of an instance gets the marker, and they share what it says."""
    return wire.unpack(body, Move)


class Entry:
    """One key of an instance. `saved` is its state at the end of the last batch, `since` what was done after, and
    whether in silence."""

    __slots__ = ("offset", "saved", "seq", "since", "src", "state", "timers")

    def __init__(self, state: Any, saved: Luggage | None = None) -> None:
        self.state = state
        self.saved = saved
        self.seq, self.src, self.timers = (saved.seq, saved.src, list(saved.timers)) if saved else (-1, "", [])
        self.since: list[tuple[Record, bool]] = []
        self.offset = -1


class Instance:
    """One part of one instance."""

    def __init__(
        self,
        name: str,
        operator: Operator,
        event_type: Any = Any,
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.name, self.operator, self.part, self.parts = name, operator, part, parts
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, list[Record]] = {}
        self.replicas: dict[str, Luggage] = {}
        """Copies of others' keys, if this is their standby."""
        self.stashed: dict[str, Luggage] = {}
        """By move and key: large states that are leaving in pieces, as they were when the first piece left."""
        self.gathered: dict[str, list[bytes]] = {}
        """By move and key: pieces of large states that are coming."""
        self.moves = Moves()
        self.epochs = KeyMap(0)
        self.positions: dict[str, int] = {}
        self.duplicates = 0
        self.state_bytes = 0
        """How much state there is, as it is stored."""
        self.shape = shape_of(operator.State)

        self._event = msgspec.msgpack.Decoder(event_type)
        self._state: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(operator.State)
        self._encode = wire.encode
        self._careful = False
        self._context = Context()
        self._extra: tuple[Context, ...] = (self._context,) if takes_context(operator) else ()
        self._timed = uses_timers(operator)
        self._due: list[tuple[int, str]] = []
        self._touched: set[str] = set()
        self._waited: set[str] = set()
        self._moved = False
        self._told = 0
        """How often the epochs had changed when a delta last had them."""
        self._delta = Delta()
        # Where `emit` writes to: the record being applied, its next result number, and the results (None: silent).
        self._record: Record = Record(0, 0, 0, "", 0, 0, "", 0, 0, None)
        self._number = 0
        self._sink: list[Result] | None = None

    def weigh(self) -> int:
        """How many bytes of state there are, with those that are on their way through here and others' copies."""
        aside = (*self.stashed.values(), *self.replicas.values())
        pieces = sum(len(piece) for pieces in self.gathered.values() for piece in pieces)
        return self.state_bytes + pieces + sum(len(luggage.state) for luggage in aside)

    # ── A batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, records: Sequence[Record]) -> Emissions:
        """Apply one batch, in order: control lane first, then data by offset."""
        out = Emissions()
        is_plain = not self.moves.are_diverting and not any(map(_KIND, records))
        if is_plain:
            for record in records:
                self._serve(record, out)
        else:
            for record in records:
                self._handlers[record.kind](self, record, out)
        if self.moves.departures or not is_plain:
            self._note_positions(records)
        for replication in self.moves.replications.values():
            replication.note(self._touched)
        if self.moves.saving is not None:
            self.moves.saving.note(self._touched)
        self._seal(out)
        if self.moves.saving is not None:
            self.moves.saving.ship(self, out)
        for departure in self.moves.departures.values():
            departure.ship(self, out)
        for replication in self.moves.replications.values():
            replication.ship(self, out)
        for arrival in self.moves.arrivals.values():
            arrival.ask(self, out)
        if self._touched or self._waited:  # what has been shipped is forgotten with this batch
            self._seal(out)
        return out

    @property
    def hurries(self) -> bool:
        """Whether keys stand still for something that is to come through the control lane, here or where it goes."""
        return any(role.hurries for role in (*self.moves.arrivals.values(), *self.moves.departures.values()))

    def _note_positions(self, records: Sequence[Record]) -> None:
        """How far we have come in each router's stream. Only keys that leave must know: BEGIN says where it starts."""
        for record in records:
            if record.seq > self.positions.get(record.src, -1):
                self.positions[record.src] = record.seq

    def _serve(self, record: Record, out: Emissions, silent: bool = False) -> None:
        """Apply one data record to its key: the normal case, and the same code when a shadow follows silently."""
        entry = self.entries.get(record.key)
        if entry is None:
            entry = self.entries[record.key] = Entry(self.operator.State())
        elif record.seq <= entry.seq and self.is_duplicate(entry, record):
            self.duplicates += 1
            return
        self._touched.add(record.key)
        if entry.timers and entry.timers[0] <= record.event_us:
            self._fire(entry, record, out, silent)
        self._attempt(entry, record, out, silent)

    def is_duplicate(self, entry: Entry, record: Record) -> bool:
        """Whether the key has this record, which is not newer than the last one, already: rows that `prepare` made of
        one record share its offset."""
        return not (record.seq == entry.seq and record.offset == entry.offset)

    def _process(self, entry: Entry, record: Record) -> None:
        key, context = record.key, self._context
        if self._extra:
            context.key, context.now_us, context.seq, context.timers = key, record.event_us, record.seq, entry.timers
            context.chance = RECORD
        self.operator.process(key, record.body, entry.state, self._emit, *self._extra)

    def _attempt(self, entry: Entry, record: Record, out: Emissions, silent: bool) -> bool:
        """Let the operator act once, on a record or on a timer; undo and try again if it raises; park it if it goes on.

        Returns whether it succeeded. What fails, fails alone: a record's timers are attempts of their own.
        """
        same = record.seq == entry.seq and record.offset == entry.offset
        self._record, self._sink = record, None if silent else out.results
        self._number = first = self._number if same else 0
        if entry.state is None:
            assert entry.saved is not None
            entry.state = self._decode(entry.saved)
        due = entry.timers[0] if entry.timers else None
        mark = len(out.results)
        act = self._acts[record.kind]
        done = False
        for left in reversed(range(max(1, self.operator.tries))):
            try:
                act(self, entry, record)
                if self._careful:
                    self._encode(entry.state)
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
            heappush(self._due, (entry.timers[0], self._record.key))
        return done

    def _emit(self, /, **values: Any) -> None:
        for value in values.values():
            if type(value) not in PLAIN or (type(value) is int and not -(1 << 63) <= value < 1 << 64):
                self._encode(value)  # raises here, where the operator can see it, not when the batch is written
        if self._sink is not None:
            record = self._record
            self._sink.append(
                Result(
                    record.key,
                    record.epoch,
                    record.seq,
                    self._number,
                    record.event_us,
                    record.ingress_us,
                    values,
                )
            )
        self._number += 1

    # ── An operator that raises ──────────────────────────────────────────────────────────────────────────────────

    def _undo(self, entry: Entry) -> None:
        """Bring a key back to where it was before the record that raised: last batch's state, replayed in silence."""
        self._restore(entry)
        self._sink = None
        for past, _ in entry.since:
            self._record = past
            self._acts[past.kind](self, entry, past)

    def _restore(self, entry: Entry) -> None:
        before = Entry(self._decode(entry.saved) if entry.saved else self.operator.State(), entry.saved)
        entry.state, entry.timers = before.state, before.timers

    def _redo(self, key: str, entry: Entry, out: Emissions) -> None:
        """A key's state cannot be stored: do its batch again, looking after each record, and park the one to blame."""
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
        told = msgspec.json.encode(event, enc_hook=repr).decode()
        out.notices.append(Parked(self.name, record.key, record.seq, record.src, reason, told, record.epoch))

    # ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, record: Record, out: Emissions) -> None:
        """Fire the timers that are due, of the keys whose records come through the tick's router.

        Only there has a tick an exact place in the key's stream, the same at every instance that follows it.
        A tick that a router held back or replays, together with a move's records, is for the keys of that move alone.
        """
        if not self._timed:
            return
        held_for = _move(record.body) if record.body else None
        for role in (*self.moves.arrivals.values(), *self.moves.departures.values()):
            role.note_tick(record)
        later: list[tuple[int, str]] = []
        while self._due and self._due[0][0] <= record.event_us:
            moment, key = heappop(self._due)
            entry = self.entries.get(key)
            if entry is None or not entry.timers or entry.timers[0] != moment:
                continue
            elsewhere = entry.src != record.src or (held_for is not None and key not in held_for.selection)
            if elsewhere or record.seq <= entry.seq or self._is_frozen(key, entry.src, held_for):
                later.append((moment, key))
            else:
                self.expire(entry, key, record, out, self._is_shadow(record._replace(key=key)))
        for item in later:
            heappush(self._due, item)

    def expire(self, entry: Entry, key: str, tick: Record, out: Emissions, silent: bool) -> None:
        """Let a tick reach one key."""
        self._touched.add(key)
        record = tick._replace(bin=bin_of(key), key=key, epoch=self.epoch_of(key, entry.src))
        self._fire(entry, record, out, silent)

    def _fire(self, entry: Entry, record: Record, out: Emissions, silent: bool) -> None:
        """Let the timers that are due by a record's time fire, one after the other, before the record itself."""
        timer = record._replace(kind=Kind.TICK)
        while entry.timers and entry.timers[0] <= record.event_us:
            if not self._attempt(entry, timer, out, silent):
                self._attempt(entry, timer._replace(kind=LAPSED), out, silent)

    def _expire(self, entry: Entry, record: Record) -> None:
        context = self._context
        context.key, context.now_us, context.seq = record.key, entry.timers.pop(0), record.seq
        context.timers, context.chance = entry.timers, TIMER
        self.operator.on_timer(record.key, entry.state, self._emit, context)

    def _lapse(self, entry: Entry, record: Record) -> None:
        """A timer on which the operator always raises is gone: kept, it would come back with every later record."""
        entry.timers.pop(0)

    _acts: ClassVar[dict[int, Callable[[Instance, Entry, Record], None]]] = {
        Kind.DATA: _process,
        Kind.TICK: _expire,
        LAPSED: _lapse,
    }

    def _is_frozen(self, key: str, src: str, held_for: Move | None) -> bool:
        """Whether the key's time stands still here: it has left, or waits between two owners."""
        return any(d.is_frozen(src) and key in d.move.selection for d in self.moves.departures.values()) or any(
            a.takes(key) and a.move != held_for and a.is_frozen(self, key, src) for a in self.moves.arrivals.values()
        )

    def _is_shadow(self, tick: Record) -> bool:
        return any(arrival.takes(tick.key) and arrival.silences(tick) for arrival in self.moves.arrivals.values())

    def epoch_of(self, key: str, src: str) -> int:
        """The epoch in which a key is here."""
        for arrival in self.moves.arrivals.values():
            if arrival.move and arrival.takes(key) and not arrival.is_silent(src):
                return arrival.move.epoch
        return self.epochs[key]

    # ── Moves: who is concerned ──────────────────────────────────────────────────────────────────────────────────

    def _data(self, record: Record, out: Emissions) -> None:
        if any(eviction.drops(record) for eviction in self.moves.evictions.values()):
            return
        for arrival in self.moves.arrivals.values():
            if arrival.takes(record.key):
                arrival.follow(self, record, out)
                return
        if any(departure.takes(record.key) for departure in self.moves.departures.values()):
            self.buffer(record)
        else:
            self._serve(record, out)

    def _mark(self, record: Record, out: Emissions) -> None:
        move = _move(record.body)
        if move.id not in self.moves.ended:
            self._role(move, out).mark(self, Kind(record.kind), record, out)

    def _switch(self, record: Record, out: Emissions) -> None:
        move = _move(record.body)
        if move.id in self.moves.ended:
            return
        if move.epoch > max(self.epochs.values(move.selection), default=0):  # or it is over: BEGIN was here before
            self._role(move, out)

    def _role(self, move: Move, out: Emissions) -> Departure | SwitchOut | Arrival | SwitchIn | Restoration:
        """Our part in a move; a new one if we hear of it for the first time."""
        self._moved = True
        if move.routing == "replay":
            return self.moves.arrivals.setdefault(move.id, Restoration(move=move))
        if move.source == self.name:
            fresh = SwitchOut(move=move) if move.switch else Departure(move=move)
            return self.moves.departures.setdefault(move.id, fresh)
        if move.switch:
            copies = self.moves.standbys.get(move.id)
            coming = SwitchIn(move=move, rejected=copies.rejected if copies else "")
            return self.moves.arrivals.setdefault(move.id, coming)
        arrival = self._arrival(move.id, out)
        if isinstance(arrival, Arrival):
            arrival.move = move
        return arrival

    def _is_off(self, move: str) -> bool:
        """Whether nothing that is still said of a move counts here."""
        return move in self.moves.aborted or move in self.moves.ended

    def _arrival(self, id: str, out: Emissions) -> Arrival | SwitchIn | Restoration:
        """Our part in a move that brings keys, though only its parcels may have come."""
        if id not in self.moves.arrivals:
            self.moves.arrivals[id] = Arrival()
            if self.moves.unread:
                self.turn_down({id: self.moves.arrivals[id]}, self.moves.unread, out)
                self.moves.unread = ""
        return self.moves.arrivals[id]

    def _arrive(self, record: Record, out: Emissions) -> None:
        """Something comes from another instance: take all of it, or nothing."""
        try:
            message = wire.unpack(record.body, self._messages[record.kind])
            if self._is_off(message.move):
                return
            copies = record.kind in (Kind.REPLICA, Kind.REPLICATED)
            role = self.moves.standbys.get(message.move) if copies else self._arrival(message.move, out)
            if role is None:
                return
            self._moved |= record.kind != Kind.REPLICA or message.pieces > 1
            if role.rejected and role.keeps:
                self._keep(record)
            elif isinstance(message, Parcel):
                role.install(self, message, out)
            elif isinstance(message, Shipped):
                role.complete(self, message, out)
            elif isinstance(role, SwitchIn):
                role.pass_on(self, message, out)
            else:
                raise Corrupt(f"move {message.move} passes nothing on")
        except (Corrupt, NewerFormat) as error:
            self._reject(record, error, out)

    _messages: ClassVar[dict[int, Any]] = {
        Kind.PARCEL: Parcel,
        Kind.REPLICA: Parcel,
        Kind.SHIPPED: Shipped,
        Kind.REPLICATED: Shipped,
        Kind.PASSED: Passed,
    }

    # ── Moves: what cannot be taken ──────────────────────────────────────────────────────────────────────────────

    def _reject(self, record: Record, error: Exception, out: Emissions) -> None:
        """Refuse what came with a move. If it cannot be read, it may have come with any that is not complete, and with
        one that has not begun here: the next to do so is called off as well."""
        self._moved = True
        copies = record.kind in (Kind.REPLICA, Kind.REPLICATED)
        reason = f"{self.name} refuses a {Kind(record.kind).name}: {error}"
        roles: dict[str, Receiver] = {**(self.moves.standbys if copies else self.moves.arrivals)}
        try:
            id = wire.unpack(record.body, self._messages[record.kind]).move
            roles = {id: roles[id]}
        except (Corrupt, NewerFormat):
            self.moves.unread = self.moves.unread if copies else f"{reason}; it came before this move had begun"
        concerned = {id: role for id, role in roles.items() if not role.ready}
        self.turn_down(concerned, reason, out)
        if any(role.keeps for role in concerned.values()):
            self._keep(record)

    def turn_down(self, roles: Mapping[str, Receiver], reason: str, out: Emissions) -> bool:
        """These cannot become ready (True); whoever can call them off is told why."""
        for id, role in roles.items():
            if not role.rejected:
                role.rejected = reason
                out.notices.append(Rejected(id, self.name, self.part, self.parts, reason))
        return True

    def _keep(self, record: Record) -> None:
        """Keep a message that nobody else has, until it can be read."""
        blob = wire.pack((record.kind, record.body))
        self.gathered.setdefault(REFUSED, []).append(blob)
        self._delta.gathered.setdefault(REFUSED, Gathered(anew=False)).added.append(blob)

    def _try_again(self, out: Emissions) -> None:
        """Look once more at what was refused, in the order in which it came: this may be another version."""
        self._moved = True
        kept = self.gathered.pop(REFUSED)
        self._delta.gathered[REFUSED] = Gathered(anew=True)
        for role in (*self.moves.arrivals.values(), *self.moves.standbys.values()):
            role.rejected = "" if role.keeps else role.rejected
        for blob in kept:
            kind, body = wire.unpack(blob, tuple[int, bytes])
            self._arrive(Record(0, kind, EVERY_BIN, "", -1, 0, "", 0, 0, body), out)

    def check(self, key: str, luggage: Luggage, shape: str, strict: bool) -> None:
        """Raise `Corrupt` if a state is none of this operator's. `shape`: of states where it comes from; those of the
        same class are as their operator made them, whatever that is."""
        if shape == self.shape:
            return
        try:
            if strict or shape:
                self._state.decode(luggage.state)
            else:
                self._decode(luggage)
        except (ValueError, RecursionError, Corrupt) as error:
            name = f"{type(self.operator).__name__}.State"
            raise Corrupt(f"the state of key {key!r} is no {name} as it is here: {error}") from error

    def received(self, records: Iterable[Buffered]) -> list[Record]:
        """Records that were sent on, or stored. Raises `Corrupt` if their events are none of this stage's."""
        try:
            return [self.restored(record) for record in records]
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"a record that waited for its key is none of this stage's as it is here: {error}") from error

    # ── Moves: the rest ──────────────────────────────────────────────────────────────────────────────────────────

    def _hint(self, record: Record, out: Emissions) -> None:
        id, keys = wire.unpack(record.body, tuple[str, list[str]])
        if self._is_off(id):
            return
        departure = self.moves.departures[id]
        assert isinstance(departure, SwitchOut)
        departure.hint(self, keys)

    def _fetch(self, record: Record, out: Emissions) -> None:
        try:
            fetch = wire.unpack(record.body, Fetch)
        except (Corrupt, NewerFormat):
            for leaving in self.moves.departures.values():
                if isinstance(leaving, SwitchOut):
                    leaving.ask_for_all(self)
            return
        departure = self.moves.departures.get(fetch.move)
        if isinstance(departure, SwitchOut):  # or all of it has left, and the destination will hear of that
            departure.ask(self, fetch)

    def _replicate(self, record: Record, out: Emissions) -> None:
        move = _move(record.body)
        if self._is_off(move.id):
            return
        self._moved = True
        if move.source == self.name:
            keys = {key for key in self.entries if key in move.selection}
            self.moves.replications[move.id] = Replication(move=move, lacking=keys)
        else:
            self.moves.standbys[move.id] = Standby(move=move)

    def _cease(self, record: Record, out: Emissions) -> None:
        """A standby is not wanted. We may never have heard of it: its coordinator died before it could tell us."""
        move = _move(record.body)
        if self._is_off(move.id):
            return
        self._moved = True
        if move.source == self.name:
            self.moves.replications.pop(move.id, Replication(move=move)).cease(self, out)
        else:
            self.moves.standbys.pop(move.id, Standby(move=move)).cease(self, out)

    def _forget(self, record: Record, out: Emissions) -> None:
        self._moved = True
        self.moves.aborted.discard(wire.unpack(record.body, str))

    def _nudge(self, record: Record, out: Emissions) -> None:
        """One without a body comes from the host at its start: it may be another version, so what was refused is tried
        again. Here and not while loading: a batch that is repeated after a restart must do what it did before."""
        if not record.body and REFUSED in self.gathered:
            self._try_again(out)

    def _save(self, record: Record, out: Emissions) -> None:
        save = wire.unpack(record.body, Save)
        self._moved = True
        if self.moves.saving is None:
            self.moves.saving = Saving.of(self)
        self.moves.saving.begin(self, record, save)

    def _discard(self, record: Record, out: Emissions) -> None:
        """A restoration takes keys away. Its destination may have heard of it before: then what is here is new."""
        move = _move(record.body)
        self._moved = True
        if move.id not in self.moves.evictions:
            evict(self, move)
        self.moves.evictions[move.id].mark(self, record, out)

    def _restore_keys(self, record: Record, out: Emissions) -> None:
        """Keys will come out of the store. Said again, it comes too late if they have come, and else begins anew."""
        move = _move(record.body)
        known = self.moves.arrivals.get(move.id)
        is_over = move.epoch <= max(self.epochs.values(move.selection), default=0)
        if is_over or move.id in self.moves.ended or (isinstance(known, Restoration) and known.ready):
            return
        self._moved = True
        evict(self, move)
        self.moves.arrivals[move.id] = Restoration(move=move)

    _handlers: ClassVar[dict[int, Callable[[Instance, Record, Emissions], None]]] = {
        Kind.DATA: _data,
        Kind.TICK: _tick,
        Kind.BEGIN: _mark,
        Kind.CUTOVER: _mark,
        Kind.ABORT: _mark,
        Kind.PARCEL: _arrive,
        Kind.SHIPPED: _arrive,
        Kind.FORGET: _forget,
        Kind.NUDGE: _nudge,
        Kind.SWITCH: _switch,
        Kind.PASSED: _arrive,
        Kind.HINT: _hint,
        Kind.FETCH: _fetch,
        Kind.REPLICATE: _replicate,
        Kind.CEASE: _cease,
        Kind.REPLICA: _arrive,
        Kind.REPLICATED: _arrive,
        Kind.SAVE: _save,
        Kind.DISCARD: _discard,
        Kind.RESTORE: _restore_keys,
    }

    # ── Moves: what departures and arrivals ask of an instance ───────────────────────────────────────────────────

    def keys_in(self, move: Move) -> list[str]:
        """The selected keys that are here, in an order that depends on nothing but the keys."""
        return sorted(key for key in self.entries if key in move.selection)

    def install(self, key: str, luggage: Luggage) -> Entry:
        """Take over a key's state as it came; it is decoded when a record needs it."""
        entry = self.entries[key] = Entry(None, luggage)
        self.state_bytes += len(luggage.state)
        self._touched.add(key)
        if entry.timers:
            heappush(self._due, (entry.timers[0], key))
        return entry

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these keys' states."""
        for key in keys:
            saved = self.entries.pop(key).saved
            self.state_bytes -= len(saved.state) if saved else 0
            self._touched.add(key)

    def keep_replica(self, key: str, luggage: Luggage | None) -> None:
        """Keep a copy of a key that lives elsewhere, or forget it."""
        self._delta.replicas[key] = luggage
        if luggage is None:
            del self.replicas[key]
        else:
            self.replicas[key] = luggage

    def stash(self, place: str, luggage: Luggage | None) -> None:
        """Keep a large state as it is now until its last piece has left, or forget it."""
        self._delta.stashed[place] = luggage
        if luggage is None:
            del self.stashed[place]
        else:
            self.stashed[place] = luggage

    def gather(self, move: str, key: str, number: int, piece: bytes) -> list[bytes]:
        """Keep a piece of a large state that comes with a move; return all that have come."""
        if not number:
            self.scatter(move, key)
        place = f"{move} {key}"
        pieces = self.gathered.setdefault(place, [])
        if number == len(pieces):
            pieces.append(piece)
            self._delta.gathered.setdefault(place, Gathered(anew=False)).added.append(piece)
        return pieces

    def scatter(self, move: str, key: str = "") -> None:
        """Keep no pieces of a key, or of any, that came with a move."""
        for place in [place for place in self.gathered if place.startswith(f"{move} {key}")]:
            if not key or place == f"{move} {key}":
                del self.gathered[place]
                self._delta.gathered[place] = Gathered(anew=True)

    def promote(self, key: str) -> None:
        """A key lives here now: its copy, if there is one, becomes its state."""
        luggage = self.replicas.get(key)
        if luggage is not None:
            self.keep_replica(key, None)
            if key not in self.entries:
                self.install(key, luggage)

    def buffer(self, record: Record) -> None:
        """Keep a record until its key's state is here."""
        self.waiting.setdefault(record.key, []).append(record)
        self._waited.add(record.key)

    def unbuffer(self, key: str) -> list[Record]:
        """Give back what was kept for a key."""
        self._waited.add(key)
        return self.waiting.pop(key, [])

    def post(self, to: str, kind: Kind, body: Any = None, bin: int = EVERY_BIN) -> Post:
        """A message to the control lane of an instance."""
        return Post(to, kind, bin, wire.canonical(body))

    # ── What lasts ───────────────────────────────────────────────────────────────────────────────────────────────

    def _seal(self, out: Emissions) -> None:
        """End a batch: encode what it touched, once, for the state store and for parcels alike."""
        delta = self._delta
        for key in self._touched:
            entry = self.entries.get(key)
            if entry is None:
                delta.entries[key] = None
                continue
            if entry.state is not None:
                try:
                    state = self._encode(entry.state)
                except (TypeError, ValueError, OverflowError):
                    self._redo(key, entry, out)
                    state = self._encode(entry.state)
                self.state_bytes += len(state) - (len(entry.saved.state) if entry.saved else 0)
                entry.saved = Luggage(entry.seq, entry.src, list(entry.timers), state)
                if len(state) > LARGE:
                    entry.state = None
            entry.since = []
            delta.entries[key] = entry.saved
        for key in self._waited:
            held = self.waiting.get(key)
            delta.waiting[key] = [self.stored(record) for record in held] if held else None
        self._touched.clear()
        self._waited.clear()

    def _decode(self, luggage: Luggage) -> Any:
        """A key's state. One whose values are not what its class says is taken as it is: its operator made it so."""
        try:
            return self._state.decode(luggage.state)
        except msgspec.ValidationError:
            return self._as_it_is(luggage.state)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"a state that is none: {error}") from error

    def _as_it_is(self, blob: bytes) -> Any:
        state = self.operator.State()
        try:
            for name, value in msgspec.msgpack.decode(blob).items():
                setattr(state, name, value)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Corrupt(f"a state that is none: {error}") from error
        return state

    def deltas(self, limit: int = LARGE_DELTA) -> list[bytes]:
        """What changed since the last call, for whoever keeps this instance's state. Usually one blob, never large."""
        delta, self._delta = self._delta, Delta()
        delta.positions = self.positions
        if self._moved or self.moves.are_open:
            self.moves.epochs = self.epochs.dump() if self.epochs.changes != self._told else None
            self._told = self.epochs.changes
            delta.moves = self.moves
            self._moved = False
        return packed(delta, limit)

    def snapshot(self, limit: int = LARGE_DELTA) -> list[bytes]:
        """Everything, in the form of deltas: what a longer list of them is compacted to."""
        self.moves.epochs = self.epochs.dump()
        entries = {key: entry.saved for key, entry in self.entries.items()}
        waiting = {key: [self.stored(record) for record in held] for key, held in self.waiting.items()}
        gathered = {key: Gathered(anew=True, added=list(pieces)) for key, pieces in self.gathered.items()}
        whole = Delta(entries, {**waiting}, {**self.replicas}, self.positions, self.moves, {**self.stashed}, gathered)
        return packed(whole, limit)

    def load(self, deltas: Iterable[bytes]) -> None:
        """Become what these deltas, in order, describe: for a fresh instance, or one that has all those before."""
        kept: dict[str, dict[str, Any]] = {
            "entries": self.entries,
            "replicas": self.replicas,
            "stashed": self.stashed,
        }
        for delta in unpacked(deltas):
            for field, held in kept.items():
                changed: dict[str, Luggage | None] = getattr(delta, field)
                for key, luggage in changed.items():
                    if luggage is None:
                        held.pop(key, None)
                    else:
                        held[key] = Entry(None, luggage) if field == "entries" else luggage
            for key, records in delta.waiting.items():
                if records is None:
                    self.waiting.pop(key, None)
                else:
                    self.waiting[key] = self.received(records)
            for key, pieces in delta.gathered.items():
                if pieces.anew:
                    self.gathered.pop(key, None)
                if pieces.added:
                    self.gathered.setdefault(key, []).extend(pieces.added)
            self.positions = delta.positions
            if self.moves.saving is not None:
                self.moves.saving.note(delta.entries)
            if delta.moves is not None:
                self.moves = delta.moves
                if delta.moves.epochs is not None:
                    self.epochs.restore(delta.moves.epochs)
        self.state_bytes = sum(len(entry.saved.state) for entry in self.entries.values() if entry.saved)
        self._due = [(entry.timers[0], key) for key, entry in self.entries.items() if entry.timers]
        heapify(self._due)

    def stored(self, record: Record) -> Buffered:
        """A record that waits, in the form in which it lasts and travels."""
        r = record
        body = self._encode(r.body)
        return Buffered(r.offset, r.bin, r.key, r.seq, r.epoch, r.src, r.event_us, r.ingress_us, body)

    def restored(self, b: Buffered) -> Record:
        """The record again."""
        body = self._event.decode(b.body)
        return Record(b.offset, Kind.DATA, b.bin, b.key, b.seq, b.epoch, b.src, b.event_us, b.ingress_us, body)
