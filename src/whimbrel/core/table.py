"""The keys of one part of an instance: their states, what waits for them, and what has changed since the last batch.

Knows no protocol. Beside the keys that live here it holds what is on its way through: records that wait for their key's
state, copies of keys that live elsewhere, large states that leave or come in pieces. All of it lasts as deltas
(delta.py): `seal` ends a batch, `take_delta` says what it changed, `add` becomes what such deltas describe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heapify, heappush
from typing import Any

import msgspec

from whimbrel.core import wire
from whimbrel.core.delta import Delta, Gathered
from whimbrel.core.errors import Corrupt
from whimbrel.core.operator import State, shape_of
from whimbrel.core.record import Buffered, KeyState, Kind, Record

LARGE = 1 << 20
"""A larger state is kept in its stored form only between batches, not decoded as well."""


class Entry:
    """One key. `saved` is its state at the end of the last batch, `since` what was done after, and whether in
    silence."""

    __slots__ = ("offset", "saved", "seq", "since", "src", "state", "timers")

    def __init__(self, state: Any, saved: KeyState | None = None) -> None:
        self.state = state
        self.saved = saved
        self.seq, self.src, self.timers = (saved.seq, saved.src, list(saved.timers)) if saved else (-1, "", [])
        self.since: list[tuple[Record, bool]] = []
        self.offset = -1


@cache
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    """To make one takes longer than to make a table, and there is a table for each part."""
    return msgspec.msgpack.Decoder(type)


class KeyTable:
    """The keys of one part."""

    def __init__(self, state_type: type[State], event_type: Any = Any) -> None:
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, list[Record]] = {}
        self.replicas: dict[str, KeyState] = {}
        """By move and key: copies of others' keys, if this is their standby. Those of one move say nothing of another:
        one standby may end while the next one, of the same keys, is being filled."""
        self.stashed: dict[str, KeyState] = {}
        """By move and key: large states that are leaving in pieces, as they were when the first piece left."""
        self.gathered: dict[str, list[bytes]] = {}
        """By move and key: pieces of large states that are coming."""
        self.state_bytes = 0
        """How much state the keys have, as it is stored."""
        self.due: list[tuple[int, str]] = []
        """A heap of timers: of each key at least the next one, and some that no longer count."""
        self.touched: set[str] = set()
        """Keys that the batch has changed."""
        self.shape = shape_of(state_type)
        self._waited: set[str] = set()
        self._delta = Delta()
        self._type = state_type
        self._event, self._state = _decoder(event_type), _decoder(state_type)

    def weigh(self) -> int:
        """How many bytes of state there are, with those that are on their way through here and others' copies."""
        aside = (*self.stashed.values(), *self.replicas.values())
        pieces = sum(len(piece) for pieces in self.gathered.values() for piece in pieces)
        return self.state_bytes + pieces + sum(len(key_state.state) for key_state in aside)

    # ── Keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def install(self, key: str, key_state: KeyState) -> None:
        """Take over a key's state as it came; it is decoded when a record needs it."""
        entry = self.entries[key] = Entry(None, key_state)
        self.state_bytes += len(key_state.state)
        self.touched.add(key)
        if entry.timers:
            heappush(self.due, (entry.timers[0], key))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these keys' states."""
        for key in keys:
            saved = self.entries.pop(key).saved
            self.state_bytes -= len(saved.state) if saved else 0
            self.touched.add(key)

    def buffer(self, record: Record) -> None:
        """Keep a record until its key's state is here."""
        self.waiting.setdefault(record.key, []).append(record)
        self._waited.add(record.key)

    def unbuffer(self, key: str) -> list[Record]:
        """Give back what was kept for a key."""
        self._waited.add(key)
        return self.waiting.pop(key, [])

    def decode(self, key_state: KeyState) -> Any:
        """A key's state. One whose values are not what its class says is taken as it is: its operator made it so."""
        try:
            return self._state.decode(key_state.state)
        except msgspec.ValidationError:
            return self._as_it_is(key_state.state)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"a state that is none: {error}") from error

    def _as_it_is(self, blob: bytes) -> Any:
        state = self._type()
        try:
            for name, value in msgspec.msgpack.decode(blob).items():
                setattr(state, name, value)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Corrupt(f"a state that is none: {error}") from error
        return state

    # ── What comes from elsewhere ────────────────────────────────────────────────────────────────────────────────

    def check(self, key: str, key_state: KeyState, shape: str, strict: bool) -> None:
        """Raise `Corrupt` if a state is none of this operator's. `shape`: of states where it comes from; those of the
        same class are as their operator made them, whatever that is."""
        if shape == self.shape:
            return
        try:
            if strict or shape:
                self._state.decode(key_state.state)
            else:
                self.decode(key_state)
        except (ValueError, RecursionError, Corrupt) as error:
            name = self._type.__qualname__.rpartition("<locals>.")[2]
            raise Corrupt(f"the state of key {key!r} is no {name} as it is here: {error}") from error

    def received(self, records: Iterable[Buffered]) -> list[Record]:
        """Records that were sent on, or stored. Raises `Corrupt` if their events are none of this stage's."""
        try:
            return [self._restored(record) for record in records]
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"a record that waited for its key is none of this stage's as it is here: {error}") from error

    def stored(self, record: Record) -> Buffered:
        """A record that waits, in the form in which it lasts and travels."""
        r = record
        body = wire.encode(r.body)
        return Buffered(r.offset, r.bin, r.key, r.seq, r.epoch, r.src, r.event_us, r.ingress_us, body)

    def _restored(self, b: Buffered) -> Record:
        body = self._event.decode(b.body)
        return Record(b.offset, Kind.DATA, b.bin, b.key, b.seq, b.epoch, b.src, b.event_us, b.ingress_us, body)

    # ── On its way through ───────────────────────────────────────────────────────────────────────────────────────

    def keep_replica(self, move: str, key: str, key_state: KeyState | None) -> None:
        """Keep a copy of a key that lives elsewhere, or forget it."""
        place = f"{move} {key}"
        self._delta.replicas[place] = key_state
        if key_state is None:
            del self.replicas[place]
        else:
            self.replicas[place] = key_state

    def replicated(self, move: str) -> list[str]:
        """The keys of which a standby has copies, in an order that depends on nothing but the keys."""
        return sorted(place.removeprefix(f"{move} ") for place in self.replicas if place.startswith(f"{move} "))

    def promote(self, move: str, key: str) -> None:
        """A key lives here now: its copy, if there is one, becomes its state."""
        key_state = self.replicas.get(f"{move} {key}")
        if key_state is not None:
            self.keep_replica(move, key, None)
            if key not in self.entries:
                self.install(key, key_state)

    def stash(self, place: str, key_state: KeyState | None) -> None:
        """Keep a large state as it is now until its last piece has left, or forget it."""
        self._delta.stashed[place] = key_state
        if key_state is None:
            del self.stashed[place]
        else:
            self.stashed[place] = key_state

    def gather(self, move: str, key: str, number: int, piece: bytes) -> list[bytes]:
        """Keep a piece of a large state that comes with a move; return all that have come."""
        if not number:
            self.scatter(move, key)
        place = f"{move} {key}"
        if number == len(self.gathered.get(place, ())):
            self.keep_piece(place, piece)
        return self.gathered.get(place, [])

    def keep_piece(self, place: str, piece: bytes) -> None:
        """Keep one piece more under a name."""
        self.gathered.setdefault(place, []).append(piece)
        self._delta.gathered.setdefault(place, Gathered(anew=False)).added.append(piece)

    def give_pieces(self, place: str) -> list[bytes]:
        """Give back the pieces that were kept under a name."""
        self._delta.gathered[place] = Gathered(anew=True)
        return self.gathered.pop(place)

    def scatter(self, move: str, key: str = "") -> None:
        """Keep no pieces of a key, or of any, that came with a move."""
        for place in [place for place in self.gathered if place.startswith(f"{move} {key}")]:
            if not key or place == f"{move} {key}":
                self.give_pieces(place)

    # ── What lasts ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_dirty(self) -> bool:
        """Whether something has changed since the last `seal`."""
        return bool(self.touched or self._waited)

    def seal(self, redo: Callable[[str, Entry], None]) -> None:
        """End a batch: encode what it touched, once, for the state store and for parcels alike.

        `redo` does the batch of a key again whose state cannot be encoded, and leaves one that can.
        """
        delta = self._delta
        for key in self.touched:
            entry = self.entries.get(key)
            if entry is None:
                delta.entries[key] = None
                continue
            if entry.state is not None:
                try:
                    state = wire.encode(entry.state)
                except (TypeError, ValueError, OverflowError):
                    redo(key, entry)
                    state = wire.encode(entry.state)
                self.state_bytes += len(state) - (len(entry.saved.state) if entry.saved else 0)
                entry.saved = KeyState(entry.seq, entry.src, list(entry.timers), state)
                if len(state) > LARGE:
                    entry.state = None
            entry.since = []
            delta.entries[key] = entry.saved
        for key in self._waited:
            held = self.waiting.get(key)
            delta.waiting[key] = [self.stored(record) for record in held] if held else None
        self.touched.clear()
        self._waited.clear()

    def take_delta(self) -> Delta:
        """What changed since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def whole(self) -> Delta:
        """Everything, in the form of a delta."""
        entries = {key: entry.saved for key, entry in self.entries.items()}
        waiting = {key: [self.stored(record) for record in held] for key, held in self.waiting.items()}
        gathered = {key: Gathered(anew=True, added=list(pieces)) for key, pieces in self.gathered.items()}
        return Delta(entries, {**waiting}, {**self.replicas}, stashed={**self.stashed}, gathered=gathered)

    def add(self, delta: Delta) -> None:
        """Become what a delta describes. After the last one, `index`."""
        for key, key_state in delta.entries.items():
            if key_state is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = Entry(None, key_state)
        for kept, changed in ((self.replicas, delta.replicas), (self.stashed, delta.stashed)):
            for key, key_state in changed.items():
                if key_state is None:
                    kept.pop(key, None)
                else:
                    kept[key] = key_state
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

    def index(self) -> None:
        """After deltas were added: find out how much there is, and which timers are due when."""
        self.state_bytes = sum(len(entry.saved.state) for entry in self.entries.values() if entry.saved)
        self.due[:] = [(entry.timers[0], key) for key, entry in self.entries.items() if entry.timers]
        heapify(self.due)
