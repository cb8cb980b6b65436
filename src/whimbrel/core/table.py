"""The keys of one part of an instance: their states, the records buffered for them, and the changes of the last batch.

Independent of any protocol. Besides the keys that the part owns it holds data in transit: records that wait for their
key's state, copies of keys owned elsewhere, large states that leave or arrive in pieces. All of it is persisted as
deltas (delta.py): `seal` ends a batch, `take_delta` returns what it changed, `add` applies such a delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappush
from typing import Any

import msgspec

from whimbrel.core import wire
from whimbrel.core.delta import Delta, Gathered
from whimbrel.core.errors import Corrupt
from whimbrel.core.operator import State, shape_of
from whimbrel.core.record import Buffered, KeyState, Kind, Record

LARGE = 1 << 20
"""A state with more bytes is kept between batches only in its encoded form, not decoded as well."""


class Entry:
    """One key. `saved` is its state at the end of the last batch; `since` are the records applied after it, each with
    whether it was silent."""

    __slots__ = ("offset", "saved", "seq", "since", "src", "state", "timers")

    def __init__(self, state: Any, saved: KeyState | None = None) -> None:
        self.state = state
        self.saved = saved
        self.seq, self.src, self.timers = (saved.seq, saved.src, list(saved.timers)) if saved else (-1, "", [])
        self.since: list[tuple[Record, bool]] = []
        self.offset = -1


class KeyTable:
    """The keys of one part."""

    def __init__(self, state_type: type[State], event_type: Any = Any) -> None:
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, list[Record]] = {}
        self.replicas: dict[str, KeyState] = {}
        """By move and key: copies of keys of other instances, if this is their standby. Moves are kept apart, because
        one standby may end while the next one, of the same keys, is being filled."""
        self.stashed: dict[str, KeyState] = {}
        """By move and key: large states that leave in pieces, as they were when the first piece left."""
        self.gathered: dict[str, list[bytes]] = {}
        """By move and key: the pieces of large states that have arrived."""
        self.state_bytes = 0
        """Encoded bytes of state of all keys."""
        self.due: list[tuple[int, str]] = []
        """A heap of timers: at least the next one of each key, and some obsolete ones."""
        self.touched: set[str] = set()
        """Keys that the batch has changed."""
        self.shape = shape_of(state_type)
        self._waited: set[str] = set()
        self._delta = Delta()
        self._type = state_type
        self._event, self._state = wire.decoder(event_type), wire.decoder(state_type)

    def weigh(self) -> int:
        """Bytes of state in total, including states in transit and copies of other instances' keys."""
        aside = (*self.stashed.values(), *self.replicas.values())
        pieces = sum(len(piece) for pieces in self.gathered.values() for piece in pieces)
        return self.state_bytes + pieces + sum(len(key_state.state) for key_state in aside)

    # ── Keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def install(self, key: str, key_state: KeyState) -> None:
        """Install a key's state as it arrived; it is decoded when a record needs it."""
        entry = self.entries[key] = Entry(None, key_state)
        self.state_bytes += len(key_state.state)
        self.touched.add(key)
        if entry.timers:
            heappush(self.due, (entry.timers[0], key))

    def drop(self, keys: Iterable[str]) -> None:
        """Drop these keys' states."""
        for key in keys:
            saved = self.entries.pop(key).saved
            self.state_bytes -= len(saved.state) if saved else 0
            self.touched.add(key)

    def buffer(self, record: Record) -> None:
        """Buffer a record until its key's state arrives."""
        self.waiting.setdefault(record.key, []).append(record)
        self._waited.add(record.key)

    def unbuffer(self, key: str) -> list[Record]:
        """Remove and return the records buffered for a key."""
        self._waited.add(key)
        return self.waiting.pop(key, [])

    def decode(self, key_state: KeyState) -> Any:
        """Decode a key's state. Values that contradict the class are accepted: its operator set them."""
        try:
            return self._state.decode(key_state.state)
        except msgspec.ValidationError:
            return self._as_it_is(key_state.state)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"cannot decode the state of a key: {error}") from error

    def _as_it_is(self, blob: bytes) -> Any:
        state = self._type()
        try:
            for name, value in msgspec.msgpack.decode(blob).items():
                setattr(state, name, value)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Corrupt(f"cannot decode the state of a key: {error}") from error
        return state

    # ── State and records from other instances ───────────────────────────────────────────────────────────────────

    def check(self, key: str, key_state: KeyState, shape: str, strict: bool) -> None:
        """Raise `Corrupt` if a state does not fit this operator. `shape`: the shape of states at the sender; states of
        the same shape are accepted unchecked, because the same operator made them."""
        if shape == self.shape:
            return
        try:
            if strict or shape:
                self._state.decode(key_state.state)
            else:
                self.decode(key_state)
        except (ValueError, RecursionError, Corrupt) as error:
            name = self._type.__qualname__.rpartition("<locals>.")[2]
            raise Corrupt(f"the state of key {key!r} does not match {name} of this instance: {error}") from error

    def received(self, records: Iterable[Buffered]) -> list[Record]:
        """Decode forwarded or stored records. Raises `Corrupt` if their events do not fit this stage."""
        try:
            return [self._restored(record) for record in records]
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"a buffered record does not match the event type of this stage: {error}") from error

    def stored(self, record: Record) -> Buffered:
        """A buffered record, in the form in which it is stored and sent."""
        r = record
        body = wire.encode(r.body)
        return Buffered(r.offset, r.bin, r.key, r.seq, r.epoch, r.src, r.event_us, r.ingress_us, body)

    def _restored(self, b: Buffered) -> Record:
        body = self._event.decode(b.body)
        return Record(b.offset, Kind.DATA, b.bin, b.key, b.seq, b.epoch, b.src, b.event_us, b.ingress_us, body)

    # ── Copies and pieces in transit ─────────────────────────────────────────────────────────────────────────────

    def keep_replica(self, move: str, key: str, key_state: KeyState | None) -> None:
        """Store a copy of a key owned elsewhere, or drop it."""
        place = f"{move} {key}"
        self._delta.replicas[place] = key_state
        if key_state is None:
            del self.replicas[place]
        else:
            self.replicas[place] = key_state

    def replicated(self, move: str) -> list[str]:
        """The keys of which a standby has copies, in an order that depends only on the keys."""
        return sorted(place.removeprefix(f"{move} ") for place in self.replicas if place.startswith(f"{move} "))

    def promote(self, move: str, key: str) -> None:
        """This part now owns a key: its copy, if there is one, becomes its state."""
        key_state = self.replicas.get(f"{move} {key}")
        if key_state is not None:
            self.keep_replica(move, key, None)
            if key not in self.entries:
                self.install(key, key_state)

    def stash(self, place: str, key_state: KeyState | None) -> None:
        """Store a large state as it is now until its last piece has left, or drop it."""
        self._delta.stashed[place] = key_state
        if key_state is None:
            del self.stashed[place]
        else:
            self.stashed[place] = key_state

    def gather(self, move: str, key: str, number: int, piece: bytes) -> list[bytes]:
        """Store a piece of a large state of a move; return all pieces that have arrived."""
        place = f"{move} {key}"
        if not number and place in self.gathered:
            self.give_pieces(place)
        if number == len(self.gathered.get(place, ())):
            self.keep_piece(place, piece)
        return self.gathered.get(place, [])

    def keep_piece(self, place: str, piece: bytes) -> None:
        """Append a piece under a name."""
        self.gathered.setdefault(place, []).append(piece)
        self._delta.gathered.setdefault(place, Gathered(anew=False)).added.append(piece)

    def give_pieces(self, place: str) -> list[bytes]:
        """Remove and return the pieces stored under a name."""
        self._delta.gathered[place] = Gathered(anew=True)
        return self.gathered.pop(place)

    def scatter(self, move: str) -> None:
        """Drop all pieces that arrived with a move."""
        for place in [place for place in self.gathered if place.startswith(f"{move} ")]:
            self.give_pieces(place)

    # ── Deltas ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_dirty(self) -> bool:
        """Whether anything has changed since the last `seal`."""
        return bool(self.touched or self._waited)

    def seal(self, redo: Callable[[str, Entry], None]) -> None:
        """End a batch: encode the keys it touched, once, for both the state store and parcels.

        `redo` repeats the batch of a key whose state cannot be encoded, so that afterwards it can.
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
        """The whole table in the form of a delta."""
        entries = {key: entry.saved for key, entry in self.entries.items()}
        waiting = {key: [self.stored(record) for record in held] for key, held in self.waiting.items()}
        gathered = {key: Gathered(anew=True, added=list(pieces)) for key, pieces in self.gathered.items()}
        return Delta(entries, {**waiting}, {**self.replicas}, stashed={**self.stashed}, gathered=gathered)

    def add(self, delta: Delta) -> None:
        """Apply a delta. Call `index` after the last one."""
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
        """After deltas were added: recompute the number of bytes and the heap of timers."""
        self.state_bytes = sum(len(entry.saved.state) for entry in self.entries.values() if entry.saved)
        self.due[:] = [(entry.timers[0], key) for key, entry in self.entries.items() if entry.timers]
        heapify(self.due)
